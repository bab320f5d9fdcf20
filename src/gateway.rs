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
pub mod complete;
pub mod forward;
pub mod headers;
pub mod pass;
mod prefixed;
pub mod reply;
pub mod reserve;
pub mod upstream;

use std::collections::HashMap;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use http::header::{CONNECTION, CONTENT_LENGTH, EXPECT, HOST};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, Uri};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::complete::{Closing, Finish};
use self::forward::Bounds;
use self::headers::{Forwarding, Hop};
use self::pass::PassError;
use self::prefixed::Prefixed;
use self::reply::{Kept, Name, Problem};
use self::reserve::{Admission, Ask, Desk, Followed, Lead, MayJudge, Seat};
use self::upstream::{Body, Upstream};
use crate::fingerprint::{self, fingerprint};
use crate::record::event::RequestParts;
use crate::record::outcome::Failure;
use crate::record::{Fence, Key, LeaseView, Scope};
use crate::route::{Found, Route, Routes};
use crate::scope::{self, Asked, DigestKey, Params};
use crate::store::Store;
use crate::telemetry::{Metrics, Reply, Step};

/// How often the audit table is read for what operators did.
const AUDIT_EVERY: Duration = Duration::from_millis(500);
/// How far back each look reaches: rows of slow transactions become visible late.
const AUDIT_WINDOW: Duration = Duration::from_secs(15);

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
    /// Keyed requests in flight, waiting ones included.
    pub in_flight_max: usize,
    /// Sum of the buffered bodies of keyed requests, in bytes.
    pub buffered_bytes_max: usize,
    /// Under which name unnamed routes find their upstream.
    pub default_upstream: String,
}

/// The gateway behind a listener.
pub struct Gateway {
    settings: Settings,
    routes: Routes,
    upstreams: HashMap<String, Arc<Upstream>>,
    default: Arc<Upstream>,
    store: Arc<dyn Store>,
    desk: Desk,
    digest: DigestKey,
    metrics: Arc<Metrics>,
    wake: Arc<Notify>,
    tasks: TaskTracker,
    in_flight: Arc<Semaphore>,
    buffered: Arc<Semaphore>,
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
    /// For digests of credentials.
    pub digest: DigestKey,
    /// Where everything is counted.
    pub metrics: Arc<Metrics>,
    /// Wakes the relay.
    pub wake: Arc<Notify>,
}

/// A keyed request, read as far as its scope needs.
struct Keyed {
    route: Arc<Route>,
    head: http::request::Parts,
    hop: Hop,
    body: Bytes,
    ask: Ask,
    /// Held until the request is answered.
    _room: Room,
}

/// A keyed request's share of the limits.
struct Room {
    _in_flight: OwnedSemaphorePermit,
    _buffered: OwnedSemaphorePermit,
}

/// What becomes of a request on a keyed route.
enum Read {
    Keyed(Box<Keyed>),
    /// It carries no key, and need not: passes through.
    Unkeyed(Request<Body>),
    Refused(Problem),
}

impl Gateway {
    /// Puts the gateway together. `None`: no upstream has the default's name.
    #[must_use]
    pub fn new(settings: Settings, parts: Parts) -> Option<Arc<Self>> {
        let Parts { routes, upstreams, store, lease, may_judge, digest, metrics, wake } = parts;
        let default = Arc::clone(upstreams.get(&settings.default_upstream)?);
        let desk_settings = reserve::Settings {
            reserve_timeout: settings.reserve_timeout,
            doubt_window: settings.doubt_window,
            cache_bytes: settings.cache_bytes,
        };
        let desk =
            Desk::new(desk_settings, Arc::clone(&store), lease, may_judge, Arc::clone(&metrics));
        let in_flight =
            Arc::new(Semaphore::new(settings.in_flight_max.min(Semaphore::MAX_PERMITS)));
        let buffered = Arc::new(Semaphore::new(kibibytes(settings.buffered_bytes_max)));
        let tasks = TaskTracker::new();
        Some(Arc::new(Self {
            settings,
            routes,
            upstreams,
            default,
            store,
            desk,
            digest,
            metrics,
            wake,
            tasks,
            in_flight,
            buffered,
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
        let keyed = match self.read(&route, params, request).await {
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
                Seat::Decided(admission) => return self.reply(&route, admission, Reply::Replayed),
                Seat::Lead(lead) => return self.detach(keyed, lead, deadline).await,
                Seat::Follow(follow) => {
                    let followed = self.desk.follow(&keyed.ask, follow, deadline).await;
                    if let Followed::Admitted(admission) = followed {
                        return self.reply(&route, admission, Reply::Waited);
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
    async fn work(&self, mut keyed: Keyed, lead: Lead, deadline: Instant) -> Response<Body> {
        let route = Arc::clone(&keyed.route);
        let reservation = match self.desk.lead(&keyed.ask, lead, deadline).await {
            Admission::Execute(reservation) => reservation,
            other @ (Admission::Replay(_) | Admission::Share(_) | Admission::Refuse(_)) => {
                return self.reply(&route, other, Reply::Replayed);
            }
        };
        let _in_flight = self.metrics.in_flight();
        let upstream = self.upstream(&route);
        let request = self.outgoing(&mut keyed, &upstream, reservation.fence());
        let policy = &route.policy;
        let bounds = Bounds { timeout: policy.timeout, body_max: policy.response_body_max };
        let begun = Instant::now();
        let (underway, evidence, given_up) =
            forward::forward(reservation, upstream, request, bounds).await;
        self.metrics.took(Step::Forward, begun.elapsed());
        let closing = Closing {
            desk: &self.desk,
            store: &*self.store,
            metrics: &self.metrics,
            wake: &self.wake,
            route: &route,
            context: keyed.ask.context.as_deref(),
            timeout: self.settings.completion_timeout,
        };
        let finish = closing.close(underway, evidence, given_up).await;
        self.finished(&route, finish)
    }

    /// Reads key, body, tenant and fingerprint. Nothing is reserved before the whole body has arrived.
    async fn read(&self, route: &Arc<Route>, params: &Params, request: Request<Body>) -> Read {
        let hop = hop(&request);
        let target = target(request.uri());
        let (mut head, body) = request.into_parts();
        let recipe = &route.scope;
        let untouched = (!head.headers.contains_key(&recipe.key_header)).then(|| head.clone());
        headers::strip_hop_by_hop(&mut head.headers);
        headers::drop_own(&mut head.headers);
        headers::drop_twins(&mut head.headers, &scope_headers(recipe));
        let key = match scope::read_key(recipe, &head.headers) {
            Ok(key) => key,
            Err(refusal) => return refused(refusal, route),
        };
        if key.is_none() && recipe.derive_key.is_none() {
            if recipe.key_required {
                return refused(scope::Refusal::KeyMissing, route);
            }
            return Read::Unkeyed(Request::from_parts(untouched.unwrap_or(head), body));
        }
        let required = recipe.key_required || key.is_some();
        let body_max = route.policy.request_body_max;
        if required && declared_length(&head.headers).is_some_and(|length| length > body_max as u64)
        {
            return Read::Refused(too_large(body_max));
        }
        let Some(room) = self.room(&head.headers, body_max) else {
            return Read::Refused(Problem::new(Name::Overloaded));
        };
        let body = match collect(body, body_max).await {
            Collected::Whole(body) => body,
            Collected::TooLarge { .. } if required => {
                return Read::Refused(too_large(body_max));
            }
            Collected::TooLarge { begun, rest } => {
                let body = Prefixed::new(begun, rest).boxed_unsync();
                return Read::Unkeyed(Request::from_parts(untouched.unwrap_or(head), body));
            }
            Collected::Cut => return Read::Refused(Problem::new(Name::BodyIncomplete)),
        };
        let host = head.headers.get(HOST).and_then(|host| host.to_str().ok()).map(str::to_owned);
        let asked = Asked {
            method: &head.method,
            target: &target,
            headers: &head.headers,
            params,
            host: host.as_deref(),
        };
        let key = match key.or_else(|| scope::derive_key(recipe, &asked, &body)) {
            Some(key) => key,
            None if recipe.key_required => return refused(scope::Refusal::KeyMissing, route),
            None => {
                return Read::Unkeyed(Request::from_parts(untouched.unwrap_or(head), whole(body)));
            }
        };
        let ask = match self.ask(route, &asked, key, &body) {
            Ok(ask) => ask,
            Err(refusal) => return refused(refusal, route),
        };
        let route = Arc::clone(route);
        Read::Keyed(Box::new(Keyed { route, head, hop, body, ask, _room: room }))
    }

    /// Scope, fingerprint and what is kept of the request.
    fn ask(
        &self,
        route: &Route,
        asked: &Asked<'_>,
        key: Key,
        body: &Bytes,
    ) -> Result<Ask, scope::Refusal> {
        let tenant = scope::read_tenant(&route.scope, asked, &self.digest)?;
        let begun = Instant::now();
        let fingerprint = fingerprint(
            &route.fingerprint,
            &fingerprint::Parts {
                method: asked.method,
                target: asked.target,
                headers: asked.headers,
                body,
            },
        );
        self.metrics.took(Step::Fingerprint, begun.elapsed());
        let params: Vec<_> = asked.params.iter().collect();
        let context = route.events.context(&RequestParts {
            method: asked.method,
            target: asked.target,
            headers: asked.headers,
            params: &params,
            body,
        });
        Ok(Ask {
            scope: Scope { tenant, operation: route.operation.clone(), key },
            fingerprint,
            caller: scope::caller(asked.headers, &self.digest),
            context,
            on_unknown: route.policy.on_unknown,
        })
    }

    /// A share of the limits for a keyed request; `None`: a limit is reached.
    fn room(&self, headers: &HeaderMap, body_max: usize) -> Option<Room> {
        let length = declared_length(headers).and_then(|length| usize::try_from(length).ok());
        let bytes = length.unwrap_or(body_max).min(body_max);
        let permits = u32::try_from(kibibytes(bytes)).unwrap_or(u32::MAX);
        let in_flight = Arc::clone(&self.in_flight).try_acquire_owned().ok()?;
        let buffered = Arc::clone(&self.buffered).try_acquire_many_owned(permits).ok()?;
        Some(Room { _in_flight: in_flight, _buffered: buffered })
    }

    /// The request as the upstream gets it: one computed Content-Length, no hop's own headers, our ids.
    fn outgoing(
        &self,
        keyed: &mut Keyed,
        upstream: &Upstream,
        fence: Fence,
    ) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(keyed.body.clone()));
        *request.method_mut() = keyed.head.method.clone();
        // The head is used up: a request is sent once.
        *request.uri_mut() = std::mem::take(&mut keyed.head.uri);
        *request.headers_mut() = std::mem::take(&mut keyed.head.headers);
        *request.extensions_mut() = std::mem::take(&mut keyed.head.extensions);
        let headers = request.headers_mut();
        headers.remove(EXPECT);
        headers.remove(CONTENT_LENGTH);
        if !keyed.body.is_empty() || !bodyless(&keyed.head.method) {
            headers.insert(CONTENT_LENGTH, HeaderValue::from(keyed.body.len()));
        }
        if !keyed.route.scope.forward_key {
            headers.remove(&keyed.route.scope.key_header);
        }
        if self.settings.forwarding.host == headers::HostPolicy::Upstream {
            headers.insert(HOST, upstream.authority().clone());
        }
        headers::forward(&self.settings.forwarding, &keyed.hop, headers);
        if let Ok(id) = HeaderValue::from_str(&fence.id.to_string()) {
            headers.insert(reply::RECORD, id);
            headers.insert(reply::ATTEMPT, HeaderValue::from(fence.attempt.number()));
        }
        request
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

    /// Answers a request that is not executed by itself. `replayed`: how a stored answer counts.
    fn reply(&self, route: &Route, admission: Admission, replayed: Reply) -> Response<Body> {
        let operation = &route.operation;
        match admission {
            Admission::Replay(replay) => {
                self.metrics.replied(operation.as_str(), replayed);
                reply::replay(&replay, operation)
            }
            Admission::Share(shared) => {
                self.metrics.replied(operation.as_str(), Reply::Released);
                reply::shared(&shared, operation)
            }
            Admission::Refuse(refusal) => {
                self.refuse(route, reply::refusal(refusal, route.policy.mismatch_status))
            }
            // Only a leader executes, in `work`. Dropping the reservation releases it.
            Admission::Execute(_) => self.refuse(route, Problem::new(Name::StoreUnavailable)),
        }
    }

    /// The answer for the caller whose request was executed, or was to be.
    fn finished(&self, route: &Route, finish: Finish) -> Response<Body> {
        let (reply, response) = match finish {
            Finish::Kept { first, expires_at } => {
                (Reply::Executed, reply::first(first, Kept::Until(expires_at)))
            }
            Finish::NotStored { first } => (Reply::Executed, reply::first(first, Kept::NotYet)),
            Finish::Overtaken(replay) => {
                (Reply::Executed, reply::replay(&replay, &route.operation))
            }
            Finish::Released { first } => (Reply::Released, reply::first(first, Kept::No)),
            Finish::Unknown { first } => (Reply::Unknown, reply::first(first, Kept::No)),
            Finish::Failed { record, failure } => {
                let counted = match failure {
                    Failure::NothingSent | Failure::LeaseEnded => Reply::Released,
                    Failure::Broken | Failure::TimedOut => Reply::Unknown,
                };
                let problem = reply::failure(record, failure);
                (counted, problem.into_response(Some(&route.operation)))
            }
        };
        self.metrics.replied(route.operation.as_str(), reply);
        response
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

    /// Waits until all reserved work has ended and is durable. What is left when the caller stops waiting becomes
    /// `unknown` once this process's lease has run out.
    pub async fn drained(&self) {
        self.tasks.close();
        self.tasks.wait().await;
        self.desk.settler().idle().await;
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

/// A body as far as it was collected.
enum Collected {
    Whole(Bytes),
    TooLarge { begun: Vec<Bytes>, rest: Body },
    Cut,
}

async fn collect(mut body: Body, max: usize) -> Collected {
    let mut pieces: Vec<Bytes> = Vec::new();
    let mut total = 0_usize;
    while let Some(frame) = body.frame().await {
        match frame.map(http_body::Frame::into_data) {
            Ok(Ok(data)) => {
                total = total.saturating_add(data.len());
                pieces.push(data);
            }
            // Trailers of a request are not forwarded with a buffered body.
            Ok(Err(_)) => {}
            Err(_) => return Collected::Cut,
        }
        if total > max {
            return Collected::TooLarge { begun: pieces, rest: body };
        }
    }
    if pieces.len() == 1 {
        return Collected::Whole(pieces.pop().unwrap_or_default());
    }
    let mut whole = BytesMut::with_capacity(total);
    for piece in pieces {
        whole.extend_from_slice(&piece);
    }
    Collected::Whole(whole.freeze())
}

fn too_large(max: usize) -> Problem {
    Problem::new(Name::BodyTooLarge).detail(format!(
        "This route takes bodies of at most {max} bytes. Nothing was reserved or forwarded; the key is free."
    ))
}

fn refused(refusal: scope::Refusal, route: &Route) -> Read {
    Read::Refused(Problem::of_scope(refusal, &route.scope.key_header))
}

/// The headers that say where a request belongs: nothing else may look like them to the upstream.
fn scope_headers(recipe: &scope::Recipe) -> Vec<&HeaderName> {
    let mut names = vec![&recipe.key_header];
    if let scope::Source::Header(tenant) = &recipe.tenant {
        names.push(tenant);
    }
    names
}

fn hop<B>(request: &Request<B>) -> Hop {
    let peer = request.extensions().get::<accept::Peer>();
    Hop {
        peer: peer.and_then(|peer| peer.addr).map(|addr| addr.ip()),
        host: request.headers().get(HOST).cloned(),
        https: peer.is_some_and(|peer| peer.https),
    }
}

fn target(uri: &Uri) -> String {
    uri.path_and_query().map_or_else(|| uri.path().to_owned(), ToString::to_string)
}

fn declared_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.trim().parse().ok()
}

/// Methods whose requests say nothing by having no body (RFC 9110, 8.6).
fn bodyless(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD | Method::DELETE | Method::OPTIONS)
}

fn kibibytes(bytes: usize) -> usize {
    bytes.div_ceil(1024).clamp(1, Semaphore::MAX_PERMITS)
}

fn whole(body: Bytes) -> Body {
    Full::new(body).map_err(|never| match never {}).boxed_unsync()
}
