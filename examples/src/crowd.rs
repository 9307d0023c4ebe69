//! Many sandboxes on one host at once, all looked after by one service: Crab's real use.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crab_core::Result;
use futures_util::StreamExt;

use crate::model::ModelServer;
use crate::run::{Outcome, Place, Recovery, Run, Runner};
use crate::sandbox::ScratchArea;
use crate::service::Service;

/// Sandboxes in which sessions can begin.
pub struct Crowd<'a> {
    // Dropped first: it acts on the sandboxes.
    service: Option<Arc<Service>>,
    runs: Vec<Run<'a>>,
    area: Arc<ScratchArea>,
}

/// How many sandboxes are launched, and looked at and taken down, at once.
const AT_ONCE: usize = 4;

impl<'a> Crowd<'a> {
    /// Launches a sandbox for each of the runners, with one service around them where there is something to recover
    /// from. The first runner says which turns it saves, and the delays of the model.
    ///
    /// # Errors
    /// Where a part of the machinery fails. Nothing is left behind, also when the future is dropped.
    pub async fn launch(runners: &'a [Runner], name: &str, recovery: Option<Recovery>) -> Result<Self> {
        let area = Arc::new(ScratchArea::new(name)?);
        let mut crowd = Self { service: None, runs: Vec::new(), area };
        let Some(first) = runners.first() else { return Ok(crowd) };
        let sessions = runners.iter().map(|runner| Arc::clone(&runner.session)).collect();
        let model = Arc::new(ModelServer::start_all(sessions, first.scale).await?);
        if let Some(recovery) = recovery.filter(|recovery| recovery.needs_crab()) {
            let config = first.config(recovery, crowd.area.path(), &model);
            crowd.service = Some(Arc::new(Service::start(&first.program, config).await?));
        }
        let launches = runners.iter().enumerate().map(|(number, runner)| {
            let place =
                Place { service: crowd.service.clone(), model: Arc::clone(&model), area: Arc::clone(&crowd.area) };
            async move { Run::new(runner, &format!("{name}-{number}"), recovery, place).await }
        });
        let mut launches = futures_util::stream::iter(launches).buffered(AT_ONCE);
        while let Some(run) = launches.next().await {
            crowd.runs.push(run?);
        }
        drop(launches);
        Ok(crowd)
    }

    /// The service's process.
    #[must_use]
    pub fn crab(&self) -> Option<u32> {
        self.service.as_ref().and_then(|service| service.pid())
    }

    /// Where the sandboxes' files, and all that is stored of them, are.
    #[must_use]
    pub fn directory(&self) -> PathBuf {
        self.area.path().to_owned()
    }

    /// Works through all sessions at once; each begins after its delay. `at_end` is called when all have ended their
    /// work, before anything is taken down. The outcomes are in the order of the runners.
    pub async fn work(self, delays: &[Duration], at_end: impl FnOnce()) -> Vec<Result<Outcome>> {
        let Self { service, runs, area } = self;
        let works = runs.into_iter().enumerate().map(|(at, run)| {
            let delay = delays.get(at).copied().unwrap_or_default();
            async move {
                tokio::time::sleep(delay).await;
                run.work_through().await
            }
        });
        let worked = futures_util::future::join_all(works).await;
        at_end();
        let ends = worked.into_iter().map(|run| async { run?.finish().await });
        let mut outcomes: Vec<_> = futures_util::stream::iter(ends).buffered(AT_ONCE).collect().await;
        if let Some(service) = service
            && let Err(error) = service.stop().await
        {
            outcomes.push(Err(error));
        }
        drop(area);
        outcomes
    }
}
