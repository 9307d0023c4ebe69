//! CRC-32C, by which btrfs guards what it sends.

/// The reflected polynomial of Castagnoli.
const POLYNOMIAL: u32 = 0x82f6_3b78;

/// `TABLES[k][b]` is the effect of byte `b` followed by `k` zero bytes.
static TABLES: [[u32; 256]; 8] = tables();

const fn tables() -> [[u32; 256]; 8] {
    let mut tables = [[0; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ POLYNOMIAL } else { crc >> 1 };
            bit += 1;
        }
        tables[0][byte] = crc;
        byte += 1;
    }
    let mut table = 1;
    while table < 8 {
        let mut byte = 0;
        while byte < 256 {
            let before = tables[table - 1][byte];
            tables[table][byte] = before >> 8 ^ tables[0][(before & 0xff) as usize];
            byte += 1;
        }
        table += 1;
    }
    tables
}

/// Goes on from `crc`. Nothing is inverted at either end, as in the streams of btrfs; begin with 0 there.
pub(crate) fn update(mut crc: u32, bytes: &[u8]) -> u32 {
    let (eights, rest) = bytes.as_chunks::<8>();
    for eight in eights {
        let word = u64::from_le_bytes(*eight) ^ u64::from(crc);
        crc = (0..8).fold(0, |crc, k| crc ^ TABLES[7 - k][(word >> (8 * k) & 0xff) as usize]);
    }
    rest.iter().fold(crc, |crc, byte| crc >> 8 ^ TABLES[0][((crc ^ u32::from(*byte)) & 0xff) as usize])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_check_value_of_the_standard_comes_out() {
        assert_eq!(!update(!0, b"123456789"), 0xe306_9283);
    }

    proptest! {
        #[test]
        fn where_the_bytes_are_cut_makes_no_difference(bytes: Vec<u8>, cut: usize) {
            let (a, b) = bytes.split_at(if bytes.is_empty() { 0 } else { cut % bytes.len() });
            prop_assert_eq!(update(update(0, a), b), update(0, &bytes));
        }
    }
}
