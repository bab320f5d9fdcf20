//! `oncegate events list|show|redeliver|discard`: show events, send them again, or discard them.
//!
//! A redelivery keeps the event's id, so that a receiver that deduplicates takes the event once. Neither command changes an
//! event while a worker delivers it.

use std::io::Write;
use std::time::Duration;

use clap::{ArgGroup, Args, Subcommand};
use serde_json::json;
use uuid::Uuid;

use super::print::{self, Exit, Failure, Out, Table, block, escape, or_dash, refuse};
use super::records::{events_table, seconds};
use crate::admin::action::{self, ActionRefusal, ActionReport};
use crate::admin::detail;
use crate::admin::query;
use crate::admin::view::{AttemptView, EventView};
use crate::store::{Chosen, DeadFilter, EventAction, EventFilter, EventStatus, Store};

/// `oncegate events …`
#[derive(Debug, Subcommand)]
pub enum Events {
    /// List events, newest first, a row for each sink
    List(ListArgs),
    /// Show one event: its message, its status for each sink, and each attempt
    Show(ShowArgs),
    /// Send an event, or all dead events, again to the sinks that have not taken it
    Redeliver(RedeliverArgs),
    /// Discard an event, or all dead events, for good; a delivery that was sent stays sent
    Discard(SelectArgs),
}

/// Which events are listed.
#[derive(Args, Debug)]
pub struct ListArgs {
    /// Only of this tenant
    #[arg(long)]
    pub tenant: Option<String>,
    /// Only of this operation
    #[arg(long)]
    pub operation: Option<String>,
    /// Only under this idempotency key
    #[arg(long)]
    pub key: Option<String>,
    /// Only of this type
    #[arg(long = "type", value_name = "TYPE")]
    pub kind: Option<String>,
    /// Only for this sink
    #[arg(long)]
    pub sink: Option<String>,
    /// Only in this status: pending, sent, dead or discarded
    #[arg(long, value_parser = query::event_status)]
    pub status: Option<EventStatus>,
    /// Only those made within this long: 15m, 1h, 7d
    #[arg(long, value_parser = query::since)]
    pub since: Option<Duration>,
    /// At most this many
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub limit: u32,
}

/// Which event is shown.
#[derive(Args, Debug)]
pub struct ShowArgs {
    /// The event's id
    #[arg(value_parser = print::id::<Uuid>)]
    pub id: Uuid,
}

/// Which events a command changes.
#[derive(Args, Debug)]
#[command(group = ArgGroup::new("which").required(true).args(["id", "status"]))]
pub struct SelectArgs {
    /// The event's id
    #[arg(value_parser = print::id::<Uuid>)]
    pub id: Option<Uuid>,
    /// All events in this status: only `dead` is allowed
    #[arg(long, value_parser = dead)]
    pub status: Option<EventStatus>,
    /// Only for this sink
    #[arg(long)]
    pub sink: Option<String>,
    /// With --status: only of this type
    #[arg(long = "type", value_name = "TYPE", conflicts_with = "id")]
    pub kind: Option<String>,
    /// With --status: only of this tenant
    #[arg(long, conflicts_with = "id")]
    pub tenant: Option<String>,
    /// With --status: only of this operation
    #[arg(long, conflicts_with = "id")]
    pub operation: Option<String>,
    /// With --status: only those made within this long: 15m, 1h, 7d
    #[arg(long, value_parser = query::since, conflicts_with = "id")]
    pub since: Option<Duration>,
    /// With --status: only say how many
    #[arg(long, conflicts_with = "id")]
    pub dry_run: bool,
    /// Why, for the audit table
    #[arg(long)]
    pub reason: Option<String>,
}

/// Which events are redelivered, and to which sinks.
#[derive(Args, Debug)]
pub struct RedeliverArgs {
    /// Which events.
    #[command(flatten)]
    pub which: SelectArgs,
    /// Also to the sinks that took it
    #[arg(long, conflicts_with_all = ["sink", "status"])]
    pub all_sinks: bool,
}

/// What an operator asks for.
struct ActionRequest<'a> {
    action: EventAction,
    args: &'a SelectArgs,
    /// Redelivery also to the sinks that took the event.
    all_sinks: bool,
}

impl SelectArgs {
    fn filter(&self) -> DeadFilter {
        DeadFilter {
            sink: self.sink.clone(),
            kind: self.kind.clone(),
            tenant: self.tenant.clone(),
            operation: self.operation.clone(),
            since: self.since,
        }
    }
}

fn dead(text: &str) -> Result<EventStatus, String> {
    query::event_status(text)
        .ok()
        .filter(|status| *status == EventStatus::Dead)
        .ok_or_else(|| "only `dead` is allowed".to_owned())
}

/// Runs the command that was typed; `configured` names the sinks of the configuration.
///
/// # Errors
/// [`Failure::Usage`] without an id and a status, or for a sink that is not known; an error of the store or of the output.
pub async fn run(
    command: &Events,
    store: &dyn Store,
    configured: &[String],
    out: &mut Out<'_>,
) -> Result<Exit, Failure> {
    let request = match command {
        Events::List(args) => return list(store, configured, args, out).await,
        Events::Show(args) => return show(store, args.id, out).await,
        Events::Redeliver(RedeliverArgs { which, all_sinks }) => {
            ActionRequest { action: EventAction::Redeliver, args: which, all_sinks: *all_sinks }
        }
        Events::Discard(args) => {
            ActionRequest { action: EventAction::Discard, args, all_sinks: false }
        }
    };
    act(store, configured, &request, out).await
}

async fn list(
    store: &dyn Store,
    configured: &[String],
    args: &ListArgs,
    out: &mut Out<'_>,
) -> Result<Exit, Failure> {
    let filter = EventFilter {
        tenant: args.tenant.clone(),
        operation: args.operation.clone(),
        key: args.key.clone(),
        kind: args.kind.clone(),
        sink: args.sink.clone(),
        status: args.status,
        since: args.since,
        // One more than is shown, to know whether there are more.
        limit: args.limit.saturating_add(1),
        ..EventFilter::default()
    };
    let rows = store.list_events(&filter).await?;
    if rows.is_empty() {
        refuse_unknown_sink(store, configured, None, args.sink.as_deref()).await?;
    }
    let more = rows.len() > args.limit as usize;
    let events: Vec<_> = rows.iter().take(args.limit as usize).map(EventView::brief).collect();
    if out.json {
        return out.document(&json!({ "events": events, "more": more }));
    }
    if events.is_empty() {
        return out.line("No events.");
    }
    events_table(&events).print_list(out, more)
}

async fn show(store: &dyn Store, id: Uuid, out: &mut Out<'_>) -> Result<Exit, Failure> {
    let detail = detail::event_detail(store, id).await?;
    let Some((detail, first)) =
        detail.as_ref().and_then(|detail| Some((detail, detail.events.first()?)))
    else {
        return refuse(out, "not_found", &format!("There is no event {id}."));
    };
    if out.json {
        return out.document(detail);
    }
    writeln!(out, "Event {}", first.id)?;
    print::fields(
        out,
        &[
            ("event_key", Some(&first.event_key)),
            ("event_type", Some(&first.event_type)),
            ("tenant_id", Some(&first.tenant_id)),
            ("operation", Some(&first.operation)),
            ("key", Some(&first.idempotency_key)),
            ("record_id", Some(&first.record_id)),
            ("ordering_key", first.ordering_key.as_deref()),
            ("created_at", Some(&first.created_at)),
        ],
    )?;
    writeln!(out, "Message")?;
    match &first.payload {
        Some(text) => block(out, text, "  ")?,
        None => writeln!(out, "  (not text: see --json)")?,
    }
    writeln!(out, "Towards")?;
    events_table(&detail.events).print(out, "  ")?;
    if !detail.attempts.is_empty() {
        writeln!(out, "Attempts")?;
        attempts_table(&detail.attempts).print(out, "  ")?;
    }
    Ok(Exit::Done)
}

/// One line for each attempt. The error is cut to fit; `--json` shows all of it.
fn attempts_table(attempts: &[AttemptView]) -> Table<5> {
    let mut table = Table::new(["SINK", "ATTEMPT", "AT", "STATUS", "ERROR"]);
    for attempt in attempts {
        let status = attempt.status.map(|status| status.to_string());
        table.row([
            &attempt.sink,
            &attempt.attempt.to_string(),
            &seconds(&attempt.at),
            or_dash(status.as_deref()),
            or_dash(attempt.error.as_deref()),
        ]);
    }
    table
}

/// Makes events due again, or gives them up.
async fn act(
    store: &dyn Store,
    configured: &[String],
    request: &ActionRequest<'_>,
    out: &mut Out<'_>,
) -> Result<Exit, Failure> {
    let ActionRequest { args, .. } = request;
    refuse_unknown_sink(store, configured, args.id, args.sink.as_deref()).await?;
    match (args.id, args.status) {
        (Some(id), None) => act_on_one(store, request, id, out).await,
        (None, Some(_)) => act_on_dead(store, request, out).await,
        (Some(_), Some(_)) | (None, None) => {
            Err(Failure::Usage("give either an event's id or --status dead".to_owned()))
        }
    }
}

/// Refuses a sink that neither the configuration nor the store knows: it is probably a typing error.
async fn refuse_unknown_sink(
    store: &dyn Store,
    configured: &[String],
    event: Option<Uuid>,
    sink: Option<&str>,
) -> Result<(), Failure> {
    match action::wrong_sink(store, configured, event, sink).await? {
        None => Ok(()),
        Some(wrong) => {
            let sink = escape(sink.unwrap_or_default());
            Err(Failure::Usage(format!("--sink {sink}: {}", escape(&wrong))))
        }
    }
}

async fn act_on_one(
    store: &dyn Store,
    request: &ActionRequest<'_>,
    id: Uuid,
    out: &mut Out<'_>,
) -> Result<Exit, Failure> {
    let ActionRequest { action, args, all_sinks } = *request;
    let (by, sink) = (print::operator(args.reason.as_deref()), args.sink.as_deref());
    let which = match (action, sink, all_sinks) {
        (EventAction::Redeliver, None, false) => Chosen::NotTaken { id },
        (_, _, _) => Chosen::One { id, sink: args.sink.clone() },
    };
    let done = action::run(action, store, &which, &by).await;
    let touched = print::changed(done, &format!("events show {id}"))?;
    let rows = match detail::event_rows(store, id).await {
        // The change is done, even if the rest cannot be read.
        Err(_) if touched.count > 0 => Vec::new(),
        rows => rows?,
    };
    let report = ActionReport::of(action, sink, &touched, &rows);
    if touched.count == 0 {
        let ActionRefusal { name, detail } = action::refusal(id, sink, &rows, &report);
        return print::left_alone(out, name, &escape(&detail), report.json());
    }
    if out.json {
        return out.document(&json!({
            action::done(action): touched.count, "event": id.to_string(), "sink": sink,
            "sinks": report.json(), "by": by.who, "why": by.why,
        }));
    }
    writeln!(out, "{}", said(action, touched.count, "event", args))?;
    for line in report.lines() {
        writeln!(out, "  {}", escape(&line))?;
    }
    Ok(Exit::Done)
}

async fn act_on_dead(
    store: &dyn Store,
    request: &ActionRequest<'_>,
    out: &mut Out<'_>,
) -> Result<Exit, Failure> {
    let ActionRequest { action, args, .. } = *request;
    let filter = args.filter();
    if args.dry_run {
        let count = store.count_dead(&filter).await?;
        if out.json {
            return out.document(&json!({ action::done(action): count, "dry_run": true }));
        }
        return out.line(&format!("Nothing is done. {}", said(action, count, "dead event", args)));
    }
    let by = print::operator(args.reason.as_deref());
    let done = action::run(action, store, &Chosen::Dead(filter), &by).await;
    let count = print::changed(done, "events list --status dead")?.count;
    if out.json {
        let (by, why) = (by.who, by.why);
        return out.document(
            &json!({ action::done(action): count, "sink": args.sink, "by": by, "why": why }),
        );
    }
    out.line(&said(action, count, "dead event", args))
}

/// Counts rows: an event for two sinks is two deliveries.
fn said(action: EventAction, count: u64, what: &str, args: &SelectArgs) -> String {
    let plural = if count == 1 { "" } else { "s" };
    let done = match action {
        EventAction::Redeliver if args.dry_run => "would be due again",
        EventAction::Redeliver => "due again",
        EventAction::Discard if args.dry_run => "would be discarded",
        EventAction::Discard => "discarded",
    };
    let sink = args.sink.as_deref().map(escape);
    match (action, sink) {
        (_, None) => format!("{count} {what}{plural} {done}."),
        (EventAction::Redeliver, Some(sink)) => format!("{count} {what}{plural} {done} to {sink}."),
        (EventAction::Discard, Some(sink)) => format!("{count} {what}{plural} {done} for {sink}."),
    }
}
