//! Completion queues.

use std::os::raw::{c_int, c_void};
use std::time::Instant;

use super::errno::{pointer, returned};
use super::guard::Entry;
use super::verb::Verb;
use super::world::{Completion, Context, Queue, World, world};
use super::{events, wire};
use crate::data_path::verbs::ffi;

/// What a failed poll returns: negative, and no error number (see `man ibv_poll_cq`).
const POLL_FAILED: c_int = -2;

/// Makes a completion queue.
pub(super) unsafe extern "C" fn create_cq(
    context: *mut ffi::ibv_context,
    entries: c_int,
    cookie: *mut c_void,
    channel: *mut ffi::ibv_comp_channel,
    vector: c_int,
) -> *mut ffi::ibv_cq {
    let mut world = world();
    let Some(Context { device, .. }) = world.contexts.get(&(context as usize)) else {
        return pointer(Err(world.stranger(Verb::CreateCq, context as usize)));
    };
    let device = *device;
    let id = world.id();
    let result = world.call(device, Verb::CreateCq, id, |world| {
        if entries <= 0 || vector != 0 || !channel.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: a plain structure.
        let mut raw: ffi::ibv_cq = unsafe { ffi::zeroed() };
        raw.context = context;
        raw.cq_context = cookie;
        raw.handle = id as u32;
        raw.cqe = entries;
        let raw = Box::into_raw(Box::new(raw));
        let capacity = world.devices[device].plan.completions_granted.map_or(entries as usize, |lie| lie as usize);
        let queue = Queue { id, device, context: context as usize, capacity, entries: Default::default() };
        world.queues.insert(raw as usize, queue);
        Ok(raw)
    });
    pointer(result)
}

/// Ends a completion queue that no queue pair uses.
pub(super) unsafe extern "C" fn destroy_cq(queue: *mut ffi::ibv_cq) -> c_int {
    let mut world = world();
    let raw = queue as usize;
    let Some(Queue { id, device, .. }) = world.queues.get(&raw) else {
        return returned(Err(world.stranger(Verb::DestroyCq, raw)));
    };
    let (id, device) = (*id, *device);
    let result = world.call(device, Verb::DestroyCq, id, |world| {
        if world.pairs.values().any(|pair| pair.send_queue == raw || pair.receive_queue == raw) {
            return Err(libc::EBUSY);
        }
        world.queues.remove(&raw);
        world.bury(raw, device);
        Ok(())
    });
    returned(result)
}

/// Takes completions that are due.
pub(super) unsafe extern "C" fn poll_cq(queue: *mut ffi::ibv_cq, room: c_int, into: *mut ffi::ibv_wc) -> c_int {
    let mut world = world();
    let raw = queue as usize;
    // Nobody may read `errno` after a poll.
    returned(Ok(()));
    let Some(Queue { id, device, .. }) = world.queues.get(&raw) else {
        world.stranger(Verb::PollCq, raw);
        return POLL_FAILED;
    };
    let (id, device) = (*id, *device);
    if let Err(errno) = world.devices[device].fault(Verb::PollCq) {
        world.devices[device].journal.push(Entry { verb: Verb::PollCq, object: id, errno });
        return POLL_FAILED;
    }
    let waiting: Vec<_> = world
        .pairs
        .iter()
        .filter(|(_, p)| p.send_queue == raw && !p.pending.is_empty())
        .map(|(pair, _)| *pair)
        .collect();
    for pair in waiting {
        wire::advance(&mut world, pair);
    }
    let held = world.devices[device].held;
    let now = Instant::now();
    let mut taken = 0;
    while taken < room {
        let entries = &mut world.queues.get_mut(&raw).expect("looked up above").entries;
        // In their order: one that is not yet due keeps back those behind it.
        if entries.front().is_none_or(|first| first.due > now || (held && first.status == 0)) {
            break;
        }
        let entry = entries.pop_front().expect("there is a first");
        // SAFETY: a plain structure.
        let mut completion: ffi::ibv_wc = unsafe { ffi::zeroed() };
        completion.wr_id = entry.work;
        completion.status = entry.status;
        completion.opcode = ffi::ibv_wc_opcode::IBV_WC_RDMA_WRITE;
        completion.byte_len = entry.bytes;
        if entry.status != 0 {
            // Not valid in a failed completion: rubbish for those who read them.
            completion.opcode = 0xDEAD;
            completion.byte_len = u32::MAX;
            completion.vendor_err = 0xFAB0 | entry.status;
        }
        let known = &mut world.devices[device];
        known.completed += 1;
        if let Some((_, request)) = known.misnumbered.take_if(|(nth, _)| *nth == known.completed) {
            completion.wr_id = request;
        }
        if let Some(opcode) = known.opcode.filter(|_| entry.status == 0) {
            completion.opcode = opcode;
        }
        if let Some(pair) = world.pairs.get_mut(&entry.pair) {
            completion.qp_num = pair.number;
            pair.used = pair.used.saturating_sub(entry.frees);
        }
        // SAFETY: the caller gives room for `room` completions, and `taken` is less.
        unsafe { into.add(taken as usize).write(completion) };
        taken += 1;
    }
    taken
}

/// The end of a request: of the silent ones nothing is told until a later one tells it.
pub(super) fn complete(world: &mut World, pair: usize, work: u64, signalled: bool, status: u32, bytes: u64) {
    let Some(found) = world.pairs.get_mut(&pair) else { return };
    found.silent += 1;
    if status == 0 && !signalled {
        return;
    }
    let frees = std::mem::take(&mut found.silent);
    let (queue, context, device) = (found.send_queue, found.context, found.device);
    let delay = if status == 0 { world.devices[device].plan.completion_delay } else { Default::default() };
    let completion = Completion { work, status, pair, frees, bytes: bytes as u32, due: Instant::now() + delay };
    let found = world.queues.get_mut(&queue).expect("a queue outlives its pairs");
    if found.entries.len() >= found.capacity {
        // The completion is lost, and with it what it would have given back.
        events::raise(world, context, events::CQ_ERR, queue);
        return;
    }
    found.entries.push_back(completion);
}
