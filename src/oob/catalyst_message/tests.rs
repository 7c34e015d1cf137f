use proptest::prelude::*;

use super::*;

fn gid(last: u8) -> [u8; 16] {
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF, 10, 9, 0, last]
}

fn vectors() -> [(&'static str, CatalystMessage); 2] {
    [
        (
            "coprocessor",
            CatalystMessage {
                forward: PairEnd { queue_pair: 0x12, psn: 0, gid: gid(1) },
                backward: PairEnd { queue_pair: 0x13, psn: 0, gid: gid(1) },
                address: 0x7F12_3456_7000,
                rkey: 0x89AB_CDEF,
                mtu: 3,
            },
        ),
        (
            "controller",
            CatalystMessage {
                forward: PairEnd { queue_pair: 0x00AB_CDEF, psn: 0x00AB_CDEF, gid: gid(2) },
                backward: PairEnd { queue_pair: 0x00AB_CDF0, psn: 0x00AB_CDF0, gid: gid(2) },
                address: 0xFFFF_8877_6655_4000,
                rkey: 1,
                mtu: 5,
            },
        ),
    ]
}

/// The vectors of the document, which were not written by this code.
#[test]
fn bytes_are_those_of_the_document() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/wire-protocol.md");
    let document = std::fs::read_to_string(path).unwrap();
    let block =
        document.split("```catalyst-vectors\n").nth(1).expect("a block of vectors").split("```").next().unwrap();
    let mut lines: Vec<_> = block.lines().filter(|line| !line.starts_with("frame_")).collect();
    for (name, message) in vectors() {
        let at = lines.iter().position(|line| line.starts_with(&format!("{name}:"))).expect(name);
        let (_, hex) = lines.remove(at).split_once(':').unwrap();
        let digits: Vec<u8> = hex.chars().filter_map(|c| c.to_digit(16)).map(|digit| digit as u8).collect();
        let bytes: Vec<u8> = digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect();
        assert_eq!(message.encode()[..], bytes, "{name} is written differently");
        assert_eq!(CatalystMessage::decode(bytes[..].try_into().unwrap()), Ok(message), "{name} is read differently");
    }
    assert!(lines.is_empty(), "the document has more vectors: {lines:?}");
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let changes: [(usize, &[u8], &str); 12] = [
        (0, &[0; 4], "forward queue pair is 0"),
        (0, &[1, 0, 0, 0], "forward queue pair is 1"),
        (3, &[1], "forward queue pair is 16777234"),
        (8, &[0; 16], "forward GID is 0"),
        (24, &[0; 4], "backward queue pair is 0"),
        (27, &[0x80], "backward queue pair is 2147483667"),
        (32, &[0; 16], "backward GID is 0"),
        (48, &[0xFF; 8], "address is 0xffffffffffffffff"),
        (48, &[0x00, 0xC0, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF], "address is 0xffffffffffffc000"),
        (60, &[0], "mtu is 0"),
        (60, &[6], "mtu is 6"),
        (63, &[1], "mtu is 16777219"),
    ];
    for (offset, bytes, text) in changes {
        let mut changed = vectors()[0].1.encode();
        changed[offset..offset + bytes.len()].copy_from_slice(bytes);
        let problem = CatalystMessage::decode(&changed).expect_err(text).to_string();
        assert!(problem.starts_with(text) && problem.contains("must be"), "{text} is not said in: {problem}");
        assert_eq!(recognise(&changed), Some(false));
    }
}

/// Only the low 24 bits of a packet sequence number count, and an address may be 0: a device may count from there.
#[test]
fn what_a_device_may_send_is_taken() {
    let mut bytes = vectors()[0].1.encode();
    bytes[4..8].copy_from_slice(&0xFF12_3456_u32.to_le_bytes());
    bytes[48..56].fill(0);
    let message = CatalystMessage::decode(&bytes).unwrap();
    assert_eq!((message.forward.psn, message.address), (0x0012_3456, 0));
}

#[test]
fn a_native_peer_is_found_by_its_first_bytes() {
    let mut bytes = vectors()[0].1.encode();
    bytes[..4].copy_from_slice(b"CTP1");
    assert_eq!(CatalystMessage::decode(&bytes), Err(Problem::Native));
    assert_eq!(refuse_native(b"CTP1\x01"), Err(Problem::Native));
    assert_eq!((refuse_native(b"CTP"), refuse_native(b"")), (Ok(()), Ok(())));
    assert_eq!((recognise(b"CTP1"), recognise(b"GET "), recognise(&[5, 0, 0, 0])), (Some(false), Some(false), None));
}

proptest! {
    /// Whatever 64 bytes come, they are refused or read as what they say.
    #[test]
    fn no_bytes_make_it_panic(bytes in any::<[u8; LENGTH]>(), mend in any::<bool>()) {
        let mut bytes = bytes;
        // Nearly all random bytes fail at the first field: help some past it.
        if mend {
            (bytes[3], bytes[27], bytes[55]) = (0, 0, 0);
            let mtu = 1 + bytes[60] % 5;
            bytes[60..].copy_from_slice(&[mtu, 0, 0, 0]);
        }
        if let Ok(message) = CatalystMessage::decode(&bytes) {
            bytes[7] = 0;
            bytes[31] = 0;
            prop_assert_eq!(message.encode(), bytes);
        }
    }

    #[test]
    fn every_message_survives_the_round_trip(
        pairs in any::<[(u32, u32, [u8; 16]); 2]>(),
        address in 0..=u64::MAX - REGION_BYTES,
        rkey: u32,
        mtu in 1..=5_u8,
    ) {
        let end = |(queue_pair, psn, mut gid): (u32, u32, [u8; 16])| {
            gid[0] |= 1;
            PairEnd { queue_pair: queue_pair % (MAX_24_BITS - 1) + 2, psn: psn & MAX_24_BITS, gid }
        };
        let message = CatalystMessage { forward: end(pairs[0]), backward: end(pairs[1]), address, rkey, mtu };
        prop_assert_eq!(CatalystMessage::decode(&message.encode()), Ok(message));
        prop_assert_eq!(recognise(&message.encode()), Some(true));
    }
}
