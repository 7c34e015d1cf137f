//! The native out-of-band messages and their bytes.
//!
//! The format is laid down in `docs/wire-protocol.md`, whose vectors the tests here read. Every number is
//! little-endian and written field by field. A message is a header of [`HEADER`] bytes and a body of at most
//! [`MAX_BODY`]; a body may be longer than this version knows (its tail is skipped), never shorter. So a later
//! version 1 may add what can be ignored at a body's end; what cannot be ignored takes a reserved bit, which is
//! refused here by name.

use std::fmt;

use super::decoder::Problem;

/// First four bytes of every message.
pub(crate) const MAGIC: [u8; 4] = *b"CTP1";
/// Version of the protocol.
pub(crate) const VERSION: u16 = 1;
/// Bytes of a header.
pub(crate) const HEADER: usize = 16;
/// Most bytes that a body may have, of whatever kind.
pub(crate) const MAX_BODY: usize = 1024;
/// Most bytes of an error's text.
pub(crate) const MAX_TEXT: usize = 512;
/// Largest value of a queue pair number, a packet sequence number and a frame's length: all have 24 bits.
pub(crate) const MAX_24_BITS: u32 = 0x00FF_FFFF;

/// Link layer code: no link, as in shared memory.
pub(crate) const LINK_NONE: u8 = 0;
/// Link layer code: InfiniBand (the value of `IBV_LINK_LAYER_INFINIBAND`).
pub(crate) const LINK_INFINIBAND: u8 = 1;
/// Link layer code: Ethernet (the value of `IBV_LINK_LAYER_ETHERNET`).
pub(crate) const LINK_ETHERNET: u8 = 2;

macro_rules! codes {
    ($(#[$meta:meta])* $name:ident: $code:ty {
        $($(#[$doc:meta])* $variant:ident = $value:literal, $text:literal;)*
    }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub(crate) enum $name { $($(#[$doc])* $variant,)* }

        impl $name {
            /// Every value, in the order of the codes.
            #[cfg(test)]
            pub(crate) const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// The number that stands for it on the wire.
            pub(crate) fn code(self) -> $code {
                match self { $(Self::$variant => $value,)* }
            }

            /// The value behind a number from the wire, if this version knows it.
            pub(crate) fn from_code(code: $code) -> Option<Self> {
                match code { $($value => Some(Self::$variant),)* _ => None }
            }

            /// Its name in error messages.
            pub(crate) fn name(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result { f.write_str(self.name()) }
        }
    };
}

codes! {
    /// Kinds of messages.
    Kind: u16 {
        /// Who the sender is and how its end of the data path is reached.
        Hello = 1, "hello";
        /// The sender's end of the data path is up: queue pair ready to send, or the two processes have met.
        Ready = 2, "ready";
        /// The region that the recipient may write to.
        Keys = 3, "keys";
        /// The geometry of the rings, to be compared.
        Channel = 4, "channel";
        /// The recipient's probe has arrived whole at the sender.
        Probed = 5, "probed";
        /// The sender's engine runs.
        Started = 6, "started";
        /// The sender's engine has stopped; it may start again.
        Stopped = 7, "stopped";
        /// The sender closes the session in good order.
        Goodbye = 8, "goodbye";
        /// The sender refuses, and why.
        Error = 9, "error";
        /// The sender is alive.
        Heartbeat = 10, "heartbeat";
        /// The sender has a pre-shared key; random bytes that the recipient's proof has to rest on.
        Challenge = 11, "challenge";
        /// The sender holds the key: the first message with a tag.
        Proof = 12, "proof";
    }
}

codes! {
    /// Which of the two parts a peer plays.
    Role: u8 {
        /// Kicks rounds and collects replies.
        Controller = 0, "controller";
        /// Answers.
        Coprocessor = 1, "coprocessor";
    }
}

codes! {
    /// Which data path a peer uses.
    DataPathCode: u8 {
        /// Memory that both processes map.
        SharedMemory = 1, "shared memory";
        /// RDMA over a reliable connection.
        Verbs = 2, "verbs";
    }
}

codes! {
    /// What the sender of a [`Geometry`] expects in the `check` word of frames that it receives.
    CheckKind: u8 {
        /// Its own session number: the path places a frame's last word last.
        SessionNumber = 0, "session number";
        /// CRC-32C over session number, trailer and payload.
        Crc32c = 1, "CRC-32C";
    }
}

impl Kind {
    /// Fewest bytes that a body of this kind has.
    pub(crate) fn body_length(self) -> usize {
        match self {
            Self::Hello => 100,
            Self::Keys => 20,
            Self::Channel => 20,
            Self::Challenge => 36,
            _ => 0,
        }
    }
}

/// How one end of a data path is reached. Which fields count depends on the data path; the others are 0.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Endpoint {
    /// [`LINK_NONE`], [`LINK_INFINIBAND`] or [`LINK_ETHERNET`]; none exactly if the path is shared memory.
    pub(crate) link_layer: u8,
    /// Path MTU as verbs number it: 1 to 5 for 256, 512, 1024, 2048 and 4096 bytes; 0 for shared memory.
    pub(crate) mtu: u8,
    /// Local identifier of the port; 0 on Ethernet.
    pub(crate) lid: u16,
    /// Number of the queue pair, 2 to [`MAX_24_BITS`]; 0 for shared memory.
    pub(crate) queue_pair: u32,
    /// First packet sequence number that this end sends, at most [`MAX_24_BITS`].
    pub(crate) psn: u32,
    /// Global identifier of the port, in network order as verbs hold it.
    pub(crate) gid: [u8; 16],
    /// 0 none or InfiniBand, 1 RoCE v1, 2 RoCE v2.
    pub(crate) gid_type: u8,
    /// Partition key.
    pub(crate) pkey: u16,
    /// What identifies the machine (its boot id, say): shared memory needs both peers on one.
    pub(crate) host: [u8; 16],
    /// Random name of the Unix socket at which shared memory is handed over.
    pub(crate) rendezvous: [u8; 16],
    /// What proves to the peer that keys may be sent to us; 0 without one. Never shown.
    pub(crate) token: [u8; 16],
}

impl Endpoint {
    /// Whether the token is the expected one, in a time that does not depend on where they differ.
    pub(crate) fn token_is(&self, expected: &[u8; 16]) -> bool {
        self.token.iter().zip(expected).fold(0, |differing, (a, b)| differing | (a ^ b)) == 0
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The token is a secret and this text goes into logs.
        f.debug_struct("Endpoint")
            .field("link_layer", &self.link_layer)
            .field("mtu", &self.mtu)
            .field("lid", &self.lid)
            .field("queue_pair", &self.queue_pair)
            .field("psn", &self.psn)
            .field("gid", &std::net::Ipv6Addr::from(self.gid))
            .field("gid_type", &self.gid_type)
            .field("pkey", &self.pkey)
            .field("host", &u128::from_be_bytes(self.host))
            .field("rendezvous", &u128::from_be_bytes(self.rendezvous))
            .finish_non_exhaustive()
    }
}

/// The first message of each side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hello {
    /// The sender's part.
    pub(crate) role: Role,
    /// The data path that the sender uses.
    pub(crate) data_path: DataPathCode,
    /// The sender's random session number, never 0: what the recipient puts into every frame and message to it.
    pub(crate) session: u32,
    /// The sender's end of the data path.
    pub(crate) endpoint: Endpoint,
    /// The channel that the sender means to establish: what a recipient that has no wish of its own may adopt.
    pub(crate) proposal: Proposal,
}

/// The shape of a channel as its sender wishes it; all 0 for no wish.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Proposal {
    /// Slots of a ring.
    pub(crate) depth: u32,
    /// Payload bytes that a request may have, at most [`MAX_24_BITS`].
    pub(crate) request_capacity: u32,
    /// Payload bytes that a reply may have, at most [`MAX_24_BITS`].
    pub(crate) reply_capacity: u32,
}

/// A region that the recipient may write to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Keys {
    /// Address of its first byte in the sender's address space; 0 for shared memory.
    pub(crate) address: u64,
    /// Its bytes, at least 1; `address + size` does not overflow.
    pub(crate) size: u64,
    /// Remote key; 0 for shared memory.
    pub(crate) rkey: u32,
}

/// The geometry of the rings. All but the check must be the same on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Geometry {
    /// Slots of a ring, at least 1.
    pub(crate) depth: u32,
    /// Payload bytes that a request may have, at most [`MAX_24_BITS`].
    pub(crate) request_capacity: u32,
    /// Payload bytes that a reply may have, at most [`MAX_24_BITS`].
    pub(crate) reply_capacity: u32,
    /// What the sender expects in frames that it receives.
    pub(crate) check_kind: CheckKind,
    /// Sequence number of the session's first frame.
    pub(crate) first_sequence: u32,
}

/// What a side with a pre-shared key begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Challenge {
    /// The sender's part.
    pub(crate) role: Role,
    /// Random, new for every connection.
    pub(crate) nonce: [u8; 32],
}

impl Challenge {
    /// The one way of authentication that there is: HMAC-SHA-256 with a pre-shared key, as [`super::seal`] has it.
    const SCHEME: u8 = 1;
}

/// A native message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Message {
    /// See [`Kind::Hello`].
    Hello(Hello),
    /// See [`Kind::Ready`].
    Ready,
    /// See [`Kind::Keys`].
    Keys(Keys),
    /// See [`Kind::Channel`].
    Channel(Geometry),
    /// See [`Kind::Probed`].
    Probed,
    /// See [`Kind::Started`].
    Started,
    /// See [`Kind::Stopped`].
    Stopped,
    /// See [`Kind::Goodbye`].
    Goodbye,
    /// See [`Kind::Error`]. The sender cuts the text to [`MAX_TEXT`] bytes; the recipient makes it fit for a log.
    Error(String),
    /// See [`Kind::Heartbeat`].
    Heartbeat,
    /// See [`Kind::Challenge`].
    Challenge(Challenge),
    /// See [`Kind::Proof`].
    Proof,
}

impl Message {
    /// Its kind.
    pub(crate) fn kind(&self) -> Kind {
        match self {
            Self::Hello(_) => Kind::Hello,
            Self::Ready => Kind::Ready,
            Self::Keys(_) => Kind::Keys,
            Self::Channel(_) => Kind::Channel,
            Self::Probed => Kind::Probed,
            Self::Started => Kind::Started,
            Self::Stopped => Kind::Stopped,
            Self::Goodbye => Kind::Goodbye,
            Self::Error(_) => Kind::Error,
            Self::Heartbeat => Kind::Heartbeat,
            Self::Challenge(_) => Kind::Challenge,
            Self::Proof => Kind::Proof,
        }
    }

    /// Its bytes, for the recipient with this session number (0 while the recipient's hello has not come).
    ///
    /// Values are written as they are; it is the recipient who checks them.
    pub(crate) fn encode(&self, session: u32) -> Vec<u8> {
        let body = self.body();
        let mut bytes = Vec::with_capacity(HEADER + body.len());
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.kind().code().to_le_bytes());
        bytes.extend((body.len() as u32).to_le_bytes());
        bytes.extend(session.to_le_bytes());
        bytes.extend(body);
        bytes
    }

    fn body(&self) -> Vec<u8> {
        let mut body = Vec::with_capacity(self.kind().body_length());
        match self {
            Self::Hello(hello) => {
                let end = &hello.endpoint;
                body.extend([hello.role.code(), hello.data_path.code(), 0, 0]);
                body.extend(hello.session.to_le_bytes());
                body.extend([end.link_layer, end.mtu]);
                body.extend(end.lid.to_le_bytes());
                body.extend(end.queue_pair.to_le_bytes());
                body.extend(end.psn.to_le_bytes());
                body.extend(end.gid);
                body.extend([end.gid_type, 0]);
                body.extend(end.pkey.to_le_bytes());
                body.extend(end.host);
                body.extend(end.rendezvous);
                body.extend(end.token);
                body.extend(hello.proposal.depth.to_le_bytes());
                body.extend(hello.proposal.request_capacity.to_le_bytes());
                body.extend(hello.proposal.reply_capacity.to_le_bytes());
            }
            Self::Keys(keys) => {
                body.extend(keys.address.to_le_bytes());
                body.extend(keys.size.to_le_bytes());
                body.extend(keys.rkey.to_le_bytes());
            }
            Self::Channel(geometry) => {
                body.extend(geometry.depth.to_le_bytes());
                body.extend(geometry.request_capacity.to_le_bytes());
                body.extend(geometry.reply_capacity.to_le_bytes());
                body.extend([geometry.check_kind.code(), 0, 0, 0]);
                body.extend(geometry.first_sequence.to_le_bytes());
            }
            Self::Error(text) => body.extend(cut(text).bytes()),
            Self::Challenge(challenge) => {
                body.extend([challenge.role.code(), Challenge::SCHEME, 0, 0]);
                body.extend(challenge.nonce);
            }
            Self::Ready
            | Self::Probed
            | Self::Started
            | Self::Stopped
            | Self::Goodbye
            | Self::Heartbeat
            | Self::Proof => {}
        }
        body
    }

    /// The message of this kind in a whole body. What the body has beyond this version is skipped.
    pub(super) fn from_body(kind: Kind, body: &[u8]) -> Result<Self, Problem> {
        let mut fields = Fields { kind, length: body.len(), rest: body };
        Ok(match kind {
            Kind::Hello => Self::Hello(hello(&mut fields)?),
            Kind::Ready => Self::Ready,
            Kind::Keys => Self::Keys(keys(&mut fields)?),
            Kind::Channel => Self::Channel(geometry(&mut fields)?),
            Kind::Probed => Self::Probed,
            Kind::Started => Self::Started,
            Kind::Stopped => Self::Stopped,
            Kind::Goodbye => Self::Goodbye,
            Kind::Error => Self::Error(printable(body)),
            Kind::Heartbeat => Self::Heartbeat,
            Kind::Challenge => Self::Challenge(challenge(&mut fields)?),
            Kind::Proof => Self::Proof,
        })
    }
}

fn hello(fields: &mut Fields<'_>) -> Result<Hello, Problem> {
    let role = role(fields)?;
    let path = fields.u8()?;
    let data_path = DataPathCode::from_code(path)
        .ok_or_else(|| fields.refuse("data path", path, "1 (shared memory) or 2 (verbs)"))?;
    let flags = fields.u16()?;
    fields.require(flags == 0, "flags", format_args!("{flags:#06x}"), "0, as this version knows none")?;
    let session = fields.u32()?;
    fields.require(session != 0, "session", session, "any number but 0")?;

    let (link_layer, mtu, lid) = (fields.u8()?, fields.u8()?, fields.u16()?);
    let (queue_pair, psn, gid) = (fields.u32()?, fields.u32()?, fields.take()?);
    let (gid_type, padding, pkey) = (fields.u8()?, fields.u8()?, fields.u16()?);
    match data_path {
        DataPathCode::SharedMemory => {
            fields.require(link_layer == LINK_NONE, "link layer", link_layer, "0 for shared memory")?;
            fields.require(mtu == 0, "mtu", mtu, "0 for shared memory")?;
            fields.require(queue_pair == 0, "queue pair", queue_pair, "0 for shared memory")?;
        }
        DataPathCode::Verbs => {
            let known = matches!(link_layer, LINK_INFINIBAND | LINK_ETHERNET);
            fields.require(known, "link layer", link_layer, "1 (InfiniBand) or 2 (Ethernet) for verbs")?;
            fields.require((1..=5).contains(&mtu), "mtu", mtu, "1 (256 bytes) to 5 (4096 bytes) for verbs")?;
            let fits = (2..=MAX_24_BITS).contains(&queue_pair);
            fields.require(fits, "queue pair", queue_pair, "2 to 0xffffff for verbs")?;
        }
    }
    fields.require(psn <= MAX_24_BITS, "psn", psn, "at most 0xffffff")?;
    fields.require(gid_type <= 2, "gid type", gid_type, "0 (none or InfiniBand), 1 (RoCE v1) or 2 (RoCE v2)")?;
    fields.require(padding == 0, "padding", padding, "0")?;
    let (host, rendezvous, token) = (fields.take()?, fields.take()?, fields.take()?);
    let endpoint = Endpoint { link_layer, mtu, lid, queue_pair, psn, gid, gid_type, pkey, host, rendezvous, token };
    let (depth, request_capacity, reply_capacity) = shape(fields)?;
    Ok(Hello { role, data_path, session, endpoint, proposal: Proposal { depth, request_capacity, reply_capacity } })
}

/// Depth and capacities.
fn shape(fields: &mut Fields<'_>) -> Result<(u32, u32, u32), Problem> {
    let (depth, request_capacity, reply_capacity) = (fields.u32()?, fields.u32()?, fields.u32()?);
    for (name, capacity) in [("request capacity", request_capacity), ("reply capacity", reply_capacity)] {
        fields.require(capacity <= MAX_24_BITS, name, capacity, "at most 16777215, as a frame's length has 24 bits")?;
    }
    Ok((depth, request_capacity, reply_capacity))
}

fn keys(fields: &mut Fields<'_>) -> Result<Keys, Problem> {
    let (address, size, rkey) = (fields.u64()?, fields.u64()?, fields.u32()?);
    let fits = size != 0 && address.checked_add(size).is_some();
    fields.require(fits, "size", size, format_args!("1 to {} at address {address:#x}", u64::MAX - address))?;
    Ok(Keys { address, size, rkey })
}

fn geometry(fields: &mut Fields<'_>) -> Result<Geometry, Problem> {
    let (depth, request_capacity, reply_capacity) = shape(fields)?;
    fields.require(depth != 0, "depth", depth, "at least 1")?;
    let check = fields.u8()?;
    let check_kind = CheckKind::from_code(check)
        .ok_or_else(|| fields.refuse("check kind", check, "0 (session number) or 1 (CRC-32C)"))?;
    let reserved: [u8; 3] = fields.take()?;
    fields.require(reserved == [0; 3], "reserved bytes", format_args!("{reserved:?}"), "0")?;
    Ok(Geometry { depth, request_capacity, reply_capacity, check_kind, first_sequence: fields.u32()? })
}

fn challenge(fields: &mut Fields<'_>) -> Result<Challenge, Problem> {
    let role = role(fields)?;
    let scheme = fields.u8()?;
    fields.require(scheme == Challenge::SCHEME, "scheme", scheme, "1 (HMAC-SHA-256 with a pre-shared key)")?;
    let reserved = fields.u16()?;
    fields.require(reserved == 0, "reserved bytes", format_args!("{reserved:#06x}"), "0")?;
    Ok(Challenge { role, nonce: fields.take()? })
}

fn role(fields: &mut Fields<'_>) -> Result<Role, Problem> {
    let role = fields.u8()?;
    Role::from_code(role).ok_or_else(|| fields.refuse("role", role, "0 (controller) or 1 (coprocessor)"))
}

/// As much of a text as an error message carries, whole characters only.
fn cut(text: &str) -> &str {
    let mut end = text.len().min(MAX_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// An error's text as it may go into a log: what could forge a line or turn one around is replaced.
pub(crate) fn printable(text: &[u8]) -> String {
    String::from_utf8_lossy(&text[..text.len().min(MAX_TEXT)])
        .chars()
        .map(|c| match c {
            '\u{200E}' | '\u{200F}' | '\u{2028}'..='\u{202E}' | '\u{2066}'..='\u{2069}' => '\u{FFFD}',
            c if c.is_control() => '\u{FFFD}',
            c => c,
        })
        .collect()
}

/// The fields of a body, taken one after the other.
struct Fields<'a> {
    kind: Kind,
    length: usize,
    rest: &'a [u8],
}

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Problem> {
        // The decoder has compared the length with what the kind needs; here it is only made impossible to panic.
        let short = Problem::Short { kind: self.kind, length: self.length, needed: self.kind.body_length() };
        let (field, rest) = self.rest.split_first_chunk().ok_or(short)?;
        self.rest = rest;
        Ok(*field)
    }

    fn u8(&mut self) -> Result<u8, Problem> {
        self.take().map(u8::from_le_bytes)
    }

    fn u16(&mut self) -> Result<u16, Problem> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, Problem> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, Problem> {
        self.take().map(u64::from_le_bytes)
    }

    fn refuse(&self, field: &'static str, found: impl fmt::Display, allowed: impl fmt::Display) -> Problem {
        Problem::Field { kind: self.kind, field, found: found.to_string(), allowed: allowed.to_string() }
    }

    fn require(
        &self,
        holds: bool,
        field: &'static str,
        found: impl fmt::Display,
        allowed: impl fmt::Display,
    ) -> Result<(), Problem> {
        if holds { Ok(()) } else { Err(self.refuse(field, found, allowed)) }
    }
}

#[cfg(test)]
mod tests;
