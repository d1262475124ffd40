//! Datagrams that were meant for somebody else: where they were sent.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsRawFd, BorrowedFd};

/// Makes every datagram of a socket tell where it was sent.
pub fn tell_destinations(socket: BorrowedFd<'_>) -> io::Result<()> {
    let on: libc::c_int = 1;
    // SAFETY: the option reads one integer, which outlives the call.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_IP,
            libc::IP_RECVORIGDSTADDR,
            (&raw const on).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// A datagram and its two ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// Bytes of it that are in the buffer.
    pub length: usize,
    /// Who sent it.
    pub from: SocketAddrV4,
    /// Where it was sent.
    pub to: SocketAddrV4,
}

/// Takes the next datagram of an IPv4 socket with [`tell_destinations`].
pub fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<Received> {
    #[repr(C, align(8))]
    struct Control([u8; 128]);
    let mut control = Control([0; 128]);
    // SAFETY: plain C structures; all zero is valid for both.
    let (mut from, mut message): (libc::sockaddr_in, libc::msghdr) = unsafe { std::mem::zeroed() };
    let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    message.msg_name = (&raw mut from).cast();
    message.msg_namelen = size_of::<libc::sockaddr_in>() as libc::socklen_t;
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = control.0.len();
    // SAFETY: every pointer of the message is to something that outlives the call, with its true length.
    let length = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, 0) };
    let length = usize::try_from(length).map_err(|_| io::Error::last_os_error())?;
    // SAFETY: the kernel has filled the control buffer; the macros stay within its length.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    while !header.is_null() {
        // SAFETY: a header that the macros answer lies whole in the buffer.
        let known = unsafe { &*header };
        if known.cmsg_level == libc::SOL_IP && known.cmsg_type == libc::IP_ORIGDSTADDR {
            // SAFETY: the kernel puts a sockaddr_in here; it may lie at any address.
            let to =
                unsafe { libc::CMSG_DATA(header).cast::<libc::sockaddr_in>().read_unaligned() };
            return Ok(Received { length, from: address(&from), to: address(&to) });
        }
        // SAFETY: as above; the last header is followed by null.
        header = unsafe { libc::CMSG_NXTHDR(&raw const message, header) };
    }
    Err(io::Error::new(io::ErrorKind::InvalidData, "a datagram does not tell where it was sent"))
}

fn address(address: &libc::sockaddr_in) -> SocketAddrV4 {
    let ip = Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr));
    SocketAddrV4::new(ip, u16::from_be(address.sin_port))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;
    use std::os::fd::AsFd;

    #[test]
    fn a_datagram_tells_where_it_was_sent() {
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        tell_destinations(socket.as_fd()).unwrap();
        let port = socket.local_addr().unwrap().port();
        let client = UdpSocket::bind("127.0.0.1:0").unwrap();
        client.send_to(b"abc", ("127.0.0.9", port)).unwrap();
        let mut buffer = [0; 2];
        let received = receive(socket.as_fd(), &mut buffer).unwrap();
        assert_eq!(received.to, SocketAddrV4::new(Ipv4Addr::new(127, 0, 0, 9), port));
        assert_eq!(received.from.port(), client.local_addr().unwrap().port());
        assert_eq!((received.length, &buffer), (2, b"ab"));
    }
}
