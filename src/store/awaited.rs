//! A store that is not open yet.
//!
//! A process that starts beside its database listens before it has one. What must stay true: until the gate is opened, which
//! happens once and for good, every verb is [`Error::Unavailable`] at once, and nothing reaches a database. So nothing is
//! reserved, and nothing that stands there is judged, before the start has drained the spill and taken a lease.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use uuid::Uuid;

use super::{
    Acknowledgement, Acted, Asking, AttemptRow, AuditRow, Beat, Changed, Chosen, Claim, Claimed,
    Completion, DeadFilter, Due, Error, EventFilter, EventRow, Gauges, LateOutcome, LetGo, Life,
    OpenPiece, Operator, Order, Over, Proposal, RecordFilter, RecordRow, Reinstated, Reserved,
    Settled, SinkOrder, SinkState, SinkTurn, Store, Takeover, Touched, Unresolved, Untold, Whence,
};
use crate::record::event::Event;
use crate::record::event::notice::Notice;
use crate::record::{Attempt, Fence, OwnerId, Record, RecordId, Scope, Status};

/// A store that is not open yet, and what opens it.
#[must_use]
pub fn awaited() -> (Arc<dyn Store>, Gate) {
    let why = Mutex::new("the start is not finished".to_owned());
    let way = Arc::new(Way { store: OnceLock::new(), begun: Instant::now(), why });
    (Arc::new(Awaited(Arc::clone(&way))), Gate(way))
}

struct Awaited(Arc<Way>);

struct Way {
    store: OnceLock<Arc<dyn Store>>,
    begun: Instant,
    why: Mutex<String>,
}

/// Opens the store that is awaited. Where it is dropped, that store stays away.
pub struct Gate(Arc<Way>);

impl Gate {
    /// From now on this is the store.
    pub fn open(self, store: Arc<dyn Store>) {
        // Set here only, and by value: so it is once.
        drop(self.0.store.set(store));
    }

    /// Why it could not be opened so far, for whoever asks meanwhile.
    pub fn explain(&self, why: String) {
        *self.0.why.lock().unwrap_or_else(PoisonError::into_inner) = why;
    }
}

/// Why a verb was not done.
#[derive(Debug, thiserror::Error)]
#[error("it is not open since the start, {} ago: {why}", humantime::format_duration(*.since))]
struct NotOpen {
    since: Duration,
    why: String,
}

impl Awaited {
    fn store(&self) -> Result<&dyn Store, Error> {
        let Way { store, begun, why } = &*self.0;
        store.get().map(AsRef::as_ref).ok_or_else(|| {
            let since = Duration::from_secs(begun.elapsed().as_secs());
            let why = why.lock().unwrap_or_else(PoisonError::into_inner).clone();
            Error::Unavailable(NotOpen { since, why }.into())
        })
    }
}

macro_rules! verbs {
    ($($name:ident($($arg:ident: $kind:ty),*) -> $done:ty;)*) => {
        #[async_trait]
        impl Store for Awaited {
            $(async fn $name(&self, $($arg: $kind),*) -> Result<$done, Error> {
                self.store()?.$name($($arg),*).await
            })*
        }
    };
}

verbs! {
    heartbeat(owner: OwnerId, lease: Duration) -> Beat;
    retire(owner: OwnerId) -> ();
    reserve(proposal: Proposal, deadline: Instant) -> Reserved;
    take_over(proposal: Proposal, from: Takeover) -> Changed;
    raise(proposal: Proposal, fence: Fence) -> Changed;
    find(scope: &Scope) -> Option<Record>;
    complete(completion: Arc<Completion>, deadline: Instant) -> Settled;
    release(scope: &Scope, fence: Fence) -> Changed;
    mark_unknown(scope: &Scope, fence: Fence) -> Changed;
    mark_dead(only: Option<(&Scope, Fence)>, limit: u32) -> u64;
    untold(which: Untold, limit: u32) -> Vec<Notice>;
    tell(notice: &Notice, event: Option<&Event>) -> Changed;
    note_late_outcome(late: &LateOutcome) -> ();
    claim(claim: &Claim) -> Vec<Claimed>;
    acknowledge(sink: &str, order: Order, verdicts: &[Acknowledgement]) -> Vec<Uuid>;
    next_due(sink: &str) -> Option<Duration>;
    let_go(sink: &str, order: Order, from: Option<&str>) -> LetGo;
    sinks(over: Over) -> Vec<SinkState>;
    turn_sink(sink: &str, no: i64, turn: &SinkTurn) -> Changed;
    life() -> Life;
    stands(ids: &[RecordId]) -> Vec<(Fence, Status)>;
    reinstate(proposal: Proposal, attempt: Attempt) -> Reinstated;
    open_of(owner: OwnerId, from: Whence, limit: u32) -> OpenPiece;
    questions(asking: &[Asking], limit: u32) -> Vec<Due>;
    unresolved(id: RecordId) -> Option<Unresolved>;
    sweep_records(limit: u32) -> u64;
    sweep_events(retention: Duration, limit: u32) -> u64;
    sweep_leases() -> u64;
    list_records(filter: &RecordFilter) -> Vec<RecordRow>;
    show_record(id: RecordId) -> Option<RecordRow>;
    list_events(filter: &EventFilter) -> Vec<EventRow>;
    operator_release(fence: Fence, completed: bool, by: &Operator) -> Acted;
    operator_complete(completion: &Completion, by: &Operator) -> Acted;
    redeliver(which: &Chosen, by: &Operator) -> Touched;
    discard(which: &Chosen, by: &Operator) -> Touched;
    count_dead(which: &DeadFilter) -> u64;
    attempts_of(event: Uuid) -> Vec<AttemptRow>;
    operate_sink(sink: &str, order: SinkOrder, by: &Operator) -> Changed;
    last_failure(sink: &str) -> Option<String>;
    audit_of(record: RecordId) -> Vec<AuditRow>;
    acted_on(window: Duration) -> Vec<RecordId>;
    database_id() -> Uuid;
    ping() -> ();
    gauges() -> Gauges;
}
