//! What is remembered of a request: its scope, its fingerprint, who works on it and how it ended.
//!
//! A record lives in the store under its scope `(tenant, operation, key)`. Everything that changes it
//! names its [`Fence`], so that a late or woken process changes nothing that is no longer its own.
//!
//! ```text
//!                    released (attempt 1): the row is gone
//!                  ^
//!   reserved ->  in_progress --completed--> completed --expired, or released by an operator--> gone
//!                  |     ^  \                  ^
//!                  | lost|   released          | late outcome of the same attempt,
//!                  v     |   (attempt > 1)     | or an operator's completion
//!                unknown <--/ -----------------+
//!                  |  retried: attempt + 1, back to in_progress; asked about: the same attempt, for the time of the look-up
//!                  +--released by an operator--> gone
//! ```
//!
//! This module and its children are pure: no clock, no runtime, no SQL and no log.

mod answer;
pub mod event;
mod ids;
mod lease;
pub mod lookup;
pub mod outcome;

use std::time::{Duration, SystemTime};

pub use self::answer::{
    Answer, KeptBody, NotHeaders, Spelling, append_headers, decode_headers, encode_headers,
    encoded_length,
};
pub use self::ids::{Caller, KEY_MAX, Key, Operation, OwnerId, RecordId, TENANT_MAX, Tenant};
pub use self::lease::{Lease, LeaseView};
pub use self::lookup::LookupDelay;

/// Where a record is looked up, replayed, listed and swept: never by the key alone.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Scope {
    /// Whose key.
    pub tenant: Tenant,
    /// For which operation.
    pub operation: Operation,
    /// The key itself.
    pub key: Key,
}

/// Which execution of a record: counts from 1 within one id and never goes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Attempt(u32);

impl Attempt {
    /// The attempt that makes the record.
    pub const FIRST: Self = Self(1);

    /// The attempt after this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }

    /// The number as stored.
    #[must_use]
    pub fn number(self) -> u32 {
        self.0
    }

    /// From the number as stored.
    #[must_use]
    pub fn from_number(number: u32) -> Self {
        Self(number)
    }
}

/// What every change of a record must name: an id and an attempt that are still the current ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fence {
    /// The record.
    pub id: RecordId,
    /// The attempt within it.
    pub attempt: Attempt,
}

/// A SHA-256.
pub type Digest = [u8; 32];

/// Names the way in which a canonical hash was made: format version and the route's settings.
pub type RecipeId = [u8; 8];

/// Bytes in lower-case hexadecimal digits.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What makes two requests the same request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint {
    /// Hash of the canonical request, by the recipe.
    pub canonical: Digest,
    /// Hash of the request as received: decides where the recipes differ.
    pub raw: Digest,
    /// Which recipe made `canonical`.
    pub recipe: RecipeId,
}

impl Fingerprint {
    /// Whether both are the same request. Under one recipe the canonical hash decides; across a change of recipe the raw hash.
    #[must_use]
    pub fn same_request(&self, other: &Self) -> bool {
        if self.recipe == other.recipe {
            self.canonical == other.canonical
        } else {
            self.raw == other.raw
        }
    }
}

/// The column `status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// Reserved by an owner that has not settled it yet.
    InProgress,
    /// Executed, or not: nobody knows.
    Unknown,
    /// Executed; the answer is kept until it expires.
    Completed,
}

impl Status {
    /// All of them, for lists and filters.
    pub const ALL: [Self; 3] = [Self::InProgress, Self::Unknown, Self::Completed];

    /// The value of the column.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::InProgress => "in_progress",
            Self::Unknown => "unknown",
            Self::Completed => "completed",
        }
    }

    /// From the value of the column.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|status| status.as_str() == text)
    }
}

/// A completed record's answer with the end of its retention.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completed {
    /// What is replayed.
    pub answer: Answer,
    /// When the retention ends, by the database's clock; callers get it in a header.
    pub expires_at: SystemTime,
    /// What was left of the retention when the row was read, by the database's clock; zero: it has expired.
    pub time_left: Duration,
}

/// The state of a record, as the gateway reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Somebody works on it.
    InProgress {
        /// Who.
        owner: OwnerId,
        /// Whether the owner's lease had not run out when the row was read, by the database's clock.
        owner_lives: bool,
    },
    /// Nobody knows what the attempt did.
    Unknown,
    /// It ended.
    Completed(Box<Completed>),
}

/// A record as the gateway reads it when it meets a duplicate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its id and current attempt.
    pub fence: Fence,
    /// The request that made it.
    pub fingerprint: Fingerprint,
    /// Who asked for its current attempt.
    pub caller: Option<Caller>,
    /// Its state.
    pub state: State,
}
