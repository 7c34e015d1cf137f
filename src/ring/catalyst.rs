//! Frames of the Catalyst wire.
//!
//! 256 slots of 64 bytes, and at the head of each a frame of 16 bytes. Nothing marks its arrival but the sequence number,
//! which counts from 1, and nothing says that it is whole: the wire relies on a device that places the last bytes last.
//!
//! ```text
//! slot │ value (8) │ u32 decoder id │ u32 sequence │ 48 unused
//! ```

use super::frame::{pair, split};
use super::{SharedBytes, Trailer};

/// Slots of a ring.
pub(crate) const SLOTS: u32 = 256;
/// Bytes of every payload. A shorter one is filled up with zeros.
pub(crate) const VALUE_BYTES: usize = 8;
/// Bytes of a frame.
pub(super) const FRAME_BYTES: usize = 16;

/// The word that a payload is sent as.
#[inline]
pub(super) fn value(payload: &[u8]) -> u64 {
    let mut bytes = [0; VALUE_BYTES];
    bytes[..payload.len()].copy_from_slice(payload);
    u64::from_ne_bytes(bytes)
}

/// Writes a frame, its sequence number last.
#[inline]
pub(super) fn put(memory: &SharedBytes, frame_end: usize, value: u64, decoder_id: u32, sequence: u32) {
    memory.store_relaxed(frame_end - FRAME_BYTES, value);
    memory.store_release(frame_end - 8, pair(decoder_id, sequence));
}

/// Takes a frame whose sequence number has been seen, by an acquiring load. The value and the decoder id are read only
/// now: one copy of all 16 bytes could catch a new number with an old value.
#[inline]
pub(super) fn take(memory: &SharedBytes, frame_end: usize, sequence: u32, payload: &mut [u8]) -> Trailer {
    let value = memory.load_relaxed(frame_end - FRAME_BYTES);
    let (decoder_id, _) = split(memory.load_relaxed(frame_end - 8));
    payload[..VALUE_BYTES].copy_from_slice(&value.to_ne_bytes());
    Trailer { check: 0, length: VALUE_BYTES as u32, status: 0, decoder_id, sequence }
}

#[cfg(all(test, not(loom)))]
mod tests;
