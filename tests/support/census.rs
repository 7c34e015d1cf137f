//! What a process holds of the system, and what the system holds for all: counted before and after.

#![allow(dead_code)] // each test file uses a part of it

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// How long what is on its way out may take: threads that end by themselves, memory that the kernel gives back.
const SETTLING: Duration = Duration::from_secs(10);

/// What one process holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Census {
    /// Open descriptors, by what they are.
    pub(crate) descriptors: BTreeMap<String, usize>,
    /// Threads.
    pub(crate) threads: usize,
    /// Mappings of a session's shared memory, the own and the peer's.
    pub(crate) regions: usize,
}

impl Census {
    /// Of this process.
    pub(crate) fn own() -> Self {
        Self::of(std::process::id())
    }

    /// Of a process of this user that lives.
    pub(crate) fn of(pid: u32) -> Self {
        let mut descriptors = BTreeMap::new();
        for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten() {
            // One that is closed meanwhile, such as that of this very listing, has no target any more.
            let Ok(target) = std::fs::read_link(entry.path()) else { continue };
            let target = target.to_string_lossy().into_owned();
            if target.ends_with("/fd") {
                continue;
            }
            // `socket:[1234]` and the like are counted by kind.
            let kind = target.split(":[").next().unwrap_or_default().to_owned();
            *descriptors.entry(kind).or_insert(0) += 1;
        }
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten().count();
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
        Self { descriptors, threads, regions: maps.matches("memfd:catalyst-transport").count() }
    }
}

/// Waits until the process holds what it held before; gives the difference when it does not in the end.
pub(crate) fn leaked(pid: u32, before: &Census) -> Option<String> {
    let deadline = Instant::now() + SETTLING;
    loop {
        let now = Census::of(pid);
        if now == *before {
            return None;
        }
        if Instant::now() > deadline {
            return Some(format!("before {before:?}, now {now:?}"));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Resident memory of a process in KiB.
pub(crate) fn resident_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// What the whole system holds of ours.
#[derive(Debug)]
pub(crate) struct Host {
    /// RDMA objects of every device, without the kernel's own; empty where there is none.
    rdma: Vec<String>,
    /// Files in /dev/shm. This library makes none. On a machine of others only names that could be ours count.
    files: BTreeSet<String>,
    /// Abstract sockets at which two processes meet.
    sockets: BTreeSet<String>,
}

impl Host {
    pub(crate) fn now() -> Self {
        // In the lab nobody else is.
        let alone = std::env::var_os("CATALYST_TRANSPORT_REQUIRE_DEVICE").is_some();
        let files = std::fs::read_dir("/dev/shm")
            .map(|entries| entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
            .unwrap_or_else(|_| BTreeSet::new());
        let sockets = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
        Self {
            rdma: rdma_objects(),
            files: files.into_iter().filter(|name| alone || name.contains("catalyst")).collect(),
            sockets: sockets
                .lines()
                .filter_map(|line| line.split_once("@catalyst-transport-"))
                .map(|(_, name)| name.to_owned())
                .collect(),
        }
    }

    /// Waits until nothing is left of what has come since `self`, others coming and going meanwhile; gives what is
    /// left when something is in the end.
    pub(crate) fn left_behind(&self) -> Option<String> {
        let deadline = Instant::now() + SETTLING;
        let mut now = Self::now();
        let mut files: BTreeSet<_> = now.files.difference(&self.files).cloned().collect();
        let mut sockets: BTreeSet<_> = now.sockets.difference(&self.sockets).cloned().collect();
        loop {
            files.retain(|name| now.files.contains(name));
            sockets.retain(|name| now.sockets.contains(name));
            if files.is_empty() && sockets.is_empty() && now.rdma == self.rdma {
                return None;
            }
            if Instant::now() > deadline {
                return Some(format!(
                    "/dev/shm {files:?}, sockets {sockets:?}, RDMA objects {:?} where there were {:?}",
                    now.rdma, self.rdma
                ));
            }
            std::thread::sleep(Duration::from_millis(20));
            now = Self::now();
        }
    }
}

/// `rdma resource show`, one line a device. On a machine without devices there is nothing to be asked.
fn rdma_objects() -> Vec<String> {
    if !Path::new("/sys/class/infiniband").exists() {
        return Vec::new();
    }
    let Ok(output) = Command::new("rdma").args(["resource", "show"]).output() else { return Vec::new() };
    String::from_utf8_lossy(&output.stdout).lines().map(|line| line.trim().to_owned()).collect()
}
