//! Records, events and audit rows as operators see them: one shape for the admin API and for `--json`.
//!
//! - A field is named like the column it shows (`tenant_id`, `event_type`, `response_status`), so that what is read
//!   here can be typed into SQL. Times are RFC 3339 in UTC, to the microsecond.
//! - Bytes are shown as text where they are UTF-8, else under the same name with `_base64`. Nothing is lost.
//! - A list shows no bodies and no payloads: their size is bounded one by one, not by the hundred.
//! - [`to_json`] also escapes what JSON may leave as it is but a browser or a terminal may act on. Whatever callers
//!   put into a key or a body, it stays text.
//!
//! Nothing is written here, and nothing is kept: a view lives as long as one answer.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::HeaderMap;
use serde::Serialize;

use crate::record::{Answer, KeptBody, Status, hex};
use crate::store::{AttemptRow, AuditRow, EventRow, RecordRow};

/// A record. The fields that only [`RecordView::whole`] fills are left out of lists.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RecordView {
    /// Its id.
    pub id: String,
    /// Whose key.
    pub tenant_id: String,
    /// For which operation.
    pub operation: String,
    /// The idempotency key.
    pub key: String,
    /// The canonical hash of the request, in hex.
    pub request_hash: String,
    /// `in_progress`, `unknown` or `completed`, as stored.
    pub status: &'static str,
    /// The current attempt, from 1.
    pub attempt: u32,
    /// Who works, or worked, on it.
    pub owner: String,
    /// Whether that owner's lease is live now.
    pub owner_lives: bool,
    /// Who asked: a verified subject, or a keyed digest.
    pub caller: Option<String>,
    /// When it was reserved.
    pub created_at: String,
    /// When it was completed.
    pub completed_at: Option<String>,
    /// When its retention ends.
    pub expires_at: Option<String>,
    /// The kept answer's status.
    pub response_status: Option<u16>,
    /// Its headers and body.
    #[serde(flatten)]
    pub whole: Option<RecordContent>,
}

/// What only the view of one record shows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RecordContent {
    /// What events will need of the request, while it is not completed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_context: Option<String>,
    /// The same, where it is not UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_context_base64: Option<String>,
    /// The kept headers as pairs of name and value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response_headers: Option<Vec<(String, String)>>,
    /// Whether the answer's body was small enough to be kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response_body_retained: Option<bool>,
    /// The body, where it is UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response_body: Option<String>,
    /// The body, where it is not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response_body_base64: Option<String>,
}

impl RecordView {
    /// As a list shows it.
    #[must_use]
    pub fn brief(row: &RecordRow) -> Self {
        Self {
            id: row.id.to_string(),
            tenant_id: row.scope.tenant.to_string(),
            operation: row.scope.operation.to_string(),
            key: row.scope.key.to_string(),
            request_hash: hex(&row.fingerprint.canonical),
            status: row.status.as_str(),
            attempt: row.attempt.number(),
            owner: row.owner.to_string(),
            owner_lives: row.owner_lives,
            caller: row.caller.clone(),
            created_at: time(row.created_at),
            completed_at: row.completed_at.map(time),
            expires_at: row.expires_at.map(time),
            response_status: row.answer.as_ref().map(|answer| answer.status.as_u16()),
            whole: None,
        }
    }

    /// With its headers and body.
    #[must_use]
    pub fn whole(row: &RecordRow) -> Self {
        let mut whole = row.answer.as_ref().map(RecordContent::of_answer).unwrap_or_default();
        if let Some(context) = &row.context {
            (whole.request_context, whole.request_context_base64) = text_or_base64(context);
        }
        Self { whole: Some(whole), ..Self::brief(row) }
    }
}

impl RecordContent {
    fn of_answer(answer: &Answer) -> Self {
        let mut view =
            Self { response_headers: Some(header_pairs(&answer.headers)), ..Self::default() };
        match &answer.body {
            KeptBody::Whole(bytes) => {
                view.response_body_retained = Some(true);
                (view.response_body, view.response_body_base64) = text_or_base64(bytes);
            }
            KeptBody::NotRetained => view.response_body_retained = Some(false),
        }
        view
    }
}

/// An event towards one sink. The payload is left out of lists.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EventView {
    /// Its id: the same in every attempt and towards every sink.
    pub id: String,
    /// Its unique, stable key.
    pub event_key: String,
    /// Its type.
    pub event_type: String,
    /// Its record's tenant.
    pub tenant_id: String,
    /// Its record's operation.
    pub operation: String,
    /// Its record's key.
    pub idempotency_key: String,
    /// Its record.
    pub record_id: String,
    /// Towards which sink; empty: none wanted it.
    pub sink: String,
    /// Within what it is delivered in order, where its sink does that.
    pub ordering_key: Option<String>,
    /// `pending`, `sent`, `dead` or `discarded`.
    pub status: &'static str,
    /// Attempts so far.
    pub attempts: u32,
    /// When it is due.
    pub next_attempt_at: Option<String>,
    /// What went wrong last.
    pub last_error: Option<String>,
    /// When it was written.
    pub created_at: String,
    /// How long ago that was.
    pub age_seconds: u64,
    /// When it was delivered.
    pub sent_at: Option<String>,
    /// Whether it is dead and the events behind it in its ordering key wait for it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub blocks: bool,
    /// The message, where it is UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub payload: Option<String>,
    /// The message, where it is not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub payload_base64: Option<String>,
}

impl EventView {
    /// As a list shows it.
    #[must_use]
    pub fn brief(row: &EventRow) -> Self {
        Self {
            id: row.id.to_string(),
            event_key: row.event_key.clone(),
            event_type: row.kind.clone(),
            tenant_id: row.scope.tenant.to_string(),
            operation: row.scope.operation.to_string(),
            idempotency_key: row.scope.key.to_string(),
            record_id: row.record.to_string(),
            sink: row.sink.clone(),
            ordering_key: row.ordering_key.clone(),
            status: row.status.as_str(),
            attempts: row.attempts,
            next_attempt_at: row.next_attempt_at.map(time),
            last_error: row.last_error.clone(),
            created_at: time(row.created_at),
            age_seconds: row.age.as_secs(),
            sent_at: row.sent_at.map(time),
            blocks: row.blocks,
            payload: None,
            payload_base64: None,
        }
    }

    /// With its message.
    #[must_use]
    pub fn whole(row: &EventRow) -> Self {
        let (payload, payload_base64) = text_or_base64(&row.payload);
        Self { payload, payload_base64, ..Self::brief(row) }
    }
}

/// Something that was done by hand, or that came too late.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AuditView {
    /// Its id.
    pub id: String,
    /// When.
    pub at: String,
    /// Who.
    pub who: String,
    /// What was done.
    pub action: String,
    /// To which record.
    pub record_id: Option<String>,
    /// To which event.
    pub event_id: Option<String>,
    /// Why.
    pub why: Option<String>,
    /// More, as JSON text.
    pub detail: Option<String>,
}

impl From<&AuditRow> for AuditView {
    fn from(row: &AuditRow) -> Self {
        Self {
            id: row.id.to_string(),
            at: time(row.at),
            who: row.who.clone(),
            action: row.action.clone(),
            record_id: row.record.map(|id| id.to_string()),
            event_id: row.event.map(|id| id.to_string()),
            why: row.why.clone(),
            detail: row.detail.clone(),
        }
    }
}

/// A page of a list of records.
#[derive(Clone, Debug, Serialize)]
pub struct RecordPage {
    /// Newest first.
    pub records: Vec<RecordView>,
    /// What to send as `cursor` for the page after this one; `None`: this is the last.
    pub next: Option<String>,
}

/// A page of a list of events.
#[derive(Clone, Debug, Serialize)]
pub struct EventPage {
    /// Newest first.
    pub events: Vec<EventView>,
    /// What to send as `cursor` for the page after this one; `None`: this is the last.
    pub next: Option<String>,
}

/// An attempt to deliver an event, that has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AttemptView {
    /// Towards which sink.
    pub sink: String,
    /// Which attempt; counted anew after a redelivery.
    pub attempt: u32,
    /// When it ended.
    pub at: String,
    /// The sink's status, where there was one.
    pub status: Option<u16>,
    /// What went wrong; `None`: the sink took it.
    pub error: Option<String>,
}

impl From<&AttemptRow> for AttemptView {
    fn from(row: &AttemptRow) -> Self {
        Self {
            sink: row.sink.clone(),
            attempt: row.attempt,
            at: time(row.at),
            status: row.status,
            error: row.error.clone(),
        }
    }
}

/// RFC 3339 in UTC, to the microsecond. A time outside the years 1970 to 9999 is shown as the nearest one inside.
#[must_use]
pub fn time(at: SystemTime) -> String {
    // The last microsecond of 9999: the formatter knows no later time, and panics on those before 1970.
    let last = Duration::new(253_402_300_799, 999_999_000);
    let since = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().min(last);
    humantime::format_rfc3339_micros(SystemTime::UNIX_EPOCH + since).to_string()
}

/// Headers as pairs in their order. A value that is not UTF-8 is read as Latin-1, as HTTP once did.
#[must_use]
pub fn header_pairs(headers: &HeaderMap) -> Vec<(String, String)> {
    let text = |bytes: &[u8]| match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().copied().map(char::from).collect(),
    };
    headers.iter().map(|(name, value)| (name.to_string(), text(value.as_bytes()))).collect()
}

/// The status as a person may read it: a record in progress whose owner is dead counts as unknown.
#[must_use]
pub fn displayed_status(row: &RecordRow) -> &'static str {
    match (row.status, row.owner_lives) {
        (Status::InProgress, false) => "in_progress (owner gone)",
        (Status::InProgress | Status::Unknown | Status::Completed, _) => row.status.as_str(),
    }
}

fn text_or_base64(bytes: &[u8]) -> (Option<String>, Option<String>) {
    match std::str::from_utf8(bytes) {
        Ok(text) => (Some(text.to_owned()), None),
        Err(_) => (None, Some(STANDARD.encode(bytes))),
    }
}

/// JSON in which everything that HTML or a terminal could act on is escaped inside the strings.
///
/// # Errors
/// Where the value cannot be JSON; the views here always can.
pub fn to_json<T: Serialize>(value: &T) -> Result<String, serde_json::Error> {
    let plain = serde_json::to_string(value)?;
    let mut text = String::with_capacity(plain.len());
    for c in plain.chars() {
        // None of these characters stands outside a string in JSON, and all are within 16 bits.
        if matches!(c, '<' | '>' | '&') || is_unsafe_to_print(c) {
            write!(text, "\\u{:04x}", u32::from(c)).unwrap_or_default();
        } else {
            text.push(c);
        }
    }
    Ok(text)
}

/// Control characters, line separators and what turns the direction of text around: none may reach a terminal.
#[must_use]
pub fn is_unsafe_to_print(c: char) -> bool {
    let turns =
        matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    c.is_control() || turns || matches!(c, '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{061c}')
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http::{HeaderValue, StatusCode};
    use serde_json::json;
    use uuid::Uuid;

    use super::*;
    use crate::record::{Attempt, Fingerprint, Key, Operation, Scope, Spelling, Tenant};
    use crate::store::EventStatus;

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::new(seconds, 250_000_000)
    }

    fn scope(key: &str) -> Scope {
        Scope {
            tenant: Tenant::stored("acme"),
            operation: Operation::stored("orders.create"),
            key: Key::stored(key),
        }
    }

    fn row(answer: Option<Answer>) -> RecordRow {
        RecordRow {
            id: Uuid::from_u128(1).into(),
            scope: scope("k-1"),
            fingerprint: Fingerprint { canonical: [0xab; 32], raw: [1; 32], recipe: [2; 8] },
            status: Status::Completed,
            attempt: Attempt::FIRST,
            owner: Uuid::from_u128(2).into(),
            owner_lives: true,
            caller: None,
            context: None,
            created_at: at(1_924_992_000),
            completed_at: Some(at(1_924_992_001)),
            expires_at: None,
            answer,
        }
    }

    fn answer(body: KeptBody) -> Answer {
        let mut headers = HeaderMap::new();
        headers.append("content-type", HeaderValue::from_static("text/plain"));
        headers.append("x-raw", HeaderValue::from_bytes(b"caf\xe9").unwrap());
        Answer { status: StatusCode::CREATED, headers, spelling: Spelling::default(), body }
    }

    fn brief_json() -> serde_json::Value {
        json!({
            "id": "00000000-0000-0000-0000-000000000001",
            "tenant_id": "acme",
            "operation": "orders.create",
            "key": "k-1",
            "request_hash": "ab".repeat(32),
            "status": "completed",
            "attempt": 1,
            "owner": "00000000-0000-0000-0000-000000000002",
            "owner_lives": true,
            "caller": null,
            "created_at": "2031-01-01T00:00:00.250000Z",
            "completed_at": "2031-01-01T00:00:01.250000Z",
            "expires_at": null,
            "response_status": 201,
        })
    }

    #[test]
    fn a_list_shows_a_record_by_its_column_names_and_without_its_body() {
        let row = row(Some(answer(KeptBody::NotRetained)));
        assert_eq!(serde_json::to_value(RecordView::brief(&row)).unwrap(), brief_json());
    }

    #[test]
    fn one_record_is_shown_with_headers_and_body_and_says_when_the_body_was_not_kept() {
        let headers = json!([["content-type", "text/plain"], ["x-raw", "caf\u{e9}"]]);
        for (body, more) in [
            (
                KeptBody::Whole(Bytes::from_static(b"ok \xc3\xa9")),
                json!({"response_body_retained": true, "response_body": "ok é"}),
            ),
            (
                KeptBody::Whole(Bytes::from_static(b"\xff\x00")),
                json!({"response_body_retained": true, "response_body_base64": "/wA="}),
            ),
            (KeptBody::NotRetained, json!({"response_body_retained": false})),
        ] {
            let mut wanted = brief_json();
            let fields = wanted.as_object_mut().unwrap();
            fields.insert("response_headers".to_owned(), headers.clone());
            fields.extend(more.as_object().unwrap().clone());
            let row = row(Some(answer(body)));
            assert_eq!(serde_json::to_value(RecordView::whole(&row)).unwrap(), wanted);
        }
    }

    #[test]
    fn an_unfinished_record_shows_its_request_context() {
        let mut row = row(None);
        row.context = Some(Bytes::from_static(b"{\"a\":1}"));
        let view = serde_json::to_value(RecordView::whole(&row)).unwrap();
        assert_eq!(view["request_context"], "{\"a\":1}");
        assert_eq!(view["response_status"], serde_json::Value::Null);
        assert_eq!(view.get("response_body_retained"), None);
    }

    #[test]
    fn events_and_audit_rows_are_shown_by_their_column_names() {
        let event = EventRow {
            id: Uuid::from_u128(3),
            event_key: "r/order.created".to_owned(),
            kind: "order.created".to_owned(),
            scope: scope("k-1"),
            record: Uuid::from_u128(1).into(),
            sink: "main".to_owned(),
            ordering_key: None,
            payload: Bytes::from_static(b"{}"),
            status: EventStatus::Dead,
            attempts: 20,
            next_attempt_at: None,
            last_error: Some("500".to_owned()),
            created_at: at(1_924_992_000),
            age: Duration::from_secs(90),
            sent_at: None,
            blocks: false,
        };
        let mut wanted = json!({
            "id": "00000000-0000-0000-0000-000000000003",
            "event_key": "r/order.created",
            "event_type": "order.created",
            "tenant_id": "acme",
            "operation": "orders.create",
            "idempotency_key": "k-1",
            "record_id": "00000000-0000-0000-0000-000000000001",
            "sink": "main",
            "ordering_key": null,
            "status": "dead",
            "attempts": 20,
            "next_attempt_at": null,
            "last_error": "500",
            "created_at": "2031-01-01T00:00:00.250000Z",
            "age_seconds": 90,
            "sent_at": null,
        });
        assert_eq!(serde_json::to_value(EventView::brief(&event)).unwrap(), wanted);
        wanted.as_object_mut().unwrap().insert("payload".to_owned(), json!("{}"));
        assert_eq!(serde_json::to_value(EventView::whole(&event)).unwrap(), wanted);

        let audit = AuditRow {
            id: Uuid::from_u128(4),
            at: at(1_924_992_000),
            who: "ann".to_owned(),
            action: "event.redeliver".to_owned(),
            record: None,
            event: Some(Uuid::from_u128(3)),
            why: None,
            detail: None,
        };
        assert_eq!(
            serde_json::to_value(AuditView::from(&audit)).unwrap(),
            json!({
                "id": "00000000-0000-0000-0000-000000000004",
                "at": "2031-01-01T00:00:00.250000Z",
                "who": "ann",
                "action": "event.redeliver",
                "record_id": null,
                "event_id": "00000000-0000-0000-0000-000000000003",
                "why": null,
                "detail": null,
            })
        );
    }

    #[test]
    fn what_a_browser_or_a_terminal_could_act_on_is_escaped_and_still_the_same_value() {
        let nasty = "<script>&\u{1b}[31m\u{9b}\u{7f}\u{202e}\u{2028}\r\n\"\\é";
        let text = to_json(&json!({ "key": nasty })).unwrap();
        assert_eq!(
            text,
            "{\"key\":\"\\u003cscript\\u003e\\u0026\\u001b[31m\\u009b\\u007f\\u202e\\u2028\\r\\n\\\"\\\\é\"}"
        );
        let back: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(back["key"], nasty);
    }

    #[test]
    fn no_time_that_a_database_can_hold_makes_a_view_panic() {
        let early = SystemTime::UNIX_EPOCH - Duration::from_secs(9_999_999_999);
        let late = SystemTime::UNIX_EPOCH + Duration::from_secs(999_999_999_999);
        assert_eq!(time(early), "1970-01-01T00:00:00.000000Z");
        assert_eq!(time(late), "9999-12-31T23:59:59.999999Z");
    }
}
