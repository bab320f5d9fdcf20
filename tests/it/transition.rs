//! Where each change leads a record: the table that both stores are held against (`store`).

use oncegate::record::{Attempt, Status};

/// What can happen to a record that exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Change {
    /// The attempt's answer is kept.
    Complete,
    /// The attempt is known not to have executed.
    Release,
    /// Nobody can know any more what the attempt did: its owner lost it, or died.
    MarkUnknown,
    /// The route's policy allows another attempt.
    Retry,
    /// The upstream is asked what became of the attempt: somebody holds the record meanwhile.
    LookUp,
    /// The upstream was asked and knows nothing of the attempt: whoever holds the record goes on to the next one.
    NextAttempt,
    /// An operator says what happened.
    OperatorComplete,
    /// An operator says that nothing happened (for a completed record: that it shall be forgotten).
    OperatorRelease,
    /// The retention is over.
    Expire,
}

impl Change {
    /// All of them.
    pub(crate) const ALL: [Self; 9] = [
        Self::Complete,
        Self::Release,
        Self::MarkUnknown,
        Self::Retry,
        Self::LookUp,
        Self::NextAttempt,
        Self::OperatorComplete,
        Self::OperatorRelease,
        Self::Expire,
    ];
}

/// Where a change leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// To this status.
    Status(Status),
    /// The row is deleted, or taken over under a new id.
    Gone,
}

/// The one transition function: where `change`, made under the current fence, leads from `status`; `None` where it must
/// change nothing.
///
/// An operator acts on `in_progress` only through `unknown`, once the owner's lease has run out.
pub(crate) fn transition(status: Status, attempt: Attempt, change: Change) -> Option<Next> {
    let released =
        if attempt == Attempt::FIRST { Next::Gone } else { Next::Status(Status::Unknown) };
    match (status, change) {
        (Status::InProgress | Status::Unknown, Change::Complete) => {
            Some(Next::Status(Status::Completed))
        }
        (Status::InProgress | Status::Unknown, Change::Release) => Some(released),
        (Status::InProgress, Change::MarkUnknown) => Some(Next::Status(Status::Unknown)),
        (Status::Unknown, Change::Retry | Change::LookUp)
        | (Status::InProgress, Change::NextAttempt) => Some(Next::Status(Status::InProgress)),
        (Status::Unknown, Change::OperatorComplete) => Some(Next::Status(Status::Completed)),
        (Status::Unknown | Status::Completed, Change::OperatorRelease) => Some(Next::Gone),
        (Status::Completed, Change::Expire) => Some(Next::Gone),
        (
            Status::InProgress,
            Change::Retry
            | Change::LookUp
            | Change::OperatorComplete
            | Change::OperatorRelease
            | Change::Expire,
        )
        | (Status::Unknown, Change::MarkUnknown | Change::NextAttempt | Change::Expire)
        | (
            Status::Completed,
            Change::Complete
            | Change::Release
            | Change::MarkUnknown
            | Change::Retry
            | Change::LookUp
            | Change::NextAttempt
            | Change::OperatorComplete,
        ) => None,
    }
}

#[test]
fn a_completed_record_leaves_its_state_only_by_expiry_or_an_operators_release() {
    for change in Change::ALL {
        let next = transition(Status::Completed, Attempt::FIRST, change);
        let may_leave = matches!(change, Change::Expire | Change::OperatorRelease);
        assert_eq!(next, may_leave.then_some(Next::Gone), "{change:?}");
    }
}

#[test]
fn a_later_attempt_that_is_released_stays_remembered() {
    let second = Attempt::FIRST.next();
    assert_eq!(transition(Status::InProgress, Attempt::FIRST, Change::Release), Some(Next::Gone));
    assert_eq!(
        transition(Status::InProgress, second, Change::Release),
        Some(Next::Status(Status::Unknown))
    );
}
