//! Errors as C++ exceptions: `std::runtime_error`, thrown by libstdc++ itself.

use std::cell::UnsafeCell;
use std::ffi::c_char;

use super::super::failure::{Failure, caught};

/// Most bytes of an exception's text, with its NUL.
const TEXT_BYTES: usize = 2048;

thread_local! {
    /// The text of the exception that this thread is about to throw. It has no destructor, and so needs none to run when
    /// the exception passes.
    static TEXT: UnsafeCell<[u8; TEXT_BYTES]> = const { UnsafeCell::new([0; TEXT_BYTES]) };
}

/// A failure whose text is in [`TEXT`]. It holds nothing, so that an exception may pass it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Thrown(());

// The standard library of C++, not its headers: the symbol is part of its stable ABI.
#[link(name = "stdc++")]
unsafe extern "C-unwind" {
    /// `std::__throw_runtime_error(char const *)`
    #[link_name = "_ZSt21__throw_runtime_errorPKc"]
    fn throw_runtime_error(text: *const c_char) -> !;
}

/// Does `work` where nothing can be thrown yet; panics are caught. The result is copied out, so that everything else is
/// dropped by now.
pub(super) fn attempt<T: Copy>(call: &str, work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Thrown> {
    caught(work).map_err(|failure| {
        let text = format!("catalyst-transport: {call}: {}", failure.text);
        TEXT.with(|place| {
            let length = text.len().min(TEXT_BYTES - 1);
            // SAFETY: the place is this thread's alone and no reference into it is kept.
            let bytes = unsafe { &mut *place.get() };
            bytes[..length].copy_from_slice(&text.as_bytes()[..length]);
            bytes[length] = 0;
        });
        Thrown(())
    })
}

/// Throws what [`attempt`] has kept.
pub(super) fn throw(_thrown: Thrown) -> ! {
    let text = TEXT.with(UnsafeCell::get);
    // SAFETY: NUL-terminated by `attempt`; libstdc++ copies it. No frame from here to C++ has a destructor to run.
    unsafe { throw_runtime_error(text.cast()) }
}
