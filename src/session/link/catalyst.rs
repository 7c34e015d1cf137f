//! The steps of the bring-up on the Catalyst wire: a connection, one message each way at `exchange_keys`, and no probe.

use std::os::fd::AsFd;
use std::time::Instant;

use super::{Line, Link, Movement};
use crate::data_path::DataPath;
use crate::error::{Result, TransportError};
use crate::oob::{self, CatalystChannel, CatalystMessage, DataPathCode, PairEnd, Patience, Role};
use crate::ring::{Check, FrameReader, FrameWriter, Geometry};
use crate::session::lifecycle::State;
use crate::session::{ChannelDesc, ConnectInfo, MemRegion, PeerRef, RemoteKey};

/// Clients that one `exchange_keys` may go through before it gives up: as many as the kernel keeps waiting.
const MOST_CLIENTS: usize = 128;
/// Frames of this wire have no check.
const NO_CHECK: Check = Check::Session(0);

impl Link {
    /// The connection, and queue pairs in INIT.
    pub(super) fn connect_catalyst(&mut self, info: &ConnectInfo) -> Result<()> {
        let channel = match self.role {
            Role::Controller => {
                let deadline = Instant::now() + self.config.handshake_timeout;
                let from = self.dialling_from();
                oob::connect_catalyst(&info.peer, info.oob_port, from, deadline, self.liveness())?
            }
            Role::Coprocessor => {
                self.listen(info.oob_port)?;
                self.accept_with(self.accept_deadline(), |listener, how| listener.accept_any(how))?
            }
        };
        let local = channel.local_addr().ip();
        let peer_name = channel.peer_addr().to_string();
        self.catalyst = Some(channel);
        // A peer may fill the ring, however few rounds this side wants in flight.
        let slots = Geometry::catalyst(1).slots();
        self.path = Some(DataPath::open(DataPathCode::Verbs, self.role, &self.config, slots, local)?);
        self.connected(self.config.channel.clone(), &peer_name);
        Ok(())
    }

    /// The message each way, the coprocessor's first; then the queue pairs to RTS.
    pub(super) fn exchange_catalyst(&mut self, local: &MemRegion) -> Result<PeerRef> {
        let ring = Geometry::catalyst(1);
        if local.size < ring.region_bytes() {
            return Err(TransportError::invalid(
                "local region",
                format!("has {} bytes and the Catalyst wire takes {} for granted", local.size, ring.region_bytes()),
            ));
        }
        let theirs = match self.role {
            Role::Controller => self.ask_the_coprocessor(local)?,
            Role::Coprocessor => self.answer_a_client(local)?,
        };
        let remote = PeerRef {
            rkey: RemoteKey(theirs.rkey),
            remote_addr: theirs.address,
            size: oob::catalyst_message::REGION_BYTES,
        };
        self.path.as_mut().expect("connected").attach(&remote, Instant::now())?;
        self.remote = Some(remote);
        self.state = State::KeysExchanged;
        Ok(remote)
    }

    fn ask_the_coprocessor(&mut self, local: &MemRegion) -> Result<CatalystMessage> {
        let deadline = Instant::now() + self.config.handshake_timeout;
        let own = self.own_message(local);
        let channel = self.catalyst.as_mut().expect("connected");
        let patience = Patience::until(deadline);
        let theirs = channel.receive(&patience, "exchange_keys: waiting for the coprocessor's message")?;
        // Ready before the answer is out: it is the answer that lets the coprocessor begin.
        self.join(&theirs)?;
        let channel = self.catalyst.as_mut().expect("connected");
        channel.send(&own, deadline, "exchange_keys: answering")?;
        Ok(theirs)
    }

    /// Speaks to the client that has come. One that does not answer, or not properly, is dropped, and the next one has
    /// its turn; when none has come by the deadline the last one's error is returned.
    fn answer_a_client(&mut self, local: &MemRegion) -> Result<CatalystMessage> {
        let deadline = Some(Instant::now() + self.config.handshake_timeout);
        for _ in 0..MOST_CLIENTS {
            let error = match self.speak_to_the_client(local) {
                Err(error) if !matches!(error, TransportError::Engine { .. }) => error,
                Err(cancelled) => {
                    // One cancellation ends one wait.
                    let _ = rustix::io::read(&*self.cancel, &mut [0; 8]);
                    return Err(cancelled);
                }
                answered => return answered,
            };
            tracing::warn!(%error, "a client was dropped");
            // Its connection ends before the next one's wait.
            self.catalyst = None;
            self.path.as_mut().expect("connected").renew_pairs()?;
            match self.accept_with(deadline, |listener, how| listener.accept_any(how)) {
                Ok(next) => self.catalyst = Some(next),
                Err(TransportError::Timeout { .. }) => return Err(error),
                Err(other) => return Err(other),
            }
        }
        Err(TransportError::Timeout {
            stage: "exchange_keys: waiting for a client's message",
            waited: self.config.handshake_timeout,
            hint: format!("{MOST_CLIENTS} clients were connected and none of them answered"),
        })
    }

    fn speak_to_the_client(&mut self, local: &MemRegion) -> Result<CatalystMessage> {
        let deadline = Instant::now() + self.config.handshake_timeout;
        let own = self.own_message(local);
        let channel: &mut CatalystChannel = self.catalyst.as_mut().expect("connected");
        channel.send(&own, deadline, "exchange_keys: sending ours")?;
        let patience =
            Patience { deadline, rivals: self.listener.as_ref().map(AsFd::as_fd), cancel: Some(self.cancel.as_fd()) };
        let theirs = channel.receive(&patience, "exchange_keys: waiting for the controller's message")?;
        self.join(&theirs)?;
        Ok(theirs)
    }

    /// What the peer has to know. The region is made ready before, since frames may come as soon as the peer knows it.
    fn own_message(&self, local: &MemRegion) -> CatalystMessage {
        let path = self.path.as_ref().expect("connected");
        let memory = path.incoming();
        let ring = Geometry::catalyst(1);
        // Fresh memory is zero, but that of a device need not be.
        memory.copy_in(0, &vec![0; ring.ring_bytes()]);
        FrameReader::new(memory, ring, NO_CHECK, self.config.first_sequence).prepare();
        let (sending, receiving, mtu) = path.pair_ends();
        let (forward, backward) = self.by_direction(sending, receiving);
        CatalystMessage { forward, backward, address: local.addr, rkey: local.rkey.0, mtu }
    }

    fn join(&mut self, theirs: &CatalystMessage) -> Result<()> {
        let (sending, receiving) = self.by_direction(theirs.forward, theirs.backward);
        let peer_name = self.catalyst.as_ref().expect("connected").peer_addr().to_string();
        self.path.as_mut().expect("connected").join_pairs(&sending, &receiving, theirs.mtu, &peer_name)
    }

    /// Sending and receiving as forward and backward, or the other way round: the controller sends forward, the
    /// coprocessor backward.
    fn by_direction(&self, first: PairEnd, second: PairEnd) -> (PairEnd, PairEnd) {
        match self.role {
            Role::Controller => (first, second),
            Role::Coprocessor => (second, first),
        }
    }

    /// Nothing is exchanged: the geometry is the wire's own.
    pub(super) fn establish_catalyst(
        &mut self,
        desc: &ChannelDesc,
        incoming: Geometry,
        outgoing: Geometry,
    ) -> Result<Movement> {
        let path = self.path.as_mut().expect("connected");
        path.establish(outgoing)?;
        let first = self.config.first_sequence;
        let reader = FrameReader::new(path.incoming(), incoming, NO_CHECK, first);
        let writer = FrameWriter::new(outgoing, NO_CHECK, first);
        let channel = self.catalyst.take().expect("connected");
        self.established(desc, Line::Catalyst(channel))?;
        Ok(Movement { path: self.path.take().expect("connected"), reader, writer })
    }
}
