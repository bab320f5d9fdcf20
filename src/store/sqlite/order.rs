//! Claims and verdicts in the order of ordering keys: what `postgres/order.rs` says, without its locks, since one
//! transaction writes at a time.

use rusqlite::params;
use uuid::Uuid;

use super::super::{Acknowledgement, Claim, Lane, Look, OnDead, Order, Reclaim, Verdict, Woken};
use super::queue::{Taken, claimable, lane, taken};
use super::row::micros;
use super::thread::Tx;

/// How many rows are looked at in one transaction; for longer nobody else writes.
const WINDOW: u32 = 1024;

/// For how long followers are deferred at most, in microseconds; half of it at least.
const DEFER_MAX: i64 = 600_000_000;

/// How many keys, or events of a lane, one piece of [`wake_deferred`] looks at.
const PIECE: u32 = 500;

/// What one look found: events that are claimed, and whether there is reason to look again at once.
pub(super) struct OrderedClaims {
    pub(super) taken: Vec<Taken>,
    pub(super) again: bool,
}

/// Looks at what is due from this time on.
pub(super) fn take(
    tx: &Tx<'_>,
    claim: &Claim,
    on_dead: OnDead,
    from: i64,
) -> rusqlite::Result<OrderedClaims> {
    const DUE: &str = concat!(
        "SELECT event_id, ordering_key FROM outbox_queue q
        WHERE ",
        claimable!("?1", "?2", "?3", "?4"),
        " AND next_attempt_at >= ?6
        ORDER BY next_attempt_at, event_id LIMIT ?5"
    );
    let orphans = claim.reclaim == Reclaim::ExpiredOrOrphaned;
    let (window, limit) = (WINDOW.max(claim.limit), claim.limit as usize);
    let due: Vec<(String, Option<String>)> = tx.rows(
        DUE,
        params![claim.sink, lane(claim.lane), tx.now, orphans, window, from],
        |row| Ok((row.get(0)?, row.get(1)?)),
    )?;
    let full = due.len() >= window as usize;
    let (mut claimed, mut deferred) = (Vec::new(), false);
    for (id, key) in due {
        let free = match &key {
            None => true,
            Some(key) => {
                is_first(tx, &claim.sink, key, &id)?
                    && (claimed.len() >= limit || take_turn(tx, claim, on_dead, key, &id)?)
            }
        };
        if !free {
            defer(tx, &claim.sink, &id)?;
            deferred = true;
        } else if claimed.len() < limit {
            claimed.extend(mark(tx, claim, &id)?);
        }
    }
    // Not again from a place in the middle, see there.
    let again = full && deferred && !matches!(claim.look, Look::From(_));
    Ok(OrderedClaims { taken: claimed, again })
}

/// Whether nothing of the key comes before this event, in either lane.
fn is_first(tx: &Tx<'_>, sink: &str, key: &str, id: &str) -> rusqlite::Result<bool> {
    const FIRST: &str = "SELECT event_id FROM outbox_queue WHERE sink = ?1 AND ordering_key = ?2
        ORDER BY created_at, seq, event_id LIMIT 1";
    let first: Option<String> = tx.first(FIRST, params![sink, key], |row| row.get(0))?;
    Ok(first.as_deref() == Some(id))
}

/// Takes the key's turn where nobody has it, or it is over.
fn take_turn(
    tx: &Tx<'_>,
    claim: &Claim,
    on_dead: OnDead,
    key: &str,
    id: &str,
) -> rusqlite::Result<bool> {
    const TURN: &str = "INSERT INTO outbox_turns AS t (sink, ordering_key, event_id, lease_until,
          claimed_by) VALUES (?1, ?2, ?3, ?4, ?5)
        ON CONFLICT (sink, ordering_key) DO UPDATE
        SET event_id = excluded.event_id, lease_until = excluded.lease_until,
            claimed_by = excluded.claimed_by
        WHERE t.event_id = excluded.event_id
          OR (t.lease_until IS NOT NULL AND (t.lease_until <= ?6 OR (?7 AND NOT EXISTS (
            SELECT 1 FROM oncegate_owners o WHERE o.owner = t.claimed_by AND o.lease_until > ?6))))
          OR (t.lease_until IS NULL AND (NOT ?8 OR NOT EXISTS (
            SELECT 1 FROM outbox_done d
            WHERE d.event_id = t.event_id AND d.sink = t.sink AND d.outcome = 'dead')))";
    let until = tx.now + micros(claim.lease);
    let (orphans, blocks) = (claim.reclaim == Reclaim::ExpiredOrOrphaned, on_dead == OnDead::Block);
    let params = params![claim.sink, key, id, until, claim.owner, tx.now, orphans, blocks];
    tx.execute(TURN, params).map(|rows| rows > 0)
}

fn defer(tx: &Tx<'_>, sink: &str, id: &str) -> rusqlite::Result<()> {
    const LATER: &str = "UPDATE outbox_queue SET next_attempt_at = ?3,
          claimed_by = CASE WHEN lease_until > ?4 THEN claimed_by END
        WHERE event_id = ?1 AND sink = ?2";
    let later = tx.now + DEFER_MAX / 2 + fastrand::i64(0..=DEFER_MAX / 2);
    tx.execute(LATER, params![id, sink, later, tx.now]).map(drop)
}

fn mark(tx: &Tx<'_>, claim: &Claim, id: &str) -> rusqlite::Result<Option<Taken>> {
    const SQL: &str = "UPDATE outbox_queue
        SET lease_until = ?3, claim_no = claim_no + 1, claimed_by = ?4
        WHERE event_id = ?1 AND sink = ?2 RETURNING event_id, claim_no, attempts, refusals";
    let until = tx.now + micros(claim.lease);
    let params = params![id, claim.sink, until, claim.owner];
    Ok(tx.rows(SQL, params, taken)?.into_iter().next())
}

/// An event's ordering key towards a sink, while it is pending.
pub(super) fn key_of(tx: &Tx<'_>, sink: &str, id: Uuid) -> rusqlite::Result<Option<String>> {
    const SQL: &str = "SELECT ordering_key FROM outbox_queue WHERE event_id = ?1 AND sink = ?2";
    tx.first(SQL, params![id.to_string(), sink], |row| row.get(0)).map(Option::flatten)
}

/// Gives up the turn of an event that has ended, or is free again, and makes the next of its key due. To be called after
/// it ended or was freed, in the same transaction. `blocks`: those behind it shall wait.
pub(super) fn pass_on(
    tx: &Tx<'_>,
    sink: &str,
    id: &str,
    key: &str,
    blocks: bool,
) -> rusqlite::Result<()> {
    const DEAD: &str = "UPDATE outbox_turns SET lease_until = NULL, claimed_by = NULL
        WHERE sink = ?1 AND ordering_key = ?2 AND event_id = ?3";
    const END: &str = "DELETE FROM outbox_turns
        WHERE sink = ?1 AND ordering_key = ?2 AND event_id = ?3";
    // What this very verdict frees keeps the time that it gave it.
    const WAKE: &str = "UPDATE outbox_queue SET next_attempt_at = ?4
        WHERE sink = ?1 AND event_id <> ?3 AND lease_until <= ?4 AND event_id = (
          SELECT event_id FROM outbox_queue WHERE sink = ?1 AND ordering_key = ?2
          ORDER BY created_at, seq, event_id LIMIT 1)";
    tx.execute(if blocks { DEAD } else { END }, params![sink, key, id])?;
    tx.execute(WAKE, params![sink, key, id, tx.now]).map(drop)
}

/// Whether a verdict lets the events behind wait.
pub(super) fn blocks(ack: &Acknowledgement, on_dead: OnDead) -> bool {
    on_dead == OnDead::Block && matches!(ack.verdict, Verdict::Dead { .. })
}

/// A piece of what waits for nobody any more; see the verb in `store/outbox.rs`.
pub(super) fn wake_deferred(
    tx: &Tx<'_>,
    sink: &str,
    order: Order,
    from: Option<String>,
) -> rusqlite::Result<Woken> {
    const UNBLOCK: &str = "DELETE FROM outbox_turns WHERE sink = ?1 AND lease_until IS NULL";
    if order != Order::Key(OnDead::Block) {
        tx.execute(UNBLOCK, [sink])?;
    }
    match order {
        Order::None => wake_all(tx, sink),
        Order::Key(on_dead) => wake_heads(tx, sink, on_dead == OnDead::Block, from),
    }
}

fn wake_all(tx: &Tx<'_>, sink: &str) -> rusqlite::Result<Woken> {
    const SQL: &str = "UPDATE outbox_queue SET next_attempt_at = ?2
        WHERE sink = ?1 AND event_id IN (SELECT event_id FROM outbox_queue
          WHERE sink = ?1 AND lane = ?3 AND next_attempt_at > ?2 AND next_attempt_at <= ?4
            AND ordering_key IS NOT NULL AND lease_until <= ?2 AND (lane = 0 OR claimed_by IS NULL)
          ORDER BY next_attempt_at, event_id LIMIT ?5)";
    let mut done = Woken::default();
    for which in [Lane::Fresh, Lane::Retry] {
        let params = params![sink, tx.now, lane(which), tx.now + DEFER_MAX, PIECE];
        let count = tx.execute(SQL, params)? as u64;
        done.count += count;
        // What was woken is not found again: a piece begins where the last one did.
        if count >= u64::from(PIECE) {
            done.next = Some(String::new());
        }
    }
    Ok(done)
}

/// From key to key by the index, however many events come after the first.
fn wake_heads(
    tx: &Tx<'_>,
    sink: &str,
    blocks: bool,
    mut from: Option<String>,
) -> rusqlite::Result<Woken> {
    const HEAD: &str = "SELECT ordering_key, event_id FROM outbox_queue
        WHERE sink = ?1 AND ordering_key IS NOT NULL AND ordering_key > ?2
        ORDER BY ordering_key, created_at, seq, event_id LIMIT 1";
    const FIRST: &str = "SELECT ordering_key, event_id FROM outbox_queue
        WHERE sink = ?1 AND ordering_key IS NOT NULL
        ORDER BY ordering_key, created_at, seq, event_id LIMIT 1";
    const WAKE: &str = "UPDATE outbox_queue SET next_attempt_at = ?4
        WHERE event_id = ?3 AND sink = ?1 AND next_attempt_at > ?4 AND lease_until <= ?4
          AND (lane = 0 OR claimed_by IS NULL)
          AND NOT EXISTS (SELECT 1 FROM outbox_turns t
            WHERE t.sink = ?1 AND t.ordering_key = ?2 AND t.event_id <> ?3
              AND CASE WHEN t.lease_until IS NULL THEN ?5 AND EXISTS (SELECT 1 FROM outbox_done d
                  WHERE d.event_id = t.event_id AND d.sink = t.sink AND d.outcome = 'dead')
                ELSE t.lease_until > ?4 END)";
    let mut count = 0;
    let read = |row: &rusqlite::Row<'_>| Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?));
    for _ in 0..PIECE {
        let head = match &from {
            Some(key) => tx.first(HEAD, params![sink, key], read)?,
            None => tx.first(FIRST, [sink], read)?,
        };
        let Some((key, event)) = head else { return Ok(Woken { count, next: None }) };
        count += tx.execute(WAKE, params![sink, key, event, tx.now, blocks])? as u64;
        from = Some(key);
    }
    Ok(Woken { count, next: from })
}

/// Ends the turns of all claims.
pub(super) fn end_turns(tx: &Tx<'_>) -> rusqlite::Result<()> {
    tx.execute("DELETE FROM outbox_turns WHERE lease_until IS NOT NULL", []).map(drop)
}

/// How many keys wait behind a dead event, by sink.
pub(super) fn blocked(tx: &Tx<'_>) -> rusqlite::Result<Vec<(String, u64)>> {
    const SQL: &str = "SELECT t.sink, count(*) FROM outbox_turns t JOIN outbox_done d
          ON d.event_id = t.event_id AND d.sink = t.sink AND d.outcome = 'dead'
        WHERE t.lease_until IS NULL GROUP BY t.sink ORDER BY t.sink";
    tx.rows(SQL, [], |row| Ok((row.get(0)?, u64::try_from(row.get::<_, i64>(1)?).unwrap_or(0))))
}
