//! What a system may lack, each tried for real: the message says what is missing and what to do, word by word.

use std::process::Command;
use std::time::Duration;

use super::device::device_or_skip;
use super::processes::{Ended, Process};

/// A user without any privilege.
const NOBODY: &[&str] = &["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"];

/// Runs a command of the system, which has to succeed.
fn system(command: &str) {
    let status = Command::new("bash").args(["-ec", command]).status().unwrap();
    assert!(status.success(), "{command}");
}

/// Undoes at the end of a test what it did to the system.
struct Undo(&'static str);

impl Drop for Undo {
    fn drop(&mut self) {
        let _ = Command::new("bash").args(["-c", self.0]).status();
    }
}

fn device_named_as_usual() -> Undo {
    Undo("rdma dev set other0 name rxe0 2>/dev/null")
}

/// Address and link as the lab makes them, and the GID table that belongs to them.
fn network_as_usual() -> Undo {
    Undo(
        // Down and up: only so does the interface get its link-local address and the route of that back.
        "ip addr flush dev d0 scope global; ip link set d0 down; ip link set d0 up; ip addr add 10.9.0.1/24 dev d0; \
         for i in {1..50}; do grep -q ffff:0a09:0001 /sys/class/infiniband/rxe0/ports/1/gids/1 2>/dev/null && \
         grep -q ACTIVE /sys/class/infiniband/rxe0/ports/1/state && break; sleep 0.1; done",
    )
}

/// A coprocessor that takes one session, in some way.
fn coprocessor(way: &[&str], more: &[&str]) -> (Process, String) {
    let arguments = [&["-p", "0", "--once", "--data-path", "verbs", "-d", "rxe0"], more].concat();
    match way {
        [] => Process::start("coprocessor", &arguments),
        way => Process::under(way, "coprocessor", &arguments),
    }
    .listening()
}

fn controller(way: &[&str], port: &str, more: &[&str]) -> Ended {
    let arguments = [&["-p", port, "--data-path", "verbs", "-n", "200", "--timeout-ms", "20000"], more].concat();
    let process = match way {
        [] => Process::start("controller", &arguments),
        way => Process::under(way, "controller", &arguments),
    };
    process.end_within(Duration::from_secs(60))
}

#[track_caller]
fn says(ended: &Ended, words: &[&str]) {
    assert_eq!(ended.status.code(), Some(1), "{} {}", ended.stdout, ended.stderr);
    for word in words {
        assert!(ended.stderr.contains(word), "'{word}' is missing in: {}", ended.stderr);
    }
}

#[track_caller]
fn works(ended: &Ended) {
    assert!(ended.status.success() && ended.stdout.contains("200 verified, 0 corrupt"), "{}", ended.stderr);
}

/// 200 rounds in a way in which all is well.
#[track_caller]
fn all_is_well() {
    let (served, port) = coprocessor(&[], &[]);
    works(&controller(&[], &port, &["-d", "rxe0"]));
    assert!(served.end_within(Duration::from_secs(10)).status.success());
}

/// Each registration may be the one that the limit stops; the peer is told why.
#[test]
fn a_memlock_limit_that_is_too_low_is_named() {
    let Some(_) = device_or_skip("a_memlock_limit_that_is_too_low_is_named") else { return };
    const RAISE: &str = "raise it with ulimit -l, LimitMEMLOCK= in a systemd unit, or --ulimit memlock=-1 in a container, \
                         or use a smaller depth or capacity";
    for (limit, errno, cause) in [
        ("0", "Operation not permitted (os error 1)", "the memlock limit is 0: "),
        ("4096", "Cannot allocate memory (os error 12)", "the memlock limit is 4096 bytes (hard limit 4096 bytes): "),
        ("8192", "Cannot allocate memory (os error 12)", "the memlock limit is 8192 bytes (hard limit 8192 bytes): "),
    ] {
        let limit = format!("--memlock={limit}");
        let way = [NOBODY, &["prlimit", &limit]].concat();
        let words = ["ibv_reg_mr on rxe0 port 1", errno, "while registering 4", &format!("{cause}{RAISE}")];
        let (served, port) = coprocessor(&way, &[]);
        says(&controller(&[], &port, &["-d", "rxe0"]), &[&["the peer refused: "], &words[..]].concat());
        says(&served.end_within(Duration::from_secs(10)), &words);
        // On the other side.
        let (_served, port) = coprocessor(&[], &[]);
        says(&controller(&way, &port, &["-d", "rxe0"]), &words);
    }
    // The usual limit suffices for somebody without privileges, on both sides.
    let (served, port) = coprocessor(NOBODY, &[]);
    works(&controller(NOBODY, &port, &["-d", "rxe0"]));
    assert!(served.end_within(Duration::from_secs(10)).status.success());
}

#[test]
fn no_device_no_node_no_permission_and_no_driver_are_told_apart() {
    let Some(_) = device_or_skip("no_device_no_node_no_permission_and_no_driver_are_told_apart") else { return };
    let (_served, port) = coprocessor(&[], &[]);
    let hidden = |folders: &str| {
        format!("for folder in {folders}; do mount -t tmpfs none $folder || exit 9; done; exec \"$0\" \"$@\"")
    };
    for (folders, words) in [
        (
            "/dev/infiniband",
            "the kernel has an RDMA device but /dev/infiniband has no node for it: load ib_uverbs, and in a container pass \
             the nodes in (--device /dev/infiniband)",
        ),
        (
            "/sys/class/infiniband /sys/class/infiniband_verbs /dev/infiniband",
            "this machine has no RDMA device: use shared memory on one host, or load the driver of the card, or make a \
             software device: modprobe rdma_rxe, then rdma link add rxe0 type rxe netdev INTERFACE",
        ),
        (
            "/usr/lib/x86_64-linux-gnu/libibverbs",
            "the kernel has an RDMA device but libibverbs shows none: install the user-space driver (package \
             ibverbs-providers or rdma-core) and check the permissions of /dev/infiniband/uverbs*",
        ),
    ] {
        let script = hidden(folders);
        let way = ["unshare", "-m", "bash", "-c", &script];
        says(&controller(&way, &port, &[]), &[words]);
        let listed = Process::under(&way, "controller", &["--list"]).end_within(Duration::from_secs(10));
        says(&listed, &[words]);
    }
    let _undo = Undo("chmod 666 /dev/infiniband/uverbs0");
    system("chmod 600 /dev/infiniband/uverbs0");
    let words = ["ibv_open_device on rxe0 failed with Permission denied (os error 13): permission denied on \
         /dev/infiniband/uverbs*: join the group that owns the nodes (often rdma), or change their mode"];
    says(&controller(NOBODY, &port, &[]), &words);
    says(&controller(NOBODY, &port, &["-d", "rxe0"]), &words);
    // The peer of one who is not permitted is told so.
    let (served, port) = coprocessor(NOBODY, &[]);
    says(&controller(&[], &port, &[]), &["Permission denied"]);
    says(&served.end_within(Duration::from_secs(10)), &words);
}

#[test]
fn a_port_that_is_down_is_named() {
    let Some(_) = device_or_skip("a_port_that_is_down_is_named") else { return };
    let (_served, port) = coprocessor(&[], &[]);
    let undo = network_as_usual();
    system("ip link set d0 down");
    let words = [
        "port 1 of rxe0 is DOWN, not ACTIVE: bring its link up (ip link set … up, or check the cable)",
        "there is rxe0 port 1 DOWN Ethernet",
    ];
    says(&controller(&[], &port, &["-d", "rxe0"]), &words);
    says(&controller(&[], &port, &[]), &words);
    drop(undo);
    works(&controller(&[], &port, &["-d", "rxe0"]));
}

/// Sessions follow the addresses as they come and go; what was named and is gone is told.
#[test]
fn addresses_and_their_gids_may_move_between_sessions() {
    let Some(_) = device_or_skip("addresses_and_their_gids_may_move_between_sessions") else { return };
    let undo = network_as_usual();
    // One after another: index 1 moves to another address, and a hole comes into the midst of the table.
    system(
        "ip addr add 10.9.0.5/24 dev d0; ip addr add 10.9.0.6/24 dev d0; sleep 0.3; ip addr del 10.9.0.1/24 dev d0; \
         ip addr del 10.9.0.5/24 dev d0 2>/dev/null || true; ip addr show dev d0 | grep -q 10.9.0.6 || \
         ip addr add 10.9.0.6/24 dev d0; sleep 0.3",
    );
    all_is_well();
    let (served, port) = coprocessor(&[], &["-x", "200"]);
    let words = ["GID index 200 is empty on rxe0 port 1", "10.9.0.6 RoCEv2 on d0"];
    says(&controller(&[], &port, &["-d", "rxe0"]), &words[..1]);
    says(&served.end_within(Duration::from_secs(10)), &words);
    let (served, port) = coprocessor(&[], &[]);
    works(&controller(&[], &port, &["-d", "10.9.0.6"]));
    assert!(served.end_within(Duration::from_secs(10)).status.success());
    let (_served, port) = coprocessor(&[], &[]);
    says(
        &controller(&[], &port, &["-d", "10.9.0.5"]),
        &["no RDMA device is, or belongs to, 10.9.0.5: there is rxe0 port 1"],
    );

    // With no address at all the kernel leaves the link-local GID, from which no way leads anywhere.
    system("ip addr flush dev d0; sleep 0.3");
    let (served, port) = coprocessor(&[], &[]);
    let words = [
        "ibv_modify_qp on rxe0 port 1 GID 0=fe80::",
        "Network is unreachable (os error 101) while moving a queue pair to RTR: no way leads from this GID to the peer's: \
         give both interfaces an address of one network, or choose another GID index",
    ];
    says(&controller(&[], &port, &["-d", "rxe0"]), &words[1..]);
    says(&served.end_within(Duration::from_secs(10)), &words);
    drop(undo);
    all_is_well();
}

#[test]
fn a_device_that_was_renamed_is_named_with_what_is_there() {
    let Some(_) = device_or_skip("a_device_that_was_renamed_is_named_with_what_is_there") else { return };
    let undo = device_named_as_usual();
    system("rdma dev set rxe0 name other0");
    let (served, port) = coprocessor(&[], &["-d", "other0"]);
    says(
        &controller(&[], &port, &["-d", "rxe0"]),
        &["no RDMA device is, or belongs to, rxe0: there is other0 port 1 ACTIVE Ethernet"],
    );
    // By its interface or its address it is found under any name.
    works(&controller(&[], &port, &["-d", "d0"]));
    assert!(served.end_within(Duration::from_secs(10)).status.success());
    drop(undo);
    all_is_well();
}

/// A device is seen in every network namespace while the system shares them, and in its own alone when it does not.
#[test]
fn another_network_namespace_works_or_says_why_not() {
    let Some(_) = device_or_skip("another_network_namespace_works_or_says_why_not") else { return };
    // Whoever is elsewhere does not reach the coprocessor's port.
    let (_served, port) = coprocessor(&[], &[]);
    let ended = controller(&["unshare", "-n"], &port, &["-d", "rxe0"]);
    says(
        &ended,
        &["127.0.0.1", "Network is unreachable (os error 101): is the address right, and is there a route to it?"],
    );
    // Both in another one: what the handshake promises, the data path holds.
    let namespace = "ip netns add other; ip -n other link set lo up";
    let _undo = Undo("ip netns del other 2>/dev/null");
    system(namespace);
    let way = ["ip", "netns", "exec", "other"];
    let (served, port) = coprocessor(&way, &[]);
    works(&controller(&way, &port, &["-d", "rxe0"]));
    assert!(served.end_within(Duration::from_secs(10)).status.success());
}

/// Beyond the limit of a control group the kernel would kill the process. It is told before, and so is the peer.
#[test]
fn a_full_memory_cgroup_is_named() {
    let Some(_) = device_or_skip("a_full_memory_cgroup_is_named") else { return };
    let _undo = Undo("rmdir /sys/fs/cgroup/small");
    system(
        "echo +memory >/sys/fs/cgroup/cgroup.subtree_control; mkdir -p /sys/fs/cgroup/small; \
         echo 20M >/sys/fs/cgroup/small/memory.max",
    );
    let way = ["bash", "-c", "echo $$ >/sys/fs/cgroup/small/cgroup.procs; exec \"$0\" \"$@\""];
    let large = ["-s", "1000000", "--depth", "32", "-n", "200"];
    let words = [
        "the check of the memory limit on control group /small failed with Cannot allocate memory (os error 12): 3200",
        "bytes are asked for, its memory.max is 20971520 and leaves ",
        "beyond it the kernel kills the process: raise it (--memory of a container, MemoryMax= in a systemd unit), or use \
         a smaller depth or capacity",
    ];
    for path in ["shm", "verbs"] {
        let (served, port) = coprocessor(&way, &["--data-path", path, "--max-memory", "1000"]);
        let ended = controller(&[], &port, &[&["--data-path", path], &large[..]].concat());
        says(&ended, &[&["the peer refused: "], &words[..]].concat());
        says(&served.end_within(Duration::from_secs(10)), &words);
        let (_served, port) = coprocessor(&[], &["--data-path", path, "--max-memory", "1000"]);
        says(&controller(&way, &port, &[&["--data-path", path], &large[..]].concat()), &words);
        // What fits works in the same group.
        let (served, port) = coprocessor(&way, &["--data-path", path]);
        works(&controller(&[], &port, &["--data-path", path]));
        assert!(served.end_within(Duration::from_secs(10)).status.success());
    }
}

#[test]
fn a_processor_outside_of_the_cpuset_is_named() {
    let Some(_) = device_or_skip("a_processor_outside_of_the_cpuset_is_named") else { return };
    let _undo = Undo("rmdir /sys/fs/cgroup/half");
    system(
        "echo +cpuset >/sys/fs/cgroup/cgroup.subtree_control; mkdir -p /sys/fs/cgroup/half; \
         echo 0 >/sys/fs/cgroup/half/cpuset.cpus",
    );
    let way = ["bash", "-c", "echo $$ >/sys/fs/cgroup/half/cgroup.procs; exec \"$0\" \"$@\""];
    for (cpu, words) in [
        (
            "1",
            "cpu: processor 1 does not exist or may not be used (Invalid argument (os error 22)); the machine has 0-",
        ),
        (
            "777",
            "cpu: processor 777 does not exist or may not be used (Invalid argument (os error 22)); the machine has 0-",
        ),
    ] {
        let (served, port) = coprocessor(&way, &["--cpu", cpu]);
        let _ = controller(&[], &port, &["--timeout-ms", "300"]);
        says(&served.end_within(Duration::from_secs(10)), &[words]);
    }
    let (served, port) = coprocessor(&way, &["--cpu", "0"]);
    works(&controller(&way, &port, &[]));
    assert!(served.end_within(Duration::from_secs(10)).status.success());
}

/// Both sides, and the kernel's part of software RDMA, on one processor.
#[test]
fn one_processor_is_enough() {
    let Some(_) = device_or_skip("one_processor_is_enough") else { return };
    let way = ["taskset", "-c", "0"];
    for path in ["shm", "verbs"] {
        let (served, port) = coprocessor(&way, &["--data-path", path, "--realtime"]);
        works(&controller(&way, &port, &["--data-path", path]));
        let ended = served.end_within(Duration::from_secs(20));
        // A spinner that nothing can interrupt would starve the one that it waits for.
        assert!(ended.stderr.contains("real time: Refused(") && ended.stderr.contains("starve"), "{}", ended.stderr);
    }
}

#[test]
fn privileges_that_are_refused_are_told_and_not_missed() {
    let Some(_) = device_or_skip("privileges_that_are_refused_are_told_and_not_missed") else { return };
    let way = [NOBODY, &["prlimit", "--memlock=65536"]].concat();
    let (served, port) = coprocessor(&way, &["--realtime"]);
    works(&controller(NOBODY, &port, &[]));
    let ended = served.end_within(Duration::from_secs(10));
    assert!(ended.status.success());
    for words in [
        "real time: Refused(\"Operation not permitted (os error 1): needs CAP_SYS_NICE or an rtprio limit (ulimit -r)\")",
        "memory lock: Refused(\"Cannot allocate memory (os error 12): needs CAP_IPC_LOCK or a memlock limit (ulimit -l)\")",
        "low latency: Refused(\"/dev/cpu_dma_latency: Permission denied (os error 13); needs root or a udev rule\")",
    ] {
        assert!(ended.stderr.contains(words), "'{words}' is missing in: {}", ended.stderr);
    }
}
