//! The statements that make, change and delete records, but for their completion and what takes them over.
//!
//! Reservations are batches (see `batch`): parallel arrays, one statement, one commit. All other changes are single fenced
//! statements that say how many rows they changed, and that wait for nobody's open transaction. A record that becomes
//! `unknown` is noted in `oncegate_unknown` by the same statement.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::SystemTime;

use async_trait::async_trait;
use tokio_postgres::Row;
use uuid::Uuid;

use super::connection::Effect;
use super::param::{Params, fenced};
use super::pool::{Dedicated, LockForms, Pool};
use super::rows::{self, get, record_columns, seconds, unreadable};
use crate::record::{Attempt, Fence, Record, RecordId, Scope};
use crate::store::batch::{RunError, Work};
use crate::store::read;
use crate::store::{Changed, Error, Proposal, Reserved};

/// The form that waits is a function of the schema, which says why. ON CONFLICT waits for a transaction that changes the row in
/// the way, and an application's may last: where one does, a scope that has a record already is not even tried.
const RESERVE: LockForms = LockForms {
    waiting: "-- reserve
SELECT id, held, live
FROM oncegate_reserve_batch($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
    skipping: "-- reserve_passing
WITH p AS MATERIALIZED (
    SELECT * FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::bytea[], $6::bytea[],
                         $7::bytea[], $8::uuid[], $9::text[], $10::bytea[], $11::float8[])
      AS p(id, tenant_id, operation, key, request_hash, raw_hash, recipe, owner, caller, context,
           retention)),
live AS MATERIALIZED (
    SELECT owner FROM oncegate_owners
    WHERE owner = ANY ($8::uuid[]) AND lease_until > clock_timestamp()),
made AS (
    INSERT INTO idempotency_records (id, tenant_id, operation, key, request_hash, raw_hash, recipe,
                                     status, attempt, owner, caller, request_context, created_at,
                                     retention)
    SELECT id, tenant_id, operation, key, request_hash, raw_hash, recipe,
           'in_progress', 1, owner, caller, context, clock_timestamp(),
           make_interval(secs => retention)
    FROM p WHERE owner IN (SELECT owner FROM live) AND NOT EXISTS (
        SELECT FROM idempotency_records r
        WHERE r.tenant_id = p.tenant_id AND r.operation = p.operation AND r.key = p.key OFFSET 0)
    ORDER BY tenant_id, operation, key
    ON CONFLICT (tenant_id, operation, key) DO NOTHING
    RETURNING id)
SELECT p.id, p.id IN (SELECT id FROM made) AS held, p.owner IN (SELECT owner FROM live) AS live
FROM p",
};

// A second statement has a new snapshot, and so sees what the insert met. LATERAL with OFFSET keeps the planner to
// one look-up by primary key for each row, whatever it believes of the table's size.
const READ_LOSERS: &str = concat!(
    "-- read_losers
SELECT p.id AS proposal, ",
    record_columns!(),
    "
FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[]) AS p(id, tenant_id, operation, key)
CROSS JOIN LATERAL (
    SELECT * FROM idempotency_records r
    WHERE r.tenant_id = p.tenant_id AND r.operation = p.operation AND r.key = p.key OFFSET 0) r
LEFT JOIN LATERAL (
    SELECT lease_until FROM oncegate_owners o WHERE o.owner = r.owner OFFSET 0) o ON true"
);

// A commit that was waiting for a standby when its statement was cancelled is seen here at once, and may still be lost
// with this server. A change to the same row that commits has waited for the standby, and so for the first one too.
const CONFIRM_RESERVED: &str = "-- confirm_reserved
UPDATE idempotency_records r SET owner = r.owner
WHERE r.id = ANY ($1::uuid[]) AND r.attempt = 1 AND r.status = 'in_progress'
RETURNING r.id";

/// How reservations are run.
pub(super) struct Reservations(pub(super) Dedicated);

#[async_trait]
impl Work for Reservations {
    type Item = Proposal;
    /// A row in the way that cannot be read fails its own proposal only: the batch has committed by then.
    type Reply = Result<Reserved, Error>;

    fn scope(item: &Proposal) -> &Scope {
        &item.scope
    }

    async fn run(&self, items: &[Arc<Proposal>]) -> Result<Vec<Self::Reply>, RunError> {
        let mut outcomes = self.insert(items).await?;
        let losers: Vec<_> = items
            .iter()
            .filter(|item| !matches!(outcomes.get(&item.id), Some(Ok(Reserved::Held))))
            .collect();
        if !losers.is_empty() {
            let mut met = self.read(&losers).await?;
            self.confirm(&mut met).await?;
            outcomes.extend(met);
        }
        items
            .iter()
            .map(|item| {
                outcomes
                    .remove(&item.id)
                    .ok_or_else(|| unreadable("a proposal got no answer").into())
            })
            .collect()
    }
}

impl Reservations {
    /// Inserts; what was not inserted is `Vanished` or `LeaseEnded` until it is read.
    async fn insert(
        &self,
        items: &[Arc<Proposal>],
    ) -> Result<HashMap<RecordId, Result<Reserved, Error>>, RunError> {
        let (ids, owners) = (column(items, |p| p.id), column(items, |p| p.owner));
        let tenants = column(items, |p| &p.scope.tenant);
        let operations = column(items, |p| &p.scope.operation);
        let keys = column(items, |p| &p.scope.key);
        let hashes = column(items, |p| p.fingerprint.canonical.as_slice());
        let raws = column(items, |p| p.fingerprint.raw.as_slice());
        let recipes = column(items, |p| p.fingerprint.recipe.as_slice());
        let (callers, contexts) =
            (column(items, |p| &p.caller), column(items, |p| p.context.as_deref()));
        let retentions = column(items, |p| seconds(p.retention));
        let params: Params<'_> = &[
            &ids,
            &tenants,
            &operations,
            &keys,
            &hashes,
            &raws,
            &recipes,
            &owners,
            &callers,
            &contexts,
            &retentions,
        ];
        let rows = self.0.write(RESERVE, params).await?;
        let outcome = |row: &Row| {
            let outcome = match (get(row, "held")?, get(row, "live")?) {
                (true, _) => Reserved::Held,
                (false, true) => Reserved::Vanished,
                (false, false) => Reserved::LeaseEnded,
            };
            Ok((get::<Uuid>(row, "id")?.into(), Ok(outcome)))
        };
        rows.iter().map(outcome).collect::<Result<_, Error>>().map_err(RunError::from)
    }

    /// The records under the scopes of those that were not inserted.
    async fn read(
        &self,
        losers: &[&Arc<Proposal>],
    ) -> Result<HashMap<RecordId, Result<Reserved, Error>>, RunError> {
        let of = || losers.iter().copied();
        let (ids, tenants) = (column(of(), |p| p.id), column(of(), |p| &p.scope.tenant));
        let operations = column(of(), |p| &p.scope.operation);
        let keys = column(of(), |p| &p.scope.key);
        let params: Params<'_> = &[&ids, &tenants, &operations, &keys];
        let rows = self.0.run(Effect::Read, READ_LOSERS, params).await.map_err(committed)?;
        let outcome = |row: &Row| {
            let proposal = RecordId::from(get::<Uuid>(row, "proposal")?);
            Ok((proposal, read::record(row).map(|record| met(proposal, record))))
        };
        rows.iter().map(outcome).collect::<Result<_, Error>>().map_err(RunError::from)
    }

    /// Makes sure of own rows that were met again: what is `Held` is as durable as a commit that was answered.
    async fn confirm(
        &self,
        met: &mut HashMap<RecordId, Result<Reserved, Error>>,
    ) -> Result<(), RunError> {
        let own = |(id, met): (&RecordId, &Result<Reserved, Error>)| {
            matches!(met, Ok(Reserved::Held)).then_some(Uuid::from(*id))
        };
        let own: Vec<Uuid> = met.iter().filter_map(own).collect();
        if own.is_empty() {
            return Ok(());
        }
        let params: Params<'_> = &[&own];
        let rows = self.0.run(Effect::Write, CONFIRM_RESERVED, params).await.map_err(committed)?;
        let sure: Vec<Uuid> = rows.iter().map(|row| get(row, "id")).collect::<Result<_, _>>()?;
        for id in own.into_iter().filter(|id| !sure.contains(id)) {
            met.insert(id.into(), Ok(Reserved::Vanished));
        }
        Ok(())
    }
}

/// What a proposal met. Its own row: the insert that made it was run before, and its answer was lost.
fn met(proposal: RecordId, record: Record) -> Reserved {
    let own = Fence { id: proposal, attempt: Attempt::FIRST };
    if record.fence == own { Reserved::Held } else { Reserved::Exists(Box::new(record)) }
}

/// The batch's insert has committed by now: until the losers are read, its end is not known to the callers.
pub(super) fn committed(error: RunError) -> RunError {
    match error {
        RunError::Again(error) | RunError::Failed(error) | RunError::Committed(error) => {
            RunError::Committed(error)
        }
    }
}

/// One value of each proposal.
fn column<'a, T>(
    items: impl IntoIterator<Item = &'a Arc<Proposal>>,
    value: impl Fn(&'a Proposal) -> T,
) -> Vec<T> {
    items.into_iter().map(|item| value(item)).collect()
}

// Found as this proposal's own already, after an answer that was lost: changed once more, so that it is durable.
const FIND: &str = concat!(
    "-- find
SELECT ",
    record_columns!(),
    "
FROM idempotency_records r LEFT JOIN oncegate_owners o ON o.owner = r.owner
WHERE r.tenant_id = $1 AND r.operation = $2 AND r.key = $3"
);

pub(super) async fn find(pool: &Pool, scope: &Scope) -> Result<Option<Record>, Error> {
    let params: Params<'_> = &[&scope.tenant, &scope.operation, &scope.key];
    pool.read(FIND, params).await?.first().map(read::record).transpose()
}

/// What a change of one record found; `None`: somebody else's transaction held the row.
pub(super) fn changed(rows: Option<Vec<Row>>) -> Result<Changed, Error> {
    let Some(rows) = rows else { return Ok(Changed::Locked) };
    Ok(if rows::count(&rows)? == 0 { Changed::No } else { Changed::Yes })
}

const RELEASE_FIRST: &str = "-- release_first
WITH gone AS (
    DELETE FROM idempotency_records r
    WHERE r.tenant_id = $1 AND r.operation = $2 AND r.key = $3 AND r.id = $4 AND r.attempt = $5
      AND r.attempt = 1 AND r.status IN ('in_progress', 'unknown')
    RETURNING r.id)
SELECT count(*) AS count FROM gone";

/// Ends a statement whose `lost(id, attempt, since, orphaned)` became unknown: notes them, and counts them.
///
/// Where `$goes_on` holds, the doubt that was noted before goes on: this was a look-up that brought no result. Its beginning
/// stays, and the next look-up waits, from 1 s doubling to 5 min.
macro_rules! note_unknown {
    ($goes_on:literal) => {
        concat!(
            ",
noted AS (
    INSERT INTO oncegate_unknown AS u (id, noted_at, attempt, since, orphaned, next_ask_at)
    SELECT id, clock_timestamp(), attempt, since, orphaned, since FROM lost
    ON CONFLICT (id) DO UPDATE
    SET noted_at = excluded.noted_at, attempt = excluded.attempt,
        since = CASE WHEN ",
            $goes_on,
            " THEN u.since ELSE excluded.since END,
        orphaned = CASE WHEN ",
            $goes_on,
            " THEN u.orphaned ELSE excluded.orphaned END,
        asked = CASE WHEN ",
            $goes_on,
            " THEN u.asked + 1 ELSE 0 END,
        next_ask_at = CASE WHEN ",
            $goes_on,
            " THEN clock_timestamp() + make_interval(
                secs => least(300, power(2, least(u.asked, 9))) * (0.5 + random() / 2))
            ELSE excluded.next_ask_at END)
SELECT count(*) AS count FROM lost"
        )
    };
}

const RELEASE_LATER: &str = concat!(
    "-- release_later
WITH lost AS (
    UPDATE idempotency_records r SET status = 'unknown'
    WHERE r.tenant_id = $1 AND r.operation = $2 AND r.key = $3 AND r.id = $4 AND r.attempt = $5
      AND r.attempt > 1 AND r.status IN ('in_progress', 'unknown')
    RETURNING r.id, r.attempt, clock_timestamp() AS since, false AS orphaned)",
    // This attempt did not execute: the doubt about those before it goes on.
    note_unknown!("true")
);

pub(super) async fn release(pool: &Pool, scope: &Scope, fence: Fence) -> Result<Changed, Error> {
    let sql = if fence.attempt == Attempt::FIRST { RELEASE_FIRST } else { RELEASE_LATER };
    changed(pool.change(sql, &fenced(scope, &fence)).await?)
}

const MARK_UNKNOWN: &str = concat!(
    "-- mark_unknown
WITH lost AS (
    UPDATE idempotency_records r SET status = 'unknown'
    WHERE r.tenant_id = $1 AND r.operation = $2 AND r.key = $3 AND r.id = $4 AND r.attempt = $5
      AND r.status = 'in_progress'
    RETURNING r.id, r.attempt, clock_timestamp() AS since, false AS orphaned)",
    note_unknown!("u.attempt = excluded.attempt")
);

pub(super) async fn mark_unknown(
    pool: &Pool,
    scope: &Scope,
    fence: Fence,
) -> Result<Changed, Error> {
    changed(pool.change(MARK_UNKNOWN, &fenced(scope, &fence)).await?)
}

const MARK_ONE_DEAD: &str = concat!(
    "-- mark_one_dead
WITH lost AS (
    UPDATE idempotency_records r SET status = 'unknown'
    WHERE r.tenant_id = $1 AND r.operation = $2 AND r.key = $3 AND r.id = $4 AND r.attempt = $5
      AND r.status = 'in_progress'
      AND NOT EXISTS (SELECT FROM oncegate_owners o
                      WHERE o.owner = r.owner AND o.lease_until > clock_timestamp())
    RETURNING r.id, r.attempt, true AS orphaned,
              coalesce((SELECT lease_until FROM oncegate_owners o WHERE o.owner = r.owner),
                       clock_timestamp()) AS since)",
    note_unknown!("u.attempt = excluded.attempt")
);

pub(super) async fn mark_one_dead(pool: &Pool, scope: &Scope, fence: Fence) -> Result<u64, Error> {
    match pool.change(MARK_ONE_DEAD, &fenced(scope, &fence)).await? {
        Some(rows) => rows::count(&rows),
        None => Ok(0),
    }
}

const MARK_DEAD: &str = concat!(
    "-- mark_dead
WITH dead AS MATERIALIZED (
    SELECT owner, lease_until FROM oncegate_owners
    WHERE lease_until <= clock_timestamp() AND NOT cleared),
found AS MATERIALIZED (
    SELECT r.tenant_id, r.operation, r.key, r.id, r.attempt, dead.lease_until
    FROM dead JOIN idempotency_records r ON r.owner = dead.owner
    WHERE r.status = 'in_progress'
    LIMIT $1 FOR UPDATE OF r SKIP LOCKED),
lost AS (
    UPDATE idempotency_records r SET status = 'unknown' FROM found f
    WHERE r.tenant_id = f.tenant_id AND r.operation = f.operation AND r.key = f.key
      AND r.id = f.id AND r.attempt = f.attempt AND r.status = 'in_progress'
    RETURNING r.id, r.attempt, f.lease_until AS since, true AS orphaned)",
    note_unknown!("u.attempt = excluded.attempt")
);

// Once nothing is left of an owner that has been dead for longer than any statement of its may last, its records,
// which may be many and are all completed, are not looked through again.
const CLEAR_DEAD: &str = "-- clear_dead
UPDATE oncegate_owners o SET cleared = true
WHERE o.lease_until <= clock_timestamp() - interval '1 minute' AND NOT o.cleared
  AND NOT EXISTS (SELECT FROM idempotency_records r
                  WHERE r.owner = o.owner AND r.status = 'in_progress')";

pub(super) async fn mark_dead(pool: &Pool, limit: u32) -> Result<u64, Error> {
    let lost = rows::count(&pool.write(MARK_DEAD, &[&i64::from(limit)]).await?)?;
    if lost == 0 {
        pool.write(CLEAR_DEAD, &[]).await?;
    }
    Ok(lost)
}

// No index knows what has expired, since none may change at a completion. So each sweep looks at a bounded number
// of the oldest records, where expired records usually are, and at as many after the place where the last one
// ended: records of a short retention among many of a long one are found in time, and no sweep reads everything.
const SWEEP_RECORDS: &str = "-- sweep_records
WITH oldest AS MATERIALIZED (
    SELECT tenant_id, operation, key, id, status, expires_at FROM idempotency_records
    ORDER BY created_at, id LIMIT $2),
onward AS MATERIALIZED (
    SELECT tenant_id, operation, key, id, status, expires_at, created_at FROM idempotency_records
    WHERE (created_at, id) > (coalesce($3, '-infinity'::timestamptz),
                              coalesce($4, '00000000-0000-0000-0000-000000000000'::uuid))
    ORDER BY created_at, id LIMIT $2),
found AS MATERIALIZED (
    SELECT tenant_id, operation, key, id FROM oldest
    WHERE status = 'completed' AND expires_at <= clock_timestamp()
    UNION
    SELECT tenant_id, operation, key, id FROM onward
    WHERE status = 'completed' AND expires_at <= clock_timestamp()
    LIMIT $1),
locked AS MATERIALIZED (
    SELECT r.tenant_id, r.operation, r.key, r.id
    FROM found f JOIN idempotency_records r
      ON r.tenant_id = f.tenant_id AND r.operation = f.operation AND r.key = f.key
    FOR UPDATE OF r SKIP LOCKED),
gone AS (
    DELETE FROM idempotency_records r USING locked f
    WHERE r.tenant_id = f.tenant_id AND r.operation = f.operation AND r.key = f.key
      AND r.id = f.id AND r.status = 'completed' AND r.expires_at <= clock_timestamp()
    RETURNING r.id)
SELECT (SELECT count(*) FROM gone) AS count, last.created_at, last.id
FROM (SELECT count(*) AS seen FROM onward) AS all_seen
LEFT JOIN (SELECT created_at, id FROM onward ORDER BY created_at DESC, id DESC LIMIT 1) AS last
  ON all_seen.seen = $2";

/// Where a sweep ended among the records, which are in the order of their creation. `None`: at their end.
pub(super) type Cursor = Option<(SystemTime, Uuid)>;

// A note is younger than this as long as the record may be on its way back to unknown. One that was announced goes
// when its end is announced.
const SWEEP_NOTES: &str = "-- sweep_notes
DELETE FROM oncegate_unknown u
WHERE u.noted_at < clock_timestamp() - interval '10 minutes'
  AND u.announced IS NULL
  AND NOT EXISTS (SELECT FROM idempotency_records r WHERE r.id = u.id AND r.status = 'unknown')";

pub(super) async fn sweep(pool: &Pool, limit: u32, from: Cursor) -> Result<(u64, Cursor), Error> {
    let limit = i64::from(limit);
    let look = limit.saturating_mul(10).clamp(1000, 20_000);
    let (at, id) = from.unzip();
    let params: Params<'_> = &[&limit, &look, &at, &id];
    let rows = pool.write(SWEEP_RECORDS, params).await?;
    let cursor: Cursor = match rows.first() {
        Some(row) => get::<Option<_>>(row, "created_at")?.zip(get::<Option<_>>(row, "id")?),
        None => None,
    };
    pool.write(SWEEP_NOTES, &[]).await?;
    let gone = rows::count(&rows)?;
    // A full sweep may have left some of what it looked at.
    let full = i64::try_from(gone).is_ok_and(|gone| gone >= limit);
    Ok((gone, if full { from } else { cursor }))
}
