//! The inspector with BPF, on a real btrfs, real cgroups and real processes.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::fs;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

use common::{Bench, Live, able, assert_changed, assert_unchanged, has, shell};
use crab_core::{Change, Evidence, StateDelta, Unknown, keep_house};
use crab_inspector::{Inspector, ProcessRule};

fn bench_with(make: impl FnOnce() -> Inspector) -> Option<Bench<Inspector>> {
    if !able(&["mkfs.btrfs", "btrfs", "python3"]) {
        return None;
    }
    let probe = Inspector::probe();
    if !probe.works() {
        println!("skipped: BPF\n{probe}");
        return None;
    }
    Some(Bench::new(make()))
}

fn bench() -> Option<Bench<Inspector>> {
    bench_with(|| Inspector::load().unwrap())
}

/// A process in the sandbox that runs Python, says "ready", and then does as its program says.
fn python(bench: &Bench<Inspector>, program: &str) -> Live {
    let path = bench.image.path.join(format!("program-{}.py", fs::read_dir(&bench.image.path).unwrap().count()));
    fs::write(&path, program).unwrap();
    let line = format!("exec python3 -u {}", path.display());
    let mut live = Live::start(bench.cgroup.command(&line), &bench.root);
    assert_eq!(live.hear(), "ready");
    // Its start lies in another clock tick than the version that follows, and it waits.
    sleep(Duration::from_millis(30));
    live
}

const WAITS: &str = "print('ready'); import sys\nfor line in sys.stdin: print('heard ' + line.strip())\n";

#[track_caller]
fn assert_clean(bench: &Bench<Inspector>, what: &str) {
    let delta = bench.take();
    assert!(delta.is_clean(), "{what}: files {}, processes {}", delta.filesystem, delta.process);
}

#[test]
fn probing_says_what_there_is() {
    if !able(&[]) {
        return;
    }
    let probe = Inspector::probe();
    println!("{probe}");
    for what in ["soft-dirty pages", "CAP_BPF", "changes to btrfs", "changes to ext4", "cgroup v2"] {
        assert!(probe.checks.iter().any(|check| check.what == what), "{what}");
    }
    let works = probe.checks.iter().any(|check| check.what == "soft-dirty pages" && check.works);
    if std::env::var_os("CRAB_IN_VM").is_some() {
        assert!(works, "the kernel there marks pages");
    } else if let Ok(config) = std::process::Command::new("zcat").arg("/proc/config.gz").output()
        && config.status.success()
    {
        let built_in = String::from_utf8_lossy(&config.stdout).contains("CONFIG_MEM_SOFT_DIRTY=y");
        assert_eq!(works, built_in);
    }
}

#[test]
fn bpf_and_perfmon_are_rights_enough() {
    if !able(&["setpriv"]) || !Inspector::probe().works() {
        return;
    }
    let output = std::process::Command::new("setpriv")
        .args(["--bounding-set", "-all,+bpf,+perfmon", "--inh-caps", "-all"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "--ignored", "loading_with_the_rights_there_are"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
#[ignore = "run by another test, with fewer rights"]
fn loading_with_the_rights_there_are() {
    let rights = fs::read_to_string("/proc/self/status").unwrap();
    let held = rights.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    assert_eq!(u64::from_str_radix(held.trim(), 16).unwrap(), 1 << 38 | 1 << 39);
    Inspector::load().unwrap();
}

#[test]
fn a_process_that_waits_is_unchanged_after_the_freeze_of_its_version() {
    let Some(mut bench) = bench() else { return };
    let mut live = python(&bench, WAITS);
    bench.version();
    for _ in 0..5 {
        assert_clean(&bench, "it waits");
        sleep(Duration::from_millis(20));
    }
    // Frozen and thawed for another reason.
    bench.cgroup.freeze(true);
    assert_clean(&bench, "frozen");
    bench.cgroup.freeze(false);
    assert_clean(&bench, "thawed");
    live.say("x");
    assert_eq!(live.hear(), "heard x");
    assert!(matches!(bench.take().process, Change::Changed(Evidence::TaskRan(_))));
    bench.version();
    assert_clean(&bench, "a new version");
}

#[test]
fn tools_that_come_and_go_change_files_alone() {
    let Some(mut bench) = bench() else { return };
    let _live = python(&bench, WAITS);
    bench.sh("mkdir d; echo one > d/a");
    bench.version();
    bench.sh(
        "cat d/a; ls -l; find . | sort | head -1; python3 -c 'import json, subprocess; subprocess.run([\"true\"])'",
    );
    assert_clean(&bench, "reading");
    bench.sh("echo x > x; rm x; echo one > d/a");
    assert_clean(&bench, "nothing in the end");
    bench.sh("echo two > d/a; echo x > x");
    let delta = bench.take();
    assert_changed(&delta.filesystem, "written");
    assert_unchanged(&delta.process, "nobody stayed");
    bench.files_version();
    assert_clean(&bench, "a version of the files");
}

#[test]
fn an_idle_server_is_unchanged() {
    let Some(mut bench) = bench() else { return };
    let _poll =
        python(&bench, "print('ready'); import select, sys\nwhile True: select.select([sys.stdin], [], [], 0.02)\n");
    let _sleep = python(&bench, "print('ready'); import time\nwhile True: time.sleep(0.03)\n");
    for _ in 0..20 {
        bench.version();
        sleep(Duration::from_millis(60));
        assert_clean(&bench, "they only waited");
    }
}

#[test]
fn a_strict_rule_takes_no_excuse() {
    let Some(mut bench) = bench_with(|| Inspector::builder().process_rule(ProcessRule::Strict).load().unwrap()) else {
        return;
    };
    let _poll = python(&bench, "print('ready'); import time\nwhile True: time.sleep(0.02)\n");
    bench.version();
    sleep(Duration::from_millis(60));
    assert_changed(&bench.take().process, "it ran");
}

#[test]
fn a_busy_loop_without_system_calls_is_seen() {
    let Some(mut bench) = bench() else { return };
    let _busy = python(&bench, "print('ready')\nwhile True: pass\n");
    bench.version();
    sleep(Duration::from_millis(400));
    assert_changed(&bench.take().process, "busy");
}

#[test]
fn threads_and_processes_that_come_and_stay_or_go_are_seen() {
    let Some(mut bench) = bench() else { return };
    bench.version();
    assert_clean(&bench, "nothing lives");
    let live = python(&bench, WAITS);
    assert!(matches!(bench.take().process, Change::Changed(Evidence::NewTask(_))));
    bench.version();
    assert_clean(&bench, "it waits");
    drop(live);
    assert_changed(&bench.take().process, "it is gone");
    bench.version();
    assert_clean(&bench, "nothing lives again");
    // In a child cgroup.
    let child = bench.cgroup.path.join("child");
    fs::create_dir(&child).unwrap();
    let mut live = python(&bench, WAITS);
    fs::write(child.join("cgroup.procs"), live.child.id().to_string()).unwrap();
    bench.version();
    assert_clean(&bench, "in a child cgroup");
    live.say("x");
    live.hear();
    assert_changed(&bench.take().process, "it ran in a child cgroup");
}

#[test]
fn a_process_that_is_moved_in_is_seen() {
    let Some(mut bench) = bench() else { return };
    let mut command = std::process::Command::new("cat");
    command.arg("-");
    let live = Live::start(command, &bench.root);
    bench.version();
    sleep(Duration::from_millis(30));
    fs::write(bench.cgroup.path.join("cgroup.procs"), live.child.id().to_string()).unwrap();
    assert_changed(&bench.take().process, "moved in, asleep");
}

#[test]
fn signals_are_seen() {
    let Some(mut bench) = bench() else { return };
    let handler = "import signal\nsignal.signal(signal.SIGUSR1, lambda *a: None)\n";
    let live = python(&bench, &format!("{handler}{WAITS}"));
    let pid = live.child.id();
    for signal in ["USR1", "STOP", "CONT"] {
        bench.version();
        assert_clean(&bench, "before the signal");
        shell(&bench.root, &format!("kill -{signal} {pid}"));
        sleep(Duration::from_millis(20));
        assert_changed(&bench.take().process, signal);
    }
}

#[test]
fn a_write_that_is_read_in_part_is_seen_before_it_returns() {
    use std::io::Read as _;
    let Some(mut bench) = bench() else { return };
    let mut live = python(&bench, "import os\nprint('ready')\nwhile True: os.write(1, b'x' * 100000000)\n");
    bench.version();
    for _ in 0..5 {
        let output = live.child.stdout.as_mut().unwrap();
        let full = |output: &_| rustix::io::ioctl_fionread(output).unwrap() >= 65536;
        common::wait("the pipe to be full", || full(output));
        sleep(Duration::from_millis(20));
        // Not frozen, so that the write goes on to wait.
        let token = bench.take().token;
        bench.rebase(token, false, true, None);
        let mut part = vec![0; 10 * 4096];
        output.read_exact(&mut part).unwrap();
        common::wait("the pipe to be full again", || full(output));
        assert_changed(&bench.take().process, "a part of what it writes was read");
    }
}

/// What a tool that is gone does to a process that stayed, without waking it.
const BEHIND: &[(&str, &str)] = &[
    (
        "process_vm_writev",
        "import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
class iov(ctypes.Structure): _fields_ = [('base', ctypes.c_void_p), ('len', ctypes.c_size_t)]
pid = PID
for line in open(f'/proc/{pid}/maps'):
    if '[heap]' in line: at = int(line.split('-')[0], 16) + 65536; break
buffer = ctypes.create_string_buffer(b'x')
local = iov(ctypes.addressof(buffer), 1); remote = iov(at, 1)
assert libc.process_vm_writev(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) == 1",
    ),
    (
        "/proc/PID/mem",
        "at = [int(l.split('-')[0], 16) for l in open('/proc/PID/maps') if '[heap]' in l][0]
f = open('/proc/PID/mem', 'r+b', buffering=0); f.seek(at + 65536); f.write(b'x')",
    ),
    ("prlimit", "import resource; resource.prlimit(PID, resource.RLIMIT_CORE, (0, 0))"),
    ("affinity", "import os; os.sched_setaffinity(PID, {0})"),
    ("priority", "import os; os.setpriority(os.PRIO_PROCESS, PID, 5)"),
    ("oom score", "open('/proc/PID/oom_score_adj', 'w').write('7')"),
    ("a fifo it holds", "import os; os.write(os.open('fifo', os.O_WRONLY), b'x')"),
    ("its backlog", "import socket; socket.create_connection(('127.0.0.1', int(open('port').read())))"),
    ("its unix socket", "import socket; s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); s.sendto(b'x', 'unix')"),
    (
        "its udp socket",
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.sendto(b'x', ('127.0.0.1', int(open('udp').read())))",
    ),
    (
        "SysV shared memory",
        "import ctypes; l = ctypes.CDLL(None); i = l.shmget(0, 4096, 0o1600); assert i >= 0; l.shmctl(i, 0, 0)",
    ),
    (
        "POSIX queue",
        "import ctypes; l = ctypes.CDLL(None); assert l.mq_open(b'/crab', 0o102, 0o600, 0) >= 0; l.mq_unlink(b'/crab')",
    ),
    ("key ring", "import ctypes; assert ctypes.CDLL(None).syscall(248, b'user', b'crab', b'x', 1, -3) >= 0"),
];

#[test]
fn what_is_done_behind_a_process_is_seen() {
    let Some(mut bench) = bench() else { return };
    let live = python(&bench, "import os, socket, time
os.mkfifo('fifo'); f = os.open('fifo', os.O_RDWR)
s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); open('port', 'w').write(str(s.getsockname()[1]))
d = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); d.bind(('127.0.0.1', 0)); open('udp', 'w').write(str(d.getsockname()[1]))
u = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); u.bind('unix')
heap = bytearray(100000)
print('ready')
while True: time.sleep(1000)
");
    let pid = live.child.id().to_string();
    for (name, program) in BEHIND {
        bench.version();
        assert_clean(&bench, name);
        let path = bench.image.path.join("tool.py");
        fs::write(&path, program.replace("PID", &pid)).unwrap();
        bench.sh(&format!("python3 {}", path.display()));
        let delta = bench.take();
        println!("{name}: {}", delta.process);
        assert_changed(&delta.process, name);
    }
}

#[test]
fn stores_to_shared_memory_are_not_trusted() {
    let Some(mut bench) = bench() else { return };
    let _live = python(
        &bench,
        "import mmap, time
m = mmap.mmap(-1, 4096)
print('ready')
while True: m[0] = (m[0] + 1) % 256; time.sleep(0.02)
",
    );
    bench.version();
    sleep(Duration::from_millis(60));
    let Change::Changed(Evidence::TaskRan(why)) = bench.take().process else {
        panic!("a store was missed");
    };
    assert!(why.contains("can write"), "{why}");
}

#[test]
fn a_store_to_a_mapped_file_changes_the_files() {
    let Some(mut bench) = bench() else { return };
    bench.sh("head -c 8192 /dev/zero > mapped; sync");
    let _live = python(
        &bench,
        "import mmap, time
f = open('mapped', 'r+b'); m = mmap.mmap(f.fileno(), 0); m[0] = 1
print('ready')
while True: m[0] = (m[0] + 1) % 256; time.sleep(0.02)
",
    );
    bench.version();
    sleep(Duration::from_millis(60));
    let delta = bench.take();
    assert_changed(&delta.filesystem, "a store");
    assert_changed(&delta.process, "a store");
}

#[test]
fn files_that_a_process_holds_change_it_too() {
    let Some(mut bench) = bench() else { return };
    bench.sh("mkdir -p d/e; echo x > d/e/open; echo y > other; cp /bin/true mapped; mkdir here");
    let _live = python(
        &bench,
        "import mmap, os, time
f = open('d/e/open'); g = open('mapped', 'rb'); m = mmap.mmap(g.fileno(), 0, prot=mmap.PROT_READ); g.close()
os.chdir('here')
print('ready'); time.sleep(1000)
",
    );
    for (name, line, crosses) in [
        ("another file", "echo z > other", false),
        ("the open file", "echo z >> d/e/open", true),
        ("the mapped file", "chmod 700 mapped", true),
        ("a file beside it", "echo z > d/e/beside", false),
        ("its folder is renamed", "mv d c", true),
        ("its working folder is renamed", "mv here there", true),
        ("it is removed", "rm c/e/open", true),
    ] {
        bench.version();
        let delta = bench.take();
        if !crosses {
            assert!(delta.is_clean(), "{name}: {delta:?}");
        }
        bench.sh(line);
        let delta = bench.take();
        assert_changed(&delta.filesystem, name);
        if crosses {
            assert!(matches!(delta.process, Change::Changed(Evidence::Crossing(_))), "{name}: {}", delta.process);
        } else {
            assert_unchanged(&delta.process, name);
        }
    }
}

/// How often the file system that holds the sandbox has written out what everybody changed. Linux tells since 6.1.
fn commits(bench: &Bench<Inspector>) -> u64 {
    let of = common::run("findmnt", &[&"-n", &"-o", &"UUID", &bench.image.path]);
    let stats = fs::read_to_string(format!("/sys/fs/btrfs/{}/commit_stats", of.trim())).unwrap();
    stats.lines().find_map(|line| line.strip_prefix("commits ")).unwrap().trim().parse().unwrap()
}

#[test]
fn files_that_were_looked_at_are_not_looked_at_again_until_they_are_touched() {
    let Some(mut bench) = bench() else { return };
    bench.sh("echo x > open; echo y > other");
    let _live = python(&bench, "import time\nf = open('open')\nprint('ready'); time.sleep(1000)\n");
    bench.version();
    for (name, line, changes) in [("a change", "echo z > other", true), ("none", "echo x > x; rm x", false)] {
        bench.sh(line);
        let first = bench.take();
        assert_eq!(first.filesystem.needs_checkpoint(), changes, "{name}: {}", first.filesystem);
        let before = commits(&bench);
        for frozen in [false, true].repeat(10) {
            bench.cgroup.freeze(frozen);
            // A look would have to write this out.
            keep_house(|| fs::write(bench.image.path.join("beside"), name)).unwrap();
            let again = bench.take();
            assert_eq!((&again.filesystem, &again.process), (&first.filesystem, &first.process), "{name}");
        }
        bench.cgroup.freeze(false);
        // Some the kernel makes by itself.
        let made = commits(&bench) - before;
        assert!(made < 5, "{name}: {made} commits for looks at what was known");
        bench.version();
    }
    bench.sh("echo z > third");
    assert_unchanged(&bench.take().process, "no process holds the file");
    bench.sh("echo w > open");
    let delta = bench.take();
    assert!(matches!(delta.process, Change::Changed(Evidence::Crossing(_))), "{}", delta.process);
    bench.sh("rm third; echo x > open");
    let token = bench.take().token;
    let tree = bench.snapshot();
    bench.sh("echo v > other");
    bench.take();
    bench.rebase(token, true, false, Some(tree));
    assert_changed(&bench.take().filesystem, "a version does not hold what came after its take");
}

#[test]
fn tmpfs_belongs_to_the_processes() {
    let Some(mut bench) = bench() else { return };
    if !has("unshare") || !has("nsenter") {
        println!("skipped: util-linux");
        return;
    }
    bench.sh("mkdir tmp");
    // Without the host's own tmpfs, some of which may be hidden below others.
    let line = "exec unshare -m sh -c 'cut -d\" \" -f5,7- /proc/self/mountinfo | grep -- \"- tmpfs\" | cut -d\" \" -f1 \\
        | sort -r | xargs -n1 umount -l; mount -t tmpfs none tmp; echo one > tmp/a; echo ready; exec sleep 1000'";
    let mut live = Live::start(bench.cgroup.command(line), &bench.root);
    assert_eq!(live.hear(), "ready");
    sleep(Duration::from_millis(50));
    let pid = live.child.id();
    let inside = |bench: &Bench<Inspector>, line: &str| {
        bench.sh(&format!("nsenter -t {pid} -m sh -ec 'cd {}; {line}'", bench.root.display()));
    };
    bench.version();
    let delta = bench.take();
    // The host's file systems are writable in this namespace.
    assert!(matches!(delta.filesystem, Change::Unknown(Unknown::Unobservable(_))), "{}", delta.filesystem);
    assert_unchanged(&delta.process, "at rest");
    inside(&bench, "cat tmp/a");
    inside(&bench, "echo x > tmp/x; rm tmp/x");
    assert_unchanged(&bench.take().process, "nothing in the end");
    for line in ["echo x > tmp/x", "chmod 600 tmp/a", "mkdir tmp/d", "rm tmp/a", "touch -d 2001-01-01 tmp/x"] {
        inside(&bench, line);
        assert_changed(&bench.take().process, line);
        bench.version();
        assert_unchanged(&bench.take().process, line);
    }
    inside(&bench, "mount -t tmpfs none tmp/d");
    assert_changed(&bench.take().process, "a mount");
}

fn compile(bench: &Bench<Inspector>, name: &str, source: &str) -> Option<PathBuf> {
    if !has("cc") {
        println!("skipped: cc");
        return None;
    }
    let path = bench.image.path.join(format!("{name}.c"));
    fs::write(&path, source).unwrap();
    shell(&bench.image.path, &format!("cc -O1 -w -o {name} {name}.c"));
    Some(bench.image.path.join(name))
}

#[test]
fn an_init_that_collects_orphans_is_unchanged() {
    let Some(mut bench) = bench() else { return };
    let source = r#"
        #include <signal.h>
        #include <stdio.h>
        #include <sys/wait.h>
        int main(void) {
            sigset_t all, child;
            sigfillset(&all); sigprocmask(SIG_SETMASK, &all, NULL);
            sigemptyset(&child); sigaddset(&child, SIGCHLD);
            puts("ready"); fflush(stdout);
            for (;;) { while (waitpid(-1, NULL, WNOHANG) > 0); sigwaitinfo(&child, NULL); }
        }"#;
    let Some(init) = compile(&bench, "init", source) else { return };
    let line = format!("exec unshare -fp {}", init.display());
    let mut live = Live::start(bench.cgroup.command(&line), &bench.root);
    assert_eq!(live.hear(), "ready");
    sleep(Duration::from_millis(30));
    let init = fs::read_to_string(format!("/proc/{0}/task/{0}/status", live.child.id())).unwrap();
    assert!(init.contains("unshare"));
    bench.version();
    assert_clean(&bench, "at rest");
    let inside = bench.cgroup.path.join("cgroup.procs");
    let init = fs::read_to_string(inside).unwrap().lines().last().unwrap().to_owned();
    // An orphan: its parent ends first, and init collects it.
    bench.sh(&format!("nsenter -t {init} -p sh -c '(sleep 0.05 &) ; true'"));
    sleep(Duration::from_millis(200));
    assert_clean(&bench, "an orphan was collected");
}

#[test]
#[cfg(target_arch = "x86_64")]
fn a_call_by_32_bit_numbers_is_unknown() {
    let Some(mut bench) = bench() else { return };
    let source = r#"int main(void) { long r; __asm__ volatile("int $0x80" : "=a"(r) : "a"(20)); return r <= 0; }"#;
    let Some(tool) = compile(&bench, "old", source) else { return };
    bench.version();
    let _live = python(&bench, WAITS);
    bench.version();
    assert_clean(&bench, "at rest");
    bench.sh(&tool.display().to_string());
    assert!(matches!(bench.take().process, Change::Unknown(Unknown::Unobservable(_))));
}

#[test]
fn takes_before_a_rebase_lose_nothing() {
    let Some(mut bench) = bench() else { return };
    let mut live = python(&bench, WAITS);
    bench.version();
    live.say("x");
    live.hear();
    for _ in 0..20 {
        assert_changed(&bench.take().process, "it ran once");
    }
    sleep(Duration::from_millis(20));
    let before = bench.take().token;
    live.say("y");
    live.hear();
    sleep(Duration::from_millis(20));
    let after = bench.take().token;
    let tree = bench.snapshot();
    bench.rebase(before, true, true, Some(tree.clone()));
    assert_changed(&bench.take().process, "it ran after the token");
    bench.rebase(after, true, true, Some(tree));
    assert_clean(&bench, "all of it is in the version");
}

#[test]
fn what_leaves_the_sandbox_is_told() {
    let Some(mut bench) = bench() else { return };
    bench.version();
    assert_eq!(bench.take().effects.sent, Some(false));
    bench.sh("python3 -c 'import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect((\"127.0.0.1\", 9)); s.send(b\"x\")'");
    assert_eq!(bench.take().effects.sent, Some(false));
    bench.sh("python3 -c 'import socket; s = socket.socket(); s.setblocking(False); s.connect_ex((\"192.0.2.7\", 9))'");
    let effects = bench.take().effects;
    println!("{effects:?}");
    assert_eq!(effects.sent, Some(true));
    assert!(effects.destinations.contains(&"192.0.2.7:9".parse().unwrap()));
}

#[test]
fn what_goes_to_the_coordinator_leaves_nothing_outside() {
    let own = "192.0.2.7:9".parse().unwrap();
    let Some(mut bench) = bench_with(|| Inspector::builder().coordinator(own).load().unwrap()) else { return };
    bench.version();
    let connect = |bench: &Bench<Inspector>, port: u16| {
        bench.sh(&format!(
            "python3 -c 'import socket; s = socket.socket(); s.setblocking(False); s.connect_ex((\"192.0.2.7\", {port}))'"
        ));
    };
    connect(&bench, 9);
    assert_eq!(bench.take().effects.sent, Some(false), "the coordinator's own address");
    connect(&bench, 10);
    let effects = bench.take().effects;
    assert_eq!((effects.sent, effects.destinations), (Some(true), vec!["192.0.2.7:10".parse().unwrap()]));
}

#[test]
fn a_storm_in_one_sandbox_neither_hides_nor_feigns_a_change_of_another() {
    let Some(bench) = bench() else { return };
    let root = bench.image.path.join("neighbour");
    common::run("btrfs", &[&"-q", &"subvolume", &"create", &root]);
    let cgroup = common::Cgroup::new();
    let neighbour = crab_core::Sandbox::new("neighbour".parse().unwrap(), &root, &cgroup.path);
    common::block_on(bench.inspector.attach(&neighbour)).unwrap();
    let take = || common::block_on(bench.inspector.take(&neighbour.id));
    let token = take().token;
    let tree = bench.image.path.join("neighbour-1");
    common::run("btrfs", &[&"-q", &"subvolume", &"snapshot", &"-r", &root, &tree]);
    let base = crab_core::Rebase { token, filesystem: true, process: true, tree: Some(tree) };
    common::block_on(bench.inspector.rebase(&neighbour.id, &base));
    let storm = "mkdir s; cd s; for i in $(seq 3000); do : > $(printf 'f%d\\377' $i); done; cd ..; rm -r s";
    for round in 0..3 {
        bench.sh(storm);
        assert!(take().is_clean(), "round {round}: {:?}", take());
    }
    std::thread::scope(|scope| {
        let noise = scope.spawn(|| bench.sh(storm));
        cgroup.run(&root, "echo x > x");
        assert_changed(&take().filesystem, "a write amid the storm");
        noise.join().unwrap();
    });
    assert_changed(&take().filesystem, "and after it");
}

/// Pins that go when dropped, also when a test fails.
struct Pins {
    folder: PathBuf,
    state: tempfile::TempDir,
}

impl Pins {
    fn inspector(&self) -> Inspector {
        Inspector::builder().pinned(&self.folder, self.state.path()).load().unwrap()
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        let _ = Inspector::unpin(&self.folder);
    }
}

#[test]
fn a_restarted_host_process_keeps_its_evidence_where_it_is_pinned() {
    if !fs::read_to_string("/proc/self/mountinfo").unwrap().contains(" /sys/fs/bpf ") {
        println!("skipped: bpffs at /sys/fs/bpf");
        return;
    }
    let folder = PathBuf::from(format!("/sys/fs/bpf/crab-inspector-{}", std::process::id()));
    let pins = Pins { folder, state: tempfile::tempdir().unwrap() };
    let Some(mut bench) = bench_with(|| pins.inspector()) else { return };
    let mut live = python(&bench, WAITS);
    bench.version();
    assert_clean(&bench, "before the restart");
    // The inspector goes, and with it all that it knew by itself.
    let restart = |bench: &mut Bench<Inspector>, meanwhile: &mut dyn FnMut(&Bench<Inspector>)| {
        bench.inspector = Inspector::builder().load().unwrap();
        meanwhile(bench);
        bench.inspector = pins.inspector();
        common::block_on(bench.inspector.attach(&bench.sandbox)).unwrap();
    };
    restart(&mut bench, &mut |_| {});
    assert_clean(&bench, "nothing happened meanwhile");
    restart(&mut bench, &mut |bench| drop(bench.sh("echo x > x")));
    let delta = bench.take();
    assert_changed(&delta.filesystem, "a file was written meanwhile");
    assert_unchanged(&delta.process, "nobody stayed");
    bench.version();
    restart(&mut bench, &mut |_| {
        live.say("x");
        live.hear();
    });
    let delta = bench.take();
    assert_unchanged(&delta.filesystem, "no file was written");
    assert!(matches!(delta.process, Change::Changed(Evidence::TaskRan(_))), "{}", delta.process);
    // More intervals than the maps hold.
    bench.version();
    for _ in 0..10 {
        bench.take();
    }
    restart(&mut bench, &mut |_| {});
    assert_eq!(bench.take().process, Change::Unknown(Unknown::NoBase));
    // Pins that are removed stop nothing before this inspector ends.
    bench.version();
    assert_clean(&bench, "before the pins go");
    Inspector::unpin(&pins.folder).unwrap();
    live.say("x");
    live.hear();
    assert!(matches!(bench.take().process, Change::Changed(Evidence::TaskRan(_))));
    restart(&mut bench, &mut |_| {});
    assert_eq!(bench.take().process, Change::Unknown(Unknown::NoBase));
    // Who detaches gives it up, and who attaches twice begins anew.
    bench.version();
    common::block_on(bench.inspector.attach(&bench.sandbox)).unwrap();
    assert_eq!(bench.take().process, Change::Unknown(Unknown::NoBase));
    bench.version();
    common::block_on(bench.inspector.detach(&bench.sandbox.id));
    restart(&mut bench, &mut |_| {});
    assert_eq!(bench.take().process, Change::Unknown(Unknown::NoBase));
}

#[test]
fn tools_that_leave_nothing_behind_are_unchanged_however_often_they_run() {
    let Some(mut bench) = bench() else { return };
    let _live = python(&bench, WAITS);
    bench.version();
    for tool in ["true", "ls -lR >/dev/null", "echo x > x; rm x"] {
        for round in 0..60 {
            bench.sh(tool);
            let delta = bench.take();
            assert!(delta.is_clean(), "{tool}, {round}: {delta:?}");
        }
    }
}

/// Set CRAB_CRIU to try with a CRIU that is not in the path.
#[test]
fn a_dump_is_not_the_sandboxes_doing() {
    let Some(mut bench) = bench() else { return };
    let criu = std::env::var("CRAB_CRIU").unwrap_or_else(|_| "criu".to_owned());
    if !has(&criu) || !has("setsid") {
        println!("skipped: criu");
        return;
    }
    let program = bench.image.path.join("server.py");
    fs::write(
        &program,
        "import select, socket, threading, time
threading.Thread(target=time.sleep, args=(1000,)).start()
s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()
e = select.epoll(); e.register(s, select.EPOLLIN)
open('up', 'w').close()
while True: e.poll(0.05 if e.fileno() % 2 else 1000)
",
    )
    .unwrap();
    bench.sh(&format!("setsid python3 {} </dev/null >/dev/null 2>&1 &", program.display()));
    common::wait("the server to be up", || bench.root.join("up").exists());
    sleep(Duration::from_millis(100));
    let processes = fs::read_to_string(bench.cgroup.path.join("cgroup.procs")).unwrap();
    let images = bench.image.path.join("images");
    fs::create_dir(&images).unwrap();
    bench.cgroup.freeze(true);
    let before = bench.take().token;
    let tree = bench.snapshot();
    shell(
        &images,
        &format!(
            "{criu} dump -t {} -D {} -R -v1 -o dump.log --manage-cgroups=ignore --network-lock skip --file-locks \
             --freeze-cgroup {}",
            processes.trim(),
            images.display(),
            bench.cgroup.path.display()
        ),
    );
    let after = bench.take().token;
    bench.cgroup.freeze(false);
    bench.rebase(before, true, true, Some(tree.clone()));
    println!("from before the dump: {}", bench.take().process);
    bench.rebase(after, true, true, Some(tree));
    for _ in 0..3 {
        sleep(Duration::from_millis(100));
        assert_clean(&bench, "from after the dump");
    }
}

/// A kernel need not report every switch: what it hides must not hide that a process of the version ran. It stores to
/// memory that the test sees too, between two waits that are harmless.
#[test]
fn a_process_that_ran_is_seen_at_once_though_its_switch_was_not_told() {
    let Some(mut bench) = bench() else { return };
    let source = r#"
        #include <fcntl.h>
        #include <stdio.h>
        #include <sys/mman.h>
        #include <time.h>
        int main(int count, char **words) {
            volatile unsigned long *seen = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, open(words[1], O_RDWR), 0);
            struct timespec nap = {0, 700000}, from, now;
            puts("ready"); fflush(stdout);
            for (;;) {
                nanosleep(&nap, NULL);
                clock_gettime(CLOCK_MONOTONIC, &from);
                do { ++*seen; clock_gettime(CLOCK_MONOTONIC, &now); }
                while ((now.tv_sec - from.tv_sec) * 1000000000 + now.tv_nsec - from.tv_nsec < 700000);
            }
        }"#;
    let Some(tool) = compile(&bench, "spinner", source) else { return };
    let shared = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
    shared.as_file().set_len(4096).unwrap();
    let line = format!("exec {} {}", tool.display(), shared.path().display());
    let mut live = Live::start(bench.cgroup.command(&line), &bench.root);
    assert_eq!(live.hear(), "ready");
    sleep(Duration::from_millis(30));
    bench.version();
    let stores = || {
        let mut bytes = [0; 8];
        std::os::unix::fs::FileExt::read_exact_at(shared.as_file(), &mut bytes, 0).unwrap();
        u64::from_ne_bytes(bytes)
    };
    let (mut ran, mut rested) = (0, 0);
    let rounds = std::env::var("CRAB_TEST_ROUNDS").map_or(1500, |rounds| rounds.parse().unwrap());
    for round in 0..rounds {
        let token = bench.take().token;
        bench.rebase(token, false, true, None);
        let before = stores();
        if round % 3 == 0 {
            std::thread::yield_now();
        } else {
            sleep(Duration::from_micros(round % 7 * 150));
        }
        let after = stores();
        let delta = bench.take();
        if before == after {
            rested += 1;
            continue;
        }
        ran += 1;
        assert_changed(&delta.process, &format!("round {round}: it stored {} times", after - before));
    }
    println!("it ran in {ran} rounds and rested in {rested}");
}
