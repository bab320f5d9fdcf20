//! `relay`: delivers the outbox and nothing else, as a process of its own; any number of them on one Postgres.
//!
//! It is the relay of `serve` under a lease of its own, so that what it had claimed is free as soon as it is known to be dead.
//! Where `serve` leaves the delivery to it (`outbox.relay = false`), it also removes what was delivered long ago; records and
//! the leases of the dead stay the business of `serve`.
//!
//! Order of the start: store, lease, listen, ready; on a database that is away it listens before, and is not ready. Order of
//! the end: not ready, finish what is in flight and give back the rest, then end the lease, since from then on others take
//! what this process still had.

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
    /// The start on a store that is not open.
    waiting: Option<Box<PendingStart>>,
}

/// A start on the store that is under way, and what begins after it.
struct PendingStart {
    opening: Opening,
    after: AfterOpening,
}

/// What needs the store.
struct AfterOpening {
    store: Arc<dyn Store>,
    metrics: Arc<Metrics>,
    view: LeaseView,
    ttl: Duration,
    contact: Contact,
    relay: relay::Settings,
    sweep: sweep::Settings,
}

/// Builds everything, listens, and spawns what can work by now. Where the store is not open yet, the rest begins when it is:
/// see [`Running::opened`].
///
/// # Errors
/// See [`StartError`]; nothing runs then. [`StartError::Config`] where there is nothing to deliver to, or only `serve` can.
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
    /// Waits until the store is open: then it is ready. Where this is dropped the start goes on when it is asked again.
    ///
    /// # Errors
    /// See [`StartError`]: the store will not open. What listens goes on until it is stopped.
    pub async fn opened(&mut self) -> Result<(), StartError> {
        let Some(waiting) = &mut self.waiting else { return Ok(()) };
        let ended = waiting.opening.end().await;
        if let Some(waiting) = self.waiting.take() {
            ended?;
            self.deliver(waiting.after);
        }
        Ok(())
    }

    /// Begins what needs the store.
    fn deliver(&mut self, after: AfterOpening) {
        let Self { tasks, lease, stop, .. } = self;
        let AfterOpening { store, metrics, view, ttl, contact, relay, sweep } = after;
        let claimant = serve::claimant(&view, &serve::may_judge(&contact), false);
        serve::keep_lease(lease, &store, &view, ttl, &self.end_lease);
        // Nobody in this process writes events: it looks by itself.
        let parts = RelayParts { settings: relay, claimant, wake: Arc::new(Notify::new()) };
        serve::keep_relay(tasks, &store, parts, &metrics, stop);
        // It begins nothing that a backlog could keep it from.
        let (duty, backlog) = (sweep::Duty::Outbox, Backlog::default());
        let settings = sweep::Settings { duty, backlog, ..sweep };
        serve::keep_sweeper(tasks, &store, settings, &contact, &metrics, stop);
        self.ready.serving();
    }

    /// Stops: what is in flight is finished within the grace and its verdict is written, the rest is given back.
    pub async fn stop(mut self) {
        drop(self.waiting.take());
        self.ready.draining();
        self.stop.cancel();
        self.tasks.close();
        if tokio::time::timeout(self.grace, self.tasks.wait()).await.is_err() {
            tracing::warn!("some deliveries did not end within the grace: they are made again");
        }
        // Last: others judge this process by it. It bounds itself.
        self.end_lease.cancel();
        self.lease.close();
        self.lease.wait().await;
    }
}
