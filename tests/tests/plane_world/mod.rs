//! A tree on ext4, the layer that was built from it, and that layer mounted by one plane.
#![allow(dead_code)]

pub mod content;
pub mod files;
pub mod folders;
pub mod moving;
pub mod overlay;
mod plant;
pub mod refusals;
pub mod rights;
pub mod stacked;

use crate::fsd_world::{LayerShape, World};
use builder::publish::ImagesPublisher;
use builder::{BuildOptions, Silent, Source, build};
use fsd::PlaneKind;
use layer::LayerId;
use layer::manifest::LayerKind;
use std::fmt::{Debug, Display};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use store::Store;
use sys::mount::{Attributes, Recursive, Unmount};
use sys::probe::skip_test;

/// What the reference is mounted with: the same as a layer.
const LIKE_A_LAYER: Attributes = Attributes::LAYER;

/// Whose code in the kernel shows a plane's files. The two differ from ext4, and from each other, in what
/// is told here and in nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shown {
    /// Opens with `O_DIRECT` and `fsync` are EINVAL; `statx` knows no time of access.
    ByErofs,
    /// `O_DIRECT` reads right bytes past the page cache.
    ByFuse,
}

/// Both trees. Everybody may enter the folders above them, as other users must.
pub struct View {
    pub kind: PlaneKind,
    pub shown: Shown,
    /// The tree on ext4, mounted read-only.
    pub reference: PathBuf,
    /// The layer.
    pub mounted: PathBuf,
    /// An empty folder on ext4.
    pub scratch: PathBuf,
    pub layer: LayerId,
    pub store: Arc<Store>,
    pub world: World,
    mounts: Vec<PathBuf>,
    _folder: tempfile::TempDir,
}

impl View {
    /// Builds and mounts; `None` where this host lacks what the plane needs.
    pub fn new(kind: PlaneKind, shown: Shown) -> Option<Self> {
        let folder = tempfile::Builder::new().prefix("lamella-planes-").tempdir().unwrap();
        if skip_test(&format!("plane {kind}"), folder.path(), kind.needs()) {
            return None;
        }
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let path = |name: &str| {
            let path = folder.path().join(name);
            std::fs::create_dir(&path).unwrap();
            path
        };
        let (tree, reference, mounted) = (path("tree"), path("reference"), path("mounted"));
        let scratch = path("scratch");
        plant::plant(&tree);
        let small = LayerShape { files: 1, max_file_bytes: 10, ..LayerShape::default() };
        let mut world = World::new(&small).unwrap();
        let store_url = format!("file://{}", world.store_folder.display());
        let store = Arc::new(Store::open(store::open(&store_url).unwrap()).unwrap());
        let layer = publish(&store, &folder.path().join("catalog"), &tree);
        world.layer.id = layer;
        world.start().unwrap();
        let mut view = Self {
            kind,
            shown,
            reference,
            mounted,
            scratch,
            layer,
            store,
            world,
            mounts: Vec::new(),
            _folder: folder,
        };
        let at = view.attach("view", layer);
        view.bind(&tree, &view.reference.clone());
        view.bind(&at, &view.mounted.clone());
        Some(view)
    }

    /// Attaches a layer by this plane.
    pub fn attach(&self, holder: &str, layer: LayerId) -> PathBuf {
        if !self.kind.serves_every_layer() {
            self.store.put_space(&layer).unwrap();
        }
        let attached = self.world.attach_layer(holder, layer, self.kind.to_proto()).unwrap();
        assert_eq!(attached.plane(), self.kind.to_proto());
        attached.mount_path.into()
    }

    fn bind(&mut self, what: &Path, at: &Path) {
        sys::mount::bind(what, at, LIKE_A_LAYER, Recursive::No).unwrap();
        self.mounts.push(at.to_owned());
    }

    /// Asks both trees the same and compares the answers, errors by their numbers.
    #[track_caller]
    pub fn same<T: PartialEq + Debug>(
        &self,
        what: impl Display,
        ask: impl Fn(&Path) -> io::Result<T>,
    ) {
        let wanted = ask(&self.reference).map_err(|error| errno(&error));
        let got = ask(&self.mounted).map_err(|error| errno(&error));
        if wanted == got {
            return;
        }
        let (wanted, got) = (format!("{wanted:?}"), format!("{got:?}"));
        let same = wanted.bytes().zip(got.bytes()).take_while(|(one, other)| one == other).count();
        let kind = self.kind;
        panic!("{what}: ext4 gives {}, {kind} gives {}", around(&wanted, same), around(&got, same));
    }

    /// Paths of everything in the tree, without the root, in order.
    pub fn paths(&self) -> Vec<PathBuf> {
        let mut paths = Vec::new();
        let mut open = vec![PathBuf::new()];
        while let Some(folder) = open.pop() {
            for entry in std::fs::read_dir(self.reference.join(&folder)).unwrap() {
                let entry = entry.unwrap();
                let path = folder.join(entry.file_name());
                if entry.file_type().unwrap().is_dir() {
                    open.push(path.clone());
                }
                paths.push(path);
            }
        }
        paths.sort();
        paths
    }

    /// Paths of all regular files.
    pub fn files(&self) -> Vec<PathBuf> {
        let mut paths = self.paths();
        paths
            .retain(|path| std::fs::symlink_metadata(self.reference.join(path)).unwrap().is_file());
        paths
    }
}

impl Drop for View {
    fn drop(&mut self) {
        for at in self.mounts.drain(..).rev() {
            let _ = sys::mount::unmount(&at, Unmount::Lazy);
        }
        self.world.end();
    }
}

/// Builds a layer of a folder into a store.
pub fn publish(store: &Arc<Store>, catalog: &Path, tree: &Path) -> LayerId {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let config = imaged::ImagedConfig { store: Arc::clone(store), catalog_dir: catalog.to_owned() };
    let service = imaged::Service::open(config).unwrap();
    let channel = runtime.block_on(proto::connect::in_process(service.routes())).unwrap();
    let publisher = ImagesPublisher::open(runtime.handle().clone(), channel, "planes").unwrap();
    let source = Source::parse(tree.to_str().unwrap()).unwrap();
    let options = BuildOptions { threads: 2, ..BuildOptions::new(LayerKind::Workspace) };
    build(&source, &publisher, &options, &Silent).unwrap().layer_id()
}

/// The number of an error, which is what a program sees.
pub fn errno(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or_else(|| panic!("an error of our own: {error}"))
}

/// What is written before and after a place.
fn around(text: &str, place: usize) -> String {
    let bytes = &text.as_bytes()[place.saturating_sub(200)..text.len().min(place + 200)];
    String::from_utf8_lossy(bytes).into_owned()
}
