//! How a session is set up: one value, built by a builder or read from a string.

use std::os::fd::{AsRawFd, OwnedFd};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Result, TransportError};
use crate::key::PreSharedKey;
use crate::session::ChannelDesc;

/// Which data path carries the frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum DataPathKind {
    /// The controller takes shared memory when the peer's address belongs to this host and no device is named,
    /// and verbs otherwise. The coprocessor takes what its client asks for.
    #[default]
    Auto,
    /// Shared memory between processes of one host.
    SharedMemory,
    /// RDMA through libibverbs.
    Verbs,
}

impl FromStr for DataPathKind {
    type Err = TransportError;

    /// Reads `auto`, `shm` or `verbs`.
    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(Self::Auto),
            "shm" => Ok(Self::SharedMemory),
            "verbs" => Ok(Self::Verbs),
            other => Err(TransportError::invalid("data path", format!("'{other}' is none of auto, shm, verbs"))),
        }
    }
}

/// The format in which the two sides talk, out of band and in their frames (`docs/wire-protocol.md`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Wire {
    /// This crate's own: payloads of any size, checked frames, errors in the peer's words.
    #[default]
    Native,
    /// That of PennyLane Catalyst's `cpu_verbs` backend, for a peer that is the C++ runtime or an FPGA. It carries 8 bytes
    /// each way, over verbs alone, and has no word for a failed round, a stop or a goodbye.
    Catalyst,
}

impl FromStr for Wire {
    type Err = TransportError;

    /// Reads `native` or `catalyst`.
    fn from_str(text: &str) -> Result<Self> {
        match text {
            "native" => Ok(Self::Native),
            "catalyst" => Ok(Self::Catalyst),
            other => Err(TransportError::invalid("wire", format!("'{other}' is none of native, catalyst"))),
        }
    }
}

/// Who drives a controller's rounds between `start` and `stop`. (A coprocessor always has an engine thread.)
///
/// Calls, window, late replies, time-outs and errors are the same in both. What differs:
///
/// | | `Caller` | `Thread` |
/// | --- | --- | --- |
/// | who polls the ring and posts | the thread that calls `kick` and `collect` | an engine thread, from `start` to `stop` |
/// | processors kept busy | one, while `collect` waits | one all the time, and the caller's while `collect` waits |
/// | a round takes | the least | two hand-overs between threads and two copies more |
/// | `kick` on verbs | posts, and may wait for the device to complete earlier writes | hands over, and waits for nothing |
/// | several kicks in a row | a doorbell each; one for all with [`ControllerSession::queue`](crate::ControllerSession::queue) | those that wait share one, without being asked to |
/// | while the caller does something else | replies wait in the ring, their time running on; a failed write is noticed at the next call | replies are taken and failed writes noticed at once |
/// | an error of a post | is `kick`'s | is that of the next `collect` or `try_collect` |
/// | `cpu`, `real_time`, `low_latency` | of the thread that calls `start` | of the engine thread |
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum EngineMode {
    /// The caller's thread, in the calls themselves: the shortest way.
    #[default]
    Caller,
    /// A thread of its own, with wait-free queues to and from it: for callers with other work to do.
    Thread,
}

impl FromStr for EngineMode {
    type Err = TransportError;

    /// Reads `caller` or `thread`.
    fn from_str(text: &str) -> Result<Self> {
        match text {
            "caller" => Ok(Self::Caller),
            "thread" => Ok(Self::Thread),
            other => Err(TransportError::invalid("engine", format!("'{other}' is none of caller, thread"))),
        }
    }
}

/// A descriptor of device memory, the same one in every copy of the settings.
#[derive(Debug, Clone)]
pub(crate) struct DmaBuf(pub(crate) Arc<OwnedFd>);

impl PartialEq for DmaBuf {
    fn eq(&self, other: &Self) -> bool {
        self.0.as_raw_fd() == other.0.as_raw_fd()
    }
}

impl Eq for DmaBuf {}

/// Everything that a session can be told before it connects.
///
/// Built by value, or read from a string of `key=value` pairs with [`FromStr`]:
///
/// ```
/// use catalyst_transport::{DataPathKind, SessionConfig};
///
/// let built = SessionConfig::new().data_path(DataPathKind::SharedMemory).depth(16);
/// let read: SessionConfig = "path=shm;depth=16".parse()?;
/// assert_eq!(built, read);
/// # Ok::<(), catalyst_transport::TransportError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionConfig {
    pub(crate) wire: Wire,
    pub(crate) engine_mode: EngineMode,
    pub(crate) data_path: DataPathKind,
    pub(crate) device: Option<String>,
    pub(crate) port: Option<u8>,
    pub(crate) gid_index: Option<u8>,
    pub(crate) pkey_index: Option<u16>,
    pub(crate) bind: String,
    pub(crate) pre_shared_key: Option<PreSharedKey>,
    pub(crate) channel: ChannelDesc,
    pub(crate) accept_timeout: Option<Duration>,
    pub(crate) handshake_timeout: Duration,
    pub(crate) reply_timeout: Duration,
    pub(crate) stop_timeout: Duration,
    pub(crate) liveness: Duration,
    pub(crate) cpu: Option<usize>,
    pub(crate) real_time: Option<u8>,
    pub(crate) lock_memory: bool,
    pub(crate) low_latency: bool,
    pub(crate) first_sequence: u32,
    pub(crate) dma_buf: Option<DmaBuf>,
    pub(crate) fabricated: bool,
}

impl Default for SessionConfig {
    fn default() -> Self {
        Self {
            wire: Wire::Native,
            engine_mode: EngineMode::Caller,
            data_path: DataPathKind::Auto,
            device: None,
            port: None,
            gid_index: None,
            pkey_index: None,
            bind: "127.0.0.1".into(),
            channel: ChannelDesc::default(),
            accept_timeout: Some(Duration::from_secs(60)),
            handshake_timeout: Duration::from_secs(5),
            reply_timeout: Duration::from_secs(1),
            stop_timeout: Duration::from_secs(5),
            liveness: Duration::from_secs(5),
            cpu: None,
            real_time: None,
            lock_memory: false,
            low_latency: false,
            first_sequence: 1,
            pre_shared_key: None,
            dma_buf: None,
            fabricated: false,
        }
    }
}

impl SessionConfig {
    /// The defaults: data path chosen from the peer's address, loopback only, 64 rounds in flight, 64 bytes each way.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The wire format. [`Wire::Catalyst`] also sets the channel to what that wire carries,
    /// [`ChannelDesc::catalyst`]; a later [`depth`](Self::depth) keeps fewer rounds in flight.
    #[must_use]
    pub fn wire(mut self, wire: Wire) -> Self {
        self.wire = wire;
        if wire == Wire::Catalyst {
            self.channel = ChannelDesc::catalyst();
        }
        self
    }

    /// Which data path to use.
    #[must_use]
    pub fn data_path(mut self, kind: DataPathKind) -> Self {
        self.data_path = kind;
        self
    }

    /// The RDMA device by name (`rxe0`, `mlx5_0`), by network interface (`eth1`) or by address (`10.9.0.1`).
    /// Without it the device that has the address of the out-of-band connection in a GID table is taken, or else the first
    /// one with an active port.
    #[must_use]
    pub fn device(mut self, name: impl Into<String>) -> Self {
        self.device = Some(name.into());
        self
    }

    /// The port of the device, from 1. Without it the active one that has the address of the out-of-band connection, or else
    /// the first active one.
    #[must_use]
    pub fn port(mut self, port: u8) -> Self {
        self.port = Some(port);
        self
    }

    /// The index in the port's GID table. Without it the entry with the address of the out-of-band connection is preferred;
    /// then RoCE v2 before other types; then IPv4 before IPv6.
    #[must_use]
    pub fn gid_index(mut self, index: u8) -> Self {
        self.gid_index = Some(index);
        self
    }

    /// The index in the port's partition key table. Both sides have to use entries of one partition, at least one of them a
    /// full member: the keys are compared at `connect`. Default: 0, on nearly every fabric the default partition.
    #[must_use]
    pub fn pkey_index(mut self, index: u16) -> Self {
        self.pkey_index = Some(index);
        self
    }

    /// The address or host name that the coprocessor listens on. The controller dials from it when it is a numeric address
    /// beyond loopback, and otherwise lets the system choose. Default: `127.0.0.1`. Listening beyond loopback without a
    /// [`pre_shared_key`](Self::pre_shared_key) lets every host that reaches the port write into the request ring: see the
    /// security notes in `docs/design.md`.
    #[must_use]
    pub fn bind(mut self, address: impl Into<String>) -> Self {
        self.bind = address.into();
        self
    }

    /// Who drives a controller's rounds. Default: [`EngineMode::Caller`].
    #[must_use]
    pub fn engine_mode(mut self, mode: EngineMode) -> Self {
        self.engine_mode = mode;
        self
    }

    /// A secret that the peer has to have too: without it neither side tells the other how its memory is reached. Both sides
    /// have to be given the same one. The out-of-band messages are then authenticated; neither they nor the frames are
    /// encrypted, and RDMA itself authenticates nothing (`docs/design.md`). The Catalyst wire has no room for it. Default:
    /// none.
    #[must_use]
    pub fn pre_shared_key(mut self, key: PreSharedKey) -> Self {
        self.pre_shared_key = Some(key);
        self
    }

    /// Rounds that may be in flight: slots of each ring, a power of two up to 65,536. Default: 64.
    #[must_use]
    pub fn depth(mut self, depth: u32) -> Self {
        self.channel.depth = depth;
        self
    }

    /// The longest request in bytes, 0 to 16,777,215. Default: 64. Rings are as large as depth times this.
    #[must_use]
    pub fn request_capacity(mut self, bytes: usize) -> Self {
        self.channel.request_capacity = bytes;
        self
    }

    /// The longest reply in bytes, 0 to 16,777,215. Default: 64.
    #[must_use]
    pub fn reply_capacity(mut self, bytes: usize) -> Self {
        self.channel.reply_capacity = bytes;
        self
    }

    /// How long the coprocessor's `connect` waits for a client; `None` waits until it is cancelled. Default: 60 s.
    #[must_use]
    pub fn accept_timeout(mut self, timeout: Option<Duration>) -> Self {
        self.accept_timeout = timeout;
        self
    }

    /// How long each of `connect` (on the coprocessor: once a client has said hello), `exchange_keys` and
    /// `establish_channel` may take. Default: 5 s.
    #[must_use]
    pub fn handshake_timeout(mut self, timeout: Duration) -> Self {
        self.handshake_timeout = timeout;
        self
    }

    /// How long `collect` waits for a reply (controller) or for a served round (coprocessor). Default: 1 s.
    #[must_use]
    pub fn reply_timeout(mut self, timeout: Duration) -> Self {
        self.reply_timeout = timeout;
        self
    }

    /// How long `stop` waits for a coprocessor function that is still running. Default: 5 s. When none is running, `stop`
    /// takes some milliseconds at most.
    #[must_use]
    pub fn stop_timeout(mut self, timeout: Duration) -> Self {
        self.stop_timeout = timeout;
        self
    }

    /// How long a peer may be silent on the out-of-band connection before it is taken for lost (its host is gone, the
    /// network is cut, or the process is frozen); also the bound within which an RDMA write has to be acknowledged.
    /// A peer whose process ends is noticed at once. Default: 5 s; at least 100 ms.
    #[must_use]
    pub fn liveness(mut self, bound: Duration) -> Self {
        self.liveness = bound;
        self
    }

    /// The processor that the engine thread is pinned to; on the controller, the thread that calls `start`, which stays pinned
    /// after `stop`. A processor that does not exist or is not allowed is an error
    /// at `start`.
    #[must_use]
    pub fn cpu(mut self, cpu: usize) -> Self {
        self.cpu = Some(cpu);
        self
    }

    /// SCHED_FIFO priority of the engine thread, 1 to 99; on the controller, of the thread that calls `start`, which keeps it
    /// after `stop`. Needs CAP_SYS_NICE or an rtprio limit; what was granted is in
    /// [`RealTimeReport`](crate::RealTimeReport).
    #[must_use]
    pub fn real_time(mut self, priority: u8) -> Self {
        self.real_time = Some(priority);
        self
    }

    /// Lock the process's memory (`mlockall`) at `start`. It stays locked after `stop`.
    #[must_use]
    pub fn lock_memory(mut self, lock: bool) -> Self {
        self.lock_memory = lock;
        self
    }

    /// Keep the processors out of deep sleep (`/dev/cpu_dma_latency` held at 0 µs) while the session runs.
    #[must_use]
    pub fn low_latency(mut self, hold: bool) -> Self {
        self.low_latency = hold;
        self
    }

    /// Sequence number of the session's first frame. Both sides have to agree. For tests near the wrap. Default: 1.
    #[must_use]
    pub fn first_sequence(mut self, sequence: u32) -> Self {
        self.first_sequence = sequence;
        self
    }

    /// A dma-buf descriptor that `alloc_memory` registers for the kinds other than
    /// [`CpuRam`](crate::MemKind::CpuRam). It is kept open while this value or a session made from it lives.
    #[must_use]
    pub fn dma_buf(mut self, descriptor: impl Into<OwnedFd>) -> Self {
        self.dma_buf = Some(DmaBuf(Arc::new(descriptor.into())));
        self
    }

    /// Use the software device of the feature `fabricated` in place of libibverbs.
    #[cfg(feature = "fabricated")]
    #[doc(hidden)]
    #[must_use]
    pub fn fabricated(mut self, on: bool) -> Self {
        self.fabricated = on;
        self
    }

    /// The channel that these settings describe, for `establish_channel`.
    #[must_use]
    pub fn channel(&self) -> &ChannelDesc {
        &self.channel
    }

    /// Refuses values that can never work, before anything is opened.
    pub(crate) fn validate(&self) -> Result<()> {
        self.channel.validate_on(self.wire)?;
        if self.wire == Wire::Catalyst && self.data_path == DataPathKind::SharedMemory {
            return Err(TransportError::invalid(
                "wire",
                "the Catalyst wire format runs over verbs alone: use the data path 'verbs', or the native wire on shared \
                 memory",
            ));
        }
        if self.wire == Wire::Catalyst && self.pre_shared_key.is_some() {
            return Err(TransportError::Unsupported {
                what: "a pre-shared key on the Catalyst wire".into(),
                reason: "its one message has no room for a proof: use the native wire on both sides, or set no key and keep \
                         strangers from the port with a firewall"
                    .into(),
            });
        }
        if self.liveness < Duration::from_millis(100) {
            return Err(TransportError::invalid("liveness", format!("{:?} is less than 100 ms", self.liveness)));
        }
        for (name, timeout) in [
            ("handshake timeout", self.handshake_timeout),
            ("reply timeout", self.reply_timeout),
            ("stop timeout", self.stop_timeout),
            ("liveness", self.liveness),
        ] {
            if timeout.is_zero() || timeout > Duration::from_secs(86_400) {
                return Err(TransportError::invalid(name, format!("{timeout:?} is not between 1 ns and one day")));
            }
        }
        if let Some(priority) = self.real_time
            && !(1..=99).contains(&priority)
        {
            return Err(TransportError::invalid("real-time priority", format!("{priority} is not between 1 and 99")));
        }
        if self.port == Some(0) {
            return Err(TransportError::invalid("port", "0 is not a port: RDMA ports are counted from 1"));
        }
        Ok(())
    }
}

impl FromStr for SessionConfig {
    type Err = TransportError;

    /// Reads `key=value` pairs separated by `;`. Times are in milliseconds.
    ///
    /// Keys: `wire` (native, catalyst), `engine` (caller, thread), `path` (auto, shm, verbs), `dev`, `port`, `gid`, `pkey` (its index), `bind`, `psk_file` or `psk_env` (a file
    /// or an environment variable that holds the [`PreSharedKey`], read here and now), `depth`, `request`, `reply`,
    /// `accept_ms` (0: wait for ever), `handshake_ms`, `timeout_ms`, `stop_ms`, `liveness_ms`, `cpu` (or `cpu_pin`), `rt` (priority; 0: none),
    /// `mlock` (0, 1), `low_latency` (0, 1).
    ///
    /// # Errors
    /// [`TransportError::Invalid`] with the key for an unknown one or a value that cannot be read; those of [`PreSharedKey`].
    fn from_str(text: &str) -> Result<Self> {
        let mut pairs = Vec::new();
        for pair in text.split(';').map(str::trim).filter(|pair| !pair.is_empty()) {
            let (key, value) = pair
                .split_once('=')
                .ok_or_else(|| TransportError::invalid(format!("configuration '{pair}'"), "has no '='"))?;
            pairs.push((key.trim(), value.trim()));
        }
        let mut config = Self::default();
        // First, because it sets what other keys change.
        if let Some((_, value)) = pairs.iter().rfind(|(key, _)| *key == "wire") {
            config = config.wire(value.parse()?);
        }
        for (key, value) in pairs {
            let millis = || number::<u64>(key, value).map(Duration::from_millis);
            match key {
                "wire" => {}
                "engine" => config.engine_mode = value.parse()?,
                "path" => config.data_path = value.parse()?,
                "dev" => config.device = Some(value.into()),
                "port" => config.port = Some(number(key, value)?),
                "gid" => config.gid_index = Some(number(key, value)?),
                "pkey" => config.pkey_index = Some(number(key, value)?),
                "bind" => config.bind = value.into(),
                "psk_file" | "psk_env" if config.pre_shared_key.is_some() => {
                    return Err(TransportError::invalid(
                        format!("configuration key '{key}'"),
                        "is a second pre-shared key, and a session has one",
                    ));
                }
                "psk_file" => config.pre_shared_key = Some(PreSharedKey::from_file(value)?),
                "psk_env" => config.pre_shared_key = Some(PreSharedKey::from_env(value)?),
                "depth" => config.channel.depth = number(key, value)?,
                "request" => config.channel.request_capacity = number(key, value)?,
                "reply" => config.channel.reply_capacity = number(key, value)?,
                "accept_ms" => config.accept_timeout = Some(millis()?).filter(|time| !time.is_zero()),
                "handshake_ms" => config.handshake_timeout = millis()?,
                "timeout_ms" => config.reply_timeout = millis()?,
                "stop_ms" => config.stop_timeout = millis()?,
                "liveness_ms" => config.liveness = millis()?,
                "cpu" | "cpu_pin" => config.cpu = Some(number(key, value)?),
                "rt" => config.real_time = Some(number(key, value)?).filter(|priority| *priority != 0),
                "mlock" => config.lock_memory = switch(key, value)?,
                "low_latency" => config.low_latency = switch(key, value)?,
                _ => {
                    return Err(TransportError::invalid(
                        format!("configuration key '{key}'"),
                        "is unknown; the keys are wire, engine, path, dev, port, gid, pkey, bind, psk_file, psk_env, depth, request, \
                         reply, accept_ms, handshake_ms, timeout_ms, stop_ms, liveness_ms, cpu, rt, mlock, low_latency",
                    ));
                }
            }
        }
        config.validate()?;
        Ok(config)
    }
}

fn number<T: FromStr>(key: &str, value: &str) -> Result<T>
where
    T::Err: std::fmt::Display,
{
    value
        .parse()
        .map_err(|error| TransportError::invalid(format!("configuration key '{key}'"), format!("'{value}': {error}")))
}

fn switch(key: &str, value: &str) -> Result<bool> {
    match value {
        "1" | "true" => Ok(true),
        "0" | "false" => Ok(false),
        _ => {
            Err(TransportError::invalid(format!("configuration key '{key}'"), format!("'{value}' is neither 0 nor 1")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_is_read() {
        let text = "wire=native;engine=thread;path=verbs;dev=rxe0;port=1;gid=1;pkey=2;bind=::1;depth=4;request=8;reply=9;accept_ms=0;handshake_ms=2;\
                    timeout_ms=3;stop_ms=4;liveness_ms=500;cpu=1;rt=50;mlock=1;low_latency=1";
        let config: SessionConfig = text.parse().unwrap();
        let millis = Duration::from_millis;
        let built = SessionConfig::new()
            .wire(Wire::Native)
            .engine_mode(EngineMode::Thread)
            .data_path(DataPathKind::Verbs)
            .device("rxe0")
            .port(1)
            .gid_index(1)
            .pkey_index(2)
            .bind("::1")
            .depth(4)
            .request_capacity(8)
            .reply_capacity(9)
            .accept_timeout(None)
            .handshake_timeout(millis(2))
            .reply_timeout(millis(3))
            .stop_timeout(millis(4))
            .liveness(millis(500))
            .cpu(1)
            .real_time(50)
            .lock_memory(true)
            .low_latency(true);
        assert_eq!(config, built);
    }

    #[test]
    fn the_catalyst_wire_brings_its_channel() {
        for text in ["wire=catalyst;depth=16", "depth=16;wire=catalyst"] {
            let config: SessionConfig = text.parse().unwrap();
            assert_eq!(config, SessionConfig::new().wire(Wire::Catalyst).depth(16));
            assert_eq!(*config.channel(), ChannelDesc::new(16, 8, 8));
        }
        assert_eq!(*"wire=catalyst".parse::<SessionConfig>().unwrap().channel(), ChannelDesc::catalyst());
    }

    #[test]
    fn a_pre_shared_key_is_read_and_the_catalyst_wire_has_none() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        std::io::Write::write_all(&mut file, b"0123456789abcdef\n").unwrap();
        let named = format!("psk_file={}", file.path().display());
        let config: SessionConfig = named.parse().unwrap();
        assert_eq!(config, SessionConfig::new().pre_shared_key(PreSharedKey::of(b"0123456789abcdef")));
        let error = format!("{named};psk_env=PATH").parse::<SessionConfig>().unwrap_err().to_string();
        assert!(error.contains("'psk_env'") && error.contains("second"), "{error}");
        for text in [format!("wire=catalyst;{named}"), format!("{named};wire=catalyst")] {
            let error = text.parse::<SessionConfig>().unwrap_err();
            assert!(matches!(error, TransportError::Unsupported { .. }), "{error:?}");
            assert!(error.to_string().contains("pre-shared key on the Catalyst wire"), "{error}");
        }
        let built = config.wire(Wire::Catalyst);
        assert!(crate::CoprocessorSession::new(built).is_err());
    }

    #[test]
    fn what_cannot_work_is_refused_by_name() {
        for (text, word) in [
            ("colour=blue", "colour"),
            ("depth", "depth"),
            ("depth=3", "power of two"),
            ("depth=0", "power of two"),
            ("depth=131072", "65536"),
            ("gid=300", "gid"),
            ("port=0", "port"),
            ("pkey=65536", "pkey"),
            ("rt=100", "1 and 99"),
            ("path=tcp", "auto, shm, verbs"),
            ("timeout_ms=0", "reply timeout"),
            ("liveness_ms=1", "100 ms"),
            ("request=16777216", "16777215"),
            ("mlock=maybe", "mlock"),
            ("engine=steam", "caller, thread"),
            ("wire=tin", "native, catalyst"),
            ("wire=catalyst;path=shm", "verbs alone"),
            ("psk_file=/nowhere/psk", "/nowhere/psk"),
            ("psk_env=CATALYST_TRANSPORT_NOT_SET", "is not set"),
            ("wire=catalyst;depth=512", "256 slots"),
            ("wire=catalyst;request=16", "8 bytes each way"),
            ("reply=7;wire=catalyst", "8 bytes each way"),
        ] {
            let error = text.parse::<SessionConfig>().unwrap_err().to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
