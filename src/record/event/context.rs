//! What templates see: the parts of the request that they name, kept from its reservation to its completion, and the answer.

use std::borrow::Cow;
use std::cell::OnceCell;
use std::collections::BTreeSet;

use bytes::Bytes;
use http::HeaderMap;
use minijinja::value::{Serde, Value};
use serde::Deserialize;
use serde_json::{Map, Value as Json, json};

use super::RequestParts;
use crate::record::{Answer, KeptBody, RecordId, Scope};

/// What templates name of a request, as JSON: `{"request": {...}}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Context {
    /// For the process that has the request in memory.
    pub whole: Bytes,
    /// For the record: all that a look-up, an operator or another process knows of the request. Where it would be too long,
    /// `{"too_large": "..."}` with the sentence that events get in its place.
    pub kept: Bytes,
}

/// The context, of which at most `kept_max` bytes are kept.
pub(super) fn extract(
    needs: &BTreeSet<String>,
    request: &RequestParts<'_>,
    kept_max: usize,
) -> Context {
    let (path, query) = request.target.split_once('?').unwrap_or((request.target, ""));
    let mut named = Map::new();
    let json = OnceCell::new();
    for need in needs {
        let mut steps = need.split('.');
        let part = steps.next().unwrap_or_default();
        let is = |name: &str| part == name;
        let read = || serde_json::from_slice(request.body).unwrap_or(Json::Null);
        let value = if is("method") {
            Cow::Owned(request.method.as_str().into())
        } else if is("path") {
            Cow::Owned(path.into())
        } else if is("query") {
            Cow::Owned(pairs(query.as_bytes()))
        } else if is("headers") {
            Cow::Owned(headers(request.headers))
        } else if is("params") {
            let params = request.params.iter();
            Cow::Owned(params.map(|(name, value)| ((*name).to_owned(), json!(value))).collect())
        } else if is("form") {
            Cow::Owned(pairs(request.body))
        } else {
            Cow::Borrowed(json.get_or_init(read))
        };
        let steps = steps.collect::<Vec<_>>();
        copy(&value, &steps, named.entry(part).or_insert(Json::Null));
    }
    let whole = Bytes::from(json!({ "request": named }).to_string());
    let length = whole.len();
    let kept = if length <= kept_max {
        whole.clone()
    } else {
        let why = format!(
            "the templates name {length} bytes of the request, and policy.context_max keeps {kept_max}"
        );
        Bytes::from(json!({ "too_large": why }).to_string())
    };
    Context { whole, kept }
}

/// Copies what the steps lead to, with the maps on the way to it.
fn copy(from: &Json, steps: &[&str], to: &mut Json) {
    let (Json::Object(members), [step, rest @ ..]) = (from, steps) else {
        *to = from.clone();
        return;
    };
    if !to.is_object() {
        *to = Json::Object(Map::new());
    }
    if let (Some(found), Json::Object(to)) = (members.get(*step), to) {
        copy(found, rest, to.entry(*step).or_insert(Json::Null));
    }
}

/// Pairs by name; of equal names the first.
fn pairs(text: &[u8]) -> Json {
    let mut map = Map::new();
    for (name, value) in form_urlencoded::parse(text) {
        map.entry(name).or_insert_with(|| value.as_ref().into());
    }
    Json::Object(map)
}

/// Headers by lower-case name; several lines of one name joined by a comma.
fn headers(headers: &HeaderMap) -> Json {
    let mut map = Map::new();
    for name in headers.keys() {
        let lines = headers.get_all(name).iter();
        let lines = lines.map(|line| String::from_utf8_lossy(line.as_bytes()));
        map.insert(name.as_str().to_owned(), lines.collect::<Vec<_>>().join(", ").into());
    }
    Json::Object(map)
}

/// The record that templates speak of.
#[derive(Clone, Copy, Debug)]
pub struct RecordContext<'a> {
    /// The record.
    pub record: RecordId,
    /// Its scope.
    pub scope: &'a Scope,
    /// What was kept of the request.
    pub context: Option<&'a [u8]>,
}

impl RecordContext<'_> {
    /// Why nothing was kept of the request, where that was too long.
    pub(in crate::record) fn too_large(&self) -> Option<String> {
        #[derive(Deserialize)]
        struct TooLarge {
            too_large: Json,
        }
        let TooLarge { too_large } = serde_json::from_slice(self.context?).ok()?;
        // Records from before the sentence was kept say `true`.
        let why = too_large.as_str().unwrap_or("the request was too long to be kept");
        Some(why.to_owned())
    }
}

/// What is known of a record, and of an answer where there is one.
pub(in crate::record) fn of(about: &RecordContext<'_>, answer: Option<&Answer>) -> Json {
    let mut known = json!({
        "tenant": about.scope.tenant.as_str(),
        "operation": about.scope.operation.as_str(),
        "key": about.scope.key.as_str(),
        "record": about.record.to_string(),
    });
    let context = about.context.and_then(|bytes| serde_json::from_slice::<Json>(bytes).ok());
    let request = context.as_ref().and_then(|context| context.get("request"));
    if let Json::Object(known) = &mut known {
        known.extend(request.map(|request| ("request".to_owned(), request.clone())));
        known.extend(answer.map(|answer| ("response".to_owned(), response(answer))));
    }
    known
}

fn response(answer: &Answer) -> Json {
    let (json, text) = match &answer.body {
        KeptBody::Whole(body) => (
            serde_json::from_slice(body).unwrap_or(Json::Null),
            std::str::from_utf8(body).map_or(Json::Null, Into::into),
        ),
        KeptBody::NotRetained => (Json::Null, Json::Null),
    };
    json!({
        "status": answer.status.as_u16(),
        "headers": headers(&answer.headers),
        "json": json,
        "text": text,
    })
}

/// The same as variables of templates.
pub(in crate::record) fn values(known: &Json) -> Value {
    Value::from(Serde(known))
}
