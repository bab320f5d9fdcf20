//! Encryption at rest: what stands in the database and in the spill tells nothing, and callers, sinks and operators notice
//! nothing of it.

use std::path::Path;

use http::{Response, StatusCode};
use http_body_util::Full;
use serde_json::json;

use crate::support::client::{Ask, get, post};
use crate::support::fault::Fault;
use crate::support::fleet::{self, command, metric, sending};
use crate::support::orders::Orders;
use crate::support::postgres::Cluster;
use crate::support::process::{self, Gateway, eventually};
use crate::support::rig::{self, Place, Rig, Which, on_both_stores};
use crate::support::sink::{OK, Sink};

on_both_stores! {
    what_is_stored_tells_nothing_and_is_replayed_and_delivered_as_it_was,
    what_events_need_of_a_request_in_progress_is_sealed,
    what_a_question_needs_of_a_request_is_sealed_and_asked_as_it_was,
    a_late_outcome_is_sealed_and_shown_to_operators_as_it_was,
    keys_are_rotated_and_what_has_no_key_is_never_replayed_or_executed,
    what_was_stored_before_is_still_replayed,
    f59_an_event_whose_key_is_missing_waits_unharmed_and_holds_up_no_other,
}

const OLD: &str = "old t6+PWSJLNKRNL9xASWhknGA1XmJhdCpWM8Jps3Oc5RM=";
const NEW: &str = "new nHfs1+zsolQKwtw3LCILVehB1Rttw3o218uzijnJDMI=";
/// Stands in requests, in answers and in events.
const SECRET: &str = "4929-0000-1111-2222";
const EVENT: &str = r#"
[[route.event]]
type = "order.paid"
payload = { card = "{{ request.json.card }}", receipt = "{{ response.json.receipt }}" }
"#;

fn keys(folder: &Path, lines: &[&str]) {
    std::fs::write(folder.join("store.keys"), lines.join("\n")).expect("the key file");
}

fn paying(key: &str) -> Ask {
    post("/orders", &json!({ "card": SECRET }).to_string()).tenant("acme").key(key)
}

/// From now on the API answers with the secret, in a header and in the body.
fn answer_secrets(orders: &Orders) {
    orders.answer(|_| {
        Response::builder()
            .status(201)
            .header("X-Receipt", SECRET)
            .body(Full::from(json!({ "receipt": SECRET }).to_string()))
            .expect("an answer")
    });
}

const SEALED: &str = "encryption_key_file = \"store.keys\"";

struct Paid {
    orders: Orders,
    place: Place,
    gateway: Gateway,
}

impl Paid {
    async fn start(which: Which, store: &str, policy: &str, more: &str) -> Self {
        let (orders, place) = (Orders::start().await, Place::new(which).await);
        answer_secrets(&orders);
        keys(place.folder.path(), &[OLD]);
        let toml = rig::config_at(
            &place,
            &orders.url(),
            "127.0.0.1:0",
            &format!("{SEALED}\n{store}"),
            policy,
            &format!("{EVENT}\n{more}"),
        );
        let config = process::config(place.folder.path(), &toml);
        let gateway = tokio::task::block_in_place(|| Gateway::start(&config));
        Self { orders, place, gateway }
    }

    fn restart_with(&mut self, lines: &[&str]) {
        keys(self.place.folder.path(), lines);
        self.gateway.kill9();
        self.gateway = tokio::task::block_in_place(|| self.gateway.restart());
    }
}

/// Whether the secret stands anywhere in the database, as text, as hexadecimal digits or as base64 of what holds it.
async fn is_told(place: &Place, secret: &str) -> bool {
    let hex: String = secret.bytes().map(|byte| format!("{byte:02x}")).collect();
    let tables = [
        "select request_context, response_headers, response_body from idempotency_records",
        "select payload from outbox_messages",
        "select detail from audit_log",
    ];
    for sql in tables {
        let rows = place.rows(sql).await;
        assert!(!rows.is_empty() || sql.contains("audit"), "{sql}");
        for cell in rows.into_iter().flatten().flatten() {
            let words = cell.split('"').filter_map(|word| {
                use base64::Engine as _;
                base64::engine::general_purpose::STANDARD.decode(word).ok()
            });
            let unpacked: Vec<String> =
                words.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).collect();
            let texts = unpacked.iter().chain([&cell]);
            for text in texts {
                if text.contains(secret) || text.to_lowercase().contains(&hex) {
                    return true;
                }
            }
        }
    }
    false
}

async fn what_is_stored_tells_nothing_and_is_replayed_and_delivered_as_it_was(which: Which) {
    let sink = Sink::start(|_, _| OK).await;
    let mut paid = Paid::start(which, "", "", &fleet::sink(sink.port)).await;
    let first = paying("k").to(paid.gateway.addr).await;
    assert_eq!(first.status, StatusCode::CREATED, "{first:?}");
    assert!(!is_told(&paid.place, SECRET).await);

    // From memory, and from the database.
    for round in 0..2 {
        let replay = paying("k").to(paid.gateway.addr).await;
        assert!(replay.replayed(), "round {round}: {replay:?}");
        assert_eq!((&replay.body, replay.header("x-receipt")), (&first.body, Some(SECRET)));
        assert_eq!(replay.header("oncegate-sealed"), None);
        paid.restart_with(&[OLD]);
    }
    eventually("the event is delivered", async || !sink.seen().is_empty()).await;
    let seen = sink.seen().remove(0);
    assert!(seen.verified);
    let data = serde_json::from_str::<serde_json::Value>(&seen.text()).unwrap()["data"].clone();
    assert_eq!(data, json!({ "card": SECRET, "receipt": SECRET }));

    // Operators see what they saw before.
    let record = first.record();
    let life = get(&format!("/api/v1/records/{record}")).to(paid.gateway.admin).await.json();
    assert!(life.to_string().contains(SECRET), "{life}");
    let (code, out, errors) = command(&paid.gateway, &["records", "show", &record, "--json"]);
    assert_eq!(code, 0, "{errors}");
    assert!(out.contains(SECRET), "{out}");
    let (code, out, errors) = command(&paid.gateway, &["check"]);
    assert_eq!(code, 0, "{errors}");
    assert!(out.contains("sealed with the key \"old\""), "{out}");
    assert_eq!(paid.orders.runs(), 1);
}

async fn what_events_need_of_a_request_in_progress_is_sealed(which: Which) {
    let paid = Paid::start(which, "", "", "").await;
    paid.orders.hold();
    let first = sending(paying("k"), paid.gateway.addr);
    paid.orders.asked(1).await;
    let context = paid.place.rows("select request_context from idempotency_records").await;
    let context = context[0][0].clone().expect("a context");
    assert!(!context.is_empty());
    let hex: String = SECRET.bytes().map(|byte| format!("{byte:02x}")).collect();
    assert!(!context.contains(SECRET) && !context.to_lowercase().contains(&hex), "{context}");
    paid.orders.go();
    assert_eq!(first.await.unwrap().status, StatusCode::CREATED);

    // Whoever completes it by hand has the events of it.
    paid.orders.answer_status(504);
    let unknown = paying("u").to(paid.gateway.addr).await;
    let id = unknown.record();
    let body = json!({ "receipt": SECRET }).to_string();
    let (code, _, errors) =
        command(&paid.gateway, &["records", "complete", &id, "--status", "201", "--body", &body]);
    assert_eq!(code, 0, "{errors}");
    let sql = format!("select count(*) from outbox_events where record_id = '{id}'");
    assert_eq!(paid.place.count(&sql).await, 1);
    let shown = get(&format!("/api/v1/records/{id}")).to(paid.gateway.admin).await.json();
    let event = shown["events"][0]["id"].as_str().expect("an event").to_owned();
    let event = get(&format!("/api/v1/events/{event}")).to(paid.gateway.admin).await.json();
    assert!(event.to_string().matches(SECRET).count() >= 2, "card and receipt: {event}");
    assert!(!is_told(&paid.place, SECRET).await);
}

async fn a_late_outcome_is_sealed_and_shown_to_operators_as_it_was(which: Which) {
    let policy = "timeout = \"1s\"\non_unknown = \"retry\"";
    let paid = Paid::start(which, "", policy, "").await;
    paid.orders.hold_only(1);
    let first = paying("k").to(paid.gateway.addr).await;
    assert_eq!(first.status, StatusCode::GATEWAY_TIMEOUT, "{first:?}");
    assert_eq!(paying("k").to(paid.gateway.addr).await.status, StatusCode::CREATED);
    paid.orders.go();
    let audited = "select count(*) from audit_log where action = 'late_outcome'";
    eventually("it is audited", async || paid.place.count(audited).await == 1).await;
    assert!(!is_told(&paid.place, SECRET).await);
    let record = first.record();
    let life = get(&format!("/api/v1/records/{record}")).to(paid.gateway.admin).await.json();
    let detail = life["audit"][0]["detail"].as_str().expect("a detail");
    let detail: serde_json::Value = serde_json::from_str(detail).unwrap();
    let receipt = json!({ "name": "x-receipt", "value": SECRET });
    assert!(detail["headers"].as_array().unwrap().contains(&receipt), "{detail}");
    for packed in [&detail["body_base64"], &detail["events"][0]["payload_base64"]] {
        use base64::Engine as _;
        let engine = base64::engine::general_purpose::STANDARD;
        let bytes = engine.decode(packed.as_str().expect("base64")).unwrap();
        assert!(String::from_utf8(bytes).unwrap().contains(SECRET), "{detail}");
    }
}

async fn keys_are_rotated_and_what_has_no_key_is_never_replayed_or_executed(which: Which) {
    let mut paid = Paid::start(which, "", "", "").await;
    let old = paying("old").to(paid.gateway.addr).await;
    paid.restart_with(&["# the new one seals", NEW, OLD]);
    let new = paying("new").to(paid.gateway.addr).await;
    assert_eq!(paying("old").to(paid.gateway.addr).await.body, old.body);
    paid.restart_with(&[NEW]);
    assert_eq!(paying("new").to(paid.gateway.addr).await.body, new.body);
    let lost = paying("old").to(paid.gateway.addr).await;
    assert_eq!(lost.status, StatusCode::SERVICE_UNAVAILABLE, "{lost:?}");
    assert!(!String::from_utf8_lossy(&lost.body).contains("old\\\""), "the key's name is ours");
    eventually("the log names the key", async || {
        paid.gateway.log().contains("sealed with the key \"old\"")
            || paid.gateway.log().contains("sealed with the key \\\"old\\\"")
    })
    .await;
    assert_eq!(paid.orders.runs(), 2, "and nothing is executed again");
    // Lists and pages go on.
    let list = get("/api/v1/records").to(paid.gateway.admin).await.json();
    assert_eq!(list["records"].as_array().map(Vec::len), Some(2), "{list}");
    let life = get(&format!("/api/v1/records/{}", old.record())).to(paid.gateway.admin).await;
    assert_eq!(life.status, StatusCode::OK);
    assert!(!String::from_utf8_lossy(&life.body).contains(SECRET));
    // The key is back.
    paid.restart_with(&[NEW, OLD]);
    assert_eq!(paying("old").to(paid.gateway.addr).await.body, old.body);
}

async fn what_was_stored_before_is_still_replayed(which: Which) {
    let mut rig = Rig::start(which, EVENT).await;
    answer_secrets(&rig.orders);
    let plain = paying("plain").to(rig.gateway.addr).await;
    let config = std::fs::read_to_string(&rig.gateway.config).unwrap();
    keys(rig.place.folder.path(), &[OLD]);
    let with_keys = config.replace("[store]", &format!("[store]\n{SEALED}"));
    std::fs::write(&rig.gateway.config, with_keys).unwrap();
    rig.gateway.kill9();
    rig.gateway = tokio::task::block_in_place(|| rig.gateway.restart());
    let replay = paying("plain").to(rig.gateway.addr).await;
    assert!(replay.replayed());
    assert_eq!((&replay.body, replay.header("x-receipt")), (&plain.body, Some(SECRET)));
    let sealed = paying("sealed").to(rig.gateway.addr).await;
    // And without the file again: what is sealed is known as that, and is nobody's answer.
    std::fs::write(&rig.gateway.config, config).unwrap();
    rig.gateway.kill9();
    rig.gateway = tokio::task::block_in_place(|| rig.gateway.restart());
    assert_eq!(paying("plain").to(rig.gateway.addr).await.body, plain.body);
    let lost = paying("sealed").to(rig.gateway.addr).await;
    assert_eq!(lost.status, StatusCode::SERVICE_UNAVAILABLE, "{sealed:?}, then {lost:?}");
    assert_eq!(rig.orders.runs(), 2);
}

async fn f59_an_event_whose_key_is_missing_waits_unharmed_and_holds_up_no_other(which: Which) {
    let sink = Sink::start(|_, _| OK).await;
    let mut paid = Paid::start(which, "", "", &fleet::sink(sink.port)).await;
    let ordered = |paid: &Paid, args: &[&str]| {
        let (code, _, errors) = tokio::task::block_in_place(|| command(&paid.gateway, args));
        assert_eq!(code, 0, "{errors}");
    };
    ordered(&paid, &["sinks", "pause", "main"]);
    let knows = async || {
        let text = get("/metrics").to(paid.gateway.admin).await.body;
        String::from_utf8_lossy(&text).contains(r#"sink_paused{sink="main",reason="operator"} 1"#)
    };
    eventually("its relay knows", knows).await;
    // More than there are slots.
    for n in 0..20 {
        paying(&format!("old-{n}")).to(paid.gateway.addr).await;
    }
    paid.restart_with(&[NEW]);
    ordered(&paid, &["sinks", "resume", "main"]);
    paying("new").to(paid.gateway.addr).await;
    eventually("the new one is delivered", async || sink.seen().len() == 1).await;
    let waiting = "select count(*) from outbox_events where status = 'pending' and attempts = 0
        and last_error like '%does not open here%old%'";
    eventually("the others say why", async || paid.place.count(waiting).await == 20).await;
    // However often it is looked at.
    let id = "select id from outbox_events where status = 'pending' order by id limit 1";
    let id = paid.place.rows(id).await[0][0].clone().unwrap();
    let claims = format!("select claim_no from outbox_queue where event_id = '{id}'");
    for _ in 0..6 {
        let before = paid.place.count(&claims).await;
        ordered(&paid, &["events", "redeliver", &id]);
        eventually("another look", async || paid.place.count(&claims).await > before).await;
        let back = format!(
            "select count(*) from outbox_queue where event_id = '{id}' and next_attempt_at > created_at and lease_until <= next_attempt_at"
        );
        eventually("it is back", async || paid.place.count(&back).await == 1).await;
    }
    assert_eq!(paid.place.count(waiting).await, 20);
    // The key is back.
    paid.restart_with(&[NEW, OLD]);
    ordered(&paid, &["events", "redeliver", &id]);
    eventually("it is delivered", async || sink.ids().contains(&id)).await;
    assert!(sink.seen().iter().all(|seen| seen.verified && seen.text().contains(SECRET)));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_spill_is_sealed_and_drained_as_it_was() {
    let (orders, place) = (Orders::start().await, Place::new(Which::Postgres).await);
    answer_secrets(&orders);
    keys(place.folder.path(), &[OLD]);
    let (fault, url) = Fault::before_postgres(&place.url, Cluster::shared().port()).await;
    let store = format!("{SEALED}\nlease = \"3s\"\nsweep_every = \"500ms\"");
    let toml = rig::config_at(&place, &orders.url(), "127.0.0.1:0", &store, "", EVENT);
    let config = process::config(place.folder.path(), &toml.replace(&place.url, &url));
    let mut gateway = tokio::task::block_in_place(|| Gateway::start(&config));
    orders.hold();
    let first = sending(paying("k"), gateway.addr);
    orders.asked(1).await;
    fault.refuse();
    fault.cut();
    orders.go();
    let first = first.await.unwrap();
    assert_eq!((first.status, first.header("oncegate-stored")), (StatusCode::CREATED, None));
    assert_eq!(metric(gateway.admin, "oncegate_spill_entries").await, 1);
    let mut bytes = Vec::new();
    for entry in std::fs::read_dir(place.folder.path().join("oncegate-spill")).unwrap() {
        bytes.extend(std::fs::read(entry.unwrap().path()).unwrap());
    }
    assert!(bytes.len() > 100);
    let holds = |text: &str| bytes.windows(text.len()).any(|window| window == text.as_bytes());
    assert!(holds("oncegate-sealed") && !holds(SECRET));

    gateway.kill9();
    fault.pass();
    let gateway = tokio::task::block_in_place(|| gateway.restart());
    let replay = paying("k").to(gateway.addr).await;
    assert!(replay.replayed(), "{replay:?}");
    assert_eq!((&replay.body, replay.header("x-receipt")), (&first.body, Some(SECRET)));
    assert!(!is_told(&place, SECRET).await);
    assert_eq!(orders.runs(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_key_file_keeps_the_gateway_from_starting() {
    let place = Place::new(Which::Sqlite).await;
    let toml = rig::config_at(&place, "http://127.0.0.1:1", "127.0.0.1:0", SEALED, "", "");
    let config = process::config(place.folder.path(), &toml);
    keys(place.folder.path(), &["k AAAA"]);
    let refused = tokio::task::block_in_place(|| Gateway::try_start(&config)).err();
    let refused = refused.expect("it does not start");
    for word in ["store.encryption_key_file", "line 1", "32 bytes"] {
        assert!(refused.contains(word), "{refused}");
    }
}

/// At the first attempt, and at the one that a question has led to.
async fn what_a_question_needs_of_a_request_is_sealed_and_asked_as_it_was(which: Which) {
    let (orders, place) = (Orders::start().await, Place::new(which).await);
    keys(place.folder.path(), &[OLD]);
    let policy = r#"on_unknown = "lookup"
lookup = { path = "/by/{{ request.json.card }}", found = "response.json.total > 0", settle = "0s" }"#;
    let toml = rig::config_at(&place, &orders.url(), "127.0.0.1:0", SEALED, policy, "");
    let gateway = Gateway::start(&process::config(place.folder.path(), &toml));
    orders.answer(|execution| match execution.key() {
        Some(_) => Response::builder().status(502).body(Full::default()).expect("an answer"),
        None => Response::new(Full::new(r#"{"total":0}"#.into())),
    });
    let hex = if which == Which::Sqlite {
        "hex(request_context)"
    } else {
        "encode(request_context, 'hex')"
    };
    let plain = format!("select count(*) from idempotency_records where {hex} like '%343932392d%'");
    for attempt in 1..=3 {
        eventually("it is executed", async || {
            paying("k").to(gateway.addr).await.status == StatusCode::BAD_GATEWAY
        })
        .await;
        assert_eq!(orders.runs_of("k"), attempt);
        assert_eq!(place.count(&plain).await, 0, "attempt {attempt}");
    }
    let ledger = orders.ledger();
    let asked: Vec<_> = ledger.iter().filter(|asked| asked.key().is_none()).collect();
    assert!(asked.len() >= 2);
    assert!(asked.iter().all(|asked| asked.target == format!("/by/{SECRET}")), "{asked:?}");
}
