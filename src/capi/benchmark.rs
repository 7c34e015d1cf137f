//! `start_benchmark`: rounds one after the other, each timed.

use std::time::Instant;

use super::failure::{Failure, say};
use super::handle::Handle;
use crate::session::TransportSession;

/// Flag: take the time around the whole round with the system's clock, rather than the session's own round-trip time.
const SOFTWARE_CLOCK: u32 = 2;
/// Flag: say on stderr how far it is.
const PROGRESS: u32 = 4;
/// Lines that say how far it is.
const PROGRESS_LINES: u32 = 10;

/// What to measure.
#[derive(Debug, Clone, Copy)]
pub(super) struct Benchmark {
    pub(super) rounds: u32,
    pub(super) decoder_id: u32,
    pub(super) flags: u32,
}

impl Handle {
    /// Runs rounds of work item 0, whose request is the number of the round, and gives each one's time in nanoseconds to
    /// `sample`. Returns with the first round that fails; `done` counts those that did not.
    pub(super) fn benchmark(
        &self,
        wanted: Benchmark,
        done: &mut u64,
        mut sample: impl FnMut(usize, u64),
    ) -> Result<(), Failure> {
        self.with(|core| {
            core.require_established("start_benchmark")?;
            let Some(bytes) = core.items.get(&0).copied() else {
                core.session.controller("start_benchmark")?;
                return Err(Failure::new("work item 0 has no sizes: call set_message_sizes(session, 0, ...) first"));
            };
            let session = core.session.controller("start_benchmark")?;
            if session.in_flight() != 0 {
                return Err(Failure::new(format!(
                    "{} rounds are in flight, whose replies would be taken for the benchmark's: collect them first",
                    session.in_flight()
                )));
            }
            let mut request = vec![0; bytes];
            let number = bytes.min(8);
            let every = (wanted.rounds / PROGRESS_LINES).max(1);
            for round in 0..wanted.rounds {
                request[..number].copy_from_slice(&u64::from(round).to_le_bytes()[..number]);
                let began = Instant::now();
                session.write_data_slot(&request, wanted.decoder_id)?;
                session.kick(0)?;
                session.collect_reply()?;
                let nanoseconds = match wanted.flags & SOFTWARE_CLOCK {
                    0 => session.last_rtt_ns(),
                    _ => began.elapsed().as_nanos() as u64,
                };
                sample(round as usize, nanoseconds);
                *done += 1;
                if wanted.flags & PROGRESS != 0 && ((round + 1).is_multiple_of(every) || round + 1 == wanted.rounds) {
                    say("start_benchmark", &format!("{} of {} rounds", round + 1, wanted.rounds));
                }
                if self.interrupted() {
                    return Err(Failure::new("it was ended by a stop or destroy in another thread"));
                }
            }
            self.record_rtt(session.last_rtt_ns());
            Ok(())
        })
    }
}
