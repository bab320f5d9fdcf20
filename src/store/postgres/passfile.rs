//! libpq's password file: lines of `host:port:database:user:password`, of which the first that fits counts.
//!
//! A `*` fits everything; `\:` and `\\` stand for themselves. A host that is a folder of sockets is also `localhost`. As with
//! libpq, a file that others than its owner can get at is not read, and one that is not there is none.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use tokio_postgres::Config;
use tokio_postgres::config::Host;

/// The lines of a password file.
#[derive(Clone, Default)]
pub(super) struct Passfile {
    lines: Vec<[String; 5]>,
}

impl Passfile {
    /// The file that the URL names, or `PGPASSFILE`, or `~/.pgpass`; and what is to be warned of.
    ///
    /// # Errors
    /// A file that the URL names and that cannot be read.
    pub(super) fn find(
        named: Option<&str>,
        variables: &BTreeMap<String, String>,
    ) -> Result<(Self, Option<String>), String> {
        let home = || Some(Path::new(variables.get("HOME")?).join(".pgpass"));
        let by_variable = || variables.get("PGPASSFILE").map(PathBuf::from);
        let path = named.map(PathBuf::from).or_else(by_variable).or_else(home);
        let Some(path) = path else { return Ok((Self::default(), None)) };
        match read(&path) {
            Ok(read) => Ok(read),
            Err(error) if named.is_some() => {
                Err(format!("names a passfile that cannot be read: {}: {error}", path.display()))
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Ok((Self::default(), None)),
            Err(error) => {
                let warning = format!("the password file {} is not read: {error}", path.display());
                Ok((Self::default(), Some(warning)))
            }
        }
    }

    /// The password for the one host that `config` names.
    pub(super) fn password_for(&self, config: &Config) -> Option<&str> {
        let port = config.get_ports().first().copied().unwrap_or(5432).to_string();
        // Where nobody is named, the driver asks as the user of the system, whom only a * fits.
        let user = config.get_user().unwrap_or_default();
        let database = config.get_dbname().unwrap_or(user);
        let hosts: Vec<String> = match config.get_hosts().first() {
            Some(Host::Tcp(name)) => vec![name.clone()],
            #[cfg(unix)]
            Some(Host::Unix(path)) => vec![path.display().to_string(), "localhost".to_owned()],
            None => config.get_hostaddrs().first().iter().map(ToString::to_string).collect(),
        };
        let fits = |pattern: &str, value: &str| pattern == "*" || pattern == value;
        let line = self.lines.iter().find(|[host, its_port, its_database, its_user, _]| {
            hosts.iter().any(|name| fits(host, name))
                && fits(its_port, &port)
                && fits(its_database, database)
                && fits(its_user, user)
        });
        line.map(|[.., password]| password.as_str())
    }
}

fn read(path: &Path) -> std::io::Result<(Passfile, Option<String>)> {
    let mode = std::fs::metadata(path)?.permissions().mode() & 0o7777;
    if mode & 0o077 != 0 {
        let path = path.display();
        let warning = format!(
            "the password file {path} is not read: others than its owner can get at it (mode {mode:04o}); chmod 600 {path}"
        );
        return Ok((Passfile::default(), Some(warning)));
    }
    let text = std::fs::read_to_string(path)?;
    let lines = text.lines().filter(|line| !line.starts_with('#')).filter_map(fields).collect();
    Ok((Passfile { lines }, None))
}

/// The five fields of a line; none where there are fewer.
fn fields(line: &str) -> Option<[String; 5]> {
    let mut fields = vec![String::new()];
    let mut characters = line.chars();
    while let Some(character) = characters.next() {
        let escaped = if character == '\\' { characters.next() } else { None };
        match (escaped, fields.len()) {
            (None, 1..=4) if character == ':' => fields.push(String::new()),
            (escaped, _) => fields.last_mut()?.push(escaped.unwrap_or(character)),
        }
    }
    fields.try_into().ok()
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::str::FromStr as _;

    use super::*;

    fn found(lines: &str, url: &str) -> Option<String> {
        let lines = lines.lines().filter_map(fields).collect();
        let config = Config::from_str(url).unwrap();
        Passfile { lines }.password_for(&config).map(ToOwned::to_owned)
    }

    #[test]
    fn the_first_line_that_fits_counts() {
        let lines = "db:5433:shop:og:other port\ndb:5432:shop:og:right\n*:*:*:og:any\n";
        assert_eq!(found(lines, "postgres://og@db/shop").as_deref(), Some("right"));
        assert_eq!(found(lines, "postgres://og@db:5433/shop").as_deref(), Some("other port"));
        assert_eq!(found(lines, "postgres://og@db2/shop").as_deref(), Some("any"));
        assert_eq!(found(lines, "postgres://somebody@db/shop"), None);
        assert_eq!(found("db:5432:og:og:own", "postgres://og@db").as_deref(), Some("own"));
    }

    #[test]
    fn what_is_escaped_stands_for_itself_and_a_short_line_for_nothing() {
        let lines = "db:5432:shop\ndb:*:*:o\\:g:a\\:b\\\\c:d";
        assert_eq!(found(lines, "postgres://o%3Ag@db/shop").as_deref(), Some("a:b\\c:d"));
        assert_eq!(
            found("localhost:*:*:*:s", "postgres:///x?host=/run/pg&user=u").as_deref(),
            Some("s")
        );
        assert_eq!(
            found("/run/pg:*:*:*:s", "postgres:///x?host=/run/pg&user=u").as_deref(),
            Some("s")
        );
    }

    #[test]
    fn a_file_that_others_can_read_is_not_read_and_one_that_is_named_must_be_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pass");
        std::fs::write(&path, "# ours\ndb:*:*:*:secret\n").unwrap();
        let mode = |mode| std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        let variables = |name: &str, value: &Path| {
            BTreeMap::from([(name.to_owned(), value.display().to_string())])
        };
        mode(0o640);
        let (none, warning) = Passfile::find(None, &variables("PGPASSFILE", &path)).unwrap();
        assert!(none.lines.is_empty() && warning.unwrap().contains("chmod 600"));
        mode(0o600);
        let (one, warning) = Passfile::find(None, &variables("PGPASSFILE", &path)).unwrap();
        assert!(one.lines.len() == 1 && warning.is_none());
        std::fs::rename(&path, folder.path().join(".pgpass")).unwrap();
        let (one, _) = Passfile::find(None, &variables("HOME", folder.path())).unwrap();
        assert_eq!(one.lines.len(), 1);
        let (none, warning) = Passfile::find(None, &variables("PGPASSFILE", &path)).unwrap();
        assert!(none.lines.is_empty() && warning.is_none());
        let missing = Passfile::find(path.to_str(), &BTreeMap::new()).map(drop).unwrap_err();
        assert!(missing.contains("names a passfile that cannot be read"), "{missing}");
    }
}
