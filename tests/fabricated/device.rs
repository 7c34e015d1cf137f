//! Ports, link layers, GIDs and partitions that no test machine has.

use catalyst_transport::fabricated::{Gid, Installed, Plan, Port, Verb};
use catalyst_transport::{GidType, PortState, SessionConfig, TransportError};

use crate::support::{Pair, assert_clean, assert_says, guarded, payload};

/// Connects over two devices with these ports, moves data, and closes.
fn works(names: [&str; 2], ports: [Vec<Port>; 2], shape: impl Fn(SessionConfig) -> SessionConfig) {
    let [first, second] = ports;
    let devices = [Plan::new(names[0]).ports(first).install(), Plan::new(names[1]).ports(second).install()];
    let mut pair = Pair::new(names, shape);
    pair.run();
    for round in 0..20 {
        pair.round(&payload(round, 64));
    }
    pair.close();
    devices.iter().for_each(assert_clean);
}

/// Connects over two devices with these ports, which has to fail, and gives both errors.
fn refused(
    names: [&str; 2],
    ports: [Vec<Port>; 2],
    shape: impl Fn(SessionConfig) -> SessionConfig,
) -> (TransportError, TransportError) {
    let [first, second] = ports;
    let devices: [Installed; 2] =
        [Plan::new(names[0]).ports(first).install(), Plan::new(names[1]).ports(second).install()];
    let mut pair = Pair::new(names, shape);
    let (controller, coprocessor) = pair.open();
    devices.iter().for_each(assert_clean);
    (controller.unwrap_err(), coprocessor.unwrap_err())
}

fn v1(address: &str) -> Option<Gid> {
    Some(Gid::new(address, GidType::RoceV1))
}

fn v2(address: &str) -> Option<Gid> {
    Some(Gid::new(address, GidType::RoceV2))
}

#[test]
fn infiniband_is_routed_by_lid() {
    guarded(|| {
        works(["ib-a", "ib-b"], [vec![Port::infiniband(17)], vec![Port::infiniband(0xBFFF)]], |config| config);
        // Without any GID, and on the second port.
        let ports = || vec![Port::infiniband(3).state(PortState::Down), Port::infiniband(4).gids([])];
        works(["ib-c", "ib-d"], [ports(), vec![Port::infiniband(5).gids([])]], |config| config);
    });
}

#[test]
fn different_link_layers_are_refused_by_name() {
    guarded(|| {
        let both = refused(["mix-a", "mix-b"], [vec![Port::infiniband(9)], vec![Port::ethernet()]], |config| config);
        for error in [both.0, both.1] {
            assert_says(&error, &["InfiniBand", "Ethernet"]);
        }
    });
}

#[test]
fn different_gid_types_are_refused_by_name() {
    guarded(|| {
        let old = vec![Port::ethernet().gids([v1("10.1.0.1")])];
        let new = vec![Port::ethernet().gids([v2("10.1.0.2")])];
        let both = refused(["type-a", "type-b"], [old, new], |config| config);
        for error in [both.0, both.1] {
            assert_says(&error, &["RoCE v1", "RoCE v2", "GID"]);
        }
        // Both old, and of types that nobody tells.
        let old = |address| vec![Port::ethernet().gids([v1(address)])];
        works(["type-c", "type-d"], [old("10.1.0.1"), old("10.1.0.2")], |config| config);
        let untyped = |address| vec![Port::ethernet().gids([Some(Gid::new(address, GidType::RoceV2).untyped())])];
        works(["type-e", "type-f"], [untyped("10.1.0.1"), untyped("10.1.0.2")], |config| config);
    });
}

#[test]
fn partitions_are_compared() {
    guarded(|| {
        let with = |key| vec![Port::ethernet().pkeys([key])];
        let both = refused(["part-a", "part-b"], [with(0x8001), with(0x8002)], |config| config);
        for error in [both.0, both.1] {
            assert_says(&error, &["partition key", "0x8001", "0x8002"]);
        }
        let limited = refused(["part-c", "part-d"], [with(0x0001), with(0x0001)], |config| config);
        assert_says(&limited.0, &["partition key", "0x0001"]);
        works(["part-e", "part-f"], [with(0x8001), with(0x0001)], |config| config);
    });
}

#[test]
fn the_smaller_mtu_of_both_sides_is_used() {
    guarded(|| {
        for (index, (own, peer)) in [(256, 4096), (4096, 256), (512, 1024)].into_iter().enumerate() {
            // A device that takes no larger path MTU than its port has.
            let port = |mtu| vec![Port::ethernet().active_mtu(mtu).max_mtu(mtu)];
            let names = [format!("mtu-a{index}"), format!("mtu-b{index}")];
            let devices =
                [Plan::new(&names[0]).ports(port(own)).install(), Plan::new(&names[1]).ports(port(peer)).install()];
            let mut pair = Pair::new([&names[0], &names[1]], |c| c.request_capacity(9000).reply_capacity(9000));
            pair.run();
            for length in [0, 255, 256, 257, 4095, 4097, 9000] {
                pair.round(&payload(1, length));
            }
            pair.close();
            devices.iter().for_each(assert_clean);
        }
    });
}

#[test]
fn ports_that_are_not_active_are_passed_over_or_named() {
    guarded(|| {
        let port = Port::ethernet;
        let second = || vec![port().state(PortState::Down), port()];
        works(["port-a", "port-b"], [second(), vec![port()]], |config| config);
        for (index, (state, word)) in
            [(PortState::Down, "DOWN"), (PortState::Initializing, "INIT"), (PortState::Armed, "ARMED")]
                .into_iter()
                .enumerate()
        {
            let names = [format!("state-a{index}"), format!("state-b{index}")];
            let errors = refused([&names[0], &names[1]], [vec![port().state(state)], vec![port()]], |config| config);
            assert_says(&errors.0, &["port 1", &names[0], word, "not ACTIVE"]);
        }
        // The port that is asked for, though another one works.
        let ports = || vec![port(), port().state(PortState::Down)];
        let errors = refused(["want-a", "want-b"], [ports(), ports()], |config| config.port(2));
        assert_says(&errors.0, &["port 2", "want-a", "DOWN"]);
        let errors = refused(["none-a", "none-b"], [ports(), ports()], |config| config.port(3));
        assert_says(&errors.0, &["none-a", "port 3"]);
    });
}

#[test]
fn gids_are_chosen_or_named() {
    guarded(|| {
        let table =
            || vec![Port::ethernet().gids([v1("fe80::1"), None, v1("10.2.0.1"), v2("10.2.0.1"), v2("10.2.0.9")])];
        works(["gid-a", "gid-b"], [table(), table()], |config| config);
        for (index, wanted) in [3, 4].into_iter().enumerate() {
            let names = [format!("gid-c{index}"), format!("gid-d{index}")];
            works([&names[0], &names[1]], [table(), table()], |config| config.gid_index(wanted));
        }
        for (index, wanted) in [1, 5, 200].into_iter().enumerate() {
            let names = [format!("gid-e{index}"), format!("gid-f{index}")];
            let errors = refused([&names[0], &names[1]], [table(), table()], |config| config.gid_index(wanted));
            assert_says(&errors.0, &[&format!("GID index {wanted}"), &names[0], "port 1", "10.2.0.9"]);
        }
        let empty = || vec![Port::ethernet().gids([None, None])];
        let errors = refused(["gid-g", "gid-h"], [empty(), empty()], |config| config);
        assert_says(&errors.0, &["no usable GID", "gid-g", "give its interface an address"]);
    });
}

#[test]
fn a_device_is_found_by_its_interface_and_by_its_address() {
    guarded(|| {
        let port = Port::ethernet().gids([Some(Gid::new("10.3.0.1", GidType::RoceV2).interface("ens9"))]);
        let device = Plan::new("by-name").ports([port]).install();
        for wanted in ["by-name", "ens9", "10.3.0.1"] {
            let shape = |config: SessionConfig| config.device(wanted);
            let mut pair = Pair::new(["by-name", "by-name"], shape);
            pair.run();
            pair.round(b"found");
            pair.close();
        }
        let mut pair = Pair::new(["by-name", "by-name"], |config| config.device("mlx9_9"));
        let (controller, _) = pair.open();
        assert_says(&controller.unwrap_err(), &["mlx9_9", "by-name port 1 ACTIVE", "10.3.0.1"]);
        assert_clean(&device);
    });
}

#[test]
fn of_several_ports_and_gids_the_one_that_is_named_is_taken() {
    guarded(|| {
        let gid = |address: &str, interface: &str| Some(Gid::new(address, GidType::RoceV2).interface(interface));
        let ports = [
            Port::ethernet().gids([gid("10.4.0.1", "ens1")]),
            Port::ethernet().gids([gid("10.4.1.1", "ens2"), gid("10.4.2.1", "ens2.7")]),
        ];
        let device = Plan::new("dual").ports(ports).install();
        for (wanted, port, address) in [
            ("dual", "port 1", "0=10.4.0.1"),
            ("ens1", "port 1", "0=10.4.0.1"),
            ("ens2", "port 2", "0=10.4.1.1"),
            ("ens2.7", "port 2", "1=10.4.2.1"),
            ("10.4.2.1", "port 2", "1=10.4.2.1"),
        ] {
            let mut pair = Pair::new(["dual", "dual"], |config| config.device(wanted));
            // What is in use is seen in an error.
            device.fail(Verb::RegMr, 1, libc::EFAULT);
            let (controller, coprocessor) = pair.open();
            let error = [controller, coprocessor].into_iter().find_map(|result| match result {
                Err(error @ TransportError::Verbs(_)) => Some(error),
                _ => None,
            });
            assert_says(&error.expect("one side tells"), &[port, address]);
            pair.run();
            pair.round(b"there");
            pair.close();
        }
        assert_clean(&device);
    });
}

#[test]
fn a_device_without_reads_and_atomics_serves() {
    guarded(|| {
        let device = Plan::new("no-reads").max_qp_rd_atom(0).install();
        let mut pair = Pair::new(["no-reads", "no-reads"], |config| config);
        pair.run();
        pair.round(b"writes alone");
        pair.close();
        assert_clean(&device);
    });
}

#[test]
fn the_partition_key_of_the_given_index_is_used() {
    guarded(|| {
        let table = || vec![Port::ethernet().pkeys([0xFFFF, 0x0000, 0x8007, 0x0007])];
        works(["index-a", "index-b"], [table(), table()], |config| config.pkey_index(2));
        // A limited member in the same place of the other table.
        let other = || vec![Port::ethernet().pkeys([0x8001, 0x8002, 0x0007])];
        works(["index-c", "index-d"], [table(), other()], |config| config.pkey_index(2));
        for (number, wanted) in [1, 4, 200, u16::MAX].into_iter().enumerate() {
            let names = [format!("index-e{number}"), format!("index-f{number}")];
            let errors = refused([&names[0], &names[1]], [table(), table()], |config| config.pkey_index(wanted));
            assert_says(
                &errors.0,
                &[
                    &format!("partition key index {wanted} is empty on {} port 1", names[0]),
                    "there is 0=0xffff 2=0x8007 3=0x0007",
                ],
            );
        }
        // Two limited members of one partition cannot talk.
        let limited = refused(["index-g", "index-h"], [table(), table()], |config| config.pkey_index(3));
        assert_says(&limited.0, &["partition key", "0x0007"]);
    });
}
