//! The ceiling of the outbox: while too many events are pending nothing is begun that would add more, and nothing is lost.

use http::StatusCode;

use crate::support::client::{Answer, get, post};
use crate::support::fleet::{self, ONE_EVENT, metric, order, sending};
use crate::support::orders::Orders;
use crate::support::process::{self, Gateway, eventually};
use crate::support::rig::{Place, Which, config_at, on_both_stores};
use crate::support::sink::{OK, Sink};

on_both_stores! {
    f54_a_full_outbox_keeps_new_work_from_being_begun_and_loses_nothing,
}

/// Beside the orders, whose events the sink gets: payments, which are tried again where nobody knows; an order that is
/// kept for a moment; and notes, of which nobody wants to hear.
const OTHERS: &str = r#"
[[route]]
method = "POST"
path = "/payments"
operation = "order.payments"
on_unknown = "retry"
[[route]]
method = "POST"
path = "/quotes"
operation = "order.quotes"
retention = "1ms"
[[route]]
method = "POST"
path = "/notes"
operation = "notes.create"
"#;

fn is_swamped(answer: &Answer) -> bool {
    let after = answer.header("retry-after").map(|text| text.parse::<u64>().expect("seconds"));
    answer.status == StatusCode::SERVICE_UNAVAILABLE
        && answer.problem() == "overloaded"
        && answer.json()["detail"].as_str().is_some_and(|text| text.contains("events"))
        && after.is_some_and(|seconds| seconds > 5)
}

async fn f54_a_full_outbox_keeps_new_work_from_being_begun_and_loses_nothing(which: Which) {
    let (orders, place) = (Orders::start().await, Place::new(which).await);
    let sink = Sink::start(|_, _| OK).await;
    let more = format!(
        "{ONE_EVENT}{OTHERS}{}events = [\"order.*\"]\n[outbox]\nbacklog_max = 4\n",
        fleet::sink(sink.port)
    );
    // What is replayed comes from the store.
    let store = "sweep_every = \"100ms\"\ncache_bytes = 0";
    let toml = config_at(&place, &orders.url(), "127.0.0.1:0", store, "", &more);
    let mut gateway = Gateway::start(&process::config(place.folder.path(), &toml));
    assert_eq!(fleet::command(&gateway, &["sinks", "pause", "main"]).0, 0);
    let paused = "oncegate_sink_paused{sink=\"main\",reason=\"operator\"} 1\n";
    eventually("its relay knows", async || {
        let text = get("/metrics").to(gateway.admin).await.body;
        String::from_utf8_lossy(&text).contains(paused)
    })
    .await;
    let send = |path: &str, key: &str| post(path, "{}").tenant("acme").key(key);
    for n in 0..2 {
        assert_eq!(order(&format!("k-{n}")).to(gateway.addr).await.status, StatusCode::CREATED);
    }
    assert_eq!(send("/quotes", "q").to(gateway.addr).await.status, StatusCode::CREATED);
    orders.answer_status(502);
    send("/payments", "p").to(gateway.addr).await;
    assert_eq!(place.status_of("p").await.as_deref(), Some("unknown"));
    // Begun before the outbox is full, and ended after it.
    orders.answer_created();
    orders.hold_only(5);
    let begun = sending(order("begun"), gateway.addr);
    orders.asked(5).await;
    assert_eq!(order("k-2").to(gateway.addr).await.status, StatusCode::CREATED);
    eventually("it is full", async || {
        metric(gateway.admin, "oncegate_outbox_pending{sink=\"main\"}").await == 4
    })
    .await;
    let (runs, records) = (orders.runs(), place.records().await);
    for (path, key) in [("/orders", "new"), ("/payments", "p"), ("/quotes", "q")] {
        let answer = send(path, key).to(gateway.addr).await;
        assert!(is_swamped(&answer), "{path}: {answer:?}");
    }
    assert_eq!(metric(gateway.admin, "oncegate_outbox_refused_total").await, 3);
    assert_eq!((orders.runs(), place.records().await), (runs, records), "nothing was begun");
    assert!(order("k-0").to(gateway.addr).await.replayed(), "what is known is told");
    let other = order("k-0").body(b"{}".to_vec()).to(gateway.addr).await;
    assert_eq!(other.problem(), "request-mismatch");
    let note = send("/notes", "n").to(gateway.addr).await;
    assert_eq!(note.status, StatusCode::CREATED, "nobody is owed anything of it");
    orders.go();
    assert_eq!(begun.await.expect("an answer").status, StatusCode::CREATED, "it ends as ever");
    let owed = "select count(*) from outbox_events where status = 'pending'";
    assert_eq!(place.count(owed).await, 5, "beyond the ceiling, and not lost");

    gateway.kill9();
    gateway = tokio::task::block_in_place(|| gateway.restart());
    assert!(is_swamped(&order("new").to(gateway.addr).await), "also after a restart");
    assert!(sink.seen().is_empty());
    assert_eq!(fleet::command(&gateway, &["sinks", "resume", "main"]).0, 0);
    eventually("there is room again", async || {
        order("new").to(gateway.addr).await.status == StatusCode::CREATED
    })
    .await;
    for (path, key) in [("/payments", "p"), ("/quotes", "q")] {
        assert_eq!(send(path, key).to(gateway.addr).await.status, StatusCode::CREATED, "{path}");
    }
    eventually("all are delivered", async || place.count(owed).await == 0).await;
    assert_eq!(sink.ids().len(), 8, "one event of each execution that was kept");
    gateway.says("requests that write events are reserved again");
}
