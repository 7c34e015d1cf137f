//! Copies between private memory and memory that others may write.
//!
//! A plain `memcpy` of memory that another process writes at the same time is undefined behaviour in Rust, because the
//! compiler may assume that nothing changes, and read twice. These copies are opaque to it: volatile words for the short
//! ones, the processor's string instruction for the long ones.

/// From this length on the string instruction is faster than a loop of words (measured: `docs/performance.md`).
#[cfg(target_arch = "x86_64")]
const STRING_COPY_FROM: usize = 256;

/// Copies `len` bytes.
///
/// # Safety
/// - `from` is valid for reads and `to` for writes of `len` bytes; they do not overlap.
/// - Either side may be written by others meanwhile; then the bytes that arrive are some mixture of old and new.
#[inline]
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if len >= STRING_COPY_FROM {
        let words = len / 8 * 8;
        // SAFETY: the caller vouches for both ranges, of which this copies the first `words` bytes and `copy_words` the rest;
        // the direction flag is clear by the calling convention.
        unsafe {
            // Of words, not of bytes: as fast on a processor, and eight times as fast where one is emulated.
            std::arch::asm!(
                "rep movsq",
                inout("rcx") words / 8 => _,
                inout("rsi") from => _,
                inout("rdi") to => _,
                options(nostack, preserves_flags)
            );
            copy_words(from.add(words), to.add(words), len - words);
        }
        return;
    }
    // SAFETY: every access below lies inside of the two ranges that the caller vouches for.
    unsafe { copy_words(from, to, len) }
}

/// A word that may lie at any address.
#[repr(C, packed)]
#[derive(Clone, Copy)]
struct Unaligned<T>(T);

/// Copies word by word from the end, where frames are aligned, and the rest by ever smaller pieces.
#[inline]
unsafe fn copy_words(from: *const u8, to: *mut u8, len: usize) {
    let mut left = len;
    macro_rules! piece {
        ($word:ty) => {
            left -= size_of::<$word>();
            // SAFETY: `left` and the piece behind it lie inside of both ranges; a packed word needs no alignment.
            unsafe {
                let word = from.add(left).cast::<Unaligned<$word>>().read_volatile();
                to.add(left).cast::<Unaligned<$word>>().write_volatile(word);
            }
        };
    }
    while left >= 8 {
        piece!(u64);
    }
    if left >= 4 {
        piece!(u32);
    }
    if left >= 2 {
        piece!(u16);
    }
    if left >= 1 {
        piece!(u8);
    }
    debug_assert_eq!(left, 0);
}

#[cfg(all(test, not(loom)))]
mod tests {
    #[test]
    fn every_length_and_alignment_arrives_whole() {
        let from: Vec<u8> = (0..4500u32).map(|i| (i * 7 + i / 256) as u8).collect();
        for len in (0..600).chain([1000, 4095, 4096, 4097]) {
            for shift in [0, 1, 3, 7] {
                let mut to = vec![0xAA; 4600];
                // SAFETY: both vectors hold `shift + len` bytes and more.
                unsafe { super::copy(from[shift..].as_ptr(), to[16 - shift..].as_mut_ptr(), len) };
                assert_eq!(to[16 - shift..][..len], from[shift..][..len], "{len} bytes shifted by {shift}");
                assert!(to[..16 - shift].iter().chain(&to[16 - shift + len..]).all(|byte| *byte == 0xAA));
            }
        }
    }
}
