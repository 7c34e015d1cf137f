//! The C interface and the C++ plugin, from C and C++: the programs in tests/capi are compiled here, against the library
//! that Cargo has built beside this test, and run as they are and under valgrind (without it, under the compiler's
//! sanitizers).

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

const MANIFEST: &str = env!("CARGO_MANIFEST_DIR");
const LIBRARY: &str = "libcatalyst_transport.so";

/// The library's folder: Cargo puts it beside its test programs, or into their parent.
fn library_folder() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let folder = program.ancestors().skip(1).find(|folder| folder.join(LIBRARY).exists());
    folder.unwrap_or_else(|| panic!("{LIBRARY} is not above {}", program.display())).to_owned()
}

/// A folder for what is compiled here.
fn folder(name: &str) -> tempfile::TempDir {
    tempfile::Builder::new().prefix(name).tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn run(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
    text(&output.stdout)
}

/// A compiled program, with what watches its accesses and its memory if it is watched.
struct Program {
    path: PathBuf,
    watched: bool,
}

fn has_valgrind() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| Command::new("valgrind").arg("--version").stdout(Stdio::null()).status().is_ok())
}

impl Program {
    fn compile(compiler: &str, standard: &str, source: &str, folder: &Path, watched: bool) -> Self {
        let path = folder.join("program");
        let library = library_folder();
        let mut command = Command::new(compiler);
        command.args([standard, "-Wall", "-Wextra", "-Werror", "-g", "-O1", "-rdynamic", "-I"]);
        command.arg(Path::new(MANIFEST).join("include")).arg(Path::new(MANIFEST).join("tests/capi").join(source));
        command.arg("-o").arg(&path);
        if watched && !has_valgrind() {
            command.arg("-fsanitize=address,undefined");
        }
        if source.ends_with(".c") {
            command.arg("-L").arg(&library).arg("-lcatalyst_transport");
            command.arg(format!("-Wl,-rpath,{}", library.display()));
        }
        run(command.args(["-lpthread", "-ldl"]));
        Self { path, watched }
    }

    fn command(&self) -> Command {
        if !self.watched || !has_valgrind() {
            return Command::new(&self.path);
        }
        let mut command = Command::new("valgrind");
        command.args(["-q", "--error-exitcode=9", "--leak-check=full", "--fair-sched=yes"]);
        command.arg("--errors-for-leak-kinds=definite,indirect,possible");
        command.arg(format!("--suppressions={MANIFEST}/tests/capi/valgrind.supp"));
        command.arg(&self.path);
        command
    }
}

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
