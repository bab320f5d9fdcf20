//! The owner of a relay's claims, and the judgement of other owners' claims.

use std::sync::Arc;

use crate::record::LeaseView;
use crate::store::Reclaim;

/// The owner of claims.
#[derive(Clone)]
pub struct Claimant {
    /// This process's lease. It must end after the relay, because after its end others take the claims of this relay.
    pub lease: LeaseView,
    /// Whether other owners may be taken for dead by their leases; see `lease`.
    pub may_mark_dead: Arc<dyn Fn() -> bool + Send + Sync>,
}

impl Claimant {
    /// Which claims and probes of other owners have ended.
    pub(super) fn reclaim(&self) -> Reclaim {
        if (self.may_mark_dead)() { Reclaim::ExpiredOrOrphaned } else { Reclaim::Expired }
    }
}
