//! The verbs by name.

/// A verb that can be told to fail, and that the journal names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(usize)]
#[allow(missing_docs)] // each is the verb of its name
pub enum Verb {
    GetDeviceList,
    FreeDeviceList,
    GetDeviceName,
    OpenDevice,
    CloseDevice,
    QueryDevice,
    QueryPort,
    QueryGid,
    QueryPkey,
    AllocPd,
    DeallocPd,
    RegMr,
    RegDmabufMr,
    DeregMr,
    CreateCq,
    DestroyCq,
    CreateQp,
    ModifyQp,
    DestroyQp,
    QueryQpDataInOrder,
    GetAsyncEvent,
    AckAsyncEvent,
    GidAttributes,
    PostSend,
    PollCq,
}

impl Verb {
    /// How many there are.
    pub(super) const COUNT: usize = Self::PollCq as usize + 1;

    /// As libibverbs names it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::GetDeviceList => "ibv_get_device_list",
            Self::FreeDeviceList => "ibv_free_device_list",
            Self::GetDeviceName => "ibv_get_device_name",
            Self::OpenDevice => "ibv_open_device",
            Self::CloseDevice => "ibv_close_device",
            Self::QueryDevice => "ibv_query_device",
            Self::QueryPort => "ibv_query_port",
            Self::QueryGid => "ibv_query_gid",
            Self::QueryPkey => "ibv_query_pkey",
            Self::AllocPd => "ibv_alloc_pd",
            Self::DeallocPd => "ibv_dealloc_pd",
            Self::RegMr => "ibv_reg_mr",
            Self::RegDmabufMr => "ibv_reg_dmabuf_mr",
            Self::DeregMr => "ibv_dereg_mr",
            Self::CreateCq => "ibv_create_cq",
            Self::DestroyCq => "ibv_destroy_cq",
            Self::CreateQp => "ibv_create_qp",
            Self::ModifyQp => "ibv_modify_qp",
            Self::DestroyQp => "ibv_destroy_qp",
            Self::QueryQpDataInOrder => "ibv_query_qp_data_in_order",
            Self::GetAsyncEvent => "ibv_get_async_event",
            Self::AckAsyncEvent => "ibv_ack_async_event",
            Self::GidAttributes => "gid_attrs",
            Self::PostSend => "ibv_post_send",
            Self::PollCq => "ibv_poll_cq",
        }
    }
}
