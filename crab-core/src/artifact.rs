//! One domain's stored state.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::id::{ArtifactId, SandboxId};
use crate::sandbox::External;

/// The two kinds of state that are checkpointed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Domain {
    /// The files of the sandbox's root filesystem.
    Filesystem,
    /// The live processes of the sandbox, their memory, and what only the kernel holds for them (tmpfs, ipc).
    Process,
}

impl fmt::Display for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Filesystem => "filesystem",
            Self::Process => "process",
        })
    }
}

/// A SHA-256, shown and stored as 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(pub [u8; 32]);

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

impl TryFrom<String> for Digest {
    type Error = crate::Error;
    fn try_from(text: String) -> crate::Result<Self> {
        let bad = || crate::Error::new(crate::ErrorKind::Corrupt, "a digest is not 64 hexadecimal digits");
        if text.len() != 64 || !text.is_ascii() {
            return Err(bad());
        }
        let mut bytes = [0; 32];
        for (i, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).map_err(|_| bad())?;
        }
        Ok(Self(bytes))
    }
}

/// One domain's stored state: P or F of a version. Made by [`Captured::persist`](crate::Captured::persist); it exists
/// only when it is durable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Artifact {
    /// Unique for the sandbox and domain.
    pub id: ArtifactId,
    /// The sandbox whose state it is.
    pub sandbox: SandboxId,
    /// Which kind of state.
    pub domain: Domain,
    /// The backend that made it and alone can read it: [`CheckpointBackend::name`](crate::CheckpointBackend::name).
    pub backend: String,
    /// Bytes that were written to make it durable, where the backend knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Bytes of the state that it holds: what a copy by itself takes, with nothing shared and nothing compressed. Where
    /// the backend knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// Artifacts of the same backend, domain and sandbox that must be kept for this one to be whole. A backend may name
    /// the nearest alone: those that they depend on are kept with them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub depends_on: Vec<ArtifactId>,
    /// What the host must give again at restore.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub external: Vec<External>,
    /// Facts that the backend needs or that help a person: tool versions, root identity, times. A process backend names
    /// the processes that it saved, see [`process_fact`](Self::process_fact).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub facts: BTreeMap<String, String>,
}

const PROCESS_FACT: &str = "process.";

impl Artifact {
    /// The name of the fact that tells of one saved process, by its number inside the sandbox. The fact's value is the
    /// process's name.
    #[must_use]
    pub fn process_fact(pid: u32) -> String {
        format!("{PROCESS_FACT}{pid}")
    }

    /// The saved processes by their numbers inside the sandbox, as far as the facts name them.
    #[must_use]
    pub fn processes(&self) -> BTreeMap<u32, &str> {
        let facts = self.facts.iter();
        facts.filter_map(|(fact, name)| Some((fact.strip_prefix(PROCESS_FACT)?.parse().ok()?, name.as_str()))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn processes_are_told_from_other_facts() {
        let facts = [(Artifact::process_fact(7), "sh"), ("criu".into(), "4.2"), ("process.x".into(), "")];
        let artifact = Artifact {
            id: ArtifactId::new("a").unwrap(),
            sandbox: SandboxId::new("box").unwrap(),
            domain: Domain::Process,
            backend: "x".into(),
            bytes: None,
            size: None,
            depends_on: vec![],
            external: vec![],
            facts: facts.into_iter().map(|(fact, value)| (fact, value.to_owned())).collect(),
        };
        assert_eq!(artifact.processes(), BTreeMap::from([(7, "sh")]));
    }

    proptest! {
        #[test]
        fn digests_survive_json(bytes: [u8; 32]) {
            let digest = Digest(bytes);
            let text = serde_json::to_string(&digest).unwrap();
            prop_assert_eq!(serde_json::from_str::<Digest>(&text).unwrap(), digest);
        }

        #[test]
        fn no_text_makes_the_digest_reader_panic(text in "\\PC{0,70}") {
            let _ = Digest::try_from(text);
        }
    }
}
