//! The sweeper. It deletes expired records, delivered events past their retention, and old leases of dead processes. It marks
//! the records of dead owners as `unknown`, writes events about records that became unknown or were resolved, and counts the
//! rows of the store.
//!
//! A timer starts its rounds. Each job is a statement over a small batch that repeats its conditions, so it is idempotent and
//! several replicas may run it at once. After a crash the next sweeper goes on. Invariants:
//!
//! - The statements themselves decide which rows may be deleted.
//! - Deleting keeps up with the inflow: if a time slice ends with work left, the next round follows at once.
//! - Other owners are judged only while [`Contact`] allows it. This loop keeps the contact by statements between its rounds.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::lease::Contact;
use crate::record::event::notice::NoticeKind;
use crate::record::event::subscription::Subscriber;
use crate::store::{Backlog, BacklogChange, Error, Gauges, Store, Unannounced};
use crate::tasks;
use crate::telemetry::{Metrics, Swept};

/// Longest time for one job of a round, so that a backlog of one kind does not delay the others.
const SLICE: Duration = Duration::from_secs(2);

/// Shortest pause between two rounds that found nothing more to do, or failed.
const PAUSE_MIN: Duration = Duration::from_millis(100);

/// Longest pause between two rounds.
const PAUSE_MAX: Duration = Duration::from_secs(24 * 3600);

/// How long a count of pending events is used to decide about new requests.
const COUNT_EVERY: Duration = Duration::from_secs(5);

/// The settings of the sweeper.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How long delivered events are kept, counted from their delivery.
    pub outbox_retention: Duration,
    /// The subscribers to events about unknown and resolved records; `None`: no such events are written.
    pub unknown_events: Option<Vec<Subscriber>>,
    /// The configured sinks. The sweeper warns of pending events for other sinks.
    pub sinks: Vec<String>,
    /// Pause between two rounds.
    pub every: Duration,
    /// Most rows in one statement.
    pub batch: u32,
    /// The jobs of this process.
    pub duty: Duty,
    /// Gets each count of pending events.
    pub backlog: Backlog,
}

/// What a process deletes. Every process counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Duty {
    /// Everything.
    All,
    /// Everything but delivered events, which a relay deletes.
    Records,
    /// Only delivered events.
    Outbox,
}

impl Duty {
    fn jobs(self) -> &'static [Job] {
        match self {
            Self::All => &[Job::DeadOwners, Job::Doubts, Job::Records, Job::Events, Job::Leases],
            Self::Records => &[Job::DeadOwners, Job::Doubts, Job::Records, Job::Leases],
            Self::Outbox => &[Job::Events],
        }
    }
}

/// Sweeps until `stop`.
pub async fn run(
    store: Arc<dyn Store>,
    settings: Settings,
    contact: Contact,
    metrics: Arc<Metrics>,
    stop: CancellationToken,
) {
    let batch = settings.batch.max(1);
    let mut sweeper = Sweeper {
        store,
        settings: Settings { batch, ..settings },
        contact,
        metrics,
        stop,
        failing: false,
        sinks: BTreeSet::new(),
        strangers: BTreeSet::new(),
    };
    let (mut behind, stop) = (None, sweeper.stop.clone());
    let sweeping = async {
        loop {
            let begun = Instant::now();
            let more = sweeper.round().await;
            behind = more.then(|| behind.unwrap_or(begun));
            sweeper.metrics.sweep_behind(behind.map_or(Duration::ZERO, |since| since.elapsed()));
            if !more {
                sweeper.rest().await;
            }
        }
    };
    // A database that does not answer must not delay the end of the process. Every job can be repeated.
    stop.run_until_cancelled(sweeping).await;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Job {
    Records,
    Events,
    DeadOwners,
    Doubts,
    Leases,
}

struct Sweeper {
    store: Arc<dyn Store>,
    settings: Settings,
    contact: Contact,
    metrics: Arc<Metrics>,
    stop: CancellationToken,
    failing: bool,
    /// The sinks whose gauges are set. The gauges of a sink without events go back to zero.
    sinks: BTreeSet<String>,
    /// Sinks without configuration and with pending events, of which a warning was logged.
    strangers: BTreeSet<String>,
}

impl Sweeper {
    /// Runs each job once, at most for its time slice. Returns whether work is left.
    async fn round(&mut self) -> bool {
        let mut more = false;
        let mut well = true;
        for &job in self.settings.duty.jobs() {
            match self.work_off(job).await {
                Ok(left) => more |= left,
                Err(error) => {
                    self.note_failure(job, &error);
                    well = false;
                }
            }
        }
        match self.store.gauges().await {
            Ok(gauges) => {
                self.contact.reached(now());
                self.weigh(&gauges);
                self.publish(gauges);
            }
            Err(error) => {
                self.contact.lost();
                tasks::failed(&error);
                tracing::debug!(%error, "the store could not be counted");
                well = false;
            }
        }
        if well {
            tasks::ran();
        }
        if well && std::mem::replace(&mut self.failing, false) {
            tracing::info!("the sweeper works again");
        }
        more
    }

    /// Runs batches of one job until one is not full. Returns whether the time slice ended before.
    async fn work_off(&self, job: Job) -> Result<bool, Error> {
        let end = Instant::now() + SLICE;
        loop {
            let result = self.batch(job).await;
            match &result {
                Err(Error::Unavailable(_) | Error::InDoubt(_) | Error::Late) => self.contact.lost(),
                Ok(_) | Err(Error::Refused(_) | Error::Unreadable(_)) => {
                    self.contact.reached(now())
                }
            }
            if result? < u64::from(self.settings.batch) {
                return Ok(false);
            }
            if Instant::now() >= end || self.stop.is_cancelled() {
                return Ok(true);
            }
            tokio::task::yield_now().await;
        }
    }

    /// Runs one batch. Returns the number of rows.
    async fn batch(&self, job: Job) -> Result<u64, Error> {
        let limit = self.settings.batch;
        match job {
            Job::Records => {
                let rows = self.store.sweep_records(limit).await?;
                self.metrics.swept(Swept::Records, rows);
                Ok(rows)
            }
            Job::Events => {
                let retention = self.settings.outbox_retention;
                let rows = self.store.sweep_events(retention, limit).await?;
                self.metrics.swept(Swept::Events, rows);
                Ok(rows)
            }
            Job::DeadOwners if self.contact.may_mark_dead(now()) => {
                let rows = self.store.mark_dead(None, limit).await?;
                if rows > 0 {
                    tracing::warn!(rows, "records of dead owners are unknown now");
                }
                Ok(rows)
            }
            Job::DeadOwners => self.store.ping().await.map(|()| 0),
            Job::Doubts => self.announce(limit).await,
            // Without batches, because there are few old leases.
            Job::Leases => self.store.sweep_leases().await.map(|_| 0),
        }
    }

    /// Writes the events about records that became unknown or were resolved. Without subscribers only old notes are deleted.
    async fn announce(&self, limit: u32) -> Result<u64, Error> {
        let sinks = self.settings.unknown_events.as_deref();
        let which = if sinks.is_some() { Unannounced::All } else { Unannounced::Resolved };
        let notices = self.store.unannounced(which, limit).await?;
        for notice in &notices {
            let event = sinks.and_then(|sinks| notice.event(sinks));
            if let (NoticeKind::Resolved(_), None, Some(_)) = (notice.kind, &event, sinks) {
                tracing::warn!(record = %notice.record, "a record is resolved, and its scope is not known any more");
            }
            self.store.announce(notice, event.as_ref()).await?;
        }
        Ok(notices.len() as u64)
    }

    /// Updates the backlog. Logs when that stops or allows new requests.
    fn weigh(&self, gauges: &Gauges) {
        let tide = self.settings.backlog.counted(gauges);
        let most = self.settings.backlog.most();
        match tide {
            BacklogChange::Full => tracing::warn!(
                most,
                "outbox.backlog_max is reached: requests that would write events are refused"
            ),
            BacklogChange::Room => {
                tracing::info!(most, "requests that write events are reserved again")
            }
            BacklogChange::Same => {}
        }
    }

    fn publish(&mut self, gauges: Gauges) {
        self.warn_of_strangers(&gauges);
        let mut by_sink: BTreeMap<String, (u64, Duration, u64)> = BTreeMap::new();
        let mut blocked: BTreeMap<String, u64> = BTreeMap::new();
        for sink in std::mem::take(&mut self.sinks) {
            blocked.insert(sink.clone(), 0);
            by_sink.insert(sink, (0, Duration::ZERO, 0));
        }
        blocked.extend(gauges.blocked);
        for (sink, pending, oldest) in gauges.pending {
            let row = by_sink.entry(sink.clone()).or_default();
            (row.0, row.1) = (pending, oldest);
            self.sinks.insert(sink);
        }
        for (sink, dead) in gauges.dead {
            by_sink.entry(sink.clone()).or_default().2 = dead;
            self.sinks.insert(sink);
        }
        for (sink, (pending, oldest, dead)) in by_sink {
            self.metrics.outbox(&sink, pending, oldest, dead);
        }
        for (sink, keys) in blocked {
            self.metrics.blocked_keys(&sink, keys);
        }
        self.metrics.unknown_records(gauges.unknown_records);
    }

    /// Warns once of each sink with pending events that is not configured, because its events are not delivered.
    fn warn_of_strangers(&mut self, gauges: &Gauges) {
        let others = gauges.pending.iter().filter(|(sink, ..)| !self.settings.sinks.contains(sink));
        let mut strangers = BTreeSet::new();
        for (sink, count, _) in others {
            if !self.strangers.contains(sink) {
                tracing::warn!(
                    sink,
                    pending = count,
                    "a sink that is not in this configuration has pending events: they are not delivered"
                );
            }
            strangers.insert(sink.clone());
        }
        self.strangers = strangers;
    }

    /// The pause between two rounds, with the statements that the contact needs.
    async fn rest(&self) {
        let longest = self.settings.backlog.most().map_or(PAUSE_MAX, |_| COUNT_EVERY);
        let end = Instant::now() + self.settings.every.clamp(PAUSE_MIN, longest);
        let pace = self.contact.pace().map(|pace| pace.max(PAUSE_MIN));
        while Instant::now() < end {
            let next = pace.map_or(end, |pace| end.min(Instant::now() + pace));
            tokio::time::sleep_until(next).await;
            if pace.is_some() && next < end {
                match self.store.ping().await {
                    Ok(()) => self.contact.reached(now()),
                    Err(_) => self.contact.lost(),
                }
            }
        }
    }

    fn note_failure(&mut self, job: Job, error: &Error) {
        tasks::failed(error);
        if !std::mem::replace(&mut self.failing, true) {
            let cause = std::error::Error::source(error).map(ToString::to_string);
            tracing::warn!(?job, %error, cause, "the sweeper waits for the database");
        }
    }
}

fn now() -> std::time::Instant {
    Instant::now().into_std()
}
