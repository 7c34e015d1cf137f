//! The out-of-band channel: what two peers tell each other over TCP, beside the data path.
//!
//! It knows TCP, deadlines and messages, and neither verbs nor sessions, so that all of it is tested without a
//! device. From the bottom up:
//!
//! - [`message`]: the native messages and their bytes, as `docs/wire-protocol.md` lays them down;
//! - [`decoder`]: bytes in, messages out, in a buffer whose size no peer can change;
//! - [`seal`]: what tells genuine messages where the two sides have a pre-shared key;
//! - [`channel`]: messages over one connection, each wait with a deadline, each end of the connection by its name;
//! - [`listener`] and [`dial`]: how a connection comes about, from either side;
//! - [`catalyst_message`] and [`catalyst_channel`]: the one message of the Catalyst wire, and the connection that carries
//!   nothing else.
//!
//! Nothing here starts a thread. What waits does so in `poll`, with a deadline, or pauses for some milliseconds
//! before it dials again. The one exception is the look-up of a host *name*, which the C library does and bounds
//! itself (`timeout` and `attempts` in `resolv.conf(5)`); numeric addresses never go there.

pub(crate) mod catalyst_channel;
pub(crate) mod catalyst_message;
pub(crate) mod channel;
pub(crate) mod decoder;
pub(crate) mod dial;
pub(crate) mod listener;
pub(crate) mod message;
pub(crate) mod seal;
mod wait;

#[cfg(test)]
pub(crate) mod test_support;

pub(crate) use catalyst_channel::{CatalystChannel, Patience};
pub(crate) use catalyst_message::{CatalystMessage, PairEnd};
pub(crate) use channel::{Channel, Liveness};
pub(crate) use dial::{connect, connect_catalyst};
pub(crate) use listener::{Acceptance, Listener};
pub(crate) use message::{CheckKind, DataPathCode, Endpoint, Geometry, Hello, Keys, Kind, Message, Proposal, Role};
