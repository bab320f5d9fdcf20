//! Releases and completes records by hand, for the commands and the admin listener.
//!
//! - An action names the attempt that the operator saw. If the record has changed since, nothing is changed.
//! - The answer is checked before it is written: the gateway replays it like an answer of the upstream, so it must not hold a
//!   header that the gateway would have dropped.
//!
//! The store decides whether a record may be changed, and writes the audit row. If the process dies after the action and
//! before its report, the audit table shows whether the action was done.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use serde::Serialize;

use super::view::RecordView;
use crate::record::event::Event;
use crate::record::{Answer, Attempt, Fence, KeptBody, RecordId, Spelling, Status};
use crate::store::{self, Completion, Objection, Operator, RecordRow, Store};

/// Largest body of an answer that an operator gives, in bytes.
pub const BODY_MAX: usize = 16 << 20;

/// What a completion by hand needs from the record's route.
pub trait Announce: Send + Sync {
    /// The events of this answer by the route's templates, and for how long the route keeps it.
    fn announced(&self, row: &RecordRow, answer: &Answer) -> Announced;
}

impl<F: Fn(&RecordRow, &Answer) -> Announced + Send + Sync> Announce for F {
    fn announced(&self, row: &RecordRow, answer: &Answer) -> Announced {
        self(row, answer)
    }
}

/// The events and the retention of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Announced {
    /// Its events.
    pub events: Vec<Event>,
    /// How many of them hold only the error of their template.
    pub failed: u64,
    /// For how long the answer is kept.
    pub retention: Duration,
}

/// Which record an operator acts on.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// The record.
    pub id: RecordId,
    /// The attempt that the operator saw; `None`: the one that is current now.
    pub attempt: Option<Attempt>,
}

impl Target {
    /// Reads the record, if it is still at the attempt that the operator saw.
    async fn look(self, store: &dyn Store) -> Result<Result<RecordRow, Objection>, store::Error> {
        let Some(row) = store.show_record(self.id).await? else {
            return Ok(Err(Objection::NotFound));
        };
        let moved = self.attempt.is_some_and(|seen| seen != row.attempt);
        Ok(if moved { Err(Objection::Moved) } else { Ok(row) })
    }
}

/// Frees a record's key; with `completed` also the key of a completed record. Returns the record as it was.
///
/// # Errors
/// An error of the store.
pub async fn release(
    store: &dyn Store,
    target: Target,
    completed: bool,
    by: &Operator,
) -> Result<Result<RecordRow, Objection>, store::Error> {
    let row = match target.look(store).await? {
        Ok(row) => row,
        Err(why) => return Ok(Err(why)),
    };
    let fence = Fence { id: row.id, attempt: row.attempt };
    let released = store.operator_release(fence, completed, by).await?;
    Ok(released.map(|()| row))
}

/// A record that an operator completed.
#[derive(Clone, Debug)]
pub struct CompletedByHand {
    /// The record as it was.
    pub was: RecordRow,
    /// What was written.
    pub completion: Completion,
    /// How many of its events hold only the error of their template.
    pub failed: u64,
}

/// Completes a record with an answer that an operator knows.
///
/// # Errors
/// An error of the store.
pub async fn complete(
    store: &dyn Store,
    target: Target,
    answer: Answer,
    announce: &dyn Announce,
    by: &Operator,
) -> Result<Result<CompletedByHand, Objection>, store::Error> {
    let was = match target.look(store).await? {
        Ok(row) if row.status == Status::Completed => return Ok(Err(Objection::IsCompleted)),
        Ok(row) => row,
        Err(why) => return Ok(Err(why)),
    };
    let Announced { events, failed, retention } = announce.announced(&was, &answer);
    let completion = Completion {
        scope: was.scope.clone(),
        fence: Fence { id: was.id, attempt: was.attempt },
        answer,
        retention,
        events,
    };
    let completed = store.operator_complete(&completion, by).await?;
    Ok(completed.map(|()| CompletedByHand { was, completion, failed }))
}

/// The result of a release. The field names are stable.
#[derive(Clone, Debug, Serialize)]
pub struct ReleaseReport {
    /// The record as it was.
    pub released: RecordView,
    /// The operator, as in the audit table.
    pub by: String,
    /// Why.
    pub why: Option<String>,
}

impl ReleaseReport {
    /// The result for this record and operator.
    #[must_use]
    pub fn of(was: &RecordRow, by: &Operator) -> Self {
        Self { released: RecordView::brief(was), by: by.who.clone(), why: by.why.clone() }
    }
}

/// The result of a completion. The field names are stable.
#[derive(Clone, Debug, Serialize)]
pub struct CompleteReport {
    /// The record as it was.
    pub completed: RecordView,
    /// The status of its answer.
    pub response_status: u16,
    /// The events of the answer.
    pub events: Vec<AnnouncedView>,
    /// How many of them hold only the error of their template.
    pub events_failed: u64,
    /// For how long the answer is replayed.
    pub retention_seconds: u64,
    /// The operator, as in the audit table.
    pub by: String,
    /// Why.
    pub why: Option<String>,
}

/// An event that a completion wrote.
#[derive(Clone, Debug, Serialize)]
pub struct AnnouncedView {
    /// Its id.
    pub id: String,
    /// Its type.
    pub event_type: String,
    /// The sinks that get it.
    pub sinks: Vec<String>,
}

impl CompleteReport {
    /// The result for this completion and operator.
    #[must_use]
    pub fn of(done: &CompletedByHand, by: &Operator) -> Self {
        let view = |event: &Event| AnnouncedView {
            id: event.id.to_string(),
            event_type: event.kind.clone(),
            sinks: event.sinks.clone(),
        };
        Self {
            completed: RecordView::brief(&done.was),
            response_status: done.completion.answer.status.as_u16(),
            events: done.completion.events.iter().map(view).collect(),
            events_failed: done.failed,
            retention_seconds: done.completion.retention.as_secs(),
            by: by.who.clone(),
            why: by.why.clone(),
        }
    }
}

/// What is wrong with an answer that an operator gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerMistake {
    /// Its status is not final.
    Status,
    /// The header at this index cannot be in a stored answer; why.
    Header(usize, &'static str),
    /// It has a body, and its status does not allow one.
    Body(StatusCode),
}

/// Makes the answer that an operator describes. Header lines are pairs of name and value.
///
/// # Errors
/// The first thing that is wrong with it.
pub fn answer(status: u16, lines: &[(&str, &str)], body: Bytes) -> Result<Answer, AnswerMistake> {
    let status = StatusCode::from_u16(status)
        .ok()
        .filter(|status| (200..=599).contains(&status.as_u16()))
        .ok_or(AnswerMistake::Status)?;
    let mut headers = HeaderMap::new();
    for (index, (name, value)) in lines.iter().enumerate() {
        let (name, value) =
            header(name, value).map_err(|wrong| AnswerMistake::Header(index, wrong))?;
        headers.append(name, value);
    }
    let spelling = Spelling::of(&headers, lines.iter().map(|(name, _)| name.trim()));
    if !body.is_empty() && matches!(status.as_u16(), 204 | 205 | 304) {
        return Err(AnswerMistake::Body(status));
    }
    Ok(Answer { status, headers, spelling, body: KeptBody::Whole(body) })
}

/// Headers that belong to one connection, or that only the gateway sets.
fn is_the_gateways(name: &HeaderName) -> bool {
    const NAMES: [&str; 11] = [
        "connection",
        "content-length",
        "idempotent-replayed",
        "keep-alive",
        "proxy-authenticate",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "via",
    ];
    NAMES.contains(&name.as_str()) || name.as_str().starts_with("oncegate-")
}

fn header(name: &str, value: &str) -> Result<(HeaderName, HeaderValue), &'static str> {
    let name: HeaderName = name.parse().map_err(|_| "no header can have this name")?;
    if is_the_gateways(&name) {
        return Err("the gateway sets this header itself");
    }
    let value = value.trim_matches([' ', '\t']);
    let value = HeaderValue::from_str(value).or_else(|_| HeaderValue::from_bytes(value.as_bytes()));
    Ok((name, value.map_err(|_| "no header can have this value: it has control characters")?))
}
