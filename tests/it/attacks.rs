//! One table of attacks: what somebody may send to get another caller's answer, to have something executed twice, or to say
//! something in another's name; and what comes of it.

use bytes::Bytes;
use http::StatusCode;
use serde_json::{Value, json};

use crate::replay_auth::guarded;
use crate::support::client::{Ask, post};
use crate::support::issuer::{self, claims, hs256, in_seconds, rs256, rs256_with, signed};
use crate::support::process::Gateway;
use crate::support::raw::{Raw, headers, status};
use crate::support::rig::{self, Rig, Which, on_both_stores};
use crate::support::upstream::{Reply, Upstream};
use crate::tokens;

on_both_stores! {
    no_bad_token_reads_reserves_or_executes,
    no_ambiguous_or_odd_request_reads_reserves_or_executes,
    one_tenant_never_gets_anothers_answer,
}

fn asked(authorization: &[&str]) -> Ask {
    let ask = post("/jwt", r#"{"a":1}"#).key("k");
    authorization.iter().fold(ask, |ask, line| ask.header("authorization", line))
}

/// What is wrong, and the lines of `Authorization`.
fn bad_tokens() -> Vec<(&'static str, Vec<String>)> {
    let with = |changes: Value| rs256(&claims("acme", &changes));
    let good = with(json!({}));
    let parts: Vec<&str> = good.split('.').collect();
    let head = issuer::encode(r#"{"alg":"none"}"#);
    let others = issuer::encode(claims("globex", &json!({})));
    let public = std::fs::read(issuer::public_key_file()).unwrap();
    let plain = claims("acme", &json!({}));
    let kid = |kid: &str| rs256_with(&json!({ "alg": "RS256", "kid": kid }).to_string(), "{}");
    let one = |token: String| vec![format!("Bearer {token}")];
    let mut all = vec![
        ("absent", vec![]),
        ("another scheme", vec!["Basic YWxpY2U6cHc=".to_owned()]),
        ("no scheme", vec![good.clone()]),
        ("nothing", vec!["Bearer".to_owned()]),
        ("twice", vec![format!("Bearer {good}"), format!("Bearer {good}")]),
        ("beside another", vec!["Basic YWxpY2U6cHc=".to_owned(), format!("Bearer {good}")]),
        ("two in one line", vec![format!("Bearer {good}, Bearer {good}")]),
    ];
    all.extend(
        [
            ("forged payload", format!("{}.{others}.{}", parts[0], parts[2])),
            ("unsigned", format!("{}.{}.", parts[0], parts[1])),
            ("alg none", format!("{head}.{}.", parts[1])),
            ("alg none with its signature", format!("{head}.{}.{}", parts[1], parts[2])),
            ("alg None", signed(r#"{"alg":"None"}"#, &plain, |_| Vec::new())),
            ("no alg", signed("{}", &plain, |_| Vec::new())),
            ("HMAC with the public key", hs256(&plain, &public)),
            ("HMAC with its last line cut", hs256(&plain, public.trim_ascii_end())),
            ("HMAC with nothing", hs256(&plain, b"")),
            ("another key", issuer::Named::new("one").token(&plain)),
            ("expired", with(json!({ "exp": in_seconds(-60) }))),
            ("never expires", with(json!({ "exp": null }))),
            ("expires as text", with(json!({ "exp": in_seconds(60).to_string() }))),
            ("expires as a word", with(json!({ "exp": "never" }))),
            ("not yet", with(json!({ "nbf": in_seconds(120) }))),
            ("not yet as text", with(json!({ "nbf": "99999999999" }))),
            ("another issuer", with(json!({ "iss": "https://issuer.example" }))),
            ("no issuer", with(json!({ "iss": null }))),
            ("another audience", with(json!({ "aud": "payments" }))),
            ("no audience", with(json!({ "aud": null }))),
            ("an audience of names", with(json!({ "aud": { "orders": 1 } }))),
            ("two tenants", rs256(&plain.replacen('{', r#"{"tenant_id":"globex","#, 1))),
            ("another kind", rs256_with(r#"{"alg":"RS256","typ":"dpop+jwt"}"#, &plain)),
            ("critical", rs256_with(r#"{"alg":"RS256","crit":["b64"],"b64":false}"#, &plain)),
            ("kid out of the folder", kid("../../../../dev/null")),
            ("kid as SQL", kid("' union select 'AA'; --")),
            ("own key", rs256_with(r#"{"alg":"HS256","jwk":{"kty":"oct","k":"AA"}}"#, &plain)),
            ("padded", format!("{good}==")),
            ("longer", format!("{good}.{}", parts[2])),
            ("very long", "A".repeat(20_000)),
        ]
        .map(|(what, token)| (what, one(token))),
    );
    all
}

async fn no_bad_token_reads_reserves_or_executes(which: Which) {
    let rig = Rig::start(which, &tokens::by_file()).await;
    let good = format!("Bearer {}", rs256(&claims("acme", &json!({}))));
    // Once before anything is stored, once with an answer to steal.
    for stored in [false, true] {
        if stored {
            assert_eq!(asked(&[&good]).to(rig.gateway.addr).await.status, StatusCode::CREATED);
        }
        let before = (rig.orders.runs(), rig.place.records().await);
        for (what, lines) in bad_tokens() {
            let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
            let answer = asked(&lines).to(rig.gateway.addr).await;
            let expected = (StatusCode::UNAUTHORIZED, "token-invalid".to_owned());
            assert_eq!((answer.status, answer.problem()), expected, "{what}: {answer:?}");
            let challenge =
                if lines.is_empty() { "Bearer" } else { "Bearer error=\"invalid_token\"" };
            assert_eq!(answer.header("www-authenticate"), Some(challenge), "{what}");
            assert!(!answer.replayed() && answer.header("oncegate-record").is_none(), "{what}");
            assert_eq!(answer.json()["retry"], "same-key", "{what}");
        }
        assert_eq!((rig.orders.runs(), rig.place.records().await), before);
    }
    assert!(asked(&[&good]).to(rig.gateway.addr).await.replayed());
    assert!(!rig.gateway.log().contains("eyJ"), "no token in the log");
}

async fn no_ambiguous_or_odd_request_reads_reserves_or_executes(which: Which) {
    let policy = "replay_auth = \"same-credential\"";
    let rig = guarded(which, policy, "").await;
    let request = |lines: &[u8]| {
        let mut request = b"POST /orders HTTP/1.1\r\nHost: a\r\nX-Tenant-Id: acme\r\n".to_vec();
        request.extend_from_slice(lines);
        request.extend_from_slice(b"Content-Length: 2\r\n\r\n{}");
        request
    };
    let good = request(b"Idempotency-Key: k\r\nAuthorization: Bearer a\r\n");
    let first = Raw::sending(rig.gateway.addr, &good).await.answer().await;
    assert_eq!(status(&first), 201, "{first}");
    let before = (rig.orders.runs(), rig.place.records().await);
    let table: &[(&str, &[u8])] = &[
        ("two keys", b"Idempotency-Key: k\r\nIdempotency-Key: k\r\nAuthorization: Bearer a\r\n"),
        ("other keys", b"Idempotency-Key: a\r\nIdempotency-Key: b\r\nAuthorization: Bearer a\r\n"),
        ("a list of keys", b"Idempotency-Key: k, k\r\nAuthorization: Bearer a\r\n"),
        ("a quoted list", b"Idempotency-Key: \"k\", \"k\"\r\nAuthorization: Bearer a\r\n"),
        ("a tab in the key", b"Idempotency-Key: a\tb\r\nAuthorization: Bearer a\r\n"),
        ("a NUL in the key", b"Idempotency-Key: a\0b\r\nAuthorization: Bearer a\r\n"),
        (
            "a CR in the key",
            b"Idempotency-Key: a\rX-Tenant-Id: globex\r\nAuthorization: Bearer a\r\n",
        ),
        ("a folded key", b"Idempotency-Key: a\r\n b\r\nAuthorization: Bearer a\r\n"),
        ("a DEL in the key", b"Idempotency-Key: a\x7fb\r\nAuthorization: Bearer a\r\n"),
        ("no ASCII", b"Idempotency-Key: \xc3\xa9\r\nAuthorization: Bearer a\r\n"),
        (
            "two credentials",
            b"Idempotency-Key: k\r\nAuthorization: Bearer a\r\nAuthorization: Bearer b\r\n",
        ),
        (
            "two equal ones",
            b"Idempotency-Key: k\r\nAuthorization: Bearer a\r\nAuthorization: Bearer a\r\n",
        ),
        ("two tenants", b"Idempotency-Key: k\r\nAuthorization: Bearer a\r\nX-Tenant-Id: acme\r\n"),
        ("two hosts", b"Idempotency-Key: k\r\nAuthorization: Bearer a\r\nHost: b\r\n"),
    ];
    for (what, lines) in table {
        let answer = Raw::sending(rig.gateway.addr, request(lines)).await.answer().await;
        assert_eq!(status(&answer), 400, "{what}: {answer}");
        assert!(!answer.contains("order-"), "{what}: {answer}");
        assert_eq!((rig.orders.runs(), rig.place.records().await), before, "{what}");
    }
    let stranger = request(b"Idempotency-Key: k\r\nAuthorization: Bearer b\r\n");
    let answer = Raw::sending(rig.gateway.addr, stranger).await.answer().await;
    assert_eq!(status(&answer), 403, "{answer}");
    // What is hidden from the next hop does not count here either.
    let hidden =
        request(b"Idempotency-Key: k\r\nConnection: authorization\r\nAuthorization: Bearer a\r\n");
    let answer = Raw::sending(rig.gateway.addr, hidden).await.answer().await;
    assert_eq!(status(&answer), 403, "{answer}");
    assert_eq!((rig.orders.runs(), rig.place.records().await), before);
}

async fn one_tenant_never_gets_anothers_answer(which: Which) {
    let rig = Rig::start(which, &tokens::by_file()).await;
    let token = |tenant: &str| format!("Bearer {}", rs256(&claims(tenant, &json!({}))));
    let addr = rig.gateway.addr;
    let mine = asked(&[&token("acme")]).to(addr).await;
    // With the very key and request, and whatever else it says.
    for (count, theirs) in [
        asked(&[&token("globex")]),
        asked(&[&token("ACME")]).tenant("acme"),
        asked(&[&token("acme ")]),
        asked(&[&token("acme\u{200b}")]).header("x-forwarded-user", "acme"),
    ]
    .into_iter()
    .enumerate()
    {
        let answer = theirs.to(addr).await;
        assert_eq!(answer.status, StatusCode::CREATED);
        assert!(!answer.replayed());
        assert_ne!((answer.record(), &answer.body), (mine.record(), &mine.body));
        assert_eq!(rig.orders.runs(), count + 2);
    }
}

/// Answers of an upstream that try to say more than they may, or to make the stored answer say more than the first one.
#[tokio::test(flavor = "multi_thread")]
async fn no_stored_header_becomes_two() {
    let answers: &[(&str, &[u8])] = &[
        ("folded", b"X-Note: one\r\n Set-Cookie: evil=1\r\n"),
        ("folded by a tab", b"X-Note: one\r\n\tX-Injected: 1\r\n"),
        ("a bare CR", b"X-Note: one\rX-Injected: 1\r\n"),
        ("a bare LF", b"X-Note: one\nX-Injected: 1\r\n"),
        ("a NUL", b"X-Note: one\0X-Injected: 1\r\n"),
        ("escaped", b"X-Note: one%0d%0aX-Injected:%201\r\n"),
        (
            "a name of ours",
            b"Idempotent-Replayed: true\r\nOncegate-Record: x\r\nOncegate_Expires: x\r\n",
        ),
        ("a blank before the colon", b"X-Note : one\r\n"),
        ("no name", b": X-Injected: 1\r\n"),
        ("raw bytes", b"X-Note: caf\xe9 \xff\r\n"),
        ("a body in a header", b"X-Note: one\r\n\r\nHTTP/1.1 200 OK\r\nX-Injected: 1\r\n"),
    ];
    let scripted: Vec<Bytes> = answers.iter().map(|(_, lines)| Bytes::from_static(lines)).collect();
    let upstream = Upstream::start(move |_, seen| {
        let number = crate::support::raw::header(&seen.head, "x-number").unwrap();
        let lines = &scripted[number.parse::<usize>().unwrap()];
        let mut answer = b"HTTP/1.1 201 Created\r\nContent-Length: 2\r\n".to_vec();
        answer.extend_from_slice(lines);
        answer.extend_from_slice(b"\r\nok");
        Reply::fin(answer)
    })
    .await;
    let (_place, gateway) =
        rig::gateway(Which::Sqlite, &format!("http://{}", upstream.addr), "", "").await;
    for (number, (what, _)) in answers.iter().enumerate() {
        let (first, again) = (told(&gateway, number).await, told(&gateway, number).await);
        for answer in [&first, &again] {
            let (head, _) = answer.split_once("\r\n\r\n").unwrap();
            assert!(headers(head, "set-cookie").is_empty(), "{what}: {answer}");
            for ours in ["idempotent-replayed", "oncegate-record", "oncegate-expires"] {
                assert!(headers(head, ours).len() <= 1, "{what}: {answer}");
                assert!(!headers(head, ours).contains(&"x".to_owned()), "{what}: {answer}");
            }
            assert!(
                !head.contains('\0') && !head.replace("\r\n", "").contains(['\r', '\n']),
                "{what}"
            );
        }
        // What the upstream itself has said in a line of its own it has said; a replay says no more and no less.
        assert!(headers(&first, "idempotent-replayed").is_empty(), "{what}: {first}");
        if status(&first) == 201 {
            assert_eq!(headers(&again, "idempotent-replayed"), ["true"], "{what}: {again}");
            for name in ["x-note", "x-injected"] {
                assert_eq!(headers(&first, name), headers(&again, name), "{what}: {again}");
            }
        } else {
            assert_eq!((status(&first), status(&again)), (502, 409), "{what}: {first} {again}");
        }
        let own_line = ["a bare LF"].contains(what);
        assert_eq!(headers(&again, "x-injected").is_empty(), !own_line, "{what}: {again}");
    }
}

async fn told(gateway: &Gateway, number: usize) -> String {
    let request = format!(
        "POST /orders HTTP/1.1\r\nHost: a\r\nX-Tenant-Id: acme\r\nIdempotency-Key: k{number}\r\nX-Number: {number}\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{{}}"
    );
    Raw::sending(gateway.addr, request).await.answer().await
}
