//! Rounds on a thread of their own.

use super::super::ChannelDesc;
use super::super::link::Movement;
use super::{ControllerSession, State};
use crate::config::EngineMode;
use crate::engine::relay::{Relay, Running};
use crate::engine::spin::Spinner;
use crate::error::{Result, TransportError};

impl ControllerSession {
    /// What the calls work with: the way to the peer itself, or that to the thread that carries frames on.
    pub(super) fn near(&mut self, movement: Movement, desc: &ChannelDesc) -> Result<Movement> {
        if self.link.config.engine_mode == EngineMode::Caller {
            return Ok(movement);
        }
        let Movement { path, reader, writer } = movement;
        // The data path is gone with an error: there is nothing left to go on with.
        let (relay, near) = Relay::between(path, reader, writer, desc, self.link.peer.clone())
            .inspect_err(|_| self.link.state = State::Failed)?;
        self.relay = Some(Box::new(relay));
        Ok(Movement { path: near.path, reader: near.reader, writer: near.writer })
    }

    pub(super) fn start_engine(&mut self, relay: Box<Relay>) -> Result<()> {
        match Running::start(*relay, &self.link.config) {
            Ok(engine) => {
                self.report = engine.report().clone();
                self.engine = Some(engine);
                self.rounds.as_mut().expect("established").spinner = Some(Spinner::new(false));
                Ok(())
            }
            Err((error, relay)) => {
                self.relay = Some(relay);
                Err(error)
            }
        }
    }

    /// Ends the thread, if it runs, after all that was kicked has been sent.
    pub(super) fn stop_engine(&mut self) -> Result<()> {
        let Some(engine) = &mut self.engine else { return Ok(()) };
        let relay = engine.stop(self.link.config.stop_timeout)?;
        let failure = engine.failure().cloned();
        self.engine = None;
        self.relay = Some(Box::new(relay));
        // One that has ended by itself does not run again; a peer that has ended says so itself.
        if let Some(error) = failure
            && self.link.peer.obstacle("stop").is_none_or(|obstacle| obstacle.is_recoverable())
        {
            self.fail(error);
        }
        Ok(())
    }

    /// Why waiting is in vain; `None` while it is not. What the peer has sent before is there to be polled then.
    pub(super) fn obstacle(&self) -> Option<TransportError> {
        let Some(engine) = &self.engine else { return self.link.peer.obstacle("collect") };
        if let Some(error) = engine.failure() {
            return Some(error.clone());
        }
        let obstacle = self.link.peer.obstacle("collect")?;
        engine.settle();
        Some(obstacle)
    }
}
