//! The vtables of both roles, in the order of the C++ classes.

use super::methods as m;
use super::type_info::{CONTROLLER, COPROCESSOR, TypeInfo};

/// A vtable of the Itanium C++ ABI. An object points to its methods.
#[repr(C)]
struct VTable {
    offset_to_top: isize,
    type_info: *const TypeInfo,
    methods: [*const (); METHODS],
}

/// Enough for either role; the coprocessor has two less.
const METHODS: usize = 16;

// SAFETY: it is never written, and what it points to neither.
unsafe impl Sync for VTable {}

static CONTROLLER_VTABLE: VTable = VTable {
    offset_to_top: 0,
    type_info: &raw const CONTROLLER,
    methods: [
        m::complete_destructor as *const (),
        m::deleting_destructor as *const (),
        m::connect as *const (),
        m::alloc_memory as *const (),
        m::preferred_mem_kind as *const (),
        m::exchange_keys as *const (),
        m::establish_channel as *const (),
        m::start as *const (),
        m::collect as *const (),
        m::stop as *const (),
        m::last_rtt_ns as *const (),
        m::commit_work_item as *const (),
        m::kick as *const (),
        m::data_slot as *const (),
        m::write_data_slot as *const (),
        m::reply_slot as *const (),
    ],
};

static COPROCESSOR_VTABLE: VTable = VTable {
    offset_to_top: 0,
    type_info: &raw const COPROCESSOR,
    methods: [
        m::complete_destructor as *const (),
        m::deleting_destructor as *const (),
        m::connect as *const (),
        m::alloc_memory as *const (),
        m::preferred_mem_kind as *const (),
        m::exchange_keys as *const (),
        m::establish_channel as *const (),
        m::start as *const (),
        m::collect as *const (),
        m::stop as *const (),
        m::last_rtt_ns as *const (),
        m::set_coprocessor_fn as *const (),
        m::set_coprocessor_launcher as *const (),
        m::coprocessor_fn_convention as *const (),
        std::ptr::null(),
        std::ptr::null(),
    ],
};

/// What a controller points to.
pub(super) fn controller() -> *const *const () {
    CONTROLLER_VTABLE.methods.as_ptr()
}

/// What a coprocessor points to.
pub(super) fn coprocessor() -> *const *const () {
    COPROCESSOR_VTABLE.methods.as_ptr()
}
