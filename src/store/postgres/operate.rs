//! What operators do to records by hand. Each action and its row in `audit_log` are one transaction, and nothing is done to a
//! record that a live owner works on.

use tokio_postgres::Row;
use uuid::Uuid;

use super::complete::{Columns, queue_messages, write_messages};
use super::param::{Param, Params};
use super::pool::Pool;
use super::rows::get;
use crate::record::{Attempt, Fence, OwnerId, Status};
use crate::store::read::{self, Columns as _};
use crate::store::{Acted, Completion, Error, Objection, Operator};

const RELEASE: &str = "-- operator_release
WITH r AS MATERIALIZED (
    SELECT r.tenant_id, r.operation, r.key, r.id, r.status, r.attempt, r.owner, r.created_at,
           EXISTS (SELECT FROM oncegate_owners o
                   WHERE o.owner = r.owner AND o.lease_until > clock_timestamp()) AS owner_lives
    FROM idempotency_records r WHERE r.id = $1 FOR UPDATE),
done AS (
    DELETE FROM idempotency_records d USING r
    WHERE d.id = $1 AND d.attempt = $2 AND d.attempt = r.attempt AND d.status = r.status
      AND (d.status = 'unknown' OR (d.status = 'in_progress' AND NOT r.owner_lives)
           OR (d.status = 'completed' AND $3))
    RETURNING d.id, d.tenant_id, d.operation, d.key, d.status, d.attempt),
logged AS (
    INSERT INTO audit_log (who, action, record_id, why, detail)
    SELECT $4, 'record.release', id, $5,
           json_build_object('tenant', tenant_id, 'operation', operation, 'key', key,
                             'status', status, 'attempt', attempt)::text
    FROM done)
SELECT r.*, EXISTS (SELECT FROM done) AS acted FROM r";

pub(super) async fn release(
    pool: &Pool,
    fence: Fence,
    completed: bool,
    by: &Operator,
) -> Result<Acted, Error> {
    let params: Params<'_> = &[&fence.id, &fence.attempt, &completed, &by.who, &by.why];
    acted(&pool.write(RELEASE, params).await?, fence, completed)
}

const COMPLETE: &str = concat!(
    "-- operator_complete
WITH r AS MATERIALIZED (
    SELECT r.id, r.status, r.attempt, r.owner, r.created_at,
           EXISTS (SELECT FROM oncegate_owners o
                   WHERE o.owner = r.owner AND o.lease_until > clock_timestamp()) AS owner_lives
    FROM idempotency_records r WHERE r.id = ANY ($1::uuid[]) FOR UPDATE),
c AS MATERIALIZED (
    SELECT x.*, r.status AS was, r.owner_lives, clock_timestamp() AS at
    FROM unnest($1::uuid[], $2::int[], $3::text[], $4::text[], $5::text[],
                $6::int[], $7::bytea[], $8::bytea[], $9::float8[])
      AS x(id, attempt, tenant_id, operation, key, response_status, headers, body, retention)
    JOIN r ON r.id = x.id AND r.attempt = x.attempt),
done AS (
    UPDATE idempotency_records d
    SET status = 'completed', attempt = d.attempt + 1, completed_at = c.at,
        expires_at = c.at + make_interval(secs => c.retention),
        response_status = c.response_status, response_headers = c.headers,
        response_body = c.body, request_context = NULL
    FROM c
    WHERE d.tenant_id = c.tenant_id AND d.operation = c.operation AND d.key = c.key
      AND d.id = c.id AND d.attempt = c.attempt AND d.status = c.was
      AND (c.was = 'unknown' OR (c.was = 'in_progress' AND NOT c.owner_lives))
    RETURNING d.id, d.tenant_id, d.operation, d.key, d.attempt, c.at, c.was)",
    write_messages!(),
    queue_messages!(),
    ",
logged AS (
    INSERT INTO audit_log (who, action, record_id, why, detail)
    SELECT $20, 'record.complete', id, $21,
           json_build_object('tenant', tenant_id, 'operation', operation, 'key', key,
                             'status', was, 'attempt', attempt - 1)::text
    FROM done)
SELECT r.*, EXISTS (SELECT FROM done) AS acted FROM r"
);

pub(super) async fn complete(
    pool: &Pool,
    completion: &Completion,
    by: &Operator,
) -> Result<Acted, Error> {
    let mut columns = Columns::default();
    columns.add(completion);
    let mut params = columns.params();
    params.extend([&by.who as Param<'_>, &by.why]);
    acted(&pool.write(COMPLETE, &params).await?, completion.fence, false)
}

/// Why the row that was found was not acted on.
fn acted(rows: &[Row], fence: Fence, completed: bool) -> Result<Acted, Error> {
    let Some(row) = rows.first() else { return Ok(Err(Objection::NotFound)) };
    if get(row, "acted")? {
        return Ok(Ok(()));
    }
    let moved = Attempt::from_number(row.count("attempt")?) != fence.attempt;
    Ok(Err(match read::status(row)? {
        Status::Completed if !completed => Objection::IsCompleted,
        Status::InProgress if !moved && get(row, "owner_lives")? => Objection::Running {
            owner: OwnerId::from(get::<Uuid>(row, "owner")?),
            since: get(row, "created_at")?,
        },
        Status::InProgress | Status::Unknown | Status::Completed => Objection::Moved,
    }))
}
