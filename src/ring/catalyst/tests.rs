use proptest::collection::vec;
use proptest::prelude::*;

use crate::ring::{Check, FrameReader, FrameWriter, Geometry, Polled, SharedBytes};

fn ring(first: u32) -> (SharedBytes, FrameWriter, FrameReader) {
    let geometry = Geometry::catalyst(256);
    let memory = SharedBytes::anonymous(geometry.region_bytes()).unwrap();
    let reader = FrameReader::new(memory.clone(), geometry, Check::Session(0), first);
    reader.prepare();
    (memory, FrameWriter::new(geometry, Check::Session(0), first), reader)
}

fn send(memory: &SharedBytes, writer: &mut FrameWriter, payload: &[u8], decoder_id: u32) -> usize {
    let end = Geometry::catalyst(256).frame_end(writer.sequence());
    writer.stage(memory, end, payload);
    writer.publish(memory, end, 0, decoder_id)
}

#[test]
fn the_ring_has_256_slots_of_64_bytes_whatever_the_window() {
    for depth in [1, 16, 256] {
        let geometry = Geometry::catalyst(depth);
        assert_eq!((geometry.slots(), geometry.slot_bytes(), geometry.region_bytes()), (256, 64, 16_384));
        for (sequence, slot) in [(1, 0), (2, 1), (256, 255), (257, 0), (0, 255), (u32::MAX, 254)] {
            assert_eq!(geometry.slot_offset(sequence), slot * 64, "frame {sequence}");
            assert_eq!(geometry.frame_end(sequence), slot * 64 + 16, "frame {sequence}");
        }
    }
}

/// The vectors of the document, which were not written by this code.
#[test]
fn frames_are_those_of_the_document() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/wire-protocol.md");
    let document = std::fs::read_to_string(path).unwrap();
    let block = document.split("```catalyst-vectors\n").nth(1).unwrap().split("```").next().unwrap();
    let mut seen = 0;
    for line in block.lines().filter(|line| line.starts_with("frame_")) {
        let (name, hex) = line.split_once(": ").unwrap();
        let digits: String = hex.split_whitespace().collect();
        let bytes: Vec<u8> =
            (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap()).collect();
        let (payload, decoder_id, sequence): (&[u8], _, u32) = match name {
            "frame_first" => (&[1, 2, 3, 4, 5, 6, 7, 8], 5, 1),
            "frame_short" => (&[1, 0, 1], 5, 256),
            "frame_wrapped" => (&[0xFF; 8], u32::MAX, 0),
            other => panic!("the document has an unknown vector {other}"),
        };
        let (memory, mut writer, _) = ring(sequence);
        assert_eq!(send(&memory, &mut writer, payload, decoder_id), 16);
        let slot = (sequence.wrapping_sub(1) % 256) as usize * 64;
        let mut written = [0; 64];
        memory.copy_out(slot, &mut written);
        assert_eq!(written[..16], bytes, "{name}");
        assert_eq!(written[16..], [0; 48], "{name}");
        seen += 1;
    }
    assert_eq!(seen, 3);
}

#[test]
fn a_frame_that_was_not_staged_is_zero() {
    let (memory, mut writer, reader) = ring(1);
    send(&memory, &mut writer, &[9; 8], 1);
    let end = Geometry::catalyst(256).frame_end(2);
    writer.publish(&memory, end, 0, 2);
    let reader = reader.restarted(2);
    let mut value = [7; 8];
    assert!(matches!(reader.poll(&mut value), Polled::Frame(trailer) if trailer.decoder_id == 2));
    assert_eq!(value, [0; 8]);
}

proptest! {
    /// Whatever is written is read, in order, over several turns of the ring and across the wrap of the sequence number.
    #[test]
    fn frames_arrive_whole_and_in_order(
        first in prop_oneof![Just(1_u32), Just(0), (u32::MAX - 300)..=u32::MAX, any::<u32>()],
        payloads in vec((vec(any::<u8>(), 0..=8), any::<u32>()), 1..600),
        gathered in 1..=256_usize,
    ) {
        let (memory, mut writer, mut reader) = ring(first);
        let mut value = [0; 8];
        for turn in payloads.chunks(gathered) {
            prop_assert_eq!(reader.poll(&mut value), Polled::Empty);
            for (payload, decoder_id) in turn {
                send(&memory, &mut writer, payload, *decoder_id);
            }
            for (payload, decoder_id) in turn {
                prop_assert!(reader.arrived());
                let Polled::Frame(trailer) = reader.poll(&mut value) else {
                    return Err(TestCaseError::fail("the frame is not there"));
                };
                prop_assert_eq!(&value[..payload.len()], &payload[..]);
                prop_assert!(value[payload.len()..].iter().all(|byte| *byte == 0));
                prop_assert_eq!((trailer.length, trailer.status), (8, 0));
                prop_assert_eq!((trailer.decoder_id, trailer.sequence), (*decoder_id, reader.expected()));
                reader.advance();
            }
        }
    }

    /// Bytes that a hostile or broken peer leaves in a slot never panic; they are a frame exactly if the number is the
    /// expected one.
    #[test]
    fn any_bytes_are_survived(bytes in vec(any::<u8>(), 64), sequence in any::<bool>()) {
        let (memory, _, reader) = ring(5);
        let mut bytes = bytes;
        if sequence {
            bytes[12..16].copy_from_slice(&5_u32.to_le_bytes());
        }
        memory.copy_in(4 * 64, &bytes);
        let expected = bytes[12..16] == 5_u32.to_le_bytes();
        let mut value = [0; 8];
        match reader.poll(&mut value) {
            Polled::Frame(_) => prop_assert!(expected && value == bytes[..8]),
            found => prop_assert!(!expected && found == Polled::Empty),
        }
    }
}
