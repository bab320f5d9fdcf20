//! The admin listener: probes, metrics, records, events and sinks as JSON, and the actions of operators on them.
//!
//! - It has its own address: the port of the callers serves none of these pages.
//! - `/healthz` says that the process runs, `/readyz` that it accepts requests. Both are open to everyone. They show nothing
//!   about callers, and only operators see why the store is away.
//! - Every other page needs the bearer token. Without a configured token (on loopback only) it needs a `Host` that names this
//!   machine, so that a web page whose own name points at 127.0.0.1 reads nothing.
//! - Every wait for the store is bounded: if the store hangs, the answer is 503.
//! - An unknown query parameter is refused by name, because an ignored filter would show the wrong records.
//! - Keys, tenants and bodies are shown escaped, and never logged.
//!
//! Actions are POST routes behind the same `guard` (see `act`). The guard also refuses a foreign `Origin`, because a browser
//! sends requests of other pages even if they cannot read the answer. The listener keeps no state, so a crash loses nothing.

mod act;
pub mod action;
mod answer;
pub mod detail;
pub mod explain;
mod guard;
pub(crate) mod query;
mod read;
pub mod resolve;
pub mod sinks;
mod state;
pub mod tasks;
pub mod view;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::middleware;
use axum::routing::{get, post};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

pub use self::act::OPERATOR;
use self::answer::Problem;
pub use self::state::{Readiness, State, Token};
use crate::store::EventAction::{Discard, Redeliver};
use crate::store::SinkOrder;

/// How long a client may take to send its headers.
const HEADER_TIMEOUT: Duration = Duration::from_secs(2);
/// How long open answers may take after the listener has stopped.
const STOP_GRACE: Duration = Duration::from_secs(5);
/// How many connections are served at once; one more waits.
const CONNECTIONS_MAX: usize = 512;

/// All routes of the admin listener.
pub fn router(state: State) -> Router {
    let open = Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(read::readyz));
    let guarded = Router::new()
        .route("/metrics", get(read::metrics))
        .route("/api/v1/config", get(read::config))
        .route("/api/v1/records", get(read::list_records))
        .route("/api/v1/records/{id}", get(read::show_record))
        .route("/api/v1/records/{id}/release", post(act::records::release))
        .route("/api/v1/records/{id}/complete", post(act::records::complete))
        .route("/api/v1/events", get(read::list_events))
        .route("/api/v1/events/{id}", get(read::show_event))
        .route("/api/v1/events/{id}/redeliver", post(|s, id, r| act::one(Redeliver, s, id, r)))
        .route("/api/v1/events/{id}/discard", post(|s, id, r| act::one(Discard, s, id, r)))
        .route("/api/v1/events/redeliver", post(|s, r| act::dead(Redeliver, s, r)))
        .route("/api/v1/events/discard", post(|s, r| act::dead(Discard, s, r)))
        .route("/api/v1/sinks", get(read::list_sinks))
        .route(
            "/api/v1/sinks/{name}/pause",
            post(|s, name, q, r| act::sink(SinkOrder::Pause, s, name, q, r)),
        )
        .route(
            "/api/v1/sinks/{name}/resume",
            post(|s, name, q, r| act::sink(SinkOrder::Resume, s, name, q, r)),
        )
        .route("/api/v1/tasks", get(read::list_tasks))
        .route("/api/v1/explain", post(read::explain_request))
        .fallback(|| async { Problem::NoSuchPage })
        .layer(middleware::from_fn_with_state(state.clone(), guard::guard));
    open.merge(guarded)
        .method_not_allowed_fallback(|| async { Problem::MethodNotAllowed })
        .layer(middleware::map_response(guard::harden))
        .with_state(state)
}

/// Serves until `stop`, then lets open answers finish for a short while.
pub async fn serve(listener: Arc<TcpListener>, router: Router, stop: CancellationToken) {
    let mut connections = JoinSet::new();
    loop {
        let full = connections.len() >= CONNECTIONS_MAX;
        tokio::select! {
            () = stop.cancelled() => break,
            Some(_) = connections.join_next() => {}
            accepted = listener.accept(), if !full => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(connection(stream, router.clone(), stop.clone()));
                }
                Err(error) => {
                    // Probably no descriptor is free. That passes when other connections end.
                    tracing::warn!(%error, "the admin listener cannot accept");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            },
        }
    }
    drop(listener);
    let finish = async { while connections.join_next().await.is_some() {} };
    // Dropping the set cuts the connections that are still open.
    if tokio::time::timeout(STOP_GRACE, finish).await.is_err() {
        tracing::info!("admin connections were cut at shutdown");
    }
}

async fn connection(stream: TcpStream, router: Router, stop: CancellationToken) {
    let serving = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    tokio::pin!(serving);
    let ended = tokio::select! {
        ended = &mut serving => ended,
        () = stop.cancelled() => {
            serving.as_mut().graceful_shutdown();
            serving.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "an admin connection broke");
    }
}
