//! What a process asks in order to look after its own records, after the server has become another one, say.

use std::time::SystemTime;

use async_trait::async_trait;
use uuid::Uuid;

use super::connection::{Connection, Effect};
use super::param::{Param, Params, fenced};
use super::pool::{Pool, Retryable};
use super::rows::{self, get, seconds};
use crate::record::{Attempt, Fence, Fingerprint, OwnerId, RecordId, Status};
use crate::store::batch::RunError;
use crate::store::read;
use crate::store::{Error, Incarnation, OpenPiece, Proposal, Reinstated, ScanFrom};

// A crash, a restart, a restored backup and a standby that was promoted all have a postmaster of another start. Everybody
// may ask, and a pooler answers with its server's.
const INCARNATION: &str = "-- incarnation
SELECT (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint AS incarnation,
       current_setting('transaction_read_only') = 'on' AS read_only";

struct ReadIncarnation;

#[async_trait]
impl Retryable for ReadIncarnation {
    type Done = Incarnation;

    async fn run(&self, connection: &mut Connection) -> Result<Incarnation, RunError> {
        let rows = connection.run(Effect::Read, INCARNATION, &[]).await?;
        let row = rows::only(&rows)?;
        if get(row, "read_only")? {
            connection.is_read_only();
            return Err(Error::Unavailable("the database is read-only".into()).into());
        }
        Ok(Incarnation(get(row, "incarnation")?))
    }
}

pub(super) async fn incarnation(pool: &Pool) -> Result<Incarnation, Error> {
    pool.run(&ReadIncarnation).await
}

const STATUSES: &str = "-- statuses
SELECT r.id, r.attempt, r.status
FROM unnest($1::uuid[]) AS asked(id)
CROSS JOIN LATERAL (SELECT * FROM idempotency_records r WHERE r.id = asked.id OFFSET 0) r";

pub(super) async fn statuses(pool: &Pool, ids: &[RecordId]) -> Result<Vec<(Fence, Status)>, Error> {
    let rows = pool.read(STATUSES, &[&ids]).await?;
    rows.iter().map(|row| Ok((read::fence(row)?, read::status(row)?))).collect()
}

// What an operator did to the record is known by the audit table, which outlives the row.
const REINSTATE: &str = "-- reinstate
WITH live AS MATERIALIZED (
    SELECT owner FROM oncegate_owners WHERE owner = $9 AND lease_until > clock_timestamp()),
acted AS MATERIALIZED (
    SELECT record_id FROM audit_log
    WHERE record_id = $4 AND action IN ('record.release', 'record.complete') LIMIT 1),
back AS (
    INSERT INTO idempotency_records AS r (id, tenant_id, operation, key, request_hash, raw_hash,
                                          recipe, status, attempt, owner, caller, request_context,
                                          created_at, retention)
    SELECT $4, $1, $2, $3, $6, $7, $8, 'in_progress', $5, live.owner, $10, $11, clock_timestamp(),
           make_interval(secs => $12)
    FROM live WHERE NOT EXISTS (SELECT FROM acted)
    ON CONFLICT (tenant_id, operation, key) DO UPDATE
    SET status = 'in_progress', attempt = excluded.attempt, owner = excluded.owner,
        caller = excluded.caller, request_context = excluded.request_context,
        retention = excluded.retention
    WHERE r.id = excluded.id AND r.attempt < excluded.attempt AND r.status <> 'completed'
    RETURNING r.id)
SELECT EXISTS (SELECT FROM back) AS back, EXISTS (SELECT FROM live) AS live,
       EXISTS (SELECT FROM acted) AS acted, EXISTS (
           SELECT FROM idempotency_records r
           WHERE r.tenant_id = $1 AND r.operation = $2 AND r.key = $3 OFFSET 0) AS present";

pub(super) async fn reinstate(
    pool: &Pool,
    proposal: &Proposal,
    at: Attempt,
) -> Result<Reinstated, Error> {
    let Proposal { scope, id, owner, caller, fingerprint, .. } = proposal;
    let (context, retention) = (proposal.context.as_deref(), seconds(proposal.retention));
    let Fingerprint { canonical, raw, recipe } = fingerprint;
    let (canonical, raw, recipe) = (canonical.as_slice(), raw.as_slice(), recipe.as_slice());
    let fence = Fence { id: *id, attempt: at };
    let mut params = fenced(scope, &fence);
    params.extend([&canonical as Param<'_>, &raw, &recipe, owner, caller, &context, &retention]);
    let Some(rows) = pool.change(REINSTATE, &params).await? else {
        return Err(Error::Unavailable("another transaction holds the record".into()));
    };
    let row = rows::only(&rows)?;
    if get(row, "acted")? {
        return Ok(Reinstated::ActedOn);
    }
    Ok(match (get(row, "back")?, get(row, "present")?, get(row, "live")?) {
        (true, _, _) => Reinstated::Yes,
        (false, false, false) => Reinstated::LeaseEnded,
        (false, true, _) | (false, false, true) => Reinstated::No,
    })
}

// By the index of creation, a bounded piece at a time: an index that knew what is in progress would make each completion
// dearer. The time of the beginning is a value of its own, since the index takes no function that may change.
const OPEN_OF: &str = "-- open_of
WITH piece AS MATERIALIZED (
    SELECT tenant_id, operation, key, id, attempt, status, owner, created_at
    FROM idempotency_records
    WHERE (created_at, id) > (coalesce($3, (SELECT clock_timestamp() - make_interval(secs => $5)),
                                       '-infinity'::timestamptz),
                              coalesce($4, '00000000-0000-0000-0000-000000000000'::uuid))
    ORDER BY created_at, id LIMIT $2),
last AS (SELECT created_at, id FROM piece ORDER BY created_at DESC, id DESC LIMIT 1)
SELECT p.tenant_id, p.operation, p.key, p.id, p.attempt, NULL::timestamptz AS created_at
FROM piece p WHERE p.status = 'in_progress' AND p.owner = $1
UNION ALL
SELECT NULL, NULL, NULL, last.id, NULL, last.created_at FROM last
WHERE (SELECT count(*) FROM piece) = $2";

pub(super) async fn open_of(
    pool: &Pool,
    owner: OwnerId,
    from: ScanFrom,
    limit: u32,
) -> Result<OpenPiece, Error> {
    let (after, ago): (Option<(SystemTime, Uuid)>, Option<f64>) = match from {
        ScanFrom::Oldest => (None, None),
        ScanFrom::Ago(ago) => (None, Some(seconds(ago))),
        ScanFrom::After(at, id) => (Some((at, id)), None),
    };
    let (at, id) = after.unzip();
    let params: Params<'_> = &[&owner, &i64::from(limit), &at, &id, &ago];
    let mut piece = OpenPiece::default();
    for row in &pool.read(OPEN_OF, params).await? {
        match get::<Option<SystemTime>>(row, "created_at")? {
            Some(at) => piece.last = Some((at, get(row, "id")?)),
            None => piece.open.push((read::scope(row, "key")?, read::fence(row)?)),
        }
    }
    Ok(piece)
}
