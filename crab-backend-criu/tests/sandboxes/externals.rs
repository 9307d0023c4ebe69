//! What belongs to the host: left out at the dump, given again at the restore.

use std::collections::BTreeSet;
use std::io::Read;
use std::os::fd::OwnedFd;

use crab_core::CheckpointBackend;
use crab_core::{ErrorKind, External, InheritedFd, RestoreTarget};

use crab_examples::sandbox::Sandbox;

use crate::support::{eventually, run, world};

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
