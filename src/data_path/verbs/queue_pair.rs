//! Queue pairs: creation, the way to ready-to-send, and the write.

use std::os::raw::c_int;
use std::sync::Arc;

use super::completion::CompletionQueue;
use super::device::{Context, Route};
use super::ffi;
use super::memory::ProtectionDomain;
use crate::error::{Result, TransportError};
use crate::oob::Endpoint;
use crate::session::{LocalKey, RemoteKey};

/// A reliable connected queue pair and the work request that it posts, built once.
#[derive(Debug)]
pub(crate) struct QueuePair {
    pub(super) raw: *mut ffi::ibv_qp,
    domain: Arc<ProtectionDomain>,
    /// Work requests that may be outstanding, as granted.
    pub(crate) send_depth: u32,
    /// Bytes that a request may carry inline, as granted.
    pub(crate) inline_bytes: u32,
    request: Box<Request>,
}

/// A work request and its only segment, which it points to: kept in one box so that the pointer stays right.
struct Request {
    work: ffi::ibv_send_wr,
    segment: ffi::ibv_sge,
}

impl std::fmt::Debug for Request {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Request")
    }
}

// SAFETY: the verbs interface lets any thread use a queue pair; `&mut` methods keep it to one at a time. The request's
// pointer leads into its own box.
unsafe impl Send for QueuePair {}

/// Bytes that one write carries and where they go.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Write {
    /// Comes back with the completion.
    pub(crate) id: u64,
    /// Address of the bytes here.
    pub(crate) local: u64,
    /// Their key.
    pub(crate) local_key: LocalKey,
    /// How many.
    pub(crate) bytes: u32,
    /// Address in the peer's memory.
    pub(crate) remote: u64,
    /// Its key.
    pub(crate) remote_key: RemoteKey,
    /// Ask for a completion.
    pub(crate) signalled: bool,
}

impl QueuePair {
    /// `ibv_create_qp`: asks for `depth` requests and `inline_bytes`, and steps the latter down to nothing while the
    /// device refuses (EINVAL). What was granted is read back.
    pub(crate) fn create(
        domain: &Arc<ProtectionDomain>,
        completions: &CompletionQueue,
        depth: u32,
        inline_bytes: u32,
    ) -> Result<Self> {
        let context = &domain.context;
        let mut asked = inline_bytes;
        loop {
            // SAFETY: a plain structure.
            let mut attributes: ffi::ibv_qp_init_attr = unsafe { ffi::zeroed() };
            attributes.send_cq = completions.raw;
            attributes.recv_cq = completions.raw;
            attributes.qp_type = ffi::ibv_qp_type::IBV_QPT_RC;
            attributes.cap.max_send_wr = depth;
            attributes.cap.max_send_sge = 1;
            attributes.cap.max_recv_wr = 1;
            attributes.cap.max_recv_sge = 1;
            attributes.cap.max_inline_data = asked;
            // SAFETY: domain and queue are alive and of the same context; the structure is filled and outlives the call.
            let raw = unsafe { (context.verbs.create_qp)(domain.raw, &mut attributes) };
            if !raw.is_null() {
                return Ok(Self {
                    raw,
                    domain: domain.clone(),
                    send_depth: attributes.cap.max_send_wr,
                    // More than asked may be granted; a frame only needs what was asked.
                    inline_bytes: attributes.cap.max_inline_data,
                    request: Request::new(),
                });
            }
            let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
            if errno != libc::EINVAL || asked == 0 {
                return Err(context.error("ibv_create_qp", errno, format!("asking for {depth} requests")));
            }
            asked = if asked > 64 { asked / 2 } else { 0 };
        }
    }

    /// Number of the queue pair.
    pub(crate) fn number(&self) -> u32 {
        // SAFETY: alive until `drop`.
        unsafe { (*self.raw).qp_num }
    }

    /// Whether the device promises that the bytes of a write are placed in order.
    pub(crate) fn places_in_order(&self) -> bool {
        // SAFETY: alive; the call only asks.
        unsafe {
            (self.context().verbs.query_qp_data_in_order)(self.raw, ffi::ibv_wr_opcode::IBV_WR_RDMA_WRITE, 0) == 1
        }
    }

    /// RESET → INIT: open to remote writes and nothing else.
    pub(crate) fn enter_init(&mut self, port: u8) -> Result<()> {
        use ffi::ibv_qp_attr_mask as mask;
        let mut attributes = attributes(ffi::ibv_qp_state::IBV_QPS_INIT);
        attributes.port_num = port;
        attributes.qp_access_flags = ffi::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0;
        let bits = mask::IBV_QP_STATE | mask::IBV_QP_PKEY_INDEX | mask::IBV_QP_PORT | mask::IBV_QP_ACCESS_FLAGS;
        self.modify(attributes, bits, "moving a queue pair to INIT", "")
    }

    /// INIT → RTR: the address of the peer.
    pub(crate) fn enter_ready_to_receive(&mut self, route: &Route, peer: &Endpoint, peer_name: &str) -> Result<()> {
        use ffi::ibv_qp_attr_mask as mask;
        let attributes = receive_attributes(route, peer);
        let bits = mask::IBV_QP_STATE
            | mask::IBV_QP_AV
            | mask::IBV_QP_PATH_MTU
            | mask::IBV_QP_DEST_QPN
            | mask::IBV_QP_RQ_PSN
            | mask::IBV_QP_MAX_DEST_RD_ATOMIC
            | mask::IBV_QP_MIN_RNR_TIMER;
        self.modify(attributes, bits, "moving a queue pair to RTR", peer_name)
    }

    /// RTR → RTS: how long to try.
    pub(crate) fn enter_ready_to_send(&mut self, psn: u32, retry: Retry, peer_name: &str) -> Result<()> {
        use ffi::ibv_qp_attr_mask as mask;
        let mut attributes = attributes(ffi::ibv_qp_state::IBV_QPS_RTS);
        attributes.sq_psn = psn;
        attributes.timeout = retry.timeout;
        attributes.retry_cnt = retry.count;
        attributes.rnr_retry = retry.count;
        let bits = mask::IBV_QP_STATE
            | mask::IBV_QP_SQ_PSN
            | mask::IBV_QP_TIMEOUT
            | mask::IBV_QP_RETRY_CNT
            | mask::IBV_QP_RNR_RETRY
            | mask::IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify(attributes, bits, "moving a queue pair to RTS", peer_name)
    }

    /// Any state → ERR: the device takes and gives nothing more, and flushes what is queued.
    pub(crate) fn enter_error(&mut self) -> Result<()> {
        self.modify(
            attributes(ffi::ibv_qp_state::IBV_QPS_ERR),
            ffi::ibv_qp_attr_mask::IBV_QP_STATE,
            "moving a queue pair to ERR",
            "",
        )
    }

    fn modify(
        &mut self,
        mut attributes: ffi::ibv_qp_attr,
        bits: ffi::ibv_qp_attr_mask,
        step: &str,
        peer: &str,
    ) -> Result<()> {
        let verbs = self.context().verbs;
        // SAFETY: alive; the structure is zeroed but for what the mask names and outlives the call.
        let errno = unsafe { (verbs.modify_qp)(self.raw, &mut attributes, bits.0 as c_int) };
        if errno == 0 {
            return Ok(());
        }
        let hint = match errno {
            libc::EINVAL => " (an attribute does not fit: most often the GID index, the peer's GID or the MTU)",
            libc::ETIMEDOUT | libc::EHOSTUNREACH | libc::ENETUNREACH => {
                " (no way leads from this GID to the peer's: give both interfaces an address of one network, or choose \
                 another GID index)"
            }
            _ => "",
        };
        let error = self.context().error("ibv_modify_qp", errno, format!("{step}{hint}"));
        Err(match error {
            TransportError::Verbs(mut failure) => {
                failure.peer = peer.to_owned();
                TransportError::Verbs(failure)
            }
            other => other,
        })
    }

    /// Posts one RDMA write; inline when the granted size allows. Returns the error number, 0 for success, and ENOMEM
    /// when the send queue is full.
    ///
    /// # Safety
    /// `local` has to be valid for reads of `bytes` until the write has completed (until the call returns, when inline),
    /// and registered under `local_key`.
    #[inline]
    pub(crate) unsafe fn post(&mut self, write: Write) -> i32 {
        let request = &mut *self.request;
        request.segment.addr = write.local;
        request.segment.length = write.bytes;
        request.segment.lkey = write.local_key.0;
        let work = &mut request.work;
        work.wr_id = write.id;
        // A segment of length 0 means 2^31 bytes to some devices: an empty write has no segment.
        work.num_sge = i32::from(write.bytes != 0);
        work.wr.rdma = ffi::rdma_t { remote_addr: write.remote, rkey: write.remote_key.0 };
        let mut flags = 0;
        if write.signalled {
            flags |= ffi::ibv_send_flags::IBV_SEND_SIGNALED.0;
        }
        if write.bytes <= self.inline_bytes {
            flags |= ffi::ibv_send_flags::IBV_SEND_INLINE.0;
        }
        work.send_flags = flags;
        work.sg_list = &mut request.segment;
        let mut refused = std::ptr::null_mut();
        // SAFETY: the queue pair lives; the request and its segment are valid during the call; the caller vouches for
        // the bytes.
        unsafe { ffi::ibv_post_send(self.raw, work, &mut refused) }
    }

    fn context(&self) -> &Arc<Context> {
        &self.domain.context
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: created once and destroyed once; the completion queue is still alive (declared after it).
        let errno = unsafe { (self.context().verbs.destroy_qp)(self.raw) };
        if errno != 0 {
            std::mem::forget(self.domain.clone());
        }
        self.context().released("ibv_destroy_qp", errno);
    }
}

impl Request {
    fn new() -> Box<Self> {
        // SAFETY: both are plain structures.
        let mut request = Box::new(unsafe { Self { work: ffi::zeroed(), segment: ffi::zeroed() } });
        request.work.opcode = ffi::ibv_wr_opcode::IBV_WR_RDMA_WRITE;
        request
    }
}

/// Acknowledgement timeout (as the exponent of 4.096 µs) and number of retries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Retry {
    pub(crate) timeout: u8,
    pub(crate) count: u8,
}

impl Retry {
    /// Never 7: soft-RoCE takes it for ever.
    const COUNT: u8 = 6;
    /// 4.096 µs · 2^14 = 67 ms: longer than any network's round trip, short enough that a lost packet is soon repeated.
    const LARGEST_TIMEOUT: u8 = 14;

    /// The largest timeout, up to 67 ms, with which all tries end within `bound`.
    pub(crate) fn within(bound: std::time::Duration) -> Self {
        let one_try = bound.as_nanos() / u128::from(Self::COUNT + 1);
        // 0 would mean no timeout at all.
        let timeout =
            (1..=Self::LARGEST_TIMEOUT).rev().find(|exponent| (4096_u128 << exponent) <= one_try).unwrap_or(1);
        Self { timeout, count: Self::COUNT }
    }
}

fn attributes(state: ffi::ibv_qp_state::Type) -> ffi::ibv_qp_attr {
    // SAFETY: a plain structure.
    let mut attributes: ffi::ibv_qp_attr = unsafe { ffi::zeroed() };
    attributes.qp_state = state;
    attributes
}

/// What RTR needs: by LID on InfiniBand, by GID on Ethernet, and the smaller MTU of both sides.
fn receive_attributes(route: &Route, peer: &Endpoint) -> ffi::ibv_qp_attr {
    let mut attributes = attributes(ffi::ibv_qp_state::IBV_QPS_RTR);
    attributes.path_mtu = u32::from(route.mtu.min(peer.mtu));
    attributes.dest_qp_num = peer.queue_pair;
    attributes.rq_psn = peer.psn;
    attributes.min_rnr_timer = 12;
    let address = &mut attributes.ah_attr;
    address.port_num = route.port;
    if route.link_layer == ffi::LINK_LAYER_INFINIBAND {
        address.dlid = peer.lid;
    } else {
        address.is_global = 1;
        address.grh.dgid.raw = peer.gid;
        address.grh.sgid_index = route.gid_index;
        address.grh.hop_limit = 64;
    }
    attributes
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn all_tries_end_within_the_bound() {
        for millis in [1, 100, 500, 1000, 60_000] {
            let retry = Retry::within(Duration::from_millis(millis));
            let total = (4096_u128 << retry.timeout) * u128::from(retry.count + 1);
            assert!(total <= u128::from(millis) * 1_000_000, "{millis} ms: {retry:?}");
            assert!((1..=14).contains(&retry.timeout));
        }
        assert_eq!(Retry::within(Duration::ZERO).timeout, 1);
        assert_eq!(Retry::within(Duration::from_secs(5)), Retry { timeout: 14, count: 6 });
    }

    #[test]
    fn infiniband_is_routed_by_lid_and_ethernet_by_gid() {
        let mut route =
            Route { port: 2, link_layer: ffi::LINK_LAYER_INFINIBAND, mtu: 5, gid_index: 3, ..Route::default() };
        let peer = Endpoint { mtu: 3, lid: 77, queue_pair: 9, psn: 5, gid: [4; 16], ..Endpoint::default() };
        let by_lid = receive_attributes(&route, &peer);
        assert_eq!((by_lid.ah_attr.dlid, by_lid.ah_attr.is_global, by_lid.path_mtu), (77, 0, 3));
        route.link_layer = ffi::LINK_LAYER_ETHERNET;
        let by_gid = receive_attributes(&route, &peer);
        assert_eq!((by_gid.ah_attr.dlid, by_gid.ah_attr.is_global, by_gid.ah_attr.grh.sgid_index), (0, 1, 3));
        assert_eq!((by_gid.dest_qp_num, by_gid.rq_psn, by_gid.ah_attr.port_num), (9, 5, 2));
        // SAFETY: the union was written through this member.
        assert_eq!(unsafe { by_gid.ah_attr.grh.dgid.raw }, [4; 16]);
    }
}
