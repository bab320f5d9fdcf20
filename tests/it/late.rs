//! Answers that come after their time-out, and outcomes whose record had gone on: the first complete the record, the second
//! stand in the audit table, and neither is lost.

use std::net::SocketAddr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::StatusCode;
use serde_json::{Value, json};

use crate::support::client::{Answer, get};
use crate::support::fleet::{TWO_EVENTS, command, metric, order, sending};
use crate::support::orders::Orders;
use crate::support::process::{self, Gateway, eventually};
use crate::support::rig::{self, Rig, Which, on_both_stores};
use crate::support::upstream::{OK, Reply, Upstream};

on_both_stores! {
    a13_a_late_result_completes_what_timed_out,
    a_late_answer_that_did_not_execute_frees_the_key,
    a_late_answer_that_leaves_it_open_changes_nothing,
    a_late_answer_that_breaks_off_changes_nothing,
    a_late_answer_that_is_too_large_completes_without_its_body,
    without_late_answers_the_connection_is_cut_at_the_time_out,
    late_answers_have_a_bound_of_their_own_and_take_no_room_from_requests,
    a_late_answer_that_a_retry_has_overtaken_is_kept_in_the_audit,
    a_late_answer_does_not_end_the_attempt_that_runs,
    a_stop_does_not_wait_for_late_answers,
    a_late_outcome_that_is_owed_at_the_end_of_the_process_is_noted_by_the_next,
}

const SHORT: &str = "timeout = \"500ms\"";

/// How many awaited answers came to this.
async fn late_answers(admin: SocketAddr, result: &str) -> i64 {
    let text = get("/metrics").to(admin).await.body;
    let text = String::from_utf8_lossy(&text).into_owned();
    let name = format!("oncegate_late_answers_total{{result=\"{result}\"}} ");
    let line = text.lines().find_map(|line| line.strip_prefix(&name));
    line.map_or(0, |value| value.parse().expect("a number"))
}

async fn came_to(gateway: &Gateway, result: &str, count: i64) {
    eventually(result, async || late_answers(gateway.admin, result).await == count).await;
}

/// A request that times out; the API goes on.
async fn times_out(rig: &Rig, key: &str) -> Answer {
    let first = order(key).to(rig.gateway.addr).await;
    assert_eq!(first.status, StatusCode::GATEWAY_TIMEOUT, "{first:?}");
    assert_eq!(first.problem(), "upstream-timeout");
    first
}

fn assert_held(answer: &Answer) {
    assert_eq!((answer.status, answer.problem()), (StatusCode::CONFLICT, "outcome-unknown".into()));
    let after: u32 = answer.header("retry-after").expect("Retry-After").parse().unwrap();
    assert!(after >= 60, "an invitation to a loop: {after}");
}

/// The audit rows of a record with what they tell.
async fn audit(gateway: &Gateway, record: &str) -> Vec<(String, Value)> {
    let life = get(&format!("/api/v1/records/{record}")).to(gateway.admin).await.json();
    let row = |row: &Value| {
        let detail = row["detail"]
            .as_str()
            .map_or(Value::Null, |text| serde_json::from_str(text).expect("JSON"));
        (row["action"].as_str().expect("an action").to_owned(), detail)
    };
    life["audit"].as_array().expect("an audit").iter().map(row).collect()
}

fn unpacked(text: &Value) -> Value {
    let bytes = STANDARD.decode(text.as_str().expect("base64")).expect("base64");
    serde_json::from_slice(&bytes).expect("JSON")
}

async fn a13_a_late_result_completes_what_timed_out(which: Which) {
    let store = "lease = \"3s\"\nsweep_every = \"200ms\"";
    let mut rig = Rig::with(which, store, "timeout = \"1s\"", TWO_EVENTS).await;
    let addr = rig.gateway.addr;
    rig.orders.hold();
    let first = sending(order("k"), addr);
    rig.orders.asked(1).await;
    assert_held(&order("k").to(addr).await);
    let first = first.await.unwrap();
    assert_eq!(first.problem(), "upstream-timeout");
    assert_eq!(rig.place.status_of("k").await.as_deref(), Some("unknown"));
    assert_held(&order("k").to(addr).await);
    // The lease under which it was reserved is over; it has been renewed.
    let later = match which {
        Which::Sqlite => "r.created_at + 4000000",
        Which::Postgres => "r.created_at + interval '4 seconds'",
    };
    let renewed = format!(
        "select count(*) from idempotency_records r join oncegate_owners o on o.owner = r.owner \
         where o.lease_until > {later}"
    );
    eventually("a lease passes", async || rig.place.count(&renewed).await == 1).await;
    assert_held(&order("k").to(addr).await);
    eventually("the metric tells", async || {
        metric(rig.gateway.admin, "oncegate_unknown_records").await == 1
    })
    .await;
    assert_eq!(metric(rig.gateway.admin, "oncegate_late_reads").await, 1);
    let listed = get("/api/v1/records?status=unknown").to(rig.gateway.admin).await.json();
    assert_eq!(listed["records"][0]["id"], first.record());

    rig.orders.go();
    came_to(&rig.gateway, "completed", 1).await;
    assert_eq!(rig.place.status_of("k").await.as_deref(), Some("completed"));
    assert_eq!(rig.place.events().await, 2);
    let replay = order("k").to(addr).await;
    assert_eq!((replay.status, replay.replayed()), (StatusCode::CREATED, true));
    assert_eq!(replay.json()["id"], "order-1");
    assert_eq!(replay.record(), first.record());
    assert_eq!(metric(rig.gateway.admin, "oncegate_late_reads").await, 0);
    assert_eq!(audit(&rig.gateway, &first.record()).await, [], "nothing was overtaken");

    // Nobody reads on where the process ends; then an operator has the word.
    rig.orders.hold();
    let second = times_out(&rig, "k-2").await;
    rig.gateway.kill9();
    let again = rig.gateway.restart();
    rig.orders.go();
    let retry = order("k-2").to(again.addr).await;
    assert_held(&retry);
    assert_eq!(retry.record(), second.record());
    assert_eq!((rig.orders.runs_of("k"), rig.orders.runs_of("k-2")), (1, 1));
    assert_eq!(rig.place.events().await, 2);
}

async fn a_late_answer_that_did_not_execute_frees_the_key(which: Which) {
    let rig = Rig::with(which, "", SHORT, TWO_EVENTS).await;
    rig.orders.hold();
    rig.orders.answer_status(429);
    times_out(&rig, "k").await;
    rig.orders.go();
    came_to(&rig.gateway, "released", 1).await;
    assert_eq!(rig.place.records().await, 0);
    rig.orders.answer_created();
    assert_eq!(order("k").to(rig.gateway.addr).await.status, StatusCode::CREATED);
    assert_eq!((rig.orders.runs(), rig.place.events().await), (2, 2));
}

async fn a_late_answer_that_leaves_it_open_changes_nothing(which: Which) {
    let rig = Rig::with(which, "", SHORT, TWO_EVENTS).await;
    rig.orders.hold();
    rig.orders.answer_status(502);
    let first = times_out(&rig, "k").await;
    rig.orders.go();
    came_to(&rig.gateway, "unknown", 1).await;
    assert_held(&order("k").to(rig.gateway.addr).await);
    assert_eq!(audit(&rig.gateway, &first.record()).await, []);
    assert_eq!((rig.orders.runs(), rig.place.events().await), (1, 0));
}

async fn a_late_answer_that_breaks_off_changes_nothing(which: Which) {
    let cut = "HTTP/1.1 201 Created\r\nContent-Length: 20\r\n\r\n{\"id\":";
    let late = Reply::fin(cut).after(std::time::Duration::from_secs(1));
    let upstream = Upstream::always(late).await;
    let (place, gateway) =
        rig::gateway(which, &format!("http://{}", upstream.addr), "", SHORT).await;
    assert_eq!(order("k").to(gateway.addr).await.problem(), "upstream-timeout");
    came_to(&gateway, "missed", 1).await;
    assert_held(&order("k").to(gateway.addr).await);
    assert_eq!(place.status_of("k").await.as_deref(), Some("unknown"));
    assert_eq!(upstream.seen().len(), 1);
}

async fn a_late_answer_that_is_too_large_completes_without_its_body(which: Which) {
    let policy = format!("{SHORT}\nmax_response_body = 10");
    let rig = Rig::with(which, "", &policy, TWO_EVENTS).await;
    rig.orders.hold();
    times_out(&rig, "k").await;
    rig.orders.go();
    came_to(&rig.gateway, "completed", 1).await;
    assert_eq!(order("k").to(rig.gateway.addr).await.problem(), "response-not-retained");
    assert_eq!((rig.orders.runs(), rig.place.events().await), (1, 2));
}

async fn without_late_answers_the_connection_is_cut_at_the_time_out(which: Which) {
    let slow = Reply::keep(OK).after(std::time::Duration::from_secs(1));
    let upstream = Upstream::always(slow).await;
    let policy = format!("{SHORT}\nlate_answer = \"0s\"");
    let (place, gateway) =
        rig::gateway(which, &format!("http://{}", upstream.addr), "", &policy).await;
    let begun = std::time::Instant::now();
    assert_eq!(order("k").to(gateway.addr).await.problem(), "upstream-timeout");
    assert!(begun.elapsed() >= std::time::Duration::from_millis(500), "not before its time");
    assert_eq!(metric(gateway.admin, "oncegate_late_reads").await, 0);
    upstream.wait_for_closed(1).await;
    assert_held(&order("k").to(gateway.addr).await);
    assert_eq!(place.status_of("k").await.as_deref(), Some("unknown"));
    for result in ["completed", "missed", "no_room"] {
        assert_eq!(late_answers(gateway.admin, result).await, 0, "{result}");
    }
}

async fn late_answers_have_a_bound_of_their_own_and_take_no_room_from_requests(which: Which) {
    let place = rig::Place::new(which).await;
    let orders = crate::support::orders::Orders::start().await;
    let toml = rig::config_at(&place, &orders.url(), "127.0.0.1:0", "", SHORT, "");
    let limits = "in_flight_max = 1\nlate_answers_max = 1\n[admin]";
    let toml = toml.replacen("[admin]", limits, 1);
    let gateway = Gateway::start(&process::config(place.folder.path(), &toml));
    let rig = Rig { orders, place, gateway };
    rig.orders.hold();
    times_out(&rig, "k-1").await;
    times_out(&rig, "k-2").await;
    assert_eq!(metric(rig.gateway.admin, "oncegate_late_reads").await, 1);
    assert_eq!(late_answers(rig.gateway.admin, "no_room").await, 1);
    rig.orders.go();
    came_to(&rig.gateway, "completed", 1).await;
    assert!(order("k-1").to(rig.gateway.addr).await.replayed());
    assert_held(&order("k-2").to(rig.gateway.addr).await);
    // The room is free again.
    rig.orders.hold();
    times_out(&rig, "k-3").await;
    rig.orders.go();
    came_to(&rig.gateway, "completed", 2).await;
    assert_eq!(rig.orders.runs(), 3);
}

async fn a_late_answer_that_a_retry_has_overtaken_is_kept_in_the_audit(which: Which) {
    let policy = "timeout = \"1s\"\non_unknown = \"retry\"";
    let rig = Rig::with(which, "", policy, TWO_EVENTS).await;
    rig.orders.hold_only(1);
    let first = times_out(&rig, "k").await;
    let second = order("k").to(rig.gateway.addr).await;
    assert_eq!((second.status, second.record()), (StatusCode::CREATED, first.record()));
    assert_eq!(second.json()["id"], "order-2");
    rig.orders.go();
    came_to(&rig.gateway, "not_stored", 1).await;

    let replay = order("k").to(rig.gateway.addr).await;
    assert!(replay.replayed());
    assert_eq!(replay.body, second.body, "what stands stays");
    assert_eq!((rig.orders.runs(), rig.place.events().await), (2, 2), "no events of the first");
    let rows = audit(&rig.gateway, &first.record()).await;
    let [(action, detail)] = &rows[..] else { panic!("one row: {rows:?}") };
    assert_eq!(action, "late_outcome");
    assert_eq!((&detail["attempt"], &detail["status"]), (&json!(1), &json!(201)));
    assert_eq!(unpacked(&detail["body_base64"])["id"], "order-1");
    let location = json!({ "name": "location", "value": "/orders/order-1" });
    assert!(detail["headers"].as_array().unwrap().contains(&location), "{detail}");
    let events = detail["events"].as_array().unwrap();
    let kinds: Vec<_> = events.iter().map(|event| event["event_type"].clone()).collect();
    assert_eq!(kinds, ["order.created", "audit.order"]);
    assert_eq!(unpacked(&events[0]["payload_base64"])["data"]["order_id"], "order-1");
    assert_eq!(metric(rig.gateway.admin, "oncegate_late_outcomes_total").await, 1);
    let (code, out, errors) = command(&rig.gateway, &["records", "show", &first.record()]);
    assert_eq!(code, 0, "{errors}");
    assert!(out.contains("late_outcome") && out.contains("attempt 1 was answered 201"), "{out}");
}

async fn a_late_answer_does_not_end_the_attempt_that_runs(which: Which) {
    let policy = "timeout = \"3s\"\non_unknown = \"retry\"";
    let rig = Rig::with(which, "", policy, TWO_EVENTS).await;
    let addr = rig.gateway.addr;
    rig.orders.hold();
    let first = times_out(&rig, "k").await;
    let second = sending(order("k"), addr);
    rig.orders.asked(2).await;
    let waiting = sending(order("k"), addr);
    rig.orders.hold_only(2);
    came_to(&rig.gateway, "not_stored", 1).await;
    assert_eq!(rig.place.status_of("k").await.as_deref(), Some("in_progress"));
    rig.orders.go();
    let (second, waited) = (second.await.unwrap(), waiting.await.unwrap());
    assert_eq!((second.status, &second.json()["id"]), (StatusCode::CREATED, &json!("order-2")));
    assert_eq!(second.record(), first.record());
    assert_eq!(waited.body, second.body);
    assert_eq!(audit(&rig.gateway, &first.record()).await.len(), 1);
    assert_eq!((rig.orders.runs(), rig.place.events().await), (2, 2));
}

async fn a_stop_does_not_wait_for_late_answers(which: Which) {
    let mut rig = Rig::with(which, "", SHORT, "").await;
    rig.orders.hold();
    times_out(&rig, "k").await;
    assert_eq!(metric(rig.gateway.admin, "oncegate_late_reads").await, 1);
    rig.gateway.terminate();
    assert!(rig.gateway.exited().success());
    let log = rig.gateway.log();
    assert!(!log.contains("the grace is over"), "{log}");
    assert_eq!(rig.place.status_of("k").await.as_deref(), Some("unknown"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_answer_without_its_store_is_owed_and_written_later() {
    let (fault, rig) = rig::behind_a_fault("", "timeout = \"500ms\"\nwait = \"100ms\"").await;
    rig.orders.hold();
    times_out(&rig, "k").await;
    fault.refuse();
    fault.cut();
    rig.orders.go();
    came_to(&rig.gateway, "not_stored", 1).await;
    assert_eq!(metric(rig.gateway.admin, "oncegate_settling").await, 1);
    let meanwhile = order("k").to(rig.gateway.addr).await;
    assert_eq!(meanwhile.problem(), "in-progress", "this replica has the answer already");
    assert_eq!(rig.place.status_of("k").await.as_deref(), Some("unknown"));
    fault.pass();
    eventually("it is written", async || {
        rig.place.status_of("k").await.as_deref() == Some("completed")
    })
    .await;
    assert_eq!(rig.place.events().await, 1);
    eventually("nothing is owed", async || {
        metric(rig.gateway.admin, "oncegate_settling").await == 0
    })
    .await;
    assert!(order("k").to(rig.gateway.addr).await.replayed());
    assert_eq!(rig.orders.runs(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_outcome_without_its_store_is_owed_and_written_later() {
    let policy = "timeout = \"1s\"\non_unknown = \"retry\"";
    let (fault, rig) = rig::behind_a_fault("", policy).await;
    rig.orders.hold_only(1);
    let first = times_out(&rig, "k").await;
    assert_eq!(order("k").to(rig.gateway.addr).await.status, StatusCode::CREATED);
    fault.refuse();
    fault.cut();
    rig.orders.go();
    came_to(&rig.gateway, "not_stored", 1).await;
    fault.pass();
    let noted = "select count(*) from audit_log where action = 'late_outcome'";
    eventually("it is noted", async || rig.place.count(noted).await == 1).await;
    eventually("nothing is owed", async || {
        metric(rig.gateway.admin, "oncegate_settling").await == 0
    })
    .await;
    assert_eq!(rig.place.count(noted).await, 1);
    assert_eq!(audit(&rig.gateway, &first.record()).await.len(), 1);
    assert_eq!((rig.orders.runs(), rig.place.events().await), (2, 1));
}

/// The process ends in debt of a late outcome: the next one finds it in the spill, and notes it.
async fn a_late_outcome_that_is_owed_at_the_end_of_the_process_is_noted_by_the_next(which: Which) {
    let (orders, place) = (Orders::start().await, rig::Place::new(which).await);
    let policy = "timeout = \"1s\"\non_unknown = \"retry\"";
    let toml = rig::config_at(&place, &orders.url(), "127.0.0.1:0", "", policy, TWO_EVENTS)
        .replace("shutdown_grace = \"10s\"", "shutdown_grace = \"500ms\"");
    // More often than the process tries while it lives.
    let refused = (1..=100).map(|n| format!("before-note-late-outcome@{n}=error"));
    let refused = refused.collect::<Vec<_>>().join(",");
    let config = process::config(place.folder.path(), &toml);
    let gateway = Gateway::with_fault(&config, &refused);
    let mut rig = Rig { orders, place, gateway };
    rig.orders.hold_only(1);
    let first = times_out(&rig, "k").await;
    assert_eq!(order("k").to(rig.gateway.addr).await.status, StatusCode::CREATED);
    rig.orders.go();
    came_to(&rig.gateway, "not_stored", 1).await;
    rig.gateway.terminate();
    assert!(tokio::task::block_in_place(|| rig.gateway.exited()).success());
    let noted = "select count(*) from audit_log where action = 'late_outcome'";
    assert_eq!(rig.place.count(noted).await, 0);
    let again = tokio::task::block_in_place(|| rig.gateway.restart());
    let rows = audit(&again, &first.record()).await;
    let [(action, detail)] = &rows[..] else { panic!("one row: {rows:?}") };
    assert_eq!((action.as_str(), &detail["attempt"]), ("late_outcome", &json!(1)));
    assert_eq!(unpacked(&detail["body_base64"])["id"], "order-1");
    assert_eq!(detail["events"].as_array().unwrap().len(), 2);
    let replay = order("k").to(again.addr).await;
    assert_eq!(replay.json()["id"], "order-2", "what stands stays");
    assert_eq!((rig.orders.runs(), rig.place.events().await), (2, 2));
}

/// What the application keeps by itself is its answer, whatever it says in time. What it says later is noted, if it differs.
#[tokio::test(flavor = "multi_thread")]
async fn a_late_answer_is_audited_where_the_application_kept_another_one() {
    let rig = Rig::with(Which::Postgres, "", "timeout = \"1s\"", "").await;
    let own = async |key: &str, body: &str| {
        let own = format!(
            "select oncegate_complete(id, attempt, 201, 'text/plain', '{body}')::text
             from idempotency_records where key = '{key}'"
        );
        rig.place.rows(&own).await;
    };
    rig.orders.hold();
    let first = sending(order("in-time"), rig.gateway.addr);
    rig.orders.asked(1).await;
    own("in-time", "own").await;
    rig.orders.go();
    let first = first.await.unwrap();
    assert_eq!((first.status, &first.body[..]), (StatusCode::CREATED, &b"own"[..]), "{first:?}");
    assert_eq!(audit(&rig.gateway, &first.record()).await, []);

    for (key, body, result, rows) in [
        ("other", "own", "not_stored", 1),
        ("same", r#"{"id":"order-3","status":"created"}"#, "completed", 0),
    ] {
        rig.orders.hold();
        let late = times_out(&rig, key).await;
        own(key, body).await;
        rig.orders.go();
        came_to(&rig.gateway, result, 1).await;
        assert_eq!(audit(&rig.gateway, &late.record()).await.len(), rows, "{key}");
        let replay = order(key).to(rig.gateway.addr).await;
        assert_eq!((replay.replayed(), &replay.body[..]), (true, body.as_bytes()));
    }
    assert_eq!(metric(rig.gateway.admin, "oncegate_late_outcomes_total").await, 1);
    assert_eq!((rig.orders.runs(), rig.place.events().await), (3, 0));
}
