//! Makes the relay's sinks from `[[sink]]`: the fields of every sink, and the fields of its kind of target.
//!
//! Invariant: the relay checks its own settings last, so that no mistake is first found at a delivery.

use std::net::IpAddr;
use std::sync::Arc;

use ::http::{HeaderMap, HeaderValue, Uri};

use super::file::{HeaderSource, TextOr};
use super::texts::read_header;
use super::{BTreeSet, Builder, DAY, HOUR, SECOND, Setting, Spanned, count, file, value_or};
use crate::record::event::subscription::{TypeFilter, TypePattern};
use crate::relay::address::port_problem;
use crate::relay::sink::http::Format;
use crate::relay::sink::{self, Target, http};
use crate::store::{OnDead, Order};

impl Builder<'_> {
    pub(super) fn sinks(&self, raws: &[file::Sink], outbox: &file::Outbox) -> Vec<sink::Settings> {
        let source = self.source(outbox);
        let mut names = BTreeSet::new();
        for raw in raws {
            if let Some(name) = &raw.name
                && !names.insert(&name.value)
            {
                self.diagnostics
                    .mistake(&name.location, format!("{:?} names two sinks", name.value));
            }
        }
        raws.iter().filter_map(|raw| self.sink(raw, &source)).collect()
    }

    fn sink(&self, raw: &file::Sink, source: &str) -> Option<sink::Settings> {
        self.above_zero(&raw.timeout);
        let (base, max) = (value_or(&raw.backoff.base, SECOND), value_or(&raw.backoff.max, HOUR));
        if base > max || base.is_zero() {
            let location = raw.location.field("backoff");
            self.diagnostics
                .mistake(&location, "base must be longer than zero and not longer than max");
        }
        let target = self.target(raw, source);
        let name = self.required(raw.name.as_ref(), &raw.location, "name");
        let name = name.and_then(|name| self.checked(name, read_name));
        let settings = sink::Settings {
            name: name?,
            timeout: value_or(&raw.timeout, 15 * SECOND),
            concurrency: count(&raw.concurrency, 16),
            backoff_base: base,
            backoff_max: max,
            attempts_max: value_or(&raw.max_attempts, 20),
            age_max: value_or(&raw.max_age, 3 * DAY),
            events: self.type_filter(raw),
            refusals_max: value_or(&raw.max_refusals, 5),
            pause_after: value_or(&raw.pause_after, 10),
            order: self.order(raw),
            target: target?,
        };
        // The relay checks its own settings last.
        if let Err(wrong) = settings.check()
            && !self.diagnostics.has_mistake_under(&raw.location)
        {
            self.diagnostics.mistake(&raw.location, wrong);
        }
        Some(settings)
    }

    /// The events that the sink gets. Without a list it gets all.
    fn type_filter(&self, raw: &file::Sink) -> TypeFilter {
        if let Some(none) = raw.events.as_ref().filter(|list| list.value.is_empty()) {
            self.diagnostics
                .mistake(&none.location, "names no event; leave it out, and the sink gets all");
        }
        match &raw.events {
            Some(_) => TypeFilter::Matching(self.each(&raw.events, TypePattern::parse)),
            None => TypeFilter::All,
        }
    }

    fn order(&self, raw: &file::Sink) -> Order {
        let ordering = |text: &str| match text {
            "none" => Ok(false),
            "key" => Ok(true),
            _ => Err("must be \"none\" or \"key\" (events with the same ordering_key one after \
                      the other)"
                .to_owned()),
        };
        let on_dead = |text: &str| match text {
            "free" => Ok(OnDead::Free),
            "block" => Ok(OnDead::Block),
            _ => Err("must be \"free\" or \"block\" (what is behind a dead event in its \
                      ordering key waits until that one is redelivered or discarded)"
                .to_owned()),
        };
        let by_key = raw.ordering.as_ref().and_then(|spanned| self.checked(spanned, ordering));
        let dead = raw.on_dead.as_ref().and_then(|spanned| self.checked(spanned, on_dead));
        match (by_key, &raw.on_dead) {
            (Some(true), _) => Order::Key(dead.unwrap_or_default()),
            (None | Some(false), Some(spanned)) => {
                let wrong = "has no effect without ordering = \"key\": add that, or leave it out";
                self.diagnostics.mistake(&spanned.location, wrong);
                Order::None
            }
            (None | Some(false), None) => Order::None,
        }
    }

    /// The source of CloudEvents: a URI reference.
    fn source(&self, raw: &file::Outbox) -> String {
        let read = |text: &str| {
            let plain = |byte: u8| byte.is_ascii_graphic() && !b"\"<>\\^`{|}".contains(&byte);
            if text.is_empty() || text.len() > 255 || !text.bytes().all(plain) {
                return Err(
                    "is not a URI; write \"https://shop.example/orders\" or \"/orders\"".to_owned()
                );
            }
            Ok(text.to_owned())
        };
        let source = raw.source.as_ref().and_then(|spanned| self.checked(spanned, read));
        source.unwrap_or_else(|| "/oncegate".to_owned())
    }

    /// The scheme of the URL decides the kind of target.
    fn target(&self, raw: &file::Sink, source: &str) -> Option<Target> {
        let url = raw.url.as_ref().map(|url| (url, url.value.split("://").next()));
        match url {
            Some((url, Some("nats" | "tls"))) => self.nats(raw, url),
            Some((url, Some("redis" | "rediss"))) => self.redis(raw, url),
            Some(_) | None => {
                self.refuse_broker_fields(raw);
                self.webhook(raw, source).map(Target::Http)
            }
        }
    }

    fn webhook(&self, raw: &file::Sink, source: &str) -> Option<http::Settings> {
        let (allow_private, allow_http) =
            (value_or(&raw.allow_private, false), value_or(&raw.allow_http, false));
        let url = self.required(raw.url.as_ref(), &raw.location, "url");
        let url = url.and_then(|url| {
            self.checked(url, |text| read_sink_url(text, allow_private, allow_http))
        });
        let secrets = self.secrets(raw);
        let headers = self.headers(&raw.headers);
        let format = raw.format.as_ref().and_then(|spanned| self.checked(spanned, read_format));
        let readable = |file: &Setting<String>| file.as_ref().map(|spanned| self.readable(spanned));
        Some(http::Settings {
            url: url?,
            secrets,
            secret_file: raw.secret_file.as_ref().map(|file| self.folder.join(&file.value)),
            secrets_every: http::SECRETS_EVERY,
            format: format.unwrap_or_default(),
            source: source.to_owned(),
            headers,
            ca_file: readable(&raw.ca_file),
            identity: self.identity(raw),
            allow_private,
            allow_http,
            resolver: Arc::new(http::System),
        })
    }

    pub(super) fn identity(&self, raw: &file::Sink) -> Option<http::Identity> {
        match (&raw.client_cert_file, &raw.client_key_file) {
            (Some(cert), Some(key)) => {
                let key_file = self.readable(key);
                self.private(&key.location, &key_file);
                Some(http::Identity { cert_file: self.readable(cert), key_file })
            }
            (Some(alone), None) | (None, Some(alone)) => {
                let wrong = "stands alone; client_cert_file and client_key_file belong together";
                self.diagnostics.mistake(&alone.location, wrong);
                None
            }
            (None, None) => None,
        }
    }

    fn headers(&self, raws: &[(String, TextOr<HeaderSource>)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, source) in raws {
            let location = source.location();
            let Ok(name) = read_header(name) else {
                self.diagnostics.mistake(location, "cannot be the name of a header");
                continue;
            };
            if http::is_reserved(&name) {
                self.diagnostics.mistake(location, "is set by Oncegate itself; leave it out");
                continue;
            }
            let Some(text) = self.header_text(source) else { continue };
            // The value may be a secret, so the message does not repeat it.
            match HeaderValue::from_str(text.trim()) {
                Ok(mut value) => {
                    value.set_sensitive(true);
                    headers.append(name, value);
                }
                Err(_) => {
                    let wrong = "its value must be one line of visible ASCII characters";
                    self.diagnostics.mistake(location, wrong);
                }
            }
        }
        headers
    }

    fn header_text(&self, source: &TextOr<HeaderSource>) -> Option<String> {
        let HeaderSource { location, file, env } = match source {
            TextOr::Text(text) => return Some(text.value.clone()),
            TextOr::Section(source) => source,
        };
        match (file, env) {
            (Some(file), None) => self.secret_text(file),
            (None, Some(env)) => self.variable(env),
            _ => {
                let wrong =
                    "needs a text, or exactly one of file and env: { file = \"sink.token\" }";
                if !self.diagnostics.has_mistake_under(location) {
                    self.diagnostics.mistake(location, wrong);
                }
                None
            }
        }
    }

    fn variable(&self, named: &Spanned<String>) -> Option<String> {
        let value = self.variables.get(&named.value).cloned();
        if value.is_none() {
            self.diagnostics
                .mistake(&named.location, format!("the variable {} is not set", named.value));
        }
        value
    }

    /// The sink's secrets: one on each line, without blank lines and `#` comments.
    fn secrets(&self, raw: &file::Sink) -> Vec<String> {
        let named: Vec<_> =
            [&raw.secret, &raw.secret_file, &raw.secret_env].into_iter().flatten().collect();
        let [one] = named.as_slice() else {
            let wrong = "needs exactly one of secret_file, secret_env and secret: deliveries are signed with it";
            self.diagnostics.mistake(&raw.location, wrong);
            return Vec::new();
        };
        let text = if raw.secret_file.is_some() {
            self.secret_text(one)
        } else if raw.secret_env.is_some() {
            self.variable(one)
        } else {
            Some(one.value.clone())
        };
        let Some(text) = text else { return Vec::new() };
        let secrets = http::secret_lines(&text);
        if secrets.is_empty() || !secrets.iter().all(|secret| is_secret(secret)) {
            let wrong = "each line must be `whsec_` and the base64 of 24 to 64 random bytes: \
                         `echo whsec_$(head -c 32 /dev/urandom | base64)`";
            self.diagnostics.mistake(&one.location, wrong);
        }
        secrets
    }
}

fn read_sink_url(text: &str, allow_private: bool, allow_http: bool) -> Result<Uri, String> {
    let wrong = || "not a URL; write \"https://host/path\"".to_owned();
    if text.contains('#') {
        return Err("a fragment (`#...`) is never sent: leave it out, or write %23".to_owned());
    }
    if let Some(wrong) = port_problem(text) {
        return Err(wrong);
    }
    let url: Uri = text.parse().map_err(|_| wrong())?;
    let host = url.host().filter(|host| !host.is_empty()).ok_or_else(wrong)?;
    match url.scheme_str() {
        Some("https") => {}
        Some("http") if allow_http || allow_private => {}
        Some("http") => {
            return Err("plain http shows events to everybody on the way; use https, or set \
                        allow_http = true (allow_private = true for a private address)"
                .to_owned());
        }
        _ => return Err(wrong()),
    }
    let address = host.trim_matches(['[', ']']).parse::<IpAddr>();
    if !allow_private && address.is_ok_and(is_private) {
        return Err(
            "is a private address; set allow_private = true if deliveries may go there".to_owned()
        );
    }
    Ok(url)
}

pub(super) fn is_private(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(v4) => {
            v4.is_private() || v4.is_loopback() || v4.is_link_local() || v4.is_unspecified()
        }
        IpAddr::V6(v6) => {
            let link_local = v6.segments().first().is_some_and(|first| first & 0xffc0 == 0xfe80);
            v6.is_loopback() || v6.is_unique_local() || link_local || v6.is_unspecified()
        }
    }
}

fn read_format(text: &str) -> Result<Format, String> {
    match text {
        "standard-webhooks" => Ok(Format::StandardWebhooks),
        "cloudevents" => Ok(Format::CloudEvents),
        "cloudevents-structured" => Ok(Format::CloudEventsStructured),
        _ => Err("must be \"standard-webhooks\", \"cloudevents\" (binary mode) or \"cloudevents-structured\"".to_owned()),
    }
}

fn read_name(text: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if !text.is_empty() && text.len() <= 64 && text.chars().all(plain) {
        return Ok(text.to_owned());
    }
    Err("must be 1 to 64 letters, digits, '-', '_' or '.'".to_owned())
}

fn is_secret(text: &str) -> bool {
    use base64::Engine as _;
    let decoded = text
        .strip_prefix("whsec_")
        .and_then(|encoded| base64::engine::general_purpose::STANDARD.decode(encoded).ok());
    decoded.is_some_and(|bytes| (24..=64).contains(&bytes.len()))
}
