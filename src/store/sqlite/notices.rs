//! What is announced of unknown records: read from their notes, and written in one transaction with the mark that it was
//! announced.

use rusqlite::params;

use super::super::{Changed, Unannounced};
use super::outbox;
use super::thread::Tx;
use crate::record::event::Event;
use crate::record::event::notice::{Notice, NoticeKind};
use crate::store::read;

pub(super) fn unannounced(
    tx: &Tx<'_>,
    which: Unannounced,
    limit: u32,
) -> rusqlite::Result<Vec<Notice>> {
    // The record itself says whose it is; where it is gone, the operator's row does, else what was announced when the doubt
    // began.
    const SQL: &str =
        "SELECT u.id AS id, coalesce(u.announced, u.attempt) AS attempt, u.since AS since,
          ?3 AS at, u.announced IS NOT NULL AS announced, r.id IS NOT NULL AS stands,
          a.action AS action,
          coalesce(r.tenant_id, json_extract(a.detail, '$.tenant'), m.tenant_id) AS tenant_id,
          coalesce(r.operation, json_extract(a.detail, '$.operation'), m.operation) AS operation,
          coalesce(r.key, json_extract(a.detail, '$.key'), m.idempotency_key) AS key
        FROM oncegate_unknown u
        LEFT JOIN idempotency_records r ON r.id = u.id
        LEFT JOIN audit_log a ON a.id = (SELECT l.id FROM audit_log l WHERE l.record_id = u.id
          AND l.action IN ('record.release', 'record.complete') ORDER BY l.at DESC LIMIT 1)
        LEFT JOIN outbox_messages m ON m.id = (
          SELECT o.id FROM outbox_messages o WHERE o.record_id = u.id LIMIT 1)
        WHERE (?2 AND u.announced IS NULL AND r.id IS NOT NULL)
           OR (u.announced IS NOT NULL AND (r.id IS NULL OR r.status = 'completed'))
        ORDER BY u.since, u.id LIMIT ?1";
    tx.rows(SQL, params![limit, which == Unannounced::All, tx.now], |row| read::notice(row))
}

pub(super) fn announce(
    tx: &Tx<'_>,
    notice: &Notice,
    event: Option<&Event>,
) -> rusqlite::Result<Changed> {
    const BEGIN: &str =
        "UPDATE oncegate_unknown SET announced = ?2 WHERE id = ?1 AND announced IS NULL";
    const END: &str = "DELETE FROM oncegate_unknown WHERE id = ?1 AND announced = ?2
        AND NOT EXISTS (SELECT 1 FROM idempotency_records r
          WHERE r.id = oncegate_unknown.id AND r.status <> 'completed')";
    let sql = match notice.kind {
        NoticeKind::Unknown => BEGIN,
        NoticeKind::Resolved(_) => END,
    };
    if tx.execute(sql, params![notice.record, notice.attempt])? == 0 {
        return Ok(Changed::No);
    }
    if let (Some(scope), Some(event)) = (&notice.scope, event) {
        outbox::write(tx, scope, notice.record, event)?;
    }
    Ok(Changed::Yes)
}
