//! Connections that wait for their next request.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::connection::Connection;
use crate::tasks;

/// Connections that wait in the pool.
const IDLE_MAX: usize = 64;

/// The idle connections of one upstream.
pub(super) struct Pool {
    idle: Mutex<Vec<Parked>>,
    idle_timeout: Duration,
}

struct Parked {
    since: Instant,
    connection: Connection,
}

impl Pool {
    /// A pool of connections that are let go when they have been idle for so long.
    pub(super) fn new(idle_timeout: Duration) -> Self {
        Self { idle: Mutex::default(), idle_timeout }
    }

    /// The connection that was used last, unless it has been idle for `limit`, or something has come in on it.
    pub(super) fn take(&self, limit: Duration) -> Option<Connection> {
        let mut idle = self.idle.lock();
        loop {
            let is_fresh = |parked: &mut Parked| parked.since.elapsed() < limit;
            let Parked { connection, .. } = idle.pop_if(is_fresh)?;
            if connection.is_usable() {
                return Some(connection);
            }
        }
    }

    /// Puts a connection back once it is ready for the next request, and takes it out again when it has been idle for
    /// long. The task lives as long as that at most.
    pub(super) fn park(self: &Arc<Self>, mut connection: Connection) {
        let pool = Arc::downgrade(self);
        tasks::short(async move {
            if !connection.finish().await {
                return;
            }
            let idle_timeout = match pool.upgrade() {
                Some(pool) => pool.take_back(connection),
                None => return,
            };
            tokio::time::sleep(idle_timeout).await;
            if let Some(pool) = pool.upgrade() {
                pool.expire();
            }
        });
    }

    fn take_back(&self, connection: Connection) -> Duration {
        let mut idle = self.idle.lock();
        if idle.len() < IDLE_MAX {
            idle.push(Parked { since: Instant::now(), connection });
        }
        self.idle_timeout
    }

    fn expire(&self) {
        let mut idle = self.idle.lock();
        idle.retain(|parked| parked.since.elapsed() < self.idle_timeout);
    }
}
