//! The database file from outside: who holds it, whether it is still there, and whether it is whole.
//!
//! What must stay true:
//!
//! - Only `serve` takes the [`FileLock`]. It is held on a file beside the database and on the database itself, so that
//!   neither a lock file that was deleted nor a second name of the database lets another `serve` in.
//! - A handle on the database is never closed while the process lives: closing any handle of a file drops all locks
//!   that SQLite holds on it in this process. SQLite's own locks and this one are of two kinds and do not meet.
//! - What is written to files that were deleted or replaced is gone at the next start, so nothing is written then.

use std::ffi::OsString;
use std::fs::{File, OpenOptions, TryLockError};
use std::mem::ManuallyDrop;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::super::{Error, OpenError};
use crate::identity::Identity;

/// The files that SQLite keeps beside the database: its log, and the locks and index of that log.
const BESIDE: [&str; 2] = ["-wal", "-shm"];

/// Which file, and whether it is made where there is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Location {
    /// Relative to the working folder.
    pub path: PathBuf,
    /// Whether it is made where there is none.
    pub create: bool,
}

impl Location {
    /// A file that is made where there is none.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), create: true }
    }

    /// Whether it may be opened: it is there, or it may be made.
    ///
    /// # Errors
    /// [`OpenError::Connect`].
    pub fn look(&self) -> Result<(), OpenError> {
        if self.path.try_exists().unwrap_or(true) {
            return Ok(());
        }
        if let Some(folder) = missing_folder(&self.path) {
            let why =
                format!("there is no folder {}: make it, or mount it there", folder.display());
            return Err(connect(&self.path, std::io::Error::other(why)));
        }
        if self.create {
            return Ok(());
        }
        let why = "there is no such file, and store.url says that it must be there (mode=rw): mount it or put it back, or \
                   leave mode=rw out for an empty one";
        Err(connect(&self.path, std::io::Error::other(why)))
    }
}

/// The folder of a file, where there is none.
fn missing_folder(path: &Path) -> Option<&Path> {
    path.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.is_dir())
}

/// Holds a database file for one `serve`, until it is dropped or the process dies.
#[derive(Debug)]
pub struct FileLock {
    database: ManuallyDrop<File>,
    cut: bool,
    _beside: File,
}

impl FileLock {
    /// Whether the database was shorter than its own header says, with a log that may or may not hold the rest.
    pub(crate) fn found_it_cut(&self) -> bool {
        self.cut
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        if let Err(error) = self.database.unlock() {
            tracing::warn!(%error, "the database file stays locked until this process ends");
        }
    }
}

/// Takes the lock of a database file (and of `PATH.lock`), and makes the file where there is none and that is allowed.
/// Commands do not take it.
///
/// # Errors
/// [`OpenError::Locked`] where another process has it, [`OpenError::Connect`] where one of the two files cannot be
/// written, the database has a second name, or is not there and must be.
pub fn lock(location: &Location) -> Result<FileLock, OpenError> {
    location.look()?;
    let path = &resolved(&location.path);
    let beside = open(&beside(path, ".lock"))?;
    hold(&beside, path)?;
    let database = ManuallyDrop::new(open(path)?);
    hold(&database, path)?;
    let failed = |cause| connect(path, cause);
    if database.metadata().map_err(failed)?.nlink() > 1 {
        let why = "the file has a second name (a hard link), and its log belongs to one name only: \
                   remove the other one";
        return Err(connect(path, std::io::Error::other(why)));
    }
    let cut = is_cut(&database, path).map_err(failed)?;
    Ok(FileLock { database, cut, _beside: beside })
}

fn open(path: &Path) -> Result<File, OpenError> {
    let mut options = OpenOptions::new();
    options.create(true).truncate(false).read(true).write(true);
    options.open(path).map_err(|cause| connect(path, cause))
}

fn hold(file: &File, database: &Path) -> Result<(), OpenError> {
    match file.try_lock() {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => {
            Err(OpenError::Locked { place: database.display().to_string() })
        }
        Err(TryLockError::Error(cause)) => Err(connect(database, cause)),
    }
}

fn connect(path: &Path, cause: std::io::Error) -> OpenError {
    OpenError::Connect { place: path.display().to_string(), cause: cause.into() }
}

/// The file itself where `path` is a link to it, so that both names have one lock.
fn resolved(path: &Path) -> PathBuf {
    std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned())
}

fn beside(path: &Path, end: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(end);
    name.into()
}

/// Whether the file is shorter than its header says and has a log. SQLite notices by itself where there is no log; with
/// one it trusts the log's length, since a crash within a checkpoint leaves a file that is rightly short.
fn is_cut(database: &File, path: &Path) -> std::io::Result<bool> {
    let mut header = [0; 100];
    let length = database.metadata()?.len();
    let logged = std::fs::metadata(beside(path, "-wal")).is_ok_and(|log| log.len() > 0);
    if !logged || length < 100 {
        return Ok(logged && length > 0);
    }
    database.read_exact_at(&mut header, 0)?;
    let [.., high, low] = *header.first_chunk::<18>().unwrap_or(&[0; 18]);
    let page = match u64::from(u16::from_be_bytes([high, low])) {
        1 => 65_536,
        size => size,
    };
    let pages = header.get(28..32).and_then(|bytes| bytes.try_into().ok()).map(u32::from_be_bytes);
    Ok(length < page * u64::from(pages.unwrap_or(0)))
}

/// The files that were opened, and the paths under which they must still be found.
#[derive(Clone)]
pub(super) struct OpenFiles(Arc<[(PathBuf, Identity)]>);

impl OpenFiles {
    /// Of a database that is open.
    pub(super) fn of(path: &Path) -> std::io::Result<Self> {
        let mut files = vec![(path.to_owned(), Identity::at(path)?)];
        for path in BESIDE.map(|end| beside(&resolved(path), end)) {
            // Some file systems need none: what is not there cannot be lost.
            files.extend(Identity::at(&path).ok().map(|identity| (path, identity)));
        }
        Ok(Self(files.into()))
    }

    /// Whether each path still leads to its file.
    pub(super) fn check(&self) -> Result<(), Error> {
        for (path, opened) in self.0.iter() {
            if let Err(astray) = opened.is_at(path) {
                return Err(Error::Unavailable(format!("{}: {astray}", path.display()).into()));
            }
        }
        Ok(())
    }
}
