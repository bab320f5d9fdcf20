//! Answers that are still read after their time-out, within a bound of their own.
//!
//! The caller has its 504 and the record says `unknown`; the connection stays open for `late_answer`, and what comes on it is
//! handed on like any other evidence. What must stay true: a hanging upstream takes nothing from those limits that requests
//! need; past the bound, and at the end of the process, such a connection is cut, which loses nothing that was promised.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::Gateway;
use super::complete::{Completer, Finish, LateExchange};
use super::evidence::Evidence;
use super::forward::OpenExchange;
use super::reserve::Detached;
use crate::fault::{self, Point};
use crate::record::Fence;
use crate::record::outcome::Class;
use crate::route::Route;
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

impl Gateway {
    /// Goes on reading an answer that did not come in time: its caller has a 504.
    pub(super) fn await_late(
        self: &Arc<Self>,
        late: LateExchange,
        route: &Arc<Route>,
        context: Option<Bytes>,
    ) {
        let LateExchange { detached, exchange } = late;
        let (gateway, route) = (Arc::clone(self), Arc::clone(route));
        let time = route.policy.late_answer;
        self.late.start(exchange, time, move |evidence| async move {
            gateway.completer(&route, context.as_deref()).close_late(detached, evidence).await
        });
    }
}

impl Completer<'_> {
    /// Brings in what came of an exchange after its time-out. The record is `unknown` by now, or has gone on.
    async fn close_late(&self, detached: Detached, evidence: Evidence) -> LateAnswer {
        let Fence { id: record, attempt } = detached.fence();
        let finish = match self.classify(record, evidence) {
            Ok((Class::Stored, first)) => {
                self.complete(self.single_flight.resume(detached), first).await
            }
            Ok((Class::Released, first)) => {
                self.release_answered(self.single_flight.resume(detached), first).await
            }
            Ok((Class::Unknown, _)) => return LateAnswer::Unknown,
            Err(failure) if failure.class() == Class::Released => {
                self.fail(self.single_flight.resume(detached), failure, None).await.0
            }
            Err(_) => return LateAnswer::Missed,
        };
        let result = match finish {
            Finish::Kept { .. } | Finish::Recorded(_) => LateAnswer::Completed,
            Finish::Released { .. } | Finish::Failed { .. } => LateAnswer::Released,
            // In the spill it is kept, and not in the database yet.
            Finish::Spilled { .. }
            | Finish::NotStored { .. }
            | Finish::Overtaken(_)
            | Finish::Found(_) => LateAnswer::NotStored,
            Finish::Unknown { .. } | Finish::StillUnknown { .. } => LateAnswer::Unknown,
        };
        let attempt = attempt.number();
        tracing::info!(%record, attempt, result = result.as_str(), "a late answer came");
        result
    }
}
