//! What operators do to events by hand, and the attempts that they look at.
//!
//! - Each action and its row in `audit_log` are one transaction. One event is a row for each of its sinks; all dead ones at
//!   once are one row, which says which ones and grows with each piece; `audit_events` names its events.
//! - What is being delivered is left alone: under a running claim nothing is redelivered or discarded.
//! - Claim numbers go on from the last one, so that no late worker's number fits again.

use rusqlite::{params, params_from_iter};
use uuid::Uuid;

use super::super::{AttemptRow, DeadFilter, EventAction, EventStatus, Operator};
use super::operator::{self, audit};
use super::order;
use super::row::micros;
use super::show::Filter;
use super::thread::Tx;
use crate::fault::{self, Point};
use crate::store::read::{self, Columns};

/// How many dead events one transaction takes.
const PIECE: usize = 500;

/// The sinks towards which something was done, and its status there before.
type Done = Vec<(String, EventStatus)>;

/// Does it to one event, towards one sink or all; with `not_taken` it is not redelivered to those who took it.
pub(super) fn one(
    tx: &Tx<'_>,
    action: EventAction,
    id: Uuid,
    sink: Option<&str>,
    not_taken: bool,
    by: &Operator,
) -> rusqlite::Result<Done> {
    match action {
        EventAction::Redeliver => redeliver_one(tx, id, sink, not_taken, by),
        EventAction::Discard => discard_one(tx, id, sink, by),
    }
}

fn redeliver_one(
    tx: &Tx<'_>,
    id: Uuid,
    sink: Option<&str>,
    not_taken: bool,
    by: &Operator,
) -> rusqlite::Result<Done> {
    // Without a sink: what was delivered or given up. With one: also what was discarded, if only for want of a sink.
    const ENDED: &str = "SELECT sink, coalesce(?2, sink), outcome FROM outbox_done
        WHERE event_id = ?1
          AND ((?2 IS NULL AND (outcome = 'dead' OR (outcome = 'sent' AND NOT ?3)))
          OR sink = ?2 OR (?2 <> '' AND sink = '' AND outcome = 'discarded'))";
    const DUE: &str = "UPDATE outbox_queue SET next_attempt_at = min(next_attempt_at, ?3)
        WHERE event_id = ?1 AND (?2 IS NULL OR sink = ?2) AND lease_until <= ?3 RETURNING sink";
    let event = id.to_string();
    let due: Vec<String> = tx.rows(DUE, params![event, sink, tx.now], |row| row.get(0))?;
    for sink in &due {
        note(tx, EventAction::Redeliver, id, sink, "pending", by)?;
    }
    let read = |row: &rusqlite::Row<'_>| {
        Ok((row.get(0)?, row.get(1)?, row.parsed("outcome", EventStatus::parse)?))
    };
    let ended: Vec<(String, String, EventStatus)> =
        tx.rows(ENDED, params![event, sink, not_taken], read)?;
    let mut done: Done = due.into_iter().map(|sink| (sink, EventStatus::Pending)).collect();
    for (from, to, outcome) in ended {
        if queue_again(tx, &event, &from, &to)? {
            note(tx, EventAction::Redeliver, id, &to, outcome.as_str(), by)?;
            done.push((to, outcome));
        }
    }
    Ok(done)
}

/// Moves a row that ended back into the queue. A success stays among the attempts. Whether it is queued now.
fn queue_again(tx: &Tx<'_>, event: &str, from: &str, to: &str) -> rusqlite::Result<bool> {
    const SUCCESS: &str = "INSERT OR REPLACE INTO outbox_attempts
          (event_id, sink, slot, claim_no, attempt, at, status)
        SELECT event_id, sink, claim_no % 50, claim_no, attempts, finished_at, last_status
        FROM outbox_done WHERE event_id = ?1 AND sink = ?2 AND outcome = 'sent'";
    const QUEUE: &str = "INSERT INTO outbox_queue (event_id, sink, lane, next_attempt_at, claim_no,
          ordering_key, seq, created_at, last_status, last_error)
        SELECT d.event_id, ?3, 1, ?4, d.claim_no + 1, m.ordering_key, m.seq, m.created_at,
          d.last_status, d.last_error
        FROM outbox_done d JOIN outbox_messages m ON m.id = d.event_id
        WHERE d.event_id = ?1 AND d.sink = ?2
        ON CONFLICT (event_id, sink) DO NOTHING";
    const DONE: &str = "DELETE FROM outbox_done WHERE event_id = ?1 AND sink = ?2";
    let queued = tx.execute(QUEUE, params![event, from, to, tx.now])?;
    tx.execute(SUCCESS, params![event, from])?;
    tx.execute(DONE, params![event, from])?;
    Ok(queued > 0)
}

fn discard_one(tx: &Tx<'_>, id: Uuid, sink: Option<&str>, by: &Operator) -> rusqlite::Result<Done> {
    const KEEP: &str = "INSERT INTO outbox_done (event_id, sink, outcome, claim_no, attempts,
          last_status, last_error, finished_at)
        SELECT event_id, sink, 'discarded', claim_no, attempts, last_status, last_error, ?3
        FROM outbox_queue WHERE event_id = ?1 AND sink = ?2";
    const PENDING: &str = "SELECT sink FROM outbox_queue
        WHERE event_id = ?1 AND (?2 IS NULL OR sink = ?2) AND lease_until <= ?3";
    const NOT_OWED: &str = "DELETE FROM outbox_queue WHERE event_id = ?1 AND sink = ?2";
    const DEAD: &str = "UPDATE outbox_done SET outcome = 'discarded', finished_at = ?3
        WHERE event_id = ?1 AND (?2 IS NULL OR sink = ?2) AND outcome = 'dead' RETURNING sink";
    let event = id.to_string();
    // The dead ones first: what is pending becomes a row beside them.
    let dead: Vec<String> = tx.rows(DEAD, params![event, sink, tx.now], |row| row.get(0))?;
    let pending: Vec<String> = tx.rows(PENDING, params![event, sink, tx.now], |row| row.get(0))?;
    for sink in &pending {
        tx.execute(KEEP, params![event, sink, tx.now])?;
        tx.execute(NOT_OWED, params![event, sink])?;
        note(tx, EventAction::Discard, id, sink, "pending", by)?;
    }
    for sink in &dead {
        note(tx, EventAction::Discard, id, sink, "dead", by)?;
    }
    for sink in pending.iter().chain(&dead) {
        free_key(tx, &event, sink)?;
    }
    let pending = pending.into_iter().map(|sink| (sink, EventStatus::Pending));
    Ok(pending.chain(dead.into_iter().map(|sink| (sink, EventStatus::Dead))).collect())
}

/// Lets those go on that waited behind a discarded event.
fn free_key(tx: &Tx<'_>, event: &str, sink: &str) -> rusqlite::Result<()> {
    const KEY: &str = "SELECT ordering_key FROM outbox_messages WHERE id = ?1";
    let key: Option<Option<String>> = tx.first(KEY, [event], |row| row.get(0))?;
    match key.flatten() {
        Some(key) => order::pass_on(tx, sink, event, &key, false),
        None => Ok(()),
    }
}

/// An audit row for a delivery, so that the history of its record shows it.
fn note(
    tx: &Tx<'_>,
    action: EventAction,
    event: Uuid,
    sink: &str,
    status: &str,
    by: &Operator,
) -> rusqlite::Result<()> {
    const RECORD: &str = "SELECT record_id FROM outbox_messages WHERE id = ?1";
    let record = tx.first(RECORD, [event.to_string()], |row| row.must("record_id", Columns::id))?;
    let detail = serde_json::json!({ "sink": sink, "status": status });
    let (name, record) = (action.name(), record.map(Into::into));
    audit(tx, by, &operator::Action { name, record, event: Some(event), detail })
}

/// Where a walk over the dead is: sink, end and event of the last row.
type Cursor = (String, i64, String);

/// What is done to all dead ones of a filter, piece by piece.
pub(super) struct Walk {
    action: EventAction,
    filter: DeadFilter,
    by: Operator,
    audit: Uuid,
    /// Those that were dead at its first piece, so that it ends.
    before: Option<i64>,
    after: Option<Cursor>,
    over: bool,
    total: u64,
}

impl Walk {
    pub(super) fn new(action: EventAction, filter: DeadFilter, by: Operator) -> Self {
        let (audit, before, after) = (Uuid::now_v7(), None, None);
        Self { action, filter, by, audit, before, after, over: false, total: 0 }
    }

    pub(super) fn is_over(&self) -> bool {
        self.over
    }

    /// How many rows were changed so far.
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// One piece of it, and where the walk is then.
    pub(super) fn piece(mut self, tx: &Tx<'_>) -> rusqlite::Result<Self> {
        const TOLD: &str = "INSERT OR IGNORE INTO audit_events (event_id, sink, audit_id)
            VALUES (?1, ?2, ?3)";
        let before = *self.before.get_or_insert(tx.now);
        let page = self.page(tx, before)?;
        for (sink, _, event) in &page {
            let changed = match self.action {
                EventAction::Redeliver => queue_again(tx, event, sink, sink)?,
                EventAction::Discard => bury(tx, event, sink)?,
            };
            if changed {
                tx.execute(TOLD, params![event, sink, self.audit.to_string()])?;
                self.total += 1;
            }
        }
        if !page.is_empty() {
            self.note(tx)?;
        }
        fault::point_blocking(Point::Audited);
        self.over = page.len() < PIECE;
        self.after = page.into_iter().next_back();
        Ok(self)
    }

    fn page(&self, tx: &Tx<'_>, before: i64) -> rusqlite::Result<Vec<Cursor>> {
        let mut query = dead(tx, &self.filter, "d.sink, d.finished_at, d.event_id");
        query.and("d.finished_at <= ?", [before.into()]);
        if let Some((sink, at, event)) = &self.after {
            let values = [sink.clone().into(), (*at).into(), event.clone().into()];
            query.and("(d.sink, d.finished_at, d.event_id) > (?, ?, ?)", values);
        }
        query.sql.push_str(" ORDER BY d.sink, d.finished_at, d.event_id LIMIT ?");
        query.values.push(i64::try_from(PIECE).unwrap_or(i64::MAX).into());
        let read = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?, row.get(2)?));
        tx.rows(&query.sql, params_from_iter(query.values), read)
    }

    fn note(&self, tx: &Tx<'_>) -> rusqlite::Result<()> {
        const NOTE: &str = "INSERT INTO audit_log (id, at, who, action, why, detail)
            VALUES (?1, ?2, ?3, ?4, ?5, ?6) ON CONFLICT (id) DO UPDATE SET detail = excluded.detail";
        let (id, detail) = (self.audit.to_string(), self.filter.detail(self.total));
        let Operator { who, why } = &self.by;
        tx.execute(NOTE, params![id, tx.now, who, self.action.name(), why, detail]).map(drop)
    }
}

fn bury(tx: &Tx<'_>, event: &str, sink: &str) -> rusqlite::Result<bool> {
    const BURY: &str = "UPDATE outbox_done SET outcome = 'discarded', finished_at = ?3
        WHERE event_id = ?1 AND sink = ?2 AND outcome = 'dead'";
    let rows = tx.execute(BURY, params![event, sink, tx.now])?;
    if rows > 0 {
        free_key(tx, event, sink)?;
    }
    Ok(rows > 0)
}

/// The dead rows of a filter.
fn dead(tx: &Tx<'_>, filter: &DeadFilter, columns: &str) -> Filter {
    // The index is named: it has the order of the walk, and no dead row is looked at twice.
    let sql = format!(
        "SELECT {columns} FROM outbox_done d INDEXED BY outbox_done_dead CROSS JOIN outbox_messages m
        ON m.id = d.event_id WHERE d.outcome = 'dead'"
    );
    let mut query = Filter { sql, values: Vec::new() };
    query.equal("d.sink", filter.sink.as_deref());
    query.equal("m.event_type", filter.kind.as_deref());
    query.equal("m.tenant_id", filter.tenant.as_deref());
    query.equal("m.operation", filter.operation.as_deref());
    if let Some(since) = filter.since {
        query.and("m.created_at >= ?", [(tx.now - micros(since)).into()]);
    }
    query
}

pub(super) fn count_dead(tx: &Tx<'_>, filter: &DeadFilter) -> rusqlite::Result<u64> {
    let Filter { sql, values } = dead(tx, filter, "count(*)");
    let count: Option<i64> = tx.first(&sql, params_from_iter(values), |row| row.get(0))?;
    Ok(count.and_then(|count| u64::try_from(count).ok()).unwrap_or(0))
}

pub(super) fn attempts_of(tx: &Tx<'_>, event: Uuid) -> rusqlite::Result<Vec<AttemptRow>> {
    const SQL: &str = "SELECT sink, claim_no, attempt, at, status, error FROM outbox_attempts
        WHERE event_id = ?1
        UNION ALL SELECT sink, claim_no, attempts, finished_at, last_status, NULL FROM outbox_done
        WHERE event_id = ?1 AND outcome = 'sent'
        ORDER BY 1, 2";
    tx.rows(SQL, [event.to_string()], |row| read::attempt_row(row))
}
