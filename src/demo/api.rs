//! The demo's two ends: the API behind the gateway, and the consumer of its events.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::tasks;
use axum::Router;
use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use parking_lot::Mutex;
use ring::hmac;
use serde::Deserialize;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::watch;

/// How long the API takes for an order: long enough for concurrent retries to arrive meanwhile.
const WORK: Duration = Duration::from_millis(100);

/// An API that makes a new order each time it is asked, and tells how many it has made, or is making.
///
/// # Errors
/// The address cannot be listened on.
pub(super) async fn orders(listen: &str) -> std::io::Result<SocketAddr> {
    let made = watch::Sender::new(0);
    let router = Router::new().route("/orders", post(create).get(count)).with_state(made);
    serve(listen, router).await
}

/// What `GET /orders` asks: to be answered once so many orders are made, or being made.
#[derive(Deserialize)]
struct AtLeast {
    #[serde(default)]
    at_least: u64,
}

async fn count(
    State(orders): State<watch::Sender<u64>>,
    Query(AtLeast { at_least }): Query<AtLeast>,
) -> Response {
    let mut orders = orders.subscribe();
    let made = orders.wait_for(|made| *made >= at_least).await.map_or(0, |made| *made);
    axum::Json(json!({ "made": made })).into_response()
}

async fn create(State(orders): State<watch::Sender<u64>>) -> Response {
    let mut id = 0;
    orders.send_modify(|count| {
        *count += 1;
        id = *count;
    });
    tokio::time::sleep(WORK).await;
    let order = json!({ "id": format!("order-{id}"), "status": "created" });
    (StatusCode::CREATED, axum::Json(order)).into_response()
}

struct Counts {
    key: hmac::Key,
    received: AtomicU64,
    forged: AtomicU64,
    seen: Mutex<HashSet<String>>,
}

/// A webhook consumer that checks signatures, drops what it has seen, and tells what it has counted.
///
/// # Errors
/// The secret is none, or the address cannot be listened on.
pub(super) async fn consumer(listen: &str, secret: &str) -> std::io::Result<SocketAddr> {
    let key = secret.trim().strip_prefix("whsec_").and_then(|key| STANDARD.decode(key).ok());
    let none = || std::io::Error::new(std::io::ErrorKind::InvalidInput, NO_SECRET);
    let counts = Arc::new(Counts {
        key: hmac::Key::new(hmac::HMAC_SHA256, &key.ok_or_else(none)?),
        received: AtomicU64::new(0),
        forged: AtomicU64::new(0),
        seen: Mutex::default(),
    });
    serve(listen, Router::new().route("/hook", post(take).get(taken)).with_state(counts)).await
}

const NO_SECRET: &str = "the secret must be whsec_ and base64";

/// A secret of a consumer.
pub(super) fn secret() -> String {
    let random: Vec<u8> = std::iter::repeat_with(|| fastrand::u8(..)).take(32).collect();
    format!("whsec_{}", STANDARD.encode(&random))
}

async fn taken(State(counts): State<Arc<Counts>>) -> Response {
    let received = counts.received.load(Ordering::Relaxed);
    let forged = counts.forged.load(Ordering::Relaxed);
    let distinct = counts.seen.lock().len();
    let counts = json!({ "received": received, "distinct": distinct, "forged": forged });
    axum::Json(counts).into_response()
}

async fn take(State(counts): State<Arc<Counts>>, headers: HeaderMap, body: Bytes) -> StatusCode {
    counts.received.fetch_add(1, Ordering::Relaxed);
    let Some(id) = genuine(&counts.key, &headers, &body) else {
        counts.forged.fetch_add(1, Ordering::Relaxed);
        return StatusCode::UNAUTHORIZED;
    };
    counts.seen.lock().insert(id.to_owned());
    StatusCode::NO_CONTENT
}

/// The id of an event whose signature is right.
fn genuine<'h>(key: &hmac::Key, headers: &'h HeaderMap, body: &[u8]) -> Option<&'h str> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let (id, at) = (text("webhook-id")?, text("webhook-timestamp")?);
    let signature = STANDARD.decode(text("webhook-signature")?.strip_prefix("v1,")?).ok()?;
    let signed = [format!("{id}.{at}.").as_bytes(), body].concat();
    hmac::verify(key, &signed, &signature).ok().map(|()| id)
}

/// Serves until the process ends. Where.
async fn serve(listen: &str, router: Router) -> std::io::Result<SocketAddr> {
    let listener = TcpListener::bind(listen).await?;
    let addr = listener.local_addr()?;
    tasks::short(async move {
        let service = axum::serve(listener, router);
        drop(service.await);
    });
    Ok(addr)
}
