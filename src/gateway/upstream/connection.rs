//! One connection to an upstream: hyper over the counting wrapper, and the task that drives it.

use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Weak};
use std::time::Duration;

use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::counted::{Counted, Meter, Stream};
use super::{Body, DialError};
use crate::net::Pool;
use crate::tasks;

/// Header lines of an answer that are read; more make it malformed.
///
/// Generous, since a refusal to read would turn a finished write into an unknown one. The reader makes room for all of
/// them for each answer: a thousand would cost every request a few percent.
const ANSWER_HEADERS_MAX: usize = 400;
/// Bytes of an answer's head that are read.
const ANSWER_HEAD_BYTES_MAX: usize = 512 * 1024;
/// How long an upstream may take nothing of a request that it has already answered.
const PARK_TIMEOUT: Duration = Duration::from_secs(1);

/// A connection with the task that drives it; dropping it ends the task, and so closes the socket.
pub(super) struct Connection {
    pub(super) sender: http1::SendRequest<Body>,
    pub(super) meter: Arc<Meter>,
    task: Driver,
    /// Lives as long as the task, so that the socket closes with it.
    probe: Weak<Probe>,
}

/// What a connection is made for.
#[derive(Clone, Copy)]
pub(super) enum Use {
    /// One request.
    Once,
    /// Many, one after the other.
    Pool,
}

/// A second handle of the socket, to look at it without waiting for the task that drives the connection.
///
/// Between the upstream's FIN and the task's next poll a request would still be written, into the void.
pub(super) struct Probe(std::net::TcpStream);

impl Probe {
    pub(super) fn of(stream: &TcpStream) -> io::Result<Self> {
        stream.as_fd().try_clone_to_owned().map(|handle| Self(handle.into()))
    }

    /// Whether nothing has come in: neither an end, nor an error, nor bytes that nobody asked for.
    fn is_quiet(&self) -> bool {
        self.0.peek(&mut [0]).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }
}

impl Connection {
    pub(super) async fn open(
        stream: Box<dyn Stream>,
        probe: Option<Probe>,
    ) -> Result<Self, DialError> {
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
        let task = tasks::short(async move {
            let _probe = probe;
            if let Err(error) = connection.with_upgrades().await {
                tracing::debug!(
                    error = &error as &dyn std::error::Error,
                    "upstream connection ended"
                );
            }
        });
        Ok(Self { sender, meter, task: Driver(task), probe: seen })
    }

    /// Whether it could take a request at once, and nothing has come in that says otherwise.
    pub(super) fn is_usable(&self) -> bool {
        self.sender.is_ready() && self.probe.upgrade().is_some_and(|probe| probe.is_quiet())
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

    /// Goes back to the pool once it is ready for the next request.
    pub(super) fn park(mut self, pool: &Arc<Pool<Self>>) {
        let pool = Arc::downgrade(pool);
        tasks::short(async move {
            if self.finish().await
                && let Some(pool) = pool.upgrade()
            {
                pool.park(self);
            }
        });
    }

    /// Ends the task and waits until it has ended: from then on the counter does not change.
    pub(super) async fn end(mut self) -> Arc<Meter> {
        self.task.0.abort();
        // Err: it was aborted, or panicked, which is logged.
        drop((&mut self.task.0).await);
        self.meter
    }
}

struct Driver(JoinHandle<()>);

impl Drop for Driver {
    fn drop(&mut self) {
        self.0.abort();
    }
}
