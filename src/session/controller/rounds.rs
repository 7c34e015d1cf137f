//! What a round touches, apart from the states and errors that outlast it.

use super::super::ChannelDesc;
use super::super::link::Movement;
use crate::data_path::DataPath;
use crate::engine::clock::{self, Stamp};
use crate::engine::serve::{function_failed, too_long};
use crate::engine::spin::Spinner;
use crate::error::{Result, TransportError};
use crate::ring::{FrameReader, FrameWriter, Polled, Trailer};

/// Sizes of a work item.
#[derive(Debug, Clone, Copy)]
pub(super) struct WorkItem {
    pub(super) request_bytes: usize,
}

/// Everything that a round touches.
#[derive(Debug)]
pub(super) struct Rounds {
    pub(super) path: DataPath,
    pub(super) reader: FrameReader,
    pub(super) writer: FrameWriter,
    /// Replies before this number are dropped: their rounds were given up.
    pub(super) given_up_before: u32,
    /// When each round in flight was kicked.
    pub(super) kicked: Box<[Stamp]>,
    /// Payload and decoder id of the next kick.
    pub(super) staged: Staged,
    /// What `data_slot` gives out.
    pub(super) slot: Vec<u8>,
    /// The reply collected last.
    pub(super) reply: Vec<u8>,
    pub(super) reply_length: usize,
    /// A reply that was too large for its buffers, to be collected again.
    pub(super) kept: Option<Trailer>,
    pub(super) last_rtt: u64,
    pub(super) late: u64,
    pub(super) spinner: Option<Spinner>,
    pub(super) failure: Option<TransportError>,
}

/// Where the payload of the next kick is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Staged {
    Nothing,
    /// In the ring's slot, with so many bytes.
    InRing {
        bytes: usize,
        decoder_id: u32,
    },
    /// In the buffer of `data_slot`.
    InSlot,
}

impl Rounds {
    pub(super) fn new(movement: Movement, desc: &ChannelDesc) -> Self {
        let Movement { path, reader, writer } = movement;
        Self {
            path,
            given_up_before: reader.expected(),
            reader,
            writer,
            kicked: vec![0; desc.depth as usize].into(),
            staged: Staged::Nothing,
            slot: vec![0; desc.request_capacity],
            reply: vec![0; desc.reply_capacity],
            reply_length: 0,
            kept: None,
            last_rtt: 0,
            late: 0,
            spinner: None,
            failure: None,
        }
    }

    /// Sequence number of the oldest round that is waited for.
    #[inline]
    pub(super) fn oldest(&self) -> u32 {
        let expected = self.reader.expected();
        // Both lie within one ring of each other, so the difference tells which is later even across the wrap.
        if self.given_up_before.wrapping_sub(expected) as i32 > 0 { self.given_up_before } else { expected }
    }

    #[inline]
    pub(super) fn in_flight(&self) -> u32 {
        self.writer.sequence().wrapping_sub(self.oldest())
    }

    /// A slot is free when the reply to its last request has been seen, given up or not.
    #[inline]
    pub(super) fn check_window(&mut self) -> Result<()> {
        let depth = self.reader.geometry().depth;
        if self.unanswered() < depth {
            return Ok(());
        }
        // The replies of rounds that were given up may have come since.
        self.drop_late()?;
        match self.unanswered() {
            in_flight if in_flight >= depth => Err(TransportError::WindowFull { in_flight, depth }),
            _ => Ok(()),
        }
    }

    #[inline]
    pub(super) fn unanswered(&self) -> u32 {
        self.writer.sequence().wrapping_sub(self.reader.expected())
    }

    /// Drops the replies of rounds that were given up, as far as they have come. A reply that is kept belongs to the oldest
    /// round and is not touched.
    pub(super) fn drop_late(&mut self) -> Result<()> {
        while self.reader.expected() != self.oldest() {
            match self.reader.poll(&mut self.reply) {
                Polled::Frame(_) => {
                    self.reply_length = 0;
                    self.reader.advance();
                    self.late += 1;
                }
                Polled::TooLong(trailer) => return Err(too_long(&trailer, self.reader.geometry())),
                Polled::Empty | Polled::Unverified => break,
            }
        }
        Ok(())
    }

    /// Copies the payload of the next kick to where it will be sent from.
    #[inline]
    pub(super) fn stage(&mut self, payload: &[u8], decoder_id: u32) -> Result<()> {
        let (memory, frame_end) = self.path.slot(self.writer.sequence())?;
        self.writer.stage(memory, frame_end, payload);
        self.staged = Staged::InRing { bytes: payload.len(), decoder_id };
        Ok(())
    }

    #[inline]
    pub(super) fn kick(&mut self, item: WorkItem, index: u32) -> Result<u32> {
        let sequence = self.writer.sequence();
        let (memory, frame_end) = self.path.slot(sequence)?;
        let decoder_id = match self.staged {
            Staged::InRing { bytes, decoder_id } if bytes <= item.request_bytes => decoder_id,
            Staged::InRing { bytes, .. } => {
                return Err(TransportError::invalid(
                    format!("work item {index}"),
                    format!("carries {} bytes and {bytes} were written", item.request_bytes),
                ));
            }
            Staged::InSlot => {
                self.writer.stage(memory, frame_end, &self.slot[..item.request_bytes]);
                0
            }
            Staged::Nothing if item.request_bytes == 0 => {
                self.writer.clear();
                0
            }
            Staged::Nothing => {
                return Err(TransportError::invalid(
                    format!("work item {index}"),
                    "nothing has been written for this round: call write_data_slot or data_slot before each kick",
                ));
            }
        };
        let bytes = self.writer.publish(memory, frame_end, 0, decoder_id);
        self.staged = Staged::Nothing;
        // On shared memory the request is on its way from here on, on verbs from the post that follows.
        let slot = sequence as usize & (self.kicked.len() - 1);
        self.kicked[slot] = clock::now();
        self.path.send(sequence, bytes)?;
        Ok(sequence)
    }

    /// Looks for the reply of the oldest round, dropping those of rounds that were given up.
    #[inline]
    pub(super) fn poll(&mut self) -> Result<Option<Trailer>> {
        if self.reader.expected() != self.oldest() {
            self.drop_late()?;
            if self.reader.expected() != self.oldest() {
                return Ok(None);
            }
        }
        match self.reader.poll(&mut self.reply) {
            Polled::Frame(trailer) => {
                let slot = trailer.sequence as usize & (self.kicked.len() - 1);
                self.last_rtt = clock::since(self.kicked[slot], clock::now());
                // The buffer no longer holds the reply before.
                self.reply_length = 0;
                Ok(Some(trailer))
            }
            Polled::Empty => Ok(None),
            Polled::Unverified => {
                self.reply_length = 0;
                Ok(None)
            }
            Polled::TooLong(trailer) => Err(too_long(&trailer, self.reader.geometry())),
        }
    }

    /// Ends the round of a reply that is in the buffer.
    #[inline]
    pub(super) fn take(&mut self, trailer: Trailer) -> Result<()> {
        self.kept = None;
        self.reader.advance();
        if trailer.status != 0 {
            self.reply_length = 0;
            return Err(function_failed(&trailer, &self.reply[..trailer.length as usize]));
        }
        self.reply_length = trailer.length as usize;
        Ok(())
    }

    pub(super) fn give_up_oldest(&mut self) {
        self.given_up_before = self.oldest().wrapping_add(1);
    }
}
