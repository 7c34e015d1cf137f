//! Real verbs on a soft-RoCE device: the conformance suite within one process, and two processes.
//!
//! The device is named by CATALYST_TRANSPORT_DEVICE. `scripts/test` runs this file inside the RDMA lab, where a missing device is a
//! failure (CATALYST_TRANSPORT_REQUIRE_DEVICE); elsewhere its tests are skipped with the reason.
#![cfg(feature = "rdma")]

#[cfg(feature = "capi")]
#[path = "support/c_programs.rs"]
mod c_programs;
#[path = "support/catalyst.rs"]
mod catalyst;
#[path = "support/catalyst_sessions.rs"]
mod catalyst_sessions;
#[path = "support/conformance.rs"]
mod conformance;
#[path = "support/system_calls.rs"]
mod counting;
#[path = "support/device.rs"]
mod device;
#[path = "rxe/environment.rs"]
mod environment;
#[path = "support/processes.rs"]
mod processes;
#[path = "rxe/system_calls.rs"]
mod system_calls;

use std::time::Duration;

use catalyst::Sides;
use catalyst_transport::{DataPathKind, SessionConfig, TransportError, Wire, devices};
use conformance::{Setup, watchdog};
use device::device_or_skip;
use processes::{Process, Way};

fn setup(device: &str) -> Setup {
    let config = SessionConfig::new()
        .data_path(DataPathKind::Verbs)
        .device(device)
        .handshake_timeout(Duration::from_secs(20))
        .reply_timeout(Duration::from_secs(10));
    Setup { controller: config.clone(), coprocessor: config, host: "127.0.0.1", slowness: 20 }
}

macro_rules! on_the_device {
    ($($name:ident),*) => {
        $(
            #[test]
            fn $name() {
                let Some(device) = device_or_skip(stringify!($name)) else { return };
                watchdog(move || conformance::$name(setup(&device)));
            }
        )*
    };
}

on_the_device!(
    payloads_of_every_size,
    requests_and_replies_differ_in_size,
    the_window_is_the_ring,
    replies_are_scattered_and_never_cut,
    work_items_have_their_own_sizes,
    try_collect_does_not_wait,
    round_trip_times_are_those_of_the_rounds,
    start_after_stop,
    late_replies_are_dropped,
    failing_functions_fail_their_rounds_alone,
    decoder_ids_choose_the_function,
    a_persistent_worker_answers,
    the_coprocessor_collects_what_it_served,
    calls_out_of_order_change_nothing,
    different_channels_are_refused,
    the_peers_end_is_told,
    sequence_numbers_wrap,
    an_idle_stop_is_short,
    a_stop_waits_for_the_function_only_so_long,
    device_memory_is_refused_clearly,
    many_rounds,
    a_full_window_tells_the_peers_end,
    a_window_of_given_up_rounds_opens_again,
    a_refused_reply_is_not_shown,
    a_payload_staged_before_stop_is_not_sent_after_it,
    impossible_channels_are_refused,
    a_refused_start_leaves_no_worker,
    a_launcher_may_panic,
    a_worker_that_is_started_again_is_not_stopped,
    the_text_of_an_error_may_panic,
    a_panic_that_panics_fails_its_round_alone,
    a_function_may_not_stop_its_own_engine,
    a_worker_that_panics_is_told,
    a_peer_that_falls_silent_after_a_step_is_let_go,
    a_thousand_starts_and_stops,
    a_session_dropped_in_a_child_process_is_the_parents_still,
    queued_rounds_are_rounds,
    a_queue_keeps_to_the_rules_of_a_kick,
    a_slow_function_holds_no_reply_back
);

const VERBS: Way = Way {
    options: &["--data-path", "verbs", "-d", "rxe0"],
    coprocessor: &["--bind", "10.9.0.1"],
    controller: &["--peer", "10.9.0.1"],
};

/// The counts of the first milestone: 100,000 rounds of 16 bytes.
#[test]
fn a_hundred_thousand_rounds_of_sixteen_bytes() {
    let Some(_) = device_or_skip("a_hundred_thousand_rounds_of_sixteen_bytes") else { return };
    println!("figure: {}", VERBS.rounds(100_000, 16, &[]));
}

/// 2,000 rounds of every size, and 100 of the largest: a megabyte takes a tenth of a second on an emulated device.
#[test]
fn two_thousand_rounds_of_every_size() {
    let Some(_) = device_or_skip("two_thousand_rounds_of_every_size") else { return };
    for (size, count) in
        [(0, 2000), (1, 2000), (63, 2000), (64, 2000), (1000, 2000), (4096, 2000), (65_536, 2000), (1 << 20, 100)]
    {
        println!("figure: {}", VERBS.rounds(count, size, &["--timeout-ms", "20000"]));
    }
}

#[test]
fn many_rounds_in_flight() {
    let Some(_) = device_or_skip("many_rounds_in_flight") else { return };
    for depth in ["4", "64", "256"] {
        println!("figure: {}", VERBS.rounds(3000, 40, &["--depth", depth, "--timeout-ms", "10000"]));
    }
}

#[test]
fn a_killed_coprocessor_is_noticed() {
    let Some(_) = device_or_skip("a_killed_coprocessor_is_noticed") else { return };
    VERBS.killed_coprocessor_is_noticed(Duration::from_secs(5));
}

#[test]
fn a_killed_controller_is_noticed() {
    let Some(_) = device_or_skip("a_killed_controller_is_noticed") else { return };
    VERBS.killed_controller_is_noticed(Duration::from_secs(5));
}

#[test]
fn sessions_follow_each_other() {
    let Some(_) = device_or_skip("sessions_follow_each_other") else { return };
    VERBS.sessions_follow_each_other(6);
}

#[test]
fn syndromes_are_decoded() {
    let Some(_) = device_or_skip("syndromes_are_decoded") else { return };
    VERBS.decode_demo();
}

#[test]
fn devices_are_listed() {
    let Some(name) = device_or_skip("devices_are_listed") else { return };
    let ended = Process::start("controller", &["--list"]).end_within(Duration::from_secs(10));
    assert!(ended.status.success(), "{}", ended.stderr);
    for part in [&name[..], "port 1", "ACTIVE", "Ethernet", "MTU 1024", "10.9.0.1", "RoCEv2", "d0"] {
        assert!(ended.stdout.contains(part), "{part}: {}", ended.stdout);
    }
    let listed = devices().unwrap();
    assert!(listed.iter().any(|device| device.name == name && device.ports[0].gids.len() >= 2));
}

/// A device may be named by its interface or address; one that is not there is named with what is.
#[test]
fn devices_are_found_by_name_interface_and_address() {
    let Some(_) = device_or_skip("devices_are_found_by_name_interface_and_address") else { return };
    for device in ["rxe0", "d0", "10.9.0.1"] {
        watchdog(move || conformance::the_coprocessor_collects_what_it_served(setup(device)));
    }
    for (change, words) in [
        (setup("nothing0"), ["nothing0", "rxe0 port 1"]),
        (setup("rxe0").both(|config| config.port(2)), ["port 2", "rxe0 port 1"]),
        (setup("rxe0").both(|config| config.gid_index(77)), ["GID index 77 is empty", "10.9.0.1"]),
    ] {
        let error = conformance::refused(change);
        assert!(matches!(error, TransportError::Device { .. }), "{error}");
        for word in words {
            assert!(error.to_string().contains(word), "{word}: {error}");
        }
    }
}

/// Every index of the GID table, given on both sides: it works, or the error names device, port and GID.
#[test]
fn every_gid_index_works_or_is_named() {
    let Some(name) = device_or_skip("every_gid_index_works_or_is_named") else { return };
    let listed = devices().unwrap().into_iter().find(|device| device.name == name).unwrap();
    let present: Vec<u32> = listed.ports[0].gids.iter().map(|gid| gid.index).collect();
    for index in 0..12_u8 {
        let change = setup(&name).both(|config| config.gid_index(index).reply_timeout(Duration::from_secs(20)));
        if present.contains(&u32::from(index)) {
            watchdog(move || conformance::the_coprocessor_collects_what_it_served(change));
        } else {
            let error = conformance::refused(change).to_string();
            for part in [&format!("GID index {index} is empty on {name} port 1")[..], "10.9.0.1"] {
                assert!(error.contains(part), "{part}: {error}");
            }
        }
    }
}

/// Both sides on the Catalyst wire.
fn catalyst_setup(device: &str) -> Setup {
    setup(device).both(|config| config.wire(Wire::Catalyst))
}

macro_rules! on_the_catalyst_wire {
    ($($name:ident: $test:ident),*) => {
        $(
            #[test]
            fn $name() {
                let Some(device) = device_or_skip(stringify!($name)) else { return };
                watchdog(move || catalyst_sessions::$test(catalyst_setup(&device)));
            }
        )*
    };
}

on_the_catalyst_wire!(
    catalyst_window_has_256_rounds: the_window_has_256_rounds,
    catalyst_payloads_have_eight_bytes: every_payload_has_eight_bytes,
    catalyst_start_after_stop: start_after_stop,
    catalyst_late_replies_are_dropped: late_replies_are_dropped,
    catalyst_sequence_numbers_wrap: sequence_numbers_wrap,
    catalyst_persistent_worker_answers: a_persistent_worker_answers,
    catalyst_failing_function_ends_the_session: a_failing_function_ends_the_session,
    catalyst_sessions_follow_each_other: sessions_follow_each_other,
    catalyst_silent_clients_delay_but_do_not_block: silent_clients_delay_but_do_not_block,
    catalyst_waits_end: waits_end,
    catalyst_and_native_name_each_other: the_other_wire_is_named
);

const CATALYST: Sides = Sides {
    way: Way {
        options: &["--data-path", "verbs", "-d", "rxe0", "--wire", "catalyst"],
        coprocessor: &["--bind", "10.9.0.1"],
        controller: &["--peer", "10.9.0.1"],
    },
    peer_coprocessor: &["--dev", "rxe0"],
    peer_controller: &["--dev", "rxe0"],
};

#[test]
fn catalyst_processes() {
    let Some(_) = device_or_skip("catalyst_processes") else { return };
    for depth in ["1", "16", "256"] {
        let report = CATALYST.way.rounds(5000, 8, &["--depth", depth, "--timeout-ms", "10000"]);
        assert_eq!(report["wire"], "catalyst");
        println!("{report}");
    }
    CATALYST.way.sessions_follow_each_other(4);
    for (arguments, words) in [(["-s", "16"], "8 bytes each way"), (["--depth", "512"], "256 slots")] {
        let ended = CATALYST.way.controller("1", &arguments).end_within(Duration::from_secs(5));
        assert!(ended.status.code() == Some(1) && ended.stderr.contains(words), "{}", ended.stderr);
    }
}

#[test]
fn catalyst_killed_peers_are_noticed() {
    let Some(_) = device_or_skip("catalyst_killed_peers_are_noticed") else { return };
    CATALYST.way.killed_coprocessor_is_noticed(Duration::from_secs(5));
    CATALYST.killed_controller_is_noticed(Duration::from_secs(5));
}

/// Against a peer that shares none of this code, in both roles.
#[test]
fn catalyst_independent_peer() {
    let Some(_) = device_or_skip("catalyst_independent_peer") else { return };
    let ways = [("echo", "0"), ("echo", "0x1234"), ("invert", "0"), ("invert", "0xFF00ABCD")];
    for (port, (function, psn)) in (18_560..).zip(ways) {
        CATALYST.independent_controller(3000, function, psn);
        CATALYST.independent_coprocessor(3000, port, function, psn);
    }
}

#[test]
fn catalyst_independent_peer_killed() {
    let Some(_) = device_or_skip("catalyst_independent_peer_killed") else { return };
    CATALYST.independent_controller_killed(Duration::from_secs(5));
    CATALYST.independent_coprocessor_killed(18_570, Duration::from_secs(5));
}

/// The independent peer is killed in the middle of the rounds of a C program, whose next call fails soon; then `destroy`
/// returns.
#[cfg(feature = "capi")]
fn killed_under_the_c_interface(role: &str, port: &str, peer: &[&str]) {
    const BOUND: Duration = Duration::from_secs(10);
    let folder = c_programs::folder("killed");
    let program = c_programs::Program::compile("cc", "-std=gnu11", "killed.c", folder.path(), false);
    let mut peer =
        Process::catalyst_peer(&[peer, &["--port", port, "--rounds", "1000000000", "--timeout", "60"]].concat());
    if role == "controller" {
        catalyst::listened_to(port.parse().unwrap(), &mut peer);
    }
    let mut program = Process::launch(role, program.command().args([role, port]));
    program.has_said("rounds go on");
    assert!(peer.is_running());
    peer.kill();
    let ended = program.end_within(BOUND);
    assert!(ended.status.success(), "{} {}", ended.stdout, ended.stderr);
    println!("{role}: {:?} after the kill: {}{}", ended.took, ended.stdout, ended.stderr);
    // "CALL STATUS after ...": an error of the session, and not its timeout, which is longer than the bound.
    assert_eq!(ended.stdout.split(' ').nth(1), Some("-1"), "{} {}", ended.stdout, ended.stderr);
    assert!(ended.stdout.contains("destroyed in"), "{}", ended.stdout);
    assert!(ended.stderr.contains("peer lost"), "{}", ended.stderr);
}

#[cfg(feature = "capi")]
#[test]
fn catalyst_independent_coprocessor_killed_under_the_c_interface() {
    let Some(_) = device_or_skip("catalyst_independent_coprocessor_killed_under_the_c_interface") else { return };
    killed_under_the_c_interface("controller", "18571", &["coprocessor", "--dev", "rxe0"]);
}

#[cfg(feature = "capi")]
#[test]
fn catalyst_independent_controller_killed_under_the_c_interface() {
    let Some(_) = device_or_skip("catalyst_independent_controller_killed_under_the_c_interface") else { return };
    killed_under_the_c_interface("coprocessor", "18572", &["controller", "--dev", "rxe0", "--peer", "10.9.0.1"]);
}
