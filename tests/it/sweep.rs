//! The sweeper: keeps up with any inflow, outlives outages, and judges others only in lasting contact.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use oncegate::lease::Contact;
use oncegate::store::{Backlog, Gauges};
use oncegate::sweep::{self, Duty, Settings};
use oncegate::telemetry::{Exposition, Metrics};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::support::eventually;
use crate::support::fake::Fake;

const LEASE: Duration = Duration::from_secs(16);
const LONG: Duration = Duration::from_secs(120);

struct Running {
    stop: CancellationToken,
    task: tokio::task::JoinHandle<()>,
    metrics: Arc<Metrics>,
}

fn start(fake: &Arc<Fake>, contact: Contact) -> Running {
    let settings = Settings {
        sinks: vec!["main".into()],
        outbox_retention: Duration::from_secs(3600),
        unknown_events: None,
        every: Duration::from_secs(30),
        batch: 100,
        duty: Duty::All,
        backlog: Backlog::default(),
    };
    let (stop, metrics) = (CancellationToken::new(), Arc::new(Metrics::default()));
    let run = sweep::run(fake.clone(), settings, contact, Arc::clone(&metrics), stop.clone());
    Running { stop, task: tokio::spawn(run), metrics }
}

fn started() -> std::time::Instant {
    Instant::now().into_std()
}

#[tokio::test(start_paused = true)]
async fn a_backlog_is_swept_in_small_batches_without_waiting_between_them() {
    let fake = Arc::new(Fake::default());
    fake.expired.store(100_050, SeqCst);
    let begun = Instant::now();
    let running = start(&fake, Contact::sole(started()));
    eventually("all is swept", LONG, || fake.expired.load(SeqCst) == 0).await;
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    running.stop.cancel();
    running.task.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn dead_owners_are_judged_one_lease_after_the_start_and_anew_after_an_outage() {
    let fake = Arc::new(Fake::default());
    let begun = Instant::now();
    let running = start(&fake, Contact::begin(LEASE, started()));
    eventually("a judgement", LONG, || fake.judged.load(SeqCst) > 0).await;
    assert!(begun.elapsed() >= LEASE, "{:?}", begun.elapsed());
    fake.away.store(30, SeqCst);
    eventually("an outage", LONG, || fake.away.load(SeqCst) == 0).await;
    let (back, judged) = (Instant::now(), fake.judged.load(SeqCst));
    eventually("another judgement", LONG, || fake.judged.load(SeqCst) > judged).await;
    assert!(back.elapsed() >= LEASE, "{:?}", back.elapsed());
    running.stop.cancel();
    running.task.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn the_only_process_on_its_database_judges_in_its_first_round() {
    let fake = Arc::new(Fake::default());
    let running = start(&fake, Contact::sole(started()));
    eventually("a judgement", Duration::from_secs(1), || fake.judged.load(SeqCst) > 0).await;
    running.stop.cancel();
    running.task.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn gauges_follow_the_store_also_down_to_nothing() {
    let fake = Arc::new(Fake::default());
    let pending = vec![("main".to_owned(), 7, Duration::from_secs(3))];
    *fake.gauges.lock().unwrap() = Gauges { pending, unknown_records: 2, ..Gauges::default() };
    let running = start(&fake, Contact::sole(started()));
    let shown = |text: &'static str| {
        let metrics = Arc::clone(&running.metrics);
        move || metrics.render(Exposition::Prometheus).contains(text)
    };
    eventually("seven", LONG, shown("oncegate_outbox_pending{sink=\"main\"} 7")).await;
    eventually("two", LONG, shown("oncegate_unknown_records 2")).await;
    *fake.gauges.lock().unwrap() = Gauges::default();
    eventually("none", LONG, shown("oncegate_outbox_pending{sink=\"main\"} 0")).await;
    running.stop.cancel();
    running.task.await.unwrap();
}
