//! Several gateway processes on one Postgres: one execution from all sides, and what becomes of a replica's work
//! when it dies, sleeps or is slow.

use std::collections::HashSet;
use std::net::SocketAddr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::future::join_all;
use http::StatusCode;

use crate::support::client::Answer;
use crate::support::fleet::{TWO_EVENTS, command, listed, metric, order, replicas, sending};
use crate::support::orders::Orders;
use crate::support::process::{Gateway, eventually};
use crate::support::rig::{Place, Which};

async fn parts() -> (Orders, Place) {
    (Orders::start().await, Place::new(Which::Postgres).await)
}

/// Sixty requests under one key, twenty to each of three replicas.
fn from_all_sides(gateways: &[Gateway], key: &str) -> Vec<tokio::task::JoinHandle<Answer>> {
    (0..60).map(|n| sending(order(key), gateways[n % gateways.len()].addr)).collect()
}

async fn answers(tasks: Vec<tokio::task::JoinHandle<Answer>>) -> Vec<Answer> {
    join_all(tasks).await.into_iter().map(Result::unwrap).collect()
}

fn assert_equal_and_created(answers: &[Answer]) {
    for answer in answers {
        assert_eq!(answer.status, StatusCode::CREATED, "{answer:?}");
        assert_eq!(answer.body, answers[0].body);
        assert_eq!(answer.record(), answers[0].record());
    }
    assert_eq!(answers.iter().filter(|answer| !answer.replayed()).count(), 1, "one is the first");
}

fn problems(answers: &[Answer]) -> HashSet<String> {
    answers.iter().map(Answer::problem).collect()
}

async fn marked_unknown(gateway: &Gateway, record: &str) {
    eventually("the record is unknown", async || {
        listed(gateway, "unknown").contains(&record.to_owned())
    })
    .await;
}

/// The id of the record under a key, once there is one.
async fn record_of(place: &Place, key: &str) -> String {
    let sql = format!("select id from idempotency_records where key = '{key}'");
    place.rows(&sql).await[0][0].clone().expect("an id")
}

#[tokio::test(flavor = "multi_thread")]
async fn one_key_from_all_sides_is_one_execution() {
    let (orders, place) = parts().await;
    let gateways = replicas(3, &place, &orders.url(), "", "");
    for round in 0..5 {
        let key = format!("k-{round}");
        let answers = answers(from_all_sides(&gateways, &key)).await;
        assert_equal_and_created(&answers);
        assert_eq!(orders.runs_of(&key), 1);
    }
    assert_eq!(place.records().await, 5);
    assert_eq!(place.events().await, 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn waiters_on_other_replicas_get_the_answer_too() {
    let (orders, place) = parts().await;
    let gateways = replicas(3, &place, &orders.url(), "wait = \"30s\"", "");
    orders.hold();
    let tasks = from_all_sides(&gateways, "k");
    for gateway in &gateways {
        // One asks the database, the others wait in memory.
        eventually("all but one wait", async || {
            metric(gateway.admin, "oncegate_waiting").await == 19
        })
        .await;
    }
    orders.asked(1).await;
    orders.go();
    assert_equal_and_created(&answers(tasks).await);
    assert_eq!(orders.runs(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_killed_replica_was_executing_is_unknown_until_an_operator_says() {
    let (orders, place) = parts().await;
    let mut gateways = replicas(3, &place, &orders.url(), "wait = \"30s\"", "");
    orders.hold();
    let to = gateways[0].addr;
    let first = tokio::spawn(async move { order("k").send(to).await });
    orders.asked(1).await;
    let record = record_of(&place, "k").await;
    let waiting: Vec<_> = (0..20).map(|n| sending(order("k"), gateways[1 + n % 2].addr)).collect();
    for gateway in &gateways[1..] {
        eventually("they wait", async || metric(gateway.admin, "oncegate_waiting").await == 9)
            .await;
    }

    let release = ["records", "release", &record, "--reason", "it did not run"];
    let (code, out, errors) = command(&gateways[1], &release);
    assert_eq!(code, 1, "a live owner's record is not released: {out}{errors}");
    let owner = "select owner from idempotency_records where key = 'k'";
    let owner = place.rows(owner).await[0][0].clone().unwrap();
    assert!(format!("{out}{errors}").contains(&owner), "who runs it: {out}{errors}");

    gateways[0].kill9();
    assert!(first.await.unwrap().is_err(), "its caller gets nothing");
    let waited = answers(waiting).await;
    assert_eq!(problems(&waited), HashSet::from(["outcome-unknown".to_owned()]));
    for gateway in &gateways[1..] {
        let later = order("k").to(gateway.addr).await;
        assert_eq!(
            (later.status, later.problem()),
            (StatusCode::CONFLICT, "outcome-unknown".into())
        );
        assert_eq!(later.record(), record);
    }
    assert_eq!(orders.runs(), 1);
    marked_unknown(&gateways[1], &record).await;

    let (code, out, errors) = command(&gateways[1], &release);
    assert_eq!(code, 0, "{out}{errors}");
    orders.go();
    let again = order("k").to(gateways[2].addr).await;
    assert_eq!(again.status, StatusCode::CREATED);
    assert_ne!(again.record(), record);
    assert_eq!(orders.runs(), 2);
    assert!(order("k").to(gateways[1].addr).await.replayed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a06_live_work_is_not_taken_over_because_it_is_old() {
    let (orders, place) = parts().await;
    let gateways = replicas(2, &place, &orders.url(), "wait = \"1s\"", "");
    orders.hold();
    let first = sending(order("k"), gateways[0].addr);
    orders.asked(1).await;
    // The owner's lease has been renewed to twice its length beyond the reservation.
    let renewed = "select count(*) from idempotency_records r join oncegate_owners o on o.owner = r.owner \
                   where o.lease_until > r.created_at + interval '9 seconds'";
    eventually("two leases pass", async || {
        for gateway in &gateways {
            assert_eq!(order("k").to(gateway.addr).await.problem(), "in-progress");
        }
        place.count(renewed).await == 1
    })
    .await;
    orders.go();
    let first = first.await.unwrap();
    assert_eq!(first.status, StatusCode::CREATED);
    for gateway in &gateways {
        let replay = order("k").to(gateway.addr).await;
        assert!(replay.replayed());
        assert_eq!(replay.body, first.body);
    }
    assert_eq!(orders.runs(), 1);
}

/// Whether every thread of a process is stopped: the signal takes a moment to reach all of them.
pub(crate) fn asleep(pid: u32) -> bool {
    std::fs::read_dir(format!("/proc/{pid}/task")).expect("its threads").flatten().all(|thread| {
        let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T'))
    })
}

/// A replica that is stopped after the API was asked, whose API has answered, and whose record an operator has
/// released after its lease ran out. What comes back is its caller.
async fn asleep_and_released(
    orders: &Orders,
    place: &Place,
    gateways: &[Gateway],
) -> tokio::task::JoinHandle<Answer> {
    orders.hold();
    let first = sending(order("k"), gateways[0].addr);
    orders.asked(1).await;
    let record = record_of(place, "k").await;
    gateways[0].signal("STOP");
    eventually("every thread of it sleeps", async || asleep(gateways[0].pid())).await;
    orders.go();
    marked_unknown(&gateways[1], &record).await;
    let (code, out, errors) = command(&gateways[1], &["records", "release", &record]);
    assert_eq!(code, 0, "{out}{errors}");
    first
}

/// The outcome of the attempt that slept stands in the audit table, with what its API said.
async fn assert_late(place: &Place, first: &Answer, outcome: &str, events: usize) {
    let record = first.record();
    let sql = format!(
        "select detail from audit_log where action = 'late_outcome' and record_id = '{record}'"
    );
    let rows = place.rows(&sql).await;
    assert_eq!(rows.len(), 1, "once");
    let detail: serde_json::Value =
        serde_json::from_str(rows[0][0].as_ref().expect("a detail")).expect("JSON");
    assert_eq!(detail["outcome"], outcome, "{detail}");
    assert_eq!(detail["status"], first.status.as_u16());
    assert_eq!(detail["body_base64"], STANDARD.encode(&first.body));
    assert_eq!(detail["events"].as_array().map(Vec::len), Some(events));
}

#[tokio::test(flavor = "multi_thread")]
async fn a07_a_replica_that_wakes_up_does_not_write_over_its_successor() {
    let (orders, place) = parts().await;
    let gateways = replicas(2, &place, &orders.url(), "", TWO_EVENTS);
    let first = asleep_and_released(&orders, &place, &gateways).await;
    let second = order("k").to(gateways[1].addr).await;
    assert_eq!(second.json()["id"], "order-2", "the operator said that the first did not run");

    gateways[0].signal("CONT");
    let first = first.await.unwrap();
    assert_eq!(first.status, StatusCode::CREATED);
    assert_eq!(first.header("oncegate-stored"), Some("false"));
    assert_eq!(first.json()["id"], "order-1", "what its API said, and that it is not kept");
    assert_late(&place, &first, "completed", 2).await;
    for gateway in &gateways {
        let replay = order("k").to(gateway.addr).await;
        assert!(replay.replayed());
        assert_eq!(replay.body, second.body, "the stored answer stays");
    }
    let ours =
        format!("select count(*) from outbox_events where record_id = '{}'", second.record());
    assert_eq!((place.count(&ours).await, place.events().await), (2, 2), "no events of the first");
    assert_eq!(orders.runs(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a08_a_late_release_does_not_free_the_successors_claim() {
    let (orders, place) = parts().await;
    let gateways = replicas(2, &place, &orders.url(), "wait = \"1s\"", "");
    // The first attempt fails in a way that frees its key.
    orders.answer_status(429);
    let first = asleep_and_released(&orders, &place, &gateways).await;
    orders.answer_created();
    orders.hold();
    let second = sending(order("k"), gateways[1].addr);
    orders.asked(2).await;
    let claim = record_of(&place, "k").await;

    gateways[0].signal("CONT");
    let first = first.await.unwrap();
    assert_eq!(first.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(first.header("oncegate-stored"), Some("false"));
    assert_late(&place, &first, "released", 0).await;
    assert_eq!(record_of(&place, "k").await, claim, "the second attempt's claim stands");
    assert_eq!(place.status_of("k").await.as_deref(), Some("in_progress"));
    let addrs: [SocketAddr; 2] = [gateways[0].addr, gateways[1].addr];
    for addr in addrs {
        assert_eq!(order("k").to(addr).await.problem(), "in-progress");
    }
    orders.go();
    assert_eq!(second.await.unwrap().status, StatusCode::CREATED);
    assert_eq!(orders.runs(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_replica_lets_go_of_an_answer_that_an_operator_has_released() {
    let (orders, place) = parts().await;
    let gateways = replicas(2, &place, &orders.url(), "", "");
    let first = order("k").to(gateways[0].addr).await;
    for gateway in &gateways {
        assert!(order("k").to(gateway.addr).await.replayed());
    }
    let release = ["records", "release", &first.record(), "--completed"];
    let (code, out, errors) = command(&gateways[1], &release);
    assert_eq!(code, 0, "{out}{errors}");
    for gateway in &gateways {
        let id = async || order("k").to(gateway.addr).await.json()["id"].clone();
        eventually("it has the new answer", async || id().await == "order-2").await;
        assert_eq!(id().await, "order-2", "and no other from then on");
    }
    assert_eq!(orders.runs(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_that_times_out_gets_what_an_operator_has_completed_meanwhile() {
    let (orders, place) = parts().await;
    let policy = "timeout = \"2s\"\nwait = \"30s\"\nlate_answer = \"0s\"";
    let gateways = replicas(2, &place, &orders.url(), policy, "");
    orders.hold();
    let first = sending(order("k"), gateways[0].addr);
    orders.asked(1).await;
    let waiting = sending(order("k"), gateways[0].addr);
    eventually("it waits", async || metric(gateways[0].admin, "oncegate_waiting").await == 1).await;
    let record = record_of(&place, "k").await;
    gateways[0].signal("STOP");
    marked_unknown(&gateways[1], &record).await;
    let said = ["records", "complete", &record, "--status", "201", "--body", "by hand"];
    let (code, out, errors) = command(&gateways[1], &said);
    assert_eq!(code, 0, "{out}{errors}");

    gateways[0].signal("CONT");
    for answer in [first.await.unwrap(), waiting.await.unwrap()] {
        assert!(answer.replayed(), "what stands, not that nobody knows: {answer:?}");
        assert_eq!((answer.record(), answer.body), (record.clone(), "by hand".into()));
    }
    assert_eq!(orders.runs(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_slept_takes_a_new_owner_id_and_serves() {
    let (orders, place) = parts().await;
    let gateways = replicas(2, &place, &orders.url(), "", "");
    let ended = "select count(*) from oncegate_owners where lease_until <= clock_timestamp()";
    gateways[0].signal("STOP");
    eventually("its lease runs out", async || place.count(ended).await == 1).await;
    gateways[0].signal("CONT");
    let answer = order("k").to(gateways[0].addr).await;
    assert_eq!(answer.status, StatusCode::CREATED, "{answer:?}");
    assert_eq!(place.count("select count(*) from oncegate_owners").await, 3);
    assert!(order("k").to(gateways[1].addr).await.replayed());
}
