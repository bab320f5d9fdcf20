//! The wrapper that knows whether a byte went out.
//!
//! [`Counted`] sits between hyper and the stream below (above TLS, so that it counts what TLS took: more than the wire saw,
//! never less). What must stay true: a byte that the stream took is counted before anybody can act on it; as long as the
//! count is zero and `may_write` says no, nothing gets through, by whichever way of writing.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::fault::{self, Point};
use crate::gateway::upstream::{BodyError, SendError};

/// What went out on a connection, and whether it may.
#[derive(Default)]
pub(super) struct Meter {
    written: AtomicU64,
    /// Of the reserved request that the connection is used for.
    may_write: Mutex<Option<MayWrite>>,
    held: AtomicBool,
    /// Whether it is one half of a tunnel: then nobody waits for an answer any more.
    tunnelled: AtomicBool,
    /// The first bytes that came, while they are looked at.
    heard: Mutex<Option<Vec<u8>>>,
}

type MayWrite = Arc<dyn Fn() -> bool + Send + Sync>;

/// So much of what came first is kept for a look at the names in it.
const HEARD_MAX: usize = 64 * 1024;

impl Meter {
    /// A reserved request begins: counts from nothing, asks before its first byte, and keeps what comes until it is taken.
    ///
    /// The connection is idle: nobody else writes on it, and all that was written before is answered.
    pub(super) fn begin(&self, may_write: impl Fn() -> bool + Send + Sync + 'static) {
        *self.may_write.lock() = Some(Arc::new(may_write));
        *self.heard.lock() = Some(Vec::new());
        self.written.store(0, Ordering::Release);
    }

    /// What came first since [`Meter::begin`].
    pub(super) fn heard(&self) -> Vec<u8> {
        self.heard.lock().take().unwrap_or_default()
    }

    fn hear(&self, bytes: &[u8]) {
        let mut heard = self.heard.lock();
        if let Some(heard) = &mut *heard {
            let room = HEARD_MAX.saturating_sub(heard.len());
            heard.extend(bytes.iter().take(room));
        }
    }

    /// From here on an error of writing is one, at once.
    pub(super) fn tunnel(&self) {
        self.tunnelled.store(true, Ordering::Release);
    }

    pub(super) fn written(&self) -> u64 {
        self.written.load(Ordering::Acquire)
    }

    /// Before each write: may the first byte go out?
    fn check(&self) -> io::Result<()> {
        if self.written() > 0 {
            return Ok(());
        }
        let may_write = self.may_write.lock().clone();
        if may_write.is_none_or(|may_write| may_write()) {
            return Ok(());
        }
        self.held.store(true, Ordering::Release);
        Err(io::Error::other("held back"))
    }

    /// Counts what was written, and keeps an error back once anything was.
    ///
    /// An upstream that answers early and closes makes our next write fail while its answer waits to be read. So writing
    /// just stops; reading then finds the answer, or the end of the connection.
    fn count(&self, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        match written {
            Poll::Ready(Ok(bytes)) => {
                self.written.fetch_add(u64::try_from(bytes).unwrap_or(u64::MAX), Ordering::AcqRel);
                if bytes > 0 {
                    fault::point_blocking(Point::BytesSent);
                }
                written
            }
            Poll::Ready(Err(error))
                if self.written() > 0 && !self.tunnelled.load(Ordering::Acquire) =>
            {
                tracing::debug!(%error, "the upstream takes no more");
                Poll::Pending
            }
            Poll::Ready(Err(_)) | Poll::Pending => written,
        }
    }

    /// What an error means, once nothing can be written any more.
    pub(super) fn judge(&self, cause: BodyError) -> SendError {
        if self.written() > 0 {
            SendError::Broken(cause)
        } else if self.held.load(Ordering::Acquire) {
            SendError::Held
        } else {
            SendError::NothingSent(cause)
        }
    }
}

pub(super) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// Counts the bytes that the stream below took.
pub(super) struct Counted {
    pub(super) stream: Box<dyn Stream>,
    pub(super) meter: Arc<Meter>,
}

impl AsyncRead for Counted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        self.meter.hear(buf.filled().get(before..).unwrap_or_default());
        read
    }
}

impl AsyncWrite for Counted {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.meter.check()?;
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.meter.count(written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.meter.check()?;
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.meter.count(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        self.meter.count(flushed.map_ok(|()| 0)).map_ok(|_| ())
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
