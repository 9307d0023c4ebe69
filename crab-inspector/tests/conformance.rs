//! Both inspectors against the rules that every delta source keeps.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::Duration;

use async_trait::async_trait;
use common::{Cgroup, Image, Live, able, block_on, run};
use crab_core::conformance::{self, DeltaFixture};
use crab_core::{
    Condition, Domain, Error, ErrorKind, External, InheritedFd, Result, Sandbox, SandboxHost, SandboxId, StateDelta,
};
use crab_inspector::{Inspector, PollingInspector};

struct World {
    live: Live,
    root: PathBuf,
    cgroup: Cgroup,
}

/// Sandboxes that are a subvolume and one process that waits.
#[derive(Default)]
struct Worlds(Mutex<HashMap<SandboxId, World>>);

impl Worlds {
    fn with<T>(&self, id: &SandboxId, work: impl FnOnce(&mut World) -> T) -> Result<T> {
        let mut worlds = self.0.lock().unwrap();
        let world = worlds.get_mut(id).ok_or_else(|| Error::new(ErrorKind::NotFound, "no such sandbox"))?;
        Ok(work(world))
    }
}

#[async_trait]
impl SandboxHost for Worlds {
    async fn describe(&self, id: &SandboxId) -> Result<Sandbox> {
        self.with(id, |world| {
            Sandbox::new(id.clone(), &world.root, &world.cgroup.path).with_init(world.live.child.id())
        })
    }
    async fn freeze(&self, id: &SandboxId) -> Result<()> {
        self.with(id, |world| world.cgroup.freeze(true))
    }
    async fn thaw(&self, id: &SandboxId) -> Result<()> {
        self.with(id, |world| world.cgroup.freeze(false))
    }
    async fn kill(&self, _: &SandboxId) -> Result<()> {
        unreachable!("the rules for a delta kill nothing")
    }
    async fn condition(&self, _: &SandboxId) -> Result<Condition> {
        Ok(Condition::Unknown)
    }
    async fn inherit(&self, _: &SandboxId, _: &[External]) -> Result<Vec<InheritedFd>> {
        unreachable!("the rules for a delta restore nothing")
    }
    async fn adopt(&self, _: &SandboxId, _: u32) -> Result<()> {
        unreachable!("the rules for a delta restore nothing")
    }
    async fn relaunch(&self, _: &SandboxId) -> Result<()> {
        unreachable!("the rules for a delta restore nothing")
    }
}

struct Fixture {
    delta: Arc<dyn StateDelta>,
    worlds: Arc<Worlds>,
    count: AtomicU32,
    image: Image,
}

impl Fixture {
    fn new(delta: Arc<dyn StateDelta>) -> Self {
        Self { delta, worlds: Arc::default(), count: AtomicU32::new(0), image: Image::new("btrfs") }
    }

    fn next(&self) -> u32 {
        self.count.fetch_add(1, Ordering::Relaxed)
    }
}

#[async_trait]
impl DeltaFixture for Fixture {
    fn delta(&self) -> Arc<dyn StateDelta> {
        self.delta.clone()
    }

    fn host(&self) -> Arc<dyn SandboxHost> {
        self.worlds.clone()
    }

    async fn sandbox(&self) -> SandboxId {
        let name = format!("box-{}", self.next());
        let root = self.image.path.join(&name);
        run("btrfs", &[&"-q", &"subvolume", &"create", &root]);
        let cgroup = Cgroup::new();
        let mut live = Live::start(cgroup.command("exec cat"), &self.image.path);
        live.say("hello");
        live.hear();
        // It waits, and started in an earlier clock tick than the version that follows.
        sleep(Duration::from_millis(50));
        let id = SandboxId::new(&name).unwrap();
        let world = World { live, root, cgroup };
        self.worlds.0.lock().unwrap().insert(id.clone(), world);
        id
    }

    async fn change(&self, id: &SandboxId, domain: Domain) {
        let number = self.next();
        self.worlds
            .with(id, |world| match domain {
                Domain::Filesystem => {
                    fs::write(world.root.join(number.to_string()), "x").unwrap();
                }
                Domain::Process => {
                    world.live.say(&number.to_string());
                    world.live.hear();
                    sleep(Duration::from_millis(30));
                }
            })
            .unwrap();
    }

    async fn tree(&self, id: &SandboxId) -> Option<PathBuf> {
        let tree = self.image.path.join(format!("tree-{}", self.next()));
        let root = self.worlds.with(id, |world| world.root.clone()).unwrap();
        run("btrfs", &[&"-q", &"subvolume", &"snapshot", &"-r", &root, &tree]);
        Some(tree)
    }
}

#[test]
fn the_polling_inspector_keeps_the_rules() {
    if able(&["mkfs.btrfs", "btrfs"]) {
        block_on(conformance::delta(&Fixture::new(Arc::new(PollingInspector::new()))));
    }
}

#[test]
fn the_inspector_keeps_the_rules() {
    if !able(&["mkfs.btrfs", "btrfs"]) {
        return;
    }
    match Inspector::load() {
        Ok(inspector) => block_on(conformance::delta(&Fixture::new(Arc::new(inspector)))),
        Err(error) => println!("skipped: BPF: {error}"),
    }
}
