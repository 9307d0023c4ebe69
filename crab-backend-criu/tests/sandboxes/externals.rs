//! What belongs to the host: left out at the dump, given again at the restore.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;

use crab_core::CheckpointBackend;
use crab_core::{ErrorKind, External, InheritedFd, RestoreTarget};

use crab_examples::sandbox::Sandbox;

use crate::support::{background_on, eventually, run, within, world};

/// The pipes that a background command writes to the host.
fn pipes(external: &[External]) -> Vec<u64> {
    external
        .iter()
        .filter_map(|e| match e {
            External::Pipe { inode } => Some(*inode),
            _ => None,
        })
        .collect()
}

/// Talks on its standard output for ever, and counts in a file whose size stays the same.
const TALKER: &str = "
import os, time
file = os.open('/root/n', os.O_RDWR | os.O_CREAT)
n = 0
while True:
    n += 1
    os.pwrite(file, b'%020d' % n, 0)
    print('line', n, flush=True)
    time.sleep(0.01)
";

/// Starts the talker. Its output goes to the pipe of the command that started it, which the host drains.
fn talk(sandbox: &Sandbox) {
    std::fs::write(sandbox.root().join("root/talker.py"), TALKER).unwrap();
    run(sandbox, "python3 /root/talker.py &");
    eventually("it talks", || number(sandbox));
    assert_eq!(pipes(&sandbox.external()).len(), 1);
}

fn number(sandbox: &Sandbox) -> Option<u64> {
    std::fs::read_to_string(sandbox.root().join("root/n")).ok()?.parse().ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_background_process_writes_to_a_fresh_pipe_after_the_restore() {
    let Some(world) = world().await else { return };
    let sandbox = world.bare();
    talk(&sandbox);
    let artifact = world.checkpoint(&sandbox).await;
    assert_eq!(pipes(&artifact.external), pipes(&sandbox.external()));
    sandbox.kill().unwrap();

    let (mut reader, writer) = std::io::pipe().unwrap();
    let mut writer = Some(OwnedFd::from(writer));
    let mut inherited = sandbox.inherit(&artifact.external).unwrap();
    for given in &mut inherited {
        if matches!(given.external, External::Pipe { .. }) {
            given.fd = writer.take().expect("one pipe");
        }
    }
    let target = RestoreTarget {
        sandbox: sandbox.describe(),
        operation: "fresh-pipe".parse().unwrap(),
        keep_replaced: None,
        inherited,
        deadline: None,
    };
    let restored = world.backend.restore(&artifact, target).await.unwrap();
    sandbox.adopt(restored.init.unwrap()).unwrap();
    let mut text = String::new();
    while text.matches('\n').count() < 5 {
        let mut buffer = [0; 256];
        let count = reader.read(&mut buffer).unwrap();
        assert!(count > 0, "the pipe ended after {text:?}");
        text.push_str(std::str::from_utf8(&buffer[..count]).unwrap());
    }
    let lines: BTreeSet<_> = text.lines().map(|line| line.split_once(' ').map(|(word, _)| word)).collect();
    assert_eq!(lines, BTreeSet::from([Some("line")]));
    // Nobody else holds the writing end: when the sandbox ends, so does the pipe.
    sandbox.kill().unwrap();
    reader.read_to_end(&mut Vec::new()).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_life_has_its_own_pipe_to_declare() {
    let Some(world) = world().await else { return };
    let sandbox = world.bare();
    talk(&sandbox);
    for _ in 0..3 {
        let artifact = world.checkpoint(&sandbox).await;
        sandbox.kill().unwrap();
        world.restore(&sandbox, &artifact).await.unwrap();
        assert_ne!(pipes(&artifact.external), pipes(&sandbox.external()), "a new pipe has a new number");
        let before = number(&sandbox).unwrap();
        eventually("it goes on", || number(&sandbox).filter(|now| *now > before));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pipe_to_the_host_that_is_not_declared_is_refused_by_name() {
    let Some(world) = world().await else { return };
    let sandbox = world.bare();
    talk(&sandbox);
    let mut described = sandbox.describe();
    described.external.retain(|external| !matches!(external, External::Pipe { .. }));
    let request = crab_core::CaptureRequest {
        sandbox: &described,
        artifact: crate::support::artifact_name(),
        parent: None,
        frozen: false,
        deadline: None,
        at_cut: &mut crab_core::NoCut,
    };
    let error = world.backend.capture(request).await.err().expect("it is refused");
    assert_eq!(error.kind(), ErrorKind::NotCheckpointable, "{error}");
    let inode = pipes(&sandbox.external())[0];
    let text = error.to_string();
    assert!(text.contains(&format!("pipe:[{inode}]")) && text.contains("(python3)"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pipe_inside_the_sandbox_needs_no_declaration() {
    let Some(world) = world().await else { return };
    let sandbox = world.bare();
    run(&sandbox, "(yes | (sleep 1000; cat)) </dev/null >/dev/null 2>&1 &");
    // And one whose other end nobody holds any more.
    run(
        &sandbox,
        "python3 -c 'import os, time; r, w = os.pipe(); os.close(r); time.sleep(1000)' </dev/null >/dev/null 2>&1 &",
    );
    // The pipes of the commands that started them.
    eventually("no pipe of the host is held", || pipes(&sandbox.external()).is_empty().then_some(()));
    let artifact = world.checkpoint(&sandbox).await;
    assert!(pipes(&artifact.external).is_empty());
    sandbox.kill().unwrap();
    world.restore(&sandbox, &artifact).await.unwrap();
    assert_eq!(run(&sandbox, "pgrep -xc 'yes|sleep|python3'"), "3");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restore_without_what_is_external_is_refused_before_criu_runs() {
    let Some(world) = world().await else { return };
    let sandbox = world.bare();
    talk(&sandbox);
    let artifact = world.checkpoint(&sandbox).await;
    sandbox.kill().unwrap();
    let inherited: Vec<InheritedFd> = sandbox
        .inherit(&artifact.external)
        .unwrap()
        .into_iter()
        .filter(|given| !matches!(given.external, External::Pipe { .. }))
        .collect();
    let target = RestoreTarget {
        sandbox: sandbox.describe(),
        operation: "missing-pipe".parse().unwrap(),
        keep_replaced: None,
        inherited,
        deadline: None,
    };
    let error = world.backend.restore(&artifact, target).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    assert!(error.to_string().contains("pipe:["), "{error}");
}

fn inode(socket: &UnixStream) -> u64 {
    std::fs::metadata(format!("/proc/self/fd/{}", socket.as_raw_fd())).unwrap().ino()
}

/// A tool server: a line in, a line out, and a number that grows.
const TOOL: &str = "
import sys
n = 0
for line in sys.stdin:
    n += 1
    print(n, line.strip(), flush=True)
";

/// What the server answers.
fn call(mut end: &UnixStream, word: &str) -> String {
    end.set_read_timeout(Some(std::time::Duration::from_secs(60))).unwrap();
    end.write_all(format!("{word}\n").as_bytes()).unwrap();
    let mut line = String::new();
    BufReader::new(end).read_line(&mut line).unwrap();
    line
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tool_server_on_a_declared_socket_answers_on_a_fresh_one_after_the_restore() {
    let Some(world) = world().await else { return };
    let sandbox = world.bare();
    std::fs::write(sandbox.root().join("root/tool.py"), TOOL).unwrap();
    let pair = || within(&sandbox, &["net"], || UnixStream::pair().unwrap());
    let (host, inside) = pair();
    let socket = External::Socket { inode: inode(&inside) };
    background_on(&sandbox, inside.into(), "setsid python3 tool.py");
    assert_eq!(call(&host, "one"), "1 one\n");
    let error = world.checkpoint_with(&sandbox, &[]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotCheckpointable, "{error}");
    assert!(error.to_string().contains(&socket.key()) && error.to_string().contains("(python3)"), "{error}");

    let artifact = world.checkpoint_with(&sandbox, std::slice::from_ref(&socket)).await.unwrap();
    assert_eq!(call(&host, "two"), "2 two\n", "the original is not disturbed");
    sandbox.kill().unwrap();
    let (host, inside) = UnixStream::pair().unwrap();
    let given = InheritedFd { external: socket.clone(), fd: inside.into() };
    world.restore_with(&sandbox, &artifact, vec![given]).await.unwrap();
    assert_eq!(call(&host, "three"), "2 three\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_socket_of_the_hosts_network_namespace_is_refused_even_where_it_is_declared() {
    let Some(world) = world().await else { return };
    let sandbox = world.bare();
    std::fs::write(sandbox.root().join("root/tool.py"), TOOL).unwrap();
    let (host, inside) = UnixStream::pair().unwrap();
    let socket = External::Socket { inode: inode(&inside) };
    background_on(&sandbox, inside.into(), "setsid python3 tool.py");
    assert_eq!(call(&host, "one"), "1 one\n");
    let error = world.checkpoint_with(&sandbox, &[socket]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotCheckpointable, "{error}");
    assert!(error.to_string().contains("another network namespace"), "{error}");
    assert_eq!(call(&host, "two"), "2 two\n");
}

/// A pty of the host's: the master and the end that goes inside.
fn terminal() -> (std::fs::File, std::fs::File, External) {
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    let name = ptsname(&master, Vec::new()).unwrap();
    let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NOCTTY | rustix::fs::OFlags::CLOEXEC;
    let inside = std::fs::File::from(rustix::fs::open(name, flags, rustix::fs::Mode::empty()).unwrap());
    let metadata = inside.metadata().unwrap();
    let external = External::Terminal { number: metadata.rdev(), device: metadata.dev() };
    (master.into(), inside, external)
}

/// Types a line and reads until the answer is there.
fn type_line(mut master: &std::fs::File, line: &str, answer: &str) {
    master.write_all(format!("{line}\n").as_bytes()).unwrap();
    let mut text = String::new();
    while !text.contains(answer) {
        let mut buffer = [0; 512];
        let wanted = &mut [rustix::event::PollFd::new(&master, rustix::event::PollFlags::IN)];
        let patience = rustix::event::Timespec { tv_sec: 60, tv_nsec: 0 };
        assert_eq!(rustix::event::poll(wanted, Some(&patience)).unwrap(), 1, "no {answer:?} in {text:?}");
        let count = master.read(&mut buffer).unwrap();
        text.push_str(&String::from_utf8_lossy(&buffer[..count]));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interactive_shell_goes_on_at_a_fresh_terminal() {
    let Some(world) = world().await else { return };
    let sandbox = world.bare();
    let (master, inside, external) = terminal();
    background_on(&sandbox, inside.into(), "setsid -c bash --norc -i");
    type_line(&master, "x=41; echo the-$((x + 1))", "the-42");
    let error = world.checkpoint_with(&sandbox, &[]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotCheckpointable, "{error}");
    assert!(error.to_string().contains("terminal") && error.to_string().contains("(bash)"), "{error}");

    let artifact = world.checkpoint_with(&sandbox, std::slice::from_ref(&external)).await.unwrap();
    type_line(&master, "echo it-$((x + 2))", "it-43");
    sandbox.kill().unwrap();
    drop(master);
    let (master, inside, _) = terminal();
    let given = InheritedFd { external, fd: inside.into() };
    world.restore_with(&sandbox, &artifact, vec![given]).await.unwrap();
    type_line(&master, "echo new-$((x + 3))", "new-44");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_of_the_host_is_mounted_again_where_it_is_declared() {
    let Some(world) = world().await else { return };
    let sandbox = world.with_server();
    let shared = tempfile::tempdir().unwrap();
    std::fs::write(shared.path().join("note"), "of the host").unwrap();
    std::fs::create_dir(sandbox.root().join("shared")).unwrap();
    mount_inside(&sandbox, shared.path(), "/shared");
    run(&sandbox, "cat /shared/note; (exec 5</shared/note; exec sleep 1000) </dev/null >/dev/null 2>&1 &");
    let error = world.checkpoint_with(&sandbox, &[]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotCheckpointable, "{error}");
    assert!(error.to_string().contains("/shared"), "{error}");

    let mount = External::Mount { inside: "/shared".into() };
    let artifact = world.checkpoint_with(&sandbox, std::slice::from_ref(&mount)).await.unwrap();
    sandbox.kill().unwrap();
    let given = InheritedFd { external: mount, fd: std::fs::File::open(shared.path()).unwrap().into() };
    world.restore_with(&sandbox, &artifact, vec![given]).await.unwrap();
    assert_eq!(run(&sandbox, "cat /shared/note; cat /proc/$(pgrep -x sleep)/fd/5"), "of the hostof the host");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_node_of_the_host_is_mounted_again_where_it_is_declared() {
    let Some(world) = world().await else { return };
    let sandbox = world.with_server();
    std::fs::write(sandbox.root().join("dev/mine"), "").unwrap();
    mount_inside(&sandbox, std::path::Path::new("/dev/zero"), "/dev/mine");
    run(&sandbox, "(exec 5</dev/mine; exec sleep 1000) </dev/null >/dev/null 2>&1 &");
    let mount = External::Mount { inside: "/dev/mine".into() };
    let artifact = world.checkpoint_with(&sandbox, std::slice::from_ref(&mount)).await.unwrap();
    sandbox.kill().unwrap();
    let given = InheritedFd { external: mount, fd: std::fs::File::open("/dev/zero").unwrap().into() };
    world.restore_with(&sandbox, &artifact, vec![given]).await.unwrap();
    assert_eq!(
        run(&sandbox, "head -c 3 /dev/mine | od -An -tx1; head -c 1 /proc/$(pgrep -x sleep)/fd/5 | wc -c"),
        " 00 00 00\n1"
    );
}

/// Mounts something of the host's in a running sandbox.
fn mount_inside(sandbox: &Sandbox, source: &std::path::Path, place: &str) {
    use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};
    let tree = open_tree(rustix::fs::CWD, source, OpenTreeFlags::OPEN_TREE_CLONE).unwrap();
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    within(sandbox, &["mnt"], || move_mount(&tree, "", rustix::fs::CWD, place, flags).unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_of_the_host_that_is_open_inside_is_refused_by_name() {
    let Some(world) = world().await else { return };
    let sandbox = world.with_server();
    let file = tempfile::Builder::new().prefix("of-the-host-").tempfile().unwrap();
    background_on(&sandbox, file.as_file().try_clone().unwrap().into(), "setsid sleep 1000");
    eventually("it sleeps", || sandbox.exec("pgrep -x sleep").unwrap().success().then_some(()));
    let error = world.checkpoint_with(&sandbox, &[]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotCheckpointable, "{error}");
    assert!(error.to_string().contains("of-the-host-") && error.to_string().contains("(sleep)"), "{error}");
}
