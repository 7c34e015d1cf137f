//! A crate outside of this one that depends on it by path, as a user's would.

use std::path::{Path, PathBuf};
use std::process::Command;

const PROGRAM: &str = r#"
use catalyst_transport::{ConnectInfo, ControllerSession, CoprocessorSession, Invert, SessionConfig, TransportSession};

fn main() -> catalyst_transport::Result<()> {
    let mut coprocessor = CoprocessorSession::new(SessionConfig::new())?;
    coprocessor.set_coprocessor_fn(Invert)?;
    let port = coprocessor.listen(0)?.port();
    let serving = std::thread::spawn(move || {
        coprocessor.open(&ConnectInfo::new("", port))?;
        coprocessor.start()?;
        Ok::<_, catalyst_transport::TransportError>(coprocessor)
    });
    let mut controller = ControllerSession::new(SessionConfig::new())?;
    controller.open(&ConnectInfo::new("localhost", port))?;
    let _coprocessor = serving.join().unwrap()?;
    controller.start()?;
    for round in 0..1000_u32 {
        controller.write_data_slot(&round.to_le_bytes(), 0)?;
        controller.kick(0)?;
        let mut reply = [0; 4];
        controller.collect(&mut [&mut reply])?;
        assert_eq!(u32::from_le_bytes(reply), !round);
    }
    println!("round trips: 1000, devices: {}", catalyst_transport::devices().is_ok());
    Ok(())
}
"#;

/// Makes the crate, builds it and runs it; gives the program's path and output.
fn consume(name: &str, dependency: &str, environment: &[(&str, &str)]) -> (PathBuf, String) {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().unwrap();
    let manifest = format!(
        "[package]\nname = \"{name}\"\nedition = \"2024\"\n\n[dependencies]\ncatalyst-transport = {{ path = {:?}{dependency} }}\n\n[workspace]\n",
        here.display().to_string()
    );
    std::fs::write(folder.path().join("Cargo.toml"), manifest).unwrap();
    std::fs::create_dir(folder.path().join("src")).unwrap();
    std::fs::write(folder.path().join("src/main.rs"), PROGRAM).unwrap();
    // The versions that this crate was tested with, all of which are here already.
    std::fs::copy(here.join("Cargo.lock"), folder.path().join("Cargo.lock")).unwrap();
    let target = here.join("target/consumer");
    let output = Command::new(env!("CARGO"))
        .args(["run", "--quiet", "--offline"])
        .current_dir(folder.path())
        .env("CARGO_TARGET_DIR", &target)
        .envs(environment.iter().copied())
        .output()
        .unwrap();
    let (said, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}{errors}");
    assert!(said.contains("round trips: 1000"), "{said}{errors}");
    (target.join("debug").join(name), said.into_owned())
}

fn libraries(program: &Path) -> String {
    String::from_utf8(Command::new("ldd").arg(program).output().unwrap().stdout).unwrap()
}

/// Without default features nothing of RDMA is needed, neither to build nor to run: every way to find it is cut off.
#[test]
fn without_default_features_no_rdma_library_is_needed() {
    let nowhere = [("PKG_CONFIG", "/nonexistent"), ("LIBCLANG_PATH", "/nonexistent")];
    let (program, said) = consume("consumer-without-rdma", ", default-features = false", &nowhere);
    let libraries = libraries(&program);
    assert!(
        libraries.contains("libc.so") && !libraries.contains("ibverbs") && !libraries.contains("rdmacm"),
        "{libraries}"
    );
    assert!(said.contains("devices: false"), "{said}");
}

/// With default features the same program also has RDMA.
#[test]
#[cfg(feature = "rdma")]
fn with_default_features_rdma_is_there() {
    let (program, _) = consume("consumer-with-rdma", "", &[]);
    assert!(libraries(&program).contains("libibverbs"));
}
