//! What a stored outcome announces: a route's templates become events with stable ids and keys.
//!
//! Pure: the same record, context and answer give the same events, whoever completes the record.

use std::time::SystemTime;

use bytes::Bytes;
use http::{HeaderMap, Method};
use uuid::Uuid;

use crate::record::{Answer, Attempt, Operation, RecordId, Scope};

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
pub struct Templates(());

impl Templates {
    /// Compiles a route's events; no specs: the default event.
    ///
    /// # Errors
    /// One sentence for each field that cannot be used.
    pub fn compile(
        _operation: &Operation,
        _specs: &[Spec],
        _all_sinks: &[String],
        _payload_max: usize,
    ) -> Result<Self, Vec<String>> {
        Ok(Self(()))
    }

    /// What completion will need of the request, as JSON; `None`: nothing.
    #[must_use]
    pub fn context(&self, _request: &RequestParts<'_>) -> Option<Bytes> {
        None
    }

    /// The events of a stored outcome.
    #[must_use]
    pub fn render(&self, _origin: &Origin<'_>) -> Rendered {
        Rendered::default()
    }
}
