//! Protection domains and registered memory.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::raw::c_int;
use std::sync::Arc;

use memmap2::{Advice, MmapOptions, MmapRaw};

use super::device::Context;
use super::ffi;
use crate::error::{Result, TransportError};
use crate::ring::SharedBytes;
use crate::session::{LocalKey, MemKind, RemoteKey};

/// A protection domain: what regions and queue pairs have to share.
#[derive(Debug)]
pub(crate) struct ProtectionDomain {
    pub(super) raw: *mut ffi::ibv_pd,
    pub(super) context: Arc<Context>,
}

// SAFETY: the verbs interface lets any thread use a domain at any time.
unsafe impl Send for ProtectionDomain {}
// SAFETY: as above.
unsafe impl Sync for ProtectionDomain {}

impl ProtectionDomain {
    /// `ibv_alloc_pd`.
    pub(crate) fn allocate(context: &Arc<Context>) -> Result<Arc<Self>> {
        // SAFETY: the context is open.
        let raw = unsafe { (context.verbs.alloc_pd)(context.raw) };
        if raw.is_null() {
            return Err(context.last_error("ibv_alloc_pd", String::new()));
        }
        Ok(Arc::new(Self { raw, context: context.clone() }))
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        // SAFETY: allocated once; every region and queue pair holds an `Arc` of this and is gone.
        let errno = unsafe { (self.context.verbs.dealloc_pd)(self.raw) };
        self.context.released("ibv_dealloc_pd", errno);
    }
}

/// Registered memory. The mapping outlives the registration, and the registration every queue pair that was told of it,
/// because the session drops them in that order.
#[derive(Debug)]
pub(crate) struct Region {
    raw: *mut ffi::ibv_mr,
    domain: Arc<ProtectionDomain>,
    bytes: SharedBytes,
    kind: MemKind,
}

// SAFETY: a registration is only read after its creation, and deregistered by its one owner.
unsafe impl Send for Region {}

impl Region {
    /// Maps `bytes` of zeroed memory of its own and registers them. `remote_write` opens them to the peer.
    pub(crate) fn allocate(domain: &Arc<ProtectionDomain>, bytes: usize, remote_write: bool) -> Result<Self> {
        crate::data_path::memory_limit::check(bytes)?;
        let mapping = MmapOptions::new().len(bytes).populate().map_anon().map_err(|error| {
            TransportError::system("mmap", format!("{bytes} bytes for a region"), error).with_remedy("free some memory")
        })?;
        // A child process would otherwise share the pages copy-on-write, and the device would go on writing to one of the
        // two copies. An old kernel that cannot do this loses only that protection.
        if let Err(error) = mapping.advise(Advice::DontFork) {
            tracing::debug!(%error, "the region is not kept out of child processes");
        }
        let memory = SharedBytes::new(Arc::new(MmapRaw::from(mapping)));
        // SAFETY: the range is mapped, page-aligned, and stays mapped until after the deregistration in `drop`.
        let raw = unsafe {
            (domain.context.verbs.reg_mr)(domain.raw, memory.address(0) as *mut _, bytes, access(remote_write))
        };
        Self::registered(raw, domain, memory, bytes, MemKind::CpuRam, "ibv_reg_mr")
    }

    /// Registers the first `bytes` of a dma-buf and maps them, so that the rings in them can be polled.
    pub(crate) fn from_dma_buf(
        domain: &Arc<ProtectionDomain>,
        descriptor: BorrowedFd<'_>,
        bytes: usize,
        kind: MemKind,
    ) -> Result<Self> {
        let mapping = MmapOptions::new().len(bytes).map_raw(descriptor.as_raw_fd()).map_err(|error| {
            TransportError::Unsupported {
                what: format!("polling {kind:?} memory from this process"),
                reason: format!("mmap of dma-buf descriptor {} failed with {error}", descriptor.as_raw_fd()),
            }
        })?;
        let memory = SharedBytes::new(Arc::new(mapping));
        // SAFETY: the descriptor is borrowed and so open; the address serves only as the I/O virtual address
        // and is that of the mapping above, which outlives the registration.
        let raw = unsafe {
            (domain.context.verbs.reg_dmabuf_mr)(
                domain.raw,
                0,
                bytes,
                memory.address(0),
                descriptor.as_raw_fd(),
                access(true),
            )
        };
        if raw.is_null() {
            let error = std::io::Error::last_os_error();
            if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS)) {
                return Err(TransportError::Unsupported {
                    what: format!("registering {kind:?} memory by dma-buf"),
                    reason: format!(
                        "device {} cannot ({error}); use MemKind::CpuRam, or a device and driver with peer memory",
                        domain.context.name
                    ),
                });
            }
            return Err(domain.context.error(
                "ibv_reg_dmabuf_mr",
                error.raw_os_error().unwrap_or(0),
                format!("registering {bytes} bytes of {kind:?} memory"),
            ));
        }
        Self::registered(raw, domain, memory, bytes, kind, "ibv_reg_dmabuf_mr")
    }

    fn registered(
        raw: *mut ffi::ibv_mr,
        domain: &Arc<ProtectionDomain>,
        bytes: SharedBytes,
        length: usize,
        kind: MemKind,
        verb: &'static str,
    ) -> Result<Self> {
        if raw.is_null() {
            return Err(domain.context.last_error(verb, format!("registering {length} bytes")));
        }
        Ok(Self { raw, domain: domain.clone(), bytes, kind })
    }

    /// The memory.
    pub(crate) fn bytes(&self) -> &SharedBytes {
        &self.bytes
    }

    /// Kind of memory.
    pub(crate) fn kind(&self) -> MemKind {
        self.kind
    }

    /// Key for this side's own requests.
    pub(crate) fn local_key(&self) -> LocalKey {
        // SAFETY: the registration lives until `drop`.
        LocalKey(unsafe { (*self.raw).lkey })
    }

    /// Key for the peer's writes.
    pub(crate) fn remote_key(&self) -> RemoteKey {
        // SAFETY: the registration lives until `drop`.
        RemoteKey(unsafe { (*self.raw).rkey })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: registered once and deregistered once, before the mapping goes with the fields.
        let errno = unsafe { (self.domain.context.verbs.dereg_mr)(self.raw) };
        if errno != 0 {
            // The device may still reach the pages: they must stay mapped, and the domain open.
            std::mem::forget(self.bytes.clone());
            std::mem::forget(self.domain.clone());
        }
        self.domain.context.released("ibv_dereg_mr", errno);
    }
}

/// The least access that serves: a device may write locally only where it may write for the peer. Never relaxed ordering.
fn access(remote_write: bool) -> c_int {
    let none = ffi::ibv_access_flags(0);
    let flags = if remote_write {
        ffi::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE | ffi::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE
    } else {
        none
    };
    flags.0 as c_int
}
