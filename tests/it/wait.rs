//! A database that is away when the process starts: it listens, passes through, forwards nothing under a key, is not ready,
//! and finishes its start when the database comes. What no time mends ends the start, whenever it is found.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use http::{Method, StatusCode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::pgbouncer::Bouncer;
use crate::support::client::{Answer, get, post};
use crate::support::fault::Fault;
use crate::support::fleet::{self, TWO_EVENTS, metric, order, sending};
use crate::support::orders::Orders;
use crate::support::postgres::Cluster;
use crate::support::process::{self, Gateway, eventually, free_port};
use crate::support::rig::{self, Place, Which};
use crate::support::secure::Certificate;
use crate::support::sink::{OK, Sink};

/// How the lines begin that tell of a start that goes on, or is over.
const NOT_YET: &str = "the store cannot be opened yet";
const OPEN_NOW: &str = "the store is open now";

fn at(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

/// What is said of a server that cuts each connection: "error connecting to server", or "error communicating with the
/// server".
const CUT: &str = " server";

/// A configuration with addresses that are known before it listens.
struct Setup {
    addr: SocketAddr,
    admin: SocketAddr,
    config: PathBuf,
}

impl Setup {
    /// Before an API at `upstream`, with lines for `[store]` and more sections.
    fn new(place: &Place, upstream: &str, store: &str, more: &str) -> Self {
        let (addr, admin) = (at(free_port()), at(free_port()));
        let store = format!("lease = \"3s\"\nsweep_every = \"500ms\"\n{store}");
        let toml = rig::config_at(place, upstream, &addr.to_string(), &store, "", more);
        let admins = format!("[admin]\nlisten = \"{admin}\"");
        let toml = toml.replace("[admin]\nlisten = \"127.0.0.1:0\"", &admins);
        Self { addr, admin, config: process::config(place.folder.path(), &toml) }
    }

    fn serve(&self) -> Gateway {
        Gateway::unready(process::serve(&self.config), &self.config, self.addr, self.admin)
    }

    fn relay(&self) -> Gateway {
        Gateway::unready(process::relay(&self.config), &self.config, self.admin, self.admin)
    }
}

async fn listens(gateway: &Gateway) {
    let listens = async || TcpStream::connect(gateway.admin).await.is_ok();
    eventually("it listens", listens).await;
}

async fn readyz(gateway: &Gateway) -> Answer {
    get("/readyz").to(gateway.admin).await
}

async fn is_ready(gateway: &Gateway) -> bool {
    readyz(gateway).await.status == StatusCode::OK
}

fn says_ready(gateway: &Gateway) -> usize {
    gateway.log().matches("ready {").count()
}

/// It is not ready, says why in these words, and does what it can without its database.
async fn works_without(gateway: &Gateway, orders: &Orders, why: &str) {
    listens(gateway).await;
    for ignored in ["HUP", "USR1", "USR2"] {
        gateway.signal(ignored);
    }
    let because = async || {
        let told = readyz(gateway).await;
        assert_eq!(told.status, StatusCode::SERVICE_UNAVAILABLE, "{told:?}");
        told.json()["cause"].as_str().is_some_and(|cause| cause.contains(why))
    };
    eventually(&format!("it says {why}"), because).await;
    let told = readyz(gateway).await.json();
    assert_eq!((&told["gateway"], &told["store"]), (&"starting".into(), &"unavailable".into()));
    assert!(told["cause"].as_str().unwrap().contains("since the start, "), "{told}");

    let runs = orders.runs();
    let passed = post("/elsewhere", "{}").method(Method::PUT).key("unnamed").to(gateway.addr).await;
    assert_eq!(passed.status, StatusCode::CREATED, "what no route names passes through");
    assert_eq!(orders.runs(), runs + 1);
    let begun = Instant::now();
    let refused = order("k").to(gateway.addr).await;
    assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE, "{refused:?}");
    assert_eq!(refused.problem(), "store-unavailable");
    assert!(refused.header("retry-after").is_some());
    assert!(begun.elapsed() < Duration::from_secs(3), "it is told at once");
    assert_eq!(orders.runs_of("k"), 0, "nothing is forwarded");
    for page in ["/healthz", "/metrics"] {
        assert_eq!(get(page).to(gateway.admin).await.status, StatusCode::OK);
    }
    let listed = get("/api/v1/records").to(gateway.admin).await;
    assert_eq!(listed.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(says_ready(gateway), 0, "{}", gateway.log());
}

/// The start is finished, within seconds, and the log has told of the wait in few lines.
async fn works_with(gateway: &Gateway, orders: &Orders) {
    eventually("it is ready", async || is_ready(gateway).await).await;
    let first = order("k").to(gateway.addr).await;
    assert_eq!(first.status, StatusCode::CREATED, "{first:?}");
    assert!(order("k").to(gateway.addr).await.replayed());
    assert_eq!(orders.runs_of("k"), 1);
    eventually("it says so", async || says_ready(gateway) == 1).await;
    let log = gateway.log();
    assert_eq!(log.matches(OPEN_NOW).count(), 1, "{log}");
    assert!((1..=3).contains(&log.matches(NOT_YET).count()), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_comes_later_is_waited_for() {
    let cluster = tokio::task::block_in_place(Cluster::own);
    // Fresh: the schema is made when it comes.
    let place = Place::at(tokio::task::block_in_place(|| cluster.database()));
    let (orders, sink) = (Orders::start().await, Sink::start(|_, _| OK).await);
    cluster.stop();
    let more = format!("{TWO_EVENTS}{}", fleet::sink(sink.port));
    let gateway = Setup::new(&place, &orders.url(), "", &more).serve();
    works_without(&gateway, &orders, "refused").await;

    tokio::task::block_in_place(|| cluster.start());
    works_with(&gateway, &orders).await;
    eventually("the relay has begun", async || sink.ids().len() == 2).await;
    // What is in progress under a dead lease is marked by the sweeper, which has begun, too.
    place
        .rows(
            "with dead as (
               insert into oncegate_owners (owner, lease_until, started_at)
               select gen_random_uuid(), clock_timestamp(), clock_timestamp() returning owner)
             insert into idempotency_records (id, tenant_id, operation, key, request_hash, raw_hash, recipe, status,
               attempt, owner, created_at)
             select gen_random_uuid(), tenant_id, operation, 'dead', request_hash, raw_hash, recipe, 'in_progress', 1,
               dead.owner, created_at from idempotency_records, dead",
        )
        .await;
    let marked = async || place.status_of("dead").await.as_deref() == Some("unknown");
    eventually("the sweeper has begun", marked).await;
}

/// The ways in which a database is away, each behind a wire that is mended then.
#[tokio::test(flavor = "multi_thread")]
async fn refused_reset_hanging_and_silent_connections_are_waited_out() {
    let (orders, place) = (Orders::start().await, Place::new(Which::Postgres).await);
    let port = Cluster::shared().port();
    type Break = (&'static str, fn(&Fault));
    let ways: [Break; 3] = [
        (CUT, Fault::refuse),
        ("connecting took too long", Fault::hang),
        ("connecting took too long", Fault::stall),
    ];
    for (n, (why, harm)) in ways.into_iter().enumerate() {
        let (fault, url) = Fault::before_postgres(&place.url, port).await;
        harm(&fault);
        let there = Place::at(url);
        let gateway = Setup::new(&there, &orders.url(), "connect_timeout = \"1s\"", "").serve();
        listens(&gateway).await;
        let because = async || readyz(&gateway).await.json()["cause"].to_string().contains(why);
        eventually(&format!("{n}: it says {why}"), because).await;
        assert_eq!(order(&format!("k-{n}")).to(gateway.addr).await.problem(), "store-unavailable");
        fault.pass();
        fault.cut();
        eventually(&format!("{n}: it is ready"), async || is_ready(&gateway).await).await;
        assert_eq!(order(&format!("k-{n}")).to(gateway.addr).await.status, StatusCode::CREATED);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_only_reads_is_waited_for() {
    let cluster = tokio::task::block_in_place(Cluster::own);
    for attributes in ["", "?target_session_attrs=read-write"] {
        let database = tokio::task::block_in_place(|| cluster.database());
        let (orders, place) = (Orders::start().await, Place::at(format!("{database}{attributes}")));
        tokio::task::block_in_place(|| cluster.set("default_transaction_read_only = on"));
        let gateway = Setup::new(&place, &orders.url(), "", "").serve();
        let why = if attributes.is_empty() { "read-only" } else { "does not allow writes" };
        works_without(&gateway, &orders, why).await;
        tokio::task::block_in_place(|| cluster.set("default_transaction_read_only = off"));
        works_with(&gateway, &orders).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_does_not_resolve_is_waited_for() {
    let (orders, place) =
        (Orders::start().await, Place::at("postgres://u@database.invalid/d".to_owned()));
    let gateway = Setup::new(&place, &orders.url(), "", "").serve();
    works_without(&gateway, &orders, "database.invalid").await;
    gateway.terminate();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_pooler_says_while_its_server_is_away_is_waited_out() {
    let cluster = tokio::task::block_in_place(Cluster::own);
    let database = tokio::task::block_in_place(|| cluster.database());
    let bouncer = Bouncer::before(cluster.port(), "query_wait_timeout = 2\nserver_login_retry = 1");
    let place = Place::at(bouncer.url_of(&database, cluster.port()));
    let orders = Orders::start().await;
    cluster.stop();
    let listening = async || TcpStream::connect(at(bouncer.port())).await.is_ok();
    eventually("the pooler listens", listening).await;
    let gateway = Setup::new(&place, &orders.url(), "", "").serve();
    works_without(&gateway, &orders, "postgres://").await;
    tokio::task::block_in_place(|| cluster.start());
    works_with(&gateway, &orders).await;
}

/// A server that answers every client with the same, whatever it asks.
struct Grumpy {
    port: u16,
    says: Arc<Mutex<Says>>,
}

#[derive(Clone, Copy)]
enum Says {
    /// Its error, by code.
    Error(&'static str, &'static str),
    /// That it wants proof of this kind.
    Prove(u32),
    /// TLS, with a certificate for which nobody vouches.
    Secured,
}

impl Grumpy {
    async fn start(says: Says) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let says = Arc::new(Mutex::new(says));
        let now = Arc::clone(&says);
        let certificate = Certificate::of("localhost");
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let (says, acceptor) = (*now.lock().unwrap(), certificate.acceptor.clone());
                tokio::spawn(async move {
                    let mut head = [0; 8];
                    let Ok(_) = client.read_exact(&mut head).await else { return };
                    let asks_for_tls = head == [0, 0, 0, 8, 4, 210, 22, 47];
                    match says {
                        Says::Secured => {
                            drop(client.write_all(b"S").await);
                            drop(acceptor.accept(client).await);
                            return;
                        }
                        Says::Error(..) | Says::Prove(_) if asks_for_tls => {
                            drop(client.write_all(b"N").await);
                            let Ok(_) = client.read_exact(&mut head).await else { return };
                        }
                        Says::Error(..) | Says::Prove(_) => {}
                    }
                    let answer = match says {
                        Says::Error(code, why) => {
                            let fields = format!("SFATAL\0VFATAL\0C{code}\0M{why}\0\0");
                            message(b'E', fields.as_bytes())
                        }
                        Says::Prove(kind) => message(b'R', &kind.to_be_bytes()),
                        Says::Secured => return,
                    };
                    drop(client.write_all(&answer).await);
                    // What it still sends is read, lest the answer is lost in a reset.
                    drop(tokio::io::copy(&mut client, &mut tokio::io::sink()).await);
                });
            }
        });
        Self { port, says }
    }

    fn says(&self, says: Says) {
        *self.says.lock().unwrap() = says;
    }

    fn place(&self, parameters: &str) -> Place {
        Place::at(format!("postgres://u@localhost:{}/d{parameters}", self.port))
    }
}

fn message(kind: u8, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len() + 4).unwrap();
    [&[kind], &length.to_be_bytes()[..], body].concat()
}

/// Waits for the end of a start; its output.
fn ended(mut gateway: Gateway, status: i32) -> String {
    let ended = tokio::task::block_in_place(|| gateway.exited());
    // Its last words are read beside the test.
    let begun = Instant::now();
    while !gateway.log().contains("oncegate: ") && begun.elapsed() < Duration::from_secs(2) {
        std::thread::yield_now();
    }
    assert_eq!(ended.code(), Some(status), "{}", gateway.log());
    assert_eq!(says_ready(&gateway), 0, "{}", gateway.log());
    gateway.log()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_server_says_of_itself_is_waited_out() {
    let orders = Orders::start().await;
    for says in [
        ("57P03", "the database system is starting up"),
        ("53300", "sorry, too many clients already"),
        ("08P01", "server login failed: FATAL the database system is starting up"),
        ("57P01", "terminating connection due to administrator command"),
    ] {
        let server = Grumpy::start(Says::Error(says.0, says.1)).await;
        let place = server.place("");
        let gateway = Setup::new(&place, &orders.url(), "", "").serve();
        works_without(&gateway, &orders, says.1).await;
        gateway.terminate();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_no_time_mends_ends_a_start_at_once_and_also_when_it_is_found_later() {
    let orders = Orders::start().await;
    let lasting: [(Says, &str, &str); 7] = [
        (
            Says::Error("28P01", "password authentication failed"),
            "",
            "password authentication failed",
        ),
        (Says::Error("28000", "no pg_hba.conf entry"), "", "no pg_hba.conf entry"),
        (Says::Error("3D000", "database \"d\" does not exist"), "", "does not exist"),
        (Says::Prove(3), "", "password missing"),
        (Says::Prove(7), "", "unsupported authentication method"),
        (Says::Prove(0), "?sslmode=require", "server does not support TLS"),
        (Says::Secured, "?sslmode=require", "invalid peer certificate"),
    ];
    for (says, parameters, told) in lasting {
        let server = Grumpy::start(says).await;
        let place = server.place(parameters);
        let setup = Setup::new(&place, &orders.url(), "", "");
        let log = ended(setup.serve(), 1);
        assert!(log.contains("oncegate: cannot open the store at postgres://localhost"), "{log}");
        assert!(log.contains(told) && !log.contains(NOT_YET), "{told}: {log}");
        let relay = Setup::new(&place, &orders.url(), "", &fleet::sink(9)).relay();
        assert!(ended(relay, 1).contains(told), "{told}");
    }
    let server = Grumpy::start(Says::Error("57P03", "starting up")).await;
    let place = server.place("");
    let gateway = Setup::new(&place, &orders.url(), "", "").serve();
    works_without(&gateway, &orders, "starting up").await;
    server.says(Says::Error("28P01", "password authentication failed"));
    assert!(ended(gateway, 1).contains("oncegate: cannot open the store at postgres://localhost"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schema_that_is_newer_and_rights_that_are_missing_end_a_start_once_the_database_is_there()
{
    let orders = Orders::start().await;
    let cluster = Cluster::shared();
    let newer = Place::new(Which::Postgres).await;
    let migrate = Setup::new(&newer, &orders.url(), "", "").config;
    assert_eq!(process::run(&["migrate", "--config", migrate.to_str().unwrap()]).0, 0);
    newer.rows("insert into oncegate_migrations values (9999, 'of the future')").await;
    let weak = Place::new(Which::Postgres).await;
    weak.rows("revoke create on schema public from public").await;
    let role = format!("weak{}", std::process::id());
    weak.rows(&format!("create role {role} login")).await;
    let own = weak.url.replace("postgres@", &format!("{role}@"));
    let unknown = newer.url.replace("postgres@", "nobody@");
    let absent = cluster.url("there_is_none");
    let cases = [
        (&newer.url, "use a newer oncegate"),
        (&own, "permission denied for schema public"),
        (&unknown, "role \"nobody\" does not exist"),
        (&absent, "database \"there_is_none\" does not exist"),
    ];
    for (url, told) in cases {
        let (fault, through) = Fault::before_postgres(url, cluster.port()).await;
        fault.refuse();
        let place = Place::at(through);
        let setup = Setup::new(&place, &orders.url(), "", "");
        let gateway = setup.serve();
        works_without(&gateway, &orders, CUT).await;
        fault.pass();
        let log = ended(gateway, 1);
        assert!(log.contains("oncegate: ") && log.contains(told), "{told}: {log}");
        // The same at once.
        let log = ended(setup.serve(), 1);
        assert!(log.contains(told) && !log.contains(NOT_YET), "{told}: {log}");
    }
    weak.rows(&format!("drop role {role}")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_spill_that_cannot_be_kept_ends_a_start_that_would_wait() {
    let orders = Orders::start().await;
    let place = Place::at(format!("postgres://u@127.0.0.1:{}/d", free_port()));
    std::fs::write(place.folder.path().join("file"), "").unwrap();
    let log =
        ended(Setup::new(&place, &orders.url(), "spill = { dir = \"file/spill\" }", "").serve(), 1);
    assert!(log.contains("name another folder in store.spill.dir"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_waits_no_longer_than_it_may() {
    let orders = Orders::start().await;
    let place = Place::at(format!("postgres://u@127.0.0.1:{}/d", free_port()));
    for (limit, seconds) in [("0s", 0), ("2s", 2)] {
        let store = format!("wait_at_start = \"{limit}\"");
        let setup = Setup::new(&place, &orders.url(), &store, &fleet::sink(9));
        for start in [Setup::serve, Setup::relay] {
            let begun = Instant::now();
            let log = ended(start(&setup), 1);
            assert!(begun.elapsed() >= Duration::from_secs(seconds), "{log}");
            let told = format!(
                "could not be opened within store.wait_at_start ({limit}): cannot open the store at "
            );
            assert!(log.contains(&told) && log.contains("refused"), "{log}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_ends_the_wait_cleanly() {
    let orders = Orders::start().await;
    let place = Place::at(format!("postgres://u@127.0.0.1:{}/d", free_port()));
    let setup = Setup::new(&place, &orders.url(), "", &fleet::sink(9));
    for start in [Setup::serve, Setup::relay] {
        let mut gateway = start(&setup);
        listens(&gateway).await;
        assert!(!is_ready(&gateway).await);
        let begun = Instant::now();
        gateway.terminate();
        let ended = tokio::task::block_in_place(|| gateway.exited());
        assert_eq!(ended.code(), Some(0), "{}", gateway.log());
        assert!(begun.elapsed() < Duration::from_secs(5), "{}", gateway.log());
        assert_eq!(says_ready(&gateway), 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_waits_too_and_delivers_when_the_database_comes() {
    let cluster = tokio::task::block_in_place(Cluster::own);
    let place = Place::at(tokio::task::block_in_place(|| cluster.database()));
    let (orders, sink) = (Orders::start().await, Sink::start(|_, _| OK).await);
    let more = format!("{TWO_EVENTS}{}[outbox]\nrelay = false\n", fleet::sink(sink.port));
    let gateway = Setup::new(&place, &orders.url(), "", &more).serve();
    eventually("it is ready", async || {
        listens(&gateway).await;
        is_ready(&gateway).await
    })
    .await;
    assert_eq!(order("k").to(gateway.addr).await.status, StatusCode::CREATED);
    cluster.stop();
    let relay = Setup::new(&place, &orders.url(), "", &more).relay();
    listens(&relay).await;
    let told = readyz(&relay).await;
    assert_eq!(told.status, StatusCode::SERVICE_UNAVAILABLE);
    let why = async || readyz(&relay).await.json()["cause"].to_string().contains("refused");
    eventually("it says why", why).await;
    assert_eq!(get("/metrics").to(relay.admin).await.status, StatusCode::OK);
    tokio::task::block_in_place(|| cluster.start());
    eventually("it is ready", async || is_ready(&relay).await).await;
    eventually("it delivers", async || sink.ids().len() == 2).await;
    eventually("it says so", async || says_ready(&relay) == 1).await;
    relay.terminate();
}

#[tokio::test(flavor = "multi_thread")]
async fn with_bypass_requests_go_past_a_database_that_is_away_and_not_past_one_that_is_there() {
    let cluster = tokio::task::block_in_place(Cluster::own);
    let place = Place::at(tokio::task::block_in_place(|| cluster.database()));
    let orders = Orders::start().await;
    cluster.stop();
    let setup = Setup::new(&place, &orders.url(), "on_unavailable = \"bypass\"", "");
    let gateway = setup.serve();
    listens(&gateway).await;
    for runs in 1..=2 {
        let answer = order("k").to(gateway.addr).await;
        assert_eq!(answer.status, StatusCode::CREATED, "{answer:?}");
        assert_eq!(answer.header("oncegate-bypassed"), Some("true"));
        assert_eq!(orders.runs_of("k"), runs);
    }
    let text = get("/metrics").to(gateway.admin).await.body;
    let counted = String::from_utf8_lossy(&text).into_owned();
    assert!(counted.lines().any(|line| line.ends_with("reply=\"bypassed\"} 2")), "{counted}");
    tokio::task::block_in_place(|| cluster.start());
    eventually("it is ready", async || is_ready(&gateway).await).await;
    let kept = order("k").to(gateway.addr).await;
    assert_eq!((kept.status, kept.header("oncegate-bypassed")), (StatusCode::CREATED, None));
    drop(gateway);
    // A start that takes long because of what it has to do, on a database that is there, lets nothing past.
    let held = place.folder.path().join("held");
    let fault = format!("before-heartbeat=pause:{}", held.display());
    let mut starting = process::serve(&setup.config);
    starting.env("ONCEGATE_FAULT", fault);
    let gateway = Gateway::unready(starting, &setup.config, setup.addr, setup.admin);
    let reached = held.with_extension("reached");
    eventually("it is held", async || reached.exists()).await;
    let waited = tokio::time::timeout(Duration::from_secs(2), async {
        while TcpStream::connect(setup.addr).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    assert!(waited.await.is_err(), "it listens before its store is open");
    std::fs::write(&held, "").unwrap();
    listens(&gateway).await;
    assert!(order("k").to(gateway.addr).await.replayed());
}

/// What a process left in its spill that died without its database.
struct Left {
    orders: Orders,
    place: Place,
    fault: Fault,
    setup: Setup,
    /// What its callers got under [`KEYS`].
    firsts: Vec<Answer>,
    /// A file that lets a start go on which is held.
    held: PathBuf,
    _folder: Place,
}

const KEYS: [&str; 3] = ["a", "b", "c"];

impl Left {
    async fn behind() -> Self {
        let (orders, place) = (Orders::start().await, Place::new(Which::Postgres).await);
        let (fault, url) = Fault::before_postgres(&place.url, Cluster::shared().port()).await;
        let through = Place::at(url);
        let setup = Setup::new(&through, &orders.url(), "", TWO_EVENTS);
        let mut gateway = setup.serve();
        listens(&gateway).await;
        eventually("it is ready", async || is_ready(&gateway).await).await;
        orders.hold();
        let asking: Vec<_> = KEYS.iter().map(|key| sending(order(key), gateway.addr)).collect();
        orders.asked(KEYS.len()).await;
        fault.refuse();
        fault.cut();
        orders.go();
        let mut firsts = Vec::new();
        for one in asking {
            firsts.push(one.await.unwrap());
        }
        assert!(firsts.iter().all(|answer| answer.status == StatusCode::CREATED), "{firsts:?}");
        gateway.kill9();
        let leases = "select count(*) from oncegate_owners where lease_until > clock_timestamp()";
        eventually("its lease is over", async || place.count(leases).await == 0).await;
        let held = place.folder.path().join("held");
        Self { orders, place, fault, setup, firsts, held, _folder: through }
    }

    /// Starts the next process, without a database; then with one, until it is held at this point.
    async fn started_and_held_at(&self, point: &str) -> Gateway {
        let Setup { addr, admin, config } = &self.setup;
        let mut starting = process::serve(config);
        starting.env("ONCEGATE_FAULT", format!("{point}=pause:{}", self.held.display()));
        let gateway = Gateway::unready(starting, config, *addr, *admin);
        works_without(&gateway, &self.orders, CUT).await;
        assert_eq!(order("a").to(*addr).await.problem(), "store-unavailable");
        self.fault.pass();
        let reached = self.held.with_extension("reached");
        eventually("it is held", async || reached.exists()).await;
        gateway
    }

    async fn statuses(&self) -> Vec<Option<String>> {
        let mut statuses = Vec::new();
        for key in KEYS {
            statuses.push(self.place.status_of(key).await);
        }
        statuses
    }

    fn goes_on(&self) {
        std::fs::write(&self.held, "").unwrap();
    }

    /// Every outcome is in the database, and nothing was executed twice or ever taken for lost.
    async fn all_is_there(&self, gateway: &Gateway) {
        eventually("it is ready", async || is_ready(gateway).await).await;
        for (key, first) in KEYS.iter().zip(&self.firsts) {
            let replay = order(key).to(gateway.addr).await;
            assert!(replay.replayed() && replay.body == first.body, "{replay:?}");
        }
        assert_eq!(KEYS.map(|key| self.orders.runs_of(key)), [1; 3]);
        let marked = "select count(*) from oncegate_unknown";
        assert_eq!((self.place.count(marked).await, self.place.events().await), (0, 6));
        assert_eq!(metric(gateway.admin, "oncegate_spill_left_files").await, 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_dead_process_left_in_the_spill_is_drained_before_anything_is_marked_or_served() {
    let left = Left::behind().await;
    let gateway = left.started_and_held_at("before-heartbeat").await;
    assert_eq!(left.statuses().await, vec![Some("completed".to_owned()); 3]);
    assert!(!is_ready(&gateway).await, "before its lease it serves nothing");
    assert_eq!(order("a").to(gateway.addr).await.problem(), "store-unavailable");
    left.goes_on();
    left.all_is_there(&gateway).await;
}

/// The next try finds the spill as it was, and not locked by the last one.
#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_loses_its_database_while_it_drains_drains_it_at_the_next_try() {
    let left = Left::behind().await;
    let gateway = left.started_and_held_at("before-complete").await;
    left.fault.stop_listening().await;
    left.fault.cut();
    left.goes_on();
    let again = async || {
        let told = readyz(&gateway).await.json();
        let cause = told["cause"].as_str().expect("a cause");
        cause.contains("cannot open the store") && cause.contains("refused")
    };
    eventually("that try is given up, and another one fails", again).await;
    assert!(!left.statuses().await.contains(&Some("unknown".to_owned())));
    left.fault.listen();
    left.all_is_there(&gateway).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_loses_its_database_again_begins_anew() {
    let (orders, place) = (Orders::start().await, Place::new(Which::Postgres).await);
    let (fault, url) = Fault::before_postgres(&place.url, Cluster::shared().port()).await;
    let through = Place::at(url);
    let setup = Setup::new(&through, &orders.url(), "", "");
    fault.refuse();
    let gateway = setup.serve();
    works_without(&gateway, &orders, CUT).await;
    // It takes a lease, and is never told: in doubt, and begun anew.
    fault.swallow_the_answer_to("-- heartbeat");
    fault.pass();
    eventually("the answer is lost", async || fault.has_swallowed()).await;
    fault.cut();
    works_with(&gateway, &orders).await;
}
