//! Keys, signatures, and a node that requires them.

use crate::sandboxes::root;
use crate::world::{Done, World};
use std::fs;
use std::path::PathBuf;

const REFUSAL: &str = "is not signed by a key that this node trusts";

/// A world with `base/box:1` and two environments of it, and the keys `mine` and `strange`.
fn world() -> World {
    let world = World::new();
    world.build(&root(&world), "base/box:1");
    world.line("env create box:1 --layer base/box:1 --env PATH=/bin --cmd true").ok();
    world.line("env create other:1 --layer base/box:1 --env PATH=/bin --cmd false").ok();
    for name in ["mine", "strange"] {
        world.line(&format!("key generate {}", world.path(name).display())).ok();
    }
    world
}

fn sign(world: &World, reference: &str, key: &str) -> Done {
    world.line(&format!("sign {reference} --key {}", world.path(key).display()))
}

fn verify(world: &World, reference: &str, key: &str) -> Done {
    world.line(&format!("verify {reference} --json --keys {}.pub", world.path(key).display()))
}

/// The one object that is a signature of an environment.
fn signature(world: &World) -> PathBuf {
    let only = |dir: PathBuf| fs::read_dir(dir).unwrap().next().unwrap().unwrap().path();
    only(only(world.data().join("store/signatures/env")))
}

#[test]
fn a_node_that_requires_signatures_lets_in_what_is_signed_and_nothing_else() {
    let world = world();
    let trusted = world.data().join("trusted-keys");
    fs::create_dir(&trusted).unwrap();
    fs::copy(world.path("mine.pub"), trusted.join("mine.pub")).unwrap();
    let at = world.mount_point();
    let mount = |reference: &str| world.run(&["mount", reference, at.to_str().unwrap()]);

    // Whoever starts the node, and whatever else is signed.
    world.line("run --rm box:1").fails(1, REFUSAL);
    sign(&world, "box:1", "strange").ok();
    world.line("run --rm box:1").fails(1, REFUSAL);
    world.line("create box:1").fails(1, REFUSAL);
    mount("box:1").fails(1, REFUSAL);
    assert!(world.line("ps -a --json").ok().json().as_array().unwrap().is_empty());

    sign(&world, "box:1", "mine").ok();
    // Whose bytes nothing is compared with is not let in either.
    world.run(&["mount", "--plane", "direct", "box:1", at.to_str().unwrap()]).fails(1, "direct");
    world.line("run --rm box:1").ok();
    world.line("create box:1 -- /bin/sleep 1000").ok();
    // The same layer, which is in use now, under a document that nobody has signed; and alone.
    world.line("run --rm other:1").fails(1, REFUSAL);
    world.line("run --rm base/box:1 -- /bin/true").fails(1, REFUSAL);
    mount("base/box:1").fails(1, REFUSAL);
    mount("box:1").ok();
    assert_eq!(fs::read(at.join("data/kept")).unwrap(), b"kept\n");
    world.run(&["umount", at.to_str().unwrap()]).ok();

    // All layers are as good as the document.
    sign(&world, "base/box:1", "mine").ok();
    assert_eq!(world.line("run --rm other:1").code, 1, "its command is false");
    world.line("run --rm base/box:1 -- /bin/true").ok();
    mount("base/box:1").ok();
    world.run(&["umount", at.to_str().unwrap()]).ok();
    world.line("down").ok();
    world.nothing_is_left();
}

#[test]
fn trust_ends_with_the_key_and_with_the_signature() {
    let world = world();
    let (at, other) = (world.mount_point(), world.path("other"));
    fs::create_dir(&other).unwrap();
    let under = |key: &str, words: &[&str]| {
        let keys = world.path(&format!("{key}.pub"));
        let mut command = world.command(words);
        command.env("LAMELLA_REQUIRE_SIGNATURE", keys);
        crate::world::finish(command)
    };
    sign(&world, "box:1", "mine").ok();
    under("mine", &["mount", "box:1", at.to_str().unwrap()]).ok();
    let fsd = || world.line("stats --json").ok().json()["fsd_pid"].as_u64().unwrap();
    let before = fsd();
    world.line("down --keep").ok();
    // What is in use goes on, and the daemon that trusted the old key is not taken over.
    under("strange", &["mount", "box:1", other.to_str().unwrap()]).fails(1, REFUSAL);
    under("strange", &["run", "--rm", "box:1"]).fails(1, REFUSAL);
    assert_ne!(fsd(), before);
    assert_eq!(fs::read(at.join("data/kept")).unwrap(), b"kept\n");
    world.line("down").ok();

    // A false signature is none, says so, and is mended by signing again.
    let name = signature(&world);
    let sound = fs::read_to_string(&name).unwrap();
    fs::remove_file(&name).unwrap();
    fs::write(&name, sound.replace("\"claims\":{}", "\"claims\":{\"by\":\"ci\"}")).unwrap();
    under("mine", &["run", "--rm", "box:1"]).fails(1, "is false");
    verify(&world, "box:1", "mine").fails(1, "is false");
    sign(&world, "box:1", "mine").ok();
    under("mine", &["run", "--rm", "box:1"]).ok();
    world.nothing_is_left();
}

#[test]
fn signatures_are_shown_and_copied_and_keys_are_kept_private() {
    let world = world();
    let (mine, spare) = (world.path("mine"), world.path("spare"));
    verify(&world, "box:1", "mine").fails(1, REFUSAL);
    let claim = format!("sign box:1 --claim commit=abc --json --key {}", mine.display());
    let signed = world.line(&claim).ok().json();
    assert_eq!(signed["claims"]["commit"], "abc");
    let again = sign(&world, "box:1", "mine").ok();
    assert!(again.out.contains("had signed it before"), "{}", again.out);
    sign(&world, "box:1", "strange").ok();
    let verified = verify(&world, "box:1", "mine").ok().json();
    assert_eq!(verified["signatures"][0]["key"], signed["key"]);
    assert_eq!(verified["others"], 1);
    verify(&world, "other:1", "mine").fails(1, REFUSAL);

    world.line(&format!("copy-store box:1 --to {}", spare.display())).ok();
    let there = format!(
        "--store {} verify box:1 --keys {}.pub --data {}",
        spare.display(),
        mine.display(),
        world.path("elsewhere").display()
    );
    world.line(&there).ok();

    let shown = world.line(&format!("key show {}", mine.display())).ok();
    assert_eq!(shown.out, fs::read_to_string(world.path("mine.pub")).unwrap());
    world.line(&format!("key generate {}", mine.display())).fails(1, "never overwritten");
    let open: fs::Permissions = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    fs::set_permissions(&mine, open).unwrap();
    sign(&world, "other:1", "mine").fails(1, "can be read by others");
    world.line("up --require-signature /nowhere/keys").fails(1, "/nowhere/keys");
}

#[test]
fn a_check_names_false_signatures_and_strange_keys_and_repair_takes_sound_ones_from_a_second_store()
{
    let world = world();
    sign(&world, "box:1", "mine").ok();
    sign(&world, "base/box:1", "strange").ok();
    let spare = world.path("spare");
    world.line(&format!("copy-store --all --to {}", spare.display())).ok();
    let clean = world.line("fsck --json").ok().json();
    assert_eq!(clean["signatures"], 2);
    assert!(clean.get("strange_keys").is_none(), "nobody said who is trusted");

    // Whose they are is no damage.
    let with_keys =
        |line: &str| world.line(&format!("{line} --keys {}.pub", world.path("mine").display()));
    let strange = with_keys("fsck").ok().out;
    assert!(strange.contains("is not trusted and has made 1 of the signatures"), "{strange}");
    let strange = with_keys("fsck box:1").ok().out;
    assert!(strange.contains("which is not trusted"), "{strange}");

    let name = signature(&world);
    let sound = fs::read(&name).unwrap();
    for garbled in [&sound[..sound.len() / 2], b"", b"words"] {
        fs::remove_file(&name).unwrap();
        fs::write(&name, garbled).unwrap();
        let damaged = world.line("fsck --json");
        assert_eq!(damaged.code, 1, "{damaged:?}");
        let damages = damaged.json()["damaged"].clone();
        assert_eq!(damages.as_array().unwrap().len(), 1, "{damages}");
        assert!(damages[0]["what"].as_str().unwrap().contains("signature of"), "{damages}");
        assert_eq!(damages[0]["references"], serde_json::json!(["env/box:1"]));
        world.line("fsck box:1").fails(1, "damaged in 1 places");
        let alone = world.line("repair");
        assert_eq!(alone.code, 1, "only another store has it: {alone:?}");
        let mended = world.line(&format!("repair --json --from {}", spare.display())).ok().json();
        assert_eq!(mended["signatures"], 1);
        assert_eq!(fs::read(&name).unwrap(), sound);
    }
    // One that is lost is missed by nobody, and brought back all the same.
    fs::remove_file(&name).unwrap();
    world.line("fsck").ok();
    world.line(&format!("repair --from {}", spare.display())).ok();
    verify(&world, "box:1", "mine").ok();
    // What has no name of a signature.
    fs::write(name.with_file_name("noname"), "x").unwrap();
    let stray = world.line("fsck");
    assert!(stray.code == 1 && stray.out.contains("noname"), "{stray:?}");
    world.nothing_is_left();
}
