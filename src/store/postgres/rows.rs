//! Rows as values, and values as rows. A row that cannot be read fails only what asked for it.

use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use tokio_postgres::Row;
use tokio_postgres::types::FromSql;
use uuid::Uuid;

use crate::record::{
    Answer, Attempt, Caller, Completed, Fence, Fingerprint, KeptBody, Key, Operation, OwnerId,
    Record, RecordId, Scope, State, Status, Tenant, decode_headers,
};
use crate::store::{AuditRow, Cause, Error, EventRow, EventStatus, RecordRow};

/// A column that must be there.
pub(super) fn get<'a, T: FromSql<'a>>(row: &'a Row, column: &str) -> Result<T, Error> {
    row.try_get(column).map_err(|error| Error::Unreadable(error.into()))
}

/// What stands in the database and is not what this program writes.
pub(super) fn unreadable(what: impl Into<Cause>) -> Error {
    Error::Unreadable(what.into())
}

/// A column with one of the values that `parse` knows.
pub(super) fn parsed<T>(
    row: &Row,
    column: &str,
    parse: impl FnOnce(&str) -> Option<T>,
) -> Result<T, Error> {
    let text: &str = get(row, column)?;
    parse(text).ok_or_else(|| unreadable(format!("{column} has no such value: {text}")))
}

/// The one row that a statement always returns.
pub(super) fn only(rows: &[Row]) -> Result<&Row, Error> {
    rows.first().ok_or_else(|| unreadable("the statement returned no row"))
}

/// The first row's number of changed rows, as our changing statements return it.
pub(super) fn count(rows: &[Row]) -> Result<u64, Error> {
    number(only(rows)?)
}

/// What a row counts.
pub(super) fn number(row: &Row) -> Result<u64, Error> {
    get::<i64>(row, "count").map(|count| u64::try_from(count).unwrap_or(0))
}

/// Bytes, where they are kept.
pub(super) fn bytes(row: &Row, column: &str) -> Result<Option<Bytes>, Error> {
    Ok(get::<Option<&[u8]>>(row, column)?.map(Bytes::copy_from_slice))
}

/// A number that the column's type allows to be negative and that never is.
pub(super) fn unsigned(number: i32) -> u32 {
    u32::try_from(number).unwrap_or(0)
}

/// Seconds of the database as a duration; what lies in the past is zero.
pub(super) fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX)
}

/// A duration as the statements take it, in seconds: at most a century, so that no time leaves the database's range.
pub(super) fn seconds(duration: Duration) -> f64 {
    const CENTURY: f64 = 100.0 * 365.25 * 86_400.0;
    duration.as_secs_f64().min(CENTURY)
}

pub(super) fn fence(row: &Row) -> Result<Fence, Error> {
    let id: Uuid = get(row, "id")?;
    let attempt: i32 = get(row, "attempt")?;
    Ok(Fence { id: id.into(), attempt: Attempt::from_number(unsigned(attempt)) })
}

pub(super) fn fingerprint(row: &Row) -> Result<Fingerprint, Error> {
    fn array<const N: usize>(row: &Row, column: &str) -> Result<[u8; N], Error> {
        get::<&[u8]>(row, column)?
            .try_into()
            .map_err(|_| unreadable(format!("{column} has the wrong length")))
    }
    Ok(Fingerprint {
        canonical: array(row, "request_hash")?,
        raw: array(row, "raw_hash")?,
        recipe: array(row, "recipe")?,
    })
}

pub(super) fn caller(row: &Row) -> Result<Option<Caller>, Error> {
    Ok(get::<Option<&str>>(row, "caller")?.map(Caller::stored))
}

pub(super) fn status(row: &Row) -> Result<Status, Error> {
    parsed(row, "status", Status::parse)
}

pub(super) fn scope(row: &Row, key: &str) -> Result<Scope, Error> {
    Ok(Scope {
        tenant: Tenant::stored(get(row, "tenant_id")?),
        operation: Operation::stored(get(row, "operation")?),
        key: Key::stored(get(row, key)?),
    })
}

fn answer(row: &Row) -> Result<Option<Answer>, Error> {
    let Some(status) = get::<Option<i16>>(row, "response_status")? else { return Ok(None) };
    let status = u16::try_from(status).ok().and_then(|status| StatusCode::from_u16(status).ok());
    let headers: Option<&[u8]> = get(row, "response_headers")?;
    let (headers, spelling) = decode_headers(headers.unwrap_or_default()).map_err(unreadable)?;
    Ok(Some(Answer {
        status: status.ok_or_else(|| unreadable("response_status is not a status"))?,
        headers,
        spelling,
        body: bytes(row, "response_body")?.map_or(KeptBody::NotRetained, KeptBody::Whole),
    }))
}

/// The columns that [`record`] reads, of `idempotency_records r` left-joined with `oncegate_owners o`.
macro_rules! record_columns {
    () => {
        "r.id, r.attempt, r.request_hash, r.raw_hash, r.recipe, r.status, r.owner, r.caller, \
         coalesce(o.lease_until > clock_timestamp(), false) AS owner_lives, \
         r.response_status, r.response_headers, r.response_body, r.expires_at, \
         extract(epoch FROM r.expires_at - clock_timestamp())::float8 AS time_left"
    };
}
pub(super) use record_columns;

pub(super) fn record(row: &Row) -> Result<Record, Error> {
    let state = match status(row)? {
        Status::Unknown => State::Unknown,
        Status::InProgress => State::InProgress {
            owner: get::<Uuid>(row, "owner")?.into(),
            owner_lives: get(row, "owner_lives")?,
        },
        Status::Completed => State::Completed(Box::new(Completed {
            answer: answer(row)?.ok_or_else(|| unreadable("completed without an answer"))?,
            expires_at: get(row, "expires_at")?,
            time_left: duration(get(row, "time_left")?),
        })),
    };
    let (fence, fingerprint, caller) = (fence(row)?, fingerprint(row)?, caller(row)?);
    Ok(Record { fence, fingerprint, caller, state })
}

pub(super) fn record_row(row: &Row) -> Result<RecordRow, Error> {
    let Fence { id, attempt } = fence(row)?;
    Ok(RecordRow {
        id,
        scope: scope(row, "key")?,
        fingerprint: fingerprint(row)?,
        status: status(row)?,
        attempt,
        owner: OwnerId::from(get::<Uuid>(row, "owner")?),
        owner_lives: get(row, "owner_lives")?,
        caller: get(row, "caller")?,
        context: bytes(row, "request_context")?,
        created_at: get(row, "created_at")?,
        completed_at: get(row, "completed_at")?,
        expires_at: get(row, "expires_at")?,
        answer: answer(row)?,
    })
}

pub(super) fn event_row(row: &Row) -> Result<EventRow, Error> {
    Ok(EventRow {
        id: get(row, "id")?,
        event_key: get(row, "event_key")?,
        kind: get(row, "event_type")?,
        scope: scope(row, "idempotency_key")?,
        record: RecordId::from(get::<Uuid>(row, "record_id")?),
        sink: get(row, "sink")?,
        ordering_key: get(row, "ordering_key")?,
        payload: Bytes::copy_from_slice(get(row, "payload")?),
        status: parsed(row, "status", EventStatus::parse)?,
        attempts: unsigned(get(row, "attempts")?),
        next_attempt_at: get(row, "next_attempt_at")?,
        last_error: get(row, "last_error")?,
        created_at: get(row, "created_at")?,
        age: duration(get(row, "age")?),
        sent_at: get(row, "sent_at")?,
        blocks: get(row, "blocks")?,
    })
}

pub(super) fn audit_row(row: &Row) -> Result<AuditRow, Error> {
    Ok(AuditRow {
        id: get(row, "id")?,
        at: get(row, "at")?,
        who: get(row, "who")?,
        action: get(row, "action")?,
        record: get::<Option<Uuid>>(row, "record_id")?.map(RecordId::from),
        event: get(row, "event_id")?,
        why: get(row, "why")?,
        detail: get(row, "detail")?,
    })
}
