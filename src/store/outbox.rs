//! What the relay and the operators say to a store about events: claims and verdicts, lists and actions.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use uuid::Uuid;

use crate::record::{OwnerId, RecordId, Scope};

/// Which events a claim takes.
#[derive(Clone, Debug)]
pub struct Claim {
    /// Of this sink.
    pub sink: String,
    /// Fresh ones, or those that failed before.
    pub lane: Lane,
    /// In which order the sink gets them.
    pub order: Order,
    /// At most as many as the sink has free slots.
    pub limit: u32,
    /// The process that claims; the claim is worth nothing once its lease has ended.
    pub owner: OwnerId,
    /// For how long they belong to this claim.
    pub lease: Duration,
    /// Which claims of others are over.
    pub over: Over,
    /// At which of those that are due.
    pub look: Look,
}

/// Which of the events that are due a claim looks at. Each look begins with the one that has been due longest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// At those that became due a short while ago: spares the dead end of a long index.
    Quick,
    /// At all.
    Complete,
    /// At those from a place on that lies between the one that has been due longest (0) and the one that became due last
    /// (`u16::MAX`), in parts of the time between them. It looks once: where all that it meets has to wait, it finds nothing
    /// though a complete look would.
    From(u16),
}

/// In which order a sink gets its events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Order {
    /// In none: each goes out as soon as it is due.
    #[default]
    None,
    /// Those of one ordering key one after the other, over all relays. Events without a key as in `None`.
    Key(OnDead),
}

/// What becomes of the events behind one that is dead, within its ordering key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OnDead {
    /// They are delivered.
    #[default]
    Free,
    /// They wait until it is redelivered and taken, or no longer dead for another reason.
    Block,
}

/// Which claims are over, so that what they hold may be claimed anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Over {
    /// Those whose own time has passed.
    Ended,
    /// These, and all whose owner has no live lease. For whoever may judge other owners.
    EndedOrDead,
}

/// The two queues of a sink, so that a backlog of retries never starves fresh events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lane {
    /// Never tried.
    Fresh,
    /// Tried and failed, or redelivered on request.
    Retry,
}

/// An event that is claimed, with all that a delivery needs.
#[derive(Clone, Debug)]
pub struct Claimed {
    /// The event's id: the same in all attempts.
    pub event_id: Uuid,
    /// The fence of this claim: every verdict names it.
    pub claim_no: i32,
    /// Attempts that finished and failed.
    pub attempts: u32,
    /// How many of them the sink answered by refusing this very event.
    pub refusals: u32,
    /// How long ago the event was written, by the database's clock.
    pub age: Duration,
    /// The event's type.
    pub kind: String,
    /// Whose.
    pub tenant: String,
    /// The operation.
    pub operation: String,
    /// The idempotency key.
    pub key: String,
    /// The message, exactly as it is sent and signed.
    pub payload: Bytes,
}

/// How a claimed delivery ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The sink took it.
    Sent {
        /// The sink's status, where it has such.
        status: Option<u16>,
    },
    /// It failed and is tried again.
    Retry {
        /// After this long.
        delay: Duration,
        /// The sink's status, where there was one.
        status: Option<u16>,
        /// What went wrong, at most 1 KiB of text without NUL.
        error: String,
    },
    /// The sink refused this very event, and it is tried again: a failed attempt that is counted as a refusal, too.
    Refused {
        /// After this long.
        delay: Duration,
        /// The sink's status, where there was one.
        status: Option<u16>,
        /// What it said.
        error: String,
    },
    /// It failed through no fault of its own: no attempt used, but it is known what was met. It goes behind all that is due.
    Returned {
        /// Due after this long.
        delay: Duration,
        /// The sink's status, where there was one.
        status: Option<u16>,
        /// What went wrong.
        error: String,
    },
    /// It failed for good: kept, listed, redelivered on request.
    Dead {
        /// The sink's status, where there was one.
        status: Option<u16>,
        /// What went wrong.
        error: String,
    },
    /// It was not sent: free at once, no attempt used.
    GivenBack,
}

/// A verdict under the claim it belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acknowledgement {
    /// Which event.
    pub event_id: Uuid,
    /// Under which claim.
    pub claim_no: i32,
    /// How it ended.
    pub verdict: Verdict,
}

/// The status of an event towards one sink.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventStatus {
    /// Owed.
    Pending,
    /// Delivered.
    Sent,
    /// Given up, kept.
    Dead,
    /// No sink wanted it, or an operator gave it up.
    Discarded,
}

impl EventStatus {
    /// All of them, for filters.
    pub const ALL: [Self; 4] = [Self::Pending, Self::Sent, Self::Dead, Self::Discarded];

    /// The value of the column.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Sent => "sent",
            Self::Dead => "dead",
            Self::Discarded => "discarded",
        }
    }

    /// From the value of the column.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|status| status.as_str() == text)
    }
}

/// Which events a list shows; newest first.
#[derive(Clone, Debug, Default)]
pub struct EventFilter {
    /// Only this event (one row per sink).
    pub id: Option<Uuid>,
    /// Only of this record.
    pub record: Option<RecordId>,
    /// Only of this tenant.
    pub tenant: Option<String>,
    /// Only of this operation.
    pub operation: Option<String>,
    /// Only under this idempotency key.
    pub key: Option<String>,
    /// Only of this type.
    pub kind: Option<String>,
    /// Only towards this sink.
    pub sink: Option<String>,
    /// Only in this status.
    pub status: Option<EventStatus>,
    /// Only those made within this long.
    pub since: Option<Duration>,
    /// Only those after this one in the list's order: time, event and sink of the last row of the page before.
    pub after: Option<(SystemTime, Uuid, String)>,
    /// At most this many.
    pub limit: u32,
}

/// A row of `outbox_events`: an event towards one sink.
#[derive(Clone, Debug)]
pub struct EventRow {
    /// The event's id.
    pub id: Uuid,
    /// Its key.
    pub event_key: String,
    /// Its type.
    pub kind: String,
    /// Its record's scope.
    pub scope: Scope,
    /// Its record.
    pub record: RecordId,
    /// Towards which sink; empty: none wanted it.
    pub sink: String,
    /// Its ordering key.
    pub ordering_key: Option<String>,
    /// The message.
    pub payload: Bytes,
    /// How it stands.
    pub status: EventStatus,
    /// Attempts that finished and failed, and the one that succeeded.
    pub attempts: u32,
    /// When it is due.
    pub next_attempt_at: Option<SystemTime>,
    /// What went wrong last.
    pub last_error: Option<String>,
    /// When it was written.
    pub created_at: SystemTime,
    /// How long ago that was, by the database's clock.
    pub age: Duration,
    /// When it was delivered.
    pub sent_at: Option<SystemTime>,
    /// Whether it is dead and the events behind it in its ordering key wait for it.
    pub blocks: bool,
}

/// What an operator does to events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventAction {
    /// They are due again.
    Redeliver,
    /// They are given up for good.
    Discard,
}

impl EventAction {
    /// As the audit table calls it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Redeliver => "event.redeliver",
            Self::Discard => "event.discard",
        }
    }
}

/// Upon which events an operator acts.
#[derive(Clone, Debug)]
pub enum Chosen {
    /// One event, towards one sink, or all.
    One {
        /// The event.
        id: Uuid,
        /// Towards which sink; `None`: all.
        sink: Option<String>,
    },
    /// One event, towards the sinks that have not taken it: where it is owed, or dead.
    NotTaken {
        /// The event.
        id: Uuid,
    },
    /// Dead ones, all at once.
    Dead(DeadFilter),
}

/// What an operator's action came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Touched {
    /// How many rows were changed: an event towards two sinks is two.
    pub count: u64,
    /// Of one event: each sink towards which it was changed, and how it stood there before.
    pub sinks: Vec<(String, EventStatus)>,
}

impl Touched {
    /// One event, towards these sinks.
    pub(super) fn one(sinks: Vec<(String, EventStatus)>) -> Self {
        Self { count: sinks.len() as u64, sinks }
    }

    /// So many rows of many events.
    pub(super) fn many(count: u64) -> Self {
        Self { count, sinks: Vec::new() }
    }
}

/// What a piece of [`Store::let_go`](super::Store::let_go) came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LetGo {
    /// How many events are due now.
    pub count: u64,
    /// From where the next piece goes on; `None`: this was the last.
    pub next: Option<String>,
}

/// Which dead events.
#[derive(Clone, Debug, Default)]
pub struct DeadFilter {
    /// Only towards this sink.
    pub sink: Option<String>,
    /// Only of this type.
    pub kind: Option<String>,
    /// Only of this tenant.
    pub tenant: Option<String>,
    /// Only of this operation.
    pub operation: Option<String>,
    /// Only those made within this long.
    pub since: Option<Duration>,
}

impl DeadFilter {
    /// As the audit table tells it, with how many it came to.
    pub(super) fn detail(&self, changed: u64) -> String {
        serde_json::json!({
            "status": EventStatus::Dead.as_str(), "sink": self.sink, "type": self.kind, "tenant": self.tenant,
            "operation": self.operation, "since_seconds": self.since.map(|since| since.as_secs()), "count": changed,
        })
        .to_string()
    }
}

/// An attempt of an event towards a sink that has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttemptRow {
    /// Towards which sink.
    pub sink: String,
    /// Under which claim. Grows over all attempts, also over a redelivery.
    pub claim_no: i32,
    /// Which attempt. Counted anew after a redelivery.
    pub attempt: u32,
    /// When it ended, by the database's clock.
    pub at: SystemTime,
    /// The sink's status, where there was one.
    pub status: Option<u16>,
    /// What went wrong; `None`: the sink took it.
    pub error: Option<String>,
}
