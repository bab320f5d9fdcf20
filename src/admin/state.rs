//! What the handlers of the admin listener share: the store, the metrics, whether the process is ready, and the token.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use ring::hmac;

use super::resolve::Announce;
use crate::explain::Explain;
use crate::store::Store;
use crate::telemetry::Metrics;

/// The state of the admin listener.
#[derive(Clone)]
pub struct State {
    /// Where records and events are read.
    pub store: Arc<dyn Store>,
    /// What `/metrics` shows.
    pub metrics: Arc<Metrics>,
    /// Whether this process accepts requests.
    pub ready: Readiness,
    /// The token that a client must send; `None` only on a loopback address.
    pub token: Option<Token>,
    /// The program's version.
    pub version: &'static str,
    /// The operations that the configuration names.
    pub operations: Arc<[String]>,
    /// The sinks that the configuration names.
    pub sinks: Arc<[String]>,
    /// Explains requests; `None` in a process without a gateway.
    pub explain: Option<Arc<dyn Explain>>,
    /// Who says what a completion by hand announces.
    pub announce: Arc<dyn Announce>,
}

/// The phase of the process between its start and its end. All clones share one value.
#[derive(Clone, Debug, Default)]
pub struct Readiness(Arc<AtomicU8>);

impl Readiness {
    const STARTING: u8 = 0;
    const SERVING: u8 = 1;
    const DRAINING: u8 = 2;

    /// From now on requests are accepted. Has no effect while the process drains.
    pub fn serving(&self) {
        // Err: the process already serves, or drains. Draining is final.
        self.0
            .compare_exchange(Self::STARTING, Self::SERVING, Ordering::Relaxed, Ordering::Relaxed)
            .ok();
    }

    /// From now on no new request is accepted. This is final.
    pub fn draining(&self) {
        self.0.store(Self::DRAINING, Ordering::Relaxed);
    }

    pub(super) fn is_serving(&self) -> bool {
        self.0.load(Ordering::Relaxed) == Self::SERVING
    }

    pub(super) fn as_str(&self) -> &'static str {
        match self.0.load(Ordering::Relaxed) {
            Self::STARTING => "starting",
            Self::SERVING => "serving",
            _ => "draining",
        }
    }
}

/// The bearer token. It is stored as a keyed hash, so that it is never shown and never compared byte by byte.
#[derive(Clone)]
pub struct Token(hmac::Key, hmac::Tag);

impl Token {
    /// Makes a token. `None` if it is empty or no header can hold it.
    #[must_use]
    pub fn new(secret: &str) -> Option<Self> {
        let fits = !secret.is_empty() && secret.bytes().all(|b| b.is_ascii_graphic());
        let key = hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes());
        let tag = hmac::sign(&key, secret.as_bytes());
        fits.then_some(Self(key, tag))
    }

    /// Whether this is the token. The time it takes does not depend on how much of it is right.
    pub(super) fn is(&self, sent: &[u8]) -> bool {
        hmac::verify(&self.0, sent, self.1.as_ref()).is_ok()
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}
