//! Postgres as administrators set it up and as it is on a bad day: short time-outs, strict isolation, backends that are
//! ended, restarts, no connection left, read-only.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use http::StatusCode;
use tokio_postgres::{Client, NoTls};

use crate::crash::{Clients, api_and_sink, config, settle_and_judge, start};
use crate::support::client::{Answer, get};
use crate::support::fleet::{order, replicas, sending};
use crate::support::orders::Orders;
use crate::support::postgres::Cluster;
use crate::support::process::{Gateway, eventually};
use crate::support::rig::Place;
use crate::support::sink::Sink;

fn cluster(settings: &[&str]) -> Cluster {
    tokio::task::block_in_place(|| Cluster::with(settings))
}

/// A cluster of its own, with two gateways on a database of it.
struct Fleet {
    cluster: Cluster,
    place: Place,
    orders: Orders,
    sink: Sink,
    gateways: Vec<Gateway>,
}

impl Fleet {
    async fn start() -> Self {
        let cluster = cluster(&[]);
        let place = Place::at(tokio::task::block_in_place(|| cluster.database()));
        let (orders, sink) = api_and_sink().await;
        let gateways = (0..2).map(|_| start(&config(&place, &orders, &sink))).collect();
        Self { cluster, place, orders, sink, gateways }
    }

    fn clients(&self) -> Clients {
        Clients::start(&[self.gateways[0].addr, self.gateways[1].addr])
    }

    /// Waits until so many more requests have been executed.
    async fn works(&self, more: usize) {
        let before = self.orders.runs();
        eventually("it works", async || self.orders.runs() >= before + more).await;
    }

    async fn settle_and_judge(&self, clients: Clients) {
        let learned = clients.end().await;
        let Self { orders, place, sink, gateways, .. } = self;
        settle_and_judge(orders, place, sink, &gateways[0], &learned).await;
    }
}

async fn connect(url: &str) -> Result<Client, tokio_postgres::Error> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

async fn ready(gateway: &Gateway) -> bool {
    get("/readyz").to(gateway.admin).await.status == StatusCode::OK
}

fn assert_refused(answer: &Answer) {
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{answer:?}");
    assert_eq!(answer.problem(), "store-unavailable");
    assert!(answer.header("retry-after").is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_administrators_short_timeouts_break_no_promise() {
    let fleet = Fleet::start().await;
    let clients = fleet.clients();
    fleet.works(20).await;
    tokio::task::block_in_place(|| {
        fleet.cluster.set("statement_timeout = '150ms'");
        fleet.cluster.set("lock_timeout = '20ms'");
        fleet.cluster.set("idle_in_transaction_session_timeout = '50ms'");
    });
    // Somebody who locks whole tables for longer than any of these.
    let locker = connect(&fleet.place.url).await.unwrap();
    locker
        .batch_execute(
            "SET statement_timeout = 0; SET lock_timeout = 0; \
                          SET idle_in_transaction_session_timeout = 0",
        )
        .await
        .unwrap();
    for table in ["idempotency_records", "outbox_queue", "outbox_messages", "oncegate_owners"] {
        let hold =
            format!("BEGIN; LOCK TABLE {table} IN EXCLUSIVE MODE; SELECT pg_sleep(0.3); COMMIT");
        locker.batch_execute(&hold).await.unwrap();
        fleet.works(20).await;
    }
    fleet.settle_and_judge(clients).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_serializable_by_default_works_as_any_other() {
    let cluster = cluster(&["default_transaction_isolation=serializable"]);
    let place = Place::at(tokio::task::block_in_place(|| cluster.database()));
    let (orders, sink) = api_and_sink().await;
    let gateways: Vec<_> = (0..2).map(|_| start(&config(&place, &orders, &sink))).collect();
    let clients = Clients::start(&[gateways[0].addr, gateways[1].addr]);
    for round in 0..5 {
        let key = format!("shared-{round}");
        let all = (0..20).map(|n| sending(order(&key), gateways[n % 2].addr));
        for answer in join_all(all.collect::<Vec<_>>()).await {
            let answer = answer.unwrap();
            let fine = answer.status == StatusCode::CREATED || answer.problem() == "in-progress";
            assert!(fine, "{answer:?}");
        }
        assert_eq!(orders.runs_of(&key), 1);
        eventually("it is kept", async || order(&key).to(gateways[1].addr).await.replayed()).await;
    }
    let mut learned = clients.end().await;
    for round in 0..5 {
        let key = format!("shared-{round}");
        let answer = order(&key).to(gateways[0].addr).await;
        learned.insert(key, vec![answer]);
    }
    settle_and_judge(&orders, &place, &sink, &gateways[0], &learned).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn backends_that_are_ended_by_an_administrator_break_no_promise() {
    let fleet = Fleet::start().await;
    let clients = fleet.clients();
    let admin = connect(&fleet.cluster.url("postgres")).await.unwrap();
    for _ in 0..15 {
        fleet.works(8).await;
        let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'oncegate'";
        assert!(!admin.query(end, &[]).await.unwrap().is_empty(), "there was something to end");
    }
    fleet.settle_and_judge(clients).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn restarts_of_the_server_under_load_break_no_promise() {
    let fleet = Fleet::start().await;
    let clients = fleet.clients();
    for stop in [Cluster::stop_at_once, Cluster::stop, Cluster::stop_at_once] {
        fleet.works(20).await;
        tokio::task::block_in_place(|| {
            stop(&fleet.cluster);
            fleet.cluster.start();
        });
    }
    fleet.works(20).await;
    fleet.settle_and_judge(clients).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_connection_left_on_the_server_nothing_is_executed_until_there_is_one() {
    let cluster = cluster(&["max_connections=20", "superuser_reserved_connections=0"]);
    let place = Place::at(tokio::task::block_in_place(|| cluster.database()));
    let orders = Orders::start().await;
    let gateway = replicas(1, &place, &orders.url(), "", "").remove(0);
    assert_eq!(order("before").to(gateway.addr).await.status, StatusCode::CREATED);
    // All connections, those of the gateway included: ended, and taken before it has them back.
    let mut hogs = vec![connect(&place.url).await.unwrap()];
    while hogs.len() < 20 {
        match connect(&place.url).await {
            Ok(hog) => hogs.push(hog),
            Err(error) => {
                assert!(format!("{error:?}").contains("53300"), "{error:?}");
                let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'oncegate'";
                hogs[0].query(end, &[]).await.unwrap();
            }
        }
    }
    let begun = Instant::now();
    assert_refused(&order("k").to(gateway.addr).await);
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    assert!(!ready(&gateway).await);
    assert_eq!(orders.runs_of("k"), 0);
    assert!(order("before").to(gateway.addr).await.replayed(), "from memory");
    drop(hogs);
    eventually("it serves again", async || {
        order("k").to(gateway.addr).await.status == StatusCode::CREATED
    })
    .await;
    eventually("readiness tells", async || ready(&gateway).await).await;
    assert_eq!((orders.runs_of("k"), orders.runs_of("before")), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_only_reads_is_as_good_as_away() {
    let cluster = cluster(&[]);
    let place = Place::at(tokio::task::block_in_place(|| cluster.database()));
    let orders = Orders::start().await;
    let gateway = replicas(1, &place, &orders.url(), "", "").remove(0);
    assert_eq!(order("before").to(gateway.addr).await.status, StatusCode::CREATED);
    assert!(ready(&gateway).await);
    tokio::task::block_in_place(|| cluster.set("default_transaction_read_only = on"));
    eventually("readiness tells", async || !ready(&gateway).await).await;
    assert_refused(&order("k").to(gateway.addr).await);
    assert_eq!(orders.runs_of("k"), 0);
    assert!(order("before").to(gateway.addr).await.replayed());
    assert_eq!(get("/orders").to(gateway.addr).await.status, StatusCode::CREATED, "unprotected");
    gateway.says("the database is read-only");
    tokio::task::block_in_place(|| cluster.set("default_transaction_read_only = off"));
    eventually("it serves again", async || {
        order("k").to(gateway.addr).await.status == StatusCode::CREATED
    })
    .await;
    assert!(ready(&gateway).await);
    assert_eq!(orders.runs_of("k"), 1);
}

/// The pool has one connection, and that waits for a lock again and again.
#[tokio::test(flavor = "multi_thread")]
async fn a_pool_whose_connections_all_wait_for_locks_does_not_stop_first_requests() {
    let cluster = cluster(&[]);
    let place = Place::at(tokio::task::block_in_place(|| cluster.database()));
    let orders = Orders::start().await;
    let store = "lease = \"3s\"\nsweep_every = \"1h\"\nconnections = 3\nconnect_timeout = \"1s\"";
    let toml = crate::support::rig::config_at(
        &place,
        &orders.url(),
        "127.0.0.1:0",
        store,
        "on_unknown = \"retry\"",
        "",
    );
    let path = crate::support::process::config(place.folder.path(), &toml);
    let gateway = start(&path);
    orders.answer_status(502);
    assert_eq!(order("unknown").to(gateway.addr).await.status, StatusCode::BAD_GATEWAY);
    orders.answer_created();
    let locker = connect(&place.url).await.unwrap();
    locker.batch_execute("BEGIN; LOCK TABLE audit_log IN ACCESS EXCLUSIVE MODE").await.unwrap();
    let waits = "select count(*) from pg_stat_activity where application_name = 'oncegate' and wait_event_type = 'Lock'";
    eventually("the pool waits", async || place.count(waits).await == 1).await;
    for n in 0..10 {
        let first = order(&format!("k-{n}")).to(gateway.addr).await;
        assert_eq!(first.status, StatusCode::CREATED);
        assert_eq!(first.header("oncegate-stored"), None);
    }
    // What needs the pool is told so in time, and is not executed.
    let begun = Instant::now();
    assert_refused(&order("unknown").to(gateway.addr).await);
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    assert_eq!(orders.runs_of("unknown"), 1);
    locker.batch_execute("ROLLBACK").await.unwrap();
    eventually("the next attempt", async || {
        order("unknown").to(gateway.addr).await.status == StatusCode::CREATED
    })
    .await;
    assert_eq!(orders.runs_of("unknown"), 2);
}
