//! The database goes back behind what it has confirmed: a standby that lacked the last commits is promoted, or a copy is
//! restored. Whoever was told of an outcome looks after it: nobody learns of the loss from a caller, and nothing runs twice.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use bytes::Bytes;
use http::{Response, StatusCode};
use http_body_util::Full;
use oncegate::store::Records;
use oncegate::store::postgres::Postgres;

use crate::crash::{self, Clients, settle_and_judge};
use crate::postgres::settings;
use crate::support::client::{Answer, get};
use crate::support::fault::Fault;
use crate::support::fleet::{self, TWO_EVENTS, command, metric, order, sending};
use crate::support::orders::{Orders, created};
use crate::support::postgres::Cluster;
use crate::support::process::{self, Gateway, eventually};
use crate::support::rig::{self, Place, Rig, Which, on_both_stores};
use crate::support::sink::{OK, Sink};

on_both_stores! {
    what_is_in_progress_and_nobody_works_on_is_looked_after,
}

/// What became of outcomes that the database had forgotten.
async fn mended(gateway: &Gateway, result: &str) -> i64 {
    let name = format!("oncegate_store_went_back_total{{result=\"{result}\"}}");
    metric(gateway.admin, &name).await
}

async fn mended_are(gateway: &Gateway, result: &str, count: i64) {
    eventually(result, async || mended(gateway, result).await == count).await;
}

/// An API that says of some keys that it does not know whether it executed.
async fn api() -> Orders {
    let orders = Orders::start().await;
    orders.answer(|execution| {
        let unsure = execution.key().is_some_and(|key| key.starts_with("unsure"));
        let freed = execution.key() == Some("freed");
        let odd = |status| Response::builder().status(status).body(Full::<Bytes>::default());
        match (unsure, freed) {
            (true, _) => odd(502).unwrap(),
            (_, true) => odd(429).unwrap(),
            _ => created(execution),
        }
    });
    orders
}

/// A primary and a standby that nobody waits for, and the URL of a database that names both.
fn loose_pair() -> (Cluster, Cluster, String) {
    tokio::task::block_in_place(|| {
        let primary = Cluster::own();
        let database = primary.database();
        let standby = Cluster::standby_of(&primary);
        let both = format!("{},127.0.0.1:{}/", primary.port(), standby.port());
        let url = database.replace(&format!("{}/", primary.port()), &both);
        (primary, standby, format!("{url}?target_session_attrs=read-write"))
    })
}

/// From now on the standby gets nothing. It has so many records.
async fn cut_off_with(records: usize, primary: &Cluster, standby: &Cluster) {
    let count = "select count(*) from idempotency_records";
    let there = records.to_string();
    eventually("the standby has what was reserved", async || {
        tokio::task::block_in_place(|| standby.ask("test0", count)).as_ref() == Some(&there)
    })
    .await;
    cut_off(primary, standby).await;
}

/// From now on the standby gets nothing.
async fn cut_off(primary: &Cluster, standby: &Cluster) {
    tokio::task::block_in_place(|| standby.set("primary_conninfo = ''"));
    let fed = "select count(*) from pg_stat_replication";
    eventually("it gets no more", async || {
        tokio::task::block_in_place(|| primary.ask("postgres", fed)).as_deref() == Some("0")
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failover_that_loses_commits_under_load_runs_nothing_twice_that_is_remembered() {
    let (primary, standby, url) = loose_pair();
    let (place, (orders, sink)) = (Place::at(url), crash::api_and_sink().await);
    let gateway = crash::start(&crash::config(&place, &orders, &sink));
    let clients = Clients::start(&[gateway.addr]);
    eventually("there is work to lose", async || orders.runs() > 60).await;
    cut_off(&primary, &standby).await;
    let before = orders.runs();
    eventually("there is more of it", async || orders.runs() > before + 60).await;
    tokio::task::block_in_place(|| {
        primary.kill9();
        standby.promote();
    });
    let before = orders.runs();
    eventually("it serves again", async || orders.runs() > before + 60).await;
    let learned = clients.end().await;
    let all_mended = |log: &str| {
        let told = log.lines().rfind(|line| line.contains("the database went back: it did not"));
        told.is_some_and(|line| line.contains("left=0"))
    };
    eventually("all is mended", async || all_mended(&gateway.log())).await;
    assert!(mended(&gateway, "written_back").await > 30);
    assert_eq!(mended(&gateway, "overtaken").await, 0);
    // Whoever takes its place remembers nothing.
    let config = gateway.config.clone();
    eprintln!("--- output of the first gateway:\n{}", gateway.log());
    drop(gateway);
    let other = crash::start(&config);
    settle_and_judge(&orders, &place, &sink, &other, &learned).await;
}

/// Each key gets its first answer, from a process that remembers nothing.
async fn replays(gateway: &Gateway, orders: &Orders, answers: &BTreeMap<String, Answer>) {
    for (key, first) in answers {
        let again = order(key).to(gateway.addr).await;
        assert!(again.replayed(), "{key}: {again:?}");
        assert_eq!((again.status, &again.body), (first.status, &first.body), "{key}");
        assert_eq!(again.record(), first.record(), "{key}");
        assert_eq!(orders.runs_of(key), 1, "{key}");
    }
}

/// All events of these keys have arrived, each under one id with one body.
async fn announced(place: &Place, sink: &Sink, keys: impl Iterator<Item = &String>) {
    let owed = "select count(*) from outbox_events where status <> 'sent'";
    eventually("the outbox is drained", async || place.count(owed).await == 0).await;
    let mut bodies = BTreeMap::new();
    for delivery in sink.seen() {
        let body = bodies.entry(delivery.id()).or_insert_with(|| delivery.body.clone());
        assert_eq!(*body, delivery.body, "one id, one body");
    }
    let ids = |text: &str| text.replace('-', "").to_lowercase();
    let delivered: BTreeSet<_> = bodies.keys().map(|id| ids(id)).collect();
    let mut known = BTreeSet::new();
    for key in keys {
        let sql = format!("select id from outbox_events where idempotency_key = '{key}'");
        let rows = place.rows(&sql).await;
        assert_eq!(rows.len(), 2, "the events of {key}");
        known.extend(rows.iter().map(|row| ids(row[0].as_deref().unwrap())));
    }
    assert_eq!(delivered, known, "every event under its one id, and no other");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_failover_has_lost_is_told_and_made_good() {
    let (primary, standby, url) = loose_pair();
    let (place, orders) = (Place::at(url), api().await);
    let sink = Sink::start(|_, _| OK).await;
    let more = format!("{TWO_EVENTS}{}", fleet::sink(sink.port));
    let store = "lease = \"60s\"";
    let toml = rig::config_at(&place, &orders.url(), "127.0.0.1:0", store, "", &more);
    let config = process::config(place.folder.path(), &toml);
    let gateway = tokio::task::block_in_place(|| Gateway::start(&config));
    let mut answers = BTreeMap::new();
    answers.insert("before".to_owned(), order("before").to(gateway.addr).await);

    // Reserved before the standby was cut off, ended after it.
    orders.hold();
    let half = sending(order("half"), gateway.addr);
    let unsure = sending(order("unsure-half"), gateway.addr);
    orders.asked(3).await;
    cut_off_with(3, &primary, &standby).await;
    orders.go();
    answers.insert("half".to_owned(), half.await.unwrap());
    assert_eq!(unsure.await.unwrap().status, StatusCode::BAD_GATEWAY);
    // The standby knows nothing of these.
    for n in 0..3 {
        let key = format!("gone-{n}");
        answers.insert(key.clone(), order(&key).to(gateway.addr).await);
    }
    assert_eq!(order("unsure-gone").to(gateway.addr).await.status, StatusCode::BAD_GATEWAY);
    orders.hold();
    let running = sending(order("running"), gateway.addr);
    orders.asked(8).await;
    assert_eq!(place.records().await, 8);
    tokio::task::block_in_place(|| {
        primary.kill9();
        standby.promote();
    });

    mended_are(&gateway, "reservation", 1).await;
    mended_are(&gateway, "written_back", 3).await;
    mended_are(&gateway, "completed_again", 1).await;
    mended_are(&gateway, "unknown", 2).await;
    assert_eq!(mended(&gateway, "overtaken").await, 0);
    gateway.says("the database went back");
    let open = "select key from idempotency_records where status = 'in_progress'";
    assert_eq!(place.rows(open).await, [[Some("running".to_owned())]]);
    orders.go();
    answers.insert("running".to_owned(), running.await.unwrap());
    assert_eq!(get("/readyz").to(gateway.admin).await.status, StatusCode::OK);

    assert!(answers.values().all(|answer| answer.status == StatusCode::CREATED), "{answers:?}");
    assert!(answers.values().all(|answer| answer.header("oncegate-stored").is_none()));
    let other = tokio::task::block_in_place(|| Gateway::start(&config));
    replays(&other, &orders, &answers).await;
    announced(&place, &sink, answers.keys()).await;
    for key in ["unsure-half", "unsure-gone"] {
        let again = order(key).to(other.addr).await;
        assert_eq!(again.problem(), "outcome-unknown", "{key}");
        let released = command(&other, &["records", "release", &again.record()]);
        assert_eq!(released.0, 0, "nothing is stuck: {}", released.2);
        assert_eq!(orders.runs_of(key), 1, "{key}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_whose_reservation_a_failover_has_lost_is_kept_when_it_ends() {
    let (primary, standby, url) = loose_pair();
    let (place, orders) = (Place::at(url), api().await);
    let toml = rig::config_at(&place, &orders.url(), "127.0.0.1:0", "lease = \"60s\"", "", "");
    let config = process::config(place.folder.path(), &toml);
    let gateway = tokio::task::block_in_place(|| Gateway::start(&config));
    let first = order("before").to(gateway.addr).await;
    assert_eq!(first.status, StatusCode::CREATED);
    cut_off_with(1, &primary, &standby).await;
    orders.hold();
    let running: Vec<_> = ["one", "unsure"].map(|key| sending(order(key), gateway.addr)).into();
    orders.asked(3).await;
    // They end while there is no primary, so that the end is the first word to the new one.
    tokio::task::block_in_place(|| primary.kill9());
    orders.go();
    let mut ended = Vec::new();
    for running in running {
        ended.push(running.await.unwrap());
    }
    assert_eq!(ended[0].status, StatusCode::CREATED);
    assert_eq!(ended[1].status, StatusCode::BAD_GATEWAY);
    tokio::task::block_in_place(|| standby.promote());
    let count = "select count(*) from idempotency_records where status <> 'in_progress'";
    eventually("all three have their end", async || place.count(count).await == 3).await;
    mended_are(&gateway, "reservation", 2).await;
    assert_eq!(metric(gateway.admin, "oncegate_late_outcomes_total").await, 0);
    let other = tokio::task::block_in_place(|| Gateway::start(&config));
    let answers =
        BTreeMap::from([("before".to_owned(), first), ("one".to_owned(), ended.remove(0))]);
    replays(&other, &orders, &answers).await;
    assert_eq!(order("unsure").to(other.addr).await.problem(), "outcome-unknown");
    assert_eq!(orders.runs(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_begun_anew_after_a_failover_is_told_of() {
    let (primary, standby, url) = loose_pair();
    let (place, orders) = (Place::at(url), api().await);
    let toml = rig::config_at(&place, &orders.url(), "127.0.0.1:0", "lease = \"60s\"", "", "");
    let config = process::config(place.folder.path(), &toml);
    let (gateway, other) =
        tokio::task::block_in_place(|| (Gateway::start(&config), Gateway::start(&config)));
    assert_eq!(order("before").to(gateway.addr).await.status, StatusCode::CREATED);
    cut_off_with(1, &primary, &standby).await;
    let first = order("k").to(gateway.addr).await;
    // The one who knows does not come to look before somebody else has begun.
    gateway.signal("STOP");
    tokio::task::block_in_place(|| {
        primary.kill9();
        standby.promote();
    });
    eventually("another replica serves", async || {
        order("k").to(other.addr).await.status == StatusCode::CREATED
    })
    .await;
    assert_eq!(orders.runs_of("k"), 2, "this is what is told");
    gateway.signal("CONT");
    mended_are(&gateway, "overtaken", 1).await;
    gateway.says("it may have been executed twice");
    let stands = order("k").to(other.addr).await;
    assert_ne!(stands.record(), first.record());
    let kept = place.rows("select id::text from idempotency_records where key = 'k'").await;
    assert_eq!(kept, [[Some(stands.record())]], "the other's record is left alone");
    let noted = format!(
        "select count(*) from audit_log where action = 'late_outcome' and record_id = '{}'",
        first.record()
    );
    assert_eq!(place.count(&noted).await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_was_restarted_has_another_life_and_what_it_knows_is_left_alone() {
    let cluster = tokio::task::block_in_place(Cluster::own);
    let place = Place::at(cluster.database());
    let store = Postgres::open(settings(&place.url)).await.unwrap();
    let life = store.incarnation().await.unwrap();
    assert_eq!(store.incarnation().await.unwrap(), life);
    let orders = api().await;
    let policy = "timeout = \"2s\"";
    let toml = rig::config_at(&place, &orders.url(), "127.0.0.1:0", "lease = \"60s\"", policy, "");
    let config = process::config(place.folder.path(), &toml);
    let gateway = tokio::task::block_in_place(|| Gateway::start(&config));
    // Unknown at first; its late answer frees it.
    orders.hold();
    assert_eq!(order("freed").to(gateway.addr).await.problem(), "upstream-timeout");
    orders.go();
    eventually("it is free", async || place.status_of("freed").await.is_none()).await;
    for key in ["a", "unsure", "released", "anew"] {
        order(key).to(gateway.addr).await;
    }
    for key in ["released", "anew"] {
        let gone = order(key).to(gateway.addr).await.record();
        let released = command(&gateway, &["records", "release", &gone, "--completed"]);
        assert_eq!(released.0, 0, "{}", released.2);
    }
    eventually("an operator's word counts", async || {
        !order("anew").to(gateway.addr).await.replayed()
    })
    .await;
    assert_eq!(orders.runs_of("anew"), 2);
    tokio::task::block_in_place(|| {
        cluster.kill9();
        cluster.start();
    });
    eventually("it has another life", async || {
        store.incarnation().await.is_ok_and(|now| now != life)
    })
    .await;
    eventually("it is looked at", async || {
        gateway.log().contains("knows all that it had confirmed")
    })
    .await;
    for result in ["reservation", "written_back", "completed_again", "unknown", "overtaken"] {
        assert_eq!(mended(&gateway, result).await, 0, "{result}");
    }
    assert_eq!(place.status_of("released").await, None, "an operator forgot it");
    assert_eq!(place.status_of("freed").await, None, "it did not execute");
}

/// That nobody knows is owed to the database still, when a late answer says that it did not execute: first the row goes,
/// then what was owed finds none.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_a_late_answer_freed_while_its_end_was_owed_stays_free() {
    let (orders, place) = (Orders::start().await, Place::new(Which::Postgres).await);
    let (fault, url) = Fault::before_postgres(&place.url, Cluster::shared().port()).await;
    let policy = "timeout = \"500ms\"";
    let toml = rig::config_at(&place, &orders.url(), "127.0.0.1:0", "lease = \"60s\"", policy, "");
    let config = process::config(place.folder.path(), &toml.replace(&place.url, &url));
    let go = place.folder.path().join("go");
    let held = format!("settling=pause:{}", go.display());
    let gateway = tokio::task::block_in_place(|| Gateway::with_fault(&config, &held));
    orders.answer_status(429);
    orders.hold();
    let first = sending(order("k"), gateway.addr);
    orders.asked(1).await;
    fault.refuse();
    fault.cut();
    assert_eq!(first.await.unwrap().problem(), "upstream-timeout");
    eventually("it is owed", async || go.with_extension("reached").exists()).await;
    fault.pass();
    orders.go();
    eventually("it is free", async || place.status_of("k").await.is_none()).await;
    std::fs::write(&go, "").unwrap();
    let owed = async || metric(gateway.admin, "oncegate_settling").await;
    eventually("nothing is owed", async || owed().await == 0).await;
    assert_eq!(place.status_of("k").await, None, "it did not execute");
    assert_eq!(mended(&gateway, "reservation").await, 0);
    orders.answer_created();
    assert_eq!(order("k").to(gateway.addr).await.status, StatusCode::CREATED);
}

/// Removed by hand here, as it would be if somebody else had completed it while this process slept, and its time was over.
#[tokio::test(flavor = "multi_thread")]
async fn a_reservation_that_may_have_expired_is_not_brought_back() {
    let rig = Rig::with(Which::Postgres, "", "retention = \"10m\"", "").await;
    rig.orders.hold();
    let first = sending(order("k"), rig.gateway.addr);
    rig.orders.asked(1).await;
    let gone = "delete from idempotency_records where key = 'k' returning id";
    assert_eq!(rig.place.rows(gone).await.len(), 1);
    rig.orders.go();
    let first = first.await.unwrap();
    assert_eq!(
        (first.status, first.header("oncegate-stored")),
        (StatusCode::CREATED, Some("false"))
    );
    assert_eq!(mended(&rig.gateway, "reservation").await, 0);
    assert_eq!(rig.place.status_of("k").await, None);
    let noted = "select count(*) from audit_log where action = 'late_outcome'";
    assert_eq!(rig.place.count(noted).await, 1, "what it came to is kept");
}

/// Rows are put back by hand, as nothing that is known of could do it.
async fn what_is_in_progress_and_nobody_works_on_is_looked_after(which: Which) {
    let rig = Rig::with(which, "lease = \"60s\"", "wait = \"100ms\"", "").await;
    let first = order("known").to(rig.gateway.addr).await;
    assert_eq!(first.status, StatusCode::CREATED);
    rig.orders.hold();
    let running = sending(order("running"), rig.gateway.addr);
    rig.orders.asked(2).await;
    // Under the owner of a record that is in progress here.
    rig.place
        .rows(
            "insert into idempotency_records (id, tenant_id, operation, key, request_hash, raw_hash, \
             recipe, status, attempt, owner, created_at, retention) \
             select '00000000-0000-4000-8000-000000000001', tenant_id, operation, 'stray', \
             request_hash, raw_hash, recipe, 'in_progress', 1, owner, created_at, retention \
             from idempotency_records where key = 'running'",
        )
        .await;
    rig.place
        .rows(
            "update idempotency_records set status = 'in_progress', completed_at = null, \
             expires_at = null, response_status = null, response_headers = null, \
             response_body = null where key = 'known'",
        )
        .await;
    mended_are(&rig.gateway, "unknown", 1).await;
    mended_are(&rig.gateway, "completed_again", 1).await;
    assert_eq!(rig.place.status_of("stray").await.as_deref(), Some("unknown"));
    assert_eq!(rig.place.status_of("running").await.as_deref(), Some("in_progress"));
    let stray = "00000000-0000-4000-8000-000000000001";
    let released = command(&rig.gateway, &["records", "release", stray]);
    assert_eq!(released.0, 0, "nothing is stuck: {}", released.2);
    rig.orders.go();
    assert_eq!(running.await.unwrap().status, StatusCode::CREATED);
    let kept = rig.place.rows("select response_status from idempotency_records order by key").await;
    assert_eq!(kept, [[Some("201".to_owned())], [Some("201".to_owned())]]);
    assert_eq!(rig.orders.runs(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_that_is_restored_beneath_the_process_gets_back_what_it_lacks() {
    let rig = Rig::with(Which::Sqlite, "lease = \"60s\"", "", "").await;
    let folder = rig.place.folder.path();
    let before = order("before").to(rig.gateway.addr).await;
    let restore = |from: &str, to: &str| {
        const SCRIPT: &str = "import sqlite3, sys
source, target = (sqlite3.connect(path, timeout=30) for path in sys.argv[1:])
source.backup(target)";
        let python = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/python/bin/python");
        let mut python = Command::new(python);
        python.args(["-c", SCRIPT]).args([folder.join(from), folder.join(to)]);
        let done = tokio::task::block_in_place(|| python.output());
        let done = done.expect("tests/all.sh makes target/python");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    };
    restore("oncegate.db", "copy.db");
    let after = order("after").to(rig.gateway.addr).await;
    assert_eq!((before.status, after.status), (StatusCode::CREATED, StatusCode::CREATED));
    restore("copy.db", "oncegate.db");
    mended_are(&rig.gateway, "written_back", 1).await;
    rig.gateway.says("the database went back");
    let mut gateway = rig.gateway;
    gateway.kill9();
    let gateway = gateway.restart();
    let answers = BTreeMap::from([("before".to_owned(), before), ("after".to_owned(), after)]);
    replays(&gateway, &rig.orders, &answers).await;
}
