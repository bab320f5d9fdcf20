//! Random bodies for every canonical form, for as long as one likes.
//!
//! Bodies of `tests/corpus` (a file: its Content-Type, a line end, the body) are changed at random, fingerprinted, and held
//! against what must be so: nothing panics, time stays linear and memory bounded, and where a body was read, an
//! independent reader reads the same. Each test runs for a second; `ONCEGATE_FUZZ_SECONDS` says otherwise, and
//! `ONCEGATE_FUZZ_SEED` gives other random bodies. With `--nocapture` each one says how far it came.

#![expect(clippy::print_stderr, reason = "a test tells how much it has read")]
#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "what is not as it should be must fail its test"
)]

use std::path::Path;
use std::time::{Duration, Instant};

use fastrand::Rng;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Method};
use oncegate::fingerprint::{Parts, Recipe, Settings, canonical, fingerprint};

/// Far beyond what a linear reader takes without optimisation, and far below what a quadratic one takes for `LARGE`.
const NANOSECONDS_PER_BYTE_MAX: u128 = 20_000;
/// What large bodies are stretched to.
const LARGE: usize = 256 << 10;
/// What a body may decode to here.
const DECODED_MAX: usize = 64 << 10;
/// What all tests together may take at any time.
const MEMORY_MAX: usize = 1 << 30;

#[derive(Clone)]
struct Body {
    kind: Vec<u8>,
    coding: Option<&'static str>,
    body: Vec<u8>,
}

impl Body {
    fn read(file: &[u8]) -> Self {
        let end = file.iter().position(|b| *b == b'\n').expect("a line for the type");
        Self { kind: file[..end].to_vec(), coding: None, body: file[end + 1..].to_vec() }
    }

    fn headers(&self) -> HeaderMap {
        let kind = HeaderValue::from_bytes(&self.kind).unwrap_or(HeaderValue::from_static("x/x"));
        let coding = self.coding.map(|name| (CONTENT_ENCODING, HeaderValue::from_static(name)));
        [(CONTENT_TYPE, kind)].into_iter().chain(coding).collect()
    }

    fn form(&self, recipe: &Recipe) -> Option<Vec<u8>> {
        let headers = self.headers();
        let (method, body) = (&Method::POST, self.body.as_slice());
        let parts = Parts { method, target: "/", headers: &headers, body };
        let print = fingerprint(recipe, &parts);
        assert_eq!(print, fingerprint(recipe, &parts));
        canonical(recipe, &parts).map(|(_, form)| form)
    }

    fn shown(&self) -> String {
        let body = self.body.get(..2000).unwrap_or(&self.body);
        format!("{}\n{}", self.kind.escape_ascii(), body.escape_ascii())
    }
}

fn corpus(name: &str) -> Vec<Body> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(name);
    let files = std::fs::read_dir(folder).expect("a corpus");
    let mut paths = files.map(|file| file.expect("a file").path()).collect::<Vec<_>>();
    paths.sort();
    paths.iter().map(|path| Body::read(&std::fs::read(path).expect("a body"))).collect()
}

fn variable(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
}

/// Changes a body in one place.
fn change(body: &mut Vec<u8>, other: &[u8], words: &[&str], random: &mut Rng) {
    let range = |length: usize, random: &mut Rng| {
        let start = random.usize(..=length);
        start..(start + random.usize(..=16)).min(length)
    };
    let at = range(body.len(), random);
    match random.u8(..9) {
        0 if at.start < body.len() => body[at.start] ^= 1 << random.u8(..8),
        1 if at.start < body.len() => body[at.start] = random.u8(..),
        2 => drop(body.drain(at)),
        3 => {
            let piece = body[at].to_vec();
            let to = random.usize(..=body.len());
            let times = random.usize(1..4);
            body.splice(to..to, piece.repeat(times));
        }
        4 => {
            let piece = other[range(other.len(), random)].to_vec();
            body.splice(at, piece);
        }
        5 => body.insert(at.start, random.u8(..)),
        _ => {
            let word = words[random.usize(..words.len())];
            body.splice(at.start..at.start, word.bytes());
        }
    }
}

/// A part of a body many times over, within the body.
fn stretch(body: &[u8], random: &mut Rng) -> Vec<u8> {
    let start = random.usize(..=body.len());
    let end = random.usize(start..=body.len().min(start + 40));
    let piece = &body[start..end];
    let times = LARGE / piece.len().max(1);
    [&body[..start], &piece.repeat(if piece.is_empty() { 0 } else { times }), &body[end..]].concat()
}

/// How long this thread has been on a processor: other programs do not count. Elsewhere than on Linux, the time of day.
fn nanoseconds(begun: Instant) -> u128 {
    let spent = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let spent = spent.and_then(|text| text.split(' ').next()?.parse().ok());
    spent.unwrap_or_else(|| begun.elapsed().as_nanos())
}

fn nanoseconds_per_byte(body: &Body, recipe: &Recipe) -> u128 {
    let clock = Instant::now();
    let begun = nanoseconds(clock);
    let _form = body.form(recipe);
    let decoded = if body.coding.is_some() { DECODED_MAX } else { 1 };
    (nanoseconds(clock) - begun) / body.body.len().max(decoded) as u128
}

fn memory_at_most() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let number = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<usize>().ok());
    number.unwrap_or(0) << 10
}

/// What counts where nothing is set, but for a smaller bound of decoding.
fn plain() -> Recipe {
    let settings = Settings { decoded_max: Some(DECODED_MAX), ..Settings::default() };
    Recipe::compile(&settings).expect("settings")
}

/// Runs `check` on random bodies: each with its canonical form, and with the body from which it was made.
fn run(name: &str, corpus: &[Body], words: &[&str], check: impl Fn(&Body, &[u8], &Body)) {
    let list = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
    let plain = plain();
    let ignore = list(&["$..t", "$.lines[*].n", "a", "ts", "//b", "//@*:q", "/*/*:Header"]);
    let only = list(&["$..a", "b", "//c"]);
    let ignoring = Settings { ignore, decoded_max: Some(DECODED_MAX), ..Settings::default() };
    let picking = Recipe::compile(&Settings { only, ..ignoring.clone() }).expect("settings");
    let ignoring = Recipe::compile(&ignoring).expect("settings");
    let mut pool = corpus.to_vec();
    let mut random = Rng::with_seed(variable("ONCEGATE_FUZZ_SEED", 1));
    let end = Instant::now() + Duration::from_secs(variable("ONCEGATE_FUZZ_SECONDS", 1));
    let (mut bodies, mut read, mut worst) = (0_u64, 0_u64, 0);
    while Instant::now() < end {
        bodies += 1;
        let base = pool[random.usize(..pool.len())].clone();
        let mut body = base.clone();
        for _ in 0..random.usize(1..=3) {
            let other = &corpus[random.usize(..corpus.len())];
            change(&mut body.body, &other.body, words, &mut random);
        }
        if random.u8(..16) == 0 {
            change(&mut body.kind, b"; charset=UTF-8; boundary=b", &["; ", "\"", "="], &mut random);
        }
        let _others = (body.form(&ignoring), body.form(&picking));
        if let Some(form) = body.form(&plain) {
            read += 1;
            check(&body, &form, &base);
            let small = body.body.len() < 4000;
            let keep = small && random.u8(..8) == 0;
            match pool.len() {
                _ if !keep => {}
                length if length < 400 => pool.push(body.clone()),
                length => pool[random.usize(corpus.len()..length)] = body.clone(),
            }
        }
        if random.u8(..100) == 0 {
            let large = Body { body: stretch(&body.body, &mut random), ..body };
            let recipe = if random.bool() { &plain } else { &ignoring };
            // The least of several: the first one meets cold caches.
            let mut took = nanoseconds_per_byte(&large, recipe);
            for _ in 0..5 {
                if took > NANOSECONDS_PER_BYTE_MAX && large.body.len() > 10_000 {
                    took = took.min(nanoseconds_per_byte(&large, recipe));
                }
            }
            if large.body.len() > 10_000 {
                worst = worst.max(took);
                assert!(took < NANOSECONDS_PER_BYTE_MAX, "{took} ns per byte: {}", large.shown());
            }
        }
    }
    let memory = memory_at_most();
    eprintln!(
        "{name}: {bodies} bodies, {read} read, at most {worst} ns per byte, {} MiB",
        memory >> 20
    );
    assert!(memory < MEMORY_MAX, "{memory} bytes of memory");
    // A machine that is busy gets too few of them to say anything.
    let few = bodies < 5000;
    assert!(few || read * 500 > bodies, "nearly nothing was read: the random bodies show nothing");
}

#[test]
fn json_is_one_where_serde_reads_one_value() {
    let words = [
        "{\"",
        "\":",
        "\",\"",
        "[",
        "]",
        "}",
        ",",
        "\\u00",
        "\\ud83d\\ude00",
        "1e9",
        "-0",
        "0.",
        "null",
        "true",
        "\u{e9}",
        " ",
        "E+",
        "[[[[[[[[",
        "]]]]]]]]",
        "\"t\":1,",
        "99999999999999999999",
    ];
    run("json", &corpus("json"), &words, |body, form, base| {
        let again = Body { body: form.to_vec(), ..body.clone() };
        assert_eq!(again.form(&plain()).as_deref(), Some(form), "{}", body.shown());
        let value = match serde_json::from_slice::<serde_json::Value>(&body.body) {
            Ok(value) => value,
            // What a double does not hold, and one level more than the other reader takes.
            Err(error) => {
                let told = error.to_string();
                let known =
                    told.contains("number out of range") || told.contains("recursion limit");
                return assert!(known, "{error}: {}", body.shown());
            }
        };
        let plain = plain();
        let Some(other_form) = base.form(&plain) else { return };
        let Ok(other) = serde_json::from_slice::<serde_json::Value>(&base.body) else { return };
        let (ours, theirs) = (*form == other_form, value == other);
        if ours {
            assert_eq!(rounded(&value), rounded(&other), "{}\n{}", body.shown(), base.shown());
        } else if theirs {
            // The other reader rounds: then some numbers differ, and only they.
            let (one, two) = (numbers(&body.body), numbers(&base.body));
            assert_ne!(one, two, "{}\n{}", body.shown(), base.shown());
        }
    });
}

/// With every number as a double.
fn rounded(value: &serde_json::Value) -> serde_json::Value {
    match value {
        serde_json::Value::Number(number) => (number.as_f64().expect("a double") + 0.0).into(),
        serde_json::Value::Array(items) => items.iter().map(rounded).collect(),
        serde_json::Value::Object(members) => {
            members.iter().map(|(name, value)| (name.clone(), rounded(value))).collect()
        }
        serde_json::Value::Null | serde_json::Value::Bool(_) | serde_json::Value::String(_) => {
            value.clone()
        }
    }
}

/// The numbers of a JSON text, sorted: each by its sign, its digits without zeros around them, and its exponent.
fn numbers(text: &[u8]) -> Vec<(bool, String, i64)> {
    let mut found = Vec::new();
    let mut rest = text;
    while let Some((first, after)) = rest.split_first() {
        if *first == b'"' {
            let mut end = 0;
            while after[end] != b'"' {
                end += if after[end] == b'\\' { 2 } else { 1 };
            }
            rest = &after[end + 1..];
        } else if first.is_ascii_digit() || *first == b'-' {
            let length =
                rest.iter().take_while(|b| b"+-.eE".contains(b) || b.is_ascii_digit()).count();
            found.push(decimal(std::str::from_utf8(&rest[..length]).expect("ASCII")));
            rest = &rest[length..];
        } else {
            rest = after;
        }
    }
    found.sort();
    found
}

fn decimal(number: &str) -> (bool, String, i64) {
    let (mantissa, exponent) = number.split_once(['e', 'E']).unwrap_or((number, "0"));
    let (integer, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let digits = format!("{}{fraction}", integer.trim_start_matches('-'));
    let significant = digits.trim_end_matches('0');
    let zeros = digits.len() - significant.len();
    let significant = significant.trim_start_matches('0').to_owned();
    // One that is too long for a number is one of its own.
    let exponent = exponent.parse::<i64>().unwrap_or(i64::MAX / 2);
    let exponent = exponent - fraction.len() as i64 + zeros as i64;
    (
        number.starts_with('-'),
        significant.clone(),
        if significant.is_empty() { 0 } else { exponent },
    )
}

#[test]
fn forms_are_one_where_another_reader_reads_one_list_of_pairs() {
    let pairs = |body: &Body| {
        let read = form_urlencoded::parse(&body.body).into_owned();
        let mut pairs = read.collect::<Vec<(String, String)>>();
        pairs.sort_by(|a, b| a.0.cmp(&b.0));
        pairs
    };
    run(
        "form",
        &corpus("form"),
        &["&", "=", "%", "%2", "%26", "+", "a=", "&a=1", "%C3%A9", ";"],
        |body, form, base| {
            let plain = plain();
            // Sorted by those names, it is the same.
            let mut pieces: Vec<&[u8]> = body.body.split(|b| *b == b'&').collect();
            pieces.sort_by_key(|piece| root(&pair(piece).0));
            let sorted = Body { body: pieces.join(&b'&'), ..body.clone() };
            assert_eq!(sorted.form(&plain).as_deref(), Some(form), "{}", body.shown());
            let Some(other) = base.form(&plain) else { return };
            if *form == other {
                assert_eq!(pairs(body), pairs(base), "{}\n{}", body.shown(), base.shown());
                let sorted = |body| sorted_pairs(body, |name| name.to_vec());
                assert_eq!(sorted(body), sorted(base), "{}\n{}", body.shown(), base.shown());
            } else {
                // The order of names that some API reads as one may count, and no other order.
                let by_root = |body| sorted_pairs(body, root);
                assert_ne!(by_root(body), by_root(base), "{}\n{}", body.shown(), base.shown());
            }
        },
    );
}

/// The decoded pairs of a form, byte for byte, sorted by what `by` makes of their names; those of one stay in their order.
fn sorted_pairs(body: &Body, by: fn(&[u8]) -> Vec<u8>) -> Vec<(Vec<u8>, Vec<u8>)> {
    let pieces = body.body.split(|b| *b == b'&').filter(|piece| !piece.is_empty());
    let mut pairs: Vec<_> = pieces.map(pair).collect();
    pairs.sort_by_key(|(name, _)| by(name));
    pairs
}

fn pair(piece: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let decoded = |text: &[u8]| {
        let blanks: Vec<u8> = text.iter().map(|b| if *b == b'+' { b' ' } else { *b }).collect();
        percent_encoding::percent_decode(&blanks).collect::<Vec<u8>>()
    };
    let end = piece.iter().position(|b| *b == b'=').unwrap_or(piece.len());
    (decoded(&piece[..end]), decoded(piece.get(end + 1..).unwrap_or_default()))
}

/// What a name has in common with all that may be the same to some API: see `docs/fingerprint.md`.
fn root(name: &[u8]) -> Vec<u8> {
    let end = name.iter().position(|b| *b == b'[').unwrap_or(name.len());
    let letters = name[..end].iter().filter(|b| **b != b'\\');
    letters.map(|b| if b". ".contains(b) { b'_' } else { b.to_ascii_lowercase() }).collect()
}

#[test]
fn multiparts_are_one_with_any_boundary() {
    let words = [
        "--b",
        "\r\n",
        "\r\n--b\r\n",
        "--",
        "\n",
        "\r\n\r\n",
        "\r\n--b--",
        "; name=\"a\"",
        "\"",
        ";",
        ":",
        "\\\"",
        "Content-Disposition: form-data; name=c\r\n\r\n",
        "Content-Type: text/plain\r\n",
        "X: y\r\n",
        "\r\n ",
        "=",
    ];
    run("multipart", &corpus("multipart"), &words, |body, form, _| {
        let Ok(kind) = String::from_utf8(body.kind.clone()) else { return };
        let usual = kind.ends_with("; boundary=b") || kind.contains("; boundary=\"b\";");
        if !usual || kind.matches("boundary").count() > 1 {
            return;
        }
        // Each place of the old boundary is a delimiter, or the body would not have been read.
        let new = "boundary-2f6d9b7a";
        let mut bytes = Vec::new();
        let mut rest = body.body.as_slice();
        while let Some(at) = rest.windows(3).position(|window| window == b"--b") {
            bytes.extend_from_slice(&rest[..at]);
            bytes.extend(format!("--{new}").bytes());
            rest = &rest[at + 3..];
        }
        bytes.extend_from_slice(rest);
        let kind = kind.replace("\"b\"", "b").replace("boundary=b", &format!("boundary={new}"));
        let other = Body { kind: kind.into_bytes(), coding: None, body: bytes };
        let plain = plain();
        assert_eq!(other.form(&plain).as_deref(), Some(form), "{}", body.shown());
    });
}

#[test]
fn xml_is_what_another_reader_reads_and_its_form_has_itself_as_its_form() {
    let words = [
        "<a>",
        "</a>",
        "<b",
        "/>",
        " c=''",
        " d=\"",
        "\"",
        "<!--",
        "-->",
        "<!---->",
        "<![CDATA[",
        "]]>",
        "&amp;",
        "&#65;",
        "&#32;",
        "&#13;",
        "<?p ",
        "?>",
        " xmlns='u'",
        " xmlns:p='v'",
        " xmlns=''",
        "<p:b",
        "</p:b>",
        "<b> </b>",
        "\r\n",
        " ",
        "\u{e9}",
        " xml:space='preserve'",
        " xml:space='default'",
        "<!DOCTYPE a>",
        "&b;",
        ">",
    ];
    run("xml", &corpus("xml"), &words, |body, form, _| {
        let plain = plain();
        // Parameters of the type stand before the document.
        if form.starts_with(b"<?xml:") {
            return;
        }
        let again = Body { kind: b"application/xml".to_vec(), coding: None, body: form.to_vec() };
        assert_eq!(again.form(&plain).as_deref(), Some(form), "{}", body.shown());
        let Ok(text) = std::str::from_utf8(&body.body) else { return };
        let western =
            |label: &str| text.get(..80).unwrap_or(text).to_ascii_lowercase().contains(label);
        if !text.is_ascii() && (western("iso-8859") || western("windows-125")) {
            return;
        }
        let form = std::str::from_utf8(form).expect("UTF-8");
        assert_eq!(seen(text), seen(form), "{}", body.shown());
    });
}

/// A coding, how a text is written in it, and what another decoder makes of bytes: nothing where they are not of it, or go on.
struct Coded {
    coding: &'static str,
    write: fn(&[u8]) -> Vec<u8>,
    read: fn(&[u8]) -> Option<Vec<u8>>,
}

fn whole(mut reader: impl std::io::Read) -> Option<Vec<u8>> {
    let mut text = Vec::new();
    std::io::Read::read_to_end(&mut reader, &mut text).ok().map(|_| text)
}

/// All that a decoder makes of bytes, where it has used them up.
fn used_up<'b, R: std::io::Read>(
    bytes: &'b [u8],
    decoder: fn(&'b [u8]) -> R,
    left: fn(R) -> &'b [u8],
) -> Option<Vec<u8>> {
    let mut decoder = decoder(bytes);
    let text = whole(&mut decoder)?;
    left(decoder).is_empty().then_some(text)
}

const GZIP: Coded = Coded {
    coding: "gzip",
    write: |text| {
        whole(flate2::read::GzEncoder::new(text, flate2::Compression::best())).expect("in memory")
    },
    read: |bytes| whole(flate2::read::MultiGzDecoder::new(bytes)),
};

const DEFLATE: Coded = Coded {
    coding: "deflate",
    // With its wrapper, and without.
    write: |text| {
        let level = flate2::Compression::best();
        let bare = text.len().is_multiple_of(2);
        if bare {
            whole(flate2::read::DeflateEncoder::new(text, level)).expect("in memory")
        } else {
            whole(flate2::read::ZlibEncoder::new(text, level)).expect("in memory")
        }
    },
    read: |bytes| {
        use flate2::bufread::{DeflateDecoder, ZlibDecoder};
        let wrapped = used_up(bytes, ZlibDecoder::new, ZlibDecoder::into_inner);
        wrapped.or_else(|| used_up(bytes, DeflateDecoder::new, DeflateDecoder::into_inner))
    },
};

const BROTLI: Coded = Coded {
    coding: "br",
    write: |text| whole(brotli::CompressorReader::new(text, 4096, 5, 16)).expect("in memory"),
    read: |bytes| used_up(bytes, |bytes| brotli::Decompressor::new(bytes, 1), |it| it.into_inner()),
};

/// A zstd frame of one raw block, without a checksum that would find every change.
fn uncompressed(text: &[u8]) -> Vec<u8> {
    let block = u32::try_from(text.len() << 3 | 1).expect("a small text").to_le_bytes();
    [b"\x28\xb5\x2f\xfd\x00\x68", &block[..3], text].concat()
}

const ZSTD: Coded = Coded {
    coding: "zstd",
    write: |text| {
        let level = ruzstd::encoding::CompressionLevel::Fastest;
        let compressed = ruzstd::encoding::compress_to_vec(text, level);
        if text.len().is_multiple_of(2) { compressed } else { uncompressed(text) }
    },
    read: |bytes| {
        let mut text = vec![0; DECODED_MAX];
        let length = ruzstd::decoding::FrameDecoder::new().decode_all(bytes, &mut text).ok()?;
        text.truncate(length);
        Some(text)
    },
};

#[test]
fn a_gzip_body_is_what_another_decoder_makes_of_it() {
    coded(&GZIP);
}

#[test]
fn a_deflate_body_is_what_another_decoder_makes_of_it() {
    coded(&DEFLATE);
}

#[test]
fn a_br_body_is_what_another_decoder_makes_of_it() {
    coded(&BROTLI);
}

#[test]
fn a_zstd_body_is_what_another_decoder_makes_of_it() {
    coded(&ZSTD);
}

fn coded(by: &Coded) {
    let plain_bodies = corpus("json");
    let mut corpus = Vec::new();
    for body in &plain_bodies {
        let bytes = (by.write)(&body.body);
        let form = Body { coding: Some(by.coding), body: bytes.clone(), ..body.clone() };
        assert_eq!(form.form(&plain()), body.form(&plain()), "{}", by.coding);
        let twice = Body { body: [bytes.clone(), bytes].concat(), ..form.clone() };
        corpus.extend([form, twice]);
    }
    // Of no coding, or of several: what becomes of it is found by chance.
    let one = corpus[0].clone();
    corpus.push(Body { coding: Some("gzip, gzip"), ..one.clone() });
    corpus.push(Body { body: plain_bodies[0].body.clone(), ..one });
    run(
        by.coding,
        &corpus,
        &["\x1f", "\u{0}\u{0}", "\u{8}", "{}", "(\u{fffd}/"],
        |body, form, _| {
            if body.coding != Some(by.coding) {
                return;
            }
            let Some(decoded) = (by.read)(&body.body) else {
                // Not decoded, and no form but by chance.
                panic!("no {}: {}", by.coding, body.shown());
            };
            let plainly = Body { coding: None, body: decoded, ..body.clone() };
            assert_eq!(plainly.form(&plain()).as_deref(), Some(form), "{}", body.shown());
        },
    );
}

/// A document as an independent reader sees it, without comments and without the blanks that are left out.
fn seen(text: &str) -> String {
    let document = roxmltree::Document::parse(text);
    let document = document.unwrap_or_else(|error| panic!("{error}: {text}"));
    let mut out = String::new();
    look(document.root(), false, &mut out);
    out
}

fn look(node: roxmltree::Node<'_, '_>, preserved: bool, out: &mut String) {
    if node.is_comment() {
        return;
    }
    let space = node.attribute(("http://www.w3.org/XML/1998/namespace", "space"));
    let preserved = space.map_or(preserved, |space| space != "default");
    if node.is_element() {
        let attribute = |a: roxmltree::Attribute<'_, '_>| {
            format!("{:?}{}={:?}", a.namespace(), a.name(), a.value())
        };
        let mut attributes = node.attributes().map(attribute).collect::<Vec<_>>();
        attributes.sort();
        // A default that is taken back and one that never was are the same.
        let scope = node
            .namespaces()
            .filter(|n| !n.uri().is_empty())
            .map(|n| format!("{:?}{}", n.name(), n.uri()));
        let mut scope = scope.collect::<Vec<_>>();
        scope.sort();
        let (uri, name) = (node.tag_name().namespace().unwrap_or_default(), node.tag_name().name());
        out.push_str(&format!("<{{{uri}}}{name} {attributes:?} {scope:?}"));
    } else if node.is_pi() {
        // The other reader leaves line ends as they are here.
        let data = node.pi().map(|pi| (pi.target, pi.value.unwrap_or_default()));
        out.push_str(&format!("{data:?}").replace("\\r\\n", "\\n").replace("\\r", "\\n"));
    } else if node.is_text() {
        let blank = |text: &str| text.chars().all(|c| " \t\n\r".contains(c));
        let siblings = || node.parent().into_iter().flat_map(|parent| parent.children());
        let words = siblings().any(|n| n.is_text() && !blank(n.text().unwrap_or_default()));
        if words || preserved || !siblings().any(|n| n.is_element()) {
            out.push_str(node.text().unwrap_or_default());
        }
        return;
    }
    node.children().for_each(|child| look(child, preserved, out));
    out.push('>');
}
