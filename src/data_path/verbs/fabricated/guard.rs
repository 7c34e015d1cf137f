//! What a test can see and change of an installed device.

use std::time::Duration;

use super::events;
use super::plan::Placement;
use super::verb::Verb;
use super::world::{CHANGED, world};
use crate::devices::PortState;

/// An installed device. Dropping it takes the device out of the list; what is open on it stays until it is closed.
#[derive(Debug)]
pub struct Installed {
    pub(super) device: usize,
}

/// A call that was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The verb. Successful posts and polls are not written down.
    pub verb: Verb,
    /// Number of the object that was made, used or destroyed: unique in the process, 0 where there is none.
    pub object: u64,
    /// 0, or the error number that the call gave.
    pub errno: i32,
}

/// How many objects of each kind are open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OpenObjects {
    /// Device lists.
    pub lists: usize,
    /// Contexts.
    pub contexts: usize,
    /// Protection domains.
    pub domains: usize,
    /// Completion queues.
    pub queues: usize,
    /// Queue pairs.
    pub pairs: usize,
    /// Memory regions.
    pub regions: usize,
}

impl Installed {
    /// The calls in the order in which they were made.
    #[must_use]
    pub fn journal(&self) -> Vec<Entry> {
        world().devices[self.device].journal.clone()
    }

    /// Forgets the journal.
    pub fn clear_journal(&self) {
        world().devices[self.device].journal.clear();
    }

    /// What is open.
    #[must_use]
    pub fn open_objects(&self) -> OpenObjects {
        world().open_objects(self.device)
    }

    /// What was done that the verbs interface does not allow: objects used after their end, events not acknowledged.
    #[must_use]
    pub fn violations(&self) -> Vec<String> {
        world().devices[self.device].violations.clone()
    }

    /// Calls of a verb so far.
    #[must_use]
    pub fn calls(&self, verb: Verb) -> u64 {
        world().devices[self.device].calls(verb)
    }

    /// Writes posted so far.
    #[must_use]
    pub fn writes(&self) -> u64 {
        world().devices[self.device].writes
    }

    /// Posts so far, of however many writes each.
    #[must_use]
    pub fn doorbells(&self) -> u64 {
        world().devices[self.device].doorbells
    }

    /// The nth call from now (the next is 1; 0 means every call) fails with this error number.
    pub fn fail(&self, verb: Verb, nth: u64, errno: i32) {
        let device = &mut world().devices[self.device];
        let from = if nth == 0 { 0 } else { device.calls(verb) };
        device.plan.faults.push((verb, from + nth, errno));
    }

    /// Takes back all faults and statuses that have not come about.
    pub fn heal(&self) {
        let device = &mut world().devices[self.device];
        device.plan.faults.clear();
        device.plan.statuses.clear();
        device.plan.drop_acks_from = None;
    }

    /// Faults and statuses that have not come about.
    #[must_use]
    pub fn pending_faults(&self) -> usize {
        let device = &world().devices[self.device];
        device.plan.faults.len() + device.plan.statuses.len()
    }

    /// The nth write from now (the next is 1) does not arrive and completes with this status.
    pub fn complete_with(&self, nth: u64, status: u32) {
        let device = &mut world().devices[self.device];
        let ordinal = device.writes + nth;
        device.plan.statuses.push((ordinal, status));
    }

    /// From the nth write from now on, data arrives and its acknowledgement does not.
    pub fn drop_acks_from(&self, nth: u64) {
        let device = &mut world().devices[self.device];
        device.plan.drop_acks_from = Some(device.writes + nth);
    }

    /// Keeps successful completions back, or lets them go again.
    pub fn hold_completions(&self, hold: bool) {
        world().devices[self.device].held = hold;
    }

    /// The nth completion from now (the next is 1) names this request, whatever it belongs to.
    pub fn misnumber_completion(&self, nth: u64, request: u64) {
        let device = &mut world().devices[self.device];
        device.misnumbered = Some((device.completed + nth, request));
    }

    /// Gives successful completions this opcode in place of the right one.
    pub fn completion_opcode(&self, opcode: Option<u32>) {
        world().devices[self.device].opcode = opcode;
    }

    /// Each change of a queue pair's state takes so long, from now on.
    pub fn slow_changes(&self, each: Duration) {
        world().devices[self.device].slow_changes = each;
    }

    /// Numbers of the live queue pairs and of the packets with which each begins.
    #[must_use]
    pub fn pair_numbers(&self) -> Vec<(u32, u32)> {
        let world = world();
        let own = world.pairs.values().filter(|pair| pair.device == self.device);
        own.map(|pair| (pair.number, pair.attributes.send_psn)).collect()
    }

    /// Changes the delays of delivery and of completion for writes posted from now on.
    pub fn delays(&self, delivery: Duration, completion: Duration) {
        let plan = &mut world().devices[self.device].plan;
        plan.delivery_delay = delivery;
        plan.completion_delay = completion;
    }

    /// Changes the order of placement.
    pub fn placement(&self, placement: Placement) {
        world().devices[self.device].plan.placement = placement;
    }

    /// Raises an asynchronous event by its number on every open context: with port 1 for port events, with the context's
    /// first completion queue or queue pair for theirs.
    pub fn raise(&self, number: i32) {
        self.raise_on(number, 1);
    }

    /// As [`raise`](Self::raise), with another port.
    pub fn raise_on(&self, number: i32, port: u8) {
        events::raise_everywhere(&mut world(), self.device, number, port);
    }

    /// Events that were raised and not yet taken.
    #[must_use]
    pub fn waiting_events(&self) -> usize {
        world().contexts.values().filter(|context| context.device == self.device).map(|c| c.events.len()).sum()
    }

    /// Changes a port's state, and raises the event that goes with it.
    pub fn set_port(&self, port: u8, state: PortState) {
        let mut world = world();
        world.devices[self.device].plan.ports[usize::from(port) - 1].state = state;
        let number = if state == PortState::Active { events::PORT_ACTIVE } else { events::PORT_ERR };
        events::raise_everywhere(&mut world, self.device, number, port);
        CHANGED.notify_all();
    }

    /// Moves every queue pair of the device to ERR, as a device does that has failed.
    pub fn break_pairs(&self) {
        let mut world = world();
        let pairs: Vec<_> =
            world.pairs.iter().filter(|(_, pair)| pair.device == self.device).map(|(raw, _)| *raw).collect();
        for raw in pairs {
            super::wire::fail(&mut world, raw);
        }
    }
}

impl Drop for Installed {
    fn drop(&mut self) {
        world().devices[self.device].installed = false;
    }
}
