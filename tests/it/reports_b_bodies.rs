//! What is remembered, byte for byte: bodies, codings, headers, sizes and streams (B9 to B12, B16, B17).

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Response, StatusCode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};

use crate::reports_b::raw_order;
use crate::support::client::{Answer, Ask, post};
use crate::support::process::eventually;
use crate::support::raw::{End, PATIENCE, Raw, body, find, header, headers, status};
use crate::support::rig::{self, Rig, Which, on_both_stores};
use crate::support::upstream::{Reply, Upstream};

const BODY: &str = r#"{"customer":"c-1","amount":"129.90"}"#;

fn order() -> Ask {
    post("/orders", BODY).tenant("acme")
}

on_both_stores! {
    b09_bytes_stay_bytes_both_ways,
    b10_a_content_coding_and_its_body_stay_together,
    b11_json_is_not_written_anew,
    b12_headers_stay_repeated_in_order_and_raw,
    b16_an_answer_up_to_the_limit_is_kept,
    b16_a_larger_answer_arrives_whole_and_is_never_run_again,
    b04_trailers_carry_no_names_of_the_gateway,
    b16_a_larger_answer_that_breaks_off_is_seen_to_break_off,
    b17_a_stream_of_events_arrives_as_it_comes,
    b17_a_stream_that_breaks_off_is_seen_to_break_off,
}

fn random(length: usize) -> Bytes {
    let mut bytes = vec![0; length];
    fastrand::Rng::with_seed(7).fill(&mut bytes);
    bytes.into()
}

/// One order with its replay, from memory and, after a restart, from the store; the API answers `body`.
async fn twice(
    rig: &Rig,
    key: &str,
    ask: &Ask,
    lines: &[(&str, &str)],
    body: Bytes,
) -> [Answer; 2] {
    let lines: Vec<_> = lines.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect();
    rig.orders.answer(move |_| {
        let mut response = Response::builder().status(201);
        for (name, value) in &lines {
            response = response.header(name, value);
        }
        response.body(body.clone().into()).unwrap()
    });
    let ask = ask.clone().key(key);
    let answers = [ask.to(rig.gateway.addr).await, ask.to(rig.gateway.addr).await];
    assert_eq!(answers.each_ref().map(Answer::replayed), [false, true], "{key}: {answers:?}");
    assert_eq!(rig.orders.runs_of(key), 1);
    answers
}

async fn b09_bytes_stay_bytes_both_ways(which: Which) {
    let utf16: Vec<u8> = "größer als €".encode_utf16().flat_map(u16::to_le_bytes).collect();
    let bodies = [
        ("all bytes", "application/octet-stream", (0..=255).collect::<Vec<u8>>().into()),
        ("pdf", "application/pdf", Bytes::from_static(b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n\0\r\n%%EOF")),
        ("utf-16", "text/plain; charset=utf-16le", utf16.into()),
        ("nul", "application/json", Bytes::from_static(br#"{"a":"\u0000"}"#)),
        ("raw nul", "application/json", Bytes::from_static(b"{\"a\":\"\0\"}")),
        ("empty", "application/octet-stream", Bytes::new()),
        ("a MiB", "application/octet-stream", random(1 << 20)),
    ];
    let mut rig = Rig::start(which, "").await;
    for (key, kind, bytes) in &bodies {
        let ask = order().set("content-type", kind).body(bytes.clone());
        let answers = twice(&rig, key, &ask, &[("content-type", kind)], bytes.clone()).await;
        for answer in &answers {
            assert!(answer.body == bytes, "{key}: {} bytes", answer.body.len());
            assert_eq!(answer.header("content-type"), Some(*kind));
        }
        assert!(rig.orders.ledger().last().unwrap().body == bytes, "{key}");
    }
    rig.gateway.kill9();
    let restarted = rig.gateway.restart();
    for (key, kind, bytes) in bodies {
        let ask = order().set("content-type", kind).body(bytes.clone()).key(key);
        let answer = ask.to(restarted.addr).await;
        assert!(answer.replayed() && answer.body == bytes, "{key}: from the store");
    }
}

async fn b10_a_content_coding_and_its_body_stay_together(which: Which) {
    let rig = Rig::start(which, "").await;
    // What the coding decodes to is nobody's business here: the bytes are opaque.
    for coding in ["gzip", "br", "zstd", "identity", "x-own"] {
        let coded = random(500);
        let ask = order().header("accept-encoding", "gzip, br, zstd, x-own");
        let lines = [("content-encoding", coding), ("vary", "accept-encoding")];
        for answer in twice(&rig, coding, &ask, &lines, coded.clone()).await {
            assert_eq!(answer.header("content-encoding"), Some(coding));
            assert_eq!(answer.header("content-length"), Some("500"));
            assert_eq!(answer.header("vary"), Some("accept-encoding"));
            assert_eq!(answer.body, coded, "{coding}");
        }
    }
}

async fn b11_json_is_not_written_anew(which: Which) {
    let text = "{\"id\":12345678901234567890,\"b\":1.0,\"a\":1,\"a\":2,\n \"u\":\"\\u00e9\", \"e\":1E400 }\r\n";
    let rig = Rig::start(which, "").await;
    let ask = order().body(text);
    let kind = [("content-type", "application/json")];
    for answer in twice(&rig, "k", &ask, &kind, Bytes::from_static(text.as_bytes())).await {
        assert_eq!(answer.body, text);
    }
    assert_eq!(rig.orders.ledger()[0].body, text);
}

async fn b12_headers_stay_repeated_in_order_and_raw(which: Which) {
    let mut lines = vec![
        "Set-Cookie: a=1; Expires=Wed, 01 Jan 2031 00:00:00 GMT".to_owned(),
        "Link: </a>; rel=next".to_owned(),
        "Location: /orders/1?a=b%20c".to_owned(),
        "Vary: Accept".to_owned(),
        "eTaG: W/\"v1,2\"".to_owned(),
        "Link: </b>; rel=prev, </c>; rel=last".to_owned(),
        "Content-Disposition: attachment; filename=\"a, b \u{e4}.txt\"".to_owned(),
        format!("X-Raw: {}", ('\u{80}'..='\u{ff}').collect::<String>()),
        "X-Empty:".to_owned(),
        "Vary: Accept-Language".to_owned(),
        "Set-Cookie: b=2; Expires=Thu, 02 Jan 2031 00:00:00 GMT".to_owned(),
        "X_Under_Score: kept".to_owned(),
        "X-MANY-cases: 1".to_owned(),
        "x-many-CASES: 2".to_owned(),
        "Connection: close, X-Hop".to_owned(),
        "X-Hop: gone".to_owned(),
        "Keep-Alive: timeout=5".to_owned(),
    ];
    lines.extend((0..100).map(|n| format!("X-Number-{}: {n}", n % 50)));
    let head: Vec<u8> = lines
        .iter()
        .flat_map(|line| line.chars().chain("\r\n".chars()))
        .map(|char| u8::try_from(u32::from(char)).unwrap())
        .collect();
    let answer = [b"HTTP/1.1 201 Created\r\n", &head[..], b"Content-Length: 2\r\n\r\nok"].concat();
    let upstream = Upstream::always(Reply::keep(answer)).await;
    let url = format!("http://{}", upstream.addr);
    let (_place, mut gateway) = rig::gateway(which, &url, "", "").await;
    let mut names: Vec<_> = lines.iter().map(|line| line.split(':').next().unwrap()).collect();
    names.sort_unstable();
    names.dedup();
    let values = |name: &str| -> Vec<String> {
        let lines = lines.iter().filter_map(|line| line.split_once(':'));
        let ours = lines.filter(|(n, _)| n.eq_ignore_ascii_case(name));
        ours.map(|(_, value)| value.trim().to_owned()).collect()
    };
    for round in ["first", "replayed", "restarted"] {
        if round == "restarted" {
            gateway.kill9();
            gateway = gateway.restart();
        }
        let answer = Raw::sending(gateway.addr, raw_order("")).await.answer().await;
        assert_eq!((status(&answer), body(&answer)), (201, "ok"));
        assert_eq!(header(&answer, "idempotent-replayed").is_some(), round != "first");
        for name in &names {
            let gone = ["X-Hop", "Keep-Alive"].contains(name)
                || (*name == "Set-Cookie" && round != "first");
            let expected = if gone { Vec::new() } else { values(name) };
            if *name != "Connection" {
                assert_eq!(headers(&answer, name), expected, "{round}: {name}");
                let spelled = answer.matches(&format!("\r\n{name}:")).count();
                let sent = lines.iter().filter(|line| line.split(':').next() == Some(name));
                let sent = if gone { 0 } else { sent.count() };
                assert_eq!(spelled, sent, "{round}: {name} keeps its spelling");
            }
        }
        assert!(!answer.contains("X-Hop"), "{round}");
    }
    assert_eq!(upstream.seen().len(), 1);
}

const LIMIT: usize = 64 * 1024;
const LIMITED: &str = "max_response_body = \"64KiB\"";

/// An answer with this body, by its length or in chunks.
fn created(body: &[u8], chunked: bool) -> Vec<u8> {
    let mut answer = b"HTTP/1.1 201 Created\r\n".to_vec();
    if !chunked {
        answer.extend(format!("Content-Length: {}\r\n\r\n", body.len()).into_bytes());
        answer.extend(body);
        return answer;
    }
    answer.extend(b"Transfer-Encoding: chunked\r\n\r\n");
    for chunk in body.chunks(9_999) {
        answer.extend(format!("{:x}\r\n", chunk.len()).into_bytes());
        answer.extend(chunk);
        answer.extend(b"\r\n");
    }
    answer.extend(b"0\r\n\r\n");
    answer
}

async fn b16_an_answer_up_to_the_limit_is_kept(which: Which) {
    for (length, chunked) in [(LIMIT - 1, false), (LIMIT, false), (LIMIT - 1, true), (LIMIT, true)]
    {
        let bytes = random(length);
        let upstream = Upstream::always(Reply::keep(created(&bytes, chunked))).await;
        let url = format!("http://{}", upstream.addr);
        let (_place, gateway) = rig::gateway(which, &url, "", LIMITED).await;
        for replayed in [false, true] {
            let answer = order().key("k").to(gateway.addr).await;
            assert_eq!((answer.status, answer.replayed()), (StatusCode::CREATED, replayed));
            assert!(answer.body == bytes, "{length}, chunked {chunked}");
        }
        assert_eq!(upstream.seen().len(), 1);
    }
}

async fn b16_a_larger_answer_arrives_whole_and_is_never_run_again(which: Which) {
    for (length, chunked) in
        [(LIMIT + 1, false), (LIMIT + 1, true), (20 << 20, false), (20 << 20, true)]
    {
        let bytes = random(length);
        let upstream = Upstream::always(Reply::keep(created(&bytes, chunked))).await;
        let url = format!("http://{}", upstream.addr);
        let (place, mut gateway) = rig::gateway(which, &url, "", LIMITED).await;
        let first = order().key("k").to(gateway.addr).await;
        assert_eq!(first.status, StatusCode::CREATED);
        assert!(first.header("oncegate-expires").is_some());
        assert!(first.body == bytes, "{length}, chunked {chunked}: {}", first.body.len());
        for restart in [false, true] {
            if restart {
                gateway.kill9();
                gateway = gateway.restart();
            }
            let next = order().key("k").to(gateway.addr).await;
            assert_eq!(next.status, StatusCode::CONFLICT);
            assert_eq!(next.problem(), "response-not-retained");
            let detail = next.json()["detail"].to_string();
            assert!(detail.contains("201"), "the status of what was executed: {detail}");
            assert_eq!(next.record(), first.record());
        }
        assert_eq!(upstream.seen().len(), 1);
        let kept = "select count(*) from idempotency_records where status = 'completed' and response_status = 201 and response_body is null";
        assert_eq!(place.count(kept).await, 1);
        assert_eq!(place.events().await, 1, "it was executed, so it is announced");
    }
}

/// An upstream that answers with a stream, piece by piece as it is told; empty: the end of the connection.
struct Streaming {
    addr: SocketAddr,
    say: UnboundedSender<&'static str>,
    asked: Arc<Notify>,
}

async fn streaming() -> Streaming {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let (say, mut said): (_, UnboundedReceiver<&str>) = mpsc::unbounded_channel();
    let asked = Arc::new(Notify::new());
    let tell = Arc::clone(&asked);
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        // A second execution finds nobody.
        drop(listener);
        let mut request = Vec::new();
        while find(&request, BODY.as_bytes()).is_none() {
            assert_ne!(stream.read_buf(&mut request).await.unwrap(), 0);
        }
        tell.notify_one();
        while let Some(piece @ [_, ..]) = said.recv().await.map(str::as_bytes) {
            stream.write_all(piece).await.unwrap();
        }
    });
    Streaming { addr, say, asked }
}

const EVENTS: &str = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n";
const ONE: &str = "b\r\ndata: one\n\n\r\n";
const TWO: &str = "b\r\ndata: two\n\n\r\n";

/// Reads until the text has come.
async fn until(caller: &mut Raw, text: &str) {
    let mut read = Vec::new();
    let reading = async {
        while find(&read, text.as_bytes()).is_none() {
            assert_ne!(caller.stream.read_buf(&mut read).await.unwrap(), 0, "ended before {text}");
        }
    };
    tokio::time::timeout(PATIENCE, reading).await.expect("it comes as it is said");
}

async fn b17_a_stream_of_events_arrives_as_it_comes(which: Which) {
    let upstream = streaming().await;
    let url = format!("http://{}", upstream.addr);
    let begun = tokio::time::Instant::now();
    let (place, gateway) =
        rig::gateway(which, &url, "", "wait = \"100ms\"\ntimeout = \"3s\"").await;
    let mut caller = Raw::sending(gateway.addr, raw_order("")).await;
    upstream.asked.notified().await;
    assert_eq!(order().key("k").to(gateway.addr).await.problem(), "in-progress");
    upstream.say.send(EVENTS).unwrap();
    until(&mut caller, "200 OK").await;
    assert_eq!(place.status_of("k").await.as_deref(), Some("completed"), "before the first byte");
    assert_eq!(place.events().await, 1);
    for (said, seen) in [(ONE, "data: one"), (TWO, "data: two")] {
        upstream.say.send(said).unwrap();
        until(&mut caller, seen).await;
        let next = order().key("k").to(gateway.addr).await;
        assert_eq!(next.problem(), "response-not-retained", "while it streams");
        // The second piece comes when the time-out is over: the answer had begun in time.
        tokio::time::sleep_until(begun + Duration::from_millis(3_500)).await;
    }
    upstream.say.send("0\r\n\r\n").unwrap();
    until(&mut caller, "0\r\n\r\n").await;
    assert_eq!(order().key("k").to(gateway.addr).await.problem(), "response-not-retained");
}

async fn b17_a_stream_that_breaks_off_is_seen_to_break_off(which: Which) {
    let upstream = streaming().await;
    let url = format!("http://{}", upstream.addr);
    let (place, gateway) = rig::gateway(which, &url, "", "").await;
    let mut caller = Raw::sending(gateway.addr, raw_order("")).await;
    upstream.say.send(EVENTS).unwrap();
    upstream.say.send(ONE).unwrap();
    until(&mut caller, "data: one").await;
    upstream.say.send("").unwrap();
    let (rest, end) = caller.rest().await;
    assert!(!rest.contains("0\r\n\r\n"), "not an end that looks whole");
    assert_ne!(end, End::StillOpen);
    assert_eq!(place.status_of("k").await.as_deref(), Some("completed"), "nothing changes");
    eventually("duplicates are told", async || {
        order().key("k").to(gateway.addr).await.problem() == "response-not-retained"
    })
    .await;
}

async fn b16_a_larger_answer_that_breaks_off_is_seen_to_break_off(which: Which) {
    let bytes = random(4 * LIMIT);
    let whole = created(&bytes, false);
    let upstream = Upstream::always(Reply::fin(&whole[..3 * LIMIT])).await;
    let url = format!("http://{}", upstream.addr);
    let (place, gateway) = rig::gateway(which, &url, "", LIMITED).await;
    let first = order().key("k").send(gateway.addr).await;
    assert!(first.is_err(), "taken for whole: {first:?}");
    assert_eq!(place.status_of("k").await.as_deref(), Some("completed"), "it was executed");
    assert_eq!(order().key("k").to(gateway.addr).await.problem(), "response-not-retained");
    assert_eq!(upstream.seen().len(), 1);
}

async fn b04_trailers_carry_no_names_of_the_gateway(which: Which) {
    for kind in ["text/event-stream", "text/plain"] {
        let answer = format!(
            "HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTrailer: X-Sum, Idempotent-Replayed, Oncegate-Stored\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX-Sum: 1\r\nIdempotent-Replayed: true\r\nOncegate-Stored: forged\r\n\r\n"
        );
        let upstream = Upstream::always(Reply::keep(answer)).await;
        let url = format!("http://{}", upstream.addr);
        let (_place, gateway) = rig::gateway(which, &url, "", "").await;
        let lines = "TE: trailers\r\nConnection: close, TE\r\n";
        let (answer, _) = Raw::sending(gateway.addr, raw_order(lines)).await.rest().await;
        assert_eq!(status(&answer), 200);
        let body = body(&answer).to_ascii_lowercase();
        assert!(body.contains("hello"), "{answer}");
        assert!(!body.contains("idempotent-replayed") && !body.contains("oncegate"), "{answer}");
        assert!(header(&answer, "trailer").is_some() && body.contains("x-sum: 1"), "{answer}");
    }
}
