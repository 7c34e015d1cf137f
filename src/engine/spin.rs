//! How to wait in a loop without starving the one who is waited for.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Threads of this process that spin, or may.
static SPINNERS: AtomicUsize = AtomicUsize::new(0);

/// Looks at memory between two looks at everything else.
pub(crate) const BURST: u32 = 64;

/// A registered spinner. Where there are fewer processors than spinners, it gives way after each burst.
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

    /// To be called after each burst of looks.
    #[inline]
    pub(crate) fn rest(&self) {
        // With one processor the peer's spinner, in whatever process, needs this one.
        if self.processors == 1 || SPINNERS.load(Ordering::Relaxed) > self.processors {
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
