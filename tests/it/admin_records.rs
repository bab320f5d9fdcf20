//! Records over the admin listener: released and completed as by the commands, on both stores.

use serde_json::{Value, json};

use crate::support::client::{Answer, get, post};
use crate::support::process::{self, eventually};
use crate::support::rig::{Rig, Which, on_both_stores};

on_both_stores! {
    a_record_is_completed_over_the_admin_listener_and_its_answer_is_replayed,
    a_release_over_the_admin_listener_frees_the_key_and_is_told_after_the_record_is_gone,
    a_record_that_a_live_process_works_on_is_left_alone_by_all_who_ask,
    an_answer_that_no_caller_may_get_is_refused_by_name,
}

const EVENT: &str =
    "[[route.event]]\ntype = \"order.created\"\npayload = { id = \"{{ response.json.id }}\" }";

/// A record whose outcome is unknown.
async fn unknown(rig: &Rig, key: &str) -> String {
    rig.orders.answer_status(502);
    let answer = post("/orders", "{}").tenant("acme").key(key).to(rig.gateway.addr).await;
    rig.orders.answer_created();
    assert_eq!(rig.place.status_of(key).await.as_deref(), Some("unknown"));
    answer.record()
}

async fn act(rig: &Rig, id: &str, what: &str, body: &Value) -> Answer {
    let path = format!("/api/v1/records/{id}/{what}");
    post(&path, &body.to_string()).to(rig.gateway.admin).await
}

async fn shown(rig: &Rig, id: &str) -> Value {
    get(&format!("/api/v1/records/{id}")).to(rig.gateway.admin).await.json()
}

async fn audits(rig: &Rig) -> i64 {
    rig.place.count("select count(*) from audit_log").await
}

async fn a_record_is_completed_over_the_admin_listener_and_its_answer_is_replayed(which: Which) {
    let rig = Rig::start(which, EVENT).await;
    let id = unknown(&rig, "k").await;
    let moved = act(&rig, &id, "complete", &json!({ "status": 201, "attempt": 7 })).await;
    assert_eq!((moved.status.as_u16(), moved.problem().as_str()), (409, "moved"));
    let asked = json!({
        "status": 201, "headers": { "Content-Type": "application/json" }, "body": "{\"id\":7}",
        "attempt": 1, "who": "olga", "reason": "it stands in the shop",
    });
    let done = act(&rig, &id, "complete", &asked).await;
    assert_eq!(done.status, 200, "{done:?}");
    let done = done.json();
    assert_eq!(done["completed"]["status"], "unknown");
    assert_eq!((&done["response_status"], &done["events_failed"]), (&json!(201), &json!(0)));
    assert_eq!(done["events"][0]["event_type"], "order.created");
    assert_eq!(
        (&done["by"], &done["retention_seconds"]),
        (&json!("olga (admin listener)"), &json!(86_400))
    );
    assert_eq!(rig.place.events().await, 1, "the answer's event");

    let replay = post("/orders", "{}").tenant("acme").key("k").to(rig.gateway.addr).await;
    assert!(replay.replayed(), "{replay:?}");
    assert_eq!((replay.status.as_u16(), &replay.body[..]), (201, &b"{\"id\":7}"[..]));
    let life = shown(&rig, &id).await;
    assert_eq!(
        (&life["record"]["status"], &life["record"]["attempt"]),
        (&json!("completed"), &json!(2))
    );
    let told = &life["audit"][0];
    assert_eq!(
        (&told["action"], &told["who"], &told["why"]),
        (
            &json!("record.complete"),
            &json!("olga (admin listener)"),
            &json!("it stands in the shop")
        )
    );

    let again = act(&rig, &id, "complete", &asked).await;
    assert_eq!((again.status.as_u16(), again.problem().as_str()), (409, "moved"));
    let again = act(&rig, &id, "complete", &json!({ "status": 200 })).await;
    assert_eq!((again.status.as_u16(), again.problem().as_str()), (409, "completed"));

    // The templates are those of the command: one that fails with this answer says so.
    let id = unknown(&rig, "plain").await;
    let bytes = act(&rig, &id, "complete", &json!({ "status": 200, "body_base64": "/wA=" })).await;
    assert_eq!(bytes.json()["events_failed"], 1, "{bytes:?}");
    let replay = post("/orders", "{}").tenant("acme").key("plain").to(rig.gateway.addr).await;
    assert_eq!(&replay.body[..], b"\xff\x00");
    assert_eq!(audits(&rig).await, 2);
    assert_eq!(rig.orders.runs(), 2, "nothing was executed");
}

async fn a_release_over_the_admin_listener_frees_the_key_and_is_told_after_the_record_is_gone(
    which: Which,
) {
    let rig = Rig::start(which, "").await;
    let id = unknown(&rig, "k").await;
    let asked = json!({ "who": "olga", "reason": "it is not there", "attempt": 1 });
    let done = act(&rig, &id, "release", &asked).await;
    assert_eq!(done.status, 200, "{done:?}");
    assert_eq!(
        (&done.json()["released"]["key"], &done.json()["why"]),
        (&json!("k"), &json!("it is not there"))
    );
    assert_eq!(rig.place.records().await, 0);
    let life = shown(&rig, &id).await;
    assert_eq!(life["record"], Value::Null);
    let told = &life["audit"][0];
    assert_eq!(
        (&told["action"], &told["who"], &told["why"]),
        (&json!("record.release"), &json!("olga (admin listener)"), &json!("it is not there"))
    );
    let config = rig.gateway.config.to_str().unwrap();
    let (code, out, errors) = process::run(&["records", "show", &id, "--config", config]);
    assert_eq!(code, 0, "{errors}");
    assert!(out.contains("olga (admin listener)") && out.contains("it is not there"), "{out}");

    let again = act(&rig, &id, "release", &json!({})).await;
    assert_eq!((again.status.as_u16(), again.problem().as_str()), (404, "not-found"));
    let next = post("/orders", "{}").tenant("acme").key("k").to(rig.gateway.addr).await;
    assert!(!next.replayed(), "{next:?}");
    let refused = act(&rig, &next.record(), "release", &json!({})).await;
    assert_eq!((refused.status.as_u16(), refused.problem().as_str()), (409, "completed"));
    let done = act(&rig, &next.record(), "release", &json!({ "completed": true })).await;
    assert_eq!(done.status, 200, "{done:?}");
    eventually("it executes", async || {
        !post("/orders", "{}").tenant("acme").key("k").to(rig.gateway.addr).await.replayed()
    })
    .await;
    assert_eq!((rig.orders.runs(), audits(&rig).await), (3, 2));
}

async fn a_record_that_a_live_process_works_on_is_left_alone_by_all_who_ask(which: Which) {
    let rig = Rig::start(which, "").await;
    rig.orders.hold();
    let addr = rig.gateway.addr;
    let first =
        tokio::spawn(async move { post("/orders", "{}").tenant("acme").key("k").to(addr).await });
    rig.orders.asked(1).await;
    let page = get("/api/v1/records?key=k").to(rig.gateway.admin).await.json();
    let row = &page["records"][0];
    let id = row["id"].as_str().unwrap();
    for (what, body) in [
        ("release", json!({})),
        ("release", json!({ "completed": true })),
        ("complete", json!({ "status": 201 })),
    ] {
        let refused = act(&rig, id, what, &body).await;
        assert_eq!((refused.status.as_u16(), refused.problem().as_str()), (409, "running"));
        let told = refused.json();
        assert_eq!((&told["owner"], &told["since"]), (&row["owner"], &row["created_at"]));
    }
    rig.orders.go();
    assert_eq!(first.await.unwrap().status, 201);
    assert_eq!((rig.orders.runs(), audits(&rig).await), (1, 0));
}

async fn an_answer_that_no_caller_may_get_is_refused_by_name(which: Which) {
    let rig = Rig::start(which, "").await;
    let id = unknown(&rig, "k").await;
    for (body, wrong) in [
        (json!({ "status": 101 }), "`status`: a final status is from 200 to 599"),
        (
            json!({ "status": 204, "body": "x" }),
            "`body`: an answer of status 204 No Content has none",
        ),
        (json!({ "status": 200, "headers": { "Via": "x" } }), "`headers`: `Via`: the gateway sets"),
        (
            json!({ "status": 200, "headers": [["a b", "x"]] }),
            "`headers`: `a b`: no header can have this name",
        ),
        (
            json!({ "status": 200, "headers": { "a": "b\nc" } }),
            "`headers`: `a`: no header can have this value",
        ),
        (
            json!({ "status": 200, "body": "", "body_base64": "" }),
            "`body_base64`: not beside `body`",
        ),
        (json!({ "status": 200, "body_base64": "?" }), "`body_base64`: not base64"),
        (json!({ "status": 200, "who": "" }), "`who`: a name of at most 200 characters"),
        (
            json!({ "status": 200, "reason": "a\u{0}b" }),
            "`reason`: a text of at most 4000 characters",
        ),
        (json!({ "status": 200, "resaon": "a" }), "unknown field `resaon`"),
        (json!({ "body": "x" }), "missing field `status`"),
    ] {
        let refused = act(&rig, &id, "complete", &body).await;
        assert_eq!((refused.status.as_u16(), refused.problem().as_str()), (400, "action-invalid"));
        let told = refused.json()["errors"][0].as_str().unwrap().to_owned();
        assert!(told.contains(wrong), "{told}");
    }
    let path = format!("/api/v1/records/{id}/complete");
    let empty = post(&path, "").to(rig.gateway.admin).await;
    assert_eq!(empty.json()["errors"][0], "`status`: must be the answer's status");
    let plain = post(&path, "{}").set("content-type", "text/plain").to(rig.gateway.admin).await;
    assert_eq!(plain.status, 400, "a page of somebody else's can send that");
    let nobody = act(&rig, "7", "release", &json!({})).await;
    assert_eq!((nobody.status.as_u16(), nobody.problem().as_str()), (400, "id-invalid"));
    assert_eq!(
        (rig.place.status_of("k").await.as_deref(), audits(&rig).await),
        (Some("unknown"), 0)
    );
}
