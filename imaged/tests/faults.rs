//! The image daemon on a store that fails: calls succeed or fail with a word, what is visible is whole, and no
//! wrong byte is ever believed.
#![allow(clippy::unwrap_used)]

mod harness;

use harness::{Daemon, made};
use layer::reference::Target;
use layer::{Error, ErrorKind, LayerId, Result};
use proto::v1;
use std::sync::Arc;
use store::Store;
use store::backend::fault::{Fault, FaultPlan};
use store::backend::memory::Memory;
use store::codec::decode_chunk;

/// The data of a layer by its hint, every chunk checked.
fn read_back(store: &Store, id: &LayerId) -> Result<Vec<u8>> {
    let file = store.read_layer(id)?;
    let hint = store.read_locations(id)?;
    let locations = hint.ok_or_else(|| Error::corrupt("no hint is readable"))?;
    let mut data = Vec::new();
    for (index, chunk) in file.chunk_table.chunks().iter().enumerate() {
        let Some((pack, place)) = locations.get(index) else {
            assert!(chunk.is_zero());
            data.resize(data.len() + chunk.plain_bytes() as usize, 0);
            continue;
        };
        let mut payload = vec![0; place.stored_bytes as usize];
        store.read_pack(&pack, place.offset, &mut payload)?;
        data.extend(decode_chunk(&payload, place.codec, chunk.plain_bytes(), &chunk.digest)?);
    }
    Ok(data)
}

/// Publishes and tags through a failing store. Returns how many faults struck and how many publishes went through.
async fn storm(plan: FaultPlan, check: impl Fn(&Store, &LayerId, &[u8])) -> (u64, usize) {
    let memory = Memory::new();
    let fault = Fault::new(Arc::new(memory.clone()), FaultPlan::default());
    let daemon = Daemon::new(Arc::new(fault.clone())).await;
    let mut client = daemon.client().await;
    fault.set_plan(plan);
    let layers: Vec<_> = (0..8).map(|seed| made(seed, 12)).collect();
    let mut published = 0;
    for round in 0..3 {
        for layer in &layers {
            let Ok(id) = client.publish(layer).await else { continue };
            assert_eq!(id, layer.file.id());
            published += 1;
            let tag = v1::TagRequest {
                reference: "base/x".into(),
                target: Some(v1::tag_request::Target::LayerId(id.0.to_vec())),
                author: "tester".into(),
                expected_number: None,
            };
            let _ = client.rpc.tag(tag).await;
            if let Ok(resolved) = client.resolve("base/x").await {
                let found = LayerId::from_slice(&resolved.layers[0].layer_id).unwrap();
                assert!(layers.iter().any(|layer| layer.file.id() == found));
            }
        }
        if round == 1 {
            let _ = client.rpc.reindex(v1::ReindexRequest {}).await;
        }
    }
    let sound = Store::open(Arc::new(memory)).unwrap();
    for id in sound.list_layers().unwrap() {
        let layer = layers.iter().find(|layer| layer.file.id() == id).unwrap();
        check(&sound, &id, &layer.data);
    }
    for (reference, number) in sound.list_references(None).unwrap() {
        let Ok(entry) = sound.read_entry(&reference, number) else { continue };
        assert!(matches!(entry.target, Some(Target::Layer(id)) if sound.has_layer(&id).unwrap()));
    }
    (fault.struck(), published)
}

#[tokio::test(flavor = "multi_thread")]
async fn every_layer_that_is_visible_is_whole() {
    let (mut struck, mut published) = (0, 0);
    for seed in 0..6 {
        let plan = FaultPlan {
            seed,
            error_per_mille: 25,
            short_read_per_mille: 20,
            bit_flip_per_mille: 20,
            lost_upload_per_mille: 40,
            lost_answer_per_mille: 40,
            ..FaultPlan::default()
        };
        let whole = |store: &Store, id: &LayerId, data: &[u8]| {
            assert_eq!(read_back(store, id).unwrap(), data);
        };
        let counts = storm(plan, whole).await;
        struck += counts.0;
        published += counts.1;
    }
    assert!(struck > 50 && published > 20, "{struck} faults, {published} publishes");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_loses_what_it_acknowledged_is_found_out_and_never_believed() {
    let mut struck = 0;
    for seed in 0..4 {
        let plan = FaultPlan { seed, torn_write_per_mille: 150, ..FaultPlan::default() };
        let right_or_refused = |store: &Store, id: &LayerId, data: &[u8]| match read_back(store, id)
        {
            Ok(found) => assert_eq!(found, data),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Corrupt, "{error:?}"),
        };
        struck += storm(plan, right_or_refused).await.0;
    }
    assert!(struck > 10, "{struck} faults");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_is_away_is_said_to_be_and_comes_back() {
    let memory = Memory::new();
    let fault = Fault::new(Arc::new(memory), FaultPlan::default());
    let daemon = Daemon::new(Arc::new(fault.clone())).await;
    let mut client = daemon.client().await;
    let base = made(1, 6);
    let publish = client.open().await;
    client.upload(&publish, &base).await.unwrap();
    fault.set_plan(FaultPlan { away: true, ..FaultPlan::default() });
    for error in [
        client.commit(&publish, &base).await.unwrap_err(),
        client.resolve("base/x").await.unwrap_err(),
        client.missing(&publish, &base).await.unwrap_err(),
        client.upload(&publish, &made(2, 6)).await.unwrap_err(),
        client.try_open().await.unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    }
    fault.set_plan(FaultPlan::default());
    client.commit(&publish, &base).await.unwrap();
    assert_eq!(read_back(&daemon.store, &base.file.id()).unwrap(), base.data);
}
