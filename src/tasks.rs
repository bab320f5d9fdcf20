//! Starts and supervises the background tasks of this process.
//!
//! Invariants:
//!
//! - No task dies silently. An unexpected end (a panic or a return) is logged and counted, and the process is not ready until
//!   the task runs again.
//! - A [`Loop`] keeps its state elsewhere, for example in the store. After an unexpected end it is started again, with a
//!   growing
//!   pause. A [`Vital`] task holds state that is lost with it. Its unexpected end stops the process, after the drain and with
//!   its own exit status, so that the process is replaced.
//! - The two tables here and `docs/architecture.md` say which task is which; a test compares them.
//! - Every task or thread is started here, or by a set that is awaited. A [`short`] task ends by itself, for example with its
//!   connection. Its panic is logged and counted, and affects no other task.
//!
//! A process has one registry of tasks.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use futures_util::FutureExt as _;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::backoff::Backoff;
use crate::telemetry;

/// Pauses before a loop is started again. After it has run for [`STEADY`], they begin with the first again.
const PAUSES: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(30));
const STEADY: Duration = Duration::from_secs(60);

/// Longest error that is shown, in characters.
const ERROR_MAX: usize = 500;

macro_rules! table {
    ($(#[$doc:meta])* $kind:ident { $($variant:ident = $name:literal, $what:literal;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $kind {
            $(#[doc = $what] $variant,)*
        }

        impl $kind {
            /// Each, with its name and with what it does.
            pub const TABLE: &'static [(Self, &'static str, &'static str)] = &[$((Self::$variant, $name, $what),)*];

            const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }
    };
}

table! {
    /// Tasks that are started again. They keep their state in the store, or where the next run finds it.
    Loop {
        Lease = "lease", "renews this process's lease";
        Relay = "relay", "starts the loops of the sinks, and wakes them";
        Sink = "sink", "claims the events of one sink, delivers them and writes the verdicts";
        SinkStates = "sink-states", "reads which sinks are paused";
        Sweeper = "sweeper", "deletes what is over, marks what dead owners left, counts";
        OperatorActs = "operator-acts", "reads what operators did, and forgets the answers of those records";
        OwnRecords = "own-records", "looks after this process's records where the database went back, or nobody works on them";
        Questions = "questions", "asks the API about unknown records";
        TokenKeys = "token-keys", "fetches the keys that tokens are checked with";
        AdminListener = "admin-listener", "accepts connections of operators and probes";
    }
}

table! {
    /// Tasks and threads that end the process when they end.
    Vital {
        Listener = "listener", "accepts connections of callers";
        Reservations = "reservations", "writes reservations in batches";
        Completions = "completions", "writes outcomes in batches";
        StoreThread = "store-thread", "works on the store's connections";
        SpillWriter = "spill-writer", "writes outcomes that the database does not take to the spill";
    }
}

/// The state of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It runs.
    Running,
    /// It ended, and is started again after a pause.
    Pausing,
    /// It ended, and the process ends.
    Ended,
}

impl State {
    /// The name of the state.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Pausing => "pausing",
            Self::Ended => "ended",
        }
    }
}

/// A task as an operator sees it.
#[derive(Clone, Debug)]
pub struct Shown {
    /// The task's name.
    pub name: &'static str,
    /// Its instance: the name of the sink.
    pub of: String,
    /// Its state.
    pub state: State,
    /// Completed rounds; 0 if it has no rounds.
    pub runs: u64,
    /// The time since the last round ended.
    pub last_run: Option<Duration>,
    /// The last error, and how long ago it happened.
    pub last_error: Option<(String, Duration)>,
    /// How often it ended although nothing stopped it.
    pub ends: u64,
}

/// What is known of one task.
#[derive(Debug)]
struct Status {
    name: &'static str,
    of: String,
    runs: AtomicU64,
    seen: Mutex<Seen>,
}

#[derive(Debug)]
struct Seen {
    state: State,
    ends: u64,
    run: Option<Instant>,
    error: Option<(String, Instant)>,
}

/// All tasks of this process.
static REGISTRY: Mutex<Vec<Arc<Status>>> = Mutex::new(Vec::new());

/// The first vital task that ended.
static FATAL: LazyLock<watch::Sender<Option<&'static str>>> =
    LazyLock::new(|| watch::Sender::new(None));

tokio::task_local! {
    /// Of the loop that is running.
    static STATUS: Arc<Status>;
}

/// Keeps a task in the registry until it is dropped.
struct Registered(Arc<Status>);

impl Registered {
    fn new(name: &'static str, of: String) -> Self {
        let seen = Seen { state: State::Running, ends: 0, run: None, error: None };
        let (runs, seen) = (AtomicU64::new(0), Mutex::new(seen));
        let status = Arc::new(Status { name, of, runs, seen });
        REGISTRY.lock().push(Arc::clone(&status));
        telemetry::task_begun(name);
        Self(status)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        REGISTRY.lock().retain(|status| !Arc::ptr_eq(status, &self.0));
    }
}

impl Status {
    /// Logs and counts an unexpected end.
    fn ended(&self, why: &str, state: State) {
        let (task, of) = (self.name, self.of.as_str());
        match state {
            State::Ended => {
                tracing::error!(task, of, why, "a background task ended: the process ends as well");
            }
            State::Running | State::Pausing => {
                tracing::error!(task, of, why, "a background task ended, and is started again");
            }
        }
        telemetry::task_ended(self.name);
        let mut seen = self.seen.lock();
        seen.state = state;
        seen.ends += 1;
        seen.error = Some((why.to_owned(), Instant::now()));
    }

    fn shown(&self) -> Shown {
        let seen = self.seen.lock();
        Shown {
            name: self.name,
            of: self.of.clone(),
            state: seen.state,
            runs: self.runs.load(Ordering::Relaxed),
            last_run: seen.run.map(|at| at.elapsed()),
            last_error: seen.error.as_ref().map(|(why, at)| (why.clone(), at.elapsed())),
            ends: seen.ends,
        }
    }
}

/// Runs a loop until `stop`, and starts it again if it ends before. Dropping the future drops the loop. `of` is its instance.
pub async fn kept<F: Future<Output = ()>>(
    task: Loop,
    of: impl Into<String>,
    stop: CancellationToken,
    mut begin: impl FnMut() -> F,
) {
    let registered = Registered::new(task.name(), of.into());
    let status = &registered.0;
    let mut pauses = PAUSES;
    loop {
        let begun = Instant::now();
        let running = STATUS.scope(Arc::clone(status), async { begin().await });
        let why = match AssertUnwindSafe(running).catch_unwind().await {
            Ok(()) if stop.is_cancelled() => return,
            Ok(()) => "it returned",
            Err(_) => "it panicked: the line before says where",
        };
        status.ended(why, State::Pausing);
        if begun.elapsed() >= STEADY {
            pauses = PAUSES;
        }
        let pausing = tokio::time::sleep(pauses.pause());
        if stop.run_until_cancelled(pausing).await.is_none() {
            return;
        }
        status.seen.lock().state = State::Running;
        tracing::info!(task = task.name(), of = status.of, "a background task is started again");
    }
}

/// Runs a task that may return only once `stop` says so.
pub async fn vital(task: Vital, stop: CancellationToken, running: impl Future<Output = ()>) {
    let registered = Registered::new(task.name(), String::new());
    let why = match AssertUnwindSafe(running).catch_unwind().await {
        Ok(()) if stop.is_cancelled() => return,
        Ok(()) => "it returned",
        Err(_) => "it panicked: the line before says where",
    };
    end_process(registered, why);
}

/// Starts a task that returns when all senders of its work are dropped.
pub fn worker(
    task: Vital,
    working: impl Future<Output = ()> + Send + 'static,
) -> impl Future<Output = ()> + Send + 'static {
    let registered = Registered::new(task.name(), String::new());
    async move {
        if AssertUnwindSafe(working).catch_unwind().await.is_err() {
            end_process(registered, "it panicked: the line before says where");
        }
    }
}

/// Starts a thread that returns when all senders of its work are dropped. The system shows it as `name`.
///
/// # Errors
/// The system gives no thread.
pub fn thread(task: Vital, name: &str, working: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let registered = Registered::new(task.name(), name.to_owned());
    std::thread::Builder::new().name(name.to_owned()).spawn(move || {
        if std::panic::catch_unwind(AssertUnwindSafe(working)).is_err() {
            end_process(registered, "it panicked: the line before says where");
        }
    })?;
    Ok(())
}

/// The task stays in the registry, so that its end is shown until the process has ended.
fn end_process(registered: Registered, why: &str) {
    registered.0.ended(why, State::Ended);
    FATAL.send_if_modified(|fatal| fatal.replace(registered.0.name).is_none());
    std::mem::forget(registered);
}

/// Starts a task that ends by itself.
pub fn short<T: Send + 'static>(task: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
    tokio::spawn(task)
}

/// Notes that a round of the calling loop has succeeded. Has no effect outside a loop.
pub fn ran() {
    let note = |status: &Arc<Status>| {
        status.runs.fetch_add(1, Ordering::Relaxed);
        status.seen.lock().run = Some(Instant::now());
    };
    // Err: a test runs it outside of a loop.
    STATUS.try_with(note).ok();
}

/// Notes that a round of the calling loop has failed. Has no effect outside a loop.
pub fn failed(error: &dyn fmt::Display) {
    let note = |status: &Arc<Status>| {
        status.runs.fetch_add(1, Ordering::Relaxed);
        let why = error.to_string().chars().take(ERROR_MAX).collect();
        let mut seen = status.seen.lock();
        seen.run = Some(Instant::now());
        seen.error = Some((why, Instant::now()));
    };
    STATUS.try_with(note).ok();
}

/// All tasks of this process, in the order of their names.
#[must_use]
pub fn all() -> Vec<Shown> {
    let shown = REGISTRY.lock().iter().map(|status| status.shown()).collect::<Vec<_>>();
    let by_name = shown.into_iter().map(|task| ((task.name, task.of.clone()), task));
    by_name.collect::<BTreeMap<_, _>>().into_values().collect()
}

/// The name of a task that should run and does not.
#[must_use]
pub fn ailing() -> Option<&'static str> {
    let registry = REGISTRY.lock();
    let ailing = registry.iter().find(|status| status.seen.lock().state != State::Running);
    ailing.map(|status| status.name)
}

/// Waits until a vital task has ended, and names it.
pub async fn fatal() -> &'static str {
    let mut fatal = FATAL.subscribe();
    match fatal.wait_for(Option::is_some).await.map(|name| *name) {
        Ok(Some(name)) => name,
        // The sender is never dropped.
        Ok(None) | Err(_) => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(of: &str) -> Option<Shown> {
        all().into_iter().find(|task| task.of == of)
    }

    /// A task that ends unexpectedly at first, and then runs until it is stopped.
    async fn life(times: usize, losses: &[Option<&'static str>], stop: CancellationToken) {
        match losses.get(times) {
            Some(Some(message)) => panic!("{message}"),
            Some(None) => {}
            None => {
                failed(&"the database is away");
                ran();
                stop.cancelled().await;
            }
        }
    }

    fn begins(
        of: &'static str,
        losses: &'static [Option<&'static str>],
        stop: &CancellationToken,
    ) -> (JoinHandle<()>, Arc<Mutex<Vec<Instant>>>) {
        let begun = Arc::new(Mutex::new(Vec::new()));
        let (noted, stopped) = (Arc::clone(&begun), stop.clone());
        let running = kept(Loop::Sweeper, of, stop.clone(), move || {
            let mut begun = noted.lock();
            begun.push(Instant::now());
            life(begun.len() - 1, losses, stopped.clone())
        });
        (tokio::spawn(running), begun)
    }

    #[tokio::test(start_paused = true)]
    async fn a_loop_that_panics_or_returns_is_begun_anew_with_a_growing_pause() {
        let stop = CancellationToken::new();
        let losses = &[Some("as it was told to"), None, Some("as it was told to"), None];
        let (task, begun) = begins("growing", losses, &stop);
        while shown("growing").is_none_or(|task| task.runs == 0) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let task_shown = shown("growing").unwrap();
        assert_eq!((task_shown.ends, task_shown.state), (4, State::Running));
        assert_eq!(task_shown.last_error.unwrap().0, "the database is away");
        let begun = begun.lock().clone();
        let slack = Duration::from_millis(10);
        for (n, pair) in (0_u32..).zip(begun.windows(2)) {
            let (pause, most) = (pair[1] - pair[0], PAUSES.longest() * 2_u32.pow(n));
            assert!(most / 2 <= pause && pause <= most + slack, "{n}: {pause:?}");
        }
        stop.cancel();
        task.await.unwrap();
        assert!(shown("growing").is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn while_a_loop_is_not_running_the_process_is_ailing() {
        let stop = CancellationToken::new();
        let (task, _) = begins("ailing", &[None], &stop);
        while shown("ailing").is_none_or(|task| task.ends == 0) {
            tokio::task::yield_now().await;
        }
        assert_eq!(shown("ailing").unwrap().state, State::Pausing);
        assert_eq!(shown("ailing").unwrap().last_error.unwrap().0, "it returned");
        assert!(ailing().is_some());
        stop.cancel();
        task.await.unwrap();
    }

    #[test]
    fn the_tables_stand_in_the_docs() {
        let docs = include_str!("../docs/architecture.md");
        let loops = Loop::TABLE.iter().map(|(_, name, what)| (name, what, "started again"));
        let vital = Vital::TABLE.iter().map(|(_, name, what)| (name, what, "the process ends"));
        for (name, what, end) in loops.chain(vital) {
            let row = format!("| `{name}` | {what} | {end} |");
            assert!(docs.contains(&row), "not in docs/architecture.md: {row}");
        }
    }
}
