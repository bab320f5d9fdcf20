//! Whose key it is: D9, D10 and D11, every source of tenants, derived keys, and what a caller cannot say of itself.

use http::StatusCode;

use crate::support::client::{Ask, post};
use crate::support::raw::{Raw, body, status};
use crate::support::rig::{Rig, Which, on_both_stores};

fn order() -> Ask {
    post("/orders", r#"{"a":1}"#)
}

/// Two callers with one key: executed for each, replayed to each its own answer.
async fn apart(rig: &Rig, one: Ask, two: Ask) {
    let before = rig.orders.runs();
    let (one, two) = (one.key("shared"), two.key("shared"));
    let first = one.to(rig.gateway.addr).await;
    let second = two.to(rig.gateway.addr).await;
    for answer in [&first, &second] {
        assert_eq!(answer.status, StatusCode::CREATED, "{answer:?}");
        assert!(!answer.replayed());
    }
    assert_ne!(first.body, second.body);
    for (ask, answer) in [(&one, &first), (&two, &second)] {
        let replay = ask.to(rig.gateway.addr).await;
        assert!(replay.replayed(), "{ask:?}");
        assert_eq!(replay.body, answer.body, "its own answer");
    }
    assert_eq!(rig.orders.runs(), before + 2);
}

async fn no_tenant(rig: &Rig, ask: Ask, place: &str) {
    let before = (rig.orders.runs(), rig.place.records().await);
    let answer = ask.key("shared").to(rig.gateway.addr).await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{ask:?}", ask = answer);
    assert_eq!(answer.problem(), "tenant-missing");
    let detail = answer.json()["detail"].to_string();
    assert!(detail.contains(place), "it names where to say it: {detail}");
    assert_eq!((rig.orders.runs(), rig.place.records().await), before);
}

on_both_stores! {
    d09_another_tenant_is_another_scope_and_none_is_an_error,
    d10_another_credential_of_one_tenant_is_the_same_caller,
    derived_keys_stand_in_where_none_is_sent,
}

async fn d09_another_tenant_is_another_scope_and_none_is_an_error(which: Which) {
    let rig = Rig::start(which, "").await;
    apart(&rig, order().tenant("acme"), order().tenant("globex")).await;
    // Names that a careless store would take for one.
    apart(&rig, order().tenant("Case"), order().tenant("case")).await;
    apart(&rig, order().tenant("\u{e9}t\u{e9}"), order().tenant("e\u{301}te\u{301}")).await;
    for ask in [
        order(),
        order().tenant(""),
        order().tenant("   "),
        order().tenant("acme").tenant("acme"),
        order().tenant("acme").tenant("globex"),
        order().tenant(&"x".repeat(256)),
        order().header("x-tenant-id", b"ac\xffme"),
        order().header("x-tenant-id", b"ac\tme"),
        order().header("x_tenant_id", "acme"),
    ] {
        no_tenant(&rig, ask, "`x-tenant-id`").await;
    }
    // No twin of the tenant's header reaches an API that would take it for the header.
    order().tenant("acme").header("x_tenant_id", "globex").key("twin").to(rig.gateway.addr).await;
    let seen = rig.orders.ledger().pop().unwrap();
    assert_eq!(seen.tenant(), Some("acme"));
    assert_eq!(seen.headers.get("x_tenant_id"), None);
}

async fn d10_another_credential_of_one_tenant_is_the_same_caller(which: Which) {
    let rig = Rig::start(which, "").await;
    let sent = |token: &str| order().tenant("acme").key("k").header("authorization", token);
    let first = sent("Bearer one").to(rig.gateway.addr).await;
    let second = sent("Basic dHdvOnR3bw==").to(rig.gateway.addr).await;
    assert!(second.replayed());
    assert_eq!(first.body, second.body);
    assert_eq!(rig.orders.runs(), 1);
}

/// Sends from one of the loopback's addresses.
async fn sent_from(rig: &Rig, address: &str, lines: &str) -> String {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind(format!("{address}:0").parse().unwrap()).unwrap();
    let mut stream = socket.connect(rig.gateway.addr).await.unwrap();
    let request = format!(
        "POST /orders HTTP/1.1\r\nHost: a\r\nConnection: close\r\nIdempotency-Key: k\r\n{lines}Content-Length: 2\r\n\r\n{{}}"
    );
    tokio::io::AsyncWriteExt::write_all(&mut stream, request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    tokio::io::AsyncReadExt::read_to_string(&mut stream, &mut answer).await.unwrap();
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn d11_an_address_is_no_part_of_the_scope() {
    let rig = Rig::start(Which::Sqlite, "").await;
    let first = sent_from(&rig, "127.0.0.1", "X-Tenant-Id: acme\r\n").await;
    assert_eq!(status(&first), 201, "{first}");
    let moved = sent_from(&rig, "127.0.0.2", "X-Tenant-Id: acme\r\nX-Forwarded-For: 9.9.9.9\r\n");
    let moved = moved.await;
    assert!(moved.to_ascii_lowercase().contains("idempotent-replayed: true"), "{moved}");
    let neighbour = sent_from(&rig, "127.0.0.1", "X-Tenant-Id: globex\r\n").await;
    assert!(!neighbour.to_ascii_lowercase().contains("idempotent-replayed"), "{neighbour}");
    assert_eq!(rig.orders.runs(), 2);
}

const SOURCES: &str = r#"
[[route]]
method = "POST"
path = "/fixed"
operation = "fixed"
tenant = { fixed = "everyone" }
[[route]]
method = "POST"
path = "/accounts/{account}/orders"
operation = "path"
tenant = { path = "account" }
[[route]]
method = "POST"
path = "/host"
operation = "host"
tenant = { host = true }
[[route]]
method = "POST"
path = "/basic"
operation = "basic"
tenant = { basic_user = true }
[[route]]
method = "POST"
path = "/credential"
operation = "credential"
tenant = { credential = true }
"#;

#[tokio::test(flavor = "multi_thread")]
async fn every_source_of_tenants_keeps_two_of_them_apart() {
    let rig = Rig::start(Which::Sqlite, SOURCES).await;
    let ask = |target: &str| post(target, "{}");
    // Fixed: one for all, whatever a caller says.
    let first = ask("/fixed").key("shared").tenant("acme").to(rig.gateway.addr).await;
    assert_eq!(first.status, StatusCode::CREATED);
    assert!(ask("/fixed").key("shared").tenant("globex").to(rig.gateway.addr).await.replayed());
    // Path: the parameter, decoded once.
    apart(&rig, ask("/accounts/a/orders"), ask("/accounts/b/orders")).await;
    apart(&rig, ask("/accounts/c%2525/orders"), ask("/accounts/c%25/orders")).await;
    for target in ["/accounts/%0a/orders", "/accounts/a%00/orders", "/accounts/%ff/orders"] {
        no_tenant(&rig, ask(target), "the path").await;
    }
    // Basic: the user, not the password.
    let basic = |user: &str, password: &str| {
        use base64::Engine as _;
        let pair = base64::engine::general_purpose::STANDARD.encode(format!("{user}:{password}"));
        ask("/basic").header("authorization", format!("Basic {pair}"))
    };
    apart(&rig, basic("ann", "x"), basic("bob", "x")).await;
    assert!(basic("ann", "new").key("shared").to(rig.gateway.addr).await.replayed());
    for bad in ["Bearer x", "Basic", "Basic !!!", "Basic OnB3", "Basic YW5u"] {
        no_tenant(&rig, ask("/basic").header("authorization", bad), "`authorization`").await;
    }
    no_tenant(&rig, ask("/basic"), "`authorization`").await;
    // Credential: a digest of all of it.
    let bearer =
        |token: &str| ask("/credential").header("authorization", format!("Bearer {token}"));
    apart(&rig, bearer("SECRET-one"), bearer("SECRET-two")).await;
    no_tenant(&rig, ask("/credential"), "`authorization`").await;
    no_tenant(&rig, bearer("a").header("authorization", "Bearer b"), "`authorization`").await;
    let tenants = rig.place.rows("select tenant_id, operation from idempotency_records").await;
    assert!(!format!("{tenants:?}").contains("SECRET"), "{tenants:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_is_a_tenant_in_every_spelling_of_it() {
    let rig = Rig::start(Which::Sqlite, SOURCES).await;
    let sent = async |target: &str, host: &str| {
        let request = format!(
            "POST {target} HTTP/1.1\r\nHost: {host}\r\nIdempotency-Key: k\r\nContent-Length: 2\r\n\r\n{{}}"
        );
        Raw::sending(rig.gateway.addr, request).await.answer().await
    };
    let replayed = |answer: &str| answer.to_ascii_lowercase().contains("idempotent-replayed: true");
    for (count, host) in ["one.example", "two.example"].into_iter().enumerate() {
        let answer = sent("/host", host).await;
        assert_eq!(status(&answer), 201, "{answer}");
        assert!(!replayed(&answer));
        assert_eq!(rig.orders.runs(), count + 1);
    }
    for host in ["ONE.example", "one.example:8080", "one.example.", "one.example.:80"] {
        let answer = sent("/host", host).await;
        assert!(replayed(&answer), "{host}: {answer}");
    }
    // The target's host is the one that counts, and the one that goes on.
    let absolute = sent("http://two.example/host", "one.example").await;
    assert!(replayed(&absolute), "{absolute}");
    assert!(body(&absolute).contains("order-2"), "two's, not one's: {absolute}");
    assert_eq!(rig.orders.runs(), 2);
}

async fn derived_keys_stand_in_where_none_is_sent(which: Which) {
    let more = r#"
[[route]]
method = "POST"
path = "/derived"
operation = "derived"
derive_key = ["$.order_ref", "header:X-Request-Ref"]
[[route]]
method = "POST"
path = "/derived-soft"
operation = "derived.soft"
require_key = false
derive_key = ["$.order_ref"]
"#;
    let rig = Rig::start(which, more).await;
    let ask = |body: &str, reference: &str| {
        post("/derived", body).tenant("acme").header("x-request-ref", reference)
    };
    let addr = rig.gateway.addr;
    let first = ask(r#"{"order_ref":"o-1","n":1}"#, "r").to(addr).await;
    assert_eq!(first.status, StatusCode::CREATED);
    let again = ask(r#"{"n":1.0,"order_ref":"o-1"}"#, "r").to(addr).await;
    assert!(again.replayed());
    assert_eq!(again.body, first.body);
    let other = ask(r#"{"order_ref":"o-1","n":2}"#, "r").to(addr).await;
    assert_eq!(other.problem(), "request-mismatch");
    assert_eq!(rig.orders.runs(), 1);
    // Either part makes another key; parts do not run together, nor do types.
    for (count, (body, reference)) in [
        (r#"{"order_ref":"o-2","n":1}"#, "r"),
        (r#"{"order_ref":"o-1","n":1}"#, "s"),
        (r#"{"order_ref":"o-1\",\"r","n":1}"#, "r"),
        (r#"{"order_ref":1}"#, "r"),
        (r#"{"order_ref":"1"}"#, "r"),
    ]
    .into_iter()
    .enumerate()
    {
        let answer = ask(body, reference).to(addr).await;
        assert_eq!(answer.status, StatusCode::CREATED, "{body}");
        assert!(!answer.replayed(), "{body}");
        assert_eq!(rig.orders.runs(), count + 2);
    }
    let long = format!(r#"{{"order_ref":"{}"}}"#, "x".repeat(4000));
    assert!(!ask(&long, "r").to(addr).await.replayed());
    assert!(ask(&long, "r").to(addr).await.replayed(), "a long one is a digest");
    let sql = "select count(*) from idempotency_records where key like 'derived:%'";
    assert_eq!(rig.place.count(sql).await, 7);
    // A part that is absent: no key.
    let runs = rig.orders.runs();
    for body in ["{}", r#"{"order_ref":null}"#, r#"{"order_ref":[1]}"#, r#"{"order_ref":""}"#, "no"]
    {
        let answer = ask(body, "r").to(addr).await;
        assert_eq!(answer.problem(), "key-missing", "{body}");
    }
    let answer = post("/derived", r#"{"order_ref":"o-1"}"#).tenant("acme").to(addr).await;
    assert_eq!(answer.problem(), "key-missing");
    // A sent key wins, and cannot be made to equal a derived one.
    let key =
        rig.place.rows("select key from idempotency_records where key like 'derived:%'").await;
    let key = key[0][0].clone().unwrap();
    let forged =
        ask(r#"{"order_ref":"o-1","n":1}"#, "r").key(&format!("\"{}\"", key.replace('"', "\\\"")));
    assert_eq!(forged.to(addr).await.problem(), "key-invalid");
    assert_eq!(rig.orders.runs(), runs);
    let sent = ask(r#"{"order_ref":"o-1","n":1}"#, "r").key("own").to(addr).await;
    assert!(!sent.replayed());
    assert_eq!(rig.orders.runs(), runs + 1);
    // Where no key is needed, what yields none passes through, whole.
    let soft = |body: &str| post("/derived-soft", body).tenant("acme");
    for _ in 0..2 {
        let answer = soft(r#"{"other":1}"#).to(addr).await;
        assert!(!answer.replayed() && answer.header("oncegate-record").is_none());
        assert_eq!(rig.orders.ledger().pop().unwrap().body, r#"{"other":1}"#);
    }
    assert!(!soft(r#"{"order_ref":1}"#).to(addr).await.replayed());
    assert!(soft(r#"{"order_ref":1.0}"#).to(addr).await.replayed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_can_be_derived_from_path_and_query() {
    let more = r#"
[[route]]
method = "PUT"
path = "/accounts/{account}/orders/{order}"
operation = "put"
derive_key = ["path:account", "path:order", "query:version"]
fingerprint = { ignore_query = ["trace"] }
"#;
    let rig = Rig::start(Which::Sqlite, more).await;
    let put = |target: &str| post(target, "{}").method(http::Method::PUT).tenant("acme");
    let addr = rig.gateway.addr;
    let first = put("/accounts/a%2Fb/orders/1?version=3&trace=x").to(addr).await;
    assert_eq!(first.status, StatusCode::CREATED);
    let again = put("/accounts/a%2Fb/orders/1?trace=y&version=%33").to(addr).await;
    assert!(again.replayed(), "decoded, and in whatever order: {again:?}");
    for other in ["/accounts/a/orders/1?version=3", "/accounts/a%2Fb/orders/1?version=4"] {
        assert!(!put(other).to(addr).await.replayed(), "{other}");
    }
    let keys = rig.place.rows("select key from idempotency_records order by created_at").await;
    assert_eq!(keys[0][0].as_deref(), Some(r#"derived:["a/b","1","3"]"#));
    // Absent, empty, or there twice: no key.
    for none in ["", "?version=", "?version=3&version=3", "?Version=3", "?version"] {
        let answer = put(&format!("/accounts/a/orders/1{none}")).to(addr).await;
        assert_eq!(answer.problem(), "key-missing", "{none}");
    }
    assert_eq!(rig.orders.runs(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_connection_names_is_gone_before_the_scope_is_read() {
    let rig = Rig::start(Which::Sqlite, "").await;
    for (lines, problem) in [
        ("Connection: X-Tenant-Id\r\n", "tenant-missing"),
        ("Connection: Idempotency-Key\r\n", "key-missing"),
        ("Connection: close, idempotency-key , X-TENANT-ID\r\n", "key-missing"),
        ("Connection: close\r\nConnection: x-tenant-id\r\n", "tenant-missing"),
    ] {
        let request = format!(
            "POST /orders HTTP/1.1\r\nHost: a\r\nX-Tenant-Id: acme\r\nIdempotency-Key: k\r\n{lines}Content-Length: 2\r\n\r\n{{}}"
        );
        let answer = Raw::sending(rig.gateway.addr, request).await.answer().await;
        assert_eq!(status(&answer), 400, "{lines:?}: {answer}");
        assert!(body(&answer).contains(problem), "{lines:?}: {answer}");
        assert_eq!((rig.orders.runs(), rig.place.records().await), (0, 0), "{lines:?}");
    }
}
