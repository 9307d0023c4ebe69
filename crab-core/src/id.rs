//! Names. Those that come from outside are checked once, when they are made, so that none reaches a path unchecked.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind};

/// The longest name in bytes. Room is left for suffixes under the 255 bytes that a file name may have.
const MAX_NAME: usize = 96;

fn check(what: &'static str, name: &str) -> Result<(), Error> {
    let refuse = |why: &str| {
        let shown: String = name.chars().take(40).flat_map(char::escape_default).collect();
        Err(Error::new(ErrorKind::InvalidInput, format!("the {what} \"{shown}\" {why}"))
            .fix("use 1 to 96 of the characters a-z A-Z 0-9 . _ -, beginning with a letter or digit"))
    };
    if name.is_empty() {
        return refuse("is empty");
    }
    if name.len() > MAX_NAME {
        return refuse("is too long");
    }
    if !name.as_bytes()[0].is_ascii_alphanumeric() {
        return refuse("does not begin with a letter or digit");
    }
    if !name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-')) {
        return refuse("holds a character that a name may not hold");
    }
    Ok(())
}

macro_rules! name {
    ($(#[$doc:meta])* $name:ident, $what:literal) => {
        $(#[$doc])*
        ///
        /// 1 to 96 of the characters `a-z A-Z 0-9 . _ -`, beginning with a letter or digit: safe as a file name.
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(Arc<str>);

        impl $name {
            /// Checks and takes a name.
            ///
            /// # Errors
            /// [`ErrorKind::InvalidInput`] where the name is not safe as a file name.
            pub fn new(name: impl AsRef<str>) -> Result<Self, Error> {
                check($what, name.as_ref())?;
                Ok(Self(name.as_ref().into()))
            }

            /// The name.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = Error;
            fn try_from(name: String) -> Result<Self, Error> {
                Self::new(name)
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> Self {
                name.as_str().to_owned()
            }
        }

        impl FromStr for $name {
            type Err = Error;
            fn from_str(name: &str) -> Result<Self, Error> {
                Self::new(name)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }
    };
}

name! {
    /// Names a sandbox. Chosen by the orchestrator, unique within a store.
    SandboxId, "sandbox id"
}
name! {
    /// Names one artifact of a sandbox. Chosen by the engine, never used twice for one sandbox and domain.
    ArtifactId, "artifact id"
}
name! {
    /// Names one operation, such as a restore, so that a second attempt after a crash is known to be the same.
    OperationId, "operation id"
}
name! {
    /// A name that a person or program gives to one version of a sandbox, such as `before-migration`.
    Label, "label"
}

macro_rules! number {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub u64);

        impl $name {
            /// The number that follows.
            #[must_use]
            pub fn next(self) -> Self {
                Self(self.0.saturating_add(1))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
    };
}

number! {
    /// Counts the turns of a sandbox, from 1. Never goes back, also not when the sandbox is restored.
    TurnNumber, "t"
}
number! {
    /// Counts the versions of a sandbox, from 1. Never goes back, also not when the sandbox is restored.
    VersionId, "v"
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_that_could_leave_their_folder_are_refused() {
        for bad in ["", ".", "..", "../x", "a/b", "a\0b", "-rf", ".hidden", "a b", "\u{e4}", &"x".repeat(10_000)] {
            let error = SandboxId::new(bad).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{bad:?}");
            assert!(error.to_string().len() < 400, "the message must not repeat 10 kB of input");
        }
        assert!(serde_json::from_str::<SandboxId>("\"../x\"").is_err());
    }

    proptest! {
        #[test]
        fn an_accepted_name_is_one_normal_path_component(name in ".{0,120}") {
            if let Ok(id) = SandboxId::new(&name) {
                let mut parts = std::path::Path::new(id.as_str()).components();
                prop_assert!(matches!(parts.next(), Some(std::path::Component::Normal(_))));
                prop_assert!(parts.next().is_none());
            }
        }
    }
}
