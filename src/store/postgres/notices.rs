//! What is announced of unknown records: read from their notes, and written with the mark that it was announced.
//!
//! The mark and the event are one statement, and only the statement that sets the mark writes the event: nothing is announced
//! twice, and nothing is lost between the two.

use super::param::Params;
use super::pool::Pool;
use super::rows;
use crate::record::event::Event;
use crate::record::event::notice::{Notice, NoticeKind};
use crate::store::read;
use crate::store::{Changed, Error, Unannounced};

// The record itself says whose it is; where it is gone, the operator's row does, else what was announced when the doubt began.
const NOTICES: &str = "-- notices
SELECT u.id, coalesce(u.announced, u.attempt) AS attempt, u.since, clock_timestamp() AS at,
       u.announced IS NOT NULL AS announced, r.id IS NOT NULL AS stands, a.action,
       coalesce(r.tenant_id, a.tenant, m.tenant_id) AS tenant_id,
       coalesce(r.operation, a.operation, m.operation) AS operation,
       coalesce(r.key, a.key, m.idempotency_key) AS key
FROM oncegate_unknown u
LEFT JOIN idempotency_records r ON r.id = u.id
LEFT JOIN LATERAL (
    SELECT l.action, l.detail::json->>'tenant' AS tenant, l.detail::json->>'operation' AS operation,
           l.detail::json->>'key' AS key
    FROM audit_log l
    WHERE l.record_id = u.id AND l.action IN ('record.release', 'record.complete')
    ORDER BY l.at DESC LIMIT 1) a ON true
LEFT JOIN LATERAL (
    SELECT o.tenant_id, o.operation, o.idempotency_key FROM outbox_messages o
    WHERE o.record_id = u.id LIMIT 1) m ON true
WHERE ($2 AND u.announced IS NULL AND r.id IS NOT NULL)
   OR (u.announced IS NOT NULL AND (r.id IS NULL OR r.status = 'completed'))
ORDER BY u.since, u.id LIMIT $1";

pub(super) async fn unannounced(
    pool: &Pool,
    which: Unannounced,
    limit: u32,
) -> Result<Vec<Notice>, Error> {
    let params: Params<'_> = &[&i64::from(limit), &(which == Unannounced::All)];
    pool.read(NOTICES, params).await?.iter().map(read::notice).collect()
}

/// Ends a statement whose `announced(at)` is the row that was marked: writes the event, of `$3` to `$11`, and counts.
macro_rules! write_announced {
    () => {
        ",
message AS (
    INSERT INTO outbox_messages (id, event_key, seq, event_type, tenant_id, operation,
                                 idempotency_key, record_id, ordering_key, payload, wanted,
                                 created_at)
    SELECT $3, $4, 0, $5, $6, $7, $8, $1, $9, $10, cardinality($11::text[]) > 0, announced.at FROM announced
    WHERE $3 IS NOT NULL
    ON CONFLICT DO NOTHING
    RETURNING id, ordering_key, created_at),
queued AS (
    INSERT INTO outbox_queue (event_id, sink, next_attempt_at, ordering_key, seq, created_at)
    SELECT m.id, s.sink, m.created_at, m.ordering_key, 0, m.created_at
    FROM message m CROSS JOIN unnest($11::text[]) AS s(sink)
    ORDER BY s.sink
    ON CONFLICT DO NOTHING)
SELECT count(*) AS count FROM announced"
    };
}

const ANNOUNCE_UNKNOWN: &str = concat!(
    "-- announce_unknown
WITH announced AS (
    UPDATE oncegate_unknown u SET announced = $2 WHERE u.id = $1 AND u.announced IS NULL
    RETURNING clock_timestamp() AS at)",
    write_announced!()
);

const ANNOUNCE_RESOLVED: &str = concat!(
    "-- announce_resolved
WITH announced AS (
    DELETE FROM oncegate_unknown u
    WHERE u.id = $1 AND u.announced = $2
      AND NOT EXISTS (SELECT FROM idempotency_records r
                      WHERE r.id = u.id AND r.status <> 'completed')
    RETURNING clock_timestamp() AS at)",
    write_announced!()
);

pub(super) async fn announce(
    pool: &Pool,
    notice: &Notice,
    event: Option<&Event>,
) -> Result<Changed, Error> {
    let scope = notice.scope.as_ref().filter(|_| event.is_some());
    let params: Params<'_> = &[
        &notice.record,
        &notice.attempt,
        &event.map(|event| event.id),
        &event.map(|event| event.key.as_str()),
        &event.map(|event| event.kind.as_str()),
        &scope.map(|scope| &scope.tenant),
        &scope.map(|scope| &scope.operation),
        &scope.map(|scope| &scope.key),
        &event.and_then(|event| event.ordering_key.as_deref()),
        &event.map(|event| &event.payload[..]),
        &event.map(|event| &event.sinks[..]).unwrap_or_default(),
    ];
    let sql = match notice.kind {
        NoticeKind::Unknown => ANNOUNCE_UNKNOWN,
        NoticeKind::Resolved(_) => ANNOUNCE_RESOLVED,
    };
    let count = rows::count(&pool.write(sql, params).await?)?;
    Ok(if count == 0 { Changed::No } else { Changed::Yes })
}
