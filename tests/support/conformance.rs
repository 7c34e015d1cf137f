//! One suite for every data path: what a session promises, whatever carries its frames.
//!
//! A test file names a function that gives the two sides' settings and the coprocessor's address, and
//! instantiates the suite with [`conformance!`].

#![allow(dead_code)] // each test file uses a part of it

use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use catalyst_transport::{
    ChannelDesc, ConnectInfo, ControllerSession, CoprocessorSession, Echo, FunctionConvention, FunctionError,
    FunctionFailure, Invert, MemKind, Request, SessionConfig, Steane, TransportError, TransportSession,
    thread_launcher,
};

#[path = "conformance/bursts.rs"]
mod bursts;
#[allow(unused_imports)] // as above
pub(crate) use bursts::*;
#[path = "conformance/faults.rs"]
mod faults;
#[allow(unused_imports)] // as above
pub(crate) use faults::*;
#[path = "conformance/hardening.rs"]
mod hardening;
#[allow(unused_imports)] // as above
pub(crate) use hardening::*;

/// Settings of one data path.
#[derive(Clone)]
pub(crate) struct Setup {
    /// The controller's settings.
    pub(crate) controller: SessionConfig,
    /// The coprocessor's settings.
    pub(crate) coprocessor: SessionConfig,
    /// Where the controller finds the coprocessor.
    pub(crate) host: &'static str,
    /// Emulated devices are slow: counts are divided by this.
    pub(crate) slowness: u32,
}

impl Setup {
    /// The same change to both sides.
    pub(crate) fn both(mut self, change: impl Fn(SessionConfig) -> SessionConfig) -> Self {
        self.controller = change(self.controller);
        self.coprocessor = change(self.coprocessor);
        self
    }

    fn channel(self, depth: u32, request: usize, reply: usize) -> Self {
        self.both(|config| config.depth(depth).request_capacity(request).reply_capacity(reply))
    }
}

/// Runs a test body that must end: a hang is a failure that says so.
pub(crate) fn watchdog(body: impl FnOnce() + Send + 'static) {
    let (done, wait) = channel();
    let thread = std::thread::spawn(move || {
        body();
        let _ = done.send(());
    });
    match wait.recv_timeout(Duration::from_secs(120)) {
        Err(std::sync::mpsc::RecvTimeoutError::Timeout) => panic!("the test has hung"),
        _ => {
            if let Err(panic) = thread.join() {
                std::panic::resume_unwind(panic);
            }
        }
    }
}

/// A coprocessor that has been given its functions, opened in a thread of its own while the controller dials.
pub(crate) fn open(
    setup: &Setup,
    prepare: impl FnOnce(&mut CoprocessorSession),
) -> (ControllerSession, CoprocessorSession) {
    let mut coprocessor = CoprocessorSession::new(setup.coprocessor.clone()).unwrap();
    prepare(&mut coprocessor);
    let mut controller = ControllerSession::new(setup.controller.clone()).unwrap();
    let coprocessor = reopen(setup, &mut controller, coprocessor);
    (controller, coprocessor)
}

pub(crate) fn reopen(
    setup: &Setup,
    controller: &mut ControllerSession,
    mut coprocessor: CoprocessorSession,
) -> CoprocessorSession {
    let port = coprocessor.listen(0).unwrap().port();
    let opening = opening(coprocessor, port);
    controller.open(&ConnectInfo::new(setup.host, port)).unwrap();
    let (coprocessor, result) = opening.join().unwrap();
    result.unwrap();
    coprocessor
}

pub(crate) fn opening(
    mut coprocessor: CoprocessorSession,
    port: u16,
) -> JoinHandle<(CoprocessorSession, catalyst_transport::Result<()>)> {
    std::thread::spawn(move || {
        let result = coprocessor.open(&ConnectInfo::new("", port));
        (coprocessor, result)
    })
}

/// A pair that is running.
pub(crate) fn running(
    setup: &Setup,
    prepare: impl FnOnce(&mut CoprocessorSession),
) -> (ControllerSession, CoprocessorSession) {
    let (mut controller, mut coprocessor) = open(setup, prepare);
    coprocessor.start().unwrap();
    controller.start().unwrap();
    (controller, coprocessor)
}

pub(crate) fn echo(coprocessor: &mut CoprocessorSession) {
    coprocessor.set_coprocessor_fn(Echo).unwrap();
}

fn bytes(length: usize, round: u32) -> Vec<u8> {
    (0..length as u32).map(|i| (i.wrapping_mul(31) ^ (i >> 8) ^ round.wrapping_mul(0x9E37_79B9) >> 16) as u8).collect()
}

pub(crate) fn ask(
    controller: &mut ControllerSession,
    payload: &[u8],
    decoder_id: u32,
) -> catalyst_transport::Result<Vec<u8>> {
    controller.write_data_slot(payload, decoder_id)?;
    controller.kick(0)?;
    controller.collect_reply().map(<[u8]>::to_vec)
}

/// So many rounds have been served: counted a moment after the reply has left.
pub(crate) fn served(coprocessor: &CoprocessorSession, count: u64) {
    let deadline = Instant::now() + Duration::from_secs(5);
    while coprocessor.served() < count && Instant::now() < deadline {
        std::thread::yield_now();
    }
    assert_eq!(coprocessor.served(), count);
}

/// Every size comes back as it went, many times over.
pub(crate) fn payloads_of_every_size(setup: Setup) {
    for (size, rounds) in [
        (0, 500),
        (1, 500),
        (7, 200),
        (48, 200),
        (63, 200),
        (64, 500),
        (1000, 200),
        (4096, 200),
        (65_536, 40),
        (1 << 20, 8),
    ] {
        let (mut controller, coprocessor) = running(&setup.clone().channel(4, size, size), echo);
        let rounds = (rounds / setup.slowness).max(3);
        for round in 0..rounds {
            let payload = bytes(size, round);
            assert_eq!(ask(&mut controller, &payload, 0).unwrap(), payload, "{size} bytes, round {round}");
        }
        served(&coprocessor, u64::from(rounds));
        assert_eq!(controller.late_replies(), 0);
    }
}

/// Requests and replies have capacities of their own.
pub(crate) fn requests_and_replies_differ_in_size(setup: Setup) {
    let reverse = |request: Request<'_>, reply: &mut [u8]| -> Result<usize, FunctionError> {
        let length = request.payload.len().min(reply.len());
        for (to, from) in reply.iter_mut().zip(request.payload.iter().rev()) {
            *to = *from;
        }
        Ok(length)
    };
    for (request, reply) in [(100, 3), (3, 100), (5000, 1), (0, 8)] {
        let (mut controller, _coprocessor) =
            running(&setup.clone().channel(2, request, reply), |co| co.set_coprocessor_fn(reverse).unwrap());
        for round in 0..10 {
            let payload = bytes(request, round);
            let expected: Vec<u8> = payload.iter().rev().take(reply).copied().collect();
            assert_eq!(ask(&mut controller, &payload, 0).unwrap(), expected);
        }
    }
}

/// As many rounds as the ring has slots may be in flight, and not one more; replies come in order.
pub(crate) fn the_window_is_the_ring(setup: Setup) {
    for depth in [1, 2, 4, 64] {
        let (mut controller, mut coprocessor) = open(&setup.clone().channel(depth, 8, 8), echo);
        // The coprocessor has not started: nothing is taken, and the ring fills.
        controller.start().unwrap();
        for turn in 0..3_u64 {
            for round in 0..u64::from(depth) {
                controller.write_data_slot(&(turn << 32 | round).to_le_bytes(), 0).unwrap();
                controller.kick(0).unwrap();
            }
            assert_eq!(controller.in_flight(), depth);
            let full = Err(TransportError::WindowFull { in_flight: depth, depth });
            assert_eq!(controller.write_data_slot(&[9; 8], 0), full);
            assert_eq!(controller.kick(0).map(|_| ()), full);
            if turn == 0 {
                coprocessor.start().unwrap();
            }
            for round in 0..u64::from(depth) {
                let mut reply = [0; 8];
                assert_eq!(controller.collect(&mut [&mut reply]), Ok(8));
                assert_eq!(u64::from_le_bytes(reply), turn << 32 | round);
            }
            assert_eq!(controller.collect(&mut []), Err(TransportError::NothingInFlight));
        }
    }
}

/// A reply is scattered over all buffers; where they are too small it is kept.
pub(crate) fn replies_are_scattered_and_never_cut(setup: Setup) {
    let (mut controller, _coprocessor) = running(&setup.channel(4, 20, 20), echo);
    let payload = bytes(20, 1);
    controller.write_data_slot(&payload, 0).unwrap();
    controller.kick(0).unwrap();
    let mut small = [0xAA; 19];
    for _ in 0..2 {
        let error = controller.collect(&mut [&mut small]).unwrap_err();
        assert_eq!(error, TransportError::ReplyTooLarge { length: 20, capacity: 19 });
        assert_eq!(small, [0xAA; 19]);
    }
    let (mut a, mut b, mut c) = ([0; 7], [0; 9], [0xAA; 9]);
    assert_eq!(controller.collect(&mut [&mut a, &mut b, &mut c]), Ok(20));
    assert_eq!([&a[..], &b, &c[..4]].concat(), payload);
    assert_eq!(c[4..], [0xAA; 5]);
    assert_eq!(controller.reply(), payload);
    // The next round is not disturbed.
    assert_eq!(ask(&mut controller, &payload, 0).unwrap(), payload);
}

/// Each work item has sizes of its own.
pub(crate) fn work_items_have_their_own_sizes(setup: Setup) {
    let (mut controller, _coprocessor) = running(&setup.channel(4, 100, 100), echo);
    controller.commit_work_item(0, 8, 8).unwrap();
    controller.commit_work_item(3, 100, 100).unwrap();
    controller.commit_work_item(4, 0, 0).unwrap();
    for _ in 0..3 {
        controller.write_data_slot(&[1; 8], 0).unwrap();
        controller.kick(0).unwrap();
        controller.write_data_slot(&[2; 100], 0).unwrap();
        controller.kick(3).unwrap();
        controller.kick(4).unwrap();
        for expected in [&[1; 8][..], &[2; 100], &[]] {
            assert_eq!(controller.collect_reply().unwrap(), expected);
        }
    }
    // In place: the slot keeps its contents, and the item says how much of it goes.
    let slot = controller.data_slot().unwrap();
    assert_eq!(slot.len(), 100);
    slot[..10].copy_from_slice(&[7; 10]);
    controller.kick(0).unwrap();
    assert_eq!(controller.collect_reply().unwrap(), [7; 8]);
    let invalid = |result: catalyst_transport::Result<u32>, word: &str| match result {
        Err(TransportError::Invalid { what, problem }) => {
            assert!(format!("{what} {problem}").contains(word), "{what}: {problem}")
        }
        other => panic!("{other:?}"),
    };
    controller.write_data_slot(&[3; 100], 0).unwrap();
    invalid(controller.kick(0), "carries 8 bytes and 100 were written");
    invalid(controller.kick(1), "not been committed");
    controller.kick(3).unwrap();
    assert_eq!(controller.collect_reply().unwrap(), [3; 100]);
    invalid(controller.kick(0), "nothing has been written");
    assert!(matches!(controller.write_data_slot(&[0; 101], 0), Err(TransportError::Invalid { .. })));
    assert!(matches!(controller.commit_work_item(1, 101, 0), Err(TransportError::Invalid { .. })));
    assert!(matches!(controller.commit_work_item(1, 0, 101), Err(TransportError::Invalid { .. })));
    assert_eq!(controller.in_flight(), 0);
}

/// A look does not wait.
pub(crate) fn try_collect_does_not_wait(setup: Setup) {
    let (mut controller, mut coprocessor) = open(&setup, echo);
    controller.start().unwrap();
    assert_eq!(controller.try_collect(&mut []), Err(TransportError::NothingInFlight));
    controller.write_data_slot(b"hello", 0).unwrap();
    controller.kick(0).unwrap();
    let mut reply = [0; 5];
    for _ in 0..100 {
        assert_eq!(controller.try_collect(&mut [&mut reply]), Ok(None));
    }
    coprocessor.start().unwrap();
    let length = loop {
        if let Some(length) = controller.try_collect(&mut [&mut reply]).unwrap() {
            break length;
        }
    };
    assert_eq!(&reply[..length], b"hello");
    assert!(controller.last_rtt_ns() > 0);
}

/// The round-trip time is that of the round.
pub(crate) fn round_trip_times_are_those_of_the_rounds(setup: Setup) {
    let slow = |_: Request<'_>, _: &mut [u8]| -> Result<usize, FunctionError> {
        std::thread::sleep(Duration::from_millis(20));
        Ok(0)
    };
    let (mut controller, coprocessor) = running(&setup, |co| co.set_coprocessor_fn(slow).unwrap());
    assert_eq!((controller.last_rtt_ns(), coprocessor.last_rtt_ns()), (0, 0));
    for _ in 0..5 {
        let began = Instant::now();
        ask(&mut controller, &[], 0).unwrap();
        let around = began.elapsed().as_nanos() as u64;
        let measured = controller.last_rtt_ns();
        assert!((20_000_000..=around + around / 100).contains(&measured), "{measured} of {around}");
    }
}

/// Start after stop works, on either side first, and no old frame is taken for a new one.
pub(crate) fn start_after_stop(setup: Setup) {
    let (mut controller, mut coprocessor) = running(&setup.clone().channel(8, 4, 4), echo);
    for turn in 0..20_u32 {
        for round in 0..turn % 11 {
            let payload = (turn << 16 | round).to_le_bytes();
            assert_eq!(ask(&mut controller, &payload, 0).unwrap(), payload);
        }
        // Some rounds are in flight when the controller stops: they are given up.
        for round in 0..turn % 4 {
            controller.write_data_slot(&(0xDEAD_0000 | round).to_le_bytes(), 0).unwrap();
            controller.kick(0).unwrap();
        }
        match turn % 3 {
            0 => {
                controller.stop().unwrap();
                coprocessor.stop().unwrap();
                coprocessor.start().unwrap();
                controller.start().unwrap();
            }
            1 => {
                coprocessor.stop().unwrap();
                controller.stop().unwrap();
                controller.start().unwrap();
                coprocessor.start().unwrap();
            }
            _ => {
                controller.stop().unwrap();
                controller.stop().unwrap();
                controller.start().unwrap();
            }
        }
        assert_eq!(controller.in_flight(), 0);
        let payload = (0xBEEF_0000 | turn).to_le_bytes();
        // Its goodbye may still be on its way when the coprocessor has started again.
        let reply = loop {
            match ask(&mut controller, &payload, 0) {
                Err(TransportError::PeerStopped { .. }) => {}
                other => break other.unwrap(),
            }
        };
        assert_eq!(reply, payload, "turn {turn}");
    }
    assert!(controller.late_replies() > 0);
}

/// A reply that comes after its round was given up is dropped, and the next round gets its own.
pub(crate) fn late_replies_are_dropped(setup: Setup) {
    let function = |request: Request<'_>, reply: &mut [u8]| {
        if request.decoder_id == 1 {
            std::thread::sleep(Duration::from_millis(300));
        }
        reply[..4].copy_from_slice(request.payload);
        Ok::<_, FunctionError>(4)
    };
    let setup = setup.channel(4, 4, 4).both(|config| config.reply_timeout(Duration::from_millis(100)));
    let (mut controller, _coprocessor) = running(&setup, |co| co.set_coprocessor_fn(function).unwrap());
    let error = ask(&mut controller, b"slow", 1).unwrap_err();
    assert!(matches!(error, TransportError::Timeout { .. }) && error.is_recoverable(), "{error}");
    assert!(error.to_string().contains("round 1 was given up"), "{error}");
    assert_eq!(controller.in_flight(), 0);
    // Its own timeout may come before the slow one is done.
    let reply = loop {
        match ask(&mut controller, b"fast", 0) {
            Err(TransportError::Timeout { .. }) => {}
            other => break other.unwrap(),
        }
    };
    assert_eq!(reply, b"fast");
    assert!(controller.late_replies() >= 1);
}

/// A function that fails, panics or claims too much fails its round with its words, and nothing else.
pub(crate) fn failing_functions_fail_their_rounds_alone(setup: Setup) {
    let function = |request: Request<'_>, reply: &mut [u8]| match request.decoder_id {
        0 => Err("no solution exists".into()),
        1 => panic!("index out of range in the decoder"),
        2 => Ok::<_, FunctionError>(reply.len() + 1),
        _ => Ok(0),
    };
    let (mut controller, coprocessor) = running(&setup, |co| co.set_coprocessor_fn(function).unwrap());
    for _ in 0..3 {
        for (decoder, failure, word) in [
            (0, FunctionFailure::Failed, "no solution exists"),
            (1, FunctionFailure::Panicked, "index out of range"),
            (2, FunctionFailure::TooLarge, "65 bytes"),
        ] {
            match ask(&mut controller, &[1], decoder) {
                Err(error @ TransportError::FunctionFailed { .. }) => {
                    assert!(error.is_recoverable());
                    let text = error.to_string();
                    assert!(text.contains(word) && text.contains(&failure.to_string()), "{text}");
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(ask(&mut controller, &[1], 3).unwrap(), Vec::<u8>::new());
    }
    assert_eq!(coprocessor.status(), Ok(()));
}

/// Each decoder id has its function; an unknown one is an error of its round.
pub(crate) fn decoder_ids_choose_the_function(setup: Setup) {
    let (mut controller, _coprocessor) = running(&setup, |co| {
        co.set_decoder(1, Echo).unwrap();
        co.set_decoder(2, Invert).unwrap();
        co.set_decoder(0xFFFF_FFFF, Steane).unwrap();
    });
    assert_eq!(ask(&mut controller, &[0x0F], 1).unwrap(), [0x0F]);
    assert_eq!(ask(&mut controller, &[0x0F], 2).unwrap(), [0xF0]);
    assert_eq!(ask(&mut controller, &[0, 1, 1], 0xFFFF_FFFF).unwrap(), 5_i64.to_le_bytes());
    let error = ask(&mut controller, &[0], 3).unwrap_err().to_string();
    assert!(error.contains("decoder 3 does not exist"), "{error}");
    assert_eq!(ask(&mut controller, &[0x0F], 1).unwrap(), [0x0F]);
}

/// The launch-once convention: a persistent worker on the rings, over stop and start.
pub(crate) fn a_persistent_worker_answers(setup: Setup) {
    let (mut controller, mut coprocessor) =
        running(&setup.channel(8, 4, 4), |co| co.set_coprocessor_launcher(thread_launcher(Invert)).unwrap());
    assert_eq!(coprocessor.coprocessor_fn_convention(), FunctionConvention::LaunchOnce);
    for turn in 0..5_u32 {
        for round in 0..50_u32 {
            let payload = (turn << 16 | round).to_le_bytes();
            assert_eq!(ask(&mut controller, &payload, 0).unwrap(), (!(turn << 16 | round)).to_le_bytes());
        }
        for round in 0..8_u32 {
            controller.write_data_slot(&round.to_le_bytes(), 0).unwrap();
            controller.kick(0).unwrap();
        }
        for round in 0..8_u32 {
            assert_eq!(controller.collect_reply().unwrap(), (!round).to_le_bytes());
        }
        controller.stop().unwrap();
        coprocessor.stop().unwrap();
        coprocessor.start().unwrap();
        controller.start().unwrap();
    }
    coprocessor.stop().unwrap();
    assert!(matches!(coprocessor.set_coprocessor_fn(Echo), Err(TransportError::Invalid { .. })));
}

/// On the coprocessor `collect` gives the replies that were served, in order.
pub(crate) fn the_coprocessor_collects_what_it_served(setup: Setup) {
    let setup = setup.both(|config| config.reply_timeout(Duration::from_millis(200)));
    let (mut controller, mut coprocessor) = running(&setup, |co| co.set_coprocessor_fn(Invert).unwrap());
    for round in 0..10 {
        ask(&mut controller, &[round], 0).unwrap();
    }
    for round in 0..10_u8 {
        let mut reply = [0; 1];
        if round == 3 {
            let error = coprocessor.collect(&mut []).unwrap_err();
            assert_eq!(error, TransportError::ReplyTooLarge { length: 1, capacity: 0 });
        }
        assert_eq!(coprocessor.collect(&mut [&mut reply]), Ok(1));
        assert_eq!(reply, [!round]);
    }
    assert!(matches!(coprocessor.collect(&mut []), Err(TransportError::Timeout { .. })));
    served(&coprocessor, 10);
}

/// Every call out of order is an error that names it, and changes nothing.
pub(crate) fn calls_out_of_order_change_nothing(setup: Setup) {
    let out_of_order = |result: catalyst_transport::Result<()>, name: &str| match result {
        Err(TransportError::OutOfOrder { call, .. }) => assert_eq!(call, name),
        other => panic!("{name}: {other:?}"),
    };
    let desc = ChannelDesc::default();
    let mut coprocessor = CoprocessorSession::new(setup.coprocessor.clone()).unwrap();
    let mut controller = ControllerSession::new(setup.controller.clone()).unwrap();
    fn early(session: &mut dyn TransportSession, check: &dyn Fn(catalyst_transport::Result<()>, &str)) {
        check(session.alloc_memory(8192, MemKind::CpuRam).map(|_| ()), "alloc_memory");
        check(session.start(), "start");
        check(session.collect(&mut []).map(|_| ()), "collect");
        assert_eq!(session.stop(), Ok(()));
    }
    early(&mut controller, &out_of_order);
    early(&mut coprocessor, &out_of_order);
    out_of_order(controller.kick(0).map(|_| ()), "kick");
    out_of_order(controller.write_data_slot(&[], 0), "write_data_slot");
    out_of_order(controller.commit_work_item(0, 8, 8), "commit_work_item");
    out_of_order(controller.data_slot().map(|_| ()), "data_slot");

    let port = coprocessor.listen(0).unwrap().port();
    let bytes = desc.coprocessor_bytes();
    let serving = std::thread::spawn(move || {
        coprocessor.connect(&ConnectInfo::new("", port)).unwrap();
        let local = coprocessor.alloc_memory(bytes, MemKind::CpuRam).unwrap();
        let peer = coprocessor.exchange_keys(&local).unwrap();
        coprocessor.establish_channel(&ChannelDesc::default(), &local, &peer).unwrap();
        let unset = coprocessor.start();
        coprocessor.set_coprocessor_fn(Echo).unwrap();
        (coprocessor, unset)
    });
    controller.connect(&ConnectInfo::new(setup.host, port)).unwrap();
    out_of_order(controller.connect(&ConnectInfo::new(setup.host, port)), "connect");
    out_of_order(controller.start(), "start");
    assert!(matches!(controller.alloc_memory(16, MemKind::CpuRam), Err(TransportError::Invalid { .. })));
    let local = controller.alloc_memory(desc.controller_bytes(), MemKind::CpuRam).unwrap();
    out_of_order(controller.alloc_memory(8192, MemKind::CpuRam).map(|_| ()), "alloc_memory");
    let mut foreign = local;
    foreign.addr ^= 64;
    assert!(matches!(controller.exchange_keys(&foreign), Err(TransportError::Invalid { .. })));
    let peer = controller.exchange_keys(&local).unwrap();
    out_of_order(controller.exchange_keys(&local).map(|_| ()), "exchange_keys");
    let mut elsewhere = peer;
    elsewhere.size += 1;
    for wrong in [
        controller.establish_channel(&desc, &local, &elsewhere),
        controller.establish_channel(&desc, &foreign, &peer),
        controller.establish_channel(&ChannelDesc { depth: 3, ..desc.clone() }, &local, &peer),
        controller.establish_channel(&ChannelDesc { depth: 4096, ..desc.clone() }, &local, &peer),
        controller.establish_channel(
            &ChannelDesc { data_path: "carrier pigeon".into(), ..desc.clone() },
            &local,
            &peer,
        ),
    ] {
        assert!(matches!(wrong, Err(TransportError::Invalid { .. })), "{wrong:?}");
    }
    controller.establish_channel(&desc, &local, &peer).unwrap();
    out_of_order(controller.establish_channel(&desc, &local, &peer), "establish_channel");
    let (mut coprocessor, unset) = serving.join().unwrap();
    out_of_order(unset, "start");
    controller.commit_work_item(0, 4, 4).unwrap();
    out_of_order(controller.kick(0).map(|_| ()), "kick");
    out_of_order(controller.collect(&mut []).map(|_| ()), "collect");
    coprocessor.start().unwrap();
    controller.start().unwrap();
    out_of_order(controller.start(), "start");
    out_of_order(coprocessor.start(), "start");
    out_of_order(coprocessor.set_coprocessor_fn(Invert), "set_coprocessor_fn");
    assert_eq!(ask(&mut controller, b"four", 0).unwrap(), b"four");
}

/// Two sides that describe different channels are told so, both of them, and can try again.
pub(crate) fn different_channels_are_refused(setup: Setup) {
    type Change = fn(SessionConfig) -> SessionConfig;
    let changes: [(&str, Change); 4] = [
        ("depth is 64 here and 32 there", |config| config.depth(32)),
        ("request capacity is 64 here and 65 there", |config| config.request_capacity(65)),
        ("reply capacity is 64 here and 1 there", |config| config.reply_capacity(1)),
        ("first sequence number is 1 here and 2 there", |config| config.first_sequence(2)),
    ];
    for (text, change) in changes {
        // Regions large enough for either, so that it is the comparison that speaks.
        let mut coprocessor = CoprocessorSession::new(change(setup.coprocessor.clone())).unwrap();
        coprocessor.set_coprocessor_fn(Echo).unwrap();
        let mut controller = ControllerSession::new(setup.controller.clone()).unwrap();
        let port = coprocessor.listen(0).unwrap().port();
        let theirs = change(setup.coprocessor.clone());
        let serving = std::thread::spawn(move || {
            coprocessor.connect(&ConnectInfo::new("", port)).unwrap();
            let local = coprocessor.alloc_memory(1 << 16, MemKind::CpuRam).unwrap();
            let peer = coprocessor.exchange_keys(&local).unwrap();
            let error = coprocessor.establish_channel(theirs.channel(), &local, &peer).unwrap_err();
            (coprocessor, error)
        });
        controller.connect(&ConnectInfo::new(setup.host, port)).unwrap();
        let local = controller.alloc_memory(1 << 16, MemKind::CpuRam).unwrap();
        let peer = controller.exchange_keys(&local).unwrap();
        let error = controller.establish_channel(setup.controller.channel(), &local, &peer).unwrap_err();
        let (mut coprocessor, other) = serving.join().unwrap();
        let (error, other) = (error.to_string(), other.to_string());
        assert!(error.contains(text) || other.contains("there"), "{error} | {other}");
        assert!(error.contains("describe different channels"), "{error}");
        assert!(other.contains("describe different channels"), "{other}");
        // Both can connect again.
        let serving = std::thread::spawn(move || coprocessor.connect(&ConnectInfo::new("", port)));
        controller.connect(&ConnectInfo::new(setup.host, port)).unwrap();
        serving.join().unwrap().unwrap();
    }
}

/// Stopped, closed and lost are told apart, and the next session on the same objects works.
pub(crate) fn the_peers_end_is_told(setup: Setup) {
    let (mut controller, mut coprocessor) = running(&setup, echo);
    assert_eq!(ask(&mut controller, b"before", 0).unwrap(), b"before");
    coprocessor.stop().unwrap();
    let error = ask(&mut controller, b"stopped", 0).expect_err("a stopped coprocessor answered");
    assert!(matches!(error, TransportError::PeerStopped { .. }) && error.is_recoverable(), "{error}");
    coprocessor.start().unwrap();
    let reply = loop {
        match ask(&mut controller, b"again", 0) {
            Err(TransportError::PeerStopped { .. }) => {}
            other => break other.unwrap(),
        }
    };
    assert_eq!(reply, b"again");
    for _ in 0..3 {
        coprocessor.close().unwrap();
        let error = ask(&mut controller, b"closed", 0).unwrap_err();
        assert!(matches!(error, TransportError::PeerClosed { .. }) && !error.is_recoverable(), "{error}");
        // The first error is every later caller's.
        assert_eq!(controller.kick(0).unwrap_err(), error);
        assert_eq!(controller.collect(&mut []).unwrap_err(), error);
        coprocessor = reopen(&setup, &mut controller, coprocessor);
        coprocessor.start().unwrap();
        controller.start().unwrap();
        assert_eq!(ask(&mut controller, b"anew", 0).unwrap(), b"anew");
    }
    controller.close();
    let deadline = Instant::now() + Duration::from_secs(5);
    while coprocessor.status().is_ok() {
        assert!(Instant::now() < deadline, "the goodbye was not noticed");
        std::thread::yield_now();
    }
    assert!(matches!(coprocessor.status(), Err(TransportError::PeerClosed { .. })));
    // What was served is still there to be collected; then comes the end.
    let mut reply = [0; 8];
    assert_eq!(coprocessor.collect(&mut [&mut reply]), Ok(4));
    assert!(matches!(coprocessor.collect(&mut [&mut reply]), Err(TransportError::PeerClosed { .. })));
    coprocessor.stop().unwrap();
    let mut coprocessor = reopen(&setup, &mut controller, coprocessor);
    coprocessor.start().unwrap();
    controller.start().unwrap();
    assert_eq!(ask(&mut controller, b"once more", 0).unwrap(), b"once more");
    // Closed before this side has started: it may connect at once, without a stop or a close of its own.
    controller.close();
    coprocessor.close().unwrap();
    let mut coprocessor = reopen(&setup, &mut controller, coprocessor);
    coprocessor.close().unwrap();
    let deadline = Instant::now() + Duration::from_secs(5);
    let port = coprocessor.listen(0).unwrap().port();
    let opening = opening(coprocessor, port);
    while matches!(controller.open(&ConnectInfo::new(setup.host, port)), Err(TransportError::OutOfOrder { .. })) {
        assert!(Instant::now() < deadline, "the goodbye was not noticed");
        std::thread::yield_now();
    }
    opening.join().unwrap().1.unwrap();
}

/// Sequence numbers wrap without anything to be seen of it.
pub(crate) fn sequence_numbers_wrap(setup: Setup) {
    for (depth, first) in [(1, u32::MAX), (4, u32::MAX - 5), (64, u32::MAX - 63), (4, 0)] {
        let setup = setup.clone().channel(depth, 4, 4).both(|config| config.first_sequence(first));
        let (mut controller, _coprocessor) = running(&setup, echo);
        for turn in 0..4_u32 {
            for round in 0..depth {
                controller.write_data_slot(&(turn << 16 | round).to_le_bytes(), 0).unwrap();
                assert_eq!(controller.kick(0).unwrap(), first.wrapping_add(turn * depth + round));
            }
            for round in 0..depth {
                assert_eq!(controller.collect_reply().unwrap(), (turn << 16 | round).to_le_bytes());
            }
        }
    }
}

/// Stopping an idle coprocessor takes no longer than stopping a busy one: a hundred times, the longest is printed.
pub(crate) fn an_idle_stop_is_short(setup: Setup) {
    let (mut controller, mut coprocessor) = open(&setup, echo);
    let mut longest = Duration::ZERO;
    for _ in 0..100 {
        coprocessor.start().unwrap();
        std::thread::sleep(Duration::from_millis(1));
        let began = Instant::now();
        coprocessor.stop().unwrap();
        longest = longest.max(began.elapsed());
    }
    println!("figure: longest stop of an idle coprocessor in 100: {longest:?} ({})", coprocessor.data_path());
    assert!(longest < setup.coprocessor_stop_bound(), "{longest:?}");
    coprocessor.start().unwrap();
    controller.start().unwrap();
    assert_eq!(ask(&mut controller, b"still there", 0).unwrap(), b"still there");
}

impl Setup {
    /// The documented bound of a stop, which no function holds up.
    fn coprocessor_stop_bound(&self) -> Duration {
        Duration::from_secs(1)
    }
}

/// A stop while the function runs ends in an error after its timeout, and the next one succeeds.
pub(crate) fn a_stop_waits_for_the_function_only_so_long(setup: Setup) {
    let slow = |_: Request<'_>, _: &mut [u8]| -> Result<usize, FunctionError> {
        std::thread::sleep(Duration::from_millis(400));
        Ok(0)
    };
    let setup = setup.both(|config| config.stop_timeout(Duration::from_millis(100)));
    let (mut controller, mut coprocessor) = running(&setup, |co| co.set_coprocessor_fn(slow).unwrap());
    controller.write_data_slot(&[], 0).unwrap();
    controller.kick(0).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    let error = coprocessor.stop().unwrap_err();
    assert!(error.to_string().contains("has not returned within 100ms"), "{error}");
    std::thread::sleep(Duration::from_millis(500));
    coprocessor.stop().unwrap();
    assert_eq!(coprocessor.served(), 1);
    assert_eq!(controller.collect(&mut []), Ok(0));
}

/// Device memory needs a device: a clear error, and the session is as it was.
pub(crate) fn device_memory_is_refused_clearly(setup: Setup) {
    let mut coprocessor = CoprocessorSession::new(setup.coprocessor.clone()).unwrap();
    let mut controller = ControllerSession::new(setup.controller.clone()).unwrap();
    let port = coprocessor.listen(0).unwrap().port();
    let serving = std::thread::spawn(move || {
        coprocessor.connect(&ConnectInfo::new("", port)).unwrap();
        coprocessor
    });
    controller.connect(&ConnectInfo::new(setup.host, port)).unwrap();
    for kind in [MemKind::GpuHbm, MemKind::Ddr, MemKind::Other] {
        let error = controller.alloc_memory(1 << 16, kind).unwrap_err();
        assert!(matches!(error, TransportError::Unsupported { .. } | TransportError::Invalid { .. }), "{error}");
    }
    controller.alloc_memory(1 << 16, MemKind::CpuRam).unwrap();
    drop(serving.join().unwrap());
}

/// A tenth of a million rounds, or fewer where rounds are slow.
pub(crate) fn many_rounds(setup: Setup) {
    let (mut controller, coprocessor) = running(&setup.clone().channel(16, 16, 16), echo);
    let count = 100_000 / u64::from(setup.slowness);
    let (mut kicked, mut collected) = (0_u64, 0_u64);
    while collected < count {
        while kicked < count && controller.in_flight() < 16 {
            controller.write_data_slot(&(u128::from(kicked) * 0x0123_4567_89AB_CDEF_0123).to_le_bytes(), 0).unwrap();
            controller.kick(0).unwrap();
            kicked += 1;
        }
        let reply = controller.collect_reply().unwrap();
        assert_eq!(reply, (u128::from(collected) * 0x0123_4567_89AB_CDEF_0123).to_le_bytes());
        collected += 1;
    }
    served(&coprocessor, count);
}

/// The error with which a controller's `connect` ends while a coprocessor listens.
#[allow(dead_code)]
pub(crate) fn refused(setup: Setup) -> TransportError {
    let mut coprocessor = CoprocessorSession::new(SessionConfig::new()).unwrap();
    let port = coprocessor.listen(0).unwrap().port();
    let mut controller = ControllerSession::new(setup.controller).unwrap();
    controller.connect(&ConnectInfo::new(setup.host, port)).unwrap_err()
}

/// Instantiates the suite for the settings that an expression gives.
#[macro_export]
macro_rules! conformance {
    ($setup:expr) => {
        $crate::conformance!($setup;
            payloads_of_every_size, requests_and_replies_differ_in_size, the_window_is_the_ring,
            replies_are_scattered_and_never_cut, work_items_have_their_own_sizes, try_collect_does_not_wait,
            round_trip_times_are_those_of_the_rounds, start_after_stop, late_replies_are_dropped,
            failing_functions_fail_their_rounds_alone, decoder_ids_choose_the_function, a_persistent_worker_answers,
            the_coprocessor_collects_what_it_served, calls_out_of_order_change_nothing, different_channels_are_refused,
            the_peers_end_is_told, sequence_numbers_wrap, an_idle_stop_is_short,
            a_stop_waits_for_the_function_only_so_long, device_memory_is_refused_clearly, many_rounds,
            a_full_window_tells_the_peers_end, a_window_of_given_up_rounds_opens_again, a_refused_reply_is_not_shown,
            a_payload_staged_before_stop_is_not_sent_after_it, impossible_channels_are_refused,
            a_refused_start_leaves_no_worker, a_launcher_may_panic,
            a_worker_that_is_started_again_is_not_stopped, the_text_of_an_error_may_panic,
            a_panic_that_panics_fails_its_round_alone, a_function_may_not_stop_its_own_engine, a_worker_that_panics_is_told,
            a_peer_that_falls_silent_after_a_step_is_let_go, a_thousand_starts_and_stops,
            a_session_dropped_in_a_child_process_is_the_parents_still,
            queued_rounds_are_rounds, a_queue_keeps_to_the_rules_of_a_kick, a_slow_function_holds_no_reply_back
        );
    };
    ($setup:expr; $($name:ident),*) => {
        $(
            #[test]
            fn $name() {
                $crate::conformance::watchdog(|| $crate::conformance::$name($setup));
            }
        )*
    };
}
