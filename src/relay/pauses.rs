//! How long the relay waits while the database does not answer.

use std::time::Duration;

/// Pauses while the database does not answer.
pub(super) const OUTAGE_FIRST: Duration = Duration::from_millis(100);
pub(super) const OUTAGE_MAX: Duration = Duration::from_secs(5);

/// Half to whole of a pause, so that replicas do not move in step.
pub(super) fn jitter(pause: Duration) -> Duration {
    pause.mul_f64(0.5 + fastrand::f64() / 2.0)
}
