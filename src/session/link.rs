//! What both roles share: the steps from `connect` to `establish_channel`, and their undoing. What the Catalyst wire does
//! otherwise is in [`catalyst`].

mod catalyst;
mod probe;

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::EventfdFlags;

use super::lifecycle::State;
use super::{ChannelDesc, ConnectInfo, MemKind, MemRegion, PeerRef, RemoteKey};
use crate::config::{SessionConfig, Wire};
use crate::data_path::{self, DataPath};
use crate::engine::peer::{Peer, Phase};
use crate::engine::watcher::{Line, Teller, Watcher};
use crate::error::{Result, TransportError};
use crate::oob::{
    self, Acceptance, CatalystChannel, Channel, CheckKind, DataPathCode, Hello, Keys, Kind, Listener, Liveness,
    Message, Proposal, Role,
};
use crate::random::random;
use crate::ring::{Check, FrameReader, FrameWriter, Geometry};

/// The connection of a session, as far as it has come.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) config: SessionConfig,
    pub(crate) state: State,
    role: Role,
    /// Kept over sessions, so that the port stays the same.
    listener: Option<Listener>,
    cancel: Arc<OwnedFd>,
    /// Between `connect` and `establish_channel`; then the watcher has it.
    channel: Option<Channel>,
    /// Its counterpart on the Catalyst wire.
    catalyst: Option<CatalystChannel>,
    path: Option<DataPath>,
    local: Option<MemRegion>,
    remote: Option<PeerRef>,
    own_session: u32,
    peer_session: u32,
    path_name: &'static str,
    /// The RDMA device in use.
    pub(crate) device: Option<String>,
    /// The channel that the peer means to establish.
    pub(crate) proposed: Option<ChannelDesc>,
    pub(crate) established: Option<ChannelDesc>,
    pub(crate) peer: Arc<Peer>,
    watcher: Option<Watcher>,
    /// The process that made the session.
    process: u32,
}

/// What a role needs to move data: the path, the ring that it reads and the one that it writes.
#[derive(Debug)]
pub(crate) struct Movement {
    pub(crate) path: DataPath,
    pub(crate) reader: FrameReader,
    pub(crate) writer: FrameWriter,
}

/// Ends a coprocessor's wait for a client from another thread. See
/// [`CoprocessorSession::canceller`](crate::CoprocessorSession::canceller).
#[derive(Debug, Clone)]
pub struct Canceller(Arc<OwnedFd>);

impl Canceller {
    /// Ends the wait, or the next one if none is under way. It may be called from a signal handler's thread.
    pub fn cancel(&self) {
        // A counter that cannot be raised stands at its limit, and so has been raised.
        let _ = rustix::io::write(&*self.0, &1_u64.to_ne_bytes());
    }
}

impl Link {
    pub(crate) fn new(config: SessionConfig, role: Role) -> Result<Self> {
        config.validate()?;
        let cancel = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| TransportError::system("eventfd", "a new session", errno))?;
        Ok(Self {
            config,
            state: State::New,
            role,
            listener: None,
            cancel: Arc::new(cancel),
            channel: None,
            catalyst: None,
            path: None,
            local: None,
            remote: None,
            own_session: 0,
            peer_session: 0,
            path_name: "none",
            device: None,
            proposed: None,
            established: None,
            peer: Arc::new(Peer::new()),
            watcher: None,
            process: std::process::id(),
        })
    }

    /// The data path in use, by name.
    pub(crate) fn path_name(&self) -> &'static str {
        self.path_name
    }

    pub(crate) fn canceller(&self) -> Canceller {
        Canceller(self.cancel.clone())
    }

    /// Binds the coprocessor's port, if that has not been done.
    pub(crate) fn listen(&mut self, port: u16) -> Result<SocketAddr> {
        if let Some(listener) = &self.listener
            && (port == 0 || listener.local_addr().port() == port)
        {
            return Ok(listener.local_addr());
        }
        let listener = Listener::bind(&self.config.bind, port)?;
        let address = listener.local_addr();
        if !address.ip().is_loopback() && self.config.pre_shared_key.is_none() {
            tracing::warn!(
                %address,
                "listening beyond loopback without authentication: every host that reaches this port may write into the \
                 request ring; a pre-shared key on both sides (psk_file, psk_env) keeps strangers out"
            );
        }
        self.listener = Some(listener);
        Ok(address)
    }

    /// Does a step of the bring-up; when it fails, undoes everything.
    fn step<T>(&mut self, call: &'static str, from: State, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.state.require(call, from)?;
        work(self).inspect_err(|error| {
            // A wrong argument is found before anything is touched, and may be mended. Only `connect` may have opened
            // something by then.
            let untouched = matches!(error, TransportError::Invalid { .. } | TransportError::Unsupported { .. });
            if !untouched || from == State::New {
                if let Some(channel) = &mut self.channel
                    && !matches!(
                        error,
                        TransportError::PeerRefused { .. }
                            | TransportError::PeerLost { .. }
                            | TransportError::PeerClosed { .. }
                    )
                {
                    channel.refuse(&error.to_string());
                }
                self.close();
            }
        })
    }

    pub(crate) fn connect(&mut self, info: &ConnectInfo) -> Result<()> {
        if self.state == State::Failed {
            self.close();
        }
        self.step("connect", State::New, |link| {
            link.config.validate()?;
            if link.config.wire == Wire::Catalyst {
                return link.connect_catalyst(info);
            }
            let session = loop {
                let number = u32::from_le_bytes(random()?);
                if number != 0 {
                    break number;
                }
            };
            match link.role {
                Role::Controller => link.dial(info, session),
                Role::Coprocessor => link.accept(info, session),
            }
        })
    }

    /// Whether the session is over, so that `connect` may close it and begin anew.
    pub(crate) fn is_over(&self) -> bool {
        let ended = || self.peer.obstacle("connect").is_some_and(|obstacle| !obstacle.is_recoverable());
        self.state == State::Failed || (self.state == State::Established && ended())
    }

    fn liveness(&self) -> Liveness {
        Liveness { bound: self.config.liveness }
    }

    /// The address that a controller dials from, when one is set that others can reach.
    fn dialling_from(&self) -> Option<IpAddr> {
        let bind: Option<IpAddr> = self.config.bind.parse().ok();
        bind.filter(|address| !address.is_loopback() && !address.is_unspecified())
    }

    fn accept_deadline(&self) -> Option<Instant> {
        // A time beyond what the clock counts is no limit.
        self.config.accept_timeout.and_then(|timeout| Instant::now().checked_add(timeout))
    }

    /// Waits for a client in the way that the wire has, and takes note of a cancellation.
    fn accept_with<T>(
        &self,
        deadline: Option<Instant>,
        wait: impl FnOnce(&Listener, &Acceptance<'_>) -> Result<T>,
    ) -> Result<T> {
        let listener = self.listener.as_ref().expect("bound by the caller");
        let how = Acceptance {
            deadline,
            key: self.config.pre_shared_key.as_ref(),
            step: self.config.handshake_timeout,
            liveness: self.liveness(),
            cancel: Some(self.cancel.as_fd()),
        };
        let accepted = wait(listener, &how);
        if matches!(accepted, Err(TransportError::Engine { .. })) {
            // One cancellation ends one wait.
            let _ = rustix::io::read(&*self.cancel, &mut [0; 8]);
        }
        accepted
    }

    fn dial(&mut self, info: &ConnectInfo, session: u32) -> Result<()> {
        let deadline = Instant::now() + self.config.handshake_timeout;
        let channel = oob::connect(&info.peer, info.oob_port, self.dialling_from(), deadline, self.liveness())?;
        let (local, peer) = (channel.local_addr().ip(), channel.peer_addr().ip());
        let channel = self.channel.insert(channel);
        if let Some(key) = &self.config.pre_shared_key {
            channel.authenticate(key, deadline)?;
        }
        let code = data_path::choose(&self.config, peer, local);
        let path = DataPath::open(code, self.role, &self.config, self.config.channel.depth, local)?;
        channel.send(
            &hello(self.role, code, session, &path, &self.config.channel),
            deadline,
            "connect: sending the hello",
        )?;
        self.path = Some(path);
        let answer = channel.expect_hello(deadline, "connect: waiting for the coprocessor's hello")?;
        if answer.role != Role::Coprocessor || answer.data_path != code {
            return Err(TransportError::Protocol {
                stage: "connect",
                peer: channel.peer_addr().to_string(),
                problem: format!(
                    "it answered as a {} on {} where a coprocessor on {code} was asked for",
                    answer.role, answer.data_path
                ),
            });
        }
        self.ready(session, &answer, deadline)
    }

    fn accept(&mut self, info: &ConnectInfo, session: u32) -> Result<()> {
        self.listen(info.oob_port)?;
        let (channel, hello_in) = self.accept_with(self.accept_deadline(), |listener, how| {
            listener.accept_hello(how, &mut |hello| {
                if hello.role != Role::Controller {
                    return Err("this is a coprocessor, and so are you: one side has to be the controller".into());
                }
                data_path::accepts(&self.config, hello.data_path)
            })
        })?;
        let deadline = Instant::now() + self.config.handshake_timeout;
        let local = channel.local_addr().ip();
        self.channel = Some(channel);
        // The client's wish may be adopted; until it is checked it decides no more than this bounded number.
        let depth = self.config.channel.depth.max(hello_in.proposal.depth);
        let path = DataPath::open(hello_in.data_path, self.role, &self.config, depth, local)?;
        let answer = hello(self.role, hello_in.data_path, session, &path, &self.config.channel);
        self.path = Some(path);
        let channel = self.channel.as_mut().expect("just set");
        channel.send(&answer, deadline, "connect: answering the hello")?;
        self.ready(session, &hello_in, deadline)
    }

    /// The last part of `connect`: the data path, and word from both sides that it is up.
    fn ready(&mut self, session: u32, peer: &Hello, deadline: Instant) -> Result<()> {
        let (Some(channel), Some(path)) = (&mut self.channel, &mut self.path) else { unreachable!("set by connect") };
        let peer_name = channel.peer_addr().to_string();
        path.bring_up(&peer.endpoint, &peer_name, deadline).map_err(|error| last_words(channel, error))?;
        channel.send(&Message::Ready, deadline, "connect: saying that the data path is up")?;
        channel.expect(Kind::Ready, deadline, "connect: waiting for the peer's data path")?;
        self.own_session = session;
        self.peer_session = peer.session;
        let Proposal { depth, request_capacity, reply_capacity } = peer.proposal;
        self.connected(ChannelDesc::new(depth, request_capacity as usize, reply_capacity as usize), &peer_name);
        Ok(())
    }

    /// The end of `connect`.
    fn connected(&mut self, proposed: ChannelDesc, peer_name: &str) {
        let path = self.path.as_ref().expect("set by connect");
        self.path_name = path.name();
        self.device = path.device();
        self.proposed = Some(proposed);
        self.peer = Arc::new(Peer::new());
        self.state = State::Connected;
        tracing::debug!(peer = peer_name, data_path = self.path_name, "connected");
    }

    /// Bytes that this side's region needs for the channel.
    pub(crate) fn region_bytes(&self, desc: &ChannelDesc) -> usize {
        self.rings(desc).0.region_bytes()
    }

    /// Shapes of the ring that this side reads and of the one that it writes.
    fn rings(&self, desc: &ChannelDesc) -> (Geometry, Geometry) {
        let (requests, replies) = desc.rings(self.config.wire);
        match self.role {
            Role::Controller => (replies, requests),
            Role::Coprocessor => (requests, replies),
        }
    }

    pub(crate) fn alloc_memory(&mut self, bytes: usize, kind: MemKind) -> Result<MemRegion> {
        self.step("alloc_memory", State::Connected, |link| {
            let region = link.path.as_mut().expect("connected").allocate(bytes, kind)?;
            link.local = Some(region);
            link.state = State::Allocated;
            Ok(region)
        })
    }

    pub(crate) fn exchange_keys(&mut self, local: &MemRegion) -> Result<PeerRef> {
        self.step("exchange_keys", State::Allocated, |link| {
            link.check_local(local)?;
            if link.config.wire == Wire::Catalyst {
                return link.exchange_catalyst(local);
            }
            let deadline = Instant::now() + link.config.handshake_timeout;
            let (Some(channel), Some(path)) = (&mut link.channel, &mut link.path) else { unreachable!("connected") };
            path.share().map_err(|error| last_words(channel, error))?;
            // On shared memory the descriptor is what gives access; addresses are nobody's business.
            let keys = match path {
                DataPath::SharedMemory(_) => Keys { address: 0, size: local.size as u64, rkey: 0 },
                #[cfg(feature = "rdma")]
                DataPath::Verbs(_) => Keys { address: local.addr, size: local.size as u64, rkey: local.rkey.0 },
            };
            channel.send(&Message::Keys(keys), deadline, "exchange_keys: sending ours")?;
            let keys = channel.expect_keys(deadline, "exchange_keys: waiting for the peer's")?;
            let remote = PeerRef { rkey: RemoteKey(keys.rkey), remote_addr: keys.address, size: keys.size };
            path.attach(&remote, deadline).map_err(|error| last_words(channel, error))?;
            link.remote = Some(remote);
            link.state = State::KeysExchanged;
            Ok(remote)
        })
    }

    fn check_local(&self, local: &MemRegion) -> Result<()> {
        if self.local.as_ref() == Some(local) {
            return Ok(());
        }
        Err(TransportError::invalid("local region", "is not the one that this session's alloc_memory gave"))
    }

    /// Compares the geometries, proves the way in both directions, and gives what moves the data.
    pub(crate) fn establish_channel(
        &mut self,
        desc: &ChannelDesc,
        local: &MemRegion,
        peer: &PeerRef,
    ) -> Result<Movement> {
        self.step("establish_channel", State::KeysExchanged, |link| {
            let (incoming, outgoing) = link.check_channel(desc, local, peer)?;
            if link.config.wire == Wire::Catalyst {
                return link.establish_catalyst(desc, incoming, outgoing);
            }
            let deadline = Instant::now() + link.config.handshake_timeout;
            let (Some(channel), Some(path)) = (&mut link.channel, &mut link.path) else { unreachable!("connected") };
            path.establish(outgoing)?;
            let own_check = path.incoming_check(link.own_session);
            let first = link.config.first_sequence;
            let reader = FrameReader::new(path.incoming(), incoming, own_check, first);
            reader.prepare();
            let check_kind = match own_check {
                Check::Session(_) => CheckKind::SessionNumber,
                Check::Crc(_) => CheckKind::Crc32c,
            };
            let own = oob::Geometry {
                depth: desc.depth,
                request_capacity: desc.request_capacity as u32,
                reply_capacity: desc.reply_capacity as u32,
                check_kind,
                first_sequence: first,
            };
            channel.send(&Message::Channel(own), deadline, "establish_channel: sending the geometry")?;
            let theirs = channel.expect_geometry(deadline, "establish_channel: waiting for the peer's geometry")?;
            probe::compare(&own, &theirs, channel.peer_addr())?;
            let peer_check = match theirs.check_kind {
                CheckKind::SessionNumber => Check::Session(link.peer_session),
                CheckKind::Crc32c => Check::Crc(link.peer_session),
            };
            probe::run(channel, path, incoming, link.own_session, link.peer_session, deadline)?;
            path.settle()?;
            let writer = FrameWriter::new(outgoing, peer_check, first);
            let channel = link.channel.take().expect("connected");
            link.established(desc, Line::Native(Box::new(channel)))?;
            Ok(Movement { path: link.path.take().expect("connected"), reader, writer })
        })
    }

    /// The end of `establish_channel`: from here on the peer is watched.
    fn established(&mut self, desc: &ChannelDesc, line: Line) -> Result<()> {
        let events = self.path.as_ref().expect("connected").events();
        self.watcher = Some(Watcher::start(line, self.peer.clone(), events, self.config.liveness)?);
        self.established = Some(desc.clone());
        self.state = State::Established;
        Ok(())
    }

    /// Refuses a description that does not fit the regions or the path. Gives the shapes of the ring that this side
    /// reads and of the one that it writes.
    fn check_channel(&self, desc: &ChannelDesc, local: &MemRegion, peer: &PeerRef) -> Result<(Geometry, Geometry)> {
        desc.validate_on(self.config.wire)?;
        self.check_local(local)?;
        if self.remote.as_ref() != Some(peer) {
            return Err(TransportError::invalid(
                "peer region",
                "is not the one that this session's exchange_keys gave",
            ));
        }
        let named = desc.data_path.as_str();
        let fits = match self.path_name {
            "shm" => matches!(named, "" | "shm" | "shared_memory" | "memcpy"),
            _ => matches!(named, "" | "verbs" | "rdma" | "cpu_verbs"),
        };
        if !fits {
            return Err(TransportError::invalid(
                "channel's data path",
                format!("'{named}' was asked for and the session connected over '{}'", self.path_name),
            ));
        }
        let (incoming, outgoing) = self.rings(desc);
        if local.size < incoming.region_bytes() {
            return Err(TransportError::invalid(
                "local region",
                format!("has {} bytes and the channel needs {}", local.size, incoming.region_bytes()),
            ));
        }
        if peer.size < outgoing.region_bytes() as u64 {
            return Err(TransportError::invalid(
                "peer region",
                format!("has {} bytes and the channel needs {}", peer.size, outgoing.region_bytes()),
            ));
        }
        Ok((incoming, outgoing))
    }

    /// For telling the peer from the engine's thread, once the session is established.
    pub(crate) fn teller(&self) -> Option<Teller> {
        self.watcher.as_ref().map(Watcher::teller)
    }

    /// Tells the peer something, once the session is established.
    pub(crate) fn tell(&self, message: &Message) {
        if let Some(watcher) = &self.watcher {
            watcher.tell(message);
        }
    }

    /// Tells the peer why it is refused, and releases everything but the listener.
    pub(crate) fn refuse(&mut self, error: &TransportError) {
        if let Some(channel) = &mut self.channel {
            channel.refuse(&error.to_string());
        }
        self.close();
    }

    /// Whether this is a copy of the session in a child process, which has the descriptors but none of the threads.
    pub(crate) fn is_in_a_child(&self) -> bool {
        self.process != std::process::id()
    }

    /// Lets go of everything without a word to the peer, the device or the watcher, which are the parent's.
    pub(crate) fn abandon(&mut self) {
        std::mem::forget((self.path.take(), self.watcher.take(), self.channel.take(), self.catalyst.take()));
    }

    /// Says goodbye and releases everything but the listener. What moves the data is the role's to drop, before.
    pub(crate) fn close(&mut self) {
        // The queue pair goes before the connection, so that the peer sees the goodbye and then nothing more.
        self.path = None;
        if let Some(watcher) = self.watcher.take() {
            watcher.close();
        }
        if let Some(channel) = self.channel.take() {
            channel.close(Instant::now() + Duration::from_millis(5));
        }
        self.catalyst = None;
        // Whoever still holds on to the old session, a worker say, learns that it is over.
        self.peer.set(Phase::Closed);
        self.local = None;
        self.remote = None;
        self.established = None;
        self.proposed = None;
        self.state = State::New;
    }
}

/// What the peer said before it broke off, where that explains an error of the data path.
fn last_words(channel: &mut Channel, error: TransportError) -> TransportError {
    match channel.receive(Instant::now() + Duration::from_millis(50), "bring-up") {
        Err(said @ (TransportError::PeerRefused { .. } | TransportError::PeerClosed { .. })) => said,
        _ => error,
    }
}

fn hello(role: Role, data_path: DataPathCode, session: u32, path: &DataPath, desc: &ChannelDesc) -> Message {
    let proposal = Proposal {
        depth: desc.depth,
        request_capacity: desc.request_capacity as u32,
        reply_capacity: desc.reply_capacity as u32,
    };
    Message::Hello(Hello { role, data_path, session, endpoint: path.endpoint(), proposal })
}
