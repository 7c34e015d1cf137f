//! How to wait in a loop without starving the one who is waited for.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Threads of this process that spin, or may.
static SPINNERS: AtomicUsize = AtomicUsize::new(0);

/// Looks at memory between two looks at everything else.
pub(crate) const BURST: u32 = 64;

/// Bursts in vain before a spinner gives way where there are fewer processors than spinners: some tens of microseconds,
/// longer than a round takes where both sides have a processor of their own.
const BURSTS_WHEN_CROWDED: u32 = 32;
/// Bursts in vain before a spinner that was not given a processor gives way in any case: the one that it waits for may have
/// been put on the same processor, and would otherwise wait for the scheduler's next tick.
const BURSTS_WHEN_FREE: u32 = 512;

/// A registered spinner, which gives way to others when it has waited for a while.
#[derive(Debug)]
pub(crate) struct Spinner {
    processors: usize,
    pinned: bool,
}

impl Spinner {
    /// Registers one. `pinned`: it has been given a processor of its own. To be called before the thread is pinned.
    pub(crate) fn new(pinned: bool) -> Self {
        SPINNERS.fetch_add(1, Ordering::Relaxed);
        Self { processors: allowed_processors(), pinned }
    }

    /// To be called after each burst of looks, with the number of bursts since the last success.
    #[inline]
    pub(crate) fn rest(&self, bursts: u32) {
        if bursts > BURSTS_WHEN_CROWDED {
            self.maybe_yield(bursts);
        }
    }

    #[cold]
    fn maybe_yield(&self, bursts: u32) {
        // With one processor the peer's spinner, in whatever process, needs this one.
        let crowded = self.processors == 1 || SPINNERS.load(Ordering::Relaxed) > self.processors;
        if crowded || (!self.pinned && bursts > BURSTS_WHEN_FREE) {
            rustix::thread::sched_yield();
        }
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        SPINNERS.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Processors that this thread may run on.
pub(crate) fn allowed_processors() -> usize {
    rustix::thread::sched_getaffinity(None).map_or(1, |set| set.count() as usize).max(1)
}
