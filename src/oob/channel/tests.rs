use std::io::Read;
use std::thread;

use super::super::message::{CheckKind, HEADER, MAX_BODY};
use super::super::test_support::{LIVENESS, channel_and_socket, far, hello, soon, watchdog};
use super::*;

const STAGE: &str = "testing";

/// A channel whose hellos have been exchanged: ours is session 1, the peer's is session 2.
fn greeted() -> (Channel, TcpStream) {
    let (mut channel, mut socket) = channel_and_socket();
    socket.write_all(&Message::Hello(hello(2)).encode(0)).unwrap();
    assert_eq!(channel.expect_hello(far(), STAGE).unwrap(), hello(2));
    channel.send(&Message::Hello(hello(1)), far(), STAGE).unwrap();
    assert_eq!((channel.own_session(), channel.peer_session()), (1, 2));
    let mut theirs = vec![0; Message::Hello(hello(1)).encode(2).len()];
    socket.read_exact(&mut theirs).unwrap();
    assert_eq!(theirs, Message::Hello(hello(1)).encode(2));
    (channel, socket)
}

fn reset(socket: TcpStream) {
    SockRef::from(&socket).set_linger(Some(Duration::ZERO)).unwrap();
}

fn lost(error: TransportError) -> String {
    match error {
        TransportError::PeerLost { stage: STAGE, cause } => cause,
        other => panic!("{other:?}"),
    }
}

fn protocol(error: TransportError) -> String {
    match error {
        TransportError::Protocol { stage: STAGE, problem, .. } => problem,
        other => panic!("{other:?}"),
    }
}

fn timed_out(error: TransportError) -> String {
    match error {
        TransportError::Timeout { stage: STAGE, hint, .. } => hint,
        other => panic!("{other:?}"),
    }
}

#[test]
fn messages_come_in_order_however_they_are_cut_up() {
    watchdog(|| {
        let (mut channel, mut socket) = greeted();
        let keys = Keys { address: 0x1000, size: 64, rkey: 5 };
        let check_kind = CheckKind::Crc32c;
        let geometry = Geometry { depth: 4, request_capacity: 8, reply_capacity: 8, check_kind, first_sequence: 1 };
        let messages = [Message::Ready, Message::Heartbeat, Message::Keys(keys), Message::Channel(geometry)];
        let bytes: Vec<u8> = messages.iter().flat_map(|message| message.encode(1)).collect();
        let slow = thread::spawn(move || {
            for byte in bytes {
                socket.write_all(&[byte]).unwrap();
                thread::sleep(Duration::from_millis(5));
            }
            socket
        });
        assert_eq!(channel.receive(far(), STAGE), Ok(Message::Ready));
        assert_eq!(channel.expect_keys(far(), STAGE), Ok(keys));
        assert_eq!(channel.expect_geometry(far(), STAGE), Ok(geometry));
        slow.join().unwrap();
    });
}

#[test]
fn an_unexpected_message_is_named_and_a_stop_is_a_stop() {
    watchdog(|| {
        let (mut channel, mut socket) = greeted();
        socket.write_all(&Message::Probed.encode(1)).unwrap();
        let problem = protocol(channel.expect_keys(far(), STAGE).unwrap_err());
        assert!(problem.contains("probed") && problem.contains("keys"), "{problem}");
        socket.write_all(&Message::Stopped.encode(1)).unwrap();
        assert_eq!(channel.expect(Kind::Probed, far(), STAGE), Err(TransportError::PeerStopped { stage: STAGE }));
    });
}

#[test]
fn goodbye_refusal_and_loss_are_three_things() {
    watchdog(|| {
        let (mut channel, mut socket) = greeted();
        socket.write_all(&Message::Goodbye.encode(1)).unwrap();
        drop(socket);
        assert_eq!(channel.receive(far(), STAGE), Err(TransportError::PeerClosed { stage: STAGE }));

        for (text, reason) in [("depth differs", "depth differs"), ("", "no reason given")] {
            let (mut channel, mut socket) = greeted();
            socket.write_all(&Message::Error(text.into()).encode(1)).unwrap();
            let refused = TransportError::PeerRefused { stage: STAGE, reason: reason.into() };
            assert_eq!(channel.expect_keys(far(), STAGE), Err(refused));
        }

        let (mut channel, mut socket) = greeted();
        socket.write_all(&Message::Ready.encode(1)[..9]).unwrap();
        drop(socket);
        let cause = lost(channel.receive(far(), STAGE).unwrap_err());
        assert!(cause.contains("without a goodbye after 9 of 16 bytes"), "{cause}");

        let (mut channel, socket) = greeted();
        reset(socket);
        let cause = lost(channel.receive(far(), STAGE).unwrap_err());
        assert!(cause.contains("reset"), "{cause}");
    });
}

/// Closing with unread bytes resets the connection; the goodbye before it counts all the same, also for a sender.
#[test]
fn last_words_outlive_a_reset() {
    watchdog(|| {
        for sending in [false, true] {
            let (mut channel, mut socket) = greeted();
            channel.send(&Message::Ready, far(), STAGE).unwrap();
            socket.write_all(&Message::Started.encode(1)).unwrap();
            socket.write_all(&Message::Goodbye.encode(1)).unwrap();
            socket.peek(&mut [0]).unwrap();
            drop(socket);
            let mut outcome = Ok(());
            while sending && outcome.is_ok() {
                outcome = channel.send(&Message::Heartbeat, far(), STAGE);
            }
            if !sending {
                assert_eq!(channel.receive(far(), STAGE), Ok(Message::Started));
                outcome = channel.receive(far(), STAGE).map(drop);
            }
            assert_eq!(outcome, Err(TransportError::PeerClosed { stage: STAGE }), "sending: {sending}");
            // Whoever asks later hears the same.
            assert_eq!(channel.try_receive(STAGE), Err(TransportError::PeerClosed { stage: STAGE }));
        }
    });
}

#[test]
fn a_sender_notices_a_reset() {
    watchdog(|| {
        let (mut channel, socket) = greeted();
        reset(socket);
        let error = (0..).find_map(|_| channel.send(&Message::Heartbeat, far(), STAGE).err()).unwrap();
        assert!(lost(error).contains("reset"));
    });
}

#[test]
fn a_wrong_session_number_is_never_accepted() {
    watchdog(|| {
        for (message, session) in [
            (Message::Ready, 2),
            (Message::Ready, 0),
            (Message::Heartbeat, 0xFFFF_FFFF),
            (Message::Goodbye, 3),
            (Message::Error("no".into()), 3),
            (Message::Hello(hello(2)), 0),
        ] {
            let (mut channel, mut socket) = greeted();
            socket.write_all(&message.encode(session)).unwrap();
            let problem = protocol(channel.receive(far(), STAGE).unwrap_err());
            assert!(problem.contains(&format!("{session:#010x}")) && problem.contains("0x00000001"), "{problem}");
        }
        let (mut channel, mut socket) = greeted();
        socket.write_all(&Message::Hello(hello(9)).encode(1)).unwrap();
        assert!(protocol(channel.receive(far(), STAGE).unwrap_err()).contains("second hello"));
    });
}

/// Who gives up before it has our hello cannot know our number; who has once used it does.
#[test]
fn without_our_hello_a_peer_may_only_end_it() {
    watchdog(|| {
        let (mut channel, mut socket) = greeted();
        socket.write_all(&Message::Goodbye.encode(0)).unwrap();
        assert_eq!(channel.receive(far(), STAGE), Err(TransportError::PeerClosed { stage: STAGE }));

        let (mut channel, mut socket) = greeted();
        socket.write_all(&Message::Ready.encode(1)).unwrap();
        assert_eq!(channel.receive(far(), STAGE), Ok(Message::Ready));
        socket.write_all(&Message::Goodbye.encode(0)).unwrap();
        protocol(channel.receive(far(), STAGE).unwrap_err());

        // The dialling side before the listener's hello: its refusal counts, a hello for nobody does not.
        for (message, refused) in [(Message::Error("version".into()), true), (Message::Hello(hello(2)), false)] {
            let (mut channel, mut socket) = channel_and_socket();
            channel.send(&Message::Hello(hello(1)), far(), STAGE).unwrap();
            socket.write_all(&message.encode(0)).unwrap();
            let error = channel.expect_hello(far(), STAGE).unwrap_err();
            assert_eq!(matches!(error, TransportError::PeerRefused { .. }), refused, "{error}");
        }
    });
}

#[test]
fn garbage_and_absurd_lengths_are_protocol_errors() {
    watchdog(|| {
        let mut long = Message::Ready.encode(1);
        long[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
        for (bytes, part) in [(b"GET / HTTP/1.1\r\n\r\n".to_vec(), "GET "), (long, "4294967295")] {
            let (mut channel, mut socket) = greeted();
            socket.write_all(&bytes).unwrap();
            for _ in 0..2 {
                let problem = protocol(channel.receive(far(), STAGE).unwrap_err());
                assert!(problem.contains(part), "{problem}");
            }
        }
    });
}

#[test]
fn the_deadline_holds_and_the_hint_says_what_came() {
    watchdog(|| {
        let (mut channel, mut socket) = channel_and_socket();
        let deadline = soon();
        let hint = timed_out(channel.receive(deadline, STAGE).unwrap_err());
        assert!(Instant::now() >= deadline, "it gave up too early");
        let peer = channel.peer_addr().to_string();
        assert!(hint.contains(&peer) && hint.contains("sent nothing"), "{hint}");

        let bytes = Message::Hello(hello(2)).encode(0);
        socket.write_all(&bytes[..30]).unwrap();
        let hint = timed_out(channel.receive(soon(), STAGE).unwrap_err());
        assert!(hint.contains("30 of 116 bytes"), "{hint}");
        socket.write_all(&bytes[30..]).unwrap();
        channel.expect_hello(far(), STAGE).unwrap();
        let hint = timed_out(channel.receive(soon(), STAGE).unwrap_err());
        assert!(hint.contains("a hello message"), "{hint}");
    });
}

#[test]
fn what_is_here_is_taken_after_the_deadline_too() {
    watchdog(|| {
        let (mut channel, mut socket) = greeted();
        socket.write_all(&[Message::Ready.encode(1), Message::Probed.encode(1)].concat()).unwrap();
        wait(&mut [PollFd::new(&channel, PollFlags::IN)], Some(far())).unwrap();
        let past = Instant::now() - Duration::from_millis(1);
        assert_eq!(channel.receive(past, STAGE), Ok(Message::Ready));
        assert_eq!(channel.receive(past, STAGE), Ok(Message::Probed));
        timed_out(channel.receive(past, STAGE).unwrap_err());
    });
}

#[test]
fn heartbeats_without_end_do_not_move_the_deadline() {
    watchdog(|| {
        let (mut channel, mut socket) = greeted();
        let flood = thread::spawn(move || while socket.write_all(&Message::Heartbeat.encode(1).repeat(100)).is_ok() {});
        timed_out(channel.receive(soon(), STAGE).unwrap_err());
        drop(channel);
        flood.join().unwrap();
    });
}

#[test]
fn try_receive_never_waits() {
    watchdog(|| {
        let (mut channel, mut socket) = greeted();
        assert_eq!(channel.try_receive(STAGE), Ok(None));
        let bytes = [Message::Started.encode(1), Message::Stopped.encode(1), Message::Ready.encode(1)].concat();
        socket.write_all(&bytes[..bytes.len() - 1]).unwrap();
        let before = channel.last_heard();
        wait(&mut [PollFd::new(&channel, PollFlags::IN)], Some(far())).unwrap();
        assert_eq!(channel.try_receive(STAGE), Ok(Some(Message::Started)));
        assert_eq!(channel.try_receive(STAGE), Ok(Some(Message::Stopped)));
        assert_eq!(channel.try_receive(STAGE), Ok(None));
        assert!(channel.last_heard() > before);
        drop(socket);
        let watched = channel.try_clone_stream().unwrap();
        wait(&mut [PollFd::new(&watched, PollFlags::IN)], Some(far())).unwrap();
        let cause = lost((0..).find_map(|_| channel.try_receive(STAGE).err()).unwrap());
        assert!(cause.contains("15 of 16 bytes"), "{cause}");
    });
}

/// A peer that reads nothing fills the buffers between us; when it reads again, nothing is missing or doubled.
#[test]
fn a_full_connection_times_out_and_keeps_step() {
    watchdog(|| {
        let (mut channel, mut socket) = greeted();
        let message = Message::Error("x".repeat(500));
        let mut sent = 0;
        let hint = loop {
            match channel.send(&message, soon(), STAGE) {
                Ok(()) => sent += 1,
                Err(error) => break timed_out(error),
            }
        };
        assert!(hint.contains("takes no more data"), "{hint}");
        let began = !channel.unsent.is_empty();
        channel.refuse("never blocks, even now");
        let reader = thread::spawn(move || {
            let (mut decoder, mut read) = (Decoder::new(), 0);
            loop {
                match decoder.next().expect("the stream is out of step") {
                    Some((2, Message::Error(text))) if text.len() == 500 => read += 1,
                    Some((2, Message::Goodbye)) => return read,
                    Some((2, Message::Error(_))) => {}
                    Some(other) => panic!("{other:?}"),
                    None => assert!(decoder.fill(&mut socket).unwrap() > 0),
                }
            }
        });
        channel.send(&Message::Goodbye, far(), STAGE).unwrap();
        assert_eq!(reader.join().unwrap(), sent + u64::from(began));
    });
}

#[test]
fn closing_says_goodbye_and_waits_no_longer_than_allowed() {
    watchdog(|| {
        for hangs_up in [false, true] {
            let (mut channel, mut socket) = greeted();
            socket.write_all(&Message::Ready.encode(1).repeat(3)).unwrap();
            channel.receive(far(), STAGE).unwrap();
            let reader = thread::spawn(move || {
                let mut bytes = Vec::new();
                socket.read_to_end(&mut bytes).unwrap();
                assert_eq!(bytes, Message::Goodbye.encode(2));
                (!hangs_up).then_some(socket)
            });
            let deadline = if hangs_up { far() } else { soon() };
            channel.close(deadline);
            assert_eq!(Instant::now() < deadline, hangs_up);
            reader.join().unwrap();
        }
    });
}

#[test]
fn a_refusal_reaches_the_peer() {
    watchdog(|| {
        let (mut channel, mut socket) = greeted();
        channel.refuse("depth is 4 here and 8 there");
        drop(channel);
        let mut bytes = Vec::new();
        socket.read_to_end(&mut bytes).unwrap();
        assert_eq!(bytes, Message::Error("depth is 4 here and 8 there".into()).encode(2));
        assert!(bytes.len() < HEADER + MAX_BODY);
    });
}

#[test]
fn a_lost_host_is_noticed_within_the_bound() {
    for seconds in [0, 1, 2, 3, 5, 10, 60, 3600, 1_000_000] {
        let bound = Duration::from_secs(seconds);
        let (interval, probes, user_timeout) = Liveness { bound }.options();
        let bound = bound.clamp(Duration::from_secs(2), Duration::from_secs(24 * 3600));
        assert!(
            interval >= Duration::from_secs(1) && interval <= Duration::from_secs(32767) && (1..=127).contains(&probes)
        );
        // The kernel gives up at the first multiple of the interval at or after the user timeout, but not the first.
        let noticed = (2..).map(|n| interval * n).find(|time| *time >= user_timeout).unwrap();
        assert!(noticed <= bound, "{noticed:?} for {bound:?}");
    }
    watchdog(|| {
        let (channel, _socket) = channel_and_socket();
        let socket = SockRef::from(&channel.stream);
        let (interval, probes, user_timeout) = LIVENESS.options();
        assert!(socket.tcp_nodelay().unwrap() && socket.keepalive().unwrap());
        assert_eq!(socket.tcp_keepalive_time().unwrap(), interval);
        assert_eq!(socket.tcp_keepalive_interval().unwrap(), interval);
        assert_eq!(socket.tcp_keepalive_retries().unwrap(), probes);
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(user_timeout));
    });
}
