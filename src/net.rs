//! What connections to upstreams, sinks and key sets share: dialling several addresses, TLS roots, and a pool of idle
//! connections.

mod pool;
pub mod tls;

use std::io;
use std::net::SocketAddr;

use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

pub use self::pool::Pool;

/// The User-Agent of the program's own requests.
pub const AGENT: &str = concat!("oncegate/", env!("CARGO_PKG_VERSION"));

/// Connects to one of these addresses. They are tried in order, each for a share of the time that is left. The connection
/// sends small messages at once.
///
/// # Errors
/// The error of the last address that refused. If the last address is silent, the future does not end: the caller has the
/// deadline.
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
