//! What operators did to records, as this process learns of it: the answers that it holds in memory are forgotten.
//!
//! What must stay true: no act is passed over. A look reaches back to the last one that came through, however long the database
//! was away or this process was stopped, and beyond it: rows of slow transactions become visible late.

use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::record::RecordId;
use crate::store::Error;
use crate::tasks;

/// How often the audit table is read.
const EVERY: Duration = Duration::from_millis(500);
/// How far a look reaches back beyond the last one.
const BEYOND: Duration = Duration::from_secs(15);

/// Up to when the acts have been read: it outlives the loop that reads them.
pub(super) struct Watermark(Mutex<Instant>);

impl Default for Watermark {
    fn default() -> Self {
        Self(Mutex::new(Instant::now()))
    }
}

impl Watermark {
    fn at(&self) -> MutexGuard<'_, Instant> {
        self.0.lock()
    }
}

/// Reads which records were acted on within a time, and forgets them, until `stop`.
pub(super) async fn watch<F>(
    watermark: &Watermark,
    acted_on: impl Fn(Duration) -> F,
    forget: impl Fn(&[RecordId]),
    stop: &CancellationToken,
) where
    F: Future<Output = Result<Vec<RecordId>, Error>>,
{
    while stop.run_until_cancelled(tokio::time::sleep(EVERY)).await.is_some() {
        let begun = Instant::now();
        let since = begun.saturating_duration_since(*watermark.at());
        let asked = stop.run_until_cancelled(acted_on(since.saturating_add(BEYOND))).await;
        let Some(read_now) = asked else { return };
        match read_now {
            Ok(records) => {
                tasks::ran();
                *watermark.at() = begun;
                if !records.is_empty() {
                    forget(&records);
                }
            }
            Err(error) => {
                tasks::failed(&error);
                tracing::debug!(%error, "the audit table cannot be read");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_look_after_an_outage_reaches_back_to_the_last_one_that_came_through() {
        let outage = Duration::from_secs(40)..Duration::from_secs(100);
        let (start, released) = (Instant::now(), RecordId::fresh());
        let at = outage.start + Duration::from_secs(1);
        let stop = CancellationToken::new();
        let (reach, forgotten) = (Mutex::new(Vec::new()), Mutex::new(Vec::new()));
        let acted_on = async |window: Duration| {
            let now = start.elapsed();
            reach.lock().push((now, window));
            match outage.contains(&now) {
                true => Err(Error::Unavailable("away".into())),
                // Of the act that came just as the database went.
                false => {
                    Ok((at <= now && now - window <= at).then_some(released).into_iter().collect())
                }
            }
        };
        let forget = |records: &[RecordId]| {
            assert_eq!(records, [released]);
            forgotten.lock().push(start.elapsed());
        };
        let watermark = Watermark::default();
        let watching = watch(&watermark, acted_on, forget, &stop);
        tokio::time::timeout(Duration::from_secs(200), watching).await.unwrap_err();
        let forgotten = forgotten.into_inner();
        assert!(forgotten.first().is_some_and(|at| *at < outage.end + 2 * EVERY), "{forgotten:?}");
        // Nobody reads the same for ever.
        let (_, last) = reach.into_inner().pop().unwrap();
        assert!(last <= BEYOND + 2 * EVERY, "{last:?}");
    }
}
