//! Applies defaults and rules to the file as written, and makes the settings of each part.
//!
//! Each function takes a section of [`mod@file`] and makes the settings of one part. It reports a broken rule with its
//! location and goes on with a harmless value. No part ever gets that value, because a configuration with mistakes is
//! never returned.
//!
//! Invariant: all defaults are here, and `config/oncegate.toml` shows every one of them. A test compares the two.

mod brokers;
mod common;
mod jwt;
mod lookup;
mod replay_auth;
mod routes;
mod sinks;
mod store_url;
mod texts;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderName, Method, StatusCode};

use crate::config::diagnostics::{Diagnostics, Location, Spanned};
use crate::config::digest_key::LENGTH_MIN;
use crate::config::file::{self, File, Setting};
use crate::config::section::unknown;
use crate::config::{
    Admin, Config, DEFAULT_ADMIN, DEFAULT_LISTEN_VARIABLE, DEFAULT_UPSTREAM, DigestKeySource,
    Listen, Log,
};
use crate::config::{RelayMode, RouteFacts, Server, Store, StoreKind};
use crate::fingerprint;
use crate::gateway::headers::{Forwarding, HostPolicy, Network};
use crate::gateway::{self, OnUnavailable, accept, spill, upstream};
use crate::record::event::{Spec, Templates};
use crate::record::outcome::{Code, Lists};
use crate::record::{Operation, Tenant};
use crate::relay::{self, sink};
use crate::route::{Mode, OnUnknown, Pattern, Policy, ReplayAuth, Route, Routes};
use crate::scope::{self, Derive, Source};
use crate::store::sealed::Keys;
use crate::store::{Backlog, sqlite};
use crate::sweep;
use crate::telemetry::log;

use self::texts::read_upstream_url;

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);
/// The default of `server.connections_max`.
const CONNECTIONS: u32 = 10_000;
/// The default of `store.timeout`.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(5);
const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;

/// What the build needs besides the file.
pub(super) struct Builder<'a> {
    pub(super) diagnostics: &'a Diagnostics,
    /// File names in the configuration are relative to this folder.
    pub(super) folder: PathBuf,
    /// The default of `require_key`.
    pub(super) require_key: bool,
    pub(super) variables: &'a BTreeMap<String, String>,
}

fn value_or<T: Clone>(field: &Setting<T>, default: T) -> T {
    field.as_ref().map_or(default, |spanned| spanned.value.clone())
}

fn count(field: &Setting<u32>, default: u32) -> usize {
    usize::try_from(value_or(field, default)).unwrap_or(usize::MAX)
}

impl Builder<'_> {
    pub(super) fn config(&self, file: &File, without_file: bool) -> Config {
        let store = self.store(&file.store);
        let sinks = self.sinks(&file.sinks, &file.outbox);
        let subscribers: Vec<_> = sinks.iter().map(sink::Settings::subscriber).collect();
        let names = sinks.iter().map(|sink| sink.name.clone()).collect();
        let upstreams = self.upstreams(file);
        let (routes, facts) = self.routes(file, without_file, &subscribers, &upstreams);
        let jwt = self.jwt(file.jwt.as_ref(), &routes);
        let relay_mode = self.relay_mode(&file.outbox, &store);
        let config = Config {
            jwt,
            server: self.server(&file.server),
            gateway: self.gateway(file, &store.kind),
            admin: self.admin(&file.admin),
            upstreams,
            digest_key: self.digest_key(&file.server, &store, &routes),
            store,
            routes,
            facts,
            relay: relay::Settings { sinks, poll: self.poll(&file.outbox) },
            relay_mode,
            sweep: sweep::Settings {
                outbox_retention: value_or(&file.outbox.retention, 7 * DAY),
                sinks: names,
                unknown_events: value_or(&file.outbox.unknown_events, false).then_some(subscribers),
                every: value_or(&file.store.sweep_every, 10 * SECOND),
                batch: value_or(&file.store.sweep_batch, 500),
                duty: sweep::Duty::All,
                backlog: Backlog::new(NonZeroU32::new(value_or(&file.outbox.backlog_max, 0))),
            },
            log: self.log(&file.log),
        };
        self.room(file, &config);
        let (ours, theirs) = (&config.server.listen.address, &config.admin.listen.address);
        if ours == theirs && !ours.ends_with(":0") {
            let location = location_of(&file.admin.listen, "admin.listen");
            self.diagnostics
                .mistake(&location, "is the same as server.listen; each needs its own address");
        }
        config
    }

    /// A route whose requests never fit into the memory would answer 503 to all of them.
    fn room(&self, file: &File, config: &Config) {
        let (request, response) =
            config.routes.iter().fold((0, 0), |(request, response), route| {
                let policy = &route.policy;
                (request.max(policy.request_body_max), response.max(policy.response_body_max))
            });
        if !config.gateway.fits(request, response) {
            let location =
                location_of(&file.server.buffered_bytes_max, "server.buffered_bytes_max");
            let wrong = "is less than the largest max_request_body and max_response_body together: a request takes \
                         room for both";
            self.diagnostics.mistake(&location, wrong);
        }
    }

    fn above_zero(&self, field: &Setting<Duration>) {
        if let Some(spanned) = field.as_ref().filter(|spanned| spanned.value.is_zero()) {
            self.diagnostics.mistake(&spanned.location, "must be longer than zero");
        }
    }

    fn listen(&self, field: &Setting<String>, setting: &str, default: &str) -> Listen {
        let Some(spanned) = field else {
            return Listen { address: default.to_owned(), setting: setting.to_owned() };
        };
        let fits = match spanned.value.strip_prefix("unix:") {
            Some(path) => !path.is_empty(),
            None => spanned
                .value
                .rsplit_once(':')
                .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok()),
        };
        if !fits {
            let wrong = format!(
                "{:?} is not an address; write \"127.0.0.1:8080\" or \"unix:/run/oncegate.sock\"",
                spanned.value
            );
            self.diagnostics.mistake(&spanned.location, wrong);
        }
        let from = match &spanned.location {
            Location { variable: Some(variable), .. } => format!(", by {variable}"),
            Location { line: Some(line), .. } => format!(", line {line} of the configuration"),
            Location { .. } => String::new(),
        };
        Listen { address: spanned.value.clone(), setting: format!("{setting}{from}") }
    }

    /// Where nothing sets it, an image may say another default than that of a program on somebody's machine.
    fn server_listen(&self, field: &Setting<String>) -> Listen {
        let variable = DEFAULT_LISTEN_VARIABLE;
        let image = self.variables.get(variable).filter(|_| field.is_none());
        let Some(image) = image.filter(|value| !value.is_empty()) else {
            return self.listen(field, "server.listen", "127.0.0.1:8080");
        };
        let location = Location { variable: Some(variable.to_owned()), ..Location::default() };
        let field = Some(Spanned { value: image.clone(), location });
        self.listen(&field, "server.listen", "127.0.0.1:8080")
    }

    fn server(&self, raw: &file::Server) -> Server {
        let times = [&raw.header_timeout, &raw.idle_timeout, &raw.body_timeout, &raw.write_timeout];
        for time in times {
            self.above_zero(time);
        }
        let accept = accept::Settings {
            header_timeout: value_or(&raw.header_timeout, 30 * SECOND),
            idle_timeout: value_or(&raw.idle_timeout, 75 * SECOND),
            body_timeout: value_or(&raw.body_timeout, 30 * SECOND),
            write_timeout: value_or(&raw.write_timeout, 60 * SECOND),
            connections_max: count(&raw.connections_max, CONNECTIONS),
            headers_max: count(&raw.headers_max, 100),
            head_bytes_max: value_or(&raw.head_bytes_max, 64 * KIB),
            half_close: value_or(&raw.half_close, false),
        };
        if let Some(spanned) = raw.head_bytes_max.as_ref().filter(|spanned| spanned.value < 8 * KIB)
        {
            self.diagnostics.mistake(&spanned.location, "must be at least \"8KiB\"");
        }
        Server {
            listen: self.server_listen(&raw.listen),
            accept,
            shutdown_delay: value_or(&raw.shutdown_delay, Duration::ZERO),
            shutdown_grace: value_or(&raw.shutdown_grace, 30 * SECOND),
        }
    }

    fn gateway(&self, file: &File, kind: &StoreKind) -> gateway::Settings {
        let store = &file.store;
        let raw = &file.server;
        let host = self.host(&file.upstream.host);
        let statement = value_or(&store.timeout, STATEMENT_TIMEOUT);
        // A statement ends with its own time-out. The rest is for a commit that is on its way. SQLite has no
        // server that could commit later, so one look is enough.
        let doubt_window = match kind {
            StoreKind::Postgres(_) => (2 * statement).max(30 * SECOND),
            StoreKind::Sqlite(_) => Duration::ZERO,
        };
        gateway::Settings {
            forwarding: Forwarding { trusted: self.networks(&raw.trusted_proxies), host },
            reserve_timeout: value_or(&store.reserve_timeout, 5 * SECOND),
            completion_timeout: value_or(&store.completion_timeout, 2 * SECOND),
            doubt_window,
            cache_bytes: u64::try_from(value_or(&store.cache_bytes, 64 * MIB)).unwrap_or(u64::MAX),
            in_flight_max: count(&raw.in_flight_max, 1000),
            waiting_max: count(&raw.waiting_max, 1000),
            late_answers_max: count(&raw.late_answers_max, 100),
            tunnels_max: self.tunnels(raw),
            on_unavailable: self.on_unavailable(&store.on_unavailable),
            buffered_bytes_max: value_or(&raw.buffered_bytes_max, 1024 * MIB),
            expose_headers: value_or(&raw.expose_headers, false),
            default_upstream: DEFAULT_UPSTREAM.to_owned(),
        }
    }

    fn tunnels(&self, raw: &file::Server) -> usize {
        let connections = value_or(&raw.connections_max, CONNECTIONS);
        if let Some(spanned) = raw.tunnels_max.as_ref().filter(|max| max.value > connections) {
            let wrong = format!("is more than connections_max ({connections}): each tunnel is one");
            self.diagnostics.mistake(&spanned.location, wrong);
        }
        count(&raw.tunnels_max, 5000)
    }

    fn on_unavailable(&self, field: &Setting<String>) -> OnUnavailable {
        let read = |text: &str| match text {
            "refuse" => Ok(OnUnavailable::Refuse),
            "bypass" => Ok(OnUnavailable::Bypass),
            _ => Err("must be \"refuse\" (503 while the store is away) or \"bypass\" (forward \
                      unprotected)"
                .to_owned()),
        };
        let chosen = field.as_ref().and_then(|spanned| self.checked(spanned, read));
        chosen.unwrap_or(OnUnavailable::Refuse)
    }

    fn networks(&self, field: &Setting<Vec<Spanned<String>>>) -> Vec<Network> {
        self.each(field, |text| text.parse::<Network>())
    }

    /// Reads each entry of a list. A mistake in an entry is reported at that entry.
    fn each<T>(
        &self,
        field: &Setting<Vec<Spanned<String>>>,
        read: impl Fn(&str) -> Result<T, String>,
    ) -> Vec<T> {
        let entries = field.iter().flat_map(|list| &list.value);
        entries.filter_map(|entry| self.checked(entry, &read)).collect()
    }

    fn checked<T>(
        &self,
        spanned: &Spanned<String>,
        read: impl Fn(&str) -> Result<T, String>,
    ) -> Option<T> {
        read(&spanned.value)
            .map_err(|wrong| self.diagnostics.mistake(&spanned.location, wrong))
            .ok()
    }

    fn host(&self, field: &Setting<String>) -> HostPolicy {
        let read = |text: &str| match text {
            "keep" => Ok(HostPolicy::Keep),
            "set" => Ok(HostPolicy::Upstream),
            _ => Err("must be \"keep\" (what the caller sent) or \"set\" (the upstream's own)"
                .to_owned()),
        };
        field.as_ref().and_then(|spanned| self.checked(spanned, read)).unwrap_or_default()
    }

    fn admin(&self, raw: &file::Admin) -> Admin {
        let listen = self.listen(&raw.listen, "admin.listen", DEFAULT_ADMIN);
        let address = listen.address.as_str();
        if let Some(spanned) = raw.listen.as_ref().filter(|_| address.starts_with("unix:")) {
            let wrong = "the admin listener has no unix socket; write \"127.0.0.1:9090\"";
            self.diagnostics.mistake(&spanned.location, wrong);
        }
        let from_file = raw.token_file.as_ref().and_then(|spanned| self.secret_text(spanned));
        let token = from_file.or_else(|| raw.token.as_ref().map(|spanned| spanned.value.clone()));
        if let Some(both) = raw.token_file.as_ref().filter(|_| raw.token.is_some()) {
            self.diagnostics.mistake(
                &both.location,
                "cannot be set together with admin.token; keep one of them",
            );
        }
        if token.as_ref().is_some_and(|token| token.trim().is_empty()) {
            let location = location_of(&raw.token, "admin.token");
            self.diagnostics.mistake(&location, "the token is empty");
        }
        let named = raw.token_file.is_some() || raw.token.is_some();
        if !named && !is_loopback(address) {
            let wrong = "anybody who reaches this address could resolve records; set \
                         admin.token_file, or listen on 127.0.0.1";
            self.diagnostics.mistake(&location_of(&raw.listen, "admin.listen"), wrong);
        }
        Admin { listen, token: token.map(|token| token.trim().to_owned()) }
    }

    fn secret_text(&self, file: &Spanned<String>) -> Option<String> {
        let path = self.folder.join(&file.value);
        match std::fs::read_to_string(&path) {
            Ok(text) => Some(text),
            Err(error) => {
                let wrong = format!("cannot read {}: {error}", path.display());
                self.diagnostics.mistake(&file.location, wrong);
                None
            }
        }
    }

    fn upstreams(&self, file: &File) -> BTreeMap<String, upstream::Settings> {
        let mut all = BTreeMap::new();
        if let Some(main) = self.upstream(&file.upstream.upstream, "upstream") {
            all.insert(DEFAULT_UPSTREAM.to_owned(), main);
        }
        for (name, raw) in &file.upstreams {
            if name == DEFAULT_UPSTREAM {
                self.diagnostics
                    .mistake(&raw.location, "this name means [upstream]; choose another one");
            }
            if let Some(settings) = self.upstream(raw, &raw.location.path) {
                all.insert(name.clone(), settings);
            }
        }
        all
    }

    fn upstream(&self, raw: &file::Upstream, path: &str) -> Option<upstream::Settings> {
        for time in [&raw.connect_timeout, &raw.answer_timeout] {
            self.above_zero(time);
        }
        let Some(url) = &raw.url else {
            let location = raw.location.clone();
            let location = Location { path: format!("{path}.url"), ..location };
            self.diagnostics.mistake(
                &location,
                "is missing; write the URL of the API: \"http://127.0.0.1:3000\"",
            );
            return None;
        };
        Some(upstream::Settings {
            url: self.checked(url, read_upstream_url)?,
            connect_timeout: value_or(&raw.connect_timeout, 2 * SECOND),
            idle_timeout: value_or(&raw.idle_timeout, 4 * SECOND),
            answer_timeout: value_or(&raw.answer_timeout, 60 * SECOND),
            answer_idle_timeout: Some(value_or(&raw.answer_idle_timeout, 600 * SECOND))
                .filter(|limit| !limit.is_zero()),
            tunnel_idle_timeout: Some(value_or(&raw.tunnel_idle_timeout, HOUR))
                .filter(|limit| !limit.is_zero()),
            reuse_for_keyed: value_or(&raw.reuse_for_keyed, None),
            ca_file: raw.ca_file.as_ref().map(|spanned| self.readable(spanned)),
        })
    }

    /// Checks a file that a part will read, so that a missing file is a mistake with a location and no failed request.
    fn readable(&self, file: &Spanned<String>) -> PathBuf {
        let path = self.folder.join(&file.value);
        if let Err(error) = std::fs::File::open(&path) {
            self.diagnostics
                .mistake(&file.location, format!("cannot read {}: {error}", path.display()));
        }
        path
    }

    fn store(&self, raw: &file::Store) -> Store {
        for time in [&raw.connect_timeout, &raw.timeout, &raw.reserve_timeout, &raw.sweep_every] {
            self.above_zero(time);
        }
        if let Some(short) = raw.lease.as_ref().filter(|lease| lease.value < 3 * SECOND) {
            self.diagnostics.mistake(
                &short.location,
                "must be at least \"3s\": it is renewed three times in it",
            );
        }
        let default = || StoreKind::Sqlite(sqlite::Location::new("oncegate.db"));
        let kind = self.store_kind(raw).unwrap_or_else(default);
        Store {
            spill: self.spill(&raw.spill, &kind),
            keys: Arc::new(self.keys(raw)),
            lease: value_or(&raw.lease, 15 * SECOND),
            migrate: value_or(&raw.migrate, true),
            wait_at_start: self.wait_at_start(&raw.wait_at_start, &kind),
            kind,
        }
    }

    fn wait_at_start(
        &self,
        field: &Setting<Option<Duration>>,
        kind: &StoreKind,
    ) -> Option<Duration> {
        let Spanned { value: Some(limit), location } = field.as_ref()? else { return None };
        if let StoreKind::Sqlite(_) = kind {
            let wrong = "a SQLite file is there at the start, or it is not: only a Postgres is waited for; leave it out";
            self.diagnostics.mistake(location, wrong);
        }
        Some(*limit)
    }

    fn keys(&self, raw: &file::Store) -> Keys {
        let Some(file) = &raw.encryption_key_file else { return Keys::none() };
        let path = self.folder.join(&file.value);
        self.private(&file.location, &path);
        Keys::read(&path).unwrap_or_else(|error| {
            self.diagnostics.mistake(&file.location, error.to_string());
            Keys::none()
        })
    }

    /// Warns if a key file can be read by others than its owner.
    fn private(&self, location: &Location, path: &Path) {
        // If this fails, reading the file fails too, and that is reported.
        let Ok(found) = std::fs::metadata(path) else { return };
        let mode = found.permissions().mode() & 0o7777;
        if mode & 0o077 != 0 {
            let path = path.display();
            let wrong = format!(
                "users other than its owner have access to the key (mode {mode:04o}); chmod 600 {path}"
            );
            self.diagnostics.warning(location, wrong);
        }
    }

    fn spill(&self, raw: &file::Spill, kind: &StoreKind) -> spill::Settings {
        if let Some(spanned) = raw.dir.as_ref().filter(|spanned| spanned.value.is_empty()) {
            self.diagnostics.mistake(&spanned.location, "must name a folder");
        }
        if let Some(spanned) = raw.max_size.as_ref().filter(|spanned| spanned.value < 64 * KIB) {
            self.diagnostics.mistake(&spanned.location, "must be at least \"64KiB\"");
        }
        let default = || match kind {
            StoreKind::Sqlite(location) => {
                let mut beside = location.path.clone().into_os_string();
                beside.push(".spill");
                PathBuf::from(beside)
            }
            StoreKind::Postgres(_) => PathBuf::from("oncegate-spill"),
        };
        spill::Settings {
            dir: raw.dir.as_ref().map_or_else(default, |spanned| PathBuf::from(&spanned.value)),
            bytes_max: u64::try_from(value_or(&raw.max_size, 256 * MIB)).unwrap_or(u64::MAX),
        }
    }

    fn digest_key(&self, raw: &file::Server, store: &Store, routes: &Routes) -> DigestKeySource {
        if let Some(spanned) = &raw.digest_key_file {
            return self.digest_key_file(spanned);
        }
        match &store.kind {
            StoreKind::Sqlite(location) => {
                let folder = location.path.parent().unwrap_or(Path::new(""));
                let path = folder.join("oncegate.key");
                self.private(&Location::absent("server.digest_key_file"), &path);
                DigestKeySource::Made(path)
            }
            StoreKind::Postgres(_) => {
                if routes.iter().any(keeps_digests) {
                    let wrong = "is missing; a tenant by credential, and the credential that replay_auth compares, is a \
                                 digest under this key, and every replica on the same database needs the same key";
                    self.diagnostics.mistake(&Location::absent("server.digest_key_file"), wrong);
                }
                DigestKeySource::Process
            }
        }
    }

    fn digest_key_file(&self, spanned: &Spanned<String>) -> DigestKeySource {
        let path = self.folder.join(&spanned.value);
        self.private(&spanned.location, &path);
        match std::fs::read(&path) {
            Ok(bytes) if bytes.len() < LENGTH_MIN => {
                let wrong = "holds fewer than 16 bytes; use 32 random ones";
                self.diagnostics.mistake(&spanned.location, wrong);
            }
            Ok(_) => {}
            Err(error) => {
                let wrong = format!("cannot read {}: {error}", path.display());
                self.diagnostics.mistake(&spanned.location, wrong);
            }
        }
        DigestKeySource::Given(path)
    }

    fn required<'f, T>(
        &self,
        field: Option<&'f Spanned<T>>,
        section: &Location,
        name: &str,
    ) -> Option<&'f Spanned<T>> {
        if field.is_none() {
            // If the field is there and wrong, its mistake is already reported.
            self.diagnostics.missing(&section.field(name));
        }
        field
    }

    fn relay_mode(&self, raw: &file::Outbox, store: &Store) -> RelayMode {
        let Some(spanned) = raw.relay.as_ref().filter(|spanned| !spanned.value) else {
            return RelayMode::InProcess;
        };
        if let StoreKind::Sqlite(_) = &store.kind {
            let wrong = "a SQLite file belongs to `serve`, and nobody else can deliver: leave it out, or use Postgres";
            self.diagnostics.mistake(&spanned.location, wrong);
        }
        RelayMode::Separate
    }

    fn poll(&self, raw: &file::Outbox) -> Duration {
        self.above_zero(&raw.poll);
        if let Some(spanned) = raw.max_payload.as_ref().filter(|spanned| spanned.value < KIB) {
            self.diagnostics.mistake(&spanned.location, "must be at least \"1KiB\"");
        }
        value_or(&raw.poll, Duration::from_millis(100))
    }

    fn log(&self, raw: &file::Log) -> Log {
        let read = |text: &str| match text {
            "text" => Ok(log::Format::Text),
            "json" => Ok(log::Format::Json),
            _ => Err("must be \"text\" or \"json\"".to_owned()),
        };
        let format = raw.format.as_ref().and_then(|spanned| self.checked(spanned, read));
        let level = value_or(&raw.level, "info".to_owned());
        if let (Some(spanned), Err(_)) =
            (&raw.level, level.parse::<tracing_subscriber::filter::Targets>())
        {
            let wrong = "must be error, warn, info, debug or trace, or a list such as \"info,oncegate::relay=debug\"";
            self.diagnostics.mistake(&spanned.location, wrong);
        }
        Log { format: format.unwrap_or(log::Format::Text), level }
    }
}

/// Whether replicas must share the digest key.
fn keeps_digests(route: &Arc<Route>) -> bool {
    route.scope.tenant == Source::Credential
        || route.policy.replay_auth == ReplayAuth::SameCredential
}

fn payload_max(raw: &file::Outbox) -> usize {
    value_or(&raw.max_payload, 256 * KIB)
}

fn location_of<T>(field: &Setting<T>, path: &str) -> Location {
    field.as_ref().map_or_else(|| Location::absent(path), |spanned| spanned.location.clone())
}

fn is_loopback(listen: &str) -> bool {
    let host = listen.rsplit_once(':').map_or(listen, |(host, _)| host);
    listen.starts_with("unix:")
        || host == "localhost"
        || listen.parse::<SocketAddr>().is_ok_and(|address| address.ip().is_loopback())
}
