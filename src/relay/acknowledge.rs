//! Writes how deliveries ended, in batches: what queued while the last one was written is the next.
//!
//! What must stay true: a verdict that the database does not take is repeated until its claim is over, then forgotten; a batch
//! that it refuses costs only the verdict that it refuses. A process that dies here leaves claims that run out: those events
//! are delivered once more.

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::pauses::OUTAGE;
use super::worker::{PendingVerdict, SinkWorker};
use crate::store::{Acknowledgement, Error, Verdict};
use crate::telemetry::Delivery;

/// Most verdicts in one acknowledgement.
const BATCH_MAX: usize = 256;

impl SinkWorker {
    /// Writes verdicts: what queued while the last batch was written is the next. Ends when nobody sends any more.
    pub(super) async fn acknowledge_on(&self, mut verdicts: mpsc::Receiver<PendingVerdict>) {
        let mut batch = Vec::new();
        while verdicts.recv_many(&mut batch, BATCH_MAX).await > 0 {
            let mut outage = OUTAGE;
            while let Err(error) = self.acknowledge(&mut batch).await {
                if matches!(error, Error::Refused(_)) {
                    self.acknowledge_singly(&mut batch).await;
                    break;
                }
                self.note_failure("acknowledge", &error);
                tokio::time::sleep(outage.pause()).await;
                self.drop_ended(&mut batch);
                top_up(&mut batch, &mut verdicts);
            }
            batch.clear();
        }
    }

    /// Writes a batch once. On an error that leaves its end open, its verdicts are marked.
    async fn acknowledge(&self, batch: &mut [PendingVerdict]) -> Result<(), Error> {
        if batch.is_empty() {
            return Ok(());
        }
        batch.sort_by_key(|done| done.acknowledgement.event_id);
        let verdicts: Vec<_> = batch.iter().map(|done| done.acknowledgement.clone()).collect();
        match self.store.acknowledge(self.sink.name(), self.sink.order(), &verdicts).await {
            Ok(current) => {
                // What waited behind these is due now.
                if self.is_ordered() {
                    self.nudge.notify_one();
                }
                for done in batch {
                    let found = current.contains(&done.acknowledgement.event_id);
                    self.count(&done.acknowledgement, found || done.doubt);
                }
                Ok(())
            }
            Err(error) => {
                let doubt = matches!(error, Error::InDoubt(_));
                batch.iter_mut().for_each(|done| done.doubt |= doubt);
                Err(error)
            }
        }
    }

    /// After a refused batch: each verdict alone, so that one bad text stops no other.
    async fn acknowledge_singly(&self, batch: &mut [PendingVerdict]) {
        for done in batch.chunks_mut(1) {
            let Err(error) = self.acknowledge(done).await else { continue };
            for done in done {
                let id = done.acknowledgement.event_id;
                tracing::error!(sink = self.sink.name(), event = %id, %error, "a verdict cannot be stored");
            }
        }
    }

    /// Forgets verdicts whose claim is over: somebody else may have the event by now.
    fn drop_ended(&self, batch: &mut Vec<PendingVerdict>) {
        let now = Instant::now();
        for done in batch.extract_if(.., |done| done.until <= now) {
            self.count(&done.acknowledgement, false);
        }
    }

    fn count(&self, acknowledgement: &Acknowledgement, current: bool) {
        let sink = self.sink.name();
        let event = acknowledgement.event_id;
        let (result, failure) = match &acknowledgement.verdict {
            _ if !current => (Delivery::LostClaim, None),
            Verdict::Sent { .. } => (Delivery::Sent, None),
            Verdict::Retry { error, .. } => (Delivery::Failed, Some((error, "a delivery failed"))),
            Verdict::Refused { error, .. } => {
                (Delivery::Refused, Some((error, "a delivery was refused")))
            }
            Verdict::Returned { error, .. } => {
                (Delivery::Returned, Some((error, "an event waits until its sink takes events")))
            }
            Verdict::Dead { error, .. } => {
                tracing::warn!(sink, %event, error, "an event is dead: it is kept for redelivery");
                (Delivery::Dead, None)
            }
            Verdict::GivenBack => return,
        };
        if let Some((error, what)) = failure {
            tracing::debug!(sink, %event, error, "{what}");
        }
        self.metrics.delivered(sink, result);
    }
}

/// Adds what has queued meanwhile.
fn top_up(batch: &mut Vec<PendingVerdict>, verdicts: &mut mpsc::Receiver<PendingVerdict>) {
    while batch.len() < BATCH_MAX {
        let Ok(done) = verdicts.try_recv() else { return };
        batch.push(done);
    }
}
