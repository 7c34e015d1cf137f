//! Several writes that one doorbell announces.

use std::time::Instant;

use super::queue_pair::{QueuePair, Request, Write};
use super::{Verbs, ffi};
use crate::error::Result;

/// Writes that one doorbell announces at most.
pub(super) const MOST_HELD: u64 = 64;

/// Work requests that wait for their doorbell, in the order in which they will be posted.
#[derive(Debug)]
pub(super) struct Chain {
    /// Made once. The first `len` hold a write each.
    requests: Box<[Request]>,
    len: usize,
    /// Sequence number of the last frame in it.
    last: u32,
}

/// What became of a chain at the post.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Posted {
    /// All are on their way.
    All,
    /// From some request on the device took nothing; what it took has left the chain.
    Refused(i32),
    /// The device took some and did not say which.
    Unknown(i32),
}

impl Chain {
    /// An empty chain for so many writes.
    pub(super) fn new(room: u64) -> Self {
        Self { requests: (0..room).map(|_| Request::new()).collect(), len: 0, last: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn len(&self) -> u64 {
        self.len as u64
    }

    fn is_full(&self) -> bool {
        self.len == self.requests.len()
    }

    fn push(&mut self, sequence: u32, write: Write, inline_bytes: u32) {
        self.requests[self.len].fill(write, inline_bytes);
        self.len += 1;
        self.last = sequence;
    }

    /// Posts all that is held with one call.
    ///
    /// # Safety
    /// Each write in the chain has to keep the contract of [`QueuePair::post`].
    unsafe fn post(&mut self, pair: &mut QueuePair) -> Posted {
        let held = &mut self.requests[..self.len];
        let mut next = std::ptr::null_mut();
        for request in held.iter_mut().rev() {
            request.work.next = next;
            request.work.sg_list = &mut request.segment;
            next = &mut request.work;
        }
        let mut refused = std::ptr::null_mut();
        // SAFETY: the queue pair lives; the requests, their segments and the links between them lie in the boxed slice, which
        // does not move during the call, and the last link is null; the caller vouches for the bytes.
        let errno = unsafe { ffi::ibv_post_send(pair.raw, next, &mut refused) };
        if errno == 0 {
            self.len = 0;
            return Posted::All;
        }
        // A link is never left pointing into a chain that has changed.
        let taken = held.iter().position(|request| std::ptr::eq(&request.work, refused));
        match taken {
            Some(taken) => {
                // Filled from the front again; `post` sets every pointer anew.
                held.rotate_left(taken);
                self.len -= taken;
                Posted::Refused(errno)
            }
            None => Posted::Unknown(errno),
        }
    }
}

impl Verbs {
    /// While `hold` is true, what is sent is only made ready: [`post_held`](Self::post_held), or the next send after `hold`
    /// has become false, gives all of it to the device with one doorbell. What is held counts as outstanding.
    pub(crate) fn hold(&mut self, hold: bool) {
        self.holding = hold;
        self.deferring = hold || !self.chain.is_empty();
    }

    /// Whether something waits for its doorbell.
    #[inline]
    pub(crate) fn holds(&self) -> bool {
        self.deferring && !self.chain.is_empty()
    }

    /// Adds a write to those that are held, and posts all when they need not, or cannot, be held any longer.
    #[inline(never)]
    pub(super) fn defer(&mut self, sequence: u32, write: Write) -> Result<()> {
        self.chain.push(sequence, write, self.queue_pair.inline_bytes);
        self.posted += 1;
        if self.holding && !self.chain.is_full() {
            return Ok(());
        }
        self.post_held()
    }

    /// Posts what is held with one doorbell. A device that takes only a part, for want of room, is given the rest as
    /// earlier writes complete.
    ///
    /// # Errors
    /// [`TransportError::Verbs`] naming the frames that were not taken; those before them are on their way.
    pub(crate) fn post_held(&mut self) -> Result<()> {
        let result = self.post_chain();
        if result.is_err() {
            self.posted -= self.chain.len();
            self.chain.len = 0;
        }
        self.deferring = self.holding;
        result
    }

    fn post_chain(&mut self) -> Result<()> {
        let mut deadline = None;
        while !self.chain.is_empty() {
            // SAFETY: each write lies in the outgoing region by the assertion of `write`; that is registered under its key and
            // lives longer than the queue pair, and a slot is composed anew only after `slot` has seen its write complete.
            match unsafe { self.chain.post(&mut self.queue_pair) } {
                Posted::All => {}
                // As for a single write: the queue is full although fewer than granted are known outstanding.
                Posted::Refused(libc::ENOMEM)
                    if Instant::now() < *deadline.get_or_insert_with(|| Instant::now() + self.bound) =>
                {
                    self.progress()?;
                }
                Posted::Refused(errno) => {
                    let first = self.chain.last.wrapping_sub(self.chain.len as u32 - 1);
                    return Err(self.post_failed(
                        errno,
                        &format!(
                            "writing frames {first} to {} of a burst, whose earlier frames are on their way,",
                            self.chain.last
                        ),
                    ));
                }
                Posted::Unknown(errno) => {
                    return Err(self.post_failed(
                        errno,
                        &format!(
                            "writing a burst that ends with frame {}, of which the device does not say how much it took,",
                            self.chain.last
                        ),
                    ));
                }
            }
        }
        Ok(())
    }
}
