//! One delivery to a webhook: Standard Webhooks headers, a signature over the bytes that are sent, one deadline over all.
//!
//! What must stay true:
//!
//! - The id is the event's and the body its stored bytes in every attempt; time and signatures are the attempt's own.
//! - Each secret signs, so that a sink that knows only one of them during a rotation accepts.
//! - One deadline covers resolving, connecting, TLS, sending, headers and body. The status decides: a 2xx whose body
//!   is cut, endless or late is a delivery; without a complete head nothing is known, and the event is sent again.
//! - No redirect is followed, and no address is dialled that the settings do not allow ([`crate::relay::address`]).
//! - Secrets appear in no log, no error and no Debug output.
//!
//! Connections are kept for a short while, shorter than sinks usually do. A reset on a reused connection before
//! anything was written is repeated at once on a fresh one, which the stable id allows; any other reset is an
//! ordinary failure. A process that dies here leaves a claim that runs out: the event is delivered again.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::{Bytes, BytesMut};
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, USER_AGENT};
use http::{HeaderMap, HeaderValue, Method, Request, Uri};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::{HttpConnector, capture_connection};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use standardwebhooks::{
    HEADER_WEBHOOK_ID, HEADER_WEBHOOK_SIGNATURE, HEADER_WEBHOOK_TIMESTAMP, Webhook,
};
use tokio::time::{Instant, timeout_at};

use super::Delivered;
use crate::relay::address::{Resolver, Rule};
use crate::relay::verdict::{ERROR_MAX, Evidence, clean, retry_after};
use crate::store::Claimed;
use crate::telemetry::causes;

/// How long an unused connection is kept: below the five seconds at which common servers close theirs.
const IDLE_MAX: Duration = Duration::from_secs(4);

/// How much of an answer's body is read before the connection is dropped, in bytes.
const BODY_MAX: usize = 64 * 1024;

/// Largest head of an answer, in bytes.
const HEAD_MAX: usize = 128 * 1024;

/// Sizes of a secret's key that Standard Webhooks allows, in bytes.
const SECRET_BYTES: std::ops::RangeInclusive<usize> = 24..=64;

const SECRET_PREFIX: &str = "whsec_";
const AGENT: &str = concat!("oncegate/", env!("CARGO_PKG_VERSION"));

/// A webhook as configured.
#[derive(Clone)]
pub struct Settings {
    /// Where events are posted.
    pub url: Uri,
    /// Its secrets, `whsec_` and base64; the first is the newest, all of them sign.
    pub secrets: Vec<String>,
    /// Whether private, local and reserved addresses may be dialled.
    pub allow_private: bool,
    /// Whether plain `http` may be used for public addresses.
    pub allow_http: bool,
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The URL's path and query may hold a token, the secrets are secret.
        f.debug_struct("Settings")
            .field("host", &self.url.host())
            .field("secrets", &self.secrets.len())
            .field("allow_private", &self.allow_private)
            .field("allow_http", &self.allow_http)
            .finish_non_exhaustive()
    }
}

impl Settings {
    /// Whether events can be sent by these settings.
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
        let literal = host.trim_start_matches('[').trim_end_matches(']');
        if let Some(objection) = literal.parse().ok().and_then(|ip: IpAddr| rule.objection(ip)) {
            return Err(objection);
        }
        self.signers().map(drop)
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

    fn signers(&self) -> Result<Vec<Webhook>, String> {
        if self.secrets.is_empty() {
            return Err("there is no secret to sign with".into());
        }
        let signer = |(line, secret): (usize, &String)| {
            let key =
                secret.strip_prefix(SECRET_PREFIX).and_then(|text| STANDARD.decode(text).ok());
            let key = key.filter(|key| SECRET_BYTES.contains(&key.len()));
            key.and_then(|key| Webhook::from_bytes(key).ok()).ok_or_else(|| {
                format!(
                    "secret {} is not {SECRET_PREFIX} followed by the base64 of {} to {} bytes",
                    line + 1,
                    SECRET_BYTES.start(),
                    SECRET_BYTES.end()
                )
            })
        };
        self.secrets.iter().enumerate().map(signer).collect()
    }
}

type Connector = HttpsConnector<HttpConnector<Resolver>>;

/// Carries events to one webhook.
pub(super) struct Courier {
    url: Uri,
    timeout: Duration,
    signers: Vec<Webhook>,
    client: Client<Connector, Full<Bytes>>,
}

impl Courier {
    /// With a connection pool of its own.
    pub(super) fn new(sink: &super::Settings, settings: &Settings) -> Result<Self, String> {
        Ok(Self {
            url: settings.url.clone(),
            timeout: sink.timeout,
            signers: settings.signers()?,
            client: client(sink, settings)?,
        })
    }

    /// Sends an event once and returns by the deadline.
    pub(super) async fn deliver(&self, event: &Claimed, deadline: Instant) -> Delivered {
        let mut request = match self.request(event) {
            Ok(request) => request,
            Err(what) => return Delivered::failed(&what),
        };
        let connection = capture_connection(&mut request);
        let response = match timeout_at(deadline, self.client.request(request)).await {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => return Delivered::failed(&causes(&error)),
            Err(_) => {
                let connected = connection.connection_metadata().is_some();
                return Delivered::failed(&self.late(connected));
            }
        };
        let (head, body) = response.into_parts();
        let text = read_text(body, deadline).await;
        Delivered {
            evidence: Evidence::Answered { status: head.status, text },
            retry_after: retry_after(&head.headers, wall_clock()),
        }
    }

    fn late(&self, connected: bool) -> String {
        let phase = if connected { "answering" } else { "resolving or connecting" };
        format!("time-out after {:?} while {phase}", self.timeout)
    }

    fn request(&self, event: &Claimed) -> Result<Request<Full<Bytes>>, String> {
        let seconds = wall_clock().duration_since(UNIX_EPOCH).map_or(0, |age| age.as_secs());
        let headers = self.sign(&event.event_id.to_string(), seconds, &event.payload)?;
        let mut request = Request::new(Full::new(event.payload.clone()));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.url.clone();
        *request.headers_mut() = headers;
        Ok(request)
    }

    fn sign(&self, id: &str, seconds: u64, payload: &[u8]) -> Result<HeaderMap, String> {
        let stamp = i64::try_from(seconds).unwrap_or(i64::MAX);
        let sign = |signer: &Webhook| signer.sign(id, stamp, payload);
        let signatures: Result<Vec<_>, _> = self.signers.iter().map(sign).collect();
        let signatures = signatures.map_err(|_| "the payload is not UTF-8 text".to_owned())?;
        let value = |text: &str| {
            HeaderValue::from_str(text).map_err(|_| "a header has no valid value".to_owned())
        };
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        // Named also where it is 0: some servers refuse a POST without it.
        headers.insert(CONTENT_LENGTH, payload.len().into());
        headers.insert(USER_AGENT, HeaderValue::from_static(AGENT));
        headers.insert(HEADER_WEBHOOK_ID, value(id)?);
        headers.insert(HEADER_WEBHOOK_TIMESTAMP, stamp.into());
        headers.insert(HEADER_WEBHOOK_SIGNATURE, value(&signatures.join(" "))?);
        Ok(headers)
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "receivers compare the signed timestamp, and Retry-After's date, with the time of day"
)]
fn wall_clock() -> SystemTime {
    SystemTime::now()
}

fn client(
    sink: &super::Settings,
    settings: &Settings,
) -> Result<Client<Connector, Full<Bytes>>, String> {
    let mut http = HttpConnector::new_with_resolver(Resolver(settings.rule()?));
    http.enforce_http(false);
    http.set_nodelay(true);
    let https = HttpsConnectorBuilder::new()
        .with_tls_config(tls(&sink.name, settings)?)
        .https_or_http()
        .enable_http1()
        .wrap_connector(http);
    let client = Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(IDLE_MAX)
        .pool_max_idle_per_host(sink.concurrency)
        .http1_max_buf_size(HEAD_MAX)
        .build(https);
    Ok(client)
}

/// TLS with the system's roots. Without any, each delivery fails and says so, and the next start looks again.
fn tls(name: &str, settings: &Settings) -> Result<rustls::ClientConfig, String> {
    let mut roots = rustls::RootCertStore::empty();
    if settings.url.scheme_str() == Some("https") {
        let found = rustls_native_certs::load_native_certs();
        let (added, _) = roots.add_parsable_certificates(found.certs);
        if added == 0 {
            tracing::warn!(sink = name, "the system has no root certificates");
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?;
    Ok(config.with_root_certificates(roots).with_no_client_auth())
}

/// Reads the body to its end, to [`BODY_MAX`] or to the deadline, and keeps the beginning of its text. A body that is
/// dropped before its end takes its connection along.
async fn read_text(mut body: Incoming, deadline: Instant) -> String {
    let mut kept = BytesMut::new();
    let mut seen = 0_usize;
    while let Ok(Some(Ok(frame))) = timeout_at(deadline, body.frame()).await {
        let Some(data) = frame.data_ref() else { continue };
        seen = seen.saturating_add(data.len());
        let room = ERROR_MAX.saturating_sub(kept.len()).min(data.len());
        kept.extend_from_slice(data.get(..room).unwrap_or_default());
        if seen > BODY_MAX {
            break;
        }
    }
    clean(&String::from_utf8_lossy(&kept))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=";
    const OTHER: &str = "whsec_ZmVkY2JhOTg3NjU0MzIxMGZlZGNiYTk4NzY1NDMyMTA=";

    fn settings(url: &str) -> Settings {
        Settings {
            url: url.parse().unwrap(),
            secrets: vec![SECRET.into()],
            allow_private: false,
            allow_http: true,
        }
    }

    fn courier(target: &Settings) -> Courier {
        let sink = crate::relay::sink::Settings {
            name: "main".into(),
            timeout: Duration::from_secs(1),
            concurrency: 1,
            backoff_base: Duration::from_secs(1),
            backoff_max: Duration::from_secs(60),
            attempts_max: 3,
            age_max: Duration::from_secs(60),
            refusals_max: 5,
            pause_after: 10,
            order: crate::store::Order::None,
            target: crate::relay::sink::Target::Http(target.clone()),
        };
        Courier::new(&sink, target).unwrap()
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
        assert!(!format!("{:?}", settings("https://example.com")).contains("MDEyMzQ1"));
    }

    #[test]
    fn during_a_rotation_both_secrets_verify_and_a_stranger_does_not() {
        let mut both = settings("http://example.com/");
        both.secrets.insert(0, OTHER.into());
        let sink = courier(&both);
        let payload = r#"{"b":1.0,"a":12345678901234567890,"u":"é\/<"}"#.as_bytes();
        let now = wall_clock().duration_since(UNIX_EPOCH).unwrap().as_secs();
        let headers = sink.sign("8e0f7a3c", now, payload).unwrap();
        for secret in [SECRET, OTHER] {
            Webhook::new(secret).unwrap().verify(payload, &headers).unwrap();
        }
        let stranger = Webhook::new("whsec_c3RyYW5nZXJzdHJhbmdlcnN0cmFuZ2Vy").unwrap();
        assert!(stranger.verify(payload, &headers).is_err());
    }
}
