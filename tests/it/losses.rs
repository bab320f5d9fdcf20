//! Statements and answers that are lost beneath operators, the sweeper and the relay's timetable: what was done is done
//! once, what was not is done in a later round, and an operator is told what is certain and what is not.

use serde_json::Value;

use crate::doubt::{Parts, parts_with};
use crate::support::fleet::{self, order};
use crate::support::postgres::Cluster;
use crate::support::process::{self, Gateway, eventually};
use crate::support::rig::{Place, Rig, Which};
use crate::support::sink::{Act, OK, Seen, Sink};
use crate::support::wire::{Loss, Wire};

const BOTH: [Loss; 2] = [Loss::Statement, Loss::Answer];

/// With its end, since "READ COMMITTED" begins like it.
const COMMIT: &str = "COMMIT\0";

const NOT_AVAILABLE: &str = "oncegate: the database is not available: ";

/// An operator's own way to the database.
struct Desk {
    wire: Wire,
    config: String,
}

impl Desk {
    async fn beside(gateway: &Gateway, place: &Place) -> Self {
        let port = Cluster::shared().port();
        let wire = Wire::start(port).await;
        let toml = std::fs::read_to_string(&gateway.config).unwrap();
        let toml = toml.replace(&place.url, &wire.url(&place.url, port));
        let config = process::config(place.folder.path(), &toml);
        Self { wire, config: config.to_str().unwrap().to_owned() }
    }

    /// Exit status, output and errors of a command.
    fn give(&self, args: &[&str]) -> (i32, String, String) {
        let args = [args, &["--config", &self.config]].concat();
        tokio::task::block_in_place(|| process::run(&args))
    }

    /// The same, while one of its statements or the answer to it is lost.
    async fn give_in_vain(&self, lost: &str, loss: Loss, args: &[&str]) -> (i32, String, String) {
        let before = self.wire.losses();
        self.wire.lose(lost, loss);
        let told = self.give(args);
        eventually("it is lost", async || self.wire.losses() == before + 1).await;
        told
    }
}

/// What a command says that does not know whether it did something.
fn doubt(look: &str) -> String {
    format!(
        "oncegate: it is not known whether the change was made: see `oncegate {look}` before you repeat the command: \
         the database did not say whether it committed: "
    )
}

async fn audited(place: &Place, action: &str) -> usize {
    let sql = format!("select count(*) from audit_log where action = '{action}'");
    place.count(&sql).await as usize
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_by_hand_is_done_once_in_spite_of_each_loss() {
    let rig = Rig::start(Which::Postgres, "").await;
    let desk = Desk::beside(&rig.gateway, &rig.place).await;
    for (n, loss) in BOTH.into_iter().enumerate() {
        let key = format!("{loss:?}");
        rig.orders.answer_status(502);
        let record = order(&key).to(rig.gateway.addr).await.record();
        let args = ["records", "release", &record];
        let (code, out, errors) = desk.give_in_vain("-- operator_release\n", loss, &args).await;
        assert_eq!((code, out.as_str()), (1, ""), "{errors}");
        assert!(errors.starts_with(&doubt(&format!("records show {record}"))), "{errors}");
        let done = loss == Loss::Answer;
        assert_eq!(audited(&rig.place, "record.release").await, n + usize::from(done));
        let (_, shown, _) = desk.give(&["records", "show", &record]);
        assert_eq!(shown.contains("is gone"), done, "{shown}");
        assert_eq!(shown.contains("record.release"), done, "{shown}");
        let (code, out, errors) = desk.give(&args);
        if done {
            assert_eq!((code, out), (1, format!("There is no record {record}.\n")), "{errors}");
        } else {
            assert_eq!(code, 0, "{errors}");
        }
        assert_eq!(audited(&rig.place, "record.release").await, n + 1);
        rig.orders.answer_created();
        assert_eq!(order(&key).to(rig.gateway.addr).await.status, 201);
        assert_eq!(rig.orders.runs_of(&key), 2, "the first, and one more");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_completion_by_hand_is_done_once_in_spite_of_each_loss() {
    let rig = Rig::start(Which::Postgres, "").await;
    let desk = Desk::beside(&rig.gateway, &rig.place).await;
    rig.orders.answer_status(502);
    for (n, loss) in BOTH.into_iter().enumerate() {
        let key = format!("{loss:?}");
        let record = order(&key).to(rig.gateway.addr).await.record();
        let args = ["records", "complete", &record, "--status", "201", "--body", "by hand"];
        let (code, out, errors) = desk.give_in_vain("-- operator_complete\n", loss, &args).await;
        assert_eq!((code, out.as_str()), (1, ""), "{errors}");
        assert!(errors.starts_with(&doubt(&format!("records show {record}"))), "{errors}");
        let done = loss == Loss::Answer;
        let stands = if done { "completed" } else { "unknown" };
        assert_eq!(rig.place.status_of(&key).await.as_deref(), Some(stands));
        assert_eq!(audited(&rig.place, "record.complete").await, n + usize::from(done));
        let (code, out, errors) = desk.give(&args);
        if done {
            assert_eq!(code, 1, "{errors}");
            assert!(out.contains("is completed already"), "{out}");
        } else {
            assert_eq!(code, 0, "{errors}");
        }
        assert_eq!(audited(&rig.place, "record.complete").await, n + 1);
        assert_eq!(rig.place.events().await as usize, n + 1, "its event is written once");
        let replay = order(&key).to(rig.gateway.addr).await;
        assert_eq!((replay.status.as_u16(), &replay.body[..]), (201, &b"by hand"[..]));
        assert_eq!(rig.orders.runs_of(&key), 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_look_of_an_operator_survives_each_loss() {
    let rig = Rig::start(Which::Postgres, "").await;
    let desk = Desk::beside(&rig.gateway, &rig.place).await;
    rig.orders.answer_status(502);
    for loss in BOTH {
        let record = order(&format!("{loss:?}")).to(rig.gateway.addr).await.record();
        let args = ["records", "release", &record];
        let (code, _, errors) = desk.give_in_vain("-- show_record\n", loss, &args).await;
        assert_eq!(code, 0, "{errors}");
    }
    assert_eq!(audited(&rig.place, "record.release").await, 2);
}

/// An event that is delivered, and how often the sink has it.
async fn delivered(rig: &Rig, sink: &Sink, times: usize) {
    let sent = "select count(*) from outbox_events where status <> 'sent'";
    eventually("it is delivered", async || {
        sink.seen().len() >= times && rig.place.count(sent).await == 0
    })
    .await;
    assert_eq!((sink.seen().len(), sink.ids().len()), (times, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redelivery_is_made_once_or_not_at_all_in_spite_of_each_loss() {
    let sink = Sink::start(|_, _| OK).await;
    let rig = Rig::start(Which::Postgres, &fleet::sink(sink.port)).await;
    let desk = Desk::beside(&rig.gateway, &rig.place).await;
    order("k").to(rig.gateway.addr).await;
    let (mut times, mut done) = (1, 0);
    delivered(&rig, &sink, times).await;
    let event = rig.place.rows("select id from outbox_events").await[0][0].clone().unwrap();
    let args = ["events", "redeliver", &event, "--sink", "main"];
    let inner = ["-- begin_events", "-- hasten\n", "-- redeliver_one\n", "-- redeliver_unwanted\n"];
    for lost in inner.into_iter().chain([COMMIT]) {
        for loss in BOTH {
            let (code, out, errors) = desk.give_in_vain(lost, loss, &args).await;
            assert_eq!((code, out.as_str()), (1, ""), "{lost}{loss:?}: {errors}");
            if lost == COMMIT {
                let doubt = doubt(&format!("events show {event}"));
                assert!(errors.starts_with(&doubt), "{loss:?}: {errors}");
            } else {
                assert!(errors.starts_with(NOT_AVAILABLE), "{lost}{loss:?}: {errors}");
            }
            let committed = usize::from(lost == COMMIT && loss == Loss::Answer);
            (times, done) = (times + committed, done + committed);
            delivered(&rig, &sink, times).await;
            assert_eq!(audited(&rig.place, "event.redeliver").await, done, "{lost}{loss:?}");
        }
    }
    let (code, out, errors) = desk.give(&args);
    assert_eq!(
        (code, out.as_str()),
        (0, "1 event due again to main.\n  main: queued again\n"),
        "{errors}"
    );
    delivered(&rig, &sink, times + 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redelivery_of_what_is_dead_is_made_once_in_spite_of_each_loss() {
    let sink = Sink::start(|_, _| OK).await;
    let rig = Rig::start(Which::Postgres, &fleet::sink(sink.port)).await;
    let desk = Desk::beside(&rig.gateway, &rig.place).await;
    order("k").to(rig.gateway.addr).await;
    delivered(&rig, &sink, 1).await;
    let args = ["events", "redeliver", "--status", "dead"];
    for (n, loss) in BOTH.into_iter().enumerate() {
        rig.place.rows("update outbox_done set outcome = 'dead'").await;
        let (code, out, errors) = desk.give_in_vain(COMMIT, loss, &args).await;
        assert_eq!((code, out.as_str()), (1, ""), "{errors}");
        assert!(errors.starts_with(&doubt("events list --status dead")), "{errors}");
        let done = usize::from(loss == Loss::Answer);
        assert_eq!(audited(&rig.place, "event.redeliver").await, n + done);
        let (code, out, errors) = desk.give(&args);
        let left = 1 - done;
        let plural = if left == 1 { "" } else { "s" };
        assert_eq!((code, out), (0, format!("{left} dead event{plural} due again.\n")), "{errors}");
        assert_eq!(audited(&rig.place, "event.redeliver").await, n + 1);
        delivered(&rig, &sink, n + 2).await;
    }
}

const SWEEPS: &str = "sweep_every = \"200ms\"";

/// Loses this once, and waits until it is lost.
async fn lose(wire: &Wire, statement: &str, loss: Loss) {
    let before = wire.losses();
    wire.lose(statement, loss);
    eventually("it is lost", async || wire.losses() > before).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_has_expired_is_swept_and_nothing_else_in_spite_of_each_loss() {
    let Parts { orders, place, wire, gateway } =
        parts_with(SWEEPS, "retention = \"500ms\"", "").await;
    orders.answer_status(502);
    order("unknown").to(gateway.addr).await;
    orders.answer_created();
    for statement in ["-- sweep_records\n", "-- sweep_notes\n"] {
        for loss in BOTH {
            order("k").to(gateway.addr).await;
            assert_eq!(place.status_of("k").await.as_deref(), Some("completed"));
            // It expires meanwhile: what is lost in the end is the statement that deletes it, or its answer.
            while place.status_of("k").await.is_some() {
                lose(&wire, statement, loss).await;
                if loss == Loss::Statement {
                    break;
                }
            }
            eventually("it is swept", async || place.status_of("k").await.is_none()).await;
        }
    }
    assert_eq!(orders.runs_of("k"), 4, "each time it was new");
    assert_eq!(place.status_of("unknown").await.as_deref(), Some("unknown"));
    assert_eq!(place.count("select count(*) from oncegate_unknown").await, 1);
    assert_eq!(place.events().await, 4, "events have a retention of their own");
}

#[tokio::test(flavor = "multi_thread")]
async fn delivered_events_are_swept_and_nothing_else_in_spite_of_each_loss() {
    let refusing = |seen: &Seen, _: usize| {
        if seen.text().contains("\"owed\"") { Act::Answer(500, "") } else { OK }
    };
    let sink = Sink::start(refusing).await;
    let more = format!("{}[outbox]\nretention = \"500ms\"\n", fleet::sink(sink.port));
    let Parts { orders: _orders, place, wire, gateway } = parts_with(SWEEPS, "", &more).await;
    order("owed").to(gateway.addr).await;
    let statements = ["-- begin_sweep", "-- lock_old_events\n", "-- delete_old_events\n"];
    for (n, statement) in statements.into_iter().enumerate() {
        for loss in BOTH {
            let key = format!("{n}{loss:?}");
            order(&key).to(gateway.addr).await;
            lose(&wire, statement, loss).await;
            let ours =
                format!("select count(*) from outbox_events where idempotency_key = '{key}'");
            eventually("it is swept", async || place.count(&ours).await == 0).await;
            let seen = sink.seen();
            let seen = seen.iter().filter(|seen| seen.text().contains(&format!("\"{key}\"")));
            assert_eq!(seen.count(), 1, "it was delivered before");
        }
    }
    let left = place.rows("select idempotency_key, status from outbox_events").await;
    assert_eq!(left, [[Some("owed".to_owned()), Some("pending".to_owned())]]);
    assert_eq!(place.count("select count(*) from outbox_done").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_dead_replica_left_is_noted_once_in_spite_of_each_loss() {
    let Parts { orders, place, wire, mut gateway } = parts_with(SWEEPS, "", "").await;
    orders.hold();
    let to = gateway.addr;
    tokio::spawn(async move { order("k").send(to).await });
    orders.asked(1).await;
    let other = gateway.restart();
    gateway.kill9();
    lose(&wire, "-- mark_dead\n", Loss::Statement).await;
    // Each of them until one has marked it.
    while place.status_of("k").await.as_deref() != Some("unknown") {
        lose(&wire, "-- mark_dead\n", Loss::Answer).await;
    }
    for loss in BOTH {
        lose(&wire, "-- clear_dead\n", loss).await;
    }
    let told = order("k").to(other.addr).await;
    assert_eq!(told.problem(), "outcome-unknown");
    let noted =
        "select count(*) from oncegate_unknown where orphaned and attempt = 1 and asked = 0";
    assert_eq!(place.count(noted).await, 1);
    assert_eq!(orders.runs(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_doubt_is_told_once_in_spite_of_each_loss() {
    let sink = Sink::start(|_, _| OK).await;
    let more = format!("{}[outbox]\nunknown_events = true\n", fleet::sink(sink.port));
    let Parts { orders, place, wire, gateway } = parts_with(SWEEPS, "", &more).await;
    orders.answer_status(502);
    let told = |kind: &str, record: &str| {
        let message = |seen: &Seen| serde_json::from_slice::<Value>(&seen.body).unwrap();
        let ours = |message: &Value| message["type"] == kind && message["data"]["record"] == record;
        sink.seen().iter().map(message).filter(ours).count()
    };
    let mut doubts = 0;
    for (began, ended) in
        [("-- notices\n", "-- notices\n"), ("-- announce_unknown\n", "-- announce_resolved\n")]
    {
        for loss in BOTH {
            doubts += 1;
            let before = wire.losses();
            wire.lose(began, loss);
            let record = order(&format!("k-{doubts}")).to(gateway.addr).await.record();
            eventually("it is told", async || told("record.unknown", &record) == 1).await;
            wire.lose(ended, loss);
            let (code, _, errors) = tokio::task::block_in_place(|| {
                fleet::command(&gateway, &["records", "release", &record])
            });
            assert_eq!(code, 0, "{errors}");
            eventually("its end is told", async || told("record.resolved", &record) == 1).await;
            assert_eq!(wire.losses(), before + 2, "{began}{ended}{loss:?}");
            assert_eq!(told("record.unknown", &record), 1, "once");
        }
    }
    assert_eq!(place.events().await, 2 * doubts);
    assert_eq!(place.count("select count(*) from oncegate_unknown").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_of_a_delivery_comes_in_time_in_spite_of_each_loss_of_the_timetable() {
    let refusing =
        |_: &Seen, before: usize| if before.is_multiple_of(2) { Act::Answer(500, "") } else { OK };
    let sink = Sink::start(refusing).await;
    let Parts { orders: _orders, place, wire, gateway } =
        parts_with(SWEEPS, "", &fleet::sink(sink.port)).await;
    for (n, loss) in BOTH.into_iter().enumerate() {
        let lost = wire.losses();
        wire.lose("-- next_due\n", loss);
        order(&format!("k-{n}")).to(gateway.addr).await;
        let sent = "select count(*) from outbox_events where status = 'sent' and attempts = 2";
        eventually("it is delivered", async || place.count(sent).await == n as i64 + 1).await;
        assert_eq!((wire.losses(), sink.seen().len()), (lost + 1, 2 * n + 2), "{loss:?}");
    }
}
