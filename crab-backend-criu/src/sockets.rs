//! Sockets as the kernel lists them. Around a restore two things of TCP are not as they were at the dump:
//!
//! - The killed processes' connections linger in the kernel for a minute, and their addresses with them: they are
//!   ended before CRIU wants the addresses.
//! - A restored connection whose other end is outside the sandbox has nobody to talk to, and whoever reads from it
//!   would wait for ever: it is reset before any task runs. One whose two ends were both restored goes on.
//!
//! Before a dump, each Unix socket's other end is asked for, to see whether the host holds it.
//!
//! All are asked of the kernel by `sock_diag` in the sandbox's network namespace, from a thread of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink};
use rustix::thread::LinkNameSpaceType;

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLM_F_DUMP: u16 = 0x300;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const TCP: u8 = 6;
const INET: u8 = 2;
const INET6: u8 = 10;
const UNIX: u8 = 1;
/// `UDIAG_SHOW_PEER`.
const SHOW_PEER: u32 = 4;
const UNIX_DIAG_PEER: u16 = 2;
/// `struct nlmsghdr`.
const HEADER: usize = 16;
/// `struct inet_diag_msg`.
const MESSAGE: usize = 72;
/// `struct inet_diag_sockid`: ports, addresses, interface, cookie.
type Id = [u8; 48];

/// States of `enum` in the kernel's `tcp_states.h` that this file tells apart.
const SYN_RECV: u8 = 3;
const CLOSE: u8 = 7;
const LISTEN: u8 = 10;
const NEW_SYN_RECV: u8 = 12;

/// One TCP socket of a network namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Socket {
    family: u8,
    state: u8,
    id: Id,
    /// Zero where no process holds it.
    inode: u32,
}

/// An address and a port; IPv4 as the IPv6 address that stands for it.
type End = ([u8; 16], [u8; 2]);

impl Socket {
    fn is_connection(&self) -> bool {
        !matches!(self.state, SYN_RECV | CLOSE | LISTEN | NEW_SYN_RECV)
    }

    fn ends(&self) -> (End, End) {
        let bytes = |at: usize, out: &mut [u8]| {
            for (to, from) in out.iter_mut().zip(self.id.iter().skip(at)) {
                *to = *from;
            }
        };
        let end = |port_at: usize, address_at: usize| {
            let (mut address, mut port) = ([0; 16], [0; 2]);
            bytes(port_at, &mut port);
            bytes(address_at, &mut address);
            if self.family == INET {
                let [a, b, c, d, ..] = address;
                address = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d];
            }
            (address, port)
        };
        (end(0, 4), end(2, 20))
    }
}

/// Ends the connections in a network namespace that no process holds any more.
pub(crate) fn clear_lingering(namespace: impl AsFd) -> io::Result<usize> {
    inside(namespace.as_fd(), |diag| {
        let sockets = list(diag)?;
        Ok(destroy(diag, sockets.iter().filter(|socket| socket.is_connection() && socket.inode == 0)))
    })
}

/// The Unix sockets of a network namespace, each with its other end, or zero where it has none or nobody accepted it yet.
pub(crate) fn unix_peers(namespace: impl AsFd) -> io::Result<BTreeMap<u64, u64>> {
    inside(namespace.as_fd(), |diag| {
        let mut bytes = vec![0; 4];
        bytes.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
        bytes.extend((NLM_F_REQUEST | NLM_F_DUMP).to_ne_bytes());
        bytes.extend([0; 8]);
        // Family, protocol, padding; all states; any inode; with the peers; any cookie.
        bytes.extend([UNIX, 0, 0, 0]);
        for word in [u32::MAX, 0, SHOW_PEER, u32::MAX, u32::MAX] {
            bytes.extend(word.to_ne_bytes());
        }
        let length = u32::try_from(bytes.len()).unwrap_or_default().to_ne_bytes();
        bytes.splice(0..4, length);
        rustix::net::send(diag, &bytes, SendFlags::empty())?;
        let mut peers = BTreeMap::new();
        while !receive(diag, |datagram| {
            walk(datagram, |body| {
                if let Some((inode, peer)) = unix_socket(body) {
                    peers.insert(inode, peer);
                }
                Ok(())
            })
        })? {}
        Ok(peers)
    })
}

/// `struct unix_diag_msg` and its attributes.
fn unix_socket(body: &[u8]) -> Option<(u64, u64)> {
    if *body.first()? != UNIX {
        return None;
    }
    let inode = u64::from(u32::from_ne_bytes(field(body, 4)?));
    let (mut rest, mut peer) = (body.get(16..)?, 0);
    while let (Some(length), Some(kind)) = (field(rest, 0), field(rest, 2)) {
        let length = usize::from(u16::from_ne_bytes(length));
        if u16::from_ne_bytes(kind) == UNIX_DIAG_PEER {
            peer = u64::from(u32::from_ne_bytes(field(rest, 4)?));
        }
        rest = rest.get(length.max(4).next_multiple_of(4)..).unwrap_or_default();
    }
    Some((inode, peer))
}

/// Resets the connections of the processes that hold `held` whose other end none of them holds.
pub(crate) fn reset_strays(namespace: impl AsFd, held: &BTreeSet<u64>) -> io::Result<usize> {
    inside(namespace.as_fd(), |diag| {
        let sockets = list(diag)?;
        Ok(destroy(diag, strays(&sockets, held)))
    })
}

fn strays<'a>(sockets: &'a [Socket], held: &BTreeSet<u64>) -> impl Iterator<Item = &'a Socket> {
    let own: Vec<&Socket> =
        sockets.iter().filter(|s| s.is_connection() && held.contains(&u64::from(s.inode))).collect();
    let ends: BTreeSet<(End, End)> = own.iter().map(|socket| socket.ends()).collect();
    own.into_iter().filter(move |socket| {
        let (here, there) = socket.ends();
        !ends.contains(&(there, here))
    })
}

/// Runs `work` in a network namespace. The thread that has entered it ends with this.
fn inside<T: Send>(namespace: BorrowedFd<'_>, work: impl FnOnce(&OwnedFd) -> io::Result<T> + Send) -> io::Result<T> {
    let enter = || {
        rustix::thread::move_into_link_name_space(namespace, Some(LinkNameSpaceType::Network))?;
        let diag = rustix::net::socket_with(
            AddressFamily::NETLINK,
            SocketType::DGRAM,
            SocketFlags::CLOEXEC,
            Some(netlink::SOCK_DIAG),
        )?;
        work(&diag)
    };
    std::thread::scope(|scope| {
        let joined = scope.spawn(enter).join();
        joined.unwrap_or_else(|_| Err(io::Error::other("the thread in the network namespace ended")))
    })
}

fn request(kind: u16, flags: u16, family: u8, id: &Id) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER + 8 + id.len());
    // The length goes here.
    bytes.extend([0; 4]);
    bytes.extend(kind.to_ne_bytes());
    bytes.extend((NLM_F_REQUEST | flags).to_ne_bytes());
    bytes.extend([0; 8]);
    // Family, protocol, no extensions, all states.
    bytes.extend([family, TCP, 0, 0]);
    bytes.extend(u32::MAX.to_ne_bytes());
    bytes.extend(id);
    let length = u32::try_from(bytes.len()).unwrap_or_default().to_ne_bytes();
    bytes.splice(0..4, length);
    bytes
}

/// All TCP sockets of the namespace.
fn list(diag: &OwnedFd) -> io::Result<Vec<Socket>> {
    let mut sockets = Vec::new();
    for family in [INET, INET6] {
        rustix::net::send(diag, &request(SOCK_DIAG_BY_FAMILY, NLM_F_DUMP, family, &[0; 48]), SendFlags::empty())?;
        while !read(diag, &mut sockets)? {}
    }
    Ok(sockets)
}

/// Ends each, and says how many went. Some may have gone by themselves.
fn destroy<'a>(diag: &OwnedFd, sockets: impl Iterator<Item = &'a Socket>) -> usize {
    let one = |socket: &Socket| {
        let bytes = request(SOCK_DESTROY, NLM_F_ACK, socket.family, &socket.id);
        rustix::net::send(diag, &bytes, SendFlags::empty())?;
        read(diag, &mut Vec::new()).map(drop)
    };
    let outcomes = sockets.map(|socket| one(socket).inspect_err(|error| tracing::debug!(%error, "not destroyed")));
    outcomes.filter(Result::is_ok).count()
}

/// Reads one datagram of TCP sockets. True where the answer is complete.
fn read(diag: &OwnedFd, sockets: &mut Vec<Socket>) -> io::Result<bool> {
    receive(diag, |datagram| parse(datagram, sockets))
}

fn receive<T>(diag: &OwnedFd, parse: impl FnOnce(&[u8]) -> io::Result<T>) -> io::Result<T> {
    let mut buffer = vec![0_u8; 64 << 10];
    loop {
        match rustix::net::recv(diag, &mut buffer[..], RecvFlags::empty()) {
            Ok((length, _)) => return parse(buffer.get(..length).unwrap_or_default()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn short() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "a netlink message is cut short")
}

fn field<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

fn parse(bytes: &[u8], sockets: &mut Vec<Socket>) -> io::Result<bool> {
    walk(bytes, |body| {
        if body.len() >= MESSAGE {
            let [family, state, ..] = *body else { return Err(short()) };
            let id = field(body, 4).ok_or_else(short)?;
            let inode = field(body, 68).map(u32::from_ne_bytes).ok_or_else(short)?;
            sockets.push(Socket { family, state, id, inode });
        }
        Ok(())
    })
}

/// Shows the messages about sockets in a datagram. True where the answer is complete.
fn walk(mut bytes: &[u8], mut show: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<bool> {
    while !bytes.is_empty() {
        let length = field(bytes, 0).map(u32::from_ne_bytes).and_then(|n| usize::try_from(n).ok()).ok_or_else(short)?;
        let message = bytes.get(..length).filter(|message| message.len() >= HEADER).ok_or_else(short)?;
        let body = message.get(HEADER..).unwrap_or_default();
        match field(message, 4).map(u16::from_ne_bytes).ok_or_else(short)? {
            NLMSG_DONE => return Ok(true),
            NLMSG_ERROR => {
                let code = field(body, 0).map(i32::from_ne_bytes).ok_or_else(short)?;
                return if code == 0 { Ok(true) } else { Err(io::Error::from_raw_os_error(code.saturating_neg())) };
            }
            SOCK_DIAG_BY_FAMILY => show(body)?,
            _ => {}
        }
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::MetadataExt;

    fn socket(inode: u32, here: u16, there: u16) -> Socket {
        let mut id = [0; 48];
        id[..2].copy_from_slice(&here.to_be_bytes());
        id[2..4].copy_from_slice(&there.to_be_bytes());
        id[4..8].copy_from_slice(&[127, 0, 0, 1]);
        id[20..24].copy_from_slice(&[127, 0, 0, 1]);
        Socket { family: INET, state: 1, id, inode }
    }

    #[test]
    fn only_connections_without_their_other_end_are_strays() {
        let inside = [socket(1, 80, 5000), socket(2, 5000, 80)];
        let outside = [socket(3, 80, 6000), socket(4, 6000, 80)];
        let all = [inside, outside].concat();
        let found: Vec<u32> = strays(&all, &BTreeSet::from([1, 2, 3])).map(|s| s.inode).collect();
        assert_eq!(found, [3]);
    }

    #[test]
    fn an_ipv4_peer_of_an_ipv6_socket_is_its_other_end() {
        let four = socket(1, 80, 5000);
        let mut six = socket(2, 5000, 80);
        six.family = INET6;
        for at in [4, 20] {
            six.id[at..at + 16].copy_from_slice(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, 1]);
        }
        assert_eq!(strays(&[four, six], &BTreeSet::from([1, 2])).count(), 0);
    }

    #[test]
    fn the_kernel_lists_a_connection_of_this_process() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let inode = std::fs::metadata(format!("/proc/self/fd/{}", client.as_raw_fd())).unwrap().ino();
        let namespace = std::fs::File::open("/proc/self/ns/net").unwrap();
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let sockets = inside(namespace.as_fd(), list).unwrap();
        let found = sockets.iter().find(|socket| u64::from(socket.inode) == inode).expect("it is listed");
        assert!(found.is_connection());
        assert_eq!(found.ends().1.1, listener.local_addr().unwrap().port().to_be_bytes());
    }

    #[test]
    fn the_ends_of_a_socket_pair_are_each_others_peers() {
        use std::os::unix::net::{UnixListener, UnixStream};
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let inode =
            |socket: &dyn AsRawFd| std::fs::metadata(format!("/proc/self/fd/{}", socket.as_raw_fd())).unwrap().ino();
        let (one, other) = UnixStream::pair().unwrap();
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("socket")).unwrap();
        let waiting = UnixStream::connect(directory.path().join("socket")).unwrap();
        let peers = unix_peers(std::fs::File::open("/proc/thread-self/ns/net").unwrap()).unwrap();
        assert_eq!(peers[&inode(&one)], inode(&other));
        assert_eq!(peers[&inode(&other)], inode(&one));
        assert_eq!(peers[&inode(&waiting)], 0, "nobody accepted it yet");
        assert_eq!(peers[&inode(&listener)], 0);
    }

    proptest! {
        #[test]
        fn no_message_makes_the_reader_panic(bytes: Vec<u8>, kind in 0_u16..25) {
            let _ = parse(&bytes, &mut Vec::new());
            let _ = unix_socket(&bytes);
            let mut framed = u32::try_from(bytes.len() + HEADER).unwrap().to_ne_bytes().to_vec();
            framed.extend(kind.to_ne_bytes());
            framed.extend([0; 10]);
            framed.extend(bytes);
            let _ = parse(&framed, &mut Vec::new());
        }
    }
}
