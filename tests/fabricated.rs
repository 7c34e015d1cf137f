//! Sessions over the software device: everything that neither the wire of a test machine nor soft-RoCE can be made to show.
#![cfg(feature = "fabricated")]

#[path = "fabricated/bring_up.rs"]
mod bring_up;
#[path = "fabricated/bursts.rs"]
mod bursts;
#[path = "fabricated/completions.rs"]
mod completions;
#[path = "fabricated/device.rs"]
mod device;
#[path = "fabricated/events.rs"]
mod events;
#[path = "fabricated/placement.rs"]
mod placement;
#[path = "fabricated/rounds.rs"]
mod rounds;
#[path = "fabricated/sessions.rs"]
mod sessions;
#[path = "fabricated/support.rs"]
mod support;
