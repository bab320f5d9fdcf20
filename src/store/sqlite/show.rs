//! Lists and single rows for operators, and the gauges: all of it read only, on a snapshot.
//!
//! A list is newest first and goes on after the last row of the page before, so that rows which come or go
//! meanwhile neither repeat nor hide others.

use rusqlite::types::Value;
use rusqlite::{Row, params, params_from_iter};

use super::super::{EventFilter, EventRow, EventStatus, Gauges, RecordFilter, RecordRow};
use super::outbox;
use super::row::{self, micros, stored};
use super::thread::Tx;
use crate::record::{OwnerId, RecordId};

/// Conditions and their values, joined by AND.
struct Filter {
    sql: String,
    values: Vec<Value>,
}

impl Filter {
    /// Appends a condition with one `?` for each of `values`.
    fn and(&mut self, condition: &str, values: impl IntoIterator<Item = Value>) {
        self.sql.push_str(" AND ");
        self.sql.push_str(condition);
        self.values.extend(values);
    }

    /// Appends `column = ?` where there is a value.
    fn equal(&mut self, column: &str, value: Option<impl Into<String>>) {
        if let Some(value) = value {
            self.and(&format!("{column} = ?"), [Value::Text(value.into())]);
        }
    }
}

/// The columns that [`record_row`] reads; the first `?` is the database's now. Lists leave the body out.
fn record_columns(body: &str) -> String {
    format!(
        "SELECT id, attempt, request_hash, raw_hash, recipe, status, owner, expires_at,
           response_status, response_headers, {body}, tenant_id, operation, key,
           EXISTS (SELECT 1 FROM oncegate_owners o WHERE o.owner = r.owner AND o.lease_until > ?),
           caller, request_context, created_at, completed_at
         FROM idempotency_records r WHERE true"
    )
}

fn record_row(row: &Row<'_>) -> rusqlite::Result<RecordRow> {
    let fence = row::fence(row, 0)?;
    Ok(RecordRow {
        id: fence.id,
        scope: row::scope(row, 11)?,
        fingerprint: row::fingerprint(row, 2)?,
        status: row::status(row, 5)?,
        attempt: fence.attempt,
        owner: OwnerId::from(row::uuid(row, 6)?),
        owner_lives: row.get(14)?,
        caller: row.get(15)?,
        context: row.get::<_, Option<Vec<u8>>>(16)?.map(Into::into),
        created_at: row::time(row.get(17)?),
        completed_at: row.get::<_, Option<i64>>(18)?.map(row::time),
        expires_at: row.get::<_, Option<i64>>(7)?.map(row::time),
        answer: row::answer(row, 8)?,
    })
}

pub(super) fn list_records(tx: &Tx<'_>, filter: &RecordFilter) -> rusqlite::Result<Vec<RecordRow>> {
    let mut query = Filter { sql: record_columns("NULL"), values: vec![tx.now.into()] };
    query.equal("tenant_id", filter.tenant.as_deref());
    query.equal("operation", filter.operation.as_deref());
    query.equal("key", filter.key.as_deref());
    query.equal("status", filter.status.map(|status| status.as_str()));
    if let Some(since) = filter.since {
        query.and("created_at >= ?", [(tx.now - micros(since)).into()]);
    }
    if let Some((at, id)) = filter.after {
        let values = [stored(at).into(), Value::Text(id.to_string())];
        query.and("(created_at, id) < (?, ?)", values);
    }
    query.sql.push_str(" ORDER BY created_at DESC, id DESC LIMIT ?");
    query.values.push(i64::from(filter.limit).into());
    tx.rows(&query.sql, params_from_iter(query.values), record_row)
}

pub(super) fn show_record(tx: &Tx<'_>, id: RecordId) -> rusqlite::Result<Option<RecordRow>> {
    let sql = format!("{} AND id = ?", record_columns("response_body"));
    tx.first(&sql, params![tx.now, id.to_string()], record_row)
}

fn event_row(row: &Row<'_>) -> rusqlite::Result<EventRow> {
    Ok(EventRow {
        id: row::uuid(row, 0)?,
        event_key: row.get(1)?,
        kind: row.get(2)?,
        scope: row::scope(row, 3)?,
        record: row::uuid(row, 6)?.into(),
        sink: row.get(7)?,
        ordering_key: row.get(8)?,
        payload: row.get::<_, Vec<u8>>(9)?.into(),
        status: row::parsed(row, 10, EventStatus::parse)?,
        attempts: row.get(11)?,
        next_attempt_at: row.get::<_, Option<i64>>(12)?.map(row::time),
        last_error: row.get(13)?,
        created_at: row::time(row.get(14)?),
        sent_at: row.get::<_, Option<i64>>(15)?.map(row::time),
    })
}

pub(super) fn list_events(tx: &Tx<'_>, filter: &EventFilter) -> rusqlite::Result<Vec<EventRow>> {
    let sql = "SELECT id, event_key, event_type, tenant_id, operation, idempotency_key, record_id,
          sink, ordering_key, payload, status, attempts, next_attempt_at, last_error, created_at,
          sent_at FROM outbox_events WHERE true";
    let mut query = Filter { sql: sql.into(), values: Vec::new() };
    query.equal("id", filter.id.map(|id| id.to_string()));
    query.equal("record_id", filter.record.map(|id| id.to_string()));
    query.equal("tenant_id", filter.tenant.as_deref());
    query.equal("operation", filter.operation.as_deref());
    query.equal("idempotency_key", filter.key.as_deref());
    query.equal("sink", filter.sink.as_deref());
    query.equal("status", filter.status.map(|status| status.as_str()));
    if let Some(since) = filter.since {
        query.and("created_at >= ?", [(tx.now - micros(since)).into()]);
    }
    if let Some((at, id, sink)) = &filter.after {
        let values = [stored(*at).into(), id.to_string().into(), sink.clone().into()];
        query.and("(created_at, id, sink) < (?, ?, ?)", values);
    }
    query.sql.push_str(" ORDER BY created_at DESC, id DESC, sink DESC LIMIT ?");
    query.values.push(i64::from(filter.limit).into());
    tx.rows(&query.sql, params_from_iter(query.values), event_row)
}

pub(super) fn gauges(tx: &Tx<'_>) -> rusqlite::Result<Gauges> {
    const UNKNOWN: &str = "SELECT count(*) FROM idempotency_records
        WHERE status <> 'completed' AND status = 'unknown'";
    let (pending, dead) = outbox::counts(tx)?;
    let unknown: Option<i64> = tx.first(UNKNOWN, [], |row| row.get(0))?;
    let unknown_records = u64::try_from(unknown.unwrap_or(0)).unwrap_or(0);
    Ok(Gauges { pending, dead, unknown_records })
}
