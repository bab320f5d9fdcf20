//! The time of day, for what is said to people and other programs. Nothing durable is decided by it: that is the database's.

use std::time::{Duration, SystemTime};

/// What this machine's clock says.
#[expect(
    clippy::disallowed_methods,
    reason = "messages, signatures and tokens of others carry a time of day"
)]
#[must_use]
pub fn time_of_day() -> SystemTime {
    SystemTime::now()
}

/// The same, as the time since 1970.
#[must_use]
pub fn since_1970() -> Duration {
    time_of_day().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}
