//! The configuration as written: one struct for each section, each field typed and with its location, nothing decided.
//!
//! No defaults and no rules live here. `config.rs` turns a [`File`] into what the program runs with. A field that is
//! absent, or that cannot be read, is `None`; in the second case the mistake is in the diagnostics.
//!
//! What must stay true: every field that the program knows is asked for here, and nowhere else. The list of known
//! names is what the functions of this file ask for, so the report of unknown fields cannot fall behind.

use std::time::Duration;

use serde_json::Value;

use crate::config::tree::{Diagnostics, Location, Node, Section, Spanned, TextOrSection};

/// A value that may be absent.
pub type Setting<T> = Option<Spanned<T>>;

/// The whole file.
#[derive(Debug, Default)]
pub struct File {
    /// `[server]`
    pub server: Server,
    /// `[admin]`
    pub admin: Admin,
    /// `[upstream]`
    pub upstream: Upstream,
    /// `[upstreams.NAME]`
    pub upstreams: Vec<(String, Upstream)>,
    /// `[store]`
    pub store: Store,
    /// `[jwt]`
    pub jwt: Option<Jwt>,
    /// `[policy]`
    pub policy: Policy,
    /// `[[route]]`
    pub routes: Vec<Route>,
    /// `[[sink]]`
    pub sinks: Vec<Sink>,
    /// `[outbox]`
    pub outbox: Outbox,
    /// `[log]`
    pub log: Log,
}

/// `[server]`
#[derive(Debug, Default)]
pub struct Server {
    /// `host:port` or `unix:PATH`.
    pub listen: Setting<String>,
    /// Connections at a time.
    pub connections_max: Setting<u32>,
    /// Header lines of a request.
    pub headers_max: Setting<u32>,
    /// Bytes of a request's head.
    pub head_bytes_max: Setting<usize>,
    /// For a whole head.
    pub header_timeout: Setting<Duration>,
    /// Between two requests on a connection.
    pub idle_timeout: Setting<Duration>,
    /// For a silent caller within a body.
    pub body_timeout: Setting<Duration>,
    /// For a caller that takes nothing of its answer.
    pub write_timeout: Setting<Duration>,
    /// Whether a caller that shut its write side is answered.
    pub half_close: Setting<bool>,
    /// Whether pages of other origins may read the gateway's own headers.
    pub expose_headers: Setting<bool>,
    /// Whether routes match in any letter case.
    pub ignore_path_case: Setting<bool>,
    /// Addresses and networks of proxies in front.
    pub trusted_proxies: Setting<Vec<Spanned<String>>>,
    /// How long a shutdown waits.
    pub shutdown_grace: Setting<Duration>,
    /// Keyed requests at a time, without those that wait.
    pub in_flight_max: Setting<u32>,
    /// Waiting duplicates at a time.
    pub waiting_max: Setting<u32>,
    /// Tunnels at a time.
    pub tunnels_max: Setting<u32>,
    /// Answers awaited after their time-out.
    pub late_answers_max: Setting<u32>,
    /// Sum of the bodies of keyed requests and of their answers in memory.
    pub buffered_bytes_max: Setting<usize>,
    /// The file with the key of the digests.
    pub digest_key_file: Setting<String>,
}

/// `[admin]`
#[derive(Debug, Default)]
pub struct Admin {
    /// `host:port` or `unix:PATH`.
    pub listen: Setting<String>,
    /// The file with the token.
    pub token_file: Setting<String>,
    /// The token itself, for `ONCEGATE_ADMIN_TOKEN`.
    pub token: Setting<String>,
}

/// `[upstream]` and `[upstreams.NAME]`
#[derive(Debug, Default)]
pub struct Upstream {
    /// Where the section stands.
    pub location: Location,
    /// `http://host[:port]` or `https://host[:port]`.
    pub url: Setting<String>,
    /// Name, TCP and TLS together.
    pub connect_timeout: Setting<Duration>,
    /// How long a pooled connection may have been idle.
    pub idle_timeout: Setting<Duration>,
    /// Pass-through: how long the upstream may be silent before its answer.
    pub answer_timeout: Setting<Duration>,
    /// How long the upstream may be silent within the body of an answer that is streamed.
    pub answer_idle_timeout: Setting<Duration>,
    /// How long nothing may pass through a tunnel; zero: for ever.
    pub tunnel_idle_timeout: Setting<Duration>,
    /// How long a connection may have been idle and still carry a keyed request.
    pub reuse_for_keyed: Setting<Option<Duration>>,
    /// The only certificates to trust.
    pub ca_file: Setting<String>,
    /// `keep` or `set`; `[upstream]` only.
    pub host: Setting<String>,
}

/// `[store]`
#[derive(Debug, Default)]
pub struct Store {
    /// `sqlite:PATH` or `postgres://...`.
    pub url: Setting<String>,
    /// How long a silent replica keeps its records.
    pub lease: Setting<Duration>,
    /// Whether `serve` migrates.
    pub migrate: Setting<bool>,
    /// How long a start waits for a database that is away.
    pub wait_at_start: Setting<Option<Duration>>,
    /// Connections of the pool.
    pub connections: Setting<u32>,
    /// For one connection to the database.
    pub connect_timeout: Setting<Duration>,
    /// For one statement.
    pub timeout: Setting<Duration>,
    /// For a reservation, tries included.
    pub reserve_timeout: Setting<Duration>,
    /// For a completion before it is handed to the settler.
    pub completion_timeout: Setting<Duration>,
    /// Bytes of answers in memory.
    pub cache_bytes: Setting<usize>,
    /// How often the sweeper looks.
    pub sweep_every: Setting<Duration>,
    /// Rows of one of its statements.
    pub sweep_batch: Setting<u32>,
    /// `refuse` or `bypass`.
    pub on_unavailable: Setting<String>,
    /// Where outcomes are kept that the database does not take.
    pub spill: Spill,
    /// The keys of what is sealed at rest.
    pub encryption_key_file: Setting<String>,
}

/// `spill = { ... }`
#[derive(Debug, Default)]
pub struct Spill {
    /// The folder.
    pub dir: Setting<String>,
    /// Most bytes of one process.
    pub max_size: Setting<usize>,
}

/// `[jwt]`
#[derive(Debug, Default)]
pub struct Jwt {
    /// Where it stands.
    pub location: Location,
    /// Where a JWK set is fetched.
    pub jwks_url: Setting<String>,
    /// The file with a JWK set.
    pub jwks_file: Setting<String>,
    /// The file with a public key.
    pub key_file: Setting<String>,
    /// The file with the secret of an HMAC.
    pub secret_file: Setting<String>,
    /// How tokens may be signed.
    pub algorithms: Setting<Vec<Spanned<String>>>,
    /// Who makes them.
    pub issuer: Setting<String>,
    /// For whom they are made.
    pub audience: Setting<Vec<Spanned<String>>>,
    /// How far clocks may differ.
    pub leeway: Setting<Duration>,
    /// How often the set is fetched.
    pub refresh: Setting<Duration>,
    /// How often at most because of an unknown key.
    pub cooldown: Setting<Duration>,
    /// For one fetch.
    pub timeout: Setting<Duration>,
    /// The certificates to trust.
    pub ca_file: Setting<String>,
    /// Whether the set may come over plain http.
    pub allow_http: Setting<bool>,
}

/// `replay_auth = "..."` or `replay_auth = { subrequest = "..." }`
#[derive(Debug)]
pub enum ReplayAuth {
    /// `none` or `same-credential`.
    Text(Spanned<String>),
    /// Somebody is asked.
    Subrequest(Box<Subrequest>),
}

/// `replay_auth = { subrequest = "..." }`
#[derive(Debug, Default)]
pub struct Subrequest {
    /// Where it stands.
    pub location: Location,
    /// A path at the route's upstream, or a URL.
    pub subrequest: Setting<String>,
    /// How long the answer may take.
    pub timeout: Setting<Duration>,
    /// The certificates to trust.
    pub ca_file: Setting<String>,
}

/// `[policy]`, and the same fields of a route.
#[derive(Debug, Default)]
pub struct Policy {
    /// Where the tenant comes from.
    pub tenant: Option<Tenant>,
    /// The header with the key.
    pub key_header: Setting<String>,
    /// Whether a request without key is refused.
    pub require_key: Setting<bool>,
    /// Whether the key goes on to the upstream.
    pub forward_key: Setting<bool>,
    /// Parts of a key for callers that send none.
    pub derive_key: Setting<Vec<Spanned<String>>>,
    /// How long a duplicate waits.
    pub wait: Setting<Duration>,
    /// How long the upstream may take.
    pub timeout: Setting<Duration>,
    /// How much longer its answer is awaited.
    pub late_answer: Setting<Duration>,
    /// How long an outcome is kept.
    pub retention: Setting<Duration>,
    /// Longest request body.
    pub max_request_body: Setting<usize>,
    /// Longest response body that is kept.
    pub max_response_body: Setting<usize>,
    /// `hold`, `retry` or `lookup`.
    pub on_unknown: Setting<String>,
    /// How the upstream is asked.
    pub lookup: Option<Lookup>,
    /// Status of a mismatch.
    pub mismatch_status: Setting<u32>,
    /// Headers that are not kept.
    pub replay_drop: Setting<Vec<Spanned<String>>>,
    /// Statuses that free the key.
    pub release_on: Setting<Vec<Spanned<String>>>,
    /// Statuses after which nobody knows.
    pub unknown_on: Setting<Vec<Spanned<String>>>,
    /// What makes two requests the same.
    pub fingerprint: Option<Fingerprint>,
    /// `protect` or `observe`.
    pub mode: Setting<String>,
    /// Who may read a stored answer.
    pub replay_auth: Option<ReplayAuth>,
}

/// `lookup = { ... }`
#[derive(Debug, Default)]
pub struct Lookup {
    /// Where it stands.
    pub location: Location,
    /// `GET` or `POST`.
    pub method: Setting<String>,
    /// A template: path and query.
    pub path: Setting<String>,
    /// Headers, each a template.
    pub headers: Setting<Value>,
    /// An expression: whether it was executed.
    pub found: Setting<String>,
    /// Statuses that say that it was not.
    pub not_found: Setting<Vec<Spanned<String>>>,
    /// The kept answer's status: a number or a template.
    pub status: Setting<Value>,
    /// The kept answer's body: a tree of templates.
    pub body: Setting<Value>,
    /// How long the upstream is left alone before.
    pub settle: Setting<Duration>,
    /// How long the answer may take.
    pub timeout: Setting<Duration>,
    /// Which upstream is asked.
    pub upstream: Setting<String>,
}

/// `tenant = { ... }`
#[derive(Debug, Default)]
pub struct Tenant {
    /// Where it stands.
    pub location: Location,
    /// A header.
    pub header: Setting<String>,
    /// A parameter of the path.
    pub path: Setting<String>,
    /// The host.
    pub host: Setting<bool>,
    /// The user of Basic credentials.
    pub basic_user: Setting<bool>,
    /// A digest of Authorization.
    pub credential: Setting<bool>,
    /// A claim of a token.
    pub jwt_claim: Setting<String>,
    /// One for all.
    pub fixed: Setting<String>,
}

/// `fingerprint = { ... }`
#[derive(Debug, Default)]
pub struct Fingerprint {
    /// What of the body counts.
    pub only: Setting<Vec<Spanned<String>>>,
    /// What of the body does not count.
    pub ignore: Setting<Vec<Spanned<String>>>,
    /// Headers that count too.
    pub headers: Setting<Vec<Spanned<String>>>,
    /// Query pairs that do not count.
    pub ignore_query: Setting<Vec<Spanned<String>>>,
    /// What of an XML body does not count.
    pub ignore_xml: Setting<Vec<Spanned<String>>>,
    /// The namespaces of prefixes.
    pub xml_namespaces: Vec<(String, Spanned<String>)>,
    /// How many bytes a body may decode to.
    pub max_decoded: Setting<usize>,
}

/// `[[route]]`
#[derive(Debug, Default)]
pub struct Route {
    /// Where it stands.
    pub location: Location,
    /// One method.
    pub method: Setting<String>,
    /// Several.
    pub methods: Setting<Vec<Spanned<String>>>,
    /// The path template.
    pub path: Setting<String>,
    /// The operation.
    pub operation: Setting<String>,
    /// The upstream's name.
    pub upstream: Setting<String>,
    /// What differs from `[policy]`.
    pub policy: Policy,
    /// `[[route.event]]`
    pub events: Vec<Event>,
}

/// `[[route.event]]`
#[derive(Debug, Default)]
pub struct Event {
    /// Where it stands.
    pub location: Location,
    /// Its type.
    pub kind: Setting<String>,
    /// An expression that must be true.
    pub when: Setting<String>,
    /// A tree of templates.
    pub payload: Setting<Value>,
    /// An expression that gives a list.
    pub for_each: Setting<String>,
    /// A template that names the element.
    pub event_key: Setting<String>,
    /// A template.
    pub ordering_key: Setting<String>,
    /// Names of sinks.
    pub sinks: Setting<Vec<Spanned<String>>>,
}

/// `[[sink]]`
#[derive(Debug, Default)]
pub struct Sink {
    /// Where it stands.
    pub location: Location,
    /// Its name.
    pub name: Setting<String>,
    /// Where deliveries go.
    pub url: Setting<String>,
    /// Patterns of the types that it wants.
    pub events: Setting<Vec<Spanned<String>>>,
    /// `standard-webhooks`, `cloudevents` or `cloudevents-structured`.
    pub format: Setting<String>,
    /// Headers of its deliveries.
    pub headers: Vec<Header>,
    /// The only certificates to trust.
    pub ca_file: Setting<String>,
    /// The certificate that is shown to it.
    pub client_cert_file: Setting<String>,
    /// The key of that certificate.
    pub client_key_file: Setting<String>,
    /// One secret.
    pub secret: Setting<String>,
    /// The file with its secrets.
    pub secret_file: Setting<String>,
    /// The variable with its secrets.
    pub secret_env: Setting<String>,
    /// For one delivery.
    pub timeout: Setting<Duration>,
    /// Deliveries at a time.
    pub concurrency: Setting<u32>,
    /// First pause after a failure.
    pub backoff_base: Setting<Duration>,
    /// Longest pause.
    pub backoff_max: Setting<Duration>,
    /// Attempts before an event may be dead.
    pub max_attempts: Setting<u32>,
    /// Age before an event may be dead.
    pub max_age: Setting<Duration>,
    /// Refusals of an event before it is dead.
    pub max_refusals: Setting<u32>,
    /// Whether private addresses are allowed.
    pub allow_private: Setting<bool>,
    /// Whether plain http is allowed.
    pub allow_http: Setting<bool>,
    /// Consecutive failures before a pause.
    pub pause_after: Setting<u32>,
    /// Who logs in to a broker.
    pub user: Setting<String>,
    /// Where a NATS sink publishes.
    pub subject: Setting<String>,
    /// Where a Redis sink adds entries.
    pub stream: Setting<String>,
    /// About how many entries are kept there.
    pub max_length: Setting<u32>,
    /// In which order events are delivered.
    pub ordering: Setting<String>,
    /// What becomes of the events behind a dead one.
    pub on_dead: Setting<String>,
}

/// `headers = { NAME = "...", NAME = { file = "..." }, NAME = { env = "..." } }`
#[derive(Debug)]
pub struct Header {
    /// Its name.
    pub name: String,
    /// Where it stands.
    pub location: Location,
    /// Its value, where it stands here.
    pub value: Setting<String>,
    /// The file with its value.
    pub file: Setting<String>,
    /// The variable with its value.
    pub env: Setting<String>,
}

/// `[outbox]`
#[derive(Debug, Default)]
pub struct Outbox {
    /// How long a delivered event is kept.
    pub retention: Setting<Duration>,
    /// Longest message.
    pub max_payload: Setting<usize>,
    /// Whether it is announced that a record is unknown.
    pub unknown_events: Setting<bool>,
    /// How often the relay looks when nobody wakes it.
    pub poll: Setting<Duration>,
    /// Whether `serve` delivers.
    pub relay: Setting<bool>,
    /// How many events may be owed before nothing is begun that writes more; 0: any number.
    pub backlog_max: Setting<u32>,
    /// The source of CloudEvents.
    pub source: Setting<String>,
}

/// `[log]`
#[derive(Debug, Default)]
pub struct Log {
    /// `text` or `json`.
    pub format: Setting<String>,
    /// `error`, `warn`, `info`, `debug`, `trace`, or a filter.
    pub level: Setting<String>,
}

/// Sections whose fields a variable may set: `ONCEGATE_<SECTION>_<FIELD>`.
pub const SECTIONS: [&str; 8] =
    ["server", "admin", "upstream", "store", "jwt", "policy", "outbox", "log"];

/// Reads the whole tree.
#[must_use]
pub fn read(tree: &Node, diagnostics: &Diagnostics) -> File {
    let mut top = Section::top(tree, diagnostics);
    let file = File {
        server: top.section("server").map(server).unwrap_or_default(),
        admin: top.section("admin").map(admin).unwrap_or_default(),
        upstream: top.section("upstream").map(|s| upstream(s, true)).unwrap_or_default(),
        upstreams: top
            .named_sections("upstreams")
            .into_iter()
            .map(|(name, section)| (name, upstream(section, false)))
            .collect(),
        store: top.section("store").map(store).unwrap_or_default(),
        jwt: top.section("jwt").map(jwt),
        policy: top.section("policy").map(only_policy).unwrap_or_default(),
        routes: top.sections("route").into_iter().map(route).collect(),
        sinks: top.sections("sink").into_iter().map(sink).collect(),
        outbox: top.section("outbox").map(outbox).unwrap_or_default(),
        log: top.section("log").map(log).unwrap_or_default(),
    };
    top.finish();
    file
}

fn server(mut s: Section<'_>) -> Server {
    let read = Server {
        listen: s.text("listen"),
        connections_max: s.number("connections_max", 1..=1_000_000),
        headers_max: s.number("headers_max", 1..=10_000),
        head_bytes_max: s.size("head_bytes_max"),
        header_timeout: s.duration("header_timeout"),
        idle_timeout: s.duration("idle_timeout"),
        body_timeout: s.duration("body_timeout"),
        write_timeout: s.duration("write_timeout"),
        half_close: s.flag("half_close"),
        expose_headers: s.flag("expose_headers"),
        ignore_path_case: s.flag("ignore_path_case"),
        trusted_proxies: s.texts("trusted_proxies"),
        shutdown_grace: s.duration("shutdown_grace"),
        in_flight_max: s.number("in_flight_max", 1..=1_000_000),
        waiting_max: s.number("waiting_max", 0..=1_000_000),
        tunnels_max: s.number("tunnels_max", 1..=1_000_000),
        late_answers_max: s.number("late_answers_max", 0..=1_000_000),
        buffered_bytes_max: s.size("buffered_bytes_max"),
        digest_key_file: s.text("digest_key_file"),
    };
    s.not_yet(&["tls", "http2"]);
    s.finish();
    read
}

fn admin(mut s: Section<'_>) -> Admin {
    let read = Admin {
        listen: s.text("listen"),
        token_file: s.text("token_file"),
        token: s.text("token"),
    };
    s.finish();
    read
}

fn upstream(mut s: Section<'_>, main: bool) -> Upstream {
    let read = Upstream {
        location: s.location().clone(),
        url: s.text("url"),
        connect_timeout: s.duration("connect_timeout"),
        idle_timeout: s.duration("idle_timeout"),
        answer_timeout: s.duration("answer_timeout"),
        answer_idle_timeout: s.duration("answer_idle_timeout"),
        tunnel_idle_timeout: s.duration("tunnel_idle_timeout"),
        reuse_for_keyed: s.duration_or("reuse_for_keyed", "never"),
        ca_file: s.text("ca_file"),
        host: if main { s.text("host") } else { None },
    };
    s.not_yet(&["tls", "http2"]);
    s.finish();
    read
}

fn store(mut s: Section<'_>) -> Store {
    let read = Store {
        url: s.text("url"),
        lease: s.duration("lease"),
        migrate: s.flag("migrate"),
        wait_at_start: s.duration_or("wait_at_start", "forever"),
        connections: s.number("connections", 2..=1000),
        connect_timeout: s.duration("connect_timeout"),
        timeout: s.duration("timeout"),
        reserve_timeout: s.duration("reserve_timeout"),
        completion_timeout: s.duration("completion_timeout"),
        cache_bytes: s.size("cache_bytes"),
        sweep_every: s.duration("sweep_every"),
        sweep_batch: s.number("sweep_batch", 1..=100_000),
        on_unavailable: s.text("on_unavailable"),
        encryption_key_file: s.text("encryption_key_file"),
        spill: s.section("spill").map(spill).unwrap_or_default(),
    };
    s.not_yet(&["encryption"]);
    s.finish();
    read
}

fn spill(mut s: Section<'_>) -> Spill {
    let read = Spill { dir: s.text("dir"), max_size: s.size("max_size") };
    s.finish();
    read
}

fn jwt(mut s: Section<'_>) -> Jwt {
    let read = Jwt {
        location: s.location().clone(),
        jwks_url: s.text("jwks_url"),
        jwks_file: s.text("jwks_file"),
        key_file: s.text("key_file"),
        secret_file: s.text("secret_file"),
        algorithms: s.texts("algorithms"),
        issuer: s.text("issuer"),
        audience: s.text_or_texts("audience"),
        leeway: s.duration("leeway"),
        refresh: s.duration("refresh"),
        cooldown: s.duration("cooldown"),
        timeout: s.duration("timeout"),
        ca_file: s.text("ca_file"),
        allow_http: s.flag("allow_http"),
    };
    s.finish();
    read
}

fn replay_auth(said: TextOrSection<'_>) -> ReplayAuth {
    match said {
        TextOrSection::Text(word) => ReplayAuth::Text(word),
        TextOrSection::Section(mut s) => {
            let read = Subrequest {
                location: s.location().clone(),
                subrequest: s.text("subrequest"),
                timeout: s.duration("timeout"),
                ca_file: s.text("ca_file"),
            };
            s.finish();
            ReplayAuth::Subrequest(Box::new(read))
        }
    }
}

fn only_policy(mut s: Section<'_>) -> Policy {
    let read = policy(&mut s);
    s.finish();
    read
}

fn policy(s: &mut Section<'_>) -> Policy {
    Policy {
        tenant: s.section("tenant").map(tenant),
        key_header: s.text("key_header"),
        require_key: s.flag("require_key"),
        forward_key: s.flag("forward_key"),
        derive_key: s.texts("derive_key"),
        wait: s.duration("wait"),
        timeout: s.duration("timeout"),
        late_answer: s.duration("late_answer"),
        retention: s.duration("retention"),
        max_request_body: s.size("max_request_body"),
        max_response_body: s.size("max_response_body"),
        on_unknown: s.text("on_unknown"),
        lookup: s.section("lookup").map(lookup),
        mismatch_status: s.number("mismatch_status", 400..=499),
        replay_drop: s.texts("replay_drop"),
        release_on: s.codes("release_on"),
        unknown_on: s.codes("unknown_on"),
        fingerprint: s.section("fingerprint").map(fingerprint),
        mode: s.text("mode"),
        replay_auth: s.text_or_section("replay_auth").map(replay_auth),
    }
}

fn lookup(mut s: Section<'_>) -> Lookup {
    let read = Lookup {
        location: s.location().clone(),
        method: s.text("method"),
        path: s.text("path"),
        headers: s.any("headers"),
        found: s.text("found"),
        not_found: s.codes("not_found"),
        status: s.any("status"),
        body: s.any("body"),
        settle: s.duration("settle"),
        timeout: s.duration("timeout"),
        upstream: s.text("upstream"),
    };
    s.finish();
    read
}

fn tenant(mut s: Section<'_>) -> Tenant {
    let read = Tenant {
        location: s.location().clone(),
        header: s.text("header"),
        path: s.text("path"),
        host: s.flag("host"),
        basic_user: s.flag("basic_user"),
        credential: s.flag("credential"),
        jwt_claim: s.text("jwt_claim"),
        fixed: s.text("fixed"),
    };
    s.refused(
        "client_cert",
        "needs TLS from the caller to this listener, which Oncegate does not speak yet; let the proxy in front check the \
         certificate and name the tenant in a header of its own",
    );
    s.finish();
    read
}

fn fingerprint(mut s: Section<'_>) -> Fingerprint {
    let read = Fingerprint {
        only: s.texts("only"),
        ignore: s.texts("ignore"),
        headers: s.texts("headers"),
        ignore_query: s.texts("ignore_query"),
        ignore_xml: s.texts("ignore_xml"),
        xml_namespaces: s.named_texts("xml_namespaces"),
        max_decoded: s.size("max_decoded"),
    };
    s.finish();
    read
}

fn route(mut s: Section<'_>) -> Route {
    let read = Route {
        location: s.location().clone(),
        method: s.text("method"),
        methods: s.texts("methods"),
        path: s.text("path"),
        operation: s.text("operation"),
        upstream: s.text("upstream"),
        policy: policy(&mut s),
        events: s.sections("event").into_iter().map(event).collect(),
    };
    s.finish();
    read
}

fn event(mut s: Section<'_>) -> Event {
    let read = Event {
        location: s.location().clone(),
        kind: s.text("type"),
        when: s.text("when"),
        payload: s.any("payload"),
        for_each: s.text("for_each"),
        event_key: s.text("event_key"),
        ordering_key: s.text("ordering_key"),
        sinks: s.texts("sinks"),
    };
    s.finish();
    read
}

fn sink(mut s: Section<'_>) -> Sink {
    let backoff = s.section("backoff").map(|mut pace| {
        let read = (pace.duration("base"), pace.duration("max"));
        pace.finish();
        read
    });
    let (backoff_base, backoff_max) = backoff.unwrap_or_default();
    let read = Sink {
        location: s.location().clone(),
        name: s.text("name"),
        url: s.text("url"),
        events: s.texts("events"),
        format: s.text("format"),
        headers: s.named_texts_or_sections("headers").into_iter().map(header).collect(),
        ca_file: s.text("ca_file"),
        client_cert_file: s.text("client_cert_file"),
        client_key_file: s.text("client_key_file"),
        secret: s.text("secret"),
        secret_file: s.text("secret_file"),
        secret_env: s.text("secret_env"),
        timeout: s.duration("timeout"),
        concurrency: s.number("concurrency", 1..=1000),
        backoff_base,
        backoff_max,
        max_attempts: s.number("max_attempts", 1..=1_000_000),
        max_age: s.duration("max_age"),
        max_refusals: s.number("max_refusals", 1..=1_000_000),
        allow_private: s.flag("allow_private"),
        allow_http: s.flag("allow_http"),
        pause_after: s.number("pause_after", 1..=1_000_000),
        user: s.text("user"),
        subject: s.text("subject"),
        stream: s.text("stream"),
        max_length: s.number("max_length", 1..=u32::MAX),
        ordering: s.text("ordering"),
        on_dead: s.text("on_dead"),
    };
    s.finish();
    read
}

fn header((name, said): (String, TextOrSection<'_>)) -> Header {
    match said {
        TextOrSection::Text(word) => {
            let location = word.location.clone();
            Header { name, location, value: Some(word), file: None, env: None }
        }
        TextOrSection::Section(mut s) => {
            let location = s.location().clone();
            let (file, env) = (s.text("file"), s.text("env"));
            s.finish();
            Header { name, location, value: None, file, env }
        }
    }
}

fn outbox(mut s: Section<'_>) -> Outbox {
    let read = Outbox {
        retention: s.duration("retention"),
        max_payload: s.size("max_payload"),
        unknown_events: s.flag("unknown_events"),
        poll: s.duration("poll"),
        relay: s.flag("relay"),
        backlog_max: s.number("backlog_max", 0..=u32::MAX),
        source: s.text("source"),
    };
    s.finish();
    read
}

fn log(mut s: Section<'_>) -> Log {
    let read = Log { format: s.text("format"), level: s.text("level") };
    s.finish();
    read
}
