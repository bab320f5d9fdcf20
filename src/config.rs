//! The checked configuration, split into the settings of each part of the program.
//!
//! ```text
//! file + ONCEGATE_* variables -> tree (locations) -> file::File (as written) -> Config (valid) | Mistakes (all of them)
//! ```
//!
//! Loading reads the file, the secret files that it names, and the variables. It writes nothing. It reports all mistakes at
//! once, each with its location, what is wrong and what to do. A [`Config`] never holds a mistake, so no other module checks
//! again.
//!
//! Invariants: every field has its default in `config/build.rs` and its line in `config/oncegate.toml`. No message repeats a
//! value that may be secret.

mod build;
pub mod check;
mod diagnostics;
mod digest_key;
mod file;
mod section;
mod tree;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use http::Method;

pub use crate::config::digest_key::{DigestKeySource, NoDigestKey};

use crate::config::build::Builder;
use crate::config::diagnostics::{Diagnostic, Diagnostics, Location};
use crate::config::tree::Node;
use crate::fault;
use crate::gateway::{self, accept, spill, tokens, upstream};
use crate::record::Operation;
use crate::relay;
use crate::route::Routes;
use crate::store::sealed::Keys;
use crate::store::{postgres, sqlite};
use crate::sweep;
use crate::telemetry::log;

/// The name of `[upstream]` in [`Config::upstreams`] and in a route.
pub const DEFAULT_UPSTREAM: &str = "default";

/// A valid configuration.
#[derive(Debug)]
pub struct Config {
    /// The callers' side.
    pub server: Server,
    /// Limits and time-outs of a request.
    pub gateway: gateway::Settings,
    /// The operators' side.
    pub admin: Admin,
    /// By name; `[upstream]` is [`DEFAULT_UPSTREAM`].
    pub upstreams: BTreeMap<String, upstream::Settings>,
    /// Where records are kept.
    pub store: Store,
    /// What is protected.
    pub routes: Routes,
    /// Facts of each route, for output and checks.
    pub facts: Vec<RouteFacts>,
    /// Where events go.
    pub relay: relay::Settings,
    /// Which process delivers them.
    pub relay_mode: RelayMode,
    /// What the sweeper deletes.
    pub sweep: sweep::Settings,
    /// How tokens are checked. `None`: no tenant is read from a token.
    pub jwt: Option<tokens::Settings>,
    /// The log.
    pub log: Log,
    /// Where the key of the digests comes from.
    pub digest_key: DigestKeySource,
}

/// Who delivers events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RelayMode {
    /// `serve` itself.
    InProcess,
    /// `oncegate relay`: `serve` only writes them.
    Separate,
}

/// An address to listen on, and the setting that gives it.
#[derive(Clone, PartialEq, Eq)]
pub struct Listen {
    /// The address.
    pub address: String,
    /// The setting, with the line or the variable that gives it.
    pub setting: String,
}

/// Two values are equal if their addresses are.
impl fmt::Debug for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.address, f)
    }
}

/// The callers' side.
#[derive(Debug)]
pub struct Server {
    /// `host:port` or `unix:PATH`.
    pub listen: Listen,
    /// The limits of the listener.
    pub accept: accept::Settings,
    /// How long a shutdown goes on taking requests after readiness is off.
    pub shutdown_delay: Duration,
    /// How long a shutdown then waits for open requests and deliveries.
    pub shutdown_grace: Duration,
}

/// The operators' side.
pub struct Admin {
    /// `host:port`.
    pub listen: Listen,
    /// The token that an operator must send. `None` only on a loopback address.
    pub token: Option<String>,
}

impl fmt::Debug for Admin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let token = self.token.as_ref().map(|_| "(secret)");
        f.debug_struct("Admin").field("listen", &self.listen).field("token", &token).finish()
    }
}

/// Where records are kept.
#[derive(Clone, Debug)]
pub struct Store {
    /// Which database.
    pub kind: StoreKind,
    /// How long a replica that does not renew its lease keeps its records.
    pub lease: Duration,
    /// Whether `serve` migrates.
    pub migrate: bool,
    /// How long a start waits for a Postgres that is away; `None`: until it comes.
    pub wait_at_start: Option<Duration>,
    /// Where outcomes are kept while the database does not take them.
    pub spill: spill::Settings,
    /// The keys that seal stored content.
    pub keys: Arc<Keys>,
}

/// Which database.
#[derive(Clone)]
pub enum StoreKind {
    /// A file.
    Sqlite(sqlite::Location),
    /// A server; the URL may hold a password.
    Postgres(postgres::Settings),
}

impl fmt::Debug for StoreKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sqlite(location) => write!(f, "sqlite:{}", location.path.display()),
            Self::Postgres(settings) => f
                .debug_struct("Postgres")
                .field("connections", &settings.connections)
                .field("statement_timeout", &settings.statement_timeout)
                .field("connect_timeout", &settings.connect_timeout)
                .finish_non_exhaustive(),
        }
    }
}

/// The operation, methods and path of a route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteFacts {
    /// Its operation.
    pub operation: Operation,
    /// Its methods.
    pub methods: Vec<Method>,
    /// Its path template.
    pub path: String,
}

/// The log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Log {
    /// How a line looks.
    pub format: log::Format,
    /// A level, or a list of `target=level`.
    pub level: String,
}

/// A warning: the configuration is valid, and something in it may be unsafe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    /// The field, or the variable.
    pub location: String,
    /// What is unsafe, and what to do.
    pub text: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.location, self.text)
    }
}

/// All mistakes of a configuration in the order of their locations, one on each line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistakes {
    file: Option<PathBuf>,
    diagnostics: Vec<Diagnostic>,
}

impl Mistakes {
    /// One sentence for each.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        self.diagnostics.iter().map(|diagnostic| self.line(diagnostic)).collect()
    }

    fn line(&self, diagnostic: &Diagnostic) -> String {
        let file = self.file.as_ref().map(|path| path.display().to_string());
        let source = match (&diagnostic.location.variable, file, diagnostic.location.line) {
            (Some(variable), _, _) => Some(variable.clone()),
            (None, Some(file), Some(line)) => Some(format!("{file}:{line}")),
            (None, file, _) => file,
        };
        let path = Some(diagnostic.location.path.clone()).filter(|path| !path.is_empty());
        let parts: Vec<String> =
            [source, path, Some(diagnostic.text.clone())].into_iter().flatten().collect();
        parts.join(": ")
    }
}

impl fmt::Display for Mistakes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.lines().join("\n"))
    }
}

impl std::error::Error for Mistakes {}

impl Config {
    /// Loads the file at `path`, lays the `ONCEGATE_*` variables over it, and `upstream_override` over `upstream.url`.
    /// Without a file every POST and PATCH that carries a key is protected.
    ///
    /// # Errors
    /// All mistakes of file and variables.
    pub fn load(
        path: Option<&Path>,
        variables: impl IntoIterator<Item = (String, String)>,
        upstream_override: Option<&str>,
    ) -> Result<(Self, Vec<Warning>), Mistakes> {
        let diagnostics = Diagnostics::default();
        let text = match path.map(std::fs::read_to_string) {
            None => String::new(),
            Some(Ok(text)) => text,
            Some(Err(error)) => {
                diagnostics.mistake(&Location::default(), format!("cannot read the file: {error}"));
                return Err(Mistakes {
                    file: path.map(Path::to_owned),
                    diagnostics: diagnostics.into_parts().0,
                });
            }
        };
        let folder = path.and_then(Path::parent).unwrap_or(Path::new("")).to_owned();
        let variables: BTreeMap<String, String> = variables.into_iter().collect();
        let mut tree = tree::parse(&text, &diagnostics);
        // A file with a syntax error is read in part only. Missing fields would be reported that are in the file.
        if diagnostics.has_mistake_under(&Location::default()) {
            return Err(Mistakes {
                file: path.map(Path::to_owned),
                diagnostics: diagnostics.into_parts().0,
            });
        }
        overlay_variables(&mut tree, &variables, &diagnostics);
        if let Some(url) = upstream_override {
            tree.overlay("upstream", "url", "--upstream", url, &diagnostics);
        }
        let without_file = path.is_none();
        let file = file::read(&tree, &diagnostics);
        let builder = Builder {
            diagnostics: &diagnostics,
            folder,
            require_key: !without_file,
            variables: &variables,
        };
        let config = builder.config(&file, without_file);
        let (mistakes, warnings) = diagnostics.into_parts();
        if mistakes.is_empty() {
            Ok((config, warnings.into_iter().map(Warning::from).collect()))
        } else {
            Err(Mistakes { file: path.map(Path::to_owned), diagnostics: mistakes })
        }
    }
}

/// The address of the admin listener of a process with this configuration. Nothing else is read: no secret, and a mistake
/// elsewhere (in a file that was edited while the process runs, for example) does not count.
///
/// # Errors
/// The file cannot be read, or does not say.
pub fn admin_address(
    path: Option<&Path>,
    variables: impl IntoIterator<Item = (String, String)>,
) -> Result<String, Mistakes> {
    let diagnostics = Diagnostics::default();
    let mistakes = |diagnostics: Diagnostics| Mistakes {
        file: path.map(Path::to_owned),
        diagnostics: diagnostics.into_parts().0,
    };
    let text = match path.map(std::fs::read_to_string).transpose() {
        Ok(text) => text.unwrap_or_default(),
        Err(error) => {
            diagnostics.mistake(&Location::default(), format!("cannot read the file: {error}"));
            return Err(mistakes(diagnostics));
        }
    };
    let mut tree = tree::parse(&text, &diagnostics);
    if diagnostics.has_mistake_under(&Location::default()) {
        return Err(mistakes(diagnostics));
    }
    overlay_variables(&mut tree, &variables.into_iter().collect(), &diagnostics);
    let listen = file::read(&tree, &diagnostics).admin.listen;
    if diagnostics.has_mistake_under(&Location::absent("admin.listen")) {
        return Err(mistakes(diagnostics));
    }
    Ok(listen.map_or_else(|| DEFAULT_ADMIN.to_owned(), |spanned| spanned.value))
}

/// The default of `admin.listen`.
const DEFAULT_ADMIN: &str = "127.0.0.1:9090";

impl From<Diagnostic> for Warning {
    fn from(diagnostic: Diagnostic) -> Self {
        let location = diagnostic.location.variable.unwrap_or(diagnostic.location.path);
        Self { location, text: diagnostic.text }
    }
}

/// The default of `server.listen`, for images: a program in a container is called from outside of it.
const DEFAULT_LISTEN_VARIABLE: &str = "ONCEGATE_DEFAULT_LISTEN";

/// Variables that are not a field of a section.
const OTHER_VARIABLES: [&str; 3] =
    ["ONCEGATE_CONFIG", "ONCEGATE_UPSTREAM", DEFAULT_LISTEN_VARIABLE];

/// `ONCEGATE_STORE_URL` is `store.url`: the section is the first word, the rest is the field.
fn overlay_variables(
    tree: &mut Node,
    variables: &BTreeMap<String, String>,
    diagnostics: &Diagnostics,
) {
    for (name, value) in variables {
        let Some(rest) = name.strip_prefix("ONCEGATE_") else { continue };
        if OTHER_VARIABLES.contains(&name.as_str()) || fault::is_variable(name) {
            continue;
        }
        let lower = rest.to_ascii_lowercase();
        let (section, field) = lower.split_once('_').unwrap_or((&lower, ""));
        let known = file::SECTIONS.contains(&section) && !field.is_empty();
        if known && !is_service_link(rest) {
            tree.overlay(section, field, name, value, diagnostics);
        } else {
            let location = Location { variable: Some(name.clone()), ..Location::default() };
            diagnostics.warning(&location, "is not a setting of Oncegate and is ignored");
        }
    }
}

/// Kubernetes sets `ONCEGATE_ADMIN_SERVICE_HOST` and the like for a service named `oncegate-admin`.
fn is_service_link(rest: &str) -> bool {
    let port = rest.split_once("_PORT").is_some_and(|(_, after)| {
        after.is_empty()
            || after.strip_prefix('_').is_some_and(|a| a.starts_with(|c: char| c.is_ascii_digit()))
    });
    port || rest.contains("_SERVICE_HOST") || rest.contains("_SERVICE_PORT")
}

#[cfg(test)]
mod tests;
