//! The vocabulary of the tests.

pub(crate) mod broker;
pub(crate) mod client;
pub(crate) mod fake;
pub(crate) mod fault;
pub(crate) mod fleet;
pub(crate) mod issuer;
pub(crate) mod orders;
pub(crate) mod postgres;
pub(crate) mod process;
pub(crate) mod proxy;
pub(crate) mod python;
pub(crate) mod raw;
pub(crate) mod rig;
pub(crate) mod secure;
pub(crate) mod shelf;
pub(crate) mod signals;
pub(crate) mod sink;
pub(crate) mod upstream;
pub(crate) mod wire;

use std::time::Duration;

/// Waits until `condition` holds, for at most `limit`.
pub(crate) async fn eventually(what: &str, limit: Duration, mut condition: impl FnMut() -> bool) {
    let end = tokio::time::Instant::now() + limit;
    while !condition() {
        assert!(tokio::time::Instant::now() < end, "not within {limit:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Waits until the asynchronous `condition` holds, for at most `limit`.
pub(crate) async fn happens<F: Future<Output = bool>>(
    what: &str,
    limit: Duration,
    mut condition: impl FnMut() -> F,
) {
    let end = tokio::time::Instant::now() + limit;
    while !condition().await {
        assert!(tokio::time::Instant::now() < end, "not within {limit:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
