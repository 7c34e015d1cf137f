//! The C++ values that methods take and give.

use std::ffi::c_char;

use super::super::failure::Failure;
use crate::session::{LocalKey, MemKind, MemRegion, PeerRef, RemoteKey};

/// `std::string`, of which the first two words are all that is needed to read it.
#[repr(C)]
#[derive(Debug)]
pub(super) struct CxxString {
    text: *const c_char,
    length: usize,
    _own: [u64; 2],
}

impl CxxString {
    /// A copy of the text.
    ///
    /// # Safety
    /// It is a `std::string` that lives.
    pub(super) unsafe fn to_text(&self) -> Result<String, Failure> {
        if self.length == 0 {
            return Ok(String::new());
        }
        // SAFETY: a string has `length` bytes.
        let bytes = unsafe { std::slice::from_raw_parts(self.text.cast::<u8>(), self.length) };
        let text = std::str::from_utf8(bytes).map_err(|_| Failure::new("a name is not UTF-8 text"))?;
        Ok(text.to_owned())
    }
}

/// `ConnectInfo`.
#[repr(C)]
#[derive(Debug)]
pub(super) struct CxxConnectInfo {
    pub(super) peer: CxxString,
    pub(super) port: u16,
}

/// `ChannelDesc`.
#[repr(C)]
#[derive(Debug)]
pub(super) struct CxxChannelDesc {
    pub(super) data_path: CxxString,
}

/// `MemRegion`, returned through a hidden pointer.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct CxxMemRegion {
    pub(super) addr: u64,
    size: u64,
    lkey: u32,
    rkey: u32,
    kind: i32,
}

impl From<MemRegion> for CxxMemRegion {
    fn from(region: MemRegion) -> Self {
        let MemRegion { addr, size, lkey: LocalKey(lkey), rkey: RemoteKey(rkey), kind } = region;
        Self { addr, size: size as u64, lkey, rkey, kind: kind as i32 }
    }
}

/// `PeerRef`, returned through a hidden pointer.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct CxxPeerRef {
    rkey: u32,
    addr: u64,
    size: u64,
}

impl From<PeerRef> for CxxPeerRef {
    fn from(peer: PeerRef) -> Self {
        Self { rkey: peer.rkey.0, addr: peer.remote_addr, size: peer.size }
    }
}

/// Reads a kind of memory.
pub(super) fn mem_kind(number: i32) -> Result<MemKind, Failure> {
    [MemKind::CpuRam, MemKind::GpuHbm, MemKind::Ddr, MemKind::Other]
        .into_iter()
        .find(|kind| *kind as i32 == number)
        .ok_or_else(|| Failure::new(format!("memory kind {number} does not exist: 0 CPU, 1 GPU, 2 DDR, 3 other")))
}

// What C++ was compiled to expect. The sizes count the alignment's padding.
const _: () = {
    assert!(size_of::<CxxString>() == 32);
    assert!(size_of::<CxxConnectInfo>() == 40 && std::mem::offset_of!(CxxConnectInfo, port) == 32);
    assert!(size_of::<CxxChannelDesc>() == 32);
    assert!(size_of::<CxxMemRegion>() == 32 && std::mem::offset_of!(CxxMemRegion, kind) == 24);
    assert!(size_of::<CxxPeerRef>() == 24 && std::mem::offset_of!(CxxPeerRef, addr) == 8);
};
