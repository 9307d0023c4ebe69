//! Names that the engine gives: artifacts and the backends' view of an operation. Pure but for the randomness.

use crab_core::{ArtifactId, OperationId, Result, VersionId};

use crate::nonce::nonce;

/// `v12-0123456789abcdef`: the version that it is meant for, and a part that makes every attempt's name its own.
pub(super) fn artifact(version: VersionId) -> Result<ArtifactId> {
    ArtifactId::new(format!("{version}-{:016x}", nonce()))
}

/// The version of an artifact's name, where the engine gave it.
pub(super) fn version_of(artifact: &ArtifactId) -> Option<VersionId> {
    let (number, nonce) = artifact.as_str().strip_prefix('v')?.split_once('-')?;
    let hex = nonce.len() == 16 && nonce.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    let version = VersionId(number.parse().ok()?);
    (hex && version.to_string()[1..] == *number).then_some(version)
}

/// A name for an operation that was given none.
pub(super) fn operation() -> Result<OperationId> {
    OperationId::new(format!("op-{:016x}", nonce()))
}

/// A fresh name under which backends see a further attempt of an operation. See `restore`.
pub(super) fn attempt(operation: &OperationId) -> Result<OperationId> {
    let short: String = operation.as_str().chars().take(72).collect();
    OperationId::new(format!("{short}.{:016x}", nonce()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_names_are_known_and_others_are_not() {
        let name = artifact(VersionId(12)).unwrap();
        assert_eq!(version_of(&name), Some(VersionId(12)));
        assert_ne!(name, artifact(VersionId(12)).unwrap());
        for other in ["v12", "v012-0123456789abcdef", "v1-0123456789ABCDEF", "nightly-0123456789abcdef", "v1-0"] {
            assert_eq!(version_of(&ArtifactId::new(other).unwrap()), None, "{other}");
        }
        let long = OperationId::new("x".repeat(96)).unwrap();
        assert_ne!(attempt(&long).unwrap(), attempt(&long).unwrap());
    }
}
