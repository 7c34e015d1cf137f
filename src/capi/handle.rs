//! One session as C sees it: behind a lock that no call waits for without bound, with slots whose addresses stay.
//!
//! Generated code brings up both sides from one thread, and establishes the coprocessor's channel before the controller's.
//! A channel takes both sides, so here it is established at the end of `exchange_keys`, which runs on both at once;
//! `establish_channel` then checks the name and lets the session go on.

pub(super) mod rounds;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use super::backend::{Backend, config_for_backend};
use super::failure::Failure;
use super::function::Answerer;
use super::registry;
use super::slots::Slot;
use crate::config::SessionConfig;
use crate::error::TransportError;
use crate::oob::Role;
use crate::session::controller::ControllerSession;
use crate::session::coprocessor::{CoprocessorSession, FunctionConvention};
use crate::session::link::Canceller;
use crate::session::{ConnectInfo, MemKind, MemRegion, PeerRef, TransportSession};

/// What Catalyst's region has, and the least that is provisioned.
const REGION_BYTES: usize = 16_384;
/// Between two tries of a lock that another call holds.
const RETRY: Duration = Duration::from_micros(200);

/// A session and what calls from several threads share beside it.
pub(super) struct Handle {
    pub(super) role: Role,
    pub(super) key: String,
    backend: Backend,
    config: SessionConfig,
    /// Empty after `destroy`.
    core: Mutex<Option<Core>>,
    /// The process that made it. A child has a copy, whose threads and connection are the parent's.
    process: u32,
    /// Set by `destroy`: nothing is worth waiting for.
    closing: AtomicBool,
    /// Ends a `collect` in another thread.
    interrupt: Arc<AtomicBool>,
    canceller: Option<Canceller>,
    /// What answers from the next start on.
    answerer: Mutex<Option<Answerer>>,
    /// The convention of a coprocessor that was asked to take one alone.
    pub(super) convention: Option<FunctionConvention>,
    running: AtomicBool,
    /// The last `stage_payload` failed: what an earlier one left is not this round's.
    unstaged: AtomicBool,
    last_rtt: AtomicU64,
    request: Slot,
    reply: Slot,
}

/// What the lock guards.
pub(super) struct Core {
    pub(super) session: Session,
    /// Since `connect`, until a later step of the bring-up fails.
    connected: bool,
    local: Option<MemRegion>,
    peer: Option<PeerRef>,
    established: bool,
    /// Request bytes of each work item.
    pub(super) items: HashMap<u32, usize>,
    /// The next round's request is in the request slot.
    in_slot: bool,
}

/// Either role.
pub(super) enum Session {
    Controller(Box<ControllerSession>),
    Coprocessor(Box<CoprocessorSession>),
}

impl Session {
    fn either(&mut self) -> &mut dyn TransportSession {
        match self {
            Self::Controller(session) => &mut **session,
            Self::Coprocessor(session) => &mut **session,
        }
    }

    /// Undoes a bring-up that has failed, and tells the peer why if it has not been told.
    fn undo(&mut self, error: &TransportError) {
        match self {
            Self::Controller(session) => session.undo(error),
            Self::Coprocessor(session) => session.undo(error),
        }
    }

    /// The controller.
    pub(super) fn controller(&mut self, call: &str) -> Result<&mut ControllerSession, Failure> {
        match self {
            Self::Controller(session) => Ok(session),
            Self::Coprocessor(_) => {
                Err(Failure::new(format!("{call} is the controller's, and this session is a coprocessor")))
            }
        }
    }
}

impl Handle {
    /// A session that is not yet connected.
    pub(super) fn new(backend: Backend, role: Role, key: &str, text: &str) -> Result<Self, Failure> {
        if backend == Backend::Memcpy && key.is_empty() {
            return Err(Failure::new(
                "memcpy pairs the two sessions by their key: give both the same, not an empty one",
            ));
        }
        let config = config_for_backend(backend, role, text)?;
        let (session, interrupt, canceller) = match role {
            Role::Controller => {
                let session = ControllerSession::new(config.clone())?;
                let interrupt = session.interrupt();
                (Session::Controller(Box::new(session)), interrupt, None)
            }
            Role::Coprocessor => {
                let session = CoprocessorSession::new(config.clone())?;
                let (interrupt, canceller) = (session.interrupt(), session.canceller());
                (Session::Coprocessor(Box::new(session)), interrupt, Some(canceller))
            }
        };
        let (request, reply) = (config.channel().request_capacity, config.channel().reply_capacity);
        let core = Core {
            session,
            connected: false,
            local: None,
            peer: None,
            established: false,
            items: HashMap::new(),
            in_slot: false,
        };
        Ok(Self {
            role,
            key: key.into(),
            backend,
            config,
            core: Mutex::new(Some(core)),
            process: std::process::id(),
            closing: AtomicBool::new(false),
            interrupt,
            canceller,
            answerer: Mutex::new(None),
            convention: None,
            running: AtomicBool::new(false),
            unstaged: AtomicBool::new(false),
            last_rtt: AtomicU64::new(0),
            request: Slot::new(request),
            reply: Slot::new(reply),
        })
    }

    /// The same failure, saying whose it is.
    pub(super) fn named(&self, failure: Failure) -> Failure {
        let whose =
            if self.key.is_empty() { format!("{}", self.role) } else { format!("{} '{}'", self.role, self.key) };
        Failure { text: format!("{whose}: {}", failure.text), ..failure }
    }

    /// The lock, waited for until `bound`.
    fn lock(&self, bound: Option<Duration>) -> Result<MutexGuard<'_, Option<Core>>, Failure> {
        let mut deadline = None;
        loop {
            match self.core.try_lock() {
                Ok(core) => return Ok(core),
                // A panic has been told by the call in which it happened.
                Err(TryLockError::Poisoned(poison)) => return Ok(poison.into_inner()),
                Err(TryLockError::WouldBlock) => {}
            }
            if let Some(bound) = bound
                && Instant::now() >= *deadline.get_or_insert_with(|| Instant::now() + bound)
            {
                return Err(Failure::stuck(format!(
                    "another call has held this session for more than {bound:?}; wait for its end, or destroy the session"
                )));
            }
            std::thread::sleep(RETRY);
        }
    }

    /// Does `work` on the session, which another thread may hold for at most `stop_ms`.
    pub(super) fn with<T>(&self, work: impl FnOnce(&mut Core) -> Result<T, Failure>) -> Result<T, Failure> {
        self.with_bound(Some(self.config.stop_timeout), work)
    }

    /// [`with`](Self::with) for calls that themselves take long, and so may follow each other.
    fn with_patience<T>(&self, work: impl FnOnce(&mut Core) -> Result<T, Failure>) -> Result<T, Failure> {
        self.with_bound(self.patience(), work)
    }

    fn with_bound<T>(
        &self,
        bound: Option<Duration>,
        work: impl FnOnce(&mut Core) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let mut core = self.lock(bound)?;
        match &mut *core {
            Some(core) if !self.closing() => work(core),
            _ => Err(destroyed()),
        }
    }

    /// Whether `destroy` has begun.
    pub(super) fn closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// Whether a loop over rounds has to end.
    pub(super) fn interrupted(&self) -> bool {
        self.interrupt.load(Ordering::Relaxed)
    }

    /// The longest that a bring-up call takes; `None` is for ever.
    pub(super) fn patience(&self) -> Option<Duration> {
        let steps = self.config.handshake_timeout * 3 + Duration::from_secs(1);
        self.config.accept_timeout.map(|accept| accept + steps)
    }

    /// Binds the coprocessor's port, so that a controller that dials at once finds it. What goes wrong shows in `connect`.
    pub(super) fn listen_ahead(&self, port: u16) {
        if self.role == Role::Coprocessor
            && (port != 0 || self.backend == Backend::Memcpy)
            && let Ok(mut core) = self.core.try_lock()
            && let Some(Core { session: Session::Coprocessor(session), .. }) = &mut *core
        {
            let _ = self.listen(session, port);
        }
    }

    /// Where the coprocessor waits.
    fn listen(&self, session: &mut CoprocessorSession, port: u16) -> Result<u16, TransportError> {
        if self.backend != Backend::Memcpy {
            return session.listen(port).map(|address| address.port());
        }
        let port = session.listen(0)?.port();
        registry::pairs().offer(&self.key, std::ptr::from_ref(self) as usize, port);
        Ok(port)
    }

    /// `connect`: the peer of a coprocessor and both of a memcpy pair need not be named.
    pub(super) fn connect(&self, peer: &str, port: u16) -> Result<(), Failure> {
        self.with_patience(|core| {
            if core.connected {
                return Err(Failure::new(
                    "the session is connected; for a new connection destroy it and create a new one",
                ));
            }
            let named = self.backend != Backend::Memcpy;
            if named && port == 0 {
                return Err(Failure::new("port 0: name the TCP port that the coprocessor listens on, on both sides"));
            }
            let info = match &mut core.session {
                Session::Coprocessor(session) => ConnectInfo::new(peer, self.listen(session, port)?),
                Session::Controller(_) if named => ConnectInfo::new(peer, port),
                Session::Controller(_) => ConnectInfo::new("127.0.0.1", self.find_pair()?),
            };
            let connected = core.session.either().connect(&info);
            registry::pairs().withdraw(std::ptr::from_ref(self) as usize);
            connected.map_err(|error| if self.closing() { destroyed() } else { error.into() })?;
            core.connected = true;
            Ok(())
        })
    }

    /// Waits for the coprocessor with this key to listen.
    fn find_pair(&self) -> Result<u16, Failure> {
        let deadline = Instant::now() + self.config.handshake_timeout;
        loop {
            if let Some(port) = registry::pairs().port(&self.key) {
                return Ok(port);
            }
            if self.closing() {
                return Err(destroyed());
            }
            if Instant::now() >= deadline {
                return Err(TransportError::Timeout {
                    stage: "connect: waiting for the coprocessor of this process that has the same key",
                    waited: self.config.handshake_timeout,
                    hint: format!(
                        "no coprocessor with the key '{}' connects: call connect_async on it first",
                        self.key
                    ),
                }
                .into());
            }
            std::thread::sleep(RETRY);
        }
    }

    /// `alloc_memory`: at least what the channel needs.
    pub(super) fn alloc_memory(&self, bytes: usize, kind: MemKind) -> Result<MemRegion, Failure> {
        self.with_patience(|core| core.alloc_memory(self, bytes, kind))
    }

    /// `exchange_keys`, with a region of its own if there is none yet, and with the channel. `address` is where the caller
    /// says that its region is.
    pub(super) fn exchange_keys(&self, address: Option<u64>) -> Result<PeerRef, Failure> {
        self.with_patience(|core| {
            if address.is_some_and(|address| core.local.is_none_or(|local| local.addr != address)) {
                return Err(Failure::new("the local region is not the one that this session's alloc_memory gave"));
            }
            let local = match core.local {
                Some(local) => local,
                None => core.alloc_memory(self, REGION_BYTES, MemKind::CpuRam)?,
            };
            let session = core.session.either();
            let exchanged = session.exchange_keys(&local).and_then(|peer| {
                session.establish_channel(self.config.channel(), &local, &peer)?;
                Ok(peer)
            });
            match exchanged {
                Ok(peer) => {
                    core.peer = Some(peer);
                    Ok(peer)
                }
                // A call too many has changed nothing. After any other failure there is only to begin anew: the settings, which
                // may be what does not fit, are given once.
                Err(error @ TransportError::OutOfOrder { .. }) => Err(error.into()),
                Err(error) => {
                    core.session.undo(&error);
                    (core.connected, core.local) = (false, None);
                    Err(error.into())
                }
            }
        })
    }

    /// `establish_channel`.
    pub(super) fn establish_channel(&self, transport: &str) -> Result<(), Failure> {
        self.with_patience(|core| {
            self.backend.check_transport(transport)?;
            if core.peer.is_none() || core.established {
                return Err(TransportError::OutOfOrder {
                    call: "establish_channel",
                    state: if core.established { "established" } else { "without its peer's keys" },
                    missing: if core.established { "it has been called" } else { "exchange_keys comes first" },
                }
                .into());
            }
            core.established = true;
            Ok(())
        })
    }

    /// Binds what answers. It needs no lock: a remote coprocessor gets its function while it still waits for its peer.
    pub(super) fn set_answerer(&self, answerer: Answerer) -> Result<(), Failure> {
        if self.role != Role::Coprocessor {
            return Err(Failure::new("a coprocessor function is the coprocessor's, and this session is a controller"));
        }
        if self.closing() {
            return Err(destroyed());
        }
        if self.running.load(Ordering::Acquire) {
            return Err(Failure::new("the coprocessor function cannot change while the session runs: stop it first"));
        }
        let mut bound = self.answerer.lock().unwrap_or_else(PoisonError::into_inner);
        let launches = matches!(answerer, Answerer::Launcher(..));
        let taken = match &*bound {
            Some(other) => Some(matches!(other, Answerer::Launcher(..))),
            None => self.convention.map(|convention| convention == FunctionConvention::LaunchOnce),
        };
        if taken.is_some_and(|taken| taken != launches) {
            return Err(Failure::new(
                "this session is bound to the other convention of coprocessor functions: one per request, or launched \
                 once; a session takes one of them",
            ));
        }
        *bound = Some(answerer);
        Ok(())
    }

    /// Which convention a coprocessor takes.
    pub(super) fn convention(&self) -> FunctionConvention {
        let bound = self.answerer.lock().unwrap_or_else(PoisonError::into_inner);
        match &*bound {
            Some(Answerer::Launcher(..)) => FunctionConvention::LaunchOnce,
            Some(_) => FunctionConvention::PerRequest,
            None => self.convention.unwrap_or_default(),
        }
    }

    /// `set_message_sizes`, that is `commit_work_item`.
    pub(super) fn set_message_sizes(&self, index: u32, request: u64, reply: u64) -> Result<(), Failure> {
        self.with(|core| {
            core.require_established("set_message_sizes")?;
            let session = core.session.controller("set_message_sizes")?;
            let bytes = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
            session.commit_work_item(index, bytes(request), bytes(reply)).map_err(|error| {
                let mut failure = Failure::from(error);
                failure.text.push_str("; longer messages need request= and reply= in both sides' configuration");
                failure
            })?;
            core.items.insert(index, bytes(request));
            Ok(())
        })
    }

    /// `start`.
    pub(super) fn start(&self) -> Result<(), Failure> {
        self.with_patience(|core| {
            core.require_established("start")?;
            if let Session::Coprocessor(session) = &mut core.session {
                let bound = self.answerer.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(answerer) = &*bound
                    && !self.running.load(Ordering::Acquire)
                {
                    // Launchers stay bound; functions are bound anew, which a stopped session allows.
                    match answerer {
                        Answerer::Launcher(..)
                            if session.coprocessor_fn_convention() == FunctionConvention::LaunchOnce => {}
                        _ => answerer.bind(session)?,
                    }
                }
            }
            core.session.either().start()?;
            self.running.store(true, Ordering::Release);
            Ok(())
        })
    }

    /// `stop`. A `collect` in another thread is ended.
    pub(super) fn stop(&self) -> Result<(), Failure> {
        if self.process != std::process::id() {
            return Err(Failure::new("the session is the parent process's: a child may only destroy its copy"));
        }
        self.interrupt.store(true, Ordering::Relaxed);
        let core = self.lock(Some(self.config.stop_timeout));
        self.interrupt.store(self.closing(), Ordering::Relaxed);
        let mut core = core?;
        match &mut *core {
            Some(core) => core.session.either().stop().map_err(Failure::stopping)?,
            None => return Err(destroyed()),
        }
        self.running.store(false, Ordering::Release);
        Ok(())
    }

    /// `destroy`: ends what other threads do with the session, stops it and releases everything. When something does not
    /// end in time, whoever holds the session releases it. In a child process the copy goes and nothing else happens.
    pub(super) fn destroy(&self) -> Result<(), Failure> {
        if self.process != std::process::id() {
            // Held by a thread that the child does not have, it stays.
            let copy = self.core.try_lock().ok().and_then(|mut core| core.take());
            drop(copy);
            return Ok(());
        }
        self.closing.store(true, Ordering::Release);
        self.interrupt.store(true, Ordering::Relaxed);
        if let Some(canceller) = &self.canceller {
            canceller.cancel();
        }
        registry::pairs().withdraw(std::ptr::from_ref(self) as usize);
        let core = self.lock(Some(self.config.stop_timeout + Duration::from_millis(500)));
        let Some(mut core) = core?.take() else { return Err(destroyed()) };
        let stopped = core.session.either().stop().map_err(Failure::stopping);
        drop(core);
        stopped
    }
}

impl Core {
    pub(super) fn require_established(&self, call: &'static str) -> Result<(), Failure> {
        if self.established {
            return Ok(());
        }
        let missing = if self.peer.is_some() { "establish_channel comes first" } else { "exchange_keys comes first" };
        Err(TransportError::OutOfOrder { call, state: "not established", missing }.into())
    }

    fn alloc_memory(&mut self, handle: &Handle, bytes: usize, kind: MemKind) -> Result<MemRegion, Failure> {
        let desc = handle.config.channel();
        let needed = match handle.role {
            Role::Controller => desc.controller_bytes(),
            Role::Coprocessor => desc.coprocessor_bytes(),
        };
        let allocated = self.session.either().alloc_memory(bytes.max(needed), kind);
        self.local = allocated.as_ref().ok().copied().or(self.local);
        // Wrong arguments and a call too many change nothing; after any other failure the session is not connected any more.
        if let Err(error) = &allocated
            && !matches!(
                error,
                TransportError::OutOfOrder { .. } | TransportError::Invalid { .. } | TransportError::Unsupported { .. }
            )
        {
            (self.connected, self.local) = (false, None);
        }
        Ok(allocated?)
    }
}

/// The failure of a call whose session goes away meanwhile.
pub(super) fn destroyed() -> Failure {
    Failure::new("the session has been destroyed")
}
