//! Records that go over to another owner, or on to their next attempt.

use rusqlite::params;

use super::super::{Changed, LookupTrigger, Proposal, Takeover};
use super::records::{changed, find, is_own};
use super::row::micros;
use super::thread::Tx;
use crate::record::{Fence, Fingerprint, LookupDelay, Record, Scope, State};

pub(super) fn take_over(
    tx: &Tx<'_>,
    proposal: &Proposal,
    from: Takeover,
) -> rusqlite::Result<Changed> {
    match from {
        Takeover::Expired(fence) => take_over_expired(tx, proposal, fence),
        Takeover::Unknown(fence) => take_over_unknown(tx, proposal, fence),
        Takeover::Lookup(fence, delay, by) => take_over_lookup(tx, proposal, fence, delay, by),
    }
}

fn take_over_expired(tx: &Tx<'_>, proposal: &Proposal, fence: Fence) -> rusqlite::Result<Changed> {
    const SQL: &str = "UPDATE idempotency_records SET id = ?1, attempt = 1, request_hash = ?2,
          raw_hash = ?3, recipe = ?4, status = 'in_progress', owner = ?5, caller = ?6,
          request_context = ?7, created_at = ?8, completed_at = NULL, expires_at = NULL,
          response_status = NULL, response_headers = NULL, response_body = NULL, retention = ?14
        WHERE tenant_id = ?9 AND operation = ?10 AND key = ?11 AND id = ?12 AND attempt = ?13
          AND status = 'completed' AND expires_at <= ?8
          AND EXISTS (SELECT 1 FROM oncegate_owners WHERE owner = ?5 AND lease_until > ?8)";
    let Proposal { id, owner, caller, fingerprint, .. } = proposal;
    let Scope { tenant, operation, key } = &proposal.scope;
    let Fingerprint { canonical, raw, recipe } = fingerprint;
    let Fence { id: old, attempt } = fence;
    let (context, retention) = (proposal.context.as_deref(), micros(proposal.retention));
    let params = params![
        id, canonical, raw, recipe, owner, caller, context, tx.now, tenant, operation, key, old,
        attempt, retention
    ];
    let taken = tx.execute(SQL, params)?;
    if taken == 1 {
        return Ok(Changed::Yes);
    }
    // After a commit in doubt the same take-over is run again; its id is its own, so the row shows it.
    let own = find(tx, &proposal.scope)?.is_some_and(|found| is_own(&found, proposal));
    Ok(if own { Changed::Yes } else { Changed::No })
}

fn take_over_unknown(tx: &Tx<'_>, proposal: &Proposal, fence: Fence) -> rusqlite::Result<Changed> {
    const SQL: &str = "UPDATE idempotency_records SET attempt = attempt + 1,
          status = 'in_progress', owner = ?1, caller = ?2, request_context = ?3, retention = ?10
        WHERE tenant_id = ?4 AND operation = ?5 AND key = ?6 AND id = ?7 AND attempt = ?8
          AND status = 'unknown'
          AND EXISTS (SELECT 1 FROM oncegate_owners WHERE owner = ?1 AND lease_until > ?9)";
    Ok(changed(next_attempt(tx, SQL, proposal, fence)?))
}

/// Whoever looks it up holds the record as whoever executes it does, so that one at a time does.
fn take_over_lookup(
    tx: &Tx<'_>,
    proposal: &Proposal,
    fence: Fence,
    delay: LookupDelay,
    by: LookupTrigger,
) -> rusqlite::Result<Changed> {
    const SQL: &str = "UPDATE idempotency_records SET status = 'in_progress', owner = ?1
        WHERE tenant_id = ?2 AND operation = ?3 AND key = ?4 AND id = ?5 AND attempt = ?6
          AND status = 'unknown'
          AND EXISTS (SELECT 1 FROM oncegate_unknown u WHERE u.id = ?5
            AND (?10 OR u.next_ask_at <= ?7) AND u.since + iif(u.orphaned, ?9, ?8) <= ?7)
          AND EXISTS (SELECT 1 FROM oncegate_owners WHERE owner = ?1 AND lease_until > ?7)";
    let Scope { tenant, operation, key } = &proposal.scope;
    let Fence { id, attempt } = fence;
    let (lost, orphaned) = (micros(delay.after_loss), micros(delay.after_lease));
    let (owner, at_once) = (proposal.owner, by == LookupTrigger::Retry);
    let params =
        params![owner, tenant, operation, key, id, attempt, tx.now, lost, orphaned, at_once];
    tx.execute(SQL, params).map(changed)
}

pub(super) fn raise(tx: &Tx<'_>, proposal: &Proposal, fence: Fence) -> rusqlite::Result<Changed> {
    const SQL: &str = "UPDATE idempotency_records SET attempt = attempt + 1, caller = ?2,
          request_context = ?3, retention = ?10
        WHERE tenant_id = ?4 AND operation = ?5 AND key = ?6 AND id = ?7 AND attempt = ?8
          AND status = 'in_progress' AND owner = ?1
          AND EXISTS (SELECT 1 FROM oncegate_owners WHERE owner = ?1 AND lease_until > ?9)";
    if next_attempt(tx, SQL, proposal, fence)? == 1 {
        return Ok(Changed::Yes);
    }
    // After a commit in doubt it is run again; only this very owner can have raised it under its own name.
    let raised = Fence { attempt: fence.attempt.next(), ..fence };
    let own = find(tx, &proposal.scope)?.is_some_and(|Record { fence, state, .. }| {
        let held = matches!(state, State::InProgress { owner, .. } if owner == proposal.owner);
        fence == raised && held
    });
    Ok(if own { Changed::Yes } else { Changed::No })
}

/// Runs a statement that begins the attempt after this one for the proposal: `?1` to `?3` are owner, caller and context, `?4`
/// to `?8` scope, id and attempt, `?9` the time, `?10` the retention. How many rows it changed.
fn next_attempt(
    tx: &Tx<'_>,
    sql: &str,
    proposal: &Proposal,
    fence: Fence,
) -> rusqlite::Result<usize> {
    let Scope { tenant, operation, key } = &proposal.scope;
    let Fence { id, attempt } = fence;
    let (owner, caller) = (proposal.owner, &proposal.caller);
    let (context, retention) = (proposal.context.as_deref(), micros(proposal.retention));
    let params =
        params![owner, caller, context, tenant, operation, key, id, attempt, tx.now, retention];
    tx.execute(sql, params)
}
