//! `POST /api/v1/explain`, and the question and answer of `oncegate explain`.
//!
//! A question has a request, and optionally another request (only the parts that differ) or a record to compare with. Nothing
//! is reserved, forwarded or stored. The answer shows the canonical form, so it holds the content of the body.

use std::collections::BTreeMap;
use std::panic::resume_unwind;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tokio::task::JoinError;

use super::view::time;
use crate::explain::{self, Compared, Explain, Explained, Sample};
use crate::record::RecordId;
use crate::store::{self, Store};

/// The question.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExplainRequest {
    /// The method; left out: POST.
    #[serde(default)]
    pub method: Option<String>,
    /// Path and query.
    pub path: String,
    /// Headers.
    #[serde(default)]
    pub headers: Headers,
    /// The body, as text.
    #[serde(default)]
    pub body: Option<String>,
    /// The body, in base64.
    #[serde(default)]
    pub body_base64: Option<String>,
    /// Another request to compare with.
    #[serde(default)]
    pub other: Option<OtherRequest>,
    /// The id of a record to compare with.
    #[serde(default)]
    pub record: Option<String>,
}

/// Another request. Parts that are left out are as in the first.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OtherRequest {
    /// The method.
    #[serde(default)]
    pub method: Option<String>,
    /// Path and query.
    #[serde(default)]
    pub path: Option<String>,
    /// Headers. Each replaces the headers of its name.
    #[serde(default)]
    pub headers: Headers,
    /// The body, as text.
    #[serde(default)]
    pub body: Option<String>,
    /// The body, in base64.
    #[serde(default)]
    pub body_base64: Option<String>,
}

/// Headers as an object, or as a list of pairs if a name is repeated.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum Headers {
    /// By name.
    Named(BTreeMap<String, String>),
    /// Name and value.
    Listed(Vec<(String, String)>),
}

impl Default for Headers {
    fn default() -> Self {
        Self::Listed(Vec::new())
    }
}

impl Headers {
    fn pairs(self) -> Vec<(String, String)> {
        match self {
            Self::Named(map) => map.into_iter().collect(),
            Self::Listed(list) => list,
        }
    }
}

/// A request as text. In another request, parts that are left out are as in the first.
#[derive(Clone, Debug, Default)]
pub struct RequestText {
    /// The method; left out: POST.
    pub method: Option<String>,
    /// Path and query.
    pub path: Option<String>,
    /// Headers.
    pub headers: Vec<(String, String)>,
    /// The body; left out: none.
    pub body: Option<Bytes>,
}

impl RequestText {
    /// Makes another request from this one by replacing the parts that `other` has.
    fn but(&self, other: Self) -> Self {
        let named = |name: &str| {
            other.headers.iter().any(|(known, _)| known.trim().eq_ignore_ascii_case(name.trim()))
        };
        let mut headers = self.headers.clone();
        headers.retain(|(name, _)| !named(name));
        headers.extend(other.headers);
        Self {
            method: other.method.or_else(|| self.method.clone()),
            path: other.path.or_else(|| self.path.clone()),
            headers,
            body: other.body.or_else(|| self.body.clone()),
        }
    }

    fn sample(self) -> Result<Sample, String> {
        let method = self.method.as_deref().unwrap_or("POST");
        let path = self.path.as_deref().unwrap_or("/");
        Sample::parse(method, path, &self.headers, self.body.unwrap_or_default())
    }
}

/// A valid question.
#[derive(Clone, Debug)]
pub struct ExplainQuery {
    request: Sample,
    other: Option<Sample>,
    record: Option<RecordId>,
}

impl ExplainQuery {
    /// A question about a request, and optionally about another one or a record.
    ///
    /// # Errors
    /// What is wrong with the first part that no request can have.
    pub fn new(
        request: RequestText,
        other: Option<RequestText>,
        record: Option<RecordId>,
    ) -> Result<Self, String> {
        let other = other.map(|other| request.but(other).sample()).transpose();
        let other = other.map_err(|wrong| format!("the other request: {wrong}"))?;
        Ok(Self { request: request.sample()?, other, record })
    }
}

impl ExplainRequest {
    /// Reads it.
    ///
    /// # Errors
    /// What is wrong with the first part that cannot be read.
    pub fn read(self) -> Result<ExplainQuery, String> {
        let request = RequestText {
            method: self.method,
            path: Some(self.path),
            headers: self.headers.pairs(),
            body: body(self.body, self.body_base64)?,
        };
        let other = match self.other {
            None => None,
            Some(OtherRequest { method, path, headers, body: text, body_base64 }) => {
                let body = body(text, body_base64)?;
                Some(RequestText { method, path, headers: headers.pairs(), body })
            }
        };
        let record = match self.record {
            None => None,
            Some(id) => Some(id.parse().map_err(|_| format!("record: {id:?} is not a UUID"))?),
        };
        ExplainQuery::new(request, other, record)
    }
}

fn body(text: Option<String>, base64: Option<String>) -> Result<Option<Bytes>, String> {
    match (text, base64) {
        (Some(_), Some(_)) => {
            Err("body and body_base64 cannot both be set; keep one of them".to_owned())
        }
        (Some(text), None) => Ok(Some(text.into())),
        (None, Some(base64)) => {
            let bytes = STANDARD.decode(base64.trim());
            bytes.map(|bytes| Some(bytes.into())).map_err(|error| format!("body_base64: {error}"))
        }
        (None, None) => Ok(None),
    }
}

/// The answer.
#[derive(Clone, Debug, Serialize)]
pub struct ExplainResponse {
    /// How the gateway reads the request.
    pub request: Explained,
    /// How the gateway reads the other request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub other: Option<Explained>,
    /// How the two compare, if both could be read completely.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compared: Option<Compared>,
    /// How the request compares with a record.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub record: Option<RecordComparison>,
}

/// A record that a request was compared with.
#[derive(Clone, Debug, Serialize)]
pub struct RecordComparison {
    /// Its id.
    pub id: String,
    /// Its tenant.
    pub tenant_id: String,
    /// Its operation.
    pub operation: String,
    /// Its key.
    pub key: String,
    /// Its status, as stored.
    pub status: &'static str,
    /// The canonical hash of its request.
    pub request_hash: String,
    /// When it was reserved.
    pub created_at: String,
    /// How they compare, if the request could be read completely.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compared: Option<Compared>,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ExplainError {
    /// There is no such record.
    #[error("there is no record {0}")]
    NoRecord(RecordId),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] store::Error),
}

/// Answers a question. Asks the store only if a record is named.
///
/// # Errors
/// See [`ExplainError`].
pub async fn answer(
    by: &dyn Explain,
    store: Option<&dyn Store>,
    asked: ExplainQuery,
) -> Result<ExplainResponse, ExplainError> {
    let ExplainQuery { request, other, record } = asked;
    let row = match (record, store) {
        (Some(id), Some(store)) => {
            Some(store.show_record(id).await?.ok_or(ExplainError::NoRecord(id))?)
        }
        (Some(id), None) => return Err(ExplainError::NoRecord(id)),
        (None, _) => None,
    };
    let request = by.explain(request).await;
    let other = match other {
        Some(other) => Some(by.explain(other).await),
        None => None,
    };
    let (request, other, compared) = match other {
        Some(other) => {
            let (request, other, compared) = compare(request, other).await;
            (request, Some(other), compared)
        }
        None => (request, None, None),
    };
    let record = row.map(|row| RecordComparison {
        id: row.id.to_string(),
        tenant_id: row.scope.tenant.to_string(),
        operation: row.scope.operation.to_string(),
        key: row.scope.key.to_string(),
        status: row.status.as_str(),
        request_hash: explain::HashView::from(&row.fingerprint).canonical,
        created_at: time(row.created_at),
        compared: explain::against(&request, &row.scope, &row.fingerprint, row.status),
    });
    Ok(ExplainResponse { request, other, compared, record })
}

/// Looks for a difference on a blocking thread, because it takes a while in large bodies.
async fn compare(request: Explained, other: Explained) -> (Explained, Explained, Option<Compared>) {
    let compare = move || {
        let compared = explain::compare(&request, &other);
        (request, other, compared)
    };
    match tokio::task::spawn_blocking(compare).await.map_err(JoinError::try_into_panic) {
        Ok(compared) => compared,
        Err(Ok(panic)) => resume_unwind(panic),
        // The runtime shuts down.
        Err(Err(_)) => std::future::pending().await,
    }
}
