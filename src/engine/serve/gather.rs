//! Replies that share a doorbell.
//!
//! The first reply after a wait always leaves at once. Only when the next request has already arrived by then is it worth
//! a thought whether its reply may wait for the one after it, for a doorbell costs some hundred nanoseconds on a network
//! card, and a system call on soft-RoCE. A reply is held back while all of this is true:
//!
//! - the request after it has already arrived, so that it waits for work and not for the network;
//! - that request is for the same decoder, so that what is known of the function's time is known of it too (a persistent
//!   worker's replies are all there already, and need no such knowledge);
//! - since the request of the first that is held back was taken up, no more time has passed than sending a reply takes, as
//!   measured at the last such post: nobody waits longer than it would have cost to let him go;
//! - fewer than [`MOST_GATHERED`] are held back.
//!
//! So a reply waits at most for the time of one post and for one run of a function that has just taken less than that.

use super::{Loop, Source, Turn};
use crate::engine::clock;
use crate::error::Result;

/// Replies that share a doorbell at most.
pub(crate) const MOST_GATHERED: u32 = 16;
/// The most that sending a reply is taken to cost, in nanoseconds, whatever was measured: the thread may have been put aside.
const MOST_SENDING_NS: u64 = 20_000;

impl Loop {
    /// Serves the requests that are waiting, after one that had been waited for.
    ///
    /// # Errors
    /// As `run`. What had been answered before has been sent then, if the data path still lets it.
    #[inline]
    pub(super) fn serve_waiting(&mut self) -> Result<()> {
        while !self.shared.stopping()
            && let Some(decoder_id) = self.waiting()
            && self.gather(decoder_id)?
        {}
        Ok(())
    }

    /// Serves a request for this decoder, which is waiting, and those for the same that follow it, and sends their replies.
    /// False when one was announced and is not whole yet: then `run` looks at it again, and at the time.
    fn gather(&mut self, decoder_id: u32) -> Result<bool> {
        let began = clock::now();
        let mut result = Ok(true);
        let mut held = 0;
        self.path.hold(true);
        let ready = loop {
            match self.turn() {
                Ok(Turn::Served) => held += 1,
                Ok(Turn::Idle | Turn::Unverified | Turn::Stopped) => {
                    result = Ok(false);
                    break clock::now();
                }
                Err(error) => {
                    result = Err(error);
                    break clock::now();
                }
            }
            let now = clock::now();
            if held == MOST_GATHERED || clock::since(began, now) > self.sending_ns || self.waiting() != Some(decoder_id)
            {
                break now;
            }
        };
        self.path.hold(false);
        // Also after an error: those who were answered before it are to have their replies.
        let sent = self.path.post_held();
        if held != 0 {
            self.sending_ns = (clock::since(ready, clock::now()) / u64::from(held)).min(MOST_SENDING_NS);
        }
        result.and_then(|whole| sent.map(|()| whole))
    }

    /// The decoder of the next request or, where a worker answers, a number in its place; `None` when nothing is there.
    #[inline]
    fn waiting(&self) -> Option<u32> {
        match &self.source {
            Source::Functions(_) => self.reader.announced(),
            Source::Worker { hand_off, .. } => hand_off.as_ref().is_some_and(|ring| ring.arrived()).then_some(0),
        }
    }
}
