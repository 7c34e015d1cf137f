//! The C interface that compiled PennyLane Catalyst programs call, and the C++ plugin of its runtime.
//!
//! Translation only: what a call does is the session's. From the outside in:
//!
//! - [`c_interface`], [`call_entry`], [`wrapper_entry`]: the exported symbols in their three calling conventions, of
//!   which `include/catalyst_transport.h` is the documentation;
//! - [`plugin`]: the two factories and the C++ objects that they make;
//! - [`interface`]: the twenty functions on values of this language;
//! - [`registry`]: which handles, keys and tokens there are; [`handle`]: one session behind its lock;
//! - [`backend`], [`function`], [`launcher`], [`slots`], [`failure`]: the small translations.
//!
//! What holds everywhere here: a handle is a number that is looked up and never a pointer that is followed; a panic ends
//! at [`failure::guard`]; whatever fails is one line on stderr, because generated code ignores return codes.

mod backend;
mod benchmark;
mod c_interface;
mod call_entry;
mod entry;
mod failure;
mod function;
mod handle;
mod interface;
mod launcher;
mod plugin;
mod registry;
mod slots;
mod wrapper_entry;
