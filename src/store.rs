//! What the gateway, the relay and the operator ask of a database, in our verbs.
//!
//! Two implementations, one suite of tests: `postgres` for any number of replicas, `sqlite` for one. What must
//! stay true in both:
//!
//! - A change names its [`Fence`] (or claim number) and the states it may leave; its row count is read, and "none"
//!   is an answer of its own ([`Changed::No`]), never an error and never ignored.
//! - Times are the database's own clock; callers pass durations.
//! - A reservation is durable when [`Store::reserve`] says `Held`; a completion and its events are one transaction.
//! - An [`Error`] says what may be concluded: nothing happened, or nobody knows.

pub mod awaited;
mod backlog;
pub mod batch;
#[cfg(feature = "fault-points")]
pub mod faulty;
mod late;
mod outbox;
mod own;
pub mod postgres;
pub mod sealed;
mod sinks;
pub mod sqlite;

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use async_trait::async_trait;
use bytes::Bytes;
use uuid::Uuid;

pub use self::backlog::{Backlog, Tide};
pub use self::late::{LateEnd, LateOutcome};
pub use self::outbox::{
    Acknowledgement, AttemptRow, Chosen, Claim, Claimed, DeadFilter, EventAction, EventFilter,
    EventRow, EventStatus, Lane, LetGo, Look, OnDead, Order, Over, Touched, Verdict,
};
pub use self::own::{Life, OpenPiece, Reinstated, Whence};
pub use self::sinks::{NextProbe, Pause, PauseReason, SinkOrder, SinkState, SinkTurn, Trouble};
use crate::record::event::Event;
use crate::record::event::notice::Notice;
use crate::record::{
    Answer, Attempt, Caller, Fence, Fingerprint, KeptBody, LookupDelay, Operation, OwnerId, Record,
    RecordId, Scope, Spelling, Status,
};

/// Why the store did not do it, by what the caller may conclude.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The database cannot be reached, or did not take the statement. Nothing was changed.
    #[error("the database is not available")]
    Unavailable(#[source] Cause),
    /// The statement was sent, and its end is not known: it may have been committed, or may still be.
    #[error("the database did not say whether it committed")]
    InDoubt(#[source] Cause),
    /// The database refused what was written (a value it cannot hold, say). Nothing was changed; again is no use.
    #[error("the database refused the data")]
    Refused(#[source] Cause),
    /// What stands in the database cannot be read: it is not what this program writes, or its key is missing here. Nothing
    /// was changed; again is no use.
    #[error("what stands in the database cannot be read")]
    Unreadable(#[source] Cause),
    /// The caller's deadline passed before the statement was begun. Nothing was changed.
    #[error("the database did not get to it in time")]
    Late,
}

/// Why a store could not be opened or migrated: what was wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// `store.url` is not understood.
    #[error("store.url is not valid: {0}")]
    Url(String),
    /// The database cannot be opened, or refuses this program: no time mends that.
    #[error("cannot open the store at {place}")]
    Connect {
        /// Where, without secrets.
        place: String,
        /// Why.
        #[source]
        cause: Cause,
    },
    /// The database cannot be reached, or does not serve now.
    #[error("cannot open the store at {place}")]
    Away {
        /// Where, without secrets.
        place: String,
        /// Why.
        #[source]
        cause: Cause,
    },
    /// A migration failed, and will again; the schema is as it was before it.
    #[error("migration {version} of the store failed")]
    Migration {
        /// Which.
        version: u32,
        /// Why.
        #[source]
        cause: Cause,
    },
    /// The database cannot hold every text that a request may have.
    #[error(
        "the database at {place} has the encoding {found}, in which many texts cannot be stored: make another one with \
         `CREATE DATABASE oncegate ENCODING 'UTF8' TEMPLATE template0`, and name it in store.url; what this one holds can be \
         moved by pg_dump and psql"
    )]
    Encoding {
        /// Where, without secrets.
        place: String,
        /// Its encoding.
        found: String,
    },
    /// A migration did not go through this time; the schema is as it was before it, unless the commit's answer was lost.
    #[error("migration {version} of the store did not go through")]
    Interrupted {
        /// Which.
        version: u32,
        /// Why.
        #[source]
        cause: Cause,
    },
    /// The schema is newer than this program.
    #[error(
        "the store's schema is version {found}, this program knows versions up to {known}: use a newer oncegate"
    )]
    NewerSchema {
        /// In the database.
        found: u32,
        /// In this program.
        known: u32,
    },
    /// The schema is older than this program and may not be migrated here.
    #[error(
        "the store's schema is version {found}, this program needs version {known}: run `oncegate migrate`, or set store.migrate = true"
    )]
    OlderSchema {
        /// In the database; 0: none.
        found: u32,
        /// In this program.
        known: u32,
    },
    /// Another `serve` works on the same SQLite file.
    #[error(
        "{place} is in use by another `oncegate serve`: stop it, or give this one a file of its own"
    )]
    Locked {
        /// The database file.
        place: String,
    },
}

impl Error {
    /// Whether the same may succeed another time, with nobody doing anything about it.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Unavailable(_) | Self::InDoubt(_) | Self::Late => true,
            Self::Refused(_) | Self::Unreadable(_) => false,
        }
    }
}

impl OpenError {
    /// Whether the same may succeed another time, with nobody doing anything about it.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Away { .. } | Self::Interrupted { .. } => true,
            Self::Url(_)
            | Self::Connect { .. }
            | Self::Migration { .. }
            | Self::Encoding { .. }
            | Self::NewerSchema { .. }
            | Self::OlderSchema { .. }
            | Self::Locked { .. } => false,
        }
    }
}

/// The error beneath, for the log only: it is never shown to callers.
pub type Cause = Box<dyn std::error::Error + Send + Sync>;

/// A reservation to be made: all that the row says before the upstream is asked.
#[derive(Clone, Debug)]
pub struct Proposal {
    /// The new record's id.
    pub id: RecordId,
    /// Its scope.
    pub scope: Scope,
    /// Of the request.
    pub fingerprint: Fingerprint,
    /// This process, which must hold a live lease in the database.
    pub owner: OwnerId,
    /// Who asked: the verified subject, or a keyed digest of the credential.
    pub caller: Option<String>,
    /// What events and look-ups will need of the request; kept until completion.
    pub context: Option<Bytes>,
    /// How long the answer will be kept. Stands in the row for those who complete it without a configuration.
    pub retention: Duration,
}

/// What became of a [`Proposal`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reserved {
    /// The row is this proposal's, committed.
    Held,
    /// Another record stands under the scope.
    Exists(Box<Record>),
    /// Another record stood there and is gone by now: propose again.
    Vanished,
    /// The owner has no live lease: nothing was written.
    LeaseEnded,
}

/// From which state a scope is taken over, with the fence that was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takeover {
    /// A completed record whose retention is over, swept or not: the row gets the proposal's id and attempt 1.
    Expired(Fence),
    /// An unknown record whose policy allows another attempt: same id, attempt + 1, the fingerprint stays.
    Unknown(Fence),
    /// An unknown record about which the upstream may be asked now: same id, same attempt, the request's context stays.
    Question(Fence, LookupDelay, Asker),
}

/// Why the upstream is asked about an unknown record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asker {
    /// By the gateway itself: not before the pause after the last question is over.
    Gateway,
    /// For a retry: at once.
    Retry,
}

/// About the records of which operation the upstream is asked.
#[derive(Clone, Debug)]
pub struct Asking {
    /// The operation.
    pub operation: Operation,
    /// How long the upstream is left alone before.
    pub delay: LookupDelay,
}

/// An unknown record about which the upstream may be asked now.
#[derive(Clone, Debug)]
pub struct Due {
    /// Its scope.
    pub scope: Scope,
    /// Its id and the attempt that is unknown.
    pub fence: Fence,
    /// Of the request that made it.
    pub fingerprint: Fingerprint,
    /// Who asked for the attempt.
    pub caller: Option<Caller>,
    /// What was kept of the request.
    pub context: Option<Bytes>,
}

/// What is known of an unknown record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unresolved {
    /// When its attempt became unknown; of a dead owner: its lease's end.
    pub since: SystemTime,
    /// How long ago that was, by the database's clock.
    pub age: Duration,
    /// Whether its owner died.
    pub orphaned: bool,
    /// Questions in a row that brought no result.
    pub asked: u32,
    /// Before then the gateway does not ask about it again by itself.
    pub next_ask_at: SystemTime,
    /// What was kept of the request of the attempt that is unknown.
    pub context: Option<Bytes>,
}

/// Whether a fenced change found its row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Changed {
    /// It is done.
    Yes,
    /// Somebody else has the record: nothing was changed.
    No,
    /// An open transaction of somebody else holds the row, an application's that completes it, say: nothing was
    /// changed, and what will stand there is not known yet. Nobody waits for it with a connection: try again later.
    Locked,
}

/// An outcome to be kept: the answer and its events, written in one transaction.
#[derive(Clone, Debug)]
pub struct Completion {
    /// The record's scope.
    pub scope: Scope,
    /// The attempt that got the answer.
    pub fence: Fence,
    /// What will be replayed.
    pub answer: Answer,
    /// How long, counted from the completion.
    pub retention: Duration,
    /// What is announced.
    pub events: Vec<Event>,
}

/// What became of a [`Completion`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settled {
    /// It is durable.
    Done {
        /// When the answer's retention ends, by the database's clock.
        expires_at: SystemTime,
    },
    /// The record is no longer at this fence, or is completed already: nothing was written, no event either.
    Fenced,
    /// An open transaction of somebody else held the row until the deadline: nothing was written. It may be about to
    /// complete the record with another answer.
    Locked,
}

/// What a heartbeat found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beat {
    /// The lease runs anew from now.
    Renewed,
    /// The lease had run out and is never renewed: take a new owner id.
    Ended,
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

/// How many failed attempts of an event towards a sink are kept at least: those under its last claims. Never more.
pub const ATTEMPTS_KEPT: u32 = 50;

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

/// Of which unknown records it is asked what has not been told yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Untold {
    /// Those that began, and those that were told of and are over.
    All,
    /// The latter only.
    Resolved,
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

/// A database that keeps records and the outbox.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// Renews `owner`'s lease for `lease` from now, or makes it where there is none yet. A lease that has run out is never
    /// renewed.
    async fn heartbeat(&self, owner: OwnerId, lease: Duration) -> Result<Beat, Error>;

    /// Ends `owner`'s lease at once (a clean exit).
    async fn retire(&self, owner: OwnerId) -> Result<(), Error>;

    /// Makes the reservation, or says what stands in its place. Grouped with what else is waiting into one commit.
    ///
    /// Running it again with the same id after [`Error::InDoubt`] is safe: an own row that is found is `Held`.
    async fn reserve(&self, proposal: Proposal, deadline: Instant) -> Result<Reserved, Error>;

    /// Takes a row over for the proposal's owner, fenced. `Changed::No` where it moved on, or the owner has no live lease.
    async fn take_over(&self, proposal: Proposal, from: Takeover) -> Result<Changed, Error>;

    /// The upstream was asked about this attempt and knows nothing of it: raises the record to the next one, in the place of
    /// the question, with the proposal's caller, context and retention. `Changed::No` where the record is not in progress under
    /// this very attempt and the proposal's owner any more, or the owner has no live lease.
    ///
    /// Running it again after [`Error::InDoubt`] is safe: a row that it has raised already is `Yes`.
    async fn raise(&self, proposal: Proposal, fence: Fence) -> Result<Changed, Error>;

    /// The record under a scope.
    async fn find(&self, scope: &Scope) -> Result<Option<Record>, Error>;

    /// Keeps an outcome and its events: one transaction, grouped with what else is waiting.
    /// Leaves `in_progress`, and `unknown` of the same attempt. A row that somebody's open transaction holds stops no
    /// other completion; this one is tried again until `deadline`, and is [`Settled::Locked`] then.
    async fn complete(
        &self,
        completion: Arc<Completion>,
        deadline: Instant,
    ) -> Result<Settled, Error>;

    /// Frees an attempt that is known not to have executed: attempt 1 deletes the row, a later one goes back to `unknown`.
    async fn release(&self, scope: &Scope, fence: Fence) -> Result<Changed, Error>;

    /// Marks an attempt of this process `unknown`. `Changed::No` also where it is `unknown` already.
    /// After a question about the same attempt the doubt goes on: its beginning stays, and the next question waits longer.
    async fn mark_unknown(&self, scope: &Scope, fence: Fence) -> Result<Changed, Error>;

    /// Marks records in progress `unknown` whose owner's lease has run out, up to `limit`; with a fence only that record.
    async fn mark_dead(&self, only: Option<(&Scope, Fence)>, limit: u32) -> Result<u64, Error>;

    /// Which run of which server answers; see [`Life`]. Asked of whoever takes writes.
    async fn life(&self) -> Result<Life, Error>;

    /// At which attempt and in which status these records are. Those that do not exist are left out.
    async fn stands(&self, ids: &[RecordId]) -> Result<Vec<(Fence, Status)>, Error>;

    /// Brings back a record that the database had confirmed and has forgotten: under the proposal's id it is in progress
    /// for this attempt again. Also one that it has put back to an earlier attempt. Never in the place of another record,
    /// nor where this one is completed or an operator has acted on it.
    ///
    /// Running it again is safe: an own row that is found is `No`, and goes on by its fence.
    async fn reinstate(&self, proposal: Proposal, attempt: Attempt) -> Result<Reinstated, Error>;

    /// The records that this owner has in progress, among the next `limit` of all from a place on.
    async fn open_of(&self, owner: OwnerId, from: Whence, limit: u32) -> Result<OpenPiece, Error>;

    /// Unknown records of these operations about which the upstream may be asked now, up to `limit`: those first that wait
    /// longest.
    async fn questions(&self, asking: &[Asking], limit: u32) -> Result<Vec<Due>, Error>;

    /// What is known of a record that is unknown; `None` where it is not.
    async fn unresolved(&self, id: RecordId) -> Result<Option<Unresolved>, Error>;

    /// Writes an outcome that changed no row to the audit table. Run again it writes nothing more.
    async fn note_late_outcome(&self, late: &LateOutcome) -> Result<(), Error>;

    /// Claims events that are due; see [`Claim`]. Committed before it returns. Whether `owner` itself lives is not asked.
    ///
    /// With [`Order::Key`] an event is claimed only as the first of its key, and only while no other of its key is claimed.
    /// What stands behind is put off (`next_attempt_at`), until an acknowledgement in that order makes it due.
    async fn claim(&self, claim: &Claim) -> Result<Vec<Claimed>, Error>;

    /// Writes verdicts, each under its claim number. The ids of those that found their claim still current. `order` is that of
    /// the claims: with a verdict, in one transaction, the next event of its key becomes due.
    async fn acknowledge(
        &self,
        sink: &str,
        order: Order,
        verdicts: &[Acknowledgement],
    ) -> Result<Vec<Uuid>, Error>;

    /// How long until the next event of this sink that is not claimable now could be (a retry's time or a claim's end);
    /// `None`: nothing waits.
    async fn next_due(&self, sink: &str) -> Result<Option<Duration>, Error>;

    /// Makes due what nothing keeps back any more in this order: with [`Order::None`] whatever waits for others of its
    /// ordering key; with [`Order::Key`] the first event of each key whose turn nobody has, and that was put off behind an
    /// event that went without waking it (by hand, say, or by a relay with another order). Dead events block no key any
    /// more unless `order` says that they do. The pauses of retries stay as they are.
    ///
    /// In pieces, each a short transaction: from the beginning with `None`, then from where the last one ended. To be asked
    /// at the start and from time to time: so a change of the order takes effect though nobody says that it was one.
    async fn let_go(&self, sink: &str, order: Order, from: Option<&str>) -> Result<LetGo, Error>;

    /// How the sinks stand that were ever paused. `over` says which probes count as ended.
    async fn sinks(&self, over: Over) -> Result<Vec<SinkState>, Error>;

    /// Makes a sink's state the next one, under the next number. `Changed::No`: it is not at this number any more, the turn
    /// does not lead on from there, or (of a probe) its time has not come.
    async fn turn_sink(&self, sink: &str, no: i64, turn: &SinkTurn) -> Result<Changed, Error>;

    /// Records that became unknown, or are no longer, of which that has not been told yet; up to `limit`.
    async fn untold(&self, which: Untold, limit: u32) -> Result<Vec<Notice>, Error>;

    /// Writes the event of a notice, in one transaction with the mark that it was told. `Changed::No`: somebody else
    /// has told of it. Without an event only the mark is set, or the note removed.
    async fn tell(&self, notice: &Notice, event: Option<&Event>) -> Result<Changed, Error>;

    /// Deletes expired completed records, up to `limit`. How many.
    async fn sweep_records(&self, limit: u32) -> Result<u64, Error>;

    /// Deletes events all of whose rows are sent or discarded for longer than `retention`, with their attempts, up to `limit`.
    /// How many.
    async fn sweep_events(&self, retention: Duration, limit: u32) -> Result<u64, Error>;

    /// Deletes leases that have run out long ago and that no record in progress names.
    async fn sweep_leases(&self) -> Result<u64, Error>;

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

    /// Pauses or resumes a sink by hand, whatever a relay is about to make of it. Audited. `Changed::No`: it stands so already.
    async fn operate_sink(
        &self,
        sink: &str,
        order: SinkOrder,
        by: &Operator,
    ) -> Result<Changed, Error>;

    /// What went wrong with a sink's deliveries: the error of the one that was tried last of those that are still owed, or else
    /// of the one that died last.
    async fn last_failure(&self, sink: &str) -> Result<Option<String>, Error>;

    /// What was done to a record by hand, and its late outcomes, oldest first. What was done to many dead events at once is
    /// told for each of the record's among them, for as long as the event is kept.
    async fn audit_of(&self, record: RecordId) -> Result<Vec<AuditRow>, Error>;

    /// Records that operators acted on within the last `window`.
    async fn acted_on(&self, window: Duration) -> Result<Vec<RecordId>, Error>;

    /// By which id a spill knows this database again: random, made with the schema.
    async fn database_id(&self) -> Result<Uuid, Error>;

    /// Whether the database answers and takes writes, and whoever writes to it here is alive.
    async fn ping(&self) -> Result<(), Error>;

    /// How much stands in the store.
    async fn gauges(&self) -> Result<Gauges, Error>;
}

/// What became of a [`Completion`], and in which form it was written.
#[derive(Clone, Debug)]
pub struct Written {
    /// What became of it.
    pub settled: Settled,
    /// As it was written, where it is [`Settled::Done`].
    pub completion: Arc<Completion>,
}

/// Completes a record. Of an outcome that the database refuses to hold it leaves out what may be the reason: first the
/// ordering keys of its events, then headers and body of its answer. What was executed, and its events, are kept.
///
/// # Errors
/// As [`Store::complete`]; [`Error::Refused`] where the database refuses the last form, too.
pub async fn complete_in_some_form(
    store: &dyn Store,
    completion: &Arc<Completion>,
    deadline: Instant,
) -> Result<Written, Error> {
    let record = completion.fence.id;
    let mut completion = Arc::clone(completion);
    for (left_out, lessen) in LESSER_FORMS {
        match store.complete(Arc::clone(&completion), deadline).await {
            Ok(settled) => return Ok(Written { settled, completion }),
            Err(Error::Refused(cause)) => {
                tracing::error!(%record, %cause, "the database refused a completion; again without {left_out}");
                lessen(Arc::make_mut(&mut completion));
            }
            Err(error) => return Err(error),
        }
    }
    let settled = store.complete(Arc::clone(&completion), deadline).await?;
    Ok(Written { settled, completion })
}

/// What is left out, one after the other.
type Lessen = fn(&mut Completion);
const LESSER_FORMS: [(&str, Lessen); 2] = [
    ("ordering keys", |completion| {
        for event in &mut completion.events {
            event.ordering_key = None;
        }
    }),
    ("headers and body", |completion| {
        let Answer { headers, spelling, body, .. } = &mut completion.answer;
        headers.clear();
        *spelling = Spelling::default();
        *body = KeptBody::NotRetained;
    }),
];

/// The store with a fault point before and after each verb, in builds that have them; else the store.
#[must_use]
pub fn with_fault_points(store: Arc<dyn Store>) -> Arc<dyn Store> {
    #[cfg(feature = "fault-points")]
    let store = faulty::faulty(store);
    store
}
