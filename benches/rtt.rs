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
    // What the command line says counts more, as --measurement-time on an emulated device.
    let mut criterion =
        Criterion::default().sample_size(20).measurement_time(Duration::from_secs(1)).configure_from_args();
    through_criterion(&mut criterion, "shm", &shm);
    if let Some(verbs) = &verbs {
        through_criterion(&mut criterion, "verbs", verbs);
    }
    criterion.final_summary();
    // `cargo test` runs benches once to see that they work.
    if std::env::args().any(|argument| argument == "--test") {
        return;
    }

    let (floors, shm) = interleaved(&shm, 40, 1000);
    let verbs = verbs.map_or_else(Vec::new, |config| interleaved(&config, 3, 100).1);
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

/// Short measurements of the floor and of every size, each in `draws` of fresh memory. Gives the floors and a row for each size.
///
/// How long a cache line takes from one processor to another depends on its physical address, by a tenth or more either way: with
/// one piece of memory for each side, the ratio would tell of luck.
fn interleaved(config: &SessionConfig, draws: usize, rounds: u32) -> (Vec<f64>, Vec<Row>) {
    let mut floors = Vec::new();
    let mut rows = Vec::new();
    // Kept until the end, so that the next draw gets other pages.
    let mut kept = Vec::new();
    for size in SIZES {
        let rounds = (rounds / (1 + size as u32 / 4096)).max(20);
        let (mut bare, mut copied, mut times) = (Vec::new(), Vec::new(), Vec::new());
        for draw in 0..draws {
            let mut floor = Floor::new(0, COPROCESSOR_CPU);
            let mut copying = Floor::new(size, COPROCESSOR_CPU);
            let mut pair = Pair::new(config, size, 1);
            let (mut below, mut below_copying, mut ours) = (Vec::new(), Vec::new(), Vec::new());
            for turn in 0..6 {
                let took = (floor.measure(rounds), copying.measure(rounds), pair.measure(rounds));
                // The first warms up.
                if turn > 0 {
                    below.push(took.0);
                    below_copying.push(took.1);
                    ours.push(took.2);
                }
            }
            bare.push(median(below));
            copied.push(median(below_copying));
            times.push(median(ours));
            kept.push(vec![1_u8; 4096 * (1 + draw * 7 % 13)]);
        }
        let typical = median(times.clone());
        let copying = median(copied);
        rows.push(Row {
            payload_bytes: size,
            p50_ns: typical,
            min_ns: least(&times),
            spread: spread(&times),
            ratio_to_floor: typical / median(bare.clone()),
            copying_floor_ns: copying,
            ratio_to_copying_floor: typical / copying,
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
    println!(
        "medians over 40 pieces of memory (verbs: 3); ratios are of medians; spread is the quartiles' distance over the median\n"
    );
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
