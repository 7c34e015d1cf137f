//! The thread that sleeps until the peer says something, falls silent or goes away, or the device reports an event, and
//! then tells those who spin.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};

use super::peer::{Peer, Phase};
use crate::data_path::DeviceEvents;
use crate::error::{Result, TransportError};
use crate::oob::{Channel, Message};

#[cfg(test)]
mod tests;

/// How long telling the peer something may take: its socket buffer is empty but for a frozen peer.
const SEND_BOUND: Duration = Duration::from_millis(20);
/// How long a goodbye waits for the peer to hang up too.
const CLOSE_BOUND: Duration = Duration::from_millis(5);
/// Messages taken in one go.
const MOST_HEARD: u32 = 64;
/// Messages between two signs of life beyond which the peer is taken for broken: starting and stopping all the time takes
/// a tenth of it.
const MOST_CHATTER: u32 = 50_000;
/// Where errors come from.
const STAGE: &str = "watching the peer";

/// A running watcher. Dropping it ends the thread.
#[derive(Debug)]
pub(crate) struct Watcher {
    channel: Option<Arc<Mutex<Channel>>>,
    wake: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Watcher {
    /// Starts watching over a connection that has been brought up.
    pub(crate) fn start(
        channel: Channel,
        peer: Arc<Peer>,
        events: Option<DeviceEvents>,
        liveness: Duration,
    ) -> Result<Self> {
        let socket = channel.try_clone_stream()?;
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| TransportError::system("eventfd", "the watcher", errno))?;
        let (channel, wake) = (Arc::new(Mutex::new(channel)), Arc::new(wake));
        let (thread_channel, thread_wake) = (channel.clone(), wake.clone());
        let thread = std::thread::Builder::new()
            .name("catalyst-watcher".into())
            .stack_size(256 * 1024)
            .spawn(move || {
                let watch = Watch { channel: thread_channel, peer, events, liveness, chatter: 0 };
                watch.run(&socket, &thread_wake);
            })
            .map_err(|error| TransportError::system("clone", "the watcher thread", error))?;
        Ok(Self { channel: Some(channel), wake, thread: Some(thread) })
    }

    /// Ends the watch, says goodbye and closes the connection.
    pub(crate) fn close(mut self) {
        self.end();
        // The thread had the only other share of it.
        if let Some(channel) = self.channel.take().and_then(Arc::into_inner) {
            channel.into_inner().unwrap_or_else(PoisonError::into_inner).close(Instant::now() + CLOSE_BOUND);
        }
    }

    fn end(&mut self) {
        // A counter that cannot be raised is full of wakes already.
        let _ = rustix::io::write(&*self.wake, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            // It waits for nothing but this and bounded sends.
            let _ = thread.join();
        }
    }

    /// For telling the peer from the engine's thread.
    pub(crate) fn teller(&self) -> Teller {
        Teller(self.channel.as_ref().map(Arc::downgrade).unwrap_or_default())
    }

    /// Tells the peer something, as far as it takes it at once.
    pub(crate) fn tell(&self, message: &Message) {
        let Some(channel) = &self.channel else { return };
        if let Err(error) = lock(channel).send(message, Instant::now() + SEND_BOUND, "telling the peer") {
            tracing::debug!(%error, "the peer was not told");
        }
    }
}

/// What an engine that ends by itself tells the peer with. It does not keep the connection open.
#[derive(Debug)]
pub(crate) struct Teller(Weak<Mutex<Channel>>);

impl Teller {
    /// Tells the peer why this side has ended, unless it was the peer who ended it.
    pub(crate) fn ended(&self, error: &TransportError) {
        let by_peer = matches!(
            error,
            TransportError::PeerClosed { .. } | TransportError::PeerLost { .. } | TransportError::PeerRefused { .. }
        );
        if !by_peer && let Some(channel) = self.0.upgrade() {
            lock(&channel).refuse(&error.to_string());
        }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.end();
    }
}

fn lock(channel: &Mutex<Channel>) -> MutexGuard<'_, Channel> {
    channel.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Watch {
    channel: Arc<Mutex<Channel>>,
    peer: Arc<Peer>,
    events: Option<DeviceEvents>,
    liveness: Duration,
    /// Messages since the last sign of life.
    chatter: u32,
}

impl Watch {
    fn run(mut self, socket: &impl AsFd, wake: &OwnedFd) {
        // Four signs of life within the bound, so that one lost or late packet is not taken for the end.
        let interval = self.liveness / 4;
        let mut next_sign = Instant::now() + interval;
        loop {
            let more = match self.hear() {
                Ok(more) => more,
                Err(error) => {
                    self.end(error);
                    return;
                }
            };
            // What is left in the channel's own buffer is not seen by poll.
            let left = if more { Duration::ZERO } else { next_sign.saturating_duration_since(Instant::now()) };
            let timeout = Timespec::try_from(left).unwrap_or_default();
            let mut waits = vec![PollFd::new(socket, PollFlags::IN), PollFd::new(wake, PollFlags::IN)];
            if let Some(events) = &self.events {
                waits.push(PollFd::from_borrowed_fd(events.descriptor(), PollFlags::IN));
            }
            match rustix::event::poll(&mut waits, Some(&timeout)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => {
                    self.end(TransportError::system("poll", STAGE, errno));
                    return;
                }
            }
            if !waits[1].revents().is_empty() {
                return;
            }
            let device = waits.get(2).map(PollFd::revents).unwrap_or(PollFlags::empty());
            drop(waits);
            if device.contains(PollFlags::IN) {
                if let Some(error) = self.events.as_ref().and_then(DeviceEvents::take) {
                    self.end(error);
                    return;
                }
            } else if !device.is_empty() {
                // The descriptor itself has failed: the device was removed.
                self.events = None;
                self.end(TransportError::Device {
                    problem: "the device was removed while the session ran".into(),
                    remedy: "connect again".into(),
                });
                return;
            }
            if Instant::now() >= next_sign {
                next_sign = Instant::now() + interval;
                self.chatter = 0;
                let sign = Instant::now() + SEND_BOUND;
                if let Err(error @ TransportError::PeerLost { .. }) =
                    lock(&self.channel).send(&Message::Heartbeat, sign, STAGE)
                {
                    self.end(error);
                    return;
                }
            }
        }
    }

    /// Takes what the peer has said, but no more than a little at a time: others wait for the channel, and a flood must not
    /// hold the watcher from its own end. Says whether there may be more.
    fn hear(&mut self) -> Result<bool> {
        let mut channel = lock(&self.channel);
        let protocol = |problem: String, peer: std::net::SocketAddr| TransportError::Protocol {
            stage: STAGE,
            peer: peer.to_string(),
            problem,
        };
        let mut more = true;
        for _ in 0..MOST_HEARD {
            let Some(message) = channel.try_receive(STAGE)? else {
                more = false;
                break;
            };
            self.chatter += 1;
            match message {
                _ if self.chatter > MOST_CHATTER => {
                    let problem = format!("it sent {MOST_CHATTER} messages between two signs of life");
                    return Err(protocol(problem, channel.peer_addr()));
                }
                Message::Started => self.peer.set(Phase::Running),
                Message::Stopped => self.peer.set(Phase::Stopped),
                other => {
                    let problem = format!("a {} message came while the session was running", other.kind());
                    return Err(protocol(problem, channel.peer_addr()));
                }
            }
        }
        let silent = channel.last_heard().elapsed();
        if silent > self.liveness {
            return Err(TransportError::PeerLost {
                stage: STAGE,
                cause: format!(
                    "it has been silent for {silent:.1?} (liveness bound {:?}): its process is frozen, its host gone, or the \
                     network cut",
                    self.liveness
                ),
            });
        }
        Ok(more)
    }

    fn end(&self, error: TransportError) {
        tracing::debug!(%error, "the peer is gone");
        match error {
            TransportError::PeerClosed { .. } => self.peer.set(Phase::Closed),
            other => self.peer.lose(other),
        }
    }
}
