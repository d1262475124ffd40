//! The plane `erofs-fscache` on a host without it, which is every host we have: it is refused with the
//! reason, and nothing is left. Its protocol is tested in `fsd`, against a scripted peer.
#![allow(clippy::unwrap_used)]

mod fsd_world;

use fsd_world::{LayerShape, World};
use proto::v1::Plane;
use sys::probe::{Capabilities, Capability, Finding};

#[test]
fn a_kernel_without_cachefiles_refuses_and_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let capabilities = Capabilities::probe(folder.path());
    if matches!(capabilities.finding(Capability::ErofsFscache), Some(Finding::Available { .. })) {
        // Then the plane can be tested for real, and this says nothing.
        println!("SKIP a_kernel_without_cachefiles_refuses_and_says_why: no erofs-fscache");
        return;
    }
    let mut world = World::new(&LayerShape::default()).unwrap();
    world.start().unwrap();
    let refused = format!("{:#}", world.attach_as("test", Plane::ErofsFscache).unwrap_err());
    assert!(refused.contains("fscache") || refused.contains("Fscache"), "{refused}");
    assert!(world.mounts().is_empty());
    assert!(world.stats().unwrap().layers.is_empty());
    let at = world.attach("test").unwrap();
    world.compare(&at).unwrap();
}
