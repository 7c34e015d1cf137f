//! The side that answers.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use crossbeam_utils::CachePadded;

use super::function::{CoprocessorFunction, FunctionError, Functions};
use super::lifecycle::State;
use super::link::{Canceller, Link};
use super::{ChannelDesc, ConnectInfo, MemKind, MemRegion, PeerRef, TransportSession, scatter};
use crate::config::SessionConfig;
use crate::engine::clock;
use crate::engine::real_time::{self, RealTimeReport};
use crate::engine::serve::{Loop, Parts, Served, Source, function_failed};
use crate::engine::spin::{BURST, Spinner};
use crate::engine::worker::{Launcher, WorkerRings};
use crate::engine::{Engine, Shared, Work as _};
use crate::error::{Result, TransportError};
use crate::oob::{Message, Role};
use crate::ring::{Check, FrameReader, Polled, Trailer};

/// Which of the two kinds of coprocessor function a session has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum FunctionConvention {
    /// Called once for each request, on the engine thread.
    #[default]
    PerRequest,
    /// Launched once at `start`; works on the rings itself.
    LaunchOnce,
}

/// The coprocessor's end of a connection: it listens, and an engine thread answers requests between `start` and `stop`.
///
/// When a session has ended because its peer closed it or was lost, `stop` and then `connect` wait for the next client on
/// the same port.
#[derive(Debug)]
pub struct CoprocessorSession {
    link: Link,
    /// What answers, until the channel is established; then the loop has it.
    source: Source,
    convention: FunctionConvention,
    work: Work,
    collector: Option<Collector>,
    shared: Option<Arc<Shared>>,
    report: RealTimeReport,
    /// Ends a wait in `collect` from another thread.
    interrupt: Arc<AtomicBool>,
}

/// Where the loop is.
#[derive(Debug)]
enum Work {
    /// There is none before the channel is established.
    None,
    /// Stopped.
    Here(Box<Loop>),
    /// On the engine thread.
    There(Engine<Loop>),
    /// The engine has ended, and its worker not yet.
    Leaving(Box<Loop>),
}

/// The session's end of the ring of served replies.
#[derive(Debug)]
struct Collector {
    reader: FrameReader,
    taken: Arc<CachePadded<AtomicU32>>,
    reply: Vec<u8>,
}

impl CoprocessorSession {
    /// A session that is not yet connected.
    ///
    /// # Errors
    /// [`TransportError::Invalid`] for settings that can never work.
    pub fn new(config: SessionConfig) -> Result<Self> {
        Ok(Self {
            link: Link::new(config, Role::Coprocessor)?,
            source: Source::default(),
            convention: FunctionConvention::PerRequest,
            work: Work::None,
            collector: None,
            shared: None,
            report: RealTimeReport::default(),
            interrupt: Arc::default(),
        })
    }

    /// Binds the out-of-band port without waiting for a client, and returns the address with the real port: with port 0
    /// the system chooses a free one. The port stays bound for all later sessions.
    ///
    /// # Errors
    /// [`TransportError::System`] when the address cannot be bound.
    pub fn listen(&mut self, port: u16) -> Result<SocketAddr> {
        self.link.listen(port)
    }

    /// Does `connect`, `alloc_memory`, `exchange_keys` and `establish_channel` with the configured channel.
    ///
    /// # Errors
    /// Those of the four steps.
    pub fn open(&mut self, info: &ConnectInfo) -> Result<()> {
        let desc = self.link.config.channel.clone();
        self.connect(info)?;
        let local = self.alloc_memory(self.link.region_bytes(&desc), MemKind::CpuRam)?;
        let peer = self.exchange_keys(&local)?;
        self.establish_channel(&desc, &local, &peer)
    }

    /// The channel that the client means to establish, for coprocessors that adopt it: known after `connect`. It is a
    /// stranger's wish until checked: it says how much memory the rings will take
    /// ([`ChannelDesc::coprocessor_bytes`]).
    #[must_use]
    pub fn proposed_channel(&self) -> Option<&ChannelDesc> {
        self.link.proposed.as_ref()
    }

    /// Like [`open`](Self::open), with the channel that the client proposes, as long as it takes no more than
    /// `most_bytes` of memory: the two rings, the buffer that replies are sent from and the copies for `collect`.
    ///
    /// # Errors
    /// Those of the four steps; [`TransportError::Invalid`] for a channel that takes more or cannot be built, after which
    /// the session has been closed and may `connect` again.
    pub fn open_as_proposed(&mut self, info: &ConnectInfo, most_bytes: usize) -> Result<()> {
        self.connect(info)?;
        let desc = self.link.proposed.clone().expect("connected");
        let checked = desc.validate().and_then(|()| {
            // On verbs the buffer that replies are sent from has twice the slots of the reply ring.
            let bytes = desc.coprocessor_bytes().saturating_add(desc.controller_bytes().saturating_mul(4));
            if bytes <= most_bytes {
                return Ok(());
            }
            Err(TransportError::invalid(
                "proposed channel",
                format!("takes {bytes} bytes where {most_bytes} are allowed"),
            ))
        });
        if let Err(error) = checked {
            self.link.refuse(&error);
            return Err(error);
        }
        let local = self.alloc_memory(self.link.region_bytes(&desc), MemKind::CpuRam)?;
        let peer = self.exchange_keys(&local)?;
        self.establish_channel(&desc, &local, &peer)
    }

    /// What ends a wait for a client from another thread.
    #[must_use]
    pub fn canceller(&self) -> Canceller {
        self.link.canceller()
    }

    /// Undoes a bring-up, telling the peer why if it still listens.
    #[cfg(feature = "capi")]
    pub(crate) fn undo(&mut self, error: &TransportError) {
        self.link.refuse(error);
    }

    /// What ends a wait in `collect` from another thread, for as long as it is true.
    #[cfg(feature = "capi")]
    pub(crate) fn interrupt(&self) -> Arc<AtomicBool> {
        self.interrupt.clone()
    }

    /// Sets the function that answers every decoder id which has none of its own. May be called in any state but while
    /// the engine runs; it is kept over sessions.
    ///
    /// # Errors
    /// [`TransportError::OutOfOrder`] while the engine runs; [`TransportError::Invalid`] when a launcher has been set.
    pub fn set_coprocessor_fn(&mut self, function: impl CoprocessorFunction + 'static) -> Result<()> {
        self.functions("set_coprocessor_fn")?.set_fallback(Box::new(function));
        Ok(())
    }

    /// Sets the function that answers one decoder id.
    ///
    /// # Errors
    /// As [`set_coprocessor_fn`](Self::set_coprocessor_fn).
    pub fn set_decoder(&mut self, decoder_id: u32, function: impl CoprocessorFunction + 'static) -> Result<()> {
        self.functions("set_decoder")?.insert(decoder_id, Box::new(function));
        Ok(())
    }

    /// Sets the launcher of a persistent worker in place of functions: called once in each `start`, it launches a worker
    /// that takes requests from the receive ring and leaves replies in the hand-off ring until it is told to stop.
    ///
    /// # Errors
    /// [`TransportError::OutOfOrder`] while the engine runs; [`TransportError::Invalid`] when a function has been set.
    pub fn set_coprocessor_launcher(
        &mut self,
        launcher: impl FnMut(WorkerRings) -> Result<(), FunctionError> + Send + 'static,
    ) -> Result<()> {
        let source = self.source("set_coprocessor_launcher")?;
        if matches!(source, Source::Functions(functions) if !functions.is_empty()) {
            return Err(TransportError::invalid(
                "coprocessor launcher",
                "this session has functions that are called per request; a session takes one convention",
            ));
        }
        *source = Source::Worker { launcher: Launcher::new(launcher), hand_off: None };
        self.convention = FunctionConvention::LaunchOnce;
        Ok(())
    }

    /// Which convention the session has been bound to: per request until a launcher is set.
    #[must_use]
    pub fn coprocessor_fn_convention(&self) -> FunctionConvention {
        self.convention
    }

    /// Rounds served since the channel was established.
    #[must_use]
    pub fn served(&self) -> u64 {
        self.shared.as_ref().map_or(0, |shared| shared.served())
    }

    /// Why the engine has ended by itself; `Ok` while it runs or has never been started.
    ///
    /// # Errors
    /// The first error: of the peer, of the data path or of the protocol.
    pub fn status(&self) -> Result<()> {
        match self.shared.as_ref().and_then(|shared| shared.failure()) {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// The data path in use, `shm` or `verbs`; `none` before `connect`.
    #[must_use]
    pub fn data_path(&self) -> &'static str {
        self.link.path_name()
    }

    /// The RDMA device and port in use, as in `rxe0 port 1`; `None` on shared memory and before `connect`.
    #[must_use]
    pub fn device(&self) -> Option<&str> {
        self.link.device.as_deref()
    }

    /// What was granted of the real-time settings at the last `start`.
    #[must_use]
    pub fn real_time_report(&self) -> &RealTimeReport {
        &self.report
    }

    /// Stops, says goodbye to the peer and releases everything but the port. The session may `connect` again.
    ///
    /// # Errors
    /// [`TransportError::Engine`] when a coprocessor function does not return within the stop timeout; nothing is
    /// released then.
    pub fn close(&mut self) -> Result<()> {
        self.stop()?;
        // The functions are kept for the next session; the queue pair goes before the goodbye is out.
        if let Work::Here(work) = std::mem::replace(&mut self.work, Work::None) {
            self.source = work.into_source();
        }
        self.collector = None;
        self.shared = None;
        self.link.close();
        Ok(())
    }

    fn source(&mut self, call: &'static str) -> Result<&mut Source> {
        match &mut self.work {
            Work::There(_) | Work::Leaving(_) => Err(State::Running.refuse(call)),
            Work::Here(work) => Ok(work.source()),
            Work::None => Ok(&mut self.source),
        }
    }

    fn functions(&mut self, call: &'static str) -> Result<&mut Functions> {
        match self.source(call)? {
            Source::Functions(functions) => Ok(functions),
            Source::Worker { .. } => Err(TransportError::invalid(
                "coprocessor function",
                "this session has a launcher; a session takes one convention",
            )),
        }
    }

    /// One look for a served reply.
    fn look(&mut self) -> Option<Trailer> {
        let collector = self.collector.as_mut()?;
        match collector.reader.poll(&mut collector.reply) {
            Polled::Frame(trailer) => Some(trailer),
            _ => None,
        }
    }

    fn finish(&mut self, trailer: Trailer, buffers: &mut [&mut [u8]]) -> Result<usize> {
        let collector = self.collector.as_mut().expect("a reply was found");
        let reply = &collector.reply[..trailer.length as usize];
        let result = if trailer.status == 0 { scatter(reply, buffers) } else { Err(function_failed(&trailer, reply)) };
        if !matches!(result, Err(TransportError::ReplyTooLarge { .. })) {
            collector.reader.advance();
            collector.taken.store(collector.reader.expected(), Ordering::Release);
        }
        result
    }
}

impl TransportSession for CoprocessorSession {
    fn connect(&mut self, info: &ConnectInfo) -> Result<()> {
        if self.link.is_over() || (self.status().is_err() && self.link.state == State::Established) {
            self.close()?;
        }
        self.link.connect(info)
    }

    fn alloc_memory(&mut self, bytes: usize, kind: MemKind) -> Result<MemRegion> {
        self.link.alloc_memory(bytes, kind)
    }

    fn exchange_keys(&mut self, local: &MemRegion) -> Result<PeerRef> {
        self.link.exchange_keys(local)
    }

    fn establish_channel(&mut self, desc: &ChannelDesc, local: &MemRegion, peer: &PeerRef) -> Result<()> {
        self.link.state.require("establish_channel", State::KeysExchanged)?;
        desc.validate()?;
        let served = Served::new(desc.replies())?;
        let collector = Collector {
            reader: FrameReader::new(served.memory.clone(), served.geometry, Check::Session(0), 1),
            taken: served.taken.clone(),
            reply: vec![0; desc.reply_capacity],
        };
        let movement = self.link.establish_channel(desc, local, peer)?;
        let work = Loop::new(Parts {
            path: movement.path,
            peer: self.link.peer.clone(),
            reader: movement.reader,
            writer: movement.writer,
            source: std::mem::take(&mut self.source),
            served,
            patience: self.link.config.reply_timeout,
            reply_capacity: desc.reply_capacity,
        });
        self.shared = Some(work.shared().clone());
        self.work = Work::Here(Box::new(work));
        self.collector = Some(collector);
        Ok(())
    }

    fn start(&mut self) -> Result<()> {
        self.link.state.require("start", State::Established)?;
        // An engine that has ended by itself cannot go on: its reason is every caller's.
        self.status()?;
        let Work::Here(mut work) = std::mem::replace(&mut self.work, Work::None) else {
            unreachable!("an established session has its loop")
        };
        if matches!(work.source(), Source::Functions(functions) if functions.is_empty()) {
            self.work = Work::Here(work);
            return Err(TransportError::OutOfOrder {
                call: "start",
                state: self.link.state.name(),
                missing: "set_coprocessor_fn or set_coprocessor_launcher comes first",
            });
        }
        // Before the launch: a worker is not to be left behind.
        if let Err(error) = real_time::check(&self.link.config) {
            self.work = Work::Here(work);
            return Err(error);
        }
        if let Err(error) = work.launch() {
            self.work = Work::Here(work);
            return Err(error);
        }
        match Engine::start(*work, &self.link.config, self.link.teller()) {
            Ok(engine) => {
                self.report = engine.report.clone();
                self.work = Work::There(engine);
                self.link.state = State::Running;
                self.link.tell(&Message::Started);
                Ok(())
            }
            Err((error, work)) => {
                // The worker has been told to end; the next stop waits for it.
                self.work = Work::Leaving(work);
                Err(error)
            }
        }
    }

    fn collect(&mut self, replies: &mut [&mut [u8]]) -> Result<usize> {
        self.link.state.require("collect", State::Running)?;
        let began = clock::now();
        let patience = self.link.config.reply_timeout;
        let spinner = Spinner::new(false);
        let mut bursts = 0_u32;
        loop {
            for _ in 0..BURST {
                if let Some(trailer) = self.look() {
                    return self.finish(trailer, replies);
                }
                std::hint::spin_loop();
            }
            bursts = bursts.saturating_add(1);
            spinner.rest(bursts);
            if let Err(error) = self.status() {
                // What was served before the end is still given.
                return match self.look() {
                    Some(trailer) => self.finish(trailer, replies),
                    None => Err(error),
                };
            }
            if self.interrupt.load(Ordering::Relaxed) {
                return Err(super::controller::interrupted());
            }
            if clock::since(began, clock::now()) > patience.as_nanos() as u64 {
                return Err(TransportError::Timeout {
                    stage: "collect: waiting for a served round",
                    waited: patience,
                    hint: "the controller lives but has sent nothing".into(),
                });
            }
        }
    }

    fn stop(&mut self) -> Result<()> {
        let bound: Duration = self.link.config.stop_timeout;
        if let Work::There(engine) = &mut self.work {
            let work = engine.stop(bound)?;
            self.work = Work::Leaving(Box::new(work));
        }
        if let Work::Leaving(work) = &mut self.work {
            work.await_worker(bound)?;
            if let Work::Leaving(work) = std::mem::replace(&mut self.work, Work::None) {
                self.work = Work::Here(work);
            }
            if self.link.state == State::Running {
                self.link.state = State::Established;
                self.link.tell(&Message::Stopped);
            }
        }
        Ok(())
    }
}

impl Drop for CoprocessorSession {
    fn drop(&mut self) {
        if self.link.is_in_a_child() {
            std::mem::forget(std::mem::replace(&mut self.work, Work::None));
            return self.link.abandon();
        }
        if let Err(error) = self.close() {
            // A function that does not return keeps its thread, and with it the memory that the peer may write to. The
            // thread releases both when it returns.
            tracing::warn!(%error, "dropped");
            self.link.close();
        }
    }
}
