//! The commands as a person types them, against the real program.

use std::process::Command;

use crate::support::client::{get, post};
use crate::support::orders::Orders;
use crate::support::process::{self, Gateway};
use crate::support::rig::{Rig, Which, on_both_stores};

on_both_stores! {
    a_completion_by_hand_that_breaks_a_template_says_so,
    a_delivered_event_shows_no_error_of_an_earlier_attempt,
    a_released_answer_is_let_go_of_and_the_next_request_executes,
    the_outbox_gauges_are_there_from_the_start,
}

/// Runs a command in a folder: exit status, output, errors.
fn run_in(folder: &std::path::Path, args: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_oncegate"))
        .current_dir(folder)
        .args(args)
        .output()
        .expect("the program runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code().unwrap_or(-1), text(&output.stdout), text(&output.stderr))
}

#[test]
fn check_says_what_is_unsafe() {
    let folder = tempfile::tempdir().unwrap();
    let toml = "[upstream]\nurl = \"http://127.0.0.1:3000\"\n[policy]\ntenant = { header = \"X-Tenant-Id\" }\non_unknown = \"retry\"\n[[route]]\nmethod = \"POST\"\npath = \"/orders\"\n";
    std::fs::write(folder.path().join("c.toml"), toml).unwrap();
    let (code, out, errors) = run_in(folder.path(), &["check", "--config", "c.toml"]);
    assert_eq!(code, 0, "{errors}");
    assert!(out.contains("warning: policy.tenant: "), "{out}");
    assert!(out.contains("warning: policy.on_unknown: "), "{out}");
    let (code, out, _) = run_in(folder.path(), &["check", "--config", "c.toml", "--json"]);
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(code, 0);
    assert!(report["warnings"].as_array().unwrap().len() >= 2, "{report}");
}

#[test]
fn each_of_several_mistakes_is_a_line_that_says_who_speaks() {
    let folder = tempfile::tempdir().unwrap();
    let toml = "[upstream]\nurl = \"http://127.0.0.1:99999\"\n[policy]\nwait = 3\nretries = 2\n";
    std::fs::write(folder.path().join("c.toml"), toml).unwrap();
    for command in [&["check"][..], &["serve"], &["relay"], &["records", "list"]] {
        let args = [command, &["--config", "c.toml"]].concat();
        let (code, out, errors) = run_in(folder.path(), &args);
        assert_eq!((code, out.as_str()), (2, ""), "{args:?}: {errors}");
        let lines: Vec<&str> = errors.lines().collect();
        let begin = [
            "oncegate: c.toml:2: upstream.url: has the invalid port \"99999\"",
            "oncegate: c.toml:4: policy.wait: ",
            "oncegate: c.toml:5: policy.retries: ",
        ];
        assert_eq!(lines.len(), begin.len(), "{args:?}: {errors}");
        for (line, begin) in lines.iter().zip(begin) {
            assert!(line.starts_with(begin), "{args:?}: {errors}");
        }
    }
}

#[test]
fn a_number_of_threads_that_is_none_is_a_mistake_and_no_panic() {
    for wrong in ["0", "all"] {
        let output = Command::new(env!("CARGO_BIN_EXE_oncegate"))
            .env("TOKIO_WORKER_THREADS", wrong)
            .args(["records", "list"])
            .output()
            .expect("the program runs");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{errors}");
        assert!(errors.starts_with("oncegate: TOKIO_WORKER_THREADS: "), "{errors}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_find_the_store_of_a_serve_without_a_file() {
    let (orders, folder) = (Orders::start().await, tempfile::tempdir().unwrap());
    let config = process::config(
        folder.path(),
        &format!(
            "[server]\nlisten = \"127.0.0.1:0\"\n[admin]\nlisten = \"127.0.0.1:0\"\n[upstream]\nurl = \"{}\"\n[store]\nurl = \"sqlite:{}\"\n[[route]]\nmethod = \"POST\"\npath = \"/orders\"\n",
            orders.url(),
            folder.path().join("oncegate.db").display()
        ),
    );
    let gateway = Gateway::start(&config);
    post("/orders", "{}").key("k-1").to(gateway.addr).await;
    // The default store is `oncegate.db` in the working folder, and no upstream is needed to look into it.
    let (code, out, errors) = run_in(folder.path(), &["records", "list", "--json"]);
    assert_eq!(code, 0, "{errors}");
    assert!(out.contains("k-1"), "{out}");
}

#[test]
fn an_id_that_is_none_is_explained() {
    let folder = tempfile::tempdir().unwrap();
    for args in [["records", "show", "abc"], ["events", "show", "x"], ["events", "redeliver", "x"]]
    {
        let (code, _, errors) = run_in(folder.path(), &args);
        assert_eq!(code, 2);
        assert!(errors.contains("an id is a UUID"), "{errors}");
    }
}

async fn a_completion_by_hand_that_breaks_a_template_says_so(which: Which) {
    let event =
        "[[route.event]]\ntype = \"order.created\"\npayload = { id = \"{{ response.json.id }}\" }";
    let rig = Rig::start(which, event).await;
    rig.orders.answer_status(502);
    let answer = post("/orders", "{}").tenant("acme").key("k").to(rig.gateway.addr).await;
    let (id, config) = (answer.record(), rig.gateway.config.to_str().unwrap());
    let args =
        ["records", "complete", &id, "--status", "201", "--body", "plain", "--config", config];
    let (code, _, errors) = process::run(&args);
    assert_eq!(code, 0, "{errors}");
    assert!(errors.contains("1 of 1 events say only why their template failed"), "{errors}");
    let detail = "select detail from audit_log where action = 'record.complete'";
    let detail = rig.place.rows(detail).await.remove(0).remove(0).unwrap();
    let detail: serde_json::Value = serde_json::from_str(&detail).unwrap();
    assert_eq!(
        detail,
        serde_json::json!({ "tenant": "acme", "operation": "orders.create", "key": "k", "status": "unknown", "attempt": 1 })
    );
}

async fn a_released_answer_is_let_go_of_and_the_next_request_executes(which: Which) {
    let rig = Rig::start(which, "").await;
    let (addr, config) = (rig.gateway.addr, rig.gateway.config.to_str().unwrap());
    let order = || post("/orders", "{}").tenant("acme").key("k");
    let first = order().to(addr).await;
    assert!(order().to(addr).await.replayed());
    let args = ["records", "release", &first.record(), "--completed", "--config", config];
    let (code, _, errors) = process::run(&args);
    assert_eq!(code, 0, "{errors}");
    process::eventually("it executes", async || !order().to(addr).await.replayed()).await;
    let replay = order().to(addr).await;
    assert!(replay.replayed() && replay.record() != first.record(), "{replay:?}");
    assert_eq!(rig.orders.runs(), 2);
}

async fn a_delivered_event_shows_no_error_of_an_earlier_attempt(which: Which) {
    use crate::support::sink::{Act, OK, SECRET, Sink};
    let sink = Sink::start(|_, count| if count == 0 { Act::Answer(500, "no") } else { OK }).await;
    let toml = format!(
        "[[sink]]\nname = \"main\"\nurl = \"{}\"\nsecret = \"{SECRET}\"\nallow_private = true\nbackoff = {{ base = \"50ms\", max = \"100ms\" }}",
        sink.url()
    );
    let rig = Rig::start(which, &toml).await;
    post("/orders", "{}").tenant("acme").key("k").to(rig.gateway.addr).await;
    let sent = "select count(*) from outbox_events where status = 'sent' and last_error is null and attempts = 2";
    process::eventually("it is sent", async || rig.place.count(sent).await == 1).await;
}

async fn the_outbox_gauges_are_there_from_the_start(which: Which) {
    let sink = "[[sink]]\nname = \"main\"\nurl = \"http://127.0.0.1:9/hook\"\nsecret = \"whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=\"\nallow_private = true";
    let rig = Rig::start(which, sink).await;
    let metrics = get("/metrics").to(rig.gateway.admin).await.body;
    let metrics = String::from_utf8(metrics.to_vec()).unwrap();
    for name in ["pending", "oldest_age_seconds", "dead"] {
        let series = format!("oncegate_outbox_{name}{{sink=\"main\"}} 0");
        assert!(metrics.contains(&series), "{series} is missing in {metrics}");
    }
}
