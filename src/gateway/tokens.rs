//! The keys that callers' tokens are checked with, and the check itself.
//!
//! Keys come from a file, read at the start, or from a URL (a JWK set). Those of a URL are fetched at the start, again
//! every `refresh`, and when a token names a key that is not known: at most every `cooldown`, whoever asks, and by one
//! request at a time, which is not cut off when whoever asked hangs up. A set replaces the one before, also where no key of
//! it can be used: that is how the last key is revoked. While the URL is away, or answers no set, the keys that were there
//! stay; before there was any set, tokens cannot be checked, and nobody gets further. What a set may be is bounded in time
//! and size, and redirects are not followed.
//!
//! What must stay true: whether a token is good is decided by keys alone that the configuration names.
//!
//! Nothing is kept here. A process that dies fetches again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::{ACCEPT, ACCEPT_ENCODING, USER_AGENT};
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Request, StatusCode, Uri};
use http_body_util::Full;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::evidence::{Evidence, receive};
use super::upstream::{self, Upstream};
use crate::backoff::jittered;
use crate::clock;
use crate::net;
use crate::scope::jwt::{self, Claims, Keys, Rules, TokenError};
use crate::scope::{self, Refusal};
use crate::tasks;
use crate::telemetry::causes;

/// Largest JWK set, in bytes.
const SET_MAX: usize = 256 * 1024;
/// How often keys are asked for while there are none yet.
const FIRST_EVERY: Duration = Duration::from_secs(1);

/// How tokens are checked.
#[derive(Clone, Debug)]
pub struct Settings {
    /// What is expected of them.
    pub rules: Rules,
    /// Where the keys come from.
    pub source: KeySource,
}

/// Where keys come from.
#[derive(Clone, Debug)]
pub enum KeySource {
    /// They were read with the configuration.
    Fixed(Keys),
    /// A JWK set that is fetched.
    Url(Box<Remote>),
}

/// A JWK set that is fetched.
#[derive(Clone, Debug)]
pub struct Remote {
    /// The server.
    pub server: upstream::Settings,
    /// The set's path.
    pub target: PathAndQuery,
    /// For one fetch.
    pub timeout: Duration,
    /// How often it is fetched anyway.
    pub refresh: Duration,
    /// How often, at most, because of a key that is not known.
    pub cooldown: Duration,
}

/// Checks tokens.
pub struct Tokens {
    rules: Arc<Rules>,
    source: Source,
}

enum Source {
    Fixed(Keys),
    Url(Arc<Fetched>),
}

struct Fetched {
    settings: Remote,
    server: Upstream,
    state: Mutex<State>,
    /// Held during a fetch.
    fetch_lock: Arc<tokio::sync::Mutex<()>>,
    fetches: TaskTracker,
}

#[derive(Clone, Default)]
struct State {
    /// Of the last set that came; there may be none in it.
    keys: Option<Arc<Keys>>,
    /// When it was last tried.
    tried: Option<Instant>,
    /// Whether the last try brought nothing.
    failed: bool,
}

impl Tokens {
    /// From settings.
    ///
    /// # Errors
    /// The server's URL or its certificates cannot be used.
    pub fn new(settings: Settings) -> Result<Self, String> {
        let source = match settings.source {
            KeySource::Fixed(keys) => Source::Fixed(keys),
            KeySource::Url(remote) => Source::Url(Arc::new(Fetched {
                server: Upstream::new(remote.server.clone())?,
                settings: *remote,
                state: Mutex::default(),
                fetch_lock: Arc::default(),
                fetches: TaskTracker::new(),
            })),
        };
        Ok(Self { rules: Arc::new(settings.rules), source })
    }

    /// Checks the request's token.
    pub(super) async fn check(&self, headers: &HeaderMap) -> Result<Claims, Refusal> {
        const UNKNOWN: Refusal = Refusal::TokenInvalid("names a key that is not known");
        let text = scope::bearer(headers).map_err(Refusal::TokenInvalid)?;
        let text = text.ok_or(Refusal::TokenMissing)?;
        let verify = |keys: &Keys| jwt::verify(text, keys, &self.rules, clock::since_1970());
        let fetched = match &self.source {
            Source::Fixed(keys) => return verify(keys).map_err(|fault| refusal(fault, UNKNOWN)),
            Source::Url(fetched) => fetched,
        };
        let mut state = fetched.state();
        if state.keys.is_none() {
            state = fetched.fetch_if_due(&self.rules).await;
        }
        let keys = state.keys.ok_or(Refusal::TokenUnverified)?;
        match verify(&keys) {
            Err(TokenError::KeyUnknown) => {}
            checked @ (Ok(_) | Err(TokenError::Invalid(_))) => {
                return checked.map_err(|fault| refusal(fault, UNKNOWN));
            }
        }
        // Keys are exchanged now and then; and anybody can name one that never was.
        let state = fetched.fetch_if_due(&self.rules).await;
        let unknown = if state.failed { Refusal::TokenUnverified } else { UNKNOWN };
        let keys = state.keys.ok_or(Refusal::TokenUnverified)?;
        verify(&keys).map_err(|fault| refusal(fault, unknown))
    }

    /// Fetches the keys at the start and every now and then, until `stop`.
    pub(super) fn are_fetched(&self) -> bool {
        matches!(self.source, Source::Url(_))
    }

    /// Keeps them fresh, until `stop`.
    pub(super) async fn keep(&self, stop: &CancellationToken) {
        let Source::Url(fetched) = &self.source else { return };
        loop {
            let state = fetched.fetch_if_older(Duration::ZERO, &self.rules);
            let Some(state) = stop.run_until_cancelled(state).await else { return };
            match state.failed {
                true => tasks::failed(&"the keys cannot be fetched: the log says why"),
                false => tasks::ran(),
            }
            let pause = match (&state.keys, state.failed) {
                (None, _) => FIRST_EVERY,
                (Some(_), true) => fetched.settings.cooldown.max(FIRST_EVERY),
                (Some(_), false) => fetched.settings.refresh,
            };
            let pausing = tokio::time::sleep(jittered(pause));
            if stop.run_until_cancelled(pausing).await.is_none() {
                return;
            }
        }
    }
}

fn refusal(error: TokenError, unknown: Refusal) -> Refusal {
    match error {
        TokenError::Invalid(why) => Refusal::TokenInvalid(why),
        TokenError::KeyUnknown => unknown,
    }
}

impl Fetched {
    fn state(&self) -> State {
        self.state.lock().clone()
    }

    /// Fetches, unless it was tried a moment ago; what is known then.
    async fn fetch_if_due(self: &Arc<Self>, rules: &Arc<Rules>) -> State {
        let known = self.state().keys.is_some();
        let age = if known { self.settings.cooldown } else { FIRST_EVERY };
        self.fetch_if_older(age, rules).await
    }

    async fn fetch_if_older(self: &Arc<Self>, age: Duration, rules: &Arc<Rules>) -> State {
        let asked = Instant::now();
        let fetch_lock = Arc::clone(&self.fetch_lock).lock_owned().await;
        // Whoever waited for the lock has what the one before brought.
        let fresh = |tried: Instant| tried >= asked || tried.elapsed() < age;
        if self.state().tried.is_some_and(fresh) {
            return self.state();
        }
        let (fetched, rules) = (Arc::clone(self), Arc::clone(rules));
        // In a task of its own: else whoever names a key that never was and hangs up would use up the fetch of those who
        // name a new one.
        let fetching = self.fetches.spawn(async move {
            let _lock = fetch_lock;
            fetched.fetch_now(&rules).await;
        });
        // A panic leaves what was known.
        drop(fetching.await);
        self.state()
    }

    async fn fetch_now(&self, rules: &Rules) {
        self.state.lock().tried = Some(Instant::now());
        let fetch = tokio::time::timeout(self.settings.timeout, self.fetch(rules));
        let fetched = fetch.await.unwrap_or_else(|_| Err("no answer in time".to_owned()));
        let mut state = self.state.lock();
        state.tried = Some(Instant::now());
        state.failed = fetched.is_err();
        match fetched {
            Ok(keys) => state.keys = Some(Arc::new(keys)),
            Err(why) => {
                let server = self.server.authority().to_str().unwrap_or_default();
                let known = state.keys.as_ref().map_or(0, |keys| keys.count());
                tracing::warn!(server, %why, known, "the keys for tokens cannot be fetched");
            }
        }
    }

    async fn fetch(&self, rules: &Rules) -> Result<Keys, String> {
        let mut request = Request::new(Full::<Bytes>::default());
        *request.uri_mut() = Uri::from(self.settings.target.clone());
        let headers = request.headers_mut();
        headers.insert(ACCEPT, HeaderValue::from_static("application/json"));
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        headers.insert(USER_AGENT, HeaderValue::from_static(net::AGENT));
        let connection = self.server.dial().await.map_err(|error| causes(&error))?;
        // It reads only, so it may go out under any lease.
        let answer = connection.send(request, || true).await.map_err(|error| causes(&error))?;
        let (head, body) = match receive(answer, SET_MAX).await {
            Evidence::Answered { head, body, .. } => (head, body),
            Evidence::Large { .. } => return Err("the set is too large".to_owned()),
            Evidence::Failed(_) => return Err("the answer broke off".to_owned()),
        };
        if head.status != StatusCode::OK {
            return Err(format!("the answer is {}", head.status));
        }
        let (keys, left_out) = Keys::read(&body).map_err(|why| format!("the answer {why}"))?;
        if !left_out.is_empty() {
            let left_out = left_out.join("; ");
            tracing::info!(%left_out, "some keys for tokens are left out");
        }
        if !keys.fit(&rules.algorithms) {
            let server = self.server.authority().to_str().unwrap_or_default();
            let keys = keys.count();
            tracing::warn!(server, keys, "no key for tokens is of use here: no token is good");
        }
        Ok(keys)
    }
}
