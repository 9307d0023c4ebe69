//! Pins and labels: versions that no rule removes.

use crab_core::{Error, ErrorKind, Label, Result, SandboxId, VersionId};

use super::calls::blocking;
use super::{Engine, Inner, detached};
use crate::store::{Mark, Marks};

impl Engine {
    /// Keeps a version until it is unpinned or the sandbox is forgotten. Durable when this returns. Pinning a pinned
    /// version does nothing.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]; errors of the store: then the pins and labels are what they were.
    pub async fn pin(&self, id: &SandboxId, version: VersionId) -> Result<()> {
        self.mark(id, Some(version), move |marks| marks.entry(version).or_default().pinned = true).await
    }

    /// Takes a pin away. Does nothing where there is none.
    ///
    /// # Errors
    /// As for [`pin`](Self::pin).
    pub async fn unpin(&self, id: &SandboxId, version: VersionId) -> Result<()> {
        self.mark(id, None, move |marks| {
            if let Some(mark) = marks.get_mut(&version) {
                mark.pinned = false;
            }
        })
        .await
    }

    /// Gives a version a name of the caller's, and keeps the version while it has one. A version may have several; a
    /// label that another version of the sandbox has is taken from it. Durable when this returns.
    ///
    /// # Errors
    /// As for [`pin`](Self::pin).
    pub async fn label(&self, id: &SandboxId, version: VersionId, label: &Label) -> Result<()> {
        let label = label.clone();
        self.mark(id, Some(version), move |marks| {
            marks.values_mut().for_each(|mark| _ = mark.labels.remove(&label));
            marks.entry(version).or_default().labels.insert(label);
        })
        .await
    }

    /// Takes a label away. Does nothing where no version has it.
    ///
    /// # Errors
    /// As for [`pin`](Self::pin).
    pub async fn unlabel(&self, id: &SandboxId, label: &Label) -> Result<()> {
        let label = label.clone();
        self.mark(id, None, move |marks| marks.values_mut().for_each(|mark| _ = mark.labels.remove(&label))).await
    }

    /// The version that has a label.
    #[must_use]
    pub fn labelled(&self, id: &SandboxId, label: &Label) -> Option<VersionId> {
        self.0.store.with(|index| {
            let marks = &index.sandboxes.get(id)?.marks;
            marks.iter().find(|(_, mark)| mark.labels.contains(label)).map(|(version, _)| *version)
        })
    }

    async fn mark(
        &self,
        id: &SandboxId,
        version: Option<VersionId>,
        change: impl FnOnce(&mut Marks) + Send + 'static,
    ) -> Result<()> {
        let (inner, id) = (self.0.clone(), id.clone());
        detached("mark a version", async move {
            inner.check_open()?;
            let lock = inner.work_lock(&id);
            let _exclusive = lock.lock().await;
            inner.mark(&id, version, change).await
        })
        .await
    }
}

impl Inner {
    async fn mark(&self, id: &SandboxId, version: Option<VersionId>, change: impl FnOnce(&mut Marks)) -> Result<()> {
        let mut marks = self.store.with(|index| {
            let sandbox = index.sandboxes.get(id);
            let sandbox =
                sandbox.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("the store knows no sandbox {id}")))?;
            match version {
                Some(version) if !sandbox.versions.contains_key(&version) => {
                    Err(Error::new(ErrorKind::NotFound, format!("{id} has no version {version}")))
                }
                _ => Ok(sandbox.marks.clone()),
            }
        })?;
        change(&mut marks);
        marks.retain(|_, mark| *mark != Mark::default());
        let (store, owned) = (self.store.clone(), id.clone());
        blocking("write pins and labels", move || store.put_marks(&owned, marks)).await?
    }
}
