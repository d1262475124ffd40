//! A runtime over test doubles: an image daemon that knows one environment, and a file system daemon
//! whose layers are plain folders. The root file system is busybox.
//!
//! Dropping the world ends every sandbox and removes every trace, also after a failed test.

#![allow(dead_code, clippy::unwrap_used)]

use anyhow::{Context, Result, bail};
use layer::LayerId;
use layer::environment::{Environment, RunConfig};
use proto::v1::exec_input::Input;
use proto::v1::exec_output::Output;
use proto::v1::images_server::{Images, ImagesServer};
use proto::v1::layer_fs_server::{LayerFs, LayerFsServer};
use proto::v1::sandboxes_client::SandboxesClient;
use proto::v1::*;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use tokio_stream::{Stream, StreamExt};
use tonic::transport::Channel;
use tonic::{Request, Response, Status, Streaming};

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// The id that stands for the busybox folder.
pub fn layer_id() -> LayerId {
    LayerId([7; 32])
}

/// Resolves every name to one environment.
struct OneEnvironment(Environment);

#[tonic::async_trait]
impl Images for OneEnvironment {
    async fn resolve(
        &self,
        request: Request<ResolveRequest>,
    ) -> Result<Response<ResolveResponse>, Status> {
        if request.get_ref().name.contains("unknown") {
            let missing = layer::Error::not_found("no such environment");
            return Err(proto::status::to_status(missing));
        }
        Ok(Response::new(ResolveResponse {
            target: Some(resolve_response::Target::EnvId(self.0.id().as_bytes().to_vec())),
            environment_document: self.0.canonical(),
            layers: Vec::new(),
        }))
    }

    type ListReferencesStream = Answers<ReferenceEntry>;
    type HistoryStream = Answers<ReferenceEntry>;

    async fn open_publish(
        &self,
        _: Request<OpenPublishRequest>,
    ) -> Result<Response<OpenPublishResponse>, Status> {
        Err(Status::unimplemented("test double"))
    }
    async fn missing_chunks(
        &self,
        _: Request<MissingChunksRequest>,
    ) -> Result<Response<MissingChunksResponse>, Status> {
        Err(Status::unimplemented("test double"))
    }
    async fn upload_chunks(
        &self,
        _: Request<Streaming<UploadChunk>>,
    ) -> Result<Response<UploadChunksResponse>, Status> {
        Err(Status::unimplemented("test double"))
    }
    async fn commit_layer(
        &self,
        _: Request<Streaming<CommitLayerPart>>,
    ) -> Result<Response<CommitLayerResponse>, Status> {
        Err(Status::unimplemented("test double"))
    }
    async fn commit_environment(
        &self,
        _: Request<CommitEnvironmentRequest>,
    ) -> Result<Response<CommitEnvironmentResponse>, Status> {
        Err(Status::unimplemented("test double"))
    }
    async fn close_publish(
        &self,
        _: Request<ClosePublishRequest>,
    ) -> Result<Response<ClosePublishResponse>, Status> {
        Err(Status::unimplemented("test double"))
    }
    async fn list_references(
        &self,
        _: Request<ListReferencesRequest>,
    ) -> Result<Response<Self::ListReferencesStream>, Status> {
        Err(Status::unimplemented("test double"))
    }
    async fn history(
        &self,
        _: Request<HistoryRequest>,
    ) -> Result<Response<Self::HistoryStream>, Status> {
        Err(Status::unimplemented("test double"))
    }
    async fn tag(&self, _: Request<TagRequest>) -> Result<Response<ReferenceEntry>, Status> {
        Err(Status::unimplemented("test double"))
    }
    async fn untag(&self, _: Request<UntagRequest>) -> Result<Response<ReferenceEntry>, Status> {
        Err(Status::unimplemented("test double"))
    }
    async fn describe_layer(
        &self,
        _: Request<DescribeLayerRequest>,
    ) -> Result<Response<LayerDescription>, Status> {
        Err(Status::unimplemented("test double"))
    }
    async fn acquire_lease(
        &self,
        _: Request<AcquireLeaseRequest>,
    ) -> Result<Response<Lease>, Status> {
        Err(Status::unimplemented("test double"))
    }
    async fn release_lease(
        &self,
        _: Request<ReleaseLeaseRequest>,
    ) -> Result<Response<ReleaseLeaseResponse>, Status> {
        Err(Status::unimplemented("test double"))
    }
    async fn locate(&self, _: Request<LocateRequest>) -> Result<Response<LocateResponse>, Status> {
        Err(Status::unimplemented("test double"))
    }
    async fn reindex(
        &self,
        _: Request<ReindexRequest>,
    ) -> Result<Response<ReindexResponse>, Status> {
        Err(Status::unimplemented("test double"))
    }

    async fn collect(
        &self,
        _: Request<CollectRequest>,
    ) -> Result<Response<CollectResponse>, Status> {
        Err(Status::unimplemented("test double"))
    }

    async fn undo_collection(
        &self,
        _: Request<UndoCollectionRequest>,
    ) -> Result<Response<UndoCollectionResponse>, Status> {
        Err(Status::unimplemented("test double"))
    }
}

/// Answers every attach with one folder, and remembers who holds it.
#[derive(Debug, Clone)]
pub struct FolderLayers {
    folder: PathBuf,
    holders: Arc<Mutex<HashSet<String>>>,
}

impl FolderLayers {
    pub fn new(folder: PathBuf) -> Self {
        Self { folder, holders: Arc::default() }
    }

    /// Who holds the layer now.
    pub fn holders(&self) -> HashSet<String> {
        self.holders.lock().unwrap().clone()
    }
}

#[tonic::async_trait]
impl LayerFs for FolderLayers {
    async fn attach(
        &self,
        request: Request<AttachRequest>,
    ) -> Result<Response<AttachResponse>, Status> {
        self.holders.lock().unwrap().insert(request.into_inner().holder);
        Ok(Response::new(AttachResponse {
            mount_path: self.folder.display().to_string(),
            plane: Plane::ErofsFanotify.into(),
            complete: true,
        }))
    }
    async fn detach(
        &self,
        request: Request<DetachRequest>,
    ) -> Result<Response<DetachResponse>, Status> {
        let unmounted = self.holders.lock().unwrap().remove(&request.into_inner().holder);
        Ok(Response::new(DetachResponse { unmounted }))
    }
    async fn stats(&self, _: Request<StatsRequest>) -> Result<Response<StatsResponse>, Status> {
        let holders: Vec<String> = self.holders().into_iter().collect();
        let layer = LayerStats {
            layer_id: layer_id().as_bytes().to_vec(),
            holders,
            ..LayerStats::default()
        };
        Ok(Response::new(StatsResponse { layers: vec![layer], ..StatsResponse::default() }))
    }
    async fn complete(
        &self,
        _: Request<CompleteRequest>,
    ) -> Result<Response<CompleteResponse>, Status> {
        Err(Status::unimplemented("test double"))
    }
    async fn record(&self, _: Request<RecordRequest>) -> Result<Response<RecordResponse>, Status> {
        Err(Status::unimplemented("test double"))
    }
    async fn stop_record(
        &self,
        _: Request<StopRecordRequest>,
    ) -> Result<Response<StopRecordResponse>, Status> {
        Err(Status::unimplemented("test double"))
    }
    async fn prefetch(
        &self,
        _: Request<PrefetchRequest>,
    ) -> Result<Response<PrefetchResponse>, Status> {
        Ok(Response::new(PrefetchResponse {}))
    }
    async fn evict(&self, _: Request<EvictRequest>) -> Result<Response<EvictResponse>, Status> {
        Err(Status::unimplemented("test double"))
    }
    async fn pin(&self, _: Request<PinRequest>) -> Result<Response<PinResponse>, Status> {
        Err(Status::unimplemented("test double"))
    }
    async fn check(&self, _: Request<CheckRequest>) -> Result<Response<CheckResponse>, Status> {
        Err(Status::unimplemented("test double"))
    }
    async fn export(&self, _: Request<ExportRequest>) -> Result<Response<ExportResponse>, Status> {
        Err(Status::unimplemented("test double"))
    }
    async fn serve(&self, _: Request<ServeRequest>) -> Result<Response<ServeResponse>, Status> {
        Err(Status::unimplemented("test double"))
    }
    async fn end_serve(
        &self,
        _: Request<EndServeRequest>,
    ) -> Result<Response<EndServeResponse>, Status> {
        Err(Status::unimplemented("test double"))
    }
    async fn withdraw(
        &self,
        _: Request<WithdrawRequest>,
    ) -> Result<Response<WithdrawResponse>, Status> {
        Err(Status::unimplemented("test double"))
    }
    async fn drain(&self, _: Request<DrainRequest>) -> Result<Response<DrainResponse>, Status> {
        Err(Status::unimplemented("test double"))
    }
}

/// A runtime on this data directory, over the test doubles.
pub async fn open(data: &Path, layers: &FolderLayers) -> Result<runtime::Service> {
    open_with(data, layers, |_| {}).await
}

/// The same with other settings.
pub async fn open_with(
    data: &Path,
    layers: &FolderLayers,
    change: impl FnOnce(&mut runtime::RuntimeConfig),
) -> Result<runtime::Service> {
    let environment = Environment::new(vec![layer_id()], World::config())?;
    let images = tonic::service::Routes::new(ImagesServer::new(OneEnvironment(environment)));
    let layers = tonic::service::Routes::new(LayerFsServer::new(layers.clone()));
    let images = proto::connect::in_process(images).await?;
    let layerfs = proto::connect::in_process(layers).await?;
    let mut config = runtime::RuntimeConfig::new(data.to_path_buf(), images, layerfs);
    change(&mut config);
    Ok(runtime::Service::open(config).await?)
}

/// A folder with an image and a data directory.
pub struct World {
    folder: tempfile::TempDir,
    pub layers: FolderLayers,
}

/// What a command printed and how it ended.
#[derive(Debug)]
pub struct Ran {
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub ended: ExecEnded,
}

impl Ran {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

impl World {
    pub fn new() -> Result<Self> {
        // Not in /tmp of the machine's own choice: an overlay's upper needs a real file system.
        let folder = tempfile::Builder::new().prefix("lamella-runtime-").tempdir_in("/var/tmp")?;
        make_image(&folder.path().join("image"))?;
        let layers = FolderLayers::new(folder.path().join("image"));
        Ok(Self { folder, layers })
    }

    pub fn image(&self) -> PathBuf {
        self.folder.path().join("image")
    }

    pub fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    pub fn config() -> RunConfig {
        RunConfig { env: vec!["IMAGE=busybox".into()], ..RunConfig::default() }
    }

    /// Starts a runtime on the data directory.
    pub async fn open(&self) -> Result<runtime::Service> {
        open(&self.data(), &self.layers).await
    }

    /// Starts a runtime and connects to it.
    pub async fn client(&self) -> Result<(runtime::Service, Client)> {
        let service = self.open().await?;
        let channel = proto::connect::in_process(service.routes()).await?;
        Ok((service, Client { inner: SandboxesClient::new(channel) }))
    }

    /// Groups of this world's runtime that exist now.
    pub fn groups(&self) -> Vec<PathBuf> {
        let Ok(path) = std::fs::canonicalize(self.data().join("sandboxes")) else {
            return Vec::new();
        };
        let name = format!("{:016x}", fnv(path.as_os_str().as_encoded_bytes()));
        let mut found = Vec::new();
        let roots = std::fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten();
        let roots = roots.map(|entry| entry.path()).chain([PathBuf::from("/sys/fs/cgroup")]);
        for root in roots {
            let group = root.join("lamella").join(&name);
            if group.is_dir() {
                found.push(group);
            }
        }
        found
    }

    /// Processes in this world's groups.
    pub fn processes(&self) -> Vec<u32> {
        fn below(folder: &Path, pids: &mut Vec<u32>) {
            let text = std::fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
            pids.extend(text.lines().filter_map(|line| line.parse::<u32>().ok()));
            for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
                if entry.path().is_dir() {
                    below(&entry.path(), pids);
                }
            }
        }
        let mut pids = Vec::new();
        for group in self.groups() {
            below(&group, &mut pids);
        }
        pids.sort_unstable();
        pids.dedup();
        pids
    }
}

fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

impl Drop for World {
    fn drop(&mut self) {
        for pid in self.processes() {
            let _ = std::process::Command::new("kill").args(["-9", &pid.to_string()]).status();
        }
        fn remove(folder: &Path) -> bool {
            for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
                if entry.path().is_dir() {
                    remove(&entry.path());
                }
            }
            std::fs::remove_dir(folder).is_ok()
        }
        for group in self.groups() {
            for _ in 0..200 {
                if remove(&group) {
                    break;
                }
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
        }
        for mount in sys::mount::read_mounts().into_iter().flatten() {
            if mount.mount_point.starts_with(self.folder.path()) {
                let _ = sys::mount::unmount(&mount.mount_point, sys::mount::Unmount::Lazy);
            }
        }
        // A runtime in this process may just be preparing the slots of the dead for others.
        for _ in 0..3 {
            let _ = std::fs::remove_dir_all(self.folder.path());
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

/// A tree with busybox under the names that the tests use.
fn make_image(image: &Path) -> Result<()> {
    for folder in ["bin", "etc", "root", "tmp", "home/ann"] {
        std::fs::create_dir_all(image.join(folder))?;
    }
    let busybox = image.join("bin/busybox");
    std::fs::copy("/usr/bin/busybox", &busybox).context("busybox-static is installed")?;
    let names = std::process::Command::new("/usr/bin/busybox").arg("--list").output()?;
    for name in String::from_utf8(names.stdout)?.lines() {
        let link = image.join("bin").join(name);
        if !link.exists() {
            std::os::unix::fs::symlink("busybox", link)?;
        }
    }
    let passwd = "root:x:0:0:root:/root:/bin/sh\nann:x:1000:1000::/home/ann:/bin/sh\n";
    std::fs::write(image.join("etc/passwd"), passwd)?;
    std::fs::write(image.join("etc/group"), "root:x:0:\nann:x:1000:\nextra:x:77:ann\n")?;
    Ok(())
}

/// A client with short calls.
#[derive(Clone)]
pub struct Client {
    pub inner: SandboxesClient<Channel>,
}

impl Client {
    pub async fn create(&self, request: CreateRequest) -> Result<Sandbox> {
        let request = CreateRequest {
            environment: if request.environment.is_empty() {
                "env/busybox:test".into()
            } else {
                request.environment
            },
            ..request
        };
        let answer = self.inner.clone().create(request).await;
        Ok(answer.map_err(proto::status::from_status)?.into_inner())
    }

    /// A sandbox that idles.
    pub async fn idle(&self) -> Result<Sandbox> {
        self.create(CreateRequest::default()).await
    }

    pub async fn get(&self, id: &str) -> Result<Sandbox> {
        let answer = self.inner.clone().get(GetRequest { id: id.into() }).await;
        Ok(answer.map_err(proto::status::from_status)?.into_inner())
    }

    pub async fn wait(&self, id: &str) -> Result<Sandbox> {
        Ok(self.inner.clone().wait(WaitRequest { id: id.into() }).await?.into_inner())
    }

    pub async fn stop(&self, id: &str) -> Result<Sandbox> {
        let request = StopRequest { id: id.into(), grace_ms: 0 };
        Ok(self.inner.clone().stop(request).await?.into_inner())
    }

    pub async fn run(&self, id: &str, argv: &[&str]) -> Result<Ran> {
        self.exec(ExecStart {
            sandbox_id: id.into(),
            argv: argv.iter().map(|&word| word.into()).collect(),
            ..ExecStart::default()
        })
        .await
    }

    /// Runs a line of the image's shell; its output, when it succeeds.
    pub async fn shell(&self, id: &str, line: &str) -> Result<String> {
        let ran = self.run(id, &["sh", "-c", line]).await?;
        if ran.ended.exit_code != 0 {
            bail!("{line}: {:?} {}", ran.ended, String::from_utf8_lossy(&ran.stderr));
        }
        Ok(ran.text())
    }

    pub async fn exec(&self, start: ExecStart) -> Result<Ran> {
        self.exec_with(start, Vec::new()).await
    }

    /// Runs with these inputs after the start.
    pub async fn exec_with(&self, start: ExecStart, inputs: Vec<Input>) -> Result<Ran> {
        let all = std::iter::once(Input::Start(start)).chain(inputs);
        let all: Vec<ExecInput> = all.map(|input| ExecInput { input: Some(input) }).collect();
        let outputs = self.inner.clone().exec(tokio_stream::iter(all)).await;
        collect(outputs.map_err(proto::status::from_status)?.into_inner()).await
    }

    pub async fn logs(&self, id: &str) -> Result<(String, String)> {
        let request = LogsRequest { id: id.into(), follow: true };
        let mut chunks = self.inner.clone().logs(request).await?.into_inner();
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk?;
            if chunk.stderr { &mut stderr } else { &mut stdout }.extend(chunk.data);
        }
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Ok((text(stdout), text(stderr)))
    }
}

/// Reads the outputs of a command to its end.
pub async fn collect(mut outputs: Streaming<ExecOutput>) -> Result<Ran> {
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    while let Some(output) = outputs.next().await {
        match output?.output {
            Some(Output::Stdout(data)) => stdout.extend(data),
            Some(Output::Stderr(data)) => stderr.extend(data),
            Some(Output::Ended(ended)) => return Ok(Ran { stdout, stderr, ended }),
            _ => {}
        }
    }
    bail!("the command has no end; it printed {}", String::from_utf8_lossy(&stdout))
}

pub fn how(end: &Option<End>) -> Option<end::How> {
    end.as_ref().and_then(|end| end.how.clone())
}
