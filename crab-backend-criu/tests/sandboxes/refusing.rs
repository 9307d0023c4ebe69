//! What cannot be saved is refused by name before anything is stopped.

use std::fs;
use std::process::{Child, Command, Stdio};

use crab_core::{Condition, ErrorKind, NoCut};
use crab_examples::sandbox::Sandbox;

use crate::support::{World, eventually, get, python, world};

async fn refusal(world: &World, sandbox: &Sandbox) -> String {
    let error = world.capture(sandbox).await.err().expect("it is refused");
    assert_eq!(error.kind(), ErrorKind::NotCheckpointable, "{error}");
    assert_eq!(error.sandbox_condition(), Some(Condition::Running));
    assert_eq!(sandbox.condition().unwrap(), Condition::Running);
    assert_eq!(get(sandbox), Some(0));
    world.assert_no_captures();
    error.to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_io_uring_is_refused_with_its_process_and_descriptor() {
    let Some(world) = world().await else { return };
    let sandbox = world.with_server();
    // io_uring_setup(8, zeroed parameters), and the descriptor's number to a file.
    let program = "
import ctypes, os, time
fd = ctypes.CDLL(None, use_errno=True).syscall(425, 8, ctypes.create_string_buffer(256))
with open('/root/ring', 'w') as f:
    f.write(str(fd if fd >= 0 else -ctypes.get_errno()))
time.sleep(1000)
";
    python(&sandbox, "ring", program);
    let path = sandbox.root().join("root/ring");
    let fd: i32 = eventually("the ring is made", || fs::read_to_string(&path).ok()?.parse().ok());
    if fd < 0 {
        println!("skipped: io_uring (the kernel refuses it)");
        return;
    }
    let text = refusal(&world, &sandbox).await;
    assert!(
        text.contains("(python3)") && text.contains("io_uring") && text.contains(&format!("descriptor {fd}")),
        "{text}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_with_other_clocks_than_init_is_refused_since_no_restore_would_bring_it_back() {
    let Some(world) = world().await else { return };
    let sandbox = world.with_server();
    // unshare(CLONE_NEWTIME) counts for children only.
    let program = "
import ctypes, os, time
failed = ctypes.CDLL(None, use_errno=True).unshare(0x80)
if failed == 0 and os.fork() == 0:
    time.sleep(1000)
with open('/root/clocks', 'w') as f:
    f.write(str(failed))
time.sleep(1000)
";
    python(&sandbox, "clocks", program);
    let path = sandbox.root().join("root/clocks");
    let failed: i32 = eventually("the clocks are made", || fs::read_to_string(&path).ok()?.parse().ok());
    if failed != 0 {
        println!("skipped: time namespaces (the kernel refuses them)");
        return;
    }
    let text = refusal(&world, &sandbox).await;
    assert!(text.contains("(python3)") && text.contains("time namespace"), "{text}");
}

/// A process of the host, ended with this value.
struct Stranger(Child);

impl Stranger {
    fn in_cgroup_of(sandbox: &Sandbox) -> Self {
        let child = Command::new("/bin/sleep").arg("1000").stdin(Stdio::null()).spawn().unwrap();
        let stranger = Self(child);
        fs::write(sandbox.cgroup().join("cgroup.procs"), stranger.0.id().to_string()).unwrap();
        stranger
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_outside_the_tree_is_refused_by_name() {
    let Some(world) = world().await else { return };
    let sandbox = world.with_server();
    let stranger = Stranger::in_cgroup_of(&sandbox);
    let text = refusal(&world, &sandbox).await;
    let name = format!("process {} (sleep)", stranger.0.id());
    assert!(text.contains(&name) && text.contains("not below its init"), "{text}");
    drop(stranger);
    world.checkpoint(&sandbox).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_left_the_cgroup_is_refused_by_name() {
    let Some(world) = world().await else { return };
    let sandbox = world.with_server();
    let threads = fs::read_to_string(sandbox.cgroup().join("cgroup.procs")).unwrap();
    let server = threads.lines().find(|pid| **pid != sandbox.init().unwrap().to_string()).unwrap().to_owned();
    let elsewhere = sandbox.cgroup().with_file_name(format!("{}-elsewhere", sandbox.id()));
    fs::create_dir(&elsewhere).unwrap();
    fs::write(elsewhere.join("cgroup.procs"), &server).unwrap();
    let text = refusal(&world, &sandbox).await;
    fs::write(sandbox.cgroup().join("cgroup.procs"), &server).unwrap();
    fs::remove_dir(&elsewhere).unwrap();
    assert!(text.contains(&format!("process {server} (python3)")) && text.contains("not in its cgroup"), "{text}");
    world.checkpoint(&sandbox).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_in_child_cgroups_are_saved_too() {
    let Some(world) = world().await else { return };
    let sandbox = world.with_server();
    let procs = fs::read_to_string(sandbox.cgroup().join("cgroup.procs")).unwrap();
    let server = procs.lines().find(|pid| **pid != sandbox.init().unwrap().to_string()).unwrap();
    let child = sandbox.cgroup().join("child");
    fs::create_dir(&child).unwrap();
    fs::write(child.join("cgroup.procs"), server).unwrap();
    let artifact = world.checkpoint(&sandbox).await;
    assert_eq!(get(&sandbox), Some(0));
    sandbox.kill().unwrap();
    world.restore(&sandbox, &artifact).await.unwrap();
    assert_eq!(get(&sandbox), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_in_which_nothing_lives_is_no_input() {
    let Some(world) = world().await else { return };
    let sandbox = world.stopped();
    let error = world.capture_with(&sandbox, false, None, &mut NoCut).await.err().expect("it is refused");
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_restricted_by_landlock_is_refused_by_name() {
    let Some(world) = world().await else { return };
    let sandbox = world.with_server();
    // Without rights, restricted in a thread of its own or not at all.
    let program = "
import ctypes, os, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def restrict():
    libc.prctl(38, 1, 0, 0, 0)
    ruleset = libc.syscall(444, (ctypes.c_uint64 * 1)(1), 8, 0)
    done = 'no' if ruleset < 0 or libc.syscall(446, ruleset, 0) else 'yes'
    os.close(ruleset)
    with open('/dev/shm/restricted', 'w') as file:
        file.write(done)
    time.sleep(1000)
open('/dev/shm/restricted', 'w').close()
os.chmod('/dev/shm/restricted', 0o666)
os.setgid(1000); os.setuid(1000)
threading.Thread(target=restrict).start()
";
    python(&sandbox, "restricted", &program.replace("(ctypes.c_uint64 * 1)(1)", "(ctypes.c_uint64 * 1)(1 << 12)"));
    let state = || crate::support::run(&sandbox, "cat /dev/shm/restricted 2>/dev/null || true");
    let state = eventually("it has tried", || Some(state()).filter(|state| !state.is_empty()));
    if state == "no" {
        println!("skipped: Landlock (the kernel does not have it)");
        return;
    }
    let text = refusal(&world, &sandbox).await;
    assert!(text.contains("(python3)") && text.contains("Landlock"), "{text}");
    // One that only gave up the way to more rights is none.
    crate::support::run(&sandbox, "pkill -f '[r]estricted.py'");
    crate::support::background(&sandbox, "setpriv --no-new-privs sleep 1000");
    eventually("it sleeps", || sandbox.exec("pgrep -x sleep").unwrap().success().then_some(()));
    world.checkpoint(&sandbox).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_of_another_user_is_saved_or_refused_by_name_where_a_right_is_missing() {
    let Some(world) = world().await else { return };
    let sandbox = world.with_server();
    crate::support::background(&sandbox, "setpriv --reuid 1000 --regid 1000 --clear-groups sleep 1000");
    eventually("it sleeps", || sandbox.exec("pgrep -x sleep").unwrap().success().then_some(()));
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let rights = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap().trim();
    if u64::from_str_radix(rights, 16).unwrap() & (1 << 24) == 0 {
        let text = refusal(&world, &sandbox).await;
        assert!(text.contains("(sleep)") && text.contains("CAP_SYS_RESOURCE"), "{text}");
        return;
    }
    let artifact = world.checkpoint(&sandbox).await;
    sandbox.kill().unwrap();
    world.restore(&sandbox, &artifact).await.unwrap();
    assert_eq!(crate::support::run(&sandbox, "ps -o uid= -p $(pgrep -x sleep)").trim(), "1000");
}
