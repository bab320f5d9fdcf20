//! What keeps the outbox quick and small, and what must not disturb it: statistics of another time, transactions that others
//! hold open, deadlocks, and sweepers.

use std::collections::BTreeMap;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use oncegate::lease::Contact;
use oncegate::record::OwnerId;
use oncegate::store::{
    Acknowledgement, Backlog, Chosen, Claim, Claimed, Lane, Look, OnDead, Operator, Order, Reclaim,
    Store, Verdict,
};
use oncegate::sweep;
use oncegate::telemetry::{Exposition, Metrics};
use tokio::time::Instant;
use tokio_postgres::{Client, NoTls};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::order::{Relay, settings, store, told, write};
use crate::support::eventually;
use crate::support::postgres::{Cluster, command, plans};
use crate::support::process::eventually as happens;
use crate::support::rig::{Place, Which, on_both_stores};
use crate::support::sink::{Act, OK, Sink};

on_both_stores! {
    f51_f52_f53_sweepers_clear_what_is_over_however_much_it_is_and_nothing_else,
}

const LONG: Duration = Duration::from_secs(20);
const MINUTE: Duration = Duration::from_secs(60);
const MS: Duration = Duration::from_millis(1);

async fn client(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

pub(crate) fn claim(order: Order, limit: u32) -> Claim {
    Claim {
        sink: "main".into(),
        lane: Lane::Fresh,
        order,
        limit,
        owner: OwnerId::fresh(),
        lease: MINUTE,
        reclaim: Reclaim::Expired,
        look: Look::Complete,
    }
}

pub(crate) fn sent(claimed: &Claimed) -> Acknowledgement {
    Acknowledgement {
        event_id: claimed.event_id,
        claim_no: claimed.claim_no,
        verdict: Verdict::Sent { status: Some(200) },
    }
}

/// Makes the changes of the queue for which this is true stand still before their commit, until `client` gives its lock up.
async fn close_gate(client: &Client, which: &str) {
    let gate = format!(
        "CREATE FUNCTION gate() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN
             IF {which} THEN PERFORM pg_advisory_xact_lock(42); END IF;
             RETURN NULL;
         END $$;
         CREATE TRIGGER gate AFTER UPDATE ON outbox_queue
             FOR EACH STATEMENT EXECUTE FUNCTION gate();
         SELECT pg_advisory_lock(42)"
    );
    client.batch_execute(&gate).await.unwrap();
}

/// From now on each new session's statements are logged with the pages that they touch.
async fn tell_plans(client: &Client, database: &str) {
    for setting in [
        "session_preload_libraries = auto_explain",
        "auto_explain.log_min_duration = 0",
        "auto_explain.log_analyze = on",
        "auto_explain.log_timing = off",
        "auto_explain.log_buffers = on",
    ] {
        client.batch_execute(&format!("ALTER DATABASE {database} SET {setting}")).await.unwrap();
    }
}

/// What the server's log says of the pages that each run of a statement touched.
fn pages(log: &str, database: &str, statement: &str) -> Vec<u64> {
    let plans = plans(log, database).into_iter();
    let mine = plans.filter(|plan| plan.contains(&format!("-- {statement}\n")));
    let touched = |plan: String| {
        // The first line of buffers is that of the whole plan.
        let line = plan.lines().find(|line| line.trim_start().starts_with("Buffers: shared"))?;
        let count = |what: &str| -> u64 {
            let rest = line.split(&format!("{what}=")).nth(1);
            rest.map_or(0, |rest| rest.split([' ', ',']).next().unwrap().parse().unwrap())
        };
        Some(count("hit") + count("read"))
    };
    mine.filter_map(touched).collect()
}

/// Checks that each run of these statements touched so many pages at most.
fn touch_at_most(database: &str, bounds: &[(&str, u64)]) {
    let log = Cluster::shared().log();
    for (statement, most) in bounds {
        let touched = pages(&log, database, statement);
        assert!(!touched.is_empty(), "no plan of {statement}");
        assert!(touched.iter().all(|pages| pages <= most), "{statement}: {touched:?}");
    }
}

/// A store whose rows of before are all gone, which somebody's snapshot still sees, and whose sessions tell their plans; that
/// snapshot, and a session of its own.
async fn beside_a_snapshot(place: &Place, rows: &str) -> (Arc<dyn Store>, Client, Client) {
    drop(store(place).await);
    let (db, snapshot) = (client(&place.url).await, client(&place.url).await);
    let look = "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM outbox_queue";
    snapshot.batch_execute(look).await.unwrap();
    db.batch_execute(rows).await.unwrap();
    for vacuum in ["VACUUM ANALYZE outbox_queue", "VACUUM ANALYZE outbox_turns"] {
        db.batch_execute(vacuum).await.unwrap();
    }
    tell_plans(&db, database(place)).await;
    (store(place).await, snapshot, db)
}

fn database(place: &Place) -> &str {
    place.url.rsplit('/').next().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn f14_f47_a_claim_takes_what_it_asks_for_and_reads_little_whatever_statistics_say() {
    let place = Place::new(Which::Postgres).await;
    drop(store(&place).await);
    let db = client(&place.url).await;
    let database = place.url.rsplit('/').next().unwrap();
    // The statistics are of an empty queue that has been full: almost no rows on many pages.
    db.batch_execute(
        "ALTER TABLE outbox_queue SET (autovacuum_enabled = off);
         ALTER TABLE outbox_messages SET (autovacuum_enabled = off);
         ALTER TABLE outbox_done SET (autovacuum_enabled = off)",
    )
    .await
    .unwrap();
    write(&place, Which::Postgres, 0..30_000, "CASE WHEN n % 2 = 0 THEN 'k' || (n % 500) END")
        .await;
    db.batch_execute(
        "INSERT INTO outbox_done (event_id, sink, outcome, claim_no, attempts, finished_at)
         SELECT event_id, sink, CASE WHEN get_byte(uuid_send(event_id), 15) = 0 THEN 'dead' ELSE 'sent' END,
                1, 1, now() FROM outbox_queue;
         DELETE FROM outbox_queue WHERE event_id <> (SELECT max(event_id::text)::uuid FROM outbox_queue);
         UPDATE outbox_queue SET sink = 'other'",
    )
    .await
    .unwrap();
    db.batch_execute("VACUUM ANALYZE outbox_queue").await.unwrap();
    db.batch_execute("VACUUM ANALYZE outbox_done").await.unwrap();
    let remembered = "select (relpages > 500 and reltuples < 10)::int from pg_class
        where relname = 'outbox_queue'";
    assert_eq!(place.count(remembered).await, 1);
    write(&place, Which::Postgres, 30_000..60_000, "CASE WHEN n % 2 = 0 THEN 'k' || (n % 500) END")
        .await;
    tell_plans(&db, database).await;
    let store = store(&place).await;
    let free = Order::Key(OnDead::Free);
    let leased = "select count(*) from outbox_queue where lease_until > clock_timestamp()";
    let mut all = 0;
    let (all_due, middle) = (Look::Complete, Look::From(u16::MAX / 2));
    for (order, limit, look) in [
        // Whoever is first reads the catalogue, too.
        (Order::None, 1, all_due),
        (Order::None, 1, all_due),
        (Order::None, 64, all_due),
        (Order::None, 64, middle),
        (free, 1, all_due),
        (free, 64, all_due),
        (free, 64, all_due),
    ] {
        let claimed = store.claim(&Claim { look, ..claim(order, limit) }).await.unwrap();
        assert_eq!(claimed.len(), limit as usize);
        all += i64::from(limit);
        assert_eq!(place.count(leased).await, all, "no more than asked for is claimed");
        let verdicts: Vec<_> = claimed.iter().map(sent).collect();
        let written = store.acknowledge("main", order, &verdicts).await.unwrap();
        assert_eq!(written.len(), limit as usize);
        all -= i64::from(limit);
    }
    drop(store);
    let log = Cluster::shared().log();
    // A few pages for each event: its row, four indexes, its message. The queue alone has a thousand.
    let bounds = [
        ("claim", 64 * 30),
        ("place_of_claim", 60),
        ("claim_window", 256 * 12),
        ("claim_in_order", 256 * 30),
        ("wake", 64 * 30),
        ("finish", 64 * 30),
    ];
    touch_at_most(database, &bounds);
    let one = pages(&log, database, "claim");
    assert!(one.iter().any(|pages| *pages < 60), "for one event: {one:?}");
}

/// What was delivered leaves its entries in the indexes as long as anybody may still want to see it. No look for fresh events
/// walks over them, and none that asks when to look again.
#[tokio::test(flavor = "multi_thread")]
async fn f46_a_snapshot_that_is_held_for_long_makes_no_look_for_fresh_events_longer() {
    // The statistics are of the empty tables, or autovacuum makes them anew all the while.
    for anew in [false, true] {
        look_beside_a_snapshot(anew).await;
    }
}

async fn look_beside_a_snapshot(anew: bool) {
    let place = Place::new(Which::Postgres).await;
    let (store, snapshot, db) = beside_a_snapshot(
        &place,
        "INSERT INTO outbox_queue (event_id, sink, lane, next_attempt_at, ordering_key, created_at)
         SELECT gen_random_uuid(), 'main', n % 2, at, CASE WHEN n % 4 = 0 THEN 'k' || n % 500 END, at
         FROM generate_series(1, 40000) AS n, LATERAL (SELECT clock_timestamp() - interval '1 minute' AS at) AS a;
         DELETE FROM outbox_queue;
         INSERT INTO outbox_turns (sink, ordering_key, event_id, lease_until)
         SELECT 'main', 'k' || n, gen_random_uuid(), '-infinity' FROM generate_series(1, 40000) AS n;
         DELETE FROM outbox_turns",
    )
    .await;
    let database = database(&place);
    let free = Order::Key(OnDead::Free);
    let looks = [(Order::None, 64), (free, 64), (Order::None, 1), (free, 1)];
    for (number, (order, limit)) in (0..).zip(looks) {
        let fresh = number * 100..(number + 1) * 100;
        write(&place, Which::Postgres, fresh, "CASE WHEN n % 10 <> 0 THEN 'k' || n END").await;
        if anew {
            db.batch_execute("ANALYZE outbox_queue").await.unwrap();
        }
        let look = Claim { look: Look::Quick, ..claim(order, limit) };
        let claimed = store.claim(&look).await.unwrap();
        assert_eq!(claimed.len(), limit as usize);
        let none = store.claim(&Claim { lane: Lane::Retry, ..look }).await.unwrap();
        assert!(none.is_empty());
        assert!(store.next_due("main").await.unwrap().is_some());
        let mut verdicts: Vec<_> = claimed.iter().map(sent).collect();
        if anew {
            db.batch_execute("ANALYZE outbox_turns").await.unwrap();
        }
        let mut last = verdicts.pop().unwrap();
        last.verdict = Verdict::GivenBack;
        store.acknowledge("main", order, &verdicts).await.unwrap();
        store.acknowledge("main", order, &[last]).await.unwrap();
    }
    let bounds = [
        ("claim", 64 * 30),
        ("claim_window", 256 * 12),
        ("claim_in_order", 256 * 30),
        ("next_due", 1000),
        ("lock_turns", 64 * 30),
        ("end_turns", 64 * 30),
        ("wake", 64 * 30),
        ("finish", 64 * 30),
        ("free", 64 * 30),
    ];
    touch_at_most(database, &bounds);
    // The complete look walks over all of it, until the snapshot is given up: no more than once in a while.
    let sweep = async || {
        let before = pages(&Cluster::shared().log(), database, "claim").len();
        let claimed = store.claim(&claim(Order::None, 1)).await.unwrap();
        assert_eq!(claimed.len(), 1);
        pages(&Cluster::shared().log(), database, "claim")[before]
    };
    let held = sweep().await;
    assert!(held > 10_000, "there is nothing to walk over: {held}");
    snapshot.batch_execute("COMMIT").await.unwrap();
    db.batch_execute("VACUUM outbox_queue").await.unwrap();
    let after = sweep().await;
    assert!(after < 1_000, "it is as before: {after}");
}

/// What was delivered of a key stands before its next event as long as anybody may still want to see it. A claim walks over it
/// for each key, however many events of the key it looks at.
#[tokio::test(flavor = "multi_thread")]
async fn f46_what_a_snapshot_keeps_of_a_key_is_not_walked_over_for_each_of_its_events() {
    let place = Place::new(Which::Postgres).await;
    let (store, snapshot, _db) = beside_a_snapshot(
        &place,
        "INSERT INTO outbox_queue (event_id, sink, next_attempt_at, ordering_key, created_at)
         SELECT gen_random_uuid(), 'main', at, 'k' || n % 40, at
         FROM generate_series(1, 20000) AS n, LATERAL (SELECT clock_timestamp() - interval '1 minute' AS at) AS a;
         DELETE FROM outbox_queue;
         DO $$ BEGIN
             FOR n IN 1..500 LOOP
                 INSERT INTO outbox_turns (sink, ordering_key, event_id, lease_until)
                 SELECT 'main', 'k' || k, gen_random_uuid(), '-infinity' FROM generate_series(0, 39) AS k;
                 DELETE FROM outbox_turns;
             END LOOP;
         END $$",
    )
    .await;
    let free = Order::Key(OnDead::Free);
    write(&place, Which::Postgres, 0..1000, "'k' || (n % 40)").await;
    for _ in 0..3 {
        let claimed = store.claim(&claim(free, 64)).await.unwrap();
        assert_eq!(claimed.len(), 40);
        let verdicts: Vec<_> = claimed.iter().map(sent).collect();
        assert_eq!(store.acknowledge("main", free, &verdicts).await.unwrap().len(), 40);
    }
    // Of each kind of row 20,000 at most; a turn that is taken is looked for twice more.
    let bounds = [
        ("claim_in_order", 20_000 + 3 * 20_000 + 256 * 30),
        ("lock_turns", 20_000),
        ("end_turns", 20_000),
        ("wake", 20_000 + 64 * 30),
    ];
    touch_at_most(database(&place), &bounds);
    snapshot.batch_execute("COMMIT").await.unwrap();
}

/// Behind one event stand very many of its key, beside what was delivered long ago: neither is walked over.
#[tokio::test(flavor = "multi_thread")]
async fn f28_f51_neither_a_crowd_behind_one_event_nor_what_was_delivered_makes_anything_longer() {
    let place = Place::new(Which::Postgres).await;
    drop(store(&place).await);
    let db = client(&place.url).await;
    let database = place.url.rsplit('/').next().unwrap();
    // Delivered; then a head that is tried again later, with those that were deferred because of it.
    db.batch_execute(
        "INSERT INTO outbox_messages (id, event_key, seq, event_type, tenant_id, operation,
             idempotency_key, record_id, ordering_key, payload, created_at)
         SELECT gen_random_uuid(), 'old' || n, 0, 'a', 't', 'o', 'k' || n, gen_random_uuid(), 'crowd', '', now()
         FROM generate_series(1, 60000) AS n;
         INSERT INTO outbox_done (event_id, sink, outcome, claim_no, attempts, finished_at)
         SELECT id, 'main', 'sent', 1, 1, now() FROM outbox_messages",
    )
    .await
    .unwrap();
    write(&place, Which::Postgres, 0..40_000, "'crowd'").await;
    place.rows("UPDATE outbox_queue SET next_attempt_at = now() + interval '5 minutes'").await;
    place
        .rows(
            "UPDATE outbox_queue SET next_attempt_at = clock_timestamp() - interval '1 second'
             WHERE event_id = '00000000-0000-4000-8000-000000000000'",
        )
        .await;
    write(&place, Which::Postgres, 40_000..40_200, "'k' || n").await;
    db.batch_execute("VACUUM ANALYZE outbox_queue").await.unwrap();
    tell_plans(&db, database).await;
    let store = store(&place).await;
    let free = Order::Key(OnDead::Free);
    let claimed = store.claim(&claim(free, 64)).await.unwrap();
    assert_eq!(claimed.len(), 64);
    let head = claimed.iter().find(|event| event.event_id.as_u128() & 0xffff_ffff_ffff == 0);
    let head = head.expect("the head of the crowd").clone();
    store.next_due("main").await.unwrap();
    let verdicts: Vec<_> = claimed.iter().map(sent).collect();
    assert_eq!(store.acknowledge("main", free, &verdicts).await.unwrap().len(), 64);
    let by = Operator { who: "olga".into(), why: None };
    let this = Chosen::One { id: head.event_id, sink: None };
    assert_eq!(store.redeliver(&this, &by).await.unwrap().count, 1, "once more");
    let next = store.claim(&Claim { look: Look::Quick, ..claim(free, 64) }).await.unwrap();
    assert_eq!(next.len(), 64, "the next of the crowd, and others");
    let bounds = [
        ("claim_window", 256 * 12),
        ("claim_in_order", 256 * 30),
        ("next_due", 1000),
        ("wake", 64 * 30),
        ("finish", 64 * 30),
        ("redeliver_one", 500),
    ];
    touch_at_most(database, &bounds);
}

#[tokio::test(flavor = "multi_thread")]
async fn f02_f03_a_transaction_that_stays_open_holds_up_nothing_but_its_own_events() {
    let place = Place::new(Which::Postgres).await;
    let store = store(&place).await;
    let sink = Sink::start(|_, _| OK).await;
    // Its time is long before those of the others, and nobody sees it yet.
    let (mut late, mut elsewhere) =
        (client(&place.url).await, client(&Cluster::shared().database()).await);
    let other = elsewhere.transaction().await.unwrap();
    other.batch_execute("CREATE TABLE held (n int)").await.unwrap();
    let held = late.transaction().await.unwrap();
    held.batch_execute(
        "INSERT INTO outbox_messages (id, event_key, seq, event_type, tenant_id, operation,
             idempotency_key, record_id, payload, created_at)
         SELECT gen_random_uuid(), 'late', 0, 'late', 't', 'o', 'k', gen_random_uuid(),
             '{\"k\":\"late\",\"n\":0}', clock_timestamp() - interval '1 minute';
         INSERT INTO outbox_queue (event_id, sink, next_attempt_at, created_at)
         SELECT id, 'main', created_at, created_at FROM outbox_messages",
    )
    .await
    .unwrap();
    write(&place, Which::Postgres, 0..300, "NULL::text").await;
    let relay = Relay::start(&store, settings(&sink, Order::None));
    eventually("all others", LONG, || sink.seen().len() == 300).await;
    let begun = Instant::now();
    held.commit().await.unwrap();
    eventually("the late one", LONG, || sink.seen().len() == 301).await;
    // One complete look, five seconds after the last at most.
    assert!(begun.elapsed() < Duration::from_secs(7), "{:?}", begun.elapsed());
    drop(other);
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f03_pending_events_of_a_dump_are_delivered_by_the_cluster_it_is_restored_to() {
    let (from, to) = (Place::new(Which::Postgres).await, Cluster::own());
    drop(store(&from).await);
    write(&from, Which::Postgres, 0..20, "'k' || (n % 2)").await;
    // Transactions of the old cluster lie in the future of the new one.
    let url = to.database();
    let mut dump = command("pg_dump").arg(&from.url).stdout(Stdio::piped()).spawn().unwrap();
    let restore = command("psql")
        .args(["-qX", "-v", "ON_ERROR_STOP=1", &url])
        .stdin(dump.stdout.take().unwrap())
        .stdout(Stdio::null())
        .status()
        .unwrap();
    assert!(restore.success() && dump.wait().unwrap().success());
    let (place, sink) = (Place::at(url), Sink::start(|_, _| OK).await);
    let store = store(&place).await;
    let relay = Relay::start(&store, settings(&sink, Order::Key(OnDead::Free)));
    eventually("all arrived", LONG, || sink.ids().len() == 20).await;
    relay.stop().await;
    assert_eq!(place.count("select count(*) from outbox_queue").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn f27_what_is_written_while_a_verdict_looks_for_the_next_is_not_put_off() {
    let place = Place::new(Which::Postgres).await;
    let store = store(&place).await;
    let order = Order::Key(OnDead::Free);
    write(&place, Which::Postgres, 0..1, "'k'").await;
    let first = store.claim(&claim(order, 9)).await.unwrap().remove(0);
    // The verdict stands still after its look, before its commit.
    let gate = client(&place.url).await;
    close_gate(&gate, "current_query() LIKE '-- wake%'").await;
    let verdict = sent(&first);
    let slow = Arc::clone(&store);
    let task = tokio::spawn(async move { slow.acknowledge("main", order, &[verdict]).await });
    let waits = "select count(*) from pg_stat_activity where wait_event = 'advisory'
        and datname = current_database()";
    happens("it stands still", async || place.count(waits).await == 1).await;
    write(&place, Which::Postgres, 1..2, "'k'").await;
    assert!(store.claim(&claim(order, 9)).await.unwrap().is_empty(), "the first is not gone yet");
    gate.batch_execute("SELECT pg_advisory_unlock(42)").await.unwrap();
    assert_eq!(task.await.unwrap().unwrap(), [first.event_id]);
    assert_eq!(store.claim(&claim(order, 9)).await.unwrap().len(), 1, "it is due at once");
}

#[tokio::test(flavor = "multi_thread")]
async fn f27_what_is_put_off_while_the_one_before_it_ends_is_woken_all_the_same() {
    let place = Place::new(Which::Postgres).await;
    let store = store(&place).await;
    let order = Order::Key(OnDead::Free);
    write(&place, Which::Postgres, 0..2, "'k'").await;
    let gate = client(&place.url).await;
    // The first is tried again later; whoever looks first stands still before his commit, when he has deferred the second.
    gate.batch_execute(
        "UPDATE outbox_queue SET lane = 1, next_attempt_at = now() + interval '1 hour'
         WHERE event_id = '00000000-0000-4000-8000-000000000000';
         CREATE SEQUENCE looks",
    )
    .await
    .unwrap();
    close_gate(&gate, "current_query() LIKE '-- claim_in_order%' AND nextval('looks') = 1").await;
    let looking = Arc::clone(&store);
    let look = tokio::spawn(async move { looking.claim(&claim(order, 9)).await });
    let waits = |on: &str| {
        format!(
            "select count(*) from pg_stat_activity where wait_event_type = 'Lock'
             and datname = current_database() and query like '-- {on}%'"
        )
    };
    let stands = waits("claim_in_order");
    happens("the look stands still", async || place.count(&stands).await == 1).await;
    place.rows("update outbox_queue set next_attempt_at = now() where lane = 1").await;
    let retry = Claim { lane: Lane::Retry, ..claim(order, 9) };
    let first = store.claim(&retry).await.unwrap().remove(0);
    let verdict = sent(&first);
    let slow = Arc::clone(&store);
    let task = tokio::spawn(async move { slow.acknowledge("main", order, &[verdict]).await });
    let stands = waits("wake");
    happens("the verdict waits for it", async || place.count(&stands).await == 1).await;
    gate.batch_execute("SELECT pg_advisory_unlock(42)").await.unwrap();
    assert!(look.await.unwrap().unwrap().is_empty(), "the first was not due");
    assert_eq!(task.await.unwrap().unwrap(), [first.event_id]);
    assert_eq!(store.claim(&claim(order, 9)).await.unwrap().len(), 1, "it is due at once");
}

#[tokio::test(flavor = "multi_thread")]
async fn f48_a_deadlock_in_claim_or_verdict_is_repeated_and_costs_no_delivery() {
    for order in [Order::None, Order::Key(OnDead::Free)] {
        let place = Place::new(Which::Postgres).await;
        let store = store(&place).await;
        let sink = Sink::start(|_, _| OK).await;
        write(&place, Which::Postgres, 0..60, "'k' || (n % 6)").await;
        // Each third change of the queue ends as if it were the victim of a deadlock, or could not be serialized.
        let db = client(&place.url).await;
        db.batch_execute(
            "CREATE SEQUENCE trips;
             CREATE FUNCTION trip() RETURNS trigger LANGUAGE plpgsql AS $$
             DECLARE n bigint := nextval('trips');
             BEGIN
                 IF n % 3 = 0 THEN
                     RAISE EXCEPTION USING ERRCODE = CASE WHEN n % 2 = 0 THEN '40P01' ELSE '40001' END;
                 END IF;
                 RETURN NULL;
             END $$;
             CREATE TRIGGER trip BEFORE UPDATE OR DELETE ON outbox_queue
                 FOR EACH STATEMENT EXECUTE FUNCTION trip();",
        )
        .await
        .unwrap();
        let relay = Relay::start(&store, settings(&sink, order));
        let owed = "select count(*) from outbox_queue";
        happens("all are delivered", async || place.count(owed).await == 0).await;
        relay.stop().await;
        assert_eq!((sink.seen().len(), sink.ids().len()), (60, 60), "{order:?}: each once");
        assert!(place.count("select last_value from trips").await > 9, "there were some");
        let claims = "select count(*) from outbox_done where claim_no = 1 and outcome = 'sent'";
        assert_eq!(place.count(claims).await, 60);
    }
}

/// Sixteen relays, two operators and two sweepers at once, on a database that breaks off every eleventh of their statements.
#[tokio::test(flavor = "multi_thread")]
async fn f48_relays_operators_and_sweepers_who_break_each_other_off_lose_nothing_and_double_nothing()
 {
    const KEYS: usize = 50;
    const EVENTS: u32 = 600;
    let order = Order::Key(OnDead::Free);
    let place = Place::new(Which::Postgres).await;
    let mut stores = vec![store(&place).await];
    for _ in 0..3 {
        stores.push(store(&place).await);
    }
    let sink = Sink::start(|_, _| OK).await;
    write(&place, Which::Postgres, 0..EVENTS, &format!("'k' || (n % {KEYS})")).await;
    let db = client(&place.url).await;
    db.batch_execute(
        "CREATE SEQUENCE trips;
         CREATE FUNCTION trip() RETURNS trigger LANGUAGE plpgsql AS $$
         DECLARE n bigint := nextval('trips');
         BEGIN
             IF n % 11 = 0 THEN
                 RAISE EXCEPTION USING ERRCODE = CASE WHEN n % 2 = 0 THEN '40P01' ELSE '40001' END;
             END IF;
             RETURN NULL;
         END $$;
         CREATE TRIGGER trip BEFORE UPDATE OR DELETE OR INSERT ON outbox_queue
             FOR EACH STATEMENT EXECUTE FUNCTION trip();
         CREATE TRIGGER trip BEFORE DELETE ON outbox_messages
             FOR EACH STATEMENT EXECUTE FUNCTION trip();",
    )
    .await
    .unwrap();
    let relays: Vec<_> =
        (0..16).map(|n| Relay::start(&stores[n % 4], settings(&sink, order))).collect();
    let stop = CancellationToken::new();
    for store in &stores[..2] {
        drop(sweeper(store, 300 * MS, 500, &stop));
    }
    // What was delivered is asked for once more, as far as it is there.
    let again = stores[2..].iter().enumerate().map(|(n, store)| {
        let (store, stop) = (Arc::clone(store), stop.clone());
        tokio::spawn(async move {
            let by = Operator { who: "olga".into(), why: None };
            let mut asked = BTreeMap::<String, u64>::new();
            for event in (n as u128..u128::from(EVENTS)).step_by(7) {
                let id = Uuid::from_u128(0x0000_0000_0000_4000_8000_0000_0000_0000 | event);
                let chosen = Chosen::One { id, sink: Some("main".into()) };
                let done = store.redeliver(&chosen, &by).await;
                *asked.entry(id.to_string()).or_default() += done.map_or(1, |done| done.count);
                if stop.is_cancelled() {
                    break;
                }
            }
            asked
        })
    });
    let mut most = BTreeMap::<String, u64>::new();
    for operator in again.collect::<Vec<_>>() {
        for (id, times) in operator.await.unwrap() {
            *most.entry(id).or_default() += times;
        }
    }
    let owed = "select count(*) from outbox_messages";
    happens("all are delivered and cleared away", async || place.count(owed).await == 0).await;
    stop.cancel();
    for relay in relays {
        relay.stop().await;
    }
    assert!(place.count("select last_value from trips").await > 100, "there were some");
    let mut times = BTreeMap::<String, u64>::new();
    let mut last = BTreeMap::<String, u64>::new();
    for seen in sink.seen() {
        let count = times.entry(seen.id()).or_default();
        *count += 1;
        let (key, n) = told(&seen);
        if *count == 1 {
            let before = last.insert(key.clone(), n);
            assert!(before.is_none_or(|before| before < n), "{n} of {key} after {before:?}");
        }
    }
    assert_eq!(times.len(), EVENTS as usize, "none is lost");
    for (id, count) in &times {
        let asked = most.get(id).copied().unwrap_or(0);
        assert!(*count <= 1 + asked, "{id} came {count} times, and was asked for {asked} times");
    }
    assert_eq!(sink.most().1, 1, "never two of one event at once");
}

#[tokio::test(flavor = "multi_thread")]
async fn f49_f50_no_transaction_is_open_during_a_delivery_and_nobody_notifies() {
    let place = Place::new(Which::Postgres).await;
    let db = client(&place.url).await;
    let database = place.url.rsplit('/').next().unwrap();
    let timeout =
        format!("ALTER DATABASE {database} SET idle_in_transaction_session_timeout = '300ms'");
    db.batch_execute(&timeout).await.unwrap();
    let store = store(&place).await;
    let sink = Sink::start(|_, _| Act::After(700 * MS, Box::new(OK))).await;
    write(&place, Which::Postgres, 0..20, "'k' || n").await;
    let relay = Relay::start(&store, settings(&sink, Order::Key(OnDead::Free)));
    let open = "select count(*) from pg_stat_activity where application_name = 'oncegate'
        and datname = current_database() and state like 'idle in transaction%'
        and state_change < clock_timestamp() - interval '100 milliseconds'";
    let sent = "select count(*) from outbox_done where outcome = 'sent'";
    happens("all are delivered", async || {
        assert_eq!(place.count(open).await, 0, "a transaction stays open");
        place.count(sent).await == 20
    })
    .await;
    relay.stop().await;
    assert_eq!(sink.seen().len(), 20);
    let ours = concat!(env!("CARGO_MANIFEST_DIR"), "/migrations/postgres");
    for file in std::fs::read_dir(ours).unwrap() {
        let text = std::fs::read_to_string(file.unwrap().path()).unwrap().to_lowercase();
        assert!(!text.contains("pg_notify") && !text.contains("notify "), "a write that notifies");
    }
}

/// A sweeper of a process without a relay or a sink.
fn sweeper(
    store: &Arc<dyn Store>,
    retention: Duration,
    batch: u32,
    stop: &CancellationToken,
) -> Arc<Metrics> {
    let settings = sweep::Settings {
        outbox_retention: retention,
        unknown_events: None,
        sinks: Vec::new(),
        every: 50 * MS,
        batch,
        duty: sweep::Duty::All,
        backlog: Backlog::default(),
    };
    let contact = Contact::sole(Instant::now().into_std());
    let metrics = Arc::new(Metrics::default());
    let counted = Arc::clone(&metrics);
    tokio::spawn(sweep::run(Arc::clone(store), settings, contact, counted, stop.clone()));
    metrics
}

/// What a sweeper that was off for long finds, and what comes in meanwhile: it catches up, and tells by how much it is behind.
#[tokio::test(flavor = "multi_thread")]
async fn f52_what_has_piled_up_is_worked_off_while_more_comes_and_the_lag_is_told() {
    let place = Place::new(Which::Postgres).await;
    let store = store(&place).await;
    let over = |from: u32, to: u32| {
        format!(
            "WITH m AS (
               INSERT INTO outbox_messages (id, event_key, seq, event_type, tenant_id, operation,
                 idempotency_key, record_id, payload, created_at)
               SELECT gen_random_uuid(), 'old' || n, 0, 'a', 't', 'o', 'k' || n, gen_random_uuid(), '',
                 now() - interval '2 hours' FROM generate_series({from}, {to}) AS n RETURNING id)
             INSERT INTO outbox_done (event_id, sink, outcome, claim_no, attempts, finished_at)
             SELECT id, 'main', 'sent', 1, 1, now() - interval '2 hours' FROM m"
        )
    };
    place.rows(&over(1, 20_000)).await;
    // Each batch takes a while, whatever the machine: longer than two rounds, all of it.
    let db = client(&place.url).await;
    db.batch_execute(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN PERFORM pg_sleep(0.15); RETURN NULL; END $$;
         CREATE TRIGGER slow AFTER DELETE ON outbox_messages
             FOR EACH STATEMENT EXECUTE FUNCTION slow();",
    )
    .await
    .unwrap();
    let stop = CancellationToken::new();
    let metrics = sweeper(&store, Duration::from_secs(3600), 500, &stop);
    let behind = || {
        let text = metrics.render(Exposition::Prometheus);
        let line = text.lines().find(|line| line.starts_with("oncegate_sweep_behind_seconds "));
        line.unwrap().rsplit(' ').next().unwrap().parse::<f64>().unwrap()
    };
    // Two hundred a second, for as long as it takes.
    let (url, ended) = (place.url.clone(), stop.clone());
    let inflow = tokio::spawn(async move {
        let inflow = client(&url).await;
        let (mut written, mut tick) = (20_000, tokio::time::interval(50 * MS));
        while !ended.is_cancelled() {
            tick.tick().await;
            inflow.batch_execute(&over(written + 1, written + 10)).await.unwrap();
            written += 10;
        }
    });
    eventually("it says that it is behind", LONG, || behind() > 2.5).await;
    db.batch_execute("DROP TRIGGER slow ON outbox_messages").await.unwrap();
    let left = "select count(*) from outbox_messages";
    happens("it has caught up", async || place.count(left).await < 1000).await;
    eventually("it says so", LONG, || behind() == 0.0).await;
    stop.cancel();
    inflow.await.unwrap();
}

async fn f51_f52_f53_sweepers_clear_what_is_over_however_much_it_is_and_nothing_else(which: Which) {
    let place = Place::new(which).await;
    let store = store(&place).await;
    write(&place, which, 0..12_000, "'k'").await;
    let (old, new) = match which {
        Which::Postgres => ("now() - interval '2 hours'", "now() - interval '1 minute'"),
        Which::Sqlite => ("(unixepoch() - 7200) * 1000000", "(unixepoch() - 60) * 1000000"),
    };
    // All were written long ago. One of hundred is owed; of the others one is dead, one was delivered only now, and one is
    // owed to a second sink.
    for statement in [
        format!("UPDATE outbox_messages SET created_at = {old}"),
        format!(
            "INSERT INTO outbox_done (event_id, sink, outcome, claim_no, attempts, finished_at)
             SELECT id, 'main', CASE WHEN event_key LIKE '%01' THEN 'dead' ELSE 'sent' END, 1, 1,
                    CASE WHEN event_key LIKE '%02' THEN {new} ELSE {old} END
             FROM outbox_messages WHERE event_key NOT LIKE '%00'"
        ),
        "DELETE FROM outbox_queue WHERE event_id IN (SELECT event_id FROM outbox_done)".to_owned(),
        "INSERT INTO outbox_queue (event_id, sink, next_attempt_at, seq, created_at)
         SELECT id, 'second', created_at, seq, created_at FROM outbox_messages
         WHERE event_key LIKE '%03'"
            .to_owned(),
    ] {
        place.rows(&statement).await;
    }
    let kept = "select count(*) from outbox_messages where event_key like '%00'
        or event_key like '%01' or event_key like '%02' or event_key like '%03'";
    let kept = place.count(kept).await;
    let stop = CancellationToken::new();
    let begun = Instant::now();
    for _ in 0..2 {
        drop(sweeper(&store, Duration::from_secs(3600), 500, &stop));
    }
    if which == Which::Postgres {
        // One dies in the middle, several times.
        for _ in 0..5 {
            place
                .rows(
                    "select pg_terminate_backend(pid) from pg_stat_activity
                     where datname = current_database() and query like '-- %old_events%'",
                )
                .await;
        }
    }
    let left = "select count(*) from outbox_messages";
    happens("all that is over is gone", async || place.count(left).await <= kept).await;
    assert!(begun.elapsed() < LONG, "{:?}", begun.elapsed());
    stop.cancel();
    assert_eq!(place.count(left).await, kept, "nothing else is gone");
    let torn =
        "select count(*) from outbox_done where event_id not in (select id from outbox_messages)";
    assert_eq!(place.count(torn).await, 0);
    let done = "select count(*) from outbox_done";
    let ended = "select count(*) from outbox_messages where event_key not like '%00'";
    assert_eq!(place.count(done).await, place.count(ended).await, "with how they ended");
}
