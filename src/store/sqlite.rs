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

#[async_trait]
impl Records for Sqlite {
    async fn heartbeat(&self, owner: OwnerId, lease: Duration) -> Result<Heartbeat, Error> {
        self.writer.write_surely(move |tx| records::heartbeat(tx, owner, lease)).await
    }

    async fn retire(&self, owner: OwnerId) -> Result<(), Error> {
        self.writer.write(move |tx| records::retire(tx, owner)).await
    }

    async fn reserve(&self, proposal: Proposal, deadline: Instant) -> Result<Reserved, Error> {
        self.reservations.submit(proposal, deadline).await
    }

    async fn take_over(&self, proposal: Proposal, from: Takeover) -> Result<Changed, Error> {
        self.writer.write(move |tx| takeover::take_over(tx, &proposal, from)).await
    }

    async fn raise(&self, proposal: Proposal, fence: Fence) -> Result<Changed, Error> {
        self.writer.write(move |tx| takeover::raise(tx, &proposal, fence)).await
    }

    async fn find(&self, scope: &Scope) -> Result<Option<Record>, Error> {
        let scope = scope.clone();
        self.reader.read(move |tx| records::find(tx, &scope)).await
    }

    async fn complete(
        &self,
        completion: Arc<Completion>,
        deadline: Instant,
    ) -> Result<Settled, Error> {
        self.completions.submit_shared(completion, deadline).await
    }

    async fn release(&self, scope: &Scope, fence: Fence) -> Result<Changed, Error> {
        let scope = scope.clone();
        self.writer.write(move |tx| records::release(tx, &scope, fence)).await
    }

    async fn mark_unknown(&self, scope: &Scope, fence: Fence) -> Result<Changed, Error> {
        let scope = scope.clone();
        self.writer.write(move |tx| records::mark_unknown(tx, &scope, fence)).await
    }

    async fn mark_dead(&self, only: Option<(&Scope, Fence)>, limit: u32) -> Result<u64, Error> {
        let only = only.map(|(scope, fence)| (scope.clone(), fence));
        self.writer.write(move |tx| records::mark_dead(tx, only.as_ref(), limit)).await
    }

    async fn incarnation(&self) -> Result<Incarnation, Error> {
        self.reader.read(own::incarnation).await
    }

    async fn statuses(&self, ids: &[RecordId]) -> Result<Vec<(Fence, Status)>, Error> {
        let ids = ids.to_vec();
        self.lists.read(move |tx| own::statuses(tx, &ids)).await
    }

    async fn reinstate(&self, proposal: Proposal, attempt: Attempt) -> Result<Reinstated, Error> {
        self.writer.write(move |tx| own::reinstate(tx, &proposal, attempt)).await
    }

    async fn open_of(
        &self,
        owner: OwnerId,
        from: ScanFrom,
        limit: u32,
    ) -> Result<OpenPiece, Error> {
        self.lists.read(move |tx| own::open_of(tx, owner, from, limit)).await
    }

    async fn due_lookups(&self, rules: &[LookupRule], limit: u32) -> Result<Vec<DueLookup>, Error> {
        let rules = rules.to_vec();
        self.lists.read(move |tx| lookups::due(tx, &rules, limit)).await
    }

    async fn unresolved(&self, id: RecordId) -> Result<Option<Unresolved>, Error> {
        self.reader.read(move |tx| lookups::unresolved(tx, id)).await
    }

    async fn note_late_outcome(&self, late: &LateOutcome) -> Result<(), Error> {
        let late = late.clone();
        self.writer.write(move |tx| operator::note_late(tx, &late)).await
    }

    async fn unannounced(&self, which: Unannounced, limit: u32) -> Result<Vec<Notice>, Error> {
        self.lists.read(move |tx| notices::unannounced(tx, which, limit)).await
    }

    async fn announce(&self, notice: &Notice, event: Option<&Event>) -> Result<Changed, Error> {
        let (notice, event) = (notice.clone(), event.cloned());
        self.writer.write(move |tx| notices::announce(tx, &notice, event.as_ref())).await
    }

    async fn sweep_records(&self, limit: u32) -> Result<u64, Error> {
        self.writer.write(move |tx| records::sweep(tx, limit)).await
    }

    async fn sweep_leases(&self) -> Result<u64, Error> {
        self.writer.write(records::sweep_leases).await
    }
}

#[async_trait]
impl Outbox for Sqlite {
    async fn claim(&self, claim: &Claim) -> Result<Vec<Claimed>, Error> {
        let end = Instant::now() + LOOK_MAX;
        loop {
            let claim = claim.clone();
            let (claimed, again) = self.writer.write(move |tx| outbox::claim(tx, &claim)).await?;
            if !claimed.is_empty() || !again || Instant::now() >= end {
                return Ok(claimed);
            }
        }
    }

    async fn acknowledge(
        &self,
        sink: &str,
        order: Order,
        verdicts: &[Acknowledgement],
    ) -> Result<Vec<Uuid>, Error> {
        let (sink, verdicts) = (sink.to_owned(), verdicts.to_vec());
        self.writer.write(move |tx| outbox::acknowledge(tx, &sink, order, &verdicts)).await
    }

    async fn next_due(&self, sink: &str) -> Result<Option<Duration>, Error> {
        let sink = sink.to_owned();
        self.reader.read(move |tx| outbox::next_due(tx, &sink)).await
    }

    async fn wake_deferred(
        &self,
        sink: &str,
        order: Order,
        from: Option<&str>,
    ) -> Result<Woken, Error> {
        let (sink, from) = (sink.to_owned(), from.map(str::to_owned));
        self.writer.write(move |tx| order::wake_deferred(tx, &sink, order, from)).await
    }

    async fn sweep_events(&self, retention: Duration, limit: u32) -> Result<u64, Error> {
        self.writer.write(move |tx| outbox::sweep(tx, retention, limit)).await
    }
}

#[async_trait]
impl Sinks for Sqlite {
    async fn sinks(&self, reclaim: Reclaim) -> Result<Vec<SinkState>, Error> {
        self.reader.read(move |tx| sinks::states(tx, reclaim)).await
    }

    async fn change_sink(
        &self,
        sink: &str,
        no: i64,
        change: &SinkChange,
    ) -> Result<Changed, Error> {
        let (sink, change) = (sink.to_owned(), change.clone());
        self.writer.write(move |tx| sinks::change(tx, &sink, no, &change)).await
    }

    async fn operate_sink(
        &self,
        sink: &str,
        order: SinkOrder,
        by: &Operator,
    ) -> Result<Changed, Error> {
        let (sink, by) = (sink.to_owned(), by.clone());
        self.writer.write(move |tx| sinks::operate(tx, &sink, order, &by)).await
    }

    async fn last_failure(&self, sink: &str) -> Result<Option<String>, Error> {
        let sink = sink.to_owned();
        self.lists.read(move |tx| sinks::last_failure(tx, &sink)).await
    }
}

#[async_trait]
impl Operators for Sqlite {
    async fn list_records(&self, filter: &RecordFilter) -> Result<Vec<RecordRow>, Error> {
        let filter = filter.clone();
        self.lists.read(move |tx| show::list_records(tx, &filter)).await
    }

    async fn show_record(&self, id: RecordId) -> Result<Option<RecordRow>, Error> {
        self.lists.read(move |tx| show::show_record(tx, id)).await
    }

    async fn list_events(&self, filter: &EventFilter) -> Result<Vec<EventRow>, Error> {
        let filter = filter.clone();
        self.lists.read(move |tx| show::list_events(tx, &filter)).await
    }

    async fn operator_release(
        &self,
        fence: Fence,
        completed: bool,
        by: &Operator,
    ) -> Result<Acted, Error> {
        let by = by.clone();
        self.writer.write(move |tx| operator::release(tx, fence, completed, &by)).await
    }

    async fn operator_complete(
        &self,
        completion: &Completion,
        by: &Operator,
    ) -> Result<Acted, Error> {
        let (completion, by) = (completion.clone(), by.clone());
        self.writer.write(move |tx| operator::complete(tx, &completion, &by)).await
    }

    async fn redeliver(&self, which: &Chosen, by: &Operator) -> Result<Touched, Error> {
        self.act(EventAction::Redeliver, which, by).await
    }

    async fn discard(&self, which: &Chosen, by: &Operator) -> Result<Touched, Error> {
        self.act(EventAction::Discard, which, by).await
    }

    async fn count_dead(&self, which: &DeadFilter) -> Result<u64, Error> {
        let which = which.clone();
        self.lists.read(move |tx| events::count_dead(tx, &which)).await
    }

    async fn attempts_of(&self, event: Uuid) -> Result<Vec<AttemptRow>, Error> {
        self.lists.read(move |tx| events::attempts_of(tx, event)).await
    }

    async fn audit_of(&self, record: RecordId) -> Result<Vec<AuditRow>, Error> {
        self.lists.read(move |tx| operator::audit_of(tx, record)).await
    }

    async fn acted_on(&self, window: Duration) -> Result<Vec<RecordId>, Error> {
        self.reader.read(move |tx| operator::acted_on(tx, window)).await
    }

    async fn database_id(&self) -> Result<Uuid, Error> {
        self.reader.read(show::database_id).await
    }

    /// A file is there, or it is not.
    async fn unreached(&self) -> Result<Option<String>, Error> {
        Ok(None)
    }

    async fn ping(&self) -> Result<(), Error> {
        self.reservations.works()?;
        self.completions.works()?;
        self.writer.works().await?;
        let answers = |tx: &Tx<'_>| tx.first("SELECT 1 FROM oncegate_meta", [], |_| Ok(()));
        self.reader.read(answers).await.map(drop)
    }

    async fn gauges(&self) -> Result<Gauges, Error> {
        self.lists.read(show::gauges).await
    }
}
