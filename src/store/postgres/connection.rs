//! A connection, and how a statement is run on it.
//!
//! Every statement goes through [`Connection::run`] or a [`Transaction`], which name it, time it, bound it and say what its
//! failure means. What must stay true:
//!
//! - Statements are unnamed and one-shot, and a pooler that hands each transaction another server connection does no harm:
//!   there is no session state. Each is planned anew with its values, but for what the functions of the schema do: batches,
//!   claims, verdicts, and who is woken. The server keeps their plans.
//! - A connection serves again only after the answer to its last statement has arrived. A caller that is dropped in
//!   the middle, a time-out or a failed transaction break it; it is closed then.
//! - A write whose answer did not arrive is in doubt; a read, or what the server reports as failed, is not. See `sqlstate`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::task::AbortHandle;
use tokio_postgres::{Client, Config, Row};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::health::Health;
use super::param::Params;
use super::sqlstate::{self, Meaning};
use crate::store::batch::RunError;
use crate::store::{Cause, Error};
use crate::tasks;
use crate::telemetry::causes;

/// A statement that takes longer is worth a line in the log.
const SLOW: Duration = Duration::from_secs(1);

/// What a statement does, which decides what a lost answer means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// It only reads.
    Read,
    /// It changes something when it commits.
    Write,
}

/// What all connections of a store share. Clones are one.
#[derive(Clone)]
pub(super) struct Shared {
    /// Counts fail-overs: connections of a generation that is over are not used again.
    pub(super) generation: Arc<AtomicU64>,
    pub(super) health: Arc<Health>,
    pub(super) tls: MakeRustlsConnect,
    pub(super) connect_timeout: Duration,
    pub(super) statement_timeout: Duration,
}

/// A connection. Dropping it closes its socket at once.
pub(super) struct Connection {
    client: Client,
    task: AbortHandle,
    shared: Shared,
    pub(super) generation: u64,
    broken: bool,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Connection {
    /// A new connection to one host.
    ///
    /// # Errors
    /// Whatever kept it from being made.
    pub(super) async fn to(host: &Config, shared: &Shared) -> Result<Self, Cause> {
        let generation = shared.generation.load(Ordering::Relaxed);
        let connecting = host.connect(shared.tls.clone());
        let (client, connection) = tokio::time::timeout(shared.connect_timeout, connecting)
            .await
            .map_err(|_| "connecting took too long")??;
        let task = tasks::short(async move {
            if let Err(error) = connection.await {
                tracing::debug!(error = %causes(&error), "a connection to the database ended");
            }
        });
        let (task, shared) = (task.abort_handle(), shared.clone());
        Ok(Self { client, task, shared, generation, broken: false })
    }

    /// Whether it may serve once more, as far as is known here.
    pub(super) fn usable(&self) -> bool {
        let current = self.generation == self.shared.generation.load(Ordering::Relaxed);
        !self.broken && current && !self.client.is_closed()
    }

    /// The server takes no writes: neither this connection nor any that was made before is used again.
    pub(super) fn is_read_only(&self) {
        let (old, next) = (self.generation, self.generation.wrapping_add(1));
        let switched = self.shared.generation.compare_exchange(
            old,
            next,
            Ordering::Relaxed,
            Ordering::Relaxed,
        );
        if switched.is_ok() {
            tracing::warn!(
                "the database is read-only (a standby, or default_transaction_read_only is on): \
                 connecting anew"
            );
        }
    }

    /// Runs one statement in a transaction of its own.
    pub(super) async fn run(
        &mut self,
        effect: Effect,
        sql: &str,
        params: Params<'_>,
    ) -> Result<Vec<Row>, RunError> {
        self.broken = true;
        let result = self.answer(effect, sql, params).await;
        // The server has answered, so the connection is clean; a lost answer closes it by itself.
        self.broken = matches!(&result, Err(failure) if failure.breaks);
        result.map_err(|failure| failure.error)
    }

    /// Begins a transaction. Unless it is committed, the connection is closed, which rolls back.
    pub(super) async fn begin(&mut self, begin: &str) -> Result<Transaction<'_>, RunError> {
        self.broken = true;
        self.plain(Effect::Read, begin).await?;
        Ok(Transaction(self))
    }

    /// Runs statements without parameters, as a migration is.
    pub(super) async fn plain(&mut self, effect: Effect, sql: &str) -> Result<(), RunError> {
        let running = self.client.batch_execute(sql);
        let result = tokio::time::timeout(self.shared.statement_timeout, running).await;
        let failure = match result {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => self.failed(effect, name(sql), error),
            Err(_) => self.too_long(effect),
        };
        Err(failure.error)
    }

    async fn answer(
        &self,
        effect: Effect,
        sql: &str,
        params: Params<'_>,
    ) -> Result<Vec<Row>, Failure> {
        let begun = Instant::now();
        let params: Vec<_> = params.iter().map(|param| param.typed()).collect();
        let running = self.client.query_typed(sql, &params);
        let result = tokio::time::timeout(self.shared.statement_timeout, running).await;
        let took = begun.elapsed();
        let statement = name(sql);
        if took > SLOW {
            tracing::warn!(statement, ?took, "a statement was slow");
        } else {
            tracing::trace!(statement, ?took, "ran a statement");
        }
        match result {
            Ok(Ok(rows)) => Ok(rows),
            Ok(Err(error)) => {
                tracing::debug!(statement, error = %causes(&error), "a statement failed");
                Err(self.failed(effect, statement, error))
            }
            Err(_) => Err(self.too_long(effect)),
        }
    }

    /// What a failure means, noted for whoever asks how the database is.
    fn failed(&self, effect: Effect, statement: &str, error: tokio_postgres::Error) -> Failure {
        let Some(reported) = error.as_db_error() else {
            return self.lost(effect, error.into());
        };
        let meaning = sqlstate::meaning(reported);
        self.shared.health.note(meaning, statement, reported);
        if meaning == Meaning::ReadOnly {
            self.is_read_only();
        }
        let error: Cause = error.into();
        let (error, breaks) = match meaning {
            Meaning::Again => (RunError::Again(Error::Unavailable(error)), false),
            Meaning::Busy | Meaning::Down | Meaning::Mistake => {
                (RunError::Failed(Error::Unavailable(error)), false)
            }
            // A fail-over made this server a standby: the next connection looks for the new primary.
            Meaning::ReadOnly => (RunError::Failed(Error::Unavailable(error)), true),
            Meaning::Refused => (RunError::Failed(Error::Refused(error)), false),
            Meaning::Lost => return self.lost(effect, error),
        };
        Failure { error, breaks }
    }

    /// The answer will not come. A write that is in doubt is reason to look whether writes work.
    fn lost(&self, effect: Effect, cause: Cause) -> Failure {
        if effect == Effect::Write {
            self.shared.health.suspect(causes(&*cause));
        }
        Failure::lost(effect, cause)
    }

    /// Gives a statement up. The server is asked to stop it, so that it does not hold locks for ever; whether it
    /// does is not waited for.
    fn too_long(&self, effect: Effect) -> Failure {
        let token = self.client.cancel_token();
        let shared = self.shared.clone();
        tasks::short(async move {
            let asking = token.cancel_query(shared.tls);
            let asked = tokio::time::timeout(shared.connect_timeout, asking).await;
            tracing::debug!(reached = matches!(asked, Ok(Ok(()))), "gave a statement up");
        });
        self.lost(effect, "the statement took too long".into())
    }
}

/// The statements of one transaction.
pub(super) struct Transaction<'a>(&'a mut Connection);

impl Transaction<'_> {
    /// Runs one statement. It changes nothing before the commit, so its failure is never in doubt.
    pub(super) async fn run(
        &mut self,
        sql: &str,
        params: Params<'_>,
    ) -> Result<Vec<Row>, RunError> {
        self.0.answer(Effect::Read, sql, params).await.map_err(|failure| failure.error)
    }

    /// Runs statements without parameters.
    pub(super) async fn plain(&mut self, sql: &str) -> Result<(), RunError> {
        self.0.plain(Effect::Read, sql).await
    }

    /// Ends the transaction: it did nothing.
    pub(super) async fn roll_back(self) -> Result<(), RunError> {
        self.0.plain(Effect::Read, "ROLLBACK").await?;
        self.0.broken = false;
        Ok(())
    }

    /// Ends the transaction: when this is done, what it did is durable.
    pub(super) async fn commit(self) -> Result<(), RunError> {
        self.0.plain(Effect::Write, "COMMIT").await?;
        self.0.broken = false;
        Ok(())
    }
}

/// A statement's name: the comment in its first line.
fn name(sql: &str) -> &str {
    sql.lines().next().unwrap_or_default().trim_start_matches("-- ")
}

struct Failure {
    error: RunError,
    /// The connection must not be used again.
    breaks: bool,
}

impl Failure {
    fn lost(effect: Effect, cause: Cause) -> Self {
        let error = match effect {
            Effect::Read => Error::Unavailable(cause),
            Effect::Write => Error::InDoubt(cause),
        };
        Self { error: RunError::Failed(error), breaks: true }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_statement_is_named_by_its_first_line() {
        assert_eq!(name("-- reserve\nSELECT 1"), "reserve");
    }
}
