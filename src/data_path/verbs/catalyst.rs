//! The two queue pairs of the Catalyst wire. *Forward* carries the requests and *backward* the replies; each side sends on
//! one of them and receives on the other.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::completion::CompletionQueue;
use super::device::Route;
use super::ffi;
use super::memory::ProtectionDomain;
use super::queue_pair::{QueuePair, Retry};
use super::{INLINE_BYTES, Verbs};
use crate::error::{Result, TransportError};
use crate::oob::{Endpoint, PairEnd};

/// A queue pair in INIT that only receives. It needs one request, for the marker that closing posts.
pub(super) fn receiving_pair(
    domain: &Arc<ProtectionDomain>,
    completions: &CompletionQueue,
    route: &Route,
) -> Result<QueuePair> {
    if route.link_layer != ffi::LINK_LAYER_ETHERNET {
        return Err(TransportError::Unsupported {
            what: "the Catalyst wire format on InfiniBand".into(),
            reason: "its message has no room for a LID: use a RoCE port, or the native wire".into(),
        });
    }
    let mut pair = QueuePair::create(domain, completions, 1, 0)?;
    pair.enter_init(route)?;
    Ok(pair)
}

impl Verbs {
    /// This side's ends of the pair that it sends on and of the pair that it receives on, and its port's MTU.
    pub(crate) fn pair_ends(&self) -> (PairEnd, PairEnd, u8) {
        let receiving = self.receiving.as_ref().expect("made by open for the Catalyst wire");
        let end = |pair: &QueuePair| PairEnd { queue_pair: pair.number(), psn: self.psn, gid: self.route.gid };
        (end(&self.queue_pair), end(receiving), self.route.mtu)
    }

    /// INIT → RTR → RTS of both towards the peer's ends of the same pairs.
    pub(crate) fn join_pairs(
        &mut self,
        sending: &PairEnd,
        receiving: &PairEnd,
        mtu: u8,
        peer_name: &str,
    ) -> Result<()> {
        self.peer = format!(
            "{peer_name} queue pair {} GID {}",
            sending.queue_pair,
            std::net::Ipv6Addr::from(sending.gid).to_canonical()
        );
        let retry = Retry::within(self.bound);
        let own = self.receiving.as_mut().expect("made by open for the Catalyst wire");
        // The one that receives first: the peer may begin as soon as it has our message.
        for (pair, end) in [(own, receiving), (&mut self.queue_pair, sending)] {
            let PairEnd { queue_pair, psn, gid } = *end;
            let peer = Endpoint { mtu, queue_pair, psn, gid, ..Endpoint::default() };
            pair.enter_ready_to_receive(&self.route, &peer, &self.peer)?;
            pair.enter_ready_to_send(self.psn, retry, &self.peer)?;
        }
        Ok(())
    }

    /// Puts new pairs in INIT in the place of those whose numbers a peer has been told that is not served: what it may
    /// send to them reaches nobody.
    pub(crate) fn renew_pairs(&mut self) -> Result<()> {
        let depth = self.queue_pair.send_depth;
        self.receiving = Some(receiving_pair(&self.domain, &self.completions, &self.route)?);
        self.queue_pair = QueuePair::create(&self.domain, &self.completions, depth, INLINE_BYTES)?;
        self.queue_pair.enter_init(&self.route)
    }

    /// Gives the last writes their time to arrive. Only one in 64 is signalled, and an empty write behind them, as the
    /// native wire posts it to learn of their completion, might be taken for a frame by a peer in hardware.
    pub(super) fn linger(&mut self, deadline: Instant) -> Result<()> {
        while self.completed < self.posted && Instant::now() < deadline {
            self.progress()?;
            std::thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    }
}
