//! How a server is reached and who asks there: what `store.url` says, with the password, the roots and the variables that libpq
//! would add to it.
//!
//! The order is libpq's: first the URL (or the setting that stands for a part of it), then the variable, then the default.
//! A password is looked for in the URL, in what `store.password_file` holds, in `PGPASSWORD`, and in the password file
//! (`passfile`, `PGPASSFILE`, `~/.pgpass`), whose lines name hosts: each host gets its own.
//!
//! What must stay true: no error repeats a part of the URL that could be a piece of a password.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr as _;

use percent_encoding::percent_decode_str;
use tokio_postgres::Config;
use tokio_postgres::config::{Host, SslMode};

use super::passfile::Passfile;
use crate::telemetry;

/// What can be in a URL only if it is percent-encoded.
const ENCODE: &str =
    "in a user and a password, write %40 for @, %2F for /, %23 for #, %3F for ? and %25 for %";

/// What a URL may say after its `?`.
const PARAMETERS: &str = "allowed are sslmode, sslrootcert, passfile, user, password, dbname, host, hostaddr, port, options, \
     application_name, target_session_attrs, load_balance_hosts, channel_binding, sslnegotiation, tcp_user_timeout, \
     keepalives, keepalives_idle, keepalives_interval and keepalives_retries";

/// What the driver reads by itself.
const OF_THE_DRIVER: [&str; 16] = [
    "user",
    "password",
    "dbname",
    "host",
    "hostaddr",
    "port",
    "options",
    "application_name",
    "target_session_attrs",
    "load_balance_hosts",
    "channel_binding",
    "sslnegotiation",
    "tcp_user_timeout",
    "keepalives",
    "keepalives_interval",
    "keepalives_retries",
];

/// How TLS is spoken to the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Tls {
    /// Plain text only.
    Disable,
    /// Where the server offers it, with any certificate.
    Prefer,
    /// Always; the certificate must come from one of the roots.
    VerifyCa(Roots),
    /// Always; the certificate must come from one of the roots, and name the host.
    VerifyFull(Roots),
}

/// Which certificates are trusted to sign the server's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Roots {
    /// Those of the system, or of `SSL_CERT_FILE`.
    System,
    /// Those in a file, PEM.
    File(PathBuf),
}

/// What adds to a URL.
#[derive(Default)]
pub struct Additions {
    /// What `store.password_file` holds.
    pub password: Option<String>,
    /// What `store.ca_file` names.
    pub ca_file: Option<PathBuf>,
    /// The environment.
    pub variables: BTreeMap<String, String>,
}

/// A server of Postgres, and how it is asked.
#[derive(Clone)]
pub struct Access {
    config: Box<Config>,
    tls: Tls,
    passfile: Passfile,
}

/// Without the password.
impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Access").field("place", &location(&self.config)).finish_non_exhaustive()
    }
}

impl Access {
    /// What `url` says, with what is added to it; and what is to be warned of.
    ///
    /// # Errors
    /// What is wrong, as far as it can be known without asking the server. The text repeats nothing of the URL that may be a
    /// part of a password.
    pub fn read(url: &str, additions: &Additions) -> Result<(Self, Option<String>), String> {
        can_be_split(url)?;
        let (base, parameters) = url.split_once('?').unwrap_or((url, ""));
        let mut own = BTreeMap::new();
        let mut of_the_driver = Vec::new();
        for pair in parameters.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            match name {
                "sslmode" | "sslrootcert" | "passfile" | "keepalives_idle" => {
                    own.insert(name, decoded(value));
                }
                _ if OF_THE_DRIVER.contains(&name) => of_the_driver.push(pair),
                _ => return Err(refused(name)),
            }
        }
        let rest = format!("{base}?{}", of_the_driver.join("&"));
        let mut config = Config::from_str(&rest).map_err(|error| telemetry::causes(&error))?;
        if config.get_ports().contains(&0) {
            return Err("has the invalid port 0; a port is a number from 1 to 65535".into());
        }
        if config.get_hosts().is_empty() && config.get_hostaddrs().is_empty() {
            return Err("names no host; write \"postgres://user@host/database\"".into());
        }
        let idle = own.get("keepalives_idle").map_or(Ok(30), |text| text.parse::<u32>());
        let idle = idle.map_err(|_| "keepalives_idle must be a number of seconds")?;
        config.keepalives_idle(std::time::Duration::from_secs(idle.into()));
        fill_in(&mut config, additions)?;
        let tls = read_tls(&own, additions)?;
        config.ssl_mode(tls.mode());
        let (passfile, warning) = match config.get_password() {
            Some(_) => (Passfile::default(), None),
            None => Passfile::find(own.get("passfile").map(String::as_str), &additions.variables)?,
        };
        Ok((Self { config: Box::new(config), tls, passfile }, warning))
    }

    /// How TLS is spoken.
    pub(super) fn tls(&self) -> &Tls {
        &self.tls
    }

    /// What the driver gets, of all hosts.
    pub(super) fn config(&self) -> &Config {
        &self.config
    }

    /// Where the database is, without user or password.
    #[must_use]
    pub fn location(&self) -> String {
        location(&self.config)
    }

    /// What the driver gets of one host, with the password that the password file has for it.
    pub(super) fn with_its_password(&self, mut host: Config) -> Config {
        if host.get_password().is_none()
            && let Some(password) = self.passfile.password_for(&host)
        {
            host.password(password);
        }
        host
    }
}

impl Tls {
    /// In the words of the driver, which leaves certificates to us.
    fn mode(&self) -> SslMode {
        match self {
            Self::Disable => SslMode::Disable,
            Self::Prefer => SslMode::Prefer,
            Self::VerifyCa(_) | Self::VerifyFull(_) => SslMode::Require,
        }
    }
}

/// Whether it is certain where user and password end. The driver would take what follows the first `@` for the host.
///
/// # Errors
/// How to write it.
pub fn can_be_split(url: &str) -> Result<(), String> {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    if rest.contains('#') {
        return Err(format!("has a # in it, which no part of the URL may have as it is; {ENCODE}"));
    }
    let (authority, tail) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
    if authority.matches('@').count() > 1 || tail.contains('@') {
        return Err(format!(
            "has an @ that does not stand between the password and the host; {ENCODE}"
        ));
    }
    let whole = |rest: &str| {
        rest.get(..2).is_some_and(|two| two.bytes().all(|byte| byte.is_ascii_hexdigit()))
    };
    if !rest.split('%').skip(1).all(whole) {
        return Err(format!("has a % without two hexadecimal digits; {ENCODE}"));
    }
    Ok(())
}

fn refused(name: &str) -> String {
    match name {
        "connect_timeout" => {
            "connect_timeout has no effect in the URL; set store.connect_timeout".to_owned()
        }
        "search_path" | "schema" | "currentSchema" => format!(
            "the parameter {name} means nothing to Postgres; write options=-c%20search_path%3DSCHEMA, or give the role its \
             path: ALTER ROLE ... SET search_path"
        ),
        _ => format!("the parameter {name:?} means nothing here; {PARAMETERS}"),
    }
}

fn decoded(text: &str) -> String {
    percent_decode_str(text).decode_utf8_lossy().into_owned()
}

/// What the URL leaves to settings and variables.
fn fill_in(config: &mut Config, additions: &Additions) -> Result<(), String> {
    let variable = |name| additions.variables.get(name).filter(|value| !value.is_empty());
    if config.get_application_name().is_none() {
        config.application_name("oncegate");
    }
    if let (None, Some(user)) = (config.get_user(), variable("PGUSER")) {
        config.user(user);
    }
    if let (None, Some(name)) = (config.get_dbname(), variable("PGDATABASE")) {
        config.dbname(name);
    }
    match (config.get_password(), &additions.password) {
        (Some(_), Some(_)) => {
            return Err(
                "holds a password, and store.password_file names one; keep one of them".into()
            );
        }
        (Some(_), None) => {}
        (None, Some(password)) => {
            config.password(password);
        }
        (None, None) => {
            if let Some(password) = variable("PGPASSWORD") {
                config.password(password);
            }
        }
    }
    Ok(())
}

fn read_tls(own: &BTreeMap<&str, String>, additions: &Additions) -> Result<Tls, String> {
    const MODES: &str = "sslmode must be disable, prefer, require, verify-ca or verify-full";
    let variable = |name| additions.variables.get(name).filter(|value| !value.is_empty());
    let named = match (own.get("sslrootcert"), &additions.ca_file) {
        (Some(_), Some(_)) => {
            return Err(
                "has sslrootcert, and store.ca_file names roots too; keep one of them".into()
            );
        }
        (Some(path), None) => Some(PathBuf::from(path)),
        (None, path) => path.clone(),
    };
    let mode = own.get("sslmode").or_else(|| variable("PGSSLMODE"));
    let explicit = named.is_some();
    let path = named.or_else(|| variable("PGSSLROOTCERT").map(PathBuf::from));
    let roots = match path {
        Some(path) if path.as_os_str() != "system" => Roots::File(path),
        Some(_) | None => Roots::System,
    };
    match mode.map_or("prefer", String::as_str) {
        "disable" | "prefer" if explicit => {
            Err("names roots, and checks no certificate; add sslmode=verify-full to the URL"
                .to_owned())
        }
        "disable" => Ok(Tls::Disable),
        "prefer" => Ok(Tls::Prefer),
        "verify-ca" => Ok(Tls::VerifyCa(roots)),
        "require" | "verify-full" => Ok(Tls::VerifyFull(roots)),
        "allow" => Err(format!("sslmode=allow is not supported; {MODES}")),
        _ => Err(MODES.to_owned()),
    }
}

/// Where the database is, without user or password.
pub(super) fn location(config: &Config) -> String {
    let ports = config.get_ports();
    let hosts: Vec<String> = config
        .get_hosts()
        .iter()
        .enumerate()
        .map(|(n, host)| {
            let port = ports.get(n).or(ports.first()).copied().unwrap_or(5432);
            match host {
                Host::Tcp(name) => format!("{name}:{port}"),
                #[cfg(unix)]
                Host::Unix(path) => format!("{}:{port}", path.display()),
            }
        })
        .collect();
    format!("postgres://{}/{}", hosts.join(","), config.get_dbname().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(variables: &[(&str, &str)]) -> Additions {
        let variables = variables.iter().map(|&(name, value)| (name.into(), value.into()));
        Additions { variables: variables.collect(), ..Additions::default() }
    }

    fn refused_for(url: &str, additions: &Additions) -> String {
        Access::read(url, additions).map(drop).expect_err(url)
    }

    #[test]
    fn a_password_comes_from_the_url_then_the_setting_then_the_variable() {
        let password = |url: &str, additions: &Additions| {
            let (access, _) = Access::read(url, additions).unwrap();
            access.config.get_password().map(|bytes| String::from_utf8(bytes.to_vec()).unwrap())
        };
        let variable = with(&[("PGPASSWORD", "by variable")]);
        assert_eq!(password("postgres://og:a%40b@h/d", &variable).as_deref(), Some("a@b"));
        assert_eq!(password("postgres://og@h/d?password=a%2Fb", &variable).as_deref(), Some("a/b"));
        assert_eq!(password("postgres://og@h/d", &variable).as_deref(), Some("by variable"));
        let setting = Additions { password: Some("by setting".into()), ..variable };
        assert_eq!(password("postgres://og@h/d", &setting).as_deref(), Some("by setting"));
        assert_eq!(password("postgres://og@h/d", &with(&[])), None);
        let both = refused_for("postgres://og:geheim@h/d", &setting);
        assert!(both.contains("store.password_file") && !both.contains("geheim"), "{both}");
    }

    #[test]
    fn the_user_and_the_database_may_come_from_variables() {
        let variables = with(&[("PGUSER", "og"), ("PGDATABASE", "shop"), ("PGHOST", "elsewhere")]);
        let (access, _) = Access::read("postgres://h", &variables).unwrap();
        assert_eq!(access.config.get_user(), Some("og"));
        assert_eq!(access.location(), "postgres://h:5432/shop");
        let (access, _) = Access::read("postgres://me@h/own", &variables).unwrap();
        assert_eq!(access.config.get_user(), Some("me"));
        assert_eq!(access.location(), "postgres://h:5432/own");
    }

    /// What follows the first `@` would be looked up as a host, and shown in errors.
    #[test]
    fn a_password_that_must_be_encoded_is_refused_and_no_part_of_it_is_told() {
        for password in [
            "ge@heim", "ge/heim", "ge#heim", "ge?heim", "ge%heim", "ge@he@im", "ge/he@im",
            "@geheim",
        ] {
            let url = format!("postgres://og:{password}@db.example:5432/shop?sslmode=prefer");
            let wrong = refused_for(&url, &with(&[]));
            assert!(!wrong.contains("ge") && !wrong.contains("heim"), "{password}: {wrong}");
            assert!(wrong.contains("%40 for @"), "{password}: {wrong}");
        }
    }

    #[test]
    fn tls_is_spoken_as_the_mode_and_the_roots_say() {
        let tls = |parameters: &str, additions: &Additions| {
            Access::read(&format!("postgres://h/d{parameters}"), additions).unwrap().0.tls
        };
        let none = with(&[]);
        assert_eq!(tls("", &none), Tls::Prefer);
        assert_eq!(tls("?sslmode=disable", &none), Tls::Disable);
        assert_eq!(tls("?sslmode=require", &none), Tls::VerifyFull(Roots::System));
        assert_eq!(
            tls("?sslmode=verify-full&sslrootcert=system", &none),
            Tls::VerifyFull(Roots::System)
        );
        let file = || Roots::File("/etc/roots.pem".into());
        assert_eq!(
            tls("?sslmode=verify-ca&sslrootcert=/etc/roots.pem", &none),
            Tls::VerifyCa(file())
        );
        let setting = Additions { ca_file: Some("/etc/roots.pem".into()), ..Additions::default() };
        assert_eq!(tls("?sslmode=verify-full", &setting), Tls::VerifyFull(file()));
        let variables = with(&[("PGSSLMODE", "verify-full"), ("PGSSLROOTCERT", "/etc/roots.pem")]);
        assert_eq!(tls("", &variables), Tls::VerifyFull(file()));
        assert_eq!(tls("?sslmode=prefer", &variables), Tls::Prefer);
        for (url, additions, told) in [
            ("postgres://h/d", &setting, "sslmode=verify-full"),
            ("postgres://h/d?sslrootcert=/r", &none, "sslmode=verify-full"),
            ("postgres://h/d?sslmode=verify-ca&sslrootcert=/r", &setting, "keep one of them"),
            (
                "postgres://h/d?sslmode=allow",
                &none,
                "sslmode must be disable, prefer, require, verify-ca",
            ),
            ("postgres://h/d?sslmode=verify_full", &none, "verify-ca or verify-full"),
        ] {
            let wrong = refused_for(url, additions);
            assert!(wrong.contains(told), "{url}: {wrong}");
        }
    }

    #[test]
    fn what_means_nothing_is_refused_with_what_does() {
        for (url, told) in [
            ("postgres://h/d?pgbouncer=true", "allowed are sslmode, sslrootcert"),
            ("postgres://h/d?connect_timeout=5", "set store.connect_timeout"),
            ("postgres://h/d?search_path=og", "options=-c%20search_path%3DSCHEMA"),
            ("postgres://h/d?keepalives_idle=soon", "a number of seconds"),
            ("postgres://h:0/d", "has the invalid port 0"),
            ("postgres:///d", "names no host"),
            ("postgres://h/d?passfile=/none/pgpass", "passfile that cannot be read: /none/pgpass"),
        ] {
            let wrong = refused_for(url, &with(&[]));
            assert!(wrong.contains(told), "{url}: {wrong}");
        }
    }
}
