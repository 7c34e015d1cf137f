//! The side that asks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::lifecycle::State;
use super::link::Link;
use super::{ChannelDesc, ConnectInfo, MemKind, MemRegion, PeerRef, TransportSession, scatter};
use crate::config::SessionConfig;
use crate::engine::clock;
use crate::engine::real_time::{self, Granted, RealTimeReport};
use crate::engine::relay::{Relay, Running};
use crate::engine::spin::{BURST, Spinner};
use crate::error::{Result, TransportError};
use crate::oob::{Message, Role};
use crate::ring::Trailer;

mod bursts;
mod rounds;
mod thread;

use rounds::{Rounds, Staged, WorkItem};

/// Bursts of looks between two looks at the completions.
const PROGRESS_EVERY: u32 = 16;
/// How long a peer that has stopped is waited for before `collect` says so: its word that it has started again may be on
/// its way.
const RESTART_GRACE: Duration = Duration::from_millis(20);

/// The controller's end of a connection: it sends requests and collects their replies.
///
/// By default it has no thread for the rounds: [`collect`](TransportSession::collect) polls on the caller's own, which is
/// the shortest way; [`EngineMode`](crate::EngineMode) has the other. Up to the ring's depth of rounds may be in flight;
/// replies come in the order of the kicks.
///
/// A round: [`write_data_slot`](Self::write_data_slot), [`kick`](Self::kick),
/// [`collect`](TransportSession::collect).
#[derive(Debug)]
pub struct ControllerSession {
    link: Link,
    rounds: Option<Rounds>,
    items: Vec<Option<WorkItem>>,
    /// The largest request of any item; `None` before the first.
    largest_request: Option<usize>,
    /// What was granted of the real-time settings, and what has to stay open for it.
    granted: Option<Granted>,
    report: RealTimeReport,
    /// Ends a wait in `collect` from another thread.
    interrupt: Arc<AtomicBool>,
    /// With `EngineMode::Thread`: the thread's work while it does not run, and the thread while it does. What is in
    /// `rounds` then leads to it and not to the peer.
    relay: Option<Box<Relay>>,
    engine: Option<Running>,
}

impl ControllerSession {
    /// A session that is not yet connected.
    ///
    /// # Errors
    /// [`TransportError::Invalid`] for settings that can never work.
    pub fn new(config: SessionConfig) -> Result<Self> {
        Ok(Self {
            link: Link::new(config, Role::Controller)?,
            rounds: None,
            items: Vec::new(),
            largest_request: None,
            granted: None,
            report: RealTimeReport::default(),
            interrupt: Arc::default(),
            relay: None,
            engine: None,
        })
    }

    /// Does `connect`, `alloc_memory`, `exchange_keys` and `establish_channel` with the configured channel, and commits
    /// work item 0 with the channel's whole request capacity.
    ///
    /// # Errors
    /// Those of the four steps.
    pub fn open(&mut self, info: &ConnectInfo) -> Result<()> {
        let desc = self.link.config.channel.clone();
        self.connect(info)?;
        let local = self.alloc_memory(self.link.region_bytes(&desc), MemKind::CpuRam)?;
        let peer = self.exchange_keys(&local)?;
        self.establish_channel(&desc, &local, &peer)?;
        self.commit_work_item(0, desc.request_capacity, desc.reply_capacity)
    }

    /// Sets the sizes of work item `index`: rounds of up to `request_bytes` whose replies have up to `reply_bytes`. May be
    /// called again to change them. Both are compared with the channel; how long a reply really is, the coprocessor decides.
    ///
    /// # Errors
    /// [`TransportError::Invalid`] when the channel carries less, or for an index above 65,535.
    pub fn commit_work_item(&mut self, index: u32, request_bytes: usize, reply_bytes: usize) -> Result<()> {
        let Some(desc) = &self.link.established else { return Err(self.link.state.refuse("commit_work_item")) };
        for (name, bytes, capacity) in
            [("request", request_bytes, desc.request_capacity), ("reply", reply_bytes, desc.reply_capacity)]
        {
            if bytes > capacity {
                return Err(TransportError::invalid(
                    format!("work item {index}"),
                    format!("has a {name} of {bytes} bytes and the channel carries {capacity}"),
                ));
            }
        }
        if index > 65_535 {
            return Err(TransportError::invalid(format!("work item {index}"), "the largest index is 65535"));
        }
        let index = index as usize;
        if self.items.len() <= index {
            self.items.resize(index + 1, None);
        }
        self.items[index] = Some(WorkItem { request_bytes });
        self.largest_request = self.items.iter().flatten().map(|item| item.request_bytes).max();
        Ok(())
    }

    /// The buffer of the next round's request, for callers that build it in place: as long as the channel's request
    /// capacity. The next kick sends its first bytes, as many as its work item has, with decoder id 0. It keeps its
    /// contents from round to round.
    ///
    /// # Errors
    /// [`TransportError::OutOfOrder`] before `establish_channel`.
    pub fn data_slot(&mut self) -> Result<&mut [u8]> {
        let state = self.link.state;
        let rounds = self.rounds.as_mut().ok_or_else(|| state.refuse("data_slot"))?;
        rounds.staged = Staged::InSlot;
        Ok(&mut rounds.slot)
    }

    /// Copies the next round's request to where it will be sent from. May be called again before the kick: the last call
    /// counts.
    ///
    /// # Errors
    /// [`TransportError::Invalid`] when it is longer than every committed work item; [`TransportError::WindowFull`] when
    /// as many rounds have no reply yet as the ring has slots, those given up included; on verbs, an error of the data path.
    #[inline]
    pub fn write_data_slot(&mut self, payload: &[u8], decoder_id: u32) -> Result<()> {
        let state = self.link.state;
        let Some(rounds) = &mut self.rounds else { return Err(state.refuse("write_data_slot")) };
        if self.largest_request.is_none_or(|largest| payload.len() > largest) {
            return Err(too_much(payload.len(), self.largest_request));
        }
        if let Err(error) = rounds.check_window() {
            return Err(self.no_room(error));
        }
        match rounds.stage(payload, decoder_id) {
            Err(error) if !error.is_recoverable() => Err(self.fail(error)),
            other => other,
        }
    }

    /// Fires one round with work item `index` and returns its sequence number. Each kick is to be paired with a
    /// `collect`.
    ///
    /// # Errors
    /// [`TransportError::Invalid`] when the item was not committed, when the request is longer than it, or when nothing
    /// was written for an item that carries something; [`TransportError::WindowFull`] when as many rounds have no reply yet as
    /// the ring has slots, those given up included; the first error of the data path.
    #[inline]
    pub fn kick(&mut self, index: u32) -> Result<u32> {
        self.link.state.require("kick", State::Running).map_err(|error| self.failure().unwrap_or(error))?;
        let rounds = self.rounds.as_mut().expect("running");
        let Some(item) = self.items.get(index as usize).copied().flatten() else {
            return Err(TransportError::invalid(format!("work item {index}"), "has not been committed"));
        };
        match rounds.check_window() {
            Ok(()) => {
                rounds.kick(item, index).map_err(|error| if error.is_recoverable() { error } else { self.fail(error) })
            }
            Err(error) => Err(self.no_room(error)),
        }
    }

    /// [`collect`](TransportSession::collect) without waiting: `None` when the reply has not arrived.
    ///
    /// # Errors
    /// Those of `collect`, but for the timeout. A peer that has stopped is reported at once, where `collect` first waits
    /// some milliseconds for its next start.
    pub fn try_collect(&mut self, replies: &mut [&mut [u8]]) -> Result<Option<usize>> {
        match self.look("try_collect", true)? {
            Some(trailer) => self.finish(trailer, replies).map(Some),
            None => Ok(None),
        }
    }

    /// Waits for the reply of the oldest round in flight and gives it in place, in the session's own buffer.
    ///
    /// # Errors
    /// Those of [`collect`](TransportSession::collect).
    pub fn collect_reply(&mut self) -> Result<&[u8]> {
        let trailer = self.wait()?;
        let rounds = self.rounds.as_mut().expect("running");
        rounds.take(trailer)?;
        Ok(&rounds.reply[..rounds.reply_length])
    }

    /// The reply that was collected last; empty before the first.
    #[must_use]
    pub fn reply(&self) -> &[u8] {
        self.rounds.as_ref().map_or(&[], |rounds| &rounds.reply[..rounds.reply_length])
    }

    /// Rounds kicked whose reply has not been collected and that were not given up.
    #[must_use]
    pub fn in_flight(&self) -> u32 {
        self.rounds.as_ref().map_or(0, Rounds::in_flight)
    }

    /// Replies that came after their round had been given up, and were dropped.
    #[must_use]
    pub fn late_replies(&self) -> u64 {
        self.rounds.as_ref().map_or(0, |rounds| rounds.late)
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

    /// What was granted of the real-time settings at the last `start`. Without an engine thread
    /// ([`EngineMode::Caller`](crate::EngineMode::Caller)) they apply to the thread that called `start`, which is expected to
    /// be the one that collects.
    #[must_use]
    pub fn real_time_report(&self) -> &RealTimeReport {
        &self.report
    }

    /// Says goodbye to the peer and releases everything. The session may `connect` again.
    pub fn close(&mut self) {
        let _ = self.stop();
        // The queue pair first: nothing may be written any more when the goodbye is out.
        self.rounds = None;
        self.relay = None;
        // One that has not ended keeps its part of the session until it does.
        self.engine = None;
        self.items.clear();
        self.largest_request = None;
        self.link.close();
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

    fn failure(&self) -> Option<TransportError> {
        self.rounds.as_ref().and_then(|rounds| rounds.failure.clone())
    }

    /// Why there is no room for a round. Whoever only tries again is also to hear that a write has failed or the peer is gone:
    /// the ring would stay full for ever. A reply that has come is to be collected first.
    #[cold]
    fn no_room(&mut self, error: TransportError) -> TransportError {
        if !error.is_recoverable() {
            return self.fail(error);
        }
        let Some(rounds) = &mut self.rounds else { return error };
        if let Err(failed) = rounds.path.progress() {
            return self.fail(failed);
        }
        match self.obstacle() {
            Some(end) if !end.is_recoverable() => {
                let rounds = self.rounds.as_ref().expect("seen above");
                if rounds.in_flight() > 0 && rounds.reader.arrived() { error } else { self.fail(end) }
            }
            _ => error,
        }
    }

    /// Keeps the first error for every later call.
    #[cold]
    fn fail(&mut self, error: TransportError) -> TransportError {
        if let Some(rounds) = &mut self.rounds {
            let first = rounds.failure.get_or_insert(error).clone();
            self.link.state = State::Failed;
            return first;
        }
        error
    }

    /// One look for the reply of the oldest round in flight.
    #[inline]
    fn look(&mut self, call: &'static str, stopped_counts: bool) -> Result<Option<Trailer>> {
        if self.link.state != State::Running {
            return Err(self.failure().unwrap_or_else(|| self.link.state.refuse(call)));
        }
        let rounds = self.rounds.as_mut().expect("running");
        if let Some(kept) = rounds.kept {
            return Ok(Some(kept));
        }
        if rounds.in_flight() == 0 {
            return Err(TransportError::NothingInFlight);
        }
        if rounds.path.holds() {
            self.kick_queued()?;
        }
        let rounds = self.rounds.as_mut().expect("running");
        match rounds.poll() {
            Ok(Some(trailer)) => Ok(Some(trailer)),
            Ok(None) => self.look_around(stopped_counts),
            Err(error) => Err(self.fail(error)),
        }
    }

    /// What there is to notice when no reply is there. `stopped_counts`: do not wait for
    /// a peer that has stopped to start again.
    fn look_around(&mut self, stopped_counts: bool) -> Result<Option<Trailer>> {
        let rounds = self.rounds.as_mut().expect("running");
        if let Err(error) = rounds.path.progress() {
            return Err(self.fail(error));
        }
        let Some(obstacle) = self.obstacle() else { return Ok(None) };
        let rounds = self.rounds.as_mut().expect("running");
        // What the peer wrote before it ended is there by now.
        match rounds.poll() {
            Ok(None) if obstacle.is_recoverable() && !stopped_counts => Ok(None),
            Ok(None) if obstacle.is_recoverable() => {
                rounds.give_up_oldest();
                Err(obstacle)
            }
            Ok(None) => Err(self.fail(obstacle)),
            Ok(found) => Ok(found),
            Err(error) => Err(self.fail(error)),
        }
    }

    /// Polls until the reply of the oldest round in flight is there.
    #[inline]
    fn wait(&mut self) -> Result<Trailer> {
        let began = clock::now();
        let patience = self.link.config.reply_timeout;
        if let Some(trailer) = self.look("collect", false)? {
            return Ok(trailer);
        }
        let mut bursts = 0_u32;
        loop {
            let rounds = self.rounds.as_mut().expect("running");
            for _ in 0..BURST {
                if rounds.reader.arrived() {
                    match rounds.poll() {
                        Ok(Some(trailer)) => return Ok(trailer),
                        // Checking it again and again must not keep the clock from being looked at.
                        Ok(None) => break,
                        Err(error) => return Err(self.fail(error)),
                    }
                }
                std::hint::spin_loop();
            }
            if let Some(spinner) = &rounds.spinner {
                spinner.rest(bursts);
            }
            let waited = clock::since(began, clock::now());
            bursts = bursts.wrapping_add(1);
            if bursts.is_multiple_of(PROGRESS_EVERY)
                && let Some(trailer) = self.look_around(waited > RESTART_GRACE.as_nanos() as u64)?
            {
                return Ok(trailer);
            }
            if waited > patience.as_nanos() as u64 {
                // This thread may have been put aside meanwhile, and the reply have come.
                return match self.look_around(false)? {
                    Some(trailer) => Ok(trailer),
                    None => Err(self.timed_out(patience)),
                };
            }
            if self.interrupt.load(Ordering::Relaxed) {
                return Err(interrupted());
            }
        }
    }

    #[cold]
    fn timed_out(&mut self, waited: Duration) -> TransportError {
        let rounds = self.rounds.as_mut().expect("running");
        let damaged = rounds.reader.arrived() || self.engine.as_ref().is_some_and(Running::unverified);
        let sequence = rounds.oldest();
        rounds.give_up_oldest();
        TransportError::Timeout {
            stage: "collect: waiting for a reply",
            waited,
            hint: if damaged {
                format!(
                    "round {sequence} was given up: its reply's check never matched, so it is damaged or a stranger's"
                )
            } else {
                format!(
                    "round {sequence} was given up; the peer's connection stands but no answer came: its function is slower \
                     than the reply timeout, its engine has not been started, or its process is frozen"
                )
            },
        }
    }

    /// Hands over a reply that has been seen.
    #[inline]
    fn finish(&mut self, trailer: Trailer, buffers: &mut [&mut [u8]]) -> Result<usize> {
        let rounds = self.rounds.as_mut().expect("running");
        if trailer.status == 0
            && let Err(error) = scatter(&rounds.reply[..trailer.length as usize], buffers)
        {
            rounds.kept = Some(trailer);
            return Err(error);
        }
        rounds.take(trailer)?;
        Ok(rounds.reply_length)
    }
}

/// The error of a `collect` that another thread ended.
#[cold]
pub(crate) fn interrupted() -> TransportError {
    TransportError::Engine { problem: "the wait for a reply was ended by a stop or destroy in another thread".into() }
}

#[cold]
fn too_much(bytes: usize, largest: Option<usize>) -> TransportError {
    TransportError::invalid(
        "write_data_slot",
        match largest {
            Some(largest) => format!("{bytes} bytes were given and the largest work item carries {largest}"),
            None => "no work item has been committed".into(),
        },
    )
}

impl TransportSession for ControllerSession {
    fn connect(&mut self, info: &ConnectInfo) -> Result<()> {
        if self.link.is_over() {
            self.close();
        }
        clock::prepare();
        self.link.connect(info)
    }

    fn alloc_memory(&mut self, bytes: usize, kind: MemKind) -> Result<MemRegion> {
        self.link.alloc_memory(bytes, kind)
    }

    fn exchange_keys(&mut self, local: &MemRegion) -> Result<PeerRef> {
        self.link.exchange_keys(local)
    }

    fn establish_channel(&mut self, desc: &ChannelDesc, local: &MemRegion, peer: &PeerRef) -> Result<()> {
        let movement = self.link.establish_channel(desc, local, peer)?;
        let near = self.near(movement, desc)?;
        self.rounds = Some(Rounds::new(near, desc));
        Ok(())
    }

    fn start(&mut self) -> Result<()> {
        self.link.state.require("start", State::Established).map_err(|error| self.failure().unwrap_or(error))?;
        real_time::check(&self.link.config)?;
        if let Some(relay) = self.relay.take() {
            self.start_engine(relay)?;
        } else {
            let rounds = self.rounds.as_mut().expect("established");
            rounds.spinner = Some(Spinner::new(self.link.config.cpu.is_some()));
            let granted = real_time::Settings::from(&self.link.config).apply();
            self.report = granted.report.clone();
            self.granted = Some(granted);
        }
        self.link.state = State::Running;
        self.link.tell(&Message::Started);
        Ok(())
    }

    #[inline]
    fn collect(&mut self, replies: &mut [&mut [u8]]) -> Result<usize> {
        let trailer = self.wait()?;
        self.finish(trailer, replies)
    }

    fn stop(&mut self) -> Result<()> {
        self.stop_engine()?;
        let Some(rounds) = &mut self.rounds else { return Ok(()) };
        rounds.spinner = None;
        self.granted = None;
        if self.link.state == State::Running {
            if let Some(kept) = rounds.kept.take() {
                tracing::debug!(round = kept.sequence, "stopped with a reply not collected");
            }
            // Everything in flight is given up; late replies will be dropped one by one.
            rounds.given_up_before = rounds.writer.sequence();
            rounds.staged = Staged::Nothing;
            rounds.writer.clear();
            if let Err(error) = rounds.path.flush(Instant::now() + Duration::from_millis(5)) {
                tracing::debug!(%error, "stopping");
                // What had been kicked is lost, so another start could not go on. A peer that has ended says so itself.
                if !error.is_recoverable()
                    && self.link.peer.obstacle("stop").is_none_or(|obstacle| obstacle.is_recoverable())
                {
                    self.fail(error);
                    return Ok(());
                }
            }
            self.link.state = State::Established;
            self.link.tell(&Message::Stopped);
        }
        Ok(())
    }

    fn last_rtt_ns(&self) -> u64 {
        self.rounds.as_ref().map_or(0, |rounds| rounds.last_rtt)
    }
}

impl Drop for ControllerSession {
    fn drop(&mut self) {
        if self.link.is_in_a_child() {
            // Whatever holds the way to the peer: the data path itself, or the thread's half of it.
            std::mem::forget((self.rounds.take(), self.relay.take(), self.engine.take()));
            return self.link.abandon();
        }
        self.close();
    }
}
