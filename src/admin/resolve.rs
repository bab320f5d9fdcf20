//! What an operator says of a record: that it did not execute, or that it did and with which answer. Done here for the
//! commands and for the admin listener alike.
//!
//! - An action names the attempt that was looked at; where the record has moved on since, nothing is changed.
//! - The answer is checked before anything is written: it will be replayed to callers as if it came from the upstream, so it
//!   may hold nothing that the gateway would have dropped.
//!
//! The store decides whether a record may be touched, and audits it. When the process dies between the action and its report,
//! the audit table tells whether it was done.

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

/// What a completion by hand needs to know of the record's route.
pub trait Announce: Send + Sync {
    /// What this answer announces by the route's templates, and for how long the route keeps it.
    fn announced(&self, row: &RecordRow, answer: &Answer) -> Announced;
}

impl<F: Fn(&RecordRow, &Answer) -> Announced + Send + Sync> Announce for F {
    fn announced(&self, row: &RecordRow, answer: &Answer) -> Announced {
        self(row, answer)
    }
}

/// What a record's route makes of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Announced {
    /// Its events.
    pub events: Vec<Event>,
    /// How many of them say only why their template failed.
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
    /// The record as it stands, where it is still at the attempt that was seen.
    async fn look(self, store: &dyn Store) -> Result<Result<RecordRow, Objection>, store::Error> {
        let Some(row) = store.show_record(self.id).await? else {
            return Ok(Err(Objection::NotFound));
        };
        let moved = self.attempt.is_some_and(|seen| seen != row.attempt);
        Ok(if moved { Err(Objection::Moved) } else { Ok(row) })
    }
}

/// Frees a record's key. `completed`: also that of a completed record. What the record was.
///
/// # Errors
/// The store's.
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
    /// What it was.
    pub was: RecordRow,
    /// What was written.
    pub completion: Completion,
    /// How many of its events say only why their template failed.
    pub failed: u64,
}

/// Completes a record with an answer that an operator knows.
///
/// # Errors
/// The store's.
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

/// What a release came to. Field names are promised.
#[derive(Clone, Debug, Serialize)]
pub struct ReleaseReport {
    /// The record as it was.
    pub released: RecordView,
    /// Who did it, as the audit log has it.
    pub by: String,
    /// Why.
    pub why: Option<String>,
}

impl ReleaseReport {
    /// Of this record, by this operator.
    #[must_use]
    pub fn of(was: &RecordRow, by: &Operator) -> Self {
        Self { released: RecordView::brief(was), by: by.who.clone(), why: by.why.clone() }
    }
}

/// What a completion came to. Field names are promised.
#[derive(Clone, Debug, Serialize)]
pub struct CompleteReport {
    /// The record as it was.
    pub completed: RecordView,
    /// The status of its answer.
    pub response_status: u16,
    /// The events of the answer.
    pub events: Vec<AnnouncedView>,
    /// How many of them say only why their template failed with this answer.
    pub events_failed: u64,
    /// For how long the answer is replayed.
    pub retention_seconds: u64,
    /// Who did it, as the audit log has it.
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
    /// Of this completion, by this operator.
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
    /// Its status is none of an answer's.
    Status,
    /// A header, by its place, cannot be one of a stored answer.
    Header(usize, &'static str),
    /// It has a body, and its status allows none.
    Body(StatusCode),
}

/// The answer that an operator describes; header lines are pairs of name and value.
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

/// Headers that belong to one connection, or that the gateway makes itself.
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
