//! Which data path a name chooses, and the settings that go with it.

use super::failure::{Failure, say};
use crate::config::{DataPathKind, SessionConfig, Wire};
use crate::oob::Role;

/// What carries the frames of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Backend {
    /// Verbs in Catalyst's wire format.
    CpuVerbs,
    /// Shared memory between two sessions of this process that have the same key.
    Memcpy,
    /// Verbs in the native wire format.
    NativeVerbs,
    /// Shared memory between processes of this host.
    NativeShm,
}

/// The keys of a configuration, as [`SessionConfig`]'s `FromStr` reads them, without those that a backend decides.
const KEYS: [&str; 20] = [
    "dev",
    "port",
    "gid",
    "pkey",
    "bind",
    "psk_file",
    "psk_env",
    "depth",
    "request",
    "reply",
    "accept_ms",
    "handshake_ms",
    "timeout_ms",
    "stop_ms",
    "liveness_ms",
    "cpu",
    "cpu_pin",
    "rt",
    "mlock",
    "low_latency",
];

impl Backend {
    /// Reads `create`'s `backend_lib`: a name, or the path of a backend library of Catalyst's.
    pub(super) fn from_name(name: &str) -> Result<Self, Failure> {
        let all = [
            ("native_verbs", Self::NativeVerbs),
            ("native_shm", Self::NativeShm),
            ("cpu_verbs", Self::CpuVerbs),
            ("memcpy", Self::Memcpy),
        ];
        // The file's own name counts before its folder's.
        let file = name.rsplit('/').next().unwrap_or(name);
        for text in [file, name] {
            if let Some((_, backend)) = all.iter().find(|(word, _)| text.contains(word)) {
                return Ok(*backend);
            }
        }
        Err(Failure::new(format!(
            "the backend '{name}' is unknown; there are: cpu_verbs (RDMA, Catalyst's wire format), memcpy (two sessions of \
             this process with one key), native_verbs (RDMA) and native_shm (shared memory on this host); a path counts by \
             the name in it"
        )))
    }

    /// What it is called.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::CpuVerbs => "cpu_verbs",
            Self::Memcpy => "memcpy",
            Self::NativeVerbs => "native_verbs",
            Self::NativeShm => "native_shm",
        }
    }

    /// Catalyst's backends take configurations that were written for others too.
    fn is_lenient(self) -> bool {
        matches!(self, Self::CpuVerbs | Self::Memcpy)
    }

    /// Refuses a transport name in `establish_channel` that means another data path. `rdma` is what compiled programs say
    /// whatever the backend.
    pub(super) fn check_transport(self, name: &str) -> Result<(), Failure> {
        let own: &[&str] = match self {
            Self::CpuVerbs => &["cpu_verbs", "verbs"],
            Self::NativeVerbs => &["native_verbs", "verbs"],
            Self::Memcpy => &["memcpy", "shm"],
            Self::NativeShm => &["native_shm", "shm"],
        };
        if matches!(name, "" | "rdma") || own.contains(&name) {
            return Ok(());
        }
        Err(Failure::new(format!(
            "the transport '{name}' was asked for and the session's backend is {}; name {}, rdma or nothing, or create the \
             session with another backend",
            self.name(),
            own.join(", ")
        )))
    }
}

/// The settings of a session: the backend's defaults, then the configuration string, then what the backend decides.
pub(super) fn config_for_backend(backend: Backend, role: Role, text: &str) -> Result<SessionConfig, Failure> {
    // All interfaces: a controller on another host has to reach the port that a compiled program names.
    let bind = if backend == Backend::Memcpy { "127.0.0.1" } else { "0.0.0.0" };
    let mut settings = format!("depth=256;request=8;reply=8;bind={bind}");
    for pair in text.split(';').map(str::trim).filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').map_or((pair, ""), |(key, value)| (key.trim(), value.trim()));
        match key {
            // By which Catalyst's runtime tells a pair of sessions; here the key of `create` does.
            "pair" => continue,
            "path" | "wire" if !backend.is_lenient() => {
                return Err(Failure::new(format!(
                    "configuration key '{key}' is decided by the backend, here {}; leave it out",
                    backend.name()
                )));
            }
            // Catalyst's controller has no thread of its own, and its callers' threads are theirs.
            "cpu" | "cpu_pin" | "rt" if backend.is_lenient() && role == Role::Controller => continue,
            "cpu_pin" if value == "-1" => continue,
            "bind" if backend == Backend::Memcpy => continue,
            _ if backend.is_lenient() && !KEYS.contains(&key) => {
                say("create", &format!("note: configuration key '{key}' is unknown to {} and ignored", backend.name()));
                continue;
            }
            _ => {}
        }
        settings.push(';');
        settings.push_str(pair);
    }
    let config: SessionConfig = settings.parse()?;
    Ok(match backend {
        Backend::CpuVerbs => {
            // The wire sets the channel to its own shape; fewer rounds in flight may be wished.
            let depth = config.channel.depth;
            config.data_path(DataPathKind::Verbs).wire(Wire::Catalyst).depth(depth)
        }
        Backend::NativeVerbs => config.data_path(DataPathKind::Verbs),
        Backend::Memcpy | Backend::NativeShm => config.data_path(DataPathKind::SharedMemory),
    })
}

/// What a plugin's configuration chooses: `path` (verbs, shm) and `wire` (catalyst, native) are taken out of it.
/// Without them it is Catalyst's own backend.
pub(super) fn backend_for_plugin(text: &str) -> Result<(Backend, String), Failure> {
    let (mut path, mut wire, mut rest) = ("verbs", None, Vec::new());
    for pair in text.split(';') {
        match pair.split_once('=').map(|(key, value)| (key.trim(), value.trim())) {
            Some(("path", value)) => path = value,
            Some(("wire", value)) => wire = Some(value),
            _ => rest.push(pair),
        }
    }
    let backend = match (path, wire) {
        ("verbs", None | Some("catalyst")) => Backend::CpuVerbs,
        ("verbs", Some("native")) => Backend::NativeVerbs,
        ("shm", None | Some("native")) => Backend::NativeShm,
        (path, wire) => {
            return Err(Failure::new(format!(
                "path={path} with wire={} is not there; there are path=verbs with wire=catalyst (the default) or \
                 wire=native, and path=shm with wire=native",
                wire.unwrap_or("native")
            )));
        }
    };
    Ok((backend, rest.join(";")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_paths_choose_the_backend() {
        for (name, backend) in [
            ("cpu_verbs", Backend::CpuVerbs),
            ("/opt/lib/libcatalyst_transport_cpu_verbs_controller.so", Backend::CpuVerbs),
            ("/home/memcpy/libcatalyst_transport_cpu_verbs_coprocessor.so", Backend::CpuVerbs),
            ("libcatalyst_transport_memcpy.so", Backend::Memcpy),
            ("native_verbs", Backend::NativeVerbs),
            ("native_shm", Backend::NativeShm),
        ] {
            assert_eq!(Backend::from_name(name), Ok(backend), "{name}");
        }
        for name in ["", "gpu_verbs", "shm"] {
            let failure = Backend::from_name(name).unwrap_err();
            for word in ["cpu_verbs", "memcpy", "native_verbs", "native_shm"] {
                assert!(failure.text.contains(word), "{}", failure.text);
            }
        }
    }

    #[test]
    fn every_key_is_one_of_the_configurations() {
        for key in KEYS {
            // A value that no key takes shows whether the key is known.
            let error = format!("{key}=\u{1}").parse::<SessionConfig>().err().map(|error| error.to_string());
            assert!(error.is_none_or(|error| !error.contains("is unknown")), "{key}");
        }
    }

    #[test]
    fn catalysts_backends_ignore_what_they_do_not_know() {
        let text = "dev=rxe0;gid=1;cpu_pin=-1;rt=0;colour=blue;pair=p;depth=4";
        let config = config_for_backend(Backend::CpuVerbs, Role::Coprocessor, text).unwrap();
        assert_eq!((config.channel().depth, config.channel().request_capacity), (4, 8));
        assert!(config_for_backend(Backend::NativeVerbs, Role::Coprocessor, text).is_err());
        let config = config_for_backend(Backend::CpuVerbs, Role::Controller, "cpu_pin=999").unwrap();
        assert_eq!(config.cpu, None);
        assert!(config_for_backend(Backend::NativeShm, Role::Controller, "path=verbs").is_err());
    }

    #[test]
    fn a_plugin_is_catalysts_backend_unless_told_otherwise() {
        for (text, backend) in [
            ("dev=rxe0;gid=1;pair=p", Backend::CpuVerbs),
            ("wire=catalyst", Backend::CpuVerbs),
            ("path=verbs;wire=native", Backend::NativeVerbs),
            ("path=shm;pair=p", Backend::NativeShm),
        ] {
            assert_eq!(backend_for_plugin(text).unwrap().0, backend, "{text}");
        }
        assert!(backend_for_plugin("path=shm;wire=catalyst").is_err());
        assert_eq!(backend_for_plugin("a=1;path=shm;b=2").unwrap().1, "a=1;b=2");
    }
}
