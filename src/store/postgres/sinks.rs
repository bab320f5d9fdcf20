//! The states of the sinks, for all replicas: one row each, each change of it a statement that is fenced by its number.

use tokio_postgres::Row;

use super::param::Params;
use super::pool::Pool;
use super::queue::clean;
use super::rows::{get, seconds};
use crate::store::read;
use crate::store::{
    Changed, Error, Operator, PauseReason, Reclaim, SinkChange, SinkOrder, SinkState,
};

// A probe of a process whose lease has ended is over, for those who may take its owner for dead.
const STATES: &str = "-- sink_states
WITH s AS (
    SELECT *, coalesce(probing_until > clock_timestamp(), false) AND NOT ($1
        AND coalesce((SELECT o.lease_until FROM oncegate_owners o WHERE o.owner = prober),
                     '-infinity') <= clock_timestamp()) AS probing
    FROM outbox_sinks)
SELECT sink, pause_no, pause_reason, since, failed_probes, last_error, note, probing,
       extract(epoch FROM CASE WHEN probing THEN probing_until ELSE probe_at END
                          - clock_timestamp())::float8 AS probe_in
FROM s ORDER BY sink";

pub(super) async fn states(pool: &Pool, reclaim: Reclaim) -> Result<Vec<SinkState>, Error> {
    let orphans = reclaim == Reclaim::ExpiredOrOrphaned;
    pool.read(STATES, &[&orphans]).await?.iter().map(read::sink_state).collect()
}

// The first row of a sink is made under the number 0 only; every other pause finds it under its number, and open.
const PAUSE: &str = "-- pause_sink
INSERT INTO outbox_sinks AS s (sink, pause_no, pause_reason, since, probe_at, failed_probes,
                               last_error)
SELECT $1, 1, $3, clock_timestamp(), clock_timestamp() + make_interval(secs => $4), $5, $6
WHERE $2 = 0 OR EXISTS (SELECT FROM outbox_sinks o WHERE o.sink = $1)
ON CONFLICT (sink) DO UPDATE
SET pause_no = s.pause_no + 1, pause_reason = excluded.pause_reason, since = excluded.since,
    probe_at = excluded.probe_at, failed_probes = excluded.failed_probes,
    last_error = excluded.last_error, note = NULL
WHERE s.pause_no = $2 AND s.pause_reason IS NULL
RETURNING sink";

const PROBE: &str = "-- probe_sink
UPDATE outbox_sinks
SET pause_no = pause_no + 1, prober = $3,
    probing_until = clock_timestamp() + make_interval(secs => $4)
WHERE sink = $1 AND pause_no = $2 AND pause_reason IN ('failing', 'busy')
  AND probe_at <= clock_timestamp()
  AND (probing_until IS NULL OR probing_until <= clock_timestamp()
    OR ($5 AND coalesce((SELECT o.lease_until FROM oncegate_owners o WHERE o.owner = prober),
                        '-infinity') <= clock_timestamp()))
RETURNING sink";

// No reason: the pause stays as it is, as after a probe that found nothing to send.
const PROBE_ENDED: &str = "-- probe_ended
UPDATE outbox_sinks
SET pause_no = pause_no + 1, pause_reason = coalesce($3, pause_reason),
    since = CASE WHEN $3 = 'gone' THEN clock_timestamp() ELSE since END,
    probe_at = clock_timestamp() + make_interval(secs => $4),
    prober = NULL, probing_until = NULL, failed_probes = failed_probes + $5,
    last_error = coalesce($6, last_error)
WHERE sink = $1 AND pause_no = $2 AND pause_reason IS NOT NULL AND prober IS NOT NULL
RETURNING sink";

const RESUME: &str = "-- resume_sink
UPDATE outbox_sinks
SET pause_no = pause_no + 1, pause_reason = NULL, since = clock_timestamp(), probe_at = NULL,
    prober = NULL, probing_until = NULL, failed_probes = 0
WHERE sink = $1 AND pause_no = $2 AND pause_reason IS NOT NULL AND prober IS NOT NULL
RETURNING sink";

pub(super) async fn change(
    pool: &Pool,
    sink: &str,
    no: i64,
    change: &SinkChange,
) -> Result<Changed, Error> {
    let (sql, reason, again, count, error) = match change {
        SinkChange::Probe { owner, lease, reclaim } => {
            let params: Params<'_> =
                &[&sink, &no, owner, &seconds(*lease), &(*reclaim == Reclaim::ExpiredOrOrphaned)];
            return Ok(changed(&pool.write(PROBE, params).await?));
        }
        SinkChange::Resume => {
            let params: Params<'_> = &[&sink, &no];
            return Ok(changed(&pool.write(RESUME, params).await?));
        }
        SinkChange::Pause { trouble, error, failed_probes } => {
            let probes = i32::try_from(*failed_probes).unwrap_or(i32::MAX);
            (PAUSE, Some(trouble.reason()), trouble.again(), probes, Some(clean(error)))
        }
        SinkChange::ProbeFailed { trouble, error } => {
            (PROBE_ENDED, Some(trouble.reason()), trouble.again(), 1, Some(clean(error)))
        }
        SinkChange::ProbeIdle { again } => (PROBE_ENDED, None, Some(*again), 0, None),
    };
    let params: Params<'_> =
        &[&sink, &no, &reason.map(PauseReason::as_str), &again.map(seconds), &count, &error];
    Ok(changed(&pool.write(sql, params).await?))
}

fn changed(rows: &[Row]) -> Changed {
    if rows.is_empty() { Changed::No } else { Changed::Yes }
}

/// What an operator changes, `$done`, with its row in the audit table.
macro_rules! by_operator {
    ($name:literal, $done:literal) => {
        concat!(
            "-- ",
            $name,
            "
WITH was AS MATERIALIZED (
    SELECT pause_reason FROM outbox_sinks WHERE sink = $1 FOR UPDATE),
done AS (",
            $done,
            "
    RETURNING sink),
logged AS (
    INSERT INTO audit_log (who, action, why, detail)
    SELECT $2, $4, $3,
           json_build_object('sink', sink, 'was', (SELECT pause_reason FROM was))::text
    FROM done)
SELECT sink FROM done"
        )
    };
}

const OPERATOR_PAUSE: &str = by_operator!(
    "operator_pause_sink",
    "
    INSERT INTO outbox_sinks AS s (sink, pause_no, pause_reason, since, note)
    VALUES ($1, 1, 'operator', clock_timestamp(), $3)
    ON CONFLICT (sink) DO UPDATE
    SET pause_no = s.pause_no + 1, pause_reason = 'operator', since = excluded.since,
        probe_at = NULL, prober = NULL, probing_until = NULL, failed_probes = 0,
        note = excluded.note
    WHERE s.pause_reason IS DISTINCT FROM 'operator'"
);

const OPERATOR_RESUME: &str = by_operator!(
    "operator_resume_sink",
    "
    UPDATE outbox_sinks
    SET pause_no = pause_no + 1, pause_reason = NULL, since = clock_timestamp(), probe_at = NULL,
        prober = NULL, probing_until = NULL, failed_probes = 0, note = NULL
    WHERE sink = $1 AND pause_reason IS NOT NULL"
);

pub(super) async fn operate(
    pool: &Pool,
    sink: &str,
    order: SinkOrder,
    by: &Operator,
) -> Result<Changed, Error> {
    let sql = match order {
        SinkOrder::Pause => OPERATOR_PAUSE,
        SinkOrder::Resume => OPERATOR_RESUME,
    };
    let params: Params<'_> = &[&sink, &by.who, &by.why, &order.action()];
    Ok(changed(&pool.write(sql, params).await?))
}

// What was tried stands in the retry lane; the head of its far end was tried last, but for the jitter of its pause. Where
// nothing is tried any more, what died last.
const LAST_FAILURE: &str = "-- last_failure
SELECT coalesce(
    (SELECT last_error FROM outbox_queue
    WHERE sink = $1 AND lane = 1 AND last_error IS NOT NULL
    ORDER BY next_attempt_at DESC, event_id DESC LIMIT 1),
    (SELECT last_error FROM outbox_done
    WHERE sink = $1 AND outcome = 'dead'
    ORDER BY finished_at DESC, event_id DESC LIMIT 1)) AS last_error";

pub(super) async fn last_failure(pool: &Pool, sink: &str) -> Result<Option<String>, Error> {
    let rows = pool.read(LAST_FAILURE, &[&sink]).await?;
    rows.first().map(|row| get(row, "last_error")).transpose().map(Option::flatten)
}
