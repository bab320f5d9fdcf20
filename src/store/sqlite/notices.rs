//! What is announced of unknown records: read from their notes, and written in one transaction with the mark that it was
//! announced.

use rusqlite::{Row, params};

use super::super::{Changed, Unannounced};
use super::outbox;
use super::row;
use super::thread::Tx;
use crate::record::event::Event;
use crate::record::event::notice::{Notice, NoticeKind, Resolution};
use crate::record::{Attempt, Key, Operation, Scope, Tenant};

pub(super) fn unannounced(
    tx: &Tx<'_>,
    which: Unannounced,
    limit: u32,
) -> rusqlite::Result<Vec<Notice>> {
    // The record itself says whose it is; where it is gone, the operator's row does, else what was announced when the doubt
    // began.
    const SQL: &str = "SELECT u.id, coalesce(u.announced, u.attempt), u.since,
          u.announced IS NOT NULL, r.id IS NOT NULL, a.action,
          coalesce(r.tenant_id, json_extract(a.detail, '$.tenant'), m.tenant_id),
          coalesce(r.operation, json_extract(a.detail, '$.operation'), m.operation),
          coalesce(r.key, json_extract(a.detail, '$.key'), m.idempotency_key)
        FROM oncegate_unknown u
        LEFT JOIN idempotency_records r ON r.id = u.id
        LEFT JOIN audit_log a ON a.id = (SELECT l.id FROM audit_log l WHERE l.record_id = u.id
          AND l.action IN ('record.release', 'record.complete') ORDER BY l.at DESC LIMIT 1)
        LEFT JOIN outbox_messages m ON m.id = (
          SELECT o.id FROM outbox_messages o WHERE o.record_id = u.id LIMIT 1)
        WHERE (?2 AND u.announced IS NULL AND r.id IS NOT NULL)
           OR (u.announced IS NOT NULL AND (r.id IS NULL OR r.status = 'completed'))
        ORDER BY u.since, u.id LIMIT ?1";
    tx.rows(SQL, params![limit, which == Unannounced::All], |row| notice(row, tx.now))
}

fn notice(row: &Row<'_>, now: i64) -> rusqlite::Result<Notice> {
    let text = |column: usize| row.get::<_, Option<String>>(column);
    let scope = match (text(6)?, text(7)?, text(8)?) {
        (Some(tenant), Some(operation), Some(key)) => Some(Scope {
            tenant: Tenant::stored(&tenant),
            operation: Operation::stored(&operation),
            key: Key::stored(&key),
        }),
        _ => None,
    };
    let kind = if row.get(3)? {
        NoticeKind::Resolved(match (text(5)?.as_deref(), row.get(4)?) {
            (Some("record.complete"), true) => Resolution::CompletedByOperator,
            (_, true) => Resolution::Completed,
            (Some(_), false) => Resolution::ReleasedByOperator,
            (None, false) => Resolution::Released,
        })
    } else {
        NoticeKind::Unknown
    };
    Ok(Notice {
        record: row::uuid(row, 0)?.into(),
        scope,
        attempt: Attempt::from_number(row.get(1)?),
        since: row::time(row.get(2)?),
        at: row::time(now),
        kind,
    })
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
