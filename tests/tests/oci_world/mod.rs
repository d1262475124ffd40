//! A store with its image daemon, images made by umoci and by hand, and what the tests do with them.
#![allow(dead_code, missing_docs, unreachable_pub, clippy::unwrap_used)]

pub mod registry;

use builder::export::{ExportOptions, Exported, export};
use builder::publish::{ImagesPublisher, Publisher};
use builder::{BuildOptions, Built, ImageLayers, Silent, Source, publish_built};
use layer::environment::Environment;
use layer::manifest::LayerKind;
use layer::{LayerId, Result};
use registry::run;
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use store::Store;

/// An image daemon over a store in a directory.
pub struct World {
    runtime: tokio::runtime::Runtime,
    pub images: imaged::Service,
    pub store: Arc<Store>,
    channel: tonic::transport::Channel,
    pub dir: tempfile::TempDir,
}

impl World {
    pub fn new() -> Self {
        let dir = tempfile::Builder::new().tempdir_in("/var/tmp").unwrap();
        let folder = dir.path().join("store");
        let url = format!("file://{}", folder.display());
        fs::create_dir(&folder).unwrap();
        let store = Arc::new(Store::open(store::open(&url).unwrap()).unwrap());
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let config =
            imaged::ImagedConfig { store: store.clone(), catalog_dir: dir.path().join("catalog") };
        let images = imaged::Service::open(config).unwrap();
        let channel = runtime.block_on(proto::connect::in_process(images.routes())).unwrap();
        Self { runtime, images, store, channel, dir }
    }

    pub fn publisher(&self) -> ImagesPublisher {
        let handle = self.runtime.handle().clone();
        ImagesPublisher::open(handle, self.channel.clone(), "test").unwrap()
    }

    pub fn options(&self) -> BuildOptions {
        BuildOptions {
            threads: 2,
            image_layers: ImageLayers::Stacked,
            originals: Some((*self.store).clone()),
            ..BuildOptions::new(LayerKind::Base)
        }
    }

    pub fn build(&self, source: &str, options: &BuildOptions) -> Result<(Built, Environment)> {
        self.build_with(source, options, &self.publisher())
    }

    pub fn build_with(
        &self,
        source: &str,
        options: &BuildOptions,
        publisher: &dyn Publisher,
    ) -> Result<(Built, Environment)> {
        let built = builder::build(&Source::parse(source)?, publisher, options, &Silent)?;
        let config = built.config.clone().unwrap_or_default();
        let id = publish_built(&built, config, publisher)?;
        let environment = self.store.read_environment(&id)?;
        Ok((built, environment))
    }

    /// An environment of an image, one layer for each of its layers.
    pub fn pull(&self, source: &str) -> (Built, Environment) {
        let done = self.build(source, &self.options());
        done.unwrap_or_else(|error| panic!("{source}: {}", error.chain()))
    }

    /// Exports to a new directory below this world's.
    pub fn export(&self, environment: &Environment, name: &str) -> (PathBuf, Exported) {
        self.export_with(environment, name, &ExportOptions::default())
    }

    pub fn export_with(
        &self,
        environment: &Environment,
        name: &str,
        options: &ExportOptions,
    ) -> (PathBuf, Exported) {
        let place = self.dir.path().join(name);
        let done = export(&self.store, environment, &place, options, &Silent);
        (place, done.unwrap_or_else(|error| panic!("{name}: {}", error.chain())))
    }

    /// What decides whether two layers are the same tree.
    pub fn tree_digests(&self, layer: LayerId) -> (String, String) {
        let manifest = self.store.read_layer(&layer).unwrap().manifest;
        (manifest.metadata_digest.to_string(), manifest.chunk_table_digest.to_string())
    }
}

/// An image of three layers that umoci made, as the layout `dir/umoci`, tag `v1`.
pub fn umoci_image(dir: &Path) -> PathBuf {
    let layout = dir.join("umoci");
    let (bundle, image) = (dir.join("bundle"), format!("{}:v1", layout.display()));
    let root = bundle.join("rootfs");
    let bundle = bundle.to_str().unwrap();
    run("umoci", &["init", "--layout", layout.to_str().unwrap()]);
    run("umoci", &["new", "--image", &image]);
    run("umoci", &["unpack", "--image", &image, bundle]);
    for folder in ["bin", "etc/app", "usr/share/doc", "old/inner", "tmp", "proc", "dev", "sys"] {
        fs::create_dir_all(root.join(folder)).unwrap();
    }
    fs::copy("/bin/busybox", root.join("bin/busybox")).unwrap();
    symlink("busybox", root.join("bin/sh")).unwrap();
    fs::set_permissions(root.join("tmp"), fs::Permissions::from_mode(0o1777)).unwrap();
    for at in 0..200_u32 {
        let text = format!("file {at} of a package\n").repeat(at as usize % 40);
        fs::write(root.join(format!("usr/share/doc/{at}")), text).unwrap();
    }
    fs::write(root.join("etc/app/config"), "one").unwrap();
    fs::write(root.join("old/inner/file"), "gone later").unwrap();
    fs::hard_link(root.join("etc/app/config"), root.join("etc/linked")).unwrap();
    run("umoci", &["repack", "--refresh-bundle", "--image", &image, bundle]);
    fs::remove_file(root.join("usr/share/doc/7")).unwrap();
    fs::remove_dir_all(root.join("old")).unwrap();
    fs::create_dir(root.join("old")).unwrap();
    fs::write(root.join("old/new"), "in its place").unwrap();
    run("umoci", &["repack", "--refresh-bundle", "--image", &image, bundle]);
    fs::write(root.join("etc/app/config"), "two").unwrap();
    run("umoci", &["repack", "--refresh-bundle", "--image", &image, bundle]);
    run(
        "umoci",
        &[
            "config",
            "--image",
            &image,
            "--config.cmd",
            "/bin/sh",
            "--config.env",
            "GREETING=hello",
            "--config.user",
            "0:0",
            "--config.workingdir",
            "/etc/app",
            "--config.label",
            "a=b",
            "--config.exposedports",
            "80/tcp",
            "--config.volume",
            "/data",
            "--config.stopsignal",
            "SIGINT",
            "--author",
            "somebody",
            "--manifest.annotation",
            "k=v",
        ],
    );
    layout
}

/// Writes a layout, tag `v1`, of tars that were compressed somehow: the tar, the blob, how it is called.
pub fn layout(dir: &Path, layers: &[(Vec<u8>, Vec<u8>, &str)]) {
    fs::create_dir_all(dir.join("blobs/sha256")).unwrap();
    let put = |bytes: &[u8], media_type: &str| -> Value {
        let digest = sha256(dir, bytes);
        let path = dir.join("blobs").join(digest.replacen(':', "/", 1));
        fs::write(path, bytes).unwrap();
        json!({"mediaType": media_type, "digest": digest, "size": bytes.len()})
    };
    let diff_ids: Vec<String> = layers.iter().map(|(tar, ..)| sha256(dir, tar)).collect();
    // In an order and with spaces that no program of ours would write.
    let config = format!(
        "{{\"rootfs\": {{\"type\": \"layers\", \"diff_ids\": {}}}, \"os\": \"linux\",\n \
         \"created\": \"2020-02-02T02:02:02Z\", \"architecture\": \"amd64\", \
         \"config\": {{\"Cmd\": [\"true\"], \"Healthcheck\": {{\"Test\": [\"NONE\"]}}, \"OnBuild\": []}}, \
         \"x-unknown\": [1, 2.50]}}\n",
        serde_json::to_string(&diff_ids).unwrap()
    );
    let config = put(config.as_bytes(), "application/vnd.oci.image.config.v1+json");
    let descriptors: Vec<Value> = layers
        .iter()
        .map(|(_, blob, how)| put(blob, &format!("application/vnd.oci.image.layer.v1.tar{how}")))
        .collect();
    let manifest = json!({"schemaVersion": 2, "config": config, "layers": descriptors,
        "mediaType": "application/vnd.oci.image.manifest.v1+json"});
    let text = serde_json::to_string_pretty(&manifest).unwrap();
    let mut entry = put(text.as_bytes(), "application/vnd.oci.image.manifest.v1+json");
    entry["annotations"] = json!({"org.opencontainers.image.ref.name": "v1"});
    let index = json!({"schemaVersion": 2, "manifests": [entry]});
    fs::write(dir.join("index.json"), serde_json::to_vec(&index).unwrap()).unwrap();
    fs::write(dir.join("oci-layout"), br#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
}

/// What the system's own tool says.
fn sha256(dir: &Path, bytes: &[u8]) -> String {
    let path = dir.join("to-be-hashed");
    fs::write(&path, bytes).unwrap();
    let line = run("sha256sum", &[path.to_str().unwrap()]);
    fs::remove_file(&path).unwrap();
    format!("sha256:{}", line.split(' ').next().unwrap())
}

/// Compresses with a program of the system, such as `gzip -9`.
pub fn packed(dir: &Path, command: &str, bytes: &[u8]) -> Vec<u8> {
    let (from, to) = (dir.join("plain"), dir.join("packed"));
    fs::write(&from, bytes).unwrap();
    run("sh", &["-c", &format!("{command} < {} > {}", from.display(), to.display())]);
    fs::read(to).unwrap()
}

/// The digest of the only image of a layout, and those of its layers.
pub fn digests(layout: &Path) -> (String, Vec<String>) {
    let document =
        |path: PathBuf| -> Value { serde_json::from_slice(&fs::read(&path).unwrap()).unwrap() };
    let index = document(layout.join("index.json"));
    let digest = index["manifests"][0]["digest"].as_str().unwrap().to_owned();
    let manifest = document(layout.join("blobs").join(digest.replacen(':', "/", 1)));
    let layers = manifest["layers"].as_array().unwrap();
    (digest, layers.iter().map(|it| it["digest"].as_str().unwrap().to_owned()).collect())
}
