//! The side of a ring that writes frames.

use super::{Check, Geometry, SharedBytes, Trailer};

/// Composes the frames of one direction, in order.
///
/// The memory composed in is either the peer's ring itself (shared memory) or the buffer that a device reads from; both
/// see payload first and the word with the sequence number last.
#[derive(Debug)]
pub(crate) struct FrameWriter {
    check: Check,
    capacity: usize,
    /// Sequence number of the next frame.
    sequence: u32,
    staged: Staged,
}

/// The payload that already stands in the slot.
#[derive(Debug, Clone, Copy, Default)]
struct Staged {
    length: usize,
    crc: u32,
}

impl FrameWriter {
    /// A writer whose first frame has the number `first_sequence`.
    pub(crate) fn new(geometry: Geometry, check: Check, first_sequence: u32) -> Self {
        let mut writer =
            Self { check, capacity: geometry.capacity, sequence: first_sequence, staged: Staged::default() };
        writer.clear();
        writer
    }

    /// Sequence number of the next frame.
    pub(crate) fn sequence(&self) -> u32 {
        self.sequence
    }

    /// Puts the payload of the next frame in front of `slot_end`. May be called again: the last payload counts.
    ///
    /// The caller has checked the length against the capacity.
    #[inline]
    pub(crate) fn stage(&mut self, memory: &SharedBytes, slot_end: usize, payload: &[u8]) {
        assert!(payload.len() <= self.capacity, "the payload is longer than the capacity");
        memory.copy_in(slot_end - Trailer::BYTES - payload.len(), payload);
        self.staged = Staged { length: payload.len(), crc: self.check.payload_crc(payload) };
    }

    /// Forgets the staged payload: the next frame is empty unless staged again.
    pub(crate) fn clear(&mut self) {
        self.staged = Staged { length: 0, crc: self.check.payload_crc(&[]) };
    }

    /// Completes the frame and goes on to the next. Returns its length with the trailer; it ends at `slot_end`.
    #[inline]
    pub(crate) fn publish(&mut self, memory: &SharedBytes, slot_end: usize, status: u8, decoder_id: u32) -> usize {
        let Staged { length, crc } = self.staged;
        let mut trailer = Trailer { check: 0, length: length as u32, status, decoder_id, sequence: self.sequence };
        trailer.check = self.check.value(&trailer, crc);
        let (first, last) = trailer.to_words();
        memory.store_relaxed(slot_end - 16, first);
        memory.store_release(slot_end - 8, last);
        self.sequence = self.sequence.wrapping_add(1);
        self.clear();
        length + Trailer::BYTES
    }
}
