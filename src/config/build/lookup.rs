//! `on_unknown`, and the request to the upstream for "lookup".
//!
//! Invariant: all templates of a look-up are compiled here, so that a mistake in one is found at the start and not at the
//! first look-up. Each mistake is reported at its own field.

use std::sync::Arc;
use std::time::Duration;

use http::header::{
    CONNECTION, CONTENT_LENGTH, EXPECT, HOST, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use http::{HeaderName, Method, StatusCode};
use serde_json::{Value, json};

use super::common::Common;
use super::texts::read_header;
use super::{Builder, SECOND, file};
use crate::record::LookupDelay;
use crate::record::lookup::{Spec, Template};
use crate::route::{Lookup, OnUnknown};

/// Headers that a look-up cannot set, because they belong to the connection.
const OURS: [HeaderName; 8] =
    [CONNECTION, CONTENT_LENGTH, EXPECT, HOST, TE, TRAILER, TRANSFER_ENCODING, UPGRADE];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Choice {
    Hold,
    Retry,
    Lookup,
}

fn read_choice(text: &str) -> Result<Choice, String> {
    match text {
        "hold" => Ok(Choice::Hold),
        "retry" => Ok(Choice::Retry),
        "lookup" => Ok(Choice::Lookup),
        _ => Err("must be \"hold\", \"retry\" or \"lookup\"".to_owned()),
    }
}

/// The settings of a route that this module needs.
pub(super) struct Route<'a> {
    /// Its own fields.
    pub(super) own: &'a file::Policy,
    /// How long its upstream may take.
    pub(super) timeout: Duration,
    /// Its upstream's name.
    pub(super) upstream: &'a str,
}

impl Builder<'_> {
    /// Reports the mistakes of `[policy]` alone, so that they are seen without a route.
    pub(super) fn check_on_unknown(&self, common: &Common<'_>) {
        let policy = &common.file.policy;
        if let Some(spanned) = &policy.on_unknown {
            self.checked(spanned, read_choice);
        }
        if let Some(raw) = &policy.lookup {
            let none = file::Policy::default();
            let nobody = Route { own: &none, timeout: SECOND, upstream: super::DEFAULT_UPSTREAM };
            self.lookup(raw, &nobody, common);
        }
    }

    pub(super) fn on_unknown(&self, route: &Route<'_>, common: &Common<'_>) -> OnUnknown {
        let policy = &common.file.policy;
        let spanned = route.own.on_unknown.as_ref().or(policy.on_unknown.as_ref());
        let choice =
            spanned.map_or(Some(Choice::Hold), |spanned| self.checked(spanned, read_choice));
        if let Some(unused) = &route.own.lookup
            && choice.is_some_and(|choice| choice != Choice::Lookup)
        {
            let wrong = "has no effect: on_unknown is not \"lookup\"";
            self.diagnostics.mistake(&unused.location, wrong);
        }
        match (choice, spanned) {
            (None | Some(Choice::Hold), _) => OnUnknown::Hold,
            (Some(Choice::Retry), _) => OnUnknown::Retry,
            (Some(Choice::Lookup), spanned) => {
                let raw = route.own.lookup.as_ref().or(policy.lookup.as_ref());
                if let (None, Some(spanned)) = (raw, spanned) {
                    let wrong = "\"lookup\" needs to know what to ask: lookup = { path = \"...\", found = \"...\" }";
                    self.diagnostics.mistake(&spanned.location, wrong);
                }
                let lookup = raw.and_then(|raw| self.lookup(raw, route, common));
                lookup.map_or(OnUnknown::Hold, |lookup| OnUnknown::Lookup(Arc::new(lookup)))
            }
        }
    }

    fn lookup(&self, raw: &file::Lookup, route: &Route<'_>, common: &Common<'_>) -> Option<Lookup> {
        self.above_zero(&raw.timeout);
        let upstream = self.named_upstream(raw.upstream.as_ref(), common);
        let read = |text: &str| match text {
            "GET" => Ok(Method::GET),
            "POST" => Ok(Method::POST),
            _ => Err("must be \"GET\" or \"POST\": a question that changes nothing".to_owned()),
        };
        let method = raw.method.as_ref().map_or(Some(Method::GET), |m| self.checked(m, read));
        let path = self.required(raw.path.as_ref(), &raw.location, "path");
        let found = self.required(raw.found.as_ref(), &raw.location, "found");
        let headers = self.question_headers(raw);
        let not_found = self.each(&raw.not_found, read_not_found);
        let spec = Spec {
            headers: headers?,
            method: method?,
            path: path?.value.clone(),
            found: found?.value.clone(),
            not_found,
            status: raw.status.as_ref().map_or(json!(200), |spanned| spanned.value.clone()),
            body: raw.body.as_ref().map(|spanned| spanned.value.clone()),
        };
        let template = Template::compile(&spec).map_err(|errors| {
            for error in errors {
                let name = error.field.split('.').next().unwrap_or_default();
                let field = match name {
                    "path" => raw.path.as_ref().map(|spanned| &spanned.location),
                    "found" => raw.found.as_ref().map(|spanned| &spanned.location),
                    "headers" => raw.headers.as_ref().map(|spanned| &spanned.location),
                    "status" => raw.status.as_ref().map(|spanned| &spanned.location),
                    _ => raw.body.as_ref().map(|spanned| &spanned.location),
                };
                self.diagnostics.mistake(field.unwrap_or(&raw.location), error.text);
            }
        });
        let after_loss = super::value_or(&raw.settle, route.timeout);
        Some(Lookup {
            template: template.ok()?,
            delay: LookupDelay {
                after_loss,
                after_lease: after_loss.saturating_add(route.timeout),
            },
            timeout: super::value_or(&raw.timeout, 5 * SECOND),
            upstream: upstream.unwrap_or_else(|| route.upstream.to_owned()),
        })
    }

    fn question_headers(&self, raw: &file::Lookup) -> Option<Vec<(HeaderName, String)>> {
        let Some(spanned) = &raw.headers else { return Some(Vec::new()) };
        let Value::Object(members) = &spanned.value else {
            self.diagnostics
                .mistake(&spanned.location, "must be a table: { X-Tenant-Id = \"{{ tenant }}\" }");
            return None;
        };
        let read = |(name, value): (&String, &Value)| {
            let header = read_header(name)?;
            if OURS.contains(&header) || header.as_str().starts_with("oncegate-") {
                return Err(format!("{name} is set by the gateway alone"));
            }
            let text = value.as_str().ok_or_else(|| format!("{name}: must be a text"))?;
            Ok((header, text.to_owned()))
        };
        let reported = |wrong: String| self.diagnostics.mistake(&spanned.location, wrong);
        members.iter().map(|member| read(member).map_err(reported).ok()).collect()
    }
}

fn read_not_found(text: &str) -> Result<StatusCode, String> {
    let code = text.parse().ok().filter(|code| (400..=499).contains(code));
    code.and_then(|code| StatusCode::from_u16(code).ok())
        .ok_or_else(|| format!("{text:?} is not a status from 400 to 499"))
}
