//! Coprocessor functions of other languages.

use std::ffi::{CString, c_void};

use super::failure::Failure;
use super::launcher::{Bridge, LauncherFn};
use crate::error::Result;
use crate::session::coprocessor::CoprocessorSession;
use crate::session::function::{CoprocessorFunction, Echo, FunctionError, Request};

/// `size_t fn(const void *frame, size_t in_len, void *out, size_t out_cap, void *ctx)`: the frame is the payload, padded
/// with zeros to at least 8 bytes, then u32 decoder id and u32 sequence number. It returns the reply's bytes, 1 to
/// `out_cap`; 0 is a failure.
pub(super) type FunctionFn = unsafe extern "C" fn(*const c_void, usize, *mut c_void, usize, *mut c_void) -> usize;

/// The least payload of a frame, which is Catalyst's only one.
const LEAST_PAYLOAD: usize = 8;

/// What answers, as it was bound.
#[derive(Debug, Clone, Copy)]
pub(super) enum Answerer {
    /// The request's own bytes.
    Echo,
    /// A function, called once for each request.
    Function(FunctionFn, Context),
    /// A function that launches a worker, called once in each start.
    Launcher(LauncherFn, Context),
}

/// A pointer that is handed back to whoever gave it, and to nobody else.
#[derive(Debug, Clone, Copy)]
pub(super) struct Context(pub(super) *mut c_void);

// SAFETY: the pointer is never followed here. That its function may be called on the engine's thread is the contract under
// which it was given.
unsafe impl Send for Context {}

impl Answerer {
    /// Looks a function up in the process; the empty name is the echo.
    pub(super) fn named(symbol: &str) -> Result<Self, Failure> {
        if symbol.is_empty() {
            return Ok(Self::Echo);
        }
        let name = CString::new(symbol).map_err(|_| Failure::new("the function's name holds a NUL byte"))?;
        // SAFETY: a NUL-terminated name.
        let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
        if address.is_null() {
            return Err(Failure::new(format!(
                "no function '{symbol}' is visible in this process; load its library with RTLD_GLOBAL (in Python \
                 ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)) and export it as extern \"C\""
            )));
        }
        // SAFETY: whoever names a symbol here promises that it is a function of this type; the header says so.
        let function = unsafe { std::mem::transmute::<*mut c_void, FunctionFn>(address) };
        Ok(Self::Function(function, Context(std::ptr::null_mut())))
    }

    /// Binds it to a session that is stopped.
    pub(super) fn bind(self, session: &mut CoprocessorSession) -> Result<()> {
        match self {
            Self::Echo => session.set_coprocessor_fn(Echo),
            Self::Function(function, context) => {
                session.set_coprocessor_fn(Foreign { function, context, frame: Vec::new() })
            }
            Self::Launcher(launcher, context) => {
                let bridge = Bridge::new(launcher, context);
                session.set_coprocessor_launcher(move |rings| bridge.launch(rings))
            }
        }
    }
}

/// A function that is called once for each request.
struct Foreign {
    function: FunctionFn,
    context: Context,
    /// In words, for the alignment that a function will expect of it.
    frame: Vec<u64>,
}

impl CoprocessorFunction for Foreign {
    fn call(&mut self, request: Request<'_>, reply: &mut [u8]) -> Result<usize, FunctionError> {
        let payload = request.payload.len().max(LEAST_PAYLOAD);
        let length = payload + 8;
        self.frame.clear();
        self.frame.resize(length.div_ceil(8), 0);
        // SAFETY: the words are at least `length` bytes, and plain.
        let frame = unsafe { std::slice::from_raw_parts_mut(self.frame.as_mut_ptr().cast::<u8>(), length) };
        frame[..request.payload.len()].copy_from_slice(request.payload);
        frame[payload..payload + 4].copy_from_slice(&request.decoder_id.to_le_bytes());
        frame[payload + 4..].copy_from_slice(&request.sequence.to_le_bytes());
        // Not what an earlier round left there.
        reply.fill(0);
        // SAFETY: the function is of this type (see `FunctionFn`), and both buffers have the lengths that it is told.
        let written = unsafe {
            (self.function)(frame.as_ptr().cast(), length, reply.as_mut_ptr().cast(), reply.len(), self.context.0)
        };
        match written {
            0 => Err("it returned 0 bytes, which means that it failed".into()),
            // Too many are found and told by the caller.
            written => Ok(written),
        }
    }
}
