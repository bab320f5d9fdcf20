//! A pool of idle connections.

use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::tasks;

/// The idle connections to one server.
pub struct Pool<C> {
    idle: Mutex<Idle<C>>,
    idle_max: usize,
    idle_timeout: Duration,
}

struct Idle<C> {
    /// Each with the time since when it is idle. The last one has been idle for the shortest time.
    waiting: Vec<(Instant, C)>,
    /// Whether a task runs that closes connections that are idle for too long.
    watched: bool,
}

impl<C: Send + 'static> Pool<C> {
    /// A pool of at most this many connections. They are closed when they have been idle for this long.
    #[must_use]
    pub fn new(idle_max: usize, idle_timeout: Duration) -> Arc<Self> {
        let idle = Mutex::new(Idle { waiting: Vec::new(), watched: false });
        Arc::new(Self { idle, idle_max, idle_timeout })
    }

    /// The usable connection that was used last, unless it has been idle for `limit`.
    pub fn take(&self, limit: Duration, is_usable: impl Fn(&C) -> bool) -> Option<C> {
        let mut idle = self.idle.lock();
        loop {
            let (_, connection) = idle.waiting.pop_if(|(since, _)| since.elapsed() < limit)?;
            if is_usable(&connection) {
                return Some(connection);
            }
        }
    }

    /// Keeps a connection, unless the pool is full.
    pub fn park(self: &Arc<Self>, connection: C) {
        let mut idle = self.idle.lock();
        if idle.waiting.len() >= self.idle_max {
            return;
        }
        idle.waiting.push((Instant::now(), connection));
        if !std::mem::replace(&mut idle.watched, true) {
            tasks::short(watch(Arc::downgrade(self)));
        }
    }

    /// Closes connections that were idle for too long. Returns when the next one will be; `None` if no connection is left.
    fn expire(&self) -> Option<Instant> {
        let mut idle = self.idle.lock();
        idle.waiting.retain(|(since, _)| since.elapsed() < self.idle_timeout);
        let next = idle.waiting.first().map(|(since, _)| *since + self.idle_timeout);
        idle.watched = next.is_some();
        next
    }
}

async fn watch<C: Send + 'static>(pool: Weak<Pool<C>>) {
    while let Some(at) = pool.upgrade().and_then(|pool| pool.expire()) {
        tokio::time::sleep_until(at).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(4);

    #[tokio::test(start_paused = true)]
    async fn connections_are_closed_when_they_have_waited_for_long_whether_or_not_anybody_asks() {
        let pool = Pool::new(2, LONG);
        let (first, second, third) = (Arc::new(1), Arc::new(2), Arc::new(3));
        pool.park(Arc::clone(&first));
        tokio::time::sleep(LONG / 2).await;
        pool.park(Arc::clone(&second));
        pool.park(Arc::clone(&third));
        let kept = || [&first, &second, &third].map(|connection| Arc::strong_count(connection) > 1);
        assert_eq!(kept(), [true, true, false], "two at most");
        tokio::time::sleep(LONG / 2 + Duration::from_millis(2)).await;
        assert_eq!(kept(), [false, true, false]);
        tokio::time::sleep(LONG / 2).await;
        assert_eq!(kept(), [false; 3]);
        pool.park(Arc::clone(&third));
        tokio::time::sleep(LONG + Duration::from_millis(2)).await;
        assert_eq!(kept(), [false; 3], "whoever comes after a quiet time is watched, too");
    }

    #[tokio::test(start_paused = true)]
    async fn the_connection_that_was_used_last_is_taken_if_it_is_fresh_and_usable() {
        let pool = Pool::new(8, LONG);
        for connection in 1..=3 {
            pool.park(connection);
        }
        assert_eq!(pool.take(LONG, |connection| *connection != 3), Some(2));
        tokio::time::sleep(LONG / 2).await;
        assert_eq!(pool.take(LONG / 2, |_| true), None, "too old for this use");
        assert_eq!(pool.take(LONG, |_| true), Some(1), "and not for that one");
        assert_eq!(pool.take(LONG, |_| true), None);
    }
}
