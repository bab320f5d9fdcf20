//! Single flight: one [`Flight`] for each scope that this process works on, with one leader and any number of followers.
//!
//! What must stay true: a flight is in the map from before its leader asks the store until what that may have written is known
//! or undone. It leaves the map before its followers learn the end: one that looks again finds none that has ended.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use super::cache::{Cache, Replay};
use super::retrier::{PendingWrite, Retrier};
use super::undo::Undo;
use super::unfinished::UnfinishedScopes;
use super::vocabulary::FlightEnd;
use crate::gateway::budget::AnswerPermit;
use crate::record::{Caller, Fence, Fingerprint, RecordId, Scope};
use crate::store::Proposal;

/// How often the store is asked, at most, about a record that is being worked on here: the application may have completed
/// it by itself while it still works. Only a duplicate that comes, or is about to be refused, asks.
pub(super) const RECHECK_EVERY: Duration = Duration::from_millis(250);

/// The flights of one process, by scope.
pub(super) struct Flights {
    flights: Mutex<HashMap<Scope, Arc<Flight>>>,
    pub(super) cache: Cache,
    pub(super) unfinished: UnfinishedScopes,
    pub(super) retrier: Arc<Retrier>,
}

/// What this process knows of a scope it works on.
pub(super) struct Flight {
    pub(super) progress: watch::Sender<Progress>,
    /// When the store was asked last; at first, when the flight began.
    asked_at: Mutex<Instant>,
    /// The attempt that is executed, and all that its row says.
    executing: Mutex<Option<(Fence, Arc<Proposal>)>>,
    /// A late answer of an earlier attempt has come meanwhile, and may still be pending.
    pub(super) answered: AtomicBool,
}

/// How far a flight is.
#[derive(Clone)]
pub(super) enum Progress {
    /// Its leader asks the store.
    Proposed,
    /// The scope has a record that is being worked on, here or by another replica.
    Running { record: RecordId, fingerprint: Fingerprint, caller: Option<Caller> },
    /// It ended.
    Ended(FlightEnd),
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

/// What a follower holds of a flight.
pub(in crate::gateway) struct Follower {
    pub(super) progress: watch::Receiver<Progress>,
    pub(super) flight: Arc<Flight>,
}

/// The sole right to act on a scope in this process. Dropping it ends the flight.
pub(in crate::gateway) struct Leader {
    scope: Scope,
    pub(super) flight: Arc<Flight>,
    flights: Arc<Flights>,
    ending: FlightEnd,
    /// Of the answer, which stays in memory as long as it is pending.
    pub(super) answer_permit: Option<AnswerPermit>,
    sending: Sending,
    /// How what the store is being asked for is undone: that is pending, should this be dropped meanwhile.
    pub(super) undo: Option<Undo>,
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

impl Flights {
    pub(super) fn new(cache: Cache, retrier: Arc<Retrier>) -> Self {
        let (flights, unfinished) = (Mutex::default(), UnfinishedScopes::default());
        Self { flights, cache, unfinished, retrier }
    }

    /// Joins the flight of a scope: as its leader, or behind whoever leads; unless there is a stored answer in memory.
    pub(super) fn join(self: &Arc<Self>, scope: &Scope) -> Role {
        let mut flights = self.lock();
        // Looked up under the lock: a flight that ends is in the cache before it leaves the map. Of one that goes on, the
        // application may have completed the record, while its answer is still awaited here.
        if let Some(replay) = self.cache.get(scope, Instant::now()) {
            return Role::Stored(replay);
        }
        match flights.entry(scope.clone()) {
            Entry::Occupied(flight) => {
                let flight = Arc::clone(flight.get());
                Role::Follower(Follower { progress: flight.progress.subscribe(), flight })
            }
            Entry::Vacant(vacant) => {
                let flight = Arc::new(Flight::new(Progress::Proposed));
                vacant.insert(Arc::clone(&flight));
                Role::Leader(self.leader(scope.clone(), flight, Sending::default()))
            }
        }
    }

    /// A late answer has come. Where nobody here works on its scope, its attempt leads a new flight: duplicates wait for
    /// what the answer comes to. Whoever works on the scope is notified, lest it sends the next attempt meanwhile.
    pub(super) fn resume(self: &Arc<Self>, scope: &Scope, running: Progress) -> Option<Leader> {
        match self.lock().entry(scope.clone()) {
            Entry::Vacant(vacant) => {
                let flight = Arc::new(Flight::new(running));
                vacant.insert(Arc::clone(&flight));
                Some(self.leader(scope.clone(), flight, Sending::default()))
            }
            Entry::Occupied(flight) => {
                flight.get().answered.store(true, Ordering::SeqCst);
                None
            }
        }
    }

    fn leader(self: &Arc<Self>, scope: Scope, flight: Arc<Flight>, sending: Sending) -> Leader {
        let (flights, ending) = (Arc::clone(self), FlightEnd::LookAgain);
        Leader { scope, flight, flights, ending, answer_permit: None, sending, undo: None }
    }

    /// The flights, locked.
    pub(super) fn lock(&self) -> MutexGuard<'_, HashMap<Scope, Arc<Flight>>> {
        self.flights.lock()
    }
}

impl Flight {
    fn new(progress: Progress) -> Self {
        let (progress, asked_at) = (watch::Sender::new(progress), Instant::now().into());
        Self { progress, asked_at, executing: Mutex::default(), answered: AtomicBool::new(false) }
    }

    /// The attempt that is executed, or whose end is pending.
    pub(super) fn executing(&self) -> Option<(Fence, Arc<Proposal>)> {
        self.executing.lock().clone()
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
        *self.flight.executing.lock() = row.map(|row| (fence, Arc::clone(row)));
    }

    /// Publishes which record is being worked on.
    pub(super) fn running(&self, record: RecordId, of: Fingerprint, caller: Option<Caller>) {
        let running = Progress::Running { record, fingerprint: of, caller };
        self.flight.progress.send_replace(running);
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        // Lost while the store was asked. The flight stays until what it may have done is undone: a duplicate that found the
        // record without it would take it for one that may have been sent.
        if let Some(undo) = self.undo.take() {
            let (scope, flight) = (self.scope.clone(), Arc::clone(&self.flight));
            let leader = self.flights.leader(scope, flight, self.sending.clone());
            let undo = PendingWrite::Undo(undo);
            return self.flights.retrier.submit(undo, move |ending| leader.end(ending));
        }
        match &self.ending {
            FlightEnd::Unknown(_) => self.flights.unfinished.note(&self.scope),
            FlightEnd::Kept(_) => self.flights.unfinished.forget(&self.scope),
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
