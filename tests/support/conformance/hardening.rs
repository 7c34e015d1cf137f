//! What an attacker's eye has found once: each of these went wrong before.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use catalyst_transport::{
    ChannelDesc, ConnectInfo, ControllerSession, CoprocessorSession, Echo, FunctionError, FunctionFailure, Invert,
    MemKind, Request, TransportError, TransportSession, WorkerRings, thread_launcher,
};

use super::{Setup, ask, echo, open, running};

/// For tests of something else than timeouts: a busy machine may keep any thread waiting for seconds.
pub(super) fn patient(setup: Setup) -> Setup {
    setup.both(|config| config.reply_timeout(Duration::from_secs(30)).stop_timeout(Duration::from_secs(30)))
}

/// A function that echoes, but holds back the requests for decoder 1 for as long as the gate is shut.
pub(super) fn gated(
    gate: &Arc<AtomicBool>,
) -> impl FnMut(Request<'_>, &mut [u8]) -> Result<usize, FunctionError> + Send + use<> {
    let gate = gate.clone();
    move |request, reply| {
        while request.decoder_id == 1 && !gate.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
        reply[..request.payload.len()].copy_from_slice(request.payload);
        Ok(request.payload.len())
    }
}

/// Opens the gate however the test ends, so that no engine stays behind it.
pub(super) struct Opens(pub(super) Arc<AtomicBool>);

impl Drop for Opens {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// With a window full of given-up rounds there is nothing to collect; the peer's end is told all the same.
pub(crate) fn a_full_window_tells_the_peers_end(setup: Setup) {
    // With all rounds given up, and with one that could still be collected.
    for (kicking, given_up) in [(false, 2), (true, 2), (false, 1), (true, 1)] {
        let setup = setup.clone().channel(2, 8, 8).both(|config| config.reply_timeout(Duration::from_millis(20)));
        let (mut controller, mut coprocessor) = open(&setup, echo);
        controller.start().unwrap();
        for _ in 0..given_up {
            let error = ask(&mut controller, b"too late", 0).unwrap_err();
            assert!(matches!(error, TransportError::Timeout { .. }), "{error}");
        }
        for _ in given_up..2 {
            controller.write_data_slot(b"no reply", 0).unwrap();
            controller.kick(0).unwrap();
        }
        let full = TransportError::WindowFull { in_flight: 2, depth: 2 };
        assert_eq!(controller.write_data_slot(b"too soon", 0), Err(full.clone()));
        coprocessor.close().unwrap();
        let deadline = Instant::now() + Duration::from_secs(30);
        let told = loop {
            let error = match kicking {
                true => controller.kick(0).unwrap_err(),
                false => controller.write_data_slot(b"anybody?", 0).unwrap_err(),
            };
            if error != full {
                break error;
            }
            assert!(Instant::now() < deadline, "the peer's end is not told");
            std::thread::sleep(Duration::from_millis(1));
        };
        assert!(matches!(told, TransportError::PeerClosed { .. }), "{told}");
        // And it is kept.
        assert_eq!(controller.collect(&mut []), Err(told));
    }
}

/// Rounds that were given up take up the window until their replies have come, and no longer: also when nobody collects.
pub(crate) fn a_window_of_given_up_rounds_opens_again(setup: Setup) {
    for depth in [1, 4] {
        for stopping in [false, true] {
            let setup =
                setup.clone().channel(depth, 8, 8).both(|config| config.reply_timeout(Duration::from_millis(100)));
            let gate = Arc::new(AtomicBool::new(false));
            let (mut controller, _coprocessor) = running(&setup, |co| co.set_coprocessor_fn(gated(&gate)).unwrap());
            let opens = Opens(gate.clone());
            for round in 0..depth {
                controller.write_data_slot(&[round as u8; 8], 1).unwrap();
                controller.kick(0).unwrap();
            }
            if stopping {
                controller.stop().unwrap();
                controller.start().unwrap();
            } else {
                for _ in 0..depth {
                    let error = controller.collect(&mut [&mut [0; 8]]).unwrap_err();
                    assert!(matches!(error, TransportError::Timeout { .. }), "{error}");
                }
            }
            assert_eq!(controller.in_flight(), 0);
            let full = Err(TransportError::WindowFull { in_flight: depth, depth });
            assert_eq!(controller.write_data_slot(b"too soon", 0), full);
            assert_eq!(controller.kick(0).map(|_| ()), full);
            assert_eq!(controller.collect(&mut []), Err(TransportError::NothingInFlight));

            drop(opens);
            let deadline = Instant::now() + Duration::from_secs(30);
            while let Err(error) = controller.write_data_slot(b"at last!", 0) {
                assert!(matches!(error, TransportError::WindowFull { .. }), "{error}");
                assert!(Instant::now() < deadline, "depth {depth}, stopping {stopping}: the window stays full");
                std::thread::sleep(Duration::from_millis(1));
            }
            // On a busy machine this round may be given up in its turn.
            let mut lost = 0;
            let reply = loop {
                match ask(&mut controller, b"at last!", 0) {
                    Err(TransportError::Timeout { .. } | TransportError::WindowFull { .. }) => lost += 1,
                    other => break other.unwrap(),
                }
                assert!(Instant::now() < deadline, "depth {depth}, stopping {stopping}: {lost} rounds were lost");
            };
            assert_eq!(reply, b"at last!");
            assert!(controller.late_replies() >= u64::from(depth), "{}", controller.late_replies());
        }
    }
}

/// What `reply` gives is the reply that was collected last, whole, or nothing: never parts of two.
pub(crate) fn a_refused_reply_is_not_shown(setup: Setup) {
    let function = |request: Request<'_>, reply: &mut [u8]| match request.decoder_id {
        0 => {
            reply[..request.payload.len()].copy_from_slice(request.payload);
            Ok::<_, FunctionError>(request.payload.len())
        }
        _ => Err("a long text that is no reply".into()),
    };
    let (mut controller, _coprocessor) = running(&patient(setup), |co| co.set_coprocessor_fn(function).unwrap());
    assert_eq!(controller.reply(), b"");
    for (payload, decoder) in [(&b"first"[..], 0), (b"SECOND!", 0), (b"third", 1), (b"FOURTH", 0)] {
        controller.write_data_slot(payload, decoder).unwrap();
        controller.kick(0).unwrap();
    }
    assert_eq!(controller.collect(&mut [&mut [0; 8]]), Ok(5));
    assert_eq!(controller.reply(), b"first");
    for _ in 0..2 {
        let error = controller.collect(&mut [&mut [0; 2]]).unwrap_err();
        assert_eq!(error, TransportError::ReplyTooLarge { length: 7, capacity: 2 });
        assert_eq!(controller.reply(), b"", "{:?}", String::from_utf8_lossy(controller.reply()));
    }
    assert_eq!(controller.collect(&mut [&mut [0; 8]]), Ok(7));
    assert_eq!(controller.reply(), b"SECOND!");
    assert!(matches!(controller.collect(&mut []), Err(TransportError::FunctionFailed { .. })));
    assert_eq!(controller.reply(), b"", "{:?}", String::from_utf8_lossy(controller.reply()));
    // The same on the way that gives it in place, and with a stop between.
    assert!(matches!(controller.collect(&mut []), Err(TransportError::ReplyTooLarge { .. })));
    assert_eq!(controller.reply(), b"");
    assert_eq!(controller.collect_reply().unwrap(), b"FOURTH");
    controller.write_data_slot(b"fifth", 0).unwrap();
    controller.kick(0).unwrap();
    assert!(matches!(controller.collect(&mut []), Err(TransportError::ReplyTooLarge { .. })));
    controller.stop().unwrap();
    controller.start().unwrap();
    assert_eq!(controller.reply(), b"");
    assert_eq!(ask(&mut controller, b"6", 0).unwrap(), b"6");
}

/// What was written for a round that a stop came before is not sent by the next.
pub(crate) fn a_payload_staged_before_stop_is_not_sent_after_it(setup: Setup) {
    let (mut controller, _coprocessor) = running(&patient(setup).channel(4, 8, 8), echo);
    controller.commit_work_item(1, 0, 8).unwrap();
    for turn in 0..6 {
        controller.write_data_slot(b"OLD", 5).unwrap();
        controller.stop().unwrap();
        controller.start().unwrap();
        if turn % 2 == 0 {
            let error = controller.kick(0).unwrap_err();
            assert!(error.to_string().contains("nothing has been written"), "{error}");
        }
        controller.kick(1).unwrap();
        let reply = controller.collect_reply().unwrap();
        assert_eq!(reply, b"", "{:?}", String::from_utf8_lossy(reply));
        assert_eq!(ask(&mut controller, b"new", 0).unwrap(), b"new");
    }
}

/// Channels that cannot be, also those whose size in bytes no number holds, are errors on the coprocessor as well, in every
/// state.
pub(crate) fn impossible_channels_are_refused(setup: Setup) {
    let setup = patient(setup);
    let impossible = [
        ChannelDesc::new(0, 1, 1),
        ChannelDesc::new(3, 1, 1),
        ChannelDesc::new(u32::MAX, 1, 1),
        ChannelDesc::new(1 << 31, 1, 1),
        ChannelDesc::new(4, 1, usize::MAX),
        ChannelDesc::new(4, usize::MAX, 1),
        ChannelDesc::new(4, 1, usize::MAX / 2),
        ChannelDesc::new(1 << 16, usize::MAX, usize::MAX),
    ];
    let mut coprocessor = CoprocessorSession::new(setup.coprocessor.clone()).unwrap();
    let mut controller = ControllerSession::new(setup.controller.clone()).unwrap();
    coprocessor.set_coprocessor_fn(Echo).unwrap();
    let desc = setup.coprocessor.channel().clone();
    let port = coprocessor.listen(0).unwrap().port();
    let serving = std::thread::spawn(move || {
        coprocessor.connect(&ConnectInfo::new("", port)).unwrap();
        let local = coprocessor.alloc_memory(desc.coprocessor_bytes(), MemKind::CpuRam).unwrap();
        let mut other = CoprocessorSession::new(setup.coprocessor.clone()).unwrap();
        let peer = coprocessor.exchange_keys(&local).unwrap();
        for wrong in &impossible {
            let error = other.establish_channel(wrong, &local, &peer).unwrap_err();
            assert!(matches!(error, TransportError::OutOfOrder { .. }), "{wrong:?}: {error}");
            let error = coprocessor.establish_channel(wrong, &local, &peer).unwrap_err();
            assert!(matches!(error, TransportError::Invalid { .. }), "{wrong:?}: {error}");
        }
        coprocessor.establish_channel(&desc, &local, &peer).unwrap();
        coprocessor.start().unwrap();
        coprocessor
    });
    controller.open(&ConnectInfo::new(setup.host, port)).unwrap();
    controller.start().unwrap();
    let _coprocessor = serving.join().unwrap();
    assert_eq!(ask(&mut controller, b"possible", 0).unwrap(), b"possible");
}

/// A `start` that fails leaves no worker running.
pub(crate) fn a_refused_start_leaves_no_worker(mut setup: Setup) {
    // No machine has the last processor that the kernel can count.
    setup.coprocessor = setup.coprocessor.cpu(1023);
    let launched = Arc::new(AtomicU32::new(0));
    let count = launched.clone();
    let launcher = move |rings: WorkerRings| {
        count.fetch_add(1, Ordering::SeqCst);
        std::thread::spawn(move || {
            while !rings.stopped() {
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        Ok(())
    };
    let (_controller, mut coprocessor) = open(&patient(setup), |co| co.set_coprocessor_launcher(launcher).unwrap());
    for _ in 0..2 {
        let error = coprocessor.start().unwrap_err();
        assert!(matches!(error, TransportError::Invalid { .. }), "{error}");
    }
    coprocessor.close().unwrap();
    assert_eq!(launched.load(Ordering::SeqCst), 0, "a worker was launched and left behind");
}

/// A launcher's panic is an error of that `start` and nothing else.
pub(crate) fn a_launcher_may_panic(setup: Setup) {
    let mut calls = 0;
    let mut working = thread_launcher(Invert);
    let launcher = move |rings: WorkerRings| {
        calls += 1;
        match calls {
            1 => panic!("no accelerator is plugged in"),
            2 => std::panic::panic_any(17_u64),
            3 => Err("it is busy".into()),
            _ => working(rings),
        }
    };
    let (mut controller, mut coprocessor) = open(&patient(setup), |co| co.set_coprocessor_launcher(launcher).unwrap());
    controller.start().unwrap();
    for word in ["it panicked: no accelerator is plugged in", "it panicked: with no text", "it is busy"] {
        let error = coprocessor.start().unwrap_err();
        assert!(matches!(error, TransportError::Engine { .. }), "{error}");
        assert!(error.to_string().contains(word), "{error}");
    }
    coprocessor.start().unwrap();
    assert_eq!(ask(&mut controller, &[0x0F], 0).unwrap(), [0xF0]);
    assert_eq!(coprocessor.status(), Ok(()));
}

/// The flag that ended a worker is down before the next one looks.
pub(crate) fn a_worker_that_is_started_again_is_not_stopped(setup: Setup) {
    let stopped = Arc::new(AtomicU32::new(0));
    let count = stopped.clone();
    let mut working = thread_launcher(Invert);
    let launcher = move |rings: WorkerRings| {
        count.fetch_add(u32::from(rings.stopped()), Ordering::SeqCst);
        working(rings)
    };
    let (mut controller, mut coprocessor) = open(&patient(setup), |co| co.set_coprocessor_launcher(launcher).unwrap());
    controller.start().unwrap();
    for round in 0..10 {
        coprocessor.start().unwrap();
        let reply = loop {
            match ask(&mut controller, &[round], 0) {
                // The word of the last stop may still be on its way.
                Err(TransportError::PeerStopped { .. }) => {}
                other => break other.unwrap(),
            }
        };
        assert_eq!(reply, [!round]);
        coprocessor.stop().unwrap();
        assert_eq!(coprocessor.status(), Ok(()));
    }
    assert_eq!(stopped.load(Ordering::SeqCst), 0);
}

/// An error whose text cannot be had fails its round, and nothing else.
pub(crate) fn the_text_of_an_error_may_panic(setup: Setup) {
    #[derive(Debug)]
    struct Unspeakable;
    impl std::fmt::Display for Unspeakable {
        fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            panic!("words fail it")
        }
    }
    impl std::error::Error for Unspeakable {}
    let function = |request: Request<'_>, _: &mut [u8]| match request.decoder_id {
        0 => Ok(0),
        _ => Err(Box::new(Unspeakable) as FunctionError),
    };
    let (mut controller, coprocessor) = running(&patient(setup), |co| co.set_coprocessor_fn(function).unwrap());
    for _ in 0..3 {
        match ask(&mut controller, b"?", 1) {
            Err(TransportError::FunctionFailed { failure, message, .. }) => {
                assert_eq!(failure, FunctionFailure::Panicked);
                assert_eq!(message, "words fail it");
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(ask(&mut controller, b"?", 0).unwrap(), b"");
    }
    assert_eq!(coprocessor.status(), Ok(()));
}
