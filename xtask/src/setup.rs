//! Installs the Debian packages that building and testing need. Says what it does; does nothing when
//! all of them are there.

use crate::Outcome;
use std::process::Command;

/// Package, and what it is for.
const PACKAGES: [(&str, &str); 11] = [
    ("protobuf-compiler", "generates the gRPC types"),
    ("librocksdb-dev", "the catalog of imaged"),
    ("libclang-dev", "bindings of RocksDB"),
    ("erofs-utils", "judge of our EROFS images"),
    ("busybox-static", "root file system of runtime tests"),
    ("crun", "judge of containers"),
    ("runc", "judge of containers"),
    ("xfsprogs", "node cache on XFS"),
    ("e2fsprogs", "small disks that fill up"),
    ("xz-utils", "archives in tests"),
    ("zstd", "archives in tests"),
];

/// Installs what is missing.
pub fn run() -> Outcome {
    let missing: Vec<&str> = PACKAGES
        .iter()
        .map(|(package, _)| *package)
        .filter(|package| !installed(package))
        .collect();
    if missing.is_empty() {
        println!("setup: everything is installed");
        return Ok(());
    }
    for (package, purpose) in PACKAGES.iter().filter(|(package, _)| missing.contains(package)) {
        println!("setup: installing {package} ({purpose})");
    }
    apt(&["update", "-qq"])?;
    let mut arguments = vec!["install", "-y", "-qq", "--no-install-recommends"];
    arguments.extend(&missing);
    apt(&arguments)
}

fn installed(package: &str) -> bool {
    Command::new("dpkg-query")
        .args(["-W", "-f", "${db:Status-Status}", package])
        .output()
        .is_ok_and(|output| output.stdout == b"installed")
}

fn apt(arguments: &[&str]) -> Outcome {
    let status = Command::new("apt-get")
        .args(arguments)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdout(std::process::Stdio::null())
        .status()
        .map_err(|error| format!("apt-get: {error}; this needs a Debian machine and root"))?;
    if status.success() {
        return Ok(());
    }
    Err(format!("apt-get {} failed ({status}); are you root?", arguments.join(" ")))
}
