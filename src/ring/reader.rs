//! The side of a ring that polls for frames.

use super::{Check, Geometry, Layout, SharedBytes, Trailer, catalyst};

/// What a look at the next slot found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Polled {
    /// Nothing new.
    Empty,
    /// The expected sequence number, but the rest has not arrived, or is not of this session.
    Unverified,
    /// The expected frame, whose trailer claims more payload than the ring carries: a protocol error.
    TooLong(Trailer),
    /// A frame. Its payload is in the buffer that was given.
    Frame(Trailer),
}

/// Polls the slots of one ring in order.
#[derive(Debug)]
pub(crate) struct FrameReader {
    memory: SharedBytes,
    geometry: Geometry,
    /// What its check field has to hold; unused in the Catalyst layout, which has no such field.
    check: Check,
    /// Sequence number of the next frame.
    expected: u32,
    /// Offset just behind it.
    frame_end: usize,
}

impl FrameReader {
    /// A reader of the ring at the head of `memory`, whose first frame has the number `first_sequence`.
    pub(crate) fn new(memory: SharedBytes, geometry: Geometry, check: Check, first_sequence: u32) -> Self {
        assert!(memory.len() >= geometry.ring_bytes(), "the memory is smaller than the ring");
        let frame_end = geometry.frame_end(first_sequence);
        Self { memory, geometry, check, expected: first_sequence, frame_end }
    }

    /// Makes memory ready for the first turn, whatever is in it: each slot gets the sequence number of the turn before, which
    /// is never waited for.
    pub(crate) fn prepare(&self) {
        for slot in 0..self.geometry.slots() {
            let sequence = self.expected.wrapping_add(slot);
            let before = match self.geometry.layout {
                // Zero is what this ring begins with, and serves wherever it is not waited for.
                Layout::Catalyst if sequence != 0 => 0,
                _ => sequence.wrapping_sub(self.geometry.slots()),
            };
            let trailer = Trailer { check: 0, length: 0, status: 0, decoder_id: 0, sequence: before };
            self.memory.store_release(self.geometry.frame_end(sequence) - 8, trailer.to_words().1);
        }
    }

    /// Sequence number of the next frame.
    pub(crate) fn expected(&self) -> u32 {
        self.expected
    }

    /// Shape of the ring.
    pub(crate) fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Whether the next slot shows the expected sequence number: one load, for the innermost loop.
    #[inline]
    pub(crate) fn arrived(&self) -> bool {
        Trailer::sequence_of(self.memory.load_acquire(self.frame_end - 8)) == self.expected
    }

    /// The decoder id of the next frame, if the expected sequence number is there. Not checked: a hint.
    #[inline]
    pub(crate) fn announced(&self) -> Option<u32> {
        let last = self.memory.load_acquire(self.frame_end - 8);
        let trailer = Trailer::from_words(0, last);
        (trailer.sequence == self.expected).then_some(trailer.decoder_id)
    }

    /// Looks for the next frame. When it is whole its payload is copied to the front of `payload`, which holds the
    /// ring's capacity; the reader stays on the slot until [`advance`](Self::advance).
    ///
    /// Nothing that counts is read twice: the trailer is taken in two loads, the one with the sequence number first, and the payload
    /// in one copy after that.
    #[inline]
    pub(crate) fn poll(&self, payload: &mut [u8]) -> Polled {
        let last = self.memory.load_acquire(self.frame_end - 8);
        if Trailer::sequence_of(last) != self.expected {
            return Polled::Empty;
        }
        if self.geometry.layout == Layout::Catalyst {
            return Polled::Frame(catalyst::take(&self.memory, self.frame_end, self.expected, payload));
        }
        let first = self.memory.load_relaxed(self.frame_end - 16);
        let trailer = Trailer::from_words(first, last);
        let length = trailer.length as usize;
        if let Check::Session(session) = self.check
            && trailer.check != session
        {
            return Polled::Unverified;
        }
        if length > self.geometry.capacity {
            return match self.check {
                Check::Session(_) => Polled::TooLong(trailer),
                // The length itself is only known good with the checksum, which cannot be formed for it.
                Check::Crc(_) => Polled::Unverified,
            };
        }
        let payload = &mut payload[..length];
        self.memory.copy_out(self.frame_end - Trailer::BYTES - length, payload);
        if let Check::Crc(_) = self.check
            && trailer.check != self.check.value(&trailer, self.check.payload_crc(payload))
        {
            return Polled::Unverified;
        }
        Polled::Frame(trailer)
    }

    /// Goes on to the next slot.
    #[inline]
    pub(crate) fn advance(&mut self) {
        self.expected = self.expected.wrapping_add(1);
        self.frame_end = self.geometry.frame_end(self.expected);
    }

    /// Goes to the slot of any sequence number.
    pub(crate) fn rewind(&mut self, sequence: u32) {
        self.expected = sequence;
        self.frame_end = self.geometry.frame_end(sequence);
    }

    /// Another reader of the same ring, at any sequence number.
    pub(crate) fn restarted(&self, sequence: u32) -> Self {
        Self::new(self.memory.clone(), self.geometry, self.check, sequence)
    }
}
