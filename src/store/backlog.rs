//! How many events are pending, against how many may be, as one process knows it.
//!
//! The sweeper counts and everybody may look: no request counts for itself. So the number is a few seconds old, each
//! process has its own, and what begins between two counts may go beyond the ceiling. What must stay true: the ceiling only
//! keeps new work from being begun. Whatever was begun writes its events, however many there are.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::Gauges;

/// The pending events of all sinks and their ceiling. Cheap to clone; all clones know the same number.
#[derive(Clone, Debug, Default)]
pub struct Backlog {
    most: Option<NonZeroU32>,
    pending: Arc<AtomicU64>,
}

/// What a count has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BacklogChange {
    /// The ceiling is reached now.
    Full,
    /// It no longer is.
    Room,
    /// It is as it was.
    Same,
}

impl Backlog {
    /// With this ceiling, and nothing counted so far. None: without one.
    #[must_use]
    pub fn new(most: Option<NonZeroU32>) -> Self {
        Self { most, pending: Arc::default() }
    }

    /// The ceiling, where there is one.
    #[must_use]
    pub fn most(&self) -> Option<NonZeroU32> {
        self.most
    }

    /// So much stands in the store.
    pub fn counted(&self, gauges: &Gauges) -> BacklogChange {
        let pending = gauges.pending.iter().map(|(_, count, _)| *count).sum();
        let before = self.pending.swap(pending, Ordering::Relaxed);
        match (self.is_reached_by(before), self.is_reached_by(pending)) {
            (false, true) => BacklogChange::Full,
            (true, false) => BacklogChange::Room,
            (false, false) | (true, true) => BacklogChange::Same,
        }
    }

    /// Whether nothing may be begun that will write events.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.is_reached_by(self.pending.load(Ordering::Relaxed))
    }

    fn is_reached_by(&self, pending: u64) -> bool {
        self.most.is_some_and(|most| pending >= u64::from(most.get()))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn it_is_full_from_the_ceiling_on_over_all_sinks_and_never_without_one() {
        let pending = |counts: &[u64]| Gauges {
            pending: counts.iter().map(|n| ("s".to_owned(), *n, Duration::ZERO)).collect(),
            ..Gauges::default()
        };
        let backlog = Backlog::new(NonZeroU32::new(10));
        let seen = backlog.clone();
        assert_eq!(
            (backlog.counted(&pending(&[4, 5])), seen.is_full()),
            (BacklogChange::Same, false)
        );
        assert_eq!(
            (backlog.counted(&pending(&[4, 6])), seen.is_full()),
            (BacklogChange::Full, true)
        );
        assert_eq!((backlog.counted(&pending(&[11])), seen.is_full()), (BacklogChange::Same, true));
        assert_eq!((backlog.counted(&pending(&[])), seen.is_full()), (BacklogChange::Room, false));
        let without = Backlog::default();
        assert_eq!(
            (without.counted(&pending(&[u64::MAX])), without.is_full()),
            (BacklogChange::Same, false)
        );
    }
}
