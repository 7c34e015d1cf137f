//! Two processes over shared memory, as a user runs them.

#[path = "support/processes.rs"]
mod processes;

use std::io::Write;
use std::net::TcpStream;
use std::time::Duration;

use processes::{Process, Way};

const SHM: Way = Way { options: &["--data-path", "shm"], coprocessor: &[], controller: &[] };
/// What names no data path finds shared memory by itself when both are on one host.
const AUTO: Way = Way { options: &[], coprocessor: &[], controller: &["--peer", "localhost"] };

#[test]
fn ten_million_rounds() {
    let report = SHM.rounds(10_000_000, 16, &[]);
    println!("figure: ten million rounds: {report}");
}

#[test]
fn every_size_and_depth() {
    for (size, count) in [
        (0, 20_000),
        (1, 20_000),
        (63, 20_000),
        (64, 20_000),
        (1000, 5_000),
        (4096, 5_000),
        (65_536, 500),
        (1 << 20, 50),
    ] {
        SHM.rounds(count, size, &[]);
    }
    for depth in ["1", "4", "16", "64", "256"] {
        SHM.rounds(20_000, 40, &["--depth", depth]);
    }
}

#[test]
fn the_report_has_its_keys() {
    let report = AUTO.rounds(1000, 24, &["--depth", "2", "--interval-us", "5"]);
    for key in ["device", "elapsed_s", "rounds_per_s"] {
        assert!(report.get(key).is_some(), "{key}");
    }
    assert_eq!((&report["data_path"], &report["wire"], &report["depth"]), (&"shm".into(), &"native".into(), &2.into()));
    for key in ["min", "mean", "p50", "p90", "p99", "p999", "max"] {
        assert!(report["rtt_ns"][key].as_f64().unwrap() > 0.0, "{key}");
    }
}

#[test]
fn samples_are_written_and_the_picture_is_drawn() {
    let folder = tempfile::tempdir().unwrap();
    let csv = folder.path().join("samples.csv");
    let (coprocessor, port) = SHM.coprocessor(&["--once", "--function", "steane"]);
    let arguments = ["-n", "500", "--function", "steane", "--csv", csv.to_str().unwrap()];
    let ended = SHM.controller(&port, &arguments).end_within(Duration::from_secs(30));
    assert!(ended.status.success(), "{}", ended.stderr);
    assert!(
        ended.stdout.contains("500 rounds of 3 bytes") && ended.stdout.contains("p99.9") && ended.stdout.contains('█'),
        "{}",
        ended.stdout
    );
    let samples = std::fs::read_to_string(csv).unwrap();
    assert_eq!(samples.lines().count(), 500);
    for (round, line) in samples.lines().enumerate() {
        let (number, time) = line.split_once(',').unwrap();
        assert_eq!(number, round.to_string());
        time.parse::<u64>().unwrap();
    }
    assert!(coprocessor.end_within(Duration::from_secs(5)).status.success());
}

#[test]
fn a_wrong_answer_is_not_taken_for_right() {
    let (_coprocessor, port) = SHM.coprocessor(&["--function", "invert"]);
    let ended = SHM.controller(&port, &["-n", "100", "--function", "echo"]).end_within(Duration::from_secs(30));
    assert_eq!(ended.status.code(), Some(1));
    assert!(ended.stdout.contains("100 corrupt"), "{}", ended.stdout);
}

#[test]
fn a_killed_coprocessor_is_noticed() {
    SHM.killed_coprocessor_is_noticed(Duration::from_secs(2));
}

#[test]
fn a_killed_controller_is_noticed() {
    SHM.killed_controller_is_noticed(Duration::from_secs(2));
}

#[test]
fn sessions_follow_each_other() {
    SHM.sessions_follow_each_other(9);
}

#[test]
fn silent_and_strange_clients_do_not_block() {
    let (_coprocessor, port) = SHM.coprocessor(&[]);
    let mut strangers: Vec<TcpStream> =
        (0..20).map(|_| TcpStream::connect(("127.0.0.1", port.parse().unwrap())).unwrap()).collect();
    for (index, stranger) in strangers.iter_mut().enumerate().filter(|(index, _)| index % 2 == 0) {
        let _ =
            if index % 4 == 0 { stranger.write_all(b"GET / HTTP/1.1\r\n\r\n") } else { stranger.write_all(b"CTP1") };
    }
    let ended = SHM.controller(&port, &["-n", "100"]).end_within(Duration::from_secs(30));
    assert!(ended.status.success(), "{}", ended.stderr);
}

#[test]
fn signals_end_a_coprocessor_in_good_order() {
    for (signal, busy) in [("INT", false), ("TERM", false), ("INT", true), ("TERM", true)] {
        let (coprocessor, port) = SHM.coprocessor(&[]);
        let mut controller = busy.then(|| SHM.controller(&port, &["-n", "1000000000"]));
        if let Some(controller) = &mut controller {
            controller.has_said("connected over");
        }
        std::thread::sleep(Duration::from_millis(100));
        coprocessor.signal(signal);
        let ended = coprocessor.end_within(Duration::from_secs(2));
        assert!(ended.status.success(), "{}", ended.stderr);
        if let Some(controller) = controller {
            let ended = controller.end_within(Duration::from_secs(2));
            assert_eq!(ended.status.code(), Some(1));
            assert!(ended.stderr.contains("the peer"), "{}", ended.stderr);
        }
    }
}

#[test]
fn errors_say_what_to_do() {
    // Nobody listens; the message names the address and the remedy.
    let ended = SHM.controller("1", &["-n", "1"]).end_within(Duration::from_secs(20));
    assert_eq!(ended.status.code(), Some(1));
    assert!(ended.stderr.contains("127.0.0.1:1"), "{}", ended.stderr);
    // The port is taken.
    let (_coprocessor, port) = SHM.coprocessor(&[]);
    let ended = Process::start("coprocessor", &["-p", &port]).end_within(Duration::from_secs(5));
    assert_eq!(ended.status.code(), Some(1));
    assert!(ended.stderr.contains(&port), "{}", ended.stderr);
    // The ring would be too large.
    let (_coprocessor, port) = SHM.coprocessor(&["--max-memory", "1"]);
    let ended = SHM.controller(&port, &["-s", "1000000", "--depth", "4"]).end_within(Duration::from_secs(20));
    assert_eq!(ended.status.code(), Some(1));
    assert!(ended.stderr.contains("1048576 are allowed"), "{}", ended.stderr);
    // No such processor.
    let (coprocessor, port) = SHM.coprocessor(&["--once", "--cpu", "999"]);
    let _ = SHM.controller(&port, &["-n", "10", "--timeout-ms", "200"]).end_within(Duration::from_secs(20));
    let ended = coprocessor.end_within(Duration::from_secs(10));
    assert!(
        ended.stderr.contains("processor 999 does not exist") && ended.stderr.contains("the machine has 0"),
        "{}",
        ended.stderr
    );
}

#[test]
fn the_engine_may_be_pinned_and_urgent() {
    let (coprocessor, port) = SHM.coprocessor(&["--once", "--cpu", "0", "--realtime"]);
    let ended = SHM.controller(&port, &["-n", "1000"]).end_within(Duration::from_secs(30));
    assert!(ended.status.success(), "{}", ended.stderr);
    let ended = coprocessor.end_within(Duration::from_secs(5));
    for setting in ["cpu: Granted", "real time: ", "memory lock: ", "low latency: "] {
        assert!(ended.stderr.contains(setting), "{}", ended.stderr);
    }
}

#[test]
fn both_ends_share_one_processor() {
    // With one processor each spinner has to let the other run.
    let (_coprocessor, port) = SHM.coprocessor(&["--once", "--cpu", "0"]);
    let arguments = ["-n", "300", "--cpu", "0", "--timeout-ms", "10000"];
    let ended = SHM.controller(&port, &arguments).end_within(Duration::from_secs(60));
    assert!(ended.status.success(), "{}", ended.stderr);
}

#[test]
fn syndromes_are_decoded() {
    SHM.decode_demo();
}
