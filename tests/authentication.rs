//! A pre-shared key from the outside: sessions with it, without it, with another; what a stranger is sent; what the log says.

#[path = "support/conformance.rs"]
mod conformance;
#[path = "support/processes.rs"]
mod processes;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use catalyst_transport::{
    ConnectInfo, ControllerSession, CoprocessorSession, DataPathKind, PreSharedKey, SessionConfig, TransportError,
    TransportSession,
};
use conformance::{Setup, ask, echo, open, opening, reopen, watchdog};
use processes::{Process, Way};

const SHM: Way = Way { options: &["--data-path", "shm"], coprocessor: &[], controller: &[] };

fn key_file(content: &[u8]) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(content).unwrap();
    file
}

fn key(content: &[u8]) -> PreSharedKey {
    PreSharedKey::from_file(key_file(content).path()).unwrap()
}

fn plain() -> SessionConfig {
    SessionConfig::new().data_path(DataPathKind::SharedMemory).accept_timeout(Some(Duration::from_secs(2)))
}

#[test]
fn sessions_with_one_key_work_and_follow_each_other() {
    watchdog(|| {
        let config = plain().pre_shared_key(key(b"a key of both of the sides\n"));
        let setup = Setup { controller: config.clone(), coprocessor: config, host: "127.0.0.1", slowness: 1 };
        let (mut controller, mut coprocessor) = open(&setup, echo);
        for _ in 0..3 {
            coprocessor.start().unwrap();
            controller.start().unwrap();
            assert_eq!(ask(&mut controller, b"hello", 0).unwrap(), b"hello");
            coprocessor.stop().unwrap();
            controller.close();
            coprocessor.close().unwrap();
            coprocessor = reopen(&setup, &mut controller, coprocessor);
        }
    });
}

#[test]
fn the_two_sides_need_the_same_key() {
    watchdog(|| {
        let one = || plain().pre_shared_key(key(b"0123456789abcdef"));
        let other = || plain().pre_shared_key(key(b"0123456789abcdeF"));
        for (controller, coprocessor, words) in [
            (one(), other(), "pre-shared keys of the two sides differ"),
            (plain(), one(), "the controller has shown none: set the same one there"),
            (one(), plain(), "this coprocessor has none: set the same one here"),
        ] {
            let mut serving = CoprocessorSession::new(coprocessor).unwrap();
            echo(&mut serving);
            let port = serving.listen(0).unwrap().port();
            let serving = opening(serving, port);
            let mut controller = ControllerSession::new(controller).unwrap();
            let error = controller.open(&ConnectInfo::new("127.0.0.1", port)).unwrap_err();
            assert!(matches!(error, TransportError::PeerRefused { .. }), "{error}");
            assert!(error.to_string().contains(words), "{error}");
            let error = serving.join().unwrap().1.unwrap_err();
            assert!(error.to_string().contains(words), "{error}");
        }
    });
}

/// Every byte that a coprocessor sends to a client that has not proved that it has the key: a challenge, a refusal.
#[test]
fn not_one_byte_of_the_rendezvous_or_a_key_goes_out_before_the_proof() {
    watchdog(|| {
        let mut coprocessor = CoprocessorSession::new(plain().pre_shared_key(key(b"0123456789abcdef"))).unwrap();
        echo(&mut coprocessor);
        let port = coprocessor.listen(0).unwrap().port();
        let serving = opening(coprocessor, port);
        let mut client = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let header = |kind: u8, length: u8| [b"CTP1\x01\0", &[kind, 0, length, 0, 0, 0, 0, 0, 0, 0][..]].concat();
        client.write_all(&[header(11, 36), vec![0, 1, 0, 0], vec![7; 32]].concat()).unwrap();
        client.write_all(&[header(12, 32), vec![9; 32]].concat()).unwrap();
        let mut bytes = Vec::new();
        let _ = client.read_to_end(&mut bytes);
        // Its challenge, whose last 32 bytes are random; then words.
        assert_eq!(bytes[..20], [header(11, 36), vec![1, 1, 0, 0]].concat());
        let (refusal, text) = bytes[52..].split_at(16);
        assert_eq!(refusal[..8], *b"CTP1\x01\0\x09\0");
        assert_eq!(u32::from_le_bytes(refusal[8..12].try_into().unwrap()) as usize, text.len());
        let text = std::str::from_utf8(text).unwrap();
        assert!(text.contains("the proof is wrong") && text.is_ascii(), "{text}");
        let error = serving.join().unwrap().1.unwrap_err().to_string();
        assert!(error.contains("the proof is wrong"), "{error}");
    });
}

/// Where log lines go while a test looks at them.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn listening_beyond_loopback_without_a_key_is_said_once() {
    let open = plain().bind("0.0.0.0");
    for (config, times) in [(open.clone(), 1), (open.pre_shared_key(key(b"0123456789abcdef")), 0), (plain(), 0)] {
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone()).with_ansi(false).finish();
        tracing::subscriber::with_default(subscriber, || {
            let mut coprocessor = CoprocessorSession::new(config).unwrap();
            let port = coprocessor.listen(0).unwrap().port();
            coprocessor.listen(port).unwrap();
            coprocessor.listen(0).unwrap();
        });
        let said = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
        assert_eq!(said.matches("without authentication").count(), times, "{said}");
    }
}

#[test]
fn the_programs_take_a_key_from_a_file() {
    let (right, wrong) = (key_file(b"0123456789abcdef\n"), key_file(b"fedcba9876543210\n"));
    let option = |file: &tempfile::NamedTempFile| file.path().to_str().unwrap().to_owned();
    let (right, wrong) = (option(&right), option(&wrong));
    let (coprocessor, port) = SHM.coprocessor(&["--once", "--psk-file", &right]);
    for arguments in [&["-n", "10", "--psk-file", &wrong][..], &["-n", "10"]] {
        let ended = SHM.controller(&port, arguments).end_within(Duration::from_secs(30));
        assert!(!ended.status.success() && ended.stderr.contains("pre-shared key"), "{}", ended.stderr);
    }
    let ended = SHM.controller(&port, &["-n", "100", "--psk-file", &right]).end_within(Duration::from_secs(30));
    assert!(ended.status.success(), "{}", ended.stderr);
    assert!(coprocessor.end_within(Duration::from_secs(5)).status.success());
    let ended = Process::start("controller", &["--psk-file", "/nowhere/psk"]).end_within(Duration::from_secs(5));
    assert!(!ended.status.success() && ended.stderr.contains("/nowhere/psk"), "{}", ended.stderr);
}
