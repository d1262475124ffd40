//! The same service over both transports, and what a client sees when nobody listens.
#![allow(clippy::unwrap_used)]

use layer::ErrorKind;
use proto::v1::layer_fs_client::LayerFsClient;
use proto::v1::layer_fs_server::{LayerFs, LayerFsServer};
use proto::v1::*;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use tokio::sync::oneshot;
use tonic::{Request, Response, Status};

/// A test double that answers `Stats` with its number and refuses the rest with a typed error.
struct Numbered(u32);

fn refuse<T>() -> Result<Response<T>, Status> {
    Err(proto::status::to_status(layer::Error::new(
        ErrorKind::Busy,
        "the double does nothing else",
    )))
}

/// `Stats` and, by a line each, the calls that are refused.
macro_rules! double {
    ($($call:ident: $request:ident => $answer:ident,)+) => {
        #[tonic::async_trait]
        impl LayerFs for Numbered {
            async fn stats(
                &self,
                _: Request<StatsRequest>,
            ) -> Result<Response<StatsResponse>, Status> {
                Ok(Response::new(StatsResponse { pid: self.0, ..StatsResponse::default() }))
            }
            $(async fn $call(&self, _: Request<$request>) -> Result<Response<$answer>, Status> {
                refuse()
            })+
        }
    };
}

double! {
    attach: AttachRequest => AttachResponse,
    detach: DetachRequest => DetachResponse,
    export: ExportRequest => ExportResponse,
    withdraw: WithdrawRequest => WithdrawResponse,
    pin: PinRequest => PinResponse,
    check: CheckRequest => CheckResponse,
    complete: CompleteRequest => CompleteResponse,
    record: RecordRequest => RecordResponse,
    stop_record: StopRecordRequest => StopRecordResponse,
    prefetch: PrefetchRequest => PrefetchResponse,
    evict: EvictRequest => EvictResponse,
    serve: ServeRequest => ServeResponse,
    end_serve: EndServeRequest => EndServeResponse,
    drain: DrainRequest => DrainResponse,
}

fn routes(number: u32) -> tonic::service::Routes {
    tonic::service::Routes::new(LayerFsServer::new(Numbered(number)))
}

async fn number_of(client: &mut LayerFsClient<tonic::transport::Channel>) -> layer::Result<u32> {
    let answer = client.stats(StatsRequest {}).await.map_err(proto::status::from_status)?;
    Ok(answer.into_inner().pid)
}

struct Server {
    stop: oneshot::Sender<()>,
    done: tokio::task::JoinHandle<layer::Result<()>>,
}

impl Server {
    async fn start(path: &Path, number: u32) -> Self {
        let (stop, stopped) = oneshot::channel::<()>();
        let socket = path.to_path_buf();
        let done = tokio::spawn(async move {
            let shutdown = async move {
                stopped.await.unwrap_or_default();
            };
            proto::connect::serve_unix(&socket, routes(number), shutdown).await
        });
        while !path.exists() {
            tokio::task::yield_now().await;
        }
        Self { stop, done }
    }

    async fn stop(self) {
        self.stop.send(()).unwrap();
        self.done.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_service_answers_inside_the_process_and_its_errors_keep_their_kind() {
    let channel = proto::connect::in_process(routes(7)).await.unwrap();
    let mut client = LayerFsClient::new(channel);
    assert_eq!(number_of(&mut client).await.unwrap(), 7);
    let refused = client.drain(DrainRequest { force: false }).await.unwrap_err();
    assert_eq!(proto::status::from_status(refused).kind(), ErrorKind::Busy);
}

#[tokio::test]
async fn a_socket_is_private_and_gone_after_shutdown() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.sock");
    let server = Server::start(&path, 8).await;
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let mut client = LayerFsClient::new(proto::connect::unix(&path).await.unwrap());
    assert_eq!(number_of(&mut client).await.unwrap(), 8);
    drop(client);
    server.stop().await;
    assert!(!path.exists());
}

#[tokio::test]
async fn a_client_that_never_speaks_does_not_keep_a_server_from_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mute.sock");
    let (stop, stopped) = oneshot::channel::<()>();
    let server = tokio::spawn({
        let path = path.clone();
        async move {
            proto::connect::serve_unix(&path, routes(1), async {
                _ = stopped.await;
            })
            .await
        }
    });
    while proto::connect::unix(&path).await.is_err() {
        tokio::task::yield_now().await;
    }
    let mute = tokio::net::UnixStream::connect(&path).await.unwrap();
    let held = proto::connect::unix(&path).await.unwrap();
    stop.send(()).unwrap();
    let ended = tokio::time::timeout(std::time::Duration::from_secs(60), server).await;
    ended.expect("the server ends").unwrap().unwrap();
    assert!(!path.exists());
    drop((mute, held));
}

#[tokio::test]
async fn nobody_listening_is_unavailable_and_a_lazy_channel_finds_the_next_listener() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.sock");
    let refused = proto::connect::unix(&path).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable);
    let mut client = LayerFsClient::new(proto::connect::unix_lazy(&path));
    assert_eq!(number_of(&mut client).await.unwrap_err().kind(), ErrorKind::Unavailable);
    let server = Server::start(&path, 9).await;
    assert_eq!(number_of(&mut client).await.unwrap(), 9);
    server.stop().await;
}

#[tokio::test]
async fn a_daemon_that_hangs_up_in_mid_call_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.sock");
    let listener = tokio::net::UnixListener::bind(&path).unwrap();
    let hang_up = tokio::spawn(async move {
        let (mut connection, _) = listener.accept().await.unwrap();
        // The preface, the settings and the head of a call: nothing of it is answered.
        let mut bytes = [0; 4096];
        let mut read = 0;
        while read < 150 {
            read += tokio::io::AsyncReadExt::read(&mut connection, &mut bytes).await.unwrap();
        }
    });
    let mut client = LayerFsClient::new(proto::connect::unix_lazy(&path));
    let lost = number_of(&mut client).await.unwrap_err();
    assert_eq!(lost.kind(), ErrorKind::Unavailable);
    assert!(lost.to_string().contains(path.to_str().unwrap()), "{lost}");
    hang_up.await.unwrap();
    let refused = number_of(&mut client).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable);
    assert!(refused.to_string().contains(path.to_str().unwrap()), "{refused}");
}

#[tokio::test]
async fn calls_are_measured_by_name() {
    let calls = proto::meter::calls::Calls::of_layer_fs();
    let channel = proto::connect::in_process(calls.measure(routes(1))).await.unwrap();
    let mut client = LayerFsClient::new(channel);
    number_of(&mut client).await.unwrap();
    number_of(&mut client).await.unwrap();
    client.drain(DrainRequest { force: false }).await.unwrap_err();
    let mut page = proto::meter::Page::default();
    proto::meter::calls::write(&mut page, &[&calls]);
    let text = page.into_text();
    let of = |method: &str| format!("{{service=\"LayerFs\",method=\"{method}\"}}");
    for line in [
        format!("lamella_rpc_seconds_count{} 2", of("Stats")),
        format!("lamella_rpc_errors_total{} 0", of("Stats")),
        format!("lamella_rpc_errors_total{} 1", of("Drain")),
    ] {
        assert!(text.contains(&line), "{line:?} is not in {text}");
    }
    assert!(!text.contains("Attach"), "{text}");
}
