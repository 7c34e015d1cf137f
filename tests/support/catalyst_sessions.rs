//! The Catalyst wire between two sessions of this crate: the part of the conformance suite that 8 bytes can carry, and what
//! is this wire's own.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use catalyst_transport::{
    ConnectInfo, ControllerSession, CoprocessorSession, DataPathKind, Echo, FunctionError, Invert, MemKind, Request,
    SessionConfig, TransportError, TransportSession, Wire, thread_launcher,
};

use crate::conformance::{self, Setup, ask, echo, open, reopen, running, served};

fn number(value: u64) -> [u8; 8] {
    value.to_le_bytes()
}

/// Ten thousand rounds with as many in flight as the ring has slots, and not one more.
pub(crate) fn the_window_has_256_rounds(setup: Setup) {
    let (mut controller, mut coprocessor) = open(&setup, echo);
    controller.start().unwrap();
    for round in 0..256 {
        controller.write_data_slot(&number(round), 0).unwrap();
        controller.kick(0).unwrap();
    }
    let full = Err(TransportError::WindowFull { in_flight: 256, depth: 256 });
    assert_eq!(controller.write_data_slot(&[9; 8], 0), full);
    assert_eq!(controller.kick(0).map(|_| ()), full);
    coprocessor.start().unwrap();
    let (mut kicked, mut collected) = (256, 0);
    while collected < 10_000 {
        assert_eq!(controller.collect_reply().unwrap(), number(collected));
        collected += 1;
        if kicked < 10_000 {
            controller.write_data_slot(&number(kicked), kicked as u32).unwrap();
            controller.kick(0).unwrap();
            kicked += 1;
        }
    }
    served(&coprocessor, 10_000);
    conformance::the_window_is_the_ring(setup);
}

/// Short payloads are filled up with zeros, both ways; longer ones are refused.
pub(crate) fn every_payload_has_eight_bytes(setup: Setup) {
    let two = |request: Request<'_>, reply: &mut [u8]| -> Result<usize, FunctionError> {
        assert_eq!((request.payload.len(), reply.len()), (8, 8));
        reply.fill(0xEE);
        reply[..2].copy_from_slice(&request.payload[..2]);
        Ok(2)
    };
    let (mut controller, _coprocessor) = running(&setup, |co| co.set_coprocessor_fn(two).unwrap());
    assert_eq!(ask(&mut controller, &[7; 3], 1).unwrap(), [7, 7, 0, 0, 0, 0, 0, 0]);
    assert_eq!(ask(&mut controller, &[], 1).unwrap(), [0; 8]);
    assert!(matches!(controller.write_data_slot(&[0; 9], 0), Err(TransportError::Invalid { .. })));
    controller.data_slot().unwrap().copy_from_slice(&[5; 8]);
    controller.kick(0).unwrap();
    assert_eq!(controller.collect_reply().unwrap(), [5, 5, 0, 0, 0, 0, 0, 0]);
}

/// Start after stop works, on either side first, and no old frame is taken for a new one.
pub(crate) fn start_after_stop(setup: Setup) {
    let (mut controller, mut coprocessor) = running(&setup.clone().both(|config| config.depth(8)), echo);
    for turn in 0..12_u64 {
        for round in 0..turn % 11 {
            assert_eq!(ask(&mut controller, &number(turn << 16 | round), 0).unwrap(), number(turn << 16 | round));
        }
        for round in 0..turn % 4 {
            controller.write_data_slot(&number(0xDEAD_0000 | round), 0).unwrap();
            controller.kick(0).unwrap();
        }
        if turn % 3 != 0 {
            coprocessor.stop().unwrap();
        }
        controller.stop().unwrap();
        controller.start().unwrap();
        if turn % 3 != 0 {
            coprocessor.start().unwrap();
        }
        assert_eq!(controller.in_flight(), 0);
        assert_eq!(ask(&mut controller, &number(0xBEEF_0000 | turn), 0).unwrap(), number(0xBEEF_0000 | turn));
    }
    assert!(controller.late_replies() > 0);
}

/// A round that is given up does not disturb the next one.
pub(crate) fn late_replies_are_dropped(setup: Setup) {
    let slow = |request: Request<'_>, reply: &mut [u8]| -> Result<usize, FunctionError> {
        if request.decoder_id == 1 {
            std::thread::sleep(Duration::from_millis(300));
        }
        reply.copy_from_slice(request.payload);
        Ok(8)
    };
    let setup = setup.both(|config| config.reply_timeout(Duration::from_millis(100)));
    let (mut controller, _coprocessor) = running(&setup, |co| co.set_coprocessor_fn(slow).unwrap());
    let error = ask(&mut controller, b"too slow", 1).unwrap_err();
    assert!(matches!(error, TransportError::Timeout { .. }) && error.is_recoverable(), "{error}");
    let reply = loop {
        match ask(&mut controller, b"fast one", 0) {
            Err(TransportError::Timeout { .. }) => {}
            other => break other.unwrap(),
        }
    };
    assert_eq!(reply, b"fast one");
    assert!(controller.late_replies() >= 1);
}

/// Sequence numbers wrap from 2^32 - 1 to 0.
pub(crate) fn sequence_numbers_wrap(setup: Setup) {
    for first in [u32::MAX - 300, u32::MAX - 5, 0] {
        let (mut controller, _coprocessor) = running(&setup.clone().both(|config| config.first_sequence(first)), echo);
        for round in 0..600_u64 {
            controller.write_data_slot(&number(round), 0).unwrap();
            assert_eq!(controller.kick(0).unwrap(), first.wrapping_add(round as u32));
            assert_eq!(controller.collect_reply().unwrap(), number(round));
        }
    }
}

/// The launch-once convention works on these rings too.
pub(crate) fn a_persistent_worker_answers(setup: Setup) {
    let (mut controller, mut coprocessor) =
        running(&setup, |co| co.set_coprocessor_launcher(thread_launcher(Invert)).unwrap());
    for turn in 0..20_u64 {
        for round in 0..256 {
            controller.write_data_slot(&number(turn << 16 | round), 0).unwrap();
            controller.kick(0).unwrap();
        }
        for round in 0..256 {
            match controller.collect_reply() {
                Ok(reply) => assert_eq!(reply, number(!(turn << 16 | round))),
                Err(error) => panic!("{error}; the coprocessor: {:?}", coprocessor.status()),
            }
        }
        coprocessor.stop().unwrap();
        coprocessor.start().unwrap();
    }
}

/// A function that fails ends the session on both sides: here with its words, there with the end of the connection.
pub(crate) fn a_failing_function_ends_the_session(setup: Setup) {
    let failing = |request: Request<'_>, _: &mut [u8]| match request.decoder_id {
        1 => Err("no solution exists for this syndrome".into()),
        2 => panic!("index out of range in the decoder"),
        _ => Ok::<_, FunctionError>(8),
    };
    for (decoder, words) in [(1, "no solution exists for this syndrome"), (2, "index out of range in the decoder")] {
        let (mut controller, coprocessor) = running(&setup, |co| co.set_coprocessor_fn(failing).unwrap());
        ask(&mut controller, &[1; 8], 0).unwrap();
        let began = Instant::now();
        let error = ask(&mut controller, &[1; 8], decoder).unwrap_err();
        assert!(matches!(error, TransportError::PeerLost { .. }) && !error.is_recoverable(), "{error}");
        assert!(error.to_string().contains("the peer closed the connection"), "{error}");
        println!("the controller was told after {:?}", began.elapsed());
        let error = coprocessor.status().unwrap_err();
        assert!(matches!(error, TransportError::Engine { .. }) && error.to_string().contains(words), "{error}");
        assert_eq!(coprocessor.served(), 1);
    }
}

/// A close is the end of the connection; the next session on the same objects works, with fresh memory.
pub(crate) fn sessions_follow_each_other(setup: Setup) {
    let (mut controller, mut coprocessor) = running(&setup, echo);
    for turn in 0..4_u64 {
        for round in 0..300 {
            assert_eq!(ask(&mut controller, &number(turn << 32 | round), 0).unwrap(), number(turn << 32 | round));
        }
        if turn % 2 == 0 {
            coprocessor.close().unwrap();
            let error = ask(&mut controller, &[0; 8], 0).unwrap_err();
            assert!(matches!(error, TransportError::PeerLost { .. }), "{error}");
        } else {
            controller.close();
            let deadline = Instant::now() + Duration::from_secs(5);
            while coprocessor.status().is_ok() {
                assert!(Instant::now() < deadline, "the end was not noticed");
                std::thread::yield_now();
            }
            let error = coprocessor.status().unwrap_err();
            assert!(matches!(error, TransportError::PeerLost { .. }), "{error}");
            coprocessor.stop().unwrap();
        }
        coprocessor = reopen(&setup, &mut controller, coprocessor);
        coprocessor.start().unwrap();
        controller.start().unwrap();
        assert_eq!(ask(&mut controller, &number(turn), 0).unwrap(), number(turn));
    }
}

/// Clients that say nothing, or nonsense, delay the controller behind them by a second each at most.
pub(crate) fn silent_clients_delay_but_do_not_block(setup: Setup) {
    let mut coprocessor = CoprocessorSession::new(setup.coprocessor.clone()).unwrap();
    coprocessor.set_coprocessor_fn(Echo).unwrap();
    let port = coprocessor.listen(0).unwrap().port();
    let strangers: Vec<TcpStream> = (0..6).map(|_| TcpStream::connect((setup.host, port)).unwrap()).collect();
    for (index, mut stranger) in strangers.iter().enumerate() {
        use std::io::Write;
        match index % 3 {
            0 => {}
            1 => stranger.write_all(&[0x55; 64]).unwrap(),
            _ => stranger.shutdown(std::net::Shutdown::Write).unwrap(),
        }
    }
    let began = Instant::now();
    let opening = conformance::opening(coprocessor, port);
    let mut controller = ControllerSession::new(setup.controller.clone()).unwrap();
    controller.open(&ConnectInfo::new(setup.host, port)).unwrap();
    let (mut coprocessor, result) = opening.join().unwrap();
    result.unwrap();
    println!("served after {:?}", began.elapsed());
    coprocessor.start().unwrap();
    controller.start().unwrap();
    assert_eq!(ask(&mut controller, &[3; 8], 0).unwrap(), [3; 8]);
}

/// A wait for a client, and for its message, is ended by its deadline and by a cancellation.
pub(crate) fn waits_end(setup: Setup) {
    let short = Duration::from_millis(200);
    let config = setup.coprocessor.clone().accept_timeout(Some(short)).handshake_timeout(short);
    let mut coprocessor = CoprocessorSession::new(config).unwrap();
    let port = coprocessor.listen(0).unwrap().port();
    let timed_out = coprocessor.open(&ConnectInfo::new("", port)).unwrap_err();
    assert!(timed_out.to_string().contains("nobody connected"), "{timed_out}");
    let _silent = TcpStream::connect((setup.host, port)).unwrap();
    let timed_out = coprocessor.open(&ConnectInfo::new("", port)).unwrap_err();
    assert!(timed_out.to_string().contains("has sent nothing"), "{timed_out}");
    coprocessor.canceller().cancel();
    let cancelled = coprocessor.open(&ConnectInfo::new("", port)).unwrap_err();
    assert!(matches!(cancelled, TransportError::Engine { .. }), "{cancelled}");
    // While it waits for the message.
    let _silent = TcpStream::connect((setup.host, port)).unwrap();
    coprocessor.connect(&ConnectInfo::new("", port)).unwrap();
    let small = coprocessor.alloc_memory(8192, MemKind::CpuRam).unwrap();
    assert!(matches!(coprocessor.exchange_keys(&small), Err(TransportError::Invalid { .. })));
    coprocessor.close().unwrap();
    let _silent = TcpStream::connect((setup.host, port)).unwrap();
    coprocessor.connect(&ConnectInfo::new("", port)).unwrap();
    let local = coprocessor.alloc_memory(16_384, MemKind::CpuRam).unwrap();
    coprocessor.canceller().cancel();
    let cancelled = coprocessor.exchange_keys(&local).unwrap_err();
    assert!(matches!(cancelled, TransportError::Engine { .. }), "{cancelled}");
}

/// Each of the two wires names the other, in either role, within the deadline.
pub(crate) fn the_other_wire_is_named(setup: Setup) {
    let native = |config: &SessionConfig| {
        config.clone().wire(Wire::Native).depth(16).request_capacity(8).handshake_timeout(Duration::from_secs(2))
    };
    let catalyst = |config: &SessionConfig| config.clone().handshake_timeout(Duration::from_secs(2));
    // A native controller at a Catalyst coprocessor.
    let mut coprocessor = CoprocessorSession::new(catalyst(&setup.coprocessor)).unwrap();
    let port = coprocessor.listen(0).unwrap().port();
    let opening = conformance::opening(coprocessor, port);
    let mut controller = ControllerSession::new(native(&setup.controller)).unwrap();
    let there = controller.open(&ConnectInfo::new(setup.host, port)).unwrap_err().to_string();
    assert!(there.contains("the peer speaks the Catalyst wire format"), "{there}");
    let (_, here) = opening.join().unwrap();
    let here = here.unwrap_err().to_string();
    assert!(here.contains("the peer speaks the native wire format"), "{here}");
    // A Catalyst controller at a native coprocessor.
    let config = native(&setup.coprocessor).accept_timeout(Some(Duration::from_secs(3)));
    let mut coprocessor = CoprocessorSession::new(config).unwrap();
    let port = coprocessor.listen(0).unwrap().port();
    let opening = conformance::opening(coprocessor, port);
    let mut controller = ControllerSession::new(catalyst(&setup.controller)).unwrap();
    let there = controller.open(&ConnectInfo::new(setup.host, port)).unwrap_err().to_string();
    assert!(there.contains("wire=native"), "{there}");
    let (_, here) = opening.join().unwrap();
    let here = here.unwrap_err().to_string();
    assert!(here.contains("wire=catalyst"), "{here}");
    println!("{there}\n{here}");
    // Shared memory does not carry it.
    let shared = SessionConfig::new().wire(Wire::Catalyst).data_path(DataPathKind::SharedMemory);
    let refused = ControllerSession::new(shared).unwrap_err().to_string();
    assert!(refused.contains("verbs alone"), "{refused}");
}
