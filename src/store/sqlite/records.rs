//! Reservations, completions and the other changes of one record, each a statement or two inside a transaction.
//!
//! Each change names scope, id, attempt and the statuses it may leave in its own WHERE, and its row count is read.
//! A reservation and a take-over check in the same statement that their owner's lease is live.

use std::time::Duration;

use rusqlite::params;

use super::super::{Changed, Completion, Heartbeat, Proposal, Reserved, Settled};
use super::outbox;
use super::row::{self, micros, record_columns};
use super::thread::Tx;
use crate::fault::{self, Point};
use crate::record::{
    Answer, Attempt, Fence, Fingerprint, KeptBody, OwnerId, Record, Scope, State, encode_headers,
};
use crate::store::read;

/// How long a lease is kept after its end, so that a process that slept cannot make it anew.
const LEASE_KEPT: Duration = Duration::from_secs(24 * 3600);

/// How long a note of an unknown record is kept, at least.
const NOTE_KEPT: Duration = Duration::from_secs(600);

const LIVES: &str =
    "SELECT EXISTS (SELECT 1 FROM oncegate_owners WHERE owner = ?1 AND lease_until > ?2)";

pub(super) fn heartbeat(
    tx: &Tx<'_>,
    owner: OwnerId,
    lease: Duration,
) -> rusqlite::Result<Heartbeat> {
    const SQL: &str = "INSERT INTO oncegate_owners (owner, lease_until) VALUES (?1, ?2)
        ON CONFLICT (owner) DO UPDATE SET lease_until = excluded.lease_until
        WHERE oncegate_owners.lease_until > ?3";
    let until = tx.now + micros(lease);
    let renewed = tx.execute(SQL, params![owner, until, tx.now])?;
    Ok(if renewed == 1 { Heartbeat::Renewed } else { Heartbeat::Ended })
}

pub(super) fn retire(tx: &Tx<'_>, owner: OwnerId) -> rusqlite::Result<()> {
    // The row stays, ended: deleted, a heartbeat that is still under way would make it anew.
    const SQL: &str =
        "UPDATE oncegate_owners SET lease_until = min(lease_until, ?2) WHERE owner = ?1";
    tx.execute(SQL, params![owner, tx.now]).map(drop)
}

pub(super) fn sweep_leases(tx: &Tx<'_>) -> rusqlite::Result<u64> {
    const SQL: &str = "DELETE FROM oncegate_owners WHERE lease_until < ?1 AND NOT EXISTS (
        SELECT 1 FROM idempotency_records r WHERE r.status <> 'completed'
        AND r.status = 'in_progress' AND r.owner = oncegate_owners.owner)";
    tx.execute(SQL, [tx.now - micros(LEASE_KEPT)]).map(|rows| rows as u64)
}

pub(super) fn reserve(tx: &Tx<'_>, proposal: &Proposal) -> rusqlite::Result<Reserved> {
    const SQL: &str = "INSERT INTO idempotency_records (id, tenant_id, operation, key,
          request_hash, raw_hash, recipe, status, attempt, owner, caller, request_context, created_at,
          retention)
        SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, 'in_progress', 1, ?8, ?9, ?10, ?11, ?12
        WHERE EXISTS (SELECT 1 FROM oncegate_owners WHERE owner = ?8 AND lease_until > ?11)
        ON CONFLICT (tenant_id, operation, key) DO NOTHING";
    let Proposal { id, owner, caller, fingerprint, .. } = proposal;
    let Scope { tenant, operation, key } = &proposal.scope;
    let Fingerprint { canonical, raw, recipe } = fingerprint;
    let (context, retention) = (proposal.context.as_deref(), micros(proposal.retention));
    let params = params![
        id, tenant, operation, key, canonical, raw, recipe, owner, caller, context, tx.now,
        retention
    ];
    let made = tx.execute(SQL, params)?;
    if made == 1 {
        return Ok(Reserved::Held);
    }
    match find(tx, &proposal.scope)? {
        Some(found) if is_own(&found, proposal) => Ok(Reserved::Held),
        Some(found) => Ok(Reserved::Exists(Box::new(found))),
        None if lives(tx, proposal.owner)? => Ok(Reserved::Vanished),
        None => Ok(Reserved::LeaseEnded),
    }
}

/// Whether the row that exists is this very proposal, committed by an earlier run whose end was not known.
pub(super) fn is_own(found: &Record, proposal: &Proposal) -> bool {
    let fence = Fence { id: proposal.id, attempt: Attempt::FIRST };
    let in_progress =
        matches!(found.state, State::InProgress { owner, .. } if owner == proposal.owner);
    found.fence == fence && in_progress
}

fn lives(tx: &Tx<'_>, owner: OwnerId) -> rusqlite::Result<bool> {
    let lives = tx.first(LIVES, params![owner, tx.now], |row| row.get(0))?;
    Ok(lives.unwrap_or(false))
}

pub(super) fn find(tx: &Tx<'_>, scope: &Scope) -> rusqlite::Result<Option<Record>> {
    const SQL: &str = concat!(
        "SELECT ",
        record_columns!(),
        " FROM idempotency_records r WHERE tenant_id = ?2 AND operation = ?3 AND key = ?4"
    );
    let Scope { tenant, operation, key } = scope;
    let params = params![tx.now, tenant, operation, key];
    tx.first(SQL, params, |row| read::record(row))
}

pub(super) fn changed(rows: usize) -> Changed {
    if rows == 0 { Changed::No } else { Changed::Yes }
}

/// From which statuses and to which attempt a completion goes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Completer {
    /// The attempt itself.
    Attempt,
    /// An operator, under the next attempt, so that the attempt itself changes nothing any more.
    Operator,
}

pub(super) fn complete(
    tx: &Tx<'_>,
    completion: &Completion,
    by: Completer,
) -> rusqlite::Result<Settled> {
    const SQL: &str = "UPDATE idempotency_records SET status = 'completed', completed_at = ?1,
          expires_at = ?2, response_status = ?3, response_headers = ?4, response_body = ?5,
          request_context = NULL, attempt = attempt + ?6
        WHERE tenant_id = ?7 AND operation = ?8 AND key = ?9 AND id = ?10 AND attempt = ?11
          AND status IN ('in_progress', 'unknown')";
    let Scope { tenant, operation, key } = &completion.scope;
    let Answer { status, headers, spelling, body } = &completion.answer;
    let body = match body {
        KeptBody::Whole(bytes) => Some(bytes.as_ref()),
        KeptBody::NotRetained => None,
    };
    let expires_at = tx.now + micros(completion.retention);
    let headers = encode_headers(headers, spelling);
    let (status, raised) = (status.as_u16(), i64::from(by == Completer::Operator));
    let Fence { id, attempt } = completion.fence;
    let params = params![
        tx.now, expires_at, status, headers, body, raised, tenant, operation, key, id, attempt
    ];
    let done = tx.execute(SQL, params)?;
    if done == 0 {
        return Ok(Settled::Fenced);
    }
    fault::point_blocking(Point::HalfCompleted);
    for event in &completion.events {
        outbox::write(tx, &completion.scope, completion.fence.id, event)?;
    }
    Ok(Settled::Done { expires_at: row::time(expires_at) })
}

pub(super) fn release(tx: &Tx<'_>, scope: &Scope, fence: Fence) -> rusqlite::Result<Changed> {
    const FIRST: &str = "DELETE FROM idempotency_records
        WHERE tenant_id = ?1 AND operation = ?2 AND key = ?3 AND id = ?4 AND attempt = ?5
          AND status IN ('in_progress', 'unknown')";
    const LATER: &str = "UPDATE idempotency_records SET status = 'unknown'
        WHERE tenant_id = ?1 AND operation = ?2 AND key = ?3 AND id = ?4 AND attempt = ?5
          AND status IN ('in_progress', 'unknown')";
    if fence.attempt == Attempt::FIRST {
        return fenced(tx, FIRST, scope, fence);
    }
    let released = fenced(tx, LATER, scope, fence)?;
    if released == Changed::Yes {
        // This attempt did not execute: the doubt about those before it goes on.
        note_unknown(tx, &Doubt { fence, since: tx.now, orphaned: false, goes_on: true })?;
    }
    Ok(released)
}

pub(super) fn mark_unknown(tx: &Tx<'_>, scope: &Scope, fence: Fence) -> rusqlite::Result<Changed> {
    const SQL: &str = "UPDATE idempotency_records SET status = 'unknown'
        WHERE tenant_id = ?1 AND operation = ?2 AND key = ?3 AND id = ?4 AND attempt = ?5
          AND status = 'in_progress'";
    let marked = fenced(tx, SQL, scope, fence)?;
    if marked == Changed::Yes {
        note_unknown(tx, &Doubt { fence, since: tx.now, orphaned: false, goes_on: false })?;
    }
    Ok(marked)
}

fn fenced(tx: &Tx<'_>, sql: &str, scope: &Scope, fence: Fence) -> rusqlite::Result<Changed> {
    let Scope { tenant, operation, key } = scope;
    let Fence { id, attempt } = fence;
    tx.execute(sql, params![tenant, operation, key, id, attempt]).map(changed)
}

/// A record that became unknown.
struct Doubt {
    fence: Fence,
    since: i64,
    orphaned: bool,
    /// It goes on also where it was noted for an earlier attempt.
    goes_on: bool,
}

/// Notes it. Of the same attempt it was a look-up that brought no result: the doubt's beginning stays, and the next
/// look-up waits, from 1 s doubling to 5 min.
fn note_unknown(tx: &Tx<'_>, doubt: &Doubt) -> rusqlite::Result<()> {
    const SQL: &str = "INSERT INTO oncegate_unknown AS u
          (id, noted_at, attempt, since, orphaned, next_ask_at)
        VALUES (?1, ?2, ?3, ?4, ?5, ?4)
        ON CONFLICT (id) DO UPDATE SET noted_at = excluded.noted_at, attempt = excluded.attempt,
          since = iif(?6 OR u.attempt = excluded.attempt, u.since, excluded.since),
          orphaned = iif(?6 OR u.attempt = excluded.attempt, u.orphaned, excluded.orphaned),
          asked = iif(?6 OR u.attempt = excluded.attempt, u.asked + 1, 0),
          next_ask_at = iif(?6 OR u.attempt = excluded.attempt,
            ?2 + min(300000, 1000 << min(u.asked, 9)) * (500 + abs(random() % 501)),
            excluded.next_ask_at)";
    let Doubt { fence, since, orphaned, goes_on } = doubt;
    let params = params![fence.id, tx.now, fence.attempt, since, orphaned, goes_on];
    tx.execute(SQL, params).map(drop)
}

/// Marks what a dead owner left, all of it or one record.
pub(super) fn mark_dead(
    tx: &Tx<'_>,
    only: Option<&(Scope, Fence)>,
    limit: u32,
) -> rusqlite::Result<u64> {
    const ALL: &str =
        "SELECT r.id AS id, r.attempt AS attempt, coalesce(o.lease_until, ?1) AS since
        FROM idempotency_records r LEFT JOIN oncegate_owners o ON o.owner = r.owner
        WHERE r.status <> 'completed' AND r.status = 'in_progress'
          AND coalesce(o.lease_until, ?1) <= ?1
        LIMIT ?2";
    const ONE: &str =
        "SELECT r.id AS id, r.attempt AS attempt, coalesce(o.lease_until, ?1) AS since
        FROM idempotency_records r LEFT JOIN oncegate_owners o ON o.owner = r.owner
        WHERE tenant_id = ?2 AND operation = ?3 AND key = ?4 AND r.id = ?5 AND r.attempt = ?6
          AND r.status = 'in_progress' AND coalesce(o.lease_until, ?1) <= ?1";
    const MARK: &str = "UPDATE idempotency_records SET status = 'unknown'
        WHERE id = ?1 AND attempt = ?2 AND status = 'in_progress'";
    let read = |row: &rusqlite::Row<'_>| Ok((read::fence(row)?, row.get("since")?));
    let found: Vec<(Fence, i64)> = match only {
        None => tx.rows(ALL, params![tx.now, limit], read)?,
        Some((Scope { tenant, operation, key }, fence)) => {
            let Fence { id, attempt } = fence;
            tx.rows(ONE, params![tx.now, tenant, operation, key, id, attempt], read)?
        }
    };
    for (fence, since) in &found {
        tx.execute(MARK, params![fence.id, fence.attempt])?;
        note_unknown(tx, &Doubt { fence: *fence, since: *since, orphaned: true, goes_on: false })?;
    }
    Ok(found.len() as u64)
}

pub(super) fn sweep(tx: &Tx<'_>, limit: u32) -> rusqlite::Result<u64> {
    const SQL: &str = "DELETE FROM idempotency_records WHERE status = 'completed'
        AND expires_at <= ?1 AND rowid IN (SELECT rowid FROM idempotency_records
          WHERE status = 'completed' AND expires_at <= ?1 ORDER BY expires_at LIMIT ?2)";
    // A note is younger than this as long as the record may be on its way back to unknown. One that was announced
    // goes when its end is announced.
    const NOTES: &str = "DELETE FROM oncegate_unknown WHERE noted_at < ?1 AND announced IS NULL
        AND NOT EXISTS (SELECT 1 FROM idempotency_records r
          WHERE r.id = oncegate_unknown.id AND r.status = 'unknown')";
    tx.execute(NOTES, [tx.now - micros(NOTE_KEPT)])?;
    tx.execute(SQL, params![tx.now, limit]).map(|rows| rows as u64)
}
