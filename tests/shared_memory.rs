//! The conformance suite over shared memory, both sides in one process.

#[path = "support/conformance.rs"]
mod conformance;

use catalyst_transport::{DataPathKind, SessionConfig};
use conformance::Setup;

fn setup() -> Setup {
    let config = SessionConfig::new().data_path(DataPathKind::SharedMemory);
    Setup { controller: config.clone(), coprocessor: config, host: "127.0.0.1", slowness: 1 }
}

conformance!(setup());
