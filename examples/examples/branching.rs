//! Branching: two more sandboxes from one version of a third, each with the files and the live processes of that
//! moment, and each on its own from then on.
//!
//! As root, after `cargo xtask setup`: `cargo run -p crab-examples --example branching`

use std::path::Path;
use std::sync::Arc;

use crab_backend_btrfs::BtrfsBackend;
use crab_backend_criu::CriuBackend;
use crab_core::{Result, SandboxHost, SandboxId};
use crab_engine::{Engine, ForkOptions};
use crab_examples::sandbox::{Config, ExampleHost, Sandbox, ScratchArea, criu_binary, snapshot_root};
use crab_inspector::Inspector;

#[tokio::main]
async fn main() -> Result<()> {
    let area = ScratchArea::new("branching")?;
    let host = Arc::new(ExampleHost::new());
    let named = |name: &str| -> Result<(SandboxId, std::path::PathBuf)> {
        Ok((format!("branching-{name}-{}", std::process::id()).parse()?, area.path().join(name)))
    };
    let (trunk, root) = named("trunk")?;
    snapshot_root(&root)?;
    let sandbox = host.launch(Config::new(trunk.clone(), root))?;
    let engine = engine(area.path(), &host).await?;
    engine.attach(&trunk).await?;

    // A shell that keeps a number in memory, adds what it is given to it, and says what that makes.
    let adder = "n=40; while true; do read x </root/in || continue; n=$((n+x)); echo $n >/root/out; done";
    run(&sandbox, &format!("mkfifo /root/in /root/out; setsid bash -c '{adder}' >/dev/null 2>&1 &"));
    let add = |sandbox: &Sandbox, number: u32| run(sandbox, &format!("echo {number} >/root/in; cat /root/out"));
    println!("the trunk, after adding 2: {}", add(&sandbox, 2));
    let version = engine.checkpoint(&trunk).await?.version;

    for (name, number) in [("left", 100), ("right", 200)] {
        let (id, root) = named(name)?;
        // Nothing lives in it, and it has no files yet: the fork brings both.
        let branch = host.prepare(Config::new(id.clone(), root))?;
        engine.fork(&trunk, version, &id, ForkOptions::default()).await?;
        println!("{name:>9}, after adding {number}: {}", add(&branch, number));
    }
    println!("the trunk, after adding 1: {}", add(&sandbox, 1));

    engine.close().await;
    Ok(())
}

async fn engine(directory: &Path, host: &Arc<ExampleHost>) -> Result<Engine> {
    let processes = CriuBackend::builder().images(directory.join("images")).binary(criu_binary()).open().await?;
    Engine::builder(directory.join("store"))
        .filesystem(Arc::new(BtrfsBackend::open(directory.join("versions"))?))
        .process(Arc::new(processes))
        .host(Arc::clone(host) as Arc<dyn SandboxHost>)
        .delta(Arc::new(Inspector::load()?))
        .open()
        .await
}

fn run(sandbox: &Sandbox, command: &str) -> String {
    match sandbox.exec(command) {
        Ok(output) => output.text().trim().to_owned(),
        Err(error) => error.to_string(),
    }
}
