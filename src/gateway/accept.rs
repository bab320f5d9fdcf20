//! (signatures)

use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::service::Service;
use tokio_util::sync::CancellationToken;

use crate::gateway::upstream::Body;

/// Limits of a listener.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `host:port` or `unix:PATH`.
    pub listen: String,
    /// For a whole head, and between requests.
    pub header_timeout: Duration,
    /// How long a caller may keep us waiting for its body.
    pub body_timeout: Duration,
    /// How long a caller may take nothing of its answer.
    pub write_timeout: Duration,
    /// Connections at a time; more wait in the backlog.
    pub connections_max: usize,
    /// Header lines of a request.
    pub headers_max: usize,
    /// Bytes of a request's head.
    pub head_bytes_max: usize,
    /// Answer a caller that has shut its write side.
    pub half_close: bool,
}

/// A bound listener.
pub enum Listener {
    /// TCP.
    Tcp(tokio::net::TcpListener),
    /// Unix.
    Unix(tokio::net::UnixListener),
}

impl Listener {
    /// Binds `host:port` or `unix:PATH`.
    pub async fn bind(_listen: &str) -> std::io::Result<Self> {
        unimplemented!()
    }
    /// The bound TCP address.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        unimplemented!()
    }
}

/// Who is at the other end: an extension of each request.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    /// None: a unix socket.
    pub addr: Option<SocketAddr>,
    /// Over TLS.
    pub https: bool,
}

/// Serves until `stop`, then lets what runs finish within `grace`.
pub async fn serve<S>(
    _listener: Listener,
    _settings: Settings,
    _service: S,
    _stop: CancellationToken,
    _grace: Duration,
) where
    S: Service<Request<Incoming>, Response = Response<Body>, Error = Infallible>
        + Clone
        + Send
        + Sync
        + 'static,
    S::Future: Send + 'static,
{
    unimplemented!()
}

/// A request body that errs when its caller is too slow.
pub fn timed(_request: Request<Incoming>) -> Request<Body> {
    unimplemented!()
}
