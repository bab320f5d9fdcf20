//! Delivers an event to a webhook: Standard Webhooks headers, a signature over the body, one deadline for all steps.
//!
//! Invariants:
//!
//! - Every attempt sends the same id and the same body. Each attempt has its own time and signatures.
//! - In each format the signature covers the body that is sent. Every secret signs, so that during a rotation a sink accepts
//!   the delivery with the one secret that it knows.
//! - One deadline covers resolving, connecting, TLS, sending, headers and body. The status decides: a 2xx is a delivery even
//!   if
//!   its body is cut, endless or late. Without complete headers the result is not known, and the event is sent again.
//! - No redirect is followed, and only addresses are dialled that the settings allow ([`crate::relay::address`]).
//! - Secrets appear in no log, no error and no Debug output.
//!
//! After a crash the claim runs out, and the event is delivered again.

mod connection;
mod message;
mod secrets;

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::BytesMut;
use http::header::{ACCEPT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, DATE, HOST, USER_AGENT};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use ring::hmac;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::time::{Instant, timeout_at};

use self::connection::{Client, Server};
pub use self::message::Format;
use self::message::{Outgoing, outgoing};
use self::secrets::Secrets;
pub use self::secrets::lines as secret_lines;
use super::Delivered;
use crate::clock;
use crate::net::{self, tls};
use crate::relay::address::Rule;
pub use crate::relay::address::{Resolve, System};
use crate::relay::verdict::{ERROR_MAX, Evidence, clean, retry_after};
use crate::store::Claimed;

/// How much of an answer's body is read before the connection is dropped, in bytes.
const BODY_MAX: usize = 64 * 1024;

/// The default interval between two readings of a file of secrets.
pub const SECRETS_EVERY: Duration = Duration::from_secs(2);

/// Receivers refuse a signature whose time is five minutes off. From this difference on the relay logs a warning.
const CLOCK_OFF_MAX: u64 = 4 * 60;

/// The value before an answer has shown the sink's clock.
const NO_CLOCK: i64 = i64::MIN;

const WEBHOOK_ID: HeaderName = HeaderName::from_static("webhook-id");
const WEBHOOK_SIGNATURE: HeaderName = HeaderName::from_static("webhook-signature");
const WEBHOOK_TIMESTAMP: HeaderName = HeaderName::from_static("webhook-timestamp");
const ATTEMPT: HeaderName = HeaderName::from_static("oncegate-attempt");

/// A webhook as configured.
#[derive(Clone)]
pub struct Settings {
    /// Where events are posted.
    pub url: Uri,
    /// Its secrets, `whsec_` and base64; the first is the newest, all of them sign.
    pub secrets: Vec<String>,
    /// The file of the secrets. It is read again while events are delivered.
    pub secret_file: Option<PathBuf>,
    /// How often the file is read.
    pub secrets_every: Duration,
    /// The format of body and headers.
    pub format: Format,
    /// The source of its CloudEvents.
    pub source: String,
    /// Headers of each delivery. None is [`is_reserved`].
    pub headers: HeaderMap,
    /// The only certificates to trust. `None`: the system's.
    pub ca_file: Option<PathBuf>,
    /// The certificate for a sink that asks for one.
    pub identity: Option<Identity>,
    /// Whether private, local and reserved addresses may be dialled.
    pub allow_private: bool,
    /// Whether plain `http` may be used for public addresses.
    pub allow_http: bool,
    /// The resolver of its name.
    pub resolver: Arc<dyn Resolve>,
}

/// A certificate with its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The file with the certificate and its chain.
    pub cert_file: PathBuf,
    /// The file with the private key.
    pub key_file: PathBuf,
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Path and query of the URL may hold a token, and values of headers may be secret.
        let names: Vec<_> = self.headers.keys().collect();
        f.debug_struct("Settings")
            .field("host", &self.url.host())
            .field("secrets", &self.secrets.len())
            .field("format", &self.format)
            .field("source", &self.source)
            .field("headers", &names)
            .field("ca_file", &self.ca_file)
            .field("identity", &self.identity)
            .field("allow_private", &self.allow_private)
            .field("allow_http", &self.allow_http)
            .finish_non_exhaustive()
    }
}

/// Whether the relay or the connection sets this header, so that the settings cannot.
#[must_use]
pub fn is_reserved(name: &HeaderName) -> bool {
    const NAMES: [&str; 14] = [
        "accept-encoding",
        "connection",
        "content-encoding",
        "content-length",
        "content-type",
        "expect",
        "host",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "user-agent",
    ];
    const PREFIXES: [&str; 3] = ["webhook-", "ce-", "oncegate-"];
    let name = name.as_str();
    NAMES.contains(&name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

impl Settings {
    /// Checks these settings.
    ///
    /// # Errors
    /// What is wrong and what to do about it, without secrets.
    pub fn check(&self) -> Result<(), String> {
        let rule = self.rule()?;
        let host = self.url.host().unwrap_or_default();
        let user_info = self.url.authority().is_some_and(|a| a.as_str().contains('@'));
        if host.is_empty() || user_info {
            return Err("url needs a host, and no user name or password".into());
        }
        let literal = host.trim_matches(['[', ']']);
        if let Some(objection) = literal.parse().ok().and_then(|ip: IpAddr| rule.objection(ip)) {
            return Err(objection);
        }
        if let Some(name) = self.headers.keys().find(|name| is_reserved(name)) {
            return Err(format!("the header {name} is set by Oncegate itself"));
        }
        let asks = self.ca_file.is_some() || self.identity.is_some();
        if asks && !self.is_secure() {
            return Err("certificates have no meaning for an http url: use https".into());
        }
        if asks {
            tls_config(self)?;
        }
        secrets::signers(&self.secrets).map(drop)
    }

    fn is_secure(&self) -> bool {
        self.url.scheme_str() == Some("https")
    }

    fn rule(&self) -> Result<Rule, String> {
        match self.url.scheme_str() {
            Some("https") => Ok(Rule { public: true, private: self.allow_private }),
            Some("http") if self.allow_http || self.allow_private => {
                Ok(Rule { public: self.allow_http, private: self.allow_private })
            }
            Some("http") => Err(
                "url is http: use https, or set allow_http = true, or allow_private = true for a private target"
                    .into(),
            ),
            _ => Err("url must begin with https:// (or http://, where that is allowed)".into()),
        }
    }

    fn server(&self, sink: &str) -> Result<Server, String> {
        let host = self.url.host().unwrap_or_default().to_owned();
        let secure = self.is_secure();
        let tls = if secure {
            let (config, trusted) = tls_config(self)?;
            if self.ca_file.is_none() && trusted == 0 {
                tracing::warn!(sink, "the system has no root certificates");
            }
            Some(tls::to(&host, config).map_err(|error| format!("the url's host: {error}"))?)
        } else {
            None
        };
        Ok(Server {
            port: self.url.port_u16().unwrap_or(if secure { 443 } else { 80 }),
            host,
            rule: self.rule()?,
            resolver: Arc::clone(&self.resolver),
            tls,
        })
    }
}

/// TLS, and the number of roots that it trusts. Without roots each delivery fails with that error.
fn tls_config(settings: &Settings) -> Result<(rustls::ClientConfig, usize), String> {
    let roots = tls::roots(settings.ca_file.as_deref());
    let roots = roots.map_err(|why| format!("ca_file {why}"))?;
    let trusted = roots.len();
    let builder = tls::trusting(roots)?;
    let Some(Identity { cert_file, key_file }) = &settings.identity else {
        return Ok((builder.with_no_client_auth(), trusted));
    };
    let wrong =
        |error: &dyn fmt::Display| format!("client_cert_file {}: {error}", cert_file.display());
    let chain: Vec<_> = CertificateDer::pem_file_iter(cert_file)
        .and_then(Iterator::collect)
        .map_err(|error| wrong(&error))?;
    let key = PrivateKeyDer::from_pem_file(key_file)
        .map_err(|error| format!("client_key_file {}: {error}", key_file.display()))?;
    let config = builder.with_client_auth_cert(chain, key).map_err(|error| wrong(&error))?;
    Ok((config, trusted))
}

/// The client of one webhook.
pub(super) struct Transport {
    sink: String,
    timeout: Duration,
    settings: Settings,
    secrets: Secrets,
    client: Client,
    /// By how many seconds the sink's clock is ahead of ours, or [`NO_CLOCK`].
    ahead: AtomicI64,
}

impl Transport {
    /// Makes a client with its own connection pool.
    pub(super) fn new(sink: &super::Settings, settings: &Settings) -> Result<Self, String> {
        let file = settings.secret_file.clone();
        Ok(Self {
            sink: sink.name.clone(),
            timeout: sink.timeout,
            secrets: Secrets::new(&sink.name, &settings.secrets, file, settings.secrets_every)?,
            client: Client::new(settings.server(&sink.name)?, sink.concurrency),
            settings: settings.clone(),
            ahead: AtomicI64::new(NO_CLOCK),
        })
    }

    /// By how many seconds the sink's clock is ahead of ours, by the last answer with a date.
    pub(super) fn clock_ahead(&self) -> Option<i64> {
        Some(self.ahead.load(Ordering::Relaxed)).filter(|ahead| *ahead != NO_CLOCK)
    }

    /// Sends an event once and returns by the deadline.
    pub(super) async fn deliver(&self, event: &Claimed, deadline: Instant) -> Delivered {
        let Settings { format, source, .. } = &self.settings;
        let outgoing = match outgoing(*format, source, &event.payload) {
            Ok(outgoing) => outgoing,
            Err(what) => return Delivered::failed(&what),
        };
        let signers = self.secrets.signers(deadline).await;
        let headers = match self.headers(event, &outgoing, &signers) {
            Ok(headers) => headers,
            Err(what) => return Delivered::failed(&what),
        };
        let target = self.settings.url.path_and_query().map_or("/", |target| target.as_str());
        let target: Uri = target.parse().unwrap_or_default();
        let request = |body| {
            let mut request = Request::new(body);
            *request.method_mut() = Method::POST;
            *request.uri_mut() = target.clone();
            *request.headers_mut() = headers.clone();
            request
        };
        let (response, connection) = match self.client.send(request, &outgoing.body, deadline).await
        {
            Ok(answered) => answered,
            Err(failure) => return Delivered::failed(&failure.text(self.timeout)),
        };
        let (head, body) = response.into_parts();
        self.note_clock(&head.headers);
        let (text, whole) = read_text(body, deadline).await;
        if whole {
            self.client.park(connection);
        }
        Delivered {
            evidence: Evidence::Answered { status: head.status, text },
            retry_after: retry_after(&head.headers, clock::time_of_day()),
        }
    }

    fn headers(
        &self,
        event: &Claimed,
        outgoing: &Outgoing,
        signers: &[hmac::Key],
    ) -> Result<HeaderMap, String> {
        let seconds = clock::since_1970().as_secs();
        let mut headers = self.settings.headers.clone();
        if let Some(authority) = self.settings.url.authority() {
            headers.insert(HOST, value(authority.as_str())?);
        }
        headers.insert(CONTENT_TYPE, outgoing.content_type.clone());
        // Sent also if it is 0, because some servers refuse a POST without it.
        headers.insert(CONTENT_LENGTH, outgoing.body.len().into());
        headers.insert(USER_AGENT, HeaderValue::from_static(net::AGENT));
        // The answer must not be compressed, so that the limit counts its real size.
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        headers.insert(ATTEMPT, event.attempts.saturating_add(1).into());
        headers.extend(outgoing.attributes.iter().cloned());
        sign(&mut headers, &event.event_id.to_string(), seconds, &outgoing.body, signers)?;
        Ok(headers)
    }

    fn note_clock(&self, headers: &HeaderMap) {
        let date = headers.get(DATE).and_then(|value| value.to_str().ok());
        let Some(date) = date.and_then(|text| httpdate::parse_http_date(text).ok()) else { return };
        let seconds = |age: Duration| i64::try_from(age.as_secs()).unwrap_or(i64::MAX);
        let now = clock::time_of_day();
        let ahead = match date.duration_since(now) {
            Ok(ahead) => seconds(ahead),
            Err(behind) => -seconds(behind.duration()),
        };
        let off = |ahead: i64| ahead != NO_CLOCK && ahead.unsigned_abs() > CLOCK_OFF_MAX;
        let before = self.ahead.swap(ahead, Ordering::Relaxed);
        if off(ahead) && !off(before) {
            let sink = &self.sink;
            tracing::warn!(
                sink,
                ahead,
                "the sink's clock differs from ours by this many seconds: from 300 on it refuses our signatures"
            );
        }
    }
}

fn value(text: &str) -> Result<HeaderValue, String> {
    HeaderValue::from_str(text).map_err(|_| "a header has no valid value".to_owned())
}

fn sign(
    headers: &mut HeaderMap,
    id: &str,
    seconds: u64,
    body: &[u8],
    signers: &[hmac::Key],
) -> Result<(), String> {
    // Consumers verify with libraries that take text: what is none would be refused there for ever.
    std::str::from_utf8(body).map_err(|_| "the payload is not UTF-8 text".to_owned())?;
    let sign = |key: &hmac::Key| {
        let mut signed = hmac::Context::with_key(key);
        signed.update(format!("{id}.{seconds}.").as_bytes());
        signed.update(body);
        format!("v1,{}", STANDARD.encode(signed.sign()))
    };
    let signatures: Vec<String> = signers.iter().map(sign).collect();
    headers.insert(WEBHOOK_ID, value(id)?);
    headers.insert(WEBHOOK_TIMESTAMP, seconds.into());
    headers.insert(WEBHOOK_SIGNATURE, value(&signatures.join(" "))?);
    Ok(())
}

/// Reads the body to its end, to [`BODY_MAX`] or to the deadline. Returns the beginning of its text, and whether it was
/// read to its end. Dropping an unfinished body closes the connection.
async fn read_text(mut body: Incoming, deadline: Instant) -> (String, bool) {
    let mut kept = BytesMut::new();
    let mut seen = 0_usize;
    let whole = loop {
        let frame = match timeout_at(deadline, body.frame()).await {
            Ok(Some(Ok(frame))) => frame,
            Ok(None) => break true,
            Ok(Some(Err(_))) | Err(_) => break false,
        };
        let Some(data) = frame.data_ref() else { continue };
        seen = seen.saturating_add(data.len());
        let room = ERROR_MAX.saturating_sub(kept.len()).min(data.len());
        kept.extend_from_slice(data.get(..room).unwrap_or_default());
        if seen > BODY_MAX {
            break false;
        }
    };
    (clean(&String::from_utf8_lossy(&kept)), whole)
}

#[cfg(test)]
mod tests {
    use standardwebhooks::Webhook;

    use super::*;

    const SECRET: &str = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=";
    const OTHER: &str = "whsec_ZmVkY2JhOTg3NjU0MzIxMGZlZGNiYTk4NzY1NDMyMTA=";

    fn settings(url: &str) -> Settings {
        Settings {
            url: url.parse().unwrap(),
            secrets: vec![SECRET.into()],
            secret_file: None,
            secrets_every: SECRETS_EVERY,
            format: Format::StandardWebhooks,
            source: "/oncegate".into(),
            headers: HeaderMap::new(),
            ca_file: None,
            identity: None,
            allow_private: false,
            allow_http: true,
            resolver: Arc::new(System),
        }
    }

    #[test]
    fn inner_addresses_are_refused_by_name_of_address_and_setting() {
        for url in [
            "http://127.0.0.1/",
            "http://[::ffff:127.0.0.1]/",
            "http://[::]:8080/",
            "http://0.0.0.0/",
            "http://169.254.169.254/latest",
            "http://100.64.0.1/",
            "http://[64:ff9b::7f00:1]/",
            "https://[2002:7f00:1::]/",
        ] {
            let error = settings(url).check().unwrap_err();
            assert!(error.contains("allow_private"), "{url}: {error}");
            let open = Settings { allow_private: true, ..settings(url) };
            assert_eq!(open.check(), Ok(()), "{url}");
        }
        assert!(settings("http://user:pw@example.com/").check().is_err());
        assert!(settings("http://example.com@127.0.0.1/").check().is_err());
        assert!(settings("ftp://example.com/").check().is_err());
    }

    #[test]
    fn plain_http_needs_a_setting() {
        let strict = |url| Settings { allow_http: false, ..settings(url) };
        assert!(strict("http://example.com/").check().unwrap_err().contains("allow_http"));
        assert_eq!(strict("https://example.com/").check(), Ok(()));
        let private = Settings { allow_private: true, ..strict("http://127.0.0.1/") };
        assert_eq!(private.check(), Ok(()));
        let public = Settings { allow_private: true, ..strict("http://1.1.1.1/") };
        assert!(public.check().unwrap_err().contains("allow_http"));
    }

    #[test]
    fn a_malformed_secret_is_an_error_that_does_not_show_it() {
        let short = "whsec_MDEyMzQ1Njc=";
        for secret in ["MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=", "whsec_%%%", short, ""] {
            let bad = Settings { secrets: vec![secret.into()], ..settings("https://example.com") };
            let error = bad.check().unwrap_err();
            assert!(error.contains("secret 1"), "{error}");
            assert!(secret.is_empty() || !error.contains(secret), "{error}");
        }
        assert!(Settings { secrets: vec![], ..settings("https://e.com") }.check().is_err());
        let mut known = settings("https://example.com");
        known.headers.insert("authorization", "Bearer s3cr3t".parse().unwrap());
        let shown = format!("{known:?}");
        assert!(!shown.contains("MDEyMzQ1") && !shown.contains("s3cr3t"), "{shown}");
    }

    #[test]
    fn no_setting_replaces_what_the_signature_or_the_connection_depends_on() {
        for name in ["webhook-id", "ce-type", "content-length", "host", "oncegate-attempt", "te"] {
            let mut bad = settings("https://example.com");
            bad.headers.insert(name, HeaderValue::from_static("1"));
            assert!(bad.check().unwrap_err().contains(name), "{name}");
        }
        let mut fine = settings("https://example.com");
        fine.headers.insert("authorization", HeaderValue::from_static("Bearer x"));
        assert_eq!(fine.check(), Ok(()));
    }

    #[test]
    fn f58_certificates_that_cannot_be_read_are_named_before_anything_is_sent() {
        let dir = tempfile::tempdir().unwrap();
        let broken = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        for content in [None, Some(""), Some("no certificate"), Some(broken)] {
            let path = dir.path().join("ca.pem");
            if let Some(content) = content {
                std::fs::write(&path, content).unwrap();
            }
            let bad = Settings { ca_file: Some(path.clone()), ..settings("https://example.com") };
            let error = tls_config(&bad).unwrap_err();
            let place = format!("ca_file {}: ", path.display());
            assert!(error.starts_with(&place) && error.len() > place.len(), "{error}");
        }
    }

    #[test]
    fn during_a_rotation_both_secrets_verify_and_a_stranger_does_not() {
        let signers = secrets::signers(&[OTHER.into(), SECRET.into()]).unwrap();
        let payload = r#"{"b":1.0,"a":12345678901234567890,"u":"é\/<"}"#.as_bytes();
        let now = clock::since_1970().as_secs();
        let mut headers = HeaderMap::new();
        sign(&mut headers, "8e0f7a3c", now, payload, &signers).unwrap();
        for secret in [SECRET, OTHER] {
            Webhook::new(secret).unwrap().verify(payload, &headers).unwrap();
        }
        let stranger = Webhook::new("whsec_c3RyYW5nZXJzdHJhbmdlcnN0cmFuZ2Vy").unwrap();
        assert!(stranger.verify(payload, &headers).is_err());
    }
}
