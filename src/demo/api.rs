//! The demo's two ends: the API behind the gateway, and the consumer of its events.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::tasks;
use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use parking_lot::Mutex;
use ring::hmac;
use tokio::net::TcpListener;
use tokio::sync::watch;

/// How long the API takes for an order: long enough for concurrent retries to arrive meanwhile.
const WORK: Duration = Duration::from_millis(100);

/// An API that makes a new order each time it is asked.
pub(super) struct Orders {
    pub(super) addr: SocketAddr,
    orders: watch::Sender<u64>,
}

impl Orders {
    pub(super) async fn start() -> std::io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let addr = listener.local_addr()?;
        let orders = watch::Sender::new(0);
        let router = Router::new().route("/orders", post(create)).with_state(orders.clone());
        serve(listener, router);
        Ok(Self { addr, orders })
    }

    /// How many orders were made.
    pub(super) fn count(&self) -> u64 {
        *self.orders.borrow()
    }

    /// Waits until this many orders are made or under way.
    pub(super) async fn reached(&self, count: u64) {
        // Err: the API has ended. The counts will show it.
        drop(self.orders.subscribe().wait_for(|made| *made >= count).await);
    }
}

async fn create(State(orders): State<watch::Sender<u64>>) -> Response {
    let mut id = 0;
    orders.send_modify(|count| {
        *count += 1;
        id = *count;
    });
    tokio::time::sleep(WORK).await;
    let order = serde_json::json!({ "id": format!("order-{id}"), "status": "created" });
    (StatusCode::CREATED, axum::Json(order)).into_response()
}

/// A webhook consumer that checks signatures and drops repeated events.
pub(super) struct Consumer {
    pub(super) addr: SocketAddr,
    pub(super) secret: String,
    counts: Arc<Counts>,
}

struct Counts {
    key: hmac::Key,
    received: AtomicU64,
    forged: AtomicU64,
    seen: Mutex<HashSet<String>>,
}

impl Consumer {
    pub(super) async fn start() -> std::io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let addr = listener.local_addr()?;
        let random: Vec<u8> = std::iter::repeat_with(|| fastrand::u8(..)).take(32).collect();
        let secret = format!("whsec_{}", STANDARD.encode(&random));
        let counts = Arc::new(Counts {
            key: hmac::Key::new(hmac::HMAC_SHA256, &random),
            received: AtomicU64::new(0),
            forged: AtomicU64::new(0),
            seen: Mutex::default(),
        });
        let router = Router::new().route("/hook", post(take)).with_state(Arc::clone(&counts));
        serve(listener, router);
        Ok(Self { addr, secret, counts })
    }

    pub(super) fn received(&self) -> u64 {
        self.counts.received.load(Ordering::Relaxed)
    }

    pub(super) fn forged(&self) -> u64 {
        self.counts.forged.load(Ordering::Relaxed)
    }

    pub(super) fn distinct(&self) -> usize {
        self.counts.seen.lock().len()
    }
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

/// Serves until the process ends.
fn serve(listener: TcpListener, router: Router) {
    tasks::short(async move {
        let service = axum::serve(listener, router);
        drop(service.await);
    });
}
