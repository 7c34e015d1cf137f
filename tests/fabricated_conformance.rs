//! The conformance suite over the software device, both sides in one process: verbs without a device at hand.
#![cfg(feature = "fabricated")]

#[path = "support/conformance.rs"]
mod conformance;

use std::sync::OnceLock;

use catalyst_transport::fabricated::{Installed, Placement, Plan};
use catalyst_transport::{DataPathKind, SessionConfig};
use conformance::Setup;

/// Two devices, of which the coprocessor's places bytes in a random order and inlines nothing.
fn setup() -> Setup {
    static DEVICES: OnceLock<[Installed; 2]> = OnceLock::new();
    DEVICES.get_or_init(|| {
        let other = Plan::new("conform-b").placement(Placement::Random).grant_inline(0);
        [Plan::new("conform-a").install(), other.install()]
    });
    let config = |device: &str| {
        SessionConfig::new()
            .data_path(DataPathKind::Verbs)
            .fabricated(true)
            .device(device)
            .reply_timeout(std::time::Duration::from_secs(5))
    };
    Setup { controller: config("conform-a"), coprocessor: config("conform-b"), host: "127.0.0.1", slowness: 20 }
}

conformance!(setup());

/// The same, with the controller's rounds on a thread of their own.
mod engine_thread {
    use catalyst_transport::EngineMode;

    use super::conformance::Setup;

    fn setup() -> Setup {
        super::setup().both(|config| config.engine_mode(EngineMode::Thread))
    }

    crate::conformance!(setup());
}
