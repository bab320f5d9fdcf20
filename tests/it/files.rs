//! The SQLite store's files on a bad day, under the real program: read-only, full, deleted, cut short, with two names.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use http::StatusCode;
use rustix::process::Resource;
use tempfile::TempDir;

use crate::support::client::get;
use crate::support::fleet::{order, sending};
use crate::support::orders::Orders;
use crate::support::postgres::{as_somebody, server_user};
use crate::support::process::{self, Gateway, eventually};
use crate::support::rig::{self, Place, Which};
use crate::support::signals;

/// A place with a database in which something stands, at rest.
async fn used(orders: &Orders) -> (Place, PathBuf) {
    let place = Place::new(Which::Sqlite).await;
    let path = process::config(place.folder.path(), &rig::config(&place, &orders.url(), ""));
    let mut gateway = Gateway::start(&path);
    for n in 0..40 {
        order(&format!("k-{n}")).to(gateway.addr).await;
    }
    gateway.terminate();
    gateway.exited();
    (place, path)
}

fn database(place: &Place) -> PathBuf {
    place.folder.path().join("oncegate.db")
}

/// What a start that is refused says.
fn refused(config: &Path) -> String {
    match Gateway::try_start(config) {
        Ok(gateway) => panic!("it started:\n{}", gateway.log()),
        Err(output) => output,
    }
}

async fn ready(gateway: &Gateway) -> bool {
    get("/readyz").to(gateway.admin).await.status == StatusCode::OK
}

/// Moves the log into the file: nothing is left beside it.
fn checkpointed(file: &Path) {
    let db = rusqlite::Connection::open(file).unwrap();
    db.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).unwrap();
}

fn cut(file: &Path) {
    let file = std::fs::File::options().write(true).open(file).unwrap();
    file.set_len(file.metadata().unwrap().len() / 2).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_or_folder_that_cannot_be_written_is_refused_at_the_start_by_name() {
    let orders = Orders::start().await;
    let folder = TempDir::new().unwrap();
    if let Some((uid, gid)) = server_user() {
        std::os::unix::fs::chown(folder.path(), Some(uid), Some(gid)).unwrap();
    }
    let place = Place::new(Which::Sqlite).await;
    let file = folder.path().join("oncegate.db");
    let toml = rig::config(&place, &orders.url(), "");
    let path = process::config(
        folder.path(),
        &toml.replace(&place.url, &format!("sqlite:{}", file.display())),
    );
    // Where the user may read it: what was built may be under the home of root.
    let program = folder.path().join("oncegate");
    std::fs::copy(env!("CARGO_BIN_EXE_oncegate"), &program).unwrap();
    let start = || {
        let mut command = as_somebody(&program);
        command.args(["serve", "--config"]).arg(&path).current_dir(folder.path());
        Gateway::launch(command, &path)
    };
    let mode = |of: &Path, mode: u32| {
        std::fs::set_permissions(of, Permissions::from_mode(mode)).unwrap();
    };
    let mut first = start().unwrap_or_else(|output| panic!("not started:\n{output}"));
    first.terminate();
    first.exited();

    mode(&file, 0o444);
    let output = start().map(drop).unwrap_err();
    assert!(
        output.contains("cannot open the store at") && output.contains("oncegate.db"),
        "{output}"
    );
    assert!(output.to_lowercase().contains("permission denied"), "{output}");
    mode(&file, 0o644);

    for name in ["oncegate.db-wal", "oncegate.db-shm", "oncegate.db.lock"] {
        drop(std::fs::remove_file(folder.path().join(name)));
    }
    mode(folder.path(), 0o555);
    let output = start().map(drop).unwrap_err();
    assert!(
        output.contains("cannot open the store at") && output.contains("oncegate.db"),
        "{output}"
    );
    mode(folder.path(), 0o755);
    start().unwrap_or_else(|output| panic!("not started:\n{output}"));
}

/// No file may grow beyond this: what a full disk does, for one process.
fn limit(gateway: &Gateway, bytes: Option<u64>) {
    signals::limit(gateway.pid(), Resource::Fsize, bytes);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_room_for_its_file_nothing_is_executed_until_there_is_room() {
    let (orders, place) = (Orders::start().await, Place::new(Which::Sqlite).await);
    let path = process::config(place.folder.path(), &rig::config(&place, &orders.url(), ""));
    // The signal for a file that is too large would end it; without it, the write fails.
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' XFSZ; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_oncegate")]);
    command.args(["serve", "--config"]).arg(&path);
    let gateway = Gateway::launch(command, &path).unwrap_or_else(|output| panic!("{output}"));
    assert_eq!(order("before").to(gateway.addr).await.status, StatusCode::CREATED);
    assert!(ready(&gateway).await);
    orders.hold();
    let running = sending(order("running"), gateway.addr);
    orders.asked(2).await;

    limit(&gateway, Some(1));
    let begun = Instant::now();
    let full = order("k").to(gateway.addr).await;
    assert!(begun.elapsed() < Duration::from_secs(3), "it is told at once: {:?}", begun.elapsed());
    assert_eq!((full.status.as_u16(), full.problem().as_str()), (503, "store-unavailable"));
    assert!(!ready(&gateway).await);
    let why = get("/readyz").to(gateway.admin).await.json()["cause"].to_string();
    assert!(why.contains("full") || why.contains("disk I/O error"), "{why}");
    assert_eq!(orders.runs_of("k"), 0);
    orders.go();
    let running = running.await.unwrap();
    assert_eq!(running.status, StatusCode::CREATED);
    assert_eq!(running.header("oncegate-stored"), Some("false"), "it is owed");
    assert!(order("before").to(gateway.addr).await.replayed());
    gateway.says("the database file cannot be written");

    limit(&gateway, None);
    eventually("it is ready again", async || ready(&gateway).await).await;
    eventually("it serves again", async || {
        order("k").to(gateway.addr).await.status == StatusCode::CREATED
    })
    .await;
    eventually("what was owed is written", async || {
        place.status_of("running").await.as_deref() == Some("completed")
    })
    .await;
    let replay = order("running").to(gateway.addr).await;
    assert!(replay.replayed() && replay.body == running.body);
    for key in ["before", "k", "running"] {
        assert_eq!(orders.runs_of(key), 1, "{key}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn while_one_of_its_files_is_gone_nothing_is_executed_and_nothing_counts_as_stored() {
    for name in ["oncegate.db", "oncegate.db-wal", "oncegate.db-shm"] {
        let (orders, place) = (Orders::start().await, Place::new(Which::Sqlite).await);
        let path = process::config(place.folder.path(), &rig::config(&place, &orders.url(), ""));
        let gateway = Gateway::start(&path);
        orders.hold();
        let running = sending(order("running"), gateway.addr);
        orders.asked(1).await;
        let (here, away) = (place.folder.path().join(name), place.folder.path().join("away"));
        std::fs::rename(&here, &away).unwrap();
        let refused = order("k").to(gateway.addr).await;
        assert_eq!(refused.problem(), "store-unavailable", "{name}");
        assert!(!ready(&gateway).await, "{name}");
        orders.go();
        let running = running.await.unwrap();
        assert_eq!(running.header("oncegate-expires"), None, "{name}: {running:?}");
        assert_eq!(running.header("oncegate-stored"), None, "{name}: it is in the spill");
        std::fs::rename(&away, &here).unwrap();
        eventually("it serves again", async || {
            order("k").to(gateway.addr).await.status == StatusCode::CREATED
        })
        .await;
        eventually("what was owed is written", async || {
            order("running").to(gateway.addr).await.replayed()
        })
        .await;
        assert_eq!(orders.runs(), 2, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_serve_is_refused_also_when_the_lock_file_was_deleted() {
    let (orders, place) = (Orders::start().await, Place::new(Which::Sqlite).await);
    let path = process::config(place.folder.path(), &rig::config(&place, &orders.url(), ""));
    let mut first = Gateway::start(&path);
    for _ in 0..2 {
        let output = refused(&path);
        assert!(output.contains("is in use by another `oncegate serve`"), "{output}");
        assert!(output.contains("oncegate.db"), "{output}");
        let beside = place.folder.path().join("oncegate.db.lock");
        std::fs::remove_file(&beside).unwrap();
    }
    assert_eq!(order("k").to(first.addr).await.status, StatusCode::CREATED, "undisturbed");
    first.kill9();
    assert!(order("k").to(first.restart().addr).await.replayed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_under_two_names_is_refused_at_the_start() {
    let orders = Orders::start().await;
    let (place, path) = used(&orders).await;
    let second = place.folder.path().join("second.db");
    std::fs::hard_link(database(&place), &second).unwrap();
    let output = refused(&path);
    assert!(output.contains("second name (a hard link)"), "{output}");
    std::fs::remove_file(&second).unwrap();
    Gateway::start(&path);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_was_cut_short_is_refused_at_the_start() {
    let orders = Orders::start().await;
    for logged in [false, true] {
        let (place, path) = used(&orders).await;
        checkpointed(&database(&place));
        if logged {
            // A process that dies leaves its last commits in the log.
            let mut gateway = Gateway::start(&path);
            order("last").to(gateway.addr).await;
            gateway.kill9();
            let log = std::fs::metadata(place.folder.path().join("oncegate.db-wal")).unwrap();
            assert!(log.len() > 0);
        }
        cut(&database(&place));
        let output = refused(&path);
        assert!(output.contains("cannot open the store at"), "{logged}: {output}");
        assert!(output.contains("malformed") || output.contains("damaged"), "{logged}: {output}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn beside_a_process_that_stopped_while_it_wrote_commands_read_and_say_why_they_cannot_write()
{
    let orders = Orders::start().await;
    let (place, config) = used(&orders).await;
    let file = database(&place);
    let record = place.rows("select id from idempotency_records limit 1").await;
    let record = record[0][0].clone().unwrap();
    let new = TempDir::new().unwrap();
    let new_file = new.path().join("oncegate.db");
    let toml = rig::config(&place, &orders.url(), "");
    let url = format!("sqlite:{}", new_file.display());
    let new_config = process::config(new.path(), &toml.replace(&place.url, &url));
    // As a `serve` has it that gets a SIGSTOP between two statements.
    let hold = |file: &Path| {
        let db = rusqlite::Connection::open(file).unwrap();
        db.execute_batch("PRAGMA journal_mode = WAL; BEGIN IMMEDIATE").unwrap();
        db
    };
    let (held, _new_held) = (hold(&file), hold(&new_file));

    let given = |config: &Path, args: &[&str]| {
        let config = config.to_str().unwrap().to_owned();
        let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
        tokio::task::spawn_blocking(move || {
            let line: Vec<&str> = args.iter().map(String::as_str).collect();
            process::run(&[&line[..], &["--config", &config]].concat())
        })
    };
    let discard = ["events", "discard", "--status", "dead"];
    let writing = [
        given(&config, &["records", "release", &record, "--completed"]),
        given(&config, &discard),
        given(&new_config, &["migrate"]),
    ];
    let begun = Instant::now();
    for args in [
        &["records", "list"][..],
        &["records", "show", &record],
        &["events", "list"],
        &["sinks", "list"],
        &["migrate"],
    ] {
        let (code, _, errors) = given(&config, args).await.unwrap();
        assert_eq!(code, 0, "{args:?}: {errors}");
    }
    assert!(begun.elapsed() < Duration::from_secs(4), "no lock is waited for");
    let (code, _, errors) = given(&new_config, &["records", "list"]).await.unwrap();
    assert!(code == 1 && errors.contains("run `oncegate migrate`"), "{errors}");
    for (one, file) in writing.into_iter().zip([&file, &file, &new_file]) {
        let (code, _, errors) = one.await.unwrap();
        let busy = format!("another process holds a lock on {}", file.display());
        assert!(code == 1 && errors.contains(&busy) && !errors.contains("migration"), "{errors}");
        assert!(errors.contains("Let it go on, or end it"), "{errors}");
    }
    drop(held);
    let (code, out, errors) = given(&config, &discard).await.unwrap();
    assert_eq!((code, out.as_str()), (0, "0 dead events discarded.\n"), "{errors}");
}
