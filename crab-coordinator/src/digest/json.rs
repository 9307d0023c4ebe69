//! A digest of a JSON text that does not see whitespace, key order or the way a character was escaped.
//!
//! A push parser: it takes pieces of any size, hashes each scalar as it passes, and keeps only the hashes of the
//! members of the objects that are still open. Numbers count as written (`1.0` is not `1`): a client that sends the
//! same request again writes them the same way.

use super::ConversationShape;
use super::hash::{Hash, Hasher};

const MAX_DEPTH: usize = 512;
/// Members of open objects and elements of the history that are remembered at once: 64 MB at the most.
const MAX_REMEMBERED: usize = 1 << 20;
const MAX_NUMBER: usize = 1024;
/// So much of a key is kept to be compared with names.
const KEY_HEAD: usize = 64;
/// So much of the model's name is kept.
const MODEL_HEAD: usize = 128;

#[derive(Debug)]
enum Open {
    Object { members: Vec<(Hash, Hash)>, key: Option<Key> },
    Array { hasher: Hasher, is_history: bool },
}

#[derive(Debug)]
struct Key {
    hash: Hash,
    head: Vec<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// A value must come.
    Value,
    /// After `[`: a value or `]`.
    FirstElement,
    /// After `{`: a key or `}`.
    FirstKey,
    /// After `,` in an object.
    Key,
    /// After a key.
    Colon,
    /// After a value inside something: `,` or the closing bracket.
    AfterValue,
    /// After the outermost value: whitespace only.
    Done,
    InString,
    InEscape,
    /// So many of the four digits of `\uXXXX` are read.
    InUnicode(u8),
    InNumber,
    /// Inside `true`, `false` or `null`: which, and how much of it is read.
    InLiteral(&'static [u8], u8),
    Invalid,
}

#[derive(Debug)]
pub(super) struct JsonDigest {
    shape: ConversationShape,
    state: State,
    open: Vec<Open>,
    remembered: usize,
    root: Option<Hash>,
    history: Vec<Hash>,
    model: Option<String>,
    // The scalar being read.
    string: Hasher,
    string_is_key: bool,
    head: Vec<u8>,
    unicode: u16,
    high_surrogate: Option<u16>,
    number: Vec<u8>,
}

impl JsonDigest {
    pub(super) fn new(shape: ConversationShape) -> Self {
        Self {
            shape,
            state: State::Value,
            open: Vec::new(),
            remembered: 0,
            root: None,
            history: Vec::new(),
            model: None,
            string: Hasher::new(b's'),
            string_is_key: false,
            head: Vec::new(),
            unicode: 0,
            high_surrogate: None,
            number: Vec::new(),
        }
    }

    pub(super) fn update(&mut self, mut piece: &[u8]) {
        while let Some((&byte, rest)) = piece.split_first() {
            if self.state == State::Invalid {
                return;
            }
            if self.state == State::InString {
                // Most of a conversation is text: take it in runs.
                let run = plain_run(piece);
                if run > 0 {
                    self.text(&piece[..run]);
                    piece = &piece[run..];
                    continue;
                }
            }
            if self.state == State::InNumber && !is_number_byte(byte) {
                // The byte after a number ends it, and is looked at again.
                self.end_number();
                continue;
            }
            self.state = self.step(byte);
            piece = rest;
        }
    }

    pub(super) fn finish(mut self) -> Option<(Hash, Vec<Hash>, Option<String>)> {
        if self.state == State::InNumber {
            self.end_number();
        }
        match self.state {
            State::Done => self.root.map(|root| (root, self.history, self.model)),
            _ => None,
        }
    }

    fn step(&mut self, byte: u8) -> State {
        let blank = matches!(byte, b' ' | b'\t' | b'\n' | b'\r');
        match self.state {
            State::Value | State::FirstElement if blank => self.state,
            State::FirstElement if byte == b']' => self.close(),
            State::Value | State::FirstElement => self.begin_value(byte),
            State::FirstKey | State::Key | State::Colon | State::AfterValue | State::Done if blank => self.state,
            State::FirstKey if byte == b'}' => self.close(),
            State::FirstKey | State::Key if byte == b'"' => self.begin_string(true),
            State::Colon if byte == b':' => State::Value,
            State::AfterValue => match (byte, self.open.last()) {
                (b',', Some(Open::Object { .. })) => State::Key,
                (b',', Some(Open::Array { .. })) => State::Value,
                (b'}', Some(Open::Object { .. })) | (b']', Some(Open::Array { .. })) => self.close(),
                _ => State::Invalid,
            },
            State::InString => match byte {
                b'"' => self.end_string(),
                b'\\' => State::InEscape,
                _ => State::Invalid,
            },
            State::InEscape => self.escape(byte),
            State::InUnicode(read) => {
                let Some(digit) = (byte as char).to_digit(16) else {
                    return State::Invalid;
                };
                self.unicode = self.unicode << 4 | digit as u16;
                if read < 3 {
                    State::InUnicode(read + 1)
                } else {
                    self.code_unit(self.unicode);
                    State::InString
                }
            }
            State::InNumber => {
                if self.number.len() == MAX_NUMBER {
                    return State::Invalid;
                }
                self.number.push(byte);
                State::InNumber
            }
            State::InLiteral(word, read) => {
                if word.get(usize::from(read)) != Some(&byte) {
                    return State::Invalid;
                }
                if usize::from(read) + 1 < word.len() {
                    return State::InLiteral(word, read + 1);
                }
                self.value(tagged(b'l', word))
            }
            State::FirstKey | State::Key | State::Colon | State::Done | State::Invalid => State::Invalid,
        }
    }

    fn begin_value(&mut self, byte: u8) -> State {
        match byte {
            b'{' | b'[' if self.open.len() == MAX_DEPTH => State::Invalid,
            b'{' => {
                self.open.push(Open::Object { members: Vec::new(), key: None });
                State::FirstKey
            }
            b'[' => {
                let is_history = matches!(
                    self.open.as_slice(),
                    [Open::Object { key: Some(key), .. }]
                        if self.shape.history.iter().any(|name| key.head == name.as_bytes())
                );
                self.open.push(Open::Array { hasher: Hasher::new(b'['), is_history });
                State::FirstElement
            }
            b'"' => self.begin_string(false),
            b't' => State::InLiteral(b"true", 1),
            b'f' => State::InLiteral(b"false", 1),
            b'n' => State::InLiteral(b"null", 1),
            b'-' | b'0'..=b'9' => {
                self.number.clear();
                self.number.push(byte);
                State::InNumber
            }
            _ => State::Invalid,
        }
    }

    fn begin_string(&mut self, is_key: bool) -> State {
        self.string = Hasher::new(b's');
        self.string_is_key = is_key;
        self.head.clear();
        State::InString
    }

    fn end_string(&mut self) -> State {
        self.flush_surrogate();
        let hash = std::mem::replace(&mut self.string, Hasher::new(b's')).finish();
        if !self.string_is_key {
            if self.is_model() && self.head.len() <= MODEL_HEAD {
                self.model = String::from_utf8(std::mem::take(&mut self.head)).ok();
            }
            return self.value(hash);
        }
        let head = std::mem::take(&mut self.head);
        match self.open.last_mut() {
            Some(Open::Object { key, .. }) => {
                *key = Some(Key { hash, head });
                State::Colon
            }
            _ => State::Invalid,
        }
    }

    fn text(&mut self, bytes: &[u8]) {
        self.flush_surrogate();
        self.hash_text(bytes);
    }

    fn hash_text(&mut self, bytes: &[u8]) {
        self.string.update(bytes);
        let limit = match self.string_is_key {
            true => KEY_HEAD,
            false if self.is_model() => MODEL_HEAD,
            false => return,
        };
        // One more than the limit, so that what is longer is never taken for its beginning.
        let room = (limit + 1).saturating_sub(self.head.len());
        self.head.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }

    /// Whether the value being read is the top-level member `model`.
    fn is_model(&self) -> bool {
        matches!(self.open.as_slice(), [Open::Object { key: Some(key), .. }] if key.head == b"model")
    }

    fn escape(&mut self, byte: u8) -> State {
        let plain = match byte {
            b'"' | b'\\' | b'/' => byte,
            b'b' => 8,
            b'f' => 12,
            b'n' => b'\n',
            b'r' => b'\r',
            b't' => b'\t',
            b'u' => {
                self.unicode = 0;
                return State::InUnicode(0);
            }
            _ => return State::Invalid,
        };
        self.text(&[plain]);
        State::InString
    }

    /// One UTF-16 unit from `\uXXXX`. Surrogates that find no partner are hashed as they are, in the three bytes that
    /// UTF-8 would use, which no text holds.
    fn code_unit(&mut self, unit: u16) {
        if let (Some(high), 0xDC00..=0xDFFF) = (self.high_surrogate, unit) {
            self.high_surrogate = None;
            let code = 0x1_0000 + ((u32::from(high) - 0xD800) << 10) + (u32::from(unit) - 0xDC00);
            if let Some(c) = char::from_u32(code) {
                self.hash_text(c.encode_utf8(&mut [0; 4]).as_bytes());
            }
            return;
        }
        self.flush_surrogate();
        match char::from_u32(u32::from(unit)) {
            Some(c) => self.hash_text(c.encode_utf8(&mut [0; 4]).as_bytes()),
            None if unit < 0xDC00 => self.high_surrogate = Some(unit),
            None => self.lone(unit),
        }
    }

    fn flush_surrogate(&mut self) {
        if let Some(unit) = self.high_surrogate.take() {
            self.lone(unit);
        }
    }

    fn lone(&mut self, unit: u16) {
        let bits = |shift: u16, mask: u16| ((unit >> shift) & mask) as u8;
        self.hash_text(&[0xE0 | bits(12, 0x0F), 0x80 | bits(6, 0x3F), 0x80 | bits(0, 0x3F)]);
    }

    fn end_number(&mut self) {
        self.state = if is_number(&self.number) {
            let hash = tagged(b'n', &self.number);
            self.value(hash)
        } else {
            State::Invalid
        };
    }

    fn close(&mut self) -> State {
        let hash = match self.open.pop() {
            Some(Open::Object { mut members, .. }) => {
                self.remembered -= members.len();
                // Stable: of equal keys the order stays, since it decides which one a reader believes.
                members.sort_by_key(|member| member.0);
                let mut hasher = Hasher::new(b'{');
                for (key, value) in members {
                    hasher.update(&key);
                    hasher.update(&value);
                }
                hasher.finish()
            }
            Some(Open::Array { hasher, .. }) => hasher.finish(),
            None => return State::Invalid,
        };
        self.value(hash)
    }

    /// A value is complete: gives it to what holds it.
    fn value(&mut self, hash: Hash) -> State {
        match self.open.last_mut() {
            None => {
                self.root = Some(hash);
                return State::Done;
            }
            Some(Open::Object { members, key }) => {
                let Some(key) = key.take() else {
                    return State::Invalid;
                };
                let ignored = self.shape.ignored.iter();
                if ignored.into_iter().all(|name| key.head != name.as_bytes()) {
                    members.push((key.hash, hash));
                    self.remembered += 1;
                }
            }
            Some(Open::Array { hasher, is_history }) => {
                hasher.update(&hash);
                if *is_history {
                    self.history.push(hash);
                    self.remembered += 1;
                }
            }
        }
        if self.remembered > MAX_REMEMBERED {
            return State::Invalid;
        }
        State::AfterValue
    }
}

/// How many bytes of a string follow that stand for themselves.
fn plain_run(text: &[u8]) -> usize {
    let ends = |byte: u8| byte == b'"' || byte == b'\\' || byte < 0x20;
    let mut run = 0;
    for block in text.chunks(32) {
        // Without an early exit, so that the compiler compares many bytes at once.
        if block.iter().fold(false, |found, &byte| found | ends(byte)) {
            return run + block.iter().position(|&byte| ends(byte)).unwrap_or(block.len());
        }
        run += block.len();
    }
    run
}

fn tagged(tag: u8, bytes: &[u8]) -> Hash {
    let mut hasher = Hasher::new(tag);
    hasher.update(bytes);
    hasher.finish()
}

fn is_number_byte(byte: u8) -> bool {
    matches!(byte, b'0'..=b'9' | b'-' | b'+' | b'.' | b'e' | b'E')
}

/// The number grammar of RFC 8259.
fn is_number(text: &[u8]) -> bool {
    fn digits(text: &[u8]) -> Option<&[u8]> {
        let count = text.iter().take_while(|b| b.is_ascii_digit()).count();
        (count > 0).then(|| &text[count..])
    }
    let text = text.strip_prefix(b"-").unwrap_or(text);
    let Some(mut rest) = text.strip_prefix(b"0").or_else(|| digits(text)) else {
        return false;
    };
    if let Some(fraction) = rest.strip_prefix(b".") {
        let Some(after) = digits(fraction) else {
            return false;
        };
        rest = after;
    }
    if let [b'e' | b'E', exponent @ ..] = rest {
        let exponent = match exponent {
            [b'+' | b'-', digits @ ..] => digits,
            _ => exponent,
        };
        let Some(after) = digits(exponent) else {
            return false;
        };
        rest = after;
    }
    rest.is_empty()
}

#[cfg(test)]
mod tests {
    use super::super::{RequestDigest, RequestHasher};
    use super::*;
    use proptest::prelude::*;
    use serde_json::Value;

    const SHAPE: ConversationShape = ConversationShape { history: &["messages"], ignored: &["cache_control"] };

    fn digest(text: &str) -> Option<RequestDigest> {
        let mut hasher = RequestHasher::new(SHAPE);
        hasher.update(text.as_bytes());
        hasher.finish()
    }

    #[test]
    fn order_of_keys_whitespace_and_escapes_do_not_matter() {
        let one = digest(r#"{"model":"m","messages":[{"role":"user","content":"aé\n/\ud83d\ude00"}],"n":[1,2.5e3]}"#);
        let two = digest(
            " {\t\"n\" : [ 1 , 2.5e3 ] , \"messages\" : [ { \"content\" : \"\\u0061\u{e9}\\u000a\\/\u{1f600}\" ,\r\n \"role\":\"user\"} ] , \"model\":\"m\" } ",
        );
        assert!(one.is_some());
        assert_eq!(one, two);
    }

    #[test]
    fn what_is_asked_matters() {
        let texts = [
            r#"{"messages":["a"]}"#,
            r#"{"messages":["b"]}"#,
            r#"{"messages":["a","a"]}"#,
            r#"{"messages":[["a"]]}"#,
            r#"{"messages":{"a":null}}"#,
            r#"{"messages":["a"],"stream":true}"#,
            r#"{"messages":["a"],"stream":false}"#,
            r#"{"messages":["true"]}"#,
            r#"{"messages":[true]}"#,
            r#"{"messages":[1]}"#,
            r#"{"messages":["1"]}"#,
            r#"{"messages":["\ud800"]}"#,
            r#"{"messages":["\udc00"]}"#,
            r#"{"messages":[]}"#,
            "{}",
            "[]",
            "null",
            "\"\"",
        ];
        let bodies: std::collections::HashSet<_> = texts.iter().map(|text| digest(text).unwrap().body).collect();
        assert_eq!(bodies.len(), texts.len());
    }

    #[test]
    fn the_conversation_is_a_chain_over_the_history_and_nothing_else() {
        let short = digest(r#"{"messages":["a"],"max_tokens":5}"#).unwrap();
        let long = digest(r#"{"messages":["a",{"b":1}],"system":"s"}"#).unwrap();
        assert_eq!(long.prefixes.len(), 2);
        assert_eq!(short.conversation, Some(long.prefixes[0]));
        assert_eq!(long.conversation, Some(long.prefixes[1]));
        assert_eq!(digest(r#"{"x":{"messages":["a"]}}"#).unwrap().conversation, None);
    }

    #[test]
    fn hints_that_clients_move_about_are_left_out() {
        let with = digest(r#"{"messages":[{"a":1,"cache_control":{"type":"ephemeral"}}]}"#);
        assert_eq!(with, digest(r#"{"messages":[{"a":1}]}"#));
        let longer = digest(r#"{"messages":[{"a":1,"cache_control_x":1}]}"#);
        assert_ne!(with, longer);
    }

    #[test]
    fn the_model_is_read_at_the_top_alone() {
        let model = |text: &str| digest(text).unwrap().model;
        assert_eq!(model(r#"{"a":{"model":"x"},"model":"small-\u0031","b":"y"}"#).as_deref(), Some("small-1"));
        assert_eq!(model(r#"{"a":{"model":"x"},"model":1,"models":"y"}"#), None);
        assert_eq!(model(&format!(r#"{{"model":"{}"}}"#, "x".repeat(129))), None);
    }

    #[test]
    fn what_is_not_json_has_no_digest() {
        for text in [
            "",
            " ",
            "{",
            "}",
            "[1,]",
            "{\"a\":1,}",
            "{\"a\"}",
            "{a:1}",
            "01",
            "1.",
            "-",
            "1e",
            "+1",
            "nul",
            "truex",
            "\"\u{1}\"",
            "\"\\x\"",
            "\"\\u12g4\"",
            "1 2",
            "{} x",
            "[1 2]",
            "\"a",
            "--1",
            "1.e5",
        ] {
            assert_eq!(digest(text), None, "{text:?}");
        }
        assert_eq!(digest(&"[".repeat(100_000)), None);
        assert_eq!(digest(&"1".repeat(100_000)), None);
    }

    fn json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            (-1e6..1e6f64).prop_map(Value::from),
            "\\PC{0,8}".prop_map(Value::from),
            "[\\x00-\\x7f]{0,8}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 32, 5, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
                prop::collection::vec(("\\PC{0,4}", inner), 0..5)
                    .prop_map(|members| Value::Object(members.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn any_json_has_a_digest_that_no_chunking_changes(value in json(), cuts in prop::collection::vec(1usize..7, 0..40)) {
            let text = value.to_string();
            let whole = digest(&text);
            prop_assert!(whole.is_some(), "{}", text);
            let mut hasher = RequestHasher::new(SHAPE);
            let mut rest = text.as_bytes();
            for cut in cuts.iter().cycle().take(if cuts.is_empty() { 0 } else { text.len() }) {
                let (piece, after) = rest.split_at((*cut).min(rest.len()));
                hasher.update(piece);
                rest = after;
            }
            hasher.update(rest);
            prop_assert_eq!(hasher.finish(), whole.clone());
            prop_assert_eq!(digest(&serde_json::to_string_pretty(&value).unwrap()), whole);
        }

        #[test]
        fn it_accepts_what_serde_json_accepts(text in "[\\[\\]{}\",:0-9eE.+\\- tfnrualse\\\\]{0,12}") {
            let valid = serde_json::from_str::<serde::de::IgnoredAny>(&text).is_ok();
            prop_assert_eq!(digest(&text).is_some(), valid, "{}", text);
        }

        #[test]
        fn no_bytes_make_it_panic(bytes: Vec<u8>) {
            let mut hasher = RequestHasher::new(SHAPE);
            hasher.update(&bytes);
            let _ = hasher.finish();
        }
    }
}
