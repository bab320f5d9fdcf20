//! Opens the store at the start, also if the database is away for a while.
//!
//! A start on Postgres is tried until it succeeds, until it fails for a reason that does not pass, or until
//! `store.wait_at_start` is over. Each try begins anew, and every step of it can be repeated. A start on SQLite is tried once.
//!
//! Invariant: the order within a try is migrate, drain the spill, count, lease. The gate (`store::awaited`) opens after it.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use uuid::Uuid;

use super::start::{StartError, sealed};
use crate::backoff::Backoff;
use crate::config::{self, StoreKind};
use crate::gateway::spill::{self, Unopened};
use crate::lease::{self, Contact};
use crate::record::LeaseView;
use crate::record::event::subscription::Subscriber;
use crate::store::awaited::Gate;
use crate::store::postgres::{self, Postgres};
use crate::store::sqlite::{self, Location, Sqlite};
use crate::store::{Backlog, Store};
use crate::telemetry::{Metrics, causes};

/// How long a start may take before the process listens without its store.
const HEAD_START: Duration = Duration::from_secs(1);

/// Longest pause between two tries. It is short, so that the start succeeds soon after the database is back.
const PAUSE_MAX: Duration = Duration::from_secs(3);

/// How often the log says that the store is still not open, for the same reason and for a new one.
const TELL_EVERY: Duration = Duration::from_secs(60);
const TELL_OTHER_EVERY: Duration = Duration::from_secs(10);

/// How long the store may be away while the spill is drained. After this a start on SQLite fails, and a start on Postgres is
/// tried again.
const DRAIN_ON_SQLITE: Duration = Duration::from_secs(30);
const DRAIN_ON_POSTGRES: Duration = Duration::from_secs(1);

/// How many records of dead owners are marked in one statement at the start.
const MARK_BATCH: u32 = 500;

/// A start on a store that runs. It can be dropped at any time without harm.
pub(super) struct Opening {
    trying: Pin<Box<dyn Future<Output = Result<(), StartError>>>>,
    /// Notified when a try failed for a reason that may pass.
    failed: Arc<Notify>,
    /// After this time the process listens without its store. `None`: only after a try has failed.
    head_start: Option<Duration>,
}

impl Opening {
    /// `true`: the store is open. `false`: it takes longer, and the process listens without it.
    pub(super) async fn soon(&mut self) -> Result<bool, StartError> {
        let late = async {
            match self.head_start {
                Some(head_start) => tokio::time::sleep(head_start).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            opened = self.trying.as_mut() => opened.map(|()| true),
            () = self.failed.notified() => Ok(false),
            () = late => Ok(false),
        }
    }

    /// Waits until the store is open. Must not be called again after it has returned.
    pub(super) async fn end(&mut self) -> Result<(), StartError> {
        self.trying.as_mut().await
    }
}

/// Whether a process serves requests before the store is open, if only the start takes long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ListenEarly {
    /// Yes, after [`HEAD_START`]: a request without a route needs no store.
    Yes,
    /// No: with `on_unavailable = "bypass"` these requests would go unprotected.
    No,
}

/// What a start needs, and what it sets.
pub(super) struct StoreStart {
    pub(super) settings: config::Store,
    /// For events that applications write in the database.
    pub(super) sinks: Vec<Subscriber>,
    pub(super) metrics: Arc<Metrics>,
    /// Counted before the first request, so that a restart lets no event exceed it.
    pub(super) backlog: Backlog,
    pub(super) spill: Unopened,
    pub(super) lease: LeaseView,
    pub(super) contact: Contact,
    pub(super) gate: Gate,
}

/// Opens the store of `serve`. Locks a SQLite file, and marks the records that the last process left.
pub(super) fn to_serve(start: StoreStart, early: ListenEarly) -> Opening {
    let failed = Arc::new(Notify::new());
    match start.settings.kind.clone() {
        StoreKind::Sqlite(location) => {
            let trying = Box::pin(async move { on_sqlite(&location, start).await });
            Opening { trying, failed, head_start: None }
        }
        StoreKind::Postgres(postgres) => {
            let tell = Arc::clone(&failed);
            let trying = Box::pin(async move { on_postgres(postgres, start, &tell).await });
            let head_start = (early == ListenEarly::Yes).then_some(HEAD_START);
            Opening { trying, failed, head_start }
        }
    }
}

/// Opens the store of a relay. A relay has no spill and marks no records.
pub(super) fn to_relay(
    settings: config::Store,
    postgres: postgres::Settings,
    lease: LeaseView,
    contact: Contact,
    gate: Gate,
) -> Opening {
    let failed = Arc::new(Notify::new());
    let tell = Arc::clone(&failed);
    let trying = Box::pin(async move {
        let mut server = Server::new(postgres);
        let store = until(settings.wait_at_start, &gate, &tell, async || {
            let store = server.store(&settings).await?;
            lease::begin(&*store, settings.lease, &lease).await?;
            Ok(store)
        })
        .await?;
        contact.reached(Instant::now().into_std());
        gate.open(store);
        Ok(())
    });
    Opening { trying, failed, head_start: Some(HEAD_START) }
}

async fn on_sqlite(location: &Location, start: StoreStart) -> Result<(), StartError> {
    let settings = &start.settings;
    let lock = sqlite::lock(location)?;
    let cut = lock.found_it_cut();
    let sqlite = Arc::new(Sqlite::open_locked(location, lock).await?);
    if cut {
        sqlite.check_whole().await?;
    }
    sqlite.migrate(settings.migrate).await?;
    let store = sealed(Arc::<Sqlite>::clone(&sqlite), settings);
    let database = start.drain(&store, DRAIN_ON_SQLITE).await?;
    // This process holds the lock, so no other process lives. Every lease in the file belongs to a dead process.
    sqlite.end_all_leases().await?;
    while store.mark_dead(None, MARK_BATCH).await? > 0 {}
    start.begin(&store).await?;
    start.finish(store, database)
}

async fn on_postgres(
    postgres: postgres::Settings,
    start: StoreStart,
    failed: &Notify,
) -> Result<(), StartError> {
    let settings = &start.settings;
    let mut server = Server::new(postgres);
    let tried = until(settings.wait_at_start, &start.gate, failed, async || {
        let store = server.store(settings).await?;
        server.name_sinks(&start.sinks).await?;
        let database = start.drain(&store, DRAIN_ON_POSTGRES).await?;
        start.begin(&store).await?;
        Ok((store, database))
    });
    let (store, database) = tried.await?;
    start.finish(store, database)
}

impl StoreStart {
    /// Writes the outcomes that dead processes left in the spill, before their records are marked. Returns the id of the
    /// database.
    async fn drain(&self, store: &Arc<dyn Store>, patience: Duration) -> Result<Uuid, StartError> {
        let database = store.database_id().await?;
        let config::Store { spill, keys, .. } = &self.settings;
        spill::drain(&spill.dir, database, keys, store, &self.metrics, patience).await?;
        Ok(database)
    }

    async fn begin(&self, store: &Arc<dyn Store>) -> Result<(), StartError> {
        if self.backlog.most().is_some() {
            self.backlog.counted(&store.gauges().await?);
        }
        lease::begin(&**store, self.settings.lease, &self.lease).await?;
        Ok(())
    }

    /// Opens the spill and the gate.
    fn finish(self, store: Arc<dyn Store>, database: Uuid) -> Result<(), StartError> {
        // After the drain, because on a full disk the drain makes the room that the spill needs.
        self.spill.open(&self.settings.spill.dir, database)?;
        self.contact.reached(Instant::now().into_std());
        self.gate.open(store);
        Ok(())
    }
}

/// A Postgres. The first try that reaches it keeps the connection pool for the next tries.
struct Server {
    settings: postgres::Settings,
    reached: Option<Arc<Postgres>>,
}

impl Server {
    fn new(settings: postgres::Settings) -> Self {
        Self { settings, reached: None }
    }

    /// The store, migrated to this program's schema.
    async fn store(&mut self, settings: &config::Store) -> Result<Arc<dyn Store>, StartError> {
        let postgres = match &self.reached {
            Some(postgres) => Arc::clone(postgres),
            None => {
                let opened = Arc::new(Postgres::open(self.settings.clone()).await?);
                Arc::clone(self.reached.insert(opened))
            }
        };
        postgres.migrate(settings.migrate).await?;
        Ok(sealed(postgres, settings))
    }

    async fn name_sinks(&self, sinks: &[Subscriber]) -> Result<(), StartError> {
        if let Some(postgres) = &self.reached {
            postgres.name_sinks(sinks).await?;
        }
        Ok(())
    }
}

/// Tries until an attempt succeeds, fails for good, or the time is over.
async fn until<T>(
    limit: Option<Duration>,
    gate: &Gate,
    failed: &Notify,
    mut attempt: impl AsyncFnMut() -> Result<T, StartError>,
) -> Result<T, StartError> {
    let (begun, mut log) = (Instant::now(), RetryLog::default());
    let mut pauses = Backoff::new(Duration::from_millis(100), PAUSE_MAX);
    loop {
        let error = match attempt().await {
            Err(error) if error.may_pass() => error,
            ended => {
                if ended.is_ok() {
                    log.over(begun.elapsed());
                }
                return ended;
            }
        };
        let left = limit.map(|limit| limit.saturating_sub(begun.elapsed()));
        if let (Some(limit), Some(Duration::ZERO)) = (limit, left) {
            return Err(StartError::Waited { limit, cause: Box::new(error) });
        }
        let why = causes(&error);
        log.tell(&why);
        gate.explain(why);
        failed.notify_one();
        let pause = pauses.pause();
        tokio::time::sleep(left.map_or(pause, |left| pause.min(left))).await;
    }
}

/// When a failed try was logged last. The first failure is logged, and later ones from time to time.
#[derive(Default)]
struct RetryLog(Option<(Instant, String)>);

impl RetryLog {
    fn tell(&mut self, why: &str) {
        let due = self.0.as_ref().is_none_or(|(at, told)| {
            let every = if told == why { TELL_EVERY } else { TELL_OTHER_EVERY };
            at.elapsed() >= every
        });
        if due {
            tracing::warn!(error = why, "the store cannot be opened yet: the start is tried again");
            self.0 = Some((Instant::now(), why.to_owned()));
        }
    }

    fn over(&self, after: Duration) {
        if self.0.is_some() {
            tracing::info!(?after, "the store is open now");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{OpenError, awaited};

    /// Runs a start whose tries end as `comes_to` says for the time that has passed. Returns how it ended, and after how long.
    async fn tried(
        limit: Option<Duration>,
        comes_to: impl Fn(Duration) -> Result<(), OpenError>,
    ) -> (Result<(), StartError>, Duration) {
        let ((_, gate), begun) = (awaited::awaited(), Instant::now());
        let attempt = async || comes_to(begun.elapsed()).map_err(StartError::from);
        let ended = until(limit, &gate, &Notify::new(), attempt).await;
        (ended, begun.elapsed())
    }

    fn away(_: Duration) -> Result<(), OpenError> {
        Err(OpenError::Away { place: "here".to_owned(), cause: "refused".into() })
    }

    #[tokio::test(start_paused = true)]
    async fn a_start_goes_on_within_seconds_of_the_databases_coming() {
        const HOUR: Duration = Duration::from_secs(3600);
        let (ended, after) = tried(None, |at| if at < HOUR { away(at) } else { Ok(()) }).await;
        assert!(ended.is_ok() && after >= HOUR && after <= HOUR + PAUSE_MAX, "{after:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_start_waits_no_longer_than_it_may() {
        for limit in [Duration::ZERO, Duration::from_millis(250), Duration::from_secs(30)] {
            let (ended, after) = tried(Some(limit), away).await;
            assert!(matches!(ended, Err(StartError::Waited { .. })), "{ended:?}");
            assert!(after >= limit && after <= limit + Duration::from_millis(5), "{after:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_no_time_mends_ends_a_start_whenever_it_is_found() {
        let newer = |at| match at < Duration::from_secs(5) {
            true => away(at),
            false => Err(OpenError::NewerSchema { found: 2, known: 1 }),
        };
        let (ended, _) = tried(None, newer).await;
        let newer = matches!(ended, Err(StartError::Open(OpenError::NewerSchema { .. })));
        assert!(newer, "{ended:?}");
    }
}
