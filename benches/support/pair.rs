//! A controller and an echoing coprocessor on two processors, through the public API.

#![allow(dead_code)] // each bench uses a part of it

use std::time::Instant;

use catalyst_transport::{ConnectInfo, ControllerSession, CoprocessorSession, Echo, SessionConfig, TransportSession};

/// Where the controller runs.
pub(crate) const CONTROLLER_CPU: usize = 0;
/// Where the coprocessor's engine runs.
pub(crate) const COPROCESSOR_CPU: usize = 1;

/// The two sides, both in this process. The engine rests between two measurements.
pub(crate) struct Pair {
    controller: ControllerSession,
    coprocessor: CoprocessorSession,
    payload: Vec<u8>,
    depth: u32,
}

impl Pair {
    /// A pair with payloads of so many bytes each way.
    pub(crate) fn new(config: &SessionConfig, payload: usize, depth: u32) -> Self {
        let config = config.clone().request_capacity(payload).reply_capacity(payload).depth(depth);
        let mut coprocessor = CoprocessorSession::new(config.clone().cpu(COPROCESSOR_CPU)).expect("settings");
        coprocessor.set_coprocessor_fn(Echo).expect("not running");
        let port = coprocessor.listen(0).expect("a free port").port();
        let opening = std::thread::spawn(move || {
            coprocessor.open(&ConnectInfo::new("", port)).expect("coprocessor");
            coprocessor
        });
        let mut controller = ControllerSession::new(config).expect("settings");
        controller.open(&ConnectInfo::new("127.0.0.1", port)).expect("controller");
        let coprocessor = opening.join().expect("no panic");
        Self { controller, coprocessor, payload: vec![7; payload], depth }
    }

    /// Nanoseconds of each of `rounds` rounds on average, one at a time.
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

    /// Rounds per second with the ring kept full.
    pub(crate) fn throughput(&mut self, rounds: u32) -> f64 {
        self.begin();
        let began = Instant::now();
        let (mut kicked, mut collected) = (0, 0);
        while collected < rounds {
            while kicked < rounds && kicked - collected < self.depth {
                self.controller.write_data_slot(&self.payload, 0).expect("room");
                self.controller.kick(0).expect("a kick");
                kicked += 1;
            }
            self.controller.collect(&mut [&mut self.payload]).expect("a reply");
            collected += 1;
        }
        let rate = f64::from(rounds) / began.elapsed().as_secs_f64();
        self.end();
        rate
    }

    /// Starts both engines and runs one round that does not count.
    pub(crate) fn begin(&mut self) {
        self.coprocessor.start().expect("start");
        self.controller.start().expect("start");
        self.round();
    }

    /// One round.
    pub(crate) fn round(&mut self) {
        self.controller.write_data_slot(&self.payload, 0).expect("room");
        self.controller.kick(0).expect("a kick");
        self.controller.collect(&mut [&mut self.payload]).expect("a reply");
    }

    /// Stops both engines.
    pub(crate) fn end(&mut self) {
        self.controller.stop().expect("stop");
        self.coprocessor.stop().expect("stop");
    }
}
