//! The queue's rows: what claims and verdicts in any order have in common.

use std::time::{Duration, SystemTime};

use tokio_postgres::Row;
use uuid::Uuid;

use super::connection::Transaction;
use super::param::{Param, Params};
use super::rows::{duration, get, seconds};
use crate::store::batch::RunError;
use crate::store::outbox::VerdictRow;
use crate::store::read::Columns as _;
use crate::store::{Acknowledgement, Claim, Claimed, Error, Lane, Look, Reclaim};

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

/// How far back the quick look goes.
pub(super) const FLOOR: Duration = Duration::from_secs(10);

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

/// What may be claimed: of a sink and lane, due, and free. The clock is in a sub-select because only a value that is
/// fixed for the statement can bound an index scan. Owners are asked about only for claims that run.
macro_rules! claimable {
    ($sink:literal, $lane:literal, $orphans:literal) => {
        concat!(
            "sink = ",
            $sink,
            " AND lane = ",
            $lane,
            "
      AND next_attempt_at <= (SELECT clock_timestamp())
      AND (lease_until <= clock_timestamp()
        OR (",
            $orphans,
            " AND claimed_by IS NOT NULL AND NOT ",
            $crate::store::postgres::queue::owner_lives!("claimed_by"),
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

// Two ends of the index, however much is between them.
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
    let params: Params<'_> =
        &[&claim.sink, &lane(claim.lane), &(claim.reclaim == Reclaim::ExpiredOrOrphaned), &share];
    let rows = transaction.run(PLACE_OF_CLAIM, params).await?;
    let Some(row) = rows.first() else { return Ok(None) };
    Ok(Some(Beginning { floor: seconds(Duration::MAX), place: Some(get(row, "place")?) }))
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
        attempts: row.count("attempts")?,
        refusals: row.count("refusals")?,
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
    pub(super) fn add(&mut self, verdict: &Acknowledgement) {
        let VerdictRow { outcome, delay, status, error, counted } = verdict.verdict.row();
        self.ids.push(verdict.event_id);
        self.claims.push(verdict.claim_no);
        self.outcomes.extend(outcome);
        self.delays.push(delay.map(seconds));
        self.statuses.push(status.map(i32::from));
        self.errors.push(error.map(clean));
        self.attempts.push(counted.0);
        self.refusals.push(counted.1);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// As [`FINISH`] or [`FREE`] takes them.
    pub(super) fn params<'a>(&'a self, sql: &str, sink: &'a &str) -> Vec<Param<'a>> {
        let finishes = sql == FINISH;
        let third: Param<'_> = if finishes { &self.outcomes } else { &self.delays };
        let mut params: Vec<Param<'_>> =
            vec![sink, &self.ids, &self.claims, third, &self.statuses, &self.errors];
        if !finishes {
            params.push(&self.attempts);
            params.push(&self.refusals);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_texts_fit_their_column() {
        assert_eq!(clean("a\0b"), "ab");
        assert_eq!(clean(&"é".repeat(2000)).len(), 1024);
    }
}
