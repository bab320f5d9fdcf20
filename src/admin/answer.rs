//! The answers of the admin listener: escaped JSON, and its table of problems.

use std::future::Future;
use std::time::Duration;

use axum::extract::Path;
use axum::extract::rejection::PathRejection;
use axum::response::{IntoResponse, Response};
use http::header::{CONTENT_TYPE, WWW_AUTHENTICATE};
use http::{HeaderValue, StatusCode};
use serde::Serialize;
use serde_json::{Value, json};
use uuid::Uuid;

use super::view;
use crate::record::RecordId;
use crate::store::{self, Objection};

/// How long the store may take for a list or a record.
pub(super) const READ_TIMEOUT: Duration = Duration::from_secs(10);

pub(super) fn id_of(path: Result<Path<String>, PathRejection>) -> Result<Uuid, Problem> {
    let Path(text) = path.map_err(|_| Problem::Id)?;
    text.parse().map_err(|_| Problem::Id)
}

/// Waits for the store for a bounded time.
pub(super) async fn in_time<T>(
    answer: impl Future<Output = Result<T, store::Error>>,
) -> Result<T, Problem> {
    match tokio::time::timeout(READ_TIMEOUT, answer).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => {
            let cause = std::error::Error::source(&error).map(ToString::to_string);
            tracing::warn!(%error, cause, "the admin listener could not read the store");
            Err(match error {
                store::Error::Unavailable(_) | store::Error::InDoubt(_) | store::Error::Late => {
                    Problem::StoreUnavailable
                }
                store::Error::Refused(_) | store::Error::Unreadable(_) => Problem::StoreRefused,
            })
        }
        Err(_) => Err(Problem::StoreUnavailable),
    }
}

/// An answer in escaped JSON; see [`view::to_json`].
pub(super) struct Json<T = Value>(pub(super) T);

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        as_json(StatusCode::OK, "application/json", &self.0)
    }
}

pub(super) fn as_json<T: Serialize>(status: StatusCode, kind: &'static str, value: &T) -> Response {
    match view::to_json(value) {
        Ok(mut text) => {
            text.push('\n');
            (status, [(CONTENT_TYPE, kind)], text).into_response()
        }
        Err(error) => {
            tracing::error!(%error, "an admin answer could not be written as JSON");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

/// The problems that this listener answers with.
#[derive(Debug)]
pub(super) enum Problem {
    Unauthorized,
    ForeignHost,
    Query(Vec<String>),
    Question(String),
    Action(Vec<String>),
    /// An action that was not done; `more`: an object of what else there is to say.
    Refused {
        name: &'static str,
        detail: String,
        more: Value,
    },
    InDoubt,
    Id,
    NotFound,
    NoSink,
    Already,
    NoSuchPage,
    MethodNotAllowed,
    StoreUnavailable,
    StoreRefused,
}

impl Problem {
    /// Why a record was left as it is.
    pub(super) fn of_record(record: RecordId, why: &Objection) -> Self {
        let refused = |name, detail, more| Self::Refused { name, detail, more };
        match why {
            Objection::NotFound => Self::NotFound,
            Objection::Running { owner, since } => {
                let (owner, since) = (owner.to_string(), view::time(*since));
                let detail = format!(
                    "Record {record} is being worked on by {owner} since {since}, and that process lives. Nothing was \
                     changed: wait for its outcome, or stop that process and let its lease run out."
                );
                refused("running", detail, json!({ "owner": owner, "since": since }))
            }
            Objection::IsCompleted => {
                let detail = format!(
                    "Record {record} is completed: its answer is replayed. Nothing was changed. A release with \
                     `\"completed\": true` forgets it, so that the next request executes again."
                );
                refused("completed", detail, Value::Null)
            }
            Objection::Moved => {
                let detail = format!(
                    "Record {record} changed since you looked at it. Nothing was changed by you: look at it again."
                );
                refused("moved", detail, Value::Null)
            }
        }
    }

    fn entry(&self) -> (StatusCode, &'static str, &'static str) {
        match self {
            Self::Unauthorized => (
                StatusCode::UNAUTHORIZED,
                "unauthorized",
                "Send the admin token: `Authorization: Bearer TOKEN`.",
            ),
            Self::ForeignHost => (
                StatusCode::FORBIDDEN,
                "foreign-host",
                "Without an admin token, the listener answers only to the names localhost, 127.0.0.1 and [::1], and to no page of another origin.",
            ),
            Self::Query(_) => (
                StatusCode::BAD_REQUEST,
                "query-invalid",
                "Correct the query; `errors` names each mistake.",
            ),
            Self::Question(_) => (
                StatusCode::BAD_REQUEST,
                "question-invalid",
                "Send a JSON object with the documented fields; `errors` says what is wrong.",
            ),
            Self::Action(_) => (
                StatusCode::BAD_REQUEST,
                "action-invalid",
                "Send a JSON object that describes the action; `errors` says what is wrong.",
            ),
            Self::Refused { name, .. } => (StatusCode::CONFLICT, name, ""),
            Self::InDoubt => (
                StatusCode::SERVICE_UNAVAILABLE,
                "in-doubt",
                "It is not known whether the action was done, or only a part of it: check before you repeat it.",
            ),
            Self::Id => (StatusCode::BAD_REQUEST, "id-invalid", "An id is a UUID."),
            Self::NotFound => (
                StatusCode::NOT_FOUND,
                "not-found",
                "Nothing has this id: it never existed, or its retention is over.",
            ),
            Self::NoSink => (
                StatusCode::NOT_FOUND,
                "no-such-sink",
                "Neither the configuration nor a pending event names this sink.",
            ),
            Self::Already => (
                StatusCode::CONFLICT,
                "already-so",
                "The sink is already paused, or already open: nothing was changed.",
            ),
            Self::NoSuchPage => {
                (StatusCode::NOT_FOUND, "no-such-page", "The admin listener has no such page.")
            }
            Self::MethodNotAllowed => (
                StatusCode::METHOD_NOT_ALLOWED,
                "method-not-allowed",
                "This page has another method: see docs/operations.md.",
            ),
            Self::StoreUnavailable => (
                StatusCode::SERVICE_UNAVAILABLE,
                "store-unavailable",
                "The database does not answer: try again, and see /readyz and the log.",
            ),
            Self::StoreRefused => (
                StatusCode::INTERNAL_SERVER_ERROR,
                "store-refused",
                "The database refused the query: see the log.",
            ),
        }
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let (status, name, detail) = self.entry();
        let detail = if let Self::Refused { detail, .. } = &self { detail } else { detail };
        let mut body = json!({
            "type": format!("urn:oncegate:problem:{name}"),
            "title": name.replace('-', " "),
            "status": status.as_u16(),
            "detail": detail,
        });
        if let (Self::Refused { more: Value::Object(more), .. }, Some(fields)) =
            (&self, body.as_object_mut())
        {
            fields.extend(more.clone());
        }
        let errors = if let Self::Query(errors) | Self::Action(errors) = &self {
            json!(errors)
        } else if let Self::Question(error) = &self {
            json!([error])
        } else {
            Value::Null
        };
        if let (false, Some(fields)) = (errors.is_null(), body.as_object_mut()) {
            fields.insert("errors".to_owned(), errors);
        }
        let mut response = as_json(status, "application/problem+json", &body);
        if matches!(self, Self::Unauthorized) {
            let challenge = HeaderValue::from_static("Bearer realm=\"oncegate\"");
            response.headers_mut().insert(WWW_AUTHENTICATE, challenge);
        }
        response
    }
}
