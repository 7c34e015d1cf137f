//! Bytes into memory that somebody else polls, piece by piece.

use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use super::plan::Placement;

/// A piece: offset and length, at most 8.
type Piece = (usize, usize);

/// The pieces of a write of `length` bytes to `target`, in their order. `random` gives numbers.
pub(super) fn pieces(placement: Placement, target: u64, length: usize, mut random: impl FnMut() -> u64) -> Vec<Piece> {
    let mut list = Vec::with_capacity(length / 8 + 2);
    let mut offset = 0;
    while offset < length {
        let most = match placement {
            // Up to the next word of the target, so that words are placed whole.
            Placement::InOrder | Placement::Reversed => 8 - ((target + offset as u64) % 8) as usize,
            Placement::Random | Placement::Torn => 1 + (random() % 8) as usize,
        };
        let bytes = most.min(length - offset);
        list.push((offset, bytes));
        offset += bytes;
    }
    match placement {
        Placement::InOrder => {}
        Placement::Reversed => list.reverse(),
        Placement::Random | Placement::Torn => {
            for index in (1..list.len()).rev() {
                list.swap(index, (random() % (index as u64 + 1)) as usize);
            }
            // Every other time the last piece, which announces the frame, comes first.
            if random().is_multiple_of(2)
                && let Some(last) = list.iter().position(|(offset, bytes)| offset + bytes == length)
            {
                list.swap(0, last);
            }
        }
    }
    list
}

/// Places pieces.
///
/// # Safety
/// `target` has to be valid for writes of all pieces, and stay so. Others may read it meanwhile, by means that stand this.
pub(super) unsafe fn place(bytes: &[u8], target: u64, pieces: &[Piece], mut pause: impl FnMut(usize)) {
    for (index, (offset, length)) in pieces.iter().copied().enumerate() {
        pause(index);
        let from = &bytes[offset..offset + length];
        let to = (target + offset as u64) as *mut u8;
        // What was placed before this piece is visible before it.
        fence(Ordering::Release);
        if length == 8 && (to as usize).is_multiple_of(8) {
            let word = u64::from_ne_bytes(from.try_into().expect("eight bytes"));
            // SAFETY: inside of the target, which the caller vouches for; aligned by the condition. Volatile, so that it is
            // one store of the whole word.
            unsafe { to.cast::<u64>().write_volatile(word) };
        } else {
            for (index, byte) in from.iter().enumerate() {
                // SAFETY: inside of the target, which the caller vouches for.
                unsafe { to.add(index).write_volatile(*byte) };
            }
        }
    }
}

/// Reads bytes that their owner may be changing.
///
/// # Safety
/// `source` has to be valid for reads of `length` bytes.
pub(super) unsafe fn read(source: u64, length: usize, into: &mut Vec<u8>) {
    let start = into.len();
    into.resize(start + length, 0);
    // SAFETY: the caller vouches for the source; the vector was made long enough, and is nobody else's.
    unsafe { crate::ring::copy::copy(source as *const u8, into.as_mut_ptr().add(start), length) };
}

/// The pauses of a torn placement: before a few of its pieces, long enough for a spinning reader to look.
pub(super) fn pauses(count: usize) -> impl FnMut(usize) {
    // At most some eight, so that long writes do not take for ever.
    let every = (count / 8).max(1);
    move |index| {
        if index % every == 1 % every {
            std::thread::sleep(Duration::from_micros(20));
        }
    }
}
