//! What may be called when.

use crate::error::{Result, TransportError};

/// The states of a session, in the order in which they are reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum State {
    /// Made, or closed.
    New,
    /// After `connect`.
    Connected,
    /// After `alloc_memory`.
    Allocated,
    /// After `exchange_keys`.
    KeysExchanged,
    /// After `establish_channel`, and after `stop`.
    Established,
    /// Between `start` and `stop`.
    Running,
    /// After an error that the session cannot recover from.
    Failed,
}

impl State {
    /// For messages.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Connected => "connected",
            Self::Allocated => "allocated",
            Self::KeysExchanged => "keyed",
            Self::Established => "established and stopped",
            Self::Running => "running",
            Self::Failed => "failed",
        }
    }

    /// What has to come next in this state.
    fn next_call(self) -> &'static str {
        match self {
            Self::New => "connect comes first",
            Self::Connected => "alloc_memory comes next",
            Self::Allocated => "exchange_keys comes next",
            Self::KeysExchanged => "establish_channel comes next",
            Self::Established => "start comes next",
            Self::Running => "only rounds and stop may follow",
            Self::Failed => "stop it and connect anew",
        }
    }

    /// Refuses a call in any state but `wanted`.
    pub(crate) fn require(self, call: &'static str, wanted: Self) -> Result<()> {
        if self == wanted { Ok(()) } else { Err(self.refuse(call)) }
    }

    /// The error of a call that this state does not allow.
    pub(crate) fn refuse(self, call: &'static str) -> TransportError {
        TransportError::OutOfOrder { call, state: self.name(), missing: self.next_call() }
    }
}
