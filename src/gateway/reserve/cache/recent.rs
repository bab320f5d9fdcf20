//! Answers as they were completed, as bytes in a few large blocks, until somebody asks for one.
//!
//! Most answers are never asked for again. One by one on the heap each would keep a dozen small pieces of it apart for
//! hours, between which the short-lived memory of every request has to find its place: a sixth of the gateway's work.
//! Here an answer is appended to the newest block; the oldest block makes room for a new one, and nothing is freed.

use std::collections::{HashMap, VecDeque};
use std::time::{Instant, SystemTime};

use bytes::Bytes;
use http::StatusCode;
use parking_lot::Mutex;

use super::Replay;
use crate::record::{
    Answer, Caller, Fence, Fingerprint, KeptBody, RecordId, Scope, append_headers, decode_headers,
};

/// Into so many blocks the memory is divided: so much of it goes at a time.
const BLOCKS: usize = 16;
const BLOCK_MAX: usize = 1 << 20;

/// What an entry costs beside its bytes: its place in the block, and in the index.
const ENTRY_BYTES: usize = size_of::<Entry>() + 64;

/// The newest answers. What must stay true: the blocks weigh no more than the bound; an index entry names an entry of a
/// block that is there.
pub(super) struct Recent(Mutex<Blocks>);

struct Blocks {
    blocks: VecDeque<Block>,
    /// The number of the oldest block; the others follow.
    first: u64,
    index: HashMap<u64, Slot>,
    block_max: usize,
    blocks_max: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Slot {
    block: u64,
    entry: usize,
}

struct Block {
    bytes: Vec<u8>,
    entries: Vec<Entry>,
}

/// One answer. Its texts, its header block and its body follow one another in the block's bytes.
struct Entry {
    hash: u64,
    fence: Fence,
    fingerprint: Fingerprint,
    status: StatusCode,
    expires_at: SystemTime,
    until: Instant,
    retained: bool,
    has_caller: bool,
    start: usize,
    /// Where tenant, operation, key, caller, header block and body end.
    ends: [usize; 6],
}

impl Block {
    /// An empty block. It never grows beyond its place, and what of it was never written takes no memory.
    fn of(bytes: usize) -> Self {
        Self { bytes: Vec::with_capacity(bytes), entries: Vec::with_capacity(bytes / ENTRY_BYTES) }
    }

    fn weight(&self) -> usize {
        self.bytes.len() + self.entries.len() * ENTRY_BYTES
    }

    fn append(&mut self, hash: u64, scope: &Scope, replay: &Replay) {
        let Replay { fence, fingerprint, caller, answer, expires_at, until, .. } = replay;
        let body = match &answer.body {
            KeptBody::Whole(body) => Some(body.as_ref()),
            KeptBody::NotRetained => None,
        };
        let start = self.bytes.len();
        let texts = [
            scope.tenant.as_str(),
            scope.operation.as_str(),
            scope.key.as_str(),
            caller.as_ref().map_or("", Caller::as_str),
        ];
        let [tenant, operation, key, by] = texts.map(|text| {
            self.bytes.extend_from_slice(text.as_bytes());
            self.bytes.len()
        });
        append_headers(&mut self.bytes, &answer.headers, &answer.spelling);
        let head = self.bytes.len();
        self.bytes.extend_from_slice(body.unwrap_or_default());
        self.entries.push(Entry {
            hash,
            fence: *fence,
            fingerprint: *fingerprint,
            status: answer.status,
            expires_at: *expires_at,
            until: *until,
            retained: body.is_some(),
            has_caller: caller.is_some(),
            start,
            ends: [tenant, operation, key, by, head, self.bytes.len()],
        });
    }

    fn read(&self, entry: &Entry, scope: &Scope) -> Option<Replay> {
        let [tenant, operation, key, by, head, body] = entry.ends;
        let text = |from: usize, to: usize| std::str::from_utf8(self.bytes.get(from..to)?).ok();
        let is = text(entry.start, tenant)? == scope.tenant.as_str()
            && text(tenant, operation)? == scope.operation.as_str()
            && text(operation, key)? == scope.key.as_str();
        if !is {
            return None;
        }
        let caller = if entry.has_caller { Some(Caller::stored(text(key, by)?)) } else { None };
        let (headers, spelling) = decode_headers(self.bytes.get(by..head)?).ok()?;
        let body = match entry.retained {
            true => KeptBody::Whole(Bytes::copy_from_slice(self.bytes.get(head..body)?)),
            false => KeptBody::NotRetained,
        };
        let answer = Answer { status: entry.status, headers, spelling, body };
        let Entry { fence, fingerprint, expires_at, until, .. } = *entry;
        Some(Replay::until(fence, fingerprint, caller, answer, expires_at, until))
    }
}

impl Blocks {
    fn find(&self, hash: u64) -> Option<(&Block, &Entry)> {
        let slot = self.index.get(&hash)?;
        let at = usize::try_from(slot.block.checked_sub(self.first)?).ok()?;
        let block = self.blocks.get(at)?;
        Some((block, block.entries.get(slot.entry)?))
    }

    /// A new block behind the others; the oldest one where there is no room for one more.
    fn rotate(&mut self) {
        let oldest =
            if self.blocks.len() < self.blocks_max { None } else { self.blocks.pop_front() };
        let Some(mut block) = oldest else {
            self.blocks.push_back(Block::of(self.block_max));
            return;
        };
        for (entry, gone) in block.entries.iter().enumerate() {
            let slot = Slot { block: self.first, entry };
            if self.index.get(&gone.hash) == Some(&slot) {
                self.index.remove(&gone.hash);
            }
        }
        self.first += 1;
        block.bytes.clear();
        block.entries.clear();
        self.blocks.push_back(block);
    }
}

impl Recent {
    /// At most this many bytes.
    pub(super) fn new(bytes: usize) -> Self {
        let block_max = (bytes / BLOCKS).min(BLOCK_MAX);
        Self(Mutex::new(Blocks {
            blocks: VecDeque::new(),
            first: 0,
            index: HashMap::new(),
            block_max,
            blocks_max: bytes.checked_div(block_max).unwrap_or(0),
        }))
    }

    /// Keeps an answer whose texts, headers and body are `length` bytes long, in the place of what is there under this
    /// hash. False: it is too large.
    pub(super) fn put(&self, hash: u64, scope: &Scope, replay: &Replay, length: usize) -> bool {
        let mut blocks = self.0.lock();
        let weight = length + ENTRY_BYTES;
        if weight > blocks.block_max {
            return false;
        }
        let fits = |block: &Block| block.weight() + weight <= blocks.block_max;
        if !blocks.blocks.back().is_some_and(fits) {
            blocks.rotate();
        }
        let block = blocks.first + blocks.blocks.len().saturating_sub(1) as u64;
        let Some(newest) = blocks.blocks.back_mut() else { return false };
        newest.append(hash, scope, replay);
        let entry = newest.entries.len() - 1;
        blocks.index.insert(hash, Slot { block, entry });
        true
    }

    /// The answer under a scope of this hash, while it may be replayed at `now`.
    pub(super) fn get(&self, hash: u64, scope: &Scope, now: Instant) -> Option<Replay> {
        let mut blocks = self.0.lock();
        let (block, entry) = blocks.find(hash)?;
        if now < entry.until {
            return block.read(entry, scope);
        }
        blocks.index.remove(&hash);
        None
    }

    /// Forgets the answer of a hash.
    pub(super) fn remove(&self, hash: u64) {
        self.0.lock().index.remove(&hash);
    }

    pub(super) fn forget(&self, records: &[RecordId]) {
        let mut blocks = self.0.lock();
        let entries = blocks.blocks.iter().flat_map(|block| &block.entries);
        let gone = entries.filter(|entry| records.contains(&entry.fence.id));
        let gone: Vec<(u64, RecordId)> = gone.map(|entry| (entry.hash, entry.fence.id)).collect();
        for (hash, record) in gone {
            if blocks.find(hash).is_some_and(|(_, entry)| entry.fence.id == record) {
                blocks.index.remove(&hash);
            }
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.lock().blocks.iter().map(Block::weight).sum()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::tests::{replay, scope};
    use super::*;

    #[test]
    fn blocks_keep_within_what_they_were_made_with() {
        const BOUND: usize = 1 << 18;
        let (recent, ends) = (Recent::new(BOUND), Instant::now() + Duration::from_secs(60));
        for n in 0..5_000 {
            let (scope, replay) = (scope(&n.to_string()), replay(n % 400, ends));
            let length = replay.packed_length(&scope).unwrap();
            assert!(recent.put(n as u64, &scope, &replay, length));
        }
        let blocks = recent.0.lock();
        assert_eq!(blocks.blocks.len(), blocks.blocks_max, "they have turned over");
        for block in &blocks.blocks {
            let fresh = Block::of(blocks.block_max);
            assert_eq!(block.bytes.capacity(), fresh.bytes.capacity());
            assert_eq!(block.entries.capacity(), fresh.entries.capacity());
            assert!(block.weight() <= blocks.block_max);
        }
        let there: usize = blocks.blocks.iter().map(|block| block.entries.len()).sum();
        assert_eq!(blocks.index.len(), there, "what went is in no index");
    }
}
