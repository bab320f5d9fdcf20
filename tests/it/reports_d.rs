//! The key: where it is required, what it may be, and where it must not show. Groups D and E of the test ids.

use std::time::{Duration, SystemTime};

use http::{Method, StatusCode};

use crate::support::client::{Ask, get, post};
use crate::support::process::{self, Gateway};
use crate::support::raw::{Raw, body, header, status};
use crate::support::rig::{self, Place, Rig, Which, on_both_stores};
use crate::support::upstream::{Reply, Upstream};

fn order() -> Ask {
    post("/orders", r#"{"a":1}"#).tenant("acme")
}

/// The exact bytes of a keyed request; the key's header line comes as it is.
fn raw_order(key_line: &[u8]) -> Vec<u8> {
    let mut request = b"POST /orders HTTP/1.1\r\nHost: a\r\nX-Tenant-Id: acme\r\n".to_vec();
    request.extend_from_slice(key_line);
    request.extend_from_slice(b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}");
    request
}

/// Sends raw bytes that must be refused before anything happens.
async fn refused(rig: &Rig, key_line: &[u8], problem: Option<&str>) {
    let before = (rig.orders.runs(), rig.place.records().await);
    let answer = Raw::sending(rig.gateway.addr, raw_order(key_line)).await.answer().await;
    let line = String::from_utf8_lossy(key_line);
    let line = line.chars().take(60).collect::<String>();
    assert_eq!(status(&answer), 400, "{line:?} got {answer}");
    if let Some(problem) = problem {
        assert!(
            body(&answer).contains(&format!("urn:oncegate:problem:{problem}\"")),
            "{line:?} got {answer}"
        );
        assert_eq!(header(&answer, "content-type").as_deref(), Some("application/problem+json"));
    }
    assert!(header(&answer, "oncegate-record").is_none(), "{line:?}");
    assert_eq!((rig.orders.runs(), rig.place.records().await), before, "{line:?}");
}

on_both_stores! {
    d05_a_key_is_measured_in_bytes_before_anything_else,
    d06_odd_characters_are_refused_or_carried_unchanged,
    d16_a_key_shows_in_no_log_and_no_metric,
    e05_e06_callers_learn_when_to_come_back_and_until_when_it_is_kept,
}

#[tokio::test(flavor = "multi_thread")]
async fn d01_a_key_is_required_where_route_and_method_say_so() {
    let more = r#"
[[route]]
methods = ["PUT", "PATCH", "DELETE"]
path = "/orders"
operation = "orders.change"
[[route]]
methods = ["POST", "PUT", "PATCH", "DELETE"]
path = "/soft"
operation = "soft"
require_key = false
"#;
    let rig = Rig::start(Which::Sqlite, more).await;
    let ask =
        |method: &Method, target: &str| post(target, "{}").method(method.clone()).tenant("acme");
    for method in ["GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE", "PURGE"] {
        let method: Method = method.parse().unwrap();
        let writes = ["POST", "PUT", "PATCH", "DELETE"].contains(&method.as_str());
        for (path, required) in [("/orders", true), ("/soft", false), ("/free", false)] {
            let keyed = writes && path != "/free";
            let case = format!("{method} {path}");
            let before = rig.orders.runs();
            let without = ask(&method, path).to(rig.gateway.addr).await;
            if keyed && required {
                assert_eq!(without.status, StatusCode::BAD_REQUEST, "{case}");
                assert_eq!(without.header("content-type"), Some("application/problem+json"));
                assert_eq!(without.problem(), "key-missing", "{case}");
                let detail = without.json()["detail"].to_string();
                assert!(detail.contains("idempotency-key"), "it says what to send: {detail}");
                assert_eq!(rig.orders.runs(), before, "{case}");
            } else {
                assert_eq!(without.status, StatusCode::CREATED, "{case}");
                assert!(without.header("oncegate-record").is_none(), "{case}");
                assert_eq!(rig.orders.runs(), before + 1, "{case}");
            }
            // With a key, twice: executed once where it is protected.
            let before = rig.orders.runs();
            let key = format!("key {method} {path}");
            let first = ask(&method, path).key(&key).to(rig.gateway.addr).await;
            let second = ask(&method, path).key(&key).to(rig.gateway.addr).await;
            assert_eq!(first.status, StatusCode::CREATED, "{case}");
            assert_eq!(first.header("oncegate-record").is_some(), keyed, "{case}");
            assert_eq!((first.replayed(), second.replayed()), (false, keyed), "{case}");
            assert_eq!(rig.orders.runs_of(&key), if keyed { 1 } else { 2 }, "{case}");
            assert_eq!(rig.orders.runs(), before + rig.orders.runs_of(&key), "the key goes on");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn d01_a_key_stays_here_where_it_is_not_to_go_on() {
    let more = "[[route]]\nmethod = \"POST\"\npath = \"/quiet\"\noperation = \"quiet\"\nforward_key = false\nkey_header = \"X-Once\"";
    let rig = Rig::start(Which::Sqlite, more).await;
    let ask = || post("/quiet", "{}").tenant("acme").header("X-Once", "k");
    assert!(!ask().to(rig.gateway.addr).await.replayed());
    assert!(ask().to(rig.gateway.addr).await.replayed());
    let seen = &rig.orders.ledger()[0];
    assert_eq!(seen.headers.get("x-once"), None);
    assert!(!format!("{:?}", seen.headers).contains("\"k\""));
    // The header of other routes is no key here.
    let answer = post("/quiet", "{}").tenant("acme").key("k").to(rig.gateway.addr).await;
    assert_eq!(answer.problem(), "key-missing");
    assert_eq!(rig.orders.runs(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn d02_an_empty_key_is_an_error_and_not_an_absent_one() {
    let more =
        "[[route]]\nmethod = \"POST\"\npath = \"/soft\"\noperation = \"s\"\nrequire_key = false";
    let rig = Rig::start(Which::Sqlite, more).await;
    for value in ["", " ", "   ", "\t", "\"\"", "\" \"", "\"   \"", " \"\" "] {
        let line = format!("Idempotency-Key:{value}\r\n");
        refused(&rig, line.as_bytes(), Some("key-invalid")).await;
        // Also where a key may be absent.
        let soft = String::from_utf8(raw_order(line.as_bytes())).unwrap();
        let soft = soft.replace("POST /orders", "POST /soft");
        let answer = Raw::sending(rig.gateway.addr, soft).await.answer().await;
        assert_eq!(status(&answer), 400, "{value:?}");
        assert_eq!(rig.orders.runs(), 0, "{value:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn d03_a_quoted_key_and_a_bare_one_are_one_key() {
    let rig = Rig::start(Which::Sqlite, "").await;
    for (first, second) in [
        ("\"k\"", "k"),
        ("bare", "\"bare\""),
        ("\"a\\\"b\"", "a\"b"),
        ("\"back\\\\slash\"", "back\\slash"),
        (" padded ", "padded"),
        ("\"in  side\"", "in  side"),
    ] {
        let before = rig.orders.runs();
        assert!(!order().key(first).to(rig.gateway.addr).await.replayed(), "{first}");
        assert!(order().key(second).to(rig.gateway.addr).await.replayed(), "{second}");
        assert_eq!(rig.orders.runs(), before + 1, "{first}");
    }
    for bad in ["\"k\";p=1", "\"k", ":YWJj:", "\"k\", \"k\"", "\"k\" k", "\"k\"k", "\"\\k\"", "\""]
    {
        refused(&rig, format!("Idempotency-Key: {bad}\r\n").as_bytes(), Some("key-invalid")).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn d04_more_than_one_key_is_no_key() {
    let rig = Rig::start(Which::Sqlite, "").await;
    for lines in [
        "Idempotency-Key: k\r\nIdempotency-Key: k\r\n",
        "Idempotency-Key: k\r\nIdempotency-Key: l\r\n",
        "Idempotency-Key: k\r\nidempotency-KEY: k\r\n",
        "Idempotency-Key: \r\nIdempotency-Key: k\r\n",
        "Idempotency-Key: a,b\r\n",
        "Idempotency-Key: k,\r\n",
        "Idempotency-Key: \"a\",\"b\"\r\n",
    ] {
        refused(&rig, lines.as_bytes(), Some("key-invalid")).await;
    }
    // A name that some upstreams read as the key's cannot carry a second one.
    let twin = b"Idempotency-Key: k\r\nIdempotency_Key: l\r\n";
    let answer = Raw::sending(rig.gateway.addr, raw_order(twin)).await.answer().await;
    assert_eq!(status(&answer), 201);
    assert_eq!(rig.orders.ledger()[0].headers.get("idempotency_key"), None);
    assert!(!order().key("\"a,b\"").to(rig.gateway.addr).await.replayed());
    assert!(order().key("\"a,b\"").to(rig.gateway.addr).await.replayed(), "quoted, it is one");
}

/// Text that does not compress, of visible ASCII.
fn noise(length: usize) -> String {
    let mut state = 0x9e37_79b9_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        char::from(b'a' + u8::try_from((state >> 16) % 26).unwrap())
    };
    (0..length).map(|_| next()).collect()
}

async fn d05_a_key_is_measured_in_bytes_before_anything_else(which: Which) {
    let more = "[[route]]\nmethod = \"POST\"\npath = \"/long/{*rest}\"\noperation = \"long\"";
    let rig = Rig::start(which, more).await;
    let mut runs = 0;
    for length in [1, 2, 254, 255] {
        for key in ["x".repeat(length), noise(length)] {
            let tenant = if length == 255 { noise(255) } else { "acme".to_owned() };
            // A long path makes no difference: it is no part of the key.
            let target = format!("/long/{}", noise(6000));
            let ask = post(&target, "{}").tenant(&tenant).key(&key);
            assert_eq!(ask.to(rig.gateway.addr).await.status, StatusCode::CREATED, "{length}");
            assert!(ask.to(rig.gateway.addr).await.replayed(), "{length}");
            runs += 1;
            assert_eq!(rig.orders.runs(), runs);
            let listed = rig
                .place
                .count(&format!("select count(*) from idempotency_records where key = '{key}'"))
                .await;
            assert_eq!(listed, 1, "{length}");
        }
    }
    for length in [256, 2_700, 8_000, 60_000] {
        for key in ["x".repeat(length), noise(length)] {
            let line = format!("Idempotency-Key: {key}\r\n");
            refused(&rig, line.as_bytes(), Some("key-invalid")).await;
            let quoted = format!("Idempotency-Key: \"{key}\"\r\n");
            refused(&rig, quoted.as_bytes(), Some("key-invalid")).await;
        }
    }
    let letters = format!("Idempotency-Key: {}\r\n", "\u{20ac}".repeat(100));
    refused(&rig, letters.as_bytes(), Some("key-invalid")).await;
}

async fn d06_odd_characters_are_refused_or_carried_unchanged(which: Which) {
    let rig = Rig::start(which, "").await;
    for byte in (0..=0x1f).chain(0x7f..=0xff) {
        // A tab inside is no visible character either.
        let line = [b"Idempotency-Key: a", &[byte][..], b"b\r\n"].concat();
        refused(&rig, &line, None).await;
    }
    for value in ["caf\u{e9}".as_bytes(), b"caf\xe9", b"a\r\n b", b"a\r\n\tb", b"a\rX-Evil: 1"] {
        let line = [b"Idempotency-Key: ", value, b"\r\n"].concat();
        refused(&rig, &line, None).await;
    }
    let odd = [
        "<script>alert(1)</script>",
        "'; drop table idempotency_records; --",
        "%00",
        "%0d%0aX-Evil: 1",
        "../../etc/passwd",
        "{{ tenant }}",
        "$1 ${jndi:ldap://x}",
        "back\\slash \\n",
        "a b",
        "~!@#$%^&*()_+`-={}|[]:;<>?./",
    ];
    for (count, key) in odd.iter().enumerate() {
        let first = order().key(key).to(rig.gateway.addr).await;
        assert_eq!(first.status, StatusCode::CREATED, "{key}");
        assert!(order().key(key).to(rig.gateway.addr).await.replayed(), "{key}");
        assert_eq!(rig.orders.runs(), count + 1);
        assert_eq!(rig.orders.ledger()[count].key(), Some(*key), "it goes on unchanged");
        assert!(first.header("x-evil").is_none());
        let shown = get(&format!("/api/v1/records/{}", first.record()));
        let shown = shown.to(rig.gateway.admin).await;
        assert_eq!(shown.header("content-type"), Some("application/json"));
        assert_eq!(shown.json()["record"]["key"], *key, "the operators see it as it is");
    }
    let listed = get("/api/v1/records?limit=100").to(rig.gateway.admin).await.json();
    let keys: Vec<_> = listed["records"].as_array().unwrap().iter().map(|r| &r["key"]).collect();
    assert!(odd.iter().all(|key| keys.iter().any(|known| *known == key)), "{keys:?}");
    for key in odd.iter().filter(|key| key.len() > 4) {
        assert!(!rig.gateway.log().contains(key), "{key} in the log");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn d13_an_upgrade_is_never_a_tunnel_past_a_reservation() {
    // And I5 of the proxy's cases.
    let upstream = Upstream::start(|_, seen| {
        Reply::keep(if seen.head.to_ascii_lowercase().contains("idempotency-key: bad") {
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
        } else {
            "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
        })
    })
    .await;
    let place = Place::new(Which::Sqlite).await;
    let toml = rig::config(&place, &format!("http://{}", upstream.addr), "");
    let gateway = Gateway::start(&process::config(place.folder.path(), &toml));
    let request = |key: &str, upgrade: &str| {
        raw_order(
            format!(
                "Idempotency-Key: {key}\r\nConnection: Upgrade\r\nUpgrade: {upgrade}\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n"
            )
            .as_bytes(),
        )
    };
    // What is asked for cannot be had together with a reservation, and is refused before one is made.
    let answer = Raw::sending(gateway.addr, request("asked", "websocket")).await.answer().await;
    assert_eq!(status(&answer), 400, "{answer}");
    assert!(answer.contains("urn:oncegate:problem:upgrade-refused"), "{answer}");
    assert!(upstream.seen().is_empty(), "nothing was forwarded");
    assert_eq!(place.records().await, 0);
    // What is only offered goes no further.
    for (count, upgrade) in ["h2c", "TLS/1.0"].into_iter().enumerate() {
        let key = format!("good-{count}");
        for replayed in [false, true] {
            let answer = Raw::sending(gateway.addr, request(&key, upgrade)).await.answer().await;
            assert_eq!(status(&answer), 200, "{answer}");
            assert_eq!(header(&answer, "idempotent-replayed").is_some(), replayed, "{answer}");
            assert!(header(&answer, "upgrade").is_none());
        }
        let seen = upstream.seen();
        assert_eq!(seen.len(), count + 1, "executed once, as any keyed request");
        assert!(!seen[count].head.to_ascii_lowercase().contains("upgrade"), "{}", seen[count].head);
    }
    // The upstream switches all the same: bytes that follow go nowhere.
    let before = upstream.seen().len();
    let mut raw = Raw::sending(gateway.addr, request("bad", "h2c")).await;
    let answer = raw.answer().await;
    assert_eq!(status(&answer), 502, "{answer}");
    assert!(header(&answer, "upgrade").is_none());
    raw.send("POST /orders HTTP/1.1\r\nHost: a\r\n\r\n").await;
    let second = raw.answer().await;
    assert!(body(&second).contains("key-missing"), "a request like any other: {second}");
    assert_eq!(upstream.seen().len(), before + 1);
    assert_eq!(place.status_of("bad").await.as_deref(), Some("unknown"));
}

async fn d16_a_key_shows_in_no_log_and_no_metric(which: Which) {
    let (orders, place) = (crate::support::orders::Orders::start().await, Place::new(which).await);
    // Everything the program and its libraries have to say.
    let toml = rig::config_at(&place, &orders.url(), "127.0.0.1:0", "", "timeout = \"1s\"", "")
        + "[log]\nlevel = \"trace\"\n";
    let gateway = Gateway::start(&process::config(place.folder.path(), &toml));
    let addr = gateway.addr;
    let ask = |key: &str| {
        order()
            .key(key)
            .header("authorization", "Bearer LOGGED-TOKEN")
            .header("cookie", "LOGGED-COOKIE")
            .body(r#"{"a":"LOGGED-BODY"}"#)
    };
    ask("LOGGED-KEY-1").to(addr).await;
    assert!(ask("LOGGED-KEY-1").to(addr).await.replayed());
    let other = ask("LOGGED-KEY-1").body(r#"{"a":"LOGGED-OTHER"}"#).to(addr).await;
    assert_eq!(other.problem(), "request-mismatch");
    assert_eq!(ask("LOGGED-KEY-2,").to(addr).await.problem(), "key-invalid");
    orders.answer_status(429);
    ask("LOGGED-KEY-3").to(addr).await;
    orders.answer_status(502);
    ask("LOGGED-KEY-4").to(addr).await;
    assert_eq!(ask("LOGGED-KEY-4").to(addr).await.problem(), "outcome-unknown");
    orders.hold();
    assert_eq!(ask("LOGGED-KEY-5").to(addr).await.problem(), "upstream-timeout");
    orders.go();
    post("/free", "{}").key("LOGGED-KEY-6").to(addr).await;
    let metrics = get("/metrics").to(gateway.admin).await;
    let metrics = String::from_utf8(metrics.body.to_vec()).unwrap();
    assert!(metrics.contains("orders.create"), "{metrics}");
    assert!(!metrics.contains("LOGGED"), "{metrics}");
    let (config, id) = (gateway.config.to_str().unwrap(), other.record());
    let (code, _, errors) =
        process::run(&["records", "release", &id, "--completed", "--config", config]);
    assert_eq!(code, 0, "{errors}");
    gateway.terminate();
    let mut gateway = gateway;
    gateway.exited();
    let log = gateway.log();
    assert!(log.contains("stopping"), "the whole log is here: {log}");
    // Only the Postgres store is talkative enough to prove that the level took effect.
    assert!(which == Which::Sqlite || log.contains("TRACE"), "{log}");
    let leaks: Vec<_> = log.lines().filter(|line| line.contains("LOGGED")).take(5).collect();
    assert!(leaks.is_empty(), "{leaks:#?}");
}

async fn e05_e06_callers_learn_when_to_come_back_and_until_when_it_is_kept(which: Which) {
    let rig = Rig::with(which, "", "wait = \"50ms\"\nretention = \"24h\"", "").await;
    let addr = rig.gateway.addr;
    let first = order().key("k").to(addr).await;
    let replay = order().key("k").to(addr).await;
    let expires = first.header("oncegate-expires").expect("told on the first answer");
    assert_eq!(replay.header("oncegate-expires"), Some(expires), "and the same on a replay");
    let at = httpdate::parse_http_date(expires).expect("an HTTP date");
    #[expect(clippy::disallowed_methods, reason = "the header is a time of the wall clock")]
    let now = SystemTime::now();
    let left = at.duration_since(now).expect("in the future");
    let day = Duration::from_secs(24 * 3600);
    assert!(left <= day && left > day - Duration::from_secs(120), "{left:?}");
    let after = |answer: &crate::support::client::Answer| -> u64 {
        let text = answer.header("retry-after").expect("when to come back");
        text.parse().unwrap_or_else(|_| panic!("not whole seconds: {text}"))
    };
    rig.orders.hold();
    let running = tokio::spawn(async move { order().key("slow").to(addr).await });
    rig.orders.asked(2).await;
    let mut hints = std::collections::HashSet::new();
    for _ in 0..12 {
        let answer = order().key("slow").to(addr).await;
        assert_eq!(answer.problem(), "in-progress");
        assert!((1..=15).contains(&after(&answer)), "{answer:?}");
        hints.insert(after(&answer));
        assert!(answer.header("oncegate-expires").is_none());
    }
    assert!(hints.len() > 1, "not all come back at one instant: {hints:?}");
    rig.orders.go();
    running.await.unwrap();
    rig.orders.answer_status(502);
    order().key("lost").to(addr).await;
    let answer = order().key("lost").to(addr).await;
    assert_eq!(answer.problem(), "outcome-unknown");
    assert!(after(&answer) >= 30, "an invitation to a loop: {answer:?}");
    assert!(answer.header("oncegate-expires").is_none());
    // What is released has no expiry either.
    rig.orders.answer_status(429);
    assert!(order().key("freed").to(addr).await.header("oncegate-expires").is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_of_the_operators_is_on_the_callers_port() {
    let rig = Rig::start(Which::Sqlite, "").await;
    let targets = [
        "/",
        "/admin",
        "/metrics",
        "/health",
        "/healthz",
        "/readyz",
        "/openapi.json",
        "/api/v1/records",
        "/api/v1/config",
        "/api/v1/events",
    ];
    for (count, target) in targets.iter().enumerate() {
        let answer = get(target).to(rig.gateway.addr).await;
        assert_eq!(answer.status, StatusCode::CREATED, "{target}");
        assert_eq!(rig.orders.ledger()[count].target, *target, "the API's own");
    }
    // And nothing of the callers' is on the operators' port.
    let answer = order().key("k").to(rig.gateway.admin).await;
    assert!(answer.status.is_client_error());
    assert_eq!(rig.orders.runs(), targets.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn replays_use_up_nothing_of_the_apis_limits() {
    let rig = Rig::start(Which::Sqlite, "").await;
    let left = std::sync::atomic::AtomicUsize::new(1);
    rig.orders.answer(move |_| {
        let before = left.fetch_update(
            std::sync::atomic::Ordering::SeqCst,
            std::sync::atomic::Ordering::SeqCst,
            |left| left.checked_sub(1),
        );
        let status =
            if before.is_ok() { StatusCode::CREATED } else { StatusCode::TOO_MANY_REQUESTS };
        http::Response::builder().status(status).body("done".into()).unwrap()
    });
    assert_eq!(order().key("k").to(rig.gateway.addr).await.status, StatusCode::CREATED);
    for _ in 0..5 {
        let replay = order().key("k").to(rig.gateway.addr).await;
        assert_eq!(replay.status, StatusCode::CREATED);
        assert!(replay.replayed());
    }
    assert_eq!(rig.orders.runs(), 1);
    let limited = order().key("l").to(rig.gateway.addr).await;
    assert_eq!(limited.status, StatusCode::TOO_MANY_REQUESTS, "the limit is the API's");
}
