//! Connections to an upstream, and the knowledge of whether a byte went out on one.
//!
//! A reserved request goes out on a connection of its own: [`Upstream::dial`] resolves, connects and shakes hands, which
//! writes nothing of the request; [`Dialed::send`] then sends it once. Where `reuse_for_keyed` allows it, the connection
//! may be one from the pool; it is then closed to everybody else as one that was made for it. A wrapper sits between hyper
//! and the socket (above TLS), counts what the socket took, and asks `may_write` before the first byte. What hyper says
//! about an error is a hint; the counter, read after the connection's task has ended, is the proof: if it did not move,
//! nothing was sent.
//!
//! What passes through may use a pooled connection ([`Upstream::pooled`]). A request that hyper hands back unsent because
//! the connection had died in the pool goes out on another one; one of which a byte was written never goes out again.
//!
//! What must stay true: no request is written twice; the task that drives a connection ends when whoever waits for the
//! answer, or reads its body, lets go of it. Answers are parsed leniently, because a refusal to parse would turn a finished
//! write into an unknown one; but how long an answer is must be certain, so unknown transfer codings are refused.
//!
//! When the process dies here the sockets close; what the upstream makes of the requests in flight is unknown.

mod answer;
mod connection;
mod counted;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderValue};
use http::uri::Scheme;
use http::{Method, Request, Response, StatusCode, Uri, Version};
use http_body::Body as _;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use hyper::upgrade::Upgraded;
use tokio::time::{Instant, timeout, timeout_at};

pub(super) use self::answer::SentNames;
use self::answer::reframe;
pub use self::answer::{Answer, Silent};
use self::connection::{Connection, Probe, Use};
use self::counted::Stream;
use super::headers::Offer;
use crate::net::tls::{self, Tls};
use crate::net::{self, Pool};

/// Connections that wait in the pool.
const IDLE_MAX: usize = 64;

/// Why a body ended before its end.
pub type BodyError = Box<dyn std::error::Error + Send + Sync>;
/// A body as the gateway hands it around.
pub type Body = UnsyncBoxBody<Bytes, BodyError>;

/// A body of these bytes.
pub(super) fn whole(bytes: Bytes) -> Body {
    Full::new(bytes).map_err(|never| match never {}).boxed_unsync()
}

/// How to reach one upstream.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `http://host[:port]` or `https://host[:port]`, without a path.
    pub url: Uri,
    /// For name, TCP and TLS together.
    pub connect_timeout: Duration,
    /// How long a connection may have been idle and still carry pass-through traffic. Keep it shorter than the upstream's
    /// own limit: Node closes after 5 s, gunicorn after 2 s.
    pub idle_timeout: Duration,
    /// Pass-through: how long the upstream may neither take more of the request nor begin its answer.
    pub answer_timeout: Duration,
    /// How long the upstream may be silent within the body of an answer that is streamed; none: for ever.
    pub answer_idle_timeout: Option<Duration>,
    /// How long nothing may pass through a tunnel; none: for ever.
    pub tunnel_idle_timeout: Option<Duration>,
    /// How long a connection may have been idle and still carry a reserved request; none: each has one of its own. What the
    /// upstream closes in the moment of sending is an unknown outcome.
    pub reuse_for_keyed: Option<Duration>,
    /// For https: PEM file with the only certificates to trust. None: the system's.
    pub ca_file: Option<PathBuf>,
}

impl Settings {
    /// The settings of an upstream at `url` of which nothing else is said.
    #[must_use]
    pub const fn at(url: Uri) -> Self {
        Self {
            url,
            connect_timeout: Duration::from_secs(2),
            idle_timeout: Duration::from_secs(4),
            answer_timeout: Duration::from_secs(60),
            answer_idle_timeout: Some(Duration::from_secs(600)),
            tunnel_idle_timeout: Some(Duration::from_secs(3600)),
            reuse_for_keyed: None,
            ca_file: None,
        }
    }
}

/// One configured upstream. Clones share the pool.
#[derive(Clone)]
pub struct Upstream(Arc<Inner>);

struct Inner {
    host: String,
    port: u16,
    authority: HeaderValue,
    tls: Option<Tls>,
    settings: Settings,
    pool: Arc<Pool<Connection>>,
}

/// There is no connection, so nothing was sent.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// The name has no address at the moment.
    #[error("cannot resolve the upstream's name")]
    Resolve(#[source] io::Error),
    /// No address took the connection.
    #[error("cannot connect to the upstream")]
    Connect(#[source] io::Error),
    /// The TLS handshake failed.
    #[error("no TLS with the upstream")]
    Tls(#[source] io::Error),
    /// Not done within `connect_timeout`.
    #[error("connecting to the upstream took too long")]
    TimedOut,
}

/// Why there is no answer to a request that was to be sent once.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// Certainly not one byte was written.
    #[error("nothing was sent")]
    NothingSent(#[source] BodyError),
    /// `may_write` said no before the first byte.
    #[error("held back before the first byte")]
    Held,
    /// Bytes were written, and no lawful answer came: the outcome is unknown.
    #[error("no answer after bytes were sent")]
    Broken(#[source] BodyError),
}

/// Why a request that passes through has no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PassError {
    /// There was no connection; nothing was sent.
    #[error("the upstream is unreachable")]
    Unreachable,
    /// The connection broke, or the answer was malformed.
    #[error("the upstream failed")]
    Failed,
    /// The upstream did not answer in time.
    #[error("the upstream did not answer in time")]
    TimedOut,
    /// The caller's body broke off or came too slowly: 408, and close.
    #[error("the body did not arrive")]
    Caller,
    /// There is no place for another tunnel; nothing was sent.
    #[error("too many tunnels are open")]
    Crowded,
}

/// What came of asking the upstream to switch protocols.
pub(super) enum Switched {
    /// It answers instead.
    Not(Response<Body>),
    /// It has switched to a protocol that was asked for.
    To { taken: Offer, head: http::response::Parts, connection: Upgraded },
}

impl Upstream {
    /// Checks the settings, and loads the system's root certificates for https.
    pub fn new(settings: Settings) -> Result<Self, String> {
        let url = &settings.url;
        let wrong = |what: &str| format!("upstream url {url}: {what}");
        let secure = match url.scheme() {
            Some(scheme) if *scheme == Scheme::HTTP => false,
            Some(scheme) if *scheme == Scheme::HTTPS => true,
            Some(_) | None => return Err(wrong("must begin with http:// or https://")),
        };
        if url.path() != "/" || url.query().is_some() {
            return Err(wrong("must not have a path: targets are forwarded as they come"));
        }
        let authority = url.authority().ok_or_else(|| wrong("names no host"))?;
        if authority.as_str().contains('@') {
            return Err(wrong("must not carry credentials"));
        }
        let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
        let ca_file = settings.ca_file.as_deref();
        let tls = if secure { Some(tls(&host, ca_file).map_err(|e| wrong(&e))?) } else { None };
        let port = match (authority.port(), authority.port_u16()) {
            (None, _) => {
                if secure {
                    443
                } else {
                    80
                }
            }
            (Some(_), Some(port)) => port,
            (Some(_), None) => return Err(wrong("has a port that is none")),
        };
        let authority = HeaderValue::from_str(authority.as_str()).map_err(|e| e.to_string())?;
        let pool = Pool::new(IDLE_MAX, settings.idle_timeout);
        Ok(Self(Arc::new(Inner { host, port, authority, tls, settings, pool })))
    }

    /// `host[:port]` as in a Host header.
    #[must_use]
    pub fn authority(&self) -> &HeaderValue {
        &self.0.authority
    }

    /// A connection for one reserved request: name, TCP, TLS, or one from the pool where that is allowed. Nothing of the
    /// request is written.
    pub async fn dial(&self) -> Result<Dialed, DialError> {
        let Some(limit) = self.0.settings.reuse_for_keyed else {
            return self.dial_for(Use::Once).await;
        };
        match self.0.pool.take(limit, Connection::is_usable) {
            Some(connection) => Ok(self.dialed(connection, Use::Pool)),
            None => self.dial_for(Use::Pool).await,
        }
    }

    fn dialed(&self, connection: Connection, purpose: Use) -> Dialed {
        let pool = match purpose {
            Use::Once => None,
            Use::Pool => Some(Arc::clone(&self.0.pool)),
        };
        let idle_limit = self.0.settings.answer_idle_timeout;
        Dialed { connection, pool, authority: self.0.authority.clone(), idle_limit }
    }

    async fn dial_for(&self, purpose: Use) -> Result<Dialed, DialError> {
        let deadline = Instant::now() + self.0.settings.connect_timeout;
        let stream = timeout_at(deadline, self.connect(deadline, purpose));
        let (stream, probe) = stream.await.map_err(|_| DialError::TimedOut)??;
        let connection = Connection::open(stream, probe).await?;
        Ok(self.dialed(connection, purpose))
    }

    async fn connect(
        &self,
        deadline: Instant,
        purpose: Use,
    ) -> Result<(Box<dyn Stream>, Option<Probe>), DialError> {
        // Each time: containers change their addresses.
        let name = (self.0.host.as_str(), self.0.port);
        let addresses = tokio::net::lookup_host(name).await.map_err(DialError::Resolve)?.collect();
        let tcp = net::connect_any(addresses, deadline).await.map_err(DialError::Connect)?;
        let probe = match purpose {
            Use::Once => None,
            Use::Pool => Some(Probe::of(&tcp).map_err(DialError::Connect)?),
        };
        let stream: Box<dyn Stream> = match &self.0.tls {
            Some((connector, name)) => {
                let tls = connector.connect(name.clone(), tcp).await.map_err(DialError::Tls)?;
                Box::new(tls)
            }
            None => Box::new(tcp),
        };
        Ok((stream, probe))
    }

    /// Sends a request that passes through, on a pooled connection where one is fresh, and streams both bodies.
    ///
    /// A request moves on to another connection where no byte of it was written and hyper handed it back. Beyond that only
    /// a safe request without a body (RFC 9110, 9.2.2) is sent a second time, once, where a reused connection ended
    /// before its answer: the upstream closed it while it was idle. Dropping the future, or the answer's body, closes
    /// the connection.
    pub async fn pooled(&self, request: Request<Body>) -> Result<Response<Body>, PassError> {
        let mut request = request;
        let safe = matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS);
        let may_repeat = safe && request.body().is_end_stream();
        let mut repeated = false;
        self.name_host(request.headers_mut());
        *request.version_mut() = Version::HTTP_11;
        loop {
            let idle_timeout = self.0.settings.idle_timeout;
            let idle = self.0.pool.take(idle_timeout, Connection::is_usable);
            let (mut connection, reused) = match idle {
                Some(connection) if !repeated => (connection, true),
                Some(_) | None => {
                    let dialed = self.dial_for(Use::Pool).await;
                    let dialed = dialed.map_err(|e| unreachable_upstream(&e))?;
                    (dialed.connection, false)
                }
            };
            let before = connection.meter.written();
            let again = (may_repeat && reused).then(|| without_body(&request));
            let sent = self.exchange(&mut connection, request).await?;
            let mut error = match sent {
                Ok(answer) => return self.stream(connection, answer),
                Err(error) => error,
            };
            let unsent = error.take_message();
            let unmoved = connection.end().await.written() == before;
            match unsent {
                Some(unsent) if unmoved && reused => request = unsent,
                Some(_) => return Err(PassError::Unreachable),
                None => match again {
                    Some(again) => {
                        repeated = true;
                        request = again;
                    }
                    None => return Err(failed(error.error())),
                },
            }
        }
    }

    /// One request on one connection; gives up when the upstream neither takes bytes nor answers for too long.
    async fn exchange(
        &self,
        connection: &mut Connection,
        request: Request<Body>,
    ) -> Result<Result<Response<Incoming>, TrySendError<Request<Body>>>, PassError> {
        let mut seen = connection.meter.written();
        let mut sending = Box::pin(connection.sender.try_send_request(request));
        loop {
            if let Ok(sent) = timeout(self.0.settings.answer_timeout, &mut sending).await {
                return Ok(sent);
            }
            let written = connection.meter.written();
            if written == seen {
                return Err(PassError::TimedOut);
            }
            seen = written;
        }
    }

    fn stream(
        &self,
        connection: Connection,
        answer: Response<Incoming>,
    ) -> Result<Response<Body>, PassError> {
        let (mut head, body) = answer.into_parts();
        if let Err(fault) = reframe(&mut head) {
            tracing::debug!(fault, "malformed answer from the upstream");
            return Err(PassError::Failed);
        }
        let pool = Some(Arc::clone(&self.0.pool));
        let idle_limit = self.0.settings.answer_idle_timeout;
        let body = Answer::new(body, connection, pool, idle_limit).streamed();
        Ok(Response::from_parts(head, body.boxed_unsync()))
    }

    /// Asks for a switch of protocols, once, on a new connection. Dropping the future, the answer's body or the connection
    /// closes it.
    pub(super) async fn switched(
        &self,
        mut request: Request<Body>,
        offer: &Offer,
    ) -> Result<Switched, PassError> {
        self.name_host(request.headers_mut());
        *request.version_mut() = Version::HTTP_11;
        let dialed = self.dial_for(Use::Pool).await.map_err(|e| unreachable_upstream(&e))?;
        let mut connection = dialed.connection;
        let mut answer = match self.exchange(&mut connection, request).await? {
            Ok(answer) => answer,
            Err(mut error) => {
                let unsent = error.take_message().is_some();
                return Err(if unsent { PassError::Unreachable } else { failed(error.error()) });
            }
        };
        if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
            return self.stream(connection, answer).map(Switched::Not);
        }
        let Some(taken) = offer.taken(answer.headers()) else {
            tracing::debug!("the upstream switches to a protocol that nobody asked for");
            return Err(PassError::Failed);
        };
        let switched = timeout(self.0.settings.answer_timeout, hyper::upgrade::on(&mut answer));
        let switched = switched.await.map_err(|_| PassError::TimedOut)?;
        let switched = switched.map_err(|error| failed(&error))?;
        connection.meter.tunnel();
        let (head, _) = answer.into_parts();
        Ok(Switched::To { taken, head, connection: switched })
    }

    /// How long nothing may pass through a tunnel to it.
    pub(super) fn tunnel_idle_timeout(&self) -> Option<Duration> {
        self.0.settings.tunnel_idle_timeout
    }

    fn name_host(&self, headers: &mut HeaderMap) {
        headers.entry(header::HOST).or_insert_with(|| self.0.authority.clone());
    }
}

/// The same request once more, of one that has no body.
fn without_body(request: &Request<Body>) -> Request<Body> {
    let mut again = Request::new(Full::default().map_err(|never| match never {}).boxed_unsync());
    again.method_mut().clone_from(request.method());
    again.uri_mut().clone_from(request.uri());
    again.headers_mut().clone_from(request.headers());
    again.extensions_mut().clone_from(request.extensions());
    again
}

fn unreachable_upstream(error: &DialError) -> PassError {
    tracing::debug!(error = error as &dyn std::error::Error, "no connection to the upstream");
    PassError::Unreachable
}

fn failed(error: &hyper::Error) -> PassError {
    tracing::debug!(error = error as &dyn std::error::Error, "no answer from the upstream");
    if error.is_user() { PassError::Caller } else { PassError::Failed }
}

/// TLS to `host` by a file's certificates, or by the system's.
fn tls(host: &str, ca_file: Option<&Path>) -> Result<Tls, String> {
    let roots = tls::roots(ca_file).map_err(|why| format!("ca_file {why}"))?;
    if roots.is_empty() {
        return Err("there are no root certificates to trust".to_owned());
    }
    let config = tls::trusting(roots)?.with_no_client_auth();
    tls::to(host, config).map_err(|error| error.to_string())
}

/// A connection on which nothing of the request has been written yet.
pub struct Dialed {
    connection: Connection,
    pool: Option<Arc<Pool<Connection>>>,
    authority: HeaderValue,
    idle_limit: Option<Duration>,
}

impl Dialed {
    /// Sends a request, once, and waits for the head of its answer.
    ///
    /// The request goes out in origin-form as given, with one `Content-Length` made from the body and without `Expect`.
    /// `may_write` is asked before the first byte; if it says no, nothing is sent. Dropping the future closes the
    /// connection, and whether bytes went out by then is not known; dropping the answer's body closes it too.
    pub async fn send(
        self,
        request: Request<Full<Bytes>>,
        may_write: impl Fn() -> bool + Send + Sync + 'static,
    ) -> Result<Response<Answer>, SendError> {
        let Self { mut connection, pool, authority, idle_limit } = self;
        connection.meter.begin(may_write);
        if let Err(error) = connection.sender.ready().await {
            return Err(connection.end().await.judge(error.into()));
        }
        let answer = match connection.sender.try_send_request(framed(request, authority)).await {
            Ok(answer) => answer,
            Err(error) => {
                return Err(connection.end().await.judge(error.into_error().into()));
            }
        };
        let (mut head, body) = answer.into_parts();
        head.extensions.insert(SentNames(connection.meter.heard().into()));
        reframe(&mut head).map_err(|fault| SendError::Broken(fault.into()))?;
        let body = Answer::new(body, connection, pool, idle_limit);
        Ok(Response::from_parts(head, body))
    }
}

/// One computed length, and nothing else that says where the request ends; a Host in any case.
fn framed(request: Request<Full<Bytes>>, authority: HeaderValue) -> Request<Body> {
    let (mut head, body) = request.into_parts();
    let length = http_body::Body::size_hint(&body).exact().unwrap_or(0);
    let counted = head.headers.remove(header::CONTENT_LENGTH).is_some();
    head.headers.remove(header::TRANSFER_ENCODING);
    head.headers.remove(header::TRAILER);
    head.headers.remove(header::EXPECT);
    let expected = [Method::POST, Method::PUT, Method::PATCH].contains(&head.method);
    if length > 0 || counted || expected {
        head.headers.insert(header::CONTENT_LENGTH, HeaderValue::from(length));
    }
    head.headers.entry(header::HOST).or_insert(authority);
    head.version = Version::HTTP_11;
    Request::from_parts(head, body.map_err(|never| match never {}).boxed_unsync())
}
