//! How each sink stands, as the database says: read again and again, so that all replicas agree and a restart keeps it.
//!
//! One reader for all sinks of this process; each sink's loop looks at its own [`StatusWatch`] before it claims. What must stay
//! true:
//!
//! - Nothing is claimed before the first reading, nor between an own change and the reading that shows what it led to.
//! - A reading that began before an own change is thrown away.
//! - While the database is away the last reading stands.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::claimant::Claimant;
use super::pauses::OUTAGE;
use crate::backoff::jittered;
use crate::store::{Deliveries, Pause, PauseReason, SinkState};
use crate::tasks;
use crate::telemetry::{Metrics, causes};

/// How a sink stands, as far as it is known here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum SinkStatus {
    /// Not known yet, or not any more.
    Unknown,
    /// Deliveries go on.
    Active {
        /// The number of this state.
        no: i64,
    },
    /// Nothing is delivered.
    Paused {
        /// The number of this state.
        no: i64,
        /// When the next probe may be taken; `None`: it is not probed.
        probe_at: Option<Instant>,
        /// Probes in a row that failed.
        failed_probes: u32,
    },
}

/// Where the loop of one sink reads how it stands.
#[derive(Debug)]
pub(super) struct StatusWatch {
    status: watch::Sender<SinkStatus>,
    /// Own changes so far.
    changes: AtomicU64,
    /// Asks for a reading now.
    read: Arc<Notify>,
}

impl StatusWatch {
    /// Of a sink, for the reader that `read` wakes.
    pub(super) fn new(read: &Arc<Notify>) -> Self {
        let (status, _) = watch::channel(SinkStatus::Unknown);
        Self { status, changes: AtomicU64::new(0), read: Arc::clone(read) }
    }

    /// The status, and each that comes after it.
    pub(super) fn subscribe(&self) -> watch::Receiver<SinkStatus> {
        self.status.subscribe()
    }

    /// Whether the sink is open under this very number.
    pub(super) fn is_open(&self, at: i64) -> bool {
        matches!(*self.status.borrow(), SinkStatus::Active { no } if no == at)
    }

    /// What is known is not true any more, or may not be: there was an own change.
    pub(super) fn changed_here(&self) {
        // Under the lock of the value, as the reading below.
        self.status.send_modify(|status| {
            self.changes.fetch_add(1, Ordering::SeqCst);
            *status = SinkStatus::Unknown;
        });
        self.read.notify_one();
    }

    /// Shows what was read after `changes` own changes; false: there were more since.
    fn show(&self, changes: u64, status: SinkStatus) -> bool {
        let mut fresh = false;
        self.status.send_if_modified(|shown| {
            fresh = self.changes.load(Ordering::SeqCst) == changes;
            let news = fresh && *shown != status;
            if news {
                *shown = status;
            }
            news
        });
        fresh
    }
}

/// Reads for all sinks.
pub(super) struct StatusReader {
    pub(super) store: Arc<dyn Deliveries>,
    pub(super) claimant: Claimant,
    pub(super) metrics: Arc<Metrics>,
    pub(super) statuses: HashMap<String, Arc<StatusWatch>>,
    pub(super) read: Arc<Notify>,
    pub(super) every: Duration,
}

impl StatusReader {
    /// Reads. Never returns.
    pub(super) async fn run(self: Arc<Self>) {
        let mut known: HashMap<String, Option<PauseReason>> = HashMap::new();
        let mut outage = OUTAGE;
        loop {
            let changes: HashMap<&str, u64> = self
                .statuses
                .iter()
                .map(|(name, status)| (name.as_str(), status.changes.load(Ordering::SeqCst)))
                .collect();
            let states = self.store.sinks(self.claimant.reclaim()).await;
            let failed = states.is_err();
            let pause = match states {
                Ok(states) => {
                    tasks::ran();
                    outage = OUTAGE;
                    let all_fresh = self.show(&states, &changes, &mut known);
                    if all_fresh { jittered(self.every) } else { Duration::ZERO }
                }
                Err(error) => {
                    tasks::failed(&causes(&error));
                    tracing::debug!(error = causes(&error), "how the sinks stand cannot be read");
                    outage.pause()
                }
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.read.notified(), if !failed => {}
            }
        }
    }

    fn show(
        &self,
        states: &[SinkState],
        changes: &HashMap<&str, u64>,
        known: &mut HashMap<String, Option<PauseReason>>,
    ) -> bool {
        let mut all_fresh = true;
        for (name, status) in &self.statuses {
            let state = states.iter().find(|state| state.sink == *name);
            let reason = state.and_then(|state| state.pause.as_ref()).map(|pause| pause.reason);
            for one in PauseReason::ALL {
                self.metrics.sink_paused(name, one.as_str(), reason == Some(one));
            }
            if known.insert(name.clone(), reason).unwrap_or_default() != reason {
                tell(name, state);
            }
            let changes = changes.get(name.as_str()).copied().unwrap_or_default();
            all_fresh &= status.show(changes, status_of(state));
        }
        all_fresh
    }
}

fn status_of(state: Option<&SinkState>) -> SinkStatus {
    match state {
        None => SinkStatus::Active { no: 0 },
        Some(SinkState { no, pause: None, .. }) => SinkStatus::Active { no: *no },
        Some(SinkState { no, pause: Some(pause), .. }) => SinkStatus::Paused {
            no: *no,
            probe_at: pause.probe.wait().map(|wait| Instant::now() + wait),
            failed_probes: pause.failed_probes,
        },
    }
}

/// In the log of each replica, once: a pause is nothing that anybody should have to look for.
fn tell(sink: &str, state: Option<&SinkState>) {
    let error = state.and_then(|state| state.last_error.as_deref());
    match state.and_then(|state| state.pause.as_ref()) {
        None => tracing::info!(sink, "the sink is not paused any more: deliveries go on"),
        Some(Pause { reason: PauseReason::Gone, .. }) => tracing::error!(
            sink,
            error,
            "the sink says that it is gone (410): nothing is delivered until `oncegate sinks resume {sink}`"
        ),
        Some(Pause { reason: PauseReason::Operator, note, .. }) => {
            tracing::warn!(sink, note, "an operator has paused the sink: its events wait");
        }
        Some(Pause { reason, .. }) => {
            let reason = reason.as_str();
            tracing::warn!(sink, reason, error, "the sink is paused, and is probed");
        }
    }
}
