//! The lease of this process, as it may be relied on without asking the database.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::RwLock;

use super::OwnerId;

/// This process's lease as it may be relied on without asking the database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// Under which owner id records are reserved now.
    pub owner: OwnerId,
    /// Until when the database certainly counts the owner as alive: the moment before the heartbeat was sent,
    /// plus the lease, less a margin. On the process's monotonic clock.
    pub sure_until: Instant,
}

/// The lease as `lease` keeps it up to date and as the sending side checks it. Cheap to clone; all clones see one lease.
#[derive(Clone, Debug)]
pub struct LeaseView(Arc<RwLock<Lease>>);

impl LeaseView {
    /// A view that starts with this lease.
    #[must_use]
    pub fn new(lease: Lease) -> Self {
        Self(Arc::new(RwLock::new(lease)))
    }

    /// The lease as last renewed.
    #[must_use]
    pub fn current(&self) -> Lease {
        *self.0.read()
    }

    /// Takes over a renewed lease, or one of a new owner.
    pub fn renew(&self, lease: Lease) {
        *self.0.write() = lease;
    }

    /// Whether `owner` is still this process's owner and certainly counted as alive at `now`.
    #[must_use]
    pub fn holds(&self, owner: OwnerId, now: Instant) -> bool {
        let lease = self.current();
        lease.owner == owner && now < lease.sure_until
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_lease_holds_for_its_owner_until_its_deadline() {
        let now = Instant::now();
        let owner = OwnerId::fresh();
        let view = LeaseView::new(Lease { owner, sure_until: now + Duration::from_secs(1) });
        assert!(view.holds(owner, now));
        assert!(!view.holds(owner, now + Duration::from_secs(1)));
        assert!(!view.holds(OwnerId::fresh(), now));
    }
}
