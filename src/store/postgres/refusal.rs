//! Which failures of reaching a database no time mends: somebody has to change something.
//!
//! What must stay true: what is not known to last is taken for passing. A server that starts, recovers or is full, a name that
//! does not resolve yet, a pooler without a server (08P01) and a standby in the middle of a fail-over all come right by
//! themselves.

use std::error::Error as _;
use std::{fmt, io};

use tokio_postgres::error::SqlState;

use crate::store::Cause;
use crate::telemetry::causes;

/// Why none of several hosts gave a connection.
#[derive(Debug)]
pub(super) struct NoHost {
    /// What each said.
    text: String,
    /// Whether all of them refused for good.
    lasts: bool,
}

impl NoHost {
    /// Of each host's place and failure.
    pub(super) fn new(failures: &[(String, Cause)]) -> Self {
        let text = failures.iter().map(|(place, cause)| format!("{place}: {}", causes(&**cause)));
        let lasts = !failures.is_empty() && failures.iter().all(|(_, cause)| lasts(cause));
        Self { text: text.collect::<Vec<_>>().join("; "), lasts }
    }
}

impl fmt::Display for NoHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for NoHost {}

/// Whether a failure to connect, or of a statement at the start, stays until somebody changes something.
pub(super) fn lasts(cause: &Cause) -> bool {
    if let Some(none) = cause.downcast_ref::<NoHost>() {
        return none.lasts;
    }
    let Some(error) = cause.downcast_ref::<tokio_postgres::Error>() else { return false };
    match error.code() {
        Some(code) => code_lasts(code),
        None => is_a_mistake(error),
    }
}

/// By the server's own code.
fn code_lasts(code: &SqlState) -> bool {
    // Not supported; a value that cannot be; who asks; the role; no such database; no such schema; no right, and no such thing.
    let class = code.code().get(..2).unwrap_or_default();
    matches!(class, "0A" | "0P" | "22" | "28" | "3D" | "3F" | "42")
}

/// Whether the driver refuses what it was text, or the server's way to prove oneself or to encrypt. It says so in words only:
/// the tests of `wait` see them, lest a newer driver words them in another way.
fn is_a_mistake(error: &tokio_postgres::Error) -> bool {
    match error.to_string().as_str() {
        "invalid configuration" | "authentication error" => true,
        "error performing TLS handshake" => error.source().is_some_and(|cause| {
            cause.to_string() == "server does not support TLS" || is_a_bad_certificate(cause)
        }),
        _ => false,
    }
}

/// One that is not trusted, or of somebody else. A handshake that just broke off passes.
fn is_a_bad_certificate(cause: &(dyn std::error::Error + 'static)) -> bool {
    let inner = cause.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
    let error = inner.and_then(|inner| inner.downcast_ref::<rustls::Error>());
    matches!(error, Some(rustls::Error::InvalidCertificate(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_somebody_has_to_change_lasts_and_all_else_passes() {
        let lasting = ["28P01", "28000", "3D000", "3F000", "42501", "42P01", "0A000", "22023"];
        // The server starts, stops, recovers, is full, reads only; a pooler has no server; nothing is known of it.
        let passing = [
            "57P03", "57P01", "57P02", "57014", "53300", "53100", "53200", "25006", "08P01",
            "08006", "08001", "55P03", "40001", "58030", "XX000", "ZZ999",
        ];
        let lasts = |codes: &[&str]| -> Vec<_> {
            codes.iter().map(|code| code_lasts(&SqlState::from_code(code))).collect()
        };
        assert_eq!(lasts(&lasting), [true; 8]);
        assert_eq!(lasts(&passing), [false; 16]);
    }

    #[test]
    fn of_several_hosts_one_that_may_come_back_is_worth_the_wait() {
        let host = |lasts| {
            let cause: Cause = NoHost { text: "no".to_owned(), lasts }.into();
            ("h".to_owned(), cause)
        };
        assert!(NoHost::new(&[host(true), host(true)]).lasts);
        assert!(!NoHost::new(&[host(true), host(false)]).lasts);
        assert_eq!(NoHost::new(&[host(true), host(false)]).to_string(), "h: no; h: no");
        assert!(!lasts(&"connecting took too long".into()));
    }
}
