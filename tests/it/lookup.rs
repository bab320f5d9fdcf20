//! `on_unknown = "lookup"`: the upstream is asked what became of an attempt, by one at a time, and only an answer that says
//! so frees the key or completes the record.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{Response, StatusCode};
use http_body_util::Full;
use serde_json::json;

use crate::support::client::{Answer, Ask, get, post};
use crate::support::fault::Fault;
use crate::support::fleet::{self, command, order, sending};
use crate::support::orders::{Execution, Orders};
use crate::support::postgres::Cluster;
use crate::support::process::{self, Gateway, eventually};
use crate::support::rig::{self, Place, Rig, Which, on_both_stores};
use crate::support::sink::{OK, Seen, Sink};

on_both_stores! {
    what_is_found_is_kept_and_announced_without_a_retry,
    a_duplicate_asks_and_gets_what_is_found,
    what_is_too_long_to_be_kept_is_in_the_event_of_who_had_it_and_named_in_that_of_who_had_not,
    what_is_not_found_is_executed_once_more_by_the_next_duplicate,
    a_question_that_fails_leaves_the_outcome_unknown,
    before_it_has_settled_nobody_asks,
    a_key_cannot_change_the_question,
    whoever_asks_may_die,
    a_late_answer_completes_what_a_question_could_not_tell,
    a_late_answer_that_comes_while_it_is_asked_about_is_the_answer,
    what_completes_between_not_found_and_the_next_attempt_is_the_answer,
    a_late_answer_that_is_owed_to_the_store_keeps_the_next_attempt_back,
    a_late_answer_that_differs_from_what_was_found_is_kept_in_the_audit,
    a_question_that_panics_is_asked_again_under_the_same_attempt,
    a_question_names_the_request_of_the_attempt_in_doubt,
    a_question_that_may_have_begun_is_taken_back_and_deletes_nothing,
    an_attempt_that_may_have_begun_is_taken_back_and_not_sent,
}

/// What the API does and says.
#[derive(Default)]
struct Books {
    /// Orders by their key.
    made: BTreeMap<String, usize>,
    /// Whether a POST executes.
    executes: bool,
    /// Whether its answer is lost.
    loses: bool,
    /// What a POST is answered with, where it is not lost.
    says: Option<Bytes>,
    /// What a question gets instead of the truth.
    lie: Option<(u16, &'static str)>,
}

/// An API that can be asked about its orders.
struct Shop {
    orders: Orders,
    books: Arc<Mutex<Books>>,
}

impl Shop {
    async fn start() -> Self {
        let orders = Orders::start().await;
        let books = Arc::new(Mutex::new(Books { executes: true, loses: true, ..Books::default() }));
        let shared = Arc::clone(&books);
        orders.answer(move |execution| answer(&mut shared.lock().unwrap(), execution));
        Self { orders, books }
    }

    fn change(&self, change: impl FnOnce(&mut Books)) {
        change(&mut self.books.lock().unwrap());
    }

    /// The questions so far, by their targets.
    fn questions(&self) -> Vec<String> {
        let ledger = self.orders.ledger();
        ledger.into_iter().filter(is_question).map(|execution| execution.target).collect()
    }

    fn runs_and_questions(&self, key: &str) -> (usize, usize) {
        (self.orders.runs_of(key), self.questions().len())
    }
}

fn is_question(execution: &Execution) -> bool {
    execution.key().is_none()
}

fn answer(books: &mut Books, execution: &Execution) -> Response<Full<Bytes>> {
    let (status, body) = match (execution.key(), books.lie) {
        (None, Some((status, body))) => (status, Bytes::from(body)),
        (None, None) => {
            let query = execution.target.split_once('?').expect("a query").1;
            let (name, wanted) = form_urlencoded::parse(query.as_bytes()).next().expect("a pair");
            assert_eq!(name, "client_ref");
            let found = books.made.get(wanted.as_ref());
            let items: Vec<_> = found.iter().map(|id| json!({ "id": id, "ref": wanted })).collect();
            (200, json!({ "total": items.len(), "items": items }).to_string().into())
        }
        (Some(key), _) => {
            if books.executes {
                books.made.insert(key.to_owned(), execution.id);
            }
            let new = || Bytes::from(r#"{"id":"new"}"#);
            if books.loses {
                (502, Bytes::new())
            } else {
                (201, books.says.clone().unwrap_or_else(new))
            }
        }
    };
    let response = Response::builder().status(status).header("content-type", "application/json");
    response.body(Full::new(body)).expect("an answer")
}

/// A policy that asks, with more fields of the look-up.
fn asks(more: &str) -> String {
    format!(
        r#"on_unknown = "lookup"
lookup = {{ path = "/orders?client_ref={{{{ key }}}}", found = "response.json.total > 0", status = 201, body = "{{{{ response.json.items[0] }}}}", {more} }}
"#
    )
}

/// Shop, database and gateway; what the shop is told to lose becomes unknown.
async fn rig(which: Which, lookup: &str, more: &str) -> (Shop, Place, Gateway) {
    let (shop, place) = (Shop::start().await, Place::new(which).await);
    let gateway = start(&shop, &place, lookup, more);
    (shop, place, gateway)
}

fn start(shop: &Shop, place: &Place, lookup: &str, more: &str) -> Gateway {
    Gateway::start(&process::config(place.folder.path(), &config(shop, place, lookup, more)))
}

fn config(shop: &Shop, place: &Place, lookup: &str, more: &str) -> String {
    let store = "lease = \"3s\"\nsweep_every = \"500ms\"\nreserve_timeout = \"1s\"";
    rig::config_at(place, &shop.orders.url(), "127.0.0.1:0", store, &asks(lookup), more)
}

/// As [`rig`], with a short time-out, a fault, and an API that answers what it executes.
async fn slow_rig(which: Which, fault: &str) -> (Shop, Place, Gateway) {
    let (shop, place) = (Shop::start().await, Place::new(which).await);
    shop.change(|books| books.loses = false);
    let toml = config(&shop, &place, SETTLES_LATE, "");
    let toml = toml.replace("[policy]", "[policy]\ntimeout = \"500ms\"");
    let gateway = Gateway::with_fault(&process::config(place.folder.path(), &toml), fault);
    (shop, place, gateway)
}

/// A gateway on a Postgres that can go away.
async fn cut_rig() -> (Shop, Place, Fault, Gateway) {
    let (shop, place) = (Shop::start().await, Place::new(Which::Postgres).await);
    let (fault, url) = Fault::before_postgres(&place.url, Cluster::shared().port()).await;
    let toml = config(&shop, &place, SETTLES_LATE, "").replace(&place.url, &url);
    let gateway = Gateway::start(&process::config(place.folder.path(), &toml));
    (shop, place, fault, gateway)
}

/// Sends an order that is not answered in time.
async fn timed_out(key: &str, gateway: &Gateway) -> String {
    let answer = order(key).to(gateway.addr).await;
    assert_eq!(answer.problem(), "upstream-timeout", "{answer:?}");
    answer.record()
}

async fn is(place: &Place, key: &str, status: &str) {
    eventually(status, async || place.status_of(key).await.as_deref() == Some(status)).await;
}

async fn late_outcomes(place: &Place) -> i64 {
    place.count("select count(*) from audit_log where action = 'late_outcome'").await
}

/// A retry gets this, as the stored answer of the only execution.
fn assert_replayed(retry: &Answer, record: &str, body: &str) {
    assert_eq!((retry.status, retry.replayed()), (StatusCode::CREATED, true), "{retry:?}");
    assert_eq!((retry.record().as_str(), &retry.body[..]), (record, body.as_bytes()));
}

const NEW: &str = r#"{"id":"new"}"#;
const NOTHING: &str = r#"{"total":0}"#;

/// Sends an order whose answer is lost. The time to reserve it is short, and the machine may be busy: then it is sent again.
async fn lost(key: &str, gateway: &Gateway) -> String {
    let mut answer = order(key).to(gateway.addr).await;
    for _ in 0..20 {
        if answer.status != StatusCode::SERVICE_UNAVAILABLE {
            break;
        }
        answer = order(key).to(gateway.addr).await;
    }
    assert_eq!(answer.status, StatusCode::BAD_GATEWAY, "{answer:?}");
    answer.record()
}

const SETTLES_LATE: &str = "settle = \"1h\"";

/// Lets the hour pass.
fn earlier(which: Which) -> &'static str {
    match which {
        Which::Sqlite => "update oncegate_unknown set since = since - 7200000000",
        Which::Postgres => "update oncegate_unknown set since = since - interval '2 hours'",
    }
}

/// Lets the hour pass, for duplicates; the gateway itself is to ask a day later.
async fn only_duplicates_ask(which: Which, place: &Place) {
    let sql = match which {
        Which::Sqlite => {
            "update oncegate_unknown set since = since - 7200000000,
             next_ask_at = next_ask_at + 86400000000"
        }
        Which::Postgres => {
            "update oncegate_unknown set since = since - interval '2 hours',
             next_ask_at = next_ask_at + interval '1 day'"
        }
    };
    place.rows(sql).await;
}

/// Waits for the outcome, and has it asked for again and again meanwhile.
async fn completed_by_asking(place: &Place, key: &str) {
    eventually("it is completed", async || {
        place
            .rows("update oncegate_unknown set next_ask_at = since where next_ask_at > since")
            .await;
        place.status_of(key).await.as_deref() == Some("completed")
    })
    .await;
}

async fn completed(place: &Place, key: &str) {
    eventually("it is completed", async || {
        place.status_of(key).await.as_deref() == Some("completed")
    })
    .await;
}

async fn attempt(place: &Place, key: &str) -> i64 {
    place.count(&format!("select attempt from idempotency_records where key = '{key}'")).await
}

/// How many questions the gateway counted with this result.
async fn counted(gateway: &Gateway, result: &str) -> usize {
    let text = get("/metrics").to(gateway.admin).await.body;
    let line =
        format!("oncegate_lookups_total{{operation=\"orders.create\",result=\"{result}\"}} ");
    let text = String::from_utf8_lossy(&text);
    text.lines().find_map(|l| l.strip_prefix(&line)?.parse().ok()).unwrap_or(0)
}

async fn what_is_found_is_kept_and_announced_without_a_retry(which: Which) {
    let sink = Sink::start(|_, _| OK).await;
    let event = "[[route.event]]\ntype = \"order.created\"\n\
        payload = { id = \"{{ response.json.id }}\", amount = \"{{ request.json.amount }}\" }\n";
    let more = format!("{event}{}", fleet::sink(sink.port));
    let (shop, place, gateway) = rig(which, "settle = \"0s\"", &more).await;
    let record = lost("k", &gateway).await;
    completed(&place, "k").await;
    eventually("the event is delivered", async || sink.seen().len() == 1).await;
    let message: serde_json::Value = serde_json::from_str(&sink.seen()[0].text()).unwrap();
    assert_eq!(message["data"], json!({ "id": 1, "amount": "129.90" }));
    let retry = order("k").to(gateway.addr).await;
    assert_eq!((retry.status, retry.replayed()), (StatusCode::CREATED, true), "{retry:?}");
    assert_eq!(retry.record(), record);
    assert_eq!(retry.json(), json!({ "id": 1, "ref": "k" }));
    assert_eq!(retry.header("content-type"), Some("application/json"));
    assert_eq!(attempt(&place, "k").await, 1, "a question is no attempt");
    assert_eq!((shop.orders.runs_of("k"), shop.questions().len()), (1, 1));
    assert_eq!((counted(&gateway, "found").await, place.events().await), (1, 1));
}

async fn a_duplicate_asks_and_gets_what_is_found(which: Which) {
    let (shop, place, gateway) = rig(which, SETTLES_LATE, "").await;
    let record = lost("k", &gateway).await;
    only_duplicates_ask(which, &place).await;
    let retry = order("k").to(gateway.addr).await;
    assert_eq!((retry.status, retry.replayed()), (StatusCode::CREATED, true), "{retry:?}");
    assert_eq!((retry.record(), retry.json()), (record, json!({ "id": 1, "ref": "k" })));
    assert!(retry.header("oncegate-expires").is_some());
    assert_eq!((shop.orders.runs_of("k"), shop.questions().len()), (1, 1));
    assert_eq!((attempt(&place, "k").await, place.events().await), (1, 1));
    assert!(order("k").to(gateway.addr).await.replayed());
}

async fn what_is_too_long_to_be_kept_is_in_the_event_of_who_had_it_and_named_in_that_of_who_had_not(
    which: Which,
) {
    let sink = Sink::start(|_, _| OK).await;
    let event = "context_max = \"1KiB\"\n[[route.event]]\ntype = \"order.created\"\n\
        payload = { note = \"{{ request.json.note }}\" }\n";
    let more = format!("{event}{}", fleet::sink(sink.port));
    let (shop, place, gateway) = rig(which, "settle = \"0s\"", &more).await;
    let note = "x".repeat(100_000);
    let data = async |key: &str| {
        let body = json!({ "ref": key, "note": note }).to_string();
        post("/orders", &body).tenant("acme").key(key).to(gateway.addr).await;
        completed(&place, key).await;
        let of = |seen: &Seen| {
            let message: serde_json::Value = serde_json::from_str(&seen.text()).unwrap();
            (message["idempotency_key"] == key).then(|| message["data"].clone())
        };
        eventually("the event is delivered", async || sink.seen().iter().any(|s| of(s).is_some()))
            .await;
        sink.seen().iter().find_map(of).unwrap()
    };
    shop.change(|books| books.loses = false);
    assert_eq!(data("answered").await, json!({ "note": note }));
    shop.change(|books| books.loses = true);
    let why = "the templates name 100032 bytes of the request, and policy.context_max keeps 1024";
    assert_eq!(data("looked-up").await, json!({ "error": why }));
}

async fn what_is_not_found_is_executed_once_more_by_the_next_duplicate(which: Which) {
    let (shop, place, gateway) = rig(which, SETTLES_LATE, "").await;
    shop.change(|books| books.executes = false);
    let record = lost("k", &gateway).await;
    only_duplicates_ask(which, &place).await;
    shop.change(|books| (books.executes, books.loses) = (true, false));
    let (one, other) = (sending(order("k"), gateway.addr), sending(order("k"), gateway.addr));
    for retry in [one.await.unwrap(), other.await.unwrap()] {
        assert_eq!((retry.status, retry.record()), (StatusCode::CREATED, record.clone()));
        assert_eq!(retry.json(), json!({ "id": "new" }), "the answer of the execution itself");
    }
    let ledger = shop.orders.ledger();
    let way: Vec<_> = ledger.iter().map(is_question).collect();
    assert_eq!(way, [false, true, false], "asked once, right before");
    assert_eq!(ledger[2].headers["oncegate-attempt"], "2");
    assert_eq!((counted(&gateway, "not_found").await, place.events().await), (1, 1));
    // Not found is not remembered: the next lost attempt is asked about anew.
    shop.change(|books| books.loses = true);
    let again = lost("l", &gateway).await;
    only_duplicates_ask(which, &place).await;
    assert_eq!(order("l").to(gateway.addr).await.record(), again);
    assert_eq!(shop.orders.runs_of("l"), 1, "this one was found");
}

async fn a_question_that_fails_leaves_the_outcome_unknown(which: Which) {
    let (shop, place, gateway) = rig(which, "settle = \"1h\", timeout = \"300ms\"", "").await;
    let lies = [
        (500, r#"{"total":0}"#),
        (404, r#"{"total":0}"#),
        (200, r#"{"total":null}"#),
        (200, "<html>please log in</html>"),
        (200, r#"{"error":"busy"}"#),
        (200, r#"{"total":1,"items":[]}"#),
    ];
    shop.change(|books| books.executes = false);
    let record = lost("k", &gateway).await;
    only_duplicates_ask(which, &place).await;
    for (n, lie) in lies.into_iter().enumerate() {
        shop.change(|books| books.lie = Some(lie));
        let retry = order("k").to(gateway.addr).await;
        assert_eq!(retry.problem(), "outcome-unknown", "{lie:?}: {retry:?}");
        assert_eq!(retry.record(), record);
        let again: u64 = retry.header("retry-after").unwrap().parse().unwrap();
        assert!((1..60).contains(&again), "{again}");
        eventually("it is unknown", async || {
            place.status_of("k").await.as_deref() == Some("unknown")
        })
        .await;
        // More where the gateway itself asked meanwhile.
        assert!(place.count("select asked from oncegate_unknown").await > n as i64, "{lie:?}");
    }
    shop.orders.hold();
    assert_eq!(order("k").to(gateway.addr).await.problem(), "outcome-unknown", "it hangs");
    shop.orders.go();
    assert_eq!(shop.orders.runs_of("k"), 1);
    assert!(counted(&gateway, "failed").await > lies.len());
    assert_eq!(counted(&gateway, "not_found").await + counted(&gateway, "found").await, 0);
    eventually("nobody asks", async || place.status_of("k").await.as_deref() == Some("unknown"))
        .await;
    let (code, out, errors) = command(&gateway, &["records", "show", &record]);
    assert_eq!(code, 0, "{errors}");
    assert!(out.contains("times in vain, not again before"), "{out}");
    // The truth at last, and by the gateway itself.
    shop.change(|books| {
        books.lie = None;
        books.made.insert("k".to_owned(), 1);
    });
    completed_by_asking(&place, "k").await;
    assert_eq!(shop.orders.runs_of("k"), 1);
}

async fn before_it_has_settled_nobody_asks(which: Which) {
    let (shop, place, gateway) = rig(which, SETTLES_LATE, "").await;
    let record = lost("k", &gateway).await;
    let retry = order("k").to(gateway.addr).await;
    assert_eq!((retry.problem(), retry.record()), ("outcome-unknown".to_owned(), record.clone()));
    let again: u64 = retry.header("retry-after").unwrap().parse().unwrap();
    assert!((3500..=4600).contains(&again), "when it has settled: {again}");
    let other = order("k").set("content-type", "text/plain").to(gateway.addr).await;
    assert_eq!(other.problem(), "request-mismatch");
    assert_eq!((shop.orders.runs_of("k"), shop.questions().len()), (1, 0));
    let (_, out, _) = command(&gateway, &["records", "show", &record]);
    assert!(out.contains("not asked about yet"), "{out}");
    place.rows(earlier(which)).await;
    completed(&place, "k").await;
    assert_eq!((shop.orders.runs_of("k"), shop.questions().len()), (1, 1));
}

async fn a_key_cannot_change_the_question(which: Which) {
    let (shop, place, gateway) = rig(which, "settle = \"0s\"", "").await;
    let key = "../a?b#c&client_ref=x%2e+y z";
    lost(key, &gateway).await;
    completed(&place, key).await;
    let target = "/orders?client_ref=..%2Fa%3Fb%23c%26client_ref%3Dx%252e%2By%20z";
    assert_eq!(shop.questions(), [target]);
    assert_eq!(order(key).to(gateway.addr).await.json(), json!({ "id": 1, "ref": key }));
}

async fn whoever_asks_may_die(which: Which) {
    let (shop, place, mut gateway) = rig(which, "settle = \"1h\", timeout = \"30s\"", "").await;
    let record = lost("k", &gateway).await;
    shop.orders.hold();
    place.rows(earlier(which)).await;
    let since = "select since from oncegate_unknown";
    let began = place.rows(since).await;
    eventually("it is asked", async || shop.questions().len() == 1).await;
    assert_eq!(place.status_of("k").await.as_deref(), Some("in_progress"), "somebody holds it");
    gateway.kill9();
    let gateway = gateway.restart();
    eventually("it is asked again", async || shop.questions().len() == 2).await;
    assert_eq!(place.rows(since).await, began, "the doubt is as old as it was");
    shop.orders.go();
    completed(&place, "k").await;
    let retry = order("k").to(gateway.addr).await;
    assert_eq!((retry.replayed(), retry.record()), (true, record));
    assert_eq!((shop.orders.runs_of("k"), attempt(&place, "k").await), (1, 1));
}

async fn a_late_answer_completes_what_a_question_could_not_tell(which: Which) {
    let (shop, place, gateway) = slow_rig(which, "").await;
    shop.change(|books| books.lie = Some((500, "")));
    shop.orders.hold_only(1);
    let record = timed_out("k", &gateway).await;
    only_duplicates_ask(which, &place).await;
    let retry = order("k").to(gateway.addr).await;
    assert_eq!((retry.problem(), retry.record()), ("outcome-unknown".to_owned(), record.clone()));
    is(&place, "k", "unknown").await;
    assert_eq!(attempt(&place, "k").await, 1, "a question is no attempt");
    shop.orders.go();
    completed(&place, "k").await;
    assert_replayed(&order("k").to(gateway.addr).await, &record, NEW);
    assert_eq!((shop.orders.runs_of("k"), attempt(&place, "k").await), (1, 1));
    assert_eq!((place.events().await, late_outcomes(&place).await), (1, 0));
}

async fn a_late_answer_that_comes_while_it_is_asked_about_is_the_answer(which: Which) {
    let (shop, place, gateway) = slow_rig(which, "").await;
    for (n, lie) in [None, Some((200, NOTHING)), Some((500, ""))].into_iter().enumerate() {
        let key = format!("k-{n}");
        shop.change(|books| books.lie = lie);
        shop.orders.hold();
        let record = timed_out(&key, &gateway).await;
        only_duplicates_ask(which, &place).await;
        let retry = sending(order(&key), gateway.addr);
        let question = 2 * n + 2;
        shop.orders.asked(question).await;
        shop.orders.hold_only(question);
        completed(&place, &key).await;
        shop.orders.go();
        assert_replayed(&retry.await.unwrap(), &record, NEW);
        assert_eq!((shop.orders.runs_of(&key), attempt(&place, &key).await), (1, 1), "{lie:?}");
        assert_eq!(shop.questions().len(), n + 1);
    }
    assert_eq!((place.events().await, late_outcomes(&place).await), (3, 0));
}

async fn what_completes_between_not_found_and_the_next_attempt_is_the_answer(which: Which) {
    let gate = tempfile::tempdir().unwrap();
    let gate = gate.path().join("gate");
    let (shop, place, gateway) =
        slow_rig(which, &format!("before-raise=pause:{}", gate.display())).await;
    shop.change(|books| books.lie = Some((200, NOTHING)));
    shop.orders.hold_only(1);
    let record = timed_out("k", &gateway).await;
    only_duplicates_ask(which, &place).await;
    let retry = sending(order("k"), gateway.addr);
    let reached = gate.with_extension("reached");
    eventually("it is about to go on", async || reached.exists()).await;
    assert_eq!(place.status_of("k").await.as_deref(), Some("in_progress"));
    shop.orders.go();
    completed(&place, "k").await;
    std::fs::write(&gate, "").unwrap();
    assert_replayed(&retry.await.unwrap(), &record, NEW);
    assert_eq!((shop.orders.runs_of("k"), attempt(&place, "k").await), (1, 1));
    assert_eq!((place.events().await, late_outcomes(&place).await), (1, 0));
}

async fn a_late_answer_that_is_owed_to_the_store_keeps_the_next_attempt_back(which: Which) {
    // About two seconds, with the pauses between the tries.
    let away: Vec<_> = (1..=7).map(|n| format!("before-complete@{n}=error")).collect();
    let (shop, place, gateway) = slow_rig(which, &away.join(",")).await;
    shop.change(|books| books.lie = Some((200, NOTHING)));
    shop.orders.hold();
    let record = timed_out("k", &gateway).await;
    only_duplicates_ask(which, &place).await;
    let retry = sending(order("k"), gateway.addr);
    shop.orders.asked(2).await;
    shop.orders.hold_only(2);
    eventually("the late answer is owed", async || {
        fleet::metric(gateway.admin, "oncegate_settling").await == 1
    })
    .await;
    shop.orders.go();
    let retry = retry.await.unwrap();
    let told = (retry.status, retry.replayed());
    assert!(
        retry.status == StatusCode::CONFLICT || told == (StatusCode::CREATED, true),
        "{told:?}"
    );
    completed(&place, "k").await;
    eventually("it is replayed", async || order("k").to(gateway.addr).await.replayed()).await;
    assert_replayed(&order("k").to(gateway.addr).await, &record, NEW);
    assert_eq!((shop.orders.runs_of("k"), attempt(&place, "k").await), (1, 1));
    assert_eq!((place.events().await, late_outcomes(&place).await), (1, 0));
}

async fn a_late_answer_that_differs_from_what_was_found_is_kept_in_the_audit(which: Which) {
    let (shop, place, gateway) = slow_rig(which, "").await;
    let come = async |result: &str| {
        let line = format!("oncegate_late_answers_total{{result=\"{result}\"}} 1\n");
        eventually(result, async || {
            let metrics = get("/metrics").to(gateway.admin).await.body;
            String::from_utf8_lossy(&metrics).contains(&line)
        })
        .await;
    };
    // Executions 1 and 3; 2 and 4 are the questions.
    for (key, held, result) in [("other", 1, "not_stored"), ("same", 3, "completed")] {
        shop.orders.hold_only(held);
        let record = timed_out(key, &gateway).await;
        only_duplicates_ask(which, &place).await;
        shop.change(|books| {
            books.made.insert(key.to_owned(), held);
        });
        let found = order(key).to(gateway.addr).await;
        assert!(found.replayed(), "{found:?}");
        if key == "same" {
            // Headers say nothing: hardly any are kept of what is found.
            shop.change(|books| books.says = Some(found.body.clone()));
        }
        shop.orders.go();
        come(result).await;
        assert_eq!(late_outcomes(&place).await, 1, "the one that differs: {key}");
        let replay = order(key).to(gateway.addr).await;
        assert_eq!((replay.record(), &replay.body), (record, &found.body), "what stands stays");
        assert_eq!((shop.orders.runs_of(key), attempt(&place, key).await), (1, 1));
    }
    let noted = place.rows("select detail from audit_log where action = 'late_outcome'").await;
    let noted: serde_json::Value = serde_json::from_str(noted[0][0].as_deref().unwrap()).unwrap();
    assert_eq!((&noted["key"], &noted["attempt"]), (&json!("other"), &json!(1)));
    assert_eq!(noted["events"].as_array().unwrap().len(), 1, "with what was not announced");
    assert_eq!(place.events().await, 2);
}

async fn a_question_that_panics_is_asked_again_under_the_same_attempt(which: Which) {
    let (shop, place) = (Shop::start().await, Place::new(which).await);
    let toml = config(&shop, &place, "settle = \"0s\"", "");
    let config = process::config(place.folder.path(), &toml);
    let gateway = Gateway::with_fault(&config, "question-answered=panic");
    let record = lost("k", &gateway).await;
    completed(&place, "k").await;
    gateway.says("fault point QuestionAnswered");
    let retry = order("k").to(gateway.addr).await;
    assert_eq!((retry.replayed(), retry.record()), (true, record));
    assert_eq!((shop.orders.runs_of("k"), shop.questions().len()), (1, 2));
    assert_eq!((attempt(&place, "k").await, place.events().await), (1, 1));
}

async fn a_question_names_the_request_of_the_attempt_in_doubt(which: Which) {
    let (shop, place) = (Shop::start().await, Place::new(which).await);
    let toml = config(&shop, &place, SETTLES_LATE, "");
    let toml = toml.replace("client_ref={{ key }}", "ref={{ request.headers['x-ref'] }}");
    let gateway = Gateway::start(&process::config(place.folder.path(), &toml));
    shop.change(|books| books.lie = Some((200, NOTHING)));
    for (n, name) in ["one", "two", "three"].into_iter().enumerate() {
        let answer = order("k").header("x-ref", name).to(gateway.addr).await;
        assert_eq!(answer.status, StatusCode::BAD_GATEWAY, "{answer:?}");
        assert_eq!(attempt(&place, "k").await, n as i64 + 1);
        only_duplicates_ask(which, &place).await;
    }
    // Each retry has a name of its own, and asks for that of the request before.
    assert_eq!(shop.questions(), ["/orders?ref=one", "/orders?ref=two"]);
}

/// The outcome is on the disk of a dead replica, while another one asks about it.
#[tokio::test(flavor = "multi_thread")]
async fn a_spilled_outcome_completes_what_a_question_could_not_tell() {
    let (shop, place, fault, mut gateway) = cut_rig().await;
    let other = start(&shop, &place, SETTLES_LATE, "");
    shop.change(|books| (books.loses, books.lie) = (false, Some((500, ""))));
    shop.orders.hold();
    let first = sending(order("k"), gateway.addr);
    shop.orders.asked(1).await;
    fault.refuse();
    fault.cut();
    shop.orders.go();
    let first = first.await.unwrap();
    assert_eq!((first.status, first.header("oncegate-stored")), (StatusCode::CREATED, None));
    gateway.kill9();
    is(&place, "k", "unknown").await;
    only_duplicates_ask(Which::Postgres, &place).await;
    assert_eq!(order("k").to(other.addr).await.problem(), "outcome-unknown");
    assert_eq!(attempt(&place, "k").await, 1, "a question is no attempt");
    fault.pass();
    let _gateway = gateway.restart();
    completed(&place, "k").await;
    assert_replayed(&order("k").to(other.addr).await, &first.record(), NEW);
    assert_eq!((shop.orders.runs_of("k"), attempt(&place, "k").await), (1, 1));
    assert_eq!((place.events().await, late_outcomes(&place).await), (1, 0));
}

/// The application comes to its end after a question that failed, and while one is under way.
#[tokio::test(flavor = "multi_thread")]
async fn the_application_completes_what_a_question_could_not_tell() {
    let (shop, place, gateway) = rig(Which::Postgres, SETTLES_LATE, "").await;
    shop.change(|books| books.lie = Some((500, "")));
    let body = r#"{"id":"own"}"#;
    for (n, under_way) in [false, true].into_iter().enumerate() {
        let key = format!("k-{n}");
        let record = lost(&key, &gateway).await;
        only_duplicates_ask(Which::Postgres, &place).await;
        let asked = shop.orders.runs();
        if under_way {
            shop.change(|books| books.lie = Some((200, NOTHING)));
            shop.orders.hold();
        }
        let retry = sending(order(&key), gateway.addr);
        shop.orders.asked(asked + 1).await;
        let own = format!("select oncegate_complete('{record}', 1, 201, null, '{body}')::text");
        if under_way {
            place.rows(&own).await;
            shop.orders.go();
            assert_replayed(&retry.await.unwrap(), &record, body);
        } else {
            assert_eq!(retry.await.unwrap().problem(), "outcome-unknown");
            place.rows(&own).await;
        }
        assert_replayed(&order(&key).to(gateway.addr).await, &record, body);
        assert_eq!((shop.orders.runs_of(&key), attempt(&place, &key).await), (1, 1));
    }
    assert_eq!(late_outcomes(&place).await, 0);
}

/// A verb of the store that is done once, of which nobody is told, and that cannot be asked for again for a while.
fn done_and_untold(verb: &str) -> String {
    let away = (2..=30).map(|passage| format!("before-{verb}@{passage}=error"));
    std::iter::once(format!("after-{verb}=error")).chain(away).collect::<Vec<_>>().join(",")
}

async fn faulty_rig(which: Which, fault: &str) -> (Shop, Place, Gateway) {
    let (shop, place) = (Shop::start().await, Place::new(which).await);
    let toml = config(&shop, &place, SETTLES_LATE, "");
    let toml = toml.replace("reserve_timeout = \"1s\"", "reserve_timeout = \"200ms\"");
    let gateway = Gateway::with_fault(&process::config(place.folder.path(), &toml), fault);
    (shop, place, gateway)
}

async fn a_question_that_may_have_begun_is_taken_back_and_deletes_nothing(which: Which) {
    let (shop, place, gateway) = faulty_rig(which, &done_and_untold("take-over")).await;
    let record = lost("k", &gateway).await;
    only_duplicates_ask(which, &place).await;
    assert_eq!(order("k").to(gateway.addr).await.problem(), "store-unavailable");
    is(&place, "k", "unknown").await;
    assert_eq!((shop.runs_and_questions("k"), attempt(&place, "k").await), ((1, 0), 1));
    eventually("it can be asked about", async || order("k").to(gateway.addr).await.replayed())
        .await;
    assert_eq!(order("k").to(gateway.addr).await.record(), record);
    assert_eq!((shop.runs_and_questions("k"), attempt(&place, "k").await), ((1, 1), 1));
}

async fn an_attempt_that_may_have_begun_is_taken_back_and_not_sent(which: Which) {
    let (shop, place, gateway) = faulty_rig(which, &done_and_untold("raise")).await;
    shop.change(|books| books.executes = false);
    let record = lost("k", &gateway).await;
    only_duplicates_ask(which, &place).await;
    assert_eq!(order("k").to(gateway.addr).await.problem(), "outcome-unknown");
    assert_eq!(attempt(&place, "k").await, 2, "it had been written");
    is(&place, "k", "unknown").await;
    assert_eq!((shop.orders.runs_of("k"), attempt(&place, "k").await), (1, 2));
    shop.change(|books| (books.executes, books.loses) = (true, false));
    eventually("it is executed", async || {
        let retry = order("k").to(gateway.addr).await;
        assert_eq!(retry.record(), record);
        retry.status == StatusCode::CREATED
    })
    .await;
    let ledger = shop.orders.ledger();
    let executed = ledger.iter().rfind(|execution| !is_question(execution)).unwrap();
    assert_eq!(executed.headers["oncegate-attempt"], "3");
    assert_eq!(shop.orders.runs_of("k"), 2);
}

/// Two replicas that tell the API who they are.
#[tokio::test(flavor = "multi_thread")]
async fn of_two_replicas_one_at_a_time_asks_about_a_record() {
    let (shop, place) = (Shop::start().await, Place::new(Which::Postgres).await);
    let named = |name: &str| {
        format!("settle = \"1h\", timeout = \"30s\", headers = {{ X-Replica = \"{name}\" }}")
    };
    let gateways = ["a", "b"].map(|name| start(&shop, &place, &named(name), ""));
    let keys: Vec<String> = (0..12).map(|n| format!("k-{n}")).collect();
    for key in &keys {
        lost(key, &gateways[0]).await;
    }
    shop.orders.hold();
    place.rows("update oncegate_unknown set since = since - interval '2 hours'").await;
    // Each asks about four at a time: eight under way are those of both.
    eventually("both ask", async || shop.questions().len() == 8).await;
    let held: Vec<_> = shop.orders.ledger().into_iter().filter(is_question).collect();
    let records: BTreeSet<_> = held.iter().map(|question| &question.target).collect();
    assert_eq!(records.len(), held.len(), "none is asked about twice at a time");
    let replicas: BTreeSet<_> = held.iter().map(|q| q.headers["x-replica"].as_bytes()).collect();
    assert_eq!(replicas.len(), 2, "both take part");
    // A duplicate on either replica waits for the question, and asks none of its own.
    let asked_about = keys.iter().find(|key| held[0].target.ends_with(&format!("={key}"))).unwrap();
    let waiting: Vec<_> = gateways.iter().map(|g| sending(order(asked_about), g.addr)).collect();
    let asker = usize::from(held[0].headers["x-replica"] == "b");
    eventually("it waits", async || {
        fleet::metric(gateways[asker].admin, "oncegate_waiting").await == 1
    })
    .await;
    shop.orders.go();
    for answer in waiting {
        assert_eq!(answer.await.unwrap().json()["ref"], json!(asked_about));
    }
    for key in &keys {
        completed(&place, key).await;
        assert_eq!(shop.orders.runs_of(key), 1);
        let asked = shop.questions().iter().filter(|q| q.ends_with(&format!("={key}"))).count();
        assert_eq!(asked, 1, "{key}");
    }
}

/// The header or path of a look-up may name what was kept of the request, and who is meant by "not found" is configurable.
#[tokio::test(flavor = "multi_thread")]
async fn a_question_may_name_the_request_and_take_a_status_for_not_found() {
    let (shop, place) = (Shop::start().await, Place::new(Which::Sqlite).await);
    let policy = r#"on_unknown = "lookup"
lookup = { path = "/by/{{ request.json.customer }}/{{ request.headers['x-ref'] }}", headers = { X-Tenant-Id = "{{ tenant }}" }, found = "response.status == 200", not_found = [404], settle = "0s" }
"#;
    let toml = rig::config_at(&place, &shop.orders.url(), "127.0.0.1:0", "", policy, "");
    let gateway = Gateway::start(&process::config(place.folder.path(), &toml));
    let order = |key: &str| -> Ask { order(key).header("x-ref", "a/b") };
    shop.change(|books| books.lie = Some((404, "no such order")));
    assert_eq!(order("k").to(gateway.addr).await.status, StatusCode::BAD_GATEWAY);
    eventually("nothing is found", async || counted(&gateway, "not_found").await > 0).await;
    let asked = shop.orders.ledger().into_iter().find(is_question).unwrap();
    assert_eq!(asked.target, "/by/c-1/a%2Fb");
    assert_eq!(asked.headers["x-tenant-id"], "acme");
    assert_eq!(asked.headers["accept-encoding"], "identity");
    shop.change(|books| books.lie = Some((200, r#"{"n" : 1}"#)));
    completed_by_asking(&place, "k").await;
    let retry = order("k").to(gateway.addr).await;
    assert_eq!((retry.status, &retry.body[..]), (StatusCode::OK, &br#"{"n" : 1}"#[..]));
    assert_eq!(shop.orders.runs_of("k"), 1);
}

/// Whoever changes the configuration changes what is asked about.
#[tokio::test(flavor = "multi_thread")]
async fn records_of_other_policies_are_left_alone() {
    let shop = Shop::start().await;
    let rig = Rig::with(Which::Sqlite, "", "", "").await;
    rig.orders.answer_status(502);
    assert_eq!(order("k").to(rig.gateway.addr).await.status, StatusCode::BAD_GATEWAY);
    let mut gateway = rig.gateway;
    gateway.kill9();
    // The same database under a configuration that looks up, but knows no such operation.
    let toml = rig::config_at(
        &rig.place,
        &shop.orders.url(),
        "127.0.0.1:0",
        "",
        &asks("settle = \"0s\""),
        "",
    );
    let toml = toml.replace("orders.create", "orders.other");
    let gateway = Gateway::start(&process::config(rig.place.folder.path(), &toml));
    lost("other", &gateway).await;
    completed(&rig.place, "other").await;
    assert_eq!(rig.place.status_of("k").await.as_deref(), Some("unknown"));
    assert_eq!(shop.questions(), ["/orders?client_ref=other"]);
}
