//! Installs the packages that building and testing need. Says what it does; does nothing when
//! all of them are there.

use crate::Outcome;
use std::path::Path;
use std::process::Command;

/// Package, and what it is for.
const PACKAGES: [(&str, &str); 21] = [
    ("protobuf-compiler", "generates the gRPC types"),
    ("librocksdb-dev", "the catalog of imaged"),
    ("libclang-dev", "bindings of RocksDB"),
    ("libcap-ng-dev", "the virtiofs library"),
    ("clang", "the packet filter of sandboxes"),
    ("libbpf-dev", "the packet filter of sandboxes"),
    ("erofs-utils", "judge of our EROFS images"),
    ("git", "judge of refreshed git indexes"),
    ("apparmor", "judge of AppArmor profiles"),
    ("busybox-static", "root file system of runtime tests"),
    ("qemu-system-x86", "guests of VM tests"),
    ("crun", "judge of containers"),
    ("runc", "judge of containers"),
    ("containerd", "runs images on our snapshots in tests"),
    ("docker-registry", "images come from it in tests"),
    ("skopeo", "judge of images"),
    ("umoci", "maker and judge of images"),
    ("xfsprogs", "node cache on XFS"),
    ("e2fsprogs", "small disks that fill up"),
    ("xz-utils", "archives in tests"),
    ("zstd", "archives in tests"),
];

/// The package that depends on the newest kernel for guests.
const KERNEL_PACKAGE: &str = "linux-image-cloud-amd64";
/// Where the guests' kernel is unpacked: tests look for it there.
const KERNEL_FOLDER: &str = "/var/cache/lamella/guest/linux";

/// The S3 server of tests, from PyPI, in a virtual environment of its own: tests look for it there.
const S3_SERVER: &str = "moto[server]==5.2.5";
const S3_FOLDER: &str = "/var/cache/lamella/s3-server";

/// Installs what is missing.
pub fn run() -> Outcome {
    packages()?;
    guest_kernel()?;
    s3_server()
}

/// Installs the S3 server of tests; this machine's own Python does not get it.
fn s3_server() -> Outcome {
    let done = Path::new(S3_FOLDER).join("installed");
    if std::fs::read_to_string(&done).is_ok_and(|version| version == S3_SERVER) {
        return Ok(());
    }
    println!("setup: installing {S3_SERVER} to {S3_FOLDER} (S3 server of tests)");
    let pip = Path::new(S3_FOLDER).join("bin/pip");
    let quiet = ["install", "--quiet", "--disable-pip-version-check", S3_SERVER];
    command("python3", &["-m", "venv", "--clear", S3_FOLDER])?;
    command(&pip.to_string_lossy(), &quiet)?;
    std::fs::write(&done, S3_SERVER).map_err(|error| format!("{}: {error}", done.display()))
}

fn command(program: &str, arguments: &[&str]) -> Outcome {
    let status = Command::new(program)
        .args(arguments)
        .status()
        .map_err(|error| format!("{program}: {error}"))?;
    if status.success() {
        return Ok(());
    }
    Err(format!("{program} {} failed ({status})", arguments.join(" ")))
}

/// Unpacks a kernel for the guests of tests; this machine does not get it.
fn guest_kernel() -> Outcome {
    if Path::new(KERNEL_FOLDER).join("boot").exists() {
        return Ok(());
    }
    println!("setup: unpacking {KERNEL_PACKAGE} to {KERNEL_FOLDER} (kernel of VM tests)");
    let folder = Path::new(KERNEL_FOLDER).with_extension("new");
    // What an interrupted run left.
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let script = format!(
        "set -e; package=$(apt-cache depends {KERNEL_PACKAGE} | awk '/Depends:/ {{ print $2; exit }}')
         apt-get download -qq -o APT::Sandbox::User=root \"$package\"
         dpkg-deb -x \"$package\"_*.deb . && rm \"$package\"_*.deb"
    );
    let status = Command::new("sh")
        .args(["-c", &script])
        .current_dir(&folder)
        .status()
        .map_err(|error| format!("sh: {error}"))?;
    if !status.success() {
        return Err(format!("{KERNEL_PACKAGE} could not be unpacked ({status})"));
    }
    std::fs::rename(&folder, KERNEL_FOLDER).map_err(|error| format!("{KERNEL_FOLDER}: {error}"))
}

fn packages() -> Outcome {
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
    apt(&arguments)?;
    // Tests start their own; what the package started just now is nobody's.
    if missing.contains(&"containerd") && Path::new("/run/systemd/system").exists() {
        command("systemctl", &["disable", "--now", "--quiet", "containerd"])?;
    }
    Ok(())
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
