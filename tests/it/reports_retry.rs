//! `on_unknown = "retry"`: who starts the next attempt, what the upstream sees of it, and that nothing is forgotten.

use http::StatusCode;

use crate::support::client::{Ask, post};
use crate::support::process::eventually;
use crate::support::rig::{self, Rig, Which, on_both_stores};

fn order() -> Ask {
    post("/orders", r#"{"customer":"c-1","amount":"129.90"}"#).tenant("acme").key("k")
}

// The first answer is cut off, so that it does not come before the next attempt.
const RETRY: &str = "on_unknown = \"retry\"\ntimeout = \"2s\"\nlate_answer = \"0s\"";

/// The attempts that the API saw.
fn attempts(rig: &Rig) -> Vec<String> {
    let attempt = |execution: &crate::support::orders::Execution| {
        execution.headers["oncegate-attempt"].to_str().unwrap().to_owned()
    };
    rig.orders.ledger().iter().map(attempt).collect()
}

on_both_stores! {
    the_next_duplicate_is_the_next_attempt,
    a_waiter_of_the_unknown_attempt_does_not_start_the_next_one,
    duplicates_of_the_next_attempt_wait_for_it,
    an_attempt_that_is_released_is_unknown_again,
    an_attempt_that_never_reached_the_upstream_is_unknown_again,
    an_unfinished_record_keeps_its_fingerprint,
}

async fn the_next_duplicate_is_the_next_attempt(which: Which) {
    let rig = Rig::with(which, "", RETRY, "").await;
    rig.orders.hold();
    let first = order().to(rig.gateway.addr).await;
    assert_eq!(first.problem(), "upstream-timeout");
    assert_eq!(first.json()["retry"], "same-key");
    rig.orders.go();
    let second = order().to(rig.gateway.addr).await;
    assert_eq!(second.status, StatusCode::CREATED, "{second:?}");
    assert!(!second.replayed());
    assert_eq!(second.record(), first.record(), "the same record, its second attempt");
    assert_eq!(attempts(&rig), ["1", "2"]);
    let third = order().to(rig.gateway.addr).await;
    assert!(third.replayed());
    assert_eq!(third.body, second.body);
    assert_eq!(rig.orders.runs(), 2);
    assert_eq!(rig.place.events().await, 1);
}

async fn a_waiter_of_the_unknown_attempt_does_not_start_the_next_one(which: Which) {
    let rig = Rig::with(which, "", RETRY, "").await;
    let other = (which == Which::Postgres).then(|| rig.gateway.restart());
    let addr = rig.gateway.addr;
    rig.orders.hold();
    let first = tokio::spawn(async move { order().to(addr).await });
    rig.orders.asked(1).await;
    let others = [Some(addr), Some(addr), other.as_ref().map(|gateway| gateway.addr)];
    let waiting = others.into_iter().flatten();
    let waiting = waiting.map(|addr| tokio::spawn(async move { order().to(addr).await }));
    for answer in futures_util::future::join_all(waiting).await {
        assert_eq!(answer.unwrap().problem(), "outcome-unknown");
    }
    assert_eq!(first.await.unwrap().problem(), "upstream-timeout");
    assert_eq!(rig.orders.runs(), 1, "those who waited executed nothing");
    rig.orders.go();
    assert_eq!(order().to(addr).await.status, StatusCode::CREATED);
    assert_eq!(rig.orders.runs(), 2);
}

async fn duplicates_of_the_next_attempt_wait_for_it(which: Which) {
    let rig = Rig::with(which, "", "on_unknown = \"retry\"", "").await;
    let other = (which == Which::Postgres).then(|| rig.gateway.restart());
    rig.orders.answer_status(504);
    assert_eq!(order().to(rig.gateway.addr).await.status, StatusCode::GATEWAY_TIMEOUT);
    rig.orders.answer_created();
    let second = other.as_ref().map_or(rig.gateway.addr, |gateway| gateway.addr);
    let asks =
        (0..20).map(|n| if n % 2 == 0 { rig.gateway.addr } else { second }).collect::<Vec<_>>();
    let ask = order();
    let answers = futures_util::future::join_all(asks.into_iter().map(|addr| ask.to(addr))).await;
    assert!(answers.iter().all(|answer| answer.status == StatusCode::CREATED), "{answers:?}");
    assert_eq!(answers.iter().filter(|answer| !answer.replayed()).count(), 1);
    assert_eq!(attempts(&rig), ["1", "2"]);
}

async fn an_attempt_that_is_released_is_unknown_again(which: Which) {
    let rig = Rig::with(which, "", "on_unknown = \"retry\"", "").await;
    let addr = rig.gateway.addr;
    rig.orders.answer_status(504);
    let record = order().to(addr).await.record();
    rig.orders.answer_status(429);
    let released = order().to(addr).await;
    assert_eq!(released.status, StatusCode::TOO_MANY_REQUESTS, "passed on");
    let rows = rig.place.rows("select id, status, attempt from idempotency_records").await;
    let expected = [record.as_str(), "unknown", "2"].map(|cell| Some(cell.to_owned()));
    assert_eq!(rows, [expected], "that the first attempt may have executed is not forgotten");
    rig.orders.answer_created();
    assert_eq!(order().to(addr).await.status, StatusCode::CREATED);
    assert_eq!(attempts(&rig), ["1", "2", "3"]);
    assert!(order().to(addr).await.replayed());
    assert_eq!(rig.place.events().await, 1);
}

async fn an_attempt_that_never_reached_the_upstream_is_unknown_again(which: Which) {
    let rig = Rig::with(which, "", "on_unknown = \"retry\"", "").await;
    let Rig { orders, place, gateway } = rig;
    orders.answer_status(504);
    order().to(gateway.addr).await;
    drop(orders);
    eventually("its port is closed", async || {
        order().to(gateway.addr).await.problem() == "upstream-unreachable"
    })
    .await;
    assert_eq!(place.status_of("k").await.as_deref(), Some("unknown"));
    assert_eq!(place.events().await, 0);
}

async fn an_unfinished_record_keeps_its_fingerprint(which: Which) {
    let rig = Rig::with(which, "", "on_unknown = \"retry\"", "").await;
    rig.orders.answer_status(504);
    order().to(rig.gateway.addr).await;
    rig.orders.answer_created();
    let other = order().body(r#"{"amount":"1.00"}"#).to(rig.gateway.addr).await;
    assert_eq!(other.problem(), "request-mismatch");
    assert_eq!(rig.orders.runs(), 1);
    let row = rig.place.rows("select status, attempt from idempotency_records").await;
    assert_eq!(row, [["unknown", "1"].map(|cell| Some(cell.to_owned()))]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_whose_commit_was_not_heard_of_is_sent_once_or_never() {
    let (fault, rig) = rig::behind_a_fault("", "on_unknown = \"retry\"").await;
    let addr = rig.gateway.addr;
    rig.orders.answer_status(504);
    order().to(addr).await;
    rig.orders.answer_created();
    fault.swallow_the_answer_to("-- take_over_unknown\n");
    let second = tokio::spawn(async move { order().to(addr).await });
    let taken = "select count(*) from idempotency_records where attempt = 2";
    eventually("the takeover is committed", async || rig.place.count(taken).await == 1).await;
    assert!(fault.has_swallowed());
    fault.cut();
    let second = second.await.unwrap();
    if second.status == StatusCode::CREATED {
        assert_eq!(attempts(&rig), ["1", "2"]);
    } else {
        assert_eq!(second.problem(), "store-unavailable");
        eventually("the next attempt runs", async || {
            order().to(addr).await.status == StatusCode::CREATED
        })
        .await;
        assert_eq!(attempts(&rig), ["1", "3"], "what was refused is not sent later");
    }
    assert!(order().to(addr).await.replayed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_takeover_of_an_expired_row_whose_commit_was_not_heard_of_is_sent_once_or_never() {
    let store = "sweep_every = \"1h\"\ncache_bytes = 0";
    let (fault, rig) = rig::behind_a_fault(store, "retention = \"1s\"").await;
    let addr = rig.gateway.addr;
    let first = order().to(addr).await;
    let expired = "select count(*) from idempotency_records where expires_at <= clock_timestamp()";
    eventually("it has expired", async || rig.place.count(expired).await == 1).await;
    fault.swallow_the_answer_to("-- take_over_expired\n");
    let second = tokio::spawn(async move { order().to(addr).await });
    eventually("the takeover is committed", async || rig.place.count(expired).await == 0).await;
    assert!(fault.has_swallowed());
    fault.cut();
    let second = second.await.unwrap();
    if second.status == StatusCode::CREATED {
        assert_ne!(second.record(), first.record());
    } else {
        assert_eq!(second.problem(), "store-unavailable");
        assert_eq!(rig.orders.runs(), 1);
        eventually("the key is free", async || {
            order().to(addr).await.status == StatusCode::CREATED
        })
        .await;
    }
    assert_eq!(rig.orders.runs(), 2);
}
