//! Rounds that are sent together.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use catalyst_transport::{TransportError, TransportSession};

use super::hardening::{Opens, gated, patient};
use super::{Setup, ask, bytes, echo, running};

/// Rounds that were queued are rounds like any other, whichever call sends them.
pub(crate) fn queued_rounds_are_rounds(setup: Setup) {
    for depth in [1, 2, 8, 128] {
        let (mut controller, _coprocessor) = running(&patient(setup.clone()).channel(depth, 40, 40), echo);
        for turn in 0..(40 / setup.slowness).max(6) {
            let count = 1 + turn % depth;
            for round in 0..count {
                controller.write_data_slot(&bytes(40, turn * depth + round), round).unwrap();
                // The last is kicked, or left to the call that follows.
                let sequence = if turn % 4 == 0 && round == count - 1 {
                    controller.kick(0).unwrap()
                } else {
                    controller.queue(0).unwrap()
                };
                assert_eq!(controller.in_flight(), round + 1, "sequence {sequence}");
            }
            if turn % 4 == 1 {
                controller.kick_queued().unwrap();
                controller.kick_queued().unwrap();
            }
            for round in 0..count {
                let expected = bytes(40, turn * depth + round);
                let mut reply = [0; 40];
                let length = match turn % 4 {
                    2 => loop {
                        if let Some(length) = controller.try_collect(&mut [&mut reply]).unwrap() {
                            break length;
                        }
                    },
                    _ => controller.collect(&mut [&mut reply]).unwrap(),
                };
                assert_eq!(reply[..length], expected, "depth {depth}, turn {turn}, round {round}");
            }
        }
    }
}

/// What has gone wrong with one round of a burst leaves the others as they are; a stop sends what was queued, so that no
/// slot is lost.
pub(crate) fn a_queue_keeps_to_the_rules_of_a_kick(setup: Setup) {
    let (mut controller, _coprocessor) = running(&patient(setup).channel(4, 8, 8), echo);
    controller.commit_work_item(1, 2, 8).unwrap();
    controller.write_data_slot(b"first", 0).unwrap();
    controller.queue(0).unwrap();
    let invalid = |result: catalyst_transport::Result<u32>| match result {
        Err(TransportError::Invalid { .. }) => {}
        other => panic!("{other:?}"),
    };
    invalid(controller.queue(0));
    invalid(controller.queue(7));
    controller.write_data_slot(b"second", 0).unwrap();
    invalid(controller.queue(1));
    controller.queue(0).unwrap();
    for text in [b"third", b"forth"] {
        controller.write_data_slot(text, 0).unwrap();
        controller.queue(0).unwrap();
    }
    let full = Err(TransportError::WindowFull { in_flight: 4, depth: 4 });
    assert_eq!(controller.queue(0).map(|_| ()), full);
    for text in [&b"first"[..], b"second", b"third", b"forth"] {
        assert_eq!(controller.collect_reply().unwrap(), text);
    }
    for _ in 0..5 {
        for _ in 0..3 {
            controller.write_data_slot(b"given up", 0).unwrap();
            controller.queue(0).unwrap();
        }
        controller.stop().unwrap();
        let out_of_order = |result, name| match result {
            Err(TransportError::OutOfOrder { call, .. }) => assert_eq!(call, name),
            other => panic!("{other:?}"),
        };
        out_of_order(controller.queue(0).map(|_| ()), "queue");
        out_of_order(controller.kick_queued(), "kick_queued");
        controller.start().unwrap();
        let deadline = Instant::now() + Duration::from_secs(30);
        while let Err(error) = controller.write_data_slot(b"anew", 0) {
            assert!(matches!(error, TransportError::WindowFull { .. }), "{error}");
            assert!(Instant::now() < deadline, "a slot was lost");
        }
        controller.kick(0).unwrap();
        assert_eq!(controller.collect_reply().unwrap(), b"anew");
    }
    assert_eq!(controller.late_replies(), 15);
}

/// Replies to a burst do not wait for the function of a request behind them that takes its time.
pub(crate) fn a_slow_function_holds_no_reply_back(setup: Setup) {
    let gate = Arc::new(AtomicBool::new(false));
    let setup = patient(setup).channel(8, 8, 8);
    let (mut controller, _coprocessor) = running(&setup, |co| co.set_coprocessor_fn(gated(&gate)).unwrap());
    let opens = Opens(gate.clone());
    for turn in 0..20_u64 {
        for round in 0..6 {
            controller.write_data_slot(&(turn << 8 | round).to_le_bytes(), u32::from(round == 5)).unwrap();
            controller.queue(0).unwrap();
        }
        controller.kick_queued().unwrap();
        // These are there although the sixth is not.
        for round in 0..5 {
            assert_eq!(controller.collect_reply().unwrap(), (turn << 8 | round).to_le_bytes());
        }
        assert_eq!(controller.try_collect(&mut [&mut [0; 8]]), Ok(None));
        gate.store(true, std::sync::atomic::Ordering::Release);
        assert_eq!(controller.collect_reply().unwrap(), (turn << 8 | 5).to_le_bytes());
        gate.store(false, std::sync::atomic::Ordering::Release);
    }
    drop(opens);
    assert_eq!(ask(&mut controller, b"open", 1).unwrap(), b"open");
}
