//! The launch-once convention: a persistent worker, such as a device kernel, takes requests straight from the receive
//! ring and leaves its replies in a hand-off ring, from which the engine sends them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;

use super::Shared;
use super::peer::{Peer, Phase};
use super::spin::{BURST, Spinner};
use crate::error::{Result, TransportError};
use crate::ring::{Check, FrameReader, FrameWriter, Geometry, Polled, SharedBytes, Trailer};
use crate::session::function::{CoprocessorFunction, FunctionError, Functions, Request, discard_panic, panic_text};

#[cfg(test)]
mod tests;

type Launch = dyn FnMut(WorkerRings) -> Result<(), FunctionError> + Send;

/// Starts a worker. Called once in each `start`.
pub(crate) struct Launcher(Box<Launch>);

impl std::fmt::Debug for Launcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Launcher")
    }
}

impl Launcher {
    pub(crate) fn new(launch: impl FnMut(WorkerRings) -> Result<(), FunctionError> + Send + 'static) -> Self {
        Self(Box::new(launch))
    }

    pub(crate) fn launch(&mut self, rings: WorkerRings) -> Result<()> {
        let launched = catch_unwind(AssertUnwindSafe(|| (self.0)(rings))).unwrap_or_else(|panic| {
            let text = format!("it panicked: {}", panic_text(&*panic));
            discard_panic(panic);
            Err(text.into())
        });
        launched
            .map_err(|error| TransportError::Engine { problem: format!("the worker could not be launched: {error}") })
    }
}

/// What a persistent worker works with. It has to drop this soon after [`stopped`](Self::stopped) turns true: `stop`
/// waits for that.
#[derive(Debug)]
pub struct WorkerRings {
    requests: FrameReader,
    replies: FrameWriter,
    hand_off: SharedBytes,
    geometry: Geometry,
    shared: Arc<Shared>,
    peer: Arc<Peer>,
    /// Sequence number up to which the engine has taken replies.
    taken: Arc<CachePadded<AtomicU32>>,
    /// Since when the next request has been there without passing its check.
    unverified: Option<Instant>,
    /// How long that may last.
    patience: Duration,
    /// Its count tells the engine whether the worker is still there.
    _alive: Arc<()>,
}

/// A request that a worker has taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct TakenRequest {
    /// Which decoder the controller asked for.
    pub decoder_id: u32,
    /// Sequence number of the round.
    pub sequence: u32,
    /// Payload bytes, at the front of the buffer that was given.
    pub length: usize,
}

impl WorkerRings {
    /// The longest request in bytes.
    #[must_use]
    pub fn request_capacity(&self) -> usize {
        self.requests.geometry().capacity
    }

    /// The longest reply in bytes.
    #[must_use]
    pub fn reply_capacity(&self) -> usize {
        self.geometry.capacity
    }

    /// Whether the worker has to end: the engine was stopped, or the peer is gone.
    #[must_use]
    pub fn stopped(&self) -> bool {
        self.shared.stopping() || self.peer.phase() >= Phase::Closed
    }

    /// Takes the next request if it has arrived, copying its payload to the front of `payload`, which has to hold
    /// [`request_capacity`](Self::request_capacity) bytes.
    ///
    /// # Errors
    /// [`TransportError::Protocol`] for a frame that claims more than the channel carries, or whose check does not match for
    /// longer than the reply timeout; [`TransportError::Invalid`] for a buffer that is too small.
    pub fn take(&mut self, payload: &mut [u8]) -> Result<Option<TakenRequest>> {
        if payload.len() < self.request_capacity() {
            return Err(TransportError::invalid(
                "payload",
                format!("{} bytes where the request capacity is {}", payload.len(), self.request_capacity()),
            ));
        }
        // A peer that keeps to the window never gets so far ahead; one that does not must wait, so that no reply is overwritten
        // while the engine reads it. Acquire: the engine has read it before it says so.
        let ahead = self.requests.expected().wrapping_sub(self.taken.load(Ordering::Acquire));
        if ahead >= self.geometry.depth {
            return Ok(None);
        }
        match self.requests.poll(payload) {
            Polled::Frame(Trailer { decoder_id, sequence, length, .. }) => {
                self.unverified = None;
                self.requests.advance();
                Ok(Some(TakenRequest { decoder_id, sequence, length: length as usize }))
            }
            Polled::TooLong(trailer) => Err(super::serve::too_long(&trailer, self.requests.geometry())),
            Polled::Empty => Ok(None),
            Polled::Unverified => {
                let since = *self.unverified.get_or_insert_with(Instant::now);
                if since.elapsed() > self.patience {
                    return Err(super::serve::damaged(self.requests.expected(), self.patience));
                }
                Ok(None)
            }
        }
    }

    /// Leaves the reply to the oldest request that has none yet. Replies are sent in the order of the requests.
    ///
    /// # Errors
    /// [`TransportError::Invalid`] for a reply longer than the reply capacity, or one that no request is waiting for.
    pub fn reply(&mut self, decoder_id: u32, reply: &[u8]) -> Result<()> {
        self.leave(decoder_id, 0, reply)
    }

    fn leave(&mut self, decoder_id: u32, status: u8, reply: &[u8]) -> Result<()> {
        if reply.len() > self.geometry.capacity {
            return Err(TransportError::invalid(
                "reply",
                format!("{} bytes where the reply capacity is {}", reply.len(), self.geometry.capacity),
            ));
        }
        if self.replies.sequence() == self.requests.expected() {
            return Err(TransportError::invalid("reply", "every request that was taken has its reply already"));
        }
        // `take` lets no request through whose reply would need a slot that the engine has not read.
        let end = self.geometry.frame_end(self.replies.sequence());
        self.replies.stage(&self.hand_off, end, reply);
        self.replies.publish(&self.hand_off, end, status, decoder_id);
        Ok(())
    }
}

/// The engine's end of the hand-off ring.
#[derive(Debug)]
pub(crate) struct HandOffReader {
    reader: FrameReader,
    taken: Arc<CachePadded<AtomicU32>>,
    alive: Arc<()>,
}

impl HandOffReader {
    /// Takes the next reply, if it is there.
    #[inline]
    pub(crate) fn take(&mut self, reply: &mut [u8]) -> Option<Trailer> {
        match self.reader.poll(reply) {
            Polled::Frame(trailer) => {
                self.reader.advance();
                self.taken.store(self.reader.expected(), Ordering::Release);
                Some(trailer)
            }
            _ => None,
        }
    }

    /// Whether a further reply is there.
    #[inline]
    pub(crate) fn arrived(&self) -> bool {
        self.reader.arrived()
    }

    /// Whether the worker has dropped its rings.
    pub(crate) fn released(&self) -> bool {
        Arc::strong_count(&self.alive) == 1
    }
}

/// Makes the rings of a worker whose first request has the number `next`.
pub(crate) fn rings(
    requests: &FrameReader,
    reply_capacity: usize,
    next: u32,
    patience: Duration,
    shared: Arc<Shared>,
    peer: Arc<Peer>,
) -> Result<(WorkerRings, HandOffReader)> {
    let geometry = Geometry::new(requests.geometry().slots(), reply_capacity);
    let hand_off = SharedBytes::anonymous(geometry.ring_bytes())
        .map_err(|error| TransportError::system("mmap", "the hand-off ring", error))?;
    // A fresh ring of zeros shows no sequence number but 0, and with this check not even that passes for a frame.
    let check = Check::Session(1);
    let alive = Arc::new(());
    let taken = Arc::new(CachePadded::new(AtomicU32::new(next)));
    let reader = HandOffReader {
        reader: FrameReader::new(hand_off.clone(), geometry, check, next),
        taken: taken.clone(),
        alive: alive.clone(),
    };
    let rings = WorkerRings {
        requests: requests.restarted(next),
        replies: FrameWriter::new(geometry, check, next),
        hand_off,
        geometry,
        shared,
        peer,
        taken,
        unverified: None,
        patience,
        _alive: alive,
    };
    Ok((rings, reader))
}

/// A launcher whose device is a thread of this process that calls `function` for each request: the launch-once convention
/// without an accelerator.
pub fn thread_launcher(
    function: impl CoprocessorFunction + Clone + 'static,
) -> impl FnMut(WorkerRings) -> Result<(), FunctionError> + Send + 'static {
    move |rings| {
        let functions = Functions::any(Box::new(function.clone()));
        std::thread::Builder::new().name("catalyst-worker".into()).spawn(move || work(rings, functions))?;
        Ok(())
    }
}

fn work(mut rings: WorkerRings, mut functions: Functions) {
    let spinner = Spinner::new(false);
    let mut payload = vec![0; rings.request_capacity()];
    let mut reply = vec![0; rings.reply_capacity()];
    let mut looks = 0_u32;
    while !rings.stopped() {
        match rings.take(&mut payload) {
            Ok(Some(TakenRequest { decoder_id, sequence, length })) => {
                let request = Request { decoder_id, sequence, payload: &payload[..length] };
                let answer = functions.answer(request, &mut reply);
                looks = 0;
                if let Err(error) = rings.leave(decoder_id, answer.status, &reply[..answer.length]) {
                    tracing::warn!(%error, "the worker ends");
                    return;
                }
            }
            Ok(None) => {
                std::hint::spin_loop();
                looks = looks.saturating_add(1);
                spinner.rest(looks / BURST);
            }
            Err(error) => {
                tracing::warn!(%error, "the worker ends");
                return;
            }
        }
    }
}
