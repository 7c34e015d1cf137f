//! What can go wrong, who is told, and what to do about it.
//!
//! Every message says which call failed, on what, and the likely remedy. Messages are lower case and
//! without a full stop, so that they can stand inside another sentence. Errors are [`Clone`], because the
//! first error of a session is kept and given to every later caller.

use std::fmt;
use std::time::Duration;

/// The result of every call of this crate.
pub type Result<T, E = TransportError> = std::result::Result<T, E>;

/// Why a call failed.
///
/// Four questions sort them: was the call wrong ([`OutOfOrder`](Self::OutOfOrder), [`Invalid`](Self::Invalid),
/// [`WindowFull`](Self::WindowFull), [`ReplyTooLarge`](Self::ReplyTooLarge), [`NothingInFlight`](Self::NothingInFlight)); did time
/// run out ([`Timeout`](Self::Timeout)); did the peer end it ([`PeerStopped`](Self::PeerStopped), [`PeerClosed`](Self::PeerClosed),
/// [`PeerLost`](Self::PeerLost), [`PeerRefused`](Self::PeerRefused), [`Protocol`](Self::Protocol), [`FunctionFailed`](Self::FunctionFailed));
/// or did this machine ([`System`](Self::System), [`Verbs`](Self::Verbs), [`Completion`](Self::Completion), [`Device`](Self::Device),
/// [`Unsupported`](Self::Unsupported), [`Engine`](Self::Engine)).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// A method was called in a state that does not allow it. Nothing has changed.
    #[error("{call} was called while the session is {state}: {missing}")]
    OutOfOrder {
        /// The method that was called.
        call: &'static str,
        /// The state that the session is in.
        state: &'static str,
        /// What has to be done first.
        missing: &'static str,
    },
    /// An argument or a setting has a value that cannot be used. Nothing has changed.
    #[error("{what}: {problem}")]
    Invalid {
        /// The argument or setting.
        what: String,
        /// What is wrong with it, and what would be right.
        problem: String,
    },
    /// As many rounds are in flight as the ring has slots. Collect one, then try again.
    #[error("{in_flight} rounds are in flight and the ring holds {depth}: collect a reply before the next kick")]
    WindowFull {
        /// Rounds kicked and not yet collected.
        in_flight: u32,
        /// Slots of the ring.
        depth: u32,
    },
    /// `collect` was called with no round in flight.
    #[error("no round is in flight: kick one before collecting its reply")]
    NothingInFlight,
    /// The buffers given to `collect` hold less than the reply. The reply is kept: collect it again with more room.
    #[error(
        "the reply has {length} bytes and the buffers hold {capacity}: the reply is kept, collect it with larger buffers"
    )]
    ReplyTooLarge {
        /// Bytes of the reply.
        length: usize,
        /// Bytes that all buffers hold together.
        capacity: usize,
    },
    /// A wait ended at its deadline. In `collect` one round was given up and the session goes on; in the bring-up the
    /// session was closed.
    #[error("{stage}: nothing within {waited:?} ({hint})")]
    Timeout {
        /// What was waited for.
        stage: &'static str,
        /// How long.
        waited: Duration,
        /// The likely cause and remedy.
        hint: String,
    },
    /// The peer said that it has stopped. It may start again.
    #[error("{stage}: the peer has stopped its engine; it answers again after its next start")]
    PeerStopped {
        /// What was being done.
        stage: &'static str,
    },
    /// The peer said goodbye and closed the session in good order.
    #[error("{stage}: the peer closed the session; connect again for a new one")]
    PeerClosed {
        /// What was being done.
        stage: &'static str,
    },
    /// The peer is gone without a goodbye: killed, crashed, or cut off.
    #[error("{stage}: peer lost: {cause}")]
    PeerLost {
        /// What was being done.
        stage: &'static str,
        /// How its loss was noticed.
        cause: String,
    },
    /// The peer refused and said why.
    #[error("{stage}: the peer refused: {reason}")]
    PeerRefused {
        /// What was being done.
        stage: &'static str,
        /// The peer's words.
        reason: String,
    },
    /// The peer sent something that the protocol does not allow.
    #[error("{stage}: protocol error from {peer}: {problem}")]
    Protocol {
        /// What was being done.
        stage: &'static str,
        /// The peer's address.
        peer: String,
        /// What was received and what was expected.
        problem: String,
    },
    /// The coprocessor function failed in this round. The session goes on.
    #[error("round {sequence}: the coprocessor function for decoder {decoder_id} {failure}: {message}")]
    FunctionFailed {
        /// Sequence number of the round.
        sequence: u32,
        /// Decoder id of the request.
        decoder_id: u32,
        /// How it failed.
        failure: FunctionFailure,
        /// Its own words, as far as the reply's capacity holds them.
        message: String,
    },
    /// A system call failed.
    #[error("{call} on {what} failed with {errno}{}", remedy_text(.remedy))]
    System {
        /// The system call.
        call: &'static str,
        /// What it was applied to.
        what: String,
        /// Its error number.
        errno: Errno,
        /// What to do about it; may be empty.
        remedy: String,
    },
    /// A verb failed.
    #[error("{0}")]
    Verbs(Box<VerbsFailure>),
    /// A work request completed with an error; the queue pair is unusable from then on.
    #[error("{0}")]
    Completion(Box<CompletionFailure>),
    /// No device, port or GID fits what was asked for.
    #[error("{problem}{}", remedy_text(.remedy))]
    Device {
        /// What is missing.
        problem: String,
        /// What is there, and what to do.
        remedy: String,
    },
    /// This build, device or data path cannot do what was asked.
    #[error("{what} is not supported: {reason}")]
    Unsupported {
        /// What was asked for.
        what: String,
        /// Why not, and what can be done instead.
        reason: String,
    },
    /// The engine thread or a worker has ended, cannot be launched, or cannot be waited for; or a wait for a client was
    /// cancelled.
    #[error("engine: {problem}")]
    Engine {
        /// What happened.
        problem: String,
    },
}

impl TransportError {
    /// Whether the session may go on after this error: it concerned one call or one round.
    ///
    /// After any other error the session has failed, and the next step is `stop`, then `connect`.
    #[must_use]
    pub fn is_recoverable(&self) -> bool {
        matches!(
            self,
            Self::OutOfOrder { .. }
                | Self::Invalid { .. }
                | Self::WindowFull { .. }
                | Self::NothingInFlight
                | Self::ReplyTooLarge { .. }
                | Self::Timeout { .. }
                | Self::PeerStopped { .. }
                | Self::FunctionFailed { .. }
                | Self::Unsupported { .. }
        )
    }

    pub(crate) fn invalid(what: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Invalid { what: what.into(), problem: problem.into() }
    }

    pub(crate) fn system(call: &'static str, what: impl Into<String>, errno: impl Into<Errno>) -> Self {
        Self::System { call, what: what.into(), errno: errno.into(), remedy: String::new() }
    }

    pub(crate) fn with_remedy(mut self, text: impl Into<String>) -> Self {
        if let Self::System { remedy, .. } | Self::Device { remedy, .. } = &mut self {
            *remedy = text.into();
        }
        self
    }
}

/// How a coprocessor function failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FunctionFailure {
    /// It returned an error.
    Failed,
    /// It panicked; the panic was caught.
    Panicked,
    /// It claimed more reply bytes than the reply holds.
    TooLarge,
    /// No function is registered for the decoder id.
    UnknownDecoder,
    /// A status that this version does not know.
    Unknown(u8),
}

impl FunctionFailure {
    /// The status byte that carries this failure in a frame (`docs/wire-protocol.md`).
    pub(crate) fn status(self) -> u8 {
        match self {
            Self::Failed => 1,
            Self::Panicked => 2,
            Self::TooLarge => 3,
            Self::UnknownDecoder => 4,
            Self::Unknown(status) => status,
        }
    }

    /// The failure behind a non-zero status byte.
    pub(crate) fn from_status(status: u8) -> Self {
        match status {
            1 => Self::Failed,
            2 => Self::Panicked,
            3 => Self::TooLarge,
            4 => Self::UnknownDecoder,
            other => Self::Unknown(other),
        }
    }
}

impl fmt::Display for FunctionFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed => f.write_str("failed"),
            Self::Panicked => f.write_str("panicked"),
            Self::TooLarge => f.write_str("returned more than the reply holds"),
            Self::UnknownDecoder => f.write_str("does not exist"),
            Self::Unknown(status) => write!(f, "failed with the unknown status {status}"),
        }
    }
}

/// A verb that failed, with all that is known of the place.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct VerbsFailure {
    /// The verb, as libibverbs names it.
    pub verb: &'static str,
    /// Its error number, taken from its return value or from `errno`, as the verb's manual says.
    pub errno: Errno,
    /// Device name.
    pub device: String,
    /// Port number; 0 where none is involved yet.
    pub port: u8,
    /// Index and value of the GID in use, where there is one.
    pub gid: String,
    /// The peer's address or queue pair, where there is one.
    pub peer: String,
    /// What was being done, with the values that went in.
    pub detail: String,
    /// What to do about it; may be empty.
    pub remedy: String,
}

impl fmt::Display for VerbsFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {}", self.verb, self.device)?;
        if self.port != 0 {
            write!(f, " port {}", self.port)?;
        }
        if !self.gid.is_empty() {
            write!(f, " GID {}", self.gid)?;
        }
        if !self.peer.is_empty() {
            write!(f, " to {}", self.peer)?;
        }
        write!(f, " failed with {}", self.errno)?;
        if !self.detail.is_empty() {
            write!(f, " while {}", self.detail)?;
        }
        f.write_str(&remedy_text(&self.remedy))
    }
}

/// A work completion with an error status.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CompletionFailure {
    /// The status (`ibv_wc_status`).
    pub status: u32,
    /// Its name in the verbs interface.
    pub name: &'static str,
    /// The vendor's own number.
    pub vendor_error: u32,
    /// What was being done.
    pub stage: &'static str,
    /// The likely cause and remedy at this stage.
    pub cause: &'static str,
    /// Both ends: device, port, GID, queue pairs, MTU, peer.
    pub place: String,
}

impl fmt::Display for CompletionFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: write completed with status {} {} (vendor {:#x}) on {}: {}",
            self.stage, self.status, self.name, self.vendor_error, self.place, self.cause
        )
    }
}

/// An error number of the operating system, shown with its name and meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Errno(pub i32);

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The standard library's text already ends in "(os error N)".
        write!(f, "{}", std::io::Error::from_raw_os_error(self.0))
    }
}

impl From<rustix::io::Errno> for Errno {
    fn from(errno: rustix::io::Errno) -> Self {
        Self(errno.raw_os_error())
    }
}

impl From<&std::io::Error> for Errno {
    fn from(error: &std::io::Error) -> Self {
        Self(error.raw_os_error().unwrap_or(libc::EIO))
    }
}

impl From<std::io::Error> for Errno {
    fn from(error: std::io::Error) -> Self {
        Self::from(&error)
    }
}

fn remedy_text(remedy: &str) -> String {
    if remedy.is_empty() { String::new() } else { format!(": {remedy}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_place_and_remedy() {
        let error = TransportError::Verbs(Box::new(VerbsFailure {
            verb: "ibv_reg_mr",
            errno: Errno(libc::ENOMEM),
            device: "rxe0".into(),
            port: 1,
            gid: "1 (::ffff:10.9.0.1)".into(),
            peer: String::new(),
            detail: "registering 4096 bytes".into(),
            remedy: "raise the memlock limit".into(),
        }));
        let text = error.to_string();
        for part in ["ibv_reg_mr", "rxe0", "port 1", "10.9.0.1", "os error 12", "4096", "memlock"] {
            assert!(text.contains(part), "{part} is missing in: {text}");
        }
    }

    #[test]
    fn status_bytes_survive_the_round_trip() {
        for status in 1..=u8::MAX {
            assert_eq!(FunctionFailure::from_status(status).status(), status);
        }
    }
}
