//! `serve`: builds all parts, spawns them, and runs until a signal stops it.
//!
//! Order of the start, on both stores: lock, migrate, drain the spill, mark the records that the last process left, listen,
//! be ready. If a Postgres is away, the process listens before its store is open: see `opening`. Until then every use of the
//! store fails, and the tasks that need it have not begun.
//! Order of the end: be not ready, go on for the delay, stop accepting requests and claiming events, let requests and
//! deliveries finish within the grace, spill the outcomes that the database has not taken, end the lease. After the delay it
//! takes at most the grace and three seconds, whatever the database does.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::by_hand;
use super::opening::{self, ListenEarly, Opening, StoreStart};
use super::start::StartError;
use crate::admin::resolve::Announce;
use crate::admin::{self, Readiness, Token};
use crate::config::{Config, Listen, RelayMode, StoreKind};
use crate::gateway::accept::{self, Listener};
use crate::gateway::spill::{self, Spill};
use crate::gateway::tokens::Tokens;
use crate::gateway::upstream::{self, Upstream};
use crate::gateway::{Gateway, OnUnavailable, Parts, Serve};
use crate::lease::{self, Contact};
use crate::record::{Answer, LeaseView};
use crate::relay::{Claimant, sink};
use crate::route::{ReplayAuth, Server};
use crate::store::{self, RecordRow, Store};
use crate::tasks::{self, Loop, Vital};
use crate::telemetry::Metrics;
use crate::{relay, sweep};

/// How long after the grace the end of the process waits for outcomes on their way into the spill, and for its tasks.
const LEAVE_MAX: Duration = Duration::from_secs(1);

/// How long the end of the process waits for the spill's file to be closed. If the file was removed at the last moment, it is
/// copied first.
const CLOSE_MAX: Duration = Duration::from_millis(800);

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
    delay: Duration,
    grace: Duration,
    spill: Spill,
    /// The start on a store that is not open.
    waiting: Option<Box<PendingStart>>,
}

/// The steps of stopping.
struct Stop {
    ready: Readiness,
    /// No new connections and requests.
    accept: CancellationToken,
    /// No new deliveries. Deliveries in flight have the whole grace.
    relay: CancellationToken,
    /// The other tasks: sweeper, admin listener.
    rest: CancellationToken,
    /// The lease. When it has ended, other processes take over the records of this one.
    lease: CancellationToken,
}

impl Stop {
    fn new(ready: &Readiness) -> Self {
        Self {
            ready: ready.clone(),
            accept: CancellationToken::new(),
            relay: CancellationToken::new(),
            rest: CancellationToken::new(),
            lease: CancellationToken::new(),
        }
    }
}

/// Whether the leases of other owners may be judged now.
pub(super) type MayMarkDead = Arc<dyn Fn() -> bool + Send + Sync>;

pub(super) fn may_mark_dead(contact: &Contact) -> MayMarkDead {
    let contact = contact.clone();
    Arc::new(move || contact.may_mark_dead(Instant::now()))
}

/// The owner of the relay's claims. A process alone on its store freed the claims of dead processes at its start; a lapse of
/// its own lease frees nothing.
pub(super) fn claimant(lease: &LeaseView, may_mark_dead: &MayMarkDead, alone: bool) -> Claimant {
    let may_mark_dead = if alone { Arc::new(|| false) } else { Arc::clone(may_mark_dead) };
    Claimant { lease: lease.clone(), may_mark_dead }
}

/// What all parts of the process share.
struct Shared {
    /// Closed until the start has opened it: see `opening`.
    store: Arc<dyn Store>,
    metrics: Arc<Metrics>,
    /// Wakes the relay.
    wake: Arc<Notify>,
    lease: LeaseView,
    contact: Contact,
    spill: Spill,
    /// Whether only this process can own records. Every other owner is then dead.
    alone: bool,
}

impl Shared {
    /// The parts, and the start on the store, which does not run yet.
    fn new(config: &Config) -> (Self, Opening) {
        let settings = &config.store;
        let metrics = Arc::new(Metrics::default());
        let (store, gate) = store::awaited::awaited();
        let (bytes_max, keys) = (settings.spill.bytes_max, Arc::clone(&settings.keys));
        let (spill, file) = Spill::new(bytes_max, keys, Arc::clone(&metrics));
        let alone = matches!(settings.kind, StoreKind::Sqlite(_));
        let now = Instant::now();
        let contact = if alone { Contact::sole(now) } else { Contact::none(settings.lease, now) };
        let (wake, lease) = (Arc::new(Notify::new()), lease::none());
        let start = StoreStart {
            settings: settings.clone(),
            sinks: config.relay.sinks.iter().map(sink::Settings::subscriber).collect(),
            metrics: Arc::clone(&metrics),
            backlog: config.sweep.backlog.clone(),
            spill: file,
            lease: lease.clone(),
            contact: contact.clone(),
            gate,
        };
        let early = match config.gateway.on_unavailable {
            OnUnavailable::Refuse => ListenEarly::Yes,
            OnUnavailable::Bypass => ListenEarly::No,
        };
        let opening = opening::to_serve(start, early);
        (Self { store, metrics, wake, lease, contact, spill, alone }, opening)
    }

    fn gateway(&self, config: &mut Config) -> Result<Arc<Gateway>, StartError> {
        let parts = Parts {
            upstreams: upstreams(config)?,
            servers: servers(config)?,
            tokens: config.jwt.take().map(Tokens::new).transpose().map_err(StartError::Config)?,
            routes: std::mem::take(&mut config.routes),
            store: Arc::clone(&self.store),
            lease: self.lease.clone(),
            may_mark_dead: may_mark_dead(&self.contact),
            spill: self.spill.clone(),
            digest: config.digest_key.open()?,
            metrics: Arc::clone(&self.metrics),
            wake: Arc::clone(&self.wake),
            backlog: config.sweep.backlog.clone(),
        };
        Gateway::new(config.gateway.clone(), parts)
            .ok_or_else(|| StartError::Config("there is no default upstream".to_owned()))
    }
}

/// Builds all parts, listens, and spawns the tasks that need no store. The others begin when the store is open: see
/// [`Running::opened`].
///
/// # Errors
/// See [`StartError`]; then nothing runs.
pub async fn start(mut config: Config) -> Result<Running, StartError> {
    let (shared, mut opening) = Shared::new(&config);
    let opened = opening.soon().await?;
    if !opened {
        can_spill(&config.store.spill)?;
    }
    let operations =
        config.routes.iter().map(|route| route.operation.as_str().to_owned()).collect();
    let gateway = shared.gateway(&mut config)?;
    let Config { server, relay, relay_mode, sweep, .. } = config;
    let listener = Listener::bind(&server.listen.address)
        .await
        .map_err(|cause| cannot_listen(&server.listen, cause))?;
    let (admin_listener, admin) = admin_listener(&config.admin.listen).await?;
    let addr = listener.local_addr();

    let metrics = &shared.metrics;
    // Shown from the start: an alert on a series that is absent never fires.
    relay.sinks.iter().for_each(|sink| metrics.outbox(&sink.name, 0, Duration::ZERO, 0));
    let (tasks, ready) = (TaskTracker::new(), Readiness::default());
    let stop = Stop::new(&ready);
    let state = admin::State {
        store: Arc::clone(&shared.store),
        metrics: Arc::clone(metrics),
        ready: ready.clone(),
        token: config.admin.token.as_deref().and_then(Token::new),
        version: env!("CARGO_PKG_VERSION"),
        operations,
        sinks: relay.sinks.iter().map(|sink| sink.name.clone()).collect(),
        explain: Some(Arc::<Gateway>::clone(&gateway)),
        announce: announce(&gateway),
    };
    keep_admin(&tasks, admin_listener, admin::router(state), &stop.rest);
    let service = Serve(Arc::clone(&gateway));
    let (delay, grace) = (server.shutdown_delay, server.shutdown_grace);
    let accepting = accept::serve(listener, server.accept, service, stop.accept.clone(), grace);
    tasks.spawn(tasks::vital(Vital::Listener, stop.accept.clone(), accepting));
    gateway.keep_keys(&tasks, &stop.rest);
    let (spill, lease) = (shared.spill.clone(), TaskTracker::new());
    let mut running =
        Running { addr, admin, stop, tasks, lease, gateway, delay, grace, spill, waiting: None };
    let after = AfterOpening { shared, ttl: config.store.lease, relay, relay_mode, sweep };
    if opened {
        running.serve(after);
    } else {
        let listen = addr.map_or(server.listen.address, |addr| addr.to_string());
        tracing::warn!(listen, %admin, "{WITHOUT}");
        running.waiting = Some(Box::new(PendingStart { opening, after }));
    }
    Ok(running)
}

/// What completions by hand announce, by the routes of the gateway.
fn announce(gateway: &Arc<Gateway>) -> Arc<dyn Announce> {
    let gateway = Arc::clone(gateway);
    Arc::new(move |row: &RecordRow, answer: &Answer| {
        by_hand::announced(gateway.routes(), row, answer)
    })
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
    let begin = move || lease::keep(store.clone(), view.clone(), ttl, stopped.clone());
    tracker.spawn(tasks::kept(Loop::Lease, "", stop.clone(), begin));
}

/// The parts that the relay needs.
pub(super) struct RelayParts {
    pub(super) settings: relay::Settings,
    pub(super) claimant: Claimant,
    pub(super) wake: Arc<Notify>,
}

/// Delivers until `stop`.
pub(super) fn keep_relay(
    tracker: &TaskTracker,
    store: &Arc<dyn Store>,
    parts: RelayParts,
    metrics: &Arc<Metrics>,
    stop: &CancellationToken,
) {
    let (store, metrics, stopped) = (Arc::clone(store), Arc::clone(metrics), stop.clone());
    let begin = move || {
        let RelayParts { settings, claimant, wake } = &parts;
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

/// Logged if the process listens before its store is open.
const WITHOUT: &str = "listening without the store: what no route names passes through, keyed requests get \
     what store.on_unavailable says, and the process is not ready";

/// Checks early that the spill can be written. A full disk is no error here, because draining the spill makes room.
fn can_spill(settings: &spill::Settings) -> Result<(), StartError> {
    match spill::probe(&settings.dir) {
        Err(unwritable) if !unwritable.is_for_want_of_room() => Err(unwritable.into()),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// A start on the store that runs, and the parts that begin after it.
struct PendingStart {
    opening: Opening,
    after: AfterOpening,
}

/// The parts that need the store.
struct AfterOpening {
    shared: Shared,
    ttl: Duration,
    relay: relay::Settings,
    relay_mode: RelayMode,
    sweep: sweep::Settings,
}

/// The admin listener, and where it is.
pub(super) async fn admin_listener(
    listen: &Listen,
) -> Result<(TcpListener, SocketAddr), StartError> {
    let bound = TcpListener::bind(&listen.address).await;
    let listener = bound.map_err(|cause| cannot_listen(listen, cause))?;
    let addr = listener.local_addr().map_err(|cause| cannot_listen(listen, cause))?;
    Ok((listener, addr))
}

/// What the sweeper of this process deletes. The process that delivers events also deletes them.
fn duty(relay_mode: RelayMode) -> sweep::Duty {
    match relay_mode {
        RelayMode::InProcess => sweep::Duty::All,
        RelayMode::Separate => {
            tracing::info!("outbox.relay = false: events wait for `oncegate relay`");
            sweep::Duty::Records
        }
    }
}

fn cannot_listen(listen: &Listen, cause: std::io::Error) -> StartError {
    StartError::Listen { listen: listen.clone(), cause }
}

fn upstreams(config: &Config) -> Result<HashMap<String, Arc<Upstream>>, StartError> {
    let build = |(name, settings): (&String, &upstream::Settings)| {
        let upstream = Upstream::new(settings.clone()).map_err(StartError::Config)?;
        Ok((name.clone(), Arc::new(upstream)))
    };
    config.upstreams.iter().map(build).collect()
}

/// The servers of `replay_auth`, each with its own connections.
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
    /// Waits until the store is open and the process is ready. If the future is dropped, the next call goes on with the start.
    ///
    /// # Errors
    /// See [`StartError`]: the store will not open. The listeners run on until they are stopped.
    pub async fn opened(&mut self) -> Result<(), StartError> {
        let Some(waiting) = &mut self.waiting else { return Ok(()) };
        let ended = waiting.opening.end().await;
        if let Some(waiting) = self.waiting.take() {
            ended?;
            self.serve(waiting.after);
        }
        Ok(())
    }

    /// Begins the tasks that need the store.
    fn serve(&mut self, after: AfterOpening) {
        let Self { stop, tasks, gateway, .. } = self;
        let AfterOpening { shared, ttl, relay, relay_mode, sweep } = after;
        let claimant = claimant(&shared.lease, &may_mark_dead(&shared.contact), shared.alone);
        let Shared { store, metrics, wake, lease, contact, .. } = shared;
        keep_lease(&self.lease, &store, &lease, ttl, &stop.lease);
        if relay_mode == RelayMode::InProcess {
            let parts = RelayParts { settings: relay, claimant, wake };
            keep_relay(tasks, &store, parts, &metrics, &stop.relay);
        }
        let sweep = sweep::Settings { duty: duty(relay_mode), ..sweep };
        keep_sweeper(tasks, &store, sweep, &contact, &metrics, &stop.rest);
        gateway.begin_loops(tasks, &stop.rest, &stop.accept);
        stop.ready.serving();
    }

    /// Turns readiness off and serves on. Returns for how long, before [`Self::stop`]: load balancers send requests until they
    /// have noticed.
    pub fn begin_stop(&self) -> Duration {
        self.stop.ready.draining();
        self.delay
    }

    /// Stops. Requests finish within the grace, and each outcome that is known is durable in the database or in the spill.
    /// The other records become `unknown` when the lease has ended.
    pub async fn stop(mut self) {
        // A start that still runs is dropped: nothing was reserved.
        drop(self.waiting.take());
        self.stop.ready.draining();
        self.stop.accept.cancel();
        self.stop.relay.cancel();
        let over = tokio::time::Instant::now() + self.grace;
        let last = over + LEAVE_MAX;
        if tokio::time::timeout_at(over, self.gateway.drained()).await.is_err() {
            let left = tokio::time::timeout_at(last, self.gateway.leave()).await;
            if left.is_err() {
                tracing::error!(
                    "some outcomes did not reach the spill; they will be found as unknown"
                );
            }
            match self.gateway.running() {
                0 => tracing::warn!("the grace is over: no attempt runs any more"),
                running => tracing::warn!(
                    running,
                    "the grace is over: these attempts still run, and will be found as unknown"
                ),
            }
        }
        self.stop.rest.cancel();
        self.tasks.close();
        if tokio::time::timeout_at(last, self.tasks.wait()).await.is_err() {
            tracing::warn!("some connections or deliveries did not end within the grace");
        }
        match tokio::time::timeout(CLOSE_MAX, self.spill.close()).await {
            Ok(0) => {}
            Ok(outcomes) => tracing::warn!(
                outcomes,
                "the database has not taken these outcomes: they wait in the spill for the next process"
            ),
            Err(_) => tracing::warn!("the spill was not closed in time"),
        }
        // Last, because other processes judge this one by its lease. It has its own time limit.
        self.stop.lease.cancel();
        self.lease.close();
        self.lease.wait().await;
    }
}
