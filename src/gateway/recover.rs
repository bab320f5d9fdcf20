//! A replica looks after its own: what the database had confirmed to it and does not know any more, and what it shows in
//! progress though nothing here works on it.
//!
//! A standby that takes the primary's place without its last commits, or a backup that is restored, puts the database back.
//! Whatever runs on another server, or on the same one after a new start, may be such a database ([`Incarnation`]). Then all
//! that this process remembers is compared with what the database has. What must stay true:
//!
//! - Each change names a fence, as ever. What is written back never takes the place of another record, and never that of one
//!   that an operator has acted on.
//! - What was executed is completed with its own answer and its own events, or is `unknown`; it is never forgotten without a
//!   word.
//! - A record in progress of this process that has no flight and no remembered answer is `unknown`.
//!
//! When the process dies in the middle, what it has not looked after yet is lost with its memory, as all of it would have been.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::{Mutex, MutexGuard};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::Gateway;
use super::reserve::{Confirmed, ConfirmedCompletion, NumberedEnd, Replay};
use crate::record::{Attempt, Fence, RecordId, Scope, Status};
use crate::store::{
    Changed, Completion, Error, Incarnation, LateOutcome, Proposal, Reinstated, ScanFrom, Settled,
    complete_in_some_form,
};
use crate::tasks;
use crate::telemetry::{WentBack, causes};

/// How often the database is asked which life it is in.
const EVERY: Duration = Duration::from_millis(500);
/// Ends are compared from so long before the last word of the life before. A standby that was further behind is logged.
/// Who removes younger rows by hand, and then restarts the database, gets them back.
const REMEMBERED: Duration = Duration::from_secs(600);
/// For how long after a change connections may still have been at the server before it: what they confirmed is compared, too.
const SETTLING: Duration = Duration::from_secs(15);
/// How many records are compared in one statement.
const COMPARED: usize = 500;
/// How many records are written back at a time.
const AT_ONCE: usize = 16;
/// How long one completion may take.
const TRY: Duration = Duration::from_secs(10);

/// How often records in progress without a flight are looked for, and through how many records one look goes: the way
/// through a million takes an hour and a half.
const ROUND_EVERY: Duration = Duration::from_secs(5);
const ROUND_PIECE: u32 = 1_000;
/// After a change all records made within this time are looked through at once: longer than attempts last.
const BACK: Duration = Duration::from_secs(600);
const BACK_PIECE: u32 = 5_000;

/// What became of one end that the database did not show.
enum Repaired {
    /// Nothing had to be done: it is there, has expired, or an operator has acted on it.
    Nothing,
    /// It is as it was, or as near as can be.
    Done(WentBack),
}

/// What is known of the database, and how far a look is.
struct Watch {
    /// With when it answered last.
    life: Option<(Incarnation, Instant)>,
    change: Option<Change>,
    round: ScanFrom,
    next_round: Instant,
}

/// A change of the database's life that is being looked into.
struct Change {
    since: Instant,
    /// Ends of this time and later are compared.
    back_to: Instant,
    /// The number of the first end that has not been compared.
    from: u64,
    /// Ends whose comparison failed.
    left: Vec<u64>,
    /// Whether the records in progress have been looked through.
    looked_through: bool,
    /// Something was missing.
    went_back: bool,
}

impl Change {
    /// After a life that answered last at `heard`.
    fn begin(heard: Instant) -> Self {
        let (since, left) = (Instant::now(), Vec::new());
        let back_to = heard.checked_sub(REMEMBERED).unwrap_or(heard);
        Self { since, back_to, from: 0, left, looked_through: false, went_back: false }
    }

    fn is_over(&self) -> bool {
        self.since.elapsed() >= SETTLING && self.left.is_empty() && self.looked_through
    }
}

/// The last life whose records were compared: a look that is begun anew goes on from it.
#[derive(Default)]
pub(super) struct LastCompared(Mutex<Option<(Incarnation, Instant)>>);

impl LastCompared {
    fn last(&self) -> MutexGuard<'_, Option<(Incarnation, Instant)>> {
        self.0.lock()
    }
}

/// Looks after this process's records until `stop`.
pub(super) async fn watch(gateway: &Arc<Gateway>, stop: &CancellationToken) {
    let (round, next_round) = (ScanFrom::Oldest, Instant::now() + ROUND_EVERY);
    let life = *gateway.compared.last();
    let mut watch = Watch { life, change: None, round, next_round };
    loop {
        match stop.run_until_cancelled(watch.look(gateway)).await {
            Some(Ok(())) => tasks::ran(),
            Some(Err(error)) => {
                tasks::failed(&causes(&error));
                tracing::debug!(error = %causes(&error), "the own records could not be compared; again later");
            }
            None => return,
        }
        if stop.run_until_cancelled(tokio::time::sleep(EVERY)).await.is_none() {
            return;
        }
    }
}

impl Watch {
    async fn look(&mut self, gateway: &Arc<Gateway>) -> Result<(), Error> {
        let asked = Instant::now();
        let life = gateway.store.incarnation().await?;
        if let Some((before, heard)) = self.life.replace((life, asked))
            && before != life
        {
            tracing::warn!(
                "the database is another one, or began anew: does it know all that it had confirmed?"
            );
            self.change = Some(Change::begin(heard));
        }
        if let Some(change) = &mut self.change {
            let compared = gateway.compare(change).await;
            if change.is_over() {
                if !change.went_back {
                    tracing::info!("the database knows all that it had confirmed to this process");
                }
                self.change = None;
            }
            return compared;
        }
        *gateway.compared.last() = self.life;
        if Instant::now() < self.next_round {
            return Ok(());
        }
        let last = gateway.sweep_orphans(self.round, ROUND_PIECE).await?;
        self.round = last.map_or(ScanFrom::Oldest, |(at, id)| ScanFrom::After(at, id.into()));
        self.next_round = Instant::now() + ROUND_EVERY;
        Ok(())
    }
}

impl Gateway {
    /// Compares what this process knows with what the database has, and mends what differs.
    async fn compare(self: &Arc<Self>, change: &mut Change) -> Result<(), Error> {
        let mut repaired = self.compare_running().await?;
        let (ends, to) = self.single_flight.confirmed().since(change.from, change.back_to);
        let missing = self.missing(&ends).await?;
        let oldest = ends.last().filter(|end| change.from == 0 && end.number > 0);
        let beyond = oldest.is_some_and(|end| missing.last() == Some(&end.number));
        change.from = to;
        let before = std::mem::take(&mut change.left);
        let pending = before.len();
        let missing = before.into_iter().chain(missing).collect();
        let (more, why) = self.repair_all(missing, &mut change.left).await;
        repaired.extend(more);
        if !repaired.is_empty() || change.left.len() != pending {
            log_repairs(&repaired, change.left.len(), why.as_ref());
        }
        if beyond && !repaired.is_empty() {
            tracing::error!(
                "the database went back further than this process remembers: compare older keys with the API's own data"
            );
        }
        change.went_back |= !repaired.is_empty() || !change.left.is_empty();
        if change.left.is_empty() && (!change.looked_through || change.since.elapsed() >= SETTLING)
        {
            let mut from = ScanFrom::Ago(BACK);
            while let Some((at, id)) = self.sweep_orphans(from, BACK_PIECE).await? {
                from = ScanFrom::After(at, id.into());
            }
            change.looked_through = true;
        }
        Ok(())
    }

    /// Writes reservations of running attempts back that are gone.
    async fn compare_running(&self) -> Result<Vec<WentBack>, Error> {
        let running = self.single_flight.running();
        let mut repaired = Vec::new();
        for some in running.chunks(COMPARED) {
            let ids: Vec<RecordId> = some.iter().map(|(fence, _)| fence.id).collect();
            let found = self.store.statuses(&ids).await?;
            let there = |fence: &Fence| {
                found.iter().any(|(at, _)| at.id == fence.id && at.attempt >= fence.attempt)
            };
            for (fence, row) in some.iter().filter(|(fence, _)| !there(fence)) {
                // One that was freed meanwhile is rightly gone, and its own end may have brought it back.
                if !self.single_flight.executes(&row.scope, *fence) {
                    continue;
                }
                if self.single_flight.retrier().reinstate(row, *fence).await? {
                    repaired.push(WentBack::Reservation);
                }
            }
        }
        Ok(repaired)
    }

    /// The numbers of those of these ends, newest first, that the database does not have.
    async fn missing(&self, ends: &[NumberedEnd]) -> Result<Vec<u64>, Error> {
        let mut seen = HashSet::new();
        // The last end of a record is the one that counts.
        let last: Vec<_> = ends.iter().filter(|end| seen.insert(end.fence.id)).collect();
        let mut missing = Vec::new();
        for some in last.chunks(COMPARED) {
            let ids: Vec<RecordId> = some.iter().map(|end| end.fence.id).collect();
            let found: HashMap<RecordId, (Attempt, Status)> = self
                .store
                .statuses(&ids)
                .await?
                .into_iter()
                .map(|(at, status)| (at.id, (at.attempt, status)))
                .collect();
            let gone = some.iter().filter(|end| !has_end(found.get(&end.fence.id), end));
            missing.extend(gone.map(|end| end.number));
        }
        Ok(missing)
    }

    /// Mends these ends, some at a time; what fails is left for later, with the reason of the last one.
    async fn repair_all(
        self: &Arc<Self>,
        missing: Vec<u64>,
        left: &mut Vec<u64>,
    ) -> (Vec<WentBack>, Option<Error>) {
        let (mut tasks, mut repaired, mut why) = (JoinSet::new(), Vec::new(), None);
        let mut numbers = missing.into_iter();
        loop {
            while tasks.len() < AT_ONCE
                && let Some(number) = numbers.next()
            {
                let gateway = Arc::clone(self);
                tasks.spawn(async move { (number, gateway.repair(number).await) });
            }
            match tasks.join_next().await {
                Some(Ok((_, Ok(Repaired::Done(how))))) => {
                    self.metrics.store_went_back(how);
                    repaired.push(how);
                }
                Some(Ok((_, Ok(Repaired::Nothing)))) => {}
                Some(Ok((number, Err(error)))) => {
                    left.push(number);
                    why = Some(error);
                }
                Some(Err(panic)) => tracing::error!(%panic, "an end could not be written again"),
                None => return (repaired, why),
            }
        }
    }

    async fn repair(&self, number: u64) -> Result<Repaired, Error> {
        if self.single_flight.confirmed().is_over(number) {
            return Ok(Repaired::Nothing);
        }
        match self.single_flight.confirmed().get(number) {
            Some(Confirmed::Completed(completed)) => self.restore_completed(*completed).await,
            Some(Confirmed::Unknown(fence, row)) => self.restore_unknown(&row, fence).await,
            None => {
                tracing::error!("an outcome that the database does not know is remembered no more");
                Ok(Repaired::Nothing)
            }
        }
    }

    /// Completes a record with the answer that its caller got, and announces the same events under the same ids.
    async fn restore_completed(&self, completed: ConfirmedCompletion) -> Result<Repaired, Error> {
        let ConfirmedCompletion { mut completion, fingerprint, caller, until } = completed;
        completion.retention = until.saturating_duration_since(Instant::now());
        if completion.retention.is_zero() {
            return Ok(Repaired::Nothing);
        }
        let completion = Arc::new(completion);
        let mut how = WentBack::CompletedAgain;
        let mut settled = self.completed(&completion).await?;
        if settled.is_none() {
            let row = Proposal {
                id: completion.fence.id,
                scope: completion.scope.clone(),
                fingerprint,
                owner: self.single_flight.owner(),
                caller: caller.as_ref().map(ToString::to_string),
                context: None,
                retention: completion.retention,
            };
            match self.store.reinstate(row, completion.fence.attempt).await? {
                Reinstated::Yes => how = WentBack::WrittenBack,
                Reinstated::No => {
                    return self.overtaken(&completion.scope, (&*completion).into()).await;
                }
                Reinstated::ActedOn => return Ok(Repaired::Nothing),
                Reinstated::LeaseEnded => return Err(no_lease()),
            }
            settled = self.completed(&completion).await?;
        }
        let Some(expires_at) = settled else { return Ok(Repaired::Nothing) };
        let record = completion.fence.id;
        tracing::warn!(%record, result = how.as_str(), "an outcome is in the database again");
        let Completion { scope, fence, answer, .. } = Arc::unwrap_or_clone(completion);
        let replay = Replay::new(fence, fingerprint, caller, answer, expires_at, until);
        self.single_flight.remember(&scope, &Arc::new(replay));
        self.wake.notify_one();
        Ok(Repaired::Done(how))
    }

    /// Until when it is kept; `None`: its record is not there to be completed.
    async fn completed(&self, completion: &Arc<Completion>) -> Result<Option<SystemTime>, Error> {
        let completing = complete_in_some_form(&*self.store, completion, Instant::now() + TRY);
        match completing.await?.settled {
            Settled::Done { expires_at } => Ok(Some(expires_at)),
            Settled::Fenced => Ok(None),
            Settled::Locked => Err(held()),
        }
    }

    /// Writes a record back of which nobody knows how it ended.
    async fn restore_unknown(&self, row: &Proposal, fence: Fence) -> Result<Repaired, Error> {
        let proposal = Proposal { owner: self.single_flight.owner(), ..row.clone() };
        match self.store.reinstate(proposal, fence.attempt).await? {
            Reinstated::ActedOn => Ok(Repaired::Nothing),
            Reinstated::LeaseEnded => Err(no_lease()),
            Reinstated::No => {
                let Some(other) = self.instead_of(&row.scope, fence.id).await? else {
                    return Ok(Repaired::Nothing);
                };
                tracing::error!(record = %fence.id, %other, "a record whose outcome is unknown is gone, and its key was used anew: it may be executed twice");
                Ok(Repaired::Done(WentBack::Overtaken))
            }
            Reinstated::Yes => match self.store.mark_unknown(&row.scope, fence).await? {
                Changed::Yes | Changed::No => {
                    tracing::warn!(record = %fence.id, "a record was gone: it is written back, and unknown");
                    Ok(Repaired::Done(WentBack::Unknown))
                }
                Changed::Locked => Err(held()),
            },
        }
    }

    /// What the scope has instead of an outcome that cannot be written back. Another record may be a second execution.
    async fn overtaken(&self, scope: &Scope, late: LateOutcome) -> Result<Repaired, Error> {
        let record = late.fence.id;
        let Some(other) = self.instead_of(scope, record).await? else {
            return Ok(Repaired::Nothing);
        };
        self.store.note_late_outcome(&late).await?;
        self.metrics.late_outcome();
        tracing::error!(%record, %other, "a completed record is gone, and its key was used anew: it may have been executed twice; its outcome is in the audit table");
        Ok(Repaired::Done(WentBack::Overtaken))
    }

    /// The other record that the scope of this one has.
    async fn instead_of(&self, scope: &Scope, id: RecordId) -> Result<Option<RecordId>, Error> {
        let found = self.store.find(scope).await?.map(|record| record.fence.id);
        Ok(found.filter(|found| *found != id))
    }

    /// Ends records that are in progress for this process though nothing here works on them, among a piece of all. The last
    /// one that was looked at, where there are more.
    async fn sweep_orphans(
        self: &Arc<Self>,
        from: ScanFrom,
        limit: u32,
    ) -> Result<Option<(SystemTime, RecordId)>, Error> {
        let piece = self.store.open_of(self.single_flight.owner(), from, limit).await?;
        for (scope, fence) in piece.open {
            // Looked at after the row was: an attempt that begins has its flight before its row, and keeps it longer.
            if self.single_flight.works_on(&scope) {
                continue;
            }
            if let Some(number) = self.single_flight.confirmed().last_of(fence)
                && let Repaired::Done(how) = self.repair(number).await?
            {
                self.metrics.store_went_back(how);
                continue;
            }
            if self.store.mark_unknown(&scope, fence).await? == Changed::Yes {
                tracing::warn!(record = %fence.id, "a record was in progress and nothing in its process worked on it: it is unknown");
                self.metrics.store_went_back(WentBack::Unknown);
            }
        }
        Ok(piece.last.map(|(at, id)| (at, id.into())))
    }
}

/// Whether a record at this attempt and in this status has this end, or has gone on from there.
fn has_end(found: Option<&(Attempt, Status)>, end: &NumberedEnd) -> bool {
    match found {
        None => false,
        Some((_, Status::Completed)) => true,
        Some((at, Status::Unknown | Status::InProgress)) if end.completed => {
            *at > end.fence.attempt
        }
        Some((at, Status::Unknown | Status::InProgress)) => *at >= end.fence.attempt,
    }
}

/// One line for all of them, beside the one that each has.
fn log_repairs(repaired: &[WentBack], left: usize, why: Option<&Error>) {
    let count = |how| repaired.iter().filter(|one| **one == how).count();
    tracing::error!(
        reservations = count(WentBack::Reservation),
        completed_again = count(WentBack::CompletedAgain),
        written_back = count(WentBack::WrittenBack),
        unknown = count(WentBack::Unknown),
        overtaken = count(WentBack::Overtaken),
        left,
        why = why.map(|error| causes(error)),
        "the database went back: it did not know what it had confirmed"
    );
}

fn no_lease() -> Error {
    Error::Unavailable("this process has no lease".into())
}

fn held() -> Error {
    Error::Unavailable("another transaction holds the record".into())
}
