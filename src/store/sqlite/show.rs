//! Lists and single rows for operators, and the gauges: all of it read only, on a snapshot.
//!
//! A list is newest first and goes on after the last row of the page before, so that rows which come or go
//! meanwhile neither repeat nor hide others.

use rusqlite::types::Value;
use rusqlite::{params, params_from_iter};
use uuid::Uuid;

use super::super::{EventFilter, EventRow, EventStatus, Gauges, RecordFilter, RecordRow};
use super::order;
use super::outbox;
use super::row::{micros, stored};
use super::thread::Tx;
use crate::record::RecordId;
use crate::store::read::{self, Columns};

/// Conditions and their values, joined by AND.
pub(super) struct Filter {
    pub(super) sql: String,
    pub(super) values: Vec<Value>,
}

impl Filter {
    /// Appends a condition with one `?` for each of `values`.
    pub(super) fn and(&mut self, condition: &str, values: impl IntoIterator<Item = Value>) {
        self.sql.push_str(" AND ");
        self.sql.push_str(condition);
        self.values.extend(values);
    }

    /// Appends `column = ?` where there is a value.
    pub(super) fn equal(&mut self, column: &str, value: Option<impl Into<String>>) {
        if let Some(value) = value {
            self.and(&format!("{column} = ?"), [Value::Text(value.into())]);
        }
    }
}

/// The columns of a record as operators see it; the first `?` is the database's now. Lists leave the body out.
fn record_columns(body: &str) -> String {
    format!(
        "SELECT id, attempt, request_hash, raw_hash, recipe, status, owner, expires_at,
           response_status, response_headers, {body} AS response_body, tenant_id, operation, key,
           EXISTS (SELECT 1 FROM oncegate_owners o WHERE o.owner = r.owner AND o.lease_until > ?)
             AS owner_lives, caller, request_context, created_at, completed_at
         FROM idempotency_records r WHERE true"
    )
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
    tx.rows(&query.sql, params_from_iter(query.values), |row| read::record_row(row))
}

pub(super) fn show_record(tx: &Tx<'_>, id: RecordId) -> rusqlite::Result<Option<RecordRow>> {
    let sql = format!("{} AND id = ?", record_columns("response_body"));
    tx.first(&sql, params![tx.now, id], |row| read::record_row(row))
}

/// One half of the view `outbox_events`, with its own order and limit, so that a page of the newest reads a page
/// and not the table.
struct Arm {
    table: &'static str,
    columns: &'static str,
    /// Whether it holds rows of this status, and by which condition.
    holds: fn(EventStatus) -> Option<&'static str>,
}

const PENDING: Arm = Arm {
    table: "outbox_queue",
    columns: "'pending' AS status, x.attempts AS attempts, x.next_attempt_at AS next_attempt_at,
       x.last_error AS last_error, m.created_at AS created_at,
       NULL AS sent_at, false AS blocks",
    holds: |status| match status {
        EventStatus::Pending => Some("true"),
        EventStatus::Sent | EventStatus::Dead | EventStatus::Discarded => None,
    },
};

const DONE: Arm = Arm {
    table: "outbox_done",
    columns: "x.outcome AS status, x.attempts AS attempts, NULL AS next_attempt_at,
       x.last_error AS last_error, m.created_at AS created_at,
       CASE WHEN x.outcome = 'sent' THEN x.finished_at END AS sent_at,
       x.outcome = 'dead' AND EXISTS (SELECT 1 FROM outbox_turns t
         WHERE t.sink = x.sink AND t.ordering_key = m.ordering_key AND t.event_id = m.id
           AND t.lease_until IS NULL) AS blocks",
    // Literals, so that the index of dead events can be used.
    holds: |status| match status {
        EventStatus::Pending => None,
        EventStatus::Sent => Some("x.outcome = 'sent'"),
        EventStatus::Dead => Some("x.outcome = 'dead'"),
        EventStatus::Discarded => Some("x.outcome = 'discarded'"),
    },
};

impl Arm {
    /// The query of this half; `None` where it holds no such status.
    fn query(&self, now: i64, filter: &EventFilter) -> Option<Filter> {
        let status = match filter.status {
            None => "true",
            Some(status) => (self.holds)(status)?,
        };
        let Self { table, columns, .. } = self;
        // What is pending or dead is little and is read first; else the newest messages are.
        let few = matches!(filter.status, Some(EventStatus::Pending | EventStatus::Dead));
        let from = if few {
            format!("{table} x CROSS JOIN outbox_messages m ON x.event_id = m.id")
        } else {
            format!("outbox_messages m CROSS JOIN {table} x ON x.event_id = m.id")
        };
        let sql = format!(
            "SELECT * FROM (SELECT m.id AS id, event_key, event_type, tenant_id, operation,
               idempotency_key, record_id, x.sink AS sink, m.ordering_key AS ordering_key, payload,
               ? - m.created_at AS age, {columns}
             FROM {from} WHERE {status}"
        );
        let mut query = Filter { sql, values: vec![now.into()] };
        query.equal("m.id", filter.id.map(|id| id.to_string()));
        query.equal("record_id", filter.record.map(|id| id.to_string()));
        query.equal("tenant_id", filter.tenant.as_deref());
        query.equal("operation", filter.operation.as_deref());
        query.equal("idempotency_key", filter.key.as_deref());
        query.equal("event_type", filter.kind.as_deref());
        query.equal("x.sink", filter.sink.as_deref());
        if let Some(since) = filter.since {
            query.and("m.created_at >= ?", [(now - micros(since)).into()]);
        }
        if let Some((at, id, sink)) = &filter.after {
            let values = [stored(*at).into(), id.to_string().into(), sink.clone().into()];
            query.and("(m.created_at, m.id, x.sink) < (?, ?, ?)", values);
        }
        query.sql.push_str(" ORDER BY m.created_at DESC, m.id DESC, x.sink DESC LIMIT ?)");
        query.values.push(i64::from(filter.limit).into());
        Some(query)
    }
}

pub(super) fn list_events(tx: &Tx<'_>, filter: &EventFilter) -> rusqlite::Result<Vec<EventRow>> {
    let arms = [PENDING, DONE].into_iter().filter_map(|arm| arm.query(tx.now, filter));
    let (texts, values): (Vec<_>, Vec<_>) = arms.map(|arm| (arm.sql, arm.values)).unzip();
    let mut values: Vec<Value> = values.into_iter().flatten().collect();
    let mut sql = texts.join(" UNION ALL ");
    sql.push_str(" ORDER BY created_at DESC, id DESC, sink DESC LIMIT ?");
    values.push(i64::from(filter.limit).into());
    tx.rows(&sql, params_from_iter(values), |row| read::event_row(row))
}

pub(super) fn database_id(tx: &Tx<'_>) -> rusqlite::Result<Uuid> {
    let id = tx.first("SELECT database_id FROM oncegate_meta", [], |row| {
        row.must("database_id", Columns::id)
    })?;
    id.ok_or(rusqlite::Error::QueryReturnedNoRows)
}

pub(super) fn gauges(tx: &Tx<'_>) -> rusqlite::Result<Gauges> {
    const UNKNOWN: &str = "SELECT count(*) FROM idempotency_records
        WHERE status <> 'completed' AND status = 'unknown'";
    let (pending, dead) = outbox::counts(tx)?;
    let unknown: Option<i64> = tx.first(UNKNOWN, [], |row| row.get(0))?;
    let unknown_records = u64::try_from(unknown.unwrap_or(0)).unwrap_or(0);
    Ok(Gauges { pending, dead, blocked: order::blocked(tx)?, unknown_records })
}
