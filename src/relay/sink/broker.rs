//! What message brokers share as targets: log-in, TLS, one connection for all deliveries, and event values as text that is
//! safe in headers.
//!
//! Invariants:
//!
//! - Nothing connects in the background. A delivery that needs a connection makes it, so that a broker that is away causes no
//!   loop of connections.
//! - Deliveries that wait while another one connects share its result: a broker that is away is dialled once for all of them.
//! - A connection that failed, or on which an answer is missing, gets no further delivery. The deliveries in flight on it
//!   still
//!   end with its answers.
//! - Passwords and tokens appear in no log, no error and no Debug output.
//!
//! No address is refused here. A webhook goes to another organisation; a broker belongs to the operator's own installation and
//! nearly always has a private address.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use tokio::sync::Mutex;

/// The content type of a message.
pub(super) const CONTENT_TYPE: &str = "application/json";

/// Longest time for a name, TCP, TLS and the log-in of one server.
pub(super) const CONNECT_MAX: Duration = Duration::from_secs(5);

/// The error of deliveries that waited for a connection that was given up.
const SILENT: &str = "connecting: the broker did not answer in time";

/// The bytes that a header value encodes: all but visible ASCII, and those that would make the encoding ambiguous. The rule of
/// the CloudEvents HTTP binding.
const HEADER: &AsciiSet = &CONTROLS.add(b' ').add(b'"').add(b'%');

/// The log-in.
#[derive(Clone, Default, PartialEq, Eq)]
pub enum Login {
    /// None: the broker asks for no log-in.
    #[default]
    Nobody,
    /// A token.
    Secret(String),
    /// A user and a password.
    User {
        /// Its name.
        name: String,
        /// Its password.
        password: String,
    },
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nobody => "nobody",
            Self::Secret(_) => "(secret)",
            Self::User { .. } => "user (secret)",
        })
    }
}

/// The settings of TLS.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tls {
    /// The only certificates to trust. `None`: the system's.
    pub ca_file: Option<PathBuf>,
    /// The certificate and the key of this client.
    pub client: Option<(PathBuf, PathBuf)>,
}

/// A value of an event as text for a header: one line of visible ASCII.
pub(super) fn header(value: &str) -> String {
    utf8_percent_encode(value, HEADER).to_string()
}

/// A connection that is shared.
pub(super) struct Line<C> {
    pub(super) connection: C,
    retired: AtomicBool,
}

impl<C> Line<C> {
    /// From now on this connection gets no further delivery.
    pub(super) fn retire(&self) {
        self.retired.store(true, Ordering::Relaxed);
    }
}

/// The place of the shared connection.
pub(super) struct Shared<C> {
    state: Mutex<State<C>>,
    /// How often connecting has failed.
    failures: AtomicU64,
}

struct State<C> {
    current: Option<Arc<Line<C>>>,
    /// Why connecting failed last.
    why: String,
}

impl<C> Shared<C> {
    pub(super) fn new() -> Self {
        let state = State { current: None, why: String::new() };
        Self { state: Mutex::new(state), failures: AtomicU64::new(0) }
    }

    /// The connection. `connect` makes one if there is none that is `alive`. Dropping the future cancels the connecting
    /// for all deliveries that wait for it.
    pub(super) async fn line(
        &self,
        alive: impl Fn(&C) -> bool,
        connect: impl Future<Output = Result<C, String>>,
    ) -> Result<Arc<Line<C>>, String> {
        let seen = self.failures.load(Ordering::Relaxed);
        let mut state = self.state.lock().await;
        let fit =
            |line: &&Arc<Line<C>>| !line.retired.load(Ordering::Relaxed) && alive(&line.connection);
        if let Some(line) = state.current.as_ref().filter(fit) {
            return Ok(Arc::clone(line));
        }
        state.current = None;
        if self.failures.load(Ordering::Relaxed) != seen {
            return Err(state.why.clone());
        }
        SILENT.clone_into(&mut state.why);
        // Also if the deadline of this delivery ends it: the waiting deliveries must not dial one after the other then.
        let failing = Failing(&self.failures);
        match connect.await {
            Ok(connection) => {
                std::mem::forget(failing);
                let line = Arc::new(Line { connection, retired: AtomicBool::new(false) });
                state.current = Some(Arc::clone(&line));
                Ok(line)
            }
            Err(why) => {
                state.why.clone_from(&why);
                Err(why)
            }
        }
    }
}

/// Counts as a failure when it is dropped.
struct Failing<'f>(&'f AtomicU64);

impl Drop for Failing<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_of_an_event_is_one_line_of_visible_ascii_that_can_be_read_back() {
        for value in ["order.created", "a b", "50%", "\"q\"", "Zoë\r\nNats-Msg-Id: 1", "\u{0}\t"] {
            let text = header(value);
            assert!(text.bytes().all(|byte| byte.is_ascii_graphic()), "{text}");
            let back = percent_encoding::percent_decode_str(&text).decode_utf8().unwrap();
            assert_eq!(back, value);
        }
        assert_eq!(header("orders.create"), "orders.create");
    }

    #[tokio::test]
    async fn a_broker_that_is_away_is_dialled_once_for_all_who_wait() {
        let (shared, dials) = (Shared::<u32>::new(), AtomicU64::new(0));
        let away = || async {
            dials.fetch_add(1, Ordering::Relaxed);
            tokio::task::yield_now().await;
            Err("away".to_owned())
        };
        let all: Vec<_> = (0..16).map(|_| shared.line(|_| true, away())).collect();
        for end in futures_util::future::join_all(all).await {
            assert_eq!(end.err().as_deref(), Some("away"));
        }
        assert_eq!(dials.load(Ordering::Relaxed), 1);
        assert!(shared.line(|_| true, async { Ok(1) }).await.is_ok(), "the next one dials again");
    }

    #[tokio::test]
    async fn a_connection_is_shared_until_it_is_retired_or_dead() {
        let shared = Shared::new();
        let first = shared.line(|_| true, async { Ok(1) }).await.unwrap();
        let same = shared.line(|_| true, async { Ok(2) }).await.unwrap();
        assert_eq!(same.connection, 1);
        first.retire();
        assert_eq!(shared.line(|_| true, async { Ok(3) }).await.unwrap().connection, 3);
        assert_eq!(shared.line(|at| *at != 3, async { Ok(4) }).await.unwrap().connection, 4);
    }

    #[test]
    fn a_log_in_shows_no_secret() {
        let login = Login::User { name: "n".into(), password: "geheim".into() };
        let shown = format!("{login:?} {:?}", Login::Secret("geheim".into()));
        assert!(!shown.contains("geheim"), "{shown}");
    }
}
