//! System calls of sessions, counted by strace.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use super::processes::{self, Process};

/// How often each system call was made.
pub(crate) type Calls = BTreeMap<String, usize>;

/// System calls of both processes, the coprocessor's first, in a session of so many rounds, one at a time.
pub(crate) fn system_calls(folder: &Path, data_path: &[&str], rounds: u32) -> [Calls; 2] {
    let trace = |name: &str| folder.join(format!("{name}-{rounds}"));
    let (coprocessor_trace, controller_trace) = (trace("coprocessor"), trace("controller"));
    // Signs of life are not part of a round: an hour's bound keeps them out.
    // A spinner that was given a processor does not give it up while it waits.
    let arguments = [data_path, &["--liveness", "3600", "--once", "--cpu", "1"]].concat();
    let (coprocessor, port) = Process::traced_coprocessor(&coprocessor_trace, &arguments);
    let rounds = rounds.to_string();
    let own = ["--liveness", "3600", "-p", &port, "-n", &rounds, "--warmup", "0", "--json", "--cpu", "0"];
    let arguments = [data_path, &own, &["--timeout-ms", "10000"]].concat();
    let ended = Process::traced("controller", &controller_trace, &arguments).end_within(Duration::from_secs(100));
    assert!(ended.status.success(), "{}", ended.stderr);
    assert!(coprocessor.end_within(Duration::from_secs(20)).status.success());
    [count(&coprocessor_trace), count(&controller_trace)]
}

/// Counts the calls in a trace of lines such as `1234 write(5, ""..., 32) = 32`.
fn count(path: &Path) -> Calls {
    let mut calls = Calls::new();
    for line in std::fs::read_to_string(path).unwrap().lines() {
        let call = line.split_once(char::is_whitespace).map_or("", |(_, call)| call.trim_start());
        // The second half of a call that another came between, and what is no call at all.
        let Some((name, _)) = call.split_once('(') else { continue };
        if !name.starts_with(['<', '+', '-']) {
            *calls.entry(name.to_owned()).or_default() += 1;
        }
    }
    // Waiting for the other's next step (futex, the coprocessor's sleep between two looks at its status) depends on how
    // long the session takes, and is done by threads that take no part in the rounds.
    for waiting in ["clock_nanosleep", "restart_syscall", "futex"] {
        calls.remove(waiting);
    }
    calls
}

/// The calls of which there are more in `many` than in `few`.
pub(crate) fn more(few: &Calls, many: &Calls) -> Calls {
    many.iter()
        .map(|(name, count)| (name.clone(), count.saturating_sub(few.get(name).copied().unwrap_or(0))))
        .filter(|(_, count)| *count != 0)
        .collect()
}

pub(crate) fn can_trace(test: &str) -> bool {
    let can = Process::can_trace();
    if !can {
        processes::skip(test, "strace is missing or may not trace");
    }
    can
}
