//! Where tests cut a restore short.

use crab_core::Result;

/// Told after each step of a restore; an error or a panic stops it there.
pub trait Steps<S>: Send + Sync {
    /// This step is behind.
    ///
    /// # Errors
    /// Those that the restore shall end with.
    fn done(&self, step: S) -> Result<()>;
}

/// What a running product does between steps: nothing.
#[derive(Clone, Copy, Debug)]
pub struct Straight;

impl<S> Steps<S> for Straight {
    fn done(&self, _step: S) -> Result<()> {
        Ok(())
    }
}
