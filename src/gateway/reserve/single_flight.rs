//! What the flights of one process work with, and what others ask of them.

use std::sync::Arc;
use std::time::Duration;

use super::cache::{Cache, Replay};
use super::confirmed::ConfirmedEnds;
use super::flight::{Flights, Role};
use super::retrier::Retrier;
use super::vocabulary::{KeyedRequest, Refusal, Unreserved};
use crate::gateway::spill::Spill;
use crate::record::{Fence, LeaseView, OwnerId, RecordId, Scope};
use crate::store::{Backlog, Error, Proposal, Store};
use crate::telemetry::pace::Pace;
use crate::telemetry::{Metrics, causes};

/// How reservations are made.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How long a reservation may take before the caller gets 503.
    pub reserve_timeout: Duration,
    /// How long the old backend of a statement in doubt may still commit.
    pub doubt_window: Duration,
    /// Bytes of answers kept in memory for replay.
    pub cache_bytes: u64,
}

/// Whether this replica may take other owners for dead by their leases; see `lease`.
pub type MayMarkDead = Arc<dyn Fn() -> bool + Send + Sync>;

/// Where the requests of one process meet, by scope.
pub struct SingleFlight {
    pub(super) settings: Settings,
    pub(super) store: Arc<dyn Store>,
    pub(super) lease: LeaseView,
    pub(super) may_mark_dead: MayMarkDead,
    pub(super) flights: Arc<Flights>,
    pub(super) cache: Cache,
    pub(super) confirmed: ConfirmedEnds,
    pub(super) retrier: Arc<Retrier>,
    backlog: Backlog,
    pub(super) metrics: Arc<Metrics>,
    /// Of lines about requests that could not be reserved.
    pub(super) unreserved: Pace,
}

impl SingleFlight {
    /// The flights of one process before this store.
    pub fn new(
        settings: Settings,
        store: Arc<dyn Store>,
        lease: LeaseView,
        may_mark_dead: MayMarkDead,
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
        let flights = Arc::new(Flights::new(cache.clone(), Arc::clone(&retrier)));
        Self {
            settings,
            store,
            lease,
            may_mark_dead,
            flights,
            cache,
            confirmed,
            retrier,
            backlog,
            metrics,
            unreserved: Pace::default(),
        }
    }

    /// Joins the flight of a scope; see [`Flights::join`].
    pub(in crate::gateway) fn join(&self, scope: &Scope) -> Role {
        self.flights.join(scope)
    }

    /// Whether nothing new may be begun: while the spill is full, what it comes to might be lost, and while too many events
    /// are undelivered it would add to them.
    pub(super) fn is_full(&self, request: &KeyedRequest) -> bool {
        self.retrier.spill().is_full() || self.backlog_is_full(request)
    }

    fn backlog_is_full(&self, request: &KeyedRequest) -> bool {
        request.emits_events && self.backlog.is_full()
    }

    /// The refusal of what may not be begun now. The store is there: this is no reason to go past it.
    pub(super) fn refuse_if_full(&self, request: &KeyedRequest) -> Option<Refusal> {
        if self.retrier.spill().is_full() {
            tracing::warn!("no reservation is made while the spill is full or cannot be written");
            self.retrier.spill().refused();
            return Some(Refusal::StoreUnavailable(Unreserved::Perhaps));
        }
        if self.backlog_is_full(request) {
            self.metrics.outbox_refused();
            return Some(Refusal::BacklogFull);
        }
        None
    }

    /// The refusal where the store made no reservation.
    pub(super) fn unavailable(&self, error: &Error, unreserved: Unreserved) -> Refusal {
        if let Some(left_out) = self.unreserved.due() {
            tracing::warn!(error = %causes(error), left_out, "no reservation could be made");
        }
        Refusal::StoreUnavailable(unreserved)
    }

    /// The refusal where the database refuses the data: it never holds them, whoever sends them again.
    pub(super) fn not_storable(
        &self,
        request: &KeyedRequest,
        cause: &(dyn std::error::Error + 'static),
    ) -> Refusal {
        if let Some(left_out) = self.unreserved.due() {
            let (operation, error) = (&request.scope.operation, causes(cause));
            tracing::warn!(%operation, error, left_out, "the database refuses to hold a request");
        }
        Refusal::NotStorable
    }

    /// The retrier, for shutdown.
    pub(in crate::gateway) fn retrier(&self) -> &Retrier {
        &self.retrier
    }

    /// Whether the record under this scope was last seen running, or its outcome unknown.
    pub(in crate::gateway) fn saw_unfinished(&self, scope: &Scope) -> bool {
        self.flights.unfinished.has(scope)
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
        self.flights.lock().values().filter_map(|flight| flight.executing()).collect()
    }

    /// Whether this attempt is executed in this process, or its end is pending, and it is not about to be freed.
    pub(in crate::gateway) fn executes(&self, scope: &Scope, fence: Fence) -> bool {
        let executing = self.flights.lock().get(scope).and_then(|flight| flight.executing());
        executing.is_some_and(|(at, _)| at == fence)
    }

    /// Forgets the answers of records that an operator acted on.
    pub(in crate::gateway) fn forget(&self, records: &[RecordId]) {
        self.cache.forget(records);
    }
}
