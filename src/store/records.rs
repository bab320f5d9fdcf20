//! Records: what the gateway asks of a store, in its verbs. From the lease and the reservation to the end of an attempt, and
//! what a process asks in order to look after its own records.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use uuid::Uuid;

use super::layer::verbs;
use super::{Completion, LateOutcome, Settled};
use crate::record::event::Event;
use crate::record::event::notice::Notice;
use crate::record::{
    Attempt, Caller, Fence, Fingerprint, LookupDelay, Operation, OwnerId, Record, RecordId, Scope,
    Status,
};

verbs! {
/// Records and the leases of those who work on them.
pub trait Records, layered by RecordsLayer {
    /// Renews `owner`'s lease for `lease` from now, or makes it where there is none yet. A lease that has run out is never
    /// renewed.
    async fn heartbeat(&self, owner: OwnerId, lease: Duration) -> Result<Heartbeat, Error>;

    /// Ends `owner`'s lease at once (a clean exit).
    async fn retire(&self, owner: OwnerId) -> Result<(), Error>;

    /// Makes the reservation, or says which record exists in its place. Grouped with what else is waiting into one commit.
    ///
    /// Running it again with the same id after [`InDoubt`](super::Error::InDoubt) is safe: an own row that is found is `Held`.
    async fn reserve(&self, proposal: Proposal, deadline: Instant) -> Result<Reserved, Error>;

    /// Takes a row over for the proposal's owner, fenced. `Changed::No` where it moved on, or the owner has no live lease.
    async fn take_over(&self, proposal: Proposal, from: Takeover) -> Result<Changed, Error>;

    /// The upstream was asked about this attempt and knows nothing of it: raises the record to the next one, in the place of
    /// the look-up, with the proposal's caller, context and retention. `Changed::No` where the record is not in progress under
    /// this very attempt and the proposal's owner any more, or the owner has no live lease.
    ///
    /// Running it again after [`InDoubt`](super::Error::InDoubt) is safe: a row that it has raised already is `Yes`.
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
    /// After a look-up of the same attempt the doubt goes on: its beginning stays, and the next look-up waits longer.
    async fn mark_unknown(&self, scope: &Scope, fence: Fence) -> Result<Changed, Error>;

    /// Marks records in progress `unknown` whose owner's lease has run out, up to `limit`; with a fence only that record.
    async fn mark_dead(&self, only: Option<(&Scope, Fence)>, limit: u32) -> Result<u64, Error>;

    /// Which run of which server answers; see [`Incarnation`]. Asked of whoever takes writes.
    async fn incarnation(&self) -> Result<Incarnation, Error>;

    /// At which attempt and in which status these records are. Those that do not exist are left out.
    async fn statuses(&self, ids: &[RecordId]) -> Result<Vec<(Fence, Status)>, Error>;

    /// Brings back a record that the database had confirmed and has forgotten: under the proposal's id it is in progress
    /// for this attempt again. Also one that it has put back to an earlier attempt. Never in the place of another record,
    /// nor where this one is completed or an operator has acted on it.
    ///
    /// Running it again is safe: an own row that is found is `No`, and goes on by its fence.
    async fn reinstate(&self, proposal: Proposal, attempt: Attempt) -> Result<Reinstated, Error>;

    /// The records that this owner has in progress, among the next `limit` of all from a place on.
    async fn open_of(&self, owner: OwnerId, from: ScanFrom, limit: u32) -> Result<OpenPiece, Error>;

    /// Unknown records of these operations about which the upstream may be asked now, up to `limit`: those first that wait
    /// longest.
    async fn due_lookups(&self, rules: &[LookupRule], limit: u32) -> Result<Vec<DueLookup>, Error>;

    /// What is known of a record that is unknown; `None` where it is not.
    async fn unresolved(&self, id: RecordId) -> Result<Option<Unresolved>, Error>;

    /// Writes an outcome that changed no row to the audit table. Run again it writes nothing more.
    async fn note_late_outcome(&self, late: &LateOutcome) -> Result<(), Error>;

    /// Records that became unknown, or are no longer, of which that has not been announced yet; up to `limit`.
    async fn unannounced(&self, which: Unannounced, limit: u32) -> Result<Vec<Notice>, Error>;

    /// Writes the event of a notice, in one transaction with the mark that it was announced. `Changed::No`: somebody else
    /// has announced it. Without an event only the mark is set, or the note removed.
    async fn announce(&self, notice: &Notice, event: Option<&Event>) -> Result<Changed, Error>;

    /// Deletes expired completed records, up to `limit`. How many.
    async fn sweep_records(&self, limit: u32) -> Result<u64, Error>;

    /// Deletes leases that have run out long ago and that no record in progress names.
    async fn sweep_leases(&self) -> Result<u64, Error>;
}
}

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
    /// How long the answer will be kept. It is in the row for those who complete it without a configuration.
    pub retention: Duration,
}

/// What became of a [`Proposal`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reserved {
    /// The row is this proposal's, committed.
    Held,
    /// The scope has another record.
    Exists(Box<Record>),
    /// The scope had another record, which is gone by now: propose again.
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
    Lookup(Fence, LookupDelay, LookupTrigger),
}

/// Why the upstream is asked about an unknown record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LookupTrigger {
    /// By the gateway itself: not before the pause after the last look-up is over.
    Gateway,
    /// For a retry: at once.
    Retry,
}

/// About the records of which operation the upstream is asked.
#[derive(Clone, Debug)]
pub struct LookupRule {
    /// The operation.
    pub operation: Operation,
    /// How long the upstream is left alone before.
    pub delay: LookupDelay,
}

/// An unknown record about which the upstream may be asked now.
#[derive(Clone, Debug)]
pub struct DueLookup {
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
    /// Look-ups in a row that brought no result.
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
    /// changed, and what it will commit is not known yet. Nobody waits for it with a connection: try again later.
    Locked,
}

/// What a heartbeat found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heartbeat {
    /// The lease runs anew from now.
    Renewed,
    /// The lease had run out and is never renewed: take a new owner id.
    Ended,
}

/// Of which unknown records it is asked what has not been announced yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unannounced {
    /// Those that began, and those that were announced and are over.
    All,
    /// The latter only.
    Resolved,
}

/// Which run of which server answers. While it is the same, nothing that was confirmed can be gone; once it is another
/// (the server was restarted, a standby took its place, a backup was restored), something may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Incarnation(pub(super) i64);

/// What became of a record that was to be brought back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reinstated {
    /// It is in progress under its id and attempt again, and the proposal's owner holds it.
    Yes,
    /// Nothing was changed: the scope has a record, another one or this very one.
    No,
    /// Nothing was changed: an operator has acted on this record.
    ActedOn,
    /// Nothing was changed, since the proposal's owner has no live lease.
    LeaseEnded,
}

/// Where a look through the records begins; they are in the order of their creation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScanFrom {
    /// At the oldest.
    Oldest,
    /// At those that were made this long ago, by the database's clock.
    Ago(Duration),
    /// Behind the last one of the piece before.
    After(SystemTime, Uuid),
}

/// A piece of a look for records in progress.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpenPiece {
    /// Those of the owner.
    pub open: Vec<(Scope, Fence)>,
    /// The last record that was looked at; `None`: there are no more.
    pub last: Option<(SystemTime, Uuid)>,
}
