//! Whose claims a relay's are, and which claims of others are over.

use std::sync::Arc;

use crate::record::LeaseView;
use crate::store::Reclaim;

/// Whose claims these are.
#[derive(Clone)]
pub struct Claimant {
    /// This process's lease. To be ended after the relay: from its end on, others take what this relay had claimed.
    pub lease: LeaseView,
    /// Whether other owners may be judged by their leases; see `lease`.
    pub may_judge: Arc<dyn Fn() -> bool + Send + Sync>,
}

impl Claimant {
    /// Which claims and probes of others are over.
    pub(super) fn reclaim(&self) -> Reclaim {
        if (self.may_judge)() { Reclaim::ExpiredOrOrphaned } else { Reclaim::Expired }
    }
}
