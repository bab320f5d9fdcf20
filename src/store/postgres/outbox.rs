//! The queue: claims, verdicts, and what is old enough to go.
//!
//! A claim is a lease and a number on a narrow row, committed before the delivery begins; every verdict names the
//! number, so that a late one changes nothing. Claims go by state, never by position: the floor that spares the
//! quick look the dead end of the index, and the place from which others look, are made good by the complete look.

use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use tokio_postgres::Row;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::door::{Connection, Door, Param, Params, Task, Transaction};
use super::order::{self, AcknowledgingInOrder};
use super::rows::{self, duration, get, unsigned};
use super::seconds;
use crate::record::event::subscription::{Subscriber, TypeFilter, TypePattern};
use crate::store::batch::RunError;
use crate::store::{Acknowledgement, Claim, Claimed, Error, Lane, Look, Order, Over, Verdict};

// A pattern holds no line end, so the patterns of a sink fit one text, and arrays of different lengths one parameter.
const NAME_SINKS: &str = "-- name_sinks
WITH gone AS (
    DELETE FROM oncegate_sinks s WHERE s.name <> ALL ($1::text[]))
INSERT INTO oncegate_sinks AS s (name, events)
SELECT x.name, string_to_array(x.events, E'\\n') FROM unnest($1::text[], $2::text[]) AS x(name, events)
ORDER BY x.name
ON CONFLICT (name) DO UPDATE SET events = excluded.events
WHERE s.events IS DISTINCT FROM excluded.events";

pub(super) async fn name_sinks(door: &Door, sinks: &[Subscriber]) -> Result<(), Error> {
    let names: Vec<&str> = sinks.iter().map(|sink| sink.sink.as_str()).collect();
    let events: Vec<Option<String>> = sinks.iter().map(|sink| likes(&sink.events)).collect();
    let params: Params<'_> = &[(&names, Type::TEXT_ARRAY), (&events, Type::TEXT_ARRAY)];
    door.write(NAME_SINKS, params).await.map(drop)
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

// The planner may have met the tables when they were empty. All ways seem equally good to it then, and it may take one that
// reads all that there is for each row, with whatever was deleted and somebody's snapshot still keeps. So nothing is left to it
// but looks by an index, in the order of that index. Nor may what is in a table be looked up by a join with its key, or by one
// column of several that an index begins with: an index seems as good from end to end. It is looked up by its place, by
// [`row_of`], or by all that the index has. What must be done in a way that is turned off, as the sorting of a few rows, seems
// dear enough to be compiled first, which takes seconds.
pub(super) const BEGIN_BY_INDEX: &str = "-- begin_by_index
BEGIN ISOLATION LEVEL READ COMMITTED;
SET LOCAL jit = off;
SET LOCAL enable_seqscan = off;
SET LOCAL enable_bitmapscan = off;
SET LOCAL enable_sort = off;
SET LOCAL enable_hashjoin = off;
SET LOCAL enable_mergejoin = off";

// For a function that pins its plans itself.
const BEGIN_PINNED: &str = "-- begin_pinned
BEGIN ISOLATION LEVEL READ COMMITTED";

/// How far back the quick look goes.
const FLOOR: Duration = Duration::from_secs(10);

/// Whether the process of this id lives. Looked up by its primary key: a scalar sub-select is never made into a join or a
/// hash over all owners.
macro_rules! owner_lives {
    ($owner:literal) => {
        concat!(
            "(coalesce((SELECT o.lease_until FROM oncegate_owners o WHERE o.owner = ",
            $owner,
            "), '-infinity') > clock_timestamp())"
        )
    };
}
pub(super) use owner_lives;

/// What may be claimed: of a sink and lane, due, and free. The clock stands in a sub-select because only a value that is
/// fixed for the statement can bound an index scan. Owners are asked about only for claims that run.
macro_rules! claimable {
    ($sink:literal, $lane:literal, $judges:literal) => {
        concat!(
            "sink = ",
            $sink,
            " AND lane = ",
            $lane,
            "
      AND next_attempt_at <= (SELECT clock_timestamp())
      AND (lease_until <= clock_timestamp()
        OR (",
            $judges,
            " AND claimed_by IS NOT NULL AND NOT ",
            $crate::store::postgres::outbox::owner_lives!("claimed_by"),
            "))"
        )
    };
}
pub(super) use claimable;

/// Where a claim begins: at a place, or else so long ago.
macro_rules! not_before {
    ($floor:literal, $place:literal) => {
        concat!(
            "
      AND next_attempt_at >= (SELECT coalesce(",
            $place,
            ", clock_timestamp() - make_interval(secs => ",
            $floor,
            ")))"
        )
    };
}
pub(super) use not_before;

/// The queue's row of an event towards a sink, or the one after it: to be compared again. Its order is that of one index
/// only. Where the planner believes the queue to be empty, all indexes are equally good to it, and by another one each event
/// may cost a look at all rows of the sink.
macro_rules! row_of {
    ($of:literal, $sink:literal) => {
        concat!(
            "LATERAL (
    SELECT r.ctid AS place, r.* FROM outbox_queue r
    WHERE (r.event_id, r.sink) >= (",
            $of,
            ".event_id, ",
            $sink,
            ")
    ORDER BY r.event_id, r.sink LIMIT 1) AS q"
        )
    };
}
pub(super) use row_of;

// A function of the schema, which says why and how.
const CLAIM: &str = "-- claim
SELECT event_id, claim_no, attempts, refusals, age, event_type, tenant_id, operation,
       idempotency_key, payload
FROM oncegate_claim($1, $2, $3, $4, $5, $6, $7, $8)";

// Two ends of the index, however much stands between them.
const PLACE_OF_CLAIM: &str = concat!(
    "-- place_of_claim
SELECT oldest.at + (newest.at - oldest.at) * $4 AS place
FROM (SELECT next_attempt_at AS at FROM outbox_queue
    WHERE ",
    claimable!("$1", "$2", "$3"),
    "
    ORDER BY next_attempt_at, event_id LIMIT 1) AS oldest,
  (SELECT next_attempt_at AS at FROM outbox_queue
    WHERE ",
    claimable!("$1", "$2", "$3"),
    "
    ORDER BY next_attempt_at DESC, event_id DESC LIMIT 1) AS newest"
);

/// Where a look begins: at the place, or, where there is none, so long ago. A place is a time of the database, so that it is
/// the same in the next statement.
pub(super) struct Beginning {
    pub(super) floor: f64,
    pub(super) place: Option<SystemTime>,
}

/// Where a claim's look begins. `None`: nothing may be claimed.
pub(super) async fn beginning(
    transaction: &mut Transaction<'_>,
    claim: &Claim,
) -> Result<Option<Beginning>, RunError> {
    let share = match claim.look {
        Look::Quick => return Ok(Some(Beginning { floor: seconds(FLOOR), place: None })),
        Look::Complete => {
            return Ok(Some(Beginning { floor: seconds(Duration::MAX), place: None }));
        }
        Look::From(share) => f64::from(share) / f64::from(u16::MAX),
    };
    let params: Params<'_> = &[
        (&claim.sink, Type::TEXT),
        (&lane(claim.lane), Type::INT2),
        (&(claim.over == Over::EndedOrDead), Type::BOOL),
        (&share, Type::FLOAT8),
    ];
    let rows = transaction.run(PLACE_OF_CLAIM, params).await?;
    let Some(row) = rows.first() else { return Ok(None) };
    Ok(Some(Beginning { floor: seconds(Duration::MAX), place: Some(get(row, "place")?) }))
}

pub(super) async fn claim(door: &Door, claim: &Claim) -> Result<Vec<Claimed>, Error> {
    match claim.order {
        Order::None => door.run(&Claiming(claim)).await?.iter().map(claimed).collect(),
        Order::Key(on_dead) => order::claim(door, claim, on_dead).await,
    }
}

struct Claiming<'a>(&'a Claim);

#[async_trait]
impl Task for Claiming<'_> {
    type Done = Vec<Row>;

    async fn run(&self, connection: &mut Connection) -> Result<Vec<Row>, RunError> {
        let Claim { sink, lane: which, order: _, limit, owner, lease, over, look } = self.0;
        let begin = if matches!(look, Look::From(_)) { BEGIN_BY_INDEX } else { BEGIN_PINNED };
        let mut transaction = connection.begin(begin).await?;
        let Some(Beginning { floor, place }) = beginning(&mut transaction, self.0).await? else {
            transaction.commit().await?;
            return Ok(Vec::new());
        };
        let params: Params<'_> = &[
            (sink, Type::TEXT),
            (&lane(*which), Type::INT2),
            (&i64::from(*limit), Type::INT8),
            (&seconds(*lease), Type::FLOAT8),
            (&floor, Type::FLOAT8),
            (&Uuid::from(*owner), Type::UUID),
            (&(*over == Over::EndedOrDead), Type::BOOL),
            (&place, Type::TIMESTAMPTZ),
        ];
        let rows = transaction.run(CLAIM, params).await?;
        transaction.commit().await?;
        Ok(rows)
    }
}

pub(super) fn lane(lane: Lane) -> i16 {
    match lane {
        Lane::Fresh => 0,
        Lane::Retry => 1,
    }
}

pub(super) fn claimed(row: &Row) -> Result<Claimed, Error> {
    Ok(Claimed {
        event_id: get(row, "event_id")?,
        claim_no: get(row, "claim_no")?,
        attempts: unsigned(get(row, "attempts")?),
        refusals: unsigned(get(row, "refusals")?),
        age: duration(get(row, "age")?),
        kind: get(row, "event_type")?,
        tenant: get(row, "tenant_id")?,
        operation: get(row, "operation")?,
        key: get(row, "idempotency_key")?,
        payload: bytes::Bytes::copy_from_slice(get(row, "payload")?),
    })
}

// As the claim.
pub(super) const FINISH: &str = "-- finish
SELECT event_id, ordering_key FROM oncegate_finish($1, $2, $3, $4, $5, $6)";

// No delay: given back unsent, as if nothing had been. Attempts and refusals: 1 where this was one, else 0.
pub(super) const FREE: &str = concat!(
    "-- free
WITH x AS MATERIALIZED (
    SELECT * FROM unnest($2::uuid[], $3::int[], $4::float8[], $5::int[], $6::text[], $7::int[],
                         $8::int[])
      AS x(event_id, claim_no, delay, status, error, attempts, refusals)
    ORDER BY x.event_id),
found AS (
    SELECT x.*, q.place FROM x CROSS JOIN ",
    row_of!("x", "$1"),
    "
    WHERE q.event_id = x.event_id AND q.sink = $1),
freed AS (
    UPDATE outbox_queue q
    SET lease_until = '-infinity',
        lane = CASE WHEN x.delay IS NULL THEN q.lane ELSE 1 END,
        attempts = q.attempts + x.attempts,
        refusals = q.refusals + x.refusals,
        next_attempt_at = CASE WHEN x.delay IS NULL THEN q.next_attempt_at
                               ELSE clock_timestamp() + make_interval(secs => x.delay) END,
        last_status = CASE WHEN x.delay IS NULL THEN q.last_status ELSE x.status END,
        last_error = CASE WHEN x.delay IS NULL THEN q.last_error ELSE x.error END
    FROM found x
    WHERE q.ctid = x.place AND q.claim_no = x.claim_no AND q.lease_until <> '-infinity'
    RETURNING q.event_id, q.sink, q.claim_no, q.attempts, x.status, x.error,
              x.attempts > 0 AS counted, q.ordering_key),
noted AS (
    INSERT INTO outbox_attempts (event_id, sink, slot, claim_no, attempt, at, status, error)
    SELECT event_id, sink, claim_no % 50, claim_no, attempts, clock_timestamp(), status, error
    FROM freed WHERE counted ORDER BY event_id
    ON CONFLICT (event_id, sink, slot) DO UPDATE
    SET claim_no = excluded.claim_no, attempt = excluded.attempt, at = excluded.at,
        status = excluded.status, error = excluded.error)
SELECT event_id, ordering_key FROM freed"
);

/// Parallel arrays of verdicts that end a delivery, and of those that free it again.
#[derive(Default)]
pub(super) struct Columns {
    ids: Vec<Uuid>,
    claims: Vec<i32>,
    outcomes: Vec<&'static str>,
    delays: Vec<Option<f64>>,
    statuses: Vec<Option<i32>>,
    errors: Vec<Option<String>>,
    attempts: Vec<i32>,
    refusals: Vec<i32>,
}

impl Columns {
    /// A delivery that ended.
    fn end(
        &mut self,
        verdict: &Acknowledgement,
        outcome: &'static str,
        status: Option<u16>,
        error: Option<&str>,
    ) {
        self.outcomes.push(outcome);
        self.add(verdict, None, status, error, (1, 0));
    }

    /// A delivery that is owed on; with how many attempts and refusals it was.
    fn add(
        &mut self,
        verdict: &Acknowledgement,
        delay: Option<Duration>,
        status: Option<u16>,
        error: Option<&str>,
        (attempts, refusals): (i32, i32),
    ) {
        self.ids.push(verdict.event_id);
        self.claims.push(verdict.claim_no);
        self.delays.push(delay.map(seconds));
        self.statuses.push(status.map(i32::from));
        self.errors.push(error.map(clean));
        self.attempts.push(attempts);
        self.refusals.push(refusals);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// As [`FINISH`] or [`FREE`] takes them.
    pub(super) fn params<'a>(&'a self, sql: &str, sink: &'a &str) -> Vec<Param<'a>> {
        let finishes = sql == FINISH;
        let third: Param<'_> = if finishes {
            (&self.outcomes, Type::TEXT_ARRAY)
        } else {
            (&self.delays, Type::FLOAT8_ARRAY)
        };
        let mut params: Vec<Param<'_>> = vec![
            (sink, Type::TEXT),
            (&self.ids, Type::UUID_ARRAY),
            (&self.claims, Type::INT4_ARRAY),
            third,
            (&self.statuses, Type::INT4_ARRAY),
            (&self.errors, Type::TEXT_ARRAY),
        ];
        if !finishes {
            params.push((&self.attempts, Type::INT4_ARRAY));
            params.push((&self.refusals, Type::INT4_ARRAY));
        }
        params
    }
}

/// An error's text as the column takes it: without NUL, at most 1 KiB.
pub(super) fn clean(text: &str) -> String {
    let mut clean: String = text.chars().filter(|c| *c != '\0').take(1024).collect();
    while clean.len() > 1024 {
        clean.pop();
    }
    clean
}

pub(super) async fn acknowledge(
    door: &Door,
    sink: &str,
    order: Order,
    verdicts: &[Acknowledgement],
) -> Result<Vec<Uuid>, Error> {
    let mut finished = Columns::default();
    let mut freed = Columns::default();
    for verdict in verdicts {
        match &verdict.verdict {
            Verdict::Sent { status } => finished.end(verdict, "sent", *status, None),
            Verdict::Dead { status, error } => finished.end(verdict, "dead", *status, Some(error)),
            Verdict::Retry { delay, status, error } => {
                freed.add(verdict, Some(*delay), *status, Some(error), (1, 0));
            }
            Verdict::Refused { delay, status, error } => {
                freed.add(verdict, Some(*delay), *status, Some(error), (1, 1));
            }
            Verdict::Returned { delay, status, error } => {
                freed.add(verdict, Some(*delay), *status, Some(error), (0, 0));
            }
            Verdict::GivenBack => freed.add(verdict, None, None, None, (0, 0)),
        }
    }
    if let Order::Key(on_dead) = order {
        let (finished, freed) = (&finished, &freed);
        return door.run(&AcknowledgingInOrder { sink, on_dead, verdicts, finished, freed }).await;
    }
    let mut found = settle(door, FINISH, sink, &finished).await?;
    found.extend(settle(door, FREE, sink, &freed).await?);
    Ok(found)
}

async fn settle(door: &Door, sql: &str, sink: &str, columns: &Columns) -> Result<Vec<Uuid>, Error> {
    if columns.is_empty() {
        return Ok(Vec::new());
    }
    let rows = door.write(sql, &columns.params(sql, &sink)).await?;
    rows.iter().map(|row| get(row, "event_id")).collect()
}

// Claimed rows stand at the low end of what is due, so a bounded look finds the first of their ends.
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

pub(super) async fn next_due(door: &Door, sink: &str) -> Result<Option<Duration>, Error> {
    let rows = door.run(&LookingAhead(sink)).await?;
    let wait: Option<f64> = rows.first().map(|row| get(row, "wait")).transpose()?.flatten();
    Ok(wait.map(duration))
}

struct LookingAhead<'a>(&'a str);

#[async_trait]
impl Task for LookingAhead<'_> {
    type Done = Vec<Row>;

    async fn run(&self, connection: &mut Connection) -> Result<Vec<Row>, RunError> {
        let params: Params<'_> = &[(&self.0, Type::TEXT), (&seconds(FLOOR), Type::FLOAT8)];
        let mut transaction = connection.begin(BEGIN_BY_INDEX).await?;
        let rows = transaction.run(NEXT_DUE, params).await?;
        transaction.commit().await?;
        Ok(rows)
    }
}

const BEGIN_SWEEP: &str = "-- begin_sweep
BEGIN ISOLATION LEVEL READ COMMITTED";

/// What makes an event old enough to go: nothing owed, nothing dead, everything finished for longer than `$1`.
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

pub(super) async fn sweep(door: &Door, retention: Duration, limit: u32) -> Result<u64, Error> {
    door.run(&Sweeping { retention: seconds(retention), limit: limit.into() }).await
}

struct Sweeping {
    retention: f64,
    limit: i64,
}

#[async_trait]
impl Task for Sweeping {
    type Done = u64;

    async fn run(&self, connection: &mut Connection) -> Result<u64, RunError> {
        let mut transaction = connection.begin(BEGIN_SWEEP).await?;
        let params: Params<'_> = &[(&self.retention, Type::FLOAT8), (&self.limit, Type::INT8)];
        let old = transaction.run(LOCK_OLD, params).await?;
        let ids: Vec<Uuid> = old.iter().map(|row| get(row, "id")).collect::<Result<_, _>>()?;
        let params: Params<'_> = &[(&self.retention, Type::FLOAT8), (&ids, Type::UUID_ARRAY)];
        let gone = rows::count(&transaction.run(DELETE_OLD, params).await?)?;
        transaction.commit().await?;
        Ok(gone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_texts_fit_their_column() {
        assert_eq!(clean("a\0b"), "ab");
        assert_eq!(clean(&"é".repeat(2000)).len(), 1024);
    }
}
