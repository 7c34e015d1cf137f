//! The options that both ends of a connection have, with perftest's letters where it has one.

use std::io::IsTerminal;
use std::time::Duration;

use catalyst_transport::{DataPathKind, PreSharedKey, SessionConfig, devices};
use clap::{Args, ValueEnum};

/// The environment variable that a pre-shared key is taken from.
const PSK: &str = "CATALYST_TRANSPORT_PSK";

/// How to reach the other side.
#[derive(Debug, Clone, Args)]
pub(crate) struct Connection {
    /// What carries the frames: auto takes shared memory when the peer is on this host, and verbs otherwise
    #[arg(long, value_enum, default_value_t = DataPath::Auto)]
    data_path: DataPath,
    /// Wire format: catalyst is for a peer that is Catalyst's C++ runtime or an FPGA, over verbs and with 8 bytes each way
    #[arg(long, value_enum, default_value_t = Wire::Native)]
    pub(crate) wire: Wire,
    /// RDMA device, by name, network interface or address
    #[arg(short = 'd', long = "ib-dev", value_name = "DEVICE")]
    device: Option<String>,
    /// Port of the device
    #[arg(short = 'i', long = "ib-port", value_name = "PORT")]
    ib_port: Option<u8>,
    /// Index in the GID table
    #[arg(short = 'x', long = "gid-index", value_name = "INDEX")]
    gid_index: Option<u8>,
    /// Address to listen on (coprocessor), or to dial from where it is not loopback (controller)
    #[arg(long, default_value = "127.0.0.1", value_name = "ADDRESS")]
    bind: String,
    /// File with the pre-shared key that the other side has too: 16 bytes or more, readable by its owner alone. Without this
    /// option the key is the value of the environment variable CATALYST_TRANSPORT_PSK, if that is set
    #[arg(long, value_name = "FILE")]
    psk_file: Option<std::path::PathBuf>,
    /// Seconds of silence after which the peer is taken for lost
    #[arg(long, default_value_t = 5.0, value_name = "SECONDS")]
    liveness: f64,
    /// One machine-readable line on standard output, everything else on standard error
    #[arg(long)]
    pub(crate) json: bool,
    /// List RDMA devices, ports and GID tables, and exit
    #[arg(long)]
    pub(crate) list: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum DataPath {
    Auto,
    Shm,
    Verbs,
}

/// As [`catalyst_transport::Wire`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Wire {
    Native,
    Catalyst,
}

#[allow(dead_code)] // each example uses a part of it
impl Wire {
    /// As on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Catalyst => "catalyst",
        }
    }
}

impl Connection {
    /// The settings that these options stand for.
    ///
    /// # Errors
    /// Those of the pre-shared key.
    pub(crate) fn config(&self) -> catalyst_transport::Result<SessionConfig> {
        let kind = match self.data_path {
            DataPath::Auto => DataPathKind::Auto,
            DataPath::Shm => DataPathKind::SharedMemory,
            DataPath::Verbs => DataPathKind::Verbs,
        };
        let liveness = Duration::try_from_secs_f64(self.liveness).unwrap_or_default();
        let wire = match self.wire {
            Wire::Native => catalyst_transport::Wire::Native,
            Wire::Catalyst => catalyst_transport::Wire::Catalyst,
        };
        let mut config = SessionConfig::new().wire(wire).data_path(kind).bind(&self.bind).liveness(liveness);
        if let Some(device) = &self.device {
            config = config.device(device);
        }
        if let Some(port) = self.ib_port {
            config = config.port(port);
        }
        if let Some(index) = self.gid_index {
            config = config.gid_index(index);
        }
        // The key itself is never an argument, which other users can read.
        let key = match &self.psk_file {
            Some(file) => Some(PreSharedKey::from_file(file)?),
            None if std::env::var_os(PSK).is_some() => Some(PreSharedKey::from_env(PSK)?),
            None => None,
        };
        Ok(match key {
            Some(key) => config.pre_shared_key(key),
            None => config,
        })
    }
}

/// What answers a request: both sides have to agree on it, since the controller verifies every byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Function {
    /// The request's own bytes
    Echo,
    /// The request with every bit inverted
    Invert,
    /// The [[7,1,3]] Steane table: three syndrome bytes, answered by an i64
    Steane,
}

/// Prints the devices, their ports and their GID tables.
pub(crate) fn print_devices() -> catalyst_transport::Result<()> {
    for device in devices()? {
        println!("{}", device.name);
        for port in &device.ports {
            println!(
                "  port {}  {}  {}  MTU {}  LID {}",
                port.number, port.state, port.link_layer, port.active_mtu, port.lid
            );
            for gid in &port.gids {
                let kind = gid.gid_type.map_or_else(|| "unknown type".into(), |kind| kind.to_string());
                let interface = gid.interface.as_deref().unwrap_or("-");
                println!("    GID {:3}  {:<39}  {kind:<12}  {interface}", gid.index, gid.ip().to_string());
            }
        }
    }
    Ok(())
}

/// Log lines of the library go to standard error, from warnings on unless RUST_LOG says otherwise.
pub(crate) fn log_to_stderr() {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .without_time()
        .init();
}
