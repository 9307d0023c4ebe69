//! The steps between two effects, where a test can let the engine fail, panic or die.
//!
//! Without the feature `failpoints` this is nothing.

use std::fmt;
#[cfg(feature = "failpoints")]
use std::sync::Arc;

use crab_core::Result;

/// Called at each step with its name; an error becomes the step's error.
#[cfg(feature = "failpoints")]
pub type StepHook = Arc<dyn Fn(&'static str) -> Result<()> + Send + Sync>;

#[derive(Clone, Default)]
pub(crate) struct Steps(#[cfg(feature = "failpoints")] Option<StepHook>);

impl Steps {
    #[cfg(feature = "failpoints")]
    pub(crate) fn new(hook: StepHook) -> Self {
        Self(Some(hook))
    }

    #[cfg(feature = "failpoints")]
    pub(crate) fn reach(&self, step: &'static str) -> Result<()> {
        self.0.as_ref().map_or(Ok(()), |hook| hook(step))
    }

    #[cfg(not(feature = "failpoints"))]
    #[inline]
    #[allow(clippy::unused_self, reason = "the other variant uses it")]
    pub(crate) fn reach(&self, _step: &'static str) -> Result<()> {
        Ok(())
    }
}

impl fmt::Debug for Steps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Steps")
    }
}
