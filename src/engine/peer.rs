//! What is known of the peer, for those who spin: one word that is read without asking the system.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, Ordering};

use crossbeam_utils::CachePadded;

use crate::error::TransportError;

/// How far the peer is. The order matters: from `Closed` on nothing more will come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Phase {
    /// Connected, and not yet started.
    Waiting = 0,
    /// Its engine runs.
    Running = 1,
    /// Its engine was stopped, and may be started again.
    Stopped = 2,
    /// It said goodbye.
    Closed = 3,
    /// It is gone without a goodbye, or this side's device is.
    Lost = 4,
}

/// The state of the peer. Written by the watcher.
#[derive(Debug)]
pub(crate) struct Peer {
    phase: CachePadded<AtomicU8>,
    loss: Mutex<Option<TransportError>>,
}

impl Peer {
    pub(crate) fn new() -> Self {
        Self { phase: CachePadded::new(AtomicU8::new(Phase::Waiting as u8)), loss: Mutex::new(None) }
    }

    /// The phase. What the peer wrote before it said so may be a moment later than the word itself.
    #[inline]
    pub(crate) fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Acquire) {
            0 => Phase::Waiting,
            1 => Phase::Running,
            2 => Phase::Stopped,
            3 => Phase::Closed,
            _ => Phase::Lost,
        }
    }

    /// Sets a phase that the peer told. After an end nothing changes any more.
    pub(crate) fn set(&self, phase: Phase) {
        let ended = Phase::Closed as u8;
        let _ =
            self.phase.fetch_update(Ordering::Release, Ordering::Relaxed, |old| (old < ended).then_some(phase as u8));
    }

    /// Sets the end, with its reason. The first reason stays.
    pub(crate) fn lose(&self, error: TransportError) {
        let mut loss = self.loss.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        loss.get_or_insert(error);
        drop(loss);
        self.set(Phase::Lost);
    }

    /// Why a wait for the peer is in vain; `None` while it is not.
    pub(crate) fn obstacle(&self, stage: &'static str) -> Option<TransportError> {
        match self.phase() {
            Phase::Waiting | Phase::Running => None,
            Phase::Stopped => Some(TransportError::PeerStopped { stage }),
            Phase::Closed => Some(TransportError::PeerClosed { stage }),
            Phase::Lost => {
                let loss = self.loss.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                Some(match loss.clone() {
                    // The stage is where it is noticed, not where the watcher was.
                    Some(TransportError::PeerLost { cause, .. }) => TransportError::PeerLost { stage, cause },
                    Some(other) => other,
                    None => TransportError::PeerLost { stage, cause: "for an unknown reason".into() },
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_final_and_keeps_its_first_reason() {
        let peer = Peer::new();
        assert_eq!(peer.obstacle("round"), None);
        peer.set(Phase::Stopped);
        assert_eq!(peer.obstacle("round"), Some(TransportError::PeerStopped { stage: "round" }));
        peer.set(Phase::Running);
        assert_eq!(peer.obstacle("round"), None);
        peer.lose(TransportError::PeerLost { stage: "watching", cause: "first".into() });
        peer.lose(TransportError::PeerLost { stage: "watching", cause: "second".into() });
        peer.set(Phase::Running);
        let lost = TransportError::PeerLost { stage: "round", cause: "first".into() };
        assert_eq!(peer.obstacle("round"), Some(lost));
    }
}
