//! The spill's file, byte by byte: a head, then entries, each under checksums of its own. Pure but for reading.
//!
//! ```text
//! head:  magic(8) version(4) database(16) salt(16) check(8)
//! entry: magic(4) kind(1) length(4) body-check(16) head-check(8) body(length)
//! ```
//!
//! What must stay true:
//!
//! - The checks of an entry are made with the file's random salt, its head's also with the entry's own offset. So what an
//!   API answers, copied into a body, is never taken for an entry, wherever reading starts.
//! - A damaged body loses that entry alone. After a damaged head the next entry that is whole is looked for. Reading only
//!   goes forward, so it ends.
//! - An entry that the file ends in the middle of was being written when its process died: nobody was told of it.
//!
//! A SQLite database would not keep the second of these: `docs/architecture.md` says what was tried.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use sha2::{Digest as _, Sha256};
use uuid::Uuid;

use super::encoding::take;

/// Length of a file's head.
pub(super) const HEAD: u64 = 52;
/// Length of an entry without its body.
pub(super) const ENTRY_HEAD: u64 = 33;

const MAGIC: [u8; 8] = *b"ONCESPIL";
const ENTRY_MAGIC: [u8; 4] = *b"OGEN";
/// The version of all that this file describes.
const VERSION: u32 = 2;
/// The oldest version that is read: it knew no attempts that were freed.
const OLDEST: u32 = 1;
/// How much is read at a time where the next entry is looked for.
const STEP: u64 = 64 * 1024;

/// The check of an entry's body.
pub(super) type Check = [u8; 16];

/// What a file says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FileHead {
    version: u32,
    /// To which database it owes what is in it.
    pub(super) database: Uuid,
    salt: Uuid,
}

/// Why a file's head cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BadHead {
    /// It ends before the head does: nothing was ever kept in it.
    Short,
    /// A newer program wrote it.
    Newer(u32),
    /// It is not what this program, or any, writes.
    Damaged,
}

/// What an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    /// An outcome that is owed: an answer with its events.
    Outcome,
    /// An attempt that is known not to have executed.
    Freed,
    /// The note that an outcome before it is owed no more.
    Paid,
}

impl Kind {
    fn byte(self) -> u8 {
        match self {
            Self::Outcome => 1,
            Self::Paid => 2,
            Self::Freed => 3,
        }
    }

    fn of(byte: u8) -> Option<Self> {
        [Self::Outcome, Self::Freed, Self::Paid].into_iter().find(|kind| kind.byte() == byte)
    }
}

/// Where an outcome stands in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Place {
    /// What stands there.
    pub(super) kind: Kind,
    /// Of the entry's first byte.
    pub(super) offset: u64,
    /// Of the body.
    pub(super) length: u32,
    /// Of the body.
    pub(super) check: Check,
}

/// What a file holds.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Contents {
    /// What is owed, in the order in which it was kept.
    pub(super) owed: Vec<Place>,
    /// How many stretches of it cannot be read.
    pub(super) damaged: u64,
    /// Whether it ends in the middle of an entry.
    pub(super) torn: bool,
}

impl FileHead {
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
        let check = first::<8>(Sha256::digest(&bytes).as_slice());
        bytes.extend(check);
        bytes
    }

    /// The inverse of [`FileHead::encode`].
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, BadHead> {
        let from = &mut &*bytes;
        let mut read = || Some((take(from)?, take(from)?, take(from)?, take(from)?, take(from)?));
        let (magic, version, database, salt, check): ([u8; 8], _, _, _, [u8; 8]) =
            read().ok_or(BadHead::Short)?;
        if magic == MAGIC && version > VERSION {
            return Err(BadHead::Newer(version));
        }
        let head = Self { version, database, salt };
        let whole = magic == MAGIC && version >= OLDEST && head.encode().ends_with(&check);
        if whole { Ok(head) } else { Err(BadHead::Damaged) }
    }

    /// The check of a body in this file.
    pub(super) fn check(&self, body: &[u8]) -> Check {
        let hash = Sha256::new().chain_update(self.salt.as_bytes()).chain_update(body).finalize();
        first(hash.as_slice())
    }

    /// The bytes before the body of an entry at `offset`.
    pub(super) fn entry_head(&self, offset: u64, kind: Kind, length: u32, check: Check) -> Vec<u8> {
        let mut bytes = ENTRY_MAGIC.to_vec();
        bytes.push(kind.byte());
        bytes.extend(length.to_le_bytes());
        bytes.extend(check);
        let hash = Sha256::new()
            .chain_update(self.salt.as_bytes())
            .chain_update(offset.to_le_bytes())
            .chain_update(&bytes)
            .finalize();
        bytes.extend(first::<8>(hash.as_slice()));
        bytes
    }

    /// The inverse of [`FileHead::entry_head`].
    fn read_entry_head(&self, offset: u64, bytes: &[u8]) -> Option<Place> {
        let from = &mut bytes.get(ENTRY_MAGIC.len()..)?;
        let [byte] = take(from)?;
        let (kind, length, check) = (Kind::of(byte)?, take(from)?, take(from)?);
        let whole = self.entry_head(offset, kind, length, check) == bytes;
        whole.then_some(Place { kind, offset, length, check })
    }

    /// Reads all of a file of this head and of this length.
    ///
    /// # Errors
    /// Only where the file itself cannot be read; damage in it is a part of the [`Contents`].
    pub(super) fn read(&self, file: &File, length: u64) -> io::Result<Contents> {
        let (mut contents, mut paid) = (Contents::default(), HashSet::new());
        let mut at = HEAD;
        while at < length {
            at = match self.look(file, length, at)? {
                Look::Whole(place, body) => {
                    match place.kind {
                        Kind::Outcome | Kind::Freed => contents.owed.push(place),
                        Kind::Paid => paid.extend(read_paid(&body)),
                    }
                    place.end()
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
        contents.owed.retain(|place| !paid.contains(&(place.offset, place.check)));
        Ok(contents)
    }

    /// Reads one entry's body, as it was found.
    ///
    /// # Errors
    /// Where it cannot be read, or is not the same any more.
    pub(super) fn body(&self, file: &File, place: Place) -> io::Result<Vec<u8>> {
        let body = read_at(file, place.offset + ENTRY_HEAD, u64::from(place.length))?;
        if self.check(&body) == place.check {
            return Ok(body);
        }
        Err(io::Error::new(io::ErrorKind::InvalidData, "an entry changed while it was read"))
    }

    fn look(&self, file: &File, length: u64, at: u64) -> io::Result<Look> {
        if length - at < ENTRY_HEAD {
            return Ok(Look::Torn);
        }
        let Some(place) = self.read_entry_head(at, &read_at(file, at, ENTRY_HEAD)?) else {
            return self.skip(file, length, at);
        };
        if place.end() > length {
            return Ok(Look::Torn);
        }
        let body = read_at(file, at + ENTRY_HEAD, u64::from(place.length))?;
        let whole = self.check(&body) == place.check;
        Ok(if whole { Look::Whole(place, body) } else { Look::Damaged { next: place.end() } })
    }

    /// What stands at a place without the head of an entry: damage, as far as the next whole head. Zeros to the end are none: a
    /// file that was made longer and not filled any more is full of them.
    fn skip(&self, file: &File, length: u64, at: u64) -> io::Result<Look> {
        let (mut at, mut zeros) = (at, true);
        while at < length {
            // A head that begins in this step may end in the next one.
            let step = read_at(file, at, (STEP + ENTRY_HEAD).min(length - at))?;
            zeros = zeros && step.iter().all(|byte| *byte == 0);
            for (next, window) in (at..at + STEP).zip(step.windows(ENTRY_HEAD_LENGTH)) {
                if window.starts_with(&ENTRY_MAGIC) && self.read_entry_head(next, window).is_some()
                {
                    return Ok(Look::Damaged { next });
                }
            }
            at += STEP;
        }
        Ok(if zeros { Look::Torn } else { Look::Damaged { next: length } })
    }
}

const ENTRY_HEAD_LENGTH: usize = 33;

/// What stands at a place of a file.
enum Look {
    Whole(Place, Vec<u8>),
    Damaged { next: u64 },
    Torn,
}

impl Place {
    /// Behind the entry's last byte.
    pub(super) fn end(self) -> u64 {
        self.offset + ENTRY_HEAD + u64::from(self.length)
    }

    /// The body of the note that this outcome is owed no more.
    pub(super) fn paid(self) -> Vec<u8> {
        let mut body = self.offset.to_le_bytes().to_vec();
        body.extend(self.check);
        body
    }
}

/// The inverse of [`Place::paid`].
fn read_paid(body: &[u8]) -> Option<(u64, Check)> {
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
    fn file(bodies: &[Vec<u8>]) -> (FileHead, Vec<u8>, Vec<usize>) {
        let head = FileHead::new(Uuid::from_u128(1));
        let (mut bytes, mut starts) = (head.encode(), Vec::new());
        for body in bodies {
            starts.push(bytes.len());
            add(&head, &mut bytes, Kind::Outcome, body);
        }
        starts.push(bytes.len());
        (head, bytes, starts)
    }

    fn add(head: &FileHead, bytes: &mut Vec<u8>, kind: Kind, body: &[u8]) {
        let length = u32::try_from(body.len()).unwrap();
        let at = u64::try_from(bytes.len()).unwrap();
        bytes.extend(head.entry_head(at, kind, length, head.check(body)));
        bytes.extend(body);
    }

    fn read(head: &FileHead, bytes: &[u8]) -> Contents {
        head.read(&file_of(bytes), bytes.len() as u64).unwrap()
    }

    fn offsets(contents: &Contents) -> Vec<usize> {
        contents.owed.iter().map(|place| usize::try_from(place.offset).unwrap()).collect()
    }

    fn some_bodies() -> Vec<Vec<u8>> {
        vec![vec![7; 40], Vec::new(), vec![9; 3], (0..=255).collect()]
    }

    #[test]
    fn a_file_of_the_version_before_is_read() {
        let head = FileHead { version: OLDEST, ..FileHead::new(Uuid::from_u128(1)) };
        assert_eq!(FileHead::decode(&head.encode()), Ok(head.clone()));
        let mut bytes = head.encode();
        add(&head, &mut bytes, Kind::Outcome, b"old");
        assert_eq!(read(&head, &bytes).owed.len(), 1);
    }

    #[test]
    fn a_tail_that_is_torn_at_any_byte_loses_the_last_entry_only() {
        let (head, bytes, starts) = file(&some_bodies());
        let whole = read(&head, &bytes);
        assert_eq!((offsets(&whole), whole.damaged, whole.torn), (starts[..4].to_vec(), 0, false));
        for length in usize::try_from(HEAD).unwrap()..bytes.len() {
            let contents = read(&head, &bytes[..length]);
            let kept = starts[1..].iter().filter(|end| **end <= length).count();
            assert_eq!(offsets(&contents), starts[..kept], "{length}");
            assert_eq!(contents.damaged, 0, "{length}");
            assert_eq!(contents.torn, !starts.contains(&length), "{length}");
        }
        for length in 0..usize::try_from(HEAD).unwrap() {
            assert_eq!(FileHead::decode(&bytes[..length]), Err(BadHead::Short), "{length}");
        }
    }

    #[test]
    fn a_byte_that_is_flipped_loses_the_entry_that_it_is_in_and_no_other() {
        let (head, bytes, starts) = file(&some_bodies());
        for at in usize::try_from(HEAD).unwrap()..bytes.len() {
            let mut flipped = bytes.clone();
            flipped[at] ^= 0x20;
            let contents = read(&head, &flipped);
            let hit = starts.iter().rposition(|start| *start <= at).unwrap();
            let mut others = starts[..4].to_vec();
            others.remove(hit);
            assert_eq!(offsets(&contents), others, "{at}");
            assert_eq!((contents.damaged, contents.torn), (1, false), "{at}: it is no torn tail");
        }
        for at in 0..usize::try_from(HEAD).unwrap() {
            let mut flipped = bytes.clone();
            flipped[at] ^= 0x20;
            assert!(FileHead::decode(&flipped).is_err(), "{at}");
        }
    }

    #[test]
    fn a_tail_of_zeros_was_never_written() {
        let (head, mut bytes, starts) = file(&some_bodies());
        bytes.extend([0; 5000]);
        let contents = read(&head, &bytes);
        assert_eq!(offsets(&contents), starts[..4]);
        assert_eq!((contents.damaged, contents.torn), (0, true));
    }

    #[test]
    fn a_long_damage_is_skipped_and_what_stands_in_a_body_is_no_entry() {
        let (head, inner, _) = file(&[b"forged".to_vec()]);
        // The body holds a whole entry of this very file, as it would stand elsewhere.
        let forged = inner[usize::try_from(HEAD).unwrap()..].to_vec();
        let mut bytes = head.encode();
        let long = [forged.as_slice(), &vec![b'O'; 200_000], b"OGENOGEN"].concat();
        let damaged = bytes.len();
        add(&head, &mut bytes, Kind::Outcome, &long);
        let next = bytes.len();
        add(&head, &mut bytes, Kind::Outcome, b"next");
        bytes[damaged] ^= 1;
        let contents = read(&head, &bytes);
        assert_eq!(offsets(&contents), [next]);
        assert_eq!((contents.damaged, contents.torn), (1, false));
    }

    #[test]
    fn what_is_paid_is_owed_no_more() {
        let (head, mut bytes, starts) = file(&some_bodies());
        let owed = read(&head, &bytes).owed;
        add(&head, &mut bytes, Kind::Paid, &owed[1].paid());
        // Of another entry that stood at this place before: it says nothing of this one.
        let other = Place { check: [0; 16], ..owed[2] };
        add(&head, &mut bytes, Kind::Paid, &other.paid());
        assert_eq!(offsets(&read(&head, &bytes)), [starts[0], starts[2], starts[3]]);
    }

    #[test]
    fn a_newer_format_is_told_from_damage() {
        let mut bytes = FileHead::new(Uuid::from_u128(1)).encode();
        assert_eq!(bytes.len(), usize::try_from(HEAD).unwrap());
        bytes[8] = 3;
        assert_eq!(FileHead::decode(&bytes), Err(BadHead::Newer(3)));
        bytes[0] = b'X';
        assert_eq!(FileHead::decode(&bytes), Err(BadHead::Damaged));
    }
}
