//! Which file a path leads to. A file that is removed, renamed or replaced is gone for whoever comes next, while who has opened
//! it goes on writing without an error: so what must be found later asks here.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// A file, under whatever name. No other file gets the same identity while this one is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    device: u64,
    inode: u64,
}

/// A path does not lead to the file that it should lead to.
#[derive(Debug, thiserror::Error)]
pub enum Astray {
    /// It leads to another one.
    #[error("another file stands in its place")]
    Replaced,
    /// It leads to none, or nobody can see where it leads.
    #[error(transparent)]
    Unseen(#[from] io::Error),
}

impl Identity {
    /// Of a file that is open.
    ///
    /// # Errors
    /// Where the system does not tell.
    pub fn of(file: &File) -> io::Result<Self> {
        file.metadata().map(|found| Self::in_metadata(&found))
    }

    /// Of the file that a path leads to.
    ///
    /// # Errors
    /// Where it leads to none, or the system does not tell.
    pub fn at(path: &Path) -> io::Result<Self> {
        std::fs::metadata(path).map(|found| Self::in_metadata(&found))
    }

    /// Whether a path leads to this file.
    ///
    /// # Errors
    /// [`Astray`].
    pub fn is_at(self, path: &Path) -> Result<(), Astray> {
        if Self::at(path)? == self { Ok(()) } else { Err(Astray::Replaced) }
    }

    fn in_metadata(found: &Metadata) -> Self {
        Self { device: found.dev(), inode: found.ino() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_leads_to_its_file_until_that_is_removed_renamed_or_replaced() {
        let home = tempfile::tempdir().unwrap();
        let [path, other] = ["a", "b"].map(|name| home.path().join(name));
        let file = File::create(&path).unwrap();
        let held = Identity::of(&file).unwrap();
        held.is_at(&path).unwrap();
        std::fs::rename(&path, &other).unwrap();
        assert!(matches!(held.is_at(&path), Err(Astray::Unseen(_))));
        held.is_at(&other).unwrap();
        std::fs::write(&path, "").unwrap();
        assert!(matches!(held.is_at(&path), Err(Astray::Replaced)));
        std::fs::remove_file(&other).unwrap();
        std::fs::write(&other, "").unwrap();
        assert!(matches!(held.is_at(&other), Err(Astray::Replaced)), "its inode is in use still");
    }
}
