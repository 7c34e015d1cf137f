//! The session: the calls that both roles share, and the values that they speak of.

pub(crate) mod controller;
pub(crate) mod coprocessor;
pub(crate) mod function;
pub(crate) mod lifecycle;
pub(crate) mod link;

use crate::config::Wire;
use crate::error::{Result, TransportError};
use crate::ring::Geometry;

/// One end of a connection between a controller and a coprocessor.
///
/// The calls have an order: `connect` → `alloc_memory` → `exchange_keys` → `establish_channel` → (coprocessor) set the
/// coprocessor function → `start` / `collect` / `stop`. A call out of order is
/// [`TransportError::OutOfOrder`] and changes nothing. When one of the four steps of the bring-up fails, everything that
/// they built is undone and the session can `connect` again. The exception: after `connect`, a step that fails with
/// [`TransportError::Invalid`] or [`TransportError::Unsupported`] changes nothing and may be repeated with other arguments.
/// The function may also be set earlier, in any state but while the engine runs.
///
/// The trait is object-safe; the methods of one role alone are inherent to
/// [`ControllerSession`](crate::ControllerSession) and [`CoprocessorSession`](crate::CoprocessorSession).
pub trait TransportSession: Send {
    /// Brings up the connection: out-of-band handshake, and queue pairs ready to send. The controller dials, the
    /// coprocessor listens and takes the first client that completes a valid hello. On the Catalyst wire the coprocessor
    /// takes the first client, and the queue pairs follow in `exchange_keys`.
    ///
    /// # Errors
    /// [`TransportError::Timeout`] when the peer did not come or answer in time; [`TransportError::Device`],
    /// [`TransportError::Verbs`] when the RDMA device cannot be used; [`TransportError::PeerRefused`] with the peer's reason.
    fn connect(&mut self, info: &ConnectInfo) -> Result<()>;

    /// Allocates `bytes` of zeroed memory and registers it for the peer to write into. At least
    /// [`ChannelDesc::controller_bytes`] or [`ChannelDesc::coprocessor_bytes`] are needed.
    ///
    /// # Errors
    /// [`TransportError::Unsupported`] when the data path cannot register this kind;
    /// [`TransportError::Verbs`] with the memlock limit when the system refuses to pin so much.
    fn alloc_memory(&mut self, bytes: usize, kind: MemKind) -> Result<MemRegion>;

    /// Tells the peer where the local region is, and learns where the peer's is. On the Catalyst wire this is the whole
    /// handshake; there the coprocessor drops a client that does not answer or not properly, and takes the next one.
    ///
    /// # Errors
    /// [`TransportError::Invalid`] when `local` is not this session's region; timeouts and peer errors as in `connect`.
    fn exchange_keys(&mut self, local: &MemRegion) -> Result<PeerRef>;

    /// Sets up the rings and proves with a probe in both directions, longer than one MTU, that data arrives. (The Catalyst
    /// wire has no probe: there the first round shows it.)
    ///
    /// # Errors
    /// [`TransportError::Invalid`] when a region is too small for the channel, or another path is named than the one in use;
    /// [`TransportError::PeerRefused`] or [`TransportError::Protocol`] when the two sides' geometries differ;
    /// [`TransportError::Completion`] or [`TransportError::Timeout`] when the probe does not arrive.
    fn establish_channel(&mut self, desc: &ChannelDesc, local: &MemRegion, peer: &PeerRef) -> Result<()>;

    /// Starts the engine and returns at once. After a `stop` it may be started again: sequence numbers go on, and no
    /// old frame is taken for a new one.
    ///
    /// # Errors
    /// [`TransportError::Invalid`] when the configured processor may not be used; [`TransportError::OutOfOrder`] on a coprocessor
    /// without a function; on a coprocessor whose engine has ended by itself, the error that ended it.
    fn start(&mut self) -> Result<()>;

    /// Waits for a result and scatters it over all the buffers in order; returns the bytes written.
    ///
    /// On the controller: the reply of the oldest round in flight. On the coprocessor: a copy of the reply of the next served
    /// round; up to 64 of them (or the ring's depth, if less) wait to be collected, and further ones are dropped.
    ///
    /// # Errors
    /// [`TransportError::Timeout`] after the configured reply timeout: the round is given up and its late reply will be
    /// dropped. [`TransportError::PeerStopped`]: the peer has stopped, and the round is given up. [`TransportError::ReplyTooLarge`]:
    /// the reply is kept. [`TransportError::FunctionFailed`]: this round alone failed. [`TransportError::NothingInFlight`]: no
    /// round was kicked. Any error that is not [recoverable](TransportError::is_recoverable) ends the session.
    fn collect(&mut self, replies: &mut [&mut [u8]]) -> Result<usize>;

    /// Stops the engine and joins it. May be called in any state and any number of times. Rounds in flight are given up.
    ///
    /// # Errors
    /// [`TransportError::Engine`] when a coprocessor function does not return within the stop timeout; stop may be
    /// called again.
    fn stop(&mut self) -> Result<()>;

    /// Round-trip time of the last collected round in nanoseconds, until the moment that its reply was seen. It begins on
    /// shared memory when the request stands in the peer's ring, and on verbs just before the request is posted. 0 before the
    /// first round and on the coprocessor.
    fn last_rtt_ns(&self) -> u64 {
        0
    }
}

/// Where the peer is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectInfo {
    /// Host name or address (IPv4 or IPv6) of the coprocessor. The coprocessor itself does not use it.
    pub peer: String,
    /// TCP port of the out-of-band channel. On the coprocessor 0 means any: see
    /// [`CoprocessorSession::listen`](crate::CoprocessorSession::listen).
    pub oob_port: u16,
}

impl ConnectInfo {
    /// Names the coprocessor's host and port.
    #[must_use]
    pub fn new(peer: impl Into<String>, oob_port: u16) -> Self {
        Self { peer: peer.into(), oob_port }
    }
}

/// The kind of memory that a region lives in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum MemKind {
    /// Main memory, allocated by the session.
    CpuRam = 0,
    /// Memory of a GPU, given as a dma-buf descriptor ([`SessionConfig::dma_buf`](crate::SessionConfig::dma_buf)).
    GpuHbm = 1,
    /// Memory of an accelerator card, given as a dma-buf descriptor.
    Ddr = 2,
    /// Any other memory, given as a dma-buf descriptor.
    Other = 3,
}

/// The key by which this side names its own region to its own device. Never sent to the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct LocalKey(pub u32);

/// The key by which the peer's device may write into a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct RemoteKey(pub u32);

/// A registered region that the session owns. It describes memory that a device or another process writes, and so gives
/// no access to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemRegion {
    /// Address of the first byte in this process (the I/O virtual address for device memory).
    pub addr: u64,
    /// Bytes.
    pub size: usize,
    /// Key for this side's device; 0 on shared memory.
    pub lkey: LocalKey,
    /// Key for the peer's device; on shared memory a random number that stands for the region.
    pub rkey: RemoteKey,
    /// Kind of memory.
    pub kind: MemKind,
}

/// The peer's region as it was told to us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerRef {
    /// Key that permits writes into it; 0 on shared memory, where the descriptor does.
    pub rkey: RemoteKey,
    /// Address in the peer's address space; 0 on shared memory.
    pub remote_addr: u64,
    /// Bytes.
    pub size: u64,
}

/// The data movement of a session: a ring of requests one way and a ring of replies the other.
///
/// Both sides have to describe the same; a difference is an error with both values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChannelDesc {
    /// The data path by name: `shm` (or `shared_memory`, `memcpy`) or `verbs` (or `rdma`, `cpu_verbs`). It has to be the one
    /// that the session connected over; empty stands for that one.
    pub data_path: String,
    /// Slots of each ring: rounds that may be in flight. A power of two up to 65,536.
    pub depth: u32,
    /// The longest request in bytes.
    pub request_capacity: usize,
    /// The longest reply in bytes.
    pub reply_capacity: usize,
}

impl Default for ChannelDesc {
    /// 64 rounds in flight, 64 bytes each way, on the path that the session connected over.
    fn default() -> Self {
        Self { data_path: String::new(), depth: 64, request_capacity: 64, reply_capacity: 64 }
    }
}

impl ChannelDesc {
    /// A channel of the given depth and capacities in bytes, on the path that the session connected over.
    #[must_use]
    pub fn new(depth: u32, request_capacity: usize, reply_capacity: usize) -> Self {
        Self { data_path: String::new(), depth, request_capacity, reply_capacity }
    }

    /// What the Catalyst wire carries: 256 rounds in flight, 8 bytes each way.
    #[must_use]
    pub fn catalyst() -> Self {
        Self::new(crate::ring::catalyst::SLOTS, crate::ring::catalyst::VALUE_BYTES, crate::ring::catalyst::VALUE_BYTES)
    }

    /// Bytes that the controller's region has to have: the reply ring and the probe's place. (On the Catalyst wire each
    /// region needs 16,384 bytes, whatever the depth.)
    #[must_use]
    pub fn controller_bytes(&self) -> usize {
        self.replies().region_bytes()
    }

    /// Bytes that the coprocessor's region has to have: the request ring and the probe's place.
    #[must_use]
    pub fn coprocessor_bytes(&self) -> usize {
        self.requests().region_bytes()
    }

    /// Shapes of the request ring and of the reply ring on this wire.
    pub(crate) fn rings(&self, wire: Wire) -> (Geometry, Geometry) {
        match wire {
            Wire::Native => (self.requests(), self.replies()),
            Wire::Catalyst => (Geometry::catalyst(self.depth), Geometry::catalyst(self.depth)),
        }
    }

    pub(crate) fn requests(&self) -> Geometry {
        Geometry::new(self.depth, self.request_capacity)
    }

    pub(crate) fn replies(&self) -> Geometry {
        Geometry::new(self.depth, self.reply_capacity)
    }

    /// [`validate`](Self::validate), and on the Catalyst wire that it is what that wire carries.
    ///
    /// # Errors
    /// [`TransportError::Invalid`] with the field.
    pub(crate) fn validate_on(&self, wire: Wire) -> Result<()> {
        self.validate()?;
        if wire == Wire::Native {
            return Ok(());
        }
        let carried = Self::catalyst();
        if self.depth > carried.depth {
            return Err(TransportError::invalid(
                "depth",
                format!("the Catalyst wire has {} slots, which {} rounds do not fit", carried.depth, self.depth),
            ));
        }
        for (name, bytes) in [("request capacity", self.request_capacity), ("reply capacity", self.reply_capacity)] {
            if bytes != carried.request_capacity {
                return Err(TransportError::invalid(
                    name,
                    format!(
                        "the Catalyst wire carries {} bytes each way, no more and no less, and {bytes} were asked for",
                        carried.request_capacity
                    ),
                ));
            }
        }
        Ok(())
    }

    /// # Errors
    /// [`TransportError::Invalid`] for a depth that is no power of two, or a capacity that a frame cannot carry.
    pub(crate) fn validate(&self) -> Result<()> {
        if !self.depth.is_power_of_two() || self.depth > Geometry::MAX_DEPTH {
            return Err(TransportError::invalid(
                "depth",
                format!("{} is not a power of two between 1 and {}", self.depth, Geometry::MAX_DEPTH),
            ));
        }
        for (name, bytes) in [("request capacity", self.request_capacity), ("reply capacity", self.reply_capacity)] {
            if bytes > Geometry::MAX_CAPACITY {
                return Err(TransportError::invalid(
                    name,
                    format!("{bytes} bytes do not fit a frame, which carries at most {}", Geometry::MAX_CAPACITY),
                ));
            }
        }
        Ok(())
    }
}

/// Copies `reply` into the buffers one after the other.
///
/// # Errors
/// [`TransportError::ReplyTooLarge`] when they hold less than the reply; they are left as they were.
pub(crate) fn scatter(reply: &[u8], buffers: &mut [&mut [u8]]) -> Result<usize> {
    let capacity = buffers.iter().map(|buffer| buffer.len()).sum();
    if reply.len() > capacity {
        return Err(TransportError::ReplyTooLarge { length: reply.len(), capacity });
    }
    let mut rest = reply;
    for buffer in buffers {
        let (now, later) = rest.split_at(rest.len().min(buffer.len()));
        buffer[..now.len()].copy_from_slice(now);
        rest = later;
    }
    Ok(reply.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_is_scattered_over_all_buffers_in_order() {
        let (mut a, mut b, mut c) = ([0; 3], [0; 0], [9; 5]);
        assert_eq!(scatter(&[1, 2, 3, 4, 5], &mut [&mut a, &mut b, &mut c]), Ok(5));
        assert_eq!((a, c), ([1, 2, 3], [4, 5, 9, 9, 9]));
        assert_eq!(scatter(&[], &mut []), Ok(0));
    }

    #[test]
    fn buffers_that_are_too_small_stay_as_they_were() {
        let mut a = [7; 2];
        assert_eq!(scatter(&[1, 2, 3], &mut [&mut a]), Err(TransportError::ReplyTooLarge { length: 3, capacity: 2 }));
        assert_eq!(a, [7; 2]);
    }
}
