use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::error::TransportError;
use crate::oob::decoder::{Decoder, Problem};
use crate::oob::listener::{Acceptance, Listener};
use crate::oob::message::{Challenge, HEADER, Hello, Keys, Message};
use crate::oob::test_support::{LIVENESS, document_vectors, far, hello, watchdog};
use crate::oob::{Channel, connect};

const STAGE: &str = "testing";
const OURS: &[u8] = b"0123456789abcdef";
const THEIRS: &[u8] = b"0123456789abcdeF";

fn key(bytes: &[u8]) -> PreSharedKey {
    PreSharedKey::of(bytes)
}

/// One end of a connection, without the connection.
struct End {
    decoder: Decoder,
}

impl End {
    fn new(role: Role, bytes: &[u8]) -> Self {
        let mut decoder = Decoder::new();
        decoder.set_seal(Seal::new(&key(bytes), role));
        Self { decoder }
    }

    fn says(&mut self, message: &Message, session: u32) -> Vec<u8> {
        let mut bytes = message.encode(session);
        self.decoder.seal().unwrap().close(message.kind(), &mut bytes);
        bytes
    }

    fn hears(&mut self, mut bytes: &[u8]) -> Result<Option<(u32, Message)>, Problem> {
        self.decoder.fill(&mut bytes).unwrap();
        self.decoder.next()
    }
}

fn challenge(role: Role, first: u8) -> Message {
    Message::Challenge(Challenge { role, nonce: std::array::from_fn(|i| first + i as u8) })
}

/// Two ends whose proofs have been exchanged, and all that went over the connection.
fn proved() -> (End, End, Vec<Vec<u8>>) {
    let (mut controller, mut coprocessor) = (End::new(Role::Controller, OURS), End::new(Role::Coprocessor, OURS));
    let mut sent = Vec::new();
    for message in [challenge(Role::Controller, 0), challenge(Role::Coprocessor, 0x20), Message::Proof, Message::Proof]
    {
        let (from, to) = match sent.len() % 2 {
            0 => (&mut controller, &mut coprocessor),
            _ => (&mut coprocessor, &mut controller),
        };
        let bytes = from.says(&message, 0);
        assert_eq!(to.hears(&bytes), Ok(Some((0, message))));
        sent.push(bytes);
    }
    (controller, coprocessor, sent)
}

/// The vectors of the document, which were not written by this code.
#[test]
fn tags_are_those_of_the_document() {
    let mut documented = document_vectors();
    let (mut controller, mut coprocessor) = (End::new(Role::Controller, OURS), End::new(Role::Coprocessor, OURS));
    let plain = |name: &str| {
        let mut decoder = Decoder::new();
        decoder.fill(&mut &document_vectors()[name][..]).unwrap();
        decoder.next().unwrap().unwrap()
    };
    let session = [
        ("challenge_controller", plain("challenge_controller")),
        ("challenge_coprocessor", plain("challenge_coprocessor")),
        ("sealed_controller_proof", (0, Message::Proof)),
        ("sealed_coprocessor_proof", (0, Message::Proof)),
        ("sealed_controller_hello", plain("hello_controller_verbs")),
        ("sealed_coprocessor_hello", plain("hello_coprocessor_shared_memory")),
        ("sealed_controller_ready", (0xA1B2_C3D4, Message::Ready)),
        ("sealed_coprocessor_keys", (0x1122_3344, plain("keys").1)),
    ];
    for (name, (session, message)) in session {
        let bytes = documented.remove(name).unwrap();
        let (from, to) = match name.contains("controller") {
            true => (&mut controller, &mut coprocessor),
            false => (&mut coprocessor, &mut controller),
        };
        assert_eq!(from.says(&message, session), bytes, "{name} is written differently");
        assert_eq!(to.hears(&bytes), Ok(Some((session, message))), "{name} is read differently");
    }
    assert!(!documented.keys().any(|name| name.starts_with("sealed_")), "{:?}", documented.keys());
}

/// Every bit of every message counts, of those that rest on it too.
#[test]
fn a_changed_bit_anywhere_is_noticed() {
    let hello = Message::Hello(hello(5));
    let length = proved().0.says(&hello, 0).len();
    for bit in 0..length * 8 {
        let (mut controller, mut coprocessor, _) = proved();
        let mut bytes = controller.says(&hello, 0);
        bytes[bit / 8] ^= 1 << (bit % 8);
        // A changed length may announce more than there is.
        let heard = coprocessor.hears(&bytes);
        assert!(matches!(heard, Err(_) | Ok(None)), "bit {bit}: {heard:?}");
        if (HEADER * 8..).contains(&bit) {
            assert_eq!(heard, Err(Problem::Forged { kind: Kind::Hello }), "bit {bit}");
        }
    }
    // Challenges have no tag of their own: the proofs after them do not fit any more.
    for bit in (HEADER + 4) * 8..(HEADER + 36) * 8 {
        let (mut controller, mut coprocessor) = (End::new(Role::Controller, OURS), End::new(Role::Coprocessor, OURS));
        let mut bytes = controller.says(&challenge(Role::Controller, 0), 0);
        bytes[bit / 8] ^= 1 << (bit % 8);
        coprocessor.hears(&bytes).unwrap();
        let answer = coprocessor.says(&challenge(Role::Coprocessor, 1), 0);
        controller.hears(&answer).unwrap();
        let proof = controller.says(&Message::Proof, 0);
        assert_eq!(coprocessor.hears(&proof), Err(Problem::Key), "bit {bit}");
    }
}

#[test]
fn what_is_sent_back_repeated_left_out_or_moved_is_noticed() {
    let forged = |kind| Err(Problem::Forged { kind });
    let (hello, ready) = (Message::Hello(hello(5)), Message::Ready);
    // Sent back to its sender.
    let (mut controller, _, _) = proved();
    let bytes = controller.says(&hello, 0);
    assert_eq!(controller.hears(&bytes), forged(Kind::Hello));
    let mut alone = End::new(Role::Controller, OURS);
    for message in [challenge(Role::Controller, 0), Message::Proof] {
        let bytes = alone.says(&message, 0);
        let heard = alone.hears(&bytes);
        assert_eq!(heard.is_err(), message == Message::Proof, "{heard:?}");
    }
    // Repeated.
    let (mut controller, mut coprocessor, _) = proved();
    let bytes = controller.says(&ready, 0);
    coprocessor.hears(&bytes).unwrap();
    assert_eq!(coprocessor.hears(&bytes), forged(Kind::Ready));
    // Left out.
    let (mut controller, mut coprocessor, _) = proved();
    controller.says(&ready, 0);
    let bytes = controller.says(&ready, 0);
    assert_eq!(coprocessor.hears(&bytes), forged(Kind::Ready));
    // Not sent after all: nothing is missing.
    let (mut controller, mut coprocessor, _) = proved();
    controller.says(&ready, 0);
    controller.decoder.seal().unwrap().take_back();
    let bytes = controller.says(&ready, 0);
    assert_eq!(coprocessor.hears(&bytes), Ok(Some((0, ready))));
    // Without a tag, or with a shorter body than a tag.
    let (_, mut coprocessor, _) = proved();
    assert!(matches!(coprocessor.hears(&Message::Ready.encode(0)), Err(Problem::Short { needed: TAG, .. })));
    let (_, mut coprocessor, _) = proved();
    assert!(matches!(coprocessor.hears(&hello.encode(0)), Err(Problem::Short { .. })));
}

/// A refusal may cross a hello that is on its way to who refuses.
#[test]
fn an_error_that_crosses_a_hello_is_genuine() {
    let (mut controller, mut coprocessor, _) = proved();
    controller.says(&Message::Hello(hello(5)), 0);
    let error = Message::Error("another client was served first".into());
    let bytes = coprocessor.says(&error, 0);
    assert_eq!(controller.hears(&bytes), Ok(Some((0, error))));
}

/// All that either side of one session said, said again in another, in which the same side is fresh.
#[test]
fn a_recorded_session_cannot_be_replayed() {
    let (_, _, sent) = proved();
    let mut coprocessor = End::new(Role::Coprocessor, OURS);
    coprocessor.hears(&sent[0]).unwrap();
    coprocessor.says(&challenge(Role::Coprocessor, 0x21), 0);
    assert_eq!(coprocessor.hears(&sent[2]), Err(Problem::Key));
    let mut controller = End::new(Role::Controller, OURS);
    controller.says(&challenge(Role::Controller, 1), 0);
    controller.hears(&sent[1]).unwrap();
    controller.says(&Message::Proof, 0);
    assert_eq!(controller.hears(&sent[3]), Err(Problem::Key));
}

proptest! {
    /// Whatever comes from one without the key: never a panic, and never more than its challenge and its refusal is taken.
    #[test]
    fn nothing_is_taken_from_who_has_no_key(pieces in vec((0..14u16, vec(any::<u8>(), 0..200)), 0..8)) {
        let mut end = End::new(Role::Coprocessor, OURS);
        for (kind, body) in pieces {
            let mut bytes = Message::Ready.encode(0);
            bytes[6..8].copy_from_slice(&kind.to_le_bytes());
            bytes[8..12].copy_from_slice(&(body.len() as u32).to_le_bytes());
            bytes.extend(body);
            match end.hears(&bytes) {
                Ok(Some((_, message))) => prop_assert!(message.kind() != Kind::Proof, "{:?}", message),
                Ok(None) => prop_assert!(false, "a whole message"),
                Err(_) => return Ok(()),
            }
        }
    }
}

// Over TCP: the listener with a key on one side, and whoever dials on the other.

fn accept(
    listener: &Listener,
    key: Option<&PreSharedKey>,
    step: Duration,
    deadline: Instant,
) -> Result<(Channel, Hello), TransportError> {
    let how = Acceptance { deadline: Some(deadline), key, step, liveness: LIVENESS, cancel: None };
    listener.accept_hello(&how, &mut |_| Ok(()))
}

/// Runs `body` while clients with this key are waited for, of which none is to be served.
fn refusing<T>(listener: &Listener, key: Option<&PreSharedKey>, body: impl FnOnce() -> T) -> T {
    let (cancel, mut end) = std::io::pipe().unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let cancel = Some(cancel.as_fd());
            let how = Acceptance { deadline: None, key, step: Duration::from_secs(20), liveness: LIVENESS, cancel };
            listener.accept_hello(&how, &mut |_| Ok(())).map(drop).unwrap_err()
        });
        let result = body();
        end.write_all(b"x").unwrap();
        let error = waiting.join().unwrap();
        assert!(matches!(error, TransportError::Engine { .. }), "{error}");
        result
    })
}

fn listener() -> Listener {
    Listener::bind("127.0.0.1", 0).unwrap()
}

fn dial(listener: &Listener) -> TcpStream {
    let stream = TcpStream::connect(listener.local_addr()).unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}

/// A controller that authenticates and says hello.
fn controller(listener: &Listener, bytes: &'static [u8]) -> thread::JoinHandle<Result<Hello, TransportError>> {
    let port = listener.local_addr().port();
    thread::spawn(move || {
        let mut channel = connect("127.0.0.1", port, None, far(), LIVENESS)?;
        channel.authenticate(&key(bytes), far())?;
        channel.send(&Message::Hello(hello(5)), far(), STAGE)?;
        channel.expect_hello(far(), STAGE)
    })
}

/// After all that came before, one with the key is served.
fn serves_a_good_client(listener: &Listener) {
    let dialling = controller(listener, OURS);
    let (mut channel, theirs) = accept(listener, Some(&key(OURS)), Duration::from_secs(20), far()).unwrap();
    assert_eq!(theirs, hello(5));
    channel.send(&Message::Hello(hello(6)), far(), STAGE).unwrap();
    assert_eq!(dialling.join().unwrap(), Ok(hello(6)));
}

/// All that a client is sent until its connection ends, as messages.
fn heard(mut stream: TcpStream) -> Vec<Message> {
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    let (mut decoder, mut messages, mut bytes) = (Decoder::new(), Vec::new(), &bytes[..]);
    while !bytes.is_empty() {
        decoder.fill(&mut bytes).unwrap();
        while let Some((_, message)) = decoder.next().unwrap() {
            messages.push(message);
        }
    }
    assert_eq!(decoder.progress().0, 0, "the last message is whole");
    messages
}

#[test]
fn both_have_the_key() {
    watchdog(|| {
        let listener = listener();
        serves_a_good_client(&listener);
        // Messages with tags go on in both directions, and the goodbye is one of them.
        let dialling = controller(&listener, OURS);
        let (mut channel, _) = accept(&listener, Some(&key(OURS)), Duration::from_secs(20), far()).unwrap();
        channel.send(&Message::Hello(hello(6)), far(), STAGE).unwrap();
        channel.send(&Message::Keys(Keys { address: 1, size: 2, rkey: 3 }), far(), STAGE).unwrap();
        dialling.join().unwrap().unwrap();
    });
}

#[test]
fn who_has_no_key_or_another_is_told_what_to_set() {
    watchdog(|| {
        let listener = listener();
        // Another key there.
        let other = controller(&listener, THEIRS);
        let error = refusing(&listener, Some(&key(OURS)), || other.join().unwrap().unwrap_err());
        assert!(matches!(error, TransportError::PeerRefused { .. }), "{error}");
        assert!(error.to_string().contains("pre-shared keys of the two sides differ"), "{error}");
        // None there.
        let mut bare = dial(&listener);
        bare.write_all(&Message::Hello(hello(5)).encode(0)).unwrap();
        let mut bytes = Vec::new();
        refusing(&listener, Some(&key(OURS)), || bare.read_to_end(&mut bytes).unwrap());
        let mut decoder = Decoder::new();
        decoder.fill(&mut &bytes[..]).unwrap();
        let Some((5, Message::Error(text))) = decoder.next().unwrap() else { panic!() };
        assert!(text.contains("psk_file=") && text.contains("the controller has shown none"), "{text}");
        assert_eq!(bytes.len(), HEADER + text.len(), "nothing else is said");
        // None here.
        let dialling = controller(&listener, OURS);
        let error = refusing(&listener, None, || dialling.join().unwrap().unwrap_err().to_string());
        assert!(error.contains("this coprocessor has none: set the same one here"), "{error}");
        assert!(error.contains("a pre-shared key is set here"), "{error}");
        serves_a_good_client(&listener);
    });
}

/// A release from before authentication refuses the challenge by its number; the error says what had asked for it.
#[test]
fn an_old_peer_is_a_clear_refusal() {
    watchdog(|| {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let old = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut bytes = [0; HEADER + 36];
            stream.read_exact(&mut bytes).unwrap();
            let text = "message kind 11 was received and version 1 knows kinds 1 to 10";
            stream.write_all(&Message::Error(text.into()).encode(0)).unwrap();
        });
        let mut channel = connect("127.0.0.1", port, None, far(), LIVENESS).unwrap();
        let error = channel.authenticate(&key(OURS), far()).unwrap_err().to_string();
        assert!(error.contains("kind 11") && error.contains("a pre-shared key is set here"), "{error}");
        old.join().unwrap();
    });
}

/// A false coprocessor gets 32 random bytes and a proof that no other session takes, and no hello.
#[test]
fn a_coprocessor_without_the_key_learns_nothing() {
    watchdog(|| {
        let hello = Message::Hello(Hello { role: Role::Coprocessor, ..hello(9) });
        let theirs = challenge(Role::Coprocessor, 7);
        let proof = {
            let mut bytes = Message::Proof.encode(0);
            bytes[8] = TAG as u8;
            bytes.extend([0xAA; TAG]);
            bytes
        };
        let cases = [
            (hello.encode(0), "a hello message came where a challenge message was expected"),
            (challenge(Role::Controller, 7).encode(0), "it sent a controller's challenge"),
            ([theirs.encode(0), hello.encode(0)].concat(), "a hello message came where a proof message was expected"),
            ([theirs.encode(0), proof].concat(), "the proof is wrong"),
            (
                [theirs.encode(0), Message::Proof.encode(0)].concat(),
                "a proof message has a body of 0 bytes and needs 32",
            ),
        ];
        for (answer, words) in cases {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let port = listener.local_addr().unwrap().port();
            let dialling = thread::spawn(move || {
                let mut channel = connect("127.0.0.1", port, None, far(), LIVENESS).unwrap();
                channel.authenticate(&key(OURS), far()).unwrap_err()
            });
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(&answer).unwrap();
            let error = dialling.join().unwrap();
            assert!(matches!(error, TransportError::Protocol { .. }) && error.to_string().contains(words), "{error}");
            let mut bytes = Vec::new();
            let _ = stream.read_to_end(&mut bytes);
            assert!(bytes.len() <= HEADER + 36 + HEADER + TAG, "more than a challenge and a proof: {bytes:?}");
        }
    });
}

/// Whatever a client without the key does, it is sent a challenge and a refusal at most, it is dropped within the time of the
/// handshake, and it holds nobody up.
#[test]
fn a_client_without_the_key_learns_nothing_and_holds_nobody_up() {
    watchdog(|| {
        let listener = listener();
        let ours = challenge(Role::Controller, 7).encode(0);
        let mut false_proof = Message::Proof.encode(0);
        false_proof[8] = TAG as u8;
        false_proof.extend([0x55; TAG]);
        let keys = Message::Keys(Keys { address: 1, size: 2, rkey: 3 });
        let (_, _, recorded) = proved();
        let clients: Vec<(TcpStream, Option<&str>)> = [
            (Vec::new(), None),
            (ours[..20].to_vec(), None),
            (ours.clone(), None),
            ([&ours[..], &false_proof[..40]].concat(), None),
            ([&ours[..], &false_proof[..]].concat(), Some("the proof is wrong")),
            ([&recorded[0][..], &recorded[2][..]].concat(), Some("the proof is wrong")),
            ([&ours[..], &ours[..]].concat(), Some("a challenge message came where a proof")),
            ([&ours[..], &Message::Hello(hello(5)).encode(0)[..]].concat(), Some("a hello message came where a proof")),
            ([&ours[..], &keys.encode(0)[..]].concat(), Some("a keys message came where a proof")),
            (challenge(Role::Coprocessor, 7).encode(0), Some("was sent a coprocessor's challenge")),
            (Message::Ready.encode(0), Some("a ready message came where a challenge")),
            (b"GET / HTTP/1.1\r\n\r\n".to_vec(), None),
        ]
        .into_iter()
        .map(|(bytes, words)| {
            let mut stream = dial(&listener);
            stream.write_all(&bytes).unwrap();
            (stream, words)
        })
        .collect();
        // A flood of them too.
        let flood: Vec<_> = (0..40)
            .map(|_| {
                let mut stream = dial(&listener);
                stream.write_all(&ours).unwrap();
                stream
            })
            .collect();
        serves_a_good_client(&listener);
        for (index, (stream, words)) in clients.into_iter().enumerate() {
            let mut messages = heard(stream);
            let last = messages.pop();
            match (&last, words) {
                (Some(Message::Error(text)), Some(words)) => assert!(text.contains(words), "client {index}: {text}"),
                // Whoever had begun is told that another came first.
                (Some(Message::Error(text)), None) => {
                    assert!(text.contains("another client"), "client {index}: {text}")
                }
                (None, None) => {}
                other => panic!("client {index}: {other:?}"),
            }
            let only_a_challenge = match &messages[..] {
                [] => true,
                [Message::Challenge(challenge)] => challenge.role == Role::Coprocessor,
                _ => false,
            };
            assert!(only_a_challenge, "client {index} was sent {messages:?}");
        }
        drop(flood);
        // Silent in the middle, with nobody else there: dropped at its own deadline, not the listener's.
        let mut silent = dial(&listener);
        silent.write_all(&ours).unwrap();
        let client = thread::spawn(move || heard(silent));
        let error =
            accept(&listener, Some(&key(OURS)), Duration::from_millis(50), Instant::now() + Duration::from_millis(500));
        assert!(error.unwrap_err().to_string().contains("within 50ms"));
        assert!(matches!(client.join().unwrap()[..], [Message::Challenge(_)]));
    });
}

/// Two clients get two challenges, and the same client twice.
#[test]
fn every_challenge_is_another() {
    watchdog(|| {
        let listener = listener();
        let ours = challenge(Role::Controller, 7).encode(0);
        let clients: Vec<_> = (0..8)
            .map(|_| {
                let mut stream = dial(&listener);
                stream.write_all(&ours).unwrap();
                stream
            })
            .collect();
        serves_a_good_client(&listener);
        let mut nonces = std::collections::BTreeSet::new();
        for stream in clients {
            let Some(Message::Challenge(Challenge { nonce, .. })) = heard(stream).into_iter().next() else { panic!() };
            assert!(nonces.insert(nonce));
        }
    });
}

/// What stands between the two sides: it passes everything on, but for what `change` does to the messages of one side.
fn between(
    listener: &Listener,
    from_controller: bool,
    mut change: impl FnMut(usize, &mut Vec<u8>) + Send + 'static,
) -> (std::net::SocketAddr, thread::JoinHandle<()>) {
    let relay = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (at, to) = (relay.local_addr().unwrap(), listener.local_addr());
    let thread = thread::spawn(move || {
        let (controller, _) = relay.accept().unwrap();
        let coprocessor = TcpStream::connect(to).unwrap();
        let (changed_from, changed_to) =
            if from_controller { (&controller, &coprocessor) } else { (&coprocessor, &controller) };
        thread::scope(|scope| {
            scope.spawn(|| {
                let (mut from, mut to) = (changed_to, changed_from);
                let _ = std::io::copy(&mut from, &mut to);
                let _ = to.shutdown(Shutdown::Write);
            });
            let (mut from, mut to) = (changed_from, changed_to);
            for index in 0.. {
                let mut message = vec![0; HEADER];
                if from.read_exact(&mut message).is_err() {
                    break;
                }
                let length = u32::from_le_bytes(message[8..12].try_into().unwrap()) as usize;
                message.resize(HEADER + length, 0);
                from.read_exact(&mut message[HEADER..]).unwrap();
                change(index, &mut message);
                if to.write_all(&message).is_err() {
                    break;
                }
            }
            let _ = to.shutdown(Shutdown::Write);
        });
    });
    (at, thread)
}

/// A man in the middle who has no key swaps one field of a hello: the session number, the queue pair, the role.
#[test]
fn a_swapped_field_of_a_hello_ends_the_session() {
    watchdog(|| {
        for (from_controller, offset) in [(true, 4), (true, 12), (false, 4), (false, 16), (false, 56), (true, 0)] {
            let listener = listener();
            let (at, relay) = between(&listener, from_controller, move |index, message| {
                // Challenge, proof, hello.
                if index == 2 {
                    message[HEADER + offset] ^= 1;
                }
            });
            let dialling = thread::spawn(move || {
                let mut channel = connect("127.0.0.1", at.port(), None, far(), LIVENESS)?;
                channel.authenticate(&key(OURS), far())?;
                channel.send(&Message::Hello(hello(5)), far(), STAGE)?;
                channel.expect_hello(far(), STAGE)
            });
            let until =
                Instant::now() + if from_controller { Duration::from_millis(500) } else { Duration::from_secs(60) };
            let accepted = accept(&listener, Some(&key(OURS)), Duration::from_secs(20), until);
            let accepted = accepted.map(|(mut channel, _)| {
                channel.send(&Message::Hello(Hello { role: Role::Coprocessor, ..hello(6) }), far(), STAGE).unwrap();
                channel
            });
            let error = dialling.join().unwrap().unwrap_err().to_string();
            assert!(error.contains("the tag of a hello message is wrong"), "{error}");
            assert_eq!(accepted.is_err(), from_controller);
            drop(accepted);
            relay.join().unwrap();
        }
    });
}

#[test]
fn a_byte_at_a_time_is_served() {
    watchdog(|| {
        let listener = listener();
        let local = listener.local_addr();
        let slow = thread::spawn(move || {
            let mut stream = TcpStream::connect(local).unwrap();
            stream.set_nodelay(true).unwrap();
            let mut end = End::new(Role::Controller, OURS);
            let trickle = |stream: &mut TcpStream, bytes: &[u8]| {
                for byte in bytes {
                    stream.write_all(&[*byte]).unwrap();
                    thread::sleep(Duration::from_millis(2));
                }
            };
            let answer = |stream: &mut TcpStream, end: &mut End, length: usize| {
                let mut bytes = vec![0; length];
                stream.read_exact(&mut bytes).unwrap();
                end.hears(&bytes).unwrap().unwrap().1
            };
            let bytes = end.says(&challenge(Role::Controller, 3), 0);
            trickle(&mut stream, &bytes);
            answer(&mut stream, &mut end, HEADER + 36);
            let bytes = end.says(&Message::Proof, 0);
            trickle(&mut stream, &bytes);
            assert_eq!(answer(&mut stream, &mut end, HEADER + TAG), Message::Proof);
            let bytes = end.says(&Message::Hello(hello(5)), 0);
            trickle(&mut stream, &bytes);
            stream
        });
        let (channel, theirs) = accept(&listener, Some(&key(OURS)), Duration::from_secs(20), far()).unwrap();
        assert_eq!(theirs, hello(5));
        assert!(channel.as_fd().try_clone_to_owned().is_ok());
        slow.join().unwrap();
    });
}
