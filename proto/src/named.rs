//! A client's end of a Unix socket that names the socket in every error.
//!
//! The end of the stream is such an error too: HTTP/2 says goodbye before it hangs up, and whoever still
//! waits for an answer then should hear which daemon does not give it.

use std::io::{self, IoSlice};
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;

/// The stream and the path that was connected to.
#[derive(Debug)]
pub(crate) struct NamedStream {
    pub stream: UnixStream,
    pub path: PathBuf,
}

impl NamedStream {
    fn name(&self, error: &io::Error) -> io::Error {
        io::Error::new(error.kind(), format!("talk over {}: {error}", self.path.display()))
    }

    fn named<T>(&self, result: io::Result<T>) -> io::Result<T> {
        result.map_err(|error| self.name(&error))
    }
}

impl AsyncRead for NamedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = ready!(Pin::new(&mut self.stream).poll_read(context, buffer));
        let ended = read.is_ok() && buffer.filled().len() == before && buffer.remaining() > 0;
        Poll::Ready(match ended {
            true => Err(io::Error::new(
                io::ErrorKind::ConnectionAborted,
                format!("the daemon behind {} hung up", self.path.display()),
            )),
            false => self.named(read),
        })
    }
}

impl AsyncWrite for NamedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write(context, bytes));
        Poll::Ready(self.named(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write_vectored(context, slices));
        Poll::Ready(self.named(written))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
