//! A software device in place of libibverbs, for tests.

pub(crate) fn table() -> &'static super::ffi::Table {
    &super::ffi::SYSTEM
}
