//! Rounds per second with more and more of them in flight, and bytes per second of large payloads, beside the bare
//! hand-over of a ring between two threads.
//!
//! `cargo bench --bench throughput`

#[path = "support/floor.rs"]
mod floor;
#[path = "support/pair.rs"]
mod pair;
#[path = "support/statistics.rs"]
mod statistics;

use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use catalyst_transport::{DataPathKind, SessionConfig};
use crossbeam_utils::CachePadded;
use pair::{CONTROLLER_CPU, COPROCESSOR_CPU, Pair};
use statistics::{median, spread};

fn main() {
    let quick = std::env::args().any(|argument| argument == "--test");
    let turns = if quick { 1 } else { 15 };
    floor::pin(CONTROLLER_CPU);
    let config = SessionConfig::new().data_path(DataPathKind::SharedMemory);
    println!("rounds per second of 16 bytes on shared memory, beside a bare ring of cache lines of the same depth\n");
    println!("  depth      rounds/s  spread    bare ring    part of it");
    for depth in [1, 4, 16, 64, 256] {
        let rounds = if quick { 1000 } else { 20_000 * depth.min(16) };
        let mut pair = Pair::new(&config, 16, depth);
        let (mut ours, mut bare) = (Vec::new(), Vec::new());
        for _ in 0..turns {
            bare.push(bare_ring(depth as usize, rounds));
            ours.push(pair.throughput(rounds));
        }
        let parts = median(ours.iter().zip(&bare).map(|(ours, bare)| ours / bare).collect());
        println!(
            "{depth:>7} {:>13.0} {:>6.0}% {:>12.0} {parts:>12.2}",
            median(ours.clone()),
            spread(&ours) * 100.0,
            median(bare)
        );
    }
    println!("\nbytes per second of large payloads on shared memory, each way, 4 rounds in flight\n");
    for size in [4096, 65_536, 1 << 20] {
        let rounds = if quick { 10 } else { (200_000_000 / size) as u32 };
        let mut pair = Pair::new(&config, size, 4);
        let rates: Vec<_> = (0..turns.min(5)).map(|_| pair.throughput(rounds)).collect();
        println!("{size:>9} bytes: {:.2} GB/s", median(rates) * size as f64 / 1e9);
    }
}

/// The least that rounds in flight cost: each is a cache line there and a cache line back, and nothing else is done.
fn bare_ring(depth: usize, rounds: u32) -> f64 {
    type Ring = Arc<Vec<CachePadded<AtomicU64>>>;
    let ring = || -> Ring { Arc::new((0..depth).map(|_| CachePadded::new(AtomicU64::new(0))).collect()) };
    let (there, back) = (ring(), ring());
    let rounds = u64::from(rounds);
    let partner = std::thread::spawn({
        let (there, back) = (there.clone(), back.clone());
        move || {
            floor::pin(COPROCESSOR_CPU);
            for round in 1..=rounds {
                let slot = round as usize % depth;
                while there[slot].load(Ordering::Acquire) != round {
                    spin_loop();
                }
                back[slot].store(round, Ordering::Release);
            }
        }
    });
    // Both are awake when the clock starts.
    there[1 % depth].store(1, Ordering::Release);
    while back[1 % depth].load(Ordering::Acquire) != 1 {
        spin_loop();
    }
    let began = Instant::now();
    let (mut sent, mut received) = (1, 1);
    while received < rounds {
        while sent < rounds && sent - received < depth as u64 {
            sent += 1;
            there[sent as usize % depth].store(sent, Ordering::Release);
        }
        received += 1;
        while back[received as usize % depth].load(Ordering::Acquire) != received {
            spin_loop();
        }
    }
    let rate = (rounds - 1) as f64 / began.elapsed().as_secs_f64();
    partner.join().expect("no panic");
    rate
}
