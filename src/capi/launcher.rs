//! The launch-once convention for workers of other languages.
//!
//! The worker sees rings in Catalyst's layout whatever the wire: 256 slots of 64 bytes, a frame of 16 bytes at the head of
//! each (value, decoder id, and last the sequence number). A thread here carries requests from the session's ring into the
//! first and replies out of the second.

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::function::Context;
use crate::engine::spin::{BURST, Spinner};
use crate::engine::worker::WorkerRings;
use crate::error::TransportError;
use crate::session::function::FunctionError;

/// Slots of each ring.
const SLOTS: u32 = 256;
/// Payload bytes of a frame.
const VALUE: usize = 8;

/// What a launcher gets. The worker has to end soon after it is told to; the memory is never freed but used again by later
/// sessions, so that a late one does not crash.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Launch {
    /// Requests: the worker polls slot `n % ring_slots` for the sequence number `n + 1`.
    ring: *mut c_void,
    ring_slots: u32,
    /// Replies, in the same layout: the worker writes value and decoder id, then the request's sequence number.
    handoff: *mut c_void,
    /// Not 0: the worker has to end.
    stop: *const c_int,
    /// Rounds to serve; 0 is until stopped.
    total: u64,
    /// The device's queue; NULL without a device.
    stream: *mut c_void,
}

/// `int fn(const Launch *, void *ctx)`: starts the worker and returns at once; not 0 is a failure.
pub(super) type LauncherFn = unsafe extern "C" fn(*const Launch, *mut c_void) -> c_int;

/// Rings that no worker uses any more, the oldest first.
static SPARE: Mutex<VecDeque<&'static Rings>> = Mutex::new(VecDeque::new());

/// Rings that rest before one is used again, in which time a late worker will have ended.
const RESTING: usize = 4;

/// Rings in use. At its end, a panic's too, the worker is told to end and the rings are spare.
struct Lease(&'static Rings);

impl Lease {
    fn new() -> Self {
        Self(Rings::take())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.0.stop.store(1, Ordering::Release);
        SPARE.lock().unwrap_or_else(PoisonError::into_inner).push_back(self.0);
    }
}

impl Rings {
    fn take() -> &'static Self {
        let mut spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
        if spare.len() > RESTING
            && let Some(rings) = spare.pop_front()
        {
            for slot in rings.requests.iter().chain(&rings.replies) {
                slot.sequence.store(0, Ordering::Relaxed);
            }
            rings.stop.store(0, Ordering::Release);
            return rings;
        }
        Box::leak(Box::new(Self {
            requests: std::array::from_fn(|_| RingSlot::default()),
            replies: std::array::from_fn(|_| RingSlot::default()),
            stop: AtomicI32::new(0),
        }))
    }
}

/// A launcher.
#[derive(Debug)]
pub(super) struct Bridge {
    launcher: LauncherFn,
    context: Context,
}

/// One slot: a frame at its head.
#[repr(C, align(64))]
#[derive(Default)]
struct RingSlot {
    value: AtomicU64,
    decoder_id: AtomicU32,
    sequence: AtomicU32,
}

/// What the worker and the thread here share.
struct Rings {
    requests: [RingSlot; SLOTS as usize],
    replies: [RingSlot; SLOTS as usize],
    stop: AtomicI32,
}

impl Bridge {
    pub(super) fn new(launcher: LauncherFn, context: Context) -> Self {
        Self { launcher, context }
    }

    /// Launches the worker, and the thread that feeds it.
    pub(super) fn launch(&self, rings: WorkerRings) -> Result<(), FunctionError> {
        if rings.request_capacity() != VALUE || rings.reply_capacity() != VALUE {
            return Err(TransportError::invalid(
                "coprocessor launcher",
                format!(
                    "its rings carry {VALUE} bytes each way and the channel {} and {}; set request={VALUE};reply={VALUE}",
                    rings.request_capacity(),
                    rings.reply_capacity()
                ),
            )
            .into());
        }
        let lease = Lease::new();
        let shared = lease.0;
        let launch = Launch {
            ring: shared.requests.as_ptr().cast_mut().cast(),
            ring_slots: SLOTS,
            handoff: shared.replies.as_ptr().cast_mut().cast(),
            stop: shared.stop.as_ptr(),
            total: 0,
            stream: null_mut(),
        };
        let (context, launcher) = (self.context, self.launcher);
        // SAFETY: the launcher is of this type; `launch` lives until it returns, and what it points to is never freed.
        let code = unsafe { launcher(&launch, context.0) };
        if code != 0 {
            return Err(format!("the launcher returned {code}").into());
        }
        std::thread::Builder::new().name("catalyst-bridge".into()).spawn(move || feed(rings, lease))?;
        Ok(())
    }
}

/// Carries requests to the worker and its replies back until the session stops. Parameters are dropped from the last to
/// the first, also by a panic: when the engine sees the rings of the session gone, the worker has been told to end.
fn feed(mut rings: WorkerRings, lease: Lease) {
    let shared = lease.0;
    let spinner = Spinner::new(false);
    let mut looks = 0_u32;
    let (mut given, mut taken) = (0_u32, 0_u32);
    let mut value = [0; VALUE];
    while !rings.stopped() {
        let mut idle = true;
        // The worker's ring is as deep as any session's that carries Catalyst's frames; a deeper one waits here.
        if given.wrapping_sub(taken) < SLOTS {
            value.fill(0);
            match rings.take(&mut value) {
                Ok(Some(request)) => {
                    let slot = &shared.requests[(given % SLOTS) as usize];
                    slot.value.store(u64::from_ne_bytes(value), Ordering::Relaxed);
                    slot.decoder_id.store(request.decoder_id, Ordering::Relaxed);
                    given = given.wrapping_add(1);
                    // Release: who sees the number sees the frame.
                    slot.sequence.store(given, Ordering::Release);
                    idle = false;
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(%error, "the worker's bridge ends");
                    break;
                }
            }
        }
        let slot = &shared.replies[(taken % SLOTS) as usize];
        if taken != given && slot.sequence.load(Ordering::Acquire) == taken.wrapping_add(1) {
            let value = slot.value.load(Ordering::Relaxed).to_ne_bytes();
            if let Err(error) = rings.reply(slot.decoder_id.load(Ordering::Relaxed), &value) {
                tracing::warn!(%error, "the worker's bridge ends");
                break;
            }
            taken = taken.wrapping_add(1);
            idle = false;
        }
        looks = if idle { looks.saturating_add(1) } else { 0 };
        if idle {
            std::hint::spin_loop();
            spinner.rest(looks / BURST);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_gives_the_rings_back() {
        let lease = Lease::new();
        let shared = lease.0;
        let panicked = std::thread::spawn(move || {
            let _lease = lease;
            panic!("on purpose");
        });
        assert!(panicked.join().is_err());
        assert_eq!(shared.stop.load(Ordering::Acquire), 1);
        assert!(SPARE.lock().unwrap().iter().any(|spare| std::ptr::eq(*spare, shared)));
    }
}
