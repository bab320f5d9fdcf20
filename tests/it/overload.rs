//! Limits hold, and are felt before anything is reserved: what is refused is refused at once, what was taken in ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use http::{Response, StatusCode};

use crate::support::client::{Answer, Ask, get, post};
use crate::support::orders::Orders;
use crate::support::process::{self, Gateway, eventually};
use crate::support::raw::{Raw, status};
use crate::support::rig::{Place, Rig, Which, config_at, on_both_stores};

const MIB: usize = 1 << 20;

on_both_stores! {
    at_four_times_its_capacity_it_serves_at_its_capacity,
    a_refusal_comes_before_the_body_and_leaves_nothing,
    duplicates_that_wait_stand_in_nobodys_way,
    answers_in_memory_are_bounded_together,
    callers_that_take_nothing_hold_the_room_of_their_own_answers_only,
}

fn order(key: &str) -> Ask {
    post("/orders", r#"{"customer":"c-1","amount":"129.90"}"#).tenant("acme").key(key)
}

/// With these limits in `[server]`.
async fn rig(which: Which, server: &str, store: &str, policy: &str) -> Rig {
    let (orders, place) = (Orders::start().await, Place::new(which).await);
    let toml = config_at(&place, &orders.url(), "127.0.0.1:0", store, policy, "");
    let toml = toml.replace("[server]", &format!("[server]\n{server}"));
    let gateway = Gateway::start(&process::config(place.folder.path(), &toml));
    Rig { orders, place, gateway }
}

fn is_overloaded(answer: &Answer) -> bool {
    if answer.status != StatusCode::SERVICE_UNAVAILABLE {
        return false;
    }
    assert_eq!(answer.problem(), "overloaded", "{answer:?}");
    assert_eq!(answer.json()["retry"], "same-key");
    let after: u64 = answer.header("retry-after").expect("a hint").parse().expect("seconds");
    assert!((1..=5).contains(&after), "{after}");
    true
}

/// Answers bodies of this many bytes.
fn large(rig: &Rig, bytes: usize) {
    let body = Bytes::from(vec![b'x'; bytes]);
    rig.orders.answer(move |_| Response::builder().status(201).body(body.clone().into()).unwrap());
}

/// Nothing is in progress, nothing unknown: this many results.
async fn all_completed(rig: &Rig, count: usize) {
    let completed = "select count(*) from idempotency_records where status = 'completed'";
    assert_eq!(rig.place.count(completed).await, count as i64);
    assert_eq!(rig.place.records().await, count as i64, "and no other record");
    assert_eq!(rig.orders.runs(), count, "each executed once");
}

async fn at_four_times_its_capacity_it_serves_at_its_capacity(which: Which) {
    const CAPACITY: usize = 8;
    const CLIENTS: usize = 4 * CAPACITY;
    const EACH: usize = 10;
    let rig = rig(which, "in_flight_max = 8", "", "").await;
    rig.orders.hold();
    let (addr, refused) = (rig.gateway.addr, Arc::new(AtomicUsize::new(0)));
    let clients = (0..CLIENTS).map(|client| {
        let refused = Arc::clone(&refused);
        tokio::spawn(async move {
            for n in 0..EACH {
                let ask = order(&format!("k-{client}-{n}"));
                loop {
                    let answer = ask.to(addr).await;
                    if !is_overloaded(&answer) {
                        assert_eq!(answer.status, StatusCode::CREATED, "{answer:?}");
                        assert!(!answer.replayed(), "what was refused was not executed");
                        break;
                    }
                    refused.fetch_add(1, Ordering::SeqCst);
                    // A patient client.
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        })
    });
    let clients: Vec<_> = clients.collect();
    rig.orders.asked(CAPACITY).await;
    eventually("the others are refused while the first are executed", async || {
        refused.load(Ordering::SeqCst) > 3 * CLIENTS
    })
    .await;
    assert_eq!(rig.orders.runs(), CAPACITY, "as many as it may, and no more");
    assert_eq!(rig.place.records().await, CAPACITY as i64, "a refusal leaves nothing");
    rig.orders.pace(Duration::from_millis(5));
    rig.orders.go();
    for client in join_all(clients).await {
        client.unwrap();
    }
    all_completed(&rig, CLIENTS * EACH).await;
    let gauges = get("/metrics").to(rig.gateway.admin).await.body;
    let gauges = String::from_utf8(gauges.to_vec()).unwrap();
    let counted = gauges.lines().find_map(|line| line.split_once("reply=\"overloaded\"} "));
    assert!(counted.is_some_and(|(_, count)| count != "0"), "they are counted");
}

async fn a_refusal_comes_before_the_body_and_leaves_nothing(which: Which) {
    let limits = ["in_flight_max = 1", "buffered_bytes_max = \"2049KiB\""];
    for limit in limits {
        let rig = rig(which, limit, "", "").await;
        rig.orders.hold();
        let addr = rig.gateway.addr;
        let first = tokio::spawn(async move { order("first").to(addr).await });
        rig.orders.asked(1).await;
        let head = "POST /orders HTTP/1.1\r\nHost: a\r\nX-Tenant-Id: acme\r\nIdempotency-Key: k\r\nExpect: 100-continue\r\nContent-Length: 1048576\r\n\r\n";
        let answer = Raw::sending(addr, head).await.answer().await;
        assert_eq!(status(&answer), 503, "{limit}: no byte of the body was asked for: {answer}");
        assert!(is_overloaded(&order("k").body(vec![b' '; MIB]).to(addr).await), "{limit}");
        assert_eq!(rig.place.status_of("k").await, None, "{limit}");
        // What no route names is not held up by any of this.
        rig.orders.go();
        assert_eq!(get("/elsewhere").to(addr).await.status, StatusCode::CREATED, "{limit}");
        assert_eq!(first.await.unwrap().status, StatusCode::CREATED);
        let retried = order("k").to(addr).await;
        assert_eq!((retried.status, retried.replayed()), (StatusCode::CREATED, false), "{limit}");
    }
}

async fn duplicates_that_wait_stand_in_nobodys_way(which: Which) {
    let rig = rig(which, "in_flight_max = 2\nwaiting_max = 3", "", "").await;
    let addr = rig.gateway.addr;
    let ask = |key: &'static str| tokio::spawn(async move { order(key).to(addr).await });
    rig.orders.hold();
    let first = ask("one");
    rig.orders.asked(1).await;
    let mut waiting = Vec::new();
    for count in 1..=3 {
        // One after the other: until it is known for a duplicate it counts among those that are worked on.
        waiting.push(ask("one"));
        let gauge = async || {
            let text = get("/metrics").to(rig.gateway.admin).await.body;
            let text = String::from_utf8(text.to_vec()).unwrap();
            text.contains(&format!("oncegate_waiting {count}\n"))
        };
        eventually("it waits", gauge).await;
    }
    assert!(is_overloaded(&order("one").to(addr).await), "a fourth has no place to wait");
    let other = ask("two");
    rig.orders.asked(2).await;
    assert!(is_overloaded(&order("three").to(addr).await), "two are worked on");
    rig.orders.go();
    assert_eq!(first.await.unwrap().status, StatusCode::CREATED);
    for waited in waiting {
        assert!(waited.await.unwrap().replayed());
    }
    assert_eq!(other.await.unwrap().status, StatusCode::CREATED);
    assert_eq!(order("three").to(addr).await.status, StatusCode::CREATED);
    all_completed(&rig, 3).await;
}

async fn answers_in_memory_are_bounded_together(which: Which) {
    const ANSWER: usize = 4 * MIB;
    let policy = "max_response_body = \"4MiB\"\nmax_request_body = \"1KiB\"";
    // Room for five answers of this size.
    let rig = rig(which, "buffered_bytes_max = \"21MiB\"", "cache_bytes = 0", policy).await;
    large(&rig, ANSWER);
    let addr = rig.gateway.addr;
    assert_eq!(order("warm").to(addr).await.body.len(), ANSWER);
    let before = rig.gateway.most_memory();
    rig.orders.hold();
    let begun = (0..60).map(|n| {
        tokio::spawn(async move {
            let ask = order(&format!("k{n}"));
            let first = ask.to(addr).await;
            (ask, first)
        })
    });
    let begun: Vec<_> = begun.collect();
    rig.orders.asked(6).await;
    eventually("all others are refused", async || {
        let text = get("/metrics").to(rig.gateway.admin).await.body;
        let text = String::from_utf8(text.to_vec()).unwrap();
        text.lines().any(|line| line.contains("reply=\"overloaded\"") && line.ends_with(" 55"))
    })
    .await;
    assert_eq!(rig.orders.runs(), 6, "the first one, and as many as there is room for");
    rig.orders.go();
    let mut refused = Vec::new();
    for answer in join_all(begun).await {
        let (ask, answer) = answer.unwrap();
        if is_overloaded(&answer) {
            refused.push(ask);
        } else {
            assert_eq!(answer.body.len(), ANSWER);
        }
    }
    assert_eq!(refused.len(), 55);
    for ask in &refused[..10] {
        assert_eq!(ask.to(addr).await.body.len(), ANSWER, "room again");
        assert!(ask.to(addr).await.replayed(), "and the answer was kept");
    }
    all_completed(&rig, 16).await;
    let grown = rig.gateway.most_memory().saturating_sub(before);
    // Joining, storing and reading back hold a body more than once for a moment.
    assert!(grown < 120 * MIB as u64, "grown by {grown} bytes");
}

async fn callers_that_take_nothing_hold_the_room_of_their_own_answers_only(which: Which) {
    const ANSWER: usize = 12 * MIB;
    let policy = "max_response_body = \"12MiB\"\nmax_request_body = \"1KiB\"";
    // Room for two.
    let rig = rig(which, "buffered_bytes_max = \"26MiB\"", "cache_bytes = 0", policy).await;
    large(&rig, ANSWER);
    let addr = rig.gateway.addr;
    assert_eq!(order("k").to(addr).await.body.len(), ANSWER);
    let ask = |key: &str| {
        format!(
            "POST /orders HTTP/1.1\r\nHost: a\r\nX-Tenant-Id: acme\r\nIdempotency-Key: {key}\r\nContent-Length: 0\r\n\r\n"
        )
    };
    // One first answer and one replay, and neither caller reads.
    let mut first = Raw::sending(addr, ask("slow")).await;
    eventually("it is executed", async || {
        rig.place.status_of("slow").await.as_deref() == Some("completed")
    })
    .await;
    let replay = Raw::sending(addr, ask("slow")).await;
    replay.stream.readable().await.unwrap();
    for n in 0..20 {
        assert!(is_overloaded(&order(&format!("k{n}")).to(addr).await), "{n}");
    }
    assert!(is_overloaded(&order("k").to(addr).await), "a replay needs room, too");
    assert_eq!(rig.orders.runs(), 2);
    assert!(first.answer().await.len() > ANSWER, "all of it");
    eventually("what is read is given back", async || {
        let answer = order("k").to(addr).await;
        assert!(answer.replayed() || is_overloaded(&answer));
        answer.replayed()
    })
    .await;
    drop(replay);
    eventually("and what nobody wants any more", async || {
        let both = [order("a"), order("b")];
        let answers = join_all(both.iter().map(|ask| ask.to(addr))).await;
        answers.iter().all(|answer| answer.status == StatusCode::CREATED)
    })
    .await;
}
