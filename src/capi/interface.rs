//! The twenty functions on plain values: what the three calling conventions have in common.
//!
//! Sessions are the numbers of [`registry`], strings are bytes that end at their first NUL. Each call tells its own
//! failure on stderr and never panics.

use super::backend::Backend;
use super::benchmark::Benchmark;
use super::failure::{Failure, OK, guard, guard_status};
use super::function::Answerer;
use super::handle::Handle;
use super::handle::rounds::wipe;
use super::registry;

/// Does something with a session; its failure says which one it was.
fn on<T>(session: u64, work: impl FnOnce(&Handle) -> Result<T, Failure>) -> Result<T, Failure> {
    let handle = registry::find(session)?;
    work(&handle).map_err(|failure| handle.named(failure))
}

fn text<'a>(what: &str, bytes: &'a [u8]) -> Result<&'a str, Failure> {
    std::str::from_utf8(bytes).map_err(|_| Failure::new(format!("the {what} is not UTF-8 text")))
}

pub(super) fn create(backend: &[u8], config: &[u8], role: i32, key: &[u8]) -> u64 {
    guard(
        "create",
        |_| 0,
        || {
            let backend = Backend::from_name(text("backend", backend)?)?;
            let handle =
                Handle::new(backend, registry::role(role)?, text("key", key)?, text("configuration", config)?)?;
            Ok(registry::insert(handle))
        },
    )
}

pub(super) fn get_session(role: i32, key: &[u8]) -> u64 {
    guard("get_session", |_| 0, || registry::find_key(registry::role(role)?, text("key", key)?))
}

pub(super) fn connect(session: u64, peer: &[u8], port: u16) -> i32 {
    guard_status("connect", || on(session, |handle| handle.connect(text("peer", peer)?, port)))
}

pub(super) fn connect_async(session: u64, peer: &[u8], port: u16) -> i64 {
    guard("connect_async", i64::from, || {
        let handle = registry::find(session)?;
        let peer = text("peer", peer)?.to_owned();
        handle.listen_ahead(port);
        let theirs = handle.clone();
        registry::spawn(session, &handle, move || {
            guard_status("connect_async", || theirs.connect(&peer, port).map_err(|failure| theirs.named(failure)))
        })
    })
}

pub(super) fn exchange_keys(session: u64) -> i32 {
    guard_status("exchange_keys", || on(session, |handle| handle.exchange_keys(None).map(drop)))
}

pub(super) fn exchange_keys_async(session: u64) -> i64 {
    guard("exchange_keys_async", i64::from, || {
        let handle = registry::find(session)?;
        let theirs = handle.clone();
        registry::spawn(session, &handle, move || {
            guard_status("exchange_keys_async", || {
                theirs.exchange_keys(None).map(drop).map_err(|failure| theirs.named(failure))
            })
        })
    })
}

pub(super) fn wait(token: i64) -> i32 {
    guard("await", |code| code, || registry::wait(token))
}

pub(super) fn establish_channel(session: u64, transport: &[u8]) -> i32 {
    guard_status("establish_channel", || on(session, |handle| handle.establish_channel(text("transport", transport)?)))
}

pub(super) fn set_coprocessor_fn(session: u64, symbol: &[u8]) -> i32 {
    guard_status("set_coprocessor_fn", || {
        on(session, |handle| handle.set_answerer(Answerer::named(text("function's name", symbol)?)?))
    })
}

pub(super) fn set_message_sizes(session: u64, index: u32, request: u64, reply: u64) -> i32 {
    guard_status("set_message_sizes", || on(session, |handle| handle.set_message_sizes(index, request, reply)))
}

pub(super) fn request_slot(session: u64) -> *mut u8 {
    guard("request_slot", |_| std::ptr::null_mut(), || on(session, Handle::request_slot))
}

/// # Safety
/// `source` is NULL or points to `bytes` bytes.
pub(super) unsafe fn stage_payload(session: u64, source: *const u8, bytes: u64, decoder_id: u32) -> i32 {
    guard_status("stage_payload", || {
        // SAFETY: the caller's promise.
        on(session, |handle| unsafe { handle.stage_payload(source, bytes, decoder_id) })
    })
}

pub(super) fn reply_slot(session: u64) -> *mut u8 {
    guard("reply_slot", |_| std::ptr::null_mut(), || Ok(registry::find(session)?.reply_slot()))
}

pub(super) fn post(session: u64, index: u32) -> i32 {
    guard_status("post", || on(session, |handle| handle.post(index)))
}

pub(super) fn start(session: u64) -> i32 {
    guard_status("start", || on(session, Handle::start))
}

/// # Safety
/// `reply` is NULL or points to `bytes` bytes that nobody else uses meanwhile.
pub(super) unsafe fn collect(session: u64, reply: *mut u8, bytes: u64) -> i32 {
    let mut bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    if reply.is_null() {
        // Refused even when nothing would be written to it.
        bytes = bytes.max(1);
    }
    // SAFETY: the caller's promise.
    let code = guard_status("collect", || on(session, |handle| unsafe { handle.collect(&[(reply, bytes)]) }));
    if code != OK {
        // SAFETY: the caller's promise.
        unsafe { wipe(reply, bytes) };
    }
    code
}

pub(super) fn last_rtt_ns(session: u64) -> u64 {
    guard("last_rtt_ns", |_| 0, || Ok(registry::find(session)?.last_rtt_ns()))
}

pub(super) fn stop(session: u64) -> i32 {
    guard_status("stop", || on(session, Handle::stop))
}

pub(super) fn destroy(session: u64) -> i32 {
    guard_status("destroy", || {
        let handle = registry::remove(session)?;
        let destroyed = handle.destroy();
        registry::forget(session, std::time::Duration::from_millis(100));
        destroyed.map_err(|failure| handle.named(failure))
    })
}

/// # Safety
/// `samples` is NULL or points to `samples_bytes` bytes, `rounds` is NULL or points to a number.
pub(super) unsafe fn start_benchmark(
    session: u64,
    wanted: Benchmark,
    samples: *mut u64,
    samples_bytes: u64,
    rounds: *mut u64,
) -> i32 {
    let room = usize::try_from(samples_bytes / 8).ok().filter(|room| *room <= isize::MAX as usize / 8);
    let room = if samples.is_null() { 0 } else { room.unwrap_or(0) };
    let mut done = 0;
    // Samples of rounds that fail are 0, and not what an earlier run left there.
    let used = room.min(wanted.rounds as usize);
    if used != 0 {
        // SAFETY: the caller's promise; written as bytes, for the array of a call may be unaligned.
        unsafe { samples.cast::<u8>().write_bytes(0, used * 8) };
    }
    let code = guard_status("start_benchmark", || {
        if samples.is_null() && samples_bytes != 0 {
            return Err(Failure::new("the buffer of the samples is NULL"));
        }
        on(session, |handle| {
            handle.benchmark(wanted, &mut done, |round, nanoseconds| {
                if round < room {
                    // SAFETY: within the buffer.
                    unsafe { samples.add(round).write_unaligned(nanoseconds) };
                }
            })
        })
    });
    if !rounds.is_null() {
        // SAFETY: the caller's promise.
        unsafe { rounds.write_unaligned(done) };
    }
    code
}
