//! `oncegate records list|show|release|complete`: what happened to a request, and saying what did.
//!
//! - An action names the attempt that was just read; where the record has moved on since, nothing is changed, and
//!   that is said. The store decides whether an action is allowed; the words are here.
//! - `complete` checks the answer before anything is written: it will be replayed to callers as if it came from the
//!   upstream, so it may hold nothing that the gateway would have dropped.
//! - When the process dies between the action and the output, the audit table tells whether it was done.

use std::io::{Read as _, Write};
use std::str::FromStr as _;
use std::time::Duration;

use bytes::Bytes;
use clap::{Args, Subcommand};
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use serde_json::json;

use super::print::{self, Exit, Failure, Out, Table, block, escape, objection, or_dash, refuse};
use crate::admin::detail::{self, RecordDetail};
use crate::admin::query;
use crate::admin::view::{AuditView, EventView, RecordView, displayed_status, time};
use crate::record::event::Event;
use crate::record::{Answer, Fence, KeptBody, RecordId, Scope, Spelling, Status};
use crate::store::{Completion, Objection, Operator, RecordFilter, RecordRow, Store};

/// Largest body that `complete` takes, in bytes.
const BODY_MAX: u64 = 16 << 20;
/// How much of a body `show` prints, in characters; `--json` shows all of it.
const BODY_SHOWN: usize = 4096;

/// `oncegate records …`
#[derive(Debug, Subcommand)]
pub enum Records {
    /// List records, newest first
    List(ListArgs),
    /// Show one record: its answer, its events, and what was done to it by hand
    Show(ShowArgs),
    /// Say that a record did not execute: its key is free again
    Release(ReleaseArgs),
    /// Say that a record executed, and with which answer
    Complete(CompleteArgs),
}

/// Which records are listed.
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
    /// Only in this status: in_progress, unknown or completed
    #[arg(long, value_parser = query::record_status)]
    pub status: Option<Status>,
    /// Only those made within this long: 15m, 1h, 7d
    #[arg(long, value_parser = query::since)]
    pub since: Option<Duration>,
    /// At most this many
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub limit: u32,
}

/// Which record is shown.
#[derive(Args, Debug)]
pub struct ShowArgs {
    /// The record's id
    #[arg(value_parser = print::id::<RecordId>)]
    pub id: RecordId,
}

/// Which record is released.
#[derive(Args, Debug)]
pub struct ReleaseArgs {
    /// The record's id
    #[arg(value_parser = print::id::<RecordId>)]
    pub id: RecordId,
    /// Also a completed one: its answer is forgotten, and the next request executes again
    #[arg(long)]
    pub completed: bool,
    /// Why, for the audit table
    #[arg(long)]
    pub reason: Option<String>,
}

/// Which record is completed, and with what.
#[derive(Args, Debug)]
pub struct CompleteArgs {
    /// The record's id
    #[arg(value_parser = print::id::<RecordId>)]
    pub id: RecordId,
    /// The answer's status
    #[arg(long)]
    pub status: u16,
    /// The answer's body: text, or @FILE
    #[arg(long)]
    pub body: String,
    /// A header of the answer, 'Name: value'; may be repeated
    #[arg(long = "header")]
    pub headers: Vec<String>,
    /// Why, for the audit table
    #[arg(long)]
    pub reason: Option<String>,
}

/// What a completion by hand needs to know of the record's route.
pub trait Announce: Sync {
    /// The events of this answer by the route's templates, and for how long the route keeps an answer.
    fn events(&self, row: &RecordRow, answer: &Answer) -> (Vec<Event>, Duration);
}

impl<F: Fn(&RecordRow, &Answer) -> (Vec<Event>, Duration) + Sync> Announce for F {
    fn events(&self, row: &RecordRow, answer: &Answer) -> (Vec<Event>, Duration) {
        self(row, answer)
    }
}

/// Runs the command that was typed.
///
/// # Errors
/// [`Failure::Usage`] of an answer that is none; the store's; or where the output cannot be written.
pub async fn run(
    command: &Records,
    store: &dyn Store,
    announce: &dyn Announce,
    out: &mut Out<'_>,
) -> Result<Exit, Failure> {
    match command {
        Records::List(args) => list(store, args, out).await,
        Records::Show(args) => show(store, args.id, out).await,
        Records::Release(args) => release(store, args, out).await,
        Records::Complete(args) => complete(store, args, announce, out).await,
    }
}

async fn list(store: &dyn Store, args: &ListArgs, out: &mut Out<'_>) -> Result<Exit, Failure> {
    let filter = RecordFilter {
        tenant: args.tenant.clone(),
        operation: args.operation.clone(),
        key: args.key.clone(),
        status: args.status,
        since: args.since,
        after: None,
        // One more than is shown tells whether there are more.
        limit: args.limit.saturating_add(1),
    };
    let mut rows = store.list_records(&filter).await?;
    let more = rows.len() > args.limit as usize;
    rows.truncate(args.limit as usize);
    if out.json {
        let records: Vec<_> = rows.iter().map(RecordView::brief).collect();
        return out.document(&json!({ "records": records, "more": more }));
    }
    if rows.is_empty() {
        return out.line("No records.");
    }
    let head = ["ID", "STATUS", "ATTEMPT", "TENANT", "OPERATION", "KEY", "CREATED", "ANSWER"];
    let mut table = Table::new(head);
    for row in &rows {
        let answer = row.answer.as_ref().map(|answer| answer.status.as_str().to_owned());
        table.row([
            &row.id.to_string(),
            displayed_status(row),
            &row.attempt.number().to_string(),
            row.scope.tenant.as_str(),
            row.scope.operation.as_str(),
            row.scope.key.as_str(),
            &seconds(&time(row.created_at)),
            or_dash(answer.as_deref()),
        ]);
    }
    table.print_list(out, more)
}

/// One record with its events and its audit rows.
async fn show(store: &dyn Store, id: RecordId, out: &mut Out<'_>) -> Result<Exit, Failure> {
    let Some(detail) = detail::record_detail(store, id).await? else {
        return objection(out, id, &Objection::NotFound);
    };
    if out.json {
        return out.document(&detail);
    }
    print_detail(out, id, &detail)?;
    Ok(Exit::Done)
}

/// Frees a record's key.
async fn release(
    store: &dyn Store,
    args: &ReleaseArgs,
    out: &mut Out<'_>,
) -> Result<Exit, Failure> {
    let id = args.id;
    let Some(row) = store.show_record(id).await? else {
        return objection(out, id, &Objection::NotFound);
    };
    let by = print::operator(args.reason.as_deref());
    let fence = Fence { id: row.id, attempt: row.attempt };
    let released = store.operator_release(fence, args.completed, &by).await;
    if let Err(why) = print::changed(released, &format!("records show {id}"))? {
        return objection(out, id, &why);
    }
    if out.json {
        let was = RecordView::brief(&row);
        return out.document(&json!({ "released": was, "by": by.who, "why": by.why }));
    }
    writeln!(out, "Released record {id}, which was {}.", displayed_status(&row))?;
    print_scope(out, &row)?;
    // Replicas learn of it by looking, see the gateway's `operators`.
    out.line(match row.status {
        Status::Completed => {
            "In a moment no replica has its answer in memory: then the next request under this key executes."
        }
        Status::InProgress | Status::Unknown => "The next request under this key executes.",
    })
}

/// Completes a record with an answer that an operator knows.
async fn complete(
    store: &dyn Store,
    args: &CompleteArgs,
    announce: &dyn Announce,
    out: &mut Out<'_>,
) -> Result<Exit, Failure> {
    let (answer, id) = (answer_of(args)?, args.id);
    let Some(row) = store.show_record(id).await? else {
        return objection(out, id, &Objection::NotFound);
    };
    if row.status == Status::Completed {
        let detail = format!(
            "Record {id} is completed already: its answer is replayed, and nothing was changed."
        );
        return refuse(out, "completed", &detail);
    }
    let (events, retention) = announce.events(&row, &answer);
    let completion = Completion {
        scope: row.scope.clone(),
        fence: Fence { id: row.id, attempt: row.attempt },
        answer,
        retention,
        events,
    };
    let by = print::operator(args.reason.as_deref());
    let completed = store.operator_complete(&completion, &by).await;
    if let Err(why) = print::changed(completed, &format!("records show {id}"))? {
        return objection(out, id, &why);
    }
    say_completed(out, &row, &completion, &by)
}

fn say_completed(
    out: &mut Out<'_>,
    row: &RecordRow,
    done: &Completion,
    by: &Operator,
) -> Result<Exit, Failure> {
    let status = done.answer.status.as_u16();
    if out.json {
        let events: Vec<_> = done
            .events
            .iter()
            .map(|event| json!({ "id": event.id.to_string(), "event_type": event.kind, "sinks": event.sinks }))
            .collect();
        let was = RecordView::brief(row);
        let done = json!({
            "completed": was, "response_status": status, "events": events,
            "retention_seconds": done.retention.as_secs(), "by": by.who, "why": by.why,
        });
        return out.document(&done);
    }
    writeln!(out, "Completed record {}, which was {}.", row.id, displayed_status(row))?;
    print_scope(out, row)?;
    let kept = humantime::format_duration(done.retention);
    writeln!(out, "Answer {status} is replayed from now on, for {kept}.")?;
    for event in &done.events {
        let sinks = event.sinks.join(", ");
        let sinks = if sinks.is_empty() { "no sink" } else { &sinks };
        writeln!(out, "Event {} {} to {}.", event.id, escape(&event.kind), escape(sinks))?;
    }
    let no_type = !done.answer.headers.contains_key(CONTENT_TYPE);
    if no_type && !matches!(&done.answer.body, KeptBody::Whole(body) if body.is_empty()) {
        writeln!(out, "Note: the answer has a body, but no Content-Type header.")?;
    }
    Ok(Exit::Done)
}

fn print_scope(out: &mut dyn Write, row: &RecordRow) -> std::io::Result<()> {
    let Scope { tenant, operation, key } = &row.scope;
    let (tenant, operation, key) = (tenant.as_str(), operation.as_str(), key.as_str());
    print::fields(
        out,
        &[("tenant", Some(tenant)), ("operation", Some(operation)), ("key", Some(key))],
    )
}

/// The answer that the arguments describe.
fn answer_of(args: &CompleteArgs) -> Result<Answer, Failure> {
    let status = StatusCode::from_u16(args.status)
        .ok()
        .filter(|status| (200..=599).contains(&status.as_u16()))
        .ok_or_else(|| {
            usage(format!("--status {}: a final status is from 200 to 599", args.status))
        })?;
    let mut headers = HeaderMap::new();
    let mut names = Vec::new();
    for line in &args.headers {
        let (name, value) = header_of(line)
            .map_err(|wrong| usage(format!("--header '{}': {wrong}", escape(line))))?;
        headers.append(name, value);
        names.push(line.split(':').next().unwrap_or_default().trim());
    }
    let spelling = Spelling::of(&headers, names);
    let body = body_of("--body", &args.body)?;
    if !body.is_empty() && matches!(status.as_u16(), 204 | 205 | 304) {
        return Err(usage(format!(
            "--body: an answer of status {status} has none; give --body ''"
        )));
    }
    Ok(Answer { status, headers, spelling, body: KeptBody::Whole(body) })
}

fn usage(text: String) -> Failure {
    Failure::Usage(text)
}

/// Headers that belong to one connection, or that the gateway makes itself.
fn is_the_gateways(name: &HeaderName) -> bool {
    const NAMES: [&str; 11] = [
        "connection",
        "content-length",
        "idempotent-replayed",
        "keep-alive",
        "proxy-authenticate",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "via",
    ];
    NAMES.contains(&name.as_str()) || name.as_str().starts_with("oncegate-")
}

fn header_of(line: &str) -> Result<(HeaderName, HeaderValue), &'static str> {
    let (name, value) = line.split_once(':').ok_or("write it as 'Name: value'")?;
    let name = HeaderName::from_str(name).map_err(|_| "no header can have this name")?;
    if is_the_gateways(&name) {
        return Err("the gateway sets this header itself");
    }
    let value = value.trim_matches([' ', '\t']);
    let value = HeaderValue::from_str(value).or_else(|_| HeaderValue::from_bytes(value.as_bytes()));
    Ok((name, value.map_err(|_| "no header can have this value: it has control characters")?))
}

/// A body as it was typed: text, or @FILE.
pub(super) fn body_of(flag: &str, text: &str) -> Result<Bytes, Failure> {
    let Some(path) = text.strip_prefix('@') else {
        return Ok(Bytes::copy_from_slice(text.as_bytes()));
    };
    let unreadable = |error| usage(format!("{flag} @{}: {error}", escape(path)));
    let file = std::fs::File::open(path).map_err(unreadable)?;
    let mut bytes = Vec::new();
    // One byte more than allowed shows that there is too much, also of a pipe.
    file.take(BODY_MAX.saturating_add(1)).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > BODY_MAX {
        return Err(usage(format!("{flag} @{}: more than {BODY_MAX} bytes", escape(path))));
    }
    Ok(bytes.into())
}

fn print_detail(out: &mut dyn Write, id: RecordId, detail: &RecordDetail) -> std::io::Result<()> {
    match &detail.record {
        Some(record) => {
            writeln!(out, "Record {id}")?;
            print_record(out, record)?;
            print_unknown(out, detail)?;
        }
        None => writeln!(out, "Record {id} is gone: released by an operator, or expired.")?,
    }
    print_events(out, detail)?;
    print_audit(out, &detail.audit)
}

fn print_unknown(out: &mut dyn Write, detail: &RecordDetail) -> std::io::Result<()> {
    let Some(doubt) = &detail.doubt else { return Ok(()) };
    let often = match (doubt.asked, &doubt.next_ask_at) {
        (asked @ 1.., Some(next)) => {
            format!("asked {asked} times in vain, not again before {next}")
        }
        (_, _) => "not asked about yet".to_owned(),
    };
    writeln!(out, "Unknown since {}, {often}", doubt.since)
}

fn print_record(out: &mut dyn Write, record: &RecordView) -> std::io::Result<()> {
    let lives = if record.owner_lives { "lives" } else { "gone" };
    let owner = format!("{} ({lives})", record.owner);
    let attempt = record.attempt.to_string();
    print::fields(
        out,
        &[
            ("status", Some(record.status)),
            ("attempt", Some(attempt.as_str())),
            ("tenant_id", Some(record.tenant_id.as_str())),
            ("operation", Some(record.operation.as_str())),
            ("key", Some(record.key.as_str())),
            ("request_hash", Some(record.request_hash.as_str())),
            ("caller", record.caller.as_deref()),
            ("owner", Some(owner.as_str())),
            ("created_at", Some(record.created_at.as_str())),
            ("completed_at", record.completed_at.as_deref()),
            ("expires_at", record.expires_at.as_deref()),
        ],
    )?;
    let Some(status) = record.response_status else { return Ok(()) };
    writeln!(out, "Answer {status}")?;
    let Some(whole) = &record.whole else { return Ok(()) };
    for (name, value) in whole.response_headers.iter().flatten() {
        writeln!(out, "  {}: {}", escape(name), escape(value))?;
    }
    writeln!(out)?;
    if let Some(text) = &whole.response_body {
        print_body(out, text)?;
    } else if let Some(base64) = &whole.response_body_base64 {
        writeln!(out, "  (not text: {} characters of base64, see --json)", base64.len())?;
    } else {
        writeln!(out, "  (the body was not kept)")?;
    }
    Ok(())
}

fn print_body(out: &mut dyn Write, text: &str) -> std::io::Result<()> {
    match text.char_indices().nth(BODY_SHOWN) {
        Some((end, _)) => {
            block(out, text.split_at_checked(end).map_or(text, |(shown, _)| shown), "  ")?;
            writeln!(out, "  … (cut; --json shows all)")
        }
        None if text.is_empty() => writeln!(out, "  (no body)"),
        None => block(out, text, "  "),
    }
}

fn print_events(out: &mut dyn Write, detail: &RecordDetail) -> std::io::Result<()> {
    if detail.events.is_empty() {
        return writeln!(out, "No events");
    }
    writeln!(out, "Events")?;
    events_table(&detail.events).print(out, "  ")?;
    if detail.events_cut {
        writeln!(out, "  There are more: `oncegate events list`.")?;
    }
    Ok(())
}

/// Events as `records show` and `events list` print them.
pub(super) fn events_table(events: &[EventView]) -> Table<9> {
    let mut table = Table::new([
        "EVENT",
        "TYPE",
        "SINK",
        "STATUS",
        "ATTEMPTS",
        "AGE",
        "CREATED",
        "SENT",
        "LAST ERROR",
    ]);
    for event in events {
        let sent = event.sent_at.as_deref().map(seconds);
        table.row([
            &event.id,
            &event.event_type,
            if event.sink.is_empty() { "-" } else { &event.sink },
            if event.blocks { "dead, blocks" } else { event.status },
            &event.attempts.to_string(),
            &age(event.age_seconds),
            &seconds(&event.created_at),
            or_dash(sent.as_deref()),
            or_dash(event.last_error.as_deref()),
        ]);
    }
    table
}

/// As a person says it: the largest unit, and the next one.
fn age(seconds: u64) -> String {
    let unit = match seconds {
        0..3600 => 1,
        3600..86_400 => 60,
        86_400.. => 3600,
    };
    humantime::format_duration(Duration::from_secs(seconds / unit * unit)).to_string()
}

fn print_audit(out: &mut dyn Write, audit: &[AuditView]) -> std::io::Result<()> {
    if audit.is_empty() {
        return writeln!(out, "Nothing was done by hand, nothing came too late");
    }
    writeln!(out, "Done by hand, or come too late")?;
    let mut table = Table::new(["AT", "WHO", "ACTION", "WHY"]);
    for row in audit {
        table.row([&seconds(&row.at), &row.who, &row.action, or_dash(row.why.as_deref())]);
    }
    table.print(out, "  ")
}

/// A view's time without its fraction, for tables.
pub(super) fn seconds(time: &str) -> String {
    match time.split_once('.') {
        Some((whole, _)) => format!("{whole}Z"),
        None => time.to_owned(),
    }
}
