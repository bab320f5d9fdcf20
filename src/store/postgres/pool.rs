//! The pool, the connections outside it, and what is run again on another connection.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bb8::PooledConnection;
use tokio::sync::Mutex;
use tokio_postgres::Row;
use tokio_postgres::error::SqlState;

use super::connection::{Connection, Effect};
use super::connector::Connector;
use super::health::Health;
use super::param::Params;
use crate::store::batch::RunError;
use crate::store::{Cause, Error};
use crate::telemetry::causes;

/// How often a deadlock or serialization failure is repeated before the caller gets an error.
const AGAIN_MAX: u32 = 8;

/// What is done with a connection of the pool, and may be done again from its beginning.
#[async_trait]
pub(super) trait Retryable: Sync {
    /// Its result.
    type Done: Send;

    /// Does it, in one transaction.
    async fn run(&self, connection: &mut Connection) -> Result<Self::Done, RunError>;
}

/// The usual case: one statement.
struct Single<'a> {
    effect: Effect,
    sql: &'a str,
    params: Params<'a>,
}

#[async_trait]
impl Retryable for Single<'_> {
    type Done = Vec<Row>;

    async fn run(&self, connection: &mut Connection) -> Result<Vec<Row>, RunError> {
        connection.run(self.effect, self.sql, self.params).await
    }
}

// Long enough for a change of ours that is about to commit, short beside anybody's patience.
const BEGIN_FENCED: &str = "-- begin_fenced
BEGIN ISOLATION LEVEL READ COMMITTED;
SET LOCAL lock_timeout = '20ms'";

/// A change of one record that waits for nobody's transaction. `None`: somebody's holds the row.
struct Fenced<'a> {
    sql: &'a str,
    params: Params<'a>,
}

#[async_trait]
impl Retryable for Fenced<'_> {
    type Done = Option<Vec<Row>>;

    async fn run(&self, connection: &mut Connection) -> Result<Option<Vec<Row>>, RunError> {
        let mut transaction = connection.begin(BEGIN_FENCED).await?;
        match transaction.run(self.sql, self.params).await {
            Ok(rows) => {
                transaction.commit().await?;
                Ok(Some(rows))
            }
            Err(RunError::Failed(Error::Unavailable(cause))) if is_lock(&cause) => {
                transaction.roll_back().await?;
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

fn is_lock(cause: &Cause) -> bool {
    let error = cause.downcast_ref::<tokio_postgres::Error>();
    error.and_then(tokio_postgres::Error::code) == Some(&SqlState::LOCK_NOT_AVAILABLE)
}

/// Logs why the pool could not connect.
#[derive(Clone, Debug)]
struct LogErrors;

impl bb8::ErrorSink<Cause> for LogErrors {
    fn sink(&self, error: Cause) {
        tracing::warn!(error = %causes(&*error), "a connection to the database failed");
    }

    fn boxed_clone(&self) -> Box<dyn bb8::ErrorSink<Cause>> {
        Box::new(self.clone())
    }
}

/// The pool that everything uses but what has a dedicated connection.
#[derive(Clone)]
pub(super) struct Pool {
    pool: bb8::Pool<Connector>,
    health: Arc<Health>,
}

impl Pool {
    /// A pool of at most `size` connections, made when they are needed.
    pub(super) fn new(connector: Connector, size: u32) -> Self {
        let (wait, health) = (connector.connect_timeout(), Arc::clone(connector.health()));
        let pool = bb8::Pool::builder()
            .max_size(size.max(1))
            .test_on_check_out(true)
            .connection_timeout(wait)
            .error_sink(Box::new(LogErrors))
            .build_unchecked(connector);
        Self { pool, health }
    }

    async fn get(&self) -> Result<PooledConnection<'_, Connector>, RunError> {
        let got = self.pool.get().await;
        got.map_err(|_| {
            let why = self.health.unreached().map_or_else(
                || "no connection was free or could be made".to_owned(),
                |why| format!("no connection could be made: {why}"),
            );
            Error::Unavailable(why.into()).into()
        })
    }

    /// Why the last connection could not be made, where none has been made since.
    pub(super) fn unreached(&self) -> Option<String> {
        self.health.unreached()
    }

    /// Runs a statement that reads. Where a connection was lost meanwhile, once more on another.
    pub(super) async fn read(&self, sql: &str, params: Params<'_>) -> Result<Vec<Row>, Error> {
        let reading = Single { effect: Effect::Read, sql, params };
        match self.run(&reading).await {
            Err(Error::Unavailable(cause)) if cause.is::<tokio_postgres::Error>() => {
                self.run(&reading).await
            }
            result => result,
        }
    }

    /// Runs a statement that writes, in a transaction of its own.
    pub(super) async fn write(&self, sql: &str, params: Params<'_>) -> Result<Vec<Row>, Error> {
        self.run(&Single { effect: Effect::Write, sql, params }).await
    }

    /// Runs a statement that changes one record, in a transaction of its own, unless somebody else's holds the row:
    /// an application's may do so for as long as it likes, and no connection is spent on waiting for it.
    pub(super) async fn change(
        &self,
        sql: &str,
        params: Params<'_>,
    ) -> Result<Option<Vec<Row>>, Error> {
        let change = Fenced { sql, params };
        match self.run(&change).await {
            // Lost before its commit was sent, so it changed nothing: once more, as with a read.
            Err(Error::Unavailable(cause)) if cause.is::<tokio_postgres::Error>() => {
                self.run(&change).await
            }
            result => result,
        }
    }

    /// Runs it on a connection, again after deadlocks and serialization failures.
    pub(super) async fn run<T: Retryable>(&self, work: &T) -> Result<T::Done, Error> {
        let mut tries = 0;
        loop {
            let result = match self.get().await {
                Ok(mut connection) => work.run(&mut connection).await,
                Err(error) => Err(error),
            };
            match result {
                Ok(done) => return Ok(done),
                Err(RunError::Again(_)) if tries < AGAIN_MAX => tries += 1,
                Err(error) => return Err(error.into_error()),
            }
            // As good as at once, but not in step with the other side of the deadlock.
            let pause = Duration::from_millis(fastrand::u64(0..=5 * u64::from(tries)));
            tokio::time::sleep(pause).await;
        }
    }
}

/// A dedicated connection: one outside the pool, made again when it was lost, so that this work waits for
/// nobody else's.
#[derive(Clone)]
pub(super) struct Dedicated {
    connector: Connector,
    slot: Arc<Mutex<Option<Connection>>>,
    /// Until when rows are skipped that somebody's transaction holds.
    skipping: Arc<parking_lot::Mutex<Option<Instant>>>,
}

/// A write in two forms that do the same. To skip locked rows costs a look and a lock for each row, and there rarely are any.
#[derive(Clone, Copy)]
pub(super) struct LockForms {
    /// Waits for a row that somebody's transaction holds, for 20 ms; then it fails, and has changed nothing.
    pub(super) waiting: &'static str,
    /// Skips such rows.
    pub(super) skipping: &'static str,
}

/// For how long locked rows are skipped after one was held.
const SKIP_FOR: Duration = Duration::from_secs(1);

impl Dedicated {
    pub(super) fn new(connector: Connector) -> Self {
        Self { connector, slot: Arc::default(), skipping: Arc::default() }
    }

    /// Runs a write in the form that waits, or, where a row was held lately, in the one that skips such rows.
    pub(super) async fn write(
        &self,
        forms: LockForms,
        params: Params<'_>,
    ) -> Result<Vec<Row>, RunError> {
        if !self.skips() {
            match self.run(Effect::Write, forms.waiting, params).await {
                Err(RunError::Failed(Error::Unavailable(cause))) if is_lock(&cause) => {
                    let until = Instant::now() + SKIP_FOR;
                    *self.skipping.lock() = Some(until);
                }
                result => return result,
            }
        }
        self.run(Effect::Write, forms.skipping, params).await
    }

    fn skips(&self) -> bool {
        let until = *self.skipping.lock();
        until.is_some_and(|until| Instant::now() < until)
    }

    /// Runs one statement.
    pub(super) async fn run(
        &self,
        effect: Effect,
        sql: &str,
        params: Params<'_>,
    ) -> Result<Vec<Row>, RunError> {
        let mut slot = self.slot.lock().await;
        if !slot.as_ref().is_some_and(Connection::usable) {
            *slot = None;
            *slot = Some(self.connector.connect().await.map_err(Error::Unavailable)?);
        }
        match slot.as_mut() {
            Some(connection) => connection.run(effect, sql, params).await,
            None => Err(Error::Unavailable("no connection".into()).into()),
        }
    }
}
