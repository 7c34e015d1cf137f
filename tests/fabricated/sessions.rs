//! What one session must not leave to the next, and what a peer must not find.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use catalyst_transport::fabricated::{Installed, Plan, Verb};
use catalyst_transport::{FunctionError, MemKind, Request, TransportError, TransportSession};

use crate::support::{Pair, assert_clean, assert_says, guarded, payload};

/// Memory that outlives the sessions which it is given to.
fn memory(bytes: u64) -> std::os::fd::OwnedFd {
    let memory = rustix::fs::memfd_create("given memory", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&memory, bytes).unwrap();
    memory
}

fn fill(memory: &std::os::fd::OwnedFd, bytes: &[u8]) {
    assert_eq!(rustix::io::pwrite(memory, bytes, 0).unwrap(), bytes.len());
}

fn contents(memory: &std::os::fd::OwnedFd, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    assert_eq!(rustix::io::pread(memory, &mut bytes, 0).unwrap(), length);
    bytes
}

/// A pair whose controller's ring is in this memory, opened.
fn pair_in(memory: &std::os::fd::OwnedFd, names: [&str; 2]) -> Pair {
    let mut pair = Pair::new(names, |config| config.depth(4).dma_buf(memory.try_clone().unwrap()));
    let desc = pair.controller_channel();
    let (controller, coprocessor) = pair.open_with(
        |session, info| {
            session.connect(info)?;
            let region = session.alloc_memory(desc.controller_bytes(), MemKind::Other)?;
            let peer = session.exchange_keys(&region)?;
            session.establish_channel(&desc, &region, &peer)?;
            session.commit_work_item(0, 64, 64)
        },
        |session, info| session.open(info),
    );
    controller.unwrap();
    coprocessor.unwrap();
    pair
}

/// One side is ready two seconds before the other: nothing is written before both have said so.
#[test]
fn nothing_is_written_before_both_sides_are_ready() {
    guarded(|| {
        let names = ["slow-a", "slow-b"];
        let devices = names.map(|name| Plan::new(name).install());
        for slow in 0..2 {
            let mut pair = Pair::new(names, |config| config);
            devices[slow].slow_changes(Duration::from_millis(700));
            let began = Instant::now();
            let (controller, coprocessor) = pair.open();
            controller.unwrap();
            coprocessor.unwrap();
            assert!(began.elapsed() >= Duration::from_secs(2));
            devices[slow].slow_changes(Duration::ZERO);
            pair.coprocessor.start().unwrap();
            pair.controller.start().unwrap();
            pair.round(b"both");
            pair.close();
            devices.iter().for_each(assert_clean);
        }
        // And where it takes longer than the handshake may, it is an error that undoes everything.
        let mut pair = Pair::new(names, |config| config.handshake_timeout(Duration::from_millis(300)));
        devices[1].slow_changes(Duration::from_millis(500));
        let (controller, coprocessor) = pair.open();
        assert!(controller.is_err() && coprocessor.is_err(), "{controller:?} {coprocessor:?}");
        assert_says(&controller.unwrap_err(), &["connect", "nothing within 3"]);
        devices[1].slow_changes(Duration::ZERO);
        devices.iter().for_each(assert_clean);
        let mut pair = Pair::new(names, |config| config);
        pair.run();
        pair.round(b"in time");
        pair.close();
    });
}

/// Sessions that are ended with rounds in flight, one after the other on the same objects: each has queue pairs and packet
/// numbers of its own, and none sees anything of the one before.
#[test]
fn two_hundred_sessions_with_rounds_in_flight_at_their_end() {
    guarded(|| {
        let device = Plan::new("renew").delivery_delay(Duration::from_micros(300)).install();
        let mut pair = Pair::new(["renew", "renew"], |config| config.depth(8));
        let mut psns = HashSet::new();
        for session in 0..200 {
            pair.run();
            let numbers = device.pair_numbers();
            assert_eq!(numbers.len(), 2);
            for (queue_pair, psn) in numbers {
                assert!((2..=0xFF_FFFF).contains(&queue_pair) && psn <= 0xFF_FFFF);
                psns.insert(psn);
            }
            for round in 0..3 {
                pair.round(&payload(session + round, 48));
            }
            for round in 0..8 {
                pair.controller.write_data_slot(&payload(session + 1000 + round, 48), 0).unwrap();
                pair.controller.kick(0).unwrap();
            }
            match session % 3 {
                0 => pair.controller.close(),
                1 => pair.coprocessor.close().unwrap(),
                _ => pair.close(),
            }
            pair.close();
            assert_clean(&device);
        }
        // Random numbers of 24 bits: 400 of them seldom meet.
        assert!(psns.len() > 390, "{} packet numbers in 400", psns.len());
    });
}

/// A reply that comes after its round was given up and the session closed: the memory is the caller's again, and stays as
/// the caller left it.
#[test]
fn memory_is_left_alone_once_the_session_has_closed() {
    guarded(|| {
        let devices = ["canary-a", "canary-b"].map(|name| Plan::new(name).dma_buf().install());
        let memory = memory(1 << 16);
        let mut pair = pair_in(&memory, ["canary-a", "canary-b"]);
        let (gate, taken) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (opened, seen) = (gate.clone(), taken.clone());
        let function = move |_: Request<'_>, reply: &mut [u8]| -> Result<usize, FunctionError> {
            seen.store(true, Ordering::SeqCst);
            while !opened.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(1));
            }
            reply.fill(0xEE);
            Ok(reply.len())
        };
        pair.coprocessor.set_coprocessor_fn(function).unwrap();
        pair.coprocessor.start().unwrap();
        pair.controller.start().unwrap();
        for _ in 0..4 {
            pair.controller.write_data_slot(b"slow", 0).unwrap();
            pair.controller.kick(0).unwrap();
        }
        while !taken.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        pair.controller.close();
        let canary = payload(7, 1 << 16);
        fill(&memory, &canary);
        gate.store(true, Ordering::SeqCst);
        // The engine sends what it has, and ends.
        let error = pair.coprocessor_end(Duration::from_secs(10));
        assert!(!error.is_recoverable(), "{error}");
        pair.close();
        assert!(contents(&memory, 1 << 16) == canary, "the old session wrote into memory that was given back");
        devices.iter().for_each(assert_clean);
    });
}

/// A ring whose memory was full of other things: of ones, and of the frames of an earlier session.
#[test]
fn old_contents_of_a_ring_are_no_replies() {
    guarded(|| {
        let device = Plan::new("stale").dma_buf().install();
        let memory = memory(1 << 16);
        fill(&memory, &vec![0xFF; 1 << 16]);
        for session in 0..6 {
            let mut pair = pair_in(&memory, ["stale", "stale"]);
            pair.controller.start().unwrap();
            // Nobody answers yet.
            pair.controller.write_data_slot(&payload(session, 33), 0).unwrap();
            pair.controller.kick(0).unwrap();
            for _ in 0..100 {
                assert_eq!(pair.controller.try_collect(&mut [&mut [0; 64]]), Ok(None));
            }
            pair.coprocessor.start().unwrap();
            assert_eq!(pair.controller.collect_reply().unwrap(), payload(session, 33));
            // Leaves whole replies with the numbers that the next session waits for first.
            (0..5).for_each(|round| pair.round(&payload(session + round, 64)));
            pair.close();
        }
        assert_clean(&device);
    });
}

/// A region of exactly the bytes that the channel needs serves to its last byte; one byte less is refused, on either side.
#[test]
fn regions_are_used_to_their_last_byte_and_no_further() {
    guarded(|| {
        let device = Plan::new("exact").install();
        for less in [0, 1] {
            let shape =
                |config: catalyst_transport::SessionConfig| config.depth(2).request_capacity(5000).reply_capacity(300);
            let mut pair = Pair::new(["exact", "exact"], shape);
            let desc = pair.controller_channel();
            let peers = desc.clone();
            let (controller, coprocessor) = pair.open_with(
                |session, info| {
                    session.connect(info)?;
                    let region = session.alloc_memory(desc.controller_bytes() - less, MemKind::CpuRam)?;
                    assert_eq!(region.size, desc.controller_bytes() - less);
                    let peer = session.exchange_keys(&region)?;
                    let established = session.establish_channel(&desc, &region, &peer);
                    if established.is_err() {
                        session.close();
                    }
                    established.and_then(|()| session.commit_work_item(0, 5000, 300))
                },
                |session, info| {
                    session.connect(info)?;
                    let region = session.alloc_memory(peers.coprocessor_bytes(), MemKind::CpuRam)?;
                    let peer = session.exchange_keys(&region)?;
                    session.establish_channel(&peers, &region, &peer)
                },
            );
            if less == 1 {
                for (error, region) in
                    [(controller.unwrap_err(), "local region"), (coprocessor.unwrap_err(), "peer region")]
                {
                    assert!(
                        matches!(error, TransportError::Invalid { .. } | TransportError::PeerClosed { .. }),
                        "{error}"
                    );
                    if let TransportError::Invalid { .. } = error {
                        assert_says(&error, &[region, "the channel needs"]);
                    }
                }
                pair.close();
                continue;
            }
            controller.unwrap();
            coprocessor.unwrap();
            let answer = |request: Request<'_>, reply: &mut [u8]| -> Result<usize, FunctionError> {
                reply.copy_from_slice(&request.payload[request.payload.len() - 300..]);
                Ok(300)
            };
            pair.coprocessor.set_coprocessor_fn(answer).unwrap();
            pair.coprocessor.start().unwrap();
            pair.controller.start().unwrap();
            for round in 0..9 {
                let request = payload(round, 5000);
                pair.controller.write_data_slot(&request, 0).unwrap();
                pair.controller.kick(0).unwrap();
                assert_eq!(pair.controller.collect_reply().unwrap(), &request[4700..]);
            }
            pair.close();
        }
        assert_clean(&device);
    });
}

/// Closing is idempotent in every state, and after every failure.
#[test]
fn closing_again_does_nothing() {
    guarded(|| {
        let device = Plan::new("twice-closed").install();
        let mut pair = Pair::new(["twice-closed", "twice-closed"], |config| config);
        let close_all = |pair: &mut Pair, device: &Installed| {
            for _ in 0..3 {
                pair.close();
                pair.controller.stop().unwrap();
                pair.coprocessor.stop().unwrap();
                let journal = device.journal().len();
                pair.close();
                assert_eq!(device.journal().len(), journal, "a second close did something");
                assert_clean(device);
            }
        };
        close_all(&mut pair, &device);
        pair.run();
        close_all(&mut pair, &device);
        for (verb, nth) in [(Verb::CreateQp, 1), (Verb::ModifyQp, 4), (Verb::RegMr, 3)] {
            device.fail(verb, nth, libc::EIO);
            let (controller, coprocessor) = pair.open();
            assert!(controller.is_err() && coprocessor.is_err());
            close_all(&mut pair, &device);
        }
        pair.run();
        device.complete_with(1, 12);
        pair.failing_round();
        close_all(&mut pair, &device);
        pair.run();
        pair.round(b"closed well");
        pair.close();
        assert_clean(&device);
    });
}

/// Registered memory is marked so that a child process does not get it: its pages are never copied on a write of the parent's.
#[test]
fn registered_memory_is_kept_out_of_child_processes() {
    guarded(|| {
        let device = Plan::new("fork").install();
        let mut pair = Pair::new(["fork", "fork"], |config| config);
        let desc = pair.controller_channel();
        let mut flags = String::new();
        let found = &mut flags;
        let (controller, coprocessor) = pair.open_with(
            |session, info| {
                session.connect(info)?;
                let region = session.alloc_memory(desc.controller_bytes(), MemKind::CpuRam)?;
                let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
                let mut inside = false;
                for line in maps.lines() {
                    let range = line.split(' ').next().and_then(|word| word.split_once('-'));
                    let address = |text| u64::from_str_radix(text, 16).ok();
                    if let Some((Some(from), Some(to))) = range.map(|(from, to)| (address(from), address(to))) {
                        inside = (from..to).contains(&region.addr);
                    } else if let Some(all) = line.strip_prefix("VmFlags:").filter(|_| inside) {
                        *found = all.to_owned();
                    }
                }
                let peer = session.exchange_keys(&region)?;
                session.establish_channel(&desc, &region, &peer)?;
                session.commit_work_item(0, 64, 64)
            },
            |session, info| session.open(info),
        );
        controller.unwrap();
        coprocessor.unwrap();
        assert!(flags.split_whitespace().any(|flag| flag == "dc"), "the region's flags are '{flags}'");
        // Children come and go while rounds pass.
        pair.coprocessor.start().unwrap();
        pair.controller.start().unwrap();
        for round in 0..20 {
            let mut child = std::process::Command::new("true").spawn().unwrap();
            (0..50).for_each(|index| pair.round(&payload(round * 50 + index, 64)));
            assert!(child.wait().unwrap().success());
        }
        pair.close();
        assert_clean(&device);
    });
}
