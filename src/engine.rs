//! The busy-poll loop that serves rounds, or carries a controller's, on a thread of its own.
//!
//! The thread owns the data path while it runs and gives it back when it ends. In the loop it looks at memory alone: the
//! next slot of the ring, the stop flag, and what [`peer::Peer`] knows of the other side. What has to ask the system (the
//! out-of-band connection, events of the device) is done by the [`watcher`], a thread that sleeps.

pub(crate) mod clock;
pub(crate) mod peer;
pub(crate) mod real_time;
pub(crate) mod relay;
pub(crate) mod serve;
pub(crate) mod spin;
pub(crate) mod watcher;
pub(crate) mod worker;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, OnceLock};
use std::thread::ThreadId;
use std::time::Duration;

use crossbeam_utils::CachePadded;

use crate::config::SessionConfig;
use crate::error::{Result, TransportError};
use crate::session::function::{discard_panic, panic_text};
use real_time::RealTimeReport;
use spin::Spinner;
use watcher::Teller;

/// What the engine thread and its session share while it runs.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    stop: CachePadded<AtomicBool>,
    served: CachePadded<AtomicU64>,
    /// The first error, which ended the loop.
    failure: OnceLock<TransportError>,
}

impl Shared {
    /// Whether the loop has been told to end.
    #[inline]
    pub(crate) fn stopping(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Takes back what told an earlier run to end.
    pub(crate) fn rearm(&self) {
        self.stop.store(false, Ordering::Relaxed);
    }

    /// Counts a served round.
    #[inline]
    pub(crate) fn count(&self) {
        // One writer: a load and a store are enough.
        self.served.store(self.served.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Rounds served since the session was established.
    pub(crate) fn served(&self) -> u64 {
        self.served.load(Ordering::Relaxed)
    }

    /// The error that ended the loop.
    pub(crate) fn failure(&self) -> Option<&TransportError> {
        self.failure.get()
    }
}

/// What an engine thread does.
pub(crate) trait Work: Send + 'static {
    /// What it shares with its session.
    fn shared(&self) -> &Arc<Shared>;

    /// Works until told to stop or until an error.
    ///
    /// # Errors
    /// The first error, which ends it.
    fn run(&mut self, spinner: &Spinner) -> Result<()>;

    /// Makes it ready to run again.
    fn rewind(&mut self) {}

    /// What to say when it has not ended within `bound`.
    fn overdue(bound: Duration) -> String;
}

/// A running engine thread.
#[derive(Debug)]
pub(crate) struct Engine<W> {
    shared: Arc<Shared>,
    thread: ThreadId,
    finished: Receiver<W>,
    /// What was granted of the real-time settings.
    pub(crate) report: RealTimeReport,
}

impl<W: Work> Engine<W> {
    /// Starts the loop on a thread of its own. When it ends by an error, `teller` tells the peer.
    ///
    /// # Errors
    /// [`TransportError::System`] when no thread can be had. The loop comes back with the error, and has been told to stop.
    pub(crate) fn start(
        mut work: W,
        config: &SessionConfig,
        teller: Option<Teller>,
    ) -> Result<Self, (TransportError, Box<W>)> {
        let shared = work.shared().clone();
        shared.rearm();
        let (give_back, finished) = channel();
        let (tell, told) = channel();
        let settings = real_time::Settings::from(config);
        // The loop goes to the thread through a channel, so that it is not lost when the thread cannot be made.
        let (hand_over, handed) = channel::<W>();
        let thread_shared = shared.clone();
        let spawned = std::thread::Builder::new().name("catalyst-engine".into()).spawn(move || {
            let Ok(mut work) = handed.recv() else { return };
            // Before the pinning: it counts the processors that there are to choose from.
            let spinner = Spinner::new(settings.is_pinned());
            let granted = settings.apply();
            let _ = tell.send(granted.report.clone());
            let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work.run(&spinner)));
            let failure = match ended {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error),
                Err(panic) => {
                    let problem = format!("it panicked: {}", panic_text(&*panic));
                    discard_panic(panic);
                    Some(TransportError::Engine { problem })
                }
            };
            if let Some(error) = failure {
                tracing::debug!(%error, "the engine ended");
                // Known here before it is told, so that whoever sees the end there finds the reason here.
                let _ = thread_shared.failure.set(error.clone());
                if let Some(teller) = teller {
                    teller.ended(&error);
                }
            }
            drop(granted);
            let _ = give_back.send(work);
        });
        let handle = match spawned {
            Ok(handle) => handle,
            Err(error) => {
                shared.stop.store(true, Ordering::Relaxed);
                work.rewind();
                return Err((TransportError::system("clone", "the engine thread", error), Box::new(work)));
            }
        };
        let thread = handle.thread().id();
        hand_over.send(work).expect("the thread waits for its work");
        let report = told.recv_timeout(Duration::from_secs(5)).unwrap_or_default();
        Ok(Self { shared, thread, finished, report })
    }

    /// Tells the loop to end and waits for it.
    ///
    /// # Errors
    /// [`TransportError::Engine`] when it does not end within `bound`, most often because a coprocessor function has not
    /// returned: it may be called again.
    pub(crate) fn stop(&mut self, bound: Duration) -> Result<W> {
        self.shared.stop.store(true, Ordering::Relaxed);
        let problem = if std::thread::current().id() == self.thread {
            "stop was called from inside of the coprocessor function; it has been told to end".into()
        } else {
            match self.finished.recv_timeout(bound) {
                Ok(mut work) => {
                    work.rewind();
                    return Ok(work);
                }
                Err(RecvTimeoutError::Timeout) => W::overdue(bound),
                Err(RecvTimeoutError::Disconnected) => "its thread ended without giving back the data path".into(),
            }
        };
        Err(TransportError::Engine { problem })
    }
}
