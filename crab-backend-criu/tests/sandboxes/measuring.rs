//! Times for people to read: nothing is asserted about them.

use std::time::{Duration, Instant};

use crab_core::NoCut;

use crate::support::{get, python, world};

const MEMORY: &str = "
import os, time
memory = os.urandom(6 << 20)
for _ in range(3):
    if os.fork() == 0:
        memory = os.urandom(6 << 20)
        break
open(f'/root/up-{os.getpid()}', 'w').close()
while True:
    time.sleep(1)
";

fn report(what: &str, mut times: Vec<Duration>) {
    times.sort();
    let at = |part: usize| times[(times.len() - 1) * part / 100].as_secs_f64() * 1000.0;
    println!("{what}: p50 {:.1} ms, p95 {:.1} ms, n {}", at(50), at(95), times.len());
}

/// `cargo test -p crab-backend-criu --release --test sandboxes -- --ignored --nocapture`
#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement: it prints times and asserts none; run by hand as above"]
async fn how_long_it_takes() {
    let Some(world) = world().await else { return };
    let sandbox = world.with_server();
    python(&sandbox, "memory", MEMORY);
    crate::support::eventually("all are up", || {
        let names = std::fs::read_dir(sandbox.root().join("root")).unwrap().flatten();
        (names.filter(|e| e.file_name().to_string_lossy().starts_with("up-")).count() == 4).then_some(())
    });
    for frozen in [false, true] {
        let (mut capture, mut stopped, mut persist) = (Vec::new(), Vec::new(), Vec::new());
        let mut last = None;
        for _ in 0..20 {
            if frozen {
                sandbox.freeze().unwrap();
            }
            let begun = Instant::now();
            let captured = world.capture_with(&sandbox, frozen, None, &mut NoCut).await.unwrap();
            capture.push(begun.elapsed());
            if frozen {
                sandbox.thaw().unwrap();
            }
            stopped.push(captured.stopped_for().unwrap());
            let begun = Instant::now();
            last = Some(captured.persist().await.unwrap());
            persist.push(begun.elapsed());
        }
        let artifact = last.unwrap();
        println!(
            "frozen by the caller: {frozen}; {} tasks, {} bytes",
            artifact.facts["tasks"],
            artifact.bytes.unwrap()
        );
        report("capture", capture);
        report("tasks stopped in it", stopped);
        report("persist", persist);
        let mut restore = Vec::new();
        for _ in 0..10 {
            sandbox.kill().unwrap();
            let begun = Instant::now();
            world.restore(&sandbox, &artifact).await.unwrap();
            restore.push(begun.elapsed());
            assert_eq!(get(&sandbox), Some(0));
        }
        report("restore", restore);
    }
}
