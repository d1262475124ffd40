//! Access profiles of a living node: what is touched is recorded and stored, the next attach fetches it
//! before anybody reads, and a profile that is damaged costs nothing but itself.
#![allow(clippy::unwrap_used)]

mod fsd_world;

use fsd_world::{LayerShape, World, wait_until};
use layer::profile::Profile;
use proto::v1::layer_fs_client::LayerFsClient;
use proto::v1::{RecordRequest, RecordResponse, StopRecordRequest};
use std::path::Path;
use store::{Profiled, Store};

struct Client {
    runtime: tokio::runtime::Runtime,
    layerfs: LayerFsClient<tonic::transport::Channel>,
}

impl Client {
    fn of(world: &World) -> Self {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let socket = world.run_folder().join("fsd.sock");
        let channel = runtime.block_on(proto::connect::unix(&socket)).unwrap();
        Self { runtime, layerfs: LayerFsClient::new(channel) }
    }

    fn record(&mut self, world: &World) -> RecordResponse {
        let layer_ids = vec![world.layer.id.as_bytes().to_vec()];
        let request = RecordRequest { name: "test".into(), layer_ids, env_id: vec![9; 32] };
        self.runtime.block_on(self.layerfs.record(request)).unwrap().into_inner()
    }

    fn stop(&mut self) -> Profile {
        let request = StopRecordRequest { name: "test".into(), discard: false };
        let stopped = self.runtime.block_on(self.layerfs.stop_record(request)).unwrap();
        Profile::decode(&stopped.into_inner().profile).unwrap()
    }
}

fn store_of(world: &World) -> Store {
    Store::open(store::open(&format!("file://{}", world.store_folder.display())).unwrap()).unwrap()
}

fn read(at: &Path, world: &World, name: &str) {
    assert!(std::fs::read(at.join(name)).unwrap() == world.layer.files[name], "{name}");
}

#[test]
fn what_was_recorded_is_there_before_it_is_read() {
    let mut world = World::new(&LayerShape::default()).unwrap();
    world.start().unwrap();
    let mut client = Client::of(&world);
    assert!(client.record(&world).warm_layer_ids.is_empty());
    let at = world.attach("test").unwrap();
    let touched = ["file-0040", "file-0003", "file-0021"];
    touched.iter().for_each(|name| read(&at, &world, name));
    let profile = client.stop();
    let run = &profile.runs()[0];
    assert!(run.touches()[0].start_block > run.touches().last().unwrap().start_block / 2);

    let store = store_of(&world);
    let table = store.read_layer(&world.layer.id).unwrap().chunk_table;
    let mut chunks = std::collections::BTreeSet::new();
    for touch in run.touches() {
        let (offset, bytes) = (u64::from(touch.start_block) * 4096, u64::from(touch.blocks) * 4096);
        chunks.extend(table.covering(offset, bytes).filter(|at| !table.chunks()[*at].is_zero()));
    }
    let stored = store.read_profile(&Profiled::Layer(world.layer.id)).unwrap().unwrap();
    assert_eq!(stored, profile.clone());
    let environment = Profiled::Environment(layer::EnvId([9; 32]));
    assert_eq!(store.read_profile(&environment).unwrap(), Some(profile.clone()));

    world.detach("test").unwrap();
    world.evict().unwrap();
    let at = world.attach("again").unwrap();
    let fills = |world: &World| world.stats().unwrap().layers[0].fills;
    wait_until("the prefetch", || fills(&world) >= chunks.len() as u64);
    let hits_and_waits = |world: &World| {
        let stats = &world.stats().unwrap().layers[0];
        (stats.hits, stats.waits)
    };
    let events = |world: &World| world.stats().unwrap().events;
    let (before, asked) = (hits_and_waits(&world), events(&world));
    touched.iter().for_each(|name| read(&at, &world, name));
    let asked = events(&world) - asked;
    assert!(asked > 0, "the layer is not complete, so reads are asked for");
    // What was read ahead beside them is filled now; what they asked for was there.
    assert_eq!(hits_and_waits(&world), (before.0 + asked, before.1), "all of it was there");
    world.compare(&at).unwrap();
}

#[test]
fn a_complete_layer_is_recorded_too() {
    let mut world = World::new(&LayerShape::default()).unwrap();
    world.start().unwrap();
    world.complete().unwrap();
    let mut client = Client::of(&world);
    client.record(&world);
    let at = world.attach("test").unwrap();
    assert!(world.stats().unwrap().layers[0].marked, "the kernel asks while somebody records");
    read(&at, &world, "file-0007");
    assert!(!client.stop().is_empty());
    wait_until("the drop of the mark", || !world.stats().unwrap().layers[0].marked);
}

#[test]
fn a_garbage_profile_is_ignored_with_one_warning() {
    let mut world = World::new(&LayerShape::default()).unwrap();
    let folder = world.store_folder.join(format!("profiles/layer/{}", world.layer.id));
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join(format!("{:020}", u64::MAX - 1)), b"garbage").unwrap();
    world.start().unwrap();
    let at = world.attach("test").unwrap();
    world.compare(&at).unwrap();
    let warnings = |world: &World| world.log().matches("is ignored").count();
    wait_until("the warning", || warnings(&world) > 0);
    assert_eq!(warnings(&world), 1);
    assert_eq!(world.stats().unwrap().errors_answered, 0);
}
