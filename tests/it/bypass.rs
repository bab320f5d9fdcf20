//! `store.on_unavailable = "bypass"`: while the store is away requests go through unprotected, marked as such; whatever may
//! be reserved, or is known to run, does not.

use std::path::PathBuf;

use futures_util::future::join_all;
use http::StatusCode;
use uuid::Uuid;

use crate::support::client::get;
use crate::support::fleet::{metric, order, sending};
use crate::support::orders::Orders;
use crate::support::postgres::Cluster;
use crate::support::process::{self, Gateway, eventually, free_port};
use crate::support::rig::{self, Place, Rig, Which, on_both_stores};

const BYPASS: &str = "on_unavailable = \"bypass\"\nconnect_timeout = \"1s\"";

on_both_stores! {
    while_the_store_is_away_requests_go_through_marked_and_counted,
    a_bypassed_request_that_fails_says_that_nothing_protected_it,
}

/// A store that can be taken away.
struct Store {
    place: Place,
    cluster: Option<Cluster>,
    file: PathBuf,
}

impl Store {
    async fn new(which: Which) -> Self {
        let cluster = (which == Which::Postgres).then(|| tokio::task::block_in_place(Cluster::own));
        let place = match &cluster {
            Some(cluster) => Place::at(cluster.database()),
            None => Place::new(which).await,
        };
        let file = place.folder.path().join("oncegate.db");
        Self { place, cluster, file }
    }

    fn take_away(&self) {
        match &self.cluster {
            Some(cluster) => cluster.stop(),
            None => std::fs::rename(&self.file, self.file.with_extension("away")).unwrap(),
        }
    }

    fn bring_back(&self) {
        match &self.cluster {
            Some(cluster) => tokio::task::block_in_place(|| cluster.start()),
            None => std::fs::rename(self.file.with_extension("away"), &self.file).unwrap(),
        }
    }

    fn gateway(&self, upstream: &str) -> Gateway {
        let toml = rig::config_at(&self.place, upstream, "127.0.0.1:0", BYPASS, "", "");
        Gateway::start(&process::config(self.place.folder.path(), &toml))
    }
}

fn bypassed(answer: &crate::support::client::Answer) -> bool {
    answer.header("oncegate-bypassed") == Some("true")
}

async fn counted(gateway: &Gateway, reply: &str) -> i64 {
    let text = get("/metrics").to(gateway.admin).await.body;
    let text = String::from_utf8_lossy(&text).into_owned();
    let label = format!("reply=\"{reply}\"}} ");
    let line = text.lines().find_map(|line| line.split_once(&label));
    line.map_or(0, |(_, value)| value.parse().expect("a number"))
}

async fn while_the_store_is_away_requests_go_through_marked_and_counted(which: Which) {
    let (store, orders) = (Store::new(which).await, Orders::start().await);
    let gateway = store.gateway(&orders.url());
    let before = order("before").to(gateway.addr).await;
    assert_eq!((before.status, bypassed(&before)), (StatusCode::CREATED, false));

    store.take_away();
    for run in 1..=2 {
        let answer = order("k").to(gateway.addr).await;
        assert_eq!((answer.status, bypassed(&answer)), (StatusCode::CREATED, true), "{answer:?}");
        for absent in ["oncegate-record", "oncegate-expires", "idempotent-replayed"] {
            assert_eq!(answer.header(absent), None);
        }
        assert_eq!(orders.runs_of("k"), run, "each duplicate is forwarded, once");
    }
    let seen = orders.ledger().into_iter().find(|execution| execution.key() == Some("k")).unwrap();
    assert_eq!(seen.headers.get("oncegate-record"), None, "no record stands behind it");
    let replay = order("before").to(gateway.addr).await;
    assert_eq!((replay.replayed(), bypassed(&replay)), (true, false), "what is known is replayed");
    assert_eq!(counted(&gateway, "bypassed").await, 2);
    let warned = || gateway.log().matches("are forwarded unprotected").count();
    eventually("the log warns", async || warned() >= 2).await;
    assert_eq!(warned(), 2, "at the start, and once for both requests: {}", gateway.log());

    store.bring_back();
    eventually("requests are protected again", async || {
        let key = Uuid::new_v4().to_string();
        let answer = order(&key).to(gateway.addr).await;
        assert_eq!(answer.status, StatusCode::CREATED, "{answer:?}");
        !bypassed(&answer) && order(&key).to(gateway.addr).await.replayed()
    })
    .await;
    let kept = "select count(*) from idempotency_records where key = 'k'";
    assert_eq!(store.place.count(kept).await, 0, "nothing of a bypassed request is kept");
}

async fn a_bypassed_request_that_fails_says_that_nothing_protected_it(which: Which) {
    let store = Store::new(which).await;
    let gateway = store.gateway(&format!("http://127.0.0.1:{}", free_port()));
    store.take_away();
    let answer = order("k").to(gateway.addr).await;
    assert_eq!(answer.status, StatusCode::BAD_GATEWAY);
    assert_eq!(answer.problem(), "upstream-unreachable");
    assert!(bypassed(&answer));
}

/// A gateway that bypasses, whose database does not take connections any more.
async fn cut_off() -> (crate::support::fault::Fault, Rig) {
    let (fault, rig) = rig::behind_a_fault(BYPASS, "").await;
    fault.hang();
    fault.cut();
    eventually("the cut is noticed", async || {
        bypassed(&order(&Uuid::new_v4().to_string()).to(rig.gateway.addr).await)
    })
    .await;
    (fault, rig)
}

#[tokio::test(flavor = "multi_thread")]
async fn duplicates_that_meet_no_store_are_each_forwarded() {
    let (_fault, rig) = cut_off().await;
    let asks = (0..20).map(|_| sending(order("k"), rig.gateway.addr));
    let answers = join_all(asks.collect::<Vec<_>>()).await;
    for answer in answers {
        let answer = answer.unwrap();
        assert_eq!((answer.status, bypassed(&answer)), (StatusCode::CREATED, true), "{answer:?}");
    }
    assert_eq!(rig.orders.runs_of("k"), 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_may_be_reserved_is_refused_and_not_bypassed() {
    let store = format!("{BYPASS}\nreserve_timeout = \"1s\"");
    let (fault, rig) = rig::behind_a_fault(&store, "").await;
    fault.swallow_the_answer_to("-- reserve\n");
    let answer = order("k").to(rig.gateway.addr).await;
    assert!(fault.has_swallowed());
    assert_eq!((answer.problem(), bypassed(&answer)), ("store-unavailable".into(), false));
    assert_eq!(rig.orders.runs(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_known_to_run_elsewhere_is_not_bypassed() {
    let (fault, rig) = rig::behind_a_fault(BYPASS, "wait = \"3s\"").await;
    // Another replica, past the fault.
    let direct = rig::config_at(&rig.place, &rig.orders.url(), "127.0.0.1:0", "", "", "");
    let other = Gateway::start(&process::config(rig.place.folder.path(), &direct));
    rig.orders.hold();
    let first = sending(order("k"), other.addr);
    rig.orders.asked(1).await;
    let duplicates = [0, 1].map(|_| sending(order("k"), rig.gateway.addr));
    eventually("one asks the database, the other waits", async || {
        metric(rig.gateway.admin, "oncegate_waiting").await == 1
    })
    .await;
    let mismatch = order("k").set("content-type", "text/plain");
    eventually("the record is seen", async || {
        mismatch.to(rig.gateway.addr).await.problem() == "request-mismatch"
    })
    .await;
    fault.hang();
    fault.cut();
    for duplicate in duplicates {
        let refused = duplicate.await.unwrap();
        assert_eq!((refused.problem(), bypassed(&refused)), ("in-progress".into(), false));
    }
    rig.orders.go();
    assert_eq!(first.await.unwrap().status, StatusCode::CREATED);
    assert_eq!(rig.orders.runs_of("k"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_seen_running_or_unknown_is_not_bypassed_later() {
    let (fault, rig) = rig::behind_a_fault(BYPASS, "wait = \"100ms\"").await;
    let direct = rig::config_at(&rig.place, &rig.orders.url(), "127.0.0.1:0", "", "", "");
    let other = Gateway::start(&process::config(rig.place.folder.path(), &direct));
    rig.orders.answer_status(504);
    assert_eq!(order("lost").to(rig.gateway.addr).await.status, StatusCode::GATEWAY_TIMEOUT);
    rig.orders.answer_created();
    rig.orders.hold();
    let first = sending(order("runs"), other.addr);
    rig.orders.asked(2).await;
    let told = order("runs").to(rig.gateway.addr).await;
    assert_eq!(told.problem(), "in-progress");
    fault.refuse();
    fault.cut();
    for key in ["runs", "lost"] {
        for _ in 0..2 {
            let refused = order(key).to(rig.gateway.addr).await;
            assert_eq!(
                (refused.problem(), bypassed(&refused)),
                ("store-unavailable".into(), false),
                "{key}"
            );
        }
    }
    rig.orders.go();
    assert_eq!(first.await.unwrap().status, StatusCode::CREATED);
    let new = order("new").to(rig.gateway.addr).await;
    assert!(bypassed(&new), "{new:?}");
    assert_eq!((rig.orders.runs_of("runs"), rig.orders.runs_of("lost")), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_that_did_not_execute_leaves_the_doubt_and_is_not_bypassed() {
    let (fault, rig) = rig::behind_a_fault(BYPASS, "on_unknown = \"retry\"").await;
    for status in [504, 429] {
        rig.orders.answer_status(status);
        assert_eq!(order("k").to(rig.gateway.addr).await.status.as_u16(), status);
    }
    assert_eq!(rig.place.status_of("k").await.as_deref(), Some("unknown"));
    rig.orders.answer_created();
    fault.refuse();
    fault.cut();
    let refused = order("k").to(rig.gateway.addr).await;
    assert_eq!((refused.problem(), bypassed(&refused)), ("store-unavailable".into(), false));
    assert_eq!(rig.orders.runs_of("k"), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_that_is_reached_is_not_bypassed() {
    let (place, orders) = (Place::new(Which::Sqlite).await, Orders::start().await);
    let toml = rig::config_at(&place, &orders.url(), "127.0.0.1:0", BYPASS, "", "");
    let toml = toml.replacen("[admin]", "in_flight_max = 1\n[admin]", 1);
    let gateway = Gateway::start(&process::config(place.folder.path(), &toml));
    orders.hold();
    let first = sending(order("a"), gateway.addr);
    orders.asked(1).await;
    let second = order("b").to(gateway.addr).await;
    assert_eq!((second.problem(), bypassed(&second)), ("overloaded".into(), false));
    orders.go();
    assert_eq!(first.await.unwrap().status, StatusCode::CREATED);
    assert_eq!(orders.runs(), 1);
}
