//! Who may read a stored answer within a scope (D12), and everything that an answer shows by the way.

use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use http::{Response, StatusCode};
use http_body_util::Full;

use crate::support::client::{Answer, Ask, post};
use crate::support::fleet::sending;
use crate::support::orders::Orders;
use crate::support::process::{self, Gateway, eventually};
use crate::support::rig::{Place, Rig, Which, config_at, on_both_stores};
use crate::support::secure::Secured;
use crate::support::upstream::{Reply, Seen, Upstream};

const SAME: &str = "replay_auth = \"same-credential\"";

fn settings(place: &Place, upstream: &str, policy: &str, more: &str) -> String {
    let folder: &Path = place.folder.path();
    std::fs::write(folder.join("digest.key"), [7; 32]).unwrap();
    let toml = config_at(place, upstream, "127.0.0.1:0", "", policy, more);
    toml.replace("[admin]", "digest_key_file = \"digest.key\"\n[admin]")
}

/// As `Rig::with`, with a key for digests, which all replicas share.
pub(crate) async fn guarded(which: Which, policy: &str, more: &str) -> Rig {
    let (orders, place) = (Orders::start().await, Place::new(which).await);
    let toml = settings(&place, &orders.url(), policy, more);
    let gateway = Gateway::start(&process::config(place.folder.path(), &toml));
    Rig { orders, place, gateway }
}

fn order(key: &str) -> Ask {
    post("/orders", r#"{"a":1}"#).tenant("acme").key(key)
}

fn by(key: &str, credential: &str) -> Ask {
    order(key).header("authorization", credential)
}

const ALICE: &str = "Bearer SECRET-of-alice";
const BOB: &str = "Bearer SECRET-of-bob";

fn forbidden(answer: &Answer) {
    assert_eq!(
        (answer.status, answer.problem()),
        (StatusCode::FORBIDDEN, "replay-forbidden".into())
    );
    assert!(!answer.replayed());
    assert!(answer.header("oncegate-expires").is_none());
    assert!(!String::from_utf8_lossy(&answer.body).contains("order-"), "nothing of the answer");
}

on_both_stores! {
    another_credential_gets_nothing_of_what_is_stored,
    of_an_answer_that_is_not_kept_each_credential_gets_its_own,
    who_waits_with_another_credential_does_not_get_the_answer,
    an_unknown_outcome_stays_with_the_credential_that_made_it,
    d12_a_replay_is_given_to_whom_the_api_lets_at_that_time,
}

async fn another_credential_gets_nothing_of_what_is_stored(which: Which) {
    let more = "[[route]]\nmethod = \"POST\"\npath = \"/large\"\noperation = \"large\"\nmax_response_body = 4\n";
    let rig = guarded(which, SAME, more).await;
    let first = by("k", ALICE).to(rig.gateway.addr).await;
    assert_eq!(first.status, StatusCode::CREATED);
    let large = by("k", ALICE);
    let large = |credential: &str| large.clone().set("authorization", credential).target("/large");
    assert_eq!(large(ALICE).to(rig.gateway.addr).await.status, StatusCode::CREATED);
    let check = async |gateway: &Gateway| {
        let addr = gateway.addr;
        for stranger in [by("k", BOB), order("k"), by("k", "bearer SECRET-of-alice")] {
            forbidden(&stranger.to(addr).await);
            // Nor does it learn whether it has guessed the request.
            forbidden(&stranger.body(r#"{"a":2}"#).to(addr).await);
        }
        forbidden(&large(BOB).to(addr).await);
        let again = by("k", ALICE).to(addr).await;
        assert!(again.replayed());
        assert_eq!(again.body, first.body);
        assert_eq!(by("k", ALICE).body(r#"{"a":2}"#).to(addr).await.problem(), "request-mismatch");
        assert_eq!(large(ALICE).to(addr).await.problem(), "response-not-retained");
        // Which of two credentials counts nobody knows.
        let two = by("k", ALICE).header("authorization", BOB).to(addr).await;
        assert_eq!(
            (two.status, two.problem()),
            (StatusCode::BAD_REQUEST, "request-refused".into())
        );
    };
    // From memory, from the store, and from another replica.
    check(&rig.gateway).await;
    rig.gateway.terminate();
    let Rig { orders, place, mut gateway } = rig;
    gateway.exited();
    let again = gateway.restart();
    check(&again).await;
    if which == Which::Postgres {
        let toml = settings(&place, &orders.url(), SAME, more);
        check(&Gateway::start(&process::config(place.folder.path(), &toml))).await;
    }
    assert_eq!(orders.runs(), 2);
    // No credential at all is one of its own.
    assert_eq!(order("none").to(again.addr).await.status, StatusCode::CREATED);
    assert!(order("none").to(again.addr).await.replayed());
    forbidden(&by("none", ALICE).to(again.addr).await);
    let rows = place.rows("select * from idempotency_records").await;
    assert!(!format!("{rows:?}").contains("SECRET"), "{rows:?}");
    assert!(!again.log().contains("SECRET"));
}

async fn of_an_answer_that_is_not_kept_each_credential_gets_its_own(which: Which) {
    let rig = guarded(which, SAME, "").await;
    each_gets_its_own(&rig).await;
    let asked = guarded(which, "replay_auth = { subrequest = \"/auth\" }", "").await;
    each_gets_its_own(&asked).await;
}

async fn each_gets_its_own(rig: &Rig) {
    let addr = rig.gateway.addr;
    // The API says no to Alice, each time, and tells her why.
    rig.orders.answer(|execution| {
        let who = execution.headers["authorization"].to_str().unwrap_or_default().to_owned();
        let status = if who == ALICE { 401 } else { 503 };
        let body = Full::new(Bytes::from(format!("to {who}")));
        let answer = Response::builder().status(status).header("retry-after", "1");
        answer.body(body).unwrap()
    });
    rig.orders.hold();
    let alice = sending(by("k", ALICE), addr);
    rig.orders.asked(1).await;
    let waiting: Vec<_> =
        [ALICE, BOB, ALICE].map(|who| sending(by("k", who), addr)).into_iter().collect();
    waits(rig, 3).await;
    rig.orders.go();
    assert_eq!(alice.await.unwrap().status, StatusCode::UNAUTHORIZED);
    for (waiter, who) in waiting.into_iter().zip([ALICE, BOB, ALICE]) {
        let answer = waiter.await.unwrap();
        let status = if who == ALICE { 401 } else { 503 };
        assert_eq!(answer.status.as_u16(), status, "{answer:?}");
        assert_eq!(answer.body, format!("to {who}"));
    }
    assert_eq!(rig.orders.runs(), 2, "once for each");
    assert_eq!(rig.place.records().await, 0);
}

/// Waits until so many duplicates wait.
async fn waits(rig: &Rig, count: i64) {
    let admin = rig.gateway.admin;
    eventually("they wait", || async {
        crate::support::fleet::metric(admin, "oncegate_waiting").await == count
    })
    .await;
}

async fn who_waits_with_another_credential_does_not_get_the_answer(which: Which) {
    let rig = guarded(which, SAME, "").await;
    let addr = rig.gateway.addr;
    rig.orders.hold();
    let alice = sending(by("k", ALICE), addr);
    rig.orders.asked(1).await;
    // At once for the one who is known; the other is not told that it is another request.
    let mismatch = by("k", ALICE).body(r#"{"a":2}"#).to(addr).await;
    assert_eq!(mismatch.problem(), "request-mismatch");
    let bob = sending(by("k", BOB), addr);
    let guess = sending(by("k", BOB).body(r#"{"a":2}"#), addr);
    let also = sending(by("k", ALICE), addr);
    waits(&rig, 3).await;
    rig.orders.go();
    let first = alice.await.unwrap();
    assert_eq!(first.status, StatusCode::CREATED);
    assert_eq!(also.await.unwrap().body, first.body);
    forbidden(&bob.await.unwrap());
    forbidden(&guess.await.unwrap());
    assert_eq!(rig.orders.runs(), 1);
    if which == Which::Postgres {
        // The same behind another replica, which looks at the record.
        let toml = settings(&rig.place, &rig.orders.url(), SAME, "");
        let other = Gateway::start(&process::config(rig.place.folder.path(), &toml));
        rig.orders.hold();
        let alice = sending(by("far", ALICE), addr);
        rig.orders.asked(2).await;
        let guess = sending(by("far", BOB).body(r#"{"a":2}"#), other.addr);
        let near = sending(by("far", ALICE), other.addr);
        eventually("it waits", || async {
            crate::support::fleet::metric(other.admin, "oncegate_waiting").await == 1
        })
        .await;
        rig.orders.go();
        let first = alice.await.unwrap();
        forbidden(&guess.await.unwrap());
        assert_eq!(near.await.unwrap().body, first.body);
    }
}

async fn an_unknown_outcome_stays_with_the_credential_that_made_it(which: Which) {
    let policy = format!("{SAME}\non_unknown = \"retry\"");
    let rig = guarded(which, &policy, "").await;
    let addr = rig.gateway.addr;
    rig.orders.answer_status(502);
    assert_eq!(by("k", ALICE).to(addr).await.status, StatusCode::BAD_GATEWAY);
    assert_eq!(rig.place.status_of("k").await.as_deref(), Some("unknown"));
    rig.orders.answer_created();
    forbidden(&by("k", BOB).to(addr).await);
    forbidden(&by("k", BOB).body(r#"{"a":2}"#).to(addr).await);
    assert_eq!(rig.orders.runs(), 1, "and does not start the next attempt");
    assert_eq!(by("k", ALICE).to(addr).await.status, StatusCode::CREATED);
    forbidden(&by("k", BOB).to(addr).await);
    assert_eq!(rig.orders.runs(), 2);
}

/// Says who may read, by the credential.
async fn judge() -> Upstream {
    let said = |seen: &Seen| -> Reply {
        let who = crate::support::raw::header(&seen.head, "authorization").unwrap_or_default();
        match who.as_str() {
            ALICE => Reply::keep("HTTP/1.1 204 No Content\r\n\r\n"),
            "" => Reply::keep(
                "HTTP/1.1 401 No\r\nWWW-Authenticate: Basic realm=\"a\"\r\nWWW-Authenticate: Bearer\r\nContent-Length: 6\r\n\r\nSECRET",
            ),
            BOB => Reply::keep("HTTP/1.1 403 No\r\nContent-Length: 6\r\n\r\nSECRET"),
            "moved" => Reply::keep("HTTP/1.1 302 Go\r\nLocation: /\r\nContent-Length: 0\r\n\r\n"),
            "cut" => Reply::fin("HTTP/1.1 2"),
            "gone" => Reply::reset(""),
            "slow" => Reply::keep("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                .after(Duration::from_secs(5)),
            _ => Reply::keep("HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n"),
        }
    };
    Upstream::start(move |_, seen| said(seen)).await
}

fn unchecked(answer: &Answer) {
    let expected = (StatusCode::SERVICE_UNAVAILABLE, "replay-unchecked".into());
    assert_eq!((answer.status, answer.problem()), expected);
    assert!(answer.header("retry-after").is_some());
    assert!(!answer.replayed());
}

async fn d12_a_replay_is_given_to_whom_the_api_lets_at_that_time(which: Which) {
    let judge = judge().await;
    let policy = format!(
        "replay_auth = {{ subrequest = \"http://{}/may?x=1\", timeout = \"500ms\" }}",
        judge.addr
    );
    let rig = guarded(which, &policy, "").await;
    let addr = rig.gateway.addr;
    // A first execution is the API's own business.
    let first = by("k", BOB).to(addr).await;
    assert_eq!(first.status, StatusCode::CREATED);
    assert_eq!(judge.seen().len(), 0);
    let ask = by("k", ALICE)
        .header("cookie", "session=1")
        .header("x-original-uri", "/forged")
        .header("x_original_method", "GET")
        .header("content-digest", "sha-256=:AAAA:")
        .header("digest", "SHA-256=AAAA")
        .header("x-forwarded-uri", "/forged")
        .header("x_original_url", "/forged")
        .header("x-rewrite-url", "/forged")
        .header("x-forwarded-method", "GET")
        .header("x-http-method-override", "DELETE")
        .header("if-none-match", "*");
    let replay = ask.to(addr).await;
    assert!(replay.replayed());
    assert_eq!(replay.body, first.body);
    let asked = judge.seen();
    assert_eq!(asked.len(), 1);
    let head = asked[0].head.to_ascii_lowercase();
    assert!(head.starts_with("get /may?x=1 http/1.1\r\n"), "{head}");
    for line in [
        "x-original-method: post",
        "x-original-uri: /orders",
        "cookie: session=1",
        "x-tenant-id: acme",
        &format!("host: {}", judge.addr),
    ] {
        assert_eq!(head.matches(&format!("\r\n{line}")).count(), 1, "{line}: {head}");
    }
    for name in [
        "content-",
        "digest",
        "transfer-",
        "x_original",
        "if-none-match",
        "forged",
        "expect",
        "x-forwarded-method",
        "x-http-method",
    ] {
        assert!(
            !head.contains(&format!("\r\n{name}")) && !head.contains("forged"),
            "{name}: {head}"
        );
    }
    assert!(asked[0].body.is_empty());
    // No is no, with the challenge where there is one.
    forbidden(&by("k", BOB).to(addr).await);
    let nobody = order("k").to(addr).await;
    let expected = (StatusCode::UNAUTHORIZED, "replay-unauthorized".to_owned());
    assert_eq!((nobody.status, nobody.problem()), expected);
    let challenges: Vec<_> = nobody.headers.get_all("www-authenticate").iter().collect();
    assert_eq!(challenges, ["Basic realm=\"a\"", "Bearer"]);
    assert!(!String::from_utf8_lossy(&nobody.body).contains("SECRET"));
    // And what is neither yes nor no is not yes.
    for other in ["moved", "cut", "gone", "slow", "broken"] {
        unchecked(&by("k", other).to(addr).await);
    }
    // Who waits is asked about as well, when there is something to read.
    rig.orders.hold();
    let leader = sending(by("w", BOB), addr);
    rig.orders.asked(2).await;
    let (alice, bob) = (sending(by("w", ALICE), addr), sending(by("w", BOB), addr));
    waits(&rig, 2).await;
    rig.orders.go();
    let led = leader.await.unwrap();
    assert_eq!(led.status, StatusCode::CREATED);
    assert_eq!(alice.await.unwrap().body, led.body);
    forbidden(&bob.await.unwrap());
    // Another request is another request, and nobody is asked.
    let before = judge.seen().len();
    assert_eq!(by("k", BOB).body("{}").to(addr).await.problem(), "request-mismatch");
    let two = by("k", ALICE).header("authorization", BOB).to(addr).await;
    assert_eq!((two.status, two.problem()), (StatusCode::BAD_REQUEST, "request-refused".into()));
    assert_eq!(judge.seen().len(), before);
    assert_eq!(rig.orders.runs(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_api_itself_can_be_asked_who_may_read() {
    let more = "[[route]]\nmethod = \"POST\"\npath = \"/free\"\noperation = \"free\"\nreplay_auth = \"none\"\n";
    let rig = guarded(Which::Sqlite, "replay_auth = { subrequest = \"/auth\" }", more).await;
    let addr = rig.gateway.addr;
    rig.orders.answer(|execution| {
        let status = if execution.target == "/auth" { 403 } else { 201 };
        Response::builder().status(status).body(Full::new("done".into())).unwrap()
    });
    assert_eq!(by("k", ALICE).to(addr).await.status, StatusCode::CREATED);
    assert_eq!(rig.orders.runs(), 1);
    forbidden(&by("k", ALICE).to(addr).await);
    let asked = rig.orders.ledger().pop().unwrap();
    assert_eq!((asked.target.as_str(), asked.body.len()), ("/auth", 0));
    // A route decides for itself.
    let free = by("k", ALICE).target("/free");
    assert_eq!(free.to(addr).await.status, StatusCode::CREATED);
    assert!(free.set("authorization", BOB).to(addr).await.replayed());
    // The API is gone: nobody says yes.
    rig.orders.answer(|_| Response::builder().status(500).body(Full::default()).unwrap());
    unchecked(&by("k", ALICE).to(addr).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_look_up_finds_of_anothers_attempt_is_asked_for_too() {
    let policy = r#"
replay_auth = { subrequest = "/auth" }
on_unknown = "lookup"
timeout = "1s"
late_answer = "0s"
lookup = { path = "/found/{{ key }}/{{ tenant }}", found = "true", settle = "0s" }"#;
    let rig = guarded(Which::Sqlite, policy, "").await;
    let addr = rig.gateway.addr;
    rig.orders.answer(|execution| {
        let who = execution.headers.get("authorization").and_then(|who| who.to_str().ok());
        let (status, body) = match execution.target.as_str() {
            "/orders" => (502, ""),
            "/auth" if who == Some(ALICE) => (200, ""),
            "/auth" => (403, ""),
            _ => (200, r#"{"id":"order-7"}"#),
        };
        Response::builder().status(status).body(Full::new(body.into())).unwrap()
    });
    assert_eq!(by("k", ALICE).to(addr).await.status, StatusCode::BAD_GATEWAY);
    // Whether the retry asks, or the gateway did by itself: nothing is given without a yes.
    eventually("it is asked for", || async {
        let answer = by("k", BOB).to(addr).await;
        assert!(!String::from_utf8_lossy(&answer.body).contains("order-7"), "{answer:?}");
        answer.status == StatusCode::FORBIDDEN
    })
    .await;
    let alice = by("k", ALICE).to(addr).await;
    assert!(
        alice.replayed() && String::from_utf8_lossy(&alice.body).contains("order-7"),
        "{alice:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn over_https_only_whom_the_file_vouches_for_says_who_may_read() {
    let judge = judge().await;
    let (good, other) = (Secured::before(judge.addr).await, Secured::before(judge.addr).await);
    let route = |name: &str, ca_file: String| {
        let asked = format!("subrequest = \"{}\"", good.url("/may"));
        format!(
            "[[route]]\nmethod = \"POST\"\npath = \"/{name}\"\noperation = \"{name}\"\nreplay_auth = {{ {asked}, {ca_file} timeout = \"10s\" }}\n"
        )
    };
    let more = [
        route("good", format!("{},", good.ca_file())),
        route("other", format!("{},", other.ca_file())),
        route("none", String::new()),
    ];
    let rig = guarded(Which::Sqlite, "", &more.concat()).await;
    let ask = |path: &str, who: &str| by("k", who).target(path);
    for path in ["/good", "/other", "/none"] {
        assert_eq!(ask(path, ALICE).to(rig.gateway.addr).await.status, StatusCode::CREATED);
    }
    assert!(ask("/good", ALICE).to(rig.gateway.addr).await.replayed());
    forbidden(&ask("/good", BOB).to(rig.gateway.addr).await);
    assert_eq!(judge.seen().len(), 2);
    for path in ["/other", "/none"] {
        unchecked(&ask(path, ALICE).to(rig.gateway.addr).await);
    }
    assert_eq!(judge.seen().len(), 2, "what nobody vouches for is not asked");
    assert_eq!(rig.orders.runs(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn whose_attempt_was_overtaken_gets_anothers_answer_only_as_the_same_caller() {
    let policy = "replay_auth = { subrequest = \"/auth\" }\non_unknown = \"retry\"";
    let rig = guarded(Which::Postgres, policy, "").await;
    let toml = settings(&rig.place, &rig.orders.url(), policy, "");
    let other = Gateway::start(&process::config(rig.place.folder.path(), &toml));
    let mut runs = 0;
    for (key, overtaker) in [("stranger", BOB), ("same", ALICE)] {
        rig.orders.hold_only(runs + 1);
        let alice = sending(by(key, ALICE), rig.gateway.addr);
        rig.orders.asked(runs + 1).await;
        // As if the replica had slept: its attempt is given up, and another replica executes the next one.
        let sql = format!(
            "update idempotency_records set status = 'unknown' where key = '{key}' returning id"
        );
        assert_eq!(rig.place.rows(&sql).await.len(), 1);
        let overtaking = by(key, overtaker).to(other.addr).await;
        assert_eq!(overtaking.status, StatusCode::CREATED, "{overtaking:?}");
        rig.orders.go();
        let answer = alice.await.unwrap();
        if overtaker == ALICE {
            assert!(answer.replayed(), "{answer:?}");
            assert_eq!(answer.body, overtaking.body);
        } else {
            unchecked(&answer);
            assert!(!String::from_utf8_lossy(&answer.body).contains("order-"));
        }
        runs += 2;
        assert_eq!(rig.orders.runs(), runs, "and nobody was asked: the request is used up");
    }
}
