use std::net::TcpListener;
use std::thread;

use super::*;
use crate::oob::catalyst_message::PairEnd;
use crate::oob::channel::Channel;
use crate::oob::listener::{Acceptance, Listener};
use crate::oob::message::Message;
use crate::oob::test_support::{LIVENESS, channel_and_socket, far, has_ipv6, hello, soon, watchdog};
use crate::oob::{connect, connect_catalyst};

fn message(number: u32) -> CatalystMessage {
    let end = |queue_pair| PairEnd { queue_pair, psn: 0, gid: [9; 16] };
    CatalystMessage { forward: end(number), backward: end(number + 1), address: 0x7000, rkey: number, mtu: 3 }
}

/// A channel, and the bare socket at its other end.
fn pair() -> (CatalystChannel, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (stream, peer) = listener.accept().unwrap();
    (CatalystChannel::new(stream, peer, LIVENESS).unwrap(), socket)
}

fn acceptance() -> Acceptance<'static> {
    Acceptance { deadline: Some(far()), step: Duration::from_secs(5), liveness: LIVENESS, key: None, cancel: None }
}

fn error(result: Result<CatalystMessage>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn two_sides_tell_each_other() {
    watchdog(|| {
        for host in ["127.0.0.1", "::1"].into_iter().filter(|host| *host != "::1" || has_ipv6()) {
            let listener = Listener::bind(host, 0).unwrap();
            let port = listener.local_addr().port();
            let dialling = thread::spawn(move || {
                let mut channel = connect_catalyst(host, port, None, far(), LIVENESS).unwrap();
                let theirs = channel.receive(&Patience::until(far()), "test").unwrap();
                channel.send(&message(20), far(), "test").unwrap();
                (channel, theirs)
            });
            let mut channel = listener.accept_any(&acceptance()).unwrap();
            assert!(channel.local_addr().ip().is_loopback());
            channel.send(&message(10), far(), "test").unwrap();
            assert_eq!(channel.receive(&Patience::until(far()), "test"), Ok(message(20)));
            let (other, theirs) = dialling.join().unwrap();
            assert_eq!(theirs, message(10));
            assert_eq!(channel.look("test"), Ok(()));
            drop(other);
            while channel.look("test").is_ok() {}
            let lost = channel.look("test").unwrap_err();
            assert!(matches!(&lost, TransportError::PeerLost { .. }), "{lost}");
            assert!(lost.to_string().contains("the peer closed the connection"), "{lost}");
        }
    });
}

#[test]
fn a_message_may_come_in_pieces() {
    watchdog(|| {
        let (mut channel, mut socket) = pair();
        let bytes = message(7).encode();
        let sending = thread::spawn(move || {
            for piece in bytes.chunks(7) {
                socket.write_all(piece).unwrap();
                thread::sleep(Duration::from_millis(1));
            }
            socket
        });
        assert_eq!(channel.receive(&Patience::until(far()), "test"), Ok(message(7)));
        drop(sending.join().unwrap());
    });
}

#[test]
fn every_wait_ends_and_says_why() {
    watchdog(|| {
        let (mut channel, mut socket) = pair();
        let silent = error(channel.receive(&Patience::until(soon()), "test"));
        assert!(silent.contains("has sent nothing") && silent.contains("wire=native"), "{silent}");
        socket.write_all(&message(7).encode()[..63]).unwrap();
        let partial = error(channel.receive(&Patience::until(soon()), "test"));
        assert!(partial.contains("63 of 64 bytes"), "{partial}");
        drop(socket);
        let ended = error(channel.receive(&Patience::until(far()), "test"));
        assert!(ended.contains("peer lost") && ended.contains("0 of 64"), "{ended}");
    });
}

#[test]
fn a_wait_is_cut_short_by_a_rival_and_ended_by_a_cancellation() {
    watchdog(|| {
        let (mut channel, _socket) = pair();
        let listener = Listener::bind("127.0.0.1", 0).unwrap();
        let _rival = TcpStream::connect(listener.local_addr()).unwrap();
        let (cancel, mut cancelling) = io::pipe().unwrap();
        let began = Instant::now();
        use std::os::fd::AsFd;
        let mut patience = Patience { deadline: far(), rivals: Some(listener.as_fd()), cancel: Some(cancel.as_fd()) };
        let outwaited = channel.receive(&patience, "test").unwrap_err();
        assert!(matches!(outwaited, TransportError::Timeout { .. }), "{outwaited}");
        assert!(began.elapsed() >= RIVAL_PATIENCE);
        patience.rivals = None;
        cancelling.write_all(b"x").unwrap();
        let cancelled = channel.receive(&patience, "test").unwrap_err();
        assert!(matches!(cancelled, TransportError::Engine { .. }), "{cancelled}");
    });
}

#[test]
fn strangers_and_chatter_are_named() {
    watchdog(|| {
        let (mut channel, mut socket) = pair();
        // What cannot become a message is not waited for.
        socket.write_all(b"GET ").unwrap();
        let strange = error(channel.receive(&Patience::until(far()), "test"));
        assert!(strange.contains("forward queue pair"), "{strange}");
        socket.write_all(b"more").unwrap();
        let chatter = loop {
            if let Err(error) = channel.look("test") {
                break error;
            }
        };
        assert!(matches!(&chatter, TransportError::Protocol { problem, .. } if problem.contains("more")), "{chatter}");
    });
}

/// Each of the two wires names the other when it meets it, in either role.
#[test]
fn the_other_wire_is_named() {
    watchdog(|| {
        // A native controller at a Catalyst coprocessor: it says hello first.
        let listener = Listener::bind("127.0.0.1", 0).unwrap();
        let port = listener.local_addr().port();
        let dialling = thread::spawn(move || {
            let mut channel: Channel = connect("127.0.0.1", port, None, far(), LIVENESS).unwrap();
            channel.send(&Message::Hello(hello(7)), far(), "test").unwrap();
            channel.expect_hello(far(), "test").unwrap_err().to_string()
        });
        let mut channel = listener.accept_any(&acceptance()).unwrap();
        channel.send(&message(10), far(), "test").unwrap();
        let seen = error(channel.receive(&Patience::until(far()), "test"));
        assert!(seen.contains("the peer speaks the native wire format"), "{seen}");
        let seen = dialling.join().unwrap();
        assert!(seen.contains("the peer speaks the Catalyst wire format"), "{seen}");

        // A Catalyst controller at a native coprocessor: both wait for the other to begin.
        let how = Acceptance { deadline: Some(Instant::now() + Duration::from_millis(150)), ..acceptance() };
        let how = Acceptance { step: Duration::from_millis(60), ..how };
        let dialling = thread::spawn(move || {
            let mut channel = connect_catalyst("127.0.0.1", port, None, far(), LIVENESS).unwrap();
            error(channel.receive(&Patience::until(far()), "test"))
        });
        let seen = listener.accept_hello(&how, &mut |_| Ok(())).unwrap_err().to_string();
        assert!(seen.contains("wire=catalyst"), "{seen}");
        let seen = dialling.join().unwrap();
        assert!(seen.contains("wire=native"), "{seen}");
    });
}

/// Its message is recognised whole; a part of one, or nearly one, is not.
#[test]
fn the_native_channel_recognises_a_whole_message_only() {
    watchdog(|| {
        let (mut native, mut socket) = channel_and_socket();
        socket.write_all(&message(7).encode()[..40]).unwrap();
        let partial = native.expect_hello(soon(), "test").unwrap_err();
        assert!(matches!(partial, TransportError::Timeout { .. }), "{partial}");
        socket.write_all(&message(7).encode()[40..]).unwrap();
        let whole = native.expect_hello(far(), "test").unwrap_err().to_string();
        assert!(whole.contains("the peer speaks the Catalyst wire format"), "{whole}");
        let (mut native, mut socket) = channel_and_socket();
        socket.write_all(&[[7, 0, 0, 0]; 16].concat()).unwrap();
        let other = native.expect_hello(far(), "test").unwrap_err().to_string();
        assert!(other.contains("CTP1"), "{other}");
    });
}
