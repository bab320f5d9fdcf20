//! Makes the table of routes from `[policy]` and `[[route]]`.
//!
//! A field of a route replaces the field of `[policy]`, which replaces the default. A route without `operation` has one
//! operation for each method, named by method and path.
//!
//! Invariant: a mistake in `[policy]` is reported once, even if no route uses it.

use std::time::Duration;

use crate::record::event::subscription::Subscriber;
use crate::scope::jwt::ClaimPath;

use super::common::Common;
use super::texts::{covers, read_code, read_header, read_method, same_answer};
use super::{
    BTreeMap, BTreeSet, Builder, Code, DAY, DEFAULT_UPSTREAM, Derive, File, HeaderName, KIB, Lists,
    Location, MIB, Method, Mode, OnUnknown, Operation, Pattern, Policy, Route, RouteFacts, Routes,
    SECOND, Setting, Source, Spanned, Spec, StatusCode, Templates, Tenant, file, fingerprint,
    lookup, payload_max, scope, unknown, upstream,
};

/// The default time-out of an upstream.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The field of the route, or else of the policy.
fn pick<'f, T>(route: &'f Setting<T>, policy: &'f Setting<T>) -> &'f Setting<T> {
    if route.is_some() { route } else { policy }
}

fn pick_or<T: Clone>(route: &Setting<T>, policy: &Setting<T>, default: T) -> T {
    super::value_or(pick(route, policy), default)
}

impl Builder<'_> {
    pub(super) fn routes(
        &self,
        file: &File,
        without_file: bool,
        sinks: &[Subscriber],
        upstreams: &BTreeMap<String, upstream::Settings>,
    ) -> (Routes, Vec<RouteFacts>) {
        let common = Common { file, sinks, upstreams };
        // [policy] alone, so that its mistakes are reported without a route.
        let none = file::Policy::default();
        let hold = OnUnknown::Hold;
        let _ = self.scope(&none, &file.policy, "");
        let _ = self.policy(&none, &file.policy, hold, DEFAULT_UPSTREAM);
        self.check_on_unknown(&common);
        let _ = (self.outcome(&none, &file.policy), self.fingerprint(None, &file.policy));
        let made = if without_file { every_write() } else { Vec::new() };
        let raws = if without_file { &made } else { &file.routes };
        let mut locations = Vec::new();
        let mut entries = Vec::new();
        for raw in raws {
            let made = self.route(raw, &common);
            locations
                .extend(made.iter().map(|(_, route)| (route.operation.clone(), &raw.location)));
            entries.extend(made);
        }
        let facts = entries
            .iter()
            .map(|(pattern, route)| RouteFacts {
                operation: route.operation.clone(),
                methods: pattern.methods.clone(),
                path: pattern.path.clone(),
            })
            .collect();
        self.refuse_repeated_operations(raws);
        let routes = Routes::build(entries, super::value_or(&file.server.ignore_path_case, false));
        let routes = routes.unwrap_or_else(|wrong| {
            wrong.iter().for_each(|text| self.wrong_route(&locations, text));
            Routes::default()
        });
        (routes, facts)
    }

    /// The table of routes names a route by its operation. This replaces the name by the location in the file.
    fn wrong_route(&self, locations: &[(Operation, &Location)], text: &str) {
        let found = locations.iter().find_map(|(operation, location)| {
            let rest = text.strip_prefix(&format!("route {operation}: "))?;
            Some((*location, rest))
        });
        match found {
            Some((location, rest)) => self.diagnostics.mistake(location, rest),
            None => self.diagnostics.mistake(&Location::absent("route"), text),
        }
    }

    /// Refuses two routes of one operation, because they would share keys. One route with several methods may.
    fn refuse_repeated_operations(&self, raws: &[file::Route]) {
        let mut seen = BTreeSet::new();
        for operation in raws.iter().filter_map(|raw| raw.operation.as_ref()) {
            if !seen.insert(&operation.value) {
                let wrong = format!(
                    "{:?} is the operation of another route already; two operations share no key",
                    operation.value
                );
                self.diagnostics.mistake(&operation.location, wrong);
            }
        }
    }

    fn route(&self, raw: &file::Route, common: &Common<'_>) -> Vec<(Pattern, Route)> {
        let methods = self.methods(raw);
        let path = self.required(raw.path.as_ref(), &raw.location, "path");
        let upstream = self.route_upstream(raw, common);
        let Some(path) = path.map(|path| path.value.clone()) else { return Vec::new() };
        let by_method = |method: Method| {
            let name = format!("{method} {path}");
            self.route_of(raw, common, &name, &raw.location, vec![method], &path, &upstream)
        };
        match &raw.operation {
            Some(name) => self
                .route_of(raw, common, &name.value, &name.location, methods, &path, &upstream)
                .into_iter()
                .collect(),
            None => methods.into_iter().filter_map(by_method).collect(),
        }
    }

    #[expect(clippy::too_many_arguments, reason = "the parts of one route, used in this file only")]
    fn route_of(
        &self,
        raw: &file::Route,
        common: &Common<'_>,
        name: &str,
        name_place: &Location,
        methods: Vec<Method>,
        path: &str,
        upstream: &str,
    ) -> Option<(Pattern, Route)> {
        let policy = &common.file.policy;
        let Some(operation) = Operation::parse(name) else {
            let wrong = "an operation is 1 to 255 bytes of visible text";
            self.diagnostics.mistake(name_place, wrong);
            return None;
        };
        let events = self.events(raw, &operation, common);
        let timeout = pick_or(&raw.policy.timeout, &policy.timeout, TIMEOUT);
        let asked = lookup::Route { own: &raw.policy, timeout, upstream };
        let on_unknown = self.on_unknown(&asked, common);
        let events = match &on_unknown {
            OnUnknown::Lookup(lookup) => {
                events.map(|events| events.beside(lookup.template.needs()))
            }
            OnUnknown::Hold | OnUnknown::Retry => events,
        };
        let route = Route {
            operation,
            scope: self.scope(&raw.policy, policy, path),
            fingerprint: self.fingerprint(raw.policy.fingerprint.as_ref(), policy)?,
            outcome: self.outcome(&raw.policy, policy),
            events: events?,
            policy: self.policy(&raw.policy, policy, on_unknown, upstream),
            upstream: upstream.to_owned(),
        };
        Some((Pattern { methods, path: path.to_owned() }, route))
    }

    fn methods(&self, raw: &file::Route) -> Vec<Method> {
        match (&raw.method, &raw.methods) {
            (Some(one), None) => self.checked(one, read_method).into_iter().collect(),
            (None, Some(list)) if list.value.is_empty() => {
                self.diagnostics.mistake(&list.location, "names no method");
                Vec::new()
            }
            (None, several @ Some(_)) => self.each(several, read_method),
            (Some(both), Some(_)) => {
                self.diagnostics.mistake(
                    &both.location,
                    "cannot be set together with methods; keep one of them",
                );
                Vec::new()
            }
            (None, None) => {
                self.diagnostics.missing(&raw.location.field("method"));
                Vec::new()
            }
        }
    }

    fn route_upstream(&self, raw: &file::Route, common: &Common<'_>) -> String {
        let named = self.named_upstream(raw.upstream.as_ref(), common);
        named.unwrap_or_else(|| DEFAULT_UPSTREAM.to_owned())
    }

    fn events(
        &self,
        raw: &file::Route,
        operation: &Operation,
        common: &Common<'_>,
    ) -> Option<Templates> {
        let specs: Vec<Spec> =
            raw.events.iter().filter_map(|event| self.event(event, common)).collect();
        let max = payload_max(&common.file.outbox);
        let mut whole = specs.len() == raw.events.len();
        // Each by itself first, so that a mistake is reported at its event.
        for (event, spec) in raw.events.iter().zip(&specs).filter(|_| whole) {
            let alone =
                Templates::compile(operation, std::slice::from_ref(spec), common.sinks, max);
            if let Err(wrong) = alone {
                wrong.into_iter().for_each(|text| self.diagnostics.mistake(&event.location, text));
            }
        }
        let compiled = Templates::compile(operation, &specs, common.sinks, max);
        whole &= compiled.is_ok();
        if let Err(wrong) = &compiled
            && !self.diagnostics.has_mistake_under(&raw.location.field("event"))
        {
            wrong.iter().for_each(|text| self.diagnostics.mistake(&raw.location, text));
        }
        compiled.ok().filter(|_| whole)
    }

    fn event(&self, raw: &file::Event, common: &Common<'_>) -> Option<Spec> {
        let known = common.file.sinks.iter().filter_map(|raw| raw.name.as_ref());
        let known: Vec<&str> = known.map(|name| name.value.as_str()).collect();
        let read = |name: &str| {
            let hint = || unknown("no such sink", name, known.iter().copied());
            known.contains(&name).then(|| name.to_owned()).ok_or_else(hint)
        };
        let sinks = raw.sinks.is_some().then(|| self.each(&raw.sinks, read));
        let text = |field: &Setting<String>| field.as_ref().map(|spanned| spanned.value.clone());
        Some(Spec {
            kind: self.required(raw.kind.as_ref(), &raw.location, "type")?.value.clone(),
            when: text(&raw.when),
            payload: raw.payload.as_ref().map(|spanned| spanned.value.clone()),
            for_each: text(&raw.for_each),
            event_key: text(&raw.event_key),
            ordering_key: text(&raw.ordering_key),
            sinks,
        })
    }

    fn policy(
        &self,
        route: &file::Policy,
        policy: &file::Policy,
        on_unknown: OnUnknown,
        upstream: &str,
    ) -> Policy {
        let replay_auth = route.replay_auth.as_ref().or(policy.replay_auth.as_ref());
        for times in [route, policy] {
            self.above_zero(&times.timeout);
            self.above_zero(&times.retention);
        }
        let mismatch = super::value_or(pick(&route.mismatch_status, &policy.mismatch_status), 409);
        let mismatch =
            u16::try_from(mismatch).ok().and_then(|code| StatusCode::from_u16(code).ok());
        let dropped = pick(&route.replay_drop, &policy.replay_drop);
        let replay_drop = match dropped {
            Some(_) => self.each(dropped, read_header),
            None => vec![http::header::SET_COOKIE],
        };
        Policy {
            wait: pick_or(&route.wait, &policy.wait, 10 * SECOND),
            timeout: pick_or(&route.timeout, &policy.timeout, TIMEOUT),
            late_answer: pick_or(&route.late_answer, &policy.late_answer, 60 * SECOND),
            retention: pick_or(&route.retention, &policy.retention, DAY),
            request_body_max: pick_or(&route.max_request_body, &policy.max_request_body, MIB),
            response_body_max: pick_or(&route.max_response_body, &policy.max_response_body, MIB),
            context_max: pick_or(&route.context_max, &policy.context_max, 64 * KIB),
            on_unknown,
            mismatch_status: mismatch.unwrap_or(StatusCode::CONFLICT),
            replay_drop,
            mode: self.mode(pick(&route.mode, &policy.mode)),
            replay_auth: self.replay_auth(replay_auth, upstream),
        }
    }

    fn mode(&self, field: &Setting<String>) -> Mode {
        let read = |text: &str| match text {
            "protect" => Ok(Mode::Protect),
            "observe" => Ok(Mode::Observe),
            _ => Err("must be \"protect\" or \"observe\" (forward everything, and only tell what \
                      would have been done)"
                .to_owned()),
        };
        field.as_ref().and_then(|spanned| self.checked(spanned, read)).unwrap_or_default()
    }

    /// A list in the file overrides the default of the other list for the same answer.
    fn outcome(&self, route: &file::Policy, policy: &file::Policy) -> Lists {
        let release = pick(&route.release_on, &policy.release_on);
        let unknown = pick(&route.unknown_on, &policy.unknown_on);
        let mut lists = Lists::default();
        if release.is_some() {
            lists.release_on = self.each(release, read_code);
        }
        if unknown.is_some() {
            lists.unknown_on = self.each(unknown, read_code);
        }
        let in_both = |code: &Code, other: &[Code]| other.iter().any(|c| same_answer(*code, *c));
        let taken = |code: &Code, by: &[Code]| by.iter().any(|written| covers(*written, *code));
        match (release, unknown) {
            (Some(_), None) => lists.unknown_on.retain(|code| !taken(code, &lists.release_on)),
            (None, Some(_)) => lists.release_on.retain(|code| !taken(code, &lists.unknown_on)),
            (Some(_), Some(written)) => {
                if lists.unknown_on.iter().any(|code| in_both(code, &lists.release_on)) {
                    let wrong = "names an answer that release_on names too; keep it in one of them";
                    self.diagnostics.mistake(&written.location, wrong);
                }
            }
            (None, None) => {}
        }
        lists
    }

    fn fingerprint(
        &self,
        route: Option<&file::Fingerprint>,
        policy: &file::Policy,
    ) -> Option<fingerprint::Recipe> {
        let Some(raw) = route.or(policy.fingerprint.as_ref()) else {
            return fingerprint::Recipe::compile(&fingerprint::Settings::default()).ok();
        };
        let xml_namespaces = self.xml_namespaces(&raw.xml_namespaces);
        // Each by itself first, so that a mistake is reported at its entry.
        let each = |list: &Setting<Vec<Spanned<String>>>,
                    put: fn(&mut fingerprint::Settings, String)| {
            self.each(list, |entry| {
                let mut alone = fingerprint::Settings {
                    xml_namespaces: xml_namespaces.clone(),
                    ..Default::default()
                };
                put(&mut alone, entry.to_owned());
                compiled(&alone).map(|_| entry.to_owned())
            })
        };
        let only = each(&raw.only, |alone, entry| alone.only.push(entry));
        let ignore = each(&raw.ignore, |alone, entry| alone.ignore.push(entry));
        let ignore_xml = each(&raw.ignore_xml, |alone, entry| alone.ignore_xml.push(entry));
        if let Some(spanned) = raw.only.as_ref().filter(|spanned| spanned.value.is_empty()) {
            let wrong = "names nothing; leave it out, and all of the body counts";
            self.diagnostics.mistake(&spanned.location, wrong);
        }
        let headers = self.each(&raw.headers, |entry| {
            let alone =
                fingerprint::Settings { headers: vec![entry.to_owned()], ..Default::default() };
            read_header(entry).and_then(|_| compiled(&alone)).map(|_| entry.to_owned())
        });
        let ignore_query = self.each(&raw.ignore_query, |entry| Ok(entry.to_owned()));
        let decoded_max = raw.max_decoded.as_ref().map(|spanned| spanned.value);
        let settings = fingerprint::Settings {
            only,
            ignore,
            ignore_xml,
            xml_namespaces,
            headers,
            ignore_query,
            decoded_max,
        };
        compiled(&settings).ok()
    }

    /// All namespaces, also those with a mistake, so that a path that uses one is not reported as well.
    fn xml_namespaces(&self, raw: &[(String, Spanned<String>)]) -> fingerprint::xml::Given {
        let read = |(prefix, uri): &(String, Spanned<String>)| {
            self.checked(uri, |text| fingerprint::xml::check(prefix, text));
            (prefix.clone(), uri.value.clone())
        };
        raw.iter().map(read).collect()
    }

    fn scope(&self, route: &file::Policy, policy: &file::Policy, path: &str) -> scope::Recipe {
        let header = pick(&route.key_header, &policy.key_header).as_ref();
        let key_header = header.and_then(|spanned| self.checked(spanned, read_header));
        let derive = pick(&route.derive_key, &policy.derive_key).as_ref();
        let tenant = route.tenant.as_ref().or(policy.tenant.as_ref());
        scope::Recipe {
            key_header: key_header.unwrap_or(HeaderName::from_static("idempotency-key")),
            key_required: pick_or(&route.require_key, &policy.require_key, self.require_key),
            forward_key: pick_or(&route.forward_key, &policy.forward_key, true),
            derive_key: derive.and_then(|parts| self.derive(parts, path)),
            tenant: tenant.map_or_else(default_tenant, |raw| self.tenant(raw, path)),
        }
    }

    /// `path` is empty for `[policy]`, which has no path.
    fn derive(&self, parts: &Spanned<Vec<Spanned<String>>>, path: &str) -> Option<Derive> {
        let texts: Vec<String> = parts.value.iter().map(|part| part.value.clone()).collect();
        if texts.is_empty() {
            self.diagnostics
                .mistake(&parts.location, "names no part; leave it out, or name at least one");
            return None;
        }
        for part in &parts.value {
            self.checked(part, |text| Derive::parse(&[text.to_owned()]));
            if let Some(name) = part.value.strip_prefix("path:").filter(|name| !name.is_empty()) {
                self.parameter(name, &part.location, path);
            }
        }
        Derive::parse(&texts).ok()
    }

    fn tenant(&self, raw: &file::Tenant, path: &str) -> Source {
        let flag = |field: &Setting<bool>, source: Source| {
            field.as_ref().map(|spanned| {
                if !spanned.value {
                    self.diagnostics
                        .mistake(&spanned.location, "can only be true; else leave it out");
                }
                Some(source)
            })
        };
        let header =
            |spanned: &Spanned<String>| self.checked(spanned, read_header).map(Source::Header);
        let fixed = |spanned: &Spanned<String>| {
            let read = |text: &str| {
                Tenant::parse(text)
                    .ok_or_else(|| "is not 1 to 255 bytes of visible text".to_owned())
            };
            self.checked(spanned, read).map(Source::Fixed)
        };
        let claim = |spanned: &Spanned<String>| {
            let read = |text: &str| {
                ClaimPath::parse(text).ok_or_else(|| {
                    "is not the name of a claim, \"tenant_id\", or a pointer to one, \"/org/id\""
                        .to_owned()
                })
            };
            self.checked(spanned, read).map(Source::JwtClaim)
        };
        let found: Vec<Option<Source>> = [
            raw.header.as_ref().map(header),
            raw.path.as_ref().map(|spanned| self.tenant_parameter(spanned, path)),
            flag(&raw.host, Source::Host),
            flag(&raw.basic_user, Source::BasicUser),
            flag(&raw.credential, Source::Credential),
            raw.jwt_claim.as_ref().map(claim),
            raw.fixed.as_ref().map(fixed),
        ]
        .into_iter()
        .flatten()
        .collect();
        if found.len() != 1 && !self.diagnostics.has_mistake_under(&raw.location) {
            let wrong = "name exactly one of header, path, host, basic_user, credential, jwt_claim and fixed";
            self.diagnostics.mistake(&raw.location, wrong);
        }
        found.into_iter().flatten().next().unwrap_or_else(default_tenant)
    }

    /// `path` is empty for `[policy]`, which has no path.
    fn tenant_parameter(&self, spanned: &Spanned<String>, path: &str) -> Option<Source> {
        self.parameter(&spanned.value, &spanned.location, path);
        Some(Source::Path(spanned.value.clone()))
    }

    fn parameter(&self, name: &str, location: &Location, path: &str) {
        let named = path.contains(&format!("{{{name}}}")) || path.contains(&format!("{{*{name}}}"));
        if !named && !path.is_empty() {
            let wrong = format!("the path {path:?} has no parameter {{{name}}}");
            self.diagnostics.mistake(location, wrong);
        }
    }
}

fn compiled(settings: &fingerprint::Settings) -> Result<fingerprint::Recipe, String> {
    fingerprint::Recipe::compile(settings).map_err(|wrong| wrong.join("; "))
}

fn default_tenant() -> Source {
    Source::Fixed(Tenant::stored("default"))
}

/// What is protected without a file: every POST and PATCH.
fn every_write() -> Vec<file::Route> {
    let text = |value: &str| {
        let location = Location::absent("route");
        Spanned { value: value.to_owned(), location }
    };
    ["/{*path}", "/"]
        .into_iter()
        .map(|path| file::Route {
            methods: Some(Spanned {
                value: vec![text("POST"), text("PATCH")],
                location: Location::absent("route"),
            }),
            path: Some(text(path)),
            ..file::Route::default()
        })
        .collect()
}
