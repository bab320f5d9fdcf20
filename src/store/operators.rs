//! What operators ask of a store: lists, what they do to records and events by hand, and how the store is.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use uuid::Uuid;

use super::layer::verbs;
use super::{Completion, EventStatus};
use crate::record::{Answer, Attempt, Fence, Fingerprint, OwnerId, RecordId, Scope, Status};

verbs! {
/// Lists, actions by hand, and the state of the store.
pub trait Operators, layered by OperatorsLayer {
    /// Records for operators.
    async fn list_records(&self, filter: &RecordFilter) -> Result<Vec<RecordRow>, Error>;

    /// One record with its body.
    async fn show_record(&self, id: RecordId) -> Result<Option<RecordRow>, Error>;

    /// Events for operators.
    async fn list_events(&self, filter: &EventFilter) -> Result<Vec<EventRow>, Error>;

    /// An operator says that the record did not execute (or, with `completed`, that it shall be forgotten): the row goes.
    /// Audited.
    ///
    /// Acts on `unknown`, and on `in_progress` whose owner's lease has run out. Fenced by the attempt: `Moved` where it is
    /// not current.
    async fn operator_release(
        &self,
        fence: Fence,
        completed: bool,
        by: &Operator,
    ) -> Result<Acted, Error>;

    /// An operator says what happened: the record is completed under attempt + 1, with its events. Audited.
    async fn operator_complete(
        &self,
        completion: &Completion,
        by: &Operator,
    ) -> Result<Acted, Error>;

    /// Makes events due again, through the retry lane, under their id and with growing claim numbers. Audited.
    ///
    /// One event: what is dead or pending, unless it is asked for otherwise what is sent, too, and what was discarded
    /// towards the sink that is named; what is being delivered right now is left alone. Dead ones go in small transactions,
    /// those that were dead at the beginning. Each is one row in the audit table, and all dead ones together are one, which
    /// grows with them and is found from each of their records.
    async fn redeliver(&self, which: &Chosen, by: &Operator) -> Result<Touched, Error>;

    /// Gives events up for good: pending and dead ones become discarded. What is sent stays so, and what is being delivered
    /// right now is left alone. Audited as a redelivery is.
    async fn discard(&self, which: &Chosen, by: &Operator) -> Result<Touched, Error>;

    /// How many dead events these are.
    async fn count_dead(&self, which: &DeadFilter) -> Result<u64, Error>;

    /// The attempts of an event that have ended, oldest first, by sink: failures as far as they are kept, and successes.
    async fn attempts_of(&self, event: Uuid) -> Result<Vec<AttemptRow>, Error>;

    /// What was done to a record by hand, and its late outcomes, oldest first. What was done to many dead events at once is
    /// told for each of the record's among them, for as long as the event is kept.
    async fn audit_of(&self, record: RecordId) -> Result<Vec<AuditRow>, Error>;

    /// Records that operators acted on within the last `window`.
    async fn acted_on(&self, window: Duration) -> Result<Vec<RecordId>, Error>;

    /// By which id a spill knows this database again: random, made with the schema.
    async fn database_id(&self) -> Result<Uuid, Error>;

    /// Whether the database answers and takes writes, and whoever writes to it here is alive.
    async fn ping(&self) -> Result<(), Error>;

    /// Why the last try to reach the database failed, where none has succeeded since. Nobody is asked for it.
    async fn unreached(&self) -> Result<Option<String>, Error>;

    /// How much stands in the store.
    async fn gauges(&self) -> Result<Gauges, Error>;
}
}

/// Which records a list shows; newest first.
#[derive(Clone, Debug, Default)]
pub struct RecordFilter {
    /// Only of this tenant.
    pub tenant: Option<String>,
    /// Only of this operation.
    pub operation: Option<String>,
    /// Only under this key.
    pub key: Option<String>,
    /// Only in this status.
    pub status: Option<Status>,
    /// Only those made within this long, by the database's clock.
    pub since: Option<Duration>,
    /// Only those after this one in the list's order: the last row of the page before.
    pub after: Option<(SystemTime, Uuid)>,
    /// At most this many.
    pub limit: u32,
}

/// A record as operators see it.
#[derive(Clone, Debug)]
pub struct RecordRow {
    /// Its id.
    pub id: RecordId,
    /// Its scope.
    pub scope: Scope,
    /// Of the request that made it.
    pub fingerprint: Fingerprint,
    /// Its status as stored.
    pub status: Status,
    /// The current attempt.
    pub attempt: Attempt,
    /// Who works, or worked, on it.
    pub owner: OwnerId,
    /// Whether that owner's lease is live now.
    pub owner_lives: bool,
    /// Who asked.
    pub caller: Option<String>,
    /// What events will need of the request; gone once completed.
    pub context: Option<Bytes>,
    /// When it was reserved.
    pub created_at: SystemTime,
    /// When it was completed.
    pub completed_at: Option<SystemTime>,
    /// When its retention ends.
    pub expires_at: Option<SystemTime>,
    /// The kept answer; lists leave its body out (`NotRetained`).
    pub answer: Option<Answer>,
}

/// Who does something to the store's content by hand, and why.
#[derive(Clone, Debug)]
pub struct Operator {
    /// The login name, or whatever names the person.
    pub who: String,
    /// In the person's words.
    pub why: Option<String>,
}

/// Why an operator's action was not done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Objection {
    /// There is no such record or event.
    NotFound,
    /// A live owner works on the record.
    Running {
        /// Who.
        owner: OwnerId,
        /// Since when.
        since: SystemTime,
    },
    /// The record is completed, and the action did not say that it means completed ones.
    IsCompleted,
    /// The record, or the event, moved on between the look and the action: look again.
    Moved,
}

/// What an operator did: `Ok`, or why not.
pub type Acted = Result<(), Objection>;

/// Which events a list shows; newest first.
#[derive(Clone, Debug, Default)]
pub struct EventFilter {
    /// Only this event (one row per sink).
    pub id: Option<Uuid>,
    /// Only of this record.
    pub record: Option<RecordId>,
    /// Only of this tenant.
    pub tenant: Option<String>,
    /// Only of this operation.
    pub operation: Option<String>,
    /// Only under this idempotency key.
    pub key: Option<String>,
    /// Only of this type.
    pub kind: Option<String>,
    /// Only towards this sink.
    pub sink: Option<String>,
    /// Only in this status.
    pub status: Option<EventStatus>,
    /// Only those made within this long.
    pub since: Option<Duration>,
    /// Only those after this one in the list's order: time, event and sink of the last row of the page before.
    pub after: Option<(SystemTime, Uuid, String)>,
    /// At most this many.
    pub limit: u32,
}

/// A row of `outbox_events`: an event towards one sink.
#[derive(Clone, Debug)]
pub struct EventRow {
    /// The event's id.
    pub id: Uuid,
    /// Its key.
    pub event_key: String,
    /// Its type.
    pub kind: String,
    /// Its record's scope.
    pub scope: Scope,
    /// Its record.
    pub record: RecordId,
    /// Towards which sink; empty: none wanted it.
    pub sink: String,
    /// Its ordering key.
    pub ordering_key: Option<String>,
    /// The message.
    pub payload: Bytes,
    /// Its status.
    pub status: EventStatus,
    /// Attempts that finished and failed, and the one that succeeded.
    pub attempts: u32,
    /// When it is due.
    pub next_attempt_at: Option<SystemTime>,
    /// What went wrong last.
    pub last_error: Option<String>,
    /// When it was written.
    pub created_at: SystemTime,
    /// How long ago that was, by the database's clock.
    pub age: Duration,
    /// When it was delivered.
    pub sent_at: Option<SystemTime>,
    /// Whether it is dead and the events behind it in its ordering key wait for it.
    pub blocks: bool,
}

/// What an operator does to events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventAction {
    /// They are due again.
    Redeliver,
    /// They are given up for good.
    Discard,
}

impl EventAction {
    /// As the audit table calls it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Redeliver => "event.redeliver",
            Self::Discard => "event.discard",
        }
    }
}

/// Upon which events an operator acts.
#[derive(Clone, Debug)]
pub enum Chosen {
    /// One event, towards one sink, or all.
    One {
        /// The event.
        id: Uuid,
        /// Towards which sink; `None`: all.
        sink: Option<String>,
    },
    /// One event, towards the sinks that have not taken it: where it is pending, or dead.
    NotTaken {
        /// The event.
        id: Uuid,
    },
    /// Dead ones, all at once.
    Dead(DeadFilter),
}

/// What an operator's action came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Touched {
    /// How many rows were changed: an event towards two sinks is two.
    pub count: u64,
    /// Of one event: each sink towards which it was changed, and how it stood there before.
    pub sinks: Vec<(String, EventStatus)>,
}

impl Touched {
    /// One event, towards these sinks.
    pub(super) fn one(sinks: Vec<(String, EventStatus)>) -> Self {
        Self { count: sinks.len() as u64, sinks }
    }

    /// So many rows of many events.
    pub(super) fn many(count: u64) -> Self {
        Self { count, sinks: Vec::new() }
    }
}

/// Which dead events.
#[derive(Clone, Debug, Default)]
pub struct DeadFilter {
    /// Only towards this sink.
    pub sink: Option<String>,
    /// Only of this type.
    pub kind: Option<String>,
    /// Only of this tenant.
    pub tenant: Option<String>,
    /// Only of this operation.
    pub operation: Option<String>,
    /// Only those made within this long.
    pub since: Option<Duration>,
}

impl DeadFilter {
    /// As the audit table tells it, with how many it came to.
    pub(super) fn detail(&self, changed: u64) -> String {
        serde_json::json!({
            "status": EventStatus::Dead.as_str(), "sink": self.sink, "type": self.kind, "tenant": self.tenant,
            "operation": self.operation, "since_seconds": self.since.map(|since| since.as_secs()), "count": changed,
        })
        .to_string()
    }
}

/// An attempt of an event towards a sink that has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttemptRow {
    /// Towards which sink.
    pub sink: String,
    /// Under which claim. Grows over all attempts, also over a redelivery.
    pub claim_no: i32,
    /// Which attempt. Counted anew after a redelivery.
    pub attempt: u32,
    /// When it ended, by the database's clock.
    pub at: SystemTime,
    /// The sink's status, where there was one.
    pub status: Option<u16>,
    /// What went wrong; `None`: the sink took it.
    pub error: Option<String>,
}

/// A row of `audit_log`.
#[derive(Clone, Debug)]
pub struct AuditRow {
    /// Its id.
    pub id: Uuid,
    /// When, by the database's clock.
    pub at: SystemTime,
    /// Who.
    pub who: String,
    /// What was done: `record.release`, `record.complete`, `event.redeliver`, `event.discard`, `sink.pause`, `sink.resume`,
    /// `late_outcome`.
    pub action: String,
    /// To which record.
    pub record: Option<RecordId>,
    /// To which event.
    pub event: Option<Uuid>,
    /// Why.
    pub why: Option<String>,
    /// More, as JSON.
    pub detail: Option<String>,
}

/// How much stands in the store, for metrics and pages.
#[derive(Clone, Debug, Default)]
pub struct Gauges {
    /// Pending events by sink: how many, and how old the oldest is.
    pub pending: Vec<(String, u64, Duration)>,
    /// Dead events by sink.
    pub dead: Vec<(String, u64)>,
    /// Ordering keys whose events wait behind a dead one, by sink.
    pub blocked: Vec<(String, u64)>,
    /// Records whose outcome is unknown.
    pub unknown_records: u64,
}
