//! Work requests on their way into the send queue.

use std::os::raw::c_int;
use std::time::Instant;

use super::errno::returned;
use super::guard::Entry;
use super::pairs::{ERR, RTS};
use super::verb::Verb;
use super::wire;
use super::world::{CHANGED, Data, Work, World, world};
use crate::data_path::verbs::ffi;

/// Posts a chain of requests. When one is refused, those before it stay posted.
pub(super) unsafe extern "C" fn post_send(
    pair: *mut ffi::ibv_qp,
    first: *mut ffi::ibv_send_wr,
    refused: *mut *mut ffi::ibv_send_wr,
) -> c_int {
    let mut world = world();
    let raw = pair as usize;
    let mut next = first;
    let mut result = Ok(());
    if let Some(found) = world.pairs.get(&raw) {
        let device = found.device;
        world.devices[device].doorbells += 1;
    }
    while !next.is_null() {
        // SAFETY: the caller gives a chain of filled requests that ends with a null pointer.
        let request = unsafe { &*next };
        // SAFETY: as the caller vouches for the request, so for its segments and, when inline, their bytes.
        result = unsafe { post(&mut world, raw, request) };
        if result.is_err() {
            // SAFETY: the caller gives a place for the pointer.
            unsafe { *refused = next };
            break;
        }
        next = request.next;
    }
    wire::advance(&mut world, raw);
    if world.pairs.get(&raw).is_some_and(|pair| !pair.pending.is_empty()) {
        // The rest is for the wire's thread.
        CHANGED.notify_all();
    }
    returned(result)
}

/// Posts one.
///
/// # Safety
/// The request's segments have to be valid for reads, and their bytes too when it is inline.
unsafe fn post(world: &mut World, raw: usize, request: &ffi::ibv_send_wr) -> Result<(), c_int> {
    let Some(pair) = world.pairs.get(&raw) else { return Err(world.stranger(Verb::PostSend, raw)) };
    let (device, id) = (pair.device, pair.id);
    if let Err(errno) = world.devices[device].fault(Verb::PostSend) {
        world.devices[device].journal.push(Entry { verb: Verb::PostSend, object: id, errno });
        return Err(errno);
    }
    let pair = &world.pairs[&raw];
    let inline = request.send_flags & ffi::ibv_send_flags::IBV_SEND_INLINE.0 != 0;
    if !matches!(pair.state, RTS | ERR)
        || request.opcode != ffi::ibv_wr_opcode::IBV_WR_RDMA_WRITE
        || !(0..=pair.segments as c_int).contains(&request.num_sge)
    {
        return Err(libc::EINVAL);
    }
    if pair.used >= pair.depth {
        return Err(libc::ENOMEM);
    }
    let segments: Vec<_> = (0..request.num_sge as usize)
        .map(|index| {
            // SAFETY: the caller vouches for `num_sge` segments.
            let segment = unsafe { &*request.sg_list.add(index) };
            (segment.addr, segment.length, segment.lkey)
        })
        .collect();
    let data = if inline {
        let bytes: usize = segments.iter().map(|segment| segment.1 as usize).sum();
        if bytes > pair.inline_bytes as usize {
            return Err(libc::EINVAL);
        }
        let mut copy = Vec::with_capacity(bytes);
        for (address, length, _) in segments {
            for offset in 0..u64::from(length) {
                // SAFETY: the caller vouches for the bytes of an inline request until the post returns.
                copy.push(unsafe { ((address + offset) as *const u8).read_volatile() });
            }
        }
        Data::Inline(copy)
    } else {
        // A segment of length 0 means 2^31 bytes.
        Data::Segments(
            segments.into_iter().map(|(at, len, key)| (at, if len == 0 { 1 << 31 } else { len }, key)).collect(),
        )
    };
    // SAFETY: writes use this member of the union.
    let target = unsafe { request.wr.rdma };
    world.devices[device].writes += 1;
    let ordinal = world.devices[device].writes;
    let pair = world.pairs.get_mut(&raw).expect("looked up above");
    pair.used += 1;
    pair.pending.push_back(Work {
        id: request.wr_id,
        signalled: pair.all_signalled || request.send_flags & ffi::ibv_send_flags::IBV_SEND_SIGNALED.0 != 0,
        data,
        address: target.remote_addr,
        key: target.rkey,
        ordinal,
        posted: Instant::now(),
        sent: None,
        unheard: false,
    });
    Ok(())
}
