//! The physical limit: two pinned threads that hand a cache line to each other and do nothing else.
//!
//! With a payload it is the least that any transport by memory has to do: one copy in and one copy out each way.

#![allow(dead_code)] // each bench uses a part of it

use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{JoinHandle, Thread};
use std::time::Instant;

use memmap2::{MmapMut, MmapRaw};
use rustix::thread::{CpuSet, sched_setaffinity};

/// Where the sequence word stands; the payload is in front of it, as in a frame.
const LINE: usize = 64;

/// Pins the calling thread.
pub(crate) fn pin(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu);
    if let Err(errno) = sched_setaffinity(None, &set) {
        eprintln!("processor {cpu} cannot be used ({errno}): the figures are those of unpinned threads");
    }
}

/// One direction: a payload, and behind it the word that says that it is there.
#[derive(Clone)]
struct Way {
    memory: Arc<MmapRaw>,
    payload: usize,
}

impl Way {
    fn new(payload: usize) -> Self {
        let bytes = payload.next_multiple_of(LINE) + LINE;
        Self { memory: Arc::new(MmapMut::map_anon(bytes).expect("memory").into()), payload }
    }

    fn word(&self) -> &AtomicU64 {
        // SAFETY: the mapping is a line longer than the payload rounded up to whole lines, begins at a page, and lives as
        // long as `self`.
        unsafe { AtomicU64::from_ptr(self.memory.as_mut_ptr().add(self.memory.len() - 8).cast()) }
    }

    fn data(&self) -> *mut u8 {
        // SAFETY: payload and word fit the mapping; the payload ends where the word begins.
        unsafe { self.memory.as_mut_ptr().add(self.memory.len() - 8 - self.payload) }
    }

    fn send(&self, from: &[u8], sequence: u64) {
        // SAFETY: `data` is valid for the payload's length, which `from` has too; the other side does not read before the
        // word says so.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.data(), self.payload) };
        self.word().store(sequence, Ordering::Release);
    }

    fn receive(&self, to: &mut [u8], sequence: u64) {
        while self.word().load(Ordering::Acquire) != sequence {
            spin_loop();
        }
        // SAFETY: as in `send`; the other side does not write again before it has an answer.
        unsafe { std::ptr::copy_nonoverlapping(self.data(), to.as_mut_ptr(), self.payload) };
    }
}

/// The ping-pong. Its partner sleeps between two measurements.
pub(crate) struct Floor {
    there: Way,
    back: Way,
    payload: Vec<u8>,
    sequence: u64,
    running: Arc<AtomicBool>,
    quit: Arc<AtomicBool>,
    partner: Option<JoinHandle<()>>,
    thread: Thread,
}

impl Floor {
    /// A ping-pong of so many bytes each way, its partner on the given processor.
    pub(crate) fn new(payload: usize, partner_cpu: usize) -> Self {
        let (there, back) = (Way::new(payload), Way::new(payload));
        let (running, quit) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let partner = std::thread::spawn({
            let (there, back, running, quit) = (there.clone(), back.clone(), running.clone(), quit.clone());
            move || {
                pin(partner_cpu);
                let mut buffer = vec![0; payload];
                let mut sequence = 0;
                while !quit.load(Ordering::Acquire) {
                    std::thread::park();
                    while running.load(Ordering::Relaxed) {
                        if there.word().load(Ordering::Acquire) == sequence + 1 {
                            sequence += 1;
                            there.receive(&mut buffer, sequence);
                            back.send(&buffer, sequence);
                        }
                        spin_loop();
                    }
                }
            }
        });
        let thread = partner.thread().clone();
        Self { there, back, payload: vec![1; payload], sequence: 0, running, quit, partner: Some(partner), thread }
    }

    /// Nanoseconds of each of `rounds` rounds on average.
    pub(crate) fn measure(&mut self, rounds: u32) -> f64 {
        self.begin();
        let began = Instant::now();
        for _ in 0..rounds {
            self.round();
        }
        let took = began.elapsed().as_nanos() as f64 / f64::from(rounds);
        self.end();
        took
    }

    /// Wakes the partner.
    pub(crate) fn begin(&mut self) {
        self.running.store(true, Ordering::Release);
        self.thread.unpark();
        // The first round waits for the partner to wake; it does not count.
        self.round();
    }

    /// One round.
    pub(crate) fn round(&mut self) {
        self.sequence += 1;
        self.there.send(&self.payload, self.sequence);
        self.back.receive(&mut self.payload, self.sequence);
    }

    /// Lets the partner sleep.
    pub(crate) fn end(&mut self) {
        self.running.store(false, Ordering::Release);
    }
}

impl Drop for Floor {
    fn drop(&mut self) {
        self.running.store(false, Ordering::Release);
        self.quit.store(true, Ordering::Release);
        self.thread.unpark();
        if let Some(partner) = self.partner.take() {
            let _ = partner.join();
        }
    }
}
