//! A version on its way to another host: its manifest, its files as a stream, its process images.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use crab_core::{
    ByteStream, CheckpointBackend, Error, ErrorKind, ExportRequest, Half, ImportRequest, Manifest, Result, SandboxId,
};
use crab_engine::Engine;
use tokio::fs::File;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const MANIFEST: &str = "manifest.json";
const FILES: &str = "files";
const IMAGES: &str = "images";

/// The largest piece of a stream.
const PIECE: usize = 1 << 20;

/// What parcels are made from and unpacked to.
pub(super) struct Parcels {
    pub(super) files: Arc<dyn CheckpointBackend>,
    /// Where the process backend keeps its artifacts: a directory each, below one of the sandbox.
    pub(super) images: PathBuf,
}

impl Parcels {
    /// Writes the newest version of a sandbox to a directory.
    pub(super) async fn export(&self, engine: &Engine, id: &SandboxId, parcel: &Path) -> Result<()> {
        let missing = || Error::new(ErrorKind::NotFound, format!("{id} has no version with files"));
        let newest = engine.versions(id).pop().ok_or_else(missing)?;
        let Half::Stored(files) = &newest.filesystem else { return Err(missing()) };
        let io = |e| Error::io(format!("write {}", parcel.display()), e);
        tokio::fs::create_dir_all(parcel).await.map_err(io)?;
        let mut stream = self.files.export(ExportRequest::full(files)).await?;
        let mut file = File::create(parcel.join(FILES)).await.map_err(io)?;
        while let Some(piece) = stream.next().await? {
            file.write_all(&piece).await.map_err(io)?;
        }
        file.sync_all().await.map_err(io)?;
        if let Half::Stored(processes) = &newest.process {
            let from = self.images.join(id.as_str()).join(processes.id.as_str());
            copy_files(&from, &parcel.join(IMAGES)).await?;
        }
        let text = serde_json::to_vec(&newest)
            .map_err(|e| Error::new(ErrorKind::Internal, "cannot write a manifest as JSON").caused_by(e))?;
        tokio::fs::write(parcel.join(MANIFEST), text).await.map_err(io)
    }

    /// Has the engine take over what was written.
    pub(super) async fn import(&self, engine: &Engine, id: &SandboxId, parcel: &Path) -> Result<()> {
        let io = |e| Error::io(format!("read {}", parcel.display()), e);
        let text = tokio::fs::read(parcel.join(MANIFEST)).await.map_err(io)?;
        let bad = |e| Error::new(ErrorKind::InvalidInput, "the parcel's manifest cannot be read").caused_by(e);
        let mut manifest: Manifest = serde_json::from_slice(&text).map_err(bad)?;
        if let Half::Stored(files) = &mut manifest.filesystem {
            let mut stream = Pieces(File::open(parcel.join(FILES)).await.map_err(io)?);
            let request = ImportRequest { sandbox: id, artifact: files.id.clone(), base: None, stream: &mut stream };
            // The same files, in a subvolume of this host.
            *files = self.files.import(request).await?;
        }
        if let Half::Stored(processes) = &manifest.process {
            let to = self.images.join(id.as_str()).join(processes.id.as_str());
            copy_files(&parcel.join(IMAGES), &to).await?;
        }
        engine.adopt(manifest).await
    }
}

/// Copies a directory's files.
async fn copy_files(from: &Path, to: &Path) -> Result<()> {
    let io = |e| Error::io(format!("copy {} to {}", from.display(), to.display()), e);
    tokio::fs::create_dir_all(to).await.map_err(io)?;
    for directory in [to, to.parent().unwrap_or(to)] {
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        tokio::fs::set_permissions(directory, mode).await.map_err(io)?;
    }
    let mut entries = tokio::fs::read_dir(from).await.map_err(io)?;
    while let Some(entry) = entries.next_entry().await.map_err(io)? {
        tokio::fs::copy(entry.path(), to.join(entry.file_name())).await.map_err(io)?;
    }
    Ok(())
}

struct Pieces(File);

#[async_trait]
impl ByteStream for Pieces {
    async fn next(&mut self) -> Result<Option<Vec<u8>>> {
        let mut piece = vec![0; PIECE];
        let length = self.0.read(&mut piece).await.map_err(|e| Error::io("read a parcel", e))?;
        piece.truncate(length);
        Ok((length > 0).then_some(piece))
    }
}
