//! How long the relay waits while the database does not answer.

use std::time::Duration;

use crate::backoff::Backoff;

/// Pauses while the database does not answer.
pub(super) const OUTAGE: Backoff = Backoff::new(OUTAGE_FIRST, Duration::from_secs(5));
pub(super) const OUTAGE_FIRST: Duration = Duration::from_millis(100);
