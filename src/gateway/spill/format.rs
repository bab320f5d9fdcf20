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
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use sha2::{Digest as _, Sha256};
use uuid::Uuid;

use crate::record::event::Event;
use crate::record::{
    Answer, Attempt, Fence, Fingerprint, KeptBody, Key, Operation, Scope, Tenant, decode_headers,
    encode_headers,
};
use crate::store::Completion;

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
        let mut cursor = Cursor(bytes);
        let mut read = || {
            Some((cursor.array()?, cursor.u32()?, cursor.uuid()?, cursor.uuid()?, cursor.array()?))
        };
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
    fn read_entry_head(&self, offset: u64, bytes: &[u8]) -> Option<(Kind, Place)> {
        let mut cursor = Cursor(bytes);
        let _magic: [u8; 4] = cursor.array()?;
        let (kind, length) = (Kind::of(cursor.u8()?)?, cursor.u32()?);
        let check = cursor.array()?;
        let whole = self.entry_head(offset, kind, length, check) == bytes;
        whole.then_some((kind, Place { kind, offset, length, check }))
    }

    /// Reads all of a file of this head and of this length.
    ///
    /// # Errors
    /// Only where the file itself cannot be read; damage in it is a part of the [`Contents`].
    pub(super) fn read(&self, file: &impl ReadAt, length: u64) -> io::Result<Contents> {
        let (mut contents, mut paid) = (Contents::default(), HashSet::new());
        let mut at = HEAD;
        while at < length {
            at = match self.look(file, length, at)? {
                Look::Whole(Kind::Outcome | Kind::Freed, place, _) => {
                    contents.owed.push(place);
                    place.end()
                }
                Look::Whole(Kind::Paid, place, body) => {
                    paid.extend(read_paid(&body));
                    place.end()
                }
                Look::BadBody(place) => {
                    contents.damaged += 1;
                    place.end()
                }
                Look::Torn => {
                    contents.torn = true;
                    length
                }
                Look::BadHead => match self.next_whole(file, length, at + 1)? {
                    Some(next) => {
                        contents.damaged += 1;
                        next
                    }
                    // A file that was made longer and not filled any more is full of zeros.
                    None if only_zeros(file, length, at)? => {
                        contents.torn = true;
                        length
                    }
                    None => {
                        contents.damaged += 1;
                        length
                    }
                },
            };
        }
        contents.owed.retain(|place| !paid.contains(&(place.offset, place.check)));
        Ok(contents)
    }

    /// Reads one entry's body, as it was found.
    ///
    /// # Errors
    /// Where it cannot be read, or is not the same any more.
    pub(super) fn body(&self, file: &impl ReadAt, place: Place) -> io::Result<Vec<u8>> {
        let body = read_at(file, place.offset + ENTRY_HEAD, u64::from(place.length))?;
        if self.check(&body) == place.check {
            return Ok(body);
        }
        Err(io::Error::new(io::ErrorKind::InvalidData, "an entry changed while it was read"))
    }

    fn look(&self, file: &impl ReadAt, length: u64, at: u64) -> io::Result<Look> {
        if length - at < ENTRY_HEAD {
            return Ok(Look::Torn);
        }
        let head = read_at(file, at, ENTRY_HEAD)?;
        let Some((kind, place)) = self.read_entry_head(at, &head) else { return Ok(Look::BadHead) };
        if place.end() > length {
            return Ok(Look::Torn);
        }
        let body = read_at(file, at + ENTRY_HEAD, u64::from(place.length))?;
        let whole = self.check(&body) == place.check;
        Ok(if whole { Look::Whole(kind, place, body) } else { Look::BadBody(place) })
    }

    /// The next place from `at` on where an entry's head is whole.
    fn next_whole(&self, file: &impl ReadAt, length: u64, at: u64) -> io::Result<Option<u64>> {
        let mut at = at;
        while at < length {
            // A head that begins in this step may end in the next one.
            let step = read_at(file, at, (STEP + ENTRY_HEAD).min(length - at))?;
            for (ahead, window) in (at..at + STEP).zip(step.windows(ENTRY_HEAD_LENGTH)) {
                if window.starts_with(&ENTRY_MAGIC) && self.read_entry_head(ahead, window).is_some()
                {
                    return Ok(Some(ahead));
                }
            }
            at += STEP;
        }
        Ok(None)
    }
}

const ENTRY_HEAD_LENGTH: usize = 33;

/// What stands at a place of a file.
enum Look {
    Whole(Kind, Place, Vec<u8>),
    BadBody(Place),
    BadHead,
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

fn read_paid(body: &[u8]) -> Option<(u64, Check)> {
    let mut cursor = Cursor(body);
    Some((cursor.u64()?, cursor.array()?))
}

/// What can be read from any place.
pub(super) trait ReadAt {
    /// Fills `buffer` from this offset on.
    fn fill(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
}

impl ReadAt for File {
    fn fill(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.read_exact_at(buffer, offset)
    }
}

fn read_at(file: &impl ReadAt, offset: u64, length: u64) -> io::Result<Vec<u8>> {
    let length = usize::try_from(length).map_err(io::Error::other)?;
    let mut bytes = vec![0; length];
    file.fill(&mut bytes, offset)?;
    Ok(bytes)
}

fn only_zeros(file: &impl ReadAt, length: u64, at: u64) -> io::Result<bool> {
    let mut at = at;
    while at < length {
        let step = read_at(file, at, STEP.min(length - at))?;
        if step.iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
        at += STEP;
    }
    Ok(true)
}

/// The first bytes of a hash.
fn first<const N: usize>(hash: &[u8]) -> [u8; N] {
    hash.first_chunk().copied().unwrap_or([0; N])
}

/// An outcome as an entry's body.
pub(in crate::gateway) fn encode(completion: &Completion, fingerprint: Fingerprint) -> Vec<u8> {
    let Completion { scope, fence, answer, retention, events } = completion;
    let mut out = Vec::new();
    put_attempt(&mut out, scope, *fence);
    out.extend(fingerprint.canonical);
    out.extend(fingerprint.raw);
    out.extend(fingerprint.recipe);
    put_answer(&mut out, answer);
    out.extend(retention.as_secs().to_le_bytes());
    out.extend(retention.subsec_nanos().to_le_bytes());
    put_count(&mut out, events.len());
    for event in events {
        let Event { id, key, kind, position, ordering_key, payload, sinks } = event;
        out.extend(id.as_bytes());
        put(&mut out, key.as_bytes());
        put(&mut out, kind.as_bytes());
        out.extend(position.to_le_bytes());
        put_some(&mut out, ordering_key.as_ref().map(String::as_bytes));
        put(&mut out, payload);
        put_count(&mut out, sinks.len());
        for sink in sinks {
            put(&mut out, sink.as_bytes());
        }
    }
    out
}

/// An attempt that is known not to have executed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NotExecuted {
    pub(super) scope: Scope,
    pub(super) fence: Fence,
    /// What the upstream said; none: not one byte was sent.
    pub(super) answer: Option<Answer>,
    /// Its record had gone on already: there is nothing to be freed, only something to be noted.
    pub(super) gone_on: bool,
}

/// An attempt that did not execute as an entry's body.
pub(super) fn encode_freed(freed: &NotExecuted) -> Vec<u8> {
    let NotExecuted { scope, fence, answer, gone_on } = freed;
    let mut out = Vec::new();
    put_attempt(&mut out, scope, *fence);
    out.push(u8::from(*gone_on));
    out.push(u8::from(answer.is_some()));
    if let Some(answer) = answer {
        put_answer(&mut out, answer);
    }
    out
}

/// The inverse of [`encode_freed`]. `None`: it is not what that makes.
pub(super) fn decode_freed(body: &[u8]) -> Option<NotExecuted> {
    let mut cursor = Cursor(body);
    let (scope, fence) = attempt(&mut cursor)?;
    let (gone_on, answered) = (cursor.u8()?, cursor.u8()?);
    let answer = match answered {
        0 => None,
        _ => Some(answer(&mut cursor)?),
    };
    let canonical = gone_on <= 1 && answered <= 1 && cursor.0.is_empty();
    canonical.then_some(NotExecuted { scope, fence, answer, gone_on: gone_on == 1 })
}

fn put_attempt(out: &mut Vec<u8>, scope: &Scope, fence: Fence) {
    out.extend(Uuid::from(fence.id).as_bytes());
    out.extend(fence.attempt.number().to_le_bytes());
    put(out, scope.tenant.as_str().as_bytes());
    put(out, scope.operation.as_str().as_bytes());
    put(out, scope.key.as_str().as_bytes());
}

fn attempt(cursor: &mut Cursor<'_>) -> Option<(Scope, Fence)> {
    let fence = Fence { id: cursor.uuid()?.into(), attempt: Attempt::from_number(cursor.u32()?) };
    let scope = Scope {
        tenant: Tenant::stored(cursor.text()?),
        operation: Operation::stored(cursor.text()?),
        key: Key::stored(cursor.text()?),
    };
    Some((scope, fence))
}

fn put_answer(out: &mut Vec<u8>, answer: &Answer) {
    let Answer { status, headers, spelling, body } = answer;
    out.extend(status.as_u16().to_le_bytes());
    put(out, &encode_headers(headers, spelling));
    match body {
        KeptBody::Whole(body) => put_some(out, Some(body)),
        KeptBody::NotRetained => put_some(out, None),
    }
}

fn answer(cursor: &mut Cursor<'_>) -> Option<Answer> {
    let status = StatusCode::from_u16(cursor.u16()?).ok()?;
    let (headers, spelling) = decode_headers(cursor.bytes()?).ok()?;
    let body = match cursor.maybe()? {
        Some(body) => KeptBody::Whole(Bytes::copy_from_slice(body)),
        None => KeptBody::NotRetained,
    };
    Some(Answer { status, headers, spelling, body })
}

/// The inverse of [`encode`]. `None`: it is not what `encode` makes.
pub(in crate::gateway) fn decode(body: &[u8]) -> Option<(Completion, Fingerprint)> {
    let mut cursor = Cursor(body);
    let (scope, fence) = attempt(&mut cursor)?;
    let fingerprint =
        Fingerprint { canonical: cursor.array()?, raw: cursor.array()?, recipe: cursor.array()? };
    let answer = answer(&mut cursor)?;
    let seconds = Duration::from_secs(cursor.u64()?);
    let retention = seconds.checked_add(Duration::from_nanos(cursor.u32()?.into()))?;
    let count = cursor.u32()?;
    let events = (0..count).map(|_| event(&mut cursor)).collect::<Option<_>>()?;
    let completion = Completion { scope, fence, answer, retention, events };
    cursor.0.is_empty().then_some((completion, fingerprint))
}

fn event(cursor: &mut Cursor<'_>) -> Option<Event> {
    Some(Event {
        id: cursor.uuid()?,
        key: cursor.text()?.to_owned(),
        kind: cursor.text()?.to_owned(),
        position: cursor.u16()?,
        ordering_key: match cursor.maybe()? {
            Some(text) => Some(std::str::from_utf8(text).ok()?.to_owned()),
            None => None,
        },
        payload: Bytes::copy_from_slice(cursor.bytes()?),
        sinks: {
            let count = cursor.u32()?;
            (0..count).map(|_| cursor.text().map(str::to_owned)).collect::<Option<_>>()?
        },
    })
}

/// A count as it is written. One that does not fit makes a body that is refused for its length.
fn put_count(out: &mut Vec<u8>, count: usize) {
    out.extend(u32::try_from(count).unwrap_or(u32::MAX).to_le_bytes());
}

fn put(out: &mut Vec<u8>, bytes: &[u8]) {
    put_count(out, bytes.len());
    out.extend(bytes);
}

fn put_some(out: &mut Vec<u8>, bytes: Option<&[u8]>) {
    out.push(u8::from(bytes.is_some()));
    if let Some(bytes) = bytes {
        put(out, bytes);
    }
}

/// What is left to be read.
struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    fn u8(&mut self) -> Option<u8> {
        self.array().map(u8::from_le_bytes)
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn uuid(&mut self) -> Option<Uuid> {
        self.array().map(Uuid::from_bytes)
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let count = usize::try_from(self.u32()?).ok()?;
        self.take(count)
    }

    fn text(&mut self) -> Option<&'a str> {
        std::str::from_utf8(self.bytes()?).ok()
    }

    fn maybe(&mut self) -> Option<Option<&'a [u8]>> {
        match self.u8()? {
            0 => Some(None),
            1 => self.bytes().map(Some),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, HeaderValue};

    use super::*;
    use crate::record::{RecordId, Spelling};

    impl ReadAt for Vec<u8> {
        fn fill(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
            let rest = self.get(usize::try_from(offset).unwrap()..).unwrap_or_default();
            let bytes = rest.get(..buffer.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
            buffer.copy_from_slice(bytes);
            Ok(())
        }
    }

    fn fingerprint() -> Fingerprint {
        Fingerprint { canonical: [1; 32], raw: [2; 32], recipe: [3; 8] }
    }

    fn completion(key: &str, body: KeptBody) -> Completion {
        let mut headers = HeaderMap::new();
        headers.append("link", HeaderValue::from_static("a"));
        headers.append("link", HeaderValue::from_bytes(&[0x80, 0xff]).unwrap());
        let spelling = Spelling::of(&headers, ["Link", "LINK"]);
        let event = |n: u16, ordering_key: Option<&str>, sinks: &[&str]| Event {
            id: Uuid::from_u128(n.into()),
            key: format!("{key}/{n}"),
            kind: "order.created".to_owned(),
            position: n,
            ordering_key: ordering_key.map(str::to_owned),
            payload: Bytes::from(vec![0, 1, 255]),
            sinks: sinks.iter().map(|&sink| sink.to_owned()).collect(),
        };
        Completion {
            scope: Scope {
                tenant: Tenant::stored("ténant"),
                operation: Operation::stored("orders.create"),
                key: Key::stored(key),
            },
            fence: Fence { id: RecordId::fresh(), attempt: Attempt::from_number(7) },
            answer: Answer { status: StatusCode::CREATED, headers, spelling, body },
            retention: Duration::from_millis(86_400_001),
            events: vec![event(0, Some("k"), &["main", "audit"]), event(1, None, &[])],
        }
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
        head.read(&bytes.to_vec(), u64::try_from(bytes.len()).unwrap()).unwrap()
    }

    fn offsets(contents: &Contents) -> Vec<usize> {
        contents.owed.iter().map(|place| usize::try_from(place.offset).unwrap()).collect()
    }

    fn some_bodies() -> Vec<Vec<u8>> {
        vec![
            vec![7; 40],
            Vec::new(),
            vec![9; 3],
            encode(&completion("k", KeptBody::NotRetained), fingerprint()),
        ]
    }

    #[test]
    fn an_outcome_comes_back_as_it_was_kept() {
        for body in [
            KeptBody::Whole(Bytes::from((0..=255).collect::<Vec<u8>>())),
            KeptBody::Whole(Bytes::new()),
            KeptBody::NotRetained,
        ] {
            let completion = completion("k", body);
            let encoded = encode(&completion, fingerprint());
            let (back, print) = decode(&encoded).unwrap();
            assert_eq!(format!("{back:?}"), format!("{completion:?}"));
            assert_eq!(print, fingerprint());
            for length in 0..encoded.len() {
                assert!(decode(&encoded[..length]).is_none(), "{length}");
            }
            let longer = [encoded.as_slice(), &[0]].concat();
            assert!(decode(&longer).is_none());
        }
    }

    #[test]
    fn an_attempt_that_did_not_execute_comes_back_as_it_was_kept() {
        let of = completion("k", KeptBody::Whole(Bytes::from_static(b"later")));
        for (answer, gone_on) in [(Some(of.answer.clone()), false), (None, false), (None, true)] {
            let (scope, fence) = (of.scope.clone(), of.fence);
            let freed = NotExecuted { scope, fence, answer, gone_on };
            let encoded = encode_freed(&freed);
            assert_eq!(decode_freed(&encoded), Some(freed));
            for length in 0..encoded.len() {
                assert!(decode_freed(&encoded[..length]).is_none(), "{length}");
            }
            assert!(decode_freed(&[encoded.as_slice(), &[0]].concat()).is_none());
        }
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
