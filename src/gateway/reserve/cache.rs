//! Completed records in memory, bounded by bytes: a replay that meets one asks no database.
//!
//! Half of the bytes are for the newest answers, packed ([`Recent`]); the other half for those that were asked for again, ready
//! to be sent, and for large ones.
//!
//! An entry ends a second before the record's retention does, on this process's monotonic clock, so that no replay
//! is given after another replica may have taken the record over. What operators do is noticed by reading the audit
//! table (see `gateway`); until then a replay is history, as every replay is.

mod recent;

use std::hash::{BuildHasher, Hash, Hasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use http::{Extensions, HeaderMap, HeaderValue};
use quick_cache::sync::Cache as Lru;
use quick_cache::{Equivalent, Weighter};

use self::recent::Recent;
use crate::gateway::settle::Stored;
use crate::gateway::spelling;
use crate::record::{
    Answer, Caller, Completed, Fence, Fingerprint, KeptBody, RecordId, Scope, encoded_length,
};

/// How much earlier than the retention an entry ends: more than the clocks' rates differ over a look.
const EARLY: Duration = Duration::from_secs(1);

/// What a header costs beside its text: its place in the map, and an allocation.
const HEADER_BYTES: usize = 160;

/// What an entry costs beside headers and body: the maps, the scope, the index of the cache.
const BASE_BYTES: usize = 1024;

/// Bodies up to this size are copied into memory of their own.
const COPIED_MAX: usize = 64 * 1024;

/// Average size that is assumed for sizing the cache's index.
const ENTRY_BYTES: u64 = 2048;

/// A stored answer, ready to be sent again.
#[derive(Debug)]
pub(crate) struct Replay {
    /// The record, and the attempt that completed it.
    pub(crate) fence: Fence,
    pub(crate) fingerprint: Fingerprint,
    /// Who asked for that attempt.
    pub(crate) caller: Option<Caller>,
    pub(crate) answer: Answer,
    /// Callers get it in a header.
    pub(crate) expires_at: SystemTime,
    /// Until when it may be replayed from memory.
    until: Instant,
    /// The spelling of its names, in the form in which the server takes it; made at the first replay.
    spelled: OnceLock<Extensions>,
}

impl Replay {
    /// `ends`: when the retention ends, by the process's monotonic clock.
    pub(in crate::gateway) fn new(
        fence: Fence,
        fingerprint: Fingerprint,
        caller: Option<Caller>,
        answer: Answer,
        expires_at: SystemTime,
        ends: Instant,
    ) -> Self {
        let until = ends.checked_sub(EARLY).unwrap_or(ends);
        Self::until(fence, fingerprint, caller, answer, expires_at, until)
    }

    /// `until`: up to when it may be replayed.
    const fn until(
        fence: Fence,
        fingerprint: Fingerprint,
        caller: Option<Caller>,
        answer: Answer,
        expires_at: SystemTime,
        until: Instant,
    ) -> Self {
        Self { fence, fingerprint, caller, answer, expires_at, until, spelled: OnceLock::new() }
    }

    /// What makes the server spell the names of the answer's headers as they came.
    pub(crate) fn spelled(&self) -> Extensions {
        self.spelled.get_or_init(|| spelling::extensions(&self.answer)).clone()
    }

    /// The same in memory of its own, to be kept.
    fn compact(&self) -> Self {
        let (caller, answer) = (self.caller.clone(), compact(&self.answer));
        Self::until(self.fence, self.fingerprint, caller, answer, self.expires_at, self.until)
    }

    /// How long texts, headers and body are when they are packed; none: the body is not packed.
    fn packed_length(&self, scope: &Scope) -> Option<usize> {
        let body = match &self.answer.body {
            KeptBody::Whole(body) if body.len() > COPIED_MAX => return None,
            KeptBody::Whole(body) => body.len(),
            KeptBody::NotRetained => 0,
        };
        let caller = self.caller.as_ref().map_or(0, |caller| caller.as_str().len());
        Some(length(scope) + caller + encoded_length(&self.answer.headers) + body)
    }

    fn bytes(&self) -> u64 {
        let headers: usize = self
            .answer
            .headers
            .iter()
            .map(|(name, value)| name.as_str().len() + value.len() + HEADER_BYTES)
            .sum();
        let spelled = if self.answer.spelling.is_plain() { 0 } else { headers };
        let body = match &self.answer.body {
            KeptBody::Whole(body) => body.len(),
            KeptBody::NotRetained => 0,
        };
        (headers + spelled + body + BASE_BYTES) as u64
    }
}

/// A completed record as it is replayed, with the end of its life in memory.
impl From<Stored> for Replay {
    fn from(Stored { fence, fingerprint, caller, completed }: Stored) -> Self {
        let Completed { answer, expires_at, time_left } = completed;
        Self::new(fence, fingerprint, caller, answer, expires_at, Instant::now() + time_left)
    }
}

/// An answer of its own bytes: headers and small bodies are slices of the buffer that a connection was read into, and
/// would keep all of it for as long as they live.
fn compact(answer: &Answer) -> Answer {
    let mut headers = HeaderMap::with_capacity(answer.headers.keys_len());
    for (name, value) in &answer.headers {
        let own = HeaderValue::from_bytes(value.as_bytes()).unwrap_or_else(|_| value.clone());
        headers.append(name.clone(), own);
    }
    let body = match &answer.body {
        KeptBody::Whole(body) if body.len() <= COPIED_MAX => {
            KeptBody::Whole(Bytes::copy_from_slice(body))
        }
        body @ (KeptBody::Whole(_) | KeptBody::NotRetained) => body.clone(),
    };
    Answer { status: answer.status, headers, spelling: answer.spelling.clone(), body }
}

#[derive(Clone)]
struct Weight;

/// A scope with the hash of its texts. A full cache hashes its keys over and over, each time something is put in.
struct Hashed<S> {
    hash: u64,
    scope: S,
}

impl<S> Hash for Hashed<S> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

impl PartialEq for Hashed<Scope> {
    fn eq(&self, other: &Self) -> bool {
        self.hash == other.hash && self.scope == other.scope
    }
}

impl Eq for Hashed<Scope> {}

impl Equivalent<Hashed<Scope>> for Hashed<&Scope> {
    fn equivalent(&self, key: &Hashed<Scope>) -> bool {
        self.hash == key.hash && *self.scope == key.scope
    }
}

impl Weighter<Hashed<Scope>, Arc<Replay>> for Weight {
    fn weight(&self, Hashed { scope, .. }: &Hashed<Scope>, replay: &Arc<Replay>) -> u64 {
        replay.bytes() + length(scope) as u64
    }
}

fn length(Scope { tenant, operation, key }: &Scope) -> usize {
    tenant.as_str().len() + operation.as_str().len() + key.as_str().len()
}

/// The cache. Clones are one cache.
#[derive(Clone)]
pub(super) struct Cache {
    recent: Arc<Recent>,
    entries: Arc<Lru<Hashed<Scope>, Arc<Replay>, Weight>>,
    /// Counts [`Cache::forget`].
    forgotten: Arc<AtomicU64>,
    /// Random, so that no caller can choose keys that collide.
    hasher: RandomState,
}

impl Cache {
    /// A cache of at most this many bytes.
    pub(super) fn new(bytes: u64) -> Self {
        let half = bytes / 2;
        let entries = usize::try_from(half / ENTRY_BYTES).unwrap_or(usize::MAX).clamp(16, 1 << 20);
        Self {
            recent: Arc::new(Recent::new(usize::try_from(half).unwrap_or(usize::MAX))),
            entries: Arc::new(Lru::with_weighter(entries, bytes - half, Weight)),
            forgotten: Arc::default(),
            hasher: RandomState::new(),
        }
    }

    fn hashed<'s>(&self, scope: &'s Scope) -> Hashed<&'s Scope> {
        Hashed { hash: self.hasher.hash_one(scope), scope }
    }

    /// The answer under a scope, while it may be replayed at `now`.
    pub(super) fn get(&self, scope: &Scope, now: Instant) -> Option<Arc<Replay>> {
        let sought = self.hashed(scope);
        let Some(replay) = self.entries.get(&sought) else { return self.make_ready(&sought, now) };
        if now < replay.until {
            return Some(replay);
        }
        self.entries.remove(&sought);
        None
    }

    /// Makes one of the newest answers ready, for those who ask for it again.
    fn make_ready(&self, sought: &Hashed<&Scope>, now: Instant) -> Option<Arc<Replay>> {
        let forgotten = self.forgotten.load(Ordering::SeqCst);
        let replay = Arc::new(self.recent.get(sought.hash, sought.scope, now)?);
        let scope = sought.scope.clone();
        self.entries.insert(Hashed { hash: sought.hash, scope }, Arc::clone(&replay));
        // What was forgotten in between does not come back.
        if self.forgotten.load(Ordering::SeqCst) != forgotten {
            self.entries.remove(sought);
        }
        Some(replay)
    }

    pub(super) fn put(&self, scope: &Scope, replay: &Replay) {
        let hashed = self.hashed(scope);
        let packed = replay.packed_length(scope);
        if packed.is_some_and(|length| self.recent.put(hashed.hash, scope, replay, length)) {
            self.entries.remove(&hashed);
            return;
        }
        self.recent.remove(hashed.hash);
        let hashed = Hashed { hash: hashed.hash, scope: scope.clone() };
        self.entries.insert(hashed, Arc::new(replay.compact()));
    }

    pub(super) fn forget(&self, records: &[RecordId]) {
        self.forgotten.fetch_add(1, Ordering::SeqCst);
        self.recent.forget(records);
        self.entries.retain(|_, replay| !records.contains(&replay.fence.id));
    }

    pub(super) fn bytes(&self) -> u64 {
        self.entries.weight() + self.recent.bytes() as u64
    }
}

#[cfg(test)]
pub(super) mod tests {
    use http::StatusCode;

    use super::*;
    use crate::record::{Attempt, Key, Operation, Spelling, Tenant};

    pub(in super::super) fn scope(key: &str) -> Scope {
        Scope {
            tenant: Tenant::stored("t"),
            operation: Operation::stored("o"),
            key: Key::stored(key),
        }
    }

    pub(super) fn replay(size: usize, ends: Instant) -> Arc<Replay> {
        let body = KeptBody::Whole(Bytes::from(vec![0; size]));
        let (headers, spelling) = (HeaderMap::new(), Spelling::default());
        let answer = Answer { status: StatusCode::OK, headers, spelling, body };
        let fingerprint = Fingerprint { canonical: [0; 32], raw: [0; 32], recipe: [0; 8] };
        let fence = Fence { id: RecordId::fresh(), attempt: Attempt::FIRST };
        Arc::new(Replay::new(fence, fingerprint, None, answer, SystemTime::UNIX_EPOCH, ends))
    }

    #[test]
    fn an_entry_ends_a_second_before_its_retention() {
        let (cache, now) = (Cache::new(1 << 20), Instant::now());
        cache.put(&scope("k"), &replay(10, now + Duration::from_secs(5)));
        assert!(cache.get(&scope("k"), now + Duration::from_millis(3_999)).is_some());
        assert!(cache.get(&scope("k"), now + Duration::from_secs(4)).is_none());
    }

    #[test]
    fn the_cache_stays_within_its_bytes() {
        let (cache, ends) = (Cache::new(100_000), Instant::now() + Duration::from_secs(60));
        for n in 0..1_000 {
            cache.put(&scope(&n.to_string()), &replay(1_000, ends));
        }
        assert!(cache.bytes() <= 100_000);
        assert!(cache.bytes() > 10_000);
    }

    #[test]
    fn an_answer_comes_back_as_it_was() {
        let (cache, now) = (Cache::new(4 << 20), Instant::now());
        let mut headers = HeaderMap::new();
        for (name, value) in
            [("link", &b"a: b"[..]), ("etag", b"\"1\""), ("link", b"caf\xe9 "), ("x-empty", b"")]
        {
            headers.append(name, HeaderValue::from_bytes(value).unwrap());
        }
        let fence = Fence { id: RecordId::fresh(), attempt: Attempt::from_number(7) };
        let fingerprint = Fingerprint { canonical: [1; 32], raw: [2; 32], recipe: [3; 8] };
        let (whole, ends) = (|size| KeptBody::Whole(vec![9; size].into()), now + 10 * EARLY);
        let bodies = [whole(0), whole(300), whole(COPIED_MAX), whole(COPIED_MAX + 1)];
        for (n, body) in bodies.into_iter().chain([KeptBody::NotRetained]).enumerate() {
            let spelling = Spelling::of(&headers, ["Link", "ETag", "LINK", "x-empty"]);
            let caller = (n % 2 == 0).then(|| Caller::stored("digest"));
            let (headers, status) = (headers.clone(), StatusCode::from_u16(299).unwrap());
            let answer = Answer { status, headers, spelling, body };
            let time = SystemTime::UNIX_EPOCH + Duration::from_nanos(1_700_000_000_123_456_789);
            let put = Replay::new(fence, fingerprint, caller, answer, time, ends);
            cache.put(&scope("k"), &put);
            assert!(cache.get(&scope("j"), now).is_none());
            for _ in 0..2 {
                let got = cache.get(&scope("k"), now).unwrap();
                assert_eq!(got.answer, put.answer, "{n}");
                assert_eq!((got.fence, got.fingerprint), (put.fence, put.fingerprint));
                assert_eq!((&got.caller, got.expires_at), (&put.caller, put.expires_at));
            }
        }
    }

    #[test]
    fn the_newest_answers_stay_and_those_that_are_asked_for() {
        let (cache, now) = (Cache::new(200_000), Instant::now());
        let ends = now + Duration::from_secs(60);
        for n in 0..1_000 {
            cache.put(&scope(&n.to_string()), &replay(1_000, ends));
            assert!(cache.get(&scope("0"), now).is_some(), "after {n}");
        }
        let there = |n: usize| {
            cache
                .recent
                .get(cache.hashed(&scope(&n.to_string())).hash, &scope(&n.to_string()), now)
                .is_some()
        };
        let kept: Vec<usize> = (0..1_000).filter(|n| there(*n)).collect();
        assert!((50..100).contains(&kept.len()), "{}", kept.len());
        assert!(kept.iter().rev().eq((0..1_000).rev().take(kept.len()).collect::<Vec<_>>().iter()));
    }

    #[test]
    fn a_scope_of_the_same_hash_gets_nobody_elses_answer() {
        let (recent, now) = (Recent::new(1 << 20), Instant::now());
        let (one, two) =
            (replay(1, now + Duration::from_secs(60)), replay(2, now + Duration::from_secs(60)));
        assert!(recent.put(7, &scope("one"), &one, 100));
        assert!(recent.get(7, &scope("two"), now).is_none());
        assert!(recent.put(7, &scope("two"), &two, 100));
        assert!(recent.get(7, &scope("one"), now).is_none());
        assert_eq!(recent.get(7, &scope("two"), now).unwrap().fence, two.fence);
        recent.forget(&[one.fence.id]);
        assert!(recent.get(7, &scope("two"), now).is_some());
    }

    #[test]
    fn what_an_operator_acted_on_is_forgotten() {
        let (cache, now) = (Cache::new(1 << 20), Instant::now());
        let (one, two) =
            (replay(1, now + Duration::from_secs(60)), replay(1, now + Duration::from_secs(60)));
        cache.put(&scope("1"), &one);
        cache.put(&scope("2"), &two);
        cache.forget(&[one.fence.id]);
        assert!(cache.get(&scope("1"), now).is_none());
        assert!(cache.get(&scope("2"), now).is_some());
        cache.forget(&[two.fence.id]);
        assert!(cache.get(&scope("2"), now).is_none(), "also one that was asked for");
    }
}
