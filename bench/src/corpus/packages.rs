//! The Debian packages that the benches need, and their installation.

use crate::shell::{self, say};
use std::path::Path;

/// Package, a file that shows that it (or another provider of it) is there, and what it is for.
pub const PACKAGES: &[(&str, &str, &str)] = &[
    ("mmdebstrap", "/usr/bin/mmdebstrap", "builds the Debian base"),
    ("python3", "/usr/bin/python3", "compiles the toolkit's modules"),
    ("python3-pip", "/usr/bin/pip3", "installs numpy and its kin"),
    ("npm", "/usr/bin/npm", "installs the large node_modules"),
    ("dpkg-dev", "/usr/bin/dpkg-source", "unpacks the workspace's source"),
    ("git", "/usr/bin/git", "commits the workspace"),
    ("tar", "/usr/bin/tar", "packs and unpacks trees"),
    ("zstd", "/usr/bin/zstd", "the eager side's compression, and a peer of build"),
    ("crun", "/usr/bin/crun", "the eager side's runtime, and a peer of create"),
    ("runc", "/usr/sbin/runc", "a peer of create"),
    ("erofs-utils", "/usr/bin/mkfs.erofs", "a peer of warm reads"),
    ("squashfs-tools", "/usr/bin/mksquashfs", "a peer of warm reads"),
    ("fuse-overlayfs", "/usr/bin/fuse-overlayfs", "a peer of warm reads"),
    ("restic", "/usr/bin/restic", "a peer of dedup"),
    ("borgbackup", "/usr/bin/borg", "a peer of dedup"),
];

/// Installs what is missing with apt-get, and says so.
pub fn install_missing() -> anyhow::Result<()> {
    let missing: Vec<_> =
        PACKAGES.iter().filter(|(_, file, _)| !Path::new(file).exists()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    for (package, _, purpose) in &missing {
        say(format!("corpus: installing {package} ({purpose})"));
    }
    let mut words = vec!["apt-get", "install", "-y", "-qq", "--no-install-recommends"];
    words.extend(missing.iter().map(|(package, _, _)| *package));
    shell::output(
        shell::command(&["apt-get", "update", "-qq"]).env("DEBIAN_FRONTEND", "noninteractive"),
    )?;
    shell::output(shell::command(&words).env("DEBIAN_FRONTEND", "noninteractive"))?;
    Ok(())
}
