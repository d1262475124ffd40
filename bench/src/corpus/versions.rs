//! Ten versions of a tree, each in a folder of its own: `01` to `10`.
//!
//! What follows upon what is as in life: patches of one source package, releases of two Python packages
//! with large binaries, a Debian root file system that gets one package after another.

use super::recipes::{SUITE, apt, pack, set_times};
use crate::shell;
use anyhow::Context;
use std::fs;
use std::path::{Path, PathBuf};

/// How many versions there are.
const VERSIONS: usize = 10;
/// All files get this time: a version differs in its contents only.
const EPOCH: &str = "1700000000";
const SOURCE: &str = "Django";
const SOURCE_SERIES: &str = "5.2";
/// numpy and pandas.
const TOOLKITS: [[&str; 2]; VERSIONS] = [
    ["2.2.0", "2.2.3"],
    ["2.2.1", "2.2.3"],
    ["2.2.2", "2.2.3"],
    ["2.2.3", "2.2.3"],
    ["2.2.4", "2.2.3"],
    ["2.2.5", "2.2.3"],
    ["2.2.6", "2.3.0"],
    ["2.3.0", "2.3.0"],
    ["2.3.1", "2.3.1"],
    ["2.3.2", "2.3.2"],
];
const PACKAGES: [&str; VERSIONS - 1] =
    ["curl", "jq", "rsync", "vim-common", "file", "procps", "iproute2", "gnupg", "sqlite3"];

/// The folders of the versions in an unpacked piece.
pub fn folders(tree: &Path) -> Vec<PathBuf> {
    (1..=VERSIONS).map(|version| tree.join(format!("{version:02}"))).collect()
}

/// The recipes in words.
pub fn describe_source() -> String {
    format!("pip sources of {SOURCE} {SOURCE_SERIES}.1 to {SOURCE_SERIES}.{VERSIONS}")
}

pub fn describe_toolkit() -> String {
    let versions = TOOLKITS.map(|[numpy, pandas]| format!("{numpy}+{pandas}"));
    format!("pip numpy+pandas {}", versions.join(" "))
}

pub fn describe_debian() -> String {
    format!("mmdebstrap minbase {SUITE}, then {} unpacked one after another", PACKAGES.join(" "))
}

/// Writes the tar of ten versions of a source package.
pub fn source(building: &Path) -> anyhow::Result<()> {
    let tree = building.join("tree");
    for (number, folder) in folders(&tree).iter().enumerate() {
        let fetched = building.join("fetched");
        fs::create_dir_all(folder)?;
        let wanted = format!("{SOURCE}=={SOURCE_SERIES}.{}", number + 1);
        let mut pip = shell::command(&["/usr/bin/python3", "-m", "pip", "download", "--quiet"]);
        pip.args(["--disable-pip-version-check", "--no-deps", "--no-binary", ":all:", "--dest"]);
        shell::output(pip.arg(&fetched).arg(wanted))?;
        let archive = fs::read_dir(&fetched)?.next().context("pip fetched nothing")??.path();
        let mut tar = shell::command(&["tar", "--extract", "--no-same-owner"]);
        tar.args(["--strip-components=1", "--directory"]).arg(folder);
        shell::output(tar.arg("--file").arg(&archive))?;
        fs::remove_dir_all(&fetched)?;
    }
    set_times(&tree, EPOCH)?;
    pack(&tree, building)
}

/// Writes the tar of ten versions of a Python toolkit.
pub fn toolkit(building: &Path) -> anyhow::Result<()> {
    let tree = building.join("tree");
    for (folder, [numpy, pandas]) in folders(&tree).iter().zip(TOOLKITS) {
        fs::create_dir_all(folder)?;
        let mut pip = shell::command(&["/usr/bin/python3", "-m", "pip", "install", "--quiet"]);
        pip.args(["--no-compile", "--disable-pip-version-check", "--root-user-action=ignore"]);
        pip.arg("--target").arg(folder);
        shell::output(pip.arg(format!("numpy=={numpy}")).arg(format!("pandas=={pandas}")))?;
    }
    set_times(&tree, EPOCH)?;
    pack(&tree, building)
}

/// Writes the tar of ten versions of a Debian root file system.
pub fn debian(building: &Path) -> anyhow::Result<()> {
    let tree = building.join("tree");
    let folders = folders(&tree);
    let configuration = apt(building, "deb")?;
    let fetched = building.join("fetched");
    fs::create_dir_all(&fetched)?;
    fs::create_dir_all(&tree)?;
    let mut last: Option<&Path> = None;
    for (number, folder) in folders.iter().enumerate() {
        if let Some(before) = last {
            let mut copy = shell::command(&["cp", "--archive"]);
            shell::output(copy.arg(before).arg(folder))?;
            let package = PACKAGES[number - 1];
            let mut download = shell::command(&["apt-get", "download", "-qq", package]);
            shell::output(download.env("APT_CONFIG", &configuration).current_dir(&fetched))?;
            let archive =
                fs::read_dir(&fetched)?.next().context("apt-get fetched nothing")??.path();
            let mut unpack = shell::command(&["dpkg-deb", "--extract"]);
            shell::output(unpack.arg(&archive).arg(folder))?;
            fs::remove_file(&archive)?;
        } else {
            let mut bootstrap =
                shell::command(&["mmdebstrap", "--quiet", "--variant=minbase", "--mode=root"]);
            // Devices are no content, and not every tool of the bench keeps them.
            bootstrap.args(["--format=directory", "--skip=output/dev", SUITE]).arg(folder);
            shell::output(bootstrap.env("SOURCE_DATE_EPOCH", EPOCH).env("TMPDIR", building))?;
        }
        last = Some(folder);
    }
    set_times(&tree, EPOCH)?;
    pack(&tree, building)
}
