//! Channels to daemons and the sockets that daemons listen on.
//!
//! Two transports carry the same services: a Unix socket, and a pipe inside one process for embedded
//! mode. A socket is created with mode 0600 under a temporary name and renamed into place, so that it
//! is never open to others and never names a dead listener of this process. Peers must be root or the
//! daemon's own user.
//!
//! What survives a crash: a dead socket file. The next listener replaces it; a client that meets it
//! gets `Unavailable`.

use crate::named::NamedStream;
use hyper_util::rt::TokioIo;
use layer::{Context, Error, ErrorKind, Result};
use std::future::Future;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::io::DuplexStream;
use tokio::net::{UnixListener, UnixStream};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::service::{InterceptorLayer, Routes};
use tonic::transport::{Channel, Endpoint, Server, Uri};
use tower::service_fn;

/// The one connection of a server inside this process.
type Incoming = tokio_stream::Once<io::Result<DuplexStream>>;

/// Bytes buffered in each direction of an in-process connection.
const PIPE_BYTES: usize = 1 << 20;
/// HTTP/2 windows: large enough that a chunk upload is not paced by window updates.
const WINDOW_BYTES: u32 = 4 << 20;
/// What all streams of a connection may hold together, in one direction: so much that those which nobody reads,
/// full as they are, do not hold up the others.
const ALL_STREAMS_BYTES: u32 = 1 << 30;
/// How long a client waits for a socket to accept it.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long clients may keep a server that is to end: calls in flight, and clients that never speak.
const FAREWELL: Duration = Duration::from_secs(5);

fn endpoint() -> Endpoint {
    // The URI is never resolved: the connector decides where the bytes go.
    Endpoint::from_static("http://lamella.invalid")
        .connect_timeout(CONNECT_TIMEOUT)
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(ALL_STREAMS_BYTES)
}

fn server() -> Server {
    Server::builder()
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(ALL_STREAMS_BYTES)
}

async fn dial(target: PathBuf) -> io::Result<TokioIo<NamedStream>> {
    match UnixStream::connect(&target).await {
        Ok(stream) => Ok(TokioIo::new(NamedStream { stream, path: target })),
        Err(error) => {
            Err(io::Error::new(error.kind(), format!("connect to {}: {error}", target.display())))
        }
    }
}

/// Connects to a daemon's Unix socket. `Unavailable` when nobody listens there.
pub async fn unix(path: &Path) -> Result<Channel> {
    let target = path.to_path_buf();
    let connector = service_fn(move |_: Uri| dial(target.clone()));
    endpoint().connect_with_connector(connector).await.map_err(|error| {
        let context = format!("nothing answers on {}", path.display());
        Error::new(ErrorKind::Unavailable, context).with_source(error)
    })
}

/// A channel to a Unix socket that connects on first use and again after the daemon was restarted.
pub fn unix_lazy(path: &Path) -> Channel {
    let target = path.to_path_buf();
    endpoint().connect_with_connector_lazy(service_fn(move |_: Uri| dial(target.clone())))
}

/// Stands with the requests that come through [`in_process_own`]. It is no part of what is sent, so nobody
/// else can make one.
#[derive(Debug, Clone, Copy)]
struct Own;

/// Whether a request comes through [`in_process_own`].
pub fn is_own<T>(request: &tonic::Request<T>) -> bool {
    request.extensions().get::<Own>().is_some()
}

/// Serves `routes` inside this process and returns a channel to them. The server ends with the last
/// clone of the channel. Must be called in a tokio runtime.
pub async fn in_process(routes: Routes) -> Result<Channel> {
    pipe(|incoming| server().add_routes(routes).serve_with_incoming(incoming)).await
}

/// Like [`in_process`], for code of this process that answers for what it sends: a service believes a digest
/// that comes with such a request ([`is_own`]). Never hand it to something that passes on what others sent.
pub async fn in_process_own(routes: Routes) -> Result<Channel> {
    let mark = InterceptorLayer::new(|mut request: tonic::Request<()>| {
        request.extensions_mut().insert(Own);
        Ok(request)
    });
    pipe(|incoming| server().layer(mark).add_routes(routes).serve_with_incoming(incoming)).await
}

/// Both ends of a connection inside this process; `serve` gets the one of the server.
async fn pipe<S>(serve: impl FnOnce(Incoming) -> S) -> Result<Channel>
where
    S: Future<Output = Result<(), tonic::transport::Error>> + Send + 'static,
{
    let (client, service) = tokio::io::duplex(PIPE_BYTES);
    let serving = serve(tokio_stream::once(Ok(service)));
    tokio::spawn(async move {
        if let Err(error) = serving.await {
            tracing::error!(%error, "in-process server ended");
        }
    });
    let mut client = Some(client);
    let connector = service_fn(move |_: Uri| {
        let client = client.take().map(TokioIo::new);
        async move { client.ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected)) }
    });
    endpoint().connect_with_connector(connector).await.map_err(|error| {
        Error::new(ErrorKind::Internal, "connect inside the process").with_source(error)
    })
}

/// Listens on a Unix socket until `shutdown` resolves, then lets calls in flight end and removes the
/// socket. Calls that go on for longer than a moment, and clients that keep a connection and never
/// speak, hold nothing up: the process is about to end, which ends them.
pub async fn serve_unix(
    path: &Path,
    routes: Routes,
    shutdown: impl Future<Output = ()>,
) -> Result<()> {
    let listener = bind(path)?;
    let own_uid = std::fs::metadata(path).map(|metadata| metadata.uid()).ok();
    let incoming = UnixListenerStream::new(listener).filter(move |connection| {
        connection.as_ref().map_or(true, |stream| {
            let peer = stream.peer_cred().map(|credentials| credentials.uid()).ok();
            let known = peer == Some(0) || (peer.is_some() && peer == own_uid);
            if !known {
                tracing::warn!(?peer, "refused a connection of another user");
            }
            known
        })
    });
    let (begin, begun) = tokio::sync::oneshot::channel();
    let shutdown = async {
        shutdown.await;
        // Nobody listens when the server has ended by itself.
        _ = begin.send(());
    };
    let patience = async {
        match begun.await {
            Ok(()) => tokio::time::sleep(FAREWELL).await,
            Err(_) => std::future::pending().await,
        }
    };
    let serving = server().add_routes(routes).serve_with_incoming_shutdown(incoming, shutdown);
    let served = tokio::select! {
        served = serving => served.map_err(|error| {
            Error::new(ErrorKind::Unavailable, format!("serve {}", path.display()))
                .with_source(error)
        }),
        () = patience => {
            tracing::warn!(path = %path.display(), "clients keep their connections; they are cut");
            Ok(())
        }
    };
    if let Err(error) = remove(path) {
        tracing::warn!(%error, path = %path.display(), "remove socket");
    }
    served
}

/// Removes a file that may not exist.
fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn bind(path: &Path) -> Result<UnixListener> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".{}", std::process::id()));
    let temporary = PathBuf::from(temporary);
    let name = || format!("listen on {}", path.display());
    remove(&temporary).context(name)?;
    let listener = UnixListener::bind(&temporary).context(name)?;
    std::fs::set_permissions(&temporary, std::fs::Permissions::from_mode(0o600)).context(name)?;
    std::fs::rename(&temporary, path).context(name)?;
    Ok(listener)
}
