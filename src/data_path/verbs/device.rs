//! Devices, ports and GIDs: what there is, and which one serves.

use std::ffi::CStr;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use super::ffi::{self, Table};
use crate::devices::{DeviceInfo, GidInfo, GidType, LinkLayer, PortInfo, PortState};
use crate::error::{Errno, Result, TransportError, VerbsFailure};

/// An open device, and where errors happen.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) verbs: &'static Table,
    pub(crate) raw: *mut ffi::ibv_context,
    pub(crate) name: String,
    /// Port and GID in use, for messages; filled in when they are chosen.
    pub(crate) place: std::sync::OnceLock<(u8, String)>,
}

// SAFETY: the verbs interface lets any thread use a context at any time.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// The port and GID that a session uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Route {
    pub(crate) port: u8,
    /// As in the verbs interface: 1 InfiniBand, 2 Ethernet.
    pub(crate) link_layer: u8,
    /// Active MTU as the verbs interface numbers it: 1 = 256 … 5 = 4,096 bytes.
    pub(crate) mtu: u8,
    pub(crate) lid: u16,
    pub(crate) gid_index: u8,
    pub(crate) gid: [u8; 16],
    pub(crate) gid_type: Option<GidType>,
    pub(crate) pkey_index: u16,
    pub(crate) pkey: u16,
}

impl Context {
    /// Opens the device of this name.
    fn open(verbs: &'static Table, name: &str) -> Result<Arc<Self>> {
        let list = DeviceList::get(verbs)?;
        let device = list.iter().find(|(found, _)| found == name).ok_or_else(|| TransportError::Device {
            problem: format!("there is no RDMA device named {name}"),
            remedy: list.names(),
        })?;
        let opened = match forbidden(name) {
            Some(errno) => Err(errno),
            None => {
                // SAFETY: the pointer is in the list, which lives until the end of this function.
                let raw = unsafe { (verbs.open_device)(device.1) };
                if raw.is_null() { Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(0)) } else { Ok(raw) }
            }
        };
        let raw = opened.map_err(|errno| {
            TransportError::Verbs(Box::new(VerbsFailure {
                verb: "ibv_open_device",
                errno: Errno(errno),
                device: name.to_owned(),
                port: 0,
                gid: String::new(),
                peer: String::new(),
                detail: String::new(),
                remedy: open_remedy(errno),
            }))
        })?;
        Ok(Arc::new(Self { verbs, raw, name: name.to_owned(), place: std::sync::OnceLock::new() }))
    }

    /// The error of a verb that sets `errno`. To be called before anything else may change it.
    pub(crate) fn last_error(&self, verb: &'static str, detail: String) -> TransportError {
        let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
        self.error(verb, errno, detail)
    }

    /// The error of a verb that returned an error number.
    pub(crate) fn error(&self, verb: &'static str, errno: i32, detail: impl Into<String>) -> TransportError {
        let (port, gid) = self.place.get().cloned().unwrap_or_default();
        TransportError::Verbs(Box::new(VerbsFailure {
            verb,
            errno: Errno(errno),
            device: self.name.clone(),
            port,
            gid,
            peer: String::new(),
            detail: detail.into(),
            remedy: remedy(verb, errno),
        }))
    }

    /// Says so when something could not be released. Nothing else can be done about it: it is left to the process's end.
    pub(crate) fn released(&self, verb: &'static str, errno: i32) {
        if errno != 0 {
            tracing::warn!("{}", self.error(verb, errno, "releasing; the object is left to the end of the process"));
        }
    }

    /// `ibv_query_port`.
    fn query_port(&self, port: u8) -> Result<ffi::ibv_port_attr> {
        // SAFETY: a plain structure; zeroed because the call may fill only its front.
        let mut attributes: ffi::ibv_port_attr = unsafe { ffi::zeroed() };
        // SAFETY: the context is open; the older structure that the call names is the front of this one.
        let errno = unsafe { (self.verbs.query_port)(self.raw, port, (&raw mut attributes).cast()) };
        if errno == 0 {
            Ok(attributes)
        } else {
            Err(self.error("ibv_query_port", errno, format!("asking for port {port}")))
        }
    }

    /// `ibv_query_device`: the number of ports.
    fn port_count(&self) -> Result<u8> {
        // SAFETY: a plain structure.
        let mut attributes: ffi::ibv_device_attr = unsafe { ffi::zeroed() };
        // SAFETY: the context is open and the structure outlives the call.
        let errno = unsafe { (self.verbs.query_device)(self.raw, &mut attributes) };
        if errno == 0 { Ok(attributes.phys_port_cnt) } else { Err(self.error("ibv_query_device", errno, "")) }
    }

    /// What is known of a port and of its GID table.
    fn port_info(&self, port: u8) -> Result<PortInfo> {
        let attributes = self.query_port(port)?;
        let gids = (0..attributes.gid_tbl_len.clamp(0, 256) as u32).filter_map(|index| self.gid(port, index)).collect();
        Ok(PortInfo {
            number: port,
            state: PortState::from_verbs(attributes.state),
            link_layer: LinkLayer::from_verbs(attributes.link_layer),
            active_mtu: 128 << attributes.active_mtu.clamp(1, 5),
            lid: attributes.lid,
            gids,
        })
    }

    /// One entry of the GID table; `None` for a hole: an entry that is zero or cannot be read.
    fn gid(&self, port: u8, index: u32) -> Option<GidInfo> {
        // SAFETY: a plain union.
        let mut gid: ffi::ibv_gid = unsafe { ffi::zeroed() };
        // SAFETY: the context is open and the union outlives the call.
        let errno = unsafe { (self.verbs.query_gid)(self.raw, port, index as i32, &mut gid) };
        // SAFETY: every bit pattern is valid for the bytes.
        let raw = unsafe { gid.raw };
        if errno != 0 || raw == [0; 16] {
            return None;
        }
        let (kind, interface) = (self.verbs.gid_attributes)(&self.name, port, index);
        let address = Ipv6Addr::from(raw);
        Some(GidInfo { index, address, gid_type: GidType::from_sysfs(kind.as_deref()), interface })
    }

    /// An entry of the partition key table; `None` for one that is empty, cannot be read or is not there.
    fn pkey(&self, port: u8, index: u16) -> Option<u16> {
        let mut key = 0;
        // SAFETY: the context is open and the number outlives the call.
        let errno = unsafe { (self.verbs.query_pkey)(self.raw, port, i32::from(index), &mut key) };
        // The lower bits are the partition, and 0 is none.
        (errno == 0).then(|| u16::from_be(key)).filter(|key| key & 0x7FFF != 0)
    }

    /// The partition key to use. One that was not asked for is taken for the default partition's when it cannot be read.
    fn choose_pkey(&self, port: u8, wanted: Option<u16>) -> Result<(u16, u16)> {
        let Some(index) = wanted else { return Ok((0, self.pkey(port, 0).unwrap_or(0xFFFF))) };
        if let Some(key) = self.pkey(port, index) {
            return Ok((index, key));
        }
        let table: Vec<_> = (0..self.query_port(port)?.pkey_tbl_len)
            .filter_map(|index| self.pkey(port, index).map(|key| format!("{index}={key:#06x}")))
            .collect();
        Err(TransportError::Device {
            problem: format!("partition key index {index} is empty on {} port {port}", self.name),
            remedy: match &table[..] {
                [] => "the table cannot be read; leave the index out".into(),
                table => format!("there is {}", table.join(" ")),
            },
        })
    }

    /// Descriptor that becomes readable when an asynchronous event is waiting; reading it does not block.
    pub(crate) fn async_descriptor(&self) -> std::os::fd::RawFd {
        // SAFETY: the context is open.
        unsafe { (*self.raw).async_fd }
    }

    /// Takes and acknowledges one asynchronous event. To be called only when the descriptor is readable.
    ///
    /// # Errors
    /// When there is one that cannot be read: the descriptor would stay readable for ever.
    pub(crate) fn take_event(&self) -> Result<Option<(i32, *mut std::os::raw::c_void)>> {
        let mut event = ffi::AsyncEvent { element: std::ptr::null_mut(), event_type: -1 };
        // SAFETY: the context is open; the structure has the layout of the verbs interface with the enumeration as its
        // integer.
        if unsafe { (self.verbs.get_async_event)(self.raw, &mut event) } != 0 {
            let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
            return match errno {
                libc::EINTR | libc::EAGAIN => Ok(None),
                _ => Err(self.error("ibv_get_async_event", errno, "reading an event of the device")),
            };
        }
        let taken = (event.event_type, event.element);
        // SAFETY: every event that was taken is acknowledged once, before its object can be destroyed.
        unsafe { (self.verbs.ack_async_event)(&mut event) };
        Ok(Some(taken))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: opened once; everything made from it holds an `Arc` of it and is gone.
        let errno = unsafe { (self.verbs.close_device)(self.raw) };
        if errno != 0 {
            tracing::warn!(device = self.name, errno, "ibv_close_device failed");
        }
    }
}

/// Opens the device and picks the port and GID that `wanted` names, or that fit the address of the out-of-band
/// connection.
pub(crate) fn choose(
    verbs: &'static Table,
    wanted: Option<&str>,
    port: Option<u8>,
    gid_index: Option<u8>,
    pkey_index: Option<u16>,
    local: IpAddr,
) -> Result<(Arc<Context>, Route)> {
    let (all, failures) = read_all(verbs)?;
    let candidates: Vec<_> = all
        .iter()
        .flat_map(|device| device.ports.iter().map(move |found| (device, found)))
        .filter(|(device, found)| wanted.is_none_or(|name| device.name == name || answers_to(found, name)))
        .filter(|(_, found)| port.is_none_or(|number| found.number == number))
        .collect();
    let device_error = |problem: String| TransportError::Device { problem, remedy: describe(&all) };
    if candidates.is_empty() {
        if let Some((_, error)) = failures.into_iter().find(|(name, _)| Some(name.as_str()) == wanted) {
            return Err(error);
        }
        return Err(device_error(match (wanted, port) {
            (Some(name), Some(number)) => format!("no RDMA device is, or belongs to, {name} and has a port {number}"),
            (Some(name), None) => format!("no RDMA device is, or belongs to, {name}"),
            _ => "no RDMA device has such a port".into(),
        }));
    }
    let active: Vec<_> = candidates.iter().filter(|(_, found)| found.state == PortState::Active).collect();
    if active.is_empty() {
        let (device, found) = candidates[0];
        return Err(device_error(format!(
            "port {} of {} is {}, not ACTIVE: bring its link up (ip link set … up, or check the cable)",
            found.number, device.name, found.state
        )));
    }
    let owner = active.iter().find(|(_, found)| found.gids.iter().any(|gid| gid.ip() == local.to_canonical()));
    let (device, found) = **owner.unwrap_or(&active[0]);
    let context = Context::open(verbs, &device.name)?;
    let (pkey_index, pkey) = context.choose_pkey(found.number, pkey_index)?;
    let mut route = Route {
        port: found.number,
        link_layer: found.link_layer.to_verbs(),
        mtu: mtu_number(found.active_mtu),
        lid: found.lid,
        pkey_index,
        pkey,
        ..Route::default()
    };
    let gid = choose_gid(found, gid_index, wanted, local).map_err(|problem| TransportError::Device {
        problem: format!("{problem} on {} port {}", device.name, found.number),
        remedy: describe(std::slice::from_ref(device)),
    })?;
    if let Some(gid) = gid {
        route.gid_index = gid.index as u8;
        route.gid = gid.address.octets();
        route.gid_type = gid.gid_type;
    }
    let place = gid.map_or(String::new(), |gid| gid.to_string());
    tracing::debug!(device = device.name, port = route.port, gid = place, "device chosen");
    let _ = context.place.set((route.port, place));
    Ok((context, route))
}

/// The GID to use; none is needed on InfiniBand.
fn choose_gid<'a>(
    port: &'a PortInfo,
    index: Option<u8>,
    wanted: Option<&str>,
    local: IpAddr,
) -> Result<Option<&'a GidInfo>, String> {
    if let Some(index) = index {
        return match port.gids.iter().find(|gid| gid.index == u32::from(index)) {
            Some(gid) => Ok(Some(gid)),
            None => Err(format!("GID index {index} is empty")),
        };
    }
    // Better ones come first: what the caller named, then the address of the out-of-band connection, then RoCE v2, then an address of IPv4, and among
    // equals the lower index.
    let best = port.gids.iter().min_by_key(|gid| {
        (
            !wanted.is_some_and(|name| named(gid, name)),
            gid.ip() != local.to_canonical(),
            gid.gid_type != Some(GidType::RoceV2),
            !gid.ip().is_ipv4(),
            gid.address.is_unicast_link_local(),
            gid.index,
        )
    });
    if best.is_none() && port.link_layer != LinkLayer::InfiniBand {
        return Err("no usable GID (the table is empty): give its interface an address".into());
    }
    Ok(best)
}

/// Whether a GID of the port has this interface or address.
fn answers_to(port: &PortInfo, name: &str) -> bool {
    port.gids.iter().any(|gid| named(gid, name))
}

/// Whether the GID has this interface or address.
fn named(gid: &GidInfo, name: &str) -> bool {
    let address: Option<IpAddr> = name.parse().ok();
    gid.interface.as_deref() == Some(name) || address.is_some_and(|address| gid.ip() == address.to_canonical())
}

fn mtu_number(bytes: u32) -> u8 {
    bytes.trailing_zeros().saturating_sub(7).clamp(1, 5) as u8
}

/// Every device, port and GID. A device that cannot be opened is left out with a warning.
pub(crate) fn list(verbs: &'static Table) -> Result<Vec<DeviceInfo>> {
    read_all(verbs).map(|(devices, _)| devices)
}

/// Devices that cannot be read: their names, and why.
type Failures = Vec<(String, TransportError)>;

/// Every device that can be read, and those that cannot. At least one can.
fn read_all(verbs: &'static Table) -> Result<(Vec<DeviceInfo>, Failures)> {
    let names: Vec<String> = DeviceList::get(verbs)?.iter().map(|(name, _)| name).collect();
    if names.is_empty() {
        return Err(no_device());
    }
    let mut devices = Vec::new();
    let mut failures = Vec::new();
    for name in names {
        let read = Context::open(verbs, &name)
            .and_then(|context| (1..=context.port_count()?).map(|port| context.port_info(port)).collect());
        match read {
            Ok(ports) => devices.push(DeviceInfo { name, ports }),
            Err(error) => {
                tracing::warn!(%error, "an RDMA device cannot be used");
                failures.push((name, error));
            }
        }
    }
    if devices.is_empty() {
        return Err(failures.swap_remove(0).1);
    }
    Ok((devices, failures))
}

/// Why the list of devices is empty, as far as the system shows it.
fn no_device() -> TransportError {
    let entries = |path: &str| std::fs::read_dir(path).map(|dir| dir.flatten().count()).unwrap_or(0);
    let kernel_devices = entries("/sys/class/infiniband");
    let (problem, remedy) = if kernel_devices == 0 {
        (
            "this machine has no RDMA device",
            "use shared memory on one host, or load the driver of the card, or make a software device: modprobe \
             rdma_rxe, then rdma link add rxe0 type rxe netdev INTERFACE",
        )
    } else if entries("/dev/infiniband") == 0 {
        (
            "the kernel has an RDMA device but /dev/infiniband has no node for it",
            "load ib_uverbs, and in a container pass the nodes in (--device /dev/infiniband)",
        )
    } else {
        (
            "the kernel has an RDMA device but libibverbs shows none",
            "install the user-space driver (package ibverbs-providers or rdma-core) and check the permissions of \
             /dev/infiniband/uverbs*",
        )
    };
    TransportError::Device { problem: problem.into(), remedy: remedy.into() }
}

/// The devices as one line for an error message.
fn describe(devices: &[DeviceInfo]) -> String {
    let mut text = String::from("there is");
    for device in devices {
        for port in &device.ports {
            text += &format!(" {} port {} {} {} [", device.name, port.number, port.state, port.link_layer);
            for gid in &port.gids {
                text += &format!(" {gid}");
            }
            text += " ]";
        }
    }
    text
}

/// The error number with which the device's node would refuse to be opened. libibverbs keeps trying for five seconds when it
/// may not open a node, which is as long as a handshake lasts.
fn forbidden(name: &str) -> Option<i32> {
    let nodes = std::fs::read_dir("/sys/class/infiniband_verbs").ok()?;
    let node = nodes
        .flatten()
        .find(|node| std::fs::read_to_string(node.path().join("ibdev")).is_ok_and(|device| device.trim() == name))?;
    let path = std::path::Path::new("/dev/infiniband").join(node.file_name());
    // As libibverbs would: no other call answers alike under every filter that a container may have.
    match std::fs::OpenOptions::new().read(true).write(true).open(path) {
        Err(error) => error.raw_os_error().filter(|errno| matches!(*errno, libc::EACCES | libc::EPERM)),
        Ok(_) => None,
    }
}

fn open_remedy(errno: i32) -> String {
    let text = match errno {
        libc::EACCES | libc::EPERM => {
            "permission denied on /dev/infiniband/uverbs*: join the group that owns the nodes (often rdma), or change \
             their mode"
        }
        libc::ENOENT | libc::ENODEV | libc::ENXIO => {
            "the device node is missing: load ib_uverbs, and in a container pass /dev/infiniband in"
        }
        _ => return remedy("ibv_open_device", errno),
    };
    text.to_owned()
}

const RAISE_MEMLOCK: &str = "raise it with ulimit -l, LimitMEMLOCK= in a systemd unit, or --ulimit memlock=-1 in a container, \
                             or use a smaller depth or capacity";

fn memlock() -> rustix::process::Rlimit {
    rustix::process::getrlimit(rustix::process::Resource::Memlock)
}

/// What to do about an error number of a verb.
fn remedy(verb: &str, errno: i32) -> String {
    let text = match (verb, errno) {
        // Without any limit to spend, the kernel says that pinning is not permitted.
        (_, libc::EPERM) if memlock().current == Some(0) => return format!("the memlock limit is 0: {RAISE_MEMLOCK}"),
        // Those that pin memory, their own or their queues'.
        ("ibv_reg_mr" | "ibv_reg_dmabuf_mr" | "ibv_create_cq" | "ibv_create_qp" | "ibv_alloc_pd", libc::ENOMEM) => {
            let limit = memlock();
            let show = |value: Option<u64>| value.map_or("unlimited".into(), |bytes| format!("{bytes} bytes"));
            return format!(
                "memory could not be pinned; the memlock limit is {} (hard limit {}): {RAISE_MEMLOCK}",
                show(limit.current),
                show(limit.maximum)
            );
        }
        (_, libc::ENOMEM) => "the kernel or the device has no memory left for it: free some, or end other users of it",
        (_, libc::EACCES | libc::EPERM) => "the process may not do this: check the permissions of /dev/infiniband",
        (_, libc::ENODEV | libc::EIO) => "the device is gone or was reset: connect again",
        ("ibv_modify_qp", libc::EINVAL) => {
            "an attribute does not fit, most often the GID index, the peer's GID or the MTU: try another GID index"
        }
        ("ibv_create_cq" | "ibv_create_qp", libc::EINVAL) => "the device does not take this size: use a smaller depth",
        ("ibv_post_send", libc::EINVAL | libc::EFAULT) => {
            "the queue pair has left its state or refuses the request: connect again, and report it if it stays"
        }
        (_, libc::EINVAL) => {
            "the driver refuses what it was given: do the versions of kernel, driver and rdma-core fit?"
        }
        (_, libc::EFAULT) => "the driver cannot reach this memory: is it of a kind that the device can use?",
        (_, libc::EAGAIN) => "the device has no resources left: end other users of it, then connect again",
        (_, libc::EOPNOTSUPP | libc::ENOSYS) => {
            "the device or its driver cannot do this: use another, or a newer driver"
        }
        (_, libc::EMFILE | libc::ENFILE) => "raise the limit on open files (ulimit -n)",
        (_, libc::ETIMEDOUT | libc::EHOSTUNREACH | libc::ENETUNREACH) => {
            "no way leads from this GID to the peer's: give both interfaces an address of one network, or choose another \
             GID index"
        }
        (_, libc::EBUSY) => "something still uses it",
        _ => "the kernel's log (dmesg) may say why",
    };
    text.to_owned()
}

/// The list that `ibv_get_device_list` gives, freed at the end.
struct DeviceList {
    verbs: &'static Table,
    raw: *mut *mut ffi::ibv_device,
    count: usize,
}

impl DeviceList {
    fn get(verbs: &'static Table) -> Result<Self> {
        let mut count = 0;
        // SAFETY: the number outlives the call.
        let raw = unsafe { (verbs.get_device_list)(&mut count) };
        if raw.is_null() {
            let errno = std::io::Error::last_os_error();
            // A kernel without RDMA support answers ENOSYS: no device either.
            if matches!(errno.raw_os_error(), Some(libc::ENOSYS | libc::ENOENT)) {
                return Err(no_device());
            }
            let text = open_remedy(errno.raw_os_error().unwrap_or(0));
            return Err(TransportError::system("ibv_get_device_list", "this host", errno).with_remedy(text));
        }
        Ok(Self { verbs, raw, count: count.max(0) as usize })
    }

    fn iter(&self) -> impl Iterator<Item = (String, *mut ffi::ibv_device)> + '_ {
        (0..self.count).map(|index| {
            // SAFETY: the list has `count` entries and lives as long as `self`.
            let device = unsafe { *self.raw.add(index) };
            // SAFETY: an entry of the list.
            let name = unsafe { (self.verbs.get_device_name)(device) };
            if name.is_null() {
                return (String::from("without a name"), device);
            }
            // SAFETY: the name is a string inside of the entry.
            let name = unsafe { CStr::from_ptr(name) };
            (name.to_string_lossy().into_owned(), device)
        })
    }

    fn names(&self) -> String {
        let names: Vec<_> = self.iter().map(|(name, _)| name).collect();
        if names.is_empty() { "there is none at all".into() } else { format!("there is {}", names.join(", ")) }
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: the list was given by `get_device_list` and is freed once; open contexts do not need it.
        unsafe { (self.verbs.free_device_list)(self.raw) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(gids: &[(u32, &str, GidType)]) -> PortInfo {
        PortInfo {
            number: 1,
            state: PortState::Active,
            link_layer: LinkLayer::Ethernet,
            active_mtu: 1024,
            lid: 0,
            gids: gids
                .iter()
                .map(|(index, address, kind)| GidInfo {
                    index: *index,
                    address: address.parse().unwrap(),
                    gid_type: Some(*kind),
                    interface: None,
                })
                .collect(),
        }
    }

    #[test]
    fn the_gid_of_the_used_address_comes_first_and_roce_v2_before_v1() {
        let table = port(&[
            (0, "fe80::1", GidType::RoceV1),
            (1, "fe80::1", GidType::RoceV2),
            (2, "::ffff:10.0.0.1", GidType::RoceV1),
            (3, "::ffff:10.0.0.1", GidType::RoceV2),
            (5, "::ffff:10.0.0.2", GidType::RoceV2),
        ]);
        let chosen = |address: &str| choose_gid(&table, None, None, address.parse().unwrap()).unwrap().unwrap().index;
        assert_eq!(chosen("10.0.0.2"), 5);
        assert_eq!(chosen("::ffff:10.0.0.2"), 5);
        assert_eq!(chosen("10.0.0.1"), 3);
        assert_eq!(chosen("127.0.0.1"), 3);
        assert_eq!(choose_gid(&table, Some(0), None, "10.0.0.1".parse().unwrap()).unwrap().unwrap().index, 0);
        let hole = choose_gid(&table, Some(4), None, "10.0.0.1".parse().unwrap()).unwrap_err();
        assert!(hole.contains("index 4 is empty"), "{hole}");
        let none = choose_gid(&port(&[]), None, None, "10.0.0.1".parse().unwrap()).unwrap_err();
        assert!(none.contains("give its interface an address"), "{none}");
    }

    #[test]
    fn mtus_are_numbered_as_in_the_verbs_interface() {
        for (bytes, number) in [(256, 1), (512, 2), (1024, 3), (2048, 4), (4096, 5)] {
            assert_eq!(mtu_number(bytes), number);
            assert_eq!(128 << number, bytes);
        }
    }
}
