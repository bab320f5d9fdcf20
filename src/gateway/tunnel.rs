//! Tunnels: what passes through after the API has switched protocols (a websocket, or any other).
//!
//! A request on no keyed route may ask for an upgrade. It goes to the API on a connection of its own; if the API answers 101
//! and names a protocol that was asked for, both connections become one tunnel, and bytes are copied both ways. Everything
//! else that the API answers is an answer as any other. The tunnel runs in the task of the caller's connection, for which
//! it is left in a [`Switch`]: so it holds that connection's permit, and is ended with it.
//!
//! What must stay true: a tunnel is not for HTTP, because requests in it would go past the routes; it holds one of
//! `tunnels_max` permits; one in which nothing passes is closed after the idle time-out; after `stop` it is closed as soon as
//! it is quiet, and cut with the other connections at the end of the grace. A side that ends its sending may still receive.
//!
//! Nothing is remembered here. When the process dies, both sides see their connections end.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use http::Uri;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf, copy_bidirectional};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use crate::telemetry::{GaugeGuard, Metrics, TunnelEnd, Way, causes};

/// At a shutdown: a tunnel in which nothing has passed for so long is closed, so that no message is cut in two.
const QUIET: Duration = Duration::from_secs(1);
/// How long the two connections of a tunnel that is closed may take for it.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// What all tunnels share.
pub struct Tunnels {
    permits: Arc<Semaphore>,
    metrics: Arc<Metrics>,
}

/// A permit for one tunnel, taken before the API is asked.
pub(super) struct TunnelPermit {
    _permit: OwnedSemaphorePermit,
    metrics: Arc<Metrics>,
}

impl Tunnels {
    /// At most this many at a time.
    #[must_use]
    pub fn new(max: usize, metrics: Arc<Metrics>) -> Self {
        Self { permits: Arc::new(Semaphore::new(max.min(Semaphore::MAX_PERMITS))), metrics }
    }

    /// None: there are too many.
    pub(super) fn permit(&self) -> Option<TunnelPermit> {
        let permit = Arc::clone(&self.permits).try_acquire_owned().ok()?;
        Some(TunnelPermit { _permit: permit, metrics: Arc::clone(&self.metrics) })
    }
}

/// Where a request's tunnel is left for the task of its connection: an extension of each request.
#[derive(Clone, Default)]
pub(super) struct Switch(Arc<SwitchInner>);

#[derive(Default)]
struct SwitchInner {
    tunnel: Mutex<Option<Tunnel>>,
    /// Whether the caller's connection is one half of a tunnel now.
    switched: AtomicBool,
}

impl Switch {
    /// Once the 101 is on its way.
    pub(super) fn leave(&self, tunnel: Tunnel) {
        self.0.switched.store(true, Ordering::Relaxed);
        *self.0.tunnel.lock() = Some(tunnel);
    }

    pub(super) fn take(&self) -> Option<Tunnel> {
        self.0.tunnel.lock().take()
    }

    pub(super) fn is_switched(&self) -> bool {
        self.0.switched.load(Ordering::Relaxed)
    }
}

/// Two connections that are to become one.
pub(super) struct Tunnel {
    /// Resolves when the caller has been sent the 101.
    pub(super) caller: OnUpgrade,
    pub(super) upstream: Upgraded,
    pub(super) idle_timeout: Option<Duration>,
    pub(super) permit: TunnelPermit,
    pub(super) protocol: String,
    pub(super) target: Uri,
}

impl Tunnel {
    /// Copies both ways until one of the connections fails, both have ended, nothing passes, or it is time to stop.
    pub(super) async fn run(self, stop: &CancellationToken) {
        let Self { caller, upstream, idle_timeout, permit, protocol, target } = self;
        let caller = match caller.await {
            Ok(caller) => caller,
            Err(error) => {
                tracing::debug!(error = %causes(&error), "the caller left before its tunnel was open");
                return;
            }
        };
        let traffic = Traffic::new(permit);
        let open = Open::new(Arc::clone(&traffic), protocol, &target);
        let mut caller = Side::of(caller, Way::ToApi, &traffic);
        let mut upstream = Side::of(upstream, Way::ToCaller, &traffic);
        let end = tokio::select! {
            copied = copy_bidirectional(&mut caller, &mut upstream) => match copied {
                Ok(_) => TunnelEnd::Closed,
                Err(error) => {
                    tracing::debug!(%error, "a tunnel's connection failed");
                    TunnelEnd::Failed
                }
            },
            () = traffic.rests_for(idle_timeout) => TunnelEnd::Idle,
            () = async { stop.cancelled().await; traffic.rests_for(Some(QUIET)).await } => {
                TunnelEnd::Shutdown
            }
        };
        open.ended(end);
        let closed = async { tokio::join!(caller.shutdown(), upstream.shutdown()) };
        if timeout(CLOSE_TIMEOUT, closed).await.is_err() {
            tracing::debug!("a tunnel's connections did not close in time");
        }
    }
}

/// What passes through one tunnel.
struct Traffic {
    permit: TunnelPermit,
    begun: Instant,
    /// Milliseconds from the begin until something passed last.
    last: AtomicU64,
    to_api: AtomicU64,
    to_caller: AtomicU64,
}

impl Traffic {
    fn new(permit: TunnelPermit) -> Arc<Self> {
        let zero = AtomicU64::default;
        let begun = Instant::now();
        Arc::new(Self { permit, begun, last: zero(), to_api: zero(), to_caller: zero() })
    }

    fn moved(&self) {
        let now = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(now, Ordering::Relaxed);
    }

    fn came(&self, way: Way, bytes: usize) {
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        let count = match way {
            Way::ToApi => &self.to_api,
            Way::ToCaller => &self.to_caller,
        };
        count.fetch_add(bytes, Ordering::Relaxed);
        self.permit.metrics.tunnelled(way, bytes);
    }

    /// Returns once nothing has passed for so long; none: never.
    async fn rests_for(&self, limit: Option<Duration>) {
        let Some(limit) = limit else { return std::future::pending().await };
        loop {
            let last = self.begun + Duration::from_millis(self.last.load(Ordering::Relaxed));
            if last.elapsed() >= limit {
                return;
            }
            sleep_until(last + limit).await;
        }
    }
}

/// Tells of a tunnel while it is open, and how it ended. One that is dropped was cut by a shutdown.
struct Open {
    traffic: Arc<Traffic>,
    protocol: String,
    end: TunnelEnd,
    _gauge: GaugeGuard,
}

impl Open {
    fn new(traffic: Arc<Traffic>, protocol: String, target: &Uri) -> Self {
        tracing::info!(protocol, path = target.path(), "a tunnel is open");
        let gauge = traffic.permit.metrics.tunnel();
        Self { traffic, protocol, end: TunnelEnd::Shutdown, _gauge: gauge }
    }

    fn ended(mut self, end: TunnelEnd) {
        self.end = end;
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let Traffic { permit, begun, to_api, to_caller, .. } = &*self.traffic;
        permit.metrics.tunnel_ended(self.end);
        tracing::info!(
            protocol = self.protocol,
            end = self.end.as_str(),
            seconds = begun.elapsed().as_secs(),
            to_api = to_api.load(Ordering::Relaxed),
            to_caller = to_caller.load(Ordering::Relaxed),
            "a tunnel has ended"
        );
    }
}

/// One of the two connections, of which it is counted what comes out.
struct Side {
    io: TokioIo<Upgraded>,
    way: Way,
    traffic: Arc<Traffic>,
}

impl Side {
    fn of(io: Upgraded, way: Way, traffic: &Arc<Traffic>) -> Self {
        Self { io: TokioIo::new(io), way, traffic: Arc::clone(traffic) }
    }
}

impl AsyncRead for Side {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut self.io).poll_read(cx, buf);
        let came = buf.filled().len().saturating_sub(before);
        if came > 0 {
            self.traffic.came(self.way, came);
            self.traffic.moved();
        }
        read
    }
}

impl AsyncWrite for Side {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(cx, buf);
        if let Poll::Ready(Ok(1..)) = written {
            self.traffic.moved();
        }
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
