//! The ring: slots, frames and sequence words. No I/O, no devices, no sessions.
//!
//! A ring is a power of two of equal slots in memory that the *writer's* side fills and the *reader's* side polls. A frame
//! stands right-aligned in its slot, so that its last word, which holds the sequence number, is always the last word of
//! the slot and the reader knows where to look before it knows how long the frame is:
//!
//! ```text
//! … free │ payload (0..=capacity) │ u32 check │ u24 length, u8 status │ u32 decoder id │ u32 sequence │ end of slot
//! ```
//!
//! The byte-by-byte description is `docs/wire-protocol.md`.

pub(crate) mod copy;
pub(crate) mod frame;
pub(crate) mod memory;
pub(crate) mod reader;
pub(crate) mod writer;

pub(crate) use frame::{Check, Trailer};
pub(crate) use memory::SharedBytes;
pub(crate) use reader::{FrameReader, Polled};
pub(crate) use writer::FrameWriter;

/// Slots are whole cache lines, so that two neighbours never share one.
const CACHE_LINE: usize = 64;

/// Shape of one ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Geometry {
    /// Slots, a power of two.
    pub(crate) depth: u32,
    /// Payload bytes that a frame may carry.
    pub(crate) capacity: usize,
}

impl Geometry {
    /// Slots that a ring may have at most.
    pub(crate) const MAX_DEPTH: u32 = 65_536;
    /// Payload bytes that a frame may have at most: the length field has 24 bits.
    pub(crate) const MAX_CAPACITY: usize = (1 << 24) - 1;
    /// Bytes behind the ring where the closing probe lands: longer than the largest path MTU (4,096).
    pub(crate) const PROBE_BYTES: usize = 4096 + CACHE_LINE;

    /// The shape; validity is checked by `ChannelDesc::validate`.
    pub(crate) const fn new(depth: u32, capacity: usize) -> Self {
        Self { depth, capacity }
    }

    /// Bytes of a slot: payload and trailer, rounded up to whole cache lines.
    pub(crate) const fn slot_bytes(&self) -> usize {
        (self.capacity + Trailer::BYTES).next_multiple_of(CACHE_LINE)
    }

    /// Bytes of all slots.
    pub(crate) const fn ring_bytes(&self) -> usize {
        self.slot_bytes() * self.depth as usize
    }

    /// Bytes of a region that holds the ring and the probe's place behind it.
    pub(crate) const fn region_bytes(&self) -> usize {
        self.ring_bytes() + Self::PROBE_BYTES
    }

    /// Offset of the slot that the frame with this sequence number uses. The depth divides 2^32, so the slots go on in
    /// order when the sequence number wraps.
    pub(crate) const fn slot_offset(&self, sequence: u32) -> usize {
        (sequence & (self.depth - 1)) as usize * self.slot_bytes()
    }

    /// Offset just behind that slot.
    pub(crate) const fn slot_end(&self, sequence: u32) -> usize {
        self.slot_offset(sequence) + self.slot_bytes()
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
