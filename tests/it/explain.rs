//! `oncegate explain` and `POST /api/v1/explain`: what is made of a request is what the gateway makes of it.

use std::path::PathBuf;

use http::StatusCode;
use serde_json::{Value, json};

use crate::support::client::{get, post};
use crate::support::process::{self, Gateway, run};
use crate::support::rig::{self, Place, Rig, Which, on_both_stores};
use crate::support::upstream::{OK, Reply, Upstream};

on_both_stores! {
    a_record_is_compared_by_its_hashes_and_nothing_is_reserved,
    after_a_change_of_settings_the_request_as_received_decides,
}

const ROUTES: &str = r#"
fingerprint = { ignore = ["$.sent_at", "ts"], headers = ["X-Currency"], ignore_query = ["t"] }
[[route]]
method = "POST"
path = "/accounts/{account}/orders"
operation = "accounts.orders"
tenant = { path = "account" }
[[route]]
method = "POST"
path = "/silent"
operation = "silent"
require_key = false
derive_key = ["$.ref"]
[[route]]
method = "POST"
path = "/watched"
operation = "watched"
mode = "observe"
"#;

async fn configured() -> (Place, PathBuf) {
    let place = Place::new(Which::Sqlite).await;
    let toml = rig::config(&place, "http://127.0.0.1:1", ROUTES);
    let config = process::config(place.folder.path(), &toml);
    (place, config)
}

/// A command line with a configuration, and what it prints as JSON.
fn explain(config: &std::path::Path, args: &[&str]) -> Value {
    let config = config.to_str().unwrap();
    let (code, out, errors) = run(&[&["explain", "--json", "--config", config], args].concat());
    assert_eq!(code, 0, "{args:?}: {out}{errors}");
    serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}"))
}

const KEYED: [&str; 6] = [
    "--header",
    "Idempotency-Key: \"k 1\"",
    "--header",
    "X-Tenant-Id: acme",
    "--header",
    "content-type: application/json",
];

#[tokio::test(flavor = "multi_thread")]
async fn it_says_what_becomes_of_a_request_and_why() {
    let (place, config) = configured().await;
    let ask = |args: &[&str]| explain(&config, args)["request"].clone();
    let keyed = |args: &[&str]| ask(&[args, &KEYED].concat());

    let plain = keyed(&["--path", "/orders?b=2&t=9&a=1", "--body", "{\"b\": 1.0, \"sent_at\": 5}"]);
    assert_eq!(plain["becomes"], "protected", "{plain}");
    assert_eq!(plain["scope"]["tenant_id"], "acme");
    assert_eq!(plain["scope"]["operation"], "orders.create");
    assert_eq!(plain["scope"]["key"], "k 1");
    assert_eq!(plain["scope"]["derived"], false);
    assert_eq!(plain["canonical"]["query"], json!([["a", "1"], ["b", "2"]]));
    assert_eq!(plain["canonical"]["body_form"], "json");
    assert_eq!(plain["canonical"]["body"], "{\"b\":1}");
    assert_eq!(plain["hash"]["canonical"].as_str().unwrap().len(), 64);
    assert_eq!(plain["split"]["route"]["operation"], "orders.create");

    let dotted = keyed(&["--path", "/x/../orders"]);
    assert_eq!(dotted["becomes"], "protected");
    assert_eq!(dotted["split"]["route"], Value::Null);
    assert_eq!(dotted["decoded"]["path"], "/orders");
    assert_eq!(dotted["decoded"]["route"]["operation"], "orders.create");

    let by_path = keyed(&["--path", "/accounts/a%2Bb/orders"]);
    assert_eq!(by_path["scope"]["tenant_id"], "a+b");
    let nowhere = keyed(&["--path", "/accounts/7/order"]);
    assert_eq!(nowhere["becomes"], "passes_without_route");
    assert_eq!(nowhere["near"][0]["operation"], "accounts.orders");
    assert_eq!(nowhere["near"][0]["why_not"], "the path says \"order\" and not \"orders\"");
    let method = keyed(&["--path", "/orders", "--method", "PUT"]);
    let why = method["near"][0]["why_not"].as_str().unwrap();
    assert_eq!(why, "the path fits, but the method is PUT and not POST");

    let refused = |args: &[&str], name: &str| {
        let refused = ask(args);
        assert_eq!(refused["becomes"], "refused", "{refused}");
        assert_eq!(refused["problem"]["type"], format!("urn:oncegate:problem:{name}"));
        assert!(refused.get("hash").is_none());
    };
    refused(&["--path", "/orders", "--header", "X-Tenant-Id: a"], "key-missing");
    refused(&["--path", "/orders", "--header", "Idempotency-Key: a,b"], "key-invalid");
    refused(&["--path", "/orders", "--header", "Idempotency-Key: a"], "tenant-missing");
    refused(&["--path", "/accounts/..%2f/orders"], "path-ambiguous");
    refused(&["--path", "/orders", "--header", "Transfer-Encoding: gzip"], "request-refused");

    let silent = |body: &str| {
        let tenant =
            ["--header", "X-Tenant-Id: acme", "--header", "Content-Type: application/json"];
        ask(&[&["--path", "/silent", "--body", body], &tenant[..]].concat())
    };
    assert_eq!(silent("{}")["becomes"], "passes_without_key");
    let derived = silent("{\"ref\":\"r1\"}");
    assert_eq!(derived["scope"]["key"], "derived:[\"r1\"]");
    assert_eq!(derived["scope"]["derived"], true);
    let watched = keyed(&["--path", "/watched"]);
    assert_eq!(watched["becomes"], "observed");
    assert!(watched["hash"].is_object());

    // It made nothing: no database, no key, no spill.
    let left: Vec<_> = std::fs::read_dir(place.folder.path()).unwrap().collect();
    assert_eq!(left.len(), 1, "{left:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_difference_is_a_path_into_what_counts() {
    let (_place, config) = configured().await;
    let compared = |first: &[&str], other: &[&str]| {
        let keyed = if first.contains(&"--form") { &KEYED[..4] } else { &KEYED[..] };
        let first: Vec<_> = first.iter().copied().filter(|arg| *arg != "--form").collect();
        let args = [&["--path", "/orders"], keyed, &first[..], other].concat();
        explain(&config, &args)["compared"].clone()
    };
    let different = |first: &[&str], other: &[&str], place: &str, a: Value, b: Value| {
        let compared = compared(first, other);
        assert_eq!(compared["same_request"], false, "{compared}");
        let difference = &compared["difference"];
        let found = (&difference["place"], &difference["first"], &difference["second"]);
        assert_eq!(found, (&json!(place), &a, &b), "{compared}");
    };
    let (a, b) = ("{\"items\":[{\"p\":1},{\"p\":2}]}", "{\"items\":[{\"p\":1},{\"p\":3.0}]}");
    different(&["--body", a], &["--other-body", b], "$.items[1].p", json!("2"), json!("3"));
    different(
        &["--body", "{}"],
        &["--other-body", "{\"a\":null}"],
        "$.a",
        Value::Null,
        json!("null"),
    );
    let form = ["--form", "--header", "Content-Type: application/x-www-form-urlencoded"];
    let fields = |body: &'static str| [&form[..], &["--body", body]].concat();
    different(
        &fields("a=1&b=x+y&ts=1"),
        &["--other-body", "b=x%20z&a=1&ts=2"],
        "field \"b\"",
        json!("x y"),
        json!("x z"),
    );
    different(
        &["--body", "1"],
        &["--other-path", "/orders?q=1"],
        "query \"q\"",
        Value::Null,
        json!("1"),
    );
    different(
        &["--body", "1"],
        &["--other-body", "oops"],
        "body",
        json!("read as json"),
        json!("compared byte by byte"),
    );
    let euro = "X-Currency: EUR";
    different(
        &["--body", "1"],
        &["--other-header", euro],
        "header x-currency",
        Value::Null,
        json!("EUR"),
    );
    different(
        &["--body", "1"],
        &["--other-header", "Content-Type: text/plain"],
        "content-type",
        json!("application/json"),
        json!("text/plain"),
    );
    // What does not count is no difference.
    let same = compared(
        &["--body", "{\"a\":1,\"b\":2}"],
        &["--other-body", "{\"b\":2.0, \"sent_at\":1, \"a\":1}", "--other-path", "/orders?t=1"],
    );
    assert_eq!((&same["same_request"], &same["same_raw"]), (&json!(true), &json!(false)), "{same}");
    assert!(same.get("difference").is_none());
    let apart = compared(&["--body", "1"], &["--other-header", "Idempotency-Key: k2"]);
    assert_eq!((&apart["same_scope"], &apart["same_request"]), (&json!(false), &json!(true)));
    assert_eq!(apart["verdict"], "They never meet: the keys differ.");
    let other =
        [&["explain", "--config", config.to_str().unwrap(), "--path", "/orders"], &KEYED[..]];
    let bodies = ["--body", "{\"a\":\"\\u009b[2J\"}", "--other-body", "{\"a\":2}"];
    let (code, out, _) = run(&[&other.concat()[..], &bodies[..]].concat());
    assert_eq!(code, 0);
    assert!(!out.contains('\u{9b}'), "nothing acts on the terminal: {out:?}");
    let out = out.split_whitespace().collect::<Vec<_>>().join(" ");
    for line in
        ["Protected. ", "first differ at $.a", "the other 2", "another request under a used key"]
    {
        assert!(out.contains(line), "{line}: {out}");
    }
    for (wrong, why) in [
        (&["--path", "/a b"][..], "is not a path"),
        (&["--path", "/a", "--header", "nonsense"][..], "write it as 'Name: value'"),
        (&["--path", "/a", "--body", "@/does/not/exist"][..], "--body @/does/not/exist"),
        (&["--path", "/a", "--record", "x"][..], "UUID"),
    ] {
        let (code, _, errors) =
            run(&[&["explain", "--config", config.to_str().unwrap()], wrong].concat());
        assert!(code == 2 && errors.contains(why), "{wrong:?}: {code} {errors}");
    }
}

async fn a_record_is_compared_by_its_hashes_and_nothing_is_reserved(which: Which) {
    let rig = Rig::start(which, ROUTES).await;
    let order = |body: &str| post("/orders", body).tenant("acme").key("k 1");
    let id = order("{\"a\":1}").to(rig.gateway.addr).await.record();
    let question = |body: &str, record: &str| {
        json!({
            "path": "/orders",
            "headers": { "Idempotency-Key": "k 1", "X-Tenant-Id": "acme", "Content-Type": "application/json" },
            "body": body, "other": { "body": "{\"a\":3}" }, "record": record,
        })
    };
    let ask = async |question: &Value| {
        post("/api/v1/explain", &question.to_string()).to(rig.gateway.admin).await
    };
    for (body, same, verdict) in [
        ("{\"a\": 1.0}", true, "It is a retry: it gets the stored answer."),
        ("{\"a\":2}", false, "It is another request than the record's: it gets request-mismatch."),
    ] {
        let answer = ask(&question(body, &id)).await;
        assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
        let answer = answer.json();
        let record = &answer["record"];
        assert_eq!(record["status"], "completed");
        assert_eq!(record["compared"]["verdict"], verdict);
        assert_eq!(record["compared"]["same_request"], same);
        assert_eq!(record["compared"]["same_canonical"], same);
        assert_eq!(record["request_hash"] == answer["request"]["hash"]["canonical"], same);
        assert_eq!(answer["compared"]["difference"]["place"], "$.a");
        // The command says the same.
        let args =
            ["--path", "/orders", "--body", body, "--other-body", "{\"a\":3}", "--record", &id];
        let typed = explain(&rig.gateway.config, &[&args[..], &KEYED[..]].concat());
        assert_eq!(typed, answer);
        // And the gateway does what it says.
        let answer = order(body).to(rig.gateway.addr).await;
        assert_eq!(answer.replayed(), same, "{answer:?}");
    }
    let other = question("{}", &uuid::Uuid::from_u128(7).to_string());
    assert_eq!(ask(&other).await.status, StatusCode::NOT_FOUND);
    let (code, out, _) = crate::support::fleet::command(
        &rig.gateway,
        &["explain", "--path", "/orders", "--record", "00000000-0000-0000-0000-000000000007"],
    );
    assert!(code == 1 && out.contains("There is no record"), "{code} {out}");
    for (wrong, why) in [
        (json!({ "path": "/orders", "bdoy": "" }), "unknown field `bdoy`"),
        (json!({ "body": "" }), "missing field `path`"),
        (json!({ "path": "/", "body": "", "body_base64": "" }), "keep one of them"),
        (json!({ "path": "/", "body_base64": "?" }), "body_base64"),
        (json!({ "path": "/", "method": "P T" }), "is not a method"),
    ] {
        let answer = ask(&wrong).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{answer:?}");
        let errors = answer.json()["errors"].to_string();
        assert!(errors.contains(why), "{why}: {errors}");
    }
    let foreign = post("/api/v1/explain", &question("{}", &id).to_string());
    let foreign = foreign.header("origin", "https://evil.example").to(rig.gateway.admin).await;
    assert_eq!(foreign.status, StatusCode::FORBIDDEN);
    assert_eq!(get("/api/v1/explain").to(rig.gateway.admin).await.status.as_u16(), 405);
    assert_eq!(rig.place.records().await, 1);
    assert_eq!(rig.orders.ledger().len(), 1);
}

async fn after_a_change_of_settings_the_request_as_received_decides(which: Which) {
    let upstream = Upstream::always(Reply::keep(OK)).await;
    let place = Place::new(which).await;
    let toml = rig::config(&place, &format!("http://{}", upstream.addr), "");
    let config = process::config(place.folder.path(), &toml);
    let mut gateway = Gateway::start(&config);
    let order = post("/orders", "{\"a\":1}").tenant("acme").key("k 1");
    let id = order.to(gateway.addr).await.record();
    gateway.kill9();
    let ignoring =
        rig::config(&place, "http://127.0.0.1:1", "fingerprint = { ignore = [\"$.b\"] }");
    let changed = process::config(place.folder.path(), &ignoring);
    for (body, same) in [("{\"a\":1}", true), ("{\"a\": 1}", false)] {
        let args = ["--path", "/orders", "--body", body, "--record", &id];
        let answer = explain(&changed, &[&args[..], &KEYED[..]].concat());
        let compared = &answer["record"]["compared"];
        assert_eq!(compared["decided_by"], "raw", "{compared}");
        assert_eq!(
            (&compared["same_recipe"], &compared["same_raw"]),
            (&json!(false), &json!(same))
        );
        assert_eq!(compared["same_request"], same);
    }
}
