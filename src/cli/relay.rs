//! `relay`: a process that only delivers events. Any number of them can share one Postgres.
//!
//! It runs the relay of `serve` under its own lease, so that its claims are free as soon as its lease has run out. With
//! `outbox.relay = false` it also deletes old delivered events. `serve` deletes records and dead leases.
//!
//! Order of the start: open the store, take the lease, listen, be ready. If the database is away, it listens first and is not
//! ready. Order of the end: be not ready, finish the deliveries in flight, give back the other claims, end the lease. The
//! lease is last, because after its end other processes take the remaining claims.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::by_hand;
use super::opening::{self, Opening};
use super::serve::{self, RelayParts};
use super::start::StartError;
use crate::admin::{self, Readiness, Token};
use crate::config::{Config, StoreKind};
use crate::lease::{self, Contact};
use crate::record::{Answer, LeaseView};
use crate::route::Routes;
use crate::store::{self, Backlog, RecordRow, Store};
use crate::telemetry::Metrics;
use crate::{relay, sweep};

/// A relay that runs.
pub struct Running {
    /// Where its admin listener is.
    pub admin: SocketAddr,
    ready: Readiness,
    stop: CancellationToken,
    end_lease: CancellationToken,
    tasks: TaskTracker,
    lease: TaskTracker,
    grace: Duration,
    /// The start on a store that is not open yet.
    waiting: Option<Box<PendingStart>>,
}

/// A start on the store that runs, and the parts that begin after it.
struct PendingStart {
    opening: Opening,
    after: AfterOpening,
}

/// The parts that need the store.
struct AfterOpening {
    store: Arc<dyn Store>,
    metrics: Arc<Metrics>,
    view: LeaseView,
    ttl: Duration,
    contact: Contact,
    relay: relay::Settings,
    sweep: sweep::Settings,
}

/// Builds all parts, listens, and spawns the tasks that need no store. The others begin when the store is open: see
/// [`Running::opened`].
///
/// # Errors
/// See [`StartError`]; then nothing runs. [`StartError::Config`] without a sink, or on SQLite, where only `serve` can deliver.
pub async fn start(config: Config) -> Result<Running, StartError> {
    let StoreKind::Postgres(postgres) = &config.store.kind else {
        let wrong = "store.url is a SQLite file, which belongs to one process: there the relay runs only inside \
                     `oncegate serve`. To run it alone, use Postgres";
        return Err(StartError::Config(wrong.to_owned()));
    };
    if config.relay.sinks.is_empty() {
        let wrong = "there is no [[sink]] to deliver to: give it the configuration of `serve`";
        return Err(StartError::Config(wrong.to_owned()));
    }
    let (ttl, view) = (config.store.lease, lease::none());
    let contact = Contact::none(ttl, Instant::now());
    let (store, gate) = store::awaited::awaited();
    let (settings, postgres) = (config.store.clone(), postgres.clone());
    let mut opening = opening::to_relay(settings, postgres, view.clone(), contact.clone(), gate);
    let opened = opening.soon().await?;
    let (listener, admin) = serve::admin_listener(&config.admin.listen).await?;

    let (metrics, ready) = (Arc::new(Metrics::default()), Readiness::default());
    // Shown from the start: an alert on a series that is absent never fires.
    config.relay.sinks.iter().for_each(|sink| metrics.outbox(&sink.name, 0, Duration::ZERO, 0));
    let (stop, end_lease) = (CancellationToken::new(), CancellationToken::new());
    let (tasks, lease) = (TaskTracker::new(), TaskTracker::new());
    let (operations, routes) = (names(&config.routes), config.routes);
    let announce = move |row: &RecordRow, answer: &Answer| by_hand::announced(&routes, row, answer);
    let state = admin::State {
        store: Arc::clone(&store),
        metrics: Arc::clone(&metrics),
        ready: ready.clone(),
        token: config.admin.token.as_deref().and_then(Token::new),
        version: env!("CARGO_PKG_VERSION"),
        operations,
        sinks: config.sweep.sinks.clone().into(),
        explain: None,
        announce: Arc::new(announce),
    };
    serve::keep_admin(&tasks, listener, admin::router(state), &stop);
    let grace = config.server.shutdown_grace;
    let mut running = Running { admin, ready, stop, end_lease, tasks, lease, grace, waiting: None };
    let (relay, sweep) = (config.relay, config.sweep);
    let after = AfterOpening { store, metrics, view, ttl, contact, relay, sweep };
    if opened {
        running.deliver(after);
    } else {
        tracing::warn!(%admin, "listening without the store: the relay is not ready");
        running.waiting = Some(Box::new(PendingStart { opening, after }));
    }
    Ok(running)
}

/// The operations of the routes.
fn names(routes: &Routes) -> Arc<[String]> {
    routes.iter().map(|route| route.operation.as_str().to_owned()).collect()
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
            self.deliver(waiting.after);
        }
        Ok(())
    }

    /// Begins the tasks that need the store.
    fn deliver(&mut self, after: AfterOpening) {
        let Self { tasks, lease, stop, .. } = self;
        let AfterOpening { store, metrics, view, ttl, contact, relay, sweep } = after;
        let claimant = serve::claimant(&view, &serve::may_mark_dead(&contact), false);
        serve::keep_lease(lease, &store, &view, ttl, &self.end_lease);
        // No part of this process writes events, so nothing wakes the relay: it polls.
        let parts = RelayParts { settings: relay, claimant, wake: Arc::new(Notify::new()) };
        serve::keep_relay(tasks, &store, parts, &metrics, stop);
        // A relay reserves nothing, so a full backlog cannot stop it.
        let (duty, backlog) = (sweep::Duty::Outbox, Backlog::default());
        let settings = sweep::Settings { duty, backlog, ..sweep };
        serve::keep_sweeper(tasks, &store, settings, &contact, &metrics, stop);
        self.ready.serving();
    }

    /// Stops. Deliveries in flight finish within the grace and their verdicts are written; the other claims are given back.
    pub async fn stop(mut self) {
        drop(self.waiting.take());
        self.ready.draining();
        self.stop.cancel();
        self.tasks.close();
        if tokio::time::timeout(self.grace, self.tasks.wait()).await.is_err() {
            tracing::warn!("some deliveries did not end within the grace: they are repeated");
        }
        // Last, because other processes judge this one by its lease. It has its own time limit.
        self.end_lease.cancel();
        self.lease.close();
        self.lease.wait().await;
    }
}
