//! Why an end is still pending, as the error of each try to write it.

use crate::store::Error;

/// Why an end is still pending.
#[derive(Debug, thiserror::Error)]
pub(in crate::gateway) enum Unsettled {
    /// A transaction of somebody else holds the row: what it commits may be another answer.
    #[error("another transaction holds the record")]
    Locked,
    /// No row fitted, and the record could not be read.
    #[error("it is not known what has become of the record of an attempt")]
    Unread(#[source] Error),
    /// The store has not taken it.
    #[error(transparent)]
    Untaken(#[from] Error),
}

impl Unsettled {
    /// Whether the same may succeed another time, with nobody doing anything about it.
    pub(in crate::gateway) fn may_pass(&self) -> bool {
        match self {
            Self::Locked => true,
            Self::Unread(error) | Self::Untaken(error) => error.may_pass(),
        }
    }
}

impl From<Unsettled> for Error {
    fn from(unsettled: Unsettled) -> Self {
        match unsettled {
            Unsettled::Locked => Self::Unavailable(unsettled.into()),
            Unsettled::Unread(error) | Unsettled::Untaken(error) => error,
        }
    }
}
