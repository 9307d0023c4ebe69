//! An agent that costs next to nothing: a blocking connection, and no more of HTTP than is needed to time it.

use std::io::{Error, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::model::now;

const POST_BYTES: usize = 8192;
/// What stands before and behind an event's moment.
const AT: &[u8] = b"{\"at\":\"";
const DIGITS: usize = 20;

pub(super) struct Client(TcpStream);

/// A question that is new in each round, so that no turn is taken for a retry.
fn question(round: usize, length: usize) -> String {
    let mut body = format!("{{\"messages\":[\"{round:012}\"],\"text\":\"");
    body.extend(std::iter::repeat_n('x', length.saturating_sub(body.len() + 2)));
    body.push_str("\"}");
    body
}

impl Client {
    pub(super) fn connect(address: SocketAddr) -> std::io::Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        // A bench that hangs says nothing.
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        Ok(Self(stream))
    }

    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        match self.0.read(buffer)? {
            0 => Err(ErrorKind::UnexpectedEof.into()),
            n => Ok(n),
        }
    }

    /// Microseconds until the answer to an 8 KiB POST is here.
    fn post(&mut self, path: &str, round: usize) -> std::io::Result<f64> {
        let body = question(round, POST_BYTES);
        let raw = format!("POST {path} HTTP/1.1\r\nhost: h\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        let started = Instant::now();
        self.0.write_all(raw.as_bytes())?;
        let mut buffer = [0; 4096];
        let mut have = 0;
        while !buffer[..have].ends_with(b"\r\n\r\n{}") {
            have += self.read(&mut buffer[have..])?;
        }
        let took = started.elapsed();
        if !buffer.starts_with(b"HTTP/1.1 200") {
            return Err(Error::other("an answer that is no 200"));
        }
        Ok(took.as_secs_f64() * 1e6)
    }

    /// Microseconds from the sending of each event of a stream until it is here.
    pub(super) fn stream(
        &mut self,
        path: &str,
        round: usize,
        events: u32,
        every: Duration,
    ) -> std::io::Result<Vec<f64>> {
        let body = question(round, 512);
        write!(
            self.0,
            "POST {path}?events={events}&every_us={} HTTP/1.1\r\nhost: h\r\ncontent-length: {}\r\n\r\n{body}",
            every.as_micros(),
            body.len()
        )?;
        let mut late = Vec::new();
        let mut buffer = vec![0; 16 * 1024];
        let mut have = 0;
        while late.len() < events as usize || !buffer[..have].ends_with(b"0\r\n\r\n") {
            have += self.read(&mut buffer[have..])?;
            let arrived = now();
            let mut done = 0;
            while let Some(at) = buffer[done..have].windows(AT.len()).position(|part| part == AT) {
                let digits = done + at + AT.len();
                if digits + DIGITS > have {
                    break;
                }
                let sent: u64 = std::str::from_utf8(&buffer[digits..digits + DIGITS])
                    .ok()
                    .and_then(|digits| digits.parse().ok())
                    .ok_or_else(|| Error::other("an event without its moment"))?;
                late.push((arrived - sent) as f64 / 1e3);
                done = digits + DIGITS;
            }
            // A moment that is cut, and the end, are looked at again.
            let keep = done.max(have.saturating_sub(AT.len() + DIGITS));
            buffer.copy_within(keep..have, 0);
            have -= keep;
        }
        Ok(late)
    }

    /// Sends a body of about so many bytes, JSON as a turn's is.
    pub(super) fn upload(&mut self, path: &str, bytes: u64) -> std::io::Result<()> {
        let (begin, end) = ("{\"messages\":[\"", "\"]}");
        let length = bytes + (begin.len() + end.len()) as u64;
        write!(self.0, "POST {path} HTTP/1.1\r\nhost: h\r\ncontent-length: {length}\r\n\r\n{begin}")?;
        let piece = vec![b'x'; 64 * 1024];
        let mut left = bytes;
        while left > 0 {
            let now = left.min(piece.len() as u64) as usize;
            self.0.write_all(&piece[..now])?;
            left -= now as u64;
        }
        self.0.write_all(end.as_bytes())?;
        self.take(2)
    }

    /// Receives a body of so many bytes.
    pub(super) fn download(&mut self, path: &str, bytes: u64) -> std::io::Result<()> {
        let body = question(usize::MAX, 64);
        write!(
            self.0,
            "POST {path}?bytes={bytes} HTTP/1.1\r\nhost: h\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )?;
        self.take(bytes)
    }

    /// Reads an answer with a body of this length.
    fn take(&mut self, bytes: u64) -> std::io::Result<()> {
        let mut buffer = vec![0; 256 * 1024];
        let mut have = 0;
        let head = loop {
            have += self.read(&mut buffer[have..])?;
            if let Some(at) = buffer[..have].windows(4).position(|end| end == b"\r\n\r\n") {
                break at + 4;
            }
        };
        let mut got = (have - head) as u64;
        while got < bytes {
            got += self.read(&mut buffer)? as u64;
        }
        if got != bytes {
            return Err(Error::other(format!("a body of {got} bytes where {bytes} were sent")));
        }
        Ok(())
    }
}

/// Times 8 KiB POSTs each way in turn, in microseconds.
pub(super) fn posts<const N: usize>(
    ways: [(SocketAddr, &str); N],
    warm_up: usize,
    rounds: usize,
) -> std::io::Result<[Vec<f64>; N]> {
    let mut clients = Vec::new();
    for (address, path) in ways {
        clients.push((Client::connect(address)?, path));
    }
    let mut samples = [const { Vec::new() }; N];
    for round in 0..warm_up + rounds {
        for ((client, path), samples) in clients.iter_mut().zip(&mut samples) {
            let took = client.post(path, round)?;
            if round >= warm_up {
                samples.push(took);
            }
        }
    }
    Ok(samples)
}

/// Runs streams at once and says, in microseconds, how late each of their events was.
pub(super) fn streams(
    address: SocketAddr,
    path: &'static str,
    streams: usize,
    events: u32,
    every: Duration,
) -> std::io::Result<Vec<f64>> {
    let mut threads = Vec::new();
    for n in 0..streams {
        let run = move || Client::connect(address)?.stream(path, 1_000_000 + n, events, every);
        threads.push(std::thread::Builder::new().stack_size(256 * 1024).spawn(run)?);
        // Real streams do not beat time together.
        std::thread::sleep(every / streams as u32);
    }
    let mut late = Vec::new();
    for thread in threads {
        late.extend(thread.join().map_err(|_| Error::other("a client's thread panicked"))??);
    }
    Ok(late)
}
