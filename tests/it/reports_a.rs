//! Who executes: what public bug reports say goes wrong (A1 to A23), against the real program.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use http::StatusCode;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::support::client::{Answer, Ask, post};
use crate::support::orders::Orders;
use crate::support::process::{eventually, free_port};
use crate::support::raw::{Raw, find, header, status};
use crate::support::rig::{self, Rig, Which, on_both_stores};
use crate::support::upstream::{Reply, Upstream};

const BODY: &str = r#"{"customer":"c-1","amount":"129.90"}"#;

fn order() -> Ask {
    post("/orders", BODY).tenant("acme")
}

/// The order as bytes on a connection, with more header lines.
fn raw_order(key: &str, lines: &str) -> String {
    let length = BODY.len();
    format!(
        "POST /orders HTTP/1.1\r\nHost: a\r\nX-Tenant-Id: acme\r\nIdempotency-Key: {key}\r\nContent-Type: application/json\r\n{lines}Content-Length: {length}\r\n\r\n{BODY}"
    )
}

/// A refused duplicate of a running request, with a hint when to come again.
fn is_in_progress(answer: &Answer) -> bool {
    answer.status == StatusCode::CONFLICT
        && answer.problem() == "in-progress"
        && retry_after(answer) >= 1
}

fn retry_after(answer: &Answer) -> u64 {
    answer.header("retry-after").expect("a time to come again").parse().expect("whole seconds")
}

fn assert_held(answer: &Answer) {
    assert_eq!(answer.status, StatusCode::CONFLICT, "{answer:?}");
    assert_eq!(answer.problem(), "outcome-unknown");
    assert!(retry_after(answer) >= 30, "an invitation to loop: {answer:?}");
}

on_both_stores! {
    a01_the_same_request_fifty_times_at_once_runs_once,
    a01_of_two_requests_under_one_key_one_runs,
    a02_losers_of_the_race_replay_or_are_told_that_it_runs,
    a11_a_caller_that_hangs_up_loses_nothing,
    a11_a_caller_that_leaves_within_its_body_reserves_nothing,
    a13_after_a_time_out_nothing_runs_again,
    a14_an_upstream_that_cannot_be_reached_frees_the_key,
    a15_a_broken_exchange_is_unknown_and_never_stored,
    a15_a_connection_that_is_closed_unread_is_judged_by_its_bytes,
    a15_an_early_answer_is_still_an_answer,
    a15_an_odd_head_is_still_an_answer,
    a16_one_key_is_sent_once_to_an_upstream_that_closes_idle_connections,
    a17_redirects_are_answers,
    a18_interim_answers_are_not_the_answer,
    a20_a_wait_shorter_than_the_work_ends_without_a_second_run,
    a21_an_expired_row_that_is_not_swept_yet_blocks_nothing,
    a21_an_expired_row_is_not_compared,
    a23_only_what_is_completed_and_expired_is_swept_however_old_the_rest_is,
}

/// Fifty times the same request through each gateway; what the API and the answers say of it.
async fn storm(key: &str, gateways: &[SocketAddr], orders: &Orders, hold: bool) {
    let before = orders.runs();
    if hold {
        orders.hold();
    }
    let ask = order().key(key);
    let all = gateways.iter().flat_map(|addr| (0..50).map(|_| ask.to(*addr))).collect::<Vec<_>>();
    let release = async {
        if hold {
            orders.asked(before + 1).await;
            orders.go();
        }
    };
    let (answers, ()) = tokio::join!(join_all(all), release);
    let first = answers.iter().filter(|answer| answer.status == 201 && !answer.replayed()).count();
    assert_eq!(first, 1, "{key}: one fresh answer");
    for answer in &answers {
        let replay = answer.status == 201 && answer.body == answers[0].body;
        assert!(replay || is_in_progress(answer), "{key}: {answer:?}");
    }
    assert_eq!(orders.runs_of(key), 1, "{key}");
}

async fn a01_the_same_request_fifty_times_at_once_runs_once(which: Which) {
    let rig = Rig::start(which, "").await;
    for round in 0..20 {
        let hold = round % 2 == 0;
        storm(&format!("k{round}"), &[rig.gateway.addr], &rig.orders, hold).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a01_over_two_replicas_too() {
    let rig = Rig::start(Which::Postgres, "").await;
    let other = rig.gateway.restart();
    for round in 0..30 {
        let hold = round % 3 == 0;
        let both = [rig.gateway.addr, other.addr];
        storm(&format!("k{round}"), &both, &rig.orders, hold).await;
    }
    assert_eq!(rig.place.events().await, 30);
}

async fn a01_of_two_requests_under_one_key_one_runs(which: Which) {
    let rig = Rig::start(which, "").await;
    let other = (which == Which::Postgres).then(|| rig.gateway.restart());
    let second = other.as_ref().map_or(rig.gateway.addr, |gateway| gateway.addr);
    for round in 0..20 {
        let key = format!("k{round}");
        let asks = [order().key(&key), order().key(&key).body(r#"{"amount":"1.00"}"#)];
        let all =
            (0..40).map(|n| asks[n % 2].to(if n % 4 < 2 { rig.gateway.addr } else { second }));
        let answers = join_all(all).await;
        assert_eq!(rig.orders.runs_of(&key), 1);
        let ran = rig.orders.ledger().pop().unwrap().body == BODY;
        for (n, answer) in answers.iter().enumerate() {
            if (n % 2 == 0) == ran {
                assert_eq!(answer.status, StatusCode::CREATED, "{answer:?}");
            } else {
                assert_eq!(answer.problem(), "request-mismatch", "{answer:?}");
            }
        }
    }
    assert_eq!(rig.place.records().await, 20);
    assert_eq!(rig.place.events().await, 20);
}

async fn a02_losers_of_the_race_replay_or_are_told_that_it_runs(which: Which) {
    let rig = Rig::with(which, "", "wait = \"1ms\"", "").await;
    let other = (which == Which::Postgres).then(|| rig.gateway.restart());
    let second = other.as_ref().map_or(rig.gateway.addr, |gateway| gateway.addr);
    for round in 0..100 {
        let ask = order().key(&format!("k{round}"));
        let answers =
            join_all((0..10).map(|n| ask.to(if n % 2 == 0 { rig.gateway.addr } else { second })))
                .await;
        let fresh = |answer: &&Answer| answer.status == 201 && !answer.replayed();
        assert_eq!(answers.iter().filter(fresh).count(), 1);
        for answer in answers.iter().filter(|answer| !fresh(answer)) {
            let replay = answer.status == 201 && answer.replayed();
            assert!(replay || is_in_progress(answer), "{answer:?}");
        }
    }
    assert_eq!(rig.orders.runs(), 100);
}

#[tokio::test(flavor = "multi_thread")]
async fn a04_a_reservation_whose_commit_was_not_heard_of_is_recognised() {
    let (fault, Rig { orders, place, gateway }) = rig::behind_a_fault("", "").await;
    for round in 1..=5 {
        let key = format!("k{round}");
        fault.swallow_the_answer_to("-- reserve\n");
        let (addr, ask) = (gateway.addr, order().key(&key));
        let first = tokio::spawn(async move { ask.to(addr).await });
        eventually("the row is committed", async || place.records().await == round).await;
        assert!(fault.has_swallowed());
        fault.cut();
        let first = first.await.unwrap();
        assert_eq!(first.status, StatusCode::CREATED, "{first:?}");
        assert!(!first.replayed());
        assert!(order().key(&key).to(gateway.addr).await.replayed());
        assert_eq!(orders.runs_of(&key), 1);
        assert_eq!(place.events().await, round);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a04_a_reservation_that_stays_in_doubt_is_withdrawn() {
    let (fault, rig) = rig::behind_a_fault("reserve_timeout = \"1s\"", "").await;
    let Rig { orders, place, gateway } = rig;
    fault.swallow_the_answer_to("-- reserve\n");
    let addr = gateway.addr;
    let first = tokio::spawn(async move { order().key("k").to(addr).await });
    eventually("the row is committed", async || place.records().await == 1).await;
    fault.refuse();
    fault.cut();
    let first = first.await.unwrap();
    assert_eq!(first.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(first.problem(), "store-unavailable");
    assert_eq!(orders.runs(), 0, "what was refused is not sent later");
    fault.pass();
    eventually("the key is free again", async || {
        order().key("k").to(addr).await.status == StatusCode::CREATED
    })
    .await;
    assert!(order().key("k").to(addr).await.replayed());
    assert_eq!(orders.runs(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a04_a_completion_whose_commit_was_not_heard_of_stands_once() {
    let (fault, Rig { orders, place, gateway }) = rig::behind_a_fault("", "").await;
    orders.hold();
    let addr = gateway.addr;
    let first = tokio::spawn(async move { order().key("k").to(addr).await });
    orders.asked(1).await;
    fault.swallow_the_answer_to("-- complete\n");
    orders.go();
    eventually("the completion is committed", async || {
        place.status_of("k").await.as_deref() == Some("completed")
    })
    .await;
    assert!(fault.has_swallowed());
    fault.cut();
    let first = first.await.unwrap();
    assert_eq!(first.status, StatusCode::CREATED);
    let again = order().key("k").to(addr).await;
    assert!(again.replayed());
    assert_eq!(again.body, first.body);
    assert_eq!((orders.runs(), place.events().await), (1, 1));
}

async fn a11_a_caller_that_hangs_up_loses_nothing(which: Which) {
    let rig = Rig::with(which, "", "wait = \"100ms\"", "").await;
    let addr = rig.gateway.addr;
    for (round, how) in ["fin", "rst", "half-close"].into_iter().enumerate() {
        rig.orders.hold();
        let mut caller = Raw::sending(addr, raw_order(how, "")).await;
        rig.orders.asked(round + 1).await;
        match how {
            "half-close" => caller.half_close().await,
            "rst" => caller.stream.set_zero_linger().unwrap(),
            _ => {}
        }
        let half = (how == "half-close").then_some(caller);
        assert!(is_in_progress(&order().key(how).to(addr).await), "{how}: it still runs");
        rig.orders.go();
        eventually("its retry finds the result", async || {
            let answer = order().key(how).to(addr).await;
            assert!(answer.replayed() || is_in_progress(&answer), "{how}: {answer:?}");
            answer.replayed()
        })
        .await;
        drop(half);
        assert_eq!(rig.orders.runs_of(how), 1, "{how}");
    }
    assert_eq!(rig.place.events().await, 3);
}

async fn a11_a_caller_that_leaves_within_its_body_reserves_nothing(which: Which) {
    let rig = Rig::start(which, "").await;
    let whole = raw_order("k", "");
    for reset in [false, true] {
        let mut caller = Raw::sending(rig.gateway.addr, &whole[..whole.len() - 1]).await;
        if reset {
            caller.stream.set_zero_linger().unwrap();
        } else {
            caller.half_close().await;
            let (answer, _) = caller.rest().await;
            assert!(answer.is_empty() || status(&answer) == 400, "{answer}");
        }
    }
    // Later than what came before: were something of that reserved, this would not be the first.
    assert!(!order().key("k").to(rig.gateway.addr).await.replayed());
    assert_eq!(rig.orders.runs(), 1);
    assert_eq!(rig.place.records().await, 1);
}

async fn a13_after_a_time_out_nothing_runs_again(which: Which) {
    let mut rig = Rig::with(which, "", "timeout = \"700ms\"", "").await;
    let addr = rig.gateway.addr;
    rig.orders.hold();
    let first = tokio::spawn(async move { order().key("k").to(addr).await });
    rig.orders.asked(1).await;
    let waiting = tokio::spawn(async move { order().key("k").to(addr).await });
    let first = first.await.unwrap();
    assert_eq!(first.status, StatusCode::GATEWAY_TIMEOUT);
    assert_eq!(first.problem(), "upstream-timeout");
    assert_held(&waiting.await.unwrap());
    assert_eq!(rig.place.status_of("k").await.as_deref(), Some("unknown"));
    let retry = order().key("k").to(addr).await;
    assert_held(&retry);
    assert_eq!(retry.record(), first.record(), "the operator is told which");
    let listed = crate::support::client::get("/api/v1/records?status=unknown");
    assert_eq!(listed.to(rig.gateway.admin).await.json()["records"][0]["id"], first.record());
    rig.gateway.kill9();
    let again = rig.gateway.restart();
    assert_held(&order().key("k").to(again.addr).await);
    assert_eq!(rig.orders.runs(), 1);
    assert_eq!(rig.place.events().await, 0);
}

async fn a14_an_upstream_that_cannot_be_reached_frees_the_key(which: Which) {
    // Accepts, and answers to a TLS handshake with something else.
    let plain = Upstream::hasty(Reply::fin("HTTP/1.1 400 No TLS here\r\n\r\n")).await;
    let garbage = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let garbage_addr = garbage.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = garbage.accept().await {
            drop(stream.write_all(b"220 mail ready\r\n").await);
        }
    });
    let orders = Orders::start().await;
    for url in [
        format!("http://127.0.0.1:{}", free_port()),
        "http://no-such-name.invalid:80".to_owned(),
        format!("https://{garbage_addr}"),
    ] {
        let (place, mut gateway) = rig::gateway(which, &url, "", "").await;
        let answer = order().key("k").to(gateway.addr).await;
        assert_eq!(answer.status, StatusCode::BAD_GATEWAY, "{url}");
        assert_eq!(answer.problem(), "upstream-unreachable", "{url}");
        assert_eq!(answer.json()["retry"], "same-key");
        assert_eq!(place.records().await, 0, "{url}: the key is free");
        gateway.kill9();
        let toml = std::fs::read_to_string(&gateway.config).unwrap();
        std::fs::write(&gateway.config, toml.replace(&url, &orders.url())).unwrap();
        let gateway = gateway.restart();
        let before = orders.runs();
        assert_eq!(order().key("k").to(gateway.addr).await.status, StatusCode::CREATED, "{url}");
        assert!(order().key("k").to(gateway.addr).await.replayed());
        assert_eq!(orders.runs(), before + 1, "{url}");
        assert_eq!(place.events().await, 1);
    }
    assert_eq!(plain.seen().len(), 0);
}

/// How the exchange goes wrong after bytes were sent.
fn broken() -> Vec<(&'static str, Reply, bool)> {
    const CREATED: &str = "HTTP/1.1 201 Created\r\n";
    let short = format!("{CREATED}Content-Length: 10\r\n\r\nabc");
    let chunked = format!("{CREATED}Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n");
    let beginning = format!("{chunked}0\r\n");
    let endless = format!("{CREATED}\r\nhalf");
    let switch = "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n";
    vec![
        ("b: closes after the head", Reply::fin(""), true),
        ("b: resets after the head", Reply::reset(""), true),
        ("c: closes after the body", Reply::fin(""), false),
        ("c: resets after the body", Reply::reset(""), false),
        ("d: after the status line", Reply::fin(CREATED), false),
        ("d: within the status line", Reply::fin("HTTP/1.1 20"), false),
        ("d: resets after the status line", Reply::reset(CREATED), false),
        ("e: a short body", Reply::fin(&short), false),
        ("e: a short body and a reset", Reply::reset(&short), false),
        ("f: no last chunk", Reply::fin(&chunked), false),
        ("f: half a last chunk", Reply::fin(&beginning), false),
        ("f: no last chunk and a reset", Reply::reset(&chunked), false),
        ("no length, and a reset instead of an end", Reply::keep(&endless).then_reset(), false),
        ("a switch of protocols that nobody asked for", Reply::keep(switch), false),
        ("something else", Reply::fin("220 mail ready\r\n"), false),
    ]
}

async fn a15_a_broken_exchange_is_unknown_and_never_stored(which: Which) {
    for (name, reply, hasty) in broken() {
        let upstream =
            if hasty { Upstream::hasty(reply).await } else { Upstream::always(reply).await };
        let url = format!("http://{}", upstream.addr);
        let (place, gateway) = rig::gateway(which, &url, "", "").await;
        let first = order().key("k").to(gateway.addr).await;
        assert_eq!(first.status, StatusCode::BAD_GATEWAY, "{name}");
        assert_eq!(first.problem(), "upstream-failed", "{name}");
        assert_eq!(place.status_of("k").await.as_deref(), Some("unknown"), "{name}");
        assert_held(&order().key("k").to(gateway.addr).await);
        let kept = "select count(*) from idempotency_records where response_status is not null or response_body is not null";
        assert_eq!(place.count(kept).await, 0, "{name}");
        assert_eq!(place.events().await, 0, "{name}");
        assert_eq!(upstream.connections(), 1, "{name}: sent once");
    }
}

async fn a15_a_connection_that_is_closed_unread_is_judged_by_its_bytes(which: Which) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            stream.set_zero_linger().unwrap();
        }
    });
    let (place, gateway) = rig::gateway(which, &url, "", "").await;
    for round in 0..20 {
        let key = format!("k{round}");
        let answer = order().key(&key).to(gateway.addr).await;
        assert_eq!(answer.status, StatusCode::BAD_GATEWAY);
        let expected = match answer.problem().as_str() {
            "upstream-unreachable" => None,
            "upstream-failed" => Some("unknown".to_owned()),
            other => panic!("{other}"),
        };
        assert_eq!(place.status_of(&key).await, expected);
    }
    assert_eq!(place.events().await, 0);
}

async fn a15_an_early_answer_is_still_an_answer(which: Which) {
    let answer = "HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\nok";
    let upstream = Upstream::hasty(Reply::keep(answer)).await;
    let (_place, gateway) = rig::gateway(which, &format!("http://{}", upstream.addr), "", "").await;
    let large = order().key("k").body(vec![b'x'; 1 << 20]);
    for replayed in [false, true] {
        let answer = large.to(gateway.addr).await;
        assert_eq!((answer.status, answer.replayed()), (StatusCode::CREATED, replayed));
        assert_eq!(answer.body, "ok");
    }
    assert_eq!(upstream.connections(), 1);
}

async fn a15_an_odd_head_is_still_an_answer(which: Which) {
    let many = (0..150).map(|n| format!("X-{n}: {n}\r\n")).collect::<String>();
    let big = format!("X-Big: {}\r\n", "b".repeat(70 * 1024));
    for lines in [&many, &big, "X-A: one\r\n two\r\n", "X-A : b\r\n", "X(A): b\r\nX-B: b\r\n"] {
        let answer = format!("HTTP/1.1 201\r\n{lines}Content-Length: 2\r\n\r\nok");
        let upstream = Upstream::always(Reply::keep(answer)).await;
        let (place, gateway) =
            rig::gateway(which, &format!("http://{}", upstream.addr), "", "").await;
        let first = Raw::sending(gateway.addr, raw_order("k", "")).await.answer().await;
        let again = Raw::sending(gateway.addr, raw_order("k", "")).await.answer().await;
        let lines = &lines[..lines.len().min(40)];
        assert_eq!((status(&first), status(&again)), (201, 201), "{lines}");
        assert_eq!(header(&again, "idempotent-replayed").as_deref(), Some("true"), "{lines}");
        assert_eq!(place.status_of("k").await.as_deref(), Some("completed"), "{lines}");
        assert_eq!(upstream.seen().len(), 1, "{lines}");
    }
}

/// An upstream that keeps its connections and closes each exactly when the next request begins to arrive.
async fn closes_at_the_second_request() -> (SocketAddr, Arc<Mutex<Vec<u8>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (addr, received) = (listener.local_addr().unwrap(), Arc::new(Mutex::new(Vec::new())));
    let log = Arc::clone(&received);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let log = Arc::clone(&log);
            tokio::spawn(async move {
                let mut request = Vec::new();
                let mut answered = false;
                while let Ok(1..) = stream.read_buf(&mut request).await {
                    if answered {
                        break;
                    }
                    if find(&request, BODY.as_bytes()).is_some() {
                        log.lock().unwrap().extend(std::mem::take(&mut request));
                        let ok = b"HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\nok";
                        drop(stream.write_all(ok).await);
                        answered = true;
                    }
                }
                log.lock().unwrap().extend(request);
            });
        }
    });
    (addr, received)
}

async fn a16_one_key_is_sent_once_to_an_upstream_that_closes_idle_connections(which: Which) {
    let (addr, received) = closes_at_the_second_request().await;
    let url = format!("http://{addr}");
    let (place, gateway) = rig::gateway(which, &url, "", "require_key = false").await;
    for n in 0..200 {
        let key = format!("key-{n}-");
        let answer = order().key(&key).to(gateway.addr).await;
        assert_eq!(answer.status, StatusCode::CREATED, "{key}: nothing becomes unknown");
        // Writes without a key go through the pool. They may fail; they are never sent again.
        let answer = order().header("x-mark", format!("mark-{n}-")).to(gateway.addr).await;
        assert!(answer.status == 201 || answer.status == 502, "{answer:?}");
    }
    let received = String::from_utf8_lossy(&received.lock().unwrap()).into_owned();
    for n in 0..200 {
        assert_eq!(received.matches(&format!("key-{n}-")).count(), 1);
        assert!(received.matches(&format!("mark-{n}-")).count() <= 1);
    }
    assert_eq!(
        place.count("select count(*) from idempotency_records where status = 'completed'").await,
        200
    );
}

async fn a17_redirects_are_answers(which: Which) {
    let rig = Rig::start(which, "").await;
    for code in [301, 302, 303, 307, 308] {
        rig.orders.answer(move |_| {
            let answer = http::Response::builder().status(code).header("location", "/other?a=1");
            answer.body(bytes::Bytes::new().into()).unwrap()
        });
        let key = format!("k{code}");
        let first = order().key(&key).to(rig.gateway.addr).await;
        let again = order().key(&key).to(rig.gateway.addr).await;
        for answer in [&first, &again] {
            assert_eq!(answer.status.as_u16(), code);
            assert_eq!(answer.header("location"), Some("/other?a=1"));
        }
        assert!(again.replayed());
    }
    assert_eq!(rig.orders.runs(), 5);
    assert!(rig.orders.ledger().iter().all(|execution| execution.target == "/orders"));
}

async fn a18_interim_answers_are_not_the_answer(which: Which) {
    let answer = "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\nok";
    let upstream = Upstream::always(Reply::keep(answer)).await;
    let (_place, gateway) = rig::gateway(which, &format!("http://{}", upstream.addr), "", "").await;
    for replayed in [false, true] {
        let request = raw_order("k", "Expect: 100-continue\r\n");
        let (head, body) = request.split_once("\r\n\r\n").unwrap();
        let mut caller = Raw::sending(gateway.addr, format!("{head}\r\n\r\n")).await;
        assert_eq!(status(&caller.answer().await), 100, "the caller may send its body");
        caller.send(body).await;
        let answer = caller.answer().await;
        assert_eq!(status(&answer), 201);
        assert!(answer.ends_with("\r\n\r\nok"));
        assert_eq!(header(&answer, "idempotent-replayed").is_some(), replayed);
    }
    assert_eq!(upstream.seen().len(), 1);
    assert_eq!(header(&upstream.seen()[0].head, "expect"), None);
}

async fn a20_a_wait_shorter_than_the_work_ends_without_a_second_run(which: Which) {
    let rig = Rig::with(which, "", "wait = \"1s\"", "").await;
    let addr = rig.gateway.addr;
    let other = (which == Which::Postgres).then(|| rig.gateway.restart());
    rig.orders.hold();
    let first = tokio::spawn(async move { order().key("k").to(addr).await });
    rig.orders.asked(1).await;
    let everywhere = [Some(addr), other.as_ref().map(|gateway| gateway.addr)];
    for addr in everywhere.into_iter().flatten() {
        let begun = Instant::now();
        assert!(is_in_progress(&order().key("k").to(addr).await));
        let took = begun.elapsed();
        assert!(took >= Duration::from_millis(900), "it waited for {took:?} only");
        let waiting = tokio::spawn(async move { order().key("k").to(addr).await });
        if Some(addr) == everywhere.into_iter().flatten().last() {
            rig.orders.go();
            let waited = waiting.await.unwrap();
            assert!(waited.replayed(), "{waited:?}");
        }
    }
    assert_eq!(first.await.unwrap().status, StatusCode::CREATED);
    assert_eq!(rig.orders.runs(), 1);
}

async fn a21_an_expired_row_that_is_not_swept_yet_blocks_nothing(which: Which) {
    let store = "sweep_every = \"1h\"";
    let rig = Rig::with(which, store, "retention = \"2s\"", "").await;
    let addr = rig.gateway.addr;
    let first = order().key("k").to(addr).await;
    let row = rig.place.rows("select id from idempotency_records").await;
    eventually("it has expired", async || {
        let now = match which {
            Which::Sqlite => "cast(unixepoch('subsec') * 1000000 as integer)",
            Which::Postgres => "clock_timestamp()",
        };
        let sql = format!("select count(*) from idempotency_records where expires_at <= {now}");
        rig.place.count(&sql).await == 1
    })
    .await;
    assert_eq!(rig.place.rows("select id from idempotency_records").await, row, "not swept");
    let ask = order().key("k");
    let answers = join_all((0..10).map(|_| ask.to(addr))).await;
    let fresh = answers.iter().filter(|answer| !answer.replayed()).count();
    assert_eq!(fresh, 1, "one new run");
    for answer in &answers {
        assert_eq!(answer.json()["id"], "order-2");
        assert_ne!(answer.record(), first.record(), "a new record");
    }
    for _ in 0..2 {
        let later = order().key("k").to(addr).await;
        assert!(later.replayed());
        assert_eq!(later.json()["id"], "order-2");
    }
    assert_eq!(rig.orders.runs(), 2);
    assert_eq!(rig.place.events().await, 2);
}

async fn a21_an_expired_row_is_not_compared(which: Which) {
    let rig = Rig::with(which, "sweep_every = \"1h\"", "retention = \"1s\"", "").await;
    let addr = rig.gateway.addr;
    order().key("k").to(addr).await;
    let other = order().key("k").body(r#"{"amount":"1.00"}"#);
    eventually("another request takes the expired key", async || {
        let answer = other.to(addr).await;
        assert!(answer.status == 201 || answer.problem() == "request-mismatch", "{answer:?}");
        answer.status == StatusCode::CREATED
    })
    .await;
    assert_eq!(rig.orders.runs(), 2);
}

async fn a23_only_what_is_completed_and_expired_is_swept_however_old_the_rest_is(which: Which) {
    let rig = Rig::with(which, "sweep_every = \"100ms\"", "timeout = \"60s\"", "").await;
    let addr = rig.gateway.addr;
    let ask = |key: String| async move { order().key(&key).to(addr).await };
    join_all((0..20).map(|n| ask(format!("over-{n}")))).await;
    ask("kept".to_owned()).await;
    rig.orders.answer_status(502);
    ask("lost".to_owned()).await;
    rig.orders.answer_created();
    rig.orders.hold_only(rig.orders.runs() + 1);
    let running = tokio::spawn(ask("runs".to_owned()));
    rig.orders.asked(23).await;
    let past = match which {
        Which::Sqlite => "1000000",
        Which::Postgres => "timestamptz '2001-01-01'",
    };
    for change in ["created_at = PAST", "expires_at = PAST where key like 'over-%'"] {
        let sql = format!("update idempotency_records set {}", change.replace("PAST", past));
        rig.place.rows(&sql).await;
    }
    let over = "select count(*) from idempotency_records where key like 'over-%'";
    let more = AtomicUsize::new(0);
    eventually("what is over is swept, and reservations go on meanwhile", async || {
        let key = format!("more-{}", more.fetch_add(1, Relaxed));
        assert_eq!(ask(key).await.status, StatusCode::CREATED);
        rig.place.count(over).await == 0
    })
    .await;
    for (key, status) in [("kept", "completed"), ("lost", "unknown"), ("runs", "in_progress")] {
        assert_eq!(rig.place.status_of(key).await.as_deref(), Some(status), "{key}");
    }
    rig.orders.go();
    assert_eq!(running.await.unwrap().status, StatusCode::CREATED);
    assert!(ask("kept".to_owned()).await.replayed());
}
