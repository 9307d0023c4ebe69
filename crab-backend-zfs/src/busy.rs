//! Whether something still uses a sandbox's root.

use std::path::Path;

use crab_core::{Error, ErrorKind, Result};

use crate::mounts::{self, Mounts};

/// Refuses a root that is mounted elsewhere too, in which something is mounted, or that a process uses. Only the mounts
/// that this process sees are known. Others live in mount namespaces of their own, which end with their tasks; where one
/// outlives them, it keeps seeing the replaced tree and does no harm to the restored one.
pub(crate) fn refuse_use(root: &Path) -> Result<()> {
    let busy = |who: String| {
        let message = format!("the root {} is in use by {who}", root.display());
        Error::new(ErrorKind::Busy, message)
    };
    let mounts = Mounts::read()?;
    if let Some(mount) = mounts.using(root) {
        return Err(busy(format!("the mount {}", mount.point.display())).fix("unmount it first"));
    }
    if mounts.at(root).is_some() && !mounts::is_idle(root)? {
        let users = mounts::users(root);
        let who = if users.is_empty() { "a process".to_owned() } else { format!("process {}", users.join(", ")) };
        return Err(busy(who).fix("end it first"));
    }
    Ok(())
}
