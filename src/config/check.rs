//! Warnings about a valid configuration: settings that are unsafe or easy to misunderstand. `check` and `serve` print them.

use std::net::IpAddr;
use std::time::Duration;

use http::Method;

use crate::config::{Config, StoreKind, Warning};
use crate::gateway::OnUnavailable;
use crate::gateway::tokens::KeySource;
use crate::record::event::subscription::{TypeFilter, TypePattern};
use crate::relay::sink::broker::Login;
use crate::relay::sink::{self, Target};
use crate::route::{Mode, OnUnknown, ReplayAuth, Route};
use crate::scope::Source;
use crate::store::Order;

/// A sink that is away for a moment reaches an `outbox.backlog_max` below this.
const BACKLOG_MIN: u32 = 1000;

/// The spill should have room for this many of the largest answers.
const SPILLED_MIN: u64 = 8;

/// The warnings about a configuration, in the order of its sections.
#[must_use]
pub fn warnings(config: &Config) -> Vec<Warning> {
    let mut found = Vec::new();
    let mut warn = |location: &str, text: String| {
        found.push(Warning { location: location.to_owned(), text });
    };
    if config.routes.iter().next().is_none() {
        warn("route", "there is no [[route]]: everything passes through unprotected".to_owned());
    }
    let on = |test: fn(&Route) -> bool| operations(config, test);
    if let Some(names) = on(|route| route.policy.mode == Mode::Observe) {
        let text = format!(
            "{names}: only observed: every request is forwarded, duplicates too, and no event is written"
        );
        warn("policy.mode", text);
    }
    if config.gateway.on_unavailable == OnUnavailable::Bypass {
        let text = "while the store is away keyed requests are forwarded unprotected: duplicates execute again, no event \
                    is written, and a retry after the outage executes once more";
        warn("store.on_unavailable", text.to_owned());
    }
    if let Some(names) = on(tenant_is_a_claim) {
        let text = format!(
            "{names}: the caller names the tenant, and it is not verified. Every caller that can name a tenant can read \
             its stored answers: let a proxy in front set it, read it from a token (jwt_claim), or set replay_auth"
        );
        warn("policy.tenant", text);
    }
    about_tokens(config, &mut warn);
    about_unknown(config, &mut warn);
    if on(|route| route.scope.forward_key).is_some() {
        let text = "a Go proxy (Traefik, Caddy, a mesh) behind Oncegate may send a write without a body twice when it \
                    carries Idempotency-Key; with such a hop set forward_key = false";
        warn("policy.forward_key", text.to_owned());
    }
    if config.facts.iter().any(|facts| facts.methods.iter().any(resent_by_nginx)) {
        let text = "an nginx behind Oncegate sends PUT and DELETE again when a connection breaks: set \
                    `proxy_next_upstream off` there";
        warn("route.method", text.to_owned());
    }
    if let Some(names) = on(|route| route.policy.wait > route.policy.timeout) {
        warn(
            "policy.wait",
            format!("{names}: a duplicate may wait longer than the upstream may take"),
        );
    }
    if let Some(names) = on(|route| route.policy.retention < Duration::from_secs(3600)) {
        let text = format!("{names}: retention is under an hour; a retry after it executes again");
        warn("policy.retention", text);
    }
    about_spill(config, &mut warn);
    if config.relay.sinks.is_empty() && config.routes.iter().next().is_some() {
        warn(
            "sink",
            "there is no [[sink]]: events are written as discarded and not delivered".to_owned(),
        );
    }
    for sink in &config.relay.sinks {
        about_sink(sink, &mut warn);
        about_filter(config, sink, &mut warn);
        about_order(config, sink, &mut warn);
    }
    about_backlog(config, &mut warn);
    if matches!(config.store.kind, StoreKind::Sqlite(_)) && is_public(config) {
        let text = "sqlite serves one replica; for several use postgres://";
        warn("store.url", text.to_owned());
    }
    found
}

fn about_tokens(config: &Config, warn: &mut impl FnMut(&str, String)) {
    let used = config.routes.iter().any(|route| matches!(route.scope.tenant, Source::JwtClaim(_)));
    let Some(jwt) = &config.jwt else { return };
    if !used {
        warn("jwt", "no route reads its tenant from a token: nothing is checked".to_owned());
    }
    if let KeySource::Url(remote) = &jwt.source
        && remote.server.url.scheme_str() == Some("http")
    {
        let text = "the keys are fetched over plain http: an attacker on the network can replace them and make tokens";
        warn("jwt.jwks_url", text.to_owned());
    }
}

fn about_spill(config: &Config, warn: &mut impl FnMut(&str, String)) {
    let largest = config.routes.iter().map(|route| route.policy.response_body_max).max();
    let largest = largest.and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or_default();
    if config.store.spill.bytes_max < largest.saturating_mul(SPILLED_MIN) {
        let text = format!(
            "has room for fewer than {SPILLED_MIN} of the largest answers that are kept; while it is full nothing new is reserved"
        );
        warn("store.spill.max_size", text);
    }
}

fn about_unknown(config: &Config, warn: &mut impl FnMut(&str, String)) {
    let on = |test: fn(&Route) -> bool| operations(config, test);
    if let Some(names) = on(|route| route.policy.on_unknown == OnUnknown::Retry) {
        let text = format!(
            "{names}: after an unknown outcome the next duplicate executes again. Use retry only where the upstream \
             itself deduplicates by the forwarded key"
        );
        warn("policy.on_unknown", text);
    }
    if let Some(names) = on(|r| r.policy.on_unknown == OnUnknown::Retry && !r.scope.forward_key) {
        let text = format!(
            "{names}: retry without forward_key gives the upstream no key to deduplicate by"
        );
        warn("policy.forward_key", text);
    }
    if let Some(names) = on(settles_early) {
        let text = format!(
            "{names}: settle is shorter than timeout: the service may still be working when it is asked, and what is not \
             found then is executed again. Let settle be as long as timeout at least"
        );
        warn("policy.lookup", text);
    }
    if let Some(names) = on(asks_about_nothing) {
        let text = format!(
            "{names}: the look-up names neither `key` nor anything of `request`: it is the same for every request, and \
             could take the outcome of another request for the outcome of this one"
        );
        warn("policy.lookup", text);
    }
    if let Some(names) = on(asks_for_any_tenant) {
        let text = format!(
            "{names}: the look-up does not name `tenant`: equal keys of two tenants would get one answer. Name it in path \
             or headers, or what it is taken from"
        );
        warn("policy.lookup", text);
    }
}

fn about_order(config: &Config, sink: &sink::Settings, warn: &mut impl FnMut(&str, String)) {
    let unordered = |route: &Route| route.events.leave_unordered(&sink.name);
    if sink.order != Order::None
        && let Some(names) = operations(config, unordered)
    {
        let text = format!(
            "{}: events of {names} have no ordering_key and are delivered in no order",
            sink.name
        );
        warn("sink.ordering", text);
    }
}

fn about_sink(sink: &sink::Settings, warn: &mut impl FnMut(&str, String)) {
    match &sink.target {
        Target::Http(target) if target.url.scheme_str() == Some("http") && target.allow_http => {
            let text = format!("{}: events travel unencrypted", sink.name);
            warn("sink.allow_http", text);
        }
        Target::Http(_) => {}
        Target::Nats(target) => {
            let open = target.plain_hosts().any(|host| !is_this_machine(host));
            about_login(&sink.name, &target.login, open, warn);
        }
        #[cfg(feature = "redis")]
        Target::Redis(target) => {
            let open = !target.server.speaks_tls() && !is_this_machine(target.server.host());
            about_login(&sink.name, &target.login, open, warn);
        }
    }
    if sink.age_max < Duration::from_secs(3600) {
        let text = format!(
            "{}: an outage of an hour can use up max_age; events may be dead by then",
            sink.name
        );
        warn("sink.max_age", text);
    }
}

fn about_backlog(config: &Config, warn: &mut impl FnMut(&str, String)) {
    let few = config.sweep.backlog.most().filter(|most| most.get() < BACKLOG_MIN);
    if let Some(most) = few
        && let Some(names) = operations(config, |route| route.events.reach_sinks())
    {
        let text = format!(
            "if a sink is away until {most} events are pending, {names} answer 503: set it to what the disk can hold"
        );
        warn("outbox.backlog_max", text);
    }
}

fn about_login(sink: &str, login: &Login, open: bool, warn: &mut impl FnMut(&str, String)) {
    if open && *login != Login::Nobody {
        let text = format!(
            "{sink}: its secret and its events travel unencrypted, unless the server asks for TLS; tls:// (NATS) and \
             rediss:// (Redis) encrypt"
        );
        warn("sink.url", text);
    }
}

fn is_this_machine(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// A pattern that matches no event is probably a typing error.
fn about_filter(config: &Config, sink: &sink::Settings, warn: &mut impl FnMut(&str, String)) {
    let TypeFilter::Matching(patterns) = &sink.events else { return };
    let doubts: &[&str] = match config.sweep.unknown_events {
        Some(_) => &["record.unknown", "record.resolved"],
        None => &[],
    };
    let emitted = |pattern: &TypePattern| {
        let of_routes = config.routes.iter().flat_map(|route| route.events.kinds());
        of_routes.chain(doubts.iter().copied()).any(|kind| pattern.matches(kind))
    };
    for pattern in patterns.iter().filter(|pattern| !emitted(pattern)) {
        let by_others = match config.store.kind {
            StoreKind::Postgres(_) => ", unless an application announces it in the database",
            StoreKind::Sqlite(_) => "",
        };
        let text = format!(
            "{}: no route has an event whose type fits {:?}{by_others}",
            sink.name,
            pattern.as_str()
        );
        warn("sink.events", text);
    }
}

/// Whether the caller names the tenant, no one verifies it, and `replay_auth` does not protect the stored answers.
fn tenant_is_a_claim(route: &Route) -> bool {
    let unverified = match route.scope.tenant {
        Source::Header(_) | Source::Path(_) | Source::BasicUser | Source::Host => true,
        Source::Fixed(_) | Source::Credential | Source::JwtClaim(_) => false,
    };
    unverified && route.policy.replay_auth == ReplayAuth::Scope
}

fn settles_early(route: &Route) -> bool {
    match &route.policy.on_unknown {
        OnUnknown::Lookup(lookup) => lookup.delay.after_loss < route.policy.timeout,
        OnUnknown::Hold | OnUnknown::Retry => false,
    }
}

fn asks_about_nothing(route: &Route) -> bool {
    let OnUnknown::Lookup(lookup) = &route.policy.on_unknown else { return false };
    !["key", "request"].iter().any(|name| lookup.template.names(name))
}

/// Whether the look-up names neither `tenant` nor the part of the request that the tenant is read from.
fn asks_for_any_tenant(route: &Route) -> bool {
    let OnUnknown::Lookup(lookup) = &route.policy.on_unknown else { return false };
    let origin = match &route.scope.tenant {
        Source::Fixed(_) => return false,
        Source::Header(name) => format!("request.headers.{name}"),
        Source::Path(name) => format!("request.params.{name}"),
        Source::Host => "request.headers.host".to_owned(),
        Source::BasicUser | Source::Credential | Source::JwtClaim(_) => {
            "request.headers.authorization".to_owned()
        }
    };
    !lookup.template.names("tenant") && !lookup.template.names(&origin)
}

fn resent_by_nginx(method: &Method) -> bool {
    *method == Method::PUT || *method == Method::DELETE
}

/// A process that listens on every address probably runs in a container, and containers are often replicated.
fn is_public(config: &Config) -> bool {
    let listen = &config.server.listen.address;
    listen.starts_with("0.0.0.0:") || listen.starts_with("[::]:")
}

/// The operations for which the test is true: "orders.create, orders.cancel and 3 more".
fn operations(config: &Config, test: impl Fn(&Route) -> bool) -> Option<String> {
    let names: Vec<&str> = config
        .routes
        .iter()
        .filter(|route| test(route))
        .map(|route| route.operation.as_str())
        .collect();
    let (shown, rest) = names.split_at(names.len().min(3));
    match (shown, rest.len()) {
        ([], _) => None,
        (shown, 0) => Some(shown.join(", ")),
        (shown, more) => Some(format!("{} and {more} more", shown.join(", "))),
    }
}
