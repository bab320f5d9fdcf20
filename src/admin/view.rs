//! Records, events and audit rows as operators see them: one shape for the admin API and for `--json`.
//!
//! - A field has the name of its column (`tenant_id`, `event_type`, `response_status`), so that it can be used in SQL. Times
//!   are RFC 3339 in UTC, to the microsecond.
//! - Bytes are shown as text if they are UTF-8, and otherwise in a field with the suffix `_base64`.
//! - A list shows no bodies and no payloads, because a page of large ones would be too large.
//! - [`to_json`] also escapes characters that JSON allows and that a browser or a terminal may act on.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::HeaderMap;
use serde::Serialize;

use crate::record::{Answer, KeptBody, Status, hex};
use crate::store::{AttemptRow, AuditRow, EventRow, RecordRow};

/// Declares the view of a row: each field with its value. Lists show these fields; the page of one row has more.
macro_rules! view {
    (
        $(#[$about:meta])*
        $view:ident of $row:ident: $kind:ty {
            $($(#[$field_about:meta])* $field:ident: $type:ty = $value:expr;)*
        }
    ) => {
        $(#[$about])*
        #[derive(Clone, Debug, PartialEq, Eq, Serialize)]
        pub struct $view {
            $($(#[$field_about])* pub $field: $type,)*
        }

        impl $view {
            /// The view in a list.
            #[must_use]
            pub fn brief($row: &$kind) -> Self {
                Self { $($field: $value,)* }
            }
        }
    };
}

view! {
    /// A record. The fields that only [`RecordView::whole`] fills are left out of lists.
    RecordView of row: RecordRow {
        /// Its id.
        id: String = row.id.to_string();
        /// Its tenant.
        tenant_id: String = row.scope.tenant.to_string();
        /// Its operation.
        operation: String = row.scope.operation.to_string();
        /// Its idempotency key.
        key: String = row.scope.key.to_string();
        /// The canonical hash of the request, in hex.
        request_hash: String = hex(&row.fingerprint.canonical);
        /// `in_progress`, `unknown` or `completed`, as stored.
        status: &'static str = row.status.as_str();
        /// The current attempt, from 1.
        attempt: u32 = row.attempt.number();
        /// The process that works, or worked, on it.
        owner: String = row.owner.to_string();
        /// Whether the lease of that process is live.
        owner_lives: bool = row.owner_lives;
        /// The caller: a verified subject, or a keyed digest.
        caller: Option<String> = row.caller.clone();
        /// When it was reserved.
        created_at: String = time(row.created_at);
        /// When it was completed.
        completed_at: Option<String> = row.completed_at.map(time);
        /// When its retention ends.
        expires_at: Option<String> = row.expires_at.map(time);
        /// The status of the stored answer.
        response_status: Option<u16> = row.answer.as_ref().map(|answer| answer.status.as_u16());
        /// Its headers and body.
        #[serde(flatten)]
        whole: Option<RecordContent> = None;
    }
}

/// The fields that only the page of one record shows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RecordContent {
    /// The parts of the request that its events will need, while it is not completed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_context: Option<String>,
    /// The same, if it is not UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_context_base64: Option<String>,
    /// The stored headers as pairs of name and value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response_headers: Option<Vec<(String, String)>>,
    /// Whether the body was small enough to be stored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response_body_retained: Option<bool>,
    /// The body, if it is UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response_body: Option<String>,
    /// The body, if it is not UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response_body_base64: Option<String>,
}

impl RecordView {
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

view! {
    /// An event for one sink. Lists do not show the payload.
    EventView of row: EventRow {
        /// Its id, the same in every attempt and for every sink.
        id: String = row.id.to_string();
        /// Its unique, stable key.
        event_key: String = row.event_key.clone();
        /// Its type.
        event_type: String = row.kind.clone();
        /// Its record's tenant.
        tenant_id: String = row.scope.tenant.to_string();
        /// Its record's operation.
        operation: String = row.scope.operation.to_string();
        /// Its record's key.
        idempotency_key: String = row.scope.key.to_string();
        /// Its record.
        record_id: String = row.record.to_string();
        /// The sink; empty if no sink wanted the event.
        sink: String = row.sink.clone();
        /// Its ordering key, if its sink delivers in order.
        ordering_key: Option<String> = row.ordering_key.clone();
        /// `pending`, `sent`, `dead` or `discarded`.
        status: &'static str = row.status.as_str();
        /// Attempts so far.
        attempts: u32 = row.attempts;
        /// When it is due.
        next_attempt_at: Option<String> = row.next_attempt_at.map(time);
        /// The last error.
        last_error: Option<String> = row.last_error.clone();
        /// When it was written.
        created_at: String = time(row.created_at);
        /// How long ago that was.
        age_seconds: u64 = row.age.as_secs();
        /// When it was delivered.
        sent_at: Option<String> = row.sent_at.map(time);
        /// Whether it is dead and blocks the later events of its ordering key.
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        blocks: bool = row.blocks;
        /// The message, if it is UTF-8.
        #[serde(skip_serializing_if = "Option::is_none")]
        payload: Option<String> = None;
        /// The message, if it is not UTF-8.
        #[serde(skip_serializing_if = "Option::is_none")]
        payload_base64: Option<String> = None;
    }
}

impl EventView {
    /// With its message.
    #[must_use]
    pub fn whole(row: &EventRow) -> Self {
        let (payload, payload_base64) = text_or_base64(&row.payload);
        Self { payload, payload_base64, ..Self::brief(row) }
    }
}

view! {
    /// An audit row: an action of an operator, or a late outcome.
    AuditView of row: AuditRow {
        /// Its id.
        id: String = row.id.to_string();
        /// When.
        at: String = time(row.at);
        /// Who.
        who: String = row.who.clone();
        /// What was done.
        action: String = row.action.clone();
        /// The record.
        record_id: Option<String> = row.record.map(|id| id.to_string());
        /// The event.
        event_id: Option<String> = row.event.map(|id| id.to_string());
        /// Why.
        why: Option<String> = row.why.clone();
        /// More, as JSON text.
        detail: Option<String> = row.detail.clone();
    }
}

/// A page of a list of records.
#[derive(Clone, Debug, Serialize)]
pub struct RecordPage {
    /// Newest first.
    pub records: Vec<RecordView>,
    /// The `cursor` of the next page; `None`: this is the last page.
    pub next: Option<String>,
}

/// A page of a list of events.
#[derive(Clone, Debug, Serialize)]
pub struct EventPage {
    /// Newest first.
    pub events: Vec<EventView>,
    /// The `cursor` of the next page; `None`: this is the last page.
    pub next: Option<String>,
}

view! {
    /// An ended attempt to deliver an event.
    AttemptView of row: AttemptRow {
        /// The sink.
        sink: String = row.sink.clone();
        /// The number of the attempt; a redelivery starts again at 1.
        attempt: u32 = row.attempt;
        /// When it ended.
        at: String = time(row.at);
        /// The status of the answer, if there was one.
        status: Option<u16> = row.status;
        /// The error; `None`: the sink took the event.
        error: Option<String> = row.error.clone();
    }
}

/// RFC 3339 in UTC, to the microsecond. A time outside the years 1970 to 9999 is shown as the nearest one inside.
#[must_use]
pub fn time(at: SystemTime) -> String {
    // The last microsecond of 9999. The formatter knows no later time, and panics on times before 1970.
    let last = Duration::new(253_402_300_799, 999_999_000);
    let since = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().min(last);
    humantime::format_rfc3339_micros(SystemTime::UNIX_EPOCH + since).to_string()
}

/// Headers as pairs in their order. A value that is not UTF-8 is read as Latin-1, as in old HTTP.
#[must_use]
pub fn header_pairs(headers: &HeaderMap) -> Vec<(String, String)> {
    let text = |bytes: &[u8]| match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().copied().map(char::from).collect(),
    };
    headers.iter().map(|(name, value)| (name.to_string(), text(value.as_bytes()))).collect()
}

/// The status for operators: a record in progress whose owner is dead counts as unknown.
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

/// JSON in which strings are escaped so that neither HTML nor a terminal can act on them.
///
/// # Errors
/// The value cannot be written as JSON. The views here always can.
pub fn to_json<T: Serialize>(value: &T) -> Result<String, serde_json::Error> {
    let plain = serde_json::to_string(value)?;
    let mut text = String::with_capacity(plain.len());
    for c in plain.chars() {
        // In JSON these characters occur only in strings, and all of them fit into 16 bits.
        if matches!(c, '<' | '>' | '&') || is_unsafe_to_print(c) {
            write!(text, "\\u{:04x}", u32::from(c)).unwrap_or_default();
        } else {
            text.push(c);
        }
    }
    Ok(text)
}

/// Control characters, line separators, and characters that change the direction of text. None may reach a terminal.
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
            serde_json::to_value(AuditView::brief(&audit)).unwrap(),
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
