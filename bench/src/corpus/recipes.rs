//! How each piece of the corpus is made. Nothing of the host's configuration is changed.
//!
//! What can be fixed is fixed: versions by name, times, owners and the order of the tars. The
//! registries move on all the same, which is why every piece has a record.

use super::{Kind, versions};
use crate::shell;
use anyhow::{Context, bail};
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

/// All files get this time (seconds since 1970), also in compiled Python modules.
const EPOCH: &str = "1700000000";
/// The repository is younger than the files in it, or git would distrust its index.
const COMMITTED: &str = "1700000060";
pub(super) const SUITE: &str = "bookworm";
const BASE: &str = "python3,git,gcc,libc6-dev";
const SMALL: [&str; 2] = ["numpy==2.4.6", "pandas==3.1.1"];
const PYTHON: [&str; 3] = ["numpy==2.4.6", "scipy==1.17.1", "pandas==3.1.1"];
const NODE: [&str; 17] = [
    "typescript@7.0.2",
    "webpack@5.113.0",
    "webpack-cli@7.3.1",
    "eslint@10.15.0",
    "jest@30.5.2",
    "react@19.3.1",
    "react-dom@19.3.1",
    "@mui/material@9.5.0",
    "@mui/icons-material@9.5.0",
    "date-fns@4.4.0",
    "lodash@4.18.1",
    "rxjs@7.8.2",
    "vite@8.4.0",
    "prettier@3.10.1",
    "core-js@3.51.0",
    "@babel/core@7.29.13",
    "@babel/preset-env@7.29.14",
];
const LARGE_BYTES: u64 = 384 << 20;
const SOURCE: &str = "python3.11";

/// Where the toolkits' Python modules lie in an environment.
pub const PYTHON_DIR: &str = "/opt/toolkit/python";
/// Where the workspace lies in an environment.
pub const WORKSPACE_DIR: &str = "/workspace/cpython";

/// The recipe in words: what is compared with a record.
pub fn describe(kind: Kind) -> String {
    match kind {
        Kind::Base => format!("mmdebstrap minbase {SUITE} + {BASE}"),
        Kind::SmallToolkit => format!("pip {} with .pyc", SMALL.join(" ")),
        Kind::Toolkit => format!(
            "pip {} with .pyc, npm {}, {LARGE_BYTES} bytes of BLAKE3 output",
            PYTHON.join(" "),
            NODE.join(" ")
        ),
        Kind::Workspace => format!("{SUITE} source {SOURCE} in a packed git repository"),
        Kind::SourceVersions => versions::describe_source(),
        Kind::ToolkitVersions => versions::describe_toolkit(),
        Kind::DebianVersions => versions::describe_debian(),
    }
}

/// Writes `tree.tar` into `building`. `root` is the corpus, whose base is there before the toolkits.
pub fn build(kind: Kind, root: &Path, building: &Path) -> anyhow::Result<()> {
    match kind {
        Kind::Base => base(building),
        Kind::SmallToolkit => toolkit(root, building, &SMALL, false),
        Kind::Toolkit => toolkit(root, building, &PYTHON, true),
        Kind::Workspace => workspace(building),
        Kind::SourceVersions => versions::source(building),
        Kind::ToolkitVersions => versions::toolkit(building),
        Kind::DebianVersions => versions::debian(building),
    }
}

fn base(building: &Path) -> anyhow::Result<()> {
    let mut command =
        shell::command(&["mmdebstrap", "--quiet", "--variant=minbase", "--mode=root"]);
    command.arg(format!("--include={BASE}")).arg(SUITE).arg(building.join("tree.tar"));
    shell::output(command.env("SOURCE_DATE_EPOCH", EPOCH).env("TMPDIR", building))?;
    Ok(())
}

fn toolkit(root: &Path, building: &Path, python: &[&str], whole: bool) -> anyhow::Result<()> {
    let tree = building.join("tree");
    let modules = tree.join(PYTHON_DIR.trim_start_matches('/'));
    fs::create_dir_all(&modules)?;
    let mut pip = shell::command(&["/usr/bin/python3", "-m", "pip", "install", "--quiet"]);
    pip.args(["--no-compile", "--disable-pip-version-check", "--root-user-action=ignore"]);
    pip.arg("--target").arg(&modules).args(python);
    shell::output(&mut pip)?;
    if whole {
        node_modules(&tree.join("opt/toolkit/node"))?;
        large_file(&tree.join("opt/toolkit/large.bin"))?;
    }
    // A compiled module holds its source's time: times first, then compile, then pack with them.
    set_times(&tree, EPOCH)?;
    compile(&tree, &modules)?;
    set_times(&tree, EPOCH)?;
    same_bytecode(root, &modules)?;
    pack(&tree, building)
}

fn node_modules(dir: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(dir)?;
    fs::write(dir.join("package.json"), "{\"name\":\"toolkit\",\"private\":true}\n")?;
    let mut npm = shell::command(&["npm", "install", "--ignore-scripts", "--no-package-lock"]);
    npm.args(["--no-audit", "--no-fund", "--no-progress", "--loglevel=error"]).args(NODE);
    shell::output(npm.current_dir(dir))?;
    Ok(())
}

/// Bytes that no codec shrinks and no two builds differ in.
fn large_file(path: &Path) -> anyhow::Result<()> {
    let mut random =
        blake3::Hasher::new_derive_key("lamella bench corpus large file v1").finalize_xof();
    let mut file = BufWriter::new(File::create(path)?);
    let mut block = vec![0_u8; 1 << 20];
    for _ in 0..LARGE_BYTES / block.len() as u64 {
        random.fill(&mut block);
        file.write_all(&block)?;
    }
    file.flush()?;
    Ok(())
}

pub(super) fn set_times(tree: &Path, seconds: &str) -> anyhow::Result<()> {
    let when = format!("@{seconds}");
    let mut command = Command::new("find");
    command.arg(tree).args(["-exec", "touch", "-h", "-d", &when, "{}", "+"]);
    shell::output(&mut command).map(|_| ())
}

fn compile(tree: &Path, modules: &Path) -> anyhow::Result<()> {
    let mut command = shell::command(&["/usr/bin/python3", "-m", "compileall", "-q", "-j", "2"]);
    command.arg("-s").arg(tree).arg("-p").arg("/").arg(modules);
    // Some packages ship modules that are not meant to compile; those stay uncompiled everywhere.
    command.output().context("cannot start the Python compiler")?;
    let core = modules.join("numpy/__pycache__");
    if !core.exists() {
        bail!("`{}` compiled nothing", shell::shown(&command));
    }
    Ok(())
}

/// The host's Python must write what the base's Python reads.
fn same_bytecode(root: &Path, modules: &Path) -> anyhow::Result<()> {
    let host = fs::read_dir(modules.join("numpy/__pycache__"))?
        .filter_map(Result::ok)
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .find_map(|name| {
            name.split('.').find(|part| part.starts_with("cpython-")).map(str::to_owned)
        })
        .context("the toolkit has no compiled module")?;
    let tar = root.join(Kind::Base.name()).join("tree.tar");
    let file = File::open(&tar)
        .with_context(|| format!("the toolkit needs the base at {}", tar.display()))?;
    let mut archive = tar::Archive::new(std::io::BufReader::new(file));
    for entry in archive.entries()? {
        let entry = entry?;
        let path = entry.path_bytes().into_owned();
        let path = String::from_utf8_lossy(&path).into_owned();
        if let Some(version) = path.trim_start_matches("./").strip_prefix("usr/bin/python3.") {
            let guest = format!("cpython-3{version}");
            if guest == host {
                return Ok(());
            }
            if version.bytes().all(|byte| byte.is_ascii_digit()) {
                bail!("this host compiles for {host}, the base runs {guest}; use Debian {SUITE}");
            }
        }
    }
    bail!("the base in {} has no Python", tar.display())
}

fn workspace(building: &Path) -> anyhow::Result<()> {
    let sources = building.join("sources");
    fs::create_dir_all(&sources)?;
    let configuration = apt(building, "deb-src")?;
    let mut command = shell::command(&["apt-get", "source", "-qq", SOURCE]);
    shell::output(command.env("APT_CONFIG", configuration).current_dir(&sources))?;
    let source = fs::read_dir(&sources)?
        .filter_map(Result::ok)
        .find(|entry| entry.path().is_dir())
        .context("apt-get source unpacked nothing")?
        .path();
    let tree = building.join("tree");
    let place = tree.join(WORKSPACE_DIR.trim_start_matches('/'));
    fs::create_dir_all(place.parent().context("the workspace has a parent")?)?;
    fs::rename(source, &place)?;
    set_times(&tree, EPOCH)?;
    commit(&place)?;
    set_times(&place.join(".git"), COMMITTED)?;
    pack(&tree, building)
}

/// A configuration of apt that knows the suite's main packages (`deb`) or their sources (`deb-src`) and
/// nothing else, with its lists fetched.
pub(super) fn apt(building: &Path, kind: &str) -> anyhow::Result<PathBuf> {
    let apt = building.join("apt");
    for dir in ["lists/partial", "cache/archives/partial"] {
        fs::create_dir_all(apt.join(dir))?;
    }
    fs::write(apt.join("sources.list"), format!("{kind} {} {SUITE} main\n", mirror()?))?;
    let configuration = apt.join("apt.conf");
    let text = format!(
        "Dir::Etc::sourcelist \"{0}/sources.list\";\nDir::Etc::sourceparts \"-\";\n\
         Dir::State::lists \"{0}/lists\";\nDir::Cache \"{0}/cache\";\nAPT::Sandbox::User \"root\";\n",
        shell::text(&apt)?
    );
    fs::write(&configuration, text)?;
    let mut update = shell::command(&["apt-get", "update", "-qq"]);
    shell::output(update.env("APT_CONFIG", &configuration))?;
    Ok(configuration)
}

/// Where the host gets Debian's main packages of the suite from: sources lie beside them.
fn mirror() -> anyhow::Result<String> {
    let words = ["apt-get", "indextargets", "--format", "$(REPO_URI)|$(RELEASE)|$(COMPONENT)"];
    let listed = shell::run(&[&words[..], &["Created-By: Packages"]].concat())?;
    listed
        .lines()
        .filter_map(|line| line.strip_suffix(&format!("|{SUITE}|main")))
        .map(str::to_owned)
        .next()
        .with_context(|| format!("apt knows no {SUITE} main; add it to the host's sources"))
}

fn commit(place: &Path) -> anyhow::Result<()> {
    let who = ["-c", "user.name=Lamella", "-c", "user.email=bench@localhost", "-c", "gc.auto=0"];
    let steps: [&[&str]; 4] = [
        &["init", "-q", "--initial-branch=main"],
        &["add", "-A", "-f"],
        &["commit", "-q", "-m", "As Debian ships it"],
        &["gc", "-q", "--prune=now"],
    ];
    for step in steps {
        let mut git = shell::command(&["git"]);
        git.args(who).args(step).current_dir(place);
        git.env("GIT_CONFIG_GLOBAL", "/dev/null").env("GIT_CONFIG_SYSTEM", "/dev/null");
        let when = format!("{COMMITTED} +0000");
        git.env("GIT_AUTHOR_DATE", &when).env("GIT_COMMITTER_DATE", &when);
        shell::output(&mut git)?;
    }
    Ok(())
}

/// Packs `tree` as `tree.tar` and removes it.
pub(super) fn pack(tree: &Path, building: &Path) -> anyhow::Result<()> {
    let mut tar = shell::command(&["tar", "--create", "--format=posix", "--sort=name"]);
    tar.args(["--owner=0", "--group=0", "--numeric-owner"]);
    tar.arg("--pax-option=exthdr.name=%d/PaxHeaders/%f,delete=atime,delete=ctime");
    tar.arg("--file").arg(building.join("tree.tar")).arg("--directory").arg(tree).arg(".");
    shell::output(&mut tar)?;
    for entry in fs::read_dir(building)?.filter_map(Result::ok) {
        if entry.file_name() != "tree.tar" {
            fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}
