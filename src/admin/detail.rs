//! Everything that the store knows of one record or one event, for the admin listener and the commands.

use serde::Serialize;
use uuid::Uuid;

use super::view::{AttemptView, AuditView, EventView, RecordView, time};
use crate::record::{RecordId, Status};
use crate::store::{self, EventFilter, EventRow, Store, Unresolved};

/// How many events one record is shown with at most.
pub const DETAIL_EVENTS_MAX: u32 = 500;
/// How many rows of one event are read, one for each sink.
const ROWS_MAX: u32 = 500;

/// The rows of an event, one for each sink.
///
/// # Errors
/// An error of the store.
pub async fn event_rows(store: &dyn Store, id: Uuid) -> Result<Vec<EventRow>, store::Error> {
    let filter = EventFilter { id: Some(id), limit: ROWS_MAX, ..EventFilter::default() };
    store.list_events(&filter).await
}

/// Everything that the store knows of one event.
#[derive(Clone, Debug, Serialize)]
pub struct EventDetail {
    /// Its row for each sink, with the message.
    pub events: Vec<EventView>,
    /// The attempts that have ended, by sink, oldest first: successes, and the failures that are kept.
    pub attempts: Vec<AttemptView>,
}

/// Reads an event. `None`: no event has this id.
///
/// # Errors
/// An error of the store.
pub async fn event_detail(
    store: &dyn Store,
    id: Uuid,
) -> Result<Option<EventDetail>, store::Error> {
    let rows = event_rows(store, id).await?;
    if rows.is_empty() {
        return Ok(None);
    }
    let attempts = store.attempts_of(id).await?;
    Ok(Some(EventDetail {
        events: rows.iter().map(EventView::whole).collect(),
        attempts: attempts.iter().map(AttemptView::brief).collect(),
    }))
}

/// Everything that the store knows of one record.
#[derive(Clone, Debug, Serialize)]
pub struct RecordDetail {
    /// The record with its answer. `None`: it expired or was released, and events or audit rows of it are left.
    pub record: Option<RecordView>,
    /// More about it while it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub doubt: Option<UnknownView>,
    /// Its events, oldest first, without their messages.
    pub events: Vec<EventView>,
    /// Whether there are more events than are shown.
    pub events_cut: bool,
    /// Its audit rows, oldest first: actions of operators, and late outcomes.
    pub audit: Vec<AuditView>,
}

/// The state of an unknown record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct UnknownView {
    /// When its attempt became unknown. If the owner died, the end of the owner's lease.
    pub since: String,
    /// How many look-ups in a row had no result.
    pub asked: u32,
    /// The time of the next look-up, after one had no result.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_ask_at: Option<String>,
}

impl From<Unresolved> for UnknownView {
    fn from(doubt: Unresolved) -> Self {
        let Unresolved { since, asked, next_ask_at, .. } = doubt;
        Self { since: time(since), asked, next_ask_at: (asked > 0).then(|| time(next_ask_at)) }
    }
}

/// Reads a record. `None`: no record, event or audit row has this id.
///
/// # Errors
/// An error of the store.
pub async fn record_detail(
    store: &dyn Store,
    id: RecordId,
) -> Result<Option<RecordDetail>, store::Error> {
    let row = store.show_record(id).await?;
    let doubt = match &row {
        Some(row) if row.status == Status::Unknown => {
            match store.unresolved(id).await {
                // The stored request cannot be opened. The other fields are still shown.
                Err(store::Error::Unreadable(_)) => None,
                found => found?.map(UnknownView::from),
            }
        }
        Some(_) | None => None,
    };
    let (events, events_cut) = events_of(store, id).await?;
    let audit: Vec<_> = store.audit_of(id).await?.iter().map(AuditView::brief).collect();
    if row.is_none() && events.is_empty() && audit.is_empty() {
        return Ok(None);
    }
    let record = row.as_ref().map(RecordView::whole);
    Ok(Some(RecordDetail { record, doubt, events, events_cut, audit }))
}

async fn events_of(
    store: &dyn Store,
    id: RecordId,
) -> Result<(Vec<EventView>, bool), store::Error> {
    let limit = DETAIL_EVENTS_MAX.saturating_add(1);
    let filter = EventFilter { record: Some(id), limit, ..EventFilter::default() };
    let mut rows = store.list_events(&filter).await?;
    let cut = rows.len() >= limit as usize;
    rows.truncate(DETAIL_EVENTS_MAX as usize);
    Ok((rows.iter().rev().map(EventView::brief).collect(), cut))
}
