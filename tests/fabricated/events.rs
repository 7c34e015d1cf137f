//! Asynchronous events of the device.

use std::time::{Duration, Instant};

use catalyst_transport::fabricated::{Installed, Plan, Verb};
use catalyst_transport::{PortState, TransportError, TransportSession};

use crate::support::{Pair, assert_clean, assert_says, guarded};

/// The events that end a session, with their names.
fn fatal(number: i32) -> Option<&'static str> {
    match number {
        0 => Some("IBV_EVENT_CQ_ERR"),
        1 => Some("IBV_EVENT_QP_FATAL"),
        2 => Some("IBV_EVENT_QP_REQ_ERR"),
        3 => Some("IBV_EVENT_QP_ACCESS_ERR"),
        8 => Some("IBV_EVENT_DEVICE_FATAL"),
        _ => None,
    }
}

fn numbers() -> impl Iterator<Item = i32> {
    (0..=20).chain([99, -1, i32::MAX])
}

fn taken(device: &Installed) {
    let deadline = Instant::now() + Duration::from_secs(3);
    while device.waiting_events() != 0 {
        assert!(Instant::now() < deadline, "the event is not taken");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn every_event_of_the_controllers_device() {
    guarded(|| {
        let names = ["event-ca", "event-cb"];
        let devices = names.map(|name| Plan::new(name).install());
        for number in numbers() {
            let mut pair = Pair::new(names, |config| config);
            pair.run();
            pair.round(b"before");
            devices[0].raise(number);
            taken(&devices[0]);
            match fatal(number) {
                Some(name) => {
                    // Whoever waits is told at once.
                    let error = loop {
                        let sent = pair.controller.write_data_slot(b"x", 0).and_then(|()| pair.controller.kick(0));
                        match sent.and_then(|_| pair.controller.collect(&mut [&mut [0; 8]])) {
                            Ok(_) => {}
                            Err(error) => break error,
                        }
                    };
                    assert_says(&error, &[name, "event-ca"]);
                    assert!(!error.is_recoverable());
                }
                None => (0..20).for_each(|_| pair.round(b"goes on")),
            }
            pair.close();
            devices.iter().for_each(assert_clean);
        }
    });
}

#[test]
fn every_event_of_the_coprocessors_device() {
    guarded(|| {
        let names = ["event-pa", "event-pb"];
        let devices = names.map(|name| Plan::new(name).install());
        for number in numbers() {
            let mut pair = Pair::new(names, |config| config);
            pair.run();
            pair.round(b"before");
            devices[1].raise(number);
            taken(&devices[1]);
            match fatal(number) {
                Some(name) => assert_says(&pair.coprocessor_end(Duration::from_secs(3)), &[name, "event-pb"]),
                None => {
                    (0..20).for_each(|_| pair.round(b"goes on"));
                    assert_eq!(pair.coprocessor.status(), Ok(()));
                }
            }
            pair.close();
            devices.iter().for_each(assert_clean);
        }
    });
}

#[test]
fn a_port_that_comes_back_in_time_is_no_end() {
    guarded(|| {
        let device = Plan::new("flap").install();
        let mut pair = Pair::new(["flap", "flap"], |config| config);
        pair.run();
        for _ in 0..3 {
            pair.round(b"up");
            device.set_port(1, PortState::Down);
            pair.controller.write_data_slot(b"down", 0).unwrap();
            pair.controller.kick(0).unwrap();
            std::thread::sleep(Duration::from_millis(50));
            assert_eq!(pair.controller.try_collect(&mut [&mut [0; 8]]).unwrap(), None);
            device.set_port(1, PortState::Active);
            let mut reply = [0; 8];
            assert_eq!(pair.controller.collect(&mut [&mut reply]).unwrap(), 4);
            assert_eq!(&reply[..4], b"down");
        }
        // And one that does not ends it.
        device.set_port(1, PortState::Down);
        let began = Instant::now();
        let error = pair.failing_round();
        assert!(began.elapsed() < Duration::from_secs(5));
        assert_says(&error, &["IBV_WC_RETRY_EXC_ERR", "port is down"]);
        pair.close();
        device.set_port(1, PortState::Active);
        pair.run();
        pair.round(b"up again");
        pair.close();
        assert_clean(&device);
    });
}

#[test]
fn events_that_wait_do_not_hinder_the_end() {
    guarded(|| {
        let device = Plan::new("storm").install();
        for _ in 0..10 {
            let mut pair = Pair::new(["storm", "storm"], |config| config);
            pair.run();
            for number in [9, 10, 11, 18, 99].into_iter().cycle().take(200) {
                device.raise(number);
            }
            pair.round(b"in the storm");
            pair.close();
            assert_clean(&device);
        }
    });
}

#[test]
fn a_completion_queue_that_overruns_is_noticed() {
    guarded(|| {
        let device = Plan::new("overrun").grant_completions(1).install();
        let mut pair = Pair::new(["overrun", "overrun"], |config| config.depth(4));
        pair.run();
        device.delays(Duration::ZERO, Duration::from_millis(500));
        let began = Instant::now();
        let error = loop {
            let sent = pair.controller.write_data_slot(b"x", 0).and_then(|()| pair.controller.kick(0));
            match sent.and_then(|_| pair.controller.collect(&mut [&mut [0; 8]])) {
                Ok(_) => assert!(began.elapsed() < Duration::from_secs(20)),
                Err(error) => break error,
            }
        };
        let error = match error {
            TransportError::Device { .. } => error,
            _ => pair.coprocessor_end(Duration::from_secs(10)),
        };
        assert_says(&error, &["IBV_EVENT_CQ_ERR", "overrun"]);
        pair.close();
        assert_clean(&device);
    });
}

#[test]
fn a_queue_pair_that_the_device_breaks_ends_the_session() {
    guarded(|| {
        let names = ["break-a", "break-b"];
        let devices = names.map(|name| Plan::new(name).install());
        let mut pair = Pair::new(names, |config| config);
        pair.run();
        pair.round(b"before");
        devices[0].break_pairs();
        devices[0].raise(1);
        let error = pair.failing_round();
        let text = error.to_string();
        assert!(text.contains("IBV_EVENT_QP_FATAL") || text.contains("IBV_WC_WR_FLUSH_ERR"), "{text}");
        pair.close();
        devices.iter().for_each(assert_clean);
    });
}

#[test]
fn an_event_that_cannot_be_read_ends_the_session_and_costs_no_processor() {
    guarded(|| {
        let device = Plan::new("unread").install();
        for errno in [libc::EIO, libc::EBADF, libc::ENODEV] {
            let mut pair = Pair::new(["unread", "unread"], |config| config);
            pair.run();
            pair.round(b"before");
            let calls = device.calls(Verb::GetAsyncEvent);
            device.fail(Verb::GetAsyncEvent, 0, errno);
            device.raise(9);
            let error = pair.coprocessor_end(Duration::from_secs(3));
            assert_says(&error, &["ibv_get_async_event", "unread", &format!("os error {errno}")]);
            std::thread::sleep(Duration::from_millis(100));
            let more = device.calls(Verb::GetAsyncEvent) - calls;
            assert!(more < 20, "{more} attempts");
            pair.close();
            device.heal();
            assert_clean(&device);
        }
        // An interrupted call is made again.
        let mut pair = Pair::new(["unread", "unread"], |config| config);
        pair.run();
        device.fail(Verb::GetAsyncEvent, 1, libc::EINTR);
        device.fail(Verb::GetAsyncEvent, 2, libc::EINTR);
        device.raise(9);
        taken(&device);
        pair.round(b"goes on");
        pair.close();
        assert_clean(&device);
    });
}
