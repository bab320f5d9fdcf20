//! Connections to one webhook: made under one deadline, and kept for a short while.
//!
//! Invariants:
//!
//! - A name is resolved once for each connection, and only an address that the rule allows is dialled. Literal addresses are
//!   checked in the same way. No environment variable (such as a proxy) changes the address.
//! - Each step ends by the deadline, and an error names its step.
//! - A server may close an idle connection at the moment of its use. If a reused connection gives no answer, the request is
//!   sent
//!   once more, at once, on a new connection. The stable id of the event allows that.

use std::error::Error as _;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use crate::net::tls::Tls;
use crate::net::{self, Pool};
use crate::relay::address::{Resolve, Rule};
use crate::telemetry::causes;

/// How long an idle connection is kept: less than the five seconds after which common servers close it.
const IDLE_MAX: Duration = Duration::from_secs(4);

/// Largest headers of an answer, in bytes ...
const HEAD_MAX: usize = 128 * 1024;
/// ... and in lines.
const HEAD_LINES_MAX: usize = 400;

/// How much of a body is handed over at a time.
const PIECE: usize = 16 * 1024;

/// The steps of a delivery up to the answer's headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Resolve,
    Connect,
    Tls,
    Send,
    Answer,
}

impl Step {
    fn name(self) -> &'static str {
        match self {
            Self::Resolve => "resolving the name",
            Self::Connect => "connecting",
            Self::Tls => "TLS handshake",
            Self::Send => "sending the event",
            Self::Answer => "waiting for the answer",
        }
    }
}

/// Why there is no answer.
#[derive(Debug)]
pub(super) struct Failure {
    step: Step,
    /// `None`: the deadline.
    cause: Option<String>,
    /// The connection ended before there was an answer.
    cut: bool,
}

impl Failure {
    fn of(step: Step, error: &dyn std::error::Error) -> Self {
        Self { step, cause: Some(causes(error)), cut: false }
    }

    fn late(step: Step) -> Self {
        Self { step, cause: None, cut: false }
    }

    /// The text for the column `last_error`: the step and its error.
    pub(super) fn text(&self, timeout: Duration) -> String {
        let step = self.step.name();
        match &self.cause {
            Some(cause) => format!("{step}: {cause}"),
            None => format!("{step}: time-out after {timeout:?}"),
        }
    }
}

/// The server of the connections.
pub(super) struct Server {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) rule: Rule,
    pub(super) resolver: Arc<dyn Resolve>,
    pub(super) tls: Option<Tls>,
}

/// Sends requests to a server. Keeps connections for a while.
pub(super) struct Client {
    server: Server,
    pool: Arc<Pool<Connection>>,
}

impl Client {
    pub(super) fn new(server: Server, idle_max: usize) -> Self {
        Self { server, pool: Pool::new(idle_max, IDLE_MAX) }
    }

    /// The answer, with the connection on which its body comes.
    pub(super) async fn send(
        &self,
        request: impl Fn(Piecewise) -> Request<Piecewise>,
        body: &Bytes,
        deadline: Instant,
    ) -> Result<(Response<Incoming>, Connection), Failure> {
        if let Some(waited) = self.pool.take(IDLE_MAX, Connection::is_open) {
            match waited.send(&request, body, deadline).await {
                Err(failure) if failure.cut => {
                    tracing::debug!(
                        ?failure,
                        "an idle connection was closed: the event is sent once more"
                    );
                }
                ended => return ended,
            }
        }
        self.connect(deadline).await?.send(&request, body, deadline).await
    }

    /// Keeps a connection whose answer was read to its end.
    pub(super) fn park(&self, connection: Connection) {
        if connection.is_open() {
            self.pool.park(connection);
        }
    }

    async fn connect(&self, deadline: Instant) -> Result<Connection, Failure> {
        let Server { host, port, rule, resolver, tls } = &self.server;
        let found = rule.find(resolver.as_ref(), host, *port);
        let addresses = by(deadline, Step::Resolve, found).await?;
        let stream = by(deadline, Step::Connect, net::connect_any(addresses, deadline)).await?;
        let Some((connector, name)) = tls else { return Connection::open(stream).await };
        let stream = by(deadline, Step::Tls, connector.connect(name.clone(), stream)).await?;
        Connection::open(stream).await
    }
}

/// Runs a step until the deadline.
async fn by<T>(
    deadline: Instant,
    step: Step,
    doing: impl Future<Output = io::Result<T>>,
) -> Result<T, Failure> {
    match timeout_at(deadline, doing).await {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(error)) => Err(Failure::of(step, &error)),
        Err(_) => Err(Failure::late(step)),
    }
}

/// A connection with the task that drives it; dropping it closes the socket.
pub(super) struct Connection {
    sender: SendRequest<Piecewise>,
    _driver: JoinSet<()>,
}

impl Connection {
    async fn open(
        stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    ) -> Result<Self, Failure> {
        let made = http1::Builder::new()
            .max_buf_size(HEAD_MAX)
            .max_headers(HEAD_LINES_MAX)
            .handshake(TokioIo::new(stream))
            .await;
        let (sender, driving) = made.map_err(|error| Failure::of(Step::Connect, &error))?;
        let mut driver = JoinSet::new();
        driver.spawn(async move {
            if let Err(error) = driving.await {
                tracing::debug!(error = causes(&error), "a connection to a sink ended");
            }
        });
        Ok(Self { sender, _driver: driver })
    }

    fn is_open(&self) -> bool {
        !self.sender.is_closed()
    }

    async fn send(
        mut self,
        request: impl Fn(Piecewise) -> Request<Piecewise>,
        body: &Bytes,
        deadline: Instant,
    ) -> Result<(Response<Incoming>, Self), Failure> {
        let taken = Arc::new(AtomicBool::new(body.is_empty()));
        let body = Piecewise { rest: body.clone(), taken: Arc::clone(&taken) };
        let sending = async {
            self.sender.ready().await?;
            self.sender.send_request(request(body)).await
        };
        let ended = timeout_at(deadline, sending).await;
        let step = if taken.load(Ordering::Relaxed) { Step::Answer } else { Step::Send };
        match ended {
            Ok(Ok(response)) => Ok((response, self)),
            Ok(Err(error)) => {
                let cut = is_cut(&error);
                Err(Failure { cut, ..Failure::of(step, &error) })
            }
            Err(_) => Err(Failure::late(step)),
        }
    }
}

/// Whether the connection ended. All other errors come from the server or from this program.
fn is_cut(error: &hyper::Error) -> bool {
    let broken = error.source().is_some_and(|cause| cause.is::<io::Error>());
    error.is_canceled() || error.is_closed() || error.is_incomplete_message() || broken
}

/// A body that reports when its last part was taken.
pub(super) struct Piecewise {
    rest: Bytes,
    taken: Arc<AtomicBool>,
}

impl Body for Piecewise {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let length = self.rest.len().min(PIECE);
        let piece = self.rest.split_to(length);
        if self.rest.is_empty() {
            self.taken.store(true, Ordering::Relaxed);
        }
        Poll::Ready((!piece.is_empty()).then_some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(u64::try_from(self.rest.len()).unwrap_or(u64::MAX))
    }
}
