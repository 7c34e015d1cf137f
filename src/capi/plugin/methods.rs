//! The methods behind the vtables.
//!
//! Each is called with an object of a factory that has not been deleted, and with arguments as its C++ declaration says:
//! that is the contract that the SAFETY comments here mean. Those that return a status tell a failure on stderr; the
//! others throw it, and the runtime tells it.

use std::ffi::{c_int, c_void};

use super::super::failure::{Failure, guard, guard_status, say};
use super::super::function::{Answerer, Context, FunctionFn};
use super::super::handle::rounds::wipe;
use super::super::launcher::LauncherFn;
use super::Object;
use super::exceptions::{attempt, throw};
use super::layout::{CxxChannelDesc, CxxConnectInfo, CxxMemRegion, CxxPeerRef, mem_kind};
use crate::session::MemKind;
use crate::session::coprocessor::FunctionConvention;

/// Refuses a reference that is NULL after all.
///
/// # Safety
/// As the C++ reference.
unsafe fn referred<'a, T>(what: &str, value: *const T) -> Result<&'a T, Failure> {
    // SAFETY: the caller's promise.
    unsafe { value.as_ref() }.ok_or_else(|| Failure::new(format!("the {what} is NULL")))
}

/// Ends the session and releases it.
///
/// # Safety
/// An object that nobody uses any more.
unsafe fn end(this: *mut Object) {
    guard(
        "destructor",
        |_| (),
        || {
            // SAFETY: the caller's promise.
            match unsafe { (*this).handle.take() } {
                Some(handle) => handle.destroy(),
                None => Ok(()),
            }
        },
    );
}

/// Method 0.
pub(super) unsafe extern "C-unwind" fn complete_destructor(this: *mut Object) {
    // SAFETY: the module's contract.
    unsafe { end(this) };
}

/// Method 1: `delete`.
pub(super) unsafe extern "C-unwind" fn deleting_destructor(this: *mut Object) {
    // SAFETY: the module's contract; the factory made it with a Box.
    unsafe {
        end(this);
        drop(Box::from_raw(this));
    }
}

/// Method 2.
pub(super) unsafe extern "C-unwind" fn connect(this: *mut Object, info: *const CxxConnectInfo) -> c_int {
    guard_status("connect", || {
        // SAFETY: the module's contract.
        let (handle, info) = unsafe { (Object::handle(this)?, referred("connect info", info)?) };
        // SAFETY: the module's contract.
        handle.connect(&unsafe { info.peer.to_text() }?, info.port)
    })
}

/// Method 3.
pub(super) unsafe extern "C-unwind" fn alloc_memory(this: *mut Object, bytes: usize, kind: c_int) -> CxxMemRegion {
    let allocated = attempt("alloc_memory", || {
        // SAFETY: the module's contract.
        let region = unsafe { Object::handle(this)? }.alloc_memory(bytes, mem_kind(kind)?)?;
        Ok(CxxMemRegion::from(region))
    });
    match allocated {
        Ok(region) => region,
        Err(thrown) => throw(thrown),
    }
}

/// Method 4.
pub(super) unsafe extern "C-unwind" fn preferred_mem_kind(_this: *const Object) -> c_int {
    MemKind::CpuRam as c_int
}

/// Method 5. The channel is established with it: see [`super::super::handle`].
pub(super) unsafe extern "C-unwind" fn exchange_keys(this: *mut Object, local: *const CxxMemRegion) -> CxxPeerRef {
    let exchanged = attempt("exchange_keys", || {
        // SAFETY: the module's contract.
        let (handle, local) = unsafe { (Object::handle(this)?, referred("local region", local)?) };
        Ok(CxxPeerRef::from(handle.exchange_keys(Some(local.addr))?))
    });
    match exchanged {
        Ok(peer) => peer,
        Err(thrown) => throw(thrown),
    }
}

/// Method 6.
pub(super) unsafe extern "C-unwind" fn establish_channel(
    this: *mut Object,
    desc: *const CxxChannelDesc,
    _local: *const CxxMemRegion,
    _peer: *const CxxPeerRef,
) {
    let established = attempt("establish_channel", || {
        // SAFETY: the module's contract.
        let (handle, desc) = unsafe { (Object::handle(this)?, referred("channel description", desc)?) };
        // SAFETY: the module's contract.
        handle.establish_channel(&unsafe { desc.data_path.to_text() }?)
    });
    if let Err(thrown) = established {
        throw(thrown);
    }
}

/// Method 7.
pub(super) unsafe extern "C-unwind" fn start(this: *mut Object) {
    // SAFETY: the module's contract.
    if let Err(thrown) = attempt("start", || unsafe { Object::handle(this)? }.start()) {
        throw(thrown);
    }
}

/// Method 8.
pub(super) unsafe extern "C-unwind" fn collect(
    this: *mut Object,
    replies: *const *mut c_void,
    capacities: *const u64,
    count: usize,
) -> c_int {
    let buffer = |index: usize| {
        // SAFETY: the module's contract: both arrays have `count` elements.
        let (start, bytes) = unsafe { (*replies.add(index), *capacities.add(index)) };
        (start.cast::<u8>(), usize::try_from(bytes).unwrap_or(usize::MAX))
    };
    if count != 0 && (replies.is_null() || capacities.is_null()) {
        say("collect", "the array of the replies or of their capacities is NULL");
        return super::super::failure::ERROR;
    }
    let status = guard_status("collect", || {
        // SAFETY: the module's contract.
        let handle = unsafe { Object::handle(this)? };
        let (one, many);
        // The way of every round has one buffer, and no allocation.
        let buffers: &[_] = if count == 1 {
            one = [buffer(0)];
            &one
        } else {
            many = (0..count).map(buffer).collect::<Vec<_>>();
            &many
        };
        // SAFETY: the module's contract.
        unsafe { handle.collect(buffers) }
    });
    if status != super::super::failure::OK {
        for (start, bytes) in (0..count).map(buffer) {
            // SAFETY: the module's contract.
            unsafe { wipe(start, bytes) };
        }
    }
    status
}

/// Method 9.
pub(super) unsafe extern "C-unwind" fn stop(this: *mut Object) {
    // SAFETY: the module's contract.
    if let Err(thrown) = attempt("stop", || unsafe { Object::handle(this)? }.stop()) {
        throw(thrown);
    }
}

/// Method 10.
pub(super) unsafe extern "C-unwind" fn last_rtt_ns(this: *const Object) -> u64 {
    // SAFETY: the module's contract.
    guard("last_rtt_ns", |_| 0, || Ok(unsafe { Object::handle(this)? }.last_rtt_ns()))
}

/// Method 11 of a controller.
pub(super) unsafe extern "C-unwind" fn commit_work_item(this: *mut Object, index: u32, request: u64, reply: u64) {
    let committed = attempt("commit_work_item", || {
        // SAFETY: the module's contract.
        unsafe { Object::handle(this)? }.set_message_sizes(index, request, reply)
    });
    if let Err(thrown) = committed {
        throw(thrown);
    }
}

/// Method 12 of a controller.
pub(super) unsafe extern "C-unwind" fn kick(this: *mut Object, index: u32) -> c_int {
    // SAFETY: the module's contract.
    guard_status("kick", || unsafe { Object::handle(this)? }.post(index))
}

/// Method 13 of a controller.
pub(super) unsafe extern "C-unwind" fn data_slot(this: *mut Object) -> *mut c_void {
    // SAFETY: the module's contract.
    guard("data_slot", |_| std::ptr::null_mut(), || unsafe { Object::handle(this)? }.request_slot()).cast()
}

/// Method 14 of a controller.
pub(super) unsafe extern "C-unwind" fn write_data_slot(
    this: *mut Object,
    source: *const c_void,
    bytes: u64,
    decoder_id: u32,
) {
    let written = attempt("write_data_slot", || {
        // SAFETY: the module's contract.
        unsafe { Object::handle(this)?.stage_payload(source.cast(), bytes, decoder_id) }
    });
    if let Err(thrown) = written {
        throw(thrown);
    }
}

/// Method 15 of a controller.
pub(super) unsafe extern "C-unwind" fn reply_slot(this: *mut Object) -> *mut c_void {
    // SAFETY: the module's contract.
    guard("reply_slot", |_| std::ptr::null_mut(), || Ok(unsafe { Object::handle(this)? }.reply_slot())).cast()
}

/// Method 11 of a coprocessor.
pub(super) unsafe extern "C-unwind" fn set_coprocessor_fn(
    this: *mut Object,
    function: Option<FunctionFn>,
    context: *mut c_void,
) {
    let bound = attempt("set_coprocessor_fn", || {
        let function = function.ok_or_else(|| Failure::new("the coprocessor function is NULL"))?;
        // SAFETY: the module's contract.
        unsafe { Object::handle(this)? }.set_answerer(Answerer::Function(function, Context(context)))
    });
    if let Err(thrown) = bound {
        throw(thrown);
    }
}

/// Method 12 of a coprocessor.
pub(super) unsafe extern "C-unwind" fn set_coprocessor_launcher(
    this: *mut Object,
    launcher: Option<LauncherFn>,
    context: *mut c_void,
) {
    let bound = attempt("set_coprocessor_launcher", || {
        let launcher = launcher.ok_or_else(|| Failure::new("the coprocessor launcher is NULL"))?;
        // SAFETY: the module's contract.
        unsafe { Object::handle(this)? }.set_answerer(Answerer::Launcher(launcher, Context(context)))
    });
    if let Err(thrown) = bound {
        throw(thrown);
    }
}

/// Method 13 of a coprocessor: 0 is once per request, 1 is launched once.
pub(super) unsafe extern "C-unwind" fn coprocessor_fn_convention(this: *const Object) -> i32 {
    guard(
        "coprocessor_fn_convention",
        |_| 0,
        || {
            // SAFETY: the module's contract.
            Ok(match unsafe { Object::handle(this)? }.convention() {
                FunctionConvention::LaunchOnce => 1,
                FunctionConvention::PerRequest => 0,
            })
        },
    )
}
