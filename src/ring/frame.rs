//! The 16 bytes behind every payload.

/// What stands in a frame's check field, and so how its receiver knows that it is whole and meant for this session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Check {
    /// The receiver's session number: enough where a frame's last word is placed last (shared memory, and devices that
    /// vouch for it).
    Session(u32),
    /// CRC-32C over payload, session number and the rest of the trailer: holds whatever the order of placement.
    Crc(u32),
}

impl Check {
    /// The check field of a frame with this trailer and payload checksum.
    pub(crate) fn value(self, trailer: &Trailer, payload_crc: u32) -> u32 {
        match self {
            Self::Session(session) => session,
            Self::Crc(session) => {
                let mut rest = [0; 16];
                rest[..4].copy_from_slice(&session.to_le_bytes());
                rest[4..].copy_from_slice(&trailer.to_bytes()[4..]);
                crc32c::crc32c_append(payload_crc, &rest)
            }
        }
    }

    /// CRC-32C of the payload where this kind of check needs it, else 0.
    pub(crate) fn payload_crc(self, payload: &[u8]) -> u32 {
        match self {
            Self::Session(_) => 0,
            Self::Crc(_) => crc32c::crc32c(payload),
        }
    }
}

/// The fields behind the payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Trailer {
    /// See [`Check`].
    pub(crate) check: u32,
    /// Payload bytes; 24 bits.
    pub(crate) length: u32,
    /// 0, or how the coprocessor function failed ([`crate::FunctionFailure`]).
    pub(crate) status: u8,
    /// Chosen by the controller and repeated in the reply.
    pub(crate) decoder_id: u32,
    /// Counts the frames of one direction, modulo 2^32.
    pub(crate) sequence: u32,
}

impl Trailer {
    /// Bytes of a trailer.
    pub(crate) const BYTES: usize = 16;

    /// The trailer as two words: {check, length and status} and {decoder id, sequence}. The second is written last and
    /// read first.
    pub(crate) fn to_words(self) -> (u64, u64) {
        let sizes = self.length | u32::from(self.status) << 24;
        (pair(self.check, sizes), pair(self.decoder_id, self.sequence))
    }

    /// The trailer that two words hold.
    pub(crate) fn from_words(first: u64, last: u64) -> Self {
        let (check, sizes) = split(first);
        let (decoder_id, sequence) = split(last);
        Self { check, length: sizes & 0x00FF_FFFF, status: (sizes >> 24) as u8, decoder_id, sequence }
    }

    /// The 16 bytes as they lie in memory.
    pub(crate) fn to_bytes(self) -> [u8; Self::BYTES] {
        let (first, last) = self.to_words();
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&first.to_ne_bytes());
        bytes[8..].copy_from_slice(&last.to_ne_bytes());
        bytes
    }

    /// The sequence number in a trailer's last word.
    pub(crate) fn sequence_of(last: u64) -> u32 {
        split(last).1
    }
}

/// The word whose bytes in memory are `low` and then `high`, each little-endian.
pub(super) fn pair(low: u32, high: u32) -> u64 {
    (u64::from(low) | u64::from(high) << 32).to_le()
}

/// The two halves of such a word.
pub(super) fn split(word: u64) -> (u32, u32) {
    let word = u64::from_le(word);
    (word as u32, (word >> 32) as u32)
}
