//! The store on Postgres: any number of replicas on one database.
//!
//! All guarantees rest on single statements: a reservation is one `INSERT ... ON CONFLICT DO NOTHING` that requires
//! the owner's live lease; every other change is an update or delete that names id, attempt and the states it may
//! leave. What must stay true:
//!
//! - All times are the database's `clock_timestamp()`; the program passes durations.
//! - Plain SQL: no advisory locks, no session state, no LISTEN, unnamed statements (see `connection`), so that a
//!   transaction-pooling PgBouncer may stand between.
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
mod passfile;
mod pool;
mod queue;
mod records;
mod refusal;
mod rows;
mod show;
mod sinks;
mod sqlstate;
mod takeover;
mod tls;
mod write_probe;

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use parking_lot::Mutex;
use uuid::Uuid;

use super::batch::{BatchPermit, Batcher, RunError};
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
use connection::{Connection, Effect};
use connector::Connector;
use migrate::Schema;
use pool::{Dedicated, Pool, Retryable};
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
    // One that panicked ends alone; its callers are told that the worker ended.
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

/// Asks whether the database takes writes: one that only reads is as good as away.
struct Ping;

#[async_trait]
impl Retryable for Ping {
    type Done = ();

    async fn run(&self, connection: &mut Connection) -> Result<(), RunError> {
        const PING: &str =
            "-- ping\nSELECT current_setting('transaction_read_only') = 'on' AS read_only";
        let rows = connection.run(Effect::Read, PING, &[]).await?;
        if rows.first().is_some_and(|row| row.try_get("read_only").unwrap_or(true)) {
            connection.is_read_only();
            return Err(Error::Unavailable("the database is read-only".into()).into());
        }
        Ok(())
    }
}

#[async_trait]
impl Records for Postgres {
    async fn heartbeat(&self, owner: OwnerId, lease: Duration) -> Result<Heartbeat, Error> {
        leases::heartbeat(&self.heartbeats, owner, lease).await
    }

    async fn retire(&self, owner: OwnerId) -> Result<(), Error> {
        leases::retire(&self.pool, owner).await
    }

    async fn reserve(&self, proposal: Proposal, deadline: Instant) -> Result<Reserved, Error> {
        self.reservations.submit(proposal, deadline).await?
    }

    async fn take_over(&self, proposal: Proposal, from: Takeover) -> Result<Changed, Error> {
        takeover::take_over(&self.pool, &proposal, from).await
    }

    async fn raise(&self, proposal: Proposal, fence: Fence) -> Result<Changed, Error> {
        takeover::raise(&self.pool, &proposal, fence).await
    }

    async fn find(&self, scope: &Scope) -> Result<Option<Record>, Error> {
        records::find(&self.pool, scope).await
    }

    async fn complete(
        &self,
        completion: Arc<Completion>,
        deadline: Instant,
    ) -> Result<Settled, Error> {
        complete::complete(&self.completions, completion, deadline).await
    }

    async fn release(&self, scope: &Scope, fence: Fence) -> Result<Changed, Error> {
        records::release(&self.pool, scope, fence).await
    }

    async fn mark_unknown(&self, scope: &Scope, fence: Fence) -> Result<Changed, Error> {
        records::mark_unknown(&self.pool, scope, fence).await
    }

    async fn mark_dead(&self, only: Option<(&Scope, Fence)>, limit: u32) -> Result<u64, Error> {
        match only {
            Some((scope, fence)) => records::mark_one_dead(&self.pool, scope, fence).await,
            None => records::mark_dead(&self.pool, limit).await,
        }
    }

    async fn incarnation(&self) -> Result<Incarnation, Error> {
        own::incarnation(&self.pool).await
    }

    async fn statuses(&self, ids: &[RecordId]) -> Result<Vec<(Fence, Status)>, Error> {
        own::statuses(&self.pool, ids).await
    }

    async fn reinstate(&self, proposal: Proposal, attempt: Attempt) -> Result<Reinstated, Error> {
        own::reinstate(&self.pool, &proposal, attempt).await
    }

    async fn open_of(
        &self,
        owner: OwnerId,
        from: ScanFrom,
        limit: u32,
    ) -> Result<OpenPiece, Error> {
        own::open_of(&self.pool, owner, from, limit).await
    }

    async fn due_lookups(&self, rules: &[LookupRule], limit: u32) -> Result<Vec<DueLookup>, Error> {
        lookups::due(&self.pool, rules, limit).await
    }

    async fn unresolved(&self, id: RecordId) -> Result<Option<Unresolved>, Error> {
        lookups::unresolved(&self.pool, id).await
    }

    async fn note_late_outcome(&self, late: &LateOutcome) -> Result<(), Error> {
        complete::note_late(&self.pool, late).await
    }

    async fn unannounced(&self, which: Unannounced, limit: u32) -> Result<Vec<Notice>, Error> {
        notices::unannounced(&self.pool, which, limit).await
    }

    async fn announce(&self, notice: &Notice, event: Option<&Event>) -> Result<Changed, Error> {
        notices::announce(&self.pool, notice, event).await
    }

    async fn sweep_records(&self, limit: u32) -> Result<u64, Error> {
        let from = *self.swept_to.lock();
        let (gone, to) = records::sweep(&self.pool, limit, from).await?;
        *self.swept_to.lock() = to;
        Ok(gone)
    }

    async fn sweep_leases(&self) -> Result<u64, Error> {
        leases::sweep(&self.pool).await
    }
}

#[async_trait]
impl Outbox for Postgres {
    async fn claim(&self, claim: &Claim) -> Result<Vec<Claimed>, Error> {
        outbox::claim(&self.pool, claim).await
    }

    async fn acknowledge(
        &self,
        sink: &str,
        order: Order,
        verdicts: &[Acknowledgement],
    ) -> Result<Vec<Uuid>, Error> {
        outbox::acknowledge(&self.pool, sink, order, verdicts).await
    }

    async fn next_due(&self, sink: &str) -> Result<Option<Duration>, Error> {
        outbox::next_due(&self.pool, sink).await
    }

    async fn wake_deferred(
        &self,
        sink: &str,
        order: Order,
        from: Option<&str>,
    ) -> Result<Woken, Error> {
        order::wake_deferred(&self.pool, sink, order, from).await
    }

    async fn sweep_events(&self, retention: Duration, limit: u32) -> Result<u64, Error> {
        outbox::sweep(&self.pool, retention, limit).await
    }
}

#[async_trait]
impl Sinks for Postgres {
    async fn sinks(&self, reclaim: Reclaim) -> Result<Vec<SinkState>, Error> {
        sinks::states(&self.pool, reclaim).await
    }

    async fn change_sink(
        &self,
        sink: &str,
        no: i64,
        change: &SinkChange,
    ) -> Result<Changed, Error> {
        sinks::change(&self.pool, sink, no, change).await
    }

    async fn operate_sink(
        &self,
        sink: &str,
        order: SinkOrder,
        by: &Operator,
    ) -> Result<Changed, Error> {
        sinks::operate(&self.pool, sink, order, by).await
    }

    async fn last_failure(&self, sink: &str) -> Result<Option<String>, Error> {
        sinks::last_failure(&self.pool, sink).await
    }
}

#[async_trait]
impl Operators for Postgres {
    async fn list_records(&self, filter: &RecordFilter) -> Result<Vec<RecordRow>, Error> {
        show::list_records(&self.pool, filter).await
    }

    async fn show_record(&self, id: RecordId) -> Result<Option<RecordRow>, Error> {
        show::show_record(&self.pool, id).await
    }

    async fn list_events(&self, filter: &EventFilter) -> Result<Vec<EventRow>, Error> {
        show::list_events(&self.pool, filter).await
    }

    async fn operator_release(
        &self,
        fence: Fence,
        completed: bool,
        by: &Operator,
    ) -> Result<Acted, Error> {
        operate::release(&self.pool, fence, completed, by).await
    }

    async fn operator_complete(
        &self,
        completion: &Completion,
        by: &Operator,
    ) -> Result<Acted, Error> {
        operate::complete(&self.pool, completion, by).await
    }

    async fn redeliver(&self, which: &Chosen, by: &Operator) -> Result<Touched, Error> {
        events::act(&self.pool, EventAction::Redeliver, which, by).await
    }

    async fn discard(&self, which: &Chosen, by: &Operator) -> Result<Touched, Error> {
        events::act(&self.pool, EventAction::Discard, which, by).await
    }

    async fn count_dead(&self, which: &DeadFilter) -> Result<u64, Error> {
        events::count_dead(&self.pool, which).await
    }

    async fn attempts_of(&self, event: Uuid) -> Result<Vec<AttemptRow>, Error> {
        events::attempts_of(&self.pool, event).await
    }

    async fn audit_of(&self, record: RecordId) -> Result<Vec<AuditRow>, Error> {
        show::audit_of(&self.pool, record).await
    }

    async fn acted_on(&self, window: Duration) -> Result<Vec<RecordId>, Error> {
        show::acted_on(&self.pool, window).await
    }

    async fn database_id(&self) -> Result<Uuid, Error> {
        show::database_id(&self.pool).await
    }

    async fn ping(&self) -> Result<(), Error> {
        self.reservations.works()?;
        self.completions.works()?;
        // Once more on another connection: the one at hand may be the last of a server that has been failed over.
        match self.pool.run(&Ping).await {
            Err(Error::Unavailable(_)) => self.pool.run(&Ping).await?,
            result => result?,
        }
        self.write_probe.writes_work().await
    }

    async fn unreached(&self) -> Result<Option<String>, Error> {
        Ok(self.pool.unreached())
    }

    async fn gauges(&self) -> Result<Gauges, Error> {
        show::gauges(&self.pool).await
    }
}
