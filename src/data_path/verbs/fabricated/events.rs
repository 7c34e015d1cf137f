//! Asynchronous events.

use std::os::raw::{c_int, c_void};

use super::errno::minus_one;
use super::verb::Verb;
use super::world::{Context, World, world};
use crate::data_path::verbs::ffi::{self, AsyncEvent};

pub(super) use ffi::event::{CQ_ERR, PORT_ACTIVE, PORT_ERR, QP_ACCESS_ERR, QP_REQ_ERR};

/// Takes an event. Where a real device would wait for one, this gives EAGAIN, so that a test fails instead of hanging.
pub(super) unsafe extern "C" fn get_async_event(context: *mut ffi::ibv_context, event: *mut AsyncEvent) -> c_int {
    let mut world = world();
    let raw = context as usize;
    let Some(Context { id, device, .. }) = world.contexts.get(&raw) else {
        return minus_one(Err(world.stranger(Verb::GetAsyncEvent, raw)));
    };
    let (id, device) = (*id, *device);
    let result = world.call(device, Verb::GetAsyncEvent, id, |world| {
        let context = world.contexts.get_mut(&raw).expect("looked up above");
        let (number, element) = context.events.pop_front().ok_or(libc::EAGAIN)?;
        // The counter is as high as the queue was long.
        let _ = rustix::io::read(&*context.descriptor, &mut [0; 8]);
        context.unacknowledged += 1;
        // SAFETY: the caller gives a place for the structure. The union's port number is an `int`: the other half of the
        // pointer is rubbish on a real device, and here as well.
        unsafe { event.write(AsyncEvent { element: element as *mut c_void, event_type: number }) };
        Ok(())
    });
    minus_one(result)
}

/// Acknowledges an event.
pub(super) unsafe extern "C" fn ack_async_event(event: *mut AsyncEvent) {
    let mut world = world();
    // SAFETY: the caller gives an event that it has taken.
    let element = unsafe { (*event).element } as usize;
    // As in the verbs interface the event does not say whose it is but by its object: for the others the oldest context
    // that waits for an acknowledgement is taken.
    let owner = world.pairs.get(&element).map(|pair| pair.context).or(world.queues.get(&element).map(|q| q.context));
    let waits = |context: &Context| context.unacknowledged != 0;
    let found = match owner.and_then(|owner| world.contexts.get_mut(&owner)).filter(|context| waits(context)) {
        Some(context) => Some((context.id, context.device)),
        None => world.contexts.values().filter(|c| waits(c)).min_by_key(|c| c.id).map(|c| (c.id, c.device)),
    };
    let Some((id, device)) = found else {
        world.stranger(Verb::AckAsyncEvent, element);
        return;
    };
    let _ = world.call(device, Verb::AckAsyncEvent, id, |world| {
        let context = world.contexts.values_mut().find(|context| context.id == id).expect("found above");
        context.unacknowledged -= 1;
        Ok(())
    });
}

/// Raises an event on one context.
pub(super) fn raise(world: &mut World, context: usize, number: i32, element: usize) {
    let Some(context) = world.contexts.get_mut(&context) else { return };
    context.events.push_back((number, element));
    // A counter that is full has made the descriptor readable long ago.
    let _ = rustix::io::write(&*context.descriptor, &1_u64.to_ne_bytes());
}

/// Raises an event on every open context of a device, with the element that belongs to its number.
pub(super) fn raise_everywhere(world: &mut World, device: usize, number: i32, port: u8) {
    let contexts: Vec<_> = world.contexts.iter().filter(|(_, c)| c.device == device).map(|(raw, _)| *raw).collect();
    for context in contexts {
        let pair = world.pairs.iter().find(|(_, pair)| pair.context == context).map(|(raw, _)| *raw);
        let queue = world.queues.iter().find(|(_, queue)| queue.context == context).map(|(raw, _)| *raw);
        let element = match number {
            CQ_ERR => queue.unwrap_or(0),
            1..=7 | 16 => pair.unwrap_or(0),
            // The upper half of the pointer is not part of the port's number.
            _ => usize::from(port) | 0xFAB0_0000_0000_0000,
        };
        raise(world, context, number, element);
    }
}
