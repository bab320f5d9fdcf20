//! Outcomes that the database does not take: they outlive the process, and reach their database and no other.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use http::{Response, StatusCode};
use http_body_util::Full;
use oncegate::cli::start;
use oncegate::config::Config;
use oncegate::gateway::accept::{self, Listener};
use oncegate::gateway::spill::{Disk, Spill};
use oncegate::gateway::upstream::Upstream;
use oncegate::gateway::{self, Serve};
use oncegate::identity::Astray;
use oncegate::lease;
use oncegate::scope::DigestKey;
use oncegate::telemetry::Metrics;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::support::client::{Answer, get};
use crate::support::fault::Fault;
use crate::support::fleet::{TWO_EVENTS, command, metric, order, sending};
use crate::support::orders::Orders;
use crate::support::postgres::Cluster;
use crate::support::process::{self, Gateway, PATIENCE, eventually};
use crate::support::rig::{self, Place, Which};

/// A gateway whose Postgres can go away, with a lease of three seconds.
struct Cut {
    orders: Orders,
    place: Place,
    fault: Fault,
    gateway: Gateway,
}

impl Cut {
    async fn start(store: &str) -> Self {
        let (orders, place) = (Orders::start().await, Place::new(Which::Postgres).await);
        let (fault, url) = Fault::before_postgres(&place.url, Cluster::shared().port()).await;
        let store = format!("lease = \"3s\"\nsweep_every = \"500ms\"\n{store}");
        let toml = rig::config_at(
            &place,
            &orders.url(),
            "127.0.0.1:0",
            &store,
            "wait = \"100ms\"",
            TWO_EVENTS,
        );
        let config = process::config(place.folder.path(), &toml.replace(&place.url, &url));
        let gateway = tokio::task::block_in_place(|| Gateway::start(&config));
        Self { orders, place, fault, gateway }
    }

    /// Has these keys executed, and the database go away before their outcomes are written.
    async fn outcomes_without_a_database(&self, keys: &[&str]) -> Vec<Answer> {
        let asked = self.orders.runs();
        self.orders.hold();
        let all: Vec<_> = keys.iter().map(|key| sending(order(key), self.gateway.addr)).collect();
        self.orders.asked(asked + keys.len()).await;
        self.fault.refuse();
        self.fault.cut();
        self.orders.go();
        let mut answers = Vec::new();
        for one in all {
            answers.push(one.await.unwrap());
        }
        answers
    }

    /// Kills the gateway, and starts it again on the same files, with a database.
    fn killed_and_started(&mut self) {
        self.gateway.kill9();
        self.fault.pass();
        self.gateway = tokio::task::block_in_place(|| self.gateway.restart());
    }

    fn folder(&self) -> PathBuf {
        self.place.folder.path().join("oncegate-spill")
    }

    /// How many outcomes stand in the audit table only.
    async fn late_outcomes(&self) -> i64 {
        self.place.count("select count(*) from audit_log where action = 'late_outcome'").await
    }

    async fn is_completed(&self, key: &str) -> bool {
        self.place.status_of(key).await.as_deref() == Some("completed")
    }
}

/// What the callers got: the API's answer, which counts as kept, and of which nobody knows yet when it expires.
pub(crate) fn assert_kept(answer: &Answer) {
    assert_eq!(answer.status, StatusCode::CREATED, "{answer:?}");
    assert_eq!(answer.header("oncegate-stored"), None);
    assert_eq!(answer.header("oncegate-expires"), None);
}

/// How often an outcome left the spill this way.
pub(crate) async fn drained(admin: SocketAddr, result: &str) -> usize {
    let text = get("/metrics").to(admin).await.body;
    let text = String::from_utf8_lossy(&text).into_owned();
    let name = format!("oncegate_spill_drained_total{{result=\"{result}\"}} ");
    text.lines().find_map(|line| line.strip_prefix(&name)).map_or(0, |count| count.parse().unwrap())
}

/// The files in a folder, by how their names end.
pub(crate) fn files(folder: &Path, ending: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("the spill's folder");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    paths.filter(|path| path.extension().is_some_and(|end| end == ending)).collect()
}

/// The log is read beside the test, and may come a moment later.
pub(crate) async fn said(gateway: &Gateway, text: &str) {
    eventually(text, async || gateway.log().contains(text)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn that_an_attempt_did_not_execute_is_kept_as_well_and_outlives_the_process() {
    let mut cut = Cut::start("").await;
    cut.orders.answer_status(429);
    let first = cut.outcomes_without_a_database(&["k"]).await.remove(0);
    assert_eq!(first.status, StatusCode::TOO_MANY_REQUESTS, "{first:?}");
    let admin = cut.gateway.admin;
    assert_eq!(metric(admin, "oncegate_spill_entries").await, 1, "before the caller was told");

    cut.killed_and_started();
    assert_eq!(drained(cut.gateway.admin, "released").await, 1);
    assert_eq!(cut.place.status_of("k").await, None, "its key is free, not unknown");
    cut.orders.answer_created();
    let retry = order("k").to(cut.gateway.addr).await;
    assert_eq!((retry.status, retry.replayed()), (StatusCode::CREATED, false));
    assert!(files(&cut.folder(), "aside").is_empty());
    assert_eq!(cut.late_outcomes().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_freed_attempt_that_somebody_resolved_meanwhile_frees_nothing_and_is_noted() {
    let mut cut = Cut::start("").await;
    cut.orders.answer_status(429);
    let first = cut.outcomes_without_a_database(&["k"]).await.remove(0);
    cut.gateway.kill9();
    cut.fault.pass();
    // As an operator would, through a replica of its own folder: the record is at another attempt then.
    let resolve = "update idempotency_records set attempt = 2, status = 'unknown' where key = 'k'";
    cut.place
        .rows(&format!("with done as ({resolve} returning 1) select count(*) from done"))
        .await;
    cut.killed_and_started();
    assert_eq!(drained(cut.gateway.admin, "fenced_off").await, 1);
    assert_eq!(cut.place.status_of("k").await.as_deref(), Some("unknown"));
    assert_eq!(cut.late_outcomes().await, 1);
    let told = cut.place.rows("select why from audit_log where action = 'late_outcome'").await;
    let told = told[0][0].clone().unwrap();
    assert!(told.contains("429, not executed"), "{told}");
    assert_eq!(first.status, StatusCode::TOO_MANY_REQUESTS);
}

#[tokio::test(flavor = "multi_thread")]
async fn a10_an_outcome_is_kept_while_the_database_is_away_and_written_when_it_is_back() {
    let cut = Cut::start("").await;
    let first = cut.outcomes_without_a_database(&["k"]).await.remove(0);
    assert_kept(&first);
    let admin = cut.gateway.admin;
    assert_eq!(metric(admin, "oncegate_spill_entries").await, 1);
    assert!(metric(admin, "oncegate_spill_bytes").await > 0);
    let duplicate = order("k").to(cut.gateway.addr).await;
    assert_eq!(duplicate.problem(), "in-progress", "its record is not completed yet");
    assert!(!cut.is_completed("k").await);

    cut.fault.pass();
    eventually("it is completed", async || cut.is_completed("k").await).await;
    assert_eq!(cut.place.events().await, 2, "with its events");
    eventually("the spill is empty", async || metric(admin, "oncegate_spill_bytes").await == 0)
        .await;
    assert_eq!(metric(admin, "oncegate_spill_entries").await, 0);
    assert_eq!(drained(admin, "completed").await, 1);
    let replay = order("k").to(cut.gateway.addr).await;
    assert!(replay.replayed() && replay.header("oncegate-expires").is_some());
    assert_eq!((replay.record(), &replay.body), (first.record(), &first.body));
    assert_eq!(cut.orders.runs(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_process_completes_what_a_killed_one_kept_before_it_marks_anything() {
    let mut cut = Cut::start("").await;
    let first = cut.outcomes_without_a_database(&["a", "b", "c"]).await;
    first.iter().for_each(assert_kept);
    let lapsed = "select count(*) from oncegate_owners where lease_until < clock_timestamp()";
    eventually("its lease runs out", async || cut.place.count(lapsed).await == 1).await;
    cut.killed_and_started();
    for (key, first) in ["a", "b", "c"].into_iter().zip(&first) {
        assert!(cut.is_completed(key).await, "{key}: as soon as it is ready");
        let replay = order(key).to(cut.gateway.addr).await;
        assert!(replay.replayed());
        assert_eq!((replay.record(), &replay.body), (first.record(), &first.body));
    }
    assert_eq!(cut.place.events().await, 6);
    let marked = "select count(*) from oncegate_unknown";
    assert_eq!(cut.place.count(marked).await, 0, "none was ever marked");
    assert_eq!(drained(cut.gateway.admin, "completed").await, 3);
    assert_eq!(files(&cut.folder(), "spill").len(), 1, "the living process's own");
    assert_eq!(cut.orders.runs(), 3);
}

/// A database file that nobody else can write to until this is dropped.
pub(crate) fn locked(place: &Place) -> rusqlite::Connection {
    let db = rusqlite::Connection::open(place.folder.path().join("oncegate.db")).unwrap();
    db.busy_timeout(PATIENCE).unwrap();
    db.execute_batch("BEGIN IMMEDIATE").unwrap();
    db
}

#[tokio::test(flavor = "multi_thread")]
async fn on_sqlite_the_spill_is_drained_before_the_last_process_s_records_are_marked() {
    let (orders, place) = (Orders::start().await, Place::new(Which::Sqlite).await);
    let store = "completion_timeout = \"200ms\"";
    let toml = rig::config_at(&place, &orders.url(), "127.0.0.1:0", store, "", TWO_EVENTS);
    let mut gateway = Gateway::start(&process::config(place.folder.path(), &toml));
    orders.hold();
    let lost = {
        let to = gateway.addr;
        tokio::spawn(async move { order("lost").send(to).await })
    };
    orders.asked(1).await;
    let kept = sending(order("kept"), gateway.addr);
    orders.asked(2).await;
    let db = locked(&place);
    db.execute_batch(
        "CREATE TABLE seen (key TEXT, status TEXT);
         CREATE TRIGGER see AFTER UPDATE OF status ON idempotency_records
         BEGIN INSERT INTO seen VALUES (NEW.key, NEW.status); END;",
    )
    .unwrap();
    orders.answer(|execution| {
        // The answer to the other one never comes.
        let status = if execution.key() == Some("kept") { 201 } else { 504 };
        Response::builder().status(status).body(Full::default()).unwrap()
    });
    orders.go();
    let kept = kept.await.unwrap();
    assert_kept(&kept);
    let folder = place.folder.path().join("oncegate.db.spill");
    let [file] = &files(&folder, "spill")[..] else { panic!("one file") };
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode();
    assert_eq!((mode(&folder) & 0o777, mode(file) & 0o777), (0o700, 0o600));
    gateway.kill9();
    drop(lost.await);
    db.execute_batch("COMMIT").unwrap();
    drop(db);

    let gateway = tokio::task::block_in_place(|| gateway.restart());
    let seen = place.rows("SELECT key, status FROM seen ORDER BY rowid").await;
    let seen: Vec<Vec<String>> =
        seen.into_iter().map(|row| row.into_iter().flatten().collect()).collect();
    assert_eq!(seen, [["kept", "completed"], ["lost", "unknown"]], "in this order");
    let replay = order("kept").to(gateway.addr).await;
    assert!(replay.replayed());
    assert_eq!(replay.record(), kept.record());
    assert_eq!(orders.runs(), 2);
}

/// A disk whose syncs wait, once it is told so.
struct SlowDisk {
    waits: Arc<AtomicBool>,
    reached: mpsc::Sender<()>,
    gate: mpsc::Receiver<()>,
}

impl Disk for SlowDisk {
    fn write(&mut self, _: &[u8], _: u64) -> std::io::Result<()> {
        Ok(())
    }
    fn sync(&mut self) -> std::io::Result<()> {
        if self.waits.load(Ordering::SeqCst) {
            self.reached.send(()).unwrap();
            self.gate.recv_timeout(PATIENCE).unwrap();
        }
        Ok(())
    }
    fn truncate(&mut self, _: u64) -> std::io::Result<()> {
        Ok(())
    }
    fn path(&self) -> &Path {
        Path::new("slow")
    }
    fn check_path(&self) -> Result<(), Astray> {
        Ok(())
    }
    fn renew(&mut self, _: &[u8], _: u64) -> std::io::Result<()> {
        Ok(())
    }
    fn remove(self: Box<Self>) {}
}

/// A gateway in this process, with its outcomes on this disk.
async fn inside(config: Config, disk: SlowDisk) -> SocketAddr {
    let store = start::open(&config.store, true).await.unwrap();
    let metrics = Arc::new(Metrics::default());
    let database = store.database_id().await.unwrap();
    let (spill, file) = Spill::new(1 << 20, Arc::clone(&config.store.keys), Arc::clone(&metrics));
    file.on(Box::new(disk), database).unwrap();
    let lease = lease::none();
    lease::begin(store.as_ref(), config.store.lease, &lease).await.unwrap();
    let upstream = |settings| Arc::new(Upstream::new(settings).unwrap());
    let parts = gateway::Parts {
        tokens: None,
        servers: std::collections::HashMap::new(),
        routes: config.routes,
        upstreams: config.upstreams.into_iter().map(|(name, s)| (name, upstream(s))).collect(),
        lease,
        store,
        may_mark_dead: Arc::new(|| false),
        spill,
        digest: DigestKey::from_bytes(&[1; 32]),
        metrics,
        wake: Arc::new(Notify::new()),
        backlog: oncegate::store::Backlog::default(),
    };
    let gateway = gateway::Gateway::new(config.gateway, parts).unwrap();
    let listener = Listener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let (settings, stop) = (config.server.accept, CancellationToken::new());
    tokio::spawn(accept::serve(listener, settings, Serve(gateway), stop, PATIENCE));
    addr
}

#[tokio::test(flavor = "multi_thread")]
async fn the_caller_is_answered_only_after_the_outcome_is_durable() {
    let (orders, place) = (Orders::start().await, Place::new(Which::Postgres).await);
    let (fault, url) = Fault::before_postgres(&place.url, Cluster::shared().port()).await;
    let toml = rig::config(&place, &orders.url(), "").replace(&place.url, &url);
    let path = process::config(place.folder.path(), &toml);
    let (config, _) = Config::load(Some(&path), [], None).unwrap();
    let waits = Arc::new(AtomicBool::new(false));
    let ((reached, reaches), (open, gate)) = (mpsc::channel(), mpsc::channel());
    let disk = SlowDisk { waits: Arc::clone(&waits), reached, gate };
    let addr = inside(config, disk).await;

    waits.store(true, Ordering::SeqCst);
    orders.hold();
    let mut first = sending(order("k"), addr);
    orders.asked(1).await;
    fault.refuse();
    fault.cut();
    orders.go();
    tokio::task::block_in_place(|| reaches.recv_timeout(PATIENCE)).expect("the entry is synced");
    let early = tokio::time::timeout(Duration::from_millis(300), &mut first).await;
    assert!(early.is_err(), "nothing is said while the disk works: {early:?}");
    waits.store(false, Ordering::SeqCst);
    open.send(()).unwrap();
    assert_kept(&first.await.unwrap());
}

/// Keeps completions from their end, but no reservations, until it is opened.
struct Barrier {
    client: tokio_postgres::Client,
    driver: tokio::task::JoinHandle<()>,
}

impl Barrier {
    async fn close(place: &Place) -> Self {
        let (client, connection) =
            tokio_postgres::connect(&place.url, tokio_postgres::NoTls).await.unwrap();
        let driver = tokio::spawn(async move { drop(connection.await) });
        client
            .batch_execute("BEGIN; LOCK TABLE outbox_messages IN ACCESS EXCLUSIVE MODE")
            .await
            .unwrap();
        Self { client, driver }
    }

    async fn open(self) {
        self.client.batch_execute("ROLLBACK").await.unwrap();
        drop(self.client);
        self.driver.await.unwrap();
    }
}

/// Completions that wait at the barrier.
const WAITING: &str = "from pg_stat_activity where datname = current_database()
    and query like '-- complete%' and wait_event_type = 'Lock'";

#[tokio::test(flavor = "multi_thread")]
async fn while_the_spill_is_full_nothing_new_is_reserved_and_what_is_stored_is_replayed() {
    let (orders, place) = (Orders::start().await, Place::new(Which::Postgres).await);
    // Without a memory of answers, a replay has to ask the database.
    let store = "completion_timeout = \"200ms\"\nspill = { max_size = \"64KiB\" }\ncache_bytes = 0";
    let toml = rig::config_at(&place, &orders.url(), "127.0.0.1:0", store, "", "");
    let gateway = Gateway::start(&process::config(place.folder.path(), &toml));
    orders.answer(|_| {
        Response::builder().status(201).body(Full::new(vec![b'x'; 24_000].into())).unwrap()
    });
    let before = order("before").to(gateway.addr).await;
    assert!(before.header("oncegate-expires").is_some());
    let barrier = Barrier::close(&place).await;
    assert_kept(&order("k-0").to(gateway.addr).await);
    assert_kept(&order("k-1").to(gateway.addr).await);
    let third = order("k-2").to(gateway.addr).await;
    assert_eq!(third.status, StatusCode::CREATED);
    assert_eq!(third.header("oncegate-stored"), Some("false"), "it has no room");
    assert_eq!(metric(gateway.admin, "oncegate_spill_turned_away_total").await, 1);

    let refused = order("k-3").to(gateway.addr).await;
    assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(refused.problem(), "store-unavailable");
    assert_eq!(metric(gateway.admin, "oncegate_spill_refused_total").await, 1);
    assert_eq!(orders.runs_of("k-3"), 0);
    said(&gateway, "no reservation is made while the spill is full").await;
    let replay = order("before").to(gateway.addr).await;
    assert!(replay.replayed());
    assert_eq!(replay.body, before.body);

    barrier.open().await;
    let completed = "select count(*) from idempotency_records where status = 'completed'";
    eventually("all are written", async || place.count(completed).await == 4).await;
    eventually("it reserves again", async || {
        order("k-3").to(gateway.addr).await.status == StatusCode::CREATED
    })
    .await;
    assert_eq!(orders.runs(), 5);
    eventually("nothing is left in the spill", async || {
        metric(gateway.admin, "oncegate_spill_bytes").await == 0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outcome_that_waits_for_the_database_at_the_end_of_the_process_goes_to_the_spill() {
    let (orders, place) = (Orders::start().await, Place::new(Which::Postgres).await);
    let store = "completion_timeout = \"60s\"\ntimeout = \"60s\"";
    let toml = rig::config_at(&place, &orders.url(), "127.0.0.1:0", store, "", TWO_EVENTS)
        .replace("shutdown_grace = \"10s\"", "shutdown_grace = \"500ms\"");
    let mut gateway = Gateway::start(&process::config(place.folder.path(), &toml));
    let barrier = Barrier::close(&place).await;
    let to = gateway.addr;
    let first = tokio::spawn(async move { order("k").send(to).await });
    let waiting = format!("select count(*) {WAITING}");
    eventually("it is being completed", async || place.count(&waiting).await == 1).await;
    gateway.terminate();
    assert!(tokio::task::block_in_place(|| gateway.exited()).success());
    drop(first.await.unwrap());
    // What the dead process sent must not commit by itself.
    place.rows(&format!("select pg_terminate_backend(pid) {WAITING}")).await;
    eventually("its backend is gone", async || place.count(&waiting).await == 0).await;
    barrier.open().await;
    assert_eq!(place.status_of("k").await.as_deref(), Some("in_progress"), "it was not written");

    let gateway = tokio::task::block_in_place(|| gateway.restart());
    assert_eq!(place.status_of("k").await.as_deref(), Some("completed"));
    assert_eq!(place.events().await, 2);
    assert!(order("k").to(gateway.addr).await.replayed());
    assert_eq!(orders.runs(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_spill_is_never_drained_into_another_database() {
    let mut cut = Cut::start("").await;
    assert_kept(&cut.outcomes_without_a_database(&["k"]).await[0]);
    cut.gateway.kill9();
    let config = cut.gateway.config.clone();

    let other = Place::new(Which::Postgres).await;
    let toml = rig::config(&other, &cut.orders.url(), "");
    let beside = process::config(cut.place.folder.path(), &toml);
    let gateway = tokio::task::block_in_place(|| Gateway::start(&beside));
    said(&gateway, "it holds 1 outcomes of another database").await;
    assert_eq!(metric(gateway.admin, "oncegate_spill_left_files").await, 1);
    assert_eq!(order("k").to(gateway.addr).await.status, StatusCode::CREATED, "it serves");
    assert_eq!(files(&cut.folder(), "spill").len(), 2, "the other's file, and its own");
    assert_eq!((other.records().await, other.events().await), (1, 1), "its own");

    cut.fault.pass();
    cut.gateway = tokio::task::block_in_place(|| Gateway::start(&config));
    assert!(cut.is_completed("k").await);
    assert_eq!(metric(cut.gateway.admin, "oncegate_spill_left_files").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_place_for_its_spill_nothing_starts() {
    let (orders, place) = (Orders::start().await, Place::new(Which::Sqlite).await);
    let file = place.folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let store = format!("spill = {{ dir = \"{}/spill\" }}", file.display());
    let toml = rig::config_at(&place, &orders.url(), "127.0.0.1:0", &store, "", "");
    let config = process::config(place.folder.path(), &toml);
    let (code, out, errors) = process::run(&["check", "--config", config.to_str().unwrap()]);
    assert_eq!(code, 2, "{out}{errors}");
    assert!(errors.contains("store.spill.dir: cannot keep outcomes in "), "{errors}");
    let refused = tokio::task::block_in_place(|| Gateway::try_start(&config)).err().unwrap();
    assert!(refused.contains("cannot keep outcomes in "), "{refused}");
    assert!(refused.contains("name another folder in store.spill.dir"), "{refused}");

    std::fs::remove_file(&file).unwrap();
    let (code, out, errors) = process::run(&["check", "--config", config.to_str().unwrap()]);
    assert_eq!(code, 0, "{out}{errors}");
    assert!(!file.exists(), "a check leaves nothing behind");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outcome_that_was_committed_unseen_is_drained_without_a_second_event() {
    let mut cut = Cut::start("completion_timeout = \"300ms\"").await;
    // From here on there is a connection for completions.
    assert_eq!(order("before").to(cut.gateway.addr).await.status, StatusCode::CREATED);
    cut.orders.hold();
    let first = sending(order("k"), cut.gateway.addr);
    cut.orders.asked(2).await;
    cut.fault.swallow_the_answer_to("-- complete");
    cut.fault.refuse();
    cut.orders.go();
    let first = first.await.unwrap();
    assert_kept(&first);
    eventually("the database has it", async || cut.is_completed("k").await).await;
    assert_eq!(metric(cut.gateway.admin, "oncegate_spill_entries").await, 1, "and nobody knows");
    cut.killed_and_started();
    assert_eq!(drained(cut.gateway.admin, "already").await, 1);
    assert_eq!(cut.place.events().await, 4);
    let replay = order("k").to(cut.gateway.addr).await;
    assert_eq!((replay.record(), &replay.body), (first.record(), &first.body));
    assert_eq!(cut.orders.runs(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_living_process_tells_that_an_outcome_was_committed_unseen() {
    let cut = Cut::start("completion_timeout = \"300ms\"").await;
    // From here on there is a connection for completions.
    assert_eq!(order("before").to(cut.gateway.addr).await.status, StatusCode::CREATED);
    cut.orders.hold();
    let first = sending(order("k"), cut.gateway.addr);
    cut.orders.asked(2).await;
    cut.fault.swallow_the_answer_to("-- complete");
    cut.fault.refuse();
    cut.orders.go();
    assert_kept(&first.await.unwrap());
    eventually("the database has it", async || cut.is_completed("k").await).await;
    cut.fault.cut();
    cut.fault.pass();
    let admin = cut.gateway.admin;
    eventually("it is found", async || drained(admin, "already").await == 1).await;
    assert_eq!(drained(admin, "completed").await, 0);
    assert_eq!(cut.late_outcomes().await, 0, "it is what stands");
    assert_eq!(cut.place.events().await, 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outcome_whose_attempt_has_another_answer_by_now_is_audited() {
    for dies in [false, true] {
        let mut cut = Cut::start("").await;
        assert_kept(&cut.outcomes_without_a_database(&["k"]).await[0]);
        if dies {
            cut.gateway.kill9();
        }
        let by_the_application =
            "select oncegate_complete(id, attempt, 202, 'text/plain', 'own')::text
            from idempotency_records where key = 'k'";
        cut.place.rows(by_the_application).await;
        if dies {
            cut.killed_and_started();
        } else {
            cut.fault.pass();
        }
        let admin = cut.gateway.admin;
        eventually("it is paid", async || drained(admin, "fenced_off").await == 1).await;
        assert_eq!((drained(admin, "already").await, drained(admin, "completed").await), (0, 0));
        assert_eq!(metric(admin, "oncegate_late_outcomes_total").await, 1);
        assert_eq!(cut.late_outcomes().await, 1);
        let replay = order("k").to(cut.gateway.addr).await;
        assert!(replay.replayed());
        assert_eq!((replay.status, &replay.body[..]), (StatusCode::ACCEPTED, &b"own"[..]));
        assert_eq!((cut.orders.runs(), cut.place.events().await), (1, 0));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn on_a_full_disk_a_start_drains_first_and_leaves_no_file_behind() {
    let mut cut = Cut::start("").await;
    let first = cut.outcomes_without_a_database(&["k"]).await.remove(0);
    assert_kept(&first);
    cut.gateway.kill9();
    cut.fault.pass();
    // No file can grow: what a full disk does. The signal for it would end the process; without it, the write fails.
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' XFSZ; ulimit -f 0; exec \"$@\"", "sh"]);
    command.arg(env!("CARGO_BIN_EXE_oncegate")).args(["serve", "--config"]);
    command.arg(&cut.gateway.config);
    let start = || Gateway::launch(command, &cut.gateway.config).err();
    let refused = tokio::task::block_in_place(start).expect("it has no room of its own");
    assert!(refused.contains("cannot keep outcomes in "), "{refused}");
    assert!(cut.is_completed("k").await, "what was there is drained");
    assert_eq!(files(&cut.folder(), "spill"), [] as [PathBuf; 0], "and its room is free");
    cut.gateway = tokio::task::block_in_place(|| cut.gateway.restart());
    let replay = order("k").to(cut.gateway.addr).await;
    assert!(replay.replayed() && replay.body == first.body);
    assert_eq!((cut.orders.runs(), cut.place.events().await), (1, 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outcome_whose_record_an_operator_released_changes_nothing_and_is_audited() {
    let mut cut = Cut::start("").await;
    let first = cut.outcomes_without_a_database(&["k"]).await.remove(0);
    cut.gateway.kill9();
    cut.fault.pass();
    let record = first.record();
    eventually("its owner's lease has run out", async || {
        command(&cut.gateway, &["records", "release", &record]).0 == 0
    })
    .await;
    cut.killed_and_started();
    assert_eq!(drained(cut.gateway.admin, "fenced_off").await, 1);
    assert_eq!(metric(cut.gateway.admin, "oncegate_late_outcomes_total").await, 1);
    let audited = format!(
        "select count(*) from audit_log where action = 'late_outcome' and record_id = '{record}'"
    );
    assert_eq!(cut.place.count(&audited).await, 1);
    assert_eq!((cut.place.records().await, cut.place.events().await), (0, 0));
    assert_eq!(files(&cut.folder(), "spill").len(), 1, "its own");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_entry_loses_itself_only_and_its_file_is_set_aside() {
    let mut cut = Cut::start("").await;
    // It lives on, and its file in the same folder is nobody else's.
    let _neighbour = tokio::task::block_in_place(|| cut.gateway.restart());
    let keys = ["a", "b", "c"];
    cut.outcomes_without_a_database(&keys).await.iter().for_each(assert_kept);
    cut.gateway.kill9();
    let length = |path: &PathBuf| std::fs::metadata(path).unwrap().len();
    let path = files(&cut.folder(), "spill").into_iter().max_by_key(length).unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    // In the middle of what the first entry holds.
    let location = bytes.windows(8).position(|bytes| bytes == b"location").unwrap();
    bytes[location] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    cut.killed_and_started();
    let mut completed = BTreeSet::new();
    for key in keys {
        if cut.is_completed(key).await {
            completed.insert(key);
        }
    }
    assert_eq!(completed.len(), 2, "{completed:?}");
    let aside = files(&cut.folder(), "aside");
    assert_eq!(std::fs::read(&aside[0]).unwrap(), bytes, "for whoever can read more of it");
    assert_eq!(files(&cut.folder(), "spill").len(), 2, "the neighbour's, and the new one's");
    assert_eq!(metric(cut.gateway.admin, "oncegate_spill_left_files").await, 1);
    said(&cut.gateway, "not all of a spill file").await;
    assert_eq!(cut.orders.runs(), 3);
}

/// Why the spill has a format of its own. A SQLite database in its place would be as durable; damage to it is what it takes
/// otherwise: these are SQLite's ways, and where they change, so may the decision.
mod if_it_were_a_database {
    use rusqlite::Connection;

    /// Outcomes that are kept one by one.
    const KEPT: usize = 20;

    /// A database of outcomes, each in a synced transaction of its own; `checkpoints`: and moved out of the log at once.
    /// What a process leaves that is killed then: the database, and its log.
    fn left(checkpoints: bool) -> [Vec<u8>; 2] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("spill.db");
        let db = Connection::open(&path).unwrap();
        db.execute_batch(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA wal_autocheckpoint = 0;
             CREATE TABLE ends (id INTEGER PRIMARY KEY, body BLOB NOT NULL)",
        )
        .unwrap();
        for number in 0..KEPT {
            let body = format!("outcome-{number:02}-").repeat(100);
            db.execute("INSERT INTO ends (body) VALUES (?1)", [body]).unwrap();
            if checkpoints {
                db.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(())).unwrap();
            }
        }
        [path, folder.path().join("spill.db-wal")].map(|path| std::fs::read(path).unwrap())
    }

    /// How many outcomes the next process can read, each asked for by itself; and what SQLite's own check says.
    fn found([database, log]: &[Vec<u8>; 2]) -> (usize, Option<String>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("spill.db");
        std::fs::write(&path, database).unwrap();
        std::fs::write(folder.path().join("spill.db-wal"), log).unwrap();
        let db = Connection::open(&path).unwrap();
        let read = |id: &usize| {
            let one = "SELECT length(body) FROM ends WHERE id = ?1";
            db.query_row(one, [i64::try_from(*id).unwrap()], |row| row.get::<_, i64>(0)).is_ok()
        };
        let check = db.query_row("PRAGMA integrity_check", [], |row| row.get(0)).ok();
        ((1..=KEPT).filter(read).count(), check)
    }

    fn at(bytes: &[u8], text: &str) -> usize {
        bytes.windows(text.len()).position(|window| window == text.as_bytes()).unwrap()
    }

    #[test]
    fn a_damaged_log_would_lose_all_that_follows_and_would_not_say_so() {
        let mut left = left(false);
        assert_eq!(found(&left).0, KEPT);
        let hit = at(&left[1], "outcome-05-");
        left[1][hit] ^= 1;
        // As if the outcomes from the damaged one on had never been kept.
        assert_eq!(found(&left), (5, Some("ok".to_owned())));
    }

    #[test]
    fn without_a_log_a_damaged_page_would_lose_what_is_beneath_it() {
        let mut left = left(true);
        assert_eq!(found(&left).0, KEPT);
        // The page that leads to those with the outcomes (file format, 1.6: of the type 5), found by its type.
        let page = 4096;
        let inner = (0..left[0].len()).step_by(page).find(|at| left[0][*at] == 5).unwrap();
        left[0][inner] ^= 1;
        assert_eq!(found(&left).0, 0, "one byte, all outcomes");
    }
}
