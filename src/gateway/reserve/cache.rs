//! Completed records in memory, bounded by bytes: a replay that meets one asks no database.
//!
//! An entry ends a second before the record's retention does, on this process's monotonic clock, so that no replay
//! is given after another replica may have taken the record over. What operators do is noticed by reading the audit
//! table (see `gateway`); until then a replay is history, as every replay is.

use std::hash::{BuildHasher, Hash, Hasher, RandomState};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use http::{Extensions, HeaderMap, HeaderValue};
use quick_cache::sync::Cache as Lru;
use quick_cache::{Equivalent, Weighter};

use crate::gateway::spelling;
use crate::record::{Answer, Caller, Fence, Fingerprint, KeptBody, RecordId, Scope};

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
    /// Told to callers.
    pub(crate) expires_at: SystemTime,
    /// Until when it may be replayed from memory.
    until: Instant,
    /// The spelling of its names, in the form in which the server takes it; made at the first replay.
    spelled: OnceLock<Extensions>,
}

impl Replay {
    /// `ends`: when the retention ends, by the process's monotonic clock.
    pub(super) fn new(
        fence: Fence,
        fingerprint: Fingerprint,
        caller: Option<Caller>,
        answer: Answer,
        expires_at: SystemTime,
        ends: Instant,
    ) -> Self {
        let until = ends.checked_sub(EARLY).unwrap_or(ends);
        let answer = compact(answer);
        Self { fence, fingerprint, caller, answer, expires_at, until, spelled: OnceLock::new() }
    }

    /// What makes the server spell the names of the answer's headers as they came.
    pub(crate) fn spelled(&self) -> Extensions {
        self.spelled.get_or_init(|| spelling::extensions(&self.answer)).clone()
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

/// An answer of its own bytes: headers and small bodies are slices of the buffer that a connection was read into, and
/// would keep all of it for as long as they live.
fn compact(answer: Answer) -> Answer {
    let mut headers = HeaderMap::with_capacity(answer.headers.keys_len());
    for (name, value) in &answer.headers {
        let own = HeaderValue::from_bytes(value.as_bytes()).unwrap_or_else(|_| value.clone());
        headers.append(name.clone(), own);
    }
    let body = match answer.body {
        KeptBody::Whole(body) if body.len() <= COPIED_MAX => {
            KeptBody::Whole(Bytes::copy_from_slice(&body))
        }
        body @ (KeptBody::Whole(_) | KeptBody::NotRetained) => body,
    };
    Answer { status: answer.status, headers, spelling: answer.spelling, body }
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
        let scope =
            scope.tenant.as_str().len() + scope.operation.as_str().len() + scope.key.as_str().len();
        replay.bytes() + scope as u64
    }
}

/// The cache. Clones are one cache.
#[derive(Clone)]
pub(super) struct Cache {
    entries: Arc<Lru<Hashed<Scope>, Arc<Replay>, Weight>>,
    /// Random, so that no caller can choose keys that collide.
    hasher: RandomState,
}

impl Cache {
    /// A cache of at most this many bytes.
    pub(super) fn new(bytes: u64) -> Self {
        let entries = usize::try_from(bytes / ENTRY_BYTES).unwrap_or(usize::MAX).clamp(16, 1 << 20);
        let entries = Arc::new(Lru::with_weighter(entries, bytes, Weight));
        Self { entries, hasher: RandomState::new() }
    }

    fn hashed<'s>(&self, scope: &'s Scope) -> Hashed<&'s Scope> {
        Hashed { hash: self.hasher.hash_one(scope), scope }
    }

    /// The answer under a scope, while it may be replayed at `now`.
    pub(super) fn get(&self, scope: &Scope, now: Instant) -> Option<Arc<Replay>> {
        let sought = self.hashed(scope);
        let replay = self.entries.get(&sought)?;
        if now < replay.until {
            return Some(replay);
        }
        self.entries.remove(&sought);
        None
    }

    pub(super) fn put(&self, scope: &Scope, replay: &Arc<Replay>) {
        let Hashed { hash, scope } = self.hashed(scope);
        self.entries.insert(Hashed { hash, scope: scope.clone() }, Arc::clone(replay));
    }

    pub(super) fn forget(&self, records: &[RecordId]) {
        self.entries.retain(|_, replay| !records.contains(&replay.fence.id));
    }

    pub(super) fn bytes(&self) -> u64 {
        self.entries.weight()
    }
}

#[cfg(test)]
mod tests {
    use http::StatusCode;

    use super::*;
    use crate::record::{Attempt, Key, Operation, Spelling, Tenant};

    fn scope(key: &str) -> Scope {
        Scope {
            tenant: Tenant::stored("t"),
            operation: Operation::stored("o"),
            key: Key::stored(key),
        }
    }

    fn replay(size: usize, ends: Instant) -> Arc<Replay> {
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
    fn what_an_operator_acted_on_is_forgotten() {
        let (cache, now) = (Cache::new(1 << 20), Instant::now());
        let (one, two) =
            (replay(1, now + Duration::from_secs(60)), replay(1, now + Duration::from_secs(60)));
        cache.put(&scope("1"), &one);
        cache.put(&scope("2"), &two);
        cache.forget(&[one.fence.id]);
        assert!(cache.get(&scope("1"), now).is_none());
        assert!(cache.get(&scope("2"), now).is_some());
    }
}
