//! Sinks that get the events of an ordering key one after the other: what failures, several relays and a crowd behind one
//! event make of it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use oncegate::record::{Lease, LeaseView, OwnerId};
use oncegate::relay::{self, Claimant, Settings, sink};
use oncegate::store::{
    Acknowledgement, Chosen, DeadFilter, OnDead, Operator, Order, Store, Verdict,
};

use oncegate::telemetry::Metrics;
use serde_json::Value;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::housekeeping::{claim, sent};
use crate::support::eventually;
use crate::support::process::eventually as happens;
use crate::support::rig::{Place, Which, on_both_stores};
use crate::support::sink::{Act, OK, Seen, Sink};

on_both_stores! {
    f25_nothing_overtakes_an_event_that_is_tried_again_and_other_keys_go_on,
    f26_a_dead_head_frees_its_key_or_blocks_it_as_configured,
    f27_no_event_waits_longer_than_for_those_before_it_and_none_overtakes,
    f28_a_crowd_behind_one_event_holds_up_no_other_key,
    a_change_of_the_order_takes_effect_at_once,
    who_is_woken_is_not_in_flight,
}

const LONG: Duration = Duration::from_secs(20);
const MS: Duration = Duration::from_millis(1);
const FREE: Order = Order::Key(OnDead::Free);

pub(crate) async fn store(place: &Place) -> Arc<dyn Store> {
    match place.url.strip_prefix("sqlite:") {
        Some(path) => crate::sqlite::open(path.as_ref()).await,
        None => crate::postgres::open_at(&place.url).await,
    }
}

/// Writes events of these numbers as if they had been announced one after the other. `key`: their ordering key, in SQL
/// over `n`.
pub(crate) async fn write(place: &Place, which: Which, numbers: std::ops::Range<u32>, key: &str) {
    let (from, to) = (numbers.start, numbers.end - 1);
    let (series, id, at, record, bytes) = match which {
        Which::Postgres => (
            format!("SELECT n FROM generate_series({from}, {to}) AS n"),
            "('00000000-0000-4000-8000-' || lpad(to_hex(n), 12, '0'))::uuid",
            "clock_timestamp() + n * interval '1 microsecond'",
            "gen_random_uuid()",
            "convert_to",
        ),
        Which::Sqlite => (
            format!(
                "SELECT n FROM (WITH RECURSIVE s(n) AS (SELECT {from} UNION ALL
                 SELECT n + 1 FROM s WHERE n < {to}) SELECT n FROM s)"
            ),
            "'00000000-0000-4000-8000-' || printf('%012x', n)",
            "CAST(unixepoch('subsec') * 1000 AS INTEGER) * 1000 + n",
            "'00000000-0000-4000-8000-000000000000'",
            "printf",
        ),
    };
    let text = format!("'{{\"k\":\"' || coalesce({key}, '') || '\",\"n\":' || n || '}}'");
    let payload = match which {
        Which::Postgres => format!("{bytes}({text}, 'UTF8')"),
        Which::Sqlite => format!("CAST({text} AS BLOB)"),
    };
    let messages = format!(
        "INSERT INTO outbox_messages (id, event_key, seq, event_type, tenant_id, operation,
             idempotency_key, record_id, ordering_key, payload, created_at)
         SELECT {id}, 'e' || n, 0, 'order.created', 't', 'o', 'from {from}', {record}, {key},
             {payload}, {at} FROM ({series}) AS numbers"
    );
    let queue = format!(
        "INSERT INTO outbox_queue (event_id, sink, next_attempt_at, ordering_key, seq, created_at)
         SELECT id, 'main', created_at, ordering_key, seq, created_at FROM outbox_messages
         WHERE idempotency_key = 'from {from}'"
    );
    place.rows(&messages).await;
    place.rows(&queue).await;
}

pub(crate) fn settings(sink: &Sink, order: Order) -> sink::Settings {
    sink::Settings {
        timeout: Duration::from_secs(15),
        concurrency: 16,
        backoff_base: 200 * MS,
        order,
        ..crate::relay::settings(sink)
    }
}

/// A relay of a process of its own.
pub(crate) struct Relay {
    stop: CancellationToken,
    pub(crate) wake: Arc<Notify>,
    task: tokio::task::JoinHandle<()>,
}

impl Relay {
    pub(crate) fn start(store: &Arc<dyn Store>, sink: sink::Settings) -> Self {
        let (stop, wake) = (CancellationToken::new(), Arc::new(Notify::new()));
        let sure_until = std::time::Instant::now() + Duration::from_secs(3600);
        let lease = LeaseView::new(Lease { owner: OwnerId::fresh(), sure_until });
        let claimant = Claimant { lease, may_mark_dead: Arc::new(|| false) };
        let settings = Settings { sinks: vec![sink], poll: 50 * MS };
        let metrics = Arc::new(Metrics::default());
        let (store, nudges) = (Arc::clone(store), Arc::clone(&wake));
        let run = relay::run(store, settings, claimant, metrics, nudges, stop.clone());
        Self { stop, wake, task: tokio::spawn(run) }
    }

    pub(crate) async fn stop(self) {
        self.stop.cancel();
        tokio::time::timeout(LONG, self.task).await.expect("the relay ends").unwrap();
    }
}

/// Key and number of a delivery.
pub(crate) fn told(seen: &Seen) -> (String, u64) {
    let value: Value = serde_json::from_slice(&seen.body).unwrap();
    (value["k"].as_str().unwrap().to_owned(), value["n"].as_u64().unwrap())
}

/// The numbers that arrived of each key, with their times.
fn by_key(sink: &Sink) -> BTreeMap<String, Vec<(u64, Instant)>> {
    let mut all: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for seen in sink.seen() {
        let (key, n) = told(&seen);
        all.entry(key).or_default().push((n, seen.at));
    }
    all
}

async fn f25_nothing_overtakes_an_event_that_is_tried_again_and_other_keys_go_on(which: Which) {
    let place = Place::new(which).await;
    let store = store(&place).await;
    let fails = |seen: &Seen| told(seen).1 == 4;
    let failed = std::sync::atomic::AtomicUsize::new(0);
    let sink = Sink::start(move |seen, _| {
        let first_two = fails(seen) && failed.fetch_add(1, SeqCst) < 2;
        if first_two { Act::Answer(500, "") } else { OK }
    })
    .await;
    // Even numbers of one key, odd ones of another.
    write(&place, which, 0..20, "('k' || (n % 2))").await;
    let relay = Relay::start(&store, settings(&sink, FREE));
    eventually("all arrived", LONG, || sink.seen().len() == 22).await;
    relay.stop().await;
    let numbers = |key: &str| by_key(&sink)[key].iter().map(|(n, _)| *n).collect::<Vec<_>>();
    assert_eq!(numbers("k0"), [0, 2, 4, 4, 4, 6, 8, 10, 12, 14, 16, 18]);
    assert_eq!(numbers("k1"), [1, 3, 5, 7, 9, 11, 13, 15, 17, 19]);
    assert_eq!(place.count("select count(*) from outbox_turns").await, 0);
}

/// What ends the wait behind a dead event.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    ByItself,
    Redelivered,
    Discarded,
    /// A replica of a newer configuration, beside this one.
    Freed,
}

async fn f26_a_dead_head_frees_its_key_or_blocks_it_as_configured(which: Which) {
    let block = |end| (OnDead::Block, end);
    let ways = [
        (OnDead::Free, End::ByItself),
        block(End::Redelivered),
        block(End::Discarded),
        block(End::Freed),
    ];
    for (on_dead, end) in ways {
        let place = Place::new(which).await;
        let store = store(&place).await;
        let well = Arc::new(AtomicBool::new(false));
        let mended = Arc::clone(&well);
        let sink = Sink::start(move |seen, _| {
            let bad = told(seen).1 == 0 && !mended.load(SeqCst);
            if bad { Act::Answer(500, "") } else { OK }
        })
        .await;
        write(&place, which, 0..4, "'k'").await;
        let impatient = sink::Settings {
            attempts_max: 2,
            age_max: Duration::ZERO,
            backoff_base: MS,
            backoff_max: MS,
            ..settings(&sink, Order::Key(on_dead))
        };
        let relay = Relay::start(&store, impatient);
        let dead = "select count(*) from outbox_events where status = 'dead'";
        happens("the head is dead", async || place.count(dead).await == 1).await;
        if on_dead == OnDead::Block {
            // Several looks later.
            write(&place, which, 4..5, "'other'").await;
            eventually("another key", LONG, || by_key(&sink).contains_key("other")).await;
            assert_eq!(by_key(&sink)["k"].len(), 2, "nobody went past it");
            assert_eq!(store.gauges().await.unwrap().blocked, [("main".to_owned(), 1)]);
            well.store(true, SeqCst);
            let by = Operator { who: "olga".into(), why: None };
            let dead = Chosen::Dead(DeadFilter::default());
            let done = match end {
                End::Redelivered => store.redeliver(&dead, &by).await.unwrap().count,
                End::Discarded => store.discard(&dead, &by).await.unwrap().count,
                End::ByItself | End::Freed => 1,
            };
            assert_eq!(done, 1);
            relay.wake.notify_one();
        }
        let newer = (end == End::Freed).then(|| Relay::start(&store, settings(&sink, FREE)));
        let owed = "select count(*) from outbox_queue";
        happens("all are delivered", async || place.count(owed).await == 0).await;
        relay.stop().await;
        if let Some(newer) = newer {
            newer.stop().await;
        }
        let numbers: Vec<_> = by_key(&sink)["k"].iter().map(|(n, _)| *n).collect();
        let again = end == End::Redelivered;
        let wanted: &[u64] = if again { &[0, 0, 0, 1, 2, 3] } else { &[0, 0, 1, 2, 3] };
        assert_eq!(numbers, wanted, "{end:?}");
    }
}

async fn f27_no_event_waits_longer_than_for_those_before_it_and_none_overtakes(which: Which) {
    const KEYS: usize = 40;
    const EACH: usize = 8;
    let place = Place::new(which).await;
    let store = store(&place).await;
    let sink = Sink::start(|_, _| Act::After(5 * MS, Box::new(OK))).await;
    let all = u32::try_from(KEYS * EACH).unwrap();
    write(&place, which, 0..all, &format!("('k' || (n % {KEYS}))")).await;
    let relays = if which == Which::Postgres { 4 } else { 1 };
    let begun = Instant::now();
    let relays: Vec<_> = (0..relays).map(|_| Relay::start(&store, settings(&sink, FREE))).collect();
    let sent = "select count(*) from outbox_done where outcome = 'sent'";
    happens("all are delivered", async || place.count(sent).await == i64::from(all)).await;
    let took = begun.elapsed();
    for relay in relays {
        relay.stop().await;
    }
    let arrived = by_key(&sink);
    assert_eq!(arrived.len(), KEYS);
    for (key, events) in &arrived {
        assert_eq!(events.len(), EACH, "{key}: none twice");
        for pair in events.windows(2) {
            assert!(pair[0].0 < pair[1].0, "{key}: {} before {}", pair[0].0, pair[1].0);
            assert!(pair[1].1 - pair[0].1 >= 5 * MS, "{key}: two of a key at once");
        }
    }
    // A claim lasts for 35 s, and what is deferred comes back by himself after five minutes.
    assert!(took < Duration::from_secs(30), "{took:?}");
    assert_eq!(place.count("select count(*) from outbox_turns").await, 0);
}

async fn f28_a_crowd_behind_one_event_holds_up_no_other_key(which: Which) {
    let place = Place::new(which).await;
    let store = store(&place).await;
    let sink = Sink::start(|_, _| OK).await;
    write(&place, which, 0..2000, "'blocked'").await;
    let hour = match which {
        Which::Postgres => "next_attempt_at + interval '1 hour'",
        Which::Sqlite => "next_attempt_at + 3600000000",
    };
    let head = "(select event_id from outbox_queue order by created_at limit 1)";
    place
        .rows(&format!(
            "update outbox_queue set lane = 1, attempts = 1, claimed_by = event_id,
                 next_attempt_at = {hour}
             where event_id = {head}"
        ))
        .await;
    write(&place, which, 2000..2300, "('k' || (n % 100))").await;
    let relay = Relay::start(&store, settings(&sink, FREE));
    eventually("all others", LONG, || sink.seen().len() == 300).await;
    assert!(!by_key(&sink).contains_key("blocked"));
    relay.stop().await;
    // What was looked at once is not looked at again and again.
    let claim = oncegate::store::Claim {
        sink: "main".into(),
        lane: oncegate::store::Lane::Fresh,
        order: FREE,
        limit: 16,
        owner: OwnerId::fresh(),
        lease: LONG,
        reclaim: oncegate::store::Reclaim::Expired,
        look: oncegate::store::Look::Complete,
    };
    assert!(store.claim(&claim).await.unwrap().is_empty());
    let due = match which {
        Which::Postgres => "clock_timestamp()",
        Which::Sqlite => "unixepoch() * 1000000",
    };
    let looked_at = format!("select count(*) from outbox_queue where next_attempt_at <= {due}");
    assert_eq!(place.count(&looked_at).await, 0);
}

async fn a_change_of_the_order_takes_effect_at_once(which: Which) {
    // More keys than one piece of the look has.
    let (keys, later) = match which {
        Which::Postgres => (1100, "clock_timestamp() + interval '8 minutes'"),
        Which::Sqlite => (600, "(unixepoch() + 480) * 1000000"),
    };
    for order in [Order::None, FREE] {
        let place = Place::new(which).await;
        let store = store(&place).await;
        let sink = Sink::start(|_, _| OK).await;
        write(&place, which, 0..keys, "('k' || n)").await;
        place.rows(&format!("update outbox_queue set next_attempt_at = {later}")).await;
        let relay = Relay::start(&store, settings(&sink, order));
        eventually("all arrive", LONG, || sink.seen().len() >= keys as usize).await;
        relay.stop().await;
        assert_eq!(sink.ids().len(), keys as usize, "{order:?}");
    }
}

/// A verdict that met such a change at the same moment would count for nothing, and cost one more delivery.
async fn who_is_woken_is_not_in_flight(which: Which) {
    let place = Place::new(which).await;
    let store = store(&place).await;
    write(&place, which, 0..2, "'k'").await;
    let both = store.claim(&claim(Order::None, 9)).await.unwrap();
    let (first, second) = (&both[0], &both[1]);
    let dead = Verdict::Dead { status: None, error: "x".into() };
    let buried = Acknowledgement { verdict: dead, ..sent(first) };
    store.acknowledge("main", Order::None, &[buried]).await.unwrap();
    let due = "select count(*) from outbox_queue where next_attempt_at = created_at";
    assert_eq!(place.count(due).await, 1);
    let by = Operator { who: "olga".into(), why: None };
    let this = Chosen::One { id: first.event_id, sink: None };
    assert_eq!(store.discard(&this, &by).await.unwrap().count, 1);
    assert_eq!(place.count(due).await, 1, "it is as it was");
    let written = store.acknowledge("main", Order::None, &[sent(second)]).await.unwrap();
    assert_eq!(written, [second.event_id]);
}
