//! A primary and its standby: what was answered outlives the primary, nothing runs twice, and nobody restarts a gateway.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use http::StatusCode;
use oncegate::record::OwnerId;
use oncegate::store::postgres::{Postgres, Settings};
use oncegate::store::{Error, Heartbeat, Operators, Records, Reserved, Settled};

use crate::crash::{Clients, api_and_sink, config, settle_and_judge, start};
use crate::postgres::{completion, proposal, settings, soon};
use crate::support::client::get;
use crate::support::fleet::order;
use crate::support::postgres::Cluster;
use crate::support::process::eventually;
use crate::support::rig::Place;

/// A primary whose commits wait for its standby, and the URL of a database that names both and wants to write.
fn pair() -> (Cluster, Cluster, String) {
    tokio::task::block_in_place(|| {
        let primary = Cluster::own();
        let database = primary.database();
        let standby = Cluster::standby_of(&primary);
        primary.replicate_synchronously();
        let both = format!("{},127.0.0.1:{}/", primary.port(), standby.port());
        let url = database.replace(&format!("{}/", primary.port()), &both);
        (primary, standby, format!("{url}?target_session_attrs=read-write"))
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failover_under_load_loses_nothing_that_was_answered_and_runs_nothing_twice() {
    let (primary, standby, url) = pair();
    let (place, (orders, sink)) = (Place::at(url), api_and_sink().await);
    let gateways: Vec<_> = (0..2).map(|_| start(&config(&place, &orders, &sink))).collect();
    let clients = Clients::start(&[gateways[0].addr, gateways[1].addr]);
    eventually("there is work to disturb", async || orders.runs() > 60).await;
    tokio::task::block_in_place(|| {
        primary.kill9();
        standby.promote();
    });
    let before = orders.runs();
    eventually("both serve again", async || orders.runs() > before + 60).await;
    let learned = clients.end().await;
    for gateway in &gateways {
        assert_eq!(get("/readyz").to(gateway.admin).await.status, StatusCode::OK);
        assert!(!gateway.log().contains("went back"), "nothing was lost");
    }
    settle_and_judge(&orders, &place, &sink, &gateways[1], &learned).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_old_primary_that_only_reads_is_left_for_the_new_one() {
    let (primary, standby, url) = pair();
    let (place, (orders, sink)) = (Place::at(url), api_and_sink().await);
    let gateway = start(&config(&place, &orders, &sink));
    assert_eq!(order("before").to(gateway.addr).await.status, StatusCode::CREATED);
    tokio::task::block_in_place(|| {
        primary.set("default_transaction_read_only = on");
        standby.promote();
    });
    eventually("the new one serves", async || {
        order("after").to(gateway.addr).await.status == StatusCode::CREATED
    })
    .await;
    assert_eq!((orders.runs_of("before"), orders.runs_of("after")), (1, 1));
    let here = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'oncegate'";
    eventually("nobody reads from the old one any more", async || {
        tokio::task::block_in_place(|| primary.ask("postgres", here)).as_deref() == Some("0")
    })
    .await;
    let other = start(&config(&place, &orders, &sink));
    assert!(order("before").to(other.addr).await.replayed());
    assert_eq!(get("/readyz").to(gateway.admin).await.status, StatusCode::OK);
    let owed = "select count(*) from outbox_events where status <> 'sent'";
    eventually("the outbox is drained", async || place.count(owed).await == 0).await;
    gateway.says("read-only");
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_failover_that_a_connect_finds_nothing_is_read_from_the_old_primary() {
    reads_follow_the_writes(false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_failover_that_a_write_finds_nothing_is_read_from_the_old_primary() {
    reads_follow_the_writes(true).await;
}

/// What finds the fail-over is a heartbeat, on a connection of its own that is new or was there before.
async fn reads_follow_the_writes(beats_before: bool) {
    let (primary, standby, url) = pair();
    let store = Postgres::open(settings(&url)).await.unwrap();
    store.migrate(true).await.unwrap();
    let owner = OwnerId::fresh();
    if beats_before {
        store.heartbeat(owner, Duration::from_secs(60)).await.unwrap();
    }
    let new = proposal(owner, "new");
    assert_eq!(store.find(&new.scope).await.unwrap(), None, "this connection stays in the pool");
    tokio::task::block_in_place(|| {
        primary.set("default_transaction_read_only = on");
        standby.promote();
    });
    eventually("the new primary is found", async || {
        store.heartbeat(owner, Duration::from_secs(60)).await.is_ok()
    })
    .await;
    assert_eq!(store.reserve(new.clone(), soon()).await.unwrap(), Reserved::Held);
    let found = store.find(&new.scope).await.unwrap().expect("the old primary does not know it");
    assert_eq!(found.fence.id, new.id);
}

/// The statement's commit waits for a standby that is gone, and is given up. The server then shows it as committed, and
/// a fail-over would lose it.
#[tokio::test(flavor = "multi_thread")]
async fn what_no_standby_has_is_not_taken_for_durable() {
    let (primary, standby, url) = pair();
    let hasty = Settings { statement_timeout: Duration::from_millis(300), ..settings(&url) };
    let patient = Postgres::open(settings(&url)).await.unwrap();
    patient.migrate(true).await.unwrap();
    let store = Postgres::open(hasty).await.unwrap();
    let owner = OwnerId::fresh();
    assert_eq!(store.heartbeat(owner, Duration::from_secs(60)).await.unwrap(), Heartbeat::Renewed);
    let (first, second) = (proposal(owner, "first"), proposal(owner, "second"));
    assert_eq!(store.reserve(first.clone(), soon()).await.unwrap(), Reserved::Held);

    tokio::task::block_in_place(|| standby.kill9());
    let shortly = || Instant::now() + Duration::from_millis(1500);
    let reserved = store.reserve(second.clone(), shortly()).await;
    assert!(matches!(reserved, Err(Error::InDoubt(_))), "{reserved:?}");
    let completed = store.complete(completion(&first, &["main"]).into(), shortly()).await;
    assert!(matches!(completed, Err(Error::InDoubt(_))), "{completed:?}");
    let place = Place::at(url.clone());
    let shown = "select count(*) from idempotency_records where status = 'completed'";
    assert_eq!((place.records().await, place.count(shown).await), (2, 1), "as if it were");

    tokio::task::block_in_place(|| standby.start());
    assert_eq!(patient.reserve(second, soon()).await.unwrap(), Reserved::Held);
    let again = patient.complete(completion(&first, &["main"]).into(), soon()).await.unwrap();
    assert_eq!(again, Settled::Fenced, "it is this one already");
    drop(primary);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_takes_connections_and_never_answers_uses_up_its_own_time_only() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = silent.local_addr().unwrap().port();
    let database = tokio::task::block_in_place(|| Cluster::shared().database());
    let url = database.replace("127.0.0.1:", &format!("127.0.0.1:{port},127.0.0.1:"));
    let impatient = Settings { connect_timeout: Duration::from_millis(500), ..settings(&url) };
    let store = Postgres::open(impatient).await.unwrap();
    store.migrate(true).await.unwrap();
    store.ping().await.unwrap();
    let owner = OwnerId::fresh();
    assert_eq!(store.heartbeat(owner, Duration::from_secs(60)).await.unwrap(), Heartbeat::Renewed);
    assert_eq!(store.reserve(proposal(owner, "k"), soon()).await.unwrap(), Reserved::Held);
    silent.set_nonblocking(true).unwrap();
    let asked = std::iter::from_fn(|| silent.accept().ok()).count();
    assert_eq!(asked, 1, "once it has been found, the host that answers is asked first");
}
