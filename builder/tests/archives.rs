//! Every archive case that broke others, with its expected outcome, in one table.
//!
//! Archives are written byte by byte, so that each holds exactly what its line says. What a layer holds is
//! read back by our own reader here; the kernel is the judge in the workspace's `tests` crate.

#![allow(clippy::unwrap_used)]

mod support;
#[path = "support/tape.rs"]
mod tape;

use layer::ErrorKind;
use layer::tree::{Kind, Rdev, Timestamp};
use std::fs;
use std::io::Write;
use std::process::Command;
use support::{MemoryPublisher, View, build, options};
use tape::{Fields, Tape, record};

enum Outcome {
    /// The layer holds what the function checks.
    Kept(fn(&View)),
    /// The build fails; the error says this.
    Refused(ErrorKind, &'static str),
}
use Outcome::{Kept, Refused};

struct Case {
    name: &'static str,
    archive: fn() -> Vec<u8>,
    outcome: Outcome,
}

const CASES: &[Case] = &[
    Case {
        name: "hard link to an earlier entry: one inode, two names",
        archive: || Tape::default().file("a", b"hello").hard_link("b", "a").end(),
        outcome: Kept(|view| assert!(view.same_inode("a", "b"))),
    },
    Case {
        name: "hard link before its target: one inode, two names",
        archive: || Tape::default().hard_link("b", "d/a").file("d/a", b"hello").end(),
        outcome: Kept(|view| {
            assert!(view.same_inode("d/a", "b"));
            assert_eq!(view.text("b"), "hello");
        }),
    },
    Case {
        name: "hard link to a later hard link",
        archive: || {
            Tape::default().hard_link("c", "b").hard_link("b", "a").file("a", b"hello").end()
        },
        outcome: Kept(|view| assert!(view.same_inode("a", "b") && view.same_inode("a", "c"))),
    },
    Case {
        name: "hard link to a symbolic link links the link itself",
        archive: || Tape::default().symlink("x/l", "t").hard_link("y/m", "x/l").end(),
        outcome: Kept(|view| {
            assert!(view.same_inode("x/l", "y/m"));
            assert_eq!(view.target("y/m"), "t");
        }),
    },
    Case {
        name: "a long chain of hard links, each to a later one",
        archive: || {
            let mut tape = Tape::default();
            for at in 0..20_000 {
                tape = tape.hard_link(&format!("l{at:05}"), &format!("l{:05}", at + 1));
            }
            tape.file("l20000", b"the end").end()
        },
        outcome: Kept(|view| assert!(view.same_inode("l00000", "l20000"))),
    },
    Case {
        name: "hard links in a circle are refused by name",
        archive: || Tape::default().hard_link("a", "b").hard_link("b", "a").end(),
        outcome: Refused(ErrorKind::Invalid, "/a is a hard link to /b"),
    },
    Case {
        name: "a path of more than 32 KiB is refused",
        archive: || Tape::default().pax(&[("path", &b"d/".repeat(20_000))]).file("x", b"").end(),
        outcome: Refused(ErrorKind::Invalid, "a path of 40000 bytes"),
    },
    Case {
        name: "hard link to nothing is refused by name",
        archive: || Tape::default().hard_link("b", "gone").end(),
        outcome: Refused(ErrorKind::Invalid, "/b is a hard link to /gone"),
    },
    Case {
        name: "hard link to a directory is refused by name",
        archive: || Tape::default().directory("d/", 0o755).hard_link("b", "d").end(),
        outcome: Refused(ErrorKind::Invalid, "/b is a hard link to a directory"),
    },
    Case {
        name: "a path twice: the last one wins; a link to the first keeps the first",
        archive: || Tape::default().file("a", b"one").hard_link("b", "a").file("a", b"two").end(),
        outcome: Kept(|view| {
            assert_eq!(view.text("a"), "two");
            assert_eq!(view.text("b"), "one");
        }),
    },
    Case {
        name: "a directory that becomes a file loses its entries",
        archive: || Tape::default().file("d/inner", b"x").file("d", b"file").end(),
        outcome: Kept(|view| {
            assert_eq!(view.text("d"), "file");
            assert_eq!(view.paths(), ["d"]);
        }),
    },
    Case {
        name: "a file that becomes a directory",
        archive: || Tape::default().file("d", b"file").file("d/inner", b"x").end(),
        outcome: Kept(|view| assert_eq!(view.text("d/inner"), "x")),
    },
    Case {
        name: "a directory twice keeps its entries and takes the later mode",
        archive: || {
            Tape::default().directory("d/", 0o755).file("d/a", b"x").directory("d/", 0o700).end()
        },
        outcome: Kept(|view| {
            assert_eq!(view.inode("d").mode, 0o700);
            assert_eq!(view.text("d/a"), "x");
        }),
    },
    Case {
        name: "a symbolic link that becomes a directory, and back",
        archive: || {
            Tape::default()
                .symlink("a", "b")
                .directory("a/", 0o755)
                .directory("b/", 0o755)
                .symlink("b", "a")
                .end()
        },
        outcome: Kept(|view| {
            assert!(matches!(view.inode("a").kind, Kind::Directory(_)));
            assert_eq!(view.target("b"), "a");
        }),
    },
    Case {
        name: "an entry through a symbolic link of the archive lands where the link leads, inside",
        archive: || {
            Tape::default()
                .directory("usr/lib/", 0o755)
                .symlink("lib", "usr/lib")
                .symlink("up", "../../../etc")
                .file("lib/a", b"1")
                .file("up/b", b"2")
                .end()
        },
        outcome: Kept(|view| {
            assert_eq!(view.text("usr/lib/a"), "1");
            assert_eq!(view.text("etc/b"), "2");
            assert_eq!(view.target("lib"), "usr/lib");
        }),
    },
    Case {
        name: "symbolic links in a circle in the middle of a path are refused",
        archive: || Tape::default().symlink("a", "b").symlink("b", "a").file("a/x", b"").end(),
        outcome: Refused(ErrorKind::Invalid, "too many symbolic links"),
    },
    Case {
        name: "`./`, absolute and `..` names stay inside",
        archive: || {
            Tape::default()
                .directory("./", 0o711)
                .file("./a", b"1")
                .file("/etc/b", b"2")
                .file("../../c", b"3")
                .file("x/../../d", b"4")
                .end()
        },
        outcome: Kept(|view| {
            assert_eq!(view.paths(), ["a", "c", "d", "etc", "etc/b"]);
            assert_eq!(view.inode("").mode, 0o711);
        }),
    },
    Case {
        name: "GNU long name and long link",
        archive: || {
            let (name, link) = ("n".repeat(200), "l".repeat(3000));
            let long = |kind, text: &str| Fields {
                name: b"././@LongLink".to_vec(),
                kind,
                gnu: true,
                size: Some(text.len() as u64 + 1),
                ..Fields::default()
            };
            Tape::default()
                .raw(long(b'L', &name), format!("{name}\0").as_bytes())
                .raw(long(b'K', &link), format!("{link}\0").as_bytes())
                .symlink("cut", "cut")
                .end()
        },
        outcome: Kept(|view| assert_eq!(view.target(&"n".repeat(200)), "l".repeat(3000))),
    },
    Case {
        name: "PAX path, linkpath, ids above 2^31, negative and large times",
        archive: || {
            Tape::default()
                .pax(&[
                    ("path", "dir/grün".as_bytes()),
                    ("uid", b"4294967294"),
                    ("gid", b"3000000000"),
                    ("mtime", b"-1.25"),
                ])
                .file("cut", b"data")
                .pax(&[("mtime", b"99999999999.999999999")])
                .file("late", b"x")
                .end()
        },
        outcome: Kept(|view| {
            let inode = view.inode("dir/grün");
            assert_eq!((inode.uid, inode.gid), (4_294_967_294, 3_000_000_000));
            assert_eq!(inode.mtime, Timestamp { secs: -2, nanos: 750_000_000 });
            let late = view.inode("late").mtime;
            assert_eq!(late, Timestamp { secs: 99_999_999_999, nanos: 999_999_999 });
        }),
    },
    Case {
        name: "base-256 ids and times in the header itself",
        archive: || {
            let fields = Fields {
                name: b"a".to_vec(),
                uid: 3_000_000_000,
                gid: 2_500_000_000,
                mtime: -86_400,
                gnu: true,
                ..Fields::default()
            };
            Tape::default().raw(fields, b"x").end()
        },
        outcome: Kept(|view| {
            let inode = view.inode("a");
            assert_eq!(
                (inode.uid, inode.gid, inode.mtime.secs),
                (3_000_000_000, 2_500_000_000, -86_400)
            );
        }),
    },
    Case {
        name: "an owner of 2^32-1 (which means `nobody given`) is refused by name",
        archive: || Tape::default().pax(&[("uid", b"4294967295")]).file("a", b"x").end(),
        outcome: Refused(ErrorKind::Invalid, "/a: owner is not from 0 to 2^32-2"),
    },
    Case {
        name: "PAX attributes of any bytes, also in the name",
        archive: || {
            let mut data = record("SCHILY.xattr.user.bin", b"\0\n=\xff");
            let mut odd = record("SCHILY.xattr.user.oXd", b"v");
            let at = odd.iter().position(|&byte| byte == b'X').unwrap();
            odd[at] = 0xfe;
            data.extend(odd);
            data.extend(record(
                "SCHILY.xattr.security.capability",
                b"\x01\0\0\x02\0\x04\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
            ));
            let fields = Fields { name: b"pax".to_vec(), kind: b'x', ..Fields::default() };
            Tape::default().raw(fields, &data).file("a", b"x").end()
        },
        outcome: Kept(|view| {
            assert_eq!(view.xattr("a", "user.bin").unwrap(), b"\0\n=\xff");
            assert_eq!(view.xattr("a", "security.capability").unwrap().len(), 20);
            assert!(view.inode("a").xattrs.iter().any(|xattr| xattr.name == b"user.o\xfed"));
        }),
    },
    Case {
        name: "an attribute name longer than the kernel's limit is refused by name",
        archive: || {
            let key = format!("SCHILY.xattr.user.{}", "x".repeat(251));
            Tape::default().pax(&[(&key, b"v")]).file("d/a", b"x").end()
        },
        outcome: Refused(ErrorKind::Invalid, "/d/a: attribute user."),
    },
    Case {
        name: "an attribute value of 64 KiB is refused by name",
        archive: || {
            Tape::default().pax(&[("SCHILY.xattr.user.big", &[7; 65_536])]).file("a", b"x").end()
        },
        outcome: Refused(ErrorKind::Invalid, "/a: attribute user.big has a value of 64 KiB"),
    },
    Case {
        name: "attributes of overlayfs are left out",
        archive: || {
            Tape::default()
                .pax(&[
                    ("SCHILY.xattr.trusted.overlay.redirect", b"/etc"),
                    ("SCHILY.xattr.trusted.overlay.opaque", b"y"),
                    ("SCHILY.xattr.user.overlay.opaque", b"y"),
                    ("SCHILY.xattr.user.mine", b"1"),
                ])
                .directory("d/", 0o755)
                .end()
        },
        outcome: Kept(|view| {
            assert_eq!(view.inode("d").xattrs.len(), 1);
            assert_eq!(view.xattr("d", "user.mine").unwrap(), b"1");
        }),
    },
    Case {
        name: "access control lists and SELinux labels as GNU tar writes them",
        archive: || {
            Tape::default()
                .pax(&[
                    (
                        "SCHILY.acl.access",
                        b"user::rw-,user:1000:r--,group::r--,mask::r--,other::---",
                    ),
                    ("RHT.security.selinux", b"system_u:object_r:etc_t:s0"),
                ])
                .file("a", b"x")
                .end()
        },
        outcome: Kept(|view| {
            assert_eq!(view.xattr("a", "system.posix_acl_access").unwrap().len(), 4 + 5 * 8);
            assert_eq!(
                view.xattr("a", "security.selinux").unwrap(),
                b"system_u:object_r:etc_t:s0\0"
            );
        }),
    },
    Case {
        name: "global PAX headers apply until they are taken back",
        archive: || {
            Tape::default()
                .extended(b'g', &[("uid", b"1234")])
                .file("a", b"1")
                .pax(&[("uid", b"5")])
                .file("b", b"2")
                .extended(b'g', &[("uid", b"")])
                .file("c", b"3")
                .end()
        },
        outcome: Kept(|view| {
            assert_eq!(["a", "b", "c"].map(|path| view.inode(path).uid), [1234, 5, 0]);
        }),
    },
    Case {
        name: "NULs at the end of a name do not count",
        archive: || Tape::default().pax(&[("path", b"a/b\0\0")]).file("cut", b"x").end(),
        outcome: Kept(|view| assert_eq!(view.text("a/b"), "x")),
    },
    Case {
        name: "a NUL inside a name is refused",
        archive: || Tape::default().pax(&[("path", b"a\0b")]).file("cut", b"x").end(),
        outcome: Refused(ErrorKind::Invalid, "a name with a NUL byte"),
    },
    Case {
        name: "a name of 256 bytes is refused, one of 255 is kept",
        archive: || Tape::default().pax(&[("path", &[b'n'; 256])]).file("cut", b"x").end(),
        outcome: Refused(ErrorKind::Invalid, "name of 256 bytes"),
    },
    Case {
        name: "a name of 255 arbitrary bytes is kept",
        archive: || Tape::default().pax(&[("path", &[0xfe; 255])]).file("cut", b"x").end(),
        outcome: Kept(|view| assert!(view.tree.find(&[0xfe; 255]).is_some())),
    },
    Case {
        name: "a path longer than PATH_MAX and a target of 4,095 bytes are kept",
        archive: || {
            let path = vec!["d".repeat(200); 30].join("/");
            Tape::default()
                .pax(&[("path", path.as_bytes())])
                .file("cut", b"deep")
                .pax(&[("linkpath", "t".repeat(4095).as_bytes())])
                .symlink("l", "cut")
                .end()
        },
        outcome: Kept(|view| {
            assert_eq!(view.text(&vec!["d".repeat(200); 30].join("/")), "deep");
            assert_eq!(view.target("l").len(), 4095);
        }),
    },
    Case {
        name: "GNU sparse, old form with an extension block",
        archive: || {
            let mut tape = Tape::default();
            let mut block = Tape::default()
                .raw(
                    Fields {
                        name: b"s".to_vec(),
                        kind: b'S',
                        gnu: true,
                        size: Some(30),
                        ..Fields::default()
                    },
                    b"",
                )
                .0;
            for at in 0..4 {
                tape::octal(&mut block[386 + at * 24..][..12], at as u64 * 8192);
                tape::octal(&mut block[398 + at * 24..][..12], 5);
            }
            block[482] = 1;
            tape::octal(&mut block[483..495], 100_000);
            tape::seal(&mut block);
            let mut more = [0_u8; 512];
            tape::octal(&mut more[0..12], 50_000);
            tape::octal(&mut more[12..24], 10);
            tape::octal(&mut more[24..36], 100_000);
            tape::octal(&mut more[36..48], 0);
            tape.0.extend(block);
            tape.0.extend(more);
            tape.data(b"aaaaabbbbbcccccdddddeeeeeeeeee").file("after", b"x").end()
        },
        outcome: Kept(|view| {
            let bytes = view.bytes("s");
            assert_eq!(bytes.len(), 100_000);
            assert_eq!(&bytes[8192..8198], b"bbbbb\0");
            assert_eq!(&bytes[50_000..50_010], b"eeeeeeeeee");
            assert_eq!(bytes.iter().filter(|&&byte| byte != 0).count(), 30);
            assert_eq!(view.text("after"), "x");
        }),
    },
    Case {
        name: "PAX sparse 0.0",
        archive: || {
            Tape::default()
                .pax(&[
                    ("GNU.sparse.size", b"10000"),
                    ("GNU.sparse.numblocks", b"2"),
                    ("GNU.sparse.offset", b"4096"),
                    ("GNU.sparse.numbytes", b"3"),
                    ("GNU.sparse.offset", b"8192"),
                    ("GNU.sparse.numbytes", b"3"),
                ])
                .file("s", b"abcdef")
                .end()
        },
        outcome: Kept(sparse_file),
    },
    Case {
        name: "PAX sparse 0.1",
        archive: || {
            Tape::default()
                .pax(&[
                    ("GNU.sparse.size", b"10000"),
                    ("GNU.sparse.name", b"s"),
                    ("GNU.sparse.map", b"4096,3,8192,3,10000,0"),
                ])
                .file("GNUSparseFile.1/s", b"abcdef")
                .end()
        },
        outcome: Kept(sparse_file),
    },
    Case {
        name: "PAX sparse 1.0",
        archive: || {
            let mut data = b"2\n4096\n3\n8192\n3\n".to_vec();
            data.resize(512, 0);
            data.extend_from_slice(b"abcdef");
            Tape::default()
                .pax(&[
                    ("GNU.sparse.major", b"1"),
                    ("GNU.sparse.minor", b"0"),
                    ("GNU.sparse.name", b"s"),
                    ("GNU.sparse.realsize", b"10000"),
                ])
                .file("GNUSparseFile.1/s", &data)
                .end()
        },
        outcome: Kept(sparse_file),
    },
    Case {
        name: "a sparse map that goes back is refused by name",
        archive: || {
            Tape::default()
                .pax(&[("GNU.sparse.size", b"10000"), ("GNU.sparse.map", b"8192,3,4096,3")])
                .file("s", b"abcdef")
                .end()
        },
        outcome: Refused(ErrorKind::Corrupt, "/s: the map of a sparse file is out of order"),
    },
    Case {
        name: "a sparse file of more than 16 TiB is refused by name",
        archive: || {
            Tape::default()
                .pax(&[("GNU.sparse.size", b"18446744073709551615"), ("GNU.sparse.map", b"0,6")])
                .file("s", b"abcdef")
                .end()
        },
        outcome: Refused(ErrorKind::Unsupported, "/s: a file of more than 16 TiB"),
    },
    Case {
        name: "files of 0 bytes, also as a directory of old programs",
        archive: || Tape::default().file("empty", b"").file("old/", b"").end(),
        outcome: Kept(|view| {
            assert_eq!(view.bytes("empty"), b"");
            assert!(matches!(view.inode("old").kind, Kind::Directory(_)));
        }),
    },
    Case {
        name: "devices, fifos, setuid and sticky bits",
        archive: || {
            let fifo =
                Fields { name: b"p".to_vec(), kind: b'6', mode: 0o1622, ..Fields::default() };
            let suid = Fields { name: b"s".to_vec(), mode: 0o106_755, ..Fields::default() };
            Tape::default()
                .device("c", b'3', (5, 1))
                .device("b", b'4', (253, 70_000))
                .raw(fifo, b"")
                .raw(suid, b"x")
                .end()
        },
        outcome: Kept(|view| {
            assert_eq!(view.inode("c").kind, Kind::CharDevice(Rdev { major: 5, minor: 1 }));
            assert_eq!(view.inode("b").kind, Kind::BlockDevice(Rdev { major: 253, minor: 70_000 }));
            assert_eq!((&view.inode("p").kind, view.inode("p").mode), (&Kind::Fifo, 0o1622));
            assert_eq!(view.inode("s").mode, 0o6755);
        }),
    },
    Case {
        name: "a real device 0/0 is refused by name",
        archive: || Tape::default().device("dev/zero-zero", b'3', (0, 0)).end(),
        outcome: Refused(ErrorKind::Invalid, "/dev/zero-zero is a character device 0/0"),
    },
    Case {
        name: "names of whiteouts mean nothing in a plain tar",
        archive: || Tape::default().file("d/.wh.x", b"1").file("d/.wh..wh..opq", b"2").end(),
        outcome: Kept(|view| assert_eq!(view.text("d/.wh.x"), "1")),
    },
    Case {
        name: "names that differ only in case are two files",
        archive: || Tape::default().file("File", b"1").file("file", b"2").end(),
        outcome: Kept(|view| {
            let texts = (view.text("File"), view.text("file"));
            assert_eq!(texts, ("1".into(), "2".into()));
        }),
    },
    Case {
        name: "an archive without entries is an empty layer",
        archive: || Tape::default().end(),
        outcome: Kept(|view| assert_eq!(view.inode("").mode, 0o755)),
    },
    Case {
        name: "no end mark at all, and missing padding",
        archive: || {
            let mut bytes = Tape::default().file("a", b"one").file("b", b"two").0;
            bytes.truncate(bytes.len() - 509);
            bytes
        },
        outcome: Kept(|view| assert_eq!(view.text("b"), "two")),
    },
    Case {
        name: "odd bytes behind the end mark do not count",
        archive: || {
            let mut bytes = Tape::default().file("a", b"one").end();
            bytes.extend_from_slice(&[0xaa; 777]);
            bytes
        },
        outcome: Kept(|view| assert_eq!(view.paths(), ["a"])),
    },
    Case {
        name: "an archive that ends inside a file is refused",
        archive: || {
            let mut bytes = Tape::default().file("a", &[1; 2000]).0;
            bytes.truncate(1500);
            bytes
        },
        outcome: Refused(ErrorKind::Corrupt, "ends inside an entry"),
    },
    Case {
        name: "a broken header is refused with its place",
        archive: || {
            let mut bytes = Tape::default().file("a", b"x").file("b", b"y").end();
            bytes[1024 + 10] ^= 0x55;
            bytes
        },
        outcome: Refused(ErrorKind::Corrupt, "entry at byte 1024: not a tar header"),
    },
    Case {
        name: "something else than an archive is refused",
        archive: || b"#!/bin/sh\necho this is no archive\n".repeat(40),
        outcome: Refused(ErrorKind::Invalid, "no archive that is known"),
    },
    Case {
        name: "an empty file is refused, not taken for an archive without entries",
        archive: Vec::new,
        outcome: Refused(ErrorKind::Invalid, "no bytes, so no archive"),
    },
    Case {
        name: "kinds of compression that cannot be read are named",
        archive: || b"BZh91AY&SY whatever".to_vec(),
        outcome: Refused(ErrorKind::Unsupported, "bzip2 files cannot be read"),
    },
];

fn sparse_file(view: &View) {
    let bytes = view.bytes("s");
    assert_eq!(bytes.len(), 10_000);
    assert_eq!(&bytes[4096..4100], b"abc\0");
    assert_eq!(&bytes[8192..8196], b"def\0");
    assert_eq!(bytes.iter().filter(|&&byte| byte != 0).count(), 6);
    assert!(view.get("GNUSparseFile.1").is_none());
}

#[test]
fn every_case_has_its_outcome() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("case.tar");
    for case in CASES {
        println!("{}", case.name);
        fs::write(&file, (case.archive)()).unwrap();
        let publisher = MemoryPublisher::default();
        match (&case.outcome, build(&file, &publisher, &options())) {
            (Kept(check), Ok(built)) => check(&publisher.view(built.layer_id())),
            (Refused(kind, text), Err(error)) => {
                assert_eq!(error.kind(), *kind, "{}: {}", case.name, error.chain());
                assert!(error.chain().contains(text), "{}: {}", case.name, error.chain());
                assert!(publisher.layers.lock().unwrap().is_empty());
            }
            (Kept(_), Err(error)) => panic!("{}: {}", case.name, error.chain()),
            (Refused(..), Ok(_)) => panic!("{}: was not refused", case.name),
        }
    }
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn skippable(bytes: &[u8]) -> Vec<u8> {
    let mut frame = 0x184d_2a53_u32.to_le_bytes().to_vec();
    frame.extend((bytes.len() as u32).to_le_bytes());
    frame.extend_from_slice(bytes);
    frame
}

#[test]
fn odd_compressed_files_are_read_to_their_end() {
    let tar = Tape::default().file("a", &b"first ".repeat(5000)).file("b", b"second").end();
    let (one, two) = tar.split_at(1700);
    let zstd = |bytes| zstd::bulk::compress(bytes, 3).unwrap();
    let cases: &[(&str, Vec<u8>)] = &[
        ("gzip with two members", [gzip(one), gzip(two)].concat()),
        ("gzip with an empty member", [gzip(one), gzip(b""), gzip(two)].concat()),
        ("gzip with zeros behind it", [gzip(&tar), vec![0; 999]].concat()),
        ("gzip with zeros between members", [gzip(one), vec![0; 99], gzip(two)].concat()),
        ("gzip with other bytes behind it", [gzip(&tar), b"odd footer".to_vec()].concat()),
        ("zstd with two frames", [zstd(one), zstd(two)].concat()),
        (
            "zstd with skippable frames",
            [skippable(b"head"), zstd(one), skippable(b""), zstd(two), skippable(&[9; 70_000])]
                .concat(),
        ),
    ];
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("case");
    fs::write(&file, &tar).unwrap();
    let expected = build(&file, &MemoryPublisher::default(), &options()).unwrap().layer_id();
    for (name, bytes) in cases {
        fs::write(&file, bytes).unwrap();
        let built = build(&file, &MemoryPublisher::default(), &options());
        let built = built.unwrap_or_else(|error| panic!("{name}: {}", error.chain()));
        assert_eq!(built.layer_id(), expected, "{name}");
    }
    let broken: &[(&str, Vec<u8>)] = &[
        ("cut gzip", gzip(&tar)[..60].to_vec()),
        ("cut second member", [gzip(one), gzip(two)[..30].to_vec()].concat()),
        ("cut zstd", zstd(&tar)[..30].to_vec()),
    ];
    for (name, bytes) in broken {
        fs::write(&file, bytes).unwrap();
        let error = build(&file, &MemoryPublisher::default(), &options()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{name}: {}", error.chain());
        assert!(error.chain().contains("broken compressed data"), "{name}: {}", error.chain());
    }
}

/// GNU tar writes each of its sparse forms; all give the layer of the directory.
#[test]
fn sparse_files_of_gnu_tar() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    fs::create_dir(&root).unwrap();
    let file = fs::File::create(root.join("sparse")).unwrap();
    file.set_len(40_000_000).unwrap();
    for at in 0..40_u64 {
        let offset = at * 900_000 + at;
        std::os::unix::fs::FileExt::write_all_at(&file, b"some data", offset).unwrap();
    }
    drop(file);
    let expected = build(&root, &MemoryPublisher::default(), &options()).unwrap().layer_id();
    for flags in [
        &["--format=gnu"][..],
        &["--format=pax", "--sparse-version=0.0"],
        &["--format=pax", "--sparse-version=0.1"],
        &["--format=pax", "--sparse-version=1.0"],
    ] {
        let tar = dir.path().join("s.tar");
        let status = Command::new("tar")
            .args(flags)
            .args(["--sparse", "-cf"])
            .arg(&tar)
            .arg("-C")
            .arg(&root)
            .arg(".")
            .status()
            .unwrap();
        assert!(status.success());
        assert!(fs::metadata(&tar).unwrap().len() < 1_000_000);
        let publisher = MemoryPublisher::default();
        let view = publisher.view(build(&tar, &publisher, &options()).unwrap().layer_id());
        let truth = fs::read(root.join("sparse")).unwrap();
        assert!(view.bytes("sparse") == truth, "{flags:?}");
        // GNU format keeps no fractions of seconds, so only PAX can give the same id.
        if flags[0] == "--format=pax" {
            let built = build(&tar, &MemoryPublisher::default(), &options()).unwrap();
            assert_eq!(built.layer_id(), expected, "{flags:?}");
        }
    }
}
