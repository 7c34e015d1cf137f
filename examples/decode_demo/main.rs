//! Decodes real syndromes between two processes: this one is the controller, and starts a coprocessor whose function is
//! a minimum-weight perfect matching decoder.

#[path = "../common/connection.rs"]
#[allow(dead_code)]
mod connection;
mod dataset;
mod decoder;
#[path = "../common/latency.rs"]
mod latency;
mod model;
#[cfg(test)]
mod tests;

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use catalyst_transport::{
    ConnectInfo, ControllerSession, CoprocessorSession, FunctionError, Request, SessionConfig, TransportError,
    TransportSession,
};
use clap::Parser;
use connection::Connection;
use dataset::Dataset;
use decoder::{MatchingDecoder, MatchingGraph};
use indicatif::{ProgressBar, ProgressStyle};
use latency::{Latency, Summary};
use model::DetectorErrorModel;
use serde::Serialize;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// The code distances, each of which is its own decoder id.
const DISTANCES: [u32; 3] = [3, 5, 7];
/// A reply: the predicted observable flips as a bit mask, and the nanoseconds that decoding took; each a u64.
const REPLY_BYTES: usize = 16;
/// The first shots of each distance warm caches and branch predictors up; their times do not count.
const WARMUP: usize = 64;

/// Decode surface-code syndromes between two processes
#[derive(Debug, Parser)]
#[command(version, args_override_self = true)]
struct Options {
    #[command(flatten)]
    connection: Connection,
    /// Folder with the data sets
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data"), value_name = "DIR")]
    data: PathBuf,
    /// Be the coprocessor that this program starts
    #[arg(long, hide = true)]
    serve: bool,
}

/// What is reported of one distance.
#[derive(Debug, Serialize)]
struct Report {
    distance: u32,
    data_path: String,
    shots: usize,
    payload_bytes: usize,
    undecoded_errors: usize,
    logical_errors: usize,
    pymatching_logical_errors: usize,
    agree_with_pymatching: usize,
    corrupt: usize,
    rtt_ns: Summary,
    decode_ns: Summary,
    transport_ns: Summary,
}

fn main() -> ExitCode {
    connection::log_to_stderr();
    let options = Options::parse();
    let result = if options.connection.list {
        connection::print_devices().map_err(Into::into)
    } else if options.serve {
        serve(&options)
    } else {
        control(&options)
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("decode_demo: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Both ends of this program agree on these.
fn config(options: &Options) -> catalyst_transport::Result<SessionConfig> {
    // Decoding takes up to some milliseconds; a busy machine may take longer for a moment.
    Ok(options
        .connection
        .config()?
        .depth(4)
        .request_capacity(64)
        .reply_capacity(REPLY_BYTES)
        .reply_timeout(Duration::from_secs(5)))
}

// ----- coprocessor ----------------------------------------------------------------------------------------------------

/// Serves one session with a decoder for each distance.
fn serve(options: &Options) -> Result<()> {
    let mut session = CoprocessorSession::new(config(options)?)?;
    for distance in DISTANCES {
        let set = Dataset::load(&options.data, distance)?;
        let graph = MatchingGraph::from_model(&DetectorErrorModel::parse(set.model())?)?;
        session.set_decoder(distance, decoder_function(MatchingDecoder::new(&graph)))?;
    }
    let address = session.listen(0)?;
    println!("listening on {address}");
    session.open(&ConnectInfo::new("", address.port()))?;
    session.start()?;
    loop {
        match session.status() {
            Ok(()) => std::thread::sleep(Duration::from_millis(5)),
            Err(TransportError::PeerClosed { .. }) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

fn decoder_function(
    mut decoder: MatchingDecoder,
) -> impl FnMut(Request<'_>, &mut [u8]) -> std::result::Result<usize, FunctionError> {
    move |request, reply| {
        if request.payload.len() != decoder.syndrome_bytes() {
            let (got, wanted) = (request.payload.len(), decoder.syndrome_bytes());
            return Err(format!("a syndrome of this code has {wanted} bytes, this one {got}").into());
        }
        let began = Instant::now();
        let flips = decoder.decode(request.payload);
        let nanoseconds = began.elapsed().as_nanos() as u64;
        let reply = reply.first_chunk_mut::<REPLY_BYTES>().ok_or("the reply holds too little")?;
        reply[..8].copy_from_slice(&flips.to_le_bytes());
        reply[8..].copy_from_slice(&nanoseconds.to_le_bytes());
        Ok(REPLY_BYTES)
    }
}

/// The coprocessor process. It ends with this one.
struct Coprocessor(Child);

impl Coprocessor {
    /// Starts it and waits until it listens.
    fn start() -> Result<(Self, ConnectInfo)> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(std::env::args_os().skip(1))
            .arg("--serve")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let output = child.stdout.take().ok_or("no pipe")?;
        let coprocessor = Self(child);
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        let address = line.trim().strip_prefix("listening on ").ok_or("the coprocessor did not start")?;
        let (host, port) = address.rsplit_once(':').ok_or("the coprocessor's address has no port")?;
        Ok((coprocessor, ConnectInfo::new(host, port.parse()?)))
    }

    /// Waits until it has ended by itself.
    fn finish(mut self) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(5);
        while Instant::now() < deadline {
            if let Some(status) = self.0.try_wait()? {
                return if status.success() {
                    Ok(())
                } else {
                    Err(format!("the coprocessor ended with {status}").into())
                };
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Err("the coprocessor did not end after the goodbye".into())
    }
}

impl Drop for Coprocessor {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

// ----- controller -----------------------------------------------------------------------------------------------------

fn control(options: &Options) -> Result<()> {
    let (coprocessor, address) = Coprocessor::start()?;
    let mut session = ControllerSession::new(config(options)?)?;
    session.open(&address)?;
    session.start()?;
    eprintln!("decoding over {} {}", session.data_path(), session.device().unwrap_or("between two processes"));
    let mut reports = Vec::new();
    let mut times = Latency::new();
    for distance in DISTANCES {
        let set = Dataset::load(&options.data, distance)?;
        reports.push(stream(&mut session, &set, &mut times)?);
    }
    session.stop()?;
    session.close();
    coprocessor.finish()?;

    if options.connection.json {
        println!("{}", serde_json::to_string(&reports)?);
    } else {
        print_table(&reports);
        println!("\nRound trip less decoding, all distances: {}", times.line());
        print!("{}", times.picture());
    }
    let corrupt: usize = reports.iter().map(|report| report.corrupt).sum();
    if corrupt > 0 {
        return Err(format!("{corrupt} replies were corrupt").into());
    }
    for report in &reports {
        let (ours, reference) = (report.logical_errors, report.pymatching_logical_errors);
        if ours.abs_diff(reference) > 3.max(reference / 20) {
            return Err(format!(
                "distance {}: {ours} logical errors where PyMatching has {reference}",
                report.distance
            )
            .into());
        }
    }
    Ok(())
}

/// Sends every shot of a data set as it is, and compares the answers with the truth.
fn stream(session: &mut ControllerSession, set: &Dataset, times: &mut Latency) -> Result<Report> {
    let info = set.description();
    let bar = progress_bar(info.distance, info.shots);
    let (mut rtt, mut decode, mut transport) = (Latency::new(), Latency::new(), Latency::new());
    let (mut undecoded, mut wrong, mut agree, mut corrupt) = (0, 0, 0, 0);
    let mut reply = [0; REPLY_BYTES];
    for shot in 0..info.shots {
        session.write_data_slot(set.shot(shot), info.distance)?;
        session.kick(0)?;
        let length = session.collect(&mut [&mut reply]).map_err(|error| format!("shot {shot}: {error}"))?;
        let flips = u64::from_le_bytes(*reply.first_chunk().ok_or("short reply")?);
        let decoding = u64::from_le_bytes(*reply.last_chunk().ok_or("short reply")?);
        // A prediction has one bit.
        if length != REPLY_BYTES || flips > 1 {
            corrupt += 1;
            continue;
        }
        undecoded += usize::from(set.observable(shot));
        wrong += usize::from((flips == 1) != set.observable(shot));
        agree += usize::from((flips == 1) == set.pymatching(shot));
        if shot >= WARMUP {
            rtt.record(session.last_rtt_ns());
            decode.record(decoding);
            // Where this process was put aside between its request and its first look at the clock, nothing is left.
            let wire = session.last_rtt_ns().saturating_sub(decoding);
            transport.record(wire);
            times.record(wire);
        }
        if shot.is_multiple_of(16) {
            bar.set_position(shot as u64);
        }
    }
    bar.finish_and_clear();
    Ok(Report {
        distance: info.distance,
        data_path: session.data_path().into(),
        shots: info.shots,
        payload_bytes: info.bytes_per_shot,
        undecoded_errors: undecoded,
        logical_errors: wrong,
        pymatching_logical_errors: info.pymatching_logical_errors,
        agree_with_pymatching: agree,
        corrupt,
        rtt_ns: rtt.summary(),
        decode_ns: decode.summary(),
        transport_ns: transport.summary(),
    })
}

fn print_table(reports: &[Report]) {
    println!(
        "Logical errors: without decoding, decoded here, and by PyMatching. Times are medians; wire = round trip less decoding.\n"
    );
    println!(
        "distance  shots  bytes  undecoded  decoded  PyMatching  agreement  corrupt  round trip   decoding       wire"
    );
    for report in reports {
        println!(
            "{:>8}  {:>5}  {:>5}  {:>9}  {:>7}  {:>10}  {:>8.2}%  {:>7}  {:>10}  {:>9}  {:>9}",
            report.distance,
            report.shots,
            report.payload_bytes,
            report.undecoded_errors,
            report.logical_errors,
            report.pymatching_logical_errors,
            report.agree_with_pymatching as f64 * 100.0 / report.shots as f64,
            report.corrupt,
            latency::time(report.rtt_ns.p50),
            latency::time(report.decode_ns.p50),
            latency::time(report.transport_ns.p50),
        );
    }
}

/// A bar on a terminal, nothing elsewhere.
fn progress_bar(distance: u32, shots: usize) -> ProgressBar {
    let style = ProgressStyle::with_template(&format!(
        "distance {distance} {{bar:40}} {{pos}}/{{len}} shots  {{per_sec}}  {{eta}} left"
    ));
    ProgressBar::new(shots as u64).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}
