//! Finds the route of a request by method and path.
//!
//! Upstreams read paths in two ways. Some split the path and then decode each segment. Others decode the path, then split it,
//! and resolve `.`, `..` and doubled slashes. A request has a route if its path matches in either reading; otherwise an
//! unusual spelling could bypass the protection of a write. If the two readings match different routes, the gateway cannot
//! know which one the upstream will use, and the request is ambiguous. Each reading decodes escapes once.
//!
//! Both readings are written in one spelling, in which slashes and percent signs within a segment are escaped, and looked
//! up in one table for each method. A trailing slash and `;params` do not matter. A catch-all also matches an empty rest.
//! The path is forwarded and fingerprinted as received.

mod near;

use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http::uri::PathAndQuery;
use http::{HeaderName, Method, StatusCode};
use percent_encoding::percent_decode;

use crate::fingerprint;
use crate::record::event::Templates;
use crate::record::outcome::Lists;
use crate::record::{LookupDelay, Operation, lookup};
use crate::scope::{self, Params};

pub use self::near::{Look, Named, Near, Reading};

/// The settings of a route.
#[derive(Debug)]
pub struct Route {
    /// The operation: part of the scope.
    pub operation: Operation,
    /// The sources of key and tenant.
    pub scope: scope::Recipe,
    /// What makes two requests the same.
    pub fingerprint: fingerprint::Recipe,
    /// The meaning of the upstream's statuses.
    pub outcome: Lists,
    /// The events of a stored outcome.
    pub events: Templates,
    /// Limits and times.
    pub policy: Policy,
    /// The name of its upstream in the configuration.
    pub upstream: String,
}

/// Limits, times and choices of a route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// How long a duplicate waits for the first request.
    pub wait: Duration,
    /// How long the upstream may take before the outcome is unknown.
    pub timeout: Duration,
    /// How much longer the gateway waits for the answer after that; zero: not at all.
    pub late_answer: Duration,
    /// How long an outcome is kept, from its completion.
    pub retention: Duration,
    /// Longest request body, in bytes.
    pub request_body_max: usize,
    /// Longest context that is kept of a request for its events and look-ups, in bytes.
    pub context_max: usize,
    /// Longest response body that is kept, in bytes.
    pub response_body_max: usize,
    /// What a duplicate of an unknown outcome gets.
    pub on_unknown: OnUnknown,
    /// The status of `request-mismatch`.
    pub mismatch_status: StatusCode,
    /// Headers of an answer that are not kept.
    pub replay_drop: Vec<HeaderName>,
    /// Whether requests are protected at all.
    pub mode: Mode,
    /// Who may read a stored answer within the scope.
    pub replay_auth: ReplayAuth,
}

/// Who may read a stored answer within the scope.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplayAuth {
    /// Every caller within it: the tenant is the boundary.
    Scope,
    /// A caller with the credential of the first caller, or with its subject if the tenant comes from a checked token.
    SameCredential,
    /// A caller that another server allows. It is asked for each replay.
    Subrequest(Arc<Subrequest>),
}

/// The request that asks another server whether a caller may read a stored answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subrequest {
    /// The server.
    pub server: Server,
    /// Path and query.
    pub target: PathAndQuery,
    /// How long the answer may take.
    pub timeout: Duration,
}

/// The server of `replay_auth`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Server {
    /// One of the configured upstreams, by its name.
    Upstream(String),
    /// Another one.
    Url {
        /// `http://host[:port]` or `https://host[:port]`.
        base: String,
        /// For https: the only certificates to trust. `None`: the system's.
        ca_file: Option<PathBuf>,
    },
}

/// Whether a route's requests are protected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// They are.
    #[default]
    Protect,
    /// They are forwarded, and the gateway logs and counts what it would have done.
    Observe,
}

/// What a duplicate of an unknown outcome gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OnUnknown {
    /// 409 until someone resolves it.
    Hold,
    /// It is executed as a new attempt.
    Retry,
    /// The gateway asks the upstream: in the background, and again right before a new attempt.
    Lookup(Arc<Lookup>),
}

/// The look-up of a route.
#[derive(Debug, PartialEq, Eq)]
pub struct Lookup {
    /// The request that asks, and what its answer means.
    pub template: lookup::Template,
    /// How long the gateway waits before it asks.
    pub delay: LookupDelay,
    /// How long the answer may take.
    pub timeout: Duration,
    /// The name of its upstream in the configuration.
    pub upstream: String,
}

/// The requests of a route.
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
    /// The routes in their order.
    patterns: Vec<Pattern>,
    tables: HashMap<Method, matchit::Router<usize>>,
    ignore_case: bool,
}

/// The result of a search by method and path.
#[derive(Debug)]
pub enum RouteMatch {
    /// No route: the request passes through.
    Nothing,
    /// A route.
    Keyed {
        /// The route.
        route: Arc<Route>,
        /// The path's parameters.
        params: Params,
    },
    /// The two readings of the path name different routes.
    Ambiguous {
        /// Split, then decoded.
        split: Arc<Route>,
        /// Decoded, then split and resolved.
        decoded: Arc<Route>,
    },
}

impl Routes {
    /// Builds the table. Several routes may share an operation: they then share its scope.
    ///
    /// # Errors
    /// One sentence for each method and path that is not possible.
    pub fn build(
        entries: Vec<(Pattern, Route)>,
        ignore_path_case: bool,
    ) -> Result<Self, Vec<String>> {
        let mut built = Self { ignore_case: ignore_path_case, ..Self::default() };
        let mut errors = Vec::new();
        let mut roots = Vec::new();
        for (index, (pattern, route)) in entries.into_iter().enumerate() {
            let named = |error: String| format!("route {}: {error}", route.operation);
            match built.add(index, &pattern, &mut roots) {
                Ok(()) => {}
                Err(wrong) => errors.extend(wrong.into_iter().map(named)),
            }
            built.routes.push(Arc::new(route));
            built.patterns.push(pattern);
        }
        for (method, root, index) in roots {
            // A conflict here means that another route has exactly this path.
            let _named_already = built.tables.entry(method).or_default().insert(root, index);
        }
        if errors.is_empty() { Ok(built) } else { Err(errors) }
    }

    fn add(
        &mut self,
        index: usize,
        pattern: &Pattern,
        roots: &mut Vec<(Method, String, usize)>,
    ) -> Result<(), Vec<String>> {
        let Pattern { methods, path } = pattern;
        if methods.is_empty() {
            return Err(vec![format!("{path}: no method is named")]);
        }
        let template = template(path, self.ignore_case)
            .map_err(|error| vec![format!("{} {path}: {error}", listed(methods))])?;
        let mut errors = Vec::new();
        for method in methods {
            let table = self.tables.entry(method.clone()).or_default();
            if let Err(error) = table.insert(template.as_str(), index) {
                errors.push(format!("{method} {path}: {}", wrong(&error)));
            }
            roots.extend(above_catch_all(&template).map(|root| (method.clone(), root, index)));
        }
        if errors.is_empty() { Ok(()) } else { Err(errors) }
    }

    /// The route of a request, by its method and its path as received.
    #[must_use]
    pub fn find(&self, method: &Method, path: &str) -> RouteMatch {
        let Some(table) = self.table(method) else {
            return RouteMatch::Nothing;
        };
        let path = path.split('?').next().unwrap_or_default();
        let split = self.look_up(table, &split_then_decoded(path));
        let decoded = self.look_up(table, &decoded_then_split(path));
        let route = |index: usize| self.routes.get(index).cloned();
        let found = match (split, decoded) {
            (Some((one, _)), Some((other, _))) if one != other => route(one)
                .zip(route(other))
                .map(|(split, decoded)| RouteMatch::Ambiguous { split, decoded }),
            (Some((index, params)), _) | (None, Some((index, params))) => {
                route(index).map(|route| RouteMatch::Keyed { route, params })
            }
            (None, None) => None,
        };
        found.unwrap_or(RouteMatch::Nothing)
    }

    /// The table of a method, also if it is in lower case, because some upstreams ignore the case.
    fn table(&self, method: &Method) -> Option<&matchit::Router<usize>> {
        self.tables.get(method).or_else(|| {
            let upper = method.as_str().to_ascii_uppercase();
            self.tables.get(&Method::from_bytes(upper.as_bytes()).ok()?)
        })
    }

    fn look_up(&self, table: &matchit::Router<usize>, path: &str) -> Option<(usize, Params)> {
        let spelt = if self.ignore_case { path.to_ascii_lowercase() } else { path.to_owned() };
        let found = table.at(&spelt).ok()?;
        let mut params = Vec::with_capacity(found.params.len());
        for (name, value) in found.params.iter() {
            // Offsets are the same in the lower-case spelling: ASCII keeps its length.
            let start = value.as_ptr().addr().checked_sub(spelt.as_ptr().addr())?;
            let value = path.get(start..start + value.len()).filter(|value| !value.is_empty())?;
            // A value that is not UTF-8 is refused, because repair could make two values equal.
            if let Ok(value) = percent_decode(value.as_bytes()).decode_utf8() {
                params.push((name.to_owned(), value.into_owned()));
            }
        }
        Some((*found.value, Params::new(params)))
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

fn listed(methods: &[Method]) -> String {
    methods.iter().map(Method::as_str).collect::<Vec<_>>().join(", ")
}

fn wrong(error: &matchit::InsertError) -> String {
    if let matchit::InsertError::Conflict { with } = error {
        return format!("another route has this method and a path like it, {with}");
    }
    error.to_string()
}

/// A template in the spelling in which paths are looked up; its parameters stay as they are.
fn template(path: &str, ignore_case: bool) -> Result<String, &'static str> {
    let rest = path.strip_prefix('/').ok_or("the path does not begin with a slash")?;
    if path.contains(['?', '#', ';']) {
        return Err("the path holds '?', '#' or ';'");
    }
    let rest = rest.strip_suffix('/').unwrap_or(rest);
    if rest.split('/').any(|segment| matches!(segment, "." | "..")) || rest.contains("//") {
        return Err("the path holds an empty or dot segment");
    }
    let mut spelt = String::from("/");
    for (index, piece) in rest.split('{').enumerate() {
        let mut text = piece;
        if index > 0 {
            let (name, after) = piece.split_once('}').ok_or("a '{' has no '}'")?;
            if name.trim_start_matches('*').is_empty() {
                return Err("a parameter has no name");
            }
            spelt.push('{');
            spelt.push_str(name);
            spelt.push('}');
            text = after;
        }
        if text.contains('}') {
            return Err("a '}' has no '{'");
        }
        for (place, segment) in text.split('/').enumerate() {
            spelt.push_str(if place > 0 { "/" } else { "" });
            let start = spelt.len();
            spell(percent_decode(segment.as_bytes()), &mut spelt);
            if ignore_case && let Some(added) = spelt.get_mut(start..) {
                added.make_ascii_lowercase();
            }
        }
    }
    Ok(spelt)
}

/// `/a` of `/a/{*rest}`: the path for which the catch-all matches an empty rest.
fn above_catch_all(template: &str) -> Option<String> {
    let (above, last) = template.rsplit_once('/')?;
    let catches = last.starts_with("{*");
    catches.then(|| if above.is_empty() { "/".to_owned() } else { above.to_owned() })
}

/// Escapes a decoded segment, so that it cannot be read as several segments or as a parameter.
fn spell(segment: impl IntoIterator<Item = u8>, spelt: &mut String) {
    for byte in segment {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~') {
            spelt.push(char::from(byte));
        } else {
            // Writing to a string cannot fail.
            let _ok = write!(spelt, "%{byte:02X}");
        }
    }
}

/// The first reading: split, then decoded.
fn split_then_decoded(path: &str) -> String {
    let path = path.strip_prefix('/').unwrap_or(path);
    let path = path.strip_suffix('/').unwrap_or(path);
    let mut spelt = String::with_capacity(path.len() + 1);
    for segment in path.split('/') {
        spelt.push('/');
        let name = segment.split(';').next().unwrap_or_default();
        spell(percent_decode(name.as_bytes()), &mut spelt);
    }
    spelt
}

/// The second reading: decoded, then split and resolved.
fn decoded_then_split(path: &str) -> String {
    let decoded = percent_decode(path.as_bytes()).collect::<Vec<_>>();
    let mut segments = Vec::new();
    for segment in decoded.split(|b| *b == b'/') {
        match segment.split(|b| *b == b';').next().unwrap_or_default() {
            b"" | b"." => {}
            b".." => {
                segments.pop();
            }
            name => segments.push(name),
        }
    }
    let mut spelt = String::with_capacity(path.len() + 1);
    for segment in &segments {
        spelt.push('/');
        spell(segment.iter().copied(), &mut spelt);
    }
    if spelt.is_empty() { "/".to_owned() } else { spelt }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::record::Tenant;

    fn routes(list: &[(&str, &str, &str)], ignore_case: bool) -> Result<Routes, Vec<String>> {
        let entry = |(operation, method, path): &(&str, &str, &str)| {
            let operation = Operation::parse(operation).unwrap();
            let route = Route {
                events: Templates::compile(&operation, &[], &[], 1000).unwrap(),
                operation,
                scope: scope::Recipe {
                    key_header: HeaderName::from_static("idempotency-key"),
                    key_required: true,
                    forward_key: true,
                    derive_key: None,
                    tenant: scope::Source::Fixed(Tenant::parse("default").unwrap()),
                },
                fingerprint: fingerprint::Recipe::compile(&fingerprint::Settings::default())
                    .unwrap(),
                outcome: Lists::default(),
                policy: Policy {
                    wait: Duration::ZERO,
                    timeout: Duration::ZERO,
                    late_answer: Duration::ZERO,
                    retention: Duration::ZERO,
                    request_body_max: 0,
                    context_max: 0,
                    response_body_max: 0,
                    on_unknown: OnUnknown::Hold,
                    mismatch_status: StatusCode::CONFLICT,
                    replay_drop: Vec::new(),
                    mode: Mode::Protect,
                    replay_auth: ReplayAuth::Scope,
                },
                upstream: String::new(),
            };
            let methods = vec![Method::from_bytes(method.as_bytes()).unwrap()];
            (Pattern { methods, path: (*path).to_owned() }, route)
        };
        Routes::build(list.iter().map(entry).collect(), ignore_case)
    }

    fn named(routes: &Routes, method: &str, path: &str) -> String {
        match routes.find(&Method::from_bytes(method.as_bytes()).unwrap(), path) {
            RouteMatch::Nothing => "-".to_owned(),
            RouteMatch::Ambiguous { .. } => "?".to_owned(),
            RouteMatch::Keyed { route, params } => {
                let params = params.iter().map(|(name, value)| format!(" {name}={value}"));
                format!("{}{}", route.operation, params.collect::<String>())
            }
        }
    }

    #[test]
    fn no_spelling_slips_past_a_keyed_route() {
        let list = [("o", "POST", "/orders"), ("a", "POST", "/accounts/{account}/orders/")];
        let routes = routes(&list, false).unwrap();
        for path in [
            "/orders",
            "/orders/",
            "//orders",
            "/x/../orders",
            "/./orders",
            "/orders;v=1",
            "/%6frders",
            "/%2e/orders",
            "/x/%2e%2e/orders",
            "/x%2f..%2forders",
            "/orders%2f",
            "/%2forders",
            "/orders//",
            "/..;/orders",
            "/x/..;a=b/orders",
            "/orders%3bv=1",
            "/orders?x=1",
            "/../orders",
            "orders",
            "/;x/orders",
        ] {
            assert_eq!(named(&routes, "POST", path), "o", "{path}");
        }
        for path in [
            "/ORDERS",
            "/%252e/orders",
            "/orders/1",
            "/x/orders",
            "/orders\\",
            "/",
            "",
            "/order",
            "/%zzorders",
        ] {
            assert_eq!(named(&routes, "POST", path), "-", "{path}");
        }
        assert_eq!(named(&routes, "post", "/orders"), "o");
        assert_eq!(named(&routes, "GET", "/orders"), "-");
        for (path, found) in [
            ("/accounts/1/orders", "a account=1"),
            ("/accounts/a%2fb/orders", "a account=a/b"),
            ("/accounts/%2561/orders", "a account=%61"),
            ("/accounts/a;v=1/orders;w", "a account=a"),
            ("/accounts/Zo%C3%AB/orders", "a account=Zoë"),
            ("/accounts/%ff/orders", "a"),
            ("/accounts//orders", "-"),
            ("//accounts/x/orders/", "a account=x"),
        ] {
            assert_eq!(named(&routes, "POST", path), found, "{path}");
        }
    }

    #[test]
    fn readings_that_differ_are_ambiguous() {
        let list = [("a", "POST", "/a/{x}"), ("b", "POST", "/a/{x}/b"), ("r", "PUT", "/{*rest}")];
        let routes = routes(&list, false).unwrap();
        assert_eq!(named(&routes, "POST", "/a/x%2fb"), "?");
        assert_eq!(named(&routes, "PUT", "/a/x%2fb/../c"), "r rest=a/x/b/../c");
        assert_eq!(named(&routes, "PUT", "/"), "r");
        assert_eq!(named(&routes, "PUT", "/.."), "r rest=..");
    }

    #[test]
    fn case_matters_unless_it_is_ignored() {
        let routes = routes(&[("o", "POST", "/Orders/{Id}")], true).unwrap();
        assert_eq!(named(&routes, "POST", "/oRDERS/%41bC"), "o Id=AbC");
    }

    #[test]
    fn bad_routes_are_named() {
        for bad in ["orders", "/a/{", "/a/}", "/a/{}", "/a//b", "/a/../b", "/a?b", "/{*rest}/x"] {
            let errors = routes(&[("o", "POST", bad)], false).unwrap_err();
            assert!(errors.len() == 1 && errors[0].starts_with("route o: "), "{errors:?}");
        }
        for (one, other) in
            [("/a", "/a/"), ("/a/{x}", "/a/{y}"), ("/a", "/%61"), ("/{*x}", "/{*y}")]
        {
            let errors = routes(&[("o", "POST", one), ("p", "POST", other)], false).unwrap_err();
            assert!(errors.len() == 1 && errors[0].starts_with("route p: POST"), "{errors:?}");
        }
        assert!(
            routes(&[("o", "POST", "/a"), ("o", "PUT", "/a"), ("p", "POST", "/{*r}")], false)
                .is_ok()
        );
    }

    proptest! {
        #[test]
        fn no_path_panics(path: String, odd in r"[/%2eEfF.;a{}*?]{0,30}") {
            let routes = routes(&[("o", "POST", "/a/{x}"), ("r", "POST", "/{*rest}")], true).unwrap();
            let _found = named(&routes, "POST", &path);
            let _found = named(&routes, "POST", &odd);
        }
    }

    #[test]
    fn a_look_says_which_reading_matched_and_what_nearly_did() {
        let list = [
            ("orders", "POST", "/orders"),
            ("lines", "POST", "/orders/{id}/lines"),
            ("all", "PUT", "/files/{*rest}"),
        ];
        let routes = routes(&list, false).unwrap();
        let look = |method: &str, path: &str| {
            let look = routes.look(&Method::from_bytes(method.as_bytes()).unwrap(), path);
            let operation = |reading: Reading| reading.route.map(|route| route.operation);
            let near =
                look.near.iter().map(|near| format!("{}: {}", near.route.operation, near.why_not));
            let near: Vec<_> = near.collect();
            (operation(look.split), operation(look.decoded), near.join("; "))
        };
        let orders = || Some("orders".to_owned());
        assert_eq!(look("POST", "/orders"), (orders(), orders(), String::new()));
        assert_eq!(look("POST", "/x/../orders?a=1"), (None, orders(), String::new()));
        for (method, path, why) in [
            ("PUT", "/orders", "orders: the path fits, but the method is PUT and not POST"),
            (
                "POST",
                "/Orders",
                "orders: \"Orders\" is \"orders\" in other letters; see server.ignore_path_case",
            ),
            ("POST", "/orders/7/line", "lines: the path says \"line\" and not \"lines\""),
            (
                "POST",
                "/orders/7",
                "orders: the path has 2 segments and not 1; lines: the path has 2 segments and not 3",
            ),
            ("POST", "/files/a/b", "all: the path fits, but the method is POST and not PUT"),
            ("POST", "/else", ""),
        ] {
            assert_eq!(look(method, path), (None, None, why.to_owned()), "{method} {path}");
        }
    }
}
