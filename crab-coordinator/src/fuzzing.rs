//! What must hold for any bytes whatever, as functions that panic where it does not. The fuzz targets under `fuzz/` call
//! them, and so does a short random test of this crate.

use http::header::{HeaderName, HeaderValue};
use http::{HeaderMap, Method, Request};

use crate::digest::{ConversationShape, RequestHasher};
use crate::provider::{self, RequestKind};
use crate::resolve::{ByPath, Peer, SandboxResolver as _};
use crate::sse::{LineSplitter, SseEvent, SseSplitter};

pub use crate::journal::fuzz_journal as journal;

/// Cuts bytes into pieces whose lengths follow from the bytes.
fn pieces(data: &[u8]) -> Vec<&[u8]> {
    let mut pieces = Vec::new();
    let (mut rest, mut n) = (data, 0);
    while !rest.is_empty() {
        let length = usize::from(data[n % data.len()] % 17).clamp(1, rest.len());
        let (piece, after) = rest.split_at(length);
        pieces.push(piece);
        (rest, n) = (after, n + 1);
    }
    pieces
}

/// A request's head, its target in the first line, a header in each other: what is a turn stays one however its path is
/// spelled, and no header of one connection goes on to the next.
pub fn head(data: &[u8]) {
    let mut lines = data.split(|&byte| byte == b'\n');
    let target = lines.next().unwrap_or_default();
    let known = provider::known();
    let kind = |path: &str| {
        let found = provider::classify(&known, &Method::POST, path);
        found.map(|(provider, kind)| (provider.name(), kind))
    };
    let mut headers = HeaderMap::new();
    for line in lines.take(64) {
        let Some(colon) = line.iter().position(|&byte| byte == b':') else {
            continue;
        };
        if let (Ok(name), Ok(value)) =
            (HeaderName::from_bytes(&line[..colon]), HeaderValue::from_bytes(&line[colon + 1..]))
        {
            headers.append(name, value);
        }
    }
    let named: Vec<HeaderName> = headers
        .get_all("connection")
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    let _ = crate::headers::upgrade_wanted(&headers);
    crate::headers::strip_hop_by_hop(&mut headers);
    for name in named.iter().filter(|name| !["content-length", "host", "te"].contains(&name.as_str())) {
        assert!(!headers.contains_key(name), "{name} went on");
    }
    for name in ["connection", "transfer-encoding", "upgrade", "keep-alive", "proxy-authorization"] {
        assert!(!headers.contains_key(name), "{name} went on");
    }
    let Ok(request) = Request::builder().uri(target).body(()) else {
        return;
    };
    let (mut parts, ()) = request.into_parts();
    let path = parts.uri.path().to_owned();
    if let Some((name, RequestKind::Turn)) = kind(&path) {
        if !path.contains('%') {
            let encoded: String = path.bytes().map(|byte| format!("%{byte:02x}")).collect();
            assert_eq!(kind(&encoded), Some((name, RequestKind::Turn)), "{path}");
            assert_eq!(kind(&path.replace('/', "//")), Some((name, RequestKind::Turn)), "{path}");
        }
        assert_eq!(kind(&format!("{path}/")), Some((name, RequestKind::Turn)), "{path}");
    }
    if ByPath::default().resolve(Peer::Unix, &mut parts).is_some() {
        assert!(path.starts_with("/sandbox/") && parts.uri.path().starts_with('/'));
    }
}

fn events(pieces: &[&[u8]]) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut splitter = SseSplitter::default();
    let mut events = Vec::new();
    for piece in pieces {
        splitter.update(piece, |event| events.push((event.name.to_vec(), event.data.to_vec())));
    }
    events
}

fn json_lines(pieces: &[&[u8]]) -> Vec<Vec<u8>> {
    let mut splitter = LineSplitter::default();
    let mut lines = Vec::new();
    for piece in pieces {
        splitter.update(piece, |line| lines.push(line.to_vec()));
    }
    lines
}

/// An event stream: its events do not depend on how it was cut, are bounded, and no provider stumbles over them.
pub fn sse(data: &[u8]) {
    let whole = events(&[data]);
    assert_eq!(whole, events(&pieces(data)));
    let providers = provider::known();
    for (name, data) in &whole {
        assert!(name.len() <= 128 && data.len() <= 16 * 1024 + 1);
        for provider in &providers {
            let _ = provider.mark(SseEvent { name, data });
        }
    }
    let lines = json_lines(&[data]);
    assert_eq!(lines, json_lines(&pieces(data)));
    for line in &lines {
        for provider in &providers {
            let _ = provider.mark(SseEvent { name: b"", data: line });
        }
    }
}

/// A request's body: its digest does not depend on how it was cut or laid out, and is there exactly where it is JSON.
pub fn digest(data: &[u8]) {
    let shape = ConversationShape { history: &["messages", "input"], ignored: &["cache_control"] };
    let digest = |pieces: &[&[u8]]| {
        let mut hasher = RequestHasher::new(shape);
        pieces.iter().for_each(|piece| hasher.update(piece));
        hasher.finish()
    };
    let whole = digest(&[data]);
    assert_eq!(whole, digest(&pieces(data)));
    // serde_json looks at the encoding of text and at how large a number is, which the digest need not.
    if let Ok(value) = serde_json::from_slice::<serde_json::Value>(data) {
        assert!(whole.is_some(), "{value}");
    }
    if let Some(whole) = whole {
        assert_eq!(whole.conversation, whole.prefixes.last().copied());
        let wide: Vec<u8> = [b" \t\r\n", data, b"\n "].concat();
        assert_eq!(digest(&[&wide]), Some(whole));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    /// Text that comes near to what each target reads.
    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        prop_oneof![
            any::<Vec<u8>>(),
            "(/|//|%2f|sandbox|box|v1|messages|%6d|chat/completions|responses|api/chat|model/m/invoke|models/g:generateContent|\\?x)*\n(connection: (te|x-a|close)(, x-b)?\n|x-a: 1\n|te: trailers\n|upgrade: h2c\n)*".prop_map(String::into_bytes),
            "(event: (error|message_stop|ping)\n|data: ?(\\[DONE\\]|\\{\"done\":true\\}|x)?\n|\r\n|\n|:c\r){0,20}".prop_map(String::into_bytes),
            "(\\{|\\}|\\[|\\]|\"messages\"|:|,|\"\\\\ud83d\\\\ude00\"|-?[0-9]{1,3}(\\.5)?(e3)?|true|null| ){0,24}".prop_map(String::into_bytes),
            "(\\{\"event\":\"(opened|released|refused|delivered|floor)\",\"turn\":[0-9]\\}\n|\\{\"event\n){0,8}".prop_map(String::into_bytes),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]
        #[test]
        fn what_holds_for_any_bytes_holds_for_these(data in bytes()) {
            super::head(&data);
            super::sse(&data);
            super::digest(&data);
            super::journal(&data);
        }
    }
}
