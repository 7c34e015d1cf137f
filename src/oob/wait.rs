//! Waiting for descriptors until a deadline.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, Timespec, poll};
use rustix::io::Errno;

/// One `poll` waits at most this long; a later deadline is reached in several. It keeps any deadline, however far
/// away, within what a `timespec` holds.
const LONGEST: Duration = Duration::from_secs(3600);

/// Waits until one of the descriptors is ready, and says whether one is; `false` means that the deadline has passed.
///
/// Without a deadline it waits for ever. Signals do not end it. A deadline in the past makes it a mere look.
///
/// # Errors
///
/// What `poll` fails with: `EINVAL` for more descriptors than the process may open, `ENOMEM`.
pub(super) fn wait(descriptors: &mut [PollFd<'_>], deadline: Option<Instant>) -> Result<bool, Errno> {
    loop {
        let left = deadline.map_or(LONGEST, |deadline| deadline.saturating_duration_since(Instant::now()).min(LONGEST));
        let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match poll(descriptors, Some(&timeout)) {
            Ok(0) if deadline.is_none_or(|deadline| Instant::now() < deadline) => {}
            Ok(ready) => return Ok(ready > 0),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use rustix::event::PollFlags;

    use super::*;
    use crate::oob::test_support::watchdog;

    #[test]
    fn ends_at_the_deadline_or_when_ready() {
        watchdog(|| {
            let (reader, mut writer) = std::io::pipe().unwrap();
            let deadline = Instant::now() + Duration::from_millis(30);
            assert_eq!(wait(&mut [PollFd::new(&reader, PollFlags::IN)], Some(deadline)), Ok(false));
            assert!(Instant::now() >= deadline);
            writer.write_all(b"x").unwrap();
            assert_eq!(wait(&mut [PollFd::new(&reader, PollFlags::IN)], Some(deadline)), Ok(true));
            assert_eq!(wait(&mut [PollFd::new(&reader, PollFlags::IN)], None), Ok(true));
        });
    }
}
