//! The conformance suite over shared memory, both sides in one process.

#[path = "support/conformance.rs"]
mod conformance;

use std::time::Duration;

use catalyst_transport::{
    ConnectInfo, ControllerSession, CoprocessorSession, DataPathKind, Echo, Outcome, SessionConfig, TransportError,
    TransportSession,
};
use conformance::{Setup, watchdog};

fn setup() -> Setup {
    let config = SessionConfig::new().data_path(DataPathKind::SharedMemory);
    Setup { controller: config.clone(), coprocessor: config, host: "127.0.0.1", slowness: 1 }
}

conformance!(setup());

/// The same, with the controller's rounds on a thread of their own.
mod engine_thread {
    use catalyst_transport::EngineMode;

    use super::conformance::Setup;

    fn setup() -> Setup {
        super::setup().both(|config| config.engine_mode(EngineMode::Thread))
    }

    crate::conformance!(setup());
}

/// A time that no clock counts to is no limit.
#[test]
fn a_client_may_be_waited_for_without_end() {
    watchdog(|| {
        for timeout in [Duration::MAX, Duration::from_secs(u64::MAX), Duration::from_secs(u64::MAX / 4)] {
            let mut coprocessor = CoprocessorSession::new(setup().coprocessor.accept_timeout(Some(timeout))).unwrap();
            let canceller = coprocessor.canceller();
            let cancelling = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(100));
                canceller.cancel();
            });
            let error = coprocessor.open(&ConnectInfo::new("", 0)).unwrap_err();
            assert!(matches!(error, TransportError::Engine { .. }), "{error}");
            cancelling.join().unwrap();
        }
    });
}

/// The processor that one session left its thread on does not decide what the next may have.
#[test]
fn the_next_session_may_have_another_processor() {
    watchdog(|| {
        let allowed = rustix::thread::sched_getaffinity(None).unwrap();
        let processors: Vec<_> = (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect();
        let [first, second, ..] = processors[..] else { return println!("skipped: there is one processor") };
        for cpu in [first, second, first] {
            // A pinned engine may have to wait for its processor on a busy machine.
            let setup = setup().both(|config| config.cpu(cpu).stop_timeout(Duration::from_secs(30)));
            let mut coprocessor = CoprocessorSession::new(setup.coprocessor).unwrap();
            coprocessor.set_coprocessor_fn(Echo).unwrap();
            let port = coprocessor.listen(0).unwrap().port();
            let opening =
                std::thread::spawn(move || coprocessor.open(&ConnectInfo::new("", port)).map(|()| coprocessor));
            let mut controller = ControllerSession::new(setup.controller).unwrap();
            controller.open(&ConnectInfo::new("127.0.0.1", port)).unwrap();
            let mut coprocessor = opening.join().unwrap().unwrap();
            coprocessor.start().unwrap();
            controller.start().unwrap();
            assert_eq!(controller.real_time_report().cpu, Outcome::Granted);
            assert_eq!(coprocessor.real_time_report().cpu, Outcome::Granted);
            controller.stop().unwrap();
            coprocessor.close().unwrap();
        }
    });
}

/// What a side has sent before it closes arrives, however soon the close comes.
#[test]
fn what_was_sent_before_a_close_is_collected() {
    conformance::watchdog(|| {
        let setup = setup();
        let (mut controller, mut coprocessor) = conformance::running(&setup, conformance::echo);
        for session in 0..100_u32 {
            for round in 0..4 {
                controller.write_data_slot(&(session << 2 | round).to_le_bytes(), 0).unwrap();
                controller.kick(0).unwrap();
            }
            conformance::served(&coprocessor, 4);
            coprocessor.close().unwrap();
            for round in 0..4 {
                assert_eq!(controller.collect_reply().unwrap(), (session << 2 | round).to_le_bytes());
            }
            controller.close();
            coprocessor = conformance::reopen(&setup, &mut controller, coprocessor);
            coprocessor.start().unwrap();
            controller.start().unwrap();
        }
    });
}
