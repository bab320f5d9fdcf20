//! What operators do over the admin listener: redeliver and discard events, one or all dead ones of a filter; pause and
//! resume sinks.
//!
//! - A request says what it means in a JSON object, and says so by its `Content-Type`: a browser sends none of it for a page
//!   of somebody else's without asking first, and is refused then.
//! - A field that is not known is refused by name, since a filter that is ignored acts on the wrong events.
//! - The store decides whether an event may be touched, and audits it. The words for "it was left alone" are here, for the
//!   command too.
//!
//! A caller that goes away in the middle of many dead events stops the rest of them; the audit table says how many were done.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request};
use http::HeaderMap;
use http::header::CONTENT_TYPE;
use serde::Deserialize;
use serde_json::{Value, json};
use uuid::Uuid;

use super::query::Query;
use super::sinks::{self, NoChange};
use super::{Json, OPERATOR, Problem, READ_TIMEOUT, State, id_of, query};
use crate::store::{
    self, Chosen, DeadFilter, EventAction, EventFilter, EventRow, EventStatus, Operator, SinkOrder,
    Store, Touched,
};

/// How long an action may take: a great many dead events go in pieces.
const ACT_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a body may be, in bytes.
const BODY_MAX: usize = 16 << 10;
/// Longest name of an operator, in characters.
const WHO_MAX: usize = 200;
/// How many rows of one event (one a sink) are looked at.
const ROWS_MAX: u32 = 500;

/// In the past, as answers name their count.
#[must_use]
pub fn done(action: EventAction) -> &'static str {
    match action {
        EventAction::Redeliver => "redelivered",
        EventAction::Discard => "discarded",
    }
}

/// Does it.
///
/// # Errors
/// The store's.
pub async fn run(
    action: EventAction,
    store: &dyn Store,
    which: &Chosen,
    by: &Operator,
) -> Result<Touched, store::Error> {
    match action {
        EventAction::Redeliver => store.redeliver(which, by).await,
        EventAction::Discard => store.discard(which, by).await,
    }
}

/// What became of an event towards a sink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SinkOutcome {
    /// It had ended, and is owed again.
    Queued,
    /// It was owed, and is due at once.
    Owed,
    /// It is given up.
    Discarded,
    /// It is being delivered: left alone.
    Delivering,
    /// It was delivered: left alone.
    Sent,
    /// It was given up before: left alone.
    AlreadyDiscarded,
    /// No sink wanted it: left alone.
    Unwanted,
    /// It died meanwhile: left alone.
    Dead,
}

impl SinkOutcome {
    fn touched(action: EventAction, was: EventStatus) -> Self {
        match (action, was) {
            (EventAction::Discard, _) => Self::Discarded,
            (EventAction::Redeliver, EventStatus::Pending) => Self::Owed,
            (EventAction::Redeliver, _) => Self::Queued,
        }
    }

    fn left_alone(row: &EventRow) -> Self {
        match row.status {
            EventStatus::Pending => Self::Delivering,
            EventStatus::Sent => Self::Sent,
            EventStatus::Dead => Self::Dead,
            EventStatus::Discarded if row.sink.is_empty() => Self::Unwanted,
            EventStatus::Discarded => Self::AlreadyDiscarded,
        }
    }

    fn is_done(self) -> bool {
        matches!(self, Self::Queued | Self::Owed | Self::Discarded)
    }

    /// For programs. These names are promised.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Owed => "owed",
            Self::Discarded => "discarded",
            Self::Delivering => "delivering",
            Self::Sent => "sent",
            Self::AlreadyDiscarded => "discarded_before",
            Self::Unwanted => "unwanted",
            Self::Dead => "dead",
        }
    }

    fn words(self, action: EventAction) -> &'static str {
        let redeliver = action == EventAction::Redeliver;
        match self {
            Self::Queued => "queued again",
            Self::Owed => "was owed already, due now",
            Self::Discarded => "discarded",
            Self::Delivering => "being delivered right now",
            Self::Sent if redeliver => "delivered before (name the sink to send it again)",
            Self::Sent => "delivered before (what was sent is not discarded)",
            Self::AlreadyDiscarded if redeliver => {
                "discarded before (name the sink to send it all the same)"
            }
            Self::AlreadyDiscarded => "discarded before",
            Self::Unwanted if redeliver => "no sink wanted it (name the sink to send it to)",
            Self::Unwanted => "no sink wanted it",
            Self::Dead => "dead since a moment ago",
        }
    }
}

/// What an action upon one event came to, sink by sink.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActionReport {
    action: EventAction,
    sinks: BTreeMap<String, SinkOutcome>,
}

impl ActionReport {
    /// From what was changed, and from the rows of the event as they stand since. `sink`: only this one was meant.
    #[must_use]
    pub fn of(
        action: EventAction,
        sink: Option<&str>,
        touched: &Touched,
        rows: &[EventRow],
    ) -> Self {
        let meant = rows.iter().filter(|row| sink.is_none_or(|sink| row.sink == sink));
        let left = meant.map(|row| (row.sink.clone(), SinkOutcome::left_alone(row)));
        let done = touched.sinks.iter();
        let done = done.map(|(sink, was)| (sink.clone(), SinkOutcome::touched(action, *was)));
        Self { action, sinks: left.chain(done).collect() }
    }

    /// For programs.
    #[must_use]
    pub fn json(&self) -> Value {
        let sinks = self.sinks.iter();
        sinks.map(|(sink, outcome)| json!({ "sink": sink, "result": outcome.name() })).collect()
    }

    /// For people, a line for each sink.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let line = |(sink, outcome): (&String, &SinkOutcome)| {
            let left = if outcome.is_done() { "" } else { "left alone: " };
            format!("{}: {left}{}", named(sink), outcome.words(self.action))
        };
        self.sinks.iter().map(line).collect()
    }

    /// Why all of it was left alone.
    fn reason(&self) -> &'static str {
        let all =
            |wanted: &[SinkOutcome]| self.sinks.values().all(|outcome| wanted.contains(outcome));
        if self.sinks.values().any(|outcome| *outcome == SinkOutcome::Delivering) {
            "delivering"
        } else if all(&[SinkOutcome::Sent]) {
            "sent"
        } else if all(&[SinkOutcome::AlreadyDiscarded, SinkOutcome::Unwanted]) {
            "discarded"
        } else {
            "left_alone"
        }
    }
}

fn named(sink: &str) -> &str {
    if sink.is_empty() { "-" } else { sink }
}

/// Why nothing was done to an event: a name for programs, and a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActionRefusal {
    /// `not_found`; `delivering` (towards one sink at least), `sent` or `discarded` (towards all of them); or `left_alone`.
    pub name: &'static str,
    /// In words.
    pub detail: String,
}

/// The rows of an event, one a sink.
///
/// # Errors
/// The store's.
pub async fn rows_of(store: &dyn Store, id: Uuid) -> Result<Vec<EventRow>, store::Error> {
    let filter = EventFilter { id: Some(id), limit: ROWS_MAX, ..EventFilter::default() };
    store.list_events(&filter).await
}

/// Why nothing was done to an event, whose rows are these.
#[must_use]
pub fn refusal(
    id: Uuid,
    sink: Option<&str>,
    rows: &[EventRow],
    report: &ActionReport,
) -> ActionRefusal {
    let refuse = |name, detail| ActionRefusal { name, detail };
    if rows.is_empty() {
        return refuse("not_found", format!("There is no event {id}."));
    }
    if let (Some(sink), true) = (sink, report.sinks.is_empty()) {
        return refuse("not_found", format!("Event {id} is not for the sink {sink}."));
    }
    let words = |(sink, outcome): (&String, &SinkOutcome)| {
        format!("{}: {}", named(sink), outcome.words(report.action))
    };
    let all: Vec<String> = report.sinks.iter().map(words).collect();
    refuse(report.reason(), format!("Event {id} was left alone. {}.", all.join("; ")))
}

/// What is wrong with the sink that is named for an action; `None`: nothing. An event may still have rows of a sink that is
/// known nowhere else.
///
/// # Errors
/// The store's.
pub async fn wrong_sink(
    store: &dyn Store,
    configured: &[String],
    event: Option<Uuid>,
    sink: Option<&str>,
) -> Result<Option<String>, store::Error> {
    let Some(name) = sink else { return Ok(None) };
    let wrong = sinks::unknown_sink(store, configured, name).await?;
    if let (Some(_), Some(id)) = (&wrong, event)
        && rows_of(store, id).await?.iter().any(|row| row.sink == name)
    {
        return Ok(None);
    }
    Ok(wrong)
}

/// Who asks, and why.
#[derive(Debug, Default, Deserialize)]
struct RequestedBy {
    who: Option<String>,
    reason: Option<String>,
}

impl RequestedBy {
    fn operator(self) -> Result<Operator, Problem> {
        let who = match self.who {
            None => OPERATOR.to_owned(),
            Some(who) => {
                let fits = !who.trim().is_empty() && who.chars().count() <= WHO_MAX;
                if !fits || who.chars().any(char::is_control) {
                    let wrong = format!("`who`: a name of at most {WHO_MAX} characters");
                    return Err(Problem::Action(vec![wrong]));
                }
                format!("{who} ({OPERATOR})")
            }
        };
        Ok(Operator { who, why: self.reason })
    }
}

/// What may be said about one event.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct EventBody {
    sink: Option<String>,
    #[serde(default)]
    all_sinks: bool,
    who: Option<String>,
    reason: Option<String>,
}

impl EventBody {
    fn chosen(&self, action: EventAction, id: Uuid) -> Result<Chosen, Problem> {
        let wrong = |text: &str| Err(Problem::Action(vec![format!("`all_sinks`: {text}")]));
        match (action, &self.sink, self.all_sinks) {
            (_, Some(_), true) => wrong("not beside `sink`"),
            (EventAction::Discard, _, true) => wrong("what was sent is not discarded"),
            (EventAction::Redeliver, None, false) => Ok(Chosen::NotTaken { id }),
            (_, sink, _) => Ok(Chosen::One { id, sink: sink.clone() }),
        }
    }
}

/// What may be said about dead ones.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct DeadEventsBody {
    status: String,
    sink: Option<String>,
    r#type: Option<String>,
    tenant: Option<String>,
    operation: Option<String>,
    since: Option<String>,
    #[serde(default)]
    dry_run: bool,
    who: Option<String>,
    reason: Option<String>,
}

impl DeadEventsBody {
    fn filter(&self) -> Result<DeadFilter, Problem> {
        let mut errors = Vec::new();
        if self.status != EventStatus::Dead.as_str() {
            errors.push("`status`: only dead events are chosen all at once".to_owned());
        }
        let since = self.since.as_deref().map(query::since).transpose().unwrap_or_else(|wrong| {
            errors.push(format!("`since`: {wrong}"));
            None
        });
        if !errors.is_empty() {
            return Err(Problem::Action(errors));
        }
        Ok(DeadFilter {
            sink: self.sink.clone(),
            kind: self.r#type.clone(),
            tenant: self.tenant.clone(),
            operation: self.operation.clone(),
            since,
        })
    }
}

/// `POST /api/v1/events/{id}/redeliver` and `/discard`.
pub(super) async fn one(
    action: EventAction,
    state: State,
    id: Result<Path<String>, PathRejection>,
    request: Request,
) -> Result<Json, Problem> {
    let id = id_of(id)?;
    let body: EventBody = read(request).await?.unwrap_or_default();
    let which = body.chosen(action, id)?;
    let EventBody { sink, who, reason, .. } = body;
    let by = RequestedBy { who, reason }.operator()?;
    let store = state.store.as_ref();
    known(&state, Some(id), sink.as_deref()).await?;
    let touched = in_time(run(action, store, &which, &by)).await?;
    if touched.count == 0 {
        let rows = super::in_time(rows_of(store, id)).await?;
        let report = ActionReport::of(action, sink.as_deref(), &touched, &rows);
        let ActionRefusal { name, detail } = refusal(id, sink.as_deref(), &rows, &report);
        return Err(if rows.is_empty() {
            Problem::NotFound
        } else {
            Problem::Refused { name, detail, sinks: report.json() }
        });
    }
    // It is done, whether or not the rest can be read.
    let rows = super::in_time(rows_of(store, id)).await.unwrap_or_default();
    let report = ActionReport::of(action, sink.as_deref(), &touched, &rows).json();
    let answer = json!({
        "event": id.to_string(), "sink": sink, "sinks": report, "by": by.who, "why": by.why,
    });
    Ok(Json(counted(answer, done(action), touched.count)))
}

/// Refuses a sink of which neither the configuration nor the store knows.
async fn known(state: &State, event: Option<Uuid>, sink: Option<&str>) -> Result<(), Problem> {
    let wrong = wrong_sink(state.store.as_ref(), &state.sinks, event, sink);
    match super::in_time(wrong).await? {
        Some(wrong) => Err(Problem::Action(vec![format!("`sink`: {wrong}")])),
        None => Ok(()),
    }
}

/// What may be said about a sink.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct SinkBody {
    who: Option<String>,
    reason: Option<String>,
}

/// `POST /api/v1/sinks/{name}/pause` and `/resume`.
pub(super) async fn sink(
    order: SinkOrder,
    state: State,
    name: Result<Path<String>, PathRejection>,
    query: Option<&str>,
    request: Request,
) -> Result<Json, Problem> {
    Query::parse(query, &[]).map_err(Problem::Query)?;
    let Path(name) = name.map_err(|_| Problem::NoSink)?;
    let SinkBody { who, reason } = read(request).await?.unwrap_or_default();
    let by = RequestedBy { who, reason }.operator()?;
    let store = state.store.as_ref();
    match in_time(sinks::operate(store, &state.sinks, &name, order, &by)).await? {
        None => Ok(Json(json!({ "sink": name, "paused": order == SinkOrder::Pause }))),
        Some(NoChange::NotFound) => Err(Problem::NoSink),
        Some(NoChange::Already) => Err(Problem::Already),
    }
}

/// `POST /api/v1/events/redeliver` and `/discard`.
pub(super) async fn dead(
    action: EventAction,
    state: State,
    request: Request,
) -> Result<Json, Problem> {
    let body: Option<DeadEventsBody> = read(request).await?;
    let missing = || Problem::Action(vec!["`status`: must be \"dead\"".to_owned()]);
    let body = body.ok_or_else(missing)?;
    let filter = body.filter()?;
    known(&state, None, filter.sink.as_deref()).await?;
    let store = state.store.as_ref();
    if body.dry_run {
        let count = super::in_time(store.count_dead(&filter)).await?;
        return Ok(Json(counted(json!({ "dry_run": true }), done(action), count)));
    }
    let by = RequestedBy { who: body.who, reason: body.reason }.operator()?;
    let touched = in_time(run(action, store, &Chosen::Dead(filter), &by)).await?;
    Ok(Json(counted(json!({ "by": by.who, "why": by.why }), done(action), touched.count)))
}

fn counted(mut answer: Value, name: &str, count: u64) -> Value {
    if let Some(fields) = answer.as_object_mut() {
        fields.insert(name.to_owned(), count.into());
    }
    answer
}

/// The body, read. `None`: it is empty.
async fn read<T: for<'a> Deserialize<'a>>(request: Request) -> Result<Option<T>, Problem> {
    if !is_json(request.headers()) {
        let wrong = "send it as `Content-Type: application/json`".to_owned();
        return Err(Problem::Action(vec![wrong]));
    }
    let reading = axum::body::to_bytes(request.into_body(), BODY_MAX);
    let Ok(Ok(bytes)) = tokio::time::timeout(READ_TIMEOUT, reading).await else {
        let wrong = format!("it is longer than {BODY_MAX} bytes, broke off, or was too slow");
        return Err(Problem::Action(vec![wrong]));
    };
    if bytes.trim_ascii().is_empty() {
        return Ok(None);
    }
    let read = serde_json::from_slice(&bytes);
    read.map(Some).map_err(|error| Problem::Action(vec![error.to_string()]))
}

fn is_json(headers: &HeaderMap) -> bool {
    let mut lines = headers.get_all(CONTENT_TYPE).iter();
    let (Some(line), None) = (lines.next(), lines.next()) else { return false };
    let kind = line.to_str().unwrap_or_default();
    let kind = kind.split_once(';').map_or(kind, |(kind, _)| kind);
    kind.trim().eq_ignore_ascii_case("application/json")
}

/// Waits for the store, but not for ever. An end that is not known is said as that.
async fn in_time<T>(acting: impl Future<Output = Result<T, store::Error>>) -> Result<T, Problem> {
    match tokio::time::timeout(ACT_TIMEOUT, acting).await {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(store::Error::InDoubt(cause))) => {
            tracing::warn!(%cause, "nobody knows whether an operator's action was done");
            Err(Problem::InDoubt)
        }
        Ok(Err(error)) => super::in_time(std::future::ready(Err(error))).await,
        Err(_) => Err(Problem::InDoubt),
    }
}
