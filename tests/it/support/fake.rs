//! A store in memory: the outbox's rules, leases by script, and outages at will. Other verbs are not available.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use oncegate::record::event::notice::Notice;
use oncegate::record::{Fence, OwnerId, Scope};
use oncegate::store::layer::Layer;
use oncegate::store::*;
use tokio::time::Instant;
use uuid::Uuid;

#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) sink: &'static str,
    pub(crate) lane: Lane,
    pub(crate) due: Instant,
    pub(crate) leased: Instant,
    pub(crate) claim_no: i32,
    pub(crate) attempts: u32,
    pub(crate) refusals: u32,
    pub(crate) status: EventStatus,
    pub(crate) error: String,
    pub(crate) written: Instant,
    pub(crate) payload: Bytes,
}

/// How a sink stands in it.
#[derive(Clone, Debug)]
pub(crate) struct PlayedSink {
    pub(crate) no: i64,
    pub(crate) reason: Option<PauseReason>,
    pub(crate) probe_at: Option<Instant>,
    pub(crate) probing_until: Option<Instant>,
    pub(crate) failed_probes: u32,
    pub(crate) error: String,
}

impl PlayedSink {
    fn change(&mut self, no: i64, change: &SinkChange) -> bool {
        let now = Instant::now();
        let probed = self.probing_until.is_some();
        if no != self.no {
            return false;
        }
        match change {
            SinkChange::Pause { trouble, error, failed_probes } if self.reason.is_none() => {
                self.reason = Some(trouble.reason());
                self.probe_at = trouble.again().map(|again| now + again);
                self.failed_probes = *failed_probes;
                self.error.clone_from(error);
            }
            SinkChange::Probe { lease, .. }
                if self.probe_at.is_some_and(|at| at <= now)
                    && self.probing_until.is_none_or(|until| until <= now) =>
            {
                self.probing_until = Some(now + *lease);
            }
            SinkChange::ProbeFailed { trouble, error } if probed => {
                self.failed_probes += 1;
                self.reason = Some(trouble.reason());
                self.probe_at = trouble.again().map(|again| now + again);
                self.error.clone_from(error);
                self.probing_until = None;
            }
            SinkChange::ProbeIdle { again } if probed => {
                (self.probe_at, self.probing_until) = (Some(now + *again), None);
            }
            SinkChange::Resume if probed => {
                (self.reason, self.probe_at, self.probing_until) = (None, None, None);
            }
            SinkChange::Pause { .. }
            | SinkChange::Probe { .. }
            | SinkChange::ProbeFailed { .. }
            | SinkChange::ProbeIdle { .. }
            | SinkChange::Resume => return false,
        }
        self.no += 1;
        true
    }
}

#[derive(Default)]
pub(crate) struct Fake {
    pub(crate) rows: Mutex<BTreeMap<Uuid, Row>>,
    /// So many calls fail as not available.
    pub(crate) away: AtomicUsize,
    /// So many acknowledgements fail, after they were written (in doubt).
    pub(crate) doubtful: AtomicUsize,
    /// A verdict with this text is refused.
    pub(crate) refuses: Mutex<Option<String>>,
    /// How long the next claim's answer takes.
    pub(crate) slow: Mutex<Duration>,
    /// So many claims panic.
    pub(crate) panics: AtomicUsize,
    /// Looks that found nothing and asked when to come again.
    pub(crate) looked: AtomicU64,
    pub(crate) acknowledged: Mutex<Vec<Acknowledgement>>,
    /// What the next pieces of letting go come to; nothing after that.
    pub(crate) wake_deferred: Mutex<VecDeque<Woken>>,
    /// When each was asked for, and from where on.
    pub(crate) wake_deferred_asked: Mutex<Vec<(Instant, Option<String>)>>,
    pub(crate) wake_deferred_fails: AtomicBool,
    pub(crate) leased_most: AtomicUsize,
    /// What the next heartbeats find; `Renewed` after that. With the time each takes.
    pub(crate) beats: Mutex<VecDeque<(Duration, Result<Heartbeat, Error>)>>,
    pub(crate) owners: Mutex<Vec<OwnerId>>,
    pub(crate) retired: Mutex<Vec<OwnerId>>,
    pub(crate) expired: AtomicU64,
    pub(crate) judged: AtomicU64,
    pub(crate) gauges: Mutex<Gauges>,
    pub(crate) sinks: Mutex<BTreeMap<String, PlayedSink>>,
    /// The changes that were made.
    pub(crate) changes: Mutex<Vec<SinkChange>>,
}

fn no<T>() -> Result<T, Error> {
    Err(Error::Unavailable("not in this store".into()))
}

impl Fake {
    pub(crate) fn add(&self, payload: &str) -> Uuid {
        let id = Uuid::new_v4();
        self.add_row(id, payload, |_| {});
        id
    }

    pub(crate) fn add_row(&self, id: Uuid, payload: &str, change: impl Fn(&mut Row)) {
        let now = Instant::now();
        let mut row = Row {
            sink: "main",
            lane: Lane::Fresh,
            due: now,
            leased: now,
            claim_no: 0,
            attempts: 0,
            refusals: 0,
            status: EventStatus::Pending,
            error: String::new(),
            written: now,
            payload: Bytes::copy_from_slice(payload.as_bytes()),
        };
        change(&mut row);
        self.rows.lock().unwrap().insert(id, row);
    }

    pub(crate) fn row(&self, id: Uuid) -> Row {
        self.rows.lock().unwrap()[&id].clone()
    }

    pub(crate) fn count(&self, status: EventStatus) -> usize {
        self.rows.lock().unwrap().values().filter(|row| row.status == status).count()
    }

    pub(crate) fn state(&self, sink: &str) -> PlayedSink {
        let open = PlayedSink {
            no: 0,
            reason: None,
            probe_at: None,
            probing_until: None,
            failed_probes: 0,
            error: String::new(),
        };
        self.sinks.lock().unwrap().get(sink).cloned().unwrap_or(open)
    }

    fn reachable(&self) -> Result<(), Error> {
        let take = |left: usize| left.checked_sub(1);
        match self.away.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take) {
            Ok(_) => Err(Error::Unavailable("away".into())),
            Err(_) => Ok(()),
        }
    }

    fn take(&self, claim: &Claim) -> Vec<Claimed> {
        let now = Instant::now();
        let mut rows = self.rows.lock().unwrap();
        let mut due: Vec<_> = rows
            .iter_mut()
            .filter(|(_, row)| row.status == EventStatus::Pending && row.lane == claim.lane)
            .filter(|(_, row)| row.sink == claim.sink && row.due <= now && row.leased <= now)
            .collect();
        due.sort_by_key(|(_, row)| row.due);
        if let (Look::From(share), [(_, oldest), .., (_, newest)]) = (claim.look, &due[..]) {
            let share = f64::from(share) / f64::from(u16::MAX);
            let place = oldest.due + (newest.due - oldest.due).mul_f64(share);
            due.retain(|(_, row)| row.due >= place);
        }
        due.truncate(usize::try_from(claim.limit).unwrap());
        let claimed: Vec<Claimed> = due
            .into_iter()
            .map(|(id, row)| {
                row.leased = now + claim.lease;
                row.claim_no += 1;
                Claimed {
                    event_id: *id,
                    claim_no: row.claim_no,
                    attempts: row.attempts,
                    refusals: row.refusals,
                    age: now - row.written,
                    kind: "order.created".into(),
                    tenant: "t".into(),
                    operation: "orders.create".into(),
                    key: "k".into(),
                    payload: row.payload.clone(),
                }
            })
            .collect();
        let leased = rows
            .values()
            .filter(|row| row.status == EventStatus::Pending && row.leased > now)
            .count();
        self.leased_most.fetch_max(leased, Ordering::SeqCst);
        claimed
    }

    fn settle(row: &mut Row, verdict: &Verdict) {
        let now = Instant::now();
        row.leased = now;
        match verdict {
            Verdict::Sent { .. } => {
                (row.status, row.attempts) = (EventStatus::Sent, row.attempts + 1)
            }
            Verdict::Retry { delay, error, .. } => {
                row.attempts += 1;
                row.lane = Lane::Retry;
                row.due = now + *delay;
                row.error.clone_from(error);
            }
            Verdict::Refused { delay, error, .. } => {
                row.attempts += 1;
                row.refusals += 1;
                row.lane = Lane::Retry;
                row.due = now + *delay;
                row.error.clone_from(error);
            }
            Verdict::Returned { delay, error, .. } => {
                row.lane = Lane::Retry;
                row.due = now + *delay;
                row.error.clone_from(error);
            }
            Verdict::Dead { error, .. } => {
                row.status = EventStatus::Dead;
                row.error.clone_from(error);
            }
            Verdict::GivenBack => {}
        }
    }
}

impl Layer for Fake {
    fn beneath(&self) -> Result<&dyn Store, Error> {
        no()
    }
}

impl RecordsLayer for Fake {
    async fn heartbeat(&self, owner: OwnerId, _: Duration) -> Result<Heartbeat, Error> {
        self.owners.lock().unwrap().push(owner);
        let scripted = self.beats.lock().unwrap().pop_front();
        let Some((time, result)) = scripted else { return Ok(Heartbeat::Renewed) };
        tokio::time::sleep(time).await;
        result
    }

    async fn retire(&self, owner: OwnerId) -> Result<(), Error> {
        self.retired.lock().unwrap().push(owner);
        Ok(())
    }

    async fn mark_dead(&self, _: Option<(&Scope, Fence)>, _: u32) -> Result<u64, Error> {
        self.judged.fetch_add(1, Ordering::SeqCst);
        Ok(0)
    }

    async fn unannounced(&self, _: Unannounced, _: u32) -> Result<Vec<Notice>, Error> {
        self.reachable().map(|()| Vec::new())
    }

    async fn sweep_records(&self, limit: u32) -> Result<u64, Error> {
        self.reachable()?;
        let left = self.expired.load(Ordering::SeqCst);
        let rows = left.min(u64::from(limit));
        self.expired.fetch_sub(rows, Ordering::SeqCst);
        Ok(rows)
    }

    async fn sweep_leases(&self) -> Result<u64, Error> {
        self.reachable().map(|()| 0)
    }
}

impl OutboxLayer for Fake {
    async fn claim(&self, claim: &Claim) -> Result<Vec<Claimed>, Error> {
        let take = |left: usize| left.checked_sub(1);
        if self.panics.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take).is_ok() {
            panic!("as told");
        }
        self.reachable()?;
        let claimed = self.take(claim);
        let slow = std::mem::take(&mut *self.slow.lock().unwrap());
        tokio::time::sleep(slow).await;
        Ok(claimed)
    }

    async fn acknowledge(
        &self,
        _: &str,
        _: Order,
        verdicts: &[Acknowledgement],
    ) -> Result<Vec<Uuid>, Error> {
        self.reachable()?;
        let refuses = self.refuses.lock().unwrap().clone();
        for verdict in verdicts {
            let (Verdict::Retry { error, .. } | Verdict::Dead { error, .. }) = &verdict.verdict
            else {
                continue;
            };
            if refuses.as_ref().is_some_and(|text| error.contains(text)) {
                return Err(Error::Refused("text".into()));
            }
        }
        let mut rows = self.rows.lock().unwrap();
        let mut current = Vec::new();
        for verdict in verdicts {
            let row = rows.get_mut(&verdict.event_id).unwrap();
            if row.claim_no == verdict.claim_no && row.status == EventStatus::Pending {
                Self::settle(row, &verdict.verdict);
                current.push(verdict.event_id);
            }
        }
        self.acknowledged.lock().unwrap().extend_from_slice(verdicts);
        let take = |left: usize| left.checked_sub(1);
        match self.doubtful.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take) {
            Ok(_) => Err(Error::InDoubt("cut".into())),
            Err(_) => Ok(current),
        }
    }

    async fn wake_deferred(&self, _: &str, _: Order, from: Option<&str>) -> Result<Woken, Error> {
        let asked = (Instant::now(), from.map(str::to_owned));
        self.wake_deferred_asked.lock().unwrap().push(asked);
        if self.wake_deferred_fails.load(Ordering::SeqCst) {
            return Err(Error::Refused("as told".into()));
        }
        Ok(self.wake_deferred.lock().unwrap().pop_front().unwrap_or_default())
    }

    async fn next_due(&self, sink: &str) -> Result<Option<Duration>, Error> {
        let now = Instant::now();
        self.looked.fetch_add(1, Ordering::SeqCst);
        let rows = self.rows.lock().unwrap();
        let waiting =
            rows.values().filter(|row| row.status == EventStatus::Pending && row.sink == sink);
        Ok(waiting.map(|row| row.due.max(row.leased) - now).min())
    }

    async fn sweep_events(&self, _: Duration, _: u32) -> Result<u64, Error> {
        self.reachable().map(|()| 0)
    }
}

impl SinksLayer for Fake {
    async fn sinks(&self, _: Reclaim) -> Result<Vec<SinkState>, Error> {
        self.reachable()?;
        let now = Instant::now();
        let state = |(sink, state): (&String, &PlayedSink)| SinkState {
            sink: sink.clone(),
            no: state.no,
            since: std::time::SystemTime::UNIX_EPOCH,
            pause: state.reason.map(|reason| Pause {
                reason,
                probe: match (state.probing_until, state.probe_at) {
                    (Some(until), _) => NextProbe::UnderWay { over_in: until - now },
                    (None, Some(at)) => NextProbe::In(at - now),
                    (None, None) => NextProbe::Never,
                },
                failed_probes: state.failed_probes,
                note: None,
            }),
            last_error: Some(state.error.clone()),
        };
        Ok(self.sinks.lock().unwrap().iter().map(state).collect())
    }

    async fn change_sink(
        &self,
        sink: &str,
        no: i64,
        change: &SinkChange,
    ) -> Result<Changed, Error> {
        self.reachable()?;
        let mut state = self.state(sink);
        if !state.change(no, change) {
            return Ok(Changed::No);
        }
        self.sinks.lock().unwrap().insert(sink.to_owned(), state);
        self.changes.lock().unwrap().push(change.clone());
        Ok(Changed::Yes)
    }

    async fn operate_sink(
        &self,
        sink: &str,
        order: SinkOrder,
        _: &Operator,
    ) -> Result<Changed, Error> {
        let mut state = self.state(sink);
        state.no += 1;
        state.reason = (order == SinkOrder::Pause).then_some(PauseReason::Operator);
        (state.probe_at, state.probing_until) = (None, None);
        self.sinks.lock().unwrap().insert(sink.to_owned(), state);
        Ok(Changed::Yes)
    }
}

impl OperatorsLayer for Fake {
    async fn ping(&self) -> Result<(), Error> {
        self.reachable()
    }

    async fn gauges(&self) -> Result<Gauges, Error> {
        self.reachable()?;
        Ok(self.gauges.lock().unwrap().clone())
    }
}
