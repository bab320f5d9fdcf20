//! `relay`: delivers the outbox and nothing else, as a process of its own; any number of them on one Postgres.
//!
//! It is the relay of `serve` under a lease of its own, so that what it had claimed is free as soon as it is known to be dead.
//! Where `serve` leaves the delivery to it (`outbox.relay = false`), it also removes what was delivered long ago; records and
//! the leases of the dead stay the business of `serve`.
//!
//! Order of the start: store, lease, listen, ready. Order of the end: not ready, finish what is in flight and give back the
//! rest, then end the lease, since from then on others take what this process still had.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::serve::{self, Relaying, StartError};
use crate::admin::{self, Readiness, Token};
use crate::config::{Config, StoreKind};
use crate::lease::{self, Contact};
use crate::store::Backlog;
use crate::sweep;
use crate::telemetry::Metrics;

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
}

/// Builds everything, then spawns it.
///
/// # Errors
/// See [`StartError`]; nothing runs then. [`StartError::Config`] where there is nothing to deliver to, or only `serve` can.
pub async fn start(config: Config) -> Result<Running, StartError> {
    if let StoreKind::Sqlite(_) = &config.store.kind {
        let wrong = "store.url is a SQLite file, which belongs to one process: there the relay runs only inside \
                     `oncegate serve`. To run it alone, use Postgres";
        return Err(StartError::Config(wrong.to_owned()));
    }
    if config.relay.sinks.is_empty() {
        let wrong = "there is no [[sink]] to deliver to: give it the configuration of `serve`";
        return Err(StartError::Config(wrong.to_owned()));
    }
    let store = serve::open(&config.store, config.store.migrate).await?;
    let (now, ttl) = (Instant::now(), config.store.lease);
    let contact = Contact::begin(ttl, now);
    let (listener, admin) = serve::admin_listener(&config.admin.listen).await?;
    let view = lease::start(&store, ttl).await?;
    let claimant = serve::claimant(&view, &serve::may_judge(&contact), false);

    let (metrics, ready) = (Arc::new(Metrics::default()), Readiness::default());
    // Shown from the start: an alert on a series that is absent never fires.
    config.relay.sinks.iter().for_each(|sink| metrics.outbox(&sink.name, 0, Duration::ZERO, 0));
    let (stop, end_lease) = (CancellationToken::new(), CancellationToken::new());
    let (tasks, lease) = (TaskTracker::new(), TaskTracker::new());
    serve::keep_lease(&lease, &store, &view, ttl, &end_lease);
    // Nobody in this process writes events: it looks by itself.
    let wake = Arc::new(Notify::new());
    let relayed = Relaying { settings: config.relay, claimant, wake };
    serve::keep_relay(&tasks, &store, relayed, &metrics, &stop);
    let sinks = config.sweep.sinks.clone().into();
    // It begins nothing that a backlog could keep it from.
    let (duty, backlog) = (sweep::Duty::Outbox, Backlog::default());
    let settings = sweep::Settings { duty, backlog, ..config.sweep };
    serve::keep_sweeper(&tasks, &store, settings, &contact, &metrics, &stop);
    let state = admin::State {
        store,
        metrics,
        ready: ready.clone(),
        token: config.admin.token.as_deref().and_then(Token::new),
        version: env!("CARGO_PKG_VERSION"),
        operations: config.routes.iter().map(|route| route.operation.as_str().to_owned()).collect(),
        sinks,
        explain: None,
    };
    serve::keep_admin(&tasks, listener, admin::router(state), &stop);
    ready.serving();
    let grace = config.server.shutdown_grace;
    Ok(Running { admin, ready, stop, end_lease, tasks, lease, grace })
}

impl Running {
    /// Stops: what is in flight is finished within the grace and its verdict is written, the rest is given back.
    pub async fn stop(self) {
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
