//! What is remembered: which answers are kept, and how a caller tells them apart (B1 to B7, B13, B19 to B21).

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::{Method, Response, StatusCode};

use crate::support::client::{Answer, Ask, get, post};
use crate::support::process::eventually;
use crate::support::raw::{Raw, body, header, headers, status};
use crate::support::rig::{self, Rig, Which, on_both_stores};
use crate::support::upstream::{Reply, Upstream};

const BODY: &str = r#"{"customer":"c-1","amount":"129.90"}"#;

fn order() -> Ask {
    post("/orders", BODY).tenant("acme")
}

/// The order as bytes on a connection, with more header lines.
pub(crate) fn raw_order(lines: &str) -> String {
    let length = BODY.len();
    format!(
        "POST /orders HTTP/1.1\r\nHost: a\r\nX-Tenant-Id: acme\r\nIdempotency-Key: k\r\nContent-Type: application/json\r\n{lines}Content-Length: {length}\r\n\r\n{BODY}"
    )
}

on_both_stores! {
    b01_statuses_that_say_not_executed_free_the_key,
    b01_statuses_that_leave_it_open_are_held,
    b01_final_statuses_are_kept,
    b01_a_freed_answer_is_shared_with_those_who_waited,
    b02_what_frees_a_key_is_the_routes_word,
    b03_a_refusal_by_the_business_is_a_result,
    b04_nobody_else_sets_the_names_of_the_gateway,
    b05_the_conflicts_can_be_told_apart,
    b06_a_status_stays_what_it_was,
    b07_empty_answers_are_answers,
    b13_credentials_are_not_kept,
    b19_what_was_stored_is_what_is_looked_up,
    b20_a_replay_is_history,
    b21_nothing_is_left_of_a_key_in_the_process,
    b21_nothing_is_left_of_large_answers_in_the_process,
}

fn answering(rig: &Rig, code: u16, lines: &[(&'static str, &'static str)]) {
    let lines = lines.to_vec();
    rig.orders.answer(move |_| {
        let mut response = Response::builder().status(code).header("content-type", "text/plain");
        for (name, value) in &lines {
            response = response.header(*name, *value);
        }
        response.body(Bytes::from_static(b"said").into()).unwrap()
    });
}

async fn b01_statuses_that_say_not_executed_free_the_key(which: Which) {
    let rig = Rig::start(which, "").await;
    for code in [401, 403, 407, 408, 421, 425, 429, 503] {
        let key = format!("k{code}");
        let lines: &[_] = if code == 503 { &[("retry-after", "7")] } else { &[] };
        answering(&rig, code, lines);
        let first = order().key(&key).to(rig.gateway.addr).await;
        assert_eq!((first.status.as_u16(), &first.body[..]), (code, &b"said"[..]), "passed on");
        assert!(!first.replayed());
        assert_eq!(first.header("oncegate-expires"), None, "{code}: nothing is kept");
        assert_eq!(first.header("retry-after"), (code == 503).then_some("7"));
        assert_eq!(rig.place.status_of(&key).await, None, "{code}: the key is free");
        rig.orders.answer_created();
        let next = order().key(&key).to(rig.gateway.addr).await;
        assert_eq!((next.status, next.replayed()), (StatusCode::CREATED, false), "{code}");
        assert_eq!(rig.orders.runs_of(&key), 2, "{code}");
    }
    assert_eq!(rig.place.events().await, 8, "of the results only");
}

async fn b01_statuses_that_leave_it_open_are_held(which: Which) {
    let rig = Rig::start(which, "").await;
    for code in [502, 503, 504] {
        let key = format!("k{code}");
        answering(&rig, code, &[]);
        let first = order().key(&key).to(rig.gateway.addr).await;
        assert_eq!((first.status.as_u16(), &first.body[..]), (code, &b"said"[..]), "passed on");
        assert_eq!(rig.place.status_of(&key).await.as_deref(), Some("unknown"), "{code}");
        rig.orders.answer_created();
        let next = order().key(&key).to(rig.gateway.addr).await;
        assert_eq!(next.problem(), "outcome-unknown", "{code}");
        assert_eq!(rig.orders.runs_of(&key), 1, "{code}");
    }
    assert_eq!(rig.place.events().await, 0);
}

async fn b01_final_statuses_are_kept(which: Which) {
    let rig = Rig::start(which, "").await;
    for code in [400, 402, 404, 405, 409, 410, 422, 500, 501, 505] {
        let key = format!("k{code}");
        answering(&rig, code, &[]);
        order().key(&key).to(rig.gateway.addr).await;
        rig.orders.answer_created();
        let next = order().key(&key).to(rig.gateway.addr).await;
        assert_eq!((next.status.as_u16(), &next.body[..]), (code, &b"said"[..]));
        assert!(next.replayed(), "{code}");
        assert_eq!(rig.orders.runs_of(&key), 1, "{code}");
    }
    assert_eq!(rig.place.events().await, 0, "none of them is a success");
}

async fn b01_a_freed_answer_is_shared_with_those_who_waited(which: Which) {
    let rig = Rig::start(which, "").await;
    rig.orders.hold();
    answering(&rig, 429, &[("retry-after", "3"), ("set-cookie", "a=1")]);
    let addr = rig.gateway.addr;
    let ask = |_| tokio::spawn(async move { order().key("k").to(addr).await });
    let first = ask(0);
    rig.orders.asked(1).await;
    let waiting: Vec<_> = (0..10).map(ask).collect();
    metric_is(&rig, "oncegate_waiting", 10).await;
    rig.orders.go();
    assert_eq!(first.await.unwrap().header("set-cookie"), Some("a=1"));
    for answer in waiting {
        let answer = answer.await.unwrap();
        assert_eq!(answer.header("set-cookie"), None, "meant for the first caller alone");
        assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(answer.header("retry-after"), Some("3"));
        assert!(!answer.replayed(), "it is not from a record");
    }
    assert_eq!(rig.orders.runs(), 1);
    assert_eq!(rig.place.records().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn b01_a_waiter_on_another_replica_that_finds_the_row_gone_executes_itself() {
    let rig = Rig::start(Which::Postgres, "").await;
    let other = Rig { gateway: rig.gateway.restart(), ..Rig::start(Which::Postgres, "").await };
    rig.orders.hold();
    rig.orders.answer(|execution| {
        let status = if execution.id == 1 { 429 } else { 201 };
        Response::builder().status(status).body(Bytes::from_static(b"{}").into()).unwrap()
    });
    let (here, there) = (rig.gateway.addr, other.gateway.addr);
    let ask = |addr| tokio::spawn(async move { order().key("k").to(addr).await });
    let first = ask(here);
    rig.orders.asked(1).await;
    let waiting = [ask(there), ask(there), ask(there)];
    metric_is(&other, "oncegate_waiting", 2).await;
    rig.orders.go();
    assert_eq!(first.await.unwrap().status, StatusCode::TOO_MANY_REQUESTS);
    let mut fresh = 0;
    for answer in waiting {
        let answer = answer.await.unwrap();
        assert_eq!(answer.status, StatusCode::CREATED, "{answer:?}");
        fresh += usize::from(!answer.replayed());
    }
    assert_eq!((fresh, rig.orders.runs()), (1, 2));
}

async fn b02_what_frees_a_key_is_the_routes_word(which: Which) {
    let rig = Rig::start(which, "").await;
    rig.orders.answer_status(500);
    order().key("k").to(rig.gateway.addr).await;
    let kept = order().key("k").to(rig.gateway.addr).await;
    assert_eq!((kept.status.as_u16(), kept.replayed()), (500, true));
    assert_eq!(rig.orders.runs(), 1, "a 500 does not prove that nothing happened");
    let more = "release_on = [500]\nunknown_on = [400]";
    let rig = Rig::start(which, more).await;
    for (code, runs, kept) in
        [(500, 2, None), (400, 3, Some("unknown")), (429, 4, Some("completed"))]
    {
        rig.orders.answer_status(code);
        let key = format!("k{code}");
        if code == 500 {
            order().key(&key).to(rig.gateway.addr).await;
        }
        let last = order().key(&key).to(rig.gateway.addr).await;
        assert_eq!((last.status.as_u16(), last.replayed()), (code, false));
        assert_eq!(rig.orders.runs(), runs, "{code}");
        assert_eq!(rig.place.status_of(&key).await.as_deref(), kept, "{code}");
    }
}

async fn b03_a_refusal_by_the_business_is_a_result(which: Which) {
    let rig = Rig::start(which, "").await;
    rig.orders.answer(|_| {
        let response = Response::builder().status(409);
        let response = response.header("content-type", "application/problem+json");
        let text = r#"{"type":"https://api.example/sold-out","status":409}"#;
        response.body(Bytes::from_static(text.as_bytes()).into()).unwrap()
    });
    let first = order().key("k").to(rig.gateway.addr).await;
    rig.orders.answer_created();
    let again = order().key("k").to(rig.gateway.addr).await;
    let ours = post("/orders", "{}").tenant("acme").key("k").to(rig.gateway.addr).await;
    assert_eq!((first.replayed(), again.replayed(), ours.replayed()), (false, true, false));
    assert_eq!((first.status, &first.body), (again.status, &again.body));
    assert_eq!(again.json()["type"], "https://api.example/sold-out");
    assert!(again.json().get("retry").is_none());
    assert_eq!((ours.status, ours.problem().as_str()), (again.status, "request-mismatch"));
    assert_eq!(rig.orders.runs(), 1);
}

async fn b04_nobody_else_sets_the_names_of_the_gateway(which: Which) {
    const FORGED: [(&str, &str); 7] = [
        ("idempotent-replayed", "true"),
        ("idempotent_replayed", "true"),
        ("oncegate-record", "forged"),
        ("oncegate-attempt", "forged"),
        ("oncegate-expires", "forged"),
        ("oncegate-stored", "forged"),
        ("oncegate_anything", "forged"),
    ];
    let rig = Rig::start(which, "").await;
    for (code, method) in [(201, Method::POST), (422, Method::POST), (200, Method::GET)] {
        answering(&rig, code, &FORGED);
        let target = if method == Method::POST { "/orders" } else { "/elsewhere" };
        let mut ask = post(target, BODY).tenant("acme").method(method).key(&format!("k{code}"));
        for (name, value) in FORGED {
            ask = ask.header(name, value);
        }
        let answers = [ask.to(rig.gateway.addr).await, ask.to(rig.gateway.addr).await];
        let seen = rig.orders.ledger().pop().unwrap().headers;
        for headers in answers.iter().map(|answer| &answer.headers).chain([&seen]) {
            assert!(!format!("{headers:?}").contains("forged"), "{code}: {headers:?}");
            assert!(!headers.contains_key("idempotent_replayed"));
        }
        assert!(!seen.contains_key("idempotent-replayed"));
        let marks = answers.map(|answer| answer.replayed());
        assert_eq!(marks, [false, code != 200], "{code}: on replays only");
    }
}

async fn b05_the_conflicts_can_be_told_apart(which: Which) {
    let rig = Rig::with(which, "", "wait = \"1ms\"\nmax_response_body = 3", "").await;
    let addr = rig.gateway.addr;
    let other = || post("/orders", "{}").tenant("acme");
    rig.orders.answer_status(502);
    order().key("unknown").to(addr).await;
    rig.orders.answer_status(409);
    order().key("business").to(addr).await;
    rig.orders.answer_created();
    order().key("large").to(addr).await;
    rig.orders.hold();
    let running = tokio::spawn(async move { order().key("running").to(addr).await });
    rig.orders.asked(4).await;
    let told = |answer: Answer| {
        assert_eq!(answer.status, StatusCode::CONFLICT, "{answer:?}");
        assert_eq!(answer.header("content-type"), Some("application/problem+json"));
        let json = answer.json();
        assert_eq!(
            (json["status"].as_u64(), json["operation"].as_str()),
            (Some(409), Some("orders.create"))
        );
        assert_eq!(json["record"].as_str(), Some(answer.record().as_str()));
        let come_again = answer.header("retry-after").is_some();
        (answer.problem(), json["retry"].as_str().unwrap().to_owned(), come_again)
    };
    let met = [
        told(other().key("business").to(addr).await),
        told(other().key("running").to(addr).await),
        told(order().key("running").to(addr).await),
        told(order().key("unknown").to(addr).await),
        told(order().key("large").to(addr).await),
    ];
    let expected = [
        ("request-mismatch", "new-key", false),
        ("request-mismatch", "new-key", false),
        ("in-progress", "same-key", true),
        ("outcome-unknown", "same-key", true),
        ("response-not-retained", "no", false),
    ];
    assert_eq!(met, expected.map(|(a, b, c)| (a.to_owned(), b.to_owned(), c)));
    let business = order().key("business").to(addr).await;
    assert_eq!((business.status.as_u16(), business.replayed()), (409, true));
    assert!(business.body.is_empty(), "the upstream's own, not a problem of ours");
    rig.orders.go();
    running.await.unwrap();
    assert_eq!(rig.orders.runs(), 4);
}

async fn b06_a_status_stays_what_it_was(which: Which) {
    let rig = Rig::start(which, "").await;
    for code in [
        200, 201, 202, 203, 204, 205, 206, 226, 299, 300, 303, 304, 399, 404, 418, 422, 451, 499,
        599, 999,
    ] {
        rig.orders.answer_status(code);
        let key = format!("k{code}");
        let first = order().key(&key).to(rig.gateway.addr).await;
        rig.orders.answer_created();
        let again = order().key(&key).to(rig.gateway.addr).await;
        assert_eq!((first.status.as_u16(), again.status.as_u16()), (code, code));
        assert!(again.replayed(), "{code}");
        assert_eq!(rig.orders.runs_of(&key), 1);
    }
}

async fn b07_empty_answers_are_answers(which: Which) {
    for (code, lines) in [
        (204, ""),
        (200, "Content-Length: 0\r\n"),
        (201, "Transfer-Encoding: chunked\r\n\r\n0\r\n"),
        (205, "Content-Length: 0\r\n"),
        (304, "ETag: \"v1\"\r\nCache-Control: max-age=5\r\nContent-Length: 77\r\n"),
    ] {
        let answer = format!("HTTP/1.1 {code} X\r\n{lines}\r\n");
        let upstream = Upstream::always(Reply::keep(answer)).await;
        let url = format!("http://{}", upstream.addr);
        let (place, gateway) = rig::gateway(which, &url, "", "").await;
        // On one connection: what follows a wrong end would be taken for the next answer.
        let mut caller = Raw::connect(gateway.addr).await;
        for replayed in [false, true, true] {
            caller.send(raw_order("")).await;
            let answer = caller.answer().await;
            assert_eq!(status(&answer), code);
            assert_eq!(header(&answer, "idempotent-replayed").is_some(), replayed, "{answer}");
            assert_eq!(body(&answer).replace("0\r\n\r\n", ""), "", "{answer}");
            assert_eq!(header(&answer, "content-type"), None, "{code}");
            if code == 204 {
                assert_eq!(header(&answer, "content-length"), None);
            }
            if code == 304 {
                assert_eq!(headers(&answer, "etag"), ["\"v1\""]);
                assert_eq!(headers(&answer, "cache-control"), ["max-age=5"]);
            }
        }
        assert_eq!(upstream.seen().len(), 1, "{code}");
        assert_eq!(place.status_of("k").await.as_deref(), Some("completed"), "{code}");
    }
}

async fn b13_credentials_are_not_kept(which: Which) {
    let rig = Rig::with(which, "", "replay_drop = [\"set-cookie\", \"x-csrf-token\"]", "").await;
    let lines = [
        ("set-cookie", "session=SECRET"),
        ("www-authenticate", "Digest SECRET"),
        ("authorization", "Bearer SECRET"),
        ("proxy-authenticate", "Basic SECRET"),
        ("proxy-authentication-info", "SECRET"),
        ("x-csrf-token", "SECRET"),
        ("x-kept", "PUBLIC"),
    ];
    answering(&rig, 201, &lines);
    let ask = order().key("k").header("authorization", "Bearer SECRET").header("cookie", "SECRET");
    let first = ask.to(rig.gateway.addr).await;
    assert_eq!(first.header("set-cookie"), Some("session=SECRET"), "the first caller's own");
    assert_eq!(first.header("www-authenticate"), Some("Digest SECRET"));
    let again = ask.to(rig.gateway.addr).await;
    assert!(again.replayed());
    assert!(!format!("{:?}", again.headers).contains("SECRET"), "{again:?}");
    assert_eq!(again.header("x-kept"), Some("PUBLIC"));
    let stored = stored_bytes(&rig, which).await;
    let holds = |text: &str| stored.windows(text.len()).any(|window| window == text.as_bytes());
    assert!(holds("PUBLIC"), "the look into the store sees what is there");
    assert!(!holds("SECRET"));
}

/// All that stands in the store about requests, byte for byte.
async fn stored_bytes(rig: &Rig, which: Which) -> Vec<u8> {
    let mut stored = Vec::new();
    match which {
        Which::Sqlite => {
            let files = |folder: &std::path::Path| {
                std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path())
            };
            for path in files(rig.place.folder.path()) {
                if path.is_dir() {
                    let spilled = files(&path).map(|file| std::fs::read(file).unwrap());
                    stored.extend(spilled.flatten());
                } else if path.to_string_lossy().contains(".db") {
                    stored.extend(std::fs::read(path).unwrap());
                }
            }
        }
        Which::Postgres => {
            let tables = "select table_name from information_schema.tables where table_schema = 'public' and table_type = 'BASE TABLE'";
            for table in rig.place.rows(tables).await {
                let sql = format!("select t::text from {} t", table[0].as_deref().unwrap());
                for row in rig.place.rows(&sql).await {
                    let text = row[0].clone().unwrap_or_default();
                    stored.extend(unhex(&text));
                    stored.extend(text.into_bytes());
                }
            }
        }
    }
    stored
}

/// The bytes of all `\x...` in a row's text.
fn unhex(text: &str) -> Vec<u8> {
    let digits = text.split("\\x").skip(1);
    let digits = digits.map(|part| part.split(|c: char| !c.is_ascii_hexdigit()).next().unwrap());
    let pairs = digits.flat_map(|digits| digits.as_bytes().chunks_exact(2));
    pairs.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

async fn b19_what_was_stored_is_what_is_looked_up(which: Which) {
    // Twice without anything in memory, and once from it.
    for store in ["cache_bytes = 0", "cache_bytes = 0", ""] {
        let mut rig = Rig::with(which, store, "", "").await;
        let keys = [
            "plain",
            "with space",
            "ünlike".trim_start_matches('ü'),
            "a/b?c=%20",
            "\"quoted, it has a comma\"",
        ];
        let mut firsts = Vec::new();
        for key in keys {
            let first = order().key(key).to(rig.gateway.addr).await;
            assert!(!first.replayed() && !firsts.contains(&first.body), "{key}: {first:?}");
            firsts.push(first.body);
        }
        let replays_all = async |addr| {
            for (key, first) in keys.iter().zip(&firsts) {
                let replay = order().key(key).to(addr).await;
                assert!(replay.replayed(), "{key}");
                assert_eq!((replay.status, &replay.body), (StatusCode::CREATED, first), "{key}");
            }
        };
        replays_all(rig.gateway.addr).await;
        rig.gateway.kill9();
        replays_all(rig.gateway.restart().addr).await;
        assert_eq!(rig.orders.runs(), keys.len());
        assert_eq!(rig.place.records().await, keys.len() as i64);
    }
}

async fn b20_a_replay_is_history(which: Which) {
    let delete =
        "[[route]]\nmethod = \"DELETE\"\npath = \"/orders/{id}\"\noperation = \"orders.delete\"";
    let rig = Rig::start(which, delete).await;
    let created = order().key("create").to(rig.gateway.addr).await;
    rig.orders.answer_status(204);
    let target = created.header("location").unwrap().to_owned();
    let deleted = get(&target).method(Method::DELETE).tenant("acme").key("delete");
    assert_eq!(deleted.to(rig.gateway.addr).await.status, StatusCode::NO_CONTENT);
    rig.orders.answer_status(404);
    let again = order().key("create").to(rig.gateway.addr).await;
    assert_eq!((again.status, &again.body), (created.status, &created.body));
    assert!(again.replayed(), "the marker says that this is not the state of today");
    assert_eq!(rig.orders.runs(), 2);
}

/// The value of a metric without labels.
async fn metric(rig: &Rig, name: &str) -> i64 {
    let text = get("/metrics").to(rig.gateway.admin).await.body;
    let text = String::from_utf8(text.to_vec()).unwrap();
    let mut lines = text.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    lines.next().unwrap_or_else(|| panic!("no {name} in {text}")).trim().parse().unwrap()
}

async fn metric_is(rig: &Rig, name: &str, value: i64) {
    eventually(name, async || metric(rig, name).await == value).await;
}

async fn b21_nothing_is_left_of_a_key_in_the_process(which: Which) {
    const CACHE: i64 = 256 * 1024;
    let rig = Rig::with(which, "cache_bytes = \"256KiB\"", "", "").await;
    let addr = rig.gateway.addr;
    let asked = stream::iter(0..6000).for_each_concurrent(48, |n| async move {
        let key = format!("k{}", n / 2);
        assert_eq!(order().key(&key).to(addr).await.status, StatusCode::CREATED);
        let refused = post("/orders", "{}").tenant("acme").key(&key).to(addr).await;
        assert_eq!(refused.problem(), "request-mismatch");
    });
    asked.await;
    assert_eq!(rig.orders.runs(), 3000);
    for gauge in ["oncegate_in_flight", "oncegate_waiting", "oncegate_settling"] {
        metric_is(&rig, gauge, 0).await;
    }
    let cached = metric(&rig, "oncegate_replay_cache_bytes").await;
    assert!(cached > CACHE / 2 && cached <= CACHE, "{cached} bytes of {CACHE}");
}

async fn b21_nothing_is_left_of_large_answers_in_the_process(which: Which) {
    const MIB: usize = 1 << 20;
    let rig = Rig::with(which, "cache_bytes = \"4MiB\"", "", "").await;
    let body = Bytes::from(vec![b'x'; MIB]);
    rig.orders.answer(move |_| Response::builder().status(201).body(body.clone().into()).unwrap());
    let addr = rig.gateway.addr;
    let ask = async |keys: std::ops::Range<usize>| {
        let asked = stream::iter(keys).for_each_concurrent(4, |n| async move {
            let ask = order().key(&format!("k{n}"));
            assert_eq!(ask.to(addr).await.body.len(), MIB);
            assert!(ask.to(addr).await.replayed());
        });
        asked.await;
    };
    ask(0..10).await;
    let before = rig.gateway.most_memory();
    ask(10..160).await;
    let grown = rig.gateway.most_memory().saturating_sub(before);
    assert!(grown < 50 * MIB as u64, "150 MiB of answers left {grown} bytes");
    assert_eq!(rig.orders.runs(), 160);
}
