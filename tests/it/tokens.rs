//! Tenants out of tokens: what a good one says, and where the keys come from.

use std::sync::Mutex;
use std::time::Duration;

use http::StatusCode;
use serde_json::json;

use crate::support::client::{Answer, Ask, post};
use crate::support::issuer::{self, KeyServer, Named, claims, rs256};
use crate::support::process::eventually;
use crate::support::raw::Raw;
use crate::support::rig::{Rig, Which, on_both_stores};
use crate::support::secure::Secured;
use crate::support::upstream::Reply;

/// A route by a top-level claim, one by a claim that stands deeper, one that needs no key.
fn routes(keys: &str) -> String {
    format!(
        r#"
[jwt]
issuer = "{}"
audience = ["{}", "second"]
{keys}
[[route]]
method = "POST"
path = "/jwt"
operation = "jwt"
tenant = {{ jwt_claim = "tenant_id" }}
[[route]]
method = "POST"
path = "/deep"
operation = "deep"
tenant = {{ jwt_claim = "/org/id" }}
[[route]]
method = "POST"
path = "/soft"
operation = "soft"
tenant = {{ jwt_claim = "tenant_id" }}
require_key = false
derive_key = ["$.order_ref"]
"#,
        issuer::ISSUER,
        issuer::AUDIENCE
    )
}

/// Keys from a file.
pub(crate) fn by_file() -> String {
    let file = issuer::public_key_file();
    routes(&format!("key_file = \"{}\"\nalgorithms = [\"RS256\"]", file.display()))
}

fn by_url(server: &KeyServer, more: &str) -> String {
    routes(&format!("jwks_url = \"{}\"\nalgorithms = [\"ES256\", \"RS256\"]\n{more}", server.url()))
}

fn ask(target: &str, token: &str) -> Ask {
    post(target, r#"{"a":1}"#).header("authorization", format!("Bearer {token}"))
}

on_both_stores! {
    a_tenant_is_what_a_checked_token_says,
}

async fn a_tenant_is_what_a_checked_token_says(which: Which) {
    let rig = Rig::start(which, &by_file()).await;
    let addr = rig.gateway.addr;
    let token = |tenant: &str, changes| rs256(&claims(tenant, &changes));
    let first = ask("/jwt", &token("acme", json!({}))).key("k").to(addr).await;
    assert_eq!(first.status, StatusCode::CREATED);
    // A refreshed token, another subject, another audience of ours: the same tenant. What the caller says beside it is nothing.
    for changes in
        [json!({ "jti": "2" }), json!({ "sub": "bob" }), json!({ "aud": ["other", "second"] })]
    {
        let again = ask("/jwt", &token("acme", changes)).tenant("globex").key("k").to(addr).await;
        assert!(again.replayed());
        assert_eq!(again.body, first.body);
    }
    let other = ask("/jwt", &token("globex", json!({}))).tenant("acme").key("k").to(addr).await;
    assert!(!other.replayed());
    assert_eq!(rig.orders.runs(), 2);
    // A whole number is its digits; a claim may stand deeper.
    let deep = |id| token("acme", json!({ "org": { "id": id } }));
    assert!(!ask("/deep", &deep(json!(7))).key("k").to(addr).await.replayed());
    assert!(ask("/deep", &deep(json!("7"))).key("k").to(addr).await.replayed());
    assert!(!ask("/deep", &deep(json!(8))).key("k").to(addr).await.replayed());
    // A good token that names no tenant is no bad token.
    for odd in [json!(null), json!(1.5), json!(["7"]), json!(true), json!(""), json!("a\nb")] {
        let before = (rig.orders.runs(), rig.place.records().await);
        let answer = ask("/deep", &deep(odd.clone())).key("k").to(addr).await;
        assert_eq!(
            (answer.status, answer.problem()),
            (StatusCode::BAD_REQUEST, "tenant-missing".into())
        );
        assert!(answer.json()["detail"].to_string().contains("token"), "{odd}");
        assert_eq!((rig.orders.runs(), rig.place.records().await), before, "{odd}");
    }
    // The record says who asked, and nothing of the token.
    let sql = "select tenant_id, caller from idempotency_records order by created_at";
    let rows = rig.place.rows(sql).await;
    assert_eq!(rows[0], [Some("acme".to_owned()), Some("alice".to_owned())]);
    assert!(!format!("{rows:?}").contains("eyJ"), "{rows:?}");
    // The token goes on to the API, which judges it too.
    let sent = rig.orders.ledger().pop().unwrap();
    assert!(sent.headers["authorization"].to_str().unwrap().starts_with("Bearer eyJ"));
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_key_a_request_passes_and_its_token_is_the_apis_own_business() {
    let rig = Rig::start(Which::Sqlite, &by_file()).await;
    for token in ["nonsense", &rs256(&claims("acme", &json!({ "exp": 1 })))] {
        let answer = ask("/soft", token).to(rig.gateway.addr).await;
        assert_eq!(answer.status, StatusCode::CREATED);
        assert!(answer.header("oncegate-record").is_none());
    }
    // A derived key is a key.
    let derived = |token: &str| {
        post("/soft", r#"{"order_ref":1}"#).header("authorization", format!("Bearer {token}"))
    };
    let refused = derived("nonsense").to(rig.gateway.addr).await;
    assert_eq!(
        (refused.status, refused.problem()),
        (StatusCode::UNAUTHORIZED, "token-invalid".into())
    );
    let good = rs256(&claims("acme", &json!({})));
    assert!(!derived(&good).to(rig.gateway.addr).await.replayed());
    assert!(derived(&good).to(rig.gateway.addr).await.replayed());
    assert_eq!(rig.orders.runs(), 3);
}

async fn sent(rig: &Rig, key: &Named, idempotency: &str) -> Answer {
    let token = key.token(&claims("acme", &json!({})));
    ask("/jwt", &token).key(idempotency).to(rig.gateway.addr).await
}

fn unverified(answer: &Answer) -> bool {
    let is = answer.status == StatusCode::SERVICE_UNAVAILABLE;
    if is {
        assert_eq!(answer.problem(), "token-unverified");
        assert!(answer.header("retry-after").is_some());
    }
    is
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_of_a_url_are_fetched_exchanged_and_kept_while_it_is_away() {
    let server = KeyServer::start().await;
    let more = "cooldown = \"50ms\"\nrefresh = \"1h\"";
    let rig = Rig::start(Which::Sqlite, &by_url(&server, more)).await;
    let (one, two, never) = (Named::new("one"), Named::new("two"), Named::new("never"));
    // No keys yet: nobody gets further, and nobody is told that a good token is bad.
    server.wait_for(1).await;
    assert!(server.last_head().starts_with("GET /keys?v=1 HTTP/1.1\r\n"), "{}", server.last_head());
    assert!(unverified(&sent(&rig, &one, "k").await));
    for useless in ["{}", "<html>", r#"{"keys":{}}"#] {
        server.answer_json(useless);
        server.wait_for(server.asked() + 1).await;
        assert!(unverified(&sent(&rig, &one, "k").await), "{useless}");
    }
    assert_eq!((rig.orders.runs(), rig.place.records().await), (0, 0));
    server.publish(&[&one]);
    eventually("the keys are there", || async { !unverified(&sent(&rig, &one, "k").await) }).await;
    assert_eq!(rig.orders.runs(), 1);
    // A key that is new: fetched because a token names it.
    server.publish(&[&two]);
    eventually("the new key counts", || async {
        sent(&rig, &two, "k").await.status == StatusCode::CREATED
    })
    .await;
    // The one that is gone, and one that never was, are not known.
    for key in [&one, &never] {
        let answer = sent(&rig, key, "k").await;
        assert_eq!(answer.problem(), "token-invalid");
        assert_eq!(answer.header("www-authenticate"), Some("Bearer error=\"invalid_token\""));
    }
    // The URL is away: what is known stays known, and what is not may be good.
    let away = async || {
        let before = server.asked();
        eventually("another fetch", || async {
            drop(sent(&rig, &never, "k").await);
            server.asked() > before
        })
        .await;
        assert!(unverified(&sent(&rig, &never, "k").await));
        assert!(sent(&rig, &two, "k").await.replayed());
    };
    server.answer(Reply::fin("HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n"));
    away().await;
    // A redirect is not followed, and a set without end is not read.
    server.answer(Reply::fin("HTTP/1.1 302 Oh\r\nLocation: /else\r\nContent-Length: 0\r\n\r\n"));
    away().await;
    assert!(!server.last_head().contains("else"));
    let endless = "x".repeat(1 << 20);
    server.answer_json(&format!("{{\"keys\":[],\"x\":\"{endless}\"}}"));
    away().await;
    assert_eq!(rig.orders.runs(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_set_without_a_key_of_use_revokes_all_keys_and_what_is_no_set_none() {
    let server = KeyServer::start().await;
    let more = "cooldown = \"50ms\"\nrefresh = \"100ms\"";
    let rig = Rig::start(Which::Sqlite, &by_url(&server, more)).await;
    let one = Named::new("one");
    let is_good = async || {
        let answer = sent(&rig, &one, "k").await;
        let good = answer.status == StatusCode::CREATED;
        assert!(good || answer.problem() == "token-invalid", "{answer:?}");
        good
    };
    server.publish(&[&one]);
    eventually("the keys are there", || async { !unverified(&sent(&rig, &one, "k").await) }).await;
    // Nothing, a secret, a key for an algorithm that is not accepted.
    let ed25519 = issuer::encode([7; 32]);
    for set in [
        json!([]),
        json!([{ "kty": "oct", "kid": "one", "k": "AAAA" }]),
        json!([{ "kty": "OKP", "crv": "Ed25519", "kid": "one", "x": ed25519 }]),
    ] {
        server.answer_json(&json!({ "keys": set }).to_string());
        eventually("the key is revoked", async || !is_good().await).await;
        // Not even while the URL is away does it come back.
        server.answer(Reply::fin("HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n"));
        eventually("nobody knows", || async { unverified(&sent(&rig, &one, "k").await) }).await;
        server.publish(&[&one]);
        let good = async || sent(&rig, &one, "k").await.status == StatusCode::CREATED;
        eventually("the key is good again", good).await;
    }
    // What is no set changes nothing.
    for no_set in ["", "[]", "{\"keys\":{}}", "{\"keys\":[]"] {
        server.answer_json(no_set);
        server.wait_for(server.asked() + 2).await;
        assert!(is_good().await, "{no_set}");
    }
    rig.gateway.says("no token is good");
    assert_eq!(rig.orders.runs(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn made_up_key_names_do_not_make_the_gateway_ask_for_keys() {
    let server = KeyServer::start().await;
    let one = Named::new("one");
    server.publish(&[&one]);
    let more = "cooldown = \"1h\"\nrefresh = \"1h\"";
    let rig = Rig::start(Which::Sqlite, &by_url(&server, more)).await;
    eventually("the keys are there", || async { !unverified(&sent(&rig, &one, "k").await) }).await;
    let asked = server.asked();
    let asks = (0..50).map(|n| {
        let token = Named::new(&format!("made-up-{n}")).token(&claims("acme", &json!({})));
        let (ask, to) = (ask("/jwt", &token).key("k"), rig.gateway.addr);
        tokio::spawn(async move { ask.to(to).await })
    });
    for answer in asks.collect::<Vec<_>>() {
        assert_eq!(answer.await.unwrap().problem(), "token-invalid");
    }
    assert_eq!(server.asked(), asked, "fetched a moment ago");
    assert_eq!(rig.orders.runs(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_callers_share_one_fetch_and_none_waits_past_its_time_out() {
    let server = KeyServer::start().await;
    // The head comes, and the rest of the set never does.
    server.answer(Reply::keep("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"));
    let more = "cooldown = \"100ms\"\ntimeout = \"500ms\"";
    let rig = Rig::start(Which::Sqlite, &by_url(&server, more)).await;
    let one = Named::new("one");
    let token = one.token(&claims("acme", &json!({})));
    let begun = std::time::Instant::now();
    let asks = (0..40).map(|_| {
        let (ask, to) = (ask("/jwt", &token).key("k"), rig.gateway.addr);
        tokio::spawn(async move { ask.to(to).await })
    });
    for answer in asks.collect::<Vec<_>>() {
        assert!(unverified(&answer.await.unwrap()));
    }
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    assert!(server.asked() < 20, "{} fetches", server.asked());
    assert_eq!(rig.orders.runs(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_names_a_key_and_hangs_up_does_not_use_up_anothers_fetch() {
    let server = KeyServer::start().await;
    let (old, new) = (Named::new("old"), Named::new("new"));
    server.publish(&[&old]);
    let more = "cooldown = \"200ms\"\nrefresh = \"1h\"";
    let rig = Rig::start(Which::Sqlite, &by_url(&server, more)).await;
    eventually("the keys are there", || async { !unverified(&sent(&rig, &old, "k").await) }).await;
    let asked = server.asked();
    server.publish_slowly(&[&old, &new], Duration::from_millis(300));
    let made_up = Named::new("made-up").token(&claims("acme", &json!({})));
    let request = format!(
        "POST /jwt HTTP/1.1\r\nHost: a\r\nIdempotency-Key: h\r\nContent-Length: 0\r\nAuthorization: Bearer {made_up}\r\n\r\n"
    );
    // Until the cooldown is over; hung up while the set is on its way.
    let hanging = Mutex::new(Vec::new());
    eventually("the set is asked for", || async {
        let hangs = Raw::sending(rig.gateway.addr, &request).await;
        hanging.lock().unwrap().push(hangs);
        server.asked() > asked
    })
    .await;
    drop(hanging);
    eventually("the new key is good", || async {
        sent(&rig, &new, "n").await.status == StatusCode::CREATED
    })
    .await;
    assert_eq!(server.asked(), asked + 1, "the fetch that was begun is the one that counts");
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_come_over_https_from_whom_the_file_vouches_for_and_from_nobody_else() {
    let server = KeyServer::start().await;
    let one = Named::new("one");
    server.publish(&[&one]);
    let (good, other) =
        (Secured::before(server.addr()).await, Secured::before(server.addr()).await);
    let keys = |ca_file: String| {
        let url = good.url("/keys");
        routes(&format!("jwks_url = \"{url}\"\nalgorithms = [\"ES256\"]\n{ca_file}"))
    };
    let rig = Rig::start(Which::Sqlite, &keys(good.ca_file())).await;
    eventually("the keys are there", || async { !unverified(&sent(&rig, &one, "k").await) }).await;
    assert!(sent(&rig, &one, "k").await.replayed());
    let asked = server.asked();
    // Of another authority, and without a file: of none that vouches for it.
    for ca_file in [other.ca_file(), String::new()] {
        let rig = Rig::start(Which::Sqlite, &keys(ca_file)).await;
        assert!(unverified(&sent(&rig, &one, "k").await));
        let told = async || rig.gateway.log().contains("the keys for tokens cannot be fetched");
        eventually("it is told", told).await;
        assert_eq!(rig.orders.runs(), 0);
    }
    assert_eq!(server.asked(), asked);
}
