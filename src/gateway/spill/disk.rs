//! The spill's own file: made, locked for the life of the process, written, and removed when nothing in it is pending.
//!
//! What must stay true:
//!
//! - A file belongs to whoever holds its lock, and the kernel gives the lock back when a process dies, however it dies. So
//!   several processes may share a folder, and none touches the file of a living one.
//! - The next process looks into the folder and nowhere else. A file that the folder does not lead to any more is lost with
//!   its process, so its content moves to a new one. That is locked before anything stands in it, and the old one is let go
//!   after all of it does.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use uuid::Uuid;

use crate::identity::{Astray, Identity};

/// How the name of a file ends that may hold outcomes.
pub(super) const ENDING: &str = "spill";
/// How often a new file is begun before the folder counts as unwritable: each time another process was in the way.
const TRIES: usize = 8;

/// The spill's folder cannot be used.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot keep outcomes in {dir}: make it writable for this user, or name another folder in store.spill.dir"
)]
pub struct Unwritable {
    dir: String,
    #[source]
    cause: io::Error,
}

impl Unwritable {
    pub(super) fn new(dir: &Path, cause: io::Error) -> Self {
        Self { dir: dir.display().to_string(), cause }
    }

    /// Whether nothing but room is missing, which draining may make.
    #[must_use]
    pub fn is_for_want_of_room(&self) -> bool {
        matches!(self.cause.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
    }
}

/// What a spill needs of its file. A test can have one that fails, or that waits.
pub trait Disk: Send + 'static {
    /// Writes all of the bytes from this offset on.
    ///
    /// # Errors
    /// Perhaps some of them stand there.
    fn write(&mut self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Returns when all that was written is durable.
    ///
    /// # Errors
    /// Nobody knows what of it is.
    fn sync(&mut self) -> io::Result<()>;

    /// Makes the file end here.
    ///
    /// # Errors
    /// It is as long as it was.
    fn truncate(&mut self, length: u64) -> io::Result<()>;

    /// Where it is, or was before somebody took it away.
    fn path(&self) -> &Path;

    /// Whether its path leads to it, so that the next process finds it.
    ///
    /// # Errors
    /// It is found no more. Who writes to it meets no error.
    fn check_path(&self) -> Result<(), Astray>;

    /// Goes on in a new file of the same folder, which is made where there is none: with this header, and behind that with all
    /// that the old file holds as far as `end`. It is durable when this returns.
    ///
    /// # Errors
    /// It is the file that it was, and nothing of a new one is left.
    fn renew(&mut self, header: &[u8], end: u64) -> io::Result<()>;

    /// Removes the file: nothing in it is pending.
    fn remove(self: Box<Self>);
}

/// A file that this process holds.
#[derive(Debug)]
pub(super) struct OwnFile {
    file: File,
    path: PathBuf,
}

impl OwnFile {
    /// Makes a file of a new name in this folder, and the folder where there is none. Both are for their owner only.
    pub(super) fn create(folder: &Path) -> io::Result<Self> {
        // The next process is told the same name, and not what has become of this one's working folder.
        let folder = &std::path::absolute(folder)?;
        for _ in 0..TRIES {
            make_folder(folder)?;
            let path = folder.join(format!("{}.{ENDING}", Uuid::new_v4()));
            let mut options = OpenOptions::new();
            options.read(true).write(true).create_new(true).mode(0o600);
            let made = options.open(&path);
            let file = match made {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            };
            let held = Self { file, path };
            match held.settle(folder) {
                Ok(true) => return Ok(held),
                Ok(false) => {}
                Err(error) => {
                    Box::new(held).remove();
                    return Err(error);
                }
            }
        }
        Err(io::Error::other("other processes remove what is made there"))
    }

    /// Locks a new file. Not where another process has taken the empty file for a dead one's before.
    fn settle(&self, folder: &Path) -> io::Result<bool> {
        let ours = lock(&self.file)? && is_still_at(&self.file, &self.path)?;
        if ours {
            sync_folder(folder)?;
        }
        Ok(ours)
    }

    /// Takes over what another file holds from `from` to `end`.
    fn copy(&mut self, mut other: &File, from: u64, end: u64) -> io::Result<()> {
        let length = end.saturating_sub(from);
        other.seek(SeekFrom::Start(from))?;
        self.file.seek(SeekFrom::Start(from))?;
        let copied = io::copy(&mut other.take(length), &mut self.file)?;
        if copied == length { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }
}

impl Disk for OwnFile {
    fn write(&mut self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_all_at(bytes, offset)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn truncate(&mut self, length: u64) -> io::Result<()> {
        self.file.set_len(length)
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn check_path(&self) -> Result<(), Astray> {
        Identity::of(&self.file)?.is_at(&self.path)
    }

    fn renew(&mut self, header: &[u8], end: u64) -> io::Result<()> {
        let mut new = Self::create(self.path.parent().unwrap_or(Path::new("/")))?;
        let filled = new
            .write(header, 0)
            .and_then(|()| new.copy(&self.file, header.len() as u64, end))
            .and_then(|()| new.sync())
            .and_then(|()| new.check_path().map_err(io::Error::other));
        if let Err(error) = filled {
            Box::new(new).remove();
            return Err(error);
        }
        *self = new;
        Ok(())
    }

    fn remove(self: Box<Self>) {
        // What stands in its place is somebody else's.
        if self.check_path().is_err() {
            return;
        }
        if let Err(error) = std::fs::remove_file(&self.path) {
            let path = self.path.display();
            tracing::warn!(%error, %path, "an empty spill file was not removed");
        }
    }
}

/// Takes a file over whose process is dead. `None`: it lives, or another one was quicker.
pub(super) fn take_over(path: &Path) -> io::Result<Option<File>> {
    let file = match OpenOptions::new().read(true).write(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    Ok(if lock(&file)? && is_still_at(&file, path)? { Some(file) } else { None })
}

fn lock(file: &File) -> io::Result<bool> {
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// Whether the path still leads to this very file.
fn is_still_at(file: &File, path: &Path) -> io::Result<bool> {
    match Identity::of(file)?.is_at(path) {
        Ok(()) => Ok(true),
        Err(Astray::Replaced) => Ok(false),
        Err(Astray::Unseen(error)) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(Astray::Unseen(error)) => Err(error),
    }
}

/// Makes the folder, for its owner only, where there is none.
pub(super) fn make_folder(folder: &Path) -> io::Result<()> {
    let made = missing(folder);
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    // Their names must outlive a power cut as well as what is in them.
    made.into_iter().filter_map(Path::parent).try_for_each(sync_folder)
}

/// Of a folder and those that it is in, the ones that there are not, innermost first.
fn missing(folder: &Path) -> Vec<&Path> {
    let named = folder.ancestors().take_while(|ancestor| !ancestor.as_os_str().is_empty());
    named.take_while(|ancestor| !ancestor.exists()).collect()
}

fn sync_folder(folder: &Path) -> io::Result<()> {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    File::open(folder)?.sync_all()
}

/// Whether a spill could be kept in this folder: tried out, and nothing of it is left.
pub(super) fn probe(folder: &Path) -> io::Result<()> {
    let made = missing(folder);
    let tried = OwnFile::create(folder).map(|held| Box::new(held).remove());
    for ancestor in made {
        // One that is in use by now stays.
        if std::fs::remove_dir(ancestor).is_err() {
            break;
        }
    }
    tried
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().mode() & 0o777
    }

    #[test]
    fn a_file_is_its_owners_alone_and_is_taken_over_only_when_it_is_let_go() {
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().join("a/spill");
        let held = OwnFile::create(&folder).unwrap();
        let path = held.path().to_owned();
        assert_eq!((mode(&folder), mode(&path)), (0o700, 0o600));
        assert!(take_over(&path).unwrap().is_none(), "its holder lives");
        drop(held);
        let taken = take_over(&path).unwrap().unwrap();
        assert!(take_over(&path).unwrap().is_none(), "one takes it");
        std::fs::remove_file(&path).unwrap();
        drop(taken);
        assert!(take_over(&path).unwrap().is_none(), "it is gone");
    }

    #[test]
    fn a_file_that_is_taken_away_goes_on_in_a_new_one_that_is_locked_as_the_old_one_was() {
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().join("spill");
        let mut held = OwnFile::create(&folder).unwrap();
        held.write(b"head-one-two-rest", 0).unwrap();
        held.check_path().unwrap();
        let old = held.path().to_owned();
        let taken_away = home.path().join("elsewhere");
        std::fs::rename(&folder, &taken_away).unwrap();
        assert!(matches!(held.check_path(), Err(Astray::Unseen(_))));
        let old_elsewhere = taken_away.join(old.file_name().unwrap());
        assert!(take_over(&old_elsewhere).unwrap().is_none(), "it is in use until it is copied");

        held.renew(b"HEAD", 12).unwrap();
        held.check_path().unwrap();
        assert_ne!(held.path(), old);
        assert_eq!(std::fs::read(held.path()).unwrap(), b"HEAD-one-two");
        assert_eq!((mode(&folder), mode(held.path())), (0o700, 0o600));
        assert!(take_over(held.path()).unwrap().is_none(), "its holder lives");
        assert!(take_over(&old_elsewhere).unwrap().is_some(), "what was let go is anybody's");

        std::fs::write(home.path().join("theirs"), "theirs").unwrap();
        std::fs::rename(home.path().join("theirs"), held.path()).unwrap();
        assert!(matches!(held.check_path(), Err(Astray::Replaced)));
        let path = held.path().to_owned();
        Box::new(held).remove();
        assert_eq!(std::fs::read(path).unwrap(), b"theirs", "it is not ours to remove");
    }

    #[test]
    fn where_no_new_file_can_be_made_the_old_one_is_held_and_nothing_new_is_left() {
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().join("volume/spill");
        let mut held = OwnFile::create(&folder).unwrap();
        held.write(b"head-one", 0).unwrap();
        std::fs::remove_dir_all(home.path().join("volume")).unwrap();
        std::fs::write(home.path().join("volume"), "").unwrap();
        assert!(held.renew(b"head", 8).is_err());
        std::fs::remove_file(home.path().join("volume")).unwrap();
        assert!(held.renew(b"head", 9).is_err(), "there is not so much to copy");
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
        held.renew(b"head", 8).unwrap();
        assert_eq!(std::fs::read(held.path()).unwrap(), b"head-one");
    }

    #[test]
    fn a_probe_finds_an_unwritable_folder_and_leaves_nothing_behind() {
        let home = tempfile::tempdir().unwrap();
        probe(&home.path().join("a/b/c")).unwrap();
        probe(home.path()).unwrap();
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0);
        std::fs::write(home.path().join("file"), "").unwrap();
        assert!(probe(&home.path().join("file/spill")).is_err());
    }
}
