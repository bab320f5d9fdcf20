//! Single flight: one [`Flight`] for each scope that this process works on, with one leader and any number of followers.
//!
//! What must stay true: a flight is in the map from before its leader asks the store until what that may have written is known
//! or undone. It leaves the map before its followers learn the end: one that looks again finds none that has ended.

use std::collections::HashMap;
use std::collections::hash_map;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use super::cache::{Cache, Replay};
use super::confirmed::ConfirmedEnds;
use super::retrier::{PendingWrite, Retrier};
use super::unfinished::UnfinishedScopes;
use super::vocabulary::{FlightEnd, KeyedRequest};
use crate::gateway::budget::AnswerPermit;
use crate::gateway::spill::Spill;
use crate::record::{Caller, Fence, Fingerprint, LeaseView, OwnerId, RecordId, Scope};
use crate::store::{Backlog, Proposal, Store};
use crate::telemetry::Metrics;
use crate::telemetry::pace::Pace;

/// How often the store is asked, at most, about a record that is being worked on here: the application may have completed
/// it by itself while it still works. Only a duplicate that comes, or is about to be told no, asks.
pub(super) const RECHECK_EVERY: Duration = Duration::from_millis(250);

/// How reservations are made.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How long a reservation may take before the caller is told that the store is unavailable.
    pub reserve_timeout: Duration,
    /// How long the old backend of a statement in doubt may still commit.
    pub doubt_window: Duration,
    /// Bytes of answers kept in memory for replay.
    pub cache_bytes: u64,
}

/// Whether this replica may judge other owners by their leases; see `lease`.
pub type MayJudge = Arc<dyn Fn() -> bool + Send + Sync>;

/// Where the requests of one process meet, by scope.
pub struct SingleFlight {
    pub(super) settings: Settings,
    pub(super) store: Arc<dyn Store>,
    pub(super) lease: LeaseView,
    pub(super) may_judge: MayJudge,
    pub(super) flights: Arc<Flights>,
    pub(super) unfinished: UnfinishedScopes,
    pub(super) cache: Cache,
    pub(super) confirmed: ConfirmedEnds,
    pub(super) retrier: Arc<Retrier>,
    pub(super) backlog: Backlog,
    pub(super) metrics: Arc<Metrics>,
    /// Of lines about requests that could not be reserved.
    pub(super) unreserved: Pace,
}

pub(super) type Flights = Mutex<HashMap<Scope, Arc<Flight>>>;

/// What this process knows of a scope it works on.
pub(super) struct Flight {
    pub(super) progress: watch::Sender<Progress>,
    /// When the store was asked last; at first, when the flight began.
    pub(super) asked_at: Mutex<Instant>,
    /// The attempt that is executed, and all that its row says.
    pub(super) executing: Mutex<Option<(Fence, Arc<Proposal>)>>,
    /// A late answer of an earlier attempt has come meanwhile, and may still be pending.
    pub(super) answered: AtomicBool,
}

impl Flight {
    pub(super) fn executing(&self) -> MutexGuard<'_, Option<(Fence, Arc<Proposal>)>> {
        self.executing.lock()
    }

    /// Whether it is time to ask the store; then it counts as asked.
    pub(super) fn recheck_is_due(&self) -> bool {
        let mut asked_at = self.asked_at.lock();
        let due = asked_at.elapsed() >= RECHECK_EVERY;
        if due {
            *asked_at = Instant::now();
        }
        due
    }
}

/// How far a flight is.
#[derive(Clone)]
pub(super) enum Progress {
    /// Its leader asks the store.
    Proposed,
    /// A record stands under the scope and is being worked on, here or by another replica.
    Running { record: RecordId, fingerprint: Fingerprint, caller: Option<Caller> },
    /// It ended.
    Ended(FlightEnd),
}

/// The sole right to act on a scope in this process. Dropping it ends the flight.
pub(in crate::gateway) struct Leader {
    pub(super) scope: Scope,
    pub(super) flight: Arc<Flight>,
    pub(super) flights: Arc<Flights>,
    pub(super) unfinished: UnfinishedScopes,
    pub(super) ending: FlightEnd,
    /// Of the answer, which stays in memory as long as it is pending.
    pub(super) answer_permit: Option<AnswerPermit>,
    /// Whether a byte of the request may have been sent.
    pub(super) sending: Sending,
    /// How what the store is being asked for is undone: that is pending, should this be dropped meanwhile.
    pub(super) undo: Option<Undo>,
    pub(super) retrier: Arc<Retrier>,
}

/// How what the store may have done is undone; within this time a lost session may still commit it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Undo {
    /// A reservation, or a takeover of an expired record or for a retry.
    Withdraw { fence: Fence, window: Duration },
    /// A takeover for a look-up.
    EndLookup { fence: Fence, window: Duration },
}

impl Undo {
    pub(super) fn of(self, scope: Scope) -> PendingWrite {
        match self {
            Self::Withdraw { fence, window } => PendingWrite::Withdraw { scope, fence, window },
            Self::EndLookup { fence, window } => PendingWrite::EndLookup { scope, fence, window },
        }
    }
}

/// Whether a byte of a request may have been sent: noted before it is. Whoever waits for a lost task reads it.
#[derive(Clone, Debug, Default)]
pub(in crate::gateway) struct Sending(Arc<AtomicBool>);

impl Sending {
    pub(super) fn may_begin(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    pub(in crate::gateway) fn has_begun(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

impl Leader {
    /// Whether a byte of this leader's request may have been sent.
    pub(in crate::gateway) fn sending(&self) -> Sending {
        self.sending.clone()
    }

    /// Ends the flight with this for its followers.
    pub(in crate::gateway) fn end(mut self, ending: FlightEnd) {
        self.ending = ending;
    }

    /// It executes this attempt, whose row says this; none: it does not.
    pub(super) fn executes(&self, fence: Fence, row: Option<&Arc<Proposal>>) {
        *self.flight.executing() = row.map(|row| (fence, Arc::clone(row)));
    }

    /// The same leader, for whoever goes on with it.
    pub(super) fn successor(&self) -> Self {
        Self {
            scope: self.scope.clone(),
            flight: Arc::clone(&self.flight),
            flights: Arc::clone(&self.flights),
            unfinished: self.unfinished.clone(),
            ending: FlightEnd::LookAgain,
            answer_permit: None,
            sending: self.sending.clone(),
            undo: None,
            retrier: self.retrier.clone(),
        }
    }

    pub(super) fn running(
        &self,
        record: RecordId,
        fingerprint: Fingerprint,
        caller: Option<Caller>,
    ) {
        self.flight.progress.send_replace(Progress::Running { record, fingerprint, caller });
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        // Lost while the store was asked. The flight stays until what it may have done is undone: a duplicate that found the
        // record without it would take it for one that may have been sent.
        if let Some(undo) = self.undo.take() {
            let leader = self.successor();
            let pending = undo.of(self.scope.clone());
            self.retrier.submit(pending, move |ending| leader.end(ending));
            return;
        }
        match &self.ending {
            FlightEnd::Unknown(_) => self.unfinished.note(&self.scope),
            FlightEnd::Kept(_) => self.unfinished.forget(&self.scope),
            // A later attempt that did not execute leaves the doubt about those before it.
            FlightEnd::Shared(_)
            | FlightEnd::Unavailable(_)
            | FlightEnd::BacklogFull
            | FlightEnd::LookAgain => {}
        }
        // First out of the map, then the end is published: a follower that looks again finds no ended flight.
        self.flights.lock().remove(&self.scope);
        self.flight.progress.send_replace(Progress::Ended(self.ending.clone()));
    }
}

/// What a follower holds of a flight.
pub(in crate::gateway) struct Follower {
    pub(super) progress: watch::Receiver<Progress>,
    pub(super) flight: Arc<Flight>,
}

/// What a request is in the flight of its scope.
pub(in crate::gateway) enum Role {
    /// In none: there is a stored answer in memory.
    Stored(Arc<Replay>),
    /// Nobody works on the scope in this process: it is the leader now.
    Leader(Leader),
    /// Somebody does.
    Follower(Follower),
}

impl SingleFlight {
    /// The flights of one process before this store.
    pub fn new(
        settings: Settings,
        store: Arc<dyn Store>,
        lease: LeaseView,
        may_judge: MayJudge,
        spill: Spill,
        backlog: Backlog,
        metrics: Arc<Metrics>,
    ) -> Self {
        let cache = Cache::new(settings.cache_bytes);
        // A share of its own beside the answers that are kept for replay.
        let confirmed = ConfirmedEnds::new(settings.cache_bytes / 2);
        let kept = (cache.clone(), confirmed.clone());
        let (asked, counted) = (Arc::clone(&store), Arc::clone(&metrics));
        let retrier = Arc::new(Retrier::new(asked, lease.clone(), kept, spill, counted));
        let (flights, unfinished) = (Arc::default(), UnfinishedScopes::default());
        Self {
            settings,
            store,
            lease,
            may_judge,
            flights,
            unfinished,
            cache,
            confirmed,
            retrier,
            backlog,
            metrics,
            unreserved: Pace::default(),
        }
    }

    /// The retrier, for shutdown.
    pub(in crate::gateway) fn retrier(&self) -> &Retrier {
        &self.retrier
    }

    /// Whether a request may not be begun, because it would emit events and too many are undelivered.
    pub(super) fn backlog_is_full(&self, request: &KeyedRequest) -> bool {
        request.emits_events && self.backlog.is_full()
    }

    /// Whether the record under this scope was last seen running, or its outcome unknown.
    pub(in crate::gateway) fn saw_unfinished(&self, scope: &Scope) -> bool {
        self.unfinished.has(scope)
    }

    /// Keeps a stored answer in memory for replay.
    pub(in crate::gateway) fn remember(&self, scope: &Scope, replay: &Arc<Replay>) {
        self.retrier.remember(scope, replay);
    }

    /// What was confirmed of ended attempts.
    pub(in crate::gateway) fn confirmed(&self) -> &ConfirmedEnds {
        &self.confirmed
    }

    /// Who holds the records of this process now.
    pub(in crate::gateway) fn owner(&self) -> OwnerId {
        self.lease.current().owner
    }

    /// Whether somebody in this process works on the scope, or has its record's end pending.
    pub(in crate::gateway) fn works_on(&self, scope: &Scope) -> bool {
        self.flights.lock().contains_key(scope)
    }

    /// The attempts that are executed in this process, or whose ends are pending.
    pub(in crate::gateway) fn running(&self) -> Vec<(Fence, Arc<Proposal>)> {
        let flights = self.flights.lock();
        flights.values().filter_map(|flight| flight.executing().clone()).collect()
    }

    /// Whether this attempt is executed in this process, or its end is pending, and it is not about to be freed.
    pub(in crate::gateway) fn executes(&self, scope: &Scope, fence: Fence) -> bool {
        let flights = self.flights.lock();
        let executing = flights.get(scope).and_then(|flight| flight.executing().clone());
        executing.is_some_and(|(at, _)| at == fence)
    }

    /// Forgets the answers of records that an operator acted on.
    pub(in crate::gateway) fn forget(&self, records: &[RecordId]) {
        self.cache.forget(records);
    }

    pub(super) fn begin_flight(
        &self,
        vacant: hash_map::VacantEntry<'_, Scope, Arc<Flight>>,
        progress: Progress,
    ) -> Leader {
        let scope = vacant.key().clone();
        let (progress, asked_at) = (watch::Sender::new(progress), Instant::now().into());
        let (executing, answered) = (Mutex::default(), AtomicBool::new(false));
        let flight = Arc::new(Flight { progress, asked_at, executing, answered });
        vacant.insert(Arc::clone(&flight));
        Leader {
            scope,
            flight,
            flights: Arc::clone(&self.flights),
            unfinished: self.unfinished.clone(),
            ending: FlightEnd::LookAgain,
            answer_permit: None,
            sending: Sending::default(),
            undo: None,
            retrier: self.retrier.clone(),
        }
    }

    /// Joins the flight of a scope: as its leader, or behind whoever leads; unless there is a stored answer in memory.
    pub(in crate::gateway) fn join(&self, scope: &Scope) -> Role {
        let mut flights = self.flights.lock();
        // Looked up under the lock: a flight that ends is in the cache before it leaves the map. Of one that goes on, the
        // application may have completed the record, while its answer is still awaited here.
        if let Some(replay) = self.cache.get(scope, Instant::now()) {
            return Role::Stored(replay);
        }
        match flights.entry(scope.clone()) {
            hash_map::Entry::Occupied(flight) => {
                let flight = Arc::clone(flight.get());
                Role::Follower(Follower { progress: flight.progress.subscribe(), flight })
            }
            hash_map::Entry::Vacant(vacant) => {
                Role::Leader(self.begin_flight(vacant, Progress::Proposed))
            }
        }
    }
}
