//! Ends of attempts that the database has confirmed, for the case that it goes back behind them: a standby that lacked the
//! last commits has taken its place, or a backup was restored.
//!
//! What must stay true: an end is noted after it was confirmed and before its scope's flight is over, so each record of this
//! process is here or in flight. The newest are kept, packed into a few large blocks of bounded size, each answer with its
//! events, so that what is written again is the same to the byte. An answer that is too large for a block is remembered as
//! an execution whose answer is not at hand.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use crate::gateway::spill::{decode, encode};
use crate::record::{Caller, Fence, Fingerprint, RecordId};
use crate::store::{Completion, Proposal};

/// Into so many blocks the memory is divided: so much of it goes at a time.
const BLOCKS: usize = 16;

/// What an end costs beside its bytes.
const END_BYTES: usize = size_of::<EndEntry>();

/// An end as it is written again.
pub(in crate::gateway) enum Confirmed {
    /// With this answer and its events.
    Completed(Box<ConfirmedCompletion>),
    /// Nobody knows how, or the answer was too large to be remembered.
    Unknown(Fence, Arc<Proposal>),
}

/// An end by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::gateway) struct NumberedEnd {
    /// Counts all ends of the process from 0.
    pub(in crate::gateway) number: u64,
    pub(in crate::gateway) fence: Fence,
    /// Whether the record was completed; else it is unknown.
    pub(in crate::gateway) completed: bool,
}

/// A completion that was confirmed.
pub(in crate::gateway) struct ConfirmedCompletion {
    pub(in crate::gateway) completion: Completion,
    pub(in crate::gateway) fingerprint: Fingerprint,
    pub(in crate::gateway) caller: Option<Caller>,
    /// When its retention ends.
    pub(in crate::gateway) until: Instant,
}

/// The ends. Clones are one memory.
#[derive(Clone)]
pub(in crate::gateway) struct ConfirmedEnds(Arc<Mutex<Blocks>>);

struct Blocks {
    blocks: VecDeque<Block>,
    block_max: usize,
    /// The number of the next end.
    next: u64,
    /// Records that a late answer freed, the newest last.
    freed: VecDeque<RecordId>,
}

/// Of how many records it is remembered that a late answer freed them.
const FREED_MAX: usize = 4096;

struct Block {
    /// The number of its first end; the others follow.
    first: u64,
    bytes: Vec<u8>,
    ends: Vec<EndEntry>,
    weight: usize,
}

struct EndEntry {
    fence: Fence,
    at: Instant,
    /// Before then no retention of the record can have ended.
    until: Instant,
    kind: Kind,
}

enum Kind {
    Completed { start: usize, end: usize, caller: Option<Caller> },
    Unknown(Arc<Proposal>),
}

impl Block {
    fn read(&self, entry: &EndEntry) -> Option<Confirmed> {
        match &entry.kind {
            Kind::Unknown(row) => Some(Confirmed::Unknown(entry.fence, Arc::clone(row))),
            Kind::Completed { start, end, caller } => {
                let (completion, fingerprint) = decode(self.bytes.get(*start..*end)?)?;
                let (caller, until) = (caller.clone(), entry.until);
                let completed = ConfirmedCompletion { completion, fingerprint, caller, until };
                Some(Confirmed::Completed(Box::new(completed)))
            }
        }
    }
}

impl Blocks {
    /// A block with room for so many bytes more, if one can have it.
    fn block_for(&mut self, weight: usize) -> Option<&mut Block> {
        if weight > self.block_max {
            return None;
        }
        let fits = |block: &Block| block.weight + weight <= self.block_max;
        if !self.blocks.back().is_some_and(fits) {
            if self.blocks.len() == BLOCKS {
                self.blocks.pop_front();
            }
            let first = self.next;
            let (bytes, ends) = (Vec::with_capacity(self.block_max), Vec::new());
            self.blocks.push_back(Block { first, bytes, ends, weight: 0 });
        }
        let block = self.blocks.back_mut()?;
        block.weight += weight;
        self.next += 1;
        Some(block)
    }
}

impl ConfirmedEnds {
    /// Of at most this many bytes.
    pub(super) fn new(bytes: u64) -> Self {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let blocks = Blocks {
            blocks: VecDeque::new(),
            block_max: bytes / BLOCKS,
            next: 0,
            freed: VecDeque::new(),
        };
        Self(Arc::new(Mutex::new(blocks)))
    }

    /// The database has confirmed this completion. `open`: what else is known of its attempt, where that was made here.
    pub(super) fn completed(
        &self,
        completion: &Completion,
        (fingerprint, caller): (Fingerprint, Option<&Caller>),
        until: Instant,
        row: Option<&Arc<Proposal>>,
    ) {
        let encoded = encode(completion, fingerprint);
        let mut blocks = self.0.lock();
        let Some(block) = blocks.block_for(encoded.len() + END_BYTES) else {
            drop(blocks);
            return row.into_iter().for_each(|row| self.unknown(completion.fence, row));
        };
        let start = block.bytes.len();
        block.bytes.extend_from_slice(&encoded);
        let (end, caller) = (block.bytes.len(), caller.cloned());
        let kind = Kind::Completed { start, end, caller };
        block.ends.push(EndEntry { fence: completion.fence, at: Instant::now(), until, kind });
    }

    /// The database has confirmed that nobody knows how this attempt ended.
    pub(super) fn unknown(&self, fence: Fence, row: &Arc<Proposal>) {
        let context = row.context.as_ref().map_or(0, bytes::Bytes::len);
        // The texts of the scope are short and shared with others.
        let weight = END_BYTES + size_of::<Proposal>() + context;
        let (at, kind) = (Instant::now(), Kind::Unknown(Arc::clone(row)));
        // Whoever finds out keeps the answer for as long from then on.
        let until = at.checked_add(row.retention).unwrap_or(at);
        if let Some(block) = self.0.lock().block_for(weight) {
            block.ends.push(EndEntry { fence, at, until, kind });
        }
    }

    /// The ends from this number and this time on whose retention is not over, newest first; and the number after them.
    pub(in crate::gateway) fn since(&self, from: u64, at: Instant) -> (Vec<NumberedEnd>, u64) {
        let (blocks, now) = (self.0.lock(), Instant::now());
        let all = blocks.blocks.iter().flat_map(|block| (block.first..).zip(&block.ends));
        let counts = |(number, entry): &(u64, &EndEntry)| {
            *number >= from && entry.at >= at && entry.until > now
        };
        let numbered = |(number, entry): (u64, &EndEntry)| NumberedEnd {
            number,
            fence: entry.fence,
            completed: matches!(entry.kind, Kind::Completed { .. }),
        };
        let mut ends: Vec<_> = all.filter(counts).map(numbered).collect();
        ends.reverse();
        (ends, blocks.next)
    }

    /// This record's row may rightly be gone from now on: none of its ends is missed.
    pub(super) fn forget(&self, record: RecordId) {
        let now = Instant::now();
        let mut blocks = self.0.lock();
        if blocks.freed.len() == FREED_MAX {
            blocks.freed.pop_front();
        }
        blocks.freed.push_back(record);
        let all = blocks.blocks.iter_mut().flat_map(|block| &mut block.ends);
        all.filter(|entry| entry.fence.id == record).for_each(|entry| entry.until = now);
    }

    /// Whether this record's row may rightly be gone: another end of its attempt may still be pending.
    pub(super) fn was_freed(&self, record: RecordId) -> bool {
        self.0.lock().freed.contains(&record)
    }

    /// Whether this end is not missed any more: its retention may be over, or its record was freed.
    pub(in crate::gateway) fn is_over(&self, number: u64) -> bool {
        let blocks = self.0.lock();
        let block = blocks.blocks.iter().rev().find(|block| block.first <= number);
        let index = |block: &Block| usize::try_from(number - block.first).ok();
        let entry = block.and_then(|block| block.ends.get(index(block)?));
        entry.is_some_and(|entry| entry.until <= Instant::now())
    }

    /// One of them; `None`: it is remembered no more.
    pub(in crate::gateway) fn get(&self, number: u64) -> Option<Confirmed> {
        let blocks = self.0.lock();
        let block = blocks.blocks.iter().rev().find(|block| block.first <= number)?;
        let entry = block.ends.get(usize::try_from(number - block.first).ok()?)?;
        block.read(entry)
    }

    /// Whether the database has confirmed a completion of this attempt that is remembered.
    pub(super) fn completed_it(&self, fence: Fence) -> bool {
        let last = self.last_of(fence).and_then(|number| self.get(number));
        matches!(last, Some(Confirmed::Completed(completed)) if completed.until > Instant::now())
    }

    /// The number of the last end of this attempt.
    pub(in crate::gateway) fn last_of(&self, fence: Fence) -> Option<u64> {
        let blocks = self.0.lock();
        let mut all = blocks.blocks.iter().rev().flat_map(|block| {
            let last = block.first + block.ends.len() as u64;
            (block.first..last).rev().zip(block.ends.iter().rev())
        });
        all.find(|(_, entry)| entry.fence == fence).map(|(number, _)| number)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bytes::Bytes;
    use http::{HeaderMap, HeaderValue, StatusCode};

    use super::super::cache::tests::scope;
    use super::*;
    use crate::record::{Answer, Attempt, KeptBody, OwnerId, RecordId, Spelling};

    const FINGERPRINT: Fingerprint =
        Fingerprint { canonical: [1; 32], raw: [2; 32], recipe: [3; 8] };

    fn completion(key: &str, size: usize) -> Completion {
        let mut headers = HeaderMap::new();
        headers.insert("x-size", HeaderValue::from(size));
        let body = KeptBody::Whole(Bytes::from(vec![7; size]));
        let (status, spelling) = (StatusCode::CREATED, Spelling::default());
        let answer = Answer { status, headers, spelling, body };
        let fence = Fence { id: RecordId::fresh(), attempt: Attempt::FIRST };
        let (scope, retention) = (scope(key), Duration::from_secs(60));
        Completion { scope, fence, answer, retention, events: Vec::new() }
    }

    fn row(completion: &Completion) -> Arc<Proposal> {
        Arc::new(Proposal {
            id: completion.fence.id,
            scope: completion.scope.clone(),
            fingerprint: FINGERPRINT,
            owner: OwnerId::fresh(),
            caller: None,
            context: None,
            retention: completion.retention,
        })
    }

    #[test]
    fn the_newest_ends_come_back_as_they_were_and_keep_within_their_bytes() {
        let begun = Instant::now();
        let (ends, until) = (ConfirmedEnds::new(160_000), begun + Duration::from_secs(60));
        let caller = Caller::stored("digest");
        let all: Vec<_> = (0..1000).map(|n| completion(&n.to_string(), n)).collect();
        for completion in &all {
            ends.completed(completion, (FINGERPRINT, Some(&caller)), until, None);
        }
        let (kept, next) = ends.since(0, begun);
        assert_eq!(next, 1000);
        assert!((100..300).contains(&kept.len()), "{}", kept.len());
        for (NumberedEnd { number, fence, completed }, completion) in
            kept.iter().zip(all.iter().rev())
        {
            assert_eq!((*fence, *completed), (completion.fence, true));
            assert_eq!(ends.last_of(*fence), Some(*number));
            let Some(Confirmed::Completed(got)) = ends.get(*number) else {
                panic!("{number} is gone")
            };
            assert_eq!(got.completion.scope, completion.scope);
            assert_eq!(got.completion.answer, completion.answer);
            assert_eq!((got.fingerprint, got.caller), (FINGERPRINT, Some(caller.clone())));
        }
        assert!(ends.get(0).is_none() && ends.last_of(all[0].fence).is_none());
        assert_eq!(ends.since(990, begun).0.len(), 10);
        assert!(ends.since(0, Instant::now()).0.is_empty(), "all of them are older");
        let weight: usize = ends.0.lock().blocks.iter().map(|block| block.bytes.capacity()).sum();
        assert!(weight <= 160_000, "{weight}");
    }

    #[test]
    fn the_end_of_a_record_that_was_freed_is_not_missed() {
        let begun = Instant::now();
        let (ends, freed, other) =
            (ConfirmedEnds::new(160_000), completion("k", 1), completion("l", 1));
        for unknown in [&freed, &other] {
            ends.unknown(unknown.fence, &row(unknown));
        }
        ends.forget(freed.fence.id);
        let (missed, _) = ends.since(0, begun);
        assert_eq!(missed.iter().map(|end| end.fence).collect::<Vec<_>>(), [other.fence]);
        assert!(ends.is_over(0) && !ends.is_over(1));
        assert!(ends.was_freed(freed.fence.id) && !ends.was_freed(other.fence.id));
    }

    #[test]
    fn an_answer_that_is_too_large_is_remembered_as_an_execution() {
        let begun = Instant::now();
        let (ends, large) = (ConfirmedEnds::new(160_000), completion("k", 20_000));
        let row = row(&large);
        ends.completed(&large, (FINGERPRINT, None), Instant::now(), Some(&row));
        assert!(matches!(ends.get(0), Some(Confirmed::Unknown(fence, _)) if fence == large.fence));
        let none = ConfirmedEnds::new(0);
        none.completed(&large, (FINGERPRINT, None), Instant::now(), Some(&row));
        assert_eq!(none.since(0, begun), (Vec::new(), 0));
    }
}
