//! The little of the kernel's FUSE protocol that one directory of files needs, which nobody writes to.

/// Room for a request. The kernel refuses less than 8 KiB.
pub(crate) const REQUEST: usize = 64 << 10;
/// The node of the directory.
pub(crate) const ROOT: u64 = 1;

/// The kernel answers later versions with what this one knows.
const VERSION: (u32, u32) = (7, 31);
/// `FUSE_ASYNC_READ` and `FUSE_MAX_PAGES`.
const FLAGS: u32 = 1 | 1 << 22;
/// So many pages in one request, which is the most that the kernel allows as a rule.
const MOST_PAGES: u16 = 256;
/// Nobody writes, but it must be said how much.
const MOST_WRITTEN: u32 = 4096;
/// Names and sizes hold for longer than anybody asks, in seconds.
const VALID: u64 = 1 << 20;

const DIRECTORY: u32 = 0o040_500;
const FILE: u32 = 0o100_400;

/// What the kernel asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call<'a> {
    Begin {
        readahead: u32,
        flags: u32,
    },
    LookUp {
        name: &'a [u8],
    },
    Attributes,
    Open,
    Read {
        offset: u64,
        size: u32,
    },
    Release,
    /// Wants no answer.
    Forget,
    Other,
}

/// One request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request<'a> {
    pub(crate) unique: u64,
    pub(crate) node: u64,
    pub(crate) call: Call<'a>,
}

impl<'a> Request<'a> {
    pub(crate) fn parse(bytes: &'a [u8]) -> Option<Self> {
        let (head, body) = bytes.split_at_checked(40)?;
        let call = match u32_at(head, 4)? {
            1 => Call::LookUp { name: body.strip_suffix(&[0])? },
            2 | 42 => Call::Forget,
            3 => Call::Attributes,
            14 => Call::Open,
            15 => Call::Read { offset: u64_at(body, 8)?, size: u32_at(body, 16)? },
            18 => Call::Release,
            26 => Call::Begin { readahead: u32_at(body, 8)?, flags: u32_at(body, 12)? },
            _ => Call::Other,
        };
        Some(Self { unique: u64_at(head, 8)?, node: u64_at(head, 16)?, call })
    }
}

/// How a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reads {
    /// Through the page cache, which reads ahead.
    Cached,
    /// Straight into the memory of who reads.
    Direct,
}

/// What stands before an answer of that many bytes.
pub(crate) fn head(unique: u64, length: usize) -> Vec<u8> {
    answer(unique, 0, length)
}

/// A refusal.
pub(crate) fn refusal(unique: u64, error: rustix::io::Errno) -> Vec<u8> {
    answer(unique, -error.raw_os_error(), 0)
}

fn answer(unique: u64, error: i32, length: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(16 + length.min(256));
    bytes.extend(u32::try_from(16 + length).unwrap_or(u32::MAX).to_ne_bytes());
    bytes.extend(error.to_ne_bytes());
    bytes.extend(unique.to_ne_bytes());
    bytes
}

fn whole(unique: u64, body: &[u8]) -> Vec<u8> {
    let mut bytes = head(unique, body.len());
    bytes.extend(body);
    bytes
}

/// To `Begin`.
pub(crate) fn begun(unique: u64, readahead: u32, flags: u32) -> Vec<u8> {
    let mut body = Vec::with_capacity(64);
    for word in [VERSION.0, VERSION.1, readahead, flags & FLAGS, 0, MOST_WRITTEN, 1] {
        body.extend(word.to_ne_bytes());
    }
    body.extend(MOST_PAGES.to_ne_bytes());
    body.resize(64, 0);
    whole(unique, &body)
}

/// To `LookUp`: a file of that size.
pub(crate) fn found(unique: u64, node: u64, size: u64) -> Vec<u8> {
    let mut body = Vec::with_capacity(128);
    for word in [node, 0, VALID, VALID, 0] {
        body.extend(word.to_ne_bytes());
    }
    body.extend(attributes_of(node, size));
    whole(unique, &body)
}

/// To `Attributes`.
pub(crate) fn attributes(unique: u64, node: u64, size: u64) -> Vec<u8> {
    let mut body = [VALID.to_ne_bytes(), [0; 8]].concat();
    body.extend(attributes_of(node, size));
    whole(unique, &body)
}

/// To `Open`.
pub(crate) fn opened(unique: u64, reads: Reads) -> Vec<u8> {
    let flags: u64 = match reads {
        Reads::Cached => 2,
        Reads::Direct => 1,
    };
    whole(unique, &[0_u64.to_ne_bytes(), flags.to_ne_bytes()].concat())
}

fn attributes_of(node: u64, size: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(88);
    for word in [node, size, size.div_ceil(512), 0, 0, 0] {
        bytes.extend(word.to_ne_bytes());
    }
    let mode = if node == ROOT { DIRECTORY } else { FILE };
    let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    for word in [0, 0, 0, mode, 1, user, group, 0, 4096, 0] {
        bytes.extend(word.to_ne_bytes());
    }
    bytes
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn request(call: u32, body: &[u8]) -> Vec<u8> {
        let mut bytes = u32::try_from(40 + body.len()).unwrap().to_ne_bytes().to_vec();
        bytes.extend(call.to_ne_bytes());
        bytes.extend(7_u64.to_ne_bytes());
        bytes.extend(3_u64.to_ne_bytes());
        bytes.resize(40, 0);
        bytes.extend(body);
        bytes
    }

    #[test]
    fn requests_are_understood() {
        let read = [9_u64.to_ne_bytes(), 4096_u64.to_ne_bytes(), 5_u64.to_ne_bytes(), [0; 8], [0; 8]].concat();
        let cases = [
            (request(1, b"pages-1.img\0"), Call::LookUp { name: b"pages-1.img" }),
            (request(15, &read), Call::Read { offset: 4096, size: 5 }),
            (request(14, &[0; 8]), Call::Open),
            (request(36, &[0; 8]), Call::Other),
        ];
        for (bytes, call) in cases {
            assert_eq!(Request::parse(&bytes), Some(Request { unique: 7, node: 3, call }));
        }
        assert_eq!(Request::parse(&request(15, &read[..16])), None);
        assert_eq!(Request::parse(&request(1, b"endless")), None);
    }

    #[test]
    fn answers_say_how_long_they_are() {
        let lengths = [begun(1, 0, u32::MAX).len(), found(1, 2, 3).len(), attributes(1, 2, 3).len()];
        assert_eq!(lengths, [16 + 64, 16 + 128, 16 + 104]);
        for answer in [begun(1, 0, 0), found(1, 2, 3), opened(1, Reads::Direct), refusal(1, rustix::io::Errno::IO)] {
            assert_eq!(answer[..4], u32::try_from(answer.len()).unwrap().to_ne_bytes());
        }
        assert_eq!(refusal(1, rustix::io::Errno::IO)[4..8], (-5_i32).to_ne_bytes());
        assert_eq!(head(1, 4096)[..4], 4112_u32.to_ne_bytes());
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_reader_panic(bytes: Vec<u8>, call in 0_u32..60) {
            let _ = Request::parse(&bytes);
            let _ = Request::parse(&request(call, &bytes));
        }
    }
}
