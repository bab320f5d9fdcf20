//! Redis Streams as a target: one entry of a stream for each delivery, with the event's id as a field.
//!
//! Invariants:
//!
//! - An event is delivered when `XADD` has returned the id of an entry.
//! - Redis does not deduplicate: a second attempt adds another entry with the same field `id`. Consumers deduplicate by it.
//! - Only one error of Redis is the fault of one event: the event is too large. All other refusals last until an operator
//!   repairs the server, so the events wait.
//! - If the server has become a replica, its connection is given up and the name is resolved again.

use std::fmt;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{
    AsyncConnectionConfig, Client, ClientTlsConfig, Cmd, ConnectionAddr, ConnectionInfo,
    IntoConnectionInfo as _, RedisError, TlsCertificates,
};
use tokio::time::{Instant, timeout_at};

use super::super::address::port_problem;
use super::Delivered;
use super::broker::{CONNECT_MAX, Login, Shared, Tls};
use crate::store::Claimed;
use crate::telemetry::causes;

/// The settings of a stream.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The server and the database.
    pub server: Server,
    /// The key of the stream.
    pub stream: String,
    /// About how many entries the stream keeps. `None`: all.
    pub length_max: Option<u32>,
    /// The log-in.
    pub login: Login,
    /// Certificates, for `rediss://`.
    pub tls: Tls,
}

/// The URL of a server.
#[derive(Clone)]
pub struct Server(ConnectionInfo);

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.0.addr(), self.0.redis_settings().db())
    }
}

impl Server {
    /// Reads a URL.
    ///
    /// # Errors
    /// What is wrong and what to do about it, without secrets.
    pub fn parse(url: &str) -> Result<Self, String> {
        let wrong = "is no URL of a Redis server; write \"redis://host:6379/0\" or, for TLS, \
                     \"rediss://host:6379/0\"";
        let known = url.starts_with("redis://") || url.starts_with("rediss://");
        if !known || url.contains(['?', '#']) {
            return Err(wrong.to_owned());
        }
        if let Some(wrong) = port_problem(url) {
            return Err(wrong);
        }
        let server = url.into_connection_info().map_err(|_| wrong.to_owned())?;
        let redis = server.redis_settings();
        if redis.username().is_some() || redis.password().is_some() {
            return Err("holds a log-in; name it by `user` and `secret_file`".to_owned());
        }
        Ok(Self(server))
    }

    /// Whether TLS is used.
    #[must_use]
    pub fn speaks_tls(&self) -> bool {
        matches!(self.0.addr(), ConnectionAddr::TcpTls { .. })
    }

    /// Its name or address.
    #[must_use]
    pub fn host(&self) -> &str {
        match self.0.addr() {
            ConnectionAddr::Tcp(host, _) | ConnectionAddr::TcpTls { host, .. } => host,
            ConnectionAddr::Unix(_) | _ => "",
        }
    }
}

/// The client of one stream.
pub(super) struct Transport {
    name: String,
    settings: Settings,
    timeout: Duration,
    shared: Shared<MultiplexedConnection>,
}

impl Transport {
    pub(super) fn new(sink: &super::Settings, settings: &Settings) -> Self {
        Self {
            name: sink.name.clone(),
            settings: settings.clone(),
            timeout: sink.timeout,
            shared: Shared::new(),
        }
    }

    /// Adds an event once and returns by the deadline.
    pub(super) async fn deliver(&self, event: &Claimed, deadline: Instant) -> Delivered {
        let line = match timeout_at(deadline, self.shared.line(|_| true, self.connect())).await {
            Ok(Ok(line)) => line,
            Ok(Err(why)) => return Delivered::failed(&why),
            Err(_) => return Delivered::failed(&self.late("connecting")),
        };
        let entry = self.entry(event);
        let mut connection = line.connection.clone();
        match timeout_at(deadline, entry.query_async::<String>(&mut connection)).await {
            Ok(Ok(_)) => Delivered::taken(),
            Ok(Err(error)) => {
                if spoils(&error) {
                    line.retire();
                }
                complaint(&error)
            }
            Err(_) => {
                line.retire();
                Delivered::failed(&self.late("waiting for the entry's id"))
            }
        }
    }

    fn late(&self, phase: &str) -> String {
        format!("time-out after {:?} while {phase}", self.timeout)
    }

    fn entry(&self, event: &Claimed) -> Cmd {
        let mut entry = redis::cmd("XADD");
        entry.arg(&self.settings.stream);
        if let Some(length) = self.settings.length_max {
            entry.arg("MAXLEN").arg("~").arg(length);
        }
        entry.arg("*");
        entry.arg("id").arg(event.event_id.to_string());
        entry.arg("type").arg(&event.kind).arg("tenant").arg(&event.tenant);
        entry.arg("operation").arg(&event.operation).arg("key").arg(&event.key);
        entry.arg("payload").arg(&*event.payload);
        entry
    }

    async fn connect(&self) -> Result<MultiplexedConnection, String> {
        let failed = |error: RedisError| format!("connecting: {}", causes(&error));
        let client = self.client().await?;
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.timeout.min(CONNECT_MAX)))
            // The delivery has a deadline.
            .set_response_timeout(None);
        let made = client.get_multiplexed_async_connection_with_config(&config);
        let connection = made.await.map_err(failed)?;
        tracing::info!(sink = self.name, "connected to the broker");
        Ok(connection)
    }

    async fn client(&self) -> Result<Client, String> {
        let Server(server) = self.settings.server.clone();
        let who = server.redis_settings().clone();
        let who = match &self.settings.login {
            Login::Nobody => who,
            Login::Secret(password) => who.set_password(password),
            Login::User { name, password } => who.set_username(name).set_password(password),
        };
        let server = server.set_redis_settings(who);
        let made = if self.settings.server.speaks_tls() {
            Client::build_with_tls(server, certificates(&self.settings.tls).await?)
        } else {
            Client::open(server)
        };
        made.map_err(|error| causes(&error))
    }
}

/// Reads the files again for each connection, so that renewed certificates are used.
async fn certificates(tls: &Tls) -> Result<TlsCertificates, String> {
    let read = async |path: &std::path::PathBuf| {
        let cannot = |error| format!("cannot read {}: {error}", path.display());
        tokio::fs::read(path).await.map_err(cannot)
    };
    let root_cert = match &tls.ca_file {
        Some(file) => Some(read(file).await?),
        None => None,
    };
    let client_tls = match &tls.client {
        Some((certificate, key)) => Some(ClientTlsConfig {
            client_cert: read(certificate).await?,
            client_key: read(key).await?,
        }),
        None => None,
    };
    Ok(TlsCertificates { client_tls, root_cert })
}

/// Whether a connection cannot be used after this error.
fn spoils(error: &RedisError) -> bool {
    let code = error.code().unwrap_or_default();
    // The server sends this and closes the connection.
    let hangs_up = error.detail().is_some_and(|detail| detail.starts_with("Protocol error"));
    code.is_empty() || hangs_up || matches!(code, "READONLY" | "MASTERDOWN" | "NOAUTH" | "LOADING")
}

fn complaint(error: &RedisError) -> Delivered {
    let Some(code) = error.code() else {
        return Delivered::failed(&format!("adding the entry: {}", causes(error)));
    };
    let detail = error.detail().unwrap_or_default();
    let what = format!("the server refused: {code} {detail}");
    let large =
        code == "ERR" && (detail.contains("exceeds maximum") || detail.contains("bulk length"));
    match code {
        "MOVED" | "ASK" => Delivered::failed(&format!("{what}: a Redis Cluster is not supported")),
        _ if large => Delivered::refused(&what),
        _ => Delivered::failed(&what),
    }
}
