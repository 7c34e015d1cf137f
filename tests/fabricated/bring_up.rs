//! Every control verb made to fail at every call of the bring-up, on either side.

use std::time::{Duration, Instant};

use catalyst_transport::fabricated::{Entry, Installed, Plan, Verb};
use catalyst_transport::{TransportError, TransportSession, Wire};

use crate::support::{Pair, assert_clean, assert_release_order, assert_says, guarded, pair_seeing, payload};

/// Error numbers that each verb of the bring-up may give, from the manual pages and from what kernels and providers do.
const FAULTS: &[(Verb, &[i32])] = &[
    (Verb::OpenDevice, &[libc::EACCES, libc::EPERM, libc::ENOENT, libc::ENODEV, libc::ENOMEM, libc::EMFILE]),
    (Verb::QueryDevice, &[libc::EIO, libc::EINVAL, libc::ENOMEM, libc::ENODEV]),
    (Verb::QueryPort, &[libc::EINVAL, libc::EIO, libc::ENODEV]),
    (Verb::AllocPd, &[libc::ENOMEM, libc::EAGAIN, libc::EPERM, libc::EIO]),
    (Verb::CreateCq, &[libc::ENOMEM, libc::EINVAL, libc::ENOSYS, libc::EIO]),
    (Verb::CreateQp, &[libc::ENOMEM, libc::EPERM, libc::EOPNOTSUPP, libc::ENOSYS, libc::EIO]),
    (
        Verb::ModifyQp,
        &[libc::EINVAL, libc::ENOMEM, libc::ETIMEDOUT, libc::EHOSTUNREACH, libc::ENETUNREACH, libc::EIO, libc::EPERM],
    ),
    (Verb::RegMr, &[libc::ENOMEM, libc::EINVAL, libc::EFAULT, libc::EAGAIN, libc::EPERM, libc::EOPNOTSUPP]),
];

/// How often one bring-up calls the verb.
fn calls_in(journal: &[Entry], verb: Verb) -> u64 {
    let released = journal.iter().position(|entry| entry.verb == Verb::DestroyQp).unwrap_or(journal.len());
    let count = |verb| journal[..released].iter().filter(|entry| entry.verb == verb).count() as u64;
    // The last change of each queue pair's state belongs to the closing.
    count(verb) - if verb == Verb::ModifyQp { count(Verb::CreateQp) } else { 0 }
}

/// Fails every verb at every call on the `faulty` one of two devices.
fn fail_everywhere(names: [&'static str; 2], faulty: usize, wire: Wire) {
    let devices = names.map(|name| Plan::new(name).install());
    // On the Catalyst wire a coprocessor goes on to the next client until its time is over: so less of it, and one error
    // number for each step.
    let catalyst = wire == Wire::Catalyst;
    let mut pair = Pair::new(names, |config| match wire {
        Wire::Catalyst => config.wire(wire).handshake_timeout(Duration::from_secs(2)),
        _ => config,
    });
    pair.run();
    pair.round(b"unharmed");
    pair.close();
    let journal = devices[faulty].journal();
    let mut tried = 0;
    for (verb, errnos) in FAULTS {
        let occurrences = calls_in(&journal, *verb);
        assert!(occurrences > 0, "{verb:?} is not called");
        for nth in 1..=occurrences {
            for errno in errnos.iter().take(if catalyst { 1 } else { usize::MAX }) {
                attempt(&mut pair, &devices, (names, faulty, wire), (*verb, nth, *errno));
                tried += 1;
            }
        }
    }
    assert!(tried > if catalyst { 10 } else { 50 }, "{tried}");
}

fn attempt(
    pair: &mut Pair,
    devices: &[Installed; 2],
    (names, faulty, wire): ([&str; 2], usize, Wire),
    fault: (Verb, u64, i32),
) {
    let (verb, nth, errno) = fault;
    devices.iter().for_each(Installed::clear_journal);
    devices[faulty].fail(verb, nth, errno);
    let began = Instant::now();
    let (controller, coprocessor) = pair.open();
    assert!(began.elapsed() < Duration::from_secs(5), "{fault:?} took {:?}", began.elapsed());
    assert_eq!(devices[faulty].pending_faults(), 0, "{fault:?} did not come about: {controller:?} {coprocessor:?}");
    let (own, peer) = if faulty == 0 { (controller, coprocessor) } else { (coprocessor, controller) };
    let error = own.expect_err("the fault has to be told");
    assert_says(&error, &[verb.name(), names[faulty], &format!("(os error {errno})")]);
    let TransportError::Verbs(failure) = &error else { panic!("{error:?}") };
    assert_ne!(failure.remedy, "", "{fault:?} has no remedy");
    // From the domain on the place is known.
    if !matches!(verb, Verb::OpenDevice | Verb::QueryDevice | Verb::QueryPort) {
        assert_says(&error, &["port 1", "10.77.0.1"]);
    }
    if errno == libc::ENOMEM && matches!(verb, Verb::RegMr | Verb::CreateCq | Verb::CreateQp | Verb::AllocPd) {
        assert_says(&error, &["memlock", "ulimit -l", "LimitMEMLOCK"]);
    }
    assert!(!error.to_string().contains("os error 18"), "errno was read where the verb does not set it: {error}");
    match peer {
        // A peer that was already in the handshake is told the reason.
        Err(peer @ TransportError::PeerRefused { .. }) => assert_says(&peer, &[verb.name()]),
        Err(peer) => assert!(!peer.to_string().is_empty()),
        // The Catalyst wire has no word for it: the peer finds the connection closed when it looks.
        Ok(()) => assert_eq!(wire, Wire::Catalyst),
    }
    pair.close();
    for device in devices {
        assert_clean(device);
        assert_release_order(&device.journal());
    }
    // The same sessions work once the fault is gone.
    pair.run();
    pair.round(b"mended..");
    pair.close();
    devices.iter().for_each(assert_clean);
}

#[test]
fn every_verb_of_the_bring_up_fails_on_the_controller() {
    guarded(|| fail_everywhere(["up-ca", "up-cb"], 0, Wire::Native));
}

#[test]
fn every_verb_of_the_bring_up_fails_on_the_coprocessor() {
    guarded(|| fail_everywhere(["up-pa", "up-pb"], 1, Wire::Native));
}

#[test]
fn every_verb_of_the_catalyst_bring_up_fails_on_either_side() {
    guarded(|| fail_everywhere(["up-wa", "up-wb"], 0, Wire::Catalyst));
    guarded(|| fail_everywhere(["up-wc", "up-wd"], 1, Wire::Catalyst));
}

#[test]
fn a_queue_pair_of_no_size_at_all_is_refused_by_name() {
    guarded(|| {
        let device = Plan::new("no-size").install();
        let mut pair = Pair::new(["no-size", "no-size"], |config| config);
        device.fail(Verb::CreateQp, 0, libc::EINVAL);
        let (controller, coprocessor) = pair.open();
        let errors = [controller.unwrap_err(), coprocessor.unwrap_err()];
        let own = errors.iter().find(|error| matches!(error, TransportError::Verbs(_))).expect("one side tells");
        assert_says(own, &["ibv_create_qp", "no-size", "os error 22", "smaller depth"]);
        device.heal();
        assert_clean(&device);
        pair.run();
        pair.round(b"sized");
        pair.close();
        assert_clean(&device);
    });
}

/// The probe is the first write: refused at the post on either side, it is told to both.
#[test]
fn a_refused_probe_undoes_the_bring_up() {
    guarded(|| {
        let names = ["first-a", "first-b"];
        let devices = names.map(|name| Plan::new(name).install());
        let mut pair = Pair::new(names, |config| config.liveness(Duration::from_millis(300)));
        for (faulty, device) in devices.iter().enumerate() {
            for errno in [libc::EINVAL, libc::EIO, libc::EFAULT, libc::ENODEV, libc::ENOMEM] {
                devices.iter().for_each(Installed::clear_journal);
                // A full queue is waited for, so it has to stay full.
                device.fail(Verb::PostSend, u64::from(errno != libc::ENOMEM), errno);
                let (controller, coprocessor) = pair.open();
                let (own, peer) = if faulty == 0 { (controller, coprocessor) } else { (coprocessor, controller) };
                let own = own.unwrap_err();
                assert_says(&own, &["ibv_post_send", names[faulty], &format!("os error {errno}"), "port 1"]);
                let TransportError::Verbs(failure) = &own else { panic!("{own:?}") };
                assert_ne!(failure.remedy, "");
                assert_says(&peer.unwrap_err(), &["ibv_post_send"]);
                device.heal();
                for device in &devices {
                    assert_clean(device);
                    assert_release_order(&device.journal());
                }
                pair.run();
                pair.round(b"mended");
                pair.close();
            }
        }
        devices.iter().for_each(assert_clean);
    });
}

#[test]
fn the_device_list_fails() {
    guarded(|| {
        let device = Plan::new("list").install();
        let mut pair = Pair::new(["list", "list"], |config| config);
        for errno in [libc::ENOMEM, libc::EPERM, libc::EACCES, libc::EMFILE, libc::ENOSYS, libc::ENOENT] {
            for nth in 1..=2 {
                device.fail(Verb::GetDeviceList, nth, errno);
                let (controller, coprocessor) = pair.open();
                let error = [controller, coprocessor].into_iter().find_map(|result| match result {
                    Err(TransportError::PeerRefused { .. } | TransportError::Engine { .. }) | Ok(()) => None,
                    Err(error) => Some(error),
                });
                let error = error.expect("one side tells");
                match errno {
                    // What a kernel without RDMA says.
                    libc::ENOSYS | libc::ENOENT => assert!(matches!(error, TransportError::Device { .. }), "{error}"),
                    _ => assert_says(&error, &["ibv_get_device_list", &format!("(os error {errno})")]),
                }
                device.heal();
                pair.run();
                pair.round(b"listed");
                pair.close();
                assert_clean(&device);
            }
        }
    });
}

#[test]
fn an_entry_that_cannot_be_read_is_a_hole_and_never_an_end() {
    guarded(|| {
        let devices = [Plan::new("hole-a").unreadable_holes().install(), Plan::new("hole-b").install()];
        for verb in
            [Verb::QueryGid, Verb::QueryPkey, Verb::GidAttributes, Verb::QueryQpDataInOrder, Verb::GetDeviceName]
        {
            for nth in 1..=3 {
                for errno in [libc::EINVAL, libc::EIO, libc::ENODATA] {
                    let mut pair = Pair::new(["hole-a", "hole-b"], |config| config);
                    devices[0].fail(verb, nth, errno);
                    match pair.open() {
                        (Ok(()), Ok(())) => {
                            pair.coprocessor.start().unwrap();
                            pair.controller.start().unwrap();
                            pair.round(&payload(3, 60));
                        }
                        // The entry that is needed: then the error has to say so, with the device or its list.
                        (Err(error), _) => assert_says(&error, &["hole-a"]),
                        (_, Err(error)) => panic!("{error}"),
                    }
                    pair.close();
                    devices[0].heal();
                    devices.iter().for_each(assert_clean);
                }
            }
        }
    });
}

#[test]
fn a_device_that_cannot_be_opened_is_told_even_beside_one_that_can() {
    guarded(|| {
        let devices = [Plan::new("beside-a").install(), Plan::new("beside-b").install()];
        let seen: [&[&str]; 2] = [&["beside-a", "beside-b"], &["beside-b"]];
        let mut pair = pair_seeing(["beside-a", "beside-b"], seen, |config| config);
        devices[0].fail(Verb::OpenDevice, 1, libc::EACCES);
        let (controller, _) = pair.open();
        assert_says(&controller.unwrap_err(), &["ibv_open_device", "beside-a", "os error 13", "permission"]);
        // A neighbour that cannot be opened does no harm.
        devices[1].fail(Verb::OpenDevice, 1, libc::EACCES);
        let mut pair =
            pair_seeing(["beside-a", "beside-a"], [&["beside-b", "beside-a"], &["beside-a"]], |config| config);
        pair.run();
        pair.round(b"beside");
        pair.close();
        devices.iter().for_each(assert_clean);
    });
}

#[test]
fn what_cannot_be_released_neither_hangs_nor_panics() {
    guarded(|| {
        for (index, verb) in
            [Verb::DestroyQp, Verb::DestroyCq, Verb::DeregMr, Verb::DeallocPd, Verb::CloseDevice, Verb::ModifyQp]
                .into_iter()
                .enumerate()
        {
            for errno in [libc::EBUSY, libc::EIO, libc::EINVAL] {
                let name = format!("busy-{index}-{errno}");
                let device = Plan::new(&name).install();
                let mut pair = Pair::new([&name, &name], |config| config);
                pair.run();
                pair.round(b"before");
                device.fail(verb, 0, errno);
                let began = Instant::now();
                pair.close();
                assert!(began.elapsed() < Duration::from_secs(5), "{verb:?}: {:?}", began.elapsed());
                device.heal();
                assert_eq!(device.violations(), Vec::<String>::new(), "{verb:?}");
                // Beside what was left over, the same sessions work.
                let before = device.open_objects();
                pair.run();
                pair.round(b"after");
                drop(pair);
                assert_eq!(device.open_objects(), before);
            }
        }
    });
}

#[test]
fn a_release_that_fails_while_a_panic_unwinds_does_not_abort() {
    guarded(|| {
        let device = Plan::new("unwind").install();
        let mut pair = Pair::new(["unwind", "unwind"], |config| config);
        pair.run();
        for verb in [Verb::DestroyQp, Verb::DestroyCq, Verb::DeregMr, Verb::DeallocPd, Verb::CloseDevice] {
            device.fail(verb, 0, libc::EBUSY);
        }
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
            let _pair = pair;
            std::panic::resume_unwind(Box::new("on purpose"));
        }));
        assert!(caught.is_err());
        assert_eq!(device.violations(), Vec::<String>::new());
    });
}
