//! The end of a process, wanted or not: what is reserved is finished, and what is not is unknown, never lost.

use std::time::{Duration, Instant};

use http::StatusCode;
use tokio::net::TcpStream;

use crate::support::client::get;
use crate::support::fault::Fault;
use crate::support::fleet::{TWO_EVENTS, listed, metric, order, sending};
use crate::support::orders::Orders;
use crate::support::process::{self, Gateway, eventually};
use crate::support::rig::{self, Place, Rig, Which, on_both_stores};

const IN_FLIGHT: usize = 50;

on_both_stores! {
    a24_a_graceful_stop_finishes_what_is_in_flight,
    requests_are_taken_for_the_delay_while_readiness_is_off,
    signals_that_ask_for_nothing_change_nothing,
    what_the_grace_does_not_finish_is_unknown,
    a_second_key_of_a_killed_process_waits_for_an_operator,
}

/// What the end of a process may take beyond its grace, on a machine that others use as well.
const BEYOND: Duration = Duration::from_secs(4);

/// How a database is away.
#[derive(Clone, Copy, Debug)]
enum Away {
    Refuses,
    Hangs,
}

impl Away {
    fn begin(self, fault: &Fault) {
        match self {
            Self::Refuses => fault.refuse(),
            Self::Hangs => fault.hang(),
        }
        fault.cut();
    }
}

/// A gateway with this grace whose Postgres is behind a proxy.
async fn behind_a_fault(grace: &str, store: &str) -> (Fault, Rig) {
    let (fault, mut rig) = rig::behind_a_fault(store, "").await;
    let toml = std::fs::read_to_string(&rig.gateway.config).unwrap();
    let toml = toml.replace("shutdown_grace = \"10s\"", &format!("shutdown_grace = \"{grace}\""));
    std::fs::write(&rig.gateway.config, toml).unwrap();
    rig.gateway.kill9();
    rig.gateway = tokio::task::block_in_place(|| rig.gateway.restart());
    (fault, rig)
}

/// Has it end by SIGTERM: how long that took.
fn ends(gateway: &mut Gateway) -> Duration {
    let begun = Instant::now();
    gateway.terminate();
    let status = tokio::task::block_in_place(|| gateway.exited());
    assert!(status.success(), "{status}:\n{}", gateway.log());
    begun.elapsed()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_safe_in_the_spill_does_not_keep_a_process_whose_database_is_away() {
    for away in [Away::Refuses, Away::Hangs] {
        let (fault, mut rig) = behind_a_fault("25s", "").await;
        rig.orders.hold();
        let to = rig.gateway.addr;
        let all: Vec<_> = (0..3).map(|n| sending(order(&format!("k-{n}")), to)).collect();
        rig.orders.asked(3).await;
        away.begin(&fault);
        rig.orders.go();
        for one in all {
            assert_eq!(one.await.unwrap().status, StatusCode::CREATED);
        }
        assert_eq!(metric(rig.gateway.admin, "oncegate_spill_entries").await, 3);
        let took = ends(&mut rig.gateway);
        assert!(took < BEYOND + Duration::from_secs(1), "{away:?}: {took:?}");
        let log = rig.gateway.log();
        let told = "they wait in the spill for the next process outcomes=3";
        assert!(log.contains(told) && !log.contains("the grace is over"), "{away:?}: {log}");

        fault.pass();
        rig.gateway = tokio::task::block_in_place(|| rig.gateway.restart());
        for n in 0..3 {
            assert!(order(&format!("k-{n}")).to(rig.gateway.addr).await.replayed());
        }
        assert_eq!(rig.orders.runs(), 3);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_still_runs_at_the_end_of_the_grace_is_counted_and_a_database_that_is_away_adds_little()
 {
    for away in [Away::Refuses, Away::Hangs] {
        let (fault, mut rig) = behind_a_fault("1s", "").await;
        let to = rig.gateway.addr;
        rig.orders.hold();
        let safe = sending(order("safe"), to);
        rig.orders.asked(1).await;
        away.begin(&fault);
        rig.orders.go();
        assert_eq!(safe.await.unwrap().status, StatusCode::CREATED);
        fault.pass();
        eventually("it is written", async || {
            rig.place.status_of("safe").await.as_deref() == Some("completed")
        })
        .await;
        rig.orders.hold();
        let all: Vec<_> = (0..2)
            .map(|n| tokio::spawn(async move { order(&format!("k-{n}")).send(to).await }))
            .collect();
        rig.orders.asked(3).await;
        away.begin(&fault);
        let took = ends(&mut rig.gateway);
        assert!(took < Duration::from_secs(1) + BEYOND, "{away:?}: {took:?}");
        let log = rig.gateway.log();
        let told = "these attempts still run, and will be found as unknown running=2";
        assert!(log.contains(told) && !log.contains("wait in the spill"), "{away:?}: {log}");
        for one in all {
            drop(one.await.unwrap());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reservation_that_may_have_been_committed_is_freed_by_the_next_process() {
    let (fault, mut rig) = behind_a_fault("25s", "reserve_timeout = \"1s\"").await;
    fault.swallow_the_answer_to("oncegate_reserve_batch");
    let first = sending(order("k"), rig.gateway.addr);
    eventually("it is committed, and nobody was told", async || {
        fault.has_swallowed() && rig.place.records().await == 1
    })
    .await;
    Away::Refuses.begin(&fault);
    assert_eq!(first.await.unwrap().problem(), "store-unavailable");
    let took = ends(&mut rig.gateway);
    assert!(took < BEYOND + Duration::from_secs(1), "{took:?}");

    fault.pass();
    rig.gateway = tokio::task::block_in_place(|| rig.gateway.restart());
    assert_eq!(rig.place.records().await, 0, "its key is free, not unknown");
    let retry = order("k").to(rig.gateway.addr).await;
    assert_eq!((retry.status, rig.orders.runs()), (StatusCode::CREATED, 1));
    assert_eq!(rig.place.count("select count(*) from audit_log").await, 0);
}

/// Waits until nobody listens any more. Without a request: one that came a moment earlier would be taken.
async fn refuses_connections(gateway: &Gateway) {
    let refused = async || TcpStream::connect(gateway.addr).await.is_err();
    eventually("new connections are refused", refused).await;
}

async fn ready(gateway: &Gateway) -> StatusCode {
    get("/readyz").to(gateway.admin).await.status
}

async fn a24_a_graceful_stop_finishes_what_is_in_flight(which: Which) {
    let mut rig = Rig::start(which, TWO_EVENTS).await;
    rig.orders.hold();
    let tasks: Vec<_> =
        (0..IN_FLIGHT).map(|n| sending(order(&format!("k-{n}")), rig.gateway.addr)).collect();
    rig.orders.asked(IN_FLIGHT).await;
    assert_eq!(ready(&rig.gateway).await, StatusCode::OK);
    rig.gateway.terminate();
    eventually("readiness tells", async || {
        ready(&rig.gateway).await == StatusCode::SERVICE_UNAVAILABLE
    })
    .await;
    refuses_connections(&rig.gateway).await;
    rig.orders.go();
    for task in tasks {
        let answer = task.await.unwrap();
        assert_eq!(answer.status, StatusCode::CREATED);
        assert_eq!(answer.header("oncegate-stored"), None);
    }
    assert!(rig.gateway.exited().success());
    let completed = "select count(*) from idempotency_records where status = 'completed'";
    assert_eq!(rig.place.count(completed).await, IN_FLIGHT as i64);
    assert_eq!(rig.place.records().await, IN_FLIGHT as i64, "nothing else was reserved");
    assert_eq!(rig.place.events().await, 2 * IN_FLIGHT as i64);
    assert_eq!(rig.orders.runs(), IN_FLIGHT);
}

/// With a delay that no test waits for.
async fn with_a_delay(which: Which) -> Rig {
    let mut rig = Rig::start(which, "").await;
    let toml = std::fs::read_to_string(&rig.gateway.config).unwrap();
    let toml = toml.replace("[server]", "[server]\nshutdown_delay = \"1h\"");
    std::fs::write(&rig.gateway.config, toml).unwrap();
    rig.gateway.kill9();
    rig.gateway = tokio::task::block_in_place(|| rig.gateway.restart());
    rig
}

async fn requests_are_taken_for_the_delay_while_readiness_is_off(which: Which) {
    let mut rig = with_a_delay(which).await;
    rig.orders.hold();
    let before = sending(order("before"), rig.gateway.addr);
    rig.orders.asked(1).await;
    rig.gateway.terminate();
    eventually("readiness tells", async || {
        ready(&rig.gateway).await == StatusCode::SERVICE_UNAVAILABLE
    })
    .await;
    rig.orders.go();
    assert_eq!(before.await.unwrap().status, StatusCode::CREATED);
    // Each on a connection of its own, which stays open: nothing tells the caller to leave.
    for key in ["first", "second"] {
        let answer = order(key).to(rig.gateway.addr).await;
        assert_eq!((answer.status, answer.header("connection")), (StatusCode::CREATED, None));
    }
    rig.orders.hold();
    let last = sending(order("last"), rig.gateway.addr);
    rig.orders.asked(4).await;
    // The second signal ends the delay, and no more: what is in flight has its grace.
    rig.gateway.terminate();
    refuses_connections(&rig.gateway).await;
    rig.orders.go();
    let last = last.await.unwrap();
    assert_eq!((last.status, last.header("connection")), (StatusCode::CREATED, Some("close")));
    assert!(rig.gateway.exited().success(), "{}", rig.gateway.log());
    assert_eq!((rig.orders.runs(), rig.place.records().await), (4, 4));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delay_that_is_over_is_followed_by_the_stop_without_another_signal() {
    let mut rig = with_a_delay(Which::Sqlite).await;
    let toml = std::fs::read_to_string(&rig.gateway.config).unwrap();
    std::fs::write(&rig.gateway.config, toml.replace("\"1h\"", "\"200ms\"")).unwrap();
    rig.gateway.kill9();
    rig.gateway = tokio::task::block_in_place(|| rig.gateway.restart());
    let took = ends(&mut rig.gateway);
    assert!(took >= Duration::from_millis(200), "{took:?}");
}

async fn signals_that_ask_for_nothing_change_nothing(which: Which) {
    let mut rig = Rig::start(which, "").await;
    rig.orders.hold();
    let first = sending(order("k"), rig.gateway.addr);
    rig.orders.asked(1).await;
    for name in ["HUP", "USR1", "USR2", "PIPE", "HUP"] {
        rig.gateway.signal(name);
    }
    tokio::task::block_in_place(|| rig.gateway.says("SIGHUP changes nothing"));
    rig.orders.go();
    assert_eq!(first.await.unwrap().status, StatusCode::CREATED);
    assert_eq!(ready(&rig.gateway).await, StatusCode::OK);
    // Nor while it drains.
    rig.orders.hold();
    let second = sending(order("l"), rig.gateway.addr);
    rig.orders.asked(2).await;
    rig.gateway.terminate();
    tokio::task::block_in_place(|| rig.gateway.says("stopping: requests in progress"));
    for name in ["HUP", "USR1", "USR2", "PIPE"] {
        rig.gateway.signal(name);
    }
    rig.orders.go();
    assert_eq!(second.await.unwrap().status, StatusCode::CREATED);
    let status = tokio::task::block_in_place(|| rig.gateway.exited());
    assert!(status.success(), "{status}:\n{}", rig.gateway.log());
}

async fn what_the_grace_does_not_finish_is_unknown(which: Which) {
    let (orders, place) = (Orders::start().await, Place::new(which).await);
    let store = "lease = \"3s\"\nsweep_every = \"500ms\"";
    let toml = rig::config_at(&place, &orders.url(), "127.0.0.1:0", store, "", "")
        .replace("shutdown_grace = \"10s\"", "shutdown_grace = \"1s\"");
    let config = process::config(place.folder.path(), &toml);
    let mut gateway = Gateway::start(&config);
    orders.hold();
    let to = gateway.addr;
    let tasks: Vec<_> = (0..5)
        .map(|n| tokio::spawn(async move { order(&format!("k-{n}")).send(to).await }))
        .collect();
    orders.asked(5).await;
    let begun = Instant::now();
    gateway.terminate();
    let status = tokio::task::block_in_place(|| gateway.exited());
    assert!(status.code().is_some(), "it ends by itself: {status:?}");
    assert!(begun.elapsed() < process::PATIENCE / 2, "within the grace: {:?}", begun.elapsed());
    for task in tasks {
        let cut = match task.await.unwrap() {
            Ok(answer) => !answer.status.is_success(),
            Err(_) => true,
        };
        assert!(cut, "nobody is told of a success");
    }
    assert_eq!(place.records().await, 5, "none is lost");

    let gateway = tokio::task::block_in_place(|| Gateway::start(&config));
    eventually("all are unknown", async || listed(&gateway, "unknown").len() == 5).await;
    orders.go();
    for n in 0..5 {
        let retry = order(&format!("k-{n}")).to(gateway.addr).await;
        assert_eq!(retry.problem(), "outcome-unknown");
    }
    assert_eq!(orders.runs(), 5);
}

async fn a_second_key_of_a_killed_process_waits_for_an_operator(which: Which) {
    let mut rig = Rig::with(which, "lease = \"3s\"\nsweep_every = \"500ms\"", "", "").await;
    rig.orders.hold();
    let to = rig.gateway.addr;
    let first = tokio::spawn(async move { order("k").send(to).await });
    rig.orders.asked(1).await;
    if which == Which::Sqlite {
        let second = tokio::task::block_in_place(|| Gateway::try_start(&rig.gateway.config));
        let said = second.err().expect("a second process on one file is refused");
        assert!(said.contains("in use by another `oncegate serve`"), "{said}");
    }
    rig.gateway.kill9();
    assert!(first.await.unwrap().is_err());
    rig.gateway = tokio::task::block_in_place(|| rig.gateway.restart());
    if which == Which::Sqlite {
        // The lock tells that nobody else lives: no lease has to run out first.
        assert_eq!(rig.place.status_of("k").await.as_deref(), Some("unknown"), "at once");
    }
    rig.orders.go();
    let retry = order("k").to(rig.gateway.addr).await;
    assert_eq!((retry.status, retry.problem()), (StatusCode::CONFLICT, "outcome-unknown".into()));
    assert_eq!(rig.orders.runs(), 1);
    assert_eq!(listed(&rig.gateway, "unknown"), [retry.record()]);
}
