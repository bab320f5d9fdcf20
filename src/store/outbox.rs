//! The outbox: events, as the relay claims them and says how their deliveries ended.

use std::time::Duration;

use bytes::Bytes;
use uuid::Uuid;

use super::layer::verbs;
use crate::record::OwnerId;

verbs! {
/// Pending events, and their verdicts.
pub trait Outbox, layered by OutboxLayer {
    /// Claims events that are due; see [`Claim`]. Committed before it returns. Whether `owner` itself lives is not asked.
    ///
    /// With [`Order::Key`] an event is claimed only as the first of its key, and only while no other of its key is claimed.
    /// What comes after it is deferred (`next_attempt_at`), until an acknowledgement in that order makes it due.
    async fn claim(&self, claim: &Claim) -> Result<Vec<Claimed>, Error>;

    /// Writes verdicts, each under its claim number. The ids of those that found their claim still current. `order` is that of
    /// the claims: with a verdict, in one transaction, the next event of its key becomes due.
    async fn acknowledge(
        &self,
        sink: &str,
        order: Order,
        verdicts: &[Acknowledgement],
    ) -> Result<Vec<Uuid>, Error>;

    /// How long until the next event of this sink that is not claimable now could be (a retry's time or a claim's end);
    /// `None`: nothing waits.
    async fn next_due(&self, sink: &str) -> Result<Option<Duration>, Error>;

    /// Makes due what nothing keeps back any more in this order: with [`Order::None`] whatever waits for others of its
    /// ordering key; with [`Order::Key`] the first event of each key whose turn nobody has, and that was deferred behind an
    /// event that went without waking it (by hand, say, or by a relay with another order). Dead events block no key any
    /// more unless `order` says that they do. The pauses of retries stay as they are.
    ///
    /// In pieces, each a short transaction: from the beginning with `None`, then from where the last one ended. To be asked
    /// at the start and from time to time: so a change of the order takes effect though nobody says that it was one.
    async fn wake_deferred(&self, sink: &str, order: Order, from: Option<&str>) -> Result<Woken, Error>;

    /// Deletes events all of whose rows are sent or discarded for longer than `retention`, with their attempts, up to `limit`.
    /// How many.
    async fn sweep_events(&self, retention: Duration, limit: u32) -> Result<u64, Error>;
}
}

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
    pub reclaim: Reclaim,
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
pub enum Reclaim {
    /// Those whose own time has passed.
    Expired,
    /// These, and all whose owner has no live lease. For whoever may take other owners for dead.
    ExpiredOrOrphaned,
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

/// What a verdict writes into the row of its delivery.
pub(super) struct VerdictRow<'a> {
    /// The outcome of one that has ended; else it is due again.
    pub(super) outcome: Option<&'static str>,
    /// After this long; `None`: it is given back as it was.
    pub(super) delay: Option<Duration>,
    pub(super) status: Option<u16>,
    pub(super) error: Option<&'a str>,
    /// How many attempts, and how many refusals, it was: 0 or 1.
    pub(super) counted: (i32, i32),
}

impl Verdict {
    /// What it writes, for both databases.
    pub(super) fn row(&self) -> VerdictRow<'_> {
        let (outcome, delay, counted) = match self {
            Self::Sent { .. } => (Some(EventStatus::Sent), None, (1, 0)),
            Self::Dead { .. } => (Some(EventStatus::Dead), None, (1, 0)),
            Self::Retry { delay, .. } => (None, Some(*delay), (1, 0)),
            Self::Refused { delay, .. } => (None, Some(*delay), (1, 1)),
            Self::Returned { delay, .. } => (None, Some(*delay), (0, 0)),
            Self::GivenBack => (None, None, (0, 0)),
        };
        let (status, error) = match self {
            Self::Sent { status } => (*status, None),
            Self::Dead { status, error }
            | Self::Retry { status, error, .. }
            | Self::Refused { status, error, .. }
            | Self::Returned { status, error, .. } => (*status, Some(error.as_str())),
            Self::GivenBack => (None, None),
        };
        VerdictRow { outcome: outcome.map(EventStatus::as_str), delay, status, error, counted }
    }
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
    /// To be delivered.
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

/// What a piece of [`Outbox::wake_deferred`] came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Woken {
    /// How many events are due now.
    pub count: u64,
    /// From where the next piece goes on; `None`: this was the last.
    pub next: Option<String>,
}

/// How many failed attempts of an event towards a sink are kept at least: those under its last claims. Never more.
pub const ATTEMPTS_KEPT: u32 = 50;
