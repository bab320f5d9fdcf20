//! Answers that are still read after their time-out, within a bound of their own.
//!
//! The caller has its 504 and the record says `unknown`; the connection stays open for `late_answer`, and what comes on it is
//! handed on like any other evidence. What must stay true: a hanging upstream takes nothing from those limits that requests
//! need; past the bound, and at the end of the process, such a connection is cut, which loses nothing that was promised.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::forward::{Evidence, OpenExchange};
use crate::fault::{self, Point};
use crate::telemetry::{LateAnswer, Metrics};

/// The reads of one process.
pub(super) struct LateReads {
    permits: Arc<Semaphore>,
    tasks: TaskTracker,
    stop: CancellationToken,
    metrics: Arc<Metrics>,
}

impl LateReads {
    /// At most `max` at a time.
    pub(super) fn new(max: usize, metrics: Arc<Metrics>) -> Self {
        let permits = Arc::new(Semaphore::new(max.min(Semaphore::MAX_PERMITS)));
        Self { permits, tasks: TaskTracker::new(), stop: CancellationToken::new(), metrics }
    }

    /// Awaits what comes within `time` and brings it to its end by `close`, in a task of its own. Without a permit
    /// the exchange is dropped.
    pub(super) fn start<F: Future<Output = LateAnswer> + Send>(
        &self,
        exchange: OpenExchange,
        time: Duration,
        close: impl FnOnce(Evidence) -> F + Send + 'static,
    ) {
        let Ok(permit) = Arc::clone(&self.permits).try_acquire_owned() else {
            self.metrics.late_answer(LateAnswer::NoRoom);
            return;
        };
        let (stop, metrics) = (self.stop.clone(), Arc::clone(&self.metrics));
        let reading = metrics.late_read();
        self.tasks.spawn(async move {
            let read = stop.run_until_cancelled(tokio::time::timeout(time, exchange)).await;
            let result = match read {
                Some(Ok(evidence)) => {
                    fault::point(Point::LateAnswer).await;
                    close(evidence).await
                }
                Some(Err(_)) | None => LateAnswer::Missed,
            };
            metrics.late_answer(result);
            drop((reading, permit));
        });
    }

    /// Stops reading. What has been read is brought to its end.
    pub(super) async fn cut(&self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}
