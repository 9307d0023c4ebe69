//! The simplest agent: it asks its model over HTTP, runs the tool calls that it gets, and asks again.
//!
//! It lives outside the sandbox, as a runner does that calls `exec` into it. It knows nothing of Crab but the address to
//! which it posts. What it keeps is the conversation; [`Agent::rewind`] takes that back to what it was at a boundary.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use crab_coordinator::digest::RequestHasher;
use crab_coordinator::provider::{AnthropicMessages, Provider};
use crab_core::{Digest, Error, ErrorKind, Result};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use serde_json::{Map, Value, json};
use tokio::net::TcpStream;

use crate::session::Call;

/// An agent and its conversation.
#[derive(Clone, Debug)]
pub struct Agent {
    model: SocketAddr,
    path: String,
    wanted: String,
    messages: Vec<Value>,
}

/// A tool call with the id by which its result is given.
#[derive(Clone, Debug)]
pub struct Asked {
    /// The id.
    pub id: String,
    /// What to run.
    pub call: Call,
}

impl Agent {
    /// An agent with a task, that posts to `path` at `model`.
    #[must_use]
    pub fn new(model: SocketAddr, path: &str, task: &str) -> Self {
        let messages = vec![json!({"role": "user", "content": task})];
        Self { model, path: path.to_owned(), wanted: "scripted".to_owned(), messages }
    }

    /// The same, that names this model in its requests.
    #[must_use]
    pub fn of_model(mut self, name: &str) -> Self {
        name.clone_into(&mut self.wanted);
        self
    }

    /// Posts elsewhere from now on.
    pub fn post_to(&mut self, model: SocketAddr, path: &str) {
        self.model = model;
        self.path = path.to_owned();
    }

    /// The conversation.
    #[must_use]
    pub fn messages(&self) -> &[Value] {
        &self.messages
    }

    /// How many responses the conversation holds.
    #[must_use]
    pub fn responses(&self) -> usize {
        self.messages.iter().filter(|message| message["role"] == "assistant").count()
    }

    /// The body of the request that would be sent now.
    #[must_use]
    pub fn request(&self) -> Vec<u8> {
        json!({"model": self.wanted, "max_tokens": 4096, "stream": true, "messages": self.messages})
            .to_string()
            .into_bytes()
    }

    /// Takes the conversation back to its first `responses` responses and their results.
    pub fn rewind(&mut self, responses: usize) {
        // Task, then pairs of response and results.
        self.messages.truncate(1 + 2 * responses);
    }

    /// Takes the conversation back to the boundary that has this digest. False, and nothing is done, where it was never
    /// there.
    pub fn rewind_to(&mut self, boundary: &Digest) -> bool {
        let mut hasher = RequestHasher::new(AnthropicMessages.conversation());
        hasher.update(&self.request());
        let prefixes = hasher.finish().map(|digest| digest.prefixes).unwrap_or_default();
        let Some(at) = prefixes.iter().position(|prefix| prefix == boundary) else { return false };
        self.messages.truncate(at + 1);
        true
    }

    /// Takes back a response whose calls have no results yet, so that it is asked for again.
    pub fn ask_again(&mut self) {
        if self.messages.last().is_some_and(|message| message["role"] == "assistant") {
            self.messages.pop();
        }
    }

    /// Asks the model. Returns the tool calls of its response; none means that the work is done.
    ///
    /// # Errors
    /// Where the model does not answer, or with an error. The conversation is then as it was, and the request may be
    /// repeated.
    pub async fn ask(&mut self) -> Result<Vec<Asked>> {
        let content = post(self.model, &self.path, self.request()).await?;
        let asked = content
            .iter()
            .filter(|block| block["type"] == "tool_use")
            .map(|block| Asked {
                id: block["id"].as_str().unwrap_or_default().to_owned(),
                call: Call {
                    tool: block["name"].as_str().unwrap_or_default().to_owned(),
                    input: block["input"].as_object().cloned().unwrap_or_default(),
                },
            })
            .collect();
        self.messages.push(json!({"role": "assistant", "content": content}));
        Ok(asked)
    }

    /// Adds the results of the last response's calls to the conversation.
    pub fn give(&mut self, results: Vec<(String, String)>) {
        let content: Vec<Value> = results
            .into_iter()
            .map(|(id, text)| json!({"type": "tool_result", "tool_use_id": id, "content": text}))
            .collect();
        self.messages.push(json!({"role": "user", "content": content}));
    }
}

/// How long a request may take in all.
const PATIENCE: Duration = Duration::from_secs(120);

async fn post(address: SocketAddr, path: &str, body: Vec<u8>) -> Result<Vec<Value>> {
    tokio::time::timeout(PATIENCE, exchange(address, path, body))
        .await
        .map_err(|_| Error::new(ErrorKind::TimedOut, "the model did not answer in two minutes"))?
}

async fn exchange(address: SocketAddr, path: &str, body: Vec<u8>) -> Result<Vec<Value>> {
    let broken = |e: hyper::Error| Error::new(ErrorKind::Io, "the connection to the model broke").caused_by(e).retry();
    let stream =
        TcpStream::connect(address).await.map_err(|e| Error::io(format!("reach the model at {address}"), e).retry())?;
    let _ = stream.set_nodelay(true);
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
    let connection = tokio::spawn(connection);
    let request = hyper::Request::post(path)
        .header("host", address.to_string())
        .header("content-type", "application/json")
        .header("x-api-key", "not-a-secret")
        .body(Full::new(Bytes::from(body)))
        .map_err(|e| Error::new(ErrorKind::InvalidInput, "not a request").caused_by(e))?;
    let response = sender.send_request(request).await.map_err(broken)?;
    let status = response.status();
    let bytes = response.into_body().collect().await.map_err(broken)?.to_bytes();
    connection.abort();
    if !status.is_success() {
        let text = String::from_utf8_lossy(&bytes[..bytes.len().min(400)]).into_owned();
        return Err(Error::new(ErrorKind::Io, format!("the model answered {status}: {text}")).retry());
    }
    content(&bytes)
}

/// Puts a streamed message together.
fn content(stream: &[u8]) -> Result<Vec<Value>> {
    let bad = |why: &str| Error::new(ErrorKind::Io, format!("the model's stream {why}")).retry();
    let text = std::str::from_utf8(stream).map_err(|_| bad("is not UTF-8"))?;
    let mut blocks: Vec<(Value, String)> = Vec::new();
    let mut whole = false;
    for data in text.lines().filter_map(|line| line.strip_prefix("data:")) {
        let event: Value = serde_json::from_str(data.trim()).map_err(|_| bad("holds an event that is not JSON"))?;
        match event["type"].as_str() {
            Some("content_block_start") => blocks.push((event["content_block"].clone(), String::new())),
            Some("content_block_delta") => {
                let (_, text) = blocks.last_mut().ok_or_else(|| bad("begins in the middle"))?;
                let delta = &event["delta"];
                text.push_str(delta["partial_json"].as_str().or_else(|| delta["text"].as_str()).unwrap_or_default());
            }
            Some("error") => return Err(bad(&format!("ends with an error: {}", event["error"]))),
            Some("message_stop") => whole = true,
            _ => {}
        }
    }
    if !whole {
        return Err(bad("broke off"));
    }
    blocks
        .into_iter()
        .map(|(mut block, text)| {
            if block["type"] == "tool_use" {
                let input: Map<String, Value> = serde_json::from_str(&text).map_err(|_| bad("has a torn tool call"))?;
                block["input"] = Value::Object(input);
            } else {
                block["text"] = Value::from(text);
            }
            Ok(block)
        })
        .collect()
}
