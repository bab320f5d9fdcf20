//! The embedded store: one SQLite file, one gateway.
//!
//! Reservations and completions are grouped as on Postgres, one commit for what queued while the last one ran. One
//! thread writes, one reads (write-ahead logging lets them run side by side), one reads long lists so that no look-up
//! waits for them, and one moves the log into the database.
//! What must stay true:
//!
//! - Only `serve` takes the lock file ([`lock`]), so one process proposes reservations. Commands open the same file
//!   beside it and take SQLite's own write lock for a moment.
//! - `synchronous = FULL`: what was answered is on the disk.
//! - Times are SQLite's clock, read inside the transaction; callers pass durations.
//!
//! When the process dies here, the log holds each commit as a whole or not at all, and the next open replays it.

mod operator;
mod outbox;
mod questions;
mod records;
mod row;
mod show;
mod thread;

use std::ffi::OsString;
use std::fs::{File, OpenOptions, TryLockError};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use uuid::Uuid;

use self::records::Completer;
use self::thread::{Role, Tx, Worker, checkpoints, connect};
use super::batch::{Batcher, RunError, Turns, Work};
use super::{
    Acknowledgement, Acted, Asking, AuditRow, Beat, Cause, Changed, Claim, Claimed, Completion,
    Doubt, Due, Error, EventFilter, EventRow, Gauges, LateOutcome, OpenError, Operator, Proposal,
    RecordFilter, RecordRow, Redeliver, Reserved, Settled, Store, Takeover,
};
use crate::record::{Fence, OwnerId, Record, RecordId, Scope};

/// Each migration brings the schema from the version before it to its own: the first is version 1.
const MIGRATIONS: [&str; 2] = [
    include_str!("../../migrations/sqlite/0001_records.sql"),
    include_str!("../../migrations/sqlite/0002_unknown.sql"),
];

/// The schema's version that this program knows.
const KNOWN: u32 = 2;

/// A SQLite file as a store. Dropped, its threads finish what is queued and end.
pub struct Sqlite {
    writer: Worker,
    reader: Worker,
    lists: Worker,
    reservations: Batcher<Reservations>,
    completions: Batcher<Completions>,
    place: String,
    stand: Stand,
}

impl Sqlite {
    /// Opens the file, and makes it where there is none. It neither migrates nor locks.
    ///
    /// # Errors
    /// [`OpenError::Connect`] where the file cannot be read and written, or is no database;
    /// [`OpenError::NewerSchema`] where a newer program has migrated it.
    pub async fn open(path: &Path) -> Result<Self, OpenError> {
        let place = path.display().to_string();
        let path = path.to_owned();
        let opened = tokio::task::spawn_blocking(move || {
            let workers = start(&path)?;
            Ok::<_, Cause>((workers, Stand::of(&path)?))
        })
        .await;
        let ((writer, reader, lists), stand) = match opened {
            Ok(Ok(workers)) => workers,
            Ok(Err(cause)) => return Err(OpenError::Connect { place, cause }),
            Err(cause) => return Err(OpenError::Connect { place, cause: cause.into() }),
        };
        let turns = Turns::default();
        let (reservations, reserving) =
            Batcher::new(Reservations(writer.clone(), stand.clone()), turns.clone());
        let (completions, completing) = Batcher::new(Completions(writer.clone()), turns);
        tokio::spawn(reserving);
        tokio::spawn(completing);
        let store = Self { writer, reader, lists, reservations, completions, place, stand };
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
        if found < KNOWN && !allowed {
            return Err(OpenError::OlderSchema { found, known: KNOWN });
        }
        for (version, sql) in (1..).zip(MIGRATIONS) {
            let applied = self.writer.write(move |tx| apply(tx, version, sql)).await;
            applied.map_err(|cause| OpenError::Migration { version, cause: cause.into() })?;
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
            tx.execute("UPDATE outbox_queue SET lease_until = 0 WHERE lease_until > 0", [])
                .map(drop)
        };
        self.writer.write(end).await
    }

    async fn version(&self) -> Result<u32, OpenError> {
        let place = self.place.clone();
        let version = self.reader.read(version).await;
        version.map_err(|cause| OpenError::Connect { place, cause: cause.into() })
    }
}

/// Opens the connections and starts their threads: the writer, the reader of the request path, and the one for lists.
fn start(path: &Path) -> Result<(Worker, Worker, Worker), Cause> {
    // The writer first: it makes the file and sets its journal mode.
    let writer = connect(path, Role::Writer)?;
    let reader = connect(path, Role::Reader)?;
    let lists = connect(path, Role::Reader)?;
    let nudge = checkpoints(path, connect(path, Role::Checkpoint)?)?;
    let writer = Worker::start("sqlite-writer", writer, nudge)?;
    let reader = Worker::start("sqlite-reader", reader, || ())?;
    let lists = Worker::start("sqlite-lists", lists, || ())?;
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
    tx.script(&format!("{sql}; PRAGMA user_version = {to};"))
}

/// Holds a database file for one `serve`, until it is dropped or the process dies.
#[derive(Debug)]
pub struct FileLock {
    _file: File,
}

/// Takes the lock beside the database file (`PATH.lock`). Commands do not take it.
///
/// # Errors
/// [`OpenError::Locked`] where another process has it, [`OpenError::Connect`] where the lock file cannot be written.
pub fn lock(path: &Path) -> Result<FileLock, OpenError> {
    let place = path.display().to_string();
    let mut name = OsString::from(resolved(path));
    name.push(".lock");
    let failed = |cause: std::io::Error| OpenError::Connect {
        place: Path::new(&name).display().to_string(),
        cause: cause.into(),
    };
    let file =
        OpenOptions::new().create(true).truncate(false).write(true).open(&name).map_err(failed)?;
    match file.try_lock() {
        Ok(()) => Ok(FileLock { _file: file }),
        Err(TryLockError::WouldBlock) => Err(OpenError::Locked { place }),
        Err(TryLockError::Error(cause)) => Err(failed(cause)),
    }
}

/// The file itself where `path` is a link to it, so that both names have one lock.
fn resolved(path: &Path) -> PathBuf {
    std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned())
}

/// The file that was opened, and the path under which it must still stand: written to a file that was deleted or
/// replaced, a reservation would be gone at the next start.
#[derive(Clone)]
struct Stand {
    path: PathBuf,
    identity: (u64, u64),
}

impl Stand {
    fn of(path: &Path) -> std::io::Result<Self> {
        Ok(Self { path: path.to_owned(), identity: identity(path)? })
    }

    /// Whether the path still leads to the file.
    fn check(&self) -> Result<(), Error> {
        let wrong =
            |why: String| Error::Unavailable(format!("{}: {why}", self.path.display()).into());
        match identity(&self.path) {
            Ok(found) if found == self.identity => Ok(()),
            Ok(_) => Err(wrong("another file stands in the place of the database".to_owned())),
            Err(error) => Err(wrong(error.to_string())),
        }
    }
}

/// Device and inode.
fn identity(path: &Path) -> std::io::Result<(u64, u64)> {
    let found = std::fs::metadata(path)?;
    Ok((found.dev(), found.ino()))
}

struct Reservations(Worker, Stand);

#[async_trait]
impl Work for Reservations {
    type Item = Proposal;
    type Reply = Reserved;

    fn scope(item: &Proposal) -> &Scope {
        &item.scope
    }

    async fn run(&self, items: &[Arc<Proposal>]) -> Result<Vec<Reserved>, RunError> {
        self.1.check()?;
        let items = items.to_vec();
        let reserve =
            move |tx: &Tx<'_>| items.iter().map(|item| records::reserve(tx, item)).collect();
        Ok(self.0.write(reserve).await?)
    }
}

struct Completions(Worker);

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
impl Store for Sqlite {
    async fn heartbeat(&self, owner: OwnerId, lease: Duration) -> Result<Beat, Error> {
        self.stand.check()?;
        self.writer.write(move |tx| records::heartbeat(tx, owner, lease)).await
    }

    async fn retire(&self, owner: OwnerId) -> Result<(), Error> {
        self.writer.write(move |tx| records::retire(tx, owner)).await
    }

    async fn reserve(&self, proposal: Proposal, deadline: Instant) -> Result<Reserved, Error> {
        self.reservations.submit(proposal, deadline).await
    }

    async fn take_over(&self, proposal: Proposal, from: Takeover) -> Result<Changed, Error> {
        self.writer.write(move |tx| records::take_over(tx, &proposal, from)).await
    }

    async fn find(&self, scope: &Scope) -> Result<Option<Record>, Error> {
        let scope = scope.clone();
        self.reader.read(move |tx| records::find(tx, &scope)).await
    }

    async fn complete(&self, completion: Completion, deadline: Instant) -> Result<Settled, Error> {
        self.completions.submit(completion, deadline).await
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

    async fn questions(&self, asking: &[Asking], limit: u32) -> Result<Vec<Due>, Error> {
        let asking = asking.to_vec();
        self.lists.read(move |tx| questions::due(tx, &asking, limit)).await
    }

    async fn doubt(&self, id: RecordId) -> Result<Option<Doubt>, Error> {
        self.reader.read(move |tx| questions::doubt(tx, id)).await
    }

    async fn note_late_outcome(&self, late: &LateOutcome) -> Result<(), Error> {
        let late = late.clone();
        self.writer.write(move |tx| operator::note_late(tx, &late)).await
    }

    async fn claim(&self, claim: &Claim) -> Result<Vec<Claimed>, Error> {
        let claim = claim.clone();
        self.writer.write(move |tx| outbox::claim(tx, &claim)).await
    }

    async fn acknowledge(
        &self,
        sink: &str,
        verdicts: &[Acknowledgement],
    ) -> Result<Vec<Uuid>, Error> {
        let (sink, verdicts) = (sink.to_owned(), verdicts.to_vec());
        self.writer.write(move |tx| outbox::acknowledge(tx, &sink, &verdicts)).await
    }

    async fn next_due(&self, sink: &str) -> Result<Option<Duration>, Error> {
        let sink = sink.to_owned();
        self.reader.read(move |tx| outbox::next_due(tx, &sink)).await
    }

    async fn sweep_records(&self, limit: u32) -> Result<u64, Error> {
        self.writer.write(move |tx| records::sweep(tx, limit)).await
    }

    async fn sweep_events(&self, retention: Duration, limit: u32) -> Result<u64, Error> {
        self.writer.write(move |tx| outbox::sweep(tx, retention, limit)).await
    }

    async fn sweep_leases(&self) -> Result<u64, Error> {
        self.writer.write(records::sweep_leases).await
    }

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

    async fn redeliver(&self, which: &Redeliver, by: &Operator) -> Result<u64, Error> {
        let (which, by) = (which.clone(), by.clone());
        self.writer.write(move |tx| outbox::redeliver(tx, &which, &by)).await
    }

    async fn audit_of(&self, record: RecordId) -> Result<Vec<AuditRow>, Error> {
        self.lists.read(move |tx| operator::audit_of(tx, record)).await
    }

    async fn acted_on(&self, window: Duration) -> Result<Vec<RecordId>, Error> {
        self.reader.read(move |tx| operator::acted_on(tx, window)).await
    }

    async fn ping(&self) -> Result<(), Error> {
        self.stand.check()?;
        let answers = |tx: &Tx<'_>| tx.first("SELECT 1 FROM oncegate_meta", [], |_| Ok(()));
        self.reader.read(answers).await.map(drop)
    }

    async fn gauges(&self) -> Result<Gauges, Error> {
        self.lists.read(show::gauges).await
    }
}
