//! Finds the events of a server-sent event stream that arrives in pieces, without keeping the stream.

/// So much of an event's data is kept. Longer data is cut: what is looked for stands at the beginning.
const MAX_DATA: usize = 16 * 1024;
const MAX_NAME: usize = 128;

/// Splits a stream into events, as the HTML standard says: lines end with LF, CR or CRLF, an empty line ends an event.
#[derive(Debug, Default)]
pub struct SseSplitter {
    name: Vec<u8>,
    data: Vec<u8>,
    has_data: bool,
    line: Vec<u8>,
    after_cr: bool,
}

/// One event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SseEvent<'a> {
    /// The `event` field, empty where there was none; at most 128 bytes.
    pub name: &'a [u8],
    /// The `data` lines joined by line feeds; at most 16 KiB.
    pub data: &'a [u8],
}

impl SseSplitter {
    /// Takes the next piece and calls `each` for every event that it completes.
    pub fn update(&mut self, mut piece: &[u8], mut each: impl FnMut(SseEvent<'_>)) {
        while !piece.is_empty() {
            if std::mem::take(&mut self.after_cr) && piece[0] == b'\n' {
                piece = &piece[1..];
                continue;
            }
            let end = piece.iter().position(|&byte| byte == b'\n' || byte == b'\r');
            let run = end.unwrap_or(piece.len());
            let room = (MAX_DATA + "data: ".len()).saturating_sub(self.line.len());
            self.line.extend_from_slice(&piece[..run.min(room)]);
            let Some(end) = end else { return };
            self.after_cr = piece[end] == b'\r';
            piece = &piece[end + 1..];
            self.end_line(&mut each);
        }
    }

    fn end_line(&mut self, each: &mut impl FnMut(SseEvent<'_>)) {
        if self.line.is_empty() {
            if self.has_data || !self.name.is_empty() {
                each(SseEvent { name: &self.name, data: &self.data });
            }
            self.name.clear();
            self.data.clear();
            self.has_data = false;
            return;
        }
        let colon = self.line.iter().position(|&byte| byte == b':');
        let (field, value) = match colon {
            Some(at) => (&self.line[..at], &self.line[at + 1..]),
            None => (&self.line[..], &[][..]),
        };
        let value = value.strip_prefix(b" ").unwrap_or(value);
        match field {
            b"event" => {
                self.name.clear();
                self.name.extend_from_slice(&value[..value.len().min(MAX_NAME)]);
            }
            b"data" => {
                if self.has_data && self.data.len() < MAX_DATA {
                    self.data.push(b'\n');
                }
                self.has_data = true;
                let room = MAX_DATA.saturating_sub(self.data.len());
                self.data.extend_from_slice(&value[..value.len().min(room)]);
            }
            _ => {}
        }
        self.line.clear();
    }
}

/// Splits a stream of JSON lines. Lines longer than 16 KiB are cut.
#[derive(Debug, Default)]
pub struct LineSplitter(Vec<u8>);

impl LineSplitter {
    /// Takes the next piece and calls `each` for every line that it completes.
    pub fn update(&mut self, piece: &[u8], mut each: impl FnMut(&[u8])) {
        for part in piece.split_inclusive(|&byte| byte == b'\n') {
            let (text, ends) = match part.split_last() {
                Some((b'\n', text)) => (text, true),
                _ => (part, false),
            };
            let room = MAX_DATA.saturating_sub(self.0.len());
            self.0.extend_from_slice(&text[..text.len().min(room)]);
            if ends {
                each(&self.0);
                self.0.clear();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn split(pieces: &[&[u8]]) -> Vec<(String, String)> {
        let mut splitter = SseSplitter::default();
        let mut events = Vec::new();
        for piece in pieces {
            splitter.update(piece, |event| {
                let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
                events.push((text(event.name), text(event.data)));
            });
        }
        events
    }

    fn pair(name: &str, data: &str) -> (String, String) {
        (name.into(), data.into())
    }

    #[test]
    fn events_comments_and_all_line_ends() {
        let text = b": hello\n\nevent: a\ndata: 1\ndata:2\n\ndata\r\rid: 3\r\nevent:b\r\ndata: x:y\r\n\r\ndata: open";
        let expected = [pair("a", "1\n2"), pair("", ""), pair("b", "x:y")];
        assert_eq!(split(&[text]), expected);
    }

    #[test]
    fn an_endless_line_is_cut_and_not_kept() {
        let long = vec![b'x'; 1 << 20];
        let events = split(&[b"data: ", &long, b"\n\n"]);
        assert_eq!(events.len(), 1);
        assert_eq!(events[0].1.len(), MAX_DATA);
    }

    #[test]
    fn lines_are_split_and_cut() {
        let mut splitter = LineSplitter::default();
        let mut lines = Vec::new();
        for piece in [&b"ab"[..], b"c\n\nd", &vec![b'x'; 1 << 20], b"\ne"] {
            splitter.update(piece, |line| lines.push(line.len()));
        }
        assert_eq!(lines, [3, 0, MAX_DATA]);
    }

    proptest! {
        #[test]
        fn no_chunking_changes_the_events(
            text in "(event: [a-c]|data: ?[a-c:]{0,3}|:c|\n|\r|\r\n){0,30}",
            cuts in prop::collection::vec(0usize..100, 0..8),
        ) {
            let bytes = text.as_bytes();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut % (bytes.len() + 1)).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> = cuts.windows(2).map(|pair| &bytes[pair[0]..pair[1]]).collect();
            prop_assert_eq!(split(&pieces), split(&[bytes]));
        }
    }
}
