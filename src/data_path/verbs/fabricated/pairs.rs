//! Queue pairs: creation, the state machine, destruction.

use std::os::raw::{c_int, c_uint};

use super::control::port_of;
use super::errno::{pointer, returned};
use super::verb::Verb;
use super::world::{Attributes, Domain, Pair, World, wait, world};
use super::{regions, wire};
use crate::data_path::verbs::ffi;
use crate::devices::LinkLayer;

pub(super) const RESET: u32 = ffi::ibv_qp_state::IBV_QPS_RESET;
pub(super) const INIT: u32 = ffi::ibv_qp_state::IBV_QPS_INIT;
pub(super) const RTR: u32 = ffi::ibv_qp_state::IBV_QPS_RTR;
pub(super) const RTS: u32 = ffi::ibv_qp_state::IBV_QPS_RTS;
pub(super) const ERR: u32 = ffi::ibv_qp_state::IBV_QPS_ERR;

/// PSNs and queue pair numbers have 24 bits.
pub(super) const MASK_24: u32 = 0x00FF_FFFF;

/// Makes a queue pair in RESET.
pub(super) unsafe extern "C" fn create_qp(
    domain: *mut ffi::ibv_pd,
    wanted: *mut ffi::ibv_qp_init_attr,
) -> *mut ffi::ibv_qp {
    let mut world = world();
    let Some(Domain { device, context, .. }) = world.domains.get(&(domain as usize)) else {
        return pointer(Err(world.stranger(Verb::CreateQp, domain as usize)));
    };
    let (device, context) = (*device, *context);
    let id = world.id();
    let result = world.call(device, Verb::CreateQp, id, |world| {
        // SAFETY: the caller gives a filled structure, in which it expects what was granted.
        let wanted = unsafe { &mut *wanted };
        let plan = &world.devices[device].plan;
        for queue in [wanted.send_cq, wanted.recv_cq] {
            if world.queues.get(&(queue as usize)).is_none_or(|queue| queue.context != context) {
                return Err(libc::EINVAL);
            }
        }
        let capacity = &mut wanted.cap;
        if wanted.qp_type != ffi::ibv_qp_type::IBV_QPT_RC {
            return Err(libc::EOPNOTSUPP);
        }
        if capacity.max_inline_data > plan.inline_limit
            || capacity.max_send_wr > plan.send_depth_limit
            || capacity.max_send_wr == 0
            || capacity.max_send_sge > 16
        {
            return Err(libc::EINVAL);
        }
        capacity.max_inline_data = plan.inline_granted.unwrap_or(capacity.max_inline_data);
        capacity.max_send_wr = plan.send_depth_granted.unwrap_or(capacity.max_send_wr);
        let number = loop {
            let number = world.random() as u32 & MASK_24;
            if number >= 2 && world.pairs.values().all(|pair| pair.number != number) {
                break number;
            }
        };
        // SAFETY: a plain structure.
        let mut raw: ffi::ibv_qp = unsafe { ffi::zeroed() };
        raw.context = context as *mut _;
        raw.qp_context = wanted.qp_context;
        raw.pd = domain;
        raw.send_cq = wanted.send_cq;
        raw.recv_cq = wanted.recv_cq;
        raw.handle = id as u32;
        raw.qp_num = number;
        raw.state = RESET;
        raw.qp_type = wanted.qp_type;
        let raw = Box::into_raw(Box::new(raw));
        let pair = Pair {
            id,
            device,
            context,
            domain: domain as usize,
            send_queue: wanted.send_cq as usize,
            receive_queue: wanted.recv_cq as usize,
            number,
            state: RESET,
            depth: wanted.cap.max_send_wr,
            segments: wanted.cap.max_send_sge,
            inline_bytes: wanted.cap.max_inline_data,
            all_signalled: wanted.sq_sig_all != 0,
            attributes: Attributes::default(),
            used: 0,
            silent: 0,
            pending: Default::default(),
            placing: false,
        };
        world.pairs.insert(raw as usize, pair);
        Ok(raw)
    });
    pointer(result)
}

/// Moves a queue pair to another state.
pub(super) unsafe extern "C" fn modify_qp(
    pair: *mut ffi::ibv_qp,
    attributes: *mut ffi::ibv_qp_attr,
    mask: c_int,
) -> c_int {
    let mut world = world();
    let raw = pair as usize;
    let Some(Pair { id, device, .. }) = world.pairs.get(&raw) else {
        return returned(Err(world.stranger(Verb::ModifyQp, raw)));
    };
    let (id, device) = (*id, *device);
    let slow = world.devices[device].slow_changes;
    if !slow.is_zero() {
        drop(world);
        std::thread::sleep(slow);
        world = self::world();
    }
    let result = world.call(device, Verb::ModifyQp, id, |world| {
        // SAFETY: the caller gives a structure in which what the mask names is filled.
        let wanted = unsafe { &*attributes };
        let target = change(world, raw, wanted, mask as u32)?;
        // SAFETY: a live pair of ours, whose structure lives for ever; only this verb and the wire write this field, both
        // with the lock held.
        unsafe { (*pair).state = target };
        Ok(())
    });
    returned(result)
}

/// Bits that a change of state has to name, and those that it may.
fn bits(from: u32, to: u32) -> Option<(u32, u32)> {
    use ffi::ibv_qp_attr_mask as mask;
    let sum = |parts: &[ffi::ibv_qp_attr_mask]| parts.iter().fold(mask::IBV_QP_STATE.0, |all, part| all | part.0);
    match (from, to) {
        (_, ERR | RESET) => Some((mask::IBV_QP_STATE.0, 0)),
        (RESET | INIT, INIT) => {
            Some((sum(&[mask::IBV_QP_PKEY_INDEX, mask::IBV_QP_PORT, mask::IBV_QP_ACCESS_FLAGS]), 0))
        }
        (INIT, RTR) => Some((
            sum(&[
                mask::IBV_QP_AV,
                mask::IBV_QP_PATH_MTU,
                mask::IBV_QP_DEST_QPN,
                mask::IBV_QP_RQ_PSN,
                mask::IBV_QP_MAX_DEST_RD_ATOMIC,
                mask::IBV_QP_MIN_RNR_TIMER,
            ]),
            sum(&[mask::IBV_QP_PKEY_INDEX, mask::IBV_QP_ACCESS_FLAGS]),
        )),
        (RTR, RTS) => Some((
            sum(&[
                mask::IBV_QP_SQ_PSN,
                mask::IBV_QP_TIMEOUT,
                mask::IBV_QP_RETRY_CNT,
                mask::IBV_QP_RNR_RETRY,
                mask::IBV_QP_MAX_QP_RD_ATOMIC,
            ]),
            sum(&[mask::IBV_QP_CUR_STATE, mask::IBV_QP_ACCESS_FLAGS, mask::IBV_QP_MIN_RNR_TIMER]),
        )),
        _ => None,
    }
}

fn require(condition: bool) -> Result<(), c_int> {
    if condition { Ok(()) } else { Err(libc::EINVAL) }
}

/// Checks a change and makes it. Gives the new state.
fn change(world: &mut World, raw: usize, wanted: &ffi::ibv_qp_attr, mask: u32) -> Result<u32, c_int> {
    let Pair { state, device, attributes, .. } = &world.pairs[&raw];
    let (from, device, mut new) = (*state, *device, *attributes);
    let to = wanted.qp_state;
    let (required, allowed) = bits(from, to).ok_or(libc::EINVAL)?;
    require(mask & required == required && mask & !(required | allowed) == 0)?;
    let plan = &world.devices[device].plan;
    match to {
        RESET => {
            let pair = world.pairs.get_mut(&raw).expect("looked up above");
            pair.pending.clear();
            (pair.used, pair.silent) = (0, 0);
            new = Attributes::default();
            forget_completions(world, raw);
        }
        INIT => {
            let port = port_of(&plan.ports, wanted.port_num)?;
            require(usize::from(wanted.pkey_index) < port.pkeys.len())?;
            // Remote reads (4) and atomics (8) may be allowed, though nothing here does them.
            require(wanted.qp_access_flags & !(regions::LOCAL_WRITE | regions::REMOTE_WRITE | 4 | 8) == 0)?;
            new.port = wanted.port_num;
            new.pkey_index = wanted.pkey_index;
            new.access = wanted.qp_access_flags;
        }
        RTR => {
            let port = port_of(&plan.ports, new.port)?;
            let address = &wanted.ah_attr;
            require(address.port_num == new.port)?;
            new.global = address.is_global != 0;
            // On Ethernet there is no other way than by GID.
            require(new.global || port.link_layer == LinkLayer::InfiniBand)?;
            if new.global {
                let own = port.gids.get(usize::from(address.grh.sgid_index)).ok_or(libc::EINVAL)?;
                require(own.is_some())?;
                // SAFETY: every bit pattern is valid for the bytes.
                new.gid = unsafe { address.grh.dgid.raw };
                require(new.gid != [0; 16])?;
                new.gid_index = address.grh.sgid_index;
            }
            new.lid = address.dlid;
            require((1..=5).contains(&wanted.path_mtu))?;
            new.mtu = 128 << wanted.path_mtu;
            require(new.mtu <= port.max_mtu)?;
            require(wanted.dest_qp_num <= MASK_24)?;
            require(wanted.max_dest_rd_atomic <= plan.rd_atomic && wanted.min_rnr_timer <= 31)?;
            new.target = wanted.dest_qp_num;
            new.receive_psn = wanted.rq_psn & MASK_24;
        }
        RTS => {
            require(wanted.timeout <= 31 && wanted.retry_cnt <= 7 && wanted.rnr_retry <= 7)?;
            require(wanted.max_rd_atomic <= plan.rd_atomic)?;
            new.send_psn = wanted.sq_psn & MASK_24;
            new.timeout = wanted.timeout;
            new.retries = wanted.retry_cnt;
        }
        _ => {}
    }
    let pair = world.pairs.get_mut(&raw).expect("looked up above");
    pair.attributes = new;
    pair.state = to;
    if to == ERR {
        wire::advance(world, raw);
    }
    Ok(to)
}

/// Takes a queue pair's completions out of its queues.
fn forget_completions(world: &mut World, raw: usize) {
    for queue in world.queues.values_mut() {
        queue.entries.retain(|entry| entry.pair != raw);
    }
}

/// Ends a queue pair, after the placement that is under way for it.
pub(super) unsafe extern "C" fn destroy_qp(pair: *mut ffi::ibv_qp) -> c_int {
    let mut world = world();
    let raw = pair as usize;
    while world.pairs.get(&raw).is_some_and(|pair| pair.placing) {
        world = wait(world);
    }
    let Some(Pair { id, device, .. }) = world.pairs.get(&raw) else {
        return returned(Err(world.stranger(Verb::DestroyQp, raw)));
    };
    let (id, device) = (*id, *device);
    let result = world.call(device, Verb::DestroyQp, id, |world| {
        world.pairs.remove(&raw);
        forget_completions(world, raw);
        world.bury(raw, device);
        Ok(())
    });
    returned(result)
}

/// Whether the bytes of a write are placed in order. There is no error: a fault answers no.
pub(super) unsafe extern "C" fn query_qp_data_in_order(
    pair: *mut ffi::ibv_qp,
    _operation: c_uint,
    _flags: u32,
) -> c_int {
    let mut world = world();
    let Some(Pair { id, device, .. }) = world.pairs.get(&(pair as usize)) else {
        world.stranger(Verb::QueryQpDataInOrder, pair as usize);
        return 0;
    };
    let (id, device) = (*id, *device);
    let answer =
        world.call(device, Verb::QueryQpDataInOrder, id, |world| Ok(world.devices[device].plan.in_order_query));
    c_int::from(answer == Ok(true))
}
