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
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};

use socket2::{Domain, SockAddr, Socket, Type};

use crate::error::{Result, TransportError};
use crate::oob::{Endpoint, Role};
use crate::random::random;
use crate::ring::{Geometry, SharedBytes};
use crate::session::{LocalKey, MemKind, MemRegion, PeerRef, RemoteKey};

#[cfg(test)]
mod tests;

/// A shared-memory data path.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    endpoint: Endpoint,
    /// Where the coprocessor waits for its controller, until that has come.
    listener: Option<UnixListener>,
    /// The meeting, over which the regions are handed.
    stream: Option<UnixStream>,
    own: Option<OwnRegion>,
    /// The peer's region as it was handed over, until the channel says how much of it is needed.
    peer_file: Option<OwnedFd>,
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
                let listener = SocketAddr::from_abstract_name(socket_name(&endpoint))
                    .and_then(|address| UnixListener::bind_addr(&address))
                    .map_err(|error| TransportError::system("bind", "the Unix socket of the meeting", error))?;
                Some(listener)
            }
        };
        Ok(Self {
            endpoint,
            listener,
            stream: None,
            own: None,
            peer_file: None,
            peer: None,
            outgoing: Geometry::new(1, 0),
        })
    }

    /// Memory between two threads of this process, in which frames of this shape are composed: nobody is met.
    pub(crate) fn between_threads(memory: SharedBytes, outgoing: Geometry) -> Self {
        Self {
            endpoint: Endpoint::default(),
            listener: None,
            stream: None,
            own: None,
            peer_file: None,
            peer: Some(memory),
            outgoing,
        }
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
        super::memory_limit::check(bytes)?;
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
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)
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
            .map_err(|error| meeting_broken("exchange_keys: handing over the shared memory", "sendmsg", error))?;
        Ok(())
    }

    /// Takes the peer's descriptor and checks that it is what it should be: memory whose size is what the peer said and can
    /// no longer change.
    pub(crate) fn attach(&mut self, peer: &PeerRef, deadline: Instant) -> Result<()> {
        let Some(stream) = &self.stream else { unreachable!("the lifecycle allows attach only after bring_up") };
        let file = receive_descriptor(stream, deadline)?;
        match check_region(&file, peer.size) {
            Ok(()) => {
                self.peer_file = Some(file);
                Ok(())
            }
            Err(problem) => {
                discard(file);
                Err(TransportError::Protocol {
                    stage: "exchange_keys",
                    peer: "the peer process".into(),
                    problem: format!("its shared memory {problem}"),
                })
            }
        }
    }

    /// Maps as much of the peer's region as the channel needs, whatever size the peer made it. Frames are composed in it.
    pub(crate) fn establish(&mut self, outgoing: Geometry) -> Result<()> {
        let Some(file) = self.peer_file.take() else {
            unreachable!("the lifecycle allows establish only after attach")
        };
        let bytes = outgoing.region_bytes();
        let failed = |error: std::io::Error| {
            TransportError::system("mmap", format!("{bytes} bytes of the peer's shared memory"), error)
                .with_remedy("free some memory, or use a smaller depth or capacity")
        };
        let mapping = MmapOptions::new().len(bytes).map_raw(&file).map_err(failed)?;
        // Both sides have mapped it by now. From here on nobody can take its pages away; and when all are there, no store
        // of ours can meet a page that is not.
        keep_pages(&file)?;
        let peer = SharedBytes::new(Arc::new(mapping));
        peer.populate().map_err(failed)?;
        self.peer = Some(peer);
        self.outgoing = outgoing;
        Ok(())
    }

    /// Makes sure that the own region's pages stay, once the peer has mapped it too.
    pub(crate) fn settle(&mut self) -> Result<()> {
        let Some(own) = &self.own else { unreachable!("the lifecycle allows settle only after allocate") };
        keep_pages(&own.file)?;
        own.bytes.populate().map_err(|error| TransportError::system("madvise", "the own shared memory", error))?;
        // The meeting has served its purpose.
        self.leave_meeting();
        Ok(())
    }

    /// Closes the meeting. What the peer may have left in it unread is closed with it.
    fn leave_meeting(&mut self) {
        if let Some(stream) = self.stream.take() {
            discard(stream);
        }
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

impl Drop for SharedMemory {
    fn drop(&mut self) {
        self.leave_meeting();
        if let Some(file) = self.peer_file.take() {
            discard(file);
        }
    }
}

fn map(file: &OwnedFd, bytes: usize) -> Result<SharedBytes> {
    let mapping = MmapOptions::new().len(bytes).populate().map_raw(file).map_err(|error| {
        TransportError::system("mmap", format!("{bytes} bytes of shared memory"), error).with_remedy("free some memory")
    })?;
    Ok(SharedBytes::new(Arc::new(mapping)))
}

/// Whether a descriptor from the peer is a sealed anonymous file of this size, on ordinary memory: one of huge pages could
/// run out of them at any access.
fn check_region(file: &OwnedFd, announced: u64) -> Result<(), String> {
    const TMPFS_MAGIC: u64 = 0x0102_1994;
    let seals = rustix::fs::fcntl_get_seals(file)
        .map_err(|error| format!("is not an anonymous file (F_GET_SEALS: {error})"))?;
    if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
        return Err("is not sealed against a change of its size".into());
    }
    let system = rustix::fs::fstatfs(file).map_err(|error| format!("is on no known file system ({error})"))?;
    if system.f_type as u64 != TMPFS_MAGIC {
        return Err("is not on ordinary memory pages".into());
    }
    let size = rustix::fs::fstat(file).map_err(|error| format!("cannot be measured ({error})"))?.st_size;
    if u64::try_from(size) != Ok(announced) {
        return Err(format!("has {size} bytes where {announced} were announced"));
    }
    Ok(())
}

/// Seals a region against further writable mappings, which also ends the punching of holes; existing mappings go on.
fn keep_pages(file: &OwnedFd) -> Result<()> {
    match rustix::fs::fcntl_add_seals(file, SealFlags::FUTURE_WRITE | SealFlags::SEAL) {
        Ok(()) => Ok(()),
        // The other side was first.
        Err(_) if rustix::fs::fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::FUTURE_WRITE)) => {
            Ok(())
        }
        Err(error) => Err(TransportError::system("fcntl(F_ADD_SEALS)", "shared memory", error)
            .with_remedy("Linux 5.1 or later is needed")),
    }
}

/// Closes something that came from a stranger. Closing may block for as long as the stranger chose (a socket that lingers),
/// so it is done where nobody waits.
fn discard(what: impl Send + 'static) {
    let closing = std::thread::Builder::new().name("catalyst-discard".into()).stack_size(64 * 1024);
    if let Err(error) = closing.spawn(move || drop(what)) {
        tracing::debug!(%error, "a stranger's descriptor was closed in place");
    }
}

fn meet_as_controller(peer: &Endpoint, deadline: Instant) -> Result<UnixStream> {
    let failed = |call, error: std::io::Error| {
        if matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) {
            return TransportError::Timeout {
                stage: "connect: meeting the coprocessor at its Unix socket",
                waited: Duration::ZERO,
                hint: "the coprocessor does not accept".into(),
            };
        }
        TransportError::system(call, "the Unix socket of the meeting", error)
            .with_remedy("both processes have to be in one network namespace, and the coprocessor still running")
    };
    // The standard library's connect knows no deadline; the kernel applies the write timeout to it.
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None).map_err(|error| failed("socket", error))?;
    socket.set_write_timeout(Some(remaining(deadline))).map_err(|error| failed("setsockopt", error))?;
    let address = SockAddr::unix(format!("\0{}", socket_name(peer))).map_err(|error| failed("connect", error))?;
    socket.connect(&address).map_err(|error| failed("connect", error))?;
    let mut stream = UnixStream::from(OwnedFd::from(socket));
    stream.write_all(&peer.token).map_err(|error| failed("write", error))?;
    Ok(stream)
}

/// A client at the meeting that has not shown the whole token yet.
struct Visitor {
    stream: UnixStream,
    shown: Vec<u8>,
}

/// Waits for the controller among whoever comes. Strangers, who cannot know the token, are turned away, and delay nobody.
fn meet_as_coprocessor(listener: &UnixListener, endpoint: &Endpoint, deadline: Instant) -> Result<UnixStream> {
    const STAGE: &str = "connect: waiting for the controller at the Unix socket of the meeting";
    /// Beyond so many the one who has waited longest goes.
    const MOST_VISITORS: usize = 64;
    let system = |call| move |error: std::io::Error| TransportError::system(call, STAGE, error);
    listener.set_nonblocking(true).map_err(system("fcntl"))?;
    let began = Instant::now();
    let mut visitors: Vec<Visitor> = Vec::new();
    loop {
        let mut waits = vec![PollFd::new(listener, PollFlags::IN)];
        waits.extend(visitors.iter().map(|visitor| PollFd::new(&visitor.stream, PollFlags::IN)));
        wait(&mut waits, began, deadline, STAGE)?;
        let readable: Vec<bool> = waits.iter().map(|wait| !wait.revents().is_empty()).collect();
        drop(waits);
        for index in (0..visitors.len()).filter(|index| readable[index + 1]).rev() {
            let visitor = &mut visitors[index];
            let mut bytes = [0; 16];
            let room = endpoint.token.len() - visitor.shown.len();
            match visitor.stream.read(&mut bytes[..room]) {
                Ok(count @ 1..) => {
                    visitor.shown.extend_from_slice(&bytes[..count]);
                    if visitor.shown.len() < endpoint.token.len() {
                        continue;
                    }
                    let right = visitor.shown.as_slice().try_into().is_ok_and(|shown| endpoint.token_is(shown));
                    let visitor = visitors.swap_remove(index);
                    if right {
                        visitor.stream.set_nonblocking(false).map_err(system("fcntl"))?;
                        visitors.into_iter().for_each(discard);
                        return Ok(visitor.stream);
                    }
                    tracing::debug!("a stranger came to the meeting with a wrong token");
                    discard(visitor);
                }
                Err(error)
                    if matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted) => {}
                Ok(_) | Err(_) => discard(visitors.swap_remove(index)),
            }
        }
        if readable[0]
            && let Ok((stream, _)) = listener.accept()
            && stream.set_nonblocking(true).is_ok()
        {
            if visitors.len() == MOST_VISITORS {
                discard(visitors.remove(0));
            }
            visitors.push(Visitor { stream, shown: Vec::new() });
        }
    }
}

/// The error of a call at the meeting: most often the other process is gone.
fn meeting_broken(stage: &'static str, call: &'static str, errno: rustix::io::Errno) -> TransportError {
    match errno {
        rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET => TransportError::PeerLost {
            stage,
            cause: format!("it left the meeting ({call}: {errno}): its process was killed, or closed the session"),
        },
        _ => TransportError::system(call, "the descriptor of the region", errno),
    }
}

fn receive_descriptor(stream: &UnixStream, deadline: Instant) -> Result<OwnedFd> {
    const STAGE: &str = "exchange_keys: waiting for the peer's shared memory";
    let began = Instant::now();
    let mut byte = [0];
    // Room for as many descriptors as one message can carry: what finds none would be closed by the kernel on this thread.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        wait(&mut [PollFd::new(stream, PollFlags::IN)], began, deadline, STAGE)?;
        // An out-of-band byte makes the socket readable with nothing to read: never block on it.
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        match rustix::net::recvmsg(stream, &mut [IoSliceMut::new(&mut byte)], &mut control, flags) {
            Ok(received) => break received,
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) => std::thread::sleep(Duration::from_millis(1)),
            Err(error) => return Err(meeting_broken(STAGE, "recvmsg", error)),
        }
    };
    if received.bytes == 0 {
        return Err(TransportError::PeerLost { stage: STAGE, cause: "it closed the meeting".into() });
    }
    let mut files = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = message {
            files.extend(more);
        }
    }
    let mut files = files.into_iter();
    let first = files.next();
    if files.len() > 0 {
        discard(files);
    }
    first.ok_or_else(|| TransportError::Protocol {
        stage: STAGE,
        peer: "the peer process".into(),
        problem: "it sent no descriptor".into(),
    })
}

/// Waits until one of the descriptors is ready, or the deadline has come.
fn wait(waits: &mut [PollFd<'_>], began: Instant, deadline: Instant, stage: &'static str) -> Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).expect("timeouts are at most a day");
        match rustix::event::poll(waits, Some(&timeout)) {
            // Whoever keeps a descriptor ready does not move the deadline.
            Ok(ready) if ready > 0 && !left.is_zero() => return Ok(()),
            Ok(_) if left.is_zero() => {
                return Err(TransportError::Timeout {
                    stage,
                    waited: began.elapsed(),
                    hint: "the peer process is stopped, or in another network namespace".into(),
                });
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(TransportError::system("poll", stage, error)),
        }
    }
}

/// Time left, but never the zero that sockets take for "no timeout".
fn remaining(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
}

/// Name of the meeting's abstract Unix socket.
fn socket_name(endpoint: &Endpoint) -> String {
    let name: String = endpoint.rendezvous.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("catalyst-transport-{name}")
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
