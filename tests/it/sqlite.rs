//! What is particular to the SQLite store: the file, its lock, its schema, and others on the same file.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use oncegate::record::{Fingerprint, Key, Operation, OwnerId, RecordId, Scope, Tenant};
use oncegate::store::sqlite::{FileLock, Location, Sqlite};
use oncegate::store::{Error, OpenError, Operators, Proposal, RecordFilter, Reserved, Store};

/// A store on this file, migrated.
pub(crate) async fn open(path: &Path) -> Arc<dyn Store> {
    let store = unmigrated(path).await.unwrap();
    store.migrate(true).await.unwrap();
    Arc::new(store)
}

async fn unmigrated(path: &Path) -> Result<Sqlite, OpenError> {
    Sqlite::open(&Location::new(path)).await
}

fn lock(path: &Path) -> Result<FileLock, OpenError> {
    oncegate::store::sqlite::lock(&Location::new(path))
}

fn database() -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("oncegate.db");
    (dir, path)
}

fn proposal(n: usize, owner: OwnerId) -> Proposal {
    Proposal {
        id: RecordId::fresh(),
        scope: Scope {
            tenant: Tenant::parse("t").unwrap(),
            operation: Operation::parse("o").unwrap(),
            key: Key::parse(&format!("k{n}")).unwrap(),
        },
        fingerprint: Fingerprint { canonical: [1; 32], raw: [2; 32], recipe: [3; 8] },
        owner,
        caller: None,
        context: None,
        retention: Duration::from_secs(3600),
    }
}

async fn reserve(store: &dyn Store, n: usize, owner: OwnerId) {
    let deadline = Instant::now() + Duration::from_secs(30);
    let reserved = store.reserve(proposal(n, owner), deadline).await.unwrap();
    assert_eq!(reserved, Reserved::Held);
}

async fn records(store: &dyn Store) -> usize {
    let filter = RecordFilter { limit: 100_000, ..RecordFilter::default() };
    store.list_records(&filter).await.unwrap().len()
}

#[tokio::test]
async fn a_second_serve_on_the_same_file_is_refused() {
    let (_dir, path) = database();
    let first = lock(&path).unwrap();
    let error = lock(&path).unwrap_err();
    assert!(matches!(error, OpenError::Locked { .. }), "{error}");
    assert!(error.to_string().contains("oncegate.db is in use by another"), "{error}");
    // A command does not take the lock.
    open(&path).await.ping().await.unwrap();
    drop(first);
    lock(&path).unwrap();
}

#[tokio::test]
async fn a_link_to_the_file_does_not_evade_the_lock() {
    let (dir, path) = database();
    open(&path).await;
    let link = dir.path().join("link.db");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let _first = lock(&path).unwrap();
    assert!(matches!(lock(&link), Err(OpenError::Locked { .. })));
}

#[tokio::test]
async fn a_newer_schema_is_refused() {
    let (_dir, path) = database();
    open(&path).await;
    rusqlite::Connection::open(&path).unwrap().execute_batch("PRAGMA user_version = 99").unwrap();
    let Err(error) = unmigrated(&path).await else { panic!("opened") };
    assert!(matches!(error, OpenError::NewerSchema { found: 99, known: 8 }), "{error}");
}

#[tokio::test]
async fn an_older_schema_is_migrated_only_where_that_is_allowed() {
    let (_dir, path) = database();
    let store = unmigrated(&path).await.unwrap();
    let error = store.migrate(false).await.unwrap_err();
    assert!(matches!(error, OpenError::OlderSchema { found: 0, known: 8 }), "{error}");
    assert!(store.ping().await.is_err());
    assert_eq!(store.migrate(true).await.unwrap(), 8);
    assert_eq!(store.migrate(true).await.unwrap(), 8, "again changes nothing");
    assert_eq!(store.migrate(false).await.unwrap(), 8);
    store.ping().await.unwrap();
}

#[tokio::test]
async fn records_that_were_unknown_before_the_migration_are_noted() {
    let (_dir, path) = database();
    drop(unmigrated(&path).await.unwrap());
    let db = rusqlite::Connection::open(&path).unwrap();
    db.execute_batch(include_str!("../../migrations/sqlite/0001_records.sql")).unwrap();
    db.execute_batch("PRAGMA user_version = 1").unwrap();
    for (key, status) in [("u", "unknown"), ("p", "in_progress"), ("c", "completed")] {
        let insert = "INSERT INTO idempotency_records (id, tenant_id, operation, key, request_hash,
              raw_hash, recipe, status, attempt, owner, created_at)
            VALUES (?1, 't', 'o', ?1, x'', x'', x'', ?2, 3, '', 0)";
        db.execute(insert, [key, status]).unwrap();
    }
    drop(open(&path).await);
    let noted = "SELECT group_concat(id), max(attempt), max(asked), min(since) > 1700000000000000
        FROM oncegate_unknown WHERE since = next_ask_at AND announced IS NULL";
    let noted: (String, u32, u32, bool) = db
        .query_row(noted, [], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?)))
        .unwrap();
    assert_eq!(noted, ("u".to_owned(), 3, 0, true));
}

#[tokio::test(flavor = "multi_thread")]
async fn many_may_open_and_migrate_a_new_file_at_once() {
    let (_dir, path) = database();
    let all = (0..6).map(|_| {
        let path = path.clone();
        tokio::spawn(async move { open(&path).await.ping().await.unwrap() })
    });
    for one in all.collect::<Vec<_>>() {
        one.await.unwrap();
    }
}

/// SQLite does not wait for that lock by itself: of two processes that opened a new file at once one had an error.
#[tokio::test(flavor = "multi_thread")]
async fn the_switch_to_a_write_ahead_log_waits_for_who_writes_meanwhile() {
    let (_dir, path) = database();
    let other = rusqlite::Connection::open(&path).unwrap();
    other.execute_batch("CREATE TABLE somebodys (n); BEGIN IMMEDIATE").unwrap();
    let mut opening = Box::pin(unmigrated(&path));
    // Long enough for an open that does not wait; it goes on all the same where this thread is late.
    let early = tokio::time::timeout(Duration::from_millis(300), &mut opening).await;
    assert!(
        early.is_err(),
        "opened, or refused, beside a writer: {:?}",
        early.map(|done| done.err())
    );
    other.execute_batch("COMMIT").unwrap();
    opening.await.unwrap().ping().await.unwrap_err();
}

#[tokio::test]
async fn a_place_that_cannot_be_written_is_a_clear_error() {
    let (dir, path) = database();
    std::fs::write(&path, "this is text, and long enough to be taken for a header of a file")
        .unwrap();
    let missing = dir.path().join("missing/oncegate.db");
    for place in [Path::new("/proc/oncegate.db"), &missing, dir.path(), &path] {
        let Err(error) = unmigrated(place).await else { panic!("opened {place:?}") };
        let OpenError::Connect { place: named, cause } = &error else { panic!("{error}") };
        assert_eq!(named, &place.display().to_string());
        let cause = cause.to_string();
        let told = ["unable to open", "not a database", "there is no folder"];
        assert!(told.iter().any(|told| cause.contains(told)), "{cause}");
        assert!(error.to_string().starts_with("cannot open the store at "));
    }
    assert!(matches!(lock(&missing), Err(OpenError::Connect { .. })));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_works_beside_a_busy_serve() {
    let (_dir, path) = database();
    let serve = open(&path).await;
    let owner = OwnerId::fresh();
    serve.heartbeat(owner, Duration::from_secs(60)).await.unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let load = tokio::spawn({
        let (serve, stop) = (Arc::clone(&serve), Arc::clone(&stop));
        async move {
            let mut reserved = 0;
            while !stop.load(Ordering::Relaxed) {
                reserve(serve.as_ref(), reserved, owner).await;
                reserved += 1;
            }
            reserved
        }
    });
    let command = open(&path).await;
    for n in 0..50 {
        let other = OwnerId::fresh();
        command.heartbeat(other, Duration::from_secs(60)).await.unwrap();
        reserve(command.as_ref(), 1_000_000 + n, other).await;
    }
    stop.store(true, Ordering::Relaxed);
    let reserved = load.await.unwrap();
    assert!(reserved > 0);
    assert_eq!(records(serve.as_ref()).await, reserved + 50);
    assert_eq!(records(command.as_ref()).await, reserved + 50);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_queued_is_done_although_the_store_is_dropped() {
    let (_dir, path) = database();
    let owner = OwnerId::fresh();
    {
        let store = open(&path).await;
        store.heartbeat(owner, Duration::from_secs(60)).await.unwrap();
        let all = (0..200).map(|n| {
            let store = Arc::clone(&store);
            tokio::spawn(async move { reserve(store.as_ref(), n, owner).await })
        });
        let all: Vec<_> = all.collect();
        drop(store);
        for one in all {
            one.await.unwrap();
        }
    }
    assert_eq!(records(open(&path).await.as_ref()).await, 200);
}

#[tokio::test]
async fn the_contents_can_be_asked_in_sql() {
    let (_dir, path) = database();
    let store = open(&path).await;
    let owner = OwnerId::fresh();
    store.heartbeat(owner, Duration::from_secs(60)).await.unwrap();
    reserve(store.as_ref(), 1, owner).await;
    let conn = rusqlite::Connection::open(&path).unwrap();
    let count = |sql: &str| conn.query_row(sql, [], |row| row.get::<_, i64>(0)).unwrap();
    assert_eq!(count("select count(*) from idempotency_records where key = 'k1'"), 1);
    assert_eq!(count("select count(*) from outbox_events where idempotency_key = 'k1'"), 0);
    let hashed = "select count(*) from idempotency_records where length(request_hash) = 32";
    assert_eq!(count(hashed), 1, "already while it is running");
    assert_eq!(count("select length(database_id) from oncegate_meta"), 32);
}

#[tokio::test]
async fn nothing_is_reserved_once_the_file_is_gone_or_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("o.db");
    let store = open(&path).await;
    let owner = OwnerId::fresh();
    store.heartbeat(owner, Duration::from_secs(60)).await.unwrap();
    let reserve = async |key: &str| {
        let proposal = Proposal {
            id: RecordId::fresh(),
            scope: Scope {
                tenant: Tenant::stored("t"),
                operation: Operation::stored("o"),
                key: Key::stored(key),
            },
            fingerprint: Fingerprint { canonical: [1; 32], raw: [2; 32], recipe: [3; 8] },
            owner,
            caller: None,
            context: None,
            retention: Duration::from_secs(3600),
        };
        store.reserve(proposal, Instant::now() + Duration::from_secs(10)).await
    };
    assert_eq!(reserve("before").await.unwrap(), Reserved::Held);
    std::fs::rename(&path, folder.path().join("moved.db")).unwrap();
    assert!(matches!(reserve("gone").await, Err(Error::Unavailable(_))));
    assert!(store.ping().await.is_err(), "and readiness tells");
    std::fs::write(&path, b"another file").unwrap();
    assert!(matches!(reserve("replaced").await, Err(Error::Unavailable(_))));
    std::fs::rename(folder.path().join("moved.db"), &path).unwrap();
    assert_eq!(reserve("back").await.unwrap(), Reserved::Held);
}
