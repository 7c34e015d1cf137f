//! The pre-shared key: where it comes from, and what keeps it from showing.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use zeroize::Zeroizing;

use crate::error::{Result, TransportError};

/// A secret that both sides of a session hold, and by which they know each other
/// ([`SessionConfig::pre_shared_key`](crate::SessionConfig::pre_shared_key)).
///
/// It is read from a file or an environment variable, never from a command line, which every user of a machine can read. Its
/// bytes are 16 to 4,096 of any value; where they end in a line feed, that one and a carriage return before it do not count,
/// so that a key may be written with an editor or `echo`. They should be random, because who watches one handshake can try
/// guesses afterwards: `head -c 32 /dev/urandom | base64 >psk; chmod 600 psk`.
///
/// Copies share one memory, which is overwritten when the last of them goes. It is never shown, also not by [`Debug`].
#[derive(Clone, PartialEq, Eq)]
pub struct PreSharedKey(Arc<Zeroizing<Vec<u8>>>);

impl PreSharedKey {
    /// Fewest bytes of a key.
    pub const MIN_BYTES: usize = 16;
    /// Most bytes of a key.
    pub const MAX_BYTES: usize = 4096;

    /// Reads the key from a file.
    ///
    /// The file has to be a regular one that the owner's group may read at most; that the group may is said in the log as a
    /// warning.
    ///
    /// # Errors
    /// - [`TransportError::System`] if it cannot be opened or read;
    /// - [`TransportError::Invalid`] if it is no regular file, if others may read or anybody else may write it, or if the key in
    ///   it is too short or too long.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let what = format!("the pre-shared key file {}", path.display());
        let failed = |call| {
            let what = what.clone();
            move |error: std::io::Error| {
                let remedy = match error.kind() {
                    ErrorKind::NotFound => "make one: head -c 32 /dev/urandom | base64 >FILE; chmod 600 FILE",
                    ErrorKind::PermissionDenied => "it has to belong to the user that runs this process",
                    _ => "",
                };
                TransportError::system(call, what, error).with_remedy(remedy)
            }
        };
        // A pipe without a writer would hold the call up.
        let mut file =
            OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(failed("open"))?;
        let found = file.metadata().map_err(failed("fstat"))?;
        if !found.is_file() {
            return Err(TransportError::invalid(what, "is not a regular file"));
        }
        let owner = found.uid();
        if owner != 0 && owner != rustix::process::geteuid().as_raw() {
            let problem = format!("belongs to user {owner}, who may change it: it has to be this user's or root's");
            return Err(TransportError::invalid(what, problem));
        }
        let mode = found.mode() & 0o777;
        if mode & 0o026 != 0 {
            let problem = format!("may be read or written by other users (mode {mode:03o}): chmod 600 it");
            return Err(TransportError::invalid(what, problem));
        }
        if mode & 0o040 != 0 {
            tracing::warn!(file = %path.display(), "its group may read the pre-shared key file: chmod 600 it if that is not meant");
        }
        let bytes = read(&mut file).map_err(failed("read"))?;
        Self::new(bytes, what)
    }

    /// Reads the key from an environment variable. Other processes of the same user can read it there, and child processes
    /// inherit it: a file is the safer place.
    ///
    /// # Errors
    /// [`TransportError::Invalid`] if the variable is not set, or if the key in it is too short or too long.
    pub fn from_env(name: &str) -> Result<Self> {
        let what = format!("the pre-shared key variable {name}");
        // Such a name is no variable's, and the standard library panics at some of them.
        let value = if name.is_empty() || name.contains(['=', '\0']) { None } else { std::env::var_os(name) };
        let value = value.ok_or_else(|| TransportError::invalid(&what, "is not set in this process's environment"))?;
        Self::new(Zeroizing::new(value.into_vec()), what)
    }

    fn new(mut bytes: Zeroizing<Vec<u8>>, what: String) -> Result<Self> {
        if bytes.last() == Some(&b'\n') {
            bytes.pop();
            if bytes.last() == Some(&b'\r') {
                bytes.pop();
            }
        }
        let (length, least, most) = (bytes.len(), Self::MIN_BYTES, Self::MAX_BYTES);
        if length < least {
            let problem = format!("holds a key of {length} bytes and {least} are the least: take 32 random ones");
            return Err(TransportError::invalid(what, problem));
        }
        if length > most {
            return Err(TransportError::invalid(what, format!("holds a key of more than {most} bytes")));
        }
        Ok(Self(Arc::new(bytes)))
    }

    /// The secret itself, for the one room that needs it.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// A key of these bytes.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self::new(Zeroizing::new(bytes.to_vec()), "a test's key".into()).unwrap()
    }
}

/// All bytes of a file, or one more than a key may have with its line's end. The memory never grows, which would leave a copy
/// behind.
fn read(file: &mut File) -> std::io::Result<Zeroizing<Vec<u8>>> {
    let mut bytes = Zeroizing::new(vec![0; PreSharedKey::MAX_BYTES + 3]);
    let mut filled = 0;
    while filled < bytes.len() {
        match file.read(&mut bytes[filled..]) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}

impl fmt::Debug for PreSharedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PreSharedKey(secret)")
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn file(content: &[u8], mode: u32) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(content).unwrap();
        file.as_file().set_permissions(std::fs::Permissions::from_mode(mode)).unwrap();
        file
    }

    fn read_from(content: &[u8]) -> Result<PreSharedKey> {
        PreSharedKey::from_file(file(content, 0o600).path())
    }

    #[test]
    fn one_line_end_does_not_count() {
        for (content, key) in [
            (&b"0123456789abcdef"[..], &b"0123456789abcdef"[..]),
            (b"0123456789abcdef\n", b"0123456789abcdef"),
            (b"0123456789abcdef\r\n", b"0123456789abcdef"),
            (b"0123456789abcdef\n\n", b"0123456789abcdef\n"),
            (b"0123456789abcdef\r", b"0123456789abcdef\r"),
            (b" 0123456789\0\xFFabc ", b" 0123456789\0\xFFabc "),
        ] {
            assert_eq!(read_from(content).unwrap().bytes(), key, "{content:?}");
        }
        let longest = [7; PreSharedKey::MAX_BYTES];
        assert_eq!(read_from(&[&longest[..], b"\r\n"].concat()).unwrap().bytes(), longest);
    }

    #[test]
    fn too_short_and_too_long_is_refused() {
        for (content, word) in [
            (&b""[..], "0 bytes"),
            (b"\n", "0 bytes"),
            (b"0123456789abcde\n", "15 bytes"),
            (&[7; PreSharedKey::MAX_BYTES + 1], "more than 4096"),
            (&[7; 100_000], "more than 4096"),
        ] {
            let error = read_from(content).unwrap_err();
            assert!(matches!(error, TransportError::Invalid { .. }) && error.to_string().contains(word), "{error}");
        }
    }

    #[test]
    fn a_file_that_others_may_read_is_refused() {
        for mode in [0o400, 0o600, 0o640, 0o440, 0o700] {
            PreSharedKey::from_file(file(&[1; 16], mode).path()).unwrap();
        }
        for mode in [0o644, 0o604, 0o602, 0o620, 0o666, 0o777] {
            let error = PreSharedKey::from_file(file(&[1; 16], mode).path()).unwrap_err().to_string();
            assert!(error.contains("chmod 600") && error.contains(&format!("{mode:03o}")), "{error}");
        }
    }

    #[test]
    fn what_is_no_file_is_named_and_waited_for_by_nobody() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &pipe,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::from_raw_mode(0o600),
            0,
        )
        .unwrap();
        for path in [folder.path(), &pipe] {
            let error = PreSharedKey::from_file(path).unwrap_err().to_string();
            assert!(error.contains("regular file"), "{error}");
        }
        let error = PreSharedKey::from_file(folder.path().join("none")).unwrap_err().to_string();
        assert!(error.contains("none") && error.contains("os error 2") && error.contains("/dev/urandom"), "{error}");
    }

    #[test]
    fn a_variable_that_is_not_set_is_named() {
        for name in ["CATALYST_TRANSPORT_NO_SUCH_VARIABLE", "", "A=B", "A\0B"] {
            let error = PreSharedKey::from_env(name).unwrap_err().to_string();
            assert!(error.contains("is not set"), "{error}");
        }
        // What every test has: cargo sets it, and it is long enough.
        let key = PreSharedKey::from_env("CARGO_MANIFEST_DIR");
        assert!(
            key.is_ok_and(|key| key.bytes() == env!("CARGO_MANIFEST_DIR").as_bytes())
                || env!("CARGO_MANIFEST_DIR").len() < 16
        );
    }

    #[test]
    fn a_key_is_never_shown() {
        let key = PreSharedKey::of(b"0123456789abcdef");
        assert_eq!(format!("{key:?} {key:#?}"), "PreSharedKey(secret) PreSharedKey(secret)");
        let config = crate::SessionConfig::new().pre_shared_key(key);
        let text = format!("{config:?}");
        assert!(text.contains("secret") && !text.contains("0123") && !text.contains("48, 49"), "{text}");
    }
}
