//! A controller and a coprocessor in processes of their own, session after session, with faults between and in them: what the
//! kill loops and the soak are made of.

#![allow(dead_code)] // each test file uses a part of it

use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::census::{Census, leaked, resident_kib};
use super::peers::{Peer, Random, Shape};

/// How the two sides reach each other, and the bounds within which things have to happen.
#[derive(Debug, Clone)]
pub(crate) struct Means {
    /// Settings of the controller and of the coprocessor, as `SessionConfig` reads them.
    pub(crate) controller: String,
    pub(crate) coprocessor: String,
    pub(crate) host: &'static str,
    /// The liveness bound that the settings name.
    pub(crate) liveness: Duration,
    /// A process that ends is noticed within this.
    pub(crate) noticed: Duration,
    /// Whatever has to happen at all happens within this, or it hangs.
    pub(crate) patience: Duration,
}

/// Growth of a process beyond which memory counts as leaked. The rings of one session have up to 32 MiB, and go with it.
const MOST_GROWTH_KIB: u64 = 24 * 1024;

/// Which process a fault happens to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Controller,
    Coprocessor,
}

/// What goes wrong in a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// `kill -9`.
    Kill(Side),
    /// SIGSTOP, and SIGCONT within the liveness bound.
    ShortFreeze(Side),
    /// SIGSTOP until the other has noticed, then SIGCONT.
    LongFreeze(Side),
}

/// How a promise was broken.
#[derive(Debug)]
pub(crate) enum Broken {
    /// A round or a session ended in an error that no fault explains.
    Lost(String),
    /// A reply was not what it had to be.
    Corrupt(String),
    /// Something did not happen within its bound.
    Hung(String),
    /// Something was left behind.
    Leaked(String),
}

/// Both processes.
pub(crate) struct Fleet {
    means: Means,
    controller: Peer,
    coprocessor: Peer,
    /// What they held when they were idle for the first time.
    controller_before: Census,
    coprocessor_before: Option<Census>,
    /// Their memory after their first session.
    resident: [Option<u64>; 2],
    port: u16,
    /// Rounds whose reply was verified.
    pub(crate) rounds: u64,
    pub(crate) sessions: u64,
    /// How long it took the other side to notice.
    pub(crate) noticed: Vec<Duration>,
    /// Faults before both sides had said that rounds may begin.
    pub(crate) early: u64,
}

impl Fleet {
    pub(crate) fn start(means: Means) -> Self {
        let controller = Peer::start("controller", &means.controller);
        let coprocessor = Peer::start("coprocessor", &means.coprocessor);
        Self {
            controller_before: Census::of(controller.pid()),
            coprocessor_before: None,
            resident: [None; 2],
            means,
            controller,
            coprocessor,
            port: 0,
            rounds: 0,
            sessions: 0,
            noticed: Vec::new(),
            early: 0,
        }
    }

    /// New processes in place of both. The port stays.
    pub(crate) fn start_over(&mut self) {
        self.replace(Side::Controller);
        self.replace(Side::Coprocessor);
    }

    fn replace(&mut self, side: Side) {
        match side {
            Side::Controller => {
                self.controller = Peer::start("controller", &self.means.controller);
                self.controller_before = Census::of(self.controller.pid());
                self.resident[0] = None;
            }
            Side::Coprocessor => {
                self.coprocessor = Peer::start("coprocessor", &self.means.coprocessor);
                self.coprocessor_before = None;
                self.resident[1] = None;
            }
        }
    }

    fn peer(&mut self, side: Side) -> &mut Peer {
        match side {
            Side::Controller => &mut self.controller,
            Side::Coprocessor => &mut self.coprocessor,
        }
    }

    /// The next thing that a side says, within a bound.
    fn said(&mut self, side: Side, bound: Duration, meaning: &str) -> Result<(Instant, String), Broken> {
        let began = Instant::now();
        loop {
            let left = bound.saturating_sub(began.elapsed());
            if let Some(line) = self.peer(side).next(left) {
                return Ok(line);
            }
            if !self.peer(side).is_alive() {
                // What it said before it ended may be on its way.
                if let Some(line) = self.peer(side).next(Duration::from_millis(100)) {
                    return Ok(line);
                }
                return Err(Broken::Corrupt(format!(
                    "the {side:?} ended by itself while {meaning}: see standard error"
                )));
            }
            if began.elapsed() >= bound {
                return Err(Broken::Hung(format!("the {side:?} said nothing for {bound:?} while {meaning}")));
            }
        }
    }

    /// Makes the coprocessor listen for a session like this; everything before is over then.
    fn listen(&mut self, shape: Shape) -> Result<(), Broken> {
        let command = shape.serve(self.port);
        self.coprocessor.tell(&command);
        loop {
            let (_, line) = self.said(Side::Coprocessor, self.means.patience, "it should listen")?;
            if let Some(port) = line.strip_prefix("listening ") {
                self.port = port.parse().unwrap();
                break;
            }
            // The end of a session whose controller was killed before it had begun.
            if line != "serving"
                && !line.contains(" lost ")
                && !line.contains(" closed ")
                && !line.contains(" timeout ")
            {
                return Err(Broken::Lost(format!("after an early kill: {line}")));
            }
        }
        let pid = self.coprocessor.pid();
        match &self.coprocessor_before {
            None => self.coprocessor_before = Some(Census::of(pid)),
            Some(before) => {
                if let Some(difference) = leaked(pid, before) {
                    return Err(Broken::Leaked(format!("coprocessor: {difference}")));
                }
            }
        }
        Ok(())
    }

    fn begin(&mut self, shape: Shape) -> Result<(), Broken> {
        self.listen(shape)?;
        let command = shape.run(self.means.host, self.port);
        self.controller.tell(&command);
        Ok(())
    }

    fn connected(&mut self) -> Result<(), Broken> {
        for (side, word) in [(Side::Controller, "connected"), (Side::Coprocessor, "serving")] {
            let (_, line) = self.said(side, self.means.patience, "connecting")?;
            if line != word {
                return Err(Broken::Lost(format!("connecting, the {side:?} said '{line}'")));
            }
        }
        Ok(())
    }

    /// The end of a session in good order.
    fn good_end(&mut self, shape: Shape) -> Result<(), Broken> {
        let bound = self.means.patience + Duration::from_millis(shape.milliseconds);
        for (side, word) in [(Side::Controller, "done"), (Side::Coprocessor, "closed")] {
            let (rounds, end, line) = self.ended(side, bound)?;
            if end != word {
                return Err(Broken::Lost(format!("{shape:?}: the {side:?} said '{line}' where '{word}' was due")));
            }
            if side == Side::Controller {
                self.rounds += rounds;
            }
        }
        self.sessions += 1;
        self.nothing_kept()
    }

    /// Rounds, word and whole line of a side's end.
    fn ended(&mut self, side: Side, bound: Duration) -> Result<(u64, String, String), Broken> {
        let (_, line) = self.said(side, bound, "its session should end")?;
        let mut words = line.split(' ');
        let (Some("ended"), Some(rounds), Some(word)) = (words.next(), words.next(), words.next()) else {
            return Err(Broken::Lost(format!("the {side:?} said '{line}' where its end was due")));
        };
        Ok((rounds.parse().unwrap(), word.to_owned(), line.clone()))
    }

    /// The controller holds what it held when it was new; neither process grows.
    fn nothing_kept(&mut self) -> Result<(), Broken> {
        if let Some(difference) = leaked(self.controller.pid(), &self.controller_before) {
            return Err(Broken::Leaked(format!("controller: {difference}")));
        }
        for (index, pid) in [self.controller.pid(), self.coprocessor.pid()].into_iter().enumerate() {
            let now = resident_kib(pid);
            let first = *self.resident[index].get_or_insert(now);
            if now > first + MOST_GROWTH_KIB {
                let name = ["controller", "coprocessor"][index];
                return Err(Broken::Leaked(format!("the {name}'s memory grew from {first} to {now} KiB")));
            }
        }
        Ok(())
    }

    /// A session in which nothing goes wrong, but for what `meanwhile` does to the network in a way that has to be survived.
    pub(crate) fn session(&mut self, shape: Shape, meanwhile: impl FnOnce()) -> Result<(), Broken> {
        self.begin(shape)?;
        self.connected()?;
        meanwhile();
        self.good_end(shape)
    }

    /// A session with a fault in it; `early`: so long after the controller was told to connect, and otherwise so long after
    /// both were running. A killed process is replaced.
    pub(crate) fn faulty(
        &mut self,
        mut shape: Shape,
        fault: Fault,
        early: bool,
        delay: Duration,
    ) -> Result<(), Broken> {
        if !matches!(fault, Fault::ShortFreeze(_)) {
            // It does not end by itself.
            shape.milliseconds = 3_600_000;
        }
        self.begin(shape)?;
        if early {
            self.early += 1;
        } else {
            self.connected()?;
        }
        std::thread::sleep(delay);
        match fault {
            Fault::Kill(Side::Coprocessor) => {
                let at = self.coprocessor.kill();
                self.noticed_by(Side::Controller, at, early, self.means.noticed)?;
                self.replace(Side::Coprocessor);
            }
            Fault::Kill(Side::Controller) => {
                let at = self.controller.kill();
                // Before the coprocessor has accepted there is nothing to notice; it goes on listening.
                if !early {
                    self.noticed_by(Side::Coprocessor, at, early, self.means.noticed)?;
                }
                self.replace(Side::Controller);
            }
            Fault::ShortFreeze(side) => {
                self.peer(side).signal(Signal::STOP);
                std::thread::sleep(self.means.liveness / 3);
                self.peer(side).signal(Signal::CONT);
                if early {
                    self.connected()?;
                }
                return self.good_end(shape);
            }
            Fault::LongFreeze(side) => {
                let other = if side == Side::Controller { Side::Coprocessor } else { Side::Controller };
                self.peer(side).signal(Signal::STOP);
                let noticed = self.noticed_by(other, Instant::now(), early, self.means.liveness + self.means.noticed);
                self.peer(side).signal(Signal::CONT);
                noticed?;
                let (rounds, word, line) = self.ended(side, self.means.patience)?;
                if word == "done" {
                    return Err(Broken::Lost(format!("frozen for too long, the {side:?} said '{line}'")));
                }
                if side == Side::Controller {
                    self.rounds += rounds;
                }
            }
        }
        if fault != Fault::Kill(Side::Controller) {
            self.nothing_kept()?;
        }
        Ok(())
    }

    /// The other one says within the bound that its peer is lost.
    fn noticed_by(&mut self, side: Side, since: Instant, early: bool, bound: Duration) -> Result<(), Broken> {
        let slow = self.means.patience;
        let (mut at, mut line) = self.said(side, slow, "it should notice the other's end")?;
        if early && matches!(&line[..], "connected" | "serving") {
            (at, line) = self.said(side, slow, "it should notice the other's end")?;
        }
        let mut words = line.split(' ');
        let (Some("ended"), Some(rounds), Some(word)) = (words.next(), words.next(), words.next()) else {
            return Err(Broken::Lost(format!("the {side:?} said '{line}' when the other was gone")));
        };
        let took = at.saturating_duration_since(since);
        let right = match word {
            "lost" | "completion" => true,
            // In the bring-up a side may also wait for one who is not there.
            "timeout" | "refused" | "other" => early,
            _ => false,
        };
        if !right {
            return Err(Broken::Lost(format!("when the other was gone, the {side:?} said '{line}'")));
        }
        if took > bound {
            return Err(Broken::Hung(format!(
                "the {side:?} noticed after {took:?} only, the bound being {bound:?}: {line}"
            )));
        }
        if side == Side::Controller {
            self.rounds += rounds.parse::<u64>().unwrap();
        }
        self.noticed.push(took);
        Ok(())
    }

    /// One line about how soon faults were noticed.
    pub(crate) fn notices(&self) -> String {
        let mut sorted = self.noticed.clone();
        sorted.sort_unstable();
        match sorted[..] {
            [] => "nothing to notice".into(),
            [.., last] => format!("noticed after {:?} (median), {last:?} (longest)", sorted[sorted.len() / 2]),
        }
    }
}

/// So many kills of either side at random moments, each followed by a session in which all is well.
pub(crate) fn kill_loop(means: Means, kills: u32, in_rounds: Duration, in_bring_up: Duration) {
    let (mut random, seed) = Random::seeded();
    println!("seed {seed} (CATALYST_TRANSPORT_SEED sets it)");
    let host = super::census::Host::now();
    let mut fleet = Fleet::start(means);
    let mut killed = [0_u32; 2];
    let began = Instant::now();
    for kill in 0..kills {
        let side = random.one_of(&[Side::Controller, Side::Coprocessor]);
        killed[usize::from(side == Side::Coprocessor)] += 1;
        let early = random.once_in(6);
        let delay = random.duration(Duration::ZERO, if early { in_bring_up } else { in_rounds });
        let shape = Shape::random(&mut random, 5_000, 0);
        let done = fleet
            .faulty(shape, Fault::Kill(side), early, delay)
            .and_then(|()| fleet.session(Shape::random(&mut random, 5_000, 1), || ()));
        if let Err(broken) = done {
            panic!("kill {kill} ({side:?}, seed {seed}): {broken:?}");
        }
    }
    println!(
        "figure: {kills} kills in {:.0?} ({} of the controller, {} of the coprocessor, {} in the bring-up): {}; {} rounds \
         verified",
        began.elapsed(),
        killed[0],
        killed[1],
        fleet.early,
        fleet.notices(),
        fleet.rounds
    );
    drop(fleet);
    assert_eq!(host.left_behind(), None, "left behind");
}
