//! A model's server that costs next to nothing: one thread a connection, blocking.
//!
//! The query says what to answer: nothing, two bytes; `events=N&every_us=T`, a stream of N events, each with the moment
//! of its sending; `bytes=N`, so many bytes.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Nanoseconds on a clock that all threads share.
pub(super) fn now() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

pub(super) fn start() -> std::io::Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::Builder::new()
                .stack_size(256 * 1024)
                .spawn(move || serve(stream))
                .map(drop)
                .unwrap_or_else(|error| eprintln!("the model cannot start a thread: {error}"));
        }
    });
    Ok(address)
}

/// What is wanted of one request.
struct Wanted {
    /// The head's length and the body's.
    head: usize,
    body: usize,
    events: u64,
    every: Duration,
    bytes: Option<u64>,
}

fn parse(buffer: &[u8]) -> Option<Wanted> {
    let head = buffer.windows(4).position(|end| end == b"\r\n\r\n")? + 4;
    let text = std::str::from_utf8(&buffer[..head]).ok()?;
    let number = |name: &str| {
        let rest = &text[text.find(name)? + name.len()..];
        rest[..rest.find(|c: char| !c.is_ascii_digit())?].parse::<u64>().ok()
    };
    let lower = text.to_ascii_lowercase();
    let body = lower.find("content-length: ").and_then(|at| {
        let rest = &lower[at + "content-length: ".len()..];
        rest[..rest.find('\r')?].parse().ok()
    });
    Some(Wanted {
        head,
        body: body.unwrap_or(0),
        events: number("events=").unwrap_or(0),
        every: Duration::from_micros(number("every_us=").unwrap_or(0)),
        bytes: number("bytes="),
    })
}

fn serve(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let mut have = 0;
        let wanted = loop {
            match stream.read(&mut buffer[have..])? {
                0 => return Ok(()),
                n => have += n,
            }
            if let Some(wanted) = parse(&buffer[..have]) {
                break wanted;
            }
        };
        let mut left = (wanted.head + wanted.body).saturating_sub(have);
        while left > 0 {
            match stream.read(&mut buffer)? {
                0 => return Ok(()),
                n => left = left.saturating_sub(n),
            }
        }
        answer(&mut stream, &wanted, &mut buffer)?;
    }
}

fn answer(stream: &mut TcpStream, wanted: &Wanted, buffer: &mut [u8]) -> std::io::Result<()> {
    if let Some(mut left) = wanted.bytes {
        write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: {left}\r\n\r\n")?;
        buffer.fill(b'x');
        while left > 0 {
            let piece = left.min(buffer.len() as u64);
            stream.write_all(&buffer[..piece as usize])?;
            left -= piece;
        }
        return Ok(());
    }
    if wanted.events == 0 {
        return stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}");
    }
    stream.write_all(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nx-accel-buffering: no\r\n\r\n",
    )?;
    let begun = Instant::now();
    for n in 1..=wanted.events {
        std::thread::sleep((begun + wanted.every * n as u32).saturating_duration_since(Instant::now()));
        let event = format!("event: content_block_delta\ndata: {{\"at\":\"{:020}\"}}\n\n", now());
        stream.write_all(format!("{:x}\r\n{event}\r\n", event.len()).as_bytes())?;
    }
    stream.write_all(b"0\r\n\r\n")
}
