//! What is known of scopes while the store is away.

use std::sync::Arc;

use crate::record::Scope;

/// Scopes whose record was last seen running somewhere, or with an outcome that nobody knows: what is known of them while
/// the store is away. The last [`OPEN_MAX`] that were looked at.
#[derive(Clone)]
pub(super) struct UnfinishedScopes(Arc<quick_cache::sync::Cache<Scope, ()>>);

/// So many are remembered.
const OPEN_MAX: usize = 16_384;

impl Default for UnfinishedScopes {
    fn default() -> Self {
        Self(Arc::new(quick_cache::sync::Cache::new(OPEN_MAX)))
    }
}

impl UnfinishedScopes {
    pub(super) fn note(&self, scope: &Scope) {
        self.0.insert(scope.clone(), ());
    }

    pub(super) fn forget(&self, scope: &Scope) {
        self.0.remove(scope);
    }

    pub(super) fn has(&self, scope: &Scope) -> bool {
        self.0.get(scope).is_some()
    }
}
