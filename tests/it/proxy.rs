//! What passes through: framing, headers, targets, bodies and connections, by the cases that other proxies got wrong.

use std::convert::Infallible;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use oncegate::gateway::accept::{self, Listener};
use oncegate::gateway::headers::HostPolicy;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio_util::sync::CancellationToken;

use crate::support::proxy::{Setup, start_proxy};
use crate::support::raw::{End, NOT_CHUNKED, PATIENCE, Raw, body, header, headers, status};
use crate::support::upstream::{OK, Reply, Upstream};

const SHORT: Duration = Duration::from_millis(300);

fn get(lines: &str) -> String {
    format!("GET /x HTTP/1.1\r\nHost: a\r\n{lines}\r\n")
}

/// Sends one request and reads one answer.
async fn ask(upstream: &Upstream, request: impl AsRef<[u8]>) -> String {
    let addr = start_proxy(upstream.addr).await;
    Raw::sending(addr, request).await.answer().await
}

/// A request that must be refused, closing the connection, before the upstream sees anything.
async fn refused(request: impl AsRef<[u8]>, statuses: &[u16]) {
    let upstream = Upstream::always(Reply::keep(OK)).await;
    let addr = start_proxy(upstream.addr).await;
    let mut raw = Raw::sending(addr, request.as_ref()).await;
    raw.send("GET /second HTTP/1.1\r\nHost: a\r\n\r\n").await;
    let (answer, end) = raw.rest().await;
    let request = String::from_utf8_lossy(request.as_ref()).chars().take(200).collect::<String>();
    assert!(statuses.contains(&status(&answer)), "{request:?} got {answer:?}");
    assert_ne!(end, End::StillOpen, "{request:?}");
    assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{request:?} got {answer:?}");
    assert_eq!(upstream.seen().len() + upstream.cut(), 0, "{request:?}");
}

fn post(lines: &str) -> String {
    format!("POST /orders HTTP/1.1\r\nHost: a\r\n{lines}")
}

#[tokio::test]
async fn of_length_and_chunks_together_only_the_chunks_count() {
    for lines in [
        "Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /evil HTTP/1.1\r\nHost: a\r\n\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 6\r\n\r\n0\r\n\r\nGET /evil HTTP/1.1\r\nHost: a\r\n\r\n",
    ] {
        let upstream = Upstream::always(Reply::keep(OK)).await;
        let addr = start_proxy(upstream.addr).await;
        let (answer, end) = Raw::sending(addr, post(lines)).await.rest().await;
        assert_ne!(end, End::StillOpen);
        assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{answer}");
        let seen = upstream.seen();
        assert_eq!(seen.len(), 1);
        assert_eq!(headers(&seen[0].head, "content-length").len(), 0);
        assert_eq!(headers(&seen[0].head, "transfer-encoding"), ["chunked"]);
    }
}

#[tokio::test]
async fn only_chunked_is_a_transfer_coding() {
    for value in NOT_CHUNKED {
        refused(post(&format!("Transfer-Encoding: {value}\r\n\r\n0\r\n\r\n")), &[400, 501]).await;
    }
    let nbsp = [post("Transfer-Encoding: ").as_bytes(), b"\xa0chunked\r\n\r\n0\r\n\r\n"].concat();
    refused(nbsp, &[400, 501]).await;
    refused("POST /x HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", &[400]).await;
    for value in ["CHUNKED", "chunked\t"] {
        let upstream = Upstream::always(Reply::keep(OK)).await;
        let request = post(&format!("Transfer-Encoding: {value}\r\n\r\n0\r\n\r\n"));
        assert_eq!(status(&ask(&upstream, request).await), 200);
        assert_eq!(headers(&upstream.seen()[0].head, "transfer-encoding"), ["chunked"]);
    }
}

#[tokio::test]
async fn lengths_are_one_decimal_number() {
    for lines in [
        "Content-Length: \r\nContent-Length: 5",
        "Content-Length: 0\r\nContent-Length: 5",
        "Content-Length: 5, 5",
        "Content-Length: +2",
        "Content-Length: -2",
        "Content-Length: 0x2",
        "Content-Length: 2_",
        "Content-Length: 2 2",
        "Content-Length: \u{662}",
        "Content-Length: 2.0",
        "Content-Length: 18446744073709551616",
    ] {
        refused(post(&format!("{lines}\r\n\r\nhello")), &[400, 431]).await;
    }
    let upstream = Upstream::always(Reply::keep(OK)).await;
    let twice = post("Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello");
    assert_eq!(status(&ask(&upstream, twice).await), 200);
    assert_eq!(headers(&upstream.seen()[0].head, "content-length"), ["5"]);
}

#[tokio::test]
async fn odd_chunk_lines_never_make_a_whole_request() {
    for chunks in
        ["2;\nxx\r\nhi\r\n0\r\n\r\n", "2;a=b\r\r\nhi\r\n0\r\n\r\n", "2\r;a\r\nhi\r\n0\r\n\r\n"]
    {
        let upstream = Upstream::always(Reply::keep(OK)).await;
        let addr = start_proxy(upstream.addr).await;
        let request = post(&format!("Transfer-Encoding: chunked\r\n\r\n{chunks}"));
        let (_, end) = Raw::sending(addr, request).await.rest().await;
        assert_ne!(end, End::StillOpen, "{chunks:?}");
        assert_eq!(upstream.seen().len(), 0, "{chunks:?}");
    }
    let upstream = Upstream::always(Reply::keep(OK)).await;
    let extended = post("Transfer-Encoding: chunked\r\n\r\n2;a=b\r\nhi\r\n0\r\n\r\n");
    assert_eq!(status(&ask(&upstream, extended).await), 200);
    assert_eq!(upstream.seen()[0].body, b"2\r\nhi\r\n0\r\n\r\n");
}

#[tokio::test]
async fn malformed_header_lines_are_refused() {
    for line in ["X: a\rY: b", "X: a\0b", "X: a\r\n b", "X b", ":x", "X : y", "Content-Length : 5"]
    {
        refused(post(&format!("{line}\r\n\r\n")), &[400]).await;
    }
    refused("GET / HTTP/1.1\r\n X: y\r\nHost: a\r\n\r\n", &[400]).await;
}

#[tokio::test]
async fn a_body_and_its_length_go_together_on_every_method() {
    let upstream = Upstream::always(Reply::keep(OK)).await;
    let addr = start_proxy(upstream.addr).await;
    let mut raw = Raw::connect(addr).await;
    let chunked = "Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n";
    let mut expected = Vec::new();
    for method in ["GET", "HEAD", "DELETE", "PATCH", "POST"] {
        for (rest, framing, bytes) in [
            ("\r\n", "", ""),
            ("Content-Length: 0\r\n\r\n", "content-length: 0", ""),
            ("Content-Length: 5\r\n\r\nhello", "content-length: 5", "hello"),
            (chunked, "transfer-encoding: chunked", "2\r\nhi\r\n0\r\n\r\n"),
            (
                "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
                "transfer-encoding: chunked",
                "0\r\n\r\n",
            ),
        ] {
            raw.send(format!("{method} /x HTTP/1.1\r\nHost: a\r\n{rest}")).await;
            let answer =
                if method == "HEAD" { raw.answer_to_head().await } else { raw.answer().await };
            assert_eq!(status(&answer), 200, "{method} {rest:?}");
            expected.push((method, framing, bytes));
        }
    }
    for (seen, (method, framing, bytes)) in upstream.seen().iter().zip(expected) {
        let head = seen.head.to_ascii_lowercase();
        let framings: Vec<_> = head
            .lines()
            .filter(|l| l.starts_with("content-length") || l.starts_with("transfer-encoding"))
            .collect();
        assert_eq!(framings.join("|"), framing, "{method}: {head}");
        assert_eq!(String::from_utf8_lossy(&seen.body), bytes, "{method} {framing}");
    }
}

#[tokio::test]
async fn an_upgrade_is_not_forwarded_and_a_switch_not_passed_on() {
    let switch = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n";
    let upstream = Upstream::always(Reply::keep(switch)).await;
    let lines =
        "Upgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\nConnection: Upgrade, HTTP2-Settings\r\n";
    assert_eq!(status(&ask(&upstream, get(lines)).await), 502);
    let head = upstream.seen()[0].head.to_ascii_lowercase();
    assert!(!head.contains("upgrade") && !head.contains("http2-settings"), "{head}");
}

#[tokio::test]
async fn headers_of_one_hop_stay_on_it_both_ways() {
    let hop = "Connection: X-A\r\nConnection: x-b\r\nConnection: \r\nX-A: 1\r\nX-B: 1\r\nX-C: 1\r\n\
               Keep-Alive: 5\r\nProxy-Connection: x\r\nProxy-Authorization: x\r\nTE: gzip, trailers\r\n";
    let upstream = Upstream::always(Reply::keep(format!(
        "HTTP/1.1 200 OK\r\n{hop}Content-Length: 2\r\n\r\nok"
    )))
    .await;
    let addr = start_proxy(upstream.addr).await;
    for _ in 0..2 {
        let request = get(&format!("{hop}Connection: close\r\n"));
        let (answer, end) = Raw::sending(addr, request).await.rest().await;
        assert_eq!(end, End::Fin);
        assert_eq!(headers(&answer, "connection"), ["close"], "{answer}");
        for head in [answer, upstream.seen().pop().unwrap().head + "\r\nconnection: close"] {
            assert_eq!(headers(&head, "connection"), ["close"]);
            assert_eq!(headers(&head, "x-c"), ["1"]);
            for name in
                ["x-a", "x-b", "keep-alive", "proxy-connection", "proxy-authorization", "te"]
            {
                assert_eq!(headers(&head, name).len(), 0, "{name} in {head}");
            }
        }
    }
    // The caller's close says nothing about our connection to the upstream.
    assert_eq!(upstream.seen()[1].connection, 1);
}

#[tokio::test]
async fn a_header_named_by_connection_is_gone_for_the_upstream() {
    let upstream = Upstream::always(Reply::keep(OK)).await;
    let lines = "X-Tenant-Id: t1\r\nIdempotency-Key: k\r\nConnection: X-Tenant-Id, Idempotency-Key, Host\r\n";
    assert_eq!(status(&ask(&upstream, get(lines)).await), 200);
    let head = &upstream.seen()[0].head;
    assert_eq!(headers(head, "x-tenant-id").len() + headers(head, "idempotency-key").len(), 0);
    assert_eq!(headers(head, "host"), ["a"]);
}

#[tokio::test]
async fn names_of_the_gateway_are_the_gateways_alone() {
    let own = "Oncegate-Record: 1\r\noncegate_attempt: 1\r\nIdempotent-Replayed: true\r\n";
    let upstream =
        Upstream::always(Reply::keep(format!("HTTP/1.1 200 OK\r\n{own}Content-Length: 0\r\n\r\n")))
            .await;
    let answer = ask(&upstream, get(own)).await;
    for head in [answer, upstream.seen()[0].head.clone()] {
        let head = head.to_ascii_lowercase().replace("1.1 oncegate", "");
        assert!(!head.contains("oncegate") && !head.contains("replayed"), "{head}");
    }
}

#[tokio::test]
async fn the_upstream_learns_who_asked_from_us_unless_the_peer_is_trusted() {
    let lines = "X-Forwarded-For: 9.9.9.9\r\nX-Forwarded-Host: h\r\nX-Forwarded-Proto: https\r\n\
                 X-Forwarded-Port: 1\r\nForwarded: for=9.9.9.9\r\nX-Real-Ip: 9.9.9.9\r\n";
    let upstream = Upstream::always(Reply::keep(OK)).await;
    let answer = ask(&upstream, get(lines)).await;
    assert_eq!(headers(&answer, "via"), ["1.1 oncegate"]);
    assert_eq!(headers(&answer, "date").len(), 1);
    let head = upstream.seen()[0].head.clone();
    assert!(!head.contains("9.9.9.9"), "{head}");
    assert_eq!(headers(&head, "x-forwarded-for"), ["127.0.0.1"]);
    assert_eq!(headers(&head, "x-forwarded-host"), ["a"]);
    assert_eq!(headers(&head, "x-forwarded-proto"), ["http"]);
    assert_eq!(headers(&head, "via"), ["1.1 oncegate"]);

    let mut setup = Setup::of(upstream.addr);
    setup.forwarding.trusted = vec!["127.0.0.0/8".parse().unwrap()];
    setup.forwarding.host = HostPolicy::Upstream;
    let addr = setup.start().await.addr;
    Raw::sending(addr, get(lines)).await.answer().await;
    let head = upstream.seen()[1].head.clone();
    assert_eq!(headers(&head, "x-forwarded-for"), ["9.9.9.9, 127.0.0.1"]);
    assert_eq!(headers(&head, "x-forwarded-host"), ["h"]);
    assert_eq!(headers(&head, "host"), [upstream.addr.to_string()]);
}

#[tokio::test]
async fn header_names_keep_their_spelling_both_ways() {
    let reply = "HTTP/1.1 200 OK\r\nSet-COOKIE: a=1\r\nX-ReQ-Id: 2\r\nContent-Length: 0\r\n\r\n";
    let upstream = Upstream::always(Reply::keep(reply)).await;
    let answer = ask(&upstream, get("SOAPAction: x\r\nX-ReQ-Id: 1\r\n")).await;
    assert!(answer.contains("Set-COOKIE: a=1") && answer.contains("X-ReQ-Id: 2"), "{answer}");
    let head = &upstream.seen()[0].head;
    assert!(head.contains("SOAPAction: x") && head.contains("X-ReQ-Id: 1"), "{head}");
}

#[tokio::test]
async fn repeated_fields_stay_repeated_and_in_order() {
    let lines = "X-A: 1\r\nWarning: a\r\nX-B: x\r\nX-A: 2\r\nWarning: b\r\n";
    let reply = format!(
        "HTTP/1.1 200 OK\r\nSet-Cookie: a=1\r\n{lines}Set-Cookie: b=2\r\nWWW-Authenticate: x\r\n\
         WWW-Authenticate: y\r\nContent-Length: 0\r\n\r\n"
    );
    let upstream = Upstream::always(Reply::keep(reply)).await;
    let answer = ask(&upstream, get(lines)).await;
    assert_eq!(headers(&answer, "set-cookie"), ["a=1", "b=2"]);
    assert_eq!(headers(&answer, "www-authenticate"), ["x", "y"]);
    for head in [&answer, &upstream.seen()[0].head] {
        assert_eq!(headers(head, "x-a"), ["1", "2"]);
        assert_eq!(headers(head, "warning"), ["a", "b"]);
    }
}

#[tokio::test]
async fn answers_without_a_body_end_where_they_should() {
    for (method, reply, length) in [
        ("HEAD", "200 OK\r\nContent-Length: 50\r\n\r\n", Some("50")),
        ("HEAD", "200 OK\r\n\r\n", None),
        ("HEAD", "200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", None),
        ("GET", "204 No Content\r\n\r\n", None),
        ("GET", "204 No Content\r\nContent-Length: 2\r\n\r\nok", None),
        ("GET", "304 Not Modified\r\nETag: x\r\n\r\n", None),
    ] {
        let first = Reply::keep(format!("HTTP/1.1 {reply}"));
        let second = Reply::keep(OK);
        let upstream = Upstream::start(move |_, seen| match seen.target() {
            "/x" => first.clone(),
            _ => second.clone(),
        })
        .await;
        let addr = start_proxy(upstream.addr).await;
        let request = format!("{method} /x HTTP/1.1\r\nHost: a\r\n\r\n");
        let mut raw = Raw::sending(addr, request).await;
        let answer = raw.answer_to_head().await;
        assert_eq!(header(&answer, "content-length").as_deref(), length, "{method} {answer}");
        raw.send("GET /second HTTP/1.1\r\nHost: a\r\n\r\n").await;
        let second = raw.answer().await;
        assert_eq!((status(&second), body(&second)), (200, "ok"), "{reply:?}");
    }
}

#[tokio::test]
async fn the_target_goes_out_byte_for_byte() {
    let upstream = Upstream::always(Reply::keep(OK)).await;
    let addr = start_proxy(upstream.addr).await;
    let mut raw = Raw::connect(addr).await;
    let targets = [
        "/api/queues/%2F/a%2fb%252F?x=%20+&y=%zz",
        "//orders",
        "/a//b",
        "/a/../orders",
        "/%2e%2e/orders",
        "/./orders",
        "/orders/",
        "/orders?",
        "/ORDERS",
        "/orders;v=1",
        "/[]{}|^\\",
    ];
    for target in targets {
        raw.send(format!("GET {target} HTTP/1.1\r\nHost: a\r\n\r\n")).await;
        assert_eq!(status(&raw.answer().await), 200, "{target}");
    }
    let seen = upstream.seen();
    assert_eq!(seen.iter().map(|seen| seen.target()).collect::<Vec<_>>(), targets);
}

#[tokio::test]
async fn an_absolute_target_says_whom_the_request_is_for() {
    let upstream = Upstream::always(Reply::keep(OK)).await;
    let addr = start_proxy(upstream.addr).await;
    for (line, target, host) in [
        ("GET http://evil.example/x?y", "/x?y", "evil.example"),
        ("GET HTTP://A/x", "/x", "A"),
        ("GET http://a?x", "/?x", "a"),
        ("GET http://a:81//b", "//b", "a:81"),
        ("OPTIONS *", "*", "b"),
    ] {
        let request = format!("{line} HTTP/1.1\r\nHost: b\r\n\r\n");
        let answer = Raw::sending(addr, request).await.answer().await;
        assert_eq!(status(&answer), 200, "{line}");
        let seen = upstream.seen().pop().unwrap();
        assert_eq!((seen.target(), headers(&seen.head, "host")), (target, vec![host.to_owned()]));
    }
    for target in ["http://u:p@a/x", "ftp://a/x", "*", "a:80"] {
        refused(format!("GET {target} HTTP/1.1\r\nHost: a\r\n\r\n"), &[400]).await;
    }
}

#[tokio::test]
async fn connect_makes_no_connection() {
    refused("CONNECT 169.254.169.254:80 HTTP/1.1\r\nHost: x\r\n\r\n", &[501]).await;
}

#[tokio::test]
async fn odd_bytes_in_a_request_line_never_reach_another_target() {
    for target in ["/a b", "/a\tb", "/\"?\"", "/<"] {
        refused(format!("GET {target} HTTP/1.1\r\nHost: a\r\n\r\n"), &[400, 505]).await;
    }
    refused(b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n", &[400]).await;
    refused("GET  / HTTP/1.1\r\nHost: a\r\n\r\n", &[400]).await;
    refused("GET / HTTP/1.2\r\nHost: a\r\n\r\n", &[400, 505]).await;
    refused("GET / HTTP/2.0\r\nHost: a\r\n\r\n", &[400, 505]).await;
    let upstream = Upstream::always(Reply::keep(OK)).await;
    for (request, target) in [
        ("GET /a#f HTTP/1.1\r\nHost: a\r\n\r\n", "/a"),
        ("\r\n\r\nGET /crlf HTTP/1.1\r\nHost: a\r\n\r\n", "/crlf"),
        ("get /lower HTTP/1.1\r\nHost: a\r\n\r\n", "/lower"),
    ] {
        assert_eq!(status(&ask(&upstream, request).await), 200);
        assert_eq!(upstream.seen().pop().unwrap().target(), target);
    }
}

#[tokio::test]
async fn hosts_that_are_missing_repeated_or_malformed_are_refused() {
    for lines in ["", "Host: \r\n", "Host: a\r\nHost: a\r\n", "Host: a b/c@d\r\n"] {
        refused(format!("GET / HTTP/1.1\r\n{lines}\r\n"), &[400]).await;
    }
}

#[tokio::test]
async fn heads_beyond_the_limits_are_answered_by_431() {
    let many: String = (0..110).map(|n| format!("X-{n}: {n}\r\n")).collect();
    refused(get(&many), &[431]).await;
    refused(get(&format!("X: {}\r\n", "x".repeat(70_000))), &[431]).await;
    refused(format!("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", "x".repeat(70_000)), &[414, 431]).await;
}

#[tokio::test]
async fn an_expectation_is_met_by_us_and_not_forwarded() {
    let upstream = Upstream::always(Reply::keep(OK)).await;
    let addr = start_proxy(upstream.addr).await;
    let mut raw =
        Raw::sending(addr, post("Content-Length: 2\r\nExpect: 100-continue\r\n\r\n")).await;
    assert_eq!(status(&raw.answer().await), 100);
    raw.send("hi").await;
    assert_eq!(status(&raw.answer().await), 200);
    assert_eq!(headers(&upstream.seen()[0].head, "expect").len(), 0);
    refused(post("Content-Length: 2\r\nExpect: foo\r\n\r\n"), &[417]).await;
    let old = "POST /x HTTP/1.0\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\nhi";
    let (answer, _) = Raw::sending(addr, old).await.rest().await;
    assert_eq!(status(&answer), 200, "{answer}");
}

#[tokio::test]
async fn interim_answers_neither_reach_the_caller_nor_hold_its_answer_up() {
    let hints = "HTTP/1.1 103 Early Hints\r\nLink: </a.css>; rel=preload\r\n\r\n";
    let several = format!("HTTP/1.1 102 Processing\r\n\r\n{hints}{hints}");
    for reply in [
        Reply::keep(format!("{hints}{OK}")),
        Reply::keep(format!("{several}{OK}")),
        Reply::keep(&several).then(OK),
        Reply::keep(format!("HTTP/1.1 100 Continue\r\n\r\n{several}")).then(OK),
    ] {
        let upstream = Upstream::always(reply).await;
        let mut setup = Setup::of(upstream.addr);
        // Whoever waited for more than the final answer would have to wait for this.
        setup.upstream.answer_timeout = PATIENCE * 10;
        let mut raw = Raw::connect(setup.start().await.addr).await;
        for _ in 0..2 {
            raw.send(get("")).await;
            let answer = raw.answer().await;
            assert_eq!((status(&answer), body(&answer)), (200, "ok"), "{answer}");
            assert_eq!(header(&answer, "link"), None, "{answer}");
        }
        // Its own 100, once; not the upstream's beside it.
        raw.send(post("Content-Length: 2\r\nExpect: 100-continue\r\n\r\n")).await;
        assert_eq!(status(&raw.answer().await), 100);
        raw.send("hi").await;
        assert_eq!(status(&raw.answer().await), 200);
        assert_eq!(upstream.connections(), 1, "the connection to the upstream goes on");
    }
    // An interim answer is no answer.
    let upstream = Upstream::always(Reply::keep(&several)).await;
    let mut setup = Setup::of(upstream.addr);
    setup.upstream.answer_timeout = SHORT;
    let answer = Raw::sending(setup.start().await.addr, get("")).await.answer().await;
    assert_eq!((status(&answer), body(&answer)), (504, "upstream-timeout"));
}

#[tokio::test]
async fn an_early_answer_reaches_a_caller_that_is_still_sending() {
    let too_large = "HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\nConnection: close\r\n\r\nbig";
    for _ in 0..20 {
        let upstream = Upstream::hasty(Reply::fin(too_large)).await;
        let addr = start_proxy(upstream.addr).await;
        let mut raw = Raw::sending(addr, post("Content-Length: 100000000\r\n\r\n")).await;
        let answer = send_until_answered(&mut raw).await;
        assert_eq!((status(&answer), body(&answer)), (413, "big"), "{answer:?}");
    }
}

#[tokio::test]
async fn a_refusal_reaches_a_caller_that_is_still_sending() {
    let upstream = Upstream::always(Reply::keep(OK)).await;
    let addr = start_proxy(upstream.addr).await;
    for _ in 0..20 {
        let request = "POST /x HTTP/1.1\r\nHost: a/b\r\nContent-Length: 100000000\r\n\r\n";
        let mut raw = Raw::sending(addr, request).await;
        let answer = send_until_answered(&mut raw).await;
        assert_eq!(status(&answer), 400, "{answer:?}");
    }
}

#[tokio::test]
async fn a_caller_may_go_on_sending_for_a_while_after_its_answer() {
    // Many clients take a failed send for a failed request, and never read the answer.
    let upstream = Upstream::always(Reply::keep(OK)).await;
    let addr = start_proxy(upstream.addr).await;
    let request = "POST /x HTTP/1.1\r\nHost: a/b\r\nContent-Length: 100000000\r\n\r\n";
    let mut raw = Raw::sending(addr, request).await;
    assert_eq!(status(&raw.answer().await), 400);
    for piece in 0..20 {
        let sent = raw.stream.write_all(&[b'x'; 8192]).await;
        assert!(sent.is_ok(), "piece {piece}: {sent:?}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert_eq!(raw.rest().await, (String::new(), End::Fin));
}

/// Sends and sends until there is something to read, then a little more, then reads: as a simple client does.
async fn send_until_answered(raw: &mut Raw) -> String {
    let piece = vec![b'x'; 16 * 1024];
    for _ in 0..2000 {
        tokio::select! {
            biased;
            readable = raw.stream.readable() => { readable.unwrap(); break; }
            sent = async { raw.stream.writable().await.unwrap(); raw.stream.try_write(&piece) } => { drop(sent); }
        }
    }
    for _ in 0..4 {
        drop(raw.stream.try_write(&piece));
    }
    raw.answer().await
}

#[tokio::test]
async fn a_cut_answer_is_never_passed_on_as_whole() {
    for bytes in [
        "HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        "HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n",
        "HTTP/1.1 201 Created\r\nContent-Length: 10\r\n\r\nabc",
    ] {
        for reply in [Reply::fin(bytes), Reply::reset(bytes)] {
            let upstream = Upstream::always(reply).await;
            let addr = start_proxy(upstream.addr).await;
            let (answer, end) = Raw::sending(addr, get("")).await.rest().await;
            assert_ne!(end, End::StillOpen, "{bytes:?}");
            assert!(!answer.ends_with("0\r\n\r\n"), "{answer:?}");
            assert!(status(&answer) != 201 || body(&answer).len() < 21, "{answer:?}");
        }
    }
}

#[tokio::test]
async fn large_answers_arrive_unchanged_at_slow_readers() {
    let content: Vec<u8> =
        (0..3_000_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", content.len());
    let upstream = Upstream::always(Reply::keep([head.as_bytes(), &content].concat())).await;
    let addr = start_proxy(upstream.addr).await;
    let readers: Vec<_> = (0..4)
        .map(|_| {
            tokio::spawn(async move {
                let mut raw = Raw::sending(addr, get("Connection: close\r\n")).await;
                let (mut all, mut piece) = (Vec::new(), vec![0; 30_000]);
                loop {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    match raw.stream.read(&mut piece).await.unwrap() {
                        0 => return all,
                        n => all.extend_from_slice(&piece[..n]),
                    }
                }
            })
        })
        .collect();
    for reader in readers {
        let all = reader.await.unwrap();
        assert!(all.ends_with(&content));
    }
}

#[tokio::test]
async fn a_second_answer_that_nobody_asked_for_goes_to_nobody() {
    let evil = "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil";
    let timeout = "HTTP/1.1 408 Timeout\r\nContent-Length: 0\r\n\r\n";
    for reply in [
        Reply::keep(format!("{OK}{evil}")),
        Reply::keep(OK).then(evil),
        Reply::keep(OK).then(timeout),
    ] {
        let upstream = Upstream::always(reply).await;
        let addr = start_proxy(upstream.addr).await;
        for round in 1..=3 {
            let answer = Raw::sending(addr, get("")).await.answer().await;
            assert_eq!((status(&answer), body(&answer)), (200, "ok"));
            upstream.wait_for_closed(round).await;
        }
    }
}

#[tokio::test]
async fn an_answer_has_one_framing_or_is_refused() {
    for (lines, rest, wanted) in [
        ("Transfer-Encoding: chunked\r\nContent-Length: 9", "2\r\nok\r\n0\r\n\r\n", 200),
        ("Transfer-Encoding: identity\r\nContent-Length: 2", "ok", 200),
        ("Transfer-Encoding: gzip", "ok", 502),
        ("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", "2\r\nok\r\n0\r\n\r\n", 502),
        ("Content-Length: 2\r\nContent-Length: 2", "ok", 200),
        ("Content-Length: 2, 2", "ok", 200),
        ("Content-Length: 2\r\nContent-Length: 3", "ok", 502),
        ("X: close-delimited", "ok", 200),
    ] {
        let upstream =
            Upstream::always(Reply::fin(format!("HTTP/1.1 200 OK\r\n{lines}\r\n\r\n{rest}"))).await;
        let answer = ask(&upstream, get("")).await;
        assert_eq!(status(&answer), wanted, "{lines:?} {answer:?}");
        let framings =
            headers(&answer, "content-length").len() + headers(&answer, "transfer-encoding").len();
        assert_eq!(framings, 1, "{answer:?}");
        assert!(wanted != 200 || answer.contains("ok"), "{answer:?}");
    }
}

#[tokio::test]
async fn an_answer_of_an_old_upstream_is_an_answer_of_today() {
    let upstream = Upstream::always(Reply::fin("HTTP/1.0 200 OK\r\n\r\nok")).await;
    let answer = ask(&upstream, get("")).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert_eq!(body(&answer), "2\r\nok\r\n0\r\n\r\n");
}

#[tokio::test]
async fn trailers_that_are_announced_arrive_without_what_is_for_one_hop() {
    let reply = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum, Content-Length\r\n\r\n\
                 2\r\nok\r\n0\r\nX-Sum: 1\r\nContent-Length: 9\r\nX-Sum: 2\r\n\r\n";
    let upstream = Upstream::always(Reply::keep(reply)).await;
    let lines = "Transfer-Encoding: chunked\r\nTrailer: X-Mine\r\nTE: trailers\r\nConnection: TE, close\r\n\r\n\
                 2\r\nhi\r\n0\r\nX-Mine: 3\r\nContent-Length: 7\r\n\r\n";
    let addr = start_proxy(upstream.addr).await;
    let (answer, _) = Raw::sending(addr, post(lines)).await.rest().await;
    let answer = answer.to_ascii_lowercase();
    assert!(answer.ends_with("0\r\nx-sum: 1\r\nx-sum: 2\r\n\r\n"), "{answer}");
    let seen = String::from_utf8(upstream.seen()[0].body.clone()).unwrap().to_ascii_lowercase();
    assert!(seen.ends_with("0\r\nx-mine: 3\r\n\r\n"), "{seen}");
}

#[tokio::test]
async fn a_pooled_connection_that_died_is_replaced_and_nothing_sent_twice() {
    let upstream = Upstream::start(|_, seen| match seen.target() {
        "/last" => Reply::fin(""),
        _ => Reply::keep(OK),
    })
    .await;
    let mut setup = Setup::of(upstream.addr);
    setup.upstream.idle_timeout = PATIENCE;
    let addr = setup.start().await.addr;
    for method in ["POST", "PUT", "DELETE", "GET"] {
        let before = upstream.seen().len();
        for (target, wanted) in [("/warm", 200), ("/last", 502), ("/again", 200)] {
            let request =
                format!("{method} {target} HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n");
            assert_eq!(
                status(&Raw::sending(addr, request).await.answer().await),
                wanted,
                "{target}"
            );
        }
        // A safe request is asked again, once, on a new connection; anything else never.
        let sent = if method == "GET" { 4 } else { 3 };
        assert_eq!(upstream.seen().len(), before + sent, "{method}");
    }
    // An upstream that closes unannounced after each answer: the next request may meet the connection just before its
    // end is known. What is safe is asked again and always answered; what is not goes out once, come what may.
    let closing = Upstream::always(Reply::fin(OK)).await;
    let addr = start_proxy(closing.addr).await;
    for (method, most) in [("GET", 2), ("POST", 1)] {
        for n in 0..200 {
            let target = format!("/{method}/{n}");
            let request =
                format!("{method} {target} HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n");
            let status = status(&Raw::sending(addr, request).await.answer().await);
            assert!(status == 200 || (method == "POST" && status == 502), "{target}: {status}");
            let sent = closing.seen().iter().filter(|seen| seen.target() == target).count();
            let least = usize::from(status == 200);
            assert!((least..=most).contains(&sent), "{target} was sent {sent} times");
        }
    }
}

#[tokio::test]
async fn connections_are_pooled_and_let_go_when_idle() {
    let upstream = Upstream::always(Reply::keep(OK)).await;
    let mut setup = Setup::of(upstream.addr);
    setup.upstream.idle_timeout = SHORT;
    let addr = setup.start().await.addr;
    let mut raw = Raw::connect(addr).await;
    for _ in 0..10 {
        raw.send(get("")).await;
        assert_eq!(status(&raw.answer().await), 200);
    }
    assert!(upstream.connections() < 10);
    upstream.wait_for_closed(upstream.connections()).await;
}

#[tokio::test]
async fn an_upstream_that_is_not_there_or_silent_is_told_apart() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let gone = listener.local_addr().unwrap();
    drop(listener);
    let addr = start_proxy(gone).await;
    let answer = Raw::sending(addr, get("")).await.answer().await;
    assert_eq!((status(&answer), body(&answer)), (502, "upstream-unreachable"));

    let upstream = Upstream::always(Reply::keep(OK).after(PATIENCE)).await;
    let mut setup = Setup::of(upstream.addr);
    setup.upstream.answer_timeout = SHORT;
    let addr = setup.start().await.addr;
    let begun = Instant::now();
    let answer = Raw::sending(addr, get("")).await.answer().await;
    not_before(SHORT, begun, "a silent upstream");
    assert_eq!((status(&answer), body(&answer)), (504, "upstream-timeout"));
}

#[tokio::test]
async fn a_half_closed_caller_is_answered_only_where_that_is_switched_on() {
    // G1
    for half_close in [false, true] {
        let slow = Reply::keep(OK).after(SHORT);
        let upstream = Upstream::always(slow).await;
        let mut setup = Setup::of(upstream.addr);
        setup.accept.half_close = half_close;
        let addr = setup.start().await.addr;
        let mut raw = Raw::sending(addr, post("Content-Length: 2\r\n\r\nhi")).await;
        upstream.wait_for_requests(1).await;
        raw.half_close().await;
        let (answer, end) = raw.rest().await;
        assert_ne!(end, End::StillOpen);
        assert_eq!(status(&answer), if half_close { 200 } else { 0 });
        assert_eq!((upstream.seen().len(), upstream.cut()), (1, 0));
    }
}

#[tokio::test]
async fn a_caller_that_goes_takes_its_request_along() {
    // G2a
    let upstream = Upstream::always(Reply::keep(OK).after(SHORT)).await;
    let addr = start_proxy(upstream.addr).await;
    let raw = Raw::sending(addr, get("")).await;
    upstream.wait_for_requests(1).await;
    drop(raw);
    upstream.wait_for_closed(1).await;
}

#[tokio::test]
async fn a_caller_that_goes_mid_body_cuts_it_upstream_too() {
    // G2a
    let upstream = Upstream::always(Reply::keep(OK)).await;
    let addr = start_proxy(upstream.addr).await;
    for lines in ["Content-Length: 9\r\n\r\nhi", "Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n"] {
        let before = upstream.cut();
        let mut raw = Raw::sending(addr, post(lines)).await;
        raw.half_close().await;
        drop(raw.rest().await);
        upstream.wait_for_closed(before + 1).await;
        assert_eq!((upstream.seen().len(), upstream.cut()), (0, before + 1));
    }
}

/// A time-out is one: what it ends has had its time.
#[track_caller]
fn not_before(limit: Duration, begun: Instant, what: &str) {
    assert!(begun.elapsed() >= limit, "{what:?} ended after {:?}", begun.elapsed());
}

#[tokio::test]
async fn slow_callers_are_let_go_within_their_limits() {
    // G3
    let upstream = Upstream::always(Reply::keep(OK)).await;
    let mut setup = Setup::of(upstream.addr);
    setup.accept.header_timeout = SHORT;
    setup.accept.idle_timeout = SHORT;
    setup.accept.body_timeout = SHORT;
    let addr = setup.start().await.addr;
    for (start, told) in
        [("", false), ("\r\n", false), ("P", true), ("POST /x HTTP/1.1\r\nHost: a\r\n", true)]
    {
        let begun = Instant::now();
        let (answer, end) = Raw::sending(addr, start).await.rest().await;
        not_before(SHORT, begun, start);
        assert_eq!((status(&answer), end), (if told { 408 } else { 0 }, End::Fin), "{start:?}");
        assert_eq!(header(&answer, "connection").as_deref(), told.then_some("close"), "{start:?}");
    }
    // A body that stops, and one that trickles.
    let begun = Instant::now();
    let mut raw = Raw::sending(addr, post("Content-Length: 1000\r\n\r\nx")).await;
    let (answer, end) = raw.rest().await;
    not_before(SHORT, begun, "a body that stops");
    assert_eq!((status(&answer), end), (408, End::Fin));
    let begun = Instant::now();
    let mut raw = Raw::sending(addr, post("Content-Length: 1000\r\n\r\n")).await;
    let mut sent = 0;
    while raw.stream.write_all(b"x").await.is_ok() && sent < 1000 {
        sent += 1;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    not_before(SHORT, begun, "a body that trickles");
    assert!(sent < 200, "the trickle went on for {sent} bytes");
    assert_eq!(upstream.seen().len(), 0);
    // An idle connection, after an answer, without and with a part of the next head.
    for (start, told) in [("", 0), ("GET /ne", 408)] {
        let mut raw = Raw::sending(addr, get("")).await;
        assert_eq!(status(&raw.answer().await), 200);
        let begun = Instant::now();
        raw.send(start).await;
        let (answer, end) = raw.rest().await;
        // The rest is as old as the answer, which was read a moment later.
        not_before(SHORT / 2, begun, start);
        assert_eq!((status(&answer), end), (told, End::Fin), "{start:?}");
    }
}

#[tokio::test]
async fn a_late_head_is_not_answered_into_the_answer_before_it() {
    // The answer is made, in one piece, before the request's body has come: so the server takes the request for done when
    // the body ends, and waits for the next head while most of the answer is not written yet.
    let content = Bytes::from(vec![b'x'; 30_000_000]);
    let length = content.len();
    let service = service_fn(move |request: Request<Incoming>| {
        tokio::spawn(request.into_body().collect());
        let body = Full::new(content.clone()).map_err(|never| match never {}).boxed_unsync();
        async { Ok::<_, Infallible>(Response::new(body)) }
    });
    let listener = Listener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let settings = accept::Settings {
        header_timeout: SHORT,
        // A part of a head that comes with the end of a body is taken for a rest.
        idle_timeout: SHORT,
        write_timeout: PATIENCE,
        ..Default::default()
    };
    tokio::spawn(accept::serve(listener, settings, service, CancellationToken::new(), SHORT));
    let mut raw = Raw::sending(addr, post("Content-Length: 4\r\n\r\nbo")).await;
    raw.stream.readable().await.unwrap();
    raw.send("dyGET /ne").await;
    // The rest is the fault under test: until the head is late, the caller takes nothing.
    tokio::time::sleep(3 * SHORT).await;
    let (answer, end) = raw.rest().await;
    let ours = body(&answer);
    assert!(ours.bytes().all(|byte| byte == b'x'), "something else within the answer");
    assert!(ours.len() < length, "the head was late before the answer was written");
    assert_ne!(end, End::StillOpen);
}

#[tokio::test]
async fn an_upstream_that_falls_silent_in_the_middle_of_its_answer_is_let_go() {
    let begun = "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nok";
    for (limit, ends) in [(Some(SHORT), true), (None, false)] {
        let upstream = Upstream::always(Reply::keep(begun)).await;
        let mut setup = Setup::of(upstream.addr);
        setup.upstream.answer_idle_timeout = limit;
        let addr = setup.start().await.addr;
        let begun = Instant::now();
        let mut raw = Raw::sending(addr, get("")).await;
        let patience = if ends { PATIENCE } else { 4 * SHORT };
        let (answer, end) = raw.rest_within(patience).await;
        not_before(SHORT, begun, "a silent upstream");
        assert_eq!((status(&answer), body(&answer)), (200, "ok"), "what came is passed on");
        assert_eq!(end != End::StillOpen, ends, "{limit:?}");
        if ends {
            upstream.wait_for_closed(1).await;
        }
    }
}

#[tokio::test]
async fn a_caller_that_rests_is_not_taken_for_a_silent_upstream() {
    let content = vec![b'x'; 30_000_000];
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", content.len());
    let upstream = Upstream::always(Reply::keep([head.as_bytes(), &content].concat())).await;
    let mut setup = Setup::of(upstream.addr);
    setup.upstream.answer_idle_timeout = Some(SHORT);
    let addr = setup.start().await.addr;
    let mut raw = Raw::sending(addr, get("")).await;
    upstream.wait_for_requests(1).await;
    // The rest is the fault under test: longer than the upstream may be silent.
    tokio::time::sleep(3 * SHORT).await;
    assert_eq!(body(&raw.answer().await).len(), content.len());
}

#[tokio::test]
async fn a_caller_that_takes_nothing_of_its_answer_is_let_go() {
    // G3
    let content = vec![b'x'; 30_000_000];
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", content.len());
    let upstream = Upstream::always(Reply::keep([head.as_bytes(), &content].concat())).await;
    let mut setup = Setup::of(upstream.addr);
    setup.accept.write_timeout = SHORT;
    let addr = setup.start().await.addr;
    let mut raw = Raw::sending(addr, get("")).await;
    // It takes the beginning, and nothing more.
    raw.take(1).await;
    let rests = Instant::now();
    upstream.wait_for_closed(1).await;
    not_before(SHORT, rests, "a caller that takes nothing");
    let (rest, end) = raw.rest().await;
    assert_ne!(end, End::StillOpen);
    assert!(
        body(&rest).len() < content.len() && !body(&rest).is_empty(),
        "it was cut in the middle"
    );
}

#[tokio::test]
async fn a_caller_that_takes_little_at_a_time_gets_all_of_its_answer() {
    let content = vec![b'x'; 30_000_000];
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", content.len());
    let upstream = Upstream::always(Reply::keep([head.as_bytes(), &content].concat())).await;
    let mut setup = Setup::of(upstream.addr);
    setup.accept.write_timeout = 2 * SHORT;
    let addr = setup.start().await.addr;
    let mut raw = Raw::sending(addr, get("")).await;
    let begun = Instant::now();
    // The rests are the fault under test: each is shorter than the time-out, together they are longer.
    for _ in 0..4 {
        tokio::time::sleep(SHORT).await;
        raw.take(5_000_000).await;
    }
    assert!(begun.elapsed() > 2 * SHORT);
    assert_eq!(body(&raw.answer().await).len(), content.len());
}

#[tokio::test]
async fn callers_beyond_the_limit_wait_until_a_connection_ends() {
    let upstream = Upstream::always(Reply::keep(OK)).await;
    let mut setup = Setup::of(upstream.addr);
    setup.accept.connections_max = 1;
    let addr = setup.start().await.addr;
    let mut first = Raw::sending(addr, get("")).await;
    assert_eq!(status(&first.answer().await), 200);
    let mut second = Raw::sending(addr, get("")).await;
    assert_eq!(second.rest_within(SHORT).await, (String::new(), End::StillOpen));
    drop(first);
    assert_eq!(status(&second.answer().await), 200);
}

#[tokio::test]
async fn a_drain_answers_what_runs_and_ends_the_rest() {
    // G5
    let upstream = Upstream::always(Reply::keep(OK).after(SHORT)).await;
    let mut setup = Setup::of(upstream.addr);
    setup.grace = PATIENCE * 10;
    let proxy = setup.start().await;
    let silent = Raw::connect(proxy.addr).await;
    let mut idle = Raw::sending(proxy.addr, get("")).await;
    assert_eq!(status(&idle.answer().await), 200);
    let mut running = Vec::new();
    for _ in 0..20 {
        running.push(Raw::sending(proxy.addr, post("Content-Length: 2\r\n\r\nhi")).await);
    }
    upstream.wait_for_requests(21).await;
    proxy.stop.cancel();
    for raw in &mut running {
        let (answer, end) = raw.rest().await;
        assert_eq!((status(&answer), end), (200, End::Fin));
        assert_eq!(headers(&answer, "connection"), ["close"]);
    }
    tokio::time::timeout(PATIENCE, proxy.ended).await.expect("drained in time").unwrap();
    assert!(tokio::net::TcpStream::connect(proxy.addr).await.is_err());
    drop((silent, idle));
}

#[tokio::test]
async fn the_end_of_the_grace_period_ends_everything() {
    // G5
    let upstream = Upstream::always(Reply::keep(OK).after(PATIENCE * 10)).await;
    let mut setup = Setup::of(upstream.addr);
    setup.grace = SHORT;
    let proxy = setup.start().await;
    let mut raw = Raw::sending(proxy.addr, get("")).await;
    upstream.wait_for_requests(1).await;
    let begun = Instant::now();
    proxy.stop.cancel();
    tokio::time::timeout(PATIENCE, proxy.ended).await.expect("ended in time").unwrap();
    not_before(SHORT, begun, "the grace");
    assert_ne!(raw.rest().await.1, End::StillOpen);
}

#[tokio::test]
async fn a_unix_socket_serves_and_its_file_goes_with_it() {
    let upstream = Upstream::always(Reply::keep(OK)).await;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("gate.sock");
    let listen = format!("unix:{}", path.display());
    // What a killed process leaves behind is replaced; what somebody listens to is not.
    drop(tokio::net::UnixListener::bind(&path).unwrap());
    let listener = Listener::bind(&listen).await.unwrap();
    assert!(Listener::bind(&listen).await.is_err());
    let (stop, ended) = Setup::of(upstream.addr).serve(listener);
    let mut stream = UnixStream::connect(&path).await.unwrap();
    stream.write_all(get("Connection: close\r\n").as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert_eq!(status(&answer), 200);
    assert_eq!(headers(&upstream.seen()[0].head, "x-forwarded-for").len(), 0);
    stop.cancel();
    ended.await.unwrap();
    assert!(!path.exists());
}
