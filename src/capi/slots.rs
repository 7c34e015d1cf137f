//! Memory behind the raw pointers that `request_slot` and `reply_slot` give out.
//!
//! C code may still hold such a pointer when its session is gone, and hand it to a call. So the memory is never given back
//! to the allocator but to the next session, and a pointer can be told from one into the caller's own memory.

use std::sync::Mutex;

/// Every slot there is.
static SLOTS: Mutex<Vec<Entry>> = Mutex::new(Vec::new());

/// The smallest allocation.
const LEAST: usize = 64;

struct Entry {
    memory: &'static Memory,
    used: bool,
}

/// Bytes that a session and its user both write, never at the same time: a round is one call after the other.
struct Memory(Box<[std::cell::UnsafeCell<u8>]>);

// SAFETY: all access is through raw pointers, under the contract of the C interface: one round at a time.
unsafe impl Sync for Memory {}

impl Memory {
    fn start(&self) -> *mut u8 {
        self.0.as_ptr().cast_mut().cast()
    }
}

/// A slot of one session. Its address stays the same as long as it lives.
pub(super) struct Slot {
    memory: &'static Memory,
    length: usize,
}

impl Slot {
    /// A zeroed slot of `length` bytes.
    pub(super) fn new(length: usize) -> Self {
        let mut slots = lock();
        let fitting = |entry: &&mut Entry| !entry.used && entry.memory.0.len() >= length;
        let smallest = slots.iter_mut().filter(fitting).min_by_key(|entry| entry.memory.0.len());
        let memory = match smallest {
            Some(entry) => {
                entry.used = true;
                entry.memory
            }
            None => {
                let bytes = length.max(LEAST).next_multiple_of(LEAST);
                let memory: Box<[_]> = (0..bytes).map(|_| std::cell::UnsafeCell::new(0)).collect();
                let memory: &'static Memory = Box::leak(Box::new(Memory(memory)));
                slots.push(Entry { memory, used: true });
                memory
            }
        };
        let slot = Self { memory, length };
        slot.wipe();
        slot
    }

    /// Its first byte.
    pub(super) fn start(&self) -> *mut u8 {
        self.memory.start()
    }

    /// Bytes.
    pub(super) fn length(&self) -> usize {
        self.length
    }

    /// Where in the slot an address lies.
    pub(super) fn offset_of(&self, address: *const u8) -> Option<usize> {
        let offset = (address as usize).checked_sub(self.start() as usize)?;
        (offset < self.length.max(1)).then_some(offset)
    }

    /// The bytes.
    ///
    /// # Safety
    /// Nobody else may access the slot while the slice lives.
    #[allow(clippy::mut_from_ref)] // the slice's life is the caller's promise
    pub(super) unsafe fn bytes(&self) -> &mut [u8] {
        // SAFETY: the memory is never freed and has at least `length` bytes; the caller promises exclusiveness.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.length) }
    }

    /// Zeroes it.
    pub(super) fn wipe(&self) {
        // SAFETY: within the allocation, which is never freed.
        unsafe { self.start().write_bytes(0, self.length) };
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut slots = lock();
        if let Some(entry) = slots.iter_mut().find(|entry| std::ptr::eq(entry.memory, self.memory)) {
            entry.used = false;
        }
    }
}

/// Whether an address lies in the slot of a session that is or was.
pub(super) fn is_slot(address: *const u8) -> bool {
    lock().iter().any(|entry| {
        let offset = (address as usize).wrapping_sub(entry.memory.start() as usize);
        offset < entry.memory.0.len()
    })
}

fn lock() -> std::sync::MutexGuard<'static, Vec<Entry>> {
    SLOTS.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_known_by_its_address_and_comes_back_zeroed() {
        let slot = Slot::new(1000);
        let start = slot.start();
        // SAFETY: the slot is this test's alone.
        unsafe { slot.bytes()[999] = 7 };
        assert_eq!(slot.offset_of(start.wrapping_add(999)), Some(999));
        assert_eq!(slot.offset_of(start.wrapping_add(1000)), None);
        drop(slot);
        assert!(is_slot(start) && is_slot(start.wrapping_add(1023)));
        let own = [0_u8; 8];
        assert!(!is_slot(own.as_ptr()));
        let again = Slot::new(1000);
        // SAFETY: the slot is this test's alone.
        assert!(unsafe { again.bytes() }.iter().all(|byte| *byte == 0));
    }
}
