//! CRIU killed in the middle, and time running out in the middle: the sandbox lives on as it was.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crab_core::{Condition, ErrorKind, NoCut};
use crab_examples::sandbox::Sandbox;
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::support::{World, eventually, get, python, run, set, world};

/// Some memory, so that a dump takes a while, and several processes and threads.
const HEAVY: &str = "
import os, threading, time
memory = bytearray(os.urandom(1 << 20)) * 24
for _ in range(3):
    if os.fork() == 0:
        break
for _ in range(3):
    threading.Thread(target=lambda: [time.sleep(0.001) for _ in iter(int, 1)]).start()
n = 0
fd = os.open(f'/root/ticks-{os.getpid()}', os.O_RDWR | os.O_CREAT)
while True:
    n += 1
    os.pwrite(fd, b'%020d' % n, 0)
    time.sleep(0.001)
";

fn ticks(sandbox: &Sandbox) -> Vec<u64> {
    let entries = std::fs::read_dir(sandbox.root().join("root")).unwrap().flatten();
    let files = entries.filter(|e| e.file_name().to_string_lossy().starts_with("ticks-"));
    let read = |e: std::fs::DirEntry| Some((e.file_name(), std::fs::read_to_string(e.path()).ok()?.parse().ok()?));
    let mut named: Vec<_> = files.filter_map(read).collect();
    named.sort();
    named.into_iter().map(|(_, ticks)| ticks).collect()
}

/// What the tasks are doing, for a failure's message.
fn states(sandbox: &Sandbox) -> String {
    let processes = std::fs::read_to_string(sandbox.cgroup().join("cgroup.threads")).unwrap();
    let look = |pid: &str| {
        let read = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
        let status = read("status");
        let of_interest = ["Name:", "State:", "TracerPid:", "SigBlk:", "SigPnd:", "ShdPnd:"];
        let lines: Vec<_> = status.lines().filter(|l| of_interest.iter().any(|name| l.starts_with(name))).collect();
        format!("{pid}: {} syscall {} wchan {}\n", lines.join(" "), read("syscall").trim(), read("wchan").trim())
    };
    processes.lines().map(look).collect()
}

/// Every one of the four processes goes on.
#[track_caller]
fn assert_all_tick(sandbox: &Sandbox) {
    let before = ticks(sandbox);
    assert_eq!(before.len(), 4);
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let now = ticks(sandbox);
        if now.len() == 4 && now.iter().zip(&before).all(|(now, before)| now > before) {
            return;
        }
        assert!(Instant::now() < deadline, "not all run: {before:?} {now:?}\n{}", states(sandbox));
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The CRIU that dumps the sandbox: a child of this process whose title names the sandbox's init.
fn criu_at(init: u32) -> Option<u32> {
    let title = format!("dump --rpc -t {init}");
    let threads = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let children = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
    let pids: Vec<u32> =
        children.flat_map(|c| c.split_whitespace().map(|p| p.parse().unwrap()).collect::<Vec<_>>()).collect();
    pids.into_iter().find(|pid| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(&title)
    })
}

async fn prepared(world: &World) -> Arc<Sandbox> {
    let sandbox = world.with_server();
    python(&sandbox, "heavy", HEAVY);
    eventually("four processes tick", || (ticks(&sandbox).len() == 4).then_some(()));
    set(&sandbox, 42);
    sandbox
}

/// Kills the CRIU that dumps the sandbox, that long after it appeared.
struct Killer {
    done: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<()>,
}

impl Killer {
    fn start(init: u32, wait: Duration) -> Self {
        let done = Arc::new(AtomicBool::new(false));
        let thread = std::thread::spawn({
            let done = Arc::clone(&done);
            move || {
                while !done.load(Ordering::SeqCst) {
                    let Some(pid) = criu_at(init) else { continue };
                    let raw = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
                    let Ok(criu) = rustix::process::pidfd_open(raw, PidfdFlags::empty()) else { continue };
                    std::thread::sleep(wait);
                    // The descriptor was open before this look: it is that CRIU's.
                    if criu_at(init) == Some(pid) {
                        let _ = rustix::process::pidfd_send_signal(&criu, Signal::KILL);
                    }
                    return;
                }
            }
        });
        Self { done, thread }
    }

    fn stop(self) {
        self.done.store(true, Ordering::SeqCst);
        self.thread.join().unwrap();
    }
}

fn all_tick(sandbox: &Sandbox) -> bool {
    let before = ticks(sandbox);
    let deadline = Instant::now() + Duration::from_secs(5);
    while Instant::now() < deadline {
        let now = ticks(sandbox);
        if now.len() == 4 && now.iter().zip(&before).all(|(now, before)| now > before) {
            return true;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    false
}

#[tokio::test(flavor = "multi_thread")]
async fn no_sandbox_is_left_stopped_or_frozen_by_a_criu_that_somebody_kills_in_a_dump() {
    let Some(world) = world().await else { return };
    let sandbox = prepared(&world).await;
    let base = world.checkpoint(&sandbox).await;
    let (mut killed, mut survived) = (0, 0);
    for round in 0..50 {
        // Spread over the length of a dump, in another order each time.
        let wait = round * 17 % 50;
        let frozen = round % 2 == 1;
        let init = sandbox.init().unwrap();
        if frozen {
            sandbox.freeze().unwrap();
        }
        let killer = Killer::start(init, Duration::from_millis(wait));
        let result = world.capture_with(&sandbox, frozen, None, &mut NoCut).await;
        killer.stop();
        let expected = if frozen { Condition::Frozen } else { Condition::Running };
        let condition = sandbox.condition().unwrap();
        if let Err(error) = &result {
            killed += 1;
            assert_eq!(error.kind(), ErrorKind::Io, "{error}");
            assert!([expected, Condition::Stopped].contains(&condition), "{condition} after {wait} ms");
            // It may die of it a moment later.
            assert!([expected, condition].contains(&error.sandbox_condition().unwrap()), "{error}");
        } else {
            assert_eq!(condition, expected);
        }
        sandbox.thaw().unwrap();
        let tasks = states(&sandbox);
        assert!(!tasks.contains("(tracing stop)") && !tasks.contains("(stopped)"), "after {wait} ms:\n{tasks}");
        // CRIU's code in a process whose CRIU is killed ends some of them, and nobody can prevent that. Then the
        // error said that it may be so, and the last version is there.
        if condition != Condition::Stopped && all_tick(&sandbox) && get(&sandbox) == Some(42) {
            survived += usize::from(result.is_err());
        } else {
            let error = result.as_ref().err().expect("a dump that succeeds hurts nobody").to_string();
            assert!(error.contains("hurt") && error.contains("restore the last version"), "{error}");
            println!("a process did not survive {wait} ms: {error}");
            sandbox.kill().unwrap();
            world.restore(&sandbox, &base).await.unwrap();
            assert_all_tick(&sandbox);
        }
    }
    println!("killed {killed}, survived {survived}");
    assert!(killed >= 20, "the dumps are too quick for this test: {killed} were hit");
    world.assert_no_captures();
    let artifact = world.checkpoint(&sandbox).await;
    sandbox.kill().unwrap();
    world.restore(&sandbox, &artifact).await.unwrap();
    assert_all_tick(&sandbox);
    assert_eq!(get(&sandbox), Some(42));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_process_survives_a_deadline_that_passes_anywhere_in_a_dump() {
    let Some(world) = world().await else { return };
    let sandbox = prepared(&world).await;
    let mut missed = 0;
    for round in 0..60_u64 {
        let frozen = round % 2 == 1;
        let wait = round * 3;
        if frozen {
            sandbox.freeze().unwrap();
        }
        let deadline = Some(Instant::now() + Duration::from_millis(wait));
        let result = world.capture_with(&sandbox, frozen, deadline, &mut NoCut).await;
        let expected = if frozen { Condition::Frozen } else { Condition::Running };
        assert_eq!(sandbox.condition().unwrap(), expected, "{wait} ms");
        if let Err(error) = result {
            missed += 1;
            assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
            assert_eq!(error.sandbox_condition(), Some(expected));
            assert!(!error.to_string().contains("hurt"), "CRIU was killed: {error}");
        }
        sandbox.thaw().unwrap();
        assert_all_tick(&sandbox);
        assert_eq!(get(&sandbox), Some(42), "{wait} ms");
    }
    println!("{missed} deadlines were missed");
    assert!(missed >= 10, "the dumps are too quick for this test: {missed} were late");
    world.assert_no_captures();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_the_user_stopped_is_still_stopped_after_a_broken_dump() {
    let Some(world) = world().await else { return };
    let sandbox = prepared(&world).await;
    run(&sandbox, "sleep 1000 </dev/null >/dev/null 2>&1 & echo $! > /root/sleeper; kill -STOP $!");
    let state = || run(&sandbox, "ps -o state= -p $(cat /root/sleeper)");
    assert_eq!(state(), "T");
    let deadline = Some(Instant::now() + Duration::from_millis(25));
    drop(world.capture_with(&sandbox, false, deadline, &mut NoCut).await);
    assert_eq!(state(), "T");
    let artifact = world.checkpoint(&sandbox).await;
    assert_eq!(state(), "T");
    sandbox.kill().unwrap();
    world.restore(&sandbox, &artifact).await.unwrap();
    assert_eq!(state(), "T");
    assert_all_tick(&sandbox);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restore_that_is_not_done_by_the_deadline_leaves_nothing() {
    let Some(world) = world().await else { return };
    let sandbox = prepared(&world).await;
    let artifact = world.checkpoint(&sandbox).await;
    sandbox.kill().unwrap();
    for wait in [5, 30, 60] {
        let inherited = sandbox.inherit(&artifact.external).unwrap();
        let target = crab_core::RestoreTarget {
            sandbox: sandbox.describe(),
            operation: "late".parse().unwrap(),
            keep_replaced: None,
            inherited,
            deadline: Some(Instant::now() + Duration::from_millis(wait)),
        };
        use crab_core::CheckpointBackend;
        match world.backend.restore(&artifact, target).await {
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
                assert_eq!(error.sandbox_condition(), Some(Condition::Stopped));
                assert_eq!(sandbox.condition().unwrap(), Condition::Stopped);
            }
            Ok(restored) => {
                sandbox.adopt(restored.init.unwrap()).unwrap();
                sandbox.kill().unwrap();
            }
        }
    }
    world.assert_no_captures();
    world.restore(&sandbox, &artifact).await.unwrap();
    assert_eq!(get(&sandbox), Some(42));
}
