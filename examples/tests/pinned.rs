//! The host's process ends and another one comes: where the inspector's programs are pinned, the version still stands.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crab_backend_btrfs::BtrfsBackend;
use crab_backend_criu::CriuBackend;
use crab_core::{Manifest, SandboxHost, SandboxId};
use crab_engine::Engine;
use crab_examples::sandbox::{Config, ExampleHost, Sandbox, ScratchArea, criu_binary, home, snapshot_root};
use crab_inspector::Inspector;

/// Pins that go when dropped, also when a test fails.
struct Pins(PathBuf);

impl Drop for Pins {
    fn drop(&mut self) {
        let _ = Inspector::unpin(&self.0);
    }
}

struct World {
    area: ScratchArea,
    host: Arc<ExampleHost>,
    id: SandboxId,
    sandbox: Arc<Sandbox>,
}

impl World {
    fn new(name: &str) -> Option<Self> {
        if !home().join("pool/base/sbin/crab-init").exists() {
            println!("skipped: sandboxes (root and `cargo xtask setup` are needed)");
            return None;
        }
        let area = ScratchArea::new(name).unwrap();
        let host = Arc::new(ExampleHost::new());
        let id: SandboxId = format!("{name}-{}", std::process::id()).parse().unwrap();
        let root = area.path().join("root");
        snapshot_root(&root).unwrap();
        let sandbox = host.launch(Config::new(id.clone(), root)).unwrap();
        run(&sandbox, "setsid python3 -c 'import time; time.sleep(1000)' </dev/null >/dev/null 2>&1 & sleep 1");
        Some(Self { area, host, id, sandbox })
    }

    /// What a process of the host does from its start to its end, which comes without a farewell.
    async fn life(&self, inspector: Inspector, lines: &[&str]) -> Manifest {
        let directory: &Path = self.area.path();
        let images = directory.join("images");
        let processes = CriuBackend::builder().images(images).binary(criu_binary()).open().await.unwrap();
        let engine = Engine::builder(directory.join("store"))
            .filesystem(Arc::new(BtrfsBackend::open(directory.join("versions")).unwrap()))
            .process(Arc::new(processes))
            .host(Arc::clone(&self.host) as Arc<dyn SandboxHost>)
            .delta(Arc::new(inspector))
            .open()
            .await
            .unwrap();
        // One that is taken over is attached: to attach it again would begin anew.
        if !engine.opened().attached.contains(&self.id) {
            engine.attach(&self.id).await.unwrap();
        }
        for line in lines {
            run(&self.sandbox, line);
        }
        let version = engine.checkpoint(&self.id).await.unwrap();
        // Closing it would detach the sandbox, which gives the evidence up.
        drop(engine);
        version
    }
}

fn run(sandbox: &Sandbox, line: &str) {
    let output = sandbox.exec(line).unwrap();
    assert!(output.success(), "{line}: {}", output.text());
}

#[tokio::test]
async fn with_pins_the_first_turn_after_a_restart_can_be_a_skip() {
    if !std::fs::read_to_string("/proc/self/mountinfo").unwrap().contains(" /sys/fs/bpf ") {
        println!("skipped: bpffs at /sys/fs/bpf");
        return;
    }
    let Some(world) = World::new("pinned") else { return };
    let pins = Pins(format!("/sys/fs/bpf/crab-examples-{}", std::process::id()).into());
    let inspector = || Inspector::builder().pinned(&pins.0, world.area.path().join("inspector")).load().unwrap();
    let first = world.life(inspector(), &[]).await;
    assert_eq!(world.life(inspector(), &["cat /etc/hostname"]).await.version, first.version, "nothing changed");
    // Nobody watches, and yet it is noted.
    run(&world.sandbox, "echo x > /root/x");
    let second = world.life(inspector(), &[]).await;
    assert!(second.version > first.version, "a file was written between the two");
    for _ in 0..3 {
        assert_eq!(world.life(inspector(), &[]).await.version, second.version, "nothing changed again");
    }
}

#[tokio::test]
async fn without_pins_the_first_turn_after_a_restart_is_a_version() {
    let Some(world) = World::new("unpinned") else { return };
    let first = world.life(Inspector::load().unwrap(), &[]).await;
    let second = world.life(Inspector::load().unwrap(), &[]).await;
    assert!(second.version > first.version, "what happened meanwhile is not known");
}
