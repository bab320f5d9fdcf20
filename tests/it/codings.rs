//! Requests under a content coding: compared by what they say, forwarded as they came.

use std::io::Write as _;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::{DeflateEncoder, GzEncoder, ZlibEncoder};
use http::StatusCode;
use ruzstd::encoding::{CompressionLevel, compress_to_vec};

use crate::support::client::{Ask, post};
use crate::support::rig::{Rig, Which};

fn gzip(text: &[u8], level: u32) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::new(level));
    encoder.write_all(text).expect("in memory");
    encoder.finish().expect("in memory")
}

fn zlib(text: &[u8]) -> Vec<u8> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::new(6));
    encoder.write_all(text).expect("in memory");
    encoder.finish().expect("in memory")
}

fn bare(text: &[u8]) -> Vec<u8> {
    let mut encoder = DeflateEncoder::new(Vec::new(), Compression::new(6));
    encoder.write_all(text).expect("in memory");
    encoder.finish().expect("in memory")
}

fn br(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    brotli::CompressorWriter::new(&mut out, 4096, 5, 20).write_all(text).expect("in memory");
    out
}

fn zstd(text: &[u8]) -> Vec<u8> {
    compress_to_vec(text, CompressionLevel::Fastest)
}

fn coded(key: &str, coding: &str, body: impl Into<Bytes>) -> Ask {
    let ask = post("/orders", "").body(body).tenant("acme").key(key);
    if coding.is_empty() { ask } else { ask.header("content-encoding", coding) }
}

#[tokio::test(flavor = "multi_thread")]
async fn c07_a_body_under_a_coding_is_the_plain_body_and_is_forwarded_as_it_came() {
    let rig = Rig::start(Which::Sqlite, "").await;
    let addr = rig.gateway.addr;
    let (plain, respelt) = (&br#"{"a":1,"b":[2,3]}"#[..], &br#"{ "b": [2.0, 3], "a": 1 }"#[..]);
    let other = &br#"{"a":1,"b":[2,4]}"#[..];
    let twice = |text: &[u8]| br(&gzip(text, 6));
    type Coder<'a> = &'a dyn Fn(&[u8]) -> Vec<u8>;
    let coders: [(&str, Coder<'_>); 8] = [
        ("gzip", &|text| gzip(text, 9)),
        ("X-Gzip", &|text| gzip(text, 0)),
        ("deflate", &zlib),
        ("deflate", &bare),
        ("br", &br),
        ("zstd", &zstd),
        ("gzip, br", &twice),
        ("identity", &<[u8]>::to_vec),
    ];
    for (number, (coding, coder)) in coders.iter().enumerate() {
        let key = format!("k-{number}");
        let sent = coder(respelt);
        let first = coded(&key, coding, sent.clone()).to(addr).await;
        assert_eq!(first.status, StatusCode::CREATED, "{coding}");
        // The API got what the caller sent, and is told what it is.
        let got = rig.orders.ledger().pop().expect("an execution");
        assert_eq!(got.body, sent, "{coding}");
        assert_eq!(got.headers["content-encoding"], *coding);
        assert_eq!(got.headers["content-length"], sent.len().to_string());
        for (again, body) in [("", plain.to_vec()), (coding, coder(plain)), ("br", br(plain))] {
            let answer = coded(&key, again, body).to(addr).await;
            assert!(answer.replayed(), "{coding}, then {again:?}: {answer:?}");
        }
        for (again, body) in [("", other.to_vec()), (coding, coder(other)), ("br", br(other))] {
            let answer = coded(&key, again, body).to(addr).await;
            assert_eq!(answer.problem(), "request-mismatch", "{coding}, then {again:?}");
        }
    }
    assert_eq!(rig.orders.runs(), coders.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_and_events_are_made_of_what_a_compressed_body_says() {
    let more = r#"
[[route]]
method = "POST"
path = "/derived"
operation = "derived"
derive_key = ["$.ref"]
fingerprint = { max_decoded = "1KiB" }
[[route.event]]
type = "made"
payload = { amount = "{{ request.json.amount }}" }
[[sink]]
name = "main"
url = "http://127.0.0.1:9/hook"
secret = "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="
allow_private = true
"#;
    let rig = Rig::start(Which::Sqlite, more).await;
    let addr = rig.gateway.addr;
    let ask = |coding: &str, body: Vec<u8>| {
        let ask = post("/derived", "").body(body).tenant("acme");
        if coding.is_empty() { ask } else { ask.header("content-encoding", coding) }
    };
    let body = br#"{"ref":"r-1","amount":"129.90"}"#;
    let first = ask("gzip, br", br(&gzip(body, 6))).to(addr).await;
    assert_eq!(first.status, StatusCode::CREATED, "{first:?}");
    for (coding, body) in [("", body.to_vec()), ("zstd", zstd(body)), ("deflate", bare(body))] {
        let again = ask(coding, body).to(addr).await;
        assert!(again.replayed(), "{coding}: {again:?}");
    }
    let key = rig.place.rows("select key from idempotency_records").await;
    assert_eq!(key, [[Some(r#"derived:["r-1"]"#.to_owned())]]);
    let events = rig.place.rows("select payload from outbox_events").await;
    assert!(events.len() == 1 && format!("{events:?}").contains("129.90"), "{events:?}");
    // What is no coding is passed over, as ever; what cannot be decoded is read as it came, and that says nothing.
    let other = ask("utf-8", body.to_vec()).to(addr).await;
    assert_eq!(other.problem(), "request-mismatch", "under the same key");
    let large = format!(r#"{{"ref":"r-2","pad":"{}"}}"#, "x".repeat(2000));
    let cut = gzip(body, 9)[..20].to_vec();
    for body in [gzip(large.as_bytes(), 9), cut] {
        assert_eq!(ask("gzip", body).to(addr).await.problem(), "key-missing");
    }
    assert_eq!(rig.orders.runs(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_decoded_equals_itself_alone() {
    let rig = Rig::start(Which::Sqlite, "").await;
    let addr = rig.gateway.addr;
    let whole = gzip(br#"{"a":1}"#, 6);
    let (cut, longer) = (whole[..whole.len() - 1].to_vec(), [&whole[..], b"x"].concat());
    for (number, (coding, body)) in [
        ("gzip", cut),
        ("gzip", longer),
        ("gzip", b"{\"a\":1}".to_vec()),
        ("compress", b"{\"a\":1}".to_vec()),
        ("br", b"\xff\xff".to_vec()),
    ]
    .into_iter()
    .enumerate()
    {
        let key = format!("k-{number}");
        let first = coded(&key, coding, body.clone()).to(addr).await;
        assert_eq!(first.status, StatusCode::CREATED, "{coding} {body:?}: never refused for it");
        assert!(coded(&key, coding, body.clone()).to(addr).await.replayed(), "{coding}");
        let plain = b"{\"a\":1}".to_vec();
        for (again, body) in [("", body), ("", plain), ("gzip", whole.clone())] {
            let answer = coded(&key, again, body).to(addr).await;
            assert_eq!(answer.problem(), "request-mismatch", "{coding}, then {again:?}");
        }
    }
    assert_eq!(rig.orders.runs(), 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bomb_is_compared_by_its_bytes_and_fills_no_memory() {
    const MIB: usize = 1 << 20;
    let more = r#"
[[route]]
method = "POST"
path = "/small"
operation = "small"
fingerprint = { max_decoded = "7B" }
"#;
    let rig = Rig::start(Which::Sqlite, more).await;
    let addr = rig.gateway.addr;
    coded("warm", "gzip", gzip(b"{}", 6)).to(addr).await;
    let before = rig.gateway.most_memory();
    let zeros = vec![0; 64 * MIB];
    for (coding, bomb) in [("gzip", gzip(&zeros, 6)), ("br", br(&zeros)), ("zstd", zstd(&zeros))] {
        assert!(bomb.len() < MIB, "{coding}");
        let asks: Vec<_> = (0..8)
            .map(|n| {
                let ask = coded(&format!("{coding}-{n}"), coding, bomb.clone());
                tokio::spawn(async move { (ask.to(addr).await, ask.to(addr).await) })
            })
            .collect();
        for ask in asks {
            let (first, second) = ask.await.expect("an answer");
            assert_eq!(first.status, StatusCode::CREATED, "{coding}");
            assert!(second.replayed(), "{coding}");
        }
    }
    let grown = rig.gateway.most_memory().saturating_sub(before) as usize;
    assert!(grown < 128 * MIB, "{grown} bytes more, for eight bombs of 64 MiB at once");
    // The limit is the route's.
    let small = |body: Vec<u8>| {
        let ask = post("/small", "").body(body).tenant("acme").key("k");
        ask.header("content-encoding", "gzip")
    };
    assert_eq!(small(gzip(b"{\"a\":1}", 6)).to(addr).await.status, StatusCode::CREATED);
    assert!(small(gzip(b"{\"a\":1}", 0)).to(addr).await.replayed());
    let small = |body: Vec<u8>| small(body).set("idempotency-key", "long");
    assert_eq!(small(gzip(b"{\"a\":12}", 6)).to(addr).await.status, StatusCode::CREATED);
    assert!(small(gzip(b"{\"a\":12}", 6)).to(addr).await.replayed());
    let answer = small(gzip(b"{\"a\":12}", 0)).to(addr).await;
    assert_eq!(answer.problem(), "request-mismatch", "one byte beyond");
}
