//! The ring between two threads, in every order that the memory model allows.
//!
//! What is explored is the crate's own reader and writer: only the memory under them is loom's.
#![cfg(test)]
#![allow(dead_code, unused_imports)]

mod ring;

use loom::thread;
use ring::{Check, FrameReader, FrameWriter, Geometry, Polled, SharedBytes};

const SESSION: u32 = 0xC0FFEE;

/// A payload of one word, recognisable by its round.
fn payload(round: u32) -> [u8; 8] {
    (u64::from(round) * 0x0101_0101_0101_0101).to_le_bytes()
}

/// Polls until a frame is there, letting the other thread run.
fn next(reader: &mut FrameReader, buffer: &mut [u8]) -> u32 {
    loop {
        match reader.poll(buffer) {
            Polled::Frame(trailer) => {
                reader.advance();
                return trailer.length;
            }
            Polled::TooLong(_) => panic!("a length that nobody wrote"),
            Polled::Empty | Polled::Unverified => thread::yield_now(),
        }
    }
}

/// Requests one way and replies the other, over rings of this depth, with as many rounds as turn them over.
fn rounds(depth: u32, count: u32, first: u32, check: Check) {
    let geometry = Geometry::new(depth, 8);
    let requests = SharedBytes::anonymous(geometry.ring_bytes()).unwrap();
    let replies = SharedBytes::anonymous(geometry.ring_bytes()).unwrap();
    let mut incoming = FrameReader::new(requests.clone(), geometry, check, first);
    let mut outgoing = FrameReader::new(replies.clone(), geometry, check, first);
    incoming.prepare();
    outgoing.prepare();

    let coprocessor = thread::spawn(move || {
        let mut writer = FrameWriter::new(geometry, check, first);
        let mut buffer = [0; 8];
        for round in 0..count {
            let sequence = writer.sequence();
            assert_eq!(next(&mut incoming, &mut buffer), 8);
            assert_eq!(buffer, payload(round), "a request that was never sent");
            let end = geometry.frame_end(sequence);
            writer.stage(&replies, end, &buffer);
            writer.publish(&replies, end, 0, 7);
        }
    });

    let mut writer = FrameWriter::new(geometry, check, first);
    let mut buffer = [0; 8];
    let mut collected = 0;
    for round in 0..count {
        // As the controller does: a slot is used again only when the reply to its last request has been seen.
        while round - collected >= depth {
            assert_eq!(next(&mut outgoing, &mut buffer), 8);
            assert_eq!(buffer, payload(collected), "a reply that was never sent");
            collected += 1;
        }
        let end = geometry.frame_end(writer.sequence());
        writer.stage(&requests, end, &payload(round));
        writer.publish(&requests, end, 0, 7);
    }
    while collected < count {
        assert_eq!(next(&mut outgoing, &mut buffer), 8);
        assert_eq!(buffer, payload(collected));
        collected += 1;
    }
    coprocessor.join().unwrap();
}

fn explore(body: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    // Every schedule with up to three preemptions; more find nothing new in a protocol of one word and take hours.
    model.preemption_bound = Some(3);
    model.check(body);
}

#[test]
fn one_slot_is_turned_over() {
    explore(|| rounds(1, 2, 1, Check::Session(SESSION)));
}

#[test]
fn two_slots_are_turned_over() {
    explore(|| rounds(2, 3, 1, Check::Session(SESSION)));
}

#[test]
fn the_sequence_number_wraps() {
    explore(|| rounds(1, 2, u32::MAX, Check::Session(SESSION)));
}

#[test]
fn the_checksum_holds_too() {
    explore(|| rounds(1, 2, 1, Check::Crc(SESSION)));
}

/// The model finds what it is there for: with the sequence word written before the payload, a reader sees the new number
/// and an old payload.
#[test]
#[should_panic(expected = "torn")]
fn a_wrong_order_is_found() {
    explore(|| {
        let memory = SharedBytes::anonymous(64).unwrap();
        let writer = memory.clone();
        let thread = thread::spawn(move || {
            writer.store_release(56, 1);
            writer.store_relaxed(48, 7);
        });
        if memory.load_acquire(56) == 1 {
            assert_eq!(memory.load_relaxed(48), 7, "torn");
        }
        thread.join().unwrap();
    });
}
