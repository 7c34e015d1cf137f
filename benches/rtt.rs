//! Round-trip times through the public API, beside the physical limit of this machine in the same run.
//!
//! `cargo bench --bench rtt`. Where the host moves virtual processors about, an absolute time means nothing: each measurement is
//! short and alternates with the floor, and it is the ratio of the two that counts. With a device named in
//! CATALYST_TRANSPORT_DEVICE the same is measured on verbs.

#[path = "support/floor.rs"]
mod floor;
#[path = "support/pair.rs"]
mod pair;
#[path = "support/statistics.rs"]
mod statistics;

use std::time::Duration;

use catalyst_transport::{DataPathKind, SessionConfig};
use criterion::Criterion;
use floor::Floor;
use pair::{CONTROLLER_CPU, COPROCESSOR_CPU, Pair};
use serde::Serialize;
use statistics::{least, median, spread};

const SIZES: [usize; 8] = [0, 8, 16, 40, 128, 512, 4096, 65_536];

/// Figures of one payload size.
#[derive(Serialize)]
struct Row {
    payload_bytes: usize,
    p50_ns: f64,
    min_ns: f64,
    spread: f64,
    ratio_to_floor: f64,
    copying_floor_ns: f64,
    ratio_to_copying_floor: f64,
}

#[derive(Serialize)]
struct Table {
    floor_ns: f64,
    floor_min_ns: f64,
    shm: Vec<Row>,
    verbs: Vec<Row>,
}

fn main() {
    floor::pin(CONTROLLER_CPU);
    let shm = SessionConfig::new().data_path(DataPathKind::SharedMemory);
    let verbs = std::env::var("CATALYST_TRANSPORT_DEVICE").ok().map(|device| {
        let patience = Duration::from_secs(10);
        SessionConfig::new().data_path(DataPathKind::Verbs).device(device).reply_timeout(patience)
    });
    let mut criterion =
        Criterion::default().configure_from_args().sample_size(20).measurement_time(Duration::from_secs(1));
    through_criterion(&mut criterion, "shm", &shm);
    if let Some(verbs) = &verbs {
        through_criterion(&mut criterion, "verbs", verbs);
    }
    criterion.final_summary();
    // `cargo test` runs benches once to see that they work.
    if std::env::args().any(|argument| argument == "--test") {
        return;
    }

    let (floors, shm) = interleaved(&shm, 40, 2000);
    let verbs = verbs.map_or_else(Vec::new, |config| interleaved(&config, 7, 200).1);
    let table = Table { floor_ns: median(floors.clone()), floor_min_ns: least(&floors), shm, verbs };
    print(&table);
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/target/rtt.json");
    let text = serde_json::to_string_pretty(&table).expect("plain figures");
    match std::fs::write(path, text) {
        Ok(()) => println!("written to {path}"),
        Err(error) => eprintln!("{path}: {error}"),
    }
}

fn through_criterion(criterion: &mut Criterion, name: &str, config: &SessionConfig) {
    let mut group = criterion.benchmark_group(name);
    for size in SIZES {
        let mut pair = Pair::new(config, size, 1);
        group.bench_function(format!("{size} bytes"), |bencher| {
            bencher.iter_custom(|rounds| {
                let rounds = u32::try_from(rounds).unwrap_or(u32::MAX);
                Duration::from_nanos((pair.measure(rounds) * f64::from(rounds)) as u64)
            });
        });
    }
    group.finish();
}

/// Short measurements of the floor and of every size in turn. Gives the floors and a row for each size.
fn interleaved(config: &SessionConfig, turns: usize, rounds: u32) -> (Vec<f64>, Vec<Row>) {
    let mut floor = Floor::new(0, COPROCESSOR_CPU);
    let mut floors = Vec::new();
    let mut rows = Vec::new();
    for size in SIZES {
        let rounds = (rounds / (1 + size as u32 / 4096)).max(20);
        let mut copying = Floor::new(size, COPROCESSOR_CPU);
        let mut pair = Pair::new(config, size, 1);
        let (mut bare, mut copied, mut times) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..turns {
            bare.push(floor.measure(rounds));
            copied.push(copying.measure(rounds));
            times.push(pair.measure(rounds));
        }
        // Each measurement is divided by its neighbour: what the host does meanwhile hits both.
        let ratio = |below: &[f64]| median(times.iter().zip(below).map(|(time, floor)| time / floor).collect());
        rows.push(Row {
            payload_bytes: size,
            p50_ns: median(times.clone()),
            min_ns: least(&times),
            spread: spread(&times),
            ratio_to_floor: ratio(&bare),
            copying_floor_ns: median(copied.clone()),
            ratio_to_copying_floor: ratio(&copied),
        });
        floors.extend(bare);
    }
    (floors, rows)
}

fn print(table: &Table) {
    println!(
        "\nfloor: cache-line ping-pong between two pinned threads, median {:.0} ns, least {:.0} ns",
        table.floor_ns, table.floor_min_ns
    );
    println!("ratios are medians over neighbouring measurements; spread is the quartiles' distance over the median\n");
    for (name, rows) in [("shm", &table.shm), ("verbs", &table.verbs)] {
        if rows.is_empty() {
            continue;
        }
        println!("{name:>6}    bytes    median       min  spread  × floor  × copying floor (ns)");
        for row in rows {
            println!(
                "       {:>8} {:>7.0} ns {:>6.0} ns {:>6.0}% {:>8.2} {:>8.2} ({:.0})",
                row.payload_bytes,
                row.p50_ns,
                row.min_ns,
                row.spread * 100.0,
                row.ratio_to_floor,
                row.ratio_to_copying_floor,
                row.copying_floor_ns
            );
        }
    }
}
