//! Request and reply between a **controller** and a **coprocessor** in the time that the wire takes.
//!
//! A quantum computer corrects its errors in a loop: every microsecond a controller measures a syndrome and needs the
//! answer of a decoder before the next one matters. This crate carries the syndrome there and the correction back: one
//! RDMA write out, one RDMA write back, or the same over shared memory, with no system call, no lock and no allocation in
//! between, and never a hang: every wait has a deadline, and a peer that stops, closes or dies is told apart.
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
//! - `capi`: the C interface that compiled PennyLane Catalyst programs call and the C++ plugin of its runtime, as
//!   `libcatalyst_transport.so` with the header `include/catalyst_transport.h`. See `docs/catalyst.md`.
//!
//! # Waits and their ends
//!
//! | wait | ends after | set by | error |
//! | --- | --- | --- | --- |
//! | coprocessor's `connect`: a client | 60 s | [`SessionConfig::accept_timeout`] | [`TransportError::Timeout`] |
//! | controller's `connect`: the coprocessor | 5 s | [`SessionConfig::handshake_timeout`] | [`TransportError::Timeout`] |
//! | each step of the bring-up | 5 s | [`SessionConfig::handshake_timeout`] | [`TransportError::Timeout`] |
//! | `collect` | 1 s | [`SessionConfig::reply_timeout`] | [`TransportError::Timeout`] |
//! | `collect`, peer's process gone | at once | | [`TransportError::PeerLost`] |
//! | `collect`, peer frozen, host or network gone | 5 s | [`SessionConfig::liveness`] | [`TransportError::PeerLost`] |
//! | RDMA write without acknowledgement | 0.5 s (on hardware up to four times that) | [`SessionConfig::liveness`], when shorter | [`TransportError::Completion`] |
//! | `stop`, idle or serving | some milliseconds | | |
//! | `stop`, coprocessor function does not return | 1 s | [`SessionConfig::stop_timeout`] | [`TransportError::Engine`] |
//! | host name look-up | the resolver's own bound | `resolv.conf` | [`TransportError::Timeout`] |

#[cfg(feature = "capi")]
mod capi;
mod config;
mod data_path;
mod devices;
mod engine;
mod error;
mod oob;
mod ring;
mod session;

pub use {
    config::{DataPathKind, SessionConfig},
    devices::{DeviceInfo, GidInfo, GidType, LinkLayer, PortInfo, PortState, devices},
    engine::real_time::{Outcome, RealTimeReport},
    engine::worker::{TakenRequest, WorkerRings, thread_launcher},
    session::controller::ControllerSession,
    session::coprocessor::{CoprocessorSession, FunctionConvention},
    session::function::{CoprocessorFunction, Echo, FunctionError, Invert, Request, Steane},
    session::link::Canceller,
    session::{ChannelDesc, ConnectInfo, LocalKey, MemKind, MemRegion, PeerRef, RemoteKey, TransportSession},
};

pub use error::{CompletionFailure, Errno, FunctionFailure, Result, TransportError, VerbsFailure};
