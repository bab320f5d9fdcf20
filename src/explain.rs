//! Explains how the gateway reads a request: its route and why, its scope, its canonical form and hash. Compares two requests.
//!
//! This module decides nothing. The gateway reads a [`Sample`] like a request ([`Explain`]), and this module describes the
//! result. The fingerprints decide whether two requests are the same; the first difference of the canonical forms only shows
//! where they differ.
//!
//! A canonical form holds the content of the request, also secrets. It is for operators only, and cut to a limit.

mod difference;
mod text;

use async_trait::async_trait;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::header::HOST;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Uri};
use serde::Serialize;
use serde_json::Value;

use crate::fingerprint::{self, Recipe, show};
use crate::record::{Fingerprint, Scope, Status, hex};
use crate::route::Look;
use crate::scope::DERIVED;

pub use self::difference::{Difference, difference};

/// How much of a canonical body is shown, in bytes.
pub const SHOWN_MAX: usize = 64 * 1024;

/// A request to explain.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Its method.
    pub method: Method,
    /// Its target: path and query.
    pub target: Uri,
    /// Its headers.
    pub headers: HeaderMap,
    /// Its whole body.
    pub body: Bytes,
}

impl Sample {
    /// Makes a sample from text. Without a host it is a request to this machine.
    ///
    /// # Errors
    /// What is wrong with the first part that no request can have.
    pub fn parse(
        method: &str,
        target: &str,
        headers: &[(String, String)],
        body: Bytes,
    ) -> Result<Self, String> {
        let method = Method::from_bytes(method.as_bytes())
            .map_err(|_| format!("{method:?} is not a method"))?;
        let target = target
            .parse()
            .map_err(|error| format!("{target:?} is not a path with a query: {error}"))?;
        let mut read = HeaderMap::new();
        for (name, value) in headers {
            let name = HeaderName::from_bytes(name.trim().as_bytes())
                .map_err(|_| format!("{name:?} is not the name of a header"))?;
            let value = HeaderValue::from_bytes(value.trim().as_bytes())
                .map_err(|_| format!("the value of the header {name} holds control characters"))?;
            read.append(name, value);
        }
        read.entry(HOST).or_insert(HeaderValue::from_static("localhost"));
        Ok(Self { method, target, headers: read, body })
    }
}

/// Explains requests.
#[async_trait]
pub trait Explain: Send + Sync {
    /// Reads a request as the gateway would. Nothing is reserved, forwarded or stored.
    async fn explain(&self, sample: Sample) -> Explained;
}

/// What the gateway does with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Disposition {
    /// It is executed once under its key.
    Protected,
    /// Its route only observes: it is forwarded.
    Observed,
    /// It passes through: no route names it.
    PassesWithoutRoute,
    /// It passes through: it has no key and needs none.
    PassesWithoutKey,
    /// It is answered with a problem.
    Refused,
}

/// The scope of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ScopeView {
    /// The tenant.
    pub tenant_id: String,
    /// The operation.
    pub operation: String,
    /// The key.
    pub key: String,
    /// Whether the key was derived from parts of the request.
    pub derived: bool,
}

/// The hashes, in hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HashView {
    /// The hash of the canonical form: `request_hash` of a record.
    pub canonical: String,
    /// The hash of the request as received.
    pub raw: String,
    /// Names version and settings.
    pub recipe: String,
}

impl From<&Fingerprint> for HashView {
    fn from(fingerprint: &Fingerprint) -> Self {
        Self {
            canonical: hex(&fingerprint.canonical),
            raw: hex(&fingerprint.raw),
            recipe: hex(&fingerprint.recipe),
        }
    }
}

/// The parts of a request that count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Canonical {
    method: String,
    path: String,
    /// Decoded pairs in their canonical order; `Err`: they cannot be decoded and count as received.
    query: Result<Vec<text::Pair>, String>,
    content_type: String,
    headers: Vec<(HeaderName, Vec<Vec<u8>>)>,
    /// The name of the form; `None`: the bytes count as they are.
    form: Option<&'static str>,
    body: Vec<u8>,
}

impl Canonical {
    /// Reads the parts of a request as the fingerprint does.
    #[must_use]
    pub fn of(recipe: &Recipe, parts: &fingerprint::Parts<'_>) -> Self {
        let (path, query) = parts.target.split_once('?').unwrap_or((parts.target, ""));
        let pairs = show::query(recipe, query);
        let values = |name: &HeaderName| {
            let values = parts.headers.get_all(name).iter();
            (name.clone(), values.map(|value| value.as_bytes().to_vec()).collect())
        };
        let (form, body) = match show::canonical(recipe, parts) {
            Some((form, body)) => (Some(form), body),
            None => (None, show::bytes(recipe, parts)),
        };
        Self {
            method: parts.method.to_string(),
            path: path.to_owned(),
            query: pairs.as_deref().and_then(text::pairs).ok_or_else(|| query.to_owned()),
            content_type: show::content_type(parts.headers),
            headers: recipe.headers().iter().map(values).collect(),
            form,
            body,
        }
    }
}

/// A canonical form for output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CanonicalView {
    /// The method.
    pub method: String,
    /// The path as received.
    pub path: String,
    /// The query's pairs, in their canonical order.
    pub query: Vec<(String, String)>,
    /// The media type without its parameters.
    pub content_type: String,
    /// The headers that the route names.
    pub headers: Vec<(String, String)>,
    /// The form in which the body counts: `json`, `form`, ...; `bytes`: as received.
    pub body_form: &'static str,
    /// The body in that form, as text.
    pub body: String,
    /// Whether `body` is base64.
    pub body_is_base64: bool,
    /// The length of the whole form; `body` is cut at a bound.
    pub body_bytes: usize,
}

impl From<&Canonical> for CanonicalView {
    fn from(canonical: &Canonical) -> Self {
        let readable = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let query = match &canonical.query {
            Ok(pairs) => pairs.iter().map(|(n, v)| (readable(n), readable(v))).collect(),
            Err(query) => vec![(query.clone(), String::new())],
        };
        let lines = |(name, values): &(HeaderName, Vec<Vec<u8>>)| {
            let name = name.to_string();
            values.iter().map(|value| (name.clone(), readable(value))).collect::<Vec<_>>()
        };
        let shown = text::shown(canonical.form, &canonical.body, SHOWN_MAX);
        let (body, body_is_base64) = match shown {
            Ok(text) => (text, false),
            Err(bytes) => (STANDARD.encode(bytes), true),
        };
        Self {
            method: canonical.method.clone(),
            path: canonical.path.clone(),
            query,
            content_type: canonical.content_type.clone(),
            headers: canonical.headers.iter().flat_map(lines).collect(),
            body_form: canonical.form.unwrap_or("bytes"),
            body,
            body_is_base64,
            body_bytes: canonical.body.len(),
        }
    }
}

/// How the gateway reads a request.
#[derive(Clone, Debug, Serialize)]
pub struct Explained {
    /// What the gateway does with it.
    pub becomes: Disposition,
    /// Why, in one sentence.
    pub why: String,
    /// The routes of its path in both readings, and routes that nearly match.
    #[serde(flatten)]
    pub look: Look,
    /// The answer, if it is refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<Value>,
    /// Its scope.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scope: Option<ScopeView>,
    /// Its hashes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hash: Option<HashView>,
    /// Its canonical form.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub canonical: Option<CanonicalView>,
    #[serde(skip)]
    read: Option<Read>,
}

/// The parts of a request that could be read.
#[derive(Clone, Debug)]
pub struct Read {
    /// Its scope.
    pub scope: Scope,
    /// Its hashes.
    pub fingerprint: Fingerprint,
    /// The canonical form.
    pub canonical: Canonical,
}

impl Explained {
    /// The explanation of a request of which only the path was read.
    #[must_use]
    pub fn of(becomes: Disposition, why: impl Into<String>, look: Look) -> Self {
        Self {
            becomes,
            why: why.into(),
            look,
            problem: None,
            scope: None,
            hash: None,
            canonical: None,
            read: None,
        }
    }

    /// Adds the answer that the request gets.
    #[must_use]
    pub fn problem(mut self, document: Value) -> Self {
        self.problem = Some(document);
        self
    }

    /// Adds the parts that could be read.
    #[must_use]
    pub fn read(mut self, read: Read) -> Self {
        let Scope { tenant, operation, key } = &read.scope;
        self.scope = Some(ScopeView {
            tenant_id: tenant.to_string(),
            operation: operation.to_string(),
            key: key.to_string(),
            derived: key.as_str().starts_with(DERIVED),
        });
        self.hash = Some(HashView::from(&read.fingerprint));
        self.canonical = Some(CanonicalView::from(&read.canonical));
        self.read = Some(read);
        self
    }
}

/// How two fingerprints compare.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Compared {
    /// Whether tenant, operation and key are the same.
    pub same_scope: bool,
    /// Whether they are the same request.
    pub same_request: bool,
    /// The hash that decides: `canonical`, or `raw` if the recipes differ.
    pub decided_by: &'static str,
    /// Whether the canonical hashes are equal.
    pub same_canonical: bool,
    /// Whether the hashes of the requests as received are equal.
    pub same_raw: bool,
    /// Whether both were made by the same version and settings.
    pub same_recipe: bool,
    /// The first difference, if it can be found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub difference: Option<Difference>,
    /// The result in one sentence.
    pub verdict: String,
}

fn compared(scopes: [&Scope; 2], prints: [&Fingerprint; 2]) -> Compared {
    let ([one, other], [a, b]) = (scopes, prints);
    let same_recipe = a.recipe == b.recipe;
    Compared {
        same_scope: one == other,
        same_request: a.same_request(b),
        decided_by: if same_recipe { "canonical" } else { "raw" },
        same_canonical: a.canonical == b.canonical,
        same_raw: a.raw == b.raw,
        same_recipe,
        difference: None,
        verdict: String::new(),
    }
}

/// Compares two requests; `None`: one of them could not be read completely.
#[must_use]
pub fn compare(first: &Explained, second: &Explained) -> Option<Compared> {
    let (one, other) = (first.read.as_ref()?, second.read.as_ref()?);
    let mut compared = compared([&one.scope, &other.scope], [&one.fingerprint, &other.fingerprint]);
    compared.difference = difference(&one.canonical, &other.canonical);
    compared.verdict = match (apart(&one.scope, &other.scope), compared.same_request) {
        (Some(apart), _) => format!("They never meet: {apart} differ."),
        (None, true) => "The second is a retry of the first: it gets its answer.".to_owned(),
        (None, false) => {
            "The second is another request under a used key: it gets request-mismatch.".to_owned()
        }
    };
    Some(compared)
}

/// The difference of two scopes.
fn apart(one: &Scope, other: &Scope) -> Option<String> {
    let parts = [
        ("the operations", one.operation != other.operation),
        ("the tenants", one.tenant != other.tenant),
        ("the keys", one.key != other.key),
    ];
    let names: Vec<_> = parts.into_iter().filter(|(_, differs)| *differs).map(|(n, _)| n).collect();
    (!names.is_empty()).then(|| names.join(" and "))
}

/// Compares a request with a record; `None`: the request could not be read completely.
#[must_use]
pub fn against(
    explained: &Explained,
    scope: &Scope,
    fingerprint: &Fingerprint,
    status: Status,
) -> Option<Compared> {
    let read = explained.read.as_ref()?;
    let mut compared = compared([&read.scope, scope], [&read.fingerprint, fingerprint]);
    compared.verdict = match (apart(&read.scope, scope), compared.same_request) {
        (Some(apart), _) => format!("It does not meet the record: {apart} differ."),
        (None, true) => match status {
            Status::Completed => "It is a retry: it gets the stored answer.",
            Status::InProgress => "It is a retry of what is still running: it waits for it.",
            Status::Unknown => "It is a retry of what nobody knows the outcome of: on_unknown decides.",
        }
        .to_owned(),
        (None, false) if compared.same_recipe => {
            "It is another request than the record's: it gets request-mismatch.".to_owned()
        }
        (None, false) => "Settings or version have changed since the record was made, so the request as received \
                          decides, and it is another one: it gets request-mismatch."
            .to_owned(),
    };
    Some(compared)
}
