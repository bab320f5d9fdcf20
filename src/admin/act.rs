//! Actions of the admin listener: release and complete records; redeliver and discard one event, or all dead events of a
//! filter; pause and resume sinks.
//!
//! - The body is a JSON object with the `Content-Type` of JSON. A browser sends that type for a foreign page only after a
//!   preflight request, which is refused.
//! - An unknown field is refused by name, because an ignored filter would change the wrong events.
//!
//! If the client closes the connection during an action on many dead events, the action stops. The audit table has the number
//! of events that were changed.

pub(super) mod records;

use std::future::Future;
use std::time::Duration;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, RawQuery, Request, State as Extract};
use http::HeaderMap;
use http::header::CONTENT_TYPE;
use serde::Deserialize;
use serde_json::{Value, json};
use uuid::Uuid;

use super::action::{ActionRefusal, ActionReport, done, refusal, run, wrong_sink};
use super::answer::{self, Json, Problem, READ_TIMEOUT, id_of};
use super::detail::event_rows;
use super::query::{self, Query};
use super::sinks::{self, NoChange};
use super::state::State;
use crate::store::{self, Chosen, DeadFilter, EventAction, EventStatus, Operator, SinkOrder};

/// The name in the audit table of an operator who gives none.
pub const OPERATOR: &str = "admin listener";

/// How long an action may take. It is long, because many dead events are changed in batches.
const ACT_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a body may be, in bytes.
const BODY_MAX: usize = 16 << 10;
/// Longest name of an operator, in characters.
const WHO_MAX: usize = 200;
/// Longest reason, in characters.
const REASON_MAX: usize = 4000;

/// Who acts, and why.
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
        let reason = self.reason.as_deref().unwrap_or_default();
        let odd = |c: char| c.is_control() && !matches!(c, '\n' | '\r' | '\t');
        if reason.chars().count() > REASON_MAX || reason.chars().any(odd) {
            let wrong = format!("`reason`: a text of at most {REASON_MAX} characters");
            return Err(Problem::Action(vec![wrong]));
        }
        Ok(Operator { who, why: self.reason })
    }
}

/// The fields of an action on one event.
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
        if has_control(self.sink.as_deref()) {
            return Err(Problem::Action(vec!["`sink` has a control character".to_owned()]));
        }
        match (action, &self.sink, self.all_sinks) {
            (_, Some(_), true) => wrong("not beside `sink`"),
            (EventAction::Discard, _, true) => wrong("what was sent is not discarded"),
            (EventAction::Redeliver, None, false) => Ok(Chosen::NotTaken { id }),
            (_, sink, _) => Ok(Chosen::One { id, sink: sink.clone() }),
        }
    }
}

/// The fields of an action on dead events.
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
            errors.push("`status`: only `dead` is allowed".to_owned());
        }
        let since = self.since.as_deref().map(query::since).transpose().unwrap_or_else(|wrong| {
            errors.push(format!("`since`: {wrong}"));
            None
        });
        let texts = [
            ("sink", &self.sink),
            ("type", &self.r#type),
            ("tenant", &self.tenant),
            ("operation", &self.operation),
        ];
        for (name, _) in texts.iter().filter(|(_, text)| has_control(text.as_deref())) {
            errors.push(format!("`{name}` has a control character"));
        }
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

/// Postgres keeps no text with a NUL, and nothing that is filtered by has any other one.
fn has_control(text: Option<&str>) -> bool {
    text.is_some_and(|text| text.chars().any(char::is_control))
}

/// `POST /api/v1/events/{id}/redeliver` and `/discard`.
pub(super) async fn one(
    action: EventAction,
    Extract(state): Extract<State>,
    id: Result<Path<String>, PathRejection>,
    request: Request,
) -> Result<Json, Problem> {
    let id = id_of(id)?;
    let body: EventBody = read(request, BODY_MAX).await?.unwrap_or_default();
    let which = body.chosen(action, id)?;
    let EventBody { sink, who, reason, .. } = body;
    let by = RequestedBy { who, reason }.operator()?;
    let store = state.store.as_ref();
    known(&state, Some(id), sink.as_deref()).await?;
    let touched = acted_in_time(run(action, store, &which, &by)).await?;
    if touched.count == 0 {
        let rows = answer::in_time(event_rows(store, id)).await?;
        let report = ActionReport::of(action, sink.as_deref(), &touched, &rows);
        let ActionRefusal { name, detail } = refusal(id, sink.as_deref(), &rows, &report);
        return Err(if rows.is_empty() {
            Problem::NotFound
        } else {
            Problem::Refused { name, detail, more: json!({ "sinks": report.json() }) }
        });
    }
    // The change is done, even if the rest cannot be read.
    let rows = answer::in_time(event_rows(store, id)).await.unwrap_or_default();
    let report = ActionReport::of(action, sink.as_deref(), &touched, &rows).json();
    let answer = json!({
        "event": id.to_string(), "sink": sink, "sinks": report, "by": by.who, "why": by.why,
    });
    Ok(Json(counted(answer, done(action), touched.count)))
}

/// Refuses a sink that neither the configuration nor the store knows.
async fn known(state: &State, event: Option<Uuid>, sink: Option<&str>) -> Result<(), Problem> {
    let wrong = wrong_sink(state.store.as_ref(), &state.sinks, event, sink);
    match answer::in_time(wrong).await? {
        Some(wrong) => Err(Problem::Action(vec![format!("`sink`: {wrong}")])),
        None => Ok(()),
    }
}

/// The fields of an action on a sink.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct SinkBody {
    who: Option<String>,
    reason: Option<String>,
}

/// `POST /api/v1/sinks/{name}/pause` and `/resume`.
pub(super) async fn sink(
    order: SinkOrder,
    Extract(state): Extract<State>,
    name: Result<Path<String>, PathRejection>,
    RawQuery(query): RawQuery,
    request: Request,
) -> Result<Json, Problem> {
    Query::parse(query.as_deref(), &[]).map_err(Problem::Query)?;
    let Path(name) = name.map_err(|_| Problem::NoSink)?;
    let SinkBody { who, reason } = read(request, BODY_MAX).await?.unwrap_or_default();
    let by = RequestedBy { who, reason }.operator()?;
    let store = state.store.as_ref();
    match acted_in_time(sinks::operate(store, &state.sinks, &name, order, &by)).await? {
        None => Ok(Json(json!({ "sink": name, "paused": order == SinkOrder::Pause }))),
        Some(NoChange::NotFound) => Err(Problem::NoSink),
        Some(NoChange::Already) => Err(Problem::Already),
    }
}

/// `POST /api/v1/events/redeliver` and `/discard`.
pub(super) async fn dead(
    action: EventAction,
    Extract(state): Extract<State>,
    request: Request,
) -> Result<Json, Problem> {
    let body: Option<DeadEventsBody> = read(request, BODY_MAX).await?;
    let missing = || Problem::Action(vec!["`status`: must be \"dead\"".to_owned()]);
    let body = body.ok_or_else(missing)?;
    let filter = body.filter()?;
    known(&state, None, filter.sink.as_deref()).await?;
    let store = state.store.as_ref();
    if body.dry_run {
        let count = answer::in_time(store.count_dead(&filter)).await?;
        return Ok(Json(counted(json!({ "dry_run": true }), done(action), count)));
    }
    let by = RequestedBy { who: body.who, reason: body.reason }.operator()?;
    let touched = acted_in_time(run(action, store, &Chosen::Dead(filter), &by)).await?;
    Ok(Json(counted(json!({ "by": by.who, "why": by.why }), done(action), touched.count)))
}

fn counted(mut answer: Value, name: &str, count: u64) -> Value {
    if let Some(fields) = answer.as_object_mut() {
        fields.insert(name.to_owned(), count.into());
    }
    answer
}

/// Reads the body. `None`: it is empty.
async fn read<T: for<'a> Deserialize<'a>>(
    request: Request,
    max: usize,
) -> Result<Option<T>, Problem> {
    if !is_json(request.headers()) {
        let wrong = "send it as `Content-Type: application/json`".to_owned();
        return Err(Problem::Action(vec![wrong]));
    }
    let reading = axum::body::to_bytes(request.into_body(), max);
    let Ok(Ok(bytes)) = tokio::time::timeout(READ_TIMEOUT, reading).await else {
        let wrong = format!("it is longer than {max} bytes, broke off, or was too slow");
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

/// Waits for the store for a bounded time. If the end of the action is not known, the answer says so.
async fn acted_in_time<T>(
    acting: impl Future<Output = Result<T, store::Error>>,
) -> Result<T, Problem> {
    match tokio::time::timeout(ACT_TIMEOUT, acting).await {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(store::Error::InDoubt(cause))) => {
            tracing::warn!(%cause, "it is not known whether an operator's action was done");
            Err(Problem::InDoubt)
        }
        Ok(Err(error)) => answer::in_time(std::future::ready(Err(error))).await,
        Err(_) => Err(Problem::InDoubt),
    }
}
