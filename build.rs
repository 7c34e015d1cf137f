//! Says plainly what a chosen feature misses on this system, before a dependency says it less plainly; and names the C
//! library.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Threads of the library may outlive whoever closes it, so it is never unloaded.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcatalyst_transport.so");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    if std::env::var_os("CARGO_FEATURE_CAPI").is_some() && std::env::var_os("CARGO_CFG_DOCSRS").is_none() {
        check_cxx_library();
    }
}

/// The plugin's errors are C++ exceptions, so the C++ standard library is linked.
fn check_cxx_library() {
    // Where the linker of another target looks is not known here.
    if std::env::var("TARGET") != std::env::var("HOST") {
        return;
    }
    let Ok(output) = Command::new("cc").arg("-print-file-name=libstdc++.so").output() else { return };
    // The compiler repeats the bare name when it does not find the file.
    let found = String::from_utf8_lossy(&output.stdout);
    if !Path::new(found.trim()).is_absolute() {
        println!(
            "cargo::error=the feature 'capi' links libstdc++, and 'cc' does not find libstdc++.so: install the C++ compiler \
             (Debian: apt-get install g++)"
        );
    }
}
