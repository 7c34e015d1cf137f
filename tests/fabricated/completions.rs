//! Every completion status, in the probe and in a round; the send and completion queues in error.

use std::time::{Duration, Instant};

use catalyst_transport::fabricated::{Plan, Verb};
use catalyst_transport::{TransportError, TransportSession};

use crate::support::{Pair, assert_clean, assert_says, guarded, payload};

/// Names in the order of their numbers, as the verbs interface has them.
const NAMES: [&str; 24] = [
    "IBV_WC_SUCCESS",
    "IBV_WC_LOC_LEN_ERR",
    "IBV_WC_LOC_QP_OP_ERR",
    "IBV_WC_LOC_EEC_OP_ERR",
    "IBV_WC_LOC_PROT_ERR",
    "IBV_WC_WR_FLUSH_ERR",
    "IBV_WC_MW_BIND_ERR",
    "IBV_WC_BAD_RESP_ERR",
    "IBV_WC_LOC_ACCESS_ERR",
    "IBV_WC_REM_INV_REQ_ERR",
    "IBV_WC_REM_ACCESS_ERR",
    "IBV_WC_REM_OP_ERR",
    "IBV_WC_RETRY_EXC_ERR",
    "IBV_WC_RNR_RETRY_EXC_ERR",
    "IBV_WC_LOC_RDD_VIOL_ERR",
    "IBV_WC_REM_INV_RD_REQ_ERR",
    "IBV_WC_REM_ABORT_ERR",
    "IBV_WC_INV_EECN_ERR",
    "IBV_WC_INV_EEC_STATE_ERR",
    "IBV_WC_FATAL_ERR",
    "IBV_WC_RESP_TIMEOUT_ERR",
    "IBV_WC_GENERAL_ERR",
    "IBV_WC_TM_ERR",
    "IBV_WC_TM_RNDV_INCOMPLETE",
];

fn assert_status(error: &TransportError, status: u32, device: &str) {
    let TransportError::Completion(failure) = error else { panic!("status {status}: {error}") };
    assert_eq!((failure.status, failure.name), (status, NAMES[status as usize]));
    assert_eq!(failure.vendor_error, 0xFAB0 | status);
    assert!(!failure.cause.is_empty());
    assert_says(error, &[NAMES[status as usize], &format!("status {status} "), device, "queue pair", "GID"]);
}

#[test]
fn every_status_of_the_probe_is_told_on_both_sides() {
    guarded(|| {
        let names = ["probe-a", "probe-b"];
        let devices = names.map(|name| Plan::new(name).install());
        let mut pair = Pair::new(names, |config| config);
        for (faulty, device) in devices.iter().enumerate() {
            for status in 1..=23 {
                device.complete_with(1, status);
                let began = Instant::now();
                let (controller, coprocessor) = pair.open();
                assert!(began.elapsed() < Duration::from_secs(6));
                let (own, peer) = if faulty == 0 { (controller, coprocessor) } else { (coprocessor, controller) };
                let own = own.unwrap_err();
                assert_status(&own, status, names[faulty]);
                assert_says(&own, &["probe"]);
                let peer = peer.unwrap_err();
                assert!(matches!(peer, TransportError::PeerRefused { .. }), "{peer}");
                assert_says(&peer, &[NAMES[status as usize]]);
                devices.iter().for_each(assert_clean);
            }
        }
        pair.run();
        pair.round(b"afterwards");
        pair.close();
        devices.iter().for_each(assert_clean);
    });
}

#[test]
fn every_status_of_a_request_ends_the_session_by_name() {
    guarded(|| {
        let names = ["request-a", "request-b"];
        let devices = names.map(|name| Plan::new(name).install());
        let mut pair = Pair::new(names, |config| config);
        for status in 1..=23 {
            pair.run();
            pair.round(b"before");
            devices[0].complete_with(1, status);
            let error = pair.failing_round();
            assert_status(&error, status, names[0]);
            assert!(!error.is_recoverable());
            // The first error is every later call's.
            assert_eq!(pair.controller.collect(&mut [&mut [0; 8]]).unwrap_err(), error);
            assert_eq!(pair.controller.kick(0).unwrap_err(), error);
            pair.controller.close();
            let peer = pair.coprocessor_end(Duration::from_secs(3));
            assert!(matches!(peer, TransportError::PeerClosed { .. }), "{peer}");
            pair.close();
            devices.iter().for_each(assert_clean);
        }
    });
}

#[test]
fn every_status_of_a_reply_ends_the_engine_by_name() {
    guarded(|| {
        let names = ["reply-a", "reply-b"];
        let devices = names.map(|name| Plan::new(name).install());
        for status in 1..=23 {
            let mut pair = Pair::new(names, |config| config);
            pair.run();
            pair.round(b"before");
            devices[1].complete_with(1, status);
            let began = Instant::now();
            let at_controller = pair.failing_round();
            assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
            // It is told at once, and by name.
            assert!(matches!(at_controller, TransportError::PeerRefused { .. }), "{at_controller}");
            assert_says(&at_controller, &[NAMES[status as usize], names[1]]);
            let error = pair.coprocessor_end(Duration::from_secs(3));
            assert_status(&error, status, names[1]);
            pair.close();
            devices.iter().for_each(assert_clean);
        }
    });
}

#[test]
fn the_cause_is_reported_and_not_the_flood_behind_it() {
    guarded(|| {
        let device = Plan::new("flood").install();
        for nth in [1, 2, 33, 63, 64] {
            let mut pair = Pair::new(["flood", "flood"], |config| config.reply_timeout(Duration::from_secs(2)));
            // The engine is not started: all writes are the controller's.
            let (controller, coprocessor) = pair.open();
            controller.unwrap();
            coprocessor.unwrap();
            pair.controller.start().unwrap();
            device.complete_with(nth, 11);
            let mut first = None;
            for index in 0..64 {
                let sent =
                    pair.controller.write_data_slot(&payload(index, 30), 0).and_then(|()| pair.controller.kick(0));
                if let Err(error) = sent {
                    first.get_or_insert(error);
                }
            }
            let error = pair.controller.collect(&mut [&mut [0; 64]]).unwrap_err();
            assert_status(&error, 11, "flood");
            assert!(first.is_none_or(|first| first == error));
            pair.close();
            assert_clean(&device);
        }
    });
}

#[test]
fn acknowledgements_that_stay_away_are_noticed_within_the_bound() {
    guarded(|| {
        let device = Plan::new("acks").install();
        let mut pair = Pair::new(["acks", "acks"], |config| {
            config.liveness(Duration::from_millis(700)).reply_timeout(Duration::from_secs(3))
        });
        pair.run();
        pair.round(b"before");
        device.drop_acks_from(1);
        let began = Instant::now();
        // The data arrives, so that rounds go on for a while.
        let error = loop {
            let sent = pair.controller.write_data_slot(b"x", 0).and_then(|()| pair.controller.kick(0));
            match sent.and_then(|_| pair.controller.collect(&mut [&mut [0; 8]])) {
                Ok(_) => assert!(began.elapsed() < Duration::from_secs(10)),
                Err(error) => break error,
            }
        };
        let ended = pair.coprocessor_end(Duration::from_secs(5));
        let told = [error, ended].into_iter().find(|error| matches!(error, TransportError::Completion(_)));
        assert_status(&told.expect("one of the two sides tells"), 12, "acks");
        pair.close();
        assert_clean(&device);
    });
}

#[test]
fn a_failing_poll_ends_the_session() {
    guarded(|| {
        let names = ["poll-a", "poll-b"];
        let devices = names.map(|name| Plan::new(name).install());
        let mut pair = Pair::new(names, |config| config.reply_timeout(Duration::from_millis(300)));
        // In the probe, and in a round on either side.
        devices[0].fail(Verb::PollCq, 1, libc::EIO);
        let (controller, coprocessor) = pair.open();
        assert_says(&controller.unwrap_err(), &["ibv_poll_cq", "poll-a"]);
        assert_says(&coprocessor.unwrap_err(), &["ibv_poll_cq", "poll-a"]);
        pair.run();
        devices[0].fail(Verb::PollCq, 1, libc::EIO);
        let (mut error, began) = (None, Instant::now());
        while error.is_none() && began.elapsed() < Duration::from_secs(10) {
            let sent = pair.controller.write_data_slot(b"x", 0).and_then(|()| pair.controller.kick(0));
            error = sent.and_then(|_| pair.controller.collect(&mut [&mut [0; 8]])).err();
        }
        let error = error.expect("the poll failed");
        assert_says(&error, &["ibv_poll_cq", "poll-a"]);
        assert!(!error.to_string().contains("not permitted") && !error.to_string().contains("os error 18"), "{error}");
        pair.close();
        pair.run();
        devices[1].fail(Verb::PollCq, 1, libc::EIO);
        assert_says(&pair.coprocessor_end(Duration::from_secs(5)), &["ibv_poll_cq", "poll-b"]);
        pair.close();
        devices.iter().for_each(assert_clean);
    });
}

#[test]
fn a_refused_post_ends_the_session_by_name() {
    guarded(|| {
        let names = ["post-a", "post-b"];
        let devices = names.map(|name| Plan::new(name).install());
        for errno in [libc::EINVAL, libc::EIO, libc::EFAULT, libc::ENODEV] {
            let mut pair = Pair::new(names, |config| config.reply_timeout(Duration::from_millis(300)));
            pair.run();
            devices[0].fail(Verb::PostSend, 1, errno);
            assert_says(&pair.failing_round(), &["ibv_post_send", "post-a", &format!("os error {errno}")]);
            pair.close();
            pair.run();
            devices[1].fail(Verb::PostSend, 1, errno);
            pair.failing_round();
            let error = pair.coprocessor_end(Duration::from_secs(3));
            assert_says(&error, &["ibv_post_send", "post-b", &format!("os error {errno}")]);
            pair.close();
            devices.iter().for_each(assert_clean);
        }
    });
}

/// What the likely cause has to speak of, for the statuses that a user of this crate can meet.
#[test]
fn the_cause_fits_the_status_and_the_stage() {
    guarded(|| {
        let device = Plan::new("cause").install();
        let mut pair = Pair::new(["cause", "cause"], |config| config);
        for (status, in_probe, in_round) in [
            (1, "largest message", "largest message"),
            (2, "fault of this library", "fault of this library"),
            (4, "registered region", "registered region"),
            (5, "peer wrote where it may not", "peer wrote where it may not"),
            (9, "path MTU", "does not allow remote writes"),
            (10, "its region is gone", "address or key"),
            (11, "could not complete", "could not complete"),
            (12, "GID", "process or host is gone"),
            (12, "MTU", "network is cut"),
            (12, "4791", "port is down"),
            (13, "no receive", "no receive"),
            (19, "reset it", "reset it"),
            (20, "did not answer", "did not answer"),
            (21, "vendor error", "vendor error"),
        ] {
            device.complete_with(1, status);
            let (controller, coprocessor) = pair.open();
            let own = [controller, coprocessor].into_iter().find_map(|result| match result {
                Err(error @ TransportError::Completion(_)) => Some(error),
                _ => None,
            });
            let own = own.expect("one side tells");
            assert_says(&own, &[NAMES[status as usize], in_probe, "establish_channel: probe", "MTU 1024", "GID"]);
            pair.run();
            pair.round(b"before");
            device.complete_with(1, status);
            assert_says(&pair.failing_round(), &[NAMES[status as usize], in_round, "round", "queue pair"]);
            pair.close();
        }
        assert_clean(&device);
    });
}

#[test]
fn a_status_that_nobody_knows_ends_the_session_with_its_number() {
    guarded(|| {
        let device = Plan::new("unknown").install();
        let mut pair = Pair::new(["unknown", "unknown"], |config| config);
        for status in [24, 99, 0x7FFF_FFFF, u32::MAX] {
            pair.run();
            pair.round(b"before");
            device.complete_with(1, status);
            let error = pair.failing_round();
            assert_says(&error, &[&format!("status {status} an unknown status"), "newer library", "unknown port 1"]);
            pair.close();
        }
        assert_clean(&device);
    });
}

/// Of a completion the opcode is never read.
#[test]
fn an_opcode_that_nobody_knows_does_no_harm() {
    guarded(|| {
        let device = Plan::new("opcode").install();
        for opcode in [0, 2, 128, 0x7777_7777, u32::MAX] {
            device.completion_opcode(Some(opcode));
            let mut pair = Pair::new(["opcode", "opcode"], |config| config);
            pair.run();
            (0..300).for_each(|round| pair.round(&payload(round, 20)));
            pair.close();
            device.completion_opcode(None);
            assert_clean(&device);
        }
    });
}

/// A completion that names a request which is not outstanding frees nothing: it ends the session.
#[test]
fn a_completion_of_no_outstanding_request_ends_the_session() {
    guarded(|| {
        let names = ["number-a", "number-b"];
        let devices = names.map(|name| Plan::new(name).install());
        for faulty in 0..2 {
            // One that has completed, some that were never posted, and the number that marks the end of closing.
            for request in [0, 1_000_000, u64::MAX - 1, u64::MAX] {
                let mut pair = Pair::new(names, |config| config);
                pair.run();
                pair.round(b"before");
                devices[faulty].misnumber_completion(1, request);
                let began = Instant::now();
                // One write in so many is signalled, and its completion is seen by whoever waits next.
                let mut at_controller = None;
                while at_controller.is_none() && pair.coprocessor.status().is_ok() {
                    assert!(began.elapsed() < Duration::from_secs(20), "request {request} is not noticed");
                    let sent = pair.controller.write_data_slot(b"x", 0).and_then(|()| pair.controller.kick(0));
                    at_controller = sent.and_then(|_| pair.controller.collect(&mut [&mut [0; 8]])).err();
                }
                let error = match faulty {
                    0 => at_controller.expect("the controller's device is faulty"),
                    _ => pair.coprocessor_end(Duration::from_secs(5)),
                };
                let said = format!("work request {request}, which is not outstanding");
                assert_says(&error, &[&said, names[faulty], "connect again"]);
                assert!(!error.is_recoverable());
                pair.close();
                devices.iter().for_each(assert_clean);
            }
        }
    });
}
