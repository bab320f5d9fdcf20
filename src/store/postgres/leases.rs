//! The leases of the processes: who is alive, by the database's clock.
//!
//! A lease that has run out is never renewed, so what others concluded from its end stays true. When a process
//! dies, its lease runs out by itself.

use std::time::Duration;

use super::connection::Effect;
use super::param::Params;
use super::pool::{Dedicated, Pool};
use super::rows::{self, seconds};
use crate::record::OwnerId;
use crate::store::batch::RunError;
use crate::store::{Error, Heartbeat};

// The lease counts from after a wait for the row's lock, not from before it.
const HEARTBEAT: &str = "-- heartbeat
INSERT INTO oncegate_owners (owner, lease_until, started_at)
VALUES ($1, clock_timestamp() + make_interval(secs => $2), clock_timestamp())
ON CONFLICT (owner) DO UPDATE SET lease_until = clock_timestamp() + make_interval(secs => $2)
WHERE oncegate_owners.lease_until > clock_timestamp()
RETURNING owner";

pub(super) async fn heartbeat(
    connection: &Dedicated,
    owner: OwnerId,
    lease: Duration,
) -> Result<Heartbeat, Error> {
    let params: Params<'_> = &[&owner, &seconds(lease)];
    let rows =
        connection.run(Effect::Write, HEARTBEAT, params).await.map_err(RunError::into_error)?;
    Ok(if rows.is_empty() { Heartbeat::Ended } else { Heartbeat::Renewed })
}

const RETIRE: &str = "-- retire
UPDATE oncegate_owners SET lease_until = clock_timestamp()
WHERE owner = $1 AND lease_until > clock_timestamp()";

pub(super) async fn retire(pool: &Pool, owner: OwnerId) -> Result<(), Error> {
    pool.write(RETIRE, &[&owner]).await.map(drop)
}

// Far longer than a process sleeps: an owner id that is swept could begin anew.
const SWEEP_LEASES: &str = "-- sweep_leases
WITH gone AS (
    DELETE FROM oncegate_owners o
    WHERE o.lease_until <= clock_timestamp() - interval '7 days' AND o.cleared
    RETURNING o.owner)
SELECT count(*) AS count FROM gone";

pub(super) async fn sweep(pool: &Pool) -> Result<u64, Error> {
    rows::count(&pool.write(SWEEP_LEASES, &[]).await?)
}
