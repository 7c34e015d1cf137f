//! Controllers and coprocessors as processes of their own, told what to do line by line: what can be killed, frozen and counted.
//!
//! The process is the test program itself, started with the name of a test that only calls [`run`]. Unlike the examples it takes
//! a first sequence number, payloads of random sizes, pauses and restarts; every byte of every reply is verified.

#![allow(dead_code)] // each test file uses a part of it

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use catalyst_transport::{
    Canceller, ConnectInfo, ControllerSession, CoprocessorSession, FunctionError, Request, SessionConfig,
    TransportError, TransportSession,
};
use rustix::process::{Pid, Signal};

/// The name of the test that calls [`run`], where it stands at the top of its file.
pub(crate) const ENTRY: &str = "peer";

/// Numbers that look random and are the same for the same seed (splitmix64).
#[derive(Debug, Clone)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    /// A seed that differs from run to run, unless the environment sets it.
    pub(crate) fn seeded() -> (Self, u64) {
        let seed = match std::env::var("CATALYST_TRANSPORT_SEED") {
            Ok(text) => text.parse().expect("CATALYST_TRANSPORT_SEED is a number"),
            Err(_) => std::time::UNIX_EPOCH.elapsed().map_or(1, |time| time.as_nanos() as u64),
        };
        (Self(seed), seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ mixed >> 31
    }

    /// Below `end`, which is not 0.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// True once in so many.
    pub(crate) fn once_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }

    pub(crate) fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }

    pub(crate) fn duration(&mut self, from: Duration, to: Duration) -> Duration {
        from + Duration::from_nanos(self.below((to - from).as_nanos().max(1) as u64))
    }
}

/// A process that has been started, killed at the latest when this is dropped.
#[derive(Debug)]
pub(crate) struct Peer {
    child: Child,
    input: ChildStdin,
    lines: Receiver<(Instant, String)>,
    role: &'static str,
}

impl Peer {
    /// `role` is `controller` or `coprocessor`; `config` is read by [`SessionConfig`]'s `FromStr`.
    pub(crate) fn start(role: &'static str, config: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([ENTRY, "--exact", "--ignored", "--nocapture", "--test-threads=1"])
            .env("CATALYST_TRANSPORT_PEER", role)
            .env("CATALYST_TRANSPORT_PEER_CONFIG", config)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, lines) = channel();
        let output = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                // The harness's own words may stand in front.
                if let Some((_, said)) = line.split_once("peer: ")
                    && sender.send((Instant::now(), said.to_owned())).is_err()
                {
                    return;
                }
            }
        });
        let input = child.stdin.take().unwrap();
        let mut peer = Self { child, input, lines, role };
        peer.expect("ready", Duration::from_secs(60));
        peer
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn tell(&mut self, command: &str) {
        // One that has been killed reads no more.
        let _ = writeln!(self.input, "{command}");
    }

    /// The next line, if one comes within `bound`.
    pub(crate) fn next(&mut self, bound: Duration) -> Option<(Instant, String)> {
        match self.lines.recv_timeout(bound) {
            Ok(line) => Some(line),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                // It has ended; whoever asks decides whether it should have.
                std::thread::sleep(bound.min(Duration::from_millis(1)));
                None
            }
        }
    }

    /// The next line, which has to begin with this word; gives the rest.
    pub(crate) fn expect(&mut self, word: &str, bound: Duration) -> String {
        let Some((_, line)) = self.next(bound) else { panic!("the {} has not said '{word}' in {bound:?}", self.role) };
        match line.strip_prefix(word) {
            Some(rest) => rest.trim_start().to_owned(),
            None => panic!("the {} said '{line}' and not '{word}'", self.role),
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        rustix::process::kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// `kill -9`, and waits until the kernel has taken everything back.
    pub(crate) fn kill(&mut self) -> Instant {
        let at = Instant::now();
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        at
    }

    pub(crate) fn is_alive(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a session is like, as both processes are told it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) first: u32,
    pub(crate) depth: u32,
    pub(crate) request: usize,
    pub(crate) reply: usize,
    /// How long rounds are sent.
    pub(crate) milliseconds: u64,
    pub(crate) seed: u64,
    /// Whether both stop and start again now and then.
    pub(crate) restarts: bool,
}

impl Shape {
    /// Random, with payloads of at most `largest` bytes; the numbers often begin just before a wrap.
    pub(crate) fn random(random: &mut Random, largest: usize, milliseconds: u64) -> Self {
        let near = random.below(600) as u32;
        let small = random.once_in(2);
        let capacity = |random: &mut Random| {
            if small { random.below(97) as usize } else { random.below(largest as u64 + 1) as usize }
        };
        Self {
            first: random.one_of(&[1, u32::MAX - near, (1 << 31) - 1 - near, random.clone().next() as u32]),
            depth: random.one_of(&[1, 2, 4, 16, 64, 256]),
            request: capacity(random),
            reply: capacity(random),
            milliseconds,
            seed: random.next(),
            restarts: random.once_in(3),
        }
    }

    fn restarts_word(self) -> u8 {
        self.restarts.into()
    }

    pub(crate) fn serve(self, port: u16) -> String {
        format!("serve {port} {} {} {}", self.first, self.seed, self.restarts_word())
    }

    pub(crate) fn run(self, host: &str, port: u16) -> String {
        let Self { first, depth, request, reply, milliseconds, seed, .. } = self;
        format!("run {host} {port} {first} {depth} {request} {reply} {milliseconds} {seed} {}", self.restarts_word())
    }
}

/// The process: does what it is told until its input ends.
pub(crate) fn run() {
    let Ok(role) = std::env::var("CATALYST_TRANSPORT_PEER") else { return };
    let config: SessionConfig = std::env::var("CATALYST_TRANSPORT_PEER_CONFIG").unwrap().parse().unwrap();
    let canceller: Arc<Mutex<Option<Canceller>>> = Arc::default();
    let (sender, commands) = channel();
    let cancels = canceller.clone();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            let _ = sender.send(line);
            if let Some(canceller) = &*cancels.lock().unwrap() {
                canceller.cancel();
            }
        }
        // Whoever started this process has gone.
        std::process::exit(0);
    });
    say("ready");
    let mut commands = Commands { lines: commands, next: None };
    while let Some(line) = commands.take() {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |index: usize| words[index].parse::<u64>().unwrap();
        match (&role[..], words[0]) {
            ("coprocessor", "serve") => {
                let config = config.clone().first_sequence(number(2) as u32);
                serve(config, number(1) as u16, Random(number(3)), number(4) == 1, &mut commands, &canceller);
            }
            ("controller", "run") => {
                let config = config
                    .clone()
                    .first_sequence(number(3) as u32)
                    .depth(number(4) as u32)
                    .request_capacity(number(5) as usize)
                    .reply_capacity(number(6) as usize);
                let info = ConnectInfo::new(words[1], number(2) as u16);
                let length = Duration::from_millis(number(7));
                say(&format!("ended {}", drive(config, &info, length, Random(number(8)), number(9) == 1)));
            }
            _ => panic!("no such command for a {role}: {line}"),
        }
    }
}

fn say(text: &str) {
    // Not println!, which the test harness may keep for itself.
    let mut output = std::io::stdout().lock();
    writeln!(output, "peer: {text}").and_then(|()| output.flush()).expect("whoever listens is there");
}

/// What the coprocessor answers: as long as it can, the bytes in other clothes.
fn answer(payload: &[u8], decoder_id: u32, reply: &mut [u8]) -> usize {
    // Every other decoder answers with twice the bytes.
    let wanted = if decoder_id & 1 == 1 { payload.len() * 2 } else { payload.len() };
    let length = wanted.min(reply.len());
    for (index, byte) in reply[..length].iter_mut().enumerate() {
        *byte = !payload[index % payload.len()] ^ (decoder_id >> 8) as u8 ^ (index / 251) as u8;
    }
    length
}

/// Sessions of the coprocessor one after another, until there is another command.
fn serve(
    config: SessionConfig,
    port: u16,
    mut random: Random,
    restarts: bool,
    commands: &mut Commands,
    canceller: &Mutex<Option<Canceller>>,
) {
    let mut session = CoprocessorSession::new(config).unwrap();
    let function = |request: Request<'_>, reply: &mut [u8]| {
        Ok::<_, FunctionError>(answer(request.payload, request.decoder_id, reply))
    };
    session.set_coprocessor_fn(function).unwrap();
    let port = session.listen(port).unwrap().port();
    *canceller.lock().unwrap() = Some(session.canceller());
    say(&format!("listening {port}"));
    while !commands.waiting() {
        let mut work = || -> catalyst_transport::Result<()> {
            session.open_as_proposed(&ConnectInfo::new("", port), 1 << 28)?;
            session.start()?;
            say("serving");
            loop {
                session.status()?;
                std::thread::sleep(Duration::from_millis(2));
                if restarts && random.once_in(30) {
                    session.stop()?;
                    std::thread::sleep(Duration::from_micros(random.below(5_000)));
                    session.start()?;
                }
            }
        };
        let ended = work().expect_err("it ends with the peer");
        let rounds = session.served();
        session.close().unwrap();
        if !matches!(ended, TransportError::Engine { .. }) {
            say(&format!("ended {rounds} {}", describe(&ended)));
        }
    }
    *canceller.lock().unwrap() = None;
}

/// Lines of the input, one of which may be seen before it is taken.
struct Commands {
    lines: Receiver<String>,
    next: Option<String>,
}

impl Commands {
    fn take(&mut self) -> Option<String> {
        self.next.take().or_else(|| self.lines.recv().ok())
    }

    fn waiting(&mut self) -> bool {
        if self.next.is_none() {
            self.next = self.lines.try_recv().ok();
        }
        self.next.is_some()
    }
}

/// The word for an error, and its text.
fn describe(error: &TransportError) -> String {
    let word = match error {
        TransportError::PeerClosed { .. } => "closed",
        TransportError::PeerLost { .. } => "lost",
        TransportError::Completion(_) => "completion",
        TransportError::PeerRefused { .. } => "refused",
        TransportError::Timeout { .. } => "timeout",
        _ => "other",
    };
    format!("{word} {}", error.to_string().replace('\n', " "))
}

/// One session of the controller; gives the rounds verified and how it ended.
fn drive(config: SessionConfig, info: &ConnectInfo, length: Duration, random: Random, restarts: bool) -> String {
    let capacities = (config.channel().request_capacity, config.channel().reply_capacity);
    let depth = config.channel().depth;
    let mut session = ControllerSession::new(config).unwrap();
    let mut rounds = Rounds { random, capacities, waiting: VecDeque::new(), verified: 0 };
    let mut work = || -> catalyst_transport::Result<()> {
        session.open(info)?;
        session.start()?;
        say("connected");
        let end = Instant::now() + length;
        // At least one round, however short the time.
        loop {
            let burst = rounds.random.below(u64::from(depth)) as u32 + 1;
            while session.in_flight() < burst {
                rounds.send(&mut session)?;
            }
            let leave = if rounds.random.once_in(2) { 0 } else { session.in_flight() / 2 };
            while session.in_flight() > leave {
                rounds.collect(&mut session)?;
            }
            if Instant::now() >= end {
                break;
            }
            if rounds.random.once_in(200) {
                std::thread::sleep(Duration::from_micros(rounds.random.below(2_000)));
            }
            if restarts && rounds.random.once_in(500) {
                // What is in flight is given up.
                session.stop()?;
                rounds.waiting.clear();
                session.start()?;
            }
        }
        while session.in_flight() > 0 {
            rounds.collect(&mut session)?;
        }
        Ok(())
    };
    let result = work();
    session.close();
    drop(session);
    match result {
        Ok(()) => format!("{} done", rounds.verified),
        Err(error) => format!("{} {}", rounds.verified, describe(&error)),
    }
}

/// The rounds of one session, and the replies that they must have.
struct Rounds {
    random: Random,
    capacities: (usize, usize),
    waiting: VecDeque<Vec<u8>>,
    verified: u64,
}

impl Rounds {
    fn send(&mut self, session: &mut ControllerSession) -> catalyst_transport::Result<()> {
        let (request, reply) = self.capacities;
        let length = self.random.below(request as u64 + 1) as usize;
        let mut payload = vec![0; length];
        for chunk in payload.chunks_mut(8) {
            chunk.copy_from_slice(&self.random.next().to_le_bytes()[..chunk.len()]);
        }
        let decoder_id = self.random.next() as u32;
        let mut expected = vec![0; reply];
        let length = answer(&payload, decoder_id, &mut expected);
        expected.truncate(length);
        patiently(|| session.write_data_slot(&payload, decoder_id))?;
        patiently(|| session.kick(0))?;
        self.waiting.push_back(expected);
        Ok(())
    }

    fn collect(&mut self, session: &mut ControllerSession) -> catalyst_transport::Result<()> {
        let expected = self.waiting.pop_front().expect("as many as are in flight");
        match session.collect_reply() {
            // Told, not lost: the round was given up because the peer is between a stop and a start.
            Err(TransportError::PeerStopped { .. }) => return Ok(()),
            other => other?,
        };
        let reply = session.reply();
        // Whoever started this process takes its sudden end for a corrupt reply.
        assert!(reply == expected, "corrupt: {} bytes came, not the {} expected ones", reply.len(), expected.len());
        self.verified += 1;
        Ok(())
    }
}

/// Again, as long as the ring is full of rounds that were given up: their late replies free it.
fn patiently<T>(mut call: impl FnMut() -> catalyst_transport::Result<T>) -> catalyst_transport::Result<T> {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match call() {
            Err(TransportError::WindowFull { .. }) if Instant::now() < deadline => std::thread::yield_now(),
            other => return other,
        }
    }
}
