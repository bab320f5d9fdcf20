//! About which unknown records the upstream may be asked, by what `oncegate_unknown` holds of them.

use rusqlite::{Row, params};

use super::super::{DueLookup, LookupRule, Unresolved};
use super::row::micros;
use super::thread::Tx;
use crate::record::RecordId;
use crate::store::read;

pub(super) fn due(
    tx: &Tx<'_>,
    rules: &[LookupRule],
    limit: u32,
) -> rusqlite::Result<Vec<DueLookup>> {
    const SQL: &str = "SELECT u.next_ask_at, r.tenant_id, r.operation, r.key, r.id, r.attempt,
          r.request_hash, r.raw_hash, r.recipe, r.request_context, r.caller
        FROM oncegate_unknown u CROSS JOIN idempotency_records r ON r.id = u.id
        WHERE r.status = 'unknown' AND r.operation = ?2 AND u.next_ask_at <= ?1
          AND u.since + iif(u.orphaned, ?4, ?3) <= ?1
        ORDER BY u.next_ask_at, u.id LIMIT ?5";
    let read = |row: &Row<'_>| Ok((row.get::<_, i64>("next_ask_at")?, read::due_lookup(row)?));
    let mut all = Vec::new();
    for LookupRule { operation, delay } in rules {
        let (lost, orphaned) = (micros(delay.after_loss), micros(delay.after_lease));
        all.extend(tx.rows(SQL, params![tx.now, operation, lost, orphaned, limit], read)?);
    }
    all.sort_by_key(|(next_ask_at, _)| *next_ask_at);
    all.truncate(usize::try_from(limit).unwrap_or(usize::MAX));
    Ok(all.into_iter().map(|(_, due)| due).collect())
}

pub(super) fn unresolved(tx: &Tx<'_>, id: RecordId) -> rusqlite::Result<Option<Unresolved>> {
    const SQL: &str = "SELECT u.since, ?2 - u.since AS age, u.orphaned, u.asked, u.next_ask_at,
          r.request_context
        FROM idempotency_records r JOIN oncegate_unknown u ON u.id = r.id
        WHERE r.id = ?1 AND r.status = 'unknown'";
    tx.first(SQL, params![id, tx.now], |row| read::unresolved(row))
}
