//! Properties that were set on a sandbox's root itself, and that the clone which takes its place gets too.
//!
//! What is set above the root is inherited anyway. ZFS tells properties as texts and takes them as numbers.

use crate::sys::{Map, Value};

/// The properties that go with a root.
pub(crate) const CARRIED: &[&str] = &[
    "quota",
    "refquota",
    "reservation",
    "refreservation",
    "recordsize",
    "mountpoint",
    "canmount",
    "atime",
    "relatime",
    "exec",
    "setuid",
    "devices",
    "xattr",
    "acltype",
    "sync",
    "compression",
];

/// The same properties, as ZFS takes them. What it tells in a way that is not known here stays behind, with a line in
/// the log.
pub(crate) fn settable(carried: &Map) -> Map {
    let mut properties = Map::new();
    for (name, value) in carried {
        let known = match value {
            Value::Text(text) if name == "mountpoint" => Some(Value::Text(text.clone())),
            Value::Text(text) => number(name, text).map(Value::U64),
            value => value.number().map(Value::U64),
        };
        match known {
            Some(value) => drop(properties.insert(name.clone(), value)),
            None => tracing::warn!(property = name, ?value, "a property of a sandbox's root is not carried over"),
        }
    }
    properties
}

fn number(property: &str, value: &str) -> Option<u64> {
    let words: &[(&str, u64)] = match property {
        "canmount" => &[("off", 0), ("on", 1), ("noauto", 2)],
        "xattr" => &[("off", 0), ("dir", 1), ("on", 2), ("sa", 2)],
        "acltype" => &[("off", 0), ("noacl", 0), ("posix", 1), ("posixacl", 1), ("nfsv4", 2)],
        "sync" => &[("standard", 0), ("always", 1), ("disabled", 2)],
        "compression" => &[("on", 1), ("off", 2), ("lzjb", 3), ("gzip", 10), ("zle", 14), ("lz4", 15), ("zstd", 16)],
        _ => &[("off", 0), ("on", 1)],
    };
    words.iter().find(|(word, _)| *word == value).map(|(_, number)| *number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn properties_become_what_zfs_takes() {
        let carried = Map::from([
            ("refquota".to_owned(), Value::I64(1 << 30)),
            ("mountpoint".to_owned(), "/srv/box".into()),
            ("compression".to_owned(), "lz4".into()),
            ("atime".to_owned(), "off".into()),
            ("sync".to_owned(), "sometimes".into()),
        ]);
        let expected = Map::from([
            ("refquota".to_owned(), Value::U64(1 << 30)),
            ("mountpoint".to_owned(), "/srv/box".into()),
            ("compression".to_owned(), Value::U64(15)),
            ("atime".to_owned(), Value::U64(0)),
        ]);
        assert_eq!(settable(&carried), expected);
    }
}
