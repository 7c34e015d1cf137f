//! Where and how urgently the engine thread runs.

use std::fs::File;
use std::io::Write;

use rustix::thread::{CpuSet, sched_setaffinity};

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

/// Refuses a processor that the thread could not run on. The kernel decides, not the affinity of the calling thread, which
/// may have been pinned elsewhere itself.
///
/// # Errors
/// [`TransportError::Invalid`] with the processors that there are.
pub(crate) fn check(config: &SessionConfig) -> Result<()> {
    let Some(cpu) = config.cpu else { return Ok(()) };
    let refused = |why: String| {
        let online = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
        TransportError::invalid(
            "cpu",
            format!("processor {cpu} does not exist or may not be used ({why}); the machine has {}", online.trim()),
        )
    };
    if cpu >= CpuSet::MAX_CPU {
        return Err(refused(format!("numbers end at {}", CpuSet::MAX_CPU - 1)));
    }
    // Tried in a thread of its own, so that the caller stays where it is.
    let tried = std::thread::scope(|scope| scope.spawn(|| pin(cpu)).join());
    match tried {
        Ok(Ok(())) => Ok(()),
        Ok(Err(errno)) => Err(refused(errno.to_string())),
        Err(_) => Err(refused("trying it panicked".into())),
    }
}

fn pin(cpu: usize) -> rustix::io::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set)
}

impl Settings {
    /// Whether a processor was named.
    pub(crate) fn is_pinned(self) -> bool {
        self.cpu.is_some()
    }

    /// Applies the settings to the calling thread.
    pub(crate) fn apply(self) -> Granted {
        // Asked before the pinning below leaves only one.
        let processors = allowed_processors();
        let mut report = RealTimeReport::default();
        if let Some(cpu) = self.cpu {
            report.cpu = outcome(pin(cpu), "it has been taken from this process");
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
