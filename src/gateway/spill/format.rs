//! The spill's file, byte by byte: a header, then entries, each under checksums of its own. Pure but for reading.
//!
//! ```text
//! header: magic(8) version(4) database(16) salt(16) checksum(8)
//! entry:  magic(4) kind(1) length(4) body-checksum(16) header-checksum(8) body(length)
//! ```
//!
//! What must stay true:
//!
//! - The checksums of an entry are made with the file's random salt, its header's also with the entry's own offset. So what an
//!   API answers, copied into a body, is never taken for an entry, wherever reading starts.
//! - A damaged body loses that entry alone. After a damaged header the next entry that is whole is looked for. Reading only
//!   goes forward, so it ends.
//! - An entry that the file ends in the middle of was being written when its process died: it was confirmed to nobody.
//!
//! A SQLite database would not keep the second of these: `docs/architecture.md` says what was tried.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use sha2::{Digest as _, Sha256};
use uuid::Uuid;

use super::encoding::take;

/// Length of a file's header.
pub(super) const HEADER: u64 = 52;
/// Length of an entry without its body.
pub(super) const ENTRY_HEADER: u64 = 33;

const MAGIC: [u8; 8] = *b"ONCESPIL";
const ENTRY_MAGIC: [u8; 4] = *b"OGEN";
/// The version of all that this file describes.
const VERSION: u32 = 2;
/// The oldest version that is read: it knew no attempts that were freed.
const OLDEST: u32 = 1;
/// How much is read at a time where the next entry is looked for.
const CHUNK: u64 = 64 * 1024;

/// The checksum of an entry's body.
pub(super) type Checksum = [u8; 16];

/// What a file says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FileHeader {
    version: u32,
    /// The database that its entries are for.
    pub(super) database: Uuid,
    salt: Uuid,
}

/// Why a file's header cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BadHeader {
    /// It ends before the header does: nothing was ever kept in it.
    Short,
    /// A newer program wrote it.
    Newer(u32),
    /// It is not what this program, or any, writes.
    Damaged,
}

/// What an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    /// An outcome that is pending: an answer with its events.
    Outcome,
    /// An attempt that is known not to have executed.
    Freed,
    /// Marks an entry before it as no longer pending.
    Tombstone,
}

impl Kind {
    fn byte(self) -> u8 {
        match self {
            Self::Outcome => 1,
            Self::Tombstone => 2,
            Self::Freed => 3,
        }
    }

    fn of(byte: u8) -> Option<Self> {
        [Self::Outcome, Self::Freed, Self::Tombstone].into_iter().find(|kind| kind.byte() == byte)
    }
}

/// Where an outcome stands in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Entry {
    /// What stands there.
    pub(super) kind: Kind,
    /// Of the entry's first byte.
    pub(super) offset: u64,
    /// Of the body.
    pub(super) length: u32,
    /// Of the body.
    pub(super) checksum: Checksum,
}

/// What a file holds.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Contents {
    /// What is pending, in the order in which it was written.
    pub(super) pending: Vec<Entry>,
    /// How many stretches of it cannot be read.
    pub(super) damaged: u64,
    /// Whether it ends in the middle of an entry.
    pub(super) torn: bool,
}

impl FileHeader {
    /// For a new file.
    pub(super) fn new(database: Uuid) -> Self {
        Self { version: VERSION, database, salt: Uuid::new_v4() }
    }

    /// The file's first bytes.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(self.database.as_bytes());
        bytes.extend(self.salt.as_bytes());
        let checksum = first::<8>(Sha256::digest(&bytes).as_slice());
        bytes.extend(checksum);
        bytes
    }

    /// The inverse of [`FileHeader::encode`].
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, BadHeader> {
        let from = &mut &*bytes;
        let mut read = || Some((take(from)?, take(from)?, take(from)?, take(from)?, take(from)?));
        let (magic, version, database, salt, checksum): ([u8; 8], _, _, _, [u8; 8]) =
            read().ok_or(BadHeader::Short)?;
        if magic == MAGIC && version > VERSION {
            return Err(BadHeader::Newer(version));
        }
        let header = Self { version, database, salt };
        let whole = magic == MAGIC && version >= OLDEST && header.encode().ends_with(&checksum);
        if whole { Ok(header) } else { Err(BadHeader::Damaged) }
    }

    /// The checksum of a body in this file.
    pub(super) fn checksum(&self, body: &[u8]) -> Checksum {
        let hash = Sha256::new().chain_update(self.salt.as_bytes()).chain_update(body).finalize();
        first(hash.as_slice())
    }

    /// The bytes before the body of an entry at `offset`.
    pub(super) fn entry_header(
        &self,
        offset: u64,
        kind: Kind,
        length: u32,
        checksum: Checksum,
    ) -> Vec<u8> {
        let mut bytes = ENTRY_MAGIC.to_vec();
        bytes.push(kind.byte());
        bytes.extend(length.to_le_bytes());
        bytes.extend(checksum);
        let hash = Sha256::new()
            .chain_update(self.salt.as_bytes())
            .chain_update(offset.to_le_bytes())
            .chain_update(&bytes)
            .finalize();
        bytes.extend(first::<8>(hash.as_slice()));
        bytes
    }

    /// The inverse of [`FileHeader::entry_header`].
    fn read_entry_header(&self, offset: u64, bytes: &[u8]) -> Option<Entry> {
        let from = &mut bytes.get(ENTRY_MAGIC.len()..)?;
        let [byte] = take(from)?;
        let (kind, length, checksum) = (Kind::of(byte)?, take(from)?, take(from)?);
        let whole = self.entry_header(offset, kind, length, checksum) == bytes;
        whole.then_some(Entry { kind, offset, length, checksum })
    }

    /// Reads all of a file of this header and of this length.
    ///
    /// # Errors
    /// Only where the file itself cannot be read; damage in it is a part of the [`Contents`].
    pub(super) fn read(&self, file: &File, length: u64) -> io::Result<Contents> {
        let (mut contents, mut removed) = (Contents::default(), HashSet::new());
        let mut at = HEADER;
        while at < length {
            at = match self.look(file, length, at)? {
                Look::Whole(entry, body) => {
                    match entry.kind {
                        Kind::Outcome | Kind::Freed => contents.pending.push(entry),
                        Kind::Tombstone => removed.extend(read_tombstone(&body)),
                    }
                    entry.end()
                }
                Look::Damaged { next } => {
                    contents.damaged += 1;
                    next
                }
                Look::Torn => {
                    contents.torn = true;
                    length
                }
            };
        }
        contents.pending.retain(|entry| !removed.contains(&(entry.offset, entry.checksum)));
        Ok(contents)
    }

    /// Reads one entry's body, as it was found.
    ///
    /// # Errors
    /// Where it cannot be read, or is not the same any more.
    pub(super) fn body(&self, file: &File, entry: Entry) -> io::Result<Vec<u8>> {
        let body = read_at(file, entry.offset + ENTRY_HEADER, u64::from(entry.length))?;
        if self.checksum(&body) == entry.checksum {
            return Ok(body);
        }
        Err(io::Error::new(io::ErrorKind::InvalidData, "an entry changed while it was read"))
    }

    fn look(&self, file: &File, length: u64, at: u64) -> io::Result<Look> {
        if length - at < ENTRY_HEADER {
            return Ok(Look::Torn);
        }
        let Some(entry) = self.read_entry_header(at, &read_at(file, at, ENTRY_HEADER)?) else {
            return self.skip(file, length, at);
        };
        if entry.end() > length {
            return Ok(Look::Torn);
        }
        let body = read_at(file, at + ENTRY_HEADER, u64::from(entry.length))?;
        let whole = self.checksum(&body) == entry.checksum;
        Ok(if whole { Look::Whole(entry, body) } else { Look::Damaged { next: entry.end() } })
    }

    /// What stands where the header of an entry should be: damage, as far as the next whole header. Zeros to the end are none:
    /// a file that was made longer and not filled any more is full of them.
    fn skip(&self, file: &File, length: u64, at: u64) -> io::Result<Look> {
        let (mut at, mut zeros) = (at, true);
        while at < length {
            // A header that begins in this step may end in the next one.
            let step = read_at(file, at, (CHUNK + ENTRY_HEADER).min(length - at))?;
            zeros = zeros && step.iter().all(|byte| *byte == 0);
            for (next, window) in (at..at + CHUNK).zip(step.windows(ENTRY_HEADER_LENGTH)) {
                if window.starts_with(&ENTRY_MAGIC)
                    && self.read_entry_header(next, window).is_some()
                {
                    return Ok(Look::Damaged { next });
                }
            }
            at += CHUNK;
        }
        Ok(if zeros { Look::Torn } else { Look::Damaged { next: length } })
    }
}

const ENTRY_HEADER_LENGTH: usize = 33;

/// What stands at an offset of a file.
enum Look {
    Whole(Entry, Vec<u8>),
    Damaged { next: u64 },
    Torn,
}

impl Entry {
    /// Behind the entry's last byte.
    pub(super) fn end(self) -> u64 {
        self.offset + ENTRY_HEADER + u64::from(self.length)
    }

    /// The body of the tombstone of this entry.
    pub(super) fn tombstone(self) -> Vec<u8> {
        let mut body = self.offset.to_le_bytes().to_vec();
        body.extend(self.checksum);
        body
    }
}

/// The inverse of [`Entry::tombstone`].
fn read_tombstone(body: &[u8]) -> Option<(u64, Checksum)> {
    let from = &mut &*body;
    Some((take(from)?, take(from)?))
}

/// Bytes of a file, which must be there.
pub(super) fn read_at(file: &File, offset: u64, length: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(length).map_err(io::Error::other)?];
    file.read_exact_at(&mut bytes, offset)?;
    Ok(bytes)
}

/// The first bytes of a hash.
fn first<const N: usize>(hash: &[u8]) -> [u8; N] {
    hash.first_chunk().copied().unwrap_or([0; N])
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    /// A file of these bytes.
    fn file_of(bytes: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    /// A file of these bodies, with where each entry begins, and where the file ends.
    fn file(bodies: &[Vec<u8>]) -> (FileHeader, Vec<u8>, Vec<usize>) {
        let header = FileHeader::new(Uuid::from_u128(1));
        let (mut bytes, mut starts) = (header.encode(), Vec::new());
        for body in bodies {
            starts.push(bytes.len());
            add(&header, &mut bytes, Kind::Outcome, body);
        }
        starts.push(bytes.len());
        (header, bytes, starts)
    }

    fn add(header: &FileHeader, bytes: &mut Vec<u8>, kind: Kind, body: &[u8]) {
        let length = u32::try_from(body.len()).unwrap();
        let at = u64::try_from(bytes.len()).unwrap();
        bytes.extend(header.entry_header(at, kind, length, header.checksum(body)));
        bytes.extend(body);
    }

    fn read(header: &FileHeader, bytes: &[u8]) -> Contents {
        header.read(&file_of(bytes), bytes.len() as u64).unwrap()
    }

    fn offsets(contents: &Contents) -> Vec<usize> {
        contents.pending.iter().map(|entry| usize::try_from(entry.offset).unwrap()).collect()
    }

    fn some_bodies() -> Vec<Vec<u8>> {
        vec![vec![7; 40], Vec::new(), vec![9; 3], (0..=255).collect()]
    }

    #[test]
    fn a_file_of_the_version_before_is_read() {
        let header = FileHeader { version: OLDEST, ..FileHeader::new(Uuid::from_u128(1)) };
        assert_eq!(FileHeader::decode(&header.encode()), Ok(header.clone()));
        let mut bytes = header.encode();
        add(&header, &mut bytes, Kind::Outcome, b"old");
        assert_eq!(read(&header, &bytes).pending.len(), 1);
    }

    #[test]
    fn a_tail_that_is_torn_at_any_byte_loses_the_last_entry_only() {
        let (header, bytes, starts) = file(&some_bodies());
        let whole = read(&header, &bytes);
        assert_eq!((offsets(&whole), whole.damaged, whole.torn), (starts[..4].to_vec(), 0, false));
        for length in usize::try_from(HEADER).unwrap()..bytes.len() {
            let contents = read(&header, &bytes[..length]);
            let kept = starts[1..].iter().filter(|end| **end <= length).count();
            assert_eq!(offsets(&contents), starts[..kept], "{length}");
            assert_eq!(contents.damaged, 0, "{length}");
            assert_eq!(contents.torn, !starts.contains(&length), "{length}");
        }
        for length in 0..usize::try_from(HEADER).unwrap() {
            assert_eq!(FileHeader::decode(&bytes[..length]), Err(BadHeader::Short), "{length}");
        }
    }

    #[test]
    fn a_byte_that_is_flipped_loses_the_entry_that_it_is_in_and_no_other() {
        let (header, bytes, starts) = file(&some_bodies());
        for at in usize::try_from(HEADER).unwrap()..bytes.len() {
            let mut flipped = bytes.clone();
            flipped[at] ^= 0x20;
            let contents = read(&header, &flipped);
            let hit = starts.iter().rposition(|start| *start <= at).unwrap();
            let mut others = starts[..4].to_vec();
            others.remove(hit);
            assert_eq!(offsets(&contents), others, "{at}");
            assert_eq!((contents.damaged, contents.torn), (1, false), "{at}: it is no torn tail");
        }
        for at in 0..usize::try_from(HEADER).unwrap() {
            let mut flipped = bytes.clone();
            flipped[at] ^= 0x20;
            assert!(FileHeader::decode(&flipped).is_err(), "{at}");
        }
    }

    #[test]
    fn a_tail_of_zeros_was_never_written() {
        let (header, mut bytes, starts) = file(&some_bodies());
        bytes.extend([0; 5000]);
        let contents = read(&header, &bytes);
        assert_eq!(offsets(&contents), starts[..4]);
        assert_eq!((contents.damaged, contents.torn), (0, true));
    }

    #[test]
    fn a_long_damage_is_skipped_and_an_entry_within_a_body_is_none() {
        let (header, inner, _) = file(&[b"forged".to_vec()]);
        // The body holds a whole entry of this very file, as it would stand elsewhere.
        let forged = inner[usize::try_from(HEADER).unwrap()..].to_vec();
        let mut bytes = header.encode();
        let long = [forged.as_slice(), &vec![b'O'; 200_000], b"OGENOGEN"].concat();
        let damaged = bytes.len();
        add(&header, &mut bytes, Kind::Outcome, &long);
        let next = bytes.len();
        add(&header, &mut bytes, Kind::Outcome, b"next");
        bytes[damaged] ^= 1;
        let contents = read(&header, &bytes);
        assert_eq!(offsets(&contents), [next]);
        assert_eq!((contents.damaged, contents.torn), (1, false));
    }

    #[test]
    fn a_tombstone_removes_its_own_entry_and_no_other() {
        let (header, mut bytes, starts) = file(&some_bodies());
        let pending = read(&header, &bytes).pending;
        add(&header, &mut bytes, Kind::Tombstone, &pending[1].tombstone());
        // Of another entry that stood at this offset before: it says nothing of this one.
        let other = Entry { checksum: [0; 16], ..pending[2] };
        add(&header, &mut bytes, Kind::Tombstone, &other.tombstone());
        assert_eq!(offsets(&read(&header, &bytes)), [starts[0], starts[2], starts[3]]);
    }

    #[test]
    fn a_newer_format_is_told_from_damage() {
        let mut bytes = FileHeader::new(Uuid::from_u128(1)).encode();
        assert_eq!(bytes.len(), usize::try_from(HEADER).unwrap());
        bytes[8] = 3;
        assert_eq!(FileHeader::decode(&bytes), Err(BadHeader::Newer(3)));
        bytes[0] = b'X';
        assert_eq!(FileHeader::decode(&bytes), Err(BadHeader::Damaged));
    }
}
