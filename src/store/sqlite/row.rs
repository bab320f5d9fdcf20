//! Between our types and SQLite's: ids as text, times as microseconds, answers as status, header block and bytes.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rusqlite::types::{ToSqlOutput, Type};
use rusqlite::{Row, ToSql};
use uuid::Uuid;

use crate::record::{Attempt, Key, Operation, OwnerId, RecordId, Tenant};
use crate::store::Cause;
use crate::store::read::Columns;
use crate::telemetry;

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

impl Columns for Row<'_> {
    type Error = rusqlite::Error;

    fn text(&self, column: &str) -> rusqlite::Result<Option<&str>> {
        Ok(self.get_ref(column)?.as_str_or_null()?)
    }

    fn blob(&self, column: &str) -> rusqlite::Result<Option<&[u8]>> {
        Ok(self.get_ref(column)?.as_blob_or_null()?)
    }

    fn integer(&self, column: &str) -> rusqlite::Result<Option<i64>> {
        self.get(column)
    }

    fn flag(&self, column: &str) -> rusqlite::Result<Option<bool>> {
        self.get(column)
    }

    fn id(&self, column: &str) -> rusqlite::Result<Option<Uuid>> {
        let id = self.text(column)?.map(str::parse).transpose();
        id.map_err(|error: uuid::Error| Self::odd(column, error))
    }

    fn time(&self, column: &str) -> rusqlite::Result<Option<SystemTime>> {
        Ok(self.integer(column)?.map(time))
    }

    fn duration(&self, column: &str) -> rusqlite::Result<Option<Duration>> {
        Ok(self.integer(column)?.map(|micros| left(micros, 0)))
    }

    fn odd(column: &str, why: impl Into<Cause>) -> rusqlite::Error {
        let why = format!("column {column}: {}", telemetry::causes(&*why.into()));
        // By its name, and not by its number.
        rusqlite::Error::FromSqlConversionFailure(usize::MAX, Type::Text, why.into())
    }
}

/// The columns of a record as the gateway reads it; `?1` is the database's now.
macro_rules! record_columns {
    () => {
        "id, attempt, request_hash, raw_hash, recipe, status, owner, caller, expires_at, \
         expires_at - ?1 AS time_left, response_status, response_headers, response_body, \
         EXISTS (SELECT 1 FROM oncegate_owners o WHERE o.owner = r.owner AND o.lease_until > ?1) \
         AS owner_lives"
    };
}
pub(super) use record_columns;

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
