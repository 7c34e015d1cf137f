//! The way of a frame to the peer: RDMA writes, or memory that both processes map.
//!
//! Both have the same shape. Each side owns a *region* that its peer writes into. A frame is composed in a slot of
//! *outgoing* memory and then sent: on shared memory the outgoing memory is the peer's region itself, so that composing is
//! sending; on verbs it is a registered buffer, and sending is one RDMA write.
//!
//! An enumeration rather than a trait object: there are two ways, and the calls in the round are inlined.

pub(crate) mod memory_limit;
pub(crate) mod shared_memory;
#[cfg(feature = "rdma")]
pub(crate) mod verbs;

use std::net::IpAddr;
use std::time::Instant;

use crate::config::{DataPathKind, SessionConfig};
use crate::error::{Result, TransportError};
use crate::oob::{DataPathCode, Endpoint, PairEnd, Role};
use crate::ring::{Check, Geometry, SharedBytes};
use crate::session::{MemKind, MemRegion, PeerRef};

use shared_memory::SharedMemory;
#[cfg(feature = "rdma")]
use verbs::Verbs;

/// The data path of one session.
#[derive(Debug)]
pub(crate) enum DataPath {
    /// Memory that both processes map.
    SharedMemory(SharedMemory),
    /// RDMA writes.
    #[cfg(feature = "rdma")]
    Verbs(Box<Verbs>),
}

/// Calls the same method of whichever way it is.
macro_rules! either {
    ($self:expr, $path:ident => $call:expr) => {
        match $self {
            DataPath::SharedMemory($path) => $call,
            #[cfg(feature = "rdma")]
            DataPath::Verbs($path) => $call,
        }
    };
}

impl DataPath {
    /// Opens the device, or the meeting place of the two processes. `local` is this side's address on the out-of-band
    /// connection, `depth` the rounds that will be in flight.
    pub(crate) fn open(
        code: DataPathCode,
        role: Role,
        config: &SessionConfig,
        depth: u32,
        local: IpAddr,
    ) -> Result<Self> {
        match code {
            DataPathCode::SharedMemory => Ok(Self::SharedMemory(SharedMemory::open(role)?)),
            #[cfg(feature = "rdma")]
            DataPathCode::Verbs => Ok(Self::Verbs(Box::new(Verbs::open(config, depth, local)?))),
            #[cfg(not(feature = "rdma"))]
            DataPathCode::Verbs => {
                let _ = (config, depth, local);
                Err(no_rdma())
            }
        }
    }

    /// Name for users.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::SharedMemory(_) => "shm",
            #[cfg(feature = "rdma")]
            Self::Verbs(_) => "verbs",
        }
    }

    /// The RDMA device, if there is one.
    pub(crate) fn device(&self) -> Option<String> {
        match self {
            Self::SharedMemory(_) => None,
            #[cfg(feature = "rdma")]
            Self::Verbs(path) => Some(path.device()),
        }
    }

    /// What the peer has to know to reach this side.
    pub(crate) fn endpoint(&self) -> Endpoint {
        either!(self, path => path.endpoint())
    }

    /// Connects to the peer's endpoint: queue pairs to RTS, or the meeting of the two processes.
    pub(crate) fn bring_up(&mut self, peer: &Endpoint, peer_name: &str, deadline: Instant) -> Result<()> {
        match self {
            Self::SharedMemory(path) => path.bring_up(peer, deadline),
            #[cfg(feature = "rdma")]
            Self::Verbs(path) => path.bring_up(peer, peer_name),
        }
        .inspect_err(|error| tracing::debug!(peer = peer_name, %error, "bring-up failed"))
    }

    /// This side's ends of the Catalyst wire's two queue pairs: of the one that it sends on and of the one that it
    /// receives on, and its MTU.
    pub(crate) fn pair_ends(&self) -> (PairEnd, PairEnd, u8) {
        match self {
            Self::SharedMemory(_) => unreachable!("the configuration refuses the Catalyst wire on shared memory"),
            #[cfg(feature = "rdma")]
            Self::Verbs(path) => path.pair_ends(),
        }
    }

    /// Connects them to the peer's ends of the same two.
    pub(crate) fn join_pairs(
        &mut self,
        sending: &PairEnd,
        receiving: &PairEnd,
        mtu: u8,
        peer_name: &str,
    ) -> Result<()> {
        match self {
            Self::SharedMemory(_) => {
                let _ = (sending, receiving, mtu, peer_name);
                unreachable!("the configuration refuses the Catalyst wire on shared memory")
            }
            #[cfg(feature = "rdma")]
            Self::Verbs(path) => path.join_pairs(sending, receiving, mtu, peer_name),
        }
    }

    /// Puts two new ones in their place, for another peer.
    pub(crate) fn renew_pairs(&mut self) -> Result<()> {
        match self {
            Self::SharedMemory(_) => unreachable!("the configuration refuses the Catalyst wire on shared memory"),
            #[cfg(feature = "rdma")]
            Self::Verbs(path) => path.renew_pairs(),
        }
    }

    /// Makes the region that the peer writes into.
    pub(crate) fn allocate(&mut self, bytes: usize, kind: MemKind) -> Result<MemRegion> {
        either!(self, path => path.allocate(bytes, kind))
    }

    /// Hands the region to the peer as far as its keys alone do not.
    pub(crate) fn share(&mut self) -> Result<()> {
        match self {
            Self::SharedMemory(path) => path.share(),
            #[cfg(feature = "rdma")]
            Self::Verbs(_) => Ok(()),
        }
    }

    /// Takes the peer's region.
    pub(crate) fn attach(&mut self, peer: &PeerRef, deadline: Instant) -> Result<()> {
        match self {
            Self::SharedMemory(path) => path.attach(peer, deadline),
            #[cfg(feature = "rdma")]
            Self::Verbs(path) => {
                path.attach(peer);
                Ok(())
            }
        }
    }

    /// Prepares the memory that frames of this shape are composed in.
    pub(crate) fn establish(&mut self, outgoing: Geometry) -> Result<()> {
        either!(self, path => path.establish(outgoing))
    }

    /// To be called once the peer has shown that it has mapped what it needs.
    pub(crate) fn settle(&mut self) -> Result<()> {
        match self {
            Self::SharedMemory(path) => path.settle(),
            #[cfg(feature = "rdma")]
            Self::Verbs(_) => Ok(()),
        }
    }

    /// This side's region.
    pub(crate) fn incoming(&self) -> SharedBytes {
        either!(self, path => path.incoming())
    }

    /// The check that frames to this side have to carry.
    pub(crate) fn incoming_check(&self, session: u32) -> Check {
        match self {
            Self::SharedMemory(_) => Check::Session(session),
            #[cfg(feature = "rdma")]
            Self::Verbs(path) => path.incoming_check(session),
        }
    }

    /// Writes the probe behind the peer's ring.
    pub(crate) fn send_probe(&mut self, probe: &[u8]) -> Result<()> {
        either!(self, path => path.send_probe(probe))
    }

    /// Waits, within the path's own bound, until the next frame can be composed, or until `give_up` says that it is in vain.
    /// Whether there is room.
    #[inline]
    pub(crate) fn await_room(&mut self, give_up: &dyn Fn() -> bool) -> Result<bool> {
        match self {
            Self::SharedMemory(_) => {
                let _ = give_up;
                Ok(true)
            }
            #[cfg(feature = "rdma")]
            Self::Verbs(path) => path.await_room(give_up),
        }
    }

    /// Outgoing memory, and the end of the slot in it that the frame with this number is composed in. The slot is free.
    #[inline]
    pub(crate) fn slot(&mut self, sequence: u32) -> Result<(&SharedBytes, usize)> {
        either!(self, path => path.slot(sequence))
    }

    /// Sends the frame of `bytes` that was composed in the slot of this number.
    #[inline]
    pub(crate) fn send(&mut self, sequence: u32, bytes: usize) -> Result<()> {
        match self {
            Self::SharedMemory(_) => {
                let _ = (sequence, bytes);
                Ok(())
            }
            #[cfg(feature = "rdma")]
            Self::Verbs(path) => path.send(sequence, bytes),
        }
    }

    /// Whether several frames sent together are cheaper than one by one.
    #[inline]
    pub(crate) fn gathers(&self) -> bool {
        match self {
            Self::SharedMemory(_) => false,
            #[cfg(feature = "rdma")]
            Self::Verbs(_) => true,
        }
    }

    /// While `hold` is true, frames that are sent may wait for [`post_held`](Self::post_held), or for the next one sent after
    /// `hold` has become false. On shared memory none does: it has arrived when it has been composed.
    pub(crate) fn hold(&mut self, hold: bool) {
        match self {
            Self::SharedMemory(_) => {
                let _ = hold;
            }
            #[cfg(feature = "rdma")]
            Self::Verbs(path) => path.hold(hold),
        }
    }

    /// Whether a frame waits.
    #[inline]
    pub(crate) fn holds(&self) -> bool {
        match self {
            Self::SharedMemory(_) => false,
            #[cfg(feature = "rdma")]
            Self::Verbs(path) => path.holds(),
        }
    }

    /// Sends what waits.
    pub(crate) fn post_held(&mut self) -> Result<()> {
        match self {
            Self::SharedMemory(_) => Ok(()),
            #[cfg(feature = "rdma")]
            Self::Verbs(path) => path.post_held(),
        }
    }

    /// Looks after what has been sent: errors of earlier sends are found here.
    #[inline]
    pub(crate) fn progress(&mut self) -> Result<()> {
        match self {
            Self::SharedMemory(_) => Ok(()),
            #[cfg(feature = "rdma")]
            Self::Verbs(path) => path.progress(),
        }
    }

    /// Waits until everything sent has arrived.
    pub(crate) fn flush(&mut self, deadline: Instant) -> Result<()> {
        match self {
            Self::SharedMemory(_) => {
                let _ = deadline;
                Ok(())
            }
            #[cfg(feature = "rdma")]
            Self::Verbs(path) => path.flush(deadline),
        }
    }

    /// Where asynchronous events of the device are told, if there are any.
    pub(crate) fn events(&self) -> Option<DeviceEvents> {
        match self {
            Self::SharedMemory(_) => None,
            #[cfg(feature = "rdma")]
            Self::Verbs(path) => Some(path.events()),
        }
    }
}

#[cfg(feature = "rdma")]
pub(crate) use verbs::DeviceEvents;

/// There are none without a device.
#[cfg(not(feature = "rdma"))]
#[derive(Debug)]
pub(crate) enum DeviceEvents {}

#[cfg(not(feature = "rdma"))]
impl DeviceEvents {
    pub(crate) fn descriptor(&self) -> std::os::fd::BorrowedFd<'_> {
        match *self {}
    }

    pub(crate) fn take(&self) -> Option<TransportError> {
        match *self {}
    }
}

/// The data path that a controller asks for.
pub(crate) fn choose(config: &SessionConfig, peer: IpAddr, local: IpAddr) -> DataPathCode {
    match config.data_path {
        DataPathKind::SharedMemory => DataPathCode::SharedMemory,
        DataPathKind::Verbs => DataPathCode::Verbs,
        DataPathKind::Auto if config.device.is_some() => DataPathCode::Verbs,
        // A connection whose two ends have one address, or loopback ones, stays on this host.
        DataPathKind::Auto if peer.is_loopback() || peer == local => DataPathCode::SharedMemory,
        DataPathKind::Auto => DataPathCode::Verbs,
    }
}

/// Whether a coprocessor with this configuration serves a client that asks for `code`.
pub(crate) fn accepts(config: &SessionConfig, code: DataPathCode) -> Result<(), String> {
    let fits = match config.data_path {
        DataPathKind::Auto => true,
        DataPathKind::SharedMemory => code == DataPathCode::SharedMemory,
        DataPathKind::Verbs => code == DataPathCode::Verbs,
    };
    if fits { Ok(()) } else { Err(format!("this coprocessor serves {:?}, not {code:?}", config.data_path)) }
}

/// The error of every call that needs the feature `rdma` in a build without it.
#[cfg(not(feature = "rdma"))]
pub(crate) fn no_rdma() -> TransportError {
    TransportError::Unsupported {
        what: "the data path 'verbs'".into(),
        reason: "the crate was built without its feature 'rdma'; use shared memory, or build with it".into(),
    }
}

/// Refuses a region that is too small to be of use.
pub(crate) fn check_region_size(bytes: usize) -> Result<()> {
    if bytes < Geometry::PROBE_BYTES {
        return Err(TransportError::invalid(
            "alloc_memory",
            format!(
                "{bytes} bytes are too few: the region holds the ring and {} bytes for the probe (see \
                 ChannelDesc::controller_bytes and coprocessor_bytes)",
                Geometry::PROBE_BYTES
            ),
        ));
    }
    Ok(())
}
