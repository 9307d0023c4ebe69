//! The examples' sandbox, on the real kernel: it needs root and what `cargo xtask setup` makes.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic as tests do")]

use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crab_core::conformance::HostFixture;
use crab_core::{Condition, ErrorKind, External, SandboxHost, SandboxId};
use crab_examples::sandbox::{
    Config, ExampleHost, ExecOptions, Sandbox, ScratchRoot, criu_binary, delete_root, home, sweep,
};

/// Why the machine cannot run these tests, said once per test.
fn lacking() -> bool {
    let ready = home().join("pool/base/sbin/crab-init").exists();
    if !ready {
        println!("skipped: sandboxes (root and `cargo xtask setup` are needed)");
    }
    !ready
}

fn id(name: &str) -> SandboxId {
    format!("test-{name}-{}", std::process::id()).parse().unwrap()
}

fn launch(name: &str) -> (ScratchRoot, Sandbox) {
    let root = ScratchRoot::new(name).unwrap();
    let sandbox = Sandbox::launch(Config::new(id(name), root.path())).unwrap();
    (root, sandbox)
}

#[track_caller]
fn run(sandbox: &Sandbox, line: &str) -> String {
    let output = sandbox.exec(line).unwrap();
    assert!(output.success(), "`{line}` ended with {:?}: {}", output.code, output.text());
    output.text().trim_end().to_owned()
}

/// Waits for something that happens soon, however slow the machine is.
#[track_caller]
fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "did not happen: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_command_sees_the_sandbox_and_nothing_of_the_host() {
    if lacking() {
        return;
    }
    let (_root, sandbox) = launch("inside");
    assert_eq!(run(&sandbox, "hostname; id -u; pwd"), format!("{}\n0\n/root", sandbox.id()));
    assert_eq!(run(&sandbox, "cat /proc/1/comm"), "crab-init");
    // Its own mounts only.
    assert_eq!(run(&sandbox, "findmnt -rno TARGET | sort | tr '\\n' ' '"), "/ /dev/pts /dev/shm /proc");
    assert_eq!(run(&sandbox, "ip -br link | awk '{print $1, $2}'"), "lo UNKNOWN");
    // Descriptors 0 to 2, and the one that `ls` reads the directory by.
    assert_eq!(run(&sandbox, "ls /proc/self/fd | wc -l"), "4");
    assert_eq!(run(&sandbox, "readlink /proc/self/fd/0"), "/dev/null");
    assert_eq!(run(&sandbox, "ls -l /proc/1/fd | grep -c '/dev/null'"), "3");
    assert_eq!(run(&sandbox, "ls /proc/1/fd | wc -l"), "3");
}

#[test]
fn a_sandbox_that_is_being_killed_is_described_as_dead_at_once() {
    if lacking() {
        return;
    }
    let (_root, sandbox) = launch("dying");
    // For a moment between the two nothing tells a process that was killed: it has taken the signal and does not leave
    // yet. Both looks can fall into it, once in a while.
    let rounds = 20;
    let told = (0..rounds).filter(|_| {
        run(&sandbox, "setsid sleep 1000 >/dev/null 2>&1 &");
        sandbox.freeze().unwrap();
        assert!(sandbox.describe().init.is_some(), "frozen is not dead");
        std::fs::write(sandbox.cgroup().join("cgroup.kill"), "1").unwrap();
        let told = sandbox.describe().init.is_none();
        sandbox.relaunch().unwrap();
        told
    });
    let told = told.count();
    assert!(told >= rounds - 2, "told of {told} in {rounds}");
}

#[test]
fn the_tools_that_agents_use_are_there() {
    if lacking() {
        return;
    }
    let (_root, sandbox) = launch("tools");
    run(&sandbox, "dpkg -i /opt/debs/hello_*.deb && hello");
    run(&sandbox, "cd /tmp && printf 'int main(void){return 0;}' > a.c && gcc a.c -o a && ./a");
    run(&sandbox, "git init -q /tmp/r && cd /tmp/r && touch f && git add f && git commit -qm m && git log --oneline");
    run(
        &sandbox,
        "python3 -c 'import sqlite3, socket, subprocess, multiprocessing' && sqlite3 /tmp/d 'create table t(x)'",
    );
    run(&sandbox, "tmux new-session -d -s s && tmux send-keys -t s 'echo ok > /tmp/ok' Enter");
    eventually("tmux ran a command", || sandbox.exec("cat /tmp/ok").unwrap().success().then_some(()));
}

#[test]
fn a_command_reports_how_it_ended() {
    if lacking() {
        return;
    }
    let (_root, sandbox) = launch("ends");
    let output = sandbox.exec("echo out; echo err >&2; exit 7").unwrap();
    assert_eq!((output.code, output.text().as_str()), (Some(7), "out\nerr\n"));
    assert_eq!(sandbox.exec("kill -9 $$").unwrap().code, Some(137));
    let error = sandbox.exec_with("true", &ExecOptions { cwd: "/none".into(), ..Default::default() }).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");

    let options = ExecOptions { output_limit: 10, ..ExecOptions::default() };
    let output = sandbox.exec_with("seq 1 100000", &options).unwrap();
    assert!(output.success() && output.truncated);
    assert_eq!(output.bytes, b"1\n2\n3\n4\n5\n");

    let options = ExecOptions { env: vec![("WORD".into(), "x y".into())], ..ExecOptions::default() };
    assert_eq!(sandbox.exec_with("echo \"$WORD\"", &options).unwrap().text(), "x y\n");
}

#[test]
fn a_command_that_takes_too_long_is_killed_with_its_session() {
    if lacking() {
        return;
    }
    let (_root, sandbox) = launch("slow");
    let options = ExecOptions { timeout: Some(Duration::from_millis(300)), ..ExecOptions::default() };
    let output = sandbox.exec_with("echo begun; sleep 1000 & sleep 1000", &options).unwrap();
    assert!(output.timed_out);
    assert_eq!((output.code, output.text().as_str()), (None, "begun\n"));
    eventually("nothing is left", || (run(&sandbox, "pgrep -c sleep || true") == "0").then_some(()));
}

#[test]
fn a_background_process_outlives_its_command() {
    if lacking() {
        return;
    }
    let (_root, sandbox) = launch("background");
    // It writes more than a pipe holds: without a reader it would block, without an open read end it would die.
    let line =
        "(for i in $(seq 1 30); do head -c 10000 /dev/zero; done; echo done > /tmp/done; exec sleep 1000) & echo $!";
    let output = sandbox.exec(line).unwrap();
    assert!(output.success());
    eventually("it wrote all", || sandbox.exec("cat /tmp/done").unwrap().success().then_some(()));
    // It holds the pipe still, and a checkpoint is told so.
    let pipes = sandbox.external().into_iter().filter(|e| matches!(e, External::Pipe { .. })).count();
    assert_eq!(pipes, 1);
    run(&sandbox, "pkill sleep");
    eventually("the pipe is forgotten", || (sandbox.external().len() == 1).then_some(()));
}

#[test]
fn kill_leaves_nothing_and_relaunch_keeps_the_files() {
    if lacking() {
        return;
    }
    let (root, sandbox) = launch("kill");
    run(&sandbox, "echo kept > /root/file; setsid sleep 1000 & sleep 1000 &");
    let init = sandbox.init().unwrap();
    sandbox.freeze().unwrap();
    assert_eq!(sandbox.condition().unwrap(), Condition::Frozen);
    sandbox.kill().unwrap();
    assert_eq!(sandbox.condition().unwrap(), Condition::Stopped);
    assert_eq!(sandbox.init(), None);
    assert!(!Path::new(&format!("/proc/{init}")).exists(), "the init is reaped");
    assert_eq!(sandbox.exec("true").unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(std::fs::read_to_string(root.path().join("root/file")).unwrap(), "kept\n");

    sandbox.relaunch().unwrap();
    assert_eq!(run(&sandbox, "cat /root/file; pgrep -c sleep || true"), "kept\n0");
    let (cgroup, netns) = (sandbox.cgroup().to_owned(), sandbox.netns());
    sandbox.destroy().unwrap();
    assert!(!cgroup.exists() && !netns.exists());
    assert!(!Path::new("/run/crab").join(format!("{}.json", id("kill"))).exists());
    delete_root(root.path()).unwrap();
    assert!(!root.path().exists(), "nothing keeps the root busy");
}

#[test]
fn nobody_enters_a_frozen_sandbox() {
    if lacking() {
        return;
    }
    let (_root, sandbox) = launch("frozen");
    sandbox.freeze().unwrap();
    sandbox.freeze().unwrap();
    let before = std::fs::read_to_string(sandbox.cgroup().join("cgroup.procs")).unwrap();
    std::thread::scope(|scope| {
        let command = scope.spawn(|| run(&sandbox, "echo in"));
        std::thread::sleep(Duration::from_millis(200));
        assert!(!command.is_finished());
        assert_eq!(std::fs::read_to_string(sandbox.cgroup().join("cgroup.procs")).unwrap(), before);
        sandbox.thaw().unwrap();
        assert_eq!(command.join().unwrap(), "in");
    });
    sandbox.thaw().unwrap();
}

#[test]
fn the_host_and_the_sandbox_reach_each_other_without_a_network() {
    if lacking() {
        return;
    }
    let (_root, sandbox) = launch("reach");
    let listener = sandbox.listen(0).unwrap();
    let port = listener.local_addr().unwrap().port();
    let answer = std::thread::spawn(move || listener.accept().unwrap().0.write_all(b"from the host").unwrap());
    let line = format!(
        "python3 -c \"import socket; print(socket.create_connection(('127.0.0.1', {port})).recv(99).decode())\""
    );
    assert_eq!(run(&sandbox, &line), "from the host");
    answer.join().unwrap();
    assert!(!sandbox.exec("ip route get 8.8.8.8").unwrap().success());
}

#[test]
fn another_process_of_the_host_can_use_it_and_a_dead_runs_sandbox_is_swept() {
    if lacking() {
        return;
    }
    // Plays the other process: this test binary, started again.
    if let Some(root) = std::env::var_os("CRAB_TEST_CHILD_ROOT") {
        let sandbox = Sandbox::launch(Config::new("test-swept".parse().unwrap(), PathBuf::from(root))).unwrap();
        run(&sandbox, "sleep 1000 > /dev/null 2>&1 & echo x > /tmp/mark");
        // Dies without a word, as by SIGKILL.
        Command::new("kill").args(["-9", &std::process::id().to_string()]).status().unwrap();
        unreachable!();
    }
    let root = ScratchRoot::new("swept").unwrap();
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "another_process_of_the_host_can_use_it_and_a_dead_runs_sandbox_is_swept"])
        .env("CRAB_TEST_CHILD_ROOT", root.path())
        .output()
        .unwrap()
        .status;
    assert!(!status.success());
    let id: SandboxId = "test-swept".parse().unwrap();
    let sandbox = Sandbox::attach(&id).unwrap();
    assert_eq!(run(&sandbox, "cat /tmp/mark; pgrep -c sleep"), "x\n1");
    assert!(sweep().unwrap().contains(&id));
    assert_eq!(sandbox.condition().unwrap(), Condition::Stopped);
    assert_eq!(sandbox.init(), None);
    assert_eq!(Sandbox::attach(&id).unwrap_err().kind(), ErrorKind::NotFound);
}

const SERVER: &str = r#"
import socket, threading
count = 0
server = socket.create_server(("127.0.0.1", 7000))
while True:
    peer, _ = server.accept()
    count += 1
    peer.sendall(str(count).encode())
    peer.close()
"#;

/// No WAL: CRIU (4.2) loses a POSIX lock on a file that its owner also maps, as SQLite does with the WAL's index. A
/// second process that opens the database then believes to be alone and cuts the index off under the first one.
const WRITER: &str = r#"
import sqlite3, time
db = sqlite3.connect("/root/db")
db.execute("create table t(n integer primary key)")
while True:
    with db:
        db.execute("insert into t default values")
    time.sleep(0.02)
"#;

fn ask(sandbox: &Sandbox) -> u32 {
    let mut answer = String::new();
    eventually("the server answers", || sandbox.connect(7000).ok()).read_to_string(&mut answer).unwrap();
    answer.parse().unwrap()
}

fn rows(sandbox: &Sandbox) -> u64 {
    let output = sandbox.exec("sqlite3 -cmd '.timeout 20000' /root/db 'select count(*) from t'").unwrap();
    output.text().trim().parse().unwrap_or(0)
}

/// What a process backend does, by hand: a dump with a snapshot at the cut, then a restore of both.
#[tokio::test(flavor = "multi_thread")]
async fn criu_dumps_it_running_and_restores_it_after_a_kill() {
    if lacking() {
        return;
    }
    let host = ExampleHost::new();
    let root = ScratchRoot::new("criu").unwrap();
    let images = tempfile::tempdir().unwrap();
    let saved = root.path().with_extension("saved");
    let _delete_saved = Deferred(|| delete_root(&saved).unwrap());
    let id = id("criu");
    let sandbox = host.launch(Config::new(id.clone(), root.path()).with_tmpfs_tmp()).unwrap();
    std::fs::write(root.path().join("root/server.py"), SERVER).unwrap();
    std::fs::write(root.path().join("root/writer.py"), WRITER).unwrap();
    // Both keep the output pipe of their command.
    run(&sandbox, "python3 server.py & python3 writer.py &");
    run(&sandbox, "echo in memory > /tmp/file");
    assert_eq!(ask(&sandbox), 1);
    eventually("rows are written", || (rows(&sandbox) > 3).then_some(()));

    // A command that still runs at the cut does not hinder it: it is below pid 1 as all others.
    std::thread::scope(|scope| {
        let pending = scope.spawn(|| sandbox.exec("echo waiting > /tmp/pending; read x < <(sleep 1000)").unwrap());
        eventually("the command runs", || sandbox.exec("cat /tmp/pending").unwrap().success().then_some(()));

        // Freeze, dump, snapshot at the cut, thaw.
        host.freeze(&id).await_now();
        let described = host.describe(&id).await_now();
        dump(&described, images.path(), root.path(), &saved);
        host.thaw(&id).await_now();

        // It runs on after the dump, and past it.
        assert_eq!(ask(&sandbox), 2);
        run(&sandbox, "echo changed > /tmp/file");
        host.kill(&id).await_now();
        assert_eq!(pending.join().unwrap().code, None);

        // Roll the files back and restore the processes.
        delete_root(root.path()).unwrap();
        std::fs::rename(&saved, root.path()).unwrap();
        let inherited = host.inherit(&id, &described.external).await_now();
        let init = restore(&described, images.path(), &inherited);
        host.adopt(&id, init).await_now();
    });

    assert_eq!(sandbox.init(), sandbox.describe().init);
    assert_eq!(ask(&sandbox), 2, "the server's memory is that of the cut");
    assert_eq!(run(&sandbox, "cat /tmp/file"), "in memory");
    let now = rows(&sandbox);
    eventually("the writer writes on", || (rows(&sandbox) > now).then_some(()));
    assert_eq!(run(&sandbox, "sqlite3 -cmd '.timeout 20000' /root/db 'pragma integrity_check'"), "ok");
    // And once more from the restored processes.
    sandbox.kill().unwrap();
    assert_eq!(sandbox.condition().unwrap(), Condition::Stopped);
}

/// The host under the suite that every host passes; it keeps the roots until the sandboxes on them are gone.
struct Hosted {
    host: Arc<ExampleHost>,
    roots: Mutex<Vec<ScratchRoot>>,
}

#[async_trait::async_trait]
impl HostFixture for Hosted {
    fn host(&self) -> Arc<dyn SandboxHost> {
        self.host.clone()
    }

    async fn sandbox(&self) -> SandboxId {
        let mut roots = self.roots.lock().unwrap();
        let name = format!("suite-{}", roots.len());
        let root = ScratchRoot::new(&name).unwrap();
        self.host.launch(Config::new(id(&name), root.path())).unwrap();
        roots.push(root);
        id(&name)
    }
}

#[tokio::test]
async fn the_host_passes_the_suite_of_hosts() {
    if lacking() {
        return;
    }
    let hosted = Hosted { host: Arc::default(), roots: Mutex::default() };
    crab_core::conformance::host(&hosted).await;
}

#[test]
fn a_prepared_sandbox_is_stopped_until_it_is_started() {
    if lacking() {
        return;
    }
    let root = ScratchRoot::new("prepared").unwrap();
    let sandbox = Sandbox::prepare(Config::new(id("prepared"), root.path())).unwrap();
    assert_eq!(sandbox.condition().unwrap(), Condition::Stopped);
    assert_eq!(sandbox.exec("true").unwrap_err().kind(), ErrorKind::NotFound);
    sandbox.relaunch().unwrap();
    run(&sandbox, "true");
    let second = Sandbox::launch(Config::new(id("prepared"), root.path()));
    assert_eq!(second.unwrap_err().kind(), ErrorKind::AlreadyExists);
}

trait AwaitNow<T> {
    fn await_now(self) -> T;
}

impl<T, F: Future<Output = crab_core::Result<T>>> AwaitNow<T> for F {
    #[track_caller]
    fn await_now(self) -> T {
        tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(self)).unwrap()
    }
}

struct Deferred<F: FnMut()>(F);

impl<F: FnMut()> Drop for Deferred<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

fn dump(sandbox: &crab_core::Sandbox, images: &Path, root: &Path, saved: &Path) {
    let netns = sandbox.external.iter().find_map(|external| match external {
        External::NetworkNamespace { path } => Some(std::os::unix::fs::MetadataExt::ino(&path.metadata().unwrap())),
        _ => None,
    });
    let hook = images.join("hook");
    std::fs::write(
        &hook,
        format!(
            "#!/bin/sh\n[ \"$CRTOOLS_SCRIPT_ACTION\" = post-dump ] || exit 0\nexec btrfs subvolume snapshot {} {}\n",
            root.display(),
            saved.display()
        ),
    )
    .unwrap();
    std::fs::set_permissions(&hook, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    let output = Command::new(criu_binary())
        .args(["dump", "-R", "-v3", "-o", "dump.log", "--manage-cgroups=ignore", "--network-lock", "skip"])
        .args(["--file-locks", "-t", &sandbox.init.unwrap().to_string(), "-D"])
        .arg(images)
        .arg("--action-script")
        .arg(&hook)
        .arg("--freeze-cgroup")
        .arg(&sandbox.cgroup)
        .args(["--external", &format!("net[{}]:extnet", netns.unwrap())])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", log(images, "dump.log"));
}

fn restore(sandbox: &crab_core::Sandbox, images: &Path, inherited: &[crab_core::InheritedFd]) -> u32 {
    let pidfile = images.join("pid");
    let mut command = Command::new("unshare");
    command
        .args(["-m", "--propagation", "private", "sh", "-c"])
        .arg("echo 0 > $1/cgroup.procs && mount --bind $2 $2 && shift 1 && root=$1 && shift 1 && exec \"$@\" --root $root")
        .arg("sh")
        .arg(&sandbox.cgroup)
        .arg(&sandbox.root)
        .arg(criu_binary())
        .args(["restore", "-d", "-v3", "-o", "restore.log", "--manage-cgroups=ignore", "--file-locks", "--pidfile"])
        .arg(&pidfile)
        .arg("-D")
        .arg(images);
    for inherited in inherited {
        let key = match &inherited.external {
            External::NetworkNamespace { .. } => "extnet".to_owned(),
            other => other.key(),
        };
        // Kept open across exec, under the number that it has here.
        rustix::io::fcntl_setfd(&inherited.fd, rustix::io::FdFlags::empty()).unwrap();
        command.args(["--inherit-fd", &format!("fd[{}]:{key}", inherited.fd.as_raw_fd())]);
    }
    let status = command.status().unwrap();
    assert!(status.success(), "{}", log(images, "restore.log"));
    std::fs::read_to_string(pidfile).unwrap().trim().parse().unwrap()
}

fn log(images: &Path, name: &str) -> String {
    let text = std::fs::read_to_string(images.join(name)).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(40)..].join("\n")
}
