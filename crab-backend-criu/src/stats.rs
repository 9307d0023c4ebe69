//! CRIU's `stats-dump`: how long the tasks were stopped.

use std::time::Duration;

use prost::Message;

use crate::proto::Stats;

/// The file begins with two magic numbers (a service image, of statistics) and the length of the message.
const MAGIC: [u32; 2] = [0x5510_5940, 0x5709_3306];

/// How long the tasks were stopped by a dump, from the contents of its `stats-dump`. `None` where it is no such file.
pub(crate) fn stopped(bytes: &[u8]) -> Option<Duration> {
    let (head, rest) = bytes.split_at_checked(12)?;
    let word = |at: usize| head.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes);
    if [word(0)?, word(4)?] != MAGIC {
        return None;
    }
    let length = usize::try_from(word(8)?).ok()?;
    let dump = Stats::decode(rest.get(..length)?).ok()?.dump?;
    Some(Duration::from_micros(u64::from(dump.freezing_time) + u64::from(dump.frozen_time)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn file(magic: [u32; 2], message: &[u8]) -> Vec<u8> {
        let length = u32::try_from(message.len()).unwrap();
        [magic[0], magic[1], length].into_iter().flat_map(u32::to_le_bytes).chain(message.iter().copied()).collect()
    }

    #[test]
    fn both_times_count() {
        // 1: {1: 100, 2: 1000}
        let bytes = file(MAGIC, &[10, 5, 8, 100, 16, 0xe8, 7]);
        assert_eq!(stopped(&bytes), Some(Duration::from_micros(1100)));
        assert_eq!(stopped(&file([1, 2], &[10, 5, 8, 100, 16, 0xe8, 7])), None);
        assert_eq!(stopped(&bytes[..bytes.len() - 1]), None);
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_reader_panic(bytes: Vec<u8>) {
            let _ = stopped(&bytes);
        }

        #[test]
        fn no_message_makes_the_reader_panic(message: Vec<u8>) {
            let _ = stopped(&file(MAGIC, &message));
        }
    }
}
