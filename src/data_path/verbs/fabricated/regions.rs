//! Registered memory.

use std::os::raw::{c_int, c_void};

use super::errno::{pointer, returned};
use super::verb::Verb;
use super::world::{Domain, Region, World, wait, world};
use crate::data_path::verbs::ffi;

/// Local write, remote write, and nothing else that this device knows.
pub(super) const LOCAL_WRITE: u32 = 1;
pub(super) const REMOTE_WRITE: u32 = 2;

/// Registers memory of this process.
pub(super) unsafe extern "C" fn reg_mr(
    domain: *mut ffi::ibv_pd,
    address: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ffi::ibv_mr {
    let mut world = world();
    let Some(Domain { device, .. }) = world.domains.get(&(domain as usize)) else {
        return pointer(Err(world.stranger(Verb::RegMr, domain as usize)));
    };
    let device = *device;
    let id = world.id();
    let result = world.call(device, Verb::RegMr, id, |world| {
        if address.is_null() || length == 0 {
            return Err(libc::EINVAL);
        }
        let (memory, access) = (address as u64, check_access(access)?);
        let range = Range { address: memory, memory, length, access };
        Ok(register(world, id, device, domain, range, None))
    });
    pointer(result)
}

/// Registers a dma-buf: any descriptor that can be mapped.
pub(super) unsafe extern "C" fn reg_dmabuf_mr(
    domain: *mut ffi::ibv_pd,
    offset: u64,
    length: usize,
    address: u64,
    descriptor: c_int,
    access: c_int,
) -> *mut ffi::ibv_mr {
    let mut world = world();
    let Some(Domain { device, .. }) = world.domains.get(&(domain as usize)) else {
        return pointer(Err(world.stranger(Verb::RegDmabufMr, domain as usize)));
    };
    let device = *device;
    let id = world.id();
    let result = world.call(device, Verb::RegDmabufMr, id, |world| {
        if !world.devices[device].plan.dma_buf {
            return Err(libc::EOPNOTSUPP);
        }
        if length == 0 {
            return Err(libc::EINVAL);
        }
        let access = check_access(access)?;
        // A mapping of the device's own: it reaches the memory by the descriptor, not by the caller's addresses.
        let mapping = memmap2::MmapOptions::new()
            .offset(offset)
            .len(length)
            .map_raw(descriptor)
            .map_err(|error| error.raw_os_error().unwrap_or(libc::EINVAL))?;
        let range = Range { address, memory: mapping.as_mut_ptr() as u64, length, access };
        Ok(register(world, id, device, domain, range, Some(mapping)))
    });
    pointer(result)
}

/// Ends a registration, after the placements into it that are under way.
pub(super) unsafe extern "C" fn dereg_mr(region: *mut ffi::ibv_mr) -> c_int {
    let mut world = world();
    let raw = region as usize;
    while world.regions.get(&raw).is_some_and(|region| region.pins != 0) {
        world = wait(world);
    }
    let Some(Region { id, device, .. }) = world.regions.get(&raw) else {
        return returned(Err(world.stranger(Verb::DeregMr, raw)));
    };
    let (id, device) = (*id, *device);
    let result = world.call(device, Verb::DeregMr, id, |world| {
        world.regions.remove(&raw);
        world.bury(raw, device);
        Ok(())
    });
    returned(result)
}

fn check_access(access: c_int) -> Result<u32, c_int> {
    let access = access as u32;
    // Who lets a peer write has to be allowed to write.
    let allowed = access & !(LOCAL_WRITE | REMOTE_WRITE) == 0;
    let sensible = access & REMOTE_WRITE == 0 || access & LOCAL_WRITE != 0;
    if allowed && sensible { Ok(access) } else { Err(libc::EINVAL) }
}

struct Range {
    address: u64,
    memory: u64,
    length: usize,
    access: u32,
}

fn register(
    world: &mut World,
    id: u64,
    device: usize,
    domain: *mut ffi::ibv_pd,
    range: Range,
    mapping: Option<memmap2::MmapRaw>,
) -> *mut ffi::ibv_mr {
    let local_key = world.key();
    let remote_key = loop {
        let key = world.key();
        if key != local_key {
            break key;
        }
    };
    // SAFETY: a live domain of ours, whose structure lives for ever.
    let context = unsafe { (*domain).context };
    let raw = Box::into_raw(Box::new(ffi::ibv_mr {
        context,
        pd: domain,
        addr: range.address as *mut c_void,
        length: range.length,
        handle: id as u32,
        lkey: local_key,
        rkey: remote_key,
    }));
    world.regions.insert(
        raw as usize,
        Region {
            id,
            device,
            domain: domain as usize,
            address: range.address,
            length: range.length as u64,
            memory: range.memory,
            access: range.access,
            local_key,
            remote_key,
            pins: 0,
            _mapping: mapping,
        },
    );
    raw
}

impl Region {
    /// Where the range that requests call `address` is in this process, when all of it is inside.
    pub(super) fn locate(&self, address: u64, length: u64) -> Option<u64> {
        let offset = address.checked_sub(self.address)?;
        (offset.checked_add(length)? <= self.length).then(|| self.memory + offset)
    }
}
