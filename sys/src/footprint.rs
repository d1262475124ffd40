//! How much memory a daemon keeps that it does not use: free blocks of the allocator, and pages of the
//! program that only its start needed.
//!
//! All of it concerns the whole process. Nothing here changes what a program computes.

use std::ffi::c_void;
use std::io;
use std::ops::Range;

/// Heaps of the allocator at most; the default is eight a core.
#[cfg(target_env = "gnu")]
const ARENAS: i32 = 2;
/// Blocks from this size on are given back as soon as they are free.
#[cfg(target_env = "gnu")]
const LARGE_BYTES: i32 = 512 << 10;

/// Lets the allocator keep little: few heaps, and what is large or free at their end goes back to the
/// kernel. To be called before the first thread starts. Does nothing where the C library has no such
/// settings.
pub fn bound_allocator() {
    #[cfg(target_env = "gnu")]
    for (setting, value) in [
        (libc::M_ARENA_MAX, ARENAS),
        (libc::M_MMAP_THRESHOLD, LARGE_BYTES),
        (libc::M_TRIM_THRESHOLD, LARGE_BYTES),
    ] {
        // SAFETY: takes two numbers; a setting that is not known is refused.
        unsafe { libc::mallopt(setting, value) };
    }
}

/// Gives back what the allocator holds free. Takes milliseconds after much was allocated.
pub fn trim_allocator() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the allocator gives back pages that belong to no block.
    unsafe {
        libc::malloc_trim(0)
    };
}

/// Unmaps the pages of the program and its libraries that were used so far; what is used again is mapped
/// again. The start of a large program touches much that never runs later, and the kernel maps sixteen
/// pages around each. Answers the bytes that were mapped. No library may be loaded meanwhile.
pub fn let_go_of_program() -> io::Result<u64> {
    let mut let_go = 0;
    for mapping in untouched(&std::fs::read_to_string("/proc/self/smaps")?) {
        let start = std::ptr::with_exposed_provenance_mut::<c_void>(mapping.range.start);
        let bytes = mapping.range.len();
        // SAFETY: a private mapping of a file that cannot be written to and has no page of our own: all
        // of its pages come from the file, and come from there again.
        unsafe { rustix::mm::madvise(start, bytes, rustix::mm::Advice::LinuxDontNeed)? };
        let_go += mapping.resident_bytes;
    }
    Ok(let_go)
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Mapping {
    range: Range<usize>,
    resident_bytes: u64,
    own_bytes: u64,
    of_file: bool,
}

/// The mappings of files that nobody can write to and that hold nothing but the files' pages.
// INVARIANT: what the loader relocated and then protected is not among them: it has pages of its own.
fn untouched(smaps: &str) -> Vec<Mapping> {
    let mut mappings: Vec<Mapping> = Vec::new();
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        let (first, second) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        match (first.strip_suffix(':'), mappings.last_mut()) {
            (Some("Rss"), Some(last)) => last.resident_bytes = kib(second),
            (Some("Anonymous" | "Swap"), Some(last)) => last.own_bytes += kib(second),
            (None, _) => mappings.extend(header(first, second, words.next_back())),
            _ => {}
        }
    }
    mappings.retain(|mapping| mapping.of_file && mapping.own_bytes == 0);
    mappings
}

/// `START-END RIGHTS OFFSET DEVICE INODE PATH`
fn header(range: &str, rights: &str, path: Option<&str>) -> Option<Mapping> {
    let (start, end) = range.split_once('-')?;
    let address = |text| usize::from_str_radix(text, 16).ok();
    let private = rights.starts_with('r') && !rights.contains('w') && rights.ends_with('p');
    let of_file = private && path.is_some_and(|path| path.starts_with('/'));
    Some(Mapping { range: address(start)?..address(end)?, of_file, ..Mapping::default() })
}

/// A size that cannot be read counts as there, so that its mapping is left alone.
fn kib(text: &str) -> u64 {
    text.parse().map_or(u64::MAX >> 11, |kib: u64| kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_a_files_own_is_let_go() {
        let mapping = |header: &str, own: &str| {
            format!("{header}\nRss:   12 kB\nAnonymous:  {own} kB\nSwap:    0 kB\nVmFlags: rd mr\n")
        };
        let smaps = [
            mapping("1000-3000 r-xp 00000000 fe:00 7   /usr/bin/x", "0"),
            mapping("3000-4000 r--p 00002000 fe:00 7   /usr/bin/x", "4"),
            mapping("4000-5000 rw-p 00003000 fe:00 7   /usr/bin/x", "0"),
            mapping("5000-6000 r--s 00000000 fe:00 8   /usr/bin/y", "0"),
            mapping("6000-7000 r-xp 00000000 00:00 0   [vdso]", "0"),
            mapping("7000-8000 r--p 00000000 00:00 0", "0"),
            mapping("8000-9000 r--p 00000000 fe:00 9   /usr/lib/z (deleted)", "?"),
        ];
        let found = untouched(&smaps.concat());
        let expected = Mapping {
            range: 0x1000..0x3000,
            resident_bytes: 12 << 10,
            own_bytes: 0,
            of_file: true,
        };
        assert_eq!(found, [expected]);
    }

    #[test]
    fn a_process_goes_on_without_the_pages_of_its_program() {
        bound_allocator();
        let before = vec![7_u8; 1 << 20];
        trim_allocator();
        assert!(let_go_of_program().unwrap() > 0);
        assert!(before.iter().all(|byte| *byte == 7));
        assert_eq!(format!("{:?}", "again"), "\"again\"");
    }
}
