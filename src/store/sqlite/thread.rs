//! The threads that hold the connections: whoever asks anything of the database asks one of them.
//!
//! SQLite blocks, so no connection is ever used on a runtime's worker: a [`Worker`] is a thread with one connection
//! and a bounded queue, and answers through one-shot channels. What must stay true:
//!
//! - A write runs in `BEGIN IMMEDIATE` ... `COMMIT`, and reads the clock after it has the write lock, so that a wait
//!   for the lock never lengthens or shortens a lease.
//! - An error before `COMMIT` is rolled back: nothing was changed. A `COMMIT` that fails is in doubt, unless the
//!   transaction is still open and can be rolled back, or its last page did not fit into the log.
//! - The writer never runs a checkpoint: a thread of its own does, so that no commit waits for one. Only a log that
//!   has grown beyond [`WAL_MAX`] is restarted while the writer waits, right after a checkpoint that left little to do.
//!
//! - The thread for checkpoints ends last, so that nobody of this process is in the way of the last one: it moves what is
//!   left of the log into the database, and SQLite deletes the log where no other process has the file open.
//!
//! When the last handle is dropped the threads finish what is queued and end; [`all_closed`] waits for that. When the
//! process dies here, SQLite's own recovery replays the log: what was answered was in it and synced.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rusqlite::{Connection, ErrorCode, OpenFlags, Params, ffi};
use tokio::sync::oneshot;

use super::super::{Cause, Error};
use super::file::{FileLock, Location};
use crate::tasks::{self, Vital};

/// Read and write, a connection for each thread.
const FLAGS: OpenFlags = OpenFlags::SQLITE_OPEN_READ_WRITE.union(OpenFlags::SQLITE_OPEN_NO_MUTEX);
/// How long a statement waits for the write lock of another process before the database counts as unavailable.
const BUSY: Duration = Duration::from_secs(5);
/// The same for the checkpoint, which may hold the write lock while it waits for readers.
const BUSY_CHECKPOINT: Duration = Duration::from_millis(100);
/// Pause between two tries where SQLite does not wait by itself.
const BUSY_PAUSE: Duration = Duration::from_millis(10);
/// Jobs that may wait for one thread; beyond it the database counts as unavailable.
const QUEUE_MAX: usize = 8192;
/// Bytes of log below which no checkpoint is worth its syncs.
const WAL_SMALL: u64 = 4 << 20;
/// Bytes of log from which it is restarted at the cost of a short wait for the writer.
const WAL_MAX: u64 = 64 << 20;
/// Shortest time between two checkpoints.
const CHECKPOINT_PAUSE: Duration = Duration::from_millis(100);

type Job = Box<dyn FnOnce(&Connection) + Send>;

/// Another process had a lock on the file for longer than is waited.
#[derive(Debug, thiserror::Error)]
#[error(
    "another process holds a lock on {place} (waited {} s): a `serve` that was stopped, or a program with an open transaction. \
     Let it go on, or end it; then try again",
    BUSY.as_secs()
)]
pub(super) struct Busy {
    place: String,
    #[source]
    cause: rusqlite::Error,
}

/// The cause of an error, in words of ours where it is a lock of somebody else's.
fn cause(conn: &Connection, error: rusqlite::Error) -> Cause {
    match error.sqlite_error_code() {
        Some(ErrorCode::DatabaseBusy) => {
            let place = conn.path().unwrap_or("the database file").to_owned();
            Busy { place, cause: error }.into()
        }
        Some(_) | None => error.into(),
    }
}

/// A transaction, and the database's time in it.
pub(super) struct Tx<'a> {
    conn: &'a Connection,
    /// Microseconds since 1970, by the database's clock, read after the transaction began.
    pub(super) now: i64,
}

impl Tx<'_> {
    /// Runs one statement; how many rows it changed.
    pub(super) fn execute(&self, sql: &str, params: impl Params) -> rusqlite::Result<usize> {
        self.conn.prepare_cached(sql)?.execute(params)
    }

    /// Runs several statements without parameters (a migration).
    pub(super) fn script(&self, sql: &str) -> rusqlite::Result<()> {
        self.conn.execute_batch(sql)
    }

    /// All rows of a query.
    pub(super) fn rows<T>(
        &self,
        sql: &str,
        params: impl Params,
        read: impl FnMut(&rusqlite::Row<'_>) -> rusqlite::Result<T>,
    ) -> rusqlite::Result<Vec<T>> {
        self.conn.prepare_cached(sql)?.query_map(params, read)?.collect()
    }

    /// The first row of a query, where it has one.
    pub(super) fn first<T>(
        &self,
        sql: &str,
        params: impl Params,
        mut read: impl FnMut(&rusqlite::Row<'_>) -> rusqlite::Result<T>,
    ) -> rusqlite::Result<Option<T>> {
        let mut statement = self.conn.prepare_cached(sql)?;
        let mut rows = statement.query(params)?;
        rows.next()?.map(&mut read).transpose()
    }
}

/// A thread with a connection. Clones feed one queue; the thread ends when the last clone is dropped and the queue is empty.
#[derive(Clone)]
pub(super) struct Worker {
    jobs: SyncSender<Job>,
}

impl Worker {
    /// Starts a thread that works with `conn`; `after` is called after each job, and dropped when `conn` is closed.
    pub(super) fn start(
        name: &str,
        conn: Connection,
        after: impl Fn() + Send + 'static,
    ) -> std::io::Result<Self> {
        let (jobs, queue): (_, Receiver<Job>) = sync_channel(QUEUE_MAX);
        tasks::thread(Vital::StoreThread, name, move || {
            for job in queue {
                job(&conn);
                after();
            }
            drop(conn);
            drop(after);
        })?;
        Ok(Self { jobs })
    }

    /// Runs `work` in a write transaction.
    pub(super) async fn write<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Tx<'_>) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, Error> {
        self.run(move |conn| write(conn, work)).await
    }

    /// Runs `work` on one snapshot.
    pub(super) async fn read<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Tx<'_>) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, Error> {
        self.run(move |conn| read(conn, work)).await
    }

    /// Runs `work` on the thread and waits for it, without blocking the caller's thread.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let (reply, answer) = oneshot::channel();
        let job: Job = Box::new(move |conn| {
            // A caller that stopped waiting does not need the answer; what was asked is done all the same.
            drop(reply.send(work(conn)));
        });
        self.jobs.try_send(job).map_err(|_| {
            Error::Unavailable("the store's queue is full, or its thread ended".into())
        })?;
        match answer.await {
            Ok(result) => result,
            Err(_) => Err(Error::InDoubt("the store's thread ended".into())),
        }
    }
}

fn write<T>(
    conn: &Connection,
    work: impl FnOnce(&Tx<'_>) -> rusqlite::Result<T>,
) -> Result<T, Error> {
    roll_back(conn);
    statement(conn, "BEGIN IMMEDIATE").map_err(|e| Error::Unavailable(cause(conn, e)))?;
    match now(conn).and_then(|now| work(&Tx { conn, now })) {
        Ok(done) => commit(conn).map(|()| done),
        Err(error) => {
            roll_back(conn);
            Err(classify(conn, error))
        }
    }
}

fn read<T>(
    conn: &Connection,
    work: impl FnOnce(&Tx<'_>) -> rusqlite::Result<T>,
) -> Result<T, Error> {
    roll_back(conn);
    statement(conn, "BEGIN").map_err(|e| Error::Unavailable(cause(conn, e)))?;
    let done = now(conn).and_then(|now| work(&Tx { conn, now }));
    roll_back(conn);
    done.map_err(|error| classify(conn, error))
}

/// Commits. A failure is in doubt (the log may hold the whole transaction although its sync failed), unless the
/// transaction is still open: then it is rolled back, and nothing was changed. Nor was it where the log could not be
/// written, as on a full disk: the page that makes the transaction valid is written last.
fn commit(conn: &Connection) -> Result<(), Error> {
    let Err(error) = statement(conn, "COMMIT") else { return Ok(()) };
    let open = !conn.is_autocommit();
    let rolled_back = if open { statement(conn, "ROLLBACK").is_ok() } else { cut_off(&error) };
    if rolled_back {
        return Err(classify(conn, error));
    }
    Err(Error::InDoubt(error.into()))
}

/// Whether a write to the log failed, and not its sync.
fn cut_off(error: &rusqlite::Error) -> bool {
    error.sqlite_error().is_some_and(|error| {
        error.code == ErrorCode::DiskFull || error.extended_code == ffi::SQLITE_IOERR_WRITE
    })
}

/// Ends an open transaction, if there is one. SQLite ends it by itself on some errors; if this fails, the next job
/// tries again before it begins.
fn roll_back(conn: &Connection) {
    if !conn.is_autocommit()
        && let Err(error) = statement(conn, "ROLLBACK")
    {
        tracing::warn!(%error, "a rollback failed and is repeated");
    }
}

fn statement(conn: &Connection, sql: &str) -> rusqlite::Result<()> {
    conn.prepare_cached(sql)?.execute([]).map(drop)
}

/// The database's clock in microseconds since 1970. SQLite's clock counts milliseconds.
fn now(conn: &Connection) -> rusqlite::Result<i64> {
    conn.prepare_cached("SELECT CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000")?
        .query_row([], |row| row.get(0))
}

/// What a statement's error means for the caller, once it has been rolled back: nothing was done.
fn classify(conn: &Connection, error: rusqlite::Error) -> Error {
    match error.sqlite_error_code().map(is_the_datas) {
        Some(true) => Error::Refused(error.into()),
        Some(false) => Error::Unavailable(cause(conn, error)),
        // Not SQLite's: a value on its way in, or a row that is read and is not what this program writes.
        None if matches!(error, rusqlite::Error::ToSqlConversionFailure(_)) => {
            Error::Refused(error.into())
        }
        None => Error::Unreadable(error.into()),
    }
}

/// Each of SQLite's result codes: whether it refuses the data, and will again. Else the file, the disk or the system is the
/// reason, or a mistake of the program, and the same may work later.
fn is_the_datas(code: ErrorCode) -> bool {
    match code {
        // A constraint, or somebody's trigger that raises an error; a value that is too large; a type that does not fit.
        ErrorCode::ConstraintViolation | ErrorCode::TooBig | ErrorCode::TypeMismatch => true,
        // No room, no memory; input and output that fail; a file that may not be written, or not be opened.
        ErrorCode::DiskFull
        | ErrorCode::OutOfMemory
        | ErrorCode::SystemIoFailure
        | ErrorCode::ReadOnly
        | ErrorCode::PermissionDenied
        | ErrorCode::CannotOpen
        | ErrorCode::NoLargeFileSupport
        // Others hold a lock, or stopped the statement.
        | ErrorCode::DatabaseBusy
        | ErrorCode::DatabaseLocked
        | ErrorCode::FileLockingProtocolFailed
        | ErrorCode::OperationInterrupted
        | ErrorCode::OperationAborted
        // The file is damaged, or another program has changed its schema.
        | ErrorCode::DatabaseCorrupt
        | ErrorCode::NotADatabase
        | ErrorCode::SchemaChanged
        | ErrorCode::Unknown
        // Mistakes of the program, or of SQLite.
        | ErrorCode::InternalMalfunction
        | ErrorCode::NotFound
        | ErrorCode::ApiMisuse
        | ErrorCode::AuthorizationForStatementDenied
        | ErrorCode::ParameterOutOfRange
        | _ => false,
    }
}

/// What a connection is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Writer,
    Reader,
    Checkpoint,
}

/// Opens a connection with the settings that durability rests on.
pub(super) fn connect(location: &Location, role: Role) -> Result<Connection, Cause> {
    let flags = match location.create {
        true => FLAGS | OpenFlags::SQLITE_OPEN_CREATE,
        false => FLAGS,
    };
    let conn = Connection::open_with_flags(&location.path, flags)?;
    match set_up(&conn, role) {
        Ok(None) => Ok(conn),
        Ok(Some(mode)) => {
            Err(format!("the journal mode stays {mode}: no write-ahead log here").into())
        }
        Err(error) => Err(cause(&conn, error)),
    }
}

/// The journal mode where it is not the one that is needed.
fn set_up(conn: &Connection, role: Role) -> rusqlite::Result<Option<String>> {
    conn.busy_timeout(if role == Role::Checkpoint { BUSY_CHECKPOINT } else { BUSY })?;
    conn.set_prepared_statement_cache_capacity(96);
    if role == Role::Writer {
        let mode = to_wal(conn)?;
        if mode != "wal" {
            return Ok(Some(mode));
        }
        try_to_write(conn)?;
    }
    conn.execute_batch(&format!(
        "PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON; PRAGMA wal_autocheckpoint = 0;
         PRAGMA journal_size_limit = {WAL_SMALL}; PRAGMA cache_size = -16384;
         PRAGMA temp_store = MEMORY;"
    ))?;
    if role == Role::Reader {
        conn.execute_batch("PRAGMA query_only = ON")?;
    }
    Ok(None)
}

/// Switches to a write-ahead log, where the file has none yet; the mode that it has then. SQLite reads the mode first and
/// asks for the lock in the same transaction, where its own time-out does not apply: the wait for others who switch it, or
/// write, is here.
fn to_wal(conn: &Connection) -> rusqlite::Result<String> {
    let end = Instant::now() + BUSY;
    loop {
        match conn.query_row("PRAGMA journal_mode = WAL", [], |row| row.get(0)) {
            Err(error)
                if error.sqlite_error_code() == Some(ErrorCode::DatabaseBusy)
                    && Instant::now() < end =>
            {
                thread::sleep(BUSY_PAUSE);
            }
            other => return other,
        }
    }
}

/// A write that changes nothing: a file that cannot be written is found here and not by the first request. Where another
/// process writes, it can be written; that is not waited for, since who only reads does not need the lock.
fn try_to_write(conn: &Connection) -> rusqlite::Result<()> {
    conn.busy_timeout(Duration::ZERO)?;
    let tried = conn.execute_batch("BEGIN IMMEDIATE; ROLLBACK");
    conn.busy_timeout(BUSY)?;
    match tried {
        Err(error) if error.sqlite_error_code() == Some(ErrorCode::DatabaseBusy) => Ok(()),
        other => other,
    }
}

/// Tells the thread for checkpoints of commits, and keeps it: it ends when all clones are dropped.
#[derive(Clone)]
pub(super) struct Nudge {
    nudge: SyncSender<()>,
    gate: Arc<Mutex<()>>,
}

impl Nudge {
    /// There may be more in the log. For the writer, between two jobs: it waits while the log is being restarted.
    pub(super) fn committed(&self) {
        // Full: a nudge is waiting already.
        self.nudge.try_send(()).unwrap_or(());
        drop(self.gate.lock());
    }
}

/// Starts the thread that moves the log into the database. It keeps the lock of the file, where this process has it,
/// until it ends: until every connection is closed.
pub(super) fn checkpoints(
    location: &Location,
    conn: Connection,
    lock: Option<FileLock>,
) -> std::io::Result<Nudge> {
    let mut log = location.path.as_os_str().to_owned();
    log.push("-wal");
    let log = PathBuf::from(log);
    let (nudge, nudges) = sync_channel::<()>(1);
    let gate = Arc::new(Mutex::new(()));
    let closing = Arc::clone(&gate);
    let open = Open::counted();
    tasks::thread(Vital::StoreThread, "sqlite-checkpoint", move || {
        let mut wrote = false;
        while let Ok(()) = nudges.recv() {
            wrote = true;
            let size = std::fs::metadata(&log).map_or(0, |file| file.len());
            if size >= WAL_SMALL
                && let Err(error) = checkpoint(&conn, size, &closing)
            {
                tracing::debug!(%error, "a checkpoint failed and is repeated");
            }
            if !paused(&nudges) {
                break;
            }
        }
        if wrote {
            last_checkpoint(&conn, &log, lock.is_some());
        }
        drop(conn);
        drop(lock);
        drop(open);
    })?;
    Ok(Nudge { nudge, gate })
}

/// Moves what is left of the log into the database, when every other connection of this process is closed.
///
/// Who owns the file empties the log as well, whoever else has it open. A command does not: it would be in the way of the
/// `serve` beside it, which owns the log. Where others read or write, something may be left: that is no failure.
fn last_checkpoint(conn: &Connection, log: &Path, owned: bool) {
    let mode = if owned { "TRUNCATE" } else { "PASSIVE" };
    let sql = format!("PRAGMA wal_checkpoint({mode})");
    let done = conn.query_row(&sql, [], |row| row.get::<_, i64>(0));
    if !owned {
        return;
    }
    let log = log.display().to_string();
    match done {
        Ok(0) => {}
        Ok(_busy) => tracing::warn!(
            log,
            "another program has the database open: the log beside it still holds what a copy of the database needs"
        ),
        Err(error) => tracing::warn!(
            %error,
            log,
            "the log was not moved into the database: a copy of the database needs it, too"
        ),
    }
}

/// How many threads of this process are not done with their file; notified of each that is.
static OPEN: (Mutex<usize>, Condvar) = (Mutex::new(0), Condvar::new());

/// Counts a store of this process as open, until it is dropped.
struct Open(());

impl Open {
    fn counted() -> Self {
        *OPEN.0.lock() += 1;
        Self(())
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        *OPEN.0.lock() -= 1;
        OPEN.1.notify_all();
    }
}

/// Waits until every store of this process is closed, for at most `limit`; whether they are. For the end of the process,
/// when all handles are dropped.
pub fn all_closed(limit: Duration) -> bool {
    let mut open = OPEN.0.lock();
    OPEN.1.wait_while_for(&mut open, |open| *open > 0, limit);
    *open == 0
}

/// Waits for the shortest time between two checkpoints; `false` where the other threads ended meanwhile.
/// A nudge that comes meanwhile is taken, and stands for the next commit's: the log is looked at again then.
fn paused(nudges: &Receiver<()>) -> bool {
    thread::sleep(CHECKPOINT_PAUSE);
    !matches!(nudges.recv_timeout(Duration::ZERO), Err(RecvTimeoutError::Disconnected))
}

fn checkpoint(conn: &Connection, size: u64, gate: &Mutex<()>) -> rusqlite::Result<()> {
    let mode = |sql: &str| conn.query_row(sql, [], |_| Ok(()));
    mode("PRAGMA wal_checkpoint(PASSIVE)")?;
    if size >= WAL_MAX {
        // A busy writer leaves the lock for microseconds: without the gate this would hardly ever get it.
        let _closed = gate.lock();
        mode("PRAGMA wal_checkpoint(TRUNCATE)")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_counts_milliseconds_of_this_time() {
        let conn = Connection::open_in_memory().unwrap();
        let first = now(&conn).unwrap();
        assert!(first > 1_700_000_000_000_000, "{first}");
        assert_eq!(first % 1000, 0);
        let start = std::time::Instant::now();
        while now(&conn).unwrap() == first {
            assert!(start.elapsed() < Duration::from_secs(5), "the clock stands still");
        }
    }

    #[test]
    fn a_constraint_is_refused_and_a_lock_is_unavailable() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.db");
        let path = Location::new(path);
        let conn = connect(&path, Role::Writer).unwrap();
        conn.execute_batch("CREATE TABLE t (a INTEGER PRIMARY KEY)").unwrap();
        let insert =
            |conn: &Connection| write(conn, |tx| tx.execute("INSERT INTO t VALUES (1)", []));
        assert!(matches!(insert(&conn), Ok(1)));
        assert!(matches!(insert(&conn), Err(Error::Refused(_))));
        let other = connect(&path, Role::Writer).unwrap();
        other.execute_batch("BEGIN IMMEDIATE").unwrap();
        conn.busy_timeout(Duration::ZERO).unwrap();
        assert!(matches!(insert(&conn), Err(Error::Unavailable(_))));
        other.execute_batch("ROLLBACK").unwrap();
        assert!(matches!(insert(&conn), Err(Error::Refused(_))), "the writer works on");
    }

    #[test]
    fn what_sqlite_reports_is_not_done_and_only_some_of_it_is_the_datas_fault() {
        for (code, refused) in [
            (ffi::SQLITE_CONSTRAINT_TRIGGER, true),
            (ffi::SQLITE_CONSTRAINT_UNIQUE, true),
            (ffi::SQLITE_TOOBIG, true),
            (ffi::SQLITE_MISMATCH, true),
            (ffi::SQLITE_FULL, false),
            (ffi::SQLITE_IOERR_WRITE, false),
            (ffi::SQLITE_IOERR_FSYNC, false),
            (ffi::SQLITE_READONLY, false),
            (ffi::SQLITE_READONLY_DBMOVED, false),
            (ffi::SQLITE_CANTOPEN, false),
            (ffi::SQLITE_PERM, false),
            (ffi::SQLITE_NOMEM, false),
            (ffi::SQLITE_BUSY, false),
            (ffi::SQLITE_LOCKED, false),
            (ffi::SQLITE_CORRUPT, false),
            (ffi::SQLITE_NOTADB, false),
            (ffi::SQLITE_SCHEMA, false),
            (ffi::SQLITE_INTERRUPT, false),
            (ffi::SQLITE_PROTOCOL, false),
            (ffi::SQLITE_MISUSE, false),
            (ffi::SQLITE_ERROR, false),
        ] {
            assert_eq!(is_the_datas(ffi::Error::new(code).code), refused, "{code}");
        }
    }

    /// A commit whose sync failed may be in the log as a whole; one whose last page did not fit into it is not.
    #[test]
    fn of_a_commit_that_failed_only_a_write_that_was_cut_off_is_known_to_be_undone() {
        let failed = |code| rusqlite::Error::SqliteFailure(ffi::Error::new(code), None);
        assert!(cut_off(&failed(ffi::SQLITE_FULL)));
        assert!(cut_off(&failed(ffi::SQLITE_IOERR_WRITE)));
        for code in [ffi::SQLITE_IOERR_FSYNC, ffi::SQLITE_IOERR, ffi::SQLITE_IOERR_SHMMAP] {
            assert!(!cut_off(&failed(code)), "{code}");
        }
    }

    #[test]
    fn without_room_nothing_is_done_and_afterwards_the_writer_works_on() {
        let dir = tempfile::tempdir().unwrap();
        let place = Location::new(dir.path().join("t.db"));
        let conn = connect(&place, Role::Writer).unwrap();
        conn.execute_batch("CREATE TABLE t (a BLOB)").unwrap();
        let pages = |count: u32| {
            conn.query_row(&format!("PRAGMA max_page_count = {count}"), [], |_| Ok(())).unwrap();
        };
        let insert =
            || write(&conn, |tx| tx.execute("INSERT INTO t VALUES (zeroblob(100000))", []));
        pages(4);
        assert!(matches!(insert(), Err(Error::Unavailable(_))));
        pages(4000);
        assert!(matches!(insert(), Ok(1)));
        let rows: u32 = conn.query_row("SELECT count(*) FROM t", [], |row| row.get(0)).unwrap();
        assert_eq!(rows, 1);
    }

    #[test]
    fn a_log_beyond_its_limit_is_cut() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.db");
        let path = Location::new(path);
        let conn = connect(&path, Role::Writer).unwrap();
        conn.execute_batch("CREATE TABLE t (a BLOB)").unwrap();
        conn.execute(
            "INSERT INTO t VALUES (zeroblob(?1))",
            [i64::try_from(WAL_SMALL * 2).unwrap()],
        )
        .unwrap();
        let log = dir.path().join("t.db-wal");
        assert!(std::fs::metadata(&log).unwrap().len() > WAL_SMALL);
        let checkpointer = connect(&path, Role::Checkpoint).unwrap();
        checkpoint(&checkpointer, WAL_MAX, &Mutex::new(())).unwrap();
        assert_eq!(std::fs::metadata(&log).unwrap().len(), 0);
    }
}
