//! How long a caller may take until its next head is there: idle first, then in the middle of it.
//!
//! hyper knows one time-out for a head, which counts from the end of the answer before it; so a connection that rests would be
//! closed as a slow head is. It asks its timer for that time, and polls what it gets after each read that leaves the head
//! incomplete. [`HeadTimer`] is such a timer: between two requests it counts `idle_timeout` until a byte comes, and from
//! then on `header_timeout`. The first head of a connection has `header_timeout` from the start: nobody connects to rest.
//!
//! What must stay true: no wait for a head is longer than both together. A part of a head that came in one piece with
//! the request before it is not seen until more comes, so the idle time bounds it.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::time::Sleep;

/// How often something came from the caller that can be the begin of a head. Empty lines before one cannot (RFC 9112, 2.2).
#[derive(Clone, Debug, Default)]
pub(super) struct Heard(Arc<AtomicU64>);

impl Heard {
    pub(super) fn hear(&self, bytes: &[u8]) {
        if bytes.iter().any(|byte| !matches!(byte, b'\r' | b'\n')) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// hyper's clock for the heads of one connection. The deadlines that it is given are those of `header_timeout`.
#[derive(Debug)]
pub(super) struct HeadTimer {
    header_timeout: Duration,
    idle_timeout: Duration,
    heard: Heard,
    first: AtomicBool,
}

impl HeadTimer {
    pub(super) const fn new(
        header_timeout: Duration,
        idle_timeout: Duration,
        heard: Heard,
    ) -> Self {
        Self { header_timeout, idle_timeout, heard, first: AtomicBool::new(true) }
    }
}

impl hyper::rt::Timer for HeadTimer {
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn hyper::rt::Sleep>> {
        self.sleep_until(self.now() + duration)
    }

    fn sleep_until(&self, deadline: Instant) -> Pin<Box<dyn hyper::rt::Sleep>> {
        let begun = self.first.swap(false, Ordering::Relaxed);
        let timer = if begun {
            tokio::time::sleep_until(deadline.into())
        } else {
            tokio::time::sleep(self.idle_timeout)
        };
        Box::pin(Wait {
            timer: Box::pin(timer),
            header_timeout: self.header_timeout,
            heard: self.heard.clone(),
            before: self.heard.count(),
            begun,
        })
    }

    fn now(&self) -> Instant {
        tokio::time::Instant::now().into_std()
    }
}

/// The wait for one head.
struct Wait {
    timer: Pin<Box<Sleep>>,
    header_timeout: Duration,
    heard: Heard,
    before: u64,
    /// Whether a part of it is there.
    begun: bool,
}

impl Future for Wait {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if !self.begun && self.heard.count() != self.before {
            self.begun = true;
            let deadline = tokio::time::Instant::now() + self.header_timeout;
            self.timer.as_mut().reset(deadline);
        }
        self.timer.as_mut().poll(cx)
    }
}

impl hyper::rt::Sleep for Wait {}

#[cfg(test)]
mod tests {
    use hyper::rt::Timer as _;

    use super::*;

    const HEAD: Duration = Duration::from_secs(30);
    const IDLE: Duration = Duration::from_secs(75);

    /// How many seconds a wait takes of which `heard` is told this after that long.
    async fn waited(timer: &HeadTimer, heard: &Heard, after: Duration, bytes: &[u8]) -> u64 {
        let begun = tokio::time::Instant::now();
        let mut wait = timer.sleep_until(timer.now() + HEAD);
        if tokio::time::timeout(after, &mut wait).await.is_err() {
            heard.hear(bytes);
            wait.await;
        }
        begun.elapsed().as_secs()
    }

    #[tokio::test(start_paused = true)]
    async fn a_rest_ends_by_the_idle_time_and_a_head_by_its_own() {
        let heard = Heard::default();
        let timer = HeadTimer::new(HEAD, IDLE, heard.clone());
        let (soon, late) = (Duration::from_secs(10), IDLE - Duration::from_secs(1));
        assert_eq!(waited(&timer, &heard, soon, b"GET").await, 30, "the first of a connection");
        assert_eq!(waited(&timer, &heard, soon, b"").await, 75);
        assert_eq!(waited(&timer, &heard, soon, b"\r\n").await, 75, "no head has begun");
        assert_eq!(waited(&timer, &heard, soon, b"\r\nG").await, 40);
        assert_eq!(waited(&timer, &heard, late, b"GET").await, 104);
    }
}
