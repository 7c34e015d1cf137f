//! Shared memory between two processes of one host, or two threads of one process.
//!
//! Each side makes an anonymous file (memfd) for its region, reserves its pages so that no access can fail later, seals
//! its size, and hands it to the peer over a Unix socket. That socket has a random name told in the hello, and the
//! controller opens with a random token: whoever holds both is the peer, and is on this host. Nothing has a
//! name in the file system, so nothing is left behind by a crash.

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use memmap2::MmapOptions;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};

use crate::error::{Result, TransportError};
use crate::oob::{Endpoint, Role};
use crate::ring::{Geometry, SharedBytes};
use crate::session::{LocalKey, MemKind, MemRegion, PeerRef, RemoteKey};

/// A shared-memory data path.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    endpoint: Endpoint,
    /// Where the coprocessor waits for its controller, until that has come.
    listener: Option<UnixListener>,
    /// The meeting, over which the regions are handed.
    stream: Option<UnixStream>,
    own: Option<OwnRegion>,
    peer: Option<SharedBytes>,
    outgoing: Geometry,
}

#[derive(Debug)]
struct OwnRegion {
    file: OwnedFd,
    bytes: SharedBytes,
}

impl SharedMemory {
    /// Opens the meeting place.
    pub(crate) fn open(role: Role) -> Result<Self> {
        let mut endpoint = Endpoint { host: host_identity(), ..Endpoint::default() };
        let listener = match role {
            Role::Controller => None,
            Role::Coprocessor => {
                endpoint.rendezvous = random()?;
                endpoint.token = random()?;
                let listener = UnixListener::bind_addr(&socket_address(&endpoint)?)
                    .map_err(|error| TransportError::system("bind", "the Unix socket of the meeting", error))?;
                Some(listener)
            }
        };
        Ok(Self { endpoint, listener, stream: None, own: None, peer: None, outgoing: Geometry::new(1, 0) })
    }

    pub(crate) fn endpoint(&self) -> Endpoint {
        self.endpoint
    }

    /// The meeting: the controller connects and shows the token, the coprocessor waits for the one who has it.
    pub(crate) fn bring_up(&mut self, peer: &Endpoint, deadline: Instant) -> Result<()> {
        if peer.host != self.endpoint.host {
            return Err(TransportError::Unsupported {
                what: "shared memory with this peer".into(),
                reason: "the peer runs on another host, or in another boot of this one; use the data path 'verbs'"
                    .into(),
            });
        }
        let stream = match self.listener.take() {
            None => meet_as_controller(peer, deadline)?,
            Some(listener) => meet_as_coprocessor(&listener, &self.endpoint, deadline)?,
        };
        self.stream = Some(stream);
        Ok(())
    }

    /// A sealed anonymous file with all its pages reserved.
    pub(crate) fn allocate(&mut self, bytes: usize, kind: MemKind) -> Result<MemRegion> {
        if kind != MemKind::CpuRam {
            return Err(TransportError::Unsupported {
                what: format!("{kind:?} memory on the data path 'shm'"),
                reason: "only MemKind::CpuRam can be shared between processes; device memory needs 'verbs'".into(),
            });
        }
        super::check_region_size(bytes)?;
        let failed = |call, error: rustix::io::Errno| {
            TransportError::system(call, format!("{bytes} bytes of shared memory"), error).with_remedy(
                "the memory limit of this system or container may be reached: use a smaller depth or capacity",
            )
        };
        let file = rustix::fs::memfd_create("catalyst-transport", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(|error| failed("memfd_create", error))?;
        rustix::fs::ftruncate(&file, bytes as u64).map_err(|error| failed("ftruncate", error))?;
        // Without reserved pages the first touch could end in SIGBUS.
        rustix::io::retry_on_intr(|| rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes as u64))
            .map_err(|error| failed("fallocate", error))?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(|error| failed("fcntl(F_ADD_SEALS)", error))?;
        let bytes = map(&file, bytes)?;
        let rkey = RemoteKey(u32::from_le_bytes(random()?));
        let region =
            MemRegion { addr: bytes.address(0), size: bytes.len(), lkey: LocalKey(0), rkey, kind: MemKind::CpuRam };
        self.own = Some(OwnRegion { file, bytes });
        Ok(region)
    }

    /// Sends the descriptor of the own region.
    pub(crate) fn share(&mut self) -> Result<()> {
        let (Some(own), Some(stream)) = (&self.own, &self.stream) else {
            unreachable!("the lifecycle allows share only after bring_up and allocate");
        };
        use std::os::fd::AsFd;
        let files = [own.file.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&files));
        rustix::net::sendmsg(stream, &[IoSlice::new(b"R")], &mut control, SendFlags::NOSIGNAL)
            .map_err(|error| TransportError::system("sendmsg", "the descriptor of the region", error))?;
        Ok(())
    }

    /// Takes the peer's descriptor, checks that its size is what the peer said and can no longer change, and maps it.
    pub(crate) fn attach(&mut self, peer: &PeerRef, deadline: Instant) -> Result<()> {
        let Some(stream) = &self.stream else { unreachable!("the lifecycle allows attach only after bring_up") };
        let file = receive_descriptor(stream, deadline)?;
        let refuse = |problem: String| TransportError::Protocol {
            stage: "exchange_keys",
            peer: "the peer process".into(),
            problem: format!("its shared memory {problem}"),
        };
        let seals = rustix::fs::fcntl_get_seals(&file)
            .map_err(|error| refuse(format!("is not an anonymous file (F_GET_SEALS: {error})")))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(refuse("is not sealed against shrinking".into()));
        }
        let size = rustix::fs::fstat(&file).map_err(|error| refuse(format!("cannot be measured ({error})")))?.st_size;
        if u64::try_from(size) != Ok(peer.size) {
            return Err(refuse(format!("has {size} bytes where {} were announced", peer.size)));
        }
        self.peer = Some(map(&file, peer.size as usize)?);
        Ok(())
    }

    /// Frames are composed in the peer's region itself: nothing to prepare.
    pub(crate) fn establish(&mut self, outgoing: Geometry) -> Result<()> {
        self.outgoing = outgoing;
        // The meeting has served its purpose.
        self.stream = None;
        Ok(())
    }

    pub(crate) fn incoming(&self) -> SharedBytes {
        self.own.as_ref().expect("the lifecycle asks for the region only after its allocation").bytes.clone()
    }

    /// The probe, its last word last, as a frame would be.
    pub(crate) fn send_probe(&mut self, probe: &[u8]) -> Result<()> {
        let peer = self.peer.as_ref().expect("the lifecycle sends the probe only after attach");
        let (body, last) = probe.split_at(probe.len() - 8);
        let start = self.outgoing.ring_bytes();
        peer.copy_in(start, body);
        peer.store_release(start + body.len(), u64::from_ne_bytes(last.try_into().expect("eight bytes")));
        Ok(())
    }

    #[inline]
    pub(crate) fn slot(&mut self, sequence: u32) -> Result<(&SharedBytes, usize)> {
        let peer = self.peer.as_ref().expect("the lifecycle sends frames only after attach");
        Ok((peer, self.outgoing.frame_end(sequence)))
    }
}

fn map(file: &OwnedFd, bytes: usize) -> Result<SharedBytes> {
    let mapping = MmapOptions::new().len(bytes).populate().map_raw(file).map_err(|error| {
        TransportError::system("mmap", format!("{bytes} bytes of shared memory"), error).with_remedy("free some memory")
    })?;
    Ok(SharedBytes::new(Arc::new(mapping)))
}

fn meet_as_controller(peer: &Endpoint, deadline: Instant) -> Result<UnixStream> {
    let failed = |call, error: std::io::Error| {
        TransportError::system(call, "the Unix socket of the meeting", error)
            .with_remedy("both processes have to be in one network namespace, and the coprocessor still running")
    };
    let mut stream = UnixStream::connect_addr(&socket_address(peer)?).map_err(|error| failed("connect", error))?;
    stream.set_write_timeout(Some(remaining(deadline))).map_err(|error| failed("setsockopt", error))?;
    stream.write_all(&peer.token).map_err(|error| failed("write", error))?;
    Ok(stream)
}

/// Waits for the controller. Strangers, who cannot know the token, are turned away.
fn meet_as_coprocessor(listener: &UnixListener, endpoint: &Endpoint, deadline: Instant) -> Result<UnixStream> {
    let stage = "connect: waiting for the controller at the Unix socket of the meeting";
    loop {
        wait_readable(listener, deadline, stage)?;
        let (mut stream, _) = listener.accept().map_err(|error| TransportError::system("accept", stage, error))?;
        let patience = remaining(deadline).min(Duration::from_secs(1));
        let mut shown = [0; 16];
        let read = stream.set_read_timeout(Some(patience)).and_then(|()| stream.read_exact(&mut shown));
        match read {
            Ok(()) if endpoint.token_is(&shown) => return Ok(stream),
            Ok(()) => tracing::debug!("a stranger came to the meeting with a wrong token"),
            Err(error) => tracing::debug!(%error, "a stranger came to the meeting"),
        }
    }
}

fn receive_descriptor(stream: &UnixStream, deadline: Instant) -> Result<OwnedFd> {
    let stage = "exchange_keys: waiting for the peer's shared memory";
    wait_readable(stream, deadline, stage)?;
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received =
        rustix::net::recvmsg(stream, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)
            .map_err(|error| TransportError::system("recvmsg", "the descriptor of the region", error))?;
    if received.bytes == 0 {
        return Err(TransportError::PeerLost { stage, cause: "it closed the meeting".into() });
    }
    control
        .drain()
        .find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut files) => files.next(),
            _ => None,
        })
        .ok_or_else(|| TransportError::Protocol {
            stage,
            peer: "the peer process".into(),
            problem: "it sent no descriptor".into(),
        })
}

fn wait_readable(socket: impl std::os::fd::AsFd, deadline: Instant, stage: &'static str) -> Result<()> {
    use rustix::event::{PollFd, PollFlags, Timespec};
    let began = Instant::now();
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).expect("timeouts are at most a day");
        match rustix::event::poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&timeout)) {
            Ok(0) => {
                return Err(TransportError::Timeout {
                    stage,
                    waited: began.elapsed(),
                    hint: "the peer process is stopped, or in another network namespace".into(),
                });
            }
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(TransportError::system("poll", stage, error)),
        }
    }
}

/// Time left, but never the zero that sockets take for "no timeout".
fn remaining(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
}

fn socket_address(endpoint: &Endpoint) -> Result<SocketAddr> {
    let name: String = endpoint.rendezvous.iter().map(|byte| format!("{byte:02x}")).collect();
    SocketAddr::from_abstract_name(format!("catalyst-transport-{name}"))
        .map_err(|error| TransportError::system("bind", "an abstract Unix socket name", error))
}

/// What tells one host, and one boot of it, from another: the kernel's boot id.
pub(crate) fn host_identity() -> [u8; 16] {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: Vec<u8> =
        text.bytes().filter_map(|byte| char::from(byte).to_digit(16)).map(|digit| digit as u8).collect();
    let mut identity = [0; 16];
    for (byte, pair) in identity.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = pair[0] << 4 | pair[1];
    }
    identity
}

/// Random bytes from the kernel.
pub(crate) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(TransportError::system("getrandom", "random numbers", error)),
        }
    }
    Ok(bytes)
}
