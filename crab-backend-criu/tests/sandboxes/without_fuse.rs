//! A restore where CRIU cannot read the memory from us, as in a container without `/dev/fuse`: all images are put together
//! in the capture directory before CRIU starts.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use crab_backend_criu::CriuBackend;
use crab_core::{CheckpointBackend, Condition, ErrorKind};
use crab_examples::sandbox::Sandbox;

use crate::dying;
use crate::storing::{noting_criu, pack};
use crate::support::{assert_nothing_kept, eventually, python, world};

const VARIABLE: &str = "CRAB_TEST_WITHOUT_FUSE";

/// Holds memory, a third of it zeros, and tells its digest when it is asked.
const HOLDER: &str = r"
import hashlib, os, time
memory = os.urandom(16 << 20) + bytes(8 << 20)
for n in range(100):
    while not os.path.exists(f'/root/ask-{n}'):
        time.sleep(0.005)
    with open('/root/said.new', 'w') as file:
        file.write(hashlib.sha256(memory).hexdigest())
    os.rename('/root/said.new', f'/root/said-{n}')
";

fn digest(sandbox: &Sandbox, n: u32) -> String {
    let root = sandbox.root().join("root");
    fs::write(root.join(format!("ask-{n}")), "").unwrap();
    eventually("it tells the digest", || fs::read_to_string(root.join(format!("said-{n}"))).ok())
}

#[tokio::test(flavor = "multi_thread")]
async fn without_fuse_the_memory_is_put_together_before_criu_starts() {
    let Some(world) = world().await else { return };
    let sandbox = world.bare();
    python(&sandbox, "holder", HOLDER);
    let before = digest(&sandbox, 0);
    world.checkpoint(&sandbox).await;
    sandbox.kill().unwrap();
    let nothing = world.captures.join("nothing");
    fs::write(&nothing, "").unwrap();
    let hide = "if [ -e /dev/fuse ]; then mount --bind \"$0\" /dev/fuse || exit; fi; exec \"$@\" </dev/null";
    let output = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-c", hide])
        .arg(nothing)
        .arg(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "without_fuse::the_program_without_fuse", "--nocapture"])
        .env(VARIABLE, format!("{} {} {}", sandbox.id(), world.images.display(), world.captures.display()))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.lines().any(|line| line == format!("restored {before}")), "{said}");
    world.assert_no_captures();
}

/// Run by the test above, where `/dev/fuse` is hidden.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "the other half of the test in this file, which runs it"]
async fn the_program_without_fuse() {
    let Ok(task) = std::env::var(VARIABLE) else { return };
    let words: Vec<&str> = task.split(' ').collect();
    let [id, images, captures] = words[..] else { panic!("{task}") };
    let sandbox = Sandbox::attach(&id.parse().unwrap()).unwrap();
    let (criu, started) = noting_criu(Path::new(captures));
    let builder = CriuBackend::builder().images(images).capture_dir(captures).binary(criu);
    let backend = builder.open().await.unwrap();
    let artifact = backend.list(&sandbox.id()).await.unwrap().remove(0);
    // A damaged block in the middle of the memory is found while CRIU has not been started.
    let file = fs::File::options().read(true).write(true).open(pack(Path::new(images), &artifact)).unwrap();
    let (at, mut byte, noted) = (file.metadata().unwrap().len() / 2, [0], fs::read(&started).unwrap());
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    let error = dying::restore(&backend, &sandbox, &artifact).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert_eq!(error.sandbox_condition(), Some(Condition::Stopped));
    assert_eq!(fs::read(&started).unwrap(), noted, "CRIU was started");
    file.write_all_at(&byte, at).unwrap();
    dying::restore(&backend, &sandbox, &artifact).await.unwrap();
    assert!(fs::read(&started).unwrap().len() > noted.len());
    assert_nothing_kept(sandbox.cgroup(), Path::new(captures));
    println!("\nrestored {}", digest(&sandbox, 1));
    sandbox.kill().unwrap();
}
