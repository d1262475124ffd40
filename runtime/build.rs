//! Builds the zygote, a static program for the target, and leaves its path to the crate in
//! `LAMELLA_GUEST`. It is compiled by a cargo of its own in a target folder of its own: another profile
//! and other flags than the rest, and no waiting for the lock of the build that is running.

use std::path::{Path, PathBuf};
use std::process::Command;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let crate_folder = PathBuf::from(std::env::var("CARGO_MANIFEST_DIR")?);
    let workspace = crate_folder.parent().ok_or("no workspace folder")?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    for watched in ["guest/src", "guest/Cargo.toml", "sys/src", "sys/Cargo.toml"] {
        println!("cargo:rerun-if-changed={}", workspace.join(watched).display());
    }
    for shared in ["proto/src/launch.rs", "proto/src/exits.rs"] {
        println!("cargo:rerun-if-changed={}", workspace.join(shared).display());
    }
    println!("cargo:rerun-if-changed={}", workspace.join("proto/Cargo.toml").display());

    let target = "x86_64-unknown-linux-gnu";
    let folder = shared_target_folder(&out);
    let status = Command::new(std::env::var("CARGO")?)
        .current_dir(workspace)
        .args(["build", "--quiet", "--package", "guest", "--profile", "guest"])
        .args(["--target", target, "--target-dir"])
        .arg(&folder)
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .env("RUSTFLAGS", "-Ctarget-feature=+crt-static -Crelocation-model=static")
        .status()?;
    if !status.success() {
        return Err(format!("the build of the guest ended with {status}").into());
    }
    let program = folder.join(target).join("guest").join("guest");
    let kept = out.join("guest");
    std::fs::copy(&program, &kept)?;
    println!("cargo:rustc-env=LAMELLA_GUEST={}", kept.display());
    Ok(())
}

/// One folder for all profiles and feature sets of the outer build, so that the guest is compiled once:
/// `OUT_DIR` is `<target>/<profile>/build/runtime-<hash>/out`.
fn shared_target_folder(out: &Path) -> PathBuf {
    out.ancestors().nth(4).map_or_else(|| out.join("target"), |target| target.join("guest-build"))
}
