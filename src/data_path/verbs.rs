//! RDMA writes over one reliable connected queue pair, which carries both directions. On the Catalyst wire there is a
//! second one, which only receives: see [`catalyst`].

mod catalyst;
mod chain;
pub(crate) mod completion;
pub(crate) mod device;
#[cfg(feature = "fabricated")]
pub(crate) mod fabricated;
pub(crate) mod ffi;
pub(crate) mod memory;
pub(crate) mod queue_pair;

use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use chain::{Chain, MOST_HELD};
use completion::CompletionQueue;
use device::{Context, Route};
use memory::{ProtectionDomain, Region};
use queue_pair::{QueuePair, Retry, Write};

use crate::config::{DmaBuf, SessionConfig, Wire};
use crate::error::{Result, TransportError};
use crate::oob::Endpoint;
use crate::ring::{Check, Geometry, SharedBytes};
use crate::session::{MemKind, MemRegion, PeerRef};

/// Work requests asked for at least: enough that the queue never limits a shallow ring.
const LEAST_SEND_DEPTH: u32 = 64;
/// Work requests asked for at most; deeper rings wait for completions instead.
const MOST_SEND_DEPTH: u32 = 4096;
/// Inline bytes asked for: the size up to which one or a few blocks of a work queue hold a frame on common devices.
const INLINE_BYTES: u32 = 220;
/// How long closing waits for the last completions.
const DRAIN_BOUND: Duration = Duration::from_millis(100);

/// A verbs data path.
///
/// Fields are dropped in the order in which they stand, which is the order in which verbs objects have to go: the queue
/// pair, its completion queue, the regions, and last (by their `Arc`s) the domain and the context.
#[derive(Debug)]
pub(crate) struct Verbs {
    queue_pair: QueuePair,
    /// The pair that receives, on the Catalyst wire; else the one pair does both.
    receiving: Option<QueuePair>,
    completions: CompletionQueue,
    outgoing: Option<Outgoing>,
    incoming: Option<Region>,
    domain: Arc<ProtectionDomain>,
    route: Route,
    psn: u32,
    /// Bound on every wait for completions.
    bound: Duration,
    dma_buf: Option<DmaBuf>,
    remote: PeerRef,
    /// Writes that wait for a doorbell.
    chain: Chain,
    /// What is sent is to wait for its doorbell.
    holding: bool,
    /// `holding`, or something waits: the one thing that a lone write looks at.
    deferring: bool,
    /// Work requests posted, or made ready to be.
    posted: u64,
    /// Of those, the ones that are known to have completed: all before this number.
    completed: u64,
    /// Work requests that may be outstanding.
    window: u64,
    /// One in so many is signalled.
    signal_every: u64,
    /// Data has passed, so the addressing is right.
    probed: bool,
    peer: String,
}

/// Frames on their way.
#[derive(Debug)]
struct Outgoing {
    region: Region,
    /// Shape of the peer's ring.
    geometry: Geometry,
    /// Slots of this side's buffer, a power of two. More than the peer's ring has, so that a slot is seldom waited for.
    slots: u32,
}

impl Outgoing {
    fn slot_end(&self, sequence: u32) -> usize {
        ((sequence & (self.slots - 1)) as usize + 1) * self.geometry.slot_bytes()
    }
}

impl Verbs {
    /// Opens the device and makes a queue pair in INIT.
    pub(crate) fn open(config: &SessionConfig, depth: u32, local: IpAddr) -> Result<Self> {
        #[cfg(feature = "fabricated")]
        let table = if config.fabricated { fabricated::table() } else { &ffi::SYSTEM };
        #[cfg(not(feature = "fabricated"))]
        let table = &ffi::SYSTEM;
        let (context, route) =
            device::choose(table, config.device.as_deref(), config.port, config.gid_index, config.pkey_index, local)?;
        let domain = ProtectionDomain::allocate(&context)?;
        let depth = depth.saturating_mul(2).clamp(LEAST_SEND_DEPTH, MOST_SEND_DEPTH);
        // More than can be outstanding, for the markers that closing posts.
        let completions = CompletionQueue::create(&context, depth + 2)?;
        let mut queue_pair = QueuePair::create(&domain, &completions, depth, INLINE_BYTES)?;
        queue_pair.enter_init(&route)?;
        let receiving = match config.wire {
            Wire::Native => None,
            Wire::Catalyst => Some(catalyst::receiving_pair(&domain, &completions, &route)?),
        };
        let window = u64::from(queue_pair.send_depth.min(depth)).saturating_sub(1).max(1);
        // Packets of an earlier connection must never fit: the number comes from the kernel's random ones. On the Catalyst
        // wire it is 0, as the C++ runtime takes nothing else for granted.
        let psn = match config.wire {
            Wire::Native => u32::from_le_bytes(crate::random::random()?) & 0x00FF_FFFF,
            Wire::Catalyst => 0,
        };
        Ok(Self {
            queue_pair,
            receiving,
            completions,
            outgoing: None,
            incoming: None,
            domain,
            route,
            psn,
            bound: config.liveness,
            dma_buf: config.dma_buf.clone(),
            remote: PeerRef { rkey: Default::default(), remote_addr: 0, size: 0 },
            chain: Chain::new(0),
            holding: false,
            deferring: false,
            posted: 0,
            completed: 0,
            window,
            signal_every: (window / 2).clamp(1, 64),
            probed: false,
            peer: String::new(),
        })
    }

    /// Its name and port, as in `rxe0 port 1`.
    pub(crate) fn device(&self) -> String {
        format!("{} port {}", self.domain.context.name, self.route.port)
    }

    pub(crate) fn endpoint(&self) -> Endpoint {
        Endpoint {
            link_layer: self.route.link_layer,
            mtu: self.route.mtu,
            lid: self.route.lid,
            queue_pair: self.queue_pair.number(),
            psn: self.psn,
            gid: self.route.gid,
            gid_type: gid_type_number(&self.route),
            pkey: self.route.pkey,
            host: super::shared_memory::host_identity(),
            ..Endpoint::default()
        }
    }

    /// INIT → RTR → RTS towards the peer, after its endpoint has been found to fit this side's.
    pub(crate) fn bring_up(&mut self, peer: &Endpoint, peer_name: &str) -> Result<()> {
        fits(&self.endpoint(), peer).map_err(|problem| TransportError::Protocol {
            stage: "connect",
            peer: peer_name.to_owned(),
            problem: format!("{problem} (this side: {})", self.place()),
        })?;
        self.peer = format!(
            "{peer_name} queue pair {} GID {}",
            peer.queue_pair,
            std::net::Ipv6Addr::from(peer.gid).to_canonical()
        );
        let retry = Retry::within(self.bound);
        self.queue_pair.enter_ready_to_receive(&self.route, peer, &self.peer)?;
        self.queue_pair.enter_ready_to_send(self.psn, retry, &self.peer)
    }

    pub(crate) fn allocate(&mut self, bytes: usize, kind: MemKind) -> Result<MemRegion> {
        super::check_region_size(bytes)?;
        let region = match (kind, &self.dma_buf) {
            (MemKind::CpuRam, _) => Region::allocate(&self.domain, bytes, true)?,
            (_, Some(descriptor)) => Region::from_dma_buf(&self.domain, descriptor.0.as_fd(), bytes, kind)?,
            (_, None) => {
                return Err(TransportError::invalid(
                    format!("{kind:?} memory"),
                    "needs its dma-buf descriptor: set SessionConfig::dma_buf",
                ));
            }
        };
        let described = MemRegion {
            addr: region.bytes().address(0),
            size: bytes,
            lkey: region.local_key(),
            rkey: region.remote_key(),
            kind: region.kind(),
        };
        self.incoming = Some(region);
        Ok(described)
    }

    pub(crate) fn attach(&mut self, peer: &PeerRef) {
        self.remote = *peer;
    }

    /// Registers the buffer that frames are sent from: whole slots, and room for the probe.
    pub(crate) fn establish(&mut self, geometry: Geometry) -> Result<()> {
        let slots = (geometry.slots() * 2).max(4);
        let bytes = slots as usize * geometry.slot_bytes() + Geometry::PROBE_BYTES;
        let region = Region::allocate(&self.domain, bytes, false)?;
        self.window = self.window.min(u64::from(slots));
        self.signal_every = (self.window / 2).clamp(1, 64);
        self.chain = Chain::new(self.window.min(MOST_HELD));
        self.outgoing = Some(Outgoing { region, geometry, slots });
        Ok(())
    }

    pub(crate) fn incoming(&self) -> SharedBytes {
        self.incoming.as_ref().expect("the lifecycle asks for the region only after its allocation").bytes().clone()
    }

    /// The session number where the device vouches for the order of placement, a checksum elsewhere.
    pub(crate) fn incoming_check(&self, session: u32) -> Check {
        if self.queue_pair.places_in_order() { Check::Session(session) } else { Check::Crc(session) }
    }

    pub(crate) fn send_probe(&mut self, probe: &[u8]) -> Result<()> {
        let Some(outgoing) = &self.outgoing else { unreachable!("the lifecycle probes only after establish") };
        let start = outgoing.slots as usize * outgoing.geometry.slot_bytes();
        outgoing.region.bytes().copy_in(start, probe);
        let remote = self.remote.remote_addr + outgoing.geometry.ring_bytes() as u64;
        self.post(start, probe.len(), remote, true)
    }

    /// Waits until a further request may be posted, or until `give_up` says that it is in vain. Whether it may.
    #[inline]
    pub(crate) fn await_room(&mut self, give_up: &dyn Fn() -> bool) -> Result<bool> {
        if self.posted - self.completed < self.window {
            return Ok(true);
        }
        self.make_room(Instant::now() + self.bound, give_up)
    }

    #[inline]
    pub(crate) fn slot(&mut self, sequence: u32) -> Result<(&SharedBytes, usize)> {
        self.await_room(&|| false)?;
        let Some(outgoing) = &self.outgoing else { unreachable!("the lifecycle sends only after establish") };
        Ok((outgoing.region.bytes(), outgoing.slot_end(sequence)))
    }

    #[inline]
    pub(crate) fn send(&mut self, sequence: u32, bytes: usize) -> Result<()> {
        let Some(outgoing) = &self.outgoing else { unreachable!("the lifecycle sends only after establish") };
        let local = outgoing.slot_end(sequence) - bytes;
        let remote = self.remote.remote_addr + (outgoing.geometry.frame_end(sequence) - bytes) as u64;
        let signalled = self.posted % self.signal_every == self.signal_every - 1;
        if self.deferring {
            let write = self.write(local, bytes, remote, signalled);
            return self.defer(sequence, write);
        }
        self.post(local, bytes, remote, signalled)
    }

    /// A write of `bytes` at `local` in the outgoing region.
    #[inline]
    fn write(&self, local: usize, bytes: usize, remote: u64, signalled: bool) -> Write {
        let Some(outgoing) = &self.outgoing else { unreachable!("the lifecycle sends only after establish") };
        assert!(local + bytes <= outgoing.region.bytes().len(), "outside of the outgoing region");
        Write {
            id: self.posted,
            local: outgoing.region.bytes().address(local),
            local_key: outgoing.region.local_key(),
            bytes: bytes as u32,
            remote,
            remote_key: self.remote.rkey,
            signalled,
        }
    }

    /// Posts a write of `bytes` at `local` in the outgoing region.
    #[inline]
    fn post(&mut self, local: usize, bytes: usize, remote: u64, signalled: bool) -> Result<()> {
        let write = self.write(local, bytes, remote, signalled);
        // SAFETY: the bytes lie in the outgoing region by the assertion in `write`; it is registered under this key, lives
        // longer than the queue pair, and the slot is composed anew only after `slot` has seen this write complete.
        let mut errno = unsafe { self.queue_pair.post(write) };
        if errno == libc::ENOMEM {
            // The queue is full although fewer than granted are known outstanding: wait for completions, then try again.
            let deadline = Instant::now() + self.bound;
            while errno == libc::ENOMEM && Instant::now() < deadline {
                self.progress()?;
                // SAFETY: as above.
                errno = unsafe { self.queue_pair.post(write) };
            }
        }
        if errno != 0 {
            return Err(self.post_failed(errno, &format!("writing {bytes} bytes")));
        }
        self.posted += 1;
        Ok(())
    }

    #[cold]
    fn post_failed(&self, errno: i32, doing: &str) -> TransportError {
        let mut error = self.domain.context.error("ibv_post_send", errno, format!("{doing} to {}", self.peer));
        // Of this verb ENOMEM does not speak of memory.
        if let TransportError::Verbs(failure) = &mut error
            && errno == libc::ENOMEM
        {
            failure.remedy = format!(
                "the send queue has been full for {:?}: the device does not complete earlier writes",
                self.bound
            );
        }
        error
    }

    /// Takes what has completed.
    ///
    /// # Errors
    /// The first completion that failed, with its likely cause.
    #[inline]
    pub(crate) fn progress(&mut self) -> Result<()> {
        // No more than can be outstanding: a device that reports without end must not hold us.
        for _ in 0..=self.window {
            let Some(completed) = self.completions.poll()? else { break };
            if completed.status != 0 {
                let stage = if self.probed || self.receiving.is_some() { "round" } else { "establish_channel: probe" };
                return Err(completion::failure(completed, stage, self.probed, self.place()));
            }
            if !(self.completed..self.posted - self.chain.len()).contains(&completed.id) {
                return Err(TransportError::Device {
                    problem: format!(
                        "a completion came for work request {}, which is not outstanding, on {}",
                        completed.id,
                        self.place()
                    ),
                    remedy: "the device or its driver is faulty: connect again".into(),
                });
            }
            self.probed = true;
            self.completed = completed.id + 1;
        }
        Ok(())
    }

    /// Waits until every write has been acknowledged: an empty one behind them completes after all of them.
    pub(crate) fn flush(&mut self, deadline: Instant) -> Result<()> {
        if self.outgoing.is_none() || self.posted == self.completed {
            return Ok(());
        }
        self.post_held()?;
        if self.receiving.is_some() {
            return self.linger(deadline);
        }
        if self.posted - self.completed >= self.window {
            self.make_room(deadline, &|| false)?;
        }
        self.post(0, 0, self.remote.remote_addr, true)?;
        while self.completed < self.posted {
            self.progress()?;
            if Instant::now() >= deadline {
                return Err(TransportError::Timeout {
                    stage: "stop: waiting for the acknowledgement of the last writes",
                    waited: Duration::ZERO,
                    hint: self.place(),
                });
            }
            std::hint::spin_loop();
        }
        Ok(())
    }

    #[cold]
    fn make_room(&mut self, deadline: Instant, give_up: &dyn Fn() -> bool) -> Result<bool> {
        let began = Instant::now();
        // What is held can only complete once it is posted.
        self.post_held()?;
        loop {
            self.progress()?;
            if self.posted - self.completed < self.window {
                return Ok(true);
            }
            if give_up() {
                return Ok(false);
            }
            if Instant::now() >= deadline {
                return Err(TransportError::Timeout {
                    stage: "sending: waiting for the completion of earlier writes",
                    waited: began.elapsed(),
                    hint: format!(
                        "the device has not completed {} writes on {}",
                        self.posted - self.completed,
                        self.place()
                    ),
                });
            }
            std::hint::spin_loop();
        }
    }

    pub(crate) fn events(&self) -> DeviceEvents {
        DeviceEvents { context: self.domain.context.clone(), port: self.route.port }
    }

    /// Both ends, for messages.
    fn place(&self) -> String {
        let (port, gid) = self.domain.context.place.get().cloned().unwrap_or_default();
        format!(
            "{} port {port} GID {gid} queue pair {} MTU {} to {}",
            self.domain.context.name,
            self.queue_pair.number(),
            128 << self.route.mtu,
            self.peer
        )
    }
}

impl Drop for Verbs {
    /// Moves the queue pairs to ERR and waits, within a bound, until the device has let go of every request. Only then
    /// are the queue pairs, the registrations and the memory released.
    fn drop(&mut self) {
        let marker = u64::MAX;
        let write = Write {
            id: marker,
            local: 0,
            local_key: Default::default(),
            bytes: 0,
            remote: self.remote.remote_addr,
            remote_key: self.remote.rkey,
            signalled: true,
        };
        let mut markers = 0;
        for pair in self.receiving.iter_mut().chain([&mut self.queue_pair]) {
            if let Err(error) = pair.enter_error() {
                tracing::debug!(%error, "closing");
            }
            // SAFETY: no bytes are read. In ERR the request is flushed at once, behind all that are queued.
            if unsafe { pair.post(write) } == 0 {
                markers += 1;
            }
        }
        let deadline = Instant::now() + DRAIN_BOUND;
        while markers > 0 {
            match self.completions.poll() {
                Ok(Some(completed)) if completed.id == marker => markers -= 1,
                Ok(Some(_)) if Instant::now() < deadline => {}
                Ok(None) if Instant::now() < deadline => std::hint::spin_loop(),
                _ => return,
            }
        }
    }
}

/// The asynchronous events of a device, for the thread that watches the peer.
#[derive(Debug)]
pub(crate) struct DeviceEvents {
    context: Arc<Context>,
    port: u8,
}

impl DeviceEvents {
    /// Readable when an event is waiting.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: the context, and with it its descriptor, stays open as long as `self`.
        unsafe { BorrowedFd::borrow_raw(self.context.async_descriptor()) }
    }

    /// Takes one event; gives an error when it ends the session.
    pub(crate) fn take(&self) -> Option<TransportError> {
        use ffi::event;
        let (number, element) = match self.context.take_event() {
            Ok(event) => event?,
            Err(error) => return Some(error),
        };
        // The port's number is the first integer of the union.
        let port = element as usize as u8;
        let fatal = match number {
            event::CQ_ERR => "IBV_EVENT_CQ_ERR: the completion queue overran",
            event::QP_FATAL => "IBV_EVENT_QP_FATAL: the queue pair failed",
            event::QP_REQ_ERR => "IBV_EVENT_QP_REQ_ERR: the peer sent an invalid request",
            event::QP_ACCESS_ERR => "IBV_EVENT_QP_ACCESS_ERR: the peer wrote where it may not",
            event::DEVICE_FATAL => "IBV_EVENT_DEVICE_FATAL: the device failed or was removed",
            event::PORT_ERR if port == self.port => {
                // Not the end: the link may come back before the retries are used up.
                tracing::warn!(device = self.context.name, port, "the port went down");
                return None;
            }
            event::PORT_ACTIVE if port == self.port => {
                tracing::info!(device = self.context.name, port, "the port is up");
                return None;
            }
            other => {
                tracing::debug!(device = self.context.name, event = other, "asynchronous event");
                return None;
            }
        };
        Some(TransportError::Device {
            problem: format!("device {} reported {fatal}", self.context.name),
            remedy: "connect again".into(),
        })
    }
}

fn gid_type_number(route: &Route) -> u8 {
    use crate::devices::GidType;
    match route.gid_type {
        Some(GidType::RoceV1) => 1,
        Some(GidType::RoceV2) => 2,
        _ => 0,
    }
}

/// Whether two endpoints can talk: the same link layer, GID type and partition.
fn fits(own: &Endpoint, peer: &Endpoint) -> Result<(), String> {
    let layer = |number| match number {
        ffi::LINK_LAYER_INFINIBAND => "InfiniBand",
        ffi::LINK_LAYER_ETHERNET => "Ethernet",
        _ => "no known link layer",
    };
    let kind = |number| match number {
        1 => "RoCE v1",
        2 => "RoCE v2",
        _ => "of unknown type",
    };
    if own.link_layer != peer.link_layer {
        return Err(format!("its port is {}, ours {}", layer(peer.link_layer), layer(own.link_layer)));
    }
    if own.gid_type != peer.gid_type && own.gid_type != 0 && peer.gid_type != 0 {
        return Err(format!(
            "its GID is {}, ours {}: choose GID indexes of one type on both sides",
            kind(peer.gid_type),
            kind(own.gid_type)
        ));
    }
    // The upper bit tells full members from limited ones; two limited members cannot talk.
    if own.pkey & 0x7FFF != peer.pkey & 0x7FFF || (own.pkey | peer.pkey) & 0x8000 == 0 {
        return Err(format!("its partition key is {:#06x}, ours {:#06x}", peer.pkey, own.pkey));
    }
    Ok(())
}
