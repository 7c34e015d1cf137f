//! The bare ping-pong of ../support/floor.rs as a program of its own.
//!
//! `floor BYTES ROUNDS WARMUP BLOCK CPU PEER_CPU`: each block of rounds is one sample. Prints one line of JSON.

#[path = "../../../support/floor.rs"]
mod floor;
#[path = "../report.rs"]
mod report;

use std::time::Instant;

fn main() {
    let [bytes, rounds, warmup, block, cpu, peer_cpu] = report::numbers();
    floor::pin(cpu);
    let mut floor = floor::Floor::new(bytes, peer_cpu);
    floor.begin();
    for _ in 0..warmup {
        floor.round();
    }
    let mut samples = Vec::with_capacity(rounds / block);
    for _ in 0..rounds / block {
        let began = Instant::now();
        for _ in 0..block {
            floor.round();
        }
        samples.push(began.elapsed().as_nanos() as f64 / block as f64);
    }
    floor.end();
    report::print(samples);
}
