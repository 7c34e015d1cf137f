//! Messages over one TCP connection.
//!
//! The socket is non-blocking and every wait goes through `poll` with a deadline. How a connection ends is told
//! apart here, once: a refusal, a goodbye, a loss, and silence are four different errors.

use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use socket2::{SockRef, TcpKeepalive};

use super::decoder::Decoder;
use super::message::{Challenge, Geometry, Hello, Keys, Kind, Message, Role};
use super::seal::Seal;
use super::wait::wait;
use crate::error::{Result, TransportError};
use crate::key::PreSharedKey;
use crate::random::random;

/// Most messages that are looked through for a peer's last words after the connection has broken.
const LAST_WORDS: usize = 64;

/// How soon the loss of the peer's *host* has to be noticed. (The loss of its process is noticed at once, because
/// its kernel closes the connection.)
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Liveness {
    /// Longest time from the host's last sign of life to the error. The kernel counts in whole seconds, so bounds
    /// below two seconds are kept as two.
    pub(crate) bound: Duration,
}

impl Liveness {
    /// The socket options that keep the bound: interval between probes, number of probes, and user timeout.
    fn options(self) -> (Duration, u32, Duration) {
        // With a user timeout the kernel gives up at the first probe that is due after it, so that it has to lie
        // one interval before the bound. The number of probes only counts on kernels that do not look at it.
        // The kernel accepts intervals up to 32767 s and at most 127 probes.
        let bound = self.bound.clamp(Duration::from_secs(2), Duration::from_secs(24 * 3600));
        let interval = Duration::from_secs((bound.as_secs() / 4).max(1));
        let probes = (bound.as_secs() / interval.as_secs()).saturating_sub(1).max(1);
        (interval, probes as u32, bound - interval)
    }

    pub(super) fn apply(self, stream: &TcpStream) -> io::Result<()> {
        let (interval, probes, user_timeout) = self.options();
        let socket = SockRef::from(stream);
        // Messages are small and each waits for an answer: gathering them would cost a delayed acknowledgement.
        socket.set_tcp_nodelay(true)?;
        // Probes end a silent connection; the user timeout ends one with data that nobody acknowledges.
        let probing = TcpKeepalive::new().with_time(interval).with_interval(interval).with_retries(probes);
        socket.set_tcp_keepalive(&probing)?;
        socket.set_tcp_user_timeout(Some(user_timeout))
    }
}

/// A connection to a peer that speaks the native messages.
///
/// It learns the session numbers by itself: ours when our hello is sent, the peer's when its hello is received.
/// From then on every message received has to carry ours. One exception: a peer that has not seen our hello may
/// refuse or say goodbye with number 0, which is all it can know; those two only ever end the session.
pub(crate) struct Channel {
    stream: TcpStream,
    peer: SocketAddr,
    local: SocketAddr,
    decoder: Decoder,
    /// What received messages must carry; 0 until our hello is sent.
    own_session: u32,
    /// What sent messages carry; 0 until the peer's hello is received.
    peer_session: u32,
    /// Whether a message with our number has come, so that the peer knows it.
    confirmed: bool,
    /// Rest of a message that was sent in part when its deadline came. It goes first, or the peer loses its step.
    unsent: Vec<u8>,
    received: u64,
    last: Option<Kind>,
    /// The goodbye or the refusal that the peer ended with. Kept, because who meets it first may not be who has to know: a
    /// message to the peer that fails finds it too.
    farewell: Option<Message>,
    last_heard: Instant,
    bound: Duration,
}

impl Channel {
    /// A channel over a connected stream.
    ///
    /// # Errors
    ///
    /// [`TransportError::System`] if the socket cannot be set up; [`TransportError::PeerLost`] if it is not
    /// connected any more.
    #[cfg(test)]
    pub(crate) fn new(stream: TcpStream, liveness: Liveness) -> Result<Self> {
        const STAGE: &str = "setting up the connection";
        let peer = stream.peer_addr().map_err(|error| TransportError::PeerLost {
            stage: STAGE,
            cause: format!("it hung up at once: {error}"),
        })?;
        Self::resume(stream, peer, Decoder::new(), liveness)
    }

    /// A channel over a stream of which the decoder has already read some.
    pub(super) fn resume(stream: TcpStream, peer: SocketAddr, decoder: Decoder, liveness: Liveness) -> Result<Self> {
        let failed =
            |call| move |error: io::Error| TransportError::system(call, format!("the socket to {peer}"), error);
        stream.set_nonblocking(true).map_err(failed("ioctl(FIONBIO)"))?;
        liveness.apply(&stream).map_err(failed("setsockopt"))?;
        let local = canonical(stream.local_addr().map_err(failed("getsockname"))?);
        Ok(Self {
            stream,
            peer,
            local,
            decoder,
            own_session: 0,
            peer_session: 0,
            confirmed: false,
            unsent: Vec::new(),
            received: 0,
            last: None,
            farewell: None,
            last_heard: Instant::now(),
            bound: liveness.bound,
        })
    }

    /// The peer's address.
    pub(crate) fn peer_addr(&self) -> SocketAddr {
        self.peer
    }

    /// The address at which the peer sees us.
    pub(crate) fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// The session number of our hello; 0 until it is sent.
    #[cfg(test)]
    pub(crate) fn own_session(&self) -> u32 {
        self.own_session
    }

    /// The session number of the peer's hello; 0 until it is received.
    #[cfg(test)]
    pub(crate) fn peer_session(&self) -> u32 {
        self.peer_session
    }

    /// When bytes last came from the peer, or the connection was made.
    pub(crate) fn last_heard(&self) -> Instant {
        self.last_heard
    }

    /// The same socket once more, for another thread to watch. It must only poll it: a read would steal bytes.
    ///
    /// # Errors
    ///
    /// [`TransportError::System`] with `EMFILE` if the process may open no more files.
    pub(crate) fn try_clone_stream(&self) -> Result<TcpStream> {
        self.stream.try_clone().map_err(|error| {
            TransportError::system("fcntl(F_DUPFD_CLOEXEC)", format!("the socket to {}", self.peer), error)
        })
    }

    /// Sends a message. A hello makes its session number the one that the peer's messages have to carry.
    ///
    /// # Errors
    ///
    /// [`TransportError::Timeout`] if the peer takes no data until the deadline (what had gone out is completed
    /// ahead of the next message); if the connection has ended, the peer's last words as from
    /// [`receive`](Self::receive), else [`TransportError::PeerLost`].
    pub(crate) fn send(&mut self, message: &Message, deadline: Instant, stage: &'static str) -> Result<()> {
        let began = Instant::now();
        self.flush(deadline, began, message.kind(), stage)?;
        if let Message::Hello(hello) = message {
            self.own_session = hello.session;
        }
        self.unsent = self.encode(message);
        let length = self.unsent.len();
        let sent = self.flush(deadline, began, message.kind(), stage);
        if sent.is_err() && self.unsent.len() == length {
            // Nothing of it went out, so nothing of it has to follow.
            self.unsent.clear();
            if let Some(seal) = self.decoder.seal() {
                seal.take_back();
            }
        }
        sent
    }

    /// The bytes of a message to the peer, with a tag where there has to be one.
    fn encode(&mut self, message: &Message) -> Vec<u8> {
        let mut bytes = message.encode(self.peer_session);
        if let Some(seal) = self.decoder.seal() {
            seal.close(message.kind(), &mut bytes);
        }
        bytes
    }

    /// Proves to the coprocessor, and has it prove, that both hold the key. Before anything else is sent; from here on
    /// everything has a tag.
    ///
    /// # Errors
    ///
    /// [`TransportError::PeerRefused`] with the coprocessor's words if it has no key or another one, or is of an older release;
    /// [`TransportError::Protocol`] if it cannot prove that it has ours; others as from [`receive`](Self::receive).
    pub(crate) fn authenticate(&mut self, key: &PreSharedKey, deadline: Instant) -> Result<()> {
        const STAGE: &str = "connect: authenticating (a pre-shared key is set here, and both sides need the same one)";
        self.decoder.set_seal(Seal::new(key, Role::Controller));
        let challenge = Challenge { role: Role::Controller, nonce: random()? };
        self.send(&Message::Challenge(challenge), deadline, STAGE)?;
        match self.expect(Kind::Challenge, deadline, STAGE)? {
            Message::Challenge(Challenge { role: Role::Coprocessor, .. }) => {}
            _ => return Err(self.protocol("it sent a controller's challenge, and this is a controller".into(), STAGE)),
        }
        self.send(&Message::Proof, deadline, STAGE)?;
        self.expect(Kind::Proof, deadline, STAGE).map(drop)
    }

    /// Tells the peer that it is refused, as far as that can be done at once. Never blocks and never fails: it is
    /// a courtesy on the way out.
    pub(crate) fn refuse(&mut self, reason: &str) {
        // A message that went out in part would swallow this one.
        if self.unsent.is_empty() {
            let bytes = self.encode(&Message::Error(reason.to_owned()));
            if let Err(error) = self.stream.write(&bytes) {
                tracing::debug!(peer = %self.peer, %error, "the refusal could not be sent");
                if let Some(seal) = self.decoder.seal() {
                    seal.take_back();
                }
            }
        }
    }

    /// Says goodbye and closes, as far as that succeeds until the deadline. It waits for the peer to hang up too,
    /// because closing with bytes unread would reset the connection and could take the goodbye with it.
    pub(crate) fn close(mut self, deadline: Instant) {
        if self.send(&Message::Goodbye, deadline, "closing").is_err() || self.stream.shutdown(Shutdown::Write).is_err()
        {
            return;
        }
        let mut scrap = [0; 1024];
        loop {
            match self.stream.read(&mut scrap) {
                Ok(1..) if Instant::now() < deadline => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if !self.ready(PollFlags::IN, deadline).unwrap_or(false) {
                        return;
                    }
                }
                _ => return,
            }
        }
    }

    /// The next message. Heartbeats are skipped.
    ///
    /// # Errors
    ///
    /// - [`TransportError::PeerRefused`] for an error message, [`TransportError::PeerClosed`] for a goodbye;
    /// - [`TransportError::PeerLost`] if the connection ends without either, or the peer's host does not answer;
    /// - [`TransportError::Protocol`] for bytes that are no message, for a wrong session number, for a second hello;
    /// - [`TransportError::Timeout`] at the deadline, saying what the peer had sent by then;
    /// - [`TransportError::System`] for anything else that the socket fails with.
    pub(crate) fn receive(&mut self, deadline: Instant, stage: &'static str) -> Result<Message> {
        let began = Instant::now();
        let mut late = false;
        loop {
            if let Some(message) = self.buffered(stage)? {
                return Ok(message);
            }
            if late {
                return Err(TransportError::Timeout { stage, waited: began.elapsed(), hint: self.silence() });
            }
            // Whatever comes, be it heartbeats without end, the deadline counts; what is here by then is taken.
            late = if self.fill(stage)? { Instant::now() >= deadline } else { !self.ready(PollFlags::IN, deadline)? };
        }
    }

    /// The next message if it is here already; never blocks. Heartbeats are skipped.
    ///
    /// Messages may wait in our own buffer, where `poll` does not see them: call it until it returns `None`, then
    /// poll.
    ///
    /// # Errors
    ///
    /// Those of [`receive`](Self::receive) but the timeout.
    pub(crate) fn try_receive(&mut self, stage: &'static str) -> Result<Option<Message>> {
        if let Some(message) = self.buffered(stage)? {
            return Ok(Some(message));
        }
        // One read only, so that a peer that never falls silent cannot hold us here.
        if self.fill(stage)? { self.buffered(stage) } else { Ok(None) }
    }

    /// The next message, which has to be of this kind.
    ///
    /// # Errors
    ///
    /// Those of [`receive`](Self::receive); [`TransportError::PeerStopped`] if the peer says that it has stopped
    /// instead; [`TransportError::Protocol`] naming both kinds for any other.
    pub(crate) fn expect(&mut self, kind: Kind, deadline: Instant, stage: &'static str) -> Result<Message> {
        match self.receive(deadline, stage)? {
            message if message.kind() == kind => Ok(message),
            Message::Stopped => Err(TransportError::PeerStopped { stage }),
            other => Err(self.unexpected(&other, kind, stage)),
        }
    }

    /// The peer's hello; errors as from [`expect`](Self::expect).
    pub(crate) fn expect_hello(&mut self, deadline: Instant, stage: &'static str) -> Result<Hello> {
        match self.expect(Kind::Hello, deadline, stage)? {
            Message::Hello(hello) => Ok(hello),
            other => Err(self.unexpected(&other, Kind::Hello, stage)),
        }
    }

    /// The peer's keys; errors as from [`expect`](Self::expect).
    pub(crate) fn expect_keys(&mut self, deadline: Instant, stage: &'static str) -> Result<Keys> {
        match self.expect(Kind::Keys, deadline, stage)? {
            Message::Keys(keys) => Ok(keys),
            other => Err(self.unexpected(&other, Kind::Keys, stage)),
        }
    }

    /// The peer's geometry; errors as from [`expect`](Self::expect).
    pub(crate) fn expect_geometry(&mut self, deadline: Instant, stage: &'static str) -> Result<Geometry> {
        match self.expect(Kind::Channel, deadline, stage)? {
            Message::Channel(geometry) => Ok(geometry),
            other => Err(self.unexpected(&other, Kind::Channel, stage)),
        }
    }

    fn unexpected(&self, message: &Message, wanted: Kind, stage: &'static str) -> TransportError {
        self.protocol(format!("a {} message came where a {wanted} message was expected", message.kind()), stage)
    }

    fn protocol(&self, problem: String, stage: &'static str) -> TransportError {
        TransportError::Protocol { stage, peer: self.peer.to_string(), problem }
    }

    /// The next message in our buffer that is not a heartbeat.
    fn buffered(&mut self, stage: &'static str) -> Result<Option<Message>> {
        self.check_farewell(stage)?;
        while let Some((session, message)) = self.decoder.next().map_err(|p| self.protocol(p.to_string(), stage))? {
            self.received += 1;
            self.last = Some(message.kind());
            self.admit(session, &message, stage)?;
            match message {
                Message::Heartbeat => {}
                Message::Error(_) | Message::Goodbye => {
                    self.farewell = Some(message);
                    self.check_farewell(stage)?;
                }
                message => return Ok(Some(message)),
            }
        }
        Ok(None)
    }

    /// The error for a peer that has ended the session with a word.
    fn check_farewell(&self, stage: &'static str) -> Result<()> {
        match &self.farewell {
            Some(Message::Error(reason)) if reason.is_empty() => {
                Err(TransportError::PeerRefused { stage, reason: "no reason given".into() })
            }
            Some(Message::Error(reason)) => Err(TransportError::PeerRefused { stage, reason: reason.clone() }),
            Some(_) => Err(TransportError::PeerClosed { stage }),
            None => Ok(()),
        }
    }

    /// Checks a header's session number, and learns the peer's from its hello.
    fn admit(&mut self, session: u32, message: &Message, stage: &'static str) -> Result<()> {
        let kind = message.kind();
        if session != 0 && session == self.own_session {
            self.confirmed = true;
        } else {
            // A peer that has not had our hello cannot know our number.
            let first = self.own_session == 0 && matches!(kind, Kind::Hello | Kind::Challenge | Kind::Proof);
            let last = !self.confirmed && matches!(kind, Kind::Error | Kind::Goodbye);
            if session != 0 || !(first || last) {
                let own = self.own_session;
                let problem =
                    format!("a {kind} message is for session {session:#010x} and this is session {own:#010x}");
                return Err(self.protocol(problem, stage));
            }
        }
        if let Message::Hello(hello) = message {
            if self.peer_session != 0 {
                let known = self.peer_session;
                let problem = format!("a second hello, of session {:#010x}, came after {known:#010x}", hello.session);
                return Err(self.protocol(problem, stage));
            }
            self.peer_session = hello.session;
        }
        Ok(())
    }

    /// Takes note of a hello that the listener has read and judged.
    pub(super) fn greet(&mut self, hello: &Hello) {
        self.peer_session = hello.session;
        self.received = 1;
        self.last = Some(Kind::Hello);
    }

    /// Reads once; `false` if there is nothing to read now.
    fn fill(&mut self, stage: &'static str) -> Result<bool> {
        loop {
            return match self.decoder.fill(&mut self.stream) {
                Ok(0) => {
                    let (there, needed) = self.decoder.progress();
                    let cause = format!(
                        "the connection to {} was closed without a goodbye after {there} of {needed} bytes of its \
                         message {}",
                        self.peer,
                        self.received + 1
                    );
                    Err(TransportError::PeerLost { stage, cause })
                }
                Ok(_) => {
                    self.last_heard = Instant::now();
                    Ok(true)
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => Err(self.broken("recv", &error, stage)),
            };
        }
    }

    /// Writes out what is unsent.
    fn flush(&mut self, deadline: Instant, began: Instant, kind: Kind, stage: &'static str) -> Result<()> {
        while !self.unsent.is_empty() {
            match self.stream.write(&self.unsent) {
                Ok(written) => drop(self.unsent.drain(..written)),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if !self.ready(PollFlags::OUT, deadline)? {
                        let hint = format!(
                            "{} takes no more data, {} bytes are still to go when sending a {kind} message: its \
                             process is stuck or its host is gone",
                            self.peer,
                            self.unsent.len()
                        );
                        return Err(TransportError::Timeout { stage, waited: began.elapsed(), hint });
                    }
                }
                Err(error) => {
                    let error = self.broken("send", &error, stage);
                    return Err(self.last_words(stage).unwrap_or(error));
                }
            }
        }
        Ok(())
    }

    /// What the peer said before the connection broke, if that explains it. Its words stay readable after a reset.
    fn last_words(&mut self, stage: &'static str) -> Option<TransportError> {
        for _ in 0..LAST_WORDS {
            match self.try_receive(stage) {
                Ok(Some(_)) => {}
                Err(error @ (TransportError::PeerRefused { .. } | TransportError::PeerClosed { .. })) => {
                    return Some(error);
                }
                Ok(None) | Err(_) => return None,
            }
        }
        None
    }

    /// The error for a socket call that failed.
    fn broken(&self, call: &'static str, error: &io::Error, stage: &'static str) -> TransportError {
        broken(self.peer, self.bound, call, error, stage)
    }

    /// What the peer has and has not sent, for a timeout's hint.
    fn silence(&self) -> String {
        let peer = self.peer;
        match (self.decoder.progress(), self.last) {
            ((0, _), None) => {
                format!(
                    "{peer} has sent nothing: is it serving another controller (it serves one at a time), is it a \
                     catalyst-transport peer in native mode, and is its process alive?"
                )
            }
            ((0, _), Some(kind)) => {
                let silence = self.last_heard.elapsed();
                format!("the last from {peer} was a {kind} message {silence:.1?} ago: is its process stuck?")
            }
            ((there, needed), _) => format!("{peer} has sent only {there} of {needed} bytes of a message"),
        }
    }

    fn ready(&self, events: PollFlags, deadline: Instant) -> Result<bool> {
        wait(&mut [PollFd::new(&self.stream, events)], Some(deadline))
            .map_err(|errno| TransportError::system("poll", format!("the connection to {}", self.peer), errno))
    }
}

/// The error for a call that failed on the socket to this peer.
pub(super) fn broken(
    peer: SocketAddr,
    bound: Duration,
    call: &'static str,
    error: &io::Error,
    stage: &'static str,
) -> TransportError {
    let cause = match error.raw_os_error() {
        Some(libc::ECONNRESET | libc::EPIPE) => {
            format!("the connection to {peer} was reset: its process was killed, or closed without reading everything")
        }
        Some(libc::ETIMEDOUT) => {
            format!("the host of {peer} has not answered within {bound:?}: it is down or cut off")
        }
        Some(libc::EHOSTUNREACH | libc::ENETUNREACH | libc::ENETDOWN) => {
            format!("the host of {peer} cannot be reached any more: {error}")
        }
        _ => return TransportError::system(call, format!("the connection to {peer}"), error),
    };
    TransportError::PeerLost { stage, cause }
}

/// An IPv4 address as such, also where a socket for both families shows it in IPv6's clothes.
pub(super) fn canonical(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        ip @ IpAddr::V4(_) => SocketAddr::new(ip, address.port()),
        IpAddr::V6(_) => address,
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Channel")
            .field("peer", &self.peer)
            .field("local", &self.local)
            .field("own_session", &self.own_session)
            .field("peer_session", &self.peer_session)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
