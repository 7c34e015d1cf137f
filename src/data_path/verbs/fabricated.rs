//! A software device in place of libibverbs, for tests.
