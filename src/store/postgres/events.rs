//! What operators do to events by hand, and the attempts that they look at.
//!
//! - Each action and its row in `audit_log` are one transaction. One event is a row for each of its sinks; all dead ones at
//!   once are one row, which says which ones and grows with each piece; `audit_events` names its events.
//! - What is being delivered is left alone: under a running claim nothing is redelivered or discarded.
//! - Claim numbers go on from the last one, so that no late worker's number fits again.
//! - Dead ones are worked off in the order of their index, in pieces, each a transaction of its own. Two operators at once
//!   share them: a piece changes what is still as it was seen.

use std::collections::BTreeMap;
use std::time::SystemTime;

use async_trait::async_trait;
use tokio_postgres::Row;
use uuid::Uuid;

use super::connection::{Connection, Transaction};
use super::order::{self, Ended};
use super::param::Params;
use super::pool::{Pool, Retryable};
use super::rows::{self, get, seconds};
use crate::fault::{self, Point};
use crate::store::batch::RunError;
use crate::store::read::{self, Columns as _};
use crate::store::{
    AttemptRow, Chosen, DeadFilter, Error, EventAction, EventStatus, Operator, Touched,
};

/// How many dead events one transaction takes.
const PIECE: i64 = 1000;

/// Moves done rows back into the queue: of `found(event_id, sink, new_sink, claim_no, outcome)`, whose messages are locked
/// against the sweeper first. A success that is redelivered stays among the attempts.
macro_rules! requeue {
    () => {
        ",
message AS MATERIALIZED (
    SELECT m.id, m.record_id, m.ordering_key, m.seq, m.created_at FROM outbox_messages m
    WHERE m.id IN (SELECT event_id FROM found) ORDER BY m.id FOR UPDATE),
taken AS (
    DELETE FROM outbox_done d USING found f, message m
    WHERE m.id = f.event_id AND d.event_id = f.event_id AND d.sink = f.sink
      AND d.claim_no = f.claim_no AND d.outcome = f.outcome
    RETURNING d.event_id, f.new_sink AS sink, d.claim_no, d.outcome, d.attempts, d.last_status,
              d.last_error, d.finished_at, m.record_id, m.ordering_key, m.seq, m.created_at),
queued AS (
    INSERT INTO outbox_queue (event_id, sink, lane, next_attempt_at, claim_no, ordering_key, seq,
                              created_at, last_status, last_error)
    SELECT event_id, sink, 1, clock_timestamp(), claim_no + 1, ordering_key, seq, created_at,
           last_status, last_error
    FROM taken ORDER BY event_id, sink
    ON CONFLICT DO NOTHING
    RETURNING event_id, sink),
success AS (
    INSERT INTO outbox_attempts (event_id, sink, slot, claim_no, attempt, at, status)
    SELECT event_id, sink, claim_no % 50, claim_no, attempts, finished_at, last_status
    FROM taken WHERE outcome = 'sent'
    ON CONFLICT (event_id, sink, slot) DO UPDATE
    SET claim_no = excluded.claim_no, attempt = excluded.attempt, at = excluded.at,
        status = excluded.status, error = excluded.error)"
    };
}

// An event that no sink wanted may have the sink ''; it can be sent to one that is named.
const REDELIVER_ONE: &str = concat!(
    "-- redeliver_one
WITH found AS MATERIALIZED (
    SELECT d.event_id, d.sink, coalesce($2, d.sink) AS new_sink, d.claim_no, d.outcome
    FROM outbox_done d
    WHERE d.event_id = $1
      AND (($2 IS NULL AND (d.outcome = 'dead' OR (d.outcome = 'sent' AND NOT $5)))
           OR d.sink = $2
           OR (d.sink = '' AND NOT EXISTS (
                SELECT FROM outbox_done o WHERE o.event_id = $1 AND o.sink = $2)
               AND NOT EXISTS (
                SELECT FROM outbox_queue q WHERE q.event_id = $1 AND q.sink = $2)))
      AND coalesce($2, d.sink) <> '')",
    requeue!(),
    ",
logged AS (
    INSERT INTO audit_log (who, action, record_id, event_id, why, detail)
    SELECT $3, 'event.redeliver', t.record_id, t.event_id, $4,
           json_build_object('sink', t.sink, 'status', t.outcome)::text
    FROM taken t JOIN queued q ON q.event_id = t.event_id AND q.sink = t.sink)
SELECT t.sink, t.outcome AS was
FROM taken t JOIN queued q ON q.event_id = t.event_id AND q.sink = t.sink"
);

// The mark on the message goes: from now on rows beside it give its status.
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
SELECT sink, 'discarded' AS was FROM queued";

/// What is pending of an event and is not being delivered right now, locked.
macro_rules! not_in_flight {
    () => {
        "WITH found AS MATERIALIZED (
    SELECT q.event_id, q.sink FROM outbox_queue q
    WHERE q.event_id = $1 AND ($2 IS NULL OR q.sink = $2) AND q.lease_until <= clock_timestamp()
    ORDER BY q.event_id, q.sink FOR UPDATE SKIP LOCKED)"
    };
}

const HASTEN: &str = concat!(
    "-- hasten
",
    not_in_flight!(),
    ",
queued AS (
    UPDATE outbox_queue q SET next_attempt_at = clock_timestamp() FROM found f
    WHERE q.event_id = f.event_id AND q.sink = f.sink AND q.lease_until <= clock_timestamp()
    RETURNING q.event_id, q.sink),
logged AS (
    INSERT INTO audit_log (who, action, record_id, event_id, why, detail)
    SELECT $3, 'event.redeliver', m.record_id, m.id, $4,
           json_build_object('sink', q.sink, 'status', 'pending')::text
    FROM queued q JOIN outbox_messages m ON m.id = q.event_id)
SELECT sink, 'pending' AS was FROM queued"
);

const DISCARD_PENDING: &str = concat!(
    "-- discard_pending
",
    not_in_flight!(),
    ",
gone AS (
    DELETE FROM outbox_queue q USING found f
    WHERE q.event_id = f.event_id AND q.sink = f.sink AND q.lease_until <= clock_timestamp()
    RETURNING q.event_id, q.sink, q.claim_no, q.attempts, q.last_status, q.last_error),
kept AS (
    INSERT INTO outbox_done (event_id, sink, outcome, claim_no, attempts, last_status, last_error,
                             finished_at)
    SELECT event_id, sink, 'discarded', claim_no, attempts, last_status, last_error,
           clock_timestamp()
    FROM gone ORDER BY event_id, sink),
logged AS (
    INSERT INTO audit_log (who, action, record_id, event_id, why, detail)
    SELECT $3, 'event.discard', m.record_id, m.id, $4,
           json_build_object('sink', g.sink, 'status', 'pending')::text
    FROM gone g JOIN outbox_messages m ON m.id = g.event_id)
SELECT sink, 'pending' AS was FROM gone"
);

const DISCARD_DEAD: &str = "-- discard_dead
WITH buried AS (
    UPDATE outbox_done d SET outcome = 'discarded', finished_at = clock_timestamp()
    WHERE d.event_id = $1 AND ($2 IS NULL OR d.sink = $2) AND d.outcome = 'dead'
    RETURNING d.event_id, d.sink),
logged AS (
    INSERT INTO audit_log (who, action, record_id, event_id, why, detail)
    SELECT $3, 'event.discard', m.record_id, m.id, $4,
           json_build_object('sink', b.sink, 'status', 'dead')::text
    FROM buried b JOIN outbox_messages m ON m.id = b.event_id)
SELECT sink, 'dead' AS was FROM buried";

/// What is done to one event, one after the other. What is pending comes first: what comes back from the done rows is due
/// already.
const REDELIVER: &[&str] = &[HASTEN, REDELIVER_ONE, REDELIVER_UNWANTED];
const DISCARD: &[&str] = &[DISCARD_PENDING, DISCARD_DEAD];

// Those of them that have an ordering key.
const ORDERED: &str = "-- discarded_in_order
SELECT d.sink, d.event_id, m.ordering_key
FROM outbox_done d JOIN outbox_messages m ON m.id = d.event_id
WHERE d.event_id = ANY ($1) AND d.outcome = 'discarded' AND m.ordering_key IS NOT NULL
ORDER BY d.sink, m.ordering_key";

/// Lets those go on that waited behind discarded events. To be called in the transaction that discarded them, after it did.
async fn free_keys(transaction: &mut Transaction<'_>, ids: &[Uuid]) -> Result<(), RunError> {
    let mut by_sink: BTreeMap<String, Ended> = BTreeMap::new();
    for row in &transaction.run(ORDERED, &[&ids]).await? {
        let ended = by_sink.entry(get(row, "sink")?).or_default();
        ended.add(get(row, "event_id")?, get(row, "ordering_key")?, false);
    }
    for (sink, ended) in &by_sink {
        order::pass_on(transaction, sink, ended).await?;
    }
    Ok(())
}

// The planner may have met the tables when little was dead. Each piece would read and sort all of them then.
const BEGIN: &str = "-- begin_events
BEGIN ISOLATION LEVEL READ COMMITTED;
SET LOCAL jit = off;
SET LOCAL enable_seqscan = off;
SET LOCAL enable_bitmapscan = off;
SET LOCAL enable_hashjoin = off;
SET LOCAL enable_mergejoin = off";

/// Does it.
pub(super) async fn act(
    pool: &Pool,
    action: EventAction,
    which: &Chosen,
    by: &Operator,
) -> Result<Touched, Error> {
    let (id, sink, not_taken) = match which {
        Chosen::One { id, sink } => (*id, sink.as_deref(), false),
        Chosen::NotTaken { id } => (*id, None, true),
        Chosen::Dead(filter) => {
            return all_dead(pool, action, filter, by).await.map(Touched::many);
        }
    };
    pool.run(&One { action, id, sink, not_taken, by }).await.map(Touched::one)
}

struct One<'a> {
    action: EventAction,
    id: Uuid,
    sink: Option<&'a str>,
    /// Of a redelivery: not to those who took it.
    not_taken: bool,
    by: &'a Operator,
}

#[async_trait]
impl Retryable for One<'_> {
    /// The sinks towards which something was done, and its status there before.
    type Done = Vec<(String, EventStatus)>;

    async fn run(&self, connection: &mut Connection) -> Result<Self::Done, RunError> {
        let params: Params<'_> =
            &[&self.id, &self.sink, &self.by.who, &self.by.why, &self.not_taken];
        let mut transaction = connection.begin(BEGIN).await?;
        let mut all = Vec::new();
        let statements = match self.action {
            EventAction::Redeliver => REDELIVER,
            EventAction::Discard => DISCARD,
        };
        for sql in statements {
            for row in &transaction.run(sql, params).await? {
                all.push((get(row, "sink")?, row.parsed("was", EventStatus::parse)?));
            }
        }
        if self.action == EventAction::Discard && !all.is_empty() {
            free_keys(&mut transaction, &[self.id]).await?;
        }
        fault::point(Point::Audited).await;
        transaction.commit().await?;
        Ok(all)
    }
}

/// Dead rows from `$1` on by the filter in `$2` to `$6`.
macro_rules! dead_rows {
    () => {
        "FROM outbox_done d JOIN outbox_messages m ON m.id = d.event_id
WHERE d.outcome = 'dead' AND ($1 IS NULL OR d.finished_at <= $1) AND ($2 IS NULL OR d.sink = $2)
  AND ($3 IS NULL OR m.event_type = $3) AND ($4 IS NULL OR m.tenant_id = $4)
  AND ($5 IS NULL OR m.operation = $5)
  AND ($6 IS NULL OR m.created_at >= (SELECT clock_timestamp() - make_interval(secs => $6)))"
    };
}

const PAGE: &str = concat!(
    "-- dead_page
SELECT d.event_id, d.sink, d.claim_no, d.finished_at
",
    dead_rows!(),
    "
  AND ($7 IS NULL OR (d.sink, d.finished_at, d.event_id) > ($7, $8, $9))
ORDER BY d.sink, d.finished_at, d.event_id LIMIT $10"
);

const COUNT: &str = concat!(
    "-- count_dead
SELECT count(*) AS count ",
    dead_rows!()
);

/// The rows of a page, as they were seen.
macro_rules! page {
    () => {
        "WITH found AS MATERIALIZED (
    SELECT x.*, 'dead' AS outcome FROM unnest($1::uuid[], $2::text[], $2::text[], $3::int[])
      AS x(event_id, sink, new_sink, claim_no))"
    };
}

const REDELIVER_PAGE: &str = concat!(
    "-- redeliver_page
",
    page!(),
    requeue!(),
    ",
told AS (
    INSERT INTO audit_events (event_id, sink, audit_id)
    SELECT event_id, sink, $4 FROM queued ORDER BY event_id, sink ON CONFLICT DO NOTHING)
SELECT count(*) AS count FROM queued"
);

const DISCARD_PAGE: &str = concat!(
    "-- discard_page
",
    page!(),
    ",
seen AS MATERIALIZED (
    SELECT d.event_id, d.sink FROM outbox_done d JOIN found f
      ON f.event_id = d.event_id AND f.sink = d.sink AND f.claim_no = d.claim_no
    WHERE d.outcome = 'dead' ORDER BY d.event_id, d.sink FOR UPDATE OF d),
buried AS (
    UPDATE outbox_done d SET outcome = 'discarded', finished_at = clock_timestamp() FROM seen s
    WHERE d.event_id = s.event_id AND d.sink = s.sink AND d.outcome = 'dead'
    RETURNING d.event_id, d.sink),
told AS (
    INSERT INTO audit_events (event_id, sink, audit_id)
    SELECT event_id, sink, $4 FROM buried ORDER BY event_id, sink ON CONFLICT DO NOTHING)
SELECT count(*) AS count FROM buried"
);

const AUDIT: &str = "-- audit_events
INSERT INTO audit_log (id, who, action, why, detail) VALUES ($1, $2, $3, $4, $5)
ON CONFLICT (id) DO UPDATE SET detail = excluded.detail";

const NOW: &str = "-- now
SELECT clock_timestamp() AS now";

/// Where a walk over the dead is: the last row of the page before.
#[derive(Clone, Debug, Default)]
struct Cursor {
    sink: Option<String>,
    at: Option<SystemTime>,
    event: Option<Uuid>,
}

/// A page of dead rows, and what is done to them.
struct Piece<'a> {
    action: EventAction,
    filter: &'a DeadFilter,
    by: &'a Operator,
    /// Those that were dead by then, so that it ends.
    before: SystemTime,
    after: Cursor,
    audit: Uuid,
    /// Changed by the pieces before.
    total: u64,
}

/// What a piece came to.
struct Worked {
    changed: u64,
    /// The last row that was looked at; `None`: there is no further page.
    next: Option<Cursor>,
}

async fn all_dead(
    pool: &Pool,
    action: EventAction,
    filter: &DeadFilter,
    by: &Operator,
) -> Result<u64, Error> {
    let rows = pool.read(NOW, &[]).await?;
    let Some(now) = rows.first() else { return Ok(0) };
    let before = get(now, "now")?;
    let (audit, after) = (Uuid::now_v7(), Cursor::default());
    let mut piece = Piece { action, filter, by, before, after, audit, total: 0 };
    loop {
        let worked = pool.run(&piece).await.map_err(|error| in_part(error, piece.total))?;
        piece.total += worked.changed;
        match worked.next {
            Some(cursor) => piece.after = cursor,
            None => return Ok(piece.total),
        }
    }
}

/// After the first piece an error does not mean that nothing was changed.
fn in_part(error: Error, total: u64) -> Error {
    if total == 0 { error } else { Error::InDoubt(error.into()) }
}

#[async_trait]
impl Retryable for Piece<'_> {
    type Done = Worked;

    async fn run(&self, connection: &mut Connection) -> Result<Worked, RunError> {
        let mut transaction = connection.begin(BEGIN).await?;
        let page = self.page(&mut transaction).await?;
        let mut columns: (Vec<Uuid>, Vec<&str>, Vec<i32>) = Default::default();
        for row in &page {
            columns.0.push(get(row, "event_id")?);
            columns.1.push(get(row, "sink")?);
            columns.2.push(get(row, "claim_no")?);
        }
        let sql = match self.action {
            EventAction::Redeliver => REDELIVER_PAGE,
            EventAction::Discard => DISCARD_PAGE,
        };
        let params: Params<'_> = &[&columns.0, &columns.1, &columns.2, &self.audit];
        let changed = rows::count(&transaction.run(sql, params).await?)?;
        if changed > 0 {
            self.note(&mut transaction, self.total + changed).await?;
        }
        if self.action == EventAction::Discard {
            free_keys(&mut transaction, &columns.0).await?;
        }
        fault::point(Point::Audited).await;
        transaction.commit().await?;
        let full = i64::try_from(page.len()).unwrap_or(PIECE) >= PIECE;
        let next = page.last().filter(|_| full).map(cursor).transpose()?;
        Ok(Worked { changed, next })
    }
}

fn cursor(row: &Row) -> Result<Cursor, Error> {
    Ok(Cursor {
        sink: get(row, "sink")?,
        at: get(row, "finished_at")?,
        event: get(row, "event_id")?,
    })
}

impl Piece<'_> {
    async fn page(&self, transaction: &mut Transaction<'_>) -> Result<Vec<Row>, RunError> {
        let (filter, after) = (self.filter, &self.after);
        let since = filter.since.map(seconds);
        let params: Params<'_> = &[
            &self.before,
            &filter.sink,
            &filter.kind,
            &filter.tenant,
            &filter.operation,
            &since,
            &after.sink,
            &after.at,
            &after.event,
            &PIECE,
        ];
        transaction.run(PAGE, params).await
    }

    async fn note(&self, transaction: &mut Transaction<'_>, total: u64) -> Result<(), RunError> {
        let (action, detail) = (self.action.name(), self.filter.detail(total));
        let params: Params<'_> = &[&self.audit, &self.by.who, &action, &self.by.why, &detail];
        transaction.run(AUDIT, params).await.map(drop)
    }
}

pub(super) async fn count_dead(pool: &Pool, filter: &DeadFilter) -> Result<u64, Error> {
    let (before, since) = (None::<SystemTime>, filter.since.map(seconds));
    let params: Params<'_> =
        &[&before, &filter.sink, &filter.kind, &filter.tenant, &filter.operation, &since];
    rows::count(&pool.read(COUNT, params).await?)
}

const ATTEMPTS_OF: &str = "-- attempts_of
SELECT sink, claim_no, attempt, at, status, error FROM outbox_attempts WHERE event_id = $1
UNION ALL
SELECT sink, claim_no, attempts, finished_at, last_status, NULL FROM outbox_done
WHERE event_id = $1 AND outcome = 'sent'
ORDER BY sink, claim_no";

pub(super) async fn attempts_of(pool: &Pool, event: Uuid) -> Result<Vec<AttemptRow>, Error> {
    let rows = pool.read(ATTEMPTS_OF, &[&event]).await?;
    rows.iter().map(read::attempt_row).collect()
}
