//! The file in which a zygote notes how each of its children ended: fixed records, the oldest is
//! overwritten. Whoever asks after the zygote or its runtime has died finds the ends here.
//!
//! Written by the zygote, read by any later runtime, so the format may only grow. It holds for one start of the
//! machine. CRASH: a record is one small write into the page cache, which outlives every process.

/// Bytes of a record and of the header.
pub const RECORD_BYTES: usize = 16;

/// Records after the header; with more ends than these while no runtime lives, the oldest are lost.
pub const RECORDS: u64 = 32 << 10;

/// Length of the file.
pub const FILE_BYTES: u64 = (RECORDS + 1) * RECORD_BYTES as u64;

const MAGIC: u32 = 0x4c5a_4531;

/// Whose file it is; its first record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Process id of the zygote.
    pub pid: i32,
    /// The kernel's number for that process.
    pub number: u64,
}

impl Header {
    /// The first record.
    pub fn encode(&self) -> [u8; RECORD_BYTES] {
        record(MAGIC, self.pid, self.number)
    }

    /// `None` for anything else.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (word, pid, number) = parts(bytes)?;
        (word == MAGIC).then_some(Self { pid, number })
    }
}

/// The end of one process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit {
    /// The kernel's number for the process.
    pub number: u64,
    /// Exit code, or the number of the signal.
    pub value: i32,
    /// Whether a signal ended it.
    pub is_signal: bool,
}

impl Exit {
    /// As a record.
    pub fn encode(&self) -> [u8; RECORD_BYTES] {
        record(1 + u32::from(self.is_signal), self.value, self.number)
    }

    /// `None`: nothing is written there yet.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (word, value, number) = parts(bytes)?;
        matches!(word, 1 | 2).then_some(Self { number, value, is_signal: word == 2 })
    }

    /// Where the end number `count` (the first is 0) is written.
    pub fn offset(count: u64) -> u64 {
        (1 + count % RECORDS) * RECORD_BYTES as u64
    }
}

fn record(word: u32, value: i32, number: u64) -> [u8; RECORD_BYTES] {
    let mut bytes = [0; RECORD_BYTES];
    bytes[..4].copy_from_slice(&word.to_le_bytes());
    bytes[4..8].copy_from_slice(&value.to_le_bytes());
    bytes[8..].copy_from_slice(&number.to_le_bytes());
    bytes
}

fn parts(bytes: &[u8]) -> Option<(u32, i32, u64)> {
    let word = u32::from_le_bytes(bytes.get(..4)?.try_into().ok()?);
    let value = i32::from_le_bytes(bytes.get(4..8)?.try_into().ok()?);
    let number = u64::from_le_bytes(bytes.get(8..16)?.try_into().ok()?);
    Some((word, value, number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_round_trip_and_nothing_else_is_one() {
        let header = Header { pid: 77, number: u64::MAX - 1 };
        assert_eq!(Header::decode(&header.encode()), Some(header));
        for is_signal in [false, true] {
            let exit = Exit { number: 9, value: -3, is_signal };
            assert_eq!(Exit::decode(&exit.encode()), Some(exit));
            assert_eq!(Header::decode(&exit.encode()), None);
        }
        assert_eq!(Exit::decode(&[0; RECORD_BYTES]), None);
        assert_eq!(Exit::decode(&header.encode()), None);
        assert_eq!(Exit::decode(&[1; 3]), None);
        assert_eq!(Exit::offset(RECORDS), Exit::offset(0));
        assert_eq!(Exit::offset(RECORDS - 1) + RECORD_BYTES as u64, FILE_BYTES);
    }
}
