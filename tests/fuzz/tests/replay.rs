//! Every corpus, every seed, and a while of seeded mutations of both, without instrumentation.
//!
//! A failure leaves its input in a file and names it; `LAMELLA_FUZZ_INPUT=FILE` with the name of the
//! target as filter runs that input alone. `LAMELLA_FUZZ_SECONDS` bounds the whole (60), `LAMELLA_FUZZ_SEED`
//! chooses the mutations (1).

use fuzz::mutate::{Dice, mutate};
use fuzz::{TARGETS, Target, corpus};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// Inputs longer than this are not grown any further.
const MAX_INPUT_BYTES: usize = 64 << 10;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn check(target: &Target, input: &[u8], what: &str) {
    if catch_unwind(AssertUnwindSafe(|| (target.run)(input))).is_err() {
        let path = std::env::temp_dir().join(format!("lamella-fuzz-{}", target.name));
        std::fs::write(&path, input).expect("the input is kept");
        panic!("{}: {what} failed; its input is in {}", target.name, path.display());
    }
}

#[test]
fn parsers_survive_the_corpora_and_seeded_mutations() {
    let seed = number("LAMELLA_FUZZ_SEED", 1);
    let share = Duration::from_secs(number("LAMELLA_FUZZ_SECONDS", 60)) / TARGETS.len() as u32;
    for target in TARGETS {
        let mut inputs = (target.seeds)();
        assert!(!inputs.is_empty(), "{} has no seed", target.name);
        inputs.extend(corpus::load(target.name).expect("its corpus is in the repository"));
        for (index, input) in inputs.iter().enumerate() {
            check(target, input, &format!("input {index}"));
        }
        let (mut dice, until) = (Dice::new(target.name, seed), Instant::now() + share);
        let mut rounds = 0;
        // The first rounds run in any case, so that a slow machine does not skip them.
        while rounds < 200 || Instant::now() < until {
            let mut input = inputs[dice.below(inputs.len())].clone();
            let other = &inputs[dice.below(inputs.len())];
            mutate(&mut dice, &mut input, other);
            input.truncate(MAX_INPUT_BYTES);
            check(target, &input, &format!("mutation {rounds} of seed {seed}"));
            rounds += 1;
        }
        println!("{}: {} inputs, {rounds} mutations", target.name, inputs.len());
    }
}

/// A seed that its parser refuses at the first check would show nothing.
#[test]
fn seeds_are_what_parsers_take() {
    use layer::chunk::ChunkTable;
    use layer::erofs::reader::Reader;
    use layer::layer_file::LayerFile;
    for (name, takes) in [
        ("layer_file", (|seed| LayerFile::decode(seed).is_ok()) as fn(&[u8]) -> bool),
        ("erofs", |seed| Reader::parse(seed).and_then(|reader| reader.to_tree()).is_ok()),
        ("chunk_table", |seed| ChunkTable::decode(seed).is_ok()),
        ("manifest", |seed| layer::manifest::Manifest::decode(seed).is_ok()),
        ("environment", |seed| layer::environment::Environment::decode(seed).is_ok()),
    ] {
        let target = TARGETS.iter().find(|target| target.name == name).expect("a target");
        for (index, seed) in (target.seeds)().iter().enumerate() {
            assert!(takes(seed), "seed {index} of {name}");
        }
    }
}
