//! `replay_auth`: a word, or the server that is asked.
//!
//! Invariant: a value in no known form is a mistake. It never means that every caller may read.

use std::sync::Arc;

use http::uri::PathAndQuery;

use super::file::TextOr;
use super::texts::read_base;
use super::{Builder, SECOND, Spanned, file, value_or};
use crate::route::{ReplayAuth, Server, Subrequest};

impl Builder<'_> {
    /// `upstream` is the upstream of the route. It is asked if only a path is given.
    pub(super) fn replay_auth(
        &self,
        raw: Option<&TextOr<file::Subrequest>>,
        upstream: &str,
    ) -> ReplayAuth {
        let chosen = match raw {
            None => return ReplayAuth::Scope,
            Some(TextOr::Text(word)) => self.checked(word, read_word),
            Some(TextOr::Section(asked)) => self.subrequest(asked, upstream),
        };
        // A harmless value after a mistake, which is reported.
        chosen.unwrap_or(ReplayAuth::SameCredential)
    }

    fn subrequest(&self, raw: &file::Subrequest, upstream: &str) -> Option<ReplayAuth> {
        self.above_zero(&raw.timeout);
        let url = self.required(raw.subrequest.as_ref(), &raw.location, "subrequest")?;
        let ca_file = raw.ca_file.as_ref().map(|spanned| self.readable(spanned));
        if let Some(spanned) = raw.ca_file.as_ref().filter(|_| !url.value.starts_with("https://")) {
            self.diagnostics.mistake(&spanned.location, "applies only to an https URL");
        }
        let (server, target) = if url.value.starts_with('/') {
            (Server::Upstream(upstream.to_owned()), self.checked(url, read_target)?)
        } else {
            let (base, target) = self.checked(url, |text| read_server(text, "/auth"))?;
            (Server::Url { base, ca_file }, target)
        };
        let timeout = value_or(&raw.timeout, 2 * SECOND);
        Some(ReplayAuth::Subrequest(Arc::new(Subrequest { server, target, timeout })))
    }

    /// Reads a key file, up to the largest size of a key.
    pub(super) fn key_bytes(&self, file: &Spanned<String>) -> Option<Vec<u8>> {
        let path = self.folder.join(&file.value);
        std::fs::read(&path)
            .map_err(|error| {
                let wrong = format!("cannot read {}: {error}", path.display());
                self.diagnostics.mistake(&file.location, wrong);
            })
            .ok()
    }
}

fn read_word(text: &str) -> Result<ReplayAuth, String> {
    match text {
        "none" => Ok(ReplayAuth::Scope),
        "same-credential" => Ok(ReplayAuth::SameCredential),
        _ => Err("must be \"none\" (everybody in the tenant may read), \"same-credential\", or \
                  { subrequest = \"/auth\" }"
            .to_owned()),
    }
}

fn read_target(text: &str) -> Result<PathAndQuery, String> {
    let plain = !text.contains('#') && text.starts_with('/');
    let target = plain.then(|| text.parse().ok()).flatten();
    target.ok_or_else(|| format!("{text:?} is not a path, such as \"/auth\""))
}

/// Splits a URL into its server, `scheme://authority`, and the path and query.
pub(super) fn read_server(text: &str, example: &str) -> Result<(String, PathAndQuery), String> {
    let how = format!("write \"https://host{example}\"");
    let wrong = || format!("{text:?} is not a URL; {how}");
    let (scheme, rest) = text.split_once("://").ok_or_else(wrong)?;
    let (authority, path) = match rest.find(['/', '?', '#']) {
        Some(end) => rest.split_at_checked(end).ok_or_else(wrong)?,
        None => (rest, "/"),
    };
    let target = read_target(path).map_err(|_| wrong())?;
    let base = format!("{scheme}://{authority}");
    read_base(&base, &how)?;
    Ok((base, target))
}
