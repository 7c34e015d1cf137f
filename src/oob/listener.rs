//! Listening for a peer.
//!
//! A port is open to all: scanners, health checks, browsers, peers of another version, peers that die half-way.
//! None of them may end the wait for the right one, or hold it up. So the clients are read side by side, each into
//! its own buffer and until its own deadline.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use socket2::{Domain, Protocol, Socket, Type};

use super::catalyst_channel::CatalystChannel;
use super::channel::{Channel, Liveness, canonical};
use super::decoder::Decoder;
use super::dial::{resolve, unresolvable};
use super::message::{Challenge, Hello, Kind, Message, Role};
use super::seal::Seal;
use super::wait::wait;
use crate::error::{Result, TransportError};
use crate::key::PreSharedKey;
use crate::random::random;

const STAGE: &str = "waiting for a client";

/// Most clients that are read side by side. One more, and the oldest has to go.
const MOST_PENDING: usize = 64;

/// What a client without a key is told where there is one, and one with a key where there is none.
const KEY_MISSING_THERE: &str = "this coprocessor has a pre-shared key and the controller has shown none: set the same one there \
    (SessionConfig::pre_shared_key, psk_file= or psk_env=)";
const KEY_MISSING_HERE: &str = "the controller has a pre-shared key and this coprocessor has none: set the same one here \
    (SessionConfig::pre_shared_key, psk_file= or psk_env=), or none there";

/// Clients that the kernel keeps ready while nobody accepts.
const BACKLOG: i32 = 128;

/// How to wait for a client.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Acceptance<'a> {
    /// When to give up; `None` is never, and allowed only with `cancel`.
    pub(crate) deadline: Option<Instant>,
    /// The key that a client has to have; `None` takes those that have none.
    pub(crate) key: Option<&'a PreSharedKey>,
    /// How long a client may take from its connection to the last byte of its hello.
    pub(crate) step: Duration,
    /// How soon the loss of the accepted client's host has to be noticed.
    pub(crate) liveness: Liveness,
    /// Ends the wait as soon as it is readable (a pipe, an eventfd). It is not read from.
    pub(crate) cancel: Option<BorrowedFd<'a>>,
}

/// A socket that listens for peers.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: Socket,
    local: SocketAddr,
}

/// A client that has not said hello yet.
struct Pending {
    stream: TcpStream,
    peer: SocketAddr,
    decoder: Decoder,
    /// The kind of its next message: a hello, or with a key first a challenge, then a proof.
    awaited: Kind,
    deadline: Instant,
}

/// What a read from a pending client has led to.
enum Step {
    /// Its hello is not complete.
    Wait,
    /// Its hello is complete and in order.
    Greeted(Hello),
    /// It is to be dropped for this reason.
    Drop(String),
    /// It is to be told this reason, for the session with this number, and dropped.
    Refuse(u32, String),
}

impl Listener {
    /// Listens at an address of this machine, by number or name (`0.0.0.0`, `::`, `[::1]`, `fe80::1%eth0`); the
    /// first address of a name that works is taken. `::` takes IPv4 clients as well. Port 0 takes a free one: see
    /// [`local_addr`](Self::local_addr).
    ///
    /// # Errors
    ///
    /// [`TransportError::System`] from `bind` or `listen`, naming address, port and remedy;
    /// [`TransportError::Invalid`] for a name that cannot be resolved.
    pub(crate) fn bind(address: &str, port: u16) -> Result<Self> {
        let addresses = resolve(address, port).map_err(|error| {
            TransportError::invalid(format!("listening address {address:?}"), unresolvable(address, &error))
        })?;
        let mut failure = None;
        for address in addresses {
            match Self::bind_to(address) {
                Ok(listener) => return Ok(listener),
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        Err(failure.unwrap_or_else(|| TransportError::invalid("listening address", "has no number")))
    }

    fn bind_to(address: SocketAddr) -> Result<Self> {
        let failed = |call| move |error: io::Error| system(call, address, &error);
        let socket =
            Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP)).map_err(failed("socket"))?;
        // A restart must not wait for the connections of its predecessor to leave TIME_WAIT. On Linux this does not
        // let two processes listen on one port.
        socket.set_reuse_address(true).map_err(failed("setsockopt(SO_REUSEADDR)"))?;
        if address.is_ipv6() && address.ip().is_unspecified() {
            socket.set_only_v6(false).map_err(failed("setsockopt(IPV6_V6ONLY)"))?;
        }
        socket.set_nonblocking(true).map_err(failed("ioctl(FIONBIO)"))?;
        socket.bind(&address.into()).map_err(failed("bind"))?;
        socket.listen(BACKLOG).map_err(failed("listen"))?;
        let local = socket.local_addr().map_err(failed("getsockname"))?.as_socket().unwrap_or(address);
        Ok(Self { socket, local })
    }

    /// The address it listens at, with the real port.
    pub(crate) fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Waits for the first client that completes a valid hello which `check` accepts.
    ///
    /// A stranger is dropped without a word. A client that speaks the protocol, but another version of it, or not
    /// properly, or whose hello `check` refuses, is told why and dropped. The wait goes on after each of them. Clients
    /// that have begun their hello when another is accepted are told that it came first.
    ///
    /// # Errors
    ///
    /// - [`TransportError::Timeout`] at the deadline, saying who came and why it was not the one;
    /// - [`TransportError::Engine`] when `cancel` becomes readable;
    /// - [`TransportError::Invalid`] with neither deadline nor `cancel`;
    /// - [`TransportError::System`] if this machine cannot accept, for want of file descriptors or memory.
    pub(crate) fn accept_hello(
        &self,
        how: &Acceptance<'_>,
        check: &mut dyn FnMut(&Hello) -> Result<(), String>,
    ) -> Result<(Channel, Hello)> {
        if how.deadline.is_none() && how.cancel.is_none() {
            return Err(TransportError::invalid(
                "waiting for a client",
                "needs a deadline, or a descriptor that can cancel it",
            ));
        }
        let began = Instant::now();
        let mut pending: Vec<Pending> = Vec::new();
        let mut dropped = Dropped::default();
        loop {
            let step = pending.iter().map(|client| client.deadline).min();
            let until = [how.deadline, step].into_iter().flatten().min();
            let ready = self.poll(&pending, how.cancel, until)?;
            if ready.cancelled {
                return Err(self.cancelled());
            }

            // The clients first, so that one that is complete is served before it could be crowded out.
            let mut index = 0;
            for readable in ready.clients {
                let client = &mut pending[index];
                let step = if readable { client.step(check) } else { Step::Wait };
                match step {
                    Step::Wait if Instant::now() < client.deadline => index += 1,
                    Step::Wait => dropped.note(&pending.remove(index), &overdue(how.step)),
                    Step::Drop(reason) => dropped.note(&pending.remove(index), &reason),
                    Step::Refuse(session, reason) => {
                        let mut client = pending.remove(index);
                        client.refuse(session, &reason);
                        dropped.note(&client, &reason);
                    }
                    Step::Greeted(hello) => {
                        let Pending { stream, peer, decoder, .. } = pending.remove(index);
                        match Channel::resume(stream, peer, decoder, how.liveness) {
                            Ok(mut channel) => {
                                channel.greet(&hello);
                                // Who has begun in our protocol learns why it ends; a stranger hears nothing.
                                let begun = pending.iter_mut().filter(|late| late.decoder.has_begun());
                                begun.for_each(|late| late.refuse(0, "another client was served first"));
                                return Ok((channel, hello));
                            }
                            Err(error) => dropped.note_peer(peer, &error.to_string()),
                        }
                    }
                }
            }

            if ready.listener {
                self.accept_all(&mut pending, how, &mut dropped)?;
            }
            if how.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                let hint = dropped.hint(self.local, pending.len());
                return Err(TransportError::Timeout { stage: STAGE, waited: began.elapsed(), hint });
            }
        }
    }

    /// Waits for the next client, whoever it is: on the Catalyst wire a client says nothing before it has been spoken to.
    ///
    /// # Errors
    ///
    /// Those of [`accept_hello`](Self::accept_hello).
    pub(crate) fn accept_any(&self, how: &Acceptance<'_>) -> Result<CatalystChannel> {
        if how.deadline.is_none() && how.cancel.is_none() {
            return Err(TransportError::invalid(
                "waiting for a client",
                "needs a deadline, or a descriptor that can cancel it",
            ));
        }
        let began = Instant::now();
        loop {
            if let Some(channel) = self.next_waiting(how.liveness)? {
                return Ok(channel);
            }
            if how.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                let hint = Dropped::default().hint(self.local, 0);
                return Err(TransportError::Timeout { stage: STAGE, waited: began.elapsed(), hint });
            }
            if self.poll(&[], how.cancel, how.deadline)?.cancelled {
                return Err(self.cancelled());
            }
        }
    }

    /// The next client that waits already, if there is one.
    ///
    /// # Errors
    ///
    /// [`TransportError::System`] if this machine cannot accept, for want of file descriptors or memory.
    pub(crate) fn next_waiting(&self, liveness: Liveness) -> Result<Option<CatalystChannel>> {
        loop {
            match self.socket.accept() {
                Ok((socket, peer)) => {
                    let Some(peer) = peer.as_socket() else { continue };
                    tracing::debug!(%peer, local = %self.local, "a client has connected");
                    match CatalystChannel::new(socket.into(), canonical(peer), liveness) {
                        Ok(channel) => return Ok(Some(channel)),
                        Err(error) => tracing::debug!(%peer, %error, "a client was dropped"),
                    }
                }
                Err(error) => match error.raw_os_error() {
                    Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM) => {
                        return Err(system("accept", self.local, &error));
                    }
                    // Nobody waits, or the one who did is gone again.
                    _ => return Ok(None),
                },
            }
        }
    }

    /// The error of a wait that was cancelled.
    pub(crate) fn cancelled(&self) -> TransportError {
        TransportError::Engine { problem: format!("waiting for a client at {} was cancelled", self.local) }
    }

    fn poll(&self, pending: &[Pending], cancel: Option<BorrowedFd<'_>>, until: Option<Instant>) -> Result<Ready> {
        let mut descriptors = Vec::with_capacity(2 + MOST_PENDING);
        descriptors.push(PollFd::new(&self.socket, PollFlags::IN));
        descriptors.extend(pending.iter().map(|client| PollFd::new(&client.stream, PollFlags::IN)));
        if let Some(cancel) = cancel {
            descriptors.push(PollFd::from_borrowed_fd(cancel, PollFlags::IN));
        }
        wait(&mut descriptors, until)
            .map_err(|errno| TransportError::system("poll", format!("the clients of {}", self.local), errno))?;
        let mut ready = descriptors.iter().map(|descriptor| !descriptor.revents().is_empty());
        let listener = ready.next().unwrap_or(false);
        let clients = ready.by_ref().take(pending.len()).collect();
        Ok(Ready { listener, clients, cancelled: ready.next().unwrap_or(false) })
    }

    /// Accepts whoever waits, as many as may be pending.
    fn accept_all(&self, pending: &mut Vec<Pending>, how: &Acceptance<'_>, dropped: &mut Dropped) -> Result<()> {
        for _ in 0..MOST_PENDING {
            match self.socket.accept() {
                Ok((socket, peer)) => {
                    // On Linux an accepted socket does not inherit that its listener is non-blocking.
                    let Some(peer) = peer.as_socket().filter(|_| socket.set_nonblocking(true).is_ok()) else {
                        continue;
                    };
                    tracing::debug!(%peer, local = %self.local, "a client has connected");
                    if pending.len() == MOST_PENDING {
                        dropped.note(&pending.remove(0), "it had to make room for later clients");
                    }
                    pending.push(Pending::new(socket.into(), peer, how));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => match error.raw_os_error() {
                    // Out of descriptors: those of pending clients can be had.
                    Some(libc::EMFILE | libc::ENFILE) if !pending.is_empty() => {
                        dropped.note(&pending.remove(0), "this process has no file descriptor left");
                    }
                    Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM) => {
                        return Err(system("accept", self.local, &error));
                    }
                    // accept(2): errors of the network of a client that is gone again come up here.
                    _ => tracing::debug!(local = %self.local, %error, "a client was gone before it was accepted"),
                },
            }
        }
        Ok(())
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

struct Ready {
    listener: bool,
    clients: Vec<bool>,
    cancelled: bool,
}

impl Pending {
    fn new(stream: TcpStream, peer: SocketAddr, how: &Acceptance<'_>) -> Self {
        let mut decoder = Decoder::new();
        if let Some(key) = how.key {
            decoder.set_seal(Seal::new(key, Role::Coprocessor));
        }
        let awaited = if how.key.is_some() { Kind::Challenge } else { Kind::Hello };
        Self { stream, peer, decoder, awaited, deadline: Instant::now() + how.step }
    }

    /// Reads once and judges what has come.
    fn step(&mut self, check: &mut dyn FnMut(&Hello) -> Result<(), String>) -> Step {
        let (there, needed) = self.decoder.progress();
        match self.decoder.fill(&mut self.stream) {
            Ok(0) => return Step::Drop(format!("it hung up after {there} of {needed} bytes of its hello")),
            Ok(_) => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => return Step::Wait,
            Err(error) => return Step::Drop(format!("after {there} of {needed} bytes of its hello: {error}")),
        }
        loop {
            let (session, message) = match self.decoder.next() {
                Ok(None) => return Step::Wait,
                Ok(Some(message)) => message,
                Err(problem) if problem.is_stranger() => return Step::Drop(problem.to_string()),
                Err(problem) => return Step::Refuse(0, problem.to_string()),
            };
            let kind = message.kind();
            if let Message::Error(text) = message {
                return Step::Drop(format!("it gave up: {text}"));
            }
            let for_session = if let Message::Hello(hello) = &message { hello.session } else { 0 };
            if kind != self.awaited {
                let reason = match (self.awaited, kind) {
                    (Kind::Challenge, Kind::Hello) => KEY_MISSING_THERE.into(),
                    (Kind::Hello, Kind::Challenge) => KEY_MISSING_HERE.into(),
                    (awaited, kind) => format!("a {kind} message came where a {awaited} message was expected"),
                };
                return Step::Refuse(for_session, reason);
            }
            if session != 0 {
                let reason = format!(
                    "the first {kind} is for session {session:#010x} and must be for 0x00000000, as it cannot know ours"
                );
                return Step::Refuse(for_session, reason);
            }
            // Nothing of ours but random bytes goes to who has not proved that it has the key.
            let answered = match message {
                Message::Challenge(Challenge { role: Role::Controller, .. }) => {
                    self.awaited = Kind::Proof;
                    random()
                        .map_err(|error| error.to_string())
                        .and_then(|nonce| self.say(&Message::Challenge(Challenge { role: Role::Coprocessor, nonce })))
                }
                Message::Proof => {
                    self.awaited = Kind::Hello;
                    self.say(&Message::Proof)
                }
                Message::Hello(hello) => {
                    return match check(&hello) {
                        Ok(()) => Step::Greeted(hello),
                        Err(reason) => Step::Refuse(for_session, reason),
                    };
                }
                _ => return Step::Refuse(0, "this is a coprocessor and was sent a coprocessor's challenge".into()),
            };
            if let Err(reason) = answered {
                return Step::Drop(reason);
            }
        }
    }

    /// Sends a message, which has to go out at once: the buffers of a client that has been sent next to nothing are empty.
    fn say(&mut self, message: &Message) -> Result<(), String> {
        let bytes = self.encode(message, 0);
        match self.stream.write(&bytes) {
            Ok(written) if written == bytes.len() => Ok(()),
            Ok(_) => Err("it takes no data".into()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// The bytes of a message to the client, with a tag where there has to be one.
    fn encode(&mut self, message: &Message, session: u32) -> Vec<u8> {
        let mut bytes = message.encode(session);
        if let Some(seal) = self.decoder.seal() {
            seal.close(message.kind(), &mut bytes);
        }
        bytes
    }

    /// Tells the client why it is dropped, as far as that can be done at once.
    fn refuse(&mut self, session: u32, reason: &str) {
        let bytes = self.encode(&Message::Error(reason.to_owned()), session);
        if let Err(error) = self.stream.write(&bytes) {
            tracing::debug!(peer = %self.peer, %error, "the refusal could not be sent");
        }
        let _ = self.stream.shutdown(Shutdown::Write);
        // Closing with bytes unread resets the connection, which on some systems takes the refusal with it.
        let _ = self.stream.read(&mut [0; 4096]);
    }
}

/// Who was dropped, for the log and for a timeout's hint.
#[derive(Default)]
struct Dropped {
    count: u64,
    last: String,
}

impl Dropped {
    fn note(&mut self, client: &Pending, reason: &str) {
        self.note_peer(client.peer, reason);
    }

    fn note_peer(&mut self, peer: SocketAddr, reason: &str) {
        tracing::debug!(%peer, reason, "a client was dropped");
        self.count += 1;
        self.last = format!("{peer}: {reason}");
    }

    fn hint(&self, local: SocketAddr, pending: usize) -> String {
        match (self.count, pending) {
            (0, 0) => format!(
                "nobody connected to {local}: is the controller started, and does it name this address and port?"
            ),
            (0, _) => format!("{pending} clients connected to {local} and none said hello"),
            (count, _) => format!("{count} clients connected to {local} and were dropped, the last one {}", self.last),
        }
    }
}

fn overdue(step: Duration) -> String {
    format!(
        "it sent no whole hello within {step:?}; a client that speaks the Catalyst wire format says nothing first and needs \
         wire=catalyst here"
    )
}

/// The error for a socket call at a local address.
fn system(call: &'static str, local: SocketAddr, error: &io::Error) -> TransportError {
    let port = local.port();
    let remedy = match error.raw_os_error() {
        Some(libc::EADDRINUSE) => {
            format!(
                "another process listens on port {port}: end it (`ss -ltnp sport = :{port}` names it) or choose another"
            )
        }
        Some(libc::EACCES) => format!(
            "port {port} is reserved: choose one from 1024 up (net.ipv4.ip_unprivileged_port_start), or grant \
             CAP_NET_BIND_SERVICE"
        ),
        Some(libc::EADDRNOTAVAIL) => {
            format!("no interface of this machine has the address {} (`ip address` lists them)", local.ip())
        }
        Some(libc::EAFNOSUPPORT) => {
            "this machine has no such address family: listen at an address of the other one".into()
        }
        Some(libc::EINVAL) => "a link-local address needs its interface, as in fe80::1%eth0".into(),
        Some(libc::EMFILE | libc::ENFILE) => "raise the limit on open files (`ulimit -n`)".into(),
        _ => String::new(),
    };
    TransportError::system(call, format!("{local}"), error).with_remedy(remedy)
}

#[cfg(test)]
mod tests;
