use std::net::{Ipv4Addr, Ipv6Addr, TcpListener};

use super::super::test_support::{LIVENESS, far, has_ipv6, soon, watchdog};
use super::*;

/// A port at which nobody listens, and the socket that keeps it so.
fn closed_port(ip: IpAddr) -> (u16, Socket) {
    let socket = Socket::new(Domain::for_address((ip, 0).into()), Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::new(ip, 0).into()).unwrap();
    (socket.local_addr().unwrap().as_socket().unwrap().port(), socket)
}

#[test]
fn hosts_are_understood_as_people_write_them() {
    let v6 = SocketAddr::from((Ipv6Addr::LOCALHOST, 7));
    assert_eq!(resolve("::1", 7).unwrap(), [v6]);
    assert_eq!(resolve("[::1]", 7).unwrap(), [v6]);
    assert_eq!(resolve("127.0.0.1", 7).unwrap(), [SocketAddr::from((Ipv4Addr::LOCALHOST, 7))]);
    for name in ["", "[]"] {
        assert_eq!(resolve(name, 7).unwrap_err().kind(), ErrorKind::InvalidInput, "{name:?}");
    }
    if has_ipv6() {
        for scoped in ["fe80::1%1", "[fe80::1%lo]"] {
            let Ok(SocketAddr::V6(address)) = resolve(scoped, 7).map(|all| all[0]) else { panic!("{scoped}") };
            assert_eq!(address.scope_id(), 1, "{scoped}");
        }
    }
}

#[test]
fn a_link_local_end_takes_the_peers_scope() {
    let peer = resolve("fe80::1%1", 7).unwrap_or_default().pop();
    if let Some(peer) = peer {
        let ip: IpAddr = "fe80::2".parse().unwrap();
        assert!(matches!(local(ip, peer), SocketAddr::V6(address) if address.scope_id() == 1 && address.port() == 0));
    }
}

#[test]
fn it_connects_over_both_families() {
    watchdog(|| {
        for (host, ip) in [("127.0.0.1", IpAddr::from(Ipv4Addr::LOCALHOST)), ("[::1]", Ipv6Addr::LOCALHOST.into())] {
            if ip.is_ipv6() && !has_ipv6() {
                continue;
            }
            let listener = TcpListener::bind((ip, 0)).unwrap();
            let address = listener.local_addr().unwrap();
            let channel = connect(host, address.port(), Some(ip), far(), LIVENESS).unwrap();
            assert_eq!((channel.peer_addr(), channel.local_addr().ip()), (address, ip));
            assert_eq!(listener.accept().unwrap().1, channel.local_addr());
        }
    });
}

#[test]
fn the_peer_may_come_later() {
    watchdog(|| {
        let (port, socket) = closed_port(Ipv4Addr::LOCALHOST.into());
        let peer = thread::spawn(move || {
            thread::sleep(Duration::from_millis(300));
            socket.listen(1).unwrap();
            socket.accept().unwrap()
        });
        connect("127.0.0.1", port, None, far(), LIVENESS).unwrap();
        peer.join().unwrap();
    });
}

#[test]
fn giving_up_lists_what_was_tried() {
    watchdog(|| {
        let (port, _socket) = closed_port(Ipv4Addr::LOCALHOST.into());
        let deadline = soon();
        let error = connect("127.0.0.1", port, None, deadline, LIVENESS).unwrap_err();
        assert!(Instant::now() >= deadline, "it gave up too early");
        let TransportError::Timeout { stage: STAGE, hint, .. } = error else { panic!("{error:?}") };
        for part in [
            format!("127.0.0.1:{port}: Connection refused"),
            format!("coprocessor running and listening on port {port}"),
        ] {
            assert!(hint.contains(&part), "{part} is not said in: {hint}");
        }
    });
}

/// A dead first address does not keep the second from being tried.
#[test]
fn every_address_is_tried() {
    watchdog(|| {
        let (port, socket) = closed_port(Ipv4Addr::LOCALHOST.into());
        let closed = attempt((Ipv4Addr::LOCALHOST, port).into(), None, far()).unwrap_err();
        assert_eq!(closed.raw_os_error(), Some(libc::ECONNREFUSED));
        socket.listen(1).unwrap();
        // The name has the IPv6 address first on most machines, where nobody listens.
        if resolve("localhost", port).is_ok_and(|all| all.iter().any(SocketAddr::is_ipv4)) {
            connect("localhost", port, None, far(), LIVENESS).unwrap();
        }
    });
}

#[test]
fn an_attempt_ends_at_its_deadline() {
    watchdog(|| {
        // A listener with a full backlog swallows further connections.
        let listener = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        listener.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
        listener.listen(0).unwrap();
        let address = listener.local_addr().unwrap().as_socket().unwrap();
        let mut held = Vec::new();
        let error = (0..8).find_map(|_| attempt(address, None, soon()).map(|stream| held.push(stream)).err());
        assert_eq!(error.and_then(|error| error.raw_os_error()), Some(libc::ETIMEDOUT));
    });
}

#[test]
fn a_name_that_does_not_exist_is_named() {
    watchdog(|| {
        let error = connect("no-such-host.invalid", 7, None, soon(), LIVENESS).unwrap_err();
        assert!(error.to_string().contains("the name no-such-host.invalid cannot be resolved"), "{error}");
    });
}

#[test]
fn errors_that_stay_are_told_at_once() {
    watchdog(|| {
        // 192.0.2.1 is for documentation (RFC 5737) and no address of this machine.
        let bind = Some("192.0.2.1".parse().unwrap());
        let error = connect("127.0.0.1", 7, bind, far(), LIVENESS).unwrap_err();
        assert!(matches!(error, TransportError::System { .. }) && error.to_string().contains("192.0.2.1"), "{error}");
        for (peer, port, bind) in
            [("127.0.0.1", 7, Some(Ipv6Addr::LOCALHOST.into())), ("127.0.0.1", 0, None), ("", 7, None)]
        {
            let error = connect(peer, port, bind, far(), LIVENESS).unwrap_err();
            assert!(matches!(error, TransportError::Invalid { .. }), "{error:?}");
        }
    });
}

#[test]
fn it_does_not_take_itself_for_the_peer() {
    watchdog(|| {
        let (port, socket) = closed_port(Ipv4Addr::LOCALHOST.into());
        drop(socket);
        let own = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let error = attempt(own, Some(own), far()).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ECONNREFUSED));
        TcpListener::bind(own).expect("the port is free again at once");
    });
}

/// Many quick refusals within one deadline: the pauses and limits grow only so far.
#[test]
fn a_long_series_of_refusals_ends_at_the_deadline() {
    watchdog(|| {
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let began = Instant::now();
        let error = connect("127.0.0.1", free, None, began + Duration::from_secs(4), LIVENESS).unwrap_err();
        assert!(matches!(error, TransportError::Timeout { .. }), "{error}");
        assert!(began.elapsed() >= Duration::from_secs(4));
    });
}
