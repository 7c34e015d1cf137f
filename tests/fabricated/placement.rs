//! Writes whose bytes reach memory in any order.

use catalyst_transport::fabricated::{Placement, Plan};
use catalyst_transport::{MemKind, TransportSession};

use crate::support::{Pair, assert_clean, guarded_alone, payload};

/// Rounds of several sizes with this placement, every reply right.
fn rounds(name: &'static str, placement: Placement, count: usize) {
    guarded_alone(move || {
        // Half of the sessions inline, half not.
        for (index, inline) in [220, 0].into_iter().enumerate() {
            let name = format!("{name}-{index}");
            let device = Plan::new(&name).placement(placement).grant_inline(inline).install();
            let mut pair =
                Pair::new([&name, &name], |config| config.depth(4).request_capacity(5000).reply_capacity(5000));
            pair.run();
            let lengths = [8, 0, 60, 1, 200, 13, 700, 8, 16, 5000];
            for round in 0..count / 2 {
                pair.round(&payload(round, lengths[round % lengths.len()]));
            }
            pair.close();
            assert_clean(&device);
        }
    });
}

#[test]
fn in_order() {
    rounds("place-order", Placement::InOrder, 2000);
}

#[test]
fn reversed() {
    rounds("place-reversed", Placement::Reversed, 2000);
}

#[test]
fn random() {
    rounds("place-random", Placement::Random, 2000);
}

#[test]
fn torn() {
    rounds("place-torn", Placement::Torn, 2000);
}

#[test]
fn several_torn_rounds_in_flight() {
    guarded_alone(|| {
        let devices = ["torn-a", "torn-b"].map(|name| Plan::new(name).placement(Placement::Torn).install());
        let mut pair = Pair::new(["torn-a", "torn-b"], |config| config.depth(8));
        pair.run();
        for turn in 0..100 {
            for index in 0..8 {
                pair.controller.write_data_slot(&payload(turn * 8 + index, 64), 3).unwrap();
                pair.controller.kick(0).unwrap();
            }
            for index in 0..8 {
                assert_eq!(pair.controller.collect_reply().unwrap(), payload(turn * 8 + index, 64));
            }
        }
        // Torn placements under way do not hinder the end.
        for _ in 0..8 {
            pair.controller.write_data_slot(&[1; 64], 3).unwrap();
            pair.controller.kick(0).unwrap();
        }
        pair.close();
        devices.iter().for_each(assert_clean);
    });
}

/// The proof that the tests above would notice: a device that promises an order and does not keep it.
#[test]
fn a_device_that_lies_about_its_order_is_seen_to_corrupt() {
    guarded_alone(|| {
        let device = Plan::new("liar").placement(Placement::Torn).in_order_query(true).install();
        let mut pair =
            Pair::new(["liar", "liar"], |config| config.depth(1).reply_timeout(std::time::Duration::from_millis(500)));
        pair.run();
        let mut wrong = 0;
        for round in 0..2000 {
            let sent = payload(round, 64);
            let reply =
                pair.controller.write_data_slot(&sent, 0).and_then(|()| pair.controller.kick(0)).and_then(|_| {
                    let mut reply = [0; 64];
                    pair.controller.collect(&mut [&mut reply]).map(|_| reply)
                });
            if reply.is_ok_and(|reply| reply == *sent) {
                continue;
            }
            wrong += 1;
            if wrong == 5 {
                break;
            }
        }
        assert!(wrong > 0, "no torn frame was ever taken for a whole one");
        pair.close();
        assert_clean(&device);
    });
}

/// The check fields of the first two replies, read from the memory that they were written to.
fn two_checks(name: &str, promises: bool) -> (u32, u32) {
    let device = Plan::new(name).dma_buf().in_order_query(promises).install();
    let memory = rustix::fs::memfd_create("replies", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&memory, 1 << 16).unwrap();
    let mut pair = Pair::new([name, name], |config| config.dma_buf(memory.try_clone().unwrap()));
    let desc = pair.controller_channel();
    let (controller, coprocessor) = pair.open_with(
        |session, info| {
            session.connect(info)?;
            let region = session.alloc_memory(desc.controller_bytes(), MemKind::Other)?;
            let peer = session.exchange_keys(&region)?;
            session.establish_channel(&desc, &region, &peer)?;
            session.commit_work_item(0, 64, 64)
        },
        |session, info| session.open(info),
    );
    controller.unwrap();
    coprocessor.unwrap();
    pair.coprocessor.start().unwrap();
    pair.controller.start().unwrap();
    pair.round(b"one");
    pair.round(b"another");
    // Slots of 128 bytes; the first sequence number is 1, and the check stands 16 bytes before the end of its slot.
    let check = |sequence: u64| {
        let mut word = [0; 4];
        rustix::io::pread(&memory, &mut word, (sequence + 1) * 128 - 16).unwrap();
        u32::from_le_bytes(word)
    };
    let checks = (check(1), check(2));
    pair.close();
    assert_clean(&device);
    checks
}

#[test]
fn the_check_is_the_session_number_only_where_the_device_vouches_for_the_order() {
    guarded_alone(|| {
        let (one, another) = two_checks("check-session", true);
        assert_eq!(one, another);
        assert_ne!(one, 0);
        let (one, another) = two_checks("check-crc", false);
        assert_ne!(one, another);
    });
}
