//! Authentication: what shows that a message comes from one who holds the key, in this session, and as it was sent.
//!
//! Where a key is set, each side first sends a challenge with fresh random bytes, then its proof, and only then its hello.
//! The proof and every later message end in a tag: HMAC-SHA-256, keyed with the pre-shared key, over the sender's role, both
//! challenges and both hellos as far as they have gone over the connection, the number of the message, and the message. So a
//! tag fits one message of one direction at one place of one session, and nothing that is recorded, sent back, left out or
//! changed has one. `docs/wire-protocol.md` has the bytes, with vectors.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::message::{Kind, Role};
use crate::key::PreSharedKey;

/// Bytes of a tag.
pub(crate) const TAG: usize = 32;

/// Both directions of one connection.
pub(crate) struct Seal {
    own: Direction,
    peer: Direction,
}

/// The tags of one direction.
struct Direction {
    /// Has taken in the role of the sender, and the challenges and hellos so far.
    mac: Hmac<Sha256>,
    /// The same without the hellos. An error's tag rests on it: its sender may not have the hello that is on its way to it.
    challenged: Hmac<Sha256>,
    /// Messages with a tag so far. The first is the proof.
    count: u64,
}

impl Seal {
    /// For the side that plays this part. Nothing has been sent or received yet.
    pub(crate) fn new(key: &PreSharedKey, own: Role) -> Self {
        let (controller, coprocessor) = (Direction::new(key, Role::Controller), Direction::new(key, Role::Coprocessor));
        match own {
            Role::Controller => Self { own: controller, peer: coprocessor },
            Role::Coprocessor => Self { own: coprocessor, peer: controller },
        }
    }

    /// Completes a message that is about to be sent.
    pub(crate) fn close(&mut self, kind: Kind, message: &mut Vec<u8>) {
        if self.own.covers(kind) {
            let length = u32::from_le_bytes(message[8..12].try_into().expect("a header")) + TAG as u32;
            message[8..12].copy_from_slice(&length.to_le_bytes());
            let tag = self.own.tag(kind, message).finalize().into_bytes();
            message.extend_from_slice(&tag);
            self.own.count += 1;
        }
        self.note(kind, message);
    }

    /// The message that was closed last has not been sent and will not be.
    pub(crate) fn take_back(&mut self) {
        self.own.count = self.own.count.saturating_sub(1);
    }

    /// Whether the next message of the peer, if it is of this kind, has to end in a tag: its proof and all after it.
    pub(crate) fn covers(&self, kind: Kind) -> bool {
        self.peer.covers(kind)
    }

    /// Whether a message from the peer, tag and all, is genuine. It has to be asked of every message, once.
    pub(crate) fn open(&mut self, kind: Kind, message: &[u8]) -> bool {
        if self.peer.covers(kind) {
            let Some((text, tag)) = message.split_last_chunk::<TAG>() else { return false };
            // In a time that does not depend on where they differ.
            if self.peer.tag(kind, text).verify_slice(tag).is_err() {
                return false;
            }
            self.peer.count += 1;
        }
        self.note(kind, message);
        true
    }

    /// What every later tag of either side rests on.
    fn note(&mut self, kind: Kind, message: &[u8]) {
        for direction in [&mut self.own, &mut self.peer] {
            if matches!(kind, Kind::Challenge | Kind::Hello) {
                direction.mac.update(message);
            }
            if kind == Kind::Challenge {
                direction.challenged.update(message);
            }
        }
    }
}

impl Direction {
    fn new(key: &PreSharedKey, sender: Role) -> Self {
        let label: &[u8] = match sender {
            Role::Controller => b"catalyst-transport controller\0",
            Role::Coprocessor => b"catalyst-transport coprocessor\0",
        };
        let mac =
            Hmac::<Sha256>::new_from_slice(key.bytes()).expect("HMAC takes a key of any length").chain_update(label);
        Self { challenged: mac.clone(), mac, count: 0 }
    }

    fn covers(&self, kind: Kind) -> bool {
        kind == Kind::Proof || self.count > 0
    }

    fn tag(&self, kind: Kind, message: &[u8]) -> Hmac<Sha256> {
        let before = if kind == Kind::Error { &self.challenged } else { &self.mac };
        before.clone().chain_update(self.count.to_le_bytes()).chain_update(message)
    }
}

#[cfg(test)]
mod tests;
