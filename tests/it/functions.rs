//! An application on the same Postgres that completes records in its own transaction.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use oncegate::record::event::subscription::{Subscriber, TypeFilter, TypePattern};
use oncegate::record::{
    Answer, Attempt, Fence, Fingerprint, KeptBody, Key, Operation, OwnerId, RecordId, Scope,
    Spelling, Tenant,
};
use oncegate::store::postgres::{Postgres, Settings};
use oncegate::store::{Changed, Completion, Proposal, Records, Reserved, Settled, Takeover};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, NoTls};
use uuid::Uuid;

use crate::postgres::access;
use crate::support::client::Answer as Got;
use crate::support::fleet::{self, command, order, sending};
use crate::support::process::{self, Gateway, eventually};
use crate::support::rig::{self, Place, Rig, Which, on_both_stores};
use crate::support::sink::{OK, Sink};

/// What the documents say, as this test runs it.
const DOCUMENT: &str = include_str!("../../docs/shared-database.md");

/// The SQL of the document that begins like this.
fn documented(beginning: &str) -> String {
    let blocks = DOCUMENT.split("```sql\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    let block = blocks.into_iter().find(|block| block.starts_with(beginning));
    block.unwrap_or_else(|| panic!("no {beginning} in the document")).to_owned()
}

/// The documented transaction for a request, without its end.
fn documented_work(call: &Call) -> String {
    let sql = documented("BEGIN;").replace(":'record'", &format!("'{}'", call.record));
    let sql = sql.replace(":attempt", &call.attempt.to_string());
    sql.strip_suffix("COMMIT;\n").expect("it ends with its commit").to_owned()
}

/// What the documented transaction keeps.
const KEPT: &str = r#"{"id": 1, "status": "created"}"#;

/// A request as the application sees it.
#[derive(Clone, Debug)]
struct Call {
    record: Uuid,
    attempt: i32,
    key: String,
}

/// What the application does after its work is written, by the request's key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Commits and answers.
    Commits,
    /// Commits, and the answer is lost.
    CommitsAndBreaks,
    /// Commits, and something on the way answers 502.
    CommitsBehindAGateway,
    /// Commits at once, and answers when it is let go.
    CommitsAndLingers,
    /// Its connection to the database ends before the commit, and so does the caller's.
    Breaks,
    /// Rolls back, and breaks the connection.
    RollsBack,
    /// Waits with its work written until it is let go, and calls the functions then.
    Hesitates,
    /// Waits with everything called and nothing committed until it is let go.
    HoldsTheLock,
    /// Answers, and commits when it is let go.
    AnswersFirst,
}

impl Way {
    fn of(key: &str) -> Self {
        match key.split('-').next().unwrap_or_default() {
            "breaks" => Self::Breaks,
            "rolls" => Self::RollsBack,
            "lost" => Self::CommitsAndBreaks,
            "gate" => Self::CommitsBehindAGateway,
            "lingers" => Self::CommitsAndLingers,
            "hesitates" => Self::Hesitates,
            "holds" => Self::HoldsTheLock,
            "early" => Self::AnswersFirst,
            _ => Self::Commits,
        }
    }
}

/// An order service that uses the functions.
struct Shop {
    addr: SocketAddr,
    inner: Arc<Inner>,
}

struct Inner {
    url: watch::Sender<String>,
    calls: watch::Sender<Vec<Call>>,
    go: watch::Sender<bool>,
    /// How often the database refused the work because it was fenced off.
    fenced: AtomicUsize,
    /// How many have got as far as they get before they are let go.
    waiting: watch::Sender<usize>,
}

impl Shop {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let addr = listener.local_addr().expect("its address");
        let inner = Arc::new(Inner {
            url: watch::Sender::new(String::new()),
            calls: watch::Sender::new(Vec::new()),
            go: watch::Sender::new(false),
            fenced: AtomicUsize::new(0),
            waiting: watch::Sender::new(0),
        });
        let shared = Arc::clone(&inner);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let shop = Arc::clone(&shared);
                // A task of its own: it goes on when nobody waits for its answer any more.
                let service = service_fn(move |request| {
                    let work = tokio::spawn(answer(Arc::clone(&shop), request));
                    async move { work.await.expect("it does not panic") }
                });
                let connection = hyper::server::conn::http1::Builder::new();
                let serving = connection.serve_connection(TokioIo::new(stream), service);
                tokio::spawn(async move { drop(serving.await) });
            }
        });
        Self { addr, inner }
    }

    fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    fn calls(&self) -> Vec<Call> {
        self.inner.calls.borrow().clone()
    }

    fn calls_of(&self, key: &str) -> usize {
        self.calls().iter().filter(|call| call.key == key).count()
    }

    fn fenced(&self) -> usize {
        self.inner.fenced.load(Ordering::SeqCst)
    }

    async fn waits(&self, count: usize) {
        let mut waiting = self.inner.waiting.subscribe();
        let waited = waiting.wait_for(|now| *now >= count);
        tokio::time::timeout(process::PATIENCE, waited).await.expect("in time").expect("a shop");
    }

    fn go(&self) {
        self.inner.go.send_replace(true);
    }
}

impl Inner {
    async fn let_go(&self) {
        self.waiting.send_modify(|waiting| *waiting += 1);
        drop(self.go.subscribe().wait_for(|go| *go).await);
    }
}

/// A connection that breaks instead of an answer.
#[derive(Debug, thiserror::Error)]
#[error("broken")]
struct Broken;

async fn answer(
    shop: Arc<Inner>,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Broken> {
    let header = |name: &str| {
        request.headers().get(name).unwrap_or_else(|| panic!("no {name}")).to_str().unwrap()
    };
    let call = Call {
        record: header("oncegate-record").parse().expect("a record"),
        attempt: header("oncegate-attempt").parse().expect("an attempt"),
        key: header("idempotency-key").to_owned(),
    };
    let _body = request.into_body().collect().await;
    shop.calls.send_modify(|calls| calls.push(call.clone()));
    let url = shop.url.borrow().clone();
    let client = connect(&url).await;
    let way = Way::of(&call.key);
    let (write, functions) = split(&documented_work(&call));
    client.batch_execute(&write).await.expect("the order is written");
    // The second attempt of a request that hesitated does its work at once.
    if way == Way::Hesitates && call.attempt == 1 {
        shop.let_go().await;
    }
    if let Err(error) = client.batch_execute(&functions).await {
        assert_eq!(error.code().map(SqlState::code), Some("OG001"), "{error:?}");
        assert!(error.as_db_error().unwrap().message().contains(&call.record.to_string()));
        let commit = client.simple_query("COMMIT").await;
        assert!(commit.is_ok(), "which rolls back: {commit:?}");
        shop.fenced.fetch_add(1, Ordering::SeqCst);
        return Ok(status(409));
    }
    finish(shop, client, way).await
}

/// The transaction's first half, and the calls of the functions.
fn split(work: &str) -> (String, String) {
    let at = work.find("SELECT oncegate_complete").expect("the call");
    (work[..at].to_owned(), work[at..].to_owned())
}

async fn finish(
    shop: Arc<Inner>,
    client: Client,
    way: Way,
) -> Result<Response<Full<Bytes>>, Broken> {
    let commit = async || client.batch_execute("COMMIT").await.expect("it commits");
    match way {
        Way::Breaks => {
            drop(client);
            return Err(Broken);
        }
        Way::RollsBack => {
            client.batch_execute("ROLLBACK").await.expect("it rolls back");
            return Err(Broken);
        }
        Way::CommitsAndBreaks => {
            commit().await;
            return Err(Broken);
        }
        Way::CommitsBehindAGateway => {
            commit().await;
            return Ok(status(502));
        }
        Way::CommitsAndLingers => {
            commit().await;
            shop.let_go().await;
        }
        Way::HoldsTheLock => {
            shop.let_go().await;
            commit().await;
        }
        Way::AnswersFirst => {
            tokio::spawn(async move {
                shop.let_go().await;
                client.batch_execute("COMMIT").await.expect("it commits");
            });
        }
        Way::Commits | Way::Hesitates => commit().await,
    }
    let response = Response::builder().status(201).header("content-type", "application/json");
    let response = response.header("x-from", "the application itself");
    Ok(response.body(Full::new(KEPT.into())).expect("an answer"))
}

fn status(status: u16) -> Response<Full<Bytes>> {
    Response::builder().status(status).body(Full::default()).expect("an answer")
}

async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.expect("the database");
    tokio::spawn(connection);
    client
}

/// A shop behind a gateway, on one database; its role may call the functions and write orders, nothing else.
struct Town {
    shop: Shop,
    place: Place,
    gateway: Gateway,
    role: String,
}

impl Town {
    async fn start(store: &str, policy: &str, more: &str) -> Self {
        let (shop, place) = (Shop::start().await, Place::new(Which::Postgres).await);
        let toml = rig::config_at(&place, &shop.url(), "127.0.0.1:0", store, policy, more);
        let gateway = Gateway::start(&process::config(place.folder.path(), &toml));
        let role = admit(&place).await;
        shop.inner.url.send_replace(as_role(&place.url, &role));
        Self { shop, place, gateway, role }
    }

    async fn send(&self, key: &str) -> Got {
        order(key).to(self.gateway.addr).await
    }

    async fn orders(&self) -> i64 {
        self.place.count("select count(*) from orders").await
    }

    async fn completed(&self, key: &str) -> bool {
        self.place.status_of(key).await.as_deref() == Some("completed")
    }
}

fn as_role(url: &str, role: &str) -> String {
    url.replace("postgres@", &format!("{role}@"))
}

/// Runs the document's grants for a role of this database's own: roles belong to the whole server.
async fn admit(place: &Place) -> String {
    let role = format!("shop_{}", place.url.rsplit('/').next().expect("a name"));
    place.rows(&documented("CREATE ROLE").replace("shop_app", &role)).await;
    place
        .rows(&format!(
            "create table orders (id int generated always as identity, customer text, amount numeric);
             grant insert on orders to {role}"
        ))
        .await;
    role
}

fn kept(answer: &Got) {
    assert_eq!(answer.status, StatusCode::CREATED, "{answer:?}");
    assert_eq!(answer.body, KEPT);
    assert_eq!(answer.header("content-type"), Some("application/json"));
    assert_eq!(answer.header("x-from"), None, "what is kept is what the function was given");
    assert!(answer.header("oncegate-expires").is_some());
    assert_eq!(answer.header("oncegate-stored"), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_caller_and_every_duplicate_get_what_the_transaction_kept() {
    let town = Town::start("", "retention = \"2h\"", "").await;
    let first = town.send("k").await;
    kept(&first);
    assert!(!first.replayed(), "it is the answer of its own execution");
    let other = town.gateway.restart();
    for to in [town.gateway.addr, other.addr] {
        let replay = order("k").to(to).await;
        kept(&replay);
        assert!(replay.replayed());
        assert_eq!(replay.record(), first.record());
    }
    assert_eq!((town.shop.calls_of("k"), town.orders().await), (1, 1));
    let kept_for =
        "select extract(epoch from expires_at - completed_at)::int from idempotency_records";
    assert_eq!(town.place.count(kept_for).await, 7200);
    let types = town.place.rows("select event_type from outbox_events").await;
    assert_eq!(types, [[Some("order.created".to_owned())]], "its own events, none of the route's");
}

#[tokio::test(flavor = "multi_thread")]
async fn committed_and_the_answer_lost_is_the_stored_answer() {
    let town = Town::start("", "", "").await;
    for key in ["lost", "gate"] {
        let first = town.send(key).await;
        kept(&first);
        assert!(!first.replayed());
        let retry = town.send(key).await;
        kept(&retry);
        assert!(retry.replayed());
        assert_eq!(town.shop.calls_of(key), 1);
        assert!(town.completed(key).await);
    }
    assert_eq!((town.orders().await, town.place.events().await), (2, 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn not_committed_is_nothing_at_all() {
    let town = Town::start("", "", "").await;
    for key in ["breaks", "rolls"] {
        let first = town.send(key).await;
        assert_eq!(first.problem(), "upstream-failed", "{first:?}");
        eventually("it is unknown", async || {
            town.place.status_of(key).await.as_deref() == Some("unknown")
        })
        .await;
    }
    assert_eq!((town.orders().await, town.place.events().await), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn after_the_next_attempt_has_begun_the_old_one_writes_nothing() {
    let town = Town::start("", "timeout = \"3s\"\non_unknown = \"retry\"", "").await;
    let first = town.send("hesitates").await;
    assert_eq!(first.problem(), "upstream-timeout");
    let second = town.send("hesitates").await;
    kept(&second);
    assert_eq!(town.orders().await, 1);
    town.shop.go();
    eventually("the first is refused", async || town.shop.fenced() == 1).await;
    assert_eq!((town.orders().await, town.place.events().await), (1, 1));
    kept(&town.send("hesitates").await);
    assert_eq!(town.shop.calls_of("hesitates"), 2);
}

/// A plan that must read a table without an index looks dear while sequential scans are off, and would be compiled.
#[tokio::test(flavor = "multi_thread")]
async fn no_query_of_the_functions_is_compiled() {
    let place = Town::start("", "", "").await.place;
    let fixed = "select count(*) from pg_proc where proname like 'oncegate\\_%' and proconfig @> '{enable_seqscan=off}'";
    assert!(place.count(fixed).await >= 7);
    assert_eq!(place.count(&format!("{fixed} and not proconfig @> '{{jit=off}}'")).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn after_an_operators_release_the_old_attempt_writes_nothing() {
    let town = Town::start("", "timeout = \"3s\"", "").await;
    let first = town.send("hesitates").await;
    assert_eq!(first.problem(), "upstream-timeout");
    let (code, _, errors) = command(&town.gateway, &["records", "release", &first.record()]);
    assert_eq!(code, 0, "{errors}");
    town.shop.go();
    eventually("it is refused", async || town.shop.fenced() == 1).await;
    assert_eq!((town.orders().await, town.place.records().await), (0, 0));
}

/// A late commit is as good as one in time.
#[tokio::test(flavor = "multi_thread")]
async fn committed_after_the_timeout_is_the_stored_answer_for_every_retry() {
    let town = Town::start("", "timeout = \"3s\"", "").await;
    let first = town.send("hesitates").await;
    assert_eq!(first.problem(), "upstream-timeout");
    assert_eq!(town.send("hesitates").await.problem(), "outcome-unknown");
    town.shop.go();
    eventually("it is completed", async || town.completed("hesitates").await).await;
    kept(&town.send("hesitates").await);
    assert_eq!((town.orders().await, town.shop.fenced()), (1, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_that_holds_its_row_stops_no_other_request() {
    let store = "completion_timeout = \"10s\"\nsweep_every = \"200ms\"";
    let town = Town::start(store, "wait = \"500ms\"\ntimeout = \"2m\"", "").await;
    let other = town.gateway.restart();
    // One answers and leaves its transaction open, so that its completion meets the lock; another just holds it.
    let early = sending(order("early"), town.gateway.addr);
    let holds = sending(order("holds"), town.gateway.addr);
    town.shop.waits(2).await;
    // Their duplicates on another replica are told so, and stop nobody there.
    let told = ["early", "holds"].map(|key| sending(order(key), other.addr));
    let others = (0..200).map(|n| {
        let to = if n % 2 == 0 { town.gateway.addr } else { other.addr };
        async move { order(&format!("k-{n}")).to(to).await }
    });
    let others: Vec<_> = stream::iter(others).buffer_unordered(20).collect().await;
    others.iter().for_each(kept);
    for told in told {
        assert_eq!(told.await.unwrap().problem(), "in-progress");
    }
    // The store has not taken this outcome within `completion_timeout`: told as whenever it has not.
    let early = early.await.unwrap();
    assert_eq!(early.status, StatusCode::CREATED);
    assert_eq!(early.header("oncegate-stored"), Some("false"), "{early:?}");
    assert_eq!(early.header("oncegate-expires"), None, "{early:?}");
    assert!(!town.completed("early").await, "all of this while the lock was held");
    town.shop.go();
    kept(&holds.await.unwrap());
    for key in ["early", "holds"] {
        eventually("the duplicates get it", async || {
            let answer = order(key).to(other.addr).await;
            answer.replayed() && answer.body == KEPT
        })
        .await;
        eventually("also here", async || town.send(key).await.replayed()).await;
        assert_eq!(town.shop.calls_of(key), 1);
    }
    assert_eq!((town.orders().await, town.place.events().await), (202, 202));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_timeout_while_the_transaction_is_open_ends_with_what_it_commits() {
    let town = Town::start("completion_timeout = \"500ms\"", "timeout = \"500ms\"", "").await;
    let first = town.send("holds").await;
    assert_eq!(first.problem(), "upstream-timeout", "{first:?}");
    assert!(fleet::metric(town.gateway.admin, "oncegate_settling").await > 0);
    town.shop.go();
    eventually("the duplicate gets it", async || town.send("holds").await.replayed()).await;
    eventually("nothing is owed", async || {
        fleet::metric(town.gateway.admin, "oncegate_settling").await == 0
    })
    .await;
    assert_eq!((town.orders().await, town.shop.calls_of("holds")), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_duplicate_gets_the_stored_answer_while_the_application_still_works() {
    let town = Town::start("", "wait = \"100ms\"", "").await;
    let other = town.gateway.restart();
    let first = sending(order("lingers"), town.gateway.addr);
    town.shop.waits(1).await;
    for to in [other.addr, town.gateway.addr] {
        // At once, and not at the end of a wait: the first may have come before the look was due.
        eventually("it is replayed", async || {
            let answer = order("lingers").to(to).await;
            assert!(answer.replayed() || answer.problem() == "in-progress", "{answer:?}");
            answer.replayed() && answer.body == KEPT
        })
        .await;
    }
    assert!(!first.is_finished(), "while the application still works");
    town.shop.go();
    kept(&first.await.unwrap());
    assert_eq!(town.shop.calls_of("lingers"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_role_may_call_the_functions_and_nothing_else() {
    let town = Town::start("", "", "").await;
    kept(&town.send("k").await);
    let tables = "select quote_ident(relname) from pg_class where relkind in ('r', 'v')
                  and relnamespace = 'public'::regnamespace and relname <> 'orders' order by 1";
    let tables: Vec<_> = town.place.rows(tables).await.into_iter().flatten().flatten().collect();
    assert!(tables.len() >= 10, "{tables:?}");
    let app = connect(&as_role(&town.place.url, &town.role)).await;
    let refused = async |sql: &str| {
        let error = app.batch_execute(sql).await.expect_err(sql);
        assert_eq!(error.code(), Some(&SqlState::INSUFFICIENT_PRIVILEGE), "{sql}: {error:?}");
    };
    for table in &tables {
        refused(&format!("SELECT FROM {table}")).await;
        if table != "outbox_events" {
            refused(&format!("INSERT INTO {table} DEFAULT VALUES")).await;
            refused(&format!("DELETE FROM {table}")).await;
        }
    }
    refused("SELECT oncegate_refuse('a', 'b')").await;
    // A role that was told nothing may not even call them.
    town.place.rows(&format!("create role stranger_{} login", town.role)).await;
    let stranger = format!("stranger_{}", town.role);
    let app = connect(&as_role(&town.place.url, &stranger)).await;
    for sql in [
        "SELECT oncegate_complete(NULL, NULL, NULL, NULL, NULL)",
        "SELECT oncegate_emit(NULL, NULL, NULL, NULL)",
    ] {
        let error = app.batch_execute(sql).await.expect_err(sql);
        assert_eq!(error.code(), Some(&SqlState::INSUFFICIENT_PRIVILEGE), "{error:?}");
    }
}

/// The order of the members of a message.
fn members(message: &str) -> Vec<usize> {
    ["type", "timestamp", "data", "tenant", "operation", "idempotency_key", "id"]
        .map(|name| message.rfind(&format!("\"{name}\":")).unwrap_or_else(|| panic!("no {name}")))
        .to_vec()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_emitted_event_arrives_in_the_same_envelope_as_any_other() {
    let sink = Sink::start(|_, _| OK).await;
    let town = Town::start("", "", &fleet::sink(sink.port)).await;
    // The gateway's own event of a plain API, as the measure.
    let plain = Rig::start(Which::Postgres, &fleet::sink(sink.port)).await;
    assert_eq!(order("plain").to(plain.gateway.addr).await.status, StatusCode::CREATED);
    kept(&town.send("k").await);
    eventually("both arrive", async || sink.seen().len() == 2).await;
    let seen = sink.seen();
    assert!(seen.iter().all(|delivery| delivery.verified));
    let of = |key: &str| {
        let mine = seen.iter().find(|delivery| delivery.text().contains(&format!("\"{key}\"")));
        let mine = mine.unwrap_or_else(|| panic!("no event of {key}"));
        (mine.text(), mine.id(), serde_json::from_str::<serde_json::Value>(&mine.text()).unwrap())
    };
    let (text, id, emitted) = of("k");
    let (usual_text, usual_id, usual) = of("plain");
    let names = |event: &serde_json::Value| -> Vec<String> {
        event.as_object().unwrap().keys().cloned().collect()
    };
    assert_eq!(names(&emitted), names(&usual));
    assert!(members(&text).is_sorted() && members(&usual_text).is_sorted());
    assert_eq!((&emitted["id"], &usual["id"]), (&id.clone().into(), &usual_id.clone().into()));
    for (name, value) in [
        ("type", "order.created"),
        ("tenant", "acme"),
        ("operation", "orders.create"),
        ("idempotency_key", "k"),
    ] {
        assert_eq!(emitted[name], value);
    }
    let data = serde_json::json!({ "order_id": 1, "amount": "129.90" });
    assert_eq!(emitted["data"], data);
    let length = |event: &serde_json::Value| event["timestamp"].as_str().unwrap().len();
    assert_eq!(length(&emitted), length(&usual), "to the microsecond, in UTC");
    let version = |id: &str| id.parse::<Uuid>().unwrap().get_version_num();
    assert_eq!((version(&id), version(&usual_id)), (8, 5), "so that they never meet");
}

/// A record in progress in a database of its own, and a role that may complete it.
struct Bench {
    store: Arc<Postgres>,
    place: Place,
    app: Client,
    owner: OwnerId,
}

const LONG: Duration = Duration::from_secs(60);

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn proposal(owner: OwnerId, key: &str) -> Proposal {
    Proposal {
        id: RecordId::fresh(),
        scope: Scope {
            tenant: Tenant::parse("acme \"é\"").unwrap(),
            operation: Operation::parse("orders.create").unwrap(),
            key: Key::parse(key).unwrap(),
        },
        fingerprint: Fingerprint { canonical: [1; 32], raw: [2; 32], recipe: [3; 8] },
        owner,
        caller: None,
        context: Some(Bytes::from_static(b"{}")),
        retention: Duration::from_secs(3600),
    }
}

fn completion(proposal: &Proposal) -> Completion {
    let body = KeptBody::Whole(Bytes::from_static(b"of the gateway"));
    let headers = http::HeaderMap::new();
    Completion {
        scope: proposal.scope.clone(),
        fence: Fence { id: proposal.id, attempt: Attempt::FIRST },
        answer: Answer { status: StatusCode::OK, headers, spelling: Spelling::default(), body },
        retention: LONG,
        events: Vec::new(),
    }
}

impl Bench {
    async fn new() -> Self {
        let place = Place::new(Which::Postgres).await;
        let store = Postgres::open(Settings {
            access: access(&place.url),
            connections: 4,
            statement_timeout: Duration::from_secs(20),
            connect_timeout: Duration::from_secs(5),
        });
        let store = Arc::new(store.await.unwrap());
        store.migrate(true).await.unwrap();
        let role = admit(&place).await;
        let app = connect(&as_role(&place.url, &role)).await;
        let owner = OwnerId::fresh();
        store.heartbeat(owner, LONG).await.unwrap();
        Self { store, place, app, owner }
    }

    async fn held(&self, key: &str) -> Proposal {
        let proposal = proposal(self.owner, key);
        let reserved = self.store.reserve(proposal.clone(), soon()).await.unwrap();
        assert_eq!(reserved, Reserved::Held);
        proposal
    }

    async fn run(&self, sql: &str) {
        self.app.batch_execute(sql).await.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
    }

    async fn refused(&self, sql: &str, code: &str, part: &str) {
        let error = self.app.batch_execute(sql).await.expect_err(sql);
        let error = error.as_db_error().expect("an error of the database");
        assert_eq!(error.code().code(), code, "{sql}: {error:?}");
        assert!(error.message().contains(part), "{sql}: {error:?}");
        self.run("ROLLBACK").await;
    }
}

fn complete(record: RecordId) -> String {
    format!("SELECT oncegate_complete('{record}', 1, 201, 'text/plain', 'yes')")
}

fn emit(record: RecordId, name: &str) -> String {
    format!("SELECT oncegate_emit('{record}', '{name}', 'order.{name}', '[1]')")
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_is_one_by_its_name_and_stands_in_the_order_of_the_calls() {
    let bench = Bench::new().await;
    bench.store.name_sinks(&["main", "audit"].map(|sink| subscriber(sink, &[]))).await.unwrap();
    let id = bench.held("k").await.id;
    // Before and after the completion, across savepoints, twice under one name.
    bench
        .run(&format!(
            "BEGIN; {}; SAVEPOINT a; {}; {}; RELEASE a; SAVEPOINT b; {}; ROLLBACK TO b; {}; {}; COMMIT",
            emit(id, "c"),
            complete(id),
            emit(id, "a"),
            emit(id, "gone"),
            emit(id, "a"),
            emit(id, "b"),
        ))
        .await;
    let rows = bench
        .place
        .rows("select event_key, sink, status from outbox_events join outbox_messages using (id, event_key) order by seq, sink")
        .await;
    let row = |name: &str, sink: &str| {
        [format!("{id}:{name}"), sink.to_owned(), "pending".to_owned()].map(Some).to_vec()
    };
    let expected: Vec<_> =
        ["c", "a", "b"].iter().flat_map(|name| [row(name, "audit"), row(name, "main")]).collect();
    assert_eq!(rows, expected);
    assert_eq!(bench.place.count("select count(*) from oncegate_transactions").await, 0);
    let message = "select convert_from(payload, 'UTF8')::json ->> 'tenant' from outbox_messages";
    assert_eq!(bench.place.rows(message).await[0][0].as_deref(), Some("acme \"é\""));
    // Sinks that are no longer configured get nothing new; without any, an event is kept and discarded.
    bench.store.name_sinks(&[]).await.unwrap();
    let id = bench.held("k2").await.id;
    bench.run(&format!("BEGIN; {}; {}; COMMIT", complete(id), emit(id, "a"))).await;
    let lone = format!("select sink, status from outbox_events where record_id = '{id}'");
    let discarded = ["".to_owned(), "discarded".to_owned()].map(Some).to_vec();
    assert_eq!(bench.place.rows(&lone).await, [discarded]);
}

fn subscriber(sink: &str, patterns: &[&str]) -> Subscriber {
    let read = |text: &&str| TypePattern::parse(text).unwrap();
    let events = match patterns {
        [] => TypeFilter::All,
        patterns => TypeFilter::Matching(patterns.iter().map(read).collect()),
    };
    Subscriber { sink: sink.to_owned(), events }
}

/// The gateway's own events are filtered by `TypeFilter::includes`, those that are announced here by SQL.
#[tokio::test(flavor = "multi_thread")]
async fn an_event_goes_to_the_sinks_whose_patterns_describe_its_type_as_the_gateways_own_do() {
    let bench = Bench::new().await;
    let patterns: &[&[&str]] = &[
        &[],
        &["order.*"],
        &["order.created", "bill.*"],
        &["*.created"],
        &["order_*", "100%*"],
        &[r"a\*c"],
        &["a*b*c"],
        &["é*"],
    ];
    let subscribers: Vec<_> = patterns
        .iter()
        .enumerate()
        .map(|(n, patterns)| subscriber(&format!("s{n}"), patterns))
        .collect();
    // What stood there before is replaced.
    bench.store.name_sinks(&[subscriber("s1", &["x"]), subscriber("gone", &[])]).await.unwrap();
    bench.store.name_sinks(&subscribers).await.unwrap();
    let id = bench.held("k").await.id;
    let kinds = [
        "order.created",
        "order_1",
        "orderx1",
        "100% sure",
        "100 sure",
        r"a\bc",
        "abc",
        "axxbyyc",
        "été",
        "bill.paid",
    ];
    let emit = |(n, kind): (usize, &&str)| {
        format!("SELECT oncegate_emit('{id}', 'e{n}', '{kind}', 'null')")
    };
    let calls: Vec<_> = kinds.iter().enumerate().map(emit).collect();
    bench.run(&format!("BEGIN; {}; {}; COMMIT", complete(id), calls.join("; "))).await;
    for kind in kinds {
        let sql =
            format!("select sink from outbox_events where event_type = '{kind}' order by sink");
        let rows = bench.place.rows(&sql).await;
        let found: Vec<_> = rows.into_iter().map(|row| row[0].clone().unwrap()).collect();
        let wanting = subscribers.iter().filter(|subscriber| subscriber.events.includes(kind));
        assert_eq!(
            found,
            wanting.map(|wanting| wanting.sink.clone()).collect::<Vec<_>>(),
            "{kind}"
        );
    }
    // Nobody wants it: it is kept, and discarded.
    bench.store.name_sinks(&subscribers[1..]).await.unwrap();
    let id = bench.held("k2").await.id;
    let none = format!("SELECT oncegate_emit('{id}', 'e', 'other', 'null')");
    bench.run(&format!("BEGIN; {}; {none}; COMMIT", complete(id))).await;
    let lone = format!("select sink, status from outbox_events where record_id = '{id}'");
    let discarded = ["".to_owned(), "discarded".to_owned()].map(Some).to_vec();
    assert_eq!(bench.place.rows(&lone).await, [discarded]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_fit_the_record_is_refused_and_writes_nothing() {
    let bench = Bench::new().await;
    let id = bench.held("k").await.id;
    let other = RecordId::fresh();
    let order = "INSERT INTO orders (customer) VALUES ('c')";
    let wrong = |call: &str| format!("BEGIN; {order}; {call}; COMMIT");
    let stale = complete(id).replace(", 1, 201", ", 2, 201");
    bench.refused(&wrong(&stale), "OG001", "is at attempt 1, not at 2").await;
    bench.refused(&wrong(&complete(other)), "OG001", "there is no record").await;
    bench.refused(&wrong(&emit(other, "a")), "OG001", "there is no record").await;
    bench.refused(&wrong(&emit(id, "a")), "OG001", "was not completed").await;
    let caught = format!("{}; SAVEPOINT s; {stale}; ROLLBACK TO s", emit(id, "a"));
    bench.refused(&wrong(&caught), "OG001", "is at attempt 1").await;
    for (from, to, part) in [
        ("201", "99", "status"),
        ("201", "NULL", "status"),
        ("'text/plain'", "E'text/plain\\r\\nset-cookie: a=b'", "content_type"),
        ("'text/plain'", "''", "content_type"),
    ] {
        bench.refused(&wrong(&complete(id).replace(from, to)), "22023", part).await;
    }
    for name in ["", " ", "a\tb", &"x".repeat(256)] {
        bench.refused(&wrong(&emit(id, name)), "22023", "event_name").await;
    }
    let large = emit(id, "a").replace("'[1]'", "to_jsonb(repeat('x', 1048576))");
    bench.refused(&wrong(&large), "22023", "larger than 1 MiB").await;
    // The next attempt is under way, and has not ended.
    let late = bench.held("late").await;
    let fence = Fence { id: late.id, attempt: Attempt::FIRST };
    assert_eq!(bench.store.mark_unknown(&late.scope, fence).await.unwrap(), Changed::Yes);
    let next = proposal(bench.owner, "late");
    let taken = bench.store.take_over(next, Takeover::Unknown(fence)).await.unwrap();
    assert_eq!(taken, Changed::Yes);
    bench.refused(&wrong(&complete(late.id)), "OG001", "is at attempt 2, not at 1").await;
    assert_eq!(bench.place.count("select count(*) from orders").await, 0);
    assert_eq!(bench.place.events().await, 0);
    bench.run(&wrong(&complete(id))).await;
    bench.refused(&wrong(&complete(id)), "OG001", "is completed already").await;
    bench.refused(&wrong(&emit(id, "a")), "OG001", "completed by another transaction").await;
    assert_eq!(bench.place.count("select count(*) from orders").await, 1);
    assert_eq!(bench.place.count("select count(*) from oncegate_transactions").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_functions_look_at_their_owners_tables_whatever_the_caller_has_made() {
    let bench = Bench::new().await;
    let id = bench.held("k").await.id;
    bench
        .run(
            "CREATE TEMP TABLE idempotency_records (id uuid, status text, attempt int);
             CREATE TEMP TABLE oncegate_transactions (record_id uuid, xact xid8, completed bool, events int);
             CREATE FUNCTION pg_temp.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS 'SELECT NULL::timestamptz';
             SET search_path = pg_temp, public",
        )
        .await;
    bench.run(&format!("BEGIN; {}; {}; COMMIT", complete(id), emit(id, "a"))).await;
    assert_eq!(bench.place.status_of("k").await.as_deref(), Some("completed"));
    assert_eq!(bench.place.events().await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_completion_waits_for_the_row_without_holding_up_the_lane_and_honours_what_it_finds() {
    let bench = Bench::new().await;
    let (mine, theirs) = (bench.held("mine").await, bench.held("theirs").await);
    bench.run(&format!("BEGIN; {}", complete(mine.id))).await;
    let store = Arc::clone(&bench.store);
    let waiting = completion(&mine);
    let waiting = tokio::spawn(async move { store.complete(waiting.into(), soon()).await });
    let done = bench.store.complete(completion(&theirs).into(), soon()).await.unwrap();
    assert!(matches!(done, Settled::Done { .. }), "{done:?}");
    // Past its deadline it is as not taken, and certainly so.
    let soon_over = Instant::now() + Duration::from_secs(2);
    let late = bench.store.complete(completion(&mine).into(), soon_over).await;
    assert_eq!(late.unwrap(), Settled::Locked);
    assert!(!waiting.is_finished(), "the row is still held");
    bench.run("COMMIT").await;
    assert_eq!(waiting.await.unwrap().unwrap(), Settled::Fenced, "the application was first");
    let kept =
        "select convert_from(response_body, 'UTF8') from idempotency_records where key = 'mine'";
    assert_eq!(bench.place.rows(kept).await[0][0].as_deref(), Some("yes"));
    // A transaction that rolls back leaves the way free.
    let again = bench.held("again").await;
    bench.run(&format!("BEGIN; {}", complete(again.id))).await;
    let store = Arc::clone(&bench.store);
    let waiting = completion(&again);
    let waiting = tokio::spawn(async move { store.complete(waiting.into(), soon()).await });
    bench.run("ROLLBACK").await;
    let done = waiting.await.unwrap().unwrap();
    assert!(matches!(done, Settled::Done { .. }), "{done:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn no_change_of_a_record_waits_for_the_transaction_that_holds_it() {
    let bench = Bench::new().await;
    let held = bench.held("k").await;
    let fence = Fence { id: held.id, attempt: Attempt::FIRST };
    let (store, scope) = (&bench.store, &held.scope);
    bench.run(&format!("BEGIN; {}", complete(held.id))).await;
    // A reservation of the same scope finds what stands, and one beside it is made.
    let twin = Proposal { id: RecordId::fresh(), ..held.clone() };
    let found = store.reserve(twin.clone(), soon()).await.unwrap();
    assert!(matches!(&found, Reserved::Exists(record) if record.fence == fence), "{found:?}");
    bench.held("beside").await;
    assert_eq!(store.mark_unknown(scope, fence).await.unwrap(), Changed::Locked);
    assert_eq!(store.release(scope, fence).await.unwrap(), Changed::Locked);
    store.retire(bench.owner).await.unwrap();
    assert_eq!(store.mark_dead(Some((scope, fence)), 1).await.unwrap(), 0);
    assert_eq!(store.mark_dead(None, 10).await.unwrap(), 1, "the one beside it");
    assert_eq!(store.sweep_records(10).await.unwrap(), 0);
    bench.run("ROLLBACK").await;
    assert_eq!(store.mark_dead(Some((scope, fence)), 1).await.unwrap(), 1);
    // As unknown, it is completed late; meanwhile nobody takes it over.
    bench.run(&format!("BEGIN; {}", complete(held.id))).await;
    let owner = OwnerId::fresh();
    store.heartbeat(owner, LONG).await.unwrap();
    let from = Takeover::Unknown(fence);
    let twin = Proposal { owner, ..twin };
    assert_eq!(store.take_over(twin.clone(), from).await.unwrap(), Changed::Locked);
    bench.run("COMMIT").await;
    assert_eq!(store.take_over(twin, from).await.unwrap(), Changed::No);
    assert_eq!(bench.place.status_of("k").await.as_deref(), Some("completed"));
}

on_both_stores! {
    a_record_tells_how_long_its_answer_will_be_kept,
}

async fn a_record_tells_how_long_its_answer_will_be_kept(which: Which) {
    let shown = match which {
        Which::Sqlite => "retention / 1000000",
        Which::Postgres => "extract(epoch from retention)::int",
    };
    let rig = Rig::with(which, "", "retention = \"90m\"", "").await;
    assert_eq!(order("k").to(rig.gateway.addr).await.status, StatusCode::CREATED);
    let retention = format!("select {shown} from idempotency_records");
    assert_eq!(rig.place.count(&retention).await, 5400);
}
