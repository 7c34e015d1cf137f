//! What has to hold for whatever bytes a peer sends or leaves in a ring. The fuzz targets of `tests/fuzz` call these
//! functions with inputs that a fuzzer invents, and the tests here with the checked-in corpus. Each panics where its property
//! is broken.

use std::cell::RefCell;

use crate::key::PreSharedKey;
use crate::oob::catalyst_message::{self, CatalystMessage};
use crate::oob::decoder::{Decoder, Problem};
use crate::oob::message::{HEADER, MAX_24_BITS, MAX_TEXT, Message, Role};
use crate::oob::seal::{Seal, TAG};
use crate::ring::{Check, FrameReader, FrameWriter, Geometry, Polled, SharedBytes};

const SESSION: u32 = 0xA1B2_C3D4;
/// What a buffer holds where nothing has been written.
const UNTOUCHED: u8 = 0xA5;

type Found = (Vec<(u32, Message)>, Option<Problem>);

/// All messages in these bytes, as they come out of pieces of this size, and the problem that ended them.
fn decode(mut bytes: &[u8], piece: usize, seal: Option<Seal>) -> Found {
    let (mut decoder, mut found) = (Decoder::new(), Vec::new());
    if let Some(seal) = seal {
        decoder.set_seal(seal);
    }
    loop {
        match decoder.next() {
            Ok(Some(message)) => found.push(message),
            Err(problem) => {
                assert_eq!(decoder.next(), Err(problem.clone()), "a problem must stay");
                assert!(!problem.to_string().is_empty());
                return (found, Some(problem));
            }
            Ok(None) if bytes.is_empty() => return (found, None),
            Ok(None) => {
                let (there, needed) = decoder.progress();
                assert!(there < needed, "a message of {needed} bytes is there and does not come out");
                let mut next = &bytes[..piece.clamp(1, bytes.len())];
                let taken = decoder.fill(&mut next).expect("a slice can be read");
                assert!(taken > 0, "no room is left although no message is whole");
                bytes = &bytes[taken..];
            }
        }
    }
}

/// A seal as it is at the beginning of a connection.
fn seal(own: Role) -> Seal {
    Seal::new(&PreSharedKey::of(b"0123456789abcdef"), own)
}

/// The first byte says in what pieces the rest arrives at the decoder of the native messages, with a pre-shared key and
/// without.
///
/// What comes out does not depend on the pieces, and what is accepted is the same after encoding and decoding.
pub fn native_messages(data: &[u8]) {
    let Some((&piece, bytes)) = data.split_first() else { return };
    let whole = decode(bytes, usize::MAX, None);
    assert_eq!(whole, decode(bytes, piece.into(), None), "it matters how bytes are cut up");
    assert_eq!(
        decode(bytes, usize::MAX, Some(seal(Role::Coprocessor))),
        decode(bytes, piece.into(), Some(seal(Role::Coprocessor))),
        "with a key it matters how bytes are cut up"
    );
    for (session, message) in whole.0 {
        let encoded = message.encode(session);
        assert!(encoded.len() <= HEADER + MAX_TEXT);
        let again = decode(&encoded, usize::MAX, None);
        match &message {
            // The replacement of what does not fit a log takes more bytes than it replaces, and a sender cuts the text.
            Message::Error(text) => {
                assert!(text.len() <= 3 * MAX_TEXT && !text.contains(char::is_control));
                let [(_, Message::Error(cut))] = &again.0[..] else { panic!("an error became {again:?}") };
                assert!(text.starts_with(cut.as_str()) && (cut == text || cut.len() > MAX_TEXT - 4));
            }
            _ => assert_eq!(again, (vec![(session, message)], None)),
        }
    }
}

/// The rest of the input holds messages that a controller with the key sends, and one byte of them is changed on its way: the
/// first two bytes say which, the third how.
///
/// Unchanged, all of them are taken. Nothing that is changed inside a message with a tag, and nothing after it, is taken.
pub fn sealed_messages(data: &[u8]) {
    let Some((&[low, high, change], bytes)) = data.split_first_chunk() else { return };
    let (sent, _) = decode(bytes, usize::MAX, None);
    let mut sender = seal(Role::Controller);
    let (mut stream, mut ends) = (Vec::new(), Vec::new());
    let mut expected = Vec::new();
    let mut proved = false;
    for (session, message) in sent {
        let mut encoded = message.encode(session);
        let length = encoded.len();
        let kind = message.kind();
        sender.close(kind, &mut encoded);
        proved |= matches!(message, Message::Proof);
        assert_eq!(encoded.len() - length, if proved { TAG } else { 0 });
        stream.extend(encoded);
        ends.push((stream.len(), proved));
        // As the recipient reads it: see the property of `native_messages`.
        expected.push(decode(&message.encode(session), usize::MAX, None).0.remove(0));
    }
    assert_eq!(decode(&stream, usize::MAX, Some(seal(Role::Coprocessor))), (expected.clone(), None));
    if stream.is_empty() || change == 0 {
        return;
    }
    let place = usize::from(u16::from_le_bytes([low, high])) % stream.len();
    stream[place] ^= change;
    let (found, _) = decode(&stream, usize::MAX, Some(seal(Role::Coprocessor)));
    let changed = ends.iter().position(|(end, _)| place < *end).expect("a place inside of the stream");
    assert!(found.len() >= changed && found[..changed] == expected[..changed]);
    if ends[changed].1 {
        assert_eq!(found.len(), changed, "a changed message was taken for a genuine one");
    }
}

/// The 64 bytes of a Catalyst message, filled up with zeros.
///
/// They are refused, or read as what they say.
pub fn catalyst_message(data: &[u8]) {
    let mut bytes = [0; catalyst_message::LENGTH];
    let length = data.len().min(bytes.len());
    bytes[..length].copy_from_slice(&data[..length]);
    let refused = catalyst_message::refuse_native(&data[..length]);
    match CatalystMessage::decode(&bytes) {
        Err(problem) => assert!(!problem.to_string().is_empty()),
        Ok(message) => {
            assert_eq!(refused, Ok(()));
            assert!(message.forward.psn.max(message.backward.psn) <= MAX_24_BITS);
            assert_eq!(CatalystMessage::decode(&message.encode()), Ok(message));
            // The upper byte of a packet sequence number does not count.
            (bytes[7], bytes[31]) = (0, 0);
            assert_eq!(message.encode(), bytes);
            // And the decoder of the native messages names it, however it is cut up.
            for piece in [1, usize::MAX] {
                assert_eq!(decode(&bytes, piece, None), (vec![], Some(Problem::Catalyst)));
            }
        }
    }
}

/// A slot whose frames are known by the session number: see [`ring_catalyst`].
pub fn ring_session(data: &[u8]) {
    ring(data, Some(Check::Session(SESSION)));
}

/// A slot whose frames are known by their checksum: see [`ring_catalyst`].
pub fn ring_checksum(data: &[u8]) {
    ring(data, Some(Check::Crc(SESSION)));
}

/// A slot of the Catalyst wire. One byte says whether the sequence number (1) and the check (2) are put right, one the capacity
/// of the native frames, four the sequence number; the rest is what is in the slot.
///
/// A frame is found exactly if it is there; its payload is that of the slot; nothing behind the payload is written; what is
/// around the slot makes no difference; and a writer writes the same frame.
pub fn ring_catalyst(data: &[u8]) {
    ring(data, None);
}

fn ring(data: &[u8], native: Option<Check>) {
    let Some((&[mend, capacity, s0, s1, s2, s3], bytes)) = data.split_first_chunk() else { return };
    let sequence = u32::from_le_bytes([s0, s1, s2, s3]);
    let (geometry, check) = match native {
        Some(check) => (Geometry::new(4, capacity.into()), check),
        None => (Geometry::catalyst(4), Check::Session(SESSION)),
    };
    let (offset, behind) = (geometry.slot_offset(sequence), geometry.frame_end(sequence));
    let end = behind - offset;
    let mut slot = vec![0; geometry.slot_bytes()];
    let bytes = &bytes[..bytes.len().min(slot.len())];
    // A frame stands at the end of a native slot and at the head of a Catalyst one.
    let at = if native.is_some() { slot.len() - bytes.len() } else { 0 };
    slot[at..at + bytes.len()].copy_from_slice(bytes);
    if mend & 1 != 0 {
        slot[end - 4..end].copy_from_slice(&sequence.to_le_bytes());
    }
    let word = |slot: &[u8], at: usize| u32::from_le_bytes(slot[at..at + 4].try_into().expect("four bytes"));
    let length = if native.is_some() { (word(&slot, end - 12) & MAX_24_BITS) as usize } else { 8 };
    // What the format has for the check field, formed without the crate's own functions.
    let right = (length <= geometry.capacity).then(|| match check {
        Check::Session(session) => session,
        Check::Crc(session) => {
            let mut covered = slot[end - 16 - if native.is_some() { length } else { 0 }..end - 16].to_vec();
            covered.extend(session.to_le_bytes());
            covered.extend(&slot[end - 12..end]);
            crc32c::crc32c(&covered)
        }
    });
    if let (true, Some(_), Some(right)) = (mend & 2 != 0, native, right.or(Some(SESSION))) {
        slot[end - 16..end - 12].copy_from_slice(&right.to_le_bytes());
    }

    MEMORY.with_borrow_mut(|(memory, around)| {
        let [first, second] = [0, 0xFF].map(|fill| {
            around.fill(fill);
            memory.copy_in(0, &around[..geometry.ring_bytes()]);
            memory.copy_in(offset, &slot);
            let mut payload = vec![UNTOUCHED; geometry.capacity];
            let reader = FrameReader::new(memory.clone(), geometry, check, sequence);
            assert_eq!(reader.arrived(), word(&slot, end - 4) == sequence);
            (reader.poll(&mut payload), payload)
        });
        assert_eq!(first, second, "it matters what is around the slot");

        let (polled, payload) = first;
        let arrived = word(&slot, end - 4) == sequence;
        let verified = native.is_none() || right == Some(word(&slot, end - 16));
        let Polled::Frame(trailer) = polled else {
            assert!(!(arrived && verified), "a whole frame was not taken: {polled:?}");
            match polled {
                Polled::Empty => assert!(!arrived),
                Polled::TooLong(trailer) => {
                    assert!(arrived && length > geometry.capacity && trailer.length as usize == length);
                    assert_eq!((check, trailer.check), (Check::Session(SESSION), SESSION));
                }
                _ => assert!(arrived),
            }
            return;
        };
        assert!(arrived && verified, "what is no whole frame was taken");
        assert_eq!((trailer.sequence, trailer.length as usize), (sequence, length));
        let head = if native.is_some() { end - 16 - length } else { 0 };
        assert_eq!(payload[..length], slot[head..head + length]);
        assert!(payload[length..].iter().all(|byte| *byte == UNTOUCHED), "more than the payload was written");

        let mut writer = FrameWriter::new(geometry, check, sequence);
        around.fill(0);
        memory.copy_in(0, &around[..geometry.ring_bytes()]);
        writer.stage(memory, behind, &payload[..length]);
        let written = writer.publish(memory, behind, trailer.status, trailer.decoder_id);
        let mut frame = vec![0; written];
        memory.copy_out(behind - written, &mut frame);
        assert_eq!(frame, slot[end - written..end], "it is written differently");
    });
}

thread_local! {
    /// A ring's memory and as many bytes to fill it with: mapping it anew for each input would take most of the time.
    static MEMORY: RefCell<(SharedBytes, Vec<u8>)> = {
        let bytes = Geometry::catalyst(4).ring_bytes();
        RefCell::new((SharedBytes::anonymous(bytes).expect("memory for a ring"), vec![0; bytes]))
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    type Property = fn(&[u8]);

    /// The corpus that the fuzzers begin with, and what they once found.
    #[test]
    fn the_corpus_holds_every_property() {
        let targets: [(&str, Property); 6] = [
            ("native_messages", native_messages),
            ("sealed_messages", sealed_messages),
            ("catalyst_message", catalyst_message),
            ("ring_session", ring_session),
            ("ring_checksum", ring_checksum),
            ("ring_catalyst", ring_catalyst),
        ];
        for (name, target) in targets {
            let folder = format!("{}/tests/fuzz/seeds/{name}", env!("CARGO_MANIFEST_DIR"));
            let mut seen = 0;
            for entry in std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{folder}: {error}")) {
                let input = std::fs::read(entry.unwrap().path()).unwrap();
                target(&input);
                // And each with one byte changed, so that this test finds what stands near.
                for place in 0..input.len() {
                    let mut changed = input.clone();
                    changed[place] ^= 1 << (place % 8);
                    target(&changed);
                }
                seen += 1;
            }
            assert!(seen > 0, "no inputs in {folder}");
        }
    }
}
