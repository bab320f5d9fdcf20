//! NATS JetStream as a target: publishes a message with the event's id, and waits for the stream's acknowledgement.
//!
//! Invariants:
//!
//! - An event is delivered when a stream has acknowledged it, as new or as a duplicate. A subscriber on the subject is not
//!   enough.
//! - `Nats-Msg-Id` is the event's id in every attempt, so that the stream keeps one message of all attempts within its
//!   duplicate
//!   window. The body is the stored bytes of the event.
//! - A value of an event never adds a wildcard to a subject, and a tenant never adds a level. So a client that may read
//!   `orders.acme.>` reads nothing of another tenant.
//! - Only servers that the settings name are dialled. Other servers that a cluster announces are ignored.
//!
//! The client library would reconnect in the background and then send its buffer, however late. Here a lost connection is
//! given up with its buffer ([`super::broker`]): its deliveries fail at once, and are tried again under their ids.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_nats::client::{Request, RequestErrorKind};
use async_nats::connection::State;
use async_nats::{Client, ConnectOptions, Event, HeaderMap, HeaderValue, ServerAddr, ServerError};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use super::super::address::port_problem;
use super::Delivered;
use super::broker::{CONNECT_MAX, CONTENT_TYPE, Line, Login, Shared, Tls, header};
use crate::store::Claimed;
use crate::telemetry::causes;

/// Longest subject, in bytes: with the inbox of the answer it must fit into a server's control line of 4 KiB.
const SUBJECT_MAX: usize = 2048;

/// How often a silent connection is pinged. It is given up after two pings without an answer.
const PING_EVERY: Duration = Duration::from_secs(20);

/// JetStream's code for a message that is larger than its stream takes.
const TOO_LARGE: u64 = 10_054;

/// The characters that a level of a subject may have unencoded.
const PIECE: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_');

/// The settings of a stream: where messages are published.
#[derive(Clone)]
pub struct Settings {
    /// The servers of one installation; the first that answers is used.
    pub servers: Vec<ServerAddr>,
    /// The subject.
    pub subject: Subject,
    /// The log-in.
    pub login: Login,
    /// Certificates, for `tls://` and for servers that ask for TLS.
    pub tls: Tls,
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hosts: Vec<_> = self.servers.iter().map(|at| (at.host(), at.port())).collect();
        f.debug_struct("nats::Settings")
            .field("servers", &hosts)
            .field("subject", &self.subject)
            .field("login", &self.login)
            .field("tls", &self.tls)
            .finish()
    }
}

impl Settings {
    /// The servers whose connections are not encrypted unless the server asks for TLS.
    pub fn plain_hosts(&self) -> impl Iterator<Item = &str> {
        self.servers.iter().filter(|at| !at.tls_required()).map(ServerAddr::host)
    }
}

/// The servers that a URL names: one, or several with commas between them.
///
/// # Errors
/// What is wrong and what to do about it, without secrets.
pub fn servers(url: &str) -> Result<Vec<ServerAddr>, String> {
    url.split(',').map(|one| server(one.trim())).collect()
}

fn server(url: &str) -> Result<ServerAddr, String> {
    let wrong = "is no URL of a NATS server; write \"nats://host:4222\" or \"tls://host:4222\", \
                 several with commas between them";
    if let Some(wrong) = port_problem(url) {
        return Err(wrong);
    }
    let server: ServerAddr = url.parse().map_err(|_| wrong.to_owned())?;
    if server.has_user_pass() || server.password().is_some() {
        return Err("holds a log-in; name it by `user` and `secret_file`".to_owned());
    }
    let plain = server.clone().into_inner();
    let bare = matches!(plain.path(), "" | "/") && plain.query().is_none();
    let named = matches!(server.scheme(), "nats" | "tls") && !server.host().is_empty();
    if named && bare && plain.fragment().is_none() { Ok(server) } else { Err(wrong.to_owned()) }
}

/// A template of subjects: text with `{type}`, `{tenant}` and `{operation}` in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject(Vec<Part>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Text(String),
    Type,
    Tenant,
    Operation,
}

impl Subject {
    /// Reads a template.
    ///
    /// # Errors
    /// What is wrong and what to do about it.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some((before, opened)) = rest.split_once('{') {
            let unclosed = || "has a `{` without its `}`".to_owned();
            let (name, after) = opened.split_once('}').ok_or_else(unclosed)?;
            parts.push(Part::Text(before.to_owned()));
            parts.push(match name {
                "type" => Part::Type,
                "tenant" => Part::Tenant,
                "operation" => Part::Operation,
                _ => {
                    return Err(format!(
                        "{{{name}}} is not one of {{type}}, {{tenant}}, {{operation}}"
                    ));
                }
            });
            rest = after;
        }
        parts.push(Part::Text(rest.to_owned()));
        parts.retain(|part| *part != Part::Text(String::new()));
        let subject = Self(parts);
        let plain = |c: char| c.is_ascii_graphic() && !matches!(c, '*' | '>' | '{' | '}');
        let sample = subject.of("t", "t", "t");
        if !sample.chars().all(plain) || sample.split('.').any(str::is_empty) {
            return Err(
                "must be words of visible ASCII with dots between them, without wildcards: \
                        \"orders.{type}\""
                    .to_owned(),
            );
        }
        if sample.starts_with('$') || sample.starts_with("_INBOX.") {
            return Err("is a subject of the server's own; choose another first word".to_owned());
        }
        Ok(subject)
    }

    /// The subject of an event. Dots in types and operations separate levels. A tenant is always one level.
    fn of(&self, kind: &str, tenant: &str, operation: &str) -> String {
        let part = |part: &Part| match part {
            Part::Text(text) => text.clone(),
            Part::Type => levels(kind),
            Part::Tenant => piece(tenant),
            Part::Operation => levels(operation),
        };
        self.0.iter().map(part).collect()
    }
}

/// Encodes a text as one level of a subject.
fn piece(value: &str) -> String {
    utf8_percent_encode(value, PIECE).to_string()
}

fn levels(value: &str) -> String {
    if value.split('.').any(str::is_empty) {
        return piece(value);
    }
    value.split('.').map(piece).collect::<Vec<_>>().join(".")
}

/// The client of one stream.
pub(super) struct Transport {
    name: String,
    settings: Settings,
    timeout: Duration,
    concurrency: usize,
    shared: Shared<Link>,
}

/// A connection and its state.
struct Link {
    client: Client,
    news: watch::Receiver<News>,
}

/// Messages of a server that are no answers.
#[derive(Clone, Debug, Default)]
struct News {
    /// Whether the connection is lost, even if the client has made another one since.
    lost: bool,
    /// The last error that the server sent.
    complaint: String,
}

struct Message {
    subject: String,
    request: Request,
}

/// A stream's acknowledgement, or why there is none.
#[derive(Deserialize)]
struct Answer {
    error: Option<Refusal>,
    #[serde(default)]
    stream: String,
    /// From 1; 0 if there is none.
    #[serde(default)]
    seq: u64,
}

#[derive(Deserialize)]
struct Refusal {
    #[serde(default)]
    err_code: u64,
    #[serde(default)]
    description: String,
}

impl Transport {
    pub(super) fn new(sink: &super::Settings, settings: &Settings) -> Self {
        Self {
            name: sink.name.clone(),
            settings: settings.clone(),
            timeout: sink.timeout,
            concurrency: sink.concurrency,
            shared: Shared::new(),
        }
    }

    /// Publishes an event once and returns by the deadline.
    pub(super) async fn deliver(&self, event: &Claimed, deadline: Instant) -> Delivered {
        let message = match self.message(event) {
            Ok(message) => message,
            Err(what) => return Delivered::refused(&what),
        };
        let alive = |link: &Link| {
            link.client.connection_state() == State::Connected && !link.news.borrow().lost
        };
        let line = match timeout_at(deadline, self.shared.line(alive, self.connect())).await {
            Ok(Ok(line)) => line,
            Ok(Err(why)) => return Delivered::failed(&why),
            Err(_) => return Delivered::failed(&self.late("connecting")),
        };
        match timeout_at(deadline, publish(&line, message)).await {
            Ok(end) => end,
            Err(_) => {
                // The client keeps an entry for the missing answer until the connection ends.
                line.retire();
                Delivered::failed(&self.late("waiting for the stream's acknowledgement"))
            }
        }
    }

    fn late(&self, phase: &str) -> String {
        format!("time-out after {:?} while {phase}", self.timeout)
    }

    fn message(&self, event: &Claimed) -> Result<Message, String> {
        let Claimed { event_id, kind, tenant, operation, key, payload, .. } = event;
        let subject = self.settings.subject.of(kind, tenant, operation);
        if subject.len() > SUBJECT_MAX {
            return Err(format!(
                "the subject has {} bytes: more than {SUBJECT_MAX}",
                subject.len()
            ));
        }
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("Nats-Msg-Id", event_id.to_string().as_str()),
            ("Content-Type", CONTENT_TYPE),
            ("Oncegate-Type", kind),
            ("Oncegate-Tenant", tenant),
            ("Oncegate-Operation", operation),
            ("Oncegate-Key", key),
        ] {
            let value: HeaderValue =
                header(value).parse().map_err(|_| format!("{name} has no valid value"))?;
            headers.insert(name, value);
        }
        // The delivery has a deadline, so the client needs no time-out.
        let request = Request::new().headers(headers).payload(payload.clone()).timeout(None);
        Ok(Message { subject, request })
    }

    async fn connect(&self) -> Result<Link, String> {
        let (sender, news) = watch::channel(News::default());
        let options = self.options(sender);
        let connected = options.connect(&*self.settings.servers).await;
        let client = connected.map_err(|error| format!("connecting: {}", causes(&error)))?;
        let server = client.server_info();
        tracing::info!(sink = self.name, server = server.server_name, "connected to the broker");
        Ok(Link { client, news })
    }

    fn options(&self, sender: watch::Sender<News>) -> ConnectOptions {
        let servers = self.settings.servers.len().max(1);
        let share = self.timeout / u32::try_from(servers).unwrap_or(u32::MAX);
        let (name, sender) = (self.name.clone(), Arc::new(sender));
        let hear = move |event: Event| {
            let (name, sender) = (name.clone(), Arc::clone(&sender));
            async move { hear(&name, &sender, event) }
        };
        let options = ConnectOptions::new()
            .name("oncegate")
            .connection_timeout(share.min(CONNECT_MAX))
            .ignore_discovered_servers()
            // Each server once. The client has no other setting that stops it from reconnecting.
            .max_reconnects(servers)
            .reconnect_delay_callback(|_| Duration::ZERO)
            .ping_interval(PING_EVERY)
            .client_capacity(self.concurrency.max(1))
            .event_callback(hear);
        let options = match self.settings.login.clone() {
            Login::Nobody => options,
            Login::Secret(token) => options.token(token),
            Login::User { name, password } => options.user_and_password(name, password),
        };
        let Tls { ca_file, client } = self.settings.tls.clone();
        let options = match ca_file {
            Some(file) => options.add_root_certificates(file),
            None => options,
        };
        match client {
            Some((certificate, key)) => options.add_client_certificate(certificate, key),
            None => options,
        }
    }
}

/// Notes the events of a connection.
fn hear(sink: &str, sender: &watch::Sender<News>, event: Event) {
    match event {
        Event::Disconnected | Event::Closed => {
            let first = sender.send_if_modified(|news| !std::mem::replace(&mut news.lost, true));
            if first {
                tracing::info!(sink, "the connection to the broker is over");
            }
        }
        Event::ServerError(error) => sender.send_modify(|news| {
            news.complaint = match error {
                ServerError::Other(text) => text,
                ServerError::AuthorizationViolation | ServerError::SlowConsumer(_) => {
                    error.to_string()
                }
            };
        }),
        Event::Connected
        | Event::LameDuckMode
        | Event::Draining
        | Event::SlowConsumer(_)
        | Event::ClientError(_) => {}
    }
}

/// Publishes, and waits for the acknowledgement or the end of the connection.
async fn publish(line: &Line<Link>, message: Message) -> Delivered {
    let Message { subject, request } = message;
    let Link { client, news } = &line.connection;
    let asked = client.send_request(subject.clone(), request);
    let answered = tokio::select! {
        // An answer that has arrived counts, even if the connection has ended since.
        biased;
        answered = asked => answered,
        why = objection(news.clone(), &subject) => return Delivered::failed(&why),
    };
    match answered {
        Ok(answer) => read(&answer.payload),
        Err(error) => match error.kind() {
            RequestErrorKind::NoResponders => Delivered::failed(&format!(
                "no stream takes the subject {subject}: create one that listens on it"
            )),
            RequestErrorKind::MaxPayloadExceeded | RequestErrorKind::InvalidSubject => {
                Delivered::refused(&causes(&error))
            }
            RequestErrorKind::TimedOut | RequestErrorKind::Other => {
                line.retire();
                Delivered::failed(&format!("publishing: {}", causes(&error)))
            }
        },
    }
}

/// Waits until no answer can come any more: the connection is lost, or the server refused this subject.
async fn objection(mut news: watch::Receiver<News>, subject: &str) -> String {
    loop {
        let News { lost, complaint } = news.borrow_and_update().clone();
        if complaint.contains(&format!("\"{subject}\"")) {
            return format!("the server says: {complaint}");
        }
        if lost {
            let said = if complaint.is_empty() { complaint } else { format!(" ({complaint})") };
            return format!("the connection was lost before the stream had acknowledged{said}");
        }
        if news.changed().await.is_err() {
            return "the connection was lost before the stream had acknowledged".to_owned();
        }
    }
}

fn read(answer: &[u8]) -> Delivered {
    let Ok(answer) = serde_json::from_slice::<Answer>(answer) else {
        return Delivered::failed("somebody answered who is no stream");
    };
    match answer {
        Answer { error: Some(Refusal { err_code, description }), .. } => {
            let what = format!("the stream refused: {description} ({err_code})");
            if err_code == TOO_LARGE { Delivered::refused(&what) } else { Delivered::failed(&what) }
        }
        Answer { error: None, stream, seq: 1.. } if !stream.is_empty() => Delivered::taken(),
        Answer { error: None, .. } => Delivered::failed("somebody answered who is no stream"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::relay::verdict::Evidence;

    #[test]
    fn a_value_of_an_event_adds_no_wildcard_and_a_tenant_no_level() {
        let subject = Subject::parse("orders.{tenant}.{type}").unwrap();
        for (kind, tenant, expected) in [
            ("order.created", "acme", "orders.acme.order.created"),
            ("order.created", "acme.eu", "orders.acme%2Eeu.order.created"),
            (">", "*", "orders.%2A.%3E"),
            ("a..b", ".", "orders.%2E.a%2E%2Eb"),
            (".a", "a b", "orders.a%20b.%2Ea"),
            ("POST /a/{b}", "é", "orders.%C3%A9.POST%20%2Fa%2F%7Bb%7D"),
            ("50%", "a_b-c", "orders.a_b-c.50%25"),
        ] {
            assert_eq!(subject.of(kind, tenant, "o"), expected);
        }
        let plain = Subject::parse("events").unwrap();
        assert_eq!(plain.of("a", "b", "c"), "events");
    }

    #[test]
    fn a_subject_that_cannot_be_published_to_is_refused_with_what_to_do() {
        for (text, said) in [
            ("orders.{kind}", "{type}"),
            ("orders.{type", "without its"),
            ("orders.type}", "visible ASCII"),
            ("orders..{type}", "dots between"),
            (".orders", "dots between"),
            ("", "dots between"),
            ("orders.*", "wildcards"),
            ("orders.>", "wildcards"),
            ("or ders", "visible ASCII"),
            ("$JS.API.{type}", "first word"),
            ("_INBOX.{type}", "first word"),
        ] {
            let error = Subject::parse(text).unwrap_err();
            assert!(error.contains(said), "{text}: {error}");
        }
    }

    #[test]
    fn only_a_streams_acknowledgement_delivers() {
        let end = |answer: &str| read(answer.as_bytes()).evidence;
        assert_eq!(end(r#"{"stream":"orders","seq":7}"#), Evidence::Taken);
        assert_eq!(end(r#"{"stream":"orders","seq":7,"duplicate":true}"#), Evidence::Taken);
        for answer in ["", "ok", "{}", r#"{"seq":7}"#, r#"{"stream":"s","seq":0}"#, "[1]"] {
            assert!(matches!(end(answer), Evidence::Failed { .. }), "{answer}");
        }
        let refusal = |code: u64| {
            format!(
                r#"{{"error":{{"code":400,"err_code":{code},"description":"no"}},"stream":"s","seq":0}}"#
            )
        };
        assert!(
            matches!(end(&refusal(10_077)), Evidence::Failed { .. }),
            "a full stream may be emptied"
        );
        assert!(matches!(end(&refusal(TOO_LARGE)), Evidence::Refused { .. }));
    }

    #[test]
    fn a_url_that_holds_a_log_in_or_is_none_of_nats_is_refused_without_being_shown() {
        assert_eq!(servers("nats://a:4222, tls://b").unwrap().len(), 2);
        assert_eq!(servers("nats://[::1]:1").unwrap().first().unwrap().port(), 1);
        for url in
            ["nats://u:geheim@a", "nats://:geheim@a", "ws://a", "nats://a/geheim", "nats://", ""]
        {
            let error = servers(url).unwrap_err();
            assert!(!error.contains("geheim"), "{error}");
        }
    }
}
