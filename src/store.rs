//! What the gateway, the relay and the operator ask of a database, in our verbs.
//!
//! Two implementations, one suite of tests: `postgres` for any number of replicas, `sqlite` for one. What must
//! stay true in both:
//!
//! - A change names its fence (or claim number) and the states it may leave; its row count is read, and "none"
//!   is an answer of its own ([`Changed::No`]), never an error and never ignored.
//! - Times are the database's own clock; callers pass durations.
//! - A reservation is durable when [`Records::reserve`] says `Held`; a completion and its events are one transaction.
//! - An [`Error`] says what may be concluded: nothing happened, or nobody knows.

pub mod awaited;
mod backlog;
pub mod batch;
mod completion;
mod error;
#[cfg(feature = "fault-points")]
pub mod faulty;
mod late;
pub mod layer;
mod operators;
mod outbox;
pub mod postgres;
mod read;
mod records;
mod reduced;
pub mod sealed;
mod sinks;
pub mod sqlite;

use std::sync::Arc;

pub use self::backlog::{Backlog, BacklogChange};
pub use self::completion::{Completion, Settled};
pub use self::error::{Cause, Error, OpenError};
pub use self::late::{LateEnd, LateOutcome};
pub use self::operators::{
    Acted, AttemptRow, AuditRow, Chosen, DeadFilter, EventAction, EventFilter, EventRow, Gauges,
    Objection, Operator, Operators, OperatorsLayer, RecordFilter, RecordRow, Touched,
};
pub use self::outbox::{
    ATTEMPTS_KEPT, Acknowledgement, Claim, Claimed, EventStatus, Lane, Look, OnDead, Order, Outbox,
    OutboxLayer, Reclaim, Verdict, Woken,
};
pub use self::records::{
    Changed, DueLookup, Heartbeat, Incarnation, LookupRule, LookupTrigger, OpenPiece, Proposal,
    Records, RecordsLayer, Reinstated, Reserved, ScanFrom, Takeover, Unannounced, Unresolved,
};
pub use self::reduced::{Written, complete_in_some_form};
pub use self::sinks::{
    NextProbe, Pause, PauseReason, SinkChange, SinkOrder, SinkState, Sinks, SinksLayer, Trouble,
};

/// All that a database does for us. What does only a part of the work names the part.
pub trait Store: Records + Deliveries + Operators {}
impl<T: Records + Deliveries + Operators> Store for T {}

/// What the relay sees of a store.
pub trait Deliveries: Outbox + Sinks {}
impl<T: Outbox + Sinks> Deliveries for T {}

/// The store with a fault point before and after each verb, in builds that have them; else the store.
#[must_use]
pub fn with_fault_points(store: Arc<dyn Store>) -> Arc<dyn Store> {
    #[cfg(feature = "fault-points")]
    let store = faulty::faulty(store);
    store
}
