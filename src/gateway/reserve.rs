//! Duplicates meet here: who executes, who waits, who gets a stored answer.
//!
//! The [`SingleFlight`] keeps one flight for each scope that this process works on. The first request of a scope is its
//! [`Leader`] and asks the store ([`SingleFlight::lead`]). Its duplicates are followers: they wait in memory, hold no
//! connection and do not poll the database ([`SingleFlight::follow`]). What a duplicate gets:
//!
//! | the record | the same request | another request | another caller, where only the same may read |
//! | --- | --- | --- | --- |
//! | completed | the stored answer | refused: mismatch | refused: forbidden |
//! | in progress | waits, then refused: in progress | refused: mismatch | waits, since the key may still be freed |
//! | unknown | refused: outcome unknown, or what `on_unknown` says | refused: mismatch | refused: forbidden |
//! | freed while it waited | the answer that freed it, or it asks for itself | refused: mismatch | asks for itself |
//!
//! What must stay true:
//!
//! - A [`Reservation`] is made after its row is committed, and is used up by sending. See `attempt`.
//! - While an end is pending in the retrier, its flight goes on: duplicates on this replica meet it before the database.
//! - Another caller is refused before fingerprints are compared: it learns that the key is taken, and not whether it has
//!   guessed the request.
//! - Followers of an attempt that ends `unknown` are refused; only a duplicate that arrives later starts an attempt.
//! - A [`Leader`] that is dropped (panic, shutdown) ends its flight: its followers look again.

mod acquisition;
mod attempt;
mod cache;
mod confirmed;
mod detached;
mod flight;
mod lookup_guard;
mod recheck;
mod retrier;
mod settled;
mod single_flight;
mod takeover;
mod undo;
mod unfinished;
mod vocabulary;

use std::sync::Arc;
use std::time::Instant;

use self::acquisition::{Acquisition, Decision, POLLS};
pub(super) use self::attempt::{InFlight, Reservation};
pub(super) use self::cache::Replay;
pub(super) use self::confirmed::{Confirmed, ConfirmedCompletion, NumberedEnd};
pub(super) use self::detached::Detached;
use self::flight::Progress;
pub(super) use self::flight::{Follower, Leader, Role};
pub(super) use self::lookup_guard::{LookupGuard, Raised};
pub(super) use self::retrier::{PendingWrite, SettledEnd};
pub use self::single_flight::{MayMarkDead, Settings, SingleFlight};
pub(super) use self::vocabulary::{
    FlightEnd, KeyedRequest, Readers, Refusal, Shared, SharedAnswer, Unreserved,
};

/// Most rounds of "the row moved on, look again" before the store counts as unavailable: each round means that
/// somebody else made progress on this very scope.
const ROUNDS_MAX: u32 = 64;

/// What a keyed request gets.
pub(super) enum Admission {
    /// It is executed, by the holder of this value.
    Execute(Reservation),
    /// The upstream is asked first what became of the attempt before.
    LookUp(LookupGuard),
    /// The stored answer.
    Replay(Arc<Replay>),
    /// The answer of an attempt that ran meanwhile on this replica and was not kept.
    Share(Arc<Shared>),
    /// Neither.
    Refuse(Refusal),
}

impl SingleFlight {
    /// Waits behind a leader until `deadline`. None: the leader left without an end.
    pub(super) async fn follow(
        &self,
        request: &KeyedRequest,
        follower: Follower,
        deadline: Instant,
    ) -> Option<Admission> {
        let Follower { mut progress, flight } = follower;
        let _waiting = self.metrics.waiting();
        let mut running = None;
        let mut other_caller = false;
        let mut may_recheck = flight.recheck_is_due();
        loop {
            let now = progress.borrow_and_update().clone();
            match now {
                Progress::Proposed => {}
                Progress::Running { record, fingerprint, caller } => {
                    other_caller = request.is_other_caller(caller.as_ref());
                    if !other_caller && !fingerprint.same_request(&request.fingerprint) {
                        return Some(Admission::Refuse(Refusal::Mismatch { record }));
                    }
                    running = Some(record);
                }
                Progress::Ended(FlightEnd::Unknown(record)) if other_caller => {
                    return Some(Admission::Refuse(Refusal::Forbidden { record }));
                }
                Progress::Ended(ending) => return ended(request, ending),
            }
            let changed = tokio::time::timeout_at(deadline.into(), progress.changed());
            let changed = tokio::select! {
                changed = changed => changed,
                found = self.recheck(request), if may_recheck && running.is_some() => {
                    may_recheck = false;
                    match found {
                        Some(_) => return found,
                        None => continue,
                    }
                }
            };
            match changed {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return None,
                Err(_) => return Some(self.in_progress(request, running, &flight).await),
            }
        }
    }

    /// Asks the store as the scope's leader, until there is a decision; waits for another replica until `deadline`.
    pub(super) async fn lead(
        &self,
        request: &KeyedRequest,
        mut leader: Leader,
        deadline: Instant,
    ) -> Admission {
        let mut acquisition = Acquisition::new(self, request, &mut leader);
        let mut polls = POLLS;
        let mut decision = acquisition.propose().await;
        for _ in 0..ROUNDS_MAX {
            while let Decision::Wait(record) = decision {
                if Instant::now() >= deadline {
                    return Admission::Refuse(Refusal::InProgress { record: Some(record) });
                }
                let next_look = Instant::now() + polls.pause();
                tokio::time::sleep_until(next_look.min(deadline).into()).await;
                decision = acquisition.recheck().await;
            }
            match decision {
                Decision::Held(held) => {
                    return Admission::Execute(Reservation::new(self, &held, request, leader));
                }
                Decision::LookUp { held, lookup, context } => {
                    return Admission::LookUp(
                        self.lookup_guard(held, request, leader, &lookup, context),
                    );
                }
                Decision::Doubt(undo) => {
                    self.retrier.submit(PendingWrite::Undo(undo), move |ending| leader.end(ending));
                    return Admission::Refuse(Refusal::StoreUnavailable(Unreserved::Perhaps));
                }
                Decision::Replay(replay) => {
                    self.remember(&request.scope, &replay);
                    leader.end(FlightEnd::Kept(Arc::clone(&replay)));
                    return Admission::Replay(replay);
                }
                Decision::Unknown(record, again) => {
                    leader.end(FlightEnd::Unknown(record));
                    return Admission::Refuse(Refusal::OutcomeUnknown { record, again });
                }
                Decision::Refuse(refusal) => {
                    leader.end(FlightEnd::of_refused(refusal));
                    return Admission::Refuse(refusal);
                }
                Decision::Again | Decision::Wait(_) => decision = acquisition.propose().await,
            }
        }
        tracing::warn!("a record kept moving while it was being reserved");
        Admission::Refuse(Refusal::StoreUnavailable(Unreserved::Perhaps))
    }
}

/// A stored answer for the same request; for another one, a mismatch; for another caller neither.
pub(super) fn from_record(request: &KeyedRequest, replay: Arc<Replay>) -> Admission {
    if request.is_other_caller(replay.caller.as_ref()) {
        Admission::Refuse(Refusal::Forbidden { record: replay.fence.id })
    } else if replay.fingerprint.same_request(&request.fingerprint) {
        Admission::Replay(replay)
    } else {
        Admission::Refuse(Refusal::Mismatch { record: replay.fence.id })
    }
}

/// What a follower gets of a flight that has ended. None: it looks again.
fn ended(request: &KeyedRequest, ending: FlightEnd) -> Option<Admission> {
    Some(match ending {
        FlightEnd::Kept(replay) => from_record(request, replay),
        FlightEnd::Shared(shared) if request.shares(shared.caller.as_ref()) => {
            Admission::Share(shared)
        }
        // The key is free again: who gets no share asks for itself.
        FlightEnd::Shared(_) | FlightEnd::LookAgain => return None,
        FlightEnd::Unknown(record) => {
            Admission::Refuse(Refusal::OutcomeUnknown { record, again: None })
        }
        FlightEnd::Unavailable(unreserved) => {
            Admission::Refuse(Refusal::StoreUnavailable(unreserved))
        }
        FlightEnd::BacklogFull => Admission::Refuse(Refusal::BacklogFull),
    })
}
