//! The loop itself: poll, copy, check, function, write.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::peer::{Peer, Phase};
use super::spin::{BURST, Spinner};
use super::worker::{HandOffReader, Launcher};
use super::{Shared, Work};
use crate::data_path::DataPath;
use crate::error::{FunctionFailure, Result, TransportError};
use crate::ring::{Check, FrameReader, FrameWriter, Geometry, Polled, SharedBytes, Trailer};
use crate::session::function::{Functions, Request};

mod gather;

pub(super) use gather::MOST_GATHERED;

/// Bursts of looks between two looks at the completions.
pub(super) const PROGRESS_EVERY: u32 = 16;
/// How long stopping waits for the last replies to be acknowledged.
pub(super) const FLUSH_BOUND: Duration = Duration::from_millis(5);
/// Room for a failure's text where the frame has none.
const TEXT_ROOM: usize = 512;

/// All that the engine thread works with.
#[derive(Debug)]
pub(crate) struct Loop {
    pub(crate) path: DataPath,
    shared: Arc<Shared>,
    peer: Arc<Peer>,
    reader: FrameReader,
    writer: FrameWriter,
    source: Source,
    /// The request's payload, copied out of the ring.
    request: Vec<u8>,
    /// The reply or, longer where frames carry no status, a failure's text.
    reply: Vec<u8>,
    reply_capacity: usize,
    /// Copies of the replies, for `collect`.
    served: Served,
    /// How long a frame may stay unverified.
    patience: Duration,
    /// What sending one of several replies took last, in nanoseconds.
    sending_ns: u64,
}

/// Where replies come from.
#[derive(Debug)]
pub(crate) enum Source {
    /// A function, called once for each request on the engine thread.
    Functions(Functions),
    /// A persistent worker, launched once.
    Worker { launcher: Launcher, hand_off: Option<HandOffReader> },
}

impl Default for Source {
    fn default() -> Self {
        Self::Functions(Functions::default())
    }
}

/// The replies' way to `collect`: a ring between the engine and its session, dropping what finds no room.
#[derive(Debug)]
pub(crate) struct Served {
    pub(crate) memory: SharedBytes,
    pub(crate) geometry: Geometry,
    writer: FrameWriter,
    /// Sequence number up to which `collect` has taken replies.
    pub(crate) taken: Arc<crossbeam_utils::CachePadded<std::sync::atomic::AtomicU32>>,
}

impl Served {
    /// A ring of at most 64 replies that begins with number 1.
    pub(crate) fn new(replies: Geometry) -> Result<Self> {
        let geometry = Geometry::new(replies.depth.min(64), replies.capacity);
        let memory = SharedBytes::anonymous(geometry.ring_bytes())
            .map_err(|error| TransportError::system("mmap", "the ring of served replies", error))?;
        Ok(Self {
            memory,
            geometry,
            writer: FrameWriter::new(geometry, Check::Session(0), 1),
            taken: Arc::new(crossbeam_utils::CachePadded::new(std::sync::atomic::AtomicU32::new(1))),
        })
    }

    #[inline]
    fn offer(&mut self, status: u8, decoder_id: u32, reply: &[u8]) {
        let sequence = self.writer.sequence();
        // Acquire: `collect` has read the slot before it says so.
        let taken = self.taken.load(std::sync::atomic::Ordering::Acquire);
        if sequence.wrapping_sub(taken) >= self.geometry.depth {
            return;
        }
        let end = self.geometry.frame_end(sequence);
        self.writer.stage(&self.memory, end, reply);
        self.writer.publish(&self.memory, end, status, decoder_id);
    }
}

/// What a [`Loop`] is made of.
pub(crate) struct Parts {
    pub(crate) path: DataPath,
    pub(crate) peer: Arc<Peer>,
    pub(crate) reader: FrameReader,
    pub(crate) writer: FrameWriter,
    pub(crate) source: Source,
    pub(crate) served: Served,
    pub(crate) patience: Duration,
    pub(crate) reply_capacity: usize,
}

impl Loop {
    pub(crate) fn new(parts: Parts) -> Self {
        let Parts { path, peer, reader, writer, source, served, patience, reply_capacity } = parts;
        let request = vec![0; reader.geometry().capacity];
        Self {
            path,
            shared: Arc::default(),
            peer,
            reader,
            source,
            request,
            reply: vec![0; if writer.carries_status() { reply_capacity } else { reply_capacity.max(TEXT_ROOM) }],
            reply_capacity,
            writer,
            served,
            patience,
            sending_ns: 0,
        }
    }

    /// What answers. The engine does not run while anybody else sees it.
    pub(crate) fn source(&mut self) -> &mut Source {
        &mut self.source
    }

    /// Ends the loop, releasing the data path, and gives what answers for the next session.
    pub(crate) fn into_source(self) -> Source {
        self.source
    }

    /// Launches the worker, if it is a worker that answers.
    ///
    /// # Errors
    /// What the launcher says.
    pub(crate) fn launch(&mut self) -> Result<()> {
        let Source::Worker { launcher, hand_off } = &mut self.source else { return Ok(()) };
        // Before the worker runs: the flag of an earlier stop would end it at once.
        self.shared.rearm();
        let next = self.writer.sequence();
        self.reader.rewind(next);
        let (rings, reader) = super::worker::rings(
            &self.reader,
            self.reply_capacity,
            next,
            self.patience,
            self.shared.clone(),
            self.peer.clone(),
        )?;
        launcher.launch(rings)?;
        *hand_off = Some(reader);
        Ok(())
    }

    /// Waits until the worker has let go of its rings.
    ///
    /// # Errors
    /// [`TransportError::Engine`] when it has not within `bound`.
    pub(crate) fn await_worker(&mut self, bound: Duration) -> Result<()> {
        let Source::Worker { hand_off: Some(hand_off), .. } = &self.source else { return Ok(()) };
        let deadline = Instant::now() + bound;
        while !hand_off.released() {
            if Instant::now() > deadline {
                return Err(TransportError::Engine {
                    problem: format!(
                        "the worker has not ended within {bound:?} of its stop flag; stop may be called again"
                    ),
                });
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }

    /// Serves until told to stop or until an error.
    ///
    /// # Errors
    /// The first error of the data path, of the peer or of the protocol.
    fn serve_on(&mut self, spinner: &Spinner) -> Result<()> {
        let mut bursts = 0_u32;
        let mut unverified: Option<Instant> = None;
        loop {
            let mut turn = Turn::Idle;
            for _ in 0..BURST {
                turn = self.turn()?;
                if turn != Turn::Idle {
                    break;
                }
                std::hint::spin_loop();
            }
            if self.shared.stopping() {
                self.flush();
                return Ok(());
            }
            match turn {
                Turn::Served => {
                    unverified = None;
                    bursts = 0;
                    if self.path.gathers() {
                        self.serve_waiting()?;
                    }
                    continue;
                }
                Turn::Unverified => {
                    let since = *unverified.get_or_insert_with(Instant::now);
                    if since.elapsed() > self.patience {
                        return Err(damaged(self.reader.expected(), self.patience));
                    }
                }
                // What has arrived is served even when the peer has gone since.
                Turn::Idle if self.peer.phase() >= Phase::Closed => {
                    return Err(self.peer.obstacle("serving").expect("an ended peer is an obstacle"));
                }
                Turn::Idle | Turn::Stopped => {}
            }
            bursts = bursts.saturating_add(1);
            spinner.rest(bursts);
            if bursts.is_multiple_of(PROGRESS_EVERY) || bursts == u32::MAX {
                self.path.progress()?;
                self.check_worker()?;
            }
        }
    }

    /// Notices a worker that has ended by itself.
    fn check_worker(&self) -> Result<()> {
        match &self.source {
            // It also ends, rightly, when the engine is stopped or the peer is gone.
            Source::Worker { hand_off: Some(hand_off), .. }
                if hand_off.released() && !self.shared.stopping() && self.peer.phase() < Phase::Closed =>
            {
                Err(TransportError::Engine { problem: "the worker has ended although it was not stopped".into() })
            }
            _ => Ok(()),
        }
    }

    /// Looks once, and serves what is there.
    #[inline]
    fn turn(&mut self) -> Result<Turn> {
        match &mut self.source {
            Source::Functions(_) => {
                if self.reader.arrived() {
                    self.serve()
                } else {
                    Ok(Turn::Idle)
                }
            }
            Source::Worker { hand_off, .. } => match hand_off.as_mut().and_then(|ring| ring.take(&mut self.reply)) {
                Some(answer) => self.answer(answer.decoder_id, answer.status, answer.length as usize),
                None => Ok(Turn::Idle),
            },
        }
    }

    #[inline]
    fn serve(&mut self) -> Result<Turn> {
        let trailer = match self.reader.poll(&mut self.request) {
            Polled::Frame(trailer) => trailer,
            Polled::Empty => return Ok(Turn::Idle),
            Polled::Unverified => return Ok(Turn::Unverified),
            Polled::TooLong(trailer) => return Err(too_long(&trailer, self.reader.geometry())),
        };
        let Trailer { decoder_id, sequence, length, .. } = trailer;
        let Source::Functions(functions) = &mut self.source else { unreachable!("only functions are served here") };
        let request = Request { decoder_id, sequence, payload: &self.request[..length as usize] };
        let answer = functions.answer_within(request, &mut self.reply, self.reply_capacity);
        self.reader.advance();
        self.answer(decoder_id, answer.status, answer.length)
    }

    /// Sends the reply that stands at the front of `self.reply`.
    #[inline]
    fn answer(&mut self, decoder_id: u32, status: u8, length: usize) -> Result<Turn> {
        let sequence = self.writer.sequence();
        if status != 0 && !self.writer.carries_status() {
            return Err(self.unanswerable(Trailer { check: 0, length: length as u32, status, decoder_id, sequence }));
        }
        // A device that completes nothing must not keep a stop waiting. What is given up here has no reply yet: the next
        // start serves it anew.
        let (shared, peer) = (&self.shared, &self.peer);
        if !self.path.await_room(&|| shared.stopping() || peer.phase() >= Phase::Closed)? {
            return match self.peer.obstacle("serving") {
                Some(ended) if !ended.is_recoverable() => Err(ended),
                _ => Ok(Turn::Stopped),
            };
        }
        let (memory, frame_end) = self.path.slot(sequence)?;
        self.writer.stage(memory, frame_end, &self.reply[..length]);
        let bytes = self.writer.publish(memory, frame_end, status, decoder_id);
        self.path.send(sequence, bytes)?;
        // The reply is on its way: what follows is off the round.
        self.shared.count();
        self.served.offer(status, decoder_id, &self.reply[..length]);
        Ok(Turn::Served)
    }

    /// Lets the last replies arrive before the session says that it has stopped.
    fn flush(&mut self) {
        if self.peer.phase() < Phase::Closed
            && let Err(error) = self.path.flush(Instant::now() + FLUSH_BOUND)
        {
            tracing::debug!(%error, "stopping");
        }
    }

    /// A wrong answer would be worse than none, and without one the controller would wait for this round's slot for ever.
    #[cold]
    fn unanswerable(&self, answer: Trailer) -> TransportError {
        let failure = function_failed(&answer, &self.reply[..answer.length as usize]);
        TransportError::Engine {
            problem: format!("{failure}; the Catalyst wire has no word for a failed round, so the session has ended"),
        }
    }
}

impl Work for Loop {
    fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    fn run(&mut self, spinner: &Spinner) -> Result<()> {
        self.serve_on(spinner)
    }

    /// Requests that have no reply yet are served anew.
    fn rewind(&mut self) {
        let next = self.writer.sequence();
        self.reader.rewind(next);
    }

    fn overdue(bound: Duration) -> String {
        format!("the coprocessor function has not returned within {bound:?}; stop may be called again")
    }
}

/// What one look found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    Idle,
    Unverified,
    Served,
    /// A stop came while the reply waited for room.
    Stopped,
}

/// The error of a request that is there and never passes its check.
#[cold]
pub(crate) fn damaged(sequence: u32, patience: Duration) -> TransportError {
    TransportError::Protocol {
        stage: "serving",
        peer: "the controller".into(),
        problem: format!(
            "request {sequence} was announced {patience:?} ago and its check never matched: it is damaged, or a stranger's"
        ),
    }
}

/// The error of a frame that claims more payload than the ring carries.
#[cold]
pub(crate) fn too_long(trailer: &Trailer, geometry: Geometry) -> TransportError {
    TransportError::Protocol {
        stage: "round",
        peer: "the peer".into(),
        problem: format!(
            "frame {} claims {} bytes where the channel carries {}",
            trailer.sequence, trailer.length, geometry.capacity
        ),
    }
}

/// The error of a round whose reply carries a status.
#[cold]
pub(crate) fn function_failed(trailer: &Trailer, text: &[u8]) -> TransportError {
    // The text is the peer's and goes into logs.
    let message = crate::oob::message::printable(text);
    TransportError::FunctionFailed {
        sequence: trailer.sequence,
        decoder_id: trailer.decoder_id,
        failure: FunctionFailure::from_status(trailer.status),
        message,
    }
}
