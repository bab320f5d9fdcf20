//! Listeners: who may connect, how long they may take, and how they are closed.
//!
//! A permit is taken before each accept, so callers beyond the limit wait in the kernel's backlog. Each connection is a task
//! that serves HTTP/1.1 by hyper over [`Paced`], which ends a connection whose caller takes nothing of its answer, and which
//! on closing shuts its own side first and reads on for a moment: a caller that is still sending sees the answer rather
//! than a reset. hyper limits the head in size and, by [`waiting`], in time; [`timed`] limits how long the caller may keep
//! a body waiting.
//!
//! What must stay true: no caller can hold a connection for ever by being slow; an error of accept never ends the loop;
//! after `stop` nothing new is accepted, running requests are answered with `Connection: close`, silent and idle
//! connections end at once, tunnels as soon as they are quiet, and after `grace` nothing is left.
//!
//! When the process dies here, callers see their connections end; what they had reserved is settled by others.

mod waiting;

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::waiting::{HeadTimer, Heard};
use crate::fault::{self, Point};
use crate::gateway::tunnel::Switch;
use crate::gateway::upstream::{Body, BodyError};

/// After an error of accept, such as too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// On closing: how long, and how many bytes, are read on so that the caller sees its answer.
const LINGER_TIME: Duration = Duration::from_secs(2);
const LINGER_BYTES: usize = 256 * 1024;
/// A caller that sends its body more slowly than this, in bytes per second, uses up its patience.
const BODY_RATE_MIN: u32 = 256;

/// To a caller whose head did not come in time.
const TOO_LATE: &[u8] =
    b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";

/// Limits of a listener.
#[derive(Clone, Debug)]
pub struct Settings {
    /// For a whole head to arrive: of the first one from the start of the connection, of each other from its first byte.
    pub header_timeout: Duration,
    /// How long a connection may rest between an answer and the first byte of the next head. A proxy in front that keeps
    /// connections must let them go earlier.
    pub idle_timeout: Duration,
    /// How long a caller may keep us waiting for its body, less what it has gained by sending.
    pub body_timeout: Duration,
    /// How long a caller may take nothing of its answer.
    pub write_timeout: Duration,
    /// Connections at a time; more wait in the kernel's backlog.
    pub connections_max: usize,
    /// Header lines of a request; more are answered by 431.
    pub headers_max: usize,
    /// Bytes of a request's head, at least 8192; more are answered by 431.
    pub head_bytes_max: usize,
    /// Answer a caller that has shut its sending side. If not, such a caller counts as gone; if so, a caller that vanished
    /// is not noticed while its request runs.
    pub half_close: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            header_timeout: Duration::from_secs(30),
            idle_timeout: Duration::from_secs(75),
            body_timeout: Duration::from_secs(30),
            write_timeout: Duration::from_secs(30),
            connections_max: 10_000,
            headers_max: 100,
            head_bytes_max: 64 * 1024,
            half_close: false,
        }
    }
}

/// A bound listener.
#[derive(Debug)]
pub enum Listener {
    /// At an address.
    Tcp(TcpListener),
    /// At a path, which is removed when the listener goes.
    Unix(UnixListener, SocketPath),
}

/// The file of a unix socket, removed on drop.
#[derive(Debug)]
pub struct SocketPath(PathBuf);

impl Drop for SocketPath {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.0) {
            tracing::debug!(%error, path = %self.0.display(), "socket file not removed");
        }
    }
}

impl Listener {
    /// Binds `host:port` or `unix:PATH`. The file of a unix socket that nobody listens to any more is replaced.
    pub async fn bind(listen: &str) -> io::Result<Self> {
        let Some(path) = listen.strip_prefix("unix:") else {
            return TcpListener::bind(listen).await.map(Self::Tcp);
        };
        let path = Path::new(path);
        if is_left_over(path).await {
            std::fs::remove_file(path)?;
        }
        Ok(Self::Unix(UnixListener::bind(path)?, SocketPath(path.to_owned())))
    }

    /// The bound address; none for a unix socket.
    #[must_use]
    pub fn local_addr(&self) -> Option<SocketAddr> {
        match self {
            Self::Tcp(listener) => listener.local_addr().ok(),
            Self::Unix(..) => None,
        }
    }

    async fn accept(&self) -> io::Result<(Box<dyn Stream>, Peer)> {
        match self {
            Self::Tcp(listener) => {
                let (stream, addr) = listener.accept().await?;
                if let Err(error) = stream.set_nodelay(true) {
                    tracing::debug!(%error, %addr, "no TCP_NODELAY");
                }
                Ok((Box::new(stream), Peer { addr: Some(addr), https: false }))
            }
            Self::Unix(listener, _) => {
                let (stream, _) = listener.accept().await?;
                Ok((Box::new(stream), Peer { addr: None, https: false }))
            }
        }
    }
}

/// Whether there is a socket file that refuses connections: what a killed process leaves behind.
async fn is_left_over(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket());
    let refused = |e: io::Error| e.kind() == io::ErrorKind::ConnectionRefused;
    is_socket && UnixStream::connect(path).await.is_err_and(refused)
}

/// Who is at the other end: an extension of each request.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    /// None on a unix socket.
    pub addr: Option<SocketAddr>,
    /// Whether the caller spoke TLS to us.
    pub https: bool,
}

/// How long the caller may keep a body waiting, and where it is noted that all of it came: an extension of each request.
#[derive(Clone, Debug)]
struct Patience {
    limit: Duration,
    unread: Unread,
}

/// Whether the caller may be in the middle of sending something. Set by each read, cleared at the end of a request.
#[derive(Clone, Debug, Default)]
struct Unread(Arc<AtomicBool>);

impl Unread {
    fn set(&self, unread: bool) {
        self.0.store(unread, Ordering::Relaxed);
    }
}

/// Serves until `stop`, then lets running requests finish within `grace` and ends what is left.
pub async fn serve<S>(
    listener: Listener,
    settings: Settings,
    service: S,
    stop: CancellationToken,
    grace: Duration,
) where
    S: Service<Request<Incoming>, Response = Response<Body>, Error = Infallible>
        + Clone
        + Send
        + Sync
        + 'static,
    S::Future: Send + 'static,
{
    let permits = Arc::new(Semaphore::new(settings.connections_max.min(Semaphore::MAX_PERMITS)));
    let (tasks, cut) = (TaskTracker::new(), CancellationToken::new());
    let shared = Arc::new((settings, service, stop.clone()));
    while let Some((permit, stream, peer)) = next(&listener, &permits, &stop).await {
        let (shared, cut) = (Arc::clone(&shared), cut.clone());
        tasks.spawn(async move {
            let (settings, service, stop) = &*shared;
            let connection = connection(settings, service, stream, peer, stop);
            cut.run_until_cancelled(connection).await;
            drop(permit);
        });
    }
    drop(listener);
    tasks.close();
    if timeout(grace, tasks.wait()).await.is_err() {
        tracing::warn!(left = tasks.len(), "connections cut at the end of the grace period");
        cut.cancel();
        tasks.wait().await;
    }
}

/// The next connection, with its permit; none once it is time to stop.
async fn next(
    listener: &Listener,
    permits: &Arc<Semaphore>,
    stop: &CancellationToken,
) -> Option<(OwnedSemaphorePermit, Box<dyn Stream>, Peer)> {
    loop {
        let permit = stop.run_until_cancelled(Arc::clone(permits).acquire_owned()).await?.ok()?;
        match stop.run_until_cancelled(listener.accept()).await? {
            Ok((stream, peer)) => return Some((permit, stream, peer)),
            // A caller that left before it was accepted costs nobody else anything.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(error) => {
                tracing::warn!(%error, "accept failed");
                stop.run_until_cancelled(sleep(ACCEPT_PAUSE)).await?;
            }
        }
    }
}

async fn connection<S>(
    settings: &Settings,
    service: &S,
    stream: Box<dyn Stream>,
    peer: Peer,
    stop: &CancellationToken,
) where
    S: Service<Request<Incoming>, Response = Response<Body>, Error = Infallible>,
{
    let (unread, heard) = (Unread::default(), Heard::default());
    let timer = HeadTimer::new(settings.header_timeout, settings.idle_timeout, heard.clone());
    let switch = Switch::default();
    let left = switch.clone();
    let patience = Patience { limit: settings.body_timeout, unread: unread.clone() };
    let service = service_fn(move |mut request: Request<Incoming>| {
        patience.unread.set(!request.body().is_end_stream());
        request.extensions_mut().insert(peer);
        request.extensions_mut().insert(patience.clone());
        request.extensions_mut().insert(left.clone());
        service.call(request)
    });
    let io = TokioIo::new(Paced {
        unread,
        heard,
        switch: switch.clone(),
        ..Paced::new(stream, settings.write_timeout)
    });
    let mut connection = http1::Builder::new()
        .timer(timer)
        .header_read_timeout(settings.header_timeout)
        .max_headers(settings.headers_max)
        .max_header_size(settings.head_bytes_max)
        .max_buf_size(settings.head_bytes_max.max(8192))
        .half_close(settings.half_close)
        .preserve_header_case(true)
        .serve_connection(io, service)
        .with_upgrades();
    let ended = tokio::select! {
        biased;
        ended = &mut connection => ended,
        () = stop.cancelled() => {
            Pin::new(&mut connection).graceful_shutdown();
            (&mut connection).await
        }
    };
    let Err(error) = ended else {
        // With it goes the promise of a tunnel that was not kept.
        drop(connection);
        if let Some(tunnel) = switch.take() {
            Box::pin(tunnel.run(stop)).await;
        }
        return;
    };
    tracing::debug!(error = &error as &dyn std::error::Error, ?peer, "connection ended");
    if error.is_timeout() {
        let Some(parts) = connection.into_parts() else { return };
        if !parts.read_buf.trim_ascii().is_empty() {
            parts.io.into_inner().too_late().await;
        }
    }
}

/// A request whose body errs when its caller keeps us waiting too long.
///
/// Only waiting counts, not the time in which nobody reads. A caller gains time by sending, so that one byte now and then
/// is not enough.
#[must_use]
pub fn timed(request: Request<Incoming>) -> Request<Body> {
    let patience = request.extensions().get::<Patience>().cloned();
    request.map(|body| match patience {
        Some(patience) if !body.is_end_stream() => {
            Timed { body, left: patience.limit, patience, waiting: None }.boxed_unsync()
        }
        Some(_) | None => body.map_err(Into::into).boxed_unsync(),
    })
}

/// The caller sent too little for too long.
#[derive(Debug, thiserror::Error)]
#[error("the caller sent its body too slowly")]
pub struct TooSlow;

struct Timed {
    body: Incoming,
    patience: Patience,
    left: Duration,
    waiting: Option<(Instant, Pin<Box<Sleep>>)>,
}

impl http_body::Body for Timed {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(cx) else {
            let left = this.left;
            let (_, timer) =
                this.waiting.get_or_insert_with(|| (Instant::now(), Box::pin(sleep(left))));
            ready!(timer.as_mut().poll(cx));
            return Poll::Ready(Some(Err(TooSlow.into())));
        };
        let waited = this.waiting.take().map_or(Duration::ZERO, |(since, _)| since.elapsed());
        let bytes = match &frame {
            Some(Ok(frame)) => frame.data_ref().map_or(0, Bytes::len),
            Some(Err(_)) | None => 0,
        };
        let gained = Duration::from_secs(1) * u32::try_from(bytes).unwrap_or(u32::MAX);
        let left = this.left.saturating_sub(waited) + gained / BODY_RATE_MIN;
        this.left = left.min(this.patience.limit);
        if frame.is_none() || this.body.is_end_stream() {
            this.patience.unread.set(false);
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

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// A connection that does not wait for ever for its caller to take bytes, and that closes in two steps.
struct Paced {
    stream: Box<dyn Stream>,
    write_timeout: Duration,
    stalled: Option<Pin<Box<Sleep>>>,
    /// Whether all that was to be written has been.
    flushed: bool,
    unread: Unread,
    heard: Heard,
    switch: Switch,
    linger: Option<Linger>,
}

struct Linger {
    until: Pin<Box<Sleep>>,
    left: usize,
}

impl Paced {
    fn new(stream: Box<dyn Stream>, write_timeout: Duration) -> Self {
        Self {
            stream,
            write_timeout,
            stalled: None,
            flushed: true,
            unread: Unread::default(),
            heard: Heard::default(),
            switch: Switch::default(),
            linger: None,
        }
    }

    /// Answers a caller whose head did not come in time, and closes (RFC 9110, 15.5.9). A part of an answer that is still
    /// on its way must not be taken to go on with this one.
    async fn too_late(mut self) {
        if !self.flushed {
            return;
        }
        let answered = async {
            self.write_all(TOO_LATE).await?;
            self.shutdown().await
        };
        if let Err(error) = answered.await {
            tracing::debug!(%error, "a caller that was too late is gone");
        }
    }

    /// Passes a result of writing on, unless the caller has taken nothing for too long.
    fn pace<T>(
        &mut self,
        cx: &mut Context<'_>,
        result: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if result.is_ready() {
            self.stalled = None;
            return result;
        }
        let limit = self.write_timeout;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(sleep(limit)));
        ready!(stalled.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

fn replying(written: &Poll<io::Result<usize>>) {
    if let Poll::Ready(Ok(1..)) = written {
        fault::point_blocking(Point::Replying);
    }
}

impl AsyncRead for Paced {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let result = Pin::new(&mut self.stream).poll_read(cx, buf);
        let came = buf.filled().get(before..).unwrap_or_default();
        if !came.is_empty() {
            self.unread.set(true);
            self.heard.hear(came);
        }
        result
    }
}

impl AsyncWrite for Paced {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.flushed = false;
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        replying(&written);
        self.pace(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.flushed = false;
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        replying(&written);
        self.pace(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // hyper flushes the stream only once it has nothing more to write.
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        self.flushed = matches!(flushed, Poll::Ready(Ok(())));
        self.pace(cx, flushed)
    }

    /// Shuts our side, then reads and throws away what the caller still sends, for a while.
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.linger.is_none() {
            let shut = Pin::new(&mut this.stream).poll_shutdown(cx);
            ready!(this.pace(cx, shut))?;
        }
        // In a tunnel the end of one way says nothing of the other.
        if this.switch.is_switched() || !this.unread.0.load(Ordering::Relaxed) {
            return Poll::Ready(Ok(()));
        }
        let linger = this.linger.get_or_insert_with(|| Linger {
            until: Box::pin(sleep(LINGER_TIME)),
            left: LINGER_BYTES,
        });
        let mut scrap = [0; 8192];
        while linger.left > 0 && linger.until.as_mut().poll(cx).is_pending() {
            let mut buf = ReadBuf::new(&mut scrap);
            let read = ready!(Pin::new(&mut this.stream).poll_read(cx, &mut buf));
            if read.is_err() || buf.filled().is_empty() {
                break;
            }
            linger.left = linger.left.saturating_sub(buf.filled().len());
        }
        Poll::Ready(Ok(()))
    }
}
