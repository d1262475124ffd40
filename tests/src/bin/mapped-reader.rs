//! Maps a file, says so, waits for a line, then touches one byte of every page and tells how many of
//! them were zero: for tests of what a mapping shows once nobody serves the file. It may die by SIGBUS.
#![forbid(unsafe_code)]

use anyhow::{Context, Result};
use std::fs::File;
use std::io::Write;
use sys::mapping::FileMapping;

const PAGE: usize = 4096;

fn main() -> Result<()> {
    let path = std::env::args().nth(1).context("path")?;
    let mapping = FileMapping::open(&File::open(path)?)?;
    let mut out = std::io::stdout();
    writeln!(out, "mapped")?;
    out.flush()?;
    std::io::stdin().read_line(&mut String::new())?;
    let mut zeros = 0;
    for page in (0..mapping.bytes()).step_by(PAGE) {
        let mut content = [0; PAGE];
        mapping.copy(page, &mut content)?;
        zeros += usize::from(content.iter().all(|byte| *byte == 0));
    }
    writeln!(out, "zeros {zeros}")?;
    Ok(())
}
