//! Profiles: what is kept of reads, and that foreign bytes never panic.

use super::*;
use crate::error::ErrorKind;
use proptest::prelude::*;

fn touch(layer: u32, start_block: u32, blocks: u32, at_ms: u32) -> Touch {
    Touch { layer, start_block, blocks, at_ms }
}

fn ids() -> Vec<LayerId> {
    vec![LayerId([1; 32]), LayerId([2; 32])]
}

/// Runs over disjoint slots of 16 blocks, in any order.
fn run() -> impl Strategy<Value = Run> {
    let slots = Just((0..20_u32).collect::<Vec<_>>()).prop_shuffle();
    (any::<u32>(), slots, 1..20_usize, prop::collection::vec((1..=16_u32, 0..50_u32), 20)).prop_map(
        |(started, slots, count, shapes)| {
            let mut at_ms = 0;
            let touches = slots[..count].iter().zip(shapes).map(|(slot, (blocks, pause))| {
                at_ms += pause;
                touch(slot % 2, slot / 2 * 16, blocks, at_ms)
            });
            Run::new(u64::from(started), ids(), touches.collect()).unwrap()
        },
    )
}

proptest! {
    #[test]
    fn profiles_round_trip(runs in prop::collection::vec(run(), 0..10)) {
        let profile = Profile::new(runs);
        prop_assert!(profile.runs().len() <= MAX_RUNS);
        prop_assert_eq!(Profile::decode(&profile.encode()).unwrap(), profile);
    }

    #[test]
    fn merging_knows_no_order(runs in prop::collection::vec(run(), 3..12), cut in 1..3_usize) {
        let whole = Profile::new(runs.clone());
        let (one, other) = runs.split_at(cut);
        let (one, other) = (Profile::new(one.to_vec()), Profile::new(other.to_vec()));
        prop_assert_eq!(&one.merged(&other), &whole);
        prop_assert_eq!(&other.merged(&one), &whole);
        prop_assert_eq!(&whole.merged(&one), &whole);
    }

    #[test]
    fn the_order_holds_each_touched_block_once(runs in prop::collection::vec(run(), 0..5)) {
        let profile = Profile::new(runs);
        let mut touched = std::collections::BTreeSet::new();
        for run in profile.runs() {
            for touch in run.touches() {
                let layer = run.layers()[touch.layer as usize];
                touched.extend((0..touch.blocks).map(|at| (layer, touch.start_block + at)));
            }
        }
        let mut ordered = Vec::new();
        for step in profile.order() {
            ordered.extend((0..step.blocks).map(|at| (step.layer, step.start_block + at)));
        }
        let count = ordered.len();
        prop_assert_eq!(ordered.into_iter().collect::<std::collections::BTreeSet<_>>(), touched.clone());
        prop_assert_eq!(count, touched.len());
    }

    #[test]
    fn hostile_bytes_never_panic(mut body in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut head = MAGIC.to_vec();
        head.extend_from_slice(&VERSION.to_le_bytes());
        head.push(2);
        for start in [Vec::new(), head] {
            let mut bytes = start;
            bytes.append(&mut body.clone());
            let checksum = blake3::hash(&bytes);
            bytes.extend_from_slice(checksum.as_bytes());
            let _ = Profile::decode(&bytes);
        }
        body.truncate(30);
        prop_assert!(Profile::decode(&body).is_err());
    }
}

#[test]
fn the_median_run_decides_and_rare_pieces_come_last() {
    let id = LayerId([1; 32]);
    let run = |started, blocks: &[u32]| {
        let touches =
            blocks.iter().enumerate().map(|(at, block)| touch(0, block * 16, 8, at as u32));
        Run::new(started, vec![id], touches.collect()).unwrap()
    };
    let profile =
        Profile::new(vec![run(1, &[0, 1, 2, 3]), run(2, &[9, 2, 1, 0]), run(3, &[1, 0, 2, 4])]);
    let order = profile.order();
    let starts: Vec<u32> = order.iter().map(|step| step.start_block / 16).collect();
    // 9, 4 and 3 were touched once in three runs.
    assert_eq!(starts, [0, 1, 2, 9, 3, 4]);
    assert_eq!(order[0].runs, 3);
    assert_eq!(order[0].rank, 1);
}

#[test]
fn other_windows_of_the_same_blocks_are_cut_at_all_borders() {
    let one = Run::new(1, ids(), vec![touch(0, 0, 32, 0), touch(1, 5, 1, 9)]).unwrap();
    let two = Run::new(2, ids(), vec![touch(0, 16, 32, 3)]).unwrap();
    let order = Profile::new(vec![one, two]).order();
    let shape: Vec<_> =
        order.iter().map(|step| (step.start_block, step.blocks, step.runs)).collect();
    assert_eq!(shape, [(0, 16, 1), (16, 16, 2), (32, 16, 1), (5, 1, 1)]);
}

#[test]
fn a_part_of_a_profile_names_one_layer() {
    let run = Run::new(1, ids(), vec![touch(0, 0, 4, 0), touch(1, 0, 4, 1)]).unwrap();
    let part = Profile::new(vec![run]).of_layer(&ids()[1]);
    assert_eq!(part.layers(), [ids()[1]]);
    assert_eq!(part.order().len(), 1);
    assert!(part.of_layer(&ids()[0]).is_empty());
}

#[test]
fn what_no_recorder_writes_is_refused() {
    for touches in [
        vec![touch(2, 0, 1, 0)],
        vec![touch(0, 0, 0, 0)],
        vec![touch(0, u32::MAX, 2, 0)],
        vec![touch(0, 0, 2, 0), touch(0, 1, 1, 0)],
        vec![touch(0, 0, 1, 5), touch(0, 9, 1, 4)],
    ] {
        assert_eq!(Run::new(1, ids(), touches).unwrap_err().kind(), ErrorKind::Invalid);
    }
    let twice = vec![LayerId([1; 32]); 2];
    assert!(Run::new(1, twice, Vec::new()).is_err());
    let mut bytes = Profile::default().encode();
    bytes[3] ^= 1;
    assert_eq!(Profile::decode(&bytes).unwrap_err().kind(), ErrorKind::Corrupt);
}
