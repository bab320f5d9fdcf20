//! The words of reservations: what a keyed request asks for, why it is refused, and how a flight ends for its followers.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::cache::Replay;
use crate::record::{Answer, Caller, Fingerprint, OwnerId, RecordId, Scope};
use crate::route::OnUnknown;
use crate::store::Proposal;

/// A keyed request that wants to be executed once.
#[derive(Clone, Debug)]
pub(in crate::gateway) struct KeyedRequest {
    pub(in crate::gateway) scope: Scope,
    pub(in crate::gateway) fingerprint: Fingerprint,
    pub(in crate::gateway) caller: Option<Caller>,
    pub(in crate::gateway) readers: Readers,
    /// What its record keeps of it for events and look-ups.
    pub(in crate::gateway) context: Option<Bytes>,
    pub(in crate::gateway) on_unknown: OnUnknown,
    pub(in crate::gateway) retention: Duration,
    /// Whether its stored outcome may come with events.
    pub(in crate::gateway) emits_events: bool,
}

/// Who gets what another request under the scope came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::gateway) enum Readers {
    /// Everybody within the scope.
    Scope,
    /// Whoever is let before an answer is given (see `rights`). What is not kept goes to the same caller only.
    Subrequest,
    /// The same caller only.
    Caller,
}

impl Readers {
    /// Whether two callers, or their digests, are different ones, where that counts.
    pub(in crate::gateway) fn differ<C: PartialEq>(
        self,
        one: Option<&C>,
        other: Option<&C>,
    ) -> bool {
        match self {
            Self::Scope | Self::Subrequest => false,
            Self::Caller => one != other,
        }
    }
}

impl KeyedRequest {
    /// The row of a record for this request.
    pub(super) fn proposal(&self, id: RecordId, owner: OwnerId) -> Proposal {
        Proposal {
            id,
            scope: self.scope.clone(),
            fingerprint: self.fingerprint,
            owner,
            caller: self.caller.as_ref().map(ToString::to_string),
            context: self.context.clone(),
            retention: self.retention,
        }
    }

    /// Whether this is another caller than the one who made the record, where that counts.
    pub(super) fn is_other_caller(&self, caller: Option<&Caller>) -> bool {
        self.readers.differ(self.caller.as_ref(), caller)
    }

    /// Whether an answer that is not kept, and that this caller got, is this one's too.
    pub(super) fn shares(&self, caller: Option<&Caller>) -> bool {
        match self.readers {
            Readers::Scope => true,
            Readers::Subrequest | Readers::Caller => self.caller.as_ref() == caller,
        }
    }
}

/// The answer of an attempt that is not kept, for those that waited for it.
#[derive(Debug)]
pub(in crate::gateway) struct Shared {
    pub(in crate::gateway) record: RecordId,
    /// Whose attempt it was.
    pub(in crate::gateway) caller: Option<Caller>,
    pub(in crate::gateway) answer: SharedAnswer,
}

/// What the attempt came to.
#[derive(Debug)]
pub(in crate::gateway) enum SharedAnswer {
    /// The upstream's answer, known not to have executed.
    Released(Answer),
    /// Not one byte reached the upstream.
    Unreachable,
}

/// Why a keyed request is neither executed nor answered from a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::gateway) enum Refusal {
    /// The scope has the record of another request.
    Mismatch { record: RecordId },
    /// The scope has the record of another caller's request.
    Forbidden { record: RecordId },
    /// It is still running after the wait.
    InProgress { record: Option<RecordId> },
    /// Nobody knows whether it executed. `again`: when more may be known.
    OutcomeUnknown { record: RecordId, again: Option<Duration> },
    /// No reservation could be made; nothing was forwarded.
    StoreUnavailable(Unreserved),
    /// Too many events are undelivered; nothing was reserved.
    BacklogFull,
    /// The database refuses to hold what has to be kept of the request; nothing was reserved.
    NotStorable,
}

/// Whether a request for which no reservation could be made has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::gateway) enum Unreserved {
    /// The store was away: this request has none, and no record was seen under its scope.
    Certainly,
    /// There may be one, or the scope has another attempt's record.
    Perhaps,
}

/// How a flight ended, for its followers.
#[derive(Clone, Debug)]
pub(in crate::gateway) enum FlightEnd {
    /// With a stored answer.
    Kept(Arc<Replay>),
    /// With an answer that is not kept.
    Shared(Arc<Shared>),
    /// Nobody knows how.
    Unknown(RecordId),
    /// No reservation could be made.
    Unavailable(Unreserved),
    /// None was made, since too many events are undelivered.
    BacklogFull,
    /// Its leader left without an end: look again.
    LookAgain,
}

impl FlightEnd {
    /// The stored answer, where there is one.
    pub(in crate::gateway) fn kept(&self) -> Option<Arc<Replay>> {
        match self {
            Self::Kept(replay) => Some(Arc::clone(replay)),
            Self::Shared(_)
            | Self::Unknown(_)
            | Self::Unavailable(_)
            | Self::BacklogFull
            | Self::LookAgain => None,
        }
    }

    /// Of a leader that was refused.
    pub(super) fn of_refused(refusal: Refusal) -> Self {
        match refusal {
            Refusal::StoreUnavailable(unreserved) => Self::Unavailable(unreserved),
            Refusal::BacklogFull => Self::BacklogFull,
            // Others look for themselves: their request, their caller or what they want kept may be another.
            Refusal::Mismatch { .. }
            | Refusal::Forbidden { .. }
            | Refusal::InProgress { .. }
            | Refusal::OutcomeUnknown { .. }
            | Refusal::NotStorable => Self::LookAgain,
        }
    }
}
