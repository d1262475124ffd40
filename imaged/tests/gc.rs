//! Collection, several daemons on one store, fsck and repair, over the gRPC interface.
#![allow(clippy::unwrap_used)]

mod harness;

use harness::{Client, Daemon, Made, environment, made};
use imaged::fsck::{check, repair};
use layer::{ErrorKind, LayerId};
use proto::status::from_status;
use proto::v1;
use std::collections::BTreeSet;
use std::sync::Arc;
use store::backend::memory::Memory;
use store::backend::posix::Posix;
use store::codec::verify_chunk;
use store::{Backend, Collectable, Key, Store, now_unix_ns};

const HOUR_MS: u64 = 3_600_000;

fn now_or_never(grace_ms: u64) -> v1::CollectRequest {
    v1::CollectRequest {
        grace_ms: Some(grace_ms),
        history_ms: Some(0),
        compact_below_percent: Some(60),
        ..v1::CollectRequest::default()
    }
}

async fn collect(client: &mut Client, grace_ms: u64) -> v1::CollectResponse {
    client.rpc.collect(now_or_never(grace_ms)).await.unwrap().into_inner()
}

async fn tag(client: &mut Client, name: &str, id: &LayerId) {
    let request = v1::TagRequest {
        reference: name.into(),
        target: Some(v1::tag_request::Target::LayerId(id.0.to_vec())),
        author: "tester".into(),
        expected_number: None,
    };
    client.rpc.tag(request).await.unwrap();
}

async fn untag(client: &mut Client, name: &str) {
    let request = v1::UntagRequest { reference: name.into(), author: "tester".into() };
    client.rpc.untag(request).await.unwrap();
}

/// Every chunk of a layer by its hint.
fn is_whole(store: &Store, id: &LayerId) -> bool {
    let Ok((_, table)) = store.read_layer_tables(id) else { return false };
    let Some(locations) = store.read_locations(id).unwrap() else { return table.is_empty() };
    table.chunks().iter().enumerate().filter(|(_, chunk)| !chunk.is_zero()).all(|(at, chunk)| {
        let (pack, place) = locations.get(at).unwrap();
        let mut payload = vec![0; place.stored_bytes as usize];
        store.read_pack(&pack, place.offset, &mut payload).is_ok()
            && verify_chunk(&payload, place.codec, chunk.plain_bytes(), &chunk.digest).is_ok()
    })
}

fn leave_no_lease(store: &Store) {
    for id in store.list_lease_ids().unwrap() {
        store.delete_lease(&id).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_has_no_use_is_condemned_then_deleted_and_using_it_is_enough_to_keep_it() {
    let daemon = Daemon::new(Arc::new(Memory::new())).await;
    let mut client = daemon.client().await;
    let [kept, gone, used] = [1, 2, 3].map(|seed| made(seed, 8));
    for (name, layer) in [("base/kept", &kept), ("base/gone", &gone), ("base/used", &used)] {
        let id = client.publish(layer).await.unwrap();
        tag(&mut client, name, &id).await;
    }
    leave_no_lease(&daemon.store);
    let nothing = collect(&mut client, 0).await;
    assert_eq!((nothing.condemned, nothing.deleted, nothing.live_layers), (0, 0, 3));
    untag(&mut client, "base/gone").await;
    untag(&mut client, "base/used").await;
    let looked = client
        .rpc
        .collect(v1::CollectRequest { dry_run: true, ..now_or_never(0) })
        .await
        .unwrap()
        .into_inner();
    assert_eq!((looked.condemned, looked.deleted), (4, 0), "{looked:?}");
    assert!(daemon.store.condemned().unwrap().is_empty(), "a dry run changes nothing");

    let first = collect(&mut client, HOUR_MS).await;
    assert_eq!((first.condemned, first.deleted), (4, 0), "two layers, two packs: {first:?}");
    assert_eq!(daemon.store.condemned().unwrap().len(), 4);
    let early = collect(&mut client, HOUR_MS).await;
    assert_eq!((early.condemned, early.deleted, early.waiting), (0, 0, 4));
    tag(&mut client, "base/again", &used.file.id()).await;
    let second = collect(&mut client, 0).await;
    assert_eq!((second.reprieved, second.deleted), (2, 2), "{second:?}");
    assert!(second.freed_bytes > gone.stored_bytes() as u64);
    assert!(second.lines.contains(&format!("deleted layer {}", gone.file.id())), "{second:?}");
    assert_eq!(daemon.store.list_layers().unwrap().len(), 2);
    for layer in [&kept, &used] {
        assert!(is_whole(&daemon.store, &layer.file.id()));
    }
    let id = gone.file.id();
    let request = v1::DescribeLayerRequest { layer_id: id.0.to_vec() };
    let error = from_status(client.rpc.describe_layer(request).await.unwrap_err());
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert_eq!(client.publish(&gone).await.unwrap(), id, "it can be published again");
    assert!(is_whole(&daemon.store, &id));
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_history_and_undo_keep_what_they_say() {
    let daemon = Daemon::new(Arc::new(Memory::new())).await;
    let mut client = daemon.client().await;
    let [old, new, leased] = [1, 2, 3].map(|seed| made(seed, 6));
    for layer in [&old, &new, &leased] {
        client.publish(layer).await.unwrap();
    }
    tag(&mut client, "base/x", &old.file.id()).await;
    tag(&mut client, "base/x", &new.file.id()).await;
    leave_no_lease(&daemon.store);
    let lease = v1::AcquireLeaseRequest {
        holder: "node-1".into(),
        ids: vec![leased.file.id().0.to_vec()],
        ttl_ms: 60_000,
    };
    let lease = client.rpc.acquire_lease(lease).await.unwrap().into_inner();
    let week = v1::CollectRequest { grace_ms: Some(0), ..v1::CollectRequest::default() };
    let kept = client.rpc.collect(week).await.unwrap().into_inner();
    assert_eq!((kept.condemned, kept.live_layers), (0, 3), "{kept:?}");
    assert_eq!(collect(&mut client, 0).await.condemned, 2, "the history is over");
    let undone = client.rpc.undo_collection(v1::UndoCollectionRequest {}).await.unwrap();
    assert_eq!(undone.into_inner().reprieved, 2);
    assert_eq!(collect(&mut client, 0).await.deleted, 0, "its grace begins anew");
    assert_eq!(collect(&mut client, 0).await.deleted, 2);
    assert!(!daemon.store.has_layer(&old.file.id()).unwrap());
    let release = v1::ReleaseLeaseRequest { lease_id: lease.lease_id };
    client.rpc.release_lease(release).await.unwrap();
    collect(&mut client, 0).await;
    assert_eq!(collect(&mut client, 0).await.deleted, 2);
    assert_eq!(daemon.store.list_layers().unwrap(), [new.file.id()]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publish_that_goes_on_keeps_what_it_uploaded_and_what_it_reuses() {
    let daemon = Daemon::new(Arc::new(Memory::new())).await;
    let mut client = daemon.client().await;
    let (reused, fresh) = (made(1, 8), made(2, 8));
    client.publish(&reused).await.unwrap();
    leave_no_lease(&daemon.store);
    // Condemned before the publish begins.
    assert_eq!(collect(&mut client, 0).await.condemned, 2);
    let publish = client.open().await;
    client.upload(&publish, &fresh).await.unwrap();
    assert!(!client.missing(&publish, &reused).await.unwrap().contains(&true), "it is kept now");
    for _ in 0..3 {
        collect(&mut client, 0).await;
    }
    client.commit(&publish, &fresh).await.unwrap();
    client.commit(&publish, &reused).await.unwrap();
    for layer in [&fresh, &reused] {
        assert!(is_whole(&daemon.store, &layer.file.id()));
    }
}

/// All that the daemon answers about names and layers.
async fn answers(client: &mut Client, store: &Store) -> Vec<String> {
    let mut answers = vec![format!("{:?}", client.list("").await.unwrap())];
    for (reference, _) in store.list_references(None).unwrap() {
        let name = reference.to_string();
        answers.push(format!("{:?}", client.history(&name).await.unwrap()));
        answers.push(format!("{:?}", client.resolve(&name).await.map_err(|error| error.chain())));
    }
    for id in store.list_layers().unwrap() {
        let request = v1::DescribeLayerRequest { layer_id: id.0.to_vec() };
        let mut described = client.rpc.describe_layer(request).await.unwrap().into_inner();
        let annotations: std::collections::BTreeMap<_, _> = described.annotations.drain().collect();
        answers.push(format!("{described:?} {annotations:?}"));
        let request = v1::LocateRequest { layer_id: id.0.to_vec() };
        assert!(client.rpc.locate(request).await.unwrap().into_inner().missing.is_empty());
        answers.push(format!("{:?}", store.read_locations(&id).unwrap()));
    }
    answers
}

#[tokio::test(flavor = "multi_thread")]
async fn many_small_packs_become_one_and_a_lost_catalog_answers_the_same() {
    let daemon = Daemon::new(Arc::new(Memory::new())).await;
    let mut client = daemon.client().await;
    let mut ids = Vec::new();
    for seed in 0..90 {
        let mut layer = made(seed, 4);
        if seed % 2 == 1 {
            // Half of a pack is waste when the layer before it goes.
            layer.replace_chunks(&made(seed - 1, 4), 2);
        }
        let id = client.publish(&layer).await.unwrap();
        tag(&mut client, &format!("base/n{seed}"), &id).await;
        ids.push(id);
    }
    for seed in (0..90).step_by(6) {
        untag(&mut client, &format!("base/n{seed}")).await;
    }
    leave_no_lease(&daemon.store);
    assert_eq!(daemon.store.list_packs().unwrap().len(), 90);
    let first = collect(&mut client, 0).await;
    assert!(first.compacted_packs > 50 && first.copied_bytes > 0, "{first:?}");
    for _ in 0..4 {
        collect(&mut client, 0).await;
    }
    let packs = daemon.store.list_packs().unwrap().len();
    assert!(packs <= 3, "{packs} packs are left");
    for (seed, id) in ids.iter().enumerate() {
        assert_eq!(is_whole(&daemon.store, id), seed % 6 != 0, "layer {seed}");
    }
    let before = answers(&mut client, &daemon.store).await;
    let daemon = daemon.restarted_without_catalog().await;
    let mut client = daemon.client().await;
    assert_eq!(answers(&mut client, &daemon.store).await, before);
    client.rpc.reindex(v1::ReindexRequest {}).await.unwrap();
    assert_eq!(answers(&mut client, &daemon.store).await, before);
    assert_eq!(collect(&mut client, 0).await.condemned, 0);
}

/// Two daemons with catalogs of their own.
async fn pair(backends: [Arc<dyn Backend>; 2]) -> [Daemon; 2] {
    let [one, two] = backends;
    [Daemon::new(one).await, Daemon::new(two).await]
}

#[tokio::test(flavor = "multi_thread")]
async fn two_daemons_on_one_store_publish_name_and_collect_together() {
    let directory = tempfile::tempdir().unwrap();
    let memory = Memory::new();
    let posix = || -> Arc<dyn Backend> { Arc::new(Posix::open(directory.path()).unwrap()) };
    for [one, two] in
        [pair([Arc::new(memory.clone()), Arc::new(memory)]).await, pair([posix(), posix()]).await]
    {
        let mut clients = [one.client().await, two.client().await];
        let mut published = BTreeSet::new();
        for round in 0..6 {
            let [a, b] = &mut clients;
            let (same, other) = (made(round, 6), made(round + 100, 6));
            let (first, second) = tokio::join!(a.publish(&same), b.publish(&same));
            assert_eq!(first.unwrap(), second.unwrap());
            let other = b.publish(&other).await.unwrap();
            // Both move one reference from the same entry: one of them wins.
            let [mine, yours] = [(a, same.file.id()), (b, other)].map(|(client, id)| {
                let request = v1::TagRequest {
                    reference: format!("base/r{round}"),
                    target: Some(v1::tag_request::Target::LayerId(id.0.to_vec())),
                    author: "tester".into(),
                    expected_number: Some(0),
                };
                client.rpc.tag(request)
            });
            let (mine, yours) = tokio::join!(mine, yours);
            assert!(mine.is_ok() != yours.is_ok(), "{mine:?} {yours:?}");
            let winner = if mine.is_ok() { same.file.id() } else { other };
            published.insert(winner);
            leave_no_lease(&one.store);
            let [a, b] = &mut clients;
            let both = tokio::join!(a.rpc.collect(now_or_never(0)), b.rpc.collect(now_or_never(0)));
            for done in [both.0, both.1] {
                let kind = done.err().map(|status| from_status(status).kind());
                assert!(matches!(kind, None | Some(ErrorKind::Busy)), "{kind:?}");
            }
        }
        for client in &mut clients {
            for _ in 0..2 {
                collect(client, 0).await;
            }
        }
        assert_eq!(one.store.list_layers().unwrap(), Vec::from_iter(published.clone()));
        for id in &published {
            // The hint may name a copy that was one too many.
            let request = v1::LocateRequest { layer_id: id.0.to_vec() };
            assert!(clients[1].rpc.locate(request).await.unwrap().into_inner().missing.is_empty());
            assert!(is_whole(&two.store, id));
            for client in &mut clients {
                let request = v1::DescribeLayerRequest { layer_id: id.0.to_vec() };
                client.rpc.describe_layer(request).await.unwrap();
            }
        }
        assert_eq!(check(&one.store, true).unwrap().damages, []);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn many_parallel_publishes_fill_large_packs_and_store_nothing_twice() {
    let daemon = Daemon::new(Arc::new(Memory::new())).await;
    let mut tasks = Vec::new();
    for seed in 0..24 {
        let mut client = daemon.client().await;
        tasks.push(tokio::spawn(async move {
            let layer = made(seed % 12, 10);
            (client.publish(&layer).await.unwrap(), layer.file.id())
        }));
    }
    for task in tasks {
        let (id, expected) = task.await.unwrap();
        assert_eq!(id, expected);
        assert!(is_whole(&daemon.store, &id));
    }
    // One publish of more than a pack: every pack but the last is at least 64 MiB.
    let mut client = daemon.client().await;
    let before: BTreeSet<_> = daemon.store.list_packs().unwrap().into_iter().collect();
    let large = harness::large(99, 11, 16 << 20);
    client.publish(&large).await.unwrap();
    let packs = daemon.store.list_packs().unwrap().into_iter().filter(|id| !before.contains(id));
    let mut sizes: Vec<u64> = packs
        .map(|id| {
            let entries = daemon.store.read_pack_footer(&id).unwrap();
            entries.iter().map(|entry| u64::from(entry.stored_bytes)).sum()
        })
        .collect();
    sizes.sort_unstable();
    assert_eq!(sizes.len(), 2, "{sizes:?}");
    assert!(sizes[1] >= 64 << 20, "{sizes:?}");
}

fn copy_of(memory: &Memory) -> Memory {
    let copy = Memory::new();
    for name in memory.list("", None, 100_000).unwrap() {
        let key = Key::new(name).unwrap();
        let bytes = memory.read_all(&key, u64::MAX).unwrap();
        let mut upload = copy.create(&key).unwrap();
        upload.write(&bytes).unwrap();
        upload.publish().unwrap();
    }
    copy
}

fn replace(memory: &Memory, name: &str, bytes: Option<Vec<u8>>) {
    let key = Key::new(name).unwrap();
    memory.delete(&key).unwrap();
    if let Some(bytes) = bytes {
        let mut upload = memory.create(&key).unwrap();
        upload.write(&bytes).unwrap();
        upload.publish().unwrap();
    }
}

/// Flips a bit in the middle of an object.
fn flip(memory: &Memory, name: &str) {
    let mut bytes = memory.read_all(&Key::new(name).unwrap(), u64::MAX).unwrap();
    let at = bytes.len() / 3;
    bytes[at] ^= 4;
    replace(memory, name, Some(bytes));
}

async fn published(daemon: &Daemon) -> [Made; 3] {
    let mut client = daemon.client().await;
    let layers = [1, 2, 3].map(|seed| made(seed, 6));
    for (number, layer) in layers.iter().enumerate() {
        let id = client.publish(layer).await.unwrap();
        tag(&mut client, &format!("base/l{number}"), &id).await;
    }
    let publish = client.open().await;
    let document = environment(&[layers[0].file.id(), layers[1].file.id()]).canonical();
    let request = v1::CommitEnvironmentRequest { publish_id: publish, document };
    let id = client.rpc.commit_environment(request).await.unwrap().into_inner().env_id;
    let request = v1::TagRequest {
        reference: "env/e".into(),
        target: Some(v1::tag_request::Target::EnvId(id)),
        author: "tester".into(),
        expected_number: None,
    };
    client.rpc.tag(request).await.unwrap();
    layers
}

#[tokio::test(flavor = "multi_thread")]
async fn every_damage_is_named_with_the_references_it_hits_and_mended_from_another_store() {
    let memory = Memory::new();
    let daemon = Daemon::new(Arc::new(memory.clone())).await;
    let layers = published(&daemon).await;
    let store = &daemon.store;
    assert_eq!(check(store, true).unwrap().damages, []);
    let spare = Store::open(Arc::new(copy_of(&memory))).unwrap();

    let pack_of = |layer: &Made| store.read_locations(&layer.file.id()).unwrap().unwrap().packs[0];
    let object = |class: &str, id: String| format!("{class}/{}/{id}", &id[..2]);
    let packs = layers.each_ref().map(|layer| object("packs", pack_of(layer).to_string()));
    let files = layers.each_ref().map(|layer| object("layers", layer.file.id().to_string()));
    let env = object("envs", store.list_environments().unwrap()[0].to_string());
    let entry = memory.list("refs/base/l2/", None, 1).unwrap().remove(0);
    let both = ["base/l0:latest", "env/e:latest"].map(str::to_owned).to_vec();
    let env_only = vec!["env/e:latest".to_owned()];
    let last = vec!["base/l2:latest".to_owned()];
    type Harm<'a> = Box<dyn Fn() + 'a>;
    let damages: Vec<(&str, Vec<String>, Harm<'_>)> = vec![
        ("a lost pack", both.clone(), Box::new(|| replace(&memory, &packs[0], None))),
        ("a flipped bit in a pack", last.clone(), Box::new(|| flip(&memory, &packs[2]))),
        ("a lost layer", both.clone(), Box::new(|| replace(&memory, &files[0], None))),
        ("a flipped bit in a layer", last.clone(), Box::new(|| flip(&memory, &files[2]))),
        ("a lost environment", env_only.clone(), Box::new(|| replace(&memory, &env, None))),
        ("a flipped bit in an environment", env_only, Box::new(|| flip(&memory, &env))),
        ("a flipped bit in a reference", last.clone(), Box::new(|| flip(&memory, &entry))),
        (
            "all at once",
            [both, last].concat(),
            Box::new(|| {
                replace(&memory, &packs[1], None);
                flip(&memory, &packs[2]);
                replace(&memory, &files[0], None);
                flip(&memory, &env);
                flip(&memory, &entry);
            }),
        ),
    ];
    let mut alone = 0;
    for (name, hit, harm) in damages {
        harm();
        let found = check(store, true).unwrap();
        assert!(!found.damages.is_empty(), "{name} is not found");
        let named: BTreeSet<_> =
            found.damages.iter().flat_map(|damage| damage.references.clone()).collect();
        for reference in &hit {
            assert!(named.contains(reference), "{name}: {:?}", found.damages);
        }
        let by_itself = repair(store, None, true).unwrap();
        alone += usize::from(by_itself.left.damages.is_empty());
        let mended = repair(store, Some(&spare), true).unwrap();
        assert_eq!(mended.left.damages, [], "{name}");
        assert_eq!(check(store, true).unwrap().damages, [], "{name}");
        let mut client = daemon.client().await;
        for layer in &layers {
            let request = v1::LocateRequest { layer_id: layer.file.id().0.to_vec() };
            let located = client.rpc.locate(request).await.unwrap().into_inner();
            assert!(located.missing.is_empty(), "{name}");
            assert!(is_whole(store, &layer.file.id()), "{name}");
        }
        restore(&memory, spare.backend().as_ref());
        let mut client = daemon.client().await;
        client.rpc.reindex(v1::ReindexRequest {}).await.unwrap();
    }
    assert_eq!(alone, 0, "what is lost does not come back by itself");
}

/// Makes one store the same as another.
fn restore(memory: &Memory, from: &dyn Backend) {
    for name in memory.list("", None, 100_000).unwrap() {
        replace(memory, &name, None);
    }
    for name in from.list("", None, 100_000).unwrap() {
        let bytes = from.read_all(&Key::new(name.as_str()).unwrap(), u64::MAX).unwrap();
        replace(memory, &name, Some(bytes));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pack_without_its_end_is_mended_from_what_hints_know() {
    let memory = Memory::new();
    let daemon = Daemon::new(Arc::new(memory.clone())).await;
    let layers = published(&daemon).await;
    let id = layers[0].file.id();
    let pack = daemon.store.read_locations(&id).unwrap().unwrap().packs[0].to_string();
    let name = format!("packs/{}/{pack}", &pack[..2]);
    let mut bytes = memory.read_all(&Key::new(name.as_str()).unwrap(), u64::MAX).unwrap();
    bytes.truncate(bytes.len() - 10);
    replace(&memory, &name, Some(bytes));
    let found = check(&daemon.store, false).unwrap();
    assert!(found.damages.iter().any(|damage| damage.what.contains(&pack)), "{:?}", found.damages);
    let mended = repair(&daemon.store, None, true).unwrap();
    assert_eq!((mended.left.damages.len(), mended.packs), (0, 1));
    let mut client = daemon.client().await;
    let request = v1::LocateRequest { layer_id: id.0.to_vec() };
    client.rpc.locate(request).await.unwrap();
    assert!(is_whole(&daemon.store, &id));
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_collected_while_what_is_in_use_cannot_be_known() {
    let memory = Memory::new();
    let daemon = Daemon::new(Arc::new(memory.clone())).await;
    let layers = published(&daemon).await;
    let mut client = daemon.client().await;
    untag(&mut client, "base/l2").await;
    leave_no_lease(&daemon.store);
    assert_eq!(collect(&mut client, 0).await.condemned, 2);
    let id = layers[0].file.id().to_string();
    let name = format!("layers/{}/{id}", &id[..2]);
    let right = memory.read_all(&Key::new(name.as_str()).unwrap(), u64::MAX).unwrap();
    for wrong in [None, Some(b"garbage".to_vec())] {
        replace(&memory, &name, wrong);
        let refused = client.rpc.collect(now_or_never(0)).await.unwrap_err();
        assert_eq!(from_status(refused).kind(), ErrorKind::Corrupt);
        assert!(daemon.store.has_layer(&layers[2].file.id()).unwrap());
    }
    replace(&memory, &name, Some(right));
    assert_eq!(collect(&mut client, 0).await.deleted, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_collected_under_a_clock_that_is_behind() {
    let daemon = Daemon::new(Arc::new(Memory::new())).await;
    let layers = published(&daemon).await;
    let mut client = daemon.client().await;
    untag(&mut client, "base/l2").await;
    leave_no_lease(&daemon.store);
    assert_eq!(collect(&mut client, 0).await.condemned, 2);
    let right = daemon.store.condemned().unwrap();
    let mut ahead = right.clone();
    ahead.insert(Collectable::Layer(layers[2].file.id()), now_unix_ns() + HOUR_MS * 1_000_000);
    daemon.store.put_condemned(&ahead).unwrap();
    let refused = from_status(client.rpc.collect(now_or_never(0)).await.unwrap_err());
    assert_eq!(refused.kind(), ErrorKind::Unavailable);
    assert!(refused.to_string().contains("clock"), "{refused}");
    daemon.store.put_condemned(&right).unwrap();
    assert_eq!(collect(&mut client, 0).await.deleted, 2);
}
