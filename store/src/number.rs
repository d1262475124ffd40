//! Numbered entries whose names count down, so that a listing in byte order shows the newest first.

use crate::key::Key;
use layer::{Error, Result};

const DIGITS: usize = 20;

/// The last component of the name of entry `number`.
pub(crate) fn name_of(number: u64) -> String {
    format!("{:0DIGITS$}", u64::MAX - number)
}

/// The number of an entry from its full name.
pub(crate) fn number_of(full_name: &str) -> Result<u64> {
    let name = full_name.rsplit('/').next().unwrap_or(full_name);
    let inverse = name
        .parse::<u64>()
        .ok()
        .filter(|_| name.len() == DIGITS && name.bytes().all(|byte| byte.is_ascii_digit()));
    let number = inverse.map(|inverse| u64::MAX - inverse).filter(|number| *number > 0);
    number.ok_or_else(|| Error::corrupt(format!("object {full_name} is no numbered entry")))
}

/// The name of entry `number` in a directory of entries (with its slash).
pub(crate) fn key_in(directory: &str, number: u64) -> Result<Key> {
    Key::new(format!("{directory}{}", name_of(number)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_entries_sort_first() {
        for number in [1, 2, 9, 10, 1_000_000, u64::MAX - 1] {
            assert_eq!(number_of(&format!("a/b/{}", name_of(number))).unwrap(), number);
            assert!(name_of(number + 1) < name_of(number));
        }
        for bad in ["", "a", "1", "a/18446744073709551615", "+8446744073709551615"] {
            assert!(number_of(bad).is_err(), "{bad}");
        }
    }
}
