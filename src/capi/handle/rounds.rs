//! The rounds of a session: its slots, and what is staged, posted and collected.

use std::sync::atomic::Ordering;

use super::{Core, Handle, destroyed};
use crate::capi::failure::{Failure, caught};
use crate::capi::slots;

impl Handle {
    /// The request slot, from which the next round is sent.
    pub(in crate::capi) fn request_slot(&self) -> Result<*mut u8, Failure> {
        self.with(|core| {
            core.require_established("request_slot")?;
            core.session.controller("request_slot")?;
            core.in_slot = true;
            self.unstaged.store(false, Ordering::Relaxed);
            Ok(self.request.start())
        })
    }

    /// The slot in which `collect` leaves a copy of each reply.
    pub(in crate::capi) fn reply_slot(&self) -> *mut u8 {
        self.reply.start()
    }

    /// `stage_payload`, that is `write_data_slot`.
    ///
    /// # Safety
    /// `source` points to `bytes` bytes.
    pub(in crate::capi) unsafe fn stage_payload(
        &self,
        source: *const u8,
        bytes: u64,
        decoder_id: u32,
    ) -> Result<(), Failure> {
        self.unstaged.store(true, Ordering::Relaxed);
        self.with(|core| {
            core.require_established("stage_payload")?;
            let capacity = self.config.channel().request_capacity;
            if bytes > capacity as u64 {
                return Err(Failure::new(format!(
                    "{bytes} bytes were given and the channel carries {capacity}; set request= in both sides' configuration"
                )));
            }
            let payload = match bytes {
                0 => &[],
                _ if source.is_null() => return Err(Failure::new("the payload is NULL")),
                // SAFETY: the caller's promise.
                _ => unsafe { std::slice::from_raw_parts(source, bytes as usize) },
            };
            core.session.controller("stage_payload")?.write_data_slot(payload, decoder_id)?;
            core.in_slot = false;
            self.unstaged.store(false, Ordering::Relaxed);
            Ok(())
        })
    }

    /// `post`, that is `kick`.
    pub(in crate::capi) fn post(&self, index: u32) -> Result<(), Failure> {
        self.with(|core| core.post(self, index))
    }

    /// `collect`, into buffers of the caller's or the reply slot. What the reply leaves of them is zeroed, and on failure
    /// all of them that are no slots, by the caller, with [`wipe`]. The reply slot is zeroed here on failure, so that a late
    /// reader does not take the last round's reply for this one's; unless another call holds the session: then the slot is
    /// that call's.
    ///
    /// # Safety
    /// Each buffer is that long, and nobody else uses it meanwhile; the reply slot may be among them.
    pub(in crate::capi) unsafe fn collect(&self, buffers: &[(*mut u8, usize)]) -> Result<(), Failure> {
        let mut core = self.lock(Some(self.config.stop_timeout))?;
        let collected = match &mut *core {
            // SAFETY: the caller's promise.
            Some(core) if !self.closing() => caught(|| unsafe { core.collect(self, buffers) }),
            _ => Err(destroyed()),
        };
        if collected.is_err() {
            self.reply.wipe();
        }
        collected
    }

    /// A reply buffer as a slice.
    ///
    /// # Safety
    /// It has that many bytes, and nobody else uses it while the slice lives.
    unsafe fn slice<'a>(&self, (start, bytes): (*mut u8, usize)) -> Result<&'a mut [u8], Failure> {
        if bytes == 0 {
            return Ok(&mut []);
        }
        if start.is_null() {
            return Err(Failure::new("the reply buffer is NULL"));
        }
        if !is_possible(bytes) {
            return Err(Failure::new("no buffer has so many bytes"));
        }
        if let Some(offset) = self.reply.offset_of(start)
            && bytes > self.reply.length() - offset
        {
            return Err(Failure::new(format!(
                "{bytes} bytes are wanted in the reply slot, which has {}; set reply= in both sides' configuration",
                self.reply.length() - offset
            )));
        }
        // SAFETY: the caller's promise, or within the slot.
        Ok(unsafe { std::slice::from_raw_parts_mut(start, bytes) })
    }

    /// Keeps a round-trip time for [`last_rtt_ns`](Self::last_rtt_ns).
    pub(in crate::capi) fn record_rtt(&self, nanoseconds: u64) {
        self.last_rtt.store(nanoseconds, Ordering::Relaxed);
    }

    /// Round-trip time of the last collected round in nanoseconds.
    pub(in crate::capi) fn last_rtt_ns(&self) -> u64 {
        self.last_rtt.load(Ordering::Relaxed)
    }
}

/// Zeroes a caller's reply buffer after a failure. A slot is left: `collect` has zeroed it under its session's lock, or it
/// is not this call's.
///
/// # Safety
/// The buffer is NULL or has that many bytes, and nobody else uses them meanwhile.
pub(in crate::capi) unsafe fn wipe(buffer: *mut u8, bytes: usize) {
    if !buffer.is_null() && is_possible(bytes) && !slots::is_slot(buffer) {
        // SAFETY: the caller's promise.
        unsafe { buffer.write_bytes(0, bytes) };
    }
}

/// Whether a buffer may have so many bytes. More than memory can hold breaks the contract; nothing is written then.
fn is_possible(bytes: usize) -> bool {
    isize::try_from(bytes).is_ok()
}

impl Core {
    pub(in crate::capi) fn post(&mut self, handle: &Handle, index: u32) -> Result<(), Failure> {
        self.require_established("post")?;
        let session = self.session.controller("post")?;
        if handle.unstaged.swap(false, Ordering::Relaxed) {
            return Err(Failure::new("nothing is sent: the payload of this round could not be staged"));
        }
        if self.in_slot
            && let Some(bytes) = self.items.get(&index)
        {
            // SAFETY: the slot's user has finished with it, or would not post.
            let payload = unsafe { handle.request.bytes() };
            session.write_data_slot(&payload[..*bytes], 0)?;
        }
        session.kick(index)?;
        self.in_slot = false;
        Ok(())
    }

    /// See [`Handle::collect`].
    ///
    /// # Safety
    /// As there.
    pub(in crate::capi) unsafe fn collect(
        &mut self,
        handle: &Handle,
        buffers: &[(*mut u8, usize)],
    ) -> Result<(), Failure> {
        self.require_established("collect")?;
        let from_slot = buffers.iter().any(|(start, _)| handle.reply.offset_of(*start).is_some());
        // SAFETY: the caller's promise.
        let slice = |buffer: &(*mut u8, usize)| unsafe { handle.slice(*buffer) };
        if let [buffer] = buffers {
            // The way of every round, without an allocation.
            return self.collect_into(handle, &mut [slice(buffer)?], from_slot);
        }
        let mut slices = buffers.iter().map(slice).collect::<Result<Vec<_>, _>>()?;
        self.collect_into(handle, &mut slices, from_slot)
    }

    fn collect_into(&mut self, handle: &Handle, slices: &mut [&mut [u8]], from_slot: bool) -> Result<(), Failure> {
        let session = self.session.either();
        let mut written = session.collect(slices)?;
        handle.record_rtt(session.last_rtt_ns());
        // SAFETY: not among the buffers, and under the lock.
        let mut copy: &mut [u8] = if from_slot { &mut [] } else { unsafe { handle.reply.bytes() } };
        for slice in slices {
            let (reply, rest) = slice.split_at_mut(written.min(slice.len()));
            rest.fill(0);
            let kept = reply.len().min(copy.len());
            let (front, back) = copy.split_at_mut(kept);
            front.copy_from_slice(&reply[..kept]);
            copy = back;
            written -= reply.len();
        }
        copy.fill(0);
        Ok(())
    }
}
