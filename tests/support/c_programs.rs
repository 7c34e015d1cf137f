//! The programs in tests/capi, compiled by the test that runs them against the library that Cargo has built beside it.

#![allow(dead_code)] // each test file uses a part of it

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

pub(crate) const MANIFEST: &str = env!("CARGO_MANIFEST_DIR");
pub(crate) const LIBRARY: &str = "libcatalyst_transport.so";

/// The library's folder: Cargo puts it beside its test programs, or into their parent.
pub(crate) fn library_folder() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let folder = program.ancestors().skip(1).find(|folder| folder.join(LIBRARY).exists());
    folder.unwrap_or_else(|| panic!("{LIBRARY} is not above {}", program.display())).to_owned()
}

/// A folder for what is compiled here.
pub(crate) fn folder(name: &str) -> tempfile::TempDir {
    tempfile::Builder::new().prefix(name).tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

pub(crate) fn run(command: &mut Command) -> String {
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
pub(crate) struct Program {
    path: PathBuf,
    watched: bool,
}

fn has_valgrind() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| Command::new("valgrind").arg("--version").stdout(Stdio::null()).status().is_ok())
}

impl Program {
    pub(crate) fn compile(compiler: &str, standard: &str, source: &str, folder: &Path, watched: bool) -> Self {
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

    pub(crate) fn command(&self) -> Command {
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
