//! What a peer or a stranger at the meeting may try, and what may not come of it.

use std::collections::VecDeque;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use super::*;
use crate::oob::test_support::{far, watchdog};

/// How much later than its deadline a wait may end on a machine that is busy.
const LATE: Duration = Duration::from_secs(5);
/// How much earlier: the kernel counts a socket's own timeout in ticks, of which the first has already begun.
const TICK: Duration = Duration::from_millis(10);

fn in_half_a_second() -> Instant {
    Instant::now() + Duration::from_millis(500)
}

#[track_caller]
fn assert_ended_at(deadline: Instant) {
    let now = Instant::now();
    assert!(now + TICK >= deadline, "{:?} too early", deadline - now);
    assert!(now < deadline + LATE, "{:?} too late", now - deadline);
}

#[track_caller]
fn assert_timeout<T: std::fmt::Debug>(result: Result<T>, deadline: Instant) {
    assert!(matches!(result, Err(TransportError::Timeout { .. })), "{result:?}");
    assert_ended_at(deadline);
}

fn address(endpoint: &Endpoint) -> SocketAddr {
    SocketAddr::from_abstract_name(socket_name(endpoint)).unwrap()
}

/// Where a coprocessor would wait that is not there.
fn meeting_place() -> (UnixListener, Endpoint) {
    let endpoint = Endpoint {
        host: host_identity(),
        rendezvous: random().unwrap(),
        token: random().unwrap(),
        ..Endpoint::default()
    };
    (UnixListener::bind_addr(&address(&endpoint)).unwrap(), endpoint)
}

/// A controller that has met its coprocessor, and the socket of the latter.
fn met() -> (SharedMemory, UnixStream) {
    let (listener, endpoint) = meeting_place();
    let mut controller = SharedMemory::open(Role::Controller).unwrap();
    controller.bring_up(&endpoint, far()).unwrap();
    let (mut socket, _) = listener.accept().unwrap();
    let mut token = [0; 16];
    socket.read_exact(&mut token).unwrap();
    assert!(endpoint.token_is(&token));
    (controller, socket)
}

fn send(socket: &UnixStream, files: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(files)));
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(b"R")], &mut control, SendFlags::NOSIGNAL).unwrap();
}

fn of(size: u64) -> PeerRef {
    PeerRef { rkey: RemoteKey(0), remote_addr: 0, size }
}

fn memory(name: &str, flags: MemfdFlags, size: u64, seals: SealFlags) -> rustix::io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create(name, flags | MemfdFlags::CLOEXEC)?;
    rustix::fs::ftruncate(&file, size)?;
    if !seals.is_empty() {
        rustix::fs::fcntl_add_seals(&file, seals)?;
    }
    Ok(file)
}

/// The text with which a controller refuses what it is handed.
#[track_caller]
fn refusal(files: &[BorrowedFd<'_>], announced: u64) -> String {
    let (mut controller, socket) = met();
    send(&socket, files);
    let error = controller.attach(&of(announced), far()).unwrap_err();
    assert!(matches!(error, TransportError::Protocol { .. }), "{error:?}");
    error.to_string()
}

fn allocated(file: &OwnedFd) -> u64 {
    rustix::fs::fstat(file).unwrap().st_blocks as u64 * 512
}

/// Bytes of each mapping of a file in this process.
fn mappings(name: &str) -> Vec<u64> {
    let number = |text: &str| u64::from_str_radix(text, 16).unwrap();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines()
        .filter(|line| line.contains(name))
        .filter_map(|line| line.split(' ').next()?.split_once('-'))
        .map(|(start, end)| number(end) - number(start))
        .collect()
}

/// Shared memory that is resident in this process, in bytes.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssShmem:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

#[test]
fn a_coprocessor_that_does_not_accept_holds_nobody_beyond_the_deadline() {
    watchdog(|| {
        let (listener, endpoint) = meeting_place();
        rustix::net::listen(&listener, 0).unwrap();
        let _filling = UnixStream::connect_addr(&address(&endpoint)).unwrap();
        let mut controller = SharedMemory::open(Role::Controller).unwrap();
        let deadline = in_half_a_second();
        assert_timeout(controller.bring_up(&endpoint, deadline), deadline);
    });
}

#[test]
fn an_out_of_band_byte_holds_nobody_beyond_the_deadline() {
    watchdog(|| {
        let (mut controller, socket) = met();
        match rustix::net::send(&socket, b"x", rustix::net::SendFlags::OOB | SendFlags::NOSIGNAL) {
            Ok(_) => {}
            // Before Linux 5.15, and where it was left out.
            Err(rustix::io::Errno::OPNOTSUPP) => {
                return println!("skipped: this kernel has no MSG_OOB on Unix sockets");
            }
            Err(error) => panic!("{error}"),
        }
        let deadline = in_half_a_second();
        assert_timeout(controller.attach(&of(4160), deadline), deadline);
    });
}

/// A socket whose last close blocks for 25 seconds, and the peer that takes nothing from it.
fn lingering() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let lingering = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (full, _) = listener.accept().unwrap();
    lingering.set_nonblocking(true).unwrap();
    while (&lingering).write(&[0; 65536]).is_ok() {}
    socket2::SockRef::from(&lingering).set_linger(Some(Duration::from_secs(25))).unwrap();
    (lingering, full)
}

/// In place of the region, beside it, among more than are expected, behind it, and never taken.
#[test]
fn a_descriptor_that_lingers_when_closed_holds_nobody() {
    watchdog(|| {
        for case in 0..5 {
            let (mut controller, socket) = met();
            let file =
                memory("lingering", MemfdFlags::ALLOW_SEALING, 4160, SealFlags::SHRINK | SealFlags::GROW).unwrap();
            let (slow, _full) = lingering();
            match case {
                0 => send(&socket, &[slow.as_fd()]),
                1 => send(&socket, &[file.as_fd(), slow.as_fd()]),
                2 => send(&socket, &[file.as_fd(), file.as_fd(), file.as_fd(), slow.as_fd()]),
                3 => {
                    send(&socket, &[file.as_fd()]);
                    send(&socket, &[slow.as_fd()]);
                }
                _ => send(&socket, &[slow.as_fd()]),
            }
            // From here on the one in the message is the last.
            drop(slow);
            let deadline = in_half_a_second();
            if case < 4 {
                let attached = controller.attach(&of(4160), deadline);
                assert_eq!(attached.is_ok(), case > 0, "case {case}: {attached:?}");
            }
            drop(controller);
            assert!(Instant::now() < deadline + LATE, "case {case}: {:?} too late", Instant::now() - deadline);
        }
    });
}

#[test]
fn of_a_huge_region_only_what_the_channel_needs_is_mapped() {
    watchdog(|| {
        const HUGE: u64 = 2 << 30;
        let name = format!("catalyst-huge-{}", std::process::id());
        let (mut controller, socket) = met();
        let seals = SealFlags::SHRINK | SealFlags::GROW;
        let file = memory(&name, MemfdFlags::ALLOW_SEALING, HUGE, seals).unwrap();
        send(&socket, &[file.as_fd()]);
        let before = resident();
        controller.attach(&of(HUGE), far()).unwrap();
        assert_eq!(mappings(&name), []);
        assert_eq!(allocated(&file), 0);
        let geometry = Geometry::new(4, 64);
        controller.establish(geometry).unwrap();
        let pages = (geometry.region_bytes() as u64).next_multiple_of(rustix::param::page_size() as u64);
        assert_eq!(mappings(&name), [pages]);
        // A kernel that prefers huge pages may take one.
        assert!((pages..=4 << 20).contains(&allocated(&file)), "{}", allocated(&file));
        // Other tests of this process have shared memory as well, but not so much.
        let grown = resident().saturating_sub(before);
        assert!(grown < HUGE / 2, "{grown} bytes more");
    });
}

#[test]
fn what_is_no_sealed_memory_is_refused_by_name() {
    watchdog(|| {
        const SIZE: u64 = 8192;
        let both = SealFlags::SHRINK | SealFlags::GROW;
        let sealable = MemfdFlags::ALLOW_SEALING;
        for seals in [SealFlags::empty(), SealFlags::SHRINK, SealFlags::GROW] {
            let file = memory("unsealed", sealable, SIZE, seals).unwrap();
            let text = refusal(&[file.as_fd()], SIZE);
            assert!(text.contains("is not sealed against a change of its size"), "{seals:?}: {text}");
        }
        let file = memory("unsealable", MemfdFlags::empty(), SIZE, SealFlags::empty()).unwrap();
        let text = refusal(&[file.as_fd()], SIZE);
        assert!(text.contains("is not sealed against a change of its size"), "{text}");

        let file = memory("other-size", sealable, SIZE, both).unwrap();
        for announced in [0, SIZE - 1, SIZE + 1, u64::MAX] {
            let text = refusal(&[file.as_fd()], announced);
            assert!(text.contains(&format!("has {SIZE} bytes where {announced} were announced")), "{text}");
        }
        let file = memory("empty", sealable, 0, both).unwrap();
        let text = refusal(&[file.as_fd()], SIZE);
        assert!(text.contains("has 0 bytes where 8192 were announced"), "{text}");

        let (stream, _other) = UnixStream::pair().unwrap();
        let udp = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let (reader, _writer) = std::io::pipe().unwrap();
        let program = std::fs::File::open("/proc/self/exe").unwrap();
        let directory = std::fs::File::open("/").unwrap();
        for file in [stream.as_fd(), udp.as_fd(), reader.as_fd(), program.as_fd(), directory.as_fd()] {
            let text = refusal(&[file], SIZE);
            let named = text.contains("is not an anonymous file");
            // A program that lies on a tmpfs could have seals, and has none.
            assert!(named || text.contains("is not sealed against a change of its size"), "{text}");
        }
        let text = refusal(&[stream.as_fd()], SIZE);
        assert!(text.contains("is not an anonymous file"), "{text}");
        let text = refusal(&[], SIZE);
        assert!(text.contains("it sent no descriptor"), "{text}");
    });
}

#[test]
fn memory_of_huge_pages_is_refused_by_name() {
    watchdog(|| {
        // The size is a multiple of any huge page, and takes none of them.
        let (flags, seals) = (MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB, SealFlags::SHRINK | SealFlags::GROW);
        match memory("huge-pages", flags, 1 << 30, seals) {
            Ok(file) => {
                let text = refusal(&[file.as_fd()], 1 << 30);
                assert!(text.contains("is not on ordinary memory pages"), "{text}");
            }
            Err(error) => println!("skipped: this kernel gives no memory of huge pages ({error})"),
        }
    });
}

#[test]
fn a_peer_that_hangs_up_instead_is_told_as_lost() {
    watchdog(|| {
        let (mut controller, socket) = met();
        drop(socket);
        let error = controller.attach(&of(4160), far()).unwrap_err();
        assert!(matches!(error, TransportError::PeerLost { .. }), "{error}");
    });
}

#[test]
fn strangers_that_trickle_do_not_move_the_deadline() {
    watchdog(|| {
        let mut coprocessor = SharedMemory::open(Role::Coprocessor).unwrap();
        let meeting = address(&coprocessor.endpoint());
        let mut strangers: Vec<_> = (0..3).map(|_| UnixStream::connect_addr(&meeting).unwrap()).collect();
        // Each byte comes within a second of the one before, and all of them take far longer than the deadline.
        let trickling = thread::spawn(move || {
            for _ in 0..15 {
                strangers.retain_mut(|stranger| stranger.write(&[0]).is_ok());
                thread::sleep(Duration::from_millis(500));
                if strangers.is_empty() {
                    break;
                }
            }
        });
        let deadline = Instant::now() + Duration::from_millis(1200);
        let controller = Endpoint { host: host_identity(), ..Endpoint::default() };
        assert_timeout(coprocessor.bring_up(&controller, deadline), deadline);
        trickling.join().unwrap();
    });
}

#[test]
fn strangers_without_end_do_not_move_the_deadline() {
    watchdog(|| {
        let mut coprocessor = SharedMemory::open(Role::Coprocessor).unwrap();
        let endpoint = coprocessor.endpoint();
        let over = Arc::new(AtomicBool::new(false));
        let strangers: Vec<_> = [true, false]
            .map(|silent| {
                let (over, meeting) = (over.clone(), address(&endpoint));
                thread::spawn(move || {
                    let mut waiting = VecDeque::new();
                    while !over.load(Ordering::Relaxed) {
                        // It fails once the coprocessor has gone.
                        let Ok(mut stranger) = UnixStream::connect_addr(&meeting) else { return };
                        if !silent {
                            let _ = stranger.write_all(&[7; 16]);
                        }
                        // Each stays for a while, so that there is always one.
                        waiting.push_back(stranger);
                        if waiting.len() > 50 {
                            waiting.pop_front();
                        }
                    }
                })
            })
            .into();
        let deadline = in_half_a_second();
        let controller = Endpoint { host: host_identity(), ..Endpoint::default() };
        assert_timeout(coprocessor.bring_up(&controller, deadline), deadline);
        over.store(true, Ordering::Relaxed);
        strangers.into_iter().for_each(|stranger| stranger.join().unwrap());
    });
}

#[test]
fn the_right_controller_is_served_among_strangers() {
    watchdog(|| {
        let mut coprocessor = SharedMemory::open(Role::Coprocessor).unwrap();
        let endpoint = coprocessor.endpoint();
        let mut almost = endpoint.token;
        almost[15] ^= 1;
        let strangers: Vec<_> = (0..20)
            .map(|number| {
                let mut stranger = UnixStream::connect_addr(&address(&endpoint)).unwrap();
                match number % 4 {
                    // Silent.
                    0 | 1 => {}
                    // Half a token, and even the right one.
                    2 => stranger.write_all(&endpoint.token[..8]).unwrap(),
                    _ => stranger.write_all(&almost).unwrap(),
                }
                stranger
            })
            .collect();
        drop(UnixStream::connect_addr(&address(&endpoint)).unwrap());
        // Long, so that a busy machine keeps it, and shorter than a second for each of those who say too little.
        let deadline = Instant::now() + Duration::from_secs(8);
        let mut controller = SharedMemory::open(Role::Controller).unwrap();
        controller.bring_up(&endpoint, deadline).unwrap();
        coprocessor.bring_up(&controller.endpoint(), deadline).unwrap();
        assert!(Instant::now() < deadline, "served {:?} after the deadline", Instant::now() - deadline);
        drop(strangers);
        // It is the controller and nobody else.
        controller.allocate(4160, MemKind::CpuRam).unwrap();
        controller.share().unwrap();
        coprocessor.attach(&of(4160), far()).unwrap();
    });
}

#[test]
fn no_page_can_be_taken_away_once_the_channel_is_established() {
    watchdog(|| {
        let geometry = Geometry::new(64, 1000);
        let bytes = geometry.region_bytes();
        let mut sides = [Role::Coprocessor, Role::Controller].map(|role| SharedMemory::open(role).unwrap());
        let endpoints = [sides[0].endpoint(), sides[1].endpoint()];
        sides[1].bring_up(&endpoints[0], far()).unwrap();
        sides[0].bring_up(&endpoints[1], far()).unwrap();
        for side in &mut sides {
            side.allocate(bytes, MemKind::CpuRam).unwrap();
            side.share().unwrap();
        }
        for side in &mut sides {
            side.attach(&of(bytes as u64), far()).unwrap();
        }
        let own = sides.each_ref().map(|side| side.own.as_ref().unwrap().file.try_clone().unwrap());
        let handed = sides.each_ref().map(|side| side.peer_file.as_ref().unwrap().try_clone().unwrap());
        let punch = |file: &OwnedFd| {
            let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            // Of a part of a page the bytes alone would go.
            let pages = bytes.next_multiple_of(rustix::param::page_size());
            rustix::fs::fallocate(file, how, 0, pages as u64)
        };
        // Until then it can, on either way to it.
        for file in own.iter().chain(&handed) {
            assert_eq!(punch(file), Ok(()));
            assert_eq!(allocated(file), 0);
        }
        let [coprocessor, controller] = &mut sides;
        controller.establish(geometry).unwrap();
        assert_eq!(punch(&own[0]), Err(rustix::io::Errno::PERM));
        coprocessor.establish(geometry).unwrap();
        controller.settle().unwrap();
        coprocessor.settle().unwrap();
        for file in own.iter().chain(&handed) {
            assert_eq!(punch(file), Err(rustix::io::Errno::PERM));
            assert!(rustix::fs::ftruncate(file, 0).is_err());
            assert!(MmapOptions::new().len(bytes).map_raw(file).is_err(), "a further writable mapping");
            // What had been taken is back.
            assert!(allocated(file) >= bytes as u64, "{} of {bytes}", allocated(file));
        }
        // Both still write into the other's.
        for (from, to) in [(0, 1), (1, 0)] {
            let probe = [from as u8 + 1; 64];
            sides[from].send_probe(&probe).unwrap();
            let mut seen = [0; 64];
            sides[to].incoming().copy_out(geometry.ring_bytes(), &mut seen);
            assert_eq!(seen, probe);
        }
    });
}
