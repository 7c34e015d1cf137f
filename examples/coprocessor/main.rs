//! A coprocessor that serves one controller after another until it is told to stop.

#[path = "../common/connection.rs"]
mod connection;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use catalyst_transport::{
    ConnectInfo, CoprocessorSession, Echo, Invert, Outcome, Result, Steane, TransportError, TransportSession,
};
use clap::Parser;
use connection::{Connection, Function, Wire};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Answer a controller's requests over shared memory or RDMA
#[derive(Debug, Parser)]
#[command(version, args_override_self = true)]
struct Options {
    #[command(flatten)]
    connection: Connection,
    /// TCP port of the out-of-band channel; 0 takes a free one
    #[arg(short = 'p', long, default_value_t = 18515, value_name = "PORT")]
    port: u16,
    /// What answers the requests
    #[arg(long, value_enum, default_value_t = Function::Echo)]
    function: Function,
    /// Pin the engine thread to this processor
    #[arg(long, value_name = "CPU")]
    cpu: Option<usize>,
    /// Run the engine thread at this SCHED_FIFO priority, lock memory and keep the processors awake
    #[arg(long, value_name = "PRIORITY", num_args = 0..=1, default_missing_value = "50")]
    realtime: Option<u8>,
    /// Serve one session, then exit
    #[arg(long)]
    once: bool,
    /// Most memory in MiB that a controller may ask for
    #[arg(long, default_value_t = 256, value_name = "MIB")]
    max_memory: usize,
}

fn main() -> ExitCode {
    connection::log_to_stderr();
    let options = Options::parse();
    let result = if options.connection.list { connection::print_devices() } else { serve(&options) };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("coprocessor: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve(options: &Options) -> Result<()> {
    // The wait for a client ends by a signal, not by time.
    let mut config = options.connection.config()?.accept_timeout(None);
    if let Some(cpu) = options.cpu {
        config = config.cpu(cpu);
    }
    if let Some(priority) = options.realtime {
        config = config.real_time(priority).lock_memory(true).low_latency(true);
    }
    let mut session = CoprocessorSession::new(config)?;
    match options.function {
        Function::Echo => session.set_coprocessor_fn(Echo)?,
        Function::Invert => session.set_coprocessor_fn(Invert)?,
        Function::Steane => session.set_coprocessor_fn(Steane)?,
    }

    let stop = Arc::new(AtomicBool::new(false));
    let (seen, canceller) = (stop.clone(), session.canceller());
    let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(|error| TransportError::System {
        call: "sigaction",
        what: "SIGINT and SIGTERM".into(),
        errno: error.into(),
        remedy: String::new(),
    })?;
    std::thread::spawn(move || {
        for _ in signals.forever() {
            seen.store(true, Ordering::Relaxed);
            canceller.cancel();
        }
    });

    let address = session.listen(options.port)?;
    say(options, &format!("listening on {address}"));
    let (mut sessions, mut served, mut failed) = (0_u64, 0_u64, 0_u64);
    let mut last = Ok(());
    while !stop.load(Ordering::Relaxed) {
        last = one_session(options, &mut session, address.port(), &stop);
        let rounds = session.served();
        if rounds > 0 || last.is_ok() {
            sessions += 1;
            served += rounds;
        }
        if let Err(error) = &last
            && !stop.load(Ordering::Relaxed)
        {
            failed += 1;
            eprintln!("coprocessor: session ended: {error}");
        }
        session.close()?;
        if options.once {
            break;
        }
    }
    if options.connection.json {
        println!("{}", serde_json::json!({ "sessions": sessions, "served": served, "failed": failed }));
    } else {
        eprintln!("served {served} rounds in {sessions} sessions");
    }
    if options.once && !stop.load(Ordering::Relaxed) { last } else { Ok(()) }
}

/// Waits for a controller and serves it until it says goodbye.
fn one_session(options: &Options, session: &mut CoprocessorSession, port: u16, stop: &AtomicBool) -> Result<()> {
    session.open_as_proposed(&ConnectInfo::new("", port), options.max_memory << 20)?;
    session.start()?;
    let report = session.real_time_report();
    let report = [&report.cpu, &report.real_time, &report.lock_memory, &report.low_latency];
    let settings = ["cpu", "real time", "memory lock", "low latency"];
    for (name, outcome) in settings.iter().zip(report).filter(|(_, outcome)| **outcome != Outcome::NotAsked) {
        eprintln!("{name}: {outcome:?}");
    }
    eprintln!("serving over {} {}", session.data_path(), session.device().unwrap_or_default());
    loop {
        match session.status() {
            Ok(()) if stop.load(Ordering::Relaxed) => return Ok(()),
            Ok(()) => std::thread::sleep(Duration::from_millis(5)),
            Err(TransportError::PeerClosed { .. }) => return Ok(()),
            // The end of the connection is the only one that the Catalyst wire has.
            Err(error @ TransportError::PeerLost { .. }) if options.connection.wire == Wire::Catalyst => {
                eprintln!("coprocessor: session ended: {error}");
                return Ok(());
            }
            Err(error) => return Err(error),
        }
    }
}

/// What a person or a script waits for; on standard output unless that is for one line of JSON.
fn say(options: &Options, text: &str) {
    if options.connection.json {
        eprintln!("{text}");
    } else {
        println!("{text}");
    }
}
