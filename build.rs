//! Says plainly what a chosen feature misses on this system, before a dependency says it less plainly.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}
