//! The embedded store: one SQLite file, one gateway.
//!
//! Reservations and completions are grouped as on Postgres, one commit for what queued while the last one ran. One
//! thread writes, one reads (write-ahead logging lets them run side by side), one reads long lists so that no look-up
//! waits for them, and one moves the log into the database.
//! What must stay true:
//!
//! - Only `serve` takes the lock ([`lock`]), so one process proposes reservations. Commands open the same file
//!   beside it and take SQLite's own write lock for a moment.
//! - `synchronous = FULL`: what was answered is on the disk.
//! - Times are SQLite's clock, read inside the transaction; callers pass durations.
//!
//! When the process dies here, the log holds each commit as a whole or not at all, and the next open replays it.

mod events;
mod file;
mod lookups;
mod notices;
mod operator;
mod order;
mod outbox;
mod own;
mod queue;
mod records;
mod row;
mod show;
mod sinks;
mod takeover;
mod thread;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use uuid::Uuid;

use self::file::OpenFiles;
pub use self::file::{FileLock, Location, lock};
use self::records::Completer;
pub use self::thread::all_closed;
use self::thread::{Busy, Nudge, Role, Tx, Worker, checkpoints, connect};
use super::batch::{BatchPermit, Batcher, RunError, Work};
use super::layer::implement;
use super::{
    Acknowledgement, Acted, AttemptRow, AuditRow, Cause, Changed, Chosen, Claim, Claimed,
    Completion, DeadFilter, DueLookup, Error, EventAction, EventFilter, EventRow, Gauges,
    Heartbeat, Incarnation, LateOutcome, LookupRule, OpenError, OpenPiece, Operator, Operators,
    Order, Outbox, Proposal, Reclaim, RecordFilter, RecordRow, Records, Reinstated, Reserved,
    ScanFrom, Settled, SinkChange, SinkOrder, SinkState, Sinks, Takeover, Touched, Unannounced,
    Unresolved, Woken,
};
use crate::fault::{self, Point};
use crate::record::event::Event;
use crate::record::event::notice::Notice;
use crate::record::{Attempt, Fence, OwnerId, Record, RecordId, Scope, Status};
use crate::tasks::{self, Vital};
use crate::telemetry;

/// Each migration brings the schema from the version before it to its own.
const MIGRATIONS: [(u32, &str); 8] = [
    (1, include_str!("../../migrations/sqlite/0001_records.sql")),
    (2, include_str!("../../migrations/sqlite/0002_unknown.sql")),
    (3, include_str!("../../migrations/sqlite/0003_claim_owner.sql")),
    (4, include_str!("../../migrations/sqlite/0004_retention.sql")),
    (5, include_str!("../../migrations/sqlite/0005_sinks.sql")),
    (6, include_str!("../../migrations/sqlite/0006_order.sql")),
    (7, include_str!("../../migrations/sqlite/0007_attempts.sql")),
    (8, include_str!("../../migrations/sqlite/0008_audit_events.sql")),
];

/// How long a claim goes on looking while all that it finds has to wait for others.
const LOOK_MAX: Duration = Duration::from_secs(1);

/// The schema's version that this program knows.
const KNOWN: u32 = 8;

/// A SQLite file as a store. Dropped, its threads finish what is queued and end.
pub struct Sqlite {
    writer: Writer,
    reader: Worker,
    lists: Worker,
    reservations: Batcher<Reservations>,
    completions: Batcher<Completions>,
    place: String,
}

impl Sqlite {
    /// Opens the file, and makes it where there is none and that is allowed. It neither migrates nor locks.
    ///
    /// # Errors
    /// [`OpenError::Connect`] where the file cannot be read and written, or is no database;
    /// [`OpenError::NewerSchema`] where a newer program has migrated it.
    pub async fn open(location: &Location) -> Result<Self, OpenError> {
        Self::open_as(location, None).await
    }

    /// As [`Sqlite::open`], for who has locked the file: the lock is kept until the last connection is closed.
    ///
    /// # Errors
    /// As [`Sqlite::open`].
    pub async fn open_locked(location: &Location, lock: FileLock) -> Result<Self, OpenError> {
        Self::open_as(location, Some(lock)).await
    }

    async fn open_as(location: &Location, lock: Option<FileLock>) -> Result<Self, OpenError> {
        location.look()?;
        let place = location.path.display().to_string();
        let location = location.clone();
        let opened = tokio::task::spawn_blocking(move || {
            let workers = start(&location, lock)?;
            Ok::<_, Cause>((workers, OpenFiles::of(&location.path)?))
        })
        .await;
        let ((writer, reader, lists), files) = match opened {
            Ok(Ok(workers)) => workers,
            Ok(Err(cause)) => return Err(OpenError::Connect { place, cause }),
            Err(cause) => return Err(OpenError::Connect { place, cause: cause.into() }),
        };
        let writer = Writer { thread: writer, files, failing: Arc::default() };
        let permit = BatchPermit::default();
        let (reservations, reserving) = Batcher::new(Reservations(writer.clone()), permit.clone());
        let (completions, completing) = Batcher::new(Completions(writer.clone()), permit);
        tasks::short(tasks::worker(Vital::Reservations, reserving));
        tasks::short(tasks::worker(Vital::Completions, completing));
        let store = Self { writer, reader, lists, reservations, completions, place };
        match store.version().await? {
            found if found > KNOWN => Err(OpenError::NewerSchema { found, known: KNOWN }),
            _ => Ok(store),
        }
    }

    /// Brings the schema to the version that this program knows, where that is `allowed`; else only checks it.
    /// The version it has now. Safe beside another process that does the same.
    ///
    /// # Errors
    /// [`OpenError::NewerSchema`], [`OpenError::OlderSchema`] where it is not allowed, [`OpenError::Migration`].
    pub async fn migrate(&self, allowed: bool) -> Result<u32, OpenError> {
        let found = self.version().await?;
        if found > KNOWN {
            return Err(OpenError::NewerSchema { found, known: KNOWN });
        }
        if found == KNOWN {
            // Who only reads writes nothing then, and waits for nobody's lock.
            return Ok(found);
        }
        if !allowed {
            return Err(OpenError::OlderSchema { found, known: KNOWN });
        }
        for (version, sql) in MIGRATIONS {
            let applied = self.writer.write(move |tx| apply(tx, version, sql)).await;
            applied.map_err(|error| self.not_migrated(version, error))?;
        }
        match self.version().await? {
            found if found > KNOWN => Err(OpenError::NewerSchema { found, known: KNOWN }),
            found => Ok(found),
        }
    }

    /// Ends every lease in the file. For the holder of the [`FileLock`] only, before its own first heartbeat: the lock
    /// says that no process that ever held one of them lives.
    ///
    /// # Errors
    /// As every write.
    pub async fn end_all_leases(&self) -> Result<(), Error> {
        let end = |tx: &Tx<'_>| {
            tx.execute("DELETE FROM oncegate_owners", [])?;
            // What a dead relay had claimed is free at once, too.
            tx.execute("UPDATE outbox_queue SET lease_until = 0 WHERE lease_until > 0", [])?;
            order::end_turns(tx)
        };
        self.writer.write(end).await
    }

    /// Reads the whole file and looks whether it is whole: for a file that looks as if it had been cut.
    ///
    /// # Errors
    /// [`OpenError::Connect`] where it is damaged.
    pub async fn check_whole(&self) -> Result<(), OpenError> {
        let found = self.reader.read(|tx| tx.first("PRAGMA quick_check(1)", [], |row| row.get(0)));
        let damage: Cause = match found.await {
            Ok(Some(word)) if word == "ok" => return Ok(()),
            Ok(word) => word.unwrap_or_else(|| "no answer".to_owned()).into(),
            Err(error) => error.into(),
        };
        let cause = format!("the file is damaged: {}", telemetry::causes(&*damage)).into();
        Err(OpenError::Connect { place: self.place.clone(), cause })
    }

    /// What an operator does to events. Dead ones go in pieces, between which others write.
    async fn act(
        &self,
        action: EventAction,
        which: &Chosen,
        by: &Operator,
    ) -> Result<Touched, Error> {
        let by = by.clone();
        let (id, sink, not_taken) = match which {
            Chosen::One { id, sink } => (*id, sink.clone(), false),
            Chosen::NotTaken { id } => (*id, None, true),
            Chosen::Dead(filter) => {
                let walk = events::Walk::new(action, filter.clone(), by);
                return self.walk(walk).await.map(Touched::many);
            }
        };
        let act = move |tx: &Tx<'_>| events::one(tx, action, id, sink.as_deref(), not_taken, &by);
        self.writer.write(act).await.map(Touched::one)
    }

    /// Goes on with it piece by piece to its end; how many rows it changed.
    async fn walk(&self, mut walk: events::Walk) -> Result<u64, Error> {
        while !walk.is_over() {
            let before = walk.total();
            let worked = self.writer.write(move |tx| walk.piece(tx)).await;
            // After the first piece an error does not mean that nothing was changed.
            walk = worked.map_err(|error| match before {
                0 => error,
                _ => Error::InDoubt(error.into()),
            })?;
        }
        Ok(walk.total())
    }

    fn not_migrated(&self, version: u32, error: Error) -> OpenError {
        match error {
            Error::Unavailable(cause) if cause.is::<Busy>() => {
                OpenError::Connect { place: self.place.clone(), cause }
            }
            other @ (Error::Unavailable(_)
            | Error::InDoubt(_)
            | Error::Refused(_)
            | Error::Unreadable(_)
            | Error::Late) => OpenError::Migration { version, cause: other.into() },
        }
    }

    async fn version(&self) -> Result<u32, OpenError> {
        let place = self.place.clone();
        let version = self.reader.read(version).await;
        version.map_err(|cause| OpenError::Connect { place, cause: cause.into() })
    }
}

/// Opens the connections and starts their threads: the writer, the reader of the request path, and the one for lists.
fn start(location: &Location, lock: Option<FileLock>) -> Result<(Worker, Worker, Worker), Cause> {
    // The writer first: it makes the file and sets its journal mode.
    let writer = connect(location, Role::Writer)?;
    let reader = connect(location, Role::Reader)?;
    let lists = connect(location, Role::Reader)?;
    let nudge = checkpoints(location, connect(location, Role::Checkpoint)?, lock)?;
    let keeps = |nudge: Nudge| {
        move || {
            let _kept = &nudge;
        }
    };
    let reader = Worker::start("sqlite-reader", reader, keeps(nudge.clone()))?;
    let lists = Worker::start("sqlite-lists", lists, keeps(nudge.clone()))?;
    let writer = Worker::start("sqlite-writer", writer, move || nudge.committed())?;
    Ok((writer, reader, lists))
}

fn version(tx: &Tx<'_>) -> rusqlite::Result<u32> {
    tx.first("PRAGMA user_version", [], |row| row.get(0)).map(Option::unwrap_or_default)
}

/// Applies one migration, unless the schema is at its version or beyond.
fn apply(tx: &Tx<'_>, to: u32, sql: &str) -> rusqlite::Result<()> {
    if version(tx)? >= to {
        return Ok(());
    }
    tx.script(sql)?;
    fault::point_blocking(Point::Migrating);
    tx.script(&format!("PRAGMA user_version = {to}"))
}

/// The one way to write: not to files that are gone, and with a memory of what went wrong last.
#[derive(Clone)]
struct Writer {
    thread: Worker,
    files: OpenFiles,
    /// Whether a write failed since the last one that is known to have changed something: the disk is full, say.
    /// Reads may go on all the same.
    failing: Arc<AtomicBool>,
}

impl Writer {
    async fn write<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Tx<'_>) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, Error> {
        self.files.check()?;
        let result = self.thread.write(work).await;
        if let Err(Error::Unavailable(cause) | Error::InDoubt(cause)) = &result
            && !self.failing.swap(true, Ordering::Relaxed)
        {
            let error = telemetry::causes(&**cause);
            tracing::warn!(error, "the database file cannot be written");
        }
        result
    }

    /// As [`Writer::write`], of what always changes something: its success says that writes work.
    async fn write_surely<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Tx<'_>) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, Error> {
        let done = self.write(work).await?;
        if self.failing.swap(false, Ordering::Relaxed) {
            tracing::info!("the database file is written again");
        }
        Ok(done)
    }

    /// Whether writes work, as far as is known: tried out where the last one failed.
    async fn works(&self) -> Result<(), Error> {
        self.files.check()?;
        if !self.failing.load(Ordering::Relaxed) {
            return Ok(());
        }
        // There and gone again: a page is written to the log, and nobody sees anything.
        self.write_surely(|tx| {
            tx.execute("INSERT INTO oncegate_owners (owner, lease_until) VALUES ('', 0)", [])?;
            tx.execute("DELETE FROM oncegate_owners WHERE owner = ''", []).map(drop)
        })
        .await
    }
}

struct Reservations(Writer);

#[async_trait]
impl Work for Reservations {
    type Item = Proposal;
    type Reply = Reserved;

    fn scope(item: &Proposal) -> &Scope {
        &item.scope
    }

    async fn run(&self, items: &[Arc<Proposal>]) -> Result<Vec<Reserved>, RunError> {
        let items = items.to_vec();
        let reserve =
            move |tx: &Tx<'_>| items.iter().map(|item| records::reserve(tx, item)).collect();
        Ok(self.0.write(reserve).await?)
    }
}

struct Completions(Writer);

#[async_trait]
impl Work for Completions {
    type Item = Completion;
    type Reply = Settled;

    fn scope(item: &Completion) -> &Scope {
        &item.scope
    }

    async fn run(&self, items: &[Arc<Completion>]) -> Result<Vec<Settled>, RunError> {
        let items = items.to_vec();
        let complete = move |tx: &Tx<'_>| {
            items.iter().map(|item| records::complete(tx, item, Completer::Attempt)).collect()
        };
        Ok(self.0.write(complete).await?)
    }
}

/// Implements a trait of the store: a line for each verb. `[write]`, `[read]`, `[list]`: what one of the threads does in a
/// transaction, with arguments of its own. `[]`: a future.
macro_rules! implement_by_thread {
    ($name:ident for $store:ty, $this:ident: {
        $($verb:ident($($arg:ident: $kind:ty),*) -> $done:ty = [$($thread:ident)?] $does:expr;)*
    }) => {
        implement! { $name for $store, $this: {
            $($verb($($arg: $kind),*) -> $done =
                implement_by_thread!(@ $this, [$($thread)?], [$($arg),*], $does);)*
        }}
    };
    (@ $this:ident, [], [$($arg:ident),*], $does:expr) => { $does };
    (@ $this:ident, [write], [$($arg:ident),*], $does:expr) => {{
        $(let $arg = $arg.to_owned();)*
        $this.writer.write($does)
    }};
    (@ $this:ident, [read], [$($arg:ident),*], $does:expr) => {{
        $(let $arg = $arg.to_owned();)*
        $this.reader.read($does)
    }};
    (@ $this:ident, [list], [$($arg:ident),*], $does:expr) => {{
        $(let $arg = $arg.to_owned();)*
        $this.lists.read($does)
    }};
}

implement_by_thread! { Records for Sqlite, self: {
    heartbeat(owner: OwnerId, lease: Duration) -> Heartbeat =
        [] self.writer.write_surely(move |tx| records::heartbeat(tx, owner, lease));
    retire(owner: OwnerId) -> () = [write] move |tx| records::retire(tx, owner);
    reserve(proposal: Proposal, deadline: Instant) -> Reserved =
        [] self.reservations.submit(proposal, deadline);
    take_over(proposal: Proposal, from: Takeover) -> Changed =
        [write] move |tx| takeover::take_over(tx, &proposal, from);
    raise(proposal: Proposal, fence: Fence) -> Changed =
        [write] move |tx| takeover::raise(tx, &proposal, fence);
    find(scope: &Scope) -> Option<Record> = [read] move |tx| records::find(tx, &scope);
    complete(completion: Arc<Completion>, deadline: Instant) -> Settled =
        [] self.completions.submit_shared(completion, deadline);
    release(scope: &Scope, fence: Fence) -> Changed =
        [write] move |tx| records::release(tx, &scope, fence);
    mark_unknown(scope: &Scope, fence: Fence) -> Changed =
        [write] move |tx| records::mark_unknown(tx, &scope, fence);
    mark_dead(only: Option<(&Scope, Fence)>, limit: u32) -> u64 = [] async {
        let only = only.map(|(scope, fence)| (scope.clone(), fence));
        self.writer.write(move |tx| records::mark_dead(tx, only.as_ref(), limit)).await
    };
    incarnation() -> Incarnation = [read] own::incarnation;
    statuses(ids: &[RecordId]) -> Vec<(Fence, Status)> = [list] move |tx| own::statuses(tx, &ids);
    reinstate(proposal: Proposal, attempt: Attempt) -> Reinstated =
        [write] move |tx| own::reinstate(tx, &proposal, attempt);
    open_of(owner: OwnerId, from: ScanFrom, limit: u32) -> OpenPiece =
        [list] move |tx| own::open_of(tx, owner, from, limit);
    due_lookups(rules: &[LookupRule], limit: u32) -> Vec<DueLookup> =
        [list] move |tx| lookups::due(tx, &rules, limit);
    unresolved(id: RecordId) -> Option<Unresolved> = [read] move |tx| lookups::unresolved(tx, id);
    note_late_outcome(late: &LateOutcome) -> () = [write] move |tx| operator::note_late(tx, &late);
    unannounced(which: Unannounced, limit: u32) -> Vec<Notice> =
        [list] move |tx| notices::unannounced(tx, which, limit);
    announce(notice: &Notice, event: Option<&Event>) -> Changed = [] async {
        let (notice, event) = (notice.clone(), event.cloned());
        self.writer.write(move |tx| notices::announce(tx, &notice, event.as_ref())).await
    };
    sweep_records(limit: u32) -> u64 = [write] move |tx| records::sweep(tx, limit);
    sweep_leases() -> u64 = [write] records::sweep_leases;
}}

implement_by_thread! { Outbox for Sqlite, self: {
    claim(claim: &Claim) -> Vec<Claimed> = [] async {
        let end = Instant::now() + LOOK_MAX;
        loop {
            let claim = claim.clone();
            let (claimed, again) = self.writer.write(move |tx| outbox::claim(tx, &claim)).await?;
            if !claimed.is_empty() || !again || Instant::now() >= end {
                return Ok(claimed);
            }
        }
    };
    acknowledge(sink: &str, order: Order, verdicts: &[Acknowledgement]) -> Vec<Uuid> =
        [write] move |tx| outbox::acknowledge(tx, &sink, order, &verdicts);
    next_due(sink: &str) -> Option<Duration> = [read] move |tx| outbox::next_due(tx, &sink);
    wake_deferred(sink: &str, order: Order, from: Option<&str>) -> Woken = [] async {
        let (sink, from) = (sink.to_owned(), from.map(str::to_owned));
        self.writer.write(move |tx| order::wake_deferred(tx, &sink, order, from)).await
    };
    sweep_events(retention: Duration, limit: u32) -> u64 =
        [write] move |tx| outbox::sweep(tx, retention, limit);
}}

implement_by_thread! { Sinks for Sqlite, self: {
    sinks(reclaim: Reclaim) -> Vec<SinkState> = [read] move |tx| sinks::states(tx, reclaim);
    change_sink(sink: &str, no: i64, change: &SinkChange) -> Changed =
        [write] move |tx| sinks::change(tx, &sink, no, &change);
    operate_sink(sink: &str, order: SinkOrder, by: &Operator) -> Changed =
        [write] move |tx| sinks::operate(tx, &sink, order, &by);
    last_failure(sink: &str) -> Option<String> = [list] move |tx| sinks::last_failure(tx, &sink);
}}

implement_by_thread! { Operators for Sqlite, self: {
    list_records(filter: &RecordFilter) -> Vec<RecordRow> =
        [list] move |tx| show::list_records(tx, &filter);
    show_record(id: RecordId) -> Option<RecordRow> = [list] move |tx| show::show_record(tx, id);
    list_events(filter: &EventFilter) -> Vec<EventRow> =
        [list] move |tx| show::list_events(tx, &filter);
    operator_release(fence: Fence, completed: bool, by: &Operator) -> Acted =
        [write] move |tx| operator::release(tx, fence, completed, &by);
    operator_complete(completion: &Completion, by: &Operator) -> Acted =
        [write] move |tx| operator::complete(tx, &completion, &by);
    redeliver(which: &Chosen, by: &Operator) -> Touched =
        [] self.act(EventAction::Redeliver, which, by);
    discard(which: &Chosen, by: &Operator) -> Touched =
        [] self.act(EventAction::Discard, which, by);
    count_dead(which: &DeadFilter) -> u64 = [list] move |tx| events::count_dead(tx, &which);
    attempts_of(event: Uuid) -> Vec<AttemptRow> = [list] move |tx| events::attempts_of(tx, event);
    audit_of(record: RecordId) -> Vec<AuditRow> = [list] move |tx| operator::audit_of(tx, record);
    acted_on(window: Duration) -> Vec<RecordId> = [read] move |tx| operator::acted_on(tx, window);
    database_id() -> Uuid = [read] show::database_id;
    ping() -> () = [] async {
        self.reservations.works()?;
        self.completions.works()?;
        self.writer.works().await?;
        let answers = |tx: &Tx<'_>| tx.first("SELECT 1 FROM oncegate_meta", [], |_| Ok(()));
        self.reader.read(answers).await.map(drop)
    };
    // A file is there, or it is not.
    unreached() -> Option<String> = [] async { Ok(None) };
    gauges() -> Gauges = [list] show::gauges;
}}
