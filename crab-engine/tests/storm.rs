//! Everything at once: many callers on a few sandboxes. Nothing hangs, no error is one of ours, and in the end all is
//! sound.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Fixture, assert_sound, close, reopen};
use crab_core::{Condition, Error, ErrorKind, SandboxId, Verdict, VersionId};
use crab_engine::retention::Retention;
use crab_engine::{Deadlines, Engine, ForkOptions, RestoreOptions, Select};

struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// Others may be quicker, and then a call is refused. Everything else is a fault of the engine's.
fn allowed(error: &Error, what: &str) {
    let kinds = [ErrorKind::Busy, ErrorKind::NotFound, ErrorKind::Cancelled, ErrorKind::Died];
    assert!(kinds.contains(&error.kind()), "{what}: {:?}: {error}", error.kind());
}

async fn call(f: &Fixture, engine: &Engine, ids: &[SandboxId], random: &mut Random, name: &str) {
    let id = &ids[usize::try_from(random.below(ids.len() as u64)).unwrap()];
    let version = VersionId(1 + random.below(engine.versions(id).len() as u64 + 1));
    let (what, result) = match random.below(14) {
        0 => ("restore", engine.restore(id, Select::Latest, RestoreOptions::default()).await.map(drop)),
        1 => ("go back", engine.restore(id, Select::Version(version), RestoreOptions::default()).await.map(drop)),
        2 => {
            let into = common::id(name);
            f.world.create_stopped(&into);
            let forked = engine.fork(id, version, &into, ForkOptions::default()).await;
            if forked.is_ok() {
                assert_eq!(f.world.condition_of(&into), Condition::Running, "a fork does not run");
                common::turn(engine, &into, 1000).await;
                engine.detach(&into).await.unwrap();
                engine.forget(&into).await.unwrap();
            }
            ("fork", forked.map(drop))
        }
        3 => {
            let pruned = engine.prune(&Retention::keep_all().last(2)).await;
            ("prune", pruned.map(|report| assert!(report.failed.is_empty(), "{report:?}")))
        }
        4 => ("remove", engine.remove(id, version).await),
        5 => ("pin", engine.pin(id, version).await),
        6 => ("unpin", engine.unpin(id, version).await),
        7 => {
            engine.detach(id).await.unwrap();
            ("attach", engine.attach(id).await)
        }
        8 => ("attach", engine.attach(id).await),
        9 => ("checkpoint", engine.checkpoint(id).await.map(drop)),
        10 => {
            f.world.crash(id);
            ("crash", Ok(()))
        }
        _ => {
            // It may be frozen or dead at this moment.
            let _ = f.world.write(id, "/n", name);
            let _ = f.world.remember(id, "server", name);
            match common::turn(engine, id, 1 + random.below(1000)).await {
                Verdict::Durable(_) => ("turn", Ok(())),
                Verdict::Failed(error) | Verdict::Unprotected(error) => ("turn", Err((*error).clone())),
            }
        }
    };
    if let Err(error) = result {
        allowed(&error, what);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_callers_at_once_hang_nobody_and_break_nothing() {
    for seed in 1..=4u64 {
        let f = Arc::new(Fixture::new());
        let make = || f.builder().deadlines(Deadlines::default()).retention(Retention::keep_all().last(6));
        let engine = make().open().await.unwrap();
        let ids: Arc<Vec<SandboxId>> = Arc::new((0..3).map(|n| common::id(&format!("box-{n}"))).collect());
        for id in ids.iter() {
            f.world.create(id);
            engine.attach(id).await.unwrap();
            common::turn(&engine, id, 1).await;
        }
        let callers = (0..6u64).map(|caller| {
            let (f, engine, ids) = (f.clone(), engine.clone(), ids.clone());
            tokio::spawn(async move {
                let mut random = Random(seed * 1000 + caller + 1);
                for step in 0..100 {
                    call(&f, &engine, &ids, &mut random, &format!("c{caller}-{step}")).await;
                }
            })
        });
        let all = futures_util::future::join_all(callers);
        let ended = tokio::time::timeout(Duration::from_secs(120), all).await.expect("somebody hangs");
        ended.into_iter().for_each(|caller| caller.unwrap());
        for id in ids.iter() {
            if f.world.condition_of(id) == Condition::Stopped {
                engine.restore(id, Select::Latest, RestoreOptions::default()).await.unwrap();
            }
            engine.attach(id).await.unwrap();
            f.world.write(id, "/last", "x").unwrap();
            let last = common::turn(&engine, id, 2000).await;
            assert!(matches!(last, Verdict::Durable(_)), "seed {seed}: {last:?}");
            engine.restore(id, Select::Latest, RestoreOptions::default()).await.unwrap();
            assert!(f.world.files(id).contains_key("/last"));
        }
        close(engine).await;
        let engine = reopen(make).await;
        assert!(engine.opened().unfinished.is_empty() && engine.opened().damaged.is_empty(), "seed {seed}");
        assert_sound(&f.world, &engine, &format!("seed {seed}")).await;
        assert_eq!(engine.opened().orphans_removed, 0, "seed {seed}: something was left over");
        close(engine).await;
    }
}
