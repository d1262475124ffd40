//! An index of every version, put together here, is exchanged field by field.

use super::*;
use proptest::prelude::*;

/// An index as git writes one, put together here: files `(path, flags, extended flags)` of size 5.
fn index(version: u32, algorithm: Algorithm, files: &[(&str, u16, u16)], rest: &[u8]) -> Vec<u8> {
    let mut bytes =
        [&b"DIRC"[..], &version.to_be_bytes(), &(files.len() as u32).to_be_bytes()].concat();
    let mut before = "";
    for (number, (path, flags, extended)) in files.iter().enumerate() {
        let start = bytes.len();
        let mode = 0o100_644;
        for word in [1, 2, 3, 4, 5, number as u32, mode, 7, 8, 5] {
            bytes.extend_from_slice(&u32::to_be_bytes(word));
        }
        bytes.resize(bytes.len() + algorithm.bytes(), number as u8 + 1);
        let flags = flags | path.len().min(0xfff) as u16;
        bytes.extend_from_slice(&flags.to_be_bytes());
        if flags & FLAG_EXTENDED != 0 {
            bytes.extend_from_slice(&extended.to_be_bytes());
        }
        if version == 4 {
            let same = before.bytes().zip(path.bytes()).take_while(|(a, b)| a == b).count();
            bytes.push((before.len() - same) as u8);
            bytes.extend_from_slice(&path.as_bytes()[same..]);
            bytes.push(0);
            before = path;
        } else {
            bytes.extend_from_slice(path.as_bytes());
            let length = (bytes.len() - start + 8) & !7;
            bytes.resize(start + length, 0);
        }
    }
    bytes.extend_from_slice(rest);
    let seal = algorithm.digest(&bytes);
    [bytes, seal].concat()
}

const FILES: [(&str, u16, u16); 4] = [
    ("a", 0, 0),
    ("dir/conflict", 0x2000, 0),
    ("dir/intended", FLAG_EXTENDED, INTENT_TO_ADD),
    ("dir/file", 0, 0),
];
const EXTENSION: &[u8] = b"TREE\0\0\0\x03abc";

fn samples() -> Vec<(u32, Algorithm, Vec<u8>)> {
    let all = Algorithm::ALL
        .into_iter()
        .flat_map(|algorithm| [2, 3, 4].map(|version| (version, algorithm)));
    all.map(|(version, algorithm)| {
        // Version 2 has no extended flags.
        let mut files = FILES.to_vec();
        files.retain(|(_, flags, _)| version != 2 || flags & FLAG_EXTENDED == 0);
        (version, algorithm, index(version, algorithm, &files, EXTENSION))
    })
    .collect()
}

#[test]
fn a_refresh_changes_the_fields_of_stat_and_the_seal_and_nothing_else() {
    for (version, algorithm, bytes) in samples() {
        let mut parsed = IndexFile::parse(bytes.clone()).unwrap();
        assert_eq!(parsed.algorithm, algorithm);
        let known: Vec<_> =
            parsed.entries.iter().map(|entry| (&entry.path[..], entry.tracked)).collect();
        let mut wanted = vec![
            (&b"a"[..], Tracked::File),
            (b"dir/conflict", Tracked::Other),
            (b"dir/intended", Tracked::Other),
            (b"dir/file", Tracked::File),
        ];
        wanted.retain(|(path, _)| version != 2 || !path.ends_with(b"intended"));
        assert_eq!(known, wanted, "version {version}");
        let last = parsed.entries.len() - 1;
        let mtime = Timestamp { secs: 0x1_0000_0009, nanos: 10 };
        let shown = Shown { mtime, inode: 0xffff_0000_0000_0011, uid: 12, gid: 13, size: 1 << 32 };
        parsed.refresh(last, &shown);
        let at = parsed.entries[last].at;
        let refreshed = parsed.into_bytes();
        let words: Vec<u32> = (0..10).map(|number| word(&refreshed, at + 4 * number)).collect();
        assert_eq!(words, [9, 10, 9, 10, 0, 0x11, 0o100_644, 12, 13, 0x8000_0000]);
        let end = bytes.len() - algorithm.bytes();
        assert_eq!(refreshed.len(), bytes.len());
        assert_eq!(refreshed[..at], bytes[..at]);
        assert_eq!(refreshed[at + STAT_BYTES..end], bytes[at + STAT_BYTES..end]);
        assert_eq!(refreshed[end..], algorithm.digest(&refreshed[..end])[..]);
    }
}

#[test]
fn an_index_without_a_seal_gets_none() {
    for (_, algorithm, mut bytes) in samples() {
        let end = bytes.len() - algorithm.bytes();
        bytes[end..].fill(0);
        let mut parsed = IndexFile::parse(bytes).unwrap();
        assert_eq!(parsed.algorithm, algorithm);
        parsed.distrust(0);
        let at = parsed.entries[0].at;
        let written = parsed.into_bytes();
        assert_eq!(word(&written, at + 36), 0);
        assert!(written[end..].iter().all(|byte| *byte == 0));
    }
}

#[test]
fn what_is_not_understood_to_the_last_byte_is_no_index() {
    let sha1 = Algorithm::Sha1;
    let parse = |version, rest: &[u8]| IndexFile::parse(index(version, sha1, &FILES[..1], rest));
    assert!(parse(2, EXTENSION).is_some());
    assert!(parse(4, b"sdir\0\0\0\0").is_some());
    assert!(parse(2, b"link\0\0\0\x02ab").is_none(), "a split index");
    assert!(parse(5, b"").is_none(), "an unknown version");
    assert!(parse(2, b"TREE\0\0\0\x09abc").is_none(), "an extension that is longer than the file");
    assert!(parse(2, b"x").is_none(), "something behind the entries");
    let mut broken = index(2, sha1, &FILES[..1], b"");
    broken[20] ^= 1;
    assert!(IndexFile::parse(broken).is_none(), "another digest");
}

proptest! {
    #[test]
    fn damaged_indexes_are_refused_or_read(
        sample in 0..6_usize,
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        cut in any::<prop::sample::Index>(),
    ) {
        let (_, algorithm, mut bytes) = samples().swap_remove(sample);
        let end = bytes.len() - algorithm.bytes();
        bytes.truncate(end);
        for (place, byte) in damage {
            let place = place.index(bytes.len());
            bytes[place] = byte;
        }
        bytes.truncate(cut.index(end + 1));
        let seal = algorithm.digest(&bytes);
        bytes.extend_from_slice(&seal);
        let length = bytes.len();
        if let Some(mut parsed) = IndexFile::parse(bytes) {
            let shown = Shown { mtime: Timestamp { secs: 1, nanos: 1 }, inode: 1, uid: 1, gid: 1, size: 1 };
            for entry in 0..parsed.entries.len() {
                parsed.refresh(entry, &shown);
            }
            let again = parsed.into_bytes();
            prop_assert_eq!(again.len(), length);
            prop_assert!(IndexFile::parse(again).is_some());
        }
    }
}
