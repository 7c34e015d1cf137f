//! What a wire does to packets.

#![allow(dead_code)] // each test file uses a part of it

use std::process::Command;

/// Sets what interfaces do to the packets that leave them, and takes it away at the end.
#[derive(Debug)]
pub(crate) struct Netem(&'static [&'static str]);

/// Both ends of the lab's wire. TCP between its addresses does not cross it: both are this machine's own.
pub(crate) const WIRE: &[&str] = &["v0", "v1"];
/// Where TCP between addresses of one machine goes, and nothing of RDMA.
pub(crate) const LOOPBACK: &[&str] = &["lo"];

impl Netem {
    pub(crate) fn set(interfaces: &'static [&'static str], what: &[&str]) -> Self {
        for interface in interfaces {
            let arguments = [&["qdisc", "replace", "dev", interface, "root", "netem"], what].concat();
            assert!(Command::new("tc").args(arguments).status().unwrap().success());
        }
        Self(interfaces)
    }

    /// Packets that were dropped since.
    pub(crate) fn dropped(&self) -> u64 {
        self.0
            .iter()
            .map(|interface| {
                let output = Command::new("tc").args(["-s", "qdisc", "show", "dev", interface]).output().unwrap();
                let text = String::from_utf8(output.stdout).unwrap();
                let dropped = text.split("(dropped ").nth(1).unwrap();
                dropped.split(',').next().unwrap().trim().parse::<u64>().unwrap()
            })
            .sum()
    }
}

impl Drop for Netem {
    fn drop(&mut self) {
        for interface in self.0 {
            let _ = Command::new("tc").args(["qdisc", "del", "dev", interface, "root"]).status();
        }
    }
}
