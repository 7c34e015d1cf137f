//! Tests that need a device.

use std::io::Write;

/// The device to test on. Without one the test is skipped, with its reason, or fails where a device is required.
pub(crate) fn device_or_skip(test: &str) -> Option<String> {
    if let Ok(device) = std::env::var("CATALYST_TRANSPORT_DEVICE") {
        return Some(device);
    }
    let required = std::env::var_os("CATALYST_TRANSPORT_REQUIRE_DEVICE").is_some();
    assert!(!required, "CATALYST_TRANSPORT_DEVICE names no device, and one is required here");
    println!("skipped: CATALYST_TRANSPORT_DEVICE names no device");
    if let Some(log) = std::env::var_os("CATALYST_TRANSPORT_SKIP_LOG") {
        let mut log = std::fs::File::options().append(true).create(true).open(log).unwrap();
        writeln!(log, "{test}: CATALYST_TRANSPORT_DEVICE names no device").unwrap();
    }
    None
}
