//! Whose artifact it is.

use std::collections::BTreeMap;

use crab_core::{Artifact, ArtifactId, Domain, Error, ErrorKind, Result, SandboxId};

/// An artifact of this backend without facts.
#[must_use]
pub fn bare(backend: &str, sandbox: &SandboxId, id: &ArtifactId) -> Artifact {
    Artifact {
        id: id.clone(),
        sandbox: sandbox.clone(),
        domain: Domain::Filesystem,
        backend: backend.to_owned(),
        bytes: None,
        size: None,
        depends_on: Vec::new(),
        external: Vec::new(),
        facts: BTreeMap::new(),
    }
}

/// Refuses an artifact that another backend made.
///
/// # Errors
/// [`InvalidInput`](ErrorKind::InvalidInput).
pub fn require_of(backend: &str, artifact: &Artifact) -> Result<()> {
    if artifact.backend == backend && artifact.domain == Domain::Filesystem {
        return Ok(());
    }
    let message = format!(
        "artifact {} is a {} artifact of the backend \"{}\", not a filesystem artifact of \"{backend}\"",
        artifact.id, artifact.domain, artifact.backend
    );
    Err(Error::new(ErrorKind::InvalidInput, message).fix("give it to the backend that made it"))
}

/// That there is no such artifact.
#[must_use]
pub fn missing(artifact: &Artifact) -> Error {
    Error::new(ErrorKind::NotFound, format!("there is no artifact {} of {}", artifact.id, artifact.sandbox))
}

/// That an artifact's name is taken.
#[must_use]
pub fn taken(sandbox: &SandboxId, id: &ArtifactId) -> Error {
    Error::new(ErrorKind::AlreadyExists, format!("an artifact {id} of {sandbox} exists already"))
}
