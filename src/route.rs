//! Which requests are keyed.
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderName, Method, StatusCode};

use crate::fingerprint;
use crate::record::Operation;
use crate::record::event::Templates;
use crate::record::outcome::Lists;
use crate::scope::{self, Params};

/// Everything that is decided by which route a request takes.
#[derive(Debug)]
pub struct Route {
    /// The operation: part of the scope.
    pub operation: Operation,
    /// How key and tenant are found.
    pub scope: scope::Recipe,
    /// What makes two requests the same.
    pub fingerprint: fingerprint::Recipe,
    /// What the upstream's statuses mean.
    pub outcome: Lists,
    /// What a stored outcome announces.
    pub events: Templates,
    /// Limits and times.
    pub policy: Policy,
    /// Which upstream, by its name in the configuration.
    pub upstream: String,
}

/// Limits, times and choices of a route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// How long a duplicate waits for the first request.
    pub wait: Duration,
    /// How long the upstream may take before the outcome is unknown.
    pub timeout: Duration,
    /// How long an outcome is kept, from its completion.
    pub retention: Duration,
    /// Longest request body, in bytes.
    pub request_body_max: usize,
    /// Longest response body that is kept, in bytes.
    pub response_body_max: usize,
    /// What a duplicate of an unknown outcome gets.
    pub on_unknown: OnUnknown,
    /// The status of `request-mismatch`.
    pub mismatch_status: StatusCode,
    /// Headers of an answer that are not kept.
    pub replay_drop: Vec<HeaderName>,
}

/// What a duplicate of an unknown outcome gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnUnknown {
    /// 409 until someone resolves it.
    Hold,
    /// It is a new attempt.
    Retry,
}

/// Which requests take a route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    /// Its methods.
    pub methods: Vec<Method>,
    /// Its path template: `/accounts/{account}/orders`, or with a catch-all at its end, `/{*rest}`.
    pub path: String,
}

/// All routes.
#[derive(Debug, Default)]
pub struct Routes {
    routes: Vec<Arc<Route>>,
}

/// What a request's method and path name.
#[derive(Debug)]
pub enum Found {
    /// No keyed route: the request passes through.
    Nothing,
    /// A keyed route.
    Keyed {
        /// The route.
        route: Arc<Route>,
        /// The path's parameters.
        params: Params,
    },
    /// The two readings of the path name different routes.
    Ambiguous,
}

impl Routes {
    /// Builds the table.
    ///
    /// # Errors
    /// One sentence for each route that cannot stand.
    pub fn build(
        entries: Vec<(Pattern, Route)>,
        _ignore_path_case: bool,
    ) -> Result<Self, Vec<String>> {
        Ok(Self { routes: entries.into_iter().map(|(_, route)| Arc::new(route)).collect() })
    }

    /// The route of a request.
    #[must_use]
    pub fn find(&self, _method: &Method, _path: &str) -> Found {
        Found::Nothing
    }

    /// The first route of this operation.
    #[must_use]
    pub fn by_operation(&self, operation: &str) -> Option<Arc<Route>> {
        self.routes.iter().find(|route| route.operation.as_str() == operation).cloned()
    }

    /// All routes, as configured.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Route>> {
        self.routes.iter()
    }
}
