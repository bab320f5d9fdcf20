//! (signatures)

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, Uri};
use http_body_util::Full;
use http_body_util::combinators::UnsyncBoxBody;

/// Why a body ended before its end.
pub type BodyError = Box<dyn std::error::Error + Send + Sync>;
/// A body as the gateway hands it around.
pub type Body = UnsyncBoxBody<Bytes, BodyError>;

/// How to reach one upstream.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `http://host[:port]` or `https://host[:port]`.
    pub url: Uri,
    /// Name, TCP and TLS together.
    pub connect_timeout: Duration,
    /// How long a pooled connection may have been idle and still carry pass-through traffic.
    pub idle_timeout: Duration,
    /// Pass-through: how long the upstream may take to answer once it makes no progress with the request.
    pub answer_timeout: Duration,
}

/// One configured upstream.
#[derive(Clone)]
pub struct Upstream(Arc<()>);

/// No connection; so nothing was sent.
#[derive(Debug, thiserror::Error)]
#[error("no connection to the upstream")]
pub struct DialError;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// Certainly not one byte was written.
    #[error("nothing was sent")]
    NothingSent(#[source] BodyError),
    /// `may_write` said no before the first byte.
    #[error("held back before the first byte")]
    Held,
    /// Bytes were written and there is no whole answer head: the outcome is unknown.
    #[error("the connection broke")]
    Broken(#[source] BodyError),
}

/// Why a request that passes through has no answer.
#[derive(Debug, thiserror::Error)]
pub enum PassError {
    /// No connection.
    #[error("the upstream is unreachable")]
    Unreachable,
    /// The connection broke, or the answer was malformed.
    #[error("the upstream failed")]
    Failed,
    /// No answer in time.
    #[error("the upstream did not answer in time")]
    TimedOut,
}

/// A connection on which nothing has been written.
pub struct Dialed(());

/// The body of an answer; dropping it closes the connection.
pub struct Answer(());

impl http_body::Body for Answer {
    type Data = Bytes;
    type Error = BodyError;
    fn poll_frame(
        self: std::pin::Pin<&mut Self>,
        _cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<http_body::Frame<Bytes>, BodyError>>> {
        unimplemented!()
    }
}

impl Upstream {
    /// Checks the settings.
    pub fn new(_settings: Settings) -> Result<Self, String> {
        unimplemented!()
    }
    /// A fresh connection.
    pub async fn dial(&self) -> Result<Dialed, DialError> {
        unimplemented!()
    }
    /// Pass-through.
    pub async fn pooled(&self, _request: Request<Body>) -> Result<Response<Body>, PassError> {
        unimplemented!()
    }
    /// `host[:port]` as in a Host header.
    pub fn authority(&self) -> &http::HeaderValue {
        unimplemented!()
    }
}

impl Dialed {
    /// Sends once.
    pub async fn send(
        self,
        _request: Request<Full<Bytes>>,
        _may_write: impl Fn() -> bool + Send + Sync + 'static,
    ) -> Result<Response<Answer>, SendError> {
        unimplemented!()
    }
}
