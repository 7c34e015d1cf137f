//! What a peer that talks without end may try, and what may not come of it.

use std::io::Write;
use std::net::TcpStream;

use super::*;
use crate::oob::test_support::{channel_and_socket, hello, watchdog};

const SESSION: u32 = 7;
/// So long that nothing but the flood ends a watch, and no sign of life forgives it.
const LIVENESS: Duration = Duration::from_secs(200);
/// How much later than its bound something may end on a machine that is busy.
const LATE: Duration = Duration::from_secs(5);

/// A channel that has said hello, so that the session's messages are taken, and the socket at its other end.
fn established() -> (Channel, TcpStream) {
    let (mut channel, socket) = channel_and_socket();
    channel.send(&Message::Hello(hello(SESSION)), Instant::now() + LATE, "test").unwrap();
    (channel, socket)
}

/// Sends as fast as the other end takes it, until that hangs up.
fn flood(mut socket: TcpStream) -> JoinHandle<()> {
    let many = Message::Started.encode(SESSION).repeat(4096);
    std::thread::spawn(move || while socket.write_all(&many).is_ok() {})
}

fn wait_for(peer: &Peer, phase: Phase) {
    // The test's watchdog ends this.
    while peer.phase() != phase {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_flood_of_messages_is_an_error_of_the_protocol() {
    watchdog(|| {
        let (channel, socket) = established();
        let address = channel.peer_addr().to_string();
        let peer = Arc::new(Peer::new());
        let watcher = Watcher::start(channel, peer.clone(), None, LIVENESS).unwrap();
        let flooding = flood(socket);
        wait_for(&peer, Phase::Lost);
        match peer.obstacle("round") {
            Some(TransportError::Protocol { peer, problem, .. }) => {
                assert_eq!(peer, address);
                assert!(problem.contains("50000 messages between two signs of life"), "{problem}");
            }
            other => panic!("{other:?}"),
        }
        watcher.close();
        flooding.join().unwrap();
    });
}

#[test]
fn a_flood_holds_up_neither_telling_nor_the_close() {
    watchdog(|| {
        for moments in [0, 5, 50, 200] {
            let (channel, socket) = established();
            let flooding = flood(socket);
            let peer = Arc::new(Peer::new());
            let watcher = Watcher::start(channel, peer.clone(), None, LIVENESS).unwrap();
            wait_for_any(&peer);
            std::thread::sleep(Duration::from_millis(moments));
            let began = Instant::now();
            watcher.tell(&Message::Stopped);
            watcher.close();
            assert!(began.elapsed() < SEND_BOUND + CLOSE_BOUND + LATE, "{:?}", began.elapsed());
            flooding.join().unwrap();
        }
    });
}

/// Until something has been heard.
fn wait_for_any(peer: &Peer) {
    while peer.phase() == Phase::Waiting {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn many_starts_and_stops_are_no_flood() {
    watchdog(|| {
        let (channel, mut socket) = established();
        let peer = Arc::new(Peer::new());
        let watcher = Watcher::start(channel, peer.clone(), None, LIVENESS).unwrap();
        let turn = [Message::Started.encode(SESSION), Message::Stopped.encode(SESSION)].concat();
        socket.write_all(&turn.repeat(10_000)).unwrap();
        socket.write_all(&Message::Started.encode(SESSION)).unwrap();
        // All of it has been heard when what comes behind it has.
        socket.write_all(&Message::Goodbye.encode(SESSION)).unwrap();
        wait_for(&peer, Phase::Closed);
        assert!(matches!(peer.obstacle("round"), Some(TransportError::PeerClosed { .. })));
        watcher.close();
    });
}

#[test]
fn the_last_word_counts_even_behind_many() {
    watchdog(|| {
        // More than are taken in one go, and then silence: nothing may be left in the channel's own buffer.
        for count in [1, MOST_HEARD - 1, MOST_HEARD, MOST_HEARD + 1, 3 * MOST_HEARD, 1000] {
            let (channel, mut socket) = established();
            let peer = Arc::new(Peer::new());
            let watcher = Watcher::start(channel, peer.clone(), None, LIVENESS).unwrap();
            let mut words = Message::Started.encode(SESSION).repeat(count as usize);
            words.extend(Message::Stopped.encode(SESSION));
            socket.write_all(&words).unwrap();
            wait_for(&peer, Phase::Stopped);
            watcher.close();
        }
    });
}
