//! A model that has its client run two commands, one after the other, and then says its last words. What comes next is
//! read off the history in the request, so the same question always has the same answer.

use std::path::PathBuf;

use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::support::{LAST_CHUNK, Message, SSE_HEAD, chunk, ok_json};

/// How many turns a session has.
pub const TURNS: usize = 3;
pub const LAST_WORDS: &str = "the-work-is-done";

pub struct Script {
    /// The file that the commands write a line to.
    done: PathBuf,
    asked: Mutex<usize>,
}

/// What the model says in a turn.
enum Say {
    /// Call number, command.
    Run(usize, String),
    Words,
}

impl Script {
    pub fn new(done: PathBuf) -> Self {
        Self { done, asked: Mutex::new(0) }
    }

    /// How many turn requests came.
    pub fn asked(&self) -> usize {
        *self.asked.lock()
    }

    fn say(&self, results: usize) -> Say {
        *self.asked.lock() += 1;
        match results {
            0 | 1 => Say::Run(results + 1, format!("echo step {} >> {}", results + 1, self.done.display())),
            _ => Say::Words,
        }
    }

    /// The answer to any request, raw.
    pub fn answer(&self, message: &Message) -> Vec<u8> {
        let path = message.target().split('?').next().unwrap_or_default();
        if !message.start.starts_with("POST ") {
            let head_only = message.start.starts_with("HEAD ");
            let body = if head_only { "" } else { "{\"data\":[],\"models\":[]}" };
            return ok_json(body).into_bytes();
        }
        let Ok(body) = serde_json::from_slice::<Value>(&message.body) else {
            return ok_json("{}").into_bytes();
        };
        let stream = body["stream"] == true;
        match path {
            "/v1/messages" => self.messages(&body, stream),
            "/v1/chat/completions" => self.chat(&body, stream),
            "/v1/responses" => self.responses(&body, stream),
            _ => ok_json("{\"input_tokens\":10}").into_bytes(),
        }
    }

    fn messages(&self, body: &Value, stream: bool) -> Vec<u8> {
        let blocks =
            body["messages"].as_array().into_iter().flatten().filter_map(|message| message["content"].as_array());
        let results = blocks.flatten().filter(|block| block["type"] == "tool_result").count();
        let (block, delta, reason) = match self.say(results) {
            Say::Run(n, command) => {
                let input = json!({"command": command, "description": "a step"});
                (
                    json!({"type": "tool_use", "id": format!("toolu_{n}"), "name": "Bash", "input": input}),
                    json!({"type": "input_json_delta", "partial_json": input.to_string()}),
                    "tool_use",
                )
            }
            Say::Words => (
                json!({"type": "text", "text": LAST_WORDS}),
                json!({"type": "text_delta", "text": LAST_WORDS}),
                "end_turn",
            ),
        };
        let usage = json!({"input_tokens": 10, "output_tokens": 5});
        let mut whole = json!({
            "id": format!("msg_{results}"), "type": "message", "role": "assistant", "model": "scripted",
            "content": [block.clone()], "stop_reason": reason, "stop_sequence": null, "usage": usage,
        });
        if !stream {
            return ok_json(&whole.to_string()).into_bytes();
        }
        (whole["content"], whole["stop_reason"]) = (json!([]), Value::Null);
        let mut empty = block;
        match empty["type"].as_str() {
            Some("text") => empty["text"] = json!(""),
            _ => empty["input"] = json!({}),
        }
        events(&[
            json!({"type": "message_start", "message": whole}),
            json!({"type": "content_block_start", "index": 0, "content_block": empty}),
            json!({"type": "content_block_delta", "index": 0, "delta": delta}),
            json!({"type": "content_block_stop", "index": 0}),
            json!({"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": null}, "usage": {"output_tokens": 5}}),
            json!({"type": "message_stop"}),
        ])
    }

    fn chat(&self, body: &Value, stream: bool) -> Vec<u8> {
        let messages = body["messages"].as_array().into_iter().flatten();
        let results = messages.filter(|message| message["role"] == "tool").count();
        let tool = body["tools"][0]["function"]["name"].as_str().unwrap_or("bash");
        let call = |n: usize, command: String| {
            let arguments = json!({"command": command}).to_string();
            json!([{"index": 0, "id": format!("call_{n}"), "type": "function", "function": {"name": tool, "arguments": arguments}}])
        };
        let (message, reason) = match self.say(results) {
            Say::Run(n, command) => {
                (json!({"role": "assistant", "content": "a step", "tool_calls": call(n, command)}), "tool_calls")
            }
            // mini-swe-agent ends with a command of its own.
            Say::Words if tool == "bash" => {
                let command = format!("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo {LAST_WORDS}");
                (json!({"role": "assistant", "content": LAST_WORDS, "tool_calls": call(9, command)}), "tool_calls")
            }
            Say::Words => (json!({"role": "assistant", "content": LAST_WORDS}), "stop"),
        };
        let usage = json!({"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15});
        let frame = |object: &str, choice: Value| json!({"id": format!("chat_{results}"), "object": object, "created": 1, "model": "scripted", "choices": [choice]});
        if !stream {
            let mut whole = frame("chat.completion", json!({"index": 0, "message": message, "finish_reason": reason}));
            whole["usage"] = usage;
            return ok_json(&whole.to_string()).into_bytes();
        }
        let object = "chat.completion.chunk";
        let pieces = [
            frame(object, json!({"index": 0, "delta": message, "finish_reason": null})).to_string(),
            frame(object, json!({"index": 0, "delta": {}, "finish_reason": reason})).to_string(),
            "[DONE]".to_owned(),
        ];
        raw_events(pieces.iter().map(|data| format!("data: {data}\n\n")))
    }

    fn responses(&self, body: &Value, stream: bool) -> Vec<u8> {
        let input = body["input"].as_array().into_iter().flatten();
        let results =
            input.filter(|item| item["type"].as_str().is_some_and(|kind| kind.ends_with("_call_output"))).count();
        let tools: Vec<&str> =
            body["tools"].as_array().into_iter().flatten().filter_map(|tool| tool["name"].as_str()).collect();
        let item = match self.say(results) {
            Say::Run(n, command) => {
                let known = ["exec_command", "shell_command", "shell", "sdk"];
                let name = known.into_iter().find(|known| tools.contains(known)).unwrap_or("shell");
                let arguments = match name {
                    "exec_command" => json!({"cmd": command}),
                    "shell" => json!({"command": ["bash", "-c", command]}),
                    _ => json!({"command": command}),
                };
                json!({
                    "type": "function_call", "id": format!("fc_{n}"), "call_id": format!("call_{n}"), "name": name,
                    "arguments": arguments.to_string(), "status": "completed",
                })
            }
            Say::Words => json!({
                "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
                "content": [{"type": "output_text", "text": LAST_WORDS, "annotations": []}],
            }),
        };
        let usage = json!({
            "input_tokens": 10, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 5,
            "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 15,
        });
        let response = |status: &str, output: Value| {
            json!({
                "id": format!("resp_{results}"), "object": "response", "created_at": 1, "status": status, "model": "scripted",
                "output": output, "parallel_tool_calls": true, "tool_choice": "auto", "tools": [], "usage": usage,
                "error": null, "incomplete_details": null, "instructions": null, "metadata": {}, "temperature": 1.0, "top_p": 1.0,
            })
        };
        let whole = response("completed", json!([item]));
        if !stream {
            return ok_json(&whole.to_string()).into_bytes();
        }
        let mut begun = item.clone();
        match begun["type"].as_str() {
            Some("message") => begun["content"] = json!([]),
            _ => begun["arguments"] = json!(""),
        }
        let mut all = vec![
            json!({"type": "response.created", "response": response("in_progress", json!([]))}),
            json!({"type": "response.output_item.added", "output_index": 0, "item": begun}),
        ];
        if item["type"] == "message" {
            let part = json!({"type": "output_text", "text": "", "annotations": []});
            all.extend([
                json!({"type": "response.content_part.added", "item_id": "msg_1", "output_index": 0, "content_index": 0, "part": part}),
                json!({"type": "response.output_text.delta", "item_id": "msg_1", "output_index": 0, "content_index": 0, "delta": LAST_WORDS, "logprobs": []}),
                json!({"type": "response.output_text.done", "item_id": "msg_1", "output_index": 0, "content_index": 0, "text": LAST_WORDS, "logprobs": []}),
            ]);
        }
        all.push(json!({"type": "response.output_item.done", "output_index": 0, "item": item}));
        all.push(json!({"type": "response.completed", "response": whole}));
        for (number, event) in all.iter_mut().enumerate() {
            event["sequence_number"] = json!(number);
        }
        events(&all)
    }
}

/// A stream of events that are named for their types.
fn events(all: &[Value]) -> Vec<u8> {
    raw_events(
        all.iter().map(|event| format!("event: {}\ndata: {event}\n\n", event["type"].as_str().unwrap_or_default())),
    )
}

fn raw_events(events: impl Iterator<Item = String>) -> Vec<u8> {
    let mut raw = SSE_HEAD.as_bytes().to_vec();
    events.for_each(|event| raw.extend(chunk(event.as_bytes())));
    raw.extend_from_slice(LAST_CHUNK);
    raw
}
