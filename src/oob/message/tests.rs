use super::*;
use crate::oob::decoder::Decoder;
use crate::oob::test_support::document_vectors;

/// The one message in these bytes.
fn decode(mut bytes: &[u8]) -> Result<Option<(u32, Message)>, Problem> {
    let mut decoder = Decoder::new();
    while decoder.fill(&mut bytes).unwrap() > 0 {}
    decoder.next()
}

fn with_body(kind: Kind, body: &[u8]) -> Vec<u8> {
    let mut bytes = Message::Ready.encode(7);
    bytes[6..8].copy_from_slice(&kind.code().to_le_bytes());
    bytes[8..12].copy_from_slice(&(body.len() as u32).to_le_bytes());
    bytes.extend(body);
    bytes
}

fn vectors() -> Vec<(&'static str, u32, Message)> {
    let host = std::array::from_fn(|i| 0xA0 + i as u8);
    let hello_verbs = Hello {
        role: Role::Controller,
        data_path: DataPathCode::Verbs,
        session: 0x1122_3344,
        endpoint: Endpoint {
            link_layer: LINK_ETHERNET,
            mtu: 3,
            lid: 0x0102,
            queue_pair: 0x00AB_CDEF,
            psn: 0x0012_3456,
            gid: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF, 10, 9, 0, 1],
            gid_type: 2,
            pkey: 0xFFFF,
            host,
            rendezvous: [0; 16],
            token: std::array::from_fn(|i| 0xE0 + i as u8),
        },
        proposal: Proposal { depth: 64, request_capacity: 16, reply_capacity: 8 },
    };
    let hello_memory = Hello {
        role: Role::Coprocessor,
        data_path: DataPathCode::SharedMemory,
        session: 0xA1B2_C3D4,
        endpoint: Endpoint { host, rendezvous: std::array::from_fn(|i| 0xC0 + i as u8), ..Endpoint::default() },
        proposal: Proposal::default(),
    };
    let keys = Keys { address: 0xFFFF_8877_6655_44CC, size: 0x1_0000, rkey: 0x89AB_CDEF };
    let geometry = Geometry {
        depth: 16,
        request_capacity: 8,
        reply_capacity: 0x00FF_FFFF,
        check_kind: CheckKind::Crc32c,
        first_sequence: 0xFFFF_FFFE,
    };
    let session = 0xA1B2_C3D4;
    vec![
        ("hello_controller_verbs", 0, Message::Hello(hello_verbs)),
        ("hello_coprocessor_shared_memory", 0x1122_3344, Message::Hello(hello_memory)),
        ("ready", session, Message::Ready),
        ("keys", session, Message::Keys(keys)),
        ("channel", session, Message::Channel(geometry)),
        ("probed", session, Message::Probed),
        ("started", session, Message::Started),
        ("stopped", session, Message::Stopped),
        ("goodbye", session, Message::Goodbye),
        ("error", session, Message::Error("depth is 16 here and 32 there: größer".into())),
        ("heartbeat", session, Message::Heartbeat),
        ("error_before_hello", 0, Message::Error("no".into())),
        ("challenge_controller", 0, Message::Challenge(challenge(Role::Controller, 0))),
        ("challenge_coprocessor", 0, Message::Challenge(challenge(Role::Coprocessor, 0x20))),
    ]
}

fn challenge(role: Role, first: u8) -> Challenge {
    Challenge { role, nonce: std::array::from_fn(|i| first + i as u8) }
}

/// The vectors of the document, which were not written by this code. Those with a tag are read by the tests of the seal.
#[test]
fn bytes_are_those_of_the_document() {
    let mut documented = document_vectors();
    documented.retain(|name, _| !name.starts_with("sealed_"));
    for (name, session, message) in vectors() {
        let bytes = documented.remove(name).unwrap_or_else(|| panic!("the document has no vector {name}"));
        assert_eq!(message.encode(session), bytes, "{name} is written differently");
        assert_eq!(decode(&bytes), Ok(Some((session, message))), "{name} is read differently");
    }
    assert!(documented.is_empty(), "the document has more vectors: {:?}", documented.keys());
}

#[test]
fn every_kind_has_a_vector_and_its_least_length() {
    // A proof is nothing but its tag.
    for kind in Kind::ALL.iter().filter(|kind| **kind != Kind::Proof) {
        let (_, session, message) =
            vectors().into_iter().find(|(_, _, message)| message.kind() == *kind).unwrap_or_else(|| panic!("{kind}"));
        let body = message.encode(session).len() - HEADER;
        assert!(body == kind.body_length() || *kind == Kind::Error, "{kind}");
    }
}

#[test]
fn codes_survive_the_round_trip() {
    assert!((0..=u16::MAX).all(|code| Kind::from_code(code).is_none_or(|kind| kind.code() == code)));
    assert_eq!((Kind::ALL.len(), Role::ALL.len(), DataPathCode::ALL.len(), CheckKind::ALL.len()), (12, 2, 2, 2));
    assert!(Role::ALL.iter().all(|role| Role::from_code(role.code()) == Some(*role)));
    assert!(DataPathCode::ALL.iter().all(|path| DataPathCode::from_code(path.code()) == Some(*path)));
    assert!(CheckKind::ALL.iter().all(|check| CheckKind::from_code(check.code()) == Some(*check)));
}

/// Body offset, bytes put there, and the field that must be named; for each message that has fields.
#[test]
fn values_out_of_range_are_refused_by_name() {
    type Change = (usize, &'static [u8], &'static str);
    let verbs: &[Change] = &[
        (0, &[2], "role is 2"),
        (1, &[0], "data path is 0"),
        (1, &[3], "data path is 3"),
        (2, &[1], "flags is 0x0001"),
        (3, &[0x80], "flags is 0x8000"),
        (4, &[0; 4], "session is 0"),
        (8, &[0], "link layer is 0"),
        (8, &[3], "link layer is 3"),
        (9, &[0], "mtu is 0"),
        (9, &[6], "mtu is 6"),
        (12, &[1, 0, 0, 0], "queue pair is 1"),
        (15, &[1], "queue pair is 28036591"),
        (19, &[1], "psn is 17970262"),
        (36, &[3], "gid type is 3"),
        (37, &[1], "padding is 1"),
    ];
    let memory: &[Change] = &[(8, &[1], "link layer is 1"), (9, &[3], "mtu is 3"), (12, &[2], "queue pair is 2")];
    let keys: &[Change] = &[(8, &[0; 8], "size is 0"), (8, &[0xFF; 8], "size is 18446744073709551615")];
    let channel: &[Change] = &[
        (0, &[0; 4], "depth is 0"),
        (7, &[1], "request capacity is 16777224"),
        (11, &[1], "reply capacity is 33554431"),
        (12, &[2], "check kind is 2"),
        (13, &[1], "reserved bytes is [1, 0, 0]"),
        (15, &[1], "reserved bytes is [0, 0, 1]"),
    ];
    let challenge: &[Change] = &[
        (0, &[2], "role is 2"),
        (1, &[0], "scheme is 0"),
        (1, &[2], "scheme is 2"),
        (2, &[1], "reserved bytes is 0x0001"),
        (3, &[1], "reserved bytes is 0x0100"),
    ];
    for (name, changes) in [
        ("challenge_coprocessor", challenge),
        ("hello_controller_verbs", verbs),
        ("hello_coprocessor_shared_memory", memory),
        ("keys", keys),
        ("channel", channel),
    ] {
        let (_, session, message) = vectors().into_iter().find(|vector| vector.0 == name).unwrap();
        for (offset, bytes, text) in changes {
            let mut changed = message.encode(session);
            changed[HEADER + offset..HEADER + offset + bytes.len()].copy_from_slice(bytes);
            let problem = decode(&changed).expect_err(text).to_string();
            assert!(problem.starts_with(text) && problem.contains("must be"), "{text} is not said in: {problem}");
        }
    }
}

#[test]
fn a_longer_body_is_read_and_a_shorter_one_is_not() {
    for (name, session, message) in vectors() {
        let bytes = message.encode(session);
        if message.kind() != Kind::Error {
            let longer = with_body(message.kind(), &[&bytes[HEADER..], &[0xEE; 9]].concat());
            assert_eq!(decode(&longer), Ok(Some((7, message.clone()))), "{name}");
        }
        if message.kind().body_length() > 0 {
            let shorter = with_body(message.kind(), &bytes[HEADER..bytes.len() - 1]);
            let (length, needed) = (bytes.len() - HEADER - 1, bytes.len() - HEADER);
            assert_eq!(decode(&shorter), Err(Problem::Short { kind: message.kind(), length, needed }), "{name}");
        }
    }
}

#[test]
fn an_errors_text_is_cut_between_characters() {
    let long = format!("x{}", "ü".repeat(400));
    let Ok(Some((3, Message::Error(text)))) = decode(&Message::Error(long.clone()).encode(3)) else { panic!() };
    assert_eq!(text.len(), 511);
    assert!(long.starts_with(&text));
    assert_eq!(Message::Error(String::new()).encode(3).len(), HEADER);
}

#[test]
fn an_errors_text_cannot_forge_a_log_line() {
    let text = b"a\n2026 ERROR b\x1b[31m\xFFc\xe2\x80\xaed\x7f";
    let Ok(Some((_, Message::Error(text)))) = decode(&with_body(Kind::Error, text)) else { panic!() };
    assert_eq!(text, "a\u{FFFD}2026 ERROR b\u{FFFD}[31m\u{FFFD}c\u{FFFD}d\u{FFFD}");
    let Ok(Some((_, Message::Error(text)))) = decode(&with_body(Kind::Error, &[b'y'; MAX_BODY])) else { panic!() };
    assert_eq!(text.len(), MAX_TEXT);
}

#[test]
fn a_token_is_compared_and_never_shown() {
    let mut endpoint = Endpoint { token: [0x5A; 16], ..Endpoint::default() };
    assert!(endpoint.token_is(&[0x5A; 16]));
    endpoint.token[15] ^= 1;
    assert!(!endpoint.token_is(&[0x5A; 16]));
    let text = format!("{endpoint:?}");
    assert!(!text.contains("90") && !text.contains("token"), "{text}");
}
