//! The proof, at the end of the bring-up, that both sides mean the same channel and that data passes both ways.

use std::net::SocketAddr;
use std::time::Instant;

use crate::data_path::DataPath;
use crate::error::{Result, TransportError};
use crate::oob::{self, Channel, Kind, Message};
use crate::ring::{Geometry, SharedBytes};

/// Both sides have to describe the same rings.
pub(super) fn compare(own: &oob::Geometry, theirs: &oob::Geometry, peer: SocketAddr) -> Result<()> {
    let fields = [
        ("depth", own.depth, theirs.depth),
        ("request capacity", own.request_capacity, theirs.request_capacity),
        ("reply capacity", own.reply_capacity, theirs.reply_capacity),
        ("first sequence number", own.first_sequence, theirs.first_sequence),
    ];
    let differing: Vec<_> = fields
        .iter()
        .filter(|(_, own, theirs)| own != theirs)
        .map(|(name, own, theirs)| format!("{name} is {own} here and {theirs} there"))
        .collect();
    if differing.is_empty() {
        return Ok(());
    }
    Err(TransportError::Protocol {
        stage: "establish_channel",
        peer: peer.to_string(),
        problem: format!("the two sides describe different channels: {}", differing.join(", ")),
    })
}

/// Writes a pattern longer than any MTU into the peer's region, and waits for the peer's own.
pub(super) fn run(
    channel: &mut Channel,
    path: &mut DataPath,
    incoming: Geometry,
    own_session: u32,
    peer_session: u32,
    deadline: Instant,
) -> Result<()> {
    const STAGE: &str = "establish_channel: probing the data path";
    let began = Instant::now();
    path.send_probe(&pattern(peer_session))?;
    let expected = pattern(own_session);
    let memory = path.incoming();
    let (mut arrived, mut confirmed) = (false, false);
    while !(arrived && confirmed) {
        // An error of our own write tells more than the peer's silence.
        path.progress()?;
        if !arrived && holds(&memory, incoming.ring_bytes(), &expected) {
            arrived = true;
            channel.send(&Message::Probed, deadline, STAGE)?;
        }
        if !confirmed && let Some(message) = channel.try_receive(STAGE)? {
            if message != Message::Probed {
                return Err(TransportError::Protocol {
                    stage: STAGE,
                    peer: channel.peer_addr().to_string(),
                    problem: format!("a {} message came where a {} message was expected", message.kind(), Kind::Probed),
                });
            }
            confirmed = true;
        }
        if Instant::now() >= deadline {
            let what = match (arrived, confirmed) {
                (true, _) => "the peer's write arrived here, ours was not seen there",
                (_, true) => "our write arrived there, the peer's did not arrive here",
                _ => "nothing passes either way",
            };
            return Err(TransportError::Timeout {
                stage: STAGE,
                waited: began.elapsed(),
                hint: format!(
                    "the connection stands but data does not pass: {what}; check the GID index and type, the MTU of the whole \
                     path, and that no firewall drops UDP port 4791"
                ),
            });
        }
        std::thread::yield_now();
    }
    Ok(())
}

/// The probe's bytes: a sequence of words made from the receiver's session number, never zero.
fn pattern(session: u32) -> Vec<u8> {
    let mut state = u64::from(session) << 32 | 0x5EED;
    let mut bytes = Vec::with_capacity(Geometry::PROBE_BYTES);
    while bytes.len() < Geometry::PROBE_BYTES {
        // The multiplier of Knuth's MMIX generator; any that spreads the bits would do.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bytes.extend_from_slice(&(state | 1).to_le_bytes());
    }
    bytes
}

/// Whether the memory holds the pattern: its last word first, then all of it.
fn holds(memory: &SharedBytes, start: usize, expected: &[u8]) -> bool {
    let (_, last) = expected.split_at(expected.len() - 8);
    if memory.load_acquire(start + expected.len() - 8).to_ne_bytes() != *last {
        return false;
    }
    let mut copy = vec![0; expected.len()];
    memory.copy_out(start, &mut copy);
    copy == expected
}
