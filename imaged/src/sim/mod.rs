//! Random histories of several daemons on one store: publishers, taggers, mounts, collectors, compaction, kills,
//! clocks that jump; then the question whether what has a name is complete, and in the end whether what has none
//! is gone.
//!
//! Each daemon is a process of its own as far as the store can tell: its own catalog, its own memory. A seed
//! decides who makes the next request to the store, when who is killed, and what everybody wants. A failure names
//! its seed; `LAMELLA_SIM_SEED=<seed>` repeats that world, `LAMELLA_SIM_WORLDS=<n>` runs more of them.

mod actors;
mod content;
mod stage;
mod world;

use world::World;

/// Worlds, each a store with its daemons.
const WORLDS: u64 = 12;
/// Histories in each world.
const HISTORIES: u64 = 170;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

#[test]
fn what_is_named_is_complete_and_what_is_not_goes_away_whatever_happens_when() {
    let only = number("LAMELLA_SIM_SEED");
    let worlds = number("LAMELLA_SIM_WORLDS").unwrap_or(WORLDS);
    let seeds = only.map_or(0..worlds, |seed| seed..seed + 1);
    let mut tally = world::Tally::default();
    for seed in seeds {
        let outcome = std::panic::catch_unwind(|| {
            let mut world = World::new(seed);
            for _ in 0..HISTORIES {
                world.history();
            }
            world.finish()
        });
        match outcome {
            Ok(one) => tally.add(&one),
            Err(cause) => {
                eprintln!("LAMELLA_SIM_SEED={seed} repeats this world");
                std::panic::resume_unwind(cause);
            }
        }
    }
    println!("{tally:?}");
    if only.is_none() && worlds >= WORLDS {
        tally.assert_everything_happened();
    }
}
