//! A controller that sends rounds, verifies every byte of every reply, and shows how long they took.

#[path = "../common/connection.rs"]
mod connection;
#[path = "../common/latency.rs"]
mod latency;

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use catalyst_transport::{ConnectInfo, ControllerSession, Steane, TransportSession};
use clap::Parser;
use connection::{Connection, Function, Wire};
use indicatif::{ProgressBar, ProgressStyle};
use latency::{Latency, Summary};
use serde::Serialize;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Send rounds to a coprocessor and measure them
#[derive(Debug, Parser)]
#[command(version, args_override_self = true)]
struct Options {
    #[command(flatten)]
    connection: Connection,
    /// Host name or address of the coprocessor
    #[arg(long, default_value = "127.0.0.1", value_name = "HOST")]
    peer: String,
    /// TCP port of the coprocessor's out-of-band channel
    #[arg(short = 'p', long, default_value_t = 18515, value_name = "PORT")]
    port: u16,
    /// Payload bytes a round: 16, and always 8 on the Catalyst wire, if not given
    #[arg(short = 's', long = "size", value_name = "BYTES")]
    size: Option<usize>,
    /// Rounds
    #[arg(short = 'n', long = "iters", default_value_t = 100_000, value_name = "ROUNDS")]
    rounds: u64,
    /// Rounds in flight, a power of two
    #[arg(long, default_value_t = 1, value_name = "ROUNDS")]
    depth: u32,
    /// Microseconds from one kick to the next; 0 is back to back
    #[arg(long, default_value_t = 0.0, value_name = "MICROSECONDS")]
    interval_us: f64,
    /// Rounds before those that count
    #[arg(long, default_value_t = 1_000, value_name = "ROUNDS")]
    warmup: u64,
    /// Time whole rounds, from write_data_slot to collect: so many are one sample, and only a sample's last reply is verified
    #[arg(long, value_name = "ROUNDS", conflicts_with_all = ["depth", "interval_us", "csv"])]
    block: Option<u64>,
    /// What the coprocessor answers with
    #[arg(long, value_enum, default_value_t = Function::Echo)]
    function: Function,
    /// Pin this process to a processor
    #[arg(long, value_name = "CPU")]
    cpu: Option<usize>,
    /// Milliseconds to wait for a reply
    #[arg(long, default_value_t = 1_000, value_name = "MS")]
    timeout_ms: u64,
    /// Write each sample to this file: round, nanoseconds
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
}

/// The line of `--json`.
#[derive(Debug, Serialize)]
struct Report {
    data_path: String,
    device: Option<String>,
    wire: &'static str,
    payload_bytes: usize,
    rounds: u64,
    depth: u32,
    verified: u64,
    corrupt: u64,
    elapsed_s: f64,
    rounds_per_s: f64,
    rtt_ns: Summary,
}

fn main() -> ExitCode {
    connection::log_to_stderr();
    let options = Options::parse();
    let result = if options.connection.list {
        connection::print_devices().map_err(Into::into).map(|()| true)
    } else {
        run(&options)
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("controller: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs all rounds; says whether every reply was right.
fn run(options: &Options) -> Result<bool> {
    let size = options.size.unwrap_or(match options.connection.wire {
        Wire::Native => 16,
        Wire::Catalyst => 8,
    });
    let (request_bytes, reply_bytes) = match options.function {
        Function::Steane => (Steane::REQUEST_BYTES, Steane::REPLY_BYTES),
        _ => (size, size),
    };
    let mut config = options
        .connection
        .config()?
        .depth(options.depth)
        .request_capacity(request_bytes)
        .reply_capacity(reply_bytes)
        .reply_timeout(Duration::from_millis(options.timeout_ms));
    if let Some(cpu) = options.cpu {
        config = config.cpu(cpu);
    }
    let mut csv = match &options.csv {
        Some(path) => Some(BufWriter::new(File::create(path).map_err(|error| format!("{}: {error}", path.display()))?)),
        None => None,
    };
    let mut session = ControllerSession::new(config)?;
    session.open(&ConnectInfo::new(&options.peer, options.port))?;
    session.start()?;
    eprintln!("connected over {} {}", session.data_path(), session.device().unwrap_or_default());

    let mut rounds =
        Rounds { options, payload: vec![0; request_bytes], reply: vec![0; reply_bytes], expected: Vec::new() };
    rounds.run(&mut session, options.warmup, |_, _| Ok(()))?;
    let bar = progress_bar(options.rounds);
    let mut latency = Latency::new();
    let began = Instant::now();
    let mut sample = |round: u64, nanoseconds: u64| -> Result<()> {
        latency.record(nanoseconds);
        if let Some(csv) = &mut csv {
            writeln!(csv, "{round},{nanoseconds}")?;
        }
        if round.is_multiple_of(4096) {
            bar.set_position(round);
        }
        Ok(())
    };
    let (corrupt, verified) = match options.block {
        None => (rounds.run(&mut session, options.rounds, &mut sample)?, options.rounds),
        Some(block) => rounds.run_blocks(&mut session, options.rounds, block.max(1), &mut sample)?,
    };
    let elapsed = began.elapsed().as_secs_f64();
    bar.finish_and_clear();
    session.stop()?;
    if let Some(csv) = &mut csv {
        csv.flush()?;
    }

    let report = Report {
        data_path: session.data_path().into(),
        device: session.device().map(Into::into),
        wire: options.connection.wire.name(),
        payload_bytes: request_bytes,
        rounds: options.rounds,
        depth: options.depth,
        verified: verified - corrupt,
        corrupt,
        elapsed_s: elapsed,
        rounds_per_s: (options.rounds as f64 / elapsed).round(),
        rtt_ns: latency.summary(),
    };
    if options.connection.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        println!(
            "{} rounds of {} bytes, {} in flight, {:.2} s, {:.0} rounds/s: {} verified, {} corrupt",
            report.rounds, report.payload_bytes, report.depth, elapsed, report.rounds_per_s, report.verified, corrupt
        );
        println!("round trip: {}", latency.line());
        print!("{}", latency.picture());
    }
    Ok(corrupt == 0)
}

/// Payloads that differ from round to round, and the replies that belong to them.
struct Rounds<'a> {
    options: &'a Options,
    payload: Vec<u8>,
    reply: Vec<u8>,
    expected: Vec<u8>,
}

impl Rounds<'_> {
    /// Runs `count` rounds with up to `depth` in flight; returns how many replies were wrong.
    fn run(
        &mut self,
        session: &mut ControllerSession,
        count: u64,
        mut sample: impl FnMut(u64, u64) -> Result<()>,
    ) -> Result<u64> {
        let interval = Duration::from_secs_f64(self.options.interval_us.max(0.0) / 1e6);
        let mut next = Instant::now();
        let (mut kicked, mut collected, mut corrupt) = (0, 0, 0);
        while collected < count {
            while kicked < count && kicked - collected < u64::from(self.options.depth) {
                if !interval.is_zero() {
                    while Instant::now() < next {
                        std::hint::spin_loop();
                    }
                    next += interval;
                }
                fill(&mut self.payload, kicked);
                session.write_data_slot(&self.payload, 0)?;
                session.kick(0)?;
                kicked += 1;
            }
            let length = session
                .collect(&mut [&mut self.reply])
                .map_err(|error| format!("round {collected} of {count}: {error}"))?;
            if !self.is_right(collected, length) {
                corrupt += 1;
            }
            sample(collected, session.last_rtt_ns())?;
            collected += 1;
        }
        Ok(corrupt)
    }

    /// Runs `count` rounds one at a time, with nothing between them but a pair of stamps for each `block`. Returns how many
    /// replies were wrong, and how many were verified.
    fn run_blocks(
        &mut self,
        session: &mut ControllerSession,
        count: u64,
        block: u64,
        mut sample: impl FnMut(u64, u64) -> Result<()>,
    ) -> Result<(u64, u64)> {
        let (mut corrupt, blocks) = (0, count / block);
        for number in 0..blocks {
            fill(&mut self.payload, number);
            let mut length = 0;
            let began = Instant::now();
            for _ in 0..block {
                session.write_data_slot(&self.payload, 0)?;
                session.kick(0)?;
                length = session.collect(&mut [&mut self.reply])?;
            }
            let took = began.elapsed().as_nanos() as u64 / block;
            if !self.is_right(number, length) {
                corrupt += 1;
            }
            sample(number * block, took)?;
        }
        Ok((corrupt, blocks))
    }

    fn is_right(&mut self, round: u64, length: usize) -> bool {
        self.expected.resize(self.payload.len(), 0);
        fill(&mut self.expected, round);
        match self.options.function {
            Function::Echo => {}
            Function::Invert => self.expected.iter_mut().for_each(|byte| *byte = !*byte),
            Function::Steane => {
                let syndrome = self.expected.iter().fold(0, |bits, check| bits << 1 | usize::from(*check != 0));
                return self.reply[..length] == Steane::TABLE[syndrome].to_le_bytes();
            }
        }
        self.reply[..length] == self.expected
    }
}

/// The payload of a round: bytes that depend on the round and on their place.
fn fill(payload: &mut [u8], round: u64) {
    // The golden ratio's bits spread consecutive numbers over all of them.
    let mut word = (round + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    for chunk in payload.chunks_mut(8) {
        chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()]);
        word = word.rotate_left(23).wrapping_add(0x9E37_79B9_7F4A_7C15);
    }
}

/// A bar on a terminal, nothing elsewhere.
fn progress_bar(rounds: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} rounds  {per_sec}  {eta} left");
    ProgressBar::new(rounds).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}
