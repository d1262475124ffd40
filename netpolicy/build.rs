//! Compiles the packet filter with Debian's clang and leaves the path of its object in `LAMELLA_FILTER`.

use std::path::PathBuf;
use std::process::Command;

const SOURCE: &str = "bpf/filter.bpf.c";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed={SOURCE}");
    let object = PathBuf::from(std::env::var("OUT_DIR")?).join("filter.bpf.o");
    let compiled = Command::new("clang")
        .args(["-O2", "-g", "-Wall", "-Werror", "-target", "bpf", "-c", SOURCE, "-o"])
        .arg(&object)
        // Where Debian keeps <asm/types.h>.
        .arg(format!("-I/usr/include/{}-linux-gnu", std::env::var("CARGO_CFG_TARGET_ARCH")?))
        .output();
    let missing = "the packet filter is compiled with clang: install the Debian packages clang and libbpf-dev";
    let compiled = compiled.map_err(|error| format!("{missing} ({error})"))?;
    let words = String::from_utf8_lossy(&compiled.stderr);
    if words.contains("bpf_helpers.h' file not found") {
        return Err(missing.into());
    }
    if !compiled.status.success() {
        return Err(format!("clang does not compile {SOURCE}:\n{words}").into());
    }
    println!("cargo:rustc-env=LAMELLA_FILTER={}", object.display());
    Ok(())
}
