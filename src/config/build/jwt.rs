//! `[jwt]`: the keys that check callers' tokens, and the claims that tokens must have.
//!
//! Invariants: keys come from one source, and each configured algorithm fits them, so that a public key is never used as a
//! secret. Issuer and audience are always named. Keys are not fetched over plain http unless the configuration allows it.

use std::net::IpAddr;
use std::sync::Arc;

use rustls::pki_types::SubjectPublicKeyInfoDer;
use rustls::pki_types::pem::PemObject as _;

use super::replay_auth::read_server;
use super::sinks::is_private;
use super::{Builder, Duration, Route, Routes, SECOND, Setting, Spanned, file, value_or};
use crate::gateway::tokens::{KeySource, Remote, Settings};
use crate::gateway::upstream;
use crate::scope::Source;
use crate::scope::jwt::{Algorithm, Key, Keys, Rules};

/// The largest leeway. Clocks that differ by more must be corrected.
const LEEWAY_MAX: Duration = Duration::from_secs(300);

const SOURCES: &str = "jwks_url, jwks_file, key_file and secret_file";

impl Builder<'_> {
    pub(super) fn jwt(&self, raw: Option<&file::Jwt>, routes: &Routes) -> Option<Settings> {
        let used = |route: &Arc<Route>| matches!(route.scope.tenant, Source::JwtClaim(_));
        let Some(raw) = raw else {
            if let Some(route) = routes.iter().find(|route| used(route)) {
                let wrong = format!(
                    "is missing; the tenant of {} is read from a token, and this says which tokens are good",
                    route.operation
                );
                self.diagnostics.mistake(&super::Location::absent("jwt"), wrong);
            }
            return None;
        };
        for time in [&raw.refresh, &raw.cooldown, &raw.timeout] {
            self.above_zero(time);
        }
        let rules = self.rules(raw);
        let source = self.key_source(raw, &rules.algorithms)?;
        Some(Settings { rules, source })
    }

    fn rules(&self, raw: &file::Jwt) -> Rules {
        let named = |field: &Setting<String>| field.as_ref().map(|spanned| spanned.value.clone());
        let issuer = self.required(raw.issuer.as_ref(), &raw.location, "issuer");
        if let Some(empty) = issuer.filter(|issuer| issuer.value.is_empty()) {
            self.diagnostics.mistake(&empty.location, "is empty");
        }
        self.required(raw.audience.as_ref(), &raw.location, "audience");
        let audiences = self.each(&raw.audience, |text| {
            let empty = || "is empty".to_owned();
            (!text.is_empty()).then(|| text.to_owned()).ok_or_else(empty)
        });
        self.required(raw.algorithms.as_ref(), &raw.location, "algorithms");
        let algorithms = self.each(&raw.algorithms, read_algorithm);
        for list in [&raw.audience, &raw.algorithms].into_iter().flatten() {
            if list.value.is_empty() {
                self.diagnostics.mistake(&list.location, "is empty, so no token would be valid");
            }
        }
        let leeway = value_or(&raw.leeway, 30 * SECOND);
        if let Some(spanned) = raw.leeway.as_ref().filter(|spanned| spanned.value > LEEWAY_MAX) {
            self.diagnostics.mistake(
                &spanned.location,
                "must be at most \"5m\": a token is good so much longer",
            );
        }
        Rules { algorithms, issuer: named(&raw.issuer).unwrap_or_default(), audiences, leeway }
    }

    fn key_source(&self, raw: &file::Jwt, algorithms: &[Algorithm]) -> Option<KeySource> {
        let named = [&raw.jwks_url, &raw.jwks_file, &raw.key_file, &raw.secret_file];
        let named: Vec<&Spanned<String>> = named.into_iter().flatten().collect();
        let [one] = named.as_slice() else {
            let wrong =
                format!("name exactly one of {SOURCES}: the keys that tokens are signed with");
            self.diagnostics.mistake(&raw.location, wrong);
            return None;
        };
        if raw.jwks_url.is_some() {
            return self.remote(raw, one).map(|remote| KeySource::Url(Box::new(remote)));
        }
        let bytes = self.key_bytes(one)?;
        let keys = if raw.jwks_file.is_some() {
            Keys::read(&bytes).and_then(|(keys, left_out)| {
                if keys.count() == 0 {
                    let why = left_out.first().map_or("it is empty", String::as_str);
                    return Err(format!("holds no key that can be used: {why}"));
                }
                left_out.iter().for_each(|text| self.diagnostics.warning(&one.location, text));
                Ok(keys)
            })
        } else if raw.key_file.is_some() {
            read_public(&bytes)
        } else {
            read_secret(&bytes, algorithms)
        };
        let keys = keys.map_err(|wrong| self.diagnostics.mistake(&one.location, wrong)).ok()?;
        for spanned in raw.algorithms.iter().flat_map(|list| &list.value) {
            let algorithm = Algorithm::parse(&spanned.value);
            if algorithm.is_some_and(|algorithm| !keys.fit(&[algorithm])) {
                let wrong = format!("{} does not fit the key in {}", spanned.value, one.value);
                self.diagnostics.mistake(&spanned.location, wrong);
            }
        }
        Some(KeySource::Fixed(keys))
    }

    fn remote(&self, raw: &file::Jwt, url: &Spanned<String>) -> Option<Remote> {
        let allow_http = value_or(&raw.allow_http, false);
        let read = |text: &str| {
            let (base, target) = read_server(text, "/.well-known/jwks.json")?;
            let url: http::Uri = base.parse().map_err(|_| format!("{base:?} is not a URL"))?;
            if url.scheme_str() == Some("http") && !allow_http && !is_near(&url) {
                return Err(
                    "over plain http anybody on the way can change the keys; use https, or set \
                            allow_http = true"
                        .to_owned(),
                );
            }
            Ok((url, target))
        };
        let (url, target) = self.checked(url, read)?;
        for spanned in raw.algorithms.iter().flat_map(|list| &list.value) {
            if spanned.value.starts_with("HS") {
                let wrong = "needs a secret, and secrets are not fetched; use secret_file";
                self.diagnostics.mistake(&spanned.location, wrong);
            }
        }
        let timeout = value_or(&raw.timeout, 5 * SECOND);
        let server = upstream::Settings {
            connect_timeout: timeout,
            answer_idle_timeout: Some(timeout),
            ca_file: raw.ca_file.as_ref().map(|spanned| self.readable(spanned)),
            ..upstream::Settings::at(url)
        };
        let refresh = value_or(&raw.refresh, 600 * SECOND);
        let cooldown = value_or(&raw.cooldown, 10 * SECOND);
        Some(Remote { server, target, timeout, refresh, cooldown })
    }
}

/// This machine, or a private address that is written out.
fn is_near(url: &http::Uri) -> bool {
    let host = url.host().unwrap_or_default().trim_matches(['[', ']']);
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(is_private)
}

fn read_algorithm(text: &str) -> Result<Algorithm, String> {
    let known = || {
        let names: Vec<&str> = Algorithm::ALL.into_iter().map(Algorithm::as_str).collect();
        if text.eq_ignore_ascii_case("none") {
            return "a token without a signature proves nothing".to_owned();
        }
        format!("{text:?} is not known here; known are {}", names.join(", "))
    };
    Algorithm::parse(text).ok_or_else(known)
}

fn read_public(bytes: &[u8]) -> Result<Keys, String> {
    let wrong = || {
        "holds no public key of RSA (2048 bits or more), P-256, P-384 or Ed25519 as PEM, `-----BEGIN PUBLIC KEY-----`; of a \
         certificate it is made by `openssl x509 -pubkey -noout -in FILE`"
            .to_owned()
    };
    let der = SubjectPublicKeyInfoDer::from_pem_slice(bytes).map_err(|_| wrong())?;
    Key::public(&der).map(Keys::one).ok_or_else(wrong)
}

/// The bytes of the file without one end of line. A key in PEM is refused: its public half is known.
fn read_secret(bytes: &[u8], algorithms: &[Algorithm]) -> Result<Keys, String> {
    let secret = bytes.strip_suffix(b"\n").unwrap_or(bytes);
    let secret = secret.strip_suffix(b"\r").unwrap_or(secret);
    if secret.windows(11).any(|text| text == b"-----BEGIN ") {
        return Err("holds a key in PEM, which is not a shared secret; use key_file".to_owned());
    }
    let keys = Keys::one(Key::secret(secret));
    let hmac = algorithms.iter().any(|algorithm| algorithm.as_str().starts_with("HS"));
    if hmac && !keys.fit(algorithms) {
        let wrong = format!(
            "has {} bytes, too few: HS256 needs 32, HS384 48, HS512 64 (RFC 7518, 3.2)",
            secret.len()
        );
        return Err(wrong);
    }
    Ok(keys)
}
