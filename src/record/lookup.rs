//! What is asked of the upstream about an attempt whose end nobody knows, and what its answer means.
//!
//! Pure: templates make the request of the record and its kept request, and interpret the answer to it. Three results, and
//! "not found" is never a guess: it needs an answer that was understood. Every value that `found` names must be there, an
//! answer that is not JSON has no `response.json`, only numbers with numbers and texts with texts are compared in order,
//! and `found` is true or false; whatever goes wrong is [`LookupResult::Failed`].
//!
//! What must stay true: a value cannot change what is asked. In the path each value is percent-encoded as one piece, is never
//! empty (an empty filter finds everything) and makes no dot segment; a header with a line break does not exist.

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderName, HeaderValue, Method, Request, StatusCode, Uri};
use percent_encoding::percent_decode_str;
use serde_json::Value as Json;

use super::event::RecordContext;
use super::event::context;
use super::event::template::{Compiler, Expression, Leaf, Text, Tree};
use super::{Answer, KeptBody, Spelling};

/// Longest target of a look-up, in bytes.
const TARGET_MAX: usize = 8 * 1024;

/// How long the upstream is left alone before it is asked what became of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LookupDelay {
    /// Counted from the moment in which the outcome was lost.
    pub after_loss: Duration,
    /// Counted from the end of a dead owner's lease, until which it may have been sending.
    pub after_lease: Duration,
}

/// A `lookup = { ... }` as configured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    /// The request's method.
    pub method: Method,
    /// A template: path and query.
    pub path: String,
    /// Headers of the request, each a template.
    pub headers: Vec<(HeaderName, String)>,
    /// An expression: whether the answer says that it was executed.
    pub found: String,
    /// Statuses that say that it was not executed.
    pub not_found: Vec<StatusCode>,
    /// The kept answer's status: a number, or a template.
    pub status: Json,
    /// The kept answer's body: a tree of templates; none: the answer's own.
    pub body: Option<Json>,
}

/// A field that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldError {
    /// Which: `found`, say.
    pub field: String,
    /// What is wrong with it.
    pub text: String,
}

/// A route's look-up, compiled.
#[derive(Debug)]
pub struct Template {
    spec: Spec,
    path: Text,
    headers: Vec<(HeaderName, Text)>,
    found: Expression,
    status: Tree,
    body: Option<Tree>,
    needs: BTreeSet<String>,
    named: BTreeSet<String>,
}

impl PartialEq for Template {
    fn eq(&self, other: &Self) -> bool {
        self.spec == other.spec
    }
}

impl Eq for Template {}

/// What the upstream's answer means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LookupResult {
    /// It was executed, and this is its answer from now on.
    Found(Answer),
    /// It was not executed so far.
    NotFound,
    /// It is as unknown as before, and why.
    Failed(String),
}

impl Template {
    /// Compiles a look-up.
    ///
    /// # Errors
    /// One for each field that cannot be used.
    pub fn compile(spec: &Spec) -> Result<Self, Vec<FieldError>> {
        let mut asking = Compiler { before_answer: true, ..Compiler::default() };
        let path = asking.path("path", &spec.path);
        let header = |(name, value): &(HeaderName, String)| {
            Some((name.clone(), asking.text("headers", Some(value))?))
        };
        let headers: Vec<_> = spec.headers.iter().filter_map(header).collect();
        let mut reading = Compiler::default();
        let found = reading.decision("found", &spec.found);
        let named = &asking.named | &reading.named;
        let status = reading.tree("status", &spec.status);
        let body = spec.body.as_ref().map(|body| reading.tree("body", body));
        let wrong = asking.errors.iter().chain(&reading.errors);
        let mut errors: Vec<_> = wrong
            .map(|wrong| FieldError { field: wrong.field.clone(), text: wrong.to_string() })
            .collect();
        let fixed =
            !matches!(&status, Tree::Leaf(Leaf::Expression(_) | Leaf::Text(Text::Template { .. })));
        let known = errors.iter().any(|error| error.field == "status");
        if fixed && !known && kept_status(&spec.status).is_none() {
            errors.push(FieldError {
                field: "status".into(),
                text: "must be a status from 200 to 599, or a template that gives one".into(),
            });
        }
        match (path, found) {
            (Some(path), Some(found)) if errors.is_empty() => {
                let needs = asking.needs.into_iter().chain(reading.needs).collect();
                let spec = spec.clone();
                Ok(Self { spec, path, headers, found, status, body, needs, named })
            }
            (_, _) => Err(errors),
        }
    }

    /// What it names of the request: dotted paths, `json.ref` say.
    #[must_use]
    pub fn needs(&self) -> &BTreeSet<String> {
        &self.needs
    }

    /// Whether the request, or `found`, names this or a part of it: `key`, `request` or `request.headers`, say.
    #[must_use]
    pub fn names(&self, what: &str) -> bool {
        let is_part = |rest: &str| rest.is_empty() || rest.starts_with('.');
        let whole = |name: &str| what.strip_prefix(name).is_some_and(is_part);
        self.named.iter().any(|name| name.strip_prefix(what).is_some_and(is_part) || whole(name))
    }

    /// The request that asks.
    ///
    /// # Errors
    /// Why it cannot be asked about this record.
    pub fn request(&self, about: &RecordContext<'_>) -> Result<Request<()>, String> {
        if let Some(why) = about.too_large().filter(|_| !self.needs.is_empty()) {
            return Err(why);
        }
        let variables = context::values(&context::of(about, None));
        let target = self.path.render(&variables)?;
        let mut request = Request::new(());
        *request.uri_mut() = checked(&target)?;
        self.spec.method.clone_into(request.method_mut());
        for (name, value) in &self.headers {
            let value = HeaderValue::from_str(&value.render(&variables)?)
                .map_err(|_| format!("the header {name} would hold what no header can"))?;
            request.headers_mut().insert(name, value);
        }
        Ok(request)
    }

    /// What the upstream's answer means.
    #[must_use]
    pub fn interpret(&self, about: &RecordContext<'_>, reply: &Answer) -> LookupResult {
        if self.spec.not_found.contains(&reply.status) {
            return LookupResult::NotFound;
        }
        if !reply.status.is_success() {
            return LookupResult::Failed(format!("the status is {}", reply.status.as_u16()));
        }
        self.interpret_success(about, reply).unwrap_or_else(LookupResult::Failed)
    }

    fn interpret_success(
        &self,
        about: &RecordContext<'_>,
        reply: &Answer,
    ) -> Result<LookupResult, String> {
        let KeptBody::Whole(bytes) = &reply.body else {
            return Err("the answer is too large".to_owned());
        };
        let mut known = context::of(about, Some(reply));
        if serde_json::from_slice::<serde::de::IgnoredAny>(bytes).is_err()
            && let Some(response) = known.get_mut("response").and_then(Json::as_object_mut)
        {
            response.remove("json");
        }
        let variables = context::values(&known);
        if !self.found.verdict(&variables)? {
            return Ok(LookupResult::NotFound);
        }
        let status = kept_status(&self.status.render(&variables, usize::MAX)?)
            .ok_or_else(|| "the kept status would not be one from 200 to 599".to_owned())?;
        let own_type = || reply.headers.get(CONTENT_TYPE).cloned();
        let (kind, body) = match &self.body {
            None => (own_type(), bytes.clone()),
            Some(Tree::Leaf(Leaf::Text(text))) => {
                (own_type(), Bytes::from(text.render(&variables)?))
            }
            Some(tree @ (Tree::Leaf(_) | Tree::List(_) | Tree::Members(_))) => {
                let json = HeaderValue::from_static("application/json");
                (Some(json), Bytes::from(tree.render(&variables, usize::MAX)?.to_string()))
            }
        };
        let headers = kind.map(|kind| (CONTENT_TYPE, kind)).into_iter().collect();
        let spelling = Spelling::default();
        Ok(LookupResult::Found(Answer { status, headers, spelling, body: KeptBody::Whole(body) }))
    }
}

/// A status as it may be kept: a number, or its digits.
fn kept_status(value: &Json) -> Option<StatusCode> {
    let number = match value {
        Json::String(text) => text.trim().parse().ok()?,
        Json::Number(number) => number.as_u64()?,
        Json::Null | Json::Bool(_) | Json::Array(_) | Json::Object(_) => return None,
    };
    let code = u16::try_from(number).ok().filter(|code| (200..=599).contains(code))?;
    StatusCode::from_u16(code).ok()
}

/// A target as it goes out: a path without dot segments, a query, and nothing else.
fn checked(target: &str) -> Result<Uri, String> {
    let path = target.split('?').next().unwrap_or_default();
    // Some decode before they split.
    let decoded = percent_decode_str(path).decode_utf8_lossy();
    let dots = |segment: &str| matches!(segment.split(';').next(), Some("." | ".."));
    if !path.starts_with('/') || path.starts_with("//") || decoded.split(['/', '\\']).any(dots) {
        return Err("the path would be another one than is configured".to_owned());
    }
    if target.len() > TARGET_MAX || target.contains('#') {
        return Err("the path would be too long, or hold '#'".to_owned());
    }
    target.parse().map_err(|_| "the path would not be a path".to_owned())
}

#[cfg(test)]
mod tests {
    use http::HeaderMap;
    use serde_json::json;
    use uuid::Uuid;

    use super::*;
    use crate::record::{Key, Operation, Scope, Tenant};

    fn spec() -> Spec {
        Spec {
            method: Method::GET,
            path: "/orders?client_ref={{ key }}".to_owned(),
            headers: Vec::new(),
            found: "response.json.total > 0".to_owned(),
            not_found: Vec::new(),
            status: json!(201),
            body: Some(json!("{{ response.json.items[0] }}")),
        }
    }

    fn scope(key: &str) -> Scope {
        Scope {
            tenant: Tenant::parse("acme").unwrap(),
            operation: Operation::parse("orders.create").unwrap(),
            key: Key::stored(key),
        }
    }

    fn about(scope: &Scope) -> RecordContext<'_> {
        RecordContext { record: Uuid::nil().into(), scope, context: None }
    }

    fn asked(spec: &Spec, key: &str) -> Result<Request<()>, String> {
        Template::compile(spec).unwrap().request(&about(&scope(key)))
    }

    fn interpreted(spec: &Spec, status: u16, body: &str) -> LookupResult {
        let reply = Answer {
            status: StatusCode::from_u16(status).unwrap(),
            headers: HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static("x/y"))]),
            spelling: Spelling::default(),
            body: KeptBody::Whole(Bytes::copy_from_slice(body.as_bytes())),
        };
        Template::compile(spec).unwrap().interpret(&about(&scope("k")), &reply)
    }

    #[test]
    fn a_key_cannot_change_what_is_asked() {
        for (key, query) in [
            ("k-1", "k-1"),
            ("a/b?c#d&e=f", "a%2Fb%3Fc%23d%26e%3Df"),
            ("a b+c%2e", "a%20b%2Bc%252e"),
            ("x\r\nEvil: 1", "x%0D%0AEvil%3A%201"),
            ("..", ".."),
        ] {
            let request = asked(&spec(), key).unwrap();
            assert_eq!(request.uri().to_string(), format!("/orders?client_ref={query}"), "{key}");
        }
        let by_path = Spec { path: "/orders/{{ key }}".to_owned(), ..spec() };
        assert_eq!(asked(&by_path, "a/b..c").unwrap().uri(), "/orders/a%2Fb..c");
        for key in ["..", ".", "..;x", "a/../b", "a\\.."] {
            assert!(asked(&by_path, key).is_err(), "{key}");
        }
        let header = HeaderName::from_static("x-key");
        let by_header = Spec { headers: vec![(header, "<{{ key }}>".to_owned())], ..spec() };
        assert_eq!(asked(&by_header, "a&b").unwrap().headers()["x-key"], "<a&b>");
        assert!(asked(&by_header, "a\r\nb").is_err());
    }

    #[test]
    fn what_is_missing_or_empty_is_not_asked_for() {
        let by = |path: &str| Spec { path: path.to_owned(), ..spec() };
        let template = Template::compile(&by("/orders?ref={{ request.json.ref }}")).unwrap();
        assert_eq!(template.needs().iter().collect::<Vec<_>>(), ["json.ref"]);
        let scope = scope("k");
        let ask = |context: &str| {
            let context = Some(context.as_bytes());
            let request = template.request(&RecordContext { context, ..about(&scope) });
            request.map(|request| request.uri().to_string())
        };
        assert_eq!(ask(r#"{"request":{"json":{"ref":"a b"}}}"#).unwrap(), "/orders?ref=a%20b");
        assert_eq!(ask(r#"{"request":{"json":{"ref":7}}}"#).unwrap(), "/orders?ref=7");
        for context in [
            r#"{"request":{"json":{"ref":""}}}"#,
            r#"{"request":{"json":{"ref":null}}}"#,
            r#"{"request":{"json":{"ref":[1]}}}"#,
            r#"{"request":{"json":null}}"#,
            "x",
        ] {
            assert!(ask(context).is_err(), "{context}");
        }
        assert_eq!(ask(r#"{"too_large":"it was 9 bytes"}"#).unwrap_err(), "it was 9 bytes");
    }

    #[test]
    fn only_an_answer_that_was_understood_says_not_found() {
        let result = |body: &str| interpreted(&spec(), 200, body);
        assert_eq!(result(r#"{"total":0,"items":[]}"#), LookupResult::NotFound);
        let LookupResult::Found(answer) = result(r#"{"total":1,"items":[{"id":7}]}"#) else {
            panic!("not found");
        };
        assert_eq!(answer.status, StatusCode::CREATED);
        assert_eq!(answer.headers["content-type"], "application/json");
        assert_eq!(answer.body, KeptBody::Whole(Bytes::from_static(br#"{"id":7}"#)));
        for body in [
            "",
            "<html>",
            "null",
            "[]",
            "{}",
            r#"{"total":null}"#,
            r#"{"error":"busy"}"#,
            r#"{"total":1}"#,
            r#"{"total":1,"items":[]}"#,
        ] {
            assert!(matches!(result(body), LookupResult::Failed(_)), "{body}: {:?}", result(body));
        }
        for status in [301, 404, 429, 500] {
            let result = interpreted(&spec(), status, r#"{"total":0}"#);
            assert!(matches!(result, LookupResult::Failed(_)), "{status}");
        }
        let by_status = Spec { not_found: vec![StatusCode::NOT_FOUND], ..spec() };
        assert_eq!(interpreted(&by_status, 404, "gone"), LookupResult::NotFound);
        assert!(matches!(interpreted(&by_status, 410, "gone"), LookupResult::Failed(_)));
        let truth = Spec { found: "response.json".to_owned(), ..spec() };
        for body in ["<html>", "[]", "[1]", "{}", "0", "1", "\"x\"", "null"] {
            assert!(matches!(interpreted(&truth, 200, body), LookupResult::Failed(_)), "{body}");
        }
        assert_eq!(interpreted(&truth, 200, "false"), LookupResult::NotFound);
        let order = Spec { found: "response.json.order is not none".to_owned(), ..spec() };
        assert_eq!(interpreted(&order, 200, r#"{"order":null}"#), LookupResult::NotFound);
    }

    #[test]
    fn values_of_different_kinds_are_not_compared() {
        let interpret = |found: &str, total: &str| {
            let body = Some(json!("x"));
            let spec = Spec { found: found.to_owned(), body, ..spec() };
            interpreted(&spec, 200, &format!("{{\"total\":{total}}}"))
        };
        let none = [r#""0""#, r#""""#, "[]", "[1]", "{}", r#"{"a":1}"#, "true", "false", "null"];
        for total in none {
            for found in [
                "response.json.total > 0",
                "response.json.total >= 0",
                "0 < response.json.total",
                "response.json.total <= 0",
                "not response.json.total < 1",
                "response.json.total is gt(0)",
                "response.json.total is lessthan 1",
                "[response.json.total] | select('>', 0) | length == 1",
                "[response] | selectattr('json.total', 'ge', 0) | length == 1",
                "response.json.total is defined and response.json.total > 0",
            ] {
                let result = interpret(found, total);
                assert!(matches!(result, LookupResult::Failed(_)), "{found}, {total}: {result:?}");
            }
        }
        for (found, total, is_found) in [
            ("response.json.total > 0", "1", true),
            ("response.json.total > 0", "0", false),
            ("response.json.total > 0", "0.5", true),
            ("response.json.total | int > 0", r#""1""#, true),
            ("response.json.total | int > 0", r#""0""#, false),
            ("response.json.total | length > 0", "[7]", true),
            ("response.json.total | length > 0", "[]", false),
            ("response.json.total >= '2026-01'", r#""2026-02""#, true),
            ("response.json.total is not none and response.json.total > 0", "null", false),
            ("response.json.total is number and response.json.total > 0", r#""1""#, false),
        ] {
            let result = interpret(found, total);
            let as_said = match result {
                LookupResult::Found(_) => is_found,
                LookupResult::NotFound => !is_found,
                LookupResult::Failed(_) => false,
            };
            assert!(as_said, "{found}, {total}: {result:?}");
        }
    }

    #[test]
    fn the_kept_answer_is_the_answers_own_unless_a_body_is_named() {
        let own = Spec {
            found: "true".to_owned(),
            status: json!("{{ response.json.code }}"),
            body: None,
            ..spec()
        };
        let LookupResult::Found(answer) = interpreted(&own, 200, "{\"code\" : 202}") else {
            panic!("not found")
        };
        assert_eq!(answer.status, StatusCode::ACCEPTED);
        assert_eq!(answer.headers["content-type"], "x/y");
        assert_eq!(answer.body, KeptBody::Whole(Bytes::from_static(b"{\"code\" : 202}")));
        let LookupResult::Failed(_) = interpreted(&own, 200, "{\"code\":1000}") else {
            panic!("a status")
        };
        let text = Spec { body: Some(json!("<id>{{ response.json.code }}</id>")), ..own };
        let LookupResult::Found(answer) = interpreted(&text, 200, "{\"code\":202}") else {
            panic!("not found")
        };
        assert_eq!(answer.body, KeptBody::Whole(Bytes::from_static(b"<id>202</id>")));
        assert_eq!(answer.headers["content-type"], "x/y");
    }

    #[test]
    fn each_mistake_names_its_field() {
        for (bad, field) in [
            (Spec { path: "/a/{{ response.json.id }}".to_owned(), ..spec() }, "path"),
            (Spec { path: "/a/{{ nobody }}".to_owned(), ..spec() }, "path"),
            (Spec { path: "/a/{{".to_owned(), ..spec() }, "path"),
            (Spec { path: "a".to_owned(), ..spec() }, "path"),
            (Spec { path: "/a#b".to_owned(), ..spec() }, "path"),
            (Spec { found: "response.".to_owned(), ..spec() }, "found"),
            (Spec { found: "0 < response.json.total < 5".to_owned(), ..spec() }, "found"),
            (Spec { status: json!(99), ..spec() }, "status"),
            (Spec { status: json!("x"), ..spec() }, "status"),
            (Spec { body: Some(json!({"a": ["{{ nobody }}"]})), ..spec() }, "body"),
        ] {
            let errors = Template::compile(&bad).unwrap_err();
            assert_eq!(errors.len(), 1, "{errors:?}");
            assert!(errors[0].field.starts_with(field), "{errors:?}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_key_or_answer_panics(key: String, body: String, query in "[ -~]{1,30}") {
            let scope = scope(&query);
            let template = Template::compile(&spec()).unwrap();
            let request = template.request(&about(&scope)).unwrap();
            let decoded = form_urlencoded::parse(request.uri().query().unwrap().as_bytes())
                .map(|(name, value)| (name.into_owned(), value.into_owned()))
                .collect::<Vec<_>>();
            proptest::prop_assert_eq!(decoded, [("client_ref".to_owned(), query)]);
            let _asked = asked(&Spec { path: "/{{ key }}".to_owned(), ..spec() }, &key);
            let _interpreted = interpreted(&spec(), 200, &body);
        }
    }
}
