//! Claims and verdicts in the order of ordering keys.
//!
//! A key's turn is a row of `outbox_turns`: its primary key is what keeps two events of one key from being claimed at
//! once, whoever claims. What must stay true:
//!
//! - Only the first event of a key, by `(created_at, seq, event_id)` over both lanes, gets the turn. It is looked for in a
//!   statement after the one that locked the window, on a newer snapshot: on the older one a verdict that came in
//!   between would be missed, and its follower would be deferred for nothing.
//! - A follower is deferred only while its key has no turn, or under the turn's lock. A verdict gives the turn up first
//!   and looks for the next event then, so it sees each event that was deferred before, and wakes the first.
//! - Nobody who holds rows of the queue waits for a turn that a verdict holds: locked turns are passed by.
//!
//! Events are deferred for long, not until their time: only a verdict makes them due, so that a hundred thousand behind
//! one that fails are looked at once. The long time ends by itself should a row vanish by hand. Sooner than that,
//! [`wake_deferred`] finds what waits for nobody: a verdict of a relay with another order wakes nobody, and who blocked a key
//! may not do so any more. To tell what was deferred from what pauses after a failure: the former is in the lane of fresh
//! events, or is nobody's (`claimed_by`), which a verdict leaves as it is.

use std::time::{Duration, Instant};

use async_trait::async_trait;
use tokio_postgres::Row;
use uuid::Uuid;

use super::connection::{Connection, Transaction};
use super::param::Params;
use super::pool::{Pool, Retryable};
use super::queue::{
    BEGIN_BY_INDEX, Beginning, Columns, FINISH, FREE, beginning, claimable, claimed, lane,
    not_before, owner_lives, row_of,
};
use super::rows::{self, get, seconds};
use crate::store::batch::RunError;
use crate::store::{
    Acknowledgement, Claim, Claimed, Error, Lane, Look, OnDead, Order, Reclaim, Verdict, Woken,
};

/// How many rows are looked at together: first twice as many as are asked for, since each is locked, and if none of them can
/// be claimed, many.
const WINDOW_MIN: u32 = 32;
const WINDOW_MAX: u32 = 512;

/// How long a claim goes on looking while all that it finds has to wait for others.
const LOOK_MAX: Duration = Duration::from_secs(1);

/// For how long followers are deferred at most; half of it at least, so that they do not come back together.
const DEFER_MAX: Duration = Duration::from_secs(600);

/// How many keys, or events, one piece of [`wake_deferred`] looks at.
const PIECE: i32 = 1000;

const WINDOW_OF: &str = concat!(
    "-- claim_window
SELECT event_id, ordering_key FROM outbox_queue
WHERE ",
    claimable!("$1", "$2", "$5"),
    not_before!("$4", "$6"),
    "
ORDER BY next_attempt_at, event_id LIMIT $3 FOR UPDATE OF outbox_queue SKIP LOCKED"
);

const LOCK_TURNS: &str = "-- lock_turns
SELECT t.ordering_key FROM outbox_turns t
WHERE t.sink = $1 AND t.ordering_key = ANY ($2::text[]) FOR UPDATE SKIP LOCKED";

// `heads`, `turns`: once for each key, not for each of its events: what was deleted of a key and somebody's snapshot still
// keeps is walked over each time. `first`: nothing of the key stands before it. `chosen`: as many of them as are asked for. A
// turn is taken where there is none, or where the one that we hold locked is over; its condition is checked on the row as it
// stands when it is locked. One statement changes the queue twice, never the same row.
const CLAIM_IN_ORDER: &str = concat!(
    "-- claim_in_order
WITH heads AS MATERIALIZED (
    SELECT f.event_id FROM unnest($10::text[]) AS k(ordering_key) CROSS JOIN LATERAL (
        SELECT f.event_id FROM outbox_queue f
        WHERE f.sink = $1 AND f.ordering_key = k.ordering_key
        ORDER BY f.created_at, f.seq, f.event_id LIMIT 1) AS f),
turns AS MATERIALIZED (
    SELECT t.ordering_key FROM outbox_turns t
    WHERE t.sink = $1 AND t.ordering_key = ANY ($10::text[])),
w AS MATERIALIZED (
    SELECT q.place, q.event_id, q.ordering_key, q.next_attempt_at,
           q.ordering_key IS NULL OR q.event_id IN (SELECT event_id FROM heads) AS first,
           q.ordering_key = ANY ($3::text[]) AS locked,
           q.ordering_key IN (SELECT ordering_key FROM turns) AS turn
    FROM unnest($2::uuid[]) AS x(event_id)
    CROSS JOIN ",
    row_of!("x", "$1"),
    "
    WHERE q.event_id = x.event_id AND q.sink = $1),
chosen AS MATERIALIZED (
    SELECT * FROM w WHERE first ORDER BY next_attempt_at, event_id LIMIT $4),
taken AS (
    INSERT INTO outbox_turns AS t (sink, ordering_key, event_id, lease_until, claimed_by)
    SELECT $1, c.ordering_key, c.event_id, clock_timestamp() + make_interval(secs => $5), $6
    FROM chosen c WHERE c.ordering_key IS NOT NULL AND (c.locked OR NOT c.turn)
    ORDER BY c.ordering_key
    ON CONFLICT (sink, ordering_key) DO UPDATE
    SET event_id = excluded.event_id, lease_until = excluded.lease_until,
        claimed_by = excluded.claimed_by
    WHERE t.event_id = excluded.event_id
       OR (t.lease_until <> 'infinity'
           AND (t.lease_until <= clock_timestamp() OR ($7 AND NOT ",
    owner_lives!("t.claimed_by"),
    ")))
       OR (t.lease_until = 'infinity'
           AND (NOT $8 OR NOT EXISTS (
               SELECT FROM outbox_done d
               WHERE d.event_id = t.event_id AND d.sink = t.sink AND d.outcome = 'dead')))
    RETURNING t.event_id),
mine AS (
    SELECT place, event_id FROM chosen
    WHERE ordering_key IS NULL OR event_id IN (SELECT event_id FROM taken)),
u AS (
    UPDATE outbox_queue q
    SET lease_until = clock_timestamp() + make_interval(secs => $5), claim_no = q.claim_no + 1,
        claimed_by = $6
    FROM mine WHERE q.ctid = mine.place
    RETURNING q.event_id, q.claim_no, q.attempts, q.refusals, q.created_at),
deferred AS (
    UPDATE outbox_queue q
    SET next_attempt_at = clock_timestamp() + make_interval(secs => $9 * (0.5 + random() / 2)),
        claimed_by = CASE WHEN q.lease_until > clock_timestamp() THEN q.claimed_by END
    FROM w
    WHERE q.ctid = w.place AND w.ordering_key IS NOT NULL
      AND (w.locked OR NOT w.turn)
      AND (NOT w.first OR w.event_id IN (SELECT event_id FROM chosen))
      AND w.event_id NOT IN (SELECT event_id FROM mine)
    RETURNING q.event_id)
SELECT p.deferred, u.event_id, u.claim_no, u.attempts, u.refusals,
       extract(epoch FROM clock_timestamp() - u.created_at)::float8 AS age,
       m.event_type, m.tenant_id, m.operation, m.idempotency_key, m.payload
FROM (SELECT count(*) AS deferred FROM deferred) p
LEFT JOIN u ON true LEFT JOIN outbox_messages m ON m.id = u.event_id
ORDER BY u.created_at, m.record_id, m.seq, u.event_id"
);

/// What one look found: events that are claimed, and whether there is reason to look again at once.
struct OrderedClaims {
    claimed: Vec<Claimed>,
    again: bool,
}

/// Claims the first of each key, and goes on while all that is due has to wait for others: what is behind it is due, too.
/// Not from a place in the middle: those of one key would be deferred there by the thousand, and the first of them stands
/// before.
pub(super) async fn claim(
    pool: &Pool,
    claim: &Claim,
    on_dead: OnDead,
) -> Result<Vec<Claimed>, Error> {
    let end = Instant::now() + LOOK_MAX;
    let once = matches!(claim.look, Look::From(_));
    let mut window = claim.limit.saturating_mul(2).max(WINDOW_MIN);
    loop {
        let OrderedClaims { claimed, again } =
            pool.run(&ClaimingInOrder { claim, on_dead, window }).await?;
        window = window.max(WINDOW_MAX);
        if !claimed.is_empty() || !again || once || Instant::now() >= end {
            return Ok(claimed);
        }
    }
}

struct ClaimingInOrder<'a> {
    claim: &'a Claim,
    on_dead: OnDead,
    window: u32,
}

#[async_trait]
impl Retryable for ClaimingInOrder<'_> {
    type Done = OrderedClaims;

    async fn run(&self, connection: &mut Connection) -> Result<OrderedClaims, RunError> {
        let Claim { sink, lane: which, order: _, limit, owner, lease, reclaim, look: _ } =
            self.claim;
        let mut transaction = connection.begin(BEGIN_BY_INDEX).await?;
        let Some(Beginning { floor, place }) = beginning(&mut transaction, self.claim).await?
        else {
            transaction.commit().await?;
            return Ok(OrderedClaims { claimed: Vec::new(), again: false });
        };
        let (orphans, window) = (*reclaim == Reclaim::ExpiredOrOrphaned, self.window);
        let params: Params<'_> =
            &[sink, &lane(*which), &i64::from(window), &floor, &orphans, &place];
        let rows = transaction.run(WINDOW_OF, params).await?;
        if rows.is_empty() || *limit == 0 {
            transaction.commit().await?;
            return Ok(OrderedClaims { claimed: Vec::new(), again: false });
        }
        let (ids, keys) = identities(&rows)?;
        let locked = if keys.is_empty() {
            Vec::new()
        } else {
            let params: Params<'_> = &[sink, &keys];
            let rows = transaction.run(LOCK_TURNS, params).await?;
            rows.iter().map(|row| get(row, "ordering_key")).collect::<Result<Vec<String>, _>>()?
        };
        let params: Params<'_> = &[
            sink,
            &ids,
            &locked,
            &i64::from(*limit),
            &seconds(*lease),
            owner,
            &orphans,
            &(self.on_dead == OnDead::Block),
            &seconds(DEFER_MAX),
            &keys,
        ];
        let found = transaction.run(CLAIM_IN_ORDER, params).await?;
        transaction.commit().await?;
        found_of(&found, ids.len() >= usize::try_from(window).unwrap_or(usize::MAX))
    }
}

/// The events of a window, and the keys among them, each once.
fn identities(rows: &[Row]) -> Result<(Vec<Uuid>, Vec<String>), Error> {
    let ids = rows.iter().map(|row| get(row, "event_id")).collect::<Result<_, _>>()?;
    let key = |row: &Row| get::<Option<String>>(row, "ordering_key");
    let keys = rows.iter().map(key).collect::<Result<Vec<_>, _>>()?;
    let mut keys: Vec<String> = keys.into_iter().flatten().collect();
    keys.sort_unstable();
    keys.dedup();
    Ok((ids, keys))
}

/// `full`: there may be more behind the window.
fn found_of(rows: &[Row], full: bool) -> Result<OrderedClaims, RunError> {
    let deferred: i64 = rows.first().map_or(Ok(0), |row| get(row, "deferred"))?;
    let mut taken = Vec::with_capacity(rows.len());
    for row in rows {
        if get::<Option<Uuid>>(row, "event_id")?.is_some() {
            taken.push(claimed(row)?);
        }
    }
    Ok(OrderedClaims { claimed: taken, again: full && deferred > 0 })
}

// Sorted, as all who wait for turns take them. A turn that was taken again for the same event while its lock was waited for is
// at another place, and stands: this verdict's claim was over, and the turn's new claim has a verdict of its own.
const END_TURNS: &str = "-- end_turns
WITH held AS MATERIALIZED (
    SELECT t.ctid AS place, t.event_id FROM outbox_turns t
    WHERE t.sink = $1 AND t.ordering_key = ANY ($3::text[]) AND t.event_id = ANY ($2::uuid[])
    ORDER BY t.ordering_key FOR UPDATE OF t),
over AS MATERIALIZED (
    SELECT held.place, x.blocks
    FROM held JOIN unnest($2::uuid[], $4::bool[]) AS x(event_id, blocks) USING (event_id)),
dead AS (
    UPDATE outbox_turns t SET lease_until = 'infinity', claimed_by = NULL FROM over o
    WHERE t.ctid = o.place AND o.blocks)
DELETE FROM outbox_turns t USING over o
WHERE t.ctid = o.place AND NOT o.blocks";

// A function of the schema, which says why and how. A statement of its own, hence a newer snapshot than that of the turns' end.
// `$3`: those that this very verdict frees keep the time that it gave them.
const WAKE: &str = "-- wake
SELECT oncegate_wake($1, $2, $3)";

/// An event that is no longer in flight, or no longer pending.
#[derive(Default)]
pub(super) struct Ended {
    ids: Vec<Uuid>,
    keys: Vec<String>,
    blocks: Vec<bool>,
}

impl Ended {
    /// Notes an event with its key; `blocks`: those behind it shall wait.
    pub(super) fn add(&mut self, id: Uuid, key: String, blocks: bool) {
        self.ids.push(id);
        self.keys.push(key);
        self.blocks.push(blocks);
    }
}

/// Gives up the turns of events that have ended, or are free again, and makes the next of their keys due. To be called in
/// the transaction that ended or freed them, after it did.
pub(super) async fn pass_on(
    transaction: &mut Transaction<'_>,
    sink: &str,
    ended: &Ended,
) -> Result<(), RunError> {
    if ended.ids.is_empty() {
        return Ok(());
    }
    let params: Params<'_> = &[&sink, &ended.ids, &ended.keys, &ended.blocks];
    transaction.run(END_TURNS, params).await?;
    let params: Params<'_> = &[&sink, &ended.keys, &ended.ids];
    transaction.run(WAKE, params).await?;
    Ok(())
}

// Their keys are woken by what follows.
const UNBLOCK: &str = "-- unblock
WITH over AS MATERIALIZED (
    SELECT t.ordering_key FROM outbox_turns t
    WHERE t.sink = $1 AND t.lease_until = 'infinity'
    ORDER BY t.ordering_key LIMIT $2 FOR UPDATE SKIP LOCKED)
DELETE FROM outbox_turns t
WHERE t.sink = $1 AND t.ordering_key = ANY (ARRAY (SELECT ordering_key FROM over))
  AND t.lease_until = 'infinity'";

/// What was deferred and is in nobody's hands.
macro_rules! deferred {
    () => {
        "q.next_attempt_at > clock_timestamp() AND q.lease_until <= clock_timestamp()
      AND (q.lane = 0 OR q.claimed_by IS NULL)"
    };
}

// From key to key by the index, however many events stand behind the first. Nobody is waited for: who holds a row is about
// to change it. The turn and its outcome are scalar sub-selects, which are never made into a join or a hash over all of them.
const WAKE_HEADS: &str = concat!(
    "-- wake_heads
WITH RECURSIVE heads AS (
    (SELECT q.ordering_key, q.ctid AS place, q.event_id, 1 AS n FROM outbox_queue q
     WHERE q.sink = $1 AND q.ordering_key IS NOT NULL AND ($2 IS NULL OR q.ordering_key > $2)
     ORDER BY q.ordering_key, q.created_at, q.seq, q.event_id LIMIT 1)
    UNION ALL
    SELECT f.ordering_key, f.place, f.event_id, h.n + 1 FROM heads h CROSS JOIN LATERAL (
        SELECT q.ordering_key, q.ctid AS place, q.event_id FROM outbox_queue q
        WHERE q.sink = $1 AND q.ordering_key > h.ordering_key
        ORDER BY q.ordering_key, q.created_at, q.seq, q.event_id LIMIT 1) AS f
    WHERE h.n < $3),
waits AS MATERIALIZED (
    SELECT q.ctid AS place FROM heads h JOIN outbox_queue q ON q.ctid = h.place
    WHERE q.event_id = h.event_id AND ",
    deferred!(),
    "
      AND (
          SELECT true FROM outbox_turns t
          WHERE t.sink = $1 AND t.ordering_key = h.ordering_key AND t.event_id <> h.event_id
            AND CASE WHEN t.lease_until = 'infinity' THEN $4 AND (
                    SELECT d.outcome FROM outbox_done d
                    WHERE d.event_id = t.event_id AND d.sink = t.sink) = 'dead'
                ELSE t.lease_until > clock_timestamp() END) IS NULL
    FOR UPDATE OF q SKIP LOCKED),
woken AS (
    UPDATE outbox_queue q SET next_attempt_at = clock_timestamp() FROM waits w
    WHERE q.ctid = w.place
    RETURNING q.event_id)
SELECT (SELECT count(*) FROM woken) AS count,
       (SELECT h.ordering_key FROM heads h WHERE h.n = $3) AS next"
);

const WAKE_ALL: &str = concat!(
    "-- wake_all
WITH waits AS MATERIALIZED (
    SELECT q.ctid AS place FROM outbox_queue q
    WHERE q.sink = $1 AND q.lane = $4 AND q.ordering_key IS NOT NULL AND ",
    deferred!(),
    "
      AND q.next_attempt_at > (SELECT clock_timestamp())
      AND q.next_attempt_at <= (SELECT clock_timestamp() + make_interval(secs => $3))
    ORDER BY q.next_attempt_at, q.event_id LIMIT $2 FOR UPDATE OF q SKIP LOCKED),
woken AS (
    UPDATE outbox_queue q SET next_attempt_at = clock_timestamp() FROM waits w
    WHERE q.ctid = w.place
    RETURNING q.event_id)
SELECT count(*) AS count FROM woken"
);

/// A piece of what waits for nobody any more; see the verb in `store/outbox.rs`.
pub(super) async fn wake_deferred(
    pool: &Pool,
    sink: &str,
    order: Order,
    from: Option<&str>,
) -> Result<Woken, Error> {
    pool.run(&WakingDeferred { sink, order, from }).await
}

struct WakingDeferred<'a> {
    sink: &'a str,
    order: Order,
    from: Option<&'a str>,
}

#[async_trait]
impl Retryable for WakingDeferred<'_> {
    type Done = Woken;

    async fn run(&self, connection: &mut Connection) -> Result<Woken, RunError> {
        let blocks = self.order == Order::Key(OnDead::Block);
        let mut transaction = connection.begin(BEGIN_BY_INDEX).await?;
        if !blocks {
            let params: Params<'_> = &[&self.sink, &i64::from(PIECE)];
            transaction.run(UNBLOCK, params).await?;
        }
        let done = match self.order {
            Order::None => self.all(&mut transaction).await?,
            Order::Key(_) => self.heads(&mut transaction, blocks).await?,
        };
        transaction.commit().await?;
        Ok(done)
    }
}

impl WakingDeferred<'_> {
    async fn all(&self, transaction: &mut Transaction<'_>) -> Result<Woken, RunError> {
        let mut done = Woken::default();
        for which in [Lane::Fresh, Lane::Retry] {
            let params: Params<'_> =
                &[&self.sink, &i64::from(PIECE), &seconds(DEFER_MAX), &lane(which)];
            let count = rows::count(&transaction.run(WAKE_ALL, params).await?)?;
            done.count += count;
            // What was woken is not found again: a piece begins where the last one did.
            if count >= u64::from(PIECE.unsigned_abs()) {
                done.next = Some(String::new());
            }
        }
        Ok(done)
    }

    async fn heads(
        &self,
        transaction: &mut Transaction<'_>,
        blocks: bool,
    ) -> Result<Woken, RunError> {
        let params: Params<'_> = &[&self.sink, &self.from, &PIECE, &blocks];
        let rows = transaction.run(WAKE_HEADS, params).await?;
        let next = rows.first().map_or(Ok(None), |row| get(row, "next"))?;
        Ok(Woken { count: rows::count(&rows)?, next })
    }
}

/// Verdicts, their turns' ends and who is next: one transaction.
pub(super) struct AcknowledgingInOrder<'a> {
    pub(super) sink: &'a str,
    pub(super) on_dead: OnDead,
    pub(super) verdicts: &'a [Acknowledgement],
    pub(super) finished: &'a Columns,
    pub(super) freed: &'a Columns,
}

#[async_trait]
impl Retryable for AcknowledgingInOrder<'_> {
    type Done = Vec<Uuid>;

    async fn run(&self, connection: &mut Connection) -> Result<Vec<Uuid>, RunError> {
        let mut transaction = connection.begin(BEGIN_BY_INDEX).await?;
        let mut rows = Vec::new();
        for (sql, columns) in [(FINISH, self.finished), (FREE, self.freed)] {
            if !columns.is_empty() {
                rows.extend(transaction.run(sql, &columns.params(sql, &self.sink)).await?);
            }
        }
        let (mut found, mut ended) = (Vec::with_capacity(rows.len()), Ended::default());
        for row in &rows {
            let id: Uuid = get(row, "event_id")?;
            found.push(id);
            if let Some(key) = get(row, "ordering_key")? {
                ended.add(id, key, self.blocks(id));
            }
        }
        pass_on(&mut transaction, self.sink, &ended).await?;
        transaction.commit().await?;
        Ok(found)
    }
}

impl AcknowledgingInOrder<'_> {
    fn blocks(&self, id: Uuid) -> bool {
        let dead = |one: &Acknowledgement| {
            one.event_id == id && matches!(one.verdict, Verdict::Dead { .. })
        };
        self.on_dead == OnDead::Block && self.verdicts.iter().any(dead)
    }
}
