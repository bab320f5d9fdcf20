//! The digest key: where it comes from. It makes the digests of callers, of tenants by credential, and of keys in the log.
//!
//! The key is never in the database. Somebody who reads the database or a dump of it would have digests and key together, and
//! could try passwords against `caller`. So replicas that must make equal digests share a file. If no route on Postgres
//! compares digests, no file is needed and none is made: each process has its own key in memory.

use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::scope::DigestKey;

/// How long a made key is, in bytes.
const LENGTH: usize = 32;
/// A shorter key is none.
pub(super) const LENGTH_MIN: usize = 16;

/// Where the key of the digests comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DigestKeySource {
    /// Named by `server.digest_key_file`, and readable when the configuration was loaded.
    Given(PathBuf),
    /// Nothing is named: made at the first start beside the SQLite file, in whose folder the process writes anyway.
    Made(PathBuf),
    /// Nothing is named, and no route compares digests: random, for the life of the process.
    Process,
}

/// The key cannot be had.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot {verb} the digest key {} (server.digest_key_file names another file)",
    path.display()
)]
pub struct NoDigestKey {
    verb: &'static str,
    path: PathBuf,
    #[source]
    cause: io::Error,
}

impl DigestKeySource {
    /// The key. Where it is to be made, it is made of random bytes, readable by its owner only.
    ///
    /// # Errors
    /// The file cannot be read or made, or is too short to be a key.
    pub fn open(&self) -> Result<DigestKey, NoDigestKey> {
        match (self.look()?, self) {
            (Some(key), _) => Ok(key),
            (None, Self::Given(path) | Self::Made(path)) => {
                let made = make(path).and_then(|bytes| checked(&bytes));
                made.map_err(no_key("make", path))
            }
            (None, Self::Process) => {
                let path = Path::new(RANDOM);
                of_this_process().map(DigestKey::from_bytes).map_err(no_key("read", path))
            }
        }
    }

    /// The key of the file; `None`: there is no file, and `open` makes it or does without.
    ///
    /// # Errors
    /// The file cannot be read, or is too short to be a key.
    pub fn look(&self) -> Result<Option<DigestKey>, NoDigestKey> {
        let (path, bytes) = match self {
            Self::Process => return Ok(None),
            Self::Given(path) => (path, std::fs::read(path)),
            Self::Made(path) => match std::fs::read(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                read => (path, read),
            },
        };
        bytes.and_then(|bytes| checked(&bytes)).map(Some).map_err(no_key("read", path))
    }

    /// Whether `open` will find the key, or can make it. Leaves nothing behind.
    ///
    /// # Errors
    /// As [`DigestKeySource::open`].
    pub fn probe(&self) -> Result<(), NoDigestKey> {
        let (None, Self::Made(path)) = (self.look()?, self) else { return Ok(()) };
        draft(path, &[]).and_then(std::fs::remove_file).map_err(no_key("make", path))
    }
}

fn no_key(verb: &'static str, path: &Path) -> impl FnOnce(io::Error) -> NoDigestKey {
    move |cause| NoDigestKey { verb, path: path.to_owned(), cause }
}

fn checked(bytes: &[u8]) -> io::Result<DigestKey> {
    if bytes.len() < LENGTH_MIN {
        let wrong = "it holds fewer than 16 bytes; use 32 random ones";
        return Err(io::Error::new(io::ErrorKind::InvalidData, wrong));
    }
    Ok(DigestKey::from_bytes(bytes))
}

const RANDOM: &str = "/dev/urandom";

fn random() -> io::Result<[u8; LENGTH]> {
    let mut bytes = [0; LENGTH];
    std::fs::File::open(RANDOM)?.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// One key for the process, however often its configuration is loaded.
fn of_this_process() -> io::Result<&'static [u8]> {
    static KEY: OnceLock<[u8; LENGTH]> = OnceLock::new();
    if let Some(key) = KEY.get() {
        return Ok(key);
    }
    let made = random()?;
    Ok(KEY.get_or_init(|| made))
}

/// Writes random bytes under another name first, so that a crash or a second process never leaves half a key.
fn make(path: &Path) -> io::Result<Vec<u8>> {
    let bytes = random()?;
    let draft = draft(path, &bytes)?;
    let linked = std::fs::hard_link(&draft, path);
    std::fs::remove_file(&draft)?;
    match linked {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => std::fs::read(path),
        linked => linked.map(|()| bytes.to_vec()),
    }
}

/// A synced file beside the path that no other process uses.
fn draft(path: &Path, bytes: &[u8]) -> io::Result<PathBuf> {
    let draft = path.with_extension(format!("key.{}", std::process::id()));
    let mut options = std::fs::OpenOptions::new();
    let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&draft)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    Ok(draft)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::causes;

    #[test]
    fn the_digest_key_is_made_once_and_only_for_its_owner() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("oncegate.key");
        let made = DigestKeySource::Made(path.clone());
        made.probe().unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "a probe leaves nothing");
        let first = made.open().unwrap().digest(b"x");
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(bytes.len(), 32);
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(made.open().unwrap().digest(b"x"), first);
        made.probe().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), bytes);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "no draft is left");
        std::fs::write(&path, b"short").unwrap();
        for told in [made.open().map(drop), made.probe()] {
            let told = causes(&told.unwrap_err());
            let path = path.display();
            assert!(
                told.starts_with(&format!(
                    "cannot read the digest key {path} (server.digest_key_file "
                )),
                "{told}"
            );
        }
    }

    #[test]
    fn a_key_that_cannot_be_made_names_path_and_setting() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("missing/oncegate.key");
        let made = DigestKeySource::Made(path.clone());
        for told in [made.open().map(drop), made.probe()] {
            let told = causes(&told.unwrap_err());
            let path = path.display();
            assert!(
                told.starts_with(&format!(
                    "cannot make the digest key {path} (server.digest_key_file "
                )),
                "{told}"
            );
        }
    }

    #[test]
    fn a_process_has_one_key_and_no_file() {
        let source = DigestKeySource::Process;
        source.probe().unwrap();
        assert!(source.look().unwrap().is_none());
        let digest = source.open().unwrap().digest(b"x");
        assert_eq!(source.open().unwrap().digest(b"x"), digest);
        assert_ne!(digest, DigestKey::from_bytes(&[0; LENGTH]).digest(b"x"));
    }
}
