//! The binding's structures against those of the C header that is installed.

use std::mem::{offset_of, size_of};
use std::process::Command;

use super::*;

/// What this crate reads or writes, as C names it and as the binding has it.
fn layout() -> Vec<(String, usize)> {
    let mut all = Vec::new();
    macro_rules! structure {
        ($type:ty as $name:literal: $($field:ident),*) => {
            all.push((format!("sizeof(struct {})", $name), size_of::<$type>()));
            $( all.push((
                format!("offsetof(struct {}, {})", $name, stringify!($field)),
                offset_of!($type, $field),
            )); )*
        };
    }
    structure!(ibv_send_wr as "ibv_send_wr": wr_id, next, sg_list, num_sge, opcode, send_flags, wr);
    structure!(ibv_sge as "ibv_sge": addr, length, lkey);
    structure!(ibv_wc as "ibv_wc": wr_id, status, opcode, vendor_err, byte_len, qp_num);
    structure!(ibv_qp_attr as "ibv_qp_attr": qp_state, path_mtu, rq_psn, sq_psn, dest_qp_num, qp_access_flags, cap,
        ah_attr, pkey_index, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry);
    structure!(rdma_sys::ibv_ah_attr as "ibv_ah_attr": grh, dlid, sl, is_global, port_num);
    structure!(rdma_sys::ibv_global_route as "ibv_global_route": dgid, sgid_index, hop_limit);
    structure!(rdma_sys::ibv_qp_cap as "ibv_qp_cap": max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data);
    structure!(ibv_qp_init_attr as "ibv_qp_init_attr": send_cq, recv_cq, srq, cap, qp_type, sq_sig_all);
    structure!(ibv_port_attr as "ibv_port_attr": state, max_mtu, active_mtu, gid_tbl_len, pkey_tbl_len, lid, link_layer);
    structure!(ibv_device_attr as "ibv_device_attr": max_qp_wr, max_qp_rd_atom, phys_port_cnt);
    structure!(ibv_mr as "ibv_mr": addr, length, lkey, rkey);
    structure!(ibv_qp as "ibv_qp": context, qp_num, state, qp_type);
    structure!(ibv_cq as "ibv_cq": context, cqe);
    structure!(ibv_context as "ibv_context": device, ops, cmd_fd, async_fd, num_comp_vectors);
    structure!(rdma_sys::ibv_context_ops as "ibv_context_ops": poll_cq, post_send, post_recv);
    structure!(AsyncEvent as "ibv_async_event": element, event_type);
    all.push(("sizeof(union ibv_gid)".into(), size_of::<ibv_gid>()));
    let numbers = [
        ("IBV_WR_RDMA_WRITE", ibv_wr_opcode::IBV_WR_RDMA_WRITE as usize),
        ("IBV_QPT_RC", ibv_qp_type::IBV_QPT_RC as usize),
        ("IBV_QPS_ERR", ibv_qp_state::IBV_QPS_ERR as usize),
        ("IBV_SEND_INLINE", ibv_send_flags::IBV_SEND_INLINE.0 as usize),
        ("IBV_SEND_SIGNALED", ibv_send_flags::IBV_SEND_SIGNALED.0 as usize),
        ("IBV_ACCESS_REMOTE_WRITE", ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0 as usize),
        ("IBV_QP_MAX_QP_RD_ATOMIC", ibv_qp_attr_mask::IBV_QP_MAX_QP_RD_ATOMIC.0 as usize),
        ("IBV_LINK_LAYER_ETHERNET", usize::from(LINK_LAYER_ETHERNET)),
        ("IBV_LINK_LAYER_INFINIBAND", usize::from(LINK_LAYER_INFINIBAND)),
        ("IBV_EVENT_CQ_ERR", event::CQ_ERR as usize),
        ("IBV_EVENT_QP_FATAL", event::QP_FATAL as usize),
        ("IBV_EVENT_QP_REQ_ERR", event::QP_REQ_ERR as usize),
        ("IBV_EVENT_QP_ACCESS_ERR", event::QP_ACCESS_ERR as usize),
        ("IBV_EVENT_DEVICE_FATAL", event::DEVICE_FATAL as usize),
        ("IBV_EVENT_PORT_ACTIVE", event::PORT_ACTIVE as usize),
        ("IBV_EVENT_PORT_ERR", event::PORT_ERR as usize),
    ];
    all.extend(numbers.map(|(name, number)| (name.to_owned(), number)));
    all
}

#[test]
fn sizes_offsets_and_numbers_are_those_of_the_c_header() {
    let layout = layout();
    let mut program =
        String::from("#include <infiniband/verbs.h>\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {\n");
    for (expression, _) in &layout {
        program += &format!("    printf(\"%zu\\n\", (size_t)({expression}));\n");
    }
    program += "    return 0;\n}\n";
    let folder = tempfile::tempdir().unwrap();
    let (source, binary) = (folder.path().join("layout.c"), folder.path().join("layout"));
    std::fs::write(&source, program).unwrap();
    let built = Command::new("cc").arg(&source).arg("-o").arg(&binary).output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let said = String::from_utf8(Command::new(&binary).output().unwrap().stdout).unwrap();
    let c: Vec<usize> = said.lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(c.len(), layout.len());
    for ((expression, rust), c) in layout.iter().zip(c) {
        assert_eq!(*rust, c, "{expression}");
    }
}
