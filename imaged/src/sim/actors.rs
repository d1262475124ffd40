//! What the processes of a history want. Every call may fail, because its process was killed or what it wanted is
//! gone; what succeeded has to hold.

use super::content::{Content, Made};
use super::stage::Dice;
use crate::gc::{CollectOptions, Collected};
use crate::images::Images;
use crate::upload::Sink;
use layer::reference::{Reference, Target};
use layer::{Digest, ErrorKind, LayerId, Result};
use std::time::Duration;
use store::codec::verify_chunk;

/// What a process does in one history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Publish,
    Name,
    Mount,
    Collect,
}

/// What came of it.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    pub(super) published: u64,
    pub(super) named: u64,
    pub(super) refused: u64,
    pub(super) mounted: Vec<(LayerId, String)>,
    pub(super) collected: Option<Collected>,
}

pub(super) fn reference(number: usize) -> Reference {
    format!("base/r{number}").parse().unwrap()
}

pub(super) fn environment_reference(number: usize) -> Reference {
    format!("env/e{number}").parse().unwrap()
}

/// References of each kind.
pub(super) const REFERENCES: usize = 4;

pub(super) fn act(part: Part, images: &Images, content: &Content, dice: &mut Dice) -> Outcome {
    let mut outcome = Outcome::default();
    let done = match part {
        Part::Publish => publish(images, content, dice, &mut outcome),
        Part::Name => name(images, content, dice, &mut outcome),
        Part::Mount => mount(images, content, dice, &mut outcome),
        Part::Collect => collect(images, dice, &mut outcome),
    };
    if let Err(error) = done {
        let expected = matches!(
            error.kind(),
            ErrorKind::Unavailable | ErrorKind::NotFound | ErrorKind::Busy | ErrorKind::Exists
        );
        assert!(expected, "{part:?}: {}", error.chain());
        outcome.refused += 1;
    }
    outcome
}

fn publish(
    images: &Images,
    content: &Content,
    dice: &mut Dice,
    outcome: &mut Outcome,
) -> Result<()> {
    let (id, _) = images.open_publish("sim", 600_000)?;
    for _ in 0..1 + dice.below(2) {
        let made = &content.layers[dice.below(content.layers.len())];
        publish_layer(images, &id, made)?;
        outcome.published += 1;
        if dice.one_in(2) {
            tag(images, dice, Target::Layer(made.id), outcome)?;
        }
    }
    if dice.one_in(2) {
        let environment = &content.environments[dice.below(content.environments.len())];
        for layer in &environment.layers {
            let made = content.layers.iter().find(|made| made.id == *layer).unwrap();
            publish_layer(images, &id, made)?;
        }
        let publish = images.publish(&id)?;
        let (env, _) = images.commit_environment(&publish, &environment.canonical())?;
        if dice.one_in(2) {
            tag(images, dice, Target::Environment(env), outcome)?;
        }
    }
    images.close_publish(&id)?;
    if dice.one_in(3) {
        let made = &content.layers[dice.below(content.layers.len())];
        tag(images, dice, Target::Layer(made.id), outcome)?;
    }
    Ok(())
}

fn publish_layer(images: &Images, id: &str, made: &Made) -> Result<()> {
    let digests: Vec<_> = made.chunks.iter().map(|(digest, _)| *digest).collect();
    for last_try in [false, true] {
        let publish = images.publish(id)?;
        let missing = images.missing_chunks(&publish, &digests)?;
        let mut sink = Sink::new(images, &publish);
        for (at, _) in missing.iter().enumerate().filter(|(_, missing)| **missing) {
            sink.append(&made.upload(at))?;
        }
        sink.finish()?;
        match images.commit_layer(&publish, &made.bytes) {
            Err(error) if error.kind() == ErrorKind::NotFound && !last_try => {}
            other => {
                assert_eq!(other?.0, made.id);
                return Ok(());
            }
        }
    }
    Ok(())
}

fn tag(images: &Images, dice: &mut Dice, target: Target, outcome: &mut Outcome) -> Result<()> {
    let number = dice.below(REFERENCES);
    let reference = match target {
        Target::Layer(_) => reference(number),
        Target::Environment(_) => environment_reference(number),
    };
    images.tag(&reference, target, "sim", None)?;
    outcome.named += 1;
    Ok(())
}

/// Tags what may be there or may not, and untags.
fn name(images: &Images, content: &Content, dice: &mut Dice, outcome: &mut Outcome) -> Result<()> {
    for _ in 0..2 + dice.below(3) {
        let done = match dice.below(4) {
            0 => {
                let made = &content.layers[dice.below(content.layers.len())];
                tag(images, dice, Target::Layer(made.id), outcome)
            }
            1 => {
                let environment = &content.environments[dice.below(content.environments.len())];
                tag(images, dice, Target::Environment(environment.id()), outcome)
            }
            2 => images.untag(&reference(dice.below(REFERENCES)), "sim").map(drop),
            _ => images.untag(&environment_reference(dice.below(REFERENCES)), "sim").map(drop),
        };
        match done {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            other => other?,
        }
    }
    Ok(())
}

/// Takes a lease on a layer and reads all of it, as a node does.
fn mount(images: &Images, content: &Content, dice: &mut Dice, outcome: &mut Outcome) -> Result<()> {
    let made = &content.layers[dice.below(content.layers.len())];
    let ttl_ms = 3_600_000 * (1 + dice.next() % 12);
    let lease = images.acquire_lease("node-sim", vec![Digest(made.id.0)], ttl_ms)?;
    outcome.mounted.push((made.id, lease.id));
    for _ in 0..2 {
        for at in 0..made.chunks.len() {
            read_chunk(images, made, at)?;
        }
    }
    Ok(())
}

/// By the hint; when that is stale by a fresh one.
fn read_chunk(images: &Images, made: &Made, at: usize) -> Result<()> {
    let (digest, plain) = &made.chunks[at];
    for _ in 0..8 {
        if let Some(locations) = images.store.read_locations(&made.id)?
            && let Some((pack, place)) = locations.get(at)
        {
            let mut payload = vec![0; place.stored_bytes as usize];
            match images.store.read_pack(&pack, place.offset, &mut payload) {
                Ok(()) => {
                    return verify_chunk(&payload, place.codec, plain.len() as u32, digest);
                }
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        let (_, missing) = images.write_locations(&made.id)?;
        assert!(missing.is_empty(), "a leased layer lacks {missing:?}");
    }
    panic!("the hints of a leased layer are stale again and again");
}

fn collect(images: &Images, dice: &mut Dice, outcome: &mut Outcome) -> Result<()> {
    if dice.one_in(20) {
        return images.undo_collection().map(drop);
    }
    let hours = |dice: &mut Dice| Duration::from_secs(3600 * (dice.next() % 3));
    let options = CollectOptions {
        dry_run: dice.one_in(15),
        grace: hours(dice),
        history: hours(dice),
        compact_below_percent: if dice.one_in(3) { 0 } else { 70 },
    };
    let collected = images.collect(&options)?;
    if !options.dry_run {
        outcome.collected = Some(collected);
    }
    Ok(())
}
