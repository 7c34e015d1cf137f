//! Sessions of every shape, and faults of every kind that can be injected from outside, for as long as one likes: `scripts/soak`.
//!
//! Settings from the environment: CATALYST_TRANSPORT_SOAK_MINUTES, CATALYST_TRANSPORT_SOAK_DUTY (per cent of the time in which
//! sessions run), CATALYST_TRANSPORT_SEED. With two devices named (CATALYST_TRANSPORT_DEVICE, CATALYST_TRANSPORT_DEVICE2) it runs on the
//! lab's wire, and otherwise on shared memory.

#[path = "support/census.rs"]
mod census;
#[path = "support/fleet.rs"]
mod fleet;
#[path = "support/netem.rs"]
mod netem;
#[path = "support/peers.rs"]
mod peers;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use census::Host;
use fleet::{Broken, Fault, Fleet, Means, Side};
use netem::Netem;
use peers::{Random, Shape};

/// Not a test: one side of the soak, as a process of its own.
#[test]
#[ignore = "a process that other tests start"]
fn peer() {
    peers::run();
}

#[test]
#[ignore = "takes as long as it is told: scripts/soak MINUTES"]
fn soak() {
    let setting = |name: &str, default: u64| {
        std::env::var(name)
            .map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")))
    };
    let length = Duration::from_secs(60 * setting("CATALYST_TRANSPORT_SOAK_MINUTES", 1));
    let duty = setting("CATALYST_TRANSPORT_SOAK_DUTY", 100).clamp(1, 100) as u32;
    let wire = std::env::var_os("CATALYST_TRANSPORT_DEVICE2").is_some();
    let (random, seed) = Random::seeded();
    let place = if wire { "two RDMA devices and a wire" } else { "shared memory" };
    println!("soak on {place} for {length:?}, seed {seed} (CATALYST_TRANSPORT_SEED sets it)");
    let mut soak = Soak::new(random, wire);
    let began = Instant::now();
    let mut minute = 1;
    while began.elapsed() < length {
        let turn = Instant::now();
        soak.turn();
        if began.elapsed() > Duration::from_secs(60 * minute) {
            if let Some(left) = soak.host.left_behind() {
                soak.broken(Broken::Leaked(left));
            }
            println!("minute {minute}: {}", soak.so_far());
            minute = began.elapsed().as_secs() / 60 + 1;
        }
        std::thread::sleep(turn.elapsed() * (100 - duty) / duty);
    }
    soak.end();
}

struct Soak {
    random: Random,
    wire: bool,
    fleet: Fleet,
    host: Host,
    /// Faults injected, by name.
    injected: BTreeMap<&'static str, u64>,
    /// Whether the last session had a fault.
    pending: bool,
    survived: u64,
    /// Lost, corrupt, hung, leaked.
    broken: [u64; 4],
}

impl Soak {
    fn new(random: Random, wire: bool) -> Self {
        let host = Host::now();
        Self {
            random,
            wire,
            fleet: Fleet::start(if wire { on_the_wire() } else { on_shared_memory() }),
            host,
            injected: BTreeMap::new(),
            pending: false,
            survived: 0,
            broken: [0; 4],
        }
    }

    /// One session, with or without a fault.
    fn turn(&mut self) {
        let (shortest, longest, largest) = if self.wire { (100, 2_000, 4_096) } else { (20, 600, 65_536) };
        let milliseconds = shortest + self.random.below(longest - shortest);
        // Now and then requests of many packets.
        let largest = if self.random.once_in(8) { largest * 4 } else { largest };
        let shape = Shape::random(&mut self.random, largest, milliseconds);
        let side = self.random.one_of(&[Side::Controller, Side::Coprocessor]);
        // Freezes are long: few of them fill the time.
        let (name, fault) = match self.random.below(100) {
            0..20 => ("kills", Fault::Kill(side)),
            20..26 => ("short freezes", Fault::ShortFreeze(side)),
            26..28 => ("long freezes", Fault::LongFreeze(side)),
            28..60 if self.wire => return self.bad_wire(shape),
            60..68 if self.wire => return self.cut_wire(shape),
            _ => {
                let result = self.fleet.session(shape, || ());
                return self.after(result, None);
            }
        };
        *self.injected.entry(name).or_default() += 1;
        let early = matches!(fault, Fault::Kill(_)) && self.random.once_in(5);
        let delay =
            self.random.duration(Duration::ZERO, Duration::from_millis(if early { shortest / 4 } else { shortest }));
        let result = self.fleet.faulty(shape, fault, early, delay);
        self.after(result, Some(&format!("{fault:?} after {delay:?}, early: {early}")));
    }

    /// A session on a wire that loses up to 5 % and reorders.
    fn bad_wire(&mut self, shape: Shape) {
        *self.injected.entry("bad wires").or_default() += 1;
        let loss = format!("{}.{}%", self.random.below(5), self.random.below(10));
        let reorder = format!("{}%", self.random.below(4) * 5);
        // Packets that are not delayed overtake those that are.
        let _netem = Netem::set(netem::WIRE, &["delay", "1ms", "reorder", &reorder, "loss", &loss]);
        let result = self.fleet.session(shape, || ());
        self.after(result, Some(&format!("loss {loss}, reorder {reorder}")));
    }

    /// A session in the midst of which nothing passes for a while that the retries outlast.
    fn cut_wire(&mut self, shape: Shape) {
        *self.injected.entry("short cuts").or_default() += 1;
        let cut = self.random.duration(Duration::from_millis(1), Duration::from_millis(150));
        let result = self.fleet.session(shape, || netem::cut(netem::WIRE, cut));
        self.after(result, Some(&format!("the wire cut for {cut:?}")));
    }

    fn after(&mut self, result: Result<(), Broken>, fault: Option<&str>) {
        match result {
            Ok(()) => {
                // A fault is survived when its own session ends as it must, and so does the next one.
                self.survived += u64::from(self.pending);
                self.pending = fault.is_some();
            }
            Err(broken) => {
                println!("in a session with {}:", fault.unwrap_or("no fault"));
                self.broken(broken);
                self.pending = false;
                self.fleet.start_over();
            }
        }
    }

    fn broken(&mut self, broken: Broken) {
        println!("BROKEN: {broken:?}");
        self.broken[match broken {
            Broken::Lost(_) => 0,
            Broken::Corrupt(_) => 1,
            Broken::Hung(_) => 2,
            Broken::Leaked(_) => 3,
        }] += 1;
    }

    fn so_far(&self) -> String {
        let faults: Vec<_> = self.injected.iter().map(|(name, count)| format!("{count} {name}")).collect();
        format!(
            "{} rounds verified in {} whole sessions; {} faults injected ({}), {} survived; {}",
            self.fleet.rounds,
            self.fleet.sessions,
            self.injected.values().sum::<u64>(),
            faults.join(", "),
            self.survived,
            self.fleet.notices()
        )
    }

    fn end(mut self) {
        let last = self.fleet.session(Shape::random(&mut self.random, 4_096, 100), || ());
        self.after(last, None);
        let said = self.so_far();
        let (rounds, faults) = (self.fleet.rounds, self.injected.values().sum::<u64>());
        let Self { fleet, host, mut broken, .. } = self;
        drop(fleet);
        if let Some(left) = host.left_behind() {
            println!("BROKEN: {left}");
            broken[3] += 1;
        }
        println!("end: {said}");
        let [lost, corrupt, hung, leaked] = broken;
        println!("{rounds} rounds, {faults} faults: {lost} lost, {corrupt} corrupt, {hung} hung, {leaked} leaked");
        assert_eq!(broken, [0; 4]);
        assert!(rounds > 0);
    }
}

fn on_shared_memory() -> Means {
    let config = "path=shm;liveness_ms=3000;timeout_ms=30000;handshake_ms=5000";
    Means {
        controller: config.into(),
        coprocessor: format!("{config};accept_ms=0"),
        host: "127.0.0.1",
        liveness: Duration::from_secs(3),
        noticed: Duration::from_secs(6),
        patience: Duration::from_secs(60),
    }
}

fn on_the_wire() -> Means {
    let config = "path=verbs;liveness_ms=8000;timeout_ms=60000;handshake_ms=20000";
    Means {
        controller: format!("{config};dev=rxe1;bind=10.9.0.2"),
        coprocessor: format!("{config};dev=rxe0;bind=10.9.0.1;accept_ms=0"),
        host: "10.9.0.1",
        liveness: Duration::from_secs(8),
        noticed: Duration::from_secs(22),
        patience: Duration::from_secs(120),
    }
}
