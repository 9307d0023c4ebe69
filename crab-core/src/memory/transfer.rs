//! Differences and streams of artifacts in memory.

use std::collections::VecDeque;

use async_trait::async_trait;

use super::Contents;
use crate::{ByteStream, Error, ErrorKind, FileChange, FileChangeKind, FileChanges, Result};

/// What differs between two states.
pub(super) fn differences(from: &Contents, to: &Contents) -> Vec<FileChange> {
    let gone = from.keys().filter(|path| !to.contains_key(*path)).map(|path| (path, FileChangeKind::Removed));
    let other = to.iter().filter_map(|(path, content)| match from.get(path) {
        None => Some((path, FileChangeKind::Added)),
        Some(old) if old != content => Some((path, FileChangeKind::Content)),
        Some(_) => None,
    });
    let named = gone.chain(other);
    named.map(|(path, kind)| FileChange { path: path.trim_matches('/').as_bytes().to_vec(), kind }).collect()
}

/// Things that are known already, given one by one.
pub(super) struct Ready<T>(pub(super) VecDeque<T>);

#[async_trait]
impl FileChanges for Ready<FileChange> {
    async fn next(&mut self) -> Result<Option<FileChange>> {
        Ok(self.0.pop_front())
    }
}

#[async_trait]
impl ByteStream for Ready<Vec<u8>> {
    async fn next(&mut self) -> Result<Option<Vec<u8>>> {
        Ok(self.0.pop_front())
    }
}

const MAGIC: &[u8; 8] = b"crabmem1";

/// FNV-1a, enough to notice damage in a test.
fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Tells states apart.
fn identity(contents: &Contents) -> u64 {
    let mut bytes = Vec::new();
    contents.iter().for_each(|(path, content)| put_entry(&mut bytes, path, Some(content)));
    sum(&bytes)
}

fn put(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

fn put_entry(bytes: &mut Vec<u8>, path: &str, content: Option<&str>) {
    put(bytes, path);
    bytes.push(u8::from(content.is_some()));
    put(bytes, content.unwrap_or_default());
}

/// Magic, the base's identity (0: none), the paths that differ from it, the checksum of it all.
pub(super) fn encode(contents: &Contents, base: Option<&Contents>) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(base.map_or(0, identity).to_le_bytes());
    let nothing = Contents::new();
    let base = base.unwrap_or(&nothing);
    for path in base.keys().chain(contents.keys().filter(|path| !base.contains_key(*path))) {
        if base.get(path) != contents.get(path) {
            put_entry(&mut bytes, path, contents.get(path).map(String::as_str));
        }
    }
    bytes.extend(sum(&bytes).to_le_bytes());
    bytes
}

fn damaged() -> Error {
    Error::new(ErrorKind::Corrupt, "the stream is damaged or ends early")
}

fn number(bytes: &mut &[u8]) -> Result<u64> {
    let (number, rest) = bytes.split_first_chunk().ok_or_else(damaged)?;
    *bytes = rest;
    Ok(u64::from_le_bytes(*number))
}

fn text(bytes: &mut &[u8]) -> Result<String> {
    let length = usize::try_from(number(bytes)?).map_err(|_| damaged())?;
    let (text, rest) = bytes.split_at_checked(length).ok_or_else(damaged)?;
    *bytes = rest;
    String::from_utf8(text.to_vec()).map_err(|_| damaged())
}

/// The state that a stream stands for, given the base.
pub(super) fn decode(stream: &[u8], base: Option<&Contents>) -> Result<Contents> {
    let (mut bytes, mut checksum) = stream.split_at_checked(stream.len().wrapping_sub(8)).ok_or_else(damaged)?;
    if number(&mut checksum)? != sum(bytes) {
        return Err(damaged());
    }
    bytes = bytes.strip_prefix(MAGIC).ok_or_else(damaged)?;
    let mut contents = match (number(&mut bytes)?, base) {
        (0, _) => Contents::new(),
        (wanted, Some(base)) if identity(base) == wanted => base.clone(),
        _ => return Err(Error::new(ErrorKind::InvalidInput, "the stream needs another base").fix("name its base")),
    };
    while !bytes.is_empty() {
        let path = text(&mut bytes)?;
        let (exists, rest) = bytes.split_first().ok_or_else(damaged)?;
        bytes = rest;
        let content = text(&mut bytes)?;
        if *exists == 0 {
            contents.remove(&path);
        } else {
            contents.insert(path, content);
        }
    }
    Ok(contents)
}
