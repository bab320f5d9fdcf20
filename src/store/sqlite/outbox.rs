//! The outbox: events are written with their record's completion, claimed under a lease, acknowledged under a claim
//! number, and swept once they ended.
//!
//! A message is written once. A row in `outbox_queue` exists exactly while a delivery is pending; a row in
//! `outbox_done` says how it ended. An event and sink are in one of the two, never in both: each change moves the row
//! within its transaction. Claim numbers only grow, also over a redelivery, so a late worker changes nothing.

use std::time::Duration;

use bytes::Bytes;
use rusqlite::params;
use uuid::Uuid;

use super::super::{Acknowledgement, Claim, Claimed, Look, Order, Reclaim};
use super::order::{self, OrderedClaims};
use super::queue::{Taken, claimable, lane, taken};
use super::row::{left, micros};
use super::thread::Tx;
use crate::record::event::Event;
use crate::record::{RecordId, Scope};
use crate::store::outbox::VerdictRow;

/// Writes an event and its deliveries. An event that exists already is left as it is.
pub(super) fn write(
    tx: &Tx<'_>,
    scope: &Scope,
    record: RecordId,
    event: &Event,
) -> rusqlite::Result<()> {
    const MESSAGE: &str = "INSERT INTO outbox_messages (id, event_key, seq, event_type, tenant_id,
          operation, idempotency_key, record_id, ordering_key, payload, created_at)
        VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11) ON CONFLICT (event_key) DO NOTHING";
    const PENDING: &str = "INSERT INTO outbox_queue (event_id, sink, next_attempt_at, ordering_key,
          seq, created_at) VALUES (?1, ?2, ?3, ?4, ?5, ?3) ON CONFLICT (event_id, sink) DO NOTHING";
    const UNWANTED: &str = "INSERT INTO outbox_done (event_id, sink, outcome, claim_no, attempts,
          finished_at) VALUES (?1, '', 'discarded', 0, 0, ?2)";
    let Scope { tenant, operation, key } = scope;
    let Event { key: name, kind, position, ordering_key: group, payload, .. } = event;
    let (id, payload) = (event.id.to_string(), payload.as_ref());
    let params =
        params![id, name, position, kind, tenant, operation, key, record, group, payload, tx.now];
    let written = tx.execute(MESSAGE, params)?;
    if written == 0 {
        return Ok(());
    }
    for sink in &event.sinks {
        tx.execute(PENDING, params![id, sink, tx.now, event.ordering_key, event.position])?;
    }
    if event.sinks.is_empty() {
        tx.execute(UNWANTED, params![id, tx.now])?;
    }
    Ok(())
}

/// Claims what is due. Whether there is reason to claim again at once: all that was looked at has to wait for others.
pub(super) fn claim(tx: &Tx<'_>, claim: &Claim) -> rusqlite::Result<(Vec<Claimed>, bool)> {
    let Some(from) = beginning(tx, claim)? else { return Ok((Vec::new(), false)) };
    let OrderedClaims { taken, again } = match claim.order {
        Order::None => OrderedClaims { taken: take(tx, claim, from)?, again: false },
        Order::Key(on_dead) => order::take(tx, claim, on_dead, from)?,
    };
    let mut claimed = Vec::with_capacity(taken.len());
    for one in taken {
        claimed.extend(message(tx, one)?);
    }
    // Oldest first, and the events of one record in their order.
    claimed.sort_by_key(|(order, _)| *order);
    Ok((claimed.into_iter().map(|(_, claimed)| claimed).collect(), again))
}

/// The time from which on a claim looks. `None`: nothing may be claimed. No index has a dead end here, so the quick look is
/// complete, too.
fn beginning(tx: &Tx<'_>, claim: &Claim) -> rusqlite::Result<Option<i64>> {
    const ENDS: &str = concat!(
        "SELECT (SELECT next_attempt_at FROM outbox_queue q WHERE ",
        claimable!("?1", "?2", "?3", "?4"),
        " ORDER BY next_attempt_at, event_id LIMIT 1),
          (SELECT next_attempt_at FROM outbox_queue q WHERE ",
        claimable!("?1", "?2", "?3", "?4"),
        " ORDER BY next_attempt_at DESC, event_id DESC LIMIT 1)"
    );
    let Look::From(share) = claim.look else { return Ok(Some(i64::MIN)) };
    let orphans = claim.reclaim == Reclaim::ExpiredOrOrphaned;
    let params = params![claim.sink, lane(claim.lane), tx.now, orphans];
    let ends: Option<(Option<i64>, Option<i64>)> =
        tx.first(ENDS, params, |row| Ok((row.get(0)?, row.get(1)?)))?;
    let Some((Some(oldest), Some(newest))) = ends else { return Ok(None) };
    let part = i128::from(newest - oldest) * i128::from(share) / i128::from(u16::MAX);
    Ok(Some(oldest + i64::try_from(part).unwrap_or_default()))
}

fn take(tx: &Tx<'_>, claim: &Claim, from: i64) -> rusqlite::Result<Vec<Taken>> {
    const SQL: &str = concat!(
        "UPDATE outbox_queue
        SET lease_until = ?1, claim_no = claim_no + 1, claimed_by = ?6
        WHERE sink = ?2 AND event_id IN (SELECT event_id FROM outbox_queue q
          WHERE ",
        claimable!("?2", "?3", "?4", "?7"),
        " AND next_attempt_at >= ?8
          ORDER BY next_attempt_at, event_id LIMIT ?5)
        RETURNING event_id, claim_no, attempts, refusals"
    );
    let until = tx.now + micros(claim.lease);
    let orphans = claim.reclaim == Reclaim::ExpiredOrOrphaned;
    let owner = claim.owner;
    let params =
        params![until, claim.sink, lane(claim.lane), tx.now, claim.limit, owner, orphans, from];
    tx.rows(SQL, params, taken)
}

fn message(tx: &Tx<'_>, taken: Taken) -> rusqlite::Result<Option<((i64, u32), Claimed)>> {
    const SQL: &str = "SELECT event_type, tenant_id, operation, idempotency_key, payload,
          created_at, seq FROM outbox_messages WHERE id = ?1";
    let (event_id, claim_no, attempts, refusals) = taken;
    tx.first(SQL, [event_id.to_string()], |row| {
        let created_at: i64 = row.get(5)?;
        let claimed = Claimed {
            event_id,
            claim_no,
            attempts,
            refusals,
            age: left(tx.now, created_at),
            kind: row.get(0)?,
            tenant: row.get(1)?,
            operation: row.get(2)?,
            key: row.get(3)?,
            payload: Bytes::from(row.get::<_, Vec<u8>>(4)?),
        };
        Ok(((created_at, row.get(6)?), claimed))
    })
}

pub(super) fn acknowledge(
    tx: &Tx<'_>,
    sink: &str,
    order: Order,
    verdicts: &[Acknowledgement],
) -> rusqlite::Result<Vec<Uuid>> {
    let mut current = Vec::with_capacity(verdicts.len());
    for verdict in verdicts {
        let id = verdict.event_id;
        let ordered = match order {
            Order::None => None,
            Order::Key(on_dead) => order::key_of(tx, sink, id)?.map(|key| (key, on_dead)),
        };
        if !acknowledge_one(tx, sink, verdict)? {
            continue;
        }
        current.push(id);
        if let Some((key, on_dead)) = ordered {
            order::pass_on(tx, sink, &id.to_string(), &key, order::blocks(verdict, on_dead))?;
        }
    }
    Ok(current)
}

fn acknowledge_one(tx: &Tx<'_>, sink: &str, ack: &Acknowledgement) -> rusqlite::Result<bool> {
    const DUE: &str = "UPDATE outbox_queue SET attempts = attempts + ?7, refusals = refusals + ?8,
          lane = 1, lease_until = 0, next_attempt_at = ?4, last_status = ?5, last_error = ?6
        WHERE event_id = ?1 AND sink = ?2 AND claim_no = ?3";
    const BACK: &str = "UPDATE outbox_queue SET lease_until = 0
        WHERE event_id = ?1 AND sink = ?2 AND claim_no = ?3";
    let (id, no) = (ack.event_id.to_string(), ack.claim_no);
    let VerdictRow { outcome, delay, status, error, counted } = ack.verdict.row();
    if let (Some(error), (1, _)) = (error, counted) {
        note_attempt(tx, sink, ack, status, error)?;
    }
    let rows = match (outcome, delay) {
        (Some(outcome), _) => end(tx, sink, ack, outcome, status, error)?,
        (None, Some(delay)) => {
            let (next, (attempts, refusals)) = (tx.now + micros(delay), counted);
            tx.execute(DUE, params![id, sink, no, next, status, error, attempts, refusals])?
        }
        (None, None) => tx.execute(BACK, params![id, sink, no])?,
    };
    Ok(rows > 0)
}

/// Keeps a failed attempt whose claim is current: in the ring of its event and sink, over the oldest.
fn note_attempt(
    tx: &Tx<'_>,
    sink: &str,
    ack: &Acknowledgement,
    status: Option<u16>,
    error: &str,
) -> rusqlite::Result<()> {
    const NOTE: &str = "INSERT OR REPLACE INTO outbox_attempts
          (event_id, sink, slot, claim_no, attempt, at, status, error)
        SELECT event_id, sink, claim_no % 50, claim_no, attempts + 1, ?4, ?5, ?6 FROM outbox_queue
        WHERE event_id = ?1 AND sink = ?2 AND claim_no = ?3";
    let id = ack.event_id.to_string();
    tx.execute(NOTE, params![id, sink, ack.claim_no, tx.now, status, error]).map(drop)
}

/// Moves a row from what is pending to what ended; the attempt that ended it counts.
fn end(
    tx: &Tx<'_>,
    sink: &str,
    ack: &Acknowledgement,
    outcome: &str,
    status: Option<u16>,
    error: Option<&str>,
) -> rusqlite::Result<usize> {
    const DONE: &str = "INSERT INTO outbox_done (event_id, sink, outcome, claim_no, attempts,
          last_status, last_error, finished_at)
        SELECT event_id, sink, ?4, claim_no, attempts + 1, ?5, ?6, ?7 FROM outbox_queue
        WHERE event_id = ?1 AND sink = ?2 AND claim_no = ?3";
    const NOT_OWED: &str =
        "DELETE FROM outbox_queue WHERE event_id = ?1 AND sink = ?2 AND claim_no = ?3";
    let id = ack.event_id.to_string();
    tx.execute(DONE, params![id, sink, ack.claim_no, outcome, status, error, tx.now])?;
    tx.execute(NOT_OWED, params![id, sink, ack.claim_no])
}

/// How long until a retry's time comes or a claim ends, whichever is first.
pub(super) fn next_due(tx: &Tx<'_>, sink: &str) -> rusqlite::Result<Option<Duration>> {
    // Each branch reads the head of an index, however long the queue is.
    const SQL: &str = "SELECT min(due) FROM (
          SELECT min(next_attempt_at) AS due FROM outbox_queue
            WHERE sink = ?1 AND lane = 0 AND next_attempt_at > ?2
          UNION ALL SELECT min(next_attempt_at) FROM outbox_queue
            WHERE sink = ?1 AND lane = 1 AND next_attempt_at > ?2
          UNION ALL SELECT min(lease_until) FROM outbox_queue
            WHERE sink = ?1 AND lease_until > 0 AND lease_until > ?2)";
    let due: Option<Option<i64>> = tx.first(SQL, params![sink, tx.now], |row| row.get(0))?;
    Ok(due.flatten().map(|due| left(due, tx.now)))
}

pub(super) fn sweep(tx: &Tx<'_>, retention: Duration, limit: u32) -> rusqlite::Result<u64> {
    // Aged by its end, not by its beginning: a late delivery stays visible for a whole retention. The index is named,
    // because its key of event and sink looks better to the planner and is read from end to end.
    const ENDED: &str = "SELECT d.event_id FROM outbox_done d INDEXED BY outbox_done_finished
        WHERE d.outcome <> 'dead' AND d.finished_at <= ?1
          AND NOT EXISTS (SELECT 1 FROM outbox_queue q WHERE q.event_id = d.event_id)
          AND NOT EXISTS (SELECT 1 FROM outbox_done o WHERE o.event_id = d.event_id
            AND (o.outcome = 'dead' OR o.finished_at > ?1))
        LIMIT ?2";
    let before = tx.now - micros(retention);
    let ended: Vec<String> = tx.rows(ENDED, params![before, limit], |row| row.get(0))?;
    let mut swept = 0;
    for id in &ended {
        tx.execute("DELETE FROM outbox_done WHERE event_id = ?1", [id])?;
        tx.execute("DELETE FROM outbox_attempts WHERE event_id = ?1", [id])?;
        tx.execute("DELETE FROM audit_events WHERE event_id = ?1", [id])?;
        swept += tx.execute("DELETE FROM outbox_messages WHERE id = ?1", [id])? as u64;
    }
    Ok(swept)
}

/// How much is pending and how much was given up, by sink.
#[expect(clippy::type_complexity, reason = "the two lists of Gauges")]
pub(super) fn counts(
    tx: &Tx<'_>,
) -> rusqlite::Result<(Vec<(String, u64, Duration)>, Vec<(String, u64)>)> {
    const PENDING: &str =
        "SELECT sink, count(*), min(created_at) FROM outbox_queue GROUP BY sink ORDER BY sink";
    const DEAD: &str = "SELECT sink, count(*) FROM outbox_done WHERE outcome = 'dead'
        GROUP BY sink ORDER BY sink";
    let count = |row: &rusqlite::Row<'_>| row.get(1).map(|n: i64| u64::try_from(n).unwrap_or(0));
    let pending =
        tx.rows(PENDING, [], |row| Ok((row.get(0)?, count(row)?, left(tx.now, row.get(2)?))))?;
    let dead = tx.rows(DEAD, [], |row| Ok((row.get(0)?, count(row)?)))?;
    Ok((pending, dead))
}
