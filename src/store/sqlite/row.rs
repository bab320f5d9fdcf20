//! Between our types and SQLite's: ids as text, times as microseconds, answers as status, header block and bytes.
//!
//! Reading never trusts a row: a value that is not what we would have written is an error of that query.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use http::StatusCode;
use rusqlite::types::{ToSqlOutput, Type};
use rusqlite::{Row, ToSql};
use uuid::Uuid;

use crate::record::{
    Answer, Attempt, Caller, Completed, Fence, Fingerprint, KeptBody, Key, Operation, OwnerId,
    Record, RecordId, Scope, State, Status, Tenant, decode_headers,
};

/// Types of ours, as they are stored.
macro_rules! stored {
    ($($of:ty: $value:expr;)*) => {
        $(impl ToSql for $of {
            fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
                let value = $value;
                Ok(value(self).into())
            }
        })*
    };
}

stored! {
    RecordId: ToString::to_string;
    OwnerId: ToString::to_string;
    Attempt: |attempt: &Attempt| attempt.number();
    Tenant: Tenant::as_str;
    Operation: Operation::as_str;
    Key: Key::as_str;
}

/// Longest duration that is stored, some hundred thousand years: sums with a time stay within an INTEGER.
const MICROS_MAX: i64 = i64::MAX / 4;

/// A duration in microseconds.
pub(super) fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(MICROS_MAX).min(MICROS_MAX)
}

/// A stored time.
pub(super) fn time(micros: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_micros(u64::try_from(micros).unwrap_or(0))
}

/// A time that came from a list, back as it is stored.
pub(super) fn stored(time: SystemTime) -> i64 {
    micros(time.duration_since(UNIX_EPOCH).unwrap_or_default())
}

/// What is left from `now` until `then`; zero where it is past.
pub(super) fn left(then: i64, now: i64) -> Duration {
    Duration::from_micros(u64::try_from(then.saturating_sub(now)).unwrap_or(0))
}

/// The error of a column that holds something we never write.
fn odd(
    column: usize,
    cause: impl Into<Box<dyn std::error::Error + Send + Sync>>,
) -> rusqlite::Error {
    rusqlite::Error::FromSqlConversionFailure(column, Type::Text, cause.into())
}

/// A column with an id.
pub(super) fn uuid(row: &Row<'_>, column: usize) -> rusqlite::Result<Uuid> {
    row.get_ref(column)?.as_str()?.parse().map_err(|error: uuid::Error| odd(column, error))
}

/// A column with an id, or NULL.
pub(super) fn uuid_or_null(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<Uuid>> {
    match row.get_ref(column)?.as_str_or_null()? {
        None => Ok(None),
        Some(text) => text.parse().map(Some).map_err(|error: uuid::Error| odd(column, error)),
    }
}

/// A column with a record's status.
pub(super) fn status(row: &Row<'_>, column: usize) -> rusqlite::Result<Status> {
    Status::parse(row.get_ref(column)?.as_str()?).ok_or_else(|| odd(column, "not a status"))
}

/// A column with a value that [`parse`](str::parse)-like functions read from text.
pub(super) fn parsed<T>(
    row: &Row<'_>,
    column: usize,
    parse: impl FnOnce(&str) -> Option<T>,
) -> rusqlite::Result<T> {
    parse(row.get_ref(column)?.as_str()?).ok_or_else(|| odd(column, "not a known value"))
}

/// Id and attempt in two neighbouring columns.
pub(super) fn fence(row: &Row<'_>, column: usize) -> rusqlite::Result<Fence> {
    Ok(Fence {
        id: RecordId::from(uuid(row, column)?),
        attempt: Attempt::from_number(row.get(column + 1)?),
    })
}

/// Hash, raw hash and recipe in three neighbouring columns.
pub(super) fn fingerprint(row: &Row<'_>, column: usize) -> rusqlite::Result<Fingerprint> {
    Ok(Fingerprint {
        canonical: row.get(column)?,
        raw: row.get(column + 1)?,
        recipe: row.get(column + 2)?,
    })
}

/// Who asked.
pub(super) fn caller(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<Caller>> {
    Ok(row.get_ref(column)?.as_str_or_null()?.map(Caller::stored))
}

/// Tenant, operation and key in three neighbouring columns.
pub(super) fn scope(row: &Row<'_>, column: usize) -> rusqlite::Result<Scope> {
    Ok(Scope {
        tenant: Tenant::stored(row.get_ref(column)?.as_str()?),
        operation: Operation::stored(row.get_ref(column + 1)?.as_str()?),
        key: Key::stored(row.get_ref(column + 2)?.as_str()?),
    })
}

/// Status, headers and body in three neighbouring columns; `None` where there is no answer.
pub(super) fn answer(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<Answer>> {
    let Some(code) = row.get::<_, Option<u16>>(column)? else { return Ok(None) };
    let block = row.get_ref(column + 1)?.as_blob_or_null()?.unwrap_or_default();
    let (headers, spelling) = decode_headers(block).map_err(|error| odd(column + 1, error))?;
    let body = row.get::<_, Option<Vec<u8>>>(column + 2)?;
    Ok(Some(Answer {
        status: StatusCode::from_u16(code).map_err(|error| odd(column, error))?,
        headers,
        spelling,
        body: body.map_or(KeptBody::NotRetained, |body| KeptBody::Whole(Bytes::from(body))),
    }))
}

/// The columns that [`record`] reads; `?1` is the database's now.
macro_rules! record_columns {
    () => {
        "id, attempt, request_hash, raw_hash, recipe, status, owner, expires_at, \
         response_status, response_headers, response_body, \
         EXISTS (SELECT 1 FROM oncegate_owners o WHERE o.owner = r.owner AND o.lease_until > ?1), caller"
    };
}
pub(super) use record_columns;

/// A record as the gateway reads it.
pub(super) fn record(row: &Row<'_>, now: i64) -> rusqlite::Result<Record> {
    let state = match status(row, 5)? {
        Status::InProgress => {
            State::InProgress { owner: OwnerId::from(uuid(row, 6)?), owner_lives: row.get(11)? }
        }
        Status::Unknown => State::Unknown,
        Status::Completed => {
            let expires_at: i64 = row.get(7)?;
            State::Completed(Box::new(Completed {
                answer: answer(row, 8)?
                    .ok_or_else(|| odd(8, "a completed record has no answer"))?,
                expires_at: time(expires_at),
                time_left: left(expires_at, now),
            }))
        }
    };
    let (fence, fingerprint, caller) = (fence(row, 0)?, fingerprint(row, 2)?, caller(row, 12)?);
    Ok(Record { fence, fingerprint, caller, state })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_durations_stay_within_bounds() {
        assert_eq!(micros(Duration::MAX), MICROS_MAX);
        assert_eq!(micros(Duration::from_millis(3)), 3000);
        assert_eq!(stored(time(1_790_000_000_123_456)), 1_790_000_000_123_456);
        assert_eq!(time(-5), UNIX_EPOCH);
        assert_eq!(left(5, 9), Duration::ZERO);
        let far = time(2_000_000_000_000_000 + MICROS_MAX);
        assert!(far > UNIX_EPOCH);
    }
}
