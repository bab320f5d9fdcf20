//! The lease of this process. When it runs out, other processes treat its records as lost.
//!
//! Invariants:
//!
//! - Nothing is reserved before the first heartbeat is committed.
//! - `sure_until` is never too late: it counts from before the heartbeat was sent, on the monotonic clock, less a margin (a
//!   fifth of the lease, at least 100 ms) for the time between the last check and the byte on the wire. A heartbeat that is
//!   lost, late or in doubt does not change it.
//! - A lease that has run out is never renewed: the process takes a new owner id. Requests in flight go on, because their
//!   writes
//!   name record id and attempt.
//! - Other owners are judged by their leases only after this process has reached the database for one whole lease without a
//!   longer gap ([`Contact`]). An outage may have kept the others from renewing, too.
//!
//! If the process dies or its clock stops, its lease runs out by the database's clock.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::RwLock;
use tokio_util::sync::CancellationToken;

use crate::backoff::Backoff;
use crate::record::{Lease, LeaseView, OwnerId};
use crate::store::{Error, Heartbeat, Records};
use crate::tasks;
use crate::telemetry::causes;

const MARGIN_MIN: Duration = Duration::from_millis(100);

/// First pause after a heartbeat that failed; it doubles up to a sixth of the lease.
const RETRY_FIRST: Duration = Duration::from_millis(50);

/// How long a clean exit waits for the end of its lease.
const RETIRE_MAX: Duration = Duration::from_secs(1);

/// How many new owner ids are tried in a row before the answer of the database counts as an error.
const FRESH_MAX: usize = 3;

/// The margin that is subtracted from a lease.
#[must_use]
pub fn margin(ttl: Duration) -> Duration {
    (ttl / 5).max(MARGIN_MIN)
}

/// The view of a process that has no lease yet. It sends no request.
#[must_use]
pub fn none() -> LeaseView {
    LeaseView::new(Lease { owner: OwnerId::fresh(), sure_until: now() })
}

/// Takes an owner id, makes its lease live and puts it into the view. To be called before anything is reserved.
///
/// # Errors
/// The error of the store. Without a first heartbeat there is no lease.
pub async fn begin(store: &dyn Records, ttl: Duration, view: &LeaseView) -> Result<(), Error> {
    view.renew(fresh(store, ttl).await?);
    Ok(())
}

async fn fresh(store: &dyn Records, ttl: Duration) -> Result<Lease, Error> {
    for _ in 0..FRESH_MAX {
        if let Some(lease) = beat(store, OwnerId::fresh(), ttl).await? {
            return Ok(lease);
        }
    }
    Err(Error::Unavailable("leases of new owners run out at once".into()))
}

/// One heartbeat. `None`: the lease had run out.
async fn beat(store: &dyn Records, owner: OwnerId, ttl: Duration) -> Result<Option<Lease>, Error> {
    let sent = now();
    match store.heartbeat(owner, ttl).await? {
        Heartbeat::Renewed => {
            let sure_until = sent + ttl.saturating_sub(margin(ttl));
            Ok(Some(Lease { owner, sure_until }))
        }
        Heartbeat::Ended => Ok(None),
    }
}

/// Renews the lease after each third of it until `stop`, then ends it. `stop` must come when nothing else runs any more.
pub async fn keep(
    store: Arc<dyn Records>,
    view: LeaseView,
    ttl: Duration,
    stop: CancellationToken,
) {
    let pace = ttl / 3;
    let mut failing = false;
    let begun_anew = Backoff::new(RETRY_FIRST.min(pace), ttl / 6);
    let mut retries = begun_anew.clone();
    let mut wait = pace;
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => break,
            () = tokio::time::sleep(wait) => {}
        }
        let sent = now();
        // A heartbeat that hangs must not use up the lease. It is dropped and sent again, which is safe.
        let renewing = tokio::time::timeout(pace, renew(store.as_ref(), &view, ttl));
        let renewed = match stop.run_until_cancelled(renewing).await {
            Some(Ok(renewed)) => renewed,
            Some(Err(_)) => Err(Error::Late),
            None => break,
        };
        match renewed {
            Ok(()) => {
                tasks::ran();
                if failing {
                    tracing::info!("the lease is renewed again");
                }
                failing = false;
                retries.clone_from(&begun_anew);
                wait = pace.saturating_sub(now().saturating_duration_since(sent));
            }
            Err(error) => {
                tasks::failed(&causes(&error));
                if !failing {
                    tracing::warn!(error = %causes(&error), "the lease was not renewed");
                }
                failing = true;
                wait = retries.pause();
            }
        }
    }
    retire(store.as_ref(), &view).await;
}

async fn renew(store: &dyn Records, view: &LeaseView, ttl: Duration) -> Result<(), Error> {
    let owner = view.current().owner;
    let lease = if let Some(lease) = beat(store, owner, ttl).await? {
        lease
    } else {
        let lease = fresh(store, ttl).await?;
        tracing::warn!(%owner, new = %lease.owner, "the lease had run out: a new owner goes on");
        lease
    };
    view.renew(lease);
    Ok(())
}

/// Ends the lease, first here, so that no request is sent under it any more, and then in the database.
async fn retire(store: &dyn Records, view: &LeaseView) {
    let owner = view.current().owner;
    view.renew(Lease { owner, sure_until: now() });
    match tokio::time::timeout(RETIRE_MAX, store.retire(owner)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!(%error, "the lease was not ended: it runs out by itself"),
        Err(_) => tracing::warn!("the lease was not ended in time: it runs out by itself"),
    }
}

/// The clock of the runtime. In production it is the clock of the standard library; tests can move it.
fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// Since when the database has been reached without a gap. Decides whether other owners may be judged. All clones share one
/// state.
#[derive(Clone, Debug)]
pub struct Contact(Arc<RwLock<Reach>>);

#[derive(Debug)]
struct Reach {
    /// `None`: one process owns the database, so all other owners are dead.
    lease: Option<Duration>,
    since: Option<Instant>,
    last: Instant,
}

impl Contact {
    /// Contact that begins at `now`. Other owners are judged after one `lease` at the earliest.
    #[must_use]
    pub fn begin(lease: Duration, now: Instant) -> Self {
        let reach = Reach { lease: Some(lease), since: Some(now), last: now };
        Self(Arc::new(RwLock::new(reach)))
    }

    /// Contact with a database that has not answered yet. No owner is judged.
    #[must_use]
    pub fn none(lease: Duration, now: Instant) -> Self {
        let contact = Self::begin(lease, now);
        contact.lost();
        contact
    }

    /// For a database that one process owns (SQLite under its lock): it may always judge.
    #[must_use]
    pub fn sole(now: Instant) -> Self {
        Self(Arc::new(RwLock::new(Reach { lease: None, since: None, last: now })))
    }

    /// The longest interval between two statements that keeps contact; `None`: none is needed.
    #[must_use]
    pub fn pace(&self) -> Option<Duration> {
        self.0.read().lease.map(|lease| lease / 4)
    }

    /// The database answered at `now`. After a gap of more than half a lease contact begins anew. Others renew after each
    /// third of a lease, so a shorter gap alone lets no lease run out.
    pub fn reached(&self, now: Instant) {
        let mut reach = self.0.write();
        if reach.since.is_none() || reach.gap(now) {
            reach.since = Some(now);
        }
        reach.last = reach.last.max(now);
    }

    /// The database was asked and did not answer.
    pub fn lost(&self) {
        self.0.write().since = None;
    }

    /// Whether other owners may be judged by their leases at `now`.
    #[must_use]
    pub fn may_mark_dead(&self, now: Instant) -> bool {
        let reach = self.0.read();
        let Some(lease) = reach.lease else { return true };
        let long = |since| now.saturating_duration_since(since) >= lease;
        reach.since.is_some_and(long) && !reach.gap(now)
    }
}

impl Reach {
    fn gap(&self, now: Instant) -> bool {
        self.lease.is_some_and(|lease| now.saturating_duration_since(self.last) > lease / 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(16);

    #[test]
    fn others_are_judged_only_after_one_lease_of_contact_without_a_gap() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let contact = Contact::begin(LEASE, start);
        for second in (4..16).step_by(4) {
            contact.reached(at(second));
            assert!(!contact.may_mark_dead(at(second)), "{second}");
        }
        contact.reached(at(16));
        assert!(contact.may_mark_dead(at(16)));
        assert!(!contact.may_mark_dead(at(30)), "nothing was heard since");
        contact.reached(at(30));
        assert!(!contact.may_mark_dead(at(30)), "a gap begins anew");
        for second in (34..=46).step_by(4) {
            contact.reached(at(second));
        }
        assert!(contact.may_mark_dead(at(46)));
        contact.lost();
        contact.reached(at(47));
        assert!(!contact.may_mark_dead(at(47)), "a failure begins anew");
    }

    #[test]
    fn the_only_process_on_a_database_judges_at_once() {
        let now = Instant::now();
        assert!(Contact::sole(now).may_mark_dead(now));
    }
}
