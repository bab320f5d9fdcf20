//! What is made of a request, by the code that makes it: nothing of it is said a second time here.
//!
//! A sample goes the way of a request as far as its fingerprint ([`super::headers`], the table of routes,
//! [`super::intake`]) and no further. It takes its share of the limits while it is read, as a request does.

use std::sync::Arc;

use async_trait::async_trait;
use http::Request;
use http_body_util::{BodyExt, Full};

use super::budget::Budget;
use super::intake::{Intake, ReadRequest};
use super::problem::{Name, Problem};
use super::tokens::Tokens;
use super::{Gateway, Settings, headers};
use crate::explain::{self, Canonical, Disposition, Explain, Explained, Sample};
use crate::route::{Mode, Route, RouteMatch, Routes};
use crate::scope::{DigestKey, Params};
use crate::telemetry::Metrics;

/// Explains without a gateway that serves.
pub struct Explainer {
    routes: Routes,
    intake: Intake,
}

impl Explainer {
    /// By these routes and limits. `digest`: for tenants that are digests; `tokens`: for those in tokens.
    #[must_use]
    pub fn new(
        settings: &Settings,
        routes: Routes,
        digest: DigestKey,
        tokens: Option<Arc<Tokens>>,
    ) -> Self {
        let budget = Budget::new(1, 1, settings.buffered_bytes_max);
        Self { routes, intake: Intake::new(digest, tokens, Arc::new(Metrics::default()), budget) }
    }
}

#[async_trait]
impl Explain for Explainer {
    async fn explain(&self, sample: Sample) -> Explained {
        explain(&self.routes, &self.intake, sample).await
    }
}

impl Gateway {
    /// The keyed routes, for who explains them and for completions by hand.
    #[must_use]
    pub fn routes(&self) -> &Routes {
        &self.routes
    }
}

#[async_trait]
impl Explain for Gateway {
    async fn explain(&self, sample: Sample) -> Explained {
        explain(&self.routes, &self.intake, sample).await
    }
}

async fn explain(routes: &Routes, intake: &Intake, sample: Sample) -> Explained {
    let Sample { method, target, headers, body } = sample;
    let body = Full::new(body).map_err(|never| match never {}).boxed_unsync();
    let mut request = Request::new(body);
    *request.method_mut() = method;
    *request.uri_mut() = target;
    *request.headers_mut() = headers;
    let framing = headers::check_framing(&request);
    headers::to_origin_form(&mut request);
    let look = routes.look(request.method(), request.uri().path());
    if let Err(refused) = framing {
        let why = format!("It is refused before anything else is looked at: {}.", refused.detail);
        let problem = Problem::new(Name::RequestRefused).status(refused.status);
        let problem = problem.detail(refused.detail).document(None);
        return Explained::of(Disposition::Refused, why, look).problem(problem);
    }
    match routes.find(request.method(), request.uri().path()) {
        RouteMatch::Nothing => {
            let why = "No route names its method and path.";
            Explained::of(Disposition::PassesWithoutRoute, why, look)
        }
        RouteMatch::Ambiguous { split, decoded } => {
            let why = format!(
                "Its path names {} where it is split before it is decoded, and {} the other way round.",
                split.operation, decoded.operation
            );
            let problem = Problem::new(Name::PathAmbiguous).document(None);
            Explained::of(Disposition::Refused, why, look).problem(problem)
        }
        RouteMatch::Keyed { route, params } => {
            let observes = match route.policy.mode {
                Mode::Protect => "",
                Mode::Observe => " The route only observes: the request is forwarded in any case.",
            };
            let (becomes, why, read) = read(intake, &route, &params, request).await;
            let mut explained = Explained::of(becomes, format!("{why}{observes}"), look);
            match read {
                Some(Ok(read)) => explained = explained.read(read),
                Some(Err(problem)) => explained = explained.problem(problem),
                None => {}
            }
            explained
        }
    }
}

/// What came of reading a request: what it was read to, or the problem that it is answered with.
type Outcome = Option<Result<explain::Read, serde_json::Value>>;

async fn read(
    intake: &Intake,
    route: &Arc<Route>,
    params: &Params,
    request: Request<super::upstream::Body>,
) -> (Disposition, String, Outcome) {
    let operation = &route.operation;
    let protects = match route.policy.mode {
        Mode::Protect => Disposition::Protected,
        Mode::Observe => Disposition::Observed,
    };
    match intake.read(route, params, request).await {
        ReadRequest::Keyed(keyed) => {
            // The form of a large body takes long, as its fingerprint does.
            let form = move || {
                let recipe = &keyed.route.fingerprint;
                let canonical = keyed.as_compared(|parts| Canonical::of(recipe, parts));
                let (scope, fingerprint) = (keyed.request.scope, keyed.request.fingerprint);
                explain::Read { scope, fingerprint, canonical }
            };
            let read = intake.on_blocking_thread(form).await;
            let why = format!("The route {operation} takes it, and it has a key.");
            (protects, why, Some(Ok(read)))
        }
        ReadRequest::Unkeyed(_) => {
            let why = format!(
                "The route {operation} takes it, but it has no key and the route requires none: it passes through unprotected."
            );
            (Disposition::PassesWithoutKey, why, None)
        }
        ReadRequest::Refused(problem) => {
            let becomes = match route.policy.mode {
                Mode::Protect => Disposition::Refused,
                Mode::Observe => Disposition::Observed,
            };
            let why = format!("The route {operation} refuses it: {}", problem.advice());
            (becomes, why, Some(Err(problem.document(Some(operation)))))
        }
    }
}
