//! Pauses a sink that fails, and probes it until it answers again.
//!
//! A probe is the delivery of one event. All replicas together send one probe at a time. The pause between probes grows with
//! each failure up to a minute. A failed probe is no attempt: its event goes back behind all due events, with the error. So an
//! outage uses up no attempts. After a crash the probe and its claim run out.
//!
//! To the relay, events that always fail look like an outage. Therefore:
//!
//! - The first probe takes the first free slot and the newest event, which is far from the events that caused the pause.
//! - Most later probes take untried events from anywhere in the backlog. If the answer may be the event's fault, the next
//!   probe follows soon. So many bad events before the good ones cost mostly one probe for each pause, and little time.
//! - While other events succeed, another failure of an event that failed before is no sign of an outage.

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

/// Shortest pause after a probe that found no event. The longest is [`SUSPECT_MAX`]: looking costs the sink nothing, and the
/// next event may be a good one.
const IDLE_MIN: Duration = Duration::from_millis(200);

/// How long a good answer shows that the sink is well although events fail that failed before; in units of the first pause.
const WELL_FOR: u32 = 10;

impl SinkWorker {
    /// The verdict on an attempt that was claimed while the sink was open under `no`. Pauses the sink after too many failures.
    pub(super) async fn judge(&self, event: &Claimed, delivered: &Delivered, no: i64) -> Verdict {
        let level = self.slots.level();
        match self.health(delivered, level) {
            Health::Healthy => {
                self.slots.succeeded();
                self.metrics.sink_failures(self.sink.name(), 0);
                self.verdict(event, delivered)
            }
            // The outage is already known, or over, so this is no attempt.
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

    /// Whether a failure is no sign of an outage: the event failed before, and others succeed. Otherwise many such events
    /// would pause the sink whenever no other event is due for a moment.
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

    /// Pauses the sink that is open under `no`. If the database does not take it, the next failure tries again.
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
                // Each change of the status adds one to the number.
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

    /// Sends one event. Returns the result of the probe.
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
        // Err: the loop has ended. The claim runs out.
        drop(state.done.send(done).await);
        change
    }

    /// An event from a random place of a lane, or else the longest due event of the other lane. Mostly it is a fresh
    /// event: the newest, which is far from the events that caused the pause, and then two from random places. Sometimes
    /// it is a retry, because all fresh events may be bad.
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

    /// Writes the result of the probe, until the database takes it or the time of the probe is over. Then another probe may
    /// begin.
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
