//! `oncegate events list|show|redeliver`: whether an event reached its sinks, and sending it again.
//!
//! Redelivery keeps the event's id, so that a receiver that deduplicates takes it once. One that is being delivered
//! at this moment is left alone: its verdict is on its way.

use std::io::Write;
use std::time::Duration;

use clap::{ArgGroup, Args, Subcommand};
use serde_json::json;
use uuid::Uuid;

use super::print::{self, Exit, Failure, block, escape, refuse};
use super::records::events_table;
use crate::admin::query;
use crate::admin::view::EventView;
use crate::store::{self, EventFilter, EventRow, EventStatus, Redeliver, Store};

/// How many rows of one event (one a sink) are shown at most.
const ROWS_MAX: u32 = 500;

/// `oncegate events …`
#[derive(Debug, Subcommand)]
pub enum Events {
    /// List events, newest first, a row for each sink
    List(ListArgs),
    /// Show one event with its message, and how it stands towards each sink
    Show(ShowArgs),
    /// Send an event again, or all dead ones
    Redeliver(RedeliverArgs),
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
    /// Only towards this sink
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

/// Which events are sent again.
#[derive(Args, Debug)]
#[command(group = ArgGroup::new("which").required(true).args(["id", "status"]))]
pub struct RedeliverArgs {
    /// The event's id
    #[arg(value_parser = print::id::<Uuid>)]
    pub id: Option<Uuid>,
    /// All in this status: only `dead`
    #[arg(long, value_parser = dead)]
    pub status: Option<EventStatus>,
    /// Only to this sink
    #[arg(long)]
    pub sink: Option<String>,
    /// Why, for the audit table
    #[arg(long)]
    pub reason: Option<String>,
}

fn dead(text: &str) -> Result<EventStatus, String> {
    query::event_status(text)
        .ok()
        .filter(|status| *status == EventStatus::Dead)
        .ok_or_else(|| "only dead events are redelivered all at once".to_owned())
}

/// Runs the command that was typed.
///
/// # Errors
/// See the commands.
pub async fn run(
    command: &Events,
    store: &dyn Store,
    out: &mut dyn Write,
    json: bool,
) -> Result<Exit, Failure> {
    match command {
        Events::List(args) => list(store, args, out, json).await,
        Events::Show(args) => show(store, args, out, json).await,
        Events::Redeliver(args) => redeliver(store, args, out, json).await,
    }
}

/// Lists events.
///
/// # Errors
/// The store's, or where the output cannot be written.
pub async fn list(
    store: &dyn Store,
    args: &ListArgs,
    out: &mut dyn Write,
    json: bool,
) -> Result<Exit, Failure> {
    let filter = EventFilter {
        tenant: args.tenant.clone(),
        operation: args.operation.clone(),
        key: args.key.clone(),
        sink: args.sink.clone(),
        status: args.status,
        since: args.since,
        // One more than is shown tells whether there are more.
        limit: args.limit.saturating_add(1),
        ..EventFilter::default()
    };
    let rows = store.list_events(&filter).await?;
    let more = rows.len() > args.limit as usize;
    let events: Vec<_> = rows.iter().take(args.limit as usize).map(EventView::brief).collect();
    if json {
        print::json(out, &json!({ "events": events, "more": more }))?;
    } else if events.is_empty() {
        writeln!(out, "No events.")?;
    } else {
        events_table(&events).print(out, "")?;
        if more {
            writeln!(out, "There are more: raise --limit, or narrow the list.")?;
        }
    }
    Ok(Exit::Done)
}

/// Shows one event.
///
/// # Errors
/// The store's, or where the output cannot be written.
pub async fn show(
    store: &dyn Store,
    args: &ShowArgs,
    out: &mut dyn Write,
    json: bool,
) -> Result<Exit, Failure> {
    let rows = rows_of(store, args.id).await?;
    let events: Vec<_> = rows.iter().map(EventView::whole).collect();
    let Some(first) = events.first() else {
        return refuse(out, json, "not_found", &format!("There is no event {}.", args.id));
    };
    if json {
        print::json(out, &json!({ "events": events }))?;
        return Ok(Exit::Done);
    }
    writeln!(out, "Event {}", first.id)?;
    for (name, value) in [
        ("event_key", Some(&first.event_key)),
        ("event_type", Some(&first.event_type)),
        ("tenant_id", Some(&first.tenant_id)),
        ("operation", Some(&first.operation)),
        ("key", Some(&first.idempotency_key)),
        ("record_id", Some(&first.record_id)),
        ("ordering_key", first.ordering_key.as_ref()),
        ("created_at", Some(&first.created_at)),
    ] {
        writeln!(out, "  {name:<13} {}", escape(value.map_or("-", String::as_str)))?;
    }
    writeln!(out, "Message")?;
    match &first.payload {
        Some(text) => block(out, text, "  ")?,
        None => writeln!(out, "  (not text: see --json)")?,
    }
    writeln!(out, "Towards")?;
    events_table(&events).print(out, "  ")?;
    Ok(Exit::Done)
}

/// Makes events due again.
///
/// # Errors
/// [`Failure::Usage`] where neither an id nor a status is given; the store's; or where the output cannot be written.
pub async fn redeliver(
    store: &dyn Store,
    args: &RedeliverArgs,
    out: &mut dyn Write,
    json: bool,
) -> Result<Exit, Failure> {
    let sink = args.sink.clone();
    let which = match (args.id, args.status) {
        (Some(id), None) => Redeliver::One { id, sink },
        (None, Some(_)) => Redeliver::Dead { sink },
        (Some(_), Some(_)) | (None, None) => {
            return Err(Failure::Usage("give either an event's id or --status dead".to_owned()));
        }
    };
    let by = print::operator(args.reason.as_deref());
    let look = match args.id {
        Some(id) => format!("events show {id}"),
        None => "events list --status dead".to_owned(),
    };
    let count = print::changed(store.redeliver(&which, &by).await, &look)?;
    if let (Some(id), 0) = (args.id, count) {
        return nothing_redelivered(store, id, args.sink.as_deref(), out, json).await;
    }
    if json {
        let done = json!({
            "redelivered": count, "event": args.id.map(|id| id.to_string()), "sink": args.sink, "by": by.who, "why": by.why,
        });
        print::json(out, &done)?;
    } else {
        let what = if args.id.is_some() { "event" } else { "dead event" };
        let plural = if count == 1 { "" } else { "s" };
        let to = args.sink.as_deref().map(|sink| format!(" to {}", escape(sink)));
        let to = to.unwrap_or_default();
        // Counted by rows: an event towards two sinks is two deliveries.
        writeln!(out, "{count} {what}{plural} due again{to}.")?;
    }
    Ok(Exit::Done)
}

/// Says why one event was not made due again.
async fn nothing_redelivered(
    store: &dyn Store,
    id: Uuid,
    sink: Option<&str>,
    out: &mut dyn Write,
    json: bool,
) -> Result<Exit, Failure> {
    let rows = rows_of(store, id).await?;
    if rows.is_empty() {
        return refuse(out, json, "not_found", &format!("There is no event {id}."));
    }
    let all_discarded = rows.iter().all(|row| row.status == EventStatus::Discarded);
    match sink {
        None if all_discarded => {
            let detail = format!("Event {id} was for no sink: name one with --sink.");
            refuse(out, json, "discarded", &detail)
        }
        Some(sink) if rows.iter().all(|row| row.sink != sink) => {
            let detail = format!("Event {id} is not for the sink {}.", escape(sink));
            refuse(out, json, "not_found", &detail)
        }
        Some(_) | None => {
            let detail = format!("Event {id} is being delivered right now: it was left alone.");
            refuse(out, json, "delivering", &detail)
        }
    }
}

async fn rows_of(store: &dyn Store, id: Uuid) -> Result<Vec<EventRow>, store::Error> {
    let filter = EventFilter { id: Some(id), limit: ROWS_MAX, ..EventFilter::default() };
    store.list_events(&filter).await
}
