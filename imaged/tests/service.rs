//! The image daemon over its gRPC interface, on stores in memory and on disk: publish, names, leases, reindex.
#![allow(clippy::unwrap_used)]

mod harness;

use harness::{Client, Daemon, environment, image, made};
use layer::ErrorKind;
use layer::chunk::{Chunk, ChunkTable};
use layer::pack::Codec;
use layer::reference::Target;
use proto::v1;
use std::sync::Arc;
use store::backend::memory::Memory;
use store::backend::posix::Posix;
use store::codec::decode_chunk;
use store::{Backend, Store};

/// Runs `check` with a daemon on each kind of store.
async fn on_each_store<F: Future<Output = ()>>(check: impl Fn(Daemon) -> F) {
    let directory = tempfile::tempdir().unwrap();
    check(Daemon::new(Arc::new(Memory::new())).await).await;
    check(Daemon::new(Arc::new(Posix::open(directory.path()).unwrap())).await).await;
}

/// Reads every chunk of a layer as a node would: layer file, hint, packs.
fn read_back(store: &Store, id: &layer::LayerId) -> Vec<u8> {
    let file = store.read_layer(id).unwrap();
    let locations = store.read_locations(id).unwrap().unwrap();
    let mut data = Vec::new();
    for (index, chunk) in file.chunk_table.chunks().iter().enumerate() {
        if chunk.is_zero() {
            assert!(locations.get(index).is_none());
            data.resize(data.len() + chunk.plain_bytes() as usize, 0);
            continue;
        }
        let (pack, place) = locations.get(index).unwrap();
        let mut payload = vec![0; place.stored_bytes as usize];
        store.read_pack(&pack, place.offset, &mut payload).unwrap();
        data.extend(
            decode_chunk(&payload, place.codec, chunk.plain_bytes(), &chunk.digest).unwrap(),
        );
    }
    data
}

fn tag_layer(name: &str, id: &layer::LayerId, expected: Option<u64>) -> v1::TagRequest {
    v1::TagRequest {
        reference: name.into(),
        target: Some(v1::tag_request::Target::LayerId(id.0.to_vec())),
        author: "tester".into(),
        expected_number: expected,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_and_an_environment_are_published_named_and_read_back() {
    on_each_store(|daemon| async move {
        let mut client = daemon.client().await;
        let base = made(1, 20);
        let publish = client.open().await;
        assert_eq!(client.missing(&publish, &base).await.unwrap(), vec![true; base.chunks.len()]);
        let uploaded = client.upload(&publish, &base).await.unwrap();
        assert_eq!(uploaded.chunks_stored, base.chunks.len() as u64);
        assert!(!client.missing(&publish, &base).await.unwrap().contains(&true));
        let (id, existed) = client.commit(&publish, &base).await.unwrap();
        assert_eq!((id, existed), (base.file.id(), false));
        assert_eq!(client.commit(&publish, &base).await.unwrap(), (id, true));
        assert_eq!(read_back(&daemon.store, &id), base.data);

        let document = environment(&[id]);
        let request = v1::CommitEnvironmentRequest {
            publish_id: publish.clone(),
            document: document.canonical(),
        };
        let env = client.rpc.commit_environment(request).await.unwrap().into_inner();
        assert_eq!(env.env_id, document.id().0);
        client.rpc.close_publish(v1::ClosePublishRequest { publish_id: publish }).await.unwrap();
        assert!(daemon.store.list_leases().unwrap().is_empty());

        let entry = client.rpc.tag(tag_layer("base/x", &id, Some(0))).await.unwrap().into_inner();
        assert_eq!((entry.number, entry.reference.as_str()), (1, "base/x:latest"));
        let hex = id.to_string();
        for name in ["base/x", "base/x:latest", hex.as_str(), &hex[..8], &hex[..31]] {
            let resolved = client.resolve(name).await.unwrap();
            let description = &resolved.layers[0];
            assert_eq!(description.layer_id, id.0, "{name}");
            assert_eq!(description.chunks, base.file.manifest.chunks);
            assert_eq!(description.stored_bytes, uploaded.bytes_stored);
        }
        let resolved = client.resolve(&document.id().to_string()[..12]).await.unwrap();
        assert_eq!(resolved.environment_document, document.canonical());
        assert_eq!(resolved.layers.len(), 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn publishing_again_stores_nothing_again() {
    on_each_store(|daemon| async move {
        let mut client = daemon.client().await;
        let base = made(1, 20);
        client.publish(&base).await.unwrap();
        let packs = daemon.store.list_packs().unwrap();
        let publish = client.open().await;
        assert!(!client.missing(&publish, &base).await.unwrap().contains(&true));
        let uploaded = client.upload(&publish, &base).await.unwrap();
        assert_eq!((uploaded.chunks_stored, uploaded.chunks_known), (0, base.chunks.len() as u64));
        client.commit(&publish, &base).await.unwrap();
        assert_eq!(daemon.store.list_packs().unwrap(), packs);
        assert_eq!(daemon.store.backend().list("locations/", None, 9).unwrap().len(), 1);
        // A layer that shares half of its chunks uploads only the other half.
        let mut next = made(2, 20);
        next.replace_chunks(&base, 10);
        let missing = client.missing(&publish, &next).await.unwrap();
        assert_eq!(missing.iter().filter(|missing| **missing).count(), next.chunks.len() - 10);
        client.publish(&next).await.unwrap();
        assert_eq!(read_back(&daemon.store, &next.file.id()), next.data);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_uploads_are_refused_and_leave_nothing() {
    on_each_store(|daemon| async move {
        let mut client = daemon.client().await;
        let publish = client.open().await;
        type Spoil = fn(&mut v1::UploadChunk);
        let cases: [(Spoil, ErrorKind); 6] = [
            (|chunk| chunk.payload[20] ^= 1, ErrorKind::Corrupt),
            (|chunk| chunk.plain_bytes += 4096, ErrorKind::Corrupt),
            (|chunk| chunk.plain_bytes = u32::MAX, ErrorKind::Corrupt),
            (|chunk| chunk.digest = vec![0; 32], ErrorKind::Invalid),
            (|chunk| chunk.digest.truncate(31), ErrorKind::Invalid),
            (|chunk| chunk.codec = 7, ErrorKind::Invalid),
        ];
        for (number, (spoil, kind)) in cases.into_iter().enumerate() {
            let base = made(number as u64, 5);
            let mut messages = base.messages(&publish);
            spoil(messages.last_mut().unwrap());
            let error = client.upload_messages(messages).await.unwrap_err();
            assert_eq!(error.kind(), kind, "case {number}: {error:?}");
            let refused = client.commit(&publish, &base).await.unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::NotFound);
        }
        assert!(daemon.store.list_packs().unwrap().is_empty());
        assert!(daemon.store.list_layers().unwrap().is_empty());
        let other = made(9, 3);
        let error = client.upload("publish/00", &other).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.to_string().contains("open another"), "{error}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_with_a_missing_chunk_and_an_environment_with_a_missing_layer_are_refused() {
    on_each_store(|daemon| async move {
        let mut client = daemon.client().await;
        let base = made(1, 6);
        let publish = client.open().await;
        let mut messages = base.messages(&publish);
        messages.pop();
        client.upload_messages(messages).await.unwrap();
        let error = client.commit(&publish, &base).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.to_string().contains("needs 1 chunks"), "{error}");
        // A chunk of the right digest and the wrong length in the table is no match.
        let mut chunks = base.file.chunk_table.chunks().to_vec();
        let last = chunks.len() - 2;
        chunks[last] = Chunk { blocks: chunks[last].blocks + 1, ..chunks[last] };
        chunks.truncate(last + 1);
        let table = ChunkTable::new(chunks).unwrap();
        let metadata = image("lying", table.data_blocks());
        let lying = made(1, 6).with_parts(table, metadata);
        assert_eq!(client.commit(&publish, &lying).await.unwrap_err().kind(), ErrorKind::NotFound);

        let document = environment(&[base.file.id()]).canonical();
        let request = v1::CommitEnvironmentRequest { publish_id: publish, document };
        let error = client.rpc.commit_environment(request).await.unwrap_err();
        assert_eq!(error.code(), tonic::Code::NotFound);
        let error = client.rpc.tag(tag_layer("base/x", &base.file.id(), None)).await.unwrap_err();
        assert_eq!(error.code(), tonic::Code::NotFound);
        assert!(daemon.store.list_layers().unwrap().is_empty());
        assert!(daemon.store.list_references(None).unwrap().is_empty());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_taggers_one_wins_and_the_other_is_told() {
    on_each_store(|daemon| async move {
        let mut client = daemon.client().await;
        let base = made(1, 3);
        client.publish(&base).await.unwrap();
        let id = base.file.id();
        for number in 0..5 {
            let (mut one, mut two) = (client.rpc.clone(), client.rpc.clone());
            let (one, two) = tokio::join!(
                one.tag(tag_layer("base/x", &id, Some(number))),
                two.tag(tag_layer("base/x", &id, Some(number))),
            );
            let lost = match (one, two) {
                (Ok(_), Err(lost)) | (Err(lost), Ok(_)) => lost,
                other => panic!("{other:?}"),
            };
            assert_eq!(lost.code(), tonic::Code::AlreadyExists);
            assert!(lost.message().contains("somebody moved it"), "{}", lost.message());
        }
        let untag = v1::UntagRequest { reference: "base/x".into(), author: "tester".into() };
        client.rpc.untag(untag.clone()).await.unwrap();
        assert_eq!(client.rpc.untag(untag).await.unwrap_err().code(), tonic::Code::NotFound);
        let history = client.history("base/x").await.unwrap();
        assert_eq!(
            history.iter().map(|entry| entry.number).collect::<Vec<_>>(),
            [6, 5, 4, 3, 2, 1]
        );
        assert!(history[0].target.is_none() && history[1].target.is_some());
        assert!(client.list("").await.unwrap().is_empty());
        let error = client.resolve("base/x").await.unwrap_err();
        assert!(error.to_string().contains("was untagged; `lamella history"), "{error}");
        let error = client.resolve("base/y").await.unwrap_err();
        assert_eq!(
            error.to_string(),
            "no such reference base/y:latest; `lamella ls` lists what there is"
        );
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_catalog_loses_nothing() {
    on_each_store(|daemon| async move {
        let mut client = daemon.client().await;
        for seed in 0..3 {
            let made = made(seed, 8);
            client.publish(&made).await.unwrap();
            client
                .rpc
                .tag(tag_layer(&format!("base/x{seed}"), &made.file.id(), None))
                .await
                .unwrap();
        }
        client.rpc.tag(tag_layer("base/x0", &made(1, 8).file.id(), None)).await.unwrap();
        let answers = async |client: &mut Client| {
            let mut resolved = Vec::new();
            for seed in 0..3 {
                resolved.push(client.resolve(&format!("base/x{seed}")).await.unwrap());
            }
            let publish = client.open().await;
            let missing = client.missing(&publish, &made(2, 8)).await.unwrap();
            let history = client.history("base/x0").await.unwrap();
            (resolved, missing, history, client.list("base").await.unwrap())
        };
        let before = answers(&mut client).await;
        let indexed = client.rpc.reindex(v1::ReindexRequest {}).await.unwrap().into_inner();
        assert_eq!((indexed.layers, indexed.references, indexed.damaged), (3, 3, 0));
        let daemon = daemon.restarted_without_catalog().await;
        let mut client = daemon.client().await;
        assert_eq!(answers(&mut client).await, before);
        let again = client.rpc.reindex(v1::ReindexRequest {}).await.unwrap().into_inner();
        assert_eq!(again, indexed);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_another_daemon_published_is_found() {
    let memory = Memory::new();
    let one = Daemon::new(Arc::new(memory.clone())).await;
    let two = Daemon::new(Arc::new(memory.clone())).await;
    let (mut first, mut second) = (one.client().await, two.client().await);
    let shared = made(1, 10);
    let publish = second.open().await;
    first.publish(&shared).await.unwrap();
    first.rpc.tag(tag_layer("base/x", &shared.file.id(), None)).await.unwrap();
    // Everything is looked up on the store before it is called missing.
    assert_eq!(second.resolve("base/x").await.unwrap().layers[0].layer_id, shared.file.id().0);
    assert_eq!(second.commit(&publish, &shared).await.unwrap(), (shared.file.id(), true));
    // Both upload the same at once: a duplicate costs space and nothing else.
    let both = made(2, 10);
    let (a, b) = tokio::join!(first.publish(&both), second.publish(&both));
    assert_eq!(a.unwrap(), b.unwrap());
    assert_eq!(read_back(&one.store, &both.file.id()), both.data);
    // A pack that another daemon's collection removed is missed, and can be uploaded again.
    for name in memory.list("packs/", None, 99).unwrap() {
        memory.delete(&store::Key::new(name).unwrap()).unwrap();
    }
    let publish = second.open().await;
    assert!(!second.missing(&publish, &both).await.unwrap().contains(&false));
    let located = second.rpc.locate(v1::LocateRequest { layer_id: both.file.id().0.to_vec() });
    let located = located.await.unwrap().into_inner();
    assert_eq!((located.number, located.missing.len()), (0, both.chunks.len()));
    second.publish(&both).await.unwrap();
    assert_eq!(read_back(&two.store, &both.file.id()), both.data);
    let located = first.rpc.locate(v1::LocateRequest { layer_id: both.file.id().0.to_vec() });
    assert!(located.await.unwrap().into_inner().number > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publish_that_breaks_off_is_invisible_and_resumes() {
    on_each_store(|daemon| async move {
        let mut client = daemon.client().await;
        let base = made(1, 300);
        let publish = client.open().await;
        let (sender, receiver) = tokio::sync::mpsc::channel(1);
        let mut rpc = client.rpc.clone();
        let upload = tokio::spawn(async move {
            rpc.upload_chunks(tokio_stream::wrappers::ReceiverStream::new(receiver)).await
        });
        let messages = base.messages(&publish);
        let half = messages.len() / 2;
        for message in messages.into_iter().take(half) {
            sender.send(message).await.unwrap();
        }
        upload.abort();
        assert!(upload.await.is_err());
        // The daemon goes down with the stream open; its catalog is gone too.
        drop(client);
        let daemon = daemon.restarted_without_catalog().await;
        assert!(daemon.store.list_layers().unwrap().is_empty());
        assert!(daemon.store.backend().list("locations/", None, 9).unwrap().is_empty());
        let mut client = daemon.client().await;
        // The publish lives on in its lease.
        assert_eq!(client.missing(&publish, &base).await.unwrap().len(), base.chunks.len());
        client.upload(&publish, &base).await.unwrap();
        client.commit(&publish, &base).await.unwrap();
        assert_eq!(read_back(&daemon.store, &base.file.id()), base.data);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_broken_upload_stored_is_not_uploaded_again() {
    let daemon = Daemon::new(Arc::new(Memory::new())).await;
    let mut client = daemon.client().await;
    let base = made(1, 400);
    assert!(base.stored_bytes() > 18 << 20, "larger than what is worth keeping");
    let publish = client.open().await;
    let mut messages = base.messages(&publish);
    messages.last_mut().unwrap().payload[0] ^= 1;
    client.upload_messages(messages).await.unwrap_err();
    let missing = client.missing(&publish, &base).await.unwrap();
    let left = missing.iter().filter(|missing| **missing).count();
    assert!(left < base.chunks.len() / 2, "{left} of {} have to be sent again", base.chunks.len());
    assert!(daemon.store.list_layers().unwrap().is_empty());
    client.publish(&base).await.unwrap();
    assert_eq!(read_back(&daemon.store, &base.file.id()), base.data);
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_pin_what_exists_and_end() {
    on_each_store(|daemon| async move {
        let mut client = daemon.client().await;
        let base = made(1, 3);
        client.publish(&base).await.unwrap();
        let request = v1::AcquireLeaseRequest {
            holder: "node-1".into(),
            ids: vec![base.file.id().0.to_vec()],
            ttl_ms: 60_000,
        };
        let lease = client.rpc.acquire_lease(request.clone()).await.unwrap().into_inner();
        let kept = daemon.store.list_leases().unwrap();
        assert_eq!(
            (kept.len(), kept[0].holder(), kept[0].has_expired(store::now_unix_ns())),
            (1, "node-1", false)
        );
        let release = v1::ReleaseLeaseRequest { lease_id: lease.lease_id };
        client.rpc.release_lease(release.clone()).await.unwrap();
        client.rpc.release_lease(release).await.unwrap();
        assert!(daemon.store.list_leases().unwrap().is_empty());
        let nothing = v1::AcquireLeaseRequest { ids: vec![vec![9; 32]], ..request.clone() };
        assert_eq!(
            client.rpc.acquire_lease(nothing).await.unwrap_err().code(),
            tonic::Code::NotFound
        );
        let endless = v1::AcquireLeaseRequest { ttl_ms: u64::MAX, ..request };
        let refused = client.rpc.acquire_lease(endless).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::InvalidArgument);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_objects_are_left_out_and_counted() {
    let memory = Memory::new();
    let daemon = Daemon::new(Arc::new(memory.clone())).await;
    let mut client = daemon.client().await;
    for seed in 0..2 {
        let made = made(seed, 4);
        client.publish(&made).await.unwrap();
        let name = format!("base/x{seed}");
        daemon
            .store
            .move_reference(&name.parse().unwrap(), Some(Target::Layer(made.file.id())), "", None)
            .unwrap();
    }
    for class in ["packs/", "layers/", "refs/"] {
        let key = store::Key::new(memory.list(class, None, 1).unwrap().remove(0)).unwrap();
        let mut bytes = memory.read_all(&key, 1 << 30).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        if class == "layers/" {
            bytes.truncate(100);
        }
        memory.delete(&key).unwrap();
        let mut upload = memory.create(&key).unwrap();
        upload.write(&bytes).unwrap();
        upload.publish().unwrap();
    }
    let daemon = daemon.restarted_without_catalog().await;
    let mut client = daemon.client().await;
    let indexed = client.rpc.reindex(v1::ReindexRequest {}).await.unwrap().into_inner();
    assert_eq!((indexed.damaged, indexed.layers, indexed.references), (3, 1, 1));
    assert_eq!(client.list("base").await.unwrap().len(), 1);
    assert_eq!(client.resolve("base/x0").await.unwrap_err().kind(), ErrorKind::Corrupt);
    // Publishing again repairs what it can.
    for seed in 0..2 {
        client.publish(&made(seed, 4)).await.unwrap();
        assert_eq!(read_back(&daemon.store, &made(seed, 4).file.id()), made(seed, 4).data);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_whose_metadata_no_kernel_would_mount_is_not_named() {
    let daemon = Daemon::new(Arc::new(Memory::new())).await;
    let mut client = daemon.client().await;
    let good = made(1, 4);
    let no_image = vec![7; 4096];
    let mut bad_root = good.file.metadata.clone();
    // Behind superblock and device table: the root's format. The superblock's checksum covers it.
    bad_root[1280] ^= 1;
    let other_size = image("", good.file.manifest.data_blocks + 1);
    for metadata in [no_image, bad_root, other_size] {
        let bad = made(1, 4).with_parts(good.file.chunk_table.clone(), metadata);
        let publish = client.open().await;
        client.upload(&publish, &bad).await.unwrap();
        let refused = client.commit(&publish, &bad).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Corrupt, "{refused:?}");
        assert!(refused.to_string().contains("metadata image is damaged"), "{refused:?}");
    }
    assert!(daemon.store.list_layers().unwrap().is_empty());
    client.publish(&good).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn only_what_this_process_says_it_encoded_is_believed() {
    let daemon = Daemon::new(Arc::new(Memory::new())).await;
    let made = made(1, 4);
    let wrong = |publish: &str| {
        let mut messages = made.messages(publish);
        let last = messages[0].payload.len() - 1;
        messages[0].payload[last] ^= 1;
        messages
    };
    let mut anyone = daemon.client().await;
    let publish = anyone.open().await;
    let refused = anyone.upload_messages(wrong(&publish)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Corrupt, "{refused:?}");
    let mut own = daemon.own_client().await;
    // A publish of our own gives others no rights.
    let publish = own.open().await;
    assert!(anyone.upload_messages(wrong(&publish)).await.is_err());
    let stored = own.upload_messages(wrong(&publish)).await.unwrap();
    assert_eq!(stored.chunks_stored, made.messages(&publish).len() as u64);
    // Sizes that no pack can hold are refused all the same.
    let mut messages = made.messages(&publish);
    messages[0].digest = vec![7; 32];
    messages[0].plain_bytes = 5000;
    assert!(own.upload_messages(messages).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chunk_of_the_largest_size_fits_a_message() {
    let daemon = Daemon::new(Arc::new(Memory::new())).await;
    let mut client = daemon.client().await;
    let publish = client.open().await;
    let plain = harness::noise(layer::chunk::MAX_CHUNK_BYTES as usize, 1);
    let message = v1::UploadChunk {
        publish_id: publish,
        digest: layer::ChunkDigest::of(&plain).0.to_vec(),
        codec: i32::from(Codec::None.number()),
        plain_bytes: plain.len() as u32,
        payload: plain,
    };
    assert_eq!(client.upload_messages(vec![message]).await.unwrap().chunks_stored, 1);
}
