//! From an index to a published layer: the pipeline, and the library's entry points.
//!
//! CRASH: nothing is visible before `commit_layer`; whatever dies earlier leaves only chunks that no
//! layer names, which the image daemon collects, and unnamed spool files, which the kernel frees.

use crate::content::Content;
use crate::digest::{Reading, digest_all};
use crate::encode::{Encoder, Totals};
use crate::git::{GitRefresh, Refresh};
use crate::index::{Index, NodeIx, NodeKind, foreign_whiteout};
use crate::layout;
use crate::options::BuildOptions;
use crate::path;
use crate::plan::{Plan, PlannedChunk, plan};
use crate::progress::{FewNotices, Phase, Progress};
use crate::publish::Publisher;
use crate::source::{Loaded, LoadedLayer, Source};
use layer::chunk::{BLOCK_BYTES, ChunkTable};
use layer::environment::{Environment, RunConfig};
use layer::erofs::writer;
use layer::layer_file::LayerFile;
use layer::manifest::Manifest;
use layer::tree::{Body, FileData, Inode, InodeIx, Kind, OPAQUE_XATTR, Rdev, Tree, Xattr};
use layer::{Context, Digest, EnvId, Error, ErrorKind, LayerId, Result};
use std::collections::BTreeMap;

/// The longest file: its blocks are counted in 32 bits.
const MAX_FILE_BYTES: u64 = u32::MAX as u64 * BLOCK_BYTES as u64;

/// How often chunks are looked for and uploaded again when they, or the publish that kept them, are gone.
const MAX_REPETITIONS: u32 = 2;

/// One layer that was built and committed.
#[derive(Debug, Clone)]
pub struct BuiltLayer {
    /// Its id.
    pub layer_id: LayerId,
    /// Its manifest.
    pub manifest: Manifest,
    /// Chunks that had to be uploaded.
    pub new_chunks: u64,
    /// Their plain bytes.
    pub new_plain_bytes: u64,
    /// Their bytes on the store.
    pub new_stored_bytes: u64,
    /// Plain bytes that needed no upload: known, repeated or zero.
    pub reused_plain_bytes: u64,
    /// What was refreshed in its git indexes.
    pub git: GitRefresh,
}

/// What a build made.
#[derive(Debug, Clone)]
pub struct Built {
    /// The layers, bottom first; at least one.
    pub layers: Vec<BuiltLayer>,
    /// How to run in it, where the source says so.
    pub config: Option<RunConfig>,
    /// The kept documents of the container image that the source is.
    pub image: Option<Digest>,
}

impl Built {
    /// The id of the topmost layer.
    pub fn layer_id(&self) -> LayerId {
        self.top().layer_id
    }

    /// The topmost layer.
    pub fn top(&self) -> &BuiltLayer {
        // INVARIANT: whoever makes a `Built` puts a layer in.
        &self.layers[self.layers.len() - 1]
    }

    /// All ids, bottom first.
    pub fn layer_ids(&self) -> Vec<LayerId> {
        self.layers.iter().map(|layer| layer.layer_id).collect()
    }
}

/// Builds the layers of a source and commits them. Moves no reference and makes no environment.
///
/// Errors name the path they concern: `Invalid` for what no layer can hold, `Corrupt` for broken
/// archives, `Busy` for files that change meanwhile, `NoSpace` for a full spool or store.
pub fn build(
    source: &Source,
    publisher: &dyn Publisher,
    options: &BuildOptions,
    progress: &dyn Progress,
) -> Result<Built> {
    options.chunking.check()?;
    progress.phase(Phase::Index, 0, 0);
    let Loaded { layers, config, documents } = source.load(options, &FewNotices::of(progress))?;
    let mut built = Vec::with_capacity(layers.len());
    for loaded in layers {
        built.push(build_loaded(loaded, publisher, options, progress)?);
    }
    if built.is_empty() {
        return Err(Error::invalid("the source holds no layer"));
    }
    let image = match (&options.originals, documents) {
        (Some(store), Some(documents)) => Some(documents.keep(store)?),
        _ => None,
    };
    Ok(Built { layers: built, config, image })
}

/// Builds one layer of a source, or takes over the finished one.
fn build_loaded(
    loaded: LoadedLayer,
    publisher: &dyn Publisher,
    options: &BuildOptions,
    progress: &dyn Progress,
) -> Result<BuiltLayer> {
    if let Some(file) = loaded.reused {
        return commit_again(&file, publisher);
    }
    let mut options = options.clone();
    options.annotations.extend(loaded.annotations);
    // What goes out as it came must not be changed on its way in.
    options.refresh_git_index &= loaded.original.is_none();
    let built = build_index(&loaded.index, publisher, &options, progress)?;
    if let (Some(original), Some(store)) = (&loaded.original, &options.originals) {
        original.keep(&loaded.index, built.layer_id, store, &options)?;
    }
    Ok(built)
}

/// Names a layer that the store has, so that this publish protects it too.
fn commit_again(file: &LayerFile, publisher: &dyn Publisher) -> Result<BuiltLayer> {
    let layer_id = publisher.commit_layer(&file.encode()?)?;
    Ok(BuiltLayer {
        layer_id,
        manifest: file.manifest.clone(),
        new_chunks: 0,
        new_plain_bytes: 0,
        new_stored_bytes: 0,
        reused_plain_bytes: file.chunk_table.data_bytes(),
        git: GitRefresh::default(),
    })
}

/// Builds one layer of an index and commits it.
pub fn build_index(
    index: &Index,
    publisher: &dyn Publisher,
    options: &BuildOptions,
    progress: &dyn Progress,
) -> Result<BuiltLayer> {
    options.chunking.check()?;
    let nodes = regular_files(index)?;
    let contents: Vec<&Content> = nodes
        .iter()
        .filter_map(|&ix| match &index.node(ix).kind {
            NodeKind::Regular(content) => Some(content),
            _ => None,
        })
        .collect();
    let bytes = contents.iter().map(|content| content.size).sum();
    progress.phase(Phase::Digest, contents.len() as u64, bytes);
    let threads = options.worker_threads();
    let mut git = match options.refresh_git_index {
        true => Refresh::find(index, &nodes, progress)?,
        false => Refresh::default(),
    };
    let reading = Reading {
        contents: &contents,
        origins: &index.origins,
        chunking: &options.chunking,
        blobs: git.wishes(),
        threads,
        cancel: &options.cancel,
    };
    let (mut facts, blobs) = digest_all(&reading, progress)?;
    git.judge(index, &nodes, &blobs);
    git.set_apart(&mut facts);
    let touched = match &options.layout {
        Some(layout) => layout.places(index, &nodes)?,
        None => Vec::new(),
    };
    let order = layout::file_order(&touched, contents.len());
    let mut plan = plan(&contents, &facts, &order, &options.chunking)?;
    let order = layout::chunk_order(&touched, &plan);
    // They hold every inlined byte a second time.
    drop(facts);
    tracing::debug!(files = contents.len(), bytes, chunks = plan.chunks.len(), "planned");
    let described = describe(index, nodes, &mut plan, git)?;
    let mut contents = contents;
    for (file, content) in &described.contents {
        contents[*file] = content;
    }
    let encoder = Encoder {
        plan: &plan,
        order: &order,
        contents: &contents,
        origins: &index.origins,
        publisher,
        level: options.compression_level,
        threads,
        cancel: &options.cancel,
        progress,
    };
    let git = described.git;
    let (file, layer_id, totals) = publish(&encoder, &described.tree, described.metadata, options)?;
    if layer_id != file.id() {
        return Err(Error::new(ErrorKind::Internal, "the store calls the layer by another id"));
    }
    let Totals { new_chunks, new_plain_bytes, new_stored_bytes, reused_plain_bytes } = totals;
    let manifest = file.manifest;
    Ok(BuiltLayer {
        layer_id,
        manifest,
        new_chunks,
        new_plain_bytes,
        new_stored_bytes,
        reused_plain_bytes,
        git,
    })
}

/// Uploads the chunks and names the layer.
fn publish(
    encoder: &Encoder<'_>,
    tree: &Tree,
    mut metadata: Vec<u8>,
    options: &BuildOptions,
) -> Result<(LayerFile, LayerId, Totals)> {
    let Encoder { publisher, progress, .. } = *encoder;
    let mut uploaded = Totals::default();
    let mut repetitions = 0;
    loop {
        let refused = match encode(encoder) {
            Ok((chunk_table, totals)) => {
                options.cancel.check()?;
                progress.phase(Phase::Commit, 0, 0);
                uploaded = uploaded.then(totals);
                let manifest = manifest(tree, &chunk_table, &metadata, options);
                let file = LayerFile { manifest, chunk_table, metadata };
                match publisher.commit_layer(&file.encode()?) {
                    Ok(layer_id) => return Ok((file, layer_id, uploaded)),
                    Err(error) => {
                        metadata = file.metadata;
                        error
                    }
                }
            }
            Err(error) => error,
        };
        if refused.kind() != ErrorKind::NotFound || repetitions == MAX_REPETITIONS {
            return Err(refused);
        }
        repetitions += 1;
        tracing::warn!(error = refused.chain(), "what was uploaded is looked for again");
        publisher.reopen()?;
    }
}

fn encode(encoder: &Encoder<'_>) -> Result<(ChunkTable, Totals)> {
    let space = encoder.plan.chunks.iter().map(PlannedChunk::plain_bytes).sum();
    encoder.progress.phase(Phase::Encode, encoder.contents.len() as u64, space);
    encoder.run()
}

/// A layer's metadata, which is known before its contents are read for the second time.
struct Described {
    tree: Tree,
    metadata: Vec<u8>,
    /// Contents that are others than in the source, by the number of the file.
    contents: Vec<(usize, Content)>,
    git: GitRefresh,
}

/// Writes the metadata image. Takes the bodies of the files out of the plan.
fn describe(index: &Index, nodes: Vec<NodeIx>, plan: &mut Plan, git: Refresh) -> Result<Described> {
    let bodies = std::mem::take(&mut plan.bodies);
    let (mut tree, numbers) = to_tree(index, nodes.into_iter().zip(bodies).collect())?;
    git.date(&mut tree, &numbers);
    let image = writer::write(&tree, plan.data_blocks)?;
    let (contents, git) = git.write(&tree, &numbers, &image.inode_numbers);
    Ok(Described { tree, metadata: image.bytes, contents, git })
}

/// The regular files in path order, each inode once.
fn regular_files(index: &Index) -> Result<Vec<NodeIx>> {
    let mut seen = vec![false; index.nodes.len()];
    let mut files = Vec::new();
    index.walk(|path, ix| {
        let NodeKind::Regular(content) = &index.node(ix).kind else { return Ok(()) };
        if content.size > MAX_FILE_BYTES {
            let text = format!("{}: a file of more than 16 TiB", path::show(path));
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        if !std::mem::replace(&mut seen[ix.0 as usize], true) {
            files.push(ix);
        }
        Ok(())
    })?;
    Ok(files)
}

/// The tree with its inodes numbered in path order, and the number of each inode of the index.
fn to_tree(
    index: &Index,
    mut bodies: BTreeMap<NodeIx, Body>,
) -> Result<(Tree, Vec<Option<InodeIx>>)> {
    let mut inodes = Vec::new();
    let mut numbers: Vec<Option<InodeIx>> = vec![None; index.nodes.len()];
    index.walk(|path, ix| {
        let number = &mut numbers[ix.0 as usize];
        if number.is_none() {
            *number = Some(InodeIx(inodes.len() as u32));
            inodes.push(inode(index, ix, path, &mut bodies)?);
        }
        Ok(())
    })?;
    for (at, number) in numbers.iter().enumerate() {
        let (Some(number), Some(entries)) = (number, index.entries(NodeIx(at as u32))) else {
            continue;
        };
        if let Kind::Directory(names) = &mut inodes[number.index()].kind {
            names.extend(
                entries
                    .iter()
                    .filter_map(|(name, ix)| Some((name.clone(), numbers[ix.0 as usize]?))),
            );
        }
    }
    Ok((Tree { inodes }, numbers))
}

fn inode(
    index: &Index,
    ix: NodeIx,
    path: &[u8],
    bodies: &mut BTreeMap<NodeIx, Body>,
) -> Result<Inode> {
    let node = index.node(ix);
    let kind = match &node.kind {
        NodeKind::Directory(_) => Kind::Directory(BTreeMap::new()),
        NodeKind::Regular(content) => Kind::Regular(FileData {
            size: content.size,
            body: bodies.remove(&ix).unwrap_or(Body::Extents(Vec::new())),
        }),
        NodeKind::Symlink(target) => Kind::Symlink(target.clone()),
        NodeKind::CharDevice(rdev) if *rdev == Rdev::WHITEOUT => {
            return Err(foreign_whiteout(path));
        }
        NodeKind::CharDevice(rdev) => Kind::CharDevice(*rdev),
        NodeKind::BlockDevice(rdev) => Kind::BlockDevice(*rdev),
        NodeKind::Fifo => Kind::Fifo,
        NodeKind::Socket => Kind::Socket,
        NodeKind::Whiteout => Kind::CharDevice(Rdev::WHITEOUT),
        NodeKind::Link(target) => {
            return Err(Error::invalid(format!(
                "{} is a hard link to {}, which is not there",
                path::show(path),
                path::show(target)
            )));
        }
    };
    let mut xattrs = node.xattrs.clone();
    if node.opaque {
        xattrs.push(Xattr { name: OPAQUE_XATTR.to_vec(), value: b"y".to_vec() });
        xattrs.sort();
    }
    Ok(Inode { mode: node.mode, uid: node.uid, gid: node.gid, mtime: node.mtime, xattrs, kind })
}

fn manifest(
    tree: &Tree,
    chunk_table: &ChunkTable,
    metadata: &[u8],
    options: &BuildOptions,
) -> Manifest {
    let mut annotations = options.annotations.clone();
    if let Some(layout) = &options.layout {
        annotations.insert(layout::ANNOTATION.to_owned(), layout.digest().to_string());
    }
    let mut manifest =
        Manifest { annotations, ..Manifest::describing(options.kind, chunk_table, metadata) };
    for inode in &tree.inodes {
        match &inode.kind {
            Kind::Directory(_) => manifest.directories += 1,
            Kind::Regular(data) => {
                manifest.files += 1;
                manifest.plain_bytes = manifest.plain_bytes.saturating_add(data.size);
            }
            _ => manifest.files += 1,
        }
    }
    manifest
}

/// Publishes an environment of these layers.
pub fn publish_environment(
    layers: Vec<LayerId>,
    config: RunConfig,
    publisher: &dyn Publisher,
) -> Result<EnvId> {
    commit(&Environment::new(layers, config)?, publisher)
}

/// Publishes the environment of everything that was built, with `config` to run in it.
pub fn publish_built(built: &Built, config: RunConfig, publisher: &dyn Publisher) -> Result<EnvId> {
    commit(&Environment::new(built.layer_ids(), config)?.with_image(built.image), publisher)
}

fn commit(environment: &Environment, publisher: &dyn Publisher) -> Result<EnvId> {
    publisher
        .commit_environment(&environment.canonical())
        .context(|| "publish an environment".to_owned())
}
