//! What connections to upstreams, sinks and sets of keys have in common: an address that answers in time, what TLS trusts, and
//! a pool of connections that wait.

mod pool;
pub mod tls;

use std::io;
use std::net::SocketAddr;

use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

pub use self::pool::Pool;

/// How requests of our own name their maker.
pub const AGENT: &str = concat!("oncegate/", env!("CARGO_PKG_VERSION"));

/// A connection to one of these addresses: they are tried in order, each with its share of the time that is left. It sends
/// small messages at once.
///
/// # Errors
/// None took it; of the last one that refused. Where the last one is silent this stays open: the deadline is the caller's.
pub async fn connect_any(addresses: Vec<SocketAddr>, deadline: Instant) -> io::Result<TcpStream> {
    let mut left = u32::try_from(addresses.len()).unwrap_or(u32::MAX);
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in addresses {
        let share = deadline.saturating_duration_since(Instant::now()) / left.max(1);
        left = left.saturating_sub(1);
        last = match timeout(share, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => return stream.set_nodelay(true).map(|()| stream),
            Ok(Err(error)) => io::Error::new(error.kind(), format!("{address}: {error}")),
            Err(_) if left == 0 => return std::future::pending().await,
            Err(_) => io::Error::new(io::ErrorKind::TimedOut, format!("{address}: time-out")),
        };
    }
    Err(last)
}
