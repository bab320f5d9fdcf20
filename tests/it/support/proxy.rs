//! The pass-through path alone: the framing gate, then the proxy.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use oncegate::gateway::accept::{self, Listener};
use oncegate::gateway::headers::{self, Forwarding};
use oncegate::gateway::pass::{PassError, pass};
use oncegate::gateway::tunnel::Tunnels;
use oncegate::gateway::upstream::{self, Body, Upstream};
use oncegate::telemetry::Metrics;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

pub(crate) struct Proxy {
    pub(crate) addr: SocketAddr,
    pub(crate) stop: CancellationToken,
    pub(crate) ended: JoinHandle<()>,
}

/// What a test may set.
pub(crate) struct Setup {
    pub(crate) accept: accept::Settings,
    pub(crate) forwarding: Forwarding,
    pub(crate) upstream: upstream::Settings,
    pub(crate) grace: Duration,
}

impl Setup {
    pub(crate) fn of(upstream: SocketAddr) -> Self {
        let url = format!("http://{upstream}").parse().expect("url");
        Self {
            accept: accept::Settings::default(),
            forwarding: Forwarding::default(),
            upstream: upstream::Settings::at(url),
            grace: Duration::from_secs(10),
        }
    }

    pub(crate) async fn start(self) -> Proxy {
        let listener = Listener::bind("127.0.0.1:0").await.expect("bind");
        let addr = listener.local_addr().expect("address");
        let (stop, ended) = self.serve(listener);
        Proxy { addr, stop, ended }
    }

    pub(crate) fn serve(self, listener: Listener) -> (CancellationToken, JoinHandle<()>) {
        let stop = CancellationToken::new();
        let upstream = Upstream::new(self.upstream).expect("upstream");
        let forwarding = self.forwarding;
        let tunnels = Arc::new(Tunnels::new(100, Arc::new(Metrics::default())));
        let service = service_fn(move |request: Request<Incoming>| {
            let (upstream, forwarding) = (upstream.clone(), forwarding.clone());
            let tunnels = Arc::clone(&tunnels);
            async move { Ok::<_, Infallible>(answer(&upstream, &forwarding, &tunnels, request).await) }
        });
        let served = accept::serve(listener, self.accept, service, stop.clone(), self.grace);
        let ended = tokio::spawn(served);
        (stop, ended)
    }
}

/// A proxy with the settings of a new installation.
pub(crate) async fn start_proxy(upstream: SocketAddr) -> SocketAddr {
    Setup::of(upstream).start().await.addr
}

async fn answer(
    upstream: &Upstream,
    forwarding: &Forwarding,
    tunnels: &Tunnels,
    mut request: Request<Incoming>,
) -> Response<Body> {
    if let Err(refused) = headers::check_framing(&request) {
        return problem(refused.status, refused.detail);
    }
    headers::to_origin_form(&mut request);
    match pass(upstream, forwarding, tunnels, accept::timed(request)).await {
        Ok(answer) => answer,
        Err(PassError::Unreachable) => problem(StatusCode::BAD_GATEWAY, "upstream-unreachable"),
        Err(PassError::Crowded) => problem(StatusCode::SERVICE_UNAVAILABLE, "overloaded"),
        Err(PassError::Failed) => problem(StatusCode::BAD_GATEWAY, "upstream-failed"),
        Err(PassError::TimedOut) => problem(StatusCode::GATEWAY_TIMEOUT, "upstream-timeout"),
        Err(PassError::Caller) => problem(StatusCode::REQUEST_TIMEOUT, "body"),
    }
}

fn problem(status: StatusCode, detail: &'static str) -> Response<Body> {
    let body = Full::new(Bytes::from_static(detail.as_bytes()));
    let mut answer = Response::new(body.map_err(|never| match never {}).boxed_unsync());
    *answer.status_mut() = status;
    answer.headers_mut().insert("connection", HeaderValue::from_static("close"));
    answer
}
