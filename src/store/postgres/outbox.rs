//! The queue: claims, verdicts, and what is old enough to go.
//!
//! A claim is a lease and a number on a narrow row, committed before the delivery begins; every verdict names the
//! number, so that a late one changes nothing. Claims go by state, never by position: the floor that spares the
//! quick look the dead end of the index, and the place from which others look, are made good by the complete look.

use std::time::Duration;

use async_trait::async_trait;
use tokio_postgres::Row;
use uuid::Uuid;

use super::connection::Connection;
use super::order::{self, AcknowledgingInOrder};
use super::param::Params;
use super::pool::{Pool, Retryable};
use super::queue::{
    BEGIN_BY_INDEX, Beginning, Columns, FINISH, FLOOR, FREE, beginning, claimed, lane,
};
use super::rows::{self, duration, get, seconds};
use crate::record::event::subscription::{Subscriber, TypeFilter, TypePattern};
use crate::store::batch::RunError;
use crate::store::{Acknowledgement, Claim, Claimed, Error, Look, Order, Reclaim};

// A pattern holds no line end, so the patterns of a sink fit one text, and arrays of different lengths one parameter.
const NAME_SINKS: &str = "-- name_sinks
WITH gone AS (
    DELETE FROM oncegate_sinks s WHERE s.name <> ALL ($1::text[]))
INSERT INTO oncegate_sinks AS s (name, events)
SELECT x.name, string_to_array(x.events, E'\\n') FROM unnest($1::text[], $2::text[]) AS x(name, events)
ORDER BY x.name
ON CONFLICT (name) DO UPDATE SET events = excluded.events
WHERE s.events IS DISTINCT FROM excluded.events";

pub(super) async fn name_sinks(pool: &Pool, sinks: &[Subscriber]) -> Result<(), Error> {
    let names: Vec<&str> = sinks.iter().map(|sink| sink.sink.as_str()).collect();
    let events: Vec<Option<String>> = sinks.iter().map(|sink| likes(&sink.events)).collect();
    let params: Params<'_> = &[&names, &events];
    pool.write(NAME_SINKS, params).await.map(drop)
}

/// The patterns as LIKE has them, one a line; `None`: all events.
fn likes(wanted: &TypeFilter) -> Option<String> {
    let TypeFilter::Matching(patterns) = wanted else { return None };
    let like = |pattern: &TypePattern| {
        let plain = pattern.as_str().replace('\\', r"\\").replace('%', r"\%").replace('_', r"\_");
        plain.replace('*', "%")
    };
    Some(patterns.iter().map(like).collect::<Vec<_>>().join("\n"))
}

// For a function that pins its plans itself.
const BEGIN_PINNED: &str = "-- begin_pinned
BEGIN ISOLATION LEVEL READ COMMITTED";

// A function of the schema, which says why and how.
const CLAIM: &str = "-- claim
SELECT event_id, claim_no, attempts, refusals, age, event_type, tenant_id, operation,
       idempotency_key, payload
FROM oncegate_claim($1, $2, $3, $4, $5, $6, $7, $8)";

pub(super) async fn claim(pool: &Pool, claim: &Claim) -> Result<Vec<Claimed>, Error> {
    match claim.order {
        Order::None => pool.run(&Claiming(claim)).await?.iter().map(claimed).collect(),
        Order::Key(on_dead) => order::claim(pool, claim, on_dead).await,
    }
}

struct Claiming<'a>(&'a Claim);

#[async_trait]
impl Retryable for Claiming<'_> {
    type Done = Vec<Row>;

    async fn run(&self, connection: &mut Connection) -> Result<Vec<Row>, RunError> {
        let Claim { sink, lane: which, order: _, limit, owner, lease, reclaim, look } = self.0;
        let begin = if matches!(look, Look::From(_)) { BEGIN_BY_INDEX } else { BEGIN_PINNED };
        let mut transaction = connection.begin(begin).await?;
        let Some(Beginning { floor, place }) = beginning(&mut transaction, self.0).await? else {
            transaction.commit().await?;
            return Ok(Vec::new());
        };
        let params: Params<'_> = &[
            sink,
            &lane(*which),
            &i64::from(*limit),
            &seconds(*lease),
            &floor,
            owner,
            &(*reclaim == Reclaim::ExpiredOrOrphaned),
            &place,
        ];
        let rows = transaction.run(CLAIM, params).await?;
        transaction.commit().await?;
        Ok(rows)
    }
}

pub(super) async fn acknowledge(
    pool: &Pool,
    sink: &str,
    order: Order,
    verdicts: &[Acknowledgement],
) -> Result<Vec<Uuid>, Error> {
    let mut finished = Columns::default();
    let mut freed = Columns::default();
    for verdict in verdicts {
        let ended = verdict.verdict.row().outcome.is_some();
        if ended { finished.add(verdict) } else { freed.add(verdict) }
    }
    if let Order::Key(on_dead) = order {
        let (finished, freed) = (&finished, &freed);
        return pool.run(&AcknowledgingInOrder { sink, on_dead, verdicts, finished, freed }).await;
    }
    let mut found = settle(pool, FINISH, sink, &finished).await?;
    found.extend(settle(pool, FREE, sink, &freed).await?);
    Ok(found)
}

async fn settle(pool: &Pool, sql: &str, sink: &str, columns: &Columns) -> Result<Vec<Uuid>, Error> {
    if columns.is_empty() {
        return Ok(Vec::new());
    }
    let rows = pool.write(sql, &columns.params(sql, &sink)).await?;
    rows.iter().map(|row| get(row, "event_id")).collect()
}

// Claimed rows are at the low end of what is due, so a bounded look finds the first of their ends.
// What has been due for longer than the floor and is claimed comes back by the complete look, when its claim ends.
const NEXT_DUE: &str = "-- next_due
WITH t AS MATERIALIZED (
    SELECT clock_timestamp() AS now, clock_timestamp() - make_interval(secs => $2) AS floor),
lanes AS (SELECT unnest(ARRAY[0, 1]::smallint[]) AS lane)
SELECT extract(epoch FROM min(at) - clock_timestamp())::float8 AS wait FROM lanes, LATERAL (
    (SELECT next_attempt_at AS at FROM outbox_queue
     WHERE sink = $1 AND lane = lanes.lane AND next_attempt_at > (SELECT now FROM t)
     ORDER BY next_attempt_at, event_id LIMIT 1)
    UNION ALL
    (SELECT min(lease_until) FROM (
        SELECT lease_until FROM outbox_queue
        WHERE sink = $1 AND lane = lanes.lane AND next_attempt_at <= (SELECT now FROM t)
          AND next_attempt_at >= (SELECT floor FROM t)
        ORDER BY next_attempt_at, event_id LIMIT 1000) AS begun
     WHERE lease_until > (SELECT now FROM t))) AS due";

pub(super) async fn next_due(pool: &Pool, sink: &str) -> Result<Option<Duration>, Error> {
    let rows = pool.run(&LookingAhead(sink)).await?;
    let wait: Option<f64> = rows.first().map(|row| get(row, "wait")).transpose()?.flatten();
    Ok(wait.map(duration))
}

struct LookingAhead<'a>(&'a str);

#[async_trait]
impl Retryable for LookingAhead<'_> {
    type Done = Vec<Row>;

    async fn run(&self, connection: &mut Connection) -> Result<Vec<Row>, RunError> {
        let params: Params<'_> = &[&self.0, &seconds(FLOOR)];
        let mut transaction = connection.begin(BEGIN_BY_INDEX).await?;
        let rows = transaction.run(NEXT_DUE, params).await?;
        transaction.commit().await?;
        Ok(rows)
    }
}

const BEGIN_SWEEP: &str = "-- begin_sweep
BEGIN ISOLATION LEVEL READ COMMITTED";

/// What makes an event old enough to go: nothing pending, nothing dead, everything finished for longer than `$1`.
macro_rules! old_enough {
    ($id:literal) => {
        concat!(
            "NOT EXISTS (SELECT FROM outbox_queue q WHERE q.event_id = ",
            $id,
            ")
  AND NOT EXISTS (
    SELECT FROM outbox_done o WHERE o.event_id = ",
            $id,
            " AND (o.outcome = 'dead'
        OR o.finished_at >= clock_timestamp() - make_interval(secs => $1)))"
        )
    };
}

const LOCK_OLD: &str = concat!(
    "-- lock_old_events
SELECT m.id FROM outbox_messages m
WHERE m.id IN (
    (SELECT d.event_id FROM outbox_done d
    WHERE d.outcome <> 'dead'
      AND d.finished_at < (SELECT clock_timestamp() - make_interval(secs => $1))
      AND ",
    old_enough!("d.event_id"),
    "
    ORDER BY d.finished_at LIMIT $2)
    UNION ALL
    (SELECT u.id FROM outbox_messages u
    WHERE NOT u.wanted
      AND u.created_at < (SELECT clock_timestamp() - make_interval(secs => $1))
    ORDER BY u.created_at LIMIT $2))
ORDER BY m.id LIMIT $2 FOR UPDATE SKIP LOCKED"
);

// A statement of its own, hence a new snapshot: a redelivery that committed before the lock was taken is seen.
const DELETE_OLD: &str = concat!(
    "-- delete_old_events
WITH gone AS (
    DELETE FROM outbox_messages m
    WHERE m.id = ANY ($2::uuid[])
      AND ",
    old_enough!("m.id"),
    "
    RETURNING m.id),
done AS (DELETE FROM outbox_done d USING gone WHERE d.event_id = gone.id),
tried AS (DELETE FROM outbox_attempts a USING gone WHERE a.event_id = gone.id),
told AS (DELETE FROM audit_events a USING gone WHERE a.event_id = gone.id)
SELECT count(*) AS count FROM gone"
);

pub(super) async fn sweep(pool: &Pool, retention: Duration, limit: u32) -> Result<u64, Error> {
    pool.run(&Sweeping { retention: seconds(retention), limit: limit.into() }).await
}

struct Sweeping {
    retention: f64,
    limit: i64,
}

#[async_trait]
impl Retryable for Sweeping {
    type Done = u64;

    async fn run(&self, connection: &mut Connection) -> Result<u64, RunError> {
        let mut transaction = connection.begin(BEGIN_SWEEP).await?;
        let params: Params<'_> = &[&self.retention, &self.limit];
        let old = transaction.run(LOCK_OLD, params).await?;
        let ids: Vec<Uuid> = old.iter().map(|row| get(row, "id")).collect::<Result<_, _>>()?;
        let params: Params<'_> = &[&self.retention, &ids];
        let gone = rows::count(&transaction.run(DELETE_OLD, params).await?)?;
        transaction.commit().await?;
        Ok(gone)
    }
}
