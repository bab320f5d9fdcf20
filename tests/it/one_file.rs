//! After a clean end the SQLite store is one file: a copy of it, and of nothing else, remembers everything.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use http::StatusCode;
use tempfile::TempDir;

use crate::support::client::get;
use crate::support::fleet::{TWO_EVENTS, order, sending};
use crate::support::orders::Orders;
use crate::support::process::{self, Gateway, eventually};
use crate::support::rig::{self, Place, Which};

/// A gateway that has kept an answer and two events under each of these keys.
struct Used {
    orders: Orders,
    place: Place,
    gateway: Gateway,
}

const KEYS: [&str; 3] = ["a", "b", "c"];

impl Used {
    async fn start() -> Self {
        let (orders, place) = (Orders::start().await, Place::new(Which::Sqlite).await);
        let toml = rig::config(&place, &orders.url(), TWO_EVENTS);
        let gateway = Gateway::start(&process::config(place.folder.path(), &toml));
        for key in KEYS {
            assert_eq!(order(key).to(gateway.addr).await.status, StatusCode::CREATED);
        }
        Self { orders, place, gateway }
    }

    fn file(&self) -> PathBuf {
        self.place.folder.path().join("oncegate.db")
    }

    /// SIGTERM, and exit status 0.
    fn stop(&mut self) {
        self.gateway.terminate();
        self.ended();
    }

    fn ended(&mut self) {
        let status = tokio::task::block_in_place(|| self.gateway.exited());
        assert!(status.success(), "{status}:\n{}", self.gateway.log());
    }

    /// A copy of the one file, elsewhere, answers each of these keys from what it remembers.
    async fn a_copy_replays(&self, keys: &[&str]) {
        let runs = self.orders.runs();
        let folder = TempDir::new().unwrap();
        let copy = folder.path().join("copy.db");
        std::fs::copy(self.file(), &copy).unwrap();
        let toml = rig::config(&self.place, &self.orders.url(), TWO_EVENTS)
            .replace(&self.place.url, &format!("sqlite:{}", copy.display()));
        let config = process::config(folder.path(), &toml);
        let gateway = tokio::task::block_in_place(|| Gateway::start(&config));
        for key in keys {
            let again = order(key).to(gateway.addr).await;
            assert!(again.replayed(), "{key}: {} {:?}", again.status, again.body);
        }
        assert_eq!(self.orders.runs(), runs, "nothing executes again");
    }

    /// Runs a command on the store, beside whatever runs.
    fn run(&self, args: &[&str]) -> String {
        let config = self.gateway.config.to_str().unwrap();
        let args: Vec<_> = args.iter().copied().chain(["--config", config]).collect();
        let (code, out, errors) = process::run(&args);
        assert_eq!(code, 0, "{args:?}: {out}{errors}");
        out
    }
}

fn beside(file: &Path, end: &str) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(end);
    name.into()
}

/// How many bytes stand beside the database, in its log and in the index of its log.
fn left_beside(file: &Path) -> u64 {
    let length = |end| std::fs::metadata(beside(file, end)).map_or(0, |found| found.len());
    length("-wal") + length("-shm")
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_clean_stop_one_file_is_all_there_is() {
    let mut used = Used::start().await;
    assert!(left_beside(&used.file()) > 0, "while it serves, the log is beside it");
    // What is finished within the grace is in the file, too.
    used.orders.hold();
    let last = sending(order("last"), used.gateway.addr);
    used.orders.asked(KEYS.len() + 1).await;
    used.gateway.terminate();
    eventually("it stops", async || {
        get("/readyz").to(used.gateway.admin).await.status != StatusCode::OK
    })
    .await;
    used.orders.go();
    assert_eq!(last.await.unwrap().status, StatusCode::CREATED);
    used.ended();
    assert_eq!(left_beside(&used.file()), 0);
    used.a_copy_replays(&["a", "b", "c", "last"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_else_has_the_file_open_does_not_keep_the_stop_from_emptying_the_log() {
    let mut used = Used::start().await;
    let other = rusqlite::Connection::open(used.file()).unwrap();
    let count = "select count(*) from idempotency_records";
    let read = || other.query_row(count, [], |row| row.get::<_, i64>(0)).unwrap();
    assert_eq!(read(), 3);
    used.stop();
    assert_eq!(std::fs::metadata(beside(&used.file(), "-wal")).map_or(0, |log| log.len()), 0);
    used.a_copy_replays(&KEYS).await;
    assert_eq!(read(), 3, "and it reads on");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_in_the_middle_of_its_work_holds_no_stop_up_and_is_told_of() {
    let mut used = Used::start().await;
    let other = rusqlite::Connection::open(used.file()).unwrap();
    other.execute_batch("BEGIN; SELECT count(*) FROM idempotency_records").unwrap();
    assert_eq!(order("later").to(used.gateway.addr).await.status, StatusCode::CREATED);
    let begun = Instant::now();
    used.stop();
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    eventually("it says so", async || {
        used.gateway.log().contains("still holds what a copy of the database needs")
    })
    .await;
    drop(other);
    // The next one that opens the file finds the rest in the log, and is the last to close it.
    assert!(used.run(&["records", "list", "--key", "later"]).contains("later"));
    assert_eq!(left_beside(&used.file()), 0);
    used.a_copy_replays(&["a", "b", "c", "later"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_command_leaves_one_file_too() {
    let mut used = Used::start().await;
    used.gateway.kill9();
    assert!(left_beside(&used.file()) > 0, "a killed process leaves its log");
    used.run(&["records", "list"]);
    assert_eq!(left_beside(&used.file()), 0, "who only looks moves it into the file");
    used.a_copy_replays(&KEYS).await;
    let found = used.run(&["records", "list", "--key", "c", "--json"]);
    let found: serde_json::Value = serde_json::from_str(&found).unwrap();
    let record = found["records"][0]["id"].as_str().unwrap_or_else(|| panic!("{found}"));
    used.run(&["records", "release", record, "--completed"]);
    assert_eq!(left_beside(&used.file()), 0, "and who writes");
    used.a_copy_replays(&["a", "b"]).await;
    used.run(&["migrate"]);
    assert_eq!(left_beside(&used.file()), 0);

    let fresh = TempDir::new().unwrap();
    let made = in_folder(fresh.path(), &["migrate"], "sqlite:new.db");
    assert!(made.status.success(), "{made:?}");
    assert_eq!(names(fresh.path()), ["new.db"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_fails_leaves_one_file() {
    let used = Used::start().await;
    let folder = TempDir::new().unwrap();
    // Its address is taken: it ends after it has made and migrated its file.
    let text = std::fs::read_to_string(&used.gateway.config).unwrap();
    let file = folder.path().join("new.db");
    let taken = text.replace(&used.place.url, &format!("sqlite:{}", file.display())).replacen(
        "127.0.0.1:0",
        &used.gateway.addr.to_string(),
        1,
    );
    let config = process::config(folder.path(), &taken);
    let args = ["serve", "--config", config.to_str().unwrap()];
    let (status, errors) = process::run_to_its_end(&args, "");
    assert!(!status.success() && errors.contains("cannot listen on"), "{errors}");
    assert!(file.exists());
    assert_eq!(left_beside(&file), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_is_called_off_leaves_one_file() {
    let folder = TempDir::new().unwrap();
    let go = folder.path().join("go");
    let mut child = Command::new(env!("CARGO_BIN_EXE_oncegate"))
        .args(["serve", "--upstream", "http://127.0.0.1:9"])
        .current_dir(folder.path())
        .env("ONCEGATE_FAULT", format!("migrating@3=pause:{}", go.display()))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let reached = folder.path().join("go.reached");
    eventually("it is in the middle of its start", async || reached.exists()).await;
    process::signal(child.id(), "TERM");
    std::fs::write(&go, "").unwrap();
    let status = tokio::task::block_in_place(|| process::ended(&mut child)).expect("it ends");
    assert!(status.success(), "{status}");
    assert!(folder.path().join("oncegate.db").exists());
    assert_eq!(left_beside(&folder.path().join("oncegate.db")), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_beside_a_serve_take_nothing_away_from_it() {
    let used = Used::start().await;
    let log = beside(&used.file(), "-wal");
    let before = std::fs::metadata(&log).unwrap().len();
    assert!(before > 0);
    for _ in 0..3 {
        used.run(&["records", "list"]);
        used.run(&["events", "list"]);
        used.run(&["sinks", "list"]);
    }
    assert!(std::fs::metadata(&log).unwrap().len() >= before, "the log is the serve's");
    assert_eq!(get("/readyz").to(used.gateway.admin).await.status, StatusCode::OK);
    assert_eq!(order("later").to(used.gateway.addr).await.status, StatusCode::CREATED);
    assert!(order("a").to(used.gateway.addr).await.replayed());
    assert!(!used.gateway.log().contains("the database file"), "{}", used.gateway.log());
}

/// Runs the program in a folder, with this store, to its end; one that stays is ended.
fn in_folder(folder: &Path, args: &[&str], store: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_oncegate"))
        .args(args)
        .current_dir(folder)
        .env("ONCEGATE_STORE_URL", store)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let ended = process::ended(&mut child);
    let output = child.wait_with_output().unwrap();
    assert!(ended.is_some(), "{args:?} stays: {output:?}");
    output
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap().flatten();
    let mut names: Vec<_> = entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[tokio::test(flavor = "multi_thread")]
async fn a_url_with_parameters_names_the_file_that_it_says_and_no_other() {
    for (url, file) in [
        ("sqlite://x.db?mode=rwc", "x.db"),
        ("sqlite:x.db?mode=rwc", "x.db"),
        ("sqlite://my%20own.db", "my own.db"),
    ] {
        let folder = TempDir::new().unwrap();
        let made = in_folder(folder.path(), &["migrate"], url);
        assert!(made.status.success(), "{url}: {made:?}");
        assert_eq!(names(folder.path()), [file], "{url}");
        let url = format!("sqlite://{}?mode=rw", folder.path().join(file).display());
        let there = in_folder(folder.path(), &["records", "list"], &url);
        assert!(there.status.success(), "{url}: {there:?}");
        assert_eq!(names(folder.path()), [file], "{url}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_must_be_there_is_not_made_and_a_url_that_means_nothing_is_refused() {
    let folder = TempDir::new().unwrap();
    let errors = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();
    for args in
        [&["serve", "--upstream", "http://127.0.0.1:9"][..], &["migrate"], &["records", "list"]]
    {
        let missing = in_folder(folder.path(), args, "sqlite:x.db?mode=rw");
        assert_eq!(missing.status.code(), Some(1), "{args:?}: {missing:?}");
        let said = errors(&missing);
        assert!(said.contains("x.db") && said.contains("must be there (mode=rw)"), "{said}");
        for (url, why) in [
            ("sqlite:x.db?mode=ro", "mode=ro is not possible"),
            ("sqlite:x.db?cache=shared", "has no meaning here; allowed is mode=rwc"),
            ("sqlite::memory:", "lost with the process"),
            ("sqlite://", "names no file"),
        ] {
            let refused = in_folder(folder.path(), args, url);
            assert_eq!(refused.status.code(), Some(2), "{args:?} {url}: {refused:?}");
            let said = errors(&refused);
            assert!(said.contains("ONCEGATE_STORE_URL") && said.contains(why), "{url}: {said}");
        }
    }
    assert_eq!(names(folder.path()), [""; 0], "nothing was made");
}
