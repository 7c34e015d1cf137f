//! Pairs of sessions over software devices, and a watchdog.

use std::sync::{Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use catalyst_transport::fabricated::{Entry, Installed, OpenObjects, Verb, see};
use catalyst_transport::{
    ChannelDesc, ConnectInfo, ControllerSession, CoprocessorSession, DataPathKind, Echo, Result, SessionConfig,
    TransportError, TransportSession,
};

/// Runs a test on a thread of its own and fails it when it takes longer than a minute.
pub(crate) fn guarded(body: impl FnOnce() + Send + 'static) {
    let (done, ended) = mpsc::channel::<()>();
    let thread = std::thread::spawn(move || {
        let _done = done;
        body();
    });
    match ended.recv_timeout(Duration::from_secs(60)) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("the watchdog ended this test after 60 s"),
        _ => {
            if let Err(panic) = thread.join() {
                std::panic::resume_unwind(panic);
            }
        }
    }
}

/// As [`guarded`], for tests of many rounds: one at a time, so that their spinning threads do not starve each other.
pub(crate) fn guarded_alone(body: impl FnOnce() + Send + 'static) {
    static ALONE: Mutex<()> = Mutex::new(());
    let _turn = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    guarded(body);
}

/// Settings for a session on this device.
pub(crate) fn config(device: &str) -> SessionConfig {
    SessionConfig::new()
        .data_path(DataPathKind::Verbs)
        .device(device)
        .fabricated(true)
        .accept_timeout(Some(Duration::from_secs(20)))
        .reply_timeout(Duration::from_secs(5))
}

/// A controller and a coprocessor that are to be connected, each on a device.
pub(crate) struct Pair {
    pub(crate) controller: ControllerSession,
    pub(crate) coprocessor: CoprocessorSession,
    controller_sees: Vec<String>,
    coprocessor_sees: Vec<String>,
    channel: ChannelDesc,
}

impl Pair {
    /// Two sessions that answer with an echo. `devices` are the controller's and the coprocessor's.
    pub(crate) fn new(devices: [&str; 2], shape: impl Fn(SessionConfig) -> SessionConfig) -> Self {
        let mut coprocessor = CoprocessorSession::new(shape(config(devices[1]))).unwrap();
        coprocessor.set_coprocessor_fn(Echo).unwrap();
        Self {
            channel: shape(config(devices[0])).channel().clone(),
            controller: ControllerSession::new(shape(config(devices[0]))).unwrap(),
            coprocessor,
            controller_sees: vec![devices[0].into()],
            coprocessor_sees: vec![devices[1].into()],
        }
    }

    /// Opens both at the same time and gives what came of it, the controller's result first.
    pub(crate) fn open(&mut self) -> (Result<()>, Result<()>) {
        self.open_with(|session, info| session.open(info), |session, info| session.open(info))
    }

    /// Opens both in these ways. When the controller has failed before its hello, the coprocessor's wait for another
    /// client is ended after a while.
    pub(crate) fn open_with(
        &mut self,
        controller: impl FnOnce(&mut ControllerSession, &ConnectInfo) -> Result<()>,
        coprocessor: impl FnOnce(&mut CoprocessorSession, &ConnectInfo) -> Result<()> + Send,
    ) -> (Result<()>, Result<()>) {
        let port = self.coprocessor.listen(0).unwrap().port();
        let canceller = self.coprocessor.canceller();
        let Self { controller: own, coprocessor: peer, controller_sees, coprocessor_sees, .. } = self;
        std::thread::scope(|scope| {
            let serving = scope.spawn(move || {
                see_all(coprocessor_sees);
                coprocessor(peer, &ConnectInfo::new("", port))
            });
            see_all(controller_sees);
            let opened = controller(own, &ConnectInfo::new("127.0.0.1", port));
            if opened.is_err() {
                let deadline = Instant::now() + Duration::from_millis(300);
                while !serving.is_finished() && Instant::now() < deadline {
                    std::thread::sleep(Duration::from_millis(1));
                }
                if !serving.is_finished() {
                    canceller.cancel();
                }
            }
            (opened, serving.join().expect("no panic"))
        })
    }

    /// The channel that both are configured for.
    pub(crate) fn controller_channel(&self) -> ChannelDesc {
        self.channel.clone()
    }

    /// Opens and starts both, which has to succeed.
    pub(crate) fn run(&mut self) {
        let (controller, coprocessor) = self.open();
        controller.expect("the controller opens");
        coprocessor.expect("the coprocessor opens");
        self.coprocessor.start().unwrap();
        self.controller.start().unwrap();
    }

    /// One round: sends, and asserts that the reply is the same.
    pub(crate) fn round(&mut self, payload: &[u8]) {
        self.controller.write_data_slot(payload, 7).unwrap();
        self.controller.kick(0).unwrap();
        let reply = self.controller.collect_reply().unwrap();
        assert!(reply == payload, "{} bytes came back otherwise than they went", payload.len());
    }

    /// Sends a round and gives the error that its collection ends with.
    pub(crate) fn failing_round(&mut self) -> TransportError {
        let sent = self.controller.write_data_slot(b"will fail", 7).and_then(|()| self.controller.kick(0));
        match sent {
            Err(error) => error,
            Ok(_) => self.controller.collect(&mut [&mut [0; 64]]).expect_err("the round has to fail"),
        }
    }

    /// Closes both.
    pub(crate) fn close(&mut self) {
        self.controller.close();
        self.coprocessor.close().unwrap();
    }

    /// Waits until the coprocessor's engine has ended and gives its error.
    pub(crate) fn coprocessor_end(&self, bound: Duration) -> TransportError {
        let deadline = Instant::now() + bound;
        loop {
            if let Err(error) = self.coprocessor.status() {
                return error;
            }
            assert!(Instant::now() < deadline, "the coprocessor's engine still runs after {bound:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn see_all(names: &[String]) {
    see(&names.iter().map(String::as_str).collect::<Vec<_>>());
}

/// Restricts what both sides see in their device lists.
pub(crate) fn pair_seeing(
    devices: [&str; 2],
    seen: [&[&str]; 2],
    shape: impl Fn(SessionConfig) -> SessionConfig,
) -> Pair {
    let mut pair = Pair::new(devices, shape);
    pair.controller_sees = seen[0].iter().map(|name| (*name).to_owned()).collect();
    pair.coprocessor_sees = seen[1].iter().map(|name| (*name).to_owned()).collect();
    pair
}

/// Bytes that differ from round to round and from place to place.
pub(crate) fn payload(round: usize, length: usize) -> Vec<u8> {
    (0..length).map(|index| (index * 31 + round * 7 + index / 251) as u8).collect()
}

/// Asserts that nothing is open on the device, and that nothing was used that no longer existed.
pub(crate) fn assert_clean(device: &Installed) {
    assert_eq!(device.open_objects(), OpenObjects::default(), "left open; journal: {:#?}", tail(device));
    assert_eq!(device.violations(), Vec::<String>::new());
}

fn tail(device: &Installed) -> Vec<Entry> {
    let journal = device.journal();
    journal[journal.len().saturating_sub(30)..].to_vec()
}

/// Asserts that, since the journal was cleared, every object was released once and after what depends on it: queue pairs,
/// then completion queues and regions, then domains, then contexts.
pub(crate) fn assert_release_order(journal: &[Entry]) {
    let rank = |verb| match verb {
        Verb::DestroyQp => Some(0),
        Verb::DestroyCq | Verb::DeregMr => Some(1),
        Verb::DeallocPd => Some(2),
        Verb::CloseDevice => Some(3),
        _ => None,
    };
    let made = |verb| matches!(verb, Verb::CreateQp | Verb::CreateCq | Verb::RegMr | Verb::AllocPd | Verb::OpenDevice);
    let mut open: Vec<Entry> = Vec::new();
    let mut reached = 0;
    for entry in journal {
        if made(entry.verb) && entry.errno == 0 {
            open.push(*entry);
            reached = 0;
        }
        let Some(rank) = rank(entry.verb) else { continue };
        assert_eq!(entry.errno, 0, "{entry:?} failed: {journal:#?}");
        assert!(rank >= reached, "{entry:?} came too late: {journal:#?}");
        reached = rank;
        let index = open.iter().position(|made| made.object == entry.object).expect("released what was made, once");
        open.swap_remove(index);
    }
    assert_eq!(open, [], "not released: {journal:#?}");
}

/// Asserts that a text holds every part.
pub(crate) fn assert_says(error: &TransportError, parts: &[&str]) {
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "'{part}' is missing in: {text}");
    }
}
