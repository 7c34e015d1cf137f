//! Every completion status, in the probe and in a round; the send and completion queues in error.

use std::time::{Duration, Instant};

use catalyst_transport::fabricated::{Plan, Verb};
use catalyst_transport::{TransportError, TransportSession};

use crate::support::{Pair, assert_clean, assert_says, guarded, payload};

/// Names in the order of their numbers, as the verbs interface has them.
const NAMES: [&str; 23] = [
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
            for status in 1..=22 {
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
        for status in 1..=22 {
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
        for status in 1..=22 {
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
