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
//! On the Catalyst wire a frame stands at the head of its slot instead: see [`catalyst`].
//!
//! The byte-by-byte description is `docs/wire-protocol.md`.

pub(crate) mod catalyst;
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

/// How frames stand in their slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    /// At the end of the slot, a payload of any length and its trailer.
    Native,
    /// At the head of the slot, 16 bytes without a check, as [`catalyst`] has them.
    Catalyst,
}

/// Shape of one ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Geometry {
    /// Rounds that may be in flight, a power of two; in the native layout also the slots.
    pub(crate) depth: u32,
    /// Payload bytes that a frame may carry.
    pub(crate) capacity: usize,
    /// How frames stand in their slots.
    pub(crate) layout: Layout,
}

impl Geometry {
    /// Slots that a ring may have at most.
    pub(crate) const MAX_DEPTH: u32 = 65_536;
    /// Payload bytes that a frame may have at most: the length field has 24 bits.
    pub(crate) const MAX_CAPACITY: usize = (1 << 24) - 1;
    /// Bytes behind the ring where the closing probe lands: longer than the largest path MTU (4,096).
    pub(crate) const PROBE_BYTES: usize = 4096 + CACHE_LINE;

    /// The native shape; validity is checked by `ChannelDesc::validate`.
    pub(crate) const fn new(depth: u32, capacity: usize) -> Self {
        Self { depth, capacity, layout: Layout::Native }
    }

    /// The Catalyst wire's shape, with so many rounds in flight.
    pub(crate) const fn catalyst(depth: u32) -> Self {
        Self { depth, capacity: catalyst::VALUE_BYTES, layout: Layout::Catalyst }
    }

    /// Slots, a power of two.
    pub(crate) const fn slots(&self) -> u32 {
        match self.layout {
            Layout::Native => self.depth,
            Layout::Catalyst => catalyst::SLOTS,
        }
    }

    /// Bytes of a slot: payload and trailer, rounded up to whole cache lines.
    pub(crate) const fn slot_bytes(&self) -> usize {
        (self.capacity + Trailer::BYTES).next_multiple_of(CACHE_LINE)
    }

    /// Bytes of all slots.
    pub(crate) const fn ring_bytes(&self) -> usize {
        self.slot_bytes() * self.slots() as usize
    }

    /// Bytes of a region that holds the ring and, in the native layout, the probe's place behind it.
    pub(crate) const fn region_bytes(&self) -> usize {
        match self.layout {
            Layout::Native => self.ring_bytes() + Self::PROBE_BYTES,
            Layout::Catalyst => self.ring_bytes(),
        }
    }

    /// Offset of the slot that the frame with this sequence number uses. The number of slots divides 2^32, so the slots go
    /// on in order when the sequence number wraps.
    pub(crate) const fn slot_offset(&self, sequence: u32) -> usize {
        let place = match self.layout {
            Layout::Native => sequence,
            // Frame 1 stands in slot 0.
            Layout::Catalyst => sequence.wrapping_sub(1),
        };
        (place & (self.slots() - 1)) as usize * self.slot_bytes()
    }

    /// Offset just behind that frame: it ends where its slot does, or stands at the slot's head.
    pub(crate) const fn frame_end(&self, sequence: u32) -> usize {
        let behind = match self.layout {
            Layout::Native => self.slot_bytes(),
            Layout::Catalyst => catalyst::FRAME_BYTES,
        };
        self.slot_offset(sequence) + behind
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
