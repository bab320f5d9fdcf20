//! Rows and their columns as this driver gives them. A row that cannot be read fails only what asked for it.

use std::error::Error as StdError;
use std::time::{Duration, SystemTime};

use tokio_postgres::Row;
use tokio_postgres::types::{FromSql, Type};
use uuid::Uuid;

use crate::store::read::Columns;
use crate::store::{Cause, Error};

/// A column that must be there.
pub(super) fn get<'a, T: FromSql<'a>>(row: &'a Row, column: &str) -> Result<T, Error> {
    row.try_get(column).map_err(|error| Error::Unreadable(error.into()))
}

/// What is in the database and is not what this program writes.
pub(super) fn unreadable(what: impl Into<Cause>) -> Error {
    Error::Unreadable(what.into())
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

/// Seconds of the database as a duration; what lies in the past is zero.
pub(super) fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX)
}

/// A duration as the statements take it, in seconds: at most a century, so that no time leaves the database's range.
pub(super) fn seconds(duration: Duration) -> f64 {
    const CENTURY: f64 = 100.0 * 365.25 * 86_400.0;
    duration.as_secs_f64().min(CENTURY)
}

/// An integer of any width.
struct Integer(i64);

impl<'a> FromSql<'a> for Integer {
    fn from_sql(kind: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn StdError + Sync + Send>> {
        Ok(Self(match *kind {
            Type::INT2 => i16::from_sql(kind, raw)?.into(),
            Type::INT4 => i32::from_sql(kind, raw)?.into(),
            _ => i64::from_sql(kind, raw)?,
        }))
    }

    fn accepts(kind: &Type) -> bool {
        matches!(*kind, Type::INT2 | Type::INT4 | Type::INT8)
    }
}

impl Columns for Row {
    type Error = Error;

    fn text(&self, column: &str) -> Result<Option<&str>, Error> {
        get(self, column)
    }

    fn blob(&self, column: &str) -> Result<Option<&[u8]>, Error> {
        get(self, column)
    }

    fn integer(&self, column: &str) -> Result<Option<i64>, Error> {
        Ok(get::<Option<Integer>>(self, column)?.map(|Integer(number)| number))
    }

    fn flag(&self, column: &str) -> Result<Option<bool>, Error> {
        get(self, column)
    }

    fn id(&self, column: &str) -> Result<Option<Uuid>, Error> {
        get(self, column)
    }

    fn time(&self, column: &str) -> Result<Option<SystemTime>, Error> {
        get(self, column)
    }

    fn duration(&self, column: &str) -> Result<Option<Duration>, Error> {
        Ok(get::<Option<f64>>(self, column)?.map(duration))
    }

    fn odd(_: &str, why: impl Into<Cause>) -> Error {
        unreadable(why)
    }
}

/// The columns of a record as the gateway reads it, of `idempotency_records r` left-joined with `oncegate_owners o`.
macro_rules! record_columns {
    () => {
        "r.id, r.attempt, r.request_hash, r.raw_hash, r.recipe, r.status, r.owner, r.caller, \
         coalesce(o.lease_until > clock_timestamp(), false) AS owner_lives, \
         r.response_status, r.response_headers, r.response_body, r.expires_at, \
         extract(epoch FROM r.expires_at - clock_timestamp())::float8 AS time_left"
    };
}
pub(super) use record_columns;
