//! A backend plugin for Catalyst's C++ runtime: C++ objects, made in this language.
//!
//! What the runtime sees is the Itanium C++ ABI as libstdc++ has it: an object whose first word points to a
//! [`vtable`], before which stands its [`type_info`]; errors of methods without a status are
//! [C++ exceptions](exceptions). Behind it is a [`Handle`], as behind a handle of the C interface.
//!
//! Two rules keep the two languages apart. A panic is caught before anything of C++ is called. And an exception is thrown
//! from a frame in which nothing has a destructor: unwinding does not run those of Rust here.

mod exceptions;
mod layout;
mod methods;
mod type_info;
mod vtable;

use std::ffi::{CStr, c_char, c_void};
use std::sync::Arc;

use super::backend::backend_for_plugin;
use super::failure::{Failure, guard};
use super::handle::Handle;
use crate::oob::Role;
use crate::session::coprocessor::FunctionConvention;

/// What a factory gives out.
#[repr(C)]
struct Object {
    /// The first method of the role's vtable.
    vtable: *const *const (),
    /// Empty after the complete destructor.
    handle: Option<Arc<Handle>>,
}

impl Object {
    fn make(role: Role, vtable: *const *const (), config: *const c_char) -> Result<*mut c_void, Failure> {
        let text = if config.is_null() {
            ""
        } else {
            // SAFETY: a factory is called with a C string or NULL.
            let text = unsafe { CStr::from_ptr(config) };
            text.to_str().map_err(|_| Failure::new("the configuration is not UTF-8 text"))?
        };
        let (backend, rest) = backend_for_plugin(text)?;
        let (convention, rest) = take_convention(&rest)?;
        let mut handle = Handle::new(backend, role, "", &rest)?;
        handle.convention = convention;
        Ok(Box::into_raw(Box::new(Self { vtable, handle: Some(Arc::new(handle)) })).cast())
    }

    /// The session of an object.
    ///
    /// # Safety
    /// `this` is NULL or an object that has not been deleted.
    unsafe fn handle(this: *const Self) -> Result<Arc<Handle>, Failure> {
        // SAFETY: the caller's promise.
        let object = unsafe { this.as_ref() }.ok_or_else(|| Failure::new("the object is NULL"))?;
        // A reference of its own: a method that runs in another thread outlives the object.
        object.handle.clone().ok_or_else(|| Failure::new("the object has been destroyed"))
    }
}

/// Takes the key `convention` out of a configuration: which of the two conventions a coprocessor says that it takes. Without
/// it, it takes the one that it is given.
fn take_convention(text: &str) -> Result<(Option<FunctionConvention>, String), Failure> {
    let mut convention = None;
    let mut rest = Vec::new();
    for pair in text.split(';') {
        match pair.split_once('=').map(|(key, value)| (key.trim(), value.trim())) {
            Some(("convention", "per_request")) => convention = Some(FunctionConvention::PerRequest),
            Some(("convention", "launch_once")) => convention = Some(FunctionConvention::LaunchOnce),
            Some(("convention", other)) => {
                return Err(Failure::new(format!("convention={other} is neither per_request nor launch_once")));
            }
            _ => rest.push(pair),
        }
    }
    Ok((convention, rest.join(";")))
}

/// Makes a controller for Catalyst's runtime; NULL on failure, with a line on stderr.
// SAFETY: the name is the one that the runtime looks up.
#[unsafe(export_name = "CatalystTransportControllerFactory")]
unsafe extern "C" fn controller_factory(config: *const c_char) -> *mut c_void {
    guard(
        "CatalystTransportControllerFactory",
        |_| std::ptr::null_mut(),
        || Object::make(Role::Controller, vtable::controller(), config),
    )
}

/// Makes a coprocessor for Catalyst's runtime; NULL on failure, with a line on stderr.
// SAFETY: the name is the one that the runtime looks up.
#[unsafe(export_name = "CatalystTransportCoprocessorFactory")]
unsafe extern "C" fn coprocessor_factory(config: *const c_char) -> *mut c_void {
    guard(
        "CatalystTransportCoprocessorFactory",
        |_| std::ptr::null_mut(),
        || Object::make(Role::Coprocessor, vtable::coprocessor(), config),
    )
}
