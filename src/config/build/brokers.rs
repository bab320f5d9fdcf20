//! Makes the target of a `[[sink]]` whose URL names a message broker.
//!
//! Invariant: a field that this kind of target does not use is a mistake, because it would have no effect.

use super::{Builder, Location, Setting, Spanned, file};
use crate::relay::sink::Target;
use crate::relay::sink::broker::{Login, Tls};
use crate::relay::sink::nats;
#[cfg(feature = "redis")]
use crate::relay::sink::redis;

fn location<T>(field: &Setting<T>) -> Option<&Location> {
    field.as_ref().map(|spanned| &spanned.location)
}

impl Builder<'_> {
    pub(super) fn nats(&self, raw: &file::Sink, url: &Spanned<String>) -> Option<Target> {
        self.refuse(raw, "a NATS sink", &[location(&raw.stream), location(&raw.max_length)]);
        self.refuse_webhook_fields(raw);
        let servers = self.checked(url, nats::servers);
        let subject = self.required(raw.subject.as_ref(), &raw.location, "subject");
        let subject = subject.and_then(|text| self.checked(text, nats::Subject::parse));
        let (login, tls) = (self.login(raw), self.tls(raw));
        Some(Target::Nats(nats::Settings {
            servers: servers?,
            subject: subject?,
            login: login?,
            tls,
        }))
    }

    #[cfg(feature = "redis")]
    pub(super) fn redis(&self, raw: &file::Sink, url: &Spanned<String>) -> Option<Target> {
        self.refuse(raw, "a Redis sink", &[location(&raw.subject)]);
        self.refuse_webhook_fields(raw);
        let server = self.checked(url, redis::Server::parse);
        if let Some(server) = server.as_ref().filter(|server| !server.speaks_tls()) {
            let fields = [&raw.ca_file, &raw.client_cert_file, &raw.client_key_file];
            for location in fields.into_iter().filter_map(location) {
                let wrong = format!("applies only to rediss://{}", server.host());
                self.diagnostics.mistake(location, wrong);
            }
        }
        let stream = self.required(raw.stream.as_ref(), &raw.location, "stream");
        let stream = stream.and_then(|text| self.checked(text, read_stream));
        let (login, tls) = (self.login(raw), self.tls(raw));
        Some(Target::Redis(redis::Settings {
            server: server?,
            stream: stream?,
            length_max: raw.max_length.as_ref().map(|spanned| spanned.value),
            login: login?,
            tls,
        }))
    }

    #[cfg(not(feature = "redis"))]
    pub(super) fn redis(&self, _: &file::Sink, url: &Spanned<String>) -> Option<Target> {
        let wrong = "this program is built without Redis: build it with `cargo build --release --features redis`";
        self.diagnostics.mistake(&url.location, wrong);
        None
    }

    /// The fields that only brokers have.
    pub(super) fn refuse_broker_fields(&self, raw: &file::Sink) {
        let fields = [
            location(&raw.user),
            location(&raw.subject),
            location(&raw.stream),
            location(&raw.max_length),
        ];
        self.refuse(raw, "a webhook", &fields);
    }

    fn refuse_webhook_fields(&self, raw: &file::Sink) {
        let why = "applies only to a webhook: a broker may have any address, also a private one, and \
                   encrypted where its URL says so";
        for location in
            [location(&raw.allow_private), location(&raw.allow_http)].into_iter().flatten()
        {
            self.diagnostics.mistake(location, why);
        }
        let shape =
            [location(&raw.format), raw.headers.first().map(|(_, source)| source.location())];
        self.refuse(raw, "a broker", &shape);
    }

    fn refuse(&self, raw: &file::Sink, what: &str, fields: &[Option<&Location>]) {
        let url = raw.url.as_ref().and_then(|url| url.value.split_once("://"));
        let scheme = url.map_or("https", |(scheme, _)| scheme);
        for location in fields.iter().flatten() {
            let wrong = format!("does not apply to {what}, and {scheme}:// names {what}");
            self.diagnostics.mistake(location, wrong);
        }
    }

    /// `None` after a mistake, which is reported.
    fn login(&self, raw: &file::Sink) -> Option<Login> {
        let named: Vec<_> =
            [&raw.secret, &raw.secret_file, &raw.secret_env].into_iter().flatten().collect();
        let secret = match named.as_slice() {
            [] => None,
            [one] => Some(self.password(raw, one)?),
            [_, second, ..] => {
                let wrong = "cannot be set together with another secret; keep one of secret_file, secret_env and secret";
                self.diagnostics.mistake(&second.location, wrong);
                return None;
            }
        };
        match (&raw.user, secret) {
            (None, None) => Some(Login::Nobody),
            (None, Some(secret)) => Some(Login::Secret(secret)),
            (Some(user), Some(password)) => {
                Some(Login::User { name: user.value.clone(), password })
            }
            (Some(user), None) => {
                let wrong = "needs its password: secret_file, secret_env or secret";
                self.diagnostics.mistake(&user.location, wrong);
                None
            }
        }
    }

    fn password(&self, raw: &file::Sink, named: &Spanned<String>) -> Option<String> {
        let text = if raw.secret_file.is_some() {
            self.secret_text(named)?
        } else if raw.secret_env.is_some() {
            let value = self.variables.get(&named.value).cloned();
            if value.is_none() {
                let wrong = format!("the variable {} is not set", named.value);
                self.diagnostics.mistake(&named.location, wrong);
            }
            value?
        } else {
            named.value.clone()
        };
        let line = text.trim_end_matches(['\r', '\n']);
        if line.is_empty() || line.chars().any(char::is_control) {
            self.diagnostics.mistake(&named.location, "must be one line: a password or a token");
            return None;
        }
        Some(line.to_owned())
    }

    fn tls(&self, raw: &file::Sink) -> Tls {
        let client = self.identity(raw).map(|identity| (identity.cert_file, identity.key_file));
        Tls { ca_file: raw.ca_file.as_ref().map(|file| self.readable(file)), client }
    }
}

#[cfg(feature = "redis")]
fn read_stream(text: &str) -> Result<String, String> {
    if !text.is_empty() && text.len() <= 255 && text.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Ok(text.to_owned());
    }
    Err("must be the key of a stream: 1 to 255 bytes of visible ASCII".to_owned())
}
