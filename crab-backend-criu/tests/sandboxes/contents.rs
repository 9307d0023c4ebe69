//! What processes hold, and how it comes back.

use std::io::{BufRead, BufReader, Write};
use std::sync::Arc;
use std::time::Duration;

use crab_core::{Advice, Condition, ErrorKind};
use crab_examples::sandbox::Sandbox;

use crate::support::{World, ask, background, eventually, get, python, run, set, world, world_with};

#[tokio::test(flavor = "multi_thread")]
async fn a_listening_socket_answers_after_the_restore() {
    let Some(world) = world().await else { return };
    let sandbox = world.bare();
    std::fs::write(sandbox.root().join("root/index.html"), "it is here").unwrap();
    background(&sandbox, "python3 -m http.server --bind 127.0.0.1 --directory /root 8080");
    let page = || ask(&sandbox, 8080, "GET /index.html HTTP/1.0\r\n\r").filter(|text| text.ends_with("it is here"));
    eventually("the server answers", page);
    let artifact = world.checkpoint(&sandbox).await;
    assert!(page().is_some());
    sandbox.kill().unwrap();
    assert!(page().is_none());
    world.restore(&sandbox, &artifact).await.unwrap();
    assert!(page().is_some());
}

/// Both ends of a connection, in two processes that answer each other for ever.
const PING_PONG: &str = "
import os, socket
server = socket.socket()
server.bind(('127.0.0.1', 7100))
server.listen()
if os.fork() == 0:
    end = socket.create_connection(('127.0.0.1', 7100))
    end.sendall(b'0\\n')
else:
    end, _ = server.accept()
lines = end.makefile('rb')
file = os.open('/root/rally', os.O_RDWR | os.O_CREAT)
while True:
    n = int(lines.readline())
    os.pwrite(file, b'%020d' % n, 0)
    end.sendall(b'%d\\n' % (n + 1))
";

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_inside_the_sandbox_goes_on_after_the_restore() {
    let Some(world) = world().await else { return };
    let sandbox = world.bare();
    python(&sandbox, "rally", PING_PONG);
    let rally = || std::fs::read_to_string(sandbox.root().join("root/rally")).ok()?.parse::<u64>().ok();
    eventually("they play", || rally().filter(|n| *n > 100));
    let artifact = world.checkpoint(&sandbox).await;
    let saved = rally().unwrap();
    eventually("they play on", || rally().filter(|n| *n > saved + 100));
    sandbox.kill().unwrap();
    let stopped = rally().unwrap();
    world.restore(&sandbox, &artifact).await.unwrap();
    // From the saved number, past the one that they had come to.
    eventually("they play after the restore", || rally().filter(|n| *n > stopped + 100));
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_are_refused_where_the_embedder_wants_that() {
    let Some(world) = world_with(|builder| builder.connections(crab_backend_criu::Connections::Refuse)).await else {
        return;
    };
    let sandbox = world.bare();
    python(&sandbox, "rally", PING_PONG);
    eventually("they play", || sandbox.root().join("root/rally").exists().then_some(()));
    let error = world.capture(&sandbox).await.err().expect("it is refused");
    assert_eq!(error.kind(), ErrorKind::NotCheckpointable, "{error}");
    assert_eq!(error.sandbox_condition(), Some(Condition::Running));
    let source = std::error::Error::source(&error).and_then(|e| e.downcast_ref::<crab_backend_criu::CriuFailure>());
    let failure = source.expect("CRIU's own reason");
    assert_eq!(failure.cause(), crab_backend_criu::Cause::Connection, "{failure}");
    assert!(failure.log().expect("the log is kept").starts_with(&world.images));
    assert!(failure.log().unwrap().exists());
    world.assert_no_captures();
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_to_the_host_do_not_hinder_a_restore() {
    let Some(world) = world().await else { return };
    let sandbox = world.with_server();
    set(&sandbox, 8);
    let mut held = sandbox.connect(7000).unwrap();
    held.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let artifact = world.checkpoint(&sandbox).await;
    // The original is not disturbed.
    held.write_all(b"get\n").unwrap();
    let mut line = String::new();
    BufReader::new(&held).read_line(&mut line).unwrap();
    assert_eq!(line, "8\n");
    drop(held);
    sandbox.kill().unwrap();
    world.restore(&sandbox, &artifact).await.unwrap();
    // The server reads from its end of the old connection until that is reset.
    assert_eq!(get(&sandbox), Some(8));
}

/// Answers from a database in the middle of a transaction, with the lock held.
const TRANSACTION: &str = "
import fcntl, socket, sqlite3
db = sqlite3.connect('/root/data.db', isolation_level=None)
db.execute('PRAGMA journal_mode=MODE')
db.execute('CREATE TABLE t (n INTEGER)')
db.execute('INSERT INTO t VALUES (1)')
db.execute('BEGIN IMMEDIATE')
db.execute('INSERT INTO t VALUES (2)')
lock = open('/root/lock', 'w')
fcntl.flock(lock, fcntl.LOCK_EX)
server = socket.socket()
server.bind(('127.0.0.1', 7200))
server.listen()
while True:
    client, _ = server.accept()
    with client:
        if client.makefile().readline().strip() == 'commit':
            db.execute('COMMIT')
        client.sendall(str(db.execute('SELECT sum(n) FROM t').fetchone()[0]).encode())
";

/// What another process of the sandbox sees of the database, and what happens when it writes.
fn intrude(sandbox: &Sandbox) -> String {
    let program = "import sqlite3; d = sqlite3.connect('/root/data.db', timeout=0.1); \
                   print(d.execute('SELECT sum(n) FROM t').fetchone()[0]); d.execute('INSERT INTO t VALUES (9)')";
    sandbox.exec(&format!("python3 -c \"{program}\" 2>&1")).unwrap().text()
}

fn in_transaction(world: &World, mode: &str) -> Arc<Sandbox> {
    let sandbox = world.bare();
    python(&sandbox, "transaction", &TRANSACTION.replace("MODE", mode));
    eventually("the transaction is open", || ask(&sandbox, 7200, "sum").filter(|sum| sum == "3"));
    sandbox
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_in_a_transaction_keeps_it_and_its_locks() {
    let Some(world) = world().await else { return };
    let sandbox = in_transaction(&world, "DELETE");
    let artifact = world.checkpoint(&sandbox).await;
    sandbox.kill().unwrap();
    world.restore(&sandbox, &artifact).await.unwrap();
    assert_eq!(ask(&sandbox, 7200, "sum").as_deref(), Some("3"));
    let text = intrude(&sandbox);
    assert!(text.lines().any(|line| line == "1"), "the row is not committed: {text}");
    assert!(text.contains("locked"), "the write lock is held: {text}");
    assert!(!sandbox.exec("flock -n /root/lock true").unwrap().success(), "the other lock is held");
    assert_eq!(ask(&sandbox, 7200, "commit").as_deref(), Some("3"));
    assert!(intrude(&sandbox).starts_with("3"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_exclusive_lock_that_a_restore_would_lose_is_refused_until_it_is_over() {
    let Some(world) = world().await else { return };
    let sandbox = in_transaction(&world, "WAL");
    let error = world.capture(&sandbox).await.err().expect("it is refused");
    assert_eq!(error.kind(), ErrorKind::NotCheckpointable, "{error}");
    assert_eq!(error.advice(), Advice::Retry);
    assert!(error.to_string().contains("/root/data.db-shm"), "{error}");
    assert_eq!(sandbox.condition().unwrap(), Condition::Running);
    assert_eq!(ask(&sandbox, 7200, "commit").as_deref(), Some("3"));
    let artifact = world.checkpoint(&sandbox).await;
    sandbox.kill().unwrap();
    world.restore(&sandbox, &artifact).await.unwrap();
    assert_eq!(ask(&sandbox, 7200, "sum").as_deref(), Some("3"));
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_file_systems_and_deleted_files_come_back() {
    let Some(world) = world().await else { return };
    let sandbox = world.with_server();
    run(&sandbox, "echo in memory > /dev/shm/note");
    background(&sandbox, "bash -c 'exec 7<>/root/gone; echo still here >&7; rm /root/gone; exec sleep 1000'");
    eventually("the file is deleted", || {
        sandbox
            .exec("pgrep -x sleep")
            .unwrap()
            .success()
            .then(|| !sandbox.root().join("root/gone").exists())?
            .then_some(())
    });
    let artifact = world.checkpoint(&sandbox).await;
    sandbox.kill().unwrap();
    world.restore(&sandbox, &artifact).await.unwrap();
    assert_eq!(run(&sandbox, "cat /dev/shm/note"), "in memory");
    assert_eq!(run(&sandbox, "cat /proc/$(pgrep -x sleep)/fd/7"), "still here");
}
