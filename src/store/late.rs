//! Outcomes that came too late: their record had gone on, so they are in the audit table, whole.
//!
//! Whatever an attempt came to, somebody may need it: the answer that the upstream gave to an execution that an operator, or
//! a later attempt, has overtaken. What must stay true: one attempt has one such row, however often it is written, because
//! its id is made from the fence; nothing of the outcome is left out but a body that its route does not keep.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::HeaderMap;
use serde_json::{Value, json};
use uuid::Uuid;

use super::Completion;
use crate::record::event::Event;
use crate::record::{Answer, Fence, KeptBody, Scope};

/// The namespace of the rows' ids.
const NAMESPACE: Uuid = Uuid::from_u128(0x2f6b_4e0d_8c51_4a37_b0f4_91d6_3c7a_e815);

/// What an attempt came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LateEnd {
    /// The upstream executed it: the answer that would have been kept, and the events that would have been written.
    Completed {
        /// The answer.
        answer: Answer,
        /// The events.
        events: Vec<Event>,
    },
    /// The upstream said that it did not execute.
    Released {
        /// The answer.
        answer: Answer,
    },
    /// Not one byte of it was sent.
    NotSent,
}

/// An outcome that found its record at another attempt, completed by somebody else, or gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LateOutcome {
    /// The record's scope.
    pub scope: Scope,
    /// The attempt that came to it.
    pub fence: Fence,
    /// What it came to.
    pub end: LateEnd,
}

impl LateOutcome {
    /// Who writes it, in the column `who`.
    pub const WHO: &'static str = "gateway";
    /// The column `action`.
    pub const ACTION: &'static str = "late_outcome";

    /// Whether it is this answer, by status and body: then there is nothing to note where the same attempt has it already.
    /// Headers say nothing here, since who looked up or completed the record itself has kept hardly any.
    #[must_use]
    pub fn is(&self, kept: &Answer) -> bool {
        matches!(&self.end, LateEnd::Completed { answer, .. }
            if (answer.status, &answer.body) == (kept.status, &kept.body))
    }

    /// The completion that it would have been; none where nothing was executed. Its record has gone on, for ever: it keeps
    /// nothing any more, and only carries the outcome.
    #[must_use]
    pub fn completion(&self) -> Option<Completion> {
        let LateEnd::Completed { answer, events } = &self.end else { return None };
        Some(Completion {
            scope: self.scope.clone(),
            fence: self.fence,
            answer: answer.clone(),
            retention: Duration::ZERO,
            events: events.clone(),
        })
    }

    /// The row's id: the same for each try to write it.
    #[must_use]
    pub fn id(&self) -> Uuid {
        let name = format!("{}/{}", self.fence.id, self.fence.attempt.number());
        Uuid::new_v5(&NAMESPACE, name.as_bytes())
    }

    /// One line for people, in the column `why`.
    #[must_use]
    pub fn summary(&self) -> String {
        let attempt = self.fence.attempt.number();
        match &self.end {
            LateEnd::Completed { answer, events } => format!(
                "attempt {attempt} was answered {} after the record had gone on; events not written: {}",
                answer.status.as_u16(),
                events.len()
            ),
            LateEnd::Released { answer } => format!(
                "attempt {attempt} was answered {}, not executed, after the record had gone on",
                answer.status.as_u16()
            ),
            LateEnd::NotSent => {
                format!("attempt {attempt} turned out never sent after the record had gone on")
            }
        }
    }

    /// All of it as JSON, for the column `detail`.
    #[must_use]
    pub fn detail(&self) -> Value {
        let Scope { tenant, operation, key } = &self.scope;
        let mut detail = json!({
            "tenant": tenant.as_str(),
            "operation": operation.as_str(),
            "key": key.as_str(),
            "attempt": self.fence.attempt.number(),
        });
        let (outcome, answer, events) = match &self.end {
            LateEnd::Completed { answer, events } => ("completed", Some(answer), &events[..]),
            LateEnd::Released { answer } => ("released", Some(answer), &[][..]),
            LateEnd::NotSent => ("not_sent", None, &[][..]),
        };
        if let Value::Object(fields) = &mut detail {
            fields.insert("outcome".to_owned(), outcome.into());
            if let Some(answer) = answer {
                fields.insert("status".to_owned(), answer.status.as_u16().into());
                fields.insert("headers".to_owned(), headers(&answer.headers));
                fields.insert("body_base64".to_owned(), body(&answer.body));
            }
            fields.insert("events".to_owned(), events.iter().map(event).collect());
        }
        detail
    }
}

impl From<&Completion> for LateOutcome {
    fn from(completion: &Completion) -> Self {
        let Completion { scope, fence, answer, events, .. } = completion;
        let end = LateEnd::Completed { answer: answer.clone(), events: events.clone() };
        Self { scope: scope.clone(), fence: *fence, end }
    }
}

/// Pairs of name and value, in their order; a value that is no text is given as `value_base64`.
pub(super) fn headers(headers: &HeaderMap) -> Value {
    let line = |(name, value): (&http::HeaderName, &http::HeaderValue)| match value.to_str() {
        Ok(text) => json!({ "name": name.as_str(), "value": text }),
        Err(_) => {
            json!({ "name": name.as_str(), "value_base64": STANDARD.encode(value.as_bytes()) })
        }
    };
    headers.iter().map(line).collect()
}

/// `null`: the route does not keep a body of this size.
fn body(body: &KeptBody) -> Value {
    match body {
        KeptBody::Whole(bytes) => STANDARD.encode(bytes).into(),
        KeptBody::NotRetained => Value::Null,
    }
}

fn event(event: &Event) -> Value {
    json!({
        "id": event.id.to_string(),
        "event_key": event.key,
        "event_type": event.kind,
        "ordering_key": event.ordering_key,
        "sinks": event.sinks,
        "payload_base64": STANDARD.encode(&event.payload),
    })
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http::{HeaderValue, StatusCode};

    use super::*;
    use crate::record::{Attempt, Key, Operation, RecordId, Spelling, Tenant};

    fn late(end: LateEnd) -> LateOutcome {
        let scope = Scope {
            tenant: Tenant::stored("t"),
            operation: Operation::stored("o"),
            key: Key::stored("k"),
        };
        let fence = Fence { id: Uuid::from_u128(7).into(), attempt: Attempt::FIRST };
        LateOutcome { scope, fence, end }
    }

    #[test]
    fn nothing_of_an_outcome_is_left_out() {
        let mut headers = HeaderMap::new();
        headers.append("x", HeaderValue::from_static("1"));
        headers.append("x", HeaderValue::from_bytes(b"\xe9").unwrap());
        let body = KeptBody::Whole(Bytes::from_static(b"\0\xff"));
        let answer =
            Answer { status: StatusCode::CREATED, headers, spelling: Spelling::default(), body };
        let event = Event {
            id: Uuid::from_u128(1),
            key: "r/e".into(),
            kind: "e".into(),
            position: 0,
            ordering_key: Some("o".into()),
            payload: Bytes::from_static(b"{}"),
            sinks: vec!["main".into()],
        };
        let detail = late(LateEnd::Completed { answer, events: vec![event] }).detail();
        let expected = json!({
            "tenant": "t", "operation": "o", "key": "k", "attempt": 1, "outcome": "completed",
            "status": 201, "body_base64": "AP8=",
            "headers": [{ "name": "x", "value": "1" }, { "name": "x", "value_base64": "6Q==" }],
            "events": [{
                "id": "00000000-0000-0000-0000-000000000001", "event_key": "r/e", "event_type": "e",
                "ordering_key": "o", "sinks": ["main"], "payload_base64": "e30=",
            }],
        });
        assert_eq!(detail, expected);
    }

    #[test]
    fn one_attempt_has_one_row() {
        let first = late(LateEnd::NotSent);
        assert_eq!(first.id(), first.clone().id());
        let second = Fence { attempt: Attempt::FIRST.next(), ..first.fence };
        assert_ne!(first.id(), LateOutcome { fence: second, ..first.clone() }.id());
        let other = Fence { id: RecordId::fresh(), ..first.fence };
        assert_ne!(first.id(), LateOutcome { fence: other, ..first.clone() }.id());
    }
}
