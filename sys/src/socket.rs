//! Unix sockets that keep message borders and carry descriptors.
//!
//! For: handing descriptors between our own processes (fsd and its keepers, runtimed and its zygote)
//! and knowing who is at the other end. Not for: gRPC, which the async runtime does itself.
//!
//! Every descriptor that arrives is closed on exec; a message that was cut, or that carried more
//! descriptors than the receiver allows, is an error and its descriptors are closed.

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

/// The most descriptors in one message: the kernel's `SCM_MAX_FD`.
pub const MAX_DESCRIPTORS: usize = 253;

/// Longest path that fits into a Unix socket address.
const MAX_ADDRESS_BYTES: usize = 107;

/// Who is at the other end of a socket, as the kernel recorded it when the two were connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerCredentials {
    /// Process id in our pid namespace; 0 when the peer is outside of it.
    pub pid: i32,
    /// User id in our user namespace.
    pub uid: u32,
    /// Group id in our user namespace.
    pub gid: u32,
}

/// A message and what came with it.
#[derive(Debug)]
pub struct Message {
    /// The bytes.
    pub bytes: Vec<u8>,
    /// The descriptors, in the order in which they were sent.
    pub descriptors: Vec<OwnedFd>,
}

/// Asks the kernel who is at the other end of any connected Unix socket.
pub fn peer_credentials(socket: BorrowedFd<'_>) -> io::Result<PeerCredentials> {
    let mut found = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes, which is the size of `found`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut length,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(PeerCredentials { pid: found.pid, uid: found.uid, gid: found.gid })
}

/// Sends bytes with descriptors on any Unix socket; answers how many bytes went.
///
/// On a stream the descriptors travel with the first byte. A closed peer is EPIPE, never a signal.
pub fn send_with_descriptors(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<usize> {
    if descriptors.len() > MAX_DESCRIPTORS {
        let text = format!("{} descriptors in one message", descriptors.len());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::other("descriptors do not fit into the control buffer"));
    }
    loop {
        let parts = [IoSlice::new(bytes)];
        match rustix::net::sendmsg(socket, &parts, &mut ancillary, SendFlags::NOSIGNAL) {
            Ok(sent) => return Ok(sent),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Receives at most `max_bytes` and `max_descriptors` from any Unix socket.
///
/// `None` when the peer has closed. `InvalidData` when a message was longer or carried more
/// descriptors; what did arrive is closed then.
pub fn receive_with_descriptors(
    socket: BorrowedFd<'_>,
    max_bytes: usize,
    max_descriptors: usize,
) -> io::Result<Option<Message>> {
    let room = max_descriptors.min(MAX_DESCRIPTORS);
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut bytes = vec![0; max_bytes];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut parts = [IoSliceMut::new(&mut bytes)];
        match rustix::net::recvmsg(socket, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Ok(received) => break received,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    };
    let mut descriptors = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(arrived) = message {
            descriptors.extend(arrived);
        }
    }
    if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "message was cut"));
    }
    if descriptors.len() > room {
        let text = format!("{} descriptors where {room} are allowed", descriptors.len());
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    if received.bytes == 0 && descriptors.is_empty() {
        return Ok(None);
    }
    bytes.truncate(received.bytes);
    Ok(Some(Message { bytes, descriptors }))
}

/// Runs `with` on an address for `path`, however long it is.
fn with_address<T>(
    path: &Path,
    with: impl FnOnce(&SocketAddrUnix) -> io::Result<T>,
) -> io::Result<T> {
    use std::os::unix::ffi::OsStrExt;
    if path.as_os_str().as_bytes().len() <= MAX_ADDRESS_BYTES {
        return with(&SocketAddrUnix::new(path)?);
    }
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
    };
    let folder = rustix::fs::open(
        folder,
        rustix::fs::OFlags::PATH | rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    )?;
    let short = Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string()).join(name);
    with(&SocketAddrUnix::new(&short)?)
}

fn new_socket() -> io::Result<OwnedFd> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    Ok(rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?)
}

/// One end of a connection that keeps message borders (`SOCK_SEQPACKET`).
#[derive(Debug)]
pub struct Seqpacket {
    fd: OwnedFd,
}

impl Seqpacket {
    /// Two ends connected to each other.
    pub fn pair() -> io::Result<(Self, Self)> {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let (left, right) = rustix::net::socketpair(family, kind, SocketFlags::CLOEXEC, None)?;
        Ok((Self { fd: left }, Self { fd: right }))
    }

    /// Connects to a listener. ECONNREFUSED when nobody listens behind the name any more.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let fd = new_socket()?;
        with_address(path, |address| Ok(rustix::net::connect(&fd, address)?))?;
        Ok(Self { fd })
    }

    /// Takes over a descriptor. `InvalidInput` unless it is a socket of this type.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Self> {
        if rustix::net::sockopt::socket_type(&fd)? != SocketType::SEQPACKET {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "no SOCK_SEQPACKET socket"));
        }
        Ok(Self { fd })
    }

    /// Gives up the descriptor, for instance to become a numbered one of a child process.
    pub fn into_fd(self) -> OwnedFd {
        self.fd
    }

    /// Sends one whole message. EMSGSIZE when it is larger than the socket's send buffer.
    pub fn send(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        if bytes.is_empty() {
            // The receiver could not tell an empty message from the end.
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "empty message"));
        }
        send_with_descriptors(self.fd.as_fd(), bytes, descriptors).map(|_| ())
    }

    /// Receives one whole message; `None` when the peer has closed.
    pub fn receive(&self, max_bytes: usize, max_descriptors: usize) -> io::Result<Option<Message>> {
        receive_with_descriptors(self.fd.as_fd(), max_bytes, max_descriptors)
    }

    /// Who is at the other end. For a pair: who made the pair.
    pub fn peer(&self) -> io::Result<PeerCredentials> {
        peer_credentials(self.fd.as_fd())
    }

    /// Lets sends and receives fail with EAGAIN after this long; `None` waits without end.
    pub fn set_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        use rustix::net::sockopt::{Timeout, set_socket_timeout};
        set_socket_timeout(&self.fd, Timeout::Recv, timeout)?;
        Ok(set_socket_timeout(&self.fd, Timeout::Send, timeout)?)
    }

    /// Makes sends and receives answer EAGAIN instead of waiting, or undoes it.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        Ok(rustix::io::ioctl_fionbio(&self.fd, nonblocking)?)
    }

    /// Waits until there is something to receive; false when the time is over.
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<bool> {
        crate::wait_readable(self.fd.as_fd(), timeout)
    }
}

impl AsFd for Seqpacket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A named socket that accepts [`Seqpacket`] connections.
#[derive(Debug)]
pub struct SeqpacketListener {
    fd: OwnedFd,
}

impl SeqpacketListener {
    /// Makes the name with mode 0600 and listens. EADDRINUSE when the name exists, even when nobody
    /// listens behind it: removing a stale name is the caller's decision.
    pub fn bind(path: &Path) -> io::Result<Self> {
        let fd = new_socket()?;
        // Before bind, so that the name never exists with a wider mode.
        rustix::fs::fchmod(&fd, rustix::fs::Mode::from_raw_mode(0o600))?;
        with_address(path, |address| Ok(rustix::net::bind(&fd, address)?))?;
        rustix::net::listen(&fd, 64)?;
        Ok(Self { fd })
    }

    /// Takes the next connection; waits for it.
    pub fn accept(&self) -> io::Result<Seqpacket> {
        loop {
            match rustix::net::accept_with(&self.fd, SocketFlags::CLOEXEC) {
                Ok(fd) => return Ok(Seqpacket { fd }),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits until a connection can be accepted; false when the time is over.
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<bool> {
        crate::wait_readable(self.fd.as_fd(), timeout)
    }
}

impl AsFd for SeqpacketListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn messages_keep_their_borders_and_their_descriptors() {
        let (left, right) = Seqpacket::pair().unwrap();
        let file = crate::memory::sealed_memfd("one", b"content").unwrap();
        left.send(b"first", &[file.as_fd(), file.as_fd()]).unwrap();
        left.send(b"second", &[]).unwrap();
        let first = right.receive(64, 4).unwrap().unwrap();
        assert_eq!(first.bytes, b"first");
        assert_eq!(first.descriptors.len(), 2);
        let flags = rustix::io::fcntl_getfd(&first.descriptors[0]).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        let mut text = [0; 7];
        rustix::io::pread(&first.descriptors[1], &mut text, 0).unwrap();
        assert_eq!(&text, b"content");
        assert_eq!(right.receive(64, 4).unwrap().unwrap().bytes, b"second");
        drop(left);
        assert!(right.receive(64, 4).unwrap().is_none());
    }

    #[test]
    fn too_much_is_refused_and_not_cut_silently() {
        let (left, right) = Seqpacket::pair().unwrap();
        let file = crate::memory::memfd("one").unwrap();
        left.send(b"too long", &[]).unwrap();
        assert_eq!(right.receive(4, 0).unwrap_err().kind(), io::ErrorKind::InvalidData);
        left.send(b"x", &[file.as_fd(), file.as_fd()]).unwrap();
        assert_eq!(right.receive(4, 1).unwrap_err().kind(), io::ErrorKind::InvalidData);
        let many = vec![file.as_fd(); MAX_DESCRIPTORS];
        left.send(b"x", &many).unwrap();
        let message = right.receive(4, MAX_DESCRIPTORS).unwrap().unwrap();
        assert_eq!(message.descriptors.len(), MAX_DESCRIPTORS);
        let more = vec![file.as_fd(); MAX_DESCRIPTORS + 1];
        assert!(left.send(b"x", &more).is_err());
        assert!(left.send(b"", &[]).is_err());
    }

    #[test]
    fn a_listener_knows_its_peers_and_keeps_others_out() {
        let folder = tempfile::tempdir().unwrap();
        let long = folder.path().join("a".repeat(120));
        std::fs::create_dir(&long).unwrap();
        for path in [folder.path().join("short.sock"), long.join("long.sock")] {
            let listener = SeqpacketListener::bind(&path).unwrap();
            assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
            let client = Seqpacket::connect(&path).unwrap();
            let served = listener.accept().unwrap();
            assert_eq!(served.peer().unwrap().pid, std::process::id() as i32);
            assert_eq!(client.peer().unwrap().uid, 0);
            client.send(b"hello", &[]).unwrap();
            assert!(served.wait(Some(Duration::from_secs(10))).unwrap());
            assert_eq!(served.receive(16, 0).unwrap().unwrap().bytes, b"hello");
            let again = SeqpacketListener::bind(&path).unwrap_err();
            assert_eq!(again.kind(), io::ErrorKind::AddrInUse);
            drop(listener);
            let refused = Seqpacket::connect(&path).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        }
    }

    #[test]
    fn a_timeout_ends_a_receive() {
        let (left, _right) = Seqpacket::pair().unwrap();
        left.set_timeout(Some(Duration::from_millis(10))).unwrap();
        assert_eq!(left.receive(4, 0).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert!(!left.wait(Some(Duration::from_millis(1))).unwrap());
    }
}
