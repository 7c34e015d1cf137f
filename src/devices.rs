//! What RDMA devices this machine has: for `--list` options, and for choosing one by hand.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

use crate::error::Result;

/// An RDMA device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// Its name, such as `mlx5_0` or `rxe0`.
    pub name: String,
    /// Its ports, from 1.
    pub ports: Vec<PortInfo>,
}

/// A port of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PortInfo {
    /// Number, from 1.
    pub number: u8,
    /// Whether it can be used.
    pub state: PortState,
    /// How it is addressed: by LID or by GID.
    pub link_layer: LinkLayer,
    /// Active MTU in bytes.
    pub active_mtu: u32,
    /// Local identifier; 0 on Ethernet.
    pub lid: u16,
    /// The entries of its GID table that are filled.
    pub gids: Vec<GidInfo>,
}

/// An entry of a GID table.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct GidInfo {
    /// Index in the table.
    pub index: u32,
    /// The GID as an address; IPv4 addresses are mapped.
    pub address: Ipv6Addr,
    /// Its type, where the kernel tells.
    pub gid_type: Option<GidType>,
    /// The network interface that it belongs to, where the kernel tells.
    pub interface: Option<String>,
}

impl GidInfo {
    /// The GID as the address that it stands for.
    #[must_use]
    pub fn ip(&self) -> IpAddr {
        IpAddr::V6(self.address).to_canonical()
    }
}

impl fmt::Display for GidInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.index, self.ip())?;
        if let Some(kind) = self.gid_type {
            write!(f, " {kind}")?;
        }
        if let Some(interface) = &self.interface {
            write!(f, " on {interface}")?;
        }
        Ok(())
    }
}

/// State of a port (`ibv_port_state`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PortState {
    /// No link.
    Down,
    /// Link, but not yet configured by a subnet manager.
    Initializing,
    /// Configured, but not yet usable.
    Armed,
    /// Usable.
    Active,
    /// Any other state.
    Other(u32),
}

impl PortState {
    #[cfg(feature = "rdma")]
    pub(crate) fn from_verbs(state: u32) -> Self {
        match state {
            1 => Self::Down,
            2 => Self::Initializing,
            3 => Self::Armed,
            4 => Self::Active,
            other => Self::Other(other),
        }
    }
}

impl fmt::Display for PortState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Down => f.write_str("DOWN"),
            Self::Initializing => f.write_str("INIT"),
            Self::Armed => f.write_str("ARMED"),
            Self::Active => f.write_str("ACTIVE"),
            Self::Other(number) => write!(f, "state {number}"),
        }
    }
}

/// Link layer of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LinkLayer {
    /// Addressed by LID.
    InfiniBand,
    /// RoCE: addressed by GID.
    Ethernet,
}

impl LinkLayer {
    #[cfg(feature = "rdma")]
    pub(crate) fn from_verbs(number: u8) -> Self {
        // 0 is what devices report that know nothing but InfiniBand.
        if number == 2 { Self::Ethernet } else { Self::InfiniBand }
    }

    #[cfg(feature = "rdma")]
    pub(crate) fn to_verbs(self) -> u8 {
        match self {
            Self::InfiniBand => 1,
            Self::Ethernet => 2,
        }
    }
}

impl fmt::Display for LinkLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InfiniBand => "InfiniBand",
            Self::Ethernet => "Ethernet",
        })
    }
}

/// Type of a GID.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum GidType {
    /// InfiniBand.
    InfiniBand,
    /// RoCE v1: an Ethernet frame type of its own, not routed.
    RoceV1,
    /// RoCE v2: UDP port 4791.
    RoceV2,
}

impl GidType {
    #[cfg(feature = "rdma")]
    pub(crate) fn from_sysfs(text: Option<&str>) -> Option<Self> {
        match text? {
            "IB/RoCE v1" => Some(Self::RoceV1),
            "RoCE v2" => Some(Self::RoceV2),
            "IB" => Some(Self::InfiniBand),
            _ => None,
        }
    }
}

impl fmt::Display for GidType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InfiniBand => "InfiniBand",
            Self::RoceV1 => "RoCEv1",
            Self::RoceV2 => "RoCEv2",
        })
    }
}

/// Lists the RDMA devices with their ports and GID tables.
///
/// # Errors
/// [`TransportError::Device`](crate::TransportError::Device) when there is none, with the likely reason;
/// [`TransportError::Unsupported`](crate::TransportError::Unsupported) when the crate was built without the feature `rdma`.
pub fn devices() -> Result<Vec<DeviceInfo>> {
    #[cfg(feature = "rdma")]
    return crate::data_path::verbs::device::list(&crate::data_path::verbs::ffi::SYSTEM);
    #[cfg(not(feature = "rdma"))]
    return Err(crate::data_path::no_rdma());
}
