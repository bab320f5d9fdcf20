//! Statements and answers that are lost between the gateway and Postgres: what was committed is found out, what was
//! not is done again, and nothing is executed twice.

use http::{Response, StatusCode};
use http_body_util::Full;

use crate::support::fleet::{self, TWO_EVENTS, order, sending};
use crate::support::orders::{Orders, created};
use crate::support::postgres::Cluster;
use crate::support::process::{self, Gateway, eventually};
use crate::support::rig::{self, Place, Which};
use crate::support::sink::{Act, OK, Seen, Sink};
use crate::support::wire::{Loss, Wire};

pub(crate) struct Parts {
    pub(crate) orders: Orders,
    pub(crate) place: Place,
    pub(crate) wire: Wire,
    pub(crate) gateway: Gateway,
}

/// A gateway that reaches its database over a wire that can be cut.
async fn parts(policy: &str, more: &str) -> Parts {
    // The sweeper looks so seldom that it is never there first.
    parts_with("sweep_every = \"1h\"", policy, more).await
}

/// The same, with lines for `[store]`.
pub(crate) async fn parts_with(store: &str, policy: &str, more: &str) -> Parts {
    let (orders, mut place) = (Orders::start().await, Place::new(Which::Postgres).await);
    let port = Cluster::shared().port();
    let wire = Wire::start(port).await;
    let direct = place.url.clone();
    place.url = wire.url(&direct, port);
    let store = format!("lease = \"3s\"\n{store}");
    let toml = rig::config_at(&place, &orders.url(), "127.0.0.1:0", &store, policy, more);
    let gateway = Gateway::start(&process::config(place.folder.path(), &toml));
    place.url = direct;
    Parts { orders, place, wire, gateway }
}

/// Every statement of a first request, lost each way.
#[tokio::test(flavor = "multi_thread")]
async fn a04_a_first_request_survives_each_loss() {
    let Parts { orders, place, wire, gateway } = parts("wait = \"1s\"", TWO_EVENTS).await;
    let mut cases = 0;
    for statement in ["-- reserve\n", "-- complete\n"] {
        for loss in [Loss::Statement, Loss::Answer] {
            let key = format!("k-{cases}");
            cases += 1;
            wire.lose(statement, loss);
            let first = order(&key).to(gateway.addr).await;
            assert_eq!(wire.losses(), cases, "{statement}{loss:?}");
            assert_eq!(first.status, StatusCode::CREATED, "{statement}{loss:?}: {first:?}");
            assert!(!first.replayed(), "it is the first: {statement}{loss:?}");
            assert_eq!(first.header("oncegate-stored"), None, "{statement}{loss:?}");
            assert!(first.header("oncegate-expires").is_some(), "{statement}{loss:?}");
            let replay = order(&key).to(gateway.addr).await;
            assert!(replay.replayed());
            assert_eq!((replay.record(), &replay.body), (first.record(), &first.body));
            assert_eq!(orders.runs_of(&key), 1, "{statement}{loss:?}");
            assert_eq!(place.records().await, cases as i64);
            assert_eq!(place.events().await, 2 * cases as i64);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mismatch_survives_the_loss_of_its_look() {
    let Parts { orders, place: _place, wire, gateway } = parts("", "").await;
    order("k").to(gateway.addr).await;
    // Another process, which has to ask the database.
    let other = gateway.restart();
    for (n, loss) in [Loss::Statement, Loss::Answer].into_iter().enumerate() {
        wire.lose("-- read_losers\n", loss);
        let answer = order("k").set("content-type", "text/plain").to(other.addr).await;
        assert_eq!(answer.problem(), "request-mismatch", "{loss:?}");
        assert_eq!(wire.losses(), n + 1);
    }
    assert_eq!(orders.runs(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_outcome_survives_each_loss() {
    let Parts { orders, place, wire, gateway } = parts("wait = \"1s\"", "").await;
    orders.answer_status(502);
    for loss in [Loss::Statement, Loss::Answer] {
        let key = format!("{loss:?}");
        wire.lose("-- mark_unknown\n", loss);
        assert_eq!(order(&key).to(gateway.addr).await.status, StatusCode::BAD_GATEWAY);
        eventually("it is unknown", async || {
            place.status_of(&key).await.as_deref() == Some("unknown")
        })
        .await;
        eventually("duplicates are told", async || {
            order(&key).to(gateway.addr).await.problem() == "outcome-unknown"
        })
        .await;
        assert_eq!(orders.runs_of(&key), 1);
    }
    assert_eq!(wire.losses(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_released_key_is_free_in_spite_of_each_loss() {
    let Parts { orders, place: _place, wire, gateway } = parts("wait = \"1s\"", "").await;
    for loss in [Loss::Statement, Loss::Answer] {
        let key = format!("{loss:?}");
        orders.answer_status(429);
        wire.lose("-- release_first\n", loss);
        assert_eq!(order(&key).to(gateway.addr).await.status, StatusCode::TOO_MANY_REQUESTS);
        orders.answer_created();
        eventually("the key is free", async || {
            order(&key).to(gateway.addr).await.status == StatusCode::CREATED
        })
        .await;
        assert_eq!(orders.runs_of(&key), 2);
    }
    assert_eq!(wire.losses(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_attempt_survives_each_loss() {
    let Parts { orders, place, wire, gateway } =
        parts("wait = \"1s\"\non_unknown = \"retry\"", "").await;
    for loss in [Loss::Statement, Loss::Answer] {
        let key = format!("{loss:?}");
        orders.answer_status(502);
        assert_eq!(order(&key).to(gateway.addr).await.status, StatusCode::BAD_GATEWAY);
        orders.answer_created();
        wire.lose("-- take_over_unknown\n", loss);
        let next = order(&key).to(gateway.addr).await;
        assert_eq!(next.status, StatusCode::CREATED, "{loss:?}: {next:?}");
        assert_eq!(orders.runs_of(&key), 2, "the first, and one more");
        assert_eq!(place.status_of(&key).await.as_deref(), Some("completed"));
    }
    assert_eq!(wire.losses(), 2);
}

/// An API that can be asked.
const ASKS: &str = r#"wait = "1s"
on_unknown = "lookup"
lookup = { path = "/orders?ref={{ key }}", found = "response.json.total > 0", settle = "1h" }"#;

/// Sends an order whose answer is lost, and of which the API knows nothing when it is asked; only retries ask.
async fn lost(key: &str, orders: &Orders, place: &Place, gateway: &Gateway) {
    orders.answer_status(502);
    assert_eq!(order(key).to(gateway.addr).await.status, StatusCode::BAD_GATEWAY);
    orders.answer(|execution| match execution.key() {
        Some(_) => created(execution),
        None => Response::new(Full::new(r#"{"total":0}"#.into())),
    });
    let earlier = "update oncegate_unknown set since = since - interval '2 hours',
        next_ask_at = next_ask_at + interval '1 day'";
    place.rows(earlier).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_attempt_after_a_question_survives_each_loss() {
    let Parts { orders, place, wire, gateway } = parts(ASKS, "").await;
    let mut losses = 0;
    for statement in ["-- unresolved\n", "-- take_over_lookup\n", "-- raise\n"] {
        for loss in [Loss::Statement, Loss::Answer] {
            let key = format!("{losses}");
            lost(&key, &orders, &place, &gateway).await;
            wire.lose(statement, loss);
            let next = order(&key).to(gateway.addr).await;
            losses += 1;
            assert_eq!(wire.losses(), losses, "{statement}{loss:?}");
            assert_eq!(next.status, StatusCode::CREATED, "{statement}{loss:?}: {next:?}");
            assert_eq!(orders.runs_of(&key), 2, "the first, and one more");
            let attempt = format!("select attempt from idempotency_records where key = '{key}'");
            assert_eq!(place.count(&attempt).await, 2, "{statement}{loss:?}");
            assert!(order(&key).to(gateway.addr).await.replayed());
        }
    }
}

/// The commit of the next attempt is lost: whichever it was, it is found out, and the attempt is sent once.
#[tokio::test(flavor = "multi_thread")]
async fn the_attempt_after_a_question_survives_the_loss_of_its_commit() {
    let Parts { orders, place, wire, gateway } = parts(ASKS, "").await;
    for (n, loss) in [Loss::Statement, Loss::Answer].into_iter().enumerate() {
        let key = format!("{loss:?}");
        lost(&key, &orders, &place, &gateway).await;
        let asked = orders.runs();
        orders.hold();
        let next = sending(order(&key), gateway.addr);
        orders.asked(asked + 1).await;
        wire.lose("COMMIT", loss);
        orders.go();
        let next = next.await.unwrap();
        assert_eq!(wire.losses(), n + 1, "{loss:?}");
        assert_eq!(next.status, StatusCode::CREATED, "{loss:?}: {next:?}");
        assert_eq!(orders.runs_of(&key), 2, "the first, and one more");
        let attempt = format!("select attempt from idempotency_records where key = '{key}'");
        assert_eq!(place.count(&attempt).await, 2, "{loss:?}");
        assert!(order(&key).to(gateway.addr).await.replayed());
    }
}

/// The first attempt is answered after a retry has overtaken it, and the note of its outcome is lost.
#[tokio::test(flavor = "multi_thread")]
async fn a_late_outcome_is_noted_once_in_spite_of_each_loss() {
    let Parts { orders, place, wire, gateway } =
        parts("timeout = \"1s\"\non_unknown = \"retry\"", "").await;
    for (n, loss) in [Loss::Statement, Loss::Answer].into_iter().enumerate() {
        let key = format!("{loss:?}");
        orders.hold_only(2 * n + 1);
        assert_eq!(order(&key).to(gateway.addr).await.problem(), "upstream-timeout");
        assert_eq!(order(&key).to(gateway.addr).await.status, StatusCode::CREATED);
        wire.lose("-- note_late\n", loss);
        orders.go();
        eventually("the note is lost", async || wire.losses() == n + 1).await;
        let noted = "select count(*) from audit_log where action = 'late_outcome'";
        eventually("it is noted", async || place.count(noted).await == n as i64 + 1).await;
        eventually("nothing is owed", async || {
            fleet::metric(gateway.admin, "oncegate_settling").await == 0
        })
        .await;
        assert_eq!(place.count(noted).await, n as i64 + 1, "{loss:?}");
        assert_eq!(orders.runs_of(&key), 2);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_record_is_taken_over_in_spite_of_each_loss() {
    let Parts { orders, place, wire, gateway } =
        parts("wait = \"1s\"\nretention = \"2s\"", "").await;
    for (n, loss) in [Loss::Statement, Loss::Answer].into_iter().enumerate() {
        let key = format!("{loss:?}");
        wire.lose("-- take_over_expired\n", loss);
        let first = order(&key).to(gateway.addr).await;
        eventually("it runs again", async || {
            let answer = order(&key).to(gateway.addr).await;
            assert_eq!(answer.status, StatusCode::CREATED, "{loss:?}: {answer:?}");
            answer.record() != first.record()
        })
        .await;
        assert_eq!(orders.runs_of(&key), 2);
        assert_eq!(place.status_of(&key).await.as_deref(), Some("completed"));
        assert_eq!(wire.losses(), n + 1, "{loss:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_heartbeat_is_sent_again_under_the_same_owner() {
    let Parts { orders, place, wire, gateway } = parts("", "").await;
    for (n, loss) in [Loss::Statement, Loss::Answer].into_iter().enumerate() {
        wire.lose("-- heartbeat\n", loss);
        eventually("a heartbeat is lost", async || wire.losses() == n + 1).await;
    }
    let renewed = "select count(*) from oncegate_owners where lease_until > started_at + interval '7 seconds'";
    eventually("the lease lives", async || place.count(renewed).await == 1).await;
    assert_eq!(place.count("select count(*) from oncegate_owners").await, 1);
    assert_eq!(order("k").to(gateway.addr).await.status, StatusCode::CREATED);
    assert_eq!(orders.runs(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_is_delivered_in_spite_of_each_loss() {
    let sink = Sink::start(|_, _| OK).await;
    let Parts { orders: _orders, place, wire, gateway } = parts("", &fleet::sink(sink.port)).await;
    let mut sent = 0;
    for (statement, times) in [("-- finish\n", 1), ("-- claim\n", 1)] {
        for loss in [Loss::Statement, Loss::Answer] {
            let lost = wire.losses();
            let seen = sink.seen().len();
            wire.lose(statement, loss);
            order(&format!("k-{sent}")).to(gateway.addr).await;
            sent += 1;
            let all = "select count(*) from outbox_events where status = 'sent'";
            eventually("it is delivered", async || place.count(all).await == sent).await;
            assert_eq!(wire.losses(), lost + 1, "{statement}{loss:?}");
            assert_eq!(sink.seen().len(), seen + times, "{statement}{loss:?}");
        }
    }
    assert_eq!(sink.ids().len() as i64, sent);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_on_another_replica_survives_each_loss_of_its_look() {
    let Parts { orders, place: _place, wire, gateway } = parts("wait = \"30s\"", "").await;
    let other = gateway.restart();
    orders.hold();
    let first = sending(order("k"), gateway.addr);
    orders.asked(1).await;
    let waiting = sending(order("k"), other.addr);
    for (n, loss) in [Loss::Statement, Loss::Answer].into_iter().enumerate() {
        wire.lose("-- find\n", loss);
        eventually("a look is lost", async || wire.losses() == n + 1).await;
    }
    orders.go();
    assert_eq!(first.await.unwrap().status, StatusCode::CREATED);
    assert!(waiting.await.unwrap().replayed());
    assert_eq!(orders.runs(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_dead_replica_left_is_unknown_in_spite_of_each_loss() {
    let Parts { orders, place, wire, mut gateway } = parts("wait = \"100ms\"", "").await;
    let other = gateway.restart();
    orders.hold();
    for n in 1..=2 {
        let (key, to) = (format!("k-{n}"), gateway.addr);
        tokio::spawn(async move { order(&key).send(to).await });
        orders.asked(n).await;
    }
    gateway.kill9();
    for (n, loss) in [Loss::Statement, Loss::Answer].into_iter().enumerate() {
        let key = format!("k-{}", n + 1);
        wire.lose("-- mark_one_dead\n", loss);
        eventually("it is taken for lost", async || {
            order(&key).to(other.addr).await.problem() == "outcome-unknown"
        })
        .await;
        assert_eq!(wire.losses(), n + 1);
        assert_eq!(place.status_of(&key).await.as_deref(), Some("unknown"));
    }
    assert_eq!(orders.runs(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_later_attempt_that_is_freed_is_unknown_again_in_spite_of_each_loss() {
    let Parts { orders, place, wire, gateway } =
        parts("wait = \"1s\"\non_unknown = \"retry\"", "").await;
    for (n, loss) in [Loss::Statement, Loss::Answer].into_iter().enumerate() {
        let key = format!("{loss:?}");
        orders.answer_status(502);
        assert_eq!(order(&key).to(gateway.addr).await.status, StatusCode::BAD_GATEWAY);
        orders.answer_status(429);
        wire.lose("-- release_later\n", loss);
        assert_eq!(order(&key).to(gateway.addr).await.status, StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(wire.losses(), n + 1);
        orders.answer_created();
        eventually("the next attempt runs", async || {
            order(&key).to(gateway.addr).await.status == StatusCode::CREATED
        })
        .await;
        assert_eq!(orders.runs_of(&key), 3);
        assert_eq!(place.count("select max(attempt) from idempotency_records").await, 3);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_delivery_counts_once_in_spite_of_each_loss_of_its_verdict() {
    let refusing =
        |_: &Seen, before: usize| if before.is_multiple_of(2) { Act::Answer(500, "") } else { OK };
    let sink = Sink::start(refusing).await;
    let Parts { orders: _orders, place, wire, gateway } = parts("", &fleet::sink(sink.port)).await;
    for (n, loss) in [Loss::Statement, Loss::Answer].into_iter().enumerate() {
        wire.lose("-- free\n", loss);
        order(&format!("k-{n}")).to(gateway.addr).await;
        let sent = "select count(*) from outbox_events where status = 'sent' and attempts = 2";
        eventually("it is delivered", async || place.count(sent).await == n as i64 + 1).await;
        assert_eq!((wire.losses(), sink.seen().len()), (n + 1, 2 * n + 2));
    }
}

/// The claim is committed and nobody knows whose it is: the event is delivered once the claim is over.
#[tokio::test(flavor = "multi_thread")]
async fn an_event_is_delivered_although_the_end_of_its_claim_was_lost() {
    let sink = Sink::start(|_, _| OK).await;
    let quick = fleet::sink(sink.port).replace("timeout = \"2s\"", "timeout = \"100ms\"");
    let Parts { orders: _orders, place, wire, gateway } = parts("", &quick).await;
    for loss in [Loss::Statement, Loss::Answer] {
        order(&format!("{loss:?}")).to(gateway.addr).await;
    }
    let sent = "select count(*) from outbox_events where status = 'sent'";
    eventually("all is quiet", async || place.count(sent).await == 2).await;
    for (n, loss) in [Loss::Statement, Loss::Answer].into_iter().enumerate() {
        wire.lose("COMMIT\0", loss);
        eventually("a commit is lost", async || wire.losses() == n + 1).await;
    }
    order("k").to(gateway.addr).await;
    wire.lose("COMMIT\0", Loss::Answer);
    eventually("it is delivered", async || place.count(sent).await == 3).await;
    assert_eq!(sink.ids().len(), 3);
}
