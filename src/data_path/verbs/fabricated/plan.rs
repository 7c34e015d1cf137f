//! What a device is told to be.

use std::net::Ipv6Addr;
use std::time::Duration;

use super::guard::Installed;
use super::verb::Verb;
use super::world;
use crate::devices::{GidType, LinkLayer, PortState};

/// In which order the bytes of a write reach the target's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Placement {
    /// From the first to the last.
    #[default]
    InOrder,
    /// From the last to the first: the word that announces a frame comes before its payload.
    Reversed,
    /// Pieces of 1 to 8 bytes in a random order.
    Random,
    /// As [`Random`](Self::Random), by a thread that pauses in between.
    Torn,
}

/// An entry of a GID table.
#[derive(Debug, Clone)]
pub struct Gid {
    pub(super) address: Ipv6Addr,
    pub(super) kind: Option<GidType>,
    pub(super) interface: Option<String>,
}

impl Gid {
    /// A GID of this address (IPv4 addresses are mapped) and type, without an interface.
    ///
    /// # Panics
    /// When the text is no address.
    #[must_use]
    pub fn new(address: &str, kind: GidType) -> Self {
        let address = match address.parse().expect("an address") {
            std::net::IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            std::net::IpAddr::V6(v6) => v6,
        };
        Self { address, kind: Some(kind), interface: None }
    }

    /// The network interface that it belongs to.
    #[must_use]
    pub fn interface(mut self, name: &str) -> Self {
        self.interface = Some(name.into());
        self
    }

    /// Nothing is known of its type.
    #[must_use]
    pub fn untyped(mut self) -> Self {
        self.kind = None;
        self
    }
}

/// A port.
#[derive(Debug, Clone)]
pub struct Port {
    pub(super) state: PortState,
    pub(super) link_layer: LinkLayer,
    pub(super) lid: u16,
    pub(super) active_mtu: u32,
    pub(super) max_mtu: u32,
    /// `None` is a hole.
    pub(super) gids: Vec<Option<Gid>>,
    pub(super) pkeys: Vec<u16>,
}

impl Port {
    /// RoCE: active, MTU 1,024, a link-local GID at 0, a hole at 1, an IPv4-mapped RoCE v2 one at 2.
    #[must_use]
    pub fn ethernet() -> Self {
        Self {
            state: PortState::Active,
            link_layer: LinkLayer::Ethernet,
            lid: 0,
            active_mtu: 1024,
            max_mtu: 4096,
            gids: vec![
                Some(Gid::new("fe80::fab", GidType::RoceV2).interface("fab-eth")),
                None,
                Some(Gid::new("10.77.0.1", GidType::RoceV2).interface("fab-eth")),
            ],
            pkeys: vec![0xFFFF],
        }
    }

    /// InfiniBand with this LID: active, MTU 4,096, and the GID that every port has.
    #[must_use]
    pub fn infiniband(lid: u16) -> Self {
        Self {
            link_layer: LinkLayer::InfiniBand,
            lid,
            active_mtu: 4096,
            gids: vec![Some(Gid::new("fe80::1b", GidType::InfiniBand))],
            ..Self::ethernet()
        }
    }

    /// State.
    #[must_use]
    pub fn state(mut self, state: PortState) -> Self {
        self.state = state;
        self
    }

    /// Active MTU in bytes: 256 to 4,096.
    #[must_use]
    pub fn active_mtu(mut self, bytes: u32) -> Self {
        self.active_mtu = bytes;
        self
    }

    /// The largest path MTU that a queue pair may be given.
    #[must_use]
    pub fn max_mtu(mut self, bytes: u32) -> Self {
        self.max_mtu = bytes;
        self
    }

    /// The whole GID table; `None` is a hole.
    #[must_use]
    pub fn gids(mut self, table: impl Into<Vec<Option<Gid>>>) -> Self {
        self.gids = table.into();
        self
    }

    /// The whole partition key table.
    #[must_use]
    pub fn pkeys(mut self, table: impl Into<Vec<u16>>) -> Self {
        self.pkeys = table.into();
        self
    }
}

/// A device to be, and what is to go wrong on it.
#[derive(Debug, Clone)]
pub struct Plan {
    pub(super) name: String,
    pub(super) ports: Vec<Port>,
    pub(super) unreadable_holes: bool,
    pub(super) inline_limit: u32,
    pub(super) inline_granted: Option<u32>,
    pub(super) send_depth_limit: u32,
    pub(super) send_depth_granted: Option<u32>,
    pub(super) completions_granted: Option<u32>,
    pub(super) rd_atomic: u8,
    pub(super) dma_buf: bool,
    pub(super) placement: Placement,
    pub(super) in_order_query: bool,
    pub(super) delivery_delay: Duration,
    pub(super) completion_delay: Duration,
    pub(super) drop_acks_from: Option<u64>,
    pub(super) faults: Vec<(Verb, u64, i32)>,
    pub(super) statuses: Vec<(u64, u32)>,
}

impl Plan {
    /// A device with one [`Port::ethernet`], that grants what it is asked for (inline up to 512 bytes), places in order
    /// without vouching for it, and has no dma-buf.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            ports: vec![Port::ethernet()],
            unreadable_holes: false,
            inline_limit: 512,
            inline_granted: None,
            send_depth_limit: 16_384,
            send_depth_granted: None,
            completions_granted: None,
            rd_atomic: 16,
            dma_buf: false,
            placement: Placement::InOrder,
            in_order_query: false,
            delivery_delay: Duration::ZERO,
            completion_delay: Duration::ZERO,
            drop_acks_from: None,
            faults: Vec::new(),
            statuses: Vec::new(),
        }
    }

    /// All its ports.
    #[must_use]
    pub fn ports(mut self, ports: impl Into<Vec<Port>>) -> Self {
        self.ports = ports.into();
        self
    }

    /// Holes of the GID table cannot be read (−1, EINVAL). Without this they read as zero.
    #[must_use]
    pub fn unreadable_holes(mut self) -> Self {
        self.unreadable_holes = true;
        self
    }

    /// Creating a queue pair with more inline bytes is EINVAL.
    #[must_use]
    pub fn inline_limit(mut self, bytes: u32) -> Self {
        self.inline_limit = bytes;
        self
    }

    /// Inline bytes granted, whatever was asked.
    #[must_use]
    pub fn grant_inline(mut self, bytes: u32) -> Self {
        self.inline_granted = Some(bytes);
        self
    }

    /// Send requests granted, whatever was asked. Fewer than asked is a lie that no real device tells.
    #[must_use]
    pub fn grant_send_depth(mut self, requests: u32) -> Self {
        self.send_depth_granted = Some(requests);
        self
    }

    /// Completions that a queue really holds, whatever was asked, so that it can be made to overrun.
    #[must_use]
    pub fn grant_completions(mut self, entries: u32) -> Self {
        self.completions_granted = Some(entries);
        self
    }

    /// Reads and atomics that a queue pair may have outstanding.
    #[must_use]
    pub fn max_qp_rd_atom(mut self, number: u8) -> Self {
        self.rd_atomic = number;
        self
    }

    /// Registration by dma-buf works: any descriptor that can be mapped is taken.
    #[must_use]
    pub fn dma_buf(mut self) -> Self {
        self.dma_buf = true;
        self
    }

    /// Order of placement of the writes that this device sends.
    #[must_use]
    pub fn placement(mut self, placement: Placement) -> Self {
        self.placement = placement;
        self
    }

    /// What `ibv_query_qp_data_in_order` answers.
    #[must_use]
    pub fn in_order_query(mut self, promises: bool) -> Self {
        self.in_order_query = promises;
        self
    }

    /// How long after its post a write is read from this side's memory and placed in the target's.
    #[must_use]
    pub fn delivery_delay(mut self, delay: Duration) -> Self {
        self.delivery_delay = delay;
        self
    }

    /// How long after its delivery a write completes.
    #[must_use]
    pub fn completion_delay(mut self, delay: Duration) -> Self {
        self.completion_delay = delay;
        self
    }

    /// From the nth write of the device on (the first is 1), data arrives and its acknowledgement does not.
    #[must_use]
    pub fn drop_acks_from(mut self, nth: u64) -> Self {
        self.drop_acks_from = Some(nth);
        self
    }

    /// The nth call of the verb (the first is 1; 0 means every call) fails with this error number, by the verb's own
    /// convention.
    #[must_use]
    pub fn fail(mut self, verb: Verb, nth: u64, errno: i32) -> Self {
        self.faults.push((verb, nth, errno));
        self
    }

    /// The nth write of the device (the first is 1) does not arrive and completes with this status.
    #[must_use]
    pub fn complete_with(mut self, nth: u64, status: u32) -> Self {
        self.statuses.push((nth, status));
        self
    }

    /// Makes the device. It can be found until the returned value is dropped.
    ///
    /// # Panics
    /// When a device of this name is installed.
    #[must_use]
    pub fn install(self) -> Installed {
        world::install(self)
    }
}
