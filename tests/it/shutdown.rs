//! The end of a process, wanted or not: what is reserved is finished, and what is not is unknown, never lost.

use std::time::Instant;

use http::StatusCode;

use crate::support::client::get;
use crate::support::fleet::{TWO_EVENTS, listed, order, sending};
use crate::support::orders::Orders;
use crate::support::process::{self, Gateway, eventually};
use crate::support::rig::{self, Place, Rig, Which, on_both_stores};

const IN_FLIGHT: usize = 50;

on_both_stores! {
    a24_a_graceful_stop_finishes_what_is_in_flight,
    what_the_grace_does_not_finish_is_unknown,
    a_second_key_of_a_killed_process_waits_for_an_operator,
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
    eventually("new connections are refused", async || {
        order("new").send(rig.gateway.addr).await.is_err()
    })
    .await;
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
