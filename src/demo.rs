//! `demo`: an orders API without idempotency, a webhook consumer that verifies and deduplicates events, and the gateway on
//! SQLite in a temporary folder. It plays the acceptance cases, prints the counts, and runs on.
//!
//! The gateway starts from a configuration file as always. All counts come from outside the gateway: from the API, the
//! consumer and the store.

mod api;
mod cases;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use self::api::{Consumer, Orders};
use self::cases::{Played, Stage};
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

/// Plays the cases, then runs on or ends. The exit status says whether all cases passed.
pub async fn run(exit: bool) -> ExitCode {
    let folder = std::env::temp_dir().join(format!("oncegate-demo-{}", std::process::id()));
    let result = play(&folder, exit).await;
    // The temporary folder may be left; the system clears it.
    drop(std::fs::remove_dir_all(&folder));
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(problem) => {
            log::say(&format!("oncegate demo: {problem}"));
            ExitCode::FAILURE
        }
    }
}

async fn play(folder: &Path, exit: bool) -> Result<bool, Problem> {
    std::fs::create_dir_all(folder)?;
    let orders = Arc::new(Orders::start().await?);
    let consumer = Arc::new(Consumer::start().await?);
    let (config, store) = configure(folder, &orders, &consumer)?;
    let look = start::open(&config.store, true).await?;
    let mut running = serve::start(config).await?;
    running.opened().await?;
    let Some(gateway) = running.addr else {
        return Err(Problem::Config("the demo's gateway has no address".to_owned()));
    };
    say(&format!(
        "orders API  http://{}   (knows nothing of idempotency)\ngateway     http://{gateway}   (store: {})\nadmin       http://{}\nconsumer    http://{}   (verifies signatures, drops repeated event ids)\n",
        orders.addr,
        store.display(),
        running.admin,
        consumer.addr
    ));
    let stage = Stage { gateway, orders, consumer: Arc::clone(&consumer), store: look };
    let played = cases::play_all(&stage).await.map_err(Problem::Case)?;
    let held = played.iter().all(|case| case.held);
    say(&table(&played));
    say(&format!(
        "The consumer took {} events under {} ids; {} signatures were wrong.",
        consumer.received(),
        consumer.distinct(),
        consumer.forged()
    ));
    say(if held { "All cases held." } else { "A CASE DID NOT HOLD." });
    if !exit {
        stay(&running, gateway).await;
    }
    running.stop().await;
    Ok(held)
}

/// Writes the demo's configuration, and loads it as `serve` would.
fn configure(
    folder: &Path,
    orders: &Orders,
    consumer: &Consumer,
) -> Result<(Config, PathBuf), Problem> {
    let store = folder.join("oncegate.db");
    std::fs::write(folder.join("sink.secret"), format!("{}\n", consumer.secret))?;
    let file = folder.join("oncegate.toml");
    let (upstream, sink, store_path) = (orders.addr, consumer.addr, store.display());
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
async fn stay(running: &Running, gateway: std::net::SocketAddr) {
    let order = r#"-H 'Content-Type: application/json' -H 'X-Tenant-Id: acme'"#;
    say(&format!(
        "\nTry it (the second time it is a replay: look for Idempotent-Replayed):\n\n  curl -i http://{gateway}/orders {order} -H 'Idempotency-Key: my-1' -d '{{\"amount\":\"129.90\"}}'\n\nThe same key for another request is refused:\n\n  curl -i http://{gateway}/orders {order} -H 'Idempotency-Key: my-1' -d '{{\"amount\":\"1.00\"}}'\n\nWas it executed?\n\n  curl 'http://{admin}/api/v1/records?key=my-1'\n\nCtrl-C ends the demo and removes its folder.",
        admin = running.admin
    ));
    // Err: the process cannot listen for signals; then the demo ends at once.
    drop(tokio::signal::ctrl_c().await);
}

fn say(text: &str) {
    drop(writeln!(std::io::stdout(), "{text}"));
}
