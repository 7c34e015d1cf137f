//! Plain sessions, the send queue, and memory of other kinds.

use std::time::{Duration, Instant};

use catalyst_transport::fabricated::{Plan, Verb};
use catalyst_transport::{MemKind, TransportError, TransportSession};

use crate::support::{Pair, assert_clean, assert_release_order, assert_says, guarded, guarded_alone, payload};

#[test]
fn ten_thousand_rounds_on_one_device() {
    guarded_alone(|| {
        let device = Plan::new("many").install();
        let mut pair = Pair::new(["many", "many"], |config| config);
        pair.run();
        // One at a time, then many in flight.
        (0..2000).for_each(|round| pair.round(&payload(round, round % 65)));
        let mut next = 2000;
        while next < 10_000 {
            let burst = next..(next + 1 + next % 64).min(10_000);
            for round in burst.clone() {
                pair.controller.write_data_slot(&payload(round, round % 65), 0).unwrap();
                pair.controller.kick(0).unwrap();
            }
            for round in burst.clone() {
                assert_eq!(pair.controller.collect_reply().unwrap(), payload(round, round % 65));
            }
            next = burst.end;
        }
        // The last one is counted when its reply has left.
        let deadline = Instant::now() + Duration::from_secs(1);
        while pair.coprocessor.served() < 10_000 && Instant::now() < deadline {
            std::thread::yield_now();
        }
        assert_eq!(pair.coprocessor.served(), 10_000);
        pair.close();
        assert_clean(&device);
    });
}

#[test]
fn payloads_of_every_size_class_at_every_depth() {
    guarded_alone(|| {
        let devices = [Plan::new("size-a").install(), Plan::new("size-b").install()];
        for depth in [1, 4, 64] {
            let largest = 300_000;
            let mut pair = Pair::new(["size-a", "size-b"], |config| {
                config.depth(depth).request_capacity(largest).reply_capacity(largest)
            });
            pair.run();
            // Around the inline limit, around the MTU, and large; more rounds than there are slots.
            let lengths = [0, 1, 7, 8, 203, 204, 205, 1007, 1008, 1009, 4096, 65_537, largest];
            for round in 0..lengths.len() * 3 {
                pair.round(&payload(round, lengths[round % lengths.len()]));
            }
            pair.close();
        }
        devices.iter().for_each(assert_clean);
    });
}

#[test]
fn a_full_window_comes_back_in_order() {
    guarded(|| {
        let device = Plan::new("window").install();
        for depth in [1, 2, 64] {
            let mut pair = Pair::new(["window", "window"], |config| config.depth(depth));
            pair.run();
            for turn in 0..20 {
                for index in 0..depth as usize {
                    pair.controller.write_data_slot(&payload(turn + index, 40), 0).unwrap();
                    pair.controller.kick(0).unwrap();
                }
                let full = pair.controller.write_data_slot(&[1], 0).unwrap_err();
                assert!(matches!(full, TransportError::WindowFull { .. }), "{full}");
                for index in 0..depth as usize {
                    assert_eq!(pair.controller.collect_reply().unwrap(), payload(turn + index, 40));
                }
            }
            pair.close();
        }
        assert_clean(&device);
    });
}

#[test]
fn sessions_are_made_again_and_again() {
    guarded(|| {
        let devices = [Plan::new("again-a").install(), Plan::new("again-b").install()];
        let mut pair = Pair::new(["again-a", "again-b"], |config| config);
        for round in 0..50 {
            devices.iter().for_each(|device| device.clear_journal());
            pair.run();
            pair.round(&payload(round, 64));
            pair.close();
            for device in &devices {
                assert_clean(device);
                assert_release_order(&device.journal());
            }
        }
    });
}

#[test]
fn inline_is_used_as_far_as_it_is_granted() {
    guarded(|| {
        for (name, granted) in [("inline-0", 0), ("inline-60", 60), ("inline-more", 4096)] {
            let device = Plan::new(name).grant_inline(granted).install();
            let mut pair = Pair::new([name, name], |config| config.request_capacity(600).reply_capacity(600));
            pair.run();
            for length in 0..600 {
                pair.round(&payload(length, length));
            }
            pair.close();
            assert_clean(&device);
        }
    });
}

#[test]
fn inline_is_stepped_down_while_the_device_refuses() {
    guarded(|| {
        for (name, limit, attempts) in
            [("step-219", 219, 2), ("step-60", 60, 3), ("step-0", 0, 4), ("step-220", 220, 1)]
        {
            let device = Plan::new(name).inline_limit(limit).install();
            let mut pair = Pair::new([name, name], |config| config);
            pair.run();
            pair.round(&payload(0, 64));
            assert!(device.calls(Verb::CreateQp) <= 2 * attempts, "{name}: {}", device.calls(Verb::CreateQp));
            pair.close();
            assert_clean(&device);
        }
    });
}

#[test]
fn nothing_is_lost_when_the_send_queue_is_small_and_completions_are_late() {
    guarded_alone(|| {
        for (name, depth) in [("late-2", 2), ("late-5", 5), ("late-64", 64)] {
            let device = Plan::new(name)
                .grant_send_depth(depth)
                .grant_inline(0)
                .completion_delay(Duration::from_millis(2))
                .install();
            let mut pair = Pair::new([name, name], |config| config.depth(8));
            pair.run();
            for turn in 0..100 {
                for index in 0..8 {
                    pair.controller.write_data_slot(&payload(turn * 8 + index, 33), 0).unwrap();
                    pair.controller.kick(0).unwrap();
                }
                for index in 0..8 {
                    assert_eq!(pair.controller.collect_reply().unwrap(), payload(turn * 8 + index, 33));
                }
            }
            pair.close();
            assert_clean(&device);
        }
    });
}

#[test]
fn buffers_are_left_alone_until_their_write_has_been_delivered() {
    guarded(|| {
        // Not inline: the device reads the slot a millisecond after the post.
        let device = Plan::new("reuse").grant_inline(0).delivery_delay(Duration::from_millis(1)).install();
        let mut pair = Pair::new(["reuse", "reuse"], |config| config.depth(4));
        pair.run();
        for turn in 0..60 {
            for index in 0..4 {
                pair.controller.write_data_slot(&payload(turn * 4 + index, 48), 0).unwrap();
                pair.controller.kick(0).unwrap();
            }
            for index in 0..4 {
                assert_eq!(pair.controller.collect_reply().unwrap(), payload(turn * 4 + index, 48));
            }
        }
        pair.close();
        assert_clean(&device);
    });
}

#[test]
fn a_full_queue_at_the_post_is_waited_out_or_said() {
    guarded(|| {
        let device = Plan::new("enomem").install();
        let mut pair = Pair::new(["enomem", "enomem"], |config| config.liveness(Duration::from_millis(600)));
        pair.run();
        for nth in 1..6 {
            device.fail(Verb::PostSend, nth, libc::ENOMEM);
        }
        for round in 0..20 {
            pair.round(&payload(round, 50));
        }
        assert_eq!(device.pending_faults(), 0);
        device.fail(Verb::PostSend, 0, libc::ENOMEM);
        let began = Instant::now();
        let error = pair.failing_round();
        assert!(began.elapsed() < Duration::from_secs(5));
        assert_says(&error, &["enomem", "send queue"]);
        assert!(!error.to_string().contains("memlock"), "the queue is full, not the memory: {error}");
        device.heal();
        pair.close();
        assert_clean(&device);
    });
}

#[test]
fn completions_that_never_come_are_not_waited_for_without_bound() {
    guarded(|| {
        let device = Plan::new("never").install();
        let mut pair = Pair::new(["never", "never"], |config| config.depth(2).liveness(Duration::from_millis(600)));
        pair.run();
        device.hold_completions(true);
        let began = Instant::now();
        let error = loop {
            let sent = pair.controller.write_data_slot(b"x", 0).and_then(|()| pair.controller.kick(0));
            match sent.and_then(|_| pair.controller.collect(&mut [&mut [0; 8]])) {
                Ok(_) => assert!(began.elapsed() < Duration::from_secs(20)),
                Err(error) => break error,
            }
        };
        assert!(began.elapsed() < Duration::from_secs(20));
        assert_says(&error, &["not completed", "never"]);
        pair.close();
        assert_clean(&device);
    });
}

#[test]
fn stop_is_quick_even_when_the_send_queue_is_full_and_nothing_completes() {
    guarded(|| {
        let device = Plan::new("stuck").grant_send_depth(2).install();
        let mut pair = Pair::new(["stuck", "stuck"], |config| config.stop_timeout(Duration::from_secs(1)));
        pair.run();
        pair.round(b"before");
        device.hold_completions(true);
        pair.controller.write_data_slot(b"last", 0).unwrap();
        pair.controller.kick(0).unwrap();
        let began = Instant::now();
        pair.controller.stop().unwrap();
        assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
        // The engine may be waiting for room for its reply.
        let began = Instant::now();
        pair.coprocessor.stop().unwrap();
        assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
        device.hold_completions(false);
        pair.close();
        assert_clean(&device);
    });
}

/// An engine that waits for room for a reply hears its stop and the peer's end, and what it has not sent it serves at the
/// next start.
#[test]
fn an_engine_that_waits_for_room_hears_its_stop() {
    guarded(|| {
        let names = ["room-a", "room-b"];
        let devices = [Plan::new(names[0]).install(), Plan::new(names[1]).grant_send_depth(2).install()];
        for ended_by_peer in [false, true] {
            // So long that only the stop can have ended the wait.
            let mut pair =
                Pair::new(names, |c| c.liveness(Duration::from_secs(600)).stop_timeout(Duration::from_secs(30)));
            pair.run();
            pair.round(b"before");
            devices[1].hold_completions(true);
            for round in 0..4_u8 {
                pair.controller.write_data_slot(&[round], 0).unwrap();
                pair.controller.kick(0).unwrap();
            }
            // Until the engine has sent what there was room for, and waits.
            let polls = devices[1].calls(Verb::PollCq);
            let deadline = Instant::now() + Duration::from_secs(30);
            while devices[1].calls(Verb::PollCq) < polls + 1000 {
                assert!(Instant::now() < deadline, "the engine does not wait");
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!(pair.coprocessor.served() < 5, "{}", pair.coprocessor.served());
            if ended_by_peer {
                pair.controller.close();
                let error = pair.coprocessor_end(Duration::from_secs(20));
                assert!(matches!(error, TransportError::PeerClosed { .. }), "{error}");
                devices[1].hold_completions(false);
            } else {
                pair.coprocessor.stop().unwrap();
                assert_eq!(pair.coprocessor.status(), Ok(()));
                devices[1].hold_completions(false);
                pair.coprocessor.start().unwrap();
                for round in 0..4_u8 {
                    match pair.controller.collect_reply() {
                        Ok(reply) => assert_eq!(reply, [round]),
                        // The word of the new start is late: the round is given up, and served all the same.
                        Err(error) => assert!(matches!(error, TransportError::PeerStopped { .. }), "{error}"),
                    }
                }
                let deadline = Instant::now() + Duration::from_secs(30);
                while pair.coprocessor.served() < 5 {
                    assert!(Instant::now() < deadline, "{} rounds were served", pair.coprocessor.served());
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            pair.close();
            devices.iter().for_each(assert_clean);
        }
    });
}

/// An error that `write_data_slot` meets is the session's first error, as one of `kick` is.
#[test]
fn what_writing_meets_is_kept() {
    guarded(|| {
        let device = Plan::new("kept").grant_send_depth(2).install();
        let mut pair = Pair::new(["kept", "kept"], |config| config);
        let (controller, coprocessor) = pair.open();
        controller.unwrap();
        coprocessor.unwrap();
        pair.controller.start().unwrap();
        device.delays(Duration::from_millis(100), Duration::ZERO);
        pair.controller.write_data_slot(b"first", 0).unwrap();
        device.complete_with(1, 10);
        pair.controller.kick(0).unwrap();
        // There is room for one write: this waits for its completion.
        let error = pair.controller.write_data_slot(b"second", 0).unwrap_err();
        assert_says(&error, &["IBV_WC_REM_ACCESS_ERR"]);
        assert_eq!(pair.controller.kick(0).unwrap_err(), error);
        assert_eq!(pair.controller.collect(&mut [&mut [0; 8]]).unwrap_err(), error);
        pair.close();
        assert_clean(&device);
    });
}

#[test]
fn memory_given_as_a_dma_buf_is_used_where_the_device_can() {
    guarded(|| {
        let device = Plan::new("gpu").dma_buf().install();
        let plain = Plan::new("gpu-not").install();
        for name in ["gpu", "gpu-not"] {
            let bytes = 1 << 16;
            let memory = rustix::fs::memfd_create("gpu memory", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&memory, bytes).unwrap();
            let mut pair = Pair::new([name, "gpu"], |config| config.dma_buf(memory.try_clone().unwrap()));
            let desc = pair.controller_channel();
            let (controller, coprocessor) = pair.open_with(
                |session, info| {
                    session.connect(info)?;
                    let region = session.alloc_memory(desc.controller_bytes(), MemKind::GpuHbm)?;
                    assert_eq!(region.kind, MemKind::GpuHbm);
                    let peer = session.exchange_keys(&region)?;
                    session.establish_channel(&desc, &region, &peer)?;
                    session.commit_work_item(0, 64, 64)
                },
                |session, info| session.open(info),
            );
            if name == "gpu" {
                controller.unwrap();
                coprocessor.unwrap();
                pair.coprocessor.start().unwrap();
                pair.controller.start().unwrap();
                for round in 0..200 {
                    pair.round(&payload(round, 64));
                }
                // The replies are in the descriptor's own memory.
                let mut start = vec![0; 4096];
                assert_eq!(rustix::io::pread(&memory, &mut start, 0).unwrap(), 4096);
                assert!(start.iter().any(|byte| *byte != 0));
            } else {
                let error = controller.unwrap_err();
                assert!(matches!(error, TransportError::Unsupported { .. }), "{error}");
                assert_says(&error, &["GpuHbm", "gpu-not", "cannot", "os error 95"]);
                assert!(coprocessor.is_err());
            }
            pair.close();
        }
        assert_clean(&device);
        assert_clean(&plain);
    });
}

#[test]
fn a_dma_buf_that_is_none_is_refused_by_name() {
    guarded(|| {
        let device = Plan::new("badbuf").dma_buf().install();
        for errno in [libc::EBADF, libc::EINVAL, libc::ENOMEM, libc::EFAULT] {
            let memory = rustix::fs::memfd_create("gpu memory", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&memory, 1 << 16).unwrap();
            let mut pair = Pair::new(["badbuf", "badbuf"], |config| config.dma_buf(memory.try_clone().unwrap()));
            let desc = pair.controller_channel();
            device.fail(Verb::RegDmabufMr, 1, errno);
            let (controller, _) = pair.open_with(
                |session, info| {
                    session.connect(info)?;
                    session.alloc_memory(desc.controller_bytes(), MemKind::Ddr).map(|_| ())
                },
                |session, info| session.open(info),
            );
            assert_says(
                &controller.unwrap_err(),
                &["ibv_reg_dmabuf_mr", "badbuf", &format!("os error {errno}"), "Ddr"],
            );
            pair.close();
        }
        assert_clean(&device);
    });
}
