//! What the database reports is no doubt: a disk that is full, writes that it does not take, and data that it refuses.
//! Played by triggers that raise the error, on real servers.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use http::StatusCode;
use serde_json::Value;

use crate::support::client::{Ask, get, post};
use crate::support::fleet::{ONE_EVENT, metric, order, sending};
use crate::support::postgres::Cluster;
use crate::support::process::{self, Gateway, eventually};
use crate::support::rig::{self, Place, Rig, Which, on_both_stores};

/// A refusal comes at once, and not when the time for a reservation is over.
const AT_ONCE: Duration = Duration::from_secs(2);

const NO_ROOM: &str = "could not extend file \"base/1/2\": No space left on device";

/// Makes writes of records fail from now on, by the statement or by its commit; see [`fail`].
async fn may_fail(place: &Place) {
    place
        .rows(&format!(
            "CREATE TABLE failing (stage text, code text);
             CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$
             DECLARE raised text;
             BEGIN
                 SELECT code INTO raised FROM failing WHERE stage = tg_argv[0];
                 IF raised IS NOT NULL THEN
                     RAISE EXCEPTION USING ERRCODE = raised, MESSAGE = '{NO_ROOM}',
                         HINT = 'Check free disk space.';
                 END IF;
                 RETURN NEW;
             END $$;
             CREATE TRIGGER fail BEFORE INSERT OR UPDATE ON idempotency_records
                 FOR EACH ROW EXECUTE FUNCTION fail('statement');
             CREATE CONSTRAINT TRIGGER fail_at_the_end AFTER INSERT OR UPDATE ON idempotency_records
                 DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION fail('commit')"
        ))
        .await;
}

async fn fail(place: &Place, stage: &str, code: &str) {
    place.rows(&format!("INSERT INTO failing VALUES ('{stage}', '{code}')")).await;
}

async fn succeed(place: &Place) {
    place.rows("DELETE FROM failing").await;
}

/// What `/readyz` says: its status, and the cause.
async fn readiness(gateway: &Gateway) -> (StatusCode, String) {
    let answer = get("/readyz").to(gateway.admin).await;
    let body: Value = serde_json::from_slice(&answer.body).expect("JSON");
    (answer.status, body["cause"].as_str().unwrap_or_default().to_owned())
}

async fn is_ready(gateway: &Gateway) -> bool {
    readiness(gateway).await.0 == StatusCode::OK
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_that_the_server_reports_is_not_done_and_the_key_is_free_at_once() {
    let Rig { orders, place, gateway } = Rig::start(Which::Postgres, "").await;
    may_fail(&place).await;
    // A full disk, at each of the two ends; out of memory; a quota, which has no code of its own.
    let cases =
        [("statement", "53100"), ("commit", "53100"), ("statement", "53200"), ("commit", "XX000")];
    for (stage, code) in cases {
        let key = format!("{stage}-{code}");
        fail(&place, stage, code).await;
        let begun = Instant::now();
        let refused = order(&key).to(gateway.addr).await;
        assert!(begun.elapsed() < AT_ONCE, "{key}: {:?}", begun.elapsed());
        assert_eq!(refused.problem(), "store-unavailable", "{key}");
        gateway.says(code);
        gateway.says("No space left on device");

        succeed(&place).await;
        let begun = Instant::now();
        assert_eq!(order(&key).to(gateway.addr).await.status, StatusCode::CREATED, "{key}");
        assert!(begun.elapsed() < AT_ONCE, "{key}: {:?}", begun.elapsed());
        assert_eq!(orders.runs_of(&key), 1, "{key}");
    }
}

/// Whoever was in the way has been rolled back, or this was: it is tried again while there is time, and then it was not done.
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_that_is_rolled_back_again_and_again_is_not_done_and_leaves_no_doubt() {
    let (store, policy) = ("reserve_timeout = \"1s\"", "wait = \"100ms\"");
    let rig = Rig::with(Which::Postgres, store, policy, ONE_EVENT).await;
    let Rig { orders, place, gateway } = rig;
    may_fail(&place).await;
    for (stage, code) in [("statement", "40001"), ("commit", "40P01"), ("commit", "40000")] {
        let key = format!("{stage}-{code}");
        fail(&place, stage, code).await;
        assert_eq!(order(&key).to(gateway.addr).await.problem(), "store-unavailable", "{key}");
        succeed(&place).await;
        // At once: nobody is looking for a row that may still come.
        assert_eq!(order(&key).to(gateway.addr).await.status, StatusCode::CREATED, "{key}");
        assert_eq!(orders.runs_of(&key), 1, "{key}");
    }
    // Of 40003 the name says that nobody knows.
    fail(&place, "statement", "40003").await;
    assert_eq!(order("doubt").to(gateway.addr).await.problem(), "store-unavailable");
    assert_eq!(order("doubt").to(gateway.addr).await.problem(), "in-progress");
    succeed(&place).await;

    orders.hold();
    let asked = orders.runs();
    let running = sending(order("completed"), gateway.addr);
    orders.asked(asked + 1).await;
    fail(&place, "commit", "40001").await;
    orders.go();
    let running = running.await.unwrap();
    assert_eq!((running.status, running.header("oncegate-stored")), (StatusCode::CREATED, None));
    succeed(&place).await;
    eventually("what was owed is written", async || {
        place.status_of("completed").await.as_deref() == Some("completed")
    })
    .await;
    assert!(order("completed").to(gateway.addr).await.replayed());
}

#[tokio::test(flavor = "multi_thread")]
async fn on_a_full_disk_many_requests_fill_no_log_and_what_runs_is_kept() {
    let policy = "wait = \"1s\"";
    let Rig { orders, place, gateway } = Rig::with(Which::Postgres, "", policy, ONE_EVENT).await;
    may_fail(&place).await;
    orders.hold();
    let running = sending(order("running"), gateway.addr);
    orders.asked(1).await;
    fail(&place, "statement", "53100").await;
    let begun = Instant::now();
    let refused = join_all((0..200).map(|n| sending(order(&format!("k-{n}")), gateway.addr))).await;
    for answer in refused {
        assert_eq!(answer.unwrap().problem(), "store-unavailable");
    }
    let lines = gateway.log().lines().filter(|line| !line.contains("INFO")).count();
    assert!(lines < 20, "{lines} lines:\n{}", gateway.log());
    orders.go();
    let running = running.await.unwrap();
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    assert_eq!(running.status, StatusCode::CREATED);
    assert_eq!(running.header("oncegate-stored"), None, "it is in the spill");

    succeed(&place).await;
    eventually("what was owed is written", async || {
        place.status_of("running").await.as_deref() == Some("completed")
    })
    .await;
    assert!(order("running").to(gateway.addr).await.replayed());
    for n in 0..20 {
        let key = format!("k-{n}");
        assert_eq!(order(&key).to(gateway.addr).await.status, StatusCode::CREATED, "{key}");
        assert_eq!(orders.runs_of(&key), 1, "{key}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn readiness_says_that_the_database_takes_no_writes_and_why_and_comes_back() {
    let Rig { orders, place, gateway } = Rig::start(Which::Postgres, "").await;
    may_fail(&place).await;
    assert!(is_ready(&gateway).await);
    for stage in ["statement", "commit"] {
        fail(&place, stage, "53100").await;
        assert_eq!(order("k").to(gateway.addr).await.problem(), "store-unavailable");
        let (status, cause) = readiness(&gateway).await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{stage}");
        assert!(cause.contains("No space left on device (SQLSTATE 53100)"), "{cause}");
        // It stays so although nobody sends requests any more.
        tokio::time::sleep(Duration::from_millis(1500)).await;
        assert!(!is_ready(&gateway).await, "{stage}");
        succeed(&place).await;
        eventually("it is ready again", async || is_ready(&gateway).await).await;
    }
    assert_eq!(order("k").to(gateway.addr).await.status, StatusCode::CREATED);
    assert_eq!((orders.runs(), place.records().await), (1, 1), "what was tried leaves nothing");
}

#[tokio::test(flavor = "multi_thread")]
async fn readiness_says_that_the_database_is_read_only() {
    let Rig { orders, place, gateway } = Rig::start(Which::Postgres, "").await;
    let name = place.url.rsplit('/').next().unwrap().to_owned();
    let turn = |to: &str| {
        for sql in [
            format!("ALTER DATABASE {name} SET default_transaction_read_only = {to}"),
            format!(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
            ),
        ] {
            tokio::task::block_in_place(|| Cluster::shared().execute("postgres", &sql));
        }
    };
    turn("on");
    eventually("readiness tells why", async || {
        let (status, cause) = readiness(&gateway).await;
        status == StatusCode::SERVICE_UNAVAILABLE && cause.contains("read-only")
    })
    .await;
    let begun = Instant::now();
    assert_eq!(order("k").to(gateway.addr).await.problem(), "store-unavailable");
    assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
    turn("off");
    eventually("it is ready again", async || is_ready(&gateway).await).await;
    eventually("it serves again", async || {
        order("k").to(gateway.addr).await.status == StatusCode::CREATED
    })
    .await;
    assert_eq!(orders.runs(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_cannot_hold_every_text_is_refused_at_the_start() {
    let create =
        "CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'";
    tokio::task::block_in_place(|| Cluster::shared().execute("postgres", create));
    let place = Place::at(Cluster::shared().url("latin"));
    let config =
        process::config(place.folder.path(), &rig::config(&place, "http://127.0.0.1:9", ""));
    let output = Gateway::try_start(&config).map(drop).unwrap_err();
    for told in ["LATIN1", "CREATE DATABASE", "ENCODING 'UTF8'", "store.url"] {
        assert!(output.contains(told), "{told}: {output}");
    }
}

on_both_stores! {
    a_request_whose_data_the_database_refuses_is_told_so_and_spoils_no_other,
    an_answer_that_the_database_refuses_is_left_out_and_its_events_are_kept,
    an_outcome_that_the_database_refuses_in_every_form_is_unknown_and_stands_in_the_audit_table,
}

/// Makes the database refuse rows of the tenant `bad` where `when` holds.
async fn refuse(place: &Place, which: Which, event: &str, when: &str) {
    match which {
        Which::Postgres => {
            place
                .rows(&format!(
                    "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
                     BEGIN
                         RAISE EXCEPTION USING ERRCODE = '22P05',
                             MESSAGE = 'a character has no equivalent in encoding \"LATIN1\"';
                     END $$;
                     CREATE TRIGGER refuse BEFORE {event} ON idempotency_records FOR EACH ROW
                         WHEN (new.tenant_id = 'bad' AND {when}) EXECUTE FUNCTION refuse()"
                ))
                .await;
        }
        Which::Sqlite => {
            place
                .rows(&format!(
                    "CREATE TRIGGER refuse BEFORE {event} ON idempotency_records
                     WHEN new.tenant_id = 'bad' AND {when}
                     BEGIN SELECT RAISE(ABORT, 'a character has no equivalent'); END"
                ))
                .await;
        }
    }
}

fn of(tenant: &str, key: &str) -> Ask {
    post("/orders", "{}").tenant(tenant).key(key)
}

async fn accept(place: &Place, which: Which) {
    let on = if which == Which::Postgres { " ON idempotency_records" } else { "" };
    place.rows(&format!("DROP TRIGGER refuse{on}")).await;
}

async fn a_request_whose_data_the_database_refuses_is_told_so_and_spoils_no_other(which: Which) {
    let Rig { orders, place, gateway } = Rig::start(which, "").await;
    refuse(&place, which, "INSERT", "1 = 1").await;
    let begun = Instant::now();
    let sent = (0..40).map(|n| {
        let tenant = if n % 4 == 0 { "bad" } else { "good" };
        sending(of(tenant, &format!("k-{n}")), gateway.addr)
    });
    for (n, answer) in join_all(sent.collect::<Vec<_>>()).await.into_iter().enumerate() {
        let (answer, key) = (answer.unwrap(), format!("k-{n}"));
        if n % 4 == 0 {
            assert_eq!(answer.problem(), "request-not-storable", "{answer:?}");
            assert_eq!(answer.status, StatusCode::BAD_REQUEST);
            assert_eq!(answer.json()["retry"], "no");
            assert_eq!(answer.header("retry-after"), None);
            assert_eq!(orders.runs_of(&key), 0, "{key}");
        } else {
            assert_eq!(answer.status, StatusCode::CREATED, "{answer:?}");
        }
    }
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    assert_eq!(place.records().await, 30);
    assert!(is_ready(&gateway).await, "the database takes writes");
    gateway.says("no equivalent");
    accept(&place, which).await;
    let answer = of("bad", "k-0").to(gateway.addr).await;
    assert_eq!(answer.status, StatusCode::CREATED, "the key is free");
}

async fn an_answer_that_the_database_refuses_is_left_out_and_its_events_are_kept(which: Which) {
    let Rig { orders, place, gateway } = Rig::start(which, ONE_EVENT).await;
    refuse(&place, which, "UPDATE", "new.response_body IS NOT NULL").await;
    let sent = ["bad", "good"].map(|tenant| sending(of(tenant, "k"), gateway.addr));
    for answer in join_all(sent).await {
        let answer = answer.unwrap();
        assert_eq!(answer.status, StatusCode::CREATED, "the API's own: {answer:?}");
        assert!(answer.header("oncegate-expires").is_some(), "{answer:?}");
    }
    assert_eq!((orders.runs(), place.events().await), (2, 2), "both are announced");
    let retry = of("bad", "k").to(gateway.addr).await;
    assert_eq!(retry.problem(), "response-not-retained", "{retry:?}");
    assert!(of("good", "k").to(gateway.addr).await.replayed());
    assert_eq!(orders.runs(), 2);
}

async fn an_outcome_that_the_database_refuses_in_every_form_is_unknown_and_stands_in_the_audit_table(
    which: Which,
) {
    let Rig { orders, place, mut gateway } = Rig::start(which, ONE_EVENT).await;
    refuse(&place, which, "UPDATE", "new.status = 'completed'").await;
    let sent = ["bad", "good"].map(|tenant| sending(of(tenant, "k"), gateway.addr));
    let [bad, good] = &join_all(sent).await.into_iter().map(Result::unwrap).collect::<Vec<_>>()[..]
    else {
        panic!("two answers")
    };
    assert_eq!((bad.status, good.status), (StatusCode::CREATED, StatusCode::CREATED));
    assert_eq!(bad.header("oncegate-stored"), Some("false"), "it is not promised");
    assert!(good.header("oncegate-expires").is_some(), "{good:?}");
    let unknown =
        "select count(*) from idempotency_records where tenant_id = 'bad' and status = 'unknown'";
    eventually("its record is unknown", async || place.count(unknown).await == 1).await;
    let noted = "select count(*) from audit_log where action = 'late_outcome' and detail like '%\"status\":201%'";
    eventually("its answer stands in the audit table", async || place.count(noted).await == 1)
        .await;
    eventually("nothing is owed any more", async || {
        metric(gateway.admin, "oncegate_settling").await == 0
    })
    .await;
    let retry = of("bad", "k").to(gateway.addr).await;
    assert_eq!(retry.problem(), "outcome-unknown", "{retry:?}");
    assert_eq!((orders.runs(), place.events().await), (2, 1));
    // Nor does it come again with the next process.
    gateway.terminate();
    assert!(gateway.exited().success());
    let gateway = tokio::task::block_in_place(|| gateway.restart());
    let retry = of("bad", "k").to(gateway.addr).await;
    assert_eq!(retry.problem(), "outcome-unknown", "{retry:?}");
    assert!(!gateway.log().contains("set aside"), "{}", gateway.log());
    assert_eq!(place.count(noted).await, 1);
}
