//! What the answers of a sink make of it: when it is paused, and how it is probed until it answers again.
//!
//! A paused sink is sent one event at a time, over all replicas, at a pace that grows with each failure up to a minute. A probe
//! that fails is no attempt: its event goes back, behind all that is due, with what it met. So no attempts are used up in an
//! outage. A process that dies here leaves a probe and a claim that run out, as every other.
//!
//! Events that always fail look like an outage from here. So the first probe goes with the first free slot, and with the
//! newest event, farthest from those that made the pause; most of the next ones take untried events from anywhere in the
//! backlog, and where the sink chokes on what it is sent they soon follow each other. A crowd of bad ones that stands
//! before the good ones mostly costs a probe for each pause, and no wait. A bad one that fails again says nothing new
//! while others go well.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::pauses::{OUTAGE, OUTAGE_FIRST};
use super::sink::Delivered;
use super::verdict::{
    Health, Past, SUSPECT_MAX, error, health_of, returned, suspects, until_first_probe,
    until_probe, verdict,
};
use super::worker::{LoopState, PendingVerdict, SinkWorker, anywhere};
use crate::backoff::jittered;
use crate::store::{
    Acknowledgement, Changed, Claimed, Error, Lane, Look, SinkChange, Trouble, Verdict,
};
use crate::telemetry::Probe;

/// Shortest pause of a probe that found nothing to send. The longest is [`SUSPECT_MAX`]: it costs the sink nothing, and what
/// comes next may be a good one.
const IDLE_MIN: Duration = Duration::from_millis(200);

/// For how long a good answer speaks for the sink against events that failed before, in times of the first pause.
const WELL_FOR: u32 = 10;

impl SinkWorker {
    /// What an attempt that was claimed while the sink was open under `no` means for its event; pauses the sink where it is
    /// time.
    pub(super) async fn judge(&self, event: &Claimed, delivered: &Delivered, no: i64) -> Verdict {
        let level = self.slots.level();
        match self.health(delivered, level) {
            Health::Healthy => {
                self.slots.succeeded();
                self.metrics.sink_failures(self.sink.name(), 0);
                self.verdict(event, delivered)
            }
            // The outage that it met is known by now, or over: it is no attempt.
            Health::Failing | Health::Stop(_) if !self.status.is_open(no) => {
                returned(&delivered.evidence)
            }
            Health::Failing if self.is_known_to_be_bad(event, delivered) => {
                self.verdict(event, delivered)
            }
            Health::Failing => {
                let outage = self.slots.failed();
                self.metrics.sink_failures(self.sink.name(), self.slots.failures());
                if outage {
                    let (patience, suspect) = (self.sink.patience(), suspects(&delivered.evidence));
                    let again = until_first_probe(level, &patience, fastrand::f64(), suspect);
                    self.pause_sink(no, Trouble::Failing { again }, delivered).await;
                }
                self.verdict(event, delivered)
            }
            Health::Stop(trouble) => {
                self.pause_sink(no, trouble, delivered).await;
                returned(&delivered.evidence)
            }
        }
    }

    /// Whether a failure says nothing new: the sink chokes on an event that failed before, while others go well. Many such
    /// events would else be an outage whenever nothing else is due for a moment.
    fn is_known_to_be_bad(&self, event: &Claimed, delivered: &Delivered) -> bool {
        let lately = self.sink.patience().base.saturating_mul(WELL_FOR);
        event.attempts > 0 && suspects(&delivered.evidence) && self.slots.succeeded_within(lately)
    }

    fn health(&self, delivered: &Delivered, failed_probes: u32) -> Health {
        let (hint, patience) = (delivered.retry_after, self.sink.patience());
        health_of(&delivered.evidence, &patience, hint, failed_probes, fastrand::f64())
    }

    fn verdict(&self, event: &Claimed, delivered: &Delivered) -> Verdict {
        let past = Past { attempts: event.attempts, refusals: event.refusals, age: event.age };
        let hint = delivered.retry_after;
        verdict(&delivered.evidence, past, &self.sink.patience(), hint, fastrand::f64())
    }

    /// Pauses what is open under `no`. Where the database does not take it, the next failure tries again.
    async fn pause_sink(&self, no: i64, trouble: Trouble, delivered: &Delivered) {
        let error = error(&delivered.evidence);
        let change = SinkChange::Pause { trouble, error, failed_probes: self.slots.level() };
        if let Err(error) = self.store.change_sink(self.sink.name(), no, &change).await {
            self.note_failure("pause", &error);
        }
        self.status.changed_here();
    }

    /// Probes the sink, whose pause has the number `no`, unless another replica does.
    pub(super) async fn probe(self: &Arc<Self>, no: i64, failed: u32, state: &mut LoopState) {
        let lease = self.lease();
        let until = Instant::now() + lease;
        let (owner, reclaim) = (self.claimant.lease.current().owner, self.claimant.reclaim());
        let change = SinkChange::Probe { owner, lease, reclaim };
        match self.store.change_sink(self.sink.name(), no, &change).await {
            Ok(Changed::Yes) => {
                let change = self.probe_once(failed, until, state).await;
                // A change makes the number grow by one.
                self.end_probe(no + 1, &change, until).await;
            }
            Ok(Changed::No | Changed::Locked) => {}
            Err(error) => {
                self.note_failure("probe", &error);
                self.pause(jittered(OUTAGE_FIRST), false).await;
            }
        }
        self.status.changed_here();
    }

    /// Sends one event; to what that leads.
    async fn probe_once(
        self: &Arc<Self>,
        failed: u32,
        until: Instant,
        state: &mut LoopState,
    ) -> SinkChange {
        let pace = until_probe(failed, &self.sink.patience(), fastrand::f64(), true);
        let idle = SinkChange::ProbeIdle { again: pace.clamp(IDLE_MIN, SUSPECT_MAX) };
        let (lane, event) = match self.claim_for_probe(failed).await {
            Ok(Some(found)) => found,
            Ok(None) => {
                self.metrics.sink_probed(self.sink.name(), Probe::Idle);
                return idle;
            }
            Err(error) => {
                self.note_failure("claim", &error);
                return idle;
            }
        };
        let slot = self.slots.take();
        let (verdict, change) = match self.attempt(&event, lane, until).await {
            Ok(delivered) => self.judge_probe(&event, &delivered, failed),
            Err(unsent) => (unsent, idle),
        };
        let (event_id, claim_no) = (event.event_id, event.claim_no);
        let acknowledgement = Acknowledgement { event_id, claim_no, verdict };
        let done = PendingVerdict { acknowledgement, until, doubt: false, _slot: slot };
        // Nobody listens only where the loop has ended: the claim runs out.
        drop(state.done.send(done).await);
        change
    }

    /// An event from somewhere in a lane, or else the one that has been due longest in the other. Nothing is known against
    /// fresh ones, so mostly it is one of these: the newest, farthest from those that made the pause, and two from
    /// anywhere. But where all that comes is bad, a good one may be among those that were tried.
    async fn claim_for_probe(&self, failed: u32) -> Result<Option<(Lane, Claimed)>, Error> {
        let (first, look, second) = match failed % 4 {
            0 => (Lane::Fresh, Look::From(u16::MAX), Lane::Retry),
            1 | 2 => (Lane::Fresh, anywhere(), Lane::Retry),
            _ => (Lane::Retry, anywhere(), Lane::Fresh),
        };
        for (lane, look) in [(first, look), (second, Look::Complete)] {
            let mut found = self.take(self.claim_of(lane, 1, look)).await?;
            if let Some(event) = found.pop() {
                return Ok(Some((lane, event)));
            }
        }
        Ok(None)
    }

    fn judge_probe(
        &self,
        event: &Claimed,
        delivered: &Delivered,
        failed: u32,
    ) -> (Verdict, SinkChange) {
        let failed = failed.saturating_add(1);
        let (trouble, result) = match self.health(delivered, failed) {
            Health::Healthy => {
                self.metrics.sink_probed(self.sink.name(), Probe::Well);
                return (self.verdict(event, delivered), SinkChange::Resume);
            }
            Health::Failing => {
                let suspect = suspects(&delivered.evidence);
                let again = until_probe(failed, &self.sink.patience(), fastrand::f64(), suspect);
                (Trouble::Failing { again }, Probe::Failed)
            }
            Health::Stop(Trouble::Gone) => (Trouble::Gone, Probe::Gone),
            Health::Stop(trouble) => (trouble, Probe::Failed),
        };
        self.metrics.sink_probed(self.sink.name(), result);
        let evidence = &delivered.evidence;
        (returned(evidence), SinkChange::ProbeFailed { trouble, error: error(evidence) })
    }

    /// Says how the probe ended, until the database takes it or the probe's time is over: then another one may be taken.
    async fn end_probe(&self, no: i64, change: &SinkChange, until: Instant) {
        let mut outage = OUTAGE;
        while let Err(error) = self.store.change_sink(self.sink.name(), no, change).await {
            self.note_failure("probe", &error);
            if Instant::now() >= until || self.stop.is_cancelled() {
                return;
            }
            self.pause(outage.pause(), false).await;
        }
    }
}
