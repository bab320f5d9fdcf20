//! The store on Postgres: any number of replicas on one database.
//!
//! All guarantees rest on single statements: a reservation is one `INSERT ... ON CONFLICT DO NOTHING` that requires
//! the owner's live lease; every other change is an update or delete that names id, attempt and the states it may
//! leave. What must stay true:
//!
//! - All times are the database's `clock_timestamp()`; the program passes durations.
//! - Plain SQL: no advisory locks, no session state, no LISTEN, unnamed statements (see `connection`), so that a
//!   transaction-pooling PgBouncer may be between.
//! - Nothing indexed changes at a completion, so it is an in-place update.
//! - A row that an application's open transaction holds stops nobody: batches skip it, single changes give up at once.
//! - Locks are taken in one order: rows of a batch sorted by scope or by event id.
//!
//! When the process dies in the middle of a statement, the statement either committed or it did not; leases tell
//! the other replicas, and the reservation's or completion's own words say which it was when it is run again.

pub mod access;
mod complete;
mod connection;
mod connector;
mod events;
mod health;
mod leases;
mod lookups;
mod migrate;
mod notices;
mod operate;
mod order;
mod outbox;
mod own;
mod param;
mod passfile;
mod pool;
mod queue;
mod records;
mod refusal;
mod rights;
mod rows;
mod show;
mod sinks;
mod sqlstate;
mod takeover;
mod tls;
mod write_probe;

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use uuid::Uuid;

use super::batch::{BatchPermit, Batcher};
use super::layer::implement;
use super::{
    Acknowledgement, Acted, AttemptRow, AuditRow, Cause, Changed, Chosen, Claim, Claimed,
    Completion, DeadFilter, DueLookup, Error, EventAction, EventFilter, EventRow, Gauges,
    Heartbeat, Incarnation, LateOutcome, LookupRule, OpenError, OpenPiece, Operator, Operators,
    Order, Outbox, Proposal, Reclaim, RecordFilter, RecordRow, Records, Reinstated, Reserved,
    ScanFrom, Settled, SinkChange, SinkOrder, SinkState, Sinks, Takeover, Touched, Unannounced,
    Unresolved, Woken,
};
use crate::record::event::Event;
use crate::record::event::notice::Notice;
use crate::record::event::subscription::Subscriber;
use crate::record::{Attempt, Fence, OwnerId, Record, RecordId, Scope, Status};
use crate::tasks::{self, Vital};
use access::Access;
use connector::Connector;
use migrate::Schema;
use pool::{Dedicated, Pool};
use write_probe::WriteProbe;

/// How to reach the database.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where it is, and who asks there.
    pub access: Access,
    /// Most connections at a time, the heartbeat's not counted. Two of them belong to reservations and completions.
    pub connections: u32,
    /// How long one statement may take.
    pub statement_timeout: Duration,
    /// How long connecting, or waiting for a free connection, may take.
    pub connect_timeout: Duration,
}

/// A database of Postgres.
pub struct Postgres {
    pool: Pool,
    connector: Connector,
    location: String,
    heartbeats: Dedicated,
    write_probe: Arc<WriteProbe>,
    reservations: Batcher<records::Reservations>,
    completions: Batcher<complete::Completions>,
    swept_to: Mutex<records::Cursor>,
}

/// How long one migration, or the wait for another replica's, may take.
const MIGRATION_TIMEOUT: Duration = Duration::from_secs(3600);

impl Postgres {
    /// Connects. Changes nothing in the database: see [`Postgres::migrate`].
    ///
    /// # Errors
    /// [`OpenError::Away`] where the database is not reached now, [`OpenError::Connect`] where it refuses.
    pub async fn open(settings: Settings) -> Result<Self, OpenError> {
        let (connector, location) = connector(&settings)?;
        let mut first = connector.connect().await.map_err(|cause| unreached(&location, cause))?;
        migrate::warn_of_lost_commits(&mut first).await;
        drop(first);
        let pool = Pool::new(connector.clone(), settings.connections.saturating_sub(2));
        let write_probe = Arc::new(WriteProbe::new(Arc::clone(connector.health()), pool.clone()));
        let permit = BatchPermit::default();
        let (reservations, reserving) =
            Batcher::new(records::Reservations(Dedicated::new(connector.clone())), permit.clone());
        let (completions, completing) =
            Batcher::new(complete::Completions(Dedicated::new(connector.clone())), permit);
        on_a_thread_of_their_own(reserving, completing)
            .map_err(|cause| OpenError::Connect { place: location.clone(), cause })?;
        Ok(Self {
            pool,
            heartbeats: Dedicated::new(connector.clone()),
            connector,
            location,
            write_probe,
            reservations,
            completions,
            swept_to: Mutex::default(),
        })
    }

    /// Brings the schema to the version that this program knows, where that is `allowed`; else only checks it.
    /// The version it has now. Several replicas may do this at once.
    ///
    /// # Errors
    /// [`OpenError::Encoding`], [`OpenError::NewerSchema`], [`OpenError::OlderSchema`] where it is not allowed,
    /// [`OpenError::Migration`], or [`OpenError::Interrupted`] where it may go through another time.
    pub async fn migrate(&self, allowed: bool) -> Result<u32, OpenError> {
        let unreached = |cause| unreached(&self.location, cause);
        let mut connection = self.connector.connect().await.map_err(unreached)?;
        let encoding = migrate::wrong_encoding(&mut connection).await;
        if let Some(found) = encoding.map_err(|error| unreached(error.into()))? {
            return Err(OpenError::Encoding { place: self.location.clone(), found });
        }
        let found = match migrate::look(&mut connection, allowed).await? {
            Schema::Current(version) => return Ok(version),
            Schema::Older(version) => version,
        };
        // As long as it takes: one that is given up in the middle begins again at the next start.
        let connector = self.connector.clone().with_statement_timeout(MIGRATION_TIMEOUT);
        let mut connection = connector.connect().await.map_err(unreached)?;
        migrate::migrate(&mut connection, found).await
    }

    /// What the role lacks to work with a schema that is up to date, a line for each table; none: nothing.
    ///
    /// # Errors
    /// As every read.
    pub async fn lacking_rights(&self) -> Result<Vec<String>, Error> {
        rights::lacking(&self.pool).await
    }

    /// Why the role cannot make the tables of a schema that is older; none: it can.
    ///
    /// # Errors
    /// As every read.
    pub async fn makes_no_tables(&self) -> Result<Option<String>, Error> {
        rights::makes_no_tables(&self.pool).await
    }

    /// Tells the database which sinks there are and what they want, for the events that applications announce there. Writes
    /// only what has changed.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn name_sinks(&self, sinks: &[Subscriber]) -> Result<(), Error> {
        outbox::name_sinks(&self.pool, sinks).await
    }
}

/// Why there is no connection.
fn unreached(place: &str, cause: Cause) -> OpenError {
    let place = place.to_owned();
    if refusal::lasts(&cause) {
        OpenError::Connect { place, cause }
    } else {
        OpenError::Away { place, cause }
    }
}

/// Runs the workers of both batchers, and what drives their connections, on one thread beside the runtime: an answer of the
/// database never queues behind the requests that the last one woke. The thread ends with its workers.
fn on_a_thread_of_their_own(
    reserving: impl Future<Output = ()> + Send + 'static,
    completing: impl Future<Output = ()> + Send + 'static,
) -> Result<(), Cause> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let reserving = tasks::worker(Vital::Reservations, reserving);
    let completing = tasks::worker(Vital::Completions, completing);
    // One that panicked ends alone; its callers get the error that the worker ended.
    tasks::thread(Vital::StoreThread, "store-batches", move || {
        runtime.block_on(async {
            let workers = (tasks::short(reserving), tasks::short(completing));
            drop((workers.0.await, workers.1.await));
        });
    })?;
    Ok(())
}

/// How to reach the database, and where it is, without secrets.
fn connector(settings: &Settings) -> Result<(Connector, String), OpenError> {
    let Settings { access, statement_timeout, connect_timeout, .. } = settings;
    let place = access.location();
    let tls = tls::connector(access.tls())
        .map_err(|cause| OpenError::Connect { place: place.clone(), cause })?;
    Ok((Connector::new(access, tls, *connect_timeout, *statement_timeout), place))
}

implement! { Records for Postgres, self: {
    heartbeat(owner: OwnerId, lease: Duration) -> Heartbeat =
        leases::heartbeat(&self.heartbeats, owner, lease);
    retire(owner: OwnerId) -> () = leases::retire(&self.pool, owner);
    reserve(proposal: Proposal, deadline: Instant) -> Reserved = async {
        self.reservations.submit(proposal, deadline).await?
    };
    take_over(proposal: Proposal, from: Takeover) -> Changed =
        takeover::take_over(&self.pool, &proposal, from);
    raise(proposal: Proposal, fence: Fence) -> Changed =
        takeover::raise(&self.pool, &proposal, fence);
    find(scope: &Scope) -> Option<Record> = records::find(&self.pool, scope);
    complete(completion: Arc<Completion>, deadline: Instant) -> Settled =
        complete::complete(&self.completions, completion, deadline);
    release(scope: &Scope, fence: Fence) -> Changed = records::release(&self.pool, scope, fence);
    mark_unknown(scope: &Scope, fence: Fence) -> Changed =
        records::mark_unknown(&self.pool, scope, fence);
    mark_dead(only: Option<(&Scope, Fence)>, limit: u32) -> u64 = async {
        match only {
            Some((scope, fence)) => records::mark_one_dead(&self.pool, scope, fence).await,
            None => records::mark_dead(&self.pool, limit).await,
        }
    };
    incarnation() -> Incarnation = own::incarnation(&self.pool);
    statuses(ids: &[RecordId]) -> Vec<(Fence, Status)> = own::statuses(&self.pool, ids);
    reinstate(proposal: Proposal, attempt: Attempt) -> Reinstated =
        own::reinstate(&self.pool, &proposal, attempt);
    open_of(owner: OwnerId, from: ScanFrom, limit: u32) -> OpenPiece =
        own::open_of(&self.pool, owner, from, limit);
    due_lookups(rules: &[LookupRule], limit: u32) -> Vec<DueLookup> =
        lookups::due(&self.pool, rules, limit);
    unresolved(id: RecordId) -> Option<Unresolved> = lookups::unresolved(&self.pool, id);
    note_late_outcome(late: &LateOutcome) -> () = complete::note_late(&self.pool, late);
    unannounced(which: Unannounced, limit: u32) -> Vec<Notice> =
        notices::unannounced(&self.pool, which, limit);
    announce(notice: &Notice, event: Option<&Event>) -> Changed =
        notices::announce(&self.pool, notice, event);
    sweep_records(limit: u32) -> u64 = async {
        let from = *self.swept_to.lock();
        let (gone, to) = records::sweep(&self.pool, limit, from).await?;
        *self.swept_to.lock() = to;
        Ok(gone)
    };
    sweep_leases() -> u64 = leases::sweep(&self.pool);
}}

implement! { Outbox for Postgres, self: {
    claim(claim: &Claim) -> Vec<Claimed> = outbox::claim(&self.pool, claim);
    acknowledge(sink: &str, order: Order, verdicts: &[Acknowledgement]) -> Vec<Uuid> =
        outbox::acknowledge(&self.pool, sink, order, verdicts);
    next_due(sink: &str) -> Option<Duration> = outbox::next_due(&self.pool, sink);
    wake_deferred(sink: &str, order: Order, from: Option<&str>) -> Woken =
        order::wake_deferred(&self.pool, sink, order, from);
    sweep_events(retention: Duration, limit: u32) -> u64 =
        outbox::sweep(&self.pool, retention, limit);
}}

implement! { Sinks for Postgres, self: {
    sinks(reclaim: Reclaim) -> Vec<SinkState> = sinks::states(&self.pool, reclaim);
    change_sink(sink: &str, no: i64, change: &SinkChange) -> Changed =
        sinks::change(&self.pool, sink, no, change);
    operate_sink(sink: &str, order: SinkOrder, by: &Operator) -> Changed =
        sinks::operate(&self.pool, sink, order, by);
    last_failure(sink: &str) -> Option<String> = sinks::last_failure(&self.pool, sink);
}}

implement! { Operators for Postgres, self: {
    list_records(filter: &RecordFilter) -> Vec<RecordRow> = show::list_records(&self.pool, filter);
    show_record(id: RecordId) -> Option<RecordRow> = show::show_record(&self.pool, id);
    list_events(filter: &EventFilter) -> Vec<EventRow> = show::list_events(&self.pool, filter);
    operator_release(fence: Fence, completed: bool, by: &Operator) -> Acted =
        operate::release(&self.pool, fence, completed, by);
    operator_complete(completion: &Completion, by: &Operator) -> Acted =
        operate::complete(&self.pool, completion, by);
    redeliver(which: &Chosen, by: &Operator) -> Touched =
        events::act(&self.pool, EventAction::Redeliver, which, by);
    discard(which: &Chosen, by: &Operator) -> Touched =
        events::act(&self.pool, EventAction::Discard, which, by);
    count_dead(which: &DeadFilter) -> u64 = events::count_dead(&self.pool, which);
    attempts_of(event: Uuid) -> Vec<AttemptRow> = events::attempts_of(&self.pool, event);
    audit_of(record: RecordId) -> Vec<AuditRow> = show::audit_of(&self.pool, record);
    acted_on(window: Duration) -> Vec<RecordId> = show::acted_on(&self.pool, window);
    database_id() -> Uuid = show::database_id(&self.pool);
    ping() -> () = async {
        self.reservations.works()?;
        self.completions.works()?;
        // Once more on another connection: the one at hand may be the last of a server that has been failed over.
        match own::incarnation(&self.pool).await {
            Err(Error::Unavailable(_)) => own::incarnation(&self.pool).await?,
            result => result?,
        };
        self.write_probe.writes_work().await
    };
    unreached() -> Option<String> = async { Ok(self.pool.unreached()) };
    gauges() -> Gauges = show::gauges(&self.pool);
}}
