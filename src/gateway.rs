//! The way of one request.
//!
//! ```text
//! accept -> route -> scope -> fingerprint -> reserve -> forward -> classify -> complete -> reply
//! ```
//!
//! [`Gateway::answer`] and [`Gateway::keyed`] are the story; every step has its own module. From the moment a request
//! asks the store as its scope's leader, the work is a tracked task of its own: a caller that hangs up changes nothing,
//! and its retry finds the result. Those who wait for another's execution are not tasks; they hold nothing.

pub mod accept;
mod bypass;
pub mod complete;
pub mod forward;
pub mod headers;
mod intake;
mod late;
mod lookup;
pub mod pass;
mod prefixed;
pub mod reply;
pub mod reserve;
mod rights;
mod room;
mod spelling;
pub mod spill;
pub mod tokens;
pub mod upstream;

use std::collections::HashMap;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::CONNECTION;
use http::{HeaderValue, Request, Response};
use hyper::body::Incoming;
use tokio::sync::{Notify, Semaphore, oneshot};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::bypass::Alarm;
use self::complete::{Closing, Finish, Late};
use self::forward::Bounds;
use self::headers::Forwarding;
use self::intake::{Intake, Keyed, Read};
use self::late::LateReads;
use self::pass::PassError;
use self::reply::{Kept, Name, Problem};
use self::reserve::{
    Admission, Desk, Followed, Lead, MayJudge, Refusal, Replay, Reservation, Seat, Shared,
    SharedAnswer, Unreserved,
};
use self::rights::{Permit, Rights};
use self::room::{Limits, NoRoom};
use self::spill::Spill;
use self::tokens::Tokens;
use self::upstream::{Body, Upstream};
use crate::fault::{self, Point};
use crate::record::lookup::{About, Verdict};
use crate::record::outcome::Failure;
use crate::record::{Attempt, KeptBody, LeaseView};
use crate::route::{Found, Lookup, OnUnknown, Route, Routes, Server};
use crate::scope::{DigestKey, Params};
use crate::store::{Asking, Due, Store};
use crate::telemetry::{Metrics, Reply, Step};

/// How often the audit table is read for what operators did.
const AUDIT_EVERY: Duration = Duration::from_millis(500);
/// How far back each look reaches: rows of slow transactions become visible late.
const AUDIT_WINDOW: Duration = Duration::from_secs(15);

/// How often the store is asked about which unknown records the upstream may be asked.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// About how many at most in one look.
const ASK_BATCH: u32 = 32;
/// How many questions are under way at a time.
const ASK_AT_ONCE: usize = 4;

/// How the gateway is set up.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The upstream's view of callers.
    pub forwarding: Forwarding,
    /// How long a reservation may take.
    pub reserve_timeout: Duration,
    /// How long a caller waits for the database to take its outcome.
    pub completion_timeout: Duration,
    /// How long a lost database session may still commit what it was sent.
    pub doubt_window: Duration,
    /// Bytes of answers kept in memory for replay.
    pub cache_bytes: u64,
    /// Keyed requests that are read, executed or answered at a time.
    pub in_flight_max: usize,
    /// Duplicates that wait for an execution on this replica at a time.
    pub waiting_max: usize,
    /// Answers awaited after their time-out.
    pub late_answers_max: usize,
    /// What a keyed request gets while the store is away.
    pub on_unavailable: OnUnavailable,
    /// Sum of the bodies of keyed requests and of their answers in memory, in bytes; see [`Settings::fits`].
    pub buffered_bytes_max: usize,
    /// Under which name unnamed routes find their upstream.
    pub default_upstream: String,
}

impl Settings {
    /// Whether one request with bodies of these lengths can be admitted at all.
    #[must_use]
    pub fn fits(&self, request_body_max: usize, response_body_max: usize) -> bool {
        room::fits(self.buffered_bytes_max, request_body_max, response_body_max)
    }
}

/// What a keyed request gets for which no reservation can be made because the store is away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnUnavailable {
    /// 503; nothing is forwarded.
    Refuse,
    /// It is forwarded unprotected.
    Bypass,
}

/// The gateway behind a listener.
pub struct Gateway {
    settings: Settings,
    routes: Routes,
    upstreams: HashMap<String, Arc<Upstream>>,
    default: Arc<Upstream>,
    store: Arc<dyn Store>,
    desk: Desk,
    intake: Intake,
    tokens: Option<Arc<Tokens>>,
    rights: Rights,
    late: LateReads,
    alarm: Alarm,
    metrics: Arc<Metrics>,
    wake: Arc<Notify>,
    tasks: TaskTracker,
}

/// What the gateway works with.
pub struct Parts {
    /// The keyed routes.
    pub routes: Routes,
    /// By name.
    pub upstreams: HashMap<String, Arc<Upstream>>,
    /// Where records are kept.
    pub store: Arc<dyn Store>,
    /// This process's lease.
    pub lease: LeaseView,
    /// Whether other owners may be judged by their leases.
    pub may_judge: MayJudge,
    /// Where outcomes are kept that the store does not take.
    pub spill: Spill,
    /// For digests of credentials.
    pub digest: DigestKey,
    /// Checks tokens; none: no route reads its tenant from one.
    pub tokens: Option<Tokens>,
    /// Who is asked whether a stored answer may be read.
    pub servers: HashMap<Server, Arc<Upstream>>,
    /// Where everything is counted.
    pub metrics: Arc<Metrics>,
    /// Wakes the relay.
    pub wake: Arc<Notify>,
}

/// What a request gets that is not executed by itself.
enum Permitted {
    /// A stored answer that this caller may read.
    Replay(Arc<Replay>, Permit),
    /// The answer of an attempt that was not kept.
    Share(Arc<Shared>),
}

impl Permitted {
    /// The bytes of its body.
    fn bytes(&self) -> usize {
        let answer = match self {
            Self::Replay(replay, _) => &replay.answer,
            Self::Share(shared) => match &shared.answer {
                SharedAnswer::Released(answer) => answer,
                SharedAnswer::Unreachable => return 0,
            },
        };
        match &answer.body {
            KeptBody::Whole(body) => body.len(),
            KeptBody::NotRetained => 0,
        }
    }
}

/// What came of asking before a later attempt.
enum Asked {
    /// It may be sent.
    Send(Reservation),
    /// It need not, or may not be.
    Over(Box<Finish>),
}

/// About which of a route's records the upstream is asked.
fn asking(route: &Route) -> Option<Asking> {
    match &route.policy.on_unknown {
        OnUnknown::Lookup(lookup) => {
            Some(Asking { operation: route.operation.clone(), settle: lookup.settle })
        }
        OnUnknown::Hold | OnUnknown::Retry => None,
    }
}

impl Gateway {
    /// Puts the gateway together. `None`: no upstream has the default's name.
    #[must_use]
    pub fn new(settings: Settings, parts: Parts) -> Option<Arc<Self>> {
        let Parts { routes, upstreams, store, lease, may_judge, spill, digest, .. } = parts;
        let Parts { tokens, servers, metrics, wake, .. } = parts;
        let default = Arc::clone(upstreams.get(&settings.default_upstream)?);
        let desk_settings = reserve::Settings {
            reserve_timeout: settings.reserve_timeout,
            doubt_window: settings.doubt_window,
            cache_bytes: settings.cache_bytes,
        };
        let (asked, counted) = (Arc::clone(&store), Arc::clone(&metrics));
        let desk = Desk::new(desk_settings, asked, lease, may_judge, spill, counted);
        let limits =
            Limits::new(settings.in_flight_max, settings.waiting_max, settings.buffered_bytes_max);
        let tokens = tokens.map(Arc::new);
        let intake = Intake::new(digest, tokens.clone(), Arc::clone(&metrics), limits);
        let rights = Rights::new(settings.forwarding.clone(), servers);
        let tasks = TaskTracker::new();
        let late = LateReads::new(settings.late_answers_max, Arc::clone(&metrics));
        Some(Arc::new(Self {
            settings,
            routes,
            upstreams,
            default,
            store,
            desk,
            intake,
            tokens,
            rights,
            late,
            alarm: Alarm::default(),
            metrics,
            wake,
            tasks,
        }))
    }

    /// Answers one request.
    async fn answer(self: Arc<Self>, request: Request<Incoming>) -> Response<Body> {
        if let Err(refused) = headers::check_framing(&request) {
            let problem = Problem::new(Name::RequestRefused).status(refused.status);
            let mut response = problem.detail(refused.detail).into_response(None);
            // Nobody knows where such a request ends: what follows it is not read as another one.
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            return response;
        }
        let mut request = accept::timed(request);
        headers::to_origin_form(&mut request);
        match self.routes.find(request.method(), request.uri().path()) {
            Found::Nothing => self.pass(&self.default, request).await,
            Found::Ambiguous => Problem::new(Name::PathAmbiguous).into_response(None),
            Found::Keyed { route, params } => self.keyed(route, &params, request).await,
        }
    }

    /// Answers a request on a keyed route.
    async fn keyed(
        self: Arc<Self>,
        route: Arc<Route>,
        params: &Params,
        request: Request<Body>,
    ) -> Response<Body> {
        let mut keyed = match self.intake.read(&route, params, request).await {
            Read::Keyed(keyed) => keyed,
            Read::Unkeyed(request) => {
                self.metrics.replied(route.operation.as_str(), Reply::Passed);
                let upstream = self.upstream(&route);
                return self.pass(&upstream, request).await;
            }
            Read::Refused(problem) => return self.refuse(&route, problem),
        };
        let deadline = Instant::now() + route.policy.wait;
        loop {
            match self.desk.seat(&keyed.ask) {
                Seat::Decided(admission) => {
                    return self.reply(&mut keyed, admission, Reply::Replayed).await;
                }
                // Dropping the lead lets the others look again.
                Seat::Lead(lead) => match keyed.room.work() {
                    Ok(()) => return self.detach(keyed, lead, deadline).await,
                    Err(NoRoom) => return self.overloaded(&route),
                },
                Seat::Follow(follow) => {
                    if keyed.room.wait() == Err(NoRoom) {
                        return self.overloaded(&route);
                    }
                    let followed = self.desk.follow(&keyed.ask, follow, deadline).await;
                    match followed {
                        Followed::Admitted(Admission::Refuse(refusal))
                            if self.bypasses(refusal) =>
                        {
                            return self.bypass(*keyed).await;
                        }
                        Followed::Admitted(admission) => {
                            return self.reply(&mut keyed, admission, Reply::Waited).await;
                        }
                        Followed::LookAgain => {}
                    }
                }
            }
        }
    }

    /// Does a leader's work in a task of its own, and waits for its answer as long as the caller does.
    async fn detach(
        self: Arc<Self>,
        keyed: Box<Keyed>,
        lead: Lead,
        deadline: Instant,
    ) -> Response<Body> {
        let (answer, answered) = oneshot::channel();
        let (gateway, route) = (Arc::clone(&self), Arc::clone(&keyed.route));
        self.tasks.spawn(async move {
            let response = gateway.work(*keyed, lead, deadline).await;
            // Nobody waits any more: the retry finds the result.
            drop(answer.send(response));
        });
        match answered.await {
            Ok(response) => response,
            // The task panicked; what it held is settled as far as is known.
            Err(_) => self.refuse(&route, Problem::new(Name::UpstreamFailed)),
        }
    }

    /// A leader's work: reserve, forward, complete.
    async fn work(
        self: Arc<Self>,
        mut keyed: Keyed,
        lead: Lead,
        deadline: Instant,
    ) -> Response<Body> {
        let route = Arc::clone(&keyed.route);
        let reservation = match self.desk.lead(&keyed.ask, lead, deadline).await {
            Admission::Execute(reservation) => reservation,
            Admission::Refuse(refusal) if self.bypasses(refusal) => {
                return self.bypass(keyed).await;
            }
            other @ (Admission::Replay(_) | Admission::Share(_) | Admission::Refuse(_)) => {
                return self.reply(&mut keyed, other, Reply::Replayed).await;
            }
        };
        let _in_flight = self.metrics.in_flight();
        let context = keyed.ask.context.take();
        let reservation = match self.ask_first(&route, context.as_deref(), reservation).await {
            Asked::Send(reservation) => reservation,
            Asked::Over(finish) => {
                return match *finish {
                    // Another caller's attempt may have brought it.
                    Finish::Found(found) => {
                        let found = Admission::Replay(found);
                        self.reply(&mut keyed, found, Reply::Replayed).await
                    }
                    other @ (Finish::Kept { .. }
                    | Finish::Spilled { .. }
                    | Finish::NotStored { .. }
                    | Finish::Recorded(_)
                    | Finish::Overtaken(_)
                    | Finish::StillUnknown { .. }
                    | Finish::Released { .. }
                    | Finish::Unknown { .. }
                    | Finish::Failed { .. }) => self.finished(&keyed, other),
                };
            }
        };
        let upstream = self.upstream(&route);
        let request =
            keyed.outgoing(&self.settings.forwarding, &upstream, Some(reservation.fence()));
        let policy = &route.policy;
        let bounds = Bounds { timeout: policy.timeout, body_max: policy.response_body_max };
        let begun = Instant::now();
        let (mut underway, evidence, given_up) =
            forward::forward(reservation, upstream, request, bounds).await;
        self.metrics.took(Step::Forward, begun.elapsed());
        // What was taken for the answer, cut down to it, stays taken until store and caller have it.
        let bytes = evidence.bytes();
        let held = keyed.room.answer(bytes).ok();
        underway.hold(held.clone());
        let closing = self.closing(&route, context.as_deref());
        let (finish, late) = closing.close(underway, evidence, given_up).await;
        if let Some(late) = late {
            self.await_late(late, &route, context);
        }
        fault::point(Point::BeforeReply).await;
        let response = self.finished(&keyed, finish);
        match held {
            Some(held) => response.map(|body| held.carry(body, bytes)),
            None => response,
        }
    }

    fn closing<'a>(&'a self, route: &'a Route, context: Option<&'a [u8]>) -> Closing<'a> {
        Closing {
            desk: &self.desk,
            store: &*self.store,
            metrics: &self.metrics,
            wake: &self.wake,
            route,
            context,
            timeout: self.settings.completion_timeout,
        }
    }

    /// Before a later attempt is sent on a route that looks up: what became of the one before? Asked right before, while this
    /// reservation holds the record, since "not found" is true only of that moment.
    async fn ask_first(
        &self,
        route: &Route,
        context: Option<&[u8]>,
        reservation: Reservation,
    ) -> Asked {
        let OnUnknown::Lookup(lookup) = &route.policy.on_unknown else {
            return Asked::Send(reservation);
        };
        if reservation.fence().attempt == Attempt::FIRST {
            return Asked::Send(reservation);
        }
        let verdict = self.ask(route, lookup, &reservation.about(context)).await;
        let closing = self.closing(route, context);
        Asked::Over(Box::new(match verdict {
            Verdict::NotFound => return Asked::Send(reservation),
            Verdict::Found(answer) => closing.adopt(reservation.begin(), answer).await,
            Verdict::Failed(_) => closing.hold_back(reservation.begin()).await,
        }))
    }

    async fn ask(&self, route: &Route, lookup: &Lookup, about: &About<'_>) -> Verdict {
        let upstream = self.upstreams.get(&lookup.upstream).unwrap_or(&self.default);
        lookup::ask(route, lookup, upstream, about, &self.metrics).await
    }

    /// Asks about records whose outcome is unknown, so that they resolve without a retry, until `stop`. Records whose route
    /// does not look up, or is no longer there, are left alone.
    pub async fn resolve_unknown(self: Arc<Self>, stop: CancellationToken) {
        let asking: Vec<_> = self.routes.iter().filter_map(|route| asking(route)).collect();
        if asking.is_empty() {
            return;
        }
        let slots = Arc::new(Semaphore::new(ASK_AT_ONCE));
        let mut full = false;
        loop {
            let pause = if full { ASK_EVERY / 20 } else { ASK_EVERY };
            let pause = tokio::time::sleep(pause.mul_f64(0.5 + fastrand::f64() / 2.0));
            if stop.run_until_cancelled(pause).await.is_none() {
                return;
            }
            let due = self.store.questions(&asking, ASK_BATCH).await.unwrap_or_else(|error| {
                tracing::debug!(%error, "it is not known what to ask about");
                Vec::new()
            });
            full = due.len() >= usize::try_from(ASK_BATCH).unwrap_or(usize::MAX);
            for due in due {
                let slot = Arc::clone(&slots).acquire_owned();
                let Some(Ok(slot)) = stop.run_until_cancelled(slot).await else { return };
                let gateway = Arc::clone(&self);
                self.tasks.spawn(async move {
                    gateway.question(due).await;
                    drop(slot);
                });
            }
        }
    }

    /// Asks about one record, and writes down what is known then.
    async fn question(&self, due: Due) {
        let Some(route) = self.routes.by_operation(due.scope.operation.as_str()) else { return };
        let OnUnknown::Lookup(lookup) = &route.policy.on_unknown else { return };
        let Some(question) = self.desk.question(&due, lookup.settle).await else { return };
        let underway = question.asked();
        let context = due.context.as_deref();
        let verdict = self.ask(&route, lookup, &underway.about(context)).await;
        let closing = self.closing(&route, context);
        match verdict {
            Verdict::Found(answer) => drop(closing.adopt(underway, answer).await),
            Verdict::NotFound | Verdict::Failed(_) => closing.put_back(underway).await,
        }
    }

    /// Goes on reading an answer whose caller was told that it did not come in time.
    fn await_late(self: &Arc<Self>, late: Late, route: &Arc<Route>, context: Option<Bytes>) {
        let Late { parted, exchange } = late;
        let (gateway, route) = (Arc::clone(self), Arc::clone(route));
        let time = route.policy.late_answer;
        self.late.start(exchange, time, move |evidence| async move {
            gateway.closing(&route, context.as_deref()).close_late(parted, evidence).await
        });
    }

    /// Whether this is a refusal in whose place the request is forwarded unprotected.
    fn bypasses(&self, refusal: Refusal) -> bool {
        self.settings.on_unavailable == OnUnavailable::Bypass
            && refusal == Refusal::StoreUnavailable(Unreserved::Certainly)
    }

    /// Forwards a request that nothing protects, once.
    async fn bypass(&self, mut keyed: Keyed) -> Response<Body> {
        let route = Arc::clone(&keyed.route);
        self.alarm.raise();
        self.metrics.replied(route.operation.as_str(), Reply::Bypassed);
        let upstream = self.upstream(&route);
        let request = keyed.outgoing(&self.settings.forwarding, &upstream, None);
        let mut answer = match bypass::forward(&upstream, request, route.policy.timeout).await {
            Ok(answer) => answer,
            Err(failure) => reply::bypass_failed(failure).into_response(Some(&route.operation)),
        };
        bypass::mark(&mut answer);
        answer
    }

    async fn pass(&self, upstream: &Upstream, request: Request<Body>) -> Response<Body> {
        let name = match pass::pass(upstream, &self.settings.forwarding, request).await {
            Ok(response) => return response,
            Err(PassError::Unreachable) => Name::UpstreamUnreachable,
            Err(PassError::Failed) => Name::UpstreamFailed,
            Err(PassError::TimedOut) => Name::UpstreamTimeout,
            Err(PassError::Caller) => Name::BodyIncomplete,
        };
        Problem::new(name).into_response(None)
    }

    fn upstream(&self, route: &Route) -> Arc<Upstream> {
        Arc::clone(self.upstreams.get(&route.upstream).unwrap_or(&self.default))
    }

    fn refuse(&self, route: &Route, problem: Problem) -> Response<Body> {
        self.metrics.replied(route.operation.as_str(), problem.counted());
        problem.into_response(Some(&route.operation))
    }

    fn overloaded(&self, route: &Route) -> Response<Body> {
        self.refuse(route, Problem::new(Name::Overloaded))
    }

    /// Answers a request that is not executed by itself. `replayed`: how a stored answer counts.
    async fn reply(
        &self,
        keyed: &mut Keyed,
        admission: Admission,
        replayed: Reply,
    ) -> Response<Body> {
        let route = &Arc::clone(&keyed.route);
        let admission = match admission {
            Admission::Replay(replay) => match self.rights.check(keyed, &replay).await {
                Ok(permit) => Permitted::Replay(replay, permit),
                Err(problem) => return self.refuse(route, problem),
            },
            Admission::Share(shared) => Permitted::Share(shared),
            Admission::Refuse(refusal) => {
                return self.refuse(route, reply::refusal(refusal, &route.policy));
            }
            // Only a leader executes, in `work`. Dropping the reservation releases it.
            Admission::Execute(_) => {
                return self.refuse(route, Problem::new(Name::StoreUnavailable));
            }
        };
        let bytes = admission.bytes();
        // A stored answer that finds no room is still stored: the caller comes again for it.
        let held = match bytes {
            0 => None,
            bytes => match keyed.room.answer(bytes) {
                Ok(held) => Some(held),
                Err(NoRoom) => return self.overloaded(route),
            },
        };
        let operation = &route.operation;
        let response = match admission {
            Permitted::Replay(replay, permit) => {
                self.metrics.replied(operation.as_str(), replayed);
                reply::replay(&replay, operation, permit)
            }
            Permitted::Share(shared) => {
                self.metrics.replied(operation.as_str(), Reply::Released);
                reply::shared(&shared, operation)
            }
        };
        match held {
            Some(held) => response.map(|body| held.carry(body, bytes)),
            None => response,
        }
    }

    /// The answer for the caller whose request was executed, or was to be.
    fn finished(&self, keyed: &Keyed, finish: Finish) -> Response<Body> {
        let route = &*keyed.route;
        let (reply, response) = match finish {
            Finish::Kept { first, expires_at } => {
                (Reply::Executed, reply::first(first, Kept::Until(expires_at)))
            }
            Finish::Spilled { first } => (Reply::Executed, reply::first(first, Kept::Spilled)),
            Finish::NotStored { first, counted } => (counted, reply::first(first, Kept::NotYet)),
            Finish::Recorded(replay) => {
                (Reply::Executed, reply::recorded(&replay, &route.operation))
            }
            Finish::Overtaken(replay) => match Rights::of_executor(keyed, &replay) {
                Ok(permit) => (Reply::Executed, reply::replay(&replay, &route.operation, permit)),
                Err(problem) => return self.refuse(route, problem),
            },
            Finish::Found(replay) => match Rights::of_executor(keyed, &replay) {
                Ok(permit) => (Reply::Replayed, reply::replay(&replay, &route.operation, permit)),
                Err(problem) => return self.refuse(route, problem),
            },
            Finish::StillUnknown { record } => {
                let refusal = Refusal::OutcomeUnknown { record, again: None };
                return self.refuse(route, reply::refusal(refusal, &route.policy));
            }
            Finish::Released { first } => (Reply::Released, reply::first(first, Kept::No)),
            Finish::Unknown { first } => (Reply::Unknown, reply::first(first, Kept::No)),
            Finish::Failed { fence, failure } => {
                let counted = match failure {
                    Failure::NothingSent | Failure::LeaseEnded => Reply::Released,
                    Failure::Broken | Failure::TimedOut => Reply::Unknown,
                };
                let problem = reply::failure(fence, failure);
                (counted, problem.into_response(Some(&route.operation)))
            }
        };
        self.metrics.replied(route.operation.as_str(), reply);
        response
    }

    /// Keeps the keys that tokens are checked with, until `stop`.
    pub async fn keep_keys(self: Arc<Self>, stop: CancellationToken) {
        if let Some(tokens) = &self.tokens {
            tokens.keep(&stop).await;
        }
    }

    /// Forgets in-memory answers of records that operators acted on, until `stop`.
    pub async fn watch_operators(self: Arc<Self>, stop: CancellationToken) {
        while stop.run_until_cancelled(tokio::time::sleep(AUDIT_EVERY)).await.is_some() {
            match self.store.acted_on(AUDIT_WINDOW).await {
                Ok(records) if !records.is_empty() => self.desk.forget(&records),
                Ok(_) => {}
                Err(error) => tracing::debug!(%error, "the audit table cannot be read"),
            }
        }
    }

    /// Waits until all reserved work has ended and the store has taken it. For what is left when the caller stops waiting
    /// there is [`Gateway::leave`].
    pub async fn drained(&self) {
        self.tasks.close();
        self.tasks.wait().await;
        // Their records are unknown already: nobody waits for them.
        self.late.cut().await;
        self.desk.settler().idle().await;
    }

    /// The process ends: outcomes that are known and that the store has not taken go to the spill. What has no outcome yet
    /// becomes `unknown` once this process's lease has run out.
    pub async fn leave(&self) {
        tokio::join!(self.late.cut(), self.desk.settler().leave());
    }
}

/// The gateway as a service of a listener.
#[derive(Clone)]
pub struct Serve(pub Arc<Gateway>);

impl hyper::service::Service<Request<Incoming>> for Serve {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let gateway = Arc::clone(&self.0);
        Box::pin(async move { Ok(gateway.answer(request).await) })
    }
}
