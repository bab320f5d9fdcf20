//! `outbox.unknown_events`: sinks are told when the outcome of a record is in doubt, and when it no longer is.

use http::StatusCode;
use serde_json::Value;

use crate::support::fleet::{self, command, metric, order};
use crate::support::process::eventually;
use crate::support::rig::{Rig, Which, on_both_stores};
use crate::support::sink::{OK, Sink};

on_both_stores! {
    sinks_are_told_when_an_outcome_is_in_doubt_and_when_it_no_longer_is,
    an_operators_word_ends_a_doubt,
    nothing_is_told_unless_it_is_asked_for,
}

const STORE: &str = "sweep_every = \"200ms\"";
const POLICY: &str = "timeout = \"500ms\"";

async fn rig(which: Which, sink: &Sink, outbox: &str) -> Rig {
    let more = format!("{}\n[outbox]\n{outbox}", fleet::sink(sink.port));
    Rig::with(which, STORE, POLICY, &more).await
}

/// What the sink got of a type.
fn got(sink: &Sink, kind: &str) -> Vec<Value> {
    let message = |seen: &crate::support::sink::Seen| {
        serde_json::from_slice::<Value>(&seen.body).expect("JSON")
    };
    sink.seen().iter().map(message).filter(|message| message["type"] == kind).collect()
}

async fn told(sink: &Sink, kind: &str) -> Value {
    eventually(kind, async || !got(sink, kind).is_empty()).await;
    got(sink, kind).remove(0)
}

async fn sinks_are_told_when_an_outcome_is_in_doubt_and_when_it_no_longer_is(which: Which) {
    let sink = Sink::start(|_, _| OK).await;
    let rig = rig(which, &sink, "unknown_events = true").await;
    rig.orders.hold();
    let first = order("k").to(rig.gateway.addr).await;
    assert_eq!(first.status, StatusCode::GATEWAY_TIMEOUT);
    let began = told(&sink, "record.unknown").await;
    assert_eq!(began["data"]["record"], first.record());
    assert_eq!(began["data"]["attempt"], 1);
    assert!(began["data"]["since"].as_str().unwrap().ends_with('Z'));
    let whose = ["tenant", "operation", "idempotency_key"].map(|name| began[name].clone());
    assert_eq!(whose, ["acme", "orders.create", "k"]);
    assert_eq!(got(&sink, "record.resolved").len(), 0, "it is still in doubt");
    rig.orders.go();
    let ended = told(&sink, "record.resolved").await;
    assert_eq!(ended["data"]["record"], first.record());
    assert_eq!(ended["data"]["resolution"], "completed");
    told(&sink, "orders.create").await;
    let all = "select count(*) from outbox_events where status = 'sent'";
    eventually("all are delivered", async || rig.place.count(all).await == 3).await;
    assert_eq!(rig.place.events().await, 3, "each once");
    assert_eq!(rig.place.count("select count(*) from oncegate_unknown").await, 0);
}

async fn an_operators_word_ends_a_doubt(which: Which) {
    let sink = Sink::start(|_, _| OK).await;
    let rig = rig(which, &sink, "unknown_events = true").await;
    rig.orders.answer_status(502);
    let record = order("k").to(rig.gateway.addr).await.record();
    told(&sink, "record.unknown").await;
    let (code, _, errors) = command(&rig.gateway, &["records", "release", &record]);
    assert_eq!(code, 0, "{errors}");
    let ended = told(&sink, "record.resolved").await;
    assert_eq!(ended["data"]["resolution"], "released_by_operator");
    assert_eq!(ended["data"]["record"], record);
    assert_eq!(ended["idempotency_key"], "k");
    assert_eq!(rig.place.events().await, 2);
}

async fn nothing_is_told_unless_it_is_asked_for(which: Which) {
    let sink = Sink::start(|_, _| OK).await;
    let rig = rig(which, &sink, "").await;
    rig.orders.hold();
    order("k").to(rig.gateway.addr).await;
    let unknown = async || metric(rig.gateway.admin, "oncegate_unknown_records").await;
    eventually("a round has seen it", async || unknown().await == 1).await;
    rig.orders.go();
    // A whole round lies between the two.
    eventually("a later round has seen its end", async || unknown().await == 0).await;
    told(&sink, "orders.create").await;
    assert_eq!(rig.place.events().await, 1, "the order's own only");
}
