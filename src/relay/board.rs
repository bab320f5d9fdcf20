//! How each sink stands, as the database says: read again and again, so that all replicas agree and a restart keeps it.
//!
//! One reader for all sinks of this process; each sink's loop looks at its own [`Board`] before it claims. What must stay
//! true:
//!
//! - Nothing is claimed before the first reading, nor between an own turn and the reading that shows what it led to.
//! - A reading that began before an own turn is thrown away.
//! - While the database is away the last reading stands.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::{Claimant, OUTAGE_FIRST, OUTAGE_MAX, jitter};
use crate::store::{Deliveries, Pause, PauseReason, SinkState};
use crate::tasks;
use crate::telemetry::{Metrics, causes};

/// How a sink stands, as far as it is known here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// Not known yet, or not any more.
    Unread,
    /// Deliveries go on.
    Open {
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
pub(super) struct Board {
    standing: watch::Sender<Standing>,
    /// Own turns so far.
    turns: AtomicU64,
    /// Asks for a reading now.
    read: Arc<Notify>,
}

impl Board {
    /// Of a sink, for the reader that `read` wakes.
    pub(super) fn new(read: &Arc<Notify>) -> Self {
        let (standing, _) = watch::channel(Standing::Unread);
        Self { standing, turns: AtomicU64::new(0), read: Arc::clone(read) }
    }

    /// To look, and to wait for what is next.
    pub(super) fn look(&self) -> watch::Receiver<Standing> {
        self.standing.subscribe()
    }

    /// Whether the sink is open under this very number.
    pub(super) fn is_open(&self, at: i64) -> bool {
        matches!(*self.standing.borrow(), Standing::Open { no } if no == at)
    }

    /// What is known is not true any more, or may not be: there was an own turn.
    pub(super) fn turned(&self) {
        // Under the lock of the value, as the reading below.
        self.standing.send_modify(|standing| {
            self.turns.fetch_add(1, Ordering::SeqCst);
            *standing = Standing::Unread;
        });
        self.read.notify_one();
    }

    /// Shows what was read after `turns` own turns; false: there were more since.
    fn show(&self, turns: u64, standing: Standing) -> bool {
        let mut fresh = false;
        self.standing.send_if_modified(|shown| {
            fresh = self.turns.load(Ordering::SeqCst) == turns;
            let news = fresh && *shown != standing;
            if news {
                *shown = standing;
            }
            news
        });
        fresh
    }
}

/// Reads for all sinks.
pub(super) struct Reader {
    pub(super) store: Arc<dyn Deliveries>,
    pub(super) claimant: Claimant,
    pub(super) metrics: Arc<Metrics>,
    pub(super) boards: HashMap<String, Arc<Board>>,
    pub(super) read: Arc<Notify>,
    pub(super) every: Duration,
}

impl Reader {
    /// Reads. Never returns.
    pub(super) async fn run(self: Arc<Self>) {
        let mut known: HashMap<String, Option<PauseReason>> = HashMap::new();
        let mut outage = OUTAGE_FIRST;
        loop {
            let turns: HashMap<&str, u64> = self
                .boards
                .iter()
                .map(|(name, board)| (name.as_str(), board.turns.load(Ordering::SeqCst)))
                .collect();
            let states = self.store.sinks(self.claimant.over()).await;
            let failed = states.is_err();
            let pause = match states {
                Ok(states) => {
                    tasks::ran();
                    outage = OUTAGE_FIRST;
                    let all_fresh = self.show(&states, &turns, &mut known);
                    if all_fresh { self.every } else { Duration::ZERO }
                }
                Err(error) => {
                    tasks::failed(&causes(&error));
                    tracing::debug!(error = causes(&error), "how the sinks stand cannot be read");
                    outage = (outage * 2).min(OUTAGE_MAX);
                    outage / 2
                }
            };
            tokio::select! {
                () = tokio::time::sleep(jitter(pause)) => {}
                () = self.read.notified(), if !failed => {}
            }
        }
    }

    fn show(
        &self,
        states: &[SinkState],
        turns: &HashMap<&str, u64>,
        known: &mut HashMap<String, Option<PauseReason>>,
    ) -> bool {
        let mut all_fresh = true;
        for (name, board) in &self.boards {
            let state = states.iter().find(|state| state.sink == *name);
            let reason = state.and_then(|state| state.pause.as_ref()).map(|pause| pause.reason);
            for one in PauseReason::ALL {
                self.metrics.sink_paused(name, one.as_str(), reason == Some(one));
            }
            if known.insert(name.clone(), reason).unwrap_or_default() != reason {
                tell(name, state);
            }
            let turns = turns.get(name.as_str()).copied().unwrap_or_default();
            all_fresh &= board.show(turns, standing(state));
        }
        all_fresh
    }
}

fn standing(state: Option<&SinkState>) -> Standing {
    match state {
        None => Standing::Open { no: 0 },
        Some(SinkState { no, pause: None, .. }) => Standing::Open { no: *no },
        Some(SinkState { no, pause: Some(pause), .. }) => Standing::Paused {
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
