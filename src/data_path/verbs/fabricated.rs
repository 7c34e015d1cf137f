//! A software RDMA device inside of the process that stands in for libibverbs, so that what soft-RoCE cannot show can be
//! tested: other link layers, partition keys, keys that differ, placement out of order, every error number of every verb,
//! every completion status, every asynchronous event.
//!
//! A test describes a device with a [`Plan`] and installs it; sessions with `SessionConfig::fabricated(true)` find it by
//! its name. All installed devices share one wire. The control verbs are those of [`table`]; `ibv_post_send` and
//! `ibv_poll_cq` come here through the operations in the context that `open_device` gives.
//!
//! The parts: [`plan`] what a device is told to be · [`guard`] what a test can see and change of an installed one ·
//! [`world`] all state, behind one lock · [`control`] devices, contexts, domains, completion queues · [`regions`]
//! registered memory · [`pairs`] queue pairs and their states · [`post`] work requests · [`wire`] their way to the target
//! · [`place`] bytes into memory · [`poll`] completions · [`events`] asynchronous events.

mod control;
mod errno;
mod events;
mod guard;
mod pairs;
mod place;
mod plan;
mod poll;
mod post;
mod regions;
#[cfg(test)]
mod tests;
mod verb;
mod wire;
mod world;

pub use guard::{Entry, Installed, OpenObjects};
pub use plan::{Gid, Placement, Plan, Port};
pub use verb::Verb;
pub use world::see;

use super::ffi::Table;

/// The control verbs of the software device.
pub(crate) fn table() -> &'static Table {
    static TABLE: Table = Table {
        get_device_list: control::get_device_list,
        free_device_list: control::free_device_list,
        get_device_name: control::get_device_name,
        open_device: control::open_device,
        close_device: control::close_device,
        query_device: control::query_device,
        query_port: control::query_port,
        query_gid: control::query_gid,
        query_pkey: control::query_pkey,
        alloc_pd: control::alloc_pd,
        dealloc_pd: control::dealloc_pd,
        reg_mr: regions::reg_mr,
        reg_dmabuf_mr: regions::reg_dmabuf_mr,
        dereg_mr: regions::dereg_mr,
        create_cq: poll::create_cq,
        destroy_cq: poll::destroy_cq,
        create_qp: pairs::create_qp,
        modify_qp: pairs::modify_qp,
        destroy_qp: pairs::destroy_qp,
        query_qp_data_in_order: pairs::query_qp_data_in_order,
        get_async_event: events::get_async_event,
        ack_async_event: events::ack_async_event,
        gid_attributes: control::gid_attributes,
    };
    &TABLE
}
