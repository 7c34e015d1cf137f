//! What rounds on soft-RoCE ask of the system: one call for each post, and nothing else.

use std::process::Command;
use std::time::Duration;

use catalyst_transport::{
    ConnectInfo, ControllerSession, CoprocessorSession, DataPathKind, Echo, SessionConfig, TransportSession,
};

use crate::counting::{can_trace, more, system_calls};
use crate::device::device_or_skip;

/// On soft-RoCE a post is a `write` to the device's node, and polling reads memory.
#[test]
fn a_round_on_verbs_makes_one_system_call_for_its_post() {
    let name = "a_round_on_verbs_makes_one_system_call_for_its_post";
    let Some(device) = device_or_skip(name) else { return };
    if !can_trace(name) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let verbs = ["--data-path", "verbs", "-d", &device];
    let (few, many) = (system_calls(folder.path(), &verbs, 200), system_calls(folder.path(), &verbs, 2_200));
    for (side, (few, many)) in ["coprocessor", "controller"].into_iter().zip(few.iter().zip(&many)) {
        let mut more = more(few, many);
        println!("figure: system calls of 2,000 rounds more on {device}, {side}: {more:?}");
        assert_eq!(more.remove("write"), Some(2_000), "{side}: one post for each round");
        // Starting and ending vary by a few.
        assert!(more.values().sum::<usize>() < 50, "{side}: 2,000 rounds made other system calls: {more:?}");
    }
}

const BURSTS: usize = 50;
const BURST: usize = 16;
const BURST_FILE: &str = "CATALYST_TRANSPORT_TEST_BURSTS";

/// Rounds that are queued share their posts. A reply never needs more than one; whether some share theirs depends on how soon the
/// next request is there, and is shown on the software device, where that is known.
#[test]
fn bursts_on_verbs_share_their_posts() {
    let name = "bursts_on_verbs_share_their_posts";
    let Some(_) = device_or_skip(name) else { return };
    if !can_trace(name) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let [trace, threads] = ["trace", "threads"].map(|name| folder.path().join(name));
    let traced = Command::new("strace")
        .args(["-f", "-qq", "-y", "-e", "trace=write", "-o"])
        .arg(&trace)
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "system_calls::bursts_under_strace", "--ignored", "--nocapture"])
        .env(BURST_FILE, &threads)
        .output()
        .unwrap();
    assert!(traced.status.success(), "{}", String::from_utf8_lossy(&traced.stderr));
    let controller = std::fs::read_to_string(threads).unwrap();
    let posts = |own: bool| {
        let text = std::fs::read_to_string(&trace).unwrap();
        let post = |line: &&str| line.contains(" write(") && line.contains("/dev/infiniband/uverbs");
        text.lines().filter(post).filter(|line| line.starts_with(&format!("{controller} ")) == own).count()
    };
    let (controller, engine) = (posts(true), posts(false));
    let rounds = BURSTS * BURST;
    println!("figure: posts of {rounds} rounds in bursts of {BURST}: controller {controller}, coprocessor {engine}");
    // The bring-up and the stop have a few of their own.
    assert!((BURSTS..BURSTS + 10).contains(&controller), "{controller} posts for {BURSTS} bursts");
    assert!(engine < rounds + 10, "{engine} posts for {rounds} replies");
}

/// The rounds that the test above counts. Does nothing by itself.
#[test]
#[ignore = "run under strace by bursts_on_verbs_share_their_posts"]
fn bursts_under_strace() {
    let (Some(threads), Some(device)) = (std::env::var_os(BURST_FILE), device_or_skip("bursts_under_strace")) else {
        return;
    };
    // This thread is the controller's, and every other one the coprocessor's.
    std::fs::write(threads, rustix::thread::gettid().as_raw_nonzero().to_string()).unwrap();
    let config = SessionConfig::new().data_path(DataPathKind::Verbs).device(device).depth(64);
    let config = config.reply_timeout(Duration::from_secs(20)).handshake_timeout(Duration::from_secs(20));
    let mut coprocessor = CoprocessorSession::new(config.clone()).unwrap();
    coprocessor.set_coprocessor_fn(Echo).unwrap();
    let port = coprocessor.listen(0).unwrap().port();
    let opening = std::thread::spawn(move || {
        coprocessor.open(&ConnectInfo::new("", port)).unwrap();
        coprocessor.start().unwrap();
        coprocessor
    });
    let mut controller = ControllerSession::new(config).unwrap();
    controller.open(&ConnectInfo::new("127.0.0.1", port)).unwrap();
    let coprocessor = opening.join().unwrap();
    controller.start().unwrap();
    for burst in 0..BURSTS {
        let payload = |round: usize| (burst << 8 | round).to_le_bytes();
        for round in 0..BURST {
            controller.write_data_slot(&payload(round), 0).unwrap();
            controller.queue(0).unwrap();
        }
        controller.kick_queued().unwrap();
        for round in 0..BURST {
            assert_eq!(controller.collect_reply().unwrap(), payload(round));
        }
    }
    controller.close();
    drop(coprocessor);
}
