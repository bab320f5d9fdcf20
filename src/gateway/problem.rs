//! Every answer of the gateway itself: one table, RFC 9457 documents.
//!
//! A detail says what to do next. It shows no stored content, no SQL, no host of the inside and not which field differed.

use std::borrow::Cow;
use std::time::Duration;

use http::header::{CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{HeaderValue, Response, StatusCode};
use serde::Serialize;

use super::headers::own::name_record;
use super::upstream::{Body, whole};
use crate::record::{Operation, RecordId};
use crate::scope;
use crate::telemetry::Reply;

/// What the caller may do with its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Retry {
    /// Send the same request again under the same key.
    SameKey,
    /// This needs another key.
    NewKey,
    /// Sending it again is no use.
    No,
}

impl Retry {
    fn as_str(self) -> &'static str {
        match self {
            Self::SameKey => "same-key",
            Self::NewKey => "new-key",
            Self::No => "no",
        }
    }
}

/// A row of the table.
struct Row {
    /// The last part of `type`.
    id: &'static str,
    status: StatusCode,
    title: &'static str,
    detail: &'static str,
    retry: Retry,
    /// Bounds of `Retry-After` in whole seconds, jittered between them so that those who wait do not come back at one instant.
    retry_after: Option<(u32, u32)>,
    counted: Reply,
}

macro_rules! table {
    ($($name:ident = $id:literal, $status:ident, $title:literal, $retry:ident, $after:expr, $counted:ident, $detail:literal;)*) => {
        /// The names of the gateway's own answers.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(super) enum Name {
            $(#[doc = $title] $name,)*
        }

        const TABLE: &[Row] = &[$(Row {
            id: $id,
            status: StatusCode::$status,
            title: $title,
            detail: $detail,
            retry: Retry::$retry,
            retry_after: $after,
            counted: Reply::$counted,
        },)*];

        impl Name {
            const fn row(self) -> &'static Row {
                #[expect(clippy::indexing_slicing, reason = "the table has a row for each variant, in their order")]
                &TABLE[self as usize]
            }

            /// The last part of its `type`.
            pub(super) const fn as_str(self) -> &'static str {
                self.row().id
            }
        }
    };
}

table! {
    RequestRefused = "request-refused", BAD_REQUEST, "The request is not acceptable", No, None, Invalid,
        "The request's framing or target is not acceptable.";
    UpgradeRefused = "upgrade-refused", BAD_REQUEST, "This route does not switch protocols", No, None, Invalid,
        "A request on a protected route is answered once, by HTTP: it cannot be switched to another protocol. Nothing was reserved or forwarded; the key is free. Send it without `Upgrade`.";
    PathAmbiguous = "path-ambiguous", BAD_REQUEST, "The path can be read in two ways", No, None, Invalid,
        "Decoded before and after it is split, the path names different protected routes. Send it in its plain spelling.";
    KeyMissing = "key-missing", BAD_REQUEST, "The idempotency key is missing", NewKey, None, Invalid,
        "Send the key's header with one key for this intent, and the same key with every retry of it.";
    KeyInvalid = "key-invalid", BAD_REQUEST, "The idempotency key is not valid", NewKey, None, Invalid,
        "A key has 1 to 255 characters of visible ASCII.";
    TenantMissing = "tenant-missing", BAD_REQUEST, "The tenant is missing", No, None, Invalid,
        "The request does not say whose it is.";
    TokenInvalid = "token-invalid", UNAUTHORIZED, "The token is not valid", SameKey, None, Invalid,
        "Send the request again with a valid token.";
    TokenUnverified = "token-unverified", SERVICE_UNAVAILABLE, "The token could not be checked", SameKey, Some((1, 5)), Unchecked,
        "The keys that tokens are checked with are not known at the moment. Nothing was reserved or forwarded. Send it again with the same key.";
    BodyTooLarge = "body-too-large", PAYLOAD_TOO_LARGE, "The body is too large", No, None, Invalid,
        "The body is larger than this route takes. Nothing was reserved or forwarded; the key is free.";
    BodyIncomplete = "body-incomplete", BAD_REQUEST, "The body did not arrive", SameKey, None, Invalid,
        "The request's body ended early, or came too slowly. Nothing was reserved or forwarded; send it again.";
    RequestMismatch = "request-mismatch", CONFLICT, "The key was used for another request", NewKey, None, Mismatch,
        "Under this key another request was sent. Nothing was done. If this is a new intent, send it with a new key; if it is a retry, send exactly what was sent first.";
    InProgress = "in-progress", CONFLICT, "The request is still running", SameKey, Some((1, 3)), InProgress,
        "The first request under this key has not ended yet. Send it again with the same key after the time in Retry-After.";
    OutcomeUnknown = "outcome-unknown", CONFLICT, "It is not known whether the request was executed", SameKey, Some((60, 90)), Held,
        "An execution under this key began and its end is not known. It is not executed again by itself. Keep the key, ask the operator with the record's id, and do not send the same intent under a new key.";
    ResponseNotRetained = "response-not-retained", CONFLICT, "The request was executed; its answer is not kept", No, None, NotRetained,
        "The first request under this key was executed. Its answer was too large to keep. Read the result from the API itself.";
    NotAcceptable = "not-acceptable", NOT_ACCEPTABLE, "The answer has no form that the request accepts", SameKey, None, NotAcceptable,
        "The first request under this key was executed. Its answer is kept in a content coding that this request does not accept.";
    ReplayForbidden = "replay-forbidden", FORBIDDEN, "The answer is not for this caller", No, None, Forbidden,
        "Under this key stands a request of another caller. Nothing was done. If this is a new intent, send it with a new key.";
    ReplayUnauthorized = "replay-unauthorized", UNAUTHORIZED, "The answer is not for this credential", SameKey, None, Forbidden,
        "The request was executed before. Its answer is given only to a caller who may read it: send the request again with a valid credential.";
    ReplayUnchecked = "replay-unchecked", SERVICE_UNAVAILABLE, "It could not be asked who may read the answer", SameKey, Some((1, 5)), Unchecked,
        "The request was executed before, and nobody says at the moment whether this caller may read its answer. Send it again with the same key.";
    UpstreamUnreachable = "upstream-unreachable", BAD_GATEWAY, "The service behind the gateway cannot be reached", SameKey, None, Released,
        "Nothing was sent to the service; the key is free. Send it again with the same key.";
    UpstreamFailed = "upstream-failed", BAD_GATEWAY, "The service's answer was lost", SameKey, None, Unknown,
        "The request was sent and no complete answer came back: it may have been executed. A retry with the same key is never executed unnoticed.";
    UpstreamTimeout = "upstream-timeout", GATEWAY_TIMEOUT, "The service did not answer in time", SameKey, None, Unknown,
        "The request was sent and no answer came in time: it may have been executed. A retry with the same key is never executed unnoticed.";
    RequestNotStorable = "request-not-storable", BAD_REQUEST, "The request cannot be stored", No, None, Invalid,
        "The gateway's database refuses to hold what has to be kept of this request, its tenant or its key for example. Nothing was reserved or forwarded; sending it again is no use. Ask the operator: the gateway's log has the reason.";
    GatewayFailed = "gateway-failed", INTERNAL_SERVER_ERROR, "The gateway failed", SameKey, None, Failed,
        "A mistake of the gateway ended this request before anything of it was sent to the service. Send it again with the same key.";
    Overloaded = "overloaded", SERVICE_UNAVAILABLE, "Too many requests are in flight", SameKey, Some((1, 5)), Overloaded,
        "A limit of the gateway is reached. Nothing was reserved or forwarded. Send it again with the same key.";
    StoreUnavailable = "store-unavailable", SERVICE_UNAVAILABLE, "The request could not be reserved", SameKey, Some((1, 5)), StoreUnavailable,
        "The gateway's store is not available, so nothing was forwarded. Send it again with the same key.";
}

/// An answer of the gateway itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Problem {
    name: Name,
    status: StatusCode,
    detail: Cow<'static, str>,
    record: Option<RecordId>,
    /// From and to how many seconds.
    retry_after: Option<(u32, u32)>,
    /// Values of `WWW-Authenticate`.
    challenges: Vec<HeaderValue>,
}

#[derive(Serialize)]
struct Document<'a> {
    r#type: String,
    title: &'a str,
    status: u16,
    detail: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    operation: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    record: Option<String>,
    retry: &'a str,
}

impl Problem {
    /// As the table has it.
    pub(super) fn new(name: Name) -> Self {
        let row = name.row();
        let detail = Cow::Borrowed(row.detail);
        Self {
            name,
            status: row.status,
            detail,
            record: None,
            retry_after: row.retry_after,
            challenges: Vec::new(),
        }
    }

    /// With this status instead of the table's.
    pub(super) fn status(mut self, status: StatusCode) -> Self {
        self.status = status;
        self
    }

    /// With a detail of its own.
    pub(super) fn detail(mut self, detail: impl Into<Cow<'static, str>>) -> Self {
        self.detail = detail.into();
        self
    }

    /// To be sent again after this long, or a little longer.
    pub(super) fn after(mut self, wait: Duration) -> Self {
        let seconds = u32::try_from(wait.as_secs().saturating_add(1)).unwrap_or(u32::MAX);
        self.retry_after = Some((seconds, seconds.saturating_add(seconds / 4 + 1)));
        self
    }

    /// With what says which credential is asked for.
    pub(super) fn challenges(mut self, challenges: impl IntoIterator<Item = HeaderValue>) -> Self {
        self.challenges.extend(challenges);
        self
    }

    /// About this record.
    pub(super) fn record(mut self, record: impl Into<Option<RecordId>>) -> Self {
        self.record = record.into();
        self
    }

    /// A refusal of the scope's reading, by this recipe: it names the headers to send.
    pub(super) fn of_scope(refusal: scope::Refusal, recipe: &scope::Recipe) -> Self {
        match refusal {
            scope::Refusal::KeyMissing => Self::new(Name::KeyMissing).detail(format!(
                "Send a header `{}` with one key for this intent, and the same key with every retry of it.",
                recipe.key_header
            )),
            scope::Refusal::KeyInvalid(why) => {
                Self::new(Name::KeyInvalid).detail(format!("The idempotency key {why}."))
            }
            scope::Refusal::TenantMissing(why) => {
                let place = match &recipe.tenant {
                    scope::Source::Header(name) => format!("the header `{name}`"),
                    scope::Source::Path(_) => "the path".to_owned(),
                    scope::Source::Host => "the header `host`".to_owned(),
                    scope::Source::BasicUser | scope::Source::Credential => {
                        "the header `authorization`".to_owned()
                    }
                    scope::Source::JwtClaim(_) => {
                        "the token in the header `authorization`".to_owned()
                    }
                    scope::Source::Fixed(_) => "the configuration".to_owned(),
                };
                let detail = format!("Whose a request is, is read from {place}: {why}.");
                Self::new(Name::TenantMissing).detail(detail)
            }
            // RFC 6750, 3.1: a caller that sent no token gets no error code.
            scope::Refusal::TokenMissing => Self::new(Name::TokenInvalid)
                .detail("Send a header `authorization` with a Bearer token.")
                .challenges([HeaderValue::from_static("Bearer")]),
            scope::Refusal::TokenInvalid(why) => Self::new(Name::TokenInvalid)
                .detail(format!("The token {why}. Send the request again with a valid one."))
                .challenges([HeaderValue::from_static("Bearer error=\"invalid_token\"")]),
            scope::Refusal::TokenUnverified => Self::new(Name::TokenUnverified),
        }
    }

    /// Which one it is.
    pub(super) fn name(&self) -> Name {
        self.name
    }

    /// As what it counts.
    pub(super) fn counted(&self) -> Reply {
        self.name.row().counted
    }

    /// What to do next.
    pub(super) fn advice(&self) -> &str {
        &self.detail
    }

    /// The document, about a request of this operation.
    pub(super) fn document(&self, operation: Option<&Operation>) -> serde_json::Value {
        serde_json::to_value(self.fields(operation)).unwrap_or_default()
    }

    fn fields<'a>(&'a self, operation: Option<&'a Operation>) -> Document<'a> {
        let row = self.name.row();
        Document {
            r#type: format!("urn:oncegate:problem:{}", row.id),
            title: row.title,
            status: self.status.as_u16(),
            detail: &self.detail,
            operation: operation.map(Operation::as_str),
            record: self.record.map(|record| record.to_string()),
            retry: row.retry.as_str(),
        }
    }

    /// The answer, about a request of this operation.
    pub(super) fn into_response(self, operation: Option<&Operation>) -> Response<Body> {
        let text = serde_json::to_vec(&self.fields(operation)).unwrap_or_default();
        let mut response = Response::new(whole(text.into()));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if let Some(record) = self.record {
            name_record(headers, record);
        }
        for challenge in self.challenges {
            headers.append(WWW_AUTHENTICATE, challenge);
        }
        if let Some((least, most)) = self.retry_after {
            headers.insert(RETRY_AFTER, HeaderValue::from(fastrand::u32(least..=most)));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conflicts_can_be_told_apart_by_type_and_retry() {
        let conflicts: Vec<_> =
            TABLE.iter().filter(|row| row.status == StatusCode::CONFLICT).collect();
        let mut ids: Vec<_> = conflicts.iter().map(|row| row.id).collect();
        ids.dedup();
        assert_eq!(ids.len(), 4);
        for row in TABLE {
            assert!(row.retry_after.is_none_or(|(least, most)| least >= 1 && most <= 120));
        }
    }
}
