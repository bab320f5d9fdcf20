//! One delivery to a webhook: its steps and their deadline, who may be dialled, what is sent in each format and with which
//! secrets, and what of it is shown to a sink that asks for a certificate.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use ::http::{HeaderMap, HeaderValue};
use async_trait::async_trait;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::future::join_all;
use oncegate::relay::sink::http::{Format, Identity, Resolve};
use oncegate::relay::sink::{self, Target, http};
use oncegate::relay::verdict::Evidence;
use oncegate::store::Claimed;
use oncegate::telemetry::Exposition;
use serde_json::{Value, json};
use standardwebhooks::Webhook;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::Instant;
use uuid::Uuid;

use crate::relay::{Running, sent, settings, webhook};
use crate::support::client::post;
use crate::support::fake::Fake;
use crate::support::fleet;
use crate::support::orders::Orders;
use crate::support::process::{self, Gateway};
use crate::support::python::script;
use crate::support::rig::{self, Place, Rig, Which, on_both_stores};
use crate::support::sink::{Act, OK, SECRET, Seen, Sink};
use crate::support::{eventually, happens};

const LONG: Duration = Duration::from_secs(20);
const MS: Duration = Duration::from_millis(1);
const OTHER: &str = "whsec_ZmVkY2JhOTg3NjU0MzIxMGZlZGNiYTk4NzY1NDMyMTA=";
/// A public address that nobody has: not assigned, and in most places without a route.
const NOBODY: &str = "[2c0f:ffff:ffff::1]:9";

/// What a relay would hand over: the message of an order.
fn claimed(payload: &str) -> Claimed {
    Claimed {
        event_id: Uuid::new_v4(),
        claim_no: 1,
        attempts: 0,
        refusals: 0,
        age: Duration::ZERO,
        kind: "order.created".into(),
        tenant: "t".into(),
        operation: "orders.create".into(),
        key: "k".into(),
        payload: payload.to_owned().into(),
    }
}

fn made(target: http::Settings, timeout: Duration) -> sink::Sink {
    let common = sink::Settings {
        name: "main".into(),
        timeout,
        concurrency: 4,
        backoff_base: MS,
        backoff_max: MS,
        attempts_max: 3,
        age_max: MS,
        refusals_max: 5,
        pause_after: 1_000_000,
        order: oncegate::store::Order::None,
        events: oncegate::record::event::subscription::TypeFilter::All,
        target: Target::Http(target),
    };
    sink::Sink::new(common).unwrap()
}

/// The error of one delivery, which must end soon after its deadline: by itself, what it waits for would go on for minutes.
async fn error_of(target: http::Settings, timeout: Duration, payload: &str) -> String {
    let sink = made(target, timeout);
    let begun = Instant::now();
    let delivered = sink.deliver(&claimed(payload)).await;
    assert!(begun.elapsed() < timeout + Duration::from_secs(10), "{:?}", begun.elapsed());
    let Evidence::Failed { what } = delivered.evidence else { panic!("{delivered:?}") };
    what
}

/// Settings for a URL, with private addresses allowed.
fn at(url: &str, sink: &Sink) -> http::Settings {
    http::Settings { url: url.parse().unwrap(), ..webhook(sink) }
}

/// A resolver by script: what it answers to the n-th question.
struct Scripted<F> {
    asked: AtomicUsize,
    answer: F,
}

impl<F> std::fmt::Debug for Scripted<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Scripted")
    }
}

#[async_trait]
impl<F: Fn(usize, u16) -> Option<Vec<SocketAddr>> + Send + Sync> Resolve for Scripted<F> {
    async fn resolve(&self, host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
        let asked = self.asked.fetch_add(1, SeqCst);
        if host == "silent.example" {
            return std::future::pending().await;
        }
        let found = (self.answer)(asked, port);
        found.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "no such name"))
    }
}

fn resolver<F>(answer: F) -> Arc<Scripted<F>> {
    Arc::new(Scripted { asked: AtomicUsize::new(0), answer })
}

/// Listens, and does this to each connection.
async fn listening<F: Future<Output = ()> + Send + 'static>(
    act: impl Fn(TcpStream) -> F + Send + 'static,
) -> (u16, JoinSet<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut connections = JoinSet::new();
        while let Ok((stream, _)) = listener.accept().await {
            connections.spawn(act(stream));
        }
    });
    (port, tasks)
}

async fn hold(stream: TcpStream) {
    std::future::pending::<()>().await;
    drop(stream);
}

#[tokio::test]
async fn f29_each_step_ends_by_the_deadline_and_the_error_names_it() {
    let sink = Sink::start(|_, _| OK).await;
    let (mute, _mute) = listening(hold).await;
    let (continuing, _continuing) = listening(|mut stream| async move {
        stream.read_exact(&mut [0; 4]).await.unwrap();
        while stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await.is_ok() {
            tokio::time::sleep(5 * MS).await;
        }
    })
    .await;
    let free = process::free_port();
    let nobody = resolver(|_, _| None);
    let named = |url: &str| http::Settings { resolver: nobody.clone(), ..at(url, &sink) };
    let large = format!("\"{}\"", "x".repeat(16 << 20));
    let cases = [
        (named("http://silent.example/"), "{}", "resolving the name: time-out after 400ms"),
        (named("http://none.example/"), "{}", "resolving the name: no such name"),
        (at(&format!("http://127.0.0.1:{free}/"), &sink), "{}", "connecting: 127.0.0.1:"),
        (at(&format!("https://127.0.0.1:{mute}/"), &sink), "{}", "TLS handshake: time-out after"),
        (at(&format!("https://127.0.0.1:{}/", sink.port), &sink), "{}", "TLS handshake: "),
        (at(&format!("http://127.0.0.1:{mute}/"), &sink), &large, "sending the event: time-out"),
        (at(&format!("http://127.0.0.1:{mute}/"), &sink), "{}", "waiting for the answer: time-out"),
        (
            at(&format!("http://127.0.0.1:{continuing}/"), &sink),
            "{}",
            "waiting for the answer: time-out",
        ),
    ];
    let errors =
        cases.iter().map(|(target, payload, _)| error_of(target.clone(), 400 * MS, payload));
    for (error, (_, _, expected)) in join_all(errors).await.iter().zip(&cases) {
        assert!(error.starts_with(expected), "{error:?} does not begin with {expected:?}");
    }
}

#[tokio::test]
async fn f30_a_huge_head_is_a_failure_and_an_endless_complaint_is_cut() {
    let act = |seen: &Seen, _| match seen.text().as_str() {
        "\"head\"" => Act::Endless("HTTP/1.1 200 OK\r\nx: "),
        _ => Act::Endless("HTTP/1.1 500 No\r\ntransfer-encoding: chunked\r\n\r\nfffffff\r\nsorry "),
    };
    let sink = Sink::start(act).await;
    let delivering = made(webhook(&sink), LONG);
    let head = delivering.deliver(&claimed("\"head\"")).await.evidence;
    assert!(matches!(&head, Evidence::Failed { what } if what.contains("too large")), "{head:?}");
    let body = delivering.deliver(&claimed("\"body\"")).await.evidence;
    let Evidence::Answered { status, text } = body else { panic!("{body:?}") };
    assert_eq!(status, 500);
    assert!(text.starts_with("sorry xxx") && text.len() <= 1024, "{text}");
    // Nothing is asked to be packed, so nothing unpacks to more than what is counted.
    assert_eq!(sink.seen()[0].headers["accept-encoding"], "identity");
}

#[tokio::test]
async fn f36_an_event_that_meets_the_end_of_an_idle_connection_arrives_in_its_first_attempt() {
    // Each connection takes one request, and breaks at the moment of the next.
    let sink = Sink::start(|seen, before| match (seen.before, before % 3) {
        (0, _) => OK,
        (_, 0) => Act::Rst(""),
        _ => Act::Fin(""),
    })
    .await;
    let fake = Arc::new(Fake::default());
    let ids: Vec<_> = (0..12).map(|n| fake.add(&n.to_string())).collect();
    let one = sink::Settings { concurrency: 1, ..settings(&sink) };
    let running = Running::start(&fake, vec![one]);
    sent(&fake, 12).await;
    let shown = running.metrics.render(Exposition::Prometheus);
    running.stop().await;
    assert!(ids.iter().all(|id| fake.row(*id).attempts == 1));
    assert!(!shown.contains(r#"result="failed""#), "{shown}");
    assert_eq!(sink.ids().len(), 12);
    assert!(sink.seen().iter().any(|seen| seen.before == 1), "connections are used again");
}

#[tokio::test]
async fn f36_what_a_fresh_connection_does_not_carry_is_a_failure_and_not_sent_twice() {
    let sink = Sink::start(|_, _| Act::Fin("")).await;
    let ended = made(webhook(&sink), LONG).deliver(&claimed("{}")).await.evidence;
    assert!(
        matches!(&ended, Evidence::Failed { what } if what.starts_with("waiting")),
        "{ended:?}"
    );
    assert_eq!(sink.seen().len(), 1);
}

#[tokio::test]
async fn f37_a_name_that_changes_between_two_looks_or_has_an_inner_address_too_gets_no_packet() {
    let sink = Sink::start(|_, _| OK).await;
    let nobody: SocketAddr = NOBODY.parse().unwrap();
    let inner = |port| SocketAddr::from(([127, 0, 0, 1], port));
    // First it is public, then it is not; whoever asks twice for one delivery dials what nobody has checked.
    let turning =
        resolver(move |asked, port| Some(vec![if asked % 2 == 0 { nobody } else { inner(port) }]));
    let both = resolver(move |_, port| Some(vec![inner(port), nobody]));
    let url = format!("http://hooks.example:{}/", sink.port);
    let closed = |resolver: Arc<dyn Resolve>| http::Settings {
        allow_private: false,
        allow_http: true,
        resolver,
        ..at(&url, &sink)
    };
    let turns = [closed(turning.clone()), closed(turning.clone())];
    let mut errors = Vec::new();
    for target in turns {
        errors.push(error_of(target, 300 * MS, "{}").await);
    }
    assert!(errors[0].starts_with("connecting: "), "{errors:?}");
    let named = errors[1].contains("127.0.0.1") && errors[1].contains("allow_private");
    assert!(named, "{errors:?}");
    assert_eq!(turning.asked.load(SeqCst), 2, "one look for each connection");
    let error = error_of(closed(both), 300 * MS, "{}").await;
    assert!(error.starts_with("connecting: "), "{error}");
    assert_eq!(sink.connections(), 0);
}

/// `allow_private` opens the sink that it stands at, no other; and no proxy is asked.
#[tokio::test(flavor = "multi_thread")]
async fn f37_every_way_to_write_an_inner_address_is_closed_and_a_proxy_of_the_environment_is_not_used()
 {
    let (open, proxy, orders) =
        (Sink::start(|_, _| OK).await, Sink::start(|_, _| OK).await, Orders::start().await);
    let place = Place::new(Which::Sqlite).await;
    let hosts = ["127.1", "2130706433", "0x7f.1", "localhost", "0", "017700000001"];
    let closed: Vec<_> = hosts
        .iter()
        .map(|host| {
            format!(
                "[[sink]]\nname = \"s{host}\"\nurl = \"http://{host}:{}/\"\nsecret = \"{SECRET}\"\nallow_http = true\n",
                open.port
            )
        })
        .collect();
    let more = format!("{}{}", closed.concat(), fleet::sink(open.port));
    let toml = rig::config(&place, &orders.url(), &more);
    let config = process::config(place.folder.path(), &toml);
    let mut command = process::serve(&config);
    for name in ["http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"] {
        command.env(name, format!("http://127.0.0.1:{}", proxy.port));
    }
    let gateway = Gateway::launch(command, &config).unwrap();
    fleet::order("k").to(gateway.addr).await;
    let refused = "select count(*) from outbox_events where last_error like '%127.0.0.1 is a private%allow_private%'
                   or last_error like '%0.0.0.0 is a private%allow_private%' or last_error like '%::1 is a private%'";
    let all = async || place.count(refused).await == i64::try_from(hosts.len()).unwrap();
    process::eventually("all of them are refused", all).await;
    happens("the open one is served", LONG, async || open.seen().len() == 1).await;
    assert_eq!((open.connections(), proxy.connections()), (1, 0));
}

#[tokio::test]
async fn f44_a_sinks_clock_that_is_far_off_is_told() {
    let date = |seconds: i64| {
        let at = crate::support::issuer::in_seconds(seconds);
        let at = std::time::UNIX_EPOCH + Duration::from_secs(u64::try_from(at).unwrap());
        httpdate::fmt_http_date(at)
    };
    let header: &'static str = Box::leak(format!("date: {}\r\n", date(-600)).into_boxed_str());
    let sink = Sink::start(move |_, _| Act::Answer(401, header)).await;
    let fake = Arc::new(Fake::default());
    let id = fake.add("{}");
    let running = Running::start(&fake, vec![settings(&sink)]);
    eventually("a refusal", LONG, || fake.row(id).attempts > 0).await;
    assert!(fake.row(id).error.contains("why?"), "what the sink says: {}", fake.row(id).error);
    let shown = running.metrics.render(Exposition::Prometheus);
    let line = shown.lines().find(|line| line.starts_with("oncegate_sink_clock_ahead_seconds{"));
    let ahead: i64 = line.unwrap().rsplit(' ').next().unwrap().parse().unwrap();
    assert!((-605..=-599).contains(&ahead), "{line:?}");
    running.stop().await;
}

#[tokio::test]
async fn f45_secrets_are_replaced_while_events_flow_and_a_malformed_file_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("sink.secret");
    let write = |text: &str| {
        let new = folder.path().join("new");
        std::fs::write(&new, text).unwrap();
        std::fs::rename(&new, &file).unwrap();
    };
    let old = SECRET;
    write(old);
    let sink = Sink::start(|_, _| OK).await;
    let target = http::Settings {
        secret_file: Some(file.clone()),
        secrets_every: 20 * MS,
        ..webhook(&sink)
    };
    let delivering = made(target, LONG);
    let signed = |seen: &Seen, secret: &str| {
        Webhook::new(secret).unwrap().verify(&seen.body, &seen.headers).is_ok()
    };
    // What the file says, and by whom a delivery then verifies: who has the old secret, who has the new one.
    let both = format!("# new\n{OTHER}\n\n{old}\n");
    let broken = format!("{OTHER}\nwhsec_dG9vIHNob3J0\n");
    for (text, by_old, by_new) in [
        (both.as_str(), true, true),
        (&broken, true, true),
        ("", true, true),
        (OTHER, false, true),
        ("no secret at all", false, true),
    ] {
        write(text);
        let changed = Instant::now();
        // Three looks at the file lie in it, so that what changes nothing has been read.
        while changed.elapsed() < 80 * MS {
            delivering.deliver(&claimed("{}")).await;
            tokio::time::sleep(5 * MS).await;
        }
        let seen = sink.seen();
        let all = |secret: &str| seen.iter().all(|seen| signed(seen, old) || signed(seen, secret));
        assert!(all(OTHER), "at every moment somebody verifies");
        let last = seen.last().unwrap();
        assert_eq!((signed(last, old), signed(last, OTHER)), (by_old, by_new), "{text:?}");
    }
    std::fs::remove_file(&file).unwrap();
    tokio::time::sleep(40 * MS).await;
    delivering.deliver(&claimed("{}")).await;
    assert!(signed(sink.seen().last().unwrap(), OTHER), "a file that is gone changes nothing");
}

/// A certificate authority, and what it signs for a name: files of PEM.
pub(crate) struct Authority {
    folder: tempfile::TempDir,
    issuer: rcgen::Issuer<'static, rcgen::KeyPair>,
}

impl Authority {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        // Not the name of what it signs: that would look as if it had signed itself.
        params.distinguished_name.push(rcgen::DnType::CommonName, "authority");
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = rcgen::KeyPair::generate().unwrap();
        let root = params.self_signed(&key).unwrap();
        std::fs::write(folder.path().join("ca.pem"), root.pem()).unwrap();
        Self { folder, issuer: rcgen::Issuer::new(params, key) }
    }

    pub(crate) fn path(&self, name: &str) -> std::path::PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn sign(&self, name: &str) -> Identity {
        let key = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let identity = Identity {
            cert_file: self.path(&format!("{name}.pem")),
            key_file: self.path(&format!("{name}.key")),
        };
        std::fs::write(&identity.cert_file, certificate.pem()).unwrap();
        std::fs::write(&identity.key_file, key.serialize_pem()).unwrap();
        identity
    }
}

fn certificates(file: &Path) -> Vec<rustls::pki_types::CertificateDer<'static>> {
    use rustls::pki_types::pem::PemObject as _;
    let found = rustls::pki_types::CertificateDer::pem_file_iter(file).unwrap();
    found.map(Result::unwrap).collect()
}

/// Speaks TLS before a sink, as this name, and asks for a certificate of the authority.
async fn behind_tls(sink: &Sink, authority: &Authority, name: &str) -> (u16, JoinSet<()>) {
    use rustls::pki_types::pem::PemObject as _;
    let own = authority.sign(name);
    let mut roots = rustls::RootCertStore::empty();
    certificates(&authority.path("ca.pem")).into_iter().for_each(|ca| roots.add(ca).unwrap());
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let asks = rustls::server::WebPkiClientVerifier::builder_with_provider(
        Arc::new(roots),
        Arc::clone(&provider),
    );
    let key = rustls::pki_types::PrivateKeyDer::from_pem_file(&own.key_file).unwrap();
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_client_cert_verifier(asks.build().unwrap())
        .with_single_cert(certificates(&own.cert_file), key)
        .unwrap();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let port = sink.port;
    listening(move |stream| {
        let acceptor = acceptor.clone();
        async move {
            let Ok(mut tls) = acceptor.accept(stream).await else { return };
            let mut plain = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
            drop(tokio::io::copy_bidirectional(&mut tls, &mut plain).await);
        }
    })
    .await
}

#[tokio::test]
async fn a_sink_is_known_by_its_own_authority_and_sees_the_certificate_that_it_asks_for() {
    let (authority, stranger) = (Authority::new(), Authority::new());
    let sink = Sink::start(|_, _| OK).await;
    let (port, _front) = behind_tls(&sink, &authority, "localhost").await;
    let url = format!("https://localhost:{port}/hook");
    let ours = || http::Settings {
        ca_file: Some(authority.path("ca.pem")),
        identity: Some(authority.sign("oncegate")),
        ..at(&url, &sink)
    };
    let good = made(ours(), LONG).deliver(&claimed("{}")).await;
    assert!(matches!(good.evidence, Evidence::Answered { .. }), "{good:?}");
    for (wrong, cause) in [
        // The system does not know this authority.
        (http::Settings { ca_file: None, ..ours() }, "TLS handshake: "),
        (http::Settings { ca_file: Some(stranger.path("ca.pem")), ..ours() }, "TLS handshake: "),
        // Another name than the certificate's.
        (
            http::Settings {
                url: url.replace("localhost", "127.0.0.1").parse().unwrap(),
                ..ours()
            },
            "TLS handshake: ",
        ),
        // TLS 1.3: the server says so after the handshake.
        (http::Settings { identity: None, ..ours() }, ""),
        (http::Settings { identity: Some(stranger.sign("oncegate")), ..ours() }, ""),
    ] {
        let error = error_of(wrong, LONG, "{}").await;
        assert!(error.starts_with(cause), "{error}");
    }
    assert_eq!(sink.seen().len(), 1, "nobody else gets through");
    let broken = http::Settings { ca_file: Some(authority.path("oncegate.key")), ..ours() };
    assert!(broken.check().unwrap_err().contains("ca_file"), "found out before the first delivery");
}

/// A message as the gateway stores it.
fn message(kind: &str, tenant: &str, key: &str, data: &str) -> String {
    let text = |text: &str| json!(text).to_string();
    format!(
        r#"{{"type":{},"timestamp":"2026-11-30T01:02:03.456789Z","data":{data},"tenant":{},"operation":"orders.create","idempotency_key":{},"id":"{}"}}"#,
        text(kind),
        text(tenant),
        text(key),
        Uuid::new_v4()
    )
}

/// Delivers odd messages in each format, each twice, and gives what the sink saw with what it must find.
async fn odd_deliveries(sink: &Sink) -> Vec<Value> {
    let datas = [
        "null",
        r#"{"z":1.0,"a":12345678901234567890,"e":1e2,"u":"é\/</script>","z":2, "Z":[]}"#,
        r#"{ "text":"\u0000\ud83c\udf89 🎉 \u202e","nested":[[[{"":""}]]] }"#,
        r#""plain""#,
        "1.10",
    ];
    let names = [
        ("order.created", "acme", "k-1"),
        ("order \"é\" 100% 🎉", "mandant é ß 東京", "key with spaces, ; and % \" '"),
    ];
    let secrets = vec![OTHER.to_owned(), SECRET.to_owned()];
    let mut all = Vec::new();
    for format in [Format::StandardWebhooks, Format::CloudEvents, Format::CloudEventsStructured] {
        let mut headers = HeaderMap::new();
        headers.insert("authorization", HeaderValue::from_static("Bearer s3cr3t"));
        let source = "https://shop.example/orders?a=b".to_owned();
        let target =
            http::Settings { format, source, headers, secrets: secrets.clone(), ..webhook(sink) };
        let delivering = made(target, LONG);
        for (data, (kind, tenant, key)) in datas.iter().flat_map(|data| names.map(|n| (data, n))) {
            let message = message(kind, tenant, key, data);
            let id = serde_json::from_str::<Value>(&message).unwrap()["id"].clone();
            let event_id = id.as_str().unwrap().parse().unwrap();
            for attempts in [0, 6] {
                let event = Claimed { event_id, attempts, ..claimed(&message) };
                let ended = delivering.deliver(&event).await.evidence;
                assert!(matches!(ended, Evidence::Answered { .. }), "{ended:?}");
            }
            all.push(json!({
                "format": format!("{format:?}"), "id": id, "type": kind, "tenant": tenant, "key": key,
                "data": data, "message": message,
            }));
        }
    }
    let seen = sink.seen();
    assert_eq!(seen.len(), 2 * all.len());
    for (expected, attempts) in all.iter_mut().zip(seen.chunks(2)) {
        let [first, again] = attempts else { panic!("two attempts") };
        assert_eq!(first.body, again.body, "the same bytes in each attempt");
        for (attempt, number) in [(first, "1"), (again, "7")] {
            assert_eq!(attempt.headers["oncegate-attempt"], number);
            assert_eq!(attempt.headers["authorization"], "Bearer s3cr3t");
            assert!(attempt.verified);
        }
        let text = |(name, value): (&::http::HeaderName, &HeaderValue)| {
            (name.to_string(), Value::from(value.to_str().unwrap()))
        };
        expected["headers"] =
            first.headers.iter().map(text).collect::<serde_json::Map<_, _>>().into();
        expected["body"] = STANDARD.encode(&first.body).into();
    }
    all
}

#[tokio::test]
async fn f41_f42_public_libraries_verify_and_read_what_is_sent_in_each_format() {
    let sink = Sink::start(|_, _| OK).await;
    let deliveries = odd_deliveries(&sink).await;
    let count = deliveries.len();
    let case = json!({
        "secrets": [SECRET, OTHER], "stranger": "whsec_c3RyYW5nZXJzdHJhbmdlcnN0cmFuZ2Vy",
        "source": "https://shop.example/orders?a=b", "operation": "orders.create",
        "deliveries": deliveries,
    });
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("deliveries.json");
    std::fs::write(&input, case.to_string()).unwrap();
    let output = script("verify.py").arg(&input).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(said.trim(), format!("verified {count}"), "{errors}");
}

on_both_stores! {
    each_sink_gets_the_events_that_it_wants_and_what_nobody_wants_is_kept_as_discarded,
    f40_answers_that_no_database_likes_become_events_of_their_bytes_and_readable_errors,
}

async fn each_sink_gets_the_events_that_it_wants_and_what_nobody_wants_is_kept_as_discarded(
    which: Which,
) {
    let (orders, audit) = (Sink::start(|_, _| OK).await, Sink::start(|_, _| OK).await);
    let named = |name: &str, events: &str, sink: &Sink| {
        let lines = fleet::sink(sink.port).replace("\"main\"", &format!("\"{name}\""));
        format!("{lines}events = {events}\n")
    };
    let more = format!(
        "{}[[route.event]]\ntype = \"bill.sent\"\nsinks = [\"orders\"]\n{}{}[outbox]\nunknown_events = true\n",
        fleet::TWO_EVENTS,
        named("orders", r#"["order.*"]"#, &orders),
        named("audit", r#"["audit.*", "record.unknown", "*.created"]"#, &audit),
    );
    let rig = Rig::with(which, "sweep_every = \"200ms\"", "", &more).await;
    fleet::order("k").to(rig.gateway.addr).await;
    rig.orders.answer_status(502);
    fleet::order("unknown").to(rig.gateway.addr).await;
    let kinds = |sink: &Sink| {
        let kind = |seen: &Seen| {
            let message: Value = serde_json::from_slice(&seen.body).unwrap();
            message["type"].as_str().unwrap().to_owned()
        };
        let mut kinds: Vec<_> = sink.seen().iter().map(kind).collect();
        kinds.sort();
        kinds
    };
    process::eventually("all are told", async || audit.seen().len() >= 3).await;
    process::eventually("and the order", async || !orders.seen().is_empty()).await;
    assert_eq!(kinds(&orders), ["order.created"]);
    assert_eq!(kinds(&audit), ["audit.order", "order.created", "record.unknown"]);
    let owed = "select event_type, sink, status from outbox_events order by event_type, sink";
    let row = |kind: &str, sink: &str, status: &str| {
        [kind, sink, status].map(|text| Some(text.to_owned())).to_vec()
    };
    let expected = [
        row("audit.order", "audit", "sent"),
        row("bill.sent", "", "discarded"),
        row("order.created", "audit", "sent"),
        row("order.created", "orders", "sent"),
        row("record.unknown", "audit", "sent"),
    ];
    process::eventually("it is noted", async || rig.place.rows(owed).await == expected).await;
}

async fn f40_answers_that_no_database_likes_become_events_of_their_bytes_and_readable_errors(
    which: Which,
) {
    let bodies: [&[u8]; 5] = [
        br#"{"id":"\u0000"}"#,
        br#"{"id":"\ud800"}"#,
        "{\"id\":\"\u{202e}\\r\\n🎉\"}".as_bytes(),
        b"{\"id\":\"\xff\xfe\"}",
        b"{\"id\":\"\xf0\x9f\x8e",
    ];
    // Its first complaint is as odd: NUL, controls, no UTF-8, and a character that is cut where the column ends.
    let sink = Sink::start(|seen, _| {
        if seen.headers["oncegate-attempt"] == "1" {
            Act::Raw("HTTP/1.1 500 No\r\ncontent-length: 12\r\n\r\nno\0\x1b[31m\u{202e}\u{85}")
        } else {
            OK
        }
    })
    .await;
    let event = "[[route.event]]\ntype = \"e\"\npayload = { id = \"{{ response.json.id }}\" }\n[[route.event]]\ntype = \"whole\"\n";
    let rig = Rig::start(which, &format!("{event}{}", fleet::sink(sink.port))).await;
    for (n, body) in bodies.iter().enumerate() {
        let body = bytes::Bytes::copy_from_slice(body);
        rig.orders.answer(move |_| {
            let body = http_body_util::Full::new(body.clone());
            let answer = ::http::Response::builder().status(201);
            answer.header("content-type", "application/json").body(body).unwrap()
        });
        let answer = fleet::order(&format!("k{n}")).to(rig.gateway.addr).await;
        assert_eq!(answer.status, 201, "{n}");
    }
    let sent = "select count(*) from outbox_events where status = 'sent' and attempts = 2";
    process::eventually("all events", async || rig.place.count(sent).await == 10).await;
    let seen = sink.seen();
    assert!(seen.iter().all(|seen| seen.verified));
    let texts: Vec<_> = seen.iter().map(Seen::text).collect();
    let some = |part: &str| texts.iter().any(|text| text.contains(part));
    // As they came, in the event that embeds the answer.
    for part in [r#"{"id":"\u0000"}"#, r#"{"id":"\ud800"}"#, "\"response\":null"] {
        assert!(some(part), "{part}: {texts:#?}");
    }
    assert!(some(r#""data":{"id":"\u0000"}"#) && some(r#""data":{"error":"#), "{texts:#?}");
}

/// What one answer and its events may cost a process beyond what it starts with.
const MEMORY_MAX: u64 = 700 << 20;

#[tokio::test(flavor = "multi_thread")]
async fn f38_an_answer_of_ten_megabytes_named_by_each_of_2000_events_costs_neither_answer_nor_memory()
 {
    let sink = Sink::start(|_, _| OK).await;
    let lines = "{\"n\":1},".repeat(1999);
    let blob = "x".repeat(10 << 20);
    let body = bytes::Bytes::from(format!(r#"{{"lines":[{lines}{{"n":2}}],"blob":"{blob}"}}"#));
    let event = "[[route.event]]\ntype = \"all\"\nfor_each = \"response.json.lines\"\n\
                 payload = { item = \"{{ item }}\", all = \"{{ response.json }}\" }\n\
                 [[route.event]]\ntype = \"small\"\n payload = { n = \"{{ response.json.lines[1999].n }}\" }\n";
    let policy = "max_response_body = \"16MiB\"";
    let more = format!("{event}{}", fleet::sink(sink.port));
    let rig = Rig::with(Which::Postgres, "completion_timeout = \"20s\"", policy, &more).await;
    let whole = body.clone();
    rig.orders.answer(move |_| ::http::Response::new(http_body_util::Full::new(whole.clone())));
    let first = post("/orders", "{}").tenant("acme").key("k").to(rig.gateway.addr).await;
    assert_eq!(first.body.len(), body.len());
    let again = post("/orders", "{}").tenant("acme").key("k").to(rig.gateway.addr).await;
    assert!(again.replayed() && again.body == body);
    let small = |seen: &Seen| seen.text().contains(r#""data":{"n":2}"#);
    process::eventually("the small one", async || sink.seen().iter().any(small)).await;
    process::eventually("all of them", async || sink.seen().len() == 2001).await;
    let errors = sink.seen().iter().filter(|seen| seen.text().contains("too large")).count();
    assert_eq!(errors, 2000);
    assert_eq!(fleet::metric(rig.gateway.admin, "oncegate_event_errors_total").await, 2000);
    let most = rig.gateway.most_memory();
    assert!(most < MEMORY_MAX, "{} MiB", most >> 20);
}
