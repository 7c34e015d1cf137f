//! The side of a ring that writes frames.

use super::{Check, Geometry, Layout, SharedBytes, Trailer, catalyst};

/// Composes the frames of one direction, in order.
///
/// The memory composed in is either the peer's ring itself (shared memory) or the buffer that a device reads from; both
/// see payload first and the word with the sequence number last.
#[derive(Debug)]
pub(crate) struct FrameWriter {
    layout: Layout,
    /// What stands in the check field; unused in the Catalyst layout.
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
    /// The payload itself, in the Catalyst layout.
    value: u64,
}

impl FrameWriter {
    /// A writer whose first frame has the number `first_sequence`.
    pub(crate) fn new(geometry: Geometry, check: Check, first_sequence: u32) -> Self {
        let Geometry { layout, capacity, .. } = geometry;
        let mut writer = Self { layout, check, capacity, sequence: first_sequence, staged: Staged::default() };
        writer.clear();
        writer
    }

    /// Sequence number of the next frame.
    pub(crate) fn sequence(&self) -> u32 {
        self.sequence
    }

    /// Whether a frame can say that its round failed.
    pub(crate) fn carries_status(&self) -> bool {
        self.layout == Layout::Native
    }

    /// Puts the payload of the next frame in front of `frame_end`. May be called again: the last payload counts.
    ///
    /// The caller has checked the length against the capacity.
    #[inline]
    pub(crate) fn stage(&mut self, memory: &SharedBytes, frame_end: usize, payload: &[u8]) {
        assert!(payload.len() <= self.capacity, "the payload is longer than the capacity");
        match self.layout {
            Layout::Native => {
                memory.copy_in(frame_end - Trailer::BYTES - payload.len(), payload);
                self.staged = Staged { length: payload.len(), crc: self.check.payload_crc(payload), value: 0 };
            }
            Layout::Catalyst => self.staged.value = catalyst::value(payload),
        }
    }

    /// Forgets the staged payload: the next frame is empty unless staged again.
    pub(crate) fn clear(&mut self) {
        self.staged = Staged { length: 0, crc: self.check.payload_crc(&[]), value: 0 };
    }

    /// Completes the frame and goes on to the next. Returns its length with the trailer; it ends at `frame_end`.
    #[inline]
    pub(crate) fn publish(&mut self, memory: &SharedBytes, frame_end: usize, status: u8, decoder_id: u32) -> usize {
        if self.layout == Layout::Catalyst {
            let value = std::mem::take(&mut self.staged.value);
            catalyst::put(memory, frame_end, value, decoder_id, self.sequence);
            self.sequence = self.sequence.wrapping_add(1);
            return catalyst::FRAME_BYTES;
        }
        let Staged { length, crc, .. } = self.staged;
        let mut trailer = Trailer { check: 0, length: length as u32, status, decoder_id, sequence: self.sequence };
        trailer.check = self.check.value(&trailer, crc);
        let (first, last) = trailer.to_words();
        memory.store_relaxed(frame_end - 16, first);
        memory.store_release(frame_end - 8, last);
        self.sequence = self.sequence.wrapping_add(1);
        self.clear();
        length + Trailer::BYTES
    }
}
