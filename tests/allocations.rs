//! No round allocates: neither side, on either data path, once the engines have started.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use catalyst_transport::{
    ConnectInfo, ControllerSession, CoprocessorSession, DataPathKind, Invert, SessionConfig, TransportSession,
};

/// Counts what all threads of the process ask for.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is handed to the system's allocator as it is; counting touches no memory of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's contract is the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Rounds of several kinds: one at a time, many in flight, and on the coprocessor collected too.
fn rounds(controller: &mut ControllerSession, coprocessor: &mut CoprocessorSession, count: u32) {
    let mut reply = [0; 40];
    for round in 0..count {
        let payload = [round as u8; 40];
        controller.write_data_slot(&payload, round % 3).unwrap();
        controller.kick(0).unwrap();
        controller.collect(&mut [&mut reply]).unwrap();
        assert_eq!(reply, [!(round as u8); 40]);
        coprocessor.collect(&mut [&mut reply]).unwrap();
        for _ in 0..4 {
            controller.data_slot().unwrap()[..40].fill(7);
            controller.queue(0).unwrap();
        }
        for _ in 0..4 {
            assert_eq!(controller.collect_reply().unwrap(), [!7; 40]);
            coprocessor.collect(&mut [&mut reply]).unwrap();
        }
    }
}

fn allocations(config: &SessionConfig) -> u64 {
    // The watcher's sign of life is not part of a round: none falls into the measurement.
    let config = config.clone().depth(8).request_capacity(40).reply_capacity(40).liveness(Duration::from_secs(3600));
    let config = config.reply_timeout(Duration::from_secs(10));
    let mut coprocessor = CoprocessorSession::new(config.clone()).unwrap();
    coprocessor.set_coprocessor_fn(Invert).unwrap();
    coprocessor.set_decoder(1, Invert).unwrap();
    let port = coprocessor.listen(0).unwrap().port();
    let opening = std::thread::spawn(move || {
        coprocessor.open(&ConnectInfo::new("", port)).unwrap();
        coprocessor
    });
    let mut controller = ControllerSession::new(config).unwrap();
    controller.open(&ConnectInfo::new("127.0.0.1", port)).unwrap();
    let mut coprocessor = opening.join().unwrap();
    coprocessor.start().unwrap();
    controller.start().unwrap();
    // Long enough for the other threads to have told each other that they run.
    rounds(&mut controller, &mut coprocessor, 100);
    std::thread::sleep(Duration::from_millis(100));
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    rounds(&mut controller, &mut coprocessor, 2000);
    ALLOCATIONS.load(Ordering::Relaxed) - before
}

/// One test, since it counts for the whole process.
#[test]
fn no_round_allocates() {
    let counted = allocations(&SessionConfig::new().data_path(DataPathKind::SharedMemory));
    assert_eq!(counted, 0, "shared memory: {counted} allocations in 10,000 rounds");
    // The counter does count.
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    drop(std::hint::black_box(Box::new(1)));
    assert_eq!(ALLOCATIONS.load(Ordering::Relaxed) - before, 1);
    println!("figure: {counted} allocations in 10,000 rounds on shared memory");
    // In the RDMA lab.
    if let Ok(device) = std::env::var("CATALYST_TRANSPORT_DEVICE") {
        let counted = allocations(&SessionConfig::new().data_path(DataPathKind::Verbs).device(&device));
        println!("figure: {counted} allocations in 10,000 rounds on {device}");
        assert_eq!(counted, 0, "verbs: {counted} allocations in 10,000 rounds");
    }
}
