//! What a fingerprint costs beside a plain SHA-256 of the same bytes, in one run: `cargo bench --profile dist --bench fingerprint`.
//!
//! Each row is a whole fingerprint, both hashes of it, as the gateway computes it for each keyed request. A round measures
//! SHA-256 and the fingerprint one right after the other, so that a change of the machine's pace hits both; the
//! median round is shown. With `--check` it fails where a row is above its bound.

#![expect(clippy::print_stdout, reason = "its table is what it is run for")]
#![expect(clippy::expect_used, reason = "a measurement that cannot be made must stop")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Method};
use oncegate::fingerprint::{Parts, Recipe, Settings, fingerprint};
use sha2::{Digest as _, Sha256};

const KIB: usize = 1 << 10;
const ROUNDS: usize = 501;

/// One kind of request.
struct Row {
    name: &'static str,
    kind: &'static str,
    coding: Option<&'static str>,
    target: &'static str,
    settings: Settings,
    body: Vec<u8>,
    /// The most that it may cost, in times of SHA-256.
    bound: Option<f64>,
}

impl Row {
    fn new(name: &'static str, kind: &'static str, body: Vec<u8>) -> Self {
        let settings = Settings::default();
        Self { name, kind, coding: None, target: "/orders", settings, body, bound: None }
    }

    fn bound(self, bound: f64) -> Self {
        Self { bound: Some(bound), ..self }
    }
}

/// A document of orders with as many lines as fit `size`.
fn order(size: usize) -> String {
    let line = |n: usize| {
        format!(
            r#"{{"sku":"SKU-{n:06}","name":"Widget, blue, {n} mm","quantity":{},"unit_price":{}.{:02},"taxable":true,"discount":null,"tags":["new","sale"]}}"#,
            n % 9 + 1,
            n * 7 % 1000,
            n * 13 % 100,
        )
    };
    let head = r#"{"order_id":"0190d3f4-7c1e-7a55-9f0a-3c5b1b2f8a11","customer":{"id":48213,"name":"Jane Doe","email":"jane@example.com","address":{"street":"1 Main Street","zip":"04109","city":"Leipzig"}},"currency":"EUR","items":["#;
    let mut text = head.to_owned();
    for n in 0.. {
        let line = line(n);
        if n > 0 && text.len() + line.len() + 30 > size {
            break;
        }
        text.push_str(if n > 0 { "," } else { "" });
        text.push_str(&line);
    }
    text + r#"],"total":12345.67}"#
}

/// The same text as people write it: with blanks.
fn pretty(text: &str) -> String {
    let value: serde_json::Value = serde_json::from_str(text).expect("JSON");
    serde_json::to_string_pretty(&value).expect("JSON")
}

fn form(size: usize) -> String {
    let pair = |n: usize| format!("field_{:04}=some+value+%C3%BC+{n}", n * 7919 % 10_000);
    let pairs: Vec<String> = (0..size / 32).map(pair).collect();
    pairs.join("&")
}

/// A SOAP call of as many lines as fit.
fn soap(size: usize) -> String {
    let line = |n: usize| {
        format!(
            "<o:line sku=\"SKU-{n:06}\"><o:name>Widget, blue, {n} mm</o:name><o:count>{}</o:count></o:line>",
            n % 9 + 1
        )
    };
    let lines: String = (0..size / 96).map(line).collect();
    format!(
        "<s:Envelope xmlns:s=\"http://schemas.xmlsoap.org/soap/envelope/\"><s:Body><o:order xmlns:o=\"urn:orders\">{lines}\
         </o:order></s:Body></s:Envelope>"
    )
}

/// Fields, and a file.
fn multipart(size: usize) -> Vec<u8> {
    let mut body = Vec::new();
    for n in 0..10 {
        let field = format!(
            "--B\r\nContent-Disposition: form-data; name=\"field_{n}\"\r\n\r\nvalue {n}\r\n"
        );
        body.extend(field.into_bytes());
    }
    body.extend(
        b"--B\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.bin\"\r\n\r\n",
    );
    body.extend(bytes(size.saturating_sub(body.len())));
    body.extend(b"\r\n--B--\r\n");
    body
}

fn bytes(size: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_be_bytes()[0]
    };
    (0..size).map(|_| next()).collect()
}

fn gzip(text: &[u8]) -> Vec<u8> {
    let mut coder = flate2::read::GzEncoder::new(text, flate2::Compression::new(6));
    let mut out = Vec::new();
    std::io::Read::read_to_end(&mut coder, &mut out).expect("in memory");
    out
}

fn rows() -> Vec<Row> {
    let json = "application/json";
    let ignore = Settings { ignore: vec!["$.items[*].tags".to_owned()], ..Settings::default() };
    let only = Settings {
        only: vec!["$.order_id".to_owned(), "$.items".to_owned()],
        ..Settings::default()
    };
    let plain = order(10 * KIB);
    vec![
        Row::new("JSON", json, plain.clone().into_bytes()).bound(6.0),
        Row::new("JSON, 1 KiB", json, order(KIB).into_bytes()),
        Row::new("JSON, 1 MiB", json, order(KIB * KIB).into_bytes()),
        Row::new("JSON, with blanks", json, pretty(&plain).into_bytes()),
        Row { settings: ignore, ..Row::new("JSON, ignore", json, plain.clone().into_bytes()) },
        Row { settings: only, ..Row::new("JSON, only", json, plain.clone().into_bytes()) },
        Row { coding: Some("gzip"), ..Row::new("JSON in gzip", json, gzip(plain.as_bytes())) },
        Row::new("form", "application/x-www-form-urlencoded", form(10 * KIB).into_bytes()),
        Row::new("XML", "text/xml", soap(10 * KIB).into_bytes()),
        Row::new("multipart", "multipart/form-data; boundary=B", multipart(10 * KIB)),
        Row::new("raw", "application/octet-stream", bytes(10 * KIB)).bound(1.1),
        Row {
            target: "/orders?page=1",
            ..Row::new("raw, with a query", "application/octet-stream", bytes(10 * KIB))
        },
    ]
}

/// How long one call takes, of a few: so few that most rounds are not interrupted.
fn time(calls: u32, mut call: impl FnMut()) -> Duration {
    let begun = Instant::now();
    for _ in 0..calls {
        call();
    }
    begun.elapsed() / calls
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

/// Nanoseconds a KiB of SHA-256 and of the fingerprint, and the ratio of both.
fn measure(row: &Row) -> (f64, f64, f64) {
    let recipe = Recipe::compile(&row.settings).expect("settings");
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(row.kind));
    headers.extend(row.coding.map(|c| (CONTENT_ENCODING, HeaderValue::from_static(c))));
    let (method, target, body) = (Method::POST, row.target, row.body.as_slice());
    let parts = Parts { method: &method, target, headers: &headers, body };
    let calls = u32::try_from(64 * KIB / body.len().max(KIB)).unwrap_or(1).max(1);
    let kib = body.len() as f64 / KIB as f64;
    let (mut plain, mut ours, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let sha = time(calls, || {
            black_box(Sha256::digest(black_box(body)));
        });
        let print = time(calls, || {
            black_box(fingerprint(&recipe, black_box(&parts)));
        });
        plain.push(sha.as_nanos() as f64 / kib);
        ours.push(print.as_nanos() as f64 / kib);
        ratios.push(print.as_secs_f64() / sha.as_secs_f64());
    }
    (median(plain), median(ours), median(ratios))
}

fn main() {
    let check = std::env::args().any(|arg| arg == "--check");
    println!(
        "{:<20} {:>8} {:>12} {:>12} {:>7}",
        "body", "bytes", "SHA ns/KiB", "ours ns/KiB", "ratio"
    );
    let mut above = Vec::new();
    for row in rows() {
        let (sha, ours, ratio) = measure(&row);
        println!("{:<20} {:>8} {sha:>12.0} {ours:>12.0} {ratio:>7.2}", row.name, row.body.len());
        if row.bound.is_some_and(|bound| ratio > bound) {
            above.push(row.name);
        }
    }
    assert!(!check || above.is_empty(), "above the bound: {above:?}");
}
