//! What a replay sends: the stored bytes to whoever takes them, decoded ones to whoever does not, nothing in a coding that a
//! caller refuses; and heads, empty bodies and trailers as they were.

use std::io::Write as _;

use flate2::Compression;
use flate2::write::{GzEncoder, ZlibEncoder};
use http::StatusCode;

use crate::support::client::{Answer, Ask};
use crate::support::fleet::{order, sending};
use crate::support::process::{Gateway, eventually};
use crate::support::raw::{Raw, body, header, headers, status};
use crate::support::rig::{self, Place, Which, on_both_stores};
use crate::support::upstream::{Reply, Upstream};

on_both_stores! {
    a_stored_coding_is_decoded_for_a_caller_that_does_not_take_it,
    who_waits_gets_the_answer_in_a_form_that_it_takes,
    what_cannot_be_decoded_is_refused_and_never_sent_undecoded,
    a_coding_that_nobody_asked_for_stays_for_those_who_ask_as_the_first_did,
    answers_without_a_body_are_replayed_as_they_were,
    trailers_are_kept_for_those_who_read_them,
    interim_answers_are_no_answers,
}

const TEXT: &str = "{\"id\":1,\"name\":\"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\"}";

fn gzip(text: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

fn zlib(text: &[u8]) -> Vec<u8> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

fn brotli(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    brotli::CompressorWriter::new(&mut out, 4096, 5, 20).write_all(text).unwrap();
    out
}

fn zstd(text: &[u8]) -> Vec<u8> {
    ruzstd::encoding::compress_to_vec(text, ruzstd::encoding::CompressionLevel::Fastest)
}

/// An answer with these lines in its head and this body.
fn answer(lines: &str, body: &[u8]) -> Reply {
    let head = format!("HTTP/1.1 201 Created\r\n{lines}Content-Length: {}\r\n\r\n", body.len());
    Reply::keep([head.as_bytes(), body].concat())
}

async fn behind(which: Which, reply: Reply, policy: &str) -> (Upstream, Place, Gateway) {
    let upstream = Upstream::always(reply).await;
    let url = format!("http://{}", upstream.addr);
    let (place, gateway) = rig::gateway(which, &url, "", policy).await;
    (upstream, place, gateway)
}

fn accepting(key: &str, codings: &str) -> Ask {
    order(key).header("accept-encoding", codings)
}

fn is_plain(answer: &Answer, text: &str) {
    assert_eq!(answer.status, StatusCode::CREATED, "{answer:?}");
    assert!(answer.replayed(), "{answer:?}");
    assert_eq!(answer.body, text);
    assert_eq!(answer.header("content-encoding"), None);
    assert_eq!(answer.header("content-length"), Some(text.len().to_string().as_str()));
    assert_eq!(answer.header("etag"), Some("W/\"v1\""));
    assert_eq!(answer.header("content-digest"), None);
    assert_eq!(answer.header("x-own"), Some("stays"));
    let vary: Vec<_> = answer.headers.get_all("vary").iter().collect();
    assert_eq!(vary, ["Origin", "accept-encoding"]);
}

async fn a_stored_coding_is_decoded_for_a_caller_that_does_not_take_it(which: Which) {
    type Encode = fn(&[u8]) -> Vec<u8>;
    let codings: [(&str, Encode); 4] =
        [("gzip", gzip), ("deflate", zlib), ("br", brotli), ("zstd", zstd)];
    for (coding, encode) in codings {
        let bytes = encode(TEXT.as_bytes());
        let lines = format!(
            "Content-Encoding: {coding}\r\nETag: \"v1\"\r\nVary: Origin\r\nContent-Digest: sha-256=:AA==:\r\nX-Own: stays\r\n"
        );
        let (upstream, _place, mut gateway) = behind(which, answer(&lines, &bytes), "").await;
        let asking = accepting("k", coding);
        let first = asking.to(gateway.addr).await;
        assert_eq!(first.body, bytes);
        // From memory, then from the store.
        for restarted in [false, true] {
            if restarted {
                gateway.kill9();
                gateway = gateway.restart();
            }
            let same = asking.to(gateway.addr).await;
            assert!(same.replayed() && same.body == bytes, "{coding}: {same:?}");
            assert_eq!(same.header("content-encoding"), Some(coding));
            assert_eq!(same.header("etag"), Some("\"v1\""));
            assert_eq!(same.header("content-digest"), Some("sha-256=:AA==:"));
            for other in ["identity", "x-none", "*;q=0", &format!("*, {coding};q=0")] {
                is_plain(&accepting("k", other).to(gateway.addr).await, TEXT);
            }
            // Says nothing, where the first caller had asked for it.
            is_plain(&order("k").to(gateway.addr).await, TEXT);
        }
        assert_eq!(upstream.seen().len(), 1);
    }
}

async fn who_waits_gets_the_answer_in_a_form_that_it_takes(which: Which) {
    // An answer that is kept, and one that frees the key and is shared by those who waited.
    for status_line in ["201 Created", "401 Unauthorized"] {
        let bytes = gzip(TEXT.as_bytes());
        let head = format!(
            "HTTP/1.1 {status_line}\r\nContent-Encoding: gzip\r\nContent-Length: {}\r\n\r\n",
            bytes.len()
        );
        let reply = Reply::keep([head.as_bytes(), &bytes].concat())
            .after(std::time::Duration::from_millis(700));
        let (upstream, _place, gateway) = behind(which, reply, "").await;
        let first = sending(accepting("k", "gzip"), gateway.addr);
        upstream.wait_for_requests(1).await;
        let waiting = sending(accepting("k", "identity"), gateway.addr);
        let (first, waited) = (first.await.unwrap(), waiting.await.unwrap());
        assert_eq!(first.body, bytes);
        assert_eq!((waited.status, &waited.body[..]), (first.status, TEXT.as_bytes()));
        assert_eq!(waited.header("content-encoding"), None);
        assert_eq!(waited.record(), first.record());
        assert_eq!(upstream.seen().len(), 1);
    }
}

async fn what_cannot_be_decoded_is_refused_and_never_sent_undecoded(which: Which) {
    let whole = gzip(TEXT.as_bytes());
    // Beyond sixteen times max_response_body.
    let bomb = gzip(&vec![0; 17 * 4096]);
    let cases: [(&str, &str, &[u8]); 5] = [
        ("malformed", "Content-Encoding: gzip\r\n", &whole[..whole.len() - 1]),
        ("a bomb", "Content-Encoding: gzip\r\n", &bomb),
        ("unknown", "Content-Encoding: compress\r\n", b"xx"),
        ("fixed", "Content-Encoding: gzip\r\nCache-Control: no-transform\r\n", &whole),
        ("a part", "Content-Encoding: gzip\r\nContent-Range: bytes 0-9/100\r\n", &whole),
    ];
    for (name, lines, bytes) in cases {
        let (upstream, _place, gateway) =
            behind(which, answer(lines, bytes), "max_response_body = 4096").await;
        let coding = lines.split(": ").nth(1).unwrap().split("\r\n").next().unwrap();
        let asking = accepting("k", coding);
        let first = asking.to(gateway.addr).await;
        assert_eq!(first.body, bytes, "{name}");
        let refused = accepting("k", "br").to(gateway.addr).await;
        assert_eq!(refused.status, StatusCode::NOT_ACCEPTABLE, "{name}: {refused:?}");
        assert_eq!(refused.problem(), "not-acceptable");
        assert_eq!(refused.record(), first.record());
        assert_eq!(refused.json()["retry"], "same-key");
        let detail = refused.json()["detail"].as_str().unwrap().to_owned();
        assert!(detail.contains(&format!("`Accept-Encoding: {coding}`")), "{detail}");
        // As it says: then it gets it. Who says nothing takes everything.
        for ask in [asking, order("k")] {
            let replay = ask.to(gateway.addr).await;
            assert!(replay.replayed() && replay.body == bytes, "{name}: {replay:?}");
            assert_eq!(replay.header("content-encoding"), Some(coding));
        }
        assert_eq!(upstream.seen().len(), 1);
    }
}

async fn a_coding_that_nobody_asked_for_stays_for_those_who_ask_as_the_first_did(which: Which) {
    let bytes = gzip(TEXT.as_bytes());
    let lines = "Content-Encoding: gzip\r\n";
    let (_upstream, _place, mut gateway) = behind(which, answer(lines, &bytes), "").await;
    assert_eq!(order("k").to(gateway.addr).await.body, bytes);
    for restarted in [false, true] {
        if restarted {
            gateway.kill9();
            gateway = gateway.restart();
        }
        let same = order("k").to(gateway.addr).await;
        assert!(same.replayed() && same.body == bytes, "{same:?}");
        assert_eq!(same.header("content-encoding"), Some("gzip"));
        assert_eq!(same.header("oncegate-coding-unasked"), None, "a note is no header");
        assert_eq!(accepting("k", "identity").to(gateway.addr).await.body, TEXT);
    }
    // A name that is no coding is no reason to withhold anything.
    let lines = "Content-Encoding: utf-8\r\n";
    let (_upstream, _place, gateway) = behind(which, answer(lines, b"hello"), "").await;
    for _ in 0..2 {
        let got = accepting("k", "gzip").to(gateway.addr).await;
        assert_eq!((got.header("content-encoding"), &got.body[..]), (Some("utf-8"), &b"hello"[..]));
    }
}

/// A head without what differs between a first answer and its replay.
fn told(answer: &str) -> Vec<String> {
    let (head, rest) = answer.split_once("\r\n\r\n").unwrap();
    let ours = ["idempotent-replayed", "date"];
    let kept = |line: &String| !ours.iter().any(|name| line.starts_with(name));
    let mut lines: Vec<_> = head.lines().map(str::to_ascii_lowercase).filter(kept).collect();
    lines.sort();
    lines.push(rest.to_owned());
    lines
}

async fn answers_without_a_body_are_replayed_as_they_were(which: Which) {
    let replies = [
        "HTTP/1.1 204 No Content\r\nX-A: 1\r\nContent-Encoding: gzip\r\n\r\n",
        "HTTP/1.1 205 Reset Content\r\nContent-Length: 0\r\n\r\n",
        "HTTP/1.1 304 Not Modified\r\nETag: \"a\"\r\nContent-Encoding: gzip\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nX-A: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ];
    let upstream = Upstream::start(move |number, _| Reply::keep(replies[number - 1])).await;
    let url = format!("http://{}", upstream.addr);
    let (_place, mut gateway) = rig::gateway(which, &url, "", "").await;
    let mut firsts = Vec::new();
    for restarted in [false, true] {
        if restarted {
            gateway.kill9();
            gateway = gateway.restart();
        }
        for (number, reply) in replies.iter().enumerate() {
            let ask = format!(
                "POST /orders HTTP/1.1\r\nHost: a\r\nX-Tenant-Id: t\r\nIdempotency-Key: k{number}\r\nAccept-Encoding: br\r\nContent-Length: 0\r\n\r\n"
            );
            if !restarted {
                firsts.push(Raw::sending(gateway.addr, &ask).await.answer().await);
            }
            let mut raw = Raw::sending(gateway.addr, &ask).await;
            let replay = raw.answer().await;
            assert_eq!(header(&replay, "idempotent-replayed").as_deref(), Some("true"), "{replay}");
            assert_eq!(told(&replay), told(&firsts[number]), "{reply}");
            let length = header(&replay, "content-length");
            let has_length = ![204, 304].contains(&status(&replay));
            assert_eq!(length.as_deref(), has_length.then_some("0"), "{replay}");
            // Nothing is left on the connection that the next answer would begin with.
            raw.send(&ask).await;
            assert_eq!(told(&raw.answer().await), told(&replay));
        }
    }
    assert_eq!(upstream.seen().len(), replies.len());
}

async fn trailers_are_kept_for_those_who_read_them(which: Which) {
    let reply = "HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n5\r\nhello\r\n0\r\n\
                 X-Sum: 1\r\nX-Unannounced: 2\r\nX-Sum: 3\r\nSet-Cookie: s=1\r\nOncegate-Record: forged\r\nContent-Length: 9\r\n\r\n";
    let (upstream, _place, mut gateway) = behind(which, Reply::keep(reply), "").await;
    let ask = |lines: &str| {
        format!(
            "POST /orders HTTP/1.1\r\nHost: a\r\nX-Tenant-Id: t\r\nIdempotency-Key: k\r\n{lines}Content-Length: 0\r\n\r\n"
        )
    };
    let reads = ask("TE: trailers\r\nConnection: TE\r\n");
    let mut first = true;
    for restarted in [false, true] {
        if restarted {
            gateway.kill9();
            gateway = gateway.restart();
        }
        for _ in 0..2 {
            // Its end is found by the runtime's own reading of the connection.
            let closing = reads.replace("Connection: TE", "Connection: TE, close");
            let (got, _) = Raw::sending(gateway.addr, closing).await.rest().await;
            assert_eq!(header(&got, "idempotent-replayed").is_some(), !first, "{got}");
            let sent = body(&got).to_ascii_lowercase();
            assert!(sent.contains("hello\r\n0\r\n"), "{got}");
            for line in ["x-sum: 1\r\n", "x-sum: 3\r\n", "x-unannounced: 2\r\n"] {
                assert!(sent.contains(line), "{line} {got}");
            }
            assert!(!sent.contains("forged") && !sent.contains("content-length"), "{got}");
            assert!(!sent.contains("set-cookie"), "{got}");
            let announced = headers(&got, "trailer").join(", ").to_ascii_lowercase();
            assert_eq!(announced, "x-sum, x-unannounced", "{got}");
            assert!(headers(&got, "oncegate-trailer").is_empty(), "a note is no header: {got}");
            first = false;
        }
        let plain = Raw::sending(gateway.addr, ask("")).await.answer().await;
        assert_eq!((status(&plain), body(&plain)), (201, "hello"), "{plain}");
        assert_eq!(header(&plain, "content-length").as_deref(), Some("5"));
        assert_eq!(header(&plain, "trailer"), None);
        assert!(headers(&plain, "oncegate-trailer").is_empty());
    }
    assert_eq!(upstream.seen().len(), 1);
}

async fn interim_answers_are_no_answers(which: Which) {
    let reply = "HTTP/1.1 103 Early Hints\r\nLink: </a>; rel=preload\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n\
                 HTTP/1.1 201 Created\r\nX-Final: 1\r\nContent-Length: 2\r\n\r\nok";
    let (upstream, place, gateway) = behind(which, Reply::keep(reply), "").await;
    for replayed in [false, true] {
        let got = order("k").to(gateway.addr).await;
        assert_eq!((got.status, got.replayed()), (StatusCode::CREATED, replayed));
        assert_eq!((got.header("x-final"), got.header("link")), (Some("1"), None));
    }
    eventually("it is completed", async || {
        place.status_of("k").await.as_deref() == Some("completed")
    })
    .await;
    assert_eq!(upstream.seen().len(), 1);
}
