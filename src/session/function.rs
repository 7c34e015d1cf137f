//! Coprocessor functions: what answers a request.

use std::collections::HashMap;
use std::error::Error;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::FunctionFailure;

/// One request as the coprocessor function sees it: copied out of the ring, so that it can no longer change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request<'a> {
    /// Which decoder the controller asked for.
    pub decoder_id: u32,
    /// Sequence number of the round, modulo 2^32.
    pub sequence: u32,
    /// The payload.
    pub payload: &'a [u8],
}

/// Why a coprocessor function failed, in words that the controller will see.
pub type FunctionError = Box<dyn Error + Send + Sync>;

/// What answers requests. Every `FnMut(Request, &mut [u8]) -> Result<usize, FunctionError> + Send` is one: it writes the
/// reply to the front of the buffer, which has the channel's reply capacity, and returns the reply's length in bytes.
///
/// An error or a panic fails that round alone: the controller's `collect` gives it with its text, and the engine goes on.
/// The function runs on the engine thread, in the round: what it takes is part of the round-trip time.
pub trait CoprocessorFunction: Send {
    /// Answers one request.
    ///
    /// # Errors
    /// Whatever the function cannot do; the text goes to the controller as far as the reply capacity holds it.
    fn call(&mut self, request: Request<'_>, reply: &mut [u8]) -> Result<usize, FunctionError>;
}

impl<F> CoprocessorFunction for F
where
    F: FnMut(Request<'_>, &mut [u8]) -> Result<usize, FunctionError> + Send,
{
    fn call(&mut self, request: Request<'_>, reply: &mut [u8]) -> Result<usize, FunctionError> {
        self(request, reply)
    }
}

/// Answers with the request's own bytes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Echo;

impl CoprocessorFunction for Echo {
    #[inline]
    fn call(&mut self, request: Request<'_>, reply: &mut [u8]) -> Result<usize, FunctionError> {
        let length = request.payload.len();
        let room = reply.len();
        let Some(front) = reply.get_mut(..length) else {
            return Err(format!("the request has {length} bytes and the reply holds {room}").into());
        };
        front.copy_from_slice(request.payload);
        Ok(length)
    }
}

/// Answers with every bit of the request inverted.
#[derive(Debug, Clone, Copy, Default)]
pub struct Invert;

impl CoprocessorFunction for Invert {
    fn call(&mut self, request: Request<'_>, reply: &mut [u8]) -> Result<usize, FunctionError> {
        let length = Echo.call(request, reply)?;
        reply[..length].iter_mut().for_each(|byte| *byte = !*byte);
        Ok(length)
    }
}

/// Decodes one round of the \[\[7,1,3\]\] Steane code by its look-up table.
///
/// The request is three bytes, one for each check, of which only zero or not zero counts; check 0 is the most significant
/// bit of the syndrome. The reply is an `i64`, little-endian: the qubit to correct, 0 to 6, or −1 for none.
///
/// A single error on a qubit raises the checks whose supports hold it. With the supports {0, 1, 2, 3}, {1, 2, 4, 5} and
/// {2, 3, 5, 6} the seven syndromes 1 to 7 belong to the qubits 6, 4, 5, 0, 3, 1, 2.
#[derive(Debug, Clone, Copy, Default)]
pub struct Steane;

impl Steane {
    /// Bytes of a request.
    pub const REQUEST_BYTES: usize = 3;
    /// Bytes of a reply.
    pub const REPLY_BYTES: usize = 8;
    /// The qubit to correct for each syndrome.
    pub const TABLE: [i64; 8] = [-1, 6, 4, 5, 0, 3, 1, 2];
}

impl CoprocessorFunction for Steane {
    fn call(&mut self, request: Request<'_>, reply: &mut [u8]) -> Result<usize, FunctionError> {
        let Ok(checks) = <[u8; Self::REQUEST_BYTES]>::try_from(request.payload) else {
            return Err(format!("a Steane syndrome has 3 bytes, this one {}", request.payload.len()).into());
        };
        let syndrome = checks.iter().fold(0, |bits, check| bits << 1 | usize::from(*check != 0));
        let room = reply.len();
        let Some(front) = reply.get_mut(..Self::REPLY_BYTES) else {
            return Err(format!("the correction has 8 bytes and the reply holds {room}").into());
        };
        front.copy_from_slice(&Self::TABLE[syndrome].to_le_bytes());
        Ok(Self::REPLY_BYTES)
    }
}

/// The functions of a session: one for each decoder id, and one for all other ids.
#[derive(Default)]
pub(crate) struct Functions {
    by_decoder: HashMap<u32, Box<dyn CoprocessorFunction>>,
    fallback: Option<Box<dyn CoprocessorFunction>>,
}

impl std::fmt::Debug for Functions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Functions").field("decoders", &self.by_decoder.keys()).finish_non_exhaustive()
    }
}

/// A reply: what its frame will say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Answer {
    /// Bytes at the front of the reply buffer.
    pub(crate) length: usize,
    /// Status byte; 0 is success.
    pub(crate) status: u8,
}

impl Functions {
    /// Whether nothing would be answered.
    pub(crate) fn is_empty(&self) -> bool {
        self.by_decoder.is_empty() && self.fallback.is_none()
    }

    /// One function for every id.
    pub(crate) fn any(function: Box<dyn CoprocessorFunction>) -> Self {
        Self { by_decoder: HashMap::new(), fallback: Some(function) }
    }

    /// Adds or replaces the function of one decoder id.
    pub(crate) fn insert(&mut self, decoder_id: u32, function: Box<dyn CoprocessorFunction>) {
        self.by_decoder.insert(decoder_id, function);
    }

    /// Sets the function for every id that has none of its own.
    pub(crate) fn set_fallback(&mut self, function: Box<dyn CoprocessorFunction>) {
        self.fallback = Some(function);
    }

    /// Answers a request. Whatever the function does, there is an answer: on failure its text fills the reply.
    #[inline]
    pub(crate) fn answer(&mut self, request: Request<'_>, reply: &mut [u8]) -> Answer {
        let capacity = reply.len();
        self.answer_within(request, reply, capacity)
    }

    /// [`answer`](Self::answer) with a reply of at most `capacity` bytes, in a buffer that has more for a failure's text.
    #[inline]
    pub(crate) fn answer_within(&mut self, request: Request<'_>, reply: &mut [u8], capacity: usize) -> Answer {
        let function = if self.by_decoder.is_empty() { None } else { self.by_decoder.get_mut(&request.decoder_id) };
        let Some(function) = function.or(self.fallback.as_mut()) else {
            return failed(FunctionFailure::UnknownDecoder, "no function is registered for this decoder id", reply);
        };
        // The buffer is plain bytes and the function is its author's: neither can be left in a state that matters here.
        // So is its error's text.
        match catch_unwind(AssertUnwindSafe(|| {
            function.call(request, &mut reply[..capacity]).map_err(|error| error.to_string())
        })) {
            Ok(Ok(length)) if length <= capacity => Answer { length, status: 0 },
            Ok(Ok(length)) => {
                let text = format!("it returned {length} bytes and the reply holds {capacity}");
                failed(FunctionFailure::TooLarge, &text, reply)
            }
            Ok(Err(text)) => failed(FunctionFailure::Failed, &text, reply),
            Err(panic) => {
                let answer = failed(FunctionFailure::Panicked, panic_text(&*panic), reply);
                discard_panic(panic);
                answer
            }
        }
    }
}

/// Drops what a panic carried, whose own destructor may panic. What that one carries is left alone.
#[cold]
pub(crate) fn discard_panic(panic: Box<dyn std::any::Any + Send>) {
    if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
        std::mem::forget(again);
    }
}

/// The text of a panic.
pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("with no text")
}

#[cold]
fn failed(failure: FunctionFailure, text: &str, reply: &mut [u8]) -> Answer {
    let mut length = text.len().min(reply.len());
    while !text.is_char_boundary(length) {
        length -= 1;
    }
    reply[..length].copy_from_slice(&text.as_bytes()[..length]);
    Answer { length, status: failure.status() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(payload: &[u8]) -> Request<'_> {
        Request { decoder_id: 1, sequence: 1, payload }
    }

    #[test]
    fn the_steane_table_corrects_every_single_error() {
        // The supports of the three checks.
        let checks: [&[usize]; 3] = [&[0, 1, 2, 3], &[1, 2, 4, 5], &[2, 3, 5, 6]];
        let decode = |syndrome: [u8; 3]| {
            let mut reply = [0; 8];
            assert_eq!(Steane.call(request(&syndrome), &mut reply).unwrap(), 8);
            i64::from_le_bytes(reply)
        };
        for qubit in 0..7 {
            let syndrome = checks.map(|support| u8::from(support.contains(&qubit)));
            assert_eq!(decode(syndrome), qubit as i64);
        }
        assert_eq!(decode([0, 0, 0]), -1);
        assert_eq!(decode([0, 0, 255]), 6);
        assert!(Steane.call(request(&[0; 4]), &mut [0; 8]).is_err());
        assert!(Steane.call(request(&[0; 3]), &mut [0; 7]).is_err());
    }

    #[test]
    fn failures_become_answers() {
        let mut functions = Functions::default();
        let mut reply = [0; 12];
        assert_eq!(functions.answer(request(&[]), &mut reply).status, FunctionFailure::UnknownDecoder.status());
        functions.insert(
            1,
            Box::new(|_: Request<'_>, _: &mut [u8]| -> Result<usize, FunctionError> { Err("naïve word".into()) }),
        );
        let answer = functions.answer(request(&[]), &mut reply);
        assert_eq!((answer.status, &reply[..answer.length]), (1, "naïve word".as_bytes()));
        // Cut in the middle of a character, the text ends before it.
        assert_eq!(functions.answer(request(&[]), &mut reply[..3]).length, 2);
        functions
            .insert(1, Box::new(|_: Request<'_>, _: &mut [u8]| -> Result<usize, FunctionError> { panic!("lost it") }));
        let answer = functions.answer(request(&[]), &mut reply);
        assert_eq!((answer.status, &reply[..answer.length]), (2, &b"lost it"[..]));
        functions.insert(1, Box::new(|_: Request<'_>, _: &mut [u8]| -> Result<usize, FunctionError> { Ok(13) }));
        assert_eq!(functions.answer(request(&[]), &mut reply).status, FunctionFailure::TooLarge.status());
    }

    #[test]
    fn functions_are_found_by_decoder_id() {
        let mut functions = Functions::any(Box::new(Echo));
        functions.insert(2, Box::new(Invert));
        let mut reply = [0; 1];
        let mut ask = |decoder_id| {
            let answer = functions.answer(Request { decoder_id, sequence: 9, payload: &[0x0F] }, &mut reply);
            (answer, reply[0])
        };
        assert_eq!(ask(2), (Answer { length: 1, status: 0 }, 0xF0));
        assert_eq!(ask(3), (Answer { length: 1, status: 0 }, 0x0F));
    }
}
