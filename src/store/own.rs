//! What a process asks in order to look after its own records: whether the database may have gone back, what it still knows
//! of them, and which it shows in progress.

use std::time::{Duration, SystemTime};

use uuid::Uuid;

use crate::record::{Fence, Scope};

/// Which run of which server answers. While it is the same, nothing that was confirmed can be gone; once it is another
/// (the server was restarted, a standby took its place, a backup was restored), something may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Life(pub(super) i64);

/// What became of a record that was to be brought back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reinstated {
    /// It is in progress under its id and attempt again, and the proposal's owner holds it.
    Yes,
    /// Nothing was changed: a record stands under the scope, another one or this very one.
    No,
    /// Nothing was changed: an operator has acted on this record.
    ActedOn,
    /// Nothing was changed, since the proposal's owner has no live lease.
    LeaseEnded,
}

/// Where a look through the records begins; they stand in the order of their creation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whence {
    /// At the oldest.
    Oldest,
    /// At those that were made this long ago, by the database's clock.
    Ago(Duration),
    /// Behind the last one of the piece before.
    After(SystemTime, Uuid),
}

/// A piece of a look for records in progress.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpenPiece {
    /// Those of the owner.
    pub open: Vec<(Scope, Fence)>,
    /// The last record that was looked at; `None`: there are no more.
    pub last: Option<(SystemTime, Uuid)>,
}
