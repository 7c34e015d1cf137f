//! The software device does what verbs do, as far as the sessions rest on it.

use std::os::raw::c_int;
use std::time::{Duration, Instant};

use super::pairs::{ERR, INIT, RTR, RTS};
use super::{Installed, Plan, Verb, see, table};
use crate::data_path::verbs::ffi::{self, ibv_qp_attr_mask as mask, ibv_wc_status as status};

const BYTES: usize = 8192;

/// One side: a queue pair in INIT and a registered buffer.
struct End {
    context: *mut ffi::ibv_context,
    domain: *mut ffi::ibv_pd,
    queue: *mut ffi::ibv_cq,
    pair: *mut ffi::ibv_qp,
    region: *mut ffi::ibv_mr,
    memory: Box<[u8]>,
}

/// What connecting is told otherwise than usual.
#[derive(Clone, Copy)]
struct Way {
    access: u32,
    mtu: u32,
    receive_psn: u32,
    target: Option<u32>,
    gid: [u8; 16],
    timeout: u8,
}

impl Default for Way {
    fn default() -> Self {
        let gid = "::ffff:10.77.0.1".parse::<std::net::Ipv6Addr>().unwrap().octets();
        Self { access: 2, mtu: 3, receive_psn: 5, target: None, gid, timeout: 8 }
    }
}

impl End {
    fn new(name: &str) -> Self {
        see(&[name]);
        let mut memory = vec![0; BYTES].into_boxed_slice();
        // SAFETY: every verb is called as its manual page says, on objects that the lines before have made.
        unsafe {
            let list = (table().get_device_list)(&mut 0);
            let context = (table().open_device)(*list);
            (table().free_device_list)(list);
            let domain = (table().alloc_pd)(context);
            let queue = (table().create_cq)(context, 16, std::ptr::null_mut(), std::ptr::null_mut(), 0);
            let mut wanted: ffi::ibv_qp_init_attr = ffi::zeroed();
            wanted.send_cq = queue;
            wanted.recv_cq = queue;
            wanted.qp_type = ffi::ibv_qp_type::IBV_QPT_RC;
            wanted.cap.max_send_wr = 8;
            wanted.cap.max_send_sge = 2;
            wanted.cap.max_inline_data = 32;
            let pair = (table().create_qp)(domain, &mut wanted);
            assert!(!pair.is_null());
            let region = (table().reg_mr)(domain, memory.as_mut_ptr().cast(), BYTES, 3);
            assert!(!region.is_null());
            Self { context, domain, queue, pair, region, memory }
        }
    }

    fn number(&self) -> u32 {
        // SAFETY: structures of this device live for ever.
        unsafe { (*self.pair).qp_num }
    }

    fn modify(&self, attributes: &mut ffi::ibv_qp_attr, bits: ffi::ibv_qp_attr_mask) -> c_int {
        // SAFETY: the pair lives, and the structure is filled.
        unsafe { (table().modify_qp)(self.pair, attributes, bits.0 as c_int) }
    }

    fn connect(&self, peer: &End, way: Way) {
        // SAFETY: a plain structure.
        let mut to: ffi::ibv_qp_attr = unsafe { ffi::zeroed() };
        to.qp_state = INIT;
        to.port_num = 1;
        to.qp_access_flags = way.access;
        let bits = mask::IBV_QP_STATE | mask::IBV_QP_PKEY_INDEX | mask::IBV_QP_PORT | mask::IBV_QP_ACCESS_FLAGS;
        assert_eq!(self.modify(&mut to, bits), 0);
        to.qp_state = RTR;
        to.path_mtu = way.mtu;
        to.dest_qp_num = way.target.unwrap_or(peer.number());
        to.rq_psn = way.receive_psn;
        to.ah_attr.port_num = 1;
        to.ah_attr.is_global = 1;
        to.ah_attr.grh.dgid.raw = way.gid;
        to.ah_attr.grh.sgid_index = 2;
        assert_eq!(self.modify(&mut to, receive_bits()), 0);
        to.qp_state = RTS;
        to.sq_psn = 5;
        to.timeout = way.timeout;
        to.retry_cnt = 1;
        assert_eq!(self.modify(&mut to, send_bits()), 0);
    }

    /// A write of `length` bytes at the start of the buffer to the start of the peer's.
    fn write(&self, id: u64, length: u32, peer: &End) -> (ffi::ibv_send_wr, Box<ffi::ibv_sge>) {
        let mut segment =
            // SAFETY: structures of this device live for ever.
            Box::new(ffi::ibv_sge { addr: self.memory.as_ptr() as u64, length, lkey: unsafe { (*self.region).lkey } });
        // SAFETY: a plain structure.
        let mut work: ffi::ibv_send_wr = unsafe { ffi::zeroed() };
        work.wr_id = id;
        work.opcode = ffi::ibv_wr_opcode::IBV_WR_RDMA_WRITE;
        work.num_sge = c_int::from(length != 0);
        work.sg_list = &mut *segment;
        work.send_flags = ffi::ibv_send_flags::IBV_SEND_SIGNALED.0;
        let remote_addr = peer.memory.as_ptr() as u64;
        // SAFETY: as above.
        work.wr.rdma = ffi::rdma_t { remote_addr, rkey: unsafe { (*peer.region).rkey } };
        (work, segment)
    }

    fn post(&self, work: &mut ffi::ibv_send_wr) -> (c_int, *mut ffi::ibv_send_wr) {
        let mut refused = std::ptr::null_mut();
        // SAFETY: the pair lives, and the chain leads to live requests, segments and bytes.
        let errno = unsafe { ffi::ibv_post_send(self.pair, work, &mut refused) };
        (errno, refused)
    }

    fn poll(&self) -> Option<(u64, u32)> {
        // SAFETY: a plain structure.
        let mut completion: ffi::ibv_wc = unsafe { ffi::zeroed() };
        // SAFETY: the queue lives.
        let count = unsafe { ffi::ibv_poll_cq(self.queue, 1, &mut completion) };
        assert!(count >= 0);
        (count == 1).then_some((completion.wr_id, completion.status))
    }

    /// Waits for a completion.
    fn completion(&self) -> (u64, u32) {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            if let Some(found) = self.poll() {
                return found;
            }
            assert!(Instant::now() < deadline, "no completion");
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    fn event(&self) -> Option<i32> {
        let mut event = ffi::AsyncEvent { element: std::ptr::null_mut(), event_type: -1 };
        // SAFETY: the context is open; an event that was taken is acknowledged.
        unsafe {
            if (table().get_async_event)(self.context, &mut event) != 0 {
                return None;
            }
            (table().ack_async_event)(&mut event);
        }
        Some(event.event_type)
    }

    fn state(&self) -> u32 {
        // SAFETY: structures of this device live for ever.
        unsafe { (*self.pair).state }
    }

    fn close(self) {
        // SAFETY: each object is released once, after what depends on it.
        unsafe {
            assert_eq!((table().destroy_cq)(self.queue), libc::EBUSY);
            assert_eq!((table().dealloc_pd)(self.domain), libc::EBUSY);
            assert_eq!((table().destroy_qp)(self.pair), 0);
            assert_eq!((table().dealloc_pd)(self.domain), libc::EBUSY);
            assert_eq!((table().dereg_mr)(self.region), 0);
            assert_eq!((table().close_device)(self.context), libc::EBUSY);
            assert_eq!((table().destroy_cq)(self.queue), 0);
            assert_eq!((table().close_device)(self.context), libc::EBUSY);
            assert_eq!((table().dealloc_pd)(self.domain), 0);
            assert_eq!((table().close_device)(self.context), 0);
        }
    }
}

fn receive_bits() -> ffi::ibv_qp_attr_mask {
    mask::IBV_QP_STATE
        | mask::IBV_QP_AV
        | mask::IBV_QP_PATH_MTU
        | mask::IBV_QP_DEST_QPN
        | mask::IBV_QP_RQ_PSN
        | mask::IBV_QP_MAX_DEST_RD_ATOMIC
        | mask::IBV_QP_MIN_RNR_TIMER
}

fn send_bits() -> ffi::ibv_qp_attr_mask {
    mask::IBV_QP_STATE
        | mask::IBV_QP_SQ_PSN
        | mask::IBV_QP_TIMEOUT
        | mask::IBV_QP_RETRY_CNT
        | mask::IBV_QP_RNR_RETRY
        | mask::IBV_QP_MAX_QP_RD_ATOMIC
}

/// Two connected ends on a device of their own.
fn two(name: &str, own: Way, peer: Way) -> (Installed, End, End) {
    let device = Plan::new(name).install();
    let (a, b) = (End::new(name), End::new(name));
    a.connect(&b, own);
    b.connect(&a, peer);
    (device, a, b)
}

fn end(device: &Installed, a: End, b: End) {
    a.close();
    b.close();
    assert_eq!(device.open_objects(), Default::default());
    assert_eq!(device.violations(), Vec::<String>::new());
}

#[test]
fn what_the_wire_does_not_answer_ends_with_status_12() {
    let usual = Way::default();
    for (index, own) in
        [Way { target: Some(1), ..usual }, Way { gid: [7; 16], ..usual }, Way { ..usual }].into_iter().enumerate()
    {
        // The last one: the peer expects other numbers than this side sends.
        let peer = if index == 2 { Way { receive_psn: 6, ..usual } } else { usual };
        let (device, a, b) = two(&format!("silent-{index}"), own, peer);
        let (mut work, _segment) = a.write(1, 8, &b);
        let began = Instant::now();
        assert_eq!(a.post(&mut work).0, 0);
        assert_eq!(a.completion(), (1, status::IBV_WC_RETRY_EXC_ERR));
        assert!(began.elapsed() >= Duration::from_micros(4 * 256 * 2));
        assert_eq!((a.state(), b.state()), (ERR, RTS));
        end(&device, a, b);
    }
}

#[test]
fn a_timeout_of_zero_waits_for_ever() {
    let usual = Way::default();
    let (device, a, b) = two("for-ever", Way { target: Some(1), timeout: 0, ..usual }, usual);
    let (mut work, _segment) = a.write(1, 8, &b);
    assert_eq!(a.post(&mut work).0, 0);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(a.poll(), None);
    end(&device, a, b);
}

#[test]
fn what_the_target_refuses_has_its_status_and_event() {
    let usual = Way::default();
    // Not open to remote writes; different MTUs and a longer message.
    for (name, own, peer, length) in
        [("no-access", usual, Way { access: 0, ..usual }, 8), ("mtu-differs", usual, Way { mtu: 1, ..usual }, 257)]
    {
        let (device, a, b) = two(name, own, peer);
        if name == "mtu-differs" {
            let (mut fits, _segment) = a.write(1, 256, &b);
            assert_eq!(a.post(&mut fits).0, 0);
            assert_eq!(a.completion(), (1, status::IBV_WC_SUCCESS));
        }
        let (mut work, _segment) = a.write(2, length, &b);
        assert_eq!(a.post(&mut work).0, 0);
        assert_eq!(a.completion(), (2, status::IBV_WC_REM_INV_REQ_ERR));
        assert_eq!((b.event(), b.state(), a.event()), (Some(2), ERR, None));
        end(&device, a, b);
    }
    // A wrong key (the local one of the right region), an end outside, a region not open to writes.
    for (name, which) in [("wrong-key", 0), ("past-end", 1), ("read-only", 2)] {
        let (device, a, b) = two(name, usual, usual);
        let (mut work, _segment) = a.write(1, 8, &b);
        // SAFETY: structures of this device live for ever; the union is used through this member.
        unsafe {
            match which {
                0 => work.wr.rdma.rkey = (*b.region).lkey,
                1 => work.wr.rdma.remote_addr += BYTES as u64 - 7,
                _ => {
                    let memory = b.memory.as_ptr() as *mut _;
                    let closed = (table().reg_mr)(b.domain, memory, BYTES, 1);
                    work.wr.rdma.rkey = (*closed).rkey;
                    assert_eq!((table().dereg_mr)(closed), 0);
                }
            }
        }
        assert_eq!(a.post(&mut work).0, 0);
        assert_eq!(a.completion(), (1, status::IBV_WC_REM_ACCESS_ERR));
        assert_eq!((b.event(), b.state(), a.state()), (Some(3), ERR, ERR));
        assert!(b.memory.iter().all(|byte| *byte == 0));
        end(&device, a, b);
    }
}

#[test]
fn a_wrong_local_key_and_an_empty_segment_are_local_errors() {
    for which in 0..2 {
        let (device, a, b) = two(&format!("local-{which}"), Way::default(), Way::default());
        let (mut work, mut segment) = a.write(1, 8, &b);
        if which == 0 {
            // SAFETY: structures of this device live for ever.
            segment.lkey = unsafe { (*a.region).rkey };
        } else {
            segment.length = 0;
        }
        assert_eq!(a.post(&mut work).0, 0);
        let expected = if which == 0 { status::IBV_WC_LOC_PROT_ERR } else { status::IBV_WC_LOC_LEN_ERR };
        assert_eq!(a.completion(), (1, expected));
        // What follows is accepted and flushed.
        let (mut work, _segment) = a.write(2, 8, &b);
        assert_eq!(a.post(&mut work).0, 0);
        assert_eq!(a.completion(), (2, status::IBV_WC_WR_FLUSH_ERR));
        end(&device, a, b);
    }
}

#[test]
fn a_chain_is_posted_up_to_what_is_refused_and_slots_come_back_with_completions() {
    let (device, mut a, b) = two("chain", Way::default(), Way::default());
    a.memory[0] = 9;
    let mut chain: Vec<_> = (0..10).map(|id| a.write(id, 8, &b)).collect();
    for index in 0..9 {
        chain[index].0.next = &mut chain[index + 1].0;
        // Only the eighth asks for a completion.
        chain[index].0.send_flags = if index == 7 { ffi::ibv_send_flags::IBV_SEND_SIGNALED.0 } else { 0 };
    }
    let (first, ninth) = (&raw mut chain[0].0, &raw mut chain[8].0);
    // SAFETY: the vector is not touched while the chain leads through it.
    let (errno, refused) = a.post(unsafe { &mut *first });
    assert_eq!((errno, refused), (libc::ENOMEM, ninth));
    // The eight that were posted are delivered; one completion gives all their slots back.
    assert_eq!(a.completion(), (7, status::IBV_WC_SUCCESS));
    assert_eq!(b.memory[0], 9);
    assert_eq!(a.poll(), None);
    // An empty write looks at no key.
    let (mut empty, _segment) = a.write(20, 0, &b);
    empty.wr.rdma = ffi::rdma_t { remote_addr: 0, rkey: 0 };
    assert_eq!(a.post(&mut empty).0, 0);
    assert_eq!(a.completion(), (20, status::IBV_WC_SUCCESS));
    end(&device, a, b);
}

#[test]
fn inline_bytes_are_taken_at_the_post_and_others_at_the_delivery() {
    let device = Plan::new("when").delivery_delay(Duration::from_millis(30)).install();
    let (mut a, b) = (End::new("when"), End::new("when"));
    a.connect(&b, Way::default());
    b.connect(&a, Way::default());
    for (inline, expected) in [(true, 1), (false, 2)] {
        a.memory[0] = 1;
        let (mut work, _segment) = a.write(1, 8, &b);
        if inline {
            work.send_flags |= ffi::ibv_send_flags::IBV_SEND_INLINE.0;
        }
        assert_eq!(a.post(&mut work).0, 0);
        a.memory[0] = 2;
        assert_eq!(a.completion(), (1, status::IBV_WC_SUCCESS));
        assert_eq!(b.memory[0], expected);
    }
    let (mut long, _segment) = a.write(1, 33, &b);
    long.send_flags |= ffi::ibv_send_flags::IBV_SEND_INLINE.0;
    assert_eq!(a.post(&mut long).0, libc::EINVAL);
    end(&device, a, b);
}

#[test]
fn changes_of_state_need_their_attributes() {
    let device = Plan::new("mask").install();
    let (a, b) = (End::new("mask"), End::new("mask"));
    // SAFETY: a plain structure.
    let mut to: ffi::ibv_qp_attr = unsafe { ffi::zeroed() };
    let (mut work, _segment) = a.write(1, 8, &b);
    assert_eq!(a.post(&mut work).0, libc::EINVAL, "not in RESET");
    to.qp_state = RTR;
    assert_eq!(a.modify(&mut to, receive_bits()), libc::EINVAL, "not from RESET");
    to.qp_state = INIT;
    assert_eq!(a.modify(&mut to, mask::IBV_QP_STATE), libc::EINVAL);
    let all = mask::IBV_QP_STATE | mask::IBV_QP_PKEY_INDEX | mask::IBV_QP_PORT | mask::IBV_QP_ACCESS_FLAGS;
    assert_eq!(a.modify(&mut to, all), libc::EINVAL, "port 0");
    to.port_num = 1;
    to.pkey_index = 1;
    assert_eq!(a.modify(&mut to, all), libc::EINVAL, "no such partition");
    to.pkey_index = 0;
    assert_eq!(a.modify(&mut to, all), 0);
    to.qp_state = RTR;
    to.path_mtu = 3;
    to.ah_attr.port_num = 1;
    to.ah_attr.is_global = 1;
    to.ah_attr.grh.sgid_index = 1;
    to.ah_attr.grh.dgid.raw = Way::default().gid;
    assert_eq!(a.modify(&mut to, receive_bits()), libc::EINVAL, "a hole in the GID table");
    to.ah_attr.grh.sgid_index = 2;
    to.path_mtu = 6;
    assert_eq!(a.modify(&mut to, receive_bits()), libc::EINVAL, "no such MTU");
    to.path_mtu = 3;
    to.ah_attr.is_global = 0;
    assert_eq!(a.modify(&mut to, receive_bits()), libc::EINVAL, "no GID on Ethernet");
    to.ah_attr.is_global = 1;
    assert_eq!(a.modify(&mut to, receive_bits()), 0);
    to.qp_state = RTS;
    assert_eq!(a.modify(&mut to, send_bits() | mask::IBV_QP_AV), libc::EINVAL);
    assert_eq!(a.modify(&mut to, send_bits()), 0);
    assert!(
        device.journal().iter().filter(|entry| entry.verb == Verb::ModifyQp && entry.errno == libc::EINVAL).count() > 6
    );
    end(&device, a, b);
}

#[test]
fn a_queue_that_is_full_loses_completions_and_says_so() {
    let device = Plan::new("full").grant_completions(2).install();
    let (a, b) = (End::new("full"), End::new("full"));
    a.connect(&b, Way::default());
    b.connect(&a, Way::default());
    for id in 0..3 {
        let (mut work, _segment) = a.write(id, 8, &b);
        assert_eq!(a.post(&mut work).0, 0);
    }
    assert_eq!(a.event(), Some(0));
    assert_eq!((a.poll(), a.poll(), a.poll()), (Some((0, 0)), Some((1, 0)), None));
    end(&device, a, b);
}

#[test]
fn the_use_of_what_was_destroyed_is_noticed() {
    let device = Plan::new("twice").install();
    let a = End::new("twice");
    let (pair, region) = (a.pair, a.region);
    // SAFETY: this device knows that the objects are gone, where a real one would not.
    unsafe {
        assert_eq!((table().destroy_qp)(pair), 0);
        assert_eq!((table().destroy_qp)(pair), libc::EINVAL);
        assert_eq!((table().dereg_mr)(region), 0);
        assert_eq!((table().dereg_mr)(region), libc::EINVAL);
        assert_eq!((table().destroy_cq)(a.queue), 0);
        assert_eq!((table().dealloc_pd)(a.domain), 0);
        assert_eq!((table().close_device)(a.context), 0);
    }
    assert_eq!(device.violations().len(), 2);
}

#[test]
fn keys_are_never_alike() {
    let device = Plan::new("keys").install();
    let ends: Vec<_> = (0..20).map(|_| End::new("keys")).collect();
    let mut keys: Vec<_> = ends
        .iter()
        // SAFETY: structures of this device live for ever.
        .flat_map(|end| unsafe { [(*end.region).lkey, (*end.region).rkey] })
        .collect();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), 40);
    ends.into_iter().for_each(End::close);
    assert_eq!(device.open_objects(), Default::default());
}
