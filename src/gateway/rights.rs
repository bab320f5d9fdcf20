//! Who may read a stored answer: nobody gets one without a [`Grant`], and grants are made here only.
//!
//! By the route's policy everybody within the scope may, or whoever made the record, or whoever another server lets. That
//! server is asked for each replay, with the caller's own headers, the way nginx's `auth_request` asks: 2xx lets the caller
//! read, 401 and 403 do not, and everything else, silence included, is no answer at all.
//!
//! What must stay true: what cannot be asked is not given. Nothing is asked for a first execution: the upstream judges that
//! itself. The question carries no body and changes nothing.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use http::header::{self, WWW_AUTHENTICATE};
use http::{HeaderMap, HeaderName, HeaderValue, Request, StatusCode, Uri};
use http_body_util::{BodyExt as _, Empty};

use super::headers::{self, Forwarding, HostPolicy};
use super::intake::Keyed;
use super::problem::{Name, Problem};
use super::reserve::Replay;
use super::upstream::{Body, Upstream};
use crate::route::{ReplayAuth, Server, Subrequest};

/// What the caller asked for, as nginx and its followers name it.
const ORIGINAL_METHOD: HeaderName = HeaderName::from_static("x-original-method");
const ORIGINAL_URI: HeaderName = HeaderName::from_static("x-original-uri");

/// What says the same in other words, to one server or another. Who asks must not say what it asks for.
const SAME_SAID: [HeaderName; 7] = [
    HeaderName::from_static("x-forwarded-method"),
    HeaderName::from_static("x-forwarded-uri"),
    HeaderName::from_static("x-http-method"),
    HeaderName::from_static("x-http-method-override"),
    HeaderName::from_static("x-method-override"),
    HeaderName::from_static("x-original-url"),
    HeaderName::from_static("x-rewrite-url"),
];

/// What says something of a body or of a stored copy, beside all that begins with `content-`: the question has neither, and
/// must get a plain answer.
const NOT_ASKED: [HeaderName; 10] = [
    HeaderName::from_static("digest"),
    HeaderName::from_static("repr-digest"),
    header::EXPECT,
    header::TRAILER,
    header::RANGE,
    header::IF_MATCH,
    header::IF_NONE_MATCH,
    header::IF_MODIFIED_SINCE,
    header::IF_UNMODIFIED_SINCE,
    header::IF_RANGE,
];

/// How much of the answer's body is read, so that the connection can be used again.
const BODY_MAX: usize = 64 * 1024;

/// The right to read one stored answer.
pub(super) struct Grant(());

/// Decides on each replay.
pub(super) struct Rights {
    forwarding: Forwarding,
    /// With connections of their own: a question never waits behind what passes through.
    servers: HashMap<Server, Arc<Upstream>>,
}

impl Rights {
    pub(super) fn new(forwarding: Forwarding, servers: HashMap<Server, Arc<Upstream>>) -> Self {
        Self { forwarding, servers }
    }

    /// Whether this caller may read that answer.
    pub(super) async fn check(&self, keyed: &Keyed, replay: &Replay) -> Result<Grant, Problem> {
        let grant = match &keyed.route.policy.replay_auth {
            ReplayAuth::Scope => Ok(Grant(())),
            ReplayAuth::SameCredential => same_caller(keyed, replay, Name::ReplayForbidden),
            ReplayAuth::Subrequest(subrequest) => self.subrequest(keyed, subrequest).await,
        };
        grant.map_err(|problem| problem.record(replay.fence.id))
    }

    /// As [`Rights::check`], of one whose own attempt was overtaken by another one's. Its request is used up, so nobody is
    /// asked any more: another caller's answer has to be asked for again.
    pub(super) fn of_executor(keyed: &Keyed, replay: &Replay) -> Result<Grant, Problem> {
        let grant = match &keyed.route.policy.replay_auth {
            ReplayAuth::Scope => Ok(Grant(())),
            ReplayAuth::SameCredential => same_caller(keyed, replay, Name::ReplayForbidden),
            ReplayAuth::Subrequest(_) => same_caller(keyed, replay, Name::ReplayUnchecked),
        };
        grant.map_err(|problem| problem.record(replay.fence.id))
    }

    async fn subrequest(&self, keyed: &Keyed, subrequest: &Subrequest) -> Result<Grant, Problem> {
        let unchecked = || Problem::new(Name::ReplayUnchecked);
        let operation = &keyed.route.operation;
        // The configuration names servers that are there.
        let server = self.servers.get(&subrequest.server).ok_or_else(unchecked)?;
        let exchange = exchange(server, self.build_subrequest(keyed, subrequest, server));
        let answer = tokio::time::timeout(subrequest.timeout, exchange).await;
        let (status, headers) = match answer {
            Ok(Some(answer)) => answer,
            Ok(None) => {
                tracing::warn!(%operation, "it cannot be asked who may read a stored answer");
                return Err(unchecked());
            }
            Err(_) => {
                tracing::warn!(%operation, "no answer in time to who may read a stored answer");
                return Err(unchecked());
            }
        };
        match status {
            status if status.is_success() => Ok(Grant(())),
            StatusCode::UNAUTHORIZED => {
                let challenges = headers.get_all(WWW_AUTHENTICATE).iter().cloned();
                Err(Problem::new(Name::ReplayUnauthorized).challenges(challenges))
            }
            StatusCode::FORBIDDEN => Err(Problem::new(Name::ReplayForbidden).detail(
                "The request was executed before, and this caller may not read its answer.",
            )),
            status => {
                let status = status.as_u16();
                tracing::warn!(%operation, status, "who may read a stored answer was answered neither by yes nor by no");
                Err(unchecked())
            }
        }
    }

    fn build_subrequest(
        &self,
        keyed: &Keyed,
        subrequest: &Subrequest,
        server: &Upstream,
    ) -> Request<Body> {
        let (method, target, sent, hop) = keyed.caller_head();
        let body = Empty::<Bytes>::new().map_err(|never| match never {}).boxed_unsync();
        let mut request = Request::new(body);
        *request.uri_mut() = Uri::from(subrequest.target.clone());
        let headers = request.headers_mut();
        headers.clone_from(sent);
        let names = headers.keys().filter(|name| name.as_str().starts_with("content-")).cloned();
        for name in names.collect::<Vec<_>>() {
            headers.remove(name);
        }
        let said = [&SAME_SAID[..], &[ORIGINAL_METHOD, ORIGINAL_URI]].concat();
        headers::drop_twins(headers, &said.iter().collect::<Vec<_>>());
        for name in NOT_ASKED.into_iter().chain(SAME_SAID) {
            headers.remove(name);
        }
        let as_value = |text: &str| HeaderValue::from_str(text).ok();
        for (name, value) in [
            (ORIGINAL_METHOD, as_value(method.as_str())),
            (ORIGINAL_URI, as_value(&target.to_string())),
        ] {
            headers.remove(&name);
            if let Some(value) = value {
                headers.insert(name, value);
            }
        }
        if !keyed.route.scope.forward_key {
            headers.remove(&keyed.route.scope.key_header);
        }
        headers::forward(&self.forwarding, hop, headers);
        // Another server is asked under its own name.
        let own = matches!(subrequest.server, Server::Url { .. });
        if own || self.forwarding.host == HostPolicy::Upstream {
            headers.insert(header::HOST, server.authority().clone());
        }
        request
    }
}

fn same_caller(keyed: &Keyed, replay: &Replay, otherwise: Name) -> Result<Grant, Problem> {
    if keyed.request.caller == replay.caller { Ok(Grant(())) } else { Err(Problem::new(otherwise)) }
}

/// Asks once; `None`: no answer came.
async fn exchange(server: &Upstream, question: Request<Body>) -> Option<(StatusCode, HeaderMap)> {
    let answer = server.pooled(question).await.ok()?;
    let (head, mut body) = answer.into_parts();
    let mut read = 0;
    // Read to its end where that is near; else the connection goes with it.
    while let Some(Ok(frame)) = body.frame().await {
        read += frame.data_ref().map_or(0, Bytes::len);
        if read > BODY_MAX {
            break;
        }
    }
    Some((head.status, head.headers))
}
