//! The `__wrapper` entry points: arguments packed one behind the other, as a remote executor of compiled code sends them.

use std::ffi::c_char;

use super::benchmark::Benchmark;
use super::entry::{Arguments, Text, flat_functions, silent};
use super::failure::{Failure, caught, say};
use super::interface;

/// `{union {char *ptr; char inline[8];}, size_t size}`: up to 8 bytes stand in place, more are malloc'd; an error has size 0
/// and a malloc'd text. The caller frees both.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Packed {
    value: [u8; 8],
    size: usize,
}

/// Most bytes of samples that a result may carry.
const MOST_SAMPLES: u64 = 1 << 30;

impl Packed {
    fn from_bytes(bytes: &[u8]) -> Result<Self, Failure> {
        let mut value = [0; 8];
        if let Some(place) = value.get_mut(..bytes.len()) {
            place.copy_from_slice(bytes);
        } else {
            value = (allocate(bytes)? as u64).to_ne_bytes();
        }
        Ok(Self { value, size: bytes.len() })
    }

    fn error(text: &str) -> Self {
        let mut text = text.replace('\0', " ").into_bytes();
        text.push(0);
        // With no memory for the text there is none.
        let address = allocate(&text).map_or(0, |text| text as u64);
        Self { value: address.to_ne_bytes(), size: 0 }
    }
}

/// A copy that C's `free` releases.
fn allocate(bytes: &[u8]) -> Result<*mut c_char, Failure> {
    // SAFETY: malloc may be called with any size.
    let memory = unsafe { libc::malloc(bytes.len()) }.cast::<u8>();
    if memory.is_null() {
        return Err(Failure::new(format!("no memory for a result of {} bytes", bytes.len())));
    }
    // SAFETY: fresh memory of that size.
    unsafe { memory.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    Ok(memory.cast())
}

/// Packed arguments.
struct Bytes {
    start: *const u8,
    size: usize,
    taken: usize,
}

impl Arguments for Bytes {
    fn next(&mut self, bytes: usize) -> Result<*const u8, Failure> {
        let place = self.start.wrapping_add(self.taken);
        self.taken += bytes;
        if self.taken > self.size || self.start.is_null() {
            return Err(Failure::new(format!(
                "the arguments are {} bytes, and one more ends at {}; strings are 256 bytes, numbers their own size",
                self.size, self.taken
            )));
        }
        Ok(place)
    }
}

impl Bytes {
    /// Refuses what is left over.
    fn end(&self) -> Result<(), Failure> {
        if self.taken == self.size {
            return Ok(());
        }
        Err(Failure::new(format!("the arguments are {} bytes where {} are wanted", self.size, self.taken)))
    }
}

/// Does a call. What a function returns is its result, failures included; an error here is that it could not be called.
fn wrap(
    name: &str,
    data: *const c_char,
    size: usize,
    work: impl FnOnce(&mut Bytes) -> Result<Packed, Failure>,
) -> Packed {
    caught(|| work(&mut Bytes { start: data.cast(), size, taken: 0 })).unwrap_or_else(|failure| {
        say(name, &failure.text);
        Packed::error(&failure.text)
    })
}

macro_rules! wrapper_entries {
    ($($function:ident $call:literal $wrapper:literal ($($argument:ident: $kind:ty),*) -> $result:ty = $work:expr;)*) => {
        $(
            // SAFETY: the name is this library's own.
            #[unsafe(export_name = $wrapper)]
            unsafe extern "C" fn $function(data: *const c_char, size: usize) -> Packed {
                wrap($wrapper, data, size, |bytes| {
                    $(let $argument: $kind = bytes.take()?;)*
                    bytes.end()?;
                    let result: $result = $work;
                    Packed::from_bytes(&result.to_ne_bytes())
                })
            }
        )*
    };
}
flat_functions!(wrapper_entries);

/// The result is the status (4 bytes), the samples, and the rounds (8 bytes).
// SAFETY: the name is this library's own.
#[unsafe(export_name = "__catalyst__transport__start_benchmark__wrapper")]
unsafe extern "C" fn start_benchmark(data: *const c_char, size: usize) -> Packed {
    wrap("__catalyst__transport__start_benchmark__wrapper", data, size, |bytes| {
        let session = bytes.take()?;
        let wanted = Benchmark { rounds: bytes.take()?, decoder_id: bytes.take()?, flags: bytes.take()? };
        let samples_bytes: u64 = bytes.take()?;
        bytes.end()?;
        if samples_bytes > MOST_SAMPLES {
            return Err(Failure::new(format!(
                "{samples_bytes} bytes of samples are more than the {MOST_SAMPLES} allowed"
            )));
        }
        let length = samples_bytes as usize;
        let mut samples = vec![0_u64; length.div_ceil(8)];
        let mut rounds = 0;
        // SAFETY: the vector has these bytes, and `rounds` is one number.
        let status = unsafe {
            interface::start_benchmark(session, wanted, samples.as_mut_ptr(), samples_bytes, &raw mut rounds)
        };
        let mut result = status.to_ne_bytes().to_vec();
        result.extend(samples.iter().flat_map(|sample| sample.to_ne_bytes()).take(length));
        result.extend(rounds.to_ne_bytes());
        Packed::from_bytes(&result)
    })
}
