//! The configuration as written: one struct for each section, each field with its type and location.
//!
//! This file has no defaults and no rules: `config/build.rs` applies them to a [`File`]. A field that is absent or cannot be
//! read is `None`; the second is a mistake in the diagnostics. `config/oncegate.toml` explains each field, and a test compares
//! its names with the names here.
//!
//! Invariant: every field that the program knows is read here and nowhere else. The known names are the names that these
//! structs read, so the report of unknown fields is always up to date.

use std::time::Duration;

use serde_json::Value;

use crate::config::diagnostics::{Diagnostics, Location, Spanned};
use crate::config::section::{Section, TextOrSection};
use crate::config::tree::Node;

/// A value that may be absent.
pub(super) type Setting<T> = Option<Spanned<T>>;

/// A list of texts.
type Texts = Setting<Vec<Spanned<String>>>;

/// Why a planned field is refused: it would have no effect, and the operator would not know.
const NOT_YET: &str = "is not supported yet; leave it out";

/// Sections whose fields a variable may set: `ONCEGATE_<SECTION>_<FIELD>`.
pub(super) const SECTIONS: [&str; 8] =
    ["server", "admin", "upstream", "store", "jwt", "policy", "outbox", "log"];

/// A struct that is read from a section.
trait FromSection: Default {
    /// Reads all of its fields.
    fn fields(section: &mut Section<'_>) -> Self;

    /// Reads a section, and reports all other fields in it as unknown.
    fn read(mut section: Section<'_>) -> Self {
        let read = Self::fields(&mut section);
        section.finish();
        read
    }
}

/// A text, or a section in its place.
#[derive(Debug)]
pub(super) enum TextOr<T> {
    /// The text.
    Text(Spanned<String>),
    /// The section.
    Section(T),
}

impl TextOr<HeaderSource> {
    /// Its location.
    pub(super) fn location(&self) -> &Location {
        match self {
            Self::Text(text) => &text.location,
            Self::Section(source) => &source.location,
        }
    }
}

impl<T: FromSection> From<TextOrSection<'_>> for TextOr<T> {
    fn from(written: TextOrSection<'_>) -> Self {
        match written {
            TextOrSection::Text(text) => Self::Text(text),
            TextOrSection::Section(section) => Self::Section(T::read(section)),
        }
    }
}

/// The type of a field, by its kind: a method of [`Section`], or another struct.
macro_rules! field_type {
    (location) => { Location };
    (text) => { Setting<String> };
    (flag) => { Setting<bool> };
    (size) => { Setting<usize> };
    (number $range:tt) => { Setting<u32> };
    (duration) => { Setting<Duration> };
    (duration_or $word:tt) => { Setting<Option<Duration>> };
    (texts) => { Texts };
    (text_or_texts) => { Texts };
    (codes) => { Texts };
    (named_texts) => { Vec<(String, Spanned<String>)> };
    (any) => { Setting<Value> };
    (section ($struct:ty)) => { $struct };
    (optional ($struct:ty)) => { Option<$struct> };
    (sections ($struct:ty)) => { Vec<$struct> };
    (named_sections ($struct:ty)) => { Vec<(String, $struct)> };
    (text_or_section ($struct:ty)) => { Option<TextOr<$struct>> };
    (named_texts_or_sections ($struct:ty)) => { Vec<(String, TextOr<$struct>)> };
    (fields_of ($struct:ty)) => { $struct };
}

/// Reads a field by its name.
macro_rules! read_field {
    ($s:ident, $name:expr, location) => { $s.location().clone() };
    ($s:ident, $name:expr, section ($struct:ty)) => {
        $s.section($name).map(<$struct>::read).unwrap_or_default()
    };
    ($s:ident, $name:expr, optional ($struct:ty)) => { $s.section($name).map(<$struct>::read) };
    ($s:ident, $name:expr, sections ($struct:ty)) => {
        $s.sections($name).into_iter().map(<$struct>::read).collect()
    };
    ($s:ident, $name:expr, named_sections ($struct:ty)) => {
        $s.named_sections($name).into_iter().map(|(name, section)| (name, <$struct>::read(section))).collect()
    };
    ($s:ident, $name:expr, text_or_section ($struct:ty)) => { $s.text_or_section($name).map(TextOr::from) };
    ($s:ident, $name:expr, named_texts_or_sections ($struct:ty)) => {
        $s.named_texts_or_sections($name).into_iter().map(|(name, written)| (name, written.into())).collect()
    };
    ($s:ident, $name:expr, fields_of ($struct:ty)) => { <$struct>::fields($s) };
    ($s:ident, $name:expr, $kind:ident) => { $s.$kind($name) };
    ($s:ident, $name:expr, $kind:ident ($($argument:expr),*)) => { $s.$kind($name, $($argument),*) };
}

/// The name of a field in the file: the name of the struct field, unless the declaration gives another one.
macro_rules! field_name {
    ($field:ident) => {
        stringify!($field)
    };
    ($field:ident $name:literal) => {
        $name
    };
}

/// Declares sections: each field with its kind, and the planned fields that are refused. One line makes the field of the
/// struct, reads it by its name, and makes the name known.
macro_rules! sections {
    ($(
        $(#[$doc:meta])*
        $struct:ident {
            $($field:ident $($name:literal)? : $kind:ident $(($($argument:tt)*))?,)*
            $(; refused: $($refused:literal $why:expr),+ $(,)?)?
        }
    )*) => {$(
        $(#[$doc])*
        #[derive(Debug, Default)]
        pub(super) struct $struct {
            $(pub(super) $field: field_type!($kind $(($($argument)*))?),)*
        }

        impl FromSection for $struct {
            fn fields(section: &mut Section<'_>) -> Self {
                let read = Self {
                    $($field: read_field!(section, field_name!($field $($name)?), $kind $(($($argument)*))?),)*
                };
                $($(section.refused($refused, $why);)+)?
                read
            }
        }
    )*};
}

sections! {
    /// The whole file.
    File {
        server: section(Server),
        admin: section(Admin),
        upstream: section(MainUpstream),
        upstreams: named_sections(Upstream),
        store: section(Store),
        jwt: optional(Jwt),
        policy: section(Policy),
        routes "route": sections(Route),
        sinks "sink": sections(Sink),
        outbox: section(Outbox),
        log: section(Log),
    }

    /// `[server]`
    Server {
        listen: text,
        connections_max: number(1..=1_000_000),
        headers_max: number(1..=10_000),
        head_bytes_max: size,
        header_timeout: duration,
        idle_timeout: duration,
        body_timeout: duration,
        write_timeout: duration,
        half_close: flag,
        expose_headers: flag,
        ignore_path_case: flag,
        trusted_proxies: texts,
        shutdown_delay: duration,
        shutdown_grace: duration,
        in_flight_max: number(1..=1_000_000),
        waiting_max: number(0..=1_000_000),
        tunnels_max: number(1..=1_000_000),
        late_answers_max: number(0..=1_000_000),
        buffered_bytes_max: size,
        digest_key_file: text,
        ; refused: "tls" NOT_YET, "http2" NOT_YET
    }

    /// `[admin]`
    Admin {
        listen: text,
        token_file: text,
        token: text,
    }

    /// `[upstream]` and `[upstreams.NAME]`
    Upstream {
        location: location,
        url: text,
        connect_timeout: duration,
        idle_timeout: duration,
        answer_timeout: duration,
        answer_idle_timeout: duration,
        tunnel_idle_timeout: duration,
        reuse_for_keyed: duration_or("never"),
        ca_file: text,
        ; refused: "tls" NOT_YET, "http2" NOT_YET
    }

    /// `[upstream]`
    MainUpstream {
        upstream: fields_of(Upstream),
        host: text,
    }

    /// `[store]`
    Store {
        url: text,
        url_file: text,
        password_file: text,
        ca_file: text,
        lease: duration,
        migrate: flag,
        wait_at_start: duration_or("forever"),
        connections: number(2..=1000),
        connect_timeout: duration,
        timeout: duration,
        reserve_timeout: duration,
        completion_timeout: duration,
        cache_bytes: size,
        sweep_every: duration,
        sweep_batch: number(1..=100_000),
        on_unavailable: text,
        encryption_key_file: text,
        spill: section(Spill),
        ; refused: "encryption" NOT_YET
    }

    /// `spill = { ... }`
    Spill {
        dir: text,
        max_size: size,
    }

    /// `[jwt]`
    Jwt {
        location: location,
        jwks_url: text,
        jwks_file: text,
        key_file: text,
        secret_file: text,
        algorithms: texts,
        issuer: text,
        audience: text_or_texts,
        leeway: duration,
        refresh: duration,
        cooldown: duration,
        timeout: duration,
        ca_file: text,
        allow_http: flag,
    }

    /// `[policy]`, and the same fields of a route.
    Policy {
        tenant: optional(Tenant),
        key_header: text,
        require_key: flag,
        forward_key: flag,
        derive_key: texts,
        wait: duration,
        timeout: duration,
        late_answer: duration,
        retention: duration,
        max_request_body: size,
        max_response_body: size,
        context_max: size,
        on_unknown: text,
        lookup: optional(Lookup),
        mismatch_status: number(400..=499),
        replay_drop: texts,
        release_on: codes,
        unknown_on: codes,
        fingerprint: optional(Fingerprint),
        mode: text,
        replay_auth: text_or_section(Subrequest),
    }

    /// `replay_auth = { subrequest = "..." }`
    Subrequest {
        location: location,
        subrequest: text,
        timeout: duration,
        ca_file: text,
    }

    /// `lookup = { ... }`
    Lookup {
        location: location,
        method: text,
        path: text,
        headers: any,
        found: text,
        not_found: codes,
        status: any,
        body: any,
        settle: duration,
        timeout: duration,
        upstream: text,
    }

    /// `tenant = { ... }`
    Tenant {
        location: location,
        header: text,
        path: text,
        host: flag,
        basic_user: flag,
        credential: flag,
        jwt_claim: text,
        fixed: text,
        ; refused: "client_cert" "needs TLS from the caller to this listener, which Oncegate does not speak yet; let the proxy \
                                  in front check the certificate and name the tenant in a header of its own"
    }

    /// `fingerprint = { ... }`
    Fingerprint {
        only: texts,
        ignore: texts,
        headers: texts,
        ignore_query: texts,
        ignore_xml: texts,
        xml_namespaces: named_texts,
        max_decoded: size,
    }

    /// `[[route]]`
    Route {
        location: location,
        method: text,
        methods: texts,
        path: text,
        operation: text,
        upstream: text,
        policy: fields_of(Policy),
        events "event": sections(Event),
    }

    /// `[[route.event]]`
    Event {
        location: location,
        kind "type": text,
        when: text,
        payload: any,
        for_each: text,
        event_key: text,
        ordering_key: text,
        sinks: texts,
    }

    /// `[[sink]]`
    Sink {
        location: location,
        name: text,
        url: text,
        events: texts,
        format: text,
        headers: named_texts_or_sections(HeaderSource),
        ca_file: text,
        client_cert_file: text,
        client_key_file: text,
        secret: text,
        secret_file: text,
        secret_env: text,
        timeout: duration,
        concurrency: number(1..=1000),
        backoff: section(Backoff),
        max_attempts: number(1..=1_000_000),
        max_age: duration,
        max_refusals: number(1..=1_000_000),
        allow_private: flag,
        allow_http: flag,
        pause_after: number(1..=1_000_000),
        user: text,
        subject: text,
        stream: text,
        max_length: number(1..=u32::MAX),
        ordering: text,
        on_dead: text,
    }

    /// `backoff = { ... }`
    Backoff {
        base: duration,
        max: duration,
    }

    /// `headers = { NAME = { file = "..." }, NAME = { env = "..." } }`
    HeaderSource {
        location: location,
        file: text,
        env: text,
    }

    /// `[outbox]`
    Outbox {
        retention: duration,
        max_payload: size,
        unknown_events: flag,
        poll: duration,
        relay: flag,
        backlog_max: number(0..=u32::MAX),
        source: text,
    }

    /// `[log]`
    Log {
        format: text,
        level: text,
    }
}

/// Reads the whole tree.
#[must_use]
pub(super) fn read(tree: &Node, diagnostics: &Diagnostics) -> File {
    File::read(Section::top(tree, diagnostics))
}
