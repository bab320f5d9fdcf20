//! The command line: its arguments, and the code that starts each command.

mod by_hand;
mod check;
pub mod events;
pub mod explain;
mod health;
mod opening;
pub mod print;
pub mod records;
pub mod relay;
pub mod serve;
pub mod sinks;
pub mod start;

use std::ffi::OsStr;
use std::io::Write;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};

use self::print::{Exit, Failure, Out};
use self::start::StartError;
use crate::config::{self, Config};
use crate::demo;
use crate::fault;
use crate::gateway::explain::Explainer;
use crate::gateway::tokens::Tokens;
use crate::record::Answer;
use crate::scope::{DigestKey, Source};
use crate::store::{RecordRow, Store, sqlite};
use crate::tasks;
use crate::telemetry::{causes, log};

/// Makes retries of writes safe: an idempotency gateway in front of any HTTP API.
#[derive(Debug, Parser)]
#[command(name = "oncegate", version = fault::VERSION, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the gateway
    Serve(ServeArgs),
    /// Only deliver events: a relay in its own process; several relays can share one Postgres
    Relay(RelayArgs),
    /// Show how it works: run an API, a webhook consumer and the gateway in one process, and play the acceptance cases
    Demo(demo::DemoArgs),
    /// Check a configuration for mistakes and unsafe settings
    Check(ConfigArgs),
    /// Ask the process on this machine over its admin listener whether it runs, for the health check of a container
    Health(health::HealthArgs),
    /// Show how the gateway reads a request: its route and why, its key, its canonical form and hash
    Explain(ExplainCommand),
    /// Bring the store's schema up to date
    Migrate(ConfigArgs),
    /// List, show and resolve records
    #[command(subcommand_required = true)]
    Records(RecordsArgs),
    /// List, show, redeliver and discard events
    #[command(subcommand_required = true)]
    Events(EventsArgs),
    /// List, pause and resume sinks
    #[command(subcommand_required = true)]
    Sinks(SinksArgs),
}

#[derive(Debug, Args)]
struct ConfigArgs {
    /// The configuration file (TOML)
    #[arg(long, short, value_name = "FILE", env = "ONCEGATE_CONFIG", global = true)]
    config: Option<PathBuf>,
    /// Machine-readable output
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Args)]
struct ServeArgs {
    /// The configuration file (TOML)
    #[arg(long, short, value_name = "FILE", env = "ONCEGATE_CONFIG")]
    config: Option<PathBuf>,
    /// The API to protect, instead of upstream.url
    #[arg(long, value_name = "URL")]
    upstream: Option<String>,
}

#[derive(Debug, Args)]
struct RelayArgs {
    /// The configuration file (TOML), the same as for `serve`
    #[arg(long, short, value_name = "FILE", env = "ONCEGATE_CONFIG")]
    config: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct ExplainCommand {
    #[command(flatten)]
    config: ConfigArgs,
    #[command(flatten)]
    request: explain::ExplainArgs,
}

#[derive(Debug, Args)]
struct RecordsArgs {
    #[command(flatten)]
    config: ConfigArgs,
    #[command(subcommand)]
    command: records::Records,
}

#[derive(Debug, Args)]
struct EventsArgs {
    #[command(flatten)]
    config: ConfigArgs,
    #[command(subcommand)]
    command: events::Events,
}

#[derive(Debug, Args)]
struct SinksArgs {
    #[command(flatten)]
    config: ConfigArgs,
    #[command(subcommand)]
    command: sinks::Sinks,
}

/// How long the process waits at its end for the store's threads to finish their queue and the last checkpoint.
const CLOSE_MAX: Duration = Duration::from_secs(10);

/// Exit status for wrong usage and wrong configuration.
const USAGE: u8 = 2;

/// Exit status if a background task ended that cannot be started again: "internal software error" of `sysexits.h`.
const TASK_ENDED: u8 = 70;

/// The variable for the number of worker threads. Other programs on Tokio use the same name.
const THREADS: &str = "TOKIO_WORKER_THREADS";

/// A larger number is probably a typing error: each thread has its own stack and queues.
const THREADS_MAX: usize = 1024;

/// The default is one thread fewer than processors, because the store has its own thread.
fn threads(asked: Option<&str>, processors: usize) -> Result<usize, String> {
    let Some(asked) = asked else { return Ok(processors.saturating_sub(1).max(1)) };
    let number = asked.parse().ok().filter(|number| (1..=THREADS_MAX).contains(number));
    number.ok_or_else(|| {
        format!(
            "{THREADS}: \"{asked}\" is not a number from 1 to {THREADS_MAX}; change it, or unset it"
        )
    })
}

/// How long the runtime keeps a blocking thread: in effect for ever. If the system gave no new thread when a name must be
/// resolved, Tokio would panic.
const BLOCKING_KEPT: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// The Tokio runtime. Its first blocking thread is started here, see [`BLOCKING_KEPT`].
fn runtime() -> Result<Runtime, Problem> {
    let asked = std::env::var_os(THREADS);
    let asked = asked.as_deref().map(OsStr::to_string_lossy);
    let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
    let threads = threads(asked.as_deref(), processors).map_err(|wrong| (USAGE, wrong))?;
    let mut builder = Builder::new_multi_thread();
    let builder = builder.worker_threads(threads).thread_keep_alive(BLOCKING_KEPT).enable_all();
    let built = builder.build().and_then(|runtime| {
        runtime.block_on(runtime.spawn_blocking(|| ()))?;
        Ok(runtime)
    });
    built.map_err(|error| (1, format!("cannot start the runtime: {error}")))
}

/// Runs what was typed.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Err(wrong) = fault::arm() {
        return fail(USAGE, &wrong);
    }
    let runtime = match runtime() {
        Ok(runtime) => runtime,
        Err((code, why)) => return fail(code, &why),
    };
    let ended = runtime.block_on(run(cli.command));
    // A blocking call that hangs (a name that does not resolve, for example) must not keep the process alive.
    runtime.shutdown_timeout(Duration::from_secs(1));
    // No task holds the store any more. SQLite's log goes into the file, so that the file alone is a complete copy.
    if !sqlite::all_closed(CLOSE_MAX) {
        tracing::warn!(
            "the database was not closed in time: a copy of its file must include the -wal file beside it"
        );
    }
    log::flush();
    // After the log is flushed, so that the last line says why the process ended.
    ended.unwrap_or_else(|(code, why)| fail(code, &why))
}

/// Runs a command to its end. The caller prints the error after everything that was logged.
async fn run(command: Command) -> Result<ExitCode, Problem> {
    Ok(match command {
        Command::Serve(args) => return serve(args).await,
        Command::Relay(args) => return relay_alone(&args).await,
        Command::Demo(args) => demo::run(&args).await,
        Command::Check(args) => check::check(&args).await,
        Command::Health(args) => health::health(&args).await,
        Command::Explain(args) => explain_request(&args).await,
        Command::Migrate(args) => migrate(&args).await,
        Command::Records(args) => {
            with_store(&args.config, async |config, store, out| {
                let announce = |row: &RecordRow, answer: &Answer| {
                    by_hand::announced(&config.routes, row, answer)
                };
                records::run(&args.command, store, &announce, out).await
            })
            .await
        }
        Command::Events(args) => {
            with_store(&args.config, async |config, store, out| {
                events::run(&args.command, store, &names_of(config), out).await
            })
            .await
        }
        Command::Sinks(args) => {
            with_store(&args.config, async |config, store, out| {
                sinks::run(&args.command, store, &names_of(config), out).await
            })
            .await
        }
    })
}

/// The names of the configured sinks.
fn names_of(config: &Config) -> Vec<String> {
    config.relay.sinks.iter().map(|sink| sink.name.clone()).collect()
}

/// Why a command failed: exit status and message.
type Problem = (u8, String);

async fn with_config(
    args: &ConfigArgs,
    command: impl AsyncFnOnce(Config) -> Result<Exit, Problem>,
) -> ExitCode {
    // These commands need the store only. Without a file they use the same default store as `serve`.
    let unused = args.config.is_none().then_some("http://127.0.0.1");
    let config = match load(args.config.as_deref(), unused) {
        Ok((config, _)) => config,
        Err(code) => return code,
    };
    match command(config).await {
        Ok(exit) => ExitCode::from(exit.code()),
        Err((code, message)) => fail(code, &message),
    }
}

/// A command that works on the store.
async fn with_store(
    args: &ConfigArgs,
    command: impl AsyncFnOnce(&Config, &dyn Store, &mut Out<'_>) -> Result<Exit, Failure>,
) -> ExitCode {
    with_config(args, async |config| {
        let store = start::open(&config.store, false).await.map_err(opened)?;
        let mut out = Out { to: &mut std::io::stdout().lock(), json: args.json };
        command(&config, &*store, &mut out).await.map_err(failed)
    })
    .await
}

#[expect(clippy::needless_pass_by_value, reason = "the shape of map_err")]
fn opened(error: crate::store::OpenError) -> Problem {
    (1, causes(&error))
}

#[expect(clippy::needless_pass_by_value, reason = "the shape of map_err")]
fn failed(failure: Failure) -> Problem {
    (failure.code(), causes(&failure))
}

fn load(
    path: Option<&std::path::Path>,
    upstream: Option<&str>,
) -> Result<(Config, Vec<config::Warning>), ExitCode> {
    let (config, mut warnings) =
        Config::load(path, std::env::vars(), upstream).map_err(|mistakes| {
            let lines = mistakes.lines();
            let lines: Vec<_> = lines.iter().map(|line| format!("oncegate: {line}")).collect();
            log::say(&lines.join("\n"));
            ExitCode::from(USAGE)
        })?;
    warnings.extend(config::check::warnings(&config));
    Ok((config, warnings))
}

fn fail(code: u8, message: &str) -> ExitCode {
    log::say(&format!("oncegate: {message}"));
    ExitCode::from(code)
}

/// Prints the ready line. It does not wait for a slow reader of stdout.
fn tell_ready(ready: &serde_json::Value) {
    drop(log::aside(std::io::stdout(), format!("ready {ready}\n")));
}

fn say(line: &str) {
    drop(writeln!(std::io::stdout(), "{line}"));
}

/// The first steps of `serve` and `relay`: listen for signals, load the configuration, start the log.
fn begin(config: Option<&Path>, upstream: Option<&str>) -> Result<(Config, Signals), ExitCode> {
    let signals =
        Signals::new().map_err(|error| fail(1, &format!("cannot listen for signals: {error}")))?;
    let (config, warnings) = load(config, upstream)?;
    log::start(config.log.format, &config.log.level)
        .map_err(|error| fail(1, &format!("cannot start the log: {error}")))?;
    for warning in warnings {
        tracing::warn!("{warning}");
    }
    Ok((config, signals))
}

async fn serve(args: ServeArgs) -> Result<ExitCode, Problem> {
    let (config, mut signals) = match begin(args.config.as_deref(), args.upstream.as_deref()) {
        Ok(begun) => begun,
        Err(code) => return Ok(code),
    };
    let listen = config.server.listen.address.clone();
    let mut running = tokio::select! {
        started = serve::start(config) => match started {
            Ok(running) => running,
            Err(error) => return Err((1, causes(&error))),
        },
        () = signals.next() => return Ok(ExitCode::SUCCESS),
    };
    let ended = tokio::select! {
        opened = running.opened() => opened.err().map(|error| Err(start_failed(&error))),
        why = signals.next_or_fatal() => Some(Ok(why.into())),
    };
    if let Some(ended) = ended {
        return stopped(ended, running.stop(), &mut signals).await;
    }
    let listen = running.addr.map_or(listen, |addr| addr.to_string());
    let ready = serde_json::json!({ "listen": listen, "admin": running.admin.to_string() });
    tell_ready(&ready);
    let mut why = signals.next_or_fatal().await;
    if let Stopped::Signal = why {
        why = serve_on(running.begin_stop(), &mut signals).await;
    }
    tracing::info!("stopping: requests in progress are finished first");
    stopped(Ok(why.into()), running.stop(), &mut signals).await
}

/// Goes on for the delay of a shutdown. A second signal ends the delay, and a third one the process.
async fn serve_on(delay: Duration, signals: &mut Signals) -> Stopped {
    if delay.is_zero() {
        return Stopped::Signal;
    }
    tracing::info!(
        ?delay,
        "stopping: not ready any more, and requests are still taken for server.shutdown_delay"
    );
    tokio::select! {
        () = tokio::time::sleep(delay) => Stopped::Signal,
        why = signals.next_or_fatal() => why,
    }
}

/// The error of a start that failed after the process began to listen. It is logged at once, because open requests can delay
/// the end of the process for the whole grace.
fn start_failed(error: &StartError) -> Problem {
    let why = causes(error);
    tracing::error!(error = why, "the start has failed: the process ends");
    (1, why)
}

/// The exit status after a stop. A second signal ends the process at once; another process then takes over its records when
/// its lease has run out.
async fn stopped(
    ended: Result<ExitCode, Problem>,
    stop: impl Future<Output = ()>,
    signals: &mut Signals,
) -> Result<ExitCode, Problem> {
    tokio::select! {
        () = stop => ended,
        () = signals.next() => ended.and(Ok(ExitCode::FAILURE)),
    }
}

async fn relay_alone(args: &RelayArgs) -> Result<ExitCode, Problem> {
    let upstream = args.config.is_none().then_some("http://127.0.0.1");
    let (config, mut signals) = match begin(args.config.as_deref(), upstream) {
        Ok(begun) => begun,
        Err(code) => return Ok(code),
    };
    let mut running = tokio::select! {
        started = relay::start(config) => match started {
            Ok(running) => running,
            Err(error @ StartError::Config(_)) => return Err((USAGE, causes(&error))),
            Err(error) => return Err((1, causes(&error))),
        },
        () = signals.next() => return Ok(ExitCode::SUCCESS),
    };
    let ended = tokio::select! {
        opened = running.opened() => opened.err().map(|error| Err(start_failed(&error))),
        why = signals.next_or_fatal() => Some(Ok(why.into())),
    };
    if let Some(ended) = ended {
        return stopped(ended, running.stop(), &mut signals).await;
    }
    tell_ready(&serde_json::json!({ "admin": running.admin.to_string() }));
    let why = signals.next_or_fatal().await;
    tracing::info!("stopping: deliveries in flight are finished first");
    stopped(Ok(why.into()), running.stop(), &mut signals).await
}

/// Why the process stops.
#[derive(Clone, Copy, Debug)]
enum Stopped {
    /// A signal asked for it.
    Signal,
    /// A background task ended that cannot be started again.
    TaskEnded,
}

impl From<Stopped> for ExitCode {
    fn from(stopped: Stopped) -> Self {
        match stopped {
            Stopped::Signal => Self::SUCCESS,
            Stopped::TaskEnded => Self::from(TASK_ENDED),
        }
    }
}

/// The signals that stop the process, and those that would kill it if nothing caught them. Created before anything else, so
/// that a signal during the start ends it, too. Rust itself ignores SIGPIPE.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
    /// Caught and ignored. After SIGXFSZ, a file at its size limit fails its write.
    _ignored: [Signal; 3],
}

/// What a caller of SIGHUP may expect instead.
const RESTART: &str = "to take a changed configuration, start the process again";

/// SIGXFSZ, on all systems that this runs on.
const TOO_LARGE: i32 = 25;

impl Signals {
    fn new() -> std::io::Result<Self> {
        let user = [SignalKind::user_defined1(), SignalKind::user_defined2()];
        let [first, second] = user.map(signal);
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
            _ignored: [first?, second?, signal(SignalKind::from_raw(TOO_LARGE))?],
        })
    }

    async fn next(&mut self) {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return,
                _ = self.interrupt.recv() => return,
                _ = self.hangup.recv() => tracing::warn!("SIGHUP changes nothing: {RESTART}"),
            }
        }
    }

    /// Waits for a signal, or for the end of a background task that cannot be started again.
    async fn next_or_fatal(&mut self) -> Stopped {
        tokio::select! {
            () = self.next() => Stopped::Signal,
            task = tasks::fatal() => {
                tracing::error!(task, "this process must be replaced: it ends with status {TASK_ENDED}");
                Stopped::TaskEnded
            }
        }
    }
}

async fn explain_request(args: &ExplainCommand) -> ExitCode {
    with_config(&args.config, async |config| {
        let digest = config.digest_key.look().map_err(|none| (1, causes(&none)))?;
        if digest.is_none() && config.routes.iter().any(|r| r.scope.tenant == Source::Credential) {
            // `serve` makes the key at its first start, so that its user owns it.
            let note = "oncegate: there is no digest key yet: a tenant that is a digest will be another one";
            log::say(note);
        }
        let digest = digest.unwrap_or_else(|| DigestKey::from_bytes(&[]));
        let store = match args.request.record {
            Some(_) => Some(start::open(&config.store, false).await.map_err(opened)?),
            None => None,
        };
        let tokens = config.jwt.map(Tokens::new).transpose();
        let tokens = tokens.map_err(|why| (1, why))?.map(Arc::new);
        let by = Explainer::new(&config.gateway, config.routes, digest, tokens);
        let mut out = Out { to: &mut std::io::stdout().lock(), json: args.config.json };
        explain::run(&args.request, &by, store.as_deref(), &mut out).await.map_err(failed)
    })
    .await
}

async fn migrate(args: &ConfigArgs) -> ExitCode {
    with_config(args, async |config| {
        start::open(&config.store, true).await.map_err(opened)?;
        say(if args.json { r#"{"migrated":true}"# } else { "the store's schema is up to date" });
        Ok(Exit::Done)
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_one_working_thread_fewer_than_processors_unless_a_number_is_named() {
        for (processors, expected) in [(1, 1), (2, 1), (3, 2), (64, 63)] {
            assert_eq!(threads(None, processors), Ok(expected));
            assert_eq!(threads(Some("7"), processors), Ok(7));
        }
        for wrong in ["", "0", "-1", "two", "1025"] {
            let told = threads(Some(wrong), 4).unwrap_err();
            assert!(
                told.starts_with(&format!("TOKIO_WORKER_THREADS: \"{wrong}\" is not a")),
                "{told}"
            );
        }
    }
}
