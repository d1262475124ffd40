//! `tidy`: the layering, and the habits that a program can check.
//!
//! Every rule is a function from the tree to a list of complaints; all complaints are printed, then
//! the command fails if there were any.

use crate::Outcome;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Which crates of the workspace a crate may depend on; exhaustive.
const EDGES: [(&str, &[&str]); 16] = [
    ("layer", &[]),
    ("sys", &[]),
    ("store", &["layer", "sys"]),
    ("proto", &["layer"]),
    ("guest", &["sys", "proto"]),
    ("builder", &["layer", "sys", "store", "proto"]),
    ("imaged", &["layer", "sys", "store", "proto", "builder"]),
    ("fsd", &["layer", "sys", "store", "proto"]),
    ("netpolicy", &["layer", "sys"]),
    ("runtime", &["layer", "sys", "proto", "builder", "netpolicy"]),
    ("snapshotter", &["layer", "sys", "proto"]),
    (
        "cli",
        &[
            "layer",
            "sys",
            "store",
            "proto",
            "builder",
            "imaged",
            "fsd",
            "runtime",
            "snapshotter",
            "bench",
        ],
    ),
    ("bench", &["layer", "sys", "store", "proto", "builder", "imaged", "fsd", "runtime"]),
    (
        "tests",
        &[
            "layer",
            "sys",
            "store",
            "proto",
            "builder",
            "imaged",
            "fsd",
            "netpolicy",
            "runtime",
            "cli",
            "bench",
        ],
    ),
    ("fuzz", &["layer", "store", "builder", "netpolicy"]),
    ("xtask", &[]),
];
/// Crates that may hold unsafe code.
const UNSAFE_CRATES: [&str; 2] = ["sys", "guest"];
const BANNED_NAMES: [&str; 6] = ["utils", "util", "common", "helper", "manager", "misc"];
const MAX_LINES: usize = 800;
/// The files that define what is stored; `docs/format.md` names the digest it was written for.
const FORMAT_SOURCES: &str = "layer/src";
const FORMAT_DOCUMENT: &str = "docs/format.md";
const FORMAT_MARK: &str = "Format digest: `";

/// One source file.
struct Source {
    path: PathBuf,
    text: String,
}

impl Source {
    fn crate_name(&self) -> &str {
        self.path.iter().next().and_then(|first| first.to_str()).unwrap_or_default()
    }

    fn stem(&self) -> &str {
        self.path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default()
    }
}

/// Runs every rule.
pub fn run() -> Outcome {
    let sources = sources()?;
    let mut complaints = edges()?;
    complaints.extend(sources.iter().flat_map(habits));
    complaints.extend(dead_files(&sources));
    complaints.extend(unsafe_fences(&sources));
    complaints.extend(promises(&sources)?);
    complaints.extend(format_digest(&sources)?);
    if complaints.is_empty() {
        println!("tidy: {} files are in order", sources.len());
        return Ok(());
    }
    for complaint in &complaints {
        println!("tidy: {complaint}");
    }
    Err(format!("{} of them; see above", complaints.len()))
}

fn sources() -> Result<Vec<Source>, String> {
    let listed = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "*.rs"])
        .output()
        .map_err(|error| format!("git ls-files: {error}"))?;
    if !listed.status.success() {
        // Without a list there would be nothing to complain about.
        return Err(format!("git ls-files: {}", String::from_utf8_lossy(&listed.stderr).trim()));
    }
    let names = String::from_utf8_lossy(&listed.stdout).into_owned();
    let mut sources = Vec::new();
    for name in names.split('\0').filter(|name| !name.is_empty()) {
        // A file that git still lists but that was removed from the tree is not part of it.
        if let Ok(text) = std::fs::read_to_string(name) {
            sources.push(Source { path: PathBuf::from(name), text });
        }
    }
    Ok(sources)
}

fn edges() -> Result<Vec<String>, String> {
    let output = Command::new("cargo")
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .output()
        .map_err(|error| format!("cargo metadata: {error}"))?;
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout)
        .map_err(|error| format!("cargo metadata answered no JSON: {error}"))?;
    let allowed: BTreeMap<&str, &[&str]> = EDGES.into_iter().collect();
    let mut complaints = Vec::new();
    let packages = metadata["packages"].as_array().cloned().unwrap_or_default();
    for package in &packages {
        let name = package["name"].as_str().unwrap_or_default();
        let Some(may) = allowed.get(name) else {
            complaints.push(format!("crate {name} is not in the table of allowed edges"));
            continue;
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let target = dependency["name"].as_str().unwrap_or_default();
            if dependency["path"].is_string() && !may.contains(&target) {
                complaints.push(format!("{name} -> {target} is not an allowed edge"));
            }
        }
    }
    Ok(complaints)
}

fn habits(source: &Source) -> Vec<String> {
    let path = source.path.display();
    let mut complaints = Vec::new();
    if !source.text.starts_with("//!") {
        complaints.push(format!("{path}: does not open with `//!`"));
    }
    if BANNED_NAMES.contains(&source.stem()) {
        complaints.push(format!("{path}: the name says nothing"));
    }
    let lines = source.text.lines().count();
    if lines > MAX_LINES {
        complaints.push(format!("{path}: {lines} lines; is it still one thing?"));
    }
    // Spelled in halves, so that this file does not complain about itself.
    let unfinished =
        [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("todo", "!("), concat!("XX", "X")];
    for (number, line) in source.text.lines().enumerate() {
        if unfinished.iter().any(|word| line.contains(word)) {
            complaints.push(format!("{path}:{}: unfinished: {}", number + 1, line.trim()));
        }
    }
    complaints
}

/// A file below `src/` that no `mod` declaration of its folder or parent names.
fn dead_files(sources: &[Source]) -> Vec<String> {
    let roots = ["lib", "main", "mod", "build"];
    let mut complaints = Vec::new();
    for source in sources.iter().filter(|source| !roots.contains(&source.stem())) {
        if !source.path.iter().any(|part| part == "src") || in_bin_folder(&source.path) {
            continue;
        }
        let folder = source.path.parent().unwrap_or(Path::new(""));
        let declaration = format!("mod {};", source.stem());
        let declared = sources.iter().any(|other| {
            let beside = other.path.parent() == Some(folder) && roots.contains(&other.stem());
            let above = other.path.with_extension("") == folder;
            (beside || above) && other.text.contains(&declaration)
        });
        if !declared {
            complaints.push(format!("{}: no `{declaration}` names it", source.path.display()));
        }
    }
    complaints
}

fn in_bin_folder(path: &Path) -> bool {
    path.parent().is_some_and(|folder| folder.ends_with("src/bin"))
}

fn unsafe_fences(sources: &[Source]) -> Vec<String> {
    let mut complaints = Vec::new();
    for source in sources {
        let fenced = UNSAFE_CRATES.contains(&source.crate_name());
        let is_root = matches!(source.stem(), "lib" | "main")
            && source.path.parent().is_some_and(|folder| folder.ends_with("src"));
        if is_root && !fenced && !source.text.contains("#![forbid(unsafe_code)]") {
            complaints.push(format!("{}: lacks forbid(unsafe_code)", source.path.display()));
        }
    }
    complaints
}

/// Every test that SPECIFICATION.md names (`name` in its last column) must exist.
fn promises(sources: &[Source]) -> Result<Vec<String>, String> {
    let path = "SPECIFICATION.md";
    let text = std::fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
    let mut complaints = Vec::new();
    for line in text.lines().filter(|line| line.starts_with('|')) {
        let Some(last) = line.trim_end_matches('|').rsplit('|').next() else { continue };
        for name in last.split('`').skip(1).step_by(2) {
            let Some(test) = name.strip_prefix("test ") else { continue };
            let function = format!("fn {test}(");
            if !sources.iter().any(|source| source.text.contains(&function)) {
                complaints.push(format!("{path}: no test is called {test}"));
            }
        }
    }
    Ok(complaints)
}

fn format_digest(sources: &[Source]) -> Result<Vec<String>, String> {
    let mut formats: Vec<&Source> =
        sources.iter().filter(|source| source.path.starts_with(FORMAT_SOURCES)).collect();
    formats.sort_by(|a, b| a.path.cmp(&b.path));
    let digest = format!("{:016x}", fnv1a(formats.iter().flat_map(|source| code(&source.text))));
    let document = std::fs::read_to_string(FORMAT_DOCUMENT)
        .map_err(|error| format!("{FORMAT_DOCUMENT}: {error}"))?;
    let stated = document
        .split_once(FORMAT_MARK)
        .and_then(|(_, rest)| rest.split_once('`'))
        .map_or("none", |(digest, _)| digest);
    if stated == digest {
        return Ok(Vec::new());
    }
    Ok(vec![format!(
        "{FORMAT_DOCUMENT} was written for format digest {stated}, the code has {digest}: \
         read the change, bring the document up to date, then state the new digest"
    )])
}

/// The lines that can change a format: no comments, no tests.
fn code(text: &str) -> impl Iterator<Item = u8> + '_ {
    text.lines()
        .take_while(|line| !line.starts_with("#[cfg(test)]"))
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with("//"))
        .flat_map(str::bytes)
}

/// FNV-1a, 64 bits: enough to notice a change; nobody attacks a tidy check.
fn fnv1a(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(path: &str, text: &str) -> Source {
        Source { path: PathBuf::from(path), text: text.to_owned() }
    }

    #[test]
    fn an_undeclared_file_is_dead_and_a_declared_one_is_not() {
        let tree = [
            source("a/src/lib.rs", "//! a\npub mod x;"),
            source("a/src/x/mod.rs", "//! x\nmod inner;"),
            source("a/src/x/inner.rs", "//! inner"),
            source("a/src/y.rs", "//! y"),
            source("a/src/x.rs", "//! x"),
            source("a/src/bin/tool.rs", "//! tool"),
        ];
        let complaints = dead_files(&tree);
        assert_eq!(complaints.len(), 1, "{complaints:?}");
        assert!(complaints[0].contains("a/src/y.rs"));
    }

    #[test]
    fn habits_are_noticed() {
        let text = format!("fn x() {{}}\n// {}: later\n", concat!("TO", "DO"));
        assert_eq!(habits(&source("a/src/helper.rs", &text)).len(), 3);
        assert!(habits(&source("a/src/page.rs", "//! A page.\n")).is_empty());
    }

    #[test]
    fn comments_do_not_change_the_format_digest() {
        let plain: Vec<u8> = code("//! x\nconst A: u32 = 1;\n").collect();
        let commented: Vec<u8> = code("//! y\n\n// why\n  const A: u32 = 1;\n").collect();
        assert_eq!(plain, commented);
    }
}
