//! What operators, pages and metrics read. Filters that are not given are planned away: each statement is planned
//! with its values.

use std::time::Duration;

use uuid::Uuid;

use super::param::Params;
use super::pool::Pool;
use super::rows::{self, duration, get, record_columns, seconds};
use crate::record::{RecordId, Status};
use crate::store::read;
use crate::store::{
    AuditRow, Error, EventFilter, EventRow, EventStatus, Gauges, RecordFilter, RecordRow,
};

/// The columns of a record beside those that the gateway reads.
macro_rules! shown_columns {
    () => {
        "r.tenant_id, r.operation, r.key, r.request_context, r.created_at, r.completed_at"
    };
}

/// A list's columns: the body is left out.
macro_rules! list_records {
    ($name:literal, $only:literal) => {
        concat!(
            "-- ",
            $name,
            "
SELECT ",
            record_columns!(),
            ", ",
            shown_columns!(),
            "
FROM (
    SELECT r.id, r.attempt, r.request_hash, r.raw_hash, r.recipe, r.status, r.owner, r.caller,
           r.response_status, r.response_headers, NULL::bytea AS response_body, r.expires_at, ",
            shown_columns!(),
            "
    FROM idempotency_records r
    WHERE ($1 IS NULL OR r.tenant_id = $1) AND ($2 IS NULL OR r.operation = $2)
      AND ($3 IS NULL OR r.key = $3) AND ($4 IS NULL OR r.status = $4)
      AND ($5 IS NULL
           OR r.created_at >= (SELECT clock_timestamp() - make_interval(secs => $5)))
      AND ($6 IS NULL OR (r.created_at, r.id) < ($6, $7))
      ",
            $only,
            "
    ORDER BY r.created_at DESC, r.id DESC LIMIT $8) r
LEFT JOIN oncegate_owners o ON o.owner = r.owner
ORDER BY r.created_at DESC, r.id DESC"
        )
    };
}

const LIST_RECORDS: &str = list_records!("list_records", "");

// The few unknown ones among very many are found by their notes.
const LIST_UNKNOWN: &str =
    list_records!("list_unknown", "AND r.id IN (SELECT id FROM oncegate_unknown)");

pub(super) async fn list_records(
    pool: &Pool,
    filter: &RecordFilter,
) -> Result<Vec<RecordRow>, Error> {
    let sql = if filter.status == Some(Status::Unknown) { LIST_UNKNOWN } else { LIST_RECORDS };
    let status = filter.status.map(Status::as_str);
    let since = filter.since.map(seconds);
    let (after, after_id) = filter.after.unzip();
    let limit = i64::from(filter.limit);
    let params: Params<'_> = &[
        &filter.tenant,
        &filter.operation,
        &filter.key,
        &status,
        &since,
        &after,
        &after_id,
        &limit,
    ];
    pool.read(sql, params).await?.iter().map(read::record_row).collect()
}

const SHOW_RECORD: &str = concat!(
    "-- show_record
SELECT ",
    record_columns!(),
    ", ",
    shown_columns!(),
    "
FROM idempotency_records r LEFT JOIN oncegate_owners o ON o.owner = r.owner
WHERE r.id = $1"
);

pub(super) async fn show_record(pool: &Pool, id: RecordId) -> Result<Option<RecordRow>, Error> {
    let rows = pool.read(SHOW_RECORD, &[&id]).await?;
    rows.first().map(read::record_row).transpose()
}

const LIST_EVENTS: &str = "-- list_events
SELECT id, event_key, event_type, tenant_id, operation, idempotency_key, record_id, sink,
       ordering_key, payload, status, attempts, next_attempt_at, last_error, created_at, sent_at,
       extract(epoch FROM clock_timestamp() - created_at)::float8 AS age,
       status = 'dead' AND EXISTS (
           SELECT FROM outbox_turns t
           WHERE t.sink = e.sink AND t.ordering_key = e.ordering_key AND t.event_id = e.id
             AND t.lease_until = 'infinity') AS blocks
FROM outbox_events e
WHERE ($1 IS NULL OR id = $1) AND ($2 IS NULL OR record_id = $2)
  AND ($3 IS NULL OR tenant_id = $3) AND ($4 IS NULL OR operation = $4)
  AND ($5 IS NULL OR idempotency_key = $5) AND ($6 IS NULL OR sink = $6)
  AND ($7 IS NULL OR status = $7) AND ($13 IS NULL OR event_type = $13)
  AND ($8 IS NULL OR created_at >= (SELECT clock_timestamp() - make_interval(secs => $8)))
  AND ($9 IS NULL OR (created_at, id, sink) < ($9, $10, $11))
ORDER BY created_at DESC, id DESC, sink DESC LIMIT $12";

pub(super) async fn list_events(pool: &Pool, filter: &EventFilter) -> Result<Vec<EventRow>, Error> {
    let status = filter.status.map(EventStatus::as_str);
    let since = filter.since.map(seconds);
    let after = filter.after.as_ref();
    let (after_at, after_id, after_sink) =
        (after.map(|after| after.0), after.map(|after| after.1), after.map(|after| &after.2));
    let limit = i64::from(filter.limit);
    let params: Params<'_> = &[
        &filter.id,
        &filter.record,
        &filter.tenant,
        &filter.operation,
        &filter.key,
        &filter.sink,
        &status,
        &since,
        &after_at,
        &after_id,
        &after_sink,
        &limit,
        &filter.kind,
    ];
    pool.read(LIST_EVENTS, params).await?.iter().map(read::event_row).collect()
}

const AUDIT_OF: &str = "-- audit_of
SELECT id, at, who, action, record_id, event_id, why, detail FROM audit_log
WHERE record_id = $1
UNION ALL
SELECT a.id, a.at, a.who, a.action, m.record_id, x.event_id, a.why,
       json_build_object('sink', x.sink, 'status', 'dead', 'among', a.detail::json)::text
FROM outbox_messages m JOIN audit_events x ON x.event_id = m.id JOIN audit_log a ON a.id = x.audit_id
WHERE m.record_id = $1
ORDER BY at, id, event_id";

pub(super) async fn audit_of(pool: &Pool, record: RecordId) -> Result<Vec<AuditRow>, Error> {
    let rows = pool.read(AUDIT_OF, &[&record]).await?;
    rows.iter().map(read::audit_row).collect()
}

const ACTED_ON: &str = "-- acted_on
SELECT DISTINCT record_id FROM audit_log
WHERE at >= (SELECT clock_timestamp() - make_interval(secs => $1))
  AND record_id IS NOT NULL AND action IN ('record.release', 'record.complete')";

pub(super) async fn acted_on(pool: &Pool, window: Duration) -> Result<Vec<RecordId>, Error> {
    let rows = pool.read(ACTED_ON, &[&seconds(window)]).await?;
    rows.iter().map(|row| get::<Uuid>(row, "record_id").map(RecordId::from)).collect()
}

const DATABASE_ID: &str = "-- database_id
SELECT database_id FROM oncegate_meta";

pub(super) async fn database_id(pool: &Pool) -> Result<Uuid, Error> {
    let rows = pool.read(DATABASE_ID, &[]).await?;
    get(rows::only(&rows)?, "database_id")
}

const PENDING: &str = "-- gauge_pending
SELECT sink, count(*) AS count,
       extract(epoch FROM clock_timestamp() - min(created_at))::float8 AS oldest
FROM outbox_queue GROUP BY sink ORDER BY sink";

const DEAD: &str = "-- gauge_dead
SELECT sink, count(*) AS count FROM outbox_done WHERE outcome = 'dead' GROUP BY sink ORDER BY sink";

const BLOCKED: &str = "-- gauge_blocked
SELECT t.sink, count(*) AS count FROM outbox_turns t
JOIN outbox_done d ON d.event_id = t.event_id AND d.sink = t.sink AND d.outcome = 'dead'
WHERE t.lease_until = 'infinity' GROUP BY t.sink ORDER BY t.sink";

const UNKNOWN: &str = "-- gauge_unknown
SELECT count(*) AS count FROM oncegate_unknown u
JOIN idempotency_records r ON r.id = u.id WHERE r.status = 'unknown'";

pub(super) async fn gauges(pool: &Pool) -> Result<Gauges, Error> {
    let mut gauges = Gauges::default();
    for row in &pool.read(PENDING, &[]).await? {
        let oldest = duration(get(row, "oldest")?);
        gauges.pending.push((get(row, "sink")?, rows::number(row)?, oldest));
    }
    for row in &pool.read(DEAD, &[]).await? {
        gauges.dead.push((get(row, "sink")?, rows::number(row)?));
    }
    for row in &pool.read(BLOCKED, &[]).await? {
        gauges.blocked.push((get(row, "sink")?, rows::number(row)?));
    }
    gauges.unknown_records = rows::count(&pool.read(UNKNOWN, &[]).await?)?;
    Ok(gauges)
}
