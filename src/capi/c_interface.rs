//! The twenty functions with C arguments. `include/catalyst_transport.h` documents them.

use std::ffi::{CStr, c_char, c_void};

use super::benchmark::Benchmark;
use super::interface;

/// The bytes of a C string; NULL is the empty one.
///
/// # Safety
/// The string is NULL or NUL-terminated, and lives as long as the slice.
unsafe fn string<'a>(text: *const c_char) -> &'a [u8] {
    if text.is_null() {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_bytes()
}

/// The number behind a handle, which is not followed.
fn number(session: *mut c_void) -> u64 {
    session as u64
}

/// The handle of a number.
fn handle(number: u64) -> *mut c_void {
    std::ptr::without_provenance_mut(number as usize)
}

// SAFETY of the names below: nothing else in this library has them. SAFETY of the blocks: the header's contract, that
// strings end with NUL and buffers are as long as they are said to be.

// SAFETY: the name is this library's own.
#[unsafe(export_name = "__catalyst__transport__create")]
unsafe extern "C" fn create(
    backend_lib: *const c_char,
    config: *const c_char,
    role: i32,
    key: *const c_char,
) -> *mut c_void {
    // SAFETY: C strings by the header's contract.
    let (backend_lib, config, key) = unsafe { (string(backend_lib), string(config), string(key)) };
    handle(interface::create(backend_lib, config, role, key))
}

// SAFETY: the name is this library's own.
#[unsafe(export_name = "__catalyst__transport__get_session")]
unsafe extern "C" fn get_session(role: i32, key: *const c_char) -> *mut c_void {
    // SAFETY: a C string by the header's contract.
    handle(interface::get_session(role, unsafe { string(key) }))
}

// SAFETY: the name is this library's own.
#[unsafe(export_name = "__catalyst__transport__connect")]
unsafe extern "C" fn connect(session: *mut c_void, peer: *const c_char, port: u16) -> i32 {
    // SAFETY: a C string by the header's contract.
    interface::connect(number(session), unsafe { string(peer) }, port)
}

// SAFETY: the name is this library's own.
#[unsafe(export_name = "__catalyst__transport__connect_async")]
unsafe extern "C" fn connect_async(session: *mut c_void, peer: *const c_char, port: u16) -> i64 {
    // SAFETY: a C string by the header's contract.
    interface::connect_async(number(session), unsafe { string(peer) }, port)
}

// SAFETY: the name is this library's own.
#[unsafe(export_name = "__catalyst__transport__exchange_keys")]
extern "C" fn exchange_keys(session: *mut c_void) -> i32 {
    interface::exchange_keys(number(session))
}

// SAFETY: the name is this library's own.
#[unsafe(export_name = "__catalyst__transport__exchange_keys_async")]
extern "C" fn exchange_keys_async(session: *mut c_void) -> i64 {
    interface::exchange_keys_async(number(session))
}

// SAFETY: the name is this library's own.
#[unsafe(export_name = "__catalyst__transport__await")]
extern "C" fn wait(token: i64) -> i32 {
    interface::wait(token)
}

// SAFETY: the name is this library's own.
#[unsafe(export_name = "__catalyst__transport__establish_channel")]
unsafe extern "C" fn establish_channel(session: *mut c_void, transport: *const c_char) -> i32 {
    // SAFETY: a C string by the header's contract.
    interface::establish_channel(number(session), unsafe { string(transport) })
}

// SAFETY: the name is this library's own.
#[unsafe(export_name = "__catalyst__transport__set_coprocessor_fn")]
unsafe extern "C" fn set_coprocessor_fn(session: *mut c_void, symbol: *const c_char) -> i32 {
    // SAFETY: a C string by the header's contract.
    interface::set_coprocessor_fn(number(session), unsafe { string(symbol) })
}

// SAFETY: the name is this library's own.
#[unsafe(export_name = "__catalyst__transport__set_message_sizes")]
extern "C" fn set_message_sizes(session: *mut c_void, index: u32, in_bytes: u64, out_bytes: u64) -> i32 {
    interface::set_message_sizes(number(session), index, in_bytes, out_bytes)
}

// SAFETY: the name is this library's own.
#[unsafe(export_name = "__catalyst__transport__request_slot")]
extern "C" fn request_slot(session: *mut c_void) -> *mut c_void {
    interface::request_slot(number(session)).cast()
}

// SAFETY: the name is this library's own.
#[unsafe(export_name = "__catalyst__transport__stage_payload")]
unsafe extern "C" fn stage_payload(session: *mut c_void, source: *const c_void, bytes: u64, decoder_id: u32) -> i32 {
    // SAFETY: a buffer of that length by the header's contract.
    unsafe { interface::stage_payload(number(session), source.cast(), bytes, decoder_id) }
}

// SAFETY: the name is this library's own.
#[unsafe(export_name = "__catalyst__transport__reply_slot")]
extern "C" fn reply_slot(session: *mut c_void) -> *mut c_void {
    interface::reply_slot(number(session)).cast()
}

// SAFETY: the name is this library's own.
#[unsafe(export_name = "__catalyst__transport__post")]
extern "C" fn post(session: *mut c_void, index: u32) -> i32 {
    interface::post(number(session), index)
}

// SAFETY: the name is this library's own.
#[unsafe(export_name = "__catalyst__transport__start")]
extern "C" fn start(session: *mut c_void) {
    interface::start(number(session));
}

// SAFETY: the name is this library's own.
#[unsafe(export_name = "__catalyst__transport__collect")]
unsafe extern "C" fn collect(session: *mut c_void, reply: *mut c_void, bytes: u64) -> i32 {
    // SAFETY: a buffer of that length by the header's contract.
    unsafe { interface::collect(number(session), reply.cast(), bytes) }
}

// SAFETY: the name is this library's own.
#[unsafe(export_name = "__catalyst__transport__last_rtt_ns")]
extern "C" fn last_rtt_ns(session: *mut c_void) -> u64 {
    interface::last_rtt_ns(number(session))
}

// SAFETY: the name is this library's own.
#[unsafe(export_name = "__catalyst__transport__stop")]
extern "C" fn stop(session: *mut c_void) {
    interface::stop(number(session));
}

// SAFETY: the name is this library's own.
#[unsafe(export_name = "__catalyst__transport__destroy")]
extern "C" fn destroy(session: *mut c_void) {
    interface::destroy(number(session));
}

// SAFETY: the name is this library's own.
#[unsafe(export_name = "__catalyst__transport__start_benchmark")]
unsafe extern "C" fn start_benchmark(
    session: *mut c_void,
    iterations: u32,
    decoder_id: u32,
    flags: u32,
    samples: *mut u64,
    samples_bytes: u64,
    rounds: *mut u64,
) -> i32 {
    let wanted = Benchmark { rounds: iterations, decoder_id, flags };
    // SAFETY: buffers of those lengths by the header's contract.
    unsafe { interface::start_benchmark(number(session), wanted, samples, samples_bytes, rounds) }
}
