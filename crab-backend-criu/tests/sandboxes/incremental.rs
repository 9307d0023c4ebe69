//! Captures that copy the memory before the freeze. They need a kernel that marks written pages.

use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use crab_core::{Artifact, AtCut, CaptureRequest, CheckpointBackend, Condition, Result};
use crab_examples::sandbox::Sandbox;

use crate::files_of_the_cut::{Pair, roll_back};
use crate::support::{World, artifact_name, eventually, get, python, set, world_with};

/// A backend that copies beforehand, where that is possible.
async fn world() -> Option<World> {
    let world = world_with(|builder| builder.incremental()).await?;
    if world.backend.is_incremental() {
        return Some(world);
    }
    println!("skipped: incremental dumps (this kernel does not mark the pages that are written)");
    None
}

#[tokio::test(flavor = "multi_thread")]
async fn the_backend_passes_the_suite_with_incremental_dumps() {
    let Some(world) = world().await else { return };
    crab_core::conformance::backend(&world).await;
    world.assert_no_captures();
    assert!(world.backend.is_incremental(), "none of them failed");
}

#[tokio::test(flavor = "multi_thread")]
async fn where_pages_are_not_marked_full_dumps_are_made() {
    let Some(world) = world_with(|builder| builder.incremental()).await else { return };
    if world.backend.is_incremental() {
        println!("skipped: full dumps in place of incremental ones (this kernel marks the pages that are written)");
        return;
    }
    let sandbox = world.with_server();
    set(&sandbox, 6);
    assert!(!world.backend.capabilities().prepares, "there is nothing to be had");
    let artifact = world.checkpoint(&sandbox).await;
    sandbox.kill().unwrap();
    world.restore(&sandbox, &artifact).await.unwrap();
    assert_eq!(get(&sandbox), Some(6));
}

/// Two processes of three threads each, which all the time write to memory of every kind, map it anew, let go of it and
/// move it, and note what must be where. Asked by a file `check-WORD`, they compare.
const STORM: &str = r#"
import ctypes, os, random, threading, time
libc = ctypes.CDLL(None, use_errno=True)
P, Z, I = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
libc.mmap.restype = libc.mremap.restype = P
libc.mmap.argtypes = [P, Z, I, I, I, ctypes.c_long]
libc.mremap.argtypes = [P, Z, Z, I, P]
libc.madvise.argtypes = [P, Z, I]
libc.munmap.argtypes = [P, Z]
MB, CHUNK = 1 << 20, 1 << 18
SIZE = 2 * MB
FIXED, ANONYMOUS, PRIVATE, SHARED = 16, 32, 2, 1
NOHUGE, HUGE, DONTNEED = 15, 14, 4

def map_at(address, flags, fd=-1):
    got = libc.mmap(address, SIZE, 3, flags | FIXED, fd, 0)
    assert got == address, ctypes.get_errno()

class Region:
    def __init__(self, address, kind, name):
        self.address, self.kind = address, kind
        self.want = [0] * (SIZE // CHUNK)
        if kind == 'private file' or kind == 'shared file':
            fd = os.open(name, os.O_RDWR | os.O_CREAT)
            os.write(fd, b'F' * SIZE)
            self.want = [ord('F')] * len(self.want)
            map_at(address, PRIVATE if kind == 'private file' else SHARED, fd)
            os.close(fd)
        elif kind == 'memfd':
            fd = os.memfd_create(name.replace('/', '-'))
            os.truncate(fd, SIZE)
            map_at(address, SHARED, fd)
            os.close(fd)
        else:
            map_at(address, ANONYMOUS | (SHARED if kind == 'shared' else PRIVATE))
            libc.madvise(address, SIZE, HUGE if kind == 'large' else NOHUGE)
    def write(self):
        n, value = random.randrange(len(self.want)), random.randrange(1, 256)
        self.want[n] = None
        if random.random() < 0.5:
            ctypes.memset(self.address + n * CHUNK, value, CHUNK)
        else:
            # By the kernel, through the process's own memory file.
            fd = os.open('/proc/self/mem', os.O_RDWR)
            os.pwrite(fd, bytes([value]) * CHUNK, self.address + n * CHUNK)
            os.close(fd)
        self.want[n] = value
    def let_go(self):
        n = random.randrange(len(self.want))
        self.want[n] = None
        libc.madvise(self.address + n * CHUNK, CHUNK, DONTNEED)
        self.want[n] = {'private': 0, 'large': 0, 'private file': ord('F')}[self.kind]
        if random.random() < 0.5:
            ctypes.string_at(self.address + n * CHUNK, CHUNK)
    def anew(self):
        self.want[:] = [None] * len(self.want)
        libc.munmap(self.address, SIZE)
        map_at(self.address, ANONYMOUS | PRIVATE)
        libc.madvise(self.address, SIZE, HUGE if self.kind == 'large' else NOHUGE)
        self.want[:] = [0] * len(self.want)
    def wrong(self):
        seen = [(n, want, ctypes.string_at(self.address + n * CHUNK, CHUNK))
                for n, want in enumerate(self.want) if want is not None]
        return [f'{self.kind} chunk {n} is not {want}' for n, want, bytes_ in seen if bytes_ != bytes([want]) * CHUNK]

def exchange(a, b, spare):
    wants = a.want[:], b.want[:]
    a.want[:] = b.want[:] = [None] * len(a.want)
    for old, new in (a.address, spare), (b.address, a.address), (spare, b.address):
        assert libc.mremap(old, SIZE, SIZE, 3, new) == new, ctypes.get_errno()
    a.want[:], b.want[:] = wants[1], wants[0]

KINDS = ['private', 'private', 'large', 'large', 'shared', 'memfd', 'private file', 'shared file']
role = 'parent' if os.fork() else 'child'
pause, parked = threading.Event(), threading.Barrier(4)
everything = []

def worker(n):
    base = 0x200000000000 + n * (1 << 30)
    regions = [Region(base + at * 8 * MB, kind, f'/root/{role}-{n}-{at}') for at, kind in enumerate(KINDS)]
    everything.extend(regions)
    parked.wait()
    while True:
        if pause.is_set():
            parked.wait()
            parked.wait()
        at = random.randrange(len(regions))
        region, dice = regions[at], random.random()
        if dice < 0.1 and region.kind in ('private', 'large', 'private file'):
            region.let_go()
        elif dice < 0.2 and region.kind in ('private', 'large'):
            region.anew()
        elif dice < 0.4 and region.kind in ('private', 'large'):
            exchange(regions[at & ~1], regions[at | 1], base + (1 << 29))
        elif dice < 0.42:
            # For a moment all of it belongs to two.
            pid = os.fork()
            if pid == 0:
                ctypes.memset(region.address, 0xee, SIZE) if region.kind in ('private', 'large') else None
                os._exit(0)
            os.waitpid(pid, 0)
        else:
            region.write()

for n in range(3):
    threading.Thread(target=worker, args=(n,), daemon=True).start()
parked.wait()
open(f'/root/up-{role}', 'w').close()
answered = set()
while True:
    asked = {name for name in os.listdir('/root') if name.startswith('check-')} - answered
    for name in asked:
        pause.set()
        parked.wait()
        wrong = [line for region in everything for line in region.wrong()]
        with open(f'/root/{role}-{name}.new', 'w') as file:
            file.write('\n'.join(wrong) or 'right')
        os.rename(f'/root/{role}-{name}.new', f'/root/{role}-{name}')
        answered.add(name)
        pause.clear()
        parked.wait()
    time.sleep(0.01)
"#;

/// What both processes say of their memory.
fn check(sandbox: &Sandbox, word: &str) {
    std::fs::write(sandbox.root().join(format!("root/check-{word}")), "").unwrap();
    for role in ["parent", "child"] {
        let answer = sandbox.root().join(format!("root/{role}-check-{word}"));
        let said = eventually("it answers", || std::fs::read_to_string(&answer).ok());
        assert_eq!(said, "right", "{role}, {word}");
    }
}

async fn storm(world: &World) -> Arc<Sandbox> {
    let sandbox = world.bare();
    python(&sandbox, "storm", STORM);
    for role in ["parent", "child"] {
        eventually("it is up", || sandbox.root().join(format!("root/up-{role}")).exists().then_some(()));
    }
    sandbox
}

async fn capture(world: &World, sandbox: &Sandbox) -> (Artifact, Pair) {
    let mut pair = Pair::of(sandbox);
    let captured = world.capture_with(sandbox, false, None, &mut pair).await.unwrap();
    (captured.persist().await.unwrap(), pair)
}

#[tokio::test(flavor = "multi_thread")]
async fn no_store_between_the_copy_and_the_incremental_dump_is_lost() {
    let Some(world) = world().await else { return };
    let sandbox = storm(&world).await;
    for life in 0..2 {
        let (artifact, pair) = capture(&world, &sandbox).await;
        check(&sandbox, &format!("original-{life}"));
        sandbox.kill().unwrap();
        roll_back(&sandbox, &pair);
        // Before they run: what they do first must not cover what is wrong.
        let word = format!("restored-{life}");
        std::fs::write(sandbox.root().join(format!("root/check-{word}")), "").unwrap();
        world.restore(&sandbox, &artifact).await.unwrap();
        check(&sandbox, &word);
    }
    assert!(world.backend.is_incremental(), "none of them failed");
}

#[tokio::test(flavor = "multi_thread")]
async fn full_dumps_of_the_same_storm_are_right_too() {
    // Where time is dear, the incremental ones are enough.
    if std::env::var_os("CRAB_IN_VM").is_some() {
        return;
    }
    let Some(world) = crate::support::world().await else { return };
    let sandbox = storm(&world).await;
    let (artifact, pair) = capture(&world, &sandbox).await;
    sandbox.kill().unwrap();
    roll_back(&sandbox, &pair);
    std::fs::write(sandbox.root().join("root/check-full"), "").unwrap();
    world.restore(&sandbox, &artifact).await.unwrap();
    check(&sandbox, "full");
}

/// At the cut, how many bytes of pages CRIU has saved.
struct Saved<'a> {
    world: &'a World,
    bytes: Option<u64>,
}

#[async_trait]
impl AtCut for Saved<'_> {
    async fn run(&mut self) -> Result<()> {
        let entries = |path: &Path| std::fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
        let runs = entries(&self.world.captures).flat_map(|part| entries(&part).collect::<Vec<_>>());
        let files = runs.flat_map(|run| entries(&run.join("images")).collect::<Vec<_>>());
        let pages = files.filter(|file| file.file_name().unwrap().to_string_lossy().starts_with("pages-"));
        self.bytes = Some(pages.map(|file| file.metadata().unwrap().len()).sum());
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_incremental_dump_of_a_sandbox_that_the_caller_freezes_uses_what_was_prepared() {
    let Some(world) = world().await else { return };
    assert!(world.backend.capabilities().prepares);
    let sandbox = world.with_server();
    python(
        &sandbox,
        "memory",
        "import os, time\nmemory = os.urandom(24 << 20)\nopen('/root/up', 'w')\ntime.sleep(1e5)\n",
    );
    eventually("it is up", || sandbox.root().join("root/up").exists().then_some(()));
    for prepares in [true, false] {
        set(&sandbox, 1);
        let (described, artifact) = (sandbox.describe(), artifact_name());
        let prepared = match prepares {
            true => Some(world.backend.prepare(&described, &artifact, None).await.unwrap()),
            false => None,
        };
        set(&sandbox, 2);
        sandbox.freeze().unwrap();
        let mut saved = Saved { world: &world, bytes: None };
        let request = CaptureRequest {
            sandbox: &described,
            artifact,
            parent: None,
            frozen: true,
            deadline: None,
            at_cut: &mut saved,
        };
        let captured = world.backend.capture(request).await.unwrap();
        let bytes = saved.bytes.unwrap();
        assert_eq!(bytes < 16 << 20, prepares, "{bytes} bytes were saved in the freeze");
        assert_eq!(sandbox.condition().unwrap(), Condition::Frozen);
        sandbox.thaw().unwrap();
        drop(prepared);
        set(&sandbox, 3);
        let artifact = captured.persist().await.unwrap();
        sandbox.kill().unwrap();
        world.restore(&sandbox, &artifact).await.unwrap();
        assert_eq!(get(&sandbox), Some(2));
    }
    assert!(world.backend.is_incremental(), "none of them failed");
    world.assert_no_captures();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_incremental_dump_is_stored_as_a_whole_one() {
    let Some(world) = world().await else { return };
    let sandbox = world.with_server();
    for value in 1..4 {
        set(&sandbox, value);
        let artifact = world.checkpoint(&sandbox).await;
        assert!(artifact.depends_on.is_empty());
        // Nothing of an earlier capture is needed.
        sandbox.kill().unwrap();
        world.restore(&sandbox, &artifact).await.unwrap();
        assert_eq!(get(&sandbox), Some(value));
        world.backend.remove(&artifact).await.unwrap();
    }
}
