//! Whether writes work: tried out where there is reason to doubt it.
//!
//! A row there and gone again, in one transaction. What must stay true: a suspicion ends by such a write only; however often
//! it is asked, one is tried at a time and not more often than [`TRY_EVERY`]; who stops waiting leaves no statement behind that
//! is not bounded.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use uuid::Uuid;

use super::connection::Connection;
use super::health::Health;
use super::param::Params;
use super::pool::{Pool, Retryable};
use crate::store::Error;
use crate::store::batch::RunError;
use crate::tasks;

/// How often writes are tried out at most.
const TRY_EVERY: Duration = Duration::from_secs(1);

/// Tries writes out.
pub(super) struct WriteProbe {
    health: Arc<Health>,
    pool: Pool,
    /// The last try that failed.
    failed: tokio::sync::Mutex<Option<Failed>>,
}

struct Failed {
    at: Instant,
    why: String,
}

impl WriteProbe {
    pub(super) fn new(health: Arc<Health>, pool: Pool) -> Self {
        Self { health, pool, failed: tokio::sync::Mutex::default() }
    }

    /// Whether writes work, as far as is known: tried out where there is a suspicion.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with the cause.
    pub(super) async fn writes_work(self: &Arc<Self>) -> Result<(), Error> {
        if self.health.suspicion().why.is_none() {
            return Ok(());
        }
        let probe = Arc::clone(self);
        // A task of its own: whoever asks may stop waiting, and what is begun is ended by its own time-outs.
        let tried = tasks::short(async move { probe.try_out().await }).await;
        match tried.map_err(|panic| Error::Unavailable(panic.into()))? {
            None => Ok(()),
            Some(why) => Err(Error::Unavailable(format!("writes fail: {why}").into())),
        }
    }

    /// Tries a write, unless one has failed just now. Why it does not work.
    async fn try_out(&self) -> Option<String> {
        let mut failed = self.failed.lock().await;
        if let Some(Failed { at, why }) = failed.as_ref()
            && at.elapsed() < TRY_EVERY
        {
            return Some(why.clone());
        }
        let before = self.health.suspicion();
        match self.pool.run(&Trial).await {
            // Data of ours that somebody's trigger refuses: the database takes writes.
            Ok(()) | Err(Error::Refused(_)) => {
                self.health.clear(&before);
                *failed = None;
                tracing::info!("the database takes writes");
                None
            }
            Err(error) => {
                let why = self.health.reason(&error);
                *failed = Some(Failed { at: Instant::now(), why: why.clone() });
                Some(why)
            }
        }
    }
}

/// A record with some of a request, in a scope that no caller can have, there and gone again in one transaction.
struct Trial;

const BEGIN: &str = "-- begin_trial\nBEGIN ISOLATION LEVEL READ COMMITTED";

const WRITE: &str = "-- trial_write
INSERT INTO idempotency_records (id, tenant_id, operation, key, request_hash, raw_hash, recipe, status,
                                 attempt, owner, request_context, created_at)
VALUES ($1, '', '', $1::text, '', '', '', 'in_progress', 1, $1, $2, clock_timestamp())";

const REMOVE: &str = "-- trial_remove\nDELETE FROM idempotency_records WHERE id = $1";

/// Bytes of it: more than a page that is nearly full has left.
const SIZE: usize = 8192;

#[async_trait]
impl Retryable for Trial {
    type Done = ();

    async fn run(&self, connection: &mut Connection) -> Result<(), RunError> {
        let id = Uuid::new_v4();
        // Random, so that no compression makes it small.
        let content: Vec<u8> = std::iter::repeat_with(|| fastrand::u8(..)).take(SIZE).collect();
        let mut transaction = connection.begin(BEGIN).await?;
        let params: Params<'_> = &[&id, &content];
        transaction.run(WRITE, params).await?;
        transaction.run(REMOVE, &[&id]).await?;
        transaction.commit().await
    }
}
