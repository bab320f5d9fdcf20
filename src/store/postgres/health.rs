//! What is known of the database's health: errors are told to the log at a pace, and leave a suspicion that writes fail.
//!
//! A database may answer every question and take no write, as on a full disk. So a statement that failed for a reason that lies
//! with the database leaves a suspicion, and from then on readiness is judged by a write; see `write_probe`.

use std::collections::HashMap;
use std::error::Error as StdError;

use parking_lot::Mutex;
use tokio_postgres::error::DbError;

use super::sqlstate::Meaning;
use crate::store::Error;
use crate::telemetry::causes;
use crate::telemetry::pace::Pace;

/// How many SQLSTATEs have a pace of their own. Functions may make up theirs.
const PACES_MAX: usize = 64;

/// The database's health, as far as it is known.
#[derive(Default)]
pub(super) struct Health {
    suspicion: Mutex<Suspicion>,
    /// Why the last connection could not be made, where none has been made since.
    unreached: Mutex<Option<String>>,
    paces: Mutex<HashMap<String, Pace>>,
}

/// Why writes may not work.
#[derive(Clone, Default)]
pub(super) struct Suspicion {
    pub(super) why: Option<String>,
    /// Counts reasons: one that came during a try is not ended by it.
    count: u64,
}

impl Health {
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
        let mut suspicion = self.suspicion.lock();
        suspicion.count += 1;
        suspicion.why = Some(why);
    }

    /// A connection was made, or this is why not.
    pub(super) fn connected(&self, failed: Option<String>) {
        *self.unreached.lock() = failed;
    }

    /// Why the last connection could not be made, where none has been made since.
    pub(super) fn unreached(&self) -> Option<String> {
        self.unreached.lock().clone()
    }

    pub(super) fn suspicion(&self) -> Suspicion {
        self.suspicion.lock().clone()
    }

    /// Writes work, unless there was another reason to doubt it since this one.
    pub(super) fn clear(&self, before: &Suspicion) {
        let mut suspicion = self.suspicion.lock();
        if suspicion.count == before.count {
            suspicion.why = None;
        }
    }

    /// Whether a line about this SQLSTATE is due, and how many were left out.
    fn due(&self, sqlstate: &str) -> Option<u64> {
        let mut paces = self.paces.lock();
        let key = if paces.len() < PACES_MAX { sqlstate } else { "" };
        match paces.get(sqlstate) {
            Some(pace) => pace.due(),
            None => paces.entry(key.to_owned()).or_default().due(),
        }
    }

    /// Why a write does not work that failed with this error.
    pub(super) fn reason(&self, error: &Error) -> String {
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
