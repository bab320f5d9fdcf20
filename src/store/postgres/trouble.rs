//! What is known of the database's troubles: told to the log at a pace, and to whoever asks whether writes work.
//!
//! A database may answer every question and take no write, as on a full disk. So a statement that failed for a reason that lies
//! with the database leaves a suspicion, and from then on readiness is judged by a write: there and gone again, in one
//! transaction. What must stay true: a suspicion ends by such a write only; however often it is asked, one is tried at a
//! time and not more often than [`TRY_EVERY`]; who stops waiting leaves no statement behind that is not bounded.

use std::collections::HashMap;
use std::error::Error as StdError;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tokio_postgres::error::DbError;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::door::{Connection, Door, Params, Task};
use super::sqlstate::Meaning;
use crate::store::Error;
use crate::store::batch::RunError;
use crate::tasks;
use crate::telemetry::causes;
use crate::telemetry::pace::Pace;

/// How often writes are tried out at most.
const TRY_EVERY: Duration = Duration::from_secs(1);

/// How many SQLSTATEs have a pace of their own. Functions may make up theirs.
const PACES_MAX: usize = 64;

/// The database's troubles, as far as they are known.
#[derive(Default)]
pub(super) struct Trouble {
    suspicion: Mutex<Suspicion>,
    paces: Mutex<HashMap<String, Pace>>,
    /// The last try that failed.
    failed: tokio::sync::Mutex<Option<Failed>>,
}

/// Why writes may not work.
#[derive(Clone, Default)]
struct Suspicion {
    why: Option<String>,
    /// Counts reasons: one that came during a try is not ended by it.
    count: u64,
}

struct Failed {
    at: Instant,
    why: String,
}

impl Trouble {
    /// An error that was reported.
    pub(super) fn note(&self, meaning: Meaning, statement: &str, error: &DbError) {
        match meaning {
            Meaning::Again | Meaning::Busy => return,
            Meaning::Down | Meaning::ReadOnly | Meaning::Mistake => {
                self.suspect(told(error));
            }
            Meaning::Refused | Meaning::Lost => {}
        }
        let sqlstate = error.code().code();
        let Some(left_out) = self.due(sqlstate) else { return };
        let (message, hint) = (error.message(), error.hint());
        match meaning {
            Meaning::Lost => tracing::warn!(
                sqlstate,
                message,
                hint,
                statement,
                left_out,
                "the connection to the database is lost"
            ),
            Meaning::Refused => tracing::warn!(
                sqlstate,
                message,
                hint,
                statement,
                left_out,
                "the database refused data: nothing was changed"
            ),
            Meaning::Again
            | Meaning::Busy
            | Meaning::Down
            | Meaning::ReadOnly
            | Meaning::Mistake => tracing::warn!(
                sqlstate,
                message,
                hint,
                statement,
                left_out,
                "the database could not do it: nothing was changed"
            ),
        }
    }

    /// A write failed, or its answer did not come.
    pub(super) fn suspect(&self, why: String) {
        let mut suspicion = self.suspicion.lock().unwrap_or_else(PoisonError::into_inner);
        suspicion.count += 1;
        suspicion.why = Some(why);
    }

    fn suspicion(&self) -> Suspicion {
        self.suspicion.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Writes work, unless there was another reason to doubt it since this one.
    fn clear(&self, before: &Suspicion) {
        let mut suspicion = self.suspicion.lock().unwrap_or_else(PoisonError::into_inner);
        if suspicion.count == before.count {
            suspicion.why = None;
        }
    }

    /// Whether a line about this SQLSTATE is due, and how many were left out.
    fn due(&self, sqlstate: &str) -> Option<u64> {
        let mut paces = self.paces.lock().unwrap_or_else(PoisonError::into_inner);
        let key = if paces.len() < PACES_MAX { sqlstate } else { "" };
        match paces.get(sqlstate) {
            Some(pace) => pace.due(),
            None => paces.entry(key.to_owned()).or_default().due(),
        }
    }

    /// Whether writes work, as far as is known: tried out where there is a suspicion.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with the cause.
    pub(super) async fn writes_work(self: &Arc<Self>, door: &Door) -> Result<(), Error> {
        if self.suspicion().why.is_none() {
            return Ok(());
        }
        let (trouble, door) = (Arc::clone(self), door.clone());
        // A task of its own: whoever asks may stop waiting, and what is begun is ended by its own time-outs.
        let tried = tasks::short(async move { trouble.try_out(&door).await }).await;
        match tried.map_err(|panic| Error::Unavailable(panic.into()))? {
            None => Ok(()),
            Some(why) => Err(Error::Unavailable(format!("writes fail: {why}").into())),
        }
    }

    /// Tries a write, unless one has failed just now. Why it does not work.
    async fn try_out(&self, door: &Door) -> Option<String> {
        let mut failed = self.failed.lock().await;
        if let Some(Failed { at, why }) = failed.as_ref()
            && at.elapsed() < TRY_EVERY
        {
            return Some(why.clone());
        }
        let before = self.suspicion();
        match door.run(&Trial).await {
            // Data of ours that somebody's trigger refuses: the database takes writes.
            Ok(()) | Err(Error::Refused(_)) => {
                self.clear(&before);
                *failed = None;
                tracing::info!("the database takes writes");
                None
            }
            Err(error) => {
                let why = self.reason(&error);
                *failed = Some(Failed { at: Instant::now(), why: why.clone() });
                Some(why)
            }
        }
    }

    fn reason(&self, error: &Error) -> String {
        let reported = StdError::source(error)
            .and_then(|cause| cause.downcast_ref::<tokio_postgres::Error>())
            .and_then(tokio_postgres::Error::as_db_error);
        reported.map(told).or_else(|| self.suspicion().why).unwrap_or_else(|| causes(error))
    }
}

/// An error in one line, with what names it.
fn told(error: &DbError) -> String {
    format!("{} (SQLSTATE {})", error.message(), error.code().code())
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
impl Task for Trial {
    type Done = ();

    async fn run(&self, connection: &mut Connection) -> Result<(), RunError> {
        let id = Uuid::new_v4();
        // Random, so that no compression makes it small.
        let content: Vec<u8> = std::iter::repeat_with(|| fastrand::u8(..)).take(SIZE).collect();
        let mut transaction = connection.begin(BEGIN).await?;
        let params: Params<'_> = &[(&id, Type::UUID), (&content, Type::BYTEA)];
        transaction.run(WRITE, params).await?;
        transaction.run(REMOVE, &[(&id, Type::UUID)]).await?;
        transaction.commit().await
    }
}
