//! All state of all software devices, behind one lock that is never held while anything outside of this module is called.
//!
//! Objects are known by the address that the verbs gave for them. The structures behind these addresses are never freed,
//! so that an address is never given twice and the use of a destroyed object is noticed instead of undefined.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::guard::{Entry, Installed, OpenObjects};
use super::plan::Plan;
use super::verb::Verb;
use super::wire;
use crate::data_path::verbs::ffi;

/// Everything.
#[derive(Default)]
pub(super) struct World {
    pub(super) devices: Vec<Device>,
    pub(super) contexts: HashMap<usize, Context>,
    pub(super) domains: HashMap<usize, Domain>,
    pub(super) regions: HashMap<usize, Region>,
    pub(super) queues: HashMap<usize, Queue>,
    pub(super) pairs: HashMap<usize, Pair>,
    /// Entries of each list that `get_device_list` gave.
    pub(super) lists: HashMap<usize, usize>,
    /// The device of every object that was destroyed.
    graves: HashMap<usize, usize>,
    last_id: u64,
    random: u64,
}

/// An installed device. Kept when it is taken out, for what is still open on it.
pub(super) struct Device {
    pub(super) plan: Plan,
    pub(super) installed: bool,
    /// The `ibv_device`.
    pub(super) raw: usize,
    pub(super) journal: Vec<Entry>,
    pub(super) violations: Vec<String>,
    /// Writes posted.
    pub(super) writes: u64,
    /// Posts, of however many writes.
    pub(super) doorbells: u64,
    /// Successful completions are kept back.
    pub(super) held: bool,
    /// Completions taken.
    pub(super) completed: u64,
    /// Of a completion (the first is 1) the request's number that it gives instead of the right one.
    pub(super) misnumbered: Option<(u64, u64)>,
    /// The opcode of successful completions, where it is not the right one.
    pub(super) opcode: Option<u32>,
    /// How long each change of a queue pair's state takes.
    pub(super) slow_changes: Duration,
    calls: [u64; Verb::COUNT],
}

/// An open context.
pub(super) struct Context {
    pub(super) id: u64,
    pub(super) device: usize,
    /// Its value is the number of events that wait.
    pub(super) descriptor: Arc<OwnedFd>,
    pub(super) events: VecDeque<(i32, usize)>,
    pub(super) unacknowledged: u32,
}

/// A protection domain.
pub(super) struct Domain {
    pub(super) id: u64,
    pub(super) device: usize,
    pub(super) context: usize,
}

/// A registered region.
pub(super) struct Region {
    pub(super) id: u64,
    pub(super) device: usize,
    pub(super) domain: usize,
    /// What requests call its first byte.
    pub(super) address: u64,
    pub(super) length: u64,
    /// Where that byte is in this process.
    pub(super) memory: u64,
    pub(super) access: u32,
    pub(super) local_key: u32,
    pub(super) remote_key: u32,
    /// Placements under way.
    pub(super) pins: u32,
    /// The mapping of a dma-buf.
    pub(super) _mapping: Option<memmap2::MmapRaw>,
}

/// A completion queue.
pub(super) struct Queue {
    pub(super) id: u64,
    pub(super) device: usize,
    pub(super) context: usize,
    pub(super) capacity: usize,
    pub(super) entries: VecDeque<Completion>,
}

/// A completion that waits to be polled.
pub(super) struct Completion {
    pub(super) work: u64,
    pub(super) status: u32,
    pub(super) pair: usize,
    /// Requests of the send queue that it gives back.
    pub(super) frees: u32,
    pub(super) bytes: u32,
    pub(super) due: Instant,
}

/// A queue pair.
pub(super) struct Pair {
    pub(super) id: u64,
    pub(super) device: usize,
    pub(super) context: usize,
    pub(super) domain: usize,
    pub(super) send_queue: usize,
    pub(super) receive_queue: usize,
    pub(super) number: u32,
    pub(super) state: u32,
    pub(super) depth: u32,
    pub(super) segments: u32,
    pub(super) inline_bytes: u32,
    pub(super) all_signalled: bool,
    pub(super) attributes: Attributes,
    /// Requests that the send queue is taken up with.
    pub(super) used: u32,
    /// Of those, the ones whose end no completion has told yet.
    pub(super) silent: u32,
    pub(super) pending: VecDeque<Work>,
    /// The wire's thread is placing the first of `pending`.
    pub(super) placing: bool,
}

/// What `ibv_modify_qp` has set.
#[derive(Clone, Copy, Default)]
pub(super) struct Attributes {
    pub(super) port: u8,
    pub(super) pkey_index: u16,
    pub(super) access: u32,
    pub(super) global: bool,
    pub(super) gid: [u8; 16],
    pub(super) gid_index: u8,
    pub(super) lid: u16,
    /// Path MTU in bytes.
    pub(super) mtu: u32,
    pub(super) target: u32,
    pub(super) receive_psn: u32,
    pub(super) send_psn: u32,
    pub(super) timeout: u8,
    pub(super) retries: u8,
}

/// A posted request.
pub(super) struct Work {
    pub(super) id: u64,
    pub(super) signalled: bool,
    pub(super) data: Data,
    pub(super) address: u64,
    pub(super) key: u32,
    /// Which write of its device it is, from 1.
    pub(super) ordinal: u64,
    pub(super) posted: Instant,
    /// When it was first sent.
    pub(super) sent: Option<Instant>,
    /// Placed, but its acknowledgement was dropped.
    pub(super) unheard: bool,
}

/// The bytes of a request.
pub(super) enum Data {
    /// Copied at the post.
    Inline(Vec<u8>),
    /// Read at the delivery: address, length, local key.
    Segments(Vec<(u64, u32, u32)>),
}

impl Data {
    pub(super) fn len(&self) -> u64 {
        match self {
            Self::Inline(bytes) => bytes.len() as u64,
            Self::Segments(segments) => segments.iter().map(|segment| u64::from(segment.1)).sum(),
        }
    }
}

static WORLD: OnceLock<Mutex<World>> = OnceLock::new();
/// Told whenever a placement ends or there is something to send.
pub(super) static CHANGED: Condvar = Condvar::new();

/// Takes the lock.
pub(super) fn world() -> MutexGuard<'static, World> {
    let world = WORLD.get_or_init(|| {
        let mut seed = [0; 8];
        // Without random numbers the keys only repeat from run to run.
        let _ = rustix::rand::getrandom(&mut seed, rustix::rand::GetRandomFlags::empty());
        Mutex::new(World { random: u64::from_le_bytes(seed) | 1, ..World::default() })
    });
    world.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Gives the lock up until something has changed.
pub(super) fn wait(guard: MutexGuard<'static, World>) -> MutexGuard<'static, World> {
    CHANGED.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

thread_local! {
    static SEEN: RefCell<Option<Vec<String>>> = const { RefCell::new(None) };
}

/// Restricts the device list of this thread to these devices. Faults of the list verbs are those of the first.
pub fn see(names: &[&str]) {
    SEEN.set(Some(names.iter().map(|name| (*name).to_owned()).collect()));
}

/// Makes a device.
pub(super) fn install(plan: Plan) -> Installed {
    wire::start();
    let mut world = world();
    assert!(
        !world.devices.iter().any(|device| device.installed && device.plan.name == plan.name),
        "a device {} is installed already",
        plan.name
    );
    // SAFETY: a plain structure.
    let mut raw: ffi::ibv_device = unsafe { ffi::zeroed() };
    assert!(plan.name.len() < raw.name.len(), "the name is too long");
    for (to, from) in raw.name.iter_mut().zip(plan.name.bytes()) {
        *to = from as std::os::raw::c_char;
    }
    raw.dev_name = raw.name;
    let raw = Box::into_raw(Box::new(raw)) as usize;
    world.devices.push(Device {
        plan,
        installed: true,
        raw,
        journal: Vec::new(),
        violations: Vec::new(),
        writes: 0,
        doorbells: 0,
        held: false,
        completed: 0,
        misnumbered: None,
        opcode: None,
        slow_changes: Duration::ZERO,
        calls: [0; Verb::COUNT],
    });
    Installed { device: world.devices.len() - 1 }
}

impl Device {
    /// Counts a call and says with which error number it has to fail.
    pub(super) fn fault(&mut self, verb: Verb) -> Result<(), i32> {
        self.calls[verb as usize] += 1;
        let nth = self.calls[verb as usize];
        let found = self.plan.faults.iter().position(|fault| fault.0 == verb && (fault.1 == 0 || fault.1 == nth));
        match found {
            Some(index) if self.plan.faults[index].1 == 0 => Err(self.plan.faults[index].2),
            Some(index) => Err(self.plan.faults.swap_remove(index).2),
            None => Ok(()),
        }
    }

    /// Calls of a verb so far.
    pub(super) fn calls(&self, verb: Verb) -> u64 {
        self.calls[verb as usize]
    }
}

impl World {
    /// A number for a new object.
    pub(super) fn id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// The next pseudo-random number (xorshift).
    pub(super) fn random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    /// Does a call, unless it is to fail, and writes it down.
    pub(super) fn call<T>(
        &mut self,
        device: usize,
        verb: Verb,
        object: u64,
        work: impl FnOnce(&mut Self) -> Result<T, i32>,
    ) -> Result<T, i32> {
        let result = self.devices[device].fault(verb).and_then(|()| work(self));
        let errno = result.as_ref().err().copied().unwrap_or(0);
        self.devices[device].journal.push(Entry { verb, object, errno });
        result
    }

    /// Writes down the use of an object that does not exist (any more).
    pub(super) fn stranger(&mut self, verb: Verb, raw: usize) -> i32 {
        if let Some(device) = self.graves.get(&raw) {
            let text = format!("{} was called with an object that had been destroyed", verb.name());
            self.devices[*device].violations.push(text);
        } else {
            for device in &mut self.devices {
                device.violations.push(format!("{} was called with {raw:#x}, which was never an object", verb.name()));
            }
        }
        libc::EINVAL
    }

    /// Remembers a destroyed object.
    pub(super) fn bury(&mut self, raw: usize, device: usize) {
        self.graves.insert(raw, device);
    }

    /// The devices that the calling thread sees.
    pub(super) fn seen(&self) -> Vec<usize> {
        SEEN.with_borrow(|names| match names {
            Some(names) => names
                .iter()
                .filter_map(|name| self.devices.iter().position(|d| d.installed && d.plan.name == *name))
                .collect(),
            None => (0..self.devices.len()).filter(|index| self.devices[*index].installed).collect(),
        })
    }

    /// What is open on a device.
    pub(super) fn open_objects(&self, device: usize) -> OpenObjects {
        OpenObjects {
            lists: self.lists.values().filter(|first| **first == device).count(),
            contexts: self.contexts.values().filter(|object| object.device == device).count(),
            domains: self.domains.values().filter(|object| object.device == device).count(),
            queues: self.queues.values().filter(|object| object.device == device).count(),
            pairs: self.pairs.values().filter(|object| object.device == device).count(),
            regions: self.regions.values().filter(|object| object.device == device).count(),
        }
    }

    /// A new key, never equal to another of any region, local or remote.
    pub(super) fn key(&mut self) -> u32 {
        loop {
            let key = self.random() as u32;
            let taken = |region: &Region| region.local_key == key || region.remote_key == key;
            if key != 0 && !self.regions.values().any(taken) {
                return key;
            }
        }
    }
}
