//! Which requests are the same, over all kinds of bodies.

use base64::Engine as _;
use http::{HeaderName, HeaderValue};
use serde_json::Value;

use super::recipe::{DECODED_MAX, descents};
use super::*;

fn sent(kind: &str, body: &[u8]) -> Fingerprint {
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_str(kind).unwrap());
    let recipe = Recipe::compile(&Settings::default()).unwrap();
    fingerprint(&recipe, &Parts { method: &Method::POST, target: "/", headers: &headers, body })
}

#[test]
fn where_xml_or_multipart_counts_by_its_bytes_its_parameters_count_too() {
    let dtd = "<!DOCTYPE a><a>\u{e9}</a>".as_bytes();
    let soap = b"<a/>";
    for (one, other, body) in [
        ("text/xml; charset=utf-8", "text/xml; charset=iso-8859-1", dtd),
        (
            "application/soap+xml; action=x; action=y",
            "application/soap+xml; action=y; action=x",
            soap,
        ),
        (
            "multipart/related; boundary=B; start=1; start=2",
            "multipart/related; boundary=B; start=2; start=1",
            b"--B--",
        ),
    ] {
        assert_ne!(sent(one, body).canonical, sent(other, body).canonical, "{one}");
        assert_eq!(sent(one, body), sent(one, body));
    }
}

#[test]
fn a_comment_beside_a_text_counts_and_one_between_elements_does_not() {
    let same = |a: &str, b: &str| {
        sent("text/xml", a.as_bytes()).canonical == sent("text/xml", b.as_bytes()).canonical
    };
    for (with, without) in [
        ("<o><a><!--9-->5</a></o>", "<o><a>5</a></o>"),
        ("<o><a>5<!--9--></a></o>", "<o><a>5</a></o>"),
        ("<o>1<b/><!--x-->2</o>", "<o>1<b/>2</o>"),
        ("<o><!--x--><![CDATA[5]]></o>", "<o>5</o>"),
        ("<o>5<!--x--><b/></o>", "<o>5<b/></o>"),
    ] {
        assert!(!same(with, without), "{with}");
    }
    assert!(same("<o><!--x--><b/> <!--y--> <c/><!--z--></o>", "<o><b/><c/></o>"));
    assert!(
        same("<o><a><!--9-->5</a></o>", "<o><a><!--10-->5</a></o>"),
        "what it says does not count"
    );
}

#[test]
fn a_path_descends_once() {
    for (path, count) in [
        ("$.a.b", 0),
        ("$..a", 1),
        ("$..a..b", 2),
        ("$..a[?@..b]", 2),
        ("$['a..b']..c", 1),
        (r#"$["a\"..b"]..c"#, 1),
    ] {
        assert_eq!(descents(path), count, "{path}");
    }
    let twice = Settings { ignore: vec!["$..a..b".to_owned()], ..Settings::default() };
    assert!(Recipe::compile(&twice).unwrap_err()[0].contains("descends"));
}

fn strings(case: &Value, name: &str) -> Vec<String> {
    let list = case.get(name).and_then(Value::as_array).into_iter().flatten();
    list.map(|entry| entry.as_str().unwrap().to_owned()).collect()
}

fn of_case(case: &Value, side: &str) -> Fingerprint {
    let settings = Settings {
        ignore: strings(case, "ignore"),
        ignore_xml: strings(case, "ignore_xml"),
        headers: strings(case, "headers"),
        ignore_query: strings(case, "ignore_query"),
        ..Settings::default()
    };
    let request = &case[side];
    let text = |name: &str| request.get(name).and_then(Value::as_str);
    let mut headers = HeaderMap::new();
    let kind = text("type").unwrap_or("application/json");
    headers.insert(CONTENT_TYPE, kind.parse().unwrap());
    for (name, value) in request["headers"].as_object().into_iter().flatten() {
        let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
        headers.insert(name, HeaderValue::from_str(value.as_str().unwrap()).unwrap());
    }
    let body = text("body").unwrap();
    let body = match request.get("base64") {
        Some(_) => base64::engine::general_purpose::STANDARD.decode(body).unwrap(),
        None => body.as_bytes().to_vec(),
    };
    let target = text("path").unwrap_or("/orders");
    let parts = Parts { method: &Method::POST, target, headers: &headers, body: &body };
    fingerprint(&Recipe::compile(&settings).unwrap(), &parts)
}

#[test]
fn the_pairs_of_the_contract() {
    let cases = include_str!("../../tests/cases/fingerprint.json");
    let cases = serde_json::from_str::<Value>(cases).unwrap();
    let mut missed = Vec::new();
    for case in cases["cases"].as_array().unwrap() {
        let (a, b) = (of_case(case, "a"), of_case(case, "b"));
        let name = case["name"].as_str().unwrap();
        if a.same_request(&b) != case["same"].as_bool().unwrap() {
            missed.push(name);
        }
    }
    assert_eq!(missed, Vec::<&str>::new());
}

fn of(settings: &Settings, target: &str, kind: &str, body: &[u8]) -> Fingerprint {
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, kind.parse().unwrap());
    let parts = Parts { method: &Method::POST, target, headers: &headers, body };
    fingerprint(&Recipe::compile(settings).unwrap(), &parts)
}

fn of_coded(
    settings: &Settings,
    target: &str,
    coding: Option<&'static str>,
    body: &[u8],
) -> Fingerprint {
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.extend(coding.map(|coding| (CONTENT_ENCODING, coding.parse().unwrap())));
    let parts = Parts { method: &Method::POST, target, headers: &headers, body };
    fingerprint(&Recipe::compile(settings).unwrap(), &parts)
}

fn gzip(text: &[u8], level: u32) -> Vec<u8> {
    let mut coder = flate2::read::GzEncoder::new(text, flate2::Compression::new(level));
    let mut bytes = Vec::new();
    std::io::Read::read_to_end(&mut coder, &mut bytes).unwrap();
    bytes
}

#[test]
fn c07_a_body_counts_without_its_content_coding() {
    let of = |coding: Option<&'static str>, body: &[u8]| {
        let settings = Settings { decoded_max: Some(1000), ..Settings::default() };
        of_coded(&settings, "/?b=1&a=2", coding, body)
    };
    let (plain, other) = (&b"{\"a\":1,\"b\":2}"[..], &b"{\"b\": 2.0, \"a\": 1}"[..]);
    assert_eq!(of(None, plain).canonical, of(Some("gzip"), &gzip(plain, 9)).canonical);
    assert_eq!(of(None, plain).canonical, of(Some("x-gzip"), &gzip(other, 0)).canonical);
    assert_ne!(of(None, plain).raw, of(Some("gzip"), &gzip(plain, 9)).raw);
    let twice = gzip(&gzip(plain, 9), 9);
    assert_eq!(of(None, plain).canonical, of(Some("gzip, gzip"), &twice).canonical);
    // What cannot be decoded equals itself alone, not what it would be without its coding.
    let long = format!("{{\"a\":{:>1000}}}", 1);
    for bytes in [&gzip(plain, 9)[1..], &gzip(long.as_bytes(), 9), plain, b""] {
        assert_eq!(of(Some("gzip"), bytes), of(Some("gzip"), bytes));
        assert_ne!(of(Some("gzip"), bytes).canonical, of(None, bytes).canonical);
        assert_ne!(of(Some("gzip"), bytes).canonical, of(Some("x-gzip"), bytes).canonical);
    }
    assert_ne!(
        of(Some("gzip"), &gzip(long.as_bytes(), 9)).canonical,
        of(None, long.as_bytes()).canonical
    );
    // No JSON, decoded or not: the content's bytes count.
    assert_eq!(of(None, b"oops").canonical, of(Some("gzip"), &gzip(b"oops", 9)).canonical);
    assert_ne!(of(None, b"oops").canonical, of(Some("gzip"), &gzip(b"oops ", 9)).canonical);
}

#[test]
fn a_body_without_a_form_counts_beside_the_query_not_with_it() {
    let settings = Settings { ignore_query: vec!["ts".to_owned()], ..Settings::default() };
    let text = |target: &str, body: &[u8]| of(&settings, target, "text/plain", body).canonical;
    assert_eq!(text("/p?a=1&b=2", b"x"), text("/p?b=2&a=1", b"x"));
    assert_eq!(text("/p?ts=1", b"x"), text("/p", b"x"));
    assert_eq!(text("/p?", b"x"), text("/p", b"x"));
    assert_ne!(text("/p?a=1", b"x"), text("/p", b"x"));
    assert_ne!(text("/p?a=1", b"x"), text("/p?a=1", b"y"));
    assert_ne!(text("/p", b"x"), text("/p", b"y"));
    assert_ne!(text("/p", b"x"), text("/q", b"x"));
}

#[test]
fn only_applies_to_the_kind_of_body_that_it_names() {
    let settings = Settings {
        only: vec!["$.id".to_owned(), "id".to_owned()],
        ignore: vec!["$.id.t".to_owned()],
        ..Settings::default()
    };
    let json = |body: &str| of(&settings, "/", "application/json", body.as_bytes()).canonical;
    let form = "application/x-www-form-urlencoded";
    let form = |body: &str| of(&settings, "/", form, body.as_bytes()).canonical;
    let text = |body: &str| of(&settings, "/", "text/plain", body.as_bytes()).canonical;
    assert_eq!(json(r#"{"id":1,"at":1}"#), json(r#"{"at":2,"id":1}"#));
    assert_ne!(json(r#"{"id":1,"at":1}"#), json(r#"{"id":2,"at":1}"#));
    assert_eq!(json(r#"{"id":{"v":1,"t":1}}"#), json(r#"{"id":{"t":2,"v":1.0}}"#));
    assert_eq!(form("id=1&at=1"), form("at=2&id=1"));
    assert_ne!(form("id=1&at=1"), form("id=2&at=1"));
    // Nothing that is named is there: all of it counts.
    assert_ne!(json(r#"{"at":1}"#), json(r#"{"at":2}"#));
    assert_ne!(form("at=1"), form("at=2"));
    assert_ne!(text("id=1&at=1"), text("at=1&id=1"));
    // A name for one kind says nothing of the other.
    let settings = Settings { only: vec!["id".to_owned()], ..Settings::default() };
    let json = |body: &str| of(&settings, "/", "application/json", body.as_bytes()).canonical;
    assert_ne!(json(r#"{"id":1,"at":1}"#), json(r#"{"id":1,"at":2}"#));
}

#[test]
fn c15_a_record_of_the_first_version_is_recognised_by_its_raw_hash() {
    // As version 1 made it, of `POST /orders?x=1` with `{"a":1}` as `application/json`.
    let hex = "617d7d674b7d99960826befa410f2710467fffd5effb300c81677eb05bdcecd9";
    let raw = of(&Settings::default(), "/orders?x=1", "application/json", b"{\"a\":1}").raw;
    assert_eq!(raw.map(|byte| format!("{byte:02x}")).concat(), hex);
    let of = |body: &[u8]| of(&Settings::default(), "/orders?x=1", "application/json", body);
    let old = Fingerprint { canonical: [7; 32], recipe: [1; 8], raw };
    assert!(old.same_request(&of(b"{\"a\":1}")));
    assert!(!old.same_request(&of(b"{\"a\": 1}")));
}

#[test]
fn c02_the_query_counts_as_pairs_and_the_path_as_received() {
    let plain = |target: &str| of(&Settings::default(), target, "text/plain", b"").canonical;
    assert_ne!(plain("/pay?dry=1"), plain("/pay"));
    assert_eq!(plain("/pay?a=x+y&b=1"), plain("/pay?b=1&a=x%20y"));
    assert_ne!(plain("/a%2Fb"), plain("/a/b"));
    assert_ne!(plain("/p?a=%zz"), plain("/p?a=%25zz"));
    assert_ne!(plain("/p?a=%ff"), plain("/p?a=%fe"));
}

#[test]
fn c07_type_and_coding_count() {
    let settings = Settings::default();
    let typed = |kind: &str| of(&settings, "/", kind, b"{}").canonical;
    assert_ne!(typed("application/json"), typed("text/plain"));
    assert_ne!(typed("application/json"), typed("application/x+json"));
    assert_eq!(typed("application/json"), typed("Application/JSON ; charset=utf-8"));
    // An unknown coding counts with the bytes.
    let coded = |coding: Option<&'static str>| of_coded(&settings, "/", coding, b"{}").canonical;
    assert_ne!(coded(None), coded(Some("compress")));
    assert_ne!(coded(Some("compress")), coded(Some("pack200-gzip")));
    assert_eq!(coded(None), coded(Some("identity")));
}

#[test]
fn a_raw_body_never_equals_a_canonical_one() {
    let settings = Settings { only: vec!["$.a".to_owned()], ..Settings::default() };
    let json = |body: &[u8]| of(&settings, "/", "application/json", body).canonical;
    // What is hashed of a document, as a body that is no JSON and as one that is.
    for (document, form) in [(&b"[ 1 ]"[..], &b"[1]"[..]), (b"{\"a\":1}", b"{\"a\":1,}")] {
        let text = of(&settings, "/", "text/plain", form).canonical;
        assert_ne!(json(document), text);
    }
    assert_ne!(json(b"{\"a\":1}"), json(b"{\"a\":1,}"));
    let raw = of(&settings, "/", "text/plain", b"x").raw;
    let text = |body: &[u8]| of(&settings, "/", "text/plain", body).canonical;
    assert_ne!(text(b"x"), text(&raw));
}

#[test]
fn c15_the_raw_hash_decides_across_a_change_of_recipe() {
    let new = Settings { ignore: vec!["$.t".to_owned()], ..Settings::default() };
    let old = of(&Settings::default(), "/", "application/json", b"{\"t\":1}");
    assert!(old.same_request(&of(&new, "/", "application/json", b"{\"t\":1}")));
    assert!(!old.same_request(&of(&new, "/", "application/json", b"{\"t\":2}")));
    assert_ne!(old.recipe, Recipe::compile(&new).unwrap().id());
}

#[test]
fn the_recipes_id_is_stable() {
    let recipe = |headers: &[&str], ignore: &[&str]| {
        let own = |list: &[&str]| list.iter().map(|entry| (*entry).to_owned()).collect();
        let settings =
            Settings { headers: own(headers), ignore: own(ignore), ..Settings::default() };
        Recipe::compile(&settings).unwrap().id()
    };
    assert_eq!(recipe(&["A", "b"], &["$.x", "$.y"]), recipe(&["B", "a"], &["$.y", "$.x"]));
    assert_ne!(recipe(&["a"], &[]), recipe(&[], &["a"]));
    let of = |settings: Settings| Recipe::compile(&settings).unwrap().id();
    let a = || vec!["$.a".to_owned()];
    let ids = [
        of(Settings::default()),
        of(Settings { only: a(), ..Settings::default() }),
        of(Settings { ignore: a(), ..Settings::default() }),
        of(Settings { ignore_query: a(), ..Settings::default() }),
        of(Settings { only: vec!["/a".to_owned()], ..Settings::default() }),
        of(Settings { ignore: vec!["/a".to_owned()], ..Settings::default() }),
        of(Settings { decoded_max: Some(1), ..Settings::default() }),
    ];
    assert!(ids.iter().enumerate().all(|(n, id)| !ids[..n].contains(id)));
    let written_out = Settings { decoded_max: Some(DECODED_MAX), ..Settings::default() };
    assert_eq!(ids[0], of(written_out));
    // One path in two lists, and by two prefixes.
    let ignore = Settings { ignore: vec!["//soap:a".to_owned()], ..Settings::default() };
    let ignore_xml = Settings { ignore_xml: vec!["//soapenv:a".to_owned()], ..Settings::default() };
    assert_eq!(of(ignore), of(ignore_xml));
}

#[test]
fn form_fields_are_ignored_by_name() {
    let settings = Settings { ignore: vec!["ts".to_owned()], ..Settings::default() };
    let form =
        |body: &[u8]| of(&settings, "/", "application/x-www-form-urlencoded", body).canonical;
    assert_eq!(form(b"a=1&ts=1"), form(b"ts=2&a=1"));
    assert_ne!(form(b"a=1&ts=1"), form(b"ts=1&a=2"));
}

#[test]
fn every_bad_setting_is_named() {
    let settings = Settings {
        ignore: vec!["$[".to_owned(), "/a[1]".to_owned(), String::new()],
        ignore_xml: vec!["Security".to_owned(), "//wsse:Security".to_owned()],
        headers: vec!["a b".to_owned()],
        only: vec!["$.".to_owned(), "//unknown:a".to_owned(), "/a".to_owned()],
        ..Settings::default()
    };
    assert_eq!(Recipe::compile(&settings).unwrap_err().len(), 7);
}

/// Two messages of one request, as a signer makes them.
const SIGNED: [&str; 2] = [
    include_str!("../../tests/cases/soap/signed-first.xml"),
    include_str!("../../tests/cases/soap/signed-retry.xml"),
];

/// Compares two messages under an entry of `ignore_xml`.
fn same_under(entry: &str, kind: &str, one: &str, other: &str) -> bool {
    let settings = Settings { ignore_xml: vec![entry.to_owned()], ..Settings::default() };
    let canonical = |body: &str| of(&settings, "/", kind, body.as_bytes()).canonical;
    canonical(one) == canonical(other)
}

#[test]
fn a_soap_message_that_is_signed_anew_is_the_same_request_in_both_versions_of_soap() {
    let [first, retry] = SIGNED;
    assert!(!same_under("//wsse:Security", "text/xml", first, retry), "the body's id is new, too");
    assert!(same_under("ws-security", "text/xml", first, retry));
    let to_soap12 = |text: &str| {
        text.replace(
            "http://schemas.xmlsoap.org/soap/envelope/",
            "http://www.w3.org/2003/05/soap-envelope",
        )
    };
    let (first12, retry12) = (to_soap12(first), to_soap12(retry));
    assert!(same_under("ws-security", "application/soap+xml", &first12, &retry12));
    // Other headers are signed as well, and get ids of their own.
    let addressed = |id: &str, to: &str| {
        let header = format!(
            "<wsa:To xmlns:wsa=\"http://www.w3.org/2005/08/addressing\" xmlns:u=\"{WSU}\" u:Id=\"{id}\">{to}</wsa:To>"
        );
        first.replace("</wsse:Security>", &format!("</wsse:Security>{header}"))
    };
    let here = addressed("id-1", "urn:a");
    assert!(same_under("ws-security", "text/xml", &here, &addressed("id-2", "urn:a")));
    assert!(!same_under("ws-security", "text/xml", &here, &addressed("id-1", "urn:b")));
    // A prefix that the configuration gives another meaning changes nothing of it.
    let settings = Settings {
        ignore_xml: vec!["ws-security".to_owned()],
        xml_namespaces: [("wsse".to_owned(), "urn:other".to_owned())].into(),
        ..Settings::default()
    };
    let canonical = |body: &str| of(&settings, "/", "text/xml", body.as_bytes()).canonical;
    assert_eq!(canonical(first), canonical(retry));
}

#[test]
fn a_signer_may_take_another_id_for_the_body_and_for_nothing_else() {
    let [first, retry] = SIGNED;
    for attribute in ["Id", "xml:id"] {
        let of_body = |message: &str, id: &str| {
            let own = ["wsu:Id=\"id-1111\"", "wsu:Id=\"id-2222\""];
            let body = own.iter().find(|own| message.contains(**own)).expect("an id of its body");
            message.replace(body, &format!("{attribute}=\"{id}\""))
        };
        let (first, other) = (of_body(first, "a"), of_body(retry, "b"));
        assert!(first.contains(&format!(" {attribute}=\"a\"")), "{first}");
        assert!(same_under("ws-security", "text/xml", &first, &other), "{attribute}");
        assert!(!same_under("//wsse:Security", "text/xml", &first, &other), "{attribute}");
        let inner = other.replace("<amount>5", &format!("<amount {attribute}=\"c\">5"));
        assert_ne!(inner, other);
        assert!(!same_under("ws-security", "text/xml", &first, &inner), "{attribute}");
        let header = |id: &str| {
            let header = format!("<h xmlns=\"urn:h\" {attribute}=\"{id}\"/>");
            first.replace("</wsse:Security>", &format!("</wsse:Security>{header}"))
        };
        assert!(!same_under("ws-security", "text/xml", &header("1"), &header("2")), "{attribute}");
    }
}

const WSU: &str =
    "http://docs.oasis-open.org/wss/2004/01/oasis-200401-wss-wssecurity-utility-1.0.xsd";

#[test]
fn what_a_signer_does_not_add_counts_beside_ws_security() {
    let [first, retry] = SIGNED;
    let pay = "<pay xmlns=\"urn:x\"><amount>5</amount></pay>";
    let change = |from: &str, to: &str| {
        let changed = retry.replace(from, to);
        assert_ne!(retry, changed, "{from}");
        changed
    };
    let other = [
        change("<amount>5</amount>", "<amount>6</amount>"),
        // An id of another namespace is the API's.
        change("wsu:Id=\"id-2222\"", "xml:base=\"id-2222\""),
        change("wsu:Id=\"id-2222\"", "xmlns:b=\"urn:b\" b:Id=\"id-2222\""),
        change("wsu:Id=\"id-2222\"", "wsu:Other=\"id-2222\""),
        // One within the content may be referred to by what counts.
        change("<amount>5", "<amount wsu:Id=\"id-3\">5"),
        // A header of the name in another namespace, and the name in another place.
        change("oasis-200401-wss-wssecurity-secext-1.0.xsd", "other.xsd"),
        change(pay, &format!("<Security xmlns=\"{WSSE}\"/>{pay}")),
        change("soapenv:Header", "soapenv:Headers"),
    ];
    for (n, other) in other.iter().enumerate() {
        assert!(!same_under("ws-security", "text/xml", first, other), "{n}: {other}");
    }
    assert!(!same_under("ws-security", "text/xml", &other[3], &other[4]));
}

const WSSE: &str =
    "http://docs.oasis-open.org/wss/2004/01/oasis-200401-wss-wssecurity-secext-1.0.xsd";

#[test]
fn the_name_stands_for_all_its_paths_and_a_slip_is_told_of_it() {
    assert_eq!(xml::named("ws-security").map(|paths| paths.len()), Some(10));
    assert_eq!(xml::named("//wsse:Security"), None);
    let slip = Settings { ignore_xml: vec!["ws-securty".to_owned()], ..Settings::default() };
    let told = Recipe::compile(&slip).unwrap_err();
    assert!(told[0].ends_with("or write the name \"ws-security\""), "{told:?}");
}
