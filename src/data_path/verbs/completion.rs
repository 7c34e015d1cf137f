//! Completion queues, and what a completion's status means.

use std::sync::Arc;

use super::device::Context;
use super::ffi;
use crate::error::{CompletionFailure, Result, TransportError};

/// A completion queue. Polled by its owner alone.
#[derive(Debug)]
pub(crate) struct CompletionQueue {
    pub(super) raw: *mut ffi::ibv_cq,
    context: Arc<Context>,
}

// SAFETY: the verbs interface lets any thread use a queue; `&mut` methods keep it to one at a time.
unsafe impl Send for CompletionQueue {}

/// A completed work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Completed {
    /// The number given at the post.
    pub(crate) id: u64,
    /// `ibv_wc_status`; 0 is success.
    pub(crate) status: u32,
    /// The vendor's own error number.
    pub(crate) vendor_error: u32,
}

impl CompletionQueue {
    /// `ibv_create_cq` with room for `entries` completions.
    pub(crate) fn create(context: &Arc<Context>, entries: u32) -> Result<Self> {
        // SAFETY: the context is open; neither a cookie nor a channel is used; vector 0 always exists.
        let raw = unsafe {
            (context.verbs.create_cq)(context.raw, entries as i32, std::ptr::null_mut(), std::ptr::null_mut(), 0)
        };
        if raw.is_null() {
            return Err(context.last_error("ibv_create_cq", format!("creating a queue of {entries} completions")));
        }
        Ok(Self { raw, context: context.clone() })
    }

    /// Takes one completion, if there is one.
    ///
    /// # Errors
    /// [`TransportError::Verbs`] when the poll itself fails.
    #[inline]
    pub(crate) fn poll(&mut self) -> Result<Option<Completed>> {
        // SAFETY: a completion is a plain structure.
        let mut entry: ffi::ibv_wc = unsafe { ffi::zeroed() };
        // SAFETY: the queue lives, and there is room for the one entry asked for.
        let count = unsafe { ffi::ibv_poll_cq(self.raw, 1, &mut entry) };
        match count {
            0 => Ok(None),
            // Of a failed completion only these fields are valid.
            1 => Ok(Some(Completed { id: entry.wr_id, status: entry.status, vendor_error: entry.vendor_err })),
            // The number is negative and not an error number (`man ibv_poll_cq`): as one it would be read for something
            // that never happened.
            failed => Err(self.context.error("ibv_poll_cq", libc::EIO, format!("polling for completions ({failed})"))),
        }
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: created by `create` and destroyed once; the queue pair that used it is gone, since it is declared, and so
        // dropped, before the queue.
        let errno = unsafe { (self.context.verbs.destroy_cq)(self.raw) };
        self.context.released("ibv_destroy_cq", errno);
    }
}

/// The error of a failed completion.
pub(crate) fn failure(completed: Completed, stage: &'static str, probed: bool, place: String) -> TransportError {
    let (name, cause) = meaning(completed.status, probed);
    TransportError::Completion(Box::new(CompletionFailure {
        status: completed.status,
        name,
        vendor_error: completed.vendor_error,
        stage,
        cause,
        place,
    }))
}

/// Name and likely cause of an `ibv_wc_status`. `probed`: data has already passed, so that the addressing is right.
pub(crate) fn meaning(status: u32, probed: bool) -> (&'static str, &'static str) {
    match status {
        0 => ("IBV_WC_SUCCESS", "no error"),
        1 => ("IBV_WC_LOC_LEN_ERR", "the write is longer than the port's largest message"),
        2 => (
            "IBV_WC_LOC_QP_OP_ERR",
            "the local queue pair could not carry out the request: on software RDMA its interface is down or has no route to \
             the peer; elsewhere a fault of this library",
        ),
        3 => ("IBV_WC_LOC_EEC_OP_ERR", "an end-to-end context failed, which this library does not use"),
        4 => {
            ("IBV_WC_LOC_PROT_ERR", "the bytes to send are not inside of a registered region: a fault of this library")
        }
        5 => (
            "IBV_WC_WR_FLUSH_ERR",
            "the queue pair went into error and not by a write of this side: the peer wrote where it may not, or the \
             device failed; the peer's error or the device's event tells why",
        ),
        6 => ("IBV_WC_MW_BIND_ERR", "a memory window failed, which this library does not use"),
        7 => ("IBV_WC_BAD_RESP_ERR", "the peer's device answered with an unexpected opcode"),
        8 => ("IBV_WC_LOC_ACCESS_ERR", "a local region does not permit the access"),
        9 => (
            "IBV_WC_REM_INV_REQ_ERR",
            "the peer's device refused the write: its queue pair does not allow remote writes, or the two sides use \
             different path MTUs",
        ),
        10 => (
            "IBV_WC_REM_ACCESS_ERR",
            "the peer's device refused the address or key: its region is gone, smaller, or not open to remote writes",
        ),
        11 => ("IBV_WC_REM_OP_ERR", "the peer's device could not complete the write"),
        12 if probed => (
            "IBV_WC_RETRY_EXC_ERR",
            "no acknowledgement came: the peer's process or host is gone, its port is down, or the network is cut",
        ),
        12 => (
            "IBV_WC_RETRY_EXC_ERR",
            "no acknowledgement came to the first write: the GID (index, type) does not reach the peer, the MTU is \
             larger than the path's, or a firewall drops UDP port 4791; try another GID index",
        ),
        13 => ("IBV_WC_RNR_RETRY_EXC_ERR", "the peer had no receive posted, which plain writes do not need"),
        14 => ("IBV_WC_LOC_RDD_VIOL_ERR", "a reliable-datagram domain was violated, which this library does not use"),
        15 => ("IBV_WC_REM_INV_RD_REQ_ERR", "a reliable-datagram request was invalid, which this library does not use"),
        16 => ("IBV_WC_REM_ABORT_ERR", "the peer's device aborted the operation"),
        17 => ("IBV_WC_INV_EECN_ERR", "an end-to-end context number was invalid, which this library does not use"),
        18 => {
            ("IBV_WC_INV_EEC_STATE_ERR", "an end-to-end context was in a wrong state, which this library does not use")
        }
        19 => ("IBV_WC_FATAL_ERR", "the device reported a fatal error: reset it, or reboot"),
        20 => ("IBV_WC_RESP_TIMEOUT_ERR", "the peer's device did not answer in time"),
        21 => ("IBV_WC_GENERAL_ERR", "the device gave no reason; its vendor error may"),
        22 => ("IBV_WC_TM_ERR", "tag matching failed, which this library does not use"),
        23 => ("IBV_WC_TM_RNDV_INCOMPLETE", "a tag-matching rendezvous is incomplete, which this library does not use"),
        _ => ("an unknown status", "a newer library reports a status that this version does not know"),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_status_has_a_name_and_a_cause() {
        for status in 0..=23 {
            let (name, cause) = super::meaning(status, false);
            assert!(name.starts_with("IBV_WC_") && !cause.is_empty(), "status {status}");
        }
        assert_ne!(super::meaning(12, false).1, super::meaning(12, true).1);
        assert_eq!(super::meaning(99, true).0, "an unknown status");
    }
}
