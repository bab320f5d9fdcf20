//! The gateway: what it is made of, which way a request takes, and what runs beside the requests.
//!
//! ```text
//! accept -> route -> scope -> fingerprint -> reserve -> forward -> classify -> complete -> reply
//! ```
//!
//! [`Gateway::answer`] finds the route. A request without a route passes through ([`pass`]), one on a route in observe mode
//! passes and is watched ([`observe`]), and one on a protected route takes the steps of [`keyed`].

pub mod accept;
mod budget;
mod bypass;
pub mod complete;
mod deliver;
mod evidence;
mod executed;
pub mod explain;
mod first;
pub mod forward;
pub mod headers;
mod intake;
mod keyed;
mod late;
mod lookup;
mod negotiate;
mod notes;
mod observe;
mod operators;
pub mod pass;
mod prefixed;
mod problem;
mod recover;
pub mod reply;
pub mod reserve;
mod rights;
mod settle;
mod spelling;
pub mod spill;
pub mod tokens;
pub mod tunnel;
pub mod upstream;
mod vary;

use std::collections::HashMap;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::header::CONNECTION;
use http::{HeaderValue, Request, Response};
use hyper::body::Incoming;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::budget::Budget;
use self::bypass::Alarm;
use self::complete::Completer;
use self::headers::Forwarding;
use self::intake::{Intake, Keyed};
use self::late::LateReads;
use self::pass::PassError;
use self::problem::{Name, Problem};
use self::reserve::{MayMarkDead, Refusal, SingleFlight, Unreserved};
use self::rights::Rights;
use self::spill::Spill;
use self::tokens::Tokens;
use self::tunnel::Tunnels;
use self::upstream::{Body, Upstream};
use crate::record::LeaseView;
use crate::route::{Mode, Route, RouteMatch, Routes, Server};
use crate::scope::{DigestKey, Params};
use crate::store::{Backlog, Store};
use crate::tasks::{self, Loop};
use crate::telemetry::{Metrics, Reply, Would};

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
    /// Connections that are tunnels at a time.
    pub tunnels_max: usize,
    /// What a keyed request gets while the store is away.
    pub on_unavailable: OnUnavailable,
    /// Sum of the bodies of keyed requests and of their answers in memory, in bytes; see [`Settings::fits`].
    pub buffered_bytes_max: usize,
    /// Whether pages of other origins may read the gateway's own headers where they may read the answer.
    pub expose_headers: bool,
    /// Under which name unnamed routes find their upstream.
    pub default_upstream: String,
}

impl Settings {
    /// Whether one request with bodies of these lengths can be admitted at all.
    #[must_use]
    pub fn fits(&self, request_body_max: usize, response_body_max: usize) -> bool {
        budget::fits(self.buffered_bytes_max, request_body_max, response_body_max)
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
    single_flight: SingleFlight,
    intake: Intake,
    tokens: Option<Arc<Tokens>>,
    rights: Rights,
    late: LateReads,
    tunnels: Tunnels,
    alarm: Alarm,
    observed: observe::Memory,
    acts_watermark: operators::Watermark,
    compared: recover::LastCompared,
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
    /// Whether other owners may be taken for dead by their leases.
    pub may_mark_dead: MayMarkDead,
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
    /// How many events are undelivered.
    pub backlog: Backlog,
}

impl Gateway {
    /// Puts the gateway together. `None`: no upstream has the default's name.
    #[must_use]
    pub fn new(settings: Settings, parts: Parts) -> Option<Arc<Self>> {
        let Parts { routes, upstreams, store, lease, may_mark_dead, spill, digest, .. } = parts;
        let Parts { tokens, servers, metrics, wake, backlog, .. } = parts;
        let default = Arc::clone(upstreams.get(&settings.default_upstream)?);
        routes.iter().for_each(|route| metrics.serves(route.operation.as_str()));
        let flight_settings = reserve::Settings {
            reserve_timeout: settings.reserve_timeout,
            doubt_window: settings.doubt_window,
            cache_bytes: settings.cache_bytes,
        };
        let (asked, counted) = (Arc::clone(&store), Arc::clone(&metrics));
        let single_flight = SingleFlight::new(
            flight_settings,
            asked,
            lease,
            may_mark_dead,
            spill,
            backlog,
            counted,
        );
        let budget =
            Budget::new(settings.in_flight_max, settings.waiting_max, settings.buffered_bytes_max);
        let tokens = tokens.map(Arc::new);
        let intake = Intake::new(digest, tokens.clone(), Arc::clone(&metrics), budget);
        let rights = Rights::new(settings.forwarding.clone(), servers);
        let tasks = TaskTracker::new();
        let late = LateReads::new(settings.late_answers_max, Arc::clone(&metrics));
        let tunnels = Tunnels::new(settings.tunnels_max, Arc::clone(&metrics));
        Some(Arc::new(Self {
            settings,
            routes,
            upstreams,
            default,
            store,
            single_flight,
            intake,
            tokens,
            rights,
            late,
            tunnels,
            alarm: Alarm::default(),
            observed: observe::Memory::default(),
            acts_watermark: operators::Watermark::default(),
            compared: recover::LastCompared::default(),
            metrics,
            wake,
            tasks,
        }))
    }

    /// Answers one request.
    async fn answer(self: Arc<Self>, request: Request<Incoming>) -> Response<Body> {
        let begun = Instant::now();
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
            RouteMatch::Nothing => self.pass(&self.default, request).await,
            RouteMatch::Ambiguous { split, decoded } => {
                if [&split, &decoded].iter().any(|route| route.policy.mode == Mode::Protect) {
                    return Problem::new(Name::PathAmbiguous).into_response(None);
                }
                let problem = Problem::new(Name::PathAmbiguous);
                observe::report(&self.metrics, &split, Would::Refuse, None, Some(&problem));
                self.pass(&self.upstream(&split), request).await
            }
            RouteMatch::Keyed { route, params } => {
                let metrics = Arc::clone(&self.metrics);
                let response = self.routed(Arc::clone(&route), params, request).await;
                if let Some(reply) = response.extensions().get::<Reply>() {
                    metrics.request_took(route.operation.as_str(), *reply, begun.elapsed());
                }
                response
            }
        }
    }

    /// Answers a request that a route names. Its answer carries the [`Reply`] that was counted.
    async fn routed(
        self: Arc<Self>,
        route: Arc<Route>,
        params: Params,
        request: Request<Body>,
    ) -> Response<Body> {
        match route.policy.mode {
            Mode::Protect => {
                let exposed = self.settings.expose_headers;
                let mut response = self.keyed(route, &params, request).await;
                if exposed {
                    reply::expose_own(response.headers_mut());
                }
                response
            }
            Mode::Observe => {
                reply::counted_as(Reply::Passed, self.observe(route, params, request).await)
            }
        }
    }

    /// Forwards a request at once, and reports what would have become of it.
    async fn observe(
        self: Arc<Self>,
        route: Arc<Route>,
        params: Params,
        request: Request<Body>,
    ) -> Response<Body> {
        self.metrics.replied(route.operation.as_str(), Reply::Passed);
        let upstream = self.upstream(&route);
        let max = route.policy.request_body_max;
        let Ok(permit) = self.intake.admit_copy(request.headers(), max) else {
            observe::report(&self.metrics, &route, Would::Overloaded, None, None);
            return self.pass(&upstream, request).await;
        };
        let (request, copied, whole) = observe::copy(request, max, permit);
        let (gateway, observed) = (Arc::clone(&self), Arc::clone(&route));
        let ended = observe::Ended::default();
        let ends = ended.clone();
        let judging = self.tasks.spawn(async move {
            let Self { observed: memory, intake, metrics, .. } = &*gateway;
            let to = (&observed, &params);
            observe::judge(memory, intake, metrics, to, copied, &ends).await;
        });
        let forwarding = &self.settings.forwarding;
        let passed = pass::pass(&upstream, forwarding, &self.tunnels, request).await;
        observe::over(&ended, observe::End::of(&route, &passed), judging, &whole).await;
        passed.unwrap_or_else(not_passed)
    }

    fn completer<'a>(&'a self, route: &'a Route, context: Option<&'a [u8]>) -> Completer<'a> {
        Completer {
            single_flight: &self.single_flight,
            metrics: &self.metrics,
            wake: &self.wake,
            route,
            context,
            timeout: self.settings.completion_timeout,
        }
    }

    /// Whether this is a refusal in whose place the request is forwarded unprotected. What was seen running, or unknown, may
    /// have executed.
    fn bypasses(&self, keyed: &Keyed, refusal: Refusal) -> bool {
        self.settings.on_unavailable == OnUnavailable::Bypass
            && refusal == Refusal::StoreUnavailable(Unreserved::Certainly)
            && !self.single_flight.saw_unfinished(&keyed.request.scope)
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
        reply::counted_as(Reply::Bypassed, answer)
    }

    async fn pass(&self, upstream: &Upstream, request: Request<Body>) -> Response<Body> {
        let forwarding = &self.settings.forwarding;
        let passed = pass::pass(upstream, forwarding, &self.tunnels, request).await;
        passed.unwrap_or_else(not_passed)
    }

    fn upstream(&self, route: &Route) -> Arc<Upstream> {
        Arc::clone(self.upstreams.get(&route.upstream).unwrap_or(&self.default))
    }

    fn refuse(&self, route: &Route, problem: Problem) -> Response<Body> {
        let counted = problem.counted();
        self.metrics.replied(route.operation.as_str(), counted);
        reply::counted_as(counted, problem.into_response(Some(&route.operation)))
    }

    fn overloaded(&self, route: &Route) -> Response<Body> {
        self.refuse(route, Problem::new(Name::Overloaded))
    }

    /// Fetches the keys that tokens are checked with, until `stop`. It needs no store.
    pub fn keep_keys(&self, tracker: &TaskTracker, stop: &CancellationToken) {
        let Some(tokens) = self.tokens.clone().filter(|tokens| tokens.are_fetched()) else {
            return;
        };
        let begun = (tokens, stop.clone());
        tracker.spawn(tasks::kept(Loop::TokenKeys, "", stop.clone(), move || {
            let (tokens, stop) = begun.clone();
            async move { tokens.keep(&stop).await }
        }));
    }

    /// What the gateway does with the store beside the requests, until `stop`; what begins attempts, until `accept`.
    pub fn begin_loops(
        self: &Arc<Self>,
        tracker: &TaskTracker,
        stop: &CancellationToken,
        accept: &CancellationToken,
    ) {
        let begun = (Arc::clone(self), stop.clone());
        tracker.spawn(tasks::kept(Loop::OperatorActs, "", stop.clone(), move || {
            let (gateway, stop) = begun.clone();
            async move { gateway.watch_operators(&stop).await }
        }));
        let begun = (Arc::clone(self), stop.clone());
        tracker.spawn(tasks::kept(Loop::OwnRecords, "", stop.clone(), move || {
            let (gateway, stop) = begun.clone();
            async move { recover::watch(&gateway, &stop).await }
        }));
        let asking: Arc<[_]> =
            self.routes.iter().filter_map(|route| lookup::asking(route)).collect();
        if !asking.is_empty() {
            let (gateway, stopped) = (Arc::clone(self), accept.clone());
            tracker.spawn(tasks::kept(Loop::Questions, "", accept.clone(), move || {
                Arc::clone(&gateway).resolve_unknown(Arc::clone(&asking), stopped.clone())
            }));
        }
    }

    /// Forgets in-memory answers of records that operators acted on, until `stop`.
    async fn watch_operators(&self, stop: &CancellationToken) {
        let acted_on = |window| self.store.acted_on(window);
        operators::watch(
            &self.acts_watermark,
            acted_on,
            |records| self.single_flight.forget(records),
            stop,
        )
        .await;
    }

    /// Waits until all reserved work has ended, and is in the store or left to the next process. For what is left when the
    /// caller stops waiting there is [`Gateway::leave`].
    pub async fn drained(&self) {
        self.tasks.close();
        self.tasks.wait().await;
        // Their records are unknown already: nobody waits for them.
        self.late.cut().await;
        self.single_flight.retrier().settled_or_left().await;
    }

    /// How many attempts run whose outcome is not known yet, once [`Gateway::leave`] has returned.
    #[must_use]
    pub fn running(&self) -> usize {
        self.single_flight.running().len()
    }

    /// The process ends: outcomes that are known and that the store has not taken go to the spill. What has no outcome yet
    /// becomes `unknown` once this process's lease has run out.
    pub async fn leave(&self) {
        tokio::join!(self.late.cut(), self.single_flight.retrier().leave());
        // What the last late answers left behind.
        self.single_flight.retrier().idle().await;
    }
}

/// What the caller of a request gets that passed through and has no answer.
fn not_passed(error: PassError) -> Response<Body> {
    let name = match error {
        PassError::Crowded => {
            let detail = "There are as many tunnels as the gateway takes. Nothing was forwarded.";
            return Problem::new(Name::Overloaded).detail(detail).into_response(None);
        }
        PassError::Unreachable => Name::UpstreamUnreachable,
        PassError::Failed => Name::UpstreamFailed,
        PassError::TimedOut => Name::UpstreamTimeout,
        PassError::Caller => Name::BodyIncomplete,
    };
    Problem::new(name).into_response(None)
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
