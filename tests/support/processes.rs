//! The example programs as processes of their own: what a user runs, and what may be killed.

#![allow(dead_code)] // each test file uses a part of it

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;

/// A process that is killed at the end of the test, whatever becomes of it.
pub(crate) struct Process {
    child: Child,
    name: String,
    /// What it has said on standard error so far.
    errors: Arc<Mutex<String>>,
    reader: Option<JoinHandle<()>>,
}

/// How a process ended.
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    pub(crate) took: Duration,
}

/// Says that a test was skipped, and why.
pub(crate) fn skip(test: &str, reason: &str) {
    println!("skipped: {reason}");
    assert!(std::env::var_os("CI").is_none(), "in CI nothing is skipped: {reason}");
    if let Some(log) = std::env::var_os("CATALYST_TRANSPORT_SKIP_LOG") {
        let mut log = std::fs::File::options().append(true).create(true).open(log).unwrap();
        writeln!(log, "{test}: {reason}").unwrap();
    }
}

/// Where the examples are: beside this test, or where `scripts/test` has built them optimised.
fn program(name: &str) -> PathBuf {
    if let Some(folder) = std::env::var_os("CATALYST_TRANSPORT_BIN_DIR") {
        return PathBuf::from(folder).join(name);
    }
    let test = std::env::current_exe().unwrap();
    test.parent().unwrap().parent().unwrap().join("examples").join(name)
}

impl Process {
    pub(crate) fn start(name: &str, arguments: &[&str]) -> Self {
        Self::launch(name, Command::new(program(name)).args(arguments))
    }

    /// The same by way of another program that ends in executing it, such as setpriv, prlimit or unshare.
    pub(crate) fn under(way: &[&str], name: &str, arguments: &[&str]) -> Self {
        Self::launch(name, Command::new(way[0]).args(&way[1..]).arg(program(name)).args(arguments))
    }

    /// The independent peer in Python, on Debian's own interpreter, which has the bindings.
    pub(crate) fn catalyst_peer(arguments: &[&str]) -> Self {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/peers/catalyst_peer.py");
        Self::launch("catalyst_peer.py", Command::new("/usr/bin/python3").arg(script).args(arguments))
    }

    /// The same under strace, which writes every system call of every thread to a file.
    pub(crate) fn traced(name: &str, trace: &Path, arguments: &[&str]) -> Self {
        let mut command = Command::new("strace");
        command.args(["-f", "-qq", "-o"]).arg(trace).arg(program(name)).args(arguments);
        Self::launch(name, &mut command)
    }

    /// Whether strace is here and may trace.
    pub(crate) fn can_trace() -> bool {
        Command::new("strace").args(["-qq", "-o", "/dev/null", "true"]).status().is_ok_and(|status| status.success())
    }

    pub(crate) fn launch(name: &str, command: &mut Command) -> Self {
        let mut child = command
            .env_remove("RUST_LOG")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}; build the examples first"));
        let errors = Arc::new(Mutex::new(String::new()));
        let (stream, said) = (child.stderr.take().unwrap(), errors.clone());
        let reader = std::thread::spawn(move || {
            for line in BufReader::new(stream).lines().map_while(Result::ok) {
                *said.lock().unwrap() += &(line + "\n");
            }
        });
        Self { child, name: name.into(), errors, reader: Some(reader) }
    }

    /// Waits until it has said this on standard error.
    pub(crate) fn has_said(&mut self, words: &str) {
        let began = Instant::now();
        while !self.errors.lock().unwrap().contains(words) {
            assert!(began.elapsed() < Duration::from_secs(60), "{} has not said '{words}'", self.name);
            assert!(self.is_running(), "{} has ended: {}", self.name, self.errors.lock().unwrap());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// A coprocessor, and the port that it listens on.
    pub(crate) fn coprocessor(arguments: &[&str]) -> (Self, String) {
        Self::start("coprocessor", &[&["-p", "0"], arguments].concat()).listening()
    }

    /// A coprocessor under strace, and its port.
    pub(crate) fn traced_coprocessor(trace: &Path, arguments: &[&str]) -> (Self, String) {
        Self::traced("coprocessor", trace, &[&["-p", "0"], arguments].concat()).listening()
    }

    pub(crate) fn listening(self) -> (Self, String) {
        let mut process = self;
        let mut line = String::new();
        BufReader::with_capacity(1, process.child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let Some(port) = line.trim().strip_prefix("listening on ").and_then(|text| text.rsplit(':').next()) else {
            std::thread::sleep(Duration::from_millis(100));
            panic!("the coprocessor said '{line}' and {}", process.errors.lock().unwrap());
        };
        (process, port.to_owned())
    }

    pub(crate) fn signal(&self, signal: &str) {
        let sent = Command::new("kill").args([&format!("-{signal}"), &self.child.id().to_string()]).status().unwrap();
        assert!(sent.success(), "kill -{signal} {}", self.name);
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Waits for the end, which has to come within `bound`.
    pub(crate) fn end_within(mut self, bound: Duration) -> Ended {
        let began = Instant::now();
        // Read in a thread of its own, so that a full pipe stops nothing.
        let mut stream = self.child.stdout.take().unwrap();
        let stdout = std::thread::spawn(move || {
            let mut text = String::new();
            let _ = stream.read_to_string(&mut text);
            text
        });
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            if began.elapsed() > bound {
                let _ = self.child.kill();
                panic!("{} has not ended within {bound:?}; it said: {}", self.name, self.errors.lock().unwrap());
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        let took = began.elapsed();
        self.reader.take().unwrap().join().unwrap();
        let stderr = self.errors.lock().unwrap().clone();
        Ended { status, stdout: stdout.join().unwrap(), stderr, took }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How two processes reach each other.
#[derive(Clone, Copy)]
pub(crate) struct Way {
    /// Options of both programs.
    pub(crate) options: &'static [&'static str],
    /// Options of the coprocessor alone.
    pub(crate) coprocessor: &'static [&'static str],
    /// Options of the controller alone.
    pub(crate) controller: &'static [&'static str],
}

impl Way {
    pub(crate) fn coprocessor(&self, arguments: &[&str]) -> (Process, String) {
        Process::coprocessor(&[self.options, self.coprocessor, arguments].concat())
    }

    pub(crate) fn controller(&self, port: &str, arguments: &[&str]) -> Process {
        Process::start("controller", &[self.options, self.controller, &["-p", port], arguments].concat())
    }

    /// Runs so many verified rounds and gives the controller's report.
    pub(crate) fn rounds(&self, count: u64, size: usize, more: &[&str]) -> Value {
        let (coprocessor, port) = self.coprocessor(&["--once"]);
        let (count_text, size_text) = (count.to_string(), size.to_string());
        let arguments = [&["-n", &count_text, "-s", &size_text, "--warmup", "10", "--json"], more].concat();
        let ended = self.controller(&port, &arguments).end_within(Duration::from_secs(300));
        assert!(ended.status.success(), "{} {}", ended.stdout, ended.stderr);
        let report: Value = serde_json::from_str(ended.stdout.trim()).unwrap();
        assert_eq!(ended.stdout.lines().count(), 1);
        assert_eq!((&report["rounds"], &report["verified"]), (&count.into(), &count.into()));
        assert_eq!((&report["payload_bytes"], &report["corrupt"]), (&size.into(), &0.into()));
        let end = coprocessor.end_within(Duration::from_secs(5));
        assert!(end.status.success(), "{}", end.stderr);
        report
    }

    /// Kills the coprocessor in the middle of the rounds: the controller reports the loss by name.
    pub(crate) fn killed_coprocessor_is_noticed(&self, bound: Duration) {
        let (mut coprocessor, port) = self.coprocessor(&[]);
        let mut controller = self.controller(&port, &["-n", "1000000000", "--timeout-ms", "20000"]);
        controller.has_said("connected over");
        std::thread::sleep(Duration::from_millis(300));
        assert!(controller.is_running() && coprocessor.is_running());
        coprocessor.kill();
        let ended = controller.end_within(bound);
        assert_eq!(ended.status.code(), Some(1));
        assert!(ended.stderr.contains("peer lost"), "{}", ended.stderr);
        println!(
            "figure: the controller noticed a killed coprocessor after {:?}: {}",
            ended.took,
            ended.stderr.lines().last().unwrap_or_default()
        );
    }

    /// Kills the controller in the middle of the rounds: the coprocessor reports the loss and serves the next one.
    pub(crate) fn killed_controller_is_noticed(&self, bound: Duration) {
        let (coprocessor, port) = self.coprocessor(&["--once"]);
        let mut controller = self.controller(&port, &["-n", "1000000000"]);
        controller.has_said("connected over");
        std::thread::sleep(Duration::from_millis(300));
        assert!(controller.is_running());
        controller.kill();
        let ended = coprocessor.end_within(bound);
        assert_eq!(ended.status.code(), Some(1));
        assert!(ended.stderr.contains("peer lost"), "{}", ended.stderr);
        println!(
            "figure: the coprocessor noticed a killed controller after {:?}: {}",
            ended.took,
            ended.stderr.lines().last().unwrap_or_default()
        );
    }

    /// One coprocessor serves session after session, killed ones among them, until a signal ends it in good order.
    pub(crate) fn sessions_follow_each_other(&self, sessions: u64) {
        let (coprocessor, port) = self.coprocessor(&[]);
        for session in 0..sessions {
            if session % 3 == 2 {
                let mut killed = self.controller(&port, &["-n", "1000000000"]);
                killed.has_said("connected over");
                std::thread::sleep(Duration::from_millis(50));
                killed.kill();
            }
            let ended = self.controller(&port, &["-n", "200", "--warmup", "0"]).end_within(Duration::from_secs(60));
            assert!(ended.status.success(), "{}", ended.stderr);
            assert!(ended.stdout.contains("200 verified, 0 corrupt"), "{}", ended.stdout);
        }
        coprocessor.signal("TERM");
        let ended = coprocessor.end_within(Duration::from_secs(5));
        assert!(ended.status.success(), "{}", ended.stderr);
        assert!(ended.stderr.contains("served "), "{}", ended.stderr);
    }

    /// The decoding demonstration between two processes, with its results checked against PyMatching's.
    pub(crate) fn decode_demo(&self) {
        let arguments = [self.options, self.coprocessor, &["--json"]].concat();
        let ended = Process::start("decode_demo", &arguments).end_within(Duration::from_secs(400));
        assert!(ended.status.success(), "{} {}", ended.stdout, ended.stderr);
        let reports: Value = serde_json::from_str(ended.stdout.trim()).unwrap();
        for (report, (distance, shots, bytes, undecoded, reference)) in reports.as_array().unwrap().iter().zip([
            (3, 4096, 3, 443, 88),
            (5, 4096, 15, 972, 54),
            (7, 2048, 42, 670, 18),
        ]) {
            let number = |key: &str| report[key].as_u64().unwrap();
            assert_eq!((number("distance"), number("shots"), number("payload_bytes")), (distance, shots, bytes));
            assert_eq!((number("undecoded_errors"), number("pymatching_logical_errors")), (undecoded, reference));
            assert_eq!(number("corrupt"), 0);
            assert!(number("logical_errors").abs_diff(reference) <= 3, "{report}");
            assert!(number("agree_with_pymatching") * 100 >= shots * 99, "{report}");
            for times in ["rtt_ns", "decode_ns"] {
                for key in ["min", "mean", "p50", "p90", "p99", "p999", "max"] {
                    assert!(report[times][key].is_number(), "{times}.{key}");
                }
            }
        }
        assert_eq!(reports.as_array().unwrap().len(), 3);
    }
}
