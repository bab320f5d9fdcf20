//! The worker of one sink: when it polls for due events, for how many, and from which lane. `claim` has the claim itself and
//! what is done under it.
//!
//! Invariant: the outbox table says which events are pending. A wake-up only makes the worker look sooner.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::claimant::Claimant;
use super::pauses::{OUTAGE, OUTAGE_FIRST};
use super::sink::{Delivered, Sink};
use super::slots::{Slot, Slots};
use super::status::{SinkStatus, StatusWatch};
use super::verdict::Evidence;
use crate::backoff::jittered;
use crate::store::{Acknowledgement, Claim, Claimed, Deliveries, Error, Lane, Look, Order, Woken};
use crate::tasks;
use crate::telemetry::{Metrics, causes};

/// How often a poll also takes events that have been due for long. While it finds some, the next poll does so again.
const SWEEP_EVERY: Duration = Duration::from_secs(5);

/// How often the worker looks for deferred events that no event blocks any more, and how soon it looks for the rest of them.
const WAKE_EVERY: Duration = Duration::from_secs(10);
const WAKE_ON: Duration = Duration::from_millis(100);

/// In a backlog: how long a poll waits for a quarter of the slots, so that it claims several events at once.
const GATHER: Duration = Duration::from_millis(5);

/// How long after `stop` the worker waits for the database to answer the last poll.
const LAST_LOOK: Duration = Duration::from_secs(1);

/// An idle loop polls this many times less often than a busy one.
const IDLE_FACTOR: u32 = 8;

/// The parts of the worker of one sink.
pub(super) struct SinkWorker {
    pub(super) store: Arc<dyn Deliveries>,
    pub(super) claimant: Claimant,
    pub(super) sink: Arc<Sink>,
    pub(super) slots: Arc<Slots>,
    pub(super) status: Arc<StatusWatch>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) nudge: Arc<Notify>,
    pub(super) poll: Duration,
    pub(super) stop: CancellationToken,
    /// Whether the last statement had no answer from the database.
    pub(super) failing: AtomicBool,
}

/// A verdict on its way to the store.
pub(super) struct PendingVerdict {
    pub(super) acknowledgement: Acknowledgement,
    /// When the claim ends, at the earliest.
    pub(super) until: Instant,
    /// Whether an acknowledgement of it failed and may have been committed all the same.
    pub(super) doubt: bool,
    /// Held until the verdict is written.
    pub(super) _slot: Option<Slot>,
}

/// The state of a loop between two polls.
pub(super) struct LoopState {
    since_retry: usize,
    sweep_at: Instant,
    /// The lane of retries was empty. The worker does not poll it before this time.
    retry_at: Instant,
    /// When the worker looks next for deferred events that nothing blocks, and where it begins.
    wake_at: Instant,
    wake_from: Option<String>,
    /// Whether the last poll filled all free slots.
    backlog: bool,
    pub(super) deliveries: JoinSet<()>,
    pub(super) done: mpsc::Sender<PendingVerdict>,
    /// The number of the sink's last known state, and its failed probes then.
    known: Option<(i64, u32)>,
}

impl SinkWorker {
    /// The state of a new loop: all slots are free.
    pub(super) fn fresh(&self) -> Self {
        Self {
            store: Arc::clone(&self.store),
            claimant: self.claimant.clone(),
            sink: Arc::clone(&self.sink),
            slots: slots_of(&self.sink),
            status: Arc::clone(&self.status),
            metrics: Arc::clone(&self.metrics),
            nudge: Arc::clone(&self.nudge),
            poll: self.poll,
            stop: self.stop.clone(),
            failing: AtomicBool::new(false),
        }
    }

    pub(super) async fn work(self: Arc<Self>) {
        let (done, verdicts) = mpsc::channel(self.sink.concurrency());
        tokio::join!(self.claim_on(done), self.acknowledge_on(verdicts));
    }

    /// Polls until `stop`. Then it waits for the deliveries in flight.
    async fn claim_on(self: &Arc<Self>, done: mpsc::Sender<PendingVerdict>) {
        let now = Instant::now();
        let (deliveries, backlog, known) = (JoinSet::new(), false, None);
        let mut state = LoopState {
            since_retry: 0,
            sweep_at: now,
            retry_at: now,
            wake_at: now,
            wake_from: None,
            backlog,
            deliveries,
            done,
            known,
        };
        let late = async {
            self.stop.cancelled().await;
            tokio::time::sleep(LAST_LOOK).await;
        };
        tokio::select! {
            () = self.look_on(&mut state) => {}
            // If it claimed events, they are free when the lease has ended.
            () = late => {}
        }
        while let Some(ended) = state.deliveries.join_next().await {
            self.report(ended);
        }
    }

    /// Polls until `stop`.
    async fn look_on(self: &Arc<Self>, state: &mut LoopState) {
        let mut idle = self.poll;
        let mut outage = OUTAGE;
        while let Some(no) = self.may_claim(state).await {
            while let Some(ended) = state.deliveries.try_join_next() {
                self.report(ended);
            }
            let free = self.slots.free();
            let pause = match self.look(free, no, state).await {
                Ok(found) => {
                    tasks::ran();
                    self.note_answer();
                    outage = OUTAGE;
                    idle =
                        if found > 0 { self.poll } else { (idle * 2).min(self.poll * IDLE_FACTOR) };
                    state.backlog = found >= self.full(free);
                    if state.backlog { Duration::ZERO } else { self.until_due(idle).await }
                }
                Err(error) => {
                    state.backlog = false;
                    self.note_failure("claim", &error);
                    self.pause(outage.pause(), false).await;
                    continue;
                }
            };
            if !pause.is_zero() {
                self.pause(pause, true).await;
            }
        }
    }

    /// How many events for this many free slots mean that there are more. An ordered poll ends at the first event.
    fn full(&self, free: usize) -> usize {
        if self.is_ordered() { free.min(1) } else { free }
    }

    pub(super) fn is_ordered(&self) -> bool {
        self.sink.order() != Order::None
    }

    /// Waits until the sink is open and has a free slot, or several in a backlog. Probes it while it is paused. Returns the
    /// number of its status; `None` at `stop`.
    async fn may_claim(self: &Arc<Self>, state: &mut LoopState) -> Option<i64> {
        let mut changes = self.status.subscribe();
        while !self.stop.is_cancelled() {
            let status = changes.borrow_and_update().clone();
            let due = match status {
                SinkStatus::Unknown => None,
                SinkStatus::Active { no } => {
                    if state.known.is_some_and(|(known, _)| known != no) {
                        self.slots.resumed(state.known.map_or(0, |(_, failed)| failed));
                        self.metrics.sink_failures(self.sink.name(), 0);
                        state.sweep_at = Instant::now();
                    }
                    state.known = Some((no, 0));
                    if self.slots.free() > 0 {
                        self.gather(state.backlog).await;
                        return Some(no);
                    }
                    None
                }
                SinkStatus::Paused { no, probe_at, failed_probes } => {
                    state.known = Some((no, failed_probes));
                    if probe_at.is_none_or(|at| at > Instant::now()) {
                        probe_at
                    } else if self.slots.free() > 0 {
                        self.probe(no, failed_probes, state).await;
                        continue;
                    } else {
                        // Deliveries from before the pause have all slots, and a probe needs one too.
                        None
                    }
                }
            };
            let waits = async {
                match due {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => self.slots.freed().await,
                }
            };
            tokio::select! {
                () = self.stop.cancelled() => {}
                changed = changes.changed() => changed.ok()?,
                () = waits => {}
            }
        }
        None
    }

    /// In a backlog, waits a moment for a quarter of the slots: a poll for many events costs no more than a poll for one.
    async fn gather(&self, backlog: bool) {
        let several = self.slots.open() / 4;
        if !backlog || several <= 1 {
            return;
        }
        let enough = async {
            while self.slots.free() < several {
                self.slots.freed().await;
            }
        };
        tokio::select! {
            () = self.stop.cancelled() => {}
            () = enough => {}
            () = tokio::time::sleep(GATHER) => {}
        }
    }

    pub(super) async fn pause(&self, pause: Duration, nudged: bool) {
        tokio::select! {
            () = self.stop.cancelled() => {}
            () = self.nudge.notified(), if nudged => {}
            () = tokio::time::sleep(pause) => {}
        }
    }

    /// The pause before the next poll: until the next retry is due, or about `idle`.
    async fn until_due(&self, idle: Duration) -> Duration {
        let idle = jittered(idle);
        match self.store.next_due(self.sink.name()).await {
            // Not below a part of the pause: an event that is due and was not found waits for a sweep.
            Ok(Some(due)) => idle.min(due.max(self.poll / 4)),
            Ok(None) => idle,
            Err(error) => {
                self.note_failure("next_due", &error);
                idle.max(OUTAGE_FIRST)
            }
        }
    }

    /// Claims for the free slots, three of four for fresh events; each lane gets what the other leaves.
    async fn look(
        self: &Arc<Self>,
        free: usize,
        no: i64,
        state: &mut LoopState,
    ) -> Result<usize, Error> {
        if Instant::now() >= state.wake_at {
            self.wake_deferred(state).await;
        }
        let sweep = Instant::now() >= state.sweep_at;
        let look = match (sweep, self.slots.is_starting()) {
            (false, _) => Look::Quick,
            (true, false) => Look::Complete,
            // Many bad events before all others may have caused the pause.
            (true, true) => anywhere(),
        };
        // A short wait does not hurt a retry. An empty poll of this lane costs fresh events as much as a poll of their own.
        let skip = !self.is_ordered() && Instant::now() < state.retry_at;
        let (fresh, retry) = if skip { (free, 0) } else { split(free, &mut state.since_retry) };
        let got_fresh = self.claim(Lane::Fresh, fresh, no, look, state).await?;
        let spare = fresh.saturating_sub(got_fresh);
        let asked = if skip { 0 } else { retry + spare };
        let got_retry = self.claim(Lane::Retry, asked, no, look, state).await?;
        if asked > 0 && got_retry == 0 {
            state.retry_at = Instant::now() + self.poll;
        }
        let mut found = got_fresh + got_retry;
        if spare == 0 && got_retry < retry {
            found += self.claim(Lane::Fresh, retry - got_retry, no, look, state).await?;
        }
        // A full poll means a backlog, so the next one sweeps too.
        if sweep && found < self.full(free) {
            state.sweep_at = Instant::now() + jittered(SWEEP_EVERY);
        }
        Ok(found)
    }

    /// Makes a batch of deferred events due that nothing blocks any more: the order of the sink may have changed at the start,
    /// a replica with another order may have ended, or the event before may be deleted. After an error it is tried later, so
    /// that due events do not wait for it.
    async fn wake_deferred(&self, state: &mut LoopState) {
        let (sink, order) = (self.sink.name(), self.sink.order());
        let found = self.store.wake_deferred(sink, order, state.wake_from.as_deref()).await;
        let Woken { count, next } = found.unwrap_or_else(|error| {
            tracing::warn!(
                sink,
                error = causes(&error),
                "the search for deferred events of an ordered sink failed"
            );
            Woken::default()
        });
        if count > 0 {
            tracing::info!(sink, events = count, "deferred events are due");
        }
        let pause = if next.is_some() { WAKE_ON } else { jittered(WAKE_EVERY) };
        state.wake_at = Instant::now() + pause;
        state.wake_from = next;
    }

    /// Claims events from a random place on. If there are too few, the others are claimed from the beginning.
    pub(super) async fn take(&self, mut claim: Claim) -> Result<Vec<Claimed>, Error> {
        let mut found = self.store.claim(&claim).await?;
        claim.limit = claim.limit.saturating_sub(u32::try_from(found.len()).unwrap_or(u32::MAX));
        if claim.limit == 0 || !matches!(claim.look, Look::From(_)) {
            return Ok(found);
        }
        claim.look = Look::Complete;
        match self.store.claim(&claim).await {
            Ok(more) => found.extend(more),
            Err(error) if found.is_empty() => return Err(error),
            // The events found so far are already claimed.
            Err(error) => self.note_failure("claim", &error),
        }
        Ok(found)
    }

    /// Delivers in its own task, so that a panic is only a failed attempt of this event.
    pub(super) async fn deliver_guarded(&self, event: &Claimed) -> Delivered {
        let (sink, event) = (Arc::clone(&self.sink), event.clone());
        let mut task = JoinSet::new();
        task.spawn(async move { sink.deliver(&event).await });
        match task.join_next().await {
            Some(Ok(delivered)) => delivered,
            Some(Err(_)) | None => Delivered {
                evidence: Evidence::Failed { what: "the delivery failed inside oncegate".into() },
                retry_after: None,
            },
        }
    }

    fn report(&self, ended: Result<(), tokio::task::JoinError>) {
        if let Err(error) = ended {
            tracing::error!(sink = self.sink.name(), %error, "a delivery ended without a verdict");
        }
    }

    pub(super) fn note_failure(&self, verb: &str, error: &Error) {
        tasks::failed(&causes(error));
        if !self.failing.swap(true, Ordering::Relaxed) {
            let (sink, error) = (self.sink.name(), causes(error));
            tracing::warn!(sink, verb, error, "deliveries wait for the database");
        }
    }

    fn note_answer(&self) {
        if self.failing.swap(false, Ordering::Relaxed) {
            tracing::info!(sink = self.sink.name(), "the database answers again");
        }
    }
}

/// Slots for fresh events and for retries. One of four slots in a row is for a retry, also over several polls.
fn split(free: usize, since_retry: &mut usize) -> (usize, usize) {
    let retry = (*since_retry + free) / 4;
    *since_retry = (*since_retry + free) % 4;
    (free - retry, retry)
}

/// The slots of a sink that is well.
pub(super) fn slots_of(sink: &Sink) -> Arc<Slots> {
    Arc::new(Slots::new(sink.concurrency(), sink.pause_after()))
}

/// A random place among the due events.
pub(super) fn anywhere() -> Look {
    Look::From(fastrand::u16(..))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_slot_of_four_is_for_retries_also_when_one_is_free_at_a_time() {
        let mut since_retry = 0;
        assert_eq!(split(16, &mut since_retry), (12, 4));
        let retries: usize = (0..8).map(|_| split(1, &mut since_retry).1).sum();
        assert_eq!(retries, 2);
        assert_eq!(split(0, &mut since_retry), (0, 0));
    }
}
