//! Images out of registries that answer well, late, wrong, or not at all.

#![allow(clippy::unwrap_used)]

#[path = "support/server.rs"]
mod server;
mod support;
#[path = "support/tape.rs"]
mod tape;

use builder::oci::{ImageName, RegistryOptions, referrers};
use builder::{BuildOptions, Built, ImageLayers, Silent, Source};
use layer::{ErrorKind, Result};
use serde_json::{Value, json};
use server::{Reply, Request, Server};
use sha2::Digest as _;
use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use support::{MemoryPublisher, noise, options};
use tape::Tape;

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";

fn digest(bytes: &[u8]) -> String {
    let hex: String = sha2::Sha256::digest(bytes).iter().map(|it| format!("{it:02x}")).collect();
    format!("sha256:{hex}")
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// The content of a registry: documents and blobs by path.
#[derive(Clone, Default)]
struct Content {
    objects: BTreeMap<String, (String, Vec<u8>)>,
}

impl Content {
    fn describe(bytes: &[u8], media_type: &str) -> Value {
        json!({"mediaType": media_type, "digest": digest(bytes), "size": bytes.len()})
    }

    fn blob(&mut self, bytes: &[u8]) {
        let path = format!("/v2/demo/app/blobs/{}", digest(bytes));
        self.objects.insert(path, ("application/octet-stream".into(), bytes.to_vec()));
    }

    /// A manifest or index under its digest, and under a tag when there is one.
    fn document(&mut self, value: &Value, media_type: &str, tag: Option<&str>) -> Value {
        let bytes = serde_json::to_vec(value).unwrap();
        for name in [Some(digest(&bytes)), tag.map(str::to_owned)].into_iter().flatten() {
            let path = format!("/v2/demo/app/manifests/{name}");
            self.objects.insert(path, (media_type.to_owned(), bytes.clone()));
        }
        Self::describe(&bytes, media_type)
    }

    /// An image of these tars.
    fn image(&mut self, tars: &[Vec<u8>], tag: Option<&str>) -> Value {
        let diff_ids: Vec<String> = tars.iter().map(|tar| digest(tar)).collect();
        let config = json!({"architecture": "amd64", "os": "linux",
            "config": {"Cmd": ["sh"]}, "rootfs": {"type": "layers", "diff_ids": diff_ids}});
        let config = serde_json::to_vec(&config).unwrap();
        self.blob(&config);
        let mut layers = Vec::new();
        for tar in tars {
            let packed = gzip(tar);
            self.blob(&packed);
            layers.push(Self::describe(&packed, "application/vnd.oci.image.layer.v1.tar+gzip"));
        }
        let manifest = json!({"schemaVersion": 2, "mediaType": MANIFEST, "layers": layers,
            "config": Self::describe(&config, "application/vnd.oci.image.config.v1+json")});
        self.document(&manifest, MANIFEST, tag)
    }

    fn answer(&self, request: &Request) -> Reply {
        let Some((media_type, bytes)) = self.objects.get(&request.path) else {
            return Reply::status(404);
        };
        let reply = match request.from() {
            None => Reply::ok(bytes),
            Some(from) => {
                let range = format!("bytes {from}-{}/{}", bytes.len() - 1, bytes.len());
                let part = Reply { status: 206, body: bytes[from..].to_vec(), ..Reply::default() };
                part.header("Content-Range", &range)
            }
        };
        reply.header("Content-Type", media_type)
    }

    fn serve(self) -> Server {
        Server::start(move |request| self.answer(request))
    }
}

fn tars() -> Vec<Vec<u8>> {
    let big = noise(300_000, 5);
    vec![
        Tape::default().directory("etc/", 0o755).file("etc/a", b"one").file("big", &big).end(),
        Tape::default().file("etc/.wh.a", b"").file("etc/b", b"two").end(),
    ]
}

fn one_image() -> Content {
    let mut content = Content::default();
    content.image(&tars(), Some("v1"));
    content
}

fn pull(server: &Server, reference: &str, options: &BuildOptions) -> Result<Built> {
    let source = Source::parse(&format!("docker://{}/demo/app{reference}", server.host))?;
    builder::build(&source, &MemoryPublisher::default(), options, &Silent)
}

fn stacked() -> BuildOptions {
    BuildOptions { image_layers: ImageLayers::Stacked, ..options() }
}

fn pulled(server: &Server) -> Built {
    let built = pull(server, ":v1", &stacked());
    built.unwrap_or_else(|error| panic!("{}", error.chain()))
}

fn refused(server: &Server) -> layer::Error {
    pull(server, ":v1", &stacked()).unwrap_err()
}

#[test]
fn tags_digests_and_platforms_lead_to_an_image() {
    let mut content = Content::default();
    let mut here = content.image(&tars(), None);
    let mut there = content.image(&tars()[..1], None);
    let own = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    here["platform"] = json!({"architecture": own, "os": "linux"});
    there["platform"] = json!({"architecture": "s390x", "os": "linux"});
    let mut inner = content.document(
        &json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [there, here]}),
        INDEX,
        Some("v1"),
    );
    inner["mediaType"] = json!(INDEX);
    let server = content.serve();
    assert_eq!(pulled(&server).layers.len(), 2);
    let by_digest = format!("@{}", inner["digest"].as_str().unwrap());
    assert_eq!(pull(&server, &by_digest, &stacked()).unwrap().layers.len(), 2);
    let platform = Some("linux/s390x".parse().unwrap());
    let other = BuildOptions { platform, ..stacked() };
    assert_eq!(pull(&server, ":v1", &other).unwrap().layers.len(), 1);
    let platform = Some("linux/riscv64".parse().unwrap());
    let error = pull(&server, ":v1", &BuildOptions { platform, ..stacked() }).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    let error = pull(&server, ":v2", &stacked()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{}", error.chain());
}

#[test]
fn an_image_without_an_index_is_not_taken_for_one_of_another_platform() {
    let server = one_image().serve();
    let for_platform = |platform: &str| {
        let platform = Some(platform.parse().unwrap());
        pull(&server, ":v1", &BuildOptions { platform, ..stacked() })
    };
    assert!(for_platform("linux/amd64").is_ok());
    let error = for_platform("linux/s390x").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.chain().contains("only for linux/amd64"), "{}", error.chain());
}

#[test]
fn an_interrupted_blob_goes_on_where_it_ended() {
    let expected = pulled(&one_image().serve()).layer_ids();
    let content = one_image();
    let server = Server::start(move |request| {
        let reply = content.answer(request);
        let large = request.path.contains("/blobs/") && reply.body.len() > 100_000;
        if large { reply.cut(90_000) } else { reply }
    });
    assert_eq!(pulled(&server).layer_ids(), expected);
    let asked = server.asked.lock().unwrap();
    let ranges: Vec<usize> = asked.iter().filter_map(Request::from).collect();
    assert!(ranges.len() >= 2 && ranges.is_sorted(), "{ranges:?}");
}

#[test]
fn a_registry_that_knows_no_ranges_is_asked_for_all_again() {
    let expected = pulled(&one_image().serve()).layer_ids();
    let (content, cuts) = (one_image(), AtomicUsize::new(0));
    let server = Server::start(move |request| {
        let whole = Request { path: request.path.clone(), ..Request::default() };
        let reply = content.answer(&whole);
        let large = request.path.contains("/blobs/") && reply.body.len() > 100_000;
        let cut = large && cuts.fetch_add(1, Ordering::Relaxed) < 2;
        if cut { reply.cut(50_000) } else { reply }
    });
    assert_eq!(pulled(&server).layer_ids(), expected);
}

#[test]
fn passing_failures_are_tried_again_and_lasting_ones_end() {
    let (content, calls) = (one_image(), AtomicUsize::new(0));
    let server = Server::start(move |request| match calls.fetch_add(1, Ordering::Relaxed) {
        0 => Reply::status(503),
        1 => Reply::status(429).header("Retry-After", "0"),
        _ => content.answer(request),
    });
    pulled(&server);
    let server = Server::start(|_| Reply::status(500).header("Retry-After", "0"));
    let error = refused(&server);
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.chain().contains("500") && error.chain().contains("5 attempts"));
    let content = one_image();
    let server = Server::start(move |request| {
        let reply = content.answer(request);
        if request.path.contains("/blobs/") && reply.body.len() > 100_000 {
            return reply.cut(0);
        }
        reply
    });
    assert_eq!(refused(&server).kind(), ErrorKind::Unavailable);
}

#[test]
fn bytes_that_are_not_what_was_promised_are_refused() {
    type Bend = fn(Reply) -> Reply;
    let bends: [(&str, Bend); 4] = [
        ("digest", |mut reply| {
            reply.body[70_000] ^= 1;
            reply
        }),
        ("bytes", |mut reply| {
            reply.body.pop();
            reply
        }),
        ("bytes", |mut reply| {
            reply.body.push(0);
            reply
        }),
        ("bytes", |reply| reply.header("Content-Length", "99999999999999")),
    ];
    for (number, (word, bend)) in bends.into_iter().enumerate() {
        let content = one_image();
        let server = Server::start(move |request| {
            let reply = content.answer(request);
            let large = request.path.contains("/blobs/") && reply.body.len() > 100_000;
            if large { bend(reply) } else { reply }
        });
        let error = refused(&server);
        let chain = error.chain();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{number}: {chain}");
        assert!(chain.contains(word), "{number}: {chain}");
        assert!(chain.contains("demo/app"), "{number}: {chain}");
    }
    // A manifest that is not the one that was asked for.
    let content = one_image();
    let server = Server::start(move |request| {
        let reply = content.answer(request);
        let other = digest(b"other");
        if request.path.contains("/manifests/") {
            return reply.header("Docker-Content-Digest", &other);
        }
        reply
    });
    assert_eq!(refused(&server).kind(), ErrorKind::Corrupt);
}

#[test]
fn absurd_answers_are_bounded() {
    let endless = vec![b' '; (16 << 20) + 100];
    let server = Server::start(move |_| Reply::ok(&endless));
    let error = refused(&server);
    assert_eq!(error.kind(), ErrorKind::Invalid, "{}", error.chain());
    // A descriptor of a size that nobody has room for.
    let mut content = one_image();
    let path = "/v2/demo/app/manifests/v1";
    let mut manifest: Value = serde_json::from_slice(&content.objects[path].1).unwrap();
    manifest["layers"][0]["size"] = json!(1_u64 << 62);
    content.document(&manifest, MANIFEST, Some("v1"));
    let error = refused(&content.clone().serve());
    assert_eq!(error.kind(), ErrorKind::NoSpace, "{}", error.chain());
    // One layer less than the configuration has digests of.
    let mut manifest: Value = serde_json::from_slice(&one_image().objects[path].1).unwrap();
    manifest["layers"].as_array_mut().unwrap().pop();
    content.document(&manifest, MANIFEST, Some("v1"));
    assert_eq!(refused(&content.serve()).kind(), ErrorKind::Corrupt);
}

#[test]
fn a_layer_that_is_not_its_diff_id_is_refused() {
    let mut content = Content::default();
    let tars = tars();
    content.image(&tars, Some("v1"));
    let path = "/v2/demo/app/manifests/v1";
    let mut manifest: Value = serde_json::from_slice(&content.objects[path].1).unwrap();
    let config_path =
        format!("/v2/demo/app/blobs/{}", manifest["config"]["digest"].as_str().unwrap());
    let mut config: Value = serde_json::from_slice(&content.objects[&config_path].1).unwrap();
    config["rootfs"]["diff_ids"][1] = json!(digest(b"another tar"));
    let config = serde_json::to_vec(&config).unwrap();
    content.blob(&config);
    manifest["config"] = Content::describe(&config, "application/vnd.oci.image.config.v1+json");
    content.document(&manifest, MANIFEST, Some("v1"));
    let error = refused(&content.serve());
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.chain().contains("digest"), "{}", error.chain());
}

#[test]
fn a_token_is_fetched_and_sent_along() {
    let content = one_image();
    let host = Arc::new(std::sync::OnceLock::<String>::new());
    let own = Arc::clone(&host);
    let server = Server::start(move |request| {
        if request.path.starts_with("/token?") {
            assert!(
                request.path.contains("scope=repository%3Ademo%2Fapp%3Apull"),
                "{}",
                request.path
            );
            assert!(request.path.contains("service=reg"), "{}", request.path);
            return Reply::ok(br#"{"token":"abc.def"}"#);
        }
        if request.header("authorization") != "Bearer abc.def" {
            let demand = format!(
                "Bearer realm=\"http://{}/token\",service=\"reg\",scope=\"repository:demo/app:pull\"",
                own.get().unwrap()
            );
            return Reply::status(401).header("WWW-Authenticate", &demand);
        }
        content.answer(request)
    });
    host.set(server.host.clone()).unwrap();
    pulled(&server);
    assert_eq!(server.asked_for("/token"), 1);
    let server =
        Server::start(|_| Reply::status(401).header("WWW-Authenticate", "Basic realm=\"x\""));
    let error = refused(&server);
    assert_eq!(error.kind(), ErrorKind::Denied);
    assert!(error.chain().contains("DOCKER_CONFIG"), "{}", error.chain());
    let server = Server::start(|_| Reply::status(403));
    assert_eq!(refused(&server).kind(), ErrorKind::Denied);
}

#[test]
fn credentials_do_not_follow_to_another_host() {
    let content = one_image();
    let elsewhere = {
        let content = content.clone();
        Server::start(move |request| {
            assert_eq!(request.header("authorization"), "", "the token went along");
            content.answer(request)
        })
    };
    let host = Arc::new(std::sync::OnceLock::<String>::new());
    let (own, away) = (Arc::clone(&host), elsewhere.host.clone());
    let server = Server::start(move |request| {
        if request.path.starts_with("/token") {
            return Reply::ok(br#"{"access_token":"abc"}"#);
        }
        if request.header("authorization").is_empty() {
            let demand = format!("Bearer realm=\"http://{}/token\"", own.get().unwrap());
            return Reply::status(401).header("WWW-Authenticate", &demand);
        }
        if request.path.contains("/blobs/") {
            let to = format!("http://{away}{}", request.path);
            return Reply::status(307).header("Location", &to);
        }
        content.answer(request)
    });
    host.set(server.host.clone()).unwrap();
    pulled(&server);
    assert!(elsewhere.asked_for("/blobs/") >= 3);
}

#[test]
fn referrers_are_listed_by_both_ways() {
    let subject = digest(b"subject");
    let referrer = |kind: &str, bytes: &[u8]| {
        let mut value = Content::describe(bytes, MANIFEST);
        value["artifactType"] = json!(kind);
        value
    };
    let list = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests":
        [referrer("application/x.signature", b"a"), referrer("application/x.sbom", b"b")]});
    let body = serde_json::to_vec(&list).unwrap();
    let (api, tag) = (body.clone(), body);
    let (by_api, by_tag) = (
        Server::start(move |request| match request.path.contains("/referrers/") {
            true => Reply::ok(&api).header("Content-Type", INDEX),
            false => Reply::status(404),
        }),
        Server::start(move |request| match request.path.contains("/manifests/sha256-") {
            true => Reply::ok(&tag).header("Content-Type", INDEX),
            false => Reply::status(404),
        }),
    );
    for server in [by_api, by_tag] {
        let name: ImageName = format!("{}/demo/app@{subject}", server.host).parse().unwrap();
        let all = referrers(&name, RegistryOptions::default(), None).unwrap();
        assert_eq!(all.len(), 2);
        assert_eq!(all[0].digest, digest(b"a"));
        let some =
            referrers(&name, RegistryOptions::default(), Some("application/x.sbom")).unwrap();
        assert_eq!(some.len(), 1);
        assert_eq!(some[0].artifact_type.as_deref(), Some("application/x.sbom"));
    }
    let nothing = Server::start(|_| Reply::status(404));
    let name: ImageName = format!("{}/demo/app@{subject}", nothing.host).parse().unwrap();
    assert!(referrers(&name, RegistryOptions::default(), None).unwrap().is_empty());
}

/// An image of several layers of which none says anything of another.
fn many_layers(count: u64) -> Content {
    let mut content = Content::default();
    let tar = |at| Tape::default().file(&format!("file{at}"), &noise(20_000, at + 1)).end();
    content.image(&(0..count).map(tar).collect::<Vec<_>>(), Some("v1"));
    content
}

#[test]
fn layers_are_fetched_side_by_side_and_no_more_than_three_of_them() {
    let expected = pulled(&many_layers(8).serve()).layer_ids();
    // How many are on their way, and how many there were at most.
    let counts = Arc::new(std::sync::Mutex::new((0, 0)));
    let (content, here) = (many_layers(8), Arc::clone(&counts));
    let together = std::sync::Barrier::new(3);
    let first = AtomicUsize::new(0);
    let server = Server::start(move |request| {
        let reply = content.answer(request);
        if reply.body.len() < 10_000 {
            return reply;
        }
        {
            let mut counts = here.lock().unwrap();
            counts.0 += 1;
            counts.1 = counts.1.max(counts.0);
        }
        // The first three get nothing before all three have asked.
        if first.fetch_add(1, Ordering::Relaxed) < 3 {
            together.wait();
        }
        here.lock().unwrap().0 -= 1;
        reply
    });
    assert_eq!(pulled(&server).layer_ids(), expected);
    assert_eq!(*counts.lock().unwrap(), (0, 3));
}

#[test]
fn a_layer_that_fails_ends_the_others_and_is_the_one_that_is_named() {
    let content = many_layers(8);
    let gone = {
        let blobs = content.objects.iter().filter(|(_, (_, bytes))| bytes.len() > 10_000);
        blobs.map(|(path, _)| path.clone()).next().unwrap()
    };
    let missing = gone.clone();
    let server = Server::start(move |request| match request.path == missing {
        true => Reply::status(404),
        false => content.answer(request),
    });
    let error = refused(&server);
    assert_eq!(error.kind(), ErrorKind::NotFound, "{}", error.chain());
    assert!(error.chain().contains(gone.rsplit('/').next().unwrap()), "{}", error.chain());
}
