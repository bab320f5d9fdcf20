//! `oncegate records list|show|release|complete`: show records, and resolve them by hand.
//!
//! [`resolve`] makes the changes. This file prints the results.

use std::io::{Read as _, Write};
use std::time::Duration;

use bytes::Bytes;
use clap::{Args, Subcommand};
use http::header::CONTENT_TYPE;
use serde_json::json;

use super::print::{self, Exit, Failure, Out, Table, block, escape, objection, or_dash, refuse};
use crate::admin::detail::{self, RecordDetail};
use crate::admin::query;
use crate::admin::resolve::{
    self, Announce, AnswerMistake, CompleteReport, CompletedByHand, ReleaseReport, Target,
};
use crate::admin::view::{AuditView, EventView, RecordView, displayed_status, time};
use crate::record::{Answer, KeptBody, RecordId, Scope, Status};
use crate::store::{Objection, Operator, RecordFilter, RecordRow, Store};
use crate::telemetry::log;

/// Largest body that a command takes, in bytes.
const BODY_MAX: u64 = resolve::BODY_MAX as u64;
/// How much of a body `show` prints, in characters; `--json` shows all of it.
const BODY_SHOWN: usize = 4096;

/// `oncegate records …`
#[derive(Debug, Subcommand)]
pub enum Records {
    /// List records, newest first
    List(ListArgs),
    /// Show one record: its answer, its events, and the audit rows
    Show(ShowArgs),
    /// Release a record that did not execute: its key is free again
    Release(ReleaseArgs),
    /// Complete a record that executed, with the answer that callers get
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
    /// Also release a completed record: its answer is deleted, and the next request executes again
    #[arg(long)]
    pub completed: bool,
    /// Why, for the audit table
    #[arg(long)]
    pub reason: Option<String>,
}

/// Which record is completed, and with which answer.
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

/// Runs the command that was typed.
///
/// # Errors
/// [`Failure::Usage`] if the arguments are no valid answer; an error of the store or of the output.
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
        // One more than is shown, to know whether there are more.
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
    let by = print::operator(args.reason.as_deref());
    let target = Target { id, attempt: None };
    let released = resolve::release(store, target, args.completed, &by).await;
    let row = match print::changed(released, &format!("records show {id}"))? {
        Ok(row) => row,
        Err(why) => return objection(out, id, &why),
    };
    if out.json {
        return out.document(&ReleaseReport::of(&row, &by));
    }
    writeln!(out, "Released record {id}, which was {}.", displayed_status(&row))?;
    print_scope(out, &row)?;
    // Replicas find the change by polling, see the gateway's `operators`.
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
    let by = print::operator(args.reason.as_deref());
    let target = Target { id, attempt: None };
    let completed = resolve::complete(store, target, answer, announce, &by).await;
    match print::changed(completed, &format!("records show {id}"))? {
        Ok(done) => say_completed(out, &done, &by),
        Err(Objection::IsCompleted) => {
            let detail = format!(
                "Record {id} is completed already: its answer is replayed, and nothing was changed."
            );
            refuse(out, "completed", &detail)
        }
        Err(why) => objection(out, id, &why),
    }
}

fn say_completed(
    out: &mut Out<'_>,
    done: &CompletedByHand,
    by: &Operator,
) -> Result<Exit, Failure> {
    let report = CompleteReport::of(done, by);
    let CompletedByHand { was: row, completion: done, failed } = done;
    if *failed > 0 {
        let all = done.events.len();
        let note = format!(
            "oncegate: {failed} of {all} events say only why their template failed with this answer"
        );
        log::say(&note);
    }
    let status = done.answer.status.as_u16();
    if out.json {
        return out.document(&report);
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
    let mut lines = Vec::with_capacity(args.headers.len());
    for line in &args.headers {
        let pair = line.split_once(':');
        lines.push(pair.ok_or_else(|| wrong_header(line, "write it as 'Name: value'"))?);
    }
    let body = body_of("--body", &args.body)?;
    resolve::answer(args.status, &lines, body).map_err(|mistake| match mistake {
        AnswerMistake::Status => {
            usage(format!("--status {}: a final status is from 200 to 599", args.status))
        }
        AnswerMistake::Header(place, why) => {
            wrong_header(args.headers.get(place).map_or("", String::as_str), why)
        }
        AnswerMistake::Body(status) => usage(format!(
            "--body: an answer of status {} has none; give --body ''",
            status.as_u16()
        )),
    })
}

fn wrong_header(line: &str, why: &str) -> Failure {
    usage(format!("--header '{}': {why}", escape(line)))
}

fn usage(text: String) -> Failure {
    Failure::Usage(text)
}

/// A body as it was typed: text, or @FILE.
pub(super) fn body_of(flag: &str, text: &str) -> Result<Bytes, Failure> {
    let Some(path) = text.strip_prefix('@') else {
        return Ok(Bytes::copy_from_slice(text.as_bytes()));
    };
    let unreadable = |error| usage(format!("{flag} @{}: {error}", escape(path)));
    let file = std::fs::File::open(path).map_err(unreadable)?;
    let mut bytes = Vec::new();
    // One byte more than allowed, to notice a body that is too large, also from a pipe.
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

/// The largest unit and the next one, such as "3h 5m".
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
