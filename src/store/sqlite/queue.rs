//! The queue's rows: what claims in any order have in common.

use uuid::Uuid;

use super::super::Lane;
use crate::store::read::Columns;

/// The claim of one row: event, claim number, attempts, refusals.
pub(super) type Taken = (Uuid, i32, u32, u32);

/// From a row of these four.
pub(super) fn taken(row: &rusqlite::Row<'_>) -> rusqlite::Result<Taken> {
    Ok((row.must("event_id", Columns::id)?, row.get(1)?, row.get(2)?, row.get(3)?))
}

/// The value of the column.
pub(super) fn lane(lane: Lane) -> i64 {
    match lane {
        Lane::Fresh => 0,
        Lane::Retry => 1,
    }
}

/// What may be claimed at a time, of a sink and lane: due and free.
macro_rules! claimable {
    ($sink:literal, $lane:literal, $now:literal, $orphans:literal) => {
        concat!(
            "sink = ",
            $sink,
            " AND lane = ",
            $lane,
            " AND next_attempt_at <= ",
            $now,
            " AND (lease_until <= ",
            $now,
            " OR (",
            $orphans,
            " AND claimed_by IS NOT NULL AND NOT EXISTS (
              SELECT 1 FROM oncegate_owners o WHERE o.owner = q.claimed_by AND o.lease_until > ",
            $now,
            ")))"
        )
    };
}
pub(super) use claimable;
