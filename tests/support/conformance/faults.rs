//! Functions, workers and peers that misbehave, and what becomes of the session.

use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use catalyst_transport::{
    ConnectInfo, ControllerSession, CoprocessorSession, FunctionError, FunctionFailure, MemKind, Request,
    TransportError, TransportSession, WorkerRings,
};

use super::{Setup, ask, echo, open, reopen, running};

/// What a panic carries that panics itself when it is dropped.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("the payload of a panic panics")
    }
}

/// A panic whose payload panics when it is dropped, or a function that claims more than there is memory: an error of that
/// round, and no more.
pub(crate) fn a_panic_that_panics_fails_its_round_alone(setup: Setup) {
    let function = |request: Request<'_>, reply: &mut [u8]| match request.decoder_id {
        1 => std::panic::panic_any(Bomb),
        2 => Ok::<_, FunctionError>(usize::MAX),
        _ => {
            reply[0] = 7;
            Ok(1)
        }
    };
    let (mut controller, coprocessor) = running(&setup, |co| co.set_coprocessor_fn(function).unwrap());
    for _ in 0..3 {
        for (decoder, expected) in [(1, FunctionFailure::Panicked), (2, FunctionFailure::TooLarge)] {
            match ask(&mut controller, b"?", decoder) {
                Err(TransportError::FunctionFailed { failure, .. }) => assert_eq!(failure, expected),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(ask(&mut controller, b"?", 0).unwrap(), [7]);
    }
    assert_eq!(coprocessor.status(), Ok(()));
}

/// A function that stops, closes or drops its own session is refused, and nothing waits for itself.
pub(crate) fn a_function_may_not_stop_its_own_engine(setup: Setup) {
    for what in ["stop", "close", "drop"] {
        let session: Arc<Mutex<Option<CoprocessorSession>>> = Arc::default();
        let (tell, told) = channel();
        let own = session.clone();
        let function = move |_: Request<'_>, _: &mut [u8]| -> Result<usize, FunctionError> {
            let mut own = own.lock().unwrap();
            let said = match (what, own.as_mut()) {
                ("stop", Some(session)) => session.stop(),
                ("close", Some(session)) => session.close(),
                _ => {
                    drop(own.take());
                    Ok(())
                }
            };
            tell.send(said).unwrap();
            Ok(0)
        };
        let setup = setup.clone().both(|config| config.stop_timeout(Duration::from_secs(30)));
        let (mut controller, coprocessor) = open(&setup, |co| co.set_coprocessor_fn(function).unwrap());
        controller.start().unwrap();
        {
            let mut place = session.lock().unwrap();
            place.insert(coprocessor).start().unwrap();
        }
        controller.write_data_slot(b"end", 0).unwrap();
        controller.kick(0).unwrap();
        let said = told.recv_timeout(Duration::from_secs(20)).expect("the function waits for itself");
        if what != "drop" {
            let error = said.unwrap_err();
            assert!(matches!(error, TransportError::Engine { .. }), "{error}");
            assert!(error.to_string().contains("from inside of the coprocessor function"), "{error}");
            // From outside it works, and the session can be used again.
            let mut coprocessor = session.lock().unwrap().take().unwrap();
            coprocessor.stop().unwrap();
            coprocessor.close().unwrap();
            echo(&mut coprocessor);
            controller.close();
            let mut coprocessor = reopen(&setup, &mut controller, coprocessor);
            coprocessor.start().unwrap();
            controller.start().unwrap();
            assert_eq!(ask(&mut controller, b"again", 0).unwrap(), b"again");
        } else {
            // The peer is told that it has gone.
            let deadline = Instant::now() + Duration::from_secs(20);
            let mut error = controller.collect(&mut [&mut [0; 64]]).err();
            while error.as_ref().is_none_or(TransportError::is_recoverable) {
                assert!(Instant::now() < deadline, "{error:?}");
                let sent = controller.write_data_slot(b"?", 0).and_then(|()| controller.kick(0));
                error = sent.and_then(|_| controller.collect(&mut [&mut [0; 64]])).err();
            }
        }
    }
}

/// A worker that panics lets go of its rings: the engine ends with that reason, and the controller is told.
pub(crate) fn a_worker_that_panics_is_told(setup: Setup) {
    let launcher = |rings: WorkerRings| {
        std::thread::spawn(move || {
            let mut rings = rings;
            let mut payload = vec![0; rings.request_capacity()];
            while !rings.stopped() {
                if rings.take(&mut payload).unwrap().is_some() {
                    panic!("the accelerator has gone");
                }
                std::thread::yield_now();
            }
        });
        Ok(())
    };
    let setup = setup.both(|config| config.reply_timeout(Duration::from_secs(20)));
    let (mut controller, coprocessor) = running(&setup, |co| co.set_coprocessor_launcher(launcher).unwrap());
    let error = ask(&mut controller, b"?", 0).unwrap_err();
    assert!(matches!(error, TransportError::PeerRefused { .. }), "{error}");
    assert!(error.to_string().contains("the worker has ended although it was not stopped"), "{error}");
    let error = coprocessor.status().unwrap_err();
    assert!(matches!(error, TransportError::Engine { .. }), "{error}");
}

/// A peer that says nothing more after any one step of the bring-up is let go at the deadline of the next, and the next
/// peer is served.
pub(crate) fn a_peer_that_falls_silent_after_a_step_is_let_go(setup: Setup) {
    let setup = setup.both(|config| config.handshake_timeout(Duration::from_secs(2)));
    let desc = setup.controller.channel().clone();
    let mut coprocessor = CoprocessorSession::new(setup.coprocessor.clone()).unwrap();
    echo(&mut coprocessor);
    for steps in 1..=3 {
        let port = coprocessor.listen(0).unwrap().port();
        let mut silent = ControllerSession::new(setup.controller.clone()).unwrap();
        let (done, wait) = channel::<()>();
        let (info, desc) = (ConnectInfo::new(setup.host, port), desc.clone());
        let peer = std::thread::spawn(move || {
            silent.connect(&info).unwrap();
            if steps > 1 {
                let local = silent.alloc_memory(desc.controller_bytes(), MemKind::CpuRam).unwrap();
                if steps > 2 {
                    silent.exchange_keys(&local).unwrap();
                }
            }
            // Holds the connection, and says nothing.
            let _ = wait.recv();
        });
        let began = Instant::now();
        let error = coprocessor.open(&ConnectInfo::new("", port)).unwrap_err();
        assert!(matches!(error, TransportError::Timeout { .. }), "{steps} steps: {error}");
        assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
        drop(done);
        peer.join().unwrap();
    }
    let mut controller = ControllerSession::new(setup.controller.clone()).unwrap();
    let mut coprocessor = reopen(&setup, &mut controller, coprocessor);
    coprocessor.start().unwrap();
    controller.start().unwrap();
    assert_eq!(ask(&mut controller, b"served", 0).unwrap(), b"served");
}

/// An engine that is started and stopped a thousand times, with and without a peer that runs.
pub(crate) fn a_thousand_starts_and_stops(setup: Setup) {
    let (mut controller, mut coprocessor) = open(&setup, echo);
    for turn in 0..1000 / setup.slowness {
        coprocessor.start().unwrap();
        if turn % 3 == 0 {
            controller.start().unwrap();
            controller.stop().unwrap();
        }
        coprocessor.stop().unwrap();
        assert_eq!((coprocessor.stop(), coprocessor.status()), (Ok(()), Ok(())));
    }
    coprocessor.start().unwrap();
    controller.start().unwrap();
    let reply = loop {
        match ask(&mut controller, b"still", 0) {
            // The word of the last stop may still be on its way.
            Err(TransportError::PeerStopped { .. }) => {}
            other => break other.unwrap(),
        }
    };
    assert_eq!(reply, b"still");
}

/// A child process that drops its copies of both sessions does nothing to the parent's.
pub(crate) fn a_session_dropped_in_a_child_process_is_the_parents_still(setup: Setup) {
    let (mut controller, coprocessor) = running(&setup, echo);
    for round in 0..3_u8 {
        assert_eq!(ask(&mut controller, &[round], 0).unwrap(), [round]);
        // SAFETY: the child does nothing but drop what it has got, and ends without going through anything else.
        let child = match unsafe { libc::fork() } {
            0 => {
                drop((controller, coprocessor));
                // SAFETY: ends the process.
                unsafe { libc::_exit(23) }
            }
            child => child,
        };
        assert!(child > 0);
        let (mut status, deadline) = (0, Instant::now() + Duration::from_secs(20));
        // SAFETY: a child of this process that nobody else waits for.
        while unsafe { libc::waitpid(child, &mut status, libc::WNOHANG) } == 0 {
            if Instant::now() > deadline {
                // SAFETY: as above: not yet waited for.
                unsafe { libc::kill(child, libc::SIGKILL) };
                panic!("the child does not end");
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 23, "the child ended with {status:#x}");
        // A goodbye of the child's would have come by now.
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(ask(&mut controller, b"still", 0).unwrap(), b"still");
    assert_eq!(coprocessor.status(), Ok(()));
}
