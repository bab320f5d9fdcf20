//! `mode = "observe"`: everything is forwarded, as if no route were there, and what would have happened is counted.

use http::StatusCode;

use crate::support::client::{get, post};
use crate::support::fleet::{order, sending};
use crate::support::process::{self, Gateway, eventually};
use crate::support::raw::{Raw, body, header, status};
use crate::support::rig::{self, Place, Which, on_both_stores};
use crate::support::upstream::{OK, Reply, Upstream};

on_both_stores! {
    what_would_have_been_is_counted_and_everything_is_forwarded,
    a_store_that_is_away_and_a_route_beside_it_change_nothing,
}

/// The counts of an operation that are not zero.
async fn observed(gateway: &Gateway, operation: &str) -> Vec<(String, u64)> {
    let text = get("/metrics").to(gateway.admin).await.body;
    let text = String::from_utf8(text.to_vec()).unwrap();
    let start = format!("oncegate_observed_total{{operation=\"{operation}\",would=\"");
    let read = |line: &str| {
        let (would, count) = line.strip_prefix(&start)?.split_once("\"} ")?;
        Some((would.to_owned(), count.parse().unwrap()))
    };
    let mut counts: Vec<_> = text.lines().filter_map(read).collect();
    counts.sort();
    counts
}

async fn counts(gateway: &Gateway, expected: &[(&str, u64)]) {
    let expected: Vec<_> = expected.iter().map(|(name, n)| ((*name).to_owned(), *n)).collect();
    let end = std::time::Instant::now() + std::time::Duration::from_secs(10);
    loop {
        let found = observed(gateway, "orders.create").await;
        if found == expected {
            return;
        }
        assert!(std::time::Instant::now() < end, "{found:?} and not {expected:?}");
        tokio::task::yield_now().await;
    }
}

async fn observing(which: Which, upstream: &Upstream, policy: &str) -> (Place, Gateway) {
    let policy = format!("mode = \"observe\"\n{policy}");
    rig::gateway(which, &format!("http://{}", upstream.addr), "", &policy).await
}

async fn what_would_have_been_is_counted_and_everything_is_forwarded(which: Which) {
    let upstream = Upstream::start(|_, seen| {
        if seen.head.contains("X-Slow") || seen.head.contains("x-slow") {
            return Reply::keep(OK).after(std::time::Duration::from_millis(1500));
        }
        let answer = match seen.target() {
            "/orders?401" => "HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n".to_owned(),
            "/orders?502" => "HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n".to_owned(),
            "/orders?large" => {
                format!("HTTP/1.1 200 OK\r\nContent-Length: 2000\r\n\r\n{}", "x".repeat(2000))
            }
            _ => OK.to_owned(),
        };
        Reply::keep(answer)
    })
    .await;
    let limits = "max_request_body = 1000\nmax_response_body = 1000";
    let (place, gateway) = observing(which, &upstream, limits).await;
    let to = |target: &str, body: &str| post(target, body).tenant("acme");
    let mut sent = 0;
    let mut ask = async |ask: crate::support::client::Ask, expected: u16| {
        let answer = ask.to(gateway.addr).await;
        sent += 1;
        assert_eq!(answer.status, StatusCode::from_u16(expected).unwrap());
        let ours = |name: &&http::HeaderName| {
            name.as_str().starts_with("oncegate") || name.as_str() == "idempotent-replayed"
        };
        assert!(!answer.headers.keys().any(|name| ours(&name)), "{answer:?}");
    };
    // First, the same in another spelling, another one.
    ask(to("/orders", "{\"a\":1,\"b\":2}").key("k1"), 200).await;
    ask(to("/orders", "{\"b\":2, \"a\":1.0}").key("\"k1\""), 200).await;
    ask(to("/orders", "{\"a\":2}").key("k1"), 200).await;
    counts(&gateway, &[("execute", 1), ("mismatch", 1), ("replay", 1)]).await;
    // Another tenant's key is another key.
    ask(to("/orders", "{\"a\":1}").set("x-tenant-id", "globex").key("k1"), 200).await;
    // What frees the key, what leaves the outcome unknown, what is too large to keep.
    for (target, status) in [("/orders?401", 401), ("/orders?502", 502), ("/orders?large", 200)] {
        ask(to(target, "{}").key(target), status).await;
        ask(to(target, "{}").key(target), status).await;
    }
    counts(
        &gateway,
        &[("execute", 6), ("hold", 1), ("mismatch", 1), ("not_retained", 1), ("replay", 1)],
    )
    .await;
    // What would have been refused.
    ask(to("/orders", "{}"), 200).await;
    ask(to("/orders", "{}").key("a,b"), 200).await;
    ask(post("/orders", "{}").key("k2"), 200).await;
    ask(to("/orders", &"x".repeat(1001)).key("k3"), 200).await;
    let refused =
        [("body_too_large", 1), ("key_invalid", 1), ("key_missing", 1), ("tenant_missing", 1)];
    let before = [("execute", 6), ("hold", 1), ("mismatch", 1), ("not_retained", 1), ("replay", 1)];
    let mut all = [&refused[..], &before[..]].concat();
    all.sort_unstable();
    counts(&gateway, &all).await;
    // One that would have waited.
    let slow = to("/orders", "{}").key("needle-77").header("x-slow", "1");
    let first = sending(slow.clone(), gateway.addr);
    upstream.wait_for_requests(sent + 1).await;
    let second = sending(slow, gateway.addr);
    for answer in [first.await.unwrap(), second.await.unwrap()] {
        assert_eq!(answer.status, StatusCode::OK);
    }
    all.retain(|(name, _)| *name != "execute");
    all.extend([("execute", 7), ("wait", 1)]);
    all.sort_unstable();
    counts(&gateway, &all).await;
    assert_eq!(upstream.seen().len(), sent + 2, "all of them were forwarded");
    assert!(upstream.seen()[1].head.to_ascii_lowercase().contains("idempotency-key: \"k1\""));
    assert_eq!((place.records().await, place.events().await), (0, 0), "nothing is kept");
    gateway.says("would=\"mismatch\"");
    gateway.says("problem=\"key-invalid\"");
    let log = gateway.log();
    assert!(!log.contains("needle-77"), "no key stands in the log: {log}");
}

async fn a_store_that_is_away_and_a_route_beside_it_change_nothing(which: Which) {
    let upstream = Upstream::always(Reply::keep(OK)).await;
    let place = Place::new(which).await;
    let more = "mode = \"observe\"\n[[route]]\nmethod = \"POST\"\npath = \"/payments\"\noperation = \"payments.create\"\n";
    let toml = rig::config(&place, &format!("http://{}", upstream.addr), more);
    let config = process::config(place.folder.path(), &toml);
    let gateway = Gateway::start(&config);
    let payment = post("/payments", "{}").tenant("acme").key("k");
    assert!(!payment.to(gateway.addr).await.replayed());
    assert!(payment.to(gateway.addr).await.replayed(), "the other route protects");
    let (code, out, _) = process::run(&["check", "--config", config.to_str().unwrap()]);
    assert_eq!(code, 0, "{out}");
    assert!(out.contains("warning: policy.mode: orders.create: only observed"), "{out}");
    // The table that reservations need is gone.
    match which {
        Which::Sqlite => {
            let file = place.folder.path().join("oncegate.db");
            std::fs::rename(&file, file.with_extension("away")).unwrap();
        }
        Which::Postgres => {
            place.rows("alter table idempotency_records rename to away").await;
        }
    }
    for _ in 0..2 {
        assert_eq!(order("k").to(gateway.addr).await.status, StatusCode::OK);
    }
    counts(&gateway, &[("execute", 1), ("replay", 1)]).await;
}

/// Each case as a protecting route answers it, which is tested in `replay_auth`.
#[tokio::test(flavor = "multi_thread")]
async fn another_credential_would_be_forbidden_where_only_the_same_one_may_read() {
    let upstream = Upstream::start(|_, seen| {
        if seen.head.to_ascii_lowercase().contains("x-slow") {
            return Reply::keep(OK).after(std::time::Duration::from_millis(1500));
        }
        Reply::keep(match seen.target() {
            "/orders?401" => "HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n",
            "/orders?502" => "HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n",
            _ => OK,
        })
    })
    .await;
    let policy = "replay_auth = \"same-credential\"\non_unknown = \"retry\"";
    let (_place, gateway) = observing(Which::Sqlite, &upstream, policy).await;
    let by = |target: &str, key: &str, who: &str, body: &str| {
        post(target, body).tenant("acme").key(key).header("authorization", format!("Bearer {who}"))
    };
    for who in ["a", "b", "a"] {
        by("/orders", "k", who, "{}").to(gateway.addr).await;
    }
    counts(&gateway, &[("execute", 1), ("forbidden", 1), ("replay", 1)]).await;
    // Also without a credential, and with another request, which a stranger does not learn.
    post("/orders", "{}").tenant("acme").key("k").to(gateway.addr).await;
    by("/orders", "k", "b", "[1]").to(gateway.addr).await;
    by("/orders", "k", "a", "[1]").to(gateway.addr).await;
    let known = [("execute", 1), ("forbidden", 3), ("mismatch", 1), ("replay", 1)];
    counts(&gateway, &known).await;
    // A key that is free again is anybody's; an unknown outcome is its caller's, who may try again.
    for (who, target) in [("a", "/orders?401"), ("b", "/orders?401"), ("a", "/orders?502")] {
        by(target, target, who, "{}").to(gateway.addr).await;
    }
    counts(&gateway, &[("execute", 4), ("forbidden", 3), ("mismatch", 1), ("replay", 1)]).await;
    for who in ["b", "a"] {
        by("/orders?502", "/orders?502", who, "{}").to(gateway.addr).await;
    }
    counts(&gateway, &[("execute", 5), ("forbidden", 4), ("mismatch", 1), ("replay", 1)]).await;
    // While the first one runs it may still leave the key free.
    let slow = |who: &str, body: &str| by("/orders", "slow", who, body).header("x-slow", "1");
    let before = upstream.seen().len();
    let first = sending(slow("a", "{}"), gateway.addr);
    upstream.wait_for_requests(before + 1).await;
    let second = sending(slow("b", "[1]"), gateway.addr);
    for answer in [first.await.unwrap(), second.await.unwrap()] {
        assert_eq!(answer.status, StatusCode::OK);
    }
    let all = [("execute", 6), ("forbidden", 4), ("mismatch", 1), ("replay", 1), ("wait", 1)];
    counts(&gateway, &all).await;
    assert!(!gateway.log().contains("Bearer"), "no credential stands in the log");
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_stream_through_and_what_breaks_off_is_not_judged() {
    let upstream = Upstream::start_hasty(|_, _| Reply::keep(OK)).await;
    let (_place, gateway) = observing(Which::Sqlite, &upstream, "").await;
    let head = "POST /orders HTTP/1.1\r\nHost: a\r\nX-Tenant-Id: t\r\nIdempotency-Key: k\r\nContent-Length: 10\r\n\r\n";
    // Half a body: the upstream answers all the same, before the rest.
    let mut raw = Raw::sending(gateway.addr, format!("{head}01234")).await;
    let early = raw.answer().await;
    assert_eq!((status(&early), body(&early)), (200, "ok"), "{early}");
    assert_eq!(header(&early, "oncegate-record"), None);
    drop(raw);
    counts(&gateway, &[("unjudged", 1)]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_has_no_room_for_a_copy_forwards_without_one() {
    let upstream = Upstream::always(Reply::keep(OK)).await;
    let place = Place::new(Which::Sqlite).await;
    let url = format!("http://{}", upstream.addr);
    let policy = "mode = \"observe\"\nmax_request_body = \"64KiB\"\nmax_response_body = \"64KiB\"";
    let toml = rig::config_at(&place, &url, "127.0.0.1:0", "", policy, "");
    let toml =
        toml.replace("[admin]", "in_flight_max = 1\nbuffered_bytes_max = \"128KiB\"\n[admin]");
    let gateway = Gateway::start(&process::config(place.folder.path(), &toml));
    // One that holds the only place: its body does not end.
    let head = "POST /orders HTTP/1.1\r\nHost: a\r\nX-Tenant-Id: t\r\nIdempotency-Key: k\r\nContent-Length: 10\r\n\r\n";
    let mut held = Raw::sending(gateway.addr, format!("{head}01234")).await;
    let connected = async || upstream.connections() == 1;
    eventually("its head has gone on", connected).await;
    assert_eq!(order("k2").to(gateway.addr).await.status, StatusCode::OK);
    counts(&gateway, &[("overloaded", 1)]).await;
    held.send("56789").await;
    assert_eq!(status(&held.answer().await), 200);
    counts(&gateway, &[("execute", 1), ("overloaded", 1)]).await;
}
