//! Reads the status of each sink from the database, so that all replicas agree and a restart keeps it.
//!
//! One reader serves all sinks of this process. The loop of each sink checks its [`StatusWatch`] before it claims. Invariants:
//!
//! - No event is claimed before the first reading, nor between a change by this process and the next reading.
//! - A reading that began before a change by this process is dropped.
//! - While the database is away the last reading is valid.

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

/// The status of a sink, as last read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum SinkStatus {
    /// Not known yet, or no longer known.
    Unknown,
    /// Events are delivered.
    Active {
        /// The number of this state.
        no: i64,
    },
    /// Only probes are sent.
    Paused {
        /// The number of this state.
        no: i64,
        /// When the next probe may be taken; `None`: it is not probed.
        probe_at: Option<Instant>,
        /// Failed probes in a row.
        failed_probes: u32,
    },
}

/// The status of one sink, for its loop.
#[derive(Debug)]
pub(super) struct StatusWatch {
    status: watch::Sender<SinkStatus>,
    /// Changes by this process so far.
    changes: AtomicU64,
    /// Asks for a reading now.
    read: Arc<Notify>,
}

impl StatusWatch {
    /// The watch of a sink. `read` wakes its reader.
    pub(super) fn new(read: &Arc<Notify>) -> Self {
        let (status, _) = watch::channel(SinkStatus::Unknown);
        Self { status, changes: AtomicU64::new(0), read: Arc::clone(read) }
    }

    /// The status, and each that comes after it.
    pub(super) fn subscribe(&self) -> watch::Receiver<SinkStatus> {
        self.status.subscribe()
    }

    /// Whether the sink is open under this number.
    pub(super) fn is_open(&self, at: i64) -> bool {
        matches!(*self.status.borrow(), SinkStatus::Active { no } if no == at)
    }

    /// This process changed, or may have changed, the status: the last reading is not valid any more.
    pub(super) fn changed_here(&self) {
        // Under the lock of the value, like the reading below.
        self.status.send_modify(|status| {
            self.changes.fetch_add(1, Ordering::SeqCst);
            *status = SinkStatus::Unknown;
        });
        self.read.notify_one();
    }

    /// Publishes a reading that began after `changes` changes by this process. False: there were more since.
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

/// The reader for all sinks.
pub(super) struct StatusReader {
    pub(super) store: Arc<dyn Deliveries>,
    pub(super) claimant: Claimant,
    pub(super) metrics: Arc<Metrics>,
    pub(super) statuses: HashMap<String, Arc<StatusWatch>>,
    pub(super) read: Arc<Notify>,
    pub(super) every: Duration,
}

impl StatusReader {
    /// Reads the status again and again. Never returns.
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
                    tracing::debug!(
                        error = causes(&error),
                        "the status of the sinks cannot be read"
                    );
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
                log_state(name, state);
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

/// Logs each pause once in every replica, so that operators see it.
fn log_state(sink: &str, state: Option<&SinkState>) {
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
