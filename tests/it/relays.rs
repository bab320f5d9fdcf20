//! `oncegate relay`: relays as processes of their own, several on one Postgres, that are told to stop, killed, put to sleep,
//! cut off from the database, and given events that nobody should have written.

use std::collections::{BTreeMap, BTreeSet};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use http::StatusCode;
use rustix::process::Resource;
use tokio::sync::watch;

use crate::clocks::clock;
use crate::crash::pass;
use crate::support::client::get;
use crate::support::fleet::{self, order, replicas};
use crate::support::orders::Orders;
use crate::support::postgres::Cluster;
use crate::support::process::{self, Gateway, eventually};
use crate::support::rig::{self, Place, Which};
use crate::support::signals;
use crate::support::sink::{Act, OK, Seen, Sink};

/// `serve` writes, and `relay` delivers.
const APART: &str = "[outbox]\nrelay = false\npoll = \"50ms\"\n";

/// The configuration of relays to this sink, four deliveries at a time, each with patience: what is slow here is not lost.
fn config(place: &Place, sink: &Sink, more: &str) -> PathBuf {
    let store = "lease = \"3s\"\nsweep_every = \"500ms\"";
    let patient = fleet::sink(sink.port).replace("\"2s\"", "\"20s\"");
    let more = format!("{patient}concurrency = 4\n{more}\n{APART}");
    let toml = rig::config_at(place, "http://127.0.0.1:9", "127.0.0.1:0", store, "", &more);
    process::config(place.folder.path(), &toml)
}

fn migrated(config: &Path) {
    let (code, out, errors) =
        process::run(&["migrate", "--config", config.to_str().expect("a path of text")]);
    assert_eq!(code, 0, "{out}{errors}");
}

/// Owes the sink these events, as a gateway would have written them.
async fn owe(place: &Place, numbers: std::ops::RangeInclusive<u32>) {
    let (first, last) = (numbers.start(), numbers.end());
    place
        .rows(&format!(
            "with m as (
               insert into outbox_messages (id, event_key, seq, event_type, tenant_id, operation,
                 idempotency_key, record_id, payload, created_at)
               select gen_random_uuid(), 'key-' || n, 0, 'a', 't', 'o', 'k', gen_random_uuid(),
                 convert_to('event ' || n, 'UTF8'), clock_timestamp()
               from generate_series({first}, {last}) n returning id, created_at)
             insert into outbox_queue (event_id, sink, next_attempt_at, created_at)
             select id, 'main', created_at, created_at from m"
        ))
        .await;
}

async fn count(place: &Place, status: &str) -> i64 {
    place.count(&format!("select count(*) from outbox_events where status = '{status}'")).await
}

/// What came to the sink, by id; each with a valid signature, and the same bytes each time.
fn deliveries(sink: &Sink) -> BTreeMap<String, usize> {
    let seen = sink.seen();
    assert!(seen.iter().all(|seen| seen.verified), "{seen:?}");
    by_id(sink)
}

fn by_id(sink: &Sink) -> BTreeMap<String, usize> {
    let mut bodies: BTreeMap<String, Seen> = BTreeMap::new();
    let mut counts = BTreeMap::new();
    for seen in sink.seen() {
        *counts.entry(seen.id()).or_default() += 1;
        let first = bodies.entry(seen.id()).or_insert_with(|| seen.clone());
        assert_eq!(first.body, seen.body, "the same bytes under one id");
    }
    counts
}

/// Stops relays: what they have in flight is finished, and nothing more can come to the sink from them.
fn stopped<'r>(relays: impl IntoIterator<Item = &'r mut Gateway>) {
    for relay in relays {
        relay.terminate();
        tokio::task::block_in_place(|| assert!(relay.exited().success(), "{}", relay.log()));
    }
}

fn repeated(sink: &Sink) -> BTreeSet<String> {
    let twice = deliveries(sink).into_iter().filter(|(_, count)| *count > 1);
    twice.map(|(id, _)| id).collect()
}

/// A metric of deliveries.
async fn delivered(relay: &Gateway, result: &str) -> i64 {
    let text = get("/metrics").to(relay.admin).await.body;
    let text = String::from_utf8_lossy(&text).into_owned();
    let line = text.lines().find(|line| {
        line.starts_with("oncegate_deliveries_total")
            && line.contains(&format!("result=\"{result}\""))
    });
    line.map_or(0, |line| line.rsplit(' ').next().unwrap().parse().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_alone_delivers_what_serve_leaves_to_it_and_stops_cleanly() {
    let (orders, place) = (Orders::start().await, Place::new(Which::Postgres).await);
    let (open, gate) = watch::channel(false);
    let sink = Sink::start(move |_, _| Act::When(gate.clone(), Box::new(OK))).await;
    let patient = fleet::sink(sink.port).replace("\"2s\"", "\"20s\"");
    let more = format!("{patient}concurrency = 2\n{APART}retention = \"1ms\"\n");
    let gateway = replicas(1, &place, &orders.url(), "", &more).remove(0);
    for n in 0..6 {
        assert_eq!(order(&format!("k-{n}")).to(gateway.addr).await.status, StatusCode::CREATED);
    }
    let mut first = Gateway::relay(&gateway.config);
    for path in ["/healthz", "/readyz", "/metrics"] {
        assert_eq!(get(path).to(first.admin).await.status, StatusCode::OK, "{path}");
    }
    let mut second = Gateway::relay(&gateway.config);
    eventually("both hold as many as they may", async || sink.seen().len() == 4).await;
    let live = "select count(*) from oncegate_owners where lease_until > clock_timestamp()";
    let renewed = format!("{live} and lease_until > started_at + interval '6 seconds'");
    eventually("each keeps its lease", async || place.count(&renewed).await == 3).await;
    assert_eq!(sink.seen().len(), 4, "so nobody takes what another is delivering");
    assert_eq!(place.count("select count(*) from outbox_queue where claim_no > 0").await, 4);

    first.terminate();
    eventually("it is not ready", async || {
        let ready = get("/readyz").send(first.admin).await;
        !ready.is_ok_and(|answer| answer.status == StatusCode::OK)
    })
    .await;
    open.send_replace(true);
    assert!(first.exited().success(), "{}", first.log());
    eventually("all are delivered, and what was delivered goes", async || {
        place.count("select count(*) from outbox_messages").await == 0
    })
    .await;
    assert_eq!(place.count(live).await, 2, "its lease is given back");
    assert_eq!(delivered(&gateway, "sent").await, 0, "serve delivers nothing");
    assert!(delivered(&second, "sent").await >= 2);
    stopped([&mut second]);
    assert_eq!((sink.seen().len(), deliveries(&sink).len()), (6, 6), "each once");
    gateway.says("events wait for `oncegate relay`");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_alone_is_refused_where_it_could_not_work() {
    let (sqlite, postgres) = (Place::new(Which::Sqlite).await, Place::new(Which::Postgres).await);
    let sink = Sink::start(|_, _| OK).await;
    let lines = |place: &Place, more: &str| {
        let toml = rig::config(place, "http://127.0.0.1:9", more);
        process::config(place.folder.path(), &toml)
    };
    for (config, wrong) in [
        (lines(&sqlite, &fleet::sink(sink.port)), "the relay runs only inside `oncegate serve`"),
        (lines(&postgres, ""), "there is no [[sink]] to deliver to"),
        (config(&sqlite, &sink, ""), "outbox.relay"),
    ] {
        let config = config.to_str().expect("a path of text");
        let (code, _, errors) = process::run(&["relay", "--config", config]);
        assert_eq!(code, 2, "{errors}");
        assert!(errors.contains(wrong), "{errors}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn f04_f09_what_killed_relays_were_delivering_comes_again_and_nothing_else() {
    let place = Place::new(Which::Postgres).await;
    let (open, gate) = watch::channel(false);
    let sink = Sink::start(move |_, _| Act::When(gate.clone(), Box::new(OK))).await;
    let config = config(&place, &sink, "");
    migrated(&config);
    owe(&place, 1..=12).await;
    let mut first = Gateway::relay(&config);
    eventually("it delivers", async || sink.seen().len() == 4).await;
    let mut in_flight = sink.ids();
    let mut second = Gateway::relay(&config);
    eventually("they share the work", async || sink.seen().len() == 8).await;
    first.kill9();
    open.send_replace(true);
    eventually("nothing is owed", async || count(&place, "sent").await == 12).await;
    assert_eq!(repeated(&sink), in_flight, "what the dead one had in flight, and nothing else");
    assert_eq!(sink.seen().len(), 16, "once more");

    // The last one, too, and the next one takes over.
    open.send_replace(false);
    owe(&place, 13..=18).await;
    eventually("it delivers", async || sink.seen().len() == 20).await;
    in_flight.extend(sink.seen()[16..].iter().map(Seen::id));
    second.kill9();
    assert_eq!(count(&place, "pending").await, 6);
    open.send_replace(true);
    let mut third = Gateway::relay(&config);
    eventually("nothing is owed", async || count(&place, "sent").await == 18).await;
    stopped([&mut third]);
    assert_eq!(repeated(&sink), in_flight);
    assert_eq!((sink.seen().len(), deliveries(&sink).len()), (26, 18));
    assert_eq!(place.events().await, 18, "nothing is lost, and nothing came of nowhere");
}

#[tokio::test(flavor = "multi_thread")]
async fn f11_a_relay_that_slept_beyond_its_lease_changes_nothing_of_its_successors() {
    let place = Place::new(Which::Postgres).await;
    let (wake, late) = watch::channel(false);
    let (open, third) = watch::channel(false);
    let of = |seen: &Seen, name: &str| seen.text().ends_with(name);
    let times = std::sync::Mutex::new(BTreeMap::<String, usize>::new());
    // Event 2 succeeds with the second relay and fails with the first, the others the other way round.
    let sink = Sink::start(move |seen, _| {
        let mut times = times.lock().unwrap();
        let time = times.entry(seen.id()).or_default();
        *time += 1;
        let fails = Act::Answer(500, "");
        match (*time, of(seen, "2")) {
            (1, true) => Act::When(late.clone(), Box::new(fails)),
            (1, false) => Act::When(late.clone(), Box::new(OK)),
            (2, true) => OK,
            (2, false) => fails,
            _ => Act::When(third.clone(), Box::new(OK)),
        }
    })
    .await;
    let config = config(&place, &sink, "max_attempts = 1\nmax_age = \"0s\"");
    migrated(&config);
    owe(&place, 1..=3).await;
    let mut first = Gateway::relay(&config);
    eventually("it delivers", async || sink.seen().len() == 3).await;
    first.signal("STOP");
    eventually("it sleeps", async || crate::replicas::asleep(first.pid())).await;
    let mut second = Gateway::relay(&config);
    eventually("the other one has delivered", async || {
        (count(&place, "sent").await, count(&place, "dead").await) == (1, 2)
    })
    .await;
    let ids: BTreeMap<String, String> =
        sink.seen().iter().map(|seen| (seen.text(), seen.id())).collect();
    let args = ["events", "redeliver", &ids["event 3"]];
    let (code, out, errors) = fleet::command(&second, &args);
    assert_eq!(code, 0, "{out}{errors}");
    eventually("it is delivered once more", async || sink.seen().len() == 7).await;

    wake.send_replace(true);
    first.signal("CONT");
    eventually("the late ones are counted", async || delivered(&first, "lost_claim").await == 3)
        .await;
    let rows =
        "select convert_from(payload, 'UTF8'), status, attempts, last_error from outbox_events
                order by event_key";
    let stood = |row: &[Option<String>]| {
        let error = row[3].clone().unwrap_or_default();
        (row[1].clone().unwrap(), row[2].clone().unwrap(), error.contains("500"))
    };
    let rows: Vec<_> = place.rows(rows).await.iter().map(|row| stood(row)).collect();
    let row =
        |status: &str, attempts: &str, failed| (status.to_owned(), attempts.to_owned(), failed);
    // What failed before its redelivery is still told of the third one.
    assert_eq!(rows, [row("dead", "1", true), row("sent", "1", false), row("pending", "0", true)]);
    open.send_replace(true);
    eventually("the third one is delivered", async || count(&place, "sent").await == 2).await;
    stopped([&mut first, &mut second]);
    assert_eq!(sink.seen().len(), 7);
    deliveries(&sink);
    let kept = "select count(*) from outbox_attempts where status = 500";
    assert_eq!(place.count(kept).await, 2, "attempts under a claim that was over are not kept");
}

#[tokio::test(flavor = "multi_thread")]
async fn f12_a_database_that_is_away_for_longer_than_a_lease_costs_no_second_delivery() {
    let cluster = tokio::task::block_in_place(Cluster::own);
    let place = Place::at(cluster.database());
    let (open, gate) = watch::channel(false);
    let sink = Sink::start(move |_, _| Act::When(gate.clone(), Box::new(OK))).await;
    let config = config(&place, &sink, "");
    migrated(&config);
    let mut relays = [Gateway::relay(&config), Gateway::relay(&config)];
    owe(&place, 1..=6).await;
    eventually("all are in flight", async || sink.seen().len() == 6).await;
    cluster.stop();
    open.send_replace(true);
    let begun = Instant::now();
    eventually("no verdict is written", async || {
        relays.iter().all(|relay| relay.log().contains("deliveries wait for the database"))
    })
    .await;
    pass(u64::try_from((Duration::from_secs(5) - begun.elapsed()).as_millis()).unwrap()).await;
    tokio::task::block_in_place(|| cluster.start());
    eventually("all are noted", async || count(&place, "sent").await == 6).await;
    owe(&place, 7..=7).await;
    eventually("they go on", async || count(&place, "sent").await == 7).await;
    stopped(&mut relays);
    let counts = deliveries(&sink);
    assert!(counts.len() == 7 && counts.values().all(|count| *count == 1), "each once: {counts:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn f15_relays_whose_clocks_are_ten_minutes_off_deliver_once_and_in_time() {
    const EVENTS: u32 = 24;
    let place = Place::new(Which::Postgres).await;
    // Each fails once: a retry has a time of its own.
    let known = std::sync::Mutex::new(BTreeSet::new());
    let sink = Sink::start(move |seen, _| {
        let first = known.lock().unwrap().insert(seen.id());
        Act::After(
            Duration::from_millis(20),
            Box::new(if first { Act::Answer(500, "") } else { OK }),
        )
    })
    .await;
    let config = config(&place, &sink, "pause_after = 1000");
    migrated(&config);
    let start = |offset: &str| {
        let command = clock(process::relay(&config), offset);
        Gateway::launch(command, &config).unwrap_or_else(|output| panic!("not started:\n{output}"))
    };
    let relays = [start("+10m"), start("-10m")];
    owe(&place, 1..=EVENTS).await;
    let begun = Instant::now();
    eventually("all are delivered", async || count(&place, "sent").await == i64::from(EVENTS))
        .await;
    assert!(begun.elapsed() < Duration::from_secs(15), "not late: {:?}", begun.elapsed());
    // Not whether they verify: a receiver compares the signed time with its own clock.
    let counts = by_id(&sink);
    assert!(counts.values().all(|count| *count == 2), "one failure, one success: {counts:?}");
    let skewed = "select count(*) from outbox_attempts where abs(extract(epoch from clock_timestamp() - at)) > 60";
    assert_eq!(place.count(skewed).await, 0, "times are the database's");
    for relay in &relays {
        // Each did its part, so neither took the other's claims or its own for over.
        assert_eq!(delivered(relay, "lost_claim").await, 0);
        assert!(delivered(relay, "sent").await > 0, "{}", relay.log());
    }
}

/// The signed time is that of the attempt by the relay's clock, and receivers refuse what is five minutes off.
/// No file can be opened any more, and no connection made, while a sink is open; then there are enough of them again.
#[tokio::test(flavor = "multi_thread")]
async fn f58_a_relay_without_file_descriptors_says_so_seldom_and_goes_on_by_itself() {
    let place = Place::new(Which::Postgres).await;
    let sink = Sink::start(|_, _| OK).await;
    let config = config(&place, &sink, "pause_after = 3");
    migrated(&config);
    let relay = Gateway::relay(&config);
    owe(&place, 1..=1).await;
    eventually("it delivers", async || count(&place, "sent").await == 1).await;
    let limit = |files: u64| signals::limit(relay.pid(), Resource::Nofile, Some(files));
    // What is open stays open, but for the connection to the sink, which comes back.
    limit(1);
    let port = sink.port;
    drop(sink);
    eventually("the port is free", async || TcpListener::bind(("127.0.0.1", port)).is_ok()).await;
    let sink = Sink::on(port, |_, _| OK).await;
    owe(&place, 2..=9).await;
    let failed = "select count(*) from outbox_events where status = 'pending' and last_error like '%open files%'";
    let paused = "select count(*) from outbox_sinks where pause_reason = 'failing'";
    eventually("it is paused", async || place.count(paused).await == 1).await;
    eventually("it says why", async || place.count(failed).await > 0).await;
    let lines = || relay.log().lines().count();
    let before = lines();
    pass(1000).await;
    assert!(lines() - before < 20, "{}", relay.log());
    assert!(sink.seen().is_empty());
    limit(1024);
    eventually("the others are delivered", async || count(&place, "sent").await == 9).await;
    assert_eq!(deliveries(&sink).len(), 8);
}

#[tokio::test(flavor = "multi_thread")]
async fn f44_a_retry_verifies_long_after_its_event_and_a_clock_far_off_is_told() {
    let place = Place::new(Which::Postgres).await;
    let now = u64::try_from(crate::support::issuer::in_seconds(0)).unwrap();
    let date = httpdate::fmt_http_date(std::time::UNIX_EPOCH + Duration::from_secs(now));
    let date: &'static str = Box::leak(format!("date: {date}\r\n").into_boxed_str());
    let sink =
        Sink::start(move |seen, _| Act::Answer(if seen.verified { 200 } else { 401 }, date)).await;
    let config = config(&place, &sink, "");
    migrated(&config);
    // Written long ago: what is signed is not the event's own time.
    owe(&place, 1..=2).await;
    for table in ["outbox_messages", "outbox_queue"] {
        let old = format!("update {table} set created_at = created_at - interval '20 minutes'");
        place.rows(&old).await;
    }
    let start = |offset: &str| {
        let command = clock(process::relay(&config), offset);
        Gateway::launch(command, &config).unwrap_or_else(|output| panic!("not started:\n{output}"))
    };
    let refused = "select count(*) from outbox_events where status = 'pending' and last_error like '%401%why?%'";
    for (offset, ahead) in [("+10m", -600), ("-10m", 600)] {
        let relay = start(offset);
        eventually("what the sink says is kept", async || place.count(refused).await == 2).await;
        let told = async || {
            let text = get("/metrics").to(relay.admin).await.body;
            let text = String::from_utf8_lossy(&text).into_owned();
            let name = "oncegate_sink_clock_ahead_seconds{sink=\"main\"} ";
            text.lines().find_map(|line| line.strip_prefix(name)?.parse::<i64>().ok())
        };
        let told = told().await.expect("a clock");
        assert!((told - ahead).abs() < 30, "{offset}: {told}");
        drop(relay);
        place.rows("update outbox_queue set last_error = null").await;
    }
    assert!(sink.seen().iter().all(|seen| !seen.verified), "nothing was delivered so far");
    let relay = start("+4m");
    eventually("all are delivered", async || count(&place, "sent").await == 2).await;
    assert_eq!(delivered(&relay, "sent").await, 2, "in the first attempt");
}

#[tokio::test(flavor = "multi_thread")]
async fn f18_rows_that_nobody_should_have_written_end_and_hold_up_nothing() {
    let place = Place::new(Which::Postgres).await;
    let sink = Sink::start(|_, _| OK).await;
    let config = config(&place, &sink, "max_attempts = 1\nmax_age = \"0s\"");
    migrated(&config);
    place
        .rows(
            r"with m as (
                insert into outbox_messages (id, event_key, seq, event_type, tenant_id, operation,
                  idempotency_key, record_id, payload, created_at)
                select gen_random_uuid(), 'key-' || n, 0, kind, tenant, kind, key, gen_random_uuid(),
                  payload, clock_timestamp()
                from (values
                  (1, 'empty', 't', 'k', ''::bytea),
                  (2, 'not text', 't', 'k', '\xff00fe80'::bytea),
                  (3, E'a\r\nx-evil: 1', E't\r\n\r\n', E'k\r\nhost: evil\x07é', '{}'::bytea),
                  (4, 'large', 't', 'k', decode(repeat('78', 6 * 1024 * 1024), 'hex')),
                  (5, repeat('long', 20000), 't', repeat('k', 70000), '{}'::bytea),
                  (6, '', '', '', '{}'::bytea)) as v(n, kind, tenant, key, payload)
                returning id, created_at)
              insert into outbox_queue (event_id, sink, next_attempt_at, created_at)
              select id, 'main', created_at, created_at from m",
        )
        .await;
    let relay = Gateway::relay(&config);
    owe(&place, 7..=9).await;
    eventually("all end", async || count(&place, "pending").await == 0).await;
    let rows = "select left(event_type, 9), status, last_error from outbox_events
                where status <> 'sent' order by event_key";
    let others = place.rows(rows).await;
    assert!(others.iter().all(|row| row[2].is_some()), "each says why: {others:?}");
    let seen = sink.seen();
    assert!(seen.iter().all(|seen| seen.verified), "and what was sent is signed");
    assert!(seen.iter().all(|seen| !seen.headers.contains_key("x-evil")), "{seen:?}");
    assert!(seen.iter().filter(|seen| seen.text().starts_with("event ")).count() == 3);
    assert!(!relay.log().contains("panicked"), "{}", relay.log());
    eprintln!("{others:?}");
}
