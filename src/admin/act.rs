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
    Store,
};

/// How long an action may take: a great many dead events go in pieces.
const ACT_TIMEOUT: Duration = Duration::from_secs(60);
/// How long what is asked may be, in bytes.
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

/// Does it; how many rows were changed.
///
/// # Errors
/// The store's.
pub async fn run(
    action: EventAction,
    store: &dyn Store,
    which: &Chosen,
    by: &Operator,
) -> Result<u64, store::Error> {
    match action {
        EventAction::Redeliver => store.redeliver(which, by).await,
        EventAction::Discard => store.discard(which, by).await,
    }
}

/// Why nothing was done to an event: a name for programs, and a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// `not_found`, `delivering`, `sent` or `discarded`.
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
pub fn refusal(action: EventAction, id: Uuid, sink: Option<&str>, rows: &[EventRow]) -> Refusal {
    let refuse = |name, detail| Refusal { name, detail };
    if rows.is_empty() {
        return refuse("not_found", format!("There is no event {id}."));
    }
    let towards: Vec<_> =
        rows.iter().filter(|row| sink.is_none_or(|sink| row.sink == sink)).collect();
    if let (Some(sink), true) = (sink, towards.is_empty()) {
        return refuse("not_found", format!("Event {id} is not for the sink {sink}."));
    }
    let all = |status| towards.iter().all(|row| row.status == status);
    let any = |status| towards.iter().any(|row| row.status == status);
    match action {
        EventAction::Redeliver if sink.is_none() && all(EventStatus::Discarded) => {
            let why = "was for no sink, or is discarded: name the sink to send it to";
            refuse("discarded", format!("Event {id} {why}."))
        }
        EventAction::Discard if all(EventStatus::Discarded) => {
            refuse("discarded", format!("Event {id} is discarded already."))
        }
        EventAction::Discard if any(EventStatus::Sent) && !any(EventStatus::Pending) => {
            refuse("sent", format!("Event {id} was delivered: what was sent is not discarded."))
        }
        EventAction::Redeliver | EventAction::Discard => {
            let detail = format!("Event {id} is being delivered right now: it was left alone.");
            refuse("delivering", detail)
        }
    }
}

/// Who asks, and why.
#[derive(Debug, Default, Deserialize)]
struct By {
    who: Option<String>,
    reason: Option<String>,
}

impl By {
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
struct OneEvent {
    sink: Option<String>,
    who: Option<String>,
    reason: Option<String>,
}

/// What may be said about dead ones.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct DeadEvents {
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

impl DeadEvents {
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
    let OneEvent { sink, who, reason } = read(request).await?.unwrap_or_default();
    let by = By { who, reason }.operator()?;
    let which = Chosen::One { id, sink: sink.clone() };
    let store = state.store.as_ref();
    let count = in_time(run(action, store, &which, &by)).await?;
    if count == 0 {
        let rows = super::in_time(rows_of(store, id)).await?;
        let Refusal { name, detail } = refusal(action, id, sink.as_deref(), &rows);
        return Err(if rows.is_empty() {
            Problem::NotFound
        } else {
            Problem::Refused { name, detail }
        });
    }
    let answer = json!({ "event": id.to_string(), "sink": sink, "by": by.who, "why": by.why });
    Ok(Json(counted(answer, done(action), count)))
}

/// What may be said about a sink.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct OneSink {
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
    let OneSink { who, reason } = read(request).await?.unwrap_or_default();
    let by = By { who, reason }.operator()?;
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
    let asked: Option<DeadEvents> = read(request).await?;
    let missing = || Problem::Action(vec!["`status`: must be \"dead\"".to_owned()]);
    let asked = asked.ok_or_else(missing)?;
    let filter = asked.filter()?;
    let store = state.store.as_ref();
    if asked.dry_run {
        let count = super::in_time(store.count_dead(&filter)).await?;
        return Ok(Json(counted(json!({ "dry_run": true }), done(action), count)));
    }
    let by = By { who: asked.who, reason: asked.reason }.operator()?;
    let count = in_time(run(action, store, &Chosen::Dead(filter), &by)).await?;
    Ok(Json(counted(json!({ "by": by.who, "why": by.why }), done(action), count)))
}

fn counted(mut answer: Value, name: &str, count: u64) -> Value {
    if let Some(fields) = answer.as_object_mut() {
        fields.insert(name.to_owned(), count.into());
    }
    answer
}

/// What is asked. `None`: an empty body.
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
