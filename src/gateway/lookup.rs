//! Asks the upstream what became of an attempt whose end nobody knows: before a retry is sent, and from time to time.
//!
//! The look-up reads; it executes nothing, so it needs no reservation. But only whoever holds the record asks: the store
//! lets one at a time, over all replicas. What must stay true: an answer counts only if it came whole and in time;
//! everything else is [`LookupResult::Failed`], and leaves the record as unknown as it was.
//!
//! When the process dies here, the record is in progress under a dead owner: it is unknown again, and is asked about later.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT_ENCODING, CONTENT_ENCODING};
use http::{HeaderValue, Request};
use http_body_util::Full;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use super::Gateway;
use super::complete::{Completer, Finish};
use super::evidence::{Evidence, receive};
use super::headers;
use super::reserve::{FlightEnd, InFlight, KeyedRequest, LookupGuard, Raised, Reservation};
use super::settle::End;
use super::upstream::Upstream;
use crate::backoff::jittered;
use crate::fault::{self, Point};
use crate::record::event::RecordContext;
use crate::record::lookup::LookupResult;
use crate::record::{Answer, KeptBody, Spelling};
use crate::route::{Lookup, OnUnknown, Route};
use crate::store::{DueLookup, LookupRule};
use crate::tasks;
use crate::telemetry::{LookupEnd, Metrics, causes};

/// How often the store is asked about which unknown records the upstream may be asked.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// About how many at most in one look.
const ASK_BATCH: u32 = 32;
/// How many look-ups are in flight at a time.
const ASK_AT_ONCE: usize = 4;

/// What came of asking for a retry.
pub(super) enum AfterLookup {
    /// It may be sent.
    Send(Reservation),
    /// It need not, or may not be.
    Over(Box<Finish>),
}

/// About which of a route's records the upstream is asked.
pub(super) fn asking(route: &Route) -> Option<LookupRule> {
    match &route.policy.on_unknown {
        OnUnknown::Lookup(lookup) => {
            Some(LookupRule { operation: route.operation.clone(), delay: lookup.delay })
        }
        OnUnknown::Hold | OnUnknown::Retry => None,
    }
}

impl Gateway {
    /// For a retry on a route that looks up: what became of the attempt before? It is asked about under its own fence, so
    /// whatever still comes of it counts. Only "not found" lets the next attempt be sent, and only if nothing came in between.
    pub(super) async fn look_up_first(
        &self,
        route: &Route,
        request: &KeyedRequest,
        guard: LookupGuard,
    ) -> AfterLookup {
        let result = self.look_up(route, &guard).await;
        let context = guard.context();
        let completer = self.completer(route, context.as_deref());
        AfterLookup::Over(Box::new(match result {
            LookupResult::Found(answer) => completer.complete_found(guard.attempt(), answer).await,
            LookupResult::Failed(_) => completer.give_up_lookup(guard.attempt()).await,
            LookupResult::NotFound => match self.single_flight.raise(guard, request).await {
                Raised::Held(reservation) => return AfterLookup::Send(reservation),
                Raised::Not(guard) => completer.give_up_lookup(guard.attempt()).await,
                Raised::Doubt(record) => Finish::StillUnknown { record },
            },
        }))
    }

    async fn look_up(&self, route: &Route, guard: &LookupGuard) -> LookupResult {
        let lookup = guard.lookup();
        let upstream = self.upstreams.get(&lookup.upstream).unwrap_or(&self.default);
        let result = ask(route, lookup, upstream, &guard.about(), &self.metrics).await;
        fault::point(Point::QuestionAnswered).await;
        result
    }

    /// Asks about records whose outcome is unknown, so that they resolve without a retry, until `stop`. Records whose route
    /// does not look up, or is no longer there, are left alone.
    pub(super) async fn resolve_unknown(
        self: Arc<Self>,
        asking: Arc<[LookupRule]>,
        stop: CancellationToken,
    ) {
        let slots = Arc::new(Semaphore::new(ASK_AT_ONCE));
        let mut full = false;
        loop {
            let pause = if full { ASK_EVERY / 20 } else { ASK_EVERY };
            let pausing = tokio::time::sleep(jittered(pause));
            if stop.run_until_cancelled(pausing).await.is_none() {
                return;
            }
            let due = self.store.due_lookups(&asking, ASK_BATCH).await;
            let due = due.inspect(|_| tasks::ran()).unwrap_or_else(|error| {
                tasks::failed(&error);
                tracing::debug!(%error, "it is not known what to request about");
                Vec::new()
            });
            full = due.len() >= usize::try_from(ASK_BATCH).unwrap_or(usize::MAX);
            for due in due {
                let slot = Arc::clone(&slots).acquire_owned();
                let Some(Ok(slot)) = stop.run_until_cancelled(slot).await else { return };
                let gateway = Arc::clone(&self);
                self.tasks.spawn(async move {
                    gateway.look_up_due(due).await;
                    drop(slot);
                });
            }
        }
    }

    /// Asks about one record, and writes down what is known then.
    async fn look_up_due(&self, due: DueLookup) {
        let Some(route) = self.routes.by_operation(due.scope.operation.as_str()) else { return };
        let OnUnknown::Lookup(lookup) = &route.policy.on_unknown else { return };
        let Some(guard) = self.single_flight.hold_for_lookup(&due, lookup).await else { return };
        let result = self.look_up(&route, &guard).await;
        let context = guard.context();
        let completer = self.completer(&route, context.as_deref());
        drop(match result {
            LookupResult::Found(answer) => completer.complete_found(guard.attempt(), answer).await,
            LookupResult::NotFound | LookupResult::Failed(_) => {
                completer.give_up_lookup(guard.attempt()).await
            }
        });
    }
}

impl Completer<'_> {
    /// Keeps what a look-up found, with the events, under the fence that was held for it.
    async fn complete_found(&self, in_flight: Box<InFlight>, answer: Answer) -> Finish {
        let record = in_flight.fence.id;
        let end = End::Complete(self.executed(&in_flight, answer, true));
        match self.settle(&in_flight, &end, &FlightEnd::LookAgain).await {
            Ok(settled) => {
                let (_, replay) = self.conclude(in_flight, settled).await;
                replay.map_or(Finish::StillUnknown { record }, Finish::Found)
            }
            Err(error) => {
                self.hand_to_retrier(in_flight, end, FlightEnd::LookAgain, &error).await;
                Finish::StillUnknown { record }
            }
        }
    }

    /// Ends a look-up that brought nothing: unknown again, unless the attempt was completed meanwhile.
    async fn give_up_lookup(&self, in_flight: Box<InFlight>) -> Finish {
        let record = in_flight.fence.id;
        let (_, found) = self.mark_unknown(in_flight).await;
        found.map_or(Finish::StillUnknown { record }, Finish::Found)
    }
}

/// Asks, once, and says what the answer means.
async fn ask(
    route: &Route,
    lookup: &Lookup,
    upstream: &Upstream,
    about: &RecordContext<'_>,
    metrics: &Metrics,
) -> LookupResult {
    let body_max = route.policy.response_body_max;
    let result = match lookup.template.request(about) {
        Err(error) => LookupResult::Failed(error),
        Ok(request) => {
            let exchange = exchange(upstream, request, body_max);
            match tokio::time::timeout(lookup.timeout, exchange).await {
                Ok(Ok(reply)) => lookup.template.interpret(about, &reply),
                Ok(Err(error)) => LookupResult::Failed(error),
                Err(_) => LookupResult::Failed("no answer in time".to_owned()),
            }
        }
    };
    let (operation, record) = (route.operation.as_str(), about.record);
    let asked = match &result {
        LookupResult::Found(answer) => {
            tracing::info!(%record, operation, status = answer.status.as_u16(), "a look-up found the outcome");
            LookupEnd::Found
        }
        LookupResult::NotFound => {
            tracing::info!(%record, operation, "a look-up found nothing");
            LookupEnd::NotFound
        }
        LookupResult::Failed(why) => {
            tracing::warn!(%record, operation, %why, "a look-up failed; the outcome stays unknown");
            LookupEnd::Failed
        }
    };
    metrics.asked(operation, asked);
    result
}

async fn exchange(
    upstream: &Upstream,
    request: Request<()>,
    body_max: usize,
) -> Result<Answer, String> {
    let mut request = request.map(|()| Full::<Bytes>::default());
    request.headers_mut().entry(ACCEPT_ENCODING).or_insert(HeaderValue::from_static("identity"));
    let connection = upstream.dial().await.map_err(|error| causes(&error))?;
    // It reads only, so it may go out under any lease.
    let answer = connection.send(request, || true).await.map_err(|error| causes(&error))?;
    match receive(answer, body_max).await {
        Evidence::Answered { head, body, .. } => {
            if head.headers.contains_key(CONTENT_ENCODING) {
                return Err("the answer is encoded, which was not asked for".to_owned());
            }
            let headers = headers::kept(&head.headers, &[]);
            let spelling = Spelling::default();
            Ok(Answer { status: head.status, headers, spelling, body: KeptBody::Whole(body) })
        }
        Evidence::Large { .. } => Err("the answer is larger than max_response_body".to_owned()),
        Evidence::Failed(_) => Err("the answer broke off".to_owned()),
    }
}
