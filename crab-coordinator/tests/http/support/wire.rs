//! HTTP/1.1 messages as they are on the wire.

use tokio::io::{AsyncRead, AsyncReadExt};

/// A request or a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// The first line.
    pub start: String,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    pub trailers: Vec<(String, String)>,
    pub chunked: bool,
}

impl Message {
    pub fn status(&self) -> u16 {
        self.start.split(' ').nth(1).unwrap().parse().unwrap()
    }

    pub fn target(&self) -> &str {
        self.start.split(' ').nth(1).unwrap()
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|header| header.0 == name);
        found.map(|header| header.1.as_str())
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap()
    }
}

async fn more(stream: &mut (impl AsyncRead + Unpin), buffer: &mut Vec<u8>) -> Option<()> {
    let mut piece = [0; 16 * 1024];
    let n = stream.read(&mut piece).await.ok()?;
    buffer.extend_from_slice(&piece[..n]);
    (n > 0).then_some(())
}

async fn line(stream: &mut (impl AsyncRead + Unpin), buffer: &mut Vec<u8>) -> Option<String> {
    loop {
        if let Some(end) = buffer.windows(2).position(|pair| pair == b"\r\n") {
            let line = buffer.drain(..end + 2).collect::<Vec<u8>>();
            return Some(String::from_utf8_lossy(&line[..end]).into_owned());
        }
        more(stream, buffer).await?;
    }
}

async fn headers(stream: &mut (impl AsyncRead + Unpin), buffer: &mut Vec<u8>) -> Option<Vec<(String, String)>> {
    let mut headers = Vec::new();
    loop {
        let line = line(stream, buffer).await?;
        if line.is_empty() {
            return Some(headers);
        }
        let (name, value) = line.split_once(':').expect("a header");
        headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
}

async fn exactly(stream: &mut (impl AsyncRead + Unpin), buffer: &mut Vec<u8>, length: usize) -> Option<Vec<u8>> {
    while buffer.len() < length {
        more(stream, buffer).await?;
    }
    Some(buffer.drain(..length).collect())
}

/// The next message; `None` where the connection ends before it is whole. `answers` is the method that a response
/// answers; requests have none.
pub async fn read_message(
    stream: &mut (impl AsyncRead + Unpin),
    buffer: &mut Vec<u8>,
    answers: Option<&str>,
) -> Option<Message> {
    let start = line(stream, buffer).await?;
    let head = headers(stream, buffer).await?;
    let mut message = Message { start, headers: head, body: Vec::new(), trailers: Vec::new(), chunked: false };
    if answers == Some("HEAD") || (answers.is_some() && matches!(message.status(), 204 | 304)) {
        return Some(message);
    }
    message.chunked = message.header("transfer-encoding") == Some("chunked");
    if message.chunked {
        loop {
            let size = line(stream, buffer).await?;
            let size = usize::from_str_radix(size.split(';').next()?.trim(), 16).ok()?;
            if size == 0 {
                message.trailers = headers(stream, buffer).await?;
                return Some(message);
            }
            message.body.extend(exactly(stream, buffer, size).await?);
            assert_eq!(exactly(stream, buffer, 2).await?, b"\r\n");
        }
    }
    if let Some(length) = message.header("content-length") {
        let length = length.parse().unwrap();
        message.body = exactly(stream, buffer, length).await?;
    } else if answers.is_some() {
        while more(stream, buffer).await.is_some() {}
        message.body = std::mem::take(buffer);
    }
    Some(message)
}
