//! How to wait in a loop without starving the one who is waited for.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Threads of this process that spin, or may.
static SPINNERS: AtomicUsize = AtomicUsize::new(0);

/// Looks at memory between two looks at everything else.
pub(crate) const BURST: u32 = 64;

/// Bursts in vain before a spinner gives way: some tens of microseconds, longer than a round takes where both sides have a
/// processor of their own.
const BURSTS_BEFORE_REST: u32 = 32;

/// A registered spinner. Where there are fewer processors than spinners, it gives way to the others when it has waited for a
/// while.
#[derive(Debug)]
pub(crate) struct Spinner {
    processors: usize,
}

impl Spinner {
    /// Registers one.
    pub(crate) fn new() -> Self {
        SPINNERS.fetch_add(1, Ordering::Relaxed);
        Self { processors: allowed_processors() }
    }

    /// To be called after each burst of looks, with the number of bursts since the last success.
    #[inline]
    pub(crate) fn rest(&self, bursts: u32) {
        // With one processor the peer's spinner, in whatever process, needs this one.
        if bursts > BURSTS_BEFORE_REST && (self.processors == 1 || SPINNERS.load(Ordering::Relaxed) > self.processors) {
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
