//! Random steps on the in-memory world against a simple model.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod common;
#[path = "common/model.rs"]
mod model;

use async_trait::async_trait;
use common::{Fixture, close, reopen};
use crab_core::SandboxId;
use crab_core::memory::MemoryWorld;
use crab_engine::Engine;
use model::{Real, Run, State, Step};
use proptest::prelude::*;

struct InMemory {
    fixture: Fixture,
    engine: Option<Engine>,
}

#[async_trait]
impl Real for InMemory {
    fn engine(&self) -> &Engine {
        self.engine.as_ref().unwrap()
    }
    async fn write(&mut self, id: &SandboxId, file: u8, value: u32) {
        self.world().write(id, &format!("/{file}"), &value.to_string()).unwrap();
    }
    async fn remember(&mut self, id: &SandboxId, value: u32) {
        self.world().remember(id, "server", &value.to_string()).unwrap();
    }
    async fn state(&mut self, id: &SandboxId) -> State {
        let files = self.world().files(id).into_iter();
        let files = files.map(|(path, value)| (path[1..].parse().unwrap(), value.parse().unwrap())).collect();
        State { files, memory: self.world().processes(id).get("server").map(|value| value.parse().unwrap()) }
    }
    async fn crash(&mut self, id: &SandboxId) {
        self.world().crash(id);
    }
    async fn prepare(&mut self, id: &SandboxId) {
        self.world().create_stopped(id);
    }
    async fn restart(&mut self) {
        close(self.engine.take().unwrap()).await;
        let fixture = &self.fixture;
        self.engine = Some(reopen(|| fixture.builder().deadlines(crab_engine::Deadlines::default())).await);
    }
    async fn check(&mut self, context: &str) {
        common::assert_sound(self.world(), self.engine(), context).await;
    }
    fn is_exact(&self) -> bool {
        true
    }
}

impl InMemory {
    fn world(&self) -> &MemoryWorld {
        &self.fixture.world
    }
}

fn step() -> impl Strategy<Value = Step> {
    let (sandbox, version, value) = (0..4usize, 0..8usize, 0..4u32);
    prop_oneof![
        6 => (sandbox.clone(), 0..3u8, value.clone())
            .prop_map(|(sandbox, file, value)| Step::Write { sandbox, file, value }),
        4 => (sandbox.clone(), value).prop_map(|(sandbox, value)| Step::Remember { sandbox, value }),
        10 => sandbox.clone().prop_map(|sandbox| Step::Turn { sandbox }),
        2 => sandbox.clone().prop_map(|sandbox| Step::Checkpoint { sandbox }),
        2 => sandbox.clone().prop_map(|sandbox| Step::Crash { sandbox }),
        4 => (sandbox.clone(), prop::option::of(version.clone()))
            .prop_map(|(sandbox, version)| Step::Restore { sandbox, version }),
        2 => (sandbox.clone(), version.clone()).prop_map(|(sandbox, version)| Step::Fork { sandbox, version }),
        2 => (sandbox.clone(), version.clone(), any::<bool>())
            .prop_map(|(sandbox, version, pinned)| Step::Pin { sandbox, version, pinned }),
        2 => (sandbox, version).prop_map(|(sandbox, version)| Step::Remove { sandbox, version }),
        2 => (0..5usize).prop_map(|last| Step::Prune { last }),
        1 => Just(Step::Restart),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, max_shrink_iters: 200, ..ProptestConfig::default() })]

    #[test]
    fn an_engine_does_what_the_model_does(steps in prop::collection::vec(step(), 1..60)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let fixture = Fixture::new();
            let engine = fixture.builder().deadlines(crab_engine::Deadlines::default()).open().await.unwrap();
            engine.attach(&fixture.id).await.unwrap();
            let id = fixture.id.clone();
            let mut run = Run::new(InMemory { fixture, engine: Some(engine) }, id);
            for (at, step) in steps.iter().enumerate() {
                run.step(*step, &format!("step {at}, {step:?}")).await;
            }
            run.finish("").await;
        });
    }
}
