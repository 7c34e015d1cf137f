//! The C interface and the C++ plugin, from C and C++: the programs in tests/capi are compiled here, against the library
//! that Cargo has built beside this test, and run as they are and under valgrind (without it, under the compiler's
//! sanitizers).

#[path = "support/c_programs.rs"]
mod c_programs;

use std::path::Path;
use std::process::Command;

use c_programs::{LIBRARY, MANIFEST, Program, folder, library_folder, run};

/// Every function, every error return: `walk.c` says what it checks.
fn walk(watched: bool) {
    let folder = folder("walk");
    let program = Program::compile("cc", "-std=gnu11", "walk.c", folder.path(), watched);
    let said = run(&mut program.command());
    assert!(said.starts_with("walked: "), "{said}");
}

/// Tests that listen on fixed ports, or measure, one after the other.
static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());

fn alone() -> std::sync::MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[test]
fn the_whole_interface_from_c() {
    let _alone = alone();
    walk(false);
}

#[test]
fn the_whole_interface_from_c_watched() {
    let _alone = alone();
    walk(true);
}

/// Part of the walk too; here by itself for its name: samples are at least as long as the delay of the function, together
/// no longer than the whole run, and without the delay shorter.
#[test]
fn benchmark_samples_show_a_known_delay() {
    let _alone = alone();
    let folder = folder("benchmark");
    let program = Program::compile("cc", "-std=gnu11", "walk.c", folder.path(), false);
    run(program.command().arg("benchmark"));
}

#[test]
fn a_thousand_cycles_leak_nothing() {
    let _alone = alone();
    for watched in [false, true] {
        let folder = folder("cycles");
        let program = Program::compile("cc", "-std=gnu11", "walk.c", folder.path(), watched);
        run(program.command().args(["cycles", "1000"]));
    }
}

/// The header is C++ too, and strict C.
#[test]
fn the_header_stands_alone() {
    let folder = folder("header");
    for (compiler, options) in [("cc", ["-std=c99", "-pedantic", "-xc"]), ("c++", ["-std=c++11", "-pedantic", "-xc++"])]
    {
        run(Command::new(compiler)
            .args(options)
            .args(["-Wall", "-Wextra", "-Werror", "-fsyntax-only"])
            .arg(format!("{MANIFEST}/include/catalyst_transport.h"))
            .current_dir(&folder));
    }
}

/// The plugin under the names that Catalyst's runtime looks for, as a copy and as a link.
fn host(watched: bool) {
    let folder = folder("plugin");
    let library = library_folder().join(LIBRARY);
    let name = |role| folder.path().join(format!("libcatalyst_transport_cpu_verbs_{role}.so"));
    std::fs::copy(&library, name("controller")).unwrap();
    std::os::unix::fs::symlink(&library, name("coprocessor")).unwrap();
    let program = Program::compile("c++", "-std=c++17", "plugin.cpp", folder.path(), watched);
    let said = run(program.command().env("CATALYST_TRANSPORT_PATH", folder.path()));
    assert!(said.starts_with("hosted: "), "{said}");
}

#[test]
fn the_plugin_in_a_cxx_program() {
    let _alone = alone();
    host(false);
}

#[test]
fn the_plugin_in_a_cxx_program_watched() {
    let _alone = alone();
    host(true);
}

/// 20 functions, 20 `__call`, 14 `__wrapper`, two factories, and nothing else; a soname.
#[test]
fn nothing_but_the_interface_is_exported() {
    let library = library_folder().join(LIBRARY);
    let listed = run(Command::new("nm").args(["-D", "--defined-only"]).arg(&library));
    let mut exported: Vec<&str> = listed.lines().map(|line| line.rsplit(' ').next().unwrap()).collect();
    exported.sort_unstable();
    let header = std::fs::read_to_string(Path::new(MANIFEST).join("include/catalyst_transport.h")).unwrap();
    let words = |text: &str| -> Vec<String> {
        text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').map(str::to_owned).collect()
    };
    let mut declared: Vec<String> = words(&header)
        .into_iter()
        .filter(|word| word.starts_with("__catalyst__transport__") || word.starts_with("CatalystTransport"))
        .collect();
    declared.sort_unstable();
    declared.dedup();
    assert_eq!(exported, declared);
    let count = |end| exported.iter().filter(|name| name.ends_with(end)).count();
    assert_eq!((count("__call"), count("__wrapper"), exported.len()), (20, 14, 56));
    let dynamic = run(Command::new("readelf").arg("-d").arg(&library));
    assert!(dynamic.contains("Library soname: [libcatalyst_transport.so]"), "{dynamic}");
}
