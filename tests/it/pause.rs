//! Sinks that are away, busy or gone: what their outage costs, who notices, and how it ends.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicUsize};
use std::time::Duration;

use oncegate::relay::sink::http::Resolve;
use oncegate::relay::sink::{self, Target, http};
use oncegate::store::{
    EventStatus, Lane, OnDead, Order, PauseReason, Reclaim, SinkChange, SinkOrder, SinkState,
    Sinks, Trouble, Verdict,
};
use oncegate::telemetry::Exposition;
use serde_json::Value;
use tokio::time::Instant;
use uuid::Uuid;

use crate::relay::{LONG, MS, Running, sent, settings, webhook};
use crate::support::client::{get, post};
use crate::support::fake::{Fake, PlayedSink};
use crate::support::fleet::{self, ONE_EVENT, command, order};
use crate::support::rig::{Place, Rig, Which, on_both_stores};
use crate::support::sink::{Act, OK, Seen, Sink};
use crate::support::{eventually, happens, process};

on_both_stores! {
    f17_f23_forty_events_that_always_fail_hold_up_none_of_sixty_good_ones,
    operators_see_a_paused_sink_and_resume_it_from_the_command_line_and_over_http,
}

/// A sink that answers with the status that stands there, after a while.
async fn answering(pace: Duration) -> (Sink, Arc<AtomicU16>) {
    let status = Arc::new(AtomicU16::new(500));
    let says = Arc::clone(&status);
    let act = move |_: &Seen, _| Act::After(pace, Box::new(Act::Answer(says.load(SeqCst), "")));
    (Sink::start(act).await, status)
}

/// Quick to pause and to probe.
fn hasty(sink: &Sink) -> sink::Settings {
    sink::Settings {
        pause_after: 5,
        concurrency: 8,
        backoff_base: MS,
        backoff_max: 150 * MS,
        ..settings(sink)
    }
}

/// As patient as a sink is without any settings.
fn patient(sink: &Sink) -> sink::Settings {
    sink::Settings {
        pause_after: 10,
        concurrency: 16,
        backoff_base: 1000 * MS,
        backoff_max: Duration::from_secs(3600),
        ..settings(sink)
    }
}

/// A sink that fails each event whose text says so.
async fn failing_bad_ones() -> Sink {
    let bad = |seen: &Seen, _| if seen.text().contains("bad") { Act::Answer(500, "") } else { OK };
    Sink::start(bad).await
}

/// How long each pause for failures was to last before its first probe, and how many failed probes it counted.
fn pauses(fake: &Fake) -> Vec<(Duration, u32)> {
    let changes = fake.changes.lock().unwrap();
    let pause = |change: &SinkChange| match change {
        SinkChange::Pause { trouble: Trouble::Failing { again }, failed_probes, .. } => {
            Some((*again, *failed_probes))
        }
        SinkChange::Pause { .. }
        | SinkChange::Probe { .. }
        | SinkChange::ProbeFailed { .. }
        | SinkChange::ProbeIdle { .. }
        | SinkChange::Resume => None,
    };
    changes.iter().filter_map(pause).collect()
}

fn failed_probes(fake: &Fake) -> usize {
    let changes = fake.changes.lock().unwrap();
    changes.iter().filter(|change| matches!(change, SinkChange::ProbeFailed { .. })).count()
}

fn attempts(fake: &Fake) -> u32 {
    fake.rows.lock().unwrap().values().map(|row| row.attempts).sum()
}

#[tokio::test]
async fn f16_f21_f23_an_outage_costs_a_few_probes_and_no_attempts_and_ends_without_a_rush() {
    let pace = 30 * MS;
    let (sink, status) = answering(pace).await;
    let fake = Arc::new(Fake::default());
    for _ in 0..200 {
        fake.add("{}");
    }
    let running = Running::start(&fake, vec![hasty(&sink)]);
    eventually("it is probed", LONG, || failed_probes(&fake) >= 2).await;
    let (requests, used, probes) = (sink.seen().len(), attempts(&fake), failed_probes(&fake));
    // Five make the pause, and as many as there are slots are under way then; each that ends before the pause is written, which
    // takes a moment on a busy machine, makes room for one more. Two hundred wait.
    assert!(requests <= 5 + 2 * 8 + probes + 1, "{requests} {used} {probes}");
    assert!(used <= 5 + 8, "{requests} {used} {probes}");
    let paused = r#"oncegate_sink_paused{sink="main",reason="failing"} 1"#;
    assert!(
        running.metrics.render(Exposition::Prometheus).contains(paused),
        "{}",
        running.metrics.render(Exposition::Prometheus)
    );
    eventually("more probes", LONG, || failed_probes(&fake) >= probes + 4).await;
    assert_eq!(attempts(&fake), used, "a failed probe is no attempt");
    let [(at_once, 0)] = pauses(&fake)[..] else { panic!("{:?}", pauses(&fake)) };
    assert_eq!(at_once, Duration::ZERO, "it may be some events only");
    let waits = |change: &SinkChange| match change {
        SinkChange::ProbeFailed { trouble, .. } => trouble.again() >= Some(100 * MS),
        SinkChange::Pause { .. } | SinkChange::Probe { .. } => true,
        SinkChange::ProbeIdle { .. } | SinkChange::Resume => false,
    };
    assert!(fake.changes.lock().unwrap().iter().all(waits), "the next ones wait");
    let (seen, probes) = (sink.seen(), failed_probes(&fake) - probes);
    assert!(seen.len() <= requests + probes + 2, "only probes: {} {requests}", seen.len());
    let probe = seen.last().unwrap().id().parse().unwrap();
    eventually("the probe's error is kept", LONG, || fake.row(probe).error.contains("500")).await;

    status.store(200, SeqCst);
    let first = |sink: &Sink| {
        let resumed = fake.changes.lock().unwrap().contains(&SinkChange::Resume);
        resumed.then(|| sink.seen().len())
    };
    eventually("it is resumed", LONG, || first(&sink).is_some()).await;
    sent(&fake, 200).await;
    running.stop().await;
    // The probe that went well is the first that was taken; after it come one, two, four, and only then all.
    let seen = sink.seen();
    let taken: Vec<_> = seen.iter().rev().take(200).rev().map(|seen| seen.at).collect();
    let within = |from: usize| taken[from..].iter().filter(|at| **at < taken[from] + pace).count();
    assert_eq!(within(1), 1, "one slot at first");
    assert!(within(2) <= 2 && within(4) <= 4, "then two, then four");
    assert!(sink.most().0 <= 8);
    assert_eq!(attempts(&fake), used + 200);
}

/// The name of the sink is not known to anybody for a while.
#[derive(Debug, Default)]
struct Names {
    away: AtomicBool,
    asked: AtomicUsize,
}

#[async_trait::async_trait]
impl Resolve for Names {
    async fn resolve(&self, host: &str, port: u16) -> std::io::Result<Vec<SocketAddr>> {
        self.asked.fetch_add(1, SeqCst);
        if self.away.load(SeqCst) {
            return Err(std::io::Error::other(format!("nobody knows {host}")));
        }
        Ok(vec![([127, 0, 0, 1], port).into()])
    }
}

#[tokio::test]
async fn f58_neither_a_database_nor_names_that_are_away_during_a_pause_make_it_last() {
    let (sink, names) = (Sink::start(|_, _| OK).await, Arc::new(Names::default()));
    names.away.store(true, SeqCst);
    let target = http::Settings {
        url: format!("http://sink.test:{}/hook", sink.port).parse().unwrap(),
        resolver: names.clone(),
        ..webhook(&sink)
    };
    let fake = Arc::new(Fake::default());
    for _ in 0..20 {
        fake.add("{}");
    }
    let settings = sink::Settings { target: Target::Http(target), ..hasty(&sink) };
    let running = Running::start(&fake, vec![settings]);
    eventually("it is paused and probed", LONG, || failed_probes(&fake) >= 2).await;
    assert!(
        fake.state("main").error.contains("nobody knows sink.test"),
        "{:?}",
        fake.state("main")
    );
    // Probes, claims and verdicts fail now, whatever the relay tries first.
    fake.away.store(6, SeqCst);
    let (begun, asked) = (Instant::now(), names.asked.load(SeqCst));
    eventually("the database is back", LONG, || fake.away.load(SeqCst) == 0).await;
    assert!(begun.elapsed() > 200 * MS, "six failures took {:?}", begun.elapsed());
    assert!(names.asked.load(SeqCst) - asked <= 20, "no hot loop");
    names.away.store(false, SeqCst);
    sent(&fake, 20).await;
    running.stop().await;
    assert_eq!((sink.ids().len(), fake.state("main").reason), (20, None));
}

#[tokio::test]
async fn f23_a_sink_of_which_every_other_answer_fails_is_not_paused() {
    let every_other = |_: &Seen, before| if before % 2 == 0 { Act::Answer(500, "") } else { OK };
    let sink = Sink::start(every_other).await;
    let fake = Arc::new(Fake::default());
    for _ in 0..20 {
        fake.add("{}");
    }
    let one = sink::Settings { concurrency: 1, pause_after: 2, ..hasty(&sink) };
    let running = Running::start(&fake, vec![one]);
    sent(&fake, 20).await;
    running.stop().await;
    assert_eq!(*fake.changes.lock().unwrap(), []);
}

#[tokio::test]
async fn f23_a_sink_that_answers_one_probe_and_no_more_is_paused_again_and_probed_no_faster() {
    let answers = Arc::new(AtomicU16::new(0));
    let left = Arc::clone(&answers);
    let sink = Sink::start(move |_, _| {
        let take = left.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1));
        if take.is_ok() { OK } else { Act::Answer(502, "") }
    })
    .await;
    let fake = Arc::new(Fake::default());
    for _ in 0..30 {
        fake.add("{}");
    }
    let running = Running::start(&fake, vec![hasty(&sink)]);
    eventually("it is probed", LONG, || failed_probes(&fake) >= 3).await;
    answers.store(1, SeqCst);
    eventually("it is paused again", LONG, || pauses(&fake).len() > 1).await;
    let (wait, failed) = pauses(&fake)[1];
    assert!(wait >= 100 * MS && failed >= 3, "the pace goes on: {wait:?} {failed}");
    answers.store(1000, SeqCst);
    sent(&fake, 30).await;
    running.stop().await;
}

#[tokio::test]
async fn f17_f23_an_event_that_always_fails_does_not_keep_its_sink_paused() {
    let sink = failing_bad_ones().await;
    let fake = Arc::new(Fake::default());
    let now = Instant::now();
    for _ in 0..3 {
        // The oldest of all, tried before.
        let id = Uuid::new_v4();
        fake.add_row(id, r#"{"bad":1}"#, |row| (row.lane, row.attempts) = (Lane::Retry, 7));
    }
    let good = fake.add(r#"{"good":1}"#);
    let state = PlayedSink {
        no: 7,
        reason: Some(PauseReason::Failing),
        probe_at: Some(now),
        probing_until: None,
        failed_probes: 4,
        error: String::new(),
    };
    fake.sinks.lock().unwrap().insert("main".into(), state);
    let running = Running::start(&fake, vec![hasty(&sink)]);
    eventually("the good one", LONG, || fake.row(good).status == EventStatus::Sent).await;
    eventually("resumed", LONG, || fake.state("main").reason.is_none()).await;
    running.stop().await;
}

/// With the settings that a sink has by itself: to wait for one probe after the other would take longer than the test.
async fn f17_f23_forty_events_that_always_fail_hold_up_none_of_sixty_good_ones(which: Which) {
    for order in [Order::None, Order::Key(OnDead::Free)] {
        let sink = failing_bad_ones().await;
        let place = Place::new(which).await;
        let store = crate::order::store(&place).await;
        crate::order::write(&place, which, 0..40, "('bad' || n)").await;
        crate::order::write(&place, which, 40..100, "('k' || n)").await;
        // A minute ago, and some time after that.
        let (second, good) = match which {
            Which::Postgres => ("interval '1 second'", "ordering_key LIKE 'k%'"),
            Which::Sqlite => ("1000000", "ordering_key LIKE 'k%'"),
        };
        let ago = format!(
            "update outbox_queue set next_attempt_at = next_attempt_at
             - case when {good} then 1 else 60 end * {second}"
        );
        place.rows(&ago).await;
        let settings = sink::Settings { order, ..patient(&sink) };
        let relay = Running::on(Arc::clone(&store), vec![settings], 20 * MS);
        let good = || sink.seen().iter().filter(|seen| !seen.text().contains("bad")).count();
        eventually("all good ones", LONG, || good() >= 60).await;
        relay.stop().await;
        // Each pause with its probe is three changes, each probe that failed two more. One after the other they were eighty.
        let changes = store.sinks(Reclaim::Expired).await.unwrap()[0].no;
        assert!((3..=24).contains(&changes), "{changes}");
        assert_eq!(good(), 60);
    }
}

#[tokio::test]
async fn f17_what_comes_back_from_a_pause_does_not_go_through_all_bad_events_first() {
    let sink = failing_bad_ones().await;
    let fake = Arc::new(Fake::default());
    let now = Instant::now();
    for n in 0..460 {
        let (text, ago) = if n < 400 { ("bad", 60_000 - n) } else { ("good", 1000 - n) };
        fake.add_row(Uuid::new_v4(), text, |row| row.due = now - ago * MS);
    }
    let running = Running::start(&fake, vec![patient(&sink)]);
    sent(&fake, 60).await;
    running.stop().await;
    // Ten bad ones make a pause. At the head of all of them each would end with one good event, its probe.
    let pauses = pauses(&fake);
    assert!((1..=9).contains(&pauses.len()), "{pauses:?}");
    assert!(pauses.iter().filter(|(again, _)| !again.is_zero()).count() <= 1, "{pauses:?}");
}

#[tokio::test]
async fn f17_bad_events_that_fail_again_pause_nothing_while_others_go_well() {
    let sink = failing_bad_ones().await;
    let fake = Arc::new(Fake::default());
    let running = Running::start(&fake, vec![patient(&sink)]);
    fake.add("good");
    sent(&fake, 1).await;
    let bad: Vec<Uuid> = (0..40).map(|_| Uuid::new_v4()).collect();
    for id in &bad {
        fake.add_row(*id, "bad", |row| (row.lane, row.attempts) = (Lane::Retry, 3));
    }
    eventually("each once more", LONG, || bad.iter().all(|id| fake.row(*id).attempts > 3)).await;
    assert!(pauses(&fake).is_empty());
    // Untried ones that fail are news.
    for _ in 0..40 {
        fake.add_row(Uuid::new_v4(), "bad", |_| ());
    }
    eventually("a pause", LONG, || !pauses(&fake).is_empty()).await;
    running.stop().await;
}

#[tokio::test]
async fn f17_the_first_probe_of_a_pause_takes_what_came_last() {
    let sink = failing_bad_ones().await;
    let fake = Arc::new(Fake::default());
    let now = Instant::now();
    for n in 0..460 {
        let text = if n < 400 { "bad" } else { "good" };
        fake.add_row(Uuid::new_v4(), text, |row| row.due = now - (460 - n) * MS);
    }
    let running = Running::start(&fake, vec![patient(&sink)]);
    sent(&fake, 60).await;
    running.stop().await;
    // A probe from anywhere would meet a bad one seven times out of eight. The last good ones may be under way elsewhere.
    assert!(!pauses(&fake).is_empty() && failed_probes(&fake) <= 1, "{:?}", pauses(&fake));
}

#[tokio::test]
async fn f17_where_all_fresh_events_fail_a_good_one_that_comes_is_among_the_next_probes() {
    let sink = failing_bad_ones().await;
    let fake = Arc::new(Fake::default());
    let now = Instant::now();
    for n in 0..60 {
        fake.add_row(Uuid::new_v4(), "bad", |row| row.due = now - (60_000 - n) * MS);
    }
    let running = Running::start(&fake, vec![hasty(&sink)]);
    eventually("it is probed", LONG, || failed_probes(&fake) >= 3).await;
    let before = failed_probes(&fake);
    let good = fake.add("good");
    eventually("the good one", LONG, || fake.row(good).status == EventStatus::Sent).await;
    let probes = failed_probes(&fake) - before;
    running.stop().await;
    // One that was under way, one of the other lane; and hardly ever one of the bad ones.
    assert!(probes <= 4, "{probes}");
}

#[tokio::test]
async fn f19_refused_events_die_early_and_pause_nothing() {
    let judge = |seen: &Seen, _| match seen.text().as_str() {
        "400" => Act::Answer(400, ""),
        "413" => Act::Answer(413, ""),
        "415" => Act::Answer(415, ""),
        "422" => Act::Answer(422, ""),
        _ => OK,
    };
    let sink = Sink::start(judge).await;
    let fake = Arc::new(Fake::default());
    let refused = ["400", "413", "415", "422"].map(|status| fake.add(status));
    let one = sink::Settings { pause_after: 1, refusals_max: 3, ..hasty(&sink) };
    let running = Running::start(&fake, vec![one]);
    eventually("they are dead", LONG, || fake.count(EventStatus::Dead) == 4).await;
    fake.add("{}");
    sent(&fake, 1).await;
    running.stop().await;
    assert_eq!(sink.seen().len(), 4 * 3 + 1);
    assert_eq!(*fake.changes.lock().unwrap(), []);
    assert!(fake.row(refused[3]).error.contains("422: why?"), "{:?}", fake.row(refused[3]));
}

#[tokio::test]
async fn f20_a_backlog_of_retries_does_not_delay_fresh_events() {
    let sink = Sink::start(|_, _| Act::After(10 * MS, Box::new(OK))).await;
    let fake = Arc::new(Fake::default());
    for _ in 0..600 {
        fake.add_row(Uuid::new_v4(), "{}", |row| (row.lane, row.attempts) = (Lane::Retry, 3));
    }
    let running = Running::start(&fake, vec![settings(&sink)]);
    sent(&fake, 20).await;
    for _ in 0..10 {
        let (begun, id) = (Instant::now(), fake.add("{}"));
        running.wake.notify_one();
        eventually("a fresh one", LONG, || fake.row(id).status == EventStatus::Sent).await;
        assert!(begun.elapsed() < 500 * MS, "{:?}", begun.elapsed());
    }
    assert!(fake.count(EventStatus::Pending) > 0, "the backlog drains still");
    running.stop().await;
}

#[tokio::test]
async fn f32_a_sink_that_is_gone_is_left_alone_until_it_is_resumed_and_loses_nothing() {
    let (sink, status) = answering(MS).await;
    status.store(410, SeqCst);
    let fake = Arc::new(Fake::default());
    for _ in 0..20 {
        fake.add("{}");
    }
    // Were it an attempt, each would be dead.
    let strict = sink::Settings { attempts_max: 1, age_max: Duration::ZERO, ..hasty(&sink) };
    let running = Running::start(&fake, vec![strict]);
    let gone = r#"oncegate_sink_paused{sink="main",reason="gone"} 1"#;
    eventually("it is known", LONG, || {
        running.metrics.render(Exposition::Prometheus).contains(gone)
    })
    .await;
    let quiet = || fake.rows.lock().unwrap().values().all(|row| row.leased <= Instant::now());
    eventually("what was under way is back", LONG, quiet).await;
    status.store(200, SeqCst);
    let asked = sink.seen().len();
    assert!(asked <= 8, "{asked}");
    // Longer than any probe of this sink waits, and more than one reading.
    let begun = Instant::now();
    eventually("a while", LONG, || {
        running.wake.notify_one();
        begun.elapsed() > 400 * MS
    })
    .await;
    assert_eq!((sink.seen().len(), attempts(&fake)), (asked, 0));
    let by = oncegate::store::Operator { who: "olga".into(), why: None };
    fake.operate_sink("main", SinkOrder::Resume, &by).await.unwrap();
    sent(&fake, 20).await;
    running.stop().await;
    assert_eq!(attempts(&fake), 20);
}

#[tokio::test]
async fn f33_a_sink_that_asks_for_a_pause_gets_it_for_all_events_and_no_event_dies_of_it() {
    let busy = |_: &Seen, before| match before {
        0..3 => Act::Answer(429, "retry-after: 1\r\n"),
        _ => OK,
    };
    let sink = Sink::start(busy).await;
    let fake = Arc::new(Fake::default());
    for _ in 0..6 {
        fake.add("{}");
    }
    let strict = sink::Settings {
        concurrency: 2,
        attempts_max: 1,
        age_max: Duration::ZERO,
        backoff_max: 1100 * MS,
        ..hasty(&sink)
    };
    let running = Running::start(&fake, vec![strict]);
    sent(&fake, 6).await;
    running.stop().await;
    let at: Vec<_> = sink.seen().iter().map(|seen| seen.at).collect();
    // Two are under way when it says so; then one at a time.
    for (one, next) in [(0, 2), (2, 3)] {
        let pause = at[next] - at[one];
        assert!(pause >= 990 * MS && pause < 3000 * MS, "{one}: {pause:?}");
    }
    assert_eq!(attempts(&fake), 6);
    let changes = fake.changes.lock().unwrap().clone();
    let busy = |change: &SinkChange| match change {
        SinkChange::Pause { trouble, .. } | SinkChange::ProbeFailed { trouble, .. } => {
            matches!(trouble, Trouble::Busy { .. })
        }
        SinkChange::Probe { .. } | SinkChange::Resume => true,
        SinkChange::ProbeIdle { .. } => false,
    };
    assert!(changes.iter().all(busy), "{changes:?}");
    let acknowledged = fake.acknowledged.lock().unwrap();
    let back = acknowledged.iter().filter(|ack| matches!(ack.verdict, Verdict::Returned { .. }));
    assert_eq!(back.count(), 3);
}

#[tokio::test]
async fn f33_a_sink_that_names_no_time_to_come_is_left_alone_and_no_event_dies_of_it() {
    let busy = |_: &Seen, before| match before {
        0 | 2 => Act::Answer(503, "retry-after: 0\r\n"),
        1 | 3 => Act::Answer(429, "retry-after: Sun, 06 Nov 1994 08:49:37 GMT\r\n"),
        _ => OK,
    };
    let sink = Sink::start(busy).await;
    let fake = Arc::new(Fake::default());
    for _ in 0..3 {
        fake.add("{}");
    }
    // Were it an attempt, each would be dead.
    let strict =
        sink::Settings { concurrency: 1, attempts_max: 1, age_max: Duration::ZERO, ..hasty(&sink) };
    let running = Running::start(&fake, vec![strict]);
    sent(&fake, 3).await;
    running.stop().await;
    let at: Vec<_> = sink.seen().iter().map(|seen| seen.at).collect();
    assert!(at[..5].windows(2).all(|two| two[1] - two[0] >= 95 * MS), "no hot loop: {at:?}");
    assert_eq!((at.len(), attempts(&fake)), (7, 3));
    let first = fake.changes.lock().unwrap().first().cloned().unwrap();
    let busy = matches!(first, SinkChange::Pause { trouble: Trouble::Busy { .. }, .. });
    assert!(busy, "{first:?}");
    assert_eq!(failed_probes(&fake), 3, "so that the pause grows");
}

#[tokio::test(flavor = "multi_thread")]
async fn f16_f23_relays_on_one_database_pause_together_and_probe_one_at_a_time() {
    let pace = 40 * MS;
    let (sink, status) = answering(pace).await;
    let store = crate::postgres::open().await;
    let names: Vec<String> = (0..60).map(|n| format!("e{n}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let (_, fence) = crate::store::announced(&store, "main", &names).await;
    let relay = || Running::on(Arc::clone(&store), vec![hasty(&sink)], 20 * MS);
    let mut relays = vec![relay(), relay()];
    let state =
        async || -> Option<SinkState> { store.sinks(Reclaim::Expired).await.unwrap().pop() };
    let probes =
        async || state().await.and_then(|state| state.pause).map_or(0, |pause| pause.failed_probes);
    happens("it is probed", LONG, async || probes().await >= 2).await;
    let (requests, before) = (sink.seen().len(), probes().await);
    assert!(requests <= 2 * (5 + 8) + 4, "each pauses after a few: {requests}");
    // A third one that starts in the middle of the outage begins with nothing.
    relays.push(relay());
    happens("more probes", LONG, async || probes().await >= before + 6).await;
    let paused = r#"oncegate_sink_paused{sink="main",reason="failing"} 1"#;
    assert!(
        relays.iter().all(|relay| relay.metrics.render(Exposition::Prometheus).contains(paused))
    );
    let seen = sink.seen();
    let failed = (probes().await - before) as usize;
    assert!(seen.len() <= requests + failed + 2, "{} {requests} {failed}", seen.len());
    let at: Vec<_> = seen[requests..].iter().map(|seen| seen.at).collect();
    let overlap = at.windows(2).any(|two| two[1] < two[0] + pace);
    assert!(!overlap, "one probe at a time: {at:?}");
    let filter =
        oncegate::store::EventFilter { record: Some(fence.id), limit: 99, ..Default::default() };
    let rows = async || store.list_events(&filter).await.unwrap();
    let used: u32 = rows().await.iter().map(|row| row.attempts).sum();
    assert!(used <= 2 * (5 + 8), "{used}");

    status.store(200, SeqCst);
    let all = async || rows().await.iter().all(|row| row.status == EventStatus::Sent);
    happens("all is delivered", LONG, all).await;
    for relay in relays {
        relay.stop().await;
    }
    assert_eq!(rows().await.iter().map(|row| row.attempts).sum::<u32>(), used + 60);
}

async fn operators_see_a_paused_sink_and_resume_it_from_the_command_line_and_over_http(
    which: Which,
) {
    let (sink, status) = answering(MS).await;
    status.store(410, SeqCst);
    let more = format!("{ONE_EVENT}{}", fleet::sink(sink.port));
    let mut rig = Rig::start(which, &more).await;
    let listed = |rig: &Rig| -> Value {
        let (code, out, errors) = command(&rig.gateway, &["sinks", "list", "--json"]);
        assert_eq!(code, 0, "{errors}");
        let page: Value = serde_json::from_str(&out).unwrap();
        page["sinks"]
            .as_array()
            .unwrap()
            .iter()
            .find(|sink| sink["name"] == "main")
            .unwrap()
            .clone()
    };
    let pending = async |rig: &Rig, count: i64| {
        let owed = "select count(*) from outbox_events where status = 'pending'";
        process::eventually("owed", async || rig.place.count(owed).await == count).await;
    };
    let open = listed(&rig);
    assert_eq!(
        (&open["paused"], &open["configured"], &open["pending"]),
        (&false.into(), &true.into(), &0.into())
    );
    order("k-1").to(rig.gateway.addr).await;
    process::eventually("it is paused", async || listed(&rig)["reason"] == "gone").await;
    process::eventually("it is said", async || {
        rig.gateway.log().contains("oncegate sinks resume main")
    })
    .await;
    let gone = listed(&rig);
    assert_eq!((&gone["pending"], &gone["next_probe_seconds"]), (&1.into(), &Value::Null));
    assert!(gone["last_error"].as_str().unwrap().contains("410"), "{gone}");
    let (_, table, _) = command(&rig.gateway, &["sinks", "list"]);
    assert!(table.contains("paused: gone"), "{table}");

    status.store(200, SeqCst);
    let resume = ["sinks", "resume", "main", "--reason", "deployed again"];
    assert_eq!(command(&rig.gateway, &resume).0, 0);
    pending(&rig, 0).await;
    assert_eq!(command(&rig.gateway, &resume).0, 1, "it is not paused any more");
    assert_eq!(command(&rig.gateway, &["sinks", "pause", "other"]).0, 2, "there is none");

    let act = async |what: &str, body: &str| {
        let target = format!("/api/v1/sinks/{what}");
        let host = rig.gateway.admin;
        post(&target, body).to(host).await.status.as_u16()
    };
    assert_eq!(act("main/pause", r#"{"reason":"a move"}"#).await, 200);
    assert_eq!(act("main/pause", "").await, 409);
    assert_eq!(act("other/pause", "").await, 404);
    assert_eq!(act("main/resume", r#"{"why":"?"}"#).await, 400);
    let over_http = get("/api/v1/sinks").to(rig.gateway.admin).await.json()["sinks"][0].clone();
    assert_eq!((&over_http["reason"], &over_http["note"]), (&"operator".into(), &"a move".into()));
    let (_, table, _) = command(&rig.gateway, &["sinks", "list"]);
    assert!(
        table.contains("a move") && table.contains("410"),
        "what it met is not hidden: {table}"
    );
    let shown = async || {
        let text = get("/metrics").to(rig.gateway.admin).await.body;
        String::from_utf8_lossy(&text).contains(r#"sink_paused{sink="main",reason="operator"} 1"#)
    };
    process::eventually("its relay knows", shown).await;
    let delivered = sink.seen().len();
    order("k-2").to(rig.gateway.addr).await;
    pending(&rig, 1).await;
    let audit = "select action, who, why from audit_log where action like 'sink.%' order by at";
    let audit = rig.place.rows(audit).await;
    let actions: Vec<_> = audit.iter().map(|row| row[0].as_deref().unwrap()).collect();
    assert_eq!(actions, ["sink.resume", "sink.pause"]);
    let (who, why) = (audit[1][1].as_deref(), audit[1][2].as_deref());
    assert_eq!((who, why), (Some("admin listener"), Some("a move")));

    // A restart keeps the pause, and what is owed to a sink that nobody knows any more is seen and stays.
    let toml = std::fs::read_to_string(&rig.gateway.config).unwrap();
    std::fs::write(&rig.gateway.config, toml.replace("name = \"main\"", "name = \"new\"")).unwrap();
    rig.gateway.kill9();
    rig.gateway = tokio::task::block_in_place(|| rig.gateway.restart());
    let stranger = listed(&rig);
    assert_eq!((&stranger["configured"], &stranger["pending"]), (&false.into(), &1.into()));
    process::eventually("it is warned of", async || {
        rig.gateway.log().contains("not in this configuration")
    })
    .await;
    std::fs::write(&rig.gateway.config, toml).unwrap();
    rig.gateway.kill9();
    rig.gateway = tokio::task::block_in_place(|| rig.gateway.restart());
    assert_eq!((listed(&rig)["reason"].clone(), sink.seen().len()), ("operator".into(), delivered));
    let target = "/api/v1/sinks/main/resume";
    assert_eq!(post(target, "").to(rig.gateway.admin).await.status.as_u16(), 200);
    pending(&rig, 0).await;
}
