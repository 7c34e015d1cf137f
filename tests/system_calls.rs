//! A round on shared memory asks nothing of the system: counted by strace, in both processes. `tests/rxe.rs` has the same for
//! verbs.

#[path = "support/processes.rs"]
mod processes;
#[path = "support/system_calls.rs"]
mod system_calls;

use system_calls::{Calls, can_trace, more, system_calls};

#[test]
fn rounds_on_shared_memory_make_no_system_call() {
    if !can_trace("rounds_on_shared_memory_make_no_system_call") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let shm = ["--data-path", "shm"];
    let (few, many) = (system_calls(folder.path(), &shm, 1_000), system_calls(folder.path(), &shm, 101_000));
    let sum = |calls: &Calls| calls.values().sum::<usize>();
    println!(
        "figure: system calls with 1,000 rounds {:?}, with 101,000 rounds {:?} (coprocessor, controller)",
        few.each_ref().map(sum),
        many.each_ref().map(sum)
    );
    let more = [more(&few[0], &many[0]), more(&few[1], &many[1])];
    // Starting and ending vary by a few; a call in every hundredth round would be a thousand.
    assert!(more.iter().map(sum).sum::<usize>() < 500, "100,000 rounds made more system calls: {more:?}");
}
