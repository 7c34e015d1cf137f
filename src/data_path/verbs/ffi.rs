//! All that touches `rdma-sys`: the verbs' types, their numbers, and a table of the verbs that are called.
//!
//! The table exists so that a software device can stand in for libibverbs in tests. Only control verbs go through it;
//! post and poll are inline functions of the verbs interface that call the context's own operations, on a fabricated
//! device as on a real one.
//!
//! Facts about the binding that the code here rests on (`rdma-sys` 0.3): it never finds the extended verbs on 64-bit
//! systems, so none is used; its `ibv_query_port` fills only the front of the structure, so the structure is zeroed first
//! and its tail not read; its `ibv_event_type` is a Rust enumeration that newer libraries would overflow, so the
//! event call is declared here with an integer.

use std::os::raw::{c_char, c_int, c_uint, c_void};

pub(crate) use rdma_sys::{
    ibv_access_flags, ibv_context, ibv_cq, ibv_device, ibv_device_attr, ibv_gid, ibv_mr, ibv_pd, ibv_poll_cq,
    ibv_port_attr, ibv_post_send, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_init_attr, ibv_qp_state, ibv_qp_type,
    ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wc, ibv_wr_opcode, rdma_t,
};

/// What the fabricated device has to build beyond that.
#[cfg(feature = "fabricated")]
pub(crate) use rdma_sys::{_compat_ibv_port_attr, ibv_comp_channel, ibv_wc_opcode, ibv_wc_status};

/// `IBV_LINK_LAYER_INFINIBAND`.
pub(crate) const LINK_LAYER_INFINIBAND: u8 = 1;
/// `IBV_LINK_LAYER_ETHERNET`.
pub(crate) const LINK_LAYER_ETHERNET: u8 = 2;

/// An asynchronous event with its number as an integer.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AsyncEvent {
    /// A union of pointers and of the port number.
    pub(crate) element: *mut c_void,
    /// `ibv_event_type`.
    pub(crate) event_type: c_int,
}

/// Numbers of `ibv_event_type` that the data path acts on.
pub(crate) mod event {
    use std::os::raw::c_int;
    /// The completion queue overran.
    pub(crate) const CQ_ERR: c_int = 0;
    /// The queue pair is in error.
    pub(crate) const QP_FATAL: c_int = 1;
    /// The queue pair met a malformed request.
    pub(crate) const QP_REQ_ERR: c_int = 2;
    /// The queue pair refused an access.
    pub(crate) const QP_ACCESS_ERR: c_int = 3;
    /// The device is in error.
    pub(crate) const DEVICE_FATAL: c_int = 8;
    /// A port came up.
    pub(crate) const PORT_ACTIVE: c_int = 9;
    /// A port went down.
    pub(crate) const PORT_ERR: c_int = 10;
}

mod own {
    use super::{AsyncEvent, c_int, ibv_context, ibv_qp, ibv_wr_opcode};

    #[allow(clashing_extern_declarations)] // the integer field is the reason for the declaration
    unsafe extern "C" {
        pub(super) fn ibv_get_async_event(context: *mut ibv_context, event: *mut AsyncEvent) -> c_int;
        pub(super) fn ibv_ack_async_event(event: *mut AsyncEvent);
        pub(super) fn ibv_query_qp_data_in_order(qp: *mut ibv_qp, op: ibv_wr_opcode::Type, flags: u32) -> c_int;
    }
}

/// Type and interface of a GID, as the kernel writes them.
pub(crate) type GidAttributes = (Option<String>, Option<String>);

/// The control verbs. Each member has the contract of the verb that it is named after (see its manual page).
#[derive(Clone, Copy)]
pub(crate) struct Table {
    pub(crate) get_device_list: unsafe extern "C" fn(*mut c_int) -> *mut *mut ibv_device,
    pub(crate) free_device_list: unsafe extern "C" fn(*mut *mut ibv_device),
    pub(crate) get_device_name: unsafe extern "C" fn(*mut ibv_device) -> *const c_char,
    pub(crate) open_device: unsafe extern "C" fn(*mut ibv_device) -> *mut ibv_context,
    pub(crate) close_device: unsafe extern "C" fn(*mut ibv_context) -> c_int,
    pub(crate) query_device: unsafe extern "C" fn(*mut ibv_context, *mut ibv_device_attr) -> c_int,
    pub(crate) query_port: unsafe extern "C" fn(*mut ibv_context, u8, *mut rdma_sys::_compat_ibv_port_attr) -> c_int,
    pub(crate) query_gid: unsafe extern "C" fn(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int,
    pub(crate) query_pkey: unsafe extern "C" fn(*mut ibv_context, u8, c_int, *mut u16) -> c_int,
    pub(crate) alloc_pd: unsafe extern "C" fn(*mut ibv_context) -> *mut ibv_pd,
    pub(crate) dealloc_pd: unsafe extern "C" fn(*mut ibv_pd) -> c_int,
    pub(crate) reg_mr: unsafe extern "C" fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr,
    pub(crate) reg_dmabuf_mr: unsafe extern "C" fn(*mut ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ibv_mr,
    pub(crate) dereg_mr: unsafe extern "C" fn(*mut ibv_mr) -> c_int,
    pub(crate) create_cq: unsafe extern "C" fn(
        *mut ibv_context,
        c_int,
        *mut c_void,
        *mut rdma_sys::ibv_comp_channel,
        c_int,
    ) -> *mut ibv_cq,
    pub(crate) destroy_cq: unsafe extern "C" fn(*mut ibv_cq) -> c_int,
    pub(crate) create_qp: unsafe extern "C" fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp,
    pub(crate) modify_qp: unsafe extern "C" fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int,
    pub(crate) destroy_qp: unsafe extern "C" fn(*mut ibv_qp) -> c_int,
    pub(crate) query_qp_data_in_order: unsafe extern "C" fn(*mut ibv_qp, c_uint, u32) -> c_int,
    pub(crate) get_async_event: unsafe extern "C" fn(*mut ibv_context, *mut AsyncEvent) -> c_int,
    pub(crate) ack_async_event: unsafe extern "C" fn(*mut AsyncEvent),
    /// Type and interface of a GID, which the binding has no verb for: device, port, index.
    pub(crate) gid_attributes: fn(&str, u8, u32) -> GidAttributes,
}

impl std::fmt::Debug for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Table")
    }
}

/// libibverbs.
pub(crate) static SYSTEM: Table = Table {
    get_device_list: rdma_sys::ibv_get_device_list,
    free_device_list: rdma_sys::ibv_free_device_list,
    get_device_name: rdma_sys::ibv_get_device_name,
    open_device: rdma_sys::ibv_open_device,
    close_device: rdma_sys::ibv_close_device,
    query_device: rdma_sys::ibv_query_device,
    query_port: rdma_sys::ibv_query_port,
    query_gid: rdma_sys::ibv_query_gid,
    query_pkey: rdma_sys::ibv_query_pkey,
    alloc_pd: rdma_sys::ibv_alloc_pd,
    dealloc_pd: rdma_sys::ibv_dealloc_pd,
    reg_mr: rdma_sys::ibv_reg_mr,
    reg_dmabuf_mr: rdma_sys::ibv_reg_dmabuf_mr,
    dereg_mr: rdma_sys::ibv_dereg_mr,
    create_cq: rdma_sys::ibv_create_cq,
    destroy_cq: rdma_sys::ibv_destroy_cq,
    create_qp: rdma_sys::ibv_create_qp,
    modify_qp: rdma_sys::ibv_modify_qp,
    destroy_qp: rdma_sys::ibv_destroy_qp,
    query_qp_data_in_order: own::ibv_query_qp_data_in_order,
    get_async_event: own::ibv_get_async_event,
    ack_async_event: own::ibv_ack_async_event,
    gid_attributes: sysfs_gid_attributes,
};

/// Reads what the kernel publishes of a GID. An empty entry cannot be read (EINVAL) and gives nothing.
fn sysfs_gid_attributes(device: &str, port: u8, index: u32) -> GidAttributes {
    let read = |kind: &str| {
        let path = format!("/sys/class/infiniband/{device}/ports/{port}/gid_attrs/{kind}/{index}");
        std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
    };
    (read("types"), read("ndevs"))
}

/// A structure of the verbs interface with every byte zero, as its manual pages start from.
///
/// # Safety
/// All-zero bytes have to be a valid `T`: true for the plain C structures of the verbs interface.
pub(crate) unsafe fn zeroed<T>() -> T {
    // SAFETY: the caller vouches for it.
    unsafe { std::mem::zeroed() }
}

#[cfg(test)]
mod tests;
