//! Run-time type information, for the runtime's `dynamic_cast`.
//!
//! libstdc++ compares types by name when their addresses differ, so these stand for the runtime's own classes.

use std::ffi::{CStr, c_char};

// The vtables of libstdc++'s own classes, of which a type's information is an object.
#[link(name = "stdc++")]
unsafe extern "C" {
    /// `__cxxabiv1::__class_type_info`: a class without bases.
    #[link_name = "_ZTVN10__cxxabiv117__class_type_infoE"]
    static CLASS: [*const (); 4];
    /// `__cxxabiv1::__si_class_type_info`: a class with one public base at offset 0.
    #[link_name = "_ZTVN10__cxxabiv120__si_class_type_infoE"]
    static ONE_BASE: [*const (); 4];
}

/// The information of one class. A class without bases has no third word, and nobody looks at it.
#[repr(C)]
pub(super) struct TypeInfo {
    vtable: *const *const (),
    name: *const c_char,
    base: *const TypeInfo,
}

// SAFETY: it is never written, and what it points to neither.
unsafe impl Sync for TypeInfo {}

impl TypeInfo {
    const fn derived(name: &'static CStr, base: &'static TypeInfo) -> Self {
        // SAFETY: only the address is taken; methods begin behind the vtable's first two words.
        let vtable = unsafe { (&raw const ONE_BASE).cast::<*const ()>().add(2) };
        Self { vtable, name: name.as_ptr(), base }
    }
}

static SESSION: TypeInfo = TypeInfo {
    // SAFETY: only the address is taken; methods begin behind the vtable's first two words.
    vtable: unsafe { (&raw const CLASS).cast::<*const ()>().add(2) },
    name: c"N8catalyst9transport16TransportSessionE".as_ptr(),
    base: std::ptr::null(),
};
static CONTROLLER_SESSION: TypeInfo = TypeInfo::derived(c"N8catalyst9transport17ControllerSessionE", &SESSION);
static COPROCESSOR_SESSION: TypeInfo = TypeInfo::derived(c"N8catalyst9transport18CoprocessorSessionE", &SESSION);

/// The class of this library's controllers, `catalyst_transport::Controller`.
pub(super) static CONTROLLER: TypeInfo = TypeInfo::derived(c"N18catalyst_transport10ControllerE", &CONTROLLER_SESSION);
/// The class of this library's coprocessors, `catalyst_transport::Coprocessor`.
pub(super) static COPROCESSOR: TypeInfo =
    TypeInfo::derived(c"N18catalyst_transport11CoprocessorE", &COPROCESSOR_SESSION);
