//! The three ways in which verbs report an error, each with a trap for those who read the wrong one.

use std::os::raw::c_int;

/// What `errno` is set to wherever a verb's manual does not say that it is set: an error number that no verb reports.
pub(super) const DECOY: c_int = libc::EXDEV;

fn set(errno: c_int) {
    // SAFETY: the C library gives each thread an `errno` of its own, which lives as long as the thread.
    unsafe { *libc::__errno_location() = errno };
}

/// For verbs that return 0 or an error number, and leave `errno` alone.
pub(super) fn returned(result: Result<(), c_int>) -> c_int {
    set(DECOY);
    result.err().unwrap_or(0)
}

/// For verbs that return 0, or −1 with `errno` set.
pub(super) fn minus_one(result: Result<(), c_int>) -> c_int {
    set(result.err().unwrap_or(DECOY));
    if result.is_ok() { 0 } else { -1 }
}

/// For verbs that return an object, or a null pointer with `errno` set.
pub(super) fn pointer<T>(result: Result<*mut T, c_int>) -> *mut T {
    set(result.err().unwrap_or(DECOY));
    result.unwrap_or(std::ptr::null_mut())
}
