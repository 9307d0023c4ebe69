//! The whole of Crab in one process, without a proxy: a sandbox with a server that holds its state in memory is saved
//! at two turn boundaries, killed, and restored; the server answers as if nothing had happened.
//!
//! As root, after `cargo xtask setup`: `cargo run -p crab-examples --example quickstart`

use std::io::{Read, Write};
use std::sync::Arc;
use std::time::Duration;

use crab_backend_btrfs::BtrfsBackend;
use crab_backend_criu::CriuBackend;
use crab_core::{Boundary, Error, Gate, Result, SandboxHost, SandboxId, Turn, TurnNumber};
use crab_engine::{Engine, RestoreOptions, Select};
use crab_examples::sandbox::{Config, ExampleHost, Sandbox, ScratchArea, criu_binary, snapshot_root};
use crab_inspector::Inspector;

const SERVER: &str = r#"
import socket
count, listener = 0, socket.create_server(("127.0.0.1", 7000))
while True:
    peer, _ = listener.accept()
    count += int(peer.recv(16))
    peer.sendall(str(count).encode())
    peer.close()
"#;

#[tokio::main]
async fn main() -> Result<()> {
    // What an orchestrator has already: a sandbox, and a `SandboxHost` that freezes, kills and relaunches it.
    let area = ScratchArea::new("quickstart")?;
    let root = area.path().join("root");
    snapshot_root(&root)?;
    let host = Arc::new(ExampleHost::new());
    let id: SandboxId = format!("quickstart-{}", std::process::id()).parse()?;
    let sandbox = host.launch(Config::new(id.clone(), root))?;

    // Crab: backends for files and processes, an observer of changes, and the engine that puts them together.
    let processes = CriuBackend::builder().images(area.path().join("images")).binary(criu_binary()).open().await?;
    let engine = Engine::builder(area.path().join("store"))
        .filesystem(Arc::new(BtrfsBackend::open(area.path().join("versions"))?))
        .process(Arc::new(processes))
        .host(Arc::clone(&host) as Arc<dyn SandboxHost>)
        .delta(Arc::new(Inspector::load()?))
        .open()
        .await?;
    engine.attach(&id).await?;

    // The agent's first command. At the turn's end the engine decides what to save, and opens the gate when it is safe.
    run(
        &sandbox,
        &format!("cat >/root/server.py <<'EOF'{SERVER}EOF\nsetsid python3 /root/server.py >/dev/null 2>&1 &"),
    );
    println!("the server counts to {}", count(&sandbox, 5));
    boundary(&engine, &id, 1).await;

    println!("the server counts to {}", count(&sandbox, 2));
    boundary(&engine, &id, 2).await;

    // A turn that changes nothing costs nothing: it rides on the version before.
    run(&sandbox, "ls /root; cat /root/server.py");
    boundary(&engine, &id, 3).await;

    println!("the next command adds 100 and removes the program; then the sandbox dies");
    count(&sandbox, 100);
    run(&sandbox, "rm /root/server.py");
    sandbox.kill()?;

    let report = engine.restore(&id, Select::Latest, RestoreOptions::default()).await?;
    println!("restored version {} of turn {}: {:?}", report.version, report.turn, report.process);
    println!("the server counts to {}, and its program is there: {}", count(&sandbox, 0), run(&sandbox, "ls /root"));

    engine.close().await;
    Ok(())
}

/// The end of a turn, as an in-process runner tells it. With the HTTP proxy, `crab_coordinator` does this.
async fn boundary(engine: &Engine, id: &SandboxId, number: u64) {
    let (gate, mut hold) = Gate::new();
    engine.turn(Boundary { turn: Turn::new(id.clone(), TurnNumber(number)), gate }).await;
    // Here the model works; the checkpoint is taken meanwhile. Then its answer waits for the gate.
    hold.answer_waiting();
    println!("  turn {number}: {:?}", hold.verdict().await);
}

fn run(sandbox: &Sandbox, command: &str) -> String {
    match sandbox.exec(command) {
        Ok(output) => output.text().trim().to_owned(),
        Err(error) => error.to_string(),
    }
}

/// Has the server add a number, over its socket.
fn count(sandbox: &Sandbox, add: u32) -> String {
    let ask = || {
        let mut peer = sandbox.connect(7000)?;
        let mut answer = String::new();
        let told = write!(peer, "{add}").and_then(|()| peer.read_to_string(&mut answer));
        told.map(|_| answer).map_err(|e| Error::io("ask the server", e))
    };
    // Python takes a moment to start.
    for _ in 0..100 {
        if let Ok(answer) = ask() {
            return answer;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    "nothing: it does not answer".to_owned()
}
