//! Connecting to a peer that listens, or soon will.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use socket2::{Domain, Protocol, Socket, Type};

use super::catalyst_channel::CatalystChannel;
use super::channel::{Channel, Liveness};
use super::decoder::Decoder;
use super::wait::wait;
use crate::error::{Result, TransportError};

const STAGE: &str = "connecting to the peer";

/// Shortest and longest pause before all addresses are tried once more.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(50));

/// How long one address may take in the first turn; each turn doubles it. So an address that swallows packets does
/// not use up the time of those after it, and a slow one gets its time in the end.
const FIRST_ATTEMPT: Duration = Duration::from_secs(1);
/// No attempt lasts longer: the kernel itself gives up after about two minutes.
const LONGEST_ATTEMPT: Duration = Duration::from_secs(120);

/// Connects to a peer by name or address: `controller-7`, `10.9.0.1`, `::1`, `[::1]`, `fe80::1%eth0`.
///
/// Every address of a name is tried in turn, and all of them again until the deadline, because the peer may be started
/// after us. With `bind` the connection leaves from that address of this machine, and only addresses of its family are
/// tried. Resolving a *name* may outlast the deadline by the time that the resolver takes; an address does not.
///
/// # Errors
///
/// - [`TransportError::Timeout`] at the deadline, with each address tried, its last error and what to do about it;
/// - [`TransportError::System`] for an error that time does not heal, such as a local address that is not here;
/// - [`TransportError::Invalid`] if the peer has no address of the family of `bind`, or the port is 0.
pub(crate) fn connect(
    peer: &str,
    port: u16,
    bind: Option<IpAddr>,
    deadline: Instant,
    liveness: Liveness,
) -> Result<Channel> {
    let (stream, peer) = dial(peer, port, bind, deadline)?;
    Channel::resume(stream, peer, Decoder::new(), liveness)
}

/// [`connect`] to a peer that speaks the Catalyst wire format.
pub(crate) fn connect_catalyst(
    peer: &str,
    port: u16,
    bind: Option<IpAddr>,
    deadline: Instant,
    liveness: Liveness,
) -> Result<CatalystChannel> {
    let (stream, peer) = dial(peer, port, bind, deadline)?;
    CatalystChannel::new(stream, peer, liveness)
}

/// The connection alone, and the peer's address.
fn dial(peer: &str, port: u16, bind: Option<IpAddr>, deadline: Instant) -> Result<(TcpStream, SocketAddr)> {
    let began = Instant::now();
    if port == 0 {
        return Err(TransportError::invalid(
            format!("port of the peer {peer}"),
            "is 0: name the port that it listens on",
        ));
    }
    let mut addresses: Vec<(SocketAddr, Option<io::Error>)> = Vec::new();
    let (mut pause, mut limit) = (PAUSES.0, FIRST_ATTEMPT);
    loop {
        let mut unresolved = None;
        if addresses.is_empty() {
            match resolve(peer, port) {
                Ok(all) => addresses = of_family(peer, all, bind)?.into_iter().map(|address| (address, None)).collect(),
                Err(error) if error.kind() == ErrorKind::InvalidInput => {
                    return Err(TransportError::invalid(format!("peer {peer:?}"), error.to_string()));
                }
                Err(error) => unresolved = Some(error),
            }
        }
        for (address, last) in &mut addresses {
            let until = deadline.min(Instant::now() + limit);
            match attempt(*address, bind.map(|ip| local(ip, *address)), until) {
                Ok(connected) => return Ok(connected),
                Err(error) => *last = Some(error),
            }
        }
        if !addresses.is_empty()
            && addresses.iter().all(|(_, last)| last.as_ref().is_some_and(|error| is_lasting(error, bind.is_some())))
        {
            return Err(lasting(bind, &mut addresses));
        }
        let now = Instant::now();
        if now >= deadline {
            let waited = began.elapsed();
            let hint = unresolved.map_or_else(|| tried(&addresses), |error| unresolvable(peer, &error));
            return Err(TransportError::Timeout { stage: STAGE, waited, hint });
        }
        thread::sleep(pause.min(deadline - now));
        pause = (pause * 3 / 2).min(PAUSES.1);
        limit = (limit * 2).min(LONGEST_ATTEMPT);
    }
}

/// The addresses of a host, without those that occur twice. Brackets are taken off, scopes are understood.
///
/// # Errors
///
/// What the resolver says; a host without any address counts as not found.
pub(super) fn resolve(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    if bare.is_empty() {
        // The resolver takes the empty name for this machine, which is seldom what was meant.
        return Err(io::Error::new(ErrorKind::InvalidInput, "the name is empty"));
    }
    let mut addresses = Vec::new();
    for address in (bare, port).to_socket_addrs()? {
        if !addresses.contains(&address) {
            addresses.push(address);
        }
    }
    if addresses.is_empty() {
        return Err(io::Error::new(ErrorKind::NotFound, "it has no address"));
    }
    Ok(addresses)
}

/// What to tell of a name that has no address.
pub(super) fn unresolvable(host: &str, error: &io::Error) -> String {
    format!("the name {host} cannot be resolved ({error}): is it spelled right, or can its address be given instead?")
}

fn of_family(peer: &str, mut addresses: Vec<SocketAddr>, bind: Option<IpAddr>) -> Result<Vec<SocketAddr>> {
    if let Some(ip) = bind {
        let all = list(addresses.iter());
        addresses.retain(|address| address.is_ipv4() == ip.is_ipv4());
        if addresses.is_empty() {
            let problem = format!("is of another family than every address of the peer {peer} ({all})");
            return Err(TransportError::invalid(format!("local address {ip}"), problem));
        }
    }
    Ok(addresses)
}

/// The local end for a peer's address; a link-local one needs the peer's scope to be complete.
fn local(ip: IpAddr, peer: SocketAddr) -> SocketAddr {
    let mut address = SocketAddr::new(ip, 0);
    if let (SocketAddr::V6(address), SocketAddr::V6(peer)) = (&mut address, peer)
        && address.ip().is_unicast_link_local()
    {
        address.set_scope_id(peer.scope_id());
    }
    address
}

/// One attempt at one address.
fn attempt(peer: SocketAddr, local: Option<SocketAddr>, deadline: Instant) -> io::Result<(TcpStream, SocketAddr)> {
    let socket = Socket::new(Domain::for_address(peer), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    if let Some(local) = local {
        socket.bind(&local.into())?;
    }
    match socket.connect(&peer.into()) {
        Ok(()) => {}
        // A connect that a signal interrupts goes on in the background, as a non-blocking one does.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EINPROGRESS | libc::EINTR)) => {
            if !wait(&mut [PollFd::new(&socket, PollFlags::OUT)], Some(deadline))? {
                return Err(io::Error::from_raw_os_error(libc::ETIMEDOUT));
            }
            if let Some(error) = socket.take_error()? {
                return Err(error);
            }
        }
        Err(error) => return Err(error),
    }
    let stream = TcpStream::from(socket);
    // Linux picks the source port from the range in which the peer's port may lie too. If they coincide on this
    // machine while nobody listens, the socket connects to itself, and would then keep the peer from its port.
    let connected = stream.peer_addr()?;
    if stream.local_addr()? == connected {
        // Without lingering, or the port would stay taken for a minute.
        socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO))?;
        return Err(io::Error::from_raw_os_error(libc::ECONNREFUSED));
    }
    Ok((stream, connected))
}

/// Whether an error stays, however often one tries. Without a local address of the caller's own choice, one that is
/// not available means that all ports are in use, which passes.
fn is_lasting(error: &io::Error, bound: bool) -> bool {
    match error.raw_os_error() {
        Some(libc::EADDRNOTAVAIL) => bound,
        other => matches!(
            other,
            Some(libc::EACCES | libc::EPERM | libc::EAFNOSUPPORT | libc::EINVAL | libc::EMFILE | libc::ENFILE)
        ),
    }
}

/// The error when no address can ever work.
fn lasting(bind: Option<IpAddr>, addresses: &mut [(SocketAddr, Option<io::Error>)]) -> TransportError {
    let what = tried(addresses);
    let error = addresses[0].1.take().unwrap_or_else(|| ErrorKind::Other.into());
    let remedy = match (error.raw_os_error(), bind) {
        (Some(libc::EADDRNOTAVAIL), Some(ip)) => {
            format!("no interface of this machine has the local address {ip} (`ip address` lists them)")
        }
        (Some(libc::EACCES | libc::EPERM), _) => "a firewall or sandbox on this machine forbids it".into(),
        (Some(libc::EAFNOSUPPORT), _) => {
            "this machine has no such address family: use another address of the peer".into()
        }
        (Some(libc::EINVAL), _) => "a link-local address needs its interface, as in fe80::1%eth0".into(),
        (Some(libc::EMFILE | libc::ENFILE), _) => "raise the limit on open files (`ulimit -n`)".into(),
        _ => String::new(),
    };
    TransportError::system("connect", what, error).with_remedy(remedy)
}

/// Each address with its last error, and what to do about the first of them.
fn tried(addresses: &[(SocketAddr, Option<io::Error>)]) -> String {
    let each = addresses.iter().map(|(address, error)| match error {
        Some(error) => format!("{address}: {error}"),
        None => format!("{address}: not tried"),
    });
    let port = addresses.first().map_or(0, |(address, _)| address.port());
    let advice = addresses.iter().find_map(|(_, error)| match error.as_ref()?.raw_os_error()? {
        libc::ECONNREFUSED => Some(format!("is the coprocessor running and listening on port {port}?")),
        libc::EHOSTUNREACH | libc::ENETUNREACH => Some("is the address right, and is there a route to it?".into()),
        libc::EADDRNOTAVAIL => Some("this machine has no free port, or no address of this family".into()),
        libc::ETIMEDOUT => Some(format!("is its host up, and does no firewall drop TCP port {port}?")),
        _ => None,
    });
    let mut text = format!("tried {}", list(each));
    if let Some(advice) = advice {
        text = format!("{text}: {advice}");
    }
    text
}

fn list(items: impl Iterator<Item = impl ToString>) -> String {
    items.map(|item| item.to_string()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests;
