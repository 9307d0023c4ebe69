//! Programs that are killed at any moment: this one, in a dump, while it stores, or in a restore; and CRIU in a restore.
//! The sandbox runs on or can be restored, and what is listed is whole.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crab_backend_criu::CriuBackend;
use crab_core::{Artifact, CaptureRequest, CheckpointBackend, Condition, NoCut, RestoreTarget};
use crab_examples::sandbox::{Sandbox, criu_binary};
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::support::{World, eventually, get, python, set, world};

const KILLS: u64 = 50;
const VARIABLE: &str = "CRAB_TEST_DYING";

/// Moments that are spread evenly, in another order each time.
fn moment(round: u64, within: Duration) -> Duration {
    within * u32::try_from(round * 17 % KILLS).unwrap() / u32::try_from(KILLS).unwrap()
}

async fn backend(images: &str, captures: &str) -> CriuBackend {
    CriuBackend::builder().images(images).capture_dir(captures).binary(criu_binary()).open().await.unwrap()
}

/// What is killed: run by the tests below, as a process of its own.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "the other half of the tests in this file, which run it"]
async fn the_program_that_is_killed() {
    let Ok(task) = std::env::var(VARIABLE) else { return };
    let words: Vec<&str> = task.split(' ').collect();
    let [what, id, images, captures] = words[..] else { panic!("{task}") };
    let sandbox = Sandbox::attach(&id.parse().unwrap()).unwrap();
    let backend = backend(images, captures).await;
    let artifacts = backend.list(&sandbox.id()).await.unwrap();
    println!("\nready");
    for n in 0.. {
        match what {
            "dump" => {
                let described = sandbox.describe();
                let request = CaptureRequest {
                    sandbox: &described,
                    artifact: format!("by-{}-{n}", std::process::id()).parse().unwrap(),
                    parent: None,
                    frozen: false,
                    deadline: None,
                    at_cut: &mut NoCut,
                };
                backend.capture(request).await.unwrap().persist().await.unwrap();
            }
            _ => {
                sandbox.kill().unwrap();
                restore(&backend, &sandbox, &artifacts[0]).await.unwrap();
            }
        }
    }
}

pub(crate) async fn restore(backend: &CriuBackend, sandbox: &Sandbox, artifact: &Artifact) -> crab_core::Result<()> {
    let inherited = sandbox.inherit(&artifact.external)?;
    let operation = "dying".parse().unwrap();
    let target =
        RestoreTarget { sandbox: sandbox.describe(), operation, keep_replaced: None, inherited, deadline: None };
    let restored = backend.restore(artifact, target).await?;
    sandbox.adopt(restored.init.unwrap())
}

/// Runs the program until the moment after it is ready.
fn run_and_kill(world: &World, sandbox: &Sandbox, what: &str, moment: Duration) {
    let task = format!("{what} {} {} {}", sandbox.id(), world.images.display(), world.captures.display());
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "dying::the_program_that_is_killed", "--nocapture"])
        .env(VARIABLE, task)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let ready = lines.map_while(Result::ok).any(|line| line == "ready");
    assert!(ready, "the program does not run: {:?}", child.wait());
    std::thread::sleep(moment);
    child.kill().unwrap();
    child.wait().unwrap();
}

/// A sandbox with so many megabytes of memory, so that everything takes a while, and its first version.
pub(crate) async fn prepared(world: &World, megabytes: usize) -> (Arc<Sandbox>, Artifact) {
    let sandbox = world.with_server();
    python(
        &sandbox,
        "memory",
        &format!(
            "
import os, time
memory = os.urandom({megabytes} << 20)
open('/root/up', 'w').close()
time.sleep(100000)
"
        ),
    );
    eventually("it is up", || sandbox.root().join("root/up").exists().then_some(()));
    set(&sandbox, 42);
    let first = world.checkpoint(&sandbox).await;
    (sandbox, first)
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_kill_of_this_program_in_a_dump_the_sandbox_runs_or_restores() {
    let Some(world) = world().await else { return };
    let (sandbox, first) = prepared(&world, 16).await;
    let mut restored = 0;
    for round in 0..KILLS {
        run_and_kill(&world, &sandbox, "dump", moment(round, Duration::from_millis(400)));
        // What an engine does that opens its store again.
        world.backend.recover().await.unwrap();
        sandbox.thaw().unwrap();
        let listed = world.backend.list(&sandbox.id()).await.unwrap();
        assert!(listed.iter().any(|artifact| artifact.id == first.id));
        for artifact in &listed {
            world.backend.verify(artifact).await.unwrap();
        }
        if !answers(&sandbox) {
            restored += 1;
            let newest = listed.iter().max_by_key(|a| a.id != first.id).unwrap();
            sandbox.kill().unwrap();
            world.restore(&sandbox, newest).await.unwrap();
            assert_eq!(get(&sandbox), Some(42), "round {round}");
        }
        for artifact in listed.iter().filter(|artifact| artifact.id != first.id) {
            world.backend.remove(artifact).await.unwrap();
        }
    }
    println!("killed {KILLS} times: {} times the sandbox ran on", KILLS - restored);
    sandbox.kill().unwrap();
    world.restore(&sandbox, &first).await.unwrap();
    assert_eq!(get(&sandbox), Some(42));
}

/// Whether the sandbox answers before long, and is never frozen again.
fn answers(sandbox: &Sandbox) -> bool {
    let end = Instant::now() + Duration::from_secs(10);
    while Instant::now() < end {
        match sandbox.condition().unwrap() {
            Condition::Stopped => return false,
            condition => assert_eq!(condition, Condition::Running),
        }
        if let Ok(stream) = sandbox.connect(7000) {
            use std::io::{Read, Write};
            let mut stream = stream;
            stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
            let mut answer = String::new();
            if stream.write_all(b"get\n").is_ok() && stream.read_to_string(&mut answer).is_ok() {
                assert_eq!(answer.trim(), "42");
                return true;
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    false
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_kill_of_this_program_in_a_restore_the_next_one_works() {
    let Some(world) = world().await else { return };
    let (sandbox, first) = prepared(&world, 16).await;
    for round in 0..KILLS {
        run_and_kill(&world, &sandbox, "restore", moment(round, Duration::from_millis(300)));
        world.backend.recover().await.unwrap();
        // Whoever restores again clears the sandbox first.
        sandbox.kill().unwrap();
        assert_eq!(sandbox.condition().unwrap(), Condition::Stopped);
        if round % 10 == 9 {
            world.restore(&sandbox, &first).await.unwrap();
            assert_eq!(get(&sandbox), Some(42), "round {round}");
        }
    }
    world.assert_no_captures();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restore_whose_criu_is_killed_leaves_nothing_and_can_be_tried_again() {
    let Some(world) = world().await else { return };
    let (sandbox, first) = prepared(&world, 16).await;
    let mut failed = 0;
    for round in 0..KILLS {
        sandbox.kill().unwrap();
        let done = Arc::new(AtomicBool::new(false));
        let killer = std::thread::spawn({
            let (done, sandbox, moment) = (done.clone(), sandbox.clone(), moment(round, Duration::from_millis(120)));
            move || {
                while !done.load(Ordering::SeqCst) {
                    let Some(criu) = criu_in(&sandbox) else { continue };
                    std::thread::sleep(moment);
                    let _ = rustix::process::pidfd_send_signal(&criu, Signal::KILL);
                    return;
                }
            }
        });
        let outcome = world.restore(&sandbox, &first).await;
        done.store(true, Ordering::SeqCst);
        killer.join().unwrap();
        match outcome {
            Ok(_) => assert_eq!(get(&sandbox), Some(42)),
            Err(error) => {
                failed += 1;
                assert_eq!(error.sandbox_condition(), Some(Condition::Stopped), "{error}");
                assert_eq!(sandbox.condition().unwrap(), Condition::Stopped, "{error}");
            }
        }
    }
    println!("CRIU was killed in {failed} restores of {KILLS}");
    assert!(failed >= 5, "the restores are too quick for this test: {failed} were hit");
    world.assert_no_captures();
    sandbox.kill().unwrap();
    world.restore(&sandbox, &first).await.unwrap();
    assert_eq!(get(&sandbox), Some(42));
}

/// The first CRIU process in the sandbox's cgroup: the one that we talk to, or none yet.
fn criu_in(sandbox: &Sandbox) -> Option<std::os::fd::OwnedFd> {
    let members = std::fs::read_to_string(sandbox.cgroup().join("cgroup.procs")).ok()?;
    let pid = members.lines().filter_map(|pid| pid.parse::<i32>().ok()).min()?;
    let handle = rustix::process::pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
    let program = std::fs::read_link(format!("/proc/{pid}/exe")).ok()?;
    (program == criu_binary()).then_some(handle)
}
