//! What the tests of this room share.

use std::collections::BTreeMap;
use std::net::{TcpListener, TcpStream};
use std::panic::resume_unwind;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::channel::{Channel, Liveness};
use super::message::{DataPathCode, Endpoint, Hello, LINK_ETHERNET, Proposal, Role};

/// A test that takes longer than this has got stuck.
const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) const LIVENESS: Liveness = Liveness { bound: Duration::from_secs(5) };

/// Runs a test's body and fails if it gets stuck.
pub(crate) fn watchdog(body: impl FnOnce() + Send + 'static) {
    let (done, finished) = channel();
    let thread = thread::spawn(move || {
        body();
        let _ = done.send(());
    });
    match finished.recv_timeout(PATIENCE) {
        Err(RecvTimeoutError::Timeout) => panic!("still running after {PATIENCE:?}"),
        Ok(()) | Err(RecvTimeoutError::Disconnected) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
    }
}

/// A deadline that no test is meant to reach.
pub(crate) fn far() -> Instant {
    Instant::now() + 2 * PATIENCE
}

/// A deadline that a test is meant to reach.
pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_millis(60)
}

/// A hello of the dialling side.
pub(crate) fn hello(session: u32) -> Hello {
    let endpoint = Endpoint { link_layer: LINK_ETHERNET, mtu: 3, queue_pair: 17, ..Endpoint::default() };
    Hello { role: Role::Controller, data_path: DataPathCode::Verbs, session, endpoint, proposal: Proposal::default() }
}

/// A channel, and the bare socket at its other end.
pub(crate) fn channel_and_socket() -> (Channel, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    socket.set_nodelay(true).unwrap();
    let channel = Channel::new(listener.accept().unwrap().0, LIVENESS).unwrap();
    (channel, socket)
}

/// The out-of-band vectors of `docs/wire-protocol.md`, by name.
pub(crate) fn document_vectors() -> BTreeMap<String, Vec<u8>> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/wire-protocol.md");
    let document = std::fs::read_to_string(path).unwrap();
    let block = document.split("```oob-vectors\n").nth(1).expect("a block of vectors").split("```").next().unwrap();
    block
        .lines()
        .map(|line| {
            let (name, hex) = line.split_once(':').expect("a name and a colon");
            let digits: Vec<u8> = hex.chars().filter_map(|c| c.to_digit(16)).map(|digit| digit as u8).collect();
            (name.to_owned(), digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect())
        })
        .collect()
}

/// Whether this machine has an IPv6 loopback; without it the tests of IPv6 have nothing to say.
pub(crate) fn has_ipv6() -> bool {
    TcpListener::bind("[::1]:0").is_ok()
}
