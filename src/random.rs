//! Random bytes from the kernel: session numbers, tokens, nonces.

use crate::error::{Result, TransportError};

/// Bytes that nobody can foretell.
///
/// # Errors
/// [`TransportError::System`] where the kernel has none to give.
pub(crate) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(TransportError::system("getrandom", "random numbers", error)),
        }
    }
    Ok(bytes)
}
