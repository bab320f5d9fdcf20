//! The acceptance cases R1 to R16, each on both stores, against the real program.

use std::collections::HashSet;

use futures_util::future::join_all;
use http::StatusCode;

use crate::support::client::{Answer, Ask, get, post};
use crate::support::process::{self, eventually};
use crate::support::rig::{Rig, Which, on_both_stores};

fn order() -> Ask {
    post("/orders", r#"{"customer":"c-1","amount":"129.90"}"#).tenant("acme")
}

async fn at_once(ask: &Ask, times: usize, rig: &Rig) -> Vec<Answer> {
    join_all((0..times).map(|_| ask.to(rig.gateway.addr))).await
}

on_both_stores! {
    r01_twenty_concurrent_requests_are_one_execution,
    r02_a_new_key_is_one_more,
    r03_the_same_key_with_other_parameters_is_a_conflict,
    r04_the_hash_is_stored_at_the_first_handling,
    r06_two_tenants_share_no_record,
    r07_two_operations_share_no_record,
    r08_the_digest_covers_business_parameters_only,
    r09_two_event_types_of_one_request_stand_in_one_transaction,
    r10_several_events_of_one_type_have_their_own_keys,
    r14_after_the_retention_the_key_is_new,
    r15_a_lost_answer_is_replayed,
    r16_who_called_when_and_how_it_ended_can_be_read,
}

async fn r01_twenty_concurrent_requests_are_one_execution(which: Which) {
    let rig = Rig::start(which, "").await;
    let answers = at_once(&order().key("demo-001"), 20, &rig).await;
    let ids: HashSet<_> = answers.iter().map(|answer| answer.json()["id"].to_string()).collect();
    assert_eq!(ids.len(), 1, "one business object");
    assert!(answers.iter().all(|answer| answer.status == StatusCode::CREATED));
    assert_eq!(answers.iter().filter(|answer| !answer.replayed()).count(), 1, "one is the first");
    assert_eq!(rig.orders.runs(), 1);
    let place = &rig.place;
    let records = "select count(*) from idempotency_records where key = 'demo-001'";
    let events = "select count(*) from outbox_events where idempotency_key = 'demo-001'";
    assert_eq!(place.count(records).await, 1);
    assert_eq!(place.count(events).await, 1);
}

async fn r02_a_new_key_is_one_more(which: Which) {
    let rig = Rig::start(which, "").await;
    for count in 1..=3 {
        let answer = order().key(&format!("key-{count}")).to(rig.gateway.addr).await;
        assert_eq!(answer.status, StatusCode::CREATED);
        assert_eq!(rig.place.records().await, count);
        assert_eq!(rig.place.events().await, count);
        assert_eq!(rig.orders.runs() as i64, count);
    }
}

async fn r03_the_same_key_with_other_parameters_is_a_conflict(which: Which) {
    let rig = Rig::start(which, "").await;
    order().key("k").to(rig.gateway.addr).await;
    let other = post("/orders", r#"{"customer":"c-1","amount":"1.00"}"#).tenant("acme").key("k");
    let answer = other.to(rig.gateway.addr).await;
    assert_eq!(answer.status, StatusCode::CONFLICT);
    assert_eq!(answer.problem(), "request-mismatch");
    assert_eq!(answer.json()["retry"], "new-key");
    assert_eq!(rig.orders.runs(), 1);
    assert_eq!(rig.place.records().await, 1);
    assert_eq!(rig.place.events().await, 1);
}

async fn r04_the_hash_is_stored_at_the_first_handling(which: Which) {
    let rig = Rig::start(which, "").await;
    rig.orders.hold();
    let addr = rig.gateway.addr;
    let first = tokio::spawn(async move { order().key("k").to(addr).await });
    rig.orders.asked(1).await;
    let filled = "select count(*) from idempotency_records where request_hash is not null and status = 'in_progress'";
    assert_eq!(rig.place.count(filled).await, 1);
    let other = post("/orders", r#"{"amount":"1.00"}"#).tenant("acme").key("k").to(addr).await;
    assert_eq!(other.problem(), "request-mismatch", "seen while the first is still running");
    rig.orders.go();
    assert_eq!(first.await.unwrap().status, StatusCode::CREATED);
}

async fn r06_two_tenants_share_no_record(which: Which) {
    let rig = Rig::start(which, "").await;
    let (one, two) = (order().key("k"), order().set("x-tenant-id", "globex").key("k"));
    let (ones, twos) = tokio::join!(at_once(&one, 10, &rig), at_once(&two, 10, &rig));
    let ids = |answers: &[Answer]| -> HashSet<String> {
        answers.iter().map(|answer| answer.json()["id"].to_string()).collect()
    };
    assert_eq!((ids(&ones).len(), ids(&twos).len()), (1, 1), "each replays its own answer only");
    assert_ne!(ids(&ones), ids(&twos));
    assert_eq!(rig.orders.runs(), 2);
    assert_eq!(rig.place.records().await, 2);
    assert_eq!(rig.place.events().await, 2);
}

async fn r07_two_operations_share_no_record(which: Which) {
    let refunds =
        "[[route]]\nmethod = \"POST\"\npath = \"/refunds\"\noperation = \"refunds.create\"";
    let rig = Rig::start(which, refunds).await;
    let order = order().key("k");
    let refund =
        post("/refunds", r#"{"customer":"c-1","amount":"129.90"}"#).tenant("acme").key("k");
    let (orders, refunds) = tokio::join!(at_once(&order, 10, &rig), at_once(&refund, 10, &rig));
    let all: HashSet<_> =
        orders.iter().chain(&refunds).map(|answer| answer.json()["id"].to_string()).collect();
    assert_eq!(all.len(), 2);
    assert_eq!(rig.orders.runs(), 2);
    assert_eq!(rig.place.records().await, 2);
}

async fn r08_the_digest_covers_business_parameters_only(which: Which) {
    let rig = Rig::start(which, r#"fingerprint = { ignore = ["$.sent_at"] }"#).await;
    let sent = |body: &str, token: &str| {
        post("/orders", body).tenant("acme").key("k").header("authorization", token)
    };
    let first = sent(r#"{"amount":1.0,"sent_at":"09:00","customer":"c"}"#, "Bearer one");
    let retry = sent(r#"{ "customer": "c", "sent_at": "09:05", "amount": 1 }"#, "Bearer two");
    assert!(!first.to(rig.gateway.addr).await.replayed());
    assert!(retry.to(rig.gateway.addr).await.replayed());
    let other = sent(r#"{"amount":2,"sent_at":"09:00","customer":"c"}"#, "Bearer one");
    assert_eq!(other.to(rig.gateway.addr).await.problem(), "request-mismatch");
    assert_eq!(rig.orders.runs(), 1);
}

const TWO_EVENTS: &str = r#"
[[route.event]]
type = "order.created"
when = "response.status == 201"
payload = { order_id = "{{ response.json.id }}", amount = "{{ request.json.amount }}" }
[[route.event]]
type = "audit.order"
"#;

async fn r09_two_event_types_of_one_request_stand_in_one_transaction(which: Which) {
    let rig = Rig::start(which, TWO_EVENTS).await;
    for _ in 0..3 {
        order().key("k").to(rig.gateway.addr).await;
    }
    let rows = rig
        .place
        .rows(
            "select event_type from outbox_events where idempotency_key = 'k' order by event_type",
        )
        .await;
    let types: Vec<_> = rows.into_iter().filter_map(|row| row[0].clone()).collect();
    assert_eq!(types, ["audit.order", "order.created"], "a replay adds none");
}

async fn r10_several_events_of_one_type_have_their_own_keys(which: Which) {
    let lines = r#"
[[route.event]]
type = "order.line"
for_each = "request.json.lines"
event_key = "{{ item.sku }}"
payload = { sku = "{{ item.sku }}" }
"#;
    let rig = Rig::start(which, lines).await;
    let ask = post("/orders", r#"{"lines":[{"sku":"a"},{"sku":"b"},{"sku":"c"}]}"#);
    ask.tenant("acme").key("k").to(rig.gateway.addr).await;
    let keys =
        "select count(distinct event_key) from outbox_events where event_type = 'order.line'";
    assert_eq!(rig.place.count(keys).await, 3);
    assert_eq!(rig.place.events().await, 3);
}

async fn r14_after_the_retention_the_key_is_new(which: Which) {
    let rig = Rig::with(which, "", "retention = \"2s\"", "").await;
    let first = order().key("k").to(rig.gateway.addr).await;
    assert!(order().key("k").to(rig.gateway.addr).await.replayed());
    assert!(first.header("oncegate-expires").is_some(), "callers are told");
    eventually("the key is new", async || !order().key("k").to(rig.gateway.addr).await.replayed())
        .await;
    assert_eq!(rig.orders.runs(), 2);
    let again = order().key("k").to(rig.gateway.addr).await;
    assert_eq!(again.json()["id"], "order-2", "the new record replays its own answer");
}

async fn r15_a_lost_answer_is_replayed(which: Which) {
    let rig = Rig::start(which, "").await;
    rig.orders.hold();
    let addr = rig.gateway.addr;
    let caller = tokio::spawn(async move { order().key("k").send(addr).await });
    rig.orders.asked(1).await;
    // The caller's connection dies while the API works.
    caller.abort();
    assert!(caller.await.is_err());
    rig.orders.go();
    let answer = order().key("k").to(addr).await;
    assert_eq!(answer.json()["id"], "order-1");
    assert!(answer.replayed());
    assert_eq!(rig.orders.runs(), 1);
    assert_eq!(rig.place.events().await, 1);
}

async fn r16_who_called_when_and_how_it_ended_can_be_read(which: Which) {
    let rig = Rig::start(which, "").await;
    let answer =
        order().key("k").header("authorization", "Bearer secret").to(rig.gateway.addr).await;
    let sql = "select id, caller, created_at, completed_at, response_status, request_hash from idempotency_records where key = 'k'";
    let row = rig.place.rows(sql).await.remove(0);
    assert!(row.iter().all(Option::is_some), "{row:?}");
    assert_eq!(row[0].as_deref(), Some(answer.record().as_str()));
    assert!(!format!("{row:?}").contains("secret"), "the credential itself is not kept");
    let config = rig.gateway.config.to_str().unwrap();
    let (code, shown, errors) =
        process::run(&["records", "show", &answer.record(), "--config", config, "--json"]);
    assert_eq!(code, 0, "{errors}");
    let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(shown["record"]["status"], "completed");
    assert_eq!(shown["record"]["response_status"], 201);
    let listed = get("/api/v1/records?key=k&tenant=acme").to(rig.gateway.admin).await;
    assert_eq!(listed.json()["records"][0]["id"], answer.record());
}
