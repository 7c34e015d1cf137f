//! Where and how urgently the engine thread runs.

use std::fs::File;
use std::io::Write;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::spin::allowed_processors;
use crate::config::SessionConfig;
use crate::error::{Result, TransportError};

/// What became of one real-time setting.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Outcome {
    /// It was not asked for.
    #[default]
    NotAsked,
    /// It holds while the engine runs. (On the controller, which has no engine thread, processor, priority and locked memory
    /// stay as they are after `stop`.)
    Granted,
    /// It was refused; the engine runs without it. The text says why and what would help.
    Refused(String),
}

/// What was granted of the real-time settings of a session.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct RealTimeReport {
    /// Pinning to the configured processor.
    pub cpu: Outcome,
    /// SCHED_FIFO.
    pub real_time: Outcome,
    /// `mlockall`.
    pub lock_memory: Outcome,
    /// `/dev/cpu_dma_latency` held at 0 µs.
    pub low_latency: Outcome,
}

/// The settings that concern a thread.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    cpu: Option<usize>,
    real_time: Option<u8>,
    lock_memory: bool,
    low_latency: bool,
}

/// What was granted, and what has to stay open for it to hold.
#[derive(Debug)]
pub(crate) struct Granted {
    pub(crate) report: RealTimeReport,
    _latency: Option<File>,
}

impl From<&SessionConfig> for Settings {
    fn from(config: &SessionConfig) -> Self {
        Self {
            cpu: config.cpu,
            real_time: config.real_time,
            lock_memory: config.lock_memory,
            low_latency: config.low_latency,
        }
    }
}

/// Refuses a processor that the thread could not run on.
///
/// # Errors
/// [`TransportError::Invalid`] with the processors that are allowed.
pub(crate) fn check(config: &SessionConfig) -> Result<()> {
    let Some(cpu) = config.cpu else { return Ok(()) };
    let allowed =
        sched_getaffinity(None).map_err(|errno| TransportError::system("sched_getaffinity", "this thread", errno))?;
    if cpu < CpuSet::MAX_CPU && allowed.is_set(cpu) {
        return Ok(());
    }
    let list: Vec<_> = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).map(|cpu| cpu.to_string()).collect();
    Err(TransportError::invalid(
        "cpu",
        format!("processor {cpu} does not exist or may not be used; allowed are {}", list.join(", ")),
    ))
}

impl Settings {
    /// Applies the settings to the calling thread.
    pub(crate) fn apply(self) -> Granted {
        let processors = allowed_processors();
        let mut report = RealTimeReport::default();
        if let Some(cpu) = self.cpu {
            let mut set = CpuSet::new();
            set.set(cpu);
            report.cpu = outcome(sched_setaffinity(None, &set), "it has been taken from this process");
        }
        if let Some(priority) = self.real_time {
            report.real_time = if processors == 1 {
                Outcome::Refused(
                    "a spinning real-time thread on the only processor would starve everything, the peer included"
                        .into(),
                )
            } else {
                outcome(fifo(priority), "needs CAP_SYS_NICE or an rtprio limit (ulimit -r)")
            };
        }
        if self.lock_memory {
            let flags = rustix::mm::MlockAllFlags::CURRENT | rustix::mm::MlockAllFlags::FUTURE;
            report.lock_memory =
                outcome(rustix::mm::mlockall(flags), "needs CAP_IPC_LOCK or a memlock limit (ulimit -l)");
        }
        let mut latency = None;
        if self.low_latency {
            // The kernel keeps to the value for as long as the file is open.
            let hold = File::options().write(true).open("/dev/cpu_dma_latency").and_then(|mut file| {
                file.write_all(&0_i32.to_ne_bytes())?;
                Ok(file)
            });
            report.low_latency = match hold {
                Ok(file) => {
                    latency = Some(file);
                    Outcome::Granted
                }
                Err(error) => Outcome::Refused(format!("/dev/cpu_dma_latency: {error}; needs root or a udev rule")),
            };
        }
        for (what, outcome) in [
            ("cpu", &report.cpu),
            ("real time", &report.real_time),
            ("memory lock", &report.lock_memory),
            ("low latency", &report.low_latency),
        ] {
            if let Outcome::Refused(reason) = outcome {
                tracing::warn!("{what} was not granted: {reason}");
            }
        }
        Granted { report, _latency: latency }
    }
}

fn outcome(result: Result<(), rustix::io::Errno>, remedy: &str) -> Outcome {
    match result {
        Ok(()) => Outcome::Granted,
        Err(errno) => Outcome::Refused(format!("{errno}: {remedy}")),
    }
}

fn fifo(priority: u8) -> Result<(), rustix::io::Errno> {
    let parameters = libc::sched_param { sched_priority: i32::from(priority) };
    // SAFETY: thread 0 is the caller, and the structure outlives the call.
    if unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &parameters) } == 0 {
        return Ok(());
    }
    let error = std::io::Error::last_os_error();
    Err(rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::PERM))
}
