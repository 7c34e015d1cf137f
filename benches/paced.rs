//! Round trips that begin at fixed times, with their tail, beside the floor paced by the same code.
//!
//! `cargo bench --bench paced`. Back to back, caches are warm and nothing sleeps; rounds with pauses between them show what
//! the machine and the engine do meanwhile. Short turns of the floor and of the crate alternate.

#[path = "support/floor.rs"]
mod floor;
#[path = "support/pair.rs"]
mod pair;
#[path = "support/statistics.rs"]
mod statistics;

use std::hint::spin_loop;
use std::time::{Duration, Instant};

use catalyst_transport::{DataPathKind, SessionConfig};
use floor::Floor;
use hdrhistogram::Histogram;
use pair::{CONTROLLER_CPU, COPROCESSOR_CPU, Pair};
use serde::Serialize;

const PAYLOAD: usize = 16;
const INTERVALS_US: [u64; 4] = [1, 10, 100, 1000];
const TURNS: usize = 10;
/// How long one turn of one side lasts.
const TURN: Duration = Duration::from_millis(250);

/// Nanoseconds of a round trip.
#[derive(Serialize)]
struct Tail {
    rounds: u64,
    p50_ns: u64,
    p99_ns: u64,
    p999_ns: u64,
    max_ns: u64,
}

#[derive(Serialize)]
struct Row {
    interval_us: u64,
    floor: Tail,
    shm: Tail,
    p50_ratio: f64,
    p99_ratio: f64,
    p999_ratio: f64,
}

fn main() {
    let quick = std::env::args().any(|argument| argument == "--test");
    let (turns, turn) = if quick { (1, TURN / 25) } else { (TURNS, TURN) };
    floor::pin(CONTROLLER_CPU);
    let config = SessionConfig::new().data_path(DataPathKind::SharedMemory);
    println!("rounds of {PAYLOAD} bytes on shared memory that begin at fixed times, beside the floor paced alike\n");
    println!("interval                  p50       p99     p99.9       max    rounds");
    let mut rows = Vec::new();
    for interval_us in INTERVALS_US {
        let interval = Duration::from_micros(interval_us);
        let mut floor = Floor::new(PAYLOAD, COPROCESSOR_CPU);
        let mut pair = Pair::new(&config, PAYLOAD, 1);
        let (mut below, mut ours) = (histogram(), histogram());
        for number in 0..turns {
            // Neither is always the first.
            for first in [true, false] {
                if first == (number % 2 == 0) {
                    floor.begin();
                    paced(interval, turn, &mut below, || floor.round());
                    floor.end();
                } else {
                    pair.begin();
                    paced(interval, turn, &mut ours, || pair.round());
                    pair.end();
                }
            }
        }
        let (floor, shm) = (tail(&below), tail(&ours));
        let ratio = |ours: u64, floor: u64| ours as f64 / floor as f64;
        let row = Row {
            interval_us,
            p50_ratio: ratio(shm.p50_ns, floor.p50_ns),
            p99_ratio: ratio(shm.p99_ns, floor.p99_ns),
            p999_ratio: ratio(shm.p999_ns, floor.p999_ns),
            floor,
            shm,
        };
        print(&row);
        rows.push(row);
    }
    if quick {
        return;
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/target/paced.json");
    match std::fs::write(path, serde_json::to_string_pretty(&rows).expect("plain figures")) {
        Ok(()) => println!("written to {path}"),
        Err(error) => eprintln!("{path}: {error}"),
    }
}

/// Begins a round at each multiple of `interval` for as long as `turn`. A round that is late delays the ones behind it, and no
/// round is begun to make up for it.
fn paced(interval: Duration, turn: Duration, times: &mut Histogram<u64>, mut round: impl FnMut()) {
    let end = Instant::now() + turn;
    let mut next = Instant::now() + interval;
    loop {
        let mut now = Instant::now();
        while now < next {
            spin_loop();
            now = Instant::now();
        }
        if now >= end {
            return;
        }
        round();
        let done = Instant::now();
        times.saturating_record((done - now).as_nanos() as u64);
        next = (next + interval).max(done);
    }
}

fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("three digits are allowed")
}

fn tail(times: &Histogram<u64>) -> Tail {
    let at = |quantile| times.value_at_quantile(quantile);
    Tail { rounds: times.len(), p50_ns: at(0.5), p99_ns: at(0.99), p999_ns: at(0.999), max_ns: times.max() }
}

fn print(row: &Row) {
    for (name, tail) in [("floor", &row.floor), ("shm", &row.shm)] {
        println!(
            "{:>5} µs {name:>8} {:>8} ns {:>6} ns {:>6} ns {:>6} ns {:>9}",
            row.interval_us, tail.p50_ns, tail.p99_ns, tail.p999_ns, tail.max_ns, tail.rounds
        );
    }
    println!("{:>17} {:>8.2} × {:>7.2} × {:>7.2} ×\n", "ratio", row.p50_ratio, row.p99_ratio, row.p999_ratio);
}
