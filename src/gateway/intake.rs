//! What a keyed request is read to: key, body, tenant, fingerprint, and later the request that goes out.
//!
//! Order matters. What can be refused without the body is refused before it is read, so that a caller that waits for
//! `100 Continue` goes out at once. Headers meant for one hop are gone before the scope is read: a key or tenant that the
//! upstream would not see does not count. A token is checked before anything is read by what it says, and only of a request
//! that has a key. Nothing is reserved here.
//!
//! Small bodies are looked into where the request is read. What may take longer (fingerprint, derived key, what events
//! need) is made on a thread of its own, and only as many at once as there are processors: so no other request waits for
//! it, and what decoding needs of memory does not grow with the count of requests. Such work goes on when its caller has
//! hung up, and holds its permit until it has ended.

use std::borrow::Cow;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::Instant;

use bytes::{Bytes, BytesMut};
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, EXPECT, HOST};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri};
use http_body_util::{BodyExt, Full};
use tokio::sync::Semaphore;

use super::accept;
use super::budget::{Budget, Exhausted, Permit};
use super::headers::{self, Forwarding, Hop, Offer, own};
use super::negotiate::Accepts;
use super::prefixed::Prefixed;
use super::problem::{Name, Problem};
use super::reserve::{KeyedRequest, Readers};
use super::tokens::Tokens;
use super::upstream::{Body, Upstream, whole};
use crate::fingerprint;
use crate::record::event::{Context, RequestParts};
use crate::record::{Fence, Fingerprint, Key, Scope};
use crate::route::{ReplayAuth, Route};
use crate::scope::jwt::Claims;
use crate::scope::{self, DigestKey, Params, RequestHead};
use crate::telemetry::{Metrics, Step};

/// The largest body whose fingerprint is made in place: half a millisecond, or less.
const IN_PLACE_MAX: usize = 256 << 10;
/// The same where the recipe looks into the body, which takes longer.
const IN_PLACE_PATHS_MAX: usize = 16 << 10;

/// Reads keyed requests, within the budget that all of them share.
pub(super) struct Intake {
    digest: DigestKey,
    /// Only where a route reads its tenant from a token.
    tokens: Option<Arc<Tokens>>,
    metrics: Arc<Metrics>,
    budget: Budget,
    /// Bounds the blocking threads that look into bodies.
    blocking: Arc<Semaphore>,
}

/// A keyed request, read as far as its scope needs.
pub(super) struct Keyed {
    pub(super) route: Arc<Route>,
    head: http::request::Parts,
    hop: Hop,
    body: Bytes,
    pub(super) request: KeyedRequest,
    /// What templates name of the request, all of it.
    pub(super) context: Option<Bytes>,
    /// Of the answer.
    pub(super) accepts: Accepts,
    /// Held until the request is answered.
    pub(super) permit: Permit,
}

/// What a request on a keyed route is read to.
pub(super) enum ReadRequest {
    Keyed(Box<Keyed>),
    /// It carries no key, and need not: passes through.
    Unkeyed(Request<Body>),
    Refused(Problem),
}

impl Intake {
    pub(super) fn new(
        digest: DigestKey,
        tokens: Option<Arc<Tokens>>,
        metrics: Arc<Metrics>,
        budget: Budget,
    ) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Self { digest, tokens, metrics, budget, blocking: Arc::new(Semaphore::new(processors)) }
    }

    /// Reads key, body, tenant and fingerprint. Nothing is reserved before the whole body has arrived.
    pub(super) async fn read(
        &self,
        route: &Arc<Route>,
        params: &Params,
        request: Request<Body>,
    ) -> ReadRequest {
        self.try_read(route, params, request).await.unwrap_or_else(ReadRequest::Refused)
    }

    async fn try_read(
        &self,
        route: &Arc<Route>,
        params: &Params,
        request: Request<Body>,
    ) -> Result<ReadRequest, Problem> {
        let refused = |refusal| Problem::of_scope(refusal, &route.scope);
        let (hop, target) = (hop(&request), target(request.uri()));
        let (accepts, switches) = (Accepts::of(&request), Offer::of(&request).is_some());
        let (mut head, body) = request.into_parts();
        let recipe = &route.scope;
        let untouched = (!head.headers.contains_key(&recipe.key_header)).then(|| head.clone());
        clean(&mut head.headers, recipe);
        let key = scope::read_key(recipe, &head.headers).map_err(refused)?;
        if key.is_none() && recipe.derive_key.is_none() {
            if recipe.key_required {
                return Err(refused(scope::Refusal::KeyMissing));
            }
            return Ok(unkeyed(untouched.unwrap_or(head), body));
        }
        if switches {
            return Err(Problem::new(Name::UpgradeRefused));
        }
        let known = match &key {
            Some(_) => Some(self.identify(route, &head.headers).await?),
            None => None,
        };
        let required = recipe.key_required || key.is_some();
        let body_max = route.policy.request_body_max;
        if required && declared_length(&head.headers).is_some_and(|length| length > body_max as u64)
        {
            return Err(too_large(body_max));
        }
        let permit = self.admit(route, &head.headers);
        let mut permit = permit.map_err(|Exhausted| Problem::new(Name::Overloaded))?;
        let body = match collect(body, body_max).await {
            Collected::Whole(body) => body,
            Collected::TooLarge { .. } if required => return Err(too_large(body_max)),
            Collected::TooLarge { begun, rest } => {
                let body = Prefixed::new(begun, rest).boxed_unsync();
                return Ok(unkeyed(untouched.unwrap_or(head), body));
            }
            Collected::Cut => return Err(Problem::new(Name::BodyIncomplete)),
        };
        permit.received(body.len());
        let host = head.headers.get(HOST).and_then(|host| host.to_str().ok()).map(str::to_owned);
        let mut request_head = RequestHead {
            method: &head.method,
            target: &target,
            headers: &head.headers,
            params,
            host: host.as_deref(),
            token: None,
        };
        let key = match key {
            Some(key) => Some(key),
            None => self.derive_key(route, &request_head, &body).await,
        };
        let key = match key {
            Some(key) => key,
            None if recipe.key_required => return Err(refused(scope::Refusal::KeyMissing)),
            None => return Ok(unkeyed(untouched.unwrap_or(head), whole(body))),
        };
        let known = match known {
            Some(known) => known,
            None => self.identify(route, &head.headers).await?,
        };
        request_head.token = known.token.as_ref();
        let (request, context) =
            self.request(route, &request_head, key, &body).await.map_err(refused)?;
        let route = Arc::clone(route);
        let keyed = Keyed { route, head, hop, body, request, context, accepts, permit };
        Ok(ReadRequest::Keyed(Box::new(keyed)))
    }

    /// A key as logs name it.
    pub(super) fn key_digest(&self, key: &Key) -> String {
        self.digest.digest(key.as_str().as_bytes())
    }

    /// A permit for a copy of a body, of at most this many bytes.
    pub(super) fn admit_copy(&self, headers: &HeaderMap, max: usize) -> Result<Permit, Exhausted> {
        let length = declared_length(headers).and_then(|length| usize::try_from(length).ok());
        self.budget.admit(length.map_or(max, |length| length.min(max)), 0)
    }

    /// Checks who asks, as far as the route wants it known.
    async fn identify(&self, route: &Route, headers: &HeaderMap) -> Result<Identity, Problem> {
        if readers(route) != Readers::Scope && scope::has_several_credentials(headers) {
            let detail = "The request has more than one Authorization header, so that it is not certain who asks.";
            return Err(Problem::new(Name::RequestRefused).detail(detail));
        }
        let scope::Source::JwtClaim(_) = &route.scope.tenant else {
            return Ok(Identity { token: None });
        };
        let checked = match &self.tokens {
            Some(tokens) => tokens.check(headers).await,
            // A configuration without keys for such a route is refused when it is loaded.
            None => Err(scope::Refusal::TokenUnverified),
        };
        let token = checked.map_err(|refusal| Problem::of_scope(refusal, &route.scope))?;
        Ok(Identity { token: Some(token) })
    }

    /// The key that the route makes of a request without one.
    async fn derive_key(
        &self,
        route: &Arc<Route>,
        request_head: &RequestHead<'_>,
        body: &Bytes,
    ) -> Option<Key> {
        if route.scope.derive_key.as_ref()?.reads_body() {
            let derived = |route: &Route, request_head: &RequestHead<'_>, body: &Bytes| {
                scope::derive_key(&route.scope, request_head, &plain(route, request_head, body))
            };
            return self.inspect(route, request_head, body, derived).await;
        }
        scope::derive_key(&route.scope, request_head, body)
    }

    /// Scope, fingerprint and what is kept of the request.
    async fn request(
        &self,
        route: &Arc<Route>,
        request_head: &RequestHead<'_>,
        key: Key,
        body: &Bytes,
    ) -> Result<(KeyedRequest, Option<Bytes>), scope::Refusal> {
        let tenant = scope::read_tenant(&route.scope, request_head, &self.digest)?;
        let begun = Instant::now();
        let (fingerprint, context) = self.inspect(route, request_head, body, compared).await;
        self.metrics.took(Step::Fingerprint, begun.elapsed());
        let (whole, kept) = context.map(|context| (context.whole, context.kept)).unzip();
        let request = KeyedRequest {
            scope: Scope { tenant, operation: route.operation.clone(), key },
            fingerprint,
            caller: scope::caller(request_head.headers, request_head.token, &self.digest),
            readers: readers(route),
            context: kept,
            on_unknown: route.policy.on_unknown.clone(),
            retention: route.policy.retention,
            emits_events: route.events.reach_sinks(),
        };
        Ok((request, whole))
    }

    /// Looks into a body: in place where that is short, else on a blocking thread.
    async fn inspect<T: Send + 'static>(
        &self,
        route: &Arc<Route>,
        request_head: &RequestHead<'_>,
        body: &Bytes,
        read: fn(&Route, &RequestHead<'_>, &Bytes) -> T,
    ) -> T {
        let looks = route.fingerprint.looks_into_bodies();
        let in_place_max = if looks { IN_PLACE_PATHS_MAX } else { IN_PLACE_MAX };
        if body.len() <= in_place_max && !request_head.headers.contains_key(CONTENT_ENCODING) {
            return read(route, request_head, body);
        }
        let (route, body, params) = (Arc::clone(route), body.clone(), request_head.params.clone());
        let (method, target, headers) = (
            request_head.method.clone(),
            request_head.target.to_owned(),
            request_head.headers.clone(),
        );
        self.on_blocking_thread(move || {
            let (method, target, headers, params) = (&method, target.as_str(), &headers, &params);
            // Neither host nor token says anything of a body.
            let request_head =
                RequestHead { method, target, headers, params, host: None, token: None };
            read(&route, &request_head, &body)
        })
        .await
    }

    /// Does on a blocking thread what may take long, under a permit. The work holds the permit, not whoever waits for it: a
    /// caller that hangs up does not let more of it begin.
    pub(super) async fn on_blocking_thread<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> T {
        // It is never closed.
        let permit = Arc::clone(&self.blocking).acquire_owned().await;
        let work = move || {
            let _permit = permit;
            work()
        };
        match tokio::task::spawn_blocking(work)
            .await
            .map_err(tokio::task::JoinError::try_into_panic)
        {
            Ok(made) => made,
            Err(Ok(panic)) => resume_unwind(panic),
            // The runtime is going down, and this request with it.
            Err(Err(_)) => std::future::pending().await,
        }
    }

    /// A permit: before the body is read, so that who gets none is refused at once.
    fn admit(&self, route: &Route, headers: &HeaderMap) -> Result<Permit, Exhausted> {
        let policy = &route.policy;
        let length = declared_length(headers).and_then(|length| usize::try_from(length).ok());
        let body = length.map_or(policy.request_body_max, |n| n.min(policy.request_body_max));
        self.budget.admit(body, policy.response_body_max)
    }
}

/// A request that passes through as it came.
fn unkeyed(head: http::request::Parts, body: Body) -> ReadRequest {
    ReadRequest::Unkeyed(Request::from_parts(head, body))
}

/// Leaves only headers that the API sees as they are read here.
fn clean(headers: &mut HeaderMap, recipe: &scope::Recipe) {
    headers::strip_hop_by_hop(headers);
    headers::drop_own(headers);
    headers::drop_twins(headers, &scope_headers(recipe));
}

/// A body without its content codings, where they can be taken off; else as it came.
fn plain<'b>(route: &Route, request_head: &RequestHead<'_>, body: &'b Bytes) -> Cow<'b, [u8]> {
    fingerprint::plain(&route.fingerprint, request_head.headers, body)
}

/// What the request is compared by, and what is kept of it for its events.
fn compared(
    route: &Route,
    request_head: &RequestHead<'_>,
    body: &Bytes,
) -> (Fingerprint, Option<Context>) {
    let RequestHead { method, target, headers, .. } = *request_head;
    let parts = fingerprint::Parts { method, target, headers, body };
    let print = fingerprint::fingerprint(&route.fingerprint, &parts);
    if !route.events.need_request() {
        return (print, None);
    }
    let params: Vec<_> = request_head.params.iter().collect();
    let body = plain(route, request_head, body);
    let parts = RequestParts { method, target, headers, params: &params, body: &body };
    (print, route.events.context(&parts, route.policy.context_max))
}

/// Who asks, as far as it was checked.
struct Identity {
    token: Option<Claims>,
}

fn readers(route: &Route) -> Readers {
    match route.policy.replay_auth {
        ReplayAuth::Scope => Readers::Scope,
        ReplayAuth::SameCredential => Readers::Caller,
        ReplayAuth::Subrequest(_) => Readers::Subrequest,
    }
}

impl Keyed {
    /// The request as its fingerprint was made of it.
    pub(super) fn as_compared<T>(&self, read: impl FnOnce(&fingerprint::Parts<'_>) -> T) -> T {
        let (target, headers) = (target(&self.head.uri), &self.head.headers);
        let (method, body) = (&self.head.method, &self.body);
        read(&fingerprint::Parts { method, target: &target, headers, body })
    }

    /// The caller's headers and hop, for a subrequest about it; the method and target that it asked for.
    pub(super) fn caller_head(&self) -> (&Method, &Uri, &HeaderMap, &Hop) {
        (&self.head.method, &self.head.uri, &self.head.headers, &self.hop)
    }

    /// The request as the upstream gets it: one computed Content-Length, no hop's own headers, our ids where it is reserved.
    pub(super) fn outgoing(
        &mut self,
        forwarding: &Forwarding,
        upstream: &Upstream,
        fence: Option<Fence>,
    ) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(self.body.clone()));
        *request.method_mut() = self.head.method.clone();
        // The head is used up: a request is sent once.
        *request.uri_mut() = std::mem::take(&mut self.head.uri);
        *request.headers_mut() = std::mem::take(&mut self.head.headers);
        *request.extensions_mut() = std::mem::take(&mut self.head.extensions);
        let headers = request.headers_mut();
        headers.remove(EXPECT);
        headers.remove(CONTENT_LENGTH);
        if !self.body.is_empty() || !bodyless(&self.head.method) {
            headers.insert(CONTENT_LENGTH, HeaderValue::from(self.body.len()));
        }
        if !self.route.scope.forward_key {
            headers.remove(&self.route.scope.key_header);
        }
        if forwarding.host == headers::HostPolicy::Upstream {
            headers.insert(HOST, upstream.authority().clone());
        }
        headers::forward(forwarding, &self.hop, headers);
        if let Some(fence) = fence
            && let Ok(id) = HeaderValue::try_from(fence.id.to_string())
        {
            headers.insert(own::RECORD, id);
            headers.insert(own::ATTEMPT, HeaderValue::from(fence.attempt.number()));
        }
        request
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

pub(super) fn declared_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.trim().parse().ok()
}

/// Methods whose requests say nothing by having no body (RFC 9110, 8.6).
fn bodyless(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD | Method::DELETE | Method::OPTIONS)
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::mpsc;

    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn work_that_nobody_waits_for_any_more_holds_its_permit_until_it_has_ended() {
        let budget = Budget::new(1, 1, 1 << 20);
        let digest = DigestKey::from_bytes(b"secret");
        let intake = Intake::new(digest, None, Arc::new(Metrics::default()), budget);
        let permits = intake.blocking.available_permits();
        let (begun, begins) = mpsc::channel();
        let (go, goes) = mpsc::channel::<()>();
        let mut working = Box::pin(intake.on_blocking_thread(move || {
            begun.send(()).unwrap();
            // An error: the test is over.
            goes.recv().ok();
        }));
        assert!(working.as_mut().now_or_never().is_none());
        begins.recv().unwrap();
        drop(working);
        assert_eq!(intake.blocking.available_permits(), permits - 1);
        let permits = u32::try_from(permits).unwrap();
        let mut all = pin!(intake.blocking.acquire_many(permits));
        assert!(all.as_mut().now_or_never().is_none(), "as many at once, and no more");
        drop(go);
        drop(all.await.unwrap());
    }
}
