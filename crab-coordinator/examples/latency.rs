//! What the coordinator adds to an 8 KiB POST over loopback: direct, passed through, and as a turn with an open gate,
//! one after the other in each round so that the machine's moods hit all alike. Most of it is waking threads on other
//! processors; `taskset -c 1` in front shows the work alone.
//!
//! ```text
//! cargo run --release -p crab-coordinator --example latency -- [ROUNDS] [JOURNAL]
//! ```

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Instant;

use crab_coordinator::{Coordinator, Listen, resolve::one_sandbox};
use crab_core::{TurnBoundary, Verdict, VersionId};

/// A server that reads 8 KiB and answers, on threads of its own.
fn model() -> std::io::Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || serve(stream));
        }
    });
    Ok(address)
}

fn serve(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let (mut have, mut head) = (0, None);
        while head.is_none_or(|head: usize| have < head + 8192) {
            match stream.read(&mut buffer[have..])? {
                0 => return Ok(()),
                n => have += n,
            }
            head = head.or_else(|| buffer[..have].windows(4).position(|end| end == b"\r\n\r\n").map(|at| at + 4));
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")?;
    }
}

struct Client(TcpStream);

impl Client {
    fn connect(address: SocketAddr) -> std::io::Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        Ok(Self(stream))
    }

    /// Microseconds until the answer is here.
    fn ask(&mut self, path: &str, round: usize) -> std::io::Result<f64> {
        let mut body = format!("{{\"messages\":[\"{round:012}\"],\"text\":\"");
        body.extend(std::iter::repeat_n('x', 8192 - body.len() - 2));
        body.push_str("\"}");
        let raw = format!("POST {path} HTTP/1.1\r\nhost: h\r\ncontent-length: 8192\r\n\r\n{body}");
        let started = Instant::now();
        self.0.write_all(raw.as_bytes())?;
        let mut buffer = [0; 4096];
        let mut have = 0;
        while !buffer[..have].ends_with(b"\r\n\r\n{}") {
            match self.0.read(&mut buffer[have..])? {
                0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                n => have += n,
            }
        }
        Ok(started.elapsed().as_secs_f64() * 1e6)
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let rounds: usize = arguments.next().map_or(Ok(5000), |rounds| rounds.parse())?;
    let model = model()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let mut builder =
        Coordinator::builder().upstream(format!("http://{model}")).listen(Listen::loopback(), one_sandbox("box")?);
    if let Some(dir) = arguments.next() {
        builder = builder.journal(dir);
    }
    let (coordinator, mut boundaries) = runtime.block_on(builder.start())?;
    runtime.spawn(async move {
        while let Some(boundary) = boundaries.next().await {
            boundary.gate.decide(Verdict::Durable(VersionId(1)));
        }
    });
    let address = coordinator.address().ok_or("no address")?;
    let mut clients = [
        ("direct", Client::connect(model)?, "/x"),
        ("passed", Client::connect(address)?, "/x"),
        ("turn", Client::connect(address)?, "/v1/messages"),
    ];
    let mut times = [const { Vec::new() }; 3];
    for round in 0..rounds {
        for ((_, client, path), times) in clients.iter_mut().zip(&mut times) {
            times.push(client.ask(path, round)?);
        }
    }
    for ((name, ..), times) in clients.iter().zip(&mut times) {
        times.sort_by(f64::total_cmp);
        let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
        println!("{name:7} p50 {:7.1} us   p99 {:7.1} us", at(0.5), at(0.99));
    }
    Ok(())
}
