//! Postgres goes away and comes back: nothing is forwarded unprotected, nothing that was promised is lost, and the
//! gateway needs no restart.

use http::{Method, StatusCode};

use crate::support::client::{get, post};
use crate::support::fleet::{TWO_EVENTS, metric, order, replicas, sending};
use crate::support::orders::Orders;
use crate::support::postgres::Cluster;
use crate::support::process::{self, eventually};
use crate::support::rig::{self, Place};

async fn parts() -> (Cluster, Orders, Place) {
    let cluster = tokio::task::block_in_place(Cluster::own);
    let place = Place::at(cluster.database());
    (cluster, Orders::start().await, place)
}

#[tokio::test(flavor = "multi_thread")]
async fn a26_without_its_store_nothing_is_forwarded_under_a_key() {
    let (cluster, orders, place) = parts().await;
    let gateway = replicas(1, &place, &orders.url(), "", "").remove(0);
    let before = order("before").to(gateway.addr).await;
    assert_eq!(before.status, StatusCode::CREATED);

    cluster.stop();
    let refused = order("k").to(gateway.addr).await;
    assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(refused.problem(), "store-unavailable");
    let after: u32 = refused.header("retry-after").expect("Retry-After").parse().unwrap();
    assert!(after >= 1);
    let shown = String::from_utf8_lossy(&refused.body).into_owned();
    for inside in [cluster.port().to_string().as_str(), "postgres", "127.0.0.1", "insert", "INSERT"]
    {
        assert!(!shown.contains(inside), "{inside} in {shown}");
    }
    assert_eq!(orders.runs_of("k"), 0);
    // What no route names, and what was completed, needs no store.
    assert_eq!(get("/orders").to(gateway.addr).await.status, StatusCode::CREATED);
    let unnamed = post("/elsewhere", "{}").method(Method::PUT).key("k");
    assert_eq!(unnamed.to(gateway.addr).await.status, StatusCode::CREATED);
    assert_eq!(orders.runs_of("k"), 1, "the unnamed one only");
    let replay = order("before").to(gateway.addr).await;
    assert!(replay.replayed());
    assert_eq!(replay.body, before.body);
    eventually("readiness tells", async || {
        get("/readyz").to(gateway.admin).await.status == StatusCode::SERVICE_UNAVAILABLE
    })
    .await;

    tokio::task::block_in_place(|| cluster.start());
    eventually("it serves again", async || {
        order("k").to(gateway.addr).await.status == StatusCode::CREATED
    })
    .await;
    assert_eq!(orders.runs_of("k"), 2);
    assert_eq!(place.records().await, 2);
    eventually("readiness tells", async || {
        get("/readyz").to(gateway.admin).await.status == StatusCode::OK
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a25_a_completion_outlives_a_kill_of_the_database() {
    let (cluster, orders, place) = parts().await;
    let mut gateway = replicas(1, &place, &orders.url(), "", TWO_EVENTS).remove(0);
    let first = order("k").to(gateway.addr).await;
    cluster.kill9();
    assert_eq!(first.status, StatusCode::CREATED);
    assert_eq!(first.header("oncegate-stored"), None, "it was durable when it was answered");
    // Another process, which remembers nothing.
    gateway.kill9();
    tokio::task::block_in_place(|| cluster.start());
    let gateway = tokio::task::block_in_place(|| gateway.restart());
    let replay = order("k").to(gateway.addr).await;
    assert!(replay.replayed());
    assert_eq!((replay.status, &replay.body), (first.status, &first.body));
    assert_eq!(orders.runs(), 1);
    assert_eq!(place.events().await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a10_an_answer_that_the_store_did_not_take_is_kept_and_written_later() {
    let (cluster, orders, place) = parts().await;
    let gateways = replicas(2, &place, &orders.url(), "wait = \"1s\"", TWO_EVENTS);
    let gateway = &gateways[0];
    orders.hold();
    let first = sending(order("k"), gateway.addr);
    orders.asked(1).await;
    cluster.stop();
    orders.go();
    let first = first.await.unwrap();
    assert_eq!(first.status, StatusCode::CREATED, "the API's answer");
    assert_eq!(first.header("oncegate-stored"), None, "it is in the spill");
    assert_eq!(first.json()["id"], "order-1");
    let meanwhile = order("k").to(gateway.addr).await;
    assert_eq!(meanwhile.problem(), "in-progress", "it is still owed to the database");

    tokio::task::block_in_place(|| cluster.start());
    eventually("it is completed", async || {
        place.status_of("k").await.as_deref() == Some("completed")
    })
    .await;
    assert_eq!(place.events().await, 2, "with its events");
    for gateway in &gateways {
        let replay = order("k").to(gateway.addr).await;
        assert!(replay.replayed());
        assert_eq!(replay.body, first.body);
    }
    assert_eq!(orders.runs(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reservation_cut_off_by_a_kill_of_the_database_is_not_lost_and_not_repeated() {
    let (cluster, orders, place) = parts().await;
    let gateway = replicas(1, &place, &orders.url(), "wait = \"1s\"", TWO_EVENTS).remove(0);
    // Many at once, so that some are in the middle of a commit.
    let tasks: Vec<_> = (0..40).map(|n| sending(order(&format!("k-{n}")), gateway.addr)).collect();
    orders.asked(1).await;
    cluster.kill9();
    for task in tasks {
        let answer = task.await.unwrap();
        let fine = answer.status == StatusCode::CREATED;
        assert!(fine || answer.problem() == "store-unavailable", "{answer:?}");
    }
    tokio::task::block_in_place(|| cluster.start());
    for n in 0..40 {
        let key = format!("k-{n}");
        eventually("each key ends well", async || {
            order(&key).to(gateway.addr).await.status == StatusCode::CREATED
        })
        .await;
        assert_eq!(orders.runs_of(&key), 1, "{key}");
    }
    assert_eq!(place.records().await, 40);
    assert_eq!(place.events().await, 80);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_for_a_lost_outcome_gets_what_an_operator_has_completed_meanwhile() {
    let policy = "timeout = \"1s\"\nwait = \"30s\"\nlate_answer = \"0s\"";
    let (fault, rig) = rig::behind_a_fault("lease = \"3s\"", policy).await;
    rig.orders.hold();
    let first = sending(order("k"), rig.gateway.addr);
    rig.orders.asked(1).await;
    let waiting = sending(order("k"), rig.gateway.addr);
    eventually("it waits", async || metric(rig.gateway.admin, "oncegate_waiting").await == 1).await;
    fault.refuse();
    fault.cut();
    // That its outcome is unknown is owed to the database from now on.
    assert_eq!(first.await.unwrap().problem(), "upstream-timeout");
    let over = "select count(*) from oncegate_owners where lease_until <= clock_timestamp()";
    eventually("its lease runs out", async || rig.place.count(over).await == 1).await;
    let record = rig.place.rows("select id from idempotency_records").await[0][0].clone().unwrap();
    let direct = rig::config(&rig.place, &rig.orders.url(), "");
    let direct = process::config(rig.place.folder.path(), &direct);
    let said = ["records", "complete", &record, "--status", "201", "--body", "by hand"];
    let (code, out, errors) =
        process::run(&[said.as_slice(), &["--config", direct.to_str().unwrap()]].concat());
    assert_eq!(code, 0, "{out}{errors}");

    fault.pass();
    let answer = waiting.await.unwrap();
    assert!(answer.replayed(), "what stands, not that nobody knows: {answer:?}");
    assert_eq!(answer.body, "by hand");
    assert_eq!(rig.orders.runs(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn readiness_says_why_a_database_cannot_be_reached_that_was_there_before() {
    let (fault, rig) = rig::behind_a_fault("connect_timeout = \"2s\"", "").await;
    let cause = async || {
        let answer = get("/readyz").to(rig.gateway.admin).await;
        (answer.status, answer.json()["cause"].as_str().unwrap_or_default().to_owned())
    };
    assert_eq!(cause().await, (StatusCode::OK, String::new()));
    let away = StatusCode::SERVICE_UNAVAILABLE;
    fault.stop_listening().await;
    fault.cut();
    eventually("nobody listens", async || {
        let (status, cause) = cause().await;
        status == away && cause.contains("Connection refused")
    })
    .await;
    fault.hang();
    fault.listen();
    eventually("nobody answers", async || {
        let (status, cause) = cause().await;
        status == away && cause.contains("connecting took too long")
    })
    .await;
    fault.pass();
    fault.cut();
    eventually("it is back", async || cause().await == (StatusCode::OK, String::new())).await;
}
