//! A claim on events of one sink, and the deliveries under it.
//!
//! A claim gives this process the right to deliver some events for a while. It has a number that only grows, and each verdict
//! names it: a verdict under an old number changes nothing. Invariants:
//!
//! - A claim takes a slot and gives it back when its verdict is written or the claim has ended. So this process never holds
//!   more events than the sink's concurrency, and no claimed event waits for a slot.
//! - No event is sent so late that its claim could end before its verdict is written. This is measured on the monotonic clock
//!   from before the claim statement. An event that is too late is given back unsent.
//!
//! A process that dies here leaves claims. They run out, and other processes may take them when its lease has ended: those
//! events are delivered once more, under the same ids. Fresh events that were claimed often and never ended are made dead,
//! because they may crash the process.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::sink::Delivered;
use super::worker::{LoopState, PendingVerdict, SinkWorker};
use crate::fault::{self, Point};
use crate::store::{Acknowledgement, Claim, Claimed, Error, Lane, Look, Verdict};

/// How long a claim lasts beyond two time-outs of its sink.
const LEASE_EXTRA: Duration = Duration::from_secs(5);

/// The time left of a claim to write its verdict if the delivery takes its whole time-out.
const ACKNOWLEDGE_TIME: Duration = Duration::from_secs(2);

/// An event with this many claims that never ended may crash the process. Only fresh events are judged, because a redelivery
/// resets the attempts of an event and not its claim number.
const UNFINISHED_MAX: u32 = 5;

impl SinkWorker {
    /// How long a claim, or a probe, belongs to this process.
    pub(super) fn lease(&self) -> Duration {
        self.sink.timeout().saturating_mul(2).saturating_add(LEASE_EXTRA)
    }

    pub(super) fn claim_of(&self, lane: Lane, limit: usize, look: Look) -> Claim {
        Claim {
            sink: self.sink.name().to_owned(),
            lane,
            order: self.sink.order(),
            limit: u32::try_from(limit).unwrap_or(u32::MAX),
            owner: self.claimant.lease.current().owner,
            lease: self.lease(),
            reclaim: self.claimant.reclaim(),
            look,
        }
    }

    /// Claims up to `limit` events of a lane and starts their deliveries. The sink is open under `no`.
    pub(super) async fn claim(
        self: &Arc<Self>,
        lane: Lane,
        limit: usize,
        no: i64,
        look: Look,
        state: &mut LoopState,
    ) -> Result<usize, Error> {
        if limit == 0 {
            return Ok(0);
        }
        let claim = self.claim_of(lane, limit, look);
        let until = Instant::now() + claim.lease;
        let events = self.take(claim).await?;
        let found = events.len();
        for event in events {
            let slot = self.slots.take();
            let worker = Arc::clone(self);
            let done = state.done.clone();
            state.deliveries.spawn(async move {
                let verdict = if slot.is_some() {
                    worker.deliver(&event, lane, until, no).await
                } else {
                    // The store gave more than it was asked for.
                    Verdict::GivenBack
                };
                let acknowledgement =
                    Acknowledgement { event_id: event.event_id, claim_no: event.claim_no, verdict };
                let verdict = PendingVerdict { acknowledgement, until, doubt: false, _slot: slot };
                // Err: the loop has ended. The claim runs out.
                drop(done.send(verdict).await);
            });
        }
        Ok(found)
    }

    async fn deliver(&self, event: &Claimed, lane: Lane, until: Instant, no: i64) -> Verdict {
        match self.attempt(event, lane, until).await {
            Ok(delivered) => self.judge(event, &delivered, no).await,
            Err(unsent) => unsent,
        }
    }

    /// Sends an event, unless it is suspect, too late, or the relay stops. Returns the verdict.
    pub(super) async fn attempt(
        &self,
        event: &Claimed,
        lane: Lane,
        until: Instant,
    ) -> Result<Delivered, Verdict> {
        if lane == Lane::Fresh && unfinished(event) >= UNFINISHED_MAX {
            let error = format!("set apart: {UNFINISHED_MAX} attempts began and never ended");
            return Err(Verdict::Dead { status: None, error });
        }
        let needed = self.sink.timeout() + ACKNOWLEDGE_TIME;
        if self.stop.is_cancelled() || Instant::now() + needed > until {
            return Err(Verdict::GivenBack);
        }
        fault::point(Point::BeforeDelivery).await;
        let _under_way = self.metrics.delivering(self.sink.name());
        let begun = Instant::now();
        let delivered = self.deliver_guarded(event).await;
        self.metrics.delivery_took(self.sink.name(), begun.elapsed());
        if let Some(ahead) = self.sink.clock_ahead() {
            self.metrics.sink_clock(self.sink.name(), ahead);
        }
        fault::point(Point::AfterDelivery).await;
        Ok(delivered)
    }
}

/// How many earlier claims ended neither in a failure nor in a success.
fn unfinished(event: &Claimed) -> u32 {
    let before = u32::try_from(event.claim_no).unwrap_or(0).saturating_sub(1);
    before.saturating_sub(event.attempts)
}
