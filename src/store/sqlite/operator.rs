//! What operators do to records, each with its audit row in the same transaction.
//!
//! An operator acts on `unknown`, and on `in_progress` whose owner's lease has run out; on a live one never. The
//! attempt that was looked at is the fence: what moved on since is not touched.

use std::time::{Duration, SystemTime};

use rusqlite::{Row, params};
use uuid::Uuid;

use super::super::{Acted, AuditRow, Completion, LateOutcome, Objection, Operator, Settled};
use super::records::{self, Completer};
use super::row::micros;
use super::thread::Tx;
use crate::fault::{self, Point};
use crate::record::{Attempt, Fence, OwnerId, RecordId, Scope, Status};
use crate::store::read::{self, Columns};

/// What an audit row says beside who, when and why.
pub(super) struct Action {
    pub(super) name: &'static str,
    pub(super) record: Option<RecordId>,
    pub(super) event: Option<Uuid>,
    pub(super) detail: serde_json::Value,
}

pub(super) fn audit(tx: &Tx<'_>, by: &Operator, action: &Action) -> rusqlite::Result<()> {
    const SQL: &str =
        "INSERT INTO audit_log (id, at, who, action, record_id, event_id, why, detail)
        VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)";
    let params = params![
        // In the order of time, so that rows of one millisecond keep theirs.
        Uuid::now_v7().to_string(),
        tx.now,
        by.who,
        action.name,
        action.record,
        action.event.map(|id| id.to_string()),
        by.why,
        action.detail.to_string(),
    ];
    tx.execute(SQL, params)?;
    fault::point_blocking(Point::Audited);
    Ok(())
}

/// An outcome that changed no row, under an id of its own, so that it is written once.
pub(super) fn note_late(tx: &Tx<'_>, late: &LateOutcome) -> rusqlite::Result<()> {
    const SQL: &str = "INSERT INTO audit_log (id, at, who, action, record_id, why, detail)
        VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7) ON CONFLICT (id) DO NOTHING";
    let (id, detail) = (late.id().to_string(), late.detail().to_string());
    let (who, action, why) = (LateOutcome::WHO, LateOutcome::ACTION, late.summary());
    let params = params![id, tx.now, who, action, late.fence.id, why, detail];
    tx.execute(SQL, params).map(drop)
}

/// A record as far as the decision needs it.
struct Seen {
    scope: Scope,
    status: Status,
    attempt: Attempt,
    owner: OwnerId,
    since: SystemTime,
    owner_lives: bool,
}

fn look(tx: &Tx<'_>, id: RecordId) -> rusqlite::Result<Option<Seen>> {
    const SQL: &str = "SELECT tenant_id, operation, key, status, attempt, owner, created_at,
          EXISTS (SELECT 1 FROM oncegate_owners o WHERE o.owner = r.owner AND o.lease_until > ?2)
          AS owner_lives
        FROM idempotency_records r WHERE id = ?1";
    tx.first(SQL, params![id, tx.now], |row| {
        Ok(Seen {
            scope: read::scope(row, "key")?,
            status: read::status(row)?,
            attempt: Attempt::from_number(row.count("attempt")?),
            owner: row.must("owner", Columns::id)?.into(),
            since: row.must("created_at", Columns::time)?,
            owner_lives: row.must("owner_lives", Columns::flag)?,
        })
    })
}

/// The record, where an operator who saw `fence` may act on it.
fn may_act(
    tx: &Tx<'_>,
    fence: Fence,
    completed: bool,
) -> rusqlite::Result<Result<Seen, Objection>> {
    let Some(seen) = look(tx, fence.id)? else { return Ok(Err(Objection::NotFound)) };
    if seen.attempt != fence.attempt {
        return Ok(Err(Objection::Moved));
    }
    Ok(match seen.status {
        Status::InProgress if seen.owner_lives => {
            Err(Objection::Running { owner: seen.owner, since: seen.since })
        }
        Status::Completed if !completed => Err(Objection::IsCompleted),
        Status::InProgress | Status::Unknown | Status::Completed => Ok(seen),
    })
}

pub(super) fn release(
    tx: &Tx<'_>,
    fence: Fence,
    completed: bool,
    by: &Operator,
) -> rusqlite::Result<Acted> {
    const SQL: &str = "DELETE FROM idempotency_records WHERE id = ?1 AND attempt = ?2";
    let seen = match may_act(tx, fence, completed)? {
        Ok(seen) => seen,
        Err(objection) => return Ok(Err(objection)),
    };
    tx.execute(SQL, params![fence.id, fence.attempt])?;
    audit(tx, by, &action("record.release", fence, &seen))?;
    Ok(Ok(()))
}

pub(super) fn complete(
    tx: &Tx<'_>,
    completion: &Completion,
    by: &Operator,
) -> rusqlite::Result<Acted> {
    let fence = completion.fence;
    let seen = match may_act(tx, fence, false)? {
        Ok(seen) => seen,
        Err(objection) => return Ok(Err(objection)),
    };
    match records::complete(tx, completion, Completer::Operator)? {
        Settled::Done { .. } => {}
        // The id exists, but not under this scope.
        Settled::Fenced | Settled::Locked => return Ok(Err(Objection::NotFound)),
    }
    audit(tx, by, &action("record.complete", fence, &seen))?;
    Ok(Ok(()))
}

/// The audit row of an action on a record: the row itself may be gone afterwards, so its scope is in it.
fn action(name: &'static str, fence: Fence, seen: &Seen) -> Action {
    let detail = serde_json::json!({
        "tenant": seen.scope.tenant.as_str(),
        "operation": seen.scope.operation.as_str(),
        "key": seen.scope.key.as_str(),
        "status": seen.status.as_str(),
        "attempt": fence.attempt.number(),
    });
    Action { name, record: Some(fence.id), event: None, detail }
}

pub(super) fn audit_of(tx: &Tx<'_>, record: RecordId) -> rusqlite::Result<Vec<AuditRow>> {
    const SQL: &str = "SELECT id, at, who, action, record_id, event_id, why, detail FROM audit_log
        WHERE record_id = ?1
        UNION ALL
        SELECT a.id, a.at, a.who, a.action, m.record_id, x.event_id, a.why,
          json_object('sink', x.sink, 'status', 'dead', 'among', json(a.detail))
        FROM outbox_messages m CROSS JOIN audit_events x ON x.event_id = m.id
          CROSS JOIN audit_log a ON a.id = x.audit_id
        WHERE m.record_id = ?1
        ORDER BY at, id, event_id";
    tx.rows(SQL, [record], |row| read::audit_row(row))
}

pub(super) fn acted_on(tx: &Tx<'_>, window: Duration) -> rusqlite::Result<Vec<RecordId>> {
    const SQL: &str = "SELECT DISTINCT record_id FROM audit_log WHERE at >= ?1
        AND record_id IS NOT NULL AND action IN ('record.release', 'record.complete')";
    let read = |row: &Row<'_>| row.must("record_id", Columns::id).map(RecordId::from);
    tx.rows(SQL, [tx.now - micros(window)], read)
}
