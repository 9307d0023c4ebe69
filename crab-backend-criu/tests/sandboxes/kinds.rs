//! Each kind of thing that a process can hold comes back, and the original is not disturbed.

use std::sync::Arc;

use crab_examples::sandbox::Sandbox;

use crate::support::{World, ask, eventually, python, world};

/// Runs SETUP, then answers: `ready`, or what `check()` returns.
const HOLDER: &str = r"
import array, ctypes, errno, mmap, os, select, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
SETUP
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(('127.0.0.1', 7300))
server.listen()
while True:
    client, _ = server.accept()
    with client:
        question = client.makefile().readline().strip()
        try:
            answer = 'ready' if question == 'ready' else check()
        except Exception as error:
            answer = repr(error)
        client.sendall(str(answer).encode())
";

fn check(sandbox: &Sandbox) -> String {
    ask(sandbox, 7300, "check").unwrap_or_default()
}

fn holder(world: &World, setup: &str) -> Arc<Sandbox> {
    let sandbox = world.bare();
    python(&sandbox, "holder", &HOLDER.replace("SETUP", setup));
    eventually("it holds all", || ask(&sandbox, 7300, "ready").filter(|answer| answer == "ready"));
    sandbox
}

/// The check says what is expected of the original after the capture, and of the restored.
async fn comes_back(setup: &str, expected: &str) {
    let Some(world) = world().await else { return };
    let sandbox = holder(&world, setup);
    let artifact = world.checkpoint(&sandbox).await;
    assert_eq!(check(&sandbox), expected, "the original");
    sandbox.kill().unwrap();
    world.restore(&sandbox, &artifact).await.unwrap();
    assert_eq!(check(&sandbox), expected, "the restored");
}

macro_rules! kinds {
    ($($name:ident: $setup:expr => $expected:expr;)*) => {
        $(
            #[tokio::test(flavor = "multi_thread")]
            async fn $name() {
                comes_back($setup, $expected).await;
            }
        )*
    };
}

kinds! {
    an_epoll_with_something_ready: "
r, w = os.pipe()
ep = select.epoll()
ep.register(r, select.EPOLLIN)
os.write(w, b'x')
def check():
    return [(fd == r, event) for fd, event in ep.poll(10)]
" => "[(True, 1)]";

    a_timerfd_that_ticks: "
fd = libc.timerfd_create(time.CLOCK_MONOTONIC, 0)
libc.timerfd_settime(fd, 0, struct.pack('=4q', 0, 10_000_000, 0, 10_000_000), None)
def check():
    return struct.unpack('=Q', os.read(fd, 8))[0] > 0
" => "True";

    an_eventfd_with_a_count: "
fd = os.eventfd(0)
os.eventfd_write(fd, 7)
def check():
    return os.eventfd_read(fd)
" => "7";

    a_signalfd_with_a_pending_signal: "
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
fd = libc.signalfd(-1, struct.pack('=Q', 1 << (signal.SIGUSR1 - 1)), 0)
os.kill(os.getpid(), signal.SIGUSR1)
def check():
    return struct.unpack('=I', os.read(fd, 128)[:4])[0] == signal.SIGUSR1
" => "True";

    an_inotify_watch: "
os.mkdir('/root/watched')
fd = libc.inotify_init1(0)
libc.inotify_add_watch(fd, b'/root/watched', 0x100)
def check():
    name = f'/root/watched/new-{os.getpid()}'
    if os.path.exists(name):
        os.unlink(name)
    open(name, 'w').close()
    return os.read(fd, 4096)[16:].rstrip(b'\\0').decode() == os.path.basename(name)
" => "True";

    a_memfd_and_a_mapping_of_it: "
fd = os.memfd_create('mine')
os.ftruncate(fd, 8192)
memory = mmap.mmap(fd, 8192)
memory[4096:4101] = b'hello'
def check():
    return os.pread(fd, 5, 4096)
" => "b'hello'";

    pipes_with_unread_data: "
r, w = os.pipe()
os.write(w, b'unread' * 1000)
os.set_blocking(r, False)
data = None
def check():
    global data
    data = data or os.read(r, 100_000)
    return data == b'unread' * 1000
" => "True";

    unix_sockets_with_unread_data: "
a, b = socket.socketpair()
c, d = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
a.send(b'stream')
c.send(b'one'); c.send(b'two')
def check():
    return b.recv(100), d.recv(100), d.recv(100)
" => "(b'stream', b'one', b'two')";

    a_descriptor_on_its_way_in_a_message: "
a, b = socket.socketpair()
with open('/root/sent', 'w') as file:
    file.write('by message')
file = os.open('/root/sent', os.O_RDONLY)
socket.send_fds(a, [b'x'], [file])
os.close(file)
def check():
    data, fds, _, _ = socket.recv_fds(b, 10, 1)
    return data, os.pread(fds[0], 100, 0)
" => "(b'x', b'by message')";

    a_deleted_file_of_ten_megabytes: "
import hashlib
content = os.urandom(10 << 20)
fd = os.open('/root/deleted', os.O_RDWR | os.O_CREAT)
os.write(fd, content)
os.unlink('/root/deleted')
digest, content = hashlib.sha256(content).digest(), None
def check():
    return hashlib.sha256(os.pread(fd, 20 << 20, 0)).digest() == digest
" => "True";

    threads_that_work: "
counts = [0] * 4
def work(n):
    while True:
        counts[n] += 1
        time.sleep(0.001)
for n in range(4):
    threading.Thread(target=work, args=(n,), daemon=True).start()
def check():
    before = list(counts)
    for _ in range(1000):
        time.sleep(0.01)
        if all(now > then for now, then in zip(counts, before)):
            return 'all'
" => "all";

    memory_that_a_parent_and_a_child_share: "
memory = mmap.mmap(-1, 4096)
memory[0:1] = b'0'
child = os.fork()
if child == 0:
    while True:
        if memory[1:2] == b'?':
            memory[0:2] = bytes([memory[0] + 1]) + b'!'
        time.sleep(0.001)
def check():
    memory[0:2] = b'0?'
    for _ in range(1000):
        if memory[1:2] == b'!':
            return memory[0:1]
        time.sleep(0.01)
" => "b'1'";

    a_private_mapping_of_a_file_with_changed_pages: "
with open('/root/mapped', 'wb') as file:
    file.write(b'a' * 8192)
fd = os.open('/root/mapped', os.O_RDONLY)
memory = mmap.mmap(fd, 8192, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
memory[4096:4097] = b'b'
def check():
    return memory[0:1], memory[4096:4098], os.pread(fd, 1, 4096)
" => "(b'a', b'ba', b'a')";

    posix_and_flock_locks: "
import fcntl
one, two = open('/root/one', 'w'), open('/root/two', 'w')
fcntl.lockf(one, fcntl.LOCK_EX)
fcntl.flock(two, fcntl.LOCK_EX)
def taken(name, lock):
    child = os.fork()
    if child == 0:
        try:
            lock(open(name, 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)
            os._exit(0)
        except OSError:
            os._exit(1)
    return os.waitpid(child, 0)[1] != 0
def check():
    return taken('/root/one', fcntl.lockf), taken('/root/two', fcntl.flock)
" => "(True, True)";

    a_zombie_that_nobody_has_waited_for: "
child = os.fork()
if child == 0:
    os._exit(7)
os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
status = None
def check():
    global status
    status = status or os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status
" => "7";

    two_hundred_processes: "
children = []
for n in range(200):
    question, answer = os.pipe(), os.pipe()
    if os.fork() == 0:
        for _, q, a in children:
            os.close(q); os.close(a)
        os.close(question[1]); os.close(answer[0])
        while os.read(question[0], 1):
            os.write(answer[1], bytes([n]))
        os._exit(0)
    os.close(question[0]); os.close(answer[1])
    children.append((n, question[1], answer[0]))
def check():
    for n, question, answer in children:
        os.write(question, b'?')
    return sum(os.read(answer, 1) == bytes([n]) for n, question, answer in children)
" => "200";

    files_in_memory_and_a_fifo: "
os.makedirs('/dev/shm/deep/er')
with open('/dev/shm/deep/er/file', 'w') as file:
    file.write('in memory')
os.mkfifo('/root/fifo')
fifo = os.open('/root/fifo', os.O_RDWR)
os.write(fifo, b'queued')
queued = None
def check():
    global queued
    queued = queued or os.read(fifo, 100)
    return open('/dev/shm/deep/er/file').read(), queued
" => "('in memory', b'queued')";
}

/// A generator in memory goes on where it was, in every fork the same; what the kernel draws is never the same.
#[tokio::test(flavor = "multi_thread")]
async fn two_forks_draw_the_same_from_memory_and_not_the_same_from_the_kernel() {
    let Some(world) = world().await else { return };
    let sandbox = holder(
        &world,
        "
import random
random.seed(os.urandom(32))
def check():
    return random.random(), os.urandom(16).hex()
",
    );
    let artifact = world.checkpoint(&sandbox).await;
    let forks = [world.stopped(), world.stopped()];
    for fork in &forks {
        std::fs::copy(sandbox.root().join("root/holder.py"), fork.root().join("root/holder.py")).unwrap();
    }
    let (one, two) = tokio::join!(world.restore(&forks[0], &artifact), world.restore(&forks[1], &artifact));
    one.unwrap();
    two.unwrap();
    let drawn: Vec<(String, String)> = [&forks[0], &forks[1], &sandbox]
        .iter()
        .map(|sandbox| {
            let answer = check(sandbox);
            let (memory, kernel) = answer.split_once(", ").unwrap_or_else(|| panic!("{answer}"));
            (memory.to_owned(), kernel.to_owned())
        })
        .collect();
    assert!(drawn[0].0 == drawn[1].0 && drawn[1].0 == drawn[2].0, "{drawn:?}");
    assert!(drawn[0].1 != drawn[1].1 && drawn[1].1 != drawn[2].1 && drawn[0].1 != drawn[2].1, "{drawn:?}");
}

/// The time between a dump and its restore did not pass inside: neither for the monotonic clock nor for what was armed
/// by it. The wall clock is the host's.
#[tokio::test(flavor = "multi_thread")]
async fn the_monotonic_clock_stands_still_between_dump_and_restore_and_the_wall_clock_does_not() {
    let Some(world) = world().await else { return };
    let sandbox = holder(
        &world,
        "
fd = libc.timerfd_create(time.CLOCK_MONOTONIC, 0)
libc.timerfd_settime(fd, 0, struct.pack('=4q', 0, 0, 100_000, 0), None)
signal.setitimer(signal.ITIMER_REAL, 100_000)
def check():
    room = ctypes.create_string_buffer(32)
    libc.timerfd_gettime(fd, room)
    left = struct.unpack('=4q', room.raw)[2]
    real = signal.getitimer(signal.ITIMER_REAL)[0]
    now = time.monotonic()
    return round(now + left), round(now + real), round(time.time()), round(time.time() - now)
",
    );
    let numbers = |sandbox: &Sandbox| -> Vec<i64> {
        let answer = check(sandbox);
        let inner = answer.trim_matches(['(', ')']);
        inner.split(", ").map(|n| n.parse().unwrap_or_else(|_| panic!("{answer}"))).collect()
    };
    let before = numbers(&sandbox);
    let artifact = world.checkpoint(&sandbox).await;
    sandbox.kill().unwrap();
    let gap = 4;
    tokio::time::sleep(std::time::Duration::from_secs(gap)).await;
    world.restore(&sandbox, &artifact).await.unwrap();
    let after = numbers(&sandbox);
    let shift = |n: usize| after[n] - before[n];
    let least = i64::try_from(gap).unwrap() - 1;
    assert!(shift(0).abs() <= 1 && shift(1).abs() <= 1, "timers go by the clock inside: {before:?} {after:?}");
    assert!(shift(3) >= least, "that clock stood still: {before:?} {after:?}");
    assert!(shift(2) >= least, "the wall clock went on: {before:?} {after:?}");
}
