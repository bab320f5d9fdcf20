//! What operators do by hand. Each action and its row in `audit_log` are one transaction, and nothing is done to a
//! record that a live owner works on, or to an event that is being delivered.

use std::time::SystemTime;

use async_trait::async_trait;
use tokio_postgres::Row;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::complete::{Columns, queue_messages, write_messages};
use super::door::{Connection, Door, Params, Task};
use super::rows::{self, attempt, get};
use crate::record::{Attempt, Fence, OwnerId, Status};
use crate::store::batch::RunError;
use crate::store::{Acted, Completion, Error, Objection, Operator, Redeliver};

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
    door: &Door,
    fence: Fence,
    completed: bool,
    by: &Operator,
) -> Result<Acted, Error> {
    let params: Params<'_> = &[
        (&Uuid::from(fence.id), Type::UUID),
        (&attempt(fence.attempt), Type::INT4),
        (&completed, Type::BOOL),
        (&by.who, Type::TEXT),
        (&by.why, Type::TEXT),
    ];
    acted(&door.write(RELEASE, params).await?, fence, completed)
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
    door: &Door,
    completion: &Completion,
    by: &Operator,
) -> Result<Acted, Error> {
    let mut columns = Columns::default();
    columns.add(completion);
    let mut params = columns.params();
    params.push((&by.who, Type::TEXT));
    params.push((&by.why, Type::TEXT));
    acted(&door.write(COMPLETE, &params).await?, completion.fence, false)
}

/// Why the row that was found was not acted on.
fn acted(rows: &[Row], fence: Fence, completed: bool) -> Result<Acted, Error> {
    let Some(row) = rows.first() else { return Ok(Err(Objection::NotFound)) };
    if get(row, "acted")? {
        return Ok(Ok(()));
    }
    let current: i32 = get(row, "attempt")?;
    let moved = Attempt::from_number(rows::unsigned(current)) != fence.attempt;
    Ok(Err(match rows::status(row)? {
        Status::Completed if !completed => Objection::IsCompleted,
        Status::InProgress if !moved && get(row, "owner_lives")? => Objection::Running {
            owner: OwnerId::from(get::<Uuid>(row, "owner")?),
            since: get(row, "created_at")?,
        },
        Status::InProgress | Status::Unknown | Status::Completed => Objection::Moved,
    }))
}

/// Moves done rows back into the queue: of `found(event_id, sink, new_sink, claim_no)`, whose messages are locked
/// against the sweeper first. The claim number goes on, so that no late worker's number fits again.
macro_rules! requeue {
    () => {
        ",
message AS MATERIALIZED (
    SELECT m.id, m.record_id, m.ordering_key, m.seq, m.created_at FROM outbox_messages m
    WHERE m.id IN (SELECT event_id FROM found) ORDER BY m.id FOR UPDATE),
taken AS (
    DELETE FROM outbox_done d USING found f, message m
    WHERE m.id = f.event_id AND d.event_id = f.event_id AND d.sink = f.sink
      AND d.claim_no = f.claim_no
    RETURNING d.event_id, f.new_sink AS sink, d.claim_no, d.outcome,
              m.record_id, m.ordering_key, m.seq, m.created_at),
queued AS (
    INSERT INTO outbox_queue (event_id, sink, lane, next_attempt_at, claim_no, ordering_key, seq,
                              created_at)
    SELECT event_id, sink, 1, clock_timestamp(), claim_no + 1, ordering_key, seq, created_at
    FROM taken ORDER BY event_id, sink
    ON CONFLICT DO NOTHING
    RETURNING event_id, sink),
logged AS (
    INSERT INTO audit_log (who, action, record_id, event_id, why, detail)
    SELECT $3, 'event.redeliver', t.record_id, t.event_id, $4,
           json_build_object('sink', t.sink, 'status', t.outcome)::text
    FROM taken t JOIN queued q ON q.event_id = t.event_id AND q.sink = t.sink)
SELECT count(*) AS count FROM queued"
    };
}

// An event that no sink wanted may stand under the sink ''; it can be sent to one that is named.
const REDELIVER_ONE: &str = concat!(
    "-- redeliver_one
WITH found AS MATERIALIZED (
    SELECT d.event_id, d.sink, coalesce($2, d.sink) AS new_sink, d.claim_no FROM outbox_done d
    WHERE d.event_id = $1
      AND (($2 IS NULL AND d.sink <> '') OR d.sink = $2
           OR (d.sink = '' AND NOT EXISTS (
                SELECT FROM outbox_done o WHERE o.event_id = $1 AND o.sink = $2)
               AND NOT EXISTS (
                SELECT FROM outbox_queue q WHERE q.event_id = $1 AND q.sink = $2)))
      AND coalesce($2, d.sink) <> '')",
    requeue!()
);

// The mark on the message goes: from now on rows beside it tell how it stands.
const REDELIVER_UNWANTED: &str = "-- redeliver_unwanted
WITH message AS (
    UPDATE outbox_messages m SET wanted = true
    WHERE m.id = $1 AND NOT m.wanted AND $2 <> ''
    RETURNING m.id, m.record_id, m.ordering_key, m.seq, m.created_at),
queued AS (
    INSERT INTO outbox_queue (event_id, sink, lane, next_attempt_at, claim_no, ordering_key, seq,
                              created_at)
    SELECT id, $2, 1, clock_timestamp(), 1, ordering_key, seq, created_at FROM message
    RETURNING event_id, sink),
logged AS (
    INSERT INTO audit_log (who, action, record_id, event_id, why, detail)
    SELECT $3, 'event.redeliver', m.record_id, m.id, $4,
           json_build_object('sink', $2, 'status', 'discarded')::text
    FROM message m)
SELECT count(*) AS count FROM queued";

const REDELIVER_DEAD: &str = concat!(
    "-- redeliver_dead
WITH found AS MATERIALIZED (
    SELECT d.event_id, d.sink, d.sink AS new_sink, d.claim_no FROM outbox_done d
    WHERE d.outcome = 'dead' AND d.finished_at <= $1 AND ($2 IS NULL OR d.sink = $2)
    ORDER BY d.event_id, d.sink LIMIT 1000)",
    requeue!()
);

// What is being delivered right now is left alone.
const HASTEN: &str = "-- hasten
WITH found AS MATERIALIZED (
    SELECT q.event_id, q.sink FROM outbox_queue q
    WHERE q.event_id = $1 AND ($2 IS NULL OR q.sink = $2) AND q.lease_until <= clock_timestamp()
    ORDER BY q.event_id, q.sink FOR UPDATE SKIP LOCKED),
queued AS (
    UPDATE outbox_queue q SET next_attempt_at = clock_timestamp() FROM found f
    WHERE q.event_id = f.event_id AND q.sink = f.sink AND q.lease_until <= clock_timestamp()
    RETURNING q.event_id, q.sink),
logged AS (
    INSERT INTO audit_log (who, action, record_id, event_id, why, detail)
    SELECT $3, 'event.redeliver', m.record_id, m.id, $4,
           json_build_object('sink', q.sink, 'status', 'pending')::text
    FROM queued q JOIN outbox_messages m ON m.id = q.event_id)
SELECT count(*) AS count FROM queued";

const NOW: &str = "-- now
SELECT clock_timestamp() AS now";

const BEGIN: &str = "-- begin_redeliver
BEGIN ISOLATION LEVEL READ COMMITTED";

pub(super) async fn redeliver(door: &Door, which: &Redeliver, by: &Operator) -> Result<u64, Error> {
    match which {
        Redeliver::One { id, sink } => door.run(&One { id: *id, sink: sink.as_deref(), by }).await,
        Redeliver::Dead { sink } => dead(door, sink.as_deref(), by).await,
    }
}

struct One<'a> {
    id: Uuid,
    sink: Option<&'a str>,
    by: &'a Operator,
}

#[async_trait]
impl Task for One<'_> {
    type Done = u64;

    async fn run(&self, connection: &mut Connection) -> Result<u64, RunError> {
        let params: Params<'_> = &[
            (&self.id, Type::UUID),
            (&self.sink, Type::TEXT),
            (&self.by.who, Type::TEXT),
            (&self.by.why, Type::TEXT),
        ];
        let mut transaction = connection.begin(BEGIN).await?;
        // First what is pending: what comes back from the done rows is due already.
        let hastened = rows::count(&transaction.run(HASTEN, params).await?)?;
        let requeued = rows::count(&transaction.run(REDELIVER_ONE, params).await?)?;
        let wanted = rows::count(&transaction.run(REDELIVER_UNWANTED, params).await?)?;
        transaction.commit().await?;
        Ok(hastened + requeued + wanted)
    }
}

/// In pieces, each with its audit rows: those that were dead at the beginning, so that it ends.
async fn dead(door: &Door, sink: Option<&str>, by: &Operator) -> Result<u64, Error> {
    let rows = door.read(NOW, &[]).await?;
    let now: SystemTime = match rows.first() {
        Some(row) => get(row, "now")?,
        None => return Ok(0),
    };
    let params: Params<'_> = &[
        (&now, Type::TIMESTAMPTZ),
        (&sink, Type::TEXT),
        (&by.who, Type::TEXT),
        (&by.why, Type::TEXT),
    ];
    let mut all = 0;
    loop {
        match rows::count(&door.write(REDELIVER_DEAD, params).await?)? {
            0 => return Ok(all),
            some => all += some,
        }
    }
}
