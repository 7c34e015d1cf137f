//! What a wire does to packets.

#![allow(dead_code)] // each test file uses a part of it

use std::io::Write;
use std::process::{Command, Stdio};
use std::time::Duration;

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

/// Lets nothing pass for a while. One process does both ends, so that the cut is not as long as several take to start.
pub(crate) fn cut(interfaces: &[&str], length: Duration) {
    let mut tc = Command::new("tc").args(["-batch", "-"]).stdin(Stdio::piped()).spawn().unwrap();
    let mut lines = tc.stdin.take().unwrap();
    let mut all = |what: &str, how: &str| {
        for interface in interfaces {
            writeln!(lines, "qdisc {what} dev {interface} root{how}").unwrap();
        }
    };
    // What changes nothing, to wait until the process has begun to read.
    all("replace", " netem loss 0%");
    std::thread::sleep(Duration::from_millis(300));
    all("change", " netem loss 100%");
    std::thread::sleep(length);
    all("del", "");
    drop(lines);
    assert!(tc.wait().unwrap().success());
}

impl Drop for Netem {
    fn drop(&mut self) {
        for interface in self.0 {
            let _ = Command::new("tc").args(["qdisc", "del", "dev", interface, "root"]).status();
        }
    }
}
