//! Layers that are loaded whole behind demand: how long a load goes on, and how fast.
//!
//! A load under a rate of one byte a second stands still after its first chunk, so that what ends it or
//! goes on with it is no matter of speed.

#![allow(clippy::unwrap_used)]

mod fsd_world;

use fsd_world::{LayerShape, World, wait_until};
use proto::v1::{CompleteResponse, Plane};
use std::sync::mpsc;
use std::time::Duration;

/// As good as no limit.
const FAST: u64 = 1 << 40;
const STANDSTILL: [&str; 2] = ["--prefetch-rate", "1"];

fn world(options: &[&str]) -> World {
    let shape = LayerShape { files: 12, ..LayerShape::default() };
    let mut world = World::new(&shape).unwrap();
    world.options = options.iter().map(|word| (*word).to_owned()).collect();
    world.start().unwrap();
    world
}

/// Bytes of the layer that are here, while something is done with it.
fn present(world: &World) -> u64 {
    world.stats().unwrap().layers.first().map_or(0, |layer| layer.present_bytes)
}

fn assert_complete(world: &World) {
    let attached = world.attach_as("reader", Plane::Auto).unwrap();
    assert!(attached.complete);
    world.compare(attached.mount_path.as_ref()).unwrap();
}

/// Whether a load is under way, by what a later fsd would see.
fn is_noted(world: &World) -> bool {
    world.run_folder().join("completions").join(world.layer.id.to_string()).exists()
}

/// Begins a load on a thread of its own and waits for its first chunk.
fn begin(world: &World, rate: u64) -> mpsc::Receiver<anyhow::Result<CompleteResponse>> {
    let before = present(world);
    let (tell, told) = mpsc::channel();
    let load = world.begin_complete(rate);
    std::thread::spawn(move || tell.send(load()));
    wait_until("the first chunk", || present(world) > before);
    assert!(is_noted(world));
    told
}

#[test]
fn a_load_goes_on_under_the_next_fsd() {
    let mut world = world(&STANDSTILL);
    let told = begin(&world, 0);
    world.kill_fsd().unwrap();
    assert!(told.recv().unwrap().is_err());
    world.start().unwrap();
    assert!(is_noted(&world));
    wait_until("one chunk", || present(&world) > 0);
    // Somebody in a hurry need not wait for it; both end with the last chunk.
    assert!(!world.begin_complete(FAST)().unwrap().broken_off);
    wait_until("the end of the load", || !is_noted(&world));
    assert_complete(&world);
}

#[test]
fn a_load_ends_with_the_last_holder() {
    let world = world(&STANDSTILL);
    world.attach("one").unwrap();
    world.attach_as("two", Plane::Auto).unwrap();
    let told = begin(&world, 0);
    world.detach("one").unwrap();
    assert!(told.recv_timeout(Duration::from_millis(300)).is_err(), "two holds it still");
    world.detach("two").unwrap();
    let done = told.recv().unwrap().unwrap();
    assert!(done.broken_off && done.fetched_bytes > 0);
    assert!(done.fetched_bytes < world.layer.data_bytes);
    assert!(!is_noted(&world));
    wait_until("the release", || world.stats().unwrap().layers.is_empty());
}

#[test]
fn a_load_of_a_pinned_layer_does_not_end_with_its_holders() {
    let world = world(&STANDSTILL);
    world.pin(true).unwrap();
    world.attach("one").unwrap();
    let told = begin(&world, 0);
    world.detach("one").unwrap();
    assert!(told.recv_timeout(Duration::from_millis(300)).is_err() && is_noted(&world));
    assert!(!world.begin_complete(FAST)().unwrap().broken_off);
    assert!(!told.recv().unwrap().unwrap().broken_off);
}

#[test]
fn an_fsd_that_is_told_to_end_waits_for_no_load_and_leaves_it_to_the_next() {
    let mut world = world(&STANDSTILL);
    let told = begin(&world, 0);
    world.drain(false).unwrap();
    assert!(told.recv().unwrap().is_err());
    assert!(world.wait_end().unwrap().success() && is_noted(&world));
    world.options.clear();
    world.start().unwrap();
    // It is under way again, at the rate that it was asked for with.
    wait_until("one chunk", || present(&world) > 0);
    assert!(is_noted(&world));
    assert!(!world.begin_complete(FAST)().unwrap().broken_off);
    assert_complete(&world);
}
