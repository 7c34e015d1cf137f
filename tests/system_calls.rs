//! A round on shared memory asks nothing of the system: counted by strace, in both processes.

#[path = "support/processes.rs"]
mod processes;

use std::path::Path;
use std::time::Duration;

use processes::Process;

/// System calls of both processes in a session of so many rounds.
fn system_calls(folder: &Path, rounds: u32) -> (usize, usize) {
    let trace = |name: &str| folder.join(format!("{name}-{rounds}"));
    let (coprocessor_trace, controller_trace) = (trace("coprocessor"), trace("controller"));
    // Signs of life are not part of a round: an hour's bound keeps them out.
    // A spinner that was given a processor does not give it up while it waits.
    let arguments = ["--data-path", "shm", "--liveness", "3600", "--once", "--cpu", "1"];
    let (coprocessor, port) = Process::traced_coprocessor(&coprocessor_trace, &arguments);
    let rounds = rounds.to_string();
    let arguments = [
        "--data-path",
        "shm",
        "--liveness",
        "3600",
        "-p",
        &port,
        "-n",
        &rounds,
        "--warmup",
        "0",
        "--json",
        "--cpu",
        "0",
    ];
    let ended = Process::traced("controller", &controller_trace, &arguments).end_within(Duration::from_secs(60));
    assert!(ended.status.success(), "{}", ended.stderr);
    assert!(coprocessor.end_within(Duration::from_secs(20)).status.success());
    // Waiting for the other's next step (futex, the coprocessor's sleep between two looks at its status) depends on how
    // long the session takes, and is done by threads that take no part in the rounds.
    let count = |path: &Path| {
        let text = std::fs::read_to_string(path).unwrap();
        text.lines()
            .filter(|line| {
                !line.contains("clock_nanosleep") && !line.contains("restart_syscall") && !line.contains("futex")
            })
            .count()
    };
    (count(&coprocessor_trace), count(&controller_trace))
}

#[test]
fn rounds_on_shared_memory_make_no_system_call() {
    if !Process::can_trace() {
        processes::skip("rounds_on_shared_memory_make_no_system_call", "strace is missing or may not trace");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (few, many) = (system_calls(folder.path(), 1_000), system_calls(folder.path(), 101_000));
    println!("figure: system calls with 1,000 rounds {few:?}, with 101,000 rounds {many:?} (coprocessor, controller)");
    // Starting and ending vary by a few; a call in every hundredth round would be a thousand.
    let more = many.0.saturating_sub(few.0) + many.1.saturating_sub(few.1);
    assert!(more < 500, "100,000 rounds made {more} system calls more");
}
