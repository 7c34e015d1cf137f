use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const SESSION: u32 = 0xA1B2_C3D4;

fn checks() -> impl Strategy<Value = Check> {
    prop_oneof![Just(Check::Session(SESSION)), Just(Check::Crc(SESSION))]
}

fn ring(geometry: Geometry, check: Check, first: u32) -> (SharedBytes, FrameWriter, FrameReader) {
    let memory = SharedBytes::anonymous(geometry.ring_bytes()).unwrap();
    let reader = FrameReader::new(memory.clone(), geometry, check, first);
    reader.prepare();
    (memory, FrameWriter::new(geometry, check, first), reader)
}

fn send(memory: &SharedBytes, geometry: Geometry, writer: &mut FrameWriter, payload: &[u8], decoder_id: u32) -> usize {
    let end = geometry.frame_end(writer.sequence());
    writer.stage(memory, end, payload);
    writer.publish(memory, end, 0, decoder_id)
}

/// The vectors of the document, which were not written by this code.
#[test]
fn frames_are_those_of_the_document() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/wire-protocol.md");
    let document = std::fs::read_to_string(path).unwrap();
    let block = document.split("```frame-vectors\n").nth(1).unwrap().split("```").next().unwrap();
    let mut seen = 0;
    for line in block.lines() {
        let (name, hex) = line.split_once(": ").unwrap();
        let digits: String = hex.split_whitespace().collect();
        let bytes: Vec<u8> =
            (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap()).collect();
        let (check, payload, status, decoder_id, sequence): (_, &[u8], _, _, _) = match name {
            "session_number_three_bytes" => (Check::Session(SESSION), &[1, 0, 1], 0, 5, 1),
            "session_number_empty" => (Check::Session(SESSION), &[], 0, 0, 0xFFFF_FFFF),
            "session_number_failed" => (Check::Session(SESSION), b"no", 1, 7, 2),
            "crc_three_bytes" => (Check::Crc(SESSION), &[1, 0, 1], 0, 5, 1),
            "crc_empty" => (Check::Crc(SESSION), &[], 0, 0, 0xFFFF_FFFF),
            other => panic!("the document has an unknown vector {other}"),
        };
        let geometry = Geometry::new(4, 8);
        let (memory, mut writer, _) = ring(geometry, check, sequence);
        let end = geometry.frame_end(sequence);
        writer.stage(&memory, end, payload);
        let length = writer.publish(&memory, end, status, decoder_id);
        let mut written = vec![0; length];
        memory.copy_out(end - length, &mut written);
        assert_eq!(written, bytes, "{name}");
        seen += 1;
    }
    assert_eq!(seen, 5);
}

#[test]
fn slots_are_whole_cache_lines_and_never_overlap() {
    for capacity in [0, 1, 48, 49, 64, 1000, 1 << 20] {
        let geometry = Geometry::new(4, capacity);
        assert_eq!(geometry.slot_bytes() % 64, 0);
        assert!(geometry.slot_bytes() >= capacity + 16 && geometry.slot_bytes() < capacity + 16 + 64);
        for sequence in [0, 1, u32::MAX - 1, u32::MAX] {
            assert_eq!(geometry.frame_end(sequence), geometry.slot_offset(sequence) + geometry.slot_bytes());
            assert!(geometry.frame_end(sequence) <= geometry.ring_bytes());
        }
        // The order goes on across the wrap.
        assert_eq!(
            geometry.slot_offset(0),
            (geometry.slot_offset(u32::MAX) + geometry.slot_bytes()) % geometry.ring_bytes()
        );
    }
}

proptest! {
    /// Whatever is written is read, in order, over several turns of the ring and across the wrap of the sequence number.
    #[test]
    fn frames_arrive_whole_and_in_order(
        depth in 0..4_u32,
        check in checks(),
        first in prop_oneof![Just(1_u32), Just(0), (u32::MAX - 20)..=u32::MAX, any::<u32>()],
        payloads in vec((vec(any::<u8>(), 0..100), any::<u32>()), 1..40),
        gathered in 1..8_usize,
    ) {
        let geometry = Geometry::new(1 << depth, 99);
        let (memory, mut writer, mut reader) = ring(geometry, check, first);
        let mut buffer = vec![0; 99];
        for turn in payloads.chunks(gathered.min(geometry.depth as usize)) {
            prop_assert_eq!(reader.poll(&mut buffer), Polled::Empty);
            for (payload, decoder_id) in turn {
                let bytes = send(&memory, geometry, &mut writer, payload, *decoder_id);
                prop_assert_eq!(bytes, payload.len() + 16);
            }
            for (payload, decoder_id) in turn {
                let expected = reader.expected();
                let Polled::Frame(trailer) = reader.poll(&mut buffer) else {
                    return Err(TestCaseError::fail("the frame is not there"));
                };
                prop_assert_eq!(&buffer[..trailer.length as usize], &payload[..]);
                prop_assert_eq!((trailer.decoder_id, trailer.sequence, trailer.status), (*decoder_id, expected, 0));
                reader.advance();
            }
        }
    }

    /// Bytes that a hostile or broken peer leaves in a slot never panic, never read outside of it, and never pass for a
    /// frame unless their check is right.
    #[test]
    fn any_bytes_are_survived(check in checks(), bytes in vec(any::<u8>(), 128), sequence in any::<bool>(), session in any::<bool>()) {
        let geometry = Geometry::new(1, 100);
        let (memory, _, reader) = ring(geometry, check, 5);
        let mut bytes = bytes;
        // Most random bytes would be told apart at the first word: help them past it.
        if sequence {
            bytes[124..].copy_from_slice(&5_u32.to_le_bytes());
        }
        if session {
            bytes[112..116].copy_from_slice(&SESSION.to_le_bytes());
        }
        memory.copy_in(0, &bytes);
        let mut buffer = vec![0; 100];
        match reader.poll(&mut buffer) {
            Polled::Frame(trailer) => {
                prop_assert!(sequence && session && matches!(check, Check::Session(_)));
                let length = trailer.length as usize;
                prop_assert_eq!(&buffer[..length], &bytes[112 - length..112]);
            }
            Polled::TooLong(trailer) => prop_assert!(sequence && session && trailer.length > 100),
            Polled::Empty => prop_assert!(!sequence),
            Polled::Unverified => prop_assert!(sequence),
        }
    }

    /// With a checksum no single flipped bit passes.
    #[test]
    fn a_flipped_bit_is_noticed(payload in vec(any::<u8>(), 0..60), bit in any::<prop::sample::Index>()) {
        let geometry = Geometry::new(1, 60);
        let (memory, mut writer, reader) = ring(geometry, Check::Crc(SESSION), 9);
        let bytes = send(&memory, geometry, &mut writer, &payload, 3);
        let bit = bit.index(bytes * 8);
        let at = geometry.frame_end(9) - bytes + bit / 8;
        let mut byte = [0];
        memory.copy_out(at, &mut byte);
        memory.copy_in(at, &[byte[0] ^ 1 << (bit % 8)]);
        let found = reader.poll(&mut [0; 60]);
        prop_assert!(matches!(found, Polled::Empty | Polled::Unverified), "{:?}", found);
    }

    /// A frame of another session, or of an earlier turn of the ring, is not taken.
    #[test]
    fn a_stranger_is_not_taken(check in checks(), other in any::<u32>(), turns in 1..9_u32) {
        prop_assume!(other != SESSION);
        let geometry = Geometry::new(4, 8);
        let (memory, _, mut reader) = ring(geometry, check, 1);
        let stranger = match check {
            Check::Session(_) => Check::Session(other),
            Check::Crc(_) => Check::Crc(other),
        };
        let mut writer = FrameWriter::new(geometry, stranger, 1);
        send(&memory, geometry, &mut writer, b"stranger", 0);
        prop_assert_eq!(reader.poll(&mut [0; 8]), Polled::Unverified);
        reader.rewind(1 + 4 * turns);
        prop_assert_eq!(reader.poll(&mut [0; 8]), Polled::Empty);
    }
}

/// An arriving frame may be seen in any state: whatever part of it is there, it is not taken before it is whole.
#[test]
fn a_frame_that_arrives_in_pieces_is_taken_only_whole() {
    let geometry = Geometry::new(1, 40);
    let (memory, mut writer, _) = ring(geometry, Check::Crc(SESSION), 1);
    let bytes = send(&memory, geometry, &mut writer, &[0xEE; 40], 1);
    let mut whole = vec![0; bytes];
    memory.copy_out(geometry.frame_end(1) - bytes, &mut whole);
    for missing in (0..bytes).step_by(4) {
        let (memory, _, reader) = ring(geometry, Check::Crc(SESSION), 1);
        let mut partial = whole.clone();
        partial[missing..missing + 4].fill(0);
        memory.copy_in(geometry.frame_end(1) - bytes, &partial);
        let found = reader.poll(&mut [0; 40]);
        assert!(matches!(found, Polled::Empty | Polled::Unverified), "without the word at {missing}: {found:?}");
    }
}
