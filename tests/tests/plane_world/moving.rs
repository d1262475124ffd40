//! Bytes that the kernel moves by itself, and programs that it runs.

use super::View;
use crate::fsd_world::first_difference;
use rustix::pipe::SpliceFlags;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;
use std::process::Command;

pub fn programs(view: &View) {
    for (name, arguments) in [
        ("busybox", &["echo", "hello"][..]),
        ("busybox", &["sh", "-c", "echo $((6 * 7)); exit 3"][..]),
        ("script", &["given"][..]),
        ("lost", &[][..]),
    ] {
        view.same(format!("running {name} {arguments:?}"), |root| {
            let output = Command::new(root.join("bin").join(name)).args(arguments).output()?;
            Ok((output.status.code(), output.stdout))
        });
    }
    view.same("running a file without the right", |root| {
        Command::new(root.join("sizes/100")).output().map(|_| ())
    });
    view.same("running a folder", |root| Command::new(root.join("sizes")).output().map(|_| ()));
    // From many processes at once, each of which maps it anew.
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let program = view.mounted.join("bin/busybox");
                let output = Command::new(program).args(["sha256sum", "/dev/null"]).output();
                assert!(output.unwrap().status.success());
            });
        }
    });
}

const NAMES: [&str; 5] =
    ["sizes/1", "sizes/65537", "sizes/1048593", "sparse/islands", "sparse/trailing"];

#[track_caller]
fn check(view: &View, name: &str, how: &str, copy: &Path) {
    let (got, wanted) = (fs::read(copy).unwrap(), fs::read(view.reference.join(name)).unwrap());
    assert!(got == wanted, "{name} by {how}: {}", first_difference(&got, &wanted));
}

pub fn kernel_copies(view: &View) {
    let copy = view.scratch.join("copy");
    for name in NAMES {
        let source = || File::open(view.mounted.join(name)).unwrap();
        let size = source().metadata().unwrap().len();

        let (from, to) = (source(), File::create(&copy).unwrap());
        let mut moved = 0;
        while let bytes @ 1.. = rustix::fs::sendfile(&to, &from, None, 300_001).unwrap() {
            moved += bytes as u64;
        }
        assert_eq!(moved, size);
        check(view, name, "sendfile", &copy);

        spliced(&source(), &File::create(&copy).unwrap()).unwrap();
        check(view, name, "splice", &copy);

        let (mut from, mut to) = (source(), File::create(&copy).unwrap());
        io::copy(&mut from, &mut to).unwrap();
        check(view, name, "the standard library", &copy);

        for sparse in ["always", "never"] {
            let mut command = Command::new("cp");
            command.arg(format!("--sparse={sparse}")).arg(view.mounted.join(name)).arg(&copy);
            assert!(command.status().unwrap().success());
            check(view, name, "cp", &copy);
        }
    }
    // Between file systems of two kinds the kernel may refuse, but never copies other bytes.
    let (from, to) =
        (File::open(view.mounted.join("sizes/1048593")).unwrap(), File::create(&copy).unwrap());
    let mut refused = false;
    loop {
        match rustix::fs::copy_file_range(&from, None, &to, None, 100_003) {
            Ok(0) => break,
            Ok(_) => {}
            Err(rustix::io::Errno::XDEV) => {
                refused = true;
                break;
            }
            Err(error) => panic!("copy_file_range: {error}"),
        }
    }
    if !refused {
        check(view, "sizes/1048593", "copy_file_range", &copy);
    }
    fs::remove_file(&copy).unwrap();
}

/// File, pipe, file.
fn spliced(from: &File, to: &File) -> io::Result<()> {
    let (end, start) = rustix::pipe::pipe()?;
    loop {
        let flags = SpliceFlags::MOVE;
        let mut left = rustix::pipe::splice(from, None, &start, None, 50_000, flags)?;
        if left == 0 {
            break;
        }
        while left > 0 {
            left -= rustix::pipe::splice(&end, None, to, None, left, flags)?;
        }
    }
    drop(start);
    let mut rest = Vec::new();
    File::from(end).read_to_end(&mut rest)?;
    assert!(rest.is_empty());
    Ok(())
}
