//! The format in which btrfs sends a subvolume, versions 1 and 2.
//!
//! A stream is a magic, a version, and commands. A command is its length, its number, its checksum, and attributes; an
//! attribute is its number, its length and its value.

use std::io::{ErrorKind as Io, Read};

use crab_core::{Error, ErrorKind, Result};

use crate::crc32c;
use crate::subvolume::Uuid;

const MAGIC: &[u8; 13] = b"btrfs-stream\0";
/// The newest version that is understood.
pub(crate) const NEWEST: u32 = 2;
/// Far more than the kernel puts into one command.
const LONGEST: usize = 4 << 20;

/// A point in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Time {
    pub(crate) seconds: i64,
    pub(crate) nanoseconds: u32,
}

/// What a new thing is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Make<'a> {
    File,
    Directory,
    Node { mode: u32, device: u64 },
    Fifo,
    Socket,
    Link { target: &'a [u8] },
}

/// One step from the parent's tree, or from nothing, to the tree that was sent. Paths are those of the moment at which
/// the step is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Command<'a> {
    /// Begins with an empty tree.
    Subvolume {
        uuid: Uuid,
        transaction: u64,
    },
    /// Begins with the tree of another subvolume.
    Snapshot {
        uuid: Uuid,
        transaction: u64,
        base: Uuid,
    },
    Make {
        path: &'a [u8],
        inode: u64,
        what: Make<'a>,
    },
    Rename {
        path: &'a [u8],
        to: &'a [u8],
    },
    /// One more name for a file.
    Link {
        path: &'a [u8],
        existing: &'a [u8],
    },
    Unlink {
        path: &'a [u8],
    },
    RemoveDirectory {
        path: &'a [u8],
    },
    SetAttribute {
        path: &'a [u8],
        name: &'a [u8],
        value: &'a [u8],
    },
    RemoveAttribute {
        path: &'a [u8],
        name: &'a [u8],
    },
    Write {
        path: &'a [u8],
        offset: u64,
        data: &'a [u8],
    },
    /// Shares a range of another file.
    Clone {
        path: &'a [u8],
        offset: u64,
        length: u64,
        from: Uuid,
        from_path: &'a [u8],
        from_offset: u64,
    },
    Truncate {
        path: &'a [u8],
        size: u64,
    },
    Allocate {
        path: &'a [u8],
        mode: u32,
        offset: u64,
        length: u64,
    },
    SetMode {
        path: &'a [u8],
        mode: u32,
    },
    SetOwner {
        path: &'a [u8],
        user: u32,
        group: u32,
    },
    SetTimes {
        path: &'a [u8],
        accessed: Time,
        modified: Time,
    },
    /// Flags of a file; nobody applies them yet.
    SetFlags {
        path: &'a [u8],
    },
    /// In a stream without data: a range that may hold other bytes.
    Extent {
        path: &'a [u8],
        offset: u64,
        length: u64,
    },
    End,
}

/// Reads commands one by one.
pub(crate) struct Commands<R> {
    raw: Raw<R>,
    buffer: Vec<u8>,
}

/// Reads commands one by one as the bytes that they are.
pub(crate) struct Raw<R> {
    input: R,
    version: u32,
}

/// Length, number and checksum of a command.
const HEAD: usize = 10;

pub(crate) fn damaged(what: &str) -> Error {
    Error::new(ErrorKind::Corrupt, format!("the stream of a subvolume {what}"))
}

fn fill(input: &mut impl Read, buffer: &mut [u8]) -> Result<()> {
    input.read_exact(buffer).map_err(|error| match error.kind() {
        Io::UnexpectedEof => damaged("ends early"),
        _ => Error::io("read the stream of a subvolume", error),
    })
}

impl<R: Read> Raw<R> {
    /// Reads the beginning of a stream, and appends it to `bytes`.
    pub(crate) fn begin(mut input: R, bytes: &mut Vec<u8>) -> Result<Self> {
        let (mut magic, mut version) = ([0; MAGIC.len()], [0; 4]);
        fill(&mut input, &mut magic)?;
        if magic != *MAGIC {
            return Err(damaged("does not begin as one"));
        }
        fill(&mut input, &mut version)?;
        bytes.extend(magic);
        bytes.extend(version);
        let version = u32::from_le_bytes(version);
        if !(1..=NEWEST).contains(&version) {
            return Err(damaged(&format!("has the version {version}, and {NEWEST} is the newest that is understood")));
        }
        Ok(Self { input, version })
    }

    /// Appends the next command to `bytes`, as it comes and unchecked.
    pub(crate) fn next(&mut self, bytes: &mut Vec<u8>) -> Result<Step> {
        let mut head = [0; HEAD];
        fill(&mut self.input, &mut head)?;
        let [a, b, c, d, number @ .., _, _, _, _] = head;
        let length = u32::from_le_bytes([a, b, c, d]) as usize;
        if length > LONGEST {
            return Err(damaged("holds a command that is too long"));
        }
        bytes.extend(head);
        let begin = bytes.len();
        bytes.resize(begin + length, 0);
        let body = bytes.get_mut(begin..).unwrap_or_default();
        fill(&mut self.input, body)?;
        match u16::from_le_bytes(number) {
            number @ MAKE_FIRST..=MAKE_LAST => match Attributes::read(body, self.version)?.command(number)? {
                Command::Make { inode, .. } => Ok(Step::Make { inode }),
                _ => Ok(Step::Other),
            },
            END => Ok(Step::End),
            _ => Ok(Step::Other),
        }
    }
}

/// What a command is, for who passes it on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Make { inode: u64 },
    End,
    Other,
}

const MAKE_FIRST: u16 = 3;
const MAKE_LAST: u16 = 8;
const END: u16 = 21;

impl<R: Read> Commands<R> {
    /// Reads the beginning of a stream.
    pub(crate) fn begin(input: R) -> Result<Self> {
        Ok(Self { raw: Raw::begin(input, &mut Vec::new())?, buffer: Vec::new() })
    }

    /// The next command; the last one is [`Command::End`].
    pub(crate) fn next(&mut self) -> Result<Command<'_>> {
        self.buffer.clear();
        self.raw.next(&mut self.buffer)?;
        // It read at least that.
        let (head, body) = self.buffer.split_first_chunk::<HEAD>().ok_or_else(|| damaged("ends early"))?;
        let [.., a, b, e, f, g, h] = *head;
        // The checksum counts as zero in itself.
        let crc = crc32c::update(crc32c::update(0, &[&head[..6], &[0; 4]].concat()), body);
        if crc != u32::from_le_bytes([e, f, g, h]) {
            return Err(damaged("holds a command with a wrong checksum"));
        }
        Attributes::read(body, self.raw.version)?.command(u16::from_le_bytes([a, b]))
    }

    /// What the commands were read from.
    pub(crate) fn into_input(self) -> R {
        self.raw.input
    }
}

/// Attributes by number.
#[derive(Debug)]
struct Attributes<'a>([Option<&'a [u8]>; 36]);

mod attribute {
    pub(super) const UUID: usize = 1;
    pub(super) const TRANSACTION: usize = 2;
    pub(super) const INODE: usize = 3;
    pub(super) const SIZE: usize = 4;
    pub(super) const MODE: usize = 5;
    pub(super) const USER: usize = 6;
    pub(super) const GROUP: usize = 7;
    pub(super) const DEVICE: usize = 8;
    pub(super) const MODIFIED: usize = 10;
    pub(super) const ACCESSED: usize = 11;
    pub(super) const ATTRIBUTE_NAME: usize = 13;
    pub(super) const ATTRIBUTE_VALUE: usize = 14;
    pub(super) const PATH: usize = 15;
    pub(super) const PATH_TO: usize = 16;
    pub(super) const PATH_LINK: usize = 17;
    pub(super) const OFFSET: usize = 18;
    pub(super) const DATA: usize = 19;
    pub(super) const CLONE_UUID: usize = 20;
    pub(super) const CLONE_PATH: usize = 22;
    pub(super) const CLONE_OFFSET: usize = 23;
    pub(super) const CLONE_LENGTH: usize = 24;
    pub(super) const ALLOCATE_MODE: usize = 25;
}
use attribute as at;

impl<'a> Attributes<'a> {
    fn read(mut bytes: &'a [u8], version: u32) -> Result<Self> {
        let cut = || damaged("holds a command that is cut short");
        let mut found = Self([None; 36]);
        while !bytes.is_empty() {
            let (number, rest) = bytes.split_first_chunk().ok_or_else(cut)?;
            let number = usize::from(u16::from_le_bytes(*number));
            let value;
            if number == at::DATA && version >= 2 {
                // Always the last one, and without a length, which could not hold it.
                (value, bytes) = (rest, &[]);
            } else {
                let (length, rest) = rest.split_first_chunk().ok_or_else(cut)?;
                (value, bytes) = rest.split_at_checked(usize::from(u16::from_le_bytes(*length))).ok_or_else(cut)?;
            }
            *found.0.get_mut(number).ok_or_else(|| damaged("holds an attribute that is not known"))? = Some(value);
        }
        Ok(found)
    }

    fn bytes(&self, number: usize) -> Result<&'a [u8]> {
        self.0[number].ok_or_else(|| damaged("holds a command that lacks an attribute"))
    }

    fn array<const N: usize>(&self, number: usize) -> Result<[u8; N]> {
        self.bytes(number)?.try_into().map_err(|_| damaged("holds an attribute of a wrong length"))
    }

    fn number(&self, number: usize) -> Result<u64> {
        self.array(number).map(u64::from_le_bytes)
    }

    /// A number that is sent in 64 bits and has 32.
    fn small(&self, number: usize) -> Result<u32> {
        u32::try_from(self.number(number)?).map_err(|_| damaged("holds a number that is too large"))
    }

    fn uuid(&self, number: usize) -> Result<Uuid> {
        self.array(number).map(Uuid)
    }

    fn time(&self, number: usize) -> Result<Time> {
        let bytes: [u8; 12] = self.array(number)?;
        let [a, b, c, d, e, f, g, h, nanoseconds @ ..] = bytes;
        let seconds = i64::from_le_bytes([a, b, c, d, e, f, g, h]);
        Ok(Time { seconds, nanoseconds: u32::from_le_bytes(nanoseconds) })
    }

    /// A path that stays below the root; the root itself is the empty one.
    fn path(&self, number: usize) -> Result<&'a [u8]> {
        let path = self.bytes(number)?;
        let good = |name: &[u8]| !name.is_empty() && name != b"." && name != b".." && name.len() <= 255;
        if path.contains(&0) || !(path.is_empty() || path.split(|byte| *byte == b'/').all(good)) {
            return Err(damaged("holds a path that leads astray"));
        }
        Ok(path)
    }

    fn command(&self, number: u16) -> Result<Command<'a>> {
        let path = || self.path(at::PATH);
        let make = |what| Ok(Command::Make { path: path()?, inode: self.number(at::INODE).unwrap_or(0), what });
        match number {
            1 => Ok(Command::Subvolume { uuid: self.uuid(at::UUID)?, transaction: self.number(at::TRANSACTION)? }),
            2 => Ok(Command::Snapshot {
                uuid: self.uuid(at::UUID)?,
                transaction: self.number(at::TRANSACTION)?,
                base: self.uuid(at::CLONE_UUID)?,
            }),
            3 => make(Make::File),
            4 => make(Make::Directory),
            5 => make(Make::Node { mode: self.small(at::MODE)?, device: self.number(at::DEVICE)? }),
            6 => make(Make::Fifo),
            7 => make(Make::Socket),
            8 => make(Make::Link { target: self.bytes(at::PATH_LINK)? }),
            9 => Ok(Command::Rename { path: path()?, to: self.path(at::PATH_TO)? }),
            10 => Ok(Command::Link { path: path()?, existing: self.path(at::PATH_LINK)? }),
            11 => Ok(Command::Unlink { path: path()? }),
            12 => Ok(Command::RemoveDirectory { path: path()? }),
            13 => Ok(Command::SetAttribute {
                path: path()?,
                name: self.bytes(at::ATTRIBUTE_NAME)?,
                value: self.bytes(at::ATTRIBUTE_VALUE)?,
            }),
            14 => Ok(Command::RemoveAttribute { path: path()?, name: self.bytes(at::ATTRIBUTE_NAME)? }),
            15 => Ok(Command::Write { path: path()?, offset: self.number(at::OFFSET)?, data: self.bytes(at::DATA)? }),
            16 => Ok(Command::Clone {
                path: path()?,
                offset: self.number(at::OFFSET)?,
                length: self.number(at::CLONE_LENGTH)?,
                from: self.uuid(at::CLONE_UUID)?,
                from_path: self.path(at::CLONE_PATH)?,
                from_offset: self.number(at::CLONE_OFFSET)?,
            }),
            17 => Ok(Command::Truncate { path: path()?, size: self.number(at::SIZE)? }),
            18 => Ok(Command::SetMode { path: path()?, mode: self.small(at::MODE)? }),
            19 => Ok(Command::SetOwner { path: path()?, user: self.small(at::USER)?, group: self.small(at::GROUP)? }),
            20 => Ok(Command::SetTimes {
                path: path()?,
                accessed: self.time(at::ACCESSED)?,
                modified: self.time(at::MODIFIED)?,
            }),
            END => Ok(Command::End),
            22 => {
                Ok(Command::Extent { path: path()?, offset: self.number(at::OFFSET)?, length: self.number(at::SIZE)? })
            }
            23 => Ok(Command::Allocate {
                path: path()?,
                mode: u32::from_le_bytes(self.array(at::ALLOCATE_MODE)?),
                offset: self.number(at::OFFSET)?,
                length: self.number(at::SIZE)?,
            }),
            24 => Ok(Command::SetFlags { path: path()? }),
            _ => Err(damaged(&format!("holds the command {number}, which is not known"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn command(number: u16, attributes: &[(u16, &[u8])]) -> Vec<u8> {
        let mut payload = Vec::new();
        for (number, value) in attributes {
            payload.extend(number.to_le_bytes());
            payload.extend(u16::try_from(value.len()).unwrap().to_le_bytes());
            payload.extend(*value);
        }
        let mut bytes = u32::try_from(payload.len()).unwrap().to_le_bytes().to_vec();
        bytes.extend(number.to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(payload);
        let crc = crc32c::update(0, &bytes);
        bytes[6..10].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    fn stream(version: u32, commands: &[Vec<u8>]) -> Vec<u8> {
        [MAGIC.to_vec(), version.to_le_bytes().to_vec(), commands.concat()].concat()
    }

    fn first_error(bytes: &[u8]) -> Error {
        let mut commands = match Commands::begin(bytes) {
            Ok(commands) => commands,
            Err(error) => return error,
        };
        loop {
            match commands.next() {
                Ok(Command::End) => panic!("the stream was read to its end"),
                Ok(_) => {}
                Err(error) => return error,
            }
        }
    }

    #[test]
    fn both_versions_are_read() {
        let end = command(21, &[]);
        let write = command(15, &[(15, b"a/b"), (18, &7_u64.to_le_bytes()), (19, b"data")]);
        let bytes = stream(1, &[write, end.clone()]);
        let mut commands = Commands::begin(&bytes[..]).unwrap();
        assert_eq!(commands.next().unwrap(), Command::Write { path: b"a/b", offset: 7, data: b"data" });
        assert_eq!(commands.next().unwrap(), Command::End);

        // In version 2 the data runs to the end of its command.
        let mut payload = command(15, &[(15, b"a/b"), (18, &7_u64.to_le_bytes())])[10..].to_vec();
        payload.extend(19_u16.to_le_bytes());
        payload.extend(b"data");
        let mut bytes = u32::try_from(payload.len()).unwrap().to_le_bytes().to_vec();
        bytes.extend(15_u16.to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(payload);
        let crc = crc32c::update(0, &bytes);
        bytes[6..10].copy_from_slice(&crc.to_le_bytes());
        let bytes = stream(2, &[bytes, end]);
        let mut commands = Commands::begin(&bytes[..]).unwrap();
        assert_eq!(commands.next().unwrap(), Command::Write { path: b"a/b", offset: 7, data: b"data" });
    }

    #[test]
    fn paths_that_lead_out_of_the_tree_are_refused() {
        for bad in [&b"/etc/passwd"[..], b"..", b"a/../../b", b"a//b", b"a/", b"./a", b"a\0b", &[b'x'; 256]] {
            let error = first_error(&stream(1, &[command(11, &[(15, bad)])]));
            assert_eq!(error.kind(), ErrorKind::Corrupt);
            assert!(error.to_string().contains("leads astray"), "{error}");
            first_error(&stream(1, &[command(9, &[(15, b"a"), (16, bad)])]));
            first_error(&stream(1, &[command(10, &[(15, b"a"), (17, bad)])]));
        }
    }

    #[test]
    fn other_versions_and_commands_are_refused() {
        for version in [0, 3, u32::MAX] {
            assert!(first_error(&stream(version, &[])).to_string().contains("version"));
        }
        assert!(first_error(&stream(1, &[command(99, &[])])).to_string().contains("not known"));
        assert!(first_error(&stream(1, &[command(17, &[(15, b"a")])])).to_string().contains("lacks"));
        assert!(first_error(&stream(1, &[command(17, &[(15, b"a"), (4, b"short")])])).to_string().contains("length"));
    }

    #[test]
    fn every_flipped_bit_and_every_cut_is_noticed() {
        let commands = [command(3, &[(15, b"a"), (3, &1_u64.to_le_bytes())]), command(21, &[])];
        let bytes = stream(1, &commands);
        for end in 0..bytes.len() {
            first_error(&bytes[..end]);
            for bit in 0..8 {
                let mut damaged = bytes.clone();
                damaged[end] ^= 1 << bit;
                first_error(&damaged);
            }
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_reader_panic(bytes: Vec<u8>, number: u16, value: Vec<u8>, version in 1..3_u32) {
            let _ = first_error_or_end(&bytes);
            let _ = first_error_or_end(&stream(version, std::slice::from_ref(&bytes)));
            if value.len() < 60000 {
                for command_number in 0..30 {
                    let one = command(command_number, &[(15, b"p"), (number % 40, &value)]);
                    let _ = first_error_or_end(&stream(version, &[one]));
                }
            }
        }
    }

    fn first_error_or_end(bytes: &[u8]) -> Result<()> {
        let mut commands = Commands::begin(bytes)?;
        while commands.next()? != Command::End {}
        Ok(())
    }
}
