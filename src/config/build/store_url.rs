//! `store.url` and `store.url_file`: a SQLite file or a Postgres server, with its parameters.
//!
//! A URL of a file is parsed here only. A parameter that has no meaning is refused: if it became part of the file name, the
//! gateway would open another, empty database, and execute every key again.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;

use percent_encoding::percent_decode_str;

use crate::config::StoreKind;
use crate::config::diagnostics::Spanned;
use crate::config::file;
use crate::relay::address::port_problem;
use crate::store::postgres;
use crate::store::postgres::access::{Access, Additions, can_be_split};
use crate::store::sqlite::Location;

use super::{Builder, SECOND, STATEMENT_TIMEOUT, value_or};

/// How the URL of a file is written.
const HOW: &str = "write \"sqlite:PATH\", \"sqlite://PATH\" or \"sqlite:///absolute/path\"";

impl Builder<'_> {
    /// The store. `None`: the default, or a mistake that is reported.
    pub(super) fn store_kind(&self, raw: &file::Store) -> Option<StoreKind> {
        let url = self.store_url(raw)?;
        let additions = Additions {
            password: raw.password_file.as_ref().and_then(|file| self.store_password(file)),
            ca_file: raw.ca_file.as_ref().map(|file| self.readable(file)),
            variables: self.variables.clone(),
        };
        let location = &url.location;
        match read_store_url(&url.value, raw, &additions) {
            Ok((kind, warning)) => {
                if let Some(warning) = warning {
                    self.diagnostics.warning(location, warning);
                }
                self.none_of_postgres(raw, &kind);
                Some(kind)
            }
            Err(wrong) => {
                self.diagnostics.mistake(location, wrong);
                None
            }
        }
    }

    fn store_url(&self, raw: &file::Store) -> Option<Spanned<String>> {
        match (&raw.url, &raw.url_file) {
            (Some(_), Some(file)) => {
                self.diagnostics.mistake(
                    &file.location,
                    "cannot be set together with store.url; keep one of them",
                );
                None
            }
            (url, None) => url.clone(),
            (None, Some(file)) => {
                let text = self.secret_text(file)?;
                Some(Spanned { value: text.trim().to_owned(), location: file.location.clone() })
            }
        }
    }

    /// The password on its line. White space at the end of the line belongs to it.
    fn store_password(&self, file: &Spanned<String>) -> Option<String> {
        let text = self.secret_text(file)?;
        let password = text.trim_end_matches(['\r', '\n']);
        if password.is_empty() || password.contains('\n') {
            let wrong = "must hold the password on one line, and nothing else";
            self.diagnostics.mistake(&file.location, wrong);
        }
        Some(password.to_owned())
    }

    fn none_of_postgres(&self, raw: &file::Store, kind: &StoreKind) {
        if let StoreKind::Postgres(_) = kind {
            return;
        }
        for file in [&raw.password_file, &raw.ca_file].into_iter().flatten() {
            let wrong = "belongs to Postgres, and the store is a SQLite file; leave it out";
            self.diagnostics.mistake(&file.location, wrong);
        }
    }
}

fn read_store_url(
    text: &str,
    raw: &file::Store,
    additions: &Additions,
) -> Result<(StoreKind, Option<String>), String> {
    if let Some(rest) = text.strip_prefix("sqlite:") {
        return Ok((StoreKind::Sqlite(read_location(rest)?), None));
    }
    if text.starts_with("postgres://") || text.starts_with("postgresql://") {
        can_be_split(text)?;
        if let Some(wrong) = port_problem(text) {
            return Err(wrong);
        }
        if let Some(wrong) = contradiction(text) {
            return Err(wrong);
        }
        let (access, warning) = Access::read(text, additions)?;
        let settings = postgres::Settings {
            access,
            connections: value_or(&raw.connections, 10),
            statement_timeout: value_or(&raw.timeout, STATEMENT_TIMEOUT),
            connect_timeout: value_or(&raw.connect_timeout, 3 * SECOND),
        };
        return Ok((StoreKind::Postgres(settings), warning));
    }
    // The text may hold a password, so the message does not repeat it.
    Err("must begin with \"sqlite:\" and a path, or with \"postgres://\"".to_owned())
}

/// A URL may repeat these: each value belongs to one of several hosts.
const MANY: [&str; 3] = ["host", "hostaddr", "port"];

/// Finds a parameter that a server's URL gives two values. The driver would silently take the last one.
fn contradiction(url: &str) -> Option<String> {
    let (_, query) = url.split_once('?')?;
    let pairs: Vec<_> = query.split('&').filter_map(|pair| pair.split_once('=')).collect();
    let twice = |(n, (name, value)): (usize, &(&str, &str))| {
        let before = pairs.iter().take(n).any(|(other, was)| other == name && was != value);
        (before && !MANY.contains(name)).then(|| (*name).to_owned())
    };
    let name = pairs.iter().enumerate().find_map(twice)?;
    // The value may be a password, so the message does not repeat it.
    Some(format!("has the parameter {name} twice, with different values: write one of them"))
}

/// Parses the text after `sqlite:`.
fn read_location(text: &str) -> Result<Location, String> {
    if text.contains('#') {
        return Err(format!(
            "a fragment (#...) has no meaning here; {HOW}, with %23 for a # in a name"
        ));
    }
    let (path, query) =
        text.split_once('?').map_or((text, None), |(path, query)| (path, Some(query)));
    // A file has no authority. With or without two slashes, the rest is the path.
    let path = path.strip_prefix("//").unwrap_or(path);
    match path {
        "" => return Err(format!("names no file; {HOW}")),
        ":memory:" => {
            let wrong =
                "a database in memory is lost with the process, and its keys are executed again";
            return Err(format!("{wrong}; {HOW}"));
        }
        _ if path.starts_with("file:") => {
            return Err(format!("holds another URL (file:...); {HOW}"));
        }
        _ if path.ends_with('/') => return Err(format!("names a folder; {HOW}")),
        _ => {}
    }
    let bytes = decoded(path)?;
    let create = query.map_or(Ok(true), read_mode)?;
    Ok(Location { path: OsString::from_vec(bytes).into(), create })
}

/// The bytes of a name in which `%20` is a blank.
fn decoded(path: &str) -> Result<Vec<u8>, String> {
    let hex = |text: &str| text.len() == 2 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let whole = |rest: &str| rest.get(..2).is_some_and(hex);
    if !path.split('%').skip(1).all(whole) {
        return Err(
            "has a % without two hexadecimal digits; write %25 for a % in a name".to_owned()
        );
    }
    let bytes: Vec<u8> = percent_decode_str(path).collect();
    if bytes.contains(&0) {
        return Err("has a zero byte (%00), which no name can have".to_owned());
    }
    Ok(bytes)
}

/// Whether the parameters allow to make the file.
fn read_mode(query: &str) -> Result<bool, String> {
    let mut modes = query.split('&');
    let first = modes.next().unwrap_or_default();
    let create = read_parameter(first)?;
    for other in modes {
        if read_parameter(other)? != create {
            return Err(format!("{first} and {other} contradict each other: write one of them"));
        }
    }
    Ok(create)
}

fn read_parameter(parameter: &str) -> Result<bool, String> {
    let allowed = "allowed is mode=rwc (the default: a file that is not there is made) or mode=rw (it must be there)";
    match parameter.split_once('=') {
        Some(("mode", "rwc")) => Ok(true),
        Some(("mode", "rw")) => Ok(false),
        Some(("mode", "ro")) => Err(format!(
            "mode=ro is not possible: the store is written, and the commands that only read open it as `serve` does; {allowed}"
        )),
        Some(("mode", "memory")) => Err(format!(
            "mode=memory is not possible: the records would be lost with the process; {allowed}"
        )),
        Some(_) | None => {
            Err(format!("the parameter {parameter:?} has no meaning here; {allowed}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn a_file_is_found_where_its_url_says() {
        for (text, path, create) in [
            ("x.db", "x.db", true),
            ("//x.db", "x.db", true),
            ("//data/x.db", "data/x.db", true),
            ("data/x.db", "data/x.db", true),
            ("./x.db", "./x.db", true),
            ("../x.db", "../x.db", true),
            ("/var/x.db", "/var/x.db", true),
            ("///var/x.db", "/var/x.db", true),
            ("////var/x.db", "//var/x.db", true),
            ("my%20own.db", "my own.db", true),
            ("my own.db", "my own.db", true),
            ("a%2Fb%3f%23%25.db", "a/b?#%.db", true),
            ("%C3%A9t%C3%A9.db", "été.db", true),
            ("été.db", "été.db", true),
            ("a+b&c=d.db", "a+b&c=d.db", true),
            ("localhost/x.db", "localhost/x.db", true),
            (":memory:.db", ":memory:.db", true),
            ("x.db?mode=rwc", "x.db", true),
            ("//x.db?mode=rwc", "x.db", true),
            ("///var/x.db?mode=rw", "/var/x.db", false),
            ("x.db?mode=rw&mode=rw", "x.db", false),
        ] {
            let location = read_location(text).unwrap_or_else(|wrong| panic!("{text}: {wrong}"));
            assert_eq!((&*location.path, location.create), (Path::new(path), create), "{text}");
        }
    }

    #[test]
    fn a_parameter_that_says_two_things_is_a_contradiction() {
        for (text, told) in [
            (
                "x.db?mode=rwc&mode=rw",
                "mode=rwc and mode=rw contradict each other: write one of them",
            ),
            ("x.db?mode=rw&mode=rw&mode=rwc", "mode=rw and mode=rwc contradict each other"),
        ] {
            let wrong = read_location(text).expect_err(text);
            assert!(wrong.starts_with(told), "{text}: {wrong}");
        }
        for (url, told) in [
            (
                "postgres://u@h/d?sslmode=require&sslmode=disable",
                "sslmode twice, with different values",
            ),
            ("postgres://u@h/d?connect_timeout=1&connect_timeout=2", "connect_timeout twice"),
        ] {
            let wrong = contradiction(url).expect(url);
            assert!(wrong.contains(told), "{url}: {wrong}");
        }
        for url in
            ["postgres://u@h/d?sslmode=require&sslmode=require", "postgres:///d?host=a&host=b"]
        {
            assert_eq!(contradiction(url), None, "{url}");
        }
    }

    #[test]
    fn what_means_nothing_in_a_url_is_refused_with_what_is_allowed() {
        let allowed = "allowed is mode=rwc (the default: a file that is not there is made) or mode=rw (it must be there)";
        for (text, wrong) in [
            ("", "names no file"),
            ("//", "names no file"),
            ("?mode=rwc", "names no file"),
            ("//?mode=rw", "names no file"),
            ("/", "names a folder"),
            ("data/", "names a folder"),
            (":memory:", "a database in memory is lost with the process"),
            ("//:memory:", "a database in memory is lost with the process"),
            (":memory:?cache=shared", "a database in memory is lost with the process"),
            ("file:x.db?mode=ro", "holds another URL (file:...)"),
            ("x.db#a", "a fragment (#...) has no meaning here"),
            ("x.db?mode=rw#a", "a fragment (#...) has no meaning here"),
            ("100%.db", "has a % without two hexadecimal digits; write %25"),
            ("a%2.db", "has a % without two hexadecimal digits"),
            ("a%zz.db", "has a % without two hexadecimal digits"),
            ("a%é.db", "has a % without two hexadecimal digits"),
            ("a%00.db", "has a zero byte (%00)"),
            ("x.db?mode=ro", "mode=ro is not possible: the store is written"),
            ("x.db?mode=memory", "mode=memory is not possible"),
            ("x.db?mode=RW", "the parameter \"mode=RW\" has no meaning here; allowed is mode=rwc"),
            ("x.db?mode", "the parameter \"mode\" has no meaning here"),
            ("x.db?", "the parameter \"\" has no meaning here"),
            ("x.db?cache=shared", "the parameter \"cache=shared\" has no meaning here"),
            ("x.db?immutable=1", "the parameter \"immutable=1\" has no meaning here"),
            ("x.db?mode=rwc&cache=shared", "the parameter \"cache=shared\" has no meaning here"),
            ("x.db?mode=rw&mode=ro", "mode=ro is not possible"),
        ] {
            let told = read_location(text).expect_err(text);
            assert!(told.starts_with(wrong), "{text}: {told}");
            let how = told.contains(allowed) || told.contains(HOW) || told.contains('%');
            assert!(how, "{text}: {told}");
        }
    }
}
