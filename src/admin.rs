//! The operators' listener: probes, metrics, records, events and sinks as JSON, and what is done to events and sinks by hand.
//!
//! - It is a listener of its own: nothing here is reachable on the port that callers use.
//! - `/healthz` says that the process runs, `/readyz` that it may be sent requests. Both are open to everybody and say
//!   nothing about callers; why the store is away is for operators. Everything else needs the bearer token; where none is
//!   configured (loopback only, the configuration sees to that), it needs a `Host` that names this machine, so that a web page
//!   that points its own name at 127.0.0.1 reads nothing.
//! - Every wait for the store is bounded: a store that hangs makes an answer 503, never a request that hangs.
//! - A query parameter that is not known is refused by name, since a filter that is ignored shows the wrong records.
//! - Keys, tenants and bodies are shown, escaped, and never logged.
//!
//! Actions on events and sinks are POST routes behind the same `guard` (see `act`); those on records are commands. It also
//! refuses a foreign `Origin`, since a browser sends questions for other pages without their reading the answer. When the
//! process dies here, nothing is lost: no state is kept.

pub mod act;
pub mod explain;
pub(crate) mod query;
pub mod sinks;
pub mod tasks;
pub mod view;

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use axum::Router;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, RawQuery, Request};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use http::header::{AUTHORIZATION, CACHE_CONTROL, CONTENT_TYPE, HOST, ORIGIN, WWW_AUTHENTICATE};
use http::{HeaderMap, HeaderValue, StatusCode, Uri};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use serde::Serialize;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use self::tasks::TaskPage;
use crate::explain::Explain;
use crate::record::RecordId;
use crate::store::{self, EventAction, SinkOrder, Store};
use crate::telemetry::{Metrics, causes};
use query::Query;
use sinks::SinkPage;
use view::{EventDetail, EventPage, EventView, RecordDetail, RecordPage, RecordView};

/// How long `/readyz` waits for the store.
const PING_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a list or a record may take the store.
const READ_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a caller may take for its headers.
const HEADER_TIMEOUT: Duration = Duration::from_secs(2);
/// How long open answers may still take once the listener stops.
const STOP_GRACE: Duration = Duration::from_secs(5);
/// How many connections are served at once; one more waits.
const CONNECTIONS_MAX: usize = 512;
/// How long a question about a request may be, in bytes.
const QUESTION_MAX: usize = 8 << 20;

/// Who acts here, in the audit table: whoever has the token.
pub const OPERATOR: &str = "admin listener";

/// What the admin listener shows, and to whom.
#[derive(Clone)]
pub struct State {
    /// Where records and events are read.
    pub store: Arc<dyn Store>,
    /// What `/metrics` shows.
    pub metrics: Arc<Metrics>,
    /// Whether this process may be sent requests.
    pub ready: Readiness,
    /// What a caller must send; `None` only on a loopback listener.
    pub token: Option<Token>,
    /// The program's version.
    pub version: &'static str,
    /// The operations that the configuration names.
    pub operations: Arc<[String]>,
    /// The sinks that the configuration names.
    pub sinks: Arc<[String]>,
    /// Who says what is made of a request; `None` in a process that takes none.
    pub explain: Option<Arc<dyn Explain>>,
}

/// Where the process stands between its start and its end. All clones see one value.
#[derive(Clone, Debug, Default)]
pub struct Readiness(Arc<AtomicU8>);

impl Readiness {
    const STARTING: u8 = 0;
    const SERVING: u8 = 1;
    const DRAINING: u8 = 2;

    /// Requests are accepted from now on. Changes nothing once draining.
    pub fn serving(&self) {
        // Err: it serves or drains already, and draining is final.
        self.0
            .compare_exchange(Self::STARTING, Self::SERVING, Ordering::Relaxed, Ordering::Relaxed)
            .ok();
    }

    /// No new requests are accepted from now on. Final.
    pub fn draining(&self) {
        self.0.store(Self::DRAINING, Ordering::Relaxed);
    }

    fn is_serving(&self) -> bool {
        self.0.load(Ordering::Relaxed) == Self::SERVING
    }

    fn as_str(&self) -> &'static str {
        match self.0.load(Ordering::Relaxed) {
            Self::STARTING => "starting",
            Self::SERVING => "serving",
            _ => "draining",
        }
    }
}

/// The bearer token, kept as its hash so that it is neither shown nor compared byte by byte.
#[derive(Clone)]
pub struct Token([u8; 32]);

impl Token {
    /// The token that callers must send. `None` where it is empty or could not stand in a header.
    #[must_use]
    pub fn new(secret: &str) -> Option<Self> {
        let fits = !secret.is_empty() && secret.bytes().all(|b| b.is_ascii_graphic());
        fits.then(|| Self(Sha256::digest(secret.as_bytes()).into()))
    }

    /// Whether this is the token, in a time that does not tell how much of it was right.
    fn is(&self, sent: &[u8]) -> bool {
        let sent: [u8; 32] = Sha256::digest(sent).into();
        self.0.ct_eq(&sent).into()
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// All routes of the admin listener.
pub fn router(state: State) -> Router {
    let open =
        Router::new().route("/healthz", get(|| async { "ok\n" })).route("/readyz", get(readyz));
    let guarded = Router::new()
        .route("/metrics", get(metrics))
        .route("/api/v1/config", get(config))
        .route("/api/v1/records", get(list_records))
        .route("/api/v1/records/{id}", get(show_record))
        .route("/api/v1/events", get(list_events))
        .route("/api/v1/events/{id}", get(show_event))
        .route("/api/v1/events/{id}/redeliver", post(redeliver_one))
        .route("/api/v1/events/{id}/discard", post(discard_one))
        .route("/api/v1/events/redeliver", post(redeliver_dead))
        .route("/api/v1/events/discard", post(discard_dead))
        .route("/api/v1/sinks", get(list_sinks))
        .route("/api/v1/sinks/{name}/pause", post(pause_sink))
        .route("/api/v1/sinks/{name}/resume", post(resume_sink))
        .route("/api/v1/tasks", get(list_tasks))
        .route("/api/v1/explain", post(explain_request))
        .fallback(|| async { Problem::NoSuchPage })
        .layer(middleware::from_fn_with_state(state.clone(), guard));
    open.merge(guarded)
        .method_not_allowed_fallback(|| async { Problem::MethodNotAllowed })
        .layer(middleware::map_response(harden))
        .with_state(state)
}

/// Serves until `stop`, then lets open answers finish for a short while.
pub async fn serve(listener: Arc<TcpListener>, router: Router, stop: CancellationToken) {
    let mut connections = JoinSet::new();
    loop {
        let full = connections.len() >= CONNECTIONS_MAX;
        tokio::select! {
            () = stop.cancelled() => break,
            Some(_) = connections.join_next() => {}
            accepted = listener.accept(), if !full => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(connection(stream, router.clone(), stop.clone()));
                }
                Err(error) => {
                    // Out of descriptors, most likely: it passes when other connections end.
                    tracing::warn!(%error, "the admin listener cannot accept");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            },
        }
    }
    drop(listener);
    let finish = async { while connections.join_next().await.is_some() {} };
    // What is still open after that is cut when the set is dropped.
    if tokio::time::timeout(STOP_GRACE, finish).await.is_err() {
        tracing::info!("admin connections were cut at shutdown");
    }
}

async fn connection(stream: TcpStream, router: Router, stop: CancellationToken) {
    let serving = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    tokio::pin!(serving);
    let ended = tokio::select! {
        ended = &mut serving => ended,
        () = stop.cancelled() => {
            serving.as_mut().graceful_shutdown();
            serving.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "an admin connection broke");
    }
}

/// Lets only operators through: by token, or where there is none, by the name under which this machine was called.
async fn guard(
    axum::extract::State(state): axum::extract::State<State>,
    request: Request,
    next: Next,
) -> Response {
    match no_operator(&state, request.uri(), request.headers()) {
        Some(problem) => problem.into_response(),
        None => next.run(request).await,
    }
}

/// Why a request is not an operator's.
fn no_operator(state: &State, uri: &Uri, headers: &HeaderMap) -> Option<Problem> {
    match &state.token {
        Some(token) if !bears(token, headers) => Some(Problem::Unauthorized),
        None if !names_this_machine(uri, headers) => Some(Problem::ForeignHost),
        None if is_foreign(headers) => Some(Problem::ForeignHost),
        Some(_) | None => None,
    }
}

fn bears(token: &Token, headers: &HeaderMap) -> bool {
    let mut lines = headers.get_all(AUTHORIZATION).iter();
    let (Some(line), None) = (lines.next(), lines.next()) else { return false };
    let Some((scheme, sent)) = line.as_bytes().split_at_checked(7) else { return false };
    scheme.eq_ignore_ascii_case(b"bearer ") && token.is(sent.trim_ascii())
}

fn names_this_machine(uri: &Uri, headers: &HeaderMap) -> bool {
    let mut lines = headers.get_all(HOST).iter();
    let (Some(line), None) = (lines.next(), lines.next()) else { return false };
    let Ok(named) = line.to_str() else { return false };
    // A target in absolute form names a host too, and a reader may believe either.
    is_loopback(named) && uri.authority().is_none_or(|authority| is_loopback(authority.as_str()))
}

/// Whether a browser sends it for a page that is not this machine's.
fn is_foreign(headers: &HeaderMap) -> bool {
    let ours = |origin: &HeaderValue| {
        let (_, authority) = origin.to_str().ok()?.split_once("://")?;
        Some(is_loopback(authority))
    };
    !headers.get_all(ORIGIN).iter().all(|origin| ours(origin).unwrap_or(false))
}

fn is_loopback(authority: &str) -> bool {
    let is_port = |port: &str| !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit());
    ["localhost", "127.0.0.1", "[::1]"].into_iter().any(|name| {
        let Some((host, rest)) = authority.split_at_checked(name.len()) else { return false };
        let port_fits = rest.is_empty() || rest.strip_prefix(':').is_some_and(is_port);
        host.eq_ignore_ascii_case(name) && port_fits
    })
}

/// On every answer: it is what its type says, and it is not kept on the way.
async fn harden(mut response: Response) -> Response {
    let headers = response.headers_mut();
    headers.insert("x-content-type-options", HeaderValue::from_static("nosniff"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

async fn readyz(
    axum::extract::State(state): axum::extract::State<State>,
    uri: Uri,
    headers: HeaderMap,
) -> Response {
    let (store, cause) = match tokio::time::timeout(PING_TIMEOUT, state.store.ping()).await {
        Ok(Ok(())) => ("ok", None),
        Ok(Err(error)) => ("unavailable", Some(causes(&error))),
        Err(_) => ("no answer in time", None),
    };
    let ailing = crate::tasks::ailing();
    let ready = state.ready.is_serving() && store == "ok" && ailing.is_none();
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let mut body = json!({ "ready": ready, "gateway": state.ready.as_str(), "store": store });
    // It names hosts and roles: for operators.
    let cause = cause.filter(|_| no_operator(&state, &uri, &headers).is_none());
    let more = [("cause", cause), ("not_running", ailing.map(str::to_owned))];
    if let Some(fields) = body.as_object_mut() {
        let told = more.into_iter().filter_map(|(name, text)| Some((name, text?)));
        fields.extend(told.map(|(name, text)| (name.to_owned(), text.into())));
    }
    as_json(status, "application/json", &body)
}

async fn metrics(axum::extract::State(state): axum::extract::State<State>) -> Response {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(CONTENT_TYPE, kind)], state.metrics.render()).into_response()
}

async fn config(axum::extract::State(state): axum::extract::State<State>) -> Json {
    Json(json!({ "version": state.version, "operations": &*state.operations }))
}

async fn list_tasks(RawQuery(query): RawQuery) -> Result<Json<TaskPage>, Problem> {
    Query::parse(query.as_deref(), &[]).map_err(Problem::Query)?;
    Ok(Json(TaskPage::now()))
}

async fn list_records(
    axum::extract::State(state): axum::extract::State<State>,
    RawQuery(query): RawQuery,
) -> Result<Json<RecordPage>, Problem> {
    let mut filter = Query::parse(query.as_deref(), &query::RECORD_NAMES)
        .and_then(|query| query.records())
        .map_err(Problem::Query)?;
    let asked = filter.limit as usize;
    // One row more than the page shows whether there is another page.
    filter.limit = filter.limit.saturating_add(1);
    let mut rows = in_time(state.store.list_records(&filter)).await?;
    let more = rows.len() > asked;
    rows.truncate(asked);
    let next = rows.last().filter(|_| more).map(query::after_record);
    Ok(Json(RecordPage { records: rows.iter().map(RecordView::brief).collect(), next }))
}

async fn list_events(
    axum::extract::State(state): axum::extract::State<State>,
    RawQuery(query): RawQuery,
) -> Result<Json<EventPage>, Problem> {
    let mut filter = Query::parse(query.as_deref(), &query::EVENT_NAMES)
        .and_then(|query| query.events())
        .map_err(Problem::Query)?;
    let asked = filter.limit as usize;
    filter.limit = filter.limit.saturating_add(1);
    let mut rows = in_time(state.store.list_events(&filter)).await?;
    if rows.is_empty()
        && let Some(wrong) = in_time(act::wrong_sink(
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

async fn show_record(
    axum::extract::State(state): axum::extract::State<State>,
    id: Result<Path<String>, PathRejection>,
    RawQuery(query): RawQuery,
) -> Result<Json<RecordDetail>, Problem> {
    Query::parse(query.as_deref(), &[]).map_err(Problem::Query)?;
    let id: RecordId = id_of(id)?.into();
    let detail = in_time(view::record_detail(state.store.as_ref(), id)).await?;
    detail.map(Json).ok_or(Problem::NotFound)
}

async fn show_event(
    axum::extract::State(state): axum::extract::State<State>,
    id: Result<Path<String>, PathRejection>,
    RawQuery(query): RawQuery,
) -> Result<Json<EventDetail>, Problem> {
    Query::parse(query.as_deref(), &[]).map_err(Problem::Query)?;
    let detail = in_time(view::event_detail(state.store.as_ref(), id_of(id)?)).await?;
    detail.map(Json).ok_or(Problem::NotFound)
}

async fn redeliver_one(
    axum::extract::State(state): axum::extract::State<State>,
    id: Result<Path<String>, PathRejection>,
    request: Request,
) -> Result<Json, Problem> {
    act::one(EventAction::Redeliver, state, id, request).await
}

async fn discard_one(
    axum::extract::State(state): axum::extract::State<State>,
    id: Result<Path<String>, PathRejection>,
    request: Request,
) -> Result<Json, Problem> {
    act::one(EventAction::Discard, state, id, request).await
}

async fn redeliver_dead(
    axum::extract::State(state): axum::extract::State<State>,
    request: Request,
) -> Result<Json, Problem> {
    act::dead(EventAction::Redeliver, state, request).await
}

async fn discard_dead(
    axum::extract::State(state): axum::extract::State<State>,
    request: Request,
) -> Result<Json, Problem> {
    act::dead(EventAction::Discard, state, request).await
}

async fn list_sinks(
    axum::extract::State(state): axum::extract::State<State>,
    RawQuery(query): RawQuery,
) -> Result<Json<SinkPage>, Problem> {
    Query::parse(query.as_deref(), &[]).map_err(Problem::Query)?;
    in_time(sinks::list(state.store.as_ref(), &state.sinks)).await.map(Json)
}

async fn pause_sink(
    axum::extract::State(state): axum::extract::State<State>,
    name: Result<Path<String>, PathRejection>,
    RawQuery(query): RawQuery,
    request: Request,
) -> Result<Json, Problem> {
    act::sink(SinkOrder::Pause, state, name, query.as_deref(), request).await
}

async fn resume_sink(
    axum::extract::State(state): axum::extract::State<State>,
    name: Result<Path<String>, PathRejection>,
    RawQuery(query): RawQuery,
    request: Request,
) -> Result<Json, Problem> {
    act::sink(SinkOrder::Resume, state, name, query.as_deref(), request).await
}

async fn explain_request(
    axum::extract::State(state): axum::extract::State<State>,
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

fn id_of(path: Result<Path<String>, PathRejection>) -> Result<Uuid, Problem> {
    let Path(text) = path.map_err(|_| Problem::Id)?;
    text.parse().map_err(|_| Problem::Id)
}

/// Waits for the store, but not for ever.
async fn in_time<T>(answer: impl Future<Output = Result<T, store::Error>>) -> Result<T, Problem> {
    match tokio::time::timeout(READ_TIMEOUT, answer).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => {
            let cause = std::error::Error::source(&error).map(ToString::to_string);
            tracing::warn!(%error, cause, "the admin listener could not read the store");
            Err(match error {
                store::Error::Unavailable(_) | store::Error::InDoubt(_) | store::Error::Late => {
                    Problem::StoreUnavailable
                }
                store::Error::Refused(_) | store::Error::Unreadable(_) => Problem::StoreRefused,
            })
        }
        Err(_) => Err(Problem::StoreUnavailable),
    }
}

/// An answer in JSON with everything escaped; see [`view::to_json`].
struct Json<T = serde_json::Value>(T);

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        as_json(StatusCode::OK, "application/json", &self.0)
    }
}

fn as_json<T: Serialize>(status: StatusCode, kind: &'static str, value: &T) -> Response {
    match view::to_json(value) {
        Ok(mut text) => {
            text.push('\n');
            (status, [(CONTENT_TYPE, kind)], text).into_response()
        }
        Err(error) => {
            tracing::error!(%error, "an admin answer could not be written as JSON");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

/// What operators are told when it is no: the short table of this listener.
#[derive(Debug)]
enum Problem {
    Unauthorized,
    ForeignHost,
    Query(Vec<String>),
    Question(String),
    Action(Vec<String>),
    Refused { name: &'static str, detail: String, sinks: Value },
    InDoubt,
    Id,
    NotFound,
    NoSink,
    Already,
    NoSuchPage,
    MethodNotAllowed,
    StoreUnavailable,
    StoreRefused,
}

impl Problem {
    fn entry(&self) -> (StatusCode, &'static str, &'static str) {
        match self {
            Self::Unauthorized => (
                StatusCode::UNAUTHORIZED,
                "unauthorized",
                "Send the admin token: `Authorization: Bearer TOKEN`.",
            ),
            Self::ForeignHost => (
                StatusCode::FORBIDDEN,
                "foreign-host",
                "Without an admin token, ask for localhost, 127.0.0.1 or [::1] by that name, and from no other page.",
            ),
            Self::Query(_) => (
                StatusCode::BAD_REQUEST,
                "query-invalid",
                "Correct the query; `errors` names each mistake.",
            ),
            Self::Question(_) => (
                StatusCode::BAD_REQUEST,
                "question-invalid",
                "Send a JSON object of the fields that are asked for; `errors` says what is wrong.",
            ),
            Self::Action(_) => (
                StatusCode::BAD_REQUEST,
                "action-invalid",
                "Send a JSON object that says what is to be done; `errors` says what is wrong.",
            ),
            Self::Refused { name, .. } => (StatusCode::CONFLICT, name, ""),
            Self::InDoubt => (
                StatusCode::SERVICE_UNAVAILABLE,
                "in-doubt",
                "Nobody knows whether that was done, or all of it: look before you ask for it again.",
            ),
            Self::Id => (StatusCode::BAD_REQUEST, "id-invalid", "An id is a UUID."),
            Self::NotFound => (
                StatusCode::NOT_FOUND,
                "not-found",
                "Nothing has this id: it never existed, or its retention is over.",
            ),
            Self::NoSink => (
                StatusCode::NOT_FOUND,
                "no-such-sink",
                "No sink has this name: not in the configuration, and nothing is owed to one.",
            ),
            Self::Already => (
                StatusCode::CONFLICT,
                "already-so",
                "The sink stands so already: nothing was changed.",
            ),
            Self::NoSuchPage => {
                (StatusCode::NOT_FOUND, "no-such-page", "The admin listener has no such page.")
            }
            Self::MethodNotAllowed => (
                StatusCode::METHOD_NOT_ALLOWED,
                "method-not-allowed",
                "This page is read, or acted on, in another way: see docs/operations.md.",
            ),
            Self::StoreUnavailable => (
                StatusCode::SERVICE_UNAVAILABLE,
                "store-unavailable",
                "The database does not answer: try again, and see /readyz and the log.",
            ),
            Self::StoreRefused => (
                StatusCode::INTERNAL_SERVER_ERROR,
                "store-refused",
                "The database refused the question: see the log.",
            ),
        }
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let (status, name, detail) = self.entry();
        let detail = if let Self::Refused { detail, .. } = &self { detail } else { detail };
        let mut body = json!({
            "type": format!("urn:oncegate:problem:{name}"),
            "title": name.replace('-', " "),
            "status": status.as_u16(),
            "detail": detail,
        });
        if let (Self::Refused { sinks, .. }, Some(fields)) = (&self, body.as_object_mut()) {
            fields.insert("sinks".to_owned(), sinks.clone());
        }
        let errors = if let Self::Query(errors) | Self::Action(errors) = &self {
            json!(errors)
        } else if let Self::Question(error) = &self {
            json!([error])
        } else {
            Value::Null
        };
        if let (false, Some(fields)) = (errors.is_null(), body.as_object_mut()) {
            fields.insert("errors".to_owned(), errors);
        }
        let mut response = as_json(status, "application/problem+json", &body);
        if matches!(self, Self::Unauthorized) {
            let challenge = HeaderValue::from_static("Bearer realm=\"oncegate\"");
            response.headers_mut().insert(WWW_AUTHENTICATE, challenge);
        }
        response
    }
}
