//! The connection of the Catalyst wire: one message each way, and then silence until its end.
//!
//! Nothing but the end tells that the peer has stopped, closed or died, and nothing tells these apart. The loss of its
//! host is noticed by the kernel's probes ([`Liveness`]), as nothing may be sent.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::catalyst_message::{CatalystMessage, LENGTH, Problem, recognise, refuse_native};
use super::channel::{Liveness, broken, canonical};
use super::wait::wait;
use crate::error::{Result, TransportError};

/// How long a client that says nothing is waited for while another one waits to be served.
const RIVAL_PATIENCE: Duration = Duration::from_secs(1);

/// How long to wait for the peer's message.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patience<'a> {
    /// When to give up.
    pub(crate) deadline: Instant,
    /// A listening socket: when another client waits there, the wait is cut to a second.
    pub(crate) rivals: Option<BorrowedFd<'a>>,
    /// Ends the wait as soon as it is readable. It is not read from.
    pub(crate) cancel: Option<BorrowedFd<'a>>,
}

impl Patience<'_> {
    /// Until this moment, whatever happens.
    pub(crate) fn until(deadline: Instant) -> Self {
        Self { deadline, rivals: None, cancel: None }
    }
}

/// A connection to a peer that speaks the Catalyst wire format.
#[derive(Debug)]
pub(crate) struct CatalystChannel {
    stream: TcpStream,
    peer: SocketAddr,
    local: SocketAddr,
    bound: Duration,
}

impl CatalystChannel {
    /// A channel over a connected stream.
    ///
    /// # Errors
    ///
    /// [`TransportError::System`] if the socket cannot be set up.
    pub(super) fn new(stream: TcpStream, peer: SocketAddr, liveness: Liveness) -> Result<Self> {
        let failed =
            |call| move |error: io::Error| TransportError::system(call, format!("the socket to {peer}"), error);
        stream.set_nonblocking(true).map_err(failed("ioctl(FIONBIO)"))?;
        liveness.apply(&stream).map_err(failed("setsockopt"))?;
        let local = canonical(stream.local_addr().map_err(failed("getsockname"))?);
        Ok(Self { stream, peer, local, bound: liveness.bound })
    }

    /// The peer's address.
    pub(crate) fn peer_addr(&self) -> SocketAddr {
        self.peer
    }

    /// The address at which the peer sees us.
    pub(crate) fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// The same socket once more, for another thread to poll.
    ///
    /// # Errors
    ///
    /// [`TransportError::System`] with `EMFILE` if the process may open no more files.
    pub(crate) fn try_clone_stream(&self) -> Result<TcpStream> {
        self.stream.try_clone().map_err(|error| {
            TransportError::system("fcntl(F_DUPFD_CLOEXEC)", format!("the socket to {}", self.peer), error)
        })
    }

    /// Ends the connection, whoever else holds its socket: all that a side can do to say that it goes no further.
    pub(crate) fn hang_up(&self) {
        if let Err(error) = self.stream.shutdown(Shutdown::Both) {
            tracing::debug!(%error, "the connection had ended already");
        }
    }

    /// Sends our message.
    ///
    /// # Errors
    ///
    /// [`TransportError::Timeout`] if the peer does not take it until the deadline, [`TransportError::PeerLost`] if the
    /// connection has ended.
    pub(crate) fn send(&mut self, message: &CatalystMessage, deadline: Instant, stage: &'static str) -> Result<()> {
        let began = Instant::now();
        let bytes = message.encode();
        let mut sent = 0;
        while sent < LENGTH {
            match self.stream.write(&bytes[sent..]) {
                Ok(written) => sent += written,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if !self.ready(&mut [PollFd::new(&self.stream, PollFlags::OUT)], deadline)? {
                        let hint = format!("{} takes no data: its process is stuck or its host is gone", self.peer);
                        return Err(TransportError::Timeout { stage, waited: began.elapsed(), hint });
                    }
                }
                Err(error) => return Err(broken(self.peer, self.bound, "send", &error, stage)),
            }
        }
        Ok(())
    }

    /// Waits for the peer's message.
    ///
    /// # Errors
    ///
    /// - [`TransportError::Protocol`] for what is no such message; a native peer is named as such at its first bytes;
    /// - [`TransportError::Timeout`] at the deadline, [`TransportError::PeerLost`] if the connection ends before;
    /// - [`TransportError::Engine`] when the wait is cancelled.
    pub(crate) fn receive(&mut self, patience: &Patience<'_>, stage: &'static str) -> Result<CatalystMessage> {
        let began = Instant::now();
        let mut deadline = patience.deadline;
        let mut rivals = patience.rivals;
        let (mut bytes, mut there) = ([0; LENGTH], 0);
        let problem = |problem: Problem, peer: SocketAddr| TransportError::Protocol {
            stage,
            peer: peer.to_string(),
            problem: problem.to_string(),
        };
        loop {
            // No more than the message: what follows it is for `look` to find.
            match self.stream.read(&mut bytes[there..]) {
                Ok(0) => return Err(TransportError::PeerLost { stage, cause: self.ended_after(there) }),
                Ok(read) => {
                    there += read;
                    refuse_native(&bytes[..there]).map_err(|error| problem(error, self.peer))?;
                    if there == LENGTH || recognise(&bytes[..there]) == Some(false) {
                        return CatalystMessage::decode(&bytes).map_err(|error| problem(error, self.peer));
                    }
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(broken(self.peer, self.bound, "recv", &error, stage)),
            }
            if Instant::now() >= deadline {
                return Err(TransportError::Timeout { stage, waited: began.elapsed(), hint: self.silence(there) });
            }
            let mut waits = vec![PollFd::new(&self.stream, PollFlags::IN)];
            waits.extend(patience.cancel.map(|cancel| PollFd::from_borrowed_fd(cancel, PollFlags::IN)));
            waits.extend(rivals.map(|listener| PollFd::from_borrowed_fd(listener, PollFlags::IN)));
            self.ready(&mut waits, deadline)?;
            let seen: Vec<bool> = waits.iter().map(|wait| !wait.revents().is_empty()).collect();
            if patience.cancel.is_some() && seen[1] {
                return Err(TransportError::Engine { problem: format!("{stage} was cancelled") });
            }
            if rivals.is_some() && seen[seen.len() - 1] {
                deadline = deadline.min(began + RIVAL_PATIENCE);
                rivals = None;
            }
        }
    }

    /// Looks whether the connection still stands and is as silent as it has to be; never blocks.
    ///
    /// # Errors
    ///
    /// [`TransportError::PeerLost`] at its end, [`TransportError::Protocol`] for any byte.
    pub(crate) fn look(&mut self, stage: &'static str) -> Result<()> {
        let mut byte = [0; 16];
        loop {
            return match self.stream.read(&mut byte) {
                Ok(0) => Err(TransportError::PeerLost {
                    stage,
                    cause: format!(
                        "the peer closed the connection ({}): it ended its session or its process, which the Catalyst wire \
                         does not tell apart",
                        self.peer
                    ),
                }),
                Ok(count) => Err(TransportError::Protocol {
                    stage,
                    peer: self.peer.to_string(),
                    problem: format!(
                        "it sent {} after its message, where the Catalyst wire carries nothing more",
                        byte[..count].escape_ascii()
                    ),
                }),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(()),
                Err(error) => Err(broken(self.peer, self.bound, "recv", &error, stage)),
            };
        }
    }

    fn ended_after(&self, there: usize) -> String {
        let hint = if there == 0 {
            ": it may be busy with another peer, or speak the native wire format (wire=native)"
        } else {
            ""
        };
        format!("{} closed the connection after {there} of {LENGTH} bytes of its message{hint}", self.peer)
    }

    fn silence(&self, there: usize) -> String {
        let peer = self.peer;
        if there == 0 {
            format!(
                "{peer} has sent nothing: its process may be stuck or serve another peer, or it speaks the native wire \
                 format (wire=native), in which the controller speaks first"
            )
        } else {
            format!("{peer} has sent only {there} of {LENGTH} bytes of its message")
        }
    }

    fn ready(&self, waits: &mut [PollFd<'_>], deadline: Instant) -> Result<bool> {
        wait(waits, Some(deadline))
            .map_err(|errno| TransportError::system("poll", format!("the connection to {}", self.peer), errno))
    }
}

#[cfg(test)]
mod tests;
