//! A deploy that changes what of a request counts: what is known of requests from before it.
//!
//! Their canonical hashes were made by another recipe. So the bytes decide: the same bytes are the same request, and all
//! others are another one, whatever the new recipe would say.

use http::StatusCode;

use crate::support::client::{Answer, Ask, post};
use crate::support::process::Gateway;
use crate::support::rig::{Rig, Which, on_both_stores};

const BODY: &str = r#"{"amount":1,"sent_at":"09:00","trace":"x"}"#;

fn ask(key: &str, body: &str) -> Ask {
    post("/orders", body).tenant("acme").key(key)
}

async fn before(which: Which, policy: &str) -> Rig {
    Rig::with(which, "", policy, r#"fingerprint = { ignore = ["$.sent_at"] }"#).await
}

/// The gateway's configuration with another recipe, and a gateway that runs with it.
fn deploy(rig: &Rig) -> Gateway {
    let old = std::fs::read_to_string(&rig.gateway.config).expect("a configuration");
    let new = old.replace(r#"ignore = ["$.sent_at"]"#, r#"ignore = ["$.trace"]"#);
    assert_ne!(old, new);
    let path = rig.gateway.config.with_file_name("new.toml");
    std::fs::write(&path, new).expect("a new configuration");
    Gateway::start(&path)
}

/// What is another request to a record from before the deploy: content, what the old recipe ignored, what the new
/// one ignores, and another spelling.
fn others() -> [String; 4] {
    [
        BODY.replace("\"amount\":1", "\"amount\":2"),
        BODY.replace("09:00", "09:05"),
        BODY.replace("\"x\"", "\"y\""),
        BODY.replace(",", ", "),
    ]
}

async fn others_are_refused(key: &str, addr: std::net::SocketAddr) {
    for other in others() {
        let answer = ask(key, &other).to(addr).await;
        assert_eq!(answer.problem(), "request-mismatch", "{key}: {other}");
    }
}

on_both_stores! {
    c15_a_completed_record_is_replayed_to_the_same_bytes_and_to_no_others,
    c15_an_unknown_record_is_recognised_by_the_same_bytes_and_by_no_others,
    c15_a_record_in_progress_is_recognised_by_the_same_bytes_and_by_no_others,
    c15_what_comes_after_the_deploy_is_judged_by_the_new_recipe,
}

async fn c15_a_completed_record_is_replayed_to_the_same_bytes_and_to_no_others(which: Which) {
    let mut rig = before(which, "").await;
    let first = ask("k", BODY).to(rig.gateway.addr).await;
    assert_eq!(first.status, StatusCode::CREATED);
    rig.gateway.kill9();
    let new = deploy(&rig);
    others_are_refused("k", new.addr).await;
    let again: Answer = ask("k", BODY).to(new.addr).await;
    assert!(again.replayed());
    assert_eq!(again.body, first.body);
    assert_eq!(rig.orders.runs(), 1);
}

async fn c15_an_unknown_record_is_recognised_by_the_same_bytes_and_by_no_others(which: Which) {
    let mut rig = before(which, "").await;
    rig.orders.answer_status(504);
    ask("k", BODY).to(rig.gateway.addr).await;
    assert_eq!(rig.place.status_of("k").await.as_deref(), Some("unknown"));
    rig.orders.answer_created();
    rig.gateway.kill9();
    let new = deploy(&rig);
    others_are_refused("k", new.addr).await;
    assert_eq!(ask("k", BODY).to(new.addr).await.problem(), "outcome-unknown");
    assert_eq!(rig.orders.runs(), 1);
}

async fn c15_a_record_in_progress_is_recognised_by_the_same_bytes_and_by_no_others(which: Which) {
    let mut rig = before(which, "wait = \"0s\"").await;
    rig.orders.hold();
    let addr = rig.gateway.addr;
    let running = tokio::spawn(async move { ask("k", BODY).send(addr).await.ok() });
    rig.orders.asked(1).await;
    if which == Which::Sqlite {
        // One process at a time: the attempt's owner is gone, which is not known yet.
        rig.gateway.kill9();
        running.await.expect("it ended");
        let new = deploy(&rig);
        others_are_refused("k", new.addr).await;
        let same = ask("k", BODY).to(new.addr).await.problem();
        assert!(["in-progress", "outcome-unknown"].contains(&same.as_str()), "{same}");
    } else {
        let new = deploy(&rig);
        others_are_refused("k", new.addr).await;
        assert_eq!(ask("k", BODY).to(new.addr).await.problem(), "in-progress");
        rig.orders.go();
        let first = running.await.expect("it ended").expect("an answer");
        assert_eq!(first.status, StatusCode::CREATED);
        let again = ask("k", BODY).to(new.addr).await;
        assert!(again.replayed());
        assert_eq!(again.body, first.body);
        others_are_refused("k", new.addr).await;
    }
    assert_eq!(rig.orders.runs(), 1);
}

async fn c15_what_comes_after_the_deploy_is_judged_by_the_new_recipe(which: Which) {
    let mut rig = before(which, "").await;
    rig.gateway.kill9();
    let new = deploy(&rig);
    assert_eq!(ask("k", BODY).to(new.addr).await.status, StatusCode::CREATED);
    let [content, sent_at, trace, spelling] = others();
    for same in [trace, spelling] {
        assert!(ask("k", &same).to(new.addr).await.replayed(), "{same}");
    }
    for other in [content, sent_at] {
        assert_eq!(ask("k", &other).to(new.addr).await.problem(), "request-mismatch", "{other}");
    }
    assert_eq!(rig.orders.runs(), 1);
}
