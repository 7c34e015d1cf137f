//! What the `__call` and `__wrapper` entry points have in common: arguments as bytes in memory.

use super::failure::Failure;

/// Bytes of a string argument.
pub(super) const TEXT_BYTES: usize = 256;

/// A string argument: a field of 256 bytes that ends at its first NUL, or fills the field.
pub(super) struct Text([u8; TEXT_BYTES]);

impl Text {
    /// Without the padding.
    pub(super) fn bytes(&self) -> &[u8] {
        let length = self.0.iter().position(|byte| *byte == 0).unwrap_or(TEXT_BYTES);
        &self.0[..length]
    }
}

/// A value that stands in memory as these entry points pass it.
pub(super) trait Argument: Sized {
    /// Bytes that it takes.
    const BYTES: usize;

    /// # Safety
    /// `place` points to that many readable bytes, with any alignment.
    unsafe fn read(place: *const u8) -> Self;
}

macro_rules! numbers {
    ($($number:ty),*) => {
        $(
            impl Argument for $number {
                const BYTES: usize = size_of::<$number>();

                unsafe fn read(place: *const u8) -> Self {
                    // SAFETY: the caller's promise.
                    unsafe { place.cast::<$number>().read_unaligned() }
                }
            }
        )*
    };
}
numbers!(u16, u32, i32, u64, i64);

impl Argument for Text {
    const BYTES: usize = TEXT_BYTES;

    unsafe fn read(place: *const u8) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { place.cast::<[u8; TEXT_BYTES]>().read_unaligned() })
    }
}

/// A result, with a value that says that the arguments could not be read.
pub(super) trait Outcome: Argument {
    /// NULL for a session or an address, the status for all else.
    fn failed(status: i32) -> Self;
}

impl Outcome for u64 {
    fn failed(_status: i32) -> Self {
        0
    }
}

impl Outcome for i32 {
    fn failed(status: i32) -> Self {
        status
    }
}

impl Outcome for i64 {
    fn failed(status: i32) -> Self {
        status.into()
    }
}

/// Where arguments come from, one after the other.
pub(super) trait Arguments {
    /// The place of the next argument, which takes `bytes`.
    fn next(&mut self, bytes: usize) -> Result<*const u8, Failure>;

    /// The next argument.
    fn take<T: Argument>(&mut self) -> Result<T, Failure> {
        let place = self.next(T::BYTES)?;
        // SAFETY: `next` gives the place of an argument of this size.
        Ok(unsafe { T::read(place) })
    }
}

/// Hands the functions that pass values alone to a macro: names of both entry points, arguments in order, result, and
/// what is done.
macro_rules! flat_functions {
    ($callback:ident) => {
        $callback! {
            create "__catalyst__transport__create__call" "__catalyst__transport__create__wrapper"
                (backend: Text, config: Text, role: i32, key: Text) -> u64
                = interface::create(backend.bytes(), config.bytes(), role, key.bytes());
            get_session "__catalyst__transport__get_session__call" "__catalyst__transport__get_session__wrapper"
                (role: i32, key: Text) -> u64
                = interface::get_session(role, key.bytes());
            connect "__catalyst__transport__connect__call" "__catalyst__transport__connect__wrapper"
                (session: u64, peer: Text, port: u16) -> i32
                = interface::connect(session, peer.bytes(), port);
            connect_async "__catalyst__transport__connect_async__call" "__catalyst__transport__connect_async__wrapper"
                (session: u64, peer: Text, port: u16) -> i64
                = interface::connect_async(session, peer.bytes(), port);
            exchange_keys "__catalyst__transport__exchange_keys__call" "__catalyst__transport__exchange_keys__wrapper"
                (session: u64) -> i32
                = interface::exchange_keys(session);
            exchange_keys_async
                "__catalyst__transport__exchange_keys_async__call" "__catalyst__transport__exchange_keys_async__wrapper"
                (session: u64) -> i64
                = interface::exchange_keys_async(session);
            wait "__catalyst__transport__await__call" "__catalyst__transport__await__wrapper"
                (token: i64) -> i32
                = interface::wait(token);
            establish_channel
                "__catalyst__transport__establish_channel__call" "__catalyst__transport__establish_channel__wrapper"
                (session: u64, transport: Text) -> i32
                = interface::establish_channel(session, transport.bytes());
            set_coprocessor_fn
                "__catalyst__transport__set_coprocessor_fn__call" "__catalyst__transport__set_coprocessor_fn__wrapper"
                (session: u64, symbol: Text) -> i32
                = interface::set_coprocessor_fn(session, symbol.bytes());
            set_message_sizes
                "__catalyst__transport__set_message_sizes__call" "__catalyst__transport__set_message_sizes__wrapper"
                (session: u64, index: u32, request: u64, reply: u64) -> i32
                = interface::set_message_sizes(session, index, request, reply);
            start "__catalyst__transport__start__call" "__catalyst__transport__start__wrapper"
                (session: u64) -> i32
                = silent(interface::start(session));
            stop "__catalyst__transport__stop__call" "__catalyst__transport__stop__wrapper"
                (session: u64) -> i32
                = silent(interface::stop(session));
            destroy "__catalyst__transport__destroy__call" "__catalyst__transport__destroy__wrapper"
                (session: u64) -> i32
                = silent(interface::destroy(session));
        }
    };
}
pub(super) use flat_functions;

/// The result of functions that are void in C: 0 whatever happened.
pub(super) fn silent(_status: i32) -> i32 {
    0
}
