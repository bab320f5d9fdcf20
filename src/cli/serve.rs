//! `serve`: everything is built before anything is spawned; then it runs until it is told to stop.
//!
//! Order of the start, on both stores: lock, migrate, drain the spill, mark what the last process left, listen, ready.
//! Order of the end: not ready, stop accepting, let what is reserved finish within the grace, spill what the database has
//! not taken, stop the relay, give the lease back.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::admin::{self, Readiness, Token};
use crate::config::{self, Config, Relayed, StoreKind};
use crate::gateway::accept::{self, Listener};
use crate::gateway::spill::{self, DrainError, Spill, Unwritable};
use crate::gateway::tokens::Tokens;
use crate::gateway::upstream::{self, Upstream};
use crate::gateway::{Gateway, Parts, Serve};
use crate::lease::{self, Contact};
use crate::record::LeaseView;
use crate::record::event::wanted::Subscriber;
use crate::relay::{Claimant, sink};
use crate::route::{ReplayAuth, Server};
use crate::store::postgres::Postgres;
use crate::store::sqlite::{self, Sqlite};
use crate::store::{self, OpenError, Store};
use crate::tasks::{self, Loop, Vital};
use crate::telemetry::Metrics;
use crate::{relay, sweep};

/// How many records of dead owners are marked in one statement at the start.
const MARK_BATCH: u32 = 500;

/// How long the end of the process waits for outcomes on their way into the spill, and for the spill itself.
const LEAVE_MAX: Duration = Duration::from_secs(5);

/// Why `serve` did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The store.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The store did not take the first statements.
    #[error("the store is not usable")]
    Store(#[from] store::Error),
    /// The spill's folder.
    #[error(transparent)]
    Spill(#[from] Unwritable),
    /// What the spill holds of dead processes.
    #[error(transparent)]
    Drain(#[from] DrainError),
    /// An address cannot be listened on.
    #[error("cannot listen on {address}")]
    Listen {
        /// Which.
        address: String,
        /// Why.
        #[source]
        cause: std::io::Error,
    },
    /// The key of the digests.
    #[error("the digest key cannot be read or made")]
    DigestKey(#[source] std::io::Error),
    /// A part of the configuration cannot be used.
    #[error("{0}")]
    Config(String),
}

/// A store that is open.
pub struct Opened {
    /// The store.
    pub store: Arc<dyn Store>,
    /// Whether this process is the only one that can own records: other owners are dead.
    pub alone: bool,
    /// Where outcomes are kept that it does not take; drained of what dead processes left.
    pub spill: Spill,
}

/// Opens the store for a command, beside whatever runs.
///
/// # Errors
/// See [`OpenError`]: also where the schema is not this program's.
pub async fn open(settings: &config::Store, migrate: bool) -> Result<Arc<dyn Store>, OpenError> {
    let store: Arc<dyn Store> = match &settings.kind {
        StoreKind::Sqlite(location) => {
            let store = Sqlite::open(location).await?;
            store.migrate(migrate).await?;
            Arc::new(store)
        }
        StoreKind::Postgres(postgres) => {
            let store = Postgres::open(postgres.clone()).await?;
            store.migrate(migrate).await?;
            Arc::new(store)
        }
    };
    Ok(sealed(store, settings))
}

/// The store as the program uses it: what it keeps is sealed, where there are keys.
fn sealed(store: Arc<dyn Store>, settings: &config::Store) -> Arc<dyn Store> {
    store::sealed::sealed(store::with_fault_points(store), Arc::clone(&settings.keys))
}

/// Opens the store for `serve`: locked where one process owns it, and cleared of what the last process left.
///
/// `sinks`: for what applications announce in the database itself.
async fn open_to_serve(
    settings: &config::Store,
    sinks: &[Subscriber],
    metrics: &Arc<Metrics>,
) -> Result<Opened, StartError> {
    let migrate = settings.migrate;
    match &settings.kind {
        StoreKind::Sqlite(location) => {
            let lock = sqlite::lock(location)?;
            let cut = lock.found_it_cut();
            let sqlite = Arc::new(Sqlite::open_locked(location, lock).await?);
            if cut {
                sqlite.check_whole().await?;
            }
            sqlite.migrate(migrate).await?;
            let store = sealed(Arc::<Sqlite>::clone(&sqlite), settings);
            let spill = own_spill(settings, &store, metrics).await?;
            // The lock says that no other process lives: every lease in the file is a dead one's.
            sqlite.end_all_leases().await?;
            while store.mark_dead(None, MARK_BATCH).await? > 0 {}
            Ok(Opened { store, alone: true, spill })
        }
        StoreKind::Postgres(postgres) => {
            let store = Postgres::open(postgres.clone()).await?;
            store.migrate(migrate).await?;
            store.name_sinks(sinks).await?;
            let store = sealed(Arc::new(store), settings);
            let spill = own_spill(settings, &store, metrics).await?;
            Ok(Opened { store, alone: false, spill })
        }
    }
}

/// This process's spill, after what dead ones left there is in the database: before it is marked as lost.
async fn own_spill(
    settings: &config::Store,
    store: &Arc<dyn Store>,
    metrics: &Arc<Metrics>,
) -> Result<Spill, StartError> {
    let database = store.database_id().await?;
    let keys = &settings.keys;
    spill::drain(&settings.spill.dir, database, keys, store, metrics).await?;
    // Last: on a full disk, what was drained is its room.
    Ok(Spill::open(&settings.spill, database, Arc::clone(metrics))?.sealed_with(Arc::clone(keys)))
}

/// A gateway that serves.
pub struct Running {
    /// Where it listens; none: a unix socket.
    pub addr: Option<SocketAddr>,
    /// Where its admin listener is.
    pub admin: SocketAddr,
    stop: Stop,
    tasks: TaskTracker,
    lease: TaskTracker,
    gateway: Arc<Gateway>,
    grace: Duration,
    opened: Opened,
}

/// The steps of stopping.
struct Stop {
    ready: Readiness,
    /// No new connections and requests.
    accept: CancellationToken,
    /// Everything else: relay, sweeper, admin.
    rest: CancellationToken,
    /// The lease: once it has ended, others take over whatever this process still had.
    lease: CancellationToken,
}

impl Stop {
    fn new(ready: &Readiness) -> Self {
        Self {
            ready: ready.clone(),
            accept: CancellationToken::new(),
            rest: CancellationToken::new(),
            lease: CancellationToken::new(),
        }
    }
}

/// Whether other owners may be judged by their leases now.
pub(super) type MayJudge = Arc<dyn Fn() -> bool + Send + Sync>;

pub(super) fn may_judge(contact: &Contact) -> MayJudge {
    let contact = contact.clone();
    Arc::new(move || contact.may_judge(Instant::now()))
}

/// Whose the relay's claims are. Alone, what a dead process had claimed was freed at the start, and a lapse of the own
/// lease frees nothing.
pub(super) fn claimant(lease: &LeaseView, may_judge: &MayJudge, alone: bool) -> Claimant {
    let may_judge = if alone { Arc::new(|| false) } else { Arc::clone(may_judge) };
    Claimant { lease: lease.clone(), may_judge }
}

/// Builds everything, then spawns it.
///
/// # Errors
/// See [`StartError`]; nothing runs then.
pub async fn start(config: Config) -> Result<Running, StartError> {
    let sinks: Vec<_> = config.relay.sinks.iter().map(sink::Settings::subscriber).collect();
    let (metrics, wake) = (Arc::new(Metrics::default()), Arc::new(Notify::new()));
    let opened = open_to_serve(&config.store, &sinks, &metrics).await?;
    let store = Arc::clone(&opened.store);
    if config.sweep.backlog.most().is_some() {
        // Known before the first request, lest a restart lets one beyond it.
        config.sweep.backlog.counted(&store.gauges().await?);
    }
    let now = Instant::now();
    let ttl = config.store.lease;
    let contact = if opened.alone { Contact::sole(now) } else { Contact::begin(ttl, now) };
    let view = lease::start(&store, ttl).await?;
    let operations: Arc<[String]> =
        config.routes.iter().map(|route| route.operation.as_str().to_owned()).collect();
    let may_judge = may_judge(&contact);
    let claimant = claimant(&view, &may_judge, opened.alone);
    let parts = Parts {
        upstreams: upstreams(&config)?,
        servers: servers(&config)?,
        tokens: config.jwt.map(Tokens::new).transpose().map_err(StartError::Config)?,
        routes: config.routes,
        store: Arc::clone(&store),
        lease: view.clone(),
        may_judge,
        spill: opened.spill.clone(),
        digest: config.digest_key_file.open().map_err(StartError::DigestKey)?,
        metrics: Arc::clone(&metrics),
        wake: Arc::clone(&wake),
        backlog: config.sweep.backlog.clone(),
    };
    let gateway = Gateway::new(config.gateway, parts)
        .ok_or_else(|| StartError::Config("there is no default upstream".to_owned()))?;
    let server = config.server;
    let listener = Listener::bind(&server.listen)
        .await
        .map_err(|cause| cannot_listen(&server.listen, cause))?;
    let (admin_listener, admin) = admin_listener(&config.admin.listen).await?;
    let addr = listener.local_addr();

    // Shown from the start: an alert on a series that is absent never fires.
    config.relay.sinks.iter().for_each(|sink| metrics.outbox(&sink.name, 0, Duration::ZERO, 0));
    let (tasks, ready) = (TaskTracker::new(), Readiness::default());
    let stop = Stop::new(&ready);
    let lease = TaskTracker::new();
    keep_lease(&lease, &store, &view, ttl, &stop.lease);
    if config.relayed == Relayed::Here {
        let relayed = Relaying { settings: config.relay, claimant, wake };
        keep_relay(&tasks, &store, relayed, &metrics, &stop.rest);
    }
    let sweep = sweep::Settings { duty: duty(config.relayed), ..config.sweep };
    keep_sweeper(&tasks, &store, sweep, &contact, &metrics, &stop.rest);
    gateway.begin_loops(&tasks, &stop.rest, &stop.accept);
    let state = admin::State {
        store,
        metrics,
        ready: ready.clone(),
        token: config.admin.token.as_deref().and_then(Token::new),
        version: env!("CARGO_PKG_VERSION"),
        operations,
        sinks: sinks.into_iter().map(|subscriber| subscriber.sink).collect(),
        explain: Some(Arc::<Gateway>::clone(&gateway)),
    };
    keep_admin(&tasks, admin_listener, admin::router(state), &stop.rest);
    let service = Serve(Arc::clone(&gateway));
    let grace = server.shutdown_grace;
    let accepting = accept::serve(listener, server.accept, service, stop.accept.clone(), grace);
    tasks.spawn(tasks::vital(Vital::Listener, stop.accept.clone(), accepting));
    ready.serving();
    Ok(Running { addr, admin, stop, tasks, lease, gateway, grace, opened })
}

/// Renews the lease until `stop`, then ends it.
pub(super) fn keep_lease(
    tracker: &TaskTracker,
    store: &Arc<dyn Store>,
    view: &LeaseView,
    ttl: Duration,
    stop: &CancellationToken,
) {
    let (store, view, stopped) = (Arc::clone(store), view.clone(), stop.clone());
    let begin = move || lease::keep(Arc::clone(&store), view.clone(), ttl, stopped.clone());
    tracker.spawn(tasks::kept(Loop::Lease, "", stop.clone(), begin));
}

/// What the relay works with.
pub(super) struct Relaying {
    pub(super) settings: relay::Settings,
    pub(super) claimant: Claimant,
    pub(super) wake: Arc<Notify>,
}

/// Delivers until `stop`.
pub(super) fn keep_relay(
    tracker: &TaskTracker,
    store: &Arc<dyn Store>,
    relayed: Relaying,
    metrics: &Arc<Metrics>,
    stop: &CancellationToken,
) {
    let (store, metrics, stopped) = (Arc::clone(store), Arc::clone(metrics), stop.clone());
    let begin = move || {
        let Relaying { settings, claimant, wake } = &relayed;
        let (settings, claimant, wake) = (settings.clone(), claimant.clone(), Arc::clone(wake));
        let (store, metrics) = (Arc::clone(&store), Arc::clone(&metrics));
        relay::run(store, settings, claimant, metrics, wake, stopped.clone())
    };
    tracker.spawn(tasks::kept(Loop::Relay, "", stop.clone(), begin));
}

/// Sweeps until `stop`.
pub(super) fn keep_sweeper(
    tracker: &TaskTracker,
    store: &Arc<dyn Store>,
    settings: sweep::Settings,
    contact: &Contact,
    metrics: &Arc<Metrics>,
    stop: &CancellationToken,
) {
    let (store, metrics) = (Arc::clone(store), Arc::clone(metrics));
    let (contact, stopped) = (contact.clone(), stop.clone());
    let begin = move || {
        let (store, metrics) = (Arc::clone(&store), Arc::clone(&metrics));
        sweep::run(store, settings.clone(), contact.clone(), metrics, stopped.clone())
    };
    tracker.spawn(tasks::kept(Loop::Sweeper, "", stop.clone(), begin));
}

/// Serves operators and probes until `stop`.
pub(super) fn keep_admin(
    tracker: &TaskTracker,
    listener: TcpListener,
    router: Router,
    stop: &CancellationToken,
) {
    let (listener, stopped) = (Arc::new(listener), stop.clone());
    let begin = move || admin::serve(Arc::clone(&listener), router.clone(), stopped.clone());
    tracker.spawn(tasks::kept(Loop::AdminListener, "", stop.clone(), begin));
}

/// The admin listener, and where it is.
pub(super) async fn admin_listener(listen: &str) -> Result<(TcpListener, SocketAddr), StartError> {
    let listener = TcpListener::bind(listen).await.map_err(|cause| cannot_listen(listen, cause))?;
    let addr = listener.local_addr().map_err(|cause| cannot_listen(listen, cause))?;
    Ok((listener, addr))
}

/// What is left to clear away for a process that relays, or not: delivered events belong to whoever delivers.
fn duty(relayed: Relayed) -> sweep::Duty {
    match relayed {
        Relayed::Here => sweep::Duty::All,
        Relayed::Apart => {
            tracing::info!("outbox.relay = false: events wait for `oncegate relay`");
            sweep::Duty::Records
        }
    }
}

fn cannot_listen(address: &str, cause: std::io::Error) -> StartError {
    StartError::Listen { address: address.to_owned(), cause }
}

fn upstreams(config: &Config) -> Result<HashMap<String, Arc<Upstream>>, StartError> {
    let build = |(name, settings): (&String, &upstream::Settings)| {
        let upstream = Upstream::new(settings.clone()).map_err(StartError::Config)?;
        Ok((name.clone(), Arc::new(upstream)))
    };
    config.upstreams.iter().map(build).collect()
}

/// Those who are asked whether a stored answer may be read, each with connections of its own.
fn servers(config: &Config) -> Result<HashMap<Server, Arc<Upstream>>, StartError> {
    let mut servers = HashMap::new();
    for route in config.routes.iter() {
        let ReplayAuth::Subrequest(asked) = &route.policy.replay_auth else { continue };
        let settings = match &asked.server {
            Server::Upstream(name) => config.upstreams.get(name).cloned(),
            Server::Url { base, ca_file } => base.parse().ok().map(|url| upstream::Settings {
                ca_file: ca_file.clone(),
                ..upstream::Settings::at(url)
            }),
        };
        let missing = || StartError::Config("there is nobody to ask for replay_auth".to_owned());
        let upstream = Upstream::new(settings.ok_or_else(missing)?).map_err(StartError::Config)?;
        servers.insert(asked.server.clone(), Arc::new(upstream));
    }
    Ok(servers)
}

impl Running {
    /// Stops: what is reserved finishes within the grace, and what is known is durable, in the database or in the spill.
    /// What is left becomes `unknown` once the lease has ended.
    pub async fn stop(self) {
        self.stop.ready.draining();
        self.stop.accept.cancel();
        let drained = tokio::time::timeout(self.grace, self.gateway.drained()).await.is_ok();
        if !drained {
            tracing::warn!("the grace is over; what is still running will be found as unknown");
            if tokio::time::timeout(LEAVE_MAX, self.gateway.leave()).await.is_err() {
                tracing::error!(
                    "some outcomes did not reach the spill; they will be found as unknown"
                );
            }
        }
        self.stop.rest.cancel();
        self.tasks.close();
        if tokio::time::timeout(self.grace, self.tasks.wait()).await.is_err() {
            tracing::warn!("some connections or deliveries did not end within the grace");
        }
        if tokio::time::timeout(LEAVE_MAX, self.opened.spill.close()).await.is_err() {
            tracing::warn!("the spill was not closed in time");
        }
        // Last: others judge this process by it. It bounds itself.
        self.stop.lease.cancel();
        self.lease.close();
        self.lease.wait().await;
    }
}
