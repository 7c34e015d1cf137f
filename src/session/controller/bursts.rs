//! Several rounds with one doorbell.

use super::{ControllerSession, State};
use crate::error::Result;

impl ControllerSession {
    /// [`kick`](Self::kick) without ringing the doorbell: on verbs the round waits for the next `kick`, for
    /// [`kick_queued`](Self::kick_queued), or for any way of collecting, and then all that wait go to the device with one
    /// post. On shared memory, where there is no doorbell, it is the same as `kick`.
    ///
    /// For several rounds that are ready at the same time: `queue` each but the last, and `kick` that. Up to 64 wait; the
    /// one that makes them 64 sends them all. [`last_rtt_ns`](crate::TransportSession::last_rtt_ns) counts from the `queue`.
    ///
    /// # Errors
    /// Those of `kick`.
    pub fn queue(&mut self, index: u32) -> Result<u32> {
        self.link.state.require("queue", State::Running).map_err(|error| self.failure().unwrap_or(error))?;
        self.rounds.as_mut().expect("running").path.hold(true);
        let queued = self.kick(index);
        if let Some(rounds) = &mut self.rounds {
            rounds.path.hold(false);
        }
        queued
    }

    /// Sends the rounds that [`queue`](Self::queue) has left waiting; there need not be any.
    ///
    /// # Errors
    /// [`OutOfOrder`](crate::TransportError::OutOfOrder) when the session does not run; the first error of the data path, which names the rounds
    /// that were not sent.
    pub fn kick_queued(&mut self) -> Result<()> {
        self.link.state.require("kick_queued", State::Running).map_err(|error| self.failure().unwrap_or(error))?;
        match self.rounds.as_mut().expect("running").path.post_held() {
            Err(error) => Err(self.fail(error)),
            Ok(()) => Ok(()),
        }
    }
}
