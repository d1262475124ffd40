//! Real input for the benches, made from the package registries and kept outside of the repository.
//!
//! A piece is a folder `<corpus>/<piece>/` with `tree.tar`, the same as `tree.tar.zst`, and
//! `record.json`, which holds what was asked for, bytes, files and digests. A piece is built below
//! `.building-<piece>` and appears with one rename: what a crash leaves behind is swept by the next
//! build. One builder at a time, by a lock file. A bench that finds other bytes than recorded, or a
//! record of another recipe, refuses the piece.

mod packages;
mod recipes;
mod versions;

pub use packages::{PACKAGES, install_missing};
pub use recipes::{PYTHON_DIR, WORKSPACE_DIR};
pub use versions::folders;

use crate::options::Options;
use crate::shell::{self, say};
use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

/// One piece of input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A Debian root file system.
    Base,
    /// numpy, scipy, pandas, a large node_modules and one large file.
    Toolkit,
    /// numpy and pandas only.
    SmallToolkit,
    /// CPython's source in a packed git repository.
    Workspace,
    /// Ten versions of a source package, in ten folders.
    SourceVersions,
    /// Ten versions of numpy and pandas.
    ToolkitVersions,
    /// Ten versions of a Debian root file system.
    DebianVersions,
}

impl Kind {
    /// All of them, in the order in which they are built.
    pub const ALL: [Self; 7] = [
        Self::Base,
        Self::SmallToolkit,
        Self::Workspace,
        Self::Toolkit,
        Self::SourceVersions,
        Self::ToolkitVersions,
        Self::DebianVersions,
    ];

    /// The folder's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Base => "base",
            Self::Toolkit => "toolkit",
            Self::SmallToolkit => "toolkit-small",
            Self::Workspace => "workspace",
            Self::SourceVersions => "source-versions",
            Self::ToolkitVersions => "toolkit-versions",
            Self::DebianVersions => "debian-versions",
        }
    }
}

/// What is known of a piece.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The folder's name.
    pub piece: String,
    /// What was asked for, in words; another recipe is another piece.
    pub recipe: String,
    /// Regular files and hard links.
    pub files: u64,
    /// All other entries.
    pub other_entries: u64,
    /// Bytes of the regular files.
    pub plain_bytes: u64,
    /// Size of the tar.
    pub tar_bytes: u64,
    /// BLAKE3 of the tar.
    pub tar_blake3: String,
    /// Size of the compressed tar (`zstd -3`).
    pub zst_bytes: u64,
    /// BLAKE3 of the compressed tar.
    pub zst_blake3: String,
}

/// A piece whose bytes were compared with its record.
#[derive(Debug, Clone)]
pub struct Piece {
    /// Its folder.
    pub dir: PathBuf,
    /// What is known of it.
    pub record: Record,
}

impl Piece {
    /// The tar.
    pub fn tar(&self) -> PathBuf {
        self.dir.join("tree.tar")
    }

    /// Says which input this is.
    pub fn announce(&self) {
        let Record { piece, files, tar_bytes, tar_blake3, .. } = &self.record;
        let digest = tar_blake3.get(..16).unwrap_or(tar_blake3);
        say(format!("corpus: {piece}: {files} files, {tar_bytes} bytes of tar, blake3 {digest}"));
    }
}

/// `bench corpus`: builds what is missing, checks what is there.
pub fn command(options: &Options) -> anyhow::Result<()> {
    let wanted: Vec<Kind> =
        Kind::ALL.into_iter().filter(|kind| options.wants(kind.name())).collect();
    if options.rebuild {
        for kind in &wanted {
            remove_tree(&options.corpus.join(kind.name()))?;
        }
    }
    ready(options, &wanted).map(|_| ())
}

/// The pieces in the order asked for: built when missing, checked always, announced.
pub fn ready(options: &Options, kinds: &[Kind]) -> anyhow::Result<Vec<Piece>> {
    install_missing()?;
    let root = &options.corpus;
    fs::create_dir_all(root).with_context(|| format!("cannot create {}", root.display()))?;
    let lock = File::create(root.join("lock"))?;
    if lock.try_lock().is_err() {
        say("corpus: waiting for another build of it");
        lock.lock()?;
    }
    let mut pieces = Vec::new();
    for kind in kinds {
        if !root.join(kind.name()).exists() {
            build(root, *kind)?;
        }
        let piece = check(root, *kind)?;
        piece.announce();
        pieces.push(piece);
    }
    Ok(pieces)
}

/// Builds one piece and gives it its name.
fn build(root: &Path, kind: Kind) -> anyhow::Result<()> {
    let recipe = recipes::describe(kind);
    say(format!("corpus: building {} ({recipe}); this takes a minute or more", kind.name()));
    let building = root.join(format!(".building-{}", kind.name()));
    remove_tree(&building)?;
    fs::create_dir(&building)?;
    recipes::build(kind, root, &building)?;
    let tar = building.join("tree.tar");
    let zst = building.join("tree.tar.zst");
    shell::run(&["zstd", "-3", "-q", "-f", shell::text(&tar)?, "-o", shell::text(&zst)?])?;
    let counts = count(&tar)?;
    let (tar_bytes, tar_blake3) = digest(&tar)?;
    let (zst_bytes, zst_blake3) = digest(&zst)?;
    let record = Record {
        piece: kind.name().to_owned(),
        recipe,
        files: counts.files,
        other_entries: counts.others,
        plain_bytes: counts.bytes,
        tar_bytes,
        tar_blake3,
        zst_bytes,
        zst_blake3,
    };
    fs::write(building.join("record.json"), serde_json::to_vec_pretty(&record)?)?;
    for file in [&tar, &zst, &building.join("record.json")] {
        File::open(file)?.sync_all()?;
    }
    // CRASH: before this rename the piece does not exist; after it the piece is complete.
    fs::rename(&building, root.join(kind.name()))?;
    File::open(root)?.sync_all()?;
    Ok(())
}

/// Compares a piece with its record.
fn check(root: &Path, kind: Kind) -> anyhow::Result<Piece> {
    let dir = root.join(kind.name());
    let remedy = || format!("`lamella bench corpus --rebuild {}` builds it anew", kind.name());
    let text = fs::read(dir.join("record.json"))
        .with_context(|| format!("{} has no record; {}", dir.display(), remedy()))?;
    let record: Record = serde_json::from_slice(&text)
        .with_context(|| format!("the record of {} is damaged; {}", dir.display(), remedy()))?;
    if record.recipe != recipes::describe(kind) {
        bail!("{} was built from another recipe ({}); {}", dir.display(), record.recipe, remedy());
    }
    let found = (digest(&dir.join("tree.tar"))?, digest(&dir.join("tree.tar.zst"))?);
    let (tar, zst) = (
        (record.tar_bytes, record.tar_blake3.clone()),
        (record.zst_bytes, record.zst_blake3.clone()),
    );
    if found != (tar, zst) {
        bail!("{} holds other bytes than its record says; {}", dir.display(), remedy());
    }
    Ok(Piece { dir, record })
}

struct Counts {
    files: u64,
    others: u64,
    bytes: u64,
}

fn count(tar: &Path) -> anyhow::Result<Counts> {
    let mut counts = Counts { files: 0, others: 0, bytes: 0 };
    let mut archive = tar::Archive::new(std::io::BufReader::new(File::open(tar)?));
    for entry in archive.entries()? {
        let entry = entry?;
        let kind = entry.header().entry_type();
        if kind.is_file() || kind.is_hard_link() {
            counts.files += 1;
            counts.bytes += entry.size();
        } else {
            counts.others += 1;
        }
    }
    Ok(counts)
}

/// Size and BLAKE3 of a file.
fn digest(path: &Path) -> anyhow::Result<(u64, String)> {
    let mut file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0_u8; 1 << 20];
    let mut bytes = 0_u64;
    loop {
        let count = file.read(&mut buffer)?;
        if count == 0 {
            return Ok((bytes, hasher.finalize().to_hex().to_string()));
        }
        hasher.update(&buffer[..count]);
        bytes += count as u64;
    }
}

/// Removes a tree that may not exist.
pub fn remove_tree(path: &Path) -> anyhow::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}
