//! The time-stamp counter, as nanoseconds.

use std::sync::OnceLock;

/// A reading of the counter; its unit is known only to [`since`].
pub(crate) type Stamp = u64;

fn clock() -> &'static quanta::Clock {
    static CLOCK: OnceLock<quanta::Clock> = OnceLock::new();
    CLOCK.get_or_init(quanta::Clock::new)
}

/// Calibrates the counter, which takes some milliseconds the first time: to be done before the first round.
pub(crate) fn prepare() {
    clock();
}

/// Reads the counter.
#[inline]
pub(crate) fn now() -> Stamp {
    clock().raw()
}

/// Nanoseconds from one reading to a later one.
#[inline]
pub(crate) fn since(from: Stamp, to: Stamp) -> u64 {
    clock().delta_as_nanos(from, to)
}
