//! Records that go over to another owner, or on to their next attempt.

use super::param::{Param, fenced};
use super::pool::Pool;
use super::records::changed;
use super::rows::seconds;
use crate::record::{Fence, Fingerprint, LookupDelay};
use crate::store::{Changed, Error, LookupTrigger, Proposal, Takeover};

const TAKE_OVER_EXPIRED: &str = "-- take_over_expired
WITH taken AS (
    UPDATE idempotency_records r
    SET id = $6, attempt = 1, status = 'in_progress', request_hash = $7, raw_hash = $8, recipe = $9,
        owner = $10, caller = $11, request_context = $12,
        retention = make_interval(secs => $13), created_at = clock_timestamp(), completed_at = NULL,
        expires_at = NULL, response_status = NULL, response_headers = NULL, response_body = NULL
    WHERE r.tenant_id = $1 AND r.operation = $2 AND r.key = $3 AND r.id = $4 AND r.attempt = $5
      AND r.status = 'completed' AND r.expires_at <= clock_timestamp()
      AND EXISTS (SELECT FROM oncegate_owners o
                  WHERE o.owner = $10 AND o.lease_until > clock_timestamp())
    RETURNING r.id),
again AS (
    UPDATE idempotency_records r SET owner = r.owner
    WHERE r.tenant_id = $1 AND r.operation = $2 AND r.key = $3
      AND r.id = $6 AND r.attempt = 1 AND r.status = 'in_progress' AND r.owner = $10
    RETURNING r.id)
SELECT (SELECT count(*) FROM taken) + (SELECT count(*) FROM again) AS count";

const TAKE_OVER_UNKNOWN: &str = "-- take_over_unknown
WITH taken AS (
    UPDATE idempotency_records r
    SET attempt = r.attempt + 1, status = 'in_progress', owner = $6, caller = $7,
        request_context = $8, retention = make_interval(secs => $9)
    WHERE r.tenant_id = $1 AND r.operation = $2 AND r.key = $3 AND r.id = $4 AND r.attempt = $5
      AND r.status = 'unknown'
      AND EXISTS (SELECT FROM oncegate_owners o
                  WHERE o.owner = $6 AND o.lease_until > clock_timestamp())
    RETURNING r.id)
SELECT count(*) AS count FROM taken";

// Whoever looks it up holds the record as whoever executes it does, so that one at a time does.
const TAKE_OVER_LOOKUP: &str = "-- take_over_lookup
WITH taken AS (
    UPDATE idempotency_records r SET status = 'in_progress', owner = $6
    FROM oncegate_unknown u
    WHERE r.tenant_id = $1 AND r.operation = $2 AND r.key = $3 AND r.id = $4 AND r.attempt = $5
      AND r.status = 'unknown' AND u.id = r.id AND ($9 OR u.next_ask_at <= clock_timestamp())
      AND u.since + make_interval(secs => CASE WHEN u.orphaned THEN $8 ELSE $7 END)
          <= clock_timestamp()
      AND EXISTS (SELECT FROM oncegate_owners o
                  WHERE o.owner = $6 AND o.lease_until > clock_timestamp())
    RETURNING r.id)
SELECT count(*) AS count FROM taken";

pub(super) async fn take_over(
    pool: &Pool,
    proposal: &Proposal,
    from: Takeover,
) -> Result<Changed, Error> {
    let (sql, fence) = match from {
        Takeover::Expired(fence) => (TAKE_OVER_EXPIRED, fence),
        Takeover::Unknown(fence) => (TAKE_OVER_UNKNOWN, fence),
        Takeover::Lookup(fence, delay, by) => {
            return take_over_lookup(pool, proposal, fence, delay, by).await;
        }
    };
    let Fingerprint { canonical, raw, recipe } = &proposal.fingerprint;
    let (context, retention) = (proposal.context.as_deref(), seconds(proposal.retention));
    let (canonical, raw, recipe) = (canonical.as_slice(), raw.as_slice(), recipe.as_slice());
    let mut params = fenced(&proposal.scope, &fence);
    if matches!(from, Takeover::Expired(_)) {
        params.extend([&proposal.id as Param<'_>, &canonical, &raw, &recipe]);
    }
    params.extend([&proposal.owner as Param<'_>, &proposal.caller, &context, &retention]);
    let taken = changed(pool.change(sql, &params).await?)?;
    if taken == Changed::No && matches!(from, Takeover::Expired(_)) {
        // It may have waited for its own first run, whose end only a new snapshot shows.
        return changed(pool.change(sql, &params).await?);
    }
    Ok(taken)
}

async fn take_over_lookup(
    pool: &Pool,
    proposal: &Proposal,
    fence: Fence,
    delay: LookupDelay,
    by: LookupTrigger,
) -> Result<Changed, Error> {
    let (lost, orphaned) = (seconds(delay.after_loss), seconds(delay.after_lease));
    let at_once = by == LookupTrigger::Retry;
    let mut params = fenced(&proposal.scope, &fence);
    params.extend([&proposal.owner as Param<'_>, &lost, &orphaned, &at_once]);
    changed(pool.change(TAKE_OVER_LOOKUP, &params).await?)
}

// Found raised by this very owner already, after an answer that was lost: changed once more, so that it is durable.
const RAISE: &str = "-- raise
WITH raised AS (
    UPDATE idempotency_records r
    SET attempt = r.attempt + 1, caller = $7, request_context = $8,
        retention = make_interval(secs => $9)
    WHERE r.tenant_id = $1 AND r.operation = $2 AND r.key = $3 AND r.id = $4 AND r.attempt = $5
      AND r.status = 'in_progress' AND r.owner = $6
      AND EXISTS (SELECT FROM oncegate_owners o
                  WHERE o.owner = $6 AND o.lease_until > clock_timestamp())
    RETURNING r.id),
again AS (
    UPDATE idempotency_records r SET owner = r.owner
    WHERE r.tenant_id = $1 AND r.operation = $2 AND r.key = $3
      AND r.id = $4 AND r.attempt = $5 + 1 AND r.status = 'in_progress' AND r.owner = $6
    RETURNING r.id)
SELECT (SELECT count(*) FROM raised) + (SELECT count(*) FROM again) AS count";

pub(super) async fn raise(
    pool: &Pool,
    proposal: &Proposal,
    fence: Fence,
) -> Result<Changed, Error> {
    let (context, retention) = (proposal.context.as_deref(), seconds(proposal.retention));
    let mut params = fenced(&proposal.scope, &fence);
    params.extend([&proposal.owner as Param<'_>, &proposal.caller, &context, &retention]);
    match changed(pool.change(RAISE, &params).await?)? {
        // It may have waited for its own first run, whose end only a new snapshot shows.
        Changed::No => changed(pool.change(RAISE, &params).await?),
        raised @ (Changed::Yes | Changed::Locked) => Ok(raised),
    }
}
