//! A controller's rounds on a thread of their own: [`EngineMode::Thread`](crate::EngineMode::Thread).
//!
//! The caller works with two rings in this process as it would with the peer's, and knows no difference: window, late
//! replies and time-outs are its own. This thread carries each frame on: requests from the first ring to the peer, and the
//! peer's replies to the second. Both rings have as many slots as the peer's, so that the window that keeps those from
//! running over keeps these too: a request's slot is taken again only after the reply of the request that was in it has been
//! seen, and the same is true of the reply's.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;

use super::peer::{Peer, Phase};
use super::serve::{FLUSH_BOUND, MOST_GATHERED, PROGRESS_EVERY, too_long};
use super::spin::{BURST, Spinner};
use super::{Engine, Shared, Work};
use crate::config::SessionConfig;
use crate::data_path::DataPath;
use crate::data_path::shared_memory::SharedMemory;
use crate::error::{Result, TransportError};
use crate::ring::{Check, FrameReader, FrameWriter, Geometry, Polled, SharedBytes, Trailer};
use crate::session::ChannelDesc;

/// How long the caller waits for the thread to look at the ring once more before it believes that nothing is there.
const SETTLE_BOUND: Duration = Duration::from_secs(1);

/// What the thread tells its caller beside the replies.
#[derive(Debug, Default)]
struct Told {
    /// Bursts of looks that have ended.
    bursts: CachePadded<AtomicU64>,
    /// The next reply is there and does not pass its check.
    unverified: AtomicBool,
}

/// All that the thread works with.
#[derive(Debug)]
pub(crate) struct Relay {
    path: DataPath,
    shared: Arc<Shared>,
    peer: Arc<Peer>,
    told: Arc<Told>,
    /// The caller's requests, and the one that is being carried on.
    requests: FrameReader,
    request: Vec<u8>,
    /// To the peer.
    writer: FrameWriter,
    /// From the peer.
    reader: FrameReader,
    reply: Vec<u8>,
    /// The caller's replies.
    replies: FrameWriter,
    replies_memory: SharedBytes,
    replies_geometry: Geometry,
}

/// The caller's end.
pub(crate) struct Near {
    pub(crate) path: DataPath,
    pub(crate) reader: FrameReader,
    pub(crate) writer: FrameWriter,
}

impl Relay {
    /// Puts two rings between a caller and the data path, the reader and the writer that it would have worked with.
    ///
    /// # Errors
    /// [`TransportError::System`] when there is no memory for them.
    pub(crate) fn between(
        path: DataPath,
        reader: FrameReader,
        writer: FrameWriter,
        desc: &ChannelDesc,
        peer: Arc<Peer>,
    ) -> Result<(Self, Near)> {
        // The rings are this process's own: nobody else's frames can be in them.
        let check = Check::Session(0);
        let first = writer.sequence();
        let ring = |capacity| {
            let geometry = Geometry::new(desc.depth, capacity);
            crate::data_path::memory_limit::check(geometry.ring_bytes())?;
            let memory = SharedBytes::anonymous(geometry.ring_bytes())
                .map_err(|error| TransportError::system("mmap", "a ring between two threads", error))?;
            let reader = FrameReader::new(memory.clone(), geometry, check, first);
            reader.prepare();
            Ok((memory, geometry, reader, FrameWriter::new(geometry, check, first)))
        };
        let (requests_memory, requests_geometry, requests, near_writer) = ring(desc.request_capacity)?;
        let (replies_memory, replies_geometry, near_reader, replies) = ring(desc.reply_capacity)?;
        let near = SharedMemory::between_threads(requests_memory, requests_geometry);
        let relay = Self {
            path,
            shared: Arc::default(),
            peer,
            told: Arc::default(),
            requests,
            request: vec![0; requests_geometry.capacity],
            writer,
            reply: vec![0; reader.geometry().capacity],
            reader,
            replies,
            replies_memory,
            replies_geometry,
        };
        Ok((relay, Near { path: DataPath::SharedMemory(near), reader: near_reader, writer: near_writer }))
    }

    /// Carries one request on, if it is there.
    #[inline]
    fn forward(&mut self) -> Result<bool> {
        let Polled::Frame(Trailer { length, decoder_id, .. }) = self.requests.poll(&mut self.request) else {
            return Ok(false);
        };
        let sequence = self.writer.sequence();
        let (memory, frame_end) = self.path.slot(sequence)?;
        self.writer.stage(memory, frame_end, &self.request[..length as usize]);
        let bytes = self.writer.publish(memory, frame_end, 0, decoder_id);
        self.requests.advance();
        self.path.send(sequence, bytes)?;
        Ok(true)
    }

    /// Carries on, with one doorbell, the requests that are there when one has left. They wait for nothing but their copy.
    fn forward_waiting(&mut self) -> Result<()> {
        while self.requests.arrived() {
            let mut result = Ok(());
            self.path.hold(true);
            for _ in 0..MOST_GATHERED {
                match self.forward() {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(error) => {
                        result = Err(error);
                        break;
                    }
                }
            }
            self.path.hold(false);
            let sent = self.path.post_held();
            result.and(sent)?;
        }
        Ok(())
    }

    /// Carries one reply back, if it is there.
    #[inline]
    fn give_back(&mut self) -> Result<bool> {
        // What comes unasked is not looked at: its slot may still hold a reply that the caller reads.
        if self.reader.expected() == self.writer.sequence() {
            return Ok(false);
        }
        let Trailer { length, status, decoder_id, .. } = match self.reader.poll(&mut self.reply) {
            Polled::Frame(trailer) => trailer,
            Polled::Empty => return Ok(false),
            Polled::Unverified => {
                self.told.unverified.store(true, Ordering::Relaxed);
                return Ok(false);
            }
            Polled::TooLong(trailer) => return Err(too_long(&trailer, self.reader.geometry())),
        };
        let frame_end = self.replies_geometry.frame_end(self.replies.sequence());
        self.replies.stage(&self.replies_memory, frame_end, &self.reply[..length as usize]);
        self.replies.publish(&self.replies_memory, frame_end, status, decoder_id);
        self.reader.advance();
        if self.told.unverified.load(Ordering::Relaxed) {
            self.told.unverified.store(false, Ordering::Relaxed);
        }
        self.shared.count();
        Ok(true)
    }

    /// Looks once in each direction.
    #[inline]
    fn turn(&mut self) -> Result<bool> {
        let mut moved = false;
        if self.requests.arrived() {
            moved = self.forward()?;
            if self.path.gathers() {
                self.forward_waiting()?;
            }
        }
        Ok(self.give_back()? || moved)
    }

    fn carry(&mut self, spinner: &Spinner) -> Result<()> {
        let mut bursts = 0_u32;
        loop {
            let mut moved = false;
            for _ in 0..BURST {
                moved = self.turn()?;
                if moved {
                    break;
                }
                std::hint::spin_loop();
            }
            if !moved {
                // Release: whatever was there before this burst has been carried on. One writer: a load and a store are enough.
                let ended = self.told.bursts.load(Ordering::Relaxed) + 1;
                self.told.bursts.store(ended, Ordering::Release);
            }
            if self.shared.stopping() {
                return self.finish();
            }
            if moved {
                bursts = 0;
                continue;
            }
            if self.peer.phase() >= Phase::Closed {
                // What the peer wrote before it ended is there by now.
                while self.give_back()? {}
                return Err(self.peer.obstacle("collect").expect("an ended peer is an obstacle"));
            }
            bursts = bursts.saturating_add(1);
            spinner.rest(bursts);
            if bursts.is_multiple_of(PROGRESS_EVERY) || bursts == u32::MAX {
                self.path.progress()?;
            }
        }
    }

    /// Sends what the caller had kicked, and lets it arrive.
    fn finish(&mut self) -> Result<()> {
        while self.forward()? {}
        if self.peer.phase() < Phase::Closed
            && let Err(error) = self.path.flush(Instant::now() + FLUSH_BOUND)
        {
            tracing::debug!(%error, "stopping");
        }
        Ok(())
    }
}

impl Work for Relay {
    fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    fn run(&mut self, spinner: &Spinner) -> Result<()> {
        self.carry(spinner).map_err(|error| {
            // What a call might be tried again after has ended this thread, and the session with it.
            if error.is_recoverable() { TransportError::Engine { problem: error.to_string() } } else { error }
        })
    }

    fn overdue(bound: Duration) -> String {
        format!("the controller's engine has not ended within {bound:?}; stop may be called again")
    }
}

/// The thread, while it runs.
#[derive(Debug)]
pub(crate) struct Running {
    engine: Engine<Relay>,
    shared: Arc<Shared>,
    told: Arc<Told>,
}

impl Running {
    /// Starts it.
    ///
    /// # Errors
    /// [`TransportError::System`] when no thread can be had; what it would have worked with comes back.
    pub(crate) fn start(relay: Relay, config: &SessionConfig) -> Result<Self, (TransportError, Box<Relay>)> {
        let (shared, told) = (relay.shared.clone(), relay.told.clone());
        Ok(Self { engine: Engine::start(relay, config, None)?, shared, told })
    }

    /// What was granted of the real-time settings.
    pub(crate) fn report(&self) -> &super::RealTimeReport {
        &self.engine.report
    }

    /// Ends it, after all that has been kicked is sent.
    ///
    /// # Errors
    /// [`TransportError::Engine`] when it does not end within `bound`: it may be called again.
    pub(crate) fn stop(&mut self, bound: Duration) -> Result<Relay> {
        self.engine.stop(bound)
    }

    /// The error that has ended it.
    pub(crate) fn failure(&self) -> Option<&TransportError> {
        self.shared.failure()
    }

    /// Whether the next reply is there and does not pass its check.
    pub(crate) fn unverified(&self) -> bool {
        self.told.unverified.load(Ordering::Relaxed)
    }

    /// Returns when whatever reply was there before the call has been carried back.
    pub(crate) fn settle(&self) {
        let before = self.told.bursts.load(Ordering::Acquire);
        let deadline = Instant::now() + SETTLE_BOUND;
        // The burst that is under way may have begun before the call; the one after it has not.
        while self.told.bursts.load(Ordering::Acquire).wrapping_sub(before) < 2
            && self.failure().is_none()
            && Instant::now() < deadline
        {
            rustix::thread::sched_yield();
        }
    }
}
