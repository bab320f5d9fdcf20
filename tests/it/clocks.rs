//! Time: leases and retentions are the database's, counted from when a statement acts and not from when it began to wait,
//! and the clocks of the replicas do not matter.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use http::StatusCode;
use oncegate::record::OwnerId;
use oncegate::store::postgres::Postgres;
use oncegate::store::{Heartbeat, Records};
use tokio_postgres::{Client, NoTls};

use crate::postgres::settings;
use crate::support::fleet::{order, replicas, sending};
use crate::support::orders::Orders;
use crate::support::postgres::Cluster;
use crate::support::process::{self, Gateway, eventually};
use crate::support::rig::{self, Place, Which};

async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

#[tokio::test(flavor = "multi_thread")]
async fn e1_a_lease_counts_from_after_a_wait_for_a_lock() {
    let url = tokio::task::block_in_place(|| Cluster::shared().database());
    let store = Postgres::open(settings(&url)).await.unwrap();
    store.migrate(true).await.unwrap();
    let owner = OwnerId::fresh();
    assert_eq!(store.heartbeat(owner, Duration::from_secs(60)).await.unwrap(), Heartbeat::Renewed);
    // Within a transaction one always sees the same activity: it is watched by another.
    let (other, watcher) = (connect(&url).await, connect(&url).await);
    other.batch_execute("BEGIN; SELECT FROM oncegate_owners FOR UPDATE").await.unwrap();
    let beat = async { store.heartbeat(owner, Duration::from_secs(2)).await.unwrap() };
    let hold = async {
        let waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' \
                     AND query_start < clock_timestamp() - interval '1 second' AND datname = current_database()";
        eventually("the heartbeat has waited for a second", async || {
            watcher.query_one(waits, &[]).await.unwrap().get::<_, i64>(0) == 1
        })
        .await;
        other.batch_execute("COMMIT").await.unwrap();
        let left = "SELECT extract(epoch FROM lease_until - clock_timestamp())::float8 FROM oncegate_owners";
        let ours = "SELECT count(*) FROM oncegate_owners WHERE lease_until < clock_timestamp() + interval '10 seconds'";
        eventually("it is renewed", async || {
            other.query_one(ours, &[]).await.unwrap().get::<_, i64>(0) == 1
        })
        .await;
        other.query_one(left, &[]).await.unwrap().get::<_, f64>(0)
    };
    let (beat, left) = tokio::join!(beat, hold);
    assert_eq!(beat, Heartbeat::Renewed);
    assert!(left > 1.2, "two seconds from before the wait would be one by now: {left}");
}

#[tokio::test(flavor = "multi_thread")]
async fn e1_a_reservation_that_waited_longer_than_a_lease_is_alive_and_runs_once() {
    let (orders, place) = (Orders::start().await, Place::new(Which::Postgres).await);
    let store =
        "lease = \"3s\"\nsweep_every = \"500ms\"\ntimeout = \"10s\"\nreserve_timeout = \"10s\"";
    let toml = rig::config_at(&place, &orders.url(), "127.0.0.1:0", store, "wait = \"500ms\"", "");
    let config = process::config(place.folder.path(), &toml);
    let gateways: Vec<_> = (0..2).map(|_| Gateway::start(&config)).collect();
    // Somebody else's insert under the same scope, not committed.
    let (other, watcher) = (connect(&place.url).await, connect(&place.url).await);
    other
        .batch_execute(
            "BEGIN; INSERT INTO idempotency_records (id, tenant_id, operation, key, request_hash, raw_hash,
                 recipe, status, attempt, owner, created_at)
             VALUES (gen_random_uuid(), 'acme', 'orders.create', 'k', '', '', '', 'in_progress', 1,
                     gen_random_uuid(), now())",
        )
        .await
        .unwrap();
    orders.hold();
    let first = sending(order("k"), gateways[0].addr);
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' \
                 AND query_start < clock_timestamp() - interval '3.5 seconds' AND datname = current_database()";
    eventually("it has waited for more than a lease", async || {
        watcher.query_one(waits, &[]).await.unwrap().get::<_, i64>(0) == 1
    })
    .await;
    other.batch_execute("ROLLBACK").await.unwrap();
    orders.asked(1).await;
    for gateway in &gateways {
        assert_eq!(order("k").to(gateway.addr).await.problem(), "in-progress");
    }
    orders.go();
    assert_eq!(first.await.unwrap().status, StatusCode::CREATED);
    assert!(order("k").to(gateways[1].addr).await.replayed());
    assert_eq!(orders.runs(), 1);
}

/// The library that gives a process another clock.
fn faketime() -> PathBuf {
    let folders = std::fs::read_dir("/usr/lib").expect("/usr/lib").flatten();
    let places = folders.map(|folder| folder.path().join("faketime/libfaketimeMT.so.1"));
    places
        .into_iter()
        .find(|place| place.is_file())
        .expect("the tests need libfaketime (package faketime): see tests/all.sh")
}

/// The same command, for a process whose wall clock is wrong by this much, `+10m` say. Its monotonic clock is right.
pub(crate) fn clock(mut command: Command, offset: &str) -> Command {
    command
        .env("LD_PRELOAD", faketime())
        .env("FAKETIME", offset)
        .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
        .env("DONT_FAKE_MONOTONIC", "1");
    command
}

fn gateway_at(offset: &str, config: &Path) -> Gateway {
    let command = clock(process::serve(config), offset);
    Gateway::launch(command, config).unwrap_or_else(|output| panic!("not started:\n{output}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn e3_replicas_whose_clocks_are_ten_minutes_off_run_a_key_once_and_keep_it_as_long() {
    let (orders, place) = (Orders::start().await, Place::new(Which::Postgres).await);
    let policy = "wait = \"300ms\"\nretention = \"5m\"";
    let right = replicas(1, &place, &orders.url(), policy, "").remove(0);
    let mut fast = gateway_at("+10m", &right.config);
    let slow = gateway_at("-10m", &right.config);
    for (gateway, off) in [(&fast, 600.0), (&slow, -600.0)] {
        let answer = order("").to(gateway.addr).await;
        let told = httpdate::parse_http_date(answer.header("date").expect("a date")).unwrap();
        let told = told.duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
        let now = place.rows("select extract(epoch from clock_timestamp())").await;
        let now: f64 = now[0][0].clone().unwrap().parse().unwrap();
        assert!((told - now - off).abs() < 60.0, "its clock is wrong by {}", told - now);
    }

    orders.hold();
    let first = sending(order("k"), fast.addr);
    orders.asked(1).await;
    for gateway in [&right, &fast, &slow] {
        let waits = order("k").to(gateway.addr).await;
        assert_eq!(waits.problem(), "in-progress");
        let after: u32 = waits.header("retry-after").expect("Retry-After").parse().unwrap();
        assert!((1..=30).contains(&after), "{after}");
    }
    orders.go();
    let first = first.await.unwrap();
    // To the one with the fast clock its retention is over, to the database it is not.
    for gateway in [&right, &slow, &fast.restart()] {
        let replay = order("k").to(gateway.addr).await;
        assert!(replay.replayed(), "{replay:?}");
        assert_eq!(replay.body, first.body);
    }
    let later = gateway_at("+10m", &right.config);
    assert!(order("k").to(later.addr).await.replayed());
    assert_eq!(orders.runs_of("k"), 1);

    // And the other way round: over by the database's clock, though not by that of a slow replica.
    place
        .rows("update idempotency_records set expires_at = clock_timestamp() - interval '1 second'")
        .await;
    let unaware = gateway_at("-10m", &right.config);
    let again = order("k").to(unaware.addr).await;
    assert!(!again.replayed() && again.record() != first.record(), "{again:?}");
    assert_eq!(orders.runs_of("k"), 2);

    // A dead one is judged by the database's clock, too.
    orders.hold();
    let dead = order("of a dead one");
    let lost = tokio::spawn({
        let (dead, to) = (dead.clone(), fast.addr);
        async move { dead.send(to).await }
    });
    orders.asked(3).await;
    fast.kill9();
    assert!(lost.await.unwrap().is_err());
    let ended = "select count(*) from oncegate_owners o join idempotency_records r on r.owner = o.owner \
                 where r.key = 'of a dead one' and o.lease_until <= clock_timestamp()";
    eventually("the others take it for lost", async || {
        let problem = dead.to(slow.addr).await.problem();
        let over = place.count(ended).await == 1;
        assert!(over || problem == "in-progress", "{problem} while its lease runs");
        problem == "outcome-unknown"
    })
    .await;
    orders.go();
}
