//! Connections to an upstream, and the knowledge of whether a byte went out on one.
//!
//! A reserved request goes out on a connection of its own: [`Upstream::dial`] resolves, connects and shakes hands, which
//! writes nothing of the request; [`Dialed::send`] then sends it once. A wrapper sits between hyper and the socket (above
//! TLS), counts what the socket took, and asks `may_write` before the first byte. What hyper says about an error is a hint;
//! the counter, read after the connection's task has ended, is the proof: if it did not move, nothing was sent.
//!
//! What passes through may use a pooled connection ([`Upstream::pooled`]). A request that hyper hands back unsent because
//! the connection had died in the pool goes out on another one; one of which a byte was written never goes out again.
//!
//! What must stay true: no request is written twice; the task that drives a connection ends when whoever waits for the
//! answer, or reads its body, lets go of it. Answers are parsed leniently, because a refusal to parse would turn a finished
//! write into an unknown one; but how long an answer is must be certain, so unknown transfer codings are refused.
//!
//! When the process dies here the sockets close; what the upstream makes of the requests in flight is unknown.

mod counted;

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderValue};
use http::uri::Scheme;
use http::{HeaderName, Method, Request, Response, StatusCode, Uri, Version};
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::{TrySendError, http1};
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::{Instant, Sleep, timeout, timeout_at};
use tokio_rustls::TlsConnector;

use crate::gateway::upstream::counted::{Counted, Meter, Stream};

/// Why a body ended before its end.
pub type BodyError = Box<dyn std::error::Error + Send + Sync>;
/// A body as the gateway hands it around.
pub type Body = UnsyncBoxBody<Bytes, BodyError>;

/// Header lines of an answer that are read; more make it malformed.
///
/// Generous, since a refusal to read would turn a finished write into an unknown one.
const ANSWER_HEADERS_MAX: usize = 1000;
/// Bytes of an answer's head that are read.
const ANSWER_HEAD_BYTES_MAX: usize = 512 * 1024;
/// Connections that wait in the pool for pass-through traffic.
const IDLE_MAX: usize = 64;
/// How long an upstream may take nothing of a request that it has already answered.
const PARK_TIMEOUT: Duration = Duration::from_secs(1);

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
    tls: Option<(TlsConnector, ServerName<'static>)>,
    settings: Settings,
    pool: Mutex<Vec<Parked>>,
}

struct Parked {
    since: Instant,
    connection: Connection,
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
        let pool = Mutex::default();
        Ok(Self(Arc::new(Inner { host, port, authority, tls, settings, pool })))
    }

    /// `host[:port]` as in a Host header.
    #[must_use]
    pub fn authority(&self) -> &HeaderValue {
        &self.0.authority
    }

    /// Makes a connection: name, TCP, TLS. Nothing of a request is written.
    pub async fn dial(&self) -> Result<Dialed, DialError> {
        self.dial_for(Use::Once).await
    }

    async fn dial_for(&self, purpose: Use) -> Result<Dialed, DialError> {
        let deadline = Instant::now() + self.0.settings.connect_timeout;
        let stream = timeout_at(deadline, self.connect(deadline, purpose));
        let (stream, probe) = stream.await.map_err(|_| DialError::TimedOut)??;
        let connection = Connection::open(stream, probe).await?;
        let idle_limit = self.0.settings.answer_idle_timeout;
        Ok(Dialed { connection, authority: self.0.authority.clone(), idle_limit })
    }

    async fn connect(
        &self,
        deadline: Instant,
        purpose: Use,
    ) -> Result<(Box<dyn Stream>, Option<Probe>), DialError> {
        // Each time: containers change their addresses.
        let name = (self.0.host.as_str(), self.0.port);
        let addresses = tokio::net::lookup_host(name).await.map_err(DialError::Resolve)?.collect();
        let tcp = connect_any(addresses, deadline).await.map_err(DialError::Connect)?;
        tcp.set_nodelay(true).map_err(DialError::Connect)?;
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
            let (mut connection, reused) = match self.check_out() {
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
        let idle_limit = self.0.settings.answer_idle_timeout;
        let (connection, pool) = (Some(connection), Some(self.clone()));
        let mut body = Answer { body, connection, pool, idle: Idle::new(idle_limit), idle_limit };
        body.park_if_over();
        Ok(Response::from_parts(head, body.boxed_unsync()))
    }

    fn name_host(&self, headers: &mut HeaderMap) {
        headers.entry(header::HOST).or_insert_with(|| self.0.authority.clone());
    }

    fn check_out(&self) -> Option<Connection> {
        let mut pool = self.0.pool.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let Parked { since, connection } = pool.pop()?;
            let is_fresh = since.elapsed() < self.0.settings.idle_timeout;
            if is_fresh && connection.sender.is_ready() && connection.is_quiet() {
                return Some(connection);
            }
        }
    }

    /// Puts a connection back once it is ready for the next request, and takes it out again when it has been idle for
    /// long. The task lives as long as that at most.
    fn park(&self, mut connection: Connection) {
        let inner = Arc::downgrade(&self.0);
        tokio::spawn(async move {
            if !connection.finish().await {
                return;
            }
            let idle_timeout = match inner.upgrade() {
                Some(inner) => inner.take_back(connection),
                None => return,
            };
            tokio::time::sleep(idle_timeout).await;
            if let Some(inner) = inner.upgrade() {
                inner.expire();
            }
        });
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

impl Inner {
    fn take_back(&self, connection: Connection) -> Duration {
        let mut pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
        if pool.len() < IDLE_MAX {
            pool.push(Parked { since: Instant::now(), connection });
        }
        self.settings.idle_timeout
    }

    fn expire(&self) {
        let mut pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
        pool.retain(|parked| parked.since.elapsed() < self.settings.idle_timeout);
    }
}

fn unreachable_upstream(error: &DialError) -> PassError {
    tracing::debug!(error = error as &dyn std::error::Error, "no connection to the upstream");
    PassError::Unreachable
}

fn failed(error: &hyper::Error) -> PassError {
    tracing::debug!(error = error as &dyn std::error::Error, "no answer from the upstream");
    if error.is_user() { PassError::Caller } else { PassError::Failed }
}

fn tls(host: &str, ca: Option<&Path>) -> Result<(TlsConnector, ServerName<'static>), String> {
    let name = ServerName::try_from(host.to_owned()).map_err(|e| e.to_string())?;
    let roots = roots(ca)?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| e.to_string())?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok((TlsConnector::from(Arc::new(config)), name))
}

fn roots(ca: Option<&Path>) -> Result<rustls::RootCertStore, String> {
    let mut roots = rustls::RootCertStore::empty();
    if let Some(path) = ca {
        let wrong = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        for certificate in CertificateDer::pem_file_iter(path).map_err(|e| wrong(&e))? {
            let certificate = certificate.map_err(|e| wrong(&e))?;
            roots.add(certificate).map_err(|e| wrong(&e))?;
        }
    } else {
        // A few broken certificates among the system's are normal, and no reason to refuse the others.
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    }
    if roots.is_empty() {
        return Err("there are no root certificates to trust".to_owned());
    }
    Ok(roots)
}

/// Tries the addresses in order, each with its share of the time that is left.
async fn connect_any(addresses: Vec<SocketAddr>, deadline: Instant) -> io::Result<TcpStream> {
    let mut left = u32::try_from(addresses.len()).unwrap_or(u32::MAX);
    let mut error = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in addresses {
        let share = deadline.saturating_duration_since(Instant::now()) / left.max(1);
        left = left.saturating_sub(1);
        match timeout(share, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(refused)) => error = refused,
            Err(_) => error = io::ErrorKind::TimedOut.into(),
        }
    }
    Err(error)
}

/// A connection on which nothing has been written yet.
pub struct Dialed {
    connection: Connection,
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
        let Self { mut connection, authority, idle_limit } = self;
        connection.meter.ask(may_write);
        connection.meter.listen();
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
        head.extensions.insert(SentNames(sent_names(&connection.meter.heard()).into()));
        reframe(&mut head).map_err(|fault| SendError::Broken(fault.into()))?;
        let body = Answer {
            body,
            connection: Some(connection),
            pool: None,
            idle: Idle::new(None),
            idle_limit,
        };
        Ok(Response::from_parts(head, body))
    }
}

/// The names of an answer's header lines as they were spelled, in their order: an extension of it.
#[derive(Clone, Debug)]
pub(super) struct SentNames(pub(super) Arc<[Box<str>]>);

/// Reads the names out of the bytes of an answer, behind any interim ones. What is no header line is left out.
fn sent_names(bytes: &[u8]) -> Vec<Box<str>> {
    let mut lines = bytes.split_inclusive(|byte| *byte == b'\n').map(<[u8]>::trim_ascii_end);
    let mut names = Vec::new();
    while let Some(status) = lines.next() {
        let interim = status.get(8..).is_some_and(|code| code.trim_ascii_start().starts_with(b"1"));
        for line in lines.by_ref().take_while(|line| !line.is_empty()).filter(|_| !interim) {
            let colon = line.iter().position(|byte| *byte == b':');
            let name = colon.and_then(|at| line.get(..at)).unwrap_or_default().trim_ascii_end();
            if HeaderName::from_bytes(name).is_ok() {
                names.push(String::from_utf8_lossy(name).into());
            }
        }
        if !interim {
            break;
        }
    }
    names
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

/// Checks that an answer's end is certain, and leaves at most one header that says it.
///
/// hyper has read the body by the last `Transfer-Encoding`; what it cannot decode, and what two readers could take for
/// different lengths, is refused. A switch of protocols that nobody asked for is refused too.
fn reframe(head: &mut http::response::Parts) -> Result<(), &'static str> {
    if head.status == StatusCode::SWITCHING_PROTOCOLS {
        return Err("the upstream switches protocols unasked");
    }
    head.version = Version::HTTP_11;
    let headers = &mut head.headers;
    let codings: Vec<_> = headers.get_all(header::TRANSFER_ENCODING).iter().collect();
    let known = match codings.as_slice() {
        [] => None,
        [one] => Some(one.to_str().map(str::trim).unwrap_or_default()),
        [_, ..] => Some("several"),
    };
    match known {
        None => {}
        Some(coding) if ["chunked", "identity"].iter().any(|c| coding.eq_ignore_ascii_case(c)) => {
            headers.remove(header::TRANSFER_ENCODING);
            headers.remove(header::CONTENT_LENGTH);
        }
        Some(_) => return Err("the answer has an unknown transfer coding"),
    }
    let lengths = headers.get_all(header::CONTENT_LENGTH).iter();
    let mut lengths = lengths.flat_map(|line| line.as_bytes().split(|byte| *byte == b','));
    let Some(first) = lengths.next().map(<[u8]>::trim_ascii) else { return Ok(()) };
    if !lengths.all(|length| length.trim_ascii() == first) {
        return Err("the answer has several lengths");
    }
    let length = HeaderValue::from_bytes(first).map_err(|_| "the answer's length is malformed")?;
    headers.remove(header::CONTENT_LENGTH);
    // RFC 9110, 8.6: never on a 204. On a 304, and on an answer to HEAD, it says what a GET would have got.
    if head.status != StatusCode::NO_CONTENT {
        headers.insert(header::CONTENT_LENGTH, length);
    }
    Ok(())
}

/// The body of an answer. Dropping it before its end closes the connection.
pub struct Answer {
    body: Incoming,
    connection: Option<Connection>,
    pool: Option<Upstream>,
    idle: Idle,
    idle_limit: Option<Duration>,
}

/// The upstream was silent for too long within an answer.
#[derive(Debug, thiserror::Error)]
#[error("the upstream was silent for too long in the middle of its answer")]
pub struct Silent;

/// How long an answer's body has been waited for.
struct Idle {
    limit: Option<Duration>,
    waiting: Option<Pin<Box<Sleep>>>,
}

impl Idle {
    const fn new(limit: Option<Duration>) -> Self {
        Self { limit, waiting: None }
    }

    /// Something came, or the end.
    fn over(&mut self) {
        self.waiting = None;
    }

    /// Nothing has come: is it too long since something did? While nobody reads, nobody asks.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(limit) = self.limit else { return Poll::Pending };
        let timer = self.waiting.get_or_insert_with(|| Box::pin(tokio::time::sleep(limit)));
        timer.as_mut().poll(cx)
    }
}

impl Answer {
    /// From here on the body is streamed, and bounded by `answer_idle_timeout`; who reads it whole has a time-out.
    #[must_use]
    pub fn streamed(mut self) -> Self {
        self.idle = Idle::new(self.idle_limit);
        self
    }

    /// At the clean end: a pooled connection goes back, any other is closed.
    fn park_if_over(&mut self) {
        if !self.body.is_end_stream() {
            return;
        }
        self.over();
    }

    fn over(&mut self) {
        if let (Some(connection), Some(pool)) = (self.connection.take(), &self.pool) {
            pool.park(connection);
        }
    }
}

impl http_body::Body for Answer {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) else {
            ready!(self.idle.poll(cx));
            tracing::info!("the upstream was silent in the middle of its answer");
            self.connection = None;
            return Poll::Ready(Some(Err(Silent.into())));
        };
        self.idle.over();
        match &frame {
            None => self.over(),
            Some(Ok(_)) => self.park_if_over(),
            Some(Err(_)) => self.connection = None,
        }
        Poll::Ready(frame.map(|result| result.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A connection with the task that drives it; dropping it ends the task, and so closes the socket.
struct Connection {
    sender: http1::SendRequest<Body>,
    meter: Arc<Meter>,
    task: Driver,
    /// Lives as long as the task, so that the socket closes with it.
    probe: Weak<Probe>,
}

/// What a connection is made for.
#[derive(Clone, Copy)]
enum Use {
    /// One request.
    Once,
    /// Many, one after the other.
    Pool,
}

/// A second handle of the socket, to look at it without waiting for the task that drives the connection.
///
/// Between the upstream's FIN and the task's next turn a request would still be written, into the void.
struct Probe(std::net::TcpStream);

impl Probe {
    fn of(stream: &TcpStream) -> io::Result<Self> {
        stream.as_fd().try_clone_to_owned().map(|handle| Self(handle.into()))
    }

    /// Whether nothing has come in: neither an end, nor an error, nor bytes that nobody asked for.
    fn is_quiet(&self) -> bool {
        self.0.peek(&mut [0]).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }
}

impl Connection {
    async fn open(stream: Box<dyn Stream>, probe: Option<Probe>) -> Result<Self, DialError> {
        let meter = Arc::new(Meter::default());
        let io = TokioIo::new(Counted { stream, meter: Arc::clone(&meter) });
        let (sender, connection) = http1::Builder::new()
            .preserve_header_case(true)
            .max_headers(ANSWER_HEADERS_MAX)
            .max_buf_size(ANSWER_HEAD_BYTES_MAX)
            .allow_obsolete_multiline_headers_in_responses(true)
            .allow_spaces_after_header_name_in_responses(true)
            .ignore_invalid_headers_in_responses(true)
            .handshake(io)
            .await
            .map_err(|error| DialError::Connect(io::Error::other(error)))?;
        let probe = probe.map(Arc::new);
        let seen = probe.as_ref().map_or_else(Weak::new, Arc::downgrade);
        let task = tokio::spawn(async move {
            let _probe = probe;
            if let Err(error) = connection.await {
                tracing::debug!(
                    error = &error as &dyn std::error::Error,
                    "upstream connection ended"
                );
            }
        });
        Ok(Self { sender, meter, task: Driver(task), probe: seen })
    }

    fn is_quiet(&self) -> bool {
        self.probe.upgrade().is_some_and(|probe| probe.is_quiet())
    }

    /// Waits until the connection could take another request; false if it ended, or got stuck.
    ///
    /// After an early answer the rest of the request still goes out; an upstream that takes no more of it is left.
    async fn finish(&mut self) -> bool {
        let mut seen = self.meter.written();
        loop {
            if let Ok(ready) = timeout(PARK_TIMEOUT, self.sender.ready()).await {
                return ready.is_ok();
            }
            let written = self.meter.written();
            if written == seen {
                return false;
            }
            seen = written;
        }
    }

    /// Ends the task and waits until it has ended: from then on the counter stands still.
    async fn end(mut self) -> Arc<Meter> {
        self.task.0.abort();
        if let Err(error) = (&mut self.task.0).await
            && error.is_panic()
        {
            tracing::error!("the task of an upstream connection panicked");
        }
        self.meter
    }
}

struct Driver(JoinHandle<()>);

impl Drop for Driver {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_of_an_answer_are_those_of_its_final_head() {
        for (bytes, names) in [
            ("HTTP/1.1 200 OK\r\nETag: a\r\nx-B:\r\n folded: no\r\n\r\nBody: no\r\n", "ETag x-B"),
            ("HTTP/1.1 103 Hints\r\nLink: a\r\n\r\nHTTP/1.1 201\r\nX-A : b\r\n\r\n", "X-A"),
            ("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 200 OK\nX-A: b\nX-a: c\n\nok", "X-A X-a"),
            ("HTTP/1.1 200 OK\r\nno colon\r\nX(A): b\r\nX-B: c\r\nX-Cut", "X-B"),
            ("", ""),
        ] {
            assert_eq!(sent_names(bytes.as_bytes()).join(" "), names, "{bytes:?}");
        }
    }
}
