//! Says plainly what a chosen feature misses on this system, before a dependency says it less plainly; and names the C library.
//!
//! The binding of the feature `rdma`, `rdma-sys`,
//! needs the headers of libibverbs and librdmacm, and a libclang that its old bindgen understands (up to 15).

use std::path::{Path, PathBuf};
use std::process::Command;

/// The newest libclang that works: from 16 on the binding's structures come out empty.
const NEWEST_LIBCLANG: u32 = 15;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Threads of the library may outlive whoever closes it, so it is never unloaded.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcatalyst_transport.so");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    let documentation = std::env::var_os("DOCS_RS").is_some();
    if std::env::var_os("CARGO_FEATURE_CAPI").is_some() && !documentation {
        check_cxx_library();
    }
    for variable in ["LIBCLANG_PATH", "PKG_CONFIG_PATH"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    // Documentation is built where no library can be installed.
    if std::env::var_os("CARGO_FEATURE_RDMA").is_none() || documentation {
        return;
    }
    let missing: Vec<_> = ["libibverbs", "librdmacm"].into_iter().filter(|library| !has_headers(library)).collect();
    if !missing.is_empty() {
        println!(
            "cargo::error=the feature 'rdma' needs the headers of {}: install them (Debian and Ubuntu: apt install \
             libibverbs-dev librdmacm-dev pkg-config), or build with --no-default-features for shared memory alone",
            missing.join(" and ")
        );
    }
    if std::env::var_os("LIBCLANG_PATH").is_none() {
        let found = libclang_versions();
        if !found.iter().any(|version| *version <= NEWEST_LIBCLANG) && !found.is_empty() {
            println!(
                "cargo::warning=rdma-sys fails with libclang 16 and later, and only {found:?} is here: install libclang-14-dev or \
                 -15-dev, or the PyPI package libclang==14.0.6, and point LIBCLANG_PATH to the folder of its libclang.so"
            );
        }
    }
}

/// Whether pkg-config knows the library. Without pkg-config itself nothing is known, and the binding's own error has to do.
fn has_headers(library: &str) -> bool {
    Command::new("pkg-config").args(["--exists", library]).status().is_ok_and(|status| status.success())
}

/// Major versions of libclang in the folders where distributions put them.
fn libclang_versions() -> Vec<u32> {
    let folders = std::fs::read_dir("/usr/lib").into_iter().flatten().flatten();
    folders
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let version = name.strip_prefix("llvm-")?.parse().ok()?;
            has_libclang(&entry.path().join("lib")).then_some(version)
        })
        .collect()
}

fn has_libclang(folder: &Path) -> bool {
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
    files.map(|entry| entry.path()).any(|path: PathBuf| {
        path.file_name()
            .and_then(|name| name.to_str())
            .is_some_and(|name| name.starts_with("libclang") && name.contains(".so"))
    })
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
