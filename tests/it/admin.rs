//! The operators' listener: who may see it, what it shows, and what it says when the database is away.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use oncegate::admin::resolve::Announced;
use oncegate::admin::{Readiness, State, Token, router, serve};
use oncegate::explain::{Disposition, Explain, Explained, Sample};
use oncegate::record::{Answer, Status};
use oncegate::route::Routes;
use oncegate::store::{EventStatus, RecordRow};
use oncegate::telemetry::{Metrics, Reply};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::support::shelf::{Health, Shelf, event, record, record_id};

struct Admin {
    addr: SocketAddr,
    shelf: Arc<Shelf>,
    ready: Readiness,
    metrics: Arc<Metrics>,
    stop: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

struct Got {
    status: u16,
    head: String,
    body: String,
}

impl Got {
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap()
    }
}

/// Explains nothing: no route is configured.
struct Nobody;

#[async_trait::async_trait]
impl Explain for Nobody {
    async fn explain(&self, sample: Sample) -> Explained {
        let look = Routes::default().look(&sample.method, sample.target.path());
        Explained::of(Disposition::PassesWithoutRoute, "there is no route", look)
    }
}

/// Announces nothing: no route is configured.
fn nothing(_: &RecordRow, _: &Answer) -> Announced {
    Announced { events: Vec::new(), failed: 0, retention: Duration::from_secs(3600) }
}

impl Admin {
    async fn start(shelf: Shelf, token: Option<&str>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let shelf = Arc::new(shelf);
        let (ready, metrics) = (Readiness::default(), Arc::new(Metrics::default()));
        let state = State {
            store: shelf.clone(),
            metrics: metrics.clone(),
            ready: ready.clone(),
            token: token.map(|token| Token::new(token).unwrap()),
            version: "1.2.3",
            operations: Arc::from(["orders.create".to_owned()]),
            sinks: Arc::from(["main".to_owned()]),
            explain: Some(Arc::new(Nobody)),
            announce: Arc::new(nothing),
        };
        let stop = CancellationToken::new();
        let task = tokio::spawn(serve(Arc::new(listener), router(state), stop.clone()));
        Self { addr, shelf, ready, metrics, stop, task }
    }

    async fn raw(&self, request: &str) -> Got {
        let mut stream = TcpStream::connect(self.addr).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut text = String::new();
        let read = stream.read_to_string(&mut text);
        tokio::time::timeout(Duration::from_secs(20), read).await.expect("no answer").unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Got { status, head: head.to_lowercase(), body: body.to_owned() }
    }

    async fn get(&self, path: &str) -> Got {
        self.with(path, "localhost", "").await
    }

    async fn post(&self, path: &str, body: &str) -> Got {
        let length = body.len();
        let request = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
             content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        self.raw(&request).await
    }

    async fn with(&self, path: &str, host: &str, more: &str) -> Got {
        let request =
            format!("GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n{more}\r\n");
        self.raw(&request).await
    }
}

#[tokio::test]
async fn readiness_needs_a_serving_gateway_and_a_store_that_answers() {
    let admin = Admin::start(Shelf::default(), None).await;
    let ready = async |gateway: &str, store: &str| {
        let reply = admin.get("/readyz").await;
        let is = gateway == "serving" && store == "ok";
        let mut told = json!({"ready": is, "gateway": gateway, "store": store});
        if store == "unavailable" {
            told["cause"] =
                json!("the database is not available: secret-host refused the connection");
        }
        assert_eq!(reply.json(), told);
        assert_eq!(reply.status, if is { 200 } else { 503 });
        assert_eq!(admin.get("/healthz").await.body, "ok\n");
    };
    ready("starting", "ok").await;
    admin.ready.serving();
    ready("serving", "ok").await;
    admin.shelf.be(Health::Down);
    ready("serving", "unavailable").await;
    admin.shelf.be(Health::Hangs);
    let begun = Instant::now();
    ready("serving", "no answer in time").await;
    assert!(begun.elapsed() < Duration::from_secs(5), "a probe must not hang with the store");
    admin.shelf.be(Health::Up);
    admin.ready.draining();
    ready("draining", "ok").await;
    admin.ready.serving();
    ready("draining", "ok").await;
}

#[tokio::test]
async fn everything_but_the_probes_needs_the_token_where_there_is_one() {
    let admin = Admin::start(Shelf::default(), Some("s3cret")).await;
    for path in ["/metrics", "/api/v1/records", "/api/v1/events", "/api/v1/config", "/nowhere"] {
        for sent in [
            "",
            "authorization: Bearer s3cre\r\n",
            "authorization: Bearer s3crets\r\n",
            "authorization: Bearer\r\n",
            "authorization: Basic s3cret\r\n",
            "authorization: Bearer s3cret\r\nauthorization: Bearer s3cret\r\n",
        ] {
            let reply = admin.with(path, "localhost", sent).await;
            assert_eq!(reply.status, 401, "{path} {sent}");
            assert!(reply.head.contains("www-authenticate: bearer realm=\"oncegate\""));
            assert_eq!(reply.json()["type"], "urn:oncegate:problem:unauthorized");
        }
    }
    let sent = "authorization: bearer s3cret\r\n";
    assert_eq!(admin.with("/api/v1/records", "anything.example", sent).await.status, 200);
    assert_eq!(admin.with("/healthz", "10.0.0.1:9090", "").await.status, 200);
    assert_eq!(admin.with("/readyz", "10.0.0.1:9090", "").await.status, 503);
}

#[tokio::test]
async fn without_a_token_only_the_names_of_this_machine_are_answered() {
    let admin = Admin::start(Shelf::default(), None).await;
    for (host, status) in [
        ("localhost", 200),
        ("LocalHost:9090", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:9090", 200),
        ("attacker.example", 403),
        ("localhost.attacker.example", 403),
        ("localhost:80@attacker.example", 403),
        ("127.0.0.1.nip.io", 403),
        ("localhost:", 403),
    ] {
        assert_eq!(admin.with("/api/v1/records", host, "").await.status, status, "{host}");
        assert_eq!(admin.with("/metrics", host, "").await.status, status, "{host}");
    }
    let twice = admin.with("/metrics", "localhost", "host: attacker.example\r\n").await;
    assert!((400..404).contains(&twice.status), "{}", twice.status);
    let absolute = "GET http://attacker.example/metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    assert_eq!(admin.raw(absolute).await.status, 403);
    let without = "GET /metrics HTTP/1.0\r\n\r\n";
    assert_eq!(admin.raw(without).await.status, 403);
}

#[tokio::test]
async fn metrics_come_in_the_format_that_is_asked_for() {
    let admin = Admin::start(Shelf::default(), None).await;
    admin.metrics.replied("orders.create", Reply::Replayed);
    let open = "accept: application/openmetrics-text; version=1.0.0\r\n";
    for (accept, kind, end) in [
        (open, "application/openmetrics-text; version=1.0.0; charset=utf-8", "# EOF\n"),
        ("accept: */*\r\n", "text/plain; version=0.0.4; charset=utf-8", "\n"),
    ] {
        let reply = admin.with("/metrics", "localhost", accept).await;
        assert!(reply.head.contains(&format!("content-type: {kind}")), "{}", reply.head);
        let line = "oncegate_requests_total{operation=\"orders.create\",reply=\"replayed\"} 1";
        assert!(reply.body.contains(line), "{}", reply.body);
        assert!(reply.body.ends_with(end));
        assert_eq!(reply.body.contains("# EOF"), end.contains("EOF"));
    }
}

#[tokio::test]
async fn a_list_is_read_page_by_page_without_a_gap_or_a_repetition() {
    let records: Vec<_> =
        (1..=5).map(|n| record(n, &format!("k-{n}"), Status::Completed)).collect();
    let events = (1..=5).map(|n| event(n, &records[0], "main", EventStatus::Sent)).collect();
    let admin = Admin::start(Shelf::with(records, events), None).await;
    for (list, field) in [("records", "key"), ("events", "created_at")] {
        let (mut seen, mut path) = (Vec::new(), format!("/api/v1/{list}?limit=2"));
        loop {
            let page = admin.get(&path).await.json();
            let rows = page[list].as_array().unwrap().clone();
            seen.extend(rows.iter().map(|row| row[field].as_str().unwrap().to_owned()));
            let Some(next) = page["next"].as_str() else { break };
            assert_eq!(rows.len(), 2);
            path = format!("/api/v1/{list}?limit=2&cursor={next}");
        }
        assert_eq!(seen.len(), 5, "{seen:?}");
        assert!(seen.windows(2).all(|pair| pair[0] > pair[1]), "newest first: {seen:?}");
    }
    let whole = admin.get("/api/v1/records?limit=5").await.json();
    assert_eq!(whole["next"], Value::Null, "a last page that is full has no next");
}

#[tokio::test]
async fn lists_are_filtered_by_what_the_query_names() {
    let mut other = record(3, "k-1", Status::Unknown);
    other.scope.tenant = oncegate::record::Tenant::stored("b & co");
    let rows = vec![record(1, "k-1", Status::Completed), record(2, "k-2", Status::Unknown), other];
    let admin = Admin::start(Shelf::with(rows, Vec::new()), None).await;
    for (query, wanted) in [
        ("key=k-1", vec![3, 1]),
        ("key=k-1&tenant=acme", vec![1]),
        ("tenant=b+%26%20co", vec![3]),
        ("status=unknown", vec![3, 2]),
        ("operation=other", vec![]),
    ] {
        let page = admin.get(&format!("/api/v1/records?{query}")).await.json();
        let ids: Vec<_> =
            page["records"].as_array().unwrap().iter().map(|row| &row["id"]).collect();
        let wanted: Vec<_> = wanted.iter().map(|n| json!(record_id(*n).to_string())).collect();
        assert_eq!(ids, wanted.iter().collect::<Vec<_>>(), "{query}");
    }
}

#[tokio::test]
async fn a_query_that_is_not_understood_is_refused_by_name() {
    let admin = Admin::start(Shelf::default(), None).await;
    let reply = admin.get("/api/v1/records?tennant=a&limit=0&%3Cscript%3E=1").await;
    assert_eq!(reply.status, 400);
    assert!(reply.head.contains("content-type: application/problem+json"));
    assert!(!reply.body.contains("<script>"), "{}", reply.body);
    let problem = reply.json();
    assert_eq!(problem["type"], "urn:oncegate:problem:query-invalid");
    let errors = problem["errors"].to_string();
    assert!(errors.contains("`tennant`") && errors.contains("`<script>`"), "{errors}");
    for (path, status) in [
        ("/api/v1/records?limit=501", 400),
        ("/api/v1/records?cursor=nonsense", 400),
        ("/api/v1/events?status=unknown", 400),
        ("/api/v1/records/7", 400),
        ("/api/v1/records/%ff", 400),
        ("/api/v1/records/00000000-0000-0000-0000-000000000009", 404),
        ("/api/v1/records/00000000-0000-0000-0000-000000000009?x=1", 400),
        ("/api/v1/events/00000000-0000-0000-0000-000000000009", 404),
        ("/api/v1", 404),
        ("/", 404),
    ] {
        let reply = admin.get(path).await;
        assert_eq!(reply.status, status, "{path}");
        assert!(reply.head.contains("content-type: application/problem+json"), "{path}");
        assert_eq!(reply.json()["status"], status, "{path}");
    }
}

#[tokio::test]
async fn one_record_is_shown_with_its_answer_its_events_and_its_audit() {
    let row = record(1, "<script>\u{1b}[2J", Status::Completed);
    let events = vec![event(1, &row, "main", EventStatus::Sent)];
    let admin = Admin::start(Shelf::with(vec![row], events), None).await;
    let reply = admin.get(&format!("/api/v1/records/{}", record_id(1))).await;
    assert!(reply.head.contains("x-content-type-options: nosniff"));
    assert!(reply.head.contains("cache-control: no-store"));
    assert!(reply.body.contains("\"\\u003cscript\\u003e\\u001b[2J\""), "{}", reply.body);
    let life = reply.json();
    assert_eq!(life["record"]["key"], "<script>\u{1b}[2J");
    assert_eq!(life["record"]["response_status"], 201);
    assert_eq!(life["record"]["response_headers"], json!([["content-type", "application/json"]]));
    assert_eq!(life["record"]["response_body"], "{\"id\":1}");
    assert_eq!(life["events"][0]["sent_at"], "2031-01-01T00:01:30.000000Z");
    assert_eq!(life["audit"], json!([]));

    let id = life["events"][0]["id"].as_str().unwrap();
    let shown = admin.get(&format!("/api/v1/events/{id}")).await.json();
    assert_eq!(shown["events"][0]["payload"], "{\"type\":\"order.created\"}");
    let listed = admin.get("/api/v1/events").await.json();
    assert_eq!(listed["events"][0].get("payload"), None);
}

#[tokio::test]
async fn a_database_that_is_away_is_said_without_its_secrets() {
    let admin = Admin::start(Shelf::default(), None).await;
    admin.shelf.be(Health::Down);
    for path in ["/api/v1/records", "/api/v1/events"] {
        let reply = admin.get(path).await;
        assert_eq!(reply.status, 503);
        assert_eq!(reply.json()["type"], "urn:oncegate:problem:store-unavailable");
        assert!(!reply.body.contains("secret-host"), "{}", reply.body);
    }
    // Why it is not ready is for operators.
    let guarded = Admin::start(Shelf::default(), Some("t0ken")).await;
    guarded.shelf.be(Health::Down);
    for (admin, more) in [(&admin, "origin: https://elsewhere.example\r\n"), (&guarded, "")] {
        let reply = admin.with("/readyz", "localhost", more).await;
        assert_eq!(reply.json()["store"], "unavailable");
        assert!(!reply.body.contains("secret-host"), "{}", reply.body);
    }
    let reply = guarded.with("/readyz", "localhost", "authorization: Bearer t0ken\r\n").await;
    assert!(reply.body.contains("secret-host"), "{}", reply.body);
}

#[tokio::test]
async fn no_key_reaches_the_log() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_writer(move || writer.clone())
        .finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    let row = record(1, "private-key-1", Status::Completed);
    let admin = Admin::start(Shelf::with(vec![row], Vec::new()), None).await;
    assert_eq!(admin.get("/api/v1/records?key=private-key-1").await.status, 200);
    assert_eq!(admin.get("/api/v1/records?key=private-key-1&zz=1").await.status, 400);
    admin.shelf.be(Health::Down);
    assert_eq!(admin.get("/api/v1/records?key=private-key-1").await.status, 503);
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    assert!(text.contains("could not read the store"), "what went wrong is logged: {text}");
    assert!(!text.contains("private-key-1"), "{text}");
}

/// What was logged.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn events_are_acted_on_as_by_the_commands() {
    let row = record(1, "k", Status::Completed);
    let statuses = [EventStatus::Sent, EventStatus::Dead, EventStatus::Dead, EventStatus::Pending];
    let events = statuses.into_iter().zip(1..).map(|(status, n)| event(n, &row, "main", status));
    let admin = Admin::start(Shelf::with(vec![row.clone()], events.collect()), None).await;
    let one =
        |n: u128, what: &str| format!("/api/v1/events/{}/{what}", Uuid::from_u128(0xe000 + n));
    let dead = |what: &str| format!("/api/v1/events/{what}");

    let shown = admin.get(one(2, "").trim_end_matches('/')).await.json();
    assert_eq!(shown["events"][0]["age_seconds"], 3 * 86_400 + 4 * 3600 + 17);
    assert_eq!(shown["attempts"][0]["error"], "500 from the sink");
    let counted = admin.post(&dead("discard"), r#"{"status":"dead","dry_run":true}"#).await;
    assert_eq!(counted.json(), json!({ "discarded": 2, "dry_run": true }));
    assert!(admin.shelf.audit.lock().unwrap().is_empty(), "nothing is done");
    let asked = r#"{"sink":"main","who":"olga","reason":"fixed"}"#;
    let done = admin.post(&one(2, "redeliver"), asked).await.json();
    assert_eq!((&done["redelivered"], &done["by"]), (&json!(1), &json!("olga (admin listener)")));
    let noted = admin.shelf.audit.lock().unwrap()[0].clone();
    assert_eq!((noted.action.as_str(), noted.why.as_deref()), ("event.redeliver", Some("fixed")));
    assert_eq!(done["sinks"], json!([{ "sink": "main", "result": "queued" }]));
    let done = admin.post(&dead("redeliver"), r#"{"status":"dead","type":"order.created"}"#).await;
    assert_eq!(done.json()["redelivered"], 1);

    for (n, what, status, name) in [
        (1, "discard", 409, "sent"),
        (1, "redeliver", 409, "sent"),
        (4, "discard", 409, "delivering"),
        (4, "redeliver", 409, "delivering"),
        (9, "redeliver", 404, "not-found"),
    ] {
        let refused = admin.post(&one(n, what), "").await;
        assert_eq!(refused.status, status, "{n} {what}");
        assert_eq!(refused.json()["type"], format!("urn:oncegate:problem:{name}"));
    }
    let before = admin.shelf.audit.lock().unwrap().len();
    for (body, wrong) in [
        ("", "`status`: must be \"dead\""),
        (r#"{"status":"sent"}"#, "`status`: only `dead` is allowed"),
        (r#"{"status":"dead","since":"soon"}"#, "`since`: a duration such as 90s, 15m, 1h or 7d"),
        (r#"{"status":"dead","kind":"a"}"#, "unknown field `kind`"),
        (r#"{"status":"dead","sink":"mian"}"#, "`sink`: no such sink; did you mean `main`?"),
        (r#"{"status":"dead","who":" "}"#, "`who`: a name of at most 200 characters"),
    ] {
        let refused = admin.post(&dead("discard"), body).await;
        assert_eq!(refused.status, 400, "{body}");
        let told = refused.json()["errors"][0].as_str().unwrap().to_owned();
        assert!(told.contains(wrong), "{told}");
    }
    for (what, body, wrong) in [
        ("discard", r#"{"all_sinks":true}"#, "`all_sinks`: what was sent is not discarded"),
        ("redeliver", r#"{"all_sinks":true,"sink":"main"}"#, "`all_sinks`: not beside `sink`"),
        ("redeliver", r#"{"sink":"mian"}"#, "`sink`: no such sink; did you mean `main`?"),
    ] {
        let refused = admin.post(&one(1, what), body).await;
        assert_eq!((refused.status, &refused.json()["errors"][0]), (400, &json!(wrong)));
    }
    // A page of somebody else's, in a browser, cannot say that it sends JSON.
    let plain = format!(
        "POST {} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: text/plain\r\n\
         content-length: 17\r\n\r\n{{\"status\":\"dead\"}}",
        dead("discard")
    );
    assert_eq!(admin.raw(&plain).await.status, 400);
    assert_eq!(admin.shelf.audit.lock().unwrap().len(), before, "the store was asked for nothing");
    let again = admin.post(&one(1, "redeliver"), r#"{"all_sinks":true}"#).await.json();
    assert_eq!(again["sinks"], json!([{ "sink": "main", "result": "queued" }]));
}

#[tokio::test]
async fn what_only_reads_cannot_be_written() {
    let admin = Admin::start(Shelf::default(), None).await;
    for path in ["/healthz", "/metrics", "/api/v1/records"] {
        let request =
            format!("DELETE {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        let reply = admin.raw(&request).await;
        assert_eq!(reply.status, 405, "{path}");
        assert_eq!(reply.json()["type"], "urn:oncegate:problem:method-not-allowed");
    }
    let config = admin.get("/api/v1/config").await.json();
    assert_eq!(config, json!({"version": "1.2.3", "operations": ["orders.create"]}));
}

#[tokio::test]
async fn it_stops_although_a_caller_sits_on_its_connection() {
    let admin = Admin::start(Shelf::default(), None).await;
    let mut idle = TcpStream::connect(admin.addr).await.unwrap();
    // The half of a request shows that the connection is served before the stop.
    idle.write_all(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\nGET ").await.unwrap();
    assert_ne!(idle.read(&mut [0; 4096]).await.unwrap(), 0);
    admin.stop.cancel();
    tokio::time::timeout(Duration::from_secs(20), admin.task).await.unwrap().unwrap();
}
