//! From a row of either database to our values, by the names of its columns: written once for both.
//!
//! Reading never trusts a row: a value that this program would not have written is an error of whoever asked for that row.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::StatusCode;
use uuid::Uuid;

use super::{
    AttemptRow, AuditRow, Cause, DueLookup, EventRow, EventStatus, NextProbe, Pause, PauseReason,
    RecordRow, SinkState, Unresolved,
};
use crate::record::event::notice::{Notice, NoticeKind, Resolution};
use crate::record::{
    Answer, Attempt, Caller, Completed, Fence, Fingerprint, KeptBody, Key, Operation, Record,
    RecordId, Scope, State, Status, Tenant, decode_headers,
};

/// A row, as its database gives it. `None`: the column is NULL.
pub(super) trait Columns {
    /// Why a column cannot be read.
    type Error;

    /// A text.
    fn text(&self, column: &str) -> Result<Option<&str>, Self::Error>;
    /// Bytes.
    fn blob(&self, column: &str) -> Result<Option<&[u8]>, Self::Error>;
    /// An integer of any width.
    fn integer(&self, column: &str) -> Result<Option<i64>, Self::Error>;
    /// A truth value.
    fn flag(&self, column: &str) -> Result<Option<bool>, Self::Error>;
    /// An id.
    fn id(&self, column: &str) -> Result<Option<Uuid>, Self::Error>;
    /// A time.
    fn time(&self, column: &str) -> Result<Option<SystemTime>, Self::Error>;
    /// A duration; what is negative is zero.
    fn duration(&self, column: &str) -> Result<Option<Duration>, Self::Error>;

    /// The error of a column that holds what this program never writes.
    fn odd(column: &str, why: impl Into<Cause>) -> Self::Error;

    /// A column that is never NULL.
    fn must<'r, T>(
        &'r self,
        column: &str,
        read: impl FnOnce(&'r Self, &str) -> Result<Option<T>, Self::Error>,
    ) -> Result<T, Self::Error> {
        read(self, column)?.ok_or_else(|| Self::odd(column, format!("{column} is NULL")))
    }

    /// A count, or a number, that is never NULL and never negative.
    fn count(&self, column: &str) -> Result<u32, Self::Error> {
        Ok(u32::try_from(self.must(column, Self::integer)?).unwrap_or(0))
    }

    /// A text of its own, where there is one.
    fn owned(&self, column: &str) -> Result<Option<String>, Self::Error> {
        Ok(self.text(column)?.map(str::to_owned))
    }

    /// Bytes of its own, where there are some.
    fn bytes(&self, column: &str) -> Result<Option<Bytes>, Self::Error> {
        Ok(self.blob(column)?.map(Bytes::copy_from_slice))
    }

    /// One of the values that `parse` knows.
    fn parsed<T>(
        &self,
        column: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<T, Self::Error> {
        let text = self.must(column, Self::text)?;
        parse(text).ok_or_else(|| Self::odd(column, format!("{column} has no such value: {text}")))
    }
}

type Read<R, T> = Result<T, <R as Columns>::Error>;

pub(super) fn fence<R: Columns>(row: &R) -> Read<R, Fence> {
    let id = row.must("id", R::id)?.into();
    Ok(Fence { id, attempt: Attempt::from_number(row.count("attempt")?) })
}

fn fingerprint<R: Columns>(row: &R) -> Read<R, Fingerprint> {
    fn hash<R: Columns, const N: usize>(row: &R, column: &str) -> Read<R, [u8; N]> {
        let bytes = row.must(column, R::blob)?;
        bytes.try_into().map_err(|_| R::odd(column, format!("{column} has the wrong length")))
    }
    Ok(Fingerprint {
        canonical: hash(row, "request_hash")?,
        raw: hash(row, "raw_hash")?,
        recipe: hash(row, "recipe")?,
    })
}

fn caller<R: Columns>(row: &R) -> Read<R, Option<Caller>> {
    Ok(row.text("caller")?.map(Caller::stored))
}

pub(super) fn status<R: Columns>(row: &R) -> Read<R, Status> {
    row.parsed("status", Status::parse)
}

/// A scope, whose key stands in the column `key` of records, and in another one of messages.
pub(super) fn scope<R: Columns>(row: &R, key: &str) -> Read<R, Scope> {
    Ok(Scope {
        tenant: Tenant::stored(row.must("tenant_id", R::text)?),
        operation: Operation::stored(row.must("operation", R::text)?),
        key: Key::stored(row.must(key, R::text)?),
    })
}

fn answer<R: Columns>(row: &R) -> Read<R, Option<Answer>> {
    let Some(code) = row.integer("response_status")? else { return Ok(None) };
    let code = u16::try_from(code).ok().and_then(|code| StatusCode::from_u16(code).ok());
    let block = row.blob("response_headers")?.unwrap_or_default();
    let (headers, spelling) =
        decode_headers(block).map_err(|error| R::odd("response_headers", error))?;
    Ok(Some(Answer {
        status: code.ok_or_else(|| R::odd("response_status", "response_status is no status"))?,
        headers,
        spelling,
        body: row.bytes("response_body")?.map_or(KeptBody::NotRetained, KeptBody::Whole),
    }))
}

/// A record as the gateway reads it.
pub(super) fn record<R: Columns>(row: &R) -> Read<R, Record> {
    let state = match status(row)? {
        Status::Unknown => State::Unknown,
        Status::InProgress => State::InProgress {
            owner: row.must("owner", R::id)?.into(),
            owner_lives: row.must("owner_lives", R::flag)?,
        },
        Status::Completed => State::Completed(Box::new(Completed {
            answer: answer(row)?
                .ok_or_else(|| R::odd("response_status", "a completed record has no answer"))?,
            expires_at: row.must("expires_at", R::time)?,
            time_left: row.must("time_left", R::duration)?,
        })),
    };
    let (fence, fingerprint, caller) = (fence(row)?, fingerprint(row)?, caller(row)?);
    Ok(Record { fence, fingerprint, caller, state })
}

pub(super) fn record_row<R: Columns>(row: &R) -> Read<R, RecordRow> {
    let Fence { id, attempt } = fence(row)?;
    Ok(RecordRow {
        id,
        scope: scope(row, "key")?,
        fingerprint: fingerprint(row)?,
        status: status(row)?,
        attempt,
        owner: row.must("owner", R::id)?.into(),
        owner_lives: row.must("owner_lives", R::flag)?,
        caller: row.owned("caller")?,
        context: row.bytes("request_context")?,
        created_at: row.must("created_at", R::time)?,
        completed_at: row.time("completed_at")?,
        expires_at: row.time("expires_at")?,
        answer: answer(row)?,
    })
}

pub(super) fn due_lookup<R: Columns>(row: &R) -> Read<R, DueLookup> {
    Ok(DueLookup {
        scope: scope(row, "key")?,
        fence: fence(row)?,
        fingerprint: fingerprint(row)?,
        caller: caller(row)?,
        context: row.bytes("request_context")?,
    })
}

pub(super) fn unresolved<R: Columns>(row: &R) -> Read<R, Unresolved> {
    Ok(Unresolved {
        since: row.must("since", R::time)?,
        age: row.must("age", R::duration)?,
        orphaned: row.must("orphaned", R::flag)?,
        asked: row.count("asked")?,
        next_ask_at: row.must("next_ask_at", R::time)?,
        context: row.bytes("request_context")?,
    })
}

pub(super) fn notice<R: Columns>(row: &R) -> Read<R, Notice> {
    let text = |column| row.text(column);
    let scope = match (text("tenant_id")?, text("operation")?, text("key")?) {
        (Some(_), Some(_), Some(_)) => Some(scope(row, "key")?),
        _ => None,
    };
    let kind = if row.must("announced", R::flag)? {
        NoticeKind::Resolved(match (text("action")?, row.must("stands", R::flag)?) {
            (Some("record.complete"), true) => Resolution::CompletedByOperator,
            (_, true) => Resolution::Completed,
            (Some(_), false) => Resolution::ReleasedByOperator,
            (None, false) => Resolution::Released,
        })
    } else {
        NoticeKind::Unknown
    };
    let Fence { id, attempt } = fence(row)?;
    let (since, at) = (row.must("since", R::time)?, row.must("at", R::time)?);
    Ok(Notice { record: id, scope, attempt, since, at, kind })
}

pub(super) fn event_row<R: Columns>(row: &R) -> Read<R, EventRow> {
    Ok(EventRow {
        id: row.must("id", R::id)?,
        event_key: row.must("event_key", R::owned)?,
        kind: row.must("event_type", R::owned)?,
        scope: scope(row, "idempotency_key")?,
        record: row.must("record_id", R::id)?.into(),
        sink: row.must("sink", R::owned)?,
        ordering_key: row.owned("ordering_key")?,
        payload: row.must("payload", R::bytes)?,
        status: row.parsed("status", EventStatus::parse)?,
        attempts: row.count("attempts")?,
        next_attempt_at: row.time("next_attempt_at")?,
        last_error: row.owned("last_error")?,
        created_at: row.must("created_at", R::time)?,
        age: row.must("age", R::duration)?,
        sent_at: row.time("sent_at")?,
        blocks: row.must("blocks", R::flag)?,
    })
}

pub(super) fn attempt_row<R: Columns>(row: &R) -> Read<R, AttemptRow> {
    Ok(AttemptRow {
        sink: row.must("sink", R::owned)?,
        claim_no: i32::try_from(row.must("claim_no", R::integer)?).unwrap_or(i32::MAX),
        attempt: row.count("attempt")?,
        at: row.must("at", R::time)?,
        status: row.integer("status")?.and_then(|status| u16::try_from(status).ok()),
        error: row.owned("error")?,
    })
}

pub(super) fn audit_row<R: Columns>(row: &R) -> Read<R, AuditRow> {
    Ok(AuditRow {
        id: row.must("id", R::id)?,
        at: row.must("at", R::time)?,
        who: row.must("who", R::owned)?,
        action: row.must("action", R::owned)?,
        record: row.id("record_id")?.map(RecordId::from),
        event: row.id("event_id")?,
        why: row.owned("why")?,
        detail: row.owned("detail")?,
    })
}

pub(super) fn sink_state<R: Columns>(row: &R) -> Read<R, SinkState> {
    let probe = match (row.duration("probe_in")?, row.must("probing", R::flag)?) {
        (None, _) => NextProbe::Never,
        (Some(over_in), true) => NextProbe::UnderWay { over_in },
        (Some(wait), false) => NextProbe::In(wait),
    };
    let pause = match row.text("pause_reason")? {
        None => None,
        Some(_) => Some(Pause {
            reason: row.parsed("pause_reason", PauseReason::parse)?,
            probe,
            failed_probes: row.count("failed_probes")?,
            note: row.owned("note")?,
        }),
    };
    Ok(SinkState {
        sink: row.must("sink", R::owned)?,
        no: row.must("pause_no", R::integer)?,
        since: row.must("since", R::time)?,
        pause,
        last_error: row.owned("last_error")?,
    })
}
