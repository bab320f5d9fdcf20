//! Encryption at rest: a store whose stored headers, bodies, request contexts and payloads are sealed on their way in and
//! opened on their way out.
//!
//! It is between the program and a store, so both stores do the same. What must stay true:
//!
//! - An answer that is sealed says so by one header in place of all others, [`SEALED`], a name that no caller and no upstream
//!   can send. So what was stored before, or by an application with `oncegate_complete`, is read as it is.
//! - What does not open is never replayed, delivered or guessed at: whoever needs it gets an error that names the key.
//! - Sealing what is sealed already changes nothing. Without keys nothing is sealed; what is sealed is still known as that.

mod keys;

use std::sync::Arc;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use parking_lot::Mutex;
use serde_json::Value;
use uuid::Uuid;

pub use self::keys::{Keys, KeysError, Unopened};
use self::keys::{MARK, NoRandom, Part};
use super::layer::Layer;
use super::{
    Acknowledgement, Acted, AuditRow, Changed, Claim, Claimed, Completion, DueLookup, Error,
    EventFilter, EventRow, LateEnd, LateOutcome, LookupRule, Operator, OperatorsLayer, OutboxLayer,
    Proposal, RecordFilter, RecordRow, RecordsLayer, Reinstated, Reserved, Settled, SinksLayer,
    Store, Takeover, Unresolved, Verdict,
};
use crate::record::event::Event;
use crate::record::event::notice::Notice;
use crate::record::{
    Answer, Attempt, Fence, KeptBody, Record, RecordId, Scope, Spelling, State, decode_headers,
    encode_headers,
};

/// In place of an answer's headers: these, sealed.
const SEALED: HeaderName = HeaderName::from_static("oncegate-sealed");

/// The same store, whose content is sealed with these keys.
#[must_use]
pub fn sealed(store: Arc<dyn Store>, keys: Arc<Keys>) -> Arc<dyn Store> {
    Arc::new(Sealed { store, keys, logged_at: Mutex::default() })
}

struct Sealed {
    store: Arc<dyn Store>,
    keys: Arc<Keys>,
    /// When the log last reported events that do not open.
    logged_at: Mutex<Option<Instant>>,
}

impl Keys {
    /// A completion, sealed; one that is sealed stays as it is.
    ///
    /// # Errors
    /// [`Error::Unavailable`] where the system has no random bytes.
    pub fn seal_completion(&self, completion: &mut Completion) -> Result<(), Error> {
        let id = Uuid::from(completion.fence.id);
        self.seal_answer(id, &mut completion.answer).map_err(no_random)?;
        completion.events.iter_mut().try_for_each(|event| self.seal_event(event)).map_err(no_random)
    }

    /// The answer of an attempt, sealed; one that is sealed stays as it is.
    ///
    /// # Errors
    /// [`Error::Unavailable`] where the system has no random bytes.
    pub fn seal_of(&self, attempt: Fence, answer: &mut Answer) -> Result<(), Error> {
        self.seal_answer(attempt.id.into(), answer).map_err(no_random)
    }

    /// The inverse of [`Keys::seal_of`].
    ///
    /// # Errors
    /// [`Unopened`].
    pub fn open_of(&self, attempt: Fence, answer: &mut Answer) -> Result<(), Unopened> {
        self.open_answer(attempt.id.into(), answer)
    }

    /// A completion as it was before it was sealed.
    ///
    /// # Errors
    /// [`Unopened`].
    pub fn open_completion(&self, completion: &mut Completion) -> Result<(), Unopened> {
        self.open_answer(completion.fence.id.into(), &mut completion.answer)?;
        for event in &mut completion.events {
            event.payload = self.open_bytes(Part::Payload, event.id, &event.payload)?;
        }
        Ok(())
    }

    fn seal_answer(&self, id: Uuid, answer: &mut Answer) -> Result<(), NoRandom> {
        let Some(key) = self.sealing().filter(|_| !answer.headers.contains_key(SEALED)) else {
            return Ok(());
        };
        let block = encode_headers(&answer.headers, &answer.spelling);
        let value = STANDARD.encode(key.seal(Part::Headers, id, &block)?);
        // Base64 is a lawful value.
        let value = HeaderValue::from_str(&value).map_err(|_| NoRandom)?;
        if let KeptBody::Whole(body) = &mut answer.body {
            *body = key.seal(Part::Body, id, body)?.into();
        }
        answer.headers = HeaderMap::from_iter([(SEALED, value)]);
        answer.spelling = Spelling::default();
        Ok(())
    }

    fn open_answer(&self, id: Uuid, answer: &mut Answer) -> Result<(), Unopened> {
        let Some(value) = answer.headers.get(SEALED) else { return Ok(()) };
        let block = STANDARD.decode(value.as_bytes()).map_err(|_| Unopened::Damaged)?;
        let block = self.open(Part::Headers, id, &block)?;
        let (headers, spelling) = decode_headers(&block).map_err(|_| Unopened::Damaged)?;
        if let KeptBody::Whole(body) = &mut answer.body {
            *body = self.open(Part::Body, id, body)?.into();
        }
        (answer.headers, answer.spelling) = (headers, spelling);
        Ok(())
    }

    fn seal_event(&self, event: &mut Event) -> Result<(), NoRandom> {
        event.payload = self.seal_bytes(Part::Payload, event.id, &event.payload)?;
        Ok(())
    }

    /// Of text, which never begins with the mark.
    fn seal_bytes(&self, part: Part, id: Uuid, plain: &Bytes) -> Result<Bytes, NoRandom> {
        match self.sealing() {
            Some(key) if plain.first() != Some(&MARK) => key.seal(part, id, plain).map(Bytes::from),
            Some(_) | None => Ok(plain.clone()),
        }
    }

    fn open_bytes(&self, part: Part, id: Uuid, stored: &Bytes) -> Result<Bytes, Unopened> {
        if stored.first() != Some(&MARK) {
            return Ok(stored.clone());
        }
        self.open(part, id, stored).map(Bytes::from)
    }

    fn open_record(&self, record: &mut Record) -> Result<(), Unopened> {
        let id = record.fence.id.into();
        match &mut record.state {
            State::Completed(completed) => self.open_answer(id, &mut completed.answer),
            State::InProgress { .. } | State::Unknown => Ok(()),
        }
    }

    /// A late outcome's answer and events are sealed as those of a record.
    fn seal_late(&self, late: &LateOutcome) -> Result<LateOutcome, NoRandom> {
        let (mut late, id) = (late.clone(), Uuid::from(late.fence.id));
        match &mut late.end {
            LateEnd::Completed { answer, events } => {
                self.seal_answer(id, answer)?;
                events.iter_mut().try_for_each(|event| self.seal_event(event))?;
            }
            LateEnd::Released { answer } => self.seal_answer(id, answer)?,
            LateEnd::NotSent => {}
        }
        Ok(late)
    }

    /// The detail of a late outcome, as it was before it was sealed.
    fn open_detail(&self, id: Uuid, detail: &str) -> Result<Option<String>, Unopened> {
        let Ok(Value::Object(mut fields)) = serde_json::from_str(detail) else { return Ok(None) };
        let Some(block) = sealed_headers(&fields) else { return Ok(None) };
        let block = self.open(Part::Headers, id, &block)?;
        let (headers, _) = decode_headers(&block).map_err(|_| Unopened::Damaged)?;
        fields.insert("headers".to_owned(), super::late::headers(&headers));
        if let Some(body) = fields.get("body_base64").and_then(Value::as_str) {
            let body = STANDARD.decode(body).map_err(|_| Unopened::Damaged)?;
            let body = self.open(Part::Body, id, &body)?;
            fields.insert("body_base64".to_owned(), STANDARD.encode(body).into());
        }
        let events = fields.get_mut("events").and_then(Value::as_array_mut);
        for event in events.into_iter().flatten() {
            self.open_detail_event(event)?;
        }
        Ok(Some(Value::Object(fields).to_string()))
    }

    fn open_detail_event(&self, event: &mut Value) -> Result<(), Unopened> {
        let text = |name: &str| event.get(name).and_then(Value::as_str);
        let id = text("id").and_then(|id| id.parse().ok()).ok_or(Unopened::Damaged)?;
        let payload = text("payload_base64").and_then(|text| STANDARD.decode(text).ok());
        let payload = Bytes::from(payload.ok_or(Unopened::Damaged)?);
        let payload = self.open_bytes(Part::Payload, id, &payload)?;
        if let Some(fields) = event.as_object_mut() {
            fields.insert("payload_base64".to_owned(), STANDARD.encode(payload).into());
        }
        Ok(())
    }
}

/// The sealed headers of a late outcome's detail, where they are.
fn sealed_headers(fields: &serde_json::Map<String, Value>) -> Option<Vec<u8>> {
    let lines = fields.get("headers")?.as_array()?;
    let sealed = |line: &&Value| line.get("name").and_then(Value::as_str) == Some(SEALED.as_str());
    let line = lines.iter().find(sealed)?;
    STANDARD.decode(line.get("value")?.as_str()?).ok()
}

fn no_random(error: NoRandom) -> Error {
    Error::Unavailable(error.into())
}

fn unopened(error: Unopened) -> Error {
    Error::Unreadable(error.into())
}

/// In a list one row that does not open is shown as it is stored, and said in the log.
fn shown(what: &'static str, id: Uuid, opened: Result<(), Unopened>) {
    if let Err(error) = opened {
        tracing::error!(what, %id, %error, "what is stored cannot be shown");
    }
}

/// How long an event rests whose payload does not open: by then its key may be back.
const UNOPENED_PAUSE: Duration = Duration::from_secs(60);

/// How often one claim looks on past events that do not open.
const LOOKS_MAX: usize = 100;

impl Sealed {
    /// The events whose payload opens. The others are given back with the reason: a key that is missing here uses up no
    /// attempt of theirs.
    async fn open_claimed(&self, claim: &Claim, claimed: Vec<Claimed>) -> Vec<Claimed> {
        let sink = &claim.sink;
        let mut opened = Vec::with_capacity(claimed.len());
        let mut back = Vec::new();
        for mut event in claimed {
            match self.keys.open_bytes(Part::Payload, event.event_id, &event.payload) {
                Ok(plain) => {
                    event.payload = plain;
                    opened.push(event);
                }
                Err(why) => {
                    let error = format!("not sent, the payload does not open here: {why}");
                    self.log_unopened(sink, event.event_id, &error);
                    let verdict = Verdict::Returned { delay: UNOPENED_PAUSE, status: None, error };
                    let (event_id, claim_no) = (event.event_id, event.claim_no);
                    back.push(Acknowledgement { event_id, claim_no, verdict });
                }
            }
        }
        if back.is_empty() {
            return opened;
        }
        // Where that fails their claims run out, and they are looked at again then.
        if let Err(error) = self.store.acknowledge(sink, claim.order, &back).await {
            tracing::warn!(sink, %error, "events that cannot be opened stay claimed for a while");
        }
        opened
    }

    /// Once for many: each event has its reason beside it.
    fn log_unopened(&self, sink: &str, event: Uuid, error: &str) {
        let mut logged_at = self.logged_at.lock();
        if logged_at.is_some_and(|at| at.elapsed() < UNOPENED_PAUSE) {
            return;
        }
        *logged_at = Some(Instant::now());
        tracing::error!(sink, %event, error, "events wait for a key");
    }

    fn proposal(&self, mut proposal: Proposal, id: RecordId) -> Result<Proposal, Error> {
        if let Some(context) = &mut proposal.context {
            let sealed = self.keys.seal_bytes(Part::Context, id.into(), context);
            *context = sealed.map_err(no_random)?;
        }
        Ok(proposal)
    }

    fn open_row(&self, row: &mut RecordRow) {
        let id = Uuid::from(row.id);
        if let Some(answer) = &mut row.answer {
            shown("an answer", id, self.keys.open_answer(id, answer));
        }
        if let Some(context) = &mut row.context {
            let opened = self.keys.open_bytes(Part::Context, id, context);
            shown("a request's context", id, opened.map(|plain| *context = plain));
        }
    }
}

impl Layer for Sealed {
    fn beneath(&self) -> Result<&dyn Store, Error> {
        Ok(&*self.store)
    }
}

impl RecordsLayer for Sealed {
    async fn reserve(&self, proposal: Proposal, deadline: Instant) -> Result<Reserved, Error> {
        let id = proposal.id;
        let mut reserved = self.store.reserve(self.proposal(proposal, id)?, deadline).await?;
        if let Reserved::Exists(record) = &mut reserved {
            self.keys.open_record(record).map_err(unopened)?;
        }
        Ok(reserved)
    }

    async fn take_over(&self, proposal: Proposal, from: Takeover) -> Result<Changed, Error> {
        // The row's id is what the context is bound to: an expired one takes the proposal's.
        let id = match from {
            Takeover::Expired(_) => proposal.id,
            Takeover::Unknown(fence) | Takeover::Lookup(fence, ..) => fence.id,
        };
        self.store.take_over(self.proposal(proposal, id)?, from).await
    }

    async fn raise(&self, proposal: Proposal, fence: Fence) -> Result<Changed, Error> {
        self.store.raise(self.proposal(proposal, fence.id)?, fence).await
    }

    async fn reinstate(&self, proposal: Proposal, attempt: Attempt) -> Result<Reinstated, Error> {
        let id = proposal.id;
        self.store.reinstate(self.proposal(proposal, id)?, attempt).await
    }

    async fn find(&self, scope: &Scope) -> Result<Option<Record>, Error> {
        let mut found = self.store.find(scope).await?;
        if let Some(record) = &mut found {
            self.keys.open_record(record).map_err(unopened)?;
        }
        Ok(found)
    }

    async fn complete(
        &self,
        mut completion: Arc<Completion>,
        deadline: Instant,
    ) -> Result<Settled, Error> {
        if self.keys.sealing().is_some() {
            self.keys.seal_completion(Arc::make_mut(&mut completion))?;
        }
        self.store.complete(completion, deadline).await
    }

    async fn due_lookups(&self, rules: &[LookupRule], limit: u32) -> Result<Vec<DueLookup>, Error> {
        let mut due = self.store.due_lookups(rules, limit).await?;
        for DueLookup { fence, context, .. } in &mut due {
            if let Some(context) = context {
                let id = fence.id.into();
                *context = self.keys.open_bytes(Part::Context, id, context).map_err(unopened)?;
            }
        }
        Ok(due)
    }

    async fn unresolved(&self, id: RecordId) -> Result<Option<Unresolved>, Error> {
        let mut found = self.store.unresolved(id).await?;
        if let Some(context) = found.as_mut().and_then(|found| found.context.as_mut()) {
            *context = self.keys.open_bytes(Part::Context, id.into(), context).map_err(unopened)?;
        }
        Ok(found)
    }

    async fn note_late_outcome(&self, late: &LateOutcome) -> Result<(), Error> {
        let sealed = self.keys.seal_late(late).map_err(no_random)?;
        self.store.note_late_outcome(&sealed).await
    }

    async fn announce(&self, notice: &Notice, event: Option<&Event>) -> Result<Changed, Error> {
        let mut sealed = event.cloned();
        if let Some(event) = &mut sealed {
            self.keys.seal_event(event).map_err(no_random)?;
        }
        self.store.announce(notice, sealed.as_ref()).await
    }
}

impl OutboxLayer for Sealed {
    async fn claim(&self, claim: &Claim) -> Result<Vec<Claimed>, Error> {
        // Nobody waits behind what does not open: where nothing else came, there is another look at once.
        for _ in 0..LOOKS_MAX {
            let claimed = self.store.claim(claim).await?;
            let found = claimed.len();
            let opened = self.open_claimed(claim, claimed).await;
            if !opened.is_empty() || found == 0 {
                return Ok(opened);
            }
        }
        Ok(Vec::new())
    }
}

impl SinksLayer for Sealed {}

impl OperatorsLayer for Sealed {
    async fn list_records(&self, filter: &RecordFilter) -> Result<Vec<RecordRow>, Error> {
        let mut rows = self.store.list_records(filter).await?;
        rows.iter_mut().for_each(|row| self.open_row(row));
        Ok(rows)
    }

    async fn show_record(&self, id: RecordId) -> Result<Option<RecordRow>, Error> {
        let mut row = self.store.show_record(id).await?;
        row.iter_mut().for_each(|row| self.open_row(row));
        Ok(row)
    }

    async fn list_events(&self, filter: &EventFilter) -> Result<Vec<EventRow>, Error> {
        let mut rows = self.store.list_events(filter).await?;
        for row in &mut rows {
            let opened = self.keys.open_bytes(Part::Payload, row.id, &row.payload);
            shown("an event's payload", row.id, opened.map(|plain| row.payload = plain));
        }
        Ok(rows)
    }

    async fn operator_complete(
        &self,
        completion: &Completion,
        by: &Operator,
    ) -> Result<Acted, Error> {
        let mut sealed = completion.clone();
        self.keys.seal_completion(&mut sealed)?;
        self.store.operator_complete(&sealed, by).await
    }

    async fn audit_of(&self, record: RecordId) -> Result<Vec<AuditRow>, Error> {
        let mut rows = self.store.audit_of(record).await?;
        for row in &mut rows {
            let Some(detail) = &row.detail else { continue };
            let opened = self.keys.open_detail(record.into(), detail);
            shown(
                "a late outcome",
                row.id,
                opened.map(|plain| {
                    row.detail = plain.or_else(|| row.detail.take());
                }),
            );
        }
        Ok(rows)
    }
}
