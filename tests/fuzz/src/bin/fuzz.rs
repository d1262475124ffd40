//! One target under libFuzzer: `LAMELLA_FUZZ_TARGET=erofs fuzz CORPUS_DIR ...`.
//!
//! `cargo xtask fuzz` builds it with coverage instrumentation and runs each target for its time.
#![no_main]

use fuzz::Target;
use std::sync::OnceLock;

static TARGET: OnceLock<&'static Target> = OnceLock::new();

fn chosen() -> &'static Target {
    TARGET.get_or_init(|| {
        let name = std::env::var("LAMELLA_FUZZ_TARGET").unwrap_or_default();
        fuzz::TARGETS.iter().find(|target| target.name == name).unwrap_or_else(|| {
            let names: Vec<&str> = fuzz::TARGETS.iter().map(|target| target.name).collect();
            panic!("LAMELLA_FUZZ_TARGET is '{name}', not one of {}", names.join(", "))
        })
    })
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| (chosen().run)(data));
