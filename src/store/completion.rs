//! An outcome to be kept, and what became of it.

use std::time::{Duration, SystemTime};

use crate::record::event::Event;
use crate::record::{Answer, Fence, Scope};

/// An outcome to be kept: the answer and its events, written in one transaction.
#[derive(Clone, Debug)]
pub struct Completion {
    /// The record's scope.
    pub scope: Scope,
    /// The attempt that got the answer.
    pub fence: Fence,
    /// What will be replayed.
    pub answer: Answer,
    /// How long, counted from the completion.
    pub retention: Duration,
    /// What is announced.
    pub events: Vec<Event>,
}

/// What became of a [`Completion`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settled {
    /// It is durable.
    Done {
        /// When the answer's retention ends, by the database's clock.
        expires_at: SystemTime,
    },
    /// The record is no longer at this fence, or is completed already: nothing was written, no event either.
    Fenced,
    /// An open transaction of somebody else held the row until the deadline: nothing was written. It may be about to
    /// complete the record with another answer.
    Locked,
}
