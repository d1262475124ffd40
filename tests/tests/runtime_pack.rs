//! pack_diff over the real daemons: a sandbox that is started from the result shows what the packed one
//! showed, entry by entry.

#![allow(clippy::unwrap_used)]

mod runtime_world;

use anyhow::{Context, Result, ensure};
use builder::publish::ImagesPublisher;
use builder::{BuildOptions, Silent, Source};
use layer::layer_file::LayerFile;
use layer::manifest::LayerKind;
use layer::{Digest, LayerId};
use proto::v1::layer_fs_client::LayerFsClient;
use proto::v1::sandboxes_client::SandboxesClient;
use proto::v1::*;
use runtime_world::Client;
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use store::Store;
use tonic::transport::Channel;

#[derive(Debug)]
struct StoreLayers(Arc<Store>);

impl runtime::LayerFiles for StoreLayers {
    fn layer_file(&self, layer: &LayerId) -> layer::Result<LayerFile> {
        self.0.read_layer(layer)
    }
}

/// Image daemon, file system daemon, runtime.
struct Stack {
    /// For its image and for the removal of groups.
    world: runtime_world::World,
    fsd: Child,
    layerfs: Channel,
    images: Channel,
    service: runtime::Service,
    client: Client,
}

impl Stack {
    async fn start() -> Result<Self> {
        let world = runtime_world::World::new()?;
        let data = world.data();
        std::fs::create_dir_all(data.join("store"))?;
        let url = format!("file://{}", data.join("store").display());
        let store = Arc::new(Store::open(store::open(&url)?)?);
        let images = imaged::Service::open(imaged::ImagedConfig {
            store: Arc::clone(&store),
            catalog_dir: data.join("catalog"),
        })?;
        let images = proto::connect::in_process(images.routes()).await?;
        let fsd = Command::new(env!("CARGO_BIN_EXE_fsd-process"))
            .args(["fsd", "--store", &url, "--data"])
            .arg(&data)
            .stdin(Stdio::null())
            .stderr(std::fs::File::create(data.join("fsd.log"))?)
            .spawn()?;
        let socket = data.join("run/fsd.sock");
        let deadline = Instant::now() + Duration::from_secs(60);
        let layerfs = loop {
            match proto::connect::unix(&socket).await {
                Ok(channel) => break channel,
                Err(error) if Instant::now() > deadline => return Err(error.into()),
                Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        };
        let mut config = runtime::RuntimeConfig::new(data, images.clone(), layerfs.clone());
        config.layer_files = Some(Arc::new(StoreLayers(store)));
        let service = runtime::Service::open(config).await?;
        let channel = proto::connect::in_process(service.routes()).await?;
        let client = Client { inner: SandboxesClient::new(channel) };
        Ok(Self { world, fsd, layerfs, images, service, client })
    }

    /// Publishes the busybox folder as `env/busybox:1`.
    async fn publish(&self) -> Result<()> {
        let (images, image) = (self.images.clone(), self.world.image());
        let env_id = tokio::task::spawn_blocking(move || {
            let handle = tokio::runtime::Handle::current();
            let publisher = ImagesPublisher::open(handle, images, "test")?;
            let source = Source::parse(&image.display().to_string())?;
            let options = BuildOptions::new(LayerKind::Base);
            let built = builder::build(&source, &publisher, &options, &Silent)?;
            let config = runtime_world::World::config();
            builder::publish_environment(built.layer_ids(), config, &publisher)
        })
        .await??;
        let tag = TagRequest {
            reference: "env/busybox:1".into(),
            target: Some(tag_request::Target::EnvId(env_id.as_bytes().to_vec())),
            ..TagRequest::default()
        };
        images_client::ImagesClient::new(self.images.clone()).tag(tag).await?;
        Ok(())
    }

    async fn idle(&self, environment: &str) -> Result<Sandbox> {
        let environment = environment.to_owned();
        self.client.create(CreateRequest { environment, ..CreateRequest::default() }).await
    }

    async fn pack(&self, id: &str, name: &str) -> Result<PackDiffResponse> {
        let request =
            PackDiffRequest { id: id.into(), name: name.into(), ..PackDiffRequest::default() };
        let packed = self.client.inner.clone().pack_diff(request).await;
        Ok(packed.map_err(proto::status::from_status)?.into_inner())
    }

    async fn finish(mut self) -> Result<()> {
        self.service.stop_all().await;
        self.service.close().await;
        LayerFsClient::new(self.layerfs.clone()).drain(DrainRequest { force: false }).await?;
        let ended = self.fsd.wait()?;
        ensure!(ended.success(), "fsd ended: {ended}");
        ensure!(self.world.groups().is_empty(), "groups are left");
        let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
        let data = self.world.data().display().to_string();
        ensure!(!mounts.contains(&data), "mounts are left");
        Ok(())
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        let data = self.world.data();
        for pid in self.world.processes() {
            let _ = Command::new("kill").args(["-9", &pid.to_string()]).status();
        }
        for entry in sys::mount::read_mounts().unwrap_or_default().iter().rev() {
            if entry.mount_point.starts_with(&data) {
                let _ = sys::mount::unmount(&entry.mount_point, sys::mount::Unmount::Lazy);
            }
        }
        let _ = self.fsd.kill();
        let _ = self.fsd.wait();
        for index in 0..fsd::KEEPERS {
            let lock = data.join(format!("run/keeper-{index}.lock"));
            let pid = std::fs::read_to_string(lock).unwrap_or_default().trim().to_owned();
            let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            if String::from_utf8_lossy(&command).contains("keeper") {
                let _ = Command::new("kill").args(["-9", &pid]).status();
            }
        }
        for _ in 0..400 {
            if fsd::keeper::groups_of(&data).is_empty() {
                break;
            }
            fsd::keeper::remove_empty_groups();
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }
}

/// The id as the sandbox knows it: each has 65,536 of the host's, from a multiple of that on.
fn seen_inside(id: u32) -> u32 {
    id % 65_536
}

/// All that a sandbox can see of an entry.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    mode: u32,
    owner: (u32, u32),
    rdev: u64,
    mtime: (i64, i64),
    target: Option<PathBuf>,
    content: Option<(u64, Digest)>,
    xattrs: Vec<(Vec<u8>, Option<Vec<u8>>)>,
}

/// Every entry of the sandbox's own file system, by path. The root's own times are those of its making.
fn view(sandbox: &Sandbox) -> Result<BTreeMap<PathBuf, Seen>> {
    fn walk(
        path: &Path,
        root: &Path,
        device: u64,
        all: &mut BTreeMap<PathBuf, Seen>,
    ) -> Result<()> {
        for entry in std::fs::read_dir(path)? {
            let path = entry?.path();
            let stat = path.symlink_metadata()?;
            let given = ["etc/hosts", "etc/hostname", "etc/resolv.conf"];
            let is_given = given.iter().any(|name| path == root.join(name));
            if is_given || stat.is_dir() && stat.dev() != device {
                continue;
            }
            let kind = stat.file_type();
            let mut names = sys::file::xattr::list(&path).unwrap_or_default();
            names.retain(|name| !kind.is_symlink() && !name.starts_with(b"trusted.overlay"));
            names.sort();
            let xattrs = names.into_iter().map(|name| {
                let value = sys::file::xattr::get(&path, &name).unwrap_or_default();
                (name, value)
            });
            let content = if kind.is_file() {
                Some((stat.size(), Digest::of(&std::fs::read(&path)?)))
            } else {
                None
            };
            let seen = Seen {
                mode: stat.mode(),
                owner: (seen_inside(stat.uid()), seen_inside(stat.gid())),
                rdev: stat.rdev(),
                mtime: (stat.mtime(), stat.mtime_nsec()),
                target: if kind.is_symlink() { Some(std::fs::read_link(&path)?) } else { None },
                content,
                xattrs: xattrs.collect(),
            };
            all.insert(path.strip_prefix(root)?.to_owned(), seen);
            if kind.is_dir() {
                walk(&path, root, device, all)?;
            }
        }
        Ok(())
    }
    let root = PathBuf::from(format!("/proc/{}/root", sandbox.init_pid));
    let device = std::fs::metadata(root.join("."))?.dev();
    let mut all = BTreeMap::new();
    walk(&root, &root, device, &mut all)?;
    Ok(all)
}

fn assert_same(left: &BTreeMap<PathBuf, Seen>, right: &BTreeMap<PathBuf, Seen>) {
    for path in left.keys().chain(right.keys()) {
        assert_eq!(left.get(path), right.get(path), "{}", path.display());
    }
}

const CHANGES: &str = "
    rm /etc/group; rm -r /home/ann; mkdir /home/ann; echo new > /home/ann/new;
    mkdir -p /srv/deep/er; echo one > /srv/deep/one; ln /srv/deep/one /srv/deep/two;
    ln -s ../deep/one /srv/deep/er/link; mkfifo /srv/fifo; mknod /srv/console c 5 1;
    chmod 4711 /srv/deep/one; chown 1000:77 /srv/deep/er; touch -d '1999-01-02 03:04:05' /srv/deep;
    echo changed >> /etc/passwd; chmod 700 /root; echo secret > /root/.ash_history;
    dd if=/dev/zero of=/srv/sparse bs=1 count=1 seek=10000000 2>/dev/null;
    echo 'name with
newline' > '/srv/odd
name'; mv /usr/share/old /usr/share/renamed; rm /usr/share/renamed/b";

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_sandbox_from_the_diff_shows_what_the_packed_one_showed() -> Result<()> {
    let stack = Stack::start().await?;
    let old = stack.world.image().join("usr/share/old");
    std::fs::create_dir_all(&old)?;
    for name in ["a", "b", "c"] {
        std::fs::write(old.join(name), name.repeat(100_000))?;
    }
    stack.publish().await?;
    let first = stack.idle("env/busybox:1").await?;
    stack.client.shell(&first.id, CHANGES).await?;
    let file = format!("/proc/{}/root/srv/deep/two", first.init_pid);
    let mode = sys::file::xattr::SetMode::Any;
    sys::file::xattr::set(Path::new(&file), b"user.mark", b"\x00\xff", mode)?;
    let packed = stack.pack(&first.id, "work:1").await?;
    assert!(packed.frozen_us > 0 && packed.files > 0);
    // It goes on, and its history is not in the layer.
    stack.client.shell(&first.id, "rm /root/.ash_history; echo on").await?;
    let second = stack.idle("env/work:1").await?;
    assert_eq!(second.layer_ids.len(), 2);
    let (left, right) = (view(&first)?, view(&second)?);
    assert!(right.contains_key(Path::new("usr/share/renamed/a")));
    let mut left = left;
    let mut right = right;
    // Removing the history changed the folder's time, and only that.
    let times = [left.remove(Path::new("root")), right.remove(Path::new("root"))];
    assert_eq!(times[0].as_ref().map(|seen| seen.mode), times[1].as_ref().map(|seen| seen.mode));
    assert_same(&left, &right);
    let links = stack.client.shell(&second.id, "stat -c %h /srv/deep/one").await?;
    assert_eq!(links, "2\n", "hard links stay links");
    let env = stack.client.shell(&second.id, "echo $IMAGE").await?;
    assert_eq!(env, "busybox\n", "the configuration goes along");
    // On top of the diff again.
    stack.client.shell(&second.id, "rm -r /srv/deep; echo more > /more").await?;
    stack.pack(&second.id, "work:2").await?;
    let third = stack.idle("env/work:2").await?;
    assert_eq!(third.layer_ids.len(), 3);
    assert_same(&view(&second)?, &view(&third)?);
    stack.finish().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_pack_that_fails_or_is_left_lets_the_sandbox_go_on() -> Result<()> {
    let stack = Stack::start().await?;
    stack.publish().await?;
    let id = stack.idle("env/busybox:1").await?.id;
    assert!(stack.pack(&id, "not a name").await.is_err());
    stack.client.shell(&id, "head -c 30000000 /dev/urandom > /srv-big").await?;
    for wait in [0, 5, 30, 100] {
        let pack = stack.pack(&id, "left:1");
        let _left = tokio::time::timeout(Duration::from_millis(wait), pack).await;
        assert_eq!(stack.client.shell(&id, "echo on").await?, "on\n");
    }
    let packed = stack.pack(&id, "left:1").await?;
    assert!(packed.plain_bytes >= 30_000_000);
    stack.client.inner.clone().pause(PauseRequest { id: id.clone() }).await?;
    stack.pack(&id, "left:2").await.context("a paused sandbox packs too")?;
    assert_eq!(stack.client.get(&id).await?.state(), State::Paused);
    stack.client.stop(&id).await?;
    assert!(stack.pack(&id, "left:3").await.is_err());
    stack.finish().await
}
