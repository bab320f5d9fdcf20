//! The pairs of `tests/cases/fingerprint.json` through one gateway: is the second request a retry of the first, or another one?

use base64::Engine as _;
use http::StatusCode;
use serde_json::Value;

use crate::support::client::{Ask, post};
use crate::support::rig::{Rig, Which};

fn strings(case: &Value, name: &str) -> String {
    let empty = Value::Array(Vec::new());
    case.get(name).unwrap_or(&empty).to_string()
}

/// A route of its own for each case: everything about a case lies below `/case-N`.
fn routes(cases: &[Value]) -> String {
    let route = |(number, case): (usize, &Value)| {
        let path = case["path"].as_str().unwrap_or("/orders");
        let [ignore, headers, query, xml] =
            ["ignore", "headers", "ignore_query", "ignore_xml"].map(|name| strings(case, name));
        let namespaces = case["xml_namespaces"].as_object().into_iter().flatten();
        let namespaces = namespaces.map(|(prefix, uri)| format!("{prefix} = {uri}"));
        let namespaces = namespaces.collect::<Vec<_>>().join(", ");
        format!(
            r#"
[[route]]
method = "POST"
path = "/case-{number}{path}"
operation = "case-{number}"
fingerprint = {{ ignore = {ignore}, headers = {headers}, ignore_query = {query}, ignore_xml = {xml}, xml_namespaces = {{ {namespaces} }} }}
"#
        )
    };
    cases.iter().enumerate().map(route).collect()
}

fn request(number: usize, case: &Value, side: &str) -> Ask {
    let request = &case[side];
    let text = |name: &str| request.get(name).and_then(Value::as_str);
    let body = text("body").expect("a body");
    let body = match request.get("base64") {
        Some(_) => base64::engine::general_purpose::STANDARD.decode(body).expect("base64"),
        None => body.as_bytes().to_vec(),
    };
    let target = format!("/case-{number}{}", text("path").unwrap_or("/orders"));
    let kind = text("type").unwrap_or("application/json");
    let mut ask = post(&target, "").set("content-type", kind).tenant("acme").key("k").body(body);
    for (name, value) in request["headers"].as_object().into_iter().flatten() {
        ask = ask.header(name, value.as_str().expect("a header of text"));
    }
    ask
}

/// Sends both requests of each case. The names of those that were not told apart as the case says.
async fn missed(cases: &[Value]) -> Vec<&str> {
    let rig = Rig::start(Which::Sqlite, &routes(cases)).await;
    let mut missed = Vec::new();
    for (number, case) in cases.iter().enumerate() {
        let name = case["name"].as_str().expect("a name");
        let first = request(number, case, "a").to(rig.gateway.addr).await;
        assert_eq!(first.status, StatusCode::CREATED, "{name}");
        assert!(!first.replayed(), "{name}");
        let second = request(number, case, "b").to(rig.gateway.addr).await;
        // Either a retry, with the first one's answer, or refused: there is no third way.
        if second.replayed() {
            assert_eq!((second.status, &second.body), (first.status, &first.body), "{name}");
        } else {
            assert_eq!(second.status, StatusCode::CONFLICT, "{name}");
            assert_eq!(second.problem(), "request-mismatch", "{name}");
        }
        assert_eq!(rig.orders.runs(), number + 1, "{name}: asked for the first one only");
        if second.replayed() != case["same"].as_bool().expect("same or not") {
            missed.push(name);
        }
    }
    assert_eq!(rig.place.records().await as usize, cases.len(), "a refusal writes nothing");
    assert_eq!(rig.place.events().await as usize, cases.len(), "a refusal announces nothing");
    missed
}

fn cases(text: &str) -> Vec<Value> {
    let file: Value = serde_json::from_str(text).expect("a file of cases");
    file["cases"].as_array().expect("cases").clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_pairs_of_the_contract_are_told_apart_and_nothing_else_is() {
    let cases = cases(include_str!("../cases/fingerprint.json"));
    assert!(cases.len() >= 44, "the contract has lost cases");
    assert_eq!(missed(&cases).await, Vec::<&str>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn multipart_and_xml_are_told_apart_by_what_they_say() {
    let cases = cases(include_str!("../cases/multipart-and-xml.json"));
    assert_eq!(missed(&cases).await, Vec::<&str>::new());
}
