//! What counts as the same request: the reports of group C.

use std::time::Duration;

use http::{Method, StatusCode};

use crate::support::client::{Answer, Ask, post};
use crate::support::process::Gateway;
use crate::support::raw::{Raw, body, header, status};
use crate::support::rig::{self, Rig, Which, on_both_stores};

/// Sends both under one fresh key: whether the second was taken for a retry of the first.
async fn same(rig: &Rig, first: &Ask, second: &Ask) -> bool {
    let key = format!("pair-{}", rig.orders.runs());
    let before = rig.orders.runs();
    let first = first.clone().tenant("acme").key(&key).to(rig.gateway.addr).await;
    assert_eq!(first.status, StatusCode::CREATED, "{:?}", first.body);
    let second = second.clone().tenant("acme").key(&key).to(rig.gateway.addr).await;
    assert_eq!(rig.orders.runs(), before + 1, "only the first is executed");
    if second.replayed() {
        assert_eq!(second.body, first.body);
    } else {
        assert_eq!(second.status, StatusCode::CONFLICT);
        assert_eq!(second.problem(), "request-mismatch");
        assert_eq!(second.record(), first.record());
    }
    second.replayed()
}

fn json(body: impl AsRef<[u8]>) -> Ask {
    post("/orders", "").body(body.as_ref().to_vec())
}

on_both_stores! {
    c01_a_key_belongs_to_its_operation,
    c11_a_body_beyond_the_limit_is_refused_before_anything_is_reserved,
    c14_a_mismatch_is_told_at_once_while_the_first_still_runs,
    c15_a_record_made_under_another_recipe_is_compared_by_what_was_received,
    c16_nothing_secret_of_a_request_reaches_the_database,
}

async fn c01_a_key_belongs_to_its_operation(which: Which) {
    let more = r#"
[[route]]
methods = ["PUT", "POST"]
path = "/other"
operation = "other"
[[route]]
method = "PUT"
path = "/orders"
operation = "orders.replace"
"#;
    let rig = Rig::start(which, more).await;
    let ask = |method: Method, target: &str| {
        post(target, r#"{"a":1}"#).method(method).tenant("acme").key("k")
    };
    let first = ask(Method::POST, "/orders").to(rig.gateway.addr).await;
    // Other operations: executions of their own.
    for (method, target) in [(Method::POST, "/other"), (Method::PUT, "/orders")] {
        let answer = ask(method, target).to(rig.gateway.addr).await;
        assert_eq!(answer.status, StatusCode::CREATED);
        assert!(!answer.replayed());
        assert_ne!(answer.body, first.body);
        assert_ne!(answer.record(), first.record());
    }
    // One operation, another method: another request.
    let answer = ask(Method::PUT, "/other").to(rig.gateway.addr).await;
    assert_eq!(answer.problem(), "request-mismatch");
    // No spelling of the path reaches the first one's answer, or the API unprotected.
    for target in [
        "/orders/",
        "/%6frders",
        "//orders",
        "/./orders",
        "/x/../orders",
        "/orders;v=1",
        "/x/%2e%2e/orders",
        "/%2Forders",
    ] {
        let answer = ask(Method::POST, target).to(rig.gateway.addr).await;
        assert_eq!(answer.problem(), "request-mismatch", "{target}");
    }
    assert_eq!(rig.orders.runs(), 3);
    assert_eq!(rig.place.records().await, 3);
    // Letter case matters: no route names this one, so it passes.
    let answer = ask(Method::POST, "/ORDERS").to(rig.gateway.addr).await;
    assert_eq!(answer.status, StatusCode::CREATED);
    assert!(!answer.replayed() && answer.header("oncegate-record").is_none());
    assert_eq!(rig.orders.runs(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn c01_letter_case_does_not_slip_past_where_it_is_ignored() {
    let place = rig::Place::new(Which::Sqlite).await;
    let orders = crate::support::orders::Orders::start().await;
    let toml = rig::config(&place, &orders.url(), "")
        .replace("[server]", "[server]\nignore_path_case = true");
    let config = crate::support::process::config(place.folder.path(), &toml);
    let gateway = Gateway::start(&config);
    let ask = |target: &str| post(target, "{}").tenant("acme").key("k");
    assert_eq!(ask("/orders").to(gateway.addr).await.status, StatusCode::CREATED);
    assert_eq!(ask("/ORDERS").to(gateway.addr).await.problem(), "request-mismatch");
    assert_eq!(orders.runs(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn c02_the_query_counts_as_decoded_pairs_and_the_path_as_it_came() {
    let more = "[[route]]\nmethod = \"POST\"\npath = \"/pay/{*rest}\"\noperation = \"pay\"";
    let rig = Rig::start(Which::Sqlite, more).await;
    for (first, second, wanted) in [
        ("/pay/x?dry=1", "/pay/x", false),
        ("/pay/x", "/pay/x?dry=1", false),
        ("/pay/x?dry=1", "/pay/x?dry=", false),
        ("/pay/x?a=1&b=2", "/pay/x?b=2&a=1", true),
        ("/pay/x?a=1&a=2", "/pay/x?a=2&a=1", false),
        ("/pay/x?a=b+c", "/pay/x?a=b%20c", true),
        ("/pay/x?a=%41", "/pay/x?a=A", true),
        ("/pay/x?a=1%26b=2", "/pay/x?a=1&b=2", false),
        ("/pay/x?a=%zz", "/pay/x?a=%zz", true),
        ("/pay/x?a=%zz", "/pay/x?a=%25zz", false),
        ("/pay/a%2Fb", "/pay/a/b", false),
        ("/pay/a%2Fb", "/pay/a%2fb", false),
        ("/pay/a%2Fb", "/pay/a%2Fb", true),
        ("/pay/a", "/pay/a/", false),
    ] {
        let got = same(&rig, &post(first, "{}"), &post(second, "{}")).await;
        assert_eq!(got, wanted, "{first} and {second}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn c03_order_and_white_space_matter_only_where_the_type_says_nothing() {
    let rig = Rig::start(Which::Sqlite, "").await;
    let spellings = [
        r#"{"a":{"x":1,"y":[1,{"p":1,"q":2}]},"b":2}"#,
        r#"{"b":2,"a":{"y":[1,{"q":2,"p":1}],"x":1}}"#,
        "{ \"a\" : { \"x\" : 1 ,\r\n\t\"y\" : [ 1 , { \"p\" : 1 , \"q\" : 2 } ] } , \"b\" : 2 }",
        "{\"a\":{\"x\":1,\"y\":[1,{\"p\":1,\"q\":2}]},\"b\":2}\n",
    ];
    for kind in ["application/json", "application/vnd.acme.order+json", "Application/JSON"] {
        for other in &spellings[1..] {
            let typed = |text: &str| json(text).set("content-type", kind);
            assert!(same(&rig, &typed(spellings[0]), &typed(other)).await, "{kind}: {other}");
        }
    }
    for other in &spellings[1..] {
        let typed = |text: &str| json(text).set("content-type", "text/plain");
        assert!(!same(&rig, &typed(spellings[0]), &typed(other)).await, "text: {other}");
    }
    // The caller learns what to do about it, and nothing of what was stored.
    let text = |body: &str| json(body).set("content-type", "text/plain").tenant("acme").key("told");
    text("first-content").to(rig.gateway.addr).await;
    let answer = text("first-content\n").to(rig.gateway.addr).await;
    assert!(answer.json()["detail"].as_str().unwrap().contains("exactly what was sent first"));
    assert!(!format!("{answer:?}").contains("first-content"));
}

#[tokio::test(flavor = "multi_thread")]
async fn c05_numbers_are_compared_by_their_exact_value() {
    let rig = Rig::start(Which::Sqlite, "").await;
    let forty = "1234567890123456789012345678901234567890";
    let other_forty = "1234567890123456789012345678901234567891";
    for (first, second, wanted) in [
        ("1", "1.0", true),
        ("1", "1e0", true),
        ("1", "10e-1", true),
        ("1", "0.1E+1", true),
        ("0", "-0", true),
        ("0", "0e999", true),
        ("0.1", "0.10", true),
        ("1e400", "10e399", true),
        ("1e400", "1e401", false),
        ("1e-400", "0", false),
        ("9007199254740992", "9007199254740993", false),
        ("18446744073709551615", "18446744073709551616", false),
        ("0.1", "0.1000000000000000055511151231257827", false),
        (forty, other_forty, false),
        (forty, &format!("{forty}.000"), true),
        ("1", "-1", false),
        ("1", "\"1\"", false),
        // No JSON: compared as it came.
        ("01", "1", false),
        ("1.", "1", false),
        ("+1", "1", false),
        ("NaN", "NaN", true),
    ] {
        let body = |number: &str| json(format!("{{\"n\":{number}}}"));
        let got = same(&rig, &body(first), &body(second)).await;
        assert_eq!(got, wanted, "{first} and {second}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn c06_what_parsers_read_differently_equals_only_itself() {
    let rig = Rig::start(Which::Sqlite, "").await;
    let deep = |levels: usize, inner: &str| {
        [&*"[".repeat(levels), inner, &*"]".repeat(levels)].concat().into_bytes()
    };
    let object = |levels: usize| {
        [&*"{\"a\":".repeat(levels), "1", &*"}".repeat(levels)].concat().into_bytes()
    };
    let cases: Vec<(&str, Vec<u8>, Vec<u8>, bool)> = vec![
        ("duplicates", br#"{"a":1,"a":2}"#.into(), br#"{"a":2}"#.into(), false),
        ("duplicates", br#"{"a":1,"a":2}"#.into(), br#"{"a":1}"#.into(), false),
        ("duplicates again", br#"{"a":1,"a":2}"#.into(), br#"{"a":1,"a":2}"#.into(), true),
        ("duplicates by escape", br#"{"a":1,"\u0061":2}"#.into(), br#"{"a":2}"#.into(), false),
        ("an escape", br#"{"a":"\u0061"}"#.into(), br#"{"\u0061":"a"}"#.into(), true),
        ("a pair", r#"["😀"]"#.into(), br#"["\ud83d\ude00"]"#.into(), true),
        ("a lone surrogate", br#"["\ud800"]"#.into(), br#"["\ud801"]"#.into(), false),
        ("a lone surrogate", br#"["\ud800"]"#.into(), "[\"\u{fffd}\"]".into(), false),
        ("a lone surrogate again", br#"["\ud800"]"#.into(), br#"["\ud800"]"#.into(), true),
        ("a mark", b"\xef\xbb\xbf{}".to_vec(), b"{}".to_vec(), false),
        ("a mark again", b"\xef\xbb\xbf{}".to_vec(), b"\xef\xbb\xbf{}".to_vec(), true),
        ("composed", "[\"\u{e9}\"]".into(), "[\"e\u{301}\"]".into(), false),
        ("bad UTF-8", b"[\"\xff\"]".to_vec(), b"[\"\xfe\"]".to_vec(), false),
        ("bad UTF-8 again", b"[\"\xff\"]".to_vec(), b"[\"\xff\"]".to_vec(), true),
        ("no JSON", b"{oops".to_vec(), b"{oops ".to_vec(), false),
        ("no JSON again", b"{oops".to_vec(), b"{oops".to_vec(), true),
        ("two documents", b"{} {}".to_vec(), b"{}".to_vec(), false),
        ("a bad escape", br#"["\x"]"#.into(), br#"["x"]"#.into(), false),
        ("a control character", b"[\"a\nb\"]".to_vec(), br#"["a\nb"]"#.into(), false),
        ("nothing", b"".to_vec(), b"null".to_vec(), false),
        ("deep", deep(10_000, ""), deep(10_000, "1"), false),
        ("deep again", deep(10_000, ""), deep(10_000, ""), true),
        ("deep objects", object(10_000), object(10_000), true),
        ("deep and open", b"[".repeat(10_000), b"[".repeat(10_001), false),
        ("deep enough", deep(100, ""), deep(100, " "), true),
    ];
    for (name, first, second, wanted) in cases {
        assert_eq!(same(&rig, &json(first), &json(second)).await, wanted, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn c07_type_and_coding_count_and_the_charset_does_not() {
    let rig = Rig::start(Which::Sqlite, "").await;
    let typed = |kind: &str| json("{}").set("content-type", kind);
    let plain = typed("application/json");
    assert!(!same(&rig, &plain, &typed("text/plain")).await);
    assert!(!same(&rig, &plain, &typed("application/x+json")).await);
    assert!(!same(&rig, &typed("application/octet-stream"), &typed("text/plain")).await);
    assert!(same(&rig, &plain, &typed("application/json; charset=utf-8")).await);
    assert!(same(&rig, &typed("text/plain"), &typed("TEXT/plain ;charset=latin1")).await);
    // The content of a coding counts, see `codings`; what only claims one is other bytes.
    let coded = plain.clone().header("content-encoding", "gzip");
    assert!(!same(&rig, &plain, &coded).await, "bytes that claim a coding are other bytes");
    assert!(same(&rig, &coded, &coded).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn c08_what_changes_with_each_try_does_not_count() {
    let rig = Rig::start(Which::Sqlite, "").await;
    let sent = |number: u32| {
        json("{}")
            .header("authorization", format!("Bearer {number}"))
            .header("traceparent", format!("00-{number:032}-{number:016}-01"))
            .header("tracestate", format!("a={number}"))
            .header("user-agent", format!("client/{number}"))
            .header("accept", format!("application/v{number}+json"))
            .header("accept-encoding", if number == 1 { "gzip" } else { "identity" })
            .header("cookie", format!("session={number}"))
            .header("x-request-id", number.to_string())
            .header("x-forwarded-for", format!("10.0.0.{number}"))
            .header("date", format!("Sun, 0{number} Nov 2026 00:00:00 GMT"))
    };
    assert!(same(&rig, &sent(1), &sent(2)).await);
}

async fn c11_a_body_beyond_the_limit_is_refused_before_anything_is_reserved(which: Which) {
    const LIMIT: usize = 1024;
    let rig = Rig::with(which, "", "max_request_body = 1024", "").await;
    let head = |key: &str, lines: &str| {
        format!(
            "POST /orders HTTP/1.1\r\nHost: a\r\nX-Tenant-Id: acme\r\nIdempotency-Key: {key}\r\n{lines}\r\n\r\n"
        )
    };
    let long = "x".repeat(LIMIT + 1);
    let chunked = format!("{:x}\r\n{long}\r\n0\r\n\r\n", long.len());
    let declared = format!("Content-Length: {}", LIMIT + 1);
    let refused = [
        ("with its length", head("length", &declared) + &long),
        ("chunked", head("chunked", "Transfer-Encoding: chunked") + &chunked),
        ("declared and never sent", head("claimed", &declared) + "x"),
        (
            "chunks beside a short length",
            head("both", "Content-Length: 2\r\nTransfer-Encoding: chunked") + &chunked,
        ),
    ];
    for (name, request) in refused {
        let answer = Raw::sending(rig.gateway.addr, request).await.answer().await;
        assert_eq!(status(&answer), 413, "{name}: {answer}");
        assert!(body(&answer).contains("urn:oncegate:problem:body-too-large"), "{name}");
        assert!(header(&answer, "oncegate-record").is_none(), "{name}");
        assert_eq!((rig.orders.runs(), rig.place.records().await), (0, 0), "{name}");
    }
    // More was promised than came: nothing is reserved either.
    let mut raw = Raw::sending(rig.gateway.addr, head("short", "Content-Length: 10") + "abc").await;
    raw.half_close().await;
    raw.rest().await;
    assert_eq!((rig.orders.runs(), rig.place.records().await), (0, 0));
    // The keys are free.
    let small = |key: &str, body: String| post("/orders", "").body(body).tenant("acme").key(key);
    for (count, key) in ["length", "chunked", "claimed", "both", "short"].iter().enumerate() {
        let answer = small(key, "{}".to_owned()).to(rig.gateway.addr).await;
        assert_eq!(answer.status, StatusCode::CREATED, "{key}");
        assert!(!answer.replayed(), "{key}");
        assert_eq!(rig.orders.runs(), count + 1);
    }
    // Exactly at the limit is within it.
    let full = small("full", "x".repeat(LIMIT)).to(rig.gateway.addr).await;
    assert_eq!(full.status, StatusCode::CREATED);
}

async fn c14_a_mismatch_is_told_at_once_while_the_first_still_runs(which: Which) {
    let rig = Rig::with(which, "", "wait = \"5m\"", "").await;
    rig.orders.hold();
    let addr = rig.gateway.addr;
    let ask = |body: &str| post("/orders", body).tenant("acme").key("k");
    let first = ask(r#"{"a":1}"#);
    let running = tokio::spawn(async move { first.to(addr).await });
    rig.orders.asked(1).await;
    // Who waited for the first would wait for minutes: it is held.
    let other = tokio::time::timeout(Duration::from_secs(20), ask(r#"{"a":2}"#).to(addr)).await;
    assert_eq!(other.expect("it does not wait").problem(), "request-mismatch");
    rig.orders.go();
    let first = running.await.unwrap();
    assert_eq!(first.status, StatusCode::CREATED);
    assert_eq!(rig.orders.runs(), 1);
}

async fn c15_a_record_made_under_another_recipe_is_compared_by_what_was_received(which: Which) {
    let mut rig = Rig::start(which, r#"fingerprint = { ignore = ["$.sent_at"] }"#).await;
    let first = r#"{"a":1,"sent_at":"09:00"}"#;
    let ask = |key: &str, body: &str| post("/orders", body).tenant("acme").key(key);
    for key in ["again", "changed", "reordered"] {
        assert_eq!(ask(key, first).to(rig.gateway.addr).await.status, StatusCode::CREATED);
    }
    let old = std::fs::read_to_string(&rig.gateway.config).unwrap();
    let new = old.replace("$.sent_at", "$.trace");
    assert_ne!(old, new);
    rig.gateway.kill9();
    std::fs::write(&rig.gateway.config, new).unwrap();
    rig.gateway = rig.gateway.restart();
    let addr = rig.gateway.addr;
    let answer: Answer = ask("again", first).to(addr).await;
    assert!(answer.replayed(), "{answer:?}");
    let later = ask("changed", r#"{"a":1,"sent_at":"09:05"}"#).to(addr).await;
    assert_eq!(later.problem(), "request-mismatch", "another recipe is not applied to it");
    let answer = ask("changed", r#"{"a":2,"sent_at":"09:00"}"#).to(addr).await;
    assert_eq!(answer.problem(), "request-mismatch");
    let answer = ask("reordered", r#"{"sent_at":"09:00","a":1}"#).to(addr).await;
    assert_eq!(answer.problem(), "request-mismatch", "canonical forms are not comparable");
    // What is new is judged by the new recipe.
    ask("new", r#"{"a":1,"trace":"x"}"#).to(addr).await;
    assert!(ask("new", r#"{"trace":"y","a":1}"#).to(addr).await.replayed());
    assert_eq!(rig.orders.runs(), 4);
}

/// Every cell of every table.
async fn dump(rig: &Rig, which: Which) -> String {
    let tables = match which {
        Which::Sqlite => "select name from sqlite_master where type in ('table', 'view')",
        Which::Postgres => {
            "select quote_ident(table_schema) || '.' || quote_ident(table_name) \
             from information_schema.tables \
             where table_schema not in ('pg_catalog', 'information_schema')"
        }
    };
    let mut text = String::new();
    for table in rig.place.rows(tables).await {
        let table = table[0].clone().unwrap();
        text += &format!("{table}\n");
        for cell in rig.place.rows(&format!("select * from {table}")).await.into_iter().flatten() {
            let cell = cell.unwrap_or_default();
            text += &cell;
            text.push('\n');
            // Postgres shows bytes as hexadecimal digits.
            text += &unhex(&cell);
            text.push('\n');
        }
    }
    text
}

fn unhex(cell: &str) -> String {
    let digits = cell.strip_prefix("\\x").unwrap_or_default().as_bytes();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    let bytes: Vec<u8> = digits.chunks(2).filter_map(byte).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

async fn c16_nothing_secret_of_a_request_reaches_the_database(which: Which) {
    const CARD: &str = "4000001234567899";
    let event = r#"
[[route.event]]
type = "order.created"
payload = { amount = "{{ request.json.amount }}" }
"#;
    let rig = Rig::start(which, event).await;
    rig.orders.hold();
    let addr = rig.gateway.addr;
    let body = format!(r#"{{"amount":"77.01","card":"{CARD}","note":"private-note"}}"#);
    let ask = post("/orders", &body)
        .tenant("acme")
        .key("k")
        .header("authorization", "Bearer SECRET-TOKEN")
        .header("cookie", "session=SECRET-COOKIE")
        .header("x-api-key", "SECRET-API-KEY");
    let first = ask.clone();
    let running = tokio::spawn(async move { first.to(addr).await });
    rig.orders.asked(1).await;
    let secrets = [CARD, "SECRET", "private-note"];
    let clean = |text: &str, when: &str| {
        assert!(text.contains("idempotency_records") && text.contains("orders.create"), "a dump");
        for secret in secrets {
            assert!(!text.contains(secret), "{when}: {secret} in\n{text}");
        }
    };
    let context = "select count(*) from idempotency_records where request_context is not null";
    let running_dump = dump(&rig, which).await;
    clean(&running_dump, "in progress");
    assert!(running_dump.contains("77.01"), "what a template names is kept until the end");
    assert_eq!(rig.place.count(context).await, 1);
    rig.orders.go();
    assert_eq!(running.await.unwrap().status, StatusCode::CREATED);
    clean(&dump(&rig, which).await, "completed");
    assert_eq!(rig.place.count(context).await, 0, "and no longer");
    assert!(ask.to(addr).await.replayed());
    // A refusal shows and stores nothing either.
    let other = post("/orders", &body.replace("77.01", "77.02")).tenant("acme").key("k");
    let answer = other.to(addr).await;
    assert_eq!(answer.problem(), "request-mismatch");
    assert!(!format!("{answer:?}").contains("77.01"));
    clean(&dump(&rig, which).await, "after a mismatch");
    if which == Which::Sqlite {
        for file in std::fs::read_dir(rig.place.folder.path()).unwrap() {
            let path = file.unwrap().path();
            if path.is_dir() {
                // The spill, which holds answers and nothing of a request; see `spill`.
                continue;
            }
            let bytes = std::fs::read(&path).unwrap();
            for secret in secrets {
                let found = crate::support::raw::find(&bytes, secret.as_bytes());
                assert_eq!(found, None, "{secret} in {}", path.display());
            }
        }
    }
}
