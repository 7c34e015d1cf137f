//! Two soft-RoCE devices with a wire between them that can lose and reorder packets.
//!
//! The devices are named by CATALYST_TRANSPORT_DEVICE and CATALYST_TRANSPORT_DEVICE2; `scripts/test` runs this file in the lab with a wire.
#![cfg(feature = "rdma")]

#[path = "support/catalyst.rs"]
mod catalyst;
#[path = "support/device.rs"]
mod device;
#[path = "support/netem.rs"]
mod netem;
#[path = "support/processes.rs"]
mod processes;

use std::time::Duration;

use catalyst::Sides;
use device::device_or_skip;
use netem::Netem;
use processes::Way;

const WIRE: Way = Way {
    options: &["--data-path", "verbs"],
    coprocessor: &["-d", "rxe0", "--bind", "10.9.0.1"],
    controller: &["-d", "rxe1", "--peer", "10.9.0.1", "--bind", "10.9.0.2", "--timeout-ms", "20000"],
};

#[test]
fn rounds_cross_the_wire() {
    let Some(_) = device_or_skip("rounds_cross_the_wire") else { return };
    for (size, count) in [(16, 3000), (1000, 500), (4096, 300), (65_536, 20)] {
        println!("figure: {}", WIRE.rounds(count, size, &[]));
    }
}

/// One packet in a hundred is lost, each way: nothing else is.
#[test]
fn a_lossy_wire_loses_no_round() {
    let Some(_) = device_or_skip("a_lossy_wire_loses_no_round") else { return };
    let netem = Netem::set(netem::WIRE, &["loss", "1%"]);
    let report = WIRE.rounds(5000, 16, &[]);
    let dropped = netem.dropped();
    println!("figure: {dropped} packets were dropped: {report}");
    assert!(dropped > 20, "the wire dropped {dropped} packets only");
}

#[test]
fn a_killed_peer_is_noticed_across_the_wire() {
    let Some(_) = device_or_skip("a_killed_peer_is_noticed_across_the_wire") else { return };
    WIRE.killed_coprocessor_is_noticed(Duration::from_secs(5));
    WIRE.killed_controller_is_noticed(Duration::from_secs(5));
}

const CATALYST: Sides = Sides {
    way: Way {
        options: &["--data-path", "verbs", "--wire", "catalyst"],
        coprocessor: &["-d", "rxe0", "--bind", "10.9.0.1"],
        controller: &["-d", "rxe1", "--peer", "10.9.0.1", "--bind", "10.9.0.2", "--timeout-ms", "20000"],
    },
    peer_coprocessor: &["--dev", "rxe0"],
    peer_controller: &["--dev", "rxe1"],
};

/// The Catalyst wire format, against itself and against a peer that shares none of this code, where packets are lost.
#[test]
fn catalyst_on_a_lossy_wire() {
    let Some(_) = device_or_skip("catalyst_on_a_lossy_wire") else { return };
    println!("{}", CATALYST.way.rounds(2000, 8, &["--depth", "16"]));
    let netem = Netem::set(netem::WIRE, &["loss", "1%"]);
    println!("{}", CATALYST.way.rounds(3000, 8, &[]));
    CATALYST.independent_controller(3000, "echo", "0");
    CATALYST.independent_controller(3000, "invert", "0x1234");
    CATALYST.independent_coprocessor(3000, 18_560, "echo", "0x1234");
    CATALYST.independent_coprocessor(3000, 18_561, "invert", "0");
    let dropped = netem.dropped();
    println!("{dropped} packets were dropped");
    assert!(dropped > 20, "the wire dropped {dropped} packets only");
}

#[test]
fn catalyst_killed_peers_are_noticed_across_the_wire() {
    let Some(_) = device_or_skip("catalyst_killed_peers_are_noticed_across_the_wire") else { return };
    CATALYST.independent_controller_killed(Duration::from_secs(5));
    CATALYST.independent_coprocessor_killed(18_570, Duration::from_secs(5));
}
