//! NATS JetStream and Redis Streams as sinks, against the real servers: what is kept there, what a refusal becomes, and
//! what a broker that dies costs.

use std::collections::BTreeSet;
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_nats::ConnectOptions;
use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::future::join_all;
use oncegate::record::event::subscription::TypeFilter;
use oncegate::relay::sink::broker::{Login, Tls};
use oncegate::relay::sink::http::Identity;
use oncegate::relay::sink::{self, Delivered, Target, nats, redis};
use oncegate::relay::verdict::Evidence;
use oncegate::store::{Claimed, EventStatus, Order, Verdict};
use serde_json::json;
use tokio::time::Instant;
use uuid::Uuid;

use crate::relay::Running;
use crate::support::broker::{Nats, Redis};
use crate::support::fake::Fake;
use crate::support::fault::Fault;
use crate::support::fleet::{self, order};
use crate::support::orders::Orders;
use crate::support::process::{self, Gateway, eventually, free_port};
use crate::support::rig::{self, Place, Which};
use crate::support::sink::{OK, Sink};
use crate::webhooks::Authority;

const MS: Duration = Duration::from_millis(1);

fn settings(target: Target) -> sink::Settings {
    sink::Settings {
        name: "main".into(),
        timeout: Duration::from_secs(5),
        concurrency: 16,
        backoff_base: 100 * MS,
        backoff_max: 400 * MS,
        attempts_max: 1000,
        age_max: Duration::from_secs(3600),
        refusals_max: 5,
        events: TypeFilter::default(),
        pause_after: 10,
        order: Order::None,
        target,
    }
}

fn to_nats(url: &str, subject: &str) -> nats::Settings {
    nats::Settings {
        servers: nats::servers(url).unwrap(),
        subject: nats::Subject::parse(subject).unwrap(),
        login: Login::Nobody,
        tls: Tls::default(),
    }
}

fn to_redis(url: &str, stream: &str) -> redis::Settings {
    redis::Settings {
        server: redis::Server::parse(url).unwrap(),
        stream: stream.into(),
        length_max: None,
        login: Login::Nobody,
        tls: Tls::default(),
    }
}

fn nats_sink(to: nats::Settings) -> sink::Sink {
    sink::Sink::new(settings(Target::Nats(to))).unwrap()
}

fn redis_sink(to: redis::Settings) -> sink::Sink {
    sink::Sink::new(settings(Target::Redis(to))).unwrap()
}

/// An event whose values would break out of headers and subjects.
fn event(payload: &str) -> Claimed {
    Claimed {
        event_id: Uuid::new_v4(),
        claim_no: 1,
        attempts: 0,
        refusals: 0,
        age: Duration::ZERO,
        kind: "order.created".into(),
        tenant: "Zoë & Co.>".into(),
        operation: "POST /orders".into(),
        key: "k: 1\"%".into(),
        payload: Bytes::copy_from_slice(payload.as_bytes()),
    }
}

/// What the sink is said to have done, where it failed.
fn failure(end: &Delivered) -> &str {
    match &end.evidence {
        Evidence::Failed { what } => what,
        other @ (Evidence::Answered { .. } | Evidence::Taken | Evidence::Refused { .. }) => {
            panic!("{other:?}")
        }
    }
}

fn refusal(end: &Delivered) -> &str {
    match &end.evidence {
        Evidence::Refused { what } => what,
        other @ (Evidence::Answered { .. } | Evidence::Taken | Evidence::Failed { .. }) => {
            panic!("{other:?}")
        }
    }
}

#[tokio::test]
async fn a_nats_stream_keeps_an_event_once_with_its_id_its_headers_and_its_bytes() {
    let nats = Nats::start("").await;
    nats.stream("ORDERS", "orders.>", &json!({})).await;
    let sink = nats_sink(to_nats(&nats.url(), "orders.{tenant}.{type}.{operation}"));
    let sent = event(r#"{"z":1.0,"u":"é/<","a":12345678901234567890}"#);
    let other = Claimed { event_id: Uuid::new_v4(), ..sent.clone() };
    // The same event twice at once, and once more when it has long been acknowledged.
    let ends = join_all([sink.deliver(&sent), sink.deliver(&other), sink.deliver(&sent)]).await;
    let again = nats_sink(to_nats(&nats.url(), "orders.{tenant}.{type}.{operation}"));
    let last = again.deliver(&sent).await;
    assert!(
        ends.iter().chain([&last]).all(|end| end.evidence == Evidence::Taken),
        "{ends:?} {last:?}"
    );

    let kept = nats.kept("ORDERS").await;
    let ids: BTreeSet<_> =
        kept.iter().map(|message| message.header("Nats-Msg-Id").to_owned()).collect();
    assert_eq!((kept.len(), ids.len()), (2, 2), "a duplicate is no second message");
    assert!(ids.contains(&sent.event_id.to_string()) && ids.contains(&other.event_id.to_string()));
    for message in &kept {
        assert_eq!(
            message.subject,
            "orders.Zo%C3%AB%20%26%20Co%2E%3E.order.created.POST%20%2Forders"
        );
        assert_eq!(message.body, sent.payload);
        for (name, value) in [
            ("Content-Type", "application/json"),
            ("Oncegate-Type", "order.created"),
            ("Oncegate-Tenant", "Zo%C3%AB%20&%20Co.>"),
            ("Oncegate-Operation", "POST%20/orders"),
            ("Oncegate-Key", "k:%201%22%25"),
        ] {
            assert_eq!(message.header(name), value, "{name}");
        }
    }
}

#[tokio::test]
async fn what_no_nats_stream_has_acknowledged_is_not_delivered_and_says_why() {
    let nats = Nats::start("max_payload: 65536").await;
    nats.stream("SMALL", "small.>", &json!({ "max_msg_size": 1000 })).await;
    nats.stream("FULL", "full.>", &json!({ "max_msgs": 1, "discard": "new" })).await;
    let to = |subject: &str| nats_sink(to_nats(&nats.url(), subject));
    let begun = Instant::now();

    let nobody = to("nobody.{type}").deliver(&event("{}")).await;
    assert!(
        failure(&nobody).contains("no stream takes the subject nobody.order.created"),
        "{nobody:?}"
    );

    // Somebody who listens and answers is no stream.
    let client = nats.client().await;
    let mut heard = client.subscribe("heard.>").await.unwrap();
    client.flush().await.unwrap();
    let answering = tokio::spawn(async move {
        let message = heard.next().await.unwrap();
        client.publish(message.reply.unwrap(), "+OK".into()).await.unwrap();
        heard
    });
    let heard = to("heard.{type}").deliver(&event("{}")).await;
    assert!(failure(&heard).contains("no stream"), "{heard:?}");
    drop(answering.await.unwrap());

    let full = to("full.{type}");
    assert_eq!(full.deliver(&event("{}")).await.evidence, Evidence::Taken);
    let over = full.deliver(&event("{}")).await;
    assert!(failure(&over).contains("maximum messages exceeded"), "may be emptied: {over:?}");

    let large = event(&format!("\"{}\"", "x".repeat(2000)));
    let end = to("small.{type}").deliver(&large).await;
    assert!(refusal(&end).contains("message size exceeds"), "{end:?}");
    let huge = event(&format!("\"{}\"", "x".repeat(70_000)));
    let end = to("full.{type}").deliver(&huge).await;
    assert!(refusal(&end).contains("max payload"), "{end:?}");
    let long = Claimed { operation: ".é".repeat(120), ..event("{}") };
    let end = to("full.{operation}.{operation}").deliver(&long).await;
    assert!(refusal(&end).contains("the subject has"), "{end:?}");
    assert!(begun.elapsed() < Duration::from_secs(4), "none was found out by a time-out");
}

#[tokio::test]
async fn a_nats_broker_that_asks_for_a_log_in_and_tls_gets_both() {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let folder = tempfile::TempDir::new().unwrap();
    let file = |name: &str, text: &str| -> PathBuf {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let certificate = file("cert.pem", &made.cert.pem());
    let key = file("key.pem", &made.signing_key.serialize_pem());
    let more = format!(
        "tls {{ cert_file: {certificate:?}, key_file: {key:?} }}\nauthorization {{ users = [\
         {{ user: admin, password: root }}, \
         {{ user: app, password: geheim, permissions: {{ publish: \"orders.>\" }} }}] }}"
    );
    let nats =
        Nats::new(&more, || ConnectOptions::with_user_and_password("admin".into(), "root".into()));
    nats.server.start();
    let url = format!("tls://localhost:{}", nats.server.port);
    let to = |subject: &str, password: &str, trusted: bool| {
        let login = Login::User { name: "app".into(), password: password.into() };
        let tls = Tls { ca_file: trusted.then(|| certificate.clone()), client: None };
        nats_sink(nats::Settings { login, tls, ..to_nats(&url, subject) })
    };
    let right = to("orders.{type}", "geheim", true);
    eventually("the server serves", async || {
        failure(&right.deliver(&event("{}")).await).contains("no stream takes")
    })
    .await;

    let begun = Instant::now();
    let wrong = to("orders.{type}", "falsch", true).deliver(&event("{}")).await;
    assert!(failure(&wrong).contains("authorization violation"), "{wrong:?}");
    let stranger = to("orders.{type}", "geheim", false).deliver(&event("{}")).await;
    assert!(failure(&stranger).contains("certificate"), "{stranger:?}");
    let forbidden = to("other.{type}", "geheim", true).deliver(&event("{}")).await;
    assert!(failure(&forbidden).contains("Permissions Violation"), "{forbidden:?}");
    assert!(begun.elapsed() < Duration::from_secs(4), "none was found out by a time-out");
}

/// Two hundred events while the server dies and comes back: `kept` counts what it holds, at the end.
async fn through_a_crash(
    target: Target,
    server: &crate::support::broker::Server,
    kept: impl AsyncFn() -> usize,
) -> Arc<Fake> {
    const EVENTS: usize = 200;
    let fake = Arc::new(Fake::default());
    for n in 0..EVENTS {
        fake.add(&format!("{{\"n\":{n}}}"));
    }
    // Few at a time, so that the kill falls in between.
    let slow = sink::Settings { concurrency: 2, ..settings(target) };
    let running = Running::start(&fake, vec![slow]);
    eventually("the middle", async || fake.count(EventStatus::Sent) >= EVENTS / 4).await;
    server.kill9();
    assert!(fake.count(EventStatus::Sent) < EVENTS, "killed in the middle");
    let failed = || {
        let verdicts = fake.acknowledged.lock().unwrap();
        verdicts
            .iter()
            .any(|end| matches!(end.verdict, Verdict::Retry { .. } | Verdict::Returned { .. }))
    };
    eventually("a failure", async || failed()).await;
    server.start();
    eventually("all are sent", async || fake.count(EventStatus::Sent) == EVENTS).await;
    running.stop().await;
    let waited = fake.acknowledged.lock().unwrap().iter().any(|end| {
        let (Verdict::Retry { error, .. } | Verdict::Returned { error, .. }) = &end.verdict else {
            return false;
        };
        error.contains("time-out")
    });
    assert!(!waited, "what was in flight fails with its connection");
    assert!(kept().await >= EVENTS);
    fake
}

#[tokio::test]
async fn a_nats_server_that_is_killed_in_the_middle_loses_nothing_and_keeps_each_event_once() {
    let nats = Nats::start("").await;
    nats.stream("ORDERS", "orders.>", &json!({})).await;
    let target = Target::Nats(to_nats(&nats.url(), "orders.{type}"));
    let count = async || usize::try_from(nats.count("ORDERS").await).unwrap();
    let fake = through_a_crash(target, &nats.server, count).await;
    let kept = nats.kept("ORDERS").await;
    let ids: BTreeSet<_> =
        kept.iter().map(|message| message.header("Nats-Msg-Id").to_owned()).collect();
    let owed: BTreeSet<_> = fake.rows.lock().unwrap().keys().map(Uuid::to_string).collect();
    assert_eq!(ids, owed);
    assert_eq!(kept.len(), owed.len(), "the stream deduplicates, also over its restart");
}

#[tokio::test]
async fn a_redis_server_that_is_killed_in_the_middle_loses_nothing() {
    let redis = Redis::start(&[]).await;
    let target = Target::Redis(to_redis(&redis.url(), "orders"));
    let count = async || {
        redis.serves().await;
        redis.entries("orders").await.len()
    };
    let fake = through_a_crash(target, &redis.server, count).await;
    let ids: BTreeSet<_> =
        redis.entries("orders").await.into_iter().map(|e| e["id"].clone()).collect();
    let owed: BTreeSet<_> = fake.rows.lock().unwrap().keys().map(Uuid::to_string).collect();
    assert_eq!(ids, owed);
}

#[tokio::test]
async fn a_redis_stream_has_an_entry_for_each_delivery_with_the_events_id_as_a_field() {
    let redis = Redis::start(&[]).await;
    let sink = redis_sink(to_redis(&redis.url(), "orders"));
    let sent = event(r#"{"u":"é\r\n"}"#);
    let ends = join_all([sink.deliver(&sent), sink.deliver(&sent)]).await;
    assert!(ends.iter().all(|end| end.evidence == Evidence::Taken), "{ends:?}");
    let entries = redis.entries("orders").await;
    assert_eq!(entries.len(), 2, "Redis does not deduplicate");
    for entry in &entries {
        let expected = [
            ("id", sent.event_id.to_string()),
            ("key", sent.key.clone()),
            ("operation", sent.operation.clone()),
            ("payload", String::from_utf8(sent.payload.to_vec()).unwrap()),
            ("tenant", sent.tenant.clone()),
            ("type", sent.kind.clone()),
        ];
        let fields: Vec<_> =
            entry.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
        assert_eq!(fields, expected);
    }
    // Trimmed by whole nodes of a hundred entries.
    let short = redis::Settings { length_max: Some(100), ..to_redis(&redis.url(), "short") };
    let short = redis_sink(short);
    for _ in 0..5 {
        join_all((0..100).map(|_| short.deliver(&sent))).await;
    }
    assert!((100..300).contains(&redis.entries("short").await.len()));
}

#[tokio::test]
async fn what_redis_refuses_waits_for_an_operator_and_says_why() {
    let redis = Redis::start(&[]).await;
    redis.ask(&["SET", "text", "x"]).await;
    let sink = redis_sink(to_redis(&redis.url(), "text"));
    let end = sink.deliver(&event("{}")).await;
    assert!(failure(&end).contains("WRONGTYPE"), "{end:?}");
    redis.ask(&["DEL", "text"]).await;
    assert_eq!(sink.deliver(&event("{}")).await.evidence, Evidence::Taken, "helped");

    redis.ask(&["CONFIG", "SET", "maxmemory", "1"]).await;
    let end = sink.deliver(&event("{}")).await;
    assert!(failure(&end).contains("OOM"), "{end:?}");
    redis.ask(&["CONFIG", "SET", "maxmemory", "0"]).await;

    // A replica: its connection is given up, since the name may lead to another server by now.
    let connections = async || {
        let info: String = ::redis::from_redis_value(redis.ask(&["INFO", "stats"]).await).unwrap();
        let line = info.lines().find_map(|l| l.strip_prefix("total_connections_received:"));
        line.unwrap().parse::<u64>().unwrap()
    };
    redis.ask(&["REPLICAOF", "127.0.0.1", "1"]).await;
    let before = connections().await;
    let end = sink.deliver(&event("{}")).await;
    assert!(failure(&end).contains("READONLY"), "{end:?}");
    redis.ask(&["REPLICAOF", "NO", "ONE"]).await;
    assert_eq!(sink.deliver(&event("{}")).await.evidence, Evidence::Taken);
    assert_eq!(connections().await, before + 3, "two of the test's own, and a fresh one");

    redis.ask(&["ACL", "SETUSER", "app", "on", ">geheim", "~orders", "+xadd"]).await;
    let to = |stream: &str, password: &str| {
        let login = Login::User { name: "app".into(), password: password.into() };
        redis_sink(redis::Settings { login, ..to_redis(&redis.url(), stream) })
    };
    assert_eq!(to("orders", "geheim").deliver(&event("{}")).await.evidence, Evidence::Taken);
    let wrong = to("orders", "falsch").deliver(&event("{}")).await;
    assert!(
        failure(&wrong).contains("WRONGPASS") || failure(&wrong).contains("uthentication"),
        "{wrong:?}"
    );
    let forbidden = to("other", "geheim").deliver(&event("{}")).await;
    assert!(failure(&forbidden).contains("NOPERM"), "{forbidden:?}");
}

#[tokio::test]
async fn a_broker_that_is_away_or_silent_fails_by_the_deadline_and_is_dialled_once_for_all() {
    let away = free_port();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    silent.set_nonblocking(true).unwrap();
    let mute = silent.local_addr().unwrap().port();
    let targets = |port: u16| {
        [
            Target::Nats(to_nats(&format!("nats://127.0.0.1:{port}"), "orders.{type}")),
            Target::Redis(to_redis(&format!("redis://127.0.0.1:{port}"), "orders")),
        ]
    };
    for target in targets(away) {
        let sink = sink::Sink::new(settings(target)).unwrap();
        let begun = Instant::now();
        let end = sink.deliver(&event("{}")).await;
        assert!(failure(&end).contains("refused"), "{end:?}");
        assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    }
    for target in targets(mute) {
        let short = sink::Settings { timeout: 300 * MS, ..settings(target) };
        let sink = sink::Sink::new(short).unwrap();
        let begun = Instant::now();
        let sent = event("{}");
        for end in join_all((0..8).map(|_| sink.deliver(&sent))).await {
            assert!(failure(&end).contains("connecting"), "{end:?}");
        }
        assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
        // Who has dialled stands in the backlog.
        let dialled = std::iter::from_fn(|| silent.accept().ok()).count();
        assert_eq!(dialled, 1, "dialled for eight events");
    }
}

/// A broker's certificate and what it takes for a client's, and a client's settings: with a certificate of the authority,
/// with none, and with one of a stranger.
struct Papers {
    authority: Authority,
    server: Identity,
    ours: Tls,
    wrong: [(Tls, &'static str); 3],
    /// Its files stay as long as they are named.
    _stranger: Authority,
}

impl Papers {
    fn new() -> Self {
        let (authority, stranger) = (Authority::new(), Authority::new());
        let server = authority.sign("localhost");
        let shown = |by: &Authority| {
            let Identity { cert_file, key_file } = by.sign("oncegate");
            Some((cert_file, key_file))
        };
        let ca_file = Some(authority.path("ca.pem"));
        let ours = Tls { ca_file: ca_file.clone(), client: shown(&authority) };
        let wrong = [
            (Tls { ca_file: ca_file.clone(), client: None }, "certificate"),
            (Tls { ca_file, client: shown(&stranger) }, ""),
            // The system does not know this authority.
            (Tls { ca_file: None, client: ours.client.clone() }, "certificate"),
        ];
        Self { authority, server, ours, wrong, _stranger: stranger }
    }
}

#[tokio::test]
async fn a_redis_broker_behind_tls_is_known_and_sees_the_certificate_that_it_asks_for() {
    let (papers, port) = (Papers::new(), free_port());
    let text = |path: &std::path::Path| path.display().to_string();
    let (secure, ca) = (port.to_string(), text(&papers.authority.path("ca.pem")));
    let (cert, key) = (text(&papers.server.cert_file), text(&papers.server.key_file));
    let redis = Redis::start(&[
        "--tls-port",
        &secure,
        "--tls-cert-file",
        &cert,
        "--tls-key-file",
        &key,
        "--tls-ca-cert-file",
        &ca,
    ])
    .await;
    let to = |tls: &Tls| {
        let url = format!("rediss://localhost:{port}/0");
        redis_sink(redis::Settings { tls: tls.clone(), ..to_redis(&url, "orders") })
    };
    let begun = Instant::now();
    let ours = to(&papers.ours);
    let sent = event("{}");
    let ends = join_all((0..4).map(|_| ours.deliver(&sent))).await;
    assert!(ends.iter().all(|end| end.evidence == Evidence::Taken), "{ends:?}");
    for (tls, cause) in &papers.wrong {
        let end = to(tls).deliver(&event("{}")).await;
        assert!(failure(&end).to_lowercase().contains(cause), "{tls:?}: {end:?}");
    }
    assert_eq!(redis.entries("orders").await.len(), 4, "nobody else gets through");
    assert!(begun.elapsed() < Duration::from_secs(4), "none was found out by a time-out");
}

#[tokio::test]
async fn a_nats_broker_sees_the_certificate_that_it_asks_for() {
    let papers = Papers::new();
    let Identity { cert_file, key_file } = &papers.server;
    let ca = papers.authority.path("ca.pem");
    let more = format!(
        "tls {{ cert_file: {cert_file:?}, key_file: {key_file:?}, ca_file: {ca:?}, verify: true }}"
    );
    let nats = Nats::new(&more, ConnectOptions::new);
    nats.server.start();
    let to = |tls: &Tls| {
        let url = format!("tls://localhost:{}", nats.server.port);
        nats_sink(nats::Settings { tls: tls.clone(), ..to_nats(&url, "orders.{type}") })
    };
    let ours = to(&papers.ours);
    eventually("the server serves", async || {
        failure(&ours.deliver(&event("{}")).await).contains("no stream takes")
    })
    .await;
    let begun = Instant::now();
    for (tls, cause) in &papers.wrong {
        let end = to(tls).deliver(&event("{}")).await;
        let what = failure(&end).to_lowercase();
        assert!(what.starts_with("connecting: ") && what.contains(cause), "{tls:?}: {end:?}");
    }
    assert!(begun.elapsed() < Duration::from_secs(4), "none was found out by a time-out");
}

#[tokio::test]
async fn what_is_in_flight_fails_with_its_nats_connection_though_another_one_can_be_had_at_once() {
    let nats = Nats::start("").await;
    nats.stream("ORDERS", "orders.>", &json!({})).await;
    // Somebody listens who never answers.
    let client = nats.client().await;
    let mut heard = client.subscribe("heard.>").await.unwrap();
    client.flush().await.unwrap();
    let wire = Fault::before(([127, 0, 0, 1], nats.server.port).into()).await;
    let sink = nats_sink(to_nats(&format!("nats://{}", wire.addr), "{type}"));
    let of = |kind: &str| Claimed { kind: kind.into(), ..event("{}") };
    assert_eq!(sink.deliver(&of("orders.a")).await.evidence, Evidence::Taken);
    let (waits, begun) = (of("heard.b"), Instant::now());
    let cut = async {
        heard.next().await.unwrap();
        wire.cut();
    };
    let (end, ()) = tokio::join!(sink.deliver(&waits), cut);
    assert!(failure(&end).contains("the connection was lost"), "{end:?}");
    assert!(begun.elapsed() < Duration::from_secs(3), "found out by a time-out");
    assert_eq!(sink.deliver(&of("orders.c")).await.evidence, Evidence::Taken);
    assert_eq!(nats.count("ORDERS").await, 2);
}

#[tokio::test]
async fn of_several_nats_servers_one_that_is_up_is_used_also_when_another_one_is_by_then() {
    let (first, second) = (Nats::new("", ConnectOptions::new), Nats::start("").await);
    second.stream("ORDERS", "orders.>", &json!({})).await;
    let url = format!("{},{}", first.url(), second.url());
    let sink = nats_sink(to_nats(&url, "orders.{type}"));
    assert_eq!(sink.deliver(&event("{}")).await.evidence, Evidence::Taken);
    assert_eq!(second.count("ORDERS").await, 1);

    first.server.start();
    first.client().await;
    first.stream("ORDERS", "orders.>", &json!({})).await;
    second.server.kill9();
    eventually("the other one is found", async || {
        sink.deliver(&event("{}")).await.evidence == Evidence::Taken
    })
    .await;
    assert_eq!(first.count("ORDERS").await, 1);
}

#[tokio::test]
async fn an_entry_that_redis_never_takes_costs_no_other_delivery() {
    let redis = Redis::start(&[]).await;
    redis.ask(&["CONFIG", "SET", "proto-max-bulk-len", "1048576"]).await;
    let sink = redis_sink(to_redis(&redis.url(), "orders"));
    assert_eq!(sink.deliver(&event("{}")).await.evidence, Evidence::Taken);
    for size in [1_048_577, 8 << 20] {
        let large = event(&"x".repeat(size));
        let end = sink.deliver(&large).await;
        // The server says why and hangs up while it is still being sent to: which comes first is chance.
        let told = match &end.evidence {
            Evidence::Refused { what } => what.contains("bulk length"),
            Evidence::Failed { .. } => true,
            Evidence::Taken | Evidence::Answered { .. } => false,
        };
        assert!(told, "{size}: {end:?}");
        assert_eq!(sink.deliver(&event("{}")).await.evidence, Evidence::Taken);
    }
    assert_eq!(redis.entries("orders").await.len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn serve_starts_without_its_brokers_and_feeds_each_of_three_kinds_of_sinks() {
    let webhook = Sink::start(|_, _| OK).await;
    let (nats, redis) = (Nats::new("", ConnectOptions::new), Redis::new(&[]));
    let more = format!(
        "{}[[sink]]\nname = \"stream\"\nurl = \"{}\"\nsubject = \"events.{{tenant}}.{{type}}\"\n\
         timeout = \"2s\"\nbackoff = {{ base = \"100ms\", max = \"300ms\" }}\n\
         [[sink]]\nname = \"redis\"\nurl = \"{}\"\nstream = \"events\"\n\
         timeout = \"2s\"\nbackoff = {{ base = \"100ms\", max = \"300ms\" }}\n",
        fleet::sink(webhook.port),
        nats.url(),
        redis.url(),
    );
    let (orders, place) = (Orders::start().await, Place::new(Which::Sqlite).await);
    let toml = rig::config(&place, &orders.url(), &more);
    let gateway = Gateway::start(&process::config(place.folder.path(), &toml));
    assert_eq!(order("k").to(gateway.addr).await.status, 201);
    let tried = "select count(*) from outbox_events where status = 'pending' and attempts > 0";
    eventually("both brokers are missed", async || place.count(tried).await == 2).await;
    let rows = place.rows("select last_error from outbox_events where status = 'pending'").await;
    assert!(
        rows.iter().flatten().all(|text| text.as_ref().unwrap().contains("connecting: ")),
        "{rows:?}"
    );

    redis.server.start();
    nats.server.start();
    nats.client().await;
    nats.stream("EVENTS", "events.>", &json!({})).await;
    let sent = "select count(*) from outbox_events where status = 'sent'";
    eventually("all three have it", async || place.count(sent).await == 3).await;
    let (hook, message) = (&webhook.seen()[0], &nats.kept("EVENTS").await[0]);
    let entry = &redis.entries("events").await[0];
    assert_eq!(message.subject, "events.acme.orders.create");
    assert_eq!(
        (message.header("Nats-Msg-Id"), entry["id"].as_str()),
        (hook.id().as_str(), hook.id().as_str())
    );
    assert_eq!((&message.body, entry["payload"].as_bytes()), (&hook.body, hook.body.as_slice()));
    let log = gateway.log();
    assert!(!log.contains("async_nats"), "the library is silent:\n{log}");
}
