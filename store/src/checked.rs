//! Small documents with a checksum behind them, for objects whose name does not commit to their bytes.
//!
//! The object is the document, a newline, the 64 hex digits of its BLAKE3 digest, and a newline: still
//! readable with `cat`.

use layer::{Digest, Error, Result};

/// Bytes that the checksum adds.
const SUFFIX_BYTES: usize = 66;

/// The stored form of a document.
pub(crate) fn seal(mut document: Vec<u8>) -> Vec<u8> {
    let digest = Digest::of(&document);
    document.extend_from_slice(format!("\n{digest}\n").as_bytes());
    document
}

/// The document in a stored form; anything that was changed or cut is `Corrupt`.
pub(crate) fn unseal(stored: &[u8]) -> Result<&[u8]> {
    let split = stored.len().checked_sub(SUFFIX_BYTES).map(|at| stored.split_at(at));
    let sealed = split
        .filter(|(document, suffix)| format!("\n{}\n", Digest::of(document)).as_bytes() == *suffix);
    sealed.map(|(document, _)| document).ok_or_else(|| Error::corrupt("wrong checksum"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_flipped_bit_and_any_cut_is_found() {
        let stored = seal(b"{\"a\":1}".to_vec());
        assert_eq!(unseal(&stored).unwrap(), b"{\"a\":1}");
        for at in 0..stored.len() {
            assert!(unseal(&stored[..at]).is_err());
            let mut flipped = stored.clone();
            flipped[at] ^= 1;
            assert!(unseal(&flipped).is_err());
        }
    }
}
