//! Shapes of process trees, and what happens to them meanwhile.

use crab_core::{Condition, NoCut};

use crate::support::{background, eventually, get, python, run, set, world};

#[tokio::test(flavor = "multi_thread")]
async fn orphans_and_daemons_keep_their_sessions_and_parents() {
    let Some(world) = world().await else { return };
    let sandbox = world.bare();
    run(&sandbox, "(setsid sh -c 'sleep 2001 & sleep 2002' </dev/null >/dev/null 2>&1 &)");
    run(&sandbox, "sh -c 'sleep 2003 </dev/null >/dev/null 2>&1 &'");
    let shape = || run(&sandbox, "ps -e -o pid=,ppid=,pgid=,sid=,args= | grep '[s]leep 200' | tr -s ' ' | sort");
    eventually("all sleep", || (shape().lines().count() == 4).then_some(()));
    let before = shape();
    let artifact = world.checkpoint(&sandbox).await;
    assert_eq!(shape(), before);
    sandbox.kill().unwrap();
    world.restore(&sandbox, &artifact).await.unwrap();
    assert_eq!(shape(), before);
}

/// Forks for ever, and counts in a file.
const FORKS: &str = "
import os, sys
fd = os.open(f'/root/forked-{sys.argv[1]}', os.O_RDWR | os.O_CREAT)
n = 0
while True:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    n += 1
    os.pwrite(fd, b'%020d' % n, 0)
";

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_that_forks_all_the_time_is_captured_whole() {
    let Some(world) = world().await else { return };
    let sandbox = world.with_server();
    std::fs::write(sandbox.root().join("root/forks.py"), FORKS).unwrap();
    (0..3).for_each(|n| background(&sandbox, &format!("python3 /root/forks.py {n}")));
    let count =
        |n: u32| std::fs::read_to_string(sandbox.root().join(format!("root/forked-{n}"))).ok()?.parse::<u64>().ok();
    let all_fork = || {
        let before: Vec<u64> = (0..3).map(|n| eventually("it forks", || count(n))).collect();
        eventually("all fork on", || (0..3).all(|n| count(n) > Some(before[n as usize])).then_some(()));
    };
    all_fork();
    let mut last = None;
    for round in 0..6_u64 {
        set(&sandbox, round);
        let frozen = round % 2 == 0;
        if frozen {
            sandbox.freeze().unwrap();
        }
        let captured = world.capture_with(&sandbox, frozen, None, &mut NoCut).await.unwrap();
        sandbox.thaw().unwrap();
        last = Some(captured.persist().await.unwrap());
        all_fork();
    }
    sandbox.kill().unwrap();
    world.restore(&sandbox, &last.unwrap()).await.unwrap();
    assert_eq!(get(&sandbox), Some(5));
    all_fork();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_terminal_session_with_a_python_prompt_goes_on() {
    let Some(world) = world().await else { return };
    let sandbox = world.bare();
    run(&sandbox, "tmux new-session -d -s main -x 80 -y 24 </dev/null >/dev/null 2>&1");
    let typed = |text: &str| run(&sandbox, &format!("tmux send-keys -t main '{text}' Enter"));
    let screen = || run(&sandbox, "tmux capture-pane -p -t main");
    typed("python3 -q");
    eventually("the prompt is there", || screen().contains(">>>").then_some(()));
    typed("x = 41");
    typed("print(\"first\", x + 1)");
    eventually("it answers", || screen().contains("first 42").then_some(()));
    // No pipe of the commands that started it is held any more.
    let artifact = world.checkpoint(&sandbox).await;
    typed("x = 0");
    sandbox.kill().unwrap();
    world.restore(&sandbox, &artifact).await.unwrap();
    typed("print(\"second\", x + 2)");
    eventually("it answers after the restore", || screen().contains("second 43").then_some(()));
    assert!(screen().contains("first 42"));
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_lives_each_begin_with_the_newest_number() {
    let Some(world) = world().await else { return };
    let sandbox = world.with_server();
    for life in 1..=10 {
        set(&sandbox, life);
        let artifact = world.checkpoint(&sandbox).await;
        set(&sandbox, 1000 + life);
        sandbox.kill().unwrap();
        world.restore(&sandbox, &artifact).await.unwrap();
        assert_eq!(get(&sandbox), Some(life));
    }
    world.assert_no_captures();
}

#[tokio::test(flavor = "multi_thread")]
async fn two_forks_of_one_image_start_at_once_while_the_original_runs() {
    let Some(world) = world().await else { return };
    let sandbox = world.with_server();
    set(&sandbox, 7);
    let artifact = world.checkpoint(&sandbox).await;
    set(&sandbox, 8);
    let (one, two) = (world.stopped(), world.stopped());
    for fork in [&one, &two] {
        std::fs::copy(sandbox.root().join("root/number.py"), fork.root().join("root/number.py")).unwrap();
    }
    let (first, second) = tokio::join!(world.restore(&one, &artifact), world.restore(&two, &artifact));
    first.unwrap();
    second.unwrap();
    assert_eq!((get(&one), get(&two), get(&sandbox)), (Some(7), Some(7), Some(8)));
    set(&one, 9);
    assert_eq!((get(&one), get(&two), get(&sandbox)), (Some(9), Some(7), Some(8)));
    // A fork is a sandbox like any other.
    let of_fork = world.checkpoint(&one).await;
    one.kill().unwrap();
    assert_eq!((get(&two), get(&sandbox)), (Some(7), Some(8)));
    world.restore(&one, &of_fork).await.unwrap();
    assert_eq!(get(&one), Some(9));
}

/// `tail -f` waits in `poll` without a limit, which a dump ends with `EINTR`; one that looks itself lives on.
#[tokio::test(flavor = "multi_thread")]
async fn a_tail_that_looks_by_itself_survives_captures() {
    let Some(world) = world().await else { return };
    let sandbox = world.bare();
    run(&sandbox, "echo one > /root/log");
    background(&sandbox, "sh -c 'tail ---disable-inotify -s 0.05 -f /root/log > /root/seen'");
    let seen = || std::fs::read_to_string(sandbox.root().join("root/seen")).unwrap_or_default();
    eventually("it has begun", || seen().contains("one").then_some(()));
    for _ in 0..3 {
        world.capture(&sandbox).await.unwrap().discard().await.unwrap();
    }
    let artifact = world.checkpoint(&sandbox).await;
    sandbox.kill().unwrap();
    world.restore(&sandbox, &artifact).await.unwrap();
    run(&sandbox, "echo two >> /root/log");
    eventually("it goes on", || seen().contains("two").then_some(()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_sleeps_and_one_that_waits_for_another_go_on() {
    let Some(world) = world().await else { return };
    let sandbox = world.bare();
    python(
        &sandbox,
        "waits",
        "
import os, time
child = os.fork()
if child == 0:
    while not os.path.exists('/root/go'):
        time.sleep(0.01)
    os._exit(5)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
with open('/root/code.new', 'w') as file:
    file.write(str(code))
os.rename('/root/code.new', '/root/code')
",
    );
    eventually("both run", || (run(&sandbox, "pgrep -c python3") == "2").then_some(()));
    let artifact = world.checkpoint(&sandbox).await;
    sandbox.kill().unwrap();
    assert_eq!(sandbox.condition().unwrap(), Condition::Stopped);
    world.restore(&sandbox, &artifact).await.unwrap();
    run(&sandbox, "touch /root/go");
    let code = || std::fs::read_to_string(sandbox.root().join("root/code")).ok();
    assert_eq!(eventually("it waited", code), "5");
}
