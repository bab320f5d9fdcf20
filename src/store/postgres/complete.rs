//! Completions: an outcome and its events in one statement and one commit.
//!
//! A batch of them is one update by primary key, fenced by id and attempt, whose rows drive the inserts of their
//! events; what was not updated writes no event. Run again after its answer was lost, it changes nothing.
//!
//! An application may hold a row for as long as its own transaction lasts (see `oncegate_complete` in the migrations).
//! The batch skips such rows, so that nobody else's completion waits; what was skipped is submitted again, and again.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use async_trait::async_trait;
use tokio_postgres::Row;
use uuid::Uuid;

use super::connection::Effect;
use super::param::{Param, Params};
use super::pool::{Dedicated, LockForms, Pool};
use super::records::committed;
use super::rows::{get, seconds};
use crate::backoff::Backoff;
use crate::record::{Attempt, KeptBody, Key, Operation, RecordId, Scope, Tenant, encode_headers};
use crate::store::batch::{Batcher, RunError, Work};
use crate::store::{Completion, Error, LateOutcome, Settled};

/// Writes the events of completed records: of `done(id, at)` with the flattened arrays `$10` to `$17`.
///
/// `at` is the completion's time, `$10` the record of each event. An event's id is made from its key, so one of the two
/// unique constraints speaks for both.
macro_rules! write_messages {
    () => {
        ",
message AS (
    INSERT INTO outbox_messages (id, event_key, seq, event_type, tenant_id, operation,
                                 idempotency_key, record_id, ordering_key, payload, wanted,
                                 created_at)
    SELECT e.id, e.event_key, e.seq, e.event_type, done.tenant_id, done.operation,
           done.key, done.id, e.ordering_key, e.payload, e.wanted, done.at
    FROM unnest($10::uuid[], $11::uuid[], $12::text[], $13::int[], $14::text[], $15::text[],
                $16::bytea[], $17::bool[])
      AS e(record_id, id, event_key, seq, event_type, ordering_key, payload, wanted)
    JOIN done ON done.id = e.record_id
    ORDER BY e.event_key
    ON CONFLICT (id) DO NOTHING
    RETURNING id, seq, ordering_key, created_at)"
    };
}
pub(super) use write_messages;

/// Queues the messages for their sinks: `$18` and `$19` are the pairs of event and sink.
macro_rules! queue_messages {
    () => {
        ",
queued AS (
    INSERT INTO outbox_queue (event_id, sink, next_attempt_at, ordering_key, seq, created_at)
    SELECT m.id, s.sink, m.created_at, m.ordering_key, m.seq, m.created_at
    FROM unnest($18::uuid[], $19::text[]) AS s(event_id, sink) JOIN message m ON m.id = s.event_id
    ORDER BY m.id, s.sink
    ON CONFLICT (event_id, sink) DO NOTHING)"
    };
}
pub(super) use queue_messages;

/// Where a row `r` fits a completion `c`.
macro_rules! fits {
    () => {
        "r.tenant_id = c.tenant_id AND r.operation = c.operation AND r.key = c.key
          AND r.id = c.id AND r.attempt = c.attempt AND r.status IN ('in_progress', 'unknown')"
    };
}

/// The plain form is a function of the schema, which says why. The passing one takes the lock of each row, in the order of
/// the scopes, and does not wait for it. What its snapshot says may be completed and was not is held by somebody, or has
/// just been changed: it is looked at again. OFFSET keeps the planner from reading the whole table for that.
const COMPLETE: LockForms = LockForms {
    waiting: "-- complete
SELECT id, expires_at, false AS skipped
FROM oncegate_complete_batch($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16,
                             $17, $18, $19)",
    skipping: concat!(
        "-- complete_passing
WITH c AS MATERIALIZED (
    SELECT x.*, clock_timestamp() AS at
    FROM unnest($1::uuid[], $2::int[], $3::text[], $4::text[], $5::text[],
                $6::int[], $7::bytea[], $8::bytea[], $9::float8[])
      AS x(id, attempt, tenant_id, operation, key, response_status, headers, body, retention)
    ORDER BY x.tenant_id, x.operation, x.key),
done AS (
    UPDATE idempotency_records r
    SET status = 'completed', completed_at = c.at,
        expires_at = c.at + make_interval(secs => c.retention),
        response_status = c.response_status, response_headers = c.headers,
        response_body = c.body, request_context = NULL
    FROM c CROSS JOIN LATERAL (
        SELECT 1 FROM idempotency_records r
        WHERE ",
        fits!(),
        "
        FOR NO KEY UPDATE SKIP LOCKED) free
    WHERE ",
        fits!(),
        "
    RETURNING r.id, r.tenant_id, r.operation, r.key, r.expires_at, c.at)",
        write_messages!(),
        queue_messages!(),
        "
SELECT c.id, done.expires_at,
       done.id IS NULL AND EXISTS (
    SELECT FROM idempotency_records r
    WHERE ",
        fits!(),
        " OFFSET 0) AS skipped
FROM c LEFT JOIN done ON done.id = c.id"
    ),
};

// What was not completed here may be this completion itself, run before, whose answer was lost. See
// `CONFIRM_RESERVED`: what the caller will read is durable then.
const CONFIRM_COMPLETED: &str = "-- confirm_completed
UPDATE idempotency_records r SET status = r.status
WHERE r.id = ANY ($1::uuid[]) AND r.status = 'completed'";

/// Completions as parallel arrays: parameters 1 to 19.
#[derive(Default)]
pub(super) struct Columns<'a> {
    ids: Vec<RecordId>,
    attempts: Vec<Attempt>,
    tenants: Vec<&'a Tenant>,
    operations: Vec<&'a Operation>,
    keys: Vec<&'a Key>,
    statuses: Vec<i32>,
    headers: Vec<Vec<u8>>,
    bodies: Vec<Option<&'a [u8]>>,
    retentions: Vec<f64>,
    records: Vec<RecordId>,
    event_ids: Vec<Uuid>,
    event_keys: Vec<&'a str>,
    positions: Vec<i32>,
    kinds: Vec<&'a str>,
    order_keys: Vec<Option<&'a str>>,
    payloads: Vec<&'a [u8]>,
    wanted: Vec<bool>,
    deliveries: Vec<Uuid>,
    sinks: Vec<&'a str>,
}

impl<'a> Columns<'a> {
    pub(super) fn add(&mut self, completion: &'a Completion) {
        let Completion { scope, fence, answer, retention, events } = completion;
        self.ids.push(fence.id);
        self.attempts.push(fence.attempt);
        self.tenants.push(&scope.tenant);
        self.operations.push(&scope.operation);
        self.keys.push(&scope.key);
        self.statuses.push(answer.status.as_u16().into());
        self.headers.push(encode_headers(&answer.headers, &answer.spelling));
        self.bodies.push(match &answer.body {
            KeptBody::Whole(body) => Some(body),
            KeptBody::NotRetained => None,
        });
        self.retentions.push(seconds(*retention));
        for event in events {
            self.records.push(fence.id);
            self.event_ids.push(event.id);
            self.event_keys.push(&event.key);
            self.positions.push(event.position.into());
            self.kinds.push(&event.kind);
            self.order_keys.push(event.ordering_key.as_deref());
            self.payloads.push(&event.payload);
            self.wanted.push(!event.sinks.is_empty());
            for sink in &event.sinks {
                self.deliveries.push(event.id);
                self.sinks.push(sink);
            }
        }
    }

    pub(super) fn params(&self) -> Vec<Param<'_>> {
        let Self {
            ids,
            attempts,
            tenants,
            operations,
            keys,
            statuses,
            headers,
            bodies,
            retentions,
            ..
        } = self;
        let Self { records, event_ids, event_keys, positions, kinds, order_keys, payloads, .. } =
            self;
        let Self { wanted, deliveries, sinks, .. } = self;
        vec![
            ids, attempts, tenants, operations, keys, statuses, headers, bodies, retentions,
            records, event_ids, event_keys, positions, kinds, order_keys, payloads, wanted,
            deliveries, sinks,
        ]
    }
}

const NOTE_LATE: &str = "-- note_late
INSERT INTO audit_log (id, who, action, record_id, why, detail) VALUES ($1, $2, $3, $4, $5, $6)
ON CONFLICT (id) DO NOTHING";

pub(super) async fn note_late(pool: &Pool, late: &LateOutcome) -> Result<(), Error> {
    let (who, action, detail) = (LateOutcome::WHO, LateOutcome::ACTION, late.detail().to_string());
    let params: Params<'_> = &[&late.id(), &who, &action, &late.fence.id, &late.summary(), &detail];
    pool.write(NOTE_LATE, params).await.map(drop)
}

/// How completions are run.
pub(super) struct Completions(pub(super) Dedicated);

/// What a batch made of one completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tried {
    /// It has its end.
    Settled(Settled),
    /// Somebody's transaction holds its row.
    Skipped,
}

#[async_trait]
impl Work for Completions {
    type Item = Completion;
    type Reply = Tried;

    fn scope(item: &Completion) -> &Scope {
        &item.scope
    }

    async fn run(&self, items: &[Arc<Completion>]) -> Result<Vec<Tried>, RunError> {
        let rows = {
            let mut columns = Columns::default();
            items.iter().for_each(|item| columns.add(item));
            self.0.write(COMPLETE, &columns.params()).await?
        };
        let tried: HashMap<RecordId, Tried> =
            rows.iter().map(tried).collect::<Result<_, Error>>().map_err(RunError::from)?;
        let fenced = Tried::Settled(Settled::Fenced);
        let of = |item: &Arc<Completion>| *tried.get(&item.fence.id).unwrap_or(&fenced);
        let met = items.iter().filter(|item| of(item) == fenced);
        let met: Vec<RecordId> = met.map(|item| item.fence.id).collect();
        if !met.is_empty() {
            let params: Params<'_> = &[&met];
            self.0.run(Effect::Write, CONFIRM_COMPLETED, params).await.map_err(committed)?;
        }
        Ok(items.iter().map(of).collect())
    }
}

fn tried(row: &Row) -> Result<(RecordId, Tried), Error> {
    let expires_at: Option<SystemTime> = get(row, "expires_at")?;
    let tried = match expires_at {
        Some(expires_at) => Tried::Settled(Settled::Done { expires_at }),
        None if get(row, "skipped")? => Tried::Skipped,
        None => Tried::Settled(Settled::Fenced),
    };
    Ok((get::<Uuid>(row, "id")?.into(), tried))
}

/// Pauses before a completion is tried again whose row somebody holds.
const PAUSES: Backoff = Backoff::new(Duration::from_millis(5), Duration::from_millis(100));

/// Submits a completion until its row is free. Meanwhile it holds nothing: no connection, and no place in a batch.
pub(super) async fn complete(
    batcher: &Batcher<Completions>,
    completion: Arc<Completion>,
    deadline: Instant,
) -> Result<Settled, Error> {
    let (mut pauses, mut locked) = (PAUSES, false);
    loop {
        match batcher.submit_shared(Arc::clone(&completion), deadline).await {
            Ok(Tried::Settled(settled)) => return Ok(settled),
            Ok(Tried::Skipped) if Instant::now() + pauses.longest() >= deadline => {
                return Ok(Settled::Locked);
            }
            Ok(Tried::Skipped) => locked = true,
            // What was last known of the row still holds: somebody else may be completing it.
            Err(Error::Late) if locked => return Ok(Settled::Locked),
            Err(error) => return Err(error),
        }
        tokio::time::sleep(pauses.pause()).await;
    }
}
