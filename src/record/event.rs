//! What a stored outcome announces: a route's templates become events with stable ids and keys.
//!
//! Pure: the same record, context and answer give the same events, whoever completes the record. What templates name of the
//! request is found when they are compiled; only that is kept, as the record's context, and rendering reads nothing else of it.
//!
//! What must stay true: rendering always succeeds. A template that fails, or a message that is too large, gives an event under the same
//! key whose data is the error, and is counted. No two events of a record have one key: a second one gets `#2`.
//!
//! A leaf of a payload that is exactly one `{{ expression }}` keeps its JSON type. Integers of 64 bits are exact, all other
//! numbers are 64-bit floats. The default data embeds the response's bytes as they came. An event without `when` is written for every
//! stored outcome; only the default event, of a route that names none, asks for 2xx.

pub(in crate::record) mod context;
pub mod doubt;
mod ordered;
pub(in crate::record) mod template;
pub mod wanted;

use std::collections::{BTreeSet, HashMap};
use std::time::SystemTime;

use bytes::Bytes;
use http::{HeaderMap, Method};
use minijinja::value::Value;
use serde::Serialize;
use serde_json::value::RawValue;
use sha2::{Digest as _, Sha256};
use uuid::Uuid;

use self::template::{Expression, Text, Tree};
use self::wanted::{Subscriber, who_want};
use crate::record::{Answer, Attempt, KeptBody, Operation, RecordId, Scope, lookup};

/// The namespace of the ids of events.
const NAMESPACE: Uuid = Uuid::from_u128(0x6f1d_7c52_94a8_4b0e_8a3c_5e2f_d19b_7046);
/// Longest ordering key, in bytes.
const ORDERING_KEY_MAX: usize = 255;
/// Longest key of an element, in bytes; a longer one stands as its hash.
const ELEMENT_KEY_MAX: usize = 255;
/// Most events of one record.
const EVENTS_MAX: usize = 10_000;
/// The messages of one record together take at most as much as this many of the largest.
const PAYLOADS_MAX: usize = 64;

/// An event as it is written in the completing transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Made from `key` by a fixed hash, so that a completion that is repeated yields the same id.
    pub id: Uuid,
    /// Unique and stable: the record's id, the event's name, and the element's key where there are several.
    pub key: String,
    /// The event's type, `order.created` say.
    pub kind: String,
    /// Position among the events of its record, from 0.
    pub position: u16,
    /// Events with equal ordering keys may be delivered in order.
    pub ordering_key: Option<String>,
    /// The message, exactly as it is sent and signed.
    pub payload: Bytes,
    /// To which sinks; none: it stands as `discarded`.
    pub sinks: Vec<String>,
}

/// One `[[route.event]]` as configured.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Spec {
    /// The event's `type`.
    pub kind: String,
    /// An expression that must be true; none: every stored outcome.
    pub when: Option<String>,
    /// A tree whose string leaves are templates; none: status and response.
    pub payload: Option<serde_json::Value>,
    /// An expression that gives a list: one event for each element.
    pub for_each: Option<String>,
    /// A template that names the element; none: its index.
    pub event_key: Option<String>,
    /// A template: events with equal ordering keys may be delivered in order.
    pub ordering_key: Option<String>,
    /// To which sinks; none: all of them.
    pub sinks: Option<Vec<String>>,
}

/// A request as received, as far as templates may name it.
#[derive(Clone, Copy, Debug)]
pub struct RequestParts<'a> {
    /// Its method.
    pub method: &'a Method,
    /// Its target as received: path and query.
    pub target: &'a str,
    /// Its headers.
    pub headers: &'a HeaderMap,
    /// The decoded parameters of its path.
    pub params: &'a [(&'a str, &'a str)],
    /// Its whole body.
    pub body: &'a [u8],
}

/// Whence the events come.
#[derive(Clone, Copy, Debug)]
pub struct Origin<'a> {
    /// The record.
    pub record: RecordId,
    /// Its scope.
    pub scope: &'a Scope,
    /// The attempt that ended.
    pub attempt: Attempt,
    /// When it ended: the time in the messages.
    pub at: SystemTime,
    /// What [`Templates::context`] made of the request.
    pub context: Option<&'a [u8]>,
    /// How it ended.
    pub answer: &'a Answer,
}

/// What is written in the completing transaction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rendered {
    /// The events, in the order of the configuration.
    pub events: Vec<Event>,
    /// How many of them hold an error in place of their data.
    pub failed: u64,
}

/// A route's events, compiled.
#[derive(Debug)]
pub struct Templates {
    specs: Vec<Compiled>,
    /// What is named of the request: dotted paths, `json.amount` say.
    needs: BTreeSet<String>,
    payload_max: usize,
}

#[derive(Debug)]
struct Compiled {
    kind: String,
    only_success: bool,
    when: Option<Expression>,
    data: Option<Tree>,
    for_each: Option<Expression>,
    element_key: Option<Text>,
    ordering_key: Option<Text>,
    sinks: Vec<String>,
}

impl Compiled {
    /// Whether it needs any variables: the default event does not.
    fn reads(&self) -> bool {
        let Self { when, data, for_each, ordering_key, .. } = self;
        when.is_some() || data.is_some() || for_each.is_some() || ordering_key.is_some()
    }
}

impl Templates {
    /// Whether this sink gets events without an ordering key.
    #[must_use]
    pub fn leave_unordered(&self, sink: &str) -> bool {
        let towards = |spec: &&Compiled| spec.sinks.iter().any(|name| name == sink);
        self.specs.iter().filter(towards).any(|spec| spec.ordering_key.is_none())
    }

    /// Compiles a route's events; no specs: the default event.
    ///
    /// # Errors
    /// One sentence for each field that cannot be used; it names the field and the expression.
    pub fn compile(
        operation: &Operation,
        specs: &[Spec],
        subscribers: &[Subscriber],
        payload_max: usize,
    ) -> Result<Self, Vec<String>> {
        let default = [Spec { kind: operation.as_str().to_owned(), ..Spec::default() }];
        let only_success = specs.is_empty();
        let mut compiler = template::Compiler::default();
        let specs = if only_success { &default } else { specs };
        let specs = specs
            .iter()
            .map(|spec| Compiled { only_success, ..compile(spec, subscribers, &mut compiler) })
            .collect();
        if compiler.errors.is_empty() {
            Ok(Self { specs, needs: compiler.needs, payload_max })
        } else {
            Err(compiler.errors.iter().map(ToString::to_string).collect())
        }
    }

    /// The types of its events.
    pub fn kinds(&self) -> impl Iterator<Item = &str> {
        self.specs.iter().map(|spec| spec.kind.as_str())
    }

    /// The same, with what a look-up needs of the request kept too.
    #[must_use]
    pub fn beside(mut self, lookup: &lookup::Template) -> Self {
        self.needs.extend(lookup.needs().iter().cloned());
        self
    }

    /// Whether anything of the request is kept.
    #[must_use]
    pub fn need_request(&self) -> bool {
        !self.needs.is_empty()
    }

    /// What completion will need of the request, as JSON of at most 64 KiB; `None`: nothing. Where it would be longer it says so
    /// instead, and the templates that name the request will give error events.
    #[must_use]
    pub fn context(&self, request: &RequestParts<'_>) -> Option<Bytes> {
        self.need_request().then(|| context::extract(&self.needs, request))
    }

    /// The events of a stored outcome, in the order of the configuration.
    #[must_use]
    pub fn render(&self, origin: &Origin<'_>) -> Rendered {
        let reads = self.specs.iter().any(Compiled::reads);
        let variables = if reads { variables(origin) } else { Value::UNDEFINED };
        let mut writer = Writer {
            origin,
            at: humantime::format_rfc3339_micros(latest(origin.at)).to_string(),
            payload_max: self.payload_max,
            bytes: 0,
            keys: HashMap::new(),
            rendered: Rendered::default(),
        };
        for spec in &self.specs {
            if spec.only_success && !origin.answer.status.is_success() {
                continue;
            }
            match spec.when.as_ref().map_or(Ok(true), |when| when.is_true(&variables)) {
                Ok(true) => writer.spec(spec, &variables),
                Ok(false) => {}
                Err(error) => writer.event(spec, "", None, Err(error)),
            }
        }
        writer.rendered
    }
}

fn variables(origin: &Origin<'_>) -> Value {
    let Origin { record, scope, context, answer, .. } = *origin;
    context::values(&context::of(&context::Subject { record, scope, context }, Some(answer)))
}

/// A time that can be written: a clock far off must not stop a completion.
fn latest(at: SystemTime) -> SystemTime {
    const YEAR_9999: u64 = 253_402_300_799;
    match at.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(since) if since.as_secs() <= YEAR_9999 => at,
        Ok(_) | Err(_) => SystemTime::UNIX_EPOCH,
    }
}

fn compile(spec: &Spec, subscribers: &[Subscriber], compiler: &mut template::Compiler) -> Compiled {
    compiler.event = spec.kind.clone();
    if Operation::parse(&spec.kind).is_none() {
        compiler.wrong("type", &spec.kind, "it is not 1 to 255 bytes of visible text");
    }
    for sink in spec.sinks.iter().flatten() {
        if !subscribers.iter().any(|known| known.sink == *sink) {
            compiler.wrong("sinks", sink, "there is no such sink");
        }
    }
    if spec.for_each.is_none() && spec.event_key.is_some() {
        let key = spec.event_key.as_deref().unwrap_or_default();
        compiler.wrong("event_key", key, "it needs for_each");
    }
    let when = compiler.expression("when", spec.when.as_deref());
    let for_each = compiler.expression("for_each", spec.for_each.as_deref());
    compiler.in_element = spec.for_each.is_some();
    let compiled = Compiled {
        kind: spec.kind.clone(),
        only_success: false,
        when,
        data: spec.payload.as_ref().map(|tree| compiler.tree("payload", tree)),
        for_each,
        element_key: compiler.text("event_key", spec.event_key.as_deref()),
        ordering_key: compiler.text("ordering_key", spec.ordering_key.as_deref()),
        sinks: sinks_of(spec, subscribers),
    };
    compiler.in_element = false;
    compiled
}

/// The sinks that an event names, or all, as far as they want its type.
fn sinks_of(spec: &Spec, subscribers: &[Subscriber]) -> Vec<String> {
    let wanting = who_want(subscribers, &spec.kind);
    match &spec.sinks {
        // In the order in which the event names them.
        Some(named) => named.iter().filter(|sink| wanting.contains(sink)).cloned().collect(),
        None => wanting,
    }
}

/// Collects the events of one record.
struct Writer<'o> {
    origin: &'o Origin<'o>,
    at: String,
    payload_max: usize,
    /// Of the messages so far.
    bytes: usize,
    /// The keys that are taken, and how many events asked for each.
    keys: HashMap<String, u32>,
    rendered: Rendered,
}

/// The message, in the order in which its members stand.
#[derive(Serialize)]
struct Message<'m> {
    #[serde(rename = "type")]
    kind: &'m str,
    timestamp: &'m str,
    data: &'m RawValue,
    tenant: &'m str,
    operation: &'m str,
    idempotency_key: &'m str,
    id: &'m str,
}

impl Writer<'_> {
    fn spec(&mut self, spec: &Compiled, variables: &Value) {
        let Some(list) = &spec.for_each else {
            return self.element(spec, "", variables);
        };
        let elements = match list.elements(variables, EVENTS_MAX) {
            Ok(elements) => elements,
            Err(error) => return self.event(spec, "", None, Err(error)),
        };
        for (index, item) in elements.into_iter().enumerate() {
            let variables = template::with_element(variables, item, index);
            let number = index.to_string();
            match spec.element_key.as_ref().map_or(Ok(number.clone()), |key| key.render(&variables))
            {
                Ok(key) => self.element(spec, &bounded(key, ELEMENT_KEY_MAX), &variables),
                Err(error) => self.event(spec, &number, None, Err(error)),
            }
        }
    }

    fn element(&mut self, spec: &Compiled, element: &str, variables: &Value) {
        let data = match &spec.data {
            Some(tree) => tree.render(variables, self.payload_max).and_then(|data| raw(&data)),
            None => default_data(self.origin.answer),
        };
        let ordering = spec.ordering_key.as_ref().map(|key| key.render(variables)).transpose();
        match ordering {
            Ok(key) => {
                let key = key.filter(|key| !key.is_empty());
                self.event(spec, element, key.map(|key| bounded(key, ORDERING_KEY_MAX)), data);
            }
            Err(error) => self.event(spec, element, None, Err(error)),
        }
    }

    fn event(
        &mut self,
        spec: &Compiled,
        element: &str,
        ordering_key: Option<String>,
        data: Result<Box<RawValue>, String>,
    ) {
        let Ok(position) = u16::try_from(self.rendered.events.len()) else {
            self.rendered.failed += 1;
            return;
        };
        let key = self.unique(&spec.kind, element);
        let id = Uuid::new_v5(&NAMESPACE, key.as_bytes());
        let message = data.and_then(|data| self.message(spec, id, &data)).and_then(|message| {
            if message.len() > self.payload_max {
                return Err("the message is too large".to_owned());
            }
            let together = self.bytes.saturating_add(message.len());
            if together > self.payload_max.saturating_mul(PAYLOADS_MAX) {
                return Err("the events of this record are too large together".to_owned());
            }
            self.bytes = together;
            Ok(message)
        });
        let payload = message.or_else(|error| {
            self.rendered.failed += 1;
            let short = error.chars().take(500).collect::<String>();
            raw(&serde_json::json!({ "error": short }))
                .and_then(|data| self.message(spec, id, &data))
        });
        let kind = spec.kind.clone();
        let payload = Bytes::from(payload.unwrap_or_default());
        let sinks = spec.sinks.clone();
        self.rendered.events.push(Event { id, key, kind, position, ordering_key, payload, sinks });
    }

    /// The event's key, made different from those before it.
    fn unique(&mut self, kind: &str, element: &str) -> String {
        let record = self.origin.record;
        let slash = if element.is_empty() { "" } else { "/" };
        let plain = format!("{record}/{kind}{slash}{element}");
        let mut key = plain.clone();
        let mut count = self.keys.get(&plain).copied().unwrap_or(0);
        while self.keys.contains_key(&key) {
            count += 1;
            key = format!("{plain}#{count}");
        }
        // The next one of this name need not try again what is taken.
        self.keys.insert(plain, count.max(1));
        self.keys.entry(key.clone()).or_insert(1);
        key
    }

    fn message(&self, spec: &Compiled, id: Uuid, data: &RawValue) -> Result<Vec<u8>, String> {
        let scope = self.origin.scope;
        let message = Message {
            kind: &spec.kind,
            timestamp: &self.at,
            data,
            tenant: scope.tenant.as_str(),
            operation: scope.operation.as_str(),
            idempotency_key: scope.key.as_str(),
            id: &id.to_string(),
        };
        serde_json::to_vec(&message).map_err(|error| error.to_string())
    }
}

/// A text that a column can hold: one that is too long or holds control characters stands as its hash.
fn bounded(text: String, max: usize) -> String {
    if text.len() <= max && !text.chars().any(char::is_control) {
        return text;
    }
    let hash = Sha256::digest(text.as_bytes());
    let hex = hash.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    format!("sha256:{hex}")
}

fn raw(data: &impl Serialize) -> Result<Box<RawValue>, String> {
    serde_json::value::to_raw_value(data).map_err(|error| error.to_string())
}

/// Status and response, the response's JSON as it came.
fn default_data(answer: &Answer) -> Result<Box<RawValue>, String> {
    #[derive(Serialize)]
    struct Data<'d> {
        status: u16,
        response: Option<&'d RawValue>,
    }
    let response = match &answer.body {
        KeptBody::Whole(body) => serde_json::from_slice::<&RawValue>(body).ok(),
        KeptBody::NotRetained => None,
    };
    raw(&Data { status: answer.status.as_u16(), response })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use http::StatusCode;
    use serde_json::{Value as Json, json};

    use super::*;
    use crate::record::{Key, Spelling, Tenant};

    const RECORD: Uuid = Uuid::from_u128(7);

    fn spec(kind: &str) -> Spec {
        Spec { kind: kind.to_owned(), ..Spec::default() }
    }

    fn compile(specs: &[Spec]) -> Result<Templates, Vec<String>> {
        let sinks = ["main", "audit"]
            .map(|sink| Subscriber { sink: sink.to_owned(), events: wanted::Wanted::default() });
        Templates::compile(&Operation::parse("orders.create").unwrap(), specs, &sinks, 2000)
    }

    fn context_of(templates: &Templates, body: &str) -> Option<Bytes> {
        let mut headers = HeaderMap::new();
        headers.insert("x-shop", "berlin".parse().unwrap());
        templates.context(&RequestParts {
            method: &Method::POST,
            target: "/accounts/7/orders?dry=1&dry=2",
            headers: &headers,
            params: &[("account", "7")],
            body: body.as_bytes(),
        })
    }

    fn render(specs: &[Spec], request: &str, status: u16, response: &str) -> Rendered {
        let templates = compile(specs).unwrap();
        let context = context_of(&templates, request);
        let body = KeptBody::Whole(Bytes::copy_from_slice(response.as_bytes()));
        let status = StatusCode::from_u16(status).unwrap();
        templates.render(&Origin {
            record: RECORD.into(),
            scope: &Scope {
                tenant: Tenant::parse("acme").unwrap(),
                operation: Operation::parse("orders.create").unwrap(),
                key: Key::parse("k 1").unwrap(),
            },
            attempt: Attempt::FIRST,
            at: SystemTime::UNIX_EPOCH + Duration::from_millis(1500),
            context: context.as_deref(),
            answer: &Answer {
                status,
                headers: HeaderMap::new(),
                spelling: Spelling::default(),
                body,
            },
        })
    }

    fn data(event: &Event) -> Json {
        serde_json::from_slice::<Json>(&event.payload).unwrap()["data"].clone()
    }

    #[test]
    fn the_default_event_embeds_the_response_as_it_came() {
        let rendered = render(&[], "", 201, "{\"b\": 1.10, \"a\":9007199254740993000000}");
        let event = rendered.events.first().unwrap();
        let expected = format!(
            concat!(
                r#"{{"type":"orders.create","timestamp":"1970-01-01T00:00:01.500000Z","#,
                r#""data":{{"status":201,"response":{{"b": 1.10, "a":9007199254740993000000}}}},"#,
                r#""tenant":"acme","operation":"orders.create","idempotency_key":"k 1","id":"{}"}}"#
            ),
            event.id
        );
        assert_eq!(std::str::from_utf8(&event.payload).unwrap(), expected);
        assert_eq!(event.key, format!("{RECORD}/orders.create"));
        assert_eq!(event.sinks, ["main", "audit"]);
        assert_eq!(event.id, Uuid::new_v5(&NAMESPACE, event.key.as_bytes()));
        assert!(render(&[], "", 422, "{}").events.is_empty());
        let text = render(&[], "", 200, "not json");
        assert_eq!(data(&text.events[0]), json!({"status": 200, "response": null}));
    }

    #[test]
    fn leaves_keep_their_types_and_when_decides() {
        let payload = json!({
            "amount": "{{ request.json.amount }}",
            "big": "{{ response.json.id }}",
            "list": ["{{ response.json.items }}", 1, true, null, "plain"],
            "text": "{{ tenant }}/{{ operation }}/{{ key }}",
            "from": "{{ request.method }} {{ request.path }} {{ request.query.dry }}",
            "shop": "{{ request.headers['x-shop'] }}{{ request.params.account }}",
            "record": "{{ record }}",
        });
        let created = Spec {
            when: Some("response.status == 201".to_owned()),
            payload: Some(payload),
            sinks: Some(vec!["audit".to_owned()]),
            ordering_key: Some("{{ request.params.account }}".to_owned()),
            ..spec("order.created")
        };
        let specs = [created, spec("audit.order")];
        let response = r#"{"id":18446744073709551615,"items":[{"n":1}]}"#;
        let rendered = render(&specs, r#"{"amount":12.5,"other":"secret"}"#, 201, response);
        assert_eq!(rendered.failed, 0, "{:?}", rendered.events);
        let event = rendered.events.first().unwrap();
        assert_eq!(
            data(event),
            json!({
                "amount": 12.5,
                "big": u64::MAX,
                "list": [[{"n": 1}], 1, true, null, "plain"],
                "text": "acme/orders.create/k 1",
                "from": "POST /accounts/7/orders 1",
                "shop": "berlin7",
                "record": RECORD.to_string(),
            })
        );
        assert_eq!(event.sinks, ["audit"]);
        assert_eq!(event.ordering_key.as_deref(), Some("7"));
        let positions = rendered.events.iter().map(|event| event.position).collect::<Vec<_>>();
        assert_eq!(positions, [0, 1]);
        let refused = render(&specs, "{}", 422, "{}");
        let kinds = refused.events.iter().map(|event| event.kind.as_str()).collect::<Vec<_>>();
        assert_eq!(kinds, ["audit.order"]);
    }

    #[test]
    fn the_context_holds_only_what_is_named() {
        assert_eq!(context_of(&compile(&[]).unwrap(), "{}"), None);
        let payload = json!({"a": "{{ request.json.a.b }}", "q": "{{ request.query.dry }}"});
        let templates = compile(&[Spec { payload: Some(payload), ..spec("e") }]).unwrap();
        let context = context_of(&templates, r#"{"a":{"b":[1],"c":2},"card":"4111"}"#).unwrap();
        assert_eq!(
            serde_json::from_slice::<Json>(&context).unwrap(),
            json!({"request": {"json": {"a": {"b": [1]}}, "query": {"dry": "1"}}})
        );
        let long = format!(r#"{{"a":{{"b":"{}"}}}}"#, "x".repeat(70_000));
        assert_eq!(context_of(&templates, &long).unwrap(), r#"{"too_large":true}"#);
    }

    #[test]
    fn an_event_goes_to_the_sinks_that_it_names_as_far_as_they_want_it() {
        let subscriber = |sink: &str, patterns: &[&str]| Subscriber {
            sink: sink.to_owned(),
            events: wanted::Wanted::Some(
                patterns.iter().map(|text| wanted::Pattern::parse(text).unwrap()).collect(),
            ),
        };
        let everything = Subscriber { sink: "all".into(), events: wanted::Wanted::All };
        let subscribers =
            [everything, subscriber("orders", &["order.*"]), subscriber("bills", &["bill.*"])];
        let named = |kind: &str, sinks: &[&str]| {
            let sinks =
                (!sinks.is_empty()).then(|| sinks.iter().map(|s| (*s).to_owned()).collect());
            sinks_of(&Spec { sinks, ..spec(kind) }, &subscribers)
        };
        assert_eq!(named("order.created", &[]), ["all", "orders"]);
        assert_eq!(named("order.created", &["bills", "orders"]), ["orders"]);
        assert_eq!(named("other", &["bills", "orders"]), [""; 0]);
        assert_eq!(named("other", &[]), ["all"]);
    }

    #[test]
    fn each_element_has_an_event_with_a_key_of_its_own() {
        let lines = Spec {
            for_each: Some("response.json.lines".to_owned()),
            event_key: Some("{{ item.sku }}".to_owned()),
            payload: Some(json!({"sku": "{{ item.sku }}", "at": "{{ index }}"})),
            ..spec("line.added")
        };
        let plain = Spec { event_key: None, ..lines.clone() };
        let response = r#"{"lines":[{"sku":"a"},{"sku":"b"},{"sku":"a"},{"none":1}]}"#;
        let rendered = render(&[lines, plain], "", 201, response);
        let name = |event: &Event| event.key.rsplit('/').next().unwrap().to_owned();
        let names = rendered.events.iter().map(name).collect::<Vec<_>>();
        assert_eq!(names, ["a", "b", "a#2", "3", "0", "1", "2", "3#2"]);
        assert_eq!(data(&rendered.events[1]), json!({"sku": "b", "at": 1}));
        assert_eq!(rendered.failed, 2);
    }

    #[test]
    fn what_is_named_in_other_ways_is_kept_too() {
        let body = r#"{"lines":[{"id":4},{"id":5}],"m":{"k":1},"items":7,"n":{"items":[1]}}"#;
        for (template, value) in [
            ("{{ request.json.lines[1].id }}", json!(5)),
            ("{{ request.json.lines|length }}", json!(2)),
            ("{{ request['json']['items'] }}", json!(7)),
            ("{{ request.json.items }}", json!(7)),
            ("{{ request.json.n.items[0] }}", json!(1)),
            ("{{ request.json.m|items }}", json!([["k", 1]])),
            ("{{ request.json['lines'][0]['id'] }}", json!(4)),
            ("{{ request.json.none is defined }}", json!(false)),
            ("{% set r = request %}{{ r.json.items }}", json!("7")),
            ("{% for l in request.json.lines %}{{ l.id }}{% endfor %}", json!("45")),
        ] {
            let rendered =
                render(&[Spec { payload: Some(json!(template)), ..spec("e") }], body, 201, "{}");
            assert_eq!(data(&rendered.events[0]), value, "{template}");
        }
    }

    #[test]
    fn many_equal_element_keys_take_no_quadratic_time() {
        let each = Spec {
            for_each: Some("response.json".to_owned()),
            event_key: Some("same".to_owned()),
            payload: Some(json!(1)),
            ..spec("e")
        };
        let rendered = render(&[each], "", 201, &format!("[{}0]", "0,".repeat(4999)));
        let keys = rendered.events.iter().map(|event| &event.key).collect::<BTreeSet<_>>();
        assert_eq!(keys.len(), 5000);
        assert_eq!(rendered.events[4999].key, format!("{RECORD}/e/same#5000"));
    }

    #[test]
    fn two_specs_of_one_type_have_two_keys() {
        let rendered = render(&[spec("e"), spec("e")], "", 201, "{}");
        assert_eq!(rendered.events[1].key, format!("{RECORD}/e#2"));
        assert_ne!(rendered.events[0].id, rendered.events[1].id);
    }

    #[test]
    fn what_fails_becomes_an_event_with_the_error() {
        let with = |payload: &str| Spec { payload: Some(json!({ "v": payload })), ..spec("e") };
        let when = Spec { when: Some("response.json.a.b".to_owned()), ..spec("e") };
        let each = Spec { for_each: Some("response.status".to_owned()), ..spec("e") };
        for bad in [
            with("{{ response.json.none }}"),
            with("x{{ response.json.none }}"),
            with("{{ response.json.none.more }}"),
            with("{{ request.json.a }}"),
            with("{{ response.text * 3000 }}"),
            when,
            each,
        ] {
            let rendered = render(std::slice::from_ref(&bad), "oops", 201, "{}");
            assert_eq!((rendered.events.len(), rendered.failed), (1, 1), "{bad:?}");
            assert!(data(&rendered.events[0])["error"].is_string(), "{bad:?}");
            assert_eq!(rendered.events[0].key, format!("{RECORD}/e"));
        }
        let large = format!("{:?}", "x".repeat(3000));
        let rendered = render(&[], "", 201, &large);
        assert_eq!(rendered.failed, 1);
        assert_eq!(data(&rendered.events[0]), json!({"error": "the message is too large"}));
    }

    #[test]
    fn a_large_answer_is_not_built_again_for_each_element_and_the_events_together_are_bounded() {
        let each = |payload: Json| Spec {
            for_each: Some("response.json.lines".to_owned()),
            payload: Some(payload),
            ..spec("e")
        };
        let lines = "0,".repeat(1999);
        let response = format!(r#"{{"lines":[{lines}0],"blob":"{}"}}"#, "x".repeat(1 << 20));
        let whole = render(&[each(json!({"all": "{{ response.json }}"}))], "", 201, &response);
        assert_eq!((whole.events.len(), whole.failed), (2000, 2000));
        let error = data(&whole.events[1999])["error"].as_str().unwrap().to_owned();
        assert!(error.contains("response.json: its value is too large"), "{error}");

        let some = each(json!({"text": "{{ response.json.blob[:1000] }}"}));
        let many = render(&[some], "", 201, &response);
        let bytes: usize = many.events.iter().map(|event| event.payload.len()).sum();
        assert_eq!(many.events.len(), 2000);
        assert!(many.failed > 1000 && many.failed < 2000, "{}", many.failed);
        // 64 of the largest, and an error in place of each further one.
        assert!(bytes < 64 * 2000 + 2000 * 400, "{bytes}");
        let last = data(&many.events[1999]);
        assert_eq!(last, json!({"error": "the events of this record are too large together"}));
    }

    #[test]
    fn a_context_that_was_too_large_fails_into_error_events() {
        let payload = json!({"v": "{{ request.json.a }}"});
        let specs = [Spec { payload: Some(payload), ..spec("e") }, spec("f")];
        let long = format!(r#"{{"a":"{}"}}"#, "x".repeat(70_000));
        let rendered = render(&specs, &long, 201, "{}");
        assert_eq!((rendered.events.len(), rendered.failed), (2, 1));
    }

    #[test]
    fn odd_ordering_keys_stand_as_their_hash() {
        let ordered = Spec { ordering_key: Some("{{ response.json.k }}".to_owned()), ..spec("e") };
        let rendered = render(&[ordered], "", 201, r#"{"k":"a\u0000b"}"#);
        assert!(rendered.events[0].ordering_key.as_ref().unwrap().starts_with("sha256:"));
    }

    #[test]
    fn compile_errors_name_field_and_expression() {
        for (bad, field) in [
            (Spec { when: Some("a ==".to_owned()), ..spec("e") }, "when \"a ==\""),
            (Spec { when: Some("respons.status".to_owned()), ..spec("e") }, "\"respons\""),
            (Spec { when: Some("request.body".to_owned()), ..spec("e") }, "\"body\""),
            (Spec { when: Some("item".to_owned()), ..spec("e") }, "\"item\""),
            (Spec { payload: Some(json!({"a": ["{{ x"]})), ..spec("e") }, "payload.a"),
            (Spec { event_key: Some("{{ key }}".to_owned()), ..spec("e") }, "for_each"),
            (Spec { sinks: Some(vec!["other".to_owned()]), ..spec("e") }, "\"other\""),
            (spec(""), "type"),
        ] {
            let errors = compile(&[bad]).unwrap_err();
            assert!(errors[0].contains(field), "{errors:?}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_answer_or_context_panics(
            context in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..50),
            body in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..50),
        ) {
            let payload = json!({"v": "{{ request.json }}{{ response.text }}"});
            let templates = compile(&[Spec { payload: Some(payload), ..spec("e") }]).unwrap();
            let rendered = templates.render(&Origin {
                record: RECORD.into(),
                scope: &Scope {
                    tenant: Tenant::parse("acme").unwrap(),
                    operation: Operation::parse("o").unwrap(),
                    key: Key::parse("k").unwrap(),
                },
                attempt: Attempt::FIRST,
                at: SystemTime::UNIX_EPOCH,
                context: Some(&context),
                answer: &Answer {
                    status: StatusCode::OK,
                    headers: HeaderMap::new(),
                    spelling: Spelling::default(),
                    body: KeptBody::Whole(body.into()),
                },
            });
            proptest::prop_assert_eq!(rendered.events.len(), 1);
        }
    }
}
