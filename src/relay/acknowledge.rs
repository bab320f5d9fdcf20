//! Writes verdicts in batches. The verdicts that queue while a batch is written are the next batch.
//!
//! Invariants: a verdict that the database does not take is repeated until its claim ends, and then dropped. If the database
//! refuses one verdict, the others of its batch are still written. After a crash the claims run out, and their events are
//! delivered again.

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::pauses::OUTAGE;
use super::worker::{PendingVerdict, SinkWorker};
use crate::store::{Acknowledgement, Error, Verdict};
use crate::telemetry::Delivery;

/// Most verdicts in one acknowledgement.
const BATCH_MAX: usize = 256;

impl SinkWorker {
    /// Writes verdicts until all senders are dropped.
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

    /// Writes a batch once. After an error that may have been a commit, its verdicts are marked.
    async fn acknowledge(&self, batch: &mut [PendingVerdict]) -> Result<(), Error> {
        if batch.is_empty() {
            return Ok(());
        }
        batch.sort_by_key(|done| done.acknowledgement.event_id);
        let verdicts: Vec<_> = batch.iter().map(|done| done.acknowledgement.clone()).collect();
        match self.store.acknowledge(self.sink.name(), self.sink.order(), &verdicts).await {
            Ok(current) => {
                // The events that waited behind these are due now.
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

    /// Writes each verdict of a refused batch alone, so that one bad text stops no other.
    async fn acknowledge_singly(&self, batch: &mut [PendingVerdict]) {
        for done in batch.chunks_mut(1) {
            let Err(error) = self.acknowledge(done).await else { continue };
            for done in done {
                let id = done.acknowledgement.event_id;
                tracing::error!(sink = self.sink.name(), event = %id, %error, "a verdict cannot be stored");
            }
        }
    }

    /// Drops verdicts whose claim has ended: another worker may have the event now.
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

/// Adds the verdicts that have queued meanwhile.
fn top_up(batch: &mut Vec<PendingVerdict>, verdicts: &mut mpsc::Receiver<PendingVerdict>) {
    while batch.len() < BATCH_MAX {
        let Ok(done) = verdicts.try_recv() else { return };
        batch.push(done);
    }
}
