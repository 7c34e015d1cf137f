//! What comes of a peer that does not keep to its window, and of a request that is damaged.

use super::*;
use crate::oob::test_support::watchdog;

/// The ring of requests, as a controller writes it, and both ends of a worker's hand-off ring.
struct Rig {
    memory: SharedBytes,
    requests: FrameWriter,
    worker: WorkerRings,
    engine: HandOffReader,
}

const SESSION: u32 = 9;
const PATIENCE: Duration = Duration::from_millis(100);

fn rig(depth: u32, first: u32) -> Rig {
    let geometry = Geometry::new(depth, 8);
    let memory = SharedBytes::anonymous(geometry.region_bytes()).unwrap();
    let reader = FrameReader::new(memory.clone(), geometry, Check::Session(SESSION), first);
    reader.prepare();
    let requests = FrameWriter::new(geometry, Check::Session(SESSION), first);
    let (worker, engine) = rings(&reader, 8, first, PATIENCE, Arc::default(), Arc::new(Peer::new())).unwrap();
    Rig { memory, requests, worker, engine }
}

impl Rig {
    /// Sends a request, whether there is room for it or not.
    fn request(&mut self, payload: &[u8]) {
        let end = self.worker.requests.geometry().slot_end(self.requests.sequence());
        self.requests.stage(&self.memory, end, payload);
        self.requests.publish(&self.memory, end, 0, 0);
    }

    /// Lets the worker take a request and answer it with its own bytes.
    fn work(&mut self) -> Option<u32> {
        let mut payload = [0; 8];
        let taken = self.worker.take(&mut payload).unwrap()?;
        self.worker.reply(taken.decoder_id, &payload[..taken.length]).unwrap();
        Some(taken.sequence)
    }

    /// What the engine finds in the hand-off ring.
    fn reply(&mut self) -> Option<(u32, Vec<u8>)> {
        let mut reply = [0; 8];
        let trailer = self.engine.take(&mut reply)?;
        Some((trailer.sequence, reply[..trailer.length as usize].to_vec()))
    }
}

#[test]
fn no_reply_is_overwritten_before_the_engine_has_it() {
    watchdog(|| {
        for (depth, first) in [(1, 1), (1, u32::MAX), (4, 1), (4, u32::MAX - 2), (4, 0)] {
            let mut rig = rig(depth, first);
            let number = |index: u32| first.wrapping_add(index);
            // The window is full of answered requests, and the engine has sent none of the replies.
            for index in 0..depth {
                rig.request(&[index as u8]);
                assert_eq!(rig.work(), Some(number(index)));
            }
            // A peer that does not keep to it sends more.
            for index in depth..depth + 20 {
                rig.request(&[index as u8]);
                assert_eq!(rig.work(), None, "depth {depth}: request {index} was taken over the engine's head");
                // With each reply that the engine takes there is room for one.
                let oldest = index - depth;
                assert_eq!(rig.reply(), Some((number(oldest), vec![oldest as u8])));
                assert_eq!(rig.work(), Some(number(index)));
            }
            for index in 20..20 + depth {
                assert_eq!(rig.reply(), Some((number(index), vec![index as u8])));
            }
            assert_eq!((rig.work(), rig.reply()), (None, None));
        }
    });
}

#[test]
fn a_damaged_request_is_given_up_after_the_patience() {
    watchdog(|| {
        let mut rig = rig(4, 1);
        rig.request(&[1]);
        assert_eq!(rig.work(), Some(1));
        // The right number at the right place, in a stranger's name.
        let mut stranger = FrameWriter::new(Geometry::new(4, 8), Check::Session(SESSION + 1), 2);
        let end = Geometry::new(4, 8).slot_end(2);
        stranger.publish(&rig.memory, end, 0, 0);
        let began = Instant::now();
        let error = loop {
            match rig.worker.take(&mut [0; 8]) {
                Ok(None) => std::thread::sleep(Duration::from_millis(1)),
                Ok(taken) => panic!("{taken:?}"),
                Err(error) => break error,
            }
        };
        let waited = began.elapsed();
        assert!((PATIENCE..PATIENCE + Duration::from_secs(5)).contains(&waited), "{waited:?}");
        assert!(matches!(error, TransportError::Protocol { .. }), "{error}");
        assert!(error.to_string().contains("request 2 was announced"), "{error}");
        // The true one is taken after all.
        rig.request(&[2]);
        assert_eq!(rig.work(), Some(2));
    });
}
