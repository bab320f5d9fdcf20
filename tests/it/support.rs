//! The vocabulary of the tests.

use std::future::Future;
use std::time::Duration;

/// Waits until `condition` holds, for at most `limit`.
pub(crate) async fn eventually<F, R>(what: &str, limit: Duration, mut condition: F)
where
    F: FnMut() -> R,
    R: Future<Output = bool>,
{
    let end = tokio::time::Instant::now() + limit;
    while !condition().await {
        assert!(tokio::time::Instant::now() < end, "not within {limit:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
