//! The wire between all devices: what becomes of a posted request.
//!
//! Requests of a queue pair are carried out one after the other, by whoever posts or polls when that can be done at once, and
//! else (delays, retries, torn placement) by a thread of the wire.

use std::sync::{Once, PoisonError};
use std::time::{Duration, Instant};

use super::control::port_of;
use super::pairs::{ERR, MASK_24, RTR, RTS};
use super::plan::{Placement, Port};
use super::world::{CHANGED, Data, Pair, World, world};
use super::{events, place, poll, regions};
use crate::data_path::verbs::ffi;
use crate::devices::{LinkLayer, PortState};

use ffi::ibv_wc_status as status;

/// How often the thread looks after what is waiting for time to pass.
const TICK: Duration = Duration::from_micros(300);

/// What the first request of a queue pair comes to.
enum Verdict {
    /// Nobody answers; it may be that somebody does later.
    Silence,
    /// It fails with this status. Perhaps the target fails as well, with this event.
    Failure(u32, Option<(usize, i32)>),
    /// These bytes go to this memory, in this region; the target's pair receives them.
    Arrival { bytes: Vec<u8>, memory: u64, region: Option<usize>, target: usize },
}

/// A placement for the thread.
struct Job {
    pair: usize,
    bytes: Vec<u8>,
    memory: u64,
    pieces: Vec<(usize, usize)>,
    region: usize,
    target: usize,
}

/// Starts the thread, once.
pub(super) fn start() {
    static START: Once = Once::new();
    START.call_once(|| {
        std::thread::Builder::new().name("fabricated-wire".into()).spawn(run).expect("a thread");
    });
}

fn run() {
    let mut guard = world();
    loop {
        let waiting: Vec<_> = guard
            .pairs
            .iter()
            .filter(|(_, pair)| !pair.pending.is_empty() && !pair.placing)
            .map(|(raw, _)| *raw)
            .collect();
        let mut worked = false;
        for pair in &waiting {
            let Some(job) = step(&mut guard, *pair, true) else { continue };
            drop(guard);
            // SAFETY: the region is pinned, so that its deregistration, and with it the end of its memory, waits; the target
            // range was found to be inside of it.
            unsafe { place::place(&job.bytes, job.memory, &job.pieces, place::pauses(job.pieces.len())) };
            guard = world();
            if let Some(region) = guard.regions.get_mut(&job.region) {
                region.pins -= 1;
            }
            if let Some(pair) = guard.pairs.get_mut(&job.pair) {
                pair.placing = false;
            }
            arrived(&mut guard, job.pair, job.target, job.bytes.len() as u64);
            CHANGED.notify_all();
            worked = true;
        }
        if !worked {
            guard = if waiting.is_empty() {
                CHANGED.wait(guard).unwrap_or_else(PoisonError::into_inner)
            } else {
                CHANGED.wait_timeout(guard, TICK).unwrap_or_else(PoisonError::into_inner).0
            };
        }
    }
}

/// Carries out what can be at once.
pub(super) fn advance(world: &mut World, pair: usize) {
    let job = step(world, pair, false);
    debug_assert!(job.is_none(), "jobs are only given to the thread");
}

/// Moves a queue pair to ERR, flushing what is queued.
pub(super) fn fail(world: &mut World, raw: usize) {
    let Some(pair) = world.pairs.get_mut(&raw) else { return };
    pair.state = ERR;
    // SAFETY: a live pair of ours, whose structure lives for ever; this field is written with the lock held alone.
    unsafe { (*(raw as *mut ffi::ibv_qp)).state = ERR };
    advance(world, raw);
}

fn step(world: &mut World, raw: usize, is_thread: bool) -> Option<Job> {
    loop {
        let pair = world.pairs.get(&raw)?;
        let first = pair.pending.front()?;
        if pair.placing {
            return None;
        }
        let now = Instant::now();
        match pair.state {
            ERR => {
                finish(world, raw, status::IBV_WC_WR_FLUSH_ERR);
                continue;
            }
            RTS if now < first.posted + world.devices[pair.device].plan.delivery_delay => return None,
            RTS => {}
            _ => return None,
        }
        let patience = patience(pair);
        match judge(world, raw) {
            Verdict::Silence => {
                let first = world.pairs.get_mut(&raw)?.pending.front_mut()?;
                let since = *first.sent.get_or_insert(now);
                // A timeout of 0 is none at all.
                if patience.is_none_or(|patience| now < since + patience) {
                    return None;
                }
                finish(world, raw, status::IBV_WC_RETRY_EXC_ERR);
                fail(world, raw);
            }
            Verdict::Failure(number, event) => {
                finish(world, raw, number);
                fail(world, raw);
                if let Some((target, number)) = event {
                    if let Some(Pair { context, .. }) = world.pairs.get(&target) {
                        let context = *context;
                        events::raise(world, context, number, target);
                    }
                    fail(world, target);
                }
            }
            Verdict::Arrival { bytes, memory, region, target } => {
                let device = world.pairs[&raw].device;
                let placement = world.devices[device].plan.placement;
                let torn = placement == Placement::Torn && !bytes.is_empty();
                if torn && !is_thread {
                    return None;
                }
                let pieces = place::pieces(placement, memory, bytes.len(), || world.random());
                if torn && let Some(region) = region {
                    world.pairs.get_mut(&raw)?.placing = true;
                    world.regions.get_mut(&region)?.pins += 1;
                    return Some(Job { pair: raw, bytes, memory, pieces, region, target });
                }
                // SAFETY: the range was found to be inside of a registered region, which cannot be deregistered before the
                // lock is free, and whose memory outlives its registration.
                unsafe { place::place(&bytes, memory, &pieces, |_| {}) };
                arrived(world, raw, target, bytes.len() as u64);
            }
        }
    }
}

/// How long a request is tried; `None`: for ever.
fn patience(pair: &Pair) -> Option<Duration> {
    let Pair { attributes, .. } = pair;
    let one_try = Duration::from_nanos(4096 << attributes.timeout);
    (attributes.timeout != 0).then(|| one_try * (u32::from(attributes.retries) + 1))
}

/// Takes the first request out and completes it.
fn finish(world: &mut World, raw: usize, number: u32) {
    let Some(work) = world.pairs.get_mut(&raw).and_then(|pair| pair.pending.pop_front()) else { return };
    poll::complete(world, raw, work.id, work.signalled, number, work.data.len());
}

/// The bytes of the first request are in place: both sides count its packets, and it is acknowledged.
fn arrived(world: &mut World, raw: usize, target: usize, length: u64) {
    let Some(pair) = world.pairs.get_mut(&raw) else { return };
    let packets = length.div_ceil(u64::from(pair.attributes.mtu)).max(1) as u32;
    pair.attributes.send_psn = (pair.attributes.send_psn + packets) & MASK_24;
    let (device, state) = (pair.device, pair.state);
    let dropped = world.devices[device].plan.drop_acks_from;
    if let Some(pair) = world.pairs.get_mut(&target) {
        pair.attributes.receive_psn = (pair.attributes.receive_psn + packets) & MASK_24;
    }
    if state != RTS {
        // It failed while the bytes were under way.
        finish(world, raw, status::IBV_WC_WR_FLUSH_ERR);
        return;
    }
    let Some(first) = world.pairs.get_mut(&raw).and_then(|pair| pair.pending.front_mut()) else { return };
    if dropped.is_some_and(|from| first.ordinal >= from) {
        first.unheard = true;
        return;
    }
    finish(world, raw, status::IBV_WC_SUCCESS);
}

/// What the first request comes to now.
fn judge(world: &mut World, raw: usize) -> Verdict {
    let pair = &world.pairs[&raw];
    let work = pair.pending.front().expect("there is a first");
    let device = pair.device;
    let told = world.devices[device].plan.statuses.iter().position(|(nth, _)| *nth == work.ordinal);
    if let Some(index) = told {
        return Verdict::Failure(world.devices[device].plan.statuses.swap_remove(index).1, None);
    }
    if work.unheard {
        return Verdict::Silence;
    }
    let length = work.data.len();
    if length > 1 << 30 {
        // Too long for any port; a segment of length 0 comes to this as well.
        return Verdict::Failure(status::IBV_WC_LOC_LEN_ERR, None);
    }
    // This side's memory.
    let mut bytes = Vec::new();
    match &work.data {
        Data::Inline(copy) => bytes.clone_from(copy),
        Data::Segments(segments) => {
            for (address, length, key) in segments {
                let source = world
                    .regions
                    .values()
                    .find(|region| region.local_key == *key && region.domain == pair.domain)
                    .and_then(|region| region.locate(*address, u64::from(*length)));
                let Some(source) = source else { return Verdict::Failure(status::IBV_WC_LOC_PROT_ERR, None) };
                // SAFETY: inside of a registered region, which cannot be deregistered before the lock is free.
                unsafe { place::read(source, *length as usize, &mut bytes) };
            }
        }
    }
    // The way to the peer.
    let Some((target, peer)) = find_target(world, pair) else { return Verdict::Silence };
    // What the peer's device has to say.
    if peer.attributes.access & regions::REMOTE_WRITE == 0 {
        return Verdict::Failure(status::IBV_WC_REM_INV_REQ_ERR, Some((target, events::QP_REQ_ERR)));
    }
    let (own_mtu, peer_mtu) = (pair.attributes.mtu, peer.attributes.mtu);
    if own_mtu != peer_mtu && length > u64::from(own_mtu.min(peer_mtu)) {
        return Verdict::Failure(status::IBV_WC_REM_INV_REQ_ERR, Some((target, events::QP_REQ_ERR)));
    }
    if length == 0 {
        // Neither key nor address of an empty write is looked at.
        return Verdict::Arrival { bytes, memory: 0, region: None, target };
    }
    let region = world.regions.iter().find(|(_, region)| {
        region.remote_key == work.key && region.domain == peer.domain && region.access & regions::REMOTE_WRITE != 0
    });
    match region.and_then(|(raw, region)| Some((*raw, region.locate(work.address, length)?))) {
        Some((region, memory)) => Verdict::Arrival { bytes, memory, region: Some(region), target },
        None => Verdict::Failure(status::IBV_WC_REM_ACCESS_ERR, Some((target, events::QP_ACCESS_ERR))),
    }
}

/// The queue pair that hears the first request of `pair` and takes it for its own peer's.
fn find_target<'a>(world: &'a World, pair: &Pair) -> Option<(usize, &'a Pair)> {
    let own = port_of(&world.devices[pair.device].plan.ports, pair.attributes.port).ok()?;
    let (raw, peer) = world.pairs.iter().find(|(_, peer)| peer.number == pair.attributes.target)?;
    let theirs = port_of(&world.devices[peer.device].plan.ports, peer.attributes.port).ok()?;
    let up = own.state == PortState::Active && theirs.state == PortState::Active;
    let listens = matches!(peer.state, RTR | RTS) && peer.attributes.target == pair.number;
    let in_step = peer.attributes.receive_psn == pair.attributes.send_psn;
    let key = |port: &Port, index: u16| port.pkeys.get(usize::from(index)).copied();
    let (own_key, their_key) = (key(own, pair.attributes.pkey_index)?, key(theirs, peer.attributes.pkey_index)?);
    let partition = own_key & 0x7FFF == their_key & 0x7FFF && (own_key | their_key) & 0x8000 != 0;
    (up && listens && in_step && partition && addressed(own, theirs, pair)).then_some((*raw, peer))
}

/// Whether the address in `pair` leads from its own port to the other one.
fn addressed(own: &Port, theirs: &Port, pair: &Pair) -> bool {
    if own.link_layer != theirs.link_layer {
        return false;
    }
    if own.link_layer == LinkLayer::InfiniBand && pair.attributes.lid != theirs.lid {
        return false;
    }
    if !pair.attributes.global {
        return true;
    }
    let Some(Some(from)) = own.gids.get(usize::from(pair.attributes.gid_index)) else { return false };
    // The same address may stand there once for each type: packets of one type are not seen by the other.
    theirs.gids.iter().flatten().any(|gid| gid.address.octets() == pair.attributes.gid && gid.kind == from.kind)
}
