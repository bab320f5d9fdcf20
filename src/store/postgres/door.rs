//! The one door to the database: connections, and how a statement is run.
//!
//! Every statement goes through [`Connection::run`], which names it, times it, bounds it and says what its failure
//! means. What must stay true:
//!
//! - Statements are unnamed and one-shot, and a pooler that hands each transaction another server connection does no harm:
//!   there is no session state. Each is planned anew with its values, but for the two batches that every first request is
//!   part of: those are functions of the schema, whose plans the server keeps.
//! - A connection serves again only after the answer to its last statement has arrived. A caller that is dropped in
//!   the middle, a time-out or a broken transaction spoil it; it is closed then.
//! - A write whose answer did not arrive is in doubt; a read, or what the server reports as failed, is not. See `sqlstate`.
//! - Hosts are tried one after the other, each within its own time, beginning with the one that served last. Where a
//!   server turns out to be read-only, or another host serves than before, there was a fail-over: all connections made
//!   so far are closed before their next use, so that nobody goes on reading from the old one.

use std::future::Future;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bb8::{ManageConnection, Pool, PooledConnection};
use tokio::sync::Mutex;
use tokio::task::AbortHandle;
use tokio_postgres::config::{Host, LoadBalanceHosts};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Config, Row};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::refusal::NoHost;
use super::sqlstate::{self, Meaning};
use super::trouble::Trouble;
use crate::store::batch::RunError;
use crate::store::{Cause, Error};
use crate::tasks;
use crate::telemetry::causes;

/// How often a deadlock or serialization failure is repeated before the caller is told.
const AGAIN_MAX: u32 = 8;

/// A statement that takes longer is worth a line in the log.
const SLOW: Duration = Duration::from_secs(1);

/// Parameters with their types: nothing is asked of the server before the statement is sent.
pub(super) type Params<'a> = &'a [Param<'a>];

/// One parameter.
pub(super) type Param<'a> = (&'a (dyn ToSql + Sync), Type);

/// What a statement does, which decides what a lost answer means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// It only reads.
    Read,
    /// It changes something when it commits.
    Write,
}

/// How to connect. Clones are one dial.
#[derive(Clone)]
pub(super) struct Dial {
    hosts: Arc<[Config]>,
    random: bool,
    /// The host that served last.
    last: Arc<AtomicUsize>,
    /// Counts fail-overs: connections of an era that is over are not used again.
    era: Arc<AtomicU64>,
    trouble: Arc<Trouble>,
    tls: MakeRustlsConnect,
    connect_timeout: Duration,
    statement_timeout: Duration,
}

impl Dial {
    /// To the hosts of `config`: connecting to one of them, and one statement, may take so long.
    pub(super) fn new(
        config: &Config,
        tls: MakeRustlsConnect,
        connect_timeout: Duration,
        statement_timeout: Duration,
    ) -> Self {
        Self {
            hosts: each_host(config).into(),
            random: config.get_load_balance_hosts() == LoadBalanceHosts::Random,
            last: Arc::default(),
            era: Arc::default(),
            trouble: Arc::default(),
            tls,
            connect_timeout,
            statement_timeout,
        }
    }

    /// The same, for statements that take longer.
    pub(super) fn with_statement_timeout(self, statement_timeout: Duration) -> Self {
        Self { statement_timeout, ..self }
    }

    /// What is known of the database's troubles. All clones see one.
    pub(super) fn trouble(&self) -> &Arc<Trouble> {
        &self.trouble
    }

    /// A new connection, to the first host that gives one.
    ///
    /// # Errors
    /// Whatever kept it from being made, of each host.
    pub(super) async fn connect(&self) -> Result<Connection, Cause> {
        let count = self.hosts.len();
        let first =
            if self.random { fastrand::usize(..) } else { self.last.load(Ordering::Relaxed) };
        let mut failures = Vec::new();
        for n in (0..count).map(|n| first.wrapping_add(n) % count) {
            let Some(host) = self.hosts.get(n) else { continue };
            match self.connect_to(host).await {
                Ok(mut connection) => {
                    let moved = self.last.swap(n, Ordering::Relaxed) != n;
                    // Hosts that are taken at random all serve.
                    if moved && !self.random {
                        let before = self.era.fetch_add(1, Ordering::Relaxed);
                        connection.era = before.wrapping_add(1);
                    }
                    return Ok(connection);
                }
                Err(cause) => failures.push((place(host), cause)),
            }
        }
        if let [_] = failures.as_slice()
            && let Some((_, cause)) = failures.pop()
        {
            return Err(cause);
        }
        Err(NoHost::new(&failures).into())
    }

    async fn connect_to(&self, host: &Config) -> Result<Connection, Cause> {
        let era = self.era.load(Ordering::Relaxed);
        let connecting = host.connect(self.tls.clone());
        let (client, connection) = tokio::time::timeout(self.connect_timeout, connecting)
            .await
            .map_err(|_| "connecting took too long")??;
        let task = tasks::short(async move {
            if let Err(error) = connection.await {
                tracing::debug!(error = %causes(&error), "a connection to the database ended");
            }
        });
        let (task, dial) = (task.abort_handle(), self.clone());
        Ok(Connection { client, task, dial, era, spoiled: false })
    }
}

/// One configuration for each host, so that a host that does not answer uses up its own time only.
fn each_host(config: &Config) -> Vec<Config> {
    let count = config.get_hosts().len().max(config.get_hostaddrs().len());
    // What does not fit together is refused by the driver, in its own words.
    if count < 2 || (config.get_ports().len() > 1 && config.get_ports().len() != count) {
        return vec![config.clone()];
    }
    let host = |n: usize| {
        let mut one = without_hosts(config);
        match config.get_hosts().get(n) {
            Some(Host::Tcp(name)) => {
                one.host(name);
            }
            #[cfg(unix)]
            Some(Host::Unix(path)) => {
                one.host_path(path);
            }
            None => {}
        }
        if let Some(address) = config.get_hostaddrs().get(n) {
            one.hostaddr(*address);
        }
        if let Some(port) = config.get_ports().get(n).or(config.get_ports().first()) {
            one.port(*port);
        }
        one
    };
    (0..count).map(host).collect()
}

/// All that a configuration says but for its hosts. The driver has no way to take a host away.
fn without_hosts(config: &Config) -> Config {
    let mut one = Config::new();
    if let Some(user) = config.get_user() {
        one.user(user);
    }
    if let Some(password) = config.get_password() {
        one.password(password);
    }
    if let Some(name) = config.get_dbname() {
        one.dbname(name);
    }
    if let Some(options) = config.get_options() {
        one.options(options);
    }
    if let Some(name) = config.get_application_name() {
        one.application_name(name);
    }
    if let Some(timeout) = config.get_connect_timeout() {
        one.connect_timeout(*timeout);
    }
    if let Some(timeout) = config.get_tcp_user_timeout() {
        one.tcp_user_timeout(*timeout);
    }
    if let Some(interval) = config.get_keepalives_interval() {
        one.keepalives_interval(interval);
    }
    if let Some(retries) = config.get_keepalives_retries() {
        one.keepalives_retries(retries);
    }
    one.keepalives(config.get_keepalives())
        .keepalives_idle(config.get_keepalives_idle())
        .ssl_mode(config.get_ssl_mode())
        .ssl_negotiation(config.get_ssl_negotiation())
        .target_session_attrs(config.get_target_session_attrs())
        .channel_binding(config.get_channel_binding())
        .load_balance_hosts(config.get_load_balance_hosts());
    one
}

/// Where the database is, without user or password.
pub(super) fn place(config: &Config) -> String {
    let ports = config.get_ports();
    let hosts: Vec<String> = config
        .get_hosts()
        .iter()
        .enumerate()
        .map(|(n, host)| {
            let port = ports.get(n).or(ports.first()).copied().unwrap_or(5432);
            match host {
                Host::Tcp(name) => format!("{name}:{port}"),
                #[cfg(unix)]
                Host::Unix(path) => format!("{}:{port}", path.display()),
            }
        })
        .collect();
    format!("postgres://{}/{}", hosts.join(","), config.get_dbname().unwrap_or_default())
}

/// A connection. Dropping it closes its socket at once.
pub(super) struct Connection {
    client: Client,
    task: AbortHandle,
    dial: Dial,
    era: u64,
    spoiled: bool,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Connection {
    fn usable(&self) -> bool {
        let current = self.era == self.dial.era.load(Ordering::Relaxed);
        !self.spoiled && current && !self.client.is_closed()
    }

    /// The server takes no writes: neither this connection nor any that was made before is used again.
    pub(super) fn is_read_only(&self) {
        let (era, next) = (self.era, self.era.wrapping_add(1));
        let turned =
            self.dial.era.compare_exchange(era, next, Ordering::Relaxed, Ordering::Relaxed);
        if turned.is_ok() {
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
        self.spoiled = true;
        let result = self.answer(effect, sql, params).await;
        // The server has answered, so the connection is clean; a lost answer closes it by itself.
        self.spoiled = matches!(&result, Err(failure) if failure.spoils);
        result.map_err(|failure| failure.error)
    }

    /// Begins a transaction. Unless it is committed, the connection is closed, which rolls back.
    pub(super) async fn begin(&mut self, begin: &str) -> Result<Transaction<'_>, RunError> {
        self.spoiled = true;
        self.plain(Effect::Read, begin).await?;
        Ok(Transaction(self))
    }

    /// Runs statements without parameters, as a migration is.
    pub(super) async fn plain(&mut self, effect: Effect, sql: &str) -> Result<(), RunError> {
        let running = self.client.batch_execute(sql);
        let result = tokio::time::timeout(self.dial.statement_timeout, running).await;
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
        let running = self.client.query_typed(sql, params);
        let result = tokio::time::timeout(self.dial.statement_timeout, running).await;
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
        self.dial.trouble.note(meaning, statement, reported);
        if meaning == Meaning::ReadOnly {
            self.is_read_only();
        }
        let error: Cause = error.into();
        let (error, spoils) = match meaning {
            Meaning::Again => (RunError::Again(Error::Unavailable(error)), false),
            Meaning::Busy | Meaning::Down | Meaning::Mistake => {
                (RunError::Failed(Error::Unavailable(error)), false)
            }
            // A fail-over made this server a standby: the next connection looks for the new primary.
            Meaning::ReadOnly => (RunError::Failed(Error::Unavailable(error)), true),
            Meaning::Refused => (RunError::Failed(Error::Refused(error)), false),
            Meaning::Lost => return self.lost(effect, error),
        };
        Failure { error, spoils }
    }

    /// The answer will not come. A write that is in doubt is reason to look whether writes work.
    fn lost(&self, effect: Effect, cause: Cause) -> Failure {
        if effect == Effect::Write {
            self.dial.trouble.suspect(causes(&*cause));
        }
        Failure::lost(effect, cause)
    }

    /// Gives a statement up. The server is asked to stop it, so that it does not hold locks for ever; whether it
    /// does is not waited for.
    fn too_long(&self, effect: Effect) -> Failure {
        let token = self.client.cancel_token();
        let dial = self.dial.clone();
        tasks::short(async move {
            let asking = token.cancel_query(dial.tls);
            let asked = tokio::time::timeout(dial.connect_timeout, asking).await;
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
        self.0.spoiled = false;
        Ok(())
    }

    /// Ends the transaction: when this is done, what it did is durable.
    pub(super) async fn commit(self) -> Result<(), RunError> {
        self.0.plain(Effect::Write, "COMMIT").await?;
        self.0.spoiled = false;
        Ok(())
    }
}

/// What is done with a connection of the pool, and may be done again from its beginning.
#[async_trait]
pub(super) trait Task: Sync {
    /// Its result.
    type Done: Send;

    /// Does it, in one transaction.
    async fn run(&self, connection: &mut Connection) -> Result<Self::Done, RunError>;
}

/// The usual task: one statement.
struct Single<'a> {
    effect: Effect,
    sql: &'a str,
    params: Params<'a>,
}

#[async_trait]
impl Task for Single<'_> {
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
impl Task for Fenced<'_> {
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

/// A statement's name: the comment in its first line.
fn name(sql: &str) -> &str {
    sql.lines().next().unwrap_or_default().trim_start_matches("-- ")
}

struct Failure {
    error: RunError,
    /// The connection must not be used again.
    spoils: bool,
}

impl Failure {
    fn lost(effect: Effect, cause: Cause) -> Self {
        let error = match effect {
            Effect::Read => Error::Unavailable(cause),
            Effect::Write => Error::InDoubt(cause),
        };
        Self { error: RunError::Failed(error), spoils: true }
    }
}

impl ManageConnection for Dial {
    type Connection = Connection;
    type Error = Cause;

    fn connect(&self) -> impl Future<Output = Result<Connection, Cause>> + Send {
        Self::connect(self)
    }

    /// Only what is known here: a round trip for each use would cost more than the rare failure that it finds.
    async fn is_valid(&self, connection: &mut Connection) -> Result<(), Cause> {
        if connection.usable() { Ok(()) } else { Err("the connection is closed".into()) }
    }

    fn has_broken(&self, connection: &mut Connection) -> bool {
        !connection.usable()
    }
}

/// Logs why the pool could not connect; the callers learn only that it took too long.
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

/// The pool that everything but the lanes uses.
#[derive(Clone)]
pub(super) struct Door {
    pool: Pool<Dial>,
}

impl Door {
    /// A pool of at most `size` connections, made when they are needed.
    pub(super) fn new(dial: Dial, size: u32) -> Self {
        let wait = dial.connect_timeout;
        let pool = Pool::builder()
            .max_size(size.max(1))
            .test_on_check_out(true)
            .connection_timeout(wait)
            .error_sink(Box::new(LogErrors))
            .build_unchecked(dial);
        Self { pool }
    }

    async fn get(&self) -> Result<PooledConnection<'_, Dial>, RunError> {
        let got = self.pool.get().await;
        got.map_err(|_| Error::Unavailable("no connection was free or could be made".into()).into())
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

    /// Runs a task on a connection, again after deadlocks and serialization failures.
    pub(super) async fn run<T: Task>(&self, task: &T) -> Result<T::Done, Error> {
        let mut tries = 0;
        loop {
            let result = match self.get().await {
                Ok(mut connection) => task.run(&mut connection).await,
                Err(error) => Err(error),
            };
            match result {
                Ok(done) => return Ok(done),
                Err(RunError::Failed(error) | RunError::Committed(error)) => return Err(error),
                Err(RunError::Again(error)) if tries == AGAIN_MAX => return Err(error),
                Err(RunError::Again(_)) => tries += 1,
            }
            // As good as at once, but not in step with the other side of the deadlock.
            let pause = Duration::from_millis(fastrand::u64(0..=5 * u64::from(tries)));
            tokio::time::sleep(pause).await;
        }
    }
}

/// A lane of its own: one connection outside the pool, made again when it was lost, so that this work waits for
/// nobody else's.
#[derive(Clone)]
pub(super) struct Lane {
    dial: Dial,
    slot: Arc<Mutex<Option<Connection>>>,
    /// Until when rows are passed by that somebody's transaction holds.
    passing: Arc<std::sync::Mutex<Option<Instant>>>,
}

/// A write in two forms that do the same. What is passed by costs a look and a lock for each row, and is rarely there.
#[derive(Clone, Copy)]
pub(super) struct Forms {
    /// Waits for a row that somebody's transaction holds, for 20 ms; then it fails, and has changed nothing.
    pub(super) plain: &'static str,
    /// Passes such rows by.
    pub(super) passing: &'static str,
}

/// For how long rows are passed by after one was held.
const PASSING: Duration = Duration::from_secs(1);

impl Lane {
    pub(super) fn new(dial: Dial) -> Self {
        Self { dial, slot: Arc::default(), passing: Arc::default() }
    }

    /// Runs a write in its plain form, or, where a row was held lately, in the one that passes such rows by.
    pub(super) async fn write(
        &self,
        forms: Forms,
        params: Params<'_>,
    ) -> Result<Vec<Row>, RunError> {
        if !self.passes() {
            match self.run(Effect::Write, forms.plain, params).await {
                Err(RunError::Failed(Error::Unavailable(cause))) if is_lock(&cause) => {
                    let until = Instant::now() + PASSING;
                    *self.passing.lock().unwrap_or_else(PoisonError::into_inner) = Some(until);
                }
                result => return result,
            }
        }
        self.run(Effect::Write, forms.passing, params).await
    }

    fn passes(&self) -> bool {
        let until = *self.passing.lock().unwrap_or_else(PoisonError::into_inner);
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
            *slot = Some(self.dial.connect().await.map_err(Error::Unavailable)?);
        }
        match slot.as_mut() {
            Some(connection) => connection.run(effect, sql, params).await,
            None => Err(Error::Unavailable("no connection".into()).into()),
        }
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
