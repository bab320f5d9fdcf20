//! The state of a sink, in the words of the store: one state for all replicas, and the changes that lead from one to the next.
//!
//! ```text
//! open --Pause--> paused (failing, busy) --Probe--> probed --Resume--> open
//!   |                 ^                               |
//!   |                 +----- ProbeFailed, ProbeIdle --+
//!   +--Pause--> paused (gone) <--- ProbeFailed -------+
//! ```
//!
//! What must stay true: each change names the number under which the state was read, and changes nothing where it has moved on.
//! So of many replicas one pauses, and one probes. An operator pauses what is open or paused, and resumes what is paused, at
//! any time: a probe that is under way then changes nothing any more.

use std::time::{Duration, SystemTime};

use super::layer::verbs;
use super::{Changed, Operator, Reclaim};
use crate::record::OwnerId;

verbs! {
/// The state of each sink.
pub trait Sinks, layered by SinksLayer {
    /// The states of the sinks that were ever paused. `reclaim` says which probes count as ended.
    async fn sinks(&self, reclaim: Reclaim) -> Result<Vec<SinkState>, Error>;

    /// Makes a sink's state the next one, under the next number. `Changed::No`: it is not at this number any more, the change
    /// does not lead on from there, or (of a probe) its time has not come.
    async fn change_sink(&self, sink: &str, no: i64, change: &SinkChange) -> Result<Changed, Error>;

    /// Pauses or resumes a sink by hand, whatever a relay is about to make of it. Audited. `Changed::No`: it is so already.
    async fn operate_sink(
        &self,
        sink: &str,
        order: SinkOrder,
        by: &Operator,
    ) -> Result<Changed, Error>;

    /// What went wrong with a sink's deliveries: the error of the one that was tried last of those that are still pending, or
    /// else of the one that died last.
    async fn last_failure(&self, sink: &str) -> Result<Option<String>, Error>;
}
}

/// Why a sink is paused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PauseReason {
    /// Too many deliveries in a row failed. It is probed.
    Failing,
    /// It asked to be left alone for a while (`Retry-After`). It is probed after that.
    Busy,
    /// It answered that it is gone for good (410). Only an operator resumes it.
    Gone,
    /// An operator paused it, and an operator resumes it.
    Operator,
}

impl PauseReason {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Failing, Self::Busy, Self::Gone, Self::Operator];

    /// The value of the column.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Failing => "failing",
            Self::Busy => "busy",
            Self::Gone => "gone",
            Self::Operator => "operator",
        }
    }

    /// From the value of the column.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| reason.as_str() == text)
    }
}

/// The state of a sink. One of which the store knows nothing is open, under the number 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SinkState {
    /// Its name.
    pub sink: String,
    /// The number of this state: each change names it and makes it grow by one.
    pub no: i64,
    /// Since when.
    pub since: SystemTime,
    /// Unless it is open.
    pub pause: Option<Pause>,
    /// What paused it last, or what its last failed probe met.
    pub last_error: Option<String>,
}

/// What is known of a paused sink.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pause {
    /// Why.
    pub reason: PauseReason,
    /// When it is probed.
    pub probe: NextProbe,
    /// Probes in a row that failed, whatever they met.
    pub failed_probes: u32,
    /// The words of the operator who paused it.
    pub note: Option<String>,
}

/// When a paused sink is probed. All by the database's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextProbe {
    /// Not at all: an operator resumes it.
    Never,
    /// Once this time is over.
    In(Duration),
    /// It is being probed.
    UnderWay {
        /// After this time the next probe may be taken, should this one never end.
        over_in: Duration,
    },
}

impl NextProbe {
    /// How long until the next probe may be taken, if ever.
    #[must_use]
    pub fn wait(self) -> Option<Duration> {
        match self {
            Self::Never => None,
            Self::In(wait) | Self::UnderWay { over_in: wait } => Some(wait),
        }
    }
}

/// What keeps a sink from being delivered to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// It fails; probed after this long.
    Failing {
        /// From now.
        again: Duration,
    },
    /// It asked to be left alone for this long.
    Busy {
        /// From now.
        again: Duration,
    },
    /// It is gone for good.
    Gone,
}

impl Trouble {
    /// The reason of the pause.
    #[must_use]
    pub fn reason(self) -> PauseReason {
        match self {
            Self::Failing { .. } => PauseReason::Failing,
            Self::Busy { .. } => PauseReason::Busy,
            Self::Gone => PauseReason::Gone,
        }
    }

    /// When it is probed.
    #[must_use]
    pub fn again(self) -> Option<Duration> {
        match self {
            Self::Failing { again } | Self::Busy { again } => Some(again),
            Self::Gone => None,
        }
    }
}

/// What a relay makes of a sink's state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SinkChange {
    /// Pauses what is open.
    Pause {
        /// Why.
        trouble: Trouble,
        /// What it met.
        error: String,
        /// Probes that count as failed already, of an outage that seemed to be over.
        failed_probes: u32,
    },
    /// Takes the probe of what is paused, where its time has come and nobody has it.
    Probe {
        /// The process that takes it; its probe is worth nothing once its lease has ended.
        owner: OwnerId,
        /// How long it has.
        lease: Duration,
        /// Which probes of others are over.
        reclaim: Reclaim,
    },
    /// The probe that was taken under the number before failed.
    ProbeFailed {
        /// How it goes on.
        trouble: Trouble,
        /// What it met.
        error: String,
    },
    /// The probe is given back: there was nothing to send.
    ProbeIdle {
        /// When there may be.
        again: Duration,
    },
    /// The probe that was taken under the number before went well.
    Resume,
}

/// What an operator makes of a sink's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SinkOrder {
    /// Nothing is delivered until an operator resumes it.
    Pause,
    /// Deliveries go on.
    Resume,
}

impl SinkOrder {
    /// The action in `audit_log`.
    #[must_use]
    pub fn action(self) -> &'static str {
        match self {
            Self::Pause => "sink.pause",
            Self::Resume => "sink.resume",
        }
    }
}
