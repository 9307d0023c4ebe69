//! From where an import that broke off goes on.
//!
//! ZFS notes with what it has received up to which place of which object all of it is on the disk, and tells that as a
//! text: `1-CHECKSUM-SIZE-HEX`, where HEX is a packed list of names and values, compressed by zlib. The sending host is
//! told only what it needs of that, in a text of this backend's own.

use std::fmt;

use crab_core::{Error, ErrorKind, Result, ResumeToken};

/// How the text begins that goes to the sending host.
const PREFIX: &str = "crabzfs1";
/// Far more than the list takes.
const LARGEST: usize = 64 << 10;

/// The place in a version from which on the importer lacks it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Point {
    /// The guid of the version.
    pub(crate) version: u64,
    /// The guid of the base; `None` where all of the version is received.
    pub(crate) base: Option<u64>,
    /// The object, never 0, and the offset in it.
    pub(crate) place: (u64, u64),
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { version, base, place: (object, offset) } = self;
        write!(f, "{PREFIX}-{version:016x}-{:016x}-{object:x}-{offset:x}", base.unwrap_or(0))
    }
}

impl Point {
    /// Reads what [`Display`](fmt::Display) wrote.
    pub(crate) fn read(token: &ResumeToken) -> Result<Self> {
        let bad =
            || Error::new(ErrorKind::InvalidInput, "what an import is to be continued from is not of this backend");
        let numbers = token.0.strip_prefix(PREFIX).and_then(|rest| rest.strip_prefix('-')).ok_or_else(bad)?;
        let numbers: Vec<u64> = numbers.split('-').map(hexadecimal).collect::<Option<_>>().ok_or_else(bad)?;
        match numbers[..] {
            [version, base, object, offset] if object != 0 => {
                Ok(Self { version, base: Some(base).filter(|guid| *guid != 0), place: (object, offset) })
            }
            _ => Err(bad()),
        }
    }

    /// Reads what ZFS says of a filesystem that it received a part of. `None` where it has nothing to go on from, or says
    /// it in a way that is not known here.
    pub(crate) fn of_zfs(token: &str) -> Option<Self> {
        let packed = token.strip_prefix("1-")?.rsplit_once('-')?.1;
        let packed: Vec<u8> = packed
            .as_bytes()
            .chunks(2)
            .map(|digits| u8::try_from(hexadecimal(std::str::from_utf8(digits).ok()?)?).ok())
            .collect::<Option<_>>()?;
        // What zlib wrote ends with a checksum.
        let packed = miniz_oxide::inflate::decompress_to_vec_zlib_with_limit(&packed, LARGEST).ok()?;
        let number = |name: &str| number_in(&packed, name);
        let place = (number("object")?, number("offset")?);
        let base = number("fromguid").filter(|guid| *guid != 0);
        (place.0 != 0).then_some(Self { version: number("toguid")?, base, place })
    }
}

fn hexadecimal(digits: &str) -> Option<u64> {
    // The standard library takes a sign too.
    digits.bytes().all(|byte| byte.is_ascii_hexdigit()).then(|| u64::from_str_radix(digits, 16).ok()).flatten()
}

/// A number out of a list of names and values as they lie in this machine's memory: after a head of 12 bytes come the
/// pairs, each with its length in bytes first, of which 0 is the end.
fn number_in(mut list: &[u8], wanted: &str) -> Option<u64> {
    const NATIVE: u8 = 0;
    const NUMBER: u32 = 8;
    /// The length, that of the name (two bytes) and two of nothing, the count of values, the type.
    const HEAD: usize = 16;
    if *list.first()? != NATIVE {
        return None;
    }
    list = list.get(12..)?;
    loop {
        let length = usize::try_from(word(list)?).ok().filter(|length| *length > 0)?;
        let (pair, rest) = list.split_at_checked(length)?;
        let name_length = usize::from(u16::from_ne_bytes(*pair.get(4..)?.first_chunk()?));
        // The name ends in NUL.
        if pair.get(HEAD..HEAD + name_length)?.strip_suffix(&[0]) == Some(wanted.as_bytes()) {
            let value = pair.get((HEAD + name_length).next_multiple_of(8)..)?;
            return (word(pair.get(12..)?)? == NUMBER).then(|| value.first_chunk().copied().map(u64::from_ne_bytes))?;
        }
        list = rest;
    }
}

fn word(bytes: &[u8]) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Puts a list into the form in which ZFS tells it.
    fn told(pairs: &[(&str, u64)]) -> String {
        let mut list = vec![0, u8::from(cfg!(target_endian = "little")), 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];
        for (name, number) in pairs {
            let mut pair = (name.len() as u16 + 1).to_ne_bytes().to_vec();
            pair.extend([0; 2]);
            pair.extend([1_u32, 8].map(u32::to_ne_bytes).concat());
            pair.extend(name.bytes());
            pair.resize((pair.len() + 1 + 4).next_multiple_of(8) - 4, 0);
            pair.extend(number.to_ne_bytes());
            list.extend((pair.len() as u32 + 4).to_ne_bytes());
            list.extend(pair);
        }
        list.extend([0; 4]);
        let packed = miniz_oxide::deflate::compress_to_vec_zlib(&list, 6);
        let digits: String = packed.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("1-123456789a-{:x}-{digits}", list.len())
    }

    #[test]
    #[cfg(target_endian = "little")]
    fn what_a_real_zfs_told_is_understood() {
        let told = "1-11ea00dd53-100-789c636064000310a500c4ec50360710e72765a52697303030419460caa7a515a796806474e0f26c48f2\
                    499525a9c520b69a1e56fd25f9e9a5992940f317dcf1bed9f6973100499e132c9f97989bcac0905c9498a40b34aa44d7c8d0\
                    40d740bfc4403f29bf22b5583f3f2fd5012c696c60686a6a9996926a609a9266989aac0b9481d8c7cd80f05f727e6e41516a\
                    71717e36031c00006ed427b2";
        let point = Point { version: 0x01fd_86d9_4bdc_a002, base: None, place: (2, 0x2c_0000) };
        assert_eq!(Point::of_zfs(told), Some(point));
    }

    #[test]
    fn what_zfs_tells_is_understood() {
        let told = told(&[("fromguid", 7), ("object", 3), ("offset", 1 << 40), ("bytes", 9), ("toguid", u64::MAX)]);
        let point = Point { version: u64::MAX, base: Some(7), place: (3, 1 << 40) };
        assert_eq!(Point::of_zfs(&told), Some(point));
        assert_eq!(Point::read(&ResumeToken(point.to_string())).unwrap(), point);
    }

    #[test]
    fn without_a_place_there_is_nothing_to_go_on_from() {
        let pairs = [("object", 0), ("offset", 0), ("toguid", 5)];
        assert_eq!(Point::of_zfs(&told(&pairs)), None);
        assert_eq!(Point::of_zfs(&told(&pairs[1..])), None);
        for other in ["", "-", "1-2-3-", "1-2-3-zz", "2-2-3-00", "1-2-3-789c0300000000001"] {
            assert_eq!(Point::of_zfs(other), None, "{other}");
        }
    }

    #[test]
    fn other_texts_are_refused() {
        for other in
            ["", "crabzfs1", "crabzfs1-1-2-3", "crabzfs1-1-2-3-4-5", "crabzfs1-1-2-0-4", "crabzfs1-1-2-+3-4", "x"]
        {
            assert_eq!(Point::read(&ResumeToken(other.to_owned())).unwrap_err().kind(), ErrorKind::InvalidInput);
        }
    }

    proptest! {
        #[test]
        fn a_point_survives_the_way(version: u64, base: Option<u64>, object in 1_u64.., offset: u64) {
            let point = Point { version, base: base.filter(|guid| *guid != 0), place: (object, offset) };
            prop_assert_eq!(Point::read(&ResumeToken(point.to_string())).unwrap(), point);
        }

        #[test]
        fn no_bytes_make_the_reader_panic(bytes: Vec<u8>, text: String) {
            let _ = number_in(&[&[0][..], &bytes].concat(), "toguid");
            let _ = Point::of_zfs(&text);
            let _ = Point::read(&ResumeToken(format!("{PREFIX}-{text}")));
        }
    }
}
