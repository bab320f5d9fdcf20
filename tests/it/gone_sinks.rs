//! Sinks that the configuration no longer names: what is pending for them is told, by the commands and before a deploy.

use http::StatusCode;

use crate::support::fleet::{command, order, sink};
use crate::support::orders::Orders;
use crate::support::process::{self, Gateway, eventually};
use crate::support::rig::{self, Place, Which, on_both_stores};
use crate::support::sink::{Act, Sink};

on_both_stores! {
    a_sink_that_is_gone_is_not_configured_and_check_and_list_say_what_is_pending_for_it,
    check_looks_at_a_store_that_is_there_and_makes_none,
}

async fn a_sink_that_is_gone_is_not_configured_and_check_and_list_say_what_is_pending_for_it(
    which: Which,
) {
    let (orders, place) = (Orders::start().await, Place::new(which).await);
    let down = Sink::start(|_, _| Act::Answer(503, "")).await;
    let old = format!("{}pause_after = 2\n", sink(down.port));
    let before = rig::config(&place, &orders.url(), &old);
    let mut gateway = Gateway::start(&process::config(place.folder.path(), &before));
    for key in ["a", "b"] {
        assert_eq!(order(key).to(gateway.addr).await.status, StatusCode::CREATED);
    }
    let paused = "select count(*) from outbox_sinks where pause_reason = 'failing'";
    eventually("it is paused", async || place.count(paused).await == 1).await;
    let (code, listed, _) = command(&gateway, &["sinks", "list"]);
    assert!(code == 0 && listed.contains("paused: failing"), "{listed}");
    let (code, checked, _) = command(&gateway, &["check"]);
    assert!(code == 0 && !checked.contains("pending for"), "the file names it: {checked}");
    gateway.terminate();
    tokio::task::block_in_place(|| gateway.exited());

    let after = before.replace("name = \"main\"", "name = \"new\"");
    assert_ne!(before, after);
    std::fs::write(&gateway.config, after).unwrap();
    let (code, checked, errors) = command(&gateway, &["check"]);
    assert_eq!(code, 0, "{errors}");
    let told = "warning: sink: 2 events pending for \"main\", which no [[sink]] names";
    assert!(checked.contains(told), "{checked}");
    let (_, checked, _) = command(&gateway, &["check", "--json"]);
    let checked: serde_json::Value = serde_json::from_str(&checked).unwrap();
    let expected = serde_json::json!({
        "looked": true, "owed_to_others": [{ "sink": "main", "events": 2 }],
    });
    assert_eq!(checked["store"], expected);

    let gateway = tokio::task::block_in_place(|| gateway.restart());
    let (_, listed, _) = command(&gateway, &["sinks", "list"]);
    assert!(listed.contains("not configured (paused: failing)"), "{listed}");
    assert!(listed.contains("main is not configured: 2 events pending for it"), "{listed}");
    let (_, listed, _) = command(&gateway, &["sinks", "list", "--json"]);
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    let main = &listed["sinks"][0];
    assert_eq!((&main["name"], &main["configured"]), (&"main".into(), &false.into()));
    assert_eq!((&main["pending"], &main["next_probe_seconds"]), (&2.into(), &().into()));
    let (code, resumed, _) = command(&gateway, &["sinks", "resume", "main"]);
    assert!(code == 0 && resumed.contains("It is not configured"), "{resumed}");
}

async fn check_looks_at_a_store_that_is_there_and_makes_none(which: Which) {
    let place = Place::new(which).await;
    // Nobody listens there.
    let url = match which {
        Which::Sqlite => place.url.clone(),
        Which::Postgres => format!("postgres://u@127.0.0.1:{}/x", process::free_port()),
    };
    let toml = rig::config(&place, "http://127.0.0.1:9", "").replace(&place.url, &url);
    let config = process::config(place.folder.path(), &toml);
    let config = config.to_str().unwrap();
    let (code, out, errors) = process::run(&["check", "--config", config]);
    assert!(code == 0 && out.contains("the store was not looked at: "), "{out}{errors}");
    assert!(out.lines().last().unwrap().starts_with("ok: "), "{out}");
    assert!(out.contains("run `check` where `serve` runs"), "how it is made to look: {out}");
    assert!(out.lines().last().unwrap().ends_with("the store was not looked at"), "{out}");
    let (_, out, _) = process::run(&["check", "--config", config, "--json"]);
    let out: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(out["store"]["looked"], false);
    let files = std::fs::read_dir(place.folder.path()).unwrap().flatten();
    let databases = files.filter(|file| file.file_name().to_string_lossy().contains(".db"));
    let left: Vec<_> = databases.map(|file| file.file_name()).collect();
    assert!(left.iter().all(|name| name.to_string_lossy().ends_with(".spill")), "{left:?}");
}
