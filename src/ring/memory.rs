//! Memory that a device or another process may write at any time.
//!
//! It is never borrowed as a slice: what is in it is read and written by atomic words and by the copies of
//! [`super::copy`], through raw pointers alone. Nothing read from it is used before it has been copied.

#[cfg(not(loom))]
pub(crate) use real::SharedBytes;

#[cfg(loom)]
pub(crate) use modelled::SharedBytes;

#[cfg(not(loom))]
mod real {
    use std::ptr::NonNull;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use memmap2::MmapRaw;

    use crate::ring::copy;

    /// A part of a mapping, kept mapped for as long as this value lives.
    #[derive(Debug, Clone)]
    pub(crate) struct SharedBytes {
        base: NonNull<u8>,
        len: usize,
        /// Keeps the mapping in place; `base` points into it.
        mapping: Arc<MmapRaw>,
    }

    // SAFETY: `base` points into memory that the `Arc` keeps mapped wherever the value goes, and every access through it is
    // an atomic or a raw copy that tolerates concurrent writers.
    unsafe impl Send for SharedBytes {}
    // SAFETY: as above: a shared reference gives no access beyond atomics and raw copies.
    unsafe impl Sync for SharedBytes {}

    impl SharedBytes {
        /// The whole mapping. Mappings begin at a page, so the alignment of every multiple of 8 holds.
        pub(crate) fn new(mapping: Arc<MmapRaw>) -> Self {
            let base = NonNull::new(mapping.as_mut_ptr()).expect("a mapping is never at address zero");
            assert_eq!(base.as_ptr() as usize % 64, 0, "mappings begin at a page");
            Self { base, len: mapping.len(), mapping }
        }

        /// Zeroed private memory of its own, for a ring between two threads or for frames on their way to a device.
        pub(crate) fn anonymous(bytes: usize) -> std::io::Result<Self> {
            let mapping = memmap2::MmapOptions::new().len(bytes.max(1)).populate().map_anon()?;
            Ok(Self::new(Arc::new(MmapRaw::from(mapping))))
        }

        /// Bytes.
        pub(crate) fn len(&self) -> usize {
            self.len
        }

        /// Makes every page present; an error, rather than a signal at some later access, when the system has none left.
        pub(crate) fn populate(&self) -> std::io::Result<()> {
            match self.mapping.advise(memmap2::Advice::PopulateWrite) {
                // A kernel before 5.14 leaves it to the first access.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
                other => other,
            }
        }

        /// Address of the byte at `offset`, for a device.
        pub(crate) fn address(&self, offset: usize) -> u64 {
            self.base.as_ptr() as u64 + offset as u64
        }

        #[inline]
        fn at(&self, offset: usize, bytes: usize) -> *mut u8 {
            assert!(offset.checked_add(bytes).is_some_and(|end| end <= self.len), "outside of the memory");
            // SAFETY: the assertion above keeps the offset inside of the mapping.
            unsafe { self.base.as_ptr().add(offset) }
        }

        #[inline]
        fn word(&self, offset: usize) -> &AtomicU64 {
            assert_eq!(offset % 8, 0, "words are aligned");
            let pointer = self.at(offset, 8).cast::<u64>();
            // SAFETY: in bounds by `at`; aligned, since the base is aligned to 64 and the offset to 8; mapped while
            // `self` lives; an atomic may be written by others at any time.
            unsafe { AtomicU64::from_ptr(pointer) }
        }

        /// Reads a word; what was written before it is visible after it.
        #[inline]
        pub(crate) fn load_acquire(&self, offset: usize) -> u64 {
            self.word(offset).load(Ordering::Acquire)
        }

        /// Reads a word without ordering.
        #[inline]
        pub(crate) fn load_relaxed(&self, offset: usize) -> u64 {
            self.word(offset).load(Ordering::Relaxed)
        }

        /// Writes a word without ordering.
        #[inline]
        pub(crate) fn store_relaxed(&self, offset: usize, value: u64) {
            self.word(offset).store(value, Ordering::Relaxed);
        }

        /// Writes a word after everything that was written before it.
        #[inline]
        pub(crate) fn store_release(&self, offset: usize, value: u64) {
            self.word(offset).store(value, Ordering::Release);
        }

        /// Copies bytes out. They may be torn when somebody writes at the same time: check before use.
        #[inline]
        pub(crate) fn copy_out(&self, offset: usize, to: &mut [u8]) {
            let from = self.at(offset, to.len());
            // SAFETY: `from` is in bounds for the length by `at`; `to` is a private slice, which no mapping overlaps.
            unsafe { copy::copy(from, to.as_mut_ptr(), to.len()) }
        }

        /// Copies bytes in.
        #[inline]
        pub(crate) fn copy_in(&self, offset: usize, from: &[u8]) {
            let to = self.at(offset, from.len());
            // SAFETY: as in `copy_out`.
            unsafe { copy::copy(from.as_ptr(), to, from.len()) }
        }
    }
}

#[cfg(loom)]
mod modelled {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicU64, Ordering};

    /// Words under loom's control in place of a mapping. Copies work on whole words.
    #[derive(Debug, Clone)]
    pub(crate) struct SharedBytes {
        words: Arc<Vec<AtomicU64>>,
    }

    impl SharedBytes {
        pub(crate) fn anonymous(bytes: usize) -> std::io::Result<Self> {
            Ok(Self { words: Arc::new((0..bytes / 8).map(|_| AtomicU64::new(0)).collect()) })
        }

        pub(crate) fn len(&self) -> usize {
            self.words.len() * 8
        }

        pub(crate) fn load_acquire(&self, offset: usize) -> u64 {
            self.words[offset / 8].load(Ordering::Acquire)
        }

        pub(crate) fn load_relaxed(&self, offset: usize) -> u64 {
            self.words[offset / 8].load(Ordering::Relaxed)
        }

        pub(crate) fn store_relaxed(&self, offset: usize, value: u64) {
            self.words[offset / 8].store(value, Ordering::Relaxed);
        }

        pub(crate) fn store_release(&self, offset: usize, value: u64) {
            self.words[offset / 8].store(value, Ordering::Release);
        }

        pub(crate) fn copy_out(&self, offset: usize, to: &mut [u8]) {
            for (index, chunk) in to.chunks_exact_mut(8).enumerate() {
                chunk.copy_from_slice(&self.load_relaxed(offset + index * 8).to_ne_bytes());
            }
        }

        pub(crate) fn copy_in(&self, offset: usize, from: &[u8]) {
            for (index, chunk) in from.chunks_exact(8).enumerate() {
                self.store_relaxed(offset + index * 8, u64::from_ne_bytes(chunk.try_into().unwrap()));
            }
        }
    }
}
