//! `health`: asks the admin listener of the process on this machine how it is, for a container's health check.
//!
//! Of the configuration only the address of the admin listener counts, so a mistake elsewhere in a file that was edited under a
//! running process does not make the process look ill. The exit status is 0 or 1, as container engines want it.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use bytes::Bytes;
use clap::Args;
use http::{Request, StatusCode};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use super::{fail, say};
use crate::config;
use crate::telemetry::causes;

/// A longer answer is not of ours.
const ANSWER_MAX: usize = 64 << 10;

#[derive(Debug, Args)]
pub(super) struct HealthArgs {
    /// The configuration file (TOML): the one of `serve`, for the address of its admin listener
    #[arg(long, short, value_name = "FILE", env = "ONCEGATE_CONFIG")]
    config: Option<PathBuf>,
    /// Ask whether it may be sent requests (/readyz), not only whether it runs (/healthz)
    #[arg(long)]
    ready: bool,
    /// How long to wait for the answer
    #[arg(long, value_name = "DURATION", default_value = "3s", value_parser = humantime::parse_duration)]
    timeout: Duration,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
enum NoAnswer {
    #[error("cannot connect")]
    Connect(#[source] std::io::Error),
    #[error("the request could not be sent, or its answer not be read")]
    Http(#[from] hyper::Error),
    #[error("the request cannot be made")]
    Request(#[from] http::Error),
    #[error("its answer cannot be read")]
    Body(#[source] Box<dyn std::error::Error + Send + Sync>),
}

pub(super) async fn health(args: &HealthArgs) -> ExitCode {
    match judged(args).await {
        Ok(well) => {
            say(&well);
            ExitCode::SUCCESS
        }
        Err(why) => fail(1, &why),
    }
}

/// What the process says where it is well; else what is wrong.
async fn judged(args: &HealthArgs) -> Result<String, String> {
    let file = args.config.as_deref().filter(|path| !path.as_os_str().is_empty());
    let listen =
        config::admin_address(file, std::env::vars()).map_err(|wrong| wrong.to_string())?;
    let address = reachable(&listen)?;
    let path = if args.ready { "/readyz" } else { "/healthz" };
    let url = format!("http://{address}{path}");
    let asked = tokio::time::timeout(args.timeout, ask(&address, path)).await;
    let limit = humantime::format_duration(args.timeout);
    let answer = asked.map_err(|_| format!("{url}: no answer within {limit}"))?;
    let (status, body) = answer.map_err(|why| format!("{url}: {}", causes(&why)))?;
    if status == StatusCode::OK { Ok(body) } else { Err(format!("{url}: {status}: {body}")) }
}

/// The address to connect to for one that is listened on.
fn reachable(listen: &str) -> Result<String, String> {
    if listen.rsplit_once(':').is_some_and(|(_, port)| port.parse() == Ok(0_u16)) {
        let wrong = "the system chooses the port, so nobody knows it here; name one";
        return Err(format!("admin.listen: {listen}: {wrong}"));
    }
    Ok(match listen.parse::<SocketAddr>() {
        Ok(SocketAddr::V4(address)) if address.ip().is_unspecified() => {
            SocketAddr::from((Ipv4Addr::LOCALHOST, address.port())).to_string()
        }
        Ok(SocketAddr::V6(address)) if address.ip().is_unspecified() => {
            SocketAddr::from((Ipv6Addr::LOCALHOST, address.port())).to_string()
        }
        Ok(_) | Err(_) => listen.to_owned(),
    })
}

async fn ask(address: &str, path: &str) -> Result<(StatusCode, String), NoAnswer> {
    let stream = TcpStream::connect(address).await.map_err(NoAnswer::Connect)?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let request = Request::get(path)
        .header("host", address)
        .header("connection", "close")
        .body(Empty::<Bytes>::new())?;
    let answer = async {
        let (head, body) = sender.send_request(request).await?.into_parts();
        let body = Limited::new(body, ANSWER_MAX).collect().await.map_err(NoAnswer::Body)?;
        Ok((head.status, String::from_utf8_lossy(&body.to_bytes()).trim().to_owned()))
    };
    tokio::pin!(connection, answer);
    tokio::select! {
        answer = &mut answer => answer,
        _ = &mut connection => answer.await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_listened_on_everywhere_is_asked_on_this_machine() {
        for (listen, asked) in [
            ("0.0.0.0:9090", "127.0.0.1:9090"),
            ("[::]:9090", "[::1]:9090"),
            ("10.0.0.7:9090", "10.0.0.7:9090"),
            ("localhost:9090", "localhost:9090"),
        ] {
            assert_eq!(reachable(listen).as_deref(), Ok(asked));
        }
        let told = reachable("127.0.0.1:0").unwrap_err();
        assert!(told.starts_with("admin.listen: 127.0.0.1:0: "), "{told}");
    }
}
