//! Errors as status codes, and as lines on stderr.

use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::{Errno, TransportError};
use crate::session::function::panic_text;

/// Status: success.
pub(super) const OK: i32 = 0;
/// Status: an error that is none of those below.
pub(super) const ERROR: i32 = -1;
/// Status: memory could not be had, or not be registered.
pub(super) const MEMORY: i32 = -2;
/// Status: a wait ended at its deadline.
pub(super) const TIMEOUT: i32 = -3;
/// Status: something does not end: a coprocessor function that does not return, or a call in another thread.
pub(super) const STUCK: i32 = -4;

/// Why a call failed: what it returns, and what it says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) code: i32,
    pub(super) text: String,
}

impl Failure {
    /// An error of the call itself.
    pub(super) fn new(text: impl Into<String>) -> Self {
        Self { code: ERROR, text: text.into() }
    }

    /// Something that has not ended within its bound.
    pub(super) fn stuck(text: impl Into<String>) -> Self {
        Self { code: STUCK, text: text.into() }
    }

    /// An error in `stop`, or in what stops first: there an engine that is not done is stuck.
    pub(super) fn stopping(error: TransportError) -> Self {
        let code = if matches!(error, TransportError::Engine { .. }) { STUCK } else { status(&error) };
        Self { code, ..Self::from(error) }
    }
}

impl From<TransportError> for Failure {
    fn from(error: TransportError) -> Self {
        let remedy = remedy(&error);
        let text = if remedy.is_empty() { error.to_string() } else { format!("{error}; {remedy}") };
        Self { code: status(&error), text }
    }
}

fn status(error: &TransportError) -> i32 {
    match error {
        TransportError::Timeout { .. } => TIMEOUT,
        TransportError::System { call, errno, .. } if out_of_memory(call, *errno) => MEMORY,
        TransportError::Verbs(failure) if failure.errno.0 == libc::ENOMEM || failure.verb.starts_with("ibv_reg_") => {
            MEMORY
        }
        _ => ERROR,
    }
}

/// Whether a system call failed for want of memory. A region that is larger than the process's limits allow shows as
/// EFBIG or ENOSPC of its anonymous file.
fn out_of_memory(call: &str, errno: Errno) -> bool {
    let region = matches!(call, "memfd_create" | "ftruncate" | "fallocate" | "mmap");
    errno.0 == libc::ENOMEM || region && matches!(errno.0, libc::ENOSPC | libc::EFBIG | libc::EAGAIN)
}

/// What to do, where the error's own text does not say.
fn remedy(error: &TransportError) -> &'static str {
    match error {
        TransportError::OutOfOrder { .. } => {
            "the order is create, connect, exchange_keys, establish_channel, set_coprocessor_fn (coprocessor) or \
             set_message_sizes (controller), start, then rounds"
        }
        TransportError::NothingInFlight => "stage_payload and post come before collect",
        TransportError::Timeout { .. } => {
            "if the peer is only slow, raise accept_ms, handshake_ms or timeout_ms in the configuration"
        }
        TransportError::PeerLost { .. } | TransportError::PeerClosed { .. } => {
            "when the peer is up again, destroy this session and create a new one"
        }
        TransportError::Protocol { .. } => {
            "both sides need the same wire format and the same depth, request and reply in their configuration"
        }
        TransportError::FunctionFailed { .. } => "only this round is lost; correct the coprocessor function",
        TransportError::Completion(_) => "the session is over: destroy it and create a new one",
        _ => "",
    }
}

/// One line on stderr.
pub(super) fn say(call: &str, text: &str) {
    // In one piece, so that lines of several threads do not mix. Nothing can be done about a stderr that is closed.
    let line = format!("catalyst-transport: {call}: {}\n", text.replace('\n', "; "));
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Does what an entry point is for. A failure is told on stderr and becomes `otherwise(status)`; a panic is a failure.
pub(super) fn guard<T>(call: &str, otherwise: impl FnOnce(i32) -> T, work: impl FnOnce() -> Result<T, Failure>) -> T {
    match caught(work) {
        Ok(value) => value,
        Err(failure) => {
            say(call, &failure.text);
            otherwise(failure.code)
        }
    }
}

/// [`guard`] for calls that return a status.
pub(super) fn guard_status(call: &str, work: impl FnOnce() -> Result<(), Failure>) -> i32 {
    guard(call, |code| code, || work().map(|()| OK))
}

/// Does `work`; a panic is a failure.
pub(super) fn caught<T>(work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    // What a panic leaves behind is looked at only through locks that take poison for what it is.
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic_text(&*panic).to_owned();
        // The payload's own destructor may panic.
        std::mem::forget(panic);
        Err(Failure::new(format!("internal error: {text}; please report it")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_a_failure_and_the_next_call_is_served() {
        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                panic!("the payload of a panic panics")
            }
        }
        let lock = std::sync::Mutex::new(0);
        let held = || {
            let mut count = lock.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            *count += 1;
            count
        };
        for status in [
            guard_status("test", || {
                let _held = held();
                panic!("on purpose")
            }),
            guard_status("test", || {
                let _held = held();
                std::panic::panic_any(Bomb)
            }),
        ] {
            assert!(status < 0, "{status}");
        }
        let served = guard_status("test", || {
            drop(held());
            Ok(())
        });
        assert_eq!((served, *held()), (OK, 4));
    }
}
