//! One answer on disk: how it is laid out, how it is written beside the stream, how it is read back.
//!
//! ```text
//! "CRABANS1"  then records of  kind u8, length u32 LE, payload:
//!   1 head      JSON: status, headers
//!   2 data      bytes of the body, in order
//!   3 trailers  JSON
//!   4 end       length of the body u64 LE, SHA-256 of all that stands before this record
//! ```
//! A file without a true end record is a part of an answer, and is never taken for an answer.

use std::fs::{File, OpenOptions};
use std::io::{BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use crab_core::{Digest, Error, ErrorKind, Result, SandboxId, TurnNumber};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tokio::task::JoinHandle;

use super::Remover;

const MAGIC: &[u8; 8] = b"CRABANS1";
const HEAD: u8 = 1;
const DATA: u8 = 2;
const TRAILERS: u8 = 3;
const END: u8 = 4;
const RECORD_HEADER: usize = 5;
const END_PAYLOAD: usize = 40;
/// So much is collected before it is written.
const FLUSH: usize = 64 * 1024;
/// No record is longer: larger frames are cut. Bounds what a reader allocates for an alien file.
const MAX_RECORD: usize = 1024 * 1024;

/// Headers of an answer that are secrets of the connection it came on.
const SECRET: [&str; 4] = ["set-cookie", "set-cookie2", "authorization", "proxy-authenticate"];

/// What stands at the beginning of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
}

#[derive(Serialize, Deserialize)]
struct StoredHead {
    sandbox: SandboxId,
    turn: TurnNumber,
    key: Option<Digest>,
    status: u16,
    headers: Vec<(String, String)>,
}

/// Header values are bytes: each becomes the character of the same number.
fn store_headers(headers: &HeaderMap) -> Vec<(String, String)> {
    headers
        .iter()
        .filter(|(name, value)| !SECRET.contains(&name.as_str()) && !value.is_sensitive())
        .map(|(name, value)| {
            let value = value.as_bytes().iter().map(|&byte| char::from(byte));
            (name.as_str().to_owned(), value.collect())
        })
        .collect()
}

fn load_headers(stored: Vec<(String, String)>) -> Option<HeaderMap> {
    let mut headers = HeaderMap::with_capacity(stored.len());
    for (name, value) in stored {
        let value: Vec<u8> = value.chars().map(|c| u8::try_from(u32::from(c)).ok()).collect::<Option<_>>()?;
        headers.append(HeaderName::from_bytes(name.as_bytes()).ok()?, HeaderValue::from_bytes(&value).ok()?);
    }
    Some(headers)
}

/// Puts a record's header in front of what follows. Callers keep payloads within [`MAX_RECORD`].
fn push_record(out: &mut Vec<u8>, kind: u8, payload: &[u8]) {
    out.push(kind);
    out.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    out.extend_from_slice(payload);
}

/// Writes one answer while it streams. What is appended is collected and written by the blocking pool, at most two
/// portions of 64 KiB in memory. Dropped before [`finish`](Self::finish) has returned, the file is removed.
#[derive(Debug)]
pub(crate) struct AnswerWriter {
    path: PathBuf,
    remover: Option<Remover>,
    busy: Option<JoinHandle<Result<Out>>>,
    data: Vec<u8>,
    length: u64,
    limit: u64,
}

#[derive(Debug)]
struct Out {
    file: File,
    hasher: Sha256,
}

impl Out {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.hasher.update(bytes);
        self.file.write_all(bytes)
    }
}

/// Whose answer it is.
#[derive(Clone, Debug)]
pub(crate) struct AnswerName {
    pub(crate) sandbox: SandboxId,
    pub(crate) turn: TurnNumber,
    pub(crate) key: Option<Digest>,
}

impl AnswerWriter {
    /// Begins an answer. The file is made in the background, its name made durable at once, so that the end of the
    /// answer need not wait for that. Answers longer than `limit` bytes are given up.
    pub(super) fn begin(path: PathBuf, name: &AnswerName, head: &Head, limit: u64, remover: Remover) -> Result<Self> {
        let stored = StoredHead {
            sandbox: name.sandbox.clone(),
            turn: name.turn,
            key: name.key,
            status: head.status.as_u16(),
            headers: store_headers(&head.headers),
        };
        let stored = serde_json::to_vec(&stored)
            .map_err(|error| Error::new(ErrorKind::Internal, "cannot store an answer's head").caused_by(error))?;
        let mut first = MAGIC.to_vec();
        push_record(&mut first, HEAD, &stored);
        let create = path.clone();
        let busy = super::housework(move || {
            let error = |error| Error::io(format_args!("write {}", create.display()), error);
            let dir = create.parent().unwrap_or(Path::new("."));
            super::make_dir(dir)?;
            let file =
                OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&create).map_err(error)?;
            let mut out = Out { file, hasher: Sha256::new() };
            out.write(&first).map_err(error)?;
            File::open(dir).and_then(|dir| dir.sync_all()).map_err(error)?;
            Ok(out)
        });
        Ok(Self { path, remover: Some(remover), busy: Some(busy), data: Vec::new(), length: 0, limit })
    }

    /// Takes a piece of the body.
    ///
    /// # Errors
    /// Where an earlier write failed or the answer is too long: drop the writer, the answer cannot be kept.
    pub(crate) async fn append(&mut self, mut piece: &[u8]) -> Result<()> {
        self.length += piece.len() as u64;
        if self.length > self.limit {
            return Err(Error::new(
                ErrorKind::Full,
                format!("an answer is longer than the journal takes ({} bytes)", self.limit),
            )
            .fix("raise the journal's limit for one answer"));
        }
        while !piece.is_empty() {
            let (now, later) = piece.split_at(piece.len().min(FLUSH - self.data.len()));
            self.data.extend_from_slice(now);
            piece = later;
            if self.data.len() == FLUSH {
                self.write(Vec::new(), false).await?;
            }
        }
        Ok(())
    }

    /// Ends the answer. When it returns, the answer is durable.
    ///
    /// # Errors
    /// As for [`append`](Self::append).
    pub(crate) async fn finish(mut self, trailers: Option<&HeaderMap>) -> Result<u64> {
        let mut rest = Vec::new();
        if let Some(trailers) = trailers {
            let stored = serde_json::to_vec(&store_headers(trailers)).unwrap_or_default();
            push_record(&mut rest, TRAILERS, &stored);
        }
        self.write(rest, true).await?;
        self.wait().await?;
        self.remover = None;
        Ok(self.length)
    }

    async fn wait(&mut self) -> Result<Option<Out>> {
        match self.busy.as_mut() {
            None => Ok(None),
            Some(busy) => {
                let out = busy.await.map_err(|error| {
                    Error::new(ErrorKind::Internal, "the journal's writer broke off").caused_by(error)
                });
                self.busy = None;
                out?.map(Some)
            }
        }
    }

    async fn write(&mut self, then: Vec<u8>, end: bool) -> Result<()> {
        let Some(mut out) = self.wait().await? else {
            return Err(Error::new(ErrorKind::Poisoned, "an earlier write of this answer failed"));
        };
        let data = std::mem::take(&mut self.data);
        let (path, length) = (self.path.clone(), self.length);
        self.busy = Some(super::housework(move || {
            let error = |error| Error::io(format_args!("write {}", path.display()), error);
            if !data.is_empty() {
                let mut header = Vec::with_capacity(RECORD_HEADER);
                push_record(&mut header, DATA, &[]);
                header[1..].copy_from_slice(&(data.len() as u32).to_le_bytes());
                out.write(&header).map_err(error)?;
                out.write(&data).map_err(error)?;
            }
            out.write(&then).map_err(error)?;
            if end {
                let mut payload = length.to_le_bytes().to_vec();
                payload.extend_from_slice(&out.hasher.clone().finalize());
                let mut record = Vec::new();
                push_record(&mut record, END, &payload);
                out.write(&record).map_err(error)?;
                out.file.sync_data().map_err(error)?;
            }
            Ok(out)
        }));
        Ok(())
    }
}

impl Drop for AnswerWriter {
    fn drop(&mut self) {
        if let Some(remover) = self.remover.take() {
            remover.remove(self.path.clone(), self.busy.take());
        }
    }
}

/// Reads an answer that was found whole.
#[derive(Debug)]
pub(crate) struct AnswerReader {
    file: BufReader<File>,
    pub(crate) head: Head,
    pub(crate) trailers: Option<HeaderMap>,
}

impl AnswerReader {
    /// Opens an answer after checking all of it. Blocks.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]; [`ErrorKind::Corrupt`] where the file is not a whole answer.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let io = |error| Error::io(format_args!("read {}", path.display()), error);
        let mut file = BufReader::with_capacity(FLUSH, File::open(path).map_err(io)?);
        let (head, trailers) = read_whole(&mut file)
            .ok_or_else(|| Error::new(ErrorKind::Corrupt, format!("{} is not a whole answer", path.display())))?;
        file.seek(SeekFrom::Start(MAGIC.len() as u64)).map_err(io)?;
        Ok(Self { file, head, trailers })
    }

    /// The next piece of the body; `None` at its end. Blocks.
    ///
    /// # Errors
    /// Where the file changed since it was opened.
    pub(crate) fn next_piece(&mut self) -> Result<Option<Bytes>> {
        loop {
            let (_, kind, payload) = next_record(&mut self.file)
                .ok_or_else(|| Error::new(ErrorKind::Corrupt, "an answer changed while it was read"))?;
            match kind {
                DATA => return Ok(Some(payload.into())),
                END => return Ok(None),
                _ => {}
            }
        }
    }
}

/// Reads an answer to its end; `None` where it is not whole.
fn read_whole(file: &mut impl Read) -> Option<(Head, Option<HeaderMap>)> {
    let mut hasher = Sha256::new();
    let mut magic = [0; 8];
    file.read_exact(&mut magic).ok()?;
    if &magic != MAGIC {
        return None;
    }
    hasher.update(magic);
    let (mut head, mut trailers, mut length) = (None, None, 0);
    loop {
        let (header, kind, payload) = next_record(file)?;
        match kind {
            HEAD if head.is_none() => {
                let stored: StoredHead = serde_json::from_slice(&payload).ok()?;
                let status = StatusCode::from_u16(stored.status).ok()?;
                head = Some(Head { status, headers: load_headers(stored.headers)? });
            }
            DATA if head.is_some() && trailers.is_none() => length += payload.len() as u64,
            TRAILERS if trailers.is_none() => trailers = Some(load_headers(serde_json::from_slice(&payload).ok()?)?),
            END if payload.len() == END_PAYLOAD => {
                let sum: [u8; 32] = hasher.finalize().into();
                let is_whole = payload[..8] == u64::to_le_bytes(length) && payload[8..] == sum;
                return head.filter(|_| is_whole).map(|head| (head, trailers));
            }
            _ => return None,
        }
        hasher.update(header);
        hasher.update(&payload);
    }
}

fn next_record(file: &mut impl Read) -> Option<([u8; RECORD_HEADER], u8, Vec<u8>)> {
    let mut header = [0; RECORD_HEADER];
    file.read_exact(&mut header).ok()?;
    let [kind, length @ ..] = header;
    let length = usize::try_from(u32::from_le_bytes(length)).ok()?;
    if length > MAX_RECORD {
        return None;
    }
    let mut payload = vec![0; length];
    file.read_exact(&mut payload).ok()?;
    Some((header, kind, payload))
}

/// Whether a file ends as a whole answer does; its contents are checked when it is read. Blocks.
pub(super) fn seems_whole(path: &Path) -> Option<u64> {
    let mut file = File::open(path).ok()?;
    let tail = (RECORD_HEADER + END_PAYLOAD) as i64;
    let start = file.seek(SeekFrom::End(-tail)).ok()?;
    let (_, kind, payload) = next_record(&mut file)?;
    (kind == END && payload.len() == END_PAYLOAD).then_some(start + tail.unsigned_abs())
}

/// Any bytes are no answer; one that is made of them is, until it is cut or changed.
#[cfg(any(test, feature = "fuzzing"))]
pub(super) fn fuzz(data: &[u8]) {
    assert!(read_whole(&mut &*data).is_none());
    let mut whole = MAGIC.to_vec();
    push_record(&mut whole, HEAD, br#"{"sandbox":"box","turn":1,"key":null,"status":200,"headers":[["a","b"]]}"#);
    data.chunks(64).for_each(|piece| push_record(&mut whole, DATA, piece));
    let mut end = (data.len() as u64).to_le_bytes().to_vec();
    end.extend_from_slice(&Sha256::digest(&whole));
    push_record(&mut whole, END, &end);
    assert!(read_whole(&mut &*whole).is_some());
    let sum = data.iter().fold(7usize, |sum, &byte| sum.wrapping_mul(31).wrapping_add(usize::from(byte)));
    let at = sum % whole.len();
    assert!(read_whole(&mut &whole[..at]).is_none());
    whole[at] ^= data.first().copied().unwrap_or(1).max(1);
    assert!(read_whole(&mut &*whole).is_none(), "changed at {at}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::mpsc;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().build().unwrap()
    }

    fn begin(path: &Path, limit: u64) -> AnswerWriter {
        let name = AnswerName { sandbox: SandboxId::new("box").unwrap(), turn: TurnNumber(1), key: None };
        let head = Head {
            status: StatusCode::OK,
            headers: [("content-type", "text/event-stream"), ("x-bytes", "\u{e9}"), ("set-cookie", "session=secret")]
                .map(|(name, value)| {
                    let value: Vec<u8> = value.chars().map(|c| c as u8).collect();
                    (HeaderName::from_static(name), HeaderValue::from_bytes(&value).unwrap())
                })
                .into_iter()
                .collect(),
        };
        let remover = Remover(mpsc::channel().0);
        AnswerWriter::begin(path.to_owned(), &name, &head, limit, remover).unwrap()
    }

    fn write(path: &Path, pieces: &[Vec<u8>]) {
        runtime().block_on(async {
            let mut writer = begin(path, u64::MAX);
            for piece in pieces {
                writer.append(piece).await.unwrap();
            }
            let mut trailers = HeaderMap::new();
            trailers.insert("x-sum", HeaderValue::from_static("7"));
            writer.finish(Some(&trailers)).await.unwrap();
        });
    }

    fn read(path: &Path) -> Result<(Head, Vec<u8>, Option<HeaderMap>)> {
        let mut reader = AnswerReader::open(path)?;
        let mut body = Vec::new();
        while let Some(piece) = reader.next_piece()? {
            body.extend_from_slice(&piece);
        }
        Ok((reader.head, body, reader.trailers))
    }

    #[test]
    fn what_was_written_is_read_and_cookies_are_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let pieces = vec![b"one".to_vec(), vec![], vec![5; 200_000], b"end".to_vec()];
        write(&path, &pieces);
        assert!(seems_whole(&path).is_some());
        let (head, body, trailers) = read(&path).unwrap();
        assert_eq!(body, pieces.concat());
        assert_eq!(head.headers["x-bytes"].as_bytes(), b"\xe9");
        assert!(!head.headers.contains_key("set-cookie"));
        assert_eq!(trailers.unwrap()["x-sum"], "7");
    }

    #[test]
    fn a_file_cut_anywhere_or_changed_anywhere_is_not_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        write(&path, &[b"data: hello\n\n".to_vec(), b"data: end\n\n".to_vec()]);
        let whole = std::fs::read(&path).unwrap();
        for cut in 0..whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            assert!(read(&path).is_err(), "cut at {cut}");
            assert!(seems_whole(&path).is_none(), "cut at {cut}");
        }
        for at in 0..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 0x10;
            std::fs::write(&path, &changed).unwrap();
            assert!(read(&path).is_err(), "changed at {at}");
        }
    }

    #[test]
    fn an_answer_that_is_too_long_is_given_up() {
        let dir = tempfile::tempdir().unwrap();
        runtime().block_on(async {
            let mut writer = begin(&dir.path().join("a"), 10);
            writer.append(&[0; 10]).await.unwrap();
            let error = writer.append(&[0]).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Full);
        });
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn no_file_makes_the_reader_panic(bytes: Vec<u8>, with_magic: bool) {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("a");
            let mut text = if with_magic { MAGIC.to_vec() } else { Vec::new() };
            text.extend(bytes);
            std::fs::write(&path, &text).unwrap();
            prop_assert!(read(&path).is_err());
            let _ = seems_whole(&path);
        }
    }
}
