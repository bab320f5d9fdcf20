//! The relay against a scriptable sink: what is delivered, when, how often, and what a fault costs.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use ::http::HeaderMap;
use oncegate::record::event::subscription::TypeFilter;
use oncegate::record::{Lease, LeaseView, OwnerId};
use oncegate::relay::sink::{Target, http};
use oncegate::relay::{self, Claimant, Settings, sink};
use oncegate::store::{EventStatus, Lane, Order, Store, Verdict, Woken};
use oncegate::telemetry::{Exposition, Metrics};
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::support::eventually;
use crate::support::fake::Fake;
use crate::support::sink::{Act, OK, SECRET, Seen, Sink};

pub(crate) const LONG: Duration = Duration::from_secs(20);
pub(crate) const MS: Duration = Duration::from_millis(1);

pub(crate) fn settings(sink: &Sink) -> sink::Settings {
    sink::Settings {
        name: "main".into(),
        timeout: Duration::from_secs(5),
        concurrency: 4,
        backoff_base: 100 * MS,
        backoff_max: 400 * MS,
        attempts_max: 20,
        age_max: Duration::from_secs(3600),
        events: TypeFilter::All,
        refusals_max: 5,
        pause_after: 1_000_000,
        order: Order::None,
        target: Target::Http(webhook(sink)),
    }
}

pub(crate) fn webhook(sink: &Sink) -> http::Settings {
    http::Settings {
        url: sink.url().parse().unwrap(),
        secrets: vec![SECRET.into()],
        secret_file: None,
        secrets_every: http::SECRETS_EVERY,
        format: http::Format::StandardWebhooks,
        source: "/oncegate".into(),
        headers: HeaderMap::new(),
        ca_file: None,
        identity: None,
        allow_private: true,
        allow_http: false,
        resolver: Arc::new(http::System),
    }
}

/// A relay of a process that lives long, and judges no other.
pub(crate) fn claimant() -> Claimant {
    let sure_until = std::time::Instant::now() + Duration::from_secs(3600);
    let lease = LeaseView::new(Lease { owner: OwnerId::fresh(), sure_until });
    Claimant { lease, may_mark_dead: Arc::new(|| false) }
}

pub(crate) struct Running {
    stop: CancellationToken,
    pub(crate) wake: Arc<Notify>,
    pub(crate) metrics: Arc<Metrics>,
    task: tokio::task::JoinHandle<()>,
}

impl Running {
    pub(crate) fn start<S: Store>(store: &Arc<S>, sinks: Vec<sink::Settings>) -> Self {
        Self::polling(store, sinks, 20 * MS)
    }

    fn polling<S: Store>(store: &Arc<S>, sinks: Vec<sink::Settings>, poll: Duration) -> Self {
        let store: Arc<dyn Store> = store.clone();
        Self::on(store, sinks, poll)
    }

    pub(crate) fn on(store: Arc<dyn Store>, sinks: Vec<sink::Settings>, poll: Duration) -> Self {
        let (stop, wake) = (CancellationToken::new(), Arc::new(Notify::new()));
        let metrics = Arc::new(Metrics::default());
        let settings = Settings { sinks, poll };
        let run = relay::run(
            store,
            settings,
            claimant(),
            Arc::clone(&metrics),
            Arc::clone(&wake),
            stop.clone(),
        );
        Self { stop, wake, metrics, task: tokio::spawn(run) }
    }

    pub(crate) async fn stop(self) {
        self.stop.cancel();
        tokio::time::timeout(LONG, self.task).await.expect("the relay ends").unwrap();
    }
}

/// One event, delivered to a sink that acts so on the first request, and takes all later ones.
async fn first_act(act: Act, change: impl Fn(&mut sink::Settings)) -> (Arc<Fake>, Uuid, Sink) {
    let sink = Sink::start(move |_, before| if before == 0 { act.clone() } else { OK }).await;
    let fake = Arc::new(Fake::default());
    let id = fake.add(r#"{"n":1}"#);
    let mut settings = settings(&sink);
    change(&mut settings);
    let running = Running::start(&fake, vec![settings]);
    sent(&fake, 1).await;
    running.stop().await;
    (fake, id, sink)
}

pub(crate) async fn sent(fake: &Arc<Fake>, count: usize) {
    eventually("all sent", LONG, || fake.count(EventStatus::Sent) >= count).await;
}

#[tokio::test]
async fn f07_a_slow_sink_gets_no_event_twice_from_two_relays() {
    let sink = Sink::start(|_, _| Act::After(40 * MS, Box::new(OK))).await;
    let fake = Arc::new(Fake::default());
    for n in 0..60 {
        fake.add(&format!("{{\"n\":{n}}}"));
    }
    let relays = [settings(&sink), settings(&sink)].map(|sink| Running::start(&fake, vec![sink]));
    sent(&fake, 60).await;
    for relay in relays {
        relay.stop().await;
    }
    assert_eq!((sink.seen().len(), sink.ids().len()), (60, 60));
    assert!(fake.leased_most.load(SeqCst) <= 8, "{:?}", fake.leased_most);
    let (most, most_per_id) = sink.most();
    assert!(most <= 8 && most_per_id == 1, "{most} {most_per_id}");
}

#[tokio::test(start_paused = true)]
async fn f07_what_was_claimed_too_long_ago_is_given_back_unsent() {
    let sink = Sink::start(|_, _| OK).await;
    let fake = Arc::new(Fake::default());
    fake.add("{}");
    // Longer than the claim, less a delivery and its acknowledgement.
    *fake.slow.lock().unwrap() = Duration::from_secs(9);
    let running = Running::start(&fake, vec![settings(&sink)]);
    eventually("a verdict", LONG, || !fake.acknowledged.lock().unwrap().is_empty()).await;
    assert_eq!(fake.acknowledged.lock().unwrap()[0].verdict, Verdict::GivenBack);
    assert!(sink.seen().is_empty());
    running.stop().await;
}

#[tokio::test]
async fn f08_a_2xx_whose_body_never_ends_is_delivered_by_the_deadline() {
    let head = "HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n";
    let begun = Instant::now();
    let short = |s: &mut sink::Settings| s.timeout = 300 * MS;
    let (fake, id, sink) = first_act(Act::Drip(head, b'x', 50 * MS), short).await;
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    assert_eq!((fake.row(id).attempts, sink.seen().len()), (1, 1));
}

#[tokio::test]
async fn f10_f42_id_and_bytes_stay_the_same_over_attempts_and_every_signature_verifies() {
    let sink = Sink::start(|_, before| if before < 6 { Act::Answer(500, "") } else { OK }).await;
    let fake = Arc::new(Fake::default());
    let payload = r#"{"z":1.0,"a":12345678901234567890,"e":1e2,"u":"é/<","z":2}"#;
    let ids: Vec<_> = (0..5).map(|_| fake.add(payload)).collect();
    let running = Running::start(&fake, vec![settings(&sink)]);
    sent(&fake, 5).await;
    running.stop().await;
    let seen = sink.seen();
    assert_eq!((seen.len(), sink.ids().len()), (11, 5));
    for Seen { headers, body, verified, path, .. } in &seen {
        assert!(*verified && body == payload.as_bytes());
        assert_eq!(
            (path.as_str(), &headers["content-type"]),
            ("/hook?x=1", &"application/json".parse().unwrap())
        );
        assert!(headers["user-agent"].to_str().unwrap().starts_with("oncegate/"));
    }
    assert!(ids.iter().all(|id| sink.ids().contains(&id.to_string())));
}

#[tokio::test]
async fn f11_a_late_verdict_changes_nothing_of_the_new_claim_and_is_counted() {
    let sink = Sink::start(|_, _| Act::After(300 * MS, Box::new(OK))).await;
    let fake = Arc::new(Fake::default());
    let id = fake.add("{}");
    let running = Running::start(&fake, vec![settings(&sink)]);
    eventually("it is in flight", LONG, || !sink.seen().is_empty()).await;
    // Another relay has it by now, and its attempt failed.
    fake.rows.lock().unwrap().get_mut(&id).unwrap().claim_no = 7;
    let lost = r#"oncegate_deliveries_total{sink="main",result="lost_claim"} 1"#;
    eventually("a lost claim", LONG, || {
        running.metrics.render(Exposition::Prometheus).contains(lost)
    })
    .await;
    assert_eq!((fake.row(id).status, fake.row(id).attempts), (EventStatus::Pending, 0));
    running.stop().await;
}

#[tokio::test]
async fn f12_a_verdict_that_the_database_does_not_take_is_repeated_and_nothing_is_sent_again() {
    let fake = Arc::new(Fake::default());
    let id = fake.add("{}");
    let outage = Arc::clone(&fake);
    let sink = Sink::start(move |_, _| {
        outage.away.store(4, SeqCst);
        OK
    })
    .await;
    let running = Running::start(&fake, vec![settings(&sink)]);
    sent(&fake, 1).await;
    running.stop().await;
    assert_eq!((sink.seen().len(), fake.row(id).attempts), (1, 1));
}

#[tokio::test]
async fn f12_a_verdict_is_forgotten_when_its_claim_is_over_and_costs_one_more_delivery() {
    let fake = Arc::new(Fake::default());
    let id = fake.add("{}");
    let outage = Arc::clone(&fake);
    let sink = Sink::start(move |_, before| {
        outage.away.store(if before == 0 { usize::MAX } else { 0 }, SeqCst);
        OK
    })
    .await;
    let short = sink::Settings { timeout: 100 * MS, ..settings(&sink) };
    let running = Running::start(&fake, vec![short]);
    eventually("it is sent", LONG, || !sink.seen().is_empty()).await;
    let now = Instant::now();
    eventually("its claim is over", LONG, || fake.row(id).leased <= Instant::now()).await;
    assert!(now.elapsed() > Duration::from_secs(4), "the outage outlasts the claim");
    fake.away.store(0, SeqCst);
    sent(&fake, 1).await;
    running.stop().await;
    assert_eq!((sink.seen().len(), sink.ids().len()), (2, 1));
    let claims: Vec<_> = fake.acknowledged.lock().unwrap().iter().map(|a| a.claim_no).collect();
    assert_eq!(claims, [2], "the first claim's verdict is forgotten");
}

#[tokio::test]
async fn f12_an_acknowledgement_in_doubt_counts_once() {
    let fake = Arc::new(Fake::default());
    fake.doubtful.store(1, SeqCst);
    fake.add("{}");
    let sink = Sink::start(|_, _| OK).await;
    let running = Running::start(&fake, vec![settings(&sink)]);
    let one = r#"oncegate_deliveries_total{sink="main",result="sent"} 1"#;
    eventually("counted as sent", LONG, || {
        running.metrics.render(Exposition::Prometheus).contains(one)
    })
    .await;
    // What is in flight is finished at a stop: it is counted no more after it.
    let metrics = Arc::clone(&running.metrics);
    running.stop().await;
    let counts = metrics.render(Exposition::Prometheus);
    assert!(counts.contains(one) && !counts.contains("lost_claim"), "{counts}");
    assert_eq!(sink.seen().len(), 1, "it is not sent again");
}

#[tokio::test]
async fn f17_a_good_event_overtakes_a_crowd_of_failing_ones() {
    let bad = |seen: &Seen, _| if seen.text().contains("bad") { Act::Answer(500, "") } else { OK };
    let sink = Sink::start(bad).await;
    let fake = Arc::new(Fake::default());
    for _ in 0..200 {
        fake.add(r#"{"bad":1}"#);
    }
    let running = Running::start(&fake, vec![settings(&sink)]);
    eventually("all failed once", LONG, || sink.ids().len() == 200).await;
    let (begun, id) = (Instant::now(), fake.add(r#"{"good":1}"#));
    running.wake.notify_one();
    eventually("the good one", LONG, || fake.row(id).status == EventStatus::Sent).await;
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    running.stop().await;
}

#[tokio::test]
async fn f18_an_event_whose_attempts_never_end_is_set_apart_and_others_flow() {
    let sink = Sink::start(|_, _| OK).await;
    let fake = Arc::new(Fake::default());
    let (poison, redelivered) = (Uuid::new_v4(), Uuid::new_v4());
    fake.add_row(poison, "{}", |row| row.claim_no = 5);
    fake.add_row(redelivered, "{}", |row| (row.claim_no, row.lane) = (50, Lane::Retry));
    let empty = fake.add("");
    let running = Running::start(&fake, vec![settings(&sink)]);
    sent(&fake, 2).await;
    eventually("set apart", LONG, || fake.row(poison).status == EventStatus::Dead).await;
    running.stop().await;
    assert!(fake.row(poison).error.contains("never ended"), "{}", fake.row(poison).error);
    assert!(!sink.ids().contains(&poison.to_string()));
    assert_eq!(fake.row(empty).status, EventStatus::Sent);
    assert_eq!(fake.row(redelivered).status, EventStatus::Sent);
}

#[tokio::test]
async fn f29_f35_each_fault_before_the_status_is_retried_with_the_same_id() {
    let slow = |s: &mut sink::Settings| s.timeout = 300 * MS;
    for (act, cause) in [
        (Act::Fin(""), ""),
        (Act::Rst(""), ""),
        (Act::Fin("HTTP/1.1 2"), ""),
        (Act::Rst("HTTP/1.1 2"), ""),
        (Act::Silence, "waiting for the answer: time-out after 300ms"),
        (Act::Drip("HTTP/1.1 200 OK\r\n", b'x', 50 * MS), "waiting for the answer: time-out"),
        (Act::Fin("<html>"), ""),
    ] {
        let (fake, id, sink) = first_act(act.clone(), slow).await;
        assert_eq!((sink.seen().len(), sink.ids().len()), (2, 1), "{act:?}");
        let error = fake.row(id).error;
        assert!(!error.is_empty() && error.contains(cause), "{act:?}: {error}");
    }
}

#[tokio::test]
async fn f30_f34_f35_every_2xx_delivers_whatever_becomes_of_its_body() {
    for act in [
        Act::Answer(201, ""),
        Act::Answer(202, ""),
        Act::Answer(204, ""),
        Act::Answer(206, ""),
        Act::Answer(299, ""),
        Act::Raw(
            "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
        ),
        Act::Fin("HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n0123456789"),
        Act::Rst("HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n0123456789"),
        Act::Endless("HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n"),
    ] {
        let (fake, id, sink) = first_act(act.clone(), |_| {}).await;
        assert_eq!((fake.row(id).attempts, sink.seen().len()), (1, 1), "{act:?}");
    }
}

#[tokio::test]
async fn f31_f34_redirects_and_odd_statuses_fail_and_no_target_is_contacted() {
    let target = Sink::start(|_, _| OK).await;
    let location: &'static str =
        Box::leak(format!("location: {}\r\n", target.url()).into_boxed_str());
    for status in [300, 301, 302, 303, 304, 307, 308, 404, 500, 999] {
        let (fake, id, sink) = first_act(Act::Answer(status, location), |_| {}).await;
        assert_eq!(sink.seen().len(), 2, "{status}");
        let error = fake.row(id).error;
        assert!(error.contains(&status.to_string()), "{error}");
        assert_eq!(error.contains("redirect"), status < 400, "{error}");
    }
    assert_eq!(target.connections(), 0);
}

#[tokio::test]
async fn f33_retry_after_is_kept_and_never_beyond_the_maximum() {
    let long = |s: &mut sink::Settings| (s.backoff_base, s.backoff_max) = (MS, 1500 * MS);
    for (headers, least, most) in [
        ("retry-after: 1\r\n", 1000, 1600),
        ("retry-after: 99999999999999999999\r\n", 1400, 1600),
        ("retry-after: -1\r\n", 90, 900),
        ("retry-after: 0\r\n", 90, 900),
    ] {
        let (_, _, sink) = first_act(Act::Answer(429, headers), long).await;
        let seen = sink.seen();
        let pause = (seen[1].at - seen[0].at).as_millis();
        if pause > 1000 {
            // The time that is signed is the attempt's, not the event's.
            assert!(seen[1].signed_at() > seen[0].signed_at());
        }
        assert!((least..most + 400).contains(&pause), "{headers}: {pause}");
    }
}

#[tokio::test]
async fn deliveries_go_on_while_what_an_order_kept_back_cannot_be_looked_for() {
    let sink = Sink::start(|_, _| OK).await;
    let fake = Arc::new(Fake::default());
    fake.wake_deferred_fails.store(true, SeqCst);
    fake.add("one");
    let running = Running::start(&fake, vec![settings(&sink)]);
    sent(&fake, 1).await;
    assert!(!fake.wake_deferred_asked.lock().unwrap().is_empty());
    running.stop().await;
}

#[tokio::test]
async fn an_answer_with_many_lines_in_its_head_is_an_answer() {
    let lines: &'static str = Box::leak("a: b\r\n".repeat(390).into_boxed_str());
    let (_, _, sink) = first_act(Act::Answer(200, lines), |_| ()).await;
    assert_eq!(sink.seen().len(), 1);
}

#[tokio::test]
async fn f37_a_name_that_resolves_to_loopback_gets_no_packet() {
    let sink = Sink::start(|_, _| OK).await;
    let fake = Arc::new(Fake::default());
    let id = fake.add("{}");
    let url = format!("http://localhost:{}/", sink.port).parse().unwrap();
    let closed = http::Settings { url, allow_private: false, allow_http: true, ..webhook(&sink) };
    let closed = sink::Settings { target: Target::Http(closed), ..settings(&sink) };
    let running = Running::start(&fake, vec![closed]);
    eventually("a failure", LONG, || fake.row(id).attempts > 0).await;
    running.stop().await;
    assert_eq!(sink.connections(), 0);
    assert!(fake.row(id).error.contains("allow_private"), "{}", fake.row(id).error);
}

#[tokio::test]
async fn f40_a_text_that_the_database_refuses_stops_no_other_verdict() {
    let odd = |seen: &Seen, _| {
        let bad = seen.text().contains("bad");
        if bad {
            Act::Raw("HTTP/1.1 500 No\r\ncontent-length: 9\r\n\r\n\0bad\u{1}text")
        } else {
            OK
        }
    };
    let sink = Sink::start(odd).await;
    let fake = Arc::new(Fake::default());
    *fake.refuses.lock().unwrap() = Some("bad".into());
    fake.add("bad");
    for _ in 0..8 {
        fake.add("{}");
    }
    let running = Running::start(&fake, vec![settings(&sink)]);
    sent(&fake, 8).await;
    running.stop().await;
    assert_eq!(fake.count(EventStatus::Pending), 1);
}

#[tokio::test]
async fn f58_an_outage_of_the_database_makes_no_hot_loop_and_ends_by_itself() {
    let sink = Sink::start(|_, _| OK).await;
    let fake = Arc::new(Fake::default());
    fake.away.store(5, SeqCst);
    fake.add("{}");
    let begun = Instant::now();
    let running = Running::start(&fake, vec![settings(&sink)]);
    while fake.away.load(SeqCst) > 0 {
        running.wake.notify_one();
        tokio::time::sleep(MS).await;
    }
    assert!(begun.elapsed() > 500 * MS, "five failures took {:?}", begun.elapsed());
    sent(&fake, 1).await;
    running.stop().await;
}

#[tokio::test]
async fn a_nudge_delivers_at_once_and_reaches_every_sink() {
    let sinks = [Sink::start(|_, _| OK).await, Sink::start(|_, _| OK).await];
    for everyone in [false, true] {
        let fake = Arc::new(Fake::default());
        let other = sink::Settings { name: "other".into(), ..settings(&sinks[1]) };
        let both = vec![settings(&sinks[0]), other];
        let running = Running::polling(&fake, both, Duration::from_secs(50));
        eventually("both rest", LONG, || fake.looked.load(SeqCst) >= 2).await;
        fake.add("{}");
        fake.add_row(Uuid::new_v4(), "{}", |row| row.sink = "other");
        let begun = Instant::now();
        if everyone {
            running.wake.notify_waiters()
        } else {
            running.wake.notify_one()
        }
        sent(&fake, 2).await;
        assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
        running.stop().await;
    }
}

#[tokio::test]
async fn a_stopping_relay_waits_for_what_is_in_flight_and_writes_its_verdict() {
    let sink = Sink::start(|_, _| Act::After(300 * MS, Box::new(OK))).await;
    let fake = Arc::new(Fake::default());
    for _ in 0..10 {
        fake.add("{}");
    }
    let running = Running::start(&fake, vec![settings(&sink)]);
    eventually("in flight", LONG, || sink.seen().len() >= 4).await;
    running.stop().await;
    assert_eq!((sink.seen().len(), fake.count(EventStatus::Sent)), (4, 4));
    let now = Instant::now();
    let held = fake.rows.lock().unwrap().values().any(|row| row.leased > now);
    assert!(!held, "nothing is left under a lease");
    let back = fake.acknowledged.lock().unwrap().iter().any(|a| a.verdict == Verdict::GivenBack);
    assert!(!back, "what is claimed is sent at once");
}

#[tokio::test]
async fn a_sink_that_is_down_does_not_hold_up_another() {
    let (well, ill) = (Sink::start(|_, _| OK).await, Sink::start(|_, _| Act::Silence).await);
    let fake = Arc::new(Fake::default());
    for _ in 0..50 {
        fake.add("{}");
        fake.add_row(Uuid::new_v4(), "{}", |row| row.sink = "ill");
    }
    let second = sink::Settings { name: "ill".into(), timeout: 400 * MS, ..settings(&ill) };
    let begun = Instant::now();
    let running = Running::start(&fake, vec![second, settings(&well)]);
    sent(&fake, 50).await;
    assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
    eventually("the other was tried", LONG, || !ill.seen().is_empty()).await;
    running.stop().await;
}

#[tokio::test]
async fn a_relay_whose_store_panics_is_started_again() {
    let sink = Sink::start(|_, _| OK).await;
    let fake = Arc::new(Fake::default());
    fake.panics.store(1, SeqCst);
    fake.add("{}");
    let running = Running::start(&fake, vec![settings(&sink)]);
    sent(&fake, 1).await;
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn what_waits_for_nobody_is_looked_for_at_the_start_and_again_and_again() {
    let sink = Sink::start(|_, _| OK).await;
    let fake = Arc::new(Fake::default());
    let piece = |next: Option<&str>| Woken { count: 1, next: next.map(str::to_owned) };
    fake.wake_deferred.lock().unwrap().extend([piece(Some("k1")), piece(Some("k2")), piece(None)]);
    let running = Running::start(&fake, vec![settings(&sink)]);
    let minute = Duration::from_secs(60);
    eventually("more walks", minute, || fake.wake_deferred_asked.lock().unwrap().len() >= 5).await;
    running.stop().await;
    let asked = fake.wake_deferred_asked.lock().unwrap().clone();
    let from: Vec<_> = asked.iter().map(|(_, from)| from.as_deref()).collect();
    assert_eq!(from[..5], [None, Some("k1"), Some("k2"), None, None], "on from piece to piece");
    assert!(asked[2].0 - asked[0].0 < Duration::from_secs(2), "{asked:?}");
    for pair in asked[2..5].windows(2) {
        let pause = pair[1].0 - pair[0].0;
        assert!((4..=11).contains(&pause.as_secs()), "{pause:?}");
    }
}
