//! What is particular to Postgres: its log, its plans, its in-place updates, its migrations and its lost answers.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode};
use oncegate::record::event::Event;
use oncegate::record::{
    Answer, Attempt, Fence, Fingerprint, KeptBody, Key, Operation, OwnerId, RecordId, Scope,
    Spelling, State, Status, Tenant,
};
use oncegate::store::postgres::access::{Access, Additions};
use oncegate::store::postgres::{Postgres, Settings};
use oncegate::store::{
    Acknowledgement, Changed, Chosen, Claim, Completion, DeadFilter, Error, EventFilter,
    EventStatus, Heartbeat, Lane, Look, Objection, OpenError, Operator, Operators, Order, Outbox,
    Proposal, Reclaim, RecordFilter, Records, Reinstated, Reserved, ScanFrom, Settled, Takeover,
    Verdict,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_postgres::{Client, NoTls};
use uuid::Uuid;

use crate::support::postgres::{Cluster, plans};

const LEASE: Duration = Duration::from_secs(60);
const DAY: Duration = Duration::from_secs(86_400);

/// What a URL says alone.
pub(crate) fn access(url: &str) -> Access {
    Access::read(url, &Additions::default()).unwrap().0
}

pub(crate) fn settings(url: &str) -> Settings {
    Settings {
        access: access(url),
        connections: 8,
        statement_timeout: Duration::from_secs(20),
        connect_timeout: Duration::from_secs(5),
    }
}

/// A store on a fresh, migrated database.
async fn fresh() -> (Postgres, String) {
    let url = Cluster::shared().database();
    let store = Postgres::open(settings(&url)).await.unwrap();
    store.migrate(true).await.unwrap();
    (store, url)
}

/// A store on a fresh, migrated database, for the checks that every store passes.
pub(crate) async fn open() -> Arc<dyn oncegate::store::Store> {
    Arc::new(fresh().await.0)
}

/// A store on this database, migrated.
pub(crate) async fn open_at(url: &str) -> Arc<dyn oncegate::store::Store> {
    let store = Postgres::open(settings(url)).await.unwrap();
    store.migrate(true).await.unwrap();
    Arc::new(store)
}

pub(crate) async fn sql(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

async fn number(client: &Client, query: &str) -> i64 {
    client.query_one(query, &[]).await.unwrap().get(0)
}

async fn owner(store: &Postgres) -> OwnerId {
    let owner = OwnerId::fresh();
    assert_eq!(store.heartbeat(owner, LEASE).await.unwrap(), Heartbeat::Renewed);
    owner
}

fn scope(key: &str) -> Scope {
    Scope {
        tenant: Tenant::parse("acme").unwrap(),
        operation: Operation::parse("orders.create").unwrap(),
        key: Key::parse(key).unwrap(),
    }
}

pub(crate) fn proposal(owner: OwnerId, key: &str) -> Proposal {
    Proposal {
        id: RecordId::fresh(),
        scope: scope(key),
        fingerprint: Fingerprint { canonical: [1; 32], raw: [2; 32], recipe: [3; 8] },
        owner,
        caller: Some("someone".into()),
        context: Some(Bytes::from_static(b"{\"amount\":1}")),
        retention: Duration::from_secs(3600),
    }
}

fn answer(body: &'static [u8]) -> Answer {
    let mut headers = HeaderMap::new();
    headers.append("content-type", HeaderValue::from_static("application/json"));
    headers.append("x-raw", HeaderValue::from_bytes(b"caf\xe9").unwrap());
    Answer {
        status: StatusCode::CREATED,
        headers,
        spelling: Spelling::default(),
        body: KeptBody::Whole(Bytes::from_static(body)),
    }
}

fn event(id: RecordId, name: &str, position: u16, sinks: &[&str]) -> Event {
    Event {
        id: Uuid::now_v7(),
        key: format!("{id}:{name}"),
        kind: name.into(),
        position,
        ordering_key: None,
        payload: Bytes::from_static(b"{\"n\":1}"),
        sinks: sinks.iter().map(|sink| (*sink).to_owned()).collect(),
    }
}

pub(crate) fn completion(proposal: &Proposal, sinks: &[&str]) -> Completion {
    let fence = first(proposal);
    Completion {
        scope: proposal.scope.clone(),
        fence,
        answer: answer(b"{\"id\":7}"),
        retention: DAY,
        events: vec![event(fence.id, "order.created", 0, sinks)],
    }
}

fn first(proposal: &Proposal) -> Fence {
    Fence { id: proposal.id, attempt: Attempt::FIRST }
}

pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

fn claim(limit: u32) -> Claim {
    Claim {
        sink: "main".into(),
        lane: Lane::Fresh,
        order: Order::None,
        limit,
        owner: OwnerId::fresh(),
        lease: LEASE,
        reclaim: Reclaim::Expired,
        look: Look::Quick,
    }
}

fn by() -> Operator {
    Operator { who: "ann".into(), why: Some("the bank confirmed".into()) }
}

async fn held(store: &Postgres, proposal: &Proposal) {
    assert_eq!(store.reserve(proposal.clone(), soon()).await.unwrap(), Reserved::Held);
}

async fn done(store: &Postgres, completion: Completion) {
    let settled = store.complete(completion.into(), soon()).await.unwrap();
    assert!(matches!(settled, Settled::Done { .. }), "{settled:?}");
}

#[tokio::test]
async fn a_first_request_is_kept_and_its_duplicate_finds_the_same_bytes() {
    let (store, url) = fresh().await;
    let owner = owner(&store).await;
    let p = proposal(owner, "demo-001");
    held(&store, &p).await;
    held(&store, &p).await;
    let Reserved::Exists(running) =
        store.reserve(proposal(owner, "demo-001"), soon()).await.unwrap()
    else {
        panic!("a second record under one scope")
    };
    assert_eq!(running.fence, first(&p));
    assert_eq!(running.fingerprint, p.fingerprint);
    assert_eq!(running.state, State::InProgress { owner, owner_lives: true });

    let kept = completion(&p, &["main"]);
    done(&store, kept.clone()).await;
    assert_eq!(store.complete(kept.clone().into(), soon()).await.unwrap(), Settled::Fenced);
    let found = store.find(&p.scope).await.unwrap().unwrap();
    let State::Completed(completed) = found.state else { panic!("{found:?}") };
    assert_eq!(completed.answer, kept.answer);
    assert!(completed.time_left > DAY - Duration::from_secs(60));

    let db = sql(&url).await;
    let counts = [
        "select count(*) from idempotency_records where key = 'demo-001'",
        "select count(*) from outbox_events where idempotency_key = 'demo-001'",
    ];
    for count in counts {
        assert_eq!(number(&db, count).await, 1, "{count}");
    }
    let row = store.show_record(p.id).await.unwrap().unwrap();
    assert_eq!((row.status, row.context, row.answer), (Status::Completed, None, Some(kept.answer)));
}

#[tokio::test]
async fn an_answer_without_its_body_differs_from_one_with_an_empty_body() {
    let (store, _) = fresh().await;
    let owner = owner(&store).await;
    for (key, body) in [("none", KeptBody::NotRetained), ("empty", KeptBody::Whole(Bytes::new()))] {
        let p = proposal(owner, key);
        held(&store, &p).await;
        let mut kept = completion(&p, &[]);
        kept.answer.body = body.clone();
        done(&store, kept).await;
        let State::Completed(found) = store.find(&p.scope).await.unwrap().unwrap().state else {
            panic!("not completed")
        };
        assert_eq!(found.answer.body, body);
    }
}

#[tokio::test]
async fn nothing_is_reserved_without_a_live_lease() {
    let (store, _) = fresh().await;
    let stranger = OwnerId::fresh();
    let p = proposal(stranger, "k");
    assert_eq!(store.reserve(p.clone(), soon()).await.unwrap(), Reserved::LeaseEnded);
    assert_eq!(store.find(&p.scope).await.unwrap(), None);
    let owner = owner(&store).await;
    store.retire(owner).await.unwrap();
    assert_eq!(store.heartbeat(owner, LEASE).await.unwrap(), Heartbeat::Ended);
    assert_eq!(store.reserve(proposal(owner, "k"), soon()).await.unwrap(), Reserved::LeaseEnded);
}

#[tokio::test]
async fn what_a_dead_owner_left_is_marked_and_a_next_attempt_is_fenced() {
    let (store, _) = fresh().await;
    let dead = owner(&store).await;
    let p = proposal(dead, "k");
    held(&store, &p).await;
    assert_eq!(store.mark_dead(None, 10).await.unwrap(), 0, "its owner lives");
    store.retire(dead).await.unwrap();
    assert_eq!(store.mark_dead(None, 10).await.unwrap(), 1);
    assert_eq!(store.gauges().await.unwrap().unknown_records, 1);
    let unknown = RecordFilter { status: Some(Status::Unknown), limit: 9, ..Default::default() };
    assert_eq!(store.list_records(&unknown).await.unwrap().len(), 1);

    let next = proposal(owner(&store).await, "k");
    let take = Takeover::Unknown(first(&p));
    assert_eq!(store.take_over(next.clone(), take).await.unwrap(), Changed::Yes);
    assert_eq!(store.take_over(next, take).await.unwrap(), Changed::No);
    assert_eq!(store.complete(completion(&p, &[]).into(), soon()).await.unwrap(), Settled::Fenced);
    let second = Fence { id: p.id, attempt: Attempt::FIRST.next() };
    assert_eq!(store.release(&p.scope, first(&p)).await.unwrap(), Changed::No);
    assert_eq!(store.release(&p.scope, second).await.unwrap(), Changed::Yes);
    let found = store.find(&p.scope).await.unwrap().unwrap();
    assert_eq!(
        (found.fence, found.state),
        (second, State::Unknown),
        "a later attempt is remembered"
    );
}

#[tokio::test]
async fn an_expired_record_is_taken_over_under_a_new_id_and_swept() {
    let (store, _) = fresh().await;
    let owner = owner(&store).await;
    let (old, other) = (proposal(owner, "k"), proposal(owner, "other"));
    for p in [&old, &other] {
        held(&store, p).await;
        let kept = Completion { retention: Duration::ZERO, ..completion(p, &[]) };
        done(&store, kept).await;
    }
    let new = proposal(owner, "k");
    let Reserved::Exists(found) = store.reserve(new.clone(), soon()).await.unwrap() else {
        panic!("the row stands")
    };
    let State::Completed(completed) = found.state else { panic!("{found:?}") };
    assert_eq!(completed.time_left, Duration::ZERO);
    let take = Takeover::Expired(found.fence);
    assert_eq!(store.take_over(new.clone(), take).await.unwrap(), Changed::Yes);
    assert_eq!(store.take_over(new.clone(), take).await.unwrap(), Changed::Yes, "again, in doubt");
    assert_eq!(store.take_over(proposal(owner, "k"), take).await.unwrap(), Changed::No);
    assert_eq!(store.sweep_records(10).await.unwrap(), 1, "only the other one is still expired");
    assert_eq!(store.find(&new.scope).await.unwrap().unwrap().fence, first(&new));
}

#[tokio::test]
async fn expired_records_behind_many_that_stay_are_found_in_bounded_looks() {
    let (store, url) = fresh().await;
    let db = sql(&url).await;
    db.batch_execute(
        "INSERT INTO idempotency_records (id, tenant_id, operation, key, request_hash, raw_hash,
             recipe, status, attempt, owner, created_at, completed_at, expires_at, response_status)
         SELECT gen_random_uuid(), 'acme', 'o', 'k' || n, '', '', '', 'completed', 1,
                gen_random_uuid(), now() - interval '2 days' + n * interval '1 second', now(),
                now() + CASE WHEN n % 1500 = 0 THEN '-1s' ELSE '1 day' END::interval, 201
         FROM generate_series(1, 4500) n;
         INSERT INTO idempotency_records (id, tenant_id, operation, key, request_hash, raw_hash,
             recipe, status, attempt, owner, created_at)
         SELECT gen_random_uuid(), 'acme', 'o', s, '', '', '', s, 1, gen_random_uuid(),
                now() - interval '9 days' FROM unnest(ARRAY['unknown', 'in_progress']) s",
    )
    .await
    .unwrap();
    let mut swept = 0;
    for _ in 0..6 {
        swept += store.sweep_records(100).await.unwrap();
    }
    assert_eq!(swept, 3);
    assert_eq!(number(&db, "SELECT count(*) FROM idempotency_records").await, 4499);
}

#[tokio::test]
async fn an_event_is_claimed_failed_retried_buried_and_redelivered_under_growing_numbers() {
    let (store, _) = fresh().await;
    let p = proposal(owner(&store).await, "k");
    held(&store, &p).await;
    done(&store, completion(&p, &["main"])).await;

    let mut taken = store.claim(&claim(5)).await.unwrap();
    let one = taken.pop().unwrap();
    assert!(taken.is_empty() && store.claim(&claim(5)).await.unwrap().is_empty());
    assert_eq!((one.claim_no, one.attempts, one.kind.as_str()), (1, 0, "order.created"));
    assert!(store.next_due("main").await.unwrap().unwrap() > LEASE / 2);
    let say = |claim_no, verdict| [Acknowledgement { event_id: one.event_id, claim_no, verdict }];
    let retry = |delay| Verdict::Retry { delay, status: Some(500), error: "no\0pe".into() };
    let failed = say(1, retry(Duration::ZERO));
    assert_eq!(store.acknowledge("main", Order::None, &failed).await.unwrap(), [one.event_id]);
    assert!(
        store.acknowledge("main", Order::None, &failed).await.unwrap().is_empty(),
        "a stale number"
    );

    let again = Claim { lane: Lane::Retry, ..claim(5) };
    assert_eq!(store.claim(&again).await.unwrap()[0].claim_no, 2);
    let given_back = say(2, Verdict::GivenBack);
    assert_eq!(store.acknowledge("main", Order::None, &given_back).await.unwrap().len(), 1);
    let third = store.claim(&again).await.unwrap();
    assert_eq!((third[0].claim_no, third[0].attempts), (3, 1));
    let dead = say(3, Verdict::Dead { status: Some(400), error: "never".into() });
    assert_eq!(store.acknowledge("main", Order::None, &dead).await.unwrap().len(), 1);
    assert_eq!(store.gauges().await.unwrap().dead, [("main".to_owned(), 1)]);
    assert_eq!(store.sweep_events(Duration::ZERO, 10).await.unwrap(), 0, "dead ones stay");

    assert_eq!(
        store.redeliver(&Chosen::Dead(DeadFilter::default()), &by()).await.unwrap().count,
        1
    );
    let fourth = store.claim(&again).await.unwrap();
    assert_eq!((fourth[0].claim_no, fourth[0].attempts), (5, 0));
    let this = Chosen::One { id: one.event_id, sink: None };
    assert_eq!(store.redeliver(&this, &by()).await.unwrap().count, 0, "it is being delivered");
    let sent = say(5, Verdict::Sent { status: Some(204) });
    assert_eq!(store.acknowledge("main", Order::None, &sent).await.unwrap().len(), 1);
    let events = store
        .list_events(&EventFilter { record: Some(p.id), limit: 5, ..Default::default() })
        .await
        .unwrap();
    assert_eq!((events.len(), events[0].status), (1, EventStatus::Sent));
    assert!(events[0].sent_at.is_some());
    assert_eq!(store.audit_of(p.id).await.unwrap().len(), 1, "told of all of them at once");
    assert_eq!(store.redeliver(&this, &by()).await.unwrap().count, 1);
    assert_eq!(store.audit_of(p.id).await.unwrap().len(), 2);
    assert_eq!(store.sweep_events(Duration::ZERO, 10).await.unwrap(), 0, "owed again");
    let last = store.claim(&again).await.unwrap()[0].claim_no;
    store
        .acknowledge("main", Order::None, &say(last, Verdict::Sent { status: Some(200) }))
        .await
        .unwrap();
    assert_eq!(store.sweep_events(DAY, 10).await.unwrap(), 0);
    assert_eq!(store.sweep_events(Duration::ZERO, 10).await.unwrap(), 1);
}

#[tokio::test]
async fn an_event_that_no_sink_wanted_stands_as_discarded_and_can_be_sent_to_a_named_one() {
    let (store, _) = fresh().await;
    let p = proposal(owner(&store).await, "k");
    held(&store, &p).await;
    done(&store, completion(&p, &[])).await;
    let all = EventFilter { limit: 5, ..Default::default() };
    let events = store.list_events(&all).await.unwrap();
    assert_eq!((events[0].sink.as_str(), events[0].status), ("", EventStatus::Discarded));
    let id = events[0].id;
    let nowhere = Chosen::One { id, sink: None };
    assert_eq!(store.redeliver(&nowhere, &by()).await.unwrap().count, 0);
    let there = Chosen::One { id, sink: Some("main".into()) };
    assert_eq!(store.redeliver(&there, &by()).await.unwrap().count, 1);
    let events = store.list_events(&all).await.unwrap();
    assert_eq!(events.len(), 1);
    assert_eq!((events[0].sink.as_str(), events[0].status), ("main", EventStatus::Pending));
}

#[tokio::test]
async fn an_operator_acts_on_what_nobody_works_on_and_it_is_written_down() {
    let (store, _) = fresh().await;
    let owner = owner(&store).await;
    let (a, b) = (proposal(owner, "a"), proposal(owner, "b"));
    held(&store, &a).await;
    held(&store, &b).await;
    let running = store.operator_release(first(&a), false, &by()).await.unwrap();
    assert!(matches!(running, Err(Objection::Running { owner: o, .. }) if o == owner));
    assert_eq!(store.mark_unknown(&a.scope, first(&a)).await.unwrap(), Changed::Yes);
    assert_eq!(store.operator_release(first(&a), false, &by()).await.unwrap(), Ok(()));
    let gone = store.operator_release(first(&a), false, &by()).await.unwrap();
    assert_eq!(gone, Err(Objection::NotFound));

    store.retire(owner).await.unwrap();
    let kept = completion(&b, &["main"]);
    assert_eq!(store.operator_complete(&kept, &by()).await.unwrap(), Ok(()));
    let objection = store.operator_complete(&kept, &by()).await.unwrap();
    assert_eq!(objection, Err(Objection::IsCompleted));
    let found = store.find(&b.scope).await.unwrap().unwrap();
    assert_eq!(found.fence.attempt, Attempt::FIRST.next());
    let stale = store.operator_release(first(&b), true, &by()).await.unwrap();
    assert_eq!(stale, Err(Objection::Moved));
    assert_eq!(store.claim(&claim(5)).await.unwrap().len(), 1, "its event is owed");
    assert_eq!(store.operator_release(found.fence, true, &by()).await.unwrap(), Ok(()));
    let acted: HashSet<_> = store.acted_on(DAY).await.unwrap().into_iter().collect();
    assert_eq!(acted, HashSet::from([a.id, b.id]));
    let audit = store.audit_of(b.id).await.unwrap();
    let actions: Vec<_> = audit.iter().map(|row| row.action.as_str()).collect();
    assert_eq!(actions, ["record.complete", "record.release"]);
}

#[tokio::test]
async fn data_that_the_database_refuses_fails_alone() {
    let (store, _) = fresh().await;
    let owner = owner(&store).await;
    let store = Arc::new(store);
    let mut tasks = Vec::new();
    for n in 0..20 {
        let p = proposal(owner, &format!("k{n}"));
        held(&store, &p).await;
        let mut kept = completion(&p, &["main"]);
        kept.events[0].ordering_key = (n == 7).then(|| "nul\0".to_owned());
        let store = Arc::clone(&store);
        tasks.push(tokio::spawn(async move { store.complete(kept.into(), soon()).await }));
    }
    for (n, task) in tasks.into_iter().enumerate() {
        let result = task.await.unwrap();
        assert_eq!(matches!(result, Err(Error::Refused(_))), n == 7, "{n}: {result:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn duplicates_of_two_replicas_leave_one_holder_and_no_unique_violation_in_the_log() {
    let (one, url) = fresh().await;
    let two = Postgres::open(settings(&url)).await.unwrap();
    let (owner_one, owner_two) = (owner(&one).await, owner(&two).await);
    let replicas = [(Arc::new(one), owner_one), (Arc::new(two), owner_two)];
    for round in 0..20 {
        let mut tasks = Vec::new();
        for n in 0..40 {
            let (store, owner) = &replicas[n % 2];
            let p = proposal(*owner, &format!("r{round}k{}", n % 3));
            let store = Arc::clone(store);
            tasks.push(tokio::spawn(async move { (n % 3, store.reserve(p, soon()).await) }));
        }
        let mut holders = [0; 3];
        for task in tasks {
            let (key, result) = task.await.unwrap();
            match result.unwrap() {
                Reserved::Held => holders[key] += 1,
                Reserved::Exists(_) => {}
                other @ (Reserved::Vanished | Reserved::LeaseEnded) => panic!("{other:?}"),
            }
        }
        assert_eq!(holders, [1; 3], "round {round}");
    }
    let database = url.rsplit('/').next().unwrap();
    let log = Cluster::shared().log();
    let mine = log.lines().filter(|line| line.starts_with(&format!("{database} ")));
    // On a busy machine a batch may wait too long for the other's commit; it is run again in its passing form.
    let errors = mine.filter(|line| line.contains("ERROR"));
    let violations: Vec<_> = errors.filter(|line| !line.contains("lock timeout")).collect();
    assert!(violations.is_empty(), "{violations:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn completions_are_in_place_on_a_fresh_table() {
    let (store, url) = fresh().await;
    let db = sql(&url).await;
    db.batch_execute("ALTER TABLE idempotency_records SET (autovacuum_enabled = off)")
        .await
        .unwrap();
    let owner = owner(&store).await;
    let store = Arc::new(store);
    const ALL: i64 = 1000;
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..ALL {
        let store = Arc::clone(&store);
        tasks.spawn(async move {
            let p = proposal(owner, &format!("k{n}"));
            held(&store, &p).await;
            done(&store, completion(&p, &["main"])).await;
        });
    }
    while let Some(task) = tasks.join_next().await {
        task.unwrap();
    }
    // A connection's end tells its statistics at once.
    drop(store);
    const HOT: &str = "SELECT n_tup_hot_upd FROM pg_stat_user_tables
                       WHERE relname = 'idempotency_records' AND n_tup_upd = 1000";
    let end = soon();
    let hot: i64 = loop {
        if let Some(row) = db.query_opt(HOT, &[]).await.unwrap() {
            break row.get(0);
        }
        // The statistics arrive a moment after the last commit.
        assert!(Instant::now() < end, "the statistics never showed {ALL} updates");
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    assert!(hot * 100 >= ALL * 97, "{hot} of {ALL} completions were in place");
}

#[tokio::test]
async fn plans_use_the_indexes_of_a_table_that_was_never_analysed() {
    let (store, url) = fresh().await;
    let db = sql(&url).await;
    db.batch_execute(
        "ALTER TABLE idempotency_records SET (autovacuum_enabled = off);
         ALTER TABLE outbox_queue SET (autovacuum_enabled = off);
         ALTER TABLE outbox_messages SET (autovacuum_enabled = off);
         INSERT INTO idempotency_records (id, tenant_id, operation, key, request_hash, raw_hash,
             recipe, status, attempt, owner, created_at)
         SELECT gen_random_uuid(), 'acme', 'orders.create', 'old' || n, '', '', '', 'in_progress',
                1, gen_random_uuid(), now() FROM generate_series(1, 20000) n;
         INSERT INTO outbox_messages (id, event_key, seq, event_type, tenant_id, operation,
             idempotency_key, record_id, payload, created_at)
         SELECT id, id::text, 0, 'e', tenant_id, operation, key, id, '', now()
         FROM idempotency_records;
         INSERT INTO outbox_queue (event_id, sink, next_attempt_at, created_at)
         SELECT id, 'main', now(), now() FROM outbox_messages",
    )
    .await
    .unwrap();
    let database = url.rsplit('/').next().unwrap();
    for setting in [
        "session_preload_libraries = auto_explain",
        "auto_explain.log_min_duration = 0",
        "auto_explain.log_nested_statements = on",
    ] {
        db.batch_execute(&format!("ALTER DATABASE {database} SET {setting}")).await.unwrap();
    }
    // A store of its own: its connections have the settings.
    drop(store);
    let store = Arc::new(Postgres::open(settings(&url)).await.unwrap());
    let owner = owner(&store).await;
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..100 {
        let store = Arc::clone(&store);
        tasks.spawn(async move {
            let p = proposal(owner, &format!("k{n}"));
            held(&store, &p).await;
            assert!(matches!(
                store.reserve(proposal(owner, &format!("k{n}")), soon()).await.unwrap(),
                Reserved::Exists(_)
            ));
            done(&store, completion(&p, &["main", "second"])).await;
        });
    }
    while let Some(task) = tasks.join_next().await {
        task.unwrap();
    }
    db.batch_execute(
        "INSERT INTO oncegate_owners SELECT gen_random_uuid(), now() + n * interval '1 minute', now()
         FROM generate_series(-500, 500) n;
         UPDATE outbox_queue SET lease_until = now() + interval '1 hour', claimed_by = o.owner
         FROM (SELECT owner FROM oncegate_owners WHERE lease_until > now() LIMIT 1) o
         WHERE event_id IN (SELECT event_id FROM outbox_queue ORDER BY next_attempt_at LIMIT 100)",
    )
    .await
    .unwrap();
    let look = Look::From(0);
    let judging = Claim { reclaim: Reclaim::ExpiredOrOrphaned, look, ..claim(16) };
    let taken = store.claim(&judging).await.unwrap();
    assert_eq!(taken.len(), 16);
    let sent = |claimed: &oncegate::store::Claimed| Acknowledgement {
        event_id: claimed.event_id,
        claim_no: claimed.claim_no,
        verdict: Verdict::Sent { status: Some(200) },
    };
    let verdicts: Vec<_> = taken.iter().map(sent).collect();
    assert_eq!(store.acknowledge("main", Order::None, &verdicts).await.unwrap().len(), 16);
    let forgotten = proposal(owner, "forgotten");
    let ids: Vec<_> = (0..499).map(|_| RecordId::fresh()).chain([forgotten.id]).collect();
    let back = store.reinstate(forgotten, Attempt::FIRST).await.unwrap();
    assert_eq!(back, Reinstated::Yes);
    assert_eq!(store.statuses(&ids).await.unwrap().len(), 1);
    for whence in [ScanFrom::Oldest, ScanFrom::Ago(Duration::from_secs(1))] {
        store.open_of(owner, whence, 1000).await.unwrap();
    }
    let log = Cluster::shared().log();
    let plans = plans(&log, database);
    let own = ["reinstate", "statuses", "open_of"];
    for name in ["reserve", "read_losers", "complete", "place_of_claim", "claim", "finish"]
        .into_iter()
        .chain(own)
    {
        let mine: Vec<_> =
            plans.iter().filter(|plan| plan.contains(&format!("-- {name}\n"))).collect();
        assert!(!mine.is_empty(), "no plan of {name} in the log");
        for plan in mine {
            for table in ["idempotency_records", "outbox_queue", "outbox_messages"] {
                assert!(!plan.contains(&format!("Seq Scan on {table}")), "{plan}");
            }
            let begins = plan.contains("Index Cond: (ROW(created_at, id) >");
            assert!(name != "open_of" || begins, "{plan}");
            let claims = name.ends_with("claim");
            assert!(!claims || !plan.contains("Seq Scan on oncegate_owners"), "{plan}");
        }
    }
}

#[tokio::test]
async fn eight_replicas_migrate_at_once() {
    let url = Cluster::shared().database();
    let tasks: Vec<_> = (0..8)
        .map(|_| {
            let url = url.clone();
            tokio::spawn(async move {
                let store = Postgres::open(settings(&url)).await.unwrap();
                store.migrate(true).await
            })
        })
        .collect();
    let mut versions = HashSet::new();
    for task in tasks {
        versions.insert(task.await.unwrap().unwrap());
    }
    assert_eq!(versions.len(), 1);
    let db = sql(&url).await;
    assert_eq!(number(&db, "SELECT count(*) FROM oncegate_meta").await, 1);
}

#[tokio::test]
async fn records_that_were_unknown_before_the_migration_are_noted() {
    let url = Cluster::shared().database();
    let db = sql(&url).await;
    db.batch_execute(include_str!("../../migrations/postgres/0001_records.sql")).await.unwrap();
    db.batch_execute(include_str!("../../migrations/postgres/0002_outbox.sql")).await.unwrap();
    db.batch_execute(
        "CREATE TABLE oncegate_migrations (version int PRIMARY KEY, name text NOT NULL,
            applied_at timestamptz NOT NULL DEFAULT clock_timestamp());
         INSERT INTO oncegate_migrations VALUES (1, 'records'), (2, 'outbox');
         INSERT INTO idempotency_records (id, tenant_id, operation, key, request_hash, raw_hash,
             recipe, status, attempt, owner, created_at)
         SELECT gen_random_uuid(), 't', 'o', s, '', '', '', s, 3, gen_random_uuid(), now()
         FROM unnest(ARRAY['unknown', 'in_progress']) s;
         INSERT INTO oncegate_unknown SELECT id, now() - interval '1 hour' FROM idempotency_records",
    )
    .await
    .unwrap();
    let store = Postgres::open(settings(&url)).await.unwrap();
    store.migrate(true).await.unwrap();
    let noted = "SELECT count(*) FROM oncegate_unknown u JOIN idempotency_records r ON r.id = u.id
        WHERE r.status = 'unknown' AND u.attempt = 3 AND u.asked = 0 AND u.since = u.noted_at
          AND u.next_ask_at = u.noted_at AND u.announced IS NULL";
    assert_eq!(number(&db, noted).await, 1);
    // A replica of the version before goes on noting.
    let old = "INSERT INTO oncegate_unknown (id, noted_at) SELECT id, clock_timestamp()
        FROM idempotency_records
        ON CONFLICT (id) DO UPDATE SET noted_at = excluded.noted_at";
    db.batch_execute(old).await.unwrap();
}

/// All who come to the table would wait behind the migration: the replicas that serve, too.
#[tokio::test]
async fn a_migration_does_not_queue_for_long_behind_who_uses_a_table() {
    let url = Cluster::shared().database();
    let store = Postgres::open(settings(&url)).await.unwrap();
    let version = store.migrate(true).await.unwrap();
    let (db, dump) = (sql(&url).await, sql(&url).await);
    let back = "DELETE FROM oncegate_migrations WHERE version >= 15;
        DROP FUNCTION oncegate_wake(text, text[], uuid[])";
    db.batch_execute(back).await.unwrap();
    dump.batch_execute("BEGIN; LOCK TABLE outbox_turns IN ACCESS SHARE MODE").await.unwrap();
    let Err(OpenError::Interrupted { version: at, cause }) = store.migrate(true).await else {
        panic!("it went through")
    };
    assert_eq!((at, cause.to_string().contains("was in use for longer than 5 s")), (15, true));
    dump.batch_execute("COMMIT").await.unwrap();
    assert_eq!(store.migrate(true).await.unwrap(), version);
}

#[tokio::test]
async fn a_schema_of_another_version_is_refused_and_told_apart() {
    let url = Cluster::shared().database();
    let store = Postgres::open(settings(&url)).await.unwrap();
    let none = store.migrate(false).await;
    assert!(matches!(none, Err(OpenError::OlderSchema { found: 0, .. })), "{none:?}");
    let version = store.migrate(true).await.unwrap();
    assert_eq!(store.migrate(false).await.unwrap(), version);
    let db = sql(&url).await;
    db.batch_execute("INSERT INTO oncegate_migrations VALUES (9999, 'of the future')")
        .await
        .unwrap();
    for allowed in [true, false] {
        let newer = store.migrate(allowed).await;
        assert!(matches!(newer, Err(OpenError::NewerSchema { found: 9999, .. })), "{newer:?}");
    }
}

#[tokio::test]
async fn a_reservation_whose_answer_was_lost_is_recognised_as_ones_own() {
    let (direct, url) = fresh().await;
    let owner = owner(&direct).await;
    let swallowed = Arc::new(AtomicUsize::new(0));
    let port = lossy_proxy("-- reserve", Arc::clone(&swallowed)).await;
    let database = url.rsplit('/').next().unwrap();
    let through = format!("postgres://postgres@127.0.0.1:{port}/{database}?sslmode=disable");
    let store = Postgres::open(settings(&through)).await.unwrap();
    let p = proposal(owner, "k");
    held(&store, &p).await;
    assert_eq!(swallowed.load(Ordering::SeqCst), 1, "no answer was lost");
    assert_eq!(direct.find(&p.scope).await.unwrap().unwrap().fence, first(&p));
    let db = sql(&url).await;
    assert_eq!(number(&db, "SELECT count(*) FROM idempotency_records").await, 1);
}

#[tokio::test]
async fn a_completion_whose_answer_was_lost_is_done_once_and_read_back() {
    let (direct, url) = fresh().await;
    let p = proposal(owner(&direct).await, "k");
    held(&direct, &p).await;
    let swallowed = Arc::new(AtomicUsize::new(0));
    let port = lossy_proxy("-- complete", Arc::clone(&swallowed)).await;
    let database = url.rsplit('/').next().unwrap();
    let through = format!("postgres://postgres@127.0.0.1:{port}/{database}?sslmode=disable");
    let store = Postgres::open(settings(&through)).await.unwrap();
    let settled = store.complete(completion(&p, &["main"]).into(), soon()).await.unwrap();
    assert_eq!((swallowed.load(Ordering::SeqCst), settled), (1, Settled::Fenced));
    let found = store.find(&p.scope).await.unwrap().unwrap();
    assert_eq!(found.fence, first(&p));
    assert!(matches!(found.state, State::Completed(_)));
    assert_eq!(store.claim(&claim(9)).await.unwrap().len(), 1);
}

/// A proxy before the shared cluster that loses the answer to the first statement with `needle`, then resets.
async fn lossy_proxy(needle: &'static str, swallowed: Arc<AtomicUsize>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        loop {
            let (client, _) = listener.accept().await.unwrap();
            let server = TcpStream::connect(("127.0.0.1", Cluster::shared().port())).await.unwrap();
            let swallowed = Arc::clone(&swallowed);
            tokio::spawn(async move {
                // An error here is a connection's end, which is what a proxy is there to pass on.
                drop(pump(client, server, needle, &swallowed).await);
            });
        }
    });
    port
}

async fn pump(
    mut client: TcpStream,
    mut server: TcpStream,
    needle: &str,
    swallowed: &AtomicUsize,
) -> std::io::Result<()> {
    let (mut asked, mut answered) = (vec![0; 65_536], vec![0; 65_536]);
    loop {
        tokio::select! {
            read = client.read(&mut asked) => {
                let bytes = &asked[..read?];
                if bytes.is_empty() {
                    return Ok(());
                }
                server.write_all(bytes).await?;
                let hit = bytes.windows(needle.len()).any(|window| window == needle.as_bytes());
                let unspent =
                    || swallowed.compare_exchange(0, 1, Ordering::SeqCst, Ordering::SeqCst).is_ok();
                if hit && unspent() {
                    // The answer says that it is committed; nobody will hear it.
                    while !answered.ends_with(b"Z\0\0\0\x05I") {
                        answered.resize(65_536, 0);
                        let read = server.read(&mut answered).await?;
                        answered.truncate(read);
                    }
                    client.set_zero_linger()?;
                    return Ok(());
                }
            }
            read = server.read(&mut answered) => {
                let bytes = &answered[..read?];
                if bytes.is_empty() {
                    return Ok(());
                }
                client.write_all(bytes).await?;
            }
        }
    }
}

#[tokio::test]
async fn what_was_promised_survives_the_kill_of_the_database() {
    let cluster = Cluster::own();
    let store = Postgres::open(settings(&cluster.database())).await.unwrap();
    store.migrate(true).await.unwrap();
    let owner = owner(&store).await;
    let (a, b) = (proposal(owner, "a"), proposal(owner, "b"));
    held(&store, &a).await;
    held(&store, &b).await;
    done(&store, completion(&a, &["main"])).await;
    cluster.kill9();
    let shortly = Instant::now() + Duration::from_secs(1);
    let away = store.reserve(proposal(owner, "c"), shortly).await;
    assert!(matches!(away, Err(Error::Unavailable(_) | Error::InDoubt(_))), "{away:?}");
    cluster.start();
    let found = store.find(&a.scope).await.unwrap().unwrap();
    assert!(matches!(found.state, State::Completed(_)));
    assert_eq!(store.heartbeat(owner, LEASE).await.unwrap(), Heartbeat::Renewed);
    done(&store, completion(&b, &["main"])).await;
    let every = Claim { look: Look::Complete, ..claim(9) };
    assert_eq!(store.claim(&every).await.unwrap().len(), 2);
}

#[tokio::test]
async fn an_orderly_restart_of_the_database_is_ridden_out() {
    let cluster = Cluster::own();
    let store = Postgres::open(settings(&cluster.database())).await.unwrap();
    store.migrate(true).await.unwrap();
    let owner = owner(&store).await;
    held(&store, &proposal(owner, "a")).await;
    cluster.stop();
    assert!(store.ping().await.is_err());
    cluster.start();
    store.ping().await.unwrap();
    held(&store, &proposal(owner, "b")).await;
}

#[tokio::test]
async fn a_statement_that_hangs_is_given_up_and_its_reservation_is_found_again() {
    let (store, url) = fresh().await;
    let owner = owner(&store).await;
    let hasty = Settings { statement_timeout: Duration::from_millis(200), ..settings(&url) };
    let hasty = Postgres::open(hasty).await.unwrap();
    let db = sql(&url).await;
    db.batch_execute("BEGIN; LOCK TABLE idempotency_records IN ACCESS EXCLUSIVE MODE")
        .await
        .unwrap();
    let p = proposal(owner, "k");
    let found = hasty.find(&p.scope).await;
    assert!(matches!(found, Err(Error::Unavailable(_))), "{found:?}");
    let shortly = Instant::now() + Duration::from_secs(1);
    let reserved = hasty.reserve(p.clone(), shortly).await;
    assert!(matches!(reserved, Err(Error::InDoubt(_))), "{reserved:?}");
    assert_eq!(
        hasty.heartbeat(owner, LEASE).await.unwrap(),
        Heartbeat::Renewed,
        "a lane of its own"
    );
    db.batch_execute("ROLLBACK").await.unwrap();
    held(&hasty, &p).await;
    assert_eq!(store.find(&p.scope).await.unwrap().unwrap().fence, first(&p));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn serialization_failures_and_deadlocks_are_repeated() {
    let (store, url) = fresh().await;
    let database = url.rsplit('/').next().unwrap();
    let strict = "SET default_transaction_isolation = 'serializable'";
    Cluster::shared().execute("postgres", &format!("ALTER DATABASE {database} {strict}"));
    drop(store);
    let one = Arc::new(Postgres::open(settings(&url)).await.unwrap());
    let two = Arc::new(Postgres::open(settings(&url)).await.unwrap());
    let owner = owner(&one).await;
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..200 {
        let store = Arc::clone(if n % 2 == 0 { &one } else { &two });
        tasks.spawn(async move {
            let p = proposal(owner, &format!("k{}", n % 50));
            if store.reserve(p.clone(), soon()).await.unwrap() == Reserved::Held {
                done(&store, completion(&p, &["main"])).await;
            }
        });
    }
    while let Some(task) = tasks.join_next().await {
        task.unwrap();
    }
    let db = sql(&url).await;
    assert_eq!(number(&db, "SELECT count(*) FROM outbox_events").await, 50);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_relays_share_the_events_and_none_is_claimed_twice() {
    let (store, _) = fresh().await;
    let owner = owner(&store).await;
    let store = Arc::new(store);
    for n in 0..60 {
        let p = proposal(owner, &format!("k{n}"));
        held(&store, &p).await;
        done(&store, completion(&p, &["main"])).await;
    }
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..6 {
        let store = Arc::clone(&store);
        tasks.spawn(async move { claim_all(&store).await });
    }
    let all: Vec<Uuid> = tasks.join_all().await.into_iter().flatten().collect();
    assert_eq!(all.len(), 60);
    assert_eq!(all.into_iter().collect::<HashSet<_>>().len(), 60);
}

/// Claims until nothing is left, seven at a time.
async fn claim_all(store: &Postgres) -> Vec<Uuid> {
    let every = Claim { look: Look::Complete, ..claim(7) };
    let mut mine = Vec::new();
    loop {
        let taken = store.claim(&every).await.unwrap();
        assert!(taken.len() <= 7, "a claim took more than it may");
        if taken.is_empty() {
            return mine;
        }
        mine.extend(taken.into_iter().map(|claimed| claimed.event_id));
    }
}
