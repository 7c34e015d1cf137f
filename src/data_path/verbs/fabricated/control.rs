//! Devices, their tables, contexts and protection domains.

use std::os::fd::AsRawFd;
use std::os::raw::{c_char, c_int};
use std::sync::Arc;

use rustix::event::EventfdFlags;

use super::errno::{minus_one, pointer, returned};
use super::plan::Port;
use super::verb::Verb;
use super::world::{Context, Domain, world};
use super::{poll, post};
use crate::data_path::verbs::ffi;
use crate::devices::{GidType, PortState};

/// The device list: an array that ends with a null pointer.
pub(super) unsafe extern "C" fn get_device_list(count: *mut c_int) -> *mut *mut ffi::ibv_device {
    let mut world = world();
    let seen = world.seen();
    let mut list: Vec<*mut ffi::ibv_device> = seen.iter().map(|index| world.devices[*index].raw as *mut _).collect();
    list.push(std::ptr::null_mut());
    let result = match seen.first() {
        Some(first) => world.call(*first, Verb::GetDeviceList, 0, |_| Ok(())),
        None => Ok(()),
    };
    pointer(result.map(|()| {
        if !count.is_null() {
            // SAFETY: the caller gives a null pointer or a place for the number.
            unsafe { *count = seen.len() as c_int };
        }
        let raw = Box::into_raw(list.into_boxed_slice()).cast::<*mut ffi::ibv_device>();
        world.lists.insert(raw as usize, seen.first().copied().unwrap_or(usize::MAX));
        raw
    }))
}

/// Frees a list.
pub(super) unsafe extern "C" fn free_device_list(list: *mut *mut ffi::ibv_device) {
    let mut world = world();
    let Some(first) = world.lists.remove(&(list as usize)) else {
        world.stranger(Verb::FreeDeviceList, list as usize);
        return;
    };
    let mut entries = 1;
    // SAFETY: it is one of our lists (it was in `lists`), and those end with a null pointer.
    while !unsafe { *list.add(entries - 1) }.is_null() {
        entries += 1;
    }
    // SAFETY: made from a boxed slice of so many entries, and freed once: it has just left `lists`.
    drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(list, entries)) });
    if first != usize::MAX {
        let _ = world.call(first, Verb::FreeDeviceList, 0, |_| Ok(()));
    }
}

/// The name inside of the device's structure.
pub(super) unsafe extern "C" fn get_device_name(device: *mut ffi::ibv_device) -> *const c_char {
    let mut world = world();
    let Some(index) = world.devices.iter().position(|known| known.raw == device as usize) else {
        world.stranger(Verb::GetDeviceName, device as usize);
        return std::ptr::null();
    };
    match world.devices[index].fault(Verb::GetDeviceName) {
        // SAFETY: one of our devices, whose structures live for ever.
        Ok(()) => unsafe { (*device).name.as_ptr() },
        Err(errno) => pointer::<c_char>(Err(errno)),
    }
}

/// Opens a device.
pub(super) unsafe extern "C" fn open_device(device: *mut ffi::ibv_device) -> *mut ffi::ibv_context {
    let mut world = world();
    let Some(index) = world.devices.iter().position(|known| known.raw == device as usize) else {
        return pointer(Err(world.stranger(Verb::OpenDevice, device as usize)));
    };
    let id = world.id();
    let result = world.call(index, Verb::OpenDevice, id, |world| {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE;
        let descriptor = rustix::event::eventfd(0, flags).map_err(rustix::io::Errno::raw_os_error)?;
        // SAFETY: a plain structure, in which a missing operation is a null pointer.
        let mut raw: ffi::ibv_context = unsafe { ffi::zeroed() };
        raw.device = device;
        raw.ops.post_send = Some(post::post_send);
        raw.ops.poll_cq = Some(poll::poll_cq);
        raw.cmd_fd = -1;
        raw.async_fd = descriptor.as_raw_fd();
        raw.num_comp_vectors = 1;
        let raw = Box::into_raw(Box::new(raw));
        let context = Context {
            id,
            device: index,
            descriptor: Arc::new(descriptor),
            events: Default::default(),
            unacknowledged: 0,
        };
        world.contexts.insert(raw as usize, context);
        Ok(raw)
    });
    pointer(result)
}

/// Closes a context on which nothing is left.
pub(super) unsafe extern "C" fn close_device(context: *mut ffi::ibv_context) -> c_int {
    let mut world = world();
    let raw = context as usize;
    let Some(Context { id, device, unacknowledged, .. }) = world.contexts.get(&raw) else {
        return returned(Err(world.stranger(Verb::CloseDevice, raw)));
    };
    let (id, device, unacknowledged) = (*id, *device, *unacknowledged);
    let result = world.call(device, Verb::CloseDevice, id, |world| {
        if world.domains.values().any(|domain| domain.context == raw)
            || world.queues.values().any(|queue| queue.context == raw)
        {
            return Err(libc::EBUSY);
        }
        if unacknowledged != 0 {
            world.devices[device].violations.push("a context was closed with an event unacknowledged".into());
        }
        world.contexts.remove(&raw);
        world.bury(raw, device);
        Ok(())
    });
    returned(result)
}

/// Attributes of the device.
pub(super) unsafe extern "C" fn query_device(
    context: *mut ffi::ibv_context,
    attributes: *mut ffi::ibv_device_attr,
) -> c_int {
    let mut world = world();
    let Some(Context { id, device, .. }) = world.contexts.get(&(context as usize)) else {
        return returned(Err(world.stranger(Verb::QueryDevice, context as usize)));
    };
    let (id, device) = (*id, *device);
    let result = world.call(device, Verb::QueryDevice, id, |world| {
        let plan = &world.devices[device].plan;
        // SAFETY: a plain structure.
        let mut filled: ffi::ibv_device_attr = unsafe { ffi::zeroed() };
        filled.phys_port_cnt = plan.ports.len() as u8;
        filled.max_qp = 1 << 16;
        filled.max_qp_wr = plan.send_depth_limit as c_int;
        filled.max_cqe = 1 << 22;
        filled.max_qp_rd_atom = c_int::from(plan.rd_atomic);
        filled.max_qp_init_rd_atom = c_int::from(plan.rd_atomic);
        // SAFETY: the caller gives a place for the structure.
        unsafe { attributes.write(filled) };
        Ok(())
    });
    returned(result)
}

/// Attributes of a port. As the older symbol does, it leaves the structure's tail alone.
pub(super) unsafe extern "C" fn query_port(
    context: *mut ffi::ibv_context,
    port: u8,
    attributes: *mut ffi::_compat_ibv_port_attr,
) -> c_int {
    let mut world = world();
    let Some(Context { id, device, .. }) = world.contexts.get(&(context as usize)) else {
        return returned(Err(world.stranger(Verb::QueryPort, context as usize)));
    };
    let (id, device) = (*id, *device);
    let result = world.call(device, Verb::QueryPort, id, |world| {
        let found = port_of(&world.devices[device].plan.ports, port)?;
        let number = |mtu: u32| mtu.trailing_zeros() - 7;
        let attributes = attributes.cast::<ffi::ibv_port_attr>();
        // SAFETY: the caller gives a place that is as large as the front of the structure, which goes up to and with
        // `flags`; each field that is written lies in it.
        unsafe {
            (*attributes).state = match found.state {
                PortState::Down => 1,
                PortState::Initializing => 2,
                PortState::Armed => 3,
                PortState::Active => 4,
                PortState::Other(other) => other,
            };
            (*attributes).max_mtu = number(found.max_mtu);
            (*attributes).active_mtu = number(found.active_mtu);
            (*attributes).gid_tbl_len = found.gids.len() as c_int;
            (*attributes).max_msg_sz = 1 << 30;
            (*attributes).pkey_tbl_len = found.pkeys.len() as u16;
            (*attributes).lid = found.lid;
            (*attributes).link_layer = found.link_layer.to_verbs();
        }
        Ok(())
    });
    returned(result)
}

/// An entry of the GID table; a hole reads as zero, or cannot be read.
pub(super) unsafe extern "C" fn query_gid(
    context: *mut ffi::ibv_context,
    port: u8,
    index: c_int,
    gid: *mut ffi::ibv_gid,
) -> c_int {
    let mut world = world();
    let Some(Context { id, device, .. }) = world.contexts.get(&(context as usize)) else {
        return minus_one(Err(world.stranger(Verb::QueryGid, context as usize)));
    };
    let (id, device) = (*id, *device);
    let result = world.call(device, Verb::QueryGid, id, |world| {
        let plan = &world.devices[device].plan;
        let entry = port_of(&plan.ports, port)?.gids.get(index as usize).ok_or(libc::EINVAL)?;
        let raw = match entry {
            Some(entry) => entry.address.octets(),
            None if plan.unreadable_holes => return Err(libc::EINVAL),
            None => [0; 16],
        };
        // SAFETY: the caller gives a place for the union.
        unsafe { (*gid).raw = raw };
        Ok(())
    });
    minus_one(result)
}

/// An entry of the partition key table, in network byte order.
pub(super) unsafe extern "C" fn query_pkey(
    context: *mut ffi::ibv_context,
    port: u8,
    index: c_int,
    key: *mut u16,
) -> c_int {
    let mut world = world();
    let Some(Context { id, device, .. }) = world.contexts.get(&(context as usize)) else {
        return minus_one(Err(world.stranger(Verb::QueryPkey, context as usize)));
    };
    let (id, device) = (*id, *device);
    let result = world.call(device, Verb::QueryPkey, id, |world| {
        let ports = &world.devices[device].plan.ports;
        let found = port_of(ports, port)?.pkeys.get(index as usize).ok_or(libc::EINVAL)?;
        // SAFETY: the caller gives a place for the number.
        unsafe { *key = found.to_be() };
        Ok(())
    });
    minus_one(result)
}

/// What the kernel would publish of a GID.
pub(super) fn gid_attributes(device: &str, port: u8, index: u32) -> (Option<String>, Option<String>) {
    let mut world = world();
    let Some(device) = world.devices.iter_mut().find(|known| known.installed && known.plan.name == device) else {
        return (None, None);
    };
    if device.fault(Verb::GidAttributes).is_err() {
        return (None, None);
    }
    let Ok(port) = port_of(&device.plan.ports, port) else { return (None, None) };
    let Some(Some(gid)) = port.gids.get(index as usize) else { return (None, None) };
    let kind = gid.kind.map(|kind| match kind {
        GidType::InfiniBand => "IB",
        GidType::RoceV1 => "IB/RoCE v1",
        GidType::RoceV2 => "RoCE v2",
    });
    (kind.map(str::to_owned), gid.interface.clone())
}

/// Makes a protection domain.
pub(super) unsafe extern "C" fn alloc_pd(context: *mut ffi::ibv_context) -> *mut ffi::ibv_pd {
    let mut world = world();
    let Some(Context { device, .. }) = world.contexts.get(&(context as usize)) else {
        return pointer(Err(world.stranger(Verb::AllocPd, context as usize)));
    };
    let device = *device;
    let id = world.id();
    let result = world.call(device, Verb::AllocPd, id, |world| {
        let raw = Box::into_raw(Box::new(ffi::ibv_pd { context, handle: id as u32 }));
        world.domains.insert(raw as usize, Domain { id, device, context: context as usize });
        Ok(raw)
    });
    pointer(result)
}

/// Ends a protection domain that no region and no queue pair uses.
pub(super) unsafe extern "C" fn dealloc_pd(domain: *mut ffi::ibv_pd) -> c_int {
    let mut world = world();
    let raw = domain as usize;
    let Some(Domain { id, device, .. }) = world.domains.get(&raw) else {
        return returned(Err(world.stranger(Verb::DeallocPd, raw)));
    };
    let (id, device) = (*id, *device);
    let result = world.call(device, Verb::DeallocPd, id, |world| {
        if world.regions.values().any(|region| region.domain == raw) || world.pairs.values().any(|p| p.domain == raw) {
            return Err(libc::EBUSY);
        }
        world.domains.remove(&raw);
        world.bury(raw, device);
        Ok(())
    });
    returned(result)
}

/// A port by its number, from 1.
pub(super) fn port_of(ports: &[Port], number: u8) -> Result<&Port, c_int> {
    usize::from(number).checked_sub(1).and_then(|index| ports.get(index)).ok_or(libc::EINVAL)
}
