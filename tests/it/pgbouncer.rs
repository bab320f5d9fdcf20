//! A transaction-pooling PgBouncer between the gateways and Postgres: each transaction may meet another server connection,
//! and there are fewer of these than the gateways hold.

use std::path::PathBuf;
use std::process::{Child, Stdio};

use futures_util::future::join_all;
use http::StatusCode;

use crate::crash::{Clients, api_and_sink, config, settle_and_judge, start};
use crate::support::fleet::{TWO_EVENTS, order, replicas, sending, sink};
use crate::support::orders::Orders;
use crate::support::postgres::{Cluster, command, own_folder};
use crate::support::process::{eventually, free_port};
use crate::support::rig::Place;
use crate::support::sink::{OK, Sink};

pub(crate) struct Bouncer {
    child: Child,
    home: PathBuf,
    port: u16,
}

impl Drop for Bouncer {
    fn drop(&mut self) {
        let ended = self.child.kill().and_then(|()| self.child.wait());
        if std::thread::panicking() {
            let log = std::fs::read_to_string(self.home.join("log"));
            eprintln!("--- pgbouncer, {ended:?}:\n{log:?}");
        }
        drop(std::fs::remove_dir_all(&self.home));
    }
}

/// The minor version of the PgBouncer that is installed: all there are have the major version 1.
fn minor_version() -> u32 {
    let version = command("pgbouncer").arg("--version").output().expect("pgbouncer runs");
    let version = String::from_utf8_lossy(&version.stdout).into_owned();
    let number = version.split(' ').nth(1).and_then(|text| text.split('.').nth(1));
    number.and_then(|text| text.trim().parse().ok()).expect("a version")
}

impl Bouncer {
    /// Before the shared cluster, with two server connections for each database.
    fn start() -> Self {
        Self::before(Cluster::shared().port(), "")
    }

    /// Before the server on this port, with lines of its own.
    pub(crate) fn before(server: u16, more: &str) -> Self {
        let (home, port) = (own_folder("bouncer"), free_port());
        // Where the setting is known, prepared statements are refused by it; older ones never let them through.
        let prepared = if minor_version() >= 21 { "max_prepared_statements = 0" } else { "" };
        let ini = format!(
            "[databases]\n* = host=127.0.0.1 port={server}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
             listen_port = {port}\nunix_socket_dir =\nauth_type = trust\nauth_file = {}\n\
             pool_mode = transaction\ndefault_pool_size = 2\nmax_client_conn = 200\n{prepared}\n{more}\n",
            home.join("users").display(),
        );
        std::fs::write(home.join("users"), "\"postgres\" \"\"\n").unwrap();
        std::fs::write(home.join("ini"), ini).unwrap();
        let log = std::fs::File::create(home.join("log")).unwrap();
        let child = command("pgbouncer")
            .arg(home.join("ini"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        Self { child, home, port }
    }

    /// The URL of a server's database, seen through it.
    pub(crate) fn url_of(&self, direct: &str, server: u16) -> String {
        direct.replace(&format!(":{server}/"), &format!(":{}/", self.port))
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// A fresh database, seen through it.
    async fn place(&self) -> Place {
        let direct = tokio::task::block_in_place(|| Cluster::shared().database());
        let url = self.url_of(&direct, Cluster::shared().port());
        eventually("it serves", async || {
            tokio_postgres::connect(&url, tokio_postgres::NoTls).await.is_ok()
        })
        .await;
        Place::at(url)
    }
}

/// What `docs/operations.md` says of versions.
#[test]
fn the_setting_for_prepared_statements_is_known_from_1_21_on() {
    let home = own_folder("bouncer");
    let ini = home.join("ini");
    // Without a listener it ends by itself, after it has read its settings.
    let listens = "listen_addr =\nunix_socket_dir =";
    std::fs::write(&ini, format!("[pgbouncer]\n{listens}\nmax_prepared_statements = 0\n")).unwrap();
    let output = command("pgbouncer").arg(&ini).stdin(Stdio::null()).output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    let unknown = told.contains("unknown parameter") && told.contains("max_prepared_statements");
    assert!(!output.status.success());
    assert_eq!(unknown, minor_version() < 21, "{told}");
    std::fs::remove_dir_all(&home).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn first_requests_duplicates_and_events_pass_a_transaction_pooler() {
    let bouncer = Bouncer::start();
    let (orders, place) = (Orders::start().await, bouncer.place().await);
    let hook = Sink::start(|_, _| OK).await;
    let more = format!("{TWO_EVENTS}{}", sink(hook.port));
    let gateways = replicas(2, &place, &orders.url(), "", &more);
    let first = order("k").to(gateways[0].addr).await;
    assert_eq!(first.status, StatusCode::CREATED, "{first:?}");
    for gateway in &gateways {
        let replay = order("k").to(gateway.addr).await;
        assert!(replay.replayed());
        assert_eq!(replay.body, first.body);
    }
    let mismatch = order("k").set("content-type", "text/plain").to(gateways[1].addr).await;
    assert_eq!(mismatch.problem(), "request-mismatch");
    let many = (0..40).map(|n| sending(order(&format!("k-{}", n % 10)), gateways[n % 2].addr));
    for answer in join_all(many.collect::<Vec<_>>()).await {
        assert_eq!(answer.unwrap().status, StatusCode::CREATED);
    }
    assert_eq!((orders.runs(), place.records().await), (11, 11));
    let sent = "select count(*) from outbox_events where status = 'sent'";
    eventually("the events are delivered", async || place.count(sent).await == 22).await;
    assert_eq!(hook.ids().len(), 22);
}

#[tokio::test(flavor = "multi_thread")]
async fn gateways_that_are_killed_behind_a_transaction_pooler_keep_their_promises() {
    let bouncer = Bouncer::start();
    let (place, (orders, hook)) = (bouncer.place().await, api_and_sink().await);
    let mut gateways: Vec<_> = (0..2).map(|_| start(&config(&place, &orders, &hook))).collect();
    let clients = Clients::start(&[gateways[0].addr, gateways[1].addr]);
    for round in 1..=4 {
        eventually("there is work to disturb", async || orders.runs() > 30 * round).await;
        let gateway = &mut gateways[round % 2];
        gateway.kill9();
        *gateway = start(&gateway.config);
    }
    let learned = clients.end().await;
    settle_and_judge(&orders, &place, &hook, &gateways[0], &learned).await;
}
