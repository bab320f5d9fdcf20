//! About which unknown records the upstream may be asked, by what `oncegate_unknown` holds of them.

use super::param::Params;
use super::pool::Pool;
use super::rows::seconds;
use crate::record::RecordId;
use crate::store::read;
use crate::store::{DueLookup, Error, LookupRule, Unresolved};

// The list is short; LATERAL with OFFSET keeps the planner to one look-up by id for each row of it, whatever it
// believes of the tables.
const DUE_LOOKUPS: &str = "-- due_lookups
SELECT r.tenant_id, r.operation, r.key, r.id, r.attempt, r.request_hash, r.raw_hash, r.recipe,
       r.caller, r.request_context
FROM oncegate_unknown u
CROSS JOIN LATERAL (
    SELECT * FROM idempotency_records r WHERE r.id = u.id AND r.status = 'unknown' OFFSET 0) r
JOIN unnest($1::text[], $2::float8[], $3::float8[]) AS a(operation, lost, orphaned)
  ON a.operation = r.operation
WHERE u.next_ask_at <= (SELECT clock_timestamp())
  AND u.since + make_interval(secs => CASE WHEN u.orphaned THEN a.orphaned ELSE a.lost END)
      <= (SELECT clock_timestamp())
ORDER BY u.next_ask_at, u.id LIMIT $4";

pub(super) async fn due(
    pool: &Pool,
    rules: &[LookupRule],
    limit: u32,
) -> Result<Vec<DueLookup>, Error> {
    let operations: Vec<&str> = rules.iter().map(|rule| rule.operation.as_str()).collect();
    let lost: Vec<f64> = rules.iter().map(|rule| seconds(rule.delay.after_loss)).collect();
    let orphaned: Vec<f64> = rules.iter().map(|rule| seconds(rule.delay.after_lease)).collect();
    let limit = i64::from(limit);
    let params: Params<'_> = &[&operations, &lost, &orphaned, &limit];
    pool.read(DUE_LOOKUPS, params).await?.iter().map(read::due_lookup).collect()
}

const UNRESOLVED: &str = "-- unresolved
SELECT u.since, u.orphaned, u.asked, u.next_ask_at, r.request_context,
       extract(epoch FROM clock_timestamp() - u.since)::float8 AS age
FROM idempotency_records r JOIN oncegate_unknown u ON u.id = r.id
WHERE r.id = $1 AND r.status = 'unknown'";

pub(super) async fn unresolved(pool: &Pool, id: RecordId) -> Result<Option<Unresolved>, Error> {
    let rows = pool.read(UNRESOLVED, &[&id]).await?;
    rows.first().map(read::unresolved).transpose()
}
