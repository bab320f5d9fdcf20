//! The admin listener's actions on records: release and complete.

use std::collections::BTreeMap;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, RawQuery, Request, State as Extract};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::Deserialize;

use super::super::answer::{Json, Problem, id_of};
use super::super::query::Query;
use super::super::resolve::{self, AnswerMistake, CompleteReport, ReleaseReport, Target};
use super::super::state::State;
use super::{RequestedBy, acted_in_time, read};
use crate::record::{Answer, Attempt, RecordId};

/// Largest request to complete a record, in bytes. The largest body of an answer fits in base64.
const COMPLETE_MAX: usize = 24 << 20;

/// The fields of a release.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::admin) struct ReleaseBody {
    /// Also release a completed record: its answer is deleted, and the next request executes again.
    #[serde(default)]
    completed: bool,
    /// The attempt that the operator saw. If the record has changed since, nothing is changed.
    attempt: Option<u32>,
    who: Option<String>,
    reason: Option<String>,
}

/// The fields of a completion.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::admin) struct CompleteBody {
    /// The answer's status.
    status: u16,
    /// The answer's headers: by name, or as a list of pairs if a name is repeated.
    #[serde(default)]
    headers: AnswerHeaders,
    /// The answer's body, as text. Without this and `body_base64` it has none.
    body: Option<String>,
    /// The answer's body, in base64.
    body_base64: Option<String>,
    /// The attempt that the operator saw. If the record has changed since, nothing is changed.
    attempt: Option<u32>,
    who: Option<String>,
    reason: Option<String>,
}

/// Headers of an answer.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(in crate::admin) enum AnswerHeaders {
    /// By name.
    Named(BTreeMap<String, String>),
    /// Name and value.
    Listed(Vec<(String, String)>),
}

impl Default for AnswerHeaders {
    fn default() -> Self {
        Self::Listed(Vec::new())
    }
}

impl AnswerHeaders {
    fn pairs(&self) -> Vec<(&str, &str)> {
        match self {
            Self::Named(map) => map.iter().map(|(name, value)| (&**name, &**value)).collect(),
            Self::Listed(list) => list.iter().map(|(name, value)| (&**name, &**value)).collect(),
        }
    }
}

impl CompleteBody {
    fn answer(&self) -> Result<Answer, Problem> {
        let wrong = |text: String| Problem::Action(vec![text]);
        let body = match (&self.body, &self.body_base64) {
            (Some(_), Some(_)) => return Err(wrong("`body_base64`: not beside `body`".to_owned())),
            (Some(text), None) => Bytes::copy_from_slice(text.as_bytes()),
            (None, Some(text)) => STANDARD
                .decode(text)
                .map_err(|error| wrong(format!("`body_base64`: not base64: {error}")))?
                .into(),
            (None, None) => Bytes::new(),
        };
        if body.len() > resolve::BODY_MAX {
            return Err(wrong(format!("`body`: more than {} bytes", resolve::BODY_MAX)));
        }
        let lines = self.headers.pairs();
        resolve::answer(self.status, &lines, body).map_err(|mistake| {
            wrong(match mistake {
                AnswerMistake::Status => "`status`: a final status is from 200 to 599".to_owned(),
                AnswerMistake::Header(place, why) => {
                    let name = lines.get(place).map_or("", |(name, _)| name);
                    format!("`headers`: `{name}`: {why}")
                }
                AnswerMistake::Body(status) => {
                    format!("`body`: an answer of status {status} has none")
                }
            })
        })
    }
}

/// `POST /api/v1/records/{id}/release`.
pub(in crate::admin) async fn release(
    Extract(state): Extract<State>,
    id: Result<Path<String>, PathRejection>,
    RawQuery(query): RawQuery,
    request: Request,
) -> Result<Json<ReleaseReport>, Problem> {
    Query::parse(query.as_deref(), &[]).map_err(Problem::Query)?;
    let id: RecordId = id_of(id)?.into();
    let body: ReleaseBody = read(request, super::BODY_MAX).await?.unwrap_or_default();
    let ReleaseBody { completed, attempt, who, reason } = body;
    let target = Target { id, attempt: attempt.map(Attempt::from_number) };
    let by = RequestedBy { who, reason }.operator()?;
    let released = resolve::release(state.store.as_ref(), target, completed, &by);
    match acted_in_time(released).await? {
        Ok(was) => Ok(Json(ReleaseReport::of(&was, &by))),
        Err(why) => Err(Problem::of_record(id, &why)),
    }
}

/// `POST /api/v1/records/{id}/complete`.
pub(in crate::admin) async fn complete(
    Extract(state): Extract<State>,
    id: Result<Path<String>, PathRejection>,
    RawQuery(query): RawQuery,
    request: Request,
) -> Result<Json<CompleteReport>, Problem> {
    Query::parse(query.as_deref(), &[]).map_err(Problem::Query)?;
    let id: RecordId = id_of(id)?.into();
    let body: Option<CompleteBody> = read(request, COMPLETE_MAX).await?;
    let missing = || Problem::Action(vec!["`status`: must be the answer's status".to_owned()]);
    let body = body.ok_or_else(missing)?;
    let answer = body.answer()?;
    let target = Target { id, attempt: body.attempt.map(Attempt::from_number) };
    let by = RequestedBy { who: body.who, reason: body.reason }.operator()?;
    let announce = state.announce.as_ref();
    let completed = resolve::complete(state.store.as_ref(), target, answer, announce, &by);
    match acted_in_time(completed).await? {
        Ok(done) => Ok(Json(CompleteReport::of(&done, &by))),
        Err(why) => Err(Problem::of_record(id, &why)),
    }
}
