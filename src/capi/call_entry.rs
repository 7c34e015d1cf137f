//! The `__call` entry points: `void name(void **args, void **results)`, as compiled programs call a runtime function.
//!
//! Each slot points to `{i64 rank; void *data; i8 dtype}`. A number is an array of one element, a session a u64, a string
//! a field of 256 bytes. The first result is the function's value.

use std::ffi::c_void;

use super::benchmark::Benchmark;
use super::entry::{Argument, Arguments, Outcome, Text, flat_functions, silent};
use super::failure::{Failure, guard};
use super::interface;

/// An array as compiled code passes it.
#[repr(C)]
struct Encoded {
    rank: i64,
    data: *mut u8,
    dtype: i8,
}

/// A list of arrays, arguments or results.
struct Slots {
    list: *mut *mut c_void,
    index: usize,
}

impl Slots {
    /// # Safety
    /// `list` is NULL or points to as many pointers as are taken, each NULL or to an [`Encoded`] that is large enough.
    unsafe fn new(list: *mut *mut c_void) -> Self {
        Self { list, index: 0 }
    }

    /// The data of the next array; NULL is an error.
    fn data(&mut self) -> Result<*mut u8, Failure> {
        let index = self.index;
        self.index += 1;
        let missing = || Failure::new(format!("slot {index} of the call is NULL; the caller's lowering is wrong"));
        if self.list.is_null() {
            return Err(missing());
        }
        // SAFETY: within the list by the contract of `new`.
        let encoded = unsafe { *self.list.add(index) }.cast::<Encoded>();
        if encoded.is_null() {
            return Err(missing());
        }
        // SAFETY: an array descriptor by the contract of `new`.
        let data = unsafe { (*encoded).data };
        if data.is_null() { Err(missing()) } else { Ok(data) }
    }

    /// Writes the next result.
    fn put<T: Argument>(&mut self, value: T) -> Result<(), Failure> {
        let place = self.data()?.cast::<T>();
        // SAFETY: the array holds a value of this type by the contract of `new`.
        unsafe { place.write_unaligned(value) };
        Ok(())
    }
}

impl Arguments for Slots {
    fn next(&mut self, _bytes: usize) -> Result<*const u8, Failure> {
        self.data().map(<*mut u8>::cast_const)
    }
}

/// Does a call, whose result goes into the first slot.
fn call<T: Outcome>(
    name: &str,
    (mut args, mut results): (Slots, Slots),
    work: impl FnOnce(&mut Slots, &mut Slots) -> Result<T, Failure>,
) {
    let mut first = Slots { list: results.list, index: 0 };
    results.index = 1;
    let value = guard(name, T::failed, || work(&mut args, &mut results));
    guard(name, |_| (), || first.put(value));
}

/// Both lists of a call.
///
/// # Safety
/// As [`Slots::new`].
unsafe fn lists(args: *mut *mut c_void, results: *mut *mut c_void) -> (Slots, Slots) {
    // SAFETY: the caller's promise.
    unsafe { (Slots::new(args), Slots::new(results)) }
}

macro_rules! call_entries {
    ($($function:ident $call:literal $wrapper:literal ($($argument:ident: $kind:ty),*) -> $result:ty = $work:expr;)*) => {
        $(
            // SAFETY: the name is this library's own.
            #[unsafe(export_name = $call)]
            unsafe extern "C" fn $function(args: *mut *mut c_void, results: *mut *mut c_void) {
                // SAFETY: the header's contract.
                let lists = unsafe { lists(args, results) };
                call::<$result>($call, lists, |slots, _| {
                    $(let $argument: $kind = slots.take()?;)*
                    Ok($work)
                });
            }
        )*
    };
}
flat_functions!(call_entries);

// SAFETY: the name is this library's own.
#[unsafe(export_name = "__catalyst__transport__request_slot__call")]
unsafe extern "C" fn request_slot(args: *mut *mut c_void, results: *mut *mut c_void) {
    // SAFETY: the header's contract.
    let lists = unsafe { lists(args, results) };
    call::<u64>("__catalyst__transport__request_slot__call", lists, |slots, _| {
        Ok(interface::request_slot(slots.take()?) as u64)
    });
}

// SAFETY: the name is this library's own.
#[unsafe(export_name = "__catalyst__transport__reply_slot__call")]
unsafe extern "C" fn reply_slot(args: *mut *mut c_void, results: *mut *mut c_void) {
    // SAFETY: the header's contract.
    let lists = unsafe { lists(args, results) };
    call::<u64>("__catalyst__transport__reply_slot__call", lists, |slots, _| {
        Ok(interface::reply_slot(slots.take()?) as u64)
    });
}

// SAFETY: the name is this library's own.
#[unsafe(export_name = "__catalyst__transport__last_rtt_ns__call")]
unsafe extern "C" fn last_rtt_ns(args: *mut *mut c_void, results: *mut *mut c_void) {
    // SAFETY: the header's contract.
    let lists = unsafe { lists(args, results) };
    call::<u64>("__catalyst__transport__last_rtt_ns__call", lists, |slots, _| {
        Ok(interface::last_rtt_ns(slots.take()?))
    });
}

// SAFETY: the name is this library's own.
#[unsafe(export_name = "__catalyst__transport__post__call")]
unsafe extern "C" fn post(args: *mut *mut c_void, results: *mut *mut c_void) {
    // SAFETY: the header's contract.
    let lists = unsafe { lists(args, results) };
    call::<i32>("__catalyst__transport__post__call", lists, |slots, _| {
        Ok(interface::post(slots.take()?, slots.take()?))
    });
}

// SAFETY: the name is this library's own.
#[unsafe(export_name = "__catalyst__transport__stage_payload__call")]
unsafe extern "C" fn stage_payload(args: *mut *mut c_void, results: *mut *mut c_void) {
    // SAFETY: the header's contract.
    let lists = unsafe { lists(args, results) };
    call::<i32>("__catalyst__transport__stage_payload__call", lists, |slots, _| {
        let (session, payload) = (slots.take()?, slots.data()?);
        let (bytes, decoder_id) = (slots.take()?, slots.take()?);
        // SAFETY: the array of the payload has as many bytes as the call says.
        Ok(unsafe { interface::stage_payload(session, payload, bytes, decoder_id) })
    });
}

// SAFETY: the name is this library's own.
#[unsafe(export_name = "__catalyst__transport__collect__call")]
unsafe extern "C" fn collect(args: *mut *mut c_void, results: *mut *mut c_void) {
    // SAFETY: the header's contract.
    let lists = unsafe { lists(args, results) };
    call::<i32>("__catalyst__transport__collect__call", lists, |slots, results| {
        let (session, bytes) = (slots.take()?, slots.take()?);
        // SAFETY: the array of the reply has as many bytes as the call says.
        Ok(unsafe { interface::collect(session, results.data()?, bytes) })
    });
}

// SAFETY: the name is this library's own.
#[unsafe(export_name = "__catalyst__transport__start_benchmark__call")]
unsafe extern "C" fn start_benchmark(args: *mut *mut c_void, results: *mut *mut c_void) {
    // SAFETY: the header's contract.
    let lists = unsafe { lists(args, results) };
    call::<i32>("__catalyst__transport__start_benchmark__call", lists, |slots, results| {
        let session = slots.take()?;
        let wanted = Benchmark { rounds: slots.take()?, decoder_id: slots.take()?, flags: slots.take()? };
        let samples_bytes: u64 = slots.take()?;
        let (samples, rounds) = (results.data()?.cast(), results.data()?.cast());
        // SAFETY: the arrays are as large as the call says.
        Ok(unsafe { interface::start_benchmark(session, wanted, samples, samples_bytes, rounds) })
    });
}
