//! Where connections come from: the hosts of `store.url`, and the fail-over between them.
//!
//! Hosts are tried one after the other, each within its own time, beginning with the one that served last. What must stay
//! true: where a server turns out to be read-only, or another host serves than before, there was a fail-over: all connections
//! made so far are closed before their next use, so that nobody goes on reading from the old one.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bb8::ManageConnection;
use tokio_postgres::Config;
use tokio_postgres::config::{Host, LoadBalanceHosts};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::access::{Access, location};
use super::connection::{Connection, Shared};
use super::health::Health;
use super::refusal::NoHost;
use crate::store::Cause;
use crate::telemetry::causes;

/// How to connect. Clones are one connector.
#[derive(Clone)]
pub(super) struct Connector {
    hosts: Arc<[Config]>,
    random: bool,
    /// The host that served last.
    last: Arc<AtomicUsize>,
    shared: Shared,
}

impl Connector {
    /// To the hosts that `access` names: connecting to one of them, and one statement, may take so long.
    pub(super) fn new(
        access: &Access,
        tls: MakeRustlsConnect,
        connect_timeout: Duration,
        statement_timeout: Duration,
    ) -> Self {
        let mut config = access.config().clone();
        config.connect_timeout(connect_timeout);
        if config.get_tcp_user_timeout().is_none() {
            config.tcp_user_timeout(statement_timeout.saturating_mul(2));
        }
        let hosts = each_host(&config).into_iter().map(|host| access.with_its_password(host));
        Self {
            hosts: hosts.collect(),
            random: config.get_load_balance_hosts() == LoadBalanceHosts::Random,
            last: Arc::default(),
            shared: Shared {
                generation: Arc::default(),
                health: Arc::default(),
                tls,
                connect_timeout,
                statement_timeout,
            },
        }
    }

    /// The same, for statements that take longer.
    pub(super) fn with_statement_timeout(mut self, statement_timeout: Duration) -> Self {
        self.shared.statement_timeout = statement_timeout;
        self
    }

    /// What is known of the database's health. All clones see one.
    pub(super) fn health(&self) -> &Arc<Health> {
        &self.shared.health
    }

    /// How long connecting to one host may take.
    pub(super) fn connect_timeout(&self) -> Duration {
        self.shared.connect_timeout
    }

    /// A new connection, to the first host that gives one.
    ///
    /// # Errors
    /// Whatever kept it from being made, of each host.
    pub(super) async fn connect(&self) -> Result<Connection, Cause> {
        let connected = self.to_one_of_them().await;
        self.health().connected(connected.as_ref().err().map(|cause| causes(&**cause)));
        connected
    }

    async fn to_one_of_them(&self) -> Result<Connection, Cause> {
        let count = self.hosts.len();
        let first =
            if self.random { fastrand::usize(..) } else { self.last.load(Ordering::Relaxed) };
        let mut failures = Vec::new();
        for n in (0..count).map(|n| first.wrapping_add(n) % count) {
            let Some(host) = self.hosts.get(n) else { continue };
            match Connection::to(host, &self.shared).await {
                Ok(mut connection) => {
                    let moved = self.last.swap(n, Ordering::Relaxed) != n;
                    // Hosts that are taken at random all serve.
                    if moved && !self.random {
                        let before = self.shared.generation.fetch_add(1, Ordering::Relaxed);
                        connection.generation = before.wrapping_add(1);
                    }
                    return Ok(connection);
                }
                Err(cause) => failures.push((location(host), cause)),
            }
        }
        if let [_] = failures.as_slice()
            && let Some((_, cause)) = failures.pop()
        {
            return Err(cause);
        }
        Err(NoHost::new(&failures).into())
    }
}

/// One configuration for each host, so that a host that does not answer uses up its own time only.
fn each_host(config: &Config) -> Vec<Config> {
    let count = config.get_hosts().len().max(config.get_hostaddrs().len());
    // What does not fit together is refused by the driver, in its own words.
    if count < 2 || (config.get_ports().len() > 1 && config.get_ports().len() != count) {
        return vec![config.clone()];
    }
    let host = |n: usize| {
        let mut one = without_hosts(config);
        match config.get_hosts().get(n) {
            Some(Host::Tcp(name)) => {
                one.host(name);
            }
            #[cfg(unix)]
            Some(Host::Unix(path)) => {
                one.host_path(path);
            }
            None => {}
        }
        if let Some(address) = config.get_hostaddrs().get(n) {
            one.hostaddr(*address);
        }
        if let Some(port) = config.get_ports().get(n).or(config.get_ports().first()) {
            one.port(*port);
        }
        one
    };
    (0..count).map(host).collect()
}

/// All that a configuration says but for its hosts. The driver has no way to take a host away.
fn without_hosts(config: &Config) -> Config {
    let mut one = Config::new();
    if let Some(user) = config.get_user() {
        one.user(user);
    }
    if let Some(password) = config.get_password() {
        one.password(password);
    }
    if let Some(name) = config.get_dbname() {
        one.dbname(name);
    }
    if let Some(options) = config.get_options() {
        one.options(options);
    }
    if let Some(name) = config.get_application_name() {
        one.application_name(name);
    }
    if let Some(timeout) = config.get_connect_timeout() {
        one.connect_timeout(*timeout);
    }
    if let Some(timeout) = config.get_tcp_user_timeout() {
        one.tcp_user_timeout(*timeout);
    }
    if let Some(interval) = config.get_keepalives_interval() {
        one.keepalives_interval(interval);
    }
    if let Some(retries) = config.get_keepalives_retries() {
        one.keepalives_retries(retries);
    }
    one.keepalives(config.get_keepalives())
        .keepalives_idle(config.get_keepalives_idle())
        .ssl_mode(config.get_ssl_mode())
        .ssl_negotiation(config.get_ssl_negotiation())
        .target_session_attrs(config.get_target_session_attrs())
        .channel_binding(config.get_channel_binding())
        .load_balance_hosts(config.get_load_balance_hosts());
    one
}

impl ManageConnection for Connector {
    type Connection = Connection;
    type Error = Cause;

    fn connect(&self) -> impl Future<Output = Result<Connection, Cause>> + Send {
        Self::connect(self)
    }

    /// Only what is known here: a round trip for each use would cost more than the rare failure that it finds.
    async fn is_valid(&self, connection: &mut Connection) -> Result<(), Cause> {
        if connection.usable() { Ok(()) } else { Err("the connection is closed".into()) }
    }

    fn has_broken(&self, connection: &mut Connection) -> bool {
        !connection.usable()
    }
}
