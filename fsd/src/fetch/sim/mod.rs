//! Fault simulation: the real fetch engine and cache over a simulated store, disk and clock, through
//! thousands of histories, each decided by one number.
//!
//! `LAMELLA_SIM_SEED=n cargo test -p fsd fetch::sim` lives through one history again and prints what
//! happened; `LAMELLA_SIM_HISTORIES=n` sets how many there are, `LAMELLA_SIM_FIRST=n` the first seed. A failure
//! prints its seed.

mod disk;
mod fate;
mod history;
mod mounts;
mod mutant;
mod store;

use fate::{FAULTS, Fault};
use history::{History, Tally};
use mutant::Mutant;

/// Histories of a normal test run.
const HISTORIES: u64 = 10_000;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

/// Lives through a history, again with a record when it went wrong.
fn live(seed: u64, mutant: Mutant) -> Result<([u64; FAULTS], Tally), String> {
    let end = History::run(seed, mutant, false);
    match end.violation {
        None => Ok((end.struck, end.tally)),
        Some(violation) => Err(violation),
    }
}

#[test]
fn no_history_of_faults_shows_a_wrong_byte() {
    if let Some(seed) = number("LAMELLA_SIM_SEED") {
        let end = History::run(seed, Mutant::None, true);
        println!("{}", end.log);
        assert_eq!(end.violation, None, "seed {seed}");
        return;
    }
    let (mut struck, mut sum) = ([0; FAULTS], Tally::default());
    let first = number("LAMELLA_SIM_FIRST").unwrap_or(0);
    let histories = number("LAMELLA_SIM_HISTORIES").unwrap_or(HISTORIES);
    for seed in first..first + histories {
        match live(seed, Mutant::None) {
            Ok((faults, tally)) => {
                struck.iter_mut().zip(faults).for_each(|(sum, more)| *sum += more);
                sum.right += tally.right;
                sum.errors += tally.errors;
                sum.evictions += tally.evictions;
                sum.punches += tally.punches;
                sum.copies += tally.copies;
                sum.ahead += tally.ahead;
                sum.mounts += tally.mounts;
                sum.takeovers += tally.takeovers;
            }
            Err(violation) => panic!(
                "{violation}\nLAMELLA_SIM_SEED={seed} cargo test -p fsd fetch::sim -- --nocapture"
            ),
        }
    }
    println!("{sum:?}, faults {struck:?}");
    assert!(struck.iter().all(|count| *count > 0), "a fault never struck: {struck:?}");
    assert!(struck[Fault::Kill as usize] > 100 && struck[Fault::PowerCut as usize] > 100);
    assert!(sum.right > histories && sum.errors > 0 && sum.evictions > 0);
    assert!(sum.mounts > sum.evictions && sum.takeovers > 100, "{sum:?}");
    assert!(sum.punches > 0, "no chunk was evicted");
    assert!(sum.ahead > histories / 10, "readers waited for whole chunks: {sum:?}");
    assert!(sum.copies > 0, "no chunk came from a sibling");
}

#[test]
fn the_same_seed_is_the_same_history() {
    for seed in 0..20 {
        let [first, second] = [(); 2].map(|()| History::run(seed, Mutant::None, true).log);
        assert!(!first.is_empty() && first == second, "seed {seed}");
    }
}

#[test]
fn every_mutant_is_found() {
    for mutant in Mutant::ALL {
        let found = (0..HISTORIES).find_map(|seed| live(seed, mutant).err().map(|why| (seed, why)));
        let (seed, why) = found.unwrap_or_else(|| panic!("{mutant:?} was not found"));
        println!("{mutant:?} is found by history {seed}: {why}");
    }
}
