//! A store with a fault point before and after each verb that changes something; see `fault`.
//!
//! Before the verb a fault means "nothing was changed", after it "done, and nobody was told": what the two errors of a
//! store say. A new verb of [`Store`] is one line here: with its [`Verb`] where it changes something (but for
//! [`Store::let_go`] and [`Store::reinstate`], which are asked again and again).

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use uuid::Uuid;

use super::{
    Acknowledgement, Acted, Asking, AttemptRow, AuditRow, Beat, Changed, Chosen, Claim, Claimed,
    Completion, DeadFilter, Due, Error, EventFilter, EventRow, Gauges, LateOutcome, LetGo, Life,
    OpenPiece, Operator, Order, Over, Proposal, RecordFilter, RecordRow, Reinstated, Reserved,
    Settled, SinkOrder, SinkState, SinkTurn, Store, Takeover, Touched, Unresolved, Untold, Whence,
};
use crate::fault::{self, Injected, Point, Verb};
use crate::record::event::Event;
use crate::record::event::notice::Notice;
use crate::record::{Attempt, Fence, OwnerId, Record, RecordId, Scope, Status};

/// The same store, with fault points.
#[must_use]
pub fn faulty(store: Arc<dyn Store>) -> Arc<dyn Store> {
    Arc::new(Faulty(store))
}

struct Faulty(Arc<dyn Store>);

async fn around<T>(verb: Verb, doing: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    let unchanged = |fault: Injected| Error::Unavailable(fault.into());
    let untold = |fault: Injected| Error::InDoubt(fault.into());
    fault::fallible(Point::Before(verb)).await.map_err(unchanged)?;
    let done = doing.await?;
    fault::fallible(Point::After(verb)).await.map_err(untold)?;
    Ok(done)
}

macro_rules! verbs {
    ($($name:ident($($arg:ident: $kind:ty),*) -> $done:ty $(, $verb:ident)?;)*) => {
        #[async_trait]
        impl Store for Faulty {
            $(async fn $name(&self, $($arg: $kind),*) -> Result<$done, Error> {
                verbs!(@ask self.0.$name($($arg),*) $(, $verb)?)
            })*
        }
    };
    (@ask $asked:expr, $verb:ident) => { around(Verb::$verb, $asked).await };
    (@ask $asked:expr) => { $asked.await };
}

verbs! {
    heartbeat(owner: OwnerId, lease: Duration) -> Beat, Heartbeat;
    retire(owner: OwnerId) -> (), Retire;
    reserve(proposal: Proposal, deadline: Instant) -> Reserved, Reserve;
    take_over(proposal: Proposal, from: Takeover) -> Changed, TakeOver;
    raise(proposal: Proposal, fence: Fence) -> Changed, Raise;
    find(scope: &Scope) -> Option<Record>;
    complete(completion: Arc<Completion>, deadline: Instant) -> Settled, Complete;
    release(scope: &Scope, fence: Fence) -> Changed, Release;
    mark_unknown(scope: &Scope, fence: Fence) -> Changed, MarkUnknown;
    mark_dead(only: Option<(&Scope, Fence)>, limit: u32) -> u64, MarkDead;
    untold(which: Untold, limit: u32) -> Vec<Notice>;
    tell(notice: &Notice, event: Option<&Event>) -> Changed, Tell;
    note_late_outcome(late: &LateOutcome) -> (), NoteLateOutcome;
    claim(claim: &Claim) -> Vec<Claimed>, Claim;
    acknowledge(sink: &str, order: Order, verdicts: &[Acknowledgement]) -> Vec<Uuid>, Acknowledge;
    next_due(sink: &str) -> Option<Duration>;
    let_go(sink: &str, order: Order, from: Option<&str>) -> LetGo;
    sinks(over: Over) -> Vec<SinkState>;
    turn_sink(sink: &str, no: i64, turn: &SinkTurn) -> Changed, TurnSink;
    life() -> Life;
    stands(ids: &[RecordId]) -> Vec<(Fence, Status)>;
    reinstate(proposal: Proposal, attempt: Attempt) -> Reinstated;
    open_of(owner: OwnerId, from: Whence, limit: u32) -> OpenPiece;
    questions(asking: &[Asking], limit: u32) -> Vec<Due>;
    unresolved(id: RecordId) -> Option<Unresolved>;
    sweep_records(limit: u32) -> u64, SweepRecords;
    sweep_events(retention: Duration, limit: u32) -> u64, SweepEvents;
    sweep_leases() -> u64, SweepLeases;
    list_records(filter: &RecordFilter) -> Vec<RecordRow>;
    show_record(id: RecordId) -> Option<RecordRow>;
    list_events(filter: &EventFilter) -> Vec<EventRow>;
    operator_release(fence: Fence, completed: bool, by: &Operator) -> Acted, OperatorRelease;
    operator_complete(completion: &Completion, by: &Operator) -> Acted, OperatorComplete;
    redeliver(which: &Chosen, by: &Operator) -> Touched, Redeliver;
    discard(which: &Chosen, by: &Operator) -> Touched, Discard;
    count_dead(which: &DeadFilter) -> u64;
    attempts_of(event: Uuid) -> Vec<AttemptRow>;
    operate_sink(sink: &str, order: SinkOrder, by: &Operator) -> Changed, OperateSink;
    last_failure(sink: &str) -> Option<String>;
    audit_of(record: RecordId) -> Vec<AuditRow>;
    acted_on(window: Duration) -> Vec<RecordId>;
    database_id() -> Uuid;
    ping() -> ();
    gauges() -> Gauges;
}
