//! The read pages of the admin listener: probes, metrics, records, events, sinks, tasks, and explain.

use std::time::Duration;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, RawQuery, Request, State as Extract};
use axum::response::{IntoResponse as _, Response};
use futures_util::FutureExt as _;
use http::header::{CONTENT_TYPE, VARY};
use http::{HeaderMap, StatusCode, Uri};
use serde_json::json;

use super::answer::{Json, Problem, READ_TIMEOUT, as_json, id_of, in_time};
use super::detail::{self, EventDetail, RecordDetail};
use super::guard::no_operator;
use super::query::{self, Query};
use super::sinks::{self, SinkPage};
use super::state::State;
use super::tasks::TaskPage;
use super::view::{EventPage, EventView, RecordPage, RecordView};
use super::{action, explain};
use crate::record::RecordId;
use crate::telemetry::{Exposition, causes};

/// How long `/readyz` waits for the store.
const PING_TIMEOUT: Duration = Duration::from_secs(1);
/// The text before the reason of the last failed try to connect.
const UNREACHED: &str = "the database cannot be reached";
/// Largest body of a question about a request, in bytes.
const QUESTION_MAX: usize = 8 << 20;

pub(super) async fn readyz(
    Extract(state): Extract<State>,
    uri: Uri,
    headers: HeaderMap,
) -> Response {
    let (store, cause) = match tokio::time::timeout(PING_TIMEOUT, state.store.ping()).await {
        Ok(Ok(())) => ("ok", None),
        Ok(Err(error)) => ("unavailable", Some(causes(&error))),
        // The store tries to connect for longer than a probe waits. It knows why the last try failed.
        Err(_) => match state.store.unreached().now_or_never() {
            Some(Ok(Some(why))) => ("unavailable", Some(format!("{UNREACHED}: {why}"))),
            Some(Ok(None) | Err(_)) | None => ("no answer in time", None),
        },
    };
    let ailing = crate::tasks::ailing();
    let ready = state.ready.is_serving() && store == "ok" && ailing.is_none();
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let mut body = json!({ "ready": ready, "gateway": state.ready.as_str(), "store": store });
    // The reason names hosts and roles, so only operators see it.
    let cause = cause.filter(|_| no_operator(&state, &uri, &headers).is_none());
    let more = [("cause", cause), ("not_running", ailing.map(str::to_owned))];
    if let Some(fields) = body.as_object_mut() {
        let told = more.into_iter().filter_map(|(name, text)| Some((name, text?)));
        fields.extend(told.map(|(name, text)| (name.to_owned(), text.into())));
    }
    as_json(status, "application/json", &body)
}

pub(super) async fn metrics(Extract(state): Extract<State>, headers: HeaderMap) -> Response {
    let exposition = Exposition::accepted(&headers);
    let about = [(CONTENT_TYPE, exposition.content_type()), (VARY, "accept")];
    (about, state.metrics.render(exposition)).into_response()
}

pub(super) async fn config(Extract(state): Extract<State>) -> Json {
    Json(json!({ "version": state.version, "operations": &*state.operations }))
}

pub(super) async fn list_tasks(RawQuery(query): RawQuery) -> Result<Json<TaskPage>, Problem> {
    Query::parse(query.as_deref(), &[]).map_err(Problem::Query)?;
    Ok(Json(TaskPage::now()))
}

pub(super) async fn list_records(
    Extract(state): Extract<State>,
    RawQuery(query): RawQuery,
) -> Result<Json<RecordPage>, Problem> {
    let mut filter = Query::parse(query.as_deref(), &query::RECORD_NAMES)
        .and_then(|query| query.records())
        .map_err(Problem::Query)?;
    let asked = filter.limit as usize;
    // One row more than the page, to know whether there is another page.
    filter.limit = filter.limit.saturating_add(1);
    let mut rows = in_time(state.store.list_records(&filter)).await?;
    let more = rows.len() > asked;
    rows.truncate(asked);
    let next = rows.last().filter(|_| more).map(query::after_record);
    Ok(Json(RecordPage { records: rows.iter().map(RecordView::brief).collect(), next }))
}

pub(super) async fn list_events(
    Extract(state): Extract<State>,
    RawQuery(query): RawQuery,
) -> Result<Json<EventPage>, Problem> {
    let mut filter = Query::parse(query.as_deref(), &query::EVENT_NAMES)
        .and_then(|query| query.events())
        .map_err(Problem::Query)?;
    let asked = filter.limit as usize;
    filter.limit = filter.limit.saturating_add(1);
    let mut rows = in_time(state.store.list_events(&filter)).await?;
    if rows.is_empty()
        && let Some(wrong) = in_time(action::wrong_sink(
            state.store.as_ref(),
            &state.sinks,
            None,
            filter.sink.as_deref(),
        ))
        .await?
    {
        return Err(Problem::Query(vec![format!("`sink`: {wrong}")]));
    }
    let more = rows.len() > asked;
    rows.truncate(asked);
    let next = rows.last().filter(|_| more).map(query::after_event);
    Ok(Json(EventPage { events: rows.iter().map(EventView::brief).collect(), next }))
}

pub(super) async fn show_record(
    Extract(state): Extract<State>,
    id: Result<Path<String>, PathRejection>,
    RawQuery(query): RawQuery,
) -> Result<Json<RecordDetail>, Problem> {
    Query::parse(query.as_deref(), &[]).map_err(Problem::Query)?;
    let id: RecordId = id_of(id)?.into();
    let detail = in_time(detail::record_detail(state.store.as_ref(), id)).await?;
    detail.map(Json).ok_or(Problem::NotFound)
}

pub(super) async fn show_event(
    Extract(state): Extract<State>,
    id: Result<Path<String>, PathRejection>,
    RawQuery(query): RawQuery,
) -> Result<Json<EventDetail>, Problem> {
    Query::parse(query.as_deref(), &[]).map_err(Problem::Query)?;
    let detail = in_time(detail::event_detail(state.store.as_ref(), id_of(id)?)).await?;
    detail.map(Json).ok_or(Problem::NotFound)
}

pub(super) async fn list_sinks(
    Extract(state): Extract<State>,
    RawQuery(query): RawQuery,
) -> Result<Json<SinkPage>, Problem> {
    Query::parse(query.as_deref(), &[]).map_err(Problem::Query)?;
    in_time(sinks::list(state.store.as_ref(), &state.sinks)).await.map(Json)
}

pub(super) async fn explain_request(
    Extract(state): Extract<State>,
    RawQuery(query): RawQuery,
    request: Request,
) -> Result<Json<explain::ExplainResponse>, Problem> {
    Query::parse(query.as_deref(), &[]).map_err(Problem::Query)?;
    let question = async {
        let bytes = axum::body::to_bytes(request.into_body(), QUESTION_MAX).await;
        let bytes =
            bytes.map_err(|_| format!("it is longer than {QUESTION_MAX} bytes, or broke off"))?;
        let question: explain::ExplainRequest =
            serde_json::from_slice(&bytes).map_err(|error| error.to_string())?;
        question.read()
    };
    let asked = tokio::time::timeout(READ_TIMEOUT, question)
        .await
        .unwrap_or_else(|_| Err("it did not come in time".to_owned()))
        .map_err(Problem::Question)?;
    let Some(by) = state.explain.as_deref() else { return Err(Problem::NoSuchPage) };
    let answer = async {
        match explain::answer(by, Some(state.store.as_ref()), asked).await {
            Ok(answer) => Ok(Some(answer)),
            Err(explain::ExplainError::NoRecord(_)) => Ok(None),
            Err(explain::ExplainError::Store(error)) => Err(error),
        }
    };
    in_time(answer).await?.map(Json).ok_or(Problem::NotFound)
}
