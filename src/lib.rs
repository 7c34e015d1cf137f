//! Request and reply between a **controller** and a **coprocessor** in the time that the wire takes.
//!
//! A quantum computer corrects its errors in a loop: every microsecond a controller measures a syndrome and needs the
//! answer of a decoder before the next one matters. This crate carries the syndrome there and the correction back: one
//! RDMA write out, one RDMA write back, or the same over shared memory. In a round this crate makes no system call (but for
//! giving way where processors are fewer than spinning threads), takes no lock and allocates nothing. Every wait has a
//! deadline, and a peer that stops, one that closes and one that dies are told apart.
//!
//! ```text
//! application ─ write_data_slot ─▶ ring: frame ─ kick ─▶ data path: one WRITE ═▶ peer's region
//!                                                                                   │ engine polls the sequence word
//! application ◀─ collect: scatter ─ ring: poll ◀═ one WRITE :data path ◀─ ring: frame ◀─ coprocessor function
//! ```
//!
//! The whole of it in one program, over shared memory, with no network card:
//!
//! ```
//! use catalyst_transport::{ConnectInfo, ControllerSession, CoprocessorSession, SessionConfig, Steane, TransportSession};
//!
//! # fn main() -> catalyst_transport::Result<()> {
//! let mut coprocessor = CoprocessorSession::new(SessionConfig::new())?;
//! coprocessor.set_coprocessor_fn(Steane)?;
//! let port = coprocessor.listen(0)?.port();
//! let serving = std::thread::spawn(move || {
//!     coprocessor.open(&ConnectInfo::new("", port))?;
//!     coprocessor.start()?;
//!     Ok::<_, catalyst_transport::TransportError>(coprocessor)
//! });
//!
//! let mut controller = ControllerSession::new(SessionConfig::new())?;
//! controller.open(&ConnectInfo::new("localhost", port))?;
//! let _coprocessor = serving.join().expect("no panic")?;
//! controller.start()?;
//!
//! let syndrome = [0, 0, 1];
//! controller.write_data_slot(&syndrome, 0)?;
//! controller.kick(0)?;
//! let mut correction = [0; 8];
//! controller.collect(&mut [&mut correction])?;
//! assert_eq!(i64::from_le_bytes(correction), 6);
//! println!("qubit 6, after {} ns", controller.last_rtt_ns());
//! # Ok(())
//! # }
//! ```
//!
//! # Features
//! - `rdma` (default): the data path over libibverbs, which has to be installed. Without it the crate needs no system package,
//!   and shared memory remains.
//! - `fabricated`: a software device in place of libibverbs, for this crate's own tests.
//! - `capi`: the C interface that compiled PennyLane Catalyst programs call and the C++ plugin of its runtime, as
//!   `libcatalyst_transport.so` with the header `include/catalyst_transport.h`. See `docs/catalyst.md`.
//!
//! # Child processes
//!
//! A child that `fork` makes has none of the parent's threads and none of its registered memory. It may drop its copy of a
//! session, which does nothing to the parent's; it must not call anything else of it.
//!
//! # Who may connect
//!
//! Without a [`PreSharedKey`] on both sides ([`SessionConfig::pre_shared_key`]) whoever reaches the coprocessor's port is served; by
//! default it listens on loopback alone. With one, neither side shows the other how its memory is reached before both have proved
//! that they have the key. RDMA itself protects nothing: frames are neither encrypted nor authenticated, and who can send packets
//! on that network can forge them. See "What is not protected" in `docs/design.md`.
//!
//! # Waits and their ends
//!
//! | wait | ends after | set by | error |
//! | --- | --- | --- | --- |
//! | coprocessor's `connect`: a client | 60 s | [`SessionConfig::accept_timeout`] | [`TransportError::Timeout`] |
//! | controller's `connect`: the coprocessor | 5 s | [`SessionConfig::handshake_timeout`] | [`TransportError::Timeout`] |
//! | each step of the bring-up | 5 s | [`SessionConfig::handshake_timeout`] | [`TransportError::Timeout`] |
//! | Catalyst wire: coprocessor's `exchange_keys`, for each client that says nothing | 5 s; 1 s while another waits | [`SessionConfig::handshake_timeout`] | [`TransportError::Timeout`] |
//! | `collect` | 1 s | [`SessionConfig::reply_timeout`] | [`TransportError::Timeout`] |
//! | `collect`, peer's process gone | at once | | [`TransportError::PeerLost`] |
//! | `collect`, peer frozen, host or network gone, if its own time is not over before | 5 s | [`SessionConfig::liveness`] | [`TransportError::PeerLost`] |
//! | RDMA write without acknowledgement | 0.5 s (on hardware up to four times that) | [`SessionConfig::liveness`], when shorter | [`TransportError::Completion`] |
//! | `stop`, idle or serving | some milliseconds | | |
//! | `stop`, coprocessor function or worker does not return; with [`EngineMode::Thread`] also the controller's, while the device does not complete earlier writes | 5 s each | [`SessionConfig::stop_timeout`] | [`TransportError::Engine`] |
//! | `close` and drop, beyond their `stop` | some milliseconds; 0.2 s when the device or the peer does not answer | | |
//! | `write_data_slot`, `kick` and replies: the device does not complete earlier writes | 5 s | [`SessionConfig::liveness`] | [`TransportError::Timeout`] |
//! | the same on the coprocessor, when it is stopped or the peer ends | at once | | the end's own; what was not sent is served anew at the next `start` |
//! | `start`: the engine thread's report of its settings | 5 s | | none: the report is empty |
//! | `stop`: acknowledgement of the last writes | 5 ms | | none: a line in the log |
//! | telling the peer something (started, stopped, heartbeat) | 20 ms | | none: a line in the log |
//! | a failed step of the bring-up: the peer's reason for it | 50 ms | | this side's own |
//! | host name look-up | the resolver's own bound | `resolv.conf` | [`TransportError::Timeout`] |

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("catalyst-transport works on 64-bit Linux: it rests on memfd, eventfd and rings larger than 4 GiB");

#[cfg(feature = "capi")]
mod capi;
mod config;
mod data_path;
mod devices;
mod engine;
mod error;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
mod key;
mod oob;
mod random;
mod ring;
mod session;

pub use {
    config::{DataPathKind, EngineMode, SessionConfig, Wire},
    devices::{DeviceInfo, GidInfo, GidType, LinkLayer, PortInfo, PortState, devices},
    engine::real_time::{Outcome, RealTimeReport},
    engine::worker::{TakenRequest, WorkerRings, thread_launcher},
    key::PreSharedKey,
    session::controller::ControllerSession,
    session::coprocessor::{CoprocessorSession, FunctionConvention},
    session::function::{CoprocessorFunction, Echo, FunctionError, Invert, Request, Steane},
    session::link::Canceller,
    session::{ChannelDesc, ConnectInfo, LocalKey, MemKind, MemRegion, PeerRef, RemoteKey, TransportSession},
};

/// The software device of the feature `fabricated`, for tests.
#[cfg(feature = "fabricated")]
#[doc(hidden)]
pub mod fabricated {
    pub use crate::data_path::verbs::fabricated::{
        Entry, Gid, Installed, OpenObjects, Placement, Plan, Port, Verb, see,
    };
}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeDoctests;

pub use error::{CompletionFailure, Errno, FunctionFailure, Result, TransportError, VerbsFailure};
