//! The one message of the Catalyst wire format, and its bytes.
//!
//! 64 bytes each way, little-endian, with neither magic nor version: `docs/wire-protocol.md` lays them down, and its
//! vectors are read by the tests here. What cannot be such a message is refused by the name of its field, and the native
//! protocol is recognised by its magic, which no valid message can begin with.

use super::message::{MAGIC, MAX_24_BITS};

/// Bytes of the message.
pub(crate) const LENGTH: usize = 64;
/// Bytes of the region that a peer has, which it does not say.
pub(crate) const REGION_BYTES: u64 = 16_384;

/// One queue pair of the sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PairEnd {
    /// Number, 2 to [`MAX_24_BITS`].
    pub(crate) queue_pair: u32,
    /// First packet sequence number that it sends. Only the low 24 bits count, and only they are read.
    pub(crate) psn: u32,
    /// Global identifier of its port, in network order as verbs hold it.
    pub(crate) gid: [u8; 16],
}

/// What each side tells the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CatalystMessage {
    /// The pair that carries requests, from the controller to the coprocessor.
    pub(crate) forward: PairEnd,
    /// The pair that carries replies.
    pub(crate) backward: PairEnd,
    /// Address of the sender's region, of [`REGION_BYTES`] bytes.
    pub(crate) address: u64,
    /// Its remote key.
    pub(crate) rkey: u32,
    /// Active MTU of the sender's port as verbs number it, 1 to 5; the smaller of both counts.
    pub(crate) mtu: u8,
}

/// Why bytes are no such message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Problem {
    /// They begin as a native message does.
    #[error(
        "the peer speaks the native wire format, and this side the Catalyst one: use wire=native on both sides, or \
             wire=catalyst"
    )]
    Native,
    /// A field has a value that is not allowed.
    #[error(
        "{field} is {found} in a Catalyst message and must be {allowed}: does the peer speak the Catalyst wire format?"
    )]
    Field {
        /// Name of the field.
        field: &'static str,
        /// The value received.
        found: String,
        /// The values allowed.
        allowed: &'static str,
    },
}

impl CatalystMessage {
    /// Its bytes. Values are written as they are; it is the recipient who checks them.
    pub(crate) fn encode(&self) -> [u8; LENGTH] {
        let mut bytes = [0; LENGTH];
        for (at, end) in [(0, self.forward), (24, self.backward)] {
            bytes[at..at + 4].copy_from_slice(&end.queue_pair.to_le_bytes());
            bytes[at + 4..at + 8].copy_from_slice(&end.psn.to_le_bytes());
            bytes[at + 8..at + 24].copy_from_slice(&end.gid);
        }
        bytes[48..56].copy_from_slice(&self.address.to_le_bytes());
        bytes[56..60].copy_from_slice(&self.rkey.to_le_bytes());
        bytes[60..].copy_from_slice(&u32::from(self.mtu).to_le_bytes());
        bytes
    }

    /// The message in these bytes.
    ///
    /// # Errors
    /// A [`Problem`] that names the first field which cannot be right.
    pub(crate) fn decode(bytes: &[u8; LENGTH]) -> Result<Self, Problem> {
        refuse_native(bytes)?;
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let end = |at: usize, names: [&'static str; 2]| {
            let gid: [u8; 16] = bytes[at + 8..at + 24].try_into().expect("sixteen bytes");
            let queue_pair = word(at);
            require((2..=MAX_24_BITS).contains(&queue_pair), names[0], queue_pair, "2 to 0xffffff")?;
            require(gid != [0; 16], names[1], 0, "an address, not zero")?;
            Ok(PairEnd { queue_pair, psn: word(at + 4) & MAX_24_BITS, gid })
        };
        let forward = end(0, ["forward queue pair", "forward GID"])?;
        let backward = end(24, ["backward queue pair", "backward GID"])?;
        let address = u64::from_le_bytes(bytes[48..56].try_into().expect("eight bytes"));
        let fits = address.checked_add(REGION_BYTES).is_some();
        require(fits, "address", format_args!("{address:#x}"), "that of a region of 16384 bytes")?;
        let mtu = word(60);
        require((1..=5).contains(&mtu), "mtu", mtu, "1 (256 bytes) to 5 (4096 bytes)")?;
        Ok(Self { forward, backward, address, rkey: word(56), mtu: mtu as u8 })
    }
}

/// Finds a native peer by the first bytes of what it sends, however few have come. A queue pair's number has 24 bits, so
/// the native magic is none.
pub(crate) fn refuse_native(bytes: &[u8]) -> Result<(), Problem> {
    if bytes.starts_with(&MAGIC) { Err(Problem::Native) } else { Ok(()) }
}

/// Whether bytes are, as far as they go, a whole or partial Catalyst message: `None` while they are too few to say.
pub(super) fn recognise(bytes: &[u8]) -> Option<bool> {
    match bytes.first_chunk::<LENGTH>() {
        Some(message) => Some(CatalystMessage::decode(message).is_ok()),
        // The upper byte of the first queue pair's number.
        None if bytes.get(3).is_some_and(|upper| *upper != 0) => Some(false),
        None => None,
    }
}

fn require(
    holds: bool,
    field: &'static str,
    found: impl std::fmt::Display,
    allowed: &'static str,
) -> Result<(), Problem> {
    if holds { Ok(()) } else { Err(Problem::Field { field, found: found.to_string(), allowed }) }
}

#[cfg(test)]
mod tests;
