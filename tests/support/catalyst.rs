//! The Catalyst wire: between two sessions of this crate, and against an independent peer (`tests/peers/catalyst_peer.py`),
//! which shares none of its code.

#![allow(dead_code)] // each test file uses a part of it

use std::time::{Duration, Instant};

use crate::processes::{Ended, Process, Way};

/// Waits until somebody listens on a TCP port, without connecting: the independent peer takes the first client.
pub(crate) fn listened_to(port: u16, peer: &mut Process) {
    let began = Instant::now();
    let local = format!(":{port:04X} 00000000:0000 0A");
    while !std::fs::read_to_string("/proc/net/tcp").unwrap().contains(&local) {
        assert!(began.elapsed() < Duration::from_secs(60), "nobody listens on port {port}");
        assert!(peer.is_running(), "the peer has ended");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn passed(ended: &Ended) {
    let last = ended.stdout.lines().last().unwrap_or_default();
    assert!(ended.status.success() && last.starts_with("PASS"), "{} {}", ended.stdout, ended.stderr);
    println!("{last} in {:?}", ended.took);
}

/// Devices of both ends, and how this crate's examples reach the other.
pub(crate) struct Sides {
    pub(crate) way: Way,
    /// Options of the independent peer as coprocessor, and as controller.
    pub(crate) peer_coprocessor: &'static [&'static str],
    pub(crate) peer_controller: &'static [&'static str],
}

impl Sides {
    /// Our controller, the independent coprocessor.
    pub(crate) fn independent_coprocessor(&self, rounds: u32, port: u16, function: &str, psn: &str) {
        let (rounds, port_text) = (rounds.to_string(), port.to_string());
        let arguments = ["coprocessor", "--port", &port_text, "--rounds", &rounds, "--fn", function, "--psn", psn];
        let mut peer = Process::catalyst_peer(&[&arguments[..], self.peer_coprocessor].concat());
        listened_to(port, &mut peer);
        let arguments = ["-n", &rounds, "--warmup", "0", "--function", function, "--timeout-ms", "20000", "--json"];
        let ended = self.way.controller(&port_text, &arguments).end_within(Duration::from_secs(200));
        assert!(ended.status.success(), "{} {}", ended.stdout, ended.stderr);
        let report: serde_json::Value = serde_json::from_str(ended.stdout.trim()).unwrap();
        assert_eq!((&report["wire"], &report["payload_bytes"]), (&"catalyst".into(), &8.into()));
        assert_eq!((report["verified"].to_string(), &report["corrupt"]), (rounds, &0.into()));
        passed(&peer.end_within(Duration::from_secs(10)));
        println!("{function}, psn {psn}: {report}");
    }

    /// Our coprocessor, the independent controller.
    pub(crate) fn independent_controller(&self, rounds: u32, function: &str, psn: &str) {
        let (coprocessor, port) = self.way.coprocessor(&["--once", "--function", function]);
        let rounds = rounds.to_string();
        let arguments =
            ["controller", "--peer", "10.9.0.1", "--port", &port, "--rounds", &rounds, "--expect", function];
        let arguments = [&arguments[..], &["--check-id", "--psn", psn], self.peer_controller].concat();
        passed(&Process::catalyst_peer(&arguments).end_within(Duration::from_secs(200)));
        let ended = coprocessor.end_within(Duration::from_secs(5));
        assert!(ended.status.success(), "{}", ended.stderr);
        assert!(ended.stderr.contains(&format!("served {rounds} rounds")), "{}", ended.stderr);
        println!("{function}, psn {psn}: {}", ended.stderr.lines().last().unwrap_or_default());
    }

    /// The independent coprocessor is killed in the middle of the rounds.
    pub(crate) fn independent_coprocessor_killed(&self, port: u16, bound: Duration) {
        let port_text = port.to_string();
        let arguments = ["coprocessor", "--port", &port_text, "--rounds", "1000000000"];
        let mut peer = Process::catalyst_peer(&[&arguments[..], self.peer_coprocessor].concat());
        listened_to(port, &mut peer);
        let mut controller =
            self.way.controller(&port_text, &["-n", "1000000000", "--warmup", "0", "--timeout-ms", "20000"]);
        controller.has_said("connected over");
        std::thread::sleep(Duration::from_millis(500));
        assert!(controller.is_running() && peer.is_running());
        peer.kill();
        let ended = controller.end_within(bound);
        assert_eq!(ended.status.code(), Some(1));
        assert!(ended.stderr.contains("peer lost"), "{}", ended.stderr);
        println!("the controller noticed after {:?}: {}", ended.took, ended.stderr.lines().last().unwrap_or_default());
    }

    /// The independent controller is killed in the middle of the rounds; then the next one is served.
    pub(crate) fn independent_controller_killed(&self, bound: Duration) {
        let (mut coprocessor, port) = self.way.coprocessor(&[]);
        let arguments = ["controller", "--peer", "10.9.0.1", "--port", &port, "--rounds", "1000000000"];
        let mut peer = Process::catalyst_peer(&[&arguments[..], self.peer_controller].concat());
        coprocessor.has_said("serving over");
        std::thread::sleep(Duration::from_millis(500));
        assert!(peer.is_running());
        peer.kill();
        let began = Instant::now();
        coprocessor.has_said("peer lost");
        let took = began.elapsed();
        assert!(took < bound, "{took:?}");
        println!("the coprocessor noticed after {took:?}");
        let ended = self.way.controller(&port, &["-n", "100", "--warmup", "0"]).end_within(Duration::from_secs(30));
        assert!(ended.status.success(), "{}", ended.stderr);
        coprocessor.signal("TERM");
        let ended = coprocessor.end_within(Duration::from_secs(5));
        assert!(ended.status.success(), "{}", ended.stderr);
        println!("{}", ended.stderr);
    }

    /// Our own controller is killed: as the Catalyst wire has no goodbye, its end is like any other.
    pub(crate) fn killed_controller_is_noticed(&self, bound: Duration) {
        let (coprocessor, port) = self.way.coprocessor(&["--once"]);
        let mut controller = self.way.controller(&port, &["-n", "1000000000"]);
        controller.has_said("connected over");
        std::thread::sleep(Duration::from_millis(300));
        assert!(controller.is_running());
        controller.kill();
        let ended = coprocessor.end_within(bound);
        assert!(ended.stderr.contains("peer lost"), "{}", ended.stderr);
        println!("the coprocessor noticed after {:?}: {}", ended.took, ended.stderr);
    }
}
