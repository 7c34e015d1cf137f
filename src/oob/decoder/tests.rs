use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::oob::message::{
    Challenge, CheckKind, DataPathCode, Endpoint, Geometry, Hello, Keys, MAX_24_BITS, MAX_TEXT, Proposal, Role,
};

fn endpoint(path: DataPathCode) -> impl Strategy<Value = Endpoint> {
    let verbs = path == DataPathCode::Verbs;
    let link = (1..=2u8, 1..=5u8, 2..=MAX_24_BITS);
    let names = (any::<[u8; 16]>(), any::<[u8; 16]>(), any::<[u8; 16]>(), any::<[u8; 16]>());
    (link, any::<u16>(), 0..=MAX_24_BITS, 0..=2u8, any::<u16>(), names).prop_map(
        move |((link_layer, mtu, queue_pair), lid, psn, gid_type, pkey, (gid, host, rendezvous, token))| {
            let all = Endpoint { link_layer, mtu, lid, queue_pair, psn, gid, gid_type, pkey, host, rendezvous, token };
            if verbs { all } else { Endpoint { link_layer: 0, mtu: 0, queue_pair: 0, ..all } }
        },
    )
}

fn hello() -> impl Strategy<Value = Hello> {
    let path = prop_oneof![Just(DataPathCode::SharedMemory), Just(DataPathCode::Verbs)];
    let rest = path.prop_flat_map(|path| (Just(path), endpoint(path)));
    let proposal = (any::<u32>(), 0..=MAX_24_BITS, 0..=MAX_24_BITS)
        .prop_map(|(depth, request_capacity, reply_capacity)| Proposal { depth, request_capacity, reply_capacity });
    (prop_oneof![Just(Role::Controller), Just(Role::Coprocessor)], 1..=u32::MAX, rest, proposal).prop_map(
        |(role, session, (data_path, endpoint), proposal)| Hello { role, data_path, session, endpoint, proposal },
    )
}

fn message() -> impl Strategy<Value = Message> {
    let keys = any::<(u64, u64, u32)>().prop_map(|(address, size, rkey)| {
        let address = address.min(u64::MAX - 1);
        Message::Keys(Keys { address, size: size % (u64::MAX - address) + 1, rkey })
    });
    let check = prop_oneof![Just(CheckKind::SessionNumber), Just(CheckKind::Crc32c)];
    let geometry = (1..=u32::MAX, 0..=MAX_24_BITS, 0..=MAX_24_BITS, check, any::<u32>()).prop_map(
        |(depth, request_capacity, reply_capacity, check_kind, first_sequence)| {
            Message::Channel(Geometry { depth, request_capacity, reply_capacity, check_kind, first_sequence })
        },
    );
    prop_oneof![
        3 => hello().prop_map(Message::Hello),
        2 => keys,
        2 => geometry,
        2 => "[ -~äλ€]{0,170}".prop_map(Message::Error),
        1 => prop_oneof![
            Just(Message::Ready),
            Just(Message::Probed),
            Just(Message::Started),
            Just(Message::Stopped),
            Just(Message::Goodbye),
            Just(Message::Heartbeat),
            Just(Message::Proof),
            (prop_oneof![Just(Role::Controller), Just(Role::Coprocessor)], any::<[u8; 32]>())
                .prop_map(|(role, nonce)| Message::Challenge(Challenge { role, nonce })),
        ],
    ]
}

/// Everything in these bytes, as it comes out when they arrive in pieces of these sizes.
fn decode(mut bytes: &[u8], mut pieces: impl Iterator<Item = usize>) -> (Vec<(u32, Message)>, Option<Problem>) {
    let (mut decoder, mut found) = (Decoder::new(), Vec::new());
    loop {
        match decoder.next() {
            Ok(Some(message)) => found.push(message),
            Err(problem) => {
                assert_eq!(decoder.next(), Err(problem.clone()), "a problem must stay");
                return (found, Some(problem));
            }
            Ok(None) if bytes.is_empty() => return (found, None),
            Ok(None) => {
                let (mut piece, _) = bytes.split_at(pieces.next().unwrap_or(1).clamp(1, bytes.len()));
                let taken = decoder.fill(&mut piece).unwrap();
                assert!(taken > 0, "no room is left although no message is whole");
                bytes = &bytes[taken..];
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn every_message_survives_the_round_trip(message in message(), session: u32) {
        let bytes = message.encode(session);
        prop_assert!(bytes.len() <= HEADER + MAX_TEXT);
        prop_assert_eq!(decode(&bytes, std::iter::repeat(usize::MAX)), (vec![(session, message)], None));
    }

    #[test]
    fn a_truncated_message_is_never_a_message(message in message(), session: u32) {
        let bytes = message.encode(session);
        for length in 0..bytes.len() {
            let (found, problem) = decode(&bytes[..length], std::iter::repeat(usize::MAX));
            prop_assert!(found.is_empty() && problem.is_none(), "{} of {} bytes: {:?}", length, bytes.len(), problem);
        }
    }

    #[test]
    fn it_does_not_matter_how_bytes_are_cut_up(
        messages in vec((any::<u32>(), message()), 1..6),
        pieces in vec(1..200usize, 0..40),
        (place, value) in (any::<prop::sample::Index>(), any::<u8>()),
        damaged: bool,
    ) {
        let mut bytes: Vec<u8> = messages.iter().flat_map(|(session, message)| message.encode(*session)).collect();
        if damaged {
            let place = place.index(bytes.len());
            bytes[place] = value;
        }
        let whole = decode(&bytes, std::iter::repeat(usize::MAX));
        if !damaged {
            prop_assert_eq!(&whole, &(messages, None));
        }
        prop_assert_eq!(&whole, &decode(&bytes, pieces.into_iter()));
        prop_assert_eq!(&whole, &decode(&bytes, std::iter::empty()));
    }

    #[test]
    fn no_bytes_make_it_panic(bytes in vec(any::<u8>(), 0..3000), pieces in vec(1..2000usize, 0..20)) {
        decode(&bytes, pieces.into_iter());
    }

    #[test]
    fn no_body_makes_it_panic(kind in 0..14u16, body in vec(any::<u8>(), 0..200), stated in 0..1200u32, honest: bool) {
        let mut bytes = Message::Ready.encode(9);
        let length = if honest { body.len() as u32 } else { stated };
        bytes[6..8].copy_from_slice(&kind.to_le_bytes());
        bytes[8..12].copy_from_slice(&length.to_le_bytes());
        bytes.extend(body);
        decode(&bytes, std::iter::empty());
    }
}

fn damaged(offset: usize, bytes: &[u8]) -> Problem {
    let mut message = Message::Keys(Keys { address: 1, size: 1, rkey: 1 }).encode(1);
    message[offset..offset + bytes.len()].copy_from_slice(bytes);
    decode(&message, std::iter::repeat(usize::MAX)).1.expect("a problem")
}

#[test]
fn a_headers_problems_name_both_values() {
    for (problem, found, expected) in [
        (damaged(0, b"GET "), "\"GET \"", "\"CTP1\""),
        (damaged(4, &[2, 0]), "version 2", "version 1"),
        (damaged(4, &[0, 0]), "version 0", "version 1"),
        (damaged(6, &[0, 0]), "kind 0", "1 to 12"),
        (damaged(6, &[13, 0]), "kind 13", "1 to 12"),
        (damaged(8, &[0xFF; 4]), "4294967295 bytes", "1024"),
        (damaged(8, &1025u32.to_le_bytes()), "1025 bytes", "1024"),
        (damaged(8, &19u32.to_le_bytes()), "19 bytes", "20"),
    ] {
        let text = problem.to_string();
        assert!(text.contains(found) && text.contains(expected), "{text}");
    }
}

#[test]
fn a_problem_shows_before_the_rest_has_come() {
    let first = |bytes: &[u8]| decode(bytes, std::iter::empty()).1;
    assert_eq!(first(b"GET"), None);
    assert!(first(b"GET ").is_some_and(|problem| problem.is_stranger()));
    assert_eq!(first(b"CTP1\x02\0"), Some(Problem::Version { found: 2 }));
    assert_eq!(first(b"CTP1\x01\0\x63\0"), Some(Problem::Kind { found: 99 }));
    let long = Problem::Long { kind: Kind::Hello, length: u32::MAX };
    assert_eq!(first(b"CTP1\x01\0\x01\0\xFF\xFF\xFF\xFF"), Some(long));
}

#[test]
fn the_longest_message_fits_and_progress_is_told() {
    let mut bytes = Message::Ready.encode(5);
    bytes[8..12].copy_from_slice(&(MAX_BODY as u32).to_le_bytes());
    let mut decoder = Decoder::new();
    assert_eq!(decoder.progress(), (0, HEADER));
    decoder.fill(&mut &bytes[..10]).unwrap();
    assert_eq!((decoder.next(), decoder.progress()), (Ok(None), (10, HEADER)));
    decoder.fill(&mut &bytes[10..]).unwrap();
    assert_eq!((decoder.next(), decoder.progress()), (Ok(None), (HEADER, HEADER + MAX_BODY)));
    decoder.fill(&mut &[0; MAX_BODY][..]).unwrap();
    assert_eq!(decoder.fill(&mut &b"more"[..]).unwrap(), 0, "there is no room beyond the longest message");
    assert_eq!(decoder.next(), Ok(Some((5, Message::Ready))));
    assert_eq!(decoder.progress(), (0, HEADER));
}

/// Found by the corpus of the fuzz targets: with just as many bytes as a native header it was said to be whole.
#[test]
fn what_may_become_a_catalyst_message_is_short_of_its_length() {
    for length in [HEADER - 1, HEADER, HEADER + 1, catalyst_message::LENGTH - 1] {
        let mut decoder = Decoder::new();
        decoder.fill(&mut &[0x12, 0, 0, 0].repeat(16)[..length]).unwrap();
        assert_eq!(decoder.next(), Ok(None));
        let needed = if length < HEADER { HEADER } else { catalyst_message::LENGTH };
        assert_eq!(decoder.progress(), (length, needed));
    }
}
