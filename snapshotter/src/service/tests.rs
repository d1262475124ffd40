//! What containerd expects of every snapshotter, over the wire and with real mounts. No node is there: snapshots of
//! directories need none.

use super::*;
use crate::api::snapshots::v1 as wire;
use prost_types::FieldMask;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;
use tonic::Code;
use wire::snapshots_client::SnapshotsClient;

struct World {
    dir: TempDir,
    service: Service,
    client: SnapshotsClient<Channel>,
}

impl World {
    async fn new() -> Self {
        let dir = tempfile::Builder::new().prefix("snapshots-").tempdir_in("/var/tmp").unwrap();
        let (service, client) = Self::open(dir.path()).await;
        Self { dir, service, client }
    }

    async fn open(dir: &Path) -> (Service, SnapshotsClient<Channel>) {
        let nobody = proto::connect::unix_lazy(&dir.join("nobody.sock"));
        let config = Config { root: dir.join("root"), layerfs: nobody.clone(), images: nobody };
        let service = Service::open(config).await.unwrap();
        let channel = proto::connect::in_process(service.routes()).await.unwrap();
        (service, SnapshotsClient::new(channel))
    }

    /// The same after the process that served it died.
    async fn again(self) -> Self {
        let Self { dir, service, client } = self;
        drop((service, client));
        // The channel's server ends in its own time, and with it the lock.
        for _ in 0..500 {
            if folders::lock(&dir.path().join("root")).is_ok() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let (service, client) = Self::open(dir.path()).await;
        Self { dir, service, client }
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("root")
    }

    async fn prepare(&self, key: &str, parent: &str) -> Result<Vec<Mount>, Code> {
        self.prepare_with(key, parent, &[]).await
    }

    async fn prepare_with(
        &self,
        key: &str,
        parent: &str,
        labels: &[(&str, &str)],
    ) -> Result<Vec<Mount>, Code> {
        let labels = labels.iter().map(|&(name, value)| (name.into(), value.into())).collect();
        let (key, parent) = (key.to_owned(), parent.to_owned());
        let request = wire::PrepareSnapshotRequest { snapshotter: "x".into(), key, parent, labels };
        let answer = self.client.clone().prepare(request).await;
        answer.map(|it| it.into_inner().mounts).map_err(|status| status.code())
    }

    async fn view(&self, key: &str, parent: &str) -> Result<Vec<Mount>, Code> {
        let (key, parent) = (key.to_owned(), parent.to_owned());
        let request = wire::ViewSnapshotRequest { key, parent, ..Default::default() };
        let answer = self.client.clone().view(request).await;
        answer.map(|it| it.into_inner().mounts).map_err(|status| status.code())
    }

    async fn mounts(&self, key: &str) -> Result<Vec<Mount>, Code> {
        let request = wire::MountsRequest { key: key.to_owned(), ..Default::default() };
        let answer = self.client.clone().mounts(request).await;
        answer.map(|it| it.into_inner().mounts).map_err(|status| status.code())
    }

    async fn commit(&self, name: &str, key: &str) -> Result<(), Code> {
        let (name, key) = (name.to_owned(), key.to_owned());
        let labels = HashMap::from([("of".to_owned(), "commit".to_owned())]);
        let request = wire::CommitSnapshotRequest { name, key, labels, ..Default::default() };
        self.client.clone().commit(request).await.map(drop).map_err(|status| status.code())
    }

    async fn remove(&self, key: &str) -> Result<(), Code> {
        let request = wire::RemoveSnapshotRequest { key: key.to_owned(), ..Default::default() };
        self.client.clone().remove(request).await.map(drop).map_err(|status| status.code())
    }

    async fn stat(&self, key: &str) -> Result<wire::Info, Code> {
        let request = wire::StatSnapshotRequest { key: key.to_owned(), ..Default::default() };
        let answer = self.client.clone().stat(request).await;
        answer.map(|it| it.into_inner().info.unwrap()).map_err(|status| status.code())
    }

    async fn update(&self, info: wire::Info, paths: &[&str]) -> Result<wire::Info, Code> {
        let paths = paths.iter().map(|&path| path.to_owned()).collect();
        let update_mask = Some(FieldMask { paths });
        let request =
            wire::UpdateSnapshotRequest { info: Some(info), update_mask, ..Default::default() };
        let answer = self.client.clone().update(request).await;
        answer.map(|it| it.into_inner().info.unwrap()).map_err(|status| status.code())
    }

    async fn list(&self, filters: &[&str]) -> Result<Vec<String>, Code> {
        let filters = filters.iter().map(|&filter| filter.to_owned()).collect();
        let request = wire::ListSnapshotsRequest { filters, ..Default::default() };
        let listed = self.client.clone().list(request).await.map_err(|status| status.code())?;
        let (mut listed, mut names) = (listed.into_inner(), Vec::new());
        while let Some(part) = listed.message().await.unwrap() {
            names.extend(part.info.into_iter().map(|info| info.name));
        }
        Ok(names)
    }

    async fn usage(&self, key: &str) -> Result<(i64, i64), Code> {
        let request = wire::UsageRequest { key: key.to_owned(), ..Default::default() };
        let answer = self.client.clone().usage(request).await.map_err(|status| status.code())?;
        Ok((answer.get_ref().size, answer.get_ref().inodes))
    }

    /// A committed snapshot with one file more than its parent.
    async fn layer(&self, name: &str, parent: &str, file: &str) {
        let key = format!("extract {name}");
        let mounts = self.prepare(&key, parent).await.unwrap();
        let at = self.mounted(&mounts);
        fs::write(at.path.join(file), name).unwrap();
        drop(at);
        self.commit(name, &key).await.unwrap();
    }

    /// Mounts as containerd does.
    fn mounted(&self, mounts: &[Mount]) -> Mounted {
        let [mount] = mounts else { panic!("{mounts:?}") };
        let path = tempfile::Builder::new().tempdir_in(self.dir.path()).unwrap().keep();
        let options = mount.options.join(",");
        let mut command = Command::new("mount");
        // Names relative to the links' directory, as containerd writes them where they are too long.
        let links = format!("{}/l/", self.root().display());
        let options = options.replace(&links, "");
        command.current_dir(self.root().join("l"));
        match mount.r#type.as_str() {
            "bind" => command.args(["--bind", "-o", &options]),
            kind => command.args(["-i", "-t", kind, "-o", &options]),
        };
        let done = command.arg(&mount.source).arg(&path).output().unwrap();
        assert!(done.status.success(), "{options}: {}", String::from_utf8_lossy(&done.stderr));
        Mounted { path }
    }
}

struct Mounted {
    path: PathBuf,
}

impl Drop for Mounted {
    fn drop(&mut self) {
        _ = sys::mount::unmount(&self.path, sys::mount::Unmount::Lazy);
        _ = fs::remove_dir(&self.path);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn layers_stand_on_layers() {
    let world = World::new().await;
    world.layer("one", "", "a").await;
    world.layer("two", "one", "b").await;
    let found = world.stat("two").await.unwrap();
    assert_eq!((found.parent.as_str(), found.kind()), ("one", wire::Kind::Committed));
    // A commit replaces labels.
    assert_eq!(found.labels, HashMap::from([("of".to_owned(), "commit".to_owned())]));
    assert_eq!(world.stat("extract two").await, Err(Code::NotFound));

    let mounts = world.prepare("container", "two").await.unwrap();
    assert_eq!(world.mounts("container").await.unwrap(), mounts);
    let at = world.mounted(&mounts);
    assert_eq!(fs::read_to_string(at.path.join("a")).unwrap(), "one");
    fs::remove_file(at.path.join("a")).unwrap();
    fs::rename(at.path.join("b"), at.path.join("c")).unwrap();
    let names = |at: &Mounted| -> Vec<String> {
        let entries = fs::read_dir(&at.path).unwrap();
        entries.map(|it| it.unwrap().file_name().into_string().unwrap()).collect()
    };
    assert_eq!(names(&at), ["c"]);
    drop(at);
    world.commit("three", "container").await.unwrap();
    // What is shown is what was committed, also with one layer alone, and it stays so.
    let view = world.view("look", "three").await.unwrap();
    let at = world.mounted(&view);
    assert_eq!(names(&at), ["c"]);
    let error = fs::write(at.path.join("d"), "").unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    drop(at);
    let at = world.mounted(&world.view("look at one", "one").await.unwrap());
    assert_eq!(names(&at), ["a"]);
    assert!(fs::write(at.path.join("d"), "").is_err());
    assert_eq!(world.stat("look").await.unwrap().kind(), wire::Kind::View);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_containerd_refuses_is_refused() {
    let world = World::new().await;
    world.layer("one", "", "a").await;
    world.prepare("active", "one").await.unwrap();
    world.view("view", "one").await.unwrap();
    for key in ["active", "view", "one"] {
        assert_eq!(world.prepare(key, "").await, Err(Code::AlreadyExists), "{key}");
        assert_eq!(world.view(key, "one").await, Err(Code::AlreadyExists), "{key}");
    }
    assert_eq!(world.prepare("x", "active").await, Err(Code::InvalidArgument));
    assert_eq!(world.view("x", "view").await, Err(Code::InvalidArgument));
    assert_eq!(world.prepare("x", "nobody").await, Err(Code::NotFound));
    assert_eq!(world.prepare("", "").await, Err(Code::InvalidArgument));
    assert_eq!(world.commit("", "active").await, Err(Code::InvalidArgument));
    assert_eq!(world.commit("one", "active").await, Err(Code::AlreadyExists));
    assert_eq!(world.commit("x", "view").await, Err(Code::FailedPrecondition));
    assert_eq!(world.commit("x", "one").await, Err(Code::FailedPrecondition));
    assert_eq!(world.commit("x", "nobody").await, Err(Code::NotFound));
    assert_eq!(world.remove("one").await, Err(Code::FailedPrecondition));
    assert_eq!(world.mounts("one").await, Err(Code::FailedPrecondition));
    for done in [
        world.remove("nobody").await.err(),
        world.mounts("nobody").await.err(),
        world.stat("nobody").await.err(),
        world.usage("nobody").await.err(),
    ] {
        assert_eq!(done, Some(Code::NotFound));
    }
    assert_eq!(world.list(&["name=="]).await, Err(Code::InvalidArgument));
    let long = [("a", "x".repeat(5000))];
    let long: Vec<(&str, &str)> =
        long.iter().map(|(name, value)| (*name, value.as_str())).collect();
    assert_eq!(world.prepare_with("x", "", &long).await, Err(Code::InvalidArgument));
    // Nobody can be asked whether this layer is known.
    let target = [(TARGET, "sha256:00")];
    assert_eq!(world.prepare_with("x", "", &target).await, Err(Code::Unavailable));
    world.remove("view").await.unwrap();
    world.remove("active").await.unwrap();
    world.remove("one").await.unwrap();
    assert!(world.list(&[]).await.unwrap().is_empty());
    assert_eq!(fs::read_dir(world.root().join("snapshots")).unwrap().count(), 0);
    assert_eq!(fs::read_dir(world.root().join("l")).unwrap().count(), 0);
    assert_eq!(fs::read_dir(world.root().join("records")).unwrap().count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn names_are_names_and_never_paths() {
    let world = World::new().await;
    let hostile = [
        "../../../etc/passwd",
        "/",
        ".",
        "a,lowerdir=/etc",
        "a:b\\:c",
        "line\nbreak\0zero",
        "\u{202e}\u{1b}[31m",
        &"x".repeat(4096 - "extract ".len()),
    ];
    let mut parent = String::new();
    for name in hostile {
        world.layer(name, &parent, "file").await;
        assert_eq!(world.stat(name).await.unwrap().parent, parent);
        parent = name.to_owned();
    }
    let at = world.mounted(&world.prepare("top", &parent).await.unwrap());
    assert_eq!(fs::read_to_string(at.path.join("file")).unwrap(), parent);
    drop(at);
    assert_eq!(world.prepare(&"x".repeat(4097), "").await, Err(Code::InvalidArgument));
    let world = world.again().await;
    assert_eq!(world.list(&[]).await.unwrap().len(), hostile.len() + 1);
    let numbers = fs::read_dir(world.root().join("snapshots")).unwrap();
    for entry in numbers {
        entry.unwrap().file_name().to_str().unwrap().parse::<u64>().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn labels_change_by_their_paths() {
    let world = World::new().await;
    world.prepare_with("a", "", &[("one", "1"), ("two", "2")]).await.unwrap();
    let before = world.stat("a").await.unwrap();
    let labels = |pairs: &[(&str, &str)]| -> HashMap<String, String> {
        pairs.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect()
    };
    let info = |pairs| wire::Info { name: "a".into(), labels: labels(pairs), ..Default::default() };
    let one = info(&[("one", "new"), ("two", "ignored"), ("dotted.name/x", "3")]);
    let updated = world.update(one, &["labels.one", "labels.dotted.name/x"]).await.unwrap();
    assert_eq!(updated.labels, labels(&[("one", "new"), ("two", "2"), ("dotted.name/x", "3")]));
    assert_eq!(updated.created_at, before.created_at);
    assert_ne!(updated.updated_at, before.updated_at);
    // One without a value goes.
    let updated = world.update(info(&[]), &["labels.one"]).await.unwrap();
    assert_eq!(updated.labels, labels(&[("two", "2"), ("dotted.name/x", "3")]));
    let updated = world.update(info(&[("all", "4")]), &["labels"]).await.unwrap();
    assert_eq!(updated.labels, labels(&[("all", "4")]));
    let updated = world.update(info(&[("all", "5")]), &[]).await.unwrap();
    assert_eq!(updated.labels, labels(&[("all", "5")]));
    for path in ["parent", "name", "kind", "created_at"] {
        let done = world.update(info(&[]), &[path]).await;
        assert_eq!(done, Err(Code::InvalidArgument), "{path}");
    }
    let nobody = wire::Info { name: "nobody".into(), ..Default::default() };
    assert_eq!(world.update(nobody, &[]).await, Err(Code::NotFound));
    let world = world.again().await;
    assert_eq!(world.stat("a").await.unwrap().labels, labels(&[("all", "5")]));
}

#[tokio::test(flavor = "multi_thread")]
async fn usage_is_what_a_snapshot_adds() {
    let world = World::new().await;
    let at = world.mounted(&world.prepare("a", "").await.unwrap());
    let (empty, inodes) = world.usage("a").await.unwrap();
    assert_eq!(inodes, 1);
    fs::write(at.path.join("large"), vec![1; 1 << 20]).unwrap();
    fs::hard_link(at.path.join("large"), at.path.join("again")).unwrap();
    rustix::fs::sync();
    let (bytes, inodes) = world.usage("a").await.unwrap();
    assert_eq!(inodes, 2);
    assert!((1 << 20..1 << 21).contains(&(bytes - empty)), "{bytes} {empty}");
    drop(at);
    world.commit("one", "a").await.unwrap();
    assert_eq!(world.usage("one").await.unwrap(), (bytes, inodes));
    world.prepare("b", "one").await.unwrap();
    assert!(world.usage("b").await.unwrap().0 < 1 << 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_root_of_a_snapshot_is_like_the_one_below() {
    let world = World::new().await;
    let at = world.mounted(&world.prepare("a", "").await.unwrap());
    assert_eq!(fs::metadata(&at.path).unwrap().mode() & 0o7777, 0o755);
    fs::set_permissions(&at.path, fs::Permissions::from_mode(0o1711)).unwrap();
    std::os::unix::fs::chown(&at.path, Some(12), Some(34)).unwrap();
    drop(at);
    world.commit("one", "a").await.unwrap();
    let at = world.mounted(&world.prepare("b", "one").await.unwrap());
    let root = fs::metadata(&at.path).unwrap();
    assert_eq!((root.mode() & 0o7777, root.uid(), root.gid()), (0o1711, 12, 34));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stack_of_128_layers_mounts() {
    let world = World::new().await;
    let mut parent = String::new();
    for at in 0..128 {
        let name = format!("layer {at}");
        // By hand, since it is the number that counts.
        let key = format!("extract {at}");
        world.prepare(&key, &parent).await.unwrap();
        let id = world.service.state().get(&key).unwrap().id;
        fs::write(world.service.0.folders.upper(id).join(format!("{at}")), "").unwrap();
        world.service.state().commit(&key, &name, Labels::new(), Usage::default()).unwrap();
        parent = name;
    }
    let at = world.mounted(&world.prepare("top", &parent).await.unwrap());
    assert_eq!(fs::read_dir(&at.path).unwrap().count(), 128);
    assert_eq!(world.list(&[]).await.unwrap().len(), 129);
    let filters = ["kind==active", "name==\"layer 7\""];
    assert_eq!(world.list(&filters).await.unwrap(), ["layer 7", "top"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_removes_what_a_crash_left() {
    let world = World::new().await;
    world.layer("one", "", "a").await;
    world.prepare("active", "one").await.unwrap();
    let at = world.mounted(&world.mounts("active").await.unwrap());
    fs::write(at.path.join("written"), "kept").unwrap();
    drop(at);
    let root = world.root();
    // Between directory and record; between record and directory; in the middle of a record and of a link.
    fs::create_dir_all(root.join("snapshots/77/fs/deep")).unwrap();
    std::os::unix::fs::symlink("/nowhere", root.join("l/78")).unwrap();
    std::os::unix::fs::symlink("/nowhere", root.join("l/1.new")).unwrap();
    fs::write(root.join("records/79.new"), "{\"id\":").unwrap();
    let busy = Service::open(Config {
        root: root.clone(),
        layerfs: proto::connect::unix_lazy(Path::new("/nowhere")),
        images: proto::connect::unix_lazy(Path::new("/nowhere")),
    });
    assert_eq!(busy.await.unwrap_err().kind(), ErrorKind::Busy);
    let world = world.again().await;
    let count = |name: &str| fs::read_dir(root.join(name)).unwrap().count();
    assert_eq!((count("snapshots"), count("l"), count("records")), (2, 2, 2));
    let at = world.mounted(&world.mounts("active").await.unwrap());
    assert_eq!(fs::read_to_string(at.path.join("written")).unwrap(), "kept");
    drop(at);
    // Numbers go on.
    world.prepare("next", "one").await.unwrap();
    assert!(world.service.state().get("next").unwrap().id > 77);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_root_that_options_cannot_hold_is_refused() {
    let nobody = || proto::connect::unix_lazy(Path::new("/nowhere"));
    let dir = tempfile::tempdir().unwrap();
    for name in ["a:b", "a,b", "a\\b", "a\"b"] {
        let config = Config { root: dir.path().join(name), layerfs: nobody(), images: nobody() };
        let error = Service::open(config).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{name}");
    }
}
