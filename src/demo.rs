//! `demo`: an orders API without idempotency, a webhook consumer that verifies and deduplicates events, and the gateway on
//! SQLite in a temporary folder. It plays the acceptance cases, prints the counts, and runs on.
//!
//! The gateway starts from a configuration file as always. All counts come from outside the gateway: from the API, the
//! consumer and the store. Each part can also run as a process of its own, in a container for example. Then the cases are
//! played on a gateway that was started elsewhere.

mod api;
mod cases;

use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Subcommand};
use tokio::signal::unix::{SignalKind, signal};

use self::cases::{Played, Stage, Taken};
use crate::cli::serve::{self, Running};
use crate::cli::start;
use crate::config::Config;
use crate::telemetry::log;

/// Why the demo did not run.
#[derive(Debug, thiserror::Error)]
enum Problem {
    #[error("{0}")]
    Io(#[from] std::io::Error),
    #[error("{0}")]
    Config(String),
    #[error("{0}")]
    Start(#[from] start::StartError),
    #[error("{0}")]
    Open(#[from] crate::store::OpenError),
    #[error("the case could not be played: {0}")]
    Case(String),
}

/// What is typed after `demo`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct DemoArgs {
    /// Exit after the cases; the exit status says whether all of them passed
    #[arg(long)]
    exit: bool,
    #[command(subcommand)]
    part: Option<Part>,
}

/// One part of the demo as a process of its own.
#[derive(Debug, Subcommand)]
enum Part {
    /// Only the orders API
    Api {
        /// Where it listens
        #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:3000")]
        listen: String,
    },
    /// Only the webhook consumer
    Consumer {
        /// Where it listens
        #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:4000")]
        listen: String,
        /// The secret that events are signed with: whsec_ and base64
        #[arg(long, env = "SINK_SECRET", hide_env_values = true)]
        secret: String,
    },
    /// Only the cases, on a gateway that runs
    Cases(CasesArgs),
}

#[derive(Debug, Args)]
struct CasesArgs {
    /// The configuration file of that gateway (TOML), for its store
    #[arg(long, short, value_name = "FILE", env = "ONCEGATE_CONFIG")]
    config: PathBuf,
    /// The gateway, as host:port
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8080")]
    gateway: String,
    /// The orders API of the demo, as host:port
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:3000")]
    api: String,
    /// The webhook consumer of the demo, as host:port
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:4000")]
    consumer: String,
}

/// Plays the cases, then runs on or ends. The exit status says whether all cases passed.
pub async fn run(args: &DemoArgs) -> ExitCode {
    let result = match &args.part {
        None => whole(args.exit).await,
        Some(Part::Api { listen }) => one("the orders API", api::orders(listen).await).await,
        Some(Part::Consumer { listen, secret }) => {
            one("the webhook consumer", api::consumer(listen, secret).await).await
        }
        Some(Part::Cases(args)) => elsewhere(args).await,
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(problem) => {
            log::say(&format!("oncegate demo: {problem}"));
            ExitCode::FAILURE
        }
    }
}

async fn whole(exit: bool) -> Result<bool, Problem> {
    let folder = std::env::temp_dir().join(format!("oncegate-demo-{}", std::process::id()));
    let result = play(&folder, exit).await;
    // The temporary folder may be left; the system clears it.
    drop(std::fs::remove_dir_all(&folder));
    result
}

/// One part, until somebody ends it.
async fn one(what: &str, served: std::io::Result<SocketAddr>) -> Result<bool, Problem> {
    say(&format!("{what} listens on http://{}", served?));
    told_to_end().await;
    Ok(true)
}

/// The cases alone.
async fn elsewhere(args: &CasesArgs) -> Result<bool, Problem> {
    let (config, _) = Config::load(Some(&args.config), std::env::vars(), None)
        .map_err(|mistakes| Problem::Config(mistakes.to_string()))?;
    let stage = Stage {
        gateway: args.gateway.clone(),
        orders: args.api.clone(),
        consumer: args.consumer.clone(),
        store: start::open(&config.store, false).await?,
        run: format!("demo-{}", uuid::Uuid::now_v7()),
    };
    show(&stage).await
}

/// Plays the cases, and shows what was counted.
async fn show(stage: &Stage) -> Result<bool, Problem> {
    let (played, Taken { received, distinct, forged }) =
        cases::play_all(stage).await.map_err(Problem::Case)?;
    let held = played.iter().all(|case| case.held);
    say(&table(&played));
    say(&format!(
        "The consumer took {received} events under {distinct} ids; {forged} signatures were wrong."
    ));
    say(if held { "All cases held." } else { "A CASE DID NOT HOLD." });
    Ok(held)
}

async fn play(folder: &Path, exit: bool) -> Result<bool, Problem> {
    std::fs::create_dir_all(folder)?;
    let secret = api::secret();
    let orders = api::orders(ANY_PORT).await?;
    let consumer = api::consumer(ANY_PORT, &secret).await?;
    let (config, store) = configure(folder, orders, consumer, &secret)?;
    let look = start::open(&config.store, true).await?;
    let mut running = serve::start(config).await?;
    running.opened().await?;
    let Some(gateway) = running.addr else {
        return Err(Problem::Config("the demo's gateway has no address".to_owned()));
    };
    say(&format!(
        "orders API  http://{orders}   (knows nothing of idempotency)\ngateway     http://{gateway}   (store: {})\nadmin       http://{}\nconsumer    http://{consumer}   (verifies signatures, drops repeated event ids)\n",
        store.display(),
        running.admin,
    ));
    let stage = Stage {
        gateway: gateway.to_string(),
        orders: orders.to_string(),
        consumer: consumer.to_string(),
        store: look,
        run: "demo".to_owned(),
    };
    let held = show(&stage).await?;
    if !exit {
        stay(&running, gateway).await;
    }
    running.stop().await;
    Ok(held)
}

const ANY_PORT: &str = "127.0.0.1:0";

/// Writes the demo's configuration, and loads it as `serve` would.
fn configure(
    folder: &Path,
    upstream: SocketAddr,
    sink: SocketAddr,
    secret: &str,
) -> Result<(Config, PathBuf), Problem> {
    let store = folder.join("oncegate.db");
    std::fs::write(folder.join("sink.secret"), format!("{secret}\n"))?;
    let file = folder.join("oncegate.toml");
    let store_path = store.display();
    std::fs::write(
        &file,
        format!(
            r#"[server]
listen = "127.0.0.1:0"
[admin]
listen = "127.0.0.1:0"
[upstream]
url = "http://{upstream}"
[store]
url = "sqlite:{store_path}"
[policy]
tenant = {{ header = "X-Tenant-Id" }}
[[route]]
method = "POST"
path = "/orders"
operation = "orders.create"
[[route.event]]
type = "order.created"
when = "response.status == 201"
payload = {{ order_id = "{{{{ response.json.id }}}}", amount = "{{{{ request.json.amount }}}}" }}
[[route.event]]
type = "audit.order"
[[sink]]
name = "consumer"
url = "http://{sink}/hook"
secret_file = "sink.secret"
allow_private = true
"#
        ),
    )?;
    let (config, _) = Config::load(Some(&file), std::iter::empty(), None)
        .map_err(|mistakes| Problem::Config(mistakes.to_string()))?;
    Ok((config, store))
}

/// The table of cases with their counts.
fn table(played: &[Played]) -> String {
    let mut rows = vec![
        ["case", "what was done", "executed", "records", "events", "answers", "held"]
            .map(str::to_owned),
    ];
    for case in played {
        rows.push([
            case.id.to_owned(),
            case.what.to_owned(),
            case.executed.to_string(),
            case.records.to_string(),
            case.events.to_string(),
            case.answers.clone(),
            if case.held { "yes" } else { "NO" }.to_owned(),
        ]);
    }
    let mut widths = [0_usize; 7];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for row in &rows {
        for (cell, width) in row.iter().zip(widths) {
            text.push_str(&format!("{cell:<width$}  "));
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
    text
}

/// Shows how to go on by hand, and waits for Ctrl-C.
async fn stay(running: &Running, gateway: SocketAddr) {
    let order = r#"-H 'Content-Type: application/json' -H 'X-Tenant-Id: acme'"#;
    say(&format!(
        "\nTry it (the second time it is a replay: look for Idempotent-Replayed):\n\n  curl -i http://{gateway}/orders {order} -H 'Idempotency-Key: my-1' -d '{{\"amount\":\"129.90\"}}'\n\nThe same key for another request is refused:\n\n  curl -i http://{gateway}/orders {order} -H 'Idempotency-Key: my-1' -d '{{\"amount\":\"1.00\"}}'\n\nWas it executed?\n\n  curl 'http://{admin}/api/v1/records?key=my-1'\n\nCtrl-C ends the demo and removes its folder.",
        admin = running.admin
    ));
    told_to_end().await;
}

/// Ctrl-C or SIGTERM, which a container's first process has to listen for.
async fn told_to_end() {
    // Err: the process cannot listen for signals; then the demo ends at once.
    let Ok(mut terminate) = signal(SignalKind::terminate()) else { return };
    tokio::select! {
        interrupted = tokio::signal::ctrl_c() => drop(interrupted),
        _ = terminate.recv() => {}
    }
}

fn say(text: &str) {
    drop(writeln!(std::io::stdout(), "{text}"));
}
