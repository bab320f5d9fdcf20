//! Claims and verdicts in the order of ordering keys.
//!
//! A key's turn is a row of `outbox_turns`: its primary key is what keeps two events of one key from being claimed at
//! once, whoever claims. What must stay true:
//!
//! - Only the first event of a key, by `(created_at, seq, event_id)` over both lanes, gets the turn. It is looked for in a
//!   statement after the one that locked the window, on a newer snapshot: on the older one a verdict that came in
//!   between would be missed, and its follower would be put off for nothing.
//! - A follower is put off only while its key has no turn, or under the turn's lock. A verdict gives the turn up first
//!   and looks for the next event then, so it sees each event that was put off before, and wakes the first.
//! - Nobody who holds rows of the queue waits for a turn that a verdict holds: locked turns are passed by.
//!
//! Events are put off for long, not until their time: only a verdict makes them due, so that a hundred thousand behind
//! one that fails are looked at once. The long time ends by itself should a row vanish by hand.

use std::time::{Duration, Instant};

use async_trait::async_trait;
use tokio_postgres::Row;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::door::{Connection, Door, Params, Task, Transaction};
use super::outbox::{
    BEGIN_CLAIM, BEGIN_LOOK, Columns, FINISH, FLOOR, FREE, claimable, claimed, lane, owner_lives,
    row_of,
};
use super::rows::get;
use super::seconds;
use crate::store::batch::RunError;
use crate::store::{Acknowledgement, Claim, Claimed, Error, OnDead, Over, Verdict};

/// How many rows are looked at together: first twice as many as are asked for, since each is locked, and if none of them can
/// be claimed, many.
const WINDOW_MIN: u32 = 32;
const WINDOW_MAX: u32 = 512;

/// How long a claim goes on looking while all that it finds has to wait for others.
const LOOK_MAX: Duration = Duration::from_secs(1);

/// For how long followers are put off at most; half of it at least, so that they do not come back together.
const PUT_OFF: Duration = Duration::from_secs(600);

// What comes after it in its transaction may sort again.
const WINDOW_OF: &str = concat!(
    "-- claim_window
SELECT event_id, ordering_key, set_config('enable_sort', 'on', true) FROM outbox_queue
WHERE ",
    claimable!("$1", "$2", "$4", "$5"),
    "
ORDER BY next_attempt_at, event_id LIMIT $3 FOR UPDATE OF outbox_queue SKIP LOCKED"
);

const LOCK_TURNS: &str = "-- lock_turns
SELECT t.ordering_key FROM outbox_turns t
WHERE t.sink = $1 AND t.ordering_key = ANY ($2::text[]) FOR UPDATE SKIP LOCKED";

// `first`: nothing of the key stands before it. `chosen`: as many of them as are asked for. A turn is taken where there is
// none, or where the one that we hold locked is over; its condition is checked on the row as it stands when it is locked.
// One statement changes the queue twice, never the same row.
const CLAIM_IN_ORDER: &str = concat!(
    "-- claim_in_order
WITH w AS MATERIALIZED (
    SELECT q.place, q.event_id, q.ordering_key, q.next_attempt_at,
           q.ordering_key IS NULL OR q.event_id = (
               SELECT f.event_id FROM outbox_queue f
               WHERE f.sink = $1 AND f.ordering_key = q.ordering_key
               ORDER BY f.created_at, f.seq, f.event_id LIMIT 1) AS first,
           q.ordering_key = ANY ($3::text[]) AS locked,
           EXISTS (SELECT FROM outbox_turns t
                   WHERE t.sink = $1 AND t.ordering_key = q.ordering_key) AS turn
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
put_off AS (
    UPDATE outbox_queue q
    SET next_attempt_at = clock_timestamp() + make_interval(secs => $9 * (0.5 + random() / 2))
    FROM w
    WHERE q.ctid = w.place AND w.ordering_key IS NOT NULL
      AND (w.locked OR NOT w.turn)
      AND (NOT w.first OR w.event_id IN (SELECT event_id FROM chosen))
      AND w.event_id NOT IN (SELECT event_id FROM mine)
    RETURNING q.event_id)
SELECT p.put_off, u.event_id, u.claim_no, u.attempts, u.refusals,
       extract(epoch FROM clock_timestamp() - u.created_at)::float8 AS age,
       m.event_type, m.tenant_id, m.operation, m.idempotency_key, m.payload
FROM (SELECT count(*) AS put_off FROM put_off) p
LEFT JOIN u ON true LEFT JOIN outbox_messages m ON m.id = u.event_id
ORDER BY u.created_at, m.record_id, m.seq, u.event_id"
);

/// What one look found: events that are claimed, and whether there is reason to look again at once.
struct Look {
    claimed: Vec<Claimed>,
    again: bool,
}

/// Claims the first of each key, and goes on while all that is due has to wait for others: what is behind it is due, too.
pub(super) async fn claim(
    door: &Door,
    claim: &Claim,
    on_dead: OnDead,
) -> Result<Vec<Claimed>, Error> {
    let end = Instant::now() + LOOK_MAX;
    let mut window = claim.limit.saturating_mul(2).max(WINDOW_MIN);
    loop {
        let Look { claimed, again } = door.run(&ClaimingInOrder { claim, on_dead, window }).await?;
        window = window.max(WINDOW_MAX);
        if !claimed.is_empty() || !again || Instant::now() >= end {
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
impl Task for ClaimingInOrder<'_> {
    type Done = Look;

    async fn run(&self, connection: &mut Connection) -> Result<Look, RunError> {
        let Claim { sink, lane: which, order: _, limit, owner, lease, over, sweep } = self.claim;
        let floor = if *sweep { Duration::MAX } else { FLOOR };
        let (judges, window) = (*over == Over::EndedOrDead, self.window);
        let params: Params<'_> = &[
            (sink, Type::TEXT),
            (&lane(*which), Type::INT2),
            (&i64::from(window), Type::INT8),
            (&seconds(floor), Type::FLOAT8),
            (&judges, Type::BOOL),
        ];
        let mut transaction = connection.begin(BEGIN_LOOK).await?;
        let rows = transaction.run(WINDOW_OF, params).await?;
        if rows.is_empty() || *limit == 0 {
            transaction.commit().await?;
            return Ok(Look { claimed: Vec::new(), again: false });
        }
        let (ids, keys) = identities(&rows)?;
        let locked = if keys.is_empty() {
            Vec::new()
        } else {
            let params: Params<'_> = &[(sink, Type::TEXT), (&keys, Type::TEXT_ARRAY)];
            let rows = transaction.run(LOCK_TURNS, params).await?;
            rows.iter().map(|row| get(row, "ordering_key")).collect::<Result<Vec<String>, _>>()?
        };
        let params: Params<'_> = &[
            (sink, Type::TEXT),
            (&ids, Type::UUID_ARRAY),
            (&locked, Type::TEXT_ARRAY),
            (&i64::from(*limit), Type::INT8),
            (&seconds(*lease), Type::FLOAT8),
            (&Uuid::from(*owner), Type::UUID),
            (&judges, Type::BOOL),
            (&(self.on_dead == OnDead::Block), Type::BOOL),
            (&seconds(PUT_OFF), Type::FLOAT8),
        ];
        let found = transaction.run(CLAIM_IN_ORDER, params).await?;
        transaction.commit().await?;
        look(&found, ids.len() >= usize::try_from(window).unwrap_or(usize::MAX))
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
fn look(rows: &[Row], full: bool) -> Result<Look, RunError> {
    let put_off: i64 = rows.first().map_or(Ok(0), |row| get(row, "put_off"))?;
    let mut taken = Vec::with_capacity(rows.len());
    for row in rows {
        if get::<Option<Uuid>>(row, "event_id")?.is_some() {
            taken.push(claimed(row)?);
        }
    }
    Ok(Look { claimed: taken, again: full && put_off > 0 })
}

// Sorted, as all who wait for turns take them.
const END_TURNS: &str = "-- end_turns
WITH x AS MATERIALIZED (
    SELECT * FROM unnest($2::uuid[], $3::text[], $4::bool[]) AS x(event_id, ordering_key, blocks)),
held AS MATERIALIZED (
    SELECT t.ordering_key, x.blocks FROM outbox_turns t
    JOIN x ON t.ordering_key = x.ordering_key AND t.event_id = x.event_id
    WHERE t.sink = $1 ORDER BY t.ordering_key FOR UPDATE OF t),
dead AS (
    UPDATE outbox_turns t SET lease_until = 'infinity', claimed_by = NULL FROM held
    WHERE t.sink = $1 AND t.ordering_key = held.ordering_key AND held.blocks)
DELETE FROM outbox_turns t USING held
WHERE t.sink = $1 AND t.ordering_key = held.ordering_key AND NOT held.blocks";

// A statement of its own, hence a newer snapshot than that of the turns' end. Unconditional: the next one may be about to be
// put off by somebody who holds it just now. It is waited for, and is at another place then: so it is not looked for by its
// place, but by the index of events, which is the only one that serves where the sink is not named as it stands. `$3`: those that this very verdict frees keep the time that it gave them.
const WAKE: &str = "-- wake
WITH k AS MATERIALIZED (SELECT DISTINCT k.ordering_key FROM unnest($2::text[]) AS k(ordering_key)),
next AS MATERIALIZED (
    SELECT f.event_id FROM k CROSS JOIN LATERAL (
        SELECT q.event_id FROM outbox_queue q
        WHERE q.sink = $1 AND q.ordering_key = k.ordering_key
        ORDER BY q.created_at, q.seq, q.event_id LIMIT 1) AS f
    WHERE f.event_id <> ALL ($3::uuid[])
    ORDER BY f.event_id)
UPDATE outbox_queue q SET next_attempt_at = clock_timestamp() FROM next
WHERE q.event_id = next.event_id AND q.sink || '' = $1 AND q.lease_until <= clock_timestamp()";

/// An event that is no longer in flight, or no longer owed.
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
    let params: Params<'_> = &[
        (&sink, Type::TEXT),
        (&ended.ids, Type::UUID_ARRAY),
        (&ended.keys, Type::TEXT_ARRAY),
        (&ended.blocks, Type::BOOL_ARRAY),
    ];
    transaction.run(END_TURNS, params).await?;
    let params: Params<'_> =
        &[(&sink, Type::TEXT), (&ended.keys, Type::TEXT_ARRAY), (&ended.ids, Type::UUID_ARRAY)];
    transaction.run(WAKE, params).await?;
    Ok(())
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
impl Task for AcknowledgingInOrder<'_> {
    type Done = Vec<Uuid>;

    async fn run(&self, connection: &mut Connection) -> Result<Vec<Uuid>, RunError> {
        let mut transaction = connection.begin(BEGIN_CLAIM).await?;
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
