//! A store in memory that can only be looked at and acted on by operators, and that can be told to fail or to hang.

use std::collections::BTreeMap;
use std::future::pending;
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode};
use oncegate::record::{
    Answer, Attempt, Fence, Fingerprint, KeptBody, Key, Operation, RecordId, Scope, Spelling,
    Status, Tenant,
};
use oncegate::store::layer::Layer;
use oncegate::store::{
    Acted, AttemptRow, AuditRow, Changed, Chosen, Completion, DeadFilter, Error, EventFilter,
    EventRow, EventStatus, Gauges, NextProbe, Objection, Operator, OperatorsLayer, OutboxLayer,
    Pause, PauseReason, Reclaim, RecordFilter, RecordRow, RecordsLayer, SinkOrder, SinkState,
    SinksLayer, Store, Touched, Unresolved,
};
use uuid::Uuid;

/// How the database is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Health {
    Up,
    Down,
    Hangs,
}

pub(crate) struct Shelf {
    pub(crate) health: Mutex<Health>,
    pub(crate) records: Mutex<BTreeMap<RecordId, RecordRow>>,
    pub(crate) events: Mutex<Vec<EventRow>>,
    pub(crate) audit: Mutex<Vec<AuditRow>>,
    pub(crate) completions: Mutex<Vec<Completion>>,
    /// Another operator is quicker: every action finds that the record has moved.
    pub(crate) moves: Mutex<bool>,
    pub(crate) sinks: Mutex<Vec<SinkState>>,
    pub(crate) gauges: Mutex<Gauges>,
}

impl Default for Shelf {
    fn default() -> Self {
        Self {
            health: Mutex::new(Health::Up),
            records: Mutex::default(),
            events: Mutex::default(),
            audit: Mutex::default(),
            completions: Mutex::default(),
            moves: Mutex::default(),
            sinks: Mutex::default(),
            gauges: Mutex::default(),
        }
    }
}

/// 2031-01-01T00:00:00Z and so many seconds.
pub(crate) fn at(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_924_992_000 + seconds)
}

pub(crate) fn record_id(number: u128) -> RecordId {
    Uuid::from_u128(number).into()
}

pub(crate) fn record(number: u128, key: &str, status: Status) -> RecordRow {
    let created = u64::try_from(number).unwrap();
    let completed = status == Status::Completed;
    RecordRow {
        id: record_id(number),
        scope: Scope {
            tenant: Tenant::stored("acme"),
            operation: Operation::stored("orders.create"),
            key: Key::stored(key),
        },
        fingerprint: Fingerprint { canonical: [0xab; 32], raw: [1; 32], recipe: [2; 8] },
        status,
        attempt: Attempt::FIRST,
        owner: Uuid::from_u128(0xa).into(),
        owner_lives: status == Status::InProgress,
        caller: None,
        context: None,
        created_at: at(created),
        completed_at: completed.then(|| at(created + 1)),
        expires_at: completed.then(|| at(created + 86_401)),
        answer: completed.then(|| answer(b"{\"id\":1}")),
    }
}

pub(crate) fn answer(body: &'static [u8]) -> Answer {
    let mut headers = HeaderMap::new();
    headers.insert("content-type", HeaderValue::from_static("application/json"));
    Answer {
        status: StatusCode::CREATED,
        headers,
        spelling: Spelling::default(),
        body: KeptBody::Whole(Bytes::from_static(body)),
    }
}

pub(crate) fn event(number: u128, record: &RecordRow, sink: &str, status: EventStatus) -> EventRow {
    EventRow {
        id: Uuid::from_u128(0xe000 + number),
        event_key: format!("{}/order.created", record.id),
        kind: "order.created".to_owned(),
        scope: record.scope.clone(),
        record: record.id,
        sink: sink.to_owned(),
        ordering_key: None,
        payload: Bytes::from_static(b"{\"type\":\"order.created\"}"),
        status,
        attempts: 1,
        next_attempt_at: None,
        last_error: (status == EventStatus::Dead).then(|| "500 from the sink".to_owned()),
        created_at: at(u64::try_from(number).unwrap()),
        age: Duration::from_secs(3 * 86_400 + 4 * 3600 + 17),
        sent_at: (status == EventStatus::Sent).then(|| at(90)),
        blocks: false,
    }
}

impl Shelf {
    pub(crate) fn with(records: Vec<RecordRow>, events: Vec<EventRow>) -> Self {
        let shelf = Self::default();
        *shelf.records.lock().unwrap() = records.into_iter().map(|row| (row.id, row)).collect();
        *shelf.events.lock().unwrap() = events;
        shelf
    }

    pub(crate) fn be(&self, health: Health) {
        *self.health.lock().unwrap() = health;
    }

    async fn reach(&self) -> Result<(), Error> {
        let health = *self.health.lock().unwrap();
        match health {
            Health::Up => Ok(()),
            Health::Down => Err(unavailable()),
            Health::Hangs => pending().await,
        }
    }

    fn note(&self, action: &str, record: Option<RecordId>, event: Option<Uuid>, by: &Operator) {
        let mut audit = self.audit.lock().unwrap();
        audit.push(AuditRow {
            id: Uuid::from_u128(0xf000),
            at: at(100),
            who: by.who.clone(),
            action: action.to_owned(),
            record,
            event,
            why: by.why.clone(),
            detail: None,
        });
    }

    /// Gives the chosen events of these states another one.
    fn act(
        &self,
        action: &str,
        which: &Chosen,
        from: &[EventStatus],
        to: EventStatus,
        by: &Operator,
    ) -> Touched {
        let mut touched = Touched::default();
        for row in self.events.lock().unwrap().iter_mut() {
            let chosen = match which {
                Chosen::One { id, sink } => {
                    row.id == *id && from.contains(&row.status) && is(sink.as_ref(), &row.sink)
                }
                Chosen::NotTaken { id } => row.id == *id && row.status == EventStatus::Dead,
                Chosen::Dead(filter) => fits(filter, row),
            };
            if chosen {
                touched.count += 1;
                if !matches!(which, Chosen::Dead(_)) {
                    touched.sinks.push((row.sink.clone(), row.status));
                }
                row.status = to;
            }
        }
        self.note(action, None, None, by);
        touched
    }

    /// The record at this fence, or why it may not be acted on.
    fn fenced(&self, fence: Fence) -> Result<RecordRow, Objection> {
        let row = self.records.lock().unwrap().get(&fence.id).cloned();
        let row = row.ok_or(Objection::NotFound)?;
        if *self.moves.lock().unwrap() || row.attempt != fence.attempt {
            return Err(Objection::Moved);
        }
        if row.status == Status::InProgress && row.owner_lives {
            return Err(Objection::Running { owner: row.owner, since: row.created_at });
        }
        Ok(row)
    }
}

fn unavailable() -> Error {
    Error::Unavailable("secret-host refused the connection".into())
}

fn is(wanted: Option<&String>, value: &str) -> bool {
    wanted.is_none_or(|wanted| wanted == value)
}

fn fits(filter: &DeadFilter, row: &EventRow) -> bool {
    row.status == EventStatus::Dead
        && is(filter.sink.as_ref(), &row.sink)
        && is(filter.kind.as_ref(), &row.kind)
        && is(filter.tenant.as_ref(), row.scope.tenant.as_str())
        && is(filter.operation.as_ref(), row.scope.operation.as_str())
}

impl Layer for Shelf {
    fn beneath(&self) -> Result<&dyn Store, Error> {
        Err(unavailable())
    }
}

impl RecordsLayer for Shelf {
    async fn unresolved(&self, _: RecordId) -> Result<Option<Unresolved>, Error> {
        self.reach().await?;
        Ok(None)
    }
}

impl OutboxLayer for Shelf {}

impl SinksLayer for Shelf {
    async fn sinks(&self, _: Reclaim) -> Result<Vec<SinkState>, Error> {
        self.reach().await?;
        Ok(self.sinks.lock().unwrap().clone())
    }

    async fn operate_sink(
        &self,
        sink: &str,
        order: SinkOrder,
        by: &Operator,
    ) -> Result<Changed, Error> {
        self.reach().await?;
        let mut sinks = self.sinks.lock().unwrap();
        let index = sinks.iter().position(|state| state.sink == sink);
        let paused = index.is_some_and(|index| sinks[index].pause.is_some());
        if paused == (order == SinkOrder::Pause) {
            return Ok(Changed::No);
        }
        sinks.retain(|state| state.sink != sink);
        let pause = (order == SinkOrder::Pause).then(|| Pause {
            reason: PauseReason::Operator,
            probe: NextProbe::Never,
            failed_probes: 0,
            note: by.why.clone(),
        });
        let since = std::time::SystemTime::UNIX_EPOCH;
        sinks.push(SinkState { sink: sink.into(), no: 1, since, pause, last_error: None });
        self.note(order.action(), None, None, by);
        Ok(Changed::Yes)
    }

    async fn last_failure(&self, _: &str) -> Result<Option<String>, Error> {
        self.reach().await?;
        Ok(Some("the sink answered 500: why?".into()))
    }
}

impl OperatorsLayer for Shelf {
    async fn list_records(&self, filter: &RecordFilter) -> Result<Vec<RecordRow>, Error> {
        self.reach().await?;
        let mut rows: Vec<_> = self.records.lock().unwrap().values().cloned().collect();
        rows.retain(|row| {
            is(filter.tenant.as_ref(), row.scope.tenant.as_str())
                && is(filter.operation.as_ref(), row.scope.operation.as_str())
                && is(filter.key.as_ref(), row.scope.key.as_str())
                && filter.status.is_none_or(|status| status == row.status)
                && filter.after.is_none_or(|after| (row.created_at, row.id.into()) < after)
        });
        rows.sort_by_key(|row| std::cmp::Reverse((row.created_at, row.id)));
        rows.truncate(filter.limit as usize);
        for answer in rows.iter_mut().filter_map(|row| row.answer.as_mut()) {
            answer.body = KeptBody::NotRetained;
        }
        Ok(rows)
    }

    async fn show_record(&self, id: RecordId) -> Result<Option<RecordRow>, Error> {
        self.reach().await?;
        Ok(self.records.lock().unwrap().get(&id).cloned())
    }

    async fn list_events(&self, filter: &EventFilter) -> Result<Vec<EventRow>, Error> {
        self.reach().await?;
        let mut rows = self.events.lock().unwrap().clone();
        let place = |row: &EventRow| (row.created_at, row.id, row.sink.clone());
        rows.retain(|row| {
            filter.id.is_none_or(|id| id == row.id)
                && filter.record.is_none_or(|record| record == row.record)
                && is(filter.kind.as_ref(), &row.kind)
                && is(filter.sink.as_ref(), &row.sink)
                && filter.status.is_none_or(|status| status == row.status)
                && filter.after.as_ref().is_none_or(|after| place(row) < *after)
        });
        rows.sort_by_key(|row| std::cmp::Reverse(place(row)));
        rows.truncate(filter.limit as usize);
        Ok(rows)
    }

    async fn operator_release(
        &self,
        fence: Fence,
        completed: bool,
        by: &Operator,
    ) -> Result<Acted, Error> {
        self.reach().await?;
        let row = match self.fenced(fence) {
            Ok(row) => row,
            Err(why) => return Ok(Err(why)),
        };
        if row.status == Status::Completed && !completed {
            return Ok(Err(Objection::IsCompleted));
        }
        self.records.lock().unwrap().remove(&fence.id);
        self.note("record.release", Some(fence.id), None, by);
        Ok(Ok(()))
    }

    async fn operator_complete(
        &self,
        completion: &Completion,
        by: &Operator,
    ) -> Result<Acted, Error> {
        self.reach().await?;
        let mut row = match self.fenced(completion.fence) {
            Ok(row) => row,
            Err(why) => return Ok(Err(why)),
        };
        row.status = Status::Completed;
        row.answer = Some(completion.answer.clone());
        self.records.lock().unwrap().insert(row.id, row);
        self.completions.lock().unwrap().push(completion.clone());
        self.note("record.complete", Some(completion.fence.id), None, by);
        Ok(Ok(()))
    }

    async fn redeliver(&self, which: &Chosen, by: &Operator) -> Result<Touched, Error> {
        self.reach().await?;
        // Here a pending event is always one that is being delivered.
        let idle = [EventStatus::Sent, EventStatus::Dead];
        Ok(self.act("event.redeliver", which, &idle, EventStatus::Pending, by))
    }

    async fn discard(&self, which: &Chosen, by: &Operator) -> Result<Touched, Error> {
        self.reach().await?;
        Ok(self.act("event.discard", which, &[EventStatus::Dead], EventStatus::Discarded, by))
    }

    async fn count_dead(&self, which: &DeadFilter) -> Result<u64, Error> {
        self.reach().await?;
        let events = self.events.lock().unwrap();
        Ok(events.iter().filter(|row| fits(which, row)).count() as u64)
    }

    async fn attempts_of(&self, event: Uuid) -> Result<Vec<AttemptRow>, Error> {
        self.reach().await?;
        let failed = |row: &EventRow| AttemptRow {
            sink: row.sink.clone(),
            claim_no: 1,
            attempt: row.attempts,
            at: row.created_at + Duration::from_secs(1),
            status: row.last_error.as_ref().map(|_| 500),
            error: row.last_error.clone(),
        };
        let events = self.events.lock().unwrap();
        Ok(events.iter().filter(|row| row.id == event).map(failed).collect())
    }

    async fn audit_of(&self, record: RecordId) -> Result<Vec<AuditRow>, Error> {
        self.reach().await?;
        let audit = self.audit.lock().unwrap();
        Ok(audit.iter().filter(|row| row.record == Some(record)).cloned().collect())
    }

    async fn ping(&self) -> Result<(), Error> {
        self.reach().await
    }

    async fn gauges(&self) -> Result<Gauges, Error> {
        self.reach().await?;
        Ok(self.gauges.lock().unwrap().clone())
    }
}
