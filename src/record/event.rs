//! What a stored outcome announces: a route's templates become events with stable ids and keys.
//!
//! Pure: the same record, context and answer give the same events, whoever completes the record. What templates name of the
//! request is found when they are compiled; only that is kept, as the record's context, and rendering reads nothing else of it.
//!
//! What must stay true: rendering always succeeds. A template that fails, or a message that is too large, gives an event
//! under the same key whose data is the error, and is counted. No two events of a record have one key: a second one gets
//! `#2`.
//!
//! A leaf of a payload that is exactly one `{{ expression }}` keeps its JSON type. Integers of 64 bits are exact, all other
//! numbers are 64-bit floats. The default data embeds the response's bytes as they came. An event without `when` is written
//! for every stored outcome; only the default event, of a route that names none, asks for 2xx.

pub(in crate::record) mod context;
pub mod notice;
mod ordered;
pub mod subscription;
pub(in crate::record) mod template;

use std::collections::{BTreeSet, HashMap};
use std::time::SystemTime;

use bytes::Bytes;
use http::{HeaderMap, Method};
use minijinja::value::Value;
use serde::Serialize;
use serde_json::value::RawValue;
use sha2::{Digest as _, Sha256};
use uuid::Uuid;

pub use self::context::{Context, RecordContext};
use self::subscription::{Subscriber, subscribed_to};
use self::template::{Expression, Text, Tree};
use crate::record::{Answer, Attempt, KeptBody, Operation, RecordId, Scope, hex};

/// The namespace of the ids of events.
const NAMESPACE: Uuid = Uuid::from_u128(0x6f1d_7c52_94a8_4b0e_8a3c_5e2f_d19b_7046);
/// Longest ordering key, in bytes.
const ORDERING_KEY_MAX: usize = 255;
/// Longest key of an element, in bytes; a longer one is replaced by its hash.
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
    /// To which sinks; none: it is `discarded`.
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
    /// What [`Templates::context`] made of the request: the whole of it, or what was kept.
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
    names_request: bool,
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

    /// Whether any sink may get an event of a stored outcome.
    #[must_use]
    pub fn reach_sinks(&self) -> bool {
        self.specs.iter().any(|spec| !spec.sinks.is_empty())
    }

    /// The same, with what a look-up needs of the request kept too.
    #[must_use]
    pub fn beside<'n>(mut self, needs: impl IntoIterator<Item = &'n String>) -> Self {
        self.needs.extend(needs.into_iter().cloned());
        self
    }

    /// Whether anything of the request is kept.
    #[must_use]
    pub fn need_request(&self) -> bool {
        !self.needs.is_empty()
    }

    /// What completion will need of the request; `None`: nothing. At most `kept_max` bytes of JSON are kept with the record.
    /// Where it is more, who completes the record in this process sees all of it, and any other writes events that say so.
    #[must_use]
    pub fn context(&self, request: &RequestParts<'_>, kept_max: usize) -> Option<Context> {
        self.need_request().then(|| context::extract(&self.needs, request, kept_max))
    }

    /// The events of a stored outcome, in the order of the configuration.
    #[must_use]
    pub fn render(&self, origin: &Origin<'_>) -> Rendered {
        let reads = self.specs.iter().any(Compiled::reads);
        let variables = if reads { variables(origin) } else { Value::UNDEFINED };
        let too_large = about(origin).too_large();
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
            if let Some(why) = too_large.as_ref().filter(|_| spec.names_request) {
                writer.event(spec, "", None, Err(why.clone()));
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

fn about<'o>(origin: &Origin<'o>) -> RecordContext<'o> {
    let Origin { record, scope, context, .. } = *origin;
    RecordContext { record, scope, context }
}

fn variables(origin: &Origin<'_>) -> Value {
    context::values(&context::of(&about(origin), Some(origin.answer)))
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
    let before = std::mem::take(&mut compiler.needs);
    let when = compiler.expression("when", spec.when.as_deref());
    let for_each = compiler.expression("for_each", spec.for_each.as_deref());
    compiler.in_element = spec.for_each.is_some();
    let mut compiled = Compiled {
        kind: spec.kind.clone(),
        names_request: false,
        only_success: false,
        when,
        data: spec.payload.as_ref().map(|tree| compiler.tree("payload", tree)),
        for_each,
        element_key: compiler.text("event_key", spec.event_key.as_deref()),
        ordering_key: compiler.text("ordering_key", spec.ordering_key.as_deref()),
        sinks: sinks_of(spec, subscribers),
    };
    compiler.in_element = false;
    compiled.names_request = !compiler.needs.is_empty();
    compiler.needs.extend(before);
    compiled
}

/// The sinks that an event names, or all, as far as they want its type.
fn sinks_of(spec: &Spec, subscribers: &[Subscriber]) -> Vec<String> {
    let subscribed = subscribed_to(subscribers, &spec.kind);
    match &spec.sinks {
        // In the order in which the event names them.
        Some(named) => named.iter().filter(|sink| subscribed.contains(sink)).cloned().collect(),
        None => subscribed,
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

/// The message, in the order of its members.
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

/// A text that a column can hold: one that is too long or holds control characters is replaced by its hash.
fn bounded(text: String, max: usize) -> String {
    if text.len() <= max && !text.chars().any(char::is_control) {
        return text;
    }
    format!("sha256:{}", hex(&Sha256::digest(text.as_bytes())))
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
mod tests;
