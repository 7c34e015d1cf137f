//! Bytes in, messages out.
//!
//! A decoder does no I/O of its own and allocates nothing while it decodes but an error's text: its buffer holds
//! the longest message that there can be, so that no peer decides how much memory it costs. What it finds depends
//! on the bytes alone, never on how they were cut up on their way.

use std::io::{self, Read};

use super::catalyst_message;
use super::message::{HEADER, Kind, MAGIC, MAX_BODY, Message, VERSION};
use super::seal::{Seal, TAG};

/// What is wrong with a message. Each says what was found and what was expected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Problem {
    /// The first bytes are not [`MAGIC`]: it is a stranger, or the stream has lost its step.
    #[error("a message begins with \"{}\" where \"{}\" was expected: this is no catalyst-transport peer in native mode",
        found.escape_ascii(), MAGIC.escape_ascii())]
    Magic {
        /// The bytes there.
        found: [u8; 4],
    },
    /// The first bytes are a whole message of the Catalyst wire format.
    #[error(
        "the peer speaks the Catalyst wire format, and this side the native one: use wire=catalyst on both sides, or \
         wire=native"
    )]
    Catalyst,
    /// A version other than [`VERSION`].
    #[error(
        "protocol version {found} was received and version {VERSION} is spoken here: use the same release on both sides"
    )]
    Version {
        /// The version received.
        found: u16,
    },
    /// A kind that version 1 does not know.
    #[error("message kind {found} was received and version {VERSION} knows kinds {} to {}",
        Kind::Hello.code(), Kind::Proof.code())]
    Kind {
        /// The kind received.
        found: u16,
    },
    /// A body longer than [`MAX_BODY`].
    #[error("a {kind} message announces a body of {length} bytes and {MAX_BODY} are the most")]
    Long {
        /// Its kind.
        kind: Kind,
        /// Bytes announced.
        length: u32,
    },
    /// A body shorter than its kind's fields.
    #[error("a {kind} message has a body of {length} bytes and needs {needed}")]
    Short {
        /// Its kind.
        kind: Kind,
        /// Bytes announced.
        length: usize,
        /// Bytes that its fields take.
        needed: usize,
    },
    /// A field with a value that is not allowed.
    #[error("{field} is {found} in a {kind} message and must be {allowed}")]
    Field {
        /// Kind of the message.
        kind: Kind,
        /// Name of the field.
        field: &'static str,
        /// The value received.
        found: String,
        /// The values allowed.
        allowed: String,
    },
    /// A proof whose tag is wrong.
    #[error(
        "the proof is wrong: the pre-shared keys of the two sides differ, so give both the same one (psk_file, psk_env)"
    )]
    Key,
    /// Another message whose tag is wrong, after a proof that was right.
    #[error(
        "the tag of a {kind} message is wrong: somebody between the two sides has changed, added or left out a message"
    )]
    Forged {
        /// Kind of the message.
        kind: Kind,
    },
}

impl Problem {
    /// Whether the bytes come from something that does not speak this protocol at all.
    pub(crate) fn is_stranger(&self) -> bool {
        matches!(self, Self::Magic { .. } | Self::Catalyst)
    }
}

/// A header whose every field is one that this version can use.
struct Header {
    kind: Kind,
    length: usize,
    session: u32,
}

/// Cuts a stream of bytes into messages.
///
/// After a [`Problem`] it stays with it: where one message is broken, nobody knows where the next begins.
pub(crate) struct Decoder {
    buffer: [u8; HEADER + MAX_BODY],
    filled: usize,
    /// A message has been found: the peer speaks this protocol.
    begun: bool,
    problem: Option<Problem>,
    /// Where a pre-shared key is set: what tells genuine messages.
    seal: Option<Seal>,
}

impl Decoder {
    /// An empty decoder.
    pub(crate) fn new() -> Self {
        Self { buffer: [0; HEADER + MAX_BODY], filled: 0, begun: false, problem: None, seal: None }
    }

    /// From here on messages are taken, and are to be sent, as the pre-shared key demands it. To be called before the first.
    pub(crate) fn set_seal(&mut self, seal: Seal) {
        self.seal = Some(seal);
    }

    /// For what is sent over the same connection.
    pub(crate) fn seal(&mut self) -> Option<&mut Seal> {
        self.seal.as_mut()
    }

    /// Reads once from a source, as much as there is room for, and says how many bytes came; 0 is the end of it.
    ///
    /// Call it only after [`next`](Self::next) has returned `Ok(None)`: with no room left it would read 0 as well.
    ///
    /// # Errors
    ///
    /// What the source's `read` fails with.
    pub(crate) fn fill(&mut self, source: &mut impl Read) -> io::Result<usize> {
        let read = source.read(&mut self.buffer[self.filled..])?;
        self.filled += read;
        Ok(read)
    }

    /// The next whole message and the session number in its header; `None` if its bytes are not all there yet.
    ///
    /// # Errors
    ///
    /// A [`Problem`], as early as the bytes show it, and the same again on every later call.
    pub(crate) fn next(&mut self) -> Result<Option<(u32, Message)>, Problem> {
        if let Some(problem) = &self.problem {
            return Err(problem.clone());
        }
        let next = self.decode();
        if let Err(problem) = &next {
            self.problem = Some(problem.clone());
        }
        next
    }

    /// Whether the peer has begun to speak this protocol, as far as its bytes show.
    pub(crate) fn has_begun(&self) -> bool {
        self.begun || self.filled >= MAGIC.len()
    }

    /// How many bytes of the message at hand are there, and how many it takes as far as can be told.
    pub(crate) fn progress(&self) -> (usize, usize) {
        let needed = match self.header() {
            Ok(Some(header)) => HEADER + header.length,
            // Still without a verdict: it may become a Catalyst message.
            _ if self.filled >= HEADER => catalyst_message::LENGTH,
            _ => HEADER,
        };
        (self.filled, needed)
    }

    fn decode(&mut self) -> Result<Option<(u32, Message)>, Problem> {
        let Some(Header { kind, length, session }) = self.header()? else { return Ok(None) };
        let whole = HEADER + length;
        if self.filled < whole {
            return Ok(None);
        }
        let mut end = whole;
        if let Some(seal) = &mut self.seal {
            if seal.covers(kind) {
                end -= TAG;
            }
            if !seal.open(kind, &self.buffer[..whole]) {
                return Err(if kind == Kind::Proof { Problem::Key } else { Problem::Forged { kind } });
            }
        }
        let message = Message::from_body(kind, &self.buffer[HEADER..end])?;
        self.buffer.copy_within(whole..self.filled, 0);
        self.filled -= whole;
        self.begun = true;
        Ok(Some((session, message)))
    }

    /// The header, if its bytes are there. Magic and version are judged before the rest has come: they are what
    /// later versions keep.
    fn header(&self) -> Result<Option<Header>, Problem> {
        let bytes = &self.buffer[..self.filled];
        let Some((&magic, rest)) = bytes.split_first_chunk() else { return Ok(None) };
        if magic != MAGIC {
            if !self.begun {
                match catalyst_message::recognise(bytes) {
                    // A Catalyst message has no magic: its fields are looked at once all of them are there.
                    None => return Ok(None),
                    Some(true) => return Err(Problem::Catalyst),
                    Some(false) => {}
                }
            }
            return Err(Problem::Magic { found: magic });
        }
        let Some((&version, rest)) = rest.split_first_chunk() else { return Ok(None) };
        let version = u16::from_le_bytes(version);
        if version != VERSION {
            return Err(Problem::Version { found: version });
        }
        let Some((&code, rest)) = rest.split_first_chunk() else { return Ok(None) };
        let code = u16::from_le_bytes(code);
        let kind = Kind::from_code(code).ok_or(Problem::Kind { found: code })?;
        let Some((&length, rest)) = rest.split_first_chunk() else { return Ok(None) };
        let length = u32::from_le_bytes(length);
        if length > MAX_BODY as u32 {
            return Err(Problem::Long { kind, length });
        }
        let sealed = self.seal.as_ref().is_some_and(|seal| seal.covers(kind));
        let (length, needed) = (length as usize, kind.body_length() + if sealed { TAG } else { 0 });
        if length < needed {
            return Err(Problem::Short { kind, length, needed });
        }
        let Some((&session, _)) = rest.split_first_chunk() else { return Ok(None) };
        Ok(Some(Header { kind, length, session: u32::from_le_bytes(session) }))
    }
}

#[cfg(test)]
mod tests;
