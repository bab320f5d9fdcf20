//! `oncegate sinks list|pause|resume`: show the state of sinks, pause and resume them.
//!
//! A sink that an operator paused stays paused until an operator resumes it: no probe and no restart does. Every replica sees
//! the change within a second. Deliveries that are under way are finished.

use std::io::Write;
use std::time::Duration;

use clap::{Args, Subcommand};
use serde_json::json;

use super::print::{self, Exit, Failure, Out, Table, escape, or_dash, refuse};
use crate::admin::sinks::{self, NoChange, SinkView};
use crate::store::{SinkOrder, Store};

/// `oncegate sinks …`
#[derive(Debug, Subcommand)]
pub enum Sinks {
    /// List sinks: whether and why each is paused, and how many events are pending for it
    List,
    /// Deliver nothing to a sink until it is resumed; its events wait
    Pause(OrderArgs),
    /// Deliver to a paused sink again, whatever paused it
    Resume(OrderArgs),
}

/// Which sink, and why.
#[derive(Args, Debug)]
pub struct OrderArgs {
    /// The sink's name
    pub name: String,
    /// Why, for the audit table
    #[arg(long)]
    pub reason: Option<String>,
}

/// Runs the command that was typed; `configured` names the sinks of the configuration.
///
/// # Errors
/// [`Failure::Usage`] for a sink that is not known; an error of the store or of the output.
pub async fn run(
    command: &Sinks,
    store: &dyn Store,
    configured: &[String],
    out: &mut Out<'_>,
) -> Result<Exit, Failure> {
    match command {
        Sinks::List => list(store, configured, out).await,
        Sinks::Pause(args) => operate(store, configured, SinkOrder::Pause, args, out).await,
        Sinks::Resume(args) => operate(store, configured, SinkOrder::Resume, args, out).await,
    }
}

async fn list(
    store: &dyn Store,
    configured: &[String],
    out: &mut Out<'_>,
) -> Result<Exit, Failure> {
    let page = sinks::list(store, configured).await?;
    if out.json {
        return out.document(&page);
    }
    if page.sinks.is_empty() {
        return out.line("No sinks.");
    }
    let mut table = Table::new([
        "SINK",
        "STATE",
        "SINCE",
        "NEXT PROBE",
        "PENDING",
        "OLDEST",
        "DEAD",
        "NOTE",
        "LAST ERROR",
    ]);
    for sink in &page.sinks {
        let (pending, dead) = (sink.pending.to_string(), sink.dead.to_string());
        let oldest = if sink.pending > 0 { age(sink.oldest_age_seconds) } else { "-".to_owned() };
        table.row([
            &sink.name,
            &state(sink),
            or_dash(sink.since.as_deref()),
            &probe(sink),
            &pending,
            &oldest,
            &dead,
            or_dash(sink.note.as_deref()),
            or_dash(sink.last_error.as_deref()),
        ]);
    }
    table.print(out, "")?;
    for sink in page.sinks.iter().filter(|sink| !sink.configured && sink.pending > 0) {
        let (name, events) = (escape(&sink.name), events(sink.pending));
        writeln!(
            out,
            "{name} is not configured: {events} pending for it until it is, or until they are discarded."
        )?;
    }
    Ok(Exit::Done)
}

/// A number of events, in words.
pub fn events(count: u64) -> String {
    format!("{count} event{}", if count == 1 { "" } else { "s" })
}

fn state(sink: &SinkView) -> String {
    match (sink.reason, sink.configured) {
        (Some(reason), true) => format!("paused: {reason}"),
        (None, true) => "open".to_owned(),
        // No relay delivers to a sink that is not configured or probes it, whatever its row says.
        (Some(reason), false) => format!("not configured (paused: {reason})"),
        (None, false) => "not configured".to_owned(),
    }
}

fn probe(sink: &SinkView) -> String {
    match sink.next_probe_seconds {
        None => "-".to_owned(),
        Some(_) if sink.probing => "under way".to_owned(),
        Some(0) => "now".to_owned(),
        Some(wait) => format!("in {}", age(wait)),
    }
}

fn age(seconds: u64) -> String {
    humantime::format_duration(Duration::from_secs(seconds)).to_string()
}

async fn operate(
    store: &dyn Store,
    configured: &[String],
    order: SinkOrder,
    args: &OrderArgs,
    out: &mut Out<'_>,
) -> Result<Exit, Failure> {
    let by = print::operator(args.reason.as_deref());
    let name = escape(&args.name);
    if let Some(wrong) = sinks::unknown_sink(store, configured, &args.name).await? {
        return Err(Failure::Usage(format!("{name}: {}", escape(&wrong))));
    }
    let done = sinks::operate(store, configured, &args.name, order, &by).await;
    match print::changed(done, "sinks list")? {
        Some(NoChange::NotFound) => refuse(out, "not_found", &format!("There is no sink {name}.")),
        Some(NoChange::Already) => {
            let how = match order {
                SinkOrder::Pause => "paused by an operator already",
                SinkOrder::Resume => "not paused",
            };
            refuse(out, "already", &format!("The sink {name} is {how}: nothing was changed."))
        }
        None if out.json => {
            let paused = order == SinkOrder::Pause;
            let (by, why) = (by.who, by.why);
            out.document(&json!({ "sink": args.name, "paused": paused, "by": by, "why": why }))
        }
        None => out.line(&match order {
            SinkOrder::Pause => format!(
                "The sink {name} is paused: its events wait until `oncegate sinks resume {name}`."
            ),
            SinkOrder::Resume if !configured.contains(&args.name) => format!(
                "The sink {name} is resumed. It is not configured: its events wait until it is."
            ),
            SinkOrder::Resume => {
                format!("The sink {name} is resumed: its events are delivered again.")
            }
        }),
    }
}
