//! Container images by the command line: out of a registry that wants a password, into a sandbox, and out
//! again.

use crate::registry::{Registry, run};
use crate::world::World;
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;

/// A layout of one layer, made by umoci, with busybox in it.
fn image(world: &World) -> String {
    let layout = format!("{}:v1", world.path("umoci").display());
    let bundle = world.path("bundle");
    run("umoci", &["init", "--layout", world.path("umoci").to_str().unwrap()]);
    run("umoci", &["new", "--image", &layout]);
    run("umoci", &["unpack", "--image", &layout, bundle.to_str().unwrap()]);
    for name in ["bin", "proc", "dev", "sys", "tmp", "etc"] {
        fs::create_dir_all(bundle.join("rootfs").join(name)).unwrap();
    }
    fs::copy("/bin/busybox", bundle.join("rootfs/bin/busybox")).unwrap();
    std::os::unix::fs::symlink("busybox", bundle.join("rootfs/bin/sh")).unwrap();
    run("umoci", &["repack", "--image", &layout, bundle.to_str().unwrap()]);
    let config = ["--config.env", "GREETING=hello", "--config.cmd", "/bin/sh"];
    let config = [&config[..], &["--author", "Ann Author"]].concat();
    run("umoci", &[&["config", "--image", &layout], &config[..]].concat());
    format!("oci:{layout}")
}

/// A credential helper, as docker's configuration names it.
fn helper_is_asked(world: &World, host: &str, name: &str) {
    let folder = world.path("helper");
    fs::create_dir(&folder).unwrap();
    let text = format!("{{\"credHelpers\": {{\"{host}\": \"lamella-test\"}}}}");
    fs::write(folder.join("config.json"), text).unwrap();
    let program = folder.join("docker-credential-lamella-test");
    let script = format!(
        "#!/bin/sh\ntest \"$1 $(cat)\" = \"get {host}\" || exit 1\n\
         echo '{{\"Username\": \"user\", \"Secret\": \"secret\"}}'\n"
    );
    fs::write(&program, script).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap());
    let mut command = world.command(&["pull", name, "-t", "helped:1"]);
    command.env("DOCKER_CONFIG", &folder).env("PATH", path);
    crate::world::finish(command).ok();
}

/// A sandbox of an image, packed and exported: what only the image's own configuration says is still said.
fn what_was_packed_keeps_its_image(world: &World) {
    let id = world.line("create team/app:v1").ok().out.trim().to_owned();
    world.run(&["exec", &id, "--", "/bin/sh", "-c", "echo new > /etc/new"]).ok();
    world.line(&format!("pack-diff {id} -t packed:1")).ok();
    let out = world.path("packed");
    world.line(&format!("oci export packed:1 {}", out.display())).ok();
    let layout = format!("oci:{}:1", out.display());
    let config = run("skopeo", &["inspect", "--config", &layout]);
    let config: Value = serde_json::from_str(&config).unwrap();
    assert_eq!(config["author"], "Ann Author");
    assert_eq!(config["config"]["Env"].as_array().unwrap().last().unwrap(), "GREETING=hello");
    let history = config["history"].as_array().unwrap();
    assert_eq!(history.last().unwrap()["created_by"], "lamella");
    assert_eq!(config["rootfs"]["diff_ids"].as_array().unwrap().len(), 2);
    // And in again: the fields are there, and what is exported once more is the same image.
    world.line(&format!("pull {layout} -t back:1")).ok();
    let again = world.path("again");
    let exported = world.line(&format!("oci export back:1 {} --json", again.display()));
    let inside = run("skopeo", &["inspect", "--format", "{{.Digest}}", &layout]);
    assert_eq!(exported.ok().json()["manifest"], inside.trim());
    world.line(&format!("rm -f {id}")).ok();
    world.line("down").ok();
}

#[test]
fn an_image_is_pulled_run_and_exported() {
    let world = World::new();
    let from = image(&world);
    let registry = Registry::start(&world.path(""), true);
    registry.push(&from, "team/app:v1");
    let name = format!("{}/team/app:v1", registry.host);

    let keys = world.path("keys");
    fs::create_dir(&keys).unwrap();
    let with_keys = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let mut command = world.command(&words);
        command.env("DOCKER_CONFIG", &keys);
        crate::world::finish(command)
    };
    with_keys(&format!("pull {name}")).fails(1, "wants a name and a password");
    // base64 of user:wrong and of user:secret.
    for (auth, right) in [("dXNlcjp3cm9uZw==", false), ("dXNlcjpzZWNyZXQ=", true)] {
        let text = format!("{{\"auths\": {{\"{}\": {{\"auth\": \"{auth}\"}}}}}}", registry.host);
        fs::write(keys.join("config.json"), text).unwrap();
        let done = with_keys(&format!("pull {name}"));
        if right {
            done.ok()
        } else {
            done.fails(1, "401")
        };
    }
    helper_is_asked(&world, &registry.host, &name);
    with_keys(&format!("pull docker://{}/team/app:v2", registry.host)).fails(1, "team/app:v2");
    let inspected = world.line("inspect team/app:v1 --json").ok().json();
    assert_eq!(inspected["layers"].as_array().unwrap().len(), 1);
    let shown = world.run(&["run", "--rm", "team/app:v1", "--", "/bin/sh", "-c", "echo $GREETING"]);
    assert_eq!(shown.ok().out, "hello\n");

    let out = world.path("out");
    let exported = world.line(&format!("oci export team/app:v1 {} --json", out.display()));
    let exported = exported.ok().json();
    assert_eq!(exported["manifest"], registry.digest("team/app:v1").as_str());
    let index: Value = serde_json::from_slice(&fs::read(out.join("index.json")).unwrap()).unwrap();
    let names = &index["manifests"][0]["annotations"];
    assert_eq!(names["org.opencontainers.image.ref.name"], "v1");
    let again = format!("oci export team/app:v1 {}", out.display());
    world.line(&again).fails(1, "exists already");
    let lost =
        world.line("oci export team/app:v1 /nonexistdir/a").fails(1, "in /nonexistdir: No such");
    assert!(!lost.err.contains("/.a."), "a temporary name is nobody's business: {}", lost.err);
    let file = world.path("out.tar");
    world.line(&format!("oci export team/app:v1 {} --name x", file.display())).ok();
    let archive = format!("oci-archive:{}:x", file.display());
    let inside = run("skopeo", &["inspect", "--format", "{{.Digest}}", &archive]);
    assert_eq!(inside.trim(), exported["manifest"].as_str().unwrap());
    // A layer alone is an environment of one.
    let layer = inspected["layers"][0]["id"].as_str().unwrap();
    let place = world.path("layer");
    world.line(&format!("oci export {layer} {}", place.display())).ok();

    let none = with_keys(&format!("oci referrers {name} --json")).ok().json();
    assert_eq!(none.as_array().unwrap().len(), 0);
    // What another program calls by the tag of the old scheme is listed.
    let digest = registry.digest("team/app:v1").replace(':', "-");
    registry.push(&from, &format!("team/app:{digest}"));
    with_keys(&format!("oci referrers {name}")).fails(1, "the registry's answer is of no use");

    what_was_packed_keeps_its_image(&world);

    let merged = with_keys(&format!("pull {name} -t merged:1 --merge --platform linux/amd64"));
    merged.ok();
    with_keys(&format!("build docker://{name} -t base/app:v1")).ok();
    assert!(world.line("ls base").ok().out.contains("base/app:v1"));
    world.line("pull oci:/nowhere").fails(2, "-t NAME:TAG");
}
