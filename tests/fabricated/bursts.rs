//! Doorbells: how many there are, and what becomes of a burst that the device takes in part.

use std::time::{Duration, Instant};

use catalyst_transport::fabricated::{Installed, Plan};
use catalyst_transport::{TransportError, TransportSession};

use crate::support::{Pair, assert_clean, assert_says, config, guarded, guarded_alone, payload};

/// Queues `count` rounds that begin with number `from`.
fn queue(pair: &mut Pair, from: usize, count: usize) -> catalyst_transport::Result<()> {
    for round in from..from + count {
        pair.controller.write_data_slot(&payload(round, 40), 0)?;
        pair.controller.queue(0)?;
    }
    Ok(())
}

fn collect(pair: &mut Pair, from: usize, count: usize) {
    for round in from..from + count {
        assert_eq!(pair.controller.collect_reply().unwrap(), payload(round, 40), "round {round}");
    }
}

/// What has happened on a device since the last look: doorbells and writes.
struct Since<'a>(&'a Installed, u64, u64);

impl<'a> Since<'a> {
    fn now(device: &'a Installed) -> Self {
        Self(device, device.doorbells(), device.writes())
    }

    fn counts(&self) -> (u64, u64) {
        (self.0.doorbells() - self.1, self.0.writes() - self.2)
    }
}

#[test]
fn a_burst_takes_one_doorbell_and_a_lone_round_its_own() {
    guarded(|| {
        let devices = [Plan::new("bell-a").install(), Plan::new("bell-b").install()];
        let mut pair = Pair::new(["bell-a", "bell-b"], |config| config.depth(256));
        pair.run();
        let since = devices.each_ref().map(Since::now);
        for round in 0..100 {
            pair.round(&payload(round, 40));
        }
        assert_eq!(since[0].counts(), (100, 100));
        assert_eq!(since[1].counts(), (100, 100));
        let since = Since::now(&devices[0]);
        queue(&mut pair, 0, 15).unwrap();
        assert_eq!(since.counts(), (0, 0));
        pair.controller.write_data_slot(&payload(15, 40), 0).unwrap();
        pair.controller.kick(0).unwrap();
        assert_eq!(since.counts(), (1, 16));
        collect(&mut pair, 0, 16);
        // The next is alone again, and so is what any call sends of one.
        pair.round(b"alone");
        assert_eq!(since.counts(), (2, 17));
        queue(&mut pair, 0, 3).unwrap();
        assert_eq!(since.counts(), (2, 17));
        let early = pair.controller.try_collect(&mut [&mut [0; 64]]).unwrap();
        assert_eq!(since.counts(), (3, 20));
        let taken = usize::from(early.is_some());
        collect(&mut pair, taken, 3 - taken);
        queue(&mut pair, 0, 3).unwrap();
        collect(&mut pair, 0, 3);
        assert_eq!(since.counts(), (4, 23));
        // No more than 64 wait.
        queue(&mut pair, 0, 150).unwrap();
        assert_eq!(since.counts(), (6, 151));
        pair.controller.kick_queued().unwrap();
        assert_eq!(since.counts(), (7, 173));
        collect(&mut pair, 0, 150);
        pair.close();
        devices.iter().for_each(assert_clean);
    });
}

#[test]
fn replies_share_doorbells_where_requests_wait() {
    guarded_alone(|| {
        for worker in [false, true] {
            let devices = [Plan::new("share-a").install(), Plan::new("share-b").install()];
            let mut pair = Pair::new(["share-a", "share-b"], |config| config.depth(64));
            if worker {
                let config = config("share-b").depth(64);
                pair.coprocessor = catalyst_transport::CoprocessorSession::new(config).unwrap();
                pair.coprocessor
                    .set_coprocessor_launcher(catalyst_transport::thread_launcher(catalyst_transport::Echo))
                    .unwrap();
            }
            pair.run();
            pair.coprocessor.stop().unwrap();
            // How long a round takes decides how many share one; that some do is a matter of a few tries.
            let began = Instant::now();
            loop {
                queue(&mut pair, 0, 64).unwrap();
                pair.controller.kick_queued().unwrap();
                let since = Since::now(&devices[1]);
                pair.coprocessor.start().unwrap();
                collect(&mut pair, 0, 64);
                let (doorbells, writes) = since.counts();
                pair.coprocessor.stop().unwrap();
                assert_eq!(writes, 64);
                if doorbells < 64 {
                    // At most sixteen replies share one, and the first has its own.
                    assert!(doorbells >= 5, "{doorbells}");
                    break;
                }
                assert!(began.elapsed() < Duration::from_secs(30), "64 doorbells for 64 replies");
            }
            pair.close();
            devices.iter().for_each(assert_clean);
        }
    });
}

#[test]
fn a_burst_that_is_taken_in_part_for_want_of_room_is_sent_in_parts() {
    guarded(|| {
        let device = Plan::new("parts").install();
        let mut pair = Pair::new(["parts", "parts"], |config| config.depth(32));
        pair.run();
        // The coprocessor rests while the faults come about, so that they are the controller's.
        for nths in [&[1][..], &[2], &[16], &[1, 2, 3], &[5, 9, 13], &[16, 17, 18, 19]] {
            pair.coprocessor.stop().unwrap();
            let since = Since::now(&device);
            for nth in nths {
                device.fail(catalyst_transport::fabricated::Verb::PostSend, *nth, libc::ENOMEM);
            }
            queue(&mut pair, 0, 16).unwrap();
            pair.controller.kick_queued().unwrap();
            assert_eq!(device.pending_faults(), 0);
            assert_eq!(since.counts(), (1 + nths.len() as u64, 16), "{nths:?}");
            pair.coprocessor.start().unwrap();
            collect(&mut pair, 0, 16);
        }
        pair.close();
        assert_clean(&device);
    });
}

#[test]
fn a_burst_that_is_refused_in_part_says_which_rounds() {
    guarded(|| {
        use catalyst_transport::fabricated::Verb;
        let devices = [Plan::new("refuse-a").install(), Plan::new("refuse-b").install()];
        let mut pair = Pair::new(["refuse-a", "refuse-b"], |config| config.depth(32));
        for (nth, errno) in [(1, libc::EINVAL), (5, libc::EINVAL), (16, libc::EIO), (7, libc::EFAULT)] {
            pair.run();
            pair.round(b"before");
            let since = Since::now(&devices[0]);
            devices[0].fail(Verb::PostSend, nth, errno);
            queue(&mut pair, 0, 16).unwrap();
            let error = pair.controller.kick_queued().unwrap_err();
            assert!(matches!(&error, TransportError::Verbs(_)) && !error.is_recoverable(), "{error}");
            // The first round had number 1.
            let names = format!("writing frames {} to 17 of a burst", nth + 1);
            assert_says(&error, &["ibv_post_send", "refuse-a", &names, &format!("os error {errno}")]);
            assert_eq!(since.counts(), (1, nth - 1));
            // The round before and those of the burst before that frame were sent, and no other; the first error is every later call's.
            let deadline = Instant::now() + Duration::from_secs(5);
            while pair.coprocessor.served() < nth && Instant::now() < deadline {
                std::thread::yield_now();
            }
            assert_eq!(pair.coprocessor.served(), nth);
            assert_eq!(pair.controller.queue(0).unwrap_err(), error);
            assert_eq!(pair.controller.kick_queued().unwrap_err(), error);
            assert_eq!(pair.controller.collect(&mut [&mut [0; 64]]).unwrap_err(), error);
            assert_eq!(since.counts(), (1, nth - 1));
            pair.close();
            devices.iter().for_each(assert_clean);
        }
        // A queue that stays full is said like that of a single write.
        let mut pair = Pair::new(["refuse-a", "refuse-b"], |config| config.liveness(Duration::from_millis(300)));
        pair.run();
        devices[0].fail(Verb::PostSend, 0, libc::ENOMEM);
        let error = queue(&mut pair, 0, 4).and_then(|()| pair.controller.kick_queued()).unwrap_err();
        assert_says(&error, &["frames 1 to 4 of a burst", "send queue has been full"]);
        devices[0].heal();
        pair.close();
        devices.iter().for_each(assert_clean);
    });
}

#[test]
fn bursts_fit_into_any_send_queue() {
    guarded_alone(|| {
        for (name, depth) in [("fit-2", 2), ("fit-5", 5), ("fit-64", 64)] {
            let device = Plan::new(name)
                .grant_send_depth(depth)
                .grant_inline(0)
                .delivery_delay(Duration::from_micros(100))
                .completion_delay(Duration::from_millis(1))
                .install();
            let mut pair = Pair::new([name, name], |config| config.depth(128));
            pair.run();
            for turn in 0..12 {
                let count = [1, 7, 64, 100, 128][turn % 5];
                queue(&mut pair, turn * 8, count).unwrap();
                if turn % 2 == 0 {
                    pair.controller.kick_queued().unwrap();
                }
                collect(&mut pair, turn * 8, count);
            }
            pair.close();
            assert_clean(&device);
        }
    });
}
