use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::thread;

use super::super::dial::connect;
use super::super::message::{DataPathCode, HEADER, Keys, Role};
use super::super::test_support::{LIVENESS, far, has_ipv6, hello, soon, watchdog};
use super::*;

const STEP: Duration = Duration::from_secs(20);

fn listener() -> Listener {
    Listener::bind("127.0.0.1", 0).unwrap()
}

fn until(deadline: Instant) -> Acceptance<'static> {
    Acceptance { deadline: Some(deadline), step: STEP, liveness: LIVENESS, key: None, cancel: None }
}

fn anyone(_: &Hello) -> Result<(), String> {
    Ok(())
}

fn dial(listener: &Listener) -> TcpStream {
    TcpStream::connect(listener.local_addr()).unwrap()
}

fn dial_with(listener: &Listener, bytes: &[u8]) -> TcpStream {
    let mut stream = dial(listener);
    stream.write_all(bytes).unwrap();
    stream
}

fn greeting(session: u32) -> Vec<u8> {
    Message::Hello(hello(session)).encode(0)
}

/// A deadline that a test is meant to reach, after what it has prepared is dealt with even on a busy machine.
fn later() -> Instant {
    Instant::now() + Duration::from_millis(500)
}

/// The one message that a client was sent before it was dropped.
fn answer(mut stream: TcpStream) -> (u32, Message) {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    let mut decoder = Decoder::new();
    decoder.fill(&mut &bytes[..]).unwrap();
    decoder.next().unwrap().expect("an answer")
}

/// After the clients so far, a good one is still served.
fn serves_a_good_client(listener: &Listener) {
    let good = dial_with(listener, &greeting(77));
    let (channel, hello) = listener.accept_hello(&until(far()), &mut anyone).unwrap();
    assert_eq!((hello.session, channel.peer_session()), (77, 77));
    assert_eq!(channel.peer_addr(), good.local_addr().unwrap());
}

#[test]
fn both_sides_of_the_room_meet() {
    watchdog(|| {
        for host in ["127.0.0.1", "[::1]", "localhost"] {
            if host.contains(':') && !has_ipv6() {
                continue;
            }
            let listener = Listener::bind(host, 0).unwrap();
            let port = listener.local_addr().port();
            let dialling = thread::spawn(move || {
                let mut channel = connect(host, port, None, far(), LIVENESS).unwrap();
                channel.send(&Message::Hello(hello(5)), far(), "hello").unwrap();
                let theirs = channel.expect_hello(far(), "hello").unwrap();
                channel.send(&Message::Ready, far(), "ready").unwrap();
                channel.close(far());
                theirs
            });
            let (mut channel, theirs) = listener.accept_hello(&until(far()), &mut anyone).unwrap();
            assert_eq!(theirs, hello(5));
            channel.send(&Message::Hello(hello(6)), far(), "hello").unwrap();
            assert_eq!(channel.receive(far(), "ready"), Ok(Message::Ready));
            assert_eq!(channel.receive(far(), "bye"), Err(TransportError::PeerClosed { stage: "bye" }));
            drop(channel);
            assert_eq!(dialling.join().unwrap(), hello(6));
        }
    });
}

#[test]
fn what_follows_a_hello_is_kept() {
    watchdog(|| {
        let listener = listener();
        let keys = Message::Keys(Keys { address: 1, size: 2, rkey: 3 });
        let _client = dial_with(&listener, &[greeting(5), keys.encode(6)].concat());
        let (mut channel, _) = listener.accept_hello(&until(far()), &mut anyone).unwrap();
        channel.send(&Message::Hello(hello(6)), far(), "hello").unwrap();
        assert_eq!(channel.receive(far(), "keys"), Ok(keys));
    });
}

#[test]
fn a_byte_at_a_time_is_served() {
    watchdog(|| {
        let listener = listener();
        let mut stream = dial(&listener);
        stream.set_nodelay(true).unwrap();
        let slow = thread::spawn(move || {
            for byte in greeting(5) {
                stream.write_all(&[byte]).unwrap();
                thread::sleep(Duration::from_millis(5));
            }
            stream
        });
        assert_eq!(listener.accept_hello(&until(far()), &mut anyone).unwrap().1, hello(5));
        slow.join().unwrap();
    });
}

#[test]
fn strangers_are_dropped_without_a_word() {
    watchdog(|| {
        let listener = listener();
        let browser = dial_with(&listener, b"GET / HTTP/1.1\r\nHost: here\r\n\r\n");
        let noise = dial_with(&listener, &[0xA5; 3000]);
        drop(dial(&listener));
        socket2::SockRef::from(&dial(&listener)).set_linger(Some(Duration::ZERO)).unwrap();
        drop(dial_with(&listener, &greeting(5)[..40]));
        let half_closed = dial_with(&listener, &greeting(5)[..HEADER]);
        half_closed.shutdown(Shutdown::Write).unwrap();
        let error = listener.accept_hello(&until(later()), &mut anyone).unwrap_err().to_string();
        assert!(error.contains("6 clients connected"), "{error}");
        serves_a_good_client(&listener);
        for mut stream in [browser, noise, half_closed] {
            // Either an end or a reset, but not a byte.
            assert!(matches!(stream.read(&mut [0; 64]), Ok(0) | Err(_)));
        }
    });
}

#[test]
fn who_speaks_the_protocol_wrongly_is_told() {
    watchdog(|| {
        let listener = listener();
        let changed = |offset: usize, bytes: &[u8]| {
            let mut message = greeting(5);
            message[offset..offset + bytes.len()].copy_from_slice(bytes);
            message
        };
        let cases = [
            (changed(4, &[2, 0]), 0, "version 2"),
            (changed(4, &[0, 0]), 0, "version 0"),
            (changed(6, &[99, 0]), 0, "kind 99"),
            (changed(8, &[0xFF; 4]), 0, "4294967295 bytes"),
            (changed(12, &[1, 0, 0, 0]), 5, "0x00000001"),
            (changed(HEADER + 1, &[9]), 0, "data path is 9"),
            (Message::Goodbye.encode(0), 0, "goodbye message"),
        ];
        let clients: Vec<_> = cases.iter().map(|(bytes, ..)| dial_with(&listener, bytes)).collect();
        serves_a_good_client(&listener);
        for (client, (_, for_session, part)) in clients.into_iter().zip(cases) {
            let (session, Message::Error(text)) = answer(client) else { panic!("{part}") };
            assert!(session == for_session && text.contains(part), "{part} is not said in: {text}");
        }
    });
}

#[test]
fn a_hello_can_be_refused() {
    watchdog(|| {
        let listener = listener();
        let refused = dial_with(&listener, &greeting(5));
        let mut asked = Vec::new();
        let mut check = |hello: &Hello| {
            assert_eq!((hello.role, hello.data_path), (Role::Controller, DataPathCode::Verbs));
            asked.push(hello.session);
            if hello.session == 5 { Err("the token is wrong".to_owned()) } else { Ok(()) }
        };
        let dropped = listener.accept_hello(&until(later()), &mut check).unwrap_err().to_string();
        assert!(dropped.contains("1 clients connected") && dropped.contains("the token is wrong"), "{dropped}");
        let _good = dial_with(&listener, &greeting(6));
        assert_eq!(listener.accept_hello(&until(far()), &mut check).unwrap().1.session, 6);
        assert_eq!(asked, [5, 6]);
        assert_eq!(answer(refused), (5, Message::Error("the token is wrong".into())));
    });
}

#[test]
fn silent_clients_hold_nobody_up() {
    watchdog(|| {
        let listener = listener();
        let silent: Vec<_> = (0..3).map(|_| dial(&listener)).collect();
        let half = dial_with(&listener, &greeting(4)[..50]);
        serves_a_good_client(&listener);
        for mut stream in silent {
            assert_eq!(stream.read(&mut [0; 64]).unwrap(), 0, "a silent client is told nothing");
        }
        // The one that had begun a hello learns why it goes no further.
        let (0, Message::Error(text)) = answer(half) else { panic!() };
        assert!(text.contains("another client"), "{text}");
    });
}

#[test]
fn more_clients_than_may_be_pending_hold_nobody_up() {
    watchdog(|| {
        let listener = listener();
        let silent: Vec<_> = (0..100).map(|_| dial(&listener)).collect();
        serves_a_good_client(&listener);
        drop(silent);
    });
}

#[test]
fn a_silent_client_is_dropped_at_its_own_deadline() {
    watchdog(|| {
        let listener = listener();
        let mut silent = dial(&listener);
        let client = thread::spawn(move || {
            assert_eq!(silent.read(&mut [0]).unwrap(), 0, "dropped");
            silent.local_addr().unwrap()
        });
        let how = Acceptance { step: Duration::from_millis(30), ..until(later()) };
        let error = listener.accept_hello(&how, &mut anyone).unwrap_err().to_string();
        let client = client.join().unwrap().to_string();
        assert!(error.contains(&client) && error.contains("no whole hello within 30ms"), "{error}");
    });
}

#[test]
fn the_deadline_holds_and_the_hint_says_who_came() {
    watchdog(|| {
        let listener = listener();
        let deadline = soon();
        let error = listener.accept_hello(&until(deadline), &mut anyone).unwrap_err();
        assert!(Instant::now() >= deadline, "it gave up too early");
        let TransportError::Timeout { stage: STAGE, hint, .. } = error else { panic!("{error:?}") };
        assert!(hint.contains(&listener.local_addr().to_string()) && hint.contains("nobody connected"), "{hint}");
        let _silent = dial(&listener);
        let error = listener.accept_hello(&until(soon()), &mut anyone).unwrap_err().to_string();
        assert!(error.contains("none said hello"), "{error}");
    });
}

#[test]
fn a_wait_without_deadline_can_be_cancelled() {
    watchdog(|| {
        let listener = listener();
        let _silent = dial(&listener);
        let (reader, mut writer) = std::io::pipe().unwrap();
        let cancelling = thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            writer.write_all(b"x").unwrap();
            writer
        });
        let how =
            Acceptance { deadline: None, step: STEP, liveness: LIVENESS, key: None, cancel: Some(reader.as_fd()) };
        let error = listener.accept_hello(&how, &mut anyone).unwrap_err();
        assert!(matches!(&error, TransportError::Engine { problem } if problem.contains("cancelled")), "{error:?}");
        cancelling.join().unwrap();
        let never = Acceptance { cancel: None, ..how };
        let error = listener.accept_hello(&never, &mut anyone).unwrap_err();
        assert!(matches!(error, TransportError::Invalid { .. }), "{error:?}");
    });
}

#[test]
fn an_address_that_cannot_be_had_is_named_with_its_remedy() {
    let first = listener();
    let port = first.local_addr().port();
    let error = Listener::bind("127.0.0.1", port).unwrap_err().to_string();
    for part in ["bind", &format!("127.0.0.1:{port}"), "another process listens", "os error 98"] {
        assert!(error.contains(part) || part == "bind" && error.contains("listen"), "{part} is not said in: {error}");
    }
    // 192.0.2.1 is for documentation (RFC 5737) and no address of this machine.
    let error = Listener::bind("192.0.2.1", 0).unwrap_err().to_string();
    assert!(error.contains("192.0.2.1") && error.contains("no interface"), "{error}");
    let error = Listener::bind("no-such-host.invalid", 0).unwrap_err();
    assert!(matches!(error, TransportError::Invalid { .. }) && error.to_string().contains("no-such-host"), "{error}");
    let denied =
        system("bind", (Ipv4Addr::LOCALHOST, 80).into(), &io::Error::from_raw_os_error(libc::EACCES)).to_string();
    assert!(denied.contains("port 80 is reserved"), "{denied}");
}

#[test]
fn a_port_can_be_had_again_at_once() {
    watchdog(|| {
        let mut port = 0;
        for _ in 0..50 {
            let listener = Listener::bind("127.0.0.1", port).unwrap();
            port = listener.local_addr().port();
            let client = dial_with(&listener, &greeting(5));
            // The listening side closes first, so that the connection stays in TIME_WAIT on its port.
            drop(listener.accept_hello(&until(far()), &mut anyone).unwrap());
            drop(client);
        }
    });
}

#[test]
fn the_unspecified_ipv6_address_takes_ipv4_too() {
    watchdog(|| {
        if has_ipv6() {
            let listener = Listener::bind("::", 0).unwrap();
            let _client = connect("127.0.0.1", listener.local_addr().port(), None, far(), LIVENESS).unwrap().send(
                &Message::Hello(hello(5)),
                far(),
                "hello",
            );
            let error = listener.accept_hello(&until(far()), &mut |_| Ok(()));
            assert!(error.is_ok(), "{error:?}");
        }
    });
}
