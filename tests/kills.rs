//! `kill -9` of either side at random moments, over shared memory: each is noticed within its bound, nothing is left behind, and
//! the next session works, at the same port.

#[path = "support/census.rs"]
mod census;
#[path = "support/fleet.rs"]
mod fleet;
#[path = "support/peers.rs"]
mod peers;

use std::time::Duration;

use fleet::{Means, kill_loop};

/// Not a test: one side of the others, as a process of its own.
#[test]
#[ignore = "a process that other tests start"]
fn peer() {
    peers::run();
}

fn means() -> Means {
    let config = "path=shm;liveness_ms=2000;timeout_ms=20000;handshake_ms=1000";
    Means {
        controller: config.into(),
        coprocessor: format!("{config};accept_ms=0"),
        host: "127.0.0.1",
        liveness: Duration::from_secs(2),
        noticed: Duration::from_secs(2),
        patience: Duration::from_secs(60),
    }
}

#[test]
fn a_thousand_kills_are_noticed_and_leave_nothing() {
    kill_loop(means(), 1000, Duration::from_millis(12), Duration::from_millis(4));
}
